/* logits_real: the engine on the real model that the golden data was made with: divergence from the float32 reference beside
 * llama.cpp's, perplexity, greedy text, and the invariance rule at full size. Takes about a minute; skipped when the model
 * is not on this machine (deploy/fetch-model.sh gets it; TANDEM_TEST_MODEL names another place). */
#include "tests/unit/kernels/models.h"
#include <jansson.h>
#include <math.h>
#include <zstd.h>

#define MODEL_FOLDER  "/var/cache/tandem/models"
#define GREEDY_MARGIN 1.0 /* nearer ties may fall either way in an engine that rounds activations */

static json_t *golden;
static char model_path[512];

static bool model_is_here(void)
{
    const char *named = getenv("TANDEM_TEST_MODEL");
    if (named)
        snprintf(model_path, sizeof model_path, "%s", named);
    else
        snprintf(model_path, sizeof model_path, MODEL_FOLDER "/%s",
                 json_string_value(json_object_get(golden, "model")));
    FILE *f = fopen(model_path, "rb");
    if (f)
        fclose(f);
    else
        print_message("skipped: no model at %s; deploy/fetch-model.sh gets it\n", model_path);
    return f != NULL;
}

static uint32_t read_ids(const json_t *array, int32_t *ids, uint32_t most)
{
    uint32_t count = (uint32_t)json_array_size(array);
    assert_true(count <= most);
    for (uint32_t i = 0; i < count; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(array, i));
    return count;
}

static double golden_number(const char *object, const char *key)
{
    return json_number_value(json_object_get(json_object_get(golden, object), key));
}

/* --- divergence and perplexity --------------------------------------------------------------------------------- */

struct listed { /* logits.bin.zst, see tests/golden/FORMAT.md */
    uint8_t *bytes;
    uint32_t position_count, entry_count;
    const uint8_t *rest, *count, *id, *delta;
};

