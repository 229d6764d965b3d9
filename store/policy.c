/* policy: see policy.h for the rules, policy_learn.h for how value is learned.
 *
 * One entry a block, held or ghost, found by a hash table. All entries lie in one list by last use; its parts are the stages of
 * policy_learn.h, and as time passes the oldest of each part moves on to the next. Leaves that may go lie in a heap for each kind,
 * oldest first, once for all tenants and once for their own: within a kind the longest unused is taken to be the least valuable, so
 * the next victim is the least valuable of 16 roots. Ghosts lie in a heap of their own, of which the oldest is forgotten.
 *
 *        touch (unknown)            insert               evict, forget
 *   free ───────────────▶ ghost ◀──────────────▶ held ─────────────────▶ ghost ──▶ free (too many)
 *
 * A ghost that has held children (its own block was forgotten, or comes later) stays, outside the heap of ghosts.
 * Why a heap for each kind and not one by value: values change whenever time passes, order by last use does not. */
#include "store/policy_internal.h"
#include "shared/status.h"
#include <stdlib.h>

#define BLOCKS_MAX_DEFAULT (1u << 20)
/* so no block of a chain is the oldest ghost while the chain is gone through */
#define CHAIN_MAX (POLICY_GHOSTS_MIN / 2)

/* ---- entries ---------------------------------------------------------------------------------------------- */

/* Linear hashing: of the buckets that there is room for, as many are used as entries were ever made, so that memory is touched, and counts, as entries
 * come, and no call pays for moving them all. bucket_mask: the least 2^n - 1 that reaches the last of those used. */
static uint32_t *bucket_of(const struct policy *p, uint32_t tenant, const struct kv_block_id *id)
{
    uint64_t x = (load_le64(id->bytes) ^ load_le64(id->bytes + 8) ^ tenant) * 0x9e3779b97f4a7c15u;
    uint32_t i = (uint32_t)(x ^ x >> 32) & p->bucket_mask;
    return &p->buckets[i < p->bucket_count ? i : i & p->bucket_mask >> 1];
}

/* One bucket more, which takes its part of another. */
static void add_bucket(struct policy *p)
{
    uint32_t added = p->bucket_count++;
    if (added > p->bucket_mask)
        p->bucket_mask = 2 * p->bucket_mask + 1;
    uint32_t *link = &p->buckets[added & p->bucket_mask >> 1];
    while (*link) {
        uint32_t index = *link;
        struct policy_entry *e = entry_at(p, index);
        if (bucket_of(p, e->tenant, &e->id) != &p->buckets[added]) {
            link = &e->hash_next;
            continue;
        }
        *link = e->hash_next;
        e->hash_next = p->buckets[added];
        p->buckets[added] = index;
    }
}

static uint32_t find(const struct policy *p, uint32_t tenant, const struct kv_block_id *id)
{
    uint32_t i = *bucket_of(p, tenant, id);
    while (i && !(entry_at(p, i)->tenant == tenant && memcmp(&entry_at(p, i)->id, id, sizeof *id) == 0))
        i = entry_at(p, i)->hash_next;
    return i;
}

static bool is_zero(const struct kv_block_id *id)
{
    static const struct kv_block_id ZERO;
    return memcmp(id, &ZERO, sizeof ZERO) == 0;
}

static struct policy_tenant *tenant_of(const struct policy *p, uint32_t tenant)
{
    return p->tenants[tenant < POLICY_TENANTS_MAX ? tenant : 0];
}

/* The tenant's state, made when it is first met; NULL without memory. */
struct policy_tenant *policy_tenant_make(struct policy *p, uint32_t tenant)
{
    uint32_t at = tenant < POLICY_TENANTS_MAX ? tenant : 0;
    if (!p->tenants[at]) {
        p->tenants[at] = calloc(1, sizeof *p->tenants[at]);
        if (!p->tenants[at])
            return NULL;
        p->memory_size += sizeof *p->tenants[at];
        p->tenants_top = TD_MAX(p->tenants_top, at + 1);
    }
    return p->tenants[at];
}

/* ---- list by last use, stages ----------------------------------------------------------------------------- */

