/* tier_ram: blocks in host memory, as encoded as they are on disk, so that the same memory holds more of them than pages would.
 *
 * A table of chains under one lock that is held for a hash and a few compares: a look-up takes well under a microsecond. Which blocks stay
 * is decided by policy.h. Readers hold blocks by reference, so evicting never waits for them; such a block counts here no more, and goes with its
 * last reader.
 *
 * Invariants: size <= limit_size; table and policy hold the same blocks; an entry's block is the one that was put last and that no better one
 * was there to keep out. */
#include "shared/crypto.h"
#include "store/policy.h"
#include "store/tier.h"
#include <pthread.h>
#include <stdlib.h>

#define BUCKETS_MIN  1024u
#define BUCKET_BYTES (256u << 10) /* a bucket for so many bytes of the limit */
#define BUCKETS_MAX  (1u << 20)
#define NAME_BUCKETS 1024u

struct tenant {
    struct tenant *next; /* of its bucket */
    uint32_t number;     /* for the policy */
    char name[STORE_TENANT_MAX + 1];
};

struct entry {
    struct entry *chain; /* of its bucket */
    const struct tenant *tenant;
    struct tier_block *block;
};

struct ram {
    struct tier tier; /* first */
    pthread_mutex_t lock;
    uint64_t seed, limit_size, tenant_quota_size, size, count;
    uint32_t bucket_count; /* a power of two */
    struct entry **buckets;
    struct tenant *names[NAME_BUCKETS]; /* kept for the tier's life: there are few */
    struct tenant **tenants;            /* [tenant_count], by number - 1 */
    uint32_t tenant_count;
    struct policy *policy;
    struct tier_stats stats;
};

/* ---- look-up, with the lock --------------------------------------------------------------------------------- */

static struct tenant *make_tenant(struct ram *m, struct tenant **bucket, const char *name)
{
    struct tenant **grown = realloc(m->tenants, (m->tenant_count + 1) * sizeof(struct tenant *));
    if (!grown)
        return NULL;
    m->tenants = grown;
    struct tenant *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    strcpy(t->name, name);
    t->next = *bucket;
    *bucket = t;
    m->tenants[m->tenant_count++] = t;
    t->number = m->tenant_count;
    if (m->tenant_quota_size)
        policy_set_tenant(m->policy, t->number, m->tenant_quota_size, 0);
    return t;
}