static void listed_read(struct listed *l)
{
    FILE *f = fopen(TEST_DATA "/logits.bin.zst", "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    size_t packed_size = (size_t)ftell(f);
    uint8_t *packed = malloc(packed_size);
    rewind(f);
    assert_int_equal(fread(packed, 1, packed_size, f), packed_size);
    fclose(f);
    size_t size = (size_t)ZSTD_getFrameContentSize(packed, packed_size);
    l->bytes = malloc(size);
    assert_int_equal(ZSTD_decompress(l->bytes, size, packed, packed_size), size);
    free(packed);
    assert_memory_equal(l->bytes, "TDLG\1\0\0\0", 8);
    l->position_count = load_le32(l->bytes + 8), l->entry_count = load_le32(l->bytes + 12);
    l->rest = l->bytes + 16 + 4 * (size_t)l->position_count;
    l->count = l->rest + 4 * (size_t)l->position_count;
    l->id = l->count + 2 * (size_t)l->position_count;
    l->delta = l->id + 2 * (size_t)l->entry_count;
    assert_int_equal(l->delta + 2 * (size_t)l->entry_count - l->bytes, size);
}

static double log_sum_exp(const float *logits, uint32_t count)
{
    double max = -1e30, sum = 0;
    for (uint32_t i = 0; i < count; i++)
        max = fmax(max, (double)logits[i]);
    for (uint32_t i = 0; i < count; i++)
        sum += exp((double)logits[i] - max);
    return max + log(sum);
}

/* The metric of FORMAT.md for one position; *entry moves on. */
static double divergence(const struct listed *l, size_t position, size_t *entry, const float *logits,
                         double lse)
{
    double sum_p = 0, sum_q = 0, kl = 0;
    uint32_t steps = 0;
    for (uint32_t i = load_le16(l->count + 2 * position); i > 0; i--, ++*entry) {
        steps += load_le16(l->delta + 2 * *entry);
        double lp = -(double)steps / 1024, lq = (double)logits[load_le16(l->id + 2 * *entry)] - lse;
        sum_p += exp(lp), sum_q += exp(lq), kl += exp(lp) * (lp - lq);
    }
    float rest;
    memcpy(&rest, l->rest + 4 * position, sizeof rest);
    if (rest > 0)
        kl += (double)rest * log((double)rest / fmax(1 - sum_q, 1e-30));
    return kl + 1 - sum_p - (double)rest;
}

static void divergence_and_perplexity_beside_llama_cpp(void **state)
{
    (void)state;
    if (!model_is_here())
        skip();
    struct listed l;
    struct run r;
    listed_read(&l);
    run_open_path(&r, model_path, 2, NULL, 512);
    float *logits = new_logits(&r, 512);
    uint32_t vocab = r.model->params.vocab_count;
    size_t position = 0, entry = 0;
    double kl = 0, nll = 0;
    const json_t *documents = json_object_get(golden, "documents");
    for (size_t d = 0; d < json_array_size(documents); d++) {
        int32_t ids[512];
        uint32_t count = read_ids(json_object_get(json_array_get(documents, d), "ids"), ids, 512);
        run_chunks(&r, ids, count, count, r.pages, logits);
        for (uint32_t t = 0; t + 1 < count; t++, position++) {
            const float *row = logits + (size_t)t * vocab;
            double lse = log_sum_exp(row, vocab);
            kl += divergence(&l, position, &entry, row, lse);
            nll += lse - (double)row[ids[t + 1]];
        }
    }
    assert_int_equal(position, l.position_count);
    assert_int_equal(entry, l.entry_count);
    double mean = kl / (double)position, perplexity = exp(nll / (double)position);
    double llama_kl = golden_number("llama_cpp", "mean_kl"),
           llama_perplexity = golden_number("llama_cpp", "perplexity");
    print_message(
        "%zu positions: mean KL %.6f (llama.cpp %.6f), perplexity %.4f (llama.cpp %.4f, float32 %.4f)\n",
        position, mean, llama_kl, perplexity, llama_perplexity, golden_number("reference", "perplexity"));
    assert_true(mean <= 1.05 * llama_kl && mean > 0);
    assert_true(fabs(perplexity - llama_perplexity) <= 0.005 * llama_perplexity);
    free(logits), free(l.bytes), run_close(&r);
}

static uint32_t best_token(const float *logits, uint32_t count)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < count; i++)
        best = logits[i] > logits[best] ? i : best;
    return best;
}

static void greedy_text_is_the_references(void **state)
{
    (void)state;
    if (!model_is_here())
        skip();
    struct run r;
    run_open_path(&r, model_path, 2, NULL, 512);
    float *logits = new_logits(&r, 512);
    uint32_t vocab = r.model->params.vocab_count, compared = 0;
    const json_t *prompts = json_object_get(golden, "greedy");
    for (size_t n = 0; n < json_array_size(prompts); n++) {
        const json_t *one = json_array_get(prompts, n), *margins = json_object_get(one, "margins");
        int32_t ids[512];
        uint32_t prompt = read_ids(json_object_get(one, "ids"), ids, 256);
        uint32_t count = read_ids(json_object_get(one, "tokens"), ids + prompt, 256);
        run_chunks(&r, ids, prompt + count, prompt + count, r.pages, logits);
        for (uint32_t i = 0; i < count; i++) {
            if (json_number_value(json_array_get(margins, i)) < GREEDY_MARGIN)
                continue;
            compared++;
            assert_int_equal(best_token(logits + (size_t)(prompt + i - 1) * vocab, vocab), ids[prompt + i]);
        }
    }
    assert_true(compared > 100);
    free(logits), run_close(&r);
}

/* --- invariance ------------------------------------------------------------------------------------------------ */

enum { PROMPT = 512, DECODED = 16, TOTAL = PROMPT + DECODED, KEPT_ROWS = 8 };

/* Logits that are compared: the last KEPT_ROWS of the prompt, then each decoded row, all of one long text. */
struct expected {
    int32_t ids[TOTAL];
    float *logits; /* [KEPT_ROWS + DECODED][vocab] */
    uint32_t vocab;
};

