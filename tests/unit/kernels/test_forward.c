/* forward: the invariance rule. A row's logits have the same bits however its prompt was cut, whatever else is in the batch, on any
 * number of threads, from any instruction set, and wherever its prefix came from; and a bad batch is a code that leaves pages alone. */
#include "kernels/cpu/cpu_backend.h"
#include "tests/unit/kernels/models.h"
#include <math.h>
#include <sys/mman.h>
#include <unistd.h>

#define TOKENS 150 /* three blocks, the last one short */

static const char *const names[] = {"llama-gqa-untied", "llama-mha-tied", "qwen2",    "qwen3",
                                    "type-q4_1",        "type-k",         "type-q8_0"};

/* A run with the logits of its ids, computed in one piece by the portable table on one thread: what all others must equal. */
struct reference {
    struct run run;
    int32_t ids[TOKENS];
    float *logits;
    uint32_t vocab_count, layer_count, embd_size;
};

static void reference_open(struct reference *f, const char *name)
{
    run_open(&f->run, name, 1, "portable");
    f->vocab_count = f->run.model->params.vocab_count;
    f->layer_count = f->run.model->params.layer_count;
    f->embd_size = f->run.model->params.embd_size;
    fill_ids(f->ids, TOKENS, f->vocab_count, 42);
    f->logits = new_logits(&f->run, TOKENS);
    run_chunks(&f->run, f->ids, TOKENS, TOKENS, f->run.pages, f->logits);
}

static void reference_close(struct reference *f)
{
    free(f->logits);
    run_close(&f->run);
}

static void check_rows(const struct reference *f, const float *got, uint32_t first, uint32_t count,
                       const char *what)
{
    for (uint32_t i = 0; i < count; i++)
        if (memcmp(got + (size_t)i * f->vocab_count, f->logits + (size_t)(first + i) * f->vocab_count,
                   sizeof(float) * f->vocab_count) != 0)
            fail_msg("%s: row %u differs", what, first + i);
}

static void chunks_threads_and_instruction_sets(void **state)
{
    (void)state;
    static const uint32_t chunks[] = {1, 2, 3, 5, 7, 16, 63, 64, 65, 100, TOKENS};
    for (size_t n = 0; n < TD_COUNT(names); n++) {
        struct reference f;
        reference_open(&f, names[n]);
        for (unsigned threads = 1; threads <= 3; threads++) {
            struct run r;
            run_open(&r, names[n], threads, NULL);
            float *logits = new_logits(&r, TOKENS);
            for (size_t c = 0; c < TD_COUNT(chunks); c++) {
                memset(logits, 0, sizeof(float) * TOKENS * f.vocab_count);
                run_chunks(&r, f.ids, TOKENS, chunks[c], r.pages, logits);
                check_rows(&f, logits, 0, TOKENS, names[n]);
            }
            free(logits), run_close(&r);
        }
        const struct cpu_ops *ops;
        for (size_t i = 0; (ops = cpu_ops_at(i)); i++) {
            struct run r;
            run_open(&r, names[n], 2, ops->name);
            float *logits = new_logits(&r, TOKENS);
            run_chunks(&r, f.ids, TOKENS, 37, r.pages, logits);
            check_rows(&f, logits, 0, TOKENS, ops->name);
            free(logits), run_close(&r);
        }
        reference_close(&f);
    }
}

