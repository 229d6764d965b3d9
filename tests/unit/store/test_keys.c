/* keys.td and the master key: what is written is read again, and everything else is refused with its own line. */
#include "store_fixture.h"
#include <fcntl.h>
#include <sys/stat.h>

static const uint8_t master[32] = {1, 2, 3}, other_master[32] = {1, 2, 4};

static struct keys *open_keys(const char *dir, bool expect_found)
{
    struct keys *k;
    bool found;
    struct td_error err = {0};
    assert_int_equal(keys_open(&io_posix, dir, false, master, false, &found, &k, &err), 0);
    assert_int_equal(found, expect_found);
    return k;
}

static void test_tenants_persist(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct keys *k = open_keys(dir, false);
    struct tenant_keys before[3], after;
    uint32_t n;
    for (int i = 0; i < 3; i++) {
        char name[8];
        snprintf(name, sizeof name, "t%d", i);
        assert_int_equal(keys_find(k, name), 0);
        assert_int_equal(keys_ensure(k, name, &n, NULL), 0);
        assert_int_equal(keys_get(k, n, &before[i]), 0);
        assert_int_equal(keys_find(k, name), n);
        assert_int_equal(keys_find_id(k, before[i].key_id), n);
        for (int j = 0; j < i; j++) {
            assert_memory_not_equal(before[i].data_key, before[j].data_key, 32);
            assert_memory_not_equal(before[i].chain_key, before[j].chain_key, 32);
            assert_memory_not_equal(before[i].key_id, before[j].key_id, 16);
        }
        keys_close(k);
        k = open_keys(dir, true);
    }
    for (int i = 0; i < 3; i++) {
        assert_int_equal(keys_get(k, keys_find(k, before[i].name), &after), 0);
        assert_memory_equal(&after, &before[i], sizeof after);
    }
    assert_int_equal(keys_erase(k, keys_find(k, "t1"), NULL), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(keys_find(k, "t1"), 0);
        assert_int_equal(keys_find_id(k, before[1].key_id), 0);
        assert_int_equal(keys_get(k, keys_find(k, "t2"), &after), 0);
        assert_memory_equal(&after, &before[2], sizeof after);
        keys_close(k);
        k = open_keys(dir, true);
    }
    assert_int_equal(keys_erase(k, 77, NULL), -TD_ERR_NOTFOUND);
    keys_close(k);
    fixture_remove(dir);
}

static void test_names(void **state)
{
    (void)state;
    char long_name[STORE_TENANT_MAX + 2];
    memset(long_name, 'a', sizeof long_name);
    long_name[STORE_TENANT_MAX + 1] = '\0';
    assert_false(keys_name_is_valid(long_name));
    long_name[STORE_TENANT_MAX] = '\0';
    assert_true(keys_name_is_valid(long_name));
    assert_true(keys_name_is_valid("aZ09._-"));
    assert_false(keys_name_is_valid(""));
    assert_false(keys_name_is_valid("a/b"));
    assert_false(keys_name_is_valid("a b"));
    assert_false(keys_name_is_valid("\xc3\xa9"));

    char *dir = fixture_directory();
    struct keys *k = open_keys(dir, false);
    struct tenant_keys t;
    uint32_t n;
    assert_int_equal(keys_ensure(k, long_name, &n, NULL), 0);
    keys_close(k);
    k = open_keys(dir, true);
    assert_int_equal(keys_get(k, keys_find(k, long_name), &t), 0);
    assert_string_equal(t.name, long_name);
    keys_close(k);
    fixture_remove(dir);
}

static void test_wrong_master_and_damage(void **state)
{
    (void)state;
    char *dir = fixture_directory(), path[512];
    struct keys *k = open_keys(dir, false);
    struct td_error err = {0};
    uint32_t n;
    bool found;
    assert_int_equal(keys_ensure(k, "tenant", &n, NULL), 0);
    keys_close(k);
    assert_int_equal(keys_open(&io_posix, dir, false, other_master, false, &found, &k, &err), -TD_ERR_AUTH);
    assert_non_null(strstr(err.text, "master key"));

    uint8_t *file;
    size_t size;
    snprintf(path, sizeof path, "%s/" KEYS_FILE, dir);
    assert_int_equal(io_read_file(&io_posix, path, 1 << 20, &file, &size), 0);
    assert_int_equal(size, 96 + 256 + 36);
    for (size_t at = 0; at < size; at += 5) { /* once as an accident, once with the CRC made right */
        for (int forged = 0; forged < 2; forged++) {
            uint8_t copy[512];
            memcpy(copy, file, size);
            copy[at] ^= 4;
            if (forged)
                store_le32(copy + size - 4, crc32c(0, copy, size - 4));
            if (memcmp(copy, file, size) == 0)
                continue;
            assert_int_equal(io_replace_file(&io_posix, dir, KEYS_FILE, copy, size), 0);
            int rc = keys_open(&io_posix, dir, false, master, false, &found, &k, &err);
            assert_true(rc < 0);
            assert_non_null(strstr(err.text, KEYS_FILE));
        }
    }
    for (size_t length = 0; length < size; length += 40) {
        assert_int_equal(io_replace_file(&io_posix, dir, KEYS_FILE, file, length), 0);
        assert_true(keys_open(&io_posix, dir, false, master, false, &found, &k, &err) < 0);
    }
    free(file);
    fixture_remove(dir);
}

