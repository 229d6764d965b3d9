/* maintain: compaction, pins and the rotation of the master key, each with what must be the same before and after. */
#include "shared/log.h"
#include "store_fixture.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#define BLOCKS 24

static struct fixture_block blocks[BLOCKS];

static void put_blocks(struct store *s, int count)
{
    for (int i = 0; i < count; i++) {
        fixture_block_make(&blocks[i], 100 + (uint64_t)i);
        assert_int_equal(fixture_put(s, "acme", &blocks[i]), 0);
    }
}

/* ---- compaction --------------------------------------------------------------------------------------------- */

static void compaction_frees_what_is_dead_and_keeps_the_rest(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store_stats before, after;
    uint64_t freed = 0, version;
    c.segment_size = 64 << 10; /* a few records each */
    struct store *s = fixture_open(&c);
    put_blocks(s, BLOCKS);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "text"), 0);
    for (int i = 0; i < BLOCKS; i++)
        if (i % 3)
            assert_int_equal(store_delete(s, "acme", &blocks[i].id, NULL, NULL), 0);
    store_flush(s);
    store_stats(s, &before);
    assert_int_equal(store_compact(s, 20, NULL, NULL, &freed, NULL), 0);
    store_stats(s, &after);
    assert_true(freed > 0);
    assert_true(after.segments < before.segments);
    assert_true(after.dead_bytes < before.dead_bytes);
    assert_int_equal(after.blocks, BLOCKS / 3);
    for (int life = 0; life < 2; life++) {
        for (int i = 0; i < BLOCKS; i++)
            assert_int_equal(fixture_block_reads(s, "acme", &blocks[i]), i % 3 == 0);
        char *text = fixture_conv_get(s, "acme", "ann", "c", &version);
        assert_string_equal(text, "text");
        free(text);
        fixture_counts_are_true(s);
        store_close(s);
        s = fixture_open(&c);
    }
    assert_int_equal(store_compact(s, 99, NULL, NULL, &freed, NULL), 0); /* nothing is that dead */
    assert_int_equal(freed, 0);
    store_close(s);
    c.read_only = true;
    s = fixture_open(&c);
    assert_int_equal(store_compact(s, 0, NULL, NULL, &freed, NULL), -TD_ERR_UNSUPPORTED);
    store_close(s);
    fixture_remove(dir);
}

static uint64_t reported;
static void end_jobs(void *ctx, uint64_t done, uint64_t total)
{
    (void)total;
    reported = done;
    store_end_jobs(ctx);
}

/* A node that is told to stop has not the time for all of a large store. */
static void jobs_end_when_they_are_told_to(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store_stats before, after;
    uint64_t records, bad, freed, gone;
    c.segment_size = 64 << 10;
    struct store *s = fixture_open(&c);
    put_blocks(s, BLOCKS);
    store_flush(s);
    assert_int_equal(store_verify(s, end_jobs, s, &records, &bad, NULL), -TD_ERR_CANCELLED);
    assert_true(records < BLOCKS / 2);
    store_close(s);
    s = fixture_open(&c);
    store_stats(s, &before);
    assert_int_equal(store_compact(s, 0, end_jobs, s, &freed, NULL), -TD_ERR_CANCELLED);
    assert_int_equal(reported, 1); /* one segment */
    assert_int_equal(store_gc(s, NULL, NULL, &gone, &freed, NULL), -TD_ERR_CANCELLED);
    store_stats(s, &after);
    assert_int_equal(after.blocks, before.blocks);
    for (int i = 0; i < BLOCKS; i++)
        assert_true(fixture_block_reads(s, "acme", &blocks[i]));
    store_close(s);
    fixture_remove(dir);
}

