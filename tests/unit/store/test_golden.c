/* The store of tests/golden/store/v1, which a script wrote from FORMAT.md with none of this code: every record is found right, and what the
 * format says is not there is not. The same directory as another version would have left it is refused, and not a byte of it changed.
 * Offsets here are those of FORMAT.md. */
#include "shared/log.h"
#include "store_fixture.h"
#include <sys/stat.h>

#define V1_DIRECTORY TEST_DATA "/store/v1"
#define PAGE         4096

static const char *const golden_files[] = {"keys.td", "seg-0000000000000001.td", "seg-0000000000000002.td"};

static uint8_t *file_read(const char *directory, const char *name, size_t *size)
{
    char path[512];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fstat(fileno(f), &st), 0);
    *size = (size_t)st.st_size;
    uint8_t *data = malloc(*size + 1);
    assert_int_equal(fread(data, 1, *size, f), *size);
    fclose(f);
    return data;
}

static void file_write(const char *directory, const char *name, const uint8_t *data, size_t size)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
}

static char *golden_copy(void)
{
    char *directory = fixture_directory();
    for (size_t i = 0; i < TD_COUNT(golden_files); i++) {
        size_t size;
        uint8_t *data = file_read(V1_DIRECTORY, golden_files[i], &size);
        file_write(directory, golden_files[i], data, size);
        free(data);
    }
    return directory;
}

static struct store_config golden_config(const char *directory)
{
    struct store_config c = fixture_config(directory);
    for (int i = 0; i < 32; i++)
        c.master_key[i] = (uint8_t)(3 * i + 5);
    return c;
}

static struct kv_block_id golden_id(uint8_t seed)
{
    uint8_t name[6] = {'b', 'l', 'o', 'c', 'k', seed};
    struct kv_block_id id;
    sha256_once(name, sizeof name, id.bytes);
    return id;
}

/* Head and values of each piece of a block are what the script's rule gives. */
static void check_block(struct store *s, const char *tenant, uint8_t seed, uint8_t codec, uint16_t begin,
                        uint16_t end)
{
    struct kv_block_id id = golden_id(seed);
    struct tier_block *b;
    size_t payload = codec == 15 ? 256 : 130;
    assert_int_equal(store_read_block(s, tenant, &id, &b), 0);
    assert_int_equal(b->block.layer_begin, begin);
    assert_int_equal(b->block.layer_end, end);
    assert_int_equal(b->block.block_index, seed);
    assert_int_equal(b->block.quality.fidelity, codec == 15 ? 0 : 1);
    for (int i = 0; i < 2 * (end - begin); i++) {
        const uint8_t *p = b->pieces[i].data;
        assert_int_equal(b->pieces[i].size, 64 + payload);
        assert_memory_equal(p, "TDVK", 4);
        assert_int_equal(p[5], codec);
        assert_int_equal(p[6], i % 2);
        assert_int_equal(load_le16(p + 20), begin + i / 2);
        for (size_t j = 0; j < payload; j++)
            assert_int_equal(p[64 + j], (31 * seed + 7 * (begin + i / 2) + 3 * (i % 2) + j) % 127);
    }
    tier_block_release(b);
}

static bool block_is_there(struct store *s, const char *tenant, uint8_t seed)
{
    struct kv_block_id id = golden_id(seed);
    struct store_block_info info;
    return store_find(s, tenant, &id, &info) == 0;
}

static void check_all(struct store *s)
{
    struct store_stats stats;
    struct kv_block_id first = golden_id(1), last = golden_id(6);
    uint64_t version = 0;
    store_stats(s, &stats);
    assert_int_equal(stats.blocks, 4);
    assert_int_equal(stats.conversations, 1);
    check_block(s, "acme", 1, 15, 0, 2);
    check_block(s, "labs", 3, 1, 1, 3);
    check_block(s, "acme", 5, 15, 0, 2);
    check_block(s, "acme", 6, 15, 0, 2); /* behind the last sync, but whole */
    char *text = fixture_conv_get(s, "acme", "ann", "trip", &version);
    assert_non_null(text);
    assert_string_equal(text, "version two");
    assert_int_equal(version, 2);
    free(text);
    assert_true(store_is_pinned(s, "acme", &first));
    assert_false(store_is_pinned(s, "acme", &last));
    assert_int_equal(store_pin_count(s), 1);
    /* deleted; another tenant's; of keys that are gone; torn */
    assert_false(block_is_there(s, "acme", 2));
    assert_null(fixture_conv_get(s, "acme", "bob", "tax", &version));
    assert_false(block_is_there(s, "labs", 1));
    assert_false(block_is_there(s, "acme", 4));
    assert_false(store_has_tenant(s, "gone"));
    assert_false(block_is_there(s, "acme", 7));
}

static void test_version_1_is_read(void **state)
{
    (void)state;
    char *directory = golden_copy();
    struct store_config c = golden_config(directory);
    uint8_t chain_key[32], expected[32];
    uint64_t records, bad;
    c.read_only = true;
    struct store *s = fixture_open(&c);
    check_all(s);
    store_close(s);

    c.read_only = false;
    s = fixture_open(&c);
    check_all(s);
    assert_int_equal(store_chain_key(s, "acme", chain_key, NULL), 0);
    sha256_once("chain keyacme", 13, expected);
    assert_memory_equal(chain_key, expected, 32);
    assert_int_equal(store_verify(s, NULL, NULL, &records, &bad, NULL), 0);
    assert_int_equal(records, 5);
    assert_int_equal(bad, 0);
    store_close(s);

    s = fixture_open(&c); /* by the index that it has now */
    check_all(s);
    store_close(s);
    fixture_remove(directory);
}

