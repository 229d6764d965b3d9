/* tiers: see tiers.h. */
#include "store/tiers.h"
#include "shared/metrics.h"
#include "store/lane.h"
#include "store/policy.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define THREADS_MIN     2u
#define THREADS_MAX     8u
#define THREADS_WAITING 4u /* beyond one a core: while they wait for the disk the others undo the cipher */
#define REMOTE_THREADS  2u

struct tiers {
    struct store *store;
    unsigned threads;
    struct tier *list[TIER_COUNT];  /* fastest first; NULL: there is none */
    struct lane *lanes[TIER_COUNT]; /* in front of those that may hang */
    pthread_mutex_t wake_lock;
    void (*wake)(void *ctx); /* under the lock, as is the next */
    void *wake_ctx;
    atomic_uint writing_back; /* blocks whose acknowledgement by the disk will send them on */
    struct metric *bytes[TIER_COUNT], *blocks[TIER_COUNT], *hits[TIER_COUNT], *misses[TIER_COUNT],
        *evictions[TIER_COUNT], *sick[TIER_COUNT], *policy_bytes[TIER_COUNT];
};

const char *tier_name(enum tier_kind kind)
{
    static const char *const names[TIER_COUNT] = {"ram", "disk", "remote"};
    return names[kind];
}

static bool usable(const struct store_block_info *i, const struct tiers_want *w)
{
    return i->layer_begin <= w->layer_begin && w->layer_end <= i->layer_end &&
           kv_quality_accepts(i->quality, w->accept, w->numerics);
}

static bool is_well(struct tiers *t, enum tier_kind kind)
{
    return t->list[kind] && !(t->lanes[kind] && lane_is_sick(t->lanes[kind]));
}

int tiers_find(struct tiers *t, const char *tenant, const struct kv_block_id *id,
               const struct tiers_want *want, struct tiers_found *found)
{
    int rc = -TD_ERR_NOTFOUND;
    for (enum tier_kind kind = 0; kind < TIER_COUNT; kind++) {
        int result = is_well(t, kind) ? t->list[kind]->ops->find(t->list[kind], tenant, id, &found->info)
                                      : -TD_ERR_NOTFOUND;
        if (result == 0 && usable(&found->info, want)) {
            found->tier = kind;
            return 0;
        }
        if (result == -TD_ERR_AGAIN)
            rc = result;
    }
    return rc;
}

/* ---- get ---------------------------------------------------------------------------------------------------- */

static int get_from(struct tiers *t, enum tier_kind kind, const char *tenant, const struct kv_block_id *id,
                    const struct store_block_info *info, struct tier_block **out)
{
    if (!t->lanes[kind])
        return t->list[kind]->ops->get(t->list[kind], tenant, id, out);
    uint64_t timeout_us = TIERS_READ_US + info->stored_size * UINT64_C(1000000) / TIERS_READ_SIZE_RATE;
    return lane_get(t->lanes[kind], tenant, id, timeout_us, out);
}

static void promote(struct tiers *t, enum tier_kind from, const char *tenant, struct tier_block *b)
{
    for (enum tier_kind kind = 0; kind < from; kind++)
        if (is_well(t, kind))
            t->list[kind]->ops->put(t->list[kind], tenant, b, NULL, NULL);
}

int tiers_get(struct tiers *t, const char *tenant, const struct kv_block_id *id,
              const struct tiers_want *want, struct tier_block **out, enum tier_kind *from)
{
    for (enum tier_kind kind = 0; kind < TIER_COUNT; kind++) {
        struct store_block_info info;
        if (!is_well(t, kind) || t->list[kind]->ops->find(t->list[kind], tenant, id, &info) < 0 ||
            !usable(&info, want) || get_from(t, kind, tenant, id, &info, out) < 0)
            continue;
        const struct store_block *b = &(*out)->block;
        info = (struct store_block_info){b->quality, b->block_index, b->layer_begin, b->layer_end, 0};
        if (!usable(&info, want)) { /* it was replaced, or the tier's list is wrong about it */
            tier_block_release(*out);
            continue;
        }
        promote(t, kind, tenant, *out);
        if (from)
            *from = kind;
        return 0;
    }
    return -TD_ERR_NOTFOUND;
}

/* ---- asking afar -------------------------------------------------------------------------------------------- */

