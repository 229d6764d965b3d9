/* logits_real: the engine on the real model that the golden data was made with: divergence from the float32 reference beside
 * llama.cpp's, perplexity, greedy text, and the invariance rule at full size. Takes about a minute; skipped when the model
 * is not on this machine (deploy/fetch-model.sh gets it; TANDEM_TEST_MODEL names another place). */
#include "tests/unit/kernels/real_model.h"

static void divergence_and_perplexity_beside_llama_cpp(void **state)
{
    (void)state;
    if (!model_is_here())
        skip();
    struct run r;
    run_open_path(&r, model_path, 2, NULL, 512);
    struct real_score score = real_score_of(&r, 512);
    double llama_kl = golden_number("llama_cpp", "mean_kl"),
           llama_perplexity = golden_number("llama_cpp", "perplexity");
    print_message(
        "%zu positions: mean KL %.6f (llama.cpp %.6f), perplexity %.4f (llama.cpp %.4f, float32 %.4f)\n",
        score.positions, score.mean_kl, llama_kl, score.perplexity, llama_perplexity,
        golden_number("reference", "perplexity"));
    assert_true(score.mean_kl <= 1.05 * llama_kl && score.mean_kl > 0);
    assert_true(fabs(score.perplexity - llama_perplexity) <= 0.005 * llama_perplexity);
    run_close(&r);
}

static void greedy_text_is_the_references(void **state)
{
    (void)state;
    if (!model_is_here())
        skip();
    struct run r;
    run_open_path(&r, model_path, 2, NULL, 512);
    struct real_greedy g = real_greedy_of(&r);
    assert_true(g.wide > 100);
    assert_int_equal(g.wide_same, g.wide);
    run_close(&r);
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
    if (!golden_open())
        return 1;
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
