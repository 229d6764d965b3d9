/* Segments that are rewritten, or go by themselves, where room is short: what that costs others, and what it leaves behind when it fails. */
#include "machine.h"
#include "shared/log.h"
#include <sqlite3.h>

enum { A_SEGMENT = 6 }; /* blocks that fill one */

struct rewriting {
    struct store_task task; /* first */
    uint64_t segment_id;
};

static int rewrite(struct store *s, struct store_task *task)
{
    struct segment *v = segment_find(&s->segments, ((struct rewriting *)task)->segment_id);
    return v ? space_rewrite(s, v) : -TD_ERR_NOTFOUND;
}

static int rewrite_segment(struct store *s, uint64_t id)
{
    struct rewriting r = {{.run = rewrite}, id};
    return store_run_task(s, &r.task);
}

static int keep_house(struct store *s, struct store_task *task)
{
    (void)task;
    space_housekeeping(s);
    return 0;
}

static void delete_block(struct store *s, uint64_t i)
{
    struct kv_block_id id;
    fixture_id(i, &id);
    assert_int_equal(store_delete(s, "acme", &id, NULL, NULL), 0);
    store_flush(s);
}

/* The index says of the second segment, in which nothing lives, that no tombstone is in it either. */
static void hide_tombstones(struct machine *m)
{
    char path[512];
    sqlite3 *db;
    snprintf(path, sizeof path, "%s/" INDEX_FILE, m->index_directory);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "UPDATE segments SET tombstones=0 WHERE id=2", NULL, NULL, NULL),
                     SQLITE_OK);
    assert_int_equal(sqlite3_changes(db), 1);
    sqlite3_close(db);
}

/* Its tombstones are found and copied, also where the store is full: no block goes for them. */
static void test_housekeeping_costs_no_block(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    struct store_task task = {.run = keep_house};
    m->segments_only = true;
    m->sim.survival = SURVIVE_NONE; /* voids are lost: tombstones are all that says what is deleted */
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(put_many(s, 0, A_SEGMENT + 2), A_SEGMENT + 2);
    delete_block(s, 0);
    assert_int_equal(put_many(s, 10, A_SEGMENT), A_SEGMENT);
    delete_block(s, A_SEGMENT);
    delete_block(s, A_SEGMENT + 1);
    for (uint64_t i = 10; segment_find(&s->segments, 2)->live_count > 0; i++)
        delete_block(s, i);
    assert_int_equal(segment_find(&s->segments, 2)->tombstone_count, 1);
    store_close(s);
    sim_process_death(&m->sim);
    hide_tombstones(m);
    m->limit_size = 1; /* full, whatever it takes */
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(store_run_task(s, &task), 0);
    assert_null(segment_find(&s->segments, 2));
    assert_true(is_there(s, 1));
    store_close(s);
    sim_power_loss(&m->sim);
    index_set_aside(m->index_directory, false);
    m->limit_size = 0;
    assert_int_equal(open_machine(m, &s), 0);
    assert_false(is_there(s, 0));
    assert_true(is_there(s, 1));
    store_close(s);
    machine_destroy(m);
}

/* Each try that finds no room for all copies gives back what the copies took; else the disk would be full for good. */
static void test_a_rewriting_that_fails_leaves_room(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    int tries = 1, rc;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(put_many(s, 0, A_SEGMENT + 1), A_SEGMENT + 1);
    uint64_t used = segments_size(&s->segments), block = s->segments.list[1]->live_size;
    set_capacity(m, sim_used(&m->sim) + 3 * block);
    for (; tries < A_SEGMENT && (rc = rewrite_segment(s, 1)) < 0; tries++) {
        assert_int_equal(rc, -TD_ERR_DISKFULL);
        assert_true(segments_size(&s->segments) <= used + A_SEGMENT * RECORD_PAGE); /* heads of voids */
    }
    assert_in_range(tries, 2, A_SEGMENT - 1);
    assert_int_equal(rc, 0);
    for (uint64_t i = 0; i <= A_SEGMENT; i++)
        assert_true(is_there(s, i));
    store_close(s);
    machine_destroy(m);
}

/* ---- a copy of no use ----------------------------------------------------------------------------------------- */

