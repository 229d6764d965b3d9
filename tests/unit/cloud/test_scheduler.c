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
        {1, 1000, false, 0}, {2, 1, true, 0}, {3, 1000, false, 0}, {4, 1, true, 0}};
    scheduler_pick(items, 4, budget_of(10), 0);
    assert_int_equal(items[1].granted, 1);
    assert_int_equal(items[3].granted, 1);
    assert_int_equal(items[0].granted + items[2].granted, 8);
    scheduler_pick(items, 4, budget_of(1), 0);
    assert_int_equal(items[1].granted, 1);
    assert_int_equal(items[0].granted + items[2].granted + items[3].granted, 0);
}

static void oldest_first_then_in_turns(void **state)
{
    (void)state;
    struct scheduler_item items[] = {{5, 300, false, 0}, {7, 40, false, 0}, {9, 300, false, 0}};
    assert_int_equal(scheduler_pick(items, 3, budget_of(100), 0), 7);
    assert_int_equal(items[0].granted, 64);
    assert_int_equal(items[1].granted, 36);
    assert_int_equal(items[2].granted, 0);
    assert_int_equal(scheduler_pick(items, 3, budget_of(100), 7), 5); /* the one behind it is first now */
    assert_int_equal(items[2].granted, 64);
    assert_int_equal(items[0].granted, 36);
    assert_int_equal(scheduler_pick(items, 3, budget_of(100), 9), 7); /* and round again */
    assert_int_equal(items[0].granted, 64);
    assert_int_equal(scheduler_pick(items, 3, budget_of(100), 100), 7); /* the last served has gone */
    assert_int_equal(items[0].granted, 64);
    scheduler_pick(items, 3, budget_of(1000), 0);
    assert_int_equal(items[0].granted + items[1].granted + items[2].granted, 640);
}

static void limits_hold(void **state)
{
    (void)state;
    struct scheduler_item items[] = {{1, 1, true, 0}, {2, 500, false, 0}, {3, 500, false, 0}};
    struct scheduler_budget budget = {.rows = 400, .prefill_rows = 70, .sequences = 512};
    scheduler_pick(items, 3, budget, 0);
    assert_int_equal(items[0].granted, 1);
    assert_int_equal(items[1].granted + items[2].granted, 70);
    budget = (struct scheduler_budget){.rows = 400, .prefill_rows = 400, .sequences = 2};
    scheduler_pick(items, 3, budget, 0);
    assert_int_equal(items[1].granted, 399);
    assert_int_equal(items[2].granted, 0);
    assert_int_equal(scheduler_pick(NULL, 0, budget, 3), 3);
}

/* Random loads: never more than the budget, never more than asked, nothing left over while somebody wants it; nobody starves. */
static void random_loads_keep_the_rules(void **state)
{
    (void)state;
    srand(5);
    for (int round = 0; round < 2000; round++) {
        struct scheduler_item items[20];
        uint32_t count = 1 + (uint32_t)rand() % 20, wanted = 0, decode = 0, granted = 0;
        for (uint32_t i = 0; i < count; i++) {
            bool is_decode = rand() % 2;
            items[i] =
                (struct scheduler_item){i * 3 + 1, is_decode ? 1 : 1 + (uint32_t)rand() % 300, is_decode, 7};
            wanted += items[i].rows;
            decode += is_decode;
        }
        uint32_t rows = decode + 1 + (uint32_t)rand() % 400;
        scheduler_pick(items, count, budget_of(rows), (uint64_t)rand() % 70);
        for (uint32_t i = 0; i < count; i++) {
            assert_true(items[i].granted <= items[i].rows);
            granted += items[i].granted;
        }
        assert_int_equal(granted, TD_MIN(rows, wanted));
    }
    struct scheduler_item items[30];
    uint64_t last = 0, served[30] = {0};
    for (uint32_t i = 0; i < 30; i++)
        items[i] = (struct scheduler_item){i + 1, 100000, false, 0};
    for (int step = 0; step < 30; step++) {
        last = scheduler_pick(items, 30, budget_of(128), last);
        for (uint32_t i = 0; i < 30; i++)
            served[i] += items[i].granted;
    }
    for (uint32_t i = 0; i < 30; i++)
        assert_int_equal(served[i], 128);
}

static void prefill_beside_decode_is_kept_short(void **state)
{
    (void)state;
    assert_int_equal(scheduler_prefill_rows(512, 0, 1000, 100000), 512); /* nobody waits */
    assert_int_equal(scheduler_prefill_rows(512, 8, 0, 100000), 504);    /* nothing is known yet */
    assert_int_equal(scheduler_prefill_rows(512, 8, 1000, 100000), 100); /* 1000 rows/s for 0.1 s */
    assert_int_equal(scheduler_prefill_rows(512, 8, 10, 100000), 64);    /* never less than a turn */
    assert_int_equal(scheduler_prefill_rows(512, 500, 100000, 100000), 12);
    assert_int_equal(scheduler_prefill_rows(16, 20, 1000, 100000), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_comes_first),
        cmocka_unit_test(oldest_first_then_in_turns),
        cmocka_unit_test(limits_hold),
        cmocka_unit_test(random_loads_keep_the_rules),
        cmocka_unit_test(prefill_beside_decode_is_kept_short),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
