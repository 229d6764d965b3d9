/* demote: who allows it, what is re-encoded and what never, what it says of itself, and what wins over it. Crashes around the replacement:
 * tests/fault/test_power_loss.c. Which block is chosen: test_policy.c. */
#include "shared/log.h"
#include "store_fixture.h"
#include "store/tiers.h"
#include <errno.h>
#include <fcntl.h>

#define BLOCKS 12

static struct fixture_block blocks[BLOCKS], demoted[BLOCKS];

static void put_chain(struct store *s, const char *tenant, int count)
{
    struct kv_block_id parent = {{0}};
    for (int i = 0; i < count; i++) {
        fixture_block_make(&blocks[i], 100 + (uint64_t)i);
        fixture_block_demoted(&blocks[i], "l1", &demoted[i]);
        blocks[i].block.parent = parent;
        parent = blocks[i].id;
        assert_int_equal(fixture_put(s, tenant, &blocks[i]), 0);
    }
}

static uint64_t record_size_of(const struct fixture_block *f)
{
    uint64_t size = 0;
    for (int i = 0; i < 2 * FIXTURE_LAYERS; i++)
        size += f->pieces[i].size;
    return record_size(size + (uint64_t)FIXTURE_LAYERS * CRYPTO_TAG_SIZE);
}

/* A quota with room for so many blocks at L1. Returns how many were demoted. */
static uint64_t collect(struct store *s, const char *tenant, int count)
{
    struct store_stats before, after;
    uint64_t gone, freed;
    store_stats(s, &before);
    assert_int_equal(store_set_tenant(s, tenant, (uint64_t)count * record_size_of(&demoted[0]), 0), 0);
    assert_int_equal(store_gc(s, NULL, NULL, &gone, &freed, NULL), 0);
    store_stats(s, &after);
    assert_int_equal(store_set_tenant(s, tenant, 0, 0), 0);
    return after.demotions - before.demotions;
}

static uint8_t fidelity_of(struct store *s, const char *tenant, const struct fixture_block *f)
{
    struct store_block_info info;
    assert_int_equal(store_find(s, tenant, &f->id, &info), 0);
    return info.quality.fidelity;
}

static bool tiers_have(struct tiers *t, const char *tenant, const struct fixture_block *f,
                       enum kv_accept accept)
{
    const struct tiers_want want = {accept, KV_NUMERICS_CPU_V1, 0, FIXTURE_LAYERS};
    struct tiers_found found;
    struct tier_block *b = NULL;
    bool has = tiers_find(t, tenant, &f->id, &want, &found) == 0;
    assert_int_equal(tiers_get(t, tenant, &f->id, &want, &b, NULL) == 0, has);
    tier_block_release(b);
    return has;
}

/* ---- who and what ------------------------------------------------------------------------------------------- */

static void nobodys_blocks_are_demoted_unasked(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    for (int life = 0; life < 2; life++) {
        struct store *s = fixture_open(&c);
        put_chain(s, "acme", 4);
        assert_int_equal(collect(s, "acme", 4), 0);
        store_close(s);
        c.demotion = fixture_demotion("other");
    }
    fixture_remove(dir);
}

