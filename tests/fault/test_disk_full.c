/* Disks that fill up, and what is let go then: limits, eviction, segments that are dropped or cannot be, tombstones that must live on. */
#include "machine.h"
#include "shared/log.h"
#include <errno.h>

/* ---- space ------------------------------------------------------------------------------------------------ */

static void test_the_limit_holds_by_eviction(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    struct store_stats stats;
    uint64_t version;
    m->limit_size = 1 << 20;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "kept", 0, "an old conversation"), 0);
    for (uint64_t i = 0; i < 200; i += 10) {
        assert_int_equal(put_many(s, 1000 + i, 10), 10);
        store_stats(s, &stats);
        assert_true(stats.segment_bytes <= m->limit_size);
        assert_true(sim_used(&m->sim) <= m->limit_size + (128 << 10)); /* ballast and key file beside it */
    }
    assert_true(stats.blocks >= 30 && stats.blocks < 60);
    for (int i = 0; i < 2; i++) {
        assert_true(is_there(s, 1199)); /* the newest */
        assert_false(is_there(s, 1000));
        char *text = fixture_conv_get(s, "acme", "ann", "kept", &version);
        assert_non_null(text);
        assert_string_equal(text, "an old conversation");
        assert_int_equal(version, 1);
        free(text);
        store_close(s);
        sim_power_loss(&m->sim);
        assert_int_equal(open_machine(m, &s), 0);
    }
    store_close(s);
    assert_null(m->sim.violation);
    machine_destroy(m);
}

static void test_conversations_alone_can_fill_the_limit(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    char text[20001];
    int stored = 0;
    uint64_t version;
    memset(text, 'x', 20000);
    text[20000] = '\0';
    m->limit_size = 600 << 10;
    assert_int_equal(open_machine(m, &s), 0);
    for (int i = 0; i < 60; i++) {
        char id[16];
        snprintf(id, sizeof id, "c%d", i);
        int rc = fixture_conv_put(s, "acme", "ann", id, 0, text);
        assert_true(rc == 0 || rc == -TD_ERR_DISKFULL);
        stored += rc == 0;
    }
    assert_in_range(stored, 15, 30);
    for (int i = 0; i < stored; i++) { /* none of the acknowledged was sacrificed for another */
        char id[16], *body;
        snprintf(id, sizeof id, "c%d", i);
        body = fixture_conv_get(s, "acme", "ann", id, &version);
        assert_non_null(body);
        free(body);
    }
    assert_int_equal(store_conv_delete(s, "acme", "ann", "c0", NULL, NULL),
                     0); /* deleting works on a full store */
    store_flush(s);
    assert_null(fixture_conv_get(s, "acme", "ann", "c0", &version));
    store_close(s);
    machine_destroy(m);
}

/* A turn that does not fit must not be skipped by the next one, which was built on it and would fit. */
static void test_what_builds_on_a_failed_write_fails(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    struct fixture_done large = {0, 1}, small = {0, 1};
    uint64_t version;
    char *body = calloc(1, 400000);
    m->limit_size = 600 << 10;
    assert_int_equal(open_machine(m, &s), 0);
    memset(body, 'x', 300000);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "other", 0, body), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "first"), 0);
    assert_int_equal(store_conv_put(s, "acme", "ann", "c", 1, body, 400000, fixture_on_done, &large), 0);
    assert_int_equal(store_conv_put(s, "acme", "ann", "c", 2, "third", 5, fixture_on_done, &small), 0);
    store_flush(s);
    assert_int_equal(large.status, -TD_ERR_DISKFULL);
    assert_int_equal(small.status, -TD_ERR_CONFLICT);
    char *text = fixture_conv_get(s, "acme", "ann", "c", &version);
    assert_string_equal(text, "first");
    assert_int_equal(version, 1);
    free(text);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 1, "second"), 0);
    store_close(s);
    free(body);
    machine_destroy(m);
}

