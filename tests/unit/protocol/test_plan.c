/* plan: merged records, against a naive twin that writes down every token's range. */
#include "protocol/plan.h"
#include "shared/base.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define TOKENS 40

static uint32_t random_state = 1;
static uint32_t pick(uint32_t count)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % count;
}

static uint32_t random_plan(struct plan_range *out, uint32_t begin)
{
    uint32_t count = 0;
    for (uint32_t at = begin; at < TOKENS; count++) {
        uint32_t size = 1 + pick(TOKENS - at);
        out[count] = (struct plan_range){at, size, pick(3), 0, 0};
        out[count].codec = out[count].layers ? (uint8_t)pick(2) : 0;
        at += size;
    }
    return count;
}

static void assert_form(const struct plan_range *r, uint32_t layers, uint32_t codec)
{
    assert_non_null(r);
    assert_int_equal(r->layers, layers);
    if (layers > 0)
        assert_int_equal(r->codec, codec);
}

static void assert_well_formed(const struct plan_range *r, uint32_t count)
{
    for (uint32_t i = 1; i < count; i++) {
        assert_int_equal(r[i].first_token, plan_range_end(&r[i - 1]));
        assert_false(plan_range_alike(&r[i], &r[i - 1]));
    }
}

static void merged_is_the_old_plan_and_then_the_new(void **state)
{
    (void)state;
    for (int round = 0; round < 2000; round++) {
        struct plan_range before[LIMIT_RANGES], after[LIMIT_RANGES], out[LIMIT_RANGES];
        uint32_t b = random_plan(before, 0), a = random_plan(after, pick(10)), token = 10 + pick(TOKENS - 10);
        uint32_t count = plan_merge(before, b, after, a, token, out);
        assert_well_formed(out, count);
        for (uint32_t t = 0; t < TOKENS; t++) {
            const struct plan_range *want = t < token ? plan_at(before, b, t) : plan_at(after, a, t);
            assert_form(plan_at(out, count, t), want->layers, want->codec);
        }
    }
}

static void nothing_before_leaves_the_new_plan(void **state)
{
    (void)state;
    struct plan_range after = {5, 10, 1, 0, 0}, out[LIMIT_RANGES];
    assert_int_equal(plan_merge(NULL, 0, &after, 1, 7, out), 1);
    assert_int_equal(out[0].first_token, 5);
    assert_int_equal(out[0].count, 10);
    assert_null(plan_at(out, 1, 4));
    assert_null(plan_at(out, 1, 15));
}

static void parts_without_kv_say_so(void **state)
{
    (void)state;
    for (int round = 0; round < 2000; round++) {
        struct plan_range plan[LIMIT_RANGES], out[LIMIT_RANGES];
        uint32_t count = random_plan(plan, 0), begin = pick(TOKENS), end = begin + pick(TOKENS);
        memcpy(out, plan, sizeof out);
        uint32_t out_count = plan_without_kv(out, count, begin, end);
        for (uint32_t t = 0; t < TOKENS; t++) {
            const struct plan_range *was = plan_at(plan, count, t);
            assert_form(plan_at(out, out_count, t), was->layers,
                        t >= begin && t < end ? PLAN_CODEC_NONE : was->codec);
        }
    }
}

static void too_many_ranges_are_not_written(void **state)
{
    (void)state;
    struct plan_range many[LIMIT_RANGES], one = {0, 1, 3, 0, 0}, out[LIMIT_RANGES];
    for (uint32_t i = 0; i < LIMIT_RANGES; i++)
        many[i] = (struct plan_range){2 * i, 2, 1 + i % 2, 0, 0};
    assert_int_equal(plan_merge(many, LIMIT_RANGES, many, LIMIT_RANGES, 8, out), LIMIT_RANGES);
    assert_int_equal(plan_merge(&one, 1, many, LIMIT_RANGES, 1, out), 0);
    memcpy(out, many, sizeof out);
    assert_int_equal(plan_without_kv(out, LIMIT_RANGES, 1, 3), LIMIT_RANGES);
    assert_memory_equal(out, many, sizeof out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merged_is_the_old_plan_and_then_the_new),
        cmocka_unit_test(nothing_before_leaves_the_new_plan),
        cmocka_unit_test(parts_without_kv_say_so),
        cmocka_unit_test(too_many_ranges_are_not_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