static void a_demoted_block_says_so_and_is_what_the_codec_gives(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store_stats stats;
    struct tiers *t;
    c.demotion = fixture_demotion("acme");
    struct store *s = fixture_open(&c);
    put_chain(s, "acme", 4);
    put_chain(s, "bank", 4);
    store_stats(s, &stats);
    uint64_t size = stats.block_bytes;
    assert_int_equal(collect(s, "acme", 4), 4);
    store_stats(s, &stats);
    assert_int_equal(stats.demotions, 4);
    assert_int_equal(stats.demoted_bytes, size - stats.block_bytes);
    assert_int_equal(stats.puts, 8);
    assert_int_equal(stats.evictions, 0);
    for (int life = 0; life < 2; life++) { /* the index; then all from the segments */
        assert_int_equal(tiers_create(&(struct tiers_config){.store = s}, &t, NULL), 0);
        for (int i = 0; i < 4; i++) {
            assert_int_equal(fidelity_of(s, "acme", &blocks[i]), KV_L1);
            assert_true(fixture_block_reads(s, "acme", &demoted[i]));
            assert_true(fixture_block_reads(s, "bank", &blocks[i]));
            assert_false(tiers_have(t, "acme", &blocks[i], KV_ACCEPT_EXACT));
            assert_true(tiers_have(t, "acme", &blocks[i], KV_ACCEPT_VISIBLE_LOSSLESS));
            assert_true(tiers_have(t, "bank", &blocks[i], KV_ACCEPT_EXACT));
            assert_false(tiers_have(t, "nobody", &blocks[i], KV_ACCEPT_ANY));
        }
        tiers_destroy(t);
        store_close(s);
        uint64_t records, bad;
        assert_int_equal(store_rebuild(&c, NULL, NULL, &records, NULL), 0);
        assert_int_equal(records, 8);
        s = fixture_open(&c);
        assert_int_equal(store_verify(s, NULL, NULL, &records, &bad, NULL), 0);
        assert_int_equal(bad, 0);
    }
    assert_int_equal(collect(s, "acme", 4), 0); /* it is that small already */
    store_close(s);
    fixture_remove(dir);
}

/* A lossy copy, values that the level refuses, another model's shape: all stay as they are. */
static void what_may_not_be_demoted_stays_as_it_is(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_demotion *demotion = fixture_demotion("acme");
    struct store_config c = fixture_config(dir);
    struct fixture_block lossy, few, endless, fine;
    uint16_t values[FIXTURE_VALUES] = {0x7c00}; /* infinity */
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&demotion->shape);
    struct kv_piece_head h;
    struct span payload;
    c.demotion = demotion;
    struct store *s = fixture_open(&c);
    fixture_block_of(&lossy, 1, quality_lossy, 0, FIXTURE_LAYERS);
    fixture_block_of(&few, 2, quality_exact, 0, FIXTURE_LAYERS - 1);
    fixture_block_make(&endless, 3);
    fixture_block_make(&fine, 4);
    assert_int_equal(kv_piece_parse(endless.bytes[2], FIXTURE_PIECE, &h, &payload), 0);
    assert_int_equal(kv_piece_encode(scratch, &h, values, endless.bytes[2], FIXTURE_PIECE), FIXTURE_PIECE);
    kv_codec_scratch_destroy(scratch);
    assert_int_equal(fixture_put(s, "acme", &lossy), 0);
    assert_int_equal(fixture_put(s, "acme", &few), 0);
    assert_int_equal(fixture_put(s, "acme", &endless), 0);
    assert_int_equal(fixture_put(s, "acme", &fine), 0);
    uint64_t gone, freed;
    struct store_stats stats;
    store_stats(s, &stats);
    assert_int_equal(store_set_tenant(s, "acme", stats.block_bytes, 0), 0); /* near it, not over it */
    assert_int_equal(store_gc(s, NULL, NULL, &gone, &freed, NULL), 0);
    assert_int_equal(gone, 0);
    assert_true(fixture_block_reads(s, "acme", &lossy));
    assert_true(fixture_block_reads(s, "acme", &few));
    assert_true(fixture_block_reads(s, "acme", &endless));
    assert_int_equal(fidelity_of(s, "acme", &fine), KV_L1);
    store_close(s);
    demotion->shape.head_dim = 4; /* another model is served now */
    demotion->shape.kv_head_count = 4;
    s = fixture_open(&c);
    fixture_block_make(&fine, 5);
    assert_int_equal(fixture_put(s, "acme", &fine), 0);
    assert_int_equal(collect(s, "acme", 4), 0);
    store_close(s);
    fixture_remove(dir);
}

