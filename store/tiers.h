/* tiers: the composition of all places where a block can be, which is what the engine's loader and persist threads talk to.
 *
 *     put ──▶ ram (at once) ──▶ disk (write-through: `done` is the disk's fsync) ──▶ remote (write-back, behind the disk's acknowledgement)
 *     get ──▶ ram ──miss──▶ disk, by a deadline ──miss──▶ remote, by a deadline;  what a slower tier had goes into the faster ones
 *
 * Promises
 *   1. tiers_find, tiers_put and tiers_look_up never wait for a disk or a network.
 *   2. tiers_get ends by its deadline. A tier that hangs is a miss, counted, until it answers again (lane.h).
 *   3. What a caller does not accept it is not given: a tier whose copy is too poor is passed over, as if it had none.
 *   4. A worse copy never takes the place of a better one in any tier. */
#ifndef TANDEM_STORE_TIERS_H
#define TANDEM_STORE_TIERS_H
#include "store/tier_redis.h"

#define TIERS_READ_US 2000000 /* a read of a block takes at most so long … */
/* … and a second more for each so many bytes: a slow disk is not a hung one */
#define TIERS_READ_SIZE_RATE 1000000

struct tiers_config {
    struct store *store;                    /* borrowed */
    uint64_t ram_tenant_size;               /* of one tenant at most; 0: no quota */
    uint64_t ram_size;                      /* 0: no host memory tier */
    const struct tier_redis_config *remote; /* NULL: no remote tier; its store and wake are set here */
    unsigned threads; /* that read the disk and undo its cipher; 0: tiers_default_threads */
};
struct tiers;
int tiers_create(const struct tiers_config *config, struct tiers **out, struct td_error *err);
void tiers_destroy(struct tiers *t); /* after everybody who reads; the store is still open */
struct store *tiers_store(struct tiers *t);
unsigned tiers_default_threads(void);          /* one for each core and four that wait, at most 8 */
unsigned tiers_threads(const struct tiers *t); /* how many tiers_get are worth running at once */

struct tiers_want { /* what the caller can use */
    enum kv_accept accept;
    enum kv_numerics numerics;
    uint16_t layer_begin, layer_end; /* at least these */
};
struct tiers_found {
    enum tier_kind tier; /* the fastest that has it */
    struct store_block_info info;
};
/* -TD_ERR_AGAIN: none of the local tiers, and the remote one has been asked (tiers_look_up) and may have it: come again when woken. It is an
 * answer of the first tenth of a second only. */
int tiers_find(struct tiers *t, const char *tenant, const struct kv_block_id *id,
               const struct tiers_want *want, struct tiers_found *found);
/* Ask the remote tier, without waiting, about blocks that no local tier has. */
void tiers_look_up(struct tiers *t, const char *tenant, const struct kv_block_id *ids, size_t count);
bool tiers_has_remote(const struct tiers *t);
/* Called on another thread when answers have come; one at a time, NULL ends it. */
void tiers_set_wake(struct tiers *t, void (*wake)(void *ctx), void *ctx);
/* Waits, by a deadline. One reference for the caller; *from (may be NULL): which tier had it. -TD_ERR_NOTFOUND for any doubt. */
int tiers_get(struct tiers *t, const char *tenant, const struct kv_block_id *id,
              const struct tiers_want *want, struct tier_block **out, enum tier_kind *from);
/* The block may be in any tier behind this. done: as store_put. */
int tiers_put(struct tiers *t, const char *tenant, struct tier_block *b, store_done done, void *ctx);
/* A request has looked up this chain, first block first; held or not, its blocks count as used. */
void tiers_touch(struct tiers *t, const char *tenant, const struct kv_block_id *chain, size_t count);
/* store_erase_tenant, and nothing of it is left in any tier's memory. What a remote tier holds cannot be opened any more, and goes with its time. */
int tiers_erase_tenant(struct tiers *t, const char *tenant, struct td_error *err);
void tiers_stats(struct tiers *t, enum tier_kind kind, struct tier_stats *out);
const char *tier_name(enum tier_kind kind); /* "ram", "disk", "remote": also the label of metrics */
/* Gauges of all tiers for /metrics; once a second. */
void tiers_update_metrics(struct tiers *t);

#endif
