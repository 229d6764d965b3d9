/* cuda_forward: the CUDA engine on every golden model: against the float32 reference's logits, and against itself however the
 * work is cut: chunks, batches, layer ranges, pages carried over, recorded steps. Skipped where no GPU is. */
#include "kernels/bench_model.h"
#include "kernels/cuda/cuda.h"
#include "tests/unit/kernels/models.h"
#include "tests/unit/kernels/small.h"
#include <math.h>

#define TOKENS 150

/* Largest differences of logits. Logits reach 4; activations are f16, or bf16 beside BF16 weights, and random models amplify. */
#define BOUND_F16  0.25
#define BOUND_BF16 0.7
#define BOUND_SELF 0.25

static double bound_of(const char *name)
{
    return strcmp(name, "llama-mha-tied") == 0 ? BOUND_BF16 : BOUND_F16;
}

static void cuda_run_open(struct run *r, const char *name, uint32_t rows_max)
{
    char path[512];
    struct td_error err = {0};
    snprintf(path, sizeof path, "%s/tiny/%s.gguf", TEST_DATA, name);
    if (gguf_open(path, &r->file, &err) || model_load(r->file, &r->model, &err))
        fail_msg("%s", err.text);
    struct backend_config config = {
        .page_count = RUN_PAGES, .layers_paged = r->model->layers_held, .rows_max = rows_max};
    if (cuda_backend_create(r->model, &config, "cuda:0", &r->backend, &err))
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < RUN_PAGES; i++)
        r->pages[i] = (i * 37 + 11) % RUN_PAGES;
}

static double difference(const float *a, const float *b, size_t count)
{
    double most = 0;
    for (size_t i = 0; i < count; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= most)) /* a NaN sticks */
            most = d;
    }
    return most;
}

static void check_close(const float *got, const float *want, size_t count, double bound, const char *what)
{
    double d = difference(got, want, count);
    if (!(d <= bound))
        fail_msg("%s: logits differ by %.4f, at most %.4f", what, d, bound);
}

/* --- against the reference -------------------------------------------------------------------- */

struct golden {
    uint32_t ids, positions, vocab;
    int32_t *id;
    uint32_t *position;
    float *logits;
};

static void golden_read(struct golden *g, const char *name)
{
    char path[512];
    uint8_t head[20];
    snprintf(path, sizeof path, "%s/tiny/%s.logits", TEST_DATA, name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fread(head, 1, sizeof head, f), sizeof head);
    g->ids = load_le32(head + 8), g->positions = load_le32(head + 12), g->vocab = load_le32(head + 16);
    g->id = calloc(g->ids, 4), g->position = calloc(g->positions, 4);
    g->logits = calloc((size_t)g->positions * g->vocab, 4);
    assert_int_equal(fread(g->id, 4, g->ids, f), g->ids);
    assert_int_equal(fread(g->position, 4, g->positions, f), g->positions);
    assert_int_equal(fread(g->logits, 4, (size_t)g->positions * g->vocab, f),
                     (size_t)g->positions * g->vocab);
    fclose(f);
}

static void golden_free(struct golden *g)
{
    free(g->id), free(g->position), free(g->logits);
}

static void logits_of_the_reference(void **state)
{
    (void)state;
    size_t each = small_or(TD_COUNT(golden_names) - 1, 1); /* the first and the last */
    for (size_t n = 0; n < TD_COUNT(golden_names); n += each) {
        static const uint32_t chunks[] = {512, 37, 1};
        struct golden g;
        struct run r;
        golden_read(&g, golden_names[n]);
        cuda_run_open(&r, golden_names[n], 512);
        float *logits = new_logits(&r, g.ids);
        for (size_t c = 0; c < small_or(2, TD_COUNT(chunks)); c++) {
            memset(logits, 0xff, sizeof(float) * g.ids * g.vocab);
            run_chunks(&r, g.id, g.ids, chunks[c], r.pages, logits);
            double most = 0;
            for (uint32_t i = 0; i < g.positions; i++)
                most = fmax(most, difference(logits + (size_t)g.position[i] * g.vocab,
                                             g.logits + (size_t)i * g.vocab, g.vocab));
            print_message("%s in chunks of %u: %.4f\n", golden_names[n], chunks[c], most);
            for (uint32_t i = 0; i < g.positions; i++)
                check_close(logits + (size_t)g.position[i] * g.vocab, g.logits + (size_t)i * g.vocab, g.vocab,
                            bound_of(golden_names[n]), golden_names[n]);
        }
        free(logits), run_close(&r), golden_free(&g);
    }
}