static void levels_and_exceptions_are_by_tenant(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    const struct store_demotion_tenant tenants[] = {{"two", kv_level_find("l2")}, {"not", NULL}};
    struct store_demotion demotion = *fixture_demotion("any");
    struct store_config c = fixture_config(dir);
    struct fixture_block two[4];
    demotion.tenants = tenants, demotion.count = TD_COUNT(tenants);
    demotion.others = kv_level_find("l1");
    c.demotion = &demotion;
    struct store *s = fixture_open(&c);
    put_chain(s, "two", 4);
    put_chain(s, "not", 4);
    put_chain(s, "any", 4);
    assert_int_equal(collect(s, "two", 4), 4);
    assert_int_equal(collect(s, "not", 4), 0);
    assert_int_equal(collect(s, "any", 4), 4);
    for (int i = 0; i < 4; i++) {
        fixture_block_demoted(&blocks[i], "l2", &two[i]);
        assert_true(fixture_block_reads(s, "two", &two[i]));
        assert_true(fixture_block_reads(s, "any", &demoted[i]));
    }
    store_close(s);
    fixture_remove(dir);
}

/* ---- what wins over it -------------------------------------------------------------------------------------- */

static void a_better_copy_replaces_it_and_never_the_reverse(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    c.demotion = fixture_demotion("acme");
    struct store *s = fixture_open(&c);
    put_chain(s, "acme", 2);
    assert_int_equal(collect(s, "acme", 2), 2);
    assert_int_equal(fixture_put(s, "acme", &blocks[0]), 0);
    assert_true(fixture_block_reads(s, "acme", &blocks[0]));
    assert_int_equal(fixture_put(s, "acme", &demoted[0]), 0); /* a lossy copy from elsewhere */
    assert_true(fixture_block_reads(s, "acme", &blocks[0]));
    assert_true(fixture_block_reads(s, "acme", &demoted[1]));
    assert_int_equal(collect(s, "acme", 2), 1); /* what is lossless again may be demoted again */
    store_close(s);
    fixture_remove(dir);
}

static int put_demoted(struct store *s, const struct fixture_block *small, struct fixture_done *done)
{
    return fixture_put_demoted(s, "acme", small, done);
}

/* The copy was made of a record that is not there any more, or not for long. */
static void what_came_meanwhile_wins(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct fixture_done done = {0, 1};
    struct fixture_block lossy;
    c.commit_interval_ms = 1000000; /* until a flush */
    struct store *s = fixture_open(&c);
    put_chain(s, "acme", 4);
    assert_int_equal(store_delete(s, "acme", &blocks[0].id, NULL, NULL), 0);
    assert_int_equal(put_demoted(s, &demoted[0], &done), -TD_ERR_AGAIN); /* on its way out */
    store_flush(s);
    assert_int_equal(put_demoted(s, &demoted[0], &done), -TD_ERR_AGAIN); /* gone */
    fixture_block_of(&lossy, 104, quality_lossy, 0, FIXTURE_LAYERS);
    assert_int_equal(fixture_put(s, "acme", &lossy), 0);
    fixture_block_demoted(&lossy, "l1", &demoted[0]);
    assert_int_equal(put_demoted(s, &demoted[0], &done), -TD_ERR_AGAIN); /* not what it was made of */
    assert_int_equal(put_demoted(s, &demoted[1], &done), 0);
    assert_int_equal(store_put(s, "acme", &blocks[1].block, NULL, NULL), 0); /* better than what waits */
    assert_int_equal(put_demoted(s, &demoted[2], &done), 0);
    assert_int_equal(store_delete(s, "acme", &blocks[2].id, NULL, NULL), 0);
    store_flush(s);
    assert_int_equal(done.calls, 2);
    for (int life = 0; life < 2; life++) {
        assert_true(fixture_block_reads(s, "acme", &blocks[1]));
        assert_false(fixture_block_reads(s, "acme", &blocks[2]));
        assert_true(fixture_block_reads(s, "acme", &blocks[3]));
        fixture_counts_are_true(s);
        store_close(s);
        s = fixture_open(&c);
    }
    store_close(s);
    fixture_remove(dir);
}