/* Our sequence among 15 others in every step, prefill and decode mixed, others at other depths. */
static void a_crowd_changes_nothing(void **state)
{
    (void)state;
    enum { OTHERS = 15 };
    for (size_t n = 0; n < TD_COUNT(names); n++) {
        struct reference f;
        struct run r;
        reference_open(&f, names[n]);
        run_open(&r, names[n], 2, NULL);
        float *ours = new_logits(&r, TOKENS), *theirs = new_logits(&r, OTHERS);
        int32_t other_ids[OTHERS][256];
        uint32_t other_at[OTHERS] = {0};
        for (uint32_t i = 0; i < OTHERS; i++)
            fill_ids(other_ids[i], 256, f.vocab_count, i + 1000);
        for (uint32_t at = 0, step = 0; at < TOKENS; step++) {
            uint32_t rows = TD_MIN(step % 3 == 0 ? 29u : 1u, TOKENS - at), mine = step % (OTHERS + 1);
            struct batch_seq seqs[OTHERS + 1];
            for (uint32_t i = 0, s = 0; s <= OTHERS; s++) {
                if (s == mine) {
                    seqs[s] = (struct batch_seq){.layer_end = f.layer_count,
                                                 .position = at,
                                                 .row_count = rows,
                                                 .ids = f.ids + at,
                                                 .logits = ours + (size_t)at * f.vocab_count,
                                                 .logit_count = rows,
                                                 .pages = r.pages};
                    continue;
                }
                uint32_t count = 1 + (i + step) % 4 * 3;
                if (other_at[i] + count > 150)
                    other_at[i] = 0;
                seqs[s] = (struct batch_seq){.layer_end = f.layer_count,
                                             .position = other_at[i],
                                             .row_count = count,
                                             .ids = other_ids[i] + other_at[i],
                                             .logits = theirs + (size_t)i * f.vocab_count,
                                             .logit_count = 1,
                                             .pages = r.pages + 3 + 3 * i};
                other_at[i++] += count;
            }
            assert_int_equal(run_batch(&r, seqs, OTHERS + 1), 0);
            at += rows;
        }
        check_rows(&f, ours, 0, TOKENS, names[n]);
        free(ours), free(theirs), run_close(&r), reference_close(&f);
    }
}

/* Decode of a few sequences cuts their attention by pages, as far as there is room for the splits of eight pages: three
 * sequences with three each are one too many. */
static void a_few_sequences_decode_side_by_side(void **state)
{
    (void)state;
    enum { FEW = 3, FIRST = 135 };
    struct reference f;
    struct run r;
    reference_open(&f, "llama-gqa-untied");
    run_open(&r, "llama-gqa-untied", 3, NULL);
    float *logits = new_logits(&r, TOKENS);
    for (uint32_t i = 0; i < FEW; i++) /* each a few tokens behind the one before */
        run_chunks(&r, f.ids, FIRST - i * 5, TOKENS, r.pages + 3 * (size_t)i, logits);
    for (uint32_t step = 0; step < TOKENS - FIRST; step++) {
        struct batch_seq seqs[FEW];
        for (uint32_t i = 0; i < FEW; i++) {
            const uint32_t at = FIRST - i * 5 + step;
            seqs[i] = (struct batch_seq){.layer_end = f.layer_count,
                                         .position = at,
                                         .row_count = 1,
                                         .ids = f.ids + at,
                                         .logits = logits + (size_t)i * f.vocab_count,
                                         .logit_count = 1,
                                         .pages = r.pages + 3 * (size_t)i};
        }
        assert_int_equal(run_batch(&r, seqs, FEW), 0);
        for (uint32_t i = 0; i < FEW; i++)
            check_rows(&f, logits + (size_t)i * f.vocab_count, FIRST - i * 5 + step, 1, "side by side");
    }
    free(logits), run_close(&r), reference_close(&f);
}

/* --- where the prefix comes from ------------------------------------------------------------------------------- */