/* --- against itself --------------------------------------------------------------------------- */

struct alone { /* a model with the logits of its ids, in one piece */
    struct run run;
    int32_t ids[TOKENS];
    float *logits;
    uint32_t vocab, layers, embd;
};

static void alone_open(struct alone *a, const char *name)
{
    cuda_run_open(&a->run, name, 512);
    a->vocab = a->run.model->params.vocab_count, a->layers = a->run.model->params.layer_count;
    a->embd = a->run.model->params.embd_size;
    fill_ids(a->ids, TOKENS, a->vocab, 42);
    a->logits = new_logits(&a->run, TOKENS);
    run_chunks(&a->run, a->ids, TOKENS, TOKENS, a->run.pages, a->logits);
}

static void alone_close(struct alone *a)
{
    free(a->logits), run_close(&a->run);
}

/* Prefill chunks and decode rows of four sequences in one step; only some rows want logits. */
static void a_mixed_batch(void **state)
{
    (void)state;
    struct alone a;
    alone_open(&a, "llama-gqa-untied");
    struct run *r = &a.run;
    uint32_t pages[4][3], at[4] = {0, 10, 100, 149}, count[4] = {33, 1, 50, 1};
    float *out = new_logits(r, 16);
    for (uint32_t i = 0; i < 4; i++) {
        for (uint32_t k = 0; k < 3; k++)
            pages[i][k] = r->pages[10 + 3 * i + k];
        if (at[i]) {
            struct batch_seq s = {.layer_end = a.layers, .row_count = at[i], .ids = a.ids, .pages = pages[i]};
            assert_int_equal(run_batch(r, &s, 1), 0); /* nobody wants to see a row */
        }
    }
    static const uint32_t logit_count[4] = {5, 1, 0, 1};
    struct batch_seq seqs[4];
    for (uint32_t i = 0, row = 0; i < 4; row += logit_count[i++])
        seqs[i] = (struct batch_seq){.layer_end = a.layers,
                                     .position = at[i],
                                     .row_count = count[i],
                                     .ids = a.ids + at[i],
                                     .logits = logit_count[i] ? out + (size_t)row * a.vocab : NULL,
                                     .logit_count = logit_count[i],
                                     .pages = pages[i]};
    assert_int_equal(run_batch(r, seqs, 4), 0);
    for (uint32_t i = 0; i < 4; i++)
        if (logit_count[i])
            check_close(seqs[i].logits, a.logits + (size_t)(at[i] + count[i] - logit_count[i]) * a.vocab,
                        (size_t)logit_count[i] * a.vocab, BOUND_SELF, "mixed batch");
    free(out), alone_close(&a);
}