static void test_a_full_disk(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    struct store_stats stats;
    uint64_t version;
    m->sim.capacity = 3 << 20; /* limit_size is far beyond: the disk itself says no */
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "kept", 0, "text"), 0);
    assert_int_equal(put_many(s, 0, 200), 200); /* eviction makes room all the time */
    store_stats(s, &stats);
    assert_true(stats.blocks > 40 && stats.blocks < 150);
    assert_false(stats.writes_off);

    set_capacity(m, sim_used(&m->sim) / 4); /* now others fill it: no eviction helps for long */
    put_many(s, 300, 3);
    store_stats(s, &stats);
    char *text = fixture_conv_get(s, "acme", "ann", "kept", &version);
    assert_non_null(text);
    free(text);
    set_capacity(m, 0);
    text = NULL;
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "kept", 1, "more"), 0);
    assert_int_equal(put_many(s, 400, 20), 20);
    store_stats(s, &stats);
    assert_false(stats.writes_off);
    store_close(s);
    sim_power_loss(&m->sim);
    assert_int_equal(open_machine(m, &s), 0);
    text = fixture_conv_get(s, "acme", "ann", "kept", &version);
    assert_string_equal(text, "more");
    free(text);
    for (uint64_t i = 400; i < 420; i++)
        assert_true(is_there(s, i));
    store_close(s);
    assert_null(m->sim.violation);
    machine_destroy(m);
}

/* A quota, of which the file system's figures tell nothing: only a write that fails does. */
static void test_a_quota(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    struct store_stats stats;
    uint64_t version;
    m->sim.capacity = 3 << 20;
    m->sim.is_quota = true;
    m->ballast_size = 256 << 10;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "kept", 0, "text"), 0);
    assert_int_equal(put_many(s, 0, 400), 400);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "kept", 1, "more"), 0);
    store_stats(s, &stats);
    assert_true(stats.blocks > 20);
    assert_false(stats.writes_off);
    assert_true(is_there(s, 399));
    store_close(s);
    sim_power_loss(&m->sim);
    assert_int_equal(open_machine(m, &s), 0);
    char *text = fixture_conv_get(s, "acme", "ann", "kept", &version);
    assert_string_equal(text, "more");
    free(text);
    store_close(s);
    assert_null(m->sim.violation);
    machine_destroy(m);
}

/* Others take all room there is, the ballast's too. As long as there are blocks that may go, a turn is kept. */
static void keep_a_turn_on_a_full_disk(int old_count, uint64_t block_count)
{
    struct machine *m = machine_create(1);
    struct store *s;
    struct store_stats stats;
    uint64_t version;
    char id[16], body[20001], *text;
    memset(body, 'x', 20000);
    body[20000] = '\0';
    m->ballast_size = 64 << 20; /* never had room */
    m->sim.capacity = 8 << 20;
    m->sim.survival = SURVIVE_NONE; /* of voids only those that were synced */
    assert_int_equal(open_machine(m, &s), 0);
    for (int i = 0; i < old_count; i++) { /* what must be copied lies in the oldest segments */
        snprintf(id, sizeof id, "old%d", i);
        assert_int_equal(fixture_conv_put(s, "acme", "ann", id, 0, body), 0);
    }
    assert_int_equal(put_many(s, 0, block_count), block_count);
    assert_false(s->ballast_there);
    store_stats(s, &stats);
    assert_int_equal(stats.blocks, block_count);
    set_capacity(m, sim_used(&m->sim));
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "talk", 0, body), 0);
    for (int i = 0; i < old_count; i++) {
        snprintf(id, sizeof id, "old%d", i);
        text = fixture_conv_get(s, "acme", "ann", id, &version);
        assert_string_equal(text, body);
        free(text);
    }
    uint64_t turns = 0;
    int rc = 0;
    for (; rc == 0 && turns < 100; turns += rc == 0) { /* what is let go, others take */
        set_capacity(m, sim_used(&m->sim));
        rc = fixture_conv_put(s, "acme", "ann", "talk", turns + 1, body);
    }
    assert_int_equal(rc, -TD_ERR_DISKFULL);
    store_stats(s, &stats);
    assert_int_equal(stats.blocks, 0);
    store_close(s);
    sim_power_loss(&m->sim);
    set_capacity(m, 0);
    assert_int_equal(open_machine(m, &s), 0);
    text = fixture_conv_get(s, "acme", "ann", "talk", &version);
    assert_string_equal(text, body);
    assert_int_equal(version, turns + 1);
    free(text);
    compact_all(s);
    store_close(s);
    assert_true(model_index_is_true(m->index_directory)); /* what it leaves out is void */
    assert_null(m->sim.violation);
    machine_destroy(m);
}