void tiers_look_up(struct tiers *t, const char *tenant, const struct kv_block_id *ids, size_t count)
{
    struct tier *remote = t->list[TIER_REMOTE];
    if (remote && count > 0 && is_well(t, TIER_REMOTE))
        remote->ops->look_up(remote, tenant, ids, count);
}

bool tiers_has_remote(const struct tiers *t)
{
    return t->list[TIER_REMOTE] != NULL;
}

static void on_answers(void *ctx)
{
    struct tiers *t = ctx;
    pthread_mutex_lock(&t->wake_lock);
    if (t->wake)
        t->wake(t->wake_ctx);
    pthread_mutex_unlock(&t->wake_lock);
}

void tiers_set_wake(struct tiers *t, void (*wake)(void *ctx), void *ctx)
{
    pthread_mutex_lock(&t->wake_lock);
    t->wake = wake;
    t->wake_ctx = ctx;
    pthread_mutex_unlock(&t->wake_lock);
}

/* ---- put ---------------------------------------------------------------------------------------------------- */

/* A block on its way to the disk, to be sent on from there: the remote tier sends what the disk has. */
struct write_back {
    struct tiers *tiers;
    struct tier_block *block;
    char tenant[STORE_TENANT_MAX + 1];
    store_done done;
    void *ctx;
};

static void free_write_back(struct write_back *w)
{
    atomic_fetch_sub(&w->tiers->writing_back, 1);
    tier_block_release(w->block);
    free(w);
}

static void on_disk(void *ctx, int status)
{
    struct write_back *w = ctx;
    struct tier *remote = w->tiers->list[TIER_REMOTE];
    if (status == 0)
        remote->ops->put(remote, w->tenant, w->block, NULL, NULL);
    store_done done = w->done;
    void *done_ctx = w->ctx;
    free_write_back(w);
    if (done)
        done(done_ctx, status);
}

int tiers_put(struct tiers *t, const char *tenant, struct tier_block *b, store_done done, void *ctx)
{
    if (t->list[TIER_RAM])
        t->list[TIER_RAM]->ops->put(t->list[TIER_RAM], tenant, b, NULL, NULL);
    struct write_back *w = t->list[TIER_REMOTE] ? malloc(sizeof *w) : NULL;
    if (!w) /* without memory for the note it stays here */
        return t->list[TIER_DISK]->ops->put(t->list[TIER_DISK], tenant, b, done, ctx);
    *w = (struct write_back){.tiers = t, .block = tier_block_hold(b), .done = done, .ctx = ctx};
    snprintf(w->tenant, sizeof w->tenant, "%s", tenant);
    atomic_fetch_add(&t->writing_back, 1);
    int rc = t->list[TIER_DISK]->ops->put(t->list[TIER_DISK], tenant, b, on_disk, w);
    if (rc < 0)
        free_write_back(w);
    return rc;
}

void tiers_touch(struct tiers *t, const char *tenant, const struct kv_block_id *chain, size_t count)
{
    for (enum tier_kind kind = 0; kind < TIER_COUNT; kind++)
        if (t->list[kind] && t->list[kind]->ops->touch)
            t->list[kind]->ops->touch(t->list[kind], tenant, chain, count);
}

int tiers_erase_tenant(struct tiers *t, const char *tenant, struct td_error *err)
{
    int rc = store_erase_tenant(t->store, tenant, err);
    for (enum tier_kind kind = 0; kind < TIER_COUNT && rc == 0; kind++)
        if (t->list[kind] && t->list[kind]->ops->drop_tenant)
            t->list[kind]->ops->drop_tenant(t->list[kind], tenant);
    return rc;
}

/* ---- figures ------------------------------------------------------------------------------------------------ */

void tiers_stats(struct tiers *t, enum tier_kind kind, struct tier_stats *out)
{
    memset(out, 0, sizeof *out);
    if (!t->list[kind])
        return;
    t->list[kind]->ops->stats(t->list[kind], out);
    if (t->lanes[kind]) {
        out->timeouts += lane_timeouts(t->lanes[kind]);
        out->sick |= lane_is_sick(t->lanes[kind]);
    }
}

