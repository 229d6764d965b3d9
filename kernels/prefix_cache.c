/* prefix_cache: see prefix_cache.h. One array of nodes, as many as the pool has pages, threaded three times: through the chains of a
 * hash table (ids are MAC outputs, so their first bytes hash themselves), through a list by time of use, and through a free list.
 *
 * Invariants
 *   1. A node in use holds exactly one reference to its page.
 *   2. `children` counts the nodes whose `parent` is this one; a node with children is never evicted, so a chain is lost from its end
 *      and what is left of it can still be found from its root.
 *   3. A node whose parent was not in the cache when it came has no parent. It is found like any other; it only does not protect one. */
#include "kernels/prefix_cache.h"
#include <stdlib.h>

#define NODE_NONE UINT32_MAX

struct node {
    struct prefix_entry entry;
    uint32_t parent, children;
    uint32_t next;           /* in its bucket, or in the free list */
    uint32_t newer, older;   /* in the list by time of use */
    bool used, pinned_below; /* pinned_below: working mark of prefix_cache_available */
};

struct prefix_cache {
    struct page_pool *pool;
    uint32_t capacity, count, bucket_mask;
    uint32_t free, newest, oldest;
    uint32_t *buckets;
    struct node *nodes;
};

struct prefix_cache *prefix_cache_create(struct page_pool *pool)
{
    struct prefix_cache *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->pool = pool;
    c->capacity = page_pool_count(pool);
    uint32_t bucket_count = 16;
    while (bucket_count < c->capacity && bucket_count < 1u << 30)
        bucket_count *= 2;
    c->bucket_mask = bucket_count - 1;
    c->buckets = malloc(bucket_count * sizeof *c->buckets);
    c->nodes = calloc((size_t)c->capacity + 1, sizeof *c->nodes);
    if (!c->buckets || !c->nodes) {
        free(c->buckets);
        free(c->nodes);
        free(c);
        return NULL;
    }
    for (uint32_t i = 0; i < bucket_count; i++)
        c->buckets[i] = NODE_NONE;
    for (uint32_t i = 0; i < c->capacity; i++)
        c->nodes[i].next = i + 1 < c->capacity ? i + 1 : NODE_NONE;
    c->free = c->capacity ? 0 : NODE_NONE;
    c->newest = c->oldest = NODE_NONE;
    return c;
}

void prefix_cache_destroy(struct prefix_cache *c)
{
    if (!c)
        return;
    for (uint32_t i = 0; i < c->capacity; i++)
        if (c->nodes[i].used)
            page_pool_release(c->pool, c->nodes[i].entry.page);
    free(c->buckets);
    free(c->nodes);
    free(c);
}

static uint32_t *bucket_of(const struct prefix_cache *c, const struct kv_block_id *id)
{
    return &c->buckets[load_le32(id->bytes) & c->bucket_mask];
}

static uint32_t lookup(const struct prefix_cache *c, const struct kv_block_id *id)
{
    uint32_t at = *bucket_of(c, id);
    while (at != NODE_NONE && memcmp(&c->nodes[at].entry.id, id, sizeof *id) != 0)
        at = c->nodes[at].next;
    return at;
}

/* --- the list by time of use ---------------------------------------------------------------------- */

static void list_remove(struct prefix_cache *c, uint32_t at)
{
    struct node *n = &c->nodes[at];
    *(n->newer == NODE_NONE ? &c->newest : &c->nodes[n->newer].older) = n->older;
    *(n->older == NODE_NONE ? &c->oldest : &c->nodes[n->older].newer) = n->newer;
}

static void list_push(struct prefix_cache *c, uint32_t at)
{
    struct node *n = &c->nodes[at];
    n->newer = NODE_NONE;
    n->older = c->newest;
    *(c->newest == NODE_NONE ? &c->oldest : &c->nodes[c->newest].newer) = at;
    c->newest = at;
}

static void touch(struct prefix_cache *c, uint32_t at)
{
    if (c->newest == at)
        return;
    list_remove(c, at);
    list_push(c, at);
}

/* --- nodes ---------------------------------------------------------------------------------------- */

/* The reference to its page is the caller's. */
static void node_free(struct prefix_cache *c, uint32_t at)
{
    struct node *n = &c->nodes[at];
    uint32_t *link = bucket_of(c, &n->entry.id);
    while (*link != at)
        link = &c->nodes[*link].next;
    *link = n->next;
    list_remove(c, at);
    if (n->parent != NODE_NONE)
        c->nodes[n->parent].children--;
    n->used = false;
    n->next = c->free;
    c->free = at;
    c->count--;
}