static void test_a_conversation_is_refused_last(void **state)
{
    (void)state;
    keep_a_turn_on_a_full_disk(5, 100);
    keep_a_turn_on_a_full_disk(5, 20); /* less than the reserve */
    keep_a_turn_on_a_full_disk(1, 3);  /* in one segment, which is the only one */
}

static int void_all(struct store *s, struct store_task *task)
{
    (void)task;
    evict_unburied(s, 1 << 20);
    return 0;
}

/* Blocks that were voided where they lay, without a tombstone: a power loss that took the voids back, and not what the index heard, would make
 * the index look false. */
static void test_lone_voids_are_synced_before_the_index_hears(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    struct store_stats stats;
    struct store_task task = {.run = void_all};
    m->sim.survival = SURVIVE_NONE;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "keeps the segment"), 0);
    assert_int_equal(put_many(s, 0, 3), 3);
    assert_int_equal(store_run_task(s, &task), 0);
    store_stats(s, &stats);
    assert_int_equal(stats.blocks, 0);
    store_close(s);
    for (int life = 0; life < 2; life++) {
        sim_power_loss(&m->sim);
        assert_int_equal(open_machine(m, &s), 0);
        compact_all(s);
        assert_int_equal(put_many(s, 10, 1), 1);
        store_close(s);
        assert_true(model_index_is_true(m->index_directory));
    }
    machine_destroy(m);
}

static void test_the_ballast_comes_back(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    m->sim.capacity = 4 << 20;
    m->ballast_size = 512 << 10;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(put_many(s, 0, 300), 300);
    assert_true(s->ballast_there); /* where blocks can be evicted it is not needed */
    store_close(s);
    m->segments_only = true;
    assert_int_equal(open_machine(m, &s), 0);
    assert_true(s->ballast_there);
    assert_int_equal(put_many(s, 1000, 200), 200);
    assert_int_equal(put_many(s, 200, 1), 1);
    store_close(s);
    sim_process_death(&m->sim);
    assert_int_equal(open_machine(m, &s), 0); /* the disk is full: no room for it now … */
    assert_false(s->ballast_there);
    s->ballast_retry_us =
        0; /* … so when its time comes, a segment goes for it; the writer sleeps while nothing is queued */
    struct store_stats before, after;
    store_stats(s, &before);
    assert_int_equal(put_many(s, 300, 1), 1);
    store_close(s);
    sim_process_death(&m->sim);
    assert_int_equal(open_machine(m, &s), 0);
    assert_true(s->ballast_there);
    store_stats(s, &after);
    assert_true(after.segment_bytes < before.segment_bytes);
    store_close(s);
    machine_destroy(m);
}

/* Where all that the store has would not do for it, nothing goes. */
static void test_a_ballast_that_never_fits(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    struct store_stats stats;
    m->sim.capacity = 16 << 20;
    m->ballast_size = 64 << 20;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(put_many(s, 0, 40), 40);
    for (uint64_t i = 40; i < 43; i++) {
        s->ballast_retry_us = 0; /* the writer sleeps while nothing is queued */
        assert_int_equal(put_many(s, i, 1), 1);
    }
    store_stats(s, &stats);
    assert_int_equal(stats.blocks, 43);
    store_close(s);
    machine_destroy(m);
}

/* An old segment that cannot be dropped makes a younger one go first: tombstones in that one must live on, and must not reach
 * beyond what they were meant for. The disk loses every void, so that what was deleted still stands in the old segment. */
