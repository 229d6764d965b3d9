/* tier_disk: the store as a tier. */
#include "store/tier.h"
#include <stdlib.h>

struct disk {
    struct tier tier; /* first */
    struct store *store;
};

static struct store *store_of(struct tier *t)
{
    return ((struct disk *)t)->store;
}

static int disk_find(struct tier *t, const char *tenant, const struct kv_block_id *id,
                     struct store_block_info *info)
{
    return store_find(store_of(t), tenant, id, info);
}

static int disk_get(struct tier *t, const char *tenant, const struct kv_block_id *id, struct tier_block **out)
{
    return store_read_block(store_of(t), tenant, id, out);
}

static int disk_put(struct tier *t, const char *tenant, struct tier_block *b, store_done done, void *ctx)
{
    return store_put_held(store_of(t), tenant, b, done, ctx);
}

static void disk_stats(struct tier *t, struct tier_stats *out)
{
    struct store_stats s;
    store_stats(store_of(t), &s);
    *out = (struct tier_stats){.blocks = s.blocks,
                               .bytes = s.segment_bytes,
                               .limit_bytes = s.limit_bytes,
                               .hits = s.hits,
                               .misses = s.misses,
                               .puts = s.puts,
                               .put_failures = s.put_failures,
                               .evictions = s.evictions,
                               .damaged = s.damaged,
                               .sick = s.writes_off};
}

static void disk_touch(struct tier *t, const char *tenant, const struct kv_block_id *chain, size_t count)
{
    store_touch(store_of(t), tenant, chain, count);
}

static void disk_destroy(struct tier *t)
{
    free(t);
}

struct tier *tier_disk_create(struct store *s)
{
    static const struct tier_ops ops = {disk_find,    disk_get,   disk_put, disk_stats,
                                        disk_destroy, disk_touch, NULL,     NULL};
    struct disk *d = calloc(1, sizeof *d);
    if (!d)
        return NULL;
    d->tier.ops = &ops;
    d->store = s;
    return &d->tier;
}