static struct store *losing; /* at the next sync, as a reader does who finds the block damaged */
static int (*sim_fsync)(struct io *io, int fd);

static int fsync_loses(struct io *io, int fd)
{
    struct store *s = losing;
    struct kv_block_id id;
    losing = NULL;
    if (s) {
        fixture_id(0, &id);
        struct table_shard *shard = table_lock(&s->blocks, id.bytes);
        const struct entry *e = table_find(&s->blocks, shard, keys_find(s->keys, "acme"), id.bytes);
        struct record_place place = {e->segment_id, e->offset, e->stored_size};
        table_unlock(shard);
        read_drop_damaged(s, RECORD_BLOCK, keys_find(s->keys, "acme"), id.bytes, &place);
    }
    return sim_fsync(io, fd);
}

static void power_off(void *ctx, const char *name)
{
    struct machine *m = ctx;
    (void)name;
    m->sim.off = true;
    copy_index(m, INDEX_FILE, "then");
}

/* Nothing in the log says of the copy that it is of no use but its void: where the power goes before that is written, and behind what the index was
 * told, the index would look false. */
static void test_copies_of_no_use_are_void_before_the_index_hears(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    m->sim.survival = SURVIVE_NONE;
    sim_fsync = m->sim.io.fsync;
    m->sim.io.fsync = fsync_loses;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(put_many(s, 0, A_SEGMENT + 1), A_SEGMENT + 1);
    pthread_mutex_lock(&m->sim.lock);
    losing = s;
    m->sim.unlink_ctx = m;
    m->sim.before_unlink = power_off;
    pthread_mutex_unlock(&m->sim.lock);
    assert_true(rewrite_segment(s, 1) < 0);
    assert_null(losing);
    assert_true(m->sim.off);
    store_close(s);
    m->sim.before_unlink = NULL;
    sim_power_loss(&m->sim);
    copy_index(m, "then", INDEX_FILE);
    assert_int_equal(open_machine(m, &s), 0);
    for (uint64_t id = 2; id <= 3; id++) /* with the copies, before there are others */
        rewrite_segment(s, id);
    store_close(s);
    assert_true(model_index_is_true(m->index_directory));
    machine_destroy(m);
}

/* ---- no room for copies --------------------------------------------------------------------------------------- */

/* A quota, of which the disk's figures tell nothing: a segment is worth rewriting, and its copies do not fit. Then the end of a chain goes by the
 * policy, not the segment with its beginning. */
static void test_eviction_where_copies_do_not_fit(void **state)
{
    (void)state;
    enum { CHAIN = 12 };
    struct machine *m = machine_create(1);
    struct store *s;
    struct kv_block_id parent = {{0}};
    static struct fixture_block chain[CHAIN];
    m->sim.is_quota = true;
    m->ballast_size = 64 << 20; /* never has room */
    set_capacity(m, 1 << 20);
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(put_many(s, 100, A_SEGMENT - 1), A_SEGMENT - 1);
    for (int i = 0; i < CHAIN; i++) {
        fixture_block_make(&chain[i], (uint64_t)i);
        chain[i].block.parent = parent;
        parent = chain[i].id;
        if (i == CHAIN - 1) { /* for which there is no room */
            for (uint64_t other = 100; other < 100 + A_SEGMENT - 1; other++)
                delete_block(s, other);
            store_flush(s); /* all are void */
            assert_int_equal(segment_find(&s->segments, 1)->live_count, 1);
            set_capacity(m, sim_used(&m->sim) + 3 * RECORD_PAGE);
        }
        fixture_put(s, "acme", &chain[i]);
    }
    assert_true(fixture_block_reads(s, "acme", &chain[0]));
    assert_false(fixture_block_reads(s, "acme", &chain[CHAIN - 2]));
    assert_non_null(segment_find(&s->segments, 1));
    store_close(s);
    machine_destroy(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_housekeeping_costs_no_block),
        cmocka_unit_test(test_a_rewriting_that_fails_leaves_room),
        cmocka_unit_test(test_copies_of_no_use_are_void_before_the_index_hears),
        cmocka_unit_test(test_eviction_where_copies_do_not_fit),
    };
    log_set_level(getenv("TANDEM_FAULT_LOG") ? LOG_INFO : (enum log_level)(LOG_ERROR + 1));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
