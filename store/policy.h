/* policy: which blocks a tier holds. Every tier (host RAM, disk, remote) has one of these and does what it says: the policy knows ids,
 * sizes and times, never bytes. Pure: no I/O, no threads, no clock; the caller locks, and passes the time.
 *
 * What it rests on
 *   1. A block is worth something only while all its ancestors are held: a request's hits are its leading run. So only leaves (no held
 *      child) are evicted, and a block whose parent was refused is refused.
 *   2. Value = recompute seconds x chance of reuse a second / bytes. The chance is learned while running, for each kind of block
 *      (policy_learn.h says which) by the time since its last use, from all blocks held and from ghosts: the ids and times of blocks that
 *      were refused or evicted not long ago.
 *   3. What is not worth more than the least valuable leaf is not let in; then nothing needs to be moved for it.
 *   4. Pinned blocks and their ancestors never go. A tenant over its quota pays with its own blocks. Idle for longer than its
 *      tenant's TTL: goes first.
 *
 * Use: for each request policy_touch(chain) once, when it is looked up. For each block that was computed or that arrives from another
 * tier, in the order of the chain:
 *
 *     while ((rc = policy_room(p, &block, now_ms, &victim)) == 1)
 *         drop or demote victim;             (the policy has forgotten it already)
 *     if (rc == 0) { store it; policy_insert(p, &block, now_ms); }
 *     else            it is not worth it: do without, and without all that follow in the chain
 *
 * and about once a second with NULL for the block, to get rid of what has expired and to let time pass in small steps (after an idle night a
 * million entries would grow older in one call, for 0.7 s). Cost of a call: O(log n) amortised for each block that it is given,
 * and LEARN_KINDS comparisons for each victim. Memory: POLICY_ENTRY_SIZE_MAX for each block held or remembered; see policy_config. */
#ifndef TANDEM_STORE_POLICY_H
#define TANDEM_STORE_POLICY_H
#include "shared/kv_block.h"

/* Tenants are numbered 1 .. POLICY_TENANTS_MAX - 1; those beyond share one account that has neither quota nor TTL. */
#define POLICY_TENANTS_MAX 4096
/* Bytes of memory for each block held or remembered, hash table included. */
#define POLICY_ENTRY_SIZE_MAX 136
/* Ghosts remembered, or as many as blocks are held if that is more. Measured: a quarter of it loses up to 10 % of the hits. */
#define POLICY_GHOSTS_MIN 65536
#define POLICY_BYTES_HELP                                                                                    \
    "Bytes of memory for the choice of what stays in a tier: grows until it knows enough blocks that went"

struct policy;
struct policy_config {
    uint64_t limit_size; /* bytes held */
    /* held, below 1 Gi; 0: 1 Mi. Memory: at most 2 blocks_max + POLICY_GHOSTS_MIN entries */
    uint32_t blocks_max;
};
/* 0 or -TD_ERR_NOMEM. */
int policy_create(const struct policy_config *config, struct policy **out);
void policy_destroy(struct policy *p);

/* Limits may change at any time; policy_room(NULL) then tells what must go. */
void policy_set_limit(struct policy *p, uint64_t limit_size);
/* quota_size 0: no quota; ttl_ms, since the last use, 0: for ever. -TD_ERR_NOMEM, -TD_ERR_LIMIT (no such number). */
int policy_set_tenant(struct policy *p, uint32_t tenant, uint64_t quota_size, uint64_t ttl_ms);

struct policy_block {
    struct kv_block_id id, parent; /* parent all zero: the first of a chain */
    uint32_t tenant;               /* not 0 */
    uint32_t size;                 /* bytes that it takes in this tier; not 0 */
    float cost_s;                  /* seconds to recompute it, see policy_recompute_s; > 0 */
    bool lossless;                 /* it could be stored at a lossy level: policy_demote */
};
/* Seconds to recompute `tokens` tokens behind `first` earlier ones: linear_s a token for the weights, and attention_s more for each earlier token
 * that it looks at. */
static inline float policy_recompute_s(uint32_t first, uint32_t tokens, double linear_s, double attention_s)
{
    return (float)(tokens * (linear_s + attention_s * (first + 0.5 * tokens)));
}

/* A request looks up its whole chain, first block first: every block of it counts as used now, held or not. Returns its hits: how many from
 * the first on are held. now_ms never runs backwards (an earlier one counts as the last one). */
size_t policy_touch(struct policy *p, uint32_t tenant, const struct kv_block_id *chain, size_t count,
                    uint64_t now_ms);

struct policy_victim {
    struct kv_block_id id;
    uint32_t tenant, size;
};
/* Make room for `incoming` (may be NULL: only keep the limits and the TTLs). 1: *out was evicted, call again; 0: it fits (or is held
 * already), insert it; -TD_ERR_NOSPACE: it is not worth what would have to go, or nothing may go: do not insert. */
int policy_room(struct policy *p, const struct policy_block *incoming, uint64_t now_ms,
                struct policy_victim *out);
/* The block is held now. Held already: size and cost are taken over. A parent that is not held (recovery meets blocks in any order) may
 * come later; until then the block counts in no run. Limits are not looked at here, only blocks_max (-TD_ERR_FULL).
 * Recovery inserts what the disk holds, the least recently used first, each with the time of its last use. -TD_ERR_NOMEM. */
int policy_insert(struct policy *p, const struct policy_block *block, uint64_t now_ms);
/* The block is gone: deleted, damaged, dropped with its segment. Its children stay, in no run until it is back. */
void policy_forget(struct policy *p, uint32_t tenant, const struct kv_block_id *id);
/* -TD_ERR_NOTFOUND when it is not held. Pins do not count. */
int policy_pin(struct policy *p, uint32_t tenant, const struct kv_block_id *id, bool pinned);

/* Demotion: a block that is stored at a lossy level keeps what it is worth at fewer bytes, so it comes before evicting where the tenant allows it.
 * Of all blocks of such tenants (`tenant` 0: of any of them), leaves or not, the least valuable lossless one that is neither pinned nor
 * expired. 1: *out is to be demoted; it is held as before, and neither named again nor evicted until policy_insert says anew how it is held: were it
 * evicted on its way, so could its parent be, and there would be a hole where it comes back. 0: there is none. */
int policy_demote(struct policy *p, uint32_t tenant, uint64_t now_ms, struct policy_victim *out);
/* Spare a held block in the same way: another copy of it is on its way. */
void policy_spare(struct policy *p, uint32_t tenant, const struct kv_block_id *id);
/* The first tenant after *tenant that allows it and has all but an eighth of its quota: *tenant and by how many bytes it is over that; 0: none. */
#define POLICY_QUOTA_SPARE 8
uint64_t policy_near_quota(const struct policy *p, uint32_t *tenant);
/* -TD_ERR_NOMEM, -TD_ERR_LIMIT. Costs a look at all entries where the tenant holds some. */
int policy_set_demotion(struct policy *p, uint32_t tenant, bool allowed);

bool policy_holds(const struct policy *p, uint32_t tenant, const struct kv_block_id *id);

struct policy_stats {
    uint64_t limit_size, size; /* bytes */
    uint64_t blocks, ghosts, pinned;
    uint64_t touched, hits; /* blocks of all chains; of these in leading runs */
    uint64_t inserted, refused, evicted, expired;
    uint64_t memory_size; /* of the policy itself */
};
void policy_stats(const struct policy *p, struct policy_stats *out);

#endif
