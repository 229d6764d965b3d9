/* table: see table.h. Removal shifts later entries of the run back, so there are no marks of deleted slots to clean up. */
#include "store/table.h"
#include "shared/crypto.h"
#include <stdlib.h>

#define SLOTS_FIRST 64 /* of a shard; grows by doubling above 3/4 full */

static uint64_t id_hash(const struct table *t, const uint8_t id[32])
{
    uint64_t x = (load_le64(id) ^ t->seed) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    return x ^ x >> 29;
}

int table_init(struct table *t)
{
    memset(t, 0, sizeof *t);
    for (size_t i = 0; i < TABLE_SHARD_COUNT; i++)
        pthread_mutex_init(&t->shards[i].lock, NULL);
    return crypto_random(&t->seed, sizeof t->seed);
}

void table_deinit(struct table *t)
{
    for (size_t i = 0; i < TABLE_SHARD_COUNT; i++) {
        struct table_shard *s = &t->shards[i];
        for (size_t j = 0; j < s->slot_count; j++)
            free(s->slots[j].conversation);
        free(s->slots);
        pthread_mutex_destroy(&s->lock);
    }
}

struct table_shard *table_lock(struct table *t, const uint8_t id[32])
{
    struct table_shard *s = &t->shards[id_hash(t, id) % TABLE_SHARD_COUNT];
    pthread_mutex_lock(&s->lock);
    return s;
}

void table_unlock(struct table_shard *s)
{
    pthread_mutex_unlock(&s->lock);
}

static size_t home_slot(const struct table *t, const struct table_shard *s, const uint8_t id[32])
{
    return (size_t)(id_hash(t, id) / TABLE_SHARD_COUNT) & (s->slot_count - 1);
}

/* The slot that holds the key, or the free one where it would go. Needs a free slot. */
static struct entry *probe(const struct table *t, const struct table_shard *s, uint32_t tenant,
                           const uint8_t id[32])
{
    for (size_t at = home_slot(t, s, id);; at = (at + 1) & (s->slot_count - 1)) {
        struct entry *e = &s->slots[at];
        if (e->tenant == 0 || (e->tenant == tenant && memcmp(e->id, id, sizeof e->id) == 0))
            return e;
    }
}

struct entry *table_find(struct table *t, struct table_shard *s, uint32_t tenant, const uint8_t id[32])
{
    if (s->slot_count == 0)
        return NULL;
    struct entry *e = probe(t, s, tenant, id);
    return e->tenant ? e : NULL;
}

static bool grow(struct table *t, struct table_shard *s)
{
    struct table_shard larger = {.slot_count = s->slot_count ? 2 * s->slot_count : SLOTS_FIRST};
    larger.slots = calloc(larger.slot_count, sizeof *larger.slots);
    if (!larger.slots)
        return false;
    for (size_t i = 0; i < s->slot_count; i++)
        if (s->slots[i].tenant)
            *probe(t, &larger, s->slots[i].tenant, s->slots[i].id) = s->slots[i];
    free(s->slots);
    s->slots = larger.slots;
    s->slot_count = larger.slot_count;
    return true;
}

struct entry *table_insert(struct table *t, struct table_shard *s, uint32_t tenant, const uint8_t id[32])
{
    struct entry *e = table_find(t, s, tenant, id);
    if (e)
        return e;
    if (4 * (s->used_count + 1) > 3 * s->slot_count && !grow(t, s))
        return NULL;
    e = probe(t, s, tenant, id);
    memset(e, 0, sizeof *e);
    e->tenant = tenant;
    memcpy(e->id, id, sizeof e->id);
    s->used_count++;
    return e;
}

void table_remove(struct table *t, struct table_shard *s, struct entry *e)
{
    free(e->conversation);
    size_t mask = s->slot_count - 1, hole = (size_t)(e - s->slots);
    for (size_t at = (hole + 1) & mask; s->slots[at].tenant; at = (at + 1) & mask) {
        size_t home = home_slot(t, s, s->slots[at].id);
        /* May the entry at `at` move to the hole? Yes unless its home lies cyclically within (hole, at]. */
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            s->slots[hole] = s->slots[at];
            hole = at;
        }
    }
    memset(&s->slots[hole], 0, sizeof s->slots[hole]);
    s->used_count--;
}

size_t table_count(struct table *t)
{
    size_t count = 0;
    for (size_t i = 0; i < TABLE_SHARD_COUNT; i++) {
        pthread_mutex_lock(&t->shards[i].lock);
        count += t->shards[i].used_count;
        pthread_mutex_unlock(&t->shards[i].lock);
    }
    return count;
}