/* Put an entry behind `newer` (0: at the head) as used now. Keep to the order of sequences. */
static void list_add(struct policy *p, uint32_t index, uint32_t newer)
{
    struct policy_entry *e = entry_at(p, index);
    e->newer = newer;
    e->older = newer ? entry_at(p, newer)->older : p->newest;
    if (e->older)
        entry_at(p, e->older)->newer = index;
    if (newer)
        entry_at(p, newer)->older = index;
    else
        p->newest = index;
    e->stage = 0;
    if (p->stage_oldest[0] == newer) /* also when both are 0: nothing is in the first stage */
        p->stage_oldest[0] = index;
}

static void leave_stage(struct policy *p, uint32_t index)
{
    const struct policy_entry *e = entry_at(p, index);
    if (p->stage_oldest[e->stage] == index)
        p->stage_oldest[e->stage] = e->newer && entry_at(p, e->newer)->stage == e->stage ? e->newer : 0;
}

static void list_remove(struct policy *p, uint32_t index)
{
    struct policy_entry *e = entry_at(p, index);
    leave_stage(p, index);
    if (e->older)
        entry_at(p, e->older)->newer = e->newer;
    if (e->newer)
        entry_at(p, e->newer)->older = e->older;
    else
        p->newest = e->older;
}

/* Time has come to now_ms: entries move on through the stages. */
void policy_advance(struct policy *p, uint64_t now_ms)
{
    if (now_ms <= p->now_ms)
        return;
    p->now_ms = now_ms;
    for (uint8_t s = 0; s + 1 < LEARN_STAGES; s++) {
        uint32_t index;
        while ((index = p->stage_oldest[s]) != 0 &&
               now_ms - entry_at(p, index)->used_ms >= p->learn.end_ms[s]) {
            struct policy_entry *e = entry_at(p, index);
            leave_stage(p, index);
            e->stage = (uint8_t)(s + 1);
            if (!p->stage_oldest[s + 1])
                p->stage_oldest[s + 1] = index;
            if (e->uses)
                learn_enter(&p->learn, e->kind, e->stage);
        }
    }
}

/* ---- heaps of leaves and ghosts --------------------------------------------------------------------------- */

/* The tenant's heap that a held entry is in: leaves by whether they could be demoted; of the others only those that could. */
static uint32_t *tenant_root(const struct policy *p, const struct policy_entry *e)
{
    enum policy_set set = e->children ? SET_INNER : e->lossless ? SET_LEAVES_LOSSLESS : SET_LEAVES;
    return &tenant_of(p, e->tenant)->sets[set].root[e->kind];
}

void policy_unqueue(struct policy *p, uint32_t index)
{
    struct policy_entry *e = entry_at(p, index);
    if (!e->queued)
        return;
    e->queued = false;
    if (!e->held) {
        policy_heap_remove(p, ORDER_ALL, &p->ghost_root, index);
        return;
    }
    if (!e->children)
        policy_heap_remove(p, ORDER_ALL, &p->leaves.root[e->kind], index);
    policy_heap_remove(p, ORDER_TENANT, tenant_root(p, e), index);
}

/* A block with held children is looked for only to demote it. */
static bool is_queued_nowhere(const struct policy *p, const struct policy_entry *e)
{
    if (!e->held)
        return e->children != 0;
    return e->pinned || e->named || (e->children && !(e->lossless && tenant_of(p, e->tenant)->demotes));
}

void policy_queue(struct policy *p, uint32_t index)
{
    struct policy_entry *e = entry_at(p, index);
    if (e->queued || is_queued_nowhere(p, e))
        return;
    e->queued = true;
    if (!e->held) {
        policy_heap_add(p, ORDER_ALL, &p->ghost_root, index);
        return;
    }
    if (!e->children)
        policy_heap_add(p, ORDER_ALL, &p->leaves.root[e->kind], index);
    policy_heap_add(p, ORDER_TENANT, tenant_root(p, e), index);
}

static void release_entry(struct policy *p, uint32_t index)
{
    struct policy_entry *e = entry_at(p, index);
    uint32_t *link = bucket_of(p, e->tenant, &e->id);
    policy_unqueue(p, index);
    list_remove(p, index);
    while (*link != index)
        link = &entry_at(p, *link)->hash_next;
    *link = e->hash_next;
    e->hash_next = p->free_entry;
    p->free_entry = index;
    p->ghosts--;
}

