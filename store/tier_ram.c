/* tier_ram: blocks in host memory, as encoded as they are on disk, so that the same memory holds more of them than pages would.
 *
 * One table of chains and one list from the most to the least recently used, under one lock that is held for a hash, a few compares and a
 * few pointers: a look-up takes well under a microsecond. Readers hold blocks by reference, so evicting never waits for them; such a
 * block counts here no more, and goes with its last reader.
 *
 * Invariants: size <= limit_size; an entry's block is the one that was put last and that no better one was there to keep out. */
#include "shared/crypto.h"
#include "store/tier.h"
#include <pthread.h>
#include <stdlib.h>

#define BUCKETS_MIN  1024u
#define BUCKET_BYTES (256u << 10) /* a bucket for so many bytes of the limit */
#define BUCKETS_MAX  (1u << 20)
#define NAME_BUCKETS 1024u

struct tenant {
    struct tenant *next; /* of its bucket */
    char name[STORE_TENANT_MAX + 1];
};

struct entry {
    struct entry *chain; /* of its bucket */
    struct entry *newer, *older;
    const struct tenant *tenant;
    struct tier_block *block;
};

struct ram {
    struct tier tier; /* first */
    pthread_mutex_t lock;
    uint64_t seed, limit_size, size, count;
    uint32_t bucket_count; /* a power of two */
    struct entry **buckets;
    struct tenant *names[NAME_BUCKETS]; /* kept for the tier's life: there are few */
    struct entry ends;                  /* of the list: ends.older is the newest, ends.newer the oldest */
    struct tier_stats stats;
};

/* ---- look-up, with the lock --------------------------------------------------------------------------------- */

static const struct tenant *find_tenant(struct ram *m, const char *name, bool make)
{
    uint32_t hash = 2166136261u;
    for (const char *p = name; *p; p++)
        hash = (hash ^ (uint8_t)*p) * 16777619u;
    struct tenant **bucket = &m->names[hash % NAME_BUCKETS], *t = *bucket;
    while (t && strcmp(t->name, name) != 0)
        t = t->next;
    if (!t && make && strlen(name) <= STORE_TENANT_MAX && (t = calloc(1, sizeof *t))) {
        strcpy(t->name, name);
        t->next = *bucket;
        *bucket = t;
    }
    return t;
}

/* Devices know the key of their own namespace and so can choose ids: the seed keeps them from choosing buckets. */
static struct entry **bucket_of(struct ram *m, const struct kv_block_id *id)
{
    uint64_t x = (load_le64(id->bytes) ^ m->seed) * 0x9e3779b97f4a7c15u;
    return &m->buckets[(x ^ x >> 31) & (m->bucket_count - 1)];
}

/* The link that points to the entry, or to NULL at the chain's end. */
static struct entry **find_link(struct ram *m, const struct tenant *tenant, const struct kv_block_id *id)
{
    struct entry **link = bucket_of(m, id);
    while (*link && ((*link)->tenant != tenant || memcmp(&(*link)->block->block.id, id, sizeof *id) != 0))
        link = &(*link)->chain;
    return link;
}

static struct entry *find_entry(struct ram *m, const char *tenant, const struct kv_block_id *id)
{
    const struct tenant *t = find_tenant(m, tenant, false);
    return t ? *find_link(m, t, id) : NULL;
}

static void unlist(struct entry *e)
{
    e->newer->older = e->older;
    e->older->newer = e->newer;
}

static void list_first(struct ram *m, struct entry *e)
{
    e->newer = &m->ends;
    e->older = m->ends.older;
    e->older->newer = e;
    m->ends.older = e;
}

static void remove_link(struct ram *m, struct entry **link)
{
    struct entry *e = *link;
    *link = e->chain;
    unlist(e);
    m->size -= tier_block_size(e->block);
    m->count--;
    tier_block_release(e->block);
    free(e);
}

static void make_room(struct ram *m, uint64_t size)
{
    while (m->size + size > m->limit_size && m->ends.newer != &m->ends) {
        const struct entry *oldest = m->ends.newer;
        remove_link(m, find_link(m, oldest->tenant, &oldest->block->block.id));
        m->stats.evictions++;
    }
}

/* ---- the interface ------------------------------------------------------------------------------------------ */

static void count_look_up(struct ram *m, bool found)
{
    m->stats.hits += found;
    m->stats.misses += !found;
}

static int ram_find(struct tier *t, const char *tenant, const struct kv_block_id *id,
                    struct store_block_info *info)
{
    struct ram *m = (struct ram *)t;
    pthread_mutex_lock(&m->lock);
    const struct entry *e = find_entry(m, tenant, id);
    if (e) {
        const struct store_block *b = &e->block->block;
        *info = (struct store_block_info){b->quality, b->block_index, b->layer_begin, b->layer_end,
                                          (uint32_t)e->block->data_size};
    }
    count_look_up(m, e != NULL);
    pthread_mutex_unlock(&m->lock);
    return e ? 0 : -TD_ERR_NOTFOUND;
}

