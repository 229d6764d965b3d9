/* A block is demoted while a reader, who began before, finds that its record cannot be read: the entry loses its place when the copy is appended and not
 * yet synced. With the power taken away at any operation around that, the block is there in one of its two forms; nothing else is touched. */
#include "machine.h"
#include "shared/log.h"
#include <errno.h>
#include <semaphore.h>

enum { BLOCKS = 3 };

static struct late_reader {
    struct machine *m;
    struct store *s;
    pthread_t thread;
    sem_t reads, may_fail;
    atomic_bool waits; /* for the copy's sync */
    bool read;         /* what it came to */
    int64_t (*pread)(struct io *io, int fd, void *data, size_t size, uint64_t offset);
    int (*fsync)(struct io *io, int fd);
} late;
static _Thread_local bool is_late;

static void let_it_fail(void)
{
    if (!atomic_exchange(&late.waits, false))
        return;
    sem_post(&late.may_fail);
    pthread_join(late.thread, NULL);
}

static int64_t late_pread(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    if (!is_late)
        return late.pread(io, fd, data, size, offset);
    is_late = false;
    sem_post(&late.reads);
    sem_wait(&late.may_fail);
    return -EIO;
}

static int late_fsync(struct io *io, int fd)
{
    let_it_fail();
    return late.fsync(io, fd);
}

static void *read_late(void *arg)
{
    struct tier_block *b;
    (void)arg;
    is_late = true;
    late.read = store_read_block(late.s, "acme", &late.m->model.content[0].id, &b) == 0;
    if (late.read)
        tier_block_release(b);
    return NULL;
}

/* Whole, with the bytes of the form that it says it has. */
static bool reads(struct machine *m, struct store *s, int i)
{
    struct tier_block *b;
    if (store_read_block(s, "acme", &m->model.content[i].id, &b) < 0)
        return false;
    bool exact = b->block.quality.fidelity == KV_L0;
    tier_block_release(b);
    return fixture_block_reads(s, "acme", exact ? &m->model.content[i] : &m->model.demoted[i]);
}

static void demote_beside_reader(struct machine *m, struct store *s, struct fixture_done *done)
{
    late.m = m;
    late.s = s;
    late.read = true;
    assert_int_equal(pthread_create(&late.thread, NULL, read_late, NULL), 0);
    sem_wait(&late.reads);
    if (fixture_put_demoted(s, "acme", &m->model.demoted[0], done) == 0) {
        atomic_store(&late.waits, true);
        store_flush(s);
    } else {
        atomic_store(&late.waits, true);
    }
    let_it_fail(); /* where it was never synced */
}

/* The power goes with the n-th operation from there on. False: it did not come to so many. */
static bool live_until(uint64_t position, enum sim_survival survival, bool index_gone)
{
    struct machine *m = machine_create(position);
    struct fixture_done done = {0, 1};
    struct store *s;
    m->sim.survival = survival;
    late.pread = m->sim.io.pread, late.fsync = m->sim.io.fsync;
    m->sim.io.pread = late_pread, m->sim.io.fsync = late_fsync;
    assert_int_equal(open_machine(m, &s), 0);
    for (int i = 0; i < BLOCKS; i++)
        assert_int_equal(fixture_put(s, "acme", &m->model.content[i]), 0);
    pthread_mutex_lock(&m->sim.lock);
    m->sim.operations = 0;
    m->sim.power_off_at = position;
    pthread_mutex_unlock(&m->sim.lock);
    demote_beside_reader(m, s, &done);
    assert_false(late.read);
    bool whole = !m->sim.off;
    if (whole) {
        assert_int_equal(done.status, 0);
        assert_true(fixture_block_reads(s, "acme", &m->model.demoted[0]));
    }
    store_close(s);
    bool went_off = m->sim.off;
    sim_power_loss(&m->sim);
    if (index_gone)
        index_set_aside(m->index_directory, false);
    assert_int_equal(open_machine(m, &s), 0);
    for (int i = 0; i < BLOCKS; i++)
        if (!reads(m, s, i))
            fail_msg("block %d is lost with the power at operation %llu", i, (unsigned long long)position);
    if (whole) /* acknowledged */
        assert_true(fixture_block_reads(s, "acme", &m->model.demoted[0]));
    store_close(s);
    assert_sound(m, "demoted beside a reader", position);
    machine_destroy(m);
    return went_off;
}

static void a_copy_whose_block_loses_its_place_meets_a_crash(void **state)
{
    (void)state;
    static const enum sim_survival survivals[] = {SURVIVE_NONE, SURVIVE_ALL, SURVIVE_SOME, SURVIVE_SECTORS};
    sem_init(&late.reads, 0, 0);
    sem_init(&late.may_fail, 0, 0);
    for (size_t i = 0; i < 2 * TD_COUNT(survivals); i++) {
        uint64_t position = 1;
        while (live_until(position, survivals[i / 2], i % 2))
            position++;
        assert_true(position > 3); /* at least the append, its sync and the void */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_copy_whose_block_loses_its_place_meets_a_crash)};
    log_set_level((enum log_level)(LOG_ERROR + 1)); /* failing disks are the point here */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