static void trim_ghosts(struct policy *p)
{
    while (p->ghost_root && p->ghosts > TD_MAX(POLICY_GHOSTS_MIN, p->blocks))
        release_entry(p, p->ghost_root);
}

/* An unused entry: a free one, a new one, or the oldest ghost's. 0 without memory. */
static uint32_t take_entry(struct policy *p)
{
    if (!p->free_entry && p->entries_made == p->entries_max && p->ghost_root)
        release_entry(p, p->ghost_root);
    uint32_t index = p->free_entry;
    if (index) {
        p->free_entry = entry_at(p, index)->hash_next;
        return index;
    }
    if (p->entries_made == p->entries_max)
        return 0;
    index = p->entries_made;
    struct policy_entry **page = &p->pages[index / ENTRIES_A_PAGE];
    if (!*page) {
        *page = malloc(ENTRIES_A_PAGE * sizeof **page);
        if (!*page)
            return 0;
        p->memory_size += ENTRIES_A_PAGE * sizeof **page;
    }
    p->entries_made++;
    if (p->bucket_count < p->entries_made)
        add_bucket(p);
    return index;
}

/* A ghost of which nothing is known yet, used now, in the list behind `newer`; not queued. */
static uint32_t make_entry(struct policy *p, uint32_t tenant, const struct kv_block_id *id, uint32_t newer)
{
    uint32_t index = take_entry(p);
    if (!index)
        return 0;
    struct policy_entry *e = entry_at(p, index);
    uint32_t *bucket = bucket_of(p, tenant, id);
    *e = (struct policy_entry){.id = *id,
                               .tenant = tenant,
                               .used_ms = p->now_ms,
                               .sequence = ++p->sequence,
                               .request = p->request,
                               .hash_next = *bucket};
    *bucket = index;
    list_add(p, index, newer);
    p->ghosts++;
    return index;
}

/* The turn of the conversation in which a block first seen now belongs: one more than its parent's unless both came together. */
static uint8_t generation_behind(const struct policy *p, const struct policy_entry *parent)
{
    if (!parent)
        return 0;
    return (uint8_t)TD_MIN(parent->generation + (parent->request != p->request), LEARN_GENERATIONS - 1);
}

/* ---- touch ------------------------------------------------------------------------------------------------ */

/* One block of a chain is used now; `parent` was just before it (0: it is the first). Its index, or 0. */
static uint32_t touch_block(struct policy *p, uint32_t tenant, const struct kv_block_id *id, uint32_t parent,
                            bool last, uint64_t sequence)
{
    uint32_t index = find(p, tenant, id);
    if (index) {
        struct policy_entry *e = entry_at(p, index);
        if (e->sequence >= sequence)
            return 0; /* twice in one chain: no chain of ours */
        policy_unqueue(p, index);
        list_remove(p, index);
        if (e->uses)
            learn_use(&p->learn, e->kind, e->stage);
        e->used_ms = p->now_ms;
        list_add(p, index, parent);
    } else {
        index = make_entry(p, tenant, id, parent);
        if (!index)
            return 0;
        entry_at(p, index)->generation = generation_behind(p, parent ? entry_at(p, parent) : NULL);
    }
    struct policy_entry *e = entry_at(p, index);
    e->sequence = sequence;
    e->uses += e->uses < UINT32_MAX;
    e->kind = learn_kind(e->uses > 1, e->generation, last);
    learn_enter(&p->learn, e->kind, 0);
    policy_queue(p, index);
    return index;
}

size_t policy_touch(struct policy *p, uint32_t tenant, const struct kv_block_id *chain, size_t count,
                    uint64_t now_ms)
{
    size_t run = 0;
    bool running = true;
    policy_advance(p, now_ms);
    learn_touch(&p->learn);
    p->request++;
    p->touched += count;
    count = TD_MIN(count, CHAIN_MAX);
    uint64_t end = p->sequence + count;
    uint32_t before = 0;
    for (size_t i = 0; i < count; i++) {
        before = touch_block(p, tenant, &chain[i], before, i + 1 == count, end - i);
        if (!before)
            break;
        running = running && entry_at(p, before)->held;
        run += running;
    }
    p->sequence = end;
    p->hits += run;
    trim_ghosts(p);
    return run;
}

