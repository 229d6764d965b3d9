/* real_model: what the tests on the real model share: the golden data of tests/golden/FORMAT.md, and how far an engine is from the
 * float32 reference by it. */
#ifndef TANDEM_TESTS_KERNELS_REAL_MODEL_H
#define TANDEM_TESTS_KERNELS_REAL_MODEL_H
#include "tests/unit/kernels/models.h"
#include <jansson.h>
#include <math.h>
#include <zstd.h>

#define MODEL_FOLDER  "/var/cache/tandem/models"
#define GREEDY_MARGIN 1.0 /* nearer ties may fall either way in an engine that rounds activations */

static json_t *golden;
static char model_path[512];

static inline bool model_is_here(void)
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

static inline uint32_t read_ids(const json_t *array, int32_t *ids, uint32_t most)
{
    uint32_t count = (uint32_t)json_array_size(array);
    assert_true(count <= most);
    for (uint32_t i = 0; i < count; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(array, i));
    return count;
}

static inline double golden_number(const char *object, const char *key)
{
    return json_number_value(json_object_get(json_object_get(golden, object), key));
}

/* --- divergence and perplexity --------------------------------------------------------------------------------- */

struct listed { /* logits.bin.zst, see tests/golden/FORMAT.md */
    uint8_t *bytes;
    uint32_t position_count, entry_count;
    const uint8_t *rest, *count, *id, *delta;
};

static inline void listed_read(struct listed *l)
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

static inline double log_sum_exp(const float *logits, uint32_t count)
{
    double max = -1e30, sum = 0;
    for (uint32_t i = 0; i < count; i++)
        max = fmax(max, (double)logits[i]);
    for (uint32_t i = 0; i < count; i++)
        sum += exp((double)logits[i] - max);
    return max + log(sum);
}

/* The metric of FORMAT.md for one position; *entry moves on. */
static inline double divergence(const struct listed *l, size_t position, size_t *entry, const float *logits,
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

static inline uint32_t best_token(const float *logits, uint32_t count)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < count; i++)
        best = logits[i] > logits[best] ? i : best;
    return best;
}

/* Over the documents of logits.json, each fed in chunks of `chunk` rows. */
struct real_score {
    size_t positions;
    double mean_kl, perplexity;
};

static inline struct real_score real_score_of(struct run *r, uint32_t chunk)
{
    struct listed l;
    listed_read(&l);
    uint32_t vocab = r->model->params.vocab_count;
    float *logits = new_logits(r, 512);
    size_t position = 0, entry = 0;
    double kl = 0, nll = 0;
    const json_t *documents = json_object_get(golden, "documents");
    for (size_t d = 0; d < json_array_size(documents); d++) {
        int32_t ids[512];
        uint32_t count = read_ids(json_object_get(json_array_get(documents, d), "ids"), ids, 512);
        run_chunks(r, ids, count, chunk, r->pages, logits);
        for (uint32_t t = 0; t + 1 < count; t++, position++) {
            const float *row = logits + (size_t)t * vocab;
            double lse = log_sum_exp(row, vocab);
            kl += divergence(&l, position, &entry, row, lse);
            nll += lse - (double)row[ids[t + 1]];
        }
    }
    assert_int_equal(position, l.position_count);
    assert_int_equal(entry, l.entry_count);
    free(logits), free(l.bytes);
    return (struct real_score){position, kl / (double)position, exp(nll / (double)position)};
}

/* Over perplexity.json's 10,000 tokens: the engine's perplexity, and the reference's. */
static inline double real_perplexity(struct run *r, double *reference, size_t *positions)
{
    json_t *all = json_load_file(TEST_DATA "/perplexity.json", 0, NULL);
    assert_non_null(all);
    uint32_t vocab = r->model->params.vocab_count;
    float *logits = new_logits(r, 512);
    double nll = 0;
    const json_t *documents = json_object_get(all, "documents");
    *positions = 0;
    for (size_t d = 0; d < json_array_size(documents); d++) {
        int32_t ids[512];
        uint32_t count = read_ids(json_object_get(json_array_get(documents, d), "ids"), ids, 512);
        run_chunks(r, ids, count, count, r->pages, logits);
        for (uint32_t t = 0; t + 1 < count; t++, ++*positions) {
            const float *row = logits + (size_t)t * vocab;
            nll += log_sum_exp(row, vocab) - (double)row[ids[t + 1]];
        }
    }
    *reference = json_number_value(json_object_get(all, "perplexity"));
    assert_int_equal(*positions, (size_t)json_integer_value(json_object_get(all, "positions")));
    free(logits), json_decref(all);
    return exp(nll / (double)*positions);
}

/* The reference's greedy text, fed to the engine: how many of its tokens are the engine's too, of all and of those with a wide margin. */
struct real_greedy {
    uint32_t all, same, wide, wide_same;
};

static inline struct real_greedy real_greedy_of(struct run *r)
{
    struct real_greedy g = {0};
    uint32_t vocab = r->model->params.vocab_count;
    float *logits = new_logits(r, 512);
    const json_t *prompts = json_object_get(golden, "greedy");
    for (size_t n = 0; n < json_array_size(prompts); n++) {
        const json_t *one = json_array_get(prompts, n), *margins = json_object_get(one, "margins");
        int32_t ids[512];
        uint32_t prompt = read_ids(json_object_get(one, "ids"), ids, 256);
        uint32_t count = read_ids(json_object_get(one, "tokens"), ids + prompt, 256);
        run_chunks(r, ids, prompt + count, prompt + count, r->pages, logits);
        for (uint32_t i = 0; i < count; i++) {
            bool wide = json_number_value(json_array_get(margins, i)) >= GREEDY_MARGIN,
                 same = best_token(logits + (size_t)(prompt + i - 1) * vocab, vocab) ==
                        (uint32_t)ids[prompt + i];
            g.all++, g.same += same, g.wide += wide, g.wide_same += wide && same;
        }
    }
    free(logits);
    return g;
}

static inline bool golden_open(void)
{
    golden = json_load_file(TEST_DATA "/logits.json", 0, NULL);
    if (!golden)
        fprintf(stderr, "cannot read " TEST_DATA "/logits.json\n");
    return golden != NULL;
}

#endif
