/* tiers: see tiers.h. */
#include "store/tiers.h"
#include "shared/metrics.h"
#include "store/lane.h"
#include <stdlib.h>
#include <unistd.h>

#define THREADS_MIN 2u
#define THREADS_MAX 8u

struct tiers {
    struct store *store;
    unsigned threads;
    struct tier *list[TIER_COUNT];  /* fastest first; NULL: there is none */
    struct lane *lanes[TIER_COUNT]; /* in front of those that may hang */
    struct metric *bytes[TIER_COUNT], *blocks[TIER_COUNT], *hits[TIER_COUNT], *misses[TIER_COUNT],
        *evictions[TIER_COUNT];
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

/* ---- put ---------------------------------------------------------------------------------------------------- */

int tiers_put(struct tiers *t, const char *tenant, struct tier_block *b, store_done done, void *ctx)
{
    if (t->list[TIER_RAM])
        t->list[TIER_RAM]->ops->put(t->list[TIER_RAM], tenant, b, NULL, NULL);
    return t->list[TIER_DISK]->ops->put(t->list[TIER_DISK], tenant, b, done, ctx);
}

int tiers_drop(struct tiers *t, const char *tenant, const struct kv_block_id *id)
{
    int rc = -TD_ERR_NOTFOUND;
    for (enum tier_kind kind = 0; kind < TIER_COUNT; kind++)
        if (t->list[kind] && t->list[kind]->ops->drop(t->list[kind], tenant, id) == 0)
            rc = 0;
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
    }
}

/* ---- life --------------------------------------------------------------------------------------------------- */

static unsigned choose_threads(unsigned wanted)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned threads = wanted ? wanted : cores > 0 ? (unsigned)TD_MIN(cores, (long)THREADS_MAX) : THREADS_MIN;
    return TD_MIN(TD_MAX(threads, THREADS_MIN), THREADS_MAX);
}

static bool start(struct tiers *t, const struct tiers_config *c)
{
    if (c->ram_size && !(t->list[TIER_RAM] = tier_ram_create(c->ram_size)))
        return false;
    if (c->ram_size)
        register_metrics(t, TIER_RAM);
    t->list[TIER_DISK] = tier_disk_create(c->store);
    if (t->list[TIER_DISK])
        t->lanes[TIER_DISK] = lane_create(t->list[TIER_DISK], "disk", "tier=\"disk\"", t->threads);
    return t->lanes[TIER_DISK] != NULL;
}

int tiers_create(const struct tiers_config *config, struct tiers **out, struct td_error *err)
{
    struct tiers *t = calloc(1, sizeof *t);
    if (!t)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the KV tiers: out of memory");
    t->store = config->store;
    t->threads = choose_threads(config->threads);
    if (!start(t, config)) {
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
    for (enum tier_kind kind = 0; kind < TIER_COUNT; kind++)
        if (t->list[kind])
            t->list[kind]->ops->destroy(t->list[kind]);
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
