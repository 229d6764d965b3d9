/* local_kv: see local_kv.h. */
#include "edge/local_kv.h"
#include <pthread.h>
#include <stdlib.h>

struct local_kv {
    pthread_mutex_t lock; /* of pool and cache */
    struct page_pool *pool;
    struct prefix_cache *cache;
    struct kv_disk *disk; /* constant; NULL: none */
};

struct local_kv *local_kv_create(uint32_t page_count)
{
    struct local_kv *kv = calloc(1, sizeof *kv);
    if (!kv)
        return NULL;
    pthread_mutex_init(&kv->lock, NULL);
    kv->pool = page_pool_create(page_count);
    kv->cache = kv->pool ? prefix_cache_create(kv->pool) : NULL;
    if (!kv->cache) {
        local_kv_destroy(kv);
        return NULL;
    }
    return kv;
}

void local_kv_destroy(struct local_kv *kv)
{
    if (!kv)
        return;
    if (kv->cache)
        prefix_cache_destroy(kv->cache);
    if (kv->pool)
        page_pool_destroy(kv->pool);
    pthread_mutex_destroy(&kv->lock);
    free(kv);
}

void local_kv_set_disk(struct local_kv *kv, struct kv_disk *disk)
{
    kv->disk = disk;
}

struct kv_disk *local_kv_disk(const struct local_kv *kv)
{
    return kv->disk;
}

void local_kv_chain(const uint8_t principal_key[32], const uint8_t fingerprint[TD_HASH_SIZE],
                    const uint8_t layout_hash[TD_HASH_SIZE], const struct kv_block_id *previous,
                    const int32_t *ids, uint32_t count, struct kv_block_id *out)
{
    static const struct kv_block_id root;
    const struct kv_block_id *parent = previous ? previous : &root;
    for (uint32_t i = 0; i < count / KV_BLOCK_TOKENS; i++) {
        kv_block_id_next(principal_key, parent, fingerprint, layout_hash, ids + (size_t)i * KV_BLOCK_TOKENS,
                         &out[i]);
        parent = &out[i];
    }
}

/* Under the lock. */
static const struct prefix_entry *find(struct local_kv *kv, const struct kv_block_id *id, uint32_t layers)
{
    const struct prefix_entry *entry = prefix_cache_find(kv->cache, id);
    return entry && entry->layers >= layers ? entry : NULL;
}

uint32_t local_kv_depths(struct local_kv *kv, const struct kv_block_id *chain, uint32_t block_count,
                         uint16_t *depths, uint32_t *unread)
{
    uint32_t held = 0, depth = UINT16_MAX;
    *unread = 0;
    pthread_mutex_lock(&kv->lock);
    for (uint32_t i = 0; i < block_count; i++) {
        const struct prefix_entry *entry = depth ? prefix_cache_find(kv->cache, &chain[i]) : NULL;
        uint32_t layers = entry ? entry->layers : 0;
        uint32_t stored = depth > layers && kv->disk ? kv_disk_layers(kv->disk, &chain[i]) : 0;
        depth = TD_MIN(depth, TD_MAX(layers, stored));
        depths[i] = (uint16_t)depth;
        held += depth > 0;
        *unread += depth > layers;
    }
    pthread_mutex_unlock(&kv->lock);
    return held;
}

uint32_t local_kv_held(struct local_kv *kv, const struct kv_block_id *chain, uint32_t block_count,
                       uint32_t layers)
{
    uint32_t held = 0;
    pthread_mutex_lock(&kv->lock);
    while (held < block_count && find(kv, &chain[held], layers))
        held++;
    pthread_mutex_unlock(&kv->lock);
    return held;
}

uint32_t local_kv_take(struct local_kv *kv, const struct kv_block_id *chain, uint32_t block_count,
                       uint32_t layers, uint32_t *pages)
{
    uint32_t taken = 0;
    pthread_mutex_lock(&kv->lock);
    for (; taken < block_count; taken++) {
        const struct prefix_entry *entry = find(kv, &chain[taken], layers);
        if (!entry)
            break;
        pages[taken] = entry->page;
        page_pool_share(kv->pool, entry->page);
    }
    pthread_mutex_unlock(&kv->lock);
    return taken;
}

uint32_t local_kv_alloc(struct local_kv *kv)
{
    pthread_mutex_lock(&kv->lock);
    uint32_t page = prefix_cache_alloc(kv->cache);
    pthread_mutex_unlock(&kv->lock);
    return page;
}

void local_kv_release(struct local_kv *kv, uint32_t page)
{
    pthread_mutex_lock(&kv->lock);
    page_pool_release(kv->pool, page);
    pthread_mutex_unlock(&kv->lock);
}

uint32_t local_kv_used_until(struct local_kv *kv)
{
    pthread_mutex_lock(&kv->lock);
    uint32_t used = page_pool_used_until(kv->pool);
    pthread_mutex_unlock(&kv->lock);
    return used;
}

int local_kv_publish(struct local_kv *kv, const struct kv_block_id *chain, uint32_t index, uint32_t page,
                     uint32_t layers, enum kv_numerics numerics)
{
    static const struct kv_block_id root;
    struct prefix_entry entry = {
        .id = chain[index],
        .page = page,
        .layers = layers,
        .quality = {.fidelity = KV_L0, .numerics = (uint8_t)numerics, .provenance = KV_FROM_DEVICE},
    };
    pthread_mutex_lock(&kv->lock);
    int rc = prefix_cache_put(kv->cache, &entry, index > 0 ? &chain[index - 1] : &root);
    pthread_mutex_unlock(&kv->lock);
    return rc;
}
