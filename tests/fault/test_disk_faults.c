/* Disks that fail: every kind of operation fails once, at each position in turn, or for a while, or for good. The store must go on, tell the truth
 * about what is durable (model.h), never show wrong bytes, and after the trouble work as before. */
#include "machine.h"
#include "shared/log.h"
#include <errno.h>

enum { STEPS = 40, POSITIONS_MAX = 60 };

static void try_to_compact(struct store *s)
{
    uint64_t freed;
    store_compact(s, 0, NULL, NULL, &freed, NULL);
}

/* One life with a fault in it, then a power loss and a life without: everything acknowledged must be there. */
static void live_with_fault(enum sim_kind kind, uint64_t position, uint64_t length, int error,
                            bool reads_fail)
{
    struct machine *m = machine_create(position + 1000u * kind);
    struct store *s;
    m->direct_size = position % 2 ? 1 : UINT64_MAX;
    assert_int_equal(open_machine(m, &s), 0);
    for (int i = 0; i < STEPS; i++) /* something to find again */
        model_step(&m->model, s, &m->sim);
    store_flush(s);
    store_close(s);
    sim_process_death(&m->sim);

    no_faults(m);
    m->model.blocks_may_go = error == ENOSPC; /* a disk that is full makes room by eviction */
    m->sim.fail_at[kind] = position;
    m->sim.fail_for[kind] = length;
    m->sim.fail_errno = error;
    if (open_machine(m, &s) == 0) {
        model_index_is_true(m->index_directory); /* one that could not be checked may have been set aside */
        for (int i = 0; i < STEPS; i++)
            model_step(&m->model, s, &m->sim);
        store_flush(s);
        no_faults(m);
        if (!reads_fail) { /* the trouble is over and everything acknowledged is still readable */
            store_flush(s);
            model_check(&m->model, s, NULL);
            assert_sound(m, "after the fault", position);
        }
        for (int i = 0; i < STEPS; i++)
            model_step(&m->model, s, &m->sim);
        store_close(s);
    }
    assert_true(model_index_is_true(m->index_directory));
    no_faults(m);
    sim_power_loss(&m->sim);
    assert_int_equal(open_machine(m, &s), 0);
    model_index_is_true(m->index_directory);
    model_check(&m->model, s, NULL);
    assert_sound(m, "after the power loss", position);
    try_to_compact(s);
    model_check(&m->model, s, NULL);
    assert_sound(m, "after the compaction", position);
    store_close(s);
    assert_true(model_index_is_true(m->index_directory)); /* no fault makes an index false */
    machine_destroy(m);
}

static void fail_everywhere(enum sim_kind kind, int error, bool reads_fail)
{
    for (uint64_t position = 1; position <= POSITIONS_MAX; position += 1 + position / 8) {
        live_with_fault(kind, position, 1, error, reads_fail);
        live_with_fault(kind, position, 5, error, reads_fail);
    }
}

static void test_failing_writes(void **state)
{
    (void)state;
    fail_everywhere(SIM_WRITE, EIO, false);
    fail_everywhere(SIM_WRITE, ENOSPC, false);
}

static void test_failing_segment_syncs(void **state)
{
    (void)state;
    fail_everywhere(SIM_SYNC_SEGMENT, EIO, false);
    fail_everywhere(SIM_SYNC_SEGMENT, ENOSPC, false);
}

static void test_failing_directory_syncs(void **state)
{
    (void)state;
    fail_everywhere(SIM_SYNC_DIRECTORY, EIO, false);
}

static void test_failing_opens(void **state)
{
    (void)state;
    fail_everywhere(SIM_OPEN, EMFILE, true);
}

static void test_failing_reads(void **state)
{
    (void)state;
    fail_everywhere(SIM_READ, EIO, true);
}

static void test_failing_truncates_and_unlinks(void **state)
{
    (void)state;
    fail_everywhere(SIM_TRUNCATE, EIO, false);
    fail_everywhere(SIM_UNLINK, EIO, false);
}

