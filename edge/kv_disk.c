/* kv_disk: see kv_disk.h. One list is read at a time, that of the prompt at hand; another takes its place and voids what was read for it.
 *
 *      ids  0 ........ next_out ........ next_read ........ count
 *           |  taken     | read, or at it  | to be read       |        next_read - next_out <= KV_DISK_AHEAD */
#include "edge/kv_disk.h"
#include "shared/log.h"
#include "shared/metrics.h"
#include "shared/stop.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#define MODULE "edge"
#define SMOOTH 0.25

struct slot {
    bool ready;
    int status;
    struct tier_block *block;
};

struct kv_disk {
    struct store *store;
    const char *tenant;
    pthread_t thread;
    pthread_mutex_t lock; /* of everything below */
    pthread_cond_t changed;
    bool stop, reading;
    bool late;              /* a read that nobody waits for any more has not come back */
    uint64_t rest_until_us; /* until then the disk counts as empty */
    double layer_us;        /* 0: not measured */
    uint64_t list;          /* number of the list at hand */
    uint32_t count, next_read, next_out;
    struct slot slots[KV_DISK_AHEAD]; /* of block i: i % KV_DISK_AHEAD */
    struct kv_block_id ids[KV_DISK_WANT_MAX];
    uint32_t writing; /* puts that the store has not answered */
    struct metric *read, *written, *failed, *missed;
};

/* ---- the reading thread ---- */

static bool may_read(const struct kv_disk *d)
{
    return d->next_read < d->count && d->next_read - d->next_out < KV_DISK_AHEAD;
}