/* A second sequence reads the first one's full blocks through its own page table and computes only the rest. */
static void a_shared_prefix_equals_a_computed_one(void **state)
{
    (void)state;
    struct reference f;
    struct run r;
    reference_open(&f, "llama-gqa-untied");
    run_open(&r, "llama-gqa-untied", 2, NULL);
    float *logits = new_logits(&r, TOKENS);
    run_chunks(&r, f.ids, 128, 128, r.pages, logits);
    uint32_t pages[3] = {r.pages[0], r.pages[1], r.pages[20]};
    struct batch_seq s = {.layer_end = f.layer_count,
                          .position = 128,
                          .row_count = TOKENS - 128,
                          .ids = f.ids + 128,
                          .logits = logits,
                          .logit_count = TOKENS - 128,
                          .pages = pages};
    assert_int_equal(run_batch(&r, &s, 1), 0);
    check_rows(&f, logits, 128, TOKENS - 128, "shared prefix");

    /* Copy on write: a copy of a partly used block, gone on with. */
    uint32_t copy[3] = {r.pages[0], r.pages[30], r.pages[31]};
    assert_int_equal(r.backend->ops->page_copy(r.backend, r.pages[1], copy[1]), 0);
    s = (struct batch_seq){.layer_end = f.layer_count,
                           .position = 100,
                           .row_count = TOKENS - 100,
                           .ids = f.ids + 100,
                           .logits = logits,
                           .logit_count = TOKENS - 100,
                           .pages = copy};
    assert_int_equal(run_batch(&r, &s, 1), 0);
    check_rows(&f, logits, 100, TOKENS - 100, "copied page");
    free(logits), run_close(&r), reference_close(&f);
}

/* Blocks of [begin, end) layers from one backend into another, as they would travel. */
static void carry_blocks(struct run *from, struct run *to, uint32_t tokens, uint32_t layer_begin,
                         uint32_t layer_end)
{
    const struct model_params *p = &from->model->params;
    size_t values = (size_t)KV_BLOCK_TOKENS * p->kv_head_count * p->head_dim;
    uint16_t *k = calloc(values, 2), *v = calloc(values, 2);
    for (uint32_t at = 0; at < tokens; at += KV_BLOCK_TOKENS)
        for (uint32_t layer = layer_begin; layer < layer_end; layer++) {
            uint32_t count = TD_MIN(tokens - at, (uint32_t)KV_BLOCK_TOKENS), block = at / KV_BLOCK_TOKENS;
            assert_int_equal(
                from->backend->ops->page_read(from->backend, from->pages[block], layer, count, k, v), 0);
            assert_int_equal(to->backend->ops->page_write(to->backend, to->pages[block], layer, count, k, v),
                             0);
        }
    free(k), free(v);
}

static void a_prefix_written_as_blocks_equals_a_computed_one(void **state)
{
    (void)state;
    struct reference f;
    struct run r;
    reference_open(&f, "qwen3");
    run_open(&r, "qwen3", 1, NULL);
    carry_blocks(&f.run, &r, 110, 0, f.layer_count);
    float *logits = new_logits(&r, TOKENS);
    struct batch_seq s = {.layer_end = f.layer_count,
                          .position = 110,
                          .row_count = TOKENS - 110,
                          .ids = f.ids + 110,
                          .logits = logits,
                          .logit_count = TOKENS - 110,
                          .pages = r.pages};
    assert_int_equal(run_batch(&r, &s, 1), 0);
    check_rows(&f, logits, 110, TOKENS - 110, "written prefix");
    free(logits), run_close(&r), reference_close(&f);
}

