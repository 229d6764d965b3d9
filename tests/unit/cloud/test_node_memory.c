/* node_memory: what weights and pages leave is shared, and where they do not fit the node says so. */
#include "cloud/node_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define MIB (1ull << 20)

static int fit(uint64_t available, uint64_t kv, uint64_t store_ram, struct node_memory *m,
               struct td_error *err)
{
    *m = (struct node_memory){
        .available = available, .weights = 94 * MIB, .kv = kv, .kv_least = 2 * MIB, .store_ram = store_ram};
    return node_memory_fit(m, err);
}

static void test_shares(void **state)
{
    (void)state;
    struct node_memory m;
    struct td_error err;
    assert_int_equal(fit(16384 * MIB, 4096 * MIB, 256 * MIB, &m, &err), 0); /* all that was wanted */
    assert_int_equal(m.store_ram, 256 * MIB);
    assert_int_equal(m.store_queue, STORE_QUEUE_SIZE);
    for (uint64_t available = 380; available < 1200; available += 7) { /* never more than there is */
        assert_int_equal(fit(available * MIB, available * MIB / 4, 256 * MIB, &m, &err), 0);
        assert_true(m.weights + m.kv + m.store_ram + m.store_queue + NODE_MEMORY_BASE <= available * MIB);
        assert_true(m.store_queue >= NODE_QUEUE_MIN);
    }
    assert_int_equal(fit(500 * MIB, 125 * MIB, 0, &m, &err), 0);
    assert_int_equal(m.store_ram, 0);
    assert_int_equal(m.store_queue, 185 * MIB);
}

static void test_no_room(void **state)
{
    (void)state;
    struct node_memory m;
    struct td_error err;
    uint64_t least = 94 * MIB + NODE_MEMORY_BASE + NODE_QUEUE_MIN;
    assert_int_equal(fit(least + 10 * MIB, 10 * MIB, 256 * MIB, &m, &err), 0);
    assert_int_equal(m.store_ram, 0);
    assert_int_equal(fit(least + 10 * MIB - 1, 10 * MIB, 256 * MIB, &m, &err), -TD_ERR_NOMEM);
    assert_non_null(strstr(err.text, "94 MiB"));
    assert_non_null(strstr(err.text, "--kv-memory"));
    assert_int_equal(fit(least + MIB, 10 * MIB, 0, &m, &err), -TD_ERR_NOMEM); /* whatever KV may take */
    assert_null(strstr(err.text, "--kv-memory"));
    assert_non_null(strstr(err.text, "smaller model"));
}

/* Where nothing was asked for, KV takes a quarter, or what a large model leaves. */
static void test_large_models(void **state)
{
    (void)state;
    static const struct {
        uint64_t available, weights, swap, kv; /* MiB; kv: 0 where it is refused */
    } cases[] = {
        {16384, 4096, 0, 4096}, {3480, 2458, 0, 870},   {3482, 2700, 0, 654},  {22528, 18432, 0, 3968},
        {3482, 3300, 0, 0},     {3482, 3300, 1024, 64}, {3482, 6000, 1024, 0},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct td_error err;
        struct node_memory m = {.available = cases[i].available * MIB,
                                .weights = cases[i].weights * MIB,
                                .swap = cases[i].swap * MIB,
                                .kv_least = 64 * MIB,
                                .store_ram = 256 * MIB};
        assert_int_equal(node_memory_fit(&m, &err), cases[i].kv ? 0 : -TD_ERR_NOMEM);
        if (cases[i].kv) {
            assert_int_equal(m.kv / MIB, cases[i].kv);
            assert_true(m.store_queue >= NODE_QUEUE_MIN);
        } else {
            assert_null(strstr(err.text, "--kv-memory"));
        }
    }
    struct node_memory gpu = {.available = 1024 * MIB};
    struct td_error err;
    assert_int_equal(node_memory_fit(&gpu, &err), 0);
    assert_int_equal(gpu.kv, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_shares), cmocka_unit_test(test_no_room),
                                       cmocka_unit_test(test_large_models)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