/* A file that somebody has removed is one that no longer takes room, not one that cannot be removed. */
static void a_segment_that_has_gone_is_no_obstacle(void **state)
{
    (void)state;
    char *dir = fixture_directory(), path[256];
    struct store_config c = fixture_config(dir);
    struct store_stats before, after;
    uint64_t freed = 0;
    c.segment_size = 64 << 10;
    struct store *s = fixture_open(&c);
    put_blocks(s, BLOCKS);
    for (int i = 0; i < BLOCKS; i++)
        assert_int_equal(store_delete(s, "acme", &blocks[i].id, NULL, NULL), 0);
    store_flush(s);
    store_stats(s, &before);
    assert_true(before.segments >= 4);
    unsigned id = 0; /* the oldest that is there: what is dead as a whole may have gone */
    do
        snprintf(path, sizeof path, "%s/seg-%016x.td", dir, ++id);
    while (unlink(path) != 0 && id < BLOCKS);
    assert_int_equal(access(path, F_OK), -1);
    assert_true(id < BLOCKS);
    assert_int_equal(store_compact(s, 20, NULL, NULL, &freed, NULL), 0);
    store_stats(s, &after);
    assert_true(after.segments <= 2); /* not one less only: the others went as well */
    assert_true(after.segment_bytes < before.segment_bytes / 2);
    store_close(s);
    fixture_remove(dir);
}

/* What is written to a file that somebody has removed is written again to another, or refused: nobody is told that it is kept. */
static void nothing_is_kept_in_removed_files(void **state)
{
    (void)state;
    char *dir = fixture_directory(), path[256];
    struct store_config c = fixture_config(dir);
    uint64_t version;
    struct store *s = fixture_open(&c);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "a", 0, "before"), 0);
    snprintf(path, sizeof path, "%s/seg-%016x.td", dir, 1);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "b", 0, "behind"), 0);
    store_close(s);
    s = fixture_open(&c);
    char *text = fixture_conv_get(s, "acme", "ann", "b", &version);
    assert_string_equal(text, "behind");
    free(text);
    fixture_remove(strdup(dir));
    assert_true(fixture_conv_put(s, "acme", "ann", "c", 0, "nowhere") < 0);
    store_close(s);
    fixture_remove(dir);
}

/* ---- pins --------------------------------------------------------------------------------------------------- */

static void pinned_blocks_outlive_eviction(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    c.segment_size = 64 << 10;
    c.limit_size = 512 << 10;
    struct store *s = fixture_open(&c);
    put_blocks(s, 2);
    assert_int_equal(store_pin(s, "acme", &blocks[0].id, true, NULL), 0);
    assert_int_equal(store_pin(s, "acme", &blocks[0].id, true, NULL), 0); /* again: nothing new */
    assert_int_equal(store_pin_count(s), 1);
    struct fixture_block f;
    for (int life = 0; life < 2; life++) {
        for (uint64_t seed = 1000; seed < 1100; seed++) {
            fixture_block_make(&f, seed + 1000 * (uint64_t)life);
            assert_int_equal(fixture_put(s, "acme", &f), 0);
        }
        assert_true(fixture_block_reads(s, "acme", &blocks[0]));
        assert_false(fixture_block_reads(s, "acme", &blocks[1]));
        store_close(s);
        s = fixture_open(&c);
        assert_true(store_is_pinned(s, "acme", &blocks[0].id));
        assert_false(store_is_pinned(s, "acme", &blocks[1].id));
        assert_false(store_is_pinned(s, "other", &blocks[0].id));
    }
    assert_int_equal(store_pin(s, "acme", &blocks[0].id, false, NULL), 0);
    assert_int_equal(store_pin_count(s), 0);
    for (uint64_t seed = 3000; seed < 3100; seed++) {
        fixture_block_make(&f, seed);
        assert_int_equal(fixture_put(s, "acme", &f), 0);
    }
    assert_false(fixture_block_reads(s, "acme", &blocks[0]));
    store_close(s);
    s = fixture_open(&c);
    assert_int_equal(store_pin_count(s), 0); /* what was taken away does not come back */
    store_close(s);
    fixture_remove(dir);
}

