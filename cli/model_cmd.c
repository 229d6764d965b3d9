/* tandem model: look at, check, name and cut model files. */
#include "cli/cli.h"
#include "kernels/model.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct model_settings {
    bool json;
    const char *layers;
    bool force;
};

static const struct config_option OPTIONS[] = {
    {.name = "json",
     .type = CONFIG_BOOL,
     .offset = offsetof(struct model_settings, json),
     .help = "one JSON object instead of text"},
    {.name = "layers",
     .type = CONFIG_STRING,
     .offset = offsetof(struct model_settings, layers),
     .metavar = "0:K",
     .help = "slice: the layers to keep"},
    {.name = "force",
     .type = CONFIG_BOOL,
     .offset = offsetof(struct model_settings, force),
     .help = "slice: replace OUT if it is there"},
};
static const struct config_spec SPEC = {
    .program = "tandem model",
    .env_prefix = "TANDEM_MODEL",
    .summary = "What a model file is, and slices of it for devices.",
    .usage = "inspect FILE\nfingerprint FILE\nverify FILE\nslice --layers 0:K IN OUT",
    .examples =
        "  tandem model inspect model.gguf\n"
        "  tandem model slice --layers 0:8 model.gguf device.gguf   # what an edge with k = 8 needs\n",
    .options = OPTIONS,
    .option_count = TD_COUNT(OPTIONS),
};

static const char *arch_name(enum model_arch arch)
{
    static const char *const NAMES[] = {
        [MODEL_LLAMA] = "llama", [MODEL_QWEN2] = "qwen2", [MODEL_QWEN3] = "qwen3"};
    return NAMES[arch];
}

