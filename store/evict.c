/* evict: which blocks of the disk go when there is no room, or their time is over. policy.h decides; this keeps it in step with the table and
 * carries out what it says.
 *
 * A block that is evicted is deleted as if somebody had asked for it: a tombstone, a sync, then the entry goes and the record is voided, which
 * gives its space back where it lies. So eviction adds no state that a crash could find, and costs a page for each block. Blocks go in batches, so
 * that one sync covers many.
 *
 * Invariant: under policy_lock, the policy holds exactly the blocks whose entry has a place, from the end of recovery on; but for those that it
 * has just let go and whose end is not decided: a tombstone that is being written, a copy that is about to replace them. If that fails they are
 * taken back. */
#include "store/store_internal.h"
#include <stdlib.h>

#define EVICT_BATCH 1024 /* blocks that one sync covers */
/* beside what is needed, this part of what is held is made free: the next batch is due later */
#define EVICT_SPARE 64

static uint64_t now_ms(void)
{
    return clock_mono_us() / 1000;
}

/* ---- in step with the table --------------------------------------------------------------------------------- */

static struct policy_block policy_block_of(const struct entry *e)
{
    struct policy_block b = {.tenant = e->tenant,
                             .size = e->stored_size,
                             .cost_s = tier_block_cost_s(e->block_index),
                             .lossless = e->quality.fidelity == KV_L0};
    memcpy(b.id.bytes, e->id, sizeof b.id.bytes);
    memcpy(b.parent.bytes, e->parent, sizeof b.parent.bytes);
    return b;
}

/* Under policy_lock. A tenant that is met first gets the limits that all have. */
static void limit_tenant(struct store *s, uint32_t tenant)
{
    uint64_t bit = UINT64_C(1) << tenant % 64,
             *word = &s->tenants_limited[tenant / 64 % TD_COUNT(s->tenants_limited)];
    if ((s->tenant_quota_size || s->ttl_ms) && !(*word & bit))
        policy_set_tenant(s->policy, tenant, s->tenant_quota_size, s->ttl_ms);
    *word |= bit;
}

void evict_note(struct store *s, const struct entry *e, bool held)
{
    if (!s->policy || e->conversation || e->layer_end == 0) /* a pin or a conversation */
        return;
    struct policy_block b = policy_block_of(e);
    bool demotes = held && demote_allows(s, b.tenant);
    pthread_mutex_lock(&s->policy_lock);
    if (held) {
        limit_tenant(s, b.tenant);
        if (s->demoter)
            policy_set_demotion(s->policy, b.tenant, demotes);
        policy_insert(s->policy, &b, now_ms());
    } else {
        policy_forget(s->policy, b.tenant, &b.id);
    }
    pthread_mutex_unlock(&s->policy_lock);
}

bool evict_not_demoted(struct store *s, uint32_t tenant, const struct kv_block_id *id, bool retry)
{
    struct table_shard *shard = table_lock(&s->blocks, id->bytes);
    const struct entry *e = table_find(&s->blocks, shard, tenant, id->bytes);
    bool is_held = e && e->segment_id;
    if (is_held) {
        struct policy_block b = policy_block_of(e);
        b.lossless &= retry;
        pthread_mutex_lock(&s->policy_lock);
        if (policy_holds(s->policy, tenant, id))
            policy_insert(s->policy, &b, now_ms());
        pthread_mutex_unlock(&s->policy_lock);
    }
    table_unlock(shard);
    return is_held;
}

void evict_spare(struct store *s, const struct entry *e)
{
    struct kv_block_id id;
    if (!s->policy || !e->segment_id)
        return;
    memcpy(id.bytes, e->id, sizeof id.bytes);
    pthread_mutex_lock(&s->policy_lock);
    policy_spare(s->policy, e->tenant, &id);
    pthread_mutex_unlock(&s->policy_lock);
}

void evict_take_back(struct store *s, const struct entry *e)
{
    if (!e->segment_id || e->conversation || e->layer_end == 0)
        return;
    evict_note(s, e, true);
    struct table_shard *shard = table_lock(&s->pins, e->id);
    bool pinned = table_find(&s->pins, shard, e->tenant, e->id) != NULL;
    table_unlock(shard);
    if (pinned)
        evict_pin(s, e->tenant, e->id, true);
}

void evict_pin(struct store *s, uint32_t tenant, const uint8_t id[32], bool pinned)
{
    struct kv_block_id block;
    if (!s->policy)
        return;
    memcpy(block.bytes, id, sizeof block.bytes);
    pthread_mutex_lock(&s->policy_lock);
    policy_pin(s->policy, tenant, &block, pinned);
    pthread_mutex_unlock(&s->policy_lock);
}