/* Of a conversation's chain those that are held, with one wait for all. */
static void a_chain_is_pinned_as_far_as_it_is_held(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct kv_block_id ids[4];
    struct td_error err = {0};
    struct store *s = fixture_open(&c);
    put_blocks(s, 3);
    for (int i = 0; i < 3; i++)
        ids[i] = blocks[i].id;
    fixture_id(9999, &ids[3]); /* not there */
    assert_int_equal(store_pin(s, "acme", &ids[1], true, NULL), 0);
    assert_int_equal(store_pin_held(s, "acme", ids, 4, true, &err), 0);
    assert_int_equal(store_pin_count(s), 3);
    assert_false(store_is_pinned(s, "acme", &ids[3]));
    store_close(s);
    s = fixture_open(&c);
    assert_int_equal(store_pin_count(s), 3);
    assert_int_equal(store_pin_held(s, "acme", ids, 4, false, &err), 0);
    assert_int_equal(store_pin_held(s, "acme", ids, 4, false, &err), 0); /* again: nothing new */
    assert_int_equal(store_pin_count(s), 0);
    store_close(s);
    c.read_only = true;
    s = fixture_open(&c);
    assert_int_equal(store_pin_held(s, "acme", ids, 4, true, &err), -TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "cannot pin"));
    store_close(s);
    fixture_remove(dir);
}

/* What was damaged is counted, not what is sound. */
static void verifying_finds_what_is_damaged(void **state)
{
    (void)state;
    char *dir = fixture_directory(), path[300];
    struct store_config c = fixture_config(dir);
    uint64_t records, bad;
    uint8_t byte;
    struct store *s = fixture_open(&c);
    put_blocks(s, 3);
    snprintf(path, sizeof path, "%s/seg-%016x.td", dir, 1);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    const off_t at = RECORD_PAGE + RECORD_PAGE + 100; /* in the first record's body */
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
    assert_int_equal(store_verify(s, NULL, NULL, &records, &bad, NULL), 0);
    assert_int_equal(records, 3);
    assert_int_equal(bad, 1);
    store_close(s);
    fixture_remove(dir);
}

static void pins_survive_rebuilding_and_go_with_their_tenant(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    uint64_t records;
    put_blocks(s, 1);
    assert_int_equal(store_pin(s, "nobody", &blocks[0].id, true, NULL), -TD_ERR_NOTFOUND);
    assert_int_equal(store_pin(s, "acme", &blocks[0].id, true, NULL), 0);
    assert_int_equal(store_conv_pin(s, "acme", "ann", "c", true, NULL), 0);
    store_close(s);
    assert_int_equal(store_rebuild(&c, NULL, NULL, &records, NULL), 0);
    s = fixture_open(&c);
    assert_true(store_is_pinned(s, "acme", &blocks[0].id));
    assert_true(store_conv_is_pinned(s, "acme", "ann", "c"));
    assert_false(store_conv_is_pinned(s, "acme", "bob", "c"));
    assert_int_equal(store_conv_pin(s, "acme", "ann", "c", false, NULL), 0);
    assert_int_equal(store_erase_tenant(s, "acme", NULL), 0);
    assert_int_equal(store_pin_count(s), 0);
    store_close(s);
    fixture_remove(dir);
}

/* ---- eviction by value -------------------------------------------------------------------------------------- */

/* A chain whose end goes before its beginning, however old that is; whole segments would go oldest first. */
static void eviction_takes_the_ends_of_chains(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store_stats stats;
    struct kv_block_id parent = {{0}};
    c.segment_size = 64 << 10;
    c.limit_size = 768 << 10;
    struct store *s = fixture_open(&c);
    static struct fixture_block chain[80];
    int held[2] = {0};
    for (int i = 0; i < 80; i++) {
        fixture_block_make(&chain[i], 500 + (uint64_t)i);
        chain[i].block.parent = parent;
        parent = chain[i].id;
        fixture_put(s, "acme", &chain[i]);
    }
    store_stats(s, &stats);
    assert_true(stats.evictions > 0);
    assert_true(stats.segment_bytes <= c.limit_size);
    for (int life = 0; life < 2; life++) {
        assert_true(fixture_block_reads(s, "acme", &chain[0]));
        bool leading = true;
        held[life] = 0;
        for (int i = 0; i < 79; i++) { /* the newest was put after the last eviction */
            bool reads = fixture_block_reads(s, "acme", &chain[i]);
            leading &= reads;
            held[life] += leading;
        }
        store_close(s);
        s = fixture_open(&c);
    }
    assert_true(held[0] > 5);
    assert_int_equal(held[0], held[1]);
    store_close(s);
    fixture_remove(dir);
}

