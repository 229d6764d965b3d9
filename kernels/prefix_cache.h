/* prefix_cache: which pages hold which blocks: block id -> page, in memory. The cache holds one reference to each of its pages; a page that
 * nobody else references can be evicted (least recently used first, children before their parents). Keeps the quality of each block and the
 * layers [0, layers) that its page really holds. Bookkeeping only, bounded by the pool's size; one thread owns it together with the pool. */
#ifndef TANDEM_KERNELS_PREFIX_CACHE_H
#define TANDEM_KERNELS_PREFIX_CACHE_H
#include "kernels/page_pool.h"
#include "shared/kv_block.h"

struct prefix_cache;
struct prefix_entry {
    struct kv_block_id id;
    uint32_t page;
    struct kv_quality quality;
    uint32_t layers; /* layers [0, layers) are valid */
};
struct prefix_cache *prefix_cache_create(struct page_pool *pool);
void prefix_cache_destroy(struct prefix_cache *c); /* releases its references */
/* Borrowed until the next call; NULL: absent. Marks as recently used. */
const struct prefix_entry *prefix_cache_find(struct prefix_cache *c, const struct kv_block_id *id);
/* The same without the mark. */
const struct prefix_entry *prefix_cache_peek(const struct prefix_cache *c, const struct kv_block_id *id);
/* Insert (takes a reference to page), or replace an entry of lower quality or fewer layers; otherwise nothing. parent: zeros for the first block. */
int prefix_cache_put(struct prefix_cache *c, const struct prefix_entry *entry,
                     const struct kv_block_id *parent);
/* Take out the entry that goes next. The cache's reference to its page, the only one, is the caller's now. False: every page is in use. */
bool prefix_cache_evict(struct prefix_cache *c, struct prefix_entry *out);
/* Everything goes; a page that somebody else holds stays theirs. */
void prefix_cache_clear(struct prefix_cache *c);
/* page_pool_alloc, evicting as needed; PAGE_NONE when every page is in use. */
uint32_t prefix_cache_alloc(struct prefix_cache *c);
uint32_t prefix_cache_count(const struct prefix_cache *c);
/* Pages that an alloc could get: free + evictable. */
uint32_t prefix_cache_available(const struct prefix_cache *c);

#endif