static void test_tombstones_outlive_their_segment(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    m->segments_only = true;
    struct store *s;
    struct fixture_block deleted, again;
    m->limit_size = 1 << 20;
    m->sim.survival = SURVIVE_NONE;
    fixture_block_make(&deleted, 5000);
    fixture_block_make(&again, 5001);
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_put(s, "acme", &deleted), 0);
    assert_int_equal(fixture_put(s, "acme", &again), 0);
    put_many(s, 0, 8); /* into the second segment */
    assert_int_equal(store_delete(s, "acme", &deleted.id, NULL, NULL), 0);
    assert_int_equal(store_delete(s, "acme", &again.id, NULL, NULL), 0);
    segment_suspect(&s->segments, 1);
    put_many(s, 100, 8); /* into the third */
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "text"), 0);
    uint64_t last = 200;
    while (segment_find(&s->segments, 2)) /* until eviction has taken the second */
        assert_int_equal(put_many(s, last++, 1), 1);
    assert_non_null(segment_find(&s->segments, 1));
    store_close(s);
    sim_power_loss(&m->sim);
    index_set_aside(m->index_directory, false);
    m->limit_size = 0;
    assert_int_equal(open_machine(m, &s), 0);
    assert_false(is_there(s, 5000));
    assert_int_equal(fixture_put(s, "acme", &again), 0); /* younger than the copy of its tombstone */
    store_close(s);
    sim_power_loss(&m->sim);
    index_set_aside(m->index_directory, false);
    assert_int_equal(open_machine(m, &s), 0);
    assert_false(is_there(s, 5000));
    assert_true(is_there(s, 5001));
    store_close(s);
    machine_destroy(m);
}

/* The oldest segment cannot be opened in one life: the oldest that is left still has tombstones for what is in that one. */
static void test_tombstones_outlive_a_segment_that_was_not_opened(void **state)
{
    (void)state;
    enum { OPENS_MAX = 12 };
    int missed = 0;
    for (uint64_t position = 1; position <= OPENS_MAX; position++) {
        struct machine *m = machine_create(1);
        struct store *s;
        struct fixture_block deleted;
        fixture_block_make(&deleted, 5000);
        m->segments_only = true;
        m->limit_size = 1 << 20;
        m->sim.survival = SURVIVE_NONE;
        assert_int_equal(open_machine(m, &s), 0);
        assert_int_equal(fixture_put(s, "acme", &deleted), 0);
        put_many(s, 0, 8); /* into the second segment */
        assert_int_equal(store_delete(s, "acme", &deleted.id, NULL, NULL), 0);
        put_many(s, 100, 8);
        store_close(s);
        sim_power_loss(&m->sim);
        index_set_aside(m->index_directory, false);
        fail_next(m, SIM_OPEN, 1);
        m->sim.fail_at[SIM_OPEN] += position - 1;
        if (open_machine(m, &s) == 0) {
            no_faults(m);
            missed += segment_find(&s->segments, 1) == NULL;
            for (uint64_t last = 200; segment_find(&s->segments, 2);
                 last++) /* until eviction has taken the second */
                assert_int_equal(put_many(s, last, 1), 1);
            store_close(s);
        }
        no_faults(m);
        sim_power_loss(&m->sim);
        index_set_aside(m->index_directory, false);
        m->limit_size = 0;
        assert_int_equal(open_machine(m, &s), 0);
        assert_false(is_there(s, 5000));
        store_close(s);
        machine_destroy(m);
    }
    assert_true(missed > 0);
}

/* The same, with the block put again before its tombstone is copied forward past it. */
static void test_a_copied_tombstone_spares_what_is_younger(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    m->segments_only = true;
    struct store *s;
    struct fixture_block again;
    m->limit_size = 1 << 20;
    fixture_block_make(&again, 5001);
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_put(s, "acme", &again), 0);
    put_many(s, 0, 8);
    assert_int_equal(store_delete(s, "acme", &again.id, NULL, NULL), 0);
    segment_suspect(&s->segments, 1);
    put_many(s, 100, 34); /* the second segment is the next to go */
    assert_int_equal(fixture_put(s, "acme", &again), 0);
    uint64_t last = 200;
    while (segment_find(&s->segments, 2))
        assert_int_equal(put_many(s, last++, 1), 1);
    assert_true(is_there(s, 5001));
    store_close(s);
    sim_process_death(&m->sim);
    index_set_aside(m->index_directory, false);
    m->limit_size = 0;
    assert_int_equal(open_machine(m, &s), 0);
    assert_true(is_there(s, 5001));
    store_close(s);
    machine_destroy(m);
}

static void test_nothing_is_dropped_after_a_failed_unlink(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    m->segments_only = true;
    struct store *s;
    struct store_stats before, after;
    m->limit_size = 1 << 20;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(put_many(s, 1000, 1), 1); /* the key file is written now */
    fail_next(m, SIM_UNLINK, 1);
    assert_true(put_many(s, 0, 60) < 60);
    store_stats(s, &before);
    assert_true(before.writes_off);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "text"), -TD_ERR_DISKFULL); /* always tried */
    store_stats(s, &after);
    assert_int_equal(after.segments, before.segments);
    store_close(s);
    sim_power_loss(&m->sim);
    no_faults(m);
    assert_int_equal(open_machine(m, &s), 0); /* a restart clears it up */
    assert_int_equal(put_many(s, 200, 60), 60);
    compact_all(s);
    store_close(s);
    assert_true(model_index_is_true(m->index_directory)); /* the segment that did not go is no riddle */
    machine_destroy(m);
}