static void test_a_failed_sync_is_not_trusted_again(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_put(s, "acme", &m->model.content[0]), 0);
    fail_next(m, SIM_SYNC_SEGMENT, 1);
    assert_int_equal(fixture_put(s, "acme", &m->model.content[1]),
                     0); /* written again, elsewhere, and synced there */
    struct store_stats stats;
    store_stats(s, &stats);
    assert_int_equal(stats.segments, 2);
    assert_false(stats.writes_off);
    assert_int_equal(stats.segment_bytes + (64 << 10) + 388,
                     sim_used(&m->sim)); /* ballast, keys.td: the failed part was cut off */
    store_close(s);
    sim_power_loss(&m->sim);
    no_faults(m);
    assert_int_equal(open_machine(m, &s), 0);
    assert_true(fixture_block_reads(s, "acme", &m->model.content[0]));
    assert_true(fixture_block_reads(s, "acme", &m->model.content[1]));
    store_close(s);
    machine_destroy(m);
}

static void test_a_dead_disk_turns_writes_off_and_reading_goes_on(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    struct store_stats stats;
    struct store_block_info info;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_put(s, "acme", &m->model.content[0]), 0);
    fail_next(m, SIM_SYNC_SEGMENT, 1000);
    assert_int_equal(fixture_put(s, "acme", &m->model.content[1]), -TD_ERR_IO);
    store_stats(s, &stats);
    assert_true(stats.writes_off);
    assert_int_equal(store_find(s, "acme", &m->model.content[1].id, &info),
                     -TD_ERR_NOTFOUND); /* a failed write is not visible */
    assert_int_equal(store_put(s, "acme", &m->model.content[2].block, NULL, NULL),
                     -TD_ERR_IO); /* refused at once */
    assert_true(fixture_block_reads(s, "acme", &m->model.content[0]));
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "text"), -TD_ERR_IO);
    no_faults(m);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "text"),
                     0); /* conversations always try: it is over */
    store_stats(s, &stats);
    assert_false(stats.writes_off);
    assert_int_equal(fixture_put(s, "acme", &m->model.content[1]), 0);
    store_close(s);
    machine_destroy(m);
}

/* ---- reading ---------------------------------------------------------------------------------------------- */

static void test_an_unreadable_conversation_is_an_error_and_stays(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    uint64_t version;
    uint8_t *body;
    size_t size;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "text"), 0);
    fail_next(m, SIM_READ, 1);
    assert_int_equal(store_conv_get(s, "acme", "ann", "c", &version, &body, &size), -TD_ERR_IO);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "new"),
                     -TD_ERR_CONFLICT); /* its place is not free */
    char *text = fixture_conv_get(s, "acme", "ann", "c", &version);
    assert_string_equal(text, "text");
    free(text);
    store_close(s);
    machine_destroy(m);
}

static void test_an_unreadable_block_is_a_miss_and_its_segment_stays(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    struct store_block_info info;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_put(s, "acme", &m->model.content[0]), 0);
    store_close(s);
    sim_process_death(&m->sim);
    assert_int_equal(open_machine(m, &s), 0);
    fail_next(m, SIM_READ, 1);
    assert_false(fixture_block_reads(s, "acme", &m->model.content[0]));
    assert_int_equal(store_find(s, "acme", &m->model.content[0].id, &info),
                     -TD_ERR_NOTFOUND); /* can be put again */
    store_flush(s);
    store_flush(s); /* housekeeping sees a segment in which nothing lives */
    store_close(s);
    sim_process_death(&m->sim);
    assert_int_equal(open_machine(m, &s), 0);
    assert_true(fixture_block_reads(s, "acme", &m->model.content[0]));
    store_close(s);
    machine_destroy(m);
}

