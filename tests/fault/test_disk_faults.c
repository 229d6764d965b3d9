/* Disks that fail: every kind of operation fails once, at each position in turn, or for a while, or for good; the disk fills up.
 * The store must go on, tell the truth about what is durable (model.h), never show wrong bytes, and after the trouble work as before. */
#include "model.h"
#include "shared/log.h"
#include <errno.h>

enum { STEPS = 40, POSITIONS_MAX = 60 };

struct machine {
    struct sim sim;
    struct model model;
    char *index_directory;
    uint64_t limit_size, ballast_size;
    bool segments_only;
    uint64_t direct_size;
};

static struct machine *machine_create(uint64_t seed)
{
    struct machine *m = calloc(1, sizeof *m);
    sim_init(&m->sim, "/disk/store", seed);
    model_init(&m->model);
    m->index_directory = fixture_directory();
    return m;
}

static void machine_destroy(struct machine *m)
{
    sim_deinit(&m->sim);
    fixture_remove(m->index_directory);
    free(m);
}

static int open_machine(struct machine *m, struct store **s)
{
    struct store_config config = fixture_config("/disk/store");
    struct store_env env = {.io = &m->sim.io,
                            .index_directory = m->index_directory,
                            .segments_only = m->segments_only,
                            .write_threads = 1, /* which write fails is not left to chance */
                            .direct_size = m->direct_size};
    struct td_error err = {0};
    config.segment_size = 128 << 10;
    config.limit_size = m->limit_size ? m->limit_size : 1 << 30;
    config.commit_interval_ms = 1000000;
    if (m->ballast_size)
        config.ballast_size = m->ballast_size;
    int rc = store_open_with(&config, &env, s, &err);
    assert_true(rc == 0 || err.text[0]); /* a refusal has its line */
    return rc;
}

static void no_faults(struct machine *m)
{
    pthread_mutex_lock(&m->sim.lock);
    memset(m->sim.fail_at, 0, sizeof m->sim.fail_at);
    memset(m->sim.counts, 0, sizeof m->sim.counts);
    memset(m->sim.fail_for, 0, sizeof m->sim.fail_for);
    pthread_mutex_unlock(&m->sim.lock);
}

static void fail_next(struct machine *m, enum sim_kind kind, uint64_t count)
{
    pthread_mutex_lock(&m->sim.lock);
    m->sim.fail_at[kind] = m->sim.counts[kind] + 1;
    m->sim.fail_for[kind] = count;
    pthread_mutex_unlock(&m->sim.lock);
}

static void set_capacity(struct machine *m, uint64_t capacity)
{
    pthread_mutex_lock(&m->sim.lock);
    m->sim.capacity = capacity;
    pthread_mutex_unlock(&m->sim.lock);
}

static void assert_sound(struct machine *m, const char *what, uint64_t position)
{
    if (m->model.violation[0])
        fail_msg("%s at %llu: %s", what, (unsigned long long)position, m->model.violation);
    if (sim_violation(&m->sim))
        fail_msg("%s at %llu: %s", what, (unsigned long long)position, sim_violation(&m->sim));
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
    no_faults(m);
    sim_power_loss(&m->sim);
    assert_int_equal(open_machine(m, &s), 0);
    model_check(&m->model, s, NULL);
    assert_sound(m, "after the power loss", position);
    store_close(s);
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
    int accepted = 0, rc = 0;
    assert_int_equal(open_machine(m, &s), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "first", 0, "x"), 0);
    pthread_mutex_lock(&m->sim.lock);
    for (int i = 0; i <= FIT && rc == 0; i++) {
        snprintf(id, sizeof id, "c%d", i);
        rc = store_conv_put(s, "acme", "ann", id, 0, body, BODY, fixture_on_done, &done);
        accepted += rc == 0;
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
    assert_int_equal(store_waiter_wait(&r.evict.waiter),
                     1); /* the policy has let it go, and it was left alone */
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

/* ---- space ------------------------------------------------------------------------------------------------ */

static int put_many(struct store *s, uint64_t first, uint64_t count)
{
    int acknowledged = 0;
    for (uint64_t i = first; i < first + count; i++) {
        struct fixture_block f;
        fixture_block_make(&f, i);
        acknowledged += fixture_put(s, "acme", &f) == 0;
    }
    return acknowledged;
}

static bool is_there(struct store *s, uint64_t i)
{
    struct fixture_block f;
    fixture_block_make(&f, i);
    return fixture_block_reads(s, "acme", &f);
}

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

static void test_the_ballast_comes_back(void **state)
{
    (void)state;
    struct machine *m = machine_create(1);
    struct store *s;
    m->sim.capacity = 4 << 20;
    m->ballast_size = 512 << 10;
    assert_int_equal(open_machine(m, &s), 0);
    assert_true(s->ballast_there);
    assert_int_equal(put_many(s, 0, 200), 200);
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
    store_close(s);
    machine_destroy(m);
}

struct unlinks {
    struct store *s;
    int count, early;
};

static void on_unlink(void *ctx, const char *name)
{
    struct unlinks *u = ctx;
    if (strncmp(name, "seg-", 4) != 0)
        return;
    u->count++;
    u->early += !u->s->index || u->s->row_count > 0; /* the writer's fields, on the writer's thread */
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
        cmocka_unit_test(test_tombstones_outlive_their_segment),
        cmocka_unit_test(test_tombstones_outlive_a_segment_that_was_not_opened),
        cmocka_unit_test(test_a_copied_tombstone_spares_what_is_younger),
        cmocka_unit_test(test_nothing_is_dropped_after_a_failed_unlink),
        cmocka_unit_test(test_the_index_hears_of_it_before_a_segment_goes),
        cmocka_unit_test(test_a_full_queue),
        cmocka_unit_test(test_what_could_not_be_evicted_goes_later),
        cmocka_unit_test(test_what_was_not_replaced_is_evicted),

        cmocka_unit_test(test_a_group_without_room),
        cmocka_unit_test(test_the_limit_holds_by_eviction),
        cmocka_unit_test(test_conversations_alone_can_fill_the_limit),
        cmocka_unit_test(test_what_builds_on_a_failed_write_fails),
        cmocka_unit_test(test_a_full_disk),
        cmocka_unit_test(test_the_ballast_comes_back),
    };
    /* Failing disks are the point here: their log lines only on request. */
    log_set_level(getenv("TANDEM_FAULT_LOG") ? LOG_DEBUG : (enum log_level)(LOG_ERROR + 1));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