struct unlinks {
    struct store *s;
    int count, early;
};

/* What is not yet in the index of copies. That blocks are gone it hears after their segment is: else a crash in between would leave it saying
 * so of records that are there. */
static bool copies_wait(const struct store *s)
{
    bool wait = false;
    for (size_t i = 0; i < s->row_count; i++)
        wait |= s->rows[i].segment_id != 0;
    return wait;
}

static void on_unlink(void *ctx, const char *name)
{
    struct unlinks *u = ctx;
    if (strncmp(name, "seg-", 4) != 0)
        return;
    u->count++;
    u->early += !u->s->index || copies_wait(u->s); /* the writer's fields, on the writer's thread */
}

static void test_the_index_hears_of_it_before_a_segment_goes(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct unlinks u = {0};
    m->limit_size = 1 << 20;
    assert_int_equal(open_machine(m, &u.s), 0);
    pthread_mutex_lock(&m->sim.lock);
    m->sim.unlink_ctx = &u;
    m->sim.before_unlink = on_unlink;
    pthread_mutex_unlock(&m->sim.lock);
    put_many(u.s, 0, 100);
    store_close(u.s);
    assert_true(u.count > 3);
    assert_int_equal(u.early, 0);
    machine_destroy(m);
}

static void power_off(void *ctx, const char *name)
{
    struct machine *m = ctx;
    if (strncmp(name, "seg-", 4) != 0 || m->sim.off)
        return;
    m->sim.off = true;
    copy_index(m, INDEX_FILE, "then");
}

/* The power goes when the index knows all that will be so, and the segment is still there: its blocks are there again, and the index knows them. */
static void test_a_segment_that_was_about_to_go(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    m->limit_size = 1 << 20;
    m->segments_only = true;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "is copied"), 0);
    pthread_mutex_lock(&m->sim.lock);
    m->sim.unlink_ctx = m;
    m->sim.before_unlink = power_off;
    pthread_mutex_unlock(&m->sim.lock);
    for (uint64_t i = 0; i < 100 && !m->sim.off; i++)
        put_many(s, i, 1);
    assert_true(m->sim.off);
    store_close(s);
    copy_index(m, "then", INDEX_FILE);
    m->sim.before_unlink = NULL;
    sim_power_loss(&m->sim);
    assert_int_equal(open_machine(m, &s), 0);
    assert_true(is_there(s, 0));
    compact_all(s);
    assert_true(is_there(s, 0));
    store_close(s);
    assert_true(model_index_is_true(m->index_directory));
    machine_destroy(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tombstones_outlive_their_segment),
        cmocka_unit_test(test_tombstones_outlive_a_segment_that_was_not_opened),
        cmocka_unit_test(test_a_copied_tombstone_spares_what_is_younger),
        cmocka_unit_test(test_nothing_is_dropped_after_a_failed_unlink),
        cmocka_unit_test(test_the_index_hears_of_it_before_a_segment_goes),
        cmocka_unit_test(test_a_segment_that_was_about_to_go),
        cmocka_unit_test(test_the_limit_holds_by_eviction),
        cmocka_unit_test(test_conversations_alone_can_fill_the_limit),
        cmocka_unit_test(test_what_builds_on_a_failed_write_fails),
        cmocka_unit_test(test_a_full_disk),
        cmocka_unit_test(test_a_quota),
        cmocka_unit_test(test_a_conversation_is_refused_last),
        cmocka_unit_test(test_lone_voids_are_synced_before_the_index_hears),
        cmocka_unit_test(test_the_ballast_comes_back),
        cmocka_unit_test(test_a_ballast_that_never_fits),
    };
    /* Failing disks are the point here: their log lines only on request. */
    log_set_level(getenv("TANDEM_FAULT_LOG") ? LOG_INFO : (enum log_level)(LOG_ERROR + 1));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
