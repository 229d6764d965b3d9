/* cuda_bench: models of a known shape without a file, several sequences, and the choice of device. */
#include "kernels/bench.h"
#include "kernels/cuda/cuda.h"
#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static const struct bench_engine_options small = {
    .shape = "tiny", .dtype = "q8_0", .threads = 2, .prompt_tokens = 70, .gen_tokens = 5, .batch_count = 3};

static void a_shape_on_the_cpu(void **state)
{
    (void)state;
    struct bench_engine_options o = small;
    struct bench_engine_result r;
    struct td_error err = {0};
    assert_int_equal(bench_engine(&o, &r, &err), 0);
    assert_true(r.prefill_ms > 0 && r.decode_step_ms > 0 && r.to_device_gb_s == 0);
    o.gen_tokens = 1; /* the median step is the run */
    assert_int_equal(bench_engine(&o, &r, &err), 0);
    double step_ms = r.decode_step_ms;
    assert_true(r.decode_tps > 2900 / step_ms && r.decode_tps < 3100 / step_ms); /* three tokens a step */
    o.shape = "giant";
    assert_int_equal(bench_engine(&o, &r, &err), -TD_ERR_ARG);
    assert_non_null(strstr(err.text, "llama-8b"));
    o = small, o.dtype = "q3";
    assert_int_equal(bench_engine(&o, &r, &err), -TD_ERR_ARG);
    o = small, o.kv_dtype = "int8";
    assert_int_equal(bench_engine(&o, &r, &err), -TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "needs a GPU"));
    o = small, o.kv_dtype = "fp16";
    assert_int_equal(bench_engine(&o, &r, &err), -TD_ERR_ARG);
    o = small, o.batch_count = 513;
    assert_int_equal(bench_engine(&o, &r, &err), -TD_ERR_ARG);
}

static void a_machine_without_a_driver_is_told_so(void **state)
{
    (void)state;
    char why[200] = "";
    bool is_there = cuda_available(why, sizeof why);
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!driver && !strstr(why, "without CUDA")) {
        assert_false(is_there);
        assert_string_equal(why, "no GPU: no NVIDIA driver on this machine");
    }
    if (driver)
        dlclose(driver);
}

static void a_shape_on_the_gpu(void **state)
{
    (void)state;
    struct bench_engine_options o = small;
    struct bench_engine_result r;
    struct td_error err = {0};
    char why[200];
    o.device = "cuda";
    int rc = bench_engine(&o, &r, &err);
    if (!cuda_available(why, sizeof why)) {
        assert_int_equal(rc, -TD_ERR_UNSUPPORTED);
        print_message("skipped: %s\n", why);
        return;
    }
    assert_int_equal(rc, 0);
    assert_string_equal(r.isa, "cuda");
    assert_true(r.read_gb_s > 0 && r.decode_floor_ms > 0 && r.decode_floor_ms < r.decode_step_ms);
    assert_true(r.prefill_family_count > 2 && r.decode_family_count > 1);
    for (uint32_t i = 0; i < r.prefill_family_count; i++)
        assert_true(r.prefill_families[i].ms > 0 && r.prefill_families[i].of_peak < 1);
    o.prompt_tokens = 65, o.chunk_tokens = 64, o.batch_count = 130; /* prompts' ends are recorded, */
    assert_int_equal(bench_engine(&o, &r, &err), 0);
    assert_true(r.host_ms == 0); /* steps of so many rows are not */
    o = small, o.device = "cuda";
    o.gen_tokens = 9; /* a step is recorded the second time that it is seen */
    assert_int_equal(bench_engine(&o, &r, &err), 0);
    assert_true(isfinite(r.host_ms) && r.host_ms >= 0); /* other programs may be on the device */
    o.kv_dtype = "fp8", o.swap_tokens = 100;
    assert_int_equal(bench_engine(&o, &r, &err), 0);
    assert_true(r.swap_gib * (1 << 30) == 2.0 * 2 * 2 * (128 * 64 + 256)); /* 2 pages, layers, heads of 64 */
    o.device = "cuda:x";
    assert_int_equal(bench_engine(&o, &r, &err), -TD_ERR_ARG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_shape_on_the_cpu),
        cmocka_unit_test(a_machine_without_a_driver_is_told_so),
        cmocka_unit_test(a_shape_on_the_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