static void register_metrics(struct tiers *t, enum tier_kind kind)
{
    char label[32];
    metric_label(label, sizeof label, "tier", tier_name(kind));
    t->bytes[kind] = metric_gauge("tandem_kv_tier_bytes", label, "Bytes that a tier of the KV store takes");
    t->blocks[kind] = metric_gauge("tandem_kv_tier_blocks", label, "KV blocks in a tier");
    t->hits[kind] =
        metric_counter("tandem_kv_tier_hits_total", label, "Look-ups of KV blocks that a tier had");
    t->misses[kind] = metric_counter("tandem_kv_tier_misses_total", label,
                                     "Look-ups of KV blocks that a tier did not have");
    t->sick[kind] = metric_gauge("tandem_kv_tier_sick", label, "1 while a tier hangs or is away");
    t->policy_bytes[kind] = metric_gauge("tandem_kv_tier_policy_bytes", label, POLICY_BYTES_HELP);
    t->evictions[kind] =
        metric_counter("tandem_kv_tier_evictions_total", label, "KV blocks that went to make room in a tier");
}

/* The disk's own figures are kept by the store. */
void tiers_update_metrics(struct tiers *t)
{
    for (enum tier_kind kind = 0; kind < TIER_COUNT; kind++) {
        struct tier_stats s;
        if (!t->bytes[kind])
            continue;
        tiers_stats(t, kind, &s);
        metric_set(t->bytes[kind], (double)s.bytes);
        metric_set(t->blocks[kind], (double)s.blocks);
        metric_set(t->hits[kind], (double)s.hits);
        metric_set(t->misses[kind], (double)s.misses);
        metric_set(t->evictions[kind], (double)s.evictions);
        metric_set(t->sick[kind], s.sick);
        metric_set(t->policy_bytes[kind], (double)s.policy_bytes);
    }
}

/* ---- life --------------------------------------------------------------------------------------------------- */

unsigned tiers_default_threads(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned threads = (unsigned)TD_MIN(TD_MAX(cores, 1L), (long)THREADS_MAX) + THREADS_WAITING;
    return TD_MIN(threads, THREADS_MAX);
}

static unsigned choose_threads(unsigned wanted)
{
    return wanted ? TD_MIN(TD_MAX(wanted, THREADS_MIN), THREADS_MAX) : tiers_default_threads();
}

static bool start_remote(struct tiers *t, const struct tier_redis_config *c, struct td_error *err)
{
    struct tier_redis_config config = *c;
    config.store = t->store;
    config.wake = on_answers;
    config.wake_ctx = t;
    register_metrics(t, TIER_REMOTE);
    t->list[TIER_REMOTE] = tier_redis_create(&config, err);
    if (t->list[TIER_REMOTE])
        t->lanes[TIER_REMOTE] =
            lane_create(t->list[TIER_REMOTE], "the remote tier", "tier=\"remote\"", REMOTE_THREADS);
    return t->lanes[TIER_REMOTE] != NULL;
}

static bool start(struct tiers *t, const struct tiers_config *c, struct td_error *err)
{
    if (c->ram_size && !(t->list[TIER_RAM] = tier_ram_create(c->ram_size, c->ram_tenant_size)))
        return false;
    if (c->ram_size)
        register_metrics(t, TIER_RAM);
    t->list[TIER_DISK] = tier_disk_create(c->store);
    if (t->list[TIER_DISK])
        t->lanes[TIER_DISK] = lane_create(t->list[TIER_DISK], "the disk tier", "tier=\"disk\"", t->threads);
    if (!t->lanes[TIER_DISK])
        return false;
    return !c->remote || start_remote(t, c->remote, err);
}

int tiers_create(const struct tiers_config *config, struct tiers **out, struct td_error *err)
{
    struct tiers *t = calloc(1, sizeof *t);
    if (!t)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the KV tiers: out of memory");
    t->store = config->store;
    t->threads = choose_threads(config->threads);
    pthread_mutex_init(&t->wake_lock, NULL);
    if (!start(t, config, err)) {
        tiers_destroy(t);
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the KV tiers: no memory or no threads");
    }
    *out = t;
    return 0;
}

void tiers_destroy(struct tiers *t)
{
    if (!t)
        return;
    for (enum tier_kind kind = 0; kind < TIER_COUNT; kind++)
        lane_destroy(t->lanes[kind]);
    while (atomic_load(&t->writing_back) > 0)
        store_flush(t->store);
    for (enum tier_kind kind = 0; kind < TIER_COUNT; kind++)
        if (t->list[kind])
            t->list[kind]->ops->destroy(t->list[kind]);
    pthread_mutex_destroy(&t->wake_lock);
    free(t);
}

struct store *tiers_store(struct tiers *t)
{
    return t->store;
}

unsigned tiers_threads(const struct tiers *t)
{
    return t->threads;
}
