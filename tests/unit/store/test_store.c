/* store: put, find, read, delete, conversations, and that all of it is there after closing and opening. */
#include "store_fixture.h"
#include "shared/log.h"
#include <pthread.h>

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

static void test_metrics_and_stats(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    struct metric *hits = metric_counter("tandem_kv_tier_hits_total", "tier=\"disk\"", "");
    struct metric *misses = metric_counter("tandem_kv_tier_misses_total", "tier=\"disk\"", "");
    double hits_before = metric_value(hits), misses_before = metric_value(misses);
    struct fixture_block f;
    struct store_block_info info;
    struct store_stats stats;
    fixture_block_make(&f, 1);
    store_find(s, "acme", &f.id, &info);
    assert_int_equal(fixture_put(s, "acme", &f), 0);
    store_find(s, "acme", &f.id, &info);
    assert_true(fixture_block_reads(s, "acme", &f));
    struct tier_block *b;
    uint8_t *body;
    size_t size;
    uint64_t version;
    struct kv_block_id unknown = {{1}};
    assert_int_equal(store_read_block(s, "acme", &unknown, &b), -TD_ERR_NOTFOUND);
    assert_int_equal(store_read_block(s, "nobody", &f.id, &b), -TD_ERR_NOTFOUND);
    assert_int_equal(store_conv_get(s, "acme", "ann", "none", &version, &body, &size), -TD_ERR_NOTFOUND);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "x"), 0);
    assert_true(metric_value(hits) == hits_before + 1);
    assert_true(metric_value(misses) == misses_before + 1);
    store_stats(s, &stats);
    assert_int_equal(stats.blocks, 1);
    assert_int_equal(stats.conversations, 1);
    assert_int_equal(stats.segments, 1);
    assert_int_equal(stats.puts, 2);
    assert_int_equal(stats.reads, 1);
    assert_int_equal(stats.read_failures, 0); /* what is not there was not read */
    assert_true(stats.block_bytes > 2 * FIXTURE_LAYERS * FIXTURE_PIECE);
    assert_true(stats.segment_bytes >= stats.block_bytes + 3 * RECORD_PAGE);
    assert_int_equal(stats.queue_bytes, 0);
    assert_true(stats.fsyncs >= 2);
    assert_false(stats.writes_off);
    store_close(s);
    fixture_remove(dir);
}

/* Also of a directory that the store makes: nine tenths of the file system that it is on. */
static void test_limit_by_default(void **state)
{
    (void)state;
    char *dir = fixture_directory(), path[512];
    struct store_config c = fixture_config(dir);
    struct store_stats stats;
    uint64_t total, free_size;
    snprintf(path, sizeof path, "%s/new", dir);
    c.directory = path;
    c.limit_size = 0;
    assert_int_equal(io_posix.space(&io_posix, dir, &total, &free_size), 0);
    struct store *s = fixture_open(&c);
    store_stats(s, &stats);
    assert_int_equal(stats.limit_bytes, total / 10 * 9);
    store_close(s);
    fixture_remove(strdup(path));
    fixture_remove(dir);
}

static void test_put_refuses_what_is_no_block(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    struct fixture_block f;
    fixture_block_make(&f, 1);
    struct store_block b = f.block;
    b.block_index = 2; /* pieces of another block */
    assert_int_equal(store_put(s, "acme", &b, NULL, NULL), -TD_ERR_MISMATCH);
    b = f.block;
    b.layer_begin = 1, b.layer_end = FIXTURE_LAYERS; /* pieces of other layers */
    assert_int_equal(store_put(s, "acme", &b, NULL, NULL), -TD_ERR_MISMATCH);
    b = f.block;
    b.layer_end = 0;
    assert_int_equal(store_put(s, "acme", &b, NULL, NULL), -TD_ERR_LIMIT);
    b.layer_end = RECORD_PARTS_MAX + 1;
    assert_int_equal(store_put(s, "acme", &b, NULL, NULL), -TD_ERR_LIMIT);
    b = f.block;
    b.quality.fidelity = KV_L4 + 1; /* worse than its pieces, but nothing that there is */
    assert_int_equal(store_put(s, "acme", &b, NULL, NULL), -TD_ERR_FORMAT);
    assert_int_equal(store_put(s, "no such/name", &f.block, NULL, NULL), -TD_ERR_ARG);
    assert_int_equal(store_put(s, "", &f.block, NULL, NULL), -TD_ERR_ARG);
    f.bytes[3][100] ^= 1;
    assert_int_equal(store_put(s, "acme", &f.block, NULL, NULL), -TD_ERR_CHECKSUM);
    fixture_block_of(&f, 1, quality_lossy, 0, FIXTURE_LAYERS);
    f.block.quality = quality_exact; /* better than its pieces */
    assert_int_equal(store_put(s, "acme", &f.block, NULL, NULL), -TD_ERR_MISMATCH);
    store_close(s);
    fixture_remove(dir);
}