static void long_text(int32_t *ids)
{
    const json_t *documents = json_object_get(golden, "documents");
    uint32_t filled = 0;
    for (size_t d = 0; filled < TOTAL; d += 3) { /* English, code, Chinese */
        const json_t *array = json_object_get(json_array_get(documents, d), "ids");
        for (size_t i = 0; i < json_array_size(array) && filled < TOTAL; i++)
            ids[filled++] = (int32_t)json_integer_value(json_array_get(array, i));
    }
}

/* Rows [at, at + rows) through `lower` up to layer k and `upper` from there (the same run when k is 0); logits of the last `wanted`. */
static void step_split(struct run *lower, struct run *upper, uint32_t k, const int32_t *ids, uint32_t at,
                       uint32_t rows, float *hidden, float *logits, uint32_t wanted)
{
    uint32_t layers = upper->model->params.layer_count;
    struct batch_seq above = {.layer_begin = k,
                              .layer_end = layers,
                              .position = at,
                              .row_count = rows,
                              .pages = upper->pages,
                              .logits = wanted ? logits : NULL,
                              .logit_count = wanted};
    if (k > 0) {
        struct batch_seq below = {.layer_end = k,
                                  .position = at,
                                  .row_count = rows,
                                  .ids = ids + at,
                                  .hidden_out = hidden,
                                  .pages = lower->pages};
        assert_int_equal(run_batch(lower, &below, 1), 0);
        above.hidden_in = hidden;
    } else {
        above.ids = ids + at;
    }
    if (k < layers || wanted) /* at k = L the upper side has nothing but logits to do */
        assert_int_equal(run_batch(upper, &above, 1), 0);
}

static void carry_blocks(struct run *from, struct run *to, uint32_t layers)
{
    const struct model_params *p = &from->model->params;
    size_t values = (size_t)KV_BLOCK_TOKENS * p->kv_head_count * p->head_dim;
    uint16_t *k = calloc(values, 2), *v = calloc(values, 2);
    for (uint32_t block = 0; block < PROMPT / KV_BLOCK_TOKENS; block++)
        for (uint32_t layer = 0; layer < layers; layer++) {
            from->backend->ops->page_read(from->backend, from->pages[block], layer, KV_BLOCK_TOKENS, k, v);
            to->backend->ops->page_write(to->backend, to->pages[block], layer, KV_BLOCK_TOKENS, k, v);
        }
    free(k), free(v);
}

/* Prefill in chunks, split at k, then decode everything on the upper side with the lower side's blocks. */
static void run_split(struct run *lower, struct run *upper, uint32_t k, uint32_t chunk, const int32_t *ids,
                      float *logits, float *hidden)
{
    uint32_t vocab = upper->model->params.vocab_count;
    for (uint32_t at = 0; at < PROMPT;) {
        /* the rows that are compared may lie in several chunks */
        uint32_t rows = TD_MIN(chunk, (uint32_t)PROMPT - at), end = at + rows;
        uint32_t wanted = end > PROMPT - KEPT_ROWS ? TD_MIN(rows, end - (PROMPT - KEPT_ROWS)) : 0;
        float *to = wanted ? logits + (size_t)(end - wanted - (PROMPT - KEPT_ROWS)) * vocab : NULL;
        step_split(lower, upper, k, ids, at, rows, hidden, to, wanted);
        at = end;
    }
    if (k > 0)
        carry_blocks(lower, upper, k);
    for (uint32_t i = 0; i < DECODED; i++)
        step_split(lower, upper, 0, ids, PROMPT + i, 1, hidden, logits + (size_t)(KEPT_ROWS + i) * vocab, 1);
}