/* A disk that hangs: the queue fills up to its limit, puts answer at once, and what was accepted is written when it goes on. */
static void test_a_full_queue(void **state)
{
    (void)state;
    enum { BODY = 8 << 20, FIT = STORE_QUEUE_SIZE / BODY };
    struct machine *m = machine_create(1);
    struct store *s;
    struct fixture_done done = {0, 1};
    char *body = calloc(1, BODY), id[16];
    struct fixture_block block;
    int accepted = 0, rc = 0;
    fixture_block_make(&block, 1);
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "first", 0, "x"), 0);
    pthread_mutex_lock(&m->sim.lock);
    for (int i = 0; i <= FIT && rc == 0; i++) {
        snprintf(id, sizeof id, "c%d", i);
        rc = store_conv_put(s, "acme", "ann", id, 0, body, BODY, fixture_on_done, &done);
        accepted += rc == 0;
        if (accepted == FIT - (int)(STORE_QUEUE_KEPT / BODY)) /* the rest is not for blocks */
            assert_int_equal(store_put(s, "acme", &block.block, NULL, NULL), -TD_ERR_FULL);
    }
    assert_int_equal(rc, -TD_ERR_FULL);
    assert_in_range(accepted, FIT - 2, FIT);
    uint64_t version;
    assert_null(fixture_conv_get(s, "acme", "ann", id, &version)); /* the refused one left nothing behind */
    pthread_mutex_unlock(&m->sim.lock);
    store_flush(s);
    assert_int_equal(done.calls, accepted);
    assert_int_equal(done.status, 0);
    assert_int_equal(store_conv_put(s, "acme", "ann", id, 0, body, BODY, NULL, NULL), 0);
    store_close(s);
    free(body);
    machine_destroy(m);
}

/* ---- eviction that fails ---------------------------------------------------------------------------------- */

static uint64_t let_go(struct store *s)
{
    uint64_t gone = 0, freed;
    store_gc(s, NULL, NULL, &gone, &freed, NULL);
    return gone;
}

/* A quota that is over, and no tombstone can be written: once the disk is well, what is over goes, in this life. */
static void test_what_could_not_be_evicted_goes_later(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    struct fixture_block f[4];
    assert_int_equal(open_machine(m, &s), 0);
    for (int i = 0; i < 4; i++) {
        fixture_block_make(&f[i], 10 + (uint64_t)i);
        assert_int_equal(fixture_put(s, "acme", &f[i]), 0);
    }
    assert_int_equal(store_pin(s, "acme", &f[0].id, true, NULL), 0);
    assert_int_equal(store_set_tenant(s, "acme", 1, 0), 0);
    fail_next(m, SIM_WRITE, 1000);
    assert_int_equal(let_go(s), 0);
    no_faults(m);
    assert_int_equal(let_go(s), 3);
    assert_true(fixture_block_reads(s, "acme", &f[0])); /* pinned, before and after */
    for (int i = 1; i < 4; i++)
        assert_false(fixture_block_reads(s, "acme", &f[i]));
    store_close(s);
    machine_destroy(m);
}

/* Pins of many blocks are waited for together, and one that could not be written is told. */
static void test_pins_that_cannot_be_written_are_told(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    struct td_error err = {0};
    struct kv_block_id ids[3];
    assert_int_equal(open_machine(m, &s), 0);
    for (int i = 0; i < 3; i++) {
        ids[i] = m->model.content[i].id;
        assert_int_equal(fixture_put(s, "acme", &m->model.content[i]), 0);
    }
    fail_next(m, SIM_WRITE, 1000);
    assert_int_equal(store_pin_held(s, "acme", ids, 3, true, &err), -TD_ERR_IO);
    assert_non_null(strstr(err.text, "cannot pin"));
    no_faults(m);
    assert_int_equal(store_pin_count(s), 0);
    assert_int_equal(store_pin_held(s, "acme", ids, 3, true, &err), 0);
    assert_int_equal(store_pin_count(s), 3);
    store_close(s);
    machine_destroy(m);
}

struct replacing {           /* a better copy is put while its block's eviction is due, and the disk fails */
    struct store_task evict; /* first */
    struct machine *machine;

    struct store *store;
    struct fixture_block *better;
};

static int evict_now(struct store *s, struct store_task *task)
{
    size_t count;
    (void)task;
    int rc = evict_blocks(s, 0, &count);
    return rc < 0 ? rc : (int)count;
}

/* On the writer, in a commit: what is put here waits for the next one, and the task runs before that. */
static void replace_and_fail(void *ctx, int status)
{
    struct replacing *r = ctx;
    assert_int_equal(status, 0);
    assert_int_equal(store_put(r->store, "acme", &r->better->block, NULL, NULL), 0);
    fail_next(r->machine, SIM_WRITE, 1000);
    pthread_mutex_lock(&r->store->queue.lock);
    r->evict.next = r->store->tasks;
    r->store->tasks = &r->evict;
    pthread_mutex_unlock(&r->store->queue.lock);
}

