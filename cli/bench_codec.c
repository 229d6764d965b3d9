/* tandem bench codec: measure what the levels of the KV codec do to a model on the caller's texts, print it, and write the
 * quality record by which the programs decide (shared/kv_record.h). */
#include "cli/cli.h"
#include "kernels/bench_codec.h"
#include "shared/tokenizer.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define TEXT_SIZE_MAX    (16u << 20)
#define TEXTS_MAX        256
#define WINDOW_COUNT_MAX 65536

struct codec_settings {
    const char *model, *text, *levels, *record;
    int64_t threads, prefix, continuation, tokens;
    bool json, write;
};

#define FIELD(name) offsetof(struct codec_settings, name)
static const struct config_option OPTIONS[] = {
    {.name = "model",
     .type = CONFIG_STRING,
     .offset = FIELD(model),
     .metavar = "FILE",
     .help = "the GGUF file; its weights are held as f32, 4 bytes each"},
    {.name = "text",
     .type = CONFIG_STRING,
     .offset = FIELD(text),
     .metavar = "FILE",
     .help = "a text to predict; more may follow: --text a.txt b.txt c.txt; at least 3 kinds"},
    {.name = "levels",
     .type = CONFIG_STRING,
     .offset = FIELD(levels),
     .fallback = "l0,l1,l2,l2-k5,l2-5bit",
     .metavar = "LIST",
     .help = "which levels, separated by commas"},
    {.name = "prefix",
     .type = CONFIG_INT,
     .offset = FIELD(prefix),
     .fallback = "256",
     .min = 64,
     .max = 65536,
     .metavar = "TOKENS",
     .help = "whose KV goes through the codec, in each window; whole blocks of 64"},
    {.name = "continuation",
     .type = CONFIG_INT,
     .offset = FIELD(continuation),
     .fallback = "256",
     .min = 2,
     .max = 4096,
     .metavar = "TOKENS",
     .help = "that are predicted behind it; a short text is one shorter window"},
    {.name = "tokens",
     .type = CONFIG_INT,
     .offset = FIELD(tokens),
     .fallback = "0",
     .min = 0,
     .max = 1 << 30,
     .metavar = "TOKENS",
     .help = "at most so many of each text; 0: all"},
    {.name = "threads",
     .type = CONFIG_INT,
     .offset = FIELD(threads),
     .fallback = "0",
     .min = 0,
     .max = 64,
     .metavar = "N",
     .help = "compute threads; 0: all cores"},
    {.name = "write",
     .type = CONFIG_BOOL,
     .offset = FIELD(write),
     .help = "write the record beside the model, as MODEL.codec.json"},
    {.name = "record",
     .type = CONFIG_STRING,
     .offset = FIELD(record),
     .metavar = "FILE",
     .help = "write it there instead"},
    {.name = "json",
     .type = CONFIG_BOOL,
     .offset = FIELD(json),
     .help = "one JSON object instead of a table"},
};
static const struct config_spec SPEC = {
    .program = "tandem bench codec",
    .env_prefix = "TANDEM_BENCH_CODEC",
    .summary = "what the levels of the KV codec do to a model's predictions",
    .usage = "--model FILE --text FILE...",
    .examples = "  tandem bench codec --model model.gguf --text english.txt chinese.txt code.txt --write\n",
    .options = OPTIONS,
    .option_count = TD_COUNT(OPTIONS),
};

struct texts { /* the windows and the ids that they borrow */
    struct codec_window *windows;
    uint32_t window_count, text_count;
    int32_t *ids[TEXTS_MAX];
};

static void texts_free(struct texts *t)
{
    for (uint32_t i = 0; i < t->text_count; i++)
        free(t->ids[i]);
    free(t->windows);
}

static int text_read(const char *path, char **text, size_t *size, struct td_error *err)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return td_fail(err, -TD_ERR_IO, "cannot read %s: %s", path, strerror(errno));
    *text = malloc(TEXT_SIZE_MAX);
    *size = *text ? fread(*text, 1, TEXT_SIZE_MAX, f) : 0;
    bool failed = ferror(f) != 0;
    fclose(f);
    if (*text && !failed && *size > 0)
        return 0;
    free(*text);
    return td_fail(err, *text ? -TD_ERR_IO : -TD_ERR_NOMEM, "cannot read %s: empty, or not readable", path);
}