/* Layers [0, k) on one engine, the rest on another, both parts and a third sequence in one batch; then decode on KV carried over. */
static void layer_ranges_and_carried_pages(void **state)
{
    (void)state;
    struct alone a;
    struct run upper;
    alone_open(&a, "qwen3");
    cuda_run_open(&upper, "qwen3", 512);
    float *hidden = calloc((size_t)TOKENS * a.embd, sizeof *hidden), *logits = new_logits(&upper, TOKENS);
    struct batch_seq lower = {
        .layer_end = 1, .row_count = 140, .ids = a.ids, .hidden_out = hidden, .pages = a.run.pages + 20};
    struct batch_seq other = {.layer_end = a.layers,
                              .row_count = 20,
                              .ids = a.ids,
                              .pages = a.run.pages + 30,
                              .logits = logits,
                              .logit_count = 20};
    assert_int_equal(run_batch(&a.run, (struct batch_seq[]){other, lower}, 2), 0);
    check_close(logits, a.logits, 20 * (size_t)a.vocab, BOUND_SELF, "whole range beside another");
    struct batch_seq rest = {.layer_begin = 1,
                             .layer_end = a.layers,
                             .row_count = 140,
                             .hidden_in = hidden,
                             .logits = logits,
                             .logit_count = 140,
                             .pages = upper.pages};
    assert_int_equal(run_batch(&upper, &rest, 1), 0);
    check_close(logits, a.logits, 140 * (size_t)a.vocab, BOUND_SELF, "upper layers");
    const struct model_params *p = &upper.model->params;
    uint16_t *k = calloc((size_t)64 * p->kv_head_count * p->head_dim, 2),
             *v = calloc((size_t)64 * p->kv_head_count * p->head_dim, 2);
    for (uint32_t block = 0; block < 3; block++) {
        uint32_t count = TD_MIN(64u, 140 - 64 * block);
        assert_int_equal(
            a.run.backend->ops->page_read(a.run.backend, a.run.pages[20 + block], 0, count, k, v), 0);
        assert_int_equal(upper.backend->ops->page_write(upper.backend, upper.pages[block], 0, count, k, v),
                         0);
    }
    assert_int_equal(upper.backend->ops->page_copy(upper.backend, upper.pages[2], upper.pages[40]), 0);
    uint32_t pages[3] = {upper.pages[0], upper.pages[1], upper.pages[40]};
    for (uint32_t at = 140; at < TOKENS; at++) {
        struct batch_seq s = {.layer_end = a.layers,
                              .position = at,
                              .row_count = 1,
                              .ids = a.ids + at,
                              .logits = logits,
                              .logit_count = 1,
                              .pages = pages};
        assert_int_equal(run_batch(&upper, &s, 1), 0);
        check_close(logits, a.logits + (size_t)at * a.vocab, a.vocab, BOUND_SELF, "decode on carried pages");
    }
    struct batch_seq ends = {.layer_begin = a.layers,
                             .layer_end = a.layers,
                             .position = UINT32_MAX,
                             .row_count = 3,
                             .hidden_in = hidden,
                             .logits = logits,
                             .logit_count = 2};
    assert_int_equal(run_batch(&upper, &ends, 1), 0);
    free(k), free(v), free(hidden), free(logits), run_close(&upper), alone_close(&a);
}

/* Two sequences decoded together, over a block's border: the steps are recorded and replayed. */
static void recorded_steps(void **state)
{
    (void)state;
    struct alone a;
    alone_open(&a, "type-k");
    struct run *r = &a.run;
    float *out = new_logits(r, 2);
    for (uint32_t i = 0; i < 2; i++) {
        struct batch_seq s = {
            .layer_end = a.layers, .row_count = 40 + 20 * i, .ids = a.ids, .pages = r->pages + 10 + 5 * i};
        assert_int_equal(run_batch(r, &s, 1), 0);
    }
    for (uint32_t step = 0; step < small_or(6, 40); step++) {
        struct batch_seq seqs[2];
        for (uint32_t i = 0; i < 2; i++)
            seqs[i] = (struct batch_seq){.layer_end = a.layers,
                                         .position = 40 + 20 * i + step,
                                         .row_count = 1,
                                         .ids = a.ids + 40 + 20 * i + step,
                                         .logits = out + i * (size_t)a.vocab,
                                         .logit_count = 1,
                                         .pages = r->pages + 10 + 5 * i};
        memset(out, 0xff, sizeof(float) * 2 * a.vocab);
        assert_int_equal(run_batch(r, seqs, 2), 0);
        for (uint32_t i = 0; i < 2; i++)
            check_close(seqs[i].logits, a.logits + (size_t)seqs[i].position * a.vocab, a.vocab, BOUND_SELF,
                        "recorded step");
    }
    free(out), alone_close(&a);
}