/* An edge that keeps layers [0, k) and a cloud that runs [k, L) on its hidden rows, then decodes on the edge's KV. */
static void split_at(const char *name, uint32_t k, uint32_t prompt, uint32_t chunk)
{
    struct reference f;
    struct run edge, cloud;
    reference_open(&f, name);
    run_open(&edge, name, 2, NULL);
    run_open(&cloud, name, 1, NULL);
    float *hidden = calloc((size_t)TOKENS * f.embd_size, sizeof *hidden),
          *logits = new_logits(&cloud, TOKENS);
    for (uint32_t at = 0; at < prompt; at += chunk) {
        uint32_t rows = TD_MIN(chunk, prompt - at);
        struct batch_seq lower = {.layer_end = k,
                                  .position = at,
                                  .row_count = rows,
                                  .ids = f.ids + at,
                                  .hidden_out = hidden,
                                  .pages = edge.pages};
        struct batch_seq upper = {.layer_begin = k,
                                  .layer_end = f.layer_count,
                                  .position = at,
                                  .row_count = rows,
                                  .hidden_in = hidden,
                                  .logits = logits,
                                  .logit_count = rows,
                                  .pages = cloud.pages};
        assert_int_equal(run_batch(&edge, &lower, 1), 0);
        assert_int_equal(run_batch(&cloud, &upper, 1), 0);
        check_rows(&f, logits, at, rows, name);
    }
    carry_blocks(&edge, &cloud, prompt, 0, k);
    for (uint32_t at = prompt; at < TOKENS; at++) {
        struct batch_seq s = {.layer_end = f.layer_count,
                              .position = at,
                              .row_count = 1,
                              .ids = f.ids + at,
                              .logits = logits,
                              .logit_count = 1,
                              .pages = cloud.pages};
        assert_int_equal(run_batch(&cloud, &s, 1), 0);
        check_rows(&f, logits, at, 1, name);
    }
    free(hidden), free(logits), run_close(&edge), run_close(&cloud), reference_close(&f);
}

static void a_split_between_two_machines_changes_nothing(void **state)
{
    (void)state;
    split_at("llama-gqa-untied", 1, 140, 64);
    split_at("llama-gqa-untied", 2, 70, 33); /* k = L: the upper side only makes logits */
    split_at("type-q4_1", 1, 129, 129);
    split_at("qwen2", 1, 100, 1);
}

/* Sequences with different layer ranges side by side in one step. */
static void layer_ranges_mix_in_a_batch(void **state)
{
    (void)state;
    struct reference f;
    struct run r;
    reference_open(&f, "type-k");
    run_open(&r, "type-k", 2, NULL);
    enum { ROWS = 40 };
    float *hidden = calloc(ROWS * (size_t)f.embd_size, sizeof *hidden), *logits[3];
    for (int i = 0; i < 3; i++)
        logits[i] = new_logits(&r, ROWS);
    struct batch_seq lower = {
        .layer_end = 1, .row_count = ROWS, .ids = f.ids, .hidden_out = hidden, .pages = r.pages};
    assert_int_equal(run_batch(&r, &lower, 1), 0);
    float *last = calloc(ROWS * (size_t)f.embd_size, sizeof *last);
    struct batch_seq mixed[] = {
        {.layer_end = f.layer_count,
         .row_count = ROWS,
         .ids = f.ids,
         .logits = logits[0],
         .logit_count = ROWS,
         .pages = r.pages + 3},
        {.layer_begin = 1,
         .layer_end = f.layer_count,
         .row_count = ROWS,
         .hidden_in = hidden,
         .logits = logits[1],
         .logit_count = 5,
         .hidden_out = last,
         .pages = r.pages},
        {.layer_end = 1, .row_count = 7, .ids = f.ids, .pages = r.pages + 6},
    };
    assert_int_equal(run_batch(&r, mixed, 3), 0);
    check_rows(&f, logits[0], 0, ROWS, "whole");
    check_rows(&f, logits[1], ROWS - 5, 5, "upper");
    struct batch_seq only_logits = {.layer_begin = f.layer_count,
                                    .layer_end = f.layer_count,
                                    .row_count = ROWS,
                                    .hidden_in = last,
                                    .logits = logits[2],
                                    .logit_count = ROWS};
    assert_int_equal(run_batch(&r, &only_logits, 1), 0);
    check_rows(&f, logits[2], 0, ROWS, "logits of hidden rows");
    for (int i = 0; i < 3; i++)
        free(logits[i]);
    free(hidden), free(last), run_close(&r), reference_close(&f);
}

