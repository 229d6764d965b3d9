/* models: what the tests of the forward pass share: a tiny golden model with a backend on it, and running one sequence. */
#ifndef TANDEM_TESTS_KERNELS_MODELS_H
#define TANDEM_TESTS_KERNELS_MODELS_H
#include "kernels/backend.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define RUN_PAGES 64

/* The models of tests/golden/tiny. */
static const char *const golden_names[] = {"llama-gqa-untied",
                                           "llama-mha-tied",
                                           "llama-rope-linear",
                                           "llama-rope-freqs",
                                           "llama-spm",
                                           "qwen2",
                                           "qwen3",
                                           "type-f32",
                                           "type-q8_0",
                                           "type-q4_0",
                                           "type-q4_1",
                                           "type-q5_0",
                                           "type-q5_1",
                                           "type-k"};

struct run { /* a model, a backend, and its pages handed out in a scattered order */
    struct gguf *file;
    struct model *model;
    struct backend *backend;
    uint32_t pages[RUN_PAGES];
};

/* cuda-det-v2 where its rule is kept (sm_90a, heads of 64 and 128 values), else one for each kind of device. */
static inline void check_det_numerics(const struct backend *b)
{
    uint32_t kind = b->kv_dtype, numerics = b->ops->numerics;
    if (b->model->params.head_dim != 64 && b->model->params.head_dim != 128)
        assert_true(numerics >= KV_NUMERICS_CUDA_DET_OTHER);
    if (numerics >= KV_NUMERICS_CUDA_DET_OTHER)
        assert_int_equal((numerics - KV_NUMERICS_CUDA_DET_OTHER) % 3, kind);
    else
        assert_int_equal(numerics, KV_NUMERICS_CUDA_DET_V2 + kind);
}

static inline void run_open_path(struct run *r, const char *path, unsigned threads, const char *isa,
                                 uint32_t rows_max)
{
    struct td_error err = {0};
    if (gguf_open(path, &r->file, &err) || model_load(r->file, &r->model, &err))
        fail_msg("%s", err.text);
    struct backend_config config = {.page_count = RUN_PAGES,
                                    .layers_paged = r->model->layers_held,
                                    .threads = threads,
                                    .rows_max = rows_max,
                                    .isa = isa};
    if (cpu_backend_create(r->model, &config, &r->backend, &err))
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < RUN_PAGES; i++)
        r->pages[i] = (i * 37 + 11) % RUN_PAGES;
}

static inline void run_open(struct run *r, const char *name, unsigned threads, const char *isa)
{
    char path[512];
    snprintf(path, sizeof path, "%s/tiny/%s.gguf", TEST_DATA, name);
    run_open_path(r, path, threads, isa, 512);
}

static inline void run_close(struct run *r)
{
    r->backend->ops->destroy(r->backend);
    model_free(r->model);
    gguf_close(r->file);
}

static inline int run_batch(struct run *r, const struct batch_seq *seqs, uint32_t count)
{
    return r->backend->ops->forward(r->backend, &(struct batch){seqs, count});
}

/* Token ids that look like nothing in particular. */
static inline void fill_ids(int32_t *ids, uint32_t count, uint32_t vocab_count, uint32_t seed)
{
    for (uint32_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (int32_t)((seed >> 8) % vocab_count);
    }
}

static inline float *new_logits(const struct run *r, uint32_t rows)
{
    float *p = calloc((size_t)rows * r->model->params.vocab_count, sizeof *p);
    assert_non_null(p);
    return p;
}

/* ids[0..count) from position 0 in chunks; logits of every row. pages: of the sequence. */
static inline void run_chunks(struct run *r, const int32_t *ids, uint32_t count, uint32_t chunk,
                              const uint32_t *pages, float *logits)
{
    for (uint32_t at = 0; at < count; at += chunk) {
        uint32_t rows = TD_MIN(chunk, count - at);
        struct batch_seq s = {.layer_end = r->model->params.layer_count,
                              .position = at,
                              .row_count = rows,
                              .ids = ids + at,
                              .logits = logits + (size_t)at * r->model->params.vocab_count,
                              .logit_count = rows,
                              .pages = pages};
        assert_int_equal(run_batch(r, &s, 1), 0);
    }
}

#endif
