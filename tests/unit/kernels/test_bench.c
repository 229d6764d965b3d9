/* bench: it measures what it says on a tiny model, and says what is wrong otherwise. */
#include "kernels/bench.h"
#include "kernels/backend.h"
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
    o.gen_tokens = 0, o.isa = "portable";
    assert_int_equal(bench_engine(&o, &r, &err), 0);
    assert_true(r.prefill_tps > 0 && r.decode_tps == 0);
    assert_string_equal(r.isa, "portable");
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
    o = good, o.isa = "mmx", check_fails(o, -TD_ERR_UNSUPPORTED, "mmx");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rates_of_a_tiny_model),
        cmocka_unit_test(what_cannot_run_says_why),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