/* What is written goes behind all that was there: nothing of the old segments but the torn tail changes. */
static void test_version_1_is_written_on(void **state)
{
    (void)state;
    char *directory = golden_copy();
    struct store_config c = golden_config(directory);
    struct fixture_block f;
    struct store *s = fixture_open(&c);
    fixture_block_make(&f, 99);
    assert_int_equal(fixture_put(s, "acme", &f), 0);
    store_close(s);
    s = fixture_open(&c);
    assert_true(fixture_block_reads(s, "acme", &f));
    check_block(s, "acme", 1, 15, 0, 2);
    store_close(s);
    for (size_t i = 1; i < TD_COUNT(golden_files); i++) {
        size_t size, now_size;
        uint8_t *data = file_read(V1_DIRECTORY, golden_files[i], &size);
        uint8_t *now = file_read(directory, golden_files[i], &now_size);
        assert_int_equal(now_size, i == 1 ? size : size - 2 * PAGE);
        assert_memory_equal(now, data, PAGE);
        free(data);
        free(now);
    }
    size_t size;
    uint8_t *third = file_read(directory, "seg-0000000000000003.td", &size);
    assert_memory_equal(third, "TDSEGMNT\x01\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0", 24);
    assert_int_equal(load_le64(third + 40), 15); /* the lsn after the greatest that counts */
    assert_memory_equal(third + PAGE, "TDRC\x01\x01\0\0", 8);
    assert_int_equal(load_le64(third + PAGE + 8), 15);
    free(third);
    fixture_remove(directory);
}

/* ---- other versions ----------------------------------------------------------------------------------------- */

static void page_finish(uint8_t *page)
{
    store_le32(page + PAGE - 4, crc32c(0, page, PAGE - 4));
}

/* A segment as a program of that version might have left it; head_damaged: and then something happened to its first page. */
static void make_segment_foreign(const char *directory, uint8_t version, bool head_damaged)
{
    size_t size;
    uint8_t *data = file_read(directory, golden_files[2], &size);
    data[8] = version;
    page_finish(data);
    data[100] ^= head_damaged;
    for (size_t at = PAGE; at < size; at += PAGE)
        if (memcmp(data + at, "TDRC", 4) == 0) {
            data[at + 4] = version;
            page_finish(data + at);
        }
    file_write(directory, golden_files[2], data, size);
    free(data);
}

static void make_keys_foreign(const char *directory, uint8_t version)
{
    size_t size;
    uint8_t *data = file_read(directory, golden_files[0], &size);
    data[8] = version;
    store_le32(data + size - 4, crc32c(0, data, size - 4));
    file_write(directory, golden_files[0], data, size);
    free(data);
}

static size_t count_files(const char *directory)
{
    size_t count = 0;
    DIR *d = opendir(directory);
    for (struct dirent *e; (e = readdir(d));)
        count += e->d_name[0] != '.' && strcmp(e->d_name, "lock") != 0;
    closedir(d);
    return count;
}

/* Neither opening, nor reading alone, nor remaking the index does anything but say so. Takes the directory. */
static void check_refused(char *directory, const char *says)
{
    struct store_config c = golden_config(directory);
    struct {
        uint8_t *data;
        size_t size;
    } before[TD_COUNT(golden_files)], now;
    file_write(directory, "seg-0000000000000003.td", (const uint8_t *)"x",
               1); /* it would be removed otherwise */
    for (size_t i = 0; i < TD_COUNT(golden_files); i++)
        before[i].data = file_read(directory, golden_files[i], &before[i].size);
    for (int way = 0; way < 3; way++) {
        struct store *s = NULL;
        struct td_error err = {0};
        uint64_t records;
        c.read_only = way == 1;
        int rc = way == 2 ? store_rebuild(&c, NULL, NULL, &records, &err) : store_open(&c, &s, &err);
        assert_int_equal(rc, -TD_ERR_VERSION);
        assert_non_null(strstr(err.text, says));
        assert_non_null(strstr(err.text, directory));
        assert_null(strchr(err.text, '\n'));
    }
    assert_int_equal(count_files(directory), TD_COUNT(golden_files) + 1);
    for (size_t i = 0; i < TD_COUNT(golden_files); i++) {
        now.data = file_read(directory, golden_files[i], &now.size);
        assert_int_equal(now.size, before[i].size);
        assert_memory_equal(now.data, before[i].data, now.size);
        free(now.data);
        free(before[i].data);
    }
    fixture_remove(directory);
}

static void test_other_versions_are_refused(void **state)
{
    (void)state;
    static const uint8_t versions[] = {0, 2};
    for (size_t i = 0; i < TD_COUNT(versions); i++) {
        char *directory = golden_copy(), says[32];
        make_segment_foreign(directory, versions[i], false);
        check_refused(directory, "another version of this program");
        directory = golden_copy();
        make_segment_foreign(directory, versions[i], true);
        check_refused(directory, "another version of this program");
        directory = golden_copy();
        make_keys_foreign(directory, versions[i]);
        snprintf(says, sizeof says, "it is of version %u,", versions[i]);
        check_refused(directory, says);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_version_1_is_read),
        cmocka_unit_test(test_version_1_is_written_on),
        cmocka_unit_test(test_other_versions_are_refused),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