static void quotas_are_kept(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store_stats stats;
    uint64_t gone, freed, size;
    struct store *s = fixture_open(&c);
    put_blocks(s, 12);
    fixture_put(s, "other", &blocks[0]);
    store_stats(s, &stats);
    size = stats.block_bytes / 13;
    assert_int_equal(store_gc(s, NULL, NULL, &gone, &freed, NULL), 0);
    assert_int_equal(gone, 0);
    assert_int_equal(store_pin(s, "acme", &blocks[3].id, true, NULL), 0);
    assert_int_equal(store_set_tenant(s, "acme", 4 * size, 0), 0);
    assert_int_equal(store_gc(s, NULL, NULL, &gone, &freed, NULL), 0);
    assert_int_equal(gone, 8);
    assert_true(freed >= 8 * (size - RECORD_PAGE) - 16 * RECORD_PAGE);
    assert_true(fixture_block_reads(s, "acme", &blocks[3]));
    assert_true(fixture_block_reads(s, "other", &blocks[0]));
    store_close(s);
    s = fixture_open(&c); /* what went does not come back */
    store_stats(s, &stats);
    assert_int_equal(stats.blocks, 5);
    store_close(s);
    c.tenant_quota_size = size; /* of every tenant */
    s = fixture_open(&c);
    assert_int_equal(store_gc(s, NULL, NULL, &gone, &freed, NULL), 0);
    store_stats(s, &stats); /* the writer may have been faster */
    assert_int_equal(stats.blocks, 2);
    assert_true(fixture_block_reads(s, "acme", &blocks[3])); /* pinned */
    store_close(s);
    fixture_remove(dir);
}

/* ---- master key --------------------------------------------------------------------------------------------- */

static void write_key(const char *path, const uint8_t key[CRYPTO_KEY_SIZE])
{
    char text[2 * CRYPTO_KEY_SIZE + 1];
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fchmod(fileno(f), 0600), 0);
    hex_encode(key, CRYPTO_KEY_SIZE, text);
    fputs(text, f);
    fclose(f);
}

static int try_open(const struct store_config *c)
{
    struct store *s = NULL;
    int rc = store_open(c, &s, NULL);
    store_close(s);
    return rc;
}

static void a_new_master_key_opens_what_the_old_one_wrote(void **state)
{
    (void)state;
    char *dir = fixture_directory(), path[256], next[300];
    struct store_config c = fixture_config(dir), old = c;
    uint8_t chain[32], again[32];
    snprintf(path, sizeof path, "%s/store.key", dir);
    snprintf(next, sizeof next, "%s.new", path);
    write_key(path, c.master_key);
    struct store *s = fixture_open(&c);
    put_blocks(s, 1);
    store_chain_key(s, "acme", chain, NULL);
    assert_int_equal(store_rotate_master_file(s, path, NULL), 0);
    assert_int_equal(fixture_put(s, "acme", &blocks[0]), 0); /* it goes on */
    store_close(s);
    assert_int_equal(access(next, F_OK), -1);

    assert_int_equal(try_open(&old), -TD_ERR_AUTH);
    assert_int_equal(store_master_key_load(path, false, c.master_key, NULL), 0);
    assert_memory_not_equal(c.master_key, old.master_key, CRYPTO_KEY_SIZE);
    s = fixture_open(&c);
    assert_true(fixture_block_reads(s, "acme", &blocks[0]));
    store_chain_key(s, "acme", again, NULL);
    assert_memory_equal(chain, again, sizeof chain);
    store_close(s);
    fixture_remove(dir);
}