/* A prefill that asks for few or no logits skips work in the last layer; K and V must be complete all the same. */
static void unwanted_rows_leave_complete_kv(void **state)
{
    (void)state;
    struct reference f;
    struct run r;
    reference_open(&f, "llama-mha-tied");
    run_open(&r, "llama-mha-tied", 1, NULL);
    float *logits = new_logits(&r, TOKENS);
    struct batch_seq s = {.layer_end = f.layer_count, .row_count = 90, .ids = f.ids, .pages = r.pages};
    assert_int_equal(run_batch(&r, &s, 1), 0);
    s = (struct batch_seq){.layer_end = f.layer_count,
                           .position = 90,
                           .row_count = TOKENS - 90,
                           .ids = f.ids + 90,
                           .logits = logits,
                           .logit_count = 3,
                           .pages = r.pages};
    assert_int_equal(run_batch(&r, &s, 1), 0);
    check_rows(&f, logits, TOKENS - 3, 3, "after a silent prefill");
    free(logits), run_close(&r), reference_close(&f);
}

/* --- refusals -------------------------------------------------------------------------------------------------- */

static void check_code(struct run *r, struct batch_seq s, int code)
{
    assert_int_equal(run_batch(r, &s, 1), code);
}

static void bad_batches_are_codes(void **state)
{
    (void)state;
    struct run r;
    run_open(&r, "llama-gqa-untied", 1, NULL);
    const struct model_params *p = &r.model->params;
    int32_t ids[600] = {0}, bad_id[1] = {(int32_t)p->vocab_count}, negative[1] = {-1};
    uint32_t bad_page[1] = {RUN_PAGES};
    float *hidden = calloc(p->embd_size * 2u, sizeof *hidden), *logits = new_logits(&r, 2);
    struct batch_seq good = {.layer_end = p->layer_count,
                             .row_count = 1,
                             .ids = ids,
                             .logits = logits,
                             .logit_count = 1,
                             .pages = r.pages};
    struct batch_seq upper = {.layer_begin = 1,
                              .layer_end = 2,
                              .row_count = 1,
                              .hidden_in = hidden,
                              .pages = r.pages},
                     s;
    check_code(&r, good, 0), check_code(&r, upper, 0);
    assert_int_equal(run_batch(&r, NULL, 0), 0);
    s = good, s.ids = bad_id, check_code(&r, s, -TD_ERR_ARG);
    s = good, s.ids = negative, check_code(&r, s, -TD_ERR_ARG);
    s = good, s.ids = NULL, check_code(&r, s, -TD_ERR_ARG);
    s = good, s.hidden_in = hidden, check_code(&r, s, -TD_ERR_ARG);
    s = good, s.row_count = 0, check_code(&r, s, -TD_ERR_ARG);
    s = good, s.pages = bad_page, check_code(&r, s, -TD_ERR_ARG);
    s = good, s.pages = NULL, check_code(&r, s, -TD_ERR_ARG);
    s = good, s.logit_count = 2, check_code(&r, s, -TD_ERR_ARG);
    s = good, s.logit_count = 0, check_code(&r, s, -TD_ERR_ARG);
    s = good, s.logits = NULL, check_code(&r, s, -TD_ERR_ARG);
    s = good, s.layer_end = 1, check_code(&r, s, -TD_ERR_ARG); /* logits in the middle */
    s = good, s.layer_end = 0, check_code(&r, s, -TD_ERR_ARG);
    s = good, s.layer_end = p->layer_count + 1, check_code(&r, s, -TD_ERR_UNSUPPORTED);
    s = good, s.position = p->context_max, check_code(&r, s, -TD_ERR_CONTEXT);
    s = good, s.position = UINT32_MAX, check_code(&r, s, -TD_ERR_CONTEXT);
    s = good, s.row_count = 513, check_code(&r, s, -TD_ERR_LIMIT); /* rows_max of run_open is 512 */
    s = upper, s.hidden_in = NULL, check_code(&r, s, -TD_ERR_ARG);
    s = upper, s.ids = ids, check_code(&r, s, -TD_ERR_ARG);
    hidden[p->embd_size - 1] = NAN, check_code(&r, upper, -TD_ERR_FORMAT);
    hidden[p->embd_size - 1] = -INFINITY, check_code(&r, upper, -TD_ERR_FORMAT);
    struct batch_seq pair[2] = {good, good};
    pair[0].row_count = pair[1].row_count = UINT32_MAX; /* the sum must not wrap */
    assert_int_equal(run_batch(&r, pair, 2), -TD_ERR_LIMIT);
    assert_int_equal(run_batch(&r, &good, BATCH_SEQS_MAX + 1), -TD_ERR_LIMIT);
    free(hidden), free(logits), run_close(&r);
}