/* ---- hold and let go -------------------------------------------------------------------------------------- */

static void let_go(struct policy *p, uint32_t index)
{
    struct policy_entry *e = entry_at(p, index);
    uint32_t parent = e->parent;
    policy_unqueue(p, index);
    p->pinned -= e->pinned;
    e->held = e->pinned = e->named = false;
    e->parent = 0;
    p->blocks--;
    p->ghosts++;
    p->size -= e->size;
    tenant_of(p, e->tenant)->size -= e->size;
    policy_queue(p, index);
    if (parent) {
        policy_unqueue(p, parent);
        entry_at(p, parent)->children--;
        policy_queue(p, parent);
    }
}

static void hold(struct policy *p, uint32_t index, uint32_t parent, const struct policy_block *block)
{
    struct policy_entry *e = entry_at(p, index);
    if (!e->uses) { /* no request has asked for it */
        list_remove(p, index);
        e->used_ms = p->now_ms;
        e->sequence = ++p->sequence;
        list_add(p, index, 0);
        e->uses = 1;
        e->request = p->request;
        e->generation = generation_behind(p, parent ? entry_at(p, parent) : NULL);
        e->kind = learn_kind(false, e->generation, false);
        learn_enter(&p->learn, e->kind, 0);
    }
    e->held = true;
    e->lossless = block->lossless;
    e->size = block->size;
    e->cost_s = block->cost_s;
    e->parent = parent;
    if (parent) {
        policy_unqueue(p, parent);
        entry_at(p, parent)->children++;
        policy_queue(p, parent);
    }
    p->ghosts--;
    p->blocks++;
    p->size += e->size;
    tenant_of(p, e->tenant)->size += e->size;
    policy_queue(p, index);
}

static bool has_parent(const struct policy_block *b)
{
    return !is_zero(&b->parent) && memcmp(&b->parent, &b->id, sizeof b->id) != 0;
}

int policy_insert(struct policy *p, const struct policy_block *block, uint64_t now_ms)
{
    policy_advance(p, now_ms);
    struct policy_tenant *tenant = policy_tenant_make(p, block->tenant);
    if (!tenant)
        return -TD_ERR_NOMEM;
    uint32_t index = find(p, block->tenant, &block->id), parent = 0;
    if (index && entry_at(p, index)->held) {
        struct policy_entry *e = entry_at(p, index);
        p->size += (uint64_t)block->size - e->size;
        tenant->size += (uint64_t)block->size - e->size;
        policy_unqueue(p, index);
        e->size = block->size;
        e->cost_s = block->cost_s;
        e->lossless = block->lossless;
        e->named = false;
        policy_queue(p, index);
        return 0;
    }
    if (p->blocks == p->blocks_max)
        return -TD_ERR_FULL;
    if (index)
        policy_unqueue(p, index); /* so that it is not the ghost which makes room for its parent */
    else
        index = make_entry(p, block->tenant, &block->id, 0);
    if (index && has_parent(block)) {
        parent = find(p, block->tenant, &block->parent);
        parent = parent ? parent : make_entry(p, block->tenant, &block->parent, 0);
    }
    if (!index || (has_parent(block) && !parent)) {
        if (index)
            policy_queue(p, index);
        return -TD_ERR_NOMEM;
    }
    hold(p, index, parent, block);
    p->inserted++;
    trim_ghosts(p);
    return 0;
}

void policy_forget(struct policy *p, uint32_t tenant, const struct kv_block_id *id)
{
    uint32_t index = find(p, tenant, id);
    if (index && entry_at(p, index)->held)
        let_go(p, index);
    trim_ghosts(p);
}

int policy_pin(struct policy *p, uint32_t tenant, const struct kv_block_id *id, bool pinned)
{
    uint32_t index = find(p, tenant, id);
    if (!index || !entry_at(p, index)->held)
        return -TD_ERR_NOTFOUND;
    struct policy_entry *e = entry_at(p, index);
    p->pinned += (uint32_t)pinned - e->pinned;
    policy_unqueue(p, index);
    e->pinned = pinned;
    policy_queue(p, index);
    return 0;
}