/* The kernel that holds a whole step, on the types that it is made for (and one that it is not): three sequences decoded side by
 * side give what the same engine computes for the prompt in one piece, and what the CPU does. */
static void whole_steps(void **state)
{
    (void)state;
    static const char *const types[] = {"bf16", "q4_k", "f16", "q8_0", "q6_k"};
    uint32_t length = (uint32_t)small_or(84, 200);
    enum { SEQS = 3, PROMPT = 50, LENGTH = 200 };
    for (size_t t = 0; t < small_or(2, TD_COUNT(types)); t++) {
        struct bench_model *m;
        struct td_error err = {0};
        struct backend_config config = {
            .page_count = RUN_PAGES, .layers_paged = 2, .rows_max = 256, .threads = 2};
        struct run r = {0};
        struct backend *cpu;
        int32_t ids[LENGTH];
        assert_int_equal(bench_model_create("tiny", types[t], &m, &err), 0);
        r.model = bench_model_get(m);
        assert_int_equal(cuda_backend_create(r.model, &config, "cuda", &r.backend, &err), 0);
        assert_int_equal(cpu_backend_create(r.model, &config, &cpu, &err), 0);
        uint32_t vocab = r.model->params.vocab_count;
        for (uint32_t i = 0; i < RUN_PAGES; i++)
            r.pages[i] = (i * 37 + 11) % RUN_PAGES;
        fill_ids(ids, LENGTH, vocab, 7);
        float *whole = new_logits(&r, LENGTH), *exact = new_logits(&r, LENGTH), *out = new_logits(&r, SEQS);
        run_chunks(&r, ids, LENGTH, LENGTH, r.pages, whole);
        struct batch_seq all = {.layer_end = 2,
                                .row_count = LENGTH,
                                .ids = ids,
                                .logits = exact,
                                .logit_count = LENGTH,
                                .pages = r.pages};
        assert_int_equal(cpu->ops->forward(cpu, &(struct batch){&all, 1}), 0);
        double worst = 0, scale = 0;
        for (size_t i = 0; i < (size_t)LENGTH * vocab; i++)
            scale = fmax(scale, fabs((double)exact[i]));
        double to_cpu = difference(whole, exact, (size_t)LENGTH * vocab) / scale;
        for (uint32_t i = 0; i < SEQS; i++) {
            struct batch_seq s = {
                .layer_end = 2, .row_count = PROMPT + 10 * i, .ids = ids, .pages = r.pages + 10 + 5 * i};
            assert_int_equal(run_batch(&r, &s, 1), 0);
        }
        for (uint32_t step = 0; step + PROMPT + 10 * SEQS < length; step++) {
            struct batch_seq seqs[SEQS];
            for (uint32_t i = 0; i < SEQS; i++)
                seqs[i] = (struct batch_seq){.layer_end = 2,
                                             .position = PROMPT + 10 * i + step,
                                             .row_count = 1,
                                             .ids = ids + PROMPT + 10 * i + step,
                                             .logits = out + i * (size_t)vocab,
                                             .logit_count = 1,
                                             .pages = r.pages + 10 + 5 * i};
            memset(out, 0xff, sizeof(float) * SEQS * vocab);
            assert_int_equal(run_batch(&r, seqs, 1 + step % SEQS), 0);
            for (uint32_t i = 1 + step % SEQS; i < SEQS; i++) /* the others catch up */
                assert_int_equal(run_batch(&r, seqs + i, 1), 0);
            for (uint32_t i = 0; i < SEQS; i++) {
                double d =
                    difference(seqs[i].logits, whole + (size_t)seqs[i].position * vocab, vocab) / scale;
                if (!(d <= worst))
                    worst = d;
            }
        }
        print_message("%s: steps to prompt %.4f, to the CPU %.4f of the largest logit\n", types[t], worst,
                      to_cpu);
        assert_true(worst <= 0.02);
        assert_true(to_cpu <= 0.03); /* the CPU rounds activations to 8 bits beside quantised weights */
        free(whole), free(exact), free(out);
        cpu->ops->destroy(cpu), r.backend->ops->destroy(r.backend), bench_model_destroy(m);
    }
}