/* One bad sequence refuses the whole batch before a page is written. */
static void a_refused_batch_writes_nothing(void **state)
{
    (void)state;
    struct run r;
    run_open(&r, "llama-gqa-untied", 1, NULL);
    const struct model_params *p = &r.model->params;
    size_t values = (size_t)p->kv_head_count * p->head_dim;
    uint16_t *k = calloc(values, 2), *v = calloc(values, 2), *zero = calloc(values, 2);
    struct batch_seq seqs[] = {
        {.layer_end = p->layer_count, .row_count = 1, .ids = (int32_t[]){5}, .pages = r.pages},
        {.layer_end = p->layer_count, .row_count = 1, .ids = (int32_t[]){-5}, .pages = r.pages + 1},
    };
    assert_int_equal(run_batch(&r, seqs, 2), -TD_ERR_ARG);
    assert_int_equal(r.backend->ops->page_read(r.backend, r.pages[0], 0, 1, k, v), 0);
    assert_memory_equal(k, zero, values * 2), assert_memory_equal(v, zero, values * 2);
    assert_int_equal(run_batch(&r, seqs, 1), 0);
    assert_int_equal(r.backend->ops->page_read(r.backend, r.pages[0], 0, 1, k, v), 0);
    assert_memory_not_equal(k, zero, values * 2);
    free(k), free(v), free(zero), run_close(&r);
}

static void page_calls_check_their_arguments(void **state)
{
    (void)state;
    struct run r;
    run_open(&r, "llama-gqa-untied", 1, NULL);
    const struct backend_ops *ops = r.backend->ops;
    const struct model_params *p = &r.model->params;
    uint16_t *kv = calloc((size_t)KV_BLOCK_TOKENS * p->kv_head_count * p->head_dim, 2);
    assert_int_equal(ops->page_read(r.backend, RUN_PAGES, 0, 1, kv, kv), -TD_ERR_ARG);
    assert_int_equal(ops->page_write(r.backend, 0, p->layer_count, 1, kv, kv), -TD_ERR_ARG);
    assert_int_equal(ops->page_write(r.backend, 0, 0, 0, kv, kv), -TD_ERR_ARG);
    assert_int_equal(ops->page_read(r.backend, 0, 0, KV_BLOCK_TOKENS + 1, kv, kv), -TD_ERR_ARG);
    assert_int_equal(ops->page_copy(r.backend, 0, RUN_PAGES), -TD_ERR_ARG);
    assert_int_equal(ops->page_copy(r.backend, RUN_PAGES, 0), -TD_ERR_ARG);
    free(kv), run_close(&r);
}

static void k_and_v_can_be_written_alone(void **state)
{
    (void)state;
    struct run r;
    run_open(&r, "llama-gqa-untied", 1, NULL);
    const struct backend_ops *ops = r.backend->ops;
    const struct model_params *p = &r.model->params;
    size_t count = (size_t)KV_BLOCK_TOKENS * p->kv_head_count * p->head_dim, size = 2 * count;
    uint16_t *ones = malloc(size), *twos = malloc(size), *k = malloc(size), *v = malloc(size);
    memset(ones, 1, size), memset(twos, 2, size);
    assert_int_equal(ops->page_write(r.backend, 3, 1, KV_BLOCK_TOKENS, ones, ones), 0);
    assert_int_equal(ops->page_write(r.backend, 3, 1, KV_BLOCK_TOKENS, twos, NULL), 0);
    assert_int_equal(ops->page_read(r.backend, 3, 1, KV_BLOCK_TOKENS, k, v), 0);
    assert_memory_equal(k, twos, size);
    assert_memory_equal(v, ones, size);
    assert_int_equal(ops->page_write(r.backend, 3, 1, KV_BLOCK_TOKENS, ones, ones), 0);
    assert_int_equal(ops->page_write(r.backend, 3, 1, KV_BLOCK_TOKENS, NULL, twos), 0);
    assert_int_equal(ops->page_read(r.backend, 3, 1, KV_BLOCK_TOKENS, k, v), 0);
    assert_memory_equal(k, ones, size);
    assert_memory_equal(v, twos, size);
    free(ones), free(twos), free(k), free(v);
    run_close(&r);
}