/* As dropping its segment for want of room does, while the smaller copy waits. */
static void lose_place(struct store *s, const struct fixture_block *f)
{
    struct table_shard *shard = table_lock(&s->blocks, f->id.bytes);
    struct entry *e = table_find(&s->blocks, shard, keys_find(s->keys, "acme"), f->id.bytes);
    assert_non_null(e);
    assert_false(entry_clear_place(s, e)); /* a put is pending */
    table_unlock(shard);
}

static void what_has_gone_does_not_come_back(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct fixture_done done = {0, 1};
    struct store_stats stats;
    c.commit_interval_ms = 1000000; /* until a flush */
    struct store *s = fixture_open(&c);
    put_chain(s, "acme", 2);
    assert_int_equal(put_demoted(s, &demoted[0], &done), 0);
    assert_int_equal(put_demoted(s, &demoted[1], &done), 0);
    lose_place(s, &blocks[1]);
    store_flush(s);
    assert_int_equal(done.calls, 2);
    store_stats(s, &stats);
    assert_int_equal(stats.demotions, 1);
    assert_true(fixture_block_reads(s, "acme", &demoted[0]));
    assert_false(fixture_block_reads(s, "acme", &demoted[1]));
    assert_false(fixture_block_reads(s, "acme", &blocks[1]));
    fixture_counts_are_true(s);
    store_close(s);
    fixture_remove(dir);
}

/* An I/O layer that calls `on_read` at the next read, and `on_sync` at the next fsync. */
static struct io watched;
static struct store *watched_store;
static _Atomic(void (*)(struct store *)) on_read, on_sync;
static atomic_bool refuse_writes;

static int64_t watched_pread(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    (void)io;
    void (*call)(struct store *) = atomic_exchange(&on_read, NULL);
    if (call)
        call(watched_store);
    return io_posix.pread(&io_posix, fd, data, size, offset);
}

static int64_t watched_pwrite(struct io *io, int fd, const void *data, size_t size, uint64_t offset)
{
    (void)io;
    return atomic_load(&refuse_writes) ? -EIO : io_posix.pwrite(&io_posix, fd, data, size, offset);
}

static int watched_fsync(struct io *io, int fd)
{
    (void)io;
    void (*call)(struct store *) = atomic_exchange(&on_sync, NULL);
    if (call)
        call(watched_store);
    return io_posix.fsync(&io_posix, fd);
}

static struct store *open_watched(const struct store_config *c)
{
    watched = io_posix;
    watched.pread = watched_pread;
    watched.pwrite = watched_pwrite;
    watched.fsync = watched_fsync;
    assert_int_equal(store_open_with(c, &(struct store_env){.io = &watched}, &watched_store, NULL), 0);
    return watched_store;
}

static void lose_first(struct store *s)
{
    lose_place(s, &blocks[0]);
}

/* By then nothing but a reader that finds its record damaged takes a block away, and the copy was made of a sound one. */
static void a_copy_outlives_the_record_that_it_was_made_of(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct fixture_done done = {0, 1};
    struct store_stats stats;
    uint64_t records;
    c.commit_interval_ms = 1000000; /* until a flush */
    struct store *s = open_watched(&c);
    put_chain(s, "acme", 2);
    assert_int_equal(put_demoted(s, &demoted[0], &done), 0);
    assert_int_equal(put_demoted(s, &demoted[1], &done), 0);
    atomic_store(&on_sync, lose_first);
    store_flush(s);
    assert_null(atomic_load(&on_sync));
    assert_int_equal(done.calls, 2);
    assert_int_equal(done.status, 0);
    store_stats(s, &stats);
    assert_int_equal(stats.demotions, 2);
    assert_int_equal(stats.blocks, 2);
    for (int life = 0; life < 2; life++) {
        assert_true(fixture_block_reads(s, "acme", &demoted[0]));
        assert_true(fixture_block_reads(s, "acme", &demoted[1]));
        store_close(s);
        assert_int_equal(store_rebuild(&c, NULL, NULL, &records, NULL), 0);
        s = fixture_open(&c);
    }
    store_close(s);
    fixture_remove(dir);
}