static void test_tenants_do_not_share(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    struct fixture_block f;
    struct store_block_info info;
    uint8_t a[32], b[32], again[32];
    fixture_block_make(&f, 1);
    assert_int_equal(fixture_put(s, "a", &f), 0);
    assert_int_equal(store_chain_key(s, "a", a, NULL), 0);
    assert_int_equal(store_chain_key(s, "b", b, NULL), 0);
    assert_memory_not_equal(a, b, 32);
    assert_int_equal(store_find(s, "a", &f.id, &info), 0);
    assert_int_equal(store_find(s, "b", &f.id, &info), -TD_ERR_NOTFOUND);
    assert_false(fixture_block_reads(s, "b", &f));
    assert_int_equal(store_delete(s, "b", &f.id, NULL, NULL), -TD_ERR_NOTFOUND);
    store_close(s);
    s = fixture_open(&c);
    assert_int_equal(store_chain_key(s, "a", again, NULL), 0);
    assert_memory_equal(a, again, 32);
    assert_true(fixture_block_reads(s, "a", &f));
    store_close(s);
    fixture_remove(dir);
}

static void test_better_replaces_worse_never_the_reverse(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    struct fixture_block lossy, exact;
    struct store_stats before, after;
    fixture_block_of(&lossy, 1, quality_lossy, 0, FIXTURE_LAYERS);
    fixture_block_of(&exact, 1, quality_exact, 0, FIXTURE_LAYERS);
    assert_int_equal(fixture_put(s, "acme", &lossy), 0);
    assert_int_equal(fixture_put(s, "acme", &exact), 0);
    assert_true(fixture_block_reads(s, "acme", &exact));
    store_flush(s); /* voids come after the acknowledgement: a later batch begins after them */
    store_stats(s, &before);
    assert_int_equal(before.dead_bytes < 4 * RECORD_PAGE, 1); /* the worse copy's space was given back */
    assert_int_equal(fixture_put(s, "acme", &lossy), 0);      /* there is a better one: no write */
    assert_int_equal(fixture_put(s, "acme", &exact), 0);
    store_stats(s, &after);
    assert_int_equal(after.bytes_written, before.bytes_written);
    store_close(s);
    s = fixture_open(&c);
    assert_true(fixture_block_reads(s, "acme", &exact));
    fixture_counts_are_true(s);
    store_close(s);
    fixture_remove(dir);
}

static void test_layers_grow(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    struct fixture_block one, two, upper, worse;
    fixture_block_of(&one, 1, quality_exact, 0, 1);
    fixture_block_of(&two, 1, quality_exact, 0, 2);
    fixture_block_of(&upper, 1, quality_exact, 2, 3);
    assert_int_equal(fixture_put(s, "acme", &one), 0);
    assert_true(fixture_block_reads(s, "acme", &one));
    assert_int_equal(fixture_put(s, "acme", &two), 0);
    assert_true(fixture_block_reads(s, "acme", &two));
    assert_int_equal(fixture_put(s, "acme", &one), 0); /* fewer layers: kept as it is */
    assert_true(fixture_block_reads(s, "acme", &two));
    assert_int_equal(fixture_put(s, "acme", &upper), -TD_ERR_EXISTS); /* neither contains the other */
    fixture_block_of(&worse, 1, quality_lossy, 0, 3);
    assert_int_equal(fixture_put(s, "acme", &worse),
                     -TD_ERR_EXISTS); /* more layers do not make up for quality */
    assert_true(fixture_block_reads(s, "acme", &two));
    fixture_counts_are_true(s);
    store_close(s);
    fixture_remove(dir);
}