/* A device that keeps only the lower layers. */
static void a_part_of_the_layers(void **state)
{
    (void)state;
    struct reference f;
    reference_open(&f, "llama-gqa-untied");
    struct backend_config config = {.page_count = 3, .layers_paged = 1, .threads = 1, .rows_max = 64};
    struct backend *part;
    assert_int_equal(cpu_backend_create(f.run.model, &config, &part, NULL), 0);
    uint32_t pages[] = {2};
    float *hidden = calloc(64 * (size_t)f.embd_size, sizeof *hidden),
          *want = calloc(64 * (size_t)f.embd_size, sizeof *want);
    struct batch_seq s = {
        .layer_end = 1, .row_count = 64, .ids = f.ids, .hidden_out = hidden, .pages = pages};
    assert_int_equal(part->ops->forward(part, &(struct batch){&s, 1}), 0);
    s.pages = f.run.pages + 10, s.hidden_out = want;
    assert_int_equal(run_batch(&f.run, &s, 1), 0);
    assert_memory_equal(hidden, want, sizeof(float) * 64 * f.embd_size);
    s.layer_end = 2, s.pages = pages;
    assert_int_equal(part->ops->forward(part, &(struct batch){&s, 1}), -TD_ERR_UNSUPPORTED);
    part->ops->destroy(part);
    free(hidden), free(want), reference_close(&f);
}

/* Bytes of [begin, end) of the pages that are in memory. */
static size_t resident(const struct cpu_backend *b, size_t begin, size_t end)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), first = begin / page * page, count = 0;
    unsigned char *there = calloc((end - first) / page + 1, 1);
    assert_non_null(there);
    assert_int_equal(mincore((uint8_t *)b->pages + first, end - first, there), 0);
    for (size_t at = first; at < end; at += page)
        count += there[(at - first) / page] & 1;
    free(there);
    return count * page;
}

static bool is_resident(const struct cpu_backend *b, size_t begin, size_t end)
{
    return resident(b, begin, end) >= end - begin;
}

