/* cuda_faults: what goes wrong on a GPU is a code, which every call answers from then on, and nothing hangs: a device whose memory others have
 * taken, a device that is lost. The last, as nothing works in this process behind it. Skipped where no GPU is. */
#include "tests/unit/kernels/models.h"
#include "tests/unit/kernels/on_gpu.h"

#ifdef TANDEM_HAS_CUDA
#include "kernels/cuda/kernels.h"

enum { PROMPT = 40, STEPS = 6, HOGS_MAX = 4096 };

static int gpu_open(struct run *r)
{
    struct td_error err = {0};
    struct backend_config config = {.page_count = RUN_PAGES, .layers_paged = 2, .rows_max = 64, .warm = true};
    if (gguf_open(TEST_DATA "/tiny/llama-gqa-untied.gguf", &r->file, &err) ||
        model_load(r->file, &r->model, &err))
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < RUN_PAGES; i++)
        r->pages[i] = i;
    return cuda_backend_create(r->model, &config, "cuda:0", &r->backend, &err);
}

/* The prompt in one piece and then some steps; the last one's logits. 0, or the code of the call that failed. */
static int run_all(struct run *r, float *logits)
{
    int32_t ids[PROMPT + STEPS];
    fill_ids(ids, PROMPT + STEPS, r->model->params.vocab_count, 5);
    int rc = 0;
    for (uint32_t at = 0, rows = PROMPT; at < PROMPT + STEPS && rc == 0; at += rows, rows = 1) {
        struct batch_seq s = {.layer_end = 2,
                              .position = at,
                              .row_count = at == 0 ? PROMPT : 1,
                              .ids = ids + at,
                              .logits = logits,
                              .logit_count = 1,
                              .pages = r->pages};
        rc = run_batch(r, &s, 1);
    }
    return rc;
}

/* Kernels have been loaded before; steps go on without what they would have recorded. */
static void others_take_all_memory(void **state)
{
    (void)state;
    struct run r;
    static void *hogs[HOGS_MAX];
    uint32_t count = 0;
    assert_int_equal(gpu_open(&r), 0);
    float *want = new_logits(&r, 1), *got = new_logits(&r, 1);
    for (size_t size = (size_t)64 << 30; size >= 4096 && count < HOGS_MAX;)
        if (cudaMalloc(&hogs[count], size) == cudaSuccess)
            count++;
        else
            size /= 2;
    struct batch_seq seqs[8];
    int32_t ids[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    float *rest = new_logits(&r, 8);
    for (uint32_t n = 2; n <= 8; n++) /* shapes that were not recorded yet */
        for (int time = 0; time < 3; time++) {
            for (uint32_t i = 0; i < n; i++)
                seqs[i] = (struct batch_seq){.layer_end = 2,
                                             .row_count = 1,
                                             .ids = ids + i,
                                             .logits = rest + (size_t)i * r.model->params.vocab_count,
                                             .logit_count = 1,
                                             .pages = r.pages + 8 + i};
            assert_int_equal(run_batch(&r, seqs, n), 0);
        }
    assert_int_equal(run_all(&r, got), 0);
    struct run second = {0};
    assert_true(gpu_open(&second) < 0);
    model_free(second.model), gguf_close(second.file);
    while (count > 0)
        cudaFree(hogs[--count]);
    assert_int_equal(run_all(&r, want), 0);
    assert_memory_equal(got, want, sizeof *got * r.model->params.vocab_count);
    free(want), free(got), free(rest), run_close(&r);
}

static void assert_nothing_works(struct run *r, float *logits)
{
    const struct backend_ops *ops = r->backend->ops;
    static uint16_t k[64 * 64], v[64 * 64];
    struct page_swap swap = {
        .pages = r->pages, .hosts = (void *[]){k}, .count = 1, .layer_end = 1, .to_host = true};
    struct page_piece piece = {0};
    assert_int_equal(ops->state(r->backend), -TD_ERR_INTERNAL);
    assert_int_equal(run_all(r, logits), -TD_ERR_INTERNAL);
    assert_int_equal(ops->page_read(r->backend, 0, 0, 64, k, v), -TD_ERR_INTERNAL);
    assert_int_equal(ops->page_write(r->backend, 0, 0, 64, k, v), -TD_ERR_INTERNAL);
    assert_int_equal(ops->page_copy(r->backend, 0, 1), -TD_ERR_INTERNAL);
    assert_int_equal(ops->pieces_write(r->backend, &piece, 1), -TD_ERR_INTERNAL);
    assert_int_equal(ops->swap_start(r->backend, &swap), -TD_ERR_INTERNAL);
    assert_int_equal(ops->swap_done(r->backend, 1, true), -TD_ERR_INTERNAL);
    assert_null(ops->host_take(r->backend, 4096));
}

static int64_t one_swap(struct run *r, void *host)
{
    struct page_swap swap = {.pages = r->pages, .hosts = &host, .count = 1, .layer_end = 1, .to_host = true};
    return r->backend->ops->swap_start(r->backend, &swap);
}

/* A kernel that writes where nothing is takes the whole context with it. */
static void a_device_that_is_lost(void **state)
{
    (void)state;
    struct run r;
    assert_int_equal(gpu_open(&r), 0);
    float *logits = new_logits(&r, 1);
    void *host = r.backend->ops->host_take(r.backend, 1 << 20);
    assert_true(one_swap(&r, host) > 0);
    assert_int_equal(run_all(&r, logits), 0);
    cuda_swiglu(0, (void *)64, 1, 64, false, false, (void *)4096);
    assert_int_not_equal(cudaDeviceSynchronize(), cudaSuccess);
    assert_int_equal(r.backend->ops->state(r.backend), -TD_ERR_INTERNAL); /* before anybody has computed */
    assert_int_equal(run_all(&r, logits), -TD_ERR_INTERNAL);
    assert_nothing_works(&r, logits);
    r.backend->ops->host_give(r.backend, host);
    free(logits), run_close(&r);
    assert_true(gpu_open(&r) < 0);
    model_free(r.model), gguf_close(r.file);
}
#endif

int main(void)
{
    if (!gpu_is_here())
        return 0;
#ifdef TANDEM_HAS_CUDA
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(others_take_all_memory),
        cmocka_unit_test(a_device_that_is_lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
#endif
}
