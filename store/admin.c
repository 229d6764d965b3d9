/* admin: what the command line and the console ask: counts, listings, verification, rebuilding the index. */
#include "store/store_internal.h"
#include <stdlib.h>

void store_stats(struct store *s, struct store_stats *out)
{
    struct store_counters *c = &s->counters;
    *out = (struct store_stats){
        .blocks = table_count(&s->blocks),
        .block_bytes = s->block_size,
        .conversations = table_count(&s->conversations),
        .limit_bytes = s->limit_size,
        .hits = c->hits,
        .misses = c->misses,
        .evictions = c->evictions,
        .demotions = c->demotions,
        .demoted_bytes = c->demoted_bytes,
        .puts = c->puts,
        .put_failures = c->put_failures,
        .reads = c->reads,
        .read_failures = c->read_failures,
        .damaged = c->damaged,
        .bytes_written = c->bytes_written,
        .bytes_read = c->bytes_read,
        .fsyncs = c->fsyncs,
        .silent = !store_answers(s),
    };
    out->writes_off = out->silent || s->write_error < 0;
    uint64_t live = 0;
    pthread_mutex_lock(&s->segments.lock);
    out->segments = s->segments.count;
    for (size_t i = 0; i < s->segments.count; i++) {
        const struct segment *g = s->segments.list[i];
        out->segment_bytes += g->end - g->hole_size;
        live += g->live_size;
    }
    pthread_mutex_unlock(&s->segments.lock);
    out->dead_bytes = out->segment_bytes > live ? out->segment_bytes - live : 0;
    out->queue_bytes = op_queue_size(&s->queue);
    out->policy_bytes = evict_memory_size(s);
}

int store_each_tenant(struct store *s, store_tenant_fn fn, void *ctx)
{
    int rc = 0;
    for (uint32_t i = 1; i <= KEYS_TENANTS_MAX && rc == 0; i++) {
        const struct tenant_count *t = &s->tenants[i];
        struct store_tenant_stats stats = {t->blocks, t->size, t->from_device, {0}};
        struct tenant_keys keys;
        for (size_t j = 0; j < TD_COUNT(stats.by_level); j++)
            stats.by_level[j] = t->by_level[j];
        if (stats.blocks > 0 && keys_get(s->keys, i, &keys) == 0) {
            rc = fn(ctx, keys.name, &stats);
            crypto_wipe(&keys, sizeof keys);
        }
    }
    return rc;
}

/* ---- verify ----------------------------------------------------------------------------------------------- */

/* Copies of a shard's entries, so that they are read without its lock. NULL without memory; *count = 0 may be NULL too. */
static struct entry *copy_shard(struct table_shard *shard, size_t *count)
{
    pthread_mutex_lock(&shard->lock);
    struct entry *copies = malloc((shard->used_count + 1) * sizeof *copies);
    *count = 0;
    for (size_t j = 0; j < shard->slot_count && copies; j++)
        if (shard->slots[j].tenant && shard->slots[j].segment_id)
            copies[(*count)++] = shard->slots[j];
    pthread_mutex_unlock(&shard->lock);
    return copies;
}

struct verification {
    struct store *s;
    void (*progress)(void *ctx, uint64_t done, uint64_t total);
    void *ctx;
    uint64_t total, records, bad;
};

static int verify_record(struct store *s, uint8_t type, const struct entry *e)
{
    struct tenant_keys keys;
    struct read_head r;
    struct record_place place = {e->segment_id, e->offset, e->stored_size};
    int rc = keys_get(s->keys, e->tenant, &keys);
    rc = rc < 0 ? rc : read_open(s, &keys, &place, type, e->id, e->lsn, &r);
    crypto_wipe(&keys, sizeof keys);
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < r.head.part_count && rc == 0; i++) {
        size_t size = (size_t)r.head.parts[i].first_size + r.head.parts[i].second_size;
        uint8_t *plain = malloc(size + 1);
        rc = plain ? read_part(s, &r, i, plain) : -TD_ERR_NOMEM;
        if (plain)
            crypto_wipe(plain, size);
        free(plain);
    }
    read_close(s, &r);
    return rc;
}

/* Is the record that was found bad still the entry's? A running store replaces and evicts meanwhile. */
static bool still_there(struct store *s, uint8_t type, const struct entry *e)
{
    struct table_shard *shard = table_lock(store_table(s, type), e->id);
    const struct entry *now = table_find(store_table(s, type), shard, e->tenant, e->id);
    bool there = now && now->segment_id == e->segment_id && now->offset == e->offset;
    table_unlock(shard);
    return there;
}

static int verify_table(struct verification *v, uint8_t type)
{
    int rc = 0;
    for (size_t i = 0; i < TABLE_SHARD_COUNT && rc == 0; i++) {
        size_t count;
        struct entry *copies = copy_shard(&store_table(v->s, type)->shards[i], &count);
        if (!copies)
            return -TD_ERR_NOMEM;
        for (size_t j = 0; j < count && rc == 0; j++) {
            int result = verify_record(v->s, type, &copies[j]);
            rc = result == -TD_ERR_NOMEM ? result : atomic_load(&v->s->jobs_end) ? -TD_ERR_CANCELLED : 0;
            v->records++;
            v->bad += result < 0 && still_there(v->s, type, &copies[j]);
            if (v->progress)
                v->progress(v->ctx, v->records, v->total);
        }
        free(copies);
    }
    return rc;
}

int store_verify(struct store *s, void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx,
                 uint64_t *records, uint64_t *bad, struct td_error *err)
{
    struct verification v = {.s = s, .progress = progress, .ctx = ctx};
    v.total = table_count(&s->blocks) + table_count(&s->conversations);
    int rc = verify_table(&v, RECORD_BLOCK);
    rc = rc < 0 ? rc : verify_table(&v, RECORD_CONVERSATION);
    *records = v.records;
    *bad = v.bad;
    return rc < 0 ? td_fail(err, rc, "cannot verify store %s: %s", s->directory, td_status_text(rc)) : 0;
}

/* ---- rebuild ---------------------------------------------------------------------------------------------- */

int store_rebuild(const struct store_config *config,
                  void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx, uint64_t *records,
                  struct td_error *err)
{
    /* Opening takes the lock, so that a running node's index is never pulled away. */
    struct store_config reading = *config;
    struct store *s;
    reading.read_only = true;
    int rc = store_open(&reading, &s, err);
    crypto_wipe(reading.master_key, sizeof reading.master_key);
    if (rc < 0)
        return rc;
    index_set_aside(config->directory, false);
    store_close(s);
    rc = store_open_with(
        config, &(struct store_env){.io = &io_posix, .progress = progress, .progress_ctx = ctx}, &s, err);
    if (rc < 0)
        return rc;
    *records = table_count(&s->blocks) + table_count(&s->conversations);
    store_close(s); /* writes the index */
    return 0;
}
