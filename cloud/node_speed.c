/* node_speed: a thread that tells the engine what reading a block takes before any has been read, so that the first request after a start already chooses
 * well between reading and computing: what the last process noted beside the store, at once; what one read of the disk says, a little later and for
 * nobody to wait for. Where both are known the slower one counts: to read in vain costs time, and a tier that is better than believed is noticed
 * (engine_load.c). From then on it notes what the engine has measured. */
#include "cloud/node_internal.h"
#include "store/probe.h"
#include <time.h>

#define LOOK_S 10 /* between looks at what was measured */

static const enum tier_kind noted_tiers[] = {TIER_DISK, TIER_REMOTE}; /* memory is what it is */

/* Different enough to be written down. */
static bool differs(uint64_t a, uint64_t b)
{
    return a > b + b / 4 || b > a + a / 4;
}

static void note(struct node *n)
{
    struct engine_stats stats;
    bool changed = false;
    engine_stats(n->engine, &stats);
    for (size_t i = 0; i < TD_COUNT(noted_tiers); i++) {
        enum tier_kind kind = noted_tiers[i];
        if (stats.load_us[kind] && differs(stats.load_us[kind], n->speed.noted_us[kind])) {
            n->speed.noted_us[kind] = stats.load_us[kind];
            changed = true;
        }
    }
    if (changed)
        store_speed_save(n->service.store, n->speed.block_size, n->speed.noted_us); /* or not */
}

static void *watch_speed(void *arg)
{
    struct node *n = arg;
    uint64_t disk_us;
    if (store_probe(n->service.store, n->speed.block_size, &disk_us) == 0)
        engine_know_load(n->engine, TIER_DISK, TD_MAX(disk_us, n->speed.noted_us[TIER_DISK]));
    pthread_mutex_lock(&n->speed.lock);
    while (!n->speed.stopping) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += LOOK_S;
        pthread_cond_timedwait(&n->speed.stop, &n->speed.lock, &until);
        pthread_mutex_unlock(&n->speed.lock);
        note(n);
        pthread_mutex_lock(&n->speed.lock);
    }
    pthread_mutex_unlock(&n->speed.lock);
    return NULL;
}

int node_speed_start(struct node *n, size_t block_size, struct td_error *err)
{
    n->speed.block_size = block_size;
    store_speed_load(n->service.store, block_size, n->speed.noted_us);
    for (size_t i = 0; i < TD_COUNT(noted_tiers); i++)
        if (n->speed.noted_us[noted_tiers[i]])
            engine_know_load(n->engine, noted_tiers[i], n->speed.noted_us[noted_tiers[i]]);
    pthread_mutex_init(&n->speed.lock, NULL);
    pthread_cond_init(&n->speed.stop, NULL);
    n->speed.started = pthread_create(&n->speed.thread, NULL, watch_speed, n) == 0;
    return n->speed.started ? 0 : td_fail(err, -TD_ERR_NOMEM, "cannot start: no thread can be made");
}

void node_speed_stop(struct node *n)
{
    if (!n->speed.started)
        return;
    pthread_mutex_lock(&n->speed.lock);
    n->speed.stopping = true;
    pthread_cond_signal(&n->speed.stop);
    pthread_mutex_unlock(&n->speed.lock);
    pthread_join(n->speed.thread, NULL);
    pthread_cond_destroy(&n->speed.stop);
    pthread_mutex_destroy(&n->speed.lock);
    n->speed.started = false;
}