static void test_delete(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    struct fixture_block f;
    struct store_block_info info;
    struct fixture_done d = {0, 1};
    fixture_block_make(&f, 1);
    assert_int_equal(store_delete(s, "acme", &f.id, NULL, NULL), -TD_ERR_NOTFOUND);
    assert_int_equal(fixture_put(s, "acme", &f), 0);
    assert_int_equal(store_delete(s, "acme", &f.id, fixture_on_done, &d), 0);
    assert_int_equal(store_find(s, "acme", &f.id, &info), -TD_ERR_NOTFOUND); /* at once */
    assert_int_equal(store_delete(s, "acme", &f.id, NULL, NULL), -TD_ERR_NOTFOUND);
    store_flush(s);
    assert_int_equal(d.calls, 1);
    assert_int_equal(d.status, 0);
    store_close(s);
    s = fixture_open(&c);
    assert_int_equal(store_find(s, "acme", &f.id, &info), -TD_ERR_NOTFOUND);
    assert_int_equal(fixture_put(s, "acme", &f), 0); /* and can be put again */
    store_close(s);
    s = fixture_open(&c);
    assert_true(fixture_block_reads(s, "acme", &f));
    /* All in one batch: what was asked for last holds. */
    for (int i = 0; i < 3; i++) {
        assert_int_equal(store_delete(s, "acme", &f.id, NULL, NULL), 0);
        assert_int_equal(store_put(s, "acme", &f.block, NULL, NULL), 0);
    }
    store_close(s);
    s = fixture_open(&c);
    assert_true(fixture_block_reads(s, "acme", &f));
    fixture_counts_are_true(s);
    store_close(s);
    fixture_remove(dir);
}

static void assert_conversation(struct store *s, const char *principal, const char *id, uint64_t version,
                                const char *text)
{
    uint64_t got;
    char *body = fixture_conv_get(s, "acme", principal, id, &got);
    assert_non_null(body);
    assert_string_equal(body, text);
    assert_int_equal(got, version);
    free(body);
}

static void test_conversations(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    uint64_t version;
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 1, "x"), -TD_ERR_CONFLICT);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 0, "first"), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 0, "x"), -TD_ERR_CONFLICT);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 1, "second"), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 1, "x"), -TD_ERR_CONFLICT);
    assert_int_equal(fixture_conv_put(s, "acme", "bob", "one", 0, "bob's"), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "", 0, "x"), -TD_ERR_ARG);
    assert_int_equal(fixture_conv_put(s, "acme", "a b", "one", 0, "x"), -TD_ERR_ARG);
    for (int i = 0; i < 2; i++) {
        assert_conversation(s, "ann", "one", 2, "second");
        assert_conversation(s, "bob", "one", 1, "bob's");
        assert_null(fixture_conv_get(s, "acme", "eve", "one", &version));
        assert_null(fixture_conv_get(s, "other", "ann", "one", &version));
        store_close(s);
        s = fixture_open(&c);
    }
    assert_int_equal(store_conv_delete(s, "acme", "ann", "one", NULL, NULL), 0);
    assert_null(fixture_conv_get(s, "acme", "ann", "one", &version));
    assert_int_equal(store_conv_delete(s, "acme", "ann", "one", NULL, NULL), -TD_ERR_NOTFOUND);
    store_close(s);
    s = fixture_open(&c);
    assert_null(fixture_conv_get(s, "acme", "ann", "one", &version));
    assert_conversation(s, "bob", "one", 1, "bob's");
    store_close(s);
    fixture_remove(dir);
}

