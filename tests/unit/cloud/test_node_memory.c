/* node_memory: what weights and pages leave is shared, and where they do not fit the node says so. */
#include "cloud/node_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define MIB (1ull << 20)

static int fit(uint64_t available, uint64_t kv, uint64_t store_ram, struct node_memory *m,
               struct td_error *err)
{
    *m = (struct node_memory){.available = available, .weights = 94 * MIB, .kv = kv, .store_ram = store_ram};
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
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_shares), cmocka_unit_test(test_no_room)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
