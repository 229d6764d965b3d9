/* forward_double: every weight type through both engines against double precision, by ||out - ref|| / ||ref|| over all logits. The
 * bounds are what the engines' number formats explain: the CPU rounds activations to 8 bits beside quantised weights and computes
 * in float32 beside the others; CUDA's activations are f16, and bf16 beside BF16 weights. KV is f16 in both. */
#include "kernels/bench_model.h"
#include "kernels/cuda/cuda.h"
#include "tests/unit/kernels/double_forward.h"
#include "tests/unit/kernels/models.h"

enum { PROMPT = 20, LENGTH = 26 };

static const struct {
    const char *type;
    double cpu, cuda;
} cases[] = {
    {"f32", 1e-3, 2e-3},  {"f16", 1e-3, 2e-3},  {"bf16", 1e-3, 1e-2}, {"q8_0", 3e-2, 3e-3},
    {"q4_0", 3e-2, 3e-3}, {"q4_1", 3e-2, 3e-3}, {"q5_0", 3e-2, 3e-3}, {"q5_1", 3e-2, 3e-3},
    {"q4_k", 3e-2, 3e-3}, {"q5_k", 3e-2, 3e-3}, {"q6_k", 3e-2, 3e-3},
};

/* The prompt in one piece, then a row at a time: both kinds of products. */
static double distance(struct run *r, const int32_t *ids, const double *want)
{
    uint32_t vocab = r->model->params.vocab_count;
    float *got = new_logits(r, LENGTH);
    for (uint32_t at = 0; at < LENGTH;) {
        uint32_t rows = at < PROMPT ? PROMPT : 1;
        struct batch_seq s = {.layer_end = r->model->params.layer_count,
                              .position = at,
                              .row_count = rows,
                              .ids = ids + at,
                              .logits = got + (size_t)at * vocab,
                              .logit_count = rows,
                              .pages = r->pages};
        assert_int_equal(run_batch(r, &s, 1), 0);
        at += rows;
    }
    double error = 0, norm = 0;
    for (size_t i = 0; i < (size_t)LENGTH * vocab; i++) {
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += want[i] * want[i];
    }
    free(got);
    return sqrt(error / norm);
}

static void every_type_is_near_double_precision(void **state)
{
    (void)state;
    char why[200];
    bool gpu = cuda_available(why, sizeof why);
    for (size_t c = 0; c < TD_COUNT(cases); c++) {
        struct bench_model *m;
        struct td_error err = {0};
        struct backend_config config = {
            .page_count = RUN_PAGES, .layers_paged = 2, .rows_max = PROMPT, .threads = 2};
        struct run cpu = {0}, cuda = {0};
        int32_t ids[LENGTH];
        assert_int_equal(bench_model_create("tiny", cases[c].type, &m, &err), 0);
        cpu.model = cuda.model = bench_model_get(m);
        cpu.pages[0] = cuda.pages[0] = 5;
        uint32_t vocab = cpu.model->params.vocab_count;
        fill_ids(ids, LENGTH, vocab, 7);
        double *want = calloc((size_t)LENGTH * vocab, sizeof *want);
        double_forward(cpu.model, ids, LENGTH, want);
        assert_int_equal(cpu_backend_create(cpu.model, &config, &cpu.backend, &err), 0);
        double of_cpu = distance(&cpu, ids, want), of_cuda = 0;
        if (gpu) {
            assert_int_equal(cuda_backend_create(cuda.model, &config, "cuda", &cuda.backend, &err), 0);
            of_cuda = distance(&cuda, ids, want);
            cuda.backend->ops->destroy(cuda.backend);
        }
        print_message("%s: CPU %.2e, CUDA %.2e from double precision\n", cases[c].type, of_cpu, of_cuda);
        if (!(of_cpu <= cases[c].cpu) || !(of_cuda <= cases[c].cuda))
            fail_msg("%s: at most %.2e and %.2e", cases[c].type, cases[c].cpu, cases[c].cuda);
        free(want), cpu.backend->ops->destroy(cpu.backend), bench_model_destroy(m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_type_is_near_double_precision)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