/* More sequences than a matrix-vector product takes, decoded side by side, against the prompt in one piece; 70: cuBLASLt. */
static void a_crowd(void **state)
{
    (void)state;
    static const char *const types[] = {"bf16", "f16"};
    enum { SEQS = 70, PROMPT = 20, LENGTH = 40, PAGES = 80 };
    uint32_t seqs_used = (uint32_t)small_or(33, SEQS);
    for (size_t t = 0; t < TD_COUNT(types); t++) {
        struct bench_model *m;
        struct td_error err = {0};
        struct backend_config config = {
            .page_count = PAGES, .layers_paged = 2, .rows_max = 256, .threads = 2};
        struct backend *b;
        int32_t ids[LENGTH];
        uint32_t pages[PAGES];
        assert_int_equal(bench_model_create("tiny", types[t], &m, &err), 0);
        const struct model *model = bench_model_get(m);
        assert_int_equal(cuda_backend_create(model, &config, "cuda", &b, &err), 0);
        uint32_t vocab = model->params.vocab_count;
        fill_ids(ids, LENGTH, vocab, 7);
        for (uint32_t i = 0; i < PAGES; i++)
            pages[i] = (i * 37 + 11) % PAGES;
        float *whole = calloc((size_t)LENGTH * vocab, sizeof *whole),
              *out = calloc((size_t)SEQS * vocab, sizeof *out);
        struct batch_seq all = {.layer_end = 2,
                                .row_count = LENGTH,
                                .ids = ids,
                                .logits = whole,
                                .logit_count = LENGTH,
                                .pages = pages + SEQS};
        assert_int_equal(b->ops->forward(b, &(struct batch){&all, 1}), 0);
        double worst = 0, scale = 0;
        for (size_t i = 0; i < (size_t)LENGTH * vocab; i++)
            scale = fmax(scale, fabs((double)whole[i]));
        for (uint32_t i = 0; i < seqs_used; i++) {
            struct batch_seq s = {
                .layer_end = 2, .row_count = PROMPT - i % 3, .ids = ids, .pages = pages + i};
            assert_int_equal(b->ops->forward(b, &(struct batch){&s, 1}), 0);
        }
        static const uint32_t crowds[] = {16, 64, 33, 33, 33, 9, 9, 9, 16, 16, 17, 64, 64, 64, 70, 70, 70};
        for (uint32_t step = 0; step < small_or(3, TD_COUNT(crowds)); step++) {
            struct batch_seq seqs[SEQS];
            for (uint32_t i = 0; i < seqs_used; i++) {
                uint32_t at = PROMPT - i % 3 + step;
                seqs[i] = (struct batch_seq){.layer_end = 2,
                                             .position = at,
                                             .row_count = 1,
                                             .ids = ids + at,
                                             .logits = out + i * (size_t)vocab,
                                             .logit_count = 1,
                                             .pages = pages + i};
            }
            memset(out, 0xff, sizeof(float) * SEQS * vocab);
            for (uint32_t i = 0; i < seqs_used; i += crowds[step]) {
                struct batch crowd = {seqs + i, TD_MIN(crowds[step], seqs_used - i)};
                assert_int_equal(b->ops->forward(b, &crowd), 0);
            }
            for (uint32_t i = 0; i < seqs_used; i++)
                worst =
                    fmax(worst,
                         difference(seqs[i].logits, whole + (size_t)seqs[i].position * vocab, vocab) / scale);
        }
        print_message("%s: a crowd's steps to prompt %.4f of the largest logit\n", types[t], worst);
        assert_true(worst <= (t == 0 ? 0.02 : 0.005));
        free(whole), free(out), b->ops->destroy(b), bench_model_destroy(m);
    }
}

