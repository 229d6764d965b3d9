/* tier: one place where KV blocks can be: host memory, the local disk, a shared server. All have this one interface, and the composition
 * of them (tiers.h) is what the engine talks to; it never learns where a block came from.
 *
 * What moves between tiers is a tier_block: all encoded pieces of one block in one allocation, counted by reference, read-only once it is
 * made. Memory and disk hand out the same object, so promoting a block copies nothing.
 *
 *   find   never waits: it says what the tier knows in RAM
 *   get    may wait for a disk or a network; lane.h puts threads and a deadline in front of the tiers of which that is true
 *   put    never waits: it copies or holds, queues and answers; beyond the queue's bound the answer is -TD_ERR_FULL
 * Any doubt about a block is -TD_ERR_NOTFOUND. All functions are thread-safe. */
#ifndef TANDEM_STORE_TIER_H
#define TANDEM_STORE_TIER_H
#include "store/store.h"
#include <stdatomic.h>

struct tier_block {
    atomic_uint references;
    struct store_block block; /* its pieces lie behind it, as does `data` */
    uint8_t *data;
    size_t data_size;
    struct span pieces[]; /* [(layer_end - layer_begin) * 2] */
};

/* For `layers` layers and data_size bytes, which are aligned to a page; ids, quality, layers and pieces are the caller's to fill in. One
 * reference, the caller's. NULL without memory. */
struct tier_block *tier_block_create(uint32_t layers, size_t data_size);
static inline struct tier_block *tier_block_hold(struct tier_block *b)
{
    atomic_fetch_add_explicit(&b->references, 1, memory_order_relaxed);
    return b;
}
void tier_block_release(struct tier_block *b); /* NULL: nothing happens */
/* Bytes that it takes in memory. */
static inline size_t tier_block_size(const struct tier_block *b)
{
    return sizeof *b + 2u * (b->block.layer_end - b->block.layer_begin) * sizeof(struct span) + b->data_size;
}

enum tier_kind { TIER_RAM, TIER_DISK, TIER_REMOTE, TIER_COUNT };

struct tier_stats {
    uint64_t blocks, bytes, limit_bytes; /* of a remote tier: what this node knows of */
    uint64_t hits, misses, puts, put_failures, evictions, timeouts, damaged;
    uint64_t policy_bytes; /* of memory, for the choice of what stays */
    bool sick;             /* it hangs or is away, and counts as empty until it answers again */
};

struct tier;
struct tier_ops {
    /* 0, -TD_ERR_NOTFOUND, or -TD_ERR_AGAIN: the answer is on its way. */
    int (*find)(struct tier *t, const char *tenant, const struct kv_block_id *id,
                struct store_block_info *info);
    /* One reference for the caller. */
    int (*get)(struct tier *t, const char *tenant, const struct kv_block_id *id, struct tier_block **out);
    /* done (may be NULL): as store_put. Called exactly once if and only if 0 is returned. */
    int (*put)(struct tier *t, const char *tenant, struct tier_block *b, store_done done, void *ctx);
    void (*stats)(struct tier *t, struct tier_stats *out);
    void (*destroy)(struct tier *t);
    /* A request has looked up this chain: of use to who decides what stays. May be NULL. */
    void (*touch)(struct tier *t, const char *tenant, const struct kv_block_id *chain, size_t count);
    /* Nothing of the tenant is left in RAM. May be NULL. */
    void (*drop_tenant)(struct tier *t, const char *tenant);
    /* Ask a tier that is far away, without waiting, about ids that find will be asked about. NULL where find knows. */
    void (*look_up)(struct tier *t, const char *tenant, const struct kv_block_id *ids, size_t count);
};
struct tier {
    const struct tier_ops *ops;
};

/* What a block costs to compute again, for policies to compare; only ratios matter. */
float tier_block_cost_s(uint32_t block_index);

/* Host memory: at most limit_size bytes of blocks, of one tenant at most tenant_quota_size (0: no quota). NULL without memory. */
struct tier *tier_ram_create(uint64_t limit_size, uint64_t tenant_quota_size);
/* The local disk: the store, borrowed. */
struct tier *tier_disk_create(struct store *s);

/* May the copy of quality `new` and layers [nb, ne) take the place of the one that is there? A better copy replaces a worse one and never
 * the reverse; of two equal ones that with more layers stays. */
enum tier_choice { TIER_REPLACE, TIER_KEEP, TIER_REFUSE };
enum tier_choice tier_choose(struct kv_quality there, uint16_t there_begin, uint16_t there_end,
                             struct kv_quality new_quality, uint16_t new_begin, uint16_t new_end);

#endif