static void test_conversation_versions_within_a_batch(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    c.commit_interval_ms = 1000; /* all of it is one commit */
    struct store *s = fixture_open(&c);
    struct fixture_done d[6] = {{0, 1}};
    for (int i = 0; i < 3; i++)
        assert_int_equal(
            store_conv_put(s, "acme", "ann", "one", (uint64_t)i, "abc", (size_t)i, fixture_on_done, &d[i]),
            0);
    assert_int_equal(store_conv_put(s, "acme", "ann", "one", 2, "abc", 3, NULL, NULL), -TD_ERR_CONFLICT);
    assert_conversation(s, "ann", "one", 3, "ab"); /* one's own writes are seen at once */
    assert_int_equal(store_conv_delete(s, "acme", "ann", "one", fixture_on_done, &d[3]), 0);
    assert_int_equal(store_conv_put(s, "acme", "ann", "one", 3, "abc", 3, NULL, NULL), -TD_ERR_CONFLICT);
    assert_int_equal(store_conv_put(s, "acme", "ann", "one", 0, "new", 3, fixture_on_done, &d[4]), 0);
    assert_int_equal(store_conv_put(s, "acme", "ann", "one", 1, "newer", 5, fixture_on_done, &d[5]), 0);
    store_flush(s);
    for (int i = 0; i < 6; i++) {
        assert_int_equal(d[i].calls, 1);
        assert_int_equal(d[i].status, 0);
    }
    store_close(s);
    s = fixture_open(&c);
    assert_conversation(s, "ann", "one", 2, "newer");
    store_close(s);
    fixture_remove(dir);
}

struct seen {
    int count, stop_at;
    char ids[8][8];
};
static int see(void *ctx, const char *conv_id, uint64_t version, uint64_t updated_us, const void *body,
               size_t size)
{
    struct seen *seen = ctx;
    assert_true(version == 1 && updated_us > 0);
    assert_int_equal(size, 1);
    assert_int_equal(*(const char *)body, *conv_id);
    strcpy(seen->ids[seen->count++], conv_id);
    return seen->count == seen->stop_at;
}

static void test_conversations_of_a_principal_newest_first(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "b", 0, "b"), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "bob", "x", 0, "x"), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "a", 0, "a"), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "c"), 0);
    for (int i = 0; i < 2; i++) {
        struct seen seen = {0};
        assert_int_equal(store_conv_each(s, "acme", "ann", see, &seen), 0);
        assert_int_equal(seen.count, 3);
        assert_string_equal(seen.ids[0], "c");
        assert_string_equal(seen.ids[1], "a");
        assert_string_equal(seen.ids[2], "b");
        store_close(s);
        s = fixture_open(&c);
    }
    struct seen seen = {.stop_at = 1};
    assert_int_equal(store_conv_each(s, "acme", "ann", see, &seen), 0);
    assert_int_equal(seen.count, 1);
    assert_int_equal(store_conv_each(s, "nobody", "ann", see, &seen), 0);
    assert_int_equal(seen.count, 1);
    store_close(s);
    fixture_remove(dir);
}

/* Of two nodes that share the keys each erases what lies in its own store. */
static void test_erase_tenant_at_both_nodes(void **state)
{
    (void)state;
    char *keys = fixture_directory();
    char *dirs[2] = {fixture_directory(), fixture_directory()};
    struct store *s[2];
    struct fixture_block f;
    struct store_stats stats;
    fixture_block_make(&f, 1);
    for (int i = 0; i < 2; i++) {
        struct store_config c = fixture_config(dirs[i]);
        c.keys_directory = keys;
        s[i] = fixture_open(&c);
        assert_int_equal(fixture_put(s[i], "acme", &f), 0);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(store_erase_tenant(s[i], "acme", NULL), 0);
        store_stats(s[i], &stats);
        assert_int_equal(stats.blocks, 0);
    }
    for (int i = 0; i < 2; i++) {
        store_close(s[i]);
        fixture_remove(dirs[i]);
    }
    fixture_remove(keys);
}

static void test_erase_tenant(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    struct fixture_block f;
    struct store_block_info info;
    uint8_t before[32], after[32];
    uint64_t version;
    fixture_block_make(&f, 1);
    assert_int_equal(fixture_put(s, "acme", &f), 0);
    assert_int_equal(fixture_put(s, "other", &f), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 0, "text"), 0);
    store_chain_key(s, "acme", before, NULL);
    assert_int_equal(store_erase_tenant(s, "nobody", NULL), -TD_ERR_NOTFOUND);
    assert_int_equal(store_erase_tenant(s, "acme", NULL), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(store_find(s, "acme", &f.id, &info), -TD_ERR_NOTFOUND);
        assert_null(fixture_conv_get(s, "acme", "ann", "one", &version));
        assert_true(fixture_block_reads(s, "other", &f));
        fixture_counts_are_true(s);
        store_close(s);
        s = fixture_open(&c);
    }
    assert_int_equal(store_chain_key(s, "acme", after, NULL), 0); /* the name starts anew */
    assert_memory_not_equal(before, after, 32);
    assert_int_equal(fixture_put(s, "acme", &f), 0);
    store_close(s);
    s = fixture_open(&c);
    assert_true(fixture_block_reads(s, "acme", &f));
    store_close(s);
    fixture_remove(dir);
}