static int ram_get(struct tier *t, const char *tenant, const struct kv_block_id *id, struct tier_block **out)
{
    struct ram *m = (struct ram *)t;
    pthread_mutex_lock(&m->lock);
    struct entry *e = find_entry(m, tenant, id);
    if (e) {
        unlist(e);
        list_first(m, e);
        *out = tier_block_hold(e->block);
    }
    pthread_mutex_unlock(&m->lock);
    return e ? 0 : -TD_ERR_NOTFOUND;
}

/* With the lock; 0: it is in, or an equal or better one was. */
static int insert(struct ram *m, const char *tenant, struct tier_block *b)
{
    uint64_t size = tier_block_size(b);
    const struct tenant *t = find_tenant(m, tenant, true);
    if (!t)
        return -TD_ERR_NOMEM;
    struct entry **link = find_link(m, t, &b->block.id);
    if (*link) {
        const struct store_block *there = &(*link)->block->block;
        enum tier_choice choice = tier_choose(there->quality, there->layer_begin, there->layer_end,
                                              b->block.quality, b->block.layer_begin, b->block.layer_end);
        if (choice != TIER_REPLACE)
            return choice == TIER_KEEP ? 0 : -TD_ERR_EXISTS;
        remove_link(m, link);
    }
    if (size > m->limit_size)
        return -TD_ERR_FULL;
    struct entry *e = malloc(sizeof *e);
    if (!e)
        return -TD_ERR_NOMEM;
    make_room(m, size);
    struct entry **bucket = bucket_of(m, &b->block.id);
    *e = (struct entry){.chain = *bucket, .tenant = t, .block = tier_block_hold(b)};
    *bucket = e;
    list_first(m, e);
    m->size += size;
    m->count++;
    m->stats.puts++;
    return 0;
}

static int ram_put(struct tier *t, const char *tenant, struct tier_block *b, store_done done, void *ctx)
{
    struct ram *m = (struct ram *)t;
    pthread_mutex_lock(&m->lock);
    int rc = insert(m, tenant, b);
    m->stats.put_failures += rc < 0 && rc != -TD_ERR_EXISTS;
    pthread_mutex_unlock(&m->lock);
    if (rc == 0 && done)
        done(ctx, 0);
    return rc;
}

static int ram_drop(struct tier *t, const char *tenant, const struct kv_block_id *id)
{
    struct ram *m = (struct ram *)t;
    pthread_mutex_lock(&m->lock);
    const struct tenant *owner = find_tenant(m, tenant, false);
    struct entry **link = owner ? find_link(m, owner, id) : NULL;
    bool found = link && *link;
    if (found)
        remove_link(m, link);
    pthread_mutex_unlock(&m->lock);
    return found ? 0 : -TD_ERR_NOTFOUND;
}

static void ram_stats(struct tier *t, struct tier_stats *out)
{
    struct ram *m = (struct ram *)t;
    pthread_mutex_lock(&m->lock);
    *out = m->stats;
    out->present = true;
    out->blocks = m->count;
    out->bytes = m->size;
    out->limit_bytes = m->limit_size;
    pthread_mutex_unlock(&m->lock);
}

static void ram_destroy(struct tier *t)
{
    struct ram *m = (struct ram *)t;
    while (m->ends.newer != &m->ends) {
        const struct entry *e = m->ends.newer;
        remove_link(m, find_link(m, e->tenant, &e->block->block.id));
    }
    for (size_t i = 0; i < NAME_BUCKETS; i++)
        while (m->names[i]) {
            struct tenant *next = m->names[i]->next;
            free(m->names[i]);
            m->names[i] = next;
        }
    pthread_mutex_destroy(&m->lock);
    free(m->buckets);
    free(m);
}

struct tier *tier_ram_create(uint64_t limit_size)
{
    static const struct tier_ops ops = {ram_find, ram_get, ram_put, ram_drop, ram_stats, ram_destroy, NULL};
    struct ram *m = calloc(1, sizeof *m);
    uint32_t buckets = BUCKETS_MIN;
    while (buckets < BUCKETS_MAX && (uint64_t)buckets * BUCKET_BYTES < limit_size)
        buckets *= 2;
    if (!m || !(m->buckets = calloc(buckets, sizeof(struct entry *))) ||
        crypto_random(&m->seed, sizeof m->seed) < 0) {
        if (m)
            free(m->buckets);
        free(m);
        return NULL;
    }
    m->tier.ops = &ops;
    m->limit_size = limit_size;
    m->bucket_count = buckets;
    m->ends.newer = m->ends.older = &m->ends;
    pthread_mutex_init(&m->lock, NULL);
    return &m->tier;
}