static void a_damaged_record_is_a_miss(void **state)
{
    (void)state;
    char *dir = fixture_directory(), path[300];
    struct store_config c = fixture_config(dir);
    struct store_stats stats;
    uint8_t byte = 0;
    c.demotion = fixture_demotion("acme");
    struct store *s = fixture_open(&c);
    put_chain(s, "acme", 2);
    snprintf(path, sizeof path, "%s/seg-%016x.td", dir, 1);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    const off_t at = RECORD_PAGE + RECORD_PAGE + 100; /* in the first record's body */
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
    assert_int_equal(collect(s, "acme", 2), 1);
    assert_false(fixture_block_reads(s, "acme", &demoted[0]));
    store_stats(s, &stats);
    assert_int_equal(stats.damaged, 1);
    assert_int_equal(stats.read_failures, 1); /* that it is not there any more is none */
    assert_true(fixture_block_reads(s, "acme", &demoted[1]));
    fixture_counts_are_true(s);
    store_close(s);
    fixture_remove(dir);
}

static void add_waiting(struct store *s, size_t size)
{
    pthread_mutex_lock(&s->queue.lock);
    s->queue.size += size;
    pthread_mutex_unlock(&s->queue.lock);
}

/* More waits for the writer than may: the block stays as it is, and is demoted when there is room again. */
static void a_writer_that_is_behind_is_come_back_to(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    uint64_t gone, freed;
    struct store_stats stats;
    c.demotion = fixture_demotion("acme");
    struct store *s = fixture_open(&c);
    put_chain(s, "acme", 1);
    store_stats(s, &stats);
    assert_int_equal(store_set_tenant(s, "acme", stats.block_bytes, 0), 0); /* near it, not over it */
    add_waiting(s, STORE_QUEUE_SIZE);
    assert_int_equal(store_gc(s, NULL, NULL, &gone, &freed, NULL), 0);
    store_stats(s, &stats);
    add_waiting(s, -(size_t)STORE_QUEUE_SIZE);
    assert_int_equal(stats.demotions, 0);
    assert_true(fixture_block_reads(s, "acme", &blocks[0]));
    for (int tries = 0; tries < 6000 && stats.demotions == 0; tries++) { /* not at once */
        usleep(10000);
        assert_int_equal(store_gc(s, NULL, NULL, &gone, &freed, NULL), 0);
        store_stats(s, &stats);
    }
    assert_int_equal(stats.demotions, 1);
    assert_true(fixture_block_reads(s, "acme", &demoted[0]));
    store_close(s);
    fixture_remove(dir);
}

static struct store_op other; /* a put by somebody else */

static void writing_fails(struct store *s)
{
    s->write_retry_us = UINT64_MAX;
    s->write_error = -TD_ERR_IO;
}

static void disk_is_full(struct store *s)
{
    s->write_retry_us = UINT64_MAX;
    s->write_error = -TD_ERR_DISKFULL;
}

static void writes_are_refused(struct store *s)
{
    (void)s;
    atomic_store(&refuse_writes, true);
}

static void replace(struct store *s)
{
    struct table_shard *shard = table_lock(&s->blocks, blocks[0].id.bytes);
    struct entry *e = table_find(&s->blocks, shard, keys_find(s->keys, "acme"), blocks[0].id.bytes);
    assert_null(e->pending);
    e->pending = &other;
    table_unlock(shard);
}

static void recover_from(struct store *s)
{
    atomic_store(&refuse_writes, false);
    s->write_error = 0;
    struct table_shard *shard = table_lock(&s->blocks, blocks[0].id.bytes);
    struct entry *e = table_find(&s->blocks, shard, keys_find(s->keys, "acme"), blocks[0].id.bytes);
    e->pending = NULL;
    table_unlock(shard);
}

