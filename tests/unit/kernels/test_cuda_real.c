/* cuda_real: the CUDA engine on the real model of the golden data: no further from the float32 reference than the CPU's engine, prompt
 * and decode steps alike; perplexity over 10,000 tokens; greedy text; what pages of 8 bits change. Skipped without a GPU or the model (test_logits_real.c says how
 * it is named). */
#include "kernels/cuda/cuda.h"
#include "tests/unit/kernels/real_model.h"

static struct run gpu;

static void open_engine(struct run *r, enum kv_dtype dtype)
{
    struct td_error err = {0};
    if (gguf_open(model_path, &r->file, &err) || model_load(r->file, &r->model, &err))
        fail_msg("%s", err.text);
    struct backend_config config = {
        .page_count = RUN_PAGES, .layers_paged = r->model->layers_held, .rows_max = 512, .kv_dtype = dtype};
    if (cuda_backend_create(r->model, &config, "cuda", &r->backend, &err))
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < RUN_PAGES; i++)
        r->pages[i] = (i * 37 + 11) % RUN_PAGES;
}

static int open_gpu(void **state)
{
    (void)state;
    open_engine(&gpu, KV_DTYPE_F16);
    return 0;
}

static int close_gpu(void **state)
{
    (void)state;
    run_close(&gpu);
    return 0;
}

static void no_further_than_the_cpu(void **state)
{
    (void)state;
    struct run cpu;
    run_open_path(&cpu, model_path, 0, NULL, 512);
    struct real_score of_cpu = real_score_of(&cpu, 512), prompt = real_score_of(&gpu, 512),
                      steps = real_score_of(&gpu, 1);
    print_message(
        "%zu positions: mean KL %.6f as prompts, %.6f in steps (CPU %.6f); perplexity %.4f, %.4f (CPU "
        "%.4f, float32 %.4f)\n",
        prompt.positions, prompt.mean_kl, steps.mean_kl, of_cpu.mean_kl, prompt.perplexity, steps.perplexity,
        of_cpu.perplexity, golden_number("reference", "perplexity"));
    assert_true(prompt.mean_kl <= of_cpu.mean_kl && prompt.mean_kl > 0);
    assert_true(steps.mean_kl <= of_cpu.mean_kl && steps.mean_kl > 0);
    run_close(&cpu);
}

static void perplexity_is_the_references(void **state)
{
    (void)state;
    double reference;
    size_t positions;
    double perplexity = real_perplexity(&gpu, &reference, &positions);
    print_message("%zu positions: perplexity %.4f, float32 %.4f: %+.3f %%\n", positions, perplexity,
                  reference, 100 * (perplexity / reference - 1));
    assert_true(positions >= 10000);
    assert_true(fabs(perplexity / reference - 1) <= 0.003);
}

static void greedy_text_is_the_references(void **state)
{
    (void)state;
    struct real_greedy g = real_greedy_of(&gpu);
    print_message("greedy: %u of %u tokens are the reference's, %u of the %u with a margin of %.0f\n", g.same,
                  g.all, g.wide_same, g.wide, GREEDY_MARGIN);
    assert_int_equal(g.wide_same, g.wide);
}

/* Pages of 8 bits against pages of f16 on the same engine: what they add to the divergence from float32, and to perplexity. */
static void what_8bit_pages_change(void **state)
{
    (void)state;
    static const struct {
        enum kv_dtype dtype;
        const char *name;
        double kl, perplexity; /* added, at most */
    } kinds[] = {{KV_DTYPE_FP8, "fp8", 0.02, 0.02}, {KV_DTYPE_INT8, "int8", 0.002, 0.003}};
    double reference;
    size_t positions;
    struct real_score before = real_score_of(&gpu, 512);
    double perplexity_before = real_perplexity(&gpu, &reference, &positions);
    for (size_t i = 0; i < TD_COUNT(kinds); i++) {
        struct run r;
        open_engine(&r, kinds[i].dtype);
        struct real_score prompt = real_score_of(&r, 512), steps = real_score_of(&r, 1);
        double perplexity = real_perplexity(&r, &reference, &positions);
        print_message("%s: mean KL to float32 %.6f as prompts, %.6f in steps (f16 pages %.6f); over %zu "
                      "positions perplexity "
                      "%.4f, with f16 pages %.4f: %+.3f %%\n",
                      kinds[i].name, prompt.mean_kl, steps.mean_kl, before.mean_kl, positions, perplexity,
                      perplexity_before, 100 * (perplexity / perplexity_before - 1));
        assert_true(prompt.mean_kl - before.mean_kl <= kinds[i].kl && prompt.mean_kl > 0);
        assert_true(steps.mean_kl - before.mean_kl <= kinds[i].kl && steps.mean_kl > 0);
        assert_true(fabs(perplexity / perplexity_before - 1) <= kinds[i].perplexity);
        run_close(&r);
    }
}

int main(void)
{
    char why[200];
    if (!cuda_available(why, sizeof why)) {
        printf("skipped: no model to be run: %s\n", why);
        return 0;
    }
    if (!golden_open())
        return 1;
    if (!model_is_here())
        return 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_further_than_the_cpu),
        cmocka_unit_test(perplexity_is_the_references),
        cmocka_unit_test(greedy_text_is_the_references),
        cmocka_unit_test(what_8bit_pages_change),
    };
    int failed = cmocka_run_group_tests(tests, open_gpu, close_gpu);
    json_decref(golden);
    return failed;
}