/* Cut a text's ids into windows; one that is shorter than a window is a window with about half of it as prefix. */
static int cut(const struct codec_settings *s, const int32_t *ids, uint32_t count, const char *path,
               struct texts *t, struct td_error *err)
{
    uint32_t prefix = (uint32_t)s->prefix / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS,
             continuation = (uint32_t)s->continuation;
    if (s->tokens > 0)
        count = TD_MIN(count, (uint32_t)s->tokens);
    if (count < prefix + continuation) {
        prefix = count / 2 / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
        continuation = count - prefix;
    }
    if (prefix == 0)
        return td_fail(err, -TD_ERR_ARG, "cannot measure on %s: %u tokens, at least %d are needed", path,
                       count, 2 * KV_BLOCK_TOKENS);
    for (uint32_t at = 0; at + prefix + continuation <= count; at += prefix + continuation) {
        if (t->window_count == WINDOW_COUNT_MAX)
            return td_fail(err, -TD_ERR_LIMIT, "cannot measure on more than %d windows; lower --tokens",
                           WINDOW_COUNT_MAX);
        t->windows[t->window_count++] = (struct codec_window){ids + at, prefix, continuation};
    }
    return 0;
}

static int text_add(const struct codec_settings *s, const struct tokenizer *tokenizer, const char *path,
                    struct texts *t, struct td_error *err)
{
    char *text = NULL;
    size_t size = 0;
    int rc = text_read(path, &text, &size, err);
    if (rc < 0)
        return rc;
    int32_t *ids = malloc(sizeof *ids * (size + 2)); /* a token has at least one byte */
    int64_t count =
        ids ? tokenizer_encode(tokenizer, text, size, NULL, 0, tokenizer_add_bos(tokenizer), ids, size + 2)
            : -TD_ERR_NOMEM;
    free(text);
    if (count < 0 || (size_t)count > size + 2) {
        free(ids);
        return td_fail(err, count < 0 ? (int)count : -TD_ERR_LIMIT, "cannot tokenise %s", path);
    }
    t->ids[t->text_count++] = ids;
    return cut(s, ids, (uint32_t)count, path, t, err);
}

static int texts_load(const struct codec_settings *s, const struct gguf *file, char **more, int more_count,
                      struct texts *t, struct td_error *err)
{
    struct tokenizer *tokenizer;
    if (more_count >= TEXTS_MAX)
        return td_fail(err, -TD_ERR_LIMIT, "cannot measure on more than %d texts", TEXTS_MAX);
    int rc = tokenizer_create(file, NULL, &tokenizer, err);
    if (rc < 0)
        return rc;
    t->windows = calloc(WINDOW_COUNT_MAX, sizeof *t->windows);
    rc = t->windows ? text_add(s, tokenizer, s->text, t, err)
                    : td_fail(err, -TD_ERR_NOMEM, "cannot measure the codec: out of memory");
    for (int i = 0; i < more_count && rc == 0; i++)
        rc = text_add(s, tokenizer, more[i], t, err);
    tokenizer_destroy(tokenizer);
    return rc;
}

static int levels_parse(const char *text, uint32_t *mask, struct td_error *err)
{
    char name[16];
    for (*mask = 0; *text;) {
        size_t length = strcspn(text, ",");
        const struct kv_level *level = NULL;
        if (length < sizeof name) {
            memcpy(name, text, length);
            name[length] = 0;
            level = kv_level_find(name);
        }
        if (!level)
            return td_fail(err, -TD_ERR_ARG, "--levels %s: want some of %s", text, KV_LEVEL_NAMES);
        *mask |= 1u << (level - KV_LEVEL_LIST);
        text += length + (text[length] == ',');
    }
    return *mask ? 0 : td_fail(err, -TD_ERR_ARG, "--levels: want some of %s", KV_LEVEL_NAMES);
}