static void test_one_process_a_directory(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir), read_only = c;
    struct store *s = fixture_open(&c), *second = NULL;
    struct td_error err = {0};
    char pid[32];
    snprintf(pid, sizeof pid, "process %ld holds it", (long)getpid());
    assert_int_equal(store_open(&c, &second, &err), -TD_ERR_BUSY);
    assert_non_null(strstr(err.text, pid));
    assert_non_null(strstr(err.text, dir));
    read_only.read_only = true;
    assert_int_equal(store_open(&read_only, &second, &err), -TD_ERR_BUSY);
    char path[256];
    snprintf(path, sizeof path, "%s/lock", dir);
    assert_int_equal(unlink(path), 0); /* by whom it looks like one left behind */
    assert_int_equal(store_open(&c, &second, &err), -TD_ERR_BUSY);
    assert_non_null(strstr(err.text, "its lock file was removed"));
    store_close(s);
    s = fixture_open(&c);
    store_close(s);
    fixture_remove(dir);
}

static void test_read_only(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir), read_only = c;
    struct store *s = fixture_open(&c);
    struct fixture_block f, g;
    fixture_block_make(&f, 1);
    fixture_block_make(&g, 2);
    assert_int_equal(fixture_put(s, "acme", &f), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 0, "text"), 0);
    store_close(s);
    read_only.read_only = true;
    s = fixture_open(&read_only);
    assert_true(fixture_block_reads(s, "acme", &f));
    assert_conversation(s, "ann", "one", 1, "text");
    assert_int_equal(fixture_put(s, "acme", &g), -TD_ERR_UNSUPPORTED);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 1, "x"), -TD_ERR_UNSUPPORTED);
    assert_int_equal(store_delete(s, "acme", &f.id, NULL, NULL), -TD_ERR_UNSUPPORTED);
    assert_int_equal(store_erase_tenant(s, "acme", NULL), -TD_ERR_UNSUPPORTED);
    store_close(s);
    fixture_remove(dir);
}

static int count_blocks(void *ctx, const char *tenant, const struct store_tenant_stats *n)
{
    assert_string_equal(tenant, "acme");
    *(int *)ctx += (int)n->blocks;
    return 0;
}

static void test_verify_each_rebuild(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    struct fixture_block f;
    uint64_t records, bad;
    int count = 0;
    for (uint64_t i = 0; i < 20; i++) {
        fixture_block_make(&f, i);
        assert_int_equal(store_put(s, "acme", &f.block, NULL, NULL), 0);
    }
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 0, "text"), 0);
    assert_int_equal(store_each_tenant(s, count_blocks, &count), 0);
    assert_int_equal(count, 20);
    assert_int_equal(store_verify(s, NULL, NULL, &records, &bad, NULL), 0);
    assert_int_equal(records, 21);
    assert_int_equal(bad, 0);
    assert_int_equal(store_rebuild(&c, NULL, NULL, &records, NULL), -TD_ERR_BUSY);
    store_close(s);
    assert_int_equal(store_rebuild(&c, NULL, NULL, &records, NULL), 0);
    assert_int_equal(records, 21);
    s = fixture_open(&c);
    for (uint64_t i = 0; i < 20; i++) {
        fixture_block_make(&f, i);
        assert_true(fixture_block_reads(s, "acme", &f));
    }
    store_close(s);
    fixture_remove(dir);
}

static void test_master_key_and_key_file_are_needed(void **state)
{
    (void)state;
    char *dir = fixture_directory(), path[512];
    struct store_config c = fixture_config(dir), other = c;
    struct store *s = fixture_open(&c);
    struct fixture_block f;
    struct td_error err = {0};
    fixture_block_make(&f, 1);
    assert_int_equal(fixture_put(s, "acme", &f), 0);
    store_close(s);
    other.master_key[0] ^= 1;
    assert_int_equal(store_open(&other, &s, &err), -TD_ERR_AUTH);
    assert_non_null(strstr(err.text, "master key"));
    snprintf(path, sizeof path, "%s/keys.td", dir);
    unlink(path);
    assert_int_equal(store_open(&c, &s, &err),
                     -TD_ERR_NOTFOUND); /* a new key file would make the data worthless */
    assert_non_null(strstr(err.text, "keys.td is missing"));
    fixture_remove(dir);
}

