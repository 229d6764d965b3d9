/* numerics: the engine's own exp, log, sin and cos against the C library in higher precision, and the same bits from scalar and
 * vector code. */
#include "kernels/cpu/ops.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static void exp_is_within_two_units(void **state)
{
    (void)state;
    for (int i = 0; i < 400000; i++) {
        float x = -87.3f + (float)i * (175.6f / 400000.0f);
        double want = exp((double)x), error = fabs((double)numerics_exp(x) - want) / want;
        if (!(error < 2 * 0x1p-24 * 1.01))
            fail_msg("exp(%.9g): relative error %g", (double)x, error);
    }
}

static void exp_at_the_ends(void **state)
{
    (void)state;
    assert_true(numerics_exp(0.0f) == 1.0f && numerics_exp(-0.0f) == 1.0f);
    assert_true(float_bits(numerics_exp(-INFINITY)) == 0 && float_bits(numerics_exp(-87.4f)) == 0);
    assert_true(numerics_exp(EXP_LOW) > 0x1p-127f);
    assert_true(numerics_exp(INFINITY) == numerics_exp(89.0f) && isfinite(numerics_exp(INFINITY)));
    assert_true(isnan(numerics_exp(NAN)));
}

static void vector_exp_has_the_same_bits(void **state)
{
    (void)state;
    const struct cpu_ops *ops = cpu_ops_find(NULL);
    enum { COUNT = 8 * 4000 + 5 };
    static float x[COUNT], y[COUNT];
    uint32_t seed = 1;
    for (unsigned i = 0; i < COUNT; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = ((float)(seed >> 8) * 0x1p-24f - 0.5f) * 220.0f;
    }
    x[0] = -INFINITY, x[1] = INFINITY, x[2] = -0.0f, x[3] = EXP_LOW, x[4] = EXP_HIGH, x[5] = 0x1p-140f;
    ops->exp_scaled(x, 1.25f, 0.75f, COUNT, y);
    for (unsigned i = 0; i < COUNT; i++)
        assert_int_equal(float_bits(y[i]), float_bits(numerics_exp((x[i] - 1.25f) * 0.75f)));
}

static void sin_and_cos_at_all_positions(void **state)
{
    (void)state;
    for (int i = 0; i < 200000; i++) {
        double angle = (double)i * 83.886080123, s, c; /* up to 2^24 radians */
        numerics_sincos(angle, &s, &c);
        if (!(fabs(s - sin(angle)) < 1e-15 && fabs(c - cos(angle)) < 1e-15))
            fail_msg("angle %.17g: %g %g", angle, s - sin(angle), c - cos(angle));
        numerics_sincos((double)i * 1e-5, &s, &c);
        assert_true(fabs(s - sin((double)i * 1e-5)) < 1e-15 && fabs(c - cos((double)i * 1e-5)) < 1e-15);
    }
}

static void log_and_exp64(void **state)
{
    (void)state;
    for (int i = 1; i < 100000; i++) {
        double x = 1e-6 * i * i, y = -40.0 + 8e-4 * i;
        assert_true(fabs(numerics_log(x) - log(x)) <= 1e-15 * fmax(1.0, fabs(log(x))));
        assert_true(fabs(numerics_exp64(y) - exp(y)) <= 1e-15 * exp(y));
    }
    assert_true(numerics_log(1.0) == 0.0 && numerics_exp64(0.0) == 1.0);
}

/* The order of the tree shows where one large value swallows small ones: 16 -> 8 first pairs 0 with 8. */
static void fold_follows_the_tree(void **state)
{
    (void)state;
    float lanes[NUMERICS_LANES] = {0};
    lanes[0] = 0x1p24f, lanes[8] = -0x1p24f, lanes[4] = 1.0f;
    assert_true(numerics_fold(lanes) == 1.0f);
    memset(lanes, 0, sizeof lanes);
    lanes[0] = 0x1p24f, lanes[1] = -0x1p24f, lanes[4] = 1.0f; /* 1 is lost: 0 meets 4 before 1 */
    assert_true(numerics_fold(lanes) == 0.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_within_two_units),
        cmocka_unit_test(exp_at_the_ends),
        cmocka_unit_test(vector_exp_has_the_same_bits),
        cmocka_unit_test(sin_and_cos_at_all_positions),
        cmocka_unit_test(log_and_exp64),
        cmocka_unit_test(fold_follows_the_tree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