/* As much ahead as has been used, up to a limit, a little at a time, and nothing of what is used is changed. */
static void memory_of_pages_is_taken_ahead(void **state)
{
    (void)state;
    enum { MIB = 1 << 20, LIMIT = 128 * MIB, PART = 2 * MIB, HUGE = 2 * MIB };
    struct run r;
    run_open(&r, "llama-gqa-untied", 1, NULL);
    size_t page = ((struct cpu_backend *)r.backend)->page_values * sizeof(uint16_t), pool = 300 * MIB;
    struct backend_config config = {.page_count = (uint32_t)(pool / page),
                                    .layers_paged = r.model->params.layer_count,
                                    .threads = 1,
                                    .rows_max = 64};
    struct backend *backend;
    struct td_error err;
    assert_int_equal(cpu_backend_create(r.model, &config, &backend, &err), 0);
    const struct cpu_backend *b = (const struct cpu_backend *)backend;
    pool = b->pages_size;
    assert_false(backend->ops->pages_ahead(backend, 0));
    assert_int_equal(resident(b, 0, pool), 0);

    uint32_t used = (uint32_t)(5 * MIB / page), calls = 0;
    memset(b->pages, 0x11, used * page);
    for (; backend->ops->pages_ahead(backend, used); calls++)
        assert_true(resident(b, used * page, pool) <= (calls + 1) * PART + 2 * HUGE);
    assert_true(is_resident(b, 0, 2 * used * page));
    assert_true(resident(b, 0, pool) <= 2 * used * page + 2 * HUGE);
    size_t kept = 0;
    for (size_t i = 0; i < used * page; i++)
        kept += ((uint8_t *)b->pages)[i] == 0x11;
    assert_int_equal(kept, used * page);

    used = (uint32_t)(140 * MIB / page); /* of these most have not been written yet, which is not done here */
    while (backend->ops->pages_ahead(backend, used))
        ;
    assert_true(is_resident(b, used * page, used * page + LIMIT));
    assert_int_equal(resident(b, used * page + LIMIT + HUGE, pool), 0);
    used = (uint32_t)((pool - 3 * MIB) / page);
    while (backend->ops->pages_ahead(backend, used))
        ;
    assert_true(is_resident(b, used * page, pool));
    assert_false(backend->ops->pages_ahead(backend, config.page_count));
    backend->ops->destroy(backend);
    run_close(&r);
}

static void check_create(const struct model *m, struct backend_config config, int code, const char *word)
{
    struct backend *b;
    struct td_error err = {0};
    assert_int_equal(cpu_backend_create(m, &config, &b, &err), code);
    assert_null(b);
    assert_non_null(strstr(err.text, word));
}

static void backends_that_cannot_be(void **state)
{
    (void)state;
    struct run r;
    run_open(&r, "llama-gqa-untied", 1, NULL);
    struct backend_config good = {.page_count = 4, .layers_paged = 2, .threads = 1, .rows_max = 16}, c;
    c = good, c.page_count = UINT32_MAX, c.layers_paged = 2, check_create(r.model, c, -TD_ERR_NOMEM, "pages");
    c = good, c.page_count = 0, check_create(r.model, c, -TD_ERR_ARG, "pages");
    c = good, c.rows_max = 0, check_create(r.model, c, -TD_ERR_ARG, "rows");
    c = good, c.rows_max = BATCH_ROWS_MAX + 1, check_create(r.model, c, -TD_ERR_ARG, "rows");
    c = good, c.layers_paged = 3, check_create(r.model, c, -TD_ERR_ARG, "layers");
    c = good, c.isa = "mmx", check_create(r.model, c, -TD_ERR_UNSUPPORTED, "mmx");
    run_close(&r);
}

static void the_memory_for_weights_is_known_before(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_COUNT(names); i++) {
        struct run r;
        run_open(&r, names[i], 1, NULL);
        assert_int_equal(cpu_backend_weights_size(r.model),
                         ((const struct cpu_backend *)r.backend)->packed_size);
        run_close(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_threads_and_instruction_sets),
        cmocka_unit_test(a_crowd_changes_nothing),
        cmocka_unit_test(a_few_sequences_decode_side_by_side),
        cmocka_unit_test(a_shared_prefix_equals_a_computed_one),
        cmocka_unit_test(a_prefix_written_as_blocks_equals_a_computed_one),
        cmocka_unit_test(a_split_between_two_machines_changes_nothing),
        cmocka_unit_test(layer_ranges_mix_in_a_batch),
        cmocka_unit_test(unwanted_rows_leave_complete_kv),
        cmocka_unit_test(bad_batches_are_codes),
        cmocka_unit_test(a_refused_batch_writes_nothing),
        cmocka_unit_test(page_calls_check_their_arguments),
        cmocka_unit_test(k_and_v_can_be_written_alone),
        cmocka_unit_test(a_part_of_the_layers),
        cmocka_unit_test(memory_of_pages_is_taken_ahead),
        cmocka_unit_test(backends_that_cannot_be),
        cmocka_unit_test(the_memory_for_weights_is_known_before),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