static int print_json(const struct kv_record *r)
{
    json_t *levels = json_array();
    for (size_t i = 0; i < KV_LEVELS; i++) {
        const struct kv_level_quality *q = &r->levels[i];
        const char *why = kv_gate(r, &KV_LEVEL_LIST[i]);
        if (q->known)
            json_array_append_new(
                levels,
                json_pack("{s:s,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:b,s:s}", "level", KV_LEVEL_LIST[i].name,
                          "bits_per_value", q->bits_per_value, "encode_gb_s", q->encode_gb_s, "decode_gb_s",
                          q->decode_gb_s, "kl_mean", q->kl_mean, "kl_p99", q->kl_p99, "top1", q->top1,
                          "ppl_change", q->ppl_change, "ppl_change_low", q->ppl_change_low, "ppl_change_high",
                          q->ppl_change_high, "passes", why == NULL, "why", why ? why : ""));
    }
    return cli_print_json(json_pack("{s:I,s:i,s:o}", "tokens", (json_int_t)r->token_count, "texts",
                                    (int)r->text_count, "levels", levels));
}

static int print_table(const struct kv_record *r)
{
    printf("%llu continuation tokens of %u texts; f32 activations; KV of all layers through the codec\n",
           (unsigned long long)r->token_count, r->text_count);
    printf("%-8s %10s %9s %9s %9s %9s %7s  %-32s %s\n", "level", "bits/value", "enc GB/s", "dec GB/s",
           "mean KL", "p99 KL", "top-1", "perplexity (95 % interval)", "no visible loss");
    for (size_t i = 0; i < KV_LEVELS; i++) {
        const struct kv_level_quality *q = &r->levels[i];
        const char *why = kv_gate(r, &KV_LEVEL_LIST[i]);
        if (q->known)
            printf("%-8s %10.3f %9.2f %9.2f %9.6f %9.5f %6.2f%%  %+6.3f %% (%+6.3f .. %+6.3f)      %s\n",
                   KV_LEVEL_LIST[i].name, q->bits_per_value, q->encode_gb_s, q->decode_gb_s, q->kl_mean,
                   q->kl_p99, 100 * q->top1, 100 * q->ppl_change, 100 * q->ppl_change_low,
                   100 * q->ppl_change_high, why ? why : "yes");
    }
    return CLI_OK;
}

static int record_write(const struct codec_settings *s, const struct kv_record *r, struct td_error *err)
{
    char beside[4096];
    if (!s->record[0] && !s->write)
        return 0;
    if (!s->record[0] && kv_record_path(s->model, beside, sizeof beside) < 0)
        return td_fail(err, -TD_ERR_ARG, "cannot write the record: the model's path is too long");
    return kv_record_save(r, s->record[0] ? s->record : beside, err);
}

static int measure(const struct codec_settings *s, struct gguf *file, struct model *m, const struct texts *t,
                   struct kv_record *r, struct td_error *err)
{
    struct bench_codec_options options = {
        .threads = (unsigned)s->threads, .progress = cli_progress, .progress_ctx = (void *)"measuring"};
    int rc = levels_parse(s->levels, &options.level_mask, err);
    rc = rc ? rc : gguf_fingerprint(file, r->fingerprint, NULL, NULL, err);
    float *wide = NULL;
    rc = rc ? rc : bench_codec_widen(m, &wide, err);
    rc = rc ? rc : bench_codec(m, t->windows, t->window_count, &options, r, err);
    free(wide);
    return rc;
}

static int codec(const struct codec_settings *s, char **more, int more_count)
{
    struct td_error err = {0};
    struct gguf *file = NULL;
    struct model *m = NULL;
    struct texts t = {0};
    struct kv_record r = {0};
    int rc = gguf_open(s->model, &file, &err);
    rc = rc ? rc : model_load(file, &m, &err);
    rc = rc ? rc : texts_load(s, file, more, more_count, &t, &err);
    r.text_count = t.text_count;
    rc = rc ? rc : measure(s, file, m, &t, &r, &err);
    rc = rc ? rc : record_write(s, &r, &err);
    int code = rc < 0 ? cli_fail("bench codec", &err) : s->json ? print_json(&r) : print_table(&r);
    texts_free(&t);
    model_free(m);
    gguf_close(file);
    return code;
}

int cli_bench_codec(int argc, char **argv)
{
    struct codec_settings s;
    struct config *config = NULL;
    char **rest = NULL;
    int rest_count = 0, code = CLI_USAGE;
    if (cli_load(&SPEC, argc, argv, &s, &config, &rest, &rest_count, &code) != 0)
        return code;
    if (!s.model[0] || !s.text[0])
        code = cli_usage(&SPEC);
    else
        code = codec(&s, rest, rest_count);
    config_free(config);
    return code;
}