static void test_limit_of_tenants(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct keys *k = open_keys(dir, false);
    uint32_t n;
    for (int i = 0; i < 40; i++) { /* erased ones are not found by scanning over them */
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        assert_int_equal(keys_ensure(k, name, &n, NULL), 0);
        if (i % 2)
            assert_int_equal(keys_erase(k, n, NULL), 0);
    }
    for (int i = 0; i < 40; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        assert_int_equal(keys_find(k, name) == 0, i % 2);
    }
    keys_close(k);
    fixture_remove(dir);
}

static void test_master_key_file(void **state)
{
    (void)state;
    char *dir = fixture_directory(), path[512];
    uint8_t a[32], b[32];
    struct td_error err = {0};
    struct stat st;
    unsetenv("TANDEM_STORE_KEY");
    snprintf(path, sizeof path, "%s/master.key", dir);
    assert_int_equal(store_master_key_load(path, false, a, &err), -TD_ERR_NOTFOUND);
    assert_int_equal(store_master_key_load(path, true, a, &err), 0);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(st.st_size, 65);
    assert_int_equal(store_master_key_load(path, true, b, &err), 0);
    assert_memory_equal(a, b, 32);
    assert_int_equal(chmod(path, 0644), 0);
    assert_true(store_master_key_load(path, true, b, &err) < 0);
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(truncate(path, 60), 0);
    assert_int_equal(store_master_key_load(path, true, b, &err), -TD_ERR_FORMAT);
    assert_non_null(strstr(err.text, "64 hex digits"));
    setenv("TANDEM_STORE_KEY", "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f", 1);
    assert_int_equal(store_master_key_load(path, false, b, &err), 0);
    for (int i = 0; i < 32; i++)
        assert_int_equal(b[i], i);
    setenv("TANDEM_STORE_KEY", "12", 1);
    assert_int_equal(store_master_key_load(path, false, b, &err), -TD_ERR_FORMAT);
    assert_non_null(strstr(err.text, "TANDEM_STORE_KEY"));
    unsetenv("TANDEM_STORE_KEY");
    assert_int_equal(store_master_key_load(NULL, true, b, &err), -TD_ERR_NOTFOUND);
    fixture_remove(dir);
}

/* Two nodes, one directory: whoever makes a tenant first makes it for both, and an erased one is gone for both. */
static void test_nodes_share_a_directory(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct keys *a, *b, *fresh;
    struct tenant_keys of_a, of_b;
    bool found;
    uint32_t n;
    assert_int_equal(keys_open(&io_posix, dir, true, master, false, &found, &a, NULL), 0);
    assert_int_equal(keys_open(&io_posix, dir, true, master, false, &found, &b, NULL), 0);
    assert_int_equal(keys_ensure(a, "acme", &n, NULL), 0);
    assert_int_equal(keys_get(a, n, &of_a), 0);
    assert_int_equal(keys_ensure(b, "other", &n, NULL), 0); /* must not write over what a has made */
    assert_int_equal(keys_ensure(b, "acme", &n, NULL), 0);
    assert_int_equal(keys_get(b, n, &of_b), 0);
    assert_memory_equal(&of_a, &of_b, sizeof of_a);
    assert_int_equal(keys_erase(a, keys_find(a, "acme"), NULL), 0);
    assert_int_equal(keys_ensure(b, "third", &n, NULL), 0); /* the next change sees it */
    assert_int_equal(keys_find(b, "acme"), 0);
    assert_int_equal(keys_ensure(a, "acme", &n, NULL), 0); /* erased by one, and others made since: … */
    assert_int_equal(keys_ensure(b, "fourth", &n, NULL), 0);
    assert_int_not_equal(keys_find(b, "acme"), 0);
    assert_int_equal(keys_erase(a, keys_find(a, "acme"), NULL), 0);
    assert_int_equal(keys_ensure(a, "fifth", &n, NULL), 0);
    assert_int_equal(keys_ensure(b, "sixth", &n, NULL), 0); /* … the other must not write its keys again */
    assert_int_equal(keys_find(b, "acme"), 0);
    assert_int_not_equal(keys_find(b, "fifth"), 0);
    assert_int_equal(keys_open(&io_posix, dir, true, master, true, &found, &fresh, NULL), 0);
    assert_int_equal(keys_find(fresh, "acme"), 0);
    keys_close(fresh);
    assert_int_equal(keys_rotate(b, other_master, NULL), 0);
    assert_int_equal(keys_ensure(a, "seventh", &n, NULL), -TD_ERR_AUTH); /* a needs the new master key */
    keys_close(a);
    keys_close(b);
    fixture_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tenants_persist),         cmocka_unit_test(test_names),
        cmocka_unit_test(test_wrong_master_and_damage), cmocka_unit_test(test_limit_of_tenants),
        cmocka_unit_test(test_master_key_file),         cmocka_unit_test(test_nodes_share_a_directory),
    };
    crypto_init();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
