/* scheduler: who gets how many rows. */
#include "cloud/scheduler.h"
#include <stdarg.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static struct scheduler_budget budget_of(uint32_t rows)
{
    return (struct scheduler_budget){.rows = rows, .prefill_rows = rows, .sequences = 512};
}

static void decode_comes_first(void **state)
{
    (void)state;
    struct scheduler_item items[] = {{1000, 1000, false, 0, 0, 0},
                                     {1, 0, true, 0, 0, 0},
                                     {1000, 1000, false, 0, 0, 0},
                                     {1, 0, true, 0, 0, 0}};
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
    struct scheduler_item items[] = {{500, 3000, false, 0, 0, 0},
                                     {300, 300, false, 0, 0, 0},
                                     {100, 100, false, 0, 0, 0},
                                     {100, 100, false, 0, 0, 0}};
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
            items[i] = (struct scheduler_item){left[i], left[i], false, 0, 0, 0};
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
    struct scheduler_item items[] = {
        {1, 0, true, 0, 0, 0}, {500, 500, false, 0, 0, 0}, {500, 500, false, 0, 0, 0}};
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
            items[i] = (struct scheduler_item){want, want + (uint32_t)rand() % 300, is_decode, 7, 0, 0};
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
        struct scheduler_item items[] = {
            {left, left, false, 0, 0, 0}, {100, 100, false, 0, 0, 0}, {100, 100, false, 0, 0, 0}};
        scheduler_pick(items, 3, budget_of(200));
        left -= items[0].granted;
    }
    assert_true(steps <= 10000 / SCHEDULER_TURN_ROWS + 1);
}

static uint32_t granted_to(const struct scheduler_item *items, size_t first, size_t end)
{
    uint32_t rows = 0;
    for (size_t i = first; i < end; i++)
        rows += items[i].granted;
    return rows;
}

/* However many prompts a tenant has, and though they came first and are shorter. */
static void tenants_have_equal_shares(void **state)
{
    (void)state;
    struct scheduler_item items[40];
    for (uint32_t i = 0; i < 40; i++)
        items[i] = (struct scheduler_item){.rows = 100, .left = 100, .turn = i < 30 ? 1 : 2};
    items[39] = (struct scheduler_item){.rows = 3000, .left = 3000, .turn = 3};
    struct scheduler_budget budget = budget_of(600);
    budget.turn = 4;
    assert_int_equal(scheduler_pick(items, 40, budget), 7);
    assert_int_equal(granted_to(items, 0, 30), 200);
    assert_int_equal(granted_to(items, 30, 39), 200);
    assert_int_equal(items[39].granted, 200);
    items[39].rows = 30; /* what one does not want the others have */
    for (uint32_t i = 0; i < 40; i++)
        items[i].granted = 0;
    budget.turn = 7;
    scheduler_pick(items, 40, budget);
    assert_int_equal(items[39].granted, 30);
    assert_int_equal(granted_to(items, 0, 39), 570);
    assert_true(granted_to(items, 30, 39) >= 250);
    assert_true(granted_to(items, 0, 30) >= 250);
}

/* Between two turns of a tenant that has prompts no other one has more than one, in whatever order they come and go. */
static void tenants_take_turns(void **state)
{
    (void)state;
    enum { TENANTS = 9 };
    uint64_t turns[TENANTS], next = 0;
    uint32_t since[TENANTS][TENANTS] = {{0}}; /* turns of the one since the other's last, or since it came */
    bool here[TENANTS] = {false};
    srand(11);
    for (int step = 0; step < 3000; step++) {
        struct scheduler_item items[2 * TENANTS];
        uint32_t count = 0, of[2 * TENANTS];
        for (uint32_t t = 0; t < TENANTS; t++) {
            bool is_here = rand() % 8 ? here[t] : !here[t];
            if (is_here && !here[t]) {
                turns[t] = next++;
                memset(since[t], 0, sizeof since[t]);
            }
            here[t] = is_here;
            for (uint32_t i = 0; is_here && i < 1 + t % 2; i++, count++) {
                of[count] = t;
                items[count] = (struct scheduler_item){.rows = 500, .left = 500 + t, .turn = turns[t]};
            }
        }
        struct scheduler_budget budget = budget_of(64 + (uint32_t)rand() % 200);
        budget.turn = next;
        next = scheduler_pick(items, count, budget);
        for (uint64_t turn = budget.turn; turn < next; turn++) {
            uint32_t i = 0;
            while (items[i].turn != turn)
                assert_true(++i < count);
            uint32_t t = of[i];
            turns[t] = turn;
            for (uint32_t other = 0; other < TENANTS; other++)
                assert_true(++since[other][t] == 1 || other == t || !here[other]);
            memset(since[t], 0, sizeof since[t]);
        }
    }
}

/* A principal's later prompts come behind the first of the others, though they came before these and are shorter. */
static void rounds_come_one_after_the_other(void **state)
{
    (void)state;
    struct scheduler_item items[] = {{.rows = 100, .left = 100, .round = 1},
                                     {.rows = 100, .left = 100, .round = 1},
                                     {.rows = 500, .left = 500, .round = 0},
                                     {.rows = 300, .left = 300, .round = 0}};
    scheduler_pick(items, 4, budget_of(400));
    assert_int_equal(items[2].granted, 100); /* the oldest of the first round */
    assert_int_equal(items[3].granted, 300);
    scheduler_pick(items, 4, budget_of(820));
    assert_int_equal(items[0].granted, 20);
    assert_int_equal(items[1].granted, 0);
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
        cmocka_unit_test(tenants_have_equal_shares),
        cmocka_unit_test(tenants_take_turns),
        cmocka_unit_test(rounds_come_one_after_the_other),
        cmocka_unit_test(prefill_beside_decode_is_kept_short),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