void store_touch(struct store *s, const char *tenant, const struct kv_block_id *chain, size_t count)
{
    uint32_t number = keys_find(s->keys, tenant);
    if (!s->policy || !number)
        return;
    pthread_mutex_lock(&s->policy_lock);
    policy_touch(s->policy, number, chain, count, now_ms());
    pthread_mutex_unlock(&s->policy_lock);
}

int store_set_tenant(struct store *s, const char *tenant, uint64_t quota_size, uint64_t ttl_ms)
{
    uint32_t number;
    int rc = s->policy ? keys_ensure(s->keys, tenant, &number, NULL) : -TD_ERR_UNSUPPORTED;
    if (rc < 0)
        return rc;
    pthread_mutex_lock(&s->policy_lock);
    limit_tenant(s, number);
    rc = policy_set_tenant(s->policy, number, quota_size, ttl_ms);
    pthread_mutex_unlock(&s->policy_lock);
    return rc;
}

uint64_t evict_memory_size(struct store *s)
{
    struct policy_stats stats = {.memory_size = 0};
    pthread_mutex_lock(&s->policy_lock);
    if (s->policy)
        policy_stats(s->policy, &stats);
    pthread_mutex_unlock(&s->policy_lock);
    return stats.memory_size;
}

/* ---- recovery ----------------------------------------------------------------------------------------------- */

static int by_lsn(const void *a, const void *b)
{
    uint64_t x = ((const struct entry *)a)->lsn, y = ((const struct entry *)b)->lsn;
    return (x > y) - (x < y);
}

/* All blocks, the oldest record first: nothing better is known of their last use. Before the writer starts. */
int evict_open(struct store *s)
{
    size_t count = table_count(&s->blocks), n = 0;
    struct entry *all = malloc((count + 1) * sizeof *all);
    struct policy_config config = {.limit_size = s->limit_size};
    int rc = all ? policy_create(&config, &s->policy) : -TD_ERR_NOMEM;
    for (size_t i = 0; i < TABLE_SHARD_COUNT && rc == 0; i++)
        for (size_t j = 0; j < s->blocks.shards[i].slot_count; j++)
            if (s->blocks.shards[i].slots[j].segment_id)
                all[n++] = s->blocks.shards[i].slots[j];
    if (rc == 0)
        qsort(all, n, sizeof *all, by_lsn);
    for (size_t i = 0; i < n; i++)
        evict_take_back(s, &all[i]);
    free(all);
    return rc;
}

/* ---- admission, on the writer ------------------------------------------------------------------------------- */

/* Held, or to be: what this commit has refused already is not, though its end is still to be told. */
static bool on_its_way(struct store *s, uint32_t tenant, const uint8_t id[32])
{
    struct table_shard *shard = table_lock(&s->blocks, id);
    const struct entry *e = table_find(&s->blocks, shard, tenant, id);
    const struct store_op *op = e ? e->pending : NULL;
    bool there = e && (e->segment_id || (op && op->kind != OP_DELETE && op->status == 0));
    table_unlock(shard);
    return there;
}

bool evict_reachable(struct store *s, const struct store_op *op)
{
    static const uint8_t none[32];
    return !s->policy || memcmp(op->parent, none, sizeof none) == 0 || on_its_way(s, op->tenant, op->parent);
}

bool evict_admits(struct store *s, const struct store_op *op)
{
    return evict_reachable(s, op) || !space_is_short(s);
}

/* ---- eviction, on the writer -------------------------------------------------------------------------------- */

struct evicted {
    uint32_t tenant;
    uint8_t id[32];
    uint64_t lsn; /* of the record that goes; 0: it stays after all */
};

static size_t choose(struct store *s, uint64_t size, struct evicted *out)
{
    struct policy_stats stats;
    struct policy_victim v;
    size_t count = 0;
    pthread_mutex_lock(&s->policy_lock);
    policy_stats(s->policy, &stats);
    uint64_t wanted = size ? size + stats.size / EVICT_SPARE : 0;
    policy_set_limit(s->policy, !wanted ? s->limit_size : stats.size > wanted ? stats.size - wanted : 0);
    for (; count < EVICT_BATCH && policy_room(s->policy, NULL, now_ms(), &v) == 1; count++) {
        out[count] = (struct evicted){.tenant = v.tenant};
        memcpy(out[count].id, v.id.bytes, sizeof out[count].id);
    }
    policy_set_limit(s->policy, s->limit_size);
    pthread_mutex_unlock(&s->policy_lock);
    return count;
}

