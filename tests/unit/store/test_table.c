/* table: the fast structure against a naive twin, and the keys beside it. */
#include "store_fixture.h"

enum { IDS = 500, STEPS = 60000 };

static uint64_t rng_state = 42;
static uint32_t rng(uint32_t bound)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng_state >> 33) % bound;
}

static void id_of(uint32_t n, uint8_t id[32])
{
    memset(id, 0, 32);
    store_le32(id + 28, n); /* equal first bytes: all in one shard, one home slot, long runs */
    if (n % 3)
        store_le32(id, n * 2654435761u);
}

static void test_against_a_naive_twin(void **state)
{
    (void)state;
    static uint64_t twin[3][IDS]; /* [tenant][id] -> lsn, 0: absent */
    struct table t;
    size_t count = 0;
    assert_int_equal(table_init(&t), 0);
    for (int step = 0; step < STEPS; step++) {
        uint32_t tenant = 1 + rng(2), n = rng(IDS);
        uint8_t id[32];
        id_of(n, id);
        struct table_shard *s = table_lock(&t, id);
        struct entry *e = table_find(&t, s, tenant, id);
        assert_int_equal(e ? e->lsn : 0, twin[tenant][n]);
        if (rng(2)) {
            e = table_insert(&t, s, tenant, id);
            assert_non_null(e);
            assert_int_equal(e->lsn, twin[tenant][n]);
            count += twin[tenant][n] == 0;
            e->lsn = twin[tenant][n] = (uint64_t)step + 1;
        } else if (e) {
            table_remove(&t, s, e);
            twin[tenant][n] = 0;
            count--;
        }
        table_unlock(s);
        if (step % 1000 == 0)
            assert_int_equal(table_count(&t), count);
    }
    for (uint32_t tenant = 1; tenant < 3; tenant++)
        for (uint32_t n = 0; n < IDS; n++) {
            uint8_t id[32];
            id_of(n, id);
            struct table_shard *s = table_lock(&t, id);
            const struct entry *e = table_find(&t, s, tenant, id);
            assert_int_equal(e ? e->lsn : 0, twin[tenant][n]);
            table_unlock(s);
        }
    table_deinit(&t);
}

static void test_the_whole_id_counts(void **state)
{
    (void)state;
    struct table t;
    assert_int_equal(table_init(&t), 0);
    uint8_t id[32] = {1, 2, 3};
    struct table_shard *s = table_lock(&t, id);
    assert_non_null(table_insert(&t, s, 1, id));
    assert_null(table_find(&t, s, 2, id));
    table_unlock(s);
    for (int i = 0; i < 32; i++) {
        id[i] ^= 0x80;
        s = table_lock(&t, id);
        assert_null(table_find(&t, s, 1, id));
        table_unlock(s);
        id[i] ^= 0x80;
    }
    table_deinit(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_a_naive_twin),
        cmocka_unit_test(test_the_whole_id_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