/* keys.td has the new key and the key file still the old one. */
static void a_rotation_that_was_cut_off_is_finished(void **state)
{
    (void)state;
    char *dir = fixture_directory(), path[256], next[300];
    struct store_config c = fixture_config(dir);
    uint8_t key[CRYPTO_KEY_SIZE], loaded[CRYPTO_KEY_SIZE];
    memset(key, 9, sizeof key);
    snprintf(path, sizeof path, "%s/store.key", dir);
    snprintf(next, sizeof next, "%s.new", path);
    write_key(path, c.master_key);
    struct store *s = fixture_open(&c);
    put_blocks(s, 1);
    write_key(next, key);
    assert_int_equal(store_rotate_master(s, key, NULL), 0);
    store_close(s);

    assert_int_equal(try_open(&c), -TD_ERR_AUTH); /* nobody says where the key is */
    c.master_key_path = path;
    s = fixture_open(&c);
    assert_true(fixture_block_reads(s, "acme", &blocks[0]));
    assert_int_equal(access(next, F_OK), -1);
    assert_int_equal(store_master_key_load(path, false, loaded, NULL), 0);
    assert_memory_equal(loaded, key, sizeof key);

    write_key(next, key); /* again, and this time the store rotates once more before anybody restarts */
    assert_int_equal(store_rotate_master_file(s, path, NULL), 0);
    store_close(s);
    assert_int_equal(store_master_key_load(path, false, c.master_key, NULL), 0);
    assert_int_equal(try_open(&c), 0);
    write_key(next, loaded); /* a key that fits nothing is left alone */
    memset(c.master_key, 1, sizeof c.master_key);
    assert_int_equal(try_open(&c), -TD_ERR_AUTH);
    assert_int_equal(access(next, F_OK), 0);
    fixture_remove(dir);
}

static int broken_syncs;
static int sync_directory_breaks(struct io *io, const char *path)
{
    return broken_syncs > 0 && broken_syncs-- ? -EIO : io_posix.sync_directory(io, path);
}

/* The new keys.td stands there, and whether for good is not known: no key may go that one of the two needs. */
static void a_rotation_whose_sync_fails_loses_no_key(void **state)
{
    (void)state;
    char *dir = fixture_directory(), path[256], next[300];
    struct store_config c = fixture_config(dir);
    struct io io = io_posix;
    struct store *s;
    io.sync_directory = sync_directory_breaks;
    snprintf(path, sizeof path, "%s/store.key", dir);
    snprintf(next, sizeof next, "%s.new", path);
    write_key(path, c.master_key);
    c.master_key_path = path;
    assert_int_equal(store_open_with(&c, &(struct store_env){.io = &io}, &s, NULL), 0);
    put_blocks(s, 1);
    broken_syncs = 1;
    assert_true(store_rotate_master_file(s, path, NULL) < 0);
    store_close(s);
    s = fixture_open(&c); /* with the key that lies beside the old one */
    assert_true(fixture_block_reads(s, "acme", &blocks[0]));
    assert_int_equal(access(next, F_OK), -1);
    store_close(s);
    fixture_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compaction_frees_what_is_dead_and_keeps_the_rest),
        cmocka_unit_test(jobs_end_when_they_are_told_to),
        cmocka_unit_test(a_segment_that_has_gone_is_no_obstacle),
        cmocka_unit_test(nothing_is_kept_in_removed_files),
        cmocka_unit_test(pinned_blocks_outlive_eviction),
        cmocka_unit_test(a_chain_is_pinned_as_far_as_it_is_held),
        cmocka_unit_test(verifying_finds_what_is_damaged),
        cmocka_unit_test(pins_survive_rebuilding_and_go_with_their_tenant),
        cmocka_unit_test(eviction_takes_the_ends_of_chains),
        cmocka_unit_test(quotas_are_kept),
        cmocka_unit_test(a_new_master_key_opens_what_the_old_one_wrote),
        cmocka_unit_test(a_rotation_that_was_cut_off_is_finished),
        cmocka_unit_test(a_rotation_whose_sync_fails_loses_no_key),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