static void check_logits(const struct expected *e, const float *got, uint32_t k, uint32_t chunk)
{
    for (uint32_t i = 0; i < KEPT_ROWS + DECODED; i++)
        if (memcmp(got + (size_t)i * e->vocab, e->logits + (size_t)i * e->vocab, sizeof(float) * e->vocab) !=
            0)
            fail_msg("k = %u, chunks of %u: row %u differs", k, chunk, PROMPT - KEPT_ROWS + i);
}

static void chunks_and_splits_change_nothing(void **state)
{
    (void)state;
    if (!model_is_here())
        skip();
    static const struct {
        uint32_t k;
        uint32_t chunks[8];
    } cases[] = {
        {0, {1, 5, 31, 64, 100, 256, 511}}, {8, {3, 64, 512}}, {15, {1, 17, 128, 512}}, {30, {2, 64, 512}}};
    struct run edge, cloud;
    run_open_path(&edge, model_path, 1, NULL, 512);
    run_open_path(&cloud, model_path, 2, NULL, 512);
    struct expected e = {.logits = new_logits(&cloud, KEPT_ROWS + DECODED),
                         .vocab = cloud.model->params.vocab_count};
    float *logits = new_logits(&cloud, KEPT_ROWS + DECODED);
    float *hidden = calloc((size_t)PROMPT * cloud.model->params.embd_size, sizeof *hidden);
    long_text(e.ids);
    run_split(&edge, &edge, 0, PROMPT, e.ids, e.logits, hidden); /* one piece, one thread */
    for (size_t i = 0; i < TD_COUNT(cases); i++)
        for (size_t c = 0; cases[i].chunks[c]; c++) {
            memset(logits, 0, sizeof(float) * (KEPT_ROWS + DECODED) * e.vocab);
            run_split(&edge, &cloud, cases[i].k, cases[i].chunks[c], e.ids, logits, hidden);
            check_logits(&e, logits, cases[i].k, cases[i].chunks[c]);
        }
    free(e.logits), free(logits), free(hidden), run_close(&edge), run_close(&cloud);
}

/* One sequence among 15 others, and the portable table, over a short text. */
static void crowd_and_instruction_set_change_nothing(void **state)
{
    (void)state;
    if (!model_is_here())
        skip();
    enum { ROWS = 40, OTHERS = 15 };
    struct run r, portable;
    run_open_path(&r, model_path, 2, NULL, 512);
    run_open_path(&portable, model_path, 2, "portable", 512);
    uint32_t layers = r.model->params.layer_count, vocab = r.model->params.vocab_count;
    int32_t ids[TOTAL];
    long_text(ids);
    float *alone = new_logits(&r, ROWS), *crowded = new_logits(&r, ROWS + OTHERS);
    run_chunks(&portable, ids, ROWS, ROWS, portable.pages, alone);
    struct batch_seq seqs[OTHERS + 1];
    for (uint32_t i = 0; i <= OTHERS; i++)
        seqs[i] = (struct batch_seq){.layer_end = layers,
                                     .row_count = i == 9 ? ROWS : 1 + i,
                                     .ids = i == 9 ? ids : ids + 30 * i,
                                     .logits = crowded + (size_t)(i == 9 ? OTHERS : TD_MIN(i, 14u)) * vocab,
                                     .logit_count = i == 9 ? ROWS : 1,
                                     .pages = r.pages + i};
    assert_int_equal(run_batch(&r, seqs, OTHERS + 1), 0);
    assert_memory_equal(crowded + (size_t)OTHERS * vocab, alone, sizeof(float) * ROWS * vocab);
    free(alone), free(crowded), run_close(&r), run_close(&portable);
}

int main(void)
{
    golden = json_load_file(TEST_DATA "/logits.json", 0, NULL);
    if (!golden) {
        fprintf(stderr, "cannot read " TEST_DATA "/logits.json\n");
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(divergence_and_perplexity_beside_llama_cpp),
        cmocka_unit_test(greedy_text_is_the_references),
        cmocka_unit_test(chunks_and_splits_change_nothing),
        cmocka_unit_test(crowd_and_instruction_set_change_nothing),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    json_decref(golden);
    return failed;
}