static void test_what_was_not_replaced_is_evicted(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    struct fixture_block poor, better, other;
    fixture_block_of(&poor, 1, quality_lossy, 0, FIXTURE_LAYERS);
    fixture_block_make(&better, 1);
    fixture_block_make(&other, 2);
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_put(s, "acme", &poor), 0);
    assert_int_equal(store_set_tenant(s, "acme", 1, 0), 0);
    struct replacing r = {{.run = evict_now, .waiter = STORE_WAITER}, m, s, &better};
    assert_int_equal(store_put(s, "other", &other.block, replace_and_fail, &r), 0);
    store_flush(s);
    assert_int_equal(store_waiter_wait(&r.evict.waiter), 0); /* it is spared while a better copy is to come */
    store_flush(s);
    no_faults(m);
    assert_true(fixture_block_reads(s, "acme", &poor)); /* neither replaced nor evicted */
    assert_int_equal(let_go(s), 1);
    assert_false(fixture_block_reads(s, "acme", &poor));
    store_close(s);
    machine_destroy(m);
}

/* A group of blocks for which there is no room at its n-th write, or when its space is asked for: all of it is written one by one, in the order of
 * its operations, where the first of them would have lain. */
static void write_group_without_room(enum sim_kind kind, uint64_t position)
{
    struct machine *m = machine_create(position);
    struct store *s;
    struct store_stats stats;
    struct fixture_done done = {0, 1};
    m->direct_size = 1;
    m->sim.fail_errno = ENOSPC;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_put(s, "acme", &m->model.content[0]), 0);
    fail_next(m, kind, 1);
    m->sim.fail_at[kind] += position - 1;
    for (int i = 1; i <= 3; i++)
        assert_int_equal(store_put(s, "acme", &m->model.content[i].block, fixture_on_done, &done), 0);
    assert_int_equal(store_delete(s, "acme", &m->model.content[2].id, fixture_on_done, &done), 0);
    assert_int_equal(store_put(s, "acme", &m->model.content[4].block, fixture_on_done, &done), 0);
    store_flush(s);
    assert_int_equal(done.calls, 5);
    assert_int_equal(done.status, 0);
    store_stats(s, &stats);
    assert_int_equal(stats.segments, 1); /* a full disk is no reason to give a segment up */
    assert_true(m->sim.counts[kind] >= m->sim.fail_at[kind]);
    for (int life = 0; life < 2; life++) {
        for (int i = 0; i <= 4; i++)
            assert_int_equal(fixture_block_reads(s, "acme", &m->model.content[i]), i != 2);
        store_close(s);
        sim_process_death(&m->sim);
        index_set_aside(m->index_directory, false);
        assert_int_equal(open_machine(m, &s), 0);
    }
    store_close(s);
    machine_destroy(m);
}

static void test_a_group_without_room(void **state)
{
    (void)state;
    write_group_without_room(SIM_TRUNCATE, 1);
    for (uint64_t position = 1; position <= 3; position++)
        write_group_without_room(SIM_WRITE, position);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_failing_writes),
        cmocka_unit_test(test_failing_segment_syncs),
        cmocka_unit_test(test_failing_directory_syncs),
        cmocka_unit_test(test_failing_opens),
        cmocka_unit_test(test_failing_reads),
        cmocka_unit_test(test_failing_truncates_and_unlinks),
        cmocka_unit_test(test_a_failed_sync_is_not_trusted_again),
        cmocka_unit_test(test_a_dead_disk_turns_writes_off_and_reading_goes_on),
        cmocka_unit_test(test_an_unreadable_conversation_is_an_error_and_stays),
        cmocka_unit_test(test_an_unreadable_block_is_a_miss_and_its_segment_stays),
        cmocka_unit_test(test_a_full_queue),
        cmocka_unit_test(test_what_could_not_be_evicted_goes_later),
        cmocka_unit_test(test_pins_that_cannot_be_written_are_told),
        cmocka_unit_test(test_what_was_not_replaced_is_evicted),
        cmocka_unit_test(test_a_group_without_room),
    };
    /* Failing disks are the point here: their log lines only on request. */
    log_set_level(getenv("TANDEM_FAULT_LOG") ? LOG_INFO : (enum log_level)(LOG_ERROR + 1));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