static struct tenant *find_tenant(struct ram *m, const char *name, bool make)
{
    uint32_t hash = 2166136261u;
    for (const char *p = name; *p; p++)
        hash = (hash ^ (uint8_t)*p) * 16777619u;
    struct tenant **bucket = &m->names[hash % NAME_BUCKETS], *t = *bucket;
    while (t && strcmp(t->name, name) != 0)
        t = t->next;
    return t || !make || strlen(name) > STORE_TENANT_MAX ? t : make_tenant(m, bucket, name);
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

/* The policy forgets it elsewhere. */
static void remove_link(struct ram *m, struct entry **link)
{
    struct entry *e = *link;
    *link = e->chain;
    m->size -= tier_block_size(e->block);
    m->count--;
    tier_block_release(e->block);
    free(e);
}

static uint64_t now_ms(void)
{
    return clock_mono_us() / 1000;
}

/* Let go what the policy says, for `incoming` (NULL: only to keep the limits). 0: it may come in. */
static int make_room(struct ram *m, const struct policy_block *incoming)
{
    struct policy_victim victim;
    int rc;
    while ((rc = policy_room(m->policy, incoming, now_ms(), &victim)) == 1) {
        struct entry **link = find_link(m, m->tenants[victim.tenant - 1], &victim.id);
        if (*link)
            remove_link(m, link);
        m->stats.evictions++;
    }
    return rc;
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
    if (e)
        *out = tier_block_hold(e->block);
    pthread_mutex_unlock(&m->lock);
    return e ? 0 : -TD_ERR_NOTFOUND;
}

static void add(struct ram *m, const struct tenant *t, struct entry *e, struct tier_block *b)
{
    struct entry **bucket = bucket_of(m, &b->block.id);
    *e = (struct entry){.chain = *bucket, .tenant = t, .block = tier_block_hold(b)};
    *bucket = e;
    m->size += tier_block_size(b);
    m->count++;
    m->stats.puts++;
}

/* A better copy takes the place of one that the policy has let in already. */
static void replace(struct ram *m, struct entry *e, struct tier_block *b)
{
    m->size += tier_block_size(b) - tier_block_size(e->block);
    tier_block_release(e->block);
    e->block = tier_block_hold(b);
    m->stats.puts++;
}

/* With the lock; 0: it is in, or an equal or better one was. -TD_ERR_NOSPACE: not worth what would have to go. */
static int insert(struct ram *m, const char *tenant, struct tier_block *b)
{
    const struct tenant *t = find_tenant(m, tenant, true);
    if (!t)
        return -TD_ERR_NOMEM;
    struct policy_block incoming = {.id = b->block.id,
                                    .parent = b->block.parent,
                                    .tenant = t->number,
                                    .size = (uint32_t)tier_block_size(b),
                                    .cost_s = tier_block_cost_s(b->block.block_index)};
    struct entry *there = *find_link(m, t, &b->block.id);
    if (there) {
        const struct store_block *s = &there->block->block;
        enum tier_choice choice = tier_choose(s->quality, s->layer_begin, s->layer_end, b->block.quality,
                                              b->block.layer_begin, b->block.layer_end);
        if (choice != TIER_REPLACE)
            return choice == TIER_KEEP ? 0 : -TD_ERR_EXISTS;
        replace(m, there, b);
        policy_insert(m->policy, &incoming, now_ms()); /* held already: only its size changes */
        make_room(m, NULL);
        return 0;
    }
    int rc = make_room(m, &incoming);
    struct entry *e = rc == 0 ? malloc(sizeof *e) : NULL;
    if (rc == 0 && !e)
        rc = -TD_ERR_NOMEM;
    rc = rc < 0 ? rc : policy_insert(m->policy, &incoming, now_ms());
    if (rc < 0) {
        free(e);
        return rc;
    }
    add(m, t, e, b);
    return 0;
}

static int ram_put(struct tier *t, const char *tenant, struct tier_block *b, store_done done, void *ctx)
{
    struct ram *m = (struct ram *)t;
    pthread_mutex_lock(&m->lock);
    int rc = insert(m, tenant, b);
    m->stats.put_failures += rc == -TD_ERR_NOMEM;
    pthread_mutex_unlock(&m->lock);
    if (rc == 0 && done)
        done(ctx, 0);
    return rc;
}

static void ram_stats(struct tier *t, struct tier_stats *out)
{
    struct ram *m = (struct ram *)t;
    pthread_mutex_lock(&m->lock);
    *out = m->stats;
    out->blocks = m->count;
    out->bytes = m->size;
    out->limit_bytes = m->limit_size;
    struct policy_stats policy;
    policy_stats(m->policy, &policy);
    out->policy_bytes = policy.memory_size;
    pthread_mutex_unlock(&m->lock);
}

static void ram_touch(struct tier *t, const char *tenant, const struct kv_block_id *chain, size_t count)
{
    struct ram *m = (struct ram *)t;
    pthread_mutex_lock(&m->lock);
    const struct tenant *owner = find_tenant(m, tenant, true);
    if (owner)
        policy_touch(m->policy, owner->number, chain, count, now_ms());
    pthread_mutex_unlock(&m->lock);
}

static void ram_drop_tenant(struct tier *t, const char *tenant)
{
    struct ram *m = (struct ram *)t;
    pthread_mutex_lock(&m->lock);
    const struct tenant *owner = find_tenant(m, tenant, false);
    for (size_t i = 0; i < m->bucket_count && owner; i++)
        for (struct entry **link = &m->buckets[i]; *link;) {
            if ((*link)->tenant != owner) {
                link = &(*link)->chain;
                continue;
            }
            policy_forget(m->policy, owner->number, &(*link)->block->block.id);
            remove_link(m, link);
        }
    pthread_mutex_unlock(&m->lock);
}

static void ram_destroy(struct tier *t)
{
    struct ram *m = (struct ram *)t;
    for (size_t i = 0; m->buckets && i < m->bucket_count; i++)
        while (m->buckets[i])
            remove_link(m, &m->buckets[i]);
    for (uint32_t i = 0; i < m->tenant_count; i++)
        free(m->tenants[i]);
    pthread_mutex_destroy(&m->lock);
    policy_destroy(m->policy);
    free(m->tenants);
    free(m->buckets);
    free(m);
}

struct tier *tier_ram_create(uint64_t limit_size, uint64_t tenant_quota_size)
{
    static const struct tier_ops ops = {ram_find,    ram_get,   ram_put,         ram_stats,
                                        ram_destroy, ram_touch, ram_drop_tenant, NULL};
    struct ram *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->tier.ops = &ops;
    m->limit_size = limit_size;
    m->tenant_quota_size = tenant_quota_size;
    pthread_mutex_init(&m->lock, NULL);
    m->bucket_count = BUCKETS_MIN;
    while (m->bucket_count < BUCKETS_MAX && (uint64_t)m->bucket_count * BUCKET_BYTES < limit_size)
        m->bucket_count *= 2;
    m->buckets = calloc(m->bucket_count, sizeof(struct entry *));
    if (!m->buckets || crypto_random(&m->seed, sizeof m->seed) < 0 ||
        policy_create(&(struct policy_config){.limit_size = limit_size}, &m->policy) < 0) {
        ram_destroy(&m->tier);
        return NULL;
    }
    return &m->tier;
}