/* A step that is looked at gives what the others give, and tells where its time went. */
static void a_step_looked_at(void **state)
{
    (void)state;
    struct alone a;
    alone_open(&a, "type-k");
    float *first = new_logits(&a.run, 1), *out = new_logits(&a.run, 1);
    struct cuda_profile before, after;
    uint32_t steps = (uint32_t)small_or(12, 300);
    cuda_profile_read(a.run.backend, &before);
    struct batch_seq s = {.layer_end = a.layers,
                          .position = 100,
                          .row_count = 1,
                          .ids = a.ids + 100,
                          .logits = first,
                          .logit_count = 1,
                          .pages = a.run.pages};
    for (uint32_t i = 0; i < steps; i++) {
        assert_int_equal(run_batch(&a.run, &s, 1), 0);
        if (i > 0)
            assert_memory_equal(out, first, sizeof(float) * a.vocab);
        memset(out, 0xff, sizeof(float) * a.vocab);
        s.logits = out;
    }
    cuda_profile_read(a.run.backend, &after);
    double parts = 0;
    for (int i = 0; i < CUDA_PARTS; i++)
        parts += after.part_s[i];
    assert_int_equal(after.steps - before.steps, steps);
    assert_in_range(after.looked_at, before.looked_at + 1, before.looked_at + 2);
    assert_true(after.busy_s > before.busy_s && after.idle_s > before.idle_s && parts > 0 &&
                parts < after.busy_s);
    assert_true(after.part_s[CUDA_PART_ATTENTION] + after.part_s[CUDA_PART_LAYERS] > 0);
    assert_true(after.part_s[CUDA_PART_COPIES] > 0);
    free(first), free(out), alone_close(&a);
}

static void pages_keep_their_bytes(void **state)
{
    (void)state;
    struct run r;
    cuda_run_open(&r, "llama-gqa-untied", 8);
    const struct model_params *p = &r.model->params;
    enum { COUNT = 23 };
    size_t values = (size_t)COUNT * p->kv_head_count * p->head_dim;
    uint16_t *in = calloc(2 * values, 2), *out = calloc(2 * values, 2);
    for (size_t i = 0; i < 2 * values; i++)
        in[i] = (uint16_t)(i * 7 + 1);
    assert_int_equal(r.backend->ops->page_write(r.backend, 9, 1, COUNT, in, in + values), 0);
    assert_int_equal(r.backend->ops->page_copy(r.backend, 9, 63), 0);
    assert_int_equal(r.backend->ops->page_read(r.backend, 63, 1, COUNT, out, out + values), 0);
    assert_memory_equal(in, out, 4 * values);
    assert_int_equal(r.backend->ops->page_read(r.backend, 64, 1, COUNT, out, out), -TD_ERR_ARG);
    assert_int_equal(r.backend->ops->page_write(r.backend, 0, 9, COUNT, in, in), -TD_ERR_ARG);
    assert_int_equal(r.backend->ops->page_copy(r.backend, 0, 64), -TD_ERR_ARG);
    free(in), free(out), run_close(&r);
}

