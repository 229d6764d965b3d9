/* scheduler: who gets how many rows. */
#include "cloud/scheduler.h"
#include <stdarg.h>
#include <setjmp.h>
#include <stdlib.h>
#include <cmocka.h>

static struct scheduler_budget budget_of(uint32_t rows)
{
    return (struct scheduler_budget){.rows = rows, .prefill_rows = rows, .sequences = 512};
}

static void decode_comes_first(void **state)
{
    (void)state;
    struct scheduler_item items[] = {
        {1000, 1000, false, 0}, {1, 0, true, 0}, {1000, 1000, false, 0}, {1, 0, true, 0}};
    scheduler_pick(items, 4, budget_of(10));
    assert_int_equal(items[1].granted, 1);
    assert_int_equal(items[3].granted, 1);
    assert_int_equal(items[0].granted + items[2].granted, 8);
    scheduler_pick(items, 4, budget_of(1));
    assert_int_equal(items[1].granted, 1);
    assert_int_equal(items[0].granted + items[2].granted + items[3].granted, 0);
}

static void least_left_first_beside_a_share_of_the_oldest(void **state)
{
    (void)state;
    struct scheduler_item items[] = {
        {500, 3000, false, 0}, {300, 300, false, 0}, {100, 100, false, 0}, {100, 100, false, 0}};
    scheduler_pick(items, 4, budget_of(400));
    assert_int_equal(items[0].granted, 100); /* a quarter: it came first */
    assert_int_equal(items[2].granted, 100); /* the shorter ones, of these the earlier one first */
    assert_int_equal(items[3].granted, 100);
    assert_int_equal(items[1].granted, 100);
    scheduler_pick(items, 4, budget_of(200)); /* a share is a turn at least */
    assert_int_equal(items[0].granted, 64);
    assert_int_equal(items[2].granted, 100);
    assert_int_equal(items[3].granted, 36);
    assert_int_equal(items[1].granted, 0);
    scheduler_pick(items, 4, budget_of(2000)); /* enough for all: everything that can run does */
    assert_int_equal(items[0].granted, 500);
    assert_int_equal(items[1].granted + items[2].granted + items[3].granted, 500);
}

/* One after the other, not in turns: the mean time to the end of 16 equal prompts is half of what turns would give. */
static void equal_prompts_in_order_of_arrival(void **state)
{
    (void)state;
    struct scheduler_item items[16];
    uint32_t ended_sum = 0, left[16];
    for (uint32_t i = 0; i < 16; i++)
        left[i] = 512;
    for (uint32_t step = 1; step <= 32; step++) {
        for (uint32_t i = 0; i < 16; i++)
            items[i] = (struct scheduler_item){left[i], left[i], false, 0};
        scheduler_pick(items, 16, budget_of(256));
        for (uint32_t i = 0; i < 16; i++) {
            ended_sum += left[i] > 0 && left[i] == items[i].granted ? step : 0;
            left[i] -= items[i].granted;
        }
    }
    assert_int_equal(ended_sum, 2 + 4 + 6 + 8 + 10 + 12 + 14 + 16 + 18 + 20 + 22 + 24 + 26 + 28 + 30 + 32);
}

static void limits_hold(void **state)
{
    (void)state;
    struct scheduler_item items[] = {{1, 0, true, 0}, {500, 500, false, 0}, {500, 500, false, 0}};
    struct scheduler_budget budget = {.rows = 400, .prefill_rows = 70, .sequences = 512};
    scheduler_pick(items, 3, budget);
    assert_int_equal(items[0].granted, 1);
    assert_int_equal(items[1].granted + items[2].granted, 70);
    budget = (struct scheduler_budget){.rows = 400, .prefill_rows = 400, .sequences = 2};
    scheduler_pick(items, 3, budget);
    assert_int_equal(items[1].granted, 399);
    assert_int_equal(items[2].granted, 0);
    scheduler_pick(NULL, 0, budget);
}

/* Random loads: never more than the budget, never more than asked, nothing left over while somebody wants it. */
static void random_loads_keep_the_rules(void **state)
{
    (void)state;
    srand(5);
    for (int round = 0; round < 2000; round++) {
        struct scheduler_item items[20];
        uint32_t count = 1 + (uint32_t)rand() % 20, wanted = 0, decode = 0, granted = 0;
        for (uint32_t i = 0; i < count; i++) {
            bool is_decode = rand() % 2;
            uint32_t want = is_decode ? 1 : 1 + (uint32_t)rand() % 300;
            items[i] = (struct scheduler_item){want, want + (uint32_t)rand() % 300, is_decode, 7};
            wanted += items[i].rows;
            decode += is_decode;
        }
        uint32_t rows = decode + 1 + (uint32_t)rand() % 400;
        scheduler_pick(items, count, budget_of(rows));
        for (uint32_t i = 0; i < count; i++) {
            assert_true(items[i].granted <= items[i].rows);
            granted += items[i].granted;
        }
        assert_int_equal(granted, TD_MIN(rows, wanted));
    }
}

/* Short prompts arrive for ever: the long one still moves. */
static void nobody_starves(void **state)
{
    (void)state;
    uint32_t left = 10000, steps = 0;
    for (; left > 0 && steps < 1000; steps++) {
        struct scheduler_item items[] = {{left, left, false, 0}, {100, 100, false, 0}, {100, 100, false, 0}};
        scheduler_pick(items, 3, budget_of(200));
        left -= items[0].granted;
    }
    assert_true(steps <= 10000 / SCHEDULER_TURN_ROWS + 1);
}

static void prefill_beside_decode_is_kept_short(void **state)
{
    (void)state;
    assert_int_equal(scheduler_prefill_rows(512, 0, 1000, 0), 512);      /* nobody waits */
    assert_int_equal(scheduler_prefill_rows(512, 8, 0, 100000), 504);    /* nothing is known yet */
    assert_int_equal(scheduler_prefill_rows(512, 0, 1000, 100000), 100); /* an edge does */
    assert_int_equal(scheduler_prefill_rows(512, 8, 1000, 100000), 100); /* 1000 rows/s for 0.1 s */
    assert_int_equal(scheduler_prefill_rows(512, 8, 10, 100000), 64);    /* never less than a turn */
    assert_int_equal(scheduler_prefill_rows(512, 500, 100000, 100000), 12);
    assert_int_equal(scheduler_prefill_rows(16, 20, 1000, 100000), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_comes_first),
        cmocka_unit_test(least_left_first_beside_a_share_of_the_oldest),
        cmocka_unit_test(equal_prompts_in_order_of_arrival),
        cmocka_unit_test(limits_hold),
        cmocka_unit_test(random_loads_keep_the_rules),
        cmocka_unit_test(nobody_starves),
        cmocka_unit_test(prefill_beside_decode_is_kept_short),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