/* Between the read of a block and the put of its copy, or its append, writing begins to fail, or the block is put anew: it stays as it is, and is demoted when that is over. */
static void troubles_of_the_moment_are_come_back_to(void **state)
{
    (void)state;
    static void (*const troubles[])(struct store *) = {writing_fails, disk_is_full, writes_are_refused,
                                                       replace};
    for (size_t i = 0; i < TD_COUNT(troubles); i++) {
        char *dir = fixture_directory();
        struct store_config c = fixture_config(dir);
        struct store_stats stats;
        c.demotion = fixture_demotion("acme");
        struct store *s = open_watched(&c);
        put_chain(s, "acme", 1);
        store_stats(s, &stats);
        assert_int_equal(store_set_tenant(s, "acme", stats.block_bytes, 0), 0); /* near it, not over it */
        atomic_store(&on_read, troubles[i]);
        demote_all(s); /* fails where writes do */
        assert_null(atomic_load(&on_read));
        store_stats(s, &stats);
        recover_from(s);
        assert_int_equal(stats.demotions, 0);
        assert_true(fixture_block_reads(s, "acme", &blocks[0]));
        for (int tries = 0; tries < 6000 && stats.demotions == 0; tries++) { /* not at once */
            usleep(10000);
            assert_int_equal(demote_all(s), 0);
            store_stats(s, &stats);
        }
        assert_int_equal(stats.demotions, 1);
        assert_true(fixture_block_reads(s, "acme", &demoted[0]));
        store_close(s);
        fixture_remove(dir);
    }
}

enum { STREAM = 200000 }; /* half a minute and more: who waits for its end is found out */

static struct io slow;

static int64_t slow_pread(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    (void)io;
    usleep(2000);
    return io_posix.pread(&io_posix, fd, data, size, offset);
}

struct stream { /* blocks that come lossless again as soon as they are demoted */
    struct store *store;
    atomic_bool stop;
    int rounds;
};

static void *put_again(void *arg)
{
    struct stream *w = arg;
    for (; w->rounds < STREAM && !atomic_load(&w->stop); w->rounds++) {
        for (int i = 0; i < BLOCKS; i++)
            store_put(w->store, "acme", &blocks[i].block, NULL, NULL);
        usleep(100);
    }
    return NULL;
}

static void collecting_ends_while_blocks_come(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store_stats stats;
    pthread_t thread;
    struct store *s;
    c.demotion = fixture_demotion("acme");
    slow = io_posix;
    slow.pread = slow_pread; /* demotion is always behind */
    assert_int_equal(store_open_with(&c, &(struct store_env){.io = &slow}, &s, NULL), 0);
    put_chain(s, "acme", BLOCKS);
    store_stats(s, &stats);
    assert_int_equal(store_set_tenant(s, "acme", stats.block_bytes / 2, 0), 0);
    struct stream stream = {.store = s};
    assert_int_equal(pthread_create(&thread, NULL, put_again, &stream), 0);
    assert_int_equal(demote_all(s), 0);
    atomic_store(&stream.stop, true);
    pthread_join(thread, NULL);
    assert_true(stream.rounds < STREAM);
    store_stats(s, &stats);
    assert_true(stats.demotions > 0);
    store_close(s);
    fixture_remove(dir);
}

/* ---- room --------------------------------------------------------------------------------------------------- */

enum { CHAIN = 40, WIDE = 64 };