/* Bytes by tensor type, in a small table: a file holds a handful of types. */
struct type_use {
    uint32_t type;
    uint64_t count, size;
};
static size_t count_types(const struct gguf *g, struct type_use *use, size_t capacity)
{
    size_t used = 0;
    for (size_t i = 0; i < gguf_tensor_count(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        size_t at = 0;
        while (at < used && use[at].type != t->type)
            at++;
        if (at == capacity)
            continue;
        if (at == used)
            use[used++] = (struct type_use){.type = t->type};
        use[at].count++;
        use[at].size += t->size;
    }
    return used;
}

static json_t *describe(const struct gguf *g, const struct model *m)
{
    const struct model_params *p = &m->params;
    struct type_use use[32];
    json_t *types = json_object();
    size_t used = count_types(g, use, TD_COUNT(use));
    for (size_t i = 0; i < used; i++) {
        const struct gguf_type_info *info = gguf_type_info(use[i].type);
        json_object_set_new(
            types, info ? info->name : "unknown",
            json_pack("{s:I,s:I}", "tensors", (json_int_t)use[i].count, "bytes", (json_int_t)use[i].size));
    }
    char id[2 * TD_HASH_SIZE + 1];
    hex_encode(m->fingerprint, TD_HASH_SIZE, id);
    return json_pack("{s:s,s:s,s:s,s:I,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:f,s:b,s:o}", "file",
                     gguf_path(g), "fingerprint", id, "architecture", arch_name(p->arch), "bytes",
                     (json_int_t)gguf_file_size(g), "layers", p->layer_count, "layers_held", m->layers_held,
                     "embedding", p->embd_size, "ffn", p->ffn_size, "heads", p->head_count, "kv_heads",
                     p->kv_head_count, "head_dim", p->head_dim, "vocabulary", p->vocab_count, "context",
                     p->context_max, "rope_base", (double)p->rope_base, "tied_output", p->tied_output,
                     "types", types);
}

static void print_description(json_t *d)
{
    const char *key;
    json_t *value;
    json_object_foreach(d, key, value)
    {
        if (json_is_object(value))
            continue;
        char *text = json_is_string(value) ? NULL : json_dumps(value, JSON_ENCODE_ANY);
        printf("%-13s %s\n", key, text ? text : json_string_value(value));
        free(text);
    }
    json_object_foreach(json_object_get(d, "types"), key, value)
    {
        char size[32];
        printf("%-13s %lld tensors, %s\n", key,
               (long long)json_integer_value(json_object_get(value, "tensors")),
               cli_bytes((uint64_t)json_integer_value(json_object_get(value, "bytes")), size));
    }
}

static int inspect(struct gguf *g, bool json, struct td_error *err)
{
    struct model *m = NULL;
    if (model_load(g, &m, err) < 0)
        return cli_fail("model inspect", err);
    int rc = gguf_fingerprint(g, m->fingerprint, cli_progress, (char[]){"hashing"}, err);
    json_t *d = rc < 0 ? NULL : describe(g, m);
    model_free(m);
    if (rc < 0)
        return cli_fail("model inspect", err);
    if (json)
        return cli_print_json(d);
    print_description(d);
    json_decref(d);
    return CLI_OK;
}

static int fingerprint(struct gguf *g, bool json, struct td_error *err)
{
    uint8_t hash[TD_HASH_SIZE];
    char text[2 * TD_HASH_SIZE + 1];
    if (gguf_fingerprint(g, hash, cli_progress, (char[]){"hashing"}, err) < 0)
        return cli_fail("model fingerprint", err);
    hex_encode(hash, sizeof hash, text);
    if (json)
        return cli_print_json(json_pack("{s:s}", "fingerprint", text));
    puts(text);
    return CLI_OK;
}

static int slice(struct gguf *g, const struct model_settings *s, const char *out_path, struct td_error *err)
{
    const char *layers = s->layers;
    char *end = NULL;
    unsigned long first = strtoul(layers, &end, 10), last = 0;
    if (end && *end == ':')
        last = strtoul(end + 1, &end, 10);
    if (first != 0 || last == 0 || !end || *end) {
        fprintf(stderr,
                "tandem model slice: --layers %s: want 0:K with K of at least 1, because an edge runs the "
                "bottom layers\n",
                layers);
        return CLI_USAGE;
    }
    if (!s->force && access(out_path, F_OK) == 0) {
        td_fail(err, -TD_ERR_EXISTS, "%s is there already; --force replaces it", out_path);
        return cli_fail("model slice", err);
    }
    if (gguf_slice(g, (uint32_t)last, out_path, cli_progress, (char[]){"slicing"}, err) < 0)
        return cli_fail("model slice", err);
    struct gguf *made = NULL;
    char size[32];
    if (gguf_open(out_path, &made, err) < 0)
        return cli_fail("model slice", err);
    uint64_t bytes = gguf_file_size(made);
    gguf_close(made);
    if (s->json)
        return cli_print_json(json_pack("{s:s,s:I,s:I}", "file", out_path, "layers", (json_int_t)last,
                                        "bytes", (json_int_t)bytes));
    printf("%s: layers 0:%lu, %s\n", out_path, last, cli_bytes(bytes, size));
    return CLI_OK;
}

static int verify(struct gguf *g, const char *path, bool json, struct td_error *err)
{
    if (gguf_verify(g, cli_progress, (char[]){"verifying"}, err) < 0)
        return cli_fail("model verify", err);
    if (json)
        return cli_print_json(json_pack("{s:s,s:b}", "file", path, "matches", 1));
    printf("%s: every tensor matches its digest\n", path);
    return CLI_OK;
}

static int run(const struct model_settings *s, const char *verb, char **paths)
{
    struct td_error err = {0};
    struct gguf *g = NULL;
    int code = CLI_FAILED;
    if (gguf_open(paths[0], &g, &err) < 0)
        code = cli_fail("model", &err);
    else if (!strcmp(verb, "inspect"))
        code = inspect(g, s->json, &err);
    else if (!strcmp(verb, "fingerprint"))
        code = fingerprint(g, s->json, &err);
    else if (!strcmp(verb, "verify"))
        code = verify(g, paths[0], s->json, &err);
    else
        code = slice(g, s, paths[1], &err);
    gguf_close(g);
    return code;
}

int cli_model(int argc, char **argv)
{
    static const char *const verbs[] = {"inspect", "fingerprint", "verify", "slice"};
    struct model_settings s;
    struct config *config = NULL;
    char **rest = NULL;
    int rest_count = 0, code = CLI_USAGE;
    if (cli_load(&SPEC, argc, argv, &s, &config, &rest, &rest_count, &code) != 0)
        return code;
    const char *verb = rest_count > 0 ? rest[0] : "";
    bool known = false, slices = !strcmp(verb, "slice");
    for (size_t i = 0; i < TD_COUNT(verbs); i++)
        known = known || !strcmp(verb, verbs[i]);
    if (known && rest_count == 2 + slices && (!slices || s.layers[0]))
        code = run(&s, verb, rest + 1);
    else
        code = cli_usage_of_verb(&SPEC, rest_count > 0 ? verb : NULL, known);
    config_free(config);
    return code;
}
