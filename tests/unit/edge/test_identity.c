/* identity: what was saved comes back; everything else counts as absent. */
#include "edge/identity.h"
#include "shared/log.h"
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static char dir[64], path[96];
static const uint8_t model[TD_HASH_SIZE] = {1}, other_model[TD_HASH_SIZE] = {2};

static struct store *open_store(const char *name, uint8_t key)
{
    char directory[96];
    struct store *store;
    struct td_error err = {0};
    snprintf(directory, sizeof directory, "%s/%s", dir, name);
    struct store_config config = {.directory = directory};
    memset(config.master_key, key, sizeof config.master_key);
    if (store_open(&config, &store, &err) < 0)
        fail_msg("%s", err.text);
    return store;
}

static struct edge_identity sample(void)
{
    struct edge_identity i;
    memset(&i, 0, sizeof i);
    strcpy(i.tenant, "acme");
    memset(i.principal, 'p', sizeof i.principal - 1); /* as long as a name may be */
    memset(i.principal_key, 0x5a, sizeof i.principal_key);
    i.context_max = 8192, i.codec_mask = 0x8003, i.hidden_mask = 7;
    return i;
}

static void what_was_saved_comes_back(void **state)
{
    (void)state;
    struct store *store = open_store("a", 1);
    struct edge_identity saved = sample(), got;
    struct stat st;
    assert_int_equal(identity_load(store, path, model, &got), -TD_ERR_NOTFOUND);
    for (uint32_t i = 0; i < 2; i++) { /* the second takes the place of the first */
        saved.context_max += i;
        memset(&got, 0, sizeof got);
        assert_int_equal(identity_save(store, path, model, &saved), 0);
        assert_int_equal(identity_load(store, path, model, &got), 0);
        assert_memory_equal(&got, &saved, sizeof got);
    }
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(identity_save(store, "/nonexistent/identity", model, &saved), -TD_ERR_IO);
    store_close(store);
    store = open_store("a", 1);
    assert_int_equal(identity_load(store, path, model, &got), 0);
    assert_int_equal(identity_load(store, path, other_model, &got), -TD_ERR_NOTFOUND);
    store_close(store);
    store = open_store("b", 1); /* another store has other keys */
    assert_int_equal(identity_load(store, path, model, &got), -TD_ERR_NOTFOUND);
    store_close(store);
}

static void damage_is_absence(void **state)
{
    (void)state;
    uint8_t bytes[512];
    struct store *store = open_store("c", 2);
    struct edge_identity saved = sample(), got;
    assert_int_equal(identity_save(store, path, model, &saved), 0);
    FILE *f = fopen(path, "rb");
    size_t size = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    assert_null(memmem(bytes, size, "acme", 4)); /* nothing of it is to be read */
    assert_null(memmem(bytes, size, "ZZZZ", 4));
    for (size_t at = 0; at <= size; at += at < size - 1 && at > 40 ? 7 : 1) {
        bool cut = at == size;
        bytes[cut ? 0 : at] ^= cut ? 0 : 0x10;
        f = fopen(path, "wb");
        fwrite(bytes, 1, cut ? size - 1 : size, f);
        fclose(f);
        assert_int_equal(identity_load(store, path, model, &got), -TD_ERR_NOTFOUND);
        bytes[cut ? 0 : at] ^= cut ? 0 : 0x10;
    }
    store_close(store);
}

static int remove_one(const char *name, const struct stat *s, int type, struct FTW *f)
{
    (void)s, (void)type, (void)f;
    return remove(name);
}

static int set_up(void **state)
{
    (void)state;
    log_set_level(LOG_ERROR);
    snprintf(dir, sizeof dir, "/tmp/td-identity-XXXXXX");
    if (crypto_init() || !mkdtemp(dir))
        return -1;
    snprintf(path, sizeof path, "%s/identity", dir);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_was_saved_comes_back),
                                       cmocka_unit_test(damage_is_absence)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