static void what_is_wrong_is_a_code(void **state)
{
    (void)state;
    struct run r;
    cuda_run_open(&r, "llama-gqa-untied", 8);
    int32_t ids[16] = {0};
    struct batch_seq good = {.layer_end = 2, .row_count = 1, .ids = ids, .pages = r.pages}, s = good;
    s.row_count = 9, assert_int_equal(run_batch(&r, &s, 1), -TD_ERR_LIMIT);
    s = good, s.layer_end = 3, assert_int_equal(run_batch(&r, &s, 1), -TD_ERR_UNSUPPORTED);
    s = good, s.ids = NULL, assert_int_equal(run_batch(&r, &s, 1), -TD_ERR_ARG);
    s = good, s.position = UINT32_MAX, assert_int_equal(run_batch(&r, &s, 1), -TD_ERR_CONTEXT);
    ids[0] = -1, assert_int_equal(run_batch(&r, &good, 1), -TD_ERR_ARG);
    ids[0] = 0, assert_int_equal(run_batch(&r, &good, 1), 0);
    struct backend *b;
    struct td_error err = {0};
    struct backend_config huge = {.page_count = UINT32_MAX, .layers_paged = 2, .rows_max = 8};
    assert_int_equal(cuda_backend_create(r.model, &huge, "cuda", &b, &err), -TD_ERR_NOMEM);
    assert_non_null(strstr(err.text, "at most"));
    huge.page_count = 4;
    huge.memory_share = 1e-6; /* less than the weights take */
    assert_int_equal(cuda_backend_create(r.model, &huge, "cuda", &b, &err), -TD_ERR_NOMEM);
    assert_non_null(strstr(err.text, "it takes"));
    assert_non_null(strstr(err.text, "--gpu-memory-utilization"));
    huge.memory_share = 0;
    assert_int_equal(cuda_backend_create(r.model, &huge, "cuda:900", &b, &err), -TD_ERR_NOTFOUND);
    assert_int_equal(cuda_backend_create(r.model, &huge, "cuda:x", &b, &err), -TD_ERR_ARG);
    run_close(&r);
}

struct seen_progress {
    uint64_t calls, done, total;
    bool back;
};

static void see_progress(void *ctx, uint64_t done, uint64_t total)
{
    struct seen_progress *s = ctx;
    s->back |= done < s->done || done > total || (s->calls > 0 && total != s->total);
    s->calls++, s->done = done, s->total = total;
}

static void the_load_tells_how_far_it_is(void **state)
{
    (void)state;
    struct run r;
    cuda_run_open(&r, "llama-gqa-untied", 8);
    struct seen_progress seen = {0};
    struct backend_config config = {
        .page_count = 4, .layers_paged = 2, .rows_max = 8, .progress = see_progress, .progress_ctx = &seen};
    struct backend *b;
    struct td_error err = {0};
    assert_int_equal(cuda_backend_create(r.model, &config, "cuda", &b, &err), 0);
    assert_true(seen.calls > 2 && !seen.back);
    assert_int_equal(seen.done, seen.total);
    b->ops->destroy(b);
    run_close(&r);
}

/* Without a GPU, or in a build without CUDA, making an engine says so. */
static int without_a_gpu(const char *why)
{
    struct run r = {0};
    struct td_error err = {0};
    char path[512];
    snprintf(path, sizeof path, "%s/tiny/%s.gguf", TEST_DATA, golden_names[0]);
    if (gguf_open(path, &r.file, &err) || model_load(r.file, &r.model, &err))
        return 1;
    struct backend_config config = {.page_count = 4, .layers_paged = 2, .rows_max = 8};
    int rc = cuda_backend_create(r.model, &config, "cuda", &r.backend, &err);
    model_free(r.model), gguf_close(r.file);
    printf("skipped: %s\n", why);
    return rc == -TD_ERR_UNSUPPORTED && strstr(err.text, "--device cpu") ? 0 : 1;
}

int main(void)
{
    char why[200];
    if (!cuda_available(why, sizeof why))
        return without_a_gpu(why);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_of_the_reference),
        cmocka_unit_test(a_mixed_batch),
        cmocka_unit_test(layer_ranges_and_carried_pages),
        cmocka_unit_test(recorded_steps),
        cmocka_unit_test(whole_steps),
        cmocka_unit_test(a_crowd),
        cmocka_unit_test(a_step_looked_at),
        cmocka_unit_test(pages_keep_their_bytes),
        cmocka_unit_test(the_load_tells_how_far_it_is),
        cmocka_unit_test(what_is_wrong_is_a_code),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