static void find_record(struct store *s, struct evicted *v)
{
    struct table_shard *shard = table_lock(&s->blocks, v->id);
    const struct entry *e = table_find(&s->blocks, shard, v->tenant, v->id);
    /* What is being replaced comes back to the policy with the end of that. */
    v->lsn = e && e->segment_id && !e->pending ? e->lsn : 0;
    table_unlock(shard);
}

static int bury(struct store *s, struct evicted *v)
{
    struct tenant_keys keys;
    find_record(s, v);
    if (!v->lsn || keys_get(s->keys, v->tenant, &keys) < 0)
        return 0;
    struct record_head h = {
        .type = RECORD_TOMBSTONE, .target = RECORD_BLOCK, .version = v->lsn + 1, .time_us = clock_wall_us()};
    memcpy(h.id, v->id, sizeof h.id);
    int rc = append_record(s, &h, &keys, NULL);
    crypto_wipe(&keys, sizeof keys);
    return rc;
}

static void remove_entry(struct store *s, const struct evicted *v, bool buried)
{
    struct table_shard *shard = table_lock(&s->blocks, v->id);
    struct entry *e = v->lsn ? table_find(&s->blocks, shard, v->tenant, v->id) : NULL;
    if (e && e->segment_id && e->lsn == v->lsn) {
        if (buried)
            store_void_later(s, RECORD_BLOCK, e);
        else
            store_void_alone(s, RECORD_BLOCK, e);
        store_note_change(s, RECORD_BLOCK, e, true);
        if (entry_clear_place(s, e))
            table_remove(&s->blocks, shard, e);
    }
    table_unlock(shard);
}

/* The policy has let it go, and it stays: its tombstone could not be written. */
static void keep_entry(struct store *s, const struct evicted *v)
{
    struct table_shard *shard = table_lock(&s->blocks, v->id);
    const struct entry *e = table_find(&s->blocks, shard, v->tenant, v->id);
    if (e)
        evict_take_back(s, e);
    table_unlock(shard);
}

int evict_blocks(struct store *s, uint64_t size, size_t *count)
{
    struct evicted *list = s->policy ? malloc(EVICT_BATCH * sizeof *list) : NULL;
    *count = list ? choose(s, size, list) : 0;
    int rc = 0;
    for (size_t i = 0; i < *count && rc == 0; i++)
        rc = bury(s, &list[i]);
    rc = rc < 0 || *count == 0 ? rc : append_sync(s);
    for (size_t i = 0; i < *count; i++)
        if (rc == 0)
            remove_entry(s, &list[i], true);
        else
            keep_entry(s, &list[i]);
    if (rc == 0)
        store_void_now(s);
    atomic_fetch_add(&s->counters.evictions, rc == 0 ? *count : 0);
    free(list);
    return rc;
}

void evict_unburied(struct store *s, uint64_t size)
{
    struct evicted *list = s->policy ? malloc(EVICT_BATCH * sizeof *list) : NULL;
    size_t count = list ? choose(s, size, list) : 0;
    for (size_t i = 0; i < count; i++) {
        find_record(s, &list[i]);
        remove_entry(s, &list[i], false);
    }
    store_void_now(s);
    atomic_fetch_add(&s->counters.evictions, count);
    free(list);
}

/* ---- on request --------------------------------------------------------------------------------------------- */

struct gc_task {
    struct store_task task; /* first */
    size_t count;
};

static int gc_batch(struct store *s, struct store_task *t)
{
    int rc = evict_blocks(s, 0, &((struct gc_task *)t)->count);
    if (rc == -TD_ERR_IO)
        append_abandon(s);
    return rc;
}

int store_gc(struct store *s, void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx,
             uint64_t *blocks, uint64_t *freed, struct td_error *err)
{
    struct gc_task g = {.task.run = gc_batch};
    uint64_t before = segments_size(&s->segments), compacted;
    *blocks = 0;
    int rc = demote_all(s);
    g.count = 1;
    while (rc == 0 && g.count > 0) {
        rc = atomic_load(&s->jobs_end) ? -TD_ERR_CANCELLED : store_run_task(s, &g.task);
        *blocks += rc == 0 ? g.count : 0;
    }
    if (rc < 0)
        return td_fail(err, rc, "cannot collect what has expired in store %s: %s", s->directory,
                       td_status_text(rc));
    rc = store_compact(s, GC_DEAD_PERCENT, progress, ctx, &compacted, err);
    uint64_t after = segments_size(&s->segments);
    *freed = before > after ? before - after : 0;
    return rc;
}