/* Nothing that anybody wrote is readable in any file of the directory. The control: the same search finds the segment's magic. */
static bool files_hold(const char *dir, const void *needle, size_t size)
{
    bool found = false;
    DIR *d = opendir(dir);
    for (struct dirent *e; (e = readdir(d));) {
        char path[512];
        uint8_t *data;
        size_t length;
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        if (e->d_name[0] != '.' && io_read_file(&io_posix, path, 1 << 28, &data, &length) == 0) {
            found |= memmem(data, length, needle, size) != NULL;
            free(data);
        }
    }
    closedir(d);
    return found;
}

static void test_nothing_readable_on_disk(void **state)
{
    (void)state;
    static const char text[] = "a very secret sentence about the weather";
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    struct fixture_block f;
    fixture_block_make(&f, 1);
    assert_int_equal(fixture_put(s, "tenant-name-here", &f), 0);
    assert_int_equal(
        fixture_conv_put(s, "tenant-name-here", "principal-name-here", "conversation-id-here", 0, text), 0);
    for (int i = 0; i < 2; i++) {
        assert_true(files_hold(dir, "TDSEGMNT", 8));
        assert_true(files_hold(dir, f.id.bytes, 32)); /* an HMAC: says nothing */
        assert_false(files_hold(dir, text, sizeof text - 1));
        assert_false(files_hold(dir, text + 4, 8));
        assert_false(files_hold(dir, "tenant-name-here", 16));
        assert_false(files_hold(dir, "principal-name-here", 19));
        assert_false(files_hold(dir, "conversation-id-here", 20));
        assert_false(files_hold(dir, f.bytes[0] + KV_PIECE_HEAD_SIZE, 16));
        assert_false(files_hold(dir, f.bytes[0], 16)); /* the piece's head, too */
        if (i == 0)
            store_close(s);
    }
    fixture_remove(dir);
}

static void test_deleted_text_is_gone_from_the_file(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    struct store_stats with, without;
    char *text = malloc(100001);
    memset(text, 'x', 100000);
    text[100000] = 0;
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 0, text), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 1, text), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "two", 0, text), 0);
    store_flush(s); /* voids come after the acknowledgement: a later batch begins after them */
    store_stats(s, &with);
    assert_in_range(with.segment_bytes, 200000, 240000); /* the replaced version takes no space */
    assert_int_equal(store_conv_delete(s, "acme", "ann", "one", NULL, NULL), 0);
    store_flush(s);
    store_flush(s);
    store_stats(s, &without);
    assert_true(without.segment_bytes < with.segment_bytes - 90000);
    store_close(s);
    free(text);
    fixture_remove(dir);
}

static int open_descriptors(void)
{
    int count = 0;
    DIR *d = opendir("/proc/self/fd");
    while (readdir(d))
        count++;
    closedir(d);
    return count;
}

static void test_more_segments_than_descriptors(void **state)
{
    (void)state;
    enum { BLOCKS = 4 * SEGMENT_FDS_MAX }; /* three fit into a segment */
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    c.segment_size = 64 << 10;
    int before = open_descriptors();
    struct store *s = fixture_open(&c);
    struct fixture_block f;
    struct store_stats stats;
    for (int round = 0; round < 3; round++) {
        for (uint64_t i = 0; i < BLOCKS; i++) {
            fixture_block_make(&f, i);
            if (round == 0)
                assert_int_equal(store_put(s, "acme", &f.block, NULL, NULL), 0);
            else
                assert_true(fixture_block_reads(s, "acme", &f));
        }
        store_flush(s);
        store_stats(s, &stats);
        assert_true(stats.segments > SEGMENT_FDS_MAX + 20);
        assert_true(open_descriptors() - before <= SEGMENT_FDS_MAX + 10);
        store_close(s);
        if (round == 1)
            index_set_aside(dir, false);
        s = fixture_open(&c);
        assert_true(open_descriptors() - before <= SEGMENT_FDS_MAX + 10);
    }
    store_close(s);
    fixture_remove(dir);
}