void policy_spare(struct policy *p, uint32_t tenant, const struct kv_block_id *id)
{
    uint32_t index = find(p, tenant, id);
    if (!index || !entry_at(p, index)->held)
        return;
    policy_unqueue(p, index);
    entry_at(p, index)->named = true;
}

/* ---- room ------------------------------------------------------------------------------------------------- */

double policy_value(const struct policy *p, uint32_t index)
{
    const struct policy_entry *e = entry_at(p, index);
    return p->learn.value[e->kind][e->stage] * e->cost_s / e->size;
}

static double incoming_value(const struct policy *p, const struct policy_block *b, uint32_t parent)
{
    uint32_t index = find(p, b->tenant, &b->id);
    uint8_t kind, stage = 0;
    if (index && entry_at(p, index)->uses) {
        kind = entry_at(p, index)->kind;
        stage = entry_at(p, index)->stage;
    } else {
        kind = learn_kind(false, generation_behind(p, parent ? entry_at(p, parent) : NULL), false);
    }
    return p->learn.value[kind][stage] * b->cost_s / b->size;
}

uint32_t policy_least_valuable(const struct policy *p, const struct policy_heads *a,
                               const struct policy_heads *b)
{
    uint32_t least = 0;
    double least_value = 0;
    for (int k = 0; k < LEARN_KINDS; k++) {
        uint32_t index = a->root[k], other = b ? b->root[k] : 0;
        if (other && (!index || entry_at(p, other)->sequence < entry_at(p, index)->sequence))
            index = other;
        if (!index)
            continue;
        double value = policy_value(p, index);
        if (!least || value < least_value ||
            (value == least_value && entry_at(p, index)->sequence < entry_at(p, least)->sequence)) {
            least = index;
            least_value = value;
        }
    }
    return least;
}

static uint32_t expired_of(const struct policy *p, const struct policy_tenant *t, uint32_t parent)
{
    for (int k = 0; t && t->ttl_ms && k < LEARN_KINDS * SET_INNER; k++) {
        uint32_t index = t->sets[k / LEARN_KINDS].root[k % LEARN_KINDS];
        if (index && index != parent && p->now_ms - entry_at(p, index)->used_ms >= t->ttl_ms)
            return index;
    }
    return 0;
}

/* All tenants when there is time (`all`), else the next one in turn. */
static uint32_t find_expired(struct policy *p, bool all, uint32_t parent)
{
    uint32_t index = 0;
    for (uint32_t i = 0; i < (all ? p->tenants_top : TD_MIN(p->tenants_top, 1u)) && !index; i++) {
        p->ttl_turn = p->ttl_turn + 1 < p->tenants_top ? p->ttl_turn + 1 : 0;
        index = expired_of(p, p->tenants[p->ttl_turn], parent);
    }
    return index;
}

static int evict(struct policy *p, uint32_t index, bool expired, struct policy_victim *out)
{
    const struct policy_entry *e = entry_at(p, index);
    *out = (struct policy_victim){.id = e->id, .tenant = e->tenant, .size = e->size};
    let_go(p, index);
    trim_ghosts(p);
    p->evicted++;
    p->expired += expired;
    return 1;
}

/* The tenant that is over its quota; `incoming`'s counts with it. */
static struct policy_tenant *over_quota(const struct policy *p, const struct policy_block *incoming)
{
    if (incoming) {
        struct policy_tenant *t = tenant_of(p, incoming->tenant);
        return t && t->quota_size && t->size + incoming->size > t->quota_size ? t : NULL;
    }
    for (uint32_t i = 0; i < p->tenants_top; i++)
        if (p->tenants[i] && p->tenants[i]->quota_size && p->tenants[i]->size > p->tenants[i]->quota_size)
            return p->tenants[i];
    return NULL;
}