static void *reader_main(void *arg)
{
    struct kv_disk *d = arg;
    pthread_mutex_lock(&d->lock);
    while (!d->stop) {
        if (!may_read(d)) {
            pthread_cond_wait(&d->changed, &d->lock);
            continue;
        }
        uint64_t list = d->list;
        struct slot *slot = &d->slots[d->next_read % KV_DISK_AHEAD];
        struct kv_block_id id = d->ids[d->next_read++];
        struct tier_block *block = NULL;
        d->reading = true;
        pthread_mutex_unlock(&d->lock);
        int rc = store_read_block(d->store, d->tenant, &id, &block);
        pthread_mutex_lock(&d->lock);
        d->reading = d->late = false;
        if (list == d->list)
            *slot = (struct slot){true, rc, block};
        else
            tier_block_release(block);
        pthread_cond_broadcast(&d->changed);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* ---- taking ---- */

/* Under the lock: another list, which may be empty. */
static void begin_list(struct kv_disk *d, const struct kv_block_id *chain, uint32_t count)
{
    for (uint32_t i = 0; i < KV_DISK_AHEAD; i++) {
        tier_block_release(d->slots[i].block);
        d->slots[i] = (struct slot){0};
    }
    d->list++;
    d->count = TD_MIN(count, KV_DISK_WANT_MAX);
    d->next_read = d->next_out = 0;
    if (d->count > 0)
        memcpy(d->ids, chain, d->count * sizeof *chain);
    pthread_cond_broadcast(&d->changed);
}

/* Under the lock. False: not in time. */
static bool wait_for(struct kv_disk *d, const struct slot *slot, uint64_t wait_us)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t ns = (uint64_t)until.tv_nsec + wait_us * 1000;
    until.tv_sec += (time_t)(ns / 1000000000);
    until.tv_nsec = (long)(ns % 1000000000);
    while (!slot->ready && wait_us > 0)
        if (pthread_cond_timedwait(&d->changed, &d->lock, &until) == ETIMEDOUT)
            break;
    return slot->ready;
}

int kv_disk_take(struct kv_disk *d, const struct kv_block_id *chain, uint32_t count, uint64_t wait_us,
                 struct tier_block **out)
{
    int rc = -TD_ERR_AGAIN;
    *out = NULL;
    pthread_mutex_lock(&d->lock);
    if (d->next_out >= d->count || memcmp(&d->ids[d->next_out], chain, sizeof *chain) != 0)
        begin_list(d, chain, count);
    struct slot *slot = &d->slots[d->next_out % KV_DISK_AHEAD];
    if (wait_for(d, slot, wait_us)) {
        rc = slot->status;
        *out = slot->block;
        *slot = (struct slot){0};
        d->next_out++;
        pthread_cond_broadcast(&d->changed);
    } else {
        d->late = d->reading;
        d->rest_until_us = clock_mono_us() + KV_DISK_REST_US;
        begin_list(d, NULL, 0);
    }
    metric_add(rc == 0 ? d->read : d->missed, 1);
    pthread_mutex_unlock(&d->lock);
    return rc;
}

void kv_disk_measured(struct kv_disk *d, uint64_t took_us, uint32_t layers)
{
    double us = (double)took_us / layers;
    pthread_mutex_lock(&d->lock);
    d->layer_us = d->layer_us > 0 ? d->layer_us + SMOOTH * (us - d->layer_us) : us;
    pthread_mutex_unlock(&d->lock);
}

double kv_disk_layer_us(struct kv_disk *d)
{
    pthread_mutex_lock(&d->lock);
    double us = d->layer_us;
    pthread_mutex_unlock(&d->lock);
    return us;
}

/* ---- what is there ---- */

static uint32_t stored_layers(struct kv_disk *d, const struct kv_block_id *id, struct kv_quality *quality)
{
    struct store_block_info info;
    bool there = store_find(d->store, d->tenant, id, &info) == 0 && info.layer_begin == 0;
    if (there)
        *quality = info.quality;
    return there ? info.layer_end : 0;
}

static bool rests(struct kv_disk *d)
{
    pthread_mutex_lock(&d->lock);
    bool yes = d->late || (d->rest_until_us && clock_mono_us() < d->rest_until_us);
    pthread_mutex_unlock(&d->lock);
    return yes;
}

uint32_t kv_disk_layers(struct kv_disk *d, const struct kv_block_id *id)
{
    struct kv_quality quality;
    return rests(d) ? 0 : stored_layers(d, id, &quality);
}

bool kv_disk_accepts(struct kv_disk *d, const struct kv_block_id *id, uint32_t layers, enum kv_accept accept,
                     enum kv_numerics numerics)
{
    struct kv_quality quality;
    return !rests(d) && stored_layers(d, id, &quality) >= layers &&
           kv_quality_accepts(quality, accept, numerics);
}

bool kv_disk_lacks(struct kv_disk *d, const struct kv_block_id *id, uint32_t layers)
{
    struct kv_quality quality;
    return stored_layers(d, id, &quality) < layers;
}

void kv_disk_touch(struct kv_disk *d, const struct kv_block_id *chain, uint32_t count)
{
    store_touch(d->store, d->tenant, chain, count);
}

static void put_done(void *ctx, int status)
{
    struct kv_disk *d = ctx;
    metric_add(status == 0 ? d->written : d->failed, 1);
    pthread_mutex_lock(&d->lock);
    d->writing--;
    pthread_cond_broadcast(
        &d->changed); /* inside the lock: kv_disk_destroy frees d once nothing is written */
    pthread_mutex_unlock(&d->lock);
}

int kv_disk_put(struct kv_disk *d, const struct store_block *block)
{
    pthread_mutex_lock(&d->lock);
    d->writing++;
    pthread_mutex_unlock(&d->lock);
    int rc = store_put(d->store, d->tenant, block, put_done, d);
    if (rc < 0)
        put_done(d, rc);
    return rc;
}

/* ---- life ---- */

void kv_disk_clear(struct store *store, const char *tenant)
{
    struct store_stats stats;
    struct td_error err = {0};
    uint64_t blocks, freed;
    store_stats(store, &stats);
    if (stats.blocks == 0)
        return;
    int rc = store_set_tenant(store, tenant, 1, 0);
    if (rc == 0)
        rc = store_gc(store, NULL, NULL, &blocks, &freed, &err);
    if (rc < 0)
        log_warn(MODULE, "KV of earlier runs stays on the disk: %s",
                 err.text[0] ? err.text : td_status_text(rc));
}

static void register_metrics(struct kv_disk *d)
{
    d->read = metric_counter("tandem_edge_kv_disk_read_total", NULL,
                             "Blocks of this device's own KV read from its disk instead of computed.");
    d->missed = metric_counter("tandem_edge_kv_disk_missed_total", NULL,
                               "Blocks that were not read: damaged, gone, or not in time.");
    d->written = metric_counter("tandem_edge_kv_disk_written_total", NULL,
                                "Blocks of this device's own KV that are safe on its disk.");
    d->failed = metric_counter("tandem_edge_kv_disk_write_failed_total", NULL,
                               "Blocks that could not be written: the disk is full, failing or behind.");
}

int kv_disk_create(struct store *store, const char *tenant, uint64_t limit_size, struct kv_disk **out,
                   struct td_error *err)
{
    int rc = store_set_tenant(store, tenant, limit_size, 0);
    struct kv_disk *d = rc == 0 ? calloc(1, sizeof *d) : NULL;
    if (!d)
        return td_fail(err, rc < 0 ? rc : -TD_ERR_NOMEM, "cannot keep KV on the disk: %s",
                       td_status_text(rc < 0 ? rc : -TD_ERR_NOMEM));
    pthread_condattr_t monotonic;
    d->store = store;
    d->tenant = tenant;
    register_metrics(d);
    pthread_mutex_init(&d->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&d->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (pthread_create(&d->thread, NULL, reader_main, d) != 0) {
        pthread_cond_destroy(&d->changed);
        pthread_mutex_destroy(&d->lock);
        free(d);
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the thread that reads KV from the disk");
    }
    *out = d;
    return 0;
}

void kv_disk_destroy(struct kv_disk *d)
{
    if (!d)
        return;
    pthread_mutex_lock(&d->lock);
    d->stop = true;
    int late = d->reading; /* nobody waits for it */
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
    stop_note_late(late);
    pthread_join(d->thread, NULL);
    stop_note_late(-late);
    store_flush(d->store);
    pthread_mutex_lock(&d->lock);
    while (d->writing > 0)
        pthread_cond_wait(&d->changed, &d->lock);
    pthread_mutex_unlock(&d->lock);
    begin_list(d, NULL, 0);
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->lock);
    free(d);
}