static void test_metric_names(void **state)
{
    (void)state;
    static const char *const names[] = {
        "tandem_kv_tier_bytes{tier=\"disk\"}",
        "tandem_kv_tier_blocks{tier=\"disk\"}",
        "tandem_kv_tier_hits_total{tier=\"disk\"}",
        "tandem_kv_tier_misses_total{tier=\"disk\"}",
        "tandem_kv_tier_damaged_total{tier=\"disk\"}",
        "tandem_kv_tier_demotions_total{tier=\"disk\"}",
        "tandem_kv_tier_demoted_bytes_total{tier=\"disk\"}",
        "tandem_store_fsyncs_total",
        "tandem_store_write_bytes_total",
        "tandem_store_queue_bytes",
        "tandem_store_index_behind",
        "tandem_store_writes_off",
    };
    size_t size;
    char *text = metrics_render(&size);
    for (size_t i = 0; i < TD_COUNT(names); i++)
        if (!strstr(text, names[i]))
            fail_msg("no metric %s", names[i]);
    free(text);
}

struct storm {
    struct store *s;
    int thread;
};
static void *storm_thread(void *arg)
{
    struct storm *storm = arg;
    for (uint64_t i = 0; i < 60; i++) {
        struct fixture_block f;
        struct store_block_info info;
        char id[16];
        fixture_block_make(&f,
                           i % 20 + 1000 * (uint64_t)(storm->thread / 2)); /* pairs of threads share blocks */
        int rc = store_put(storm->s, "acme", &f.block, NULL, NULL);
        if (rc == 0 && store_find(storm->s, "acme", &f.id, &info) == 0)
            fixture_block_reads(storm->s, "acme", &f);
        if (i % 7 == 3)
            store_delete(storm->s, "acme", &f.id, NULL, NULL);
        snprintf(id, sizeof id, "c%d", storm->thread);
        fixture_conv_put(storm->s, "acme", "ann", id, i, "text");
    }
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    c.segment_size = 256 << 10;
    struct store *s = fixture_open(&c);
    struct fixture_block warm; /* the fixture's scratch is made by one thread */
    fixture_block_make(&warm, 9999);
    pthread_t threads[4];
    struct storm storms[4];
    for (int i = 0; i < 4; i++) {
        storms[i] = (struct storm){s, i};
        assert_int_equal(pthread_create(&threads[i], NULL, storm_thread, &storms[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 4; i++) {
        char id[16];
        snprintf(id, sizeof id, "c%d", i);
        assert_conversation(s, "ann", id, 60, "text");
    }
    uint64_t records, bad;
    assert_int_equal(store_verify(s, NULL, NULL, &records, &bad, NULL), 0);
    assert_int_equal(bad, 0);
    struct store_stats stats;
    store_stats(s, &stats);
    assert_int_equal(stats.damaged, 0);
    assert_int_equal(stats.queue_bytes, 0);
    fixture_counts_are_true(s);
    store_close(s);
    fixture_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block_round_trip),
        cmocka_unit_test(test_metrics_and_stats),
        cmocka_unit_test(test_limit_by_default),
        cmocka_unit_test(test_put_refuses_what_is_no_block),
        cmocka_unit_test(test_tenants_do_not_share),
        cmocka_unit_test(test_better_replaces_worse_never_the_reverse),
        cmocka_unit_test(test_layers_grow),
        cmocka_unit_test(test_delete),
        cmocka_unit_test(test_conversations),
        cmocka_unit_test(test_conversation_versions_within_a_batch),
        cmocka_unit_test(test_conversations_of_a_principal_newest_first),
        cmocka_unit_test(test_erase_tenant),
        cmocka_unit_test(test_erase_tenant_at_both_nodes),
        cmocka_unit_test(test_one_process_a_directory),
        cmocka_unit_test(test_read_only),
        cmocka_unit_test(test_verify_each_rebuild),
        cmocka_unit_test(test_master_key_and_key_file_are_needed),
        cmocka_unit_test(test_nothing_readable_on_disk),
        cmocka_unit_test(test_deleted_text_is_gone_from_the_file),
        cmocka_unit_test(test_more_segments_than_descriptors),
        cmocka_unit_test(test_metric_names),
        cmocka_unit_test(test_threads),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
