/* bench: it measures what it says on a tiny model, and says what is wrong otherwise. */
#include "kernels/bench.h"
#include "kernels/backend.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define MODEL TEST_DATA "/tiny/type-q4_1.gguf"

static void rates_of_a_tiny_model(void **state)
{
    (void)state;
    struct bench_engine_options o = {.model_path = MODEL,
                                     .threads = 2,
                                     .prompt_tokens = 70,
                                     .gen_tokens = 5,
                                     .chunk_tokens = 32,
                                     .repeat_count = 3};
    struct bench_engine_result r;
    struct td_error err = {0};
    assert_int_equal(bench_engine(&o, &r, &err), 0);
    assert_true(r.prefill_tps > 0 && r.decode_tps > 0 && r.load_s > 0);
    assert_int_equal(r.threads, 2);
    assert_string_equal(r.isa, cpu_backend_isa());
    assert_true(r.first_token_s > r.load_s && r.read_gb_s > 0);
    o.gen_tokens = 0, o.isa = "portable";
    assert_int_equal(bench_engine(&o, &r, &err), 0);
    assert_true(r.prefill_tps > 0 && r.decode_tps == 0);
    assert_string_equal(r.isa, "portable");
}

static const struct bench_family *family(const struct bench_family *families, uint32_t count,
                                         const char *name)
{
    for (uint32_t i = 0; i < count; i++)
        if (strcmp(families[i].name, name) == 0)
            return &families[i];
    fail_msg("no family %s", name);
    return NULL;
}

/* Work is what shapes say, time is all of it. */
static void families_add_up(void **state)
{
    (void)state;
    struct bench_engine_options o = {.model_path = MODEL, .threads = 2, .prompt_tokens = 70, .gen_tokens = 3};
    struct bench_engine_result r;
    struct td_error err = {0};
    assert_int_equal(bench_engine(&o, &r, &err), 0);
    double share = 0, ms = 0;
    for (uint32_t i = 0; i < r.prefill_family_count; i++)
        share += r.prefill_families[i].share, ms += r.prefill_families[i].ms;
    assert_true(share > 0.999 && share < 1.001);
    assert_true(ms <= r.prefill_ms + 0.1);
    struct gguf *file;
    struct model *m;
    assert_int_equal(gguf_open(MODEL, &file, &err), 0);
    assert_int_equal(model_load(file, &m, &err), 0);
    const struct model_params *p = &m->params;
    const double q = p->head_count * p->head_dim, kv = p->kv_head_count * p->head_dim;
    const double weights = p->embd_size * (2 * q + 2 * kv + 3.0 * p->ffn_size), tokens = o.prompt_tokens;
    const struct bench_family *products = family(r.prefill_families, r.prefill_family_count, "products Q4_1");
    /* the last layer's rows that nobody asks for go no further than K and V */
    double all = 2 * weights * tokens * p->layer_count;
    double rest = 2 * (weights - p->embd_size * (q + 2 * kv)) * (tokens - 1);
    double got = products->gop_s * products->ms * 1e6;
    assert_true(got > 0.999 * (all - rest) && got < 1.001 * (all - rest));
    const struct bench_family *attention = family(r.prefill_families, r.prefill_family_count, "attention");
    double seen = (p->layer_count - 1) * tokens * (tokens + 1) / 2 + tokens;
    got = attention->gop_s * attention->ms * 1e6;
    assert_true(got > 0.999 * 4 * q * seen && got < 1.001 * 4 * q * seen);
    assert_true(family(r.decode_families, r.decode_family_count, "logits")->gb_s > 0);
    model_free(m);
    gguf_close(file);
}

static void is_of(double fraction, double rate, double ceiling)
{
    assert_true(fabs(fraction * ceiling - rate) <= 1e-9 * rate);
}