static bool is_zero(const struct kv_block_id *id)
{
    static const struct kv_block_id zero;
    return memcmp(id, &zero, sizeof zero) == 0;
}

static int insert(struct prefix_cache *c, const struct prefix_entry *entry, const struct kv_block_id *parent)
{
    if (c->free == NODE_NONE)
        return -TD_ERR_FULL; /* only if one page is put under two ids */
    uint32_t above = is_zero(parent) ? NODE_NONE : lookup(c, parent);
    uint32_t at = c->free;
    struct node *n = &c->nodes[at];
    c->free = n->next;
    uint32_t *bucket = bucket_of(c, &entry->id);
    *n = (struct node){.entry = *entry, .parent = above, .next = *bucket, .used = true};
    *bucket = at;
    if (above != NODE_NONE)
        c->nodes[above].children++;
    list_push(c, at);
    page_pool_share(c->pool, entry->page);
    c->count++;
    return 0;
}

/* --- interface ------------------------------------------------------------------------------------ */

const struct prefix_entry *prefix_cache_find(struct prefix_cache *c, const struct kv_block_id *id)
{
    uint32_t at = lookup(c, id);
    if (at == NODE_NONE)
        return NULL;
    touch(c, at);
    return &c->nodes[at].entry;
}

const struct prefix_entry *prefix_cache_peek(const struct prefix_cache *c, const struct kv_block_id *id)
{
    uint32_t at = lookup(c, id);
    return at == NODE_NONE ? NULL : &c->nodes[at].entry;
}

static bool replaces(const struct prefix_entry *new, const struct prefix_entry *old)
{
    if (kv_quality_better(new->quality, old->quality))
        return new->layers >= old->layers;
    return new->layers > old->layers && !kv_quality_better(old->quality, new->quality);
}

int prefix_cache_put(struct prefix_cache *c, const struct prefix_entry *entry,
                     const struct kv_block_id *parent)
{
    uint32_t at = lookup(c, &entry->id);
    if (at == NODE_NONE)
        return insert(c, entry, parent);
    touch(c, at);
    struct prefix_entry *old = &c->nodes[at].entry;
    if (replaces(entry, old)) {
        page_pool_share(c->pool, entry->page);
        page_pool_release(c->pool, old->page);
        *old = *entry;
    }
    return 0;
}

bool prefix_cache_evict(struct prefix_cache *c, struct prefix_entry *out)
{
    for (uint32_t at = c->oldest; at != NODE_NONE; at = c->nodes[at].newer) {
        const struct node *n = &c->nodes[at];
        if (n->children == 0 && page_pool_references(c->pool, n->entry.page) == 1) {
            *out = n->entry;
            node_free(c, at);
            return true;
        }
    }
    return false;
}

void prefix_cache_clear(struct prefix_cache *c)
{
    for (uint32_t i = 0; i < c->capacity; i++) /* first, so that none looks for a parent that has gone */
        c->nodes[i].parent = NODE_NONE;
    for (uint32_t at; (at = c->oldest) != NODE_NONE;) {
        node_free(c, at);
        page_pool_release(c->pool, c->nodes[at].entry.page);
    }
}

uint32_t prefix_cache_alloc(struct prefix_cache *c)
{
    struct prefix_entry victim;
    uint32_t page = page_pool_alloc(c->pool);
    if (page == PAGE_NONE && prefix_cache_evict(c, &victim))
        page = victim.page;
    return page;
}

uint32_t prefix_cache_count(const struct prefix_cache *c)
{
    return c->count;
}

/* A node can go once everything below it can: so each page that somebody holds keeps all its ancestors. */
uint32_t prefix_cache_available(const struct prefix_cache *c)
{
    for (uint32_t i = 0; i < c->capacity; i++)
        c->nodes[i].pinned_below = false;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < c->capacity; i++) {
        if (!c->nodes[i].used || page_pool_references(c->pool, c->nodes[i].entry.page) == 1)
            continue;
        for (uint32_t at = i; at != NODE_NONE && !c->nodes[at].pinned_below; at = c->nodes[at].parent) {
            c->nodes[at].pinned_below = true;
            kept++;
        }
    }
    return page_pool_free_count(c->pool) + c->count - kept;
}