int policy_room(struct policy *p, const struct policy_block *incoming, uint64_t now_ms,
                struct policy_victim *out)
{
    uint32_t parent = 0, index;
    uint64_t size = incoming ? incoming->size : 0;
    policy_advance(p, now_ms);
    if (incoming) {
        if (policy_holds(p, incoming->tenant, &incoming->id))
            return 0;
        parent = has_parent(incoming) ? find(p, incoming->tenant, &incoming->parent) : 0;
        if (size > p->limit_size || (has_parent(incoming) && !(parent && entry_at(p, parent)->held))) {
            p->refused++;
            return -TD_ERR_NOSPACE;
        }
    }
    if ((index = find_expired(p, !incoming, parent)) != 0)
        return evict(p, index, true, out);
    const struct policy_tenant *over = over_quota(p, incoming);
    if (!over && p->size + size <= p->limit_size && p->blocks + (incoming != NULL) <= p->blocks_max)
        return 0;
    index = over ? policy_least_valuable(p, &over->sets[SET_LEAVES], &over->sets[SET_LEAVES_LOSSLESS])
                 : policy_least_valuable(p, &p->leaves, NULL);
    if (index && !incoming)
        return evict(p, index, false, out);
    if (index && index != parent && policy_value(p, index) < incoming_value(p, incoming, parent))
        return evict(p, index, false, out);
    p->refused += incoming != NULL;
    return -TD_ERR_NOSPACE;
}

/* ---- the whole -------------------------------------------------------------------------------------------- */

bool policy_holds(const struct policy *p, uint32_t tenant, const struct kv_block_id *id)
{
    uint32_t index = find(p, tenant, id);
    return index && entry_at(p, index)->held;
}

int policy_set_tenant(struct policy *p, uint32_t tenant, uint64_t quota_size, uint64_t ttl_ms)
{
    if (tenant == 0 || tenant >= POLICY_TENANTS_MAX)
        return -TD_ERR_LIMIT;
    struct policy_tenant *t = policy_tenant_make(p, tenant);
    if (!t)
        return -TD_ERR_NOMEM;
    t->quota_size = quota_size;
    t->ttl_ms = ttl_ms;
    return 0;
}

void policy_set_limit(struct policy *p, uint64_t limit_size)
{
    p->limit_size = limit_size;
}

void policy_stats(const struct policy *p, struct policy_stats *out)
{
    *out = (struct policy_stats){
        .limit_size = p->limit_size,
        .size = p->size,
        .blocks = p->blocks,
        .ghosts = p->ghosts,
        .pinned = p->pinned,
        .touched = p->touched,
        .hits = p->hits,
        .inserted = p->inserted,
        .refused = p->refused,
        .evicted = p->evicted,
        .expired = p->expired,
        .memory_size = p->memory_size + p->bucket_count * sizeof *p->buckets,
    };
}

int policy_create(const struct policy_config *config, struct policy **out)
{
    struct policy *p = calloc(1, sizeof *p);
    *out = NULL;
    if (!p)
        return -TD_ERR_NOMEM;
    p->limit_size = config->limit_size;
    p->blocks_max = config->blocks_max ? config->blocks_max : BLOCKS_MAX_DEFAULT;
    p->entries_made = 1; /* 0 is none */
    p->entries_max = 2 * p->blocks_max + POLICY_GHOSTS_MIN + 1;
    size_t page_count = p->entries_max / ENTRIES_A_PAGE + 1;
    size_t bucket_count = p->entries_max + 1; /* at most */
    p->bucket_count = 1;
    p->pages = calloc(page_count, sizeof *p->pages);
    p->buckets = calloc(bucket_count, sizeof *p->buckets);
    p->tenants = calloc(POLICY_TENANTS_MAX, sizeof *p->tenants);
    p->memory_size = sizeof *p + page_count * sizeof *p->pages + POLICY_TENANTS_MAX * sizeof *p->tenants;
    if (!p->pages || !p->buckets || !p->tenants) {
        policy_destroy(p);
        return -TD_ERR_NOMEM;
    }
    learn_init(&p->learn);
    *out = p;
    return 0;
}

void policy_destroy(struct policy *p)
{
    if (!p)
        return;
    for (size_t i = 0; p->pages && i <= p->entries_max / ENTRIES_A_PAGE; i++)
        free(p->pages[i]);
    for (size_t i = 0; p->tenants && i < p->tenants_top; i++)
        free(p->tenants[i]);
    free(p->pages);
    free(p->buckets);
    free(p->tenants);
    free(p);
}
