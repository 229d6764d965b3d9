/* cuda_launches: a kernel that the device does not take fails the step that it belongs to, at once, whichever kernel of whichever kind of step it is;
 * and a step that there is no memory to record is not recorded at each of its turns. Linked with the run-time library's launches, the clock
 * and the log in front of the real ones (tests/CMakeLists.txt). Skipped where no GPU is. */
#include "tests/unit/kernels/models.h"
#include "tests/unit/kernels/on_gpu.h"

#ifdef TANDEM_HAS_CUDA
#include "kernels/bench_model.h"
#include "kernels/cuda/kernels.h"
#include "shared/kv_codec.h"
#include "shared/log.h"

#define NOT_LAUNCHED "launching kernels on cuda:0 failed: "

enum { PROMPT = 40, DECODES = 4, STEPS = 1 + DECODES, TOO_MUCH = 1 << 20 };

/* --- in front of the real ones ---------------------------------------------------------------- */

static int64_t launch_count,
    launch_broken; /* the second: which of them asks for more shared memory than any block gets, or -1 */
static int record_count;
static bool no_room; /* to record a step */
static uint64_t later_us;
static char said[512]; /* the last line of the log */
static int said_count;

cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel,
                                       void **arguments);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel,
                                       void **arguments);
cudaError_t __real_cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags);
cudaError_t __wrap_cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags);
uint64_t __real_clock_mono_us(void);
uint64_t __wrap_clock_mono_us(void);
void __wrap_log_write(enum log_level level, const char *module, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments)
{
    cudaLaunchConfig_t changed = *config;
    if (launch_count++ == launch_broken)
        changed.dynamicSmemBytes = TOO_MUCH;
    return __real_cudaLaunchKernelExC(&changed, kernel, arguments);
}

cudaError_t __wrap_cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    record_count++;
    return no_room ? cudaErrorMemoryAllocation : __real_cudaGraphInstantiate(exec, graph, flags);
}

uint64_t __wrap_clock_mono_us(void)
{
    return __real_clock_mono_us() + later_us;
}

void __wrap_log_write(enum log_level level, const char *module, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(said, sizeof said, format, list);
    va_end(list);
    said_count += level >= LOG_WARN;
    (void)module;
}

/* --- a model and its steps -------------------------------------------------------------------- */

struct bench { /* a random model with heads that all kernels take */
    struct bench_model *model;
    struct run run;
    float *logits;
    int32_t ids[PROMPT + DECODES];
    int64_t begins[STEPS + 1]; /* the first launch of each step, if all are well */
};

static int bench_open(struct bench *b, const char *type, bool deterministic)
{
    struct td_error err = {0};
    struct backend_config config = {.page_count = RUN_PAGES,
                                    .layers_paged = 2,
                                    .rows_max = 64,
                                    .threads = 1,
                                    .deterministic = deterministic};
    if (!b->model) {
        assert_int_equal(bench_model_create("tiny", type, &b->model, &err), 0);
        b->run.model = bench_model_get(b->model);
        b->logits = malloc(sizeof(float) * b->run.model->params.vocab_count);
        fill_ids(b->ids, PROMPT + DECODES, b->run.model->params.vocab_count, 5);
        for (uint32_t i = 0; i < RUN_PAGES; i++)
            b->run.pages[i] = i;
    }
    return cuda_backend_create(b->run.model, &config, "cuda:0", &b->run.backend, &err);
}

static void bench_close(struct bench *b)
{
    free(b->logits);
    bench_model_destroy(b->model);
}

/* Step 0 is the prompt in one piece; step 1 a decode as it comes, 2 one that is recorded, the others play it. */
static int run_step(struct bench *b, uint32_t step)
{
    struct batch_seq s = {.layer_end = 2,
                          .position = step == 0 ? 0 : PROMPT + step - 1,
                          .row_count = step == 0 ? PROMPT : 1,
                          .ids = b->ids + (step == 0 ? 0 : PROMPT + step - 1),
                          .logits = b->logits,
                          .logit_count = 1,
                          .pages = b->run.pages};
    memset(b->logits, 0xff, sizeof(float) * b->run.model->params.vocab_count);
    return run_batch(&b->run, &s, 1);
}

/* --- launches --------------------------------------------------------------------------------- */

static void assert_no_logits(const struct bench *b)
{
    for (uint32_t i = 0; i < b->run.model->params.vocab_count; i++) {
        uint32_t bits;
        memcpy(&bits, &b->logits[i], sizeof bits);
        assert_int_equal(bits, UINT32_MAX);
    }
}

/* All steps, with one launch broken that belongs to step `at`. */
static void assert_step_fails(struct bench *b, const char *type, bool deterministic, uint32_t at,
                              int64_t launch)
{
    launch_broken = -1;
    assert_int_equal(bench_open(b, type, deterministic), 0);
    launch_count = 0, launch_broken = launch, said_count = 0;
    for (uint32_t step = 0; step < at; step++)
        assert_int_equal(run_step(b, step), 0);
    assert_int_equal(said_count, 0);
    assert_int_equal(run_step(b, at), -TD_ERR_INTERNAL);
    assert_no_logits(b);
    assert_int_equal(said_count, 1);
    assert_int_equal(strncmp(said, NOT_LAUNCHED, sizeof NOT_LAUNCHED - 1), 0);
    assert_int_equal(b->run.backend->ops->state(b->run.backend), -TD_ERR_INTERNAL);
    assert_int_equal(run_step(b, at), -TD_ERR_INTERNAL);
    launch_broken = -1;
    b->run.backend->ops->destroy(b->run.backend);
}