/* Fractions are of the ceilings that are said, whatever else the machine did meanwhile. */
static void fractions_are_of_the_ceilings(void **state)
{
    (void)state;
    struct bench_engine_options o = {
        .model_path = MODEL, .threads = 2, .prompt_tokens = 70, .gen_tokens = 3, .repeat_count = 2};
    struct bench_engine_result r;
    struct td_error err = {0};
    assert_int_equal(bench_engine(&o, &r, &err), 0);
    for (uint32_t i = 0; i < r.prefill_family_count + r.decode_family_count; i++) {
        const struct bench_family *f = i < r.prefill_family_count
                                           ? &r.prefill_families[i]
                                           : &r.decode_families[i - r.prefill_family_count];
        is_of(f->of_read, f->gb_s, r.read_gb_s);
        if (f->peak)
            is_of(f->of_peak, f->gop_s, strcmp(f->peak, "int8") == 0 ? r.dot_gop_s : r.fma_gflop_s);
        else
            assert_true(f->of_peak == 0);
        bool is_int8 = r.dot_gop_s > 0 && strcmp(f->name, "products Q4_1") == 0,
             is_f32 = r.fma_gflop_s > 0 && strcmp(f->name, "attention") == 0;
        if (is_int8 || is_f32)
            assert_string_equal(f->peak, is_int8 ? "int8" : "f32");
    }
}

static struct told {
    uint32_t begins, ends, calls;
    uint64_t done;
} told;

static void hear(void *what, uint64_t done, uint64_t total)
{
    told.begins += done == 0;
    told.ends += done == total;
    told.calls++;
    assert_true(strlen(what) > 0 && done <= total && (done == 0 || done > told.done));
    told.done = done;
}

/* Weights, then the tokens of all runs: each begins and ends once. */
static void progress_is_told(void **state)
{
    (void)state;
    struct bench_engine_options o = {.shape = "tiny",
                                     .threads = 1,
                                     .prompt_tokens = 70,
                                     .gen_tokens = 3,
                                     .chunk_tokens = 32,
                                     .batch_count = 2,
                                     .repeat_count = 2,
                                     .progress = hear};
    struct bench_engine_result r;
    struct td_error err = {0};
    told = (struct told){0};
    assert_int_equal(bench_engine(&o, &r, &err), 0);
    assert_int_equal(told.begins, 2);
    assert_int_equal(told.ends, 2);
    assert_int_equal(told.done, 2 * 2 * 73);
    assert_int_equal(told.calls, 2 + 1 + 2 * (2 * 3 + 3));
    told = (struct told){0};
    o.shape = "giant"; /* nothing begins of what cannot be */
    assert_int_equal(bench_engine(&o, &r, &err), -TD_ERR_ARG);
    assert_int_equal(told.calls, 0);
}

static void check_fails(struct bench_engine_options o, int code, const char *word)
{
    struct bench_engine_result r;
    struct td_error err = {0};
    assert_int_equal(bench_engine(&o, &r, &err), code);
    assert_non_null(strstr(err.text, word));
}

static void what_cannot_run_says_why(void **state)
{
    (void)state;
    struct bench_engine_options good = {.model_path = MODEL, .threads = 1, .prompt_tokens = 4}, o;
    o = good, o.model_path = "/nonexistent.gguf", check_fails(o, -TD_ERR_NOTFOUND, "/nonexistent.gguf");
    o = good, o.prompt_tokens = 0, check_fails(o, -TD_ERR_ARG, "prompt");
    o = good, o.gen_tokens = 1u << 30, check_fails(o, -TD_ERR_CONTEXT, "context");
    o = good, o.isa = "mmx", check_fails(o, -TD_ERR_ARG, "mmx");
    static const char *const devices[] = {"tpu", "cuda:", "cuda:x", "cuda:1x", "cpu:0", ""};
    for (size_t i = 0; i < TD_COUNT(devices); i++)
        o = good, o.device = devices[i], check_fails(o, -TD_ERR_ARG, "want cpu, cuda or cuda:N");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rates_of_a_tiny_model),         cmocka_unit_test(families_add_up),
        cmocka_unit_test(fractions_are_of_the_ceilings), cmocka_unit_test(progress_is_told),
        cmocka_unit_test(what_cannot_run_says_why),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