/* Larger than other tests' blocks, whose heads would be a third of what they take. */
static void put_wide(struct store *s, uint64_t seed, const struct kv_block_id *parent, struct kv_block_id *id)
{
    static const struct kv_shape shape = {FIXTURE_LAYERS, 2, WIDE};
    static uint8_t bytes[2 * FIXTURE_LAYERS][KV_PIECE_HEAD_SIZE + 2 * 64 * 2 * WIDE];
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&shape);
    struct span pieces[2 * FIXTURE_LAYERS];
    static uint16_t values[64 * 2 * WIDE];
    for (int i = 0; i < 64 * 2 * WIDE; i++)
        values[i] = (uint16_t)(0x3000 + (seed * 31 + (uint64_t)i * 7) % 0x800);
    for (int i = 0; i < 2 * FIXTURE_LAYERS; i++) {
        struct kv_piece_head h = {.codec = KV_RAW,
                                  .is_value = (uint8_t)(i % 2),
                                  .quality = quality_exact,
                                  .block_index = (uint32_t)seed,
                                  .token_count = 64,
                                  .layer = (uint16_t)(i / 2),
                                  .kv_head_count = 2,
                                  .head_dim = WIDE};
        int64_t size = kv_piece_encode(scratch, &h, values, bytes[i], sizeof bytes[i]);
        assert_int_equal(size, sizeof bytes[i]);
        pieces[i] = (struct span){bytes[i], sizeof bytes[i]};
    }
    kv_codec_scratch_destroy(scratch);
    fixture_id(seed, id);
    struct store_block block = {.id = *id,
                                .parent = *parent,
                                .quality = quality_exact,
                                .block_index = (uint32_t)seed,
                                .layer_end = FIXTURE_LAYERS,
                                .pieces = pieces};
    store_put(s, "acme", &block, NULL, NULL);
    store_flush(s);
}

/* How much of a chain is held by a disk that has room for half of it. */
static int leading_run(bool demotes, uint64_t *demotions)
{
    char *dir = fixture_directory();
    struct store_demotion *demotion = fixture_demotion("acme");
    struct store_config c = fixture_config(dir);
    struct store_stats stats;
    struct kv_block_id parent = {{0}}, ids[CHAIN];
    demotion->shape.head_dim = WIDE;
    c.segment_size = 512 << 10;
    c.limit_size = 20 * 104 << 10;
    if (demotes)
        c.demotion = demotion;
    struct store *s = fixture_open(&c);
    for (int i = 0; i < CHAIN; i++) {
        put_wide(s, 500 + (uint64_t)i, &parent, &ids[i]);
        parent = ids[i];
        for (int still = 0, wait = 0; still < 2 && wait < 600000;
             wait++) { /* as if blocks took time to compute */
            usleep(100);
            store_flush(s); /* the first may end before the writer has looked what else there is to do */
            still = demote_is_busy(s) ? 0 : still + 1;
        }
    }
    int run = 0;
    struct store_block_info info;
    while (run < CHAIN && store_find(s, "acme", &ids[run], &info) == 0)
        run++;
    store_stats(s, &stats);
    assert_true(stats.segment_bytes <= c.limit_size);
    *demotions = stats.demotions;
    store_close(s);
    fixture_remove(dir);
    return run;
}

static void a_full_disk_holds_more(void **state)
{
    (void)state;
    uint64_t demotions;
    int without = leading_run(false, &demotions);
    assert_int_equal(demotions, 0);
    int with = leading_run(true, &demotions);
    assert_true(demotions > 0);
    assert_true(without > 5);
    assert_true(with * 4 >= without * 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nobodys_blocks_are_demoted_unasked),
        cmocka_unit_test(a_demoted_block_says_so_and_is_what_the_codec_gives),
        cmocka_unit_test(what_may_not_be_demoted_stays_as_it_is),
        cmocka_unit_test(levels_and_exceptions_are_by_tenant),
        cmocka_unit_test(a_better_copy_replaces_it_and_never_the_reverse),
        cmocka_unit_test(what_came_meanwhile_wins),
        cmocka_unit_test(what_has_gone_does_not_come_back),
        cmocka_unit_test(a_copy_outlives_the_record_that_it_was_made_of),
        cmocka_unit_test(a_damaged_record_is_a_miss),
        cmocka_unit_test(a_writer_that_is_behind_is_come_back_to),
        cmocka_unit_test(troubles_of_the_moment_are_come_back_to),
        cmocka_unit_test(collecting_ends_while_blocks_come),
        cmocka_unit_test(a_full_disk_holds_more),
    };
    log_set_level((enum log_level)(LOG_ERROR + 1)); /* damage is the point here */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