static void launches_of(const char *type, bool deterministic)
{
    struct bench b = {0};
    launch_broken = -1;
    assert_int_equal(bench_open(&b, type, deterministic), 0);
    launch_count = 0;
    for (uint32_t step = 0; step < STEPS; step++) {
        b.begins[step] = launch_count;
        assert_int_equal(run_step(&b, step), 0);
    }
    b.begins[STEPS] = launch_count;
    b.run.backend->ops->destroy(b.run.backend);
    assert_true(b.begins[1] > 0 && b.begins[2] > b.begins[1] && b.begins[3] > b.begins[2]);
    assert_int_equal(b.begins[STEPS], b.begins[3]); /* what is played back launches nothing itself */
    for (uint32_t step = 0; step < 3; step++)
        for (int64_t launch = b.begins[step]; launch < b.begins[step + 1]; launch++)
            assert_step_fails(&b, type, deterministic, step, launch);
    print_message("%s%s: %d, %d and %d launches, each of them noticed\n", type,
                  deterministic ? ", deterministic" : "", (int)b.begins[1], (int)(b.begins[2] - b.begins[1]),
                  (int)(b.begins[3] - b.begins[2]));
    bench_close(&b);
}

static void a_launch_of_a_step(void **state)
{
    (void)state;
    launches_of("bf16", false);
    launches_of("q4_1", false);
    launches_of("q4_1", true);
}

/* The kernels outside of steps: one that decodes pieces, one that repacks weights. */
static void a_launch_of_others(void **state)
{
    (void)state;
    struct bench b = {0};
    static uint16_t values[KV_BLOCK_TOKENS * 4096];
    launch_broken = -1;
    assert_int_equal(bench_open(&b, "q4_1", false), 0);
    const struct model_params *p = &b.run.model->params;
    size_t count = (size_t)p->kv_head_count * KV_BLOCK_TOKENS * p->head_dim;
    assert_true(count <= TD_COUNT(values));
    struct page_piece piece = {.head = {.codec = KV_RAW,
                                        .token_count = KV_BLOCK_TOKENS,
                                        .kv_head_count = (uint16_t)p->kv_head_count,
                                        .head_dim = (uint16_t)p->head_dim},
                               .payload = {(const uint8_t *)values, 2 * count}};
    assert_int_equal(b.run.backend->ops->pieces_write(b.run.backend, &piece, 1), 0);
    assert_int_equal(piece.status, 0);
    launch_count = 0, launch_broken = 0;
    assert_int_equal(b.run.backend->ops->pieces_write(b.run.backend, &piece, 1), -TD_ERR_INTERNAL);
    assert_string_equal(said, "decoding KV pieces on cuda:0 failed: invalid argument");
    launch_broken = -1;
    b.run.backend->ops->destroy(b.run.backend);
    launch_count = 0, launch_broken = 3;
    assert_true(bench_open(&b, "q4_1", false) < 0);
    launch_broken = -1;
    bench_close(&b);
}

/* --- recording -------------------------------------------------------------------------------- */

/* No more than nine passes: the eighth is looked at (profile.c), and nobody would record it. */
static void recording_waits_for_memory(void **state)
{
    (void)state;
    struct bench b = {0};
    launch_broken = -1;
    assert_int_equal(bench_open(&b, "bf16", false), 0);
    uint32_t vocab = b.run.model->params.vocab_count;
    float *want = calloc(vocab, sizeof *want);
    assert_int_equal(run_step(&b, 0), 0);
    no_room = true, record_count = said_count = 0;
    assert_int_equal(run_step(&b, 1), 0);
    memcpy(want, b.logits, sizeof *want * vocab);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(run_step(&b, 1), 0);
        assert_memory_equal(b.logits, want, sizeof *want * vocab);
        assert_int_equal(record_count, 1);
    }
    assert_int_equal(said_count, 1);
    assert_non_null(strstr(said, "--gpu-memory-utilization"));
    later_us += 6000000;
    assert_int_equal(run_step(&b, 1), 0);
    assert_int_equal(record_count, 2);
    assert_int_equal(said_count, 1);
    no_room = false, later_us += 6000000;
    for (int i = 0; i < 3; i++) {
        assert_int_equal(run_step(&b, 1), 0);
        assert_memory_equal(b.logits, want, sizeof *want * vocab);
        assert_int_equal(record_count, 3);
    }
    free(want);
    b.run.backend->ops->destroy(b.run.backend);
    bench_close(&b);
}
#endif

int main(void)
{
    if (!gpu_is_here())
        return 0;
#ifdef TANDEM_HAS_CUDA
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_launch_of_a_step),
        cmocka_unit_test(a_launch_of_others),
        cmocka_unit_test(recording_waits_for_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
#endif
}
