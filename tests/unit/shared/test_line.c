/* line: what it foretells from points that lie on a line, beside one, or nowhere. */
#include "shared/line.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>

static void assert_near(double got, double want)
{
    if (fabs(got - want) > 1e-6 * (1 + fabs(want)))
        fail_msg("%.9g is not %.9g", got, want);
}

static void nothing_is_known_at_first(void **state)
{
    (void)state;
    struct line l = {0};
    assert_near(line_common_slope(&l, &l, 0.001), 0);
    assert_near(line_base_of_slope(&l, 0), 0);
}

static void one_place_makes_a_level_line(void **state)
{
    (void)state;
    struct line l = {0}, none = {0};
    line_add(&l, 500, 3);
    line_add(&l, 500, 5);
    assert_near(line_common_slope(&l, &none, 0), 0);
    double base = line_base_of_slope(&l, 0);
    assert_true(base > 3.9 && base < 4.2); /* about the mean, the later a little more */
}

static void assert_about(double got, double want)
{
    if (fabs(got - want) > 0.005 * want)
        fail_msg("%.9g is not about %.9g", got, want);
}

/* Chunks of 64 on a machine with other work: the second takes a third longer. A long prompt's end does not take six times as long for that. */
static void neighbours_give_hardly_a_slope(void **state)
{
    (void)state;
    struct line l = {0}, none = {0};
    line_add(&l, 32, 30);
    line_add(&l, 96, 40);
    double slope = line_common_slope(&l, &none, 0);
    assert_true(slope > 0 && line_base_of_slope(&l, slope) + 2048 * slope < 75);
    for (int i = 2; i < 32; i++) /* what it really does is known soon */
        line_add(&l, 64 * i + 32, 30 + 0.01 * (64 * i + 32));
    slope = line_common_slope(&l, &none, 0);
    assert_true(slope > 0.008 && slope < 0.01);
}

/* A short prompt whose second half had a neighbour: a quarter dearer. At the end of a long one that is a third, not twice as much. */
static void a_short_prompt_says_little_about_a_long_one(void **state)
{
    (void)state;
    struct line l = {0}, none = {0};
    for (int i = 0; i < 8; i++)
        line_add(&l, 64 * i + 32, (i < 4 ? 1 : 1.25) * 30 * (1 + 0.001 * (64 * i + 32)));
    double slope = line_common_slope(&l, &none, 0.001);
    double end = line_base_of_slope(&l, slope) + 2048 * slope;
    assert_true(end > 30 * 3.048 && end < 30 * 3.048 * 1.35);
}

/* One is known at its beginning only, the other as a whole, and lower. */
static void lines_that_rise_alike_tell_each_other_their_slope(void **state)
{
    (void)state;
    struct line a = {0}, b = {0}, none = {0};
    for (int i = 0; i < 3; i++)
        line_add(&a, 32, 40 + 0.32);
    assert_near(line_common_slope(&a, &none, 0), 0);
    for (int i = 0; i < 30; i++)
        line_add(&b, 64 * i, 30 + 0.01 * 64 * i);
    double slope = line_common_slope(&a, &b, 0);
    assert_true(slope > 0.0095 && slope <= 0.01);
    assert_near(line_common_slope(&b, &none, 0), slope);
    assert_about(line_base_of_slope(&a, slope), 40);
    assert_true(line_base_of_slope(&b, slope) >= 30 && line_base_of_slope(&b, slope) < 30.5);
    assert_near(line_base_of_slope(&none, slope), 0);
    struct line steep = {0};
    line_add(&steep, 1000, 5); /* its base is not below zero */
    assert_near(line_common_slope(&steep, &b, 0), 0.005);
    struct line falls = {0};
    for (int i = 0; i < 50; i++)
        line_add(&falls, 64 * i, 100 - i);
    assert_near(line_common_slope(&falls, &none, 0), 0);
}

/* One place: by the expected rise through it. Several: what they say, however much was expected. */
static void what_is_expected_counts_until_it_is_measured(void **state)
{
    (void)state;
    struct line l = {0}, none = {0};
    assert_near(line_common_slope(&l, &none, 0.001), 0);
    line_add(&l, 32, 20 * (1 + 0.032));
    double slope = line_common_slope(&l, &none, 0.001);
    assert_near(slope, 0.02);
    assert_near(line_base_of_slope(&l, slope), 20);
    assert_near(line_common_slope(&none, &l, 0.001), 0.02);
    for (int i = 0; i < 32; i++)
        line_add(&l, 64 * i + 32, 20);
    assert_true(line_common_slope(&l, &none, 0.001) < 0.001);
    for (int i = 0; i < 32; i++)
        line_add(&l, 64 * i + 32, 20 - 0.005 * i);
    assert_near(line_common_slope(&l, &none, 0), 0);
}

static void the_base_stays_above_zero(void **state)
{
    (void)state;
    struct line steep = {0}, none = {0};
    for (int i = 0; i < 20; i++)
        line_add(&steep, 1000 * i, 1000 * i - 900);
    double slope = line_common_slope(&steep, &none, 0);
    assert_true(slope > 0.9 && slope < 1);
    assert_near(line_base_of_slope(&steep, slope), 0);
}

static void what_is_old_counts_less(void **state)
{
    (void)state;
    struct line l = {0};
    for (int i = 0; i < 100; i++)
        line_add(&l, i % 7, 10);
    for (int i = 0; i < (int)LINE_HALF_LIFE; i++)
        line_add(&l, i % 7, 20);
    double base = line_base_of_slope(&l, 0);
    assert_true(base > 14 && base < 17); /* half of the weight */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_known_at_first),
        cmocka_unit_test(one_place_makes_a_level_line),
        cmocka_unit_test(what_is_expected_counts_until_it_is_measured),
        cmocka_unit_test(neighbours_give_hardly_a_slope),
        cmocka_unit_test(a_short_prompt_says_little_about_a_long_one),
        cmocka_unit_test(lines_that_rise_alike_tell_each_other_their_slope),
        cmocka_unit_test(the_base_stays_above_zero),
        cmocka_unit_test(what_is_old_counts_less),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
