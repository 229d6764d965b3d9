/* policy_internal: what policy.c and policy_heap.c share. Entries are numbered from 1; 0 is none. They live in pages that never move and are
 * never given back, so nothing is copied when the policy grows. */
#ifndef TANDEM_STORE_POLICY_INTERNAL_H
#define TANDEM_STORE_POLICY_INTERNAL_H
#include "store/policy.h"
#include "store/policy_learn.h"

#define ENTRIES_A_PAGE 4096u

enum policy_order { ORDER_ALL, ORDER_TENANT, ORDER_COUNT }; /* heaps that a leaf is in */
/* Of one tenant: leaves, of which those that could be demoted are apart; then blocks that are no leaves and could be, for tenants that allow it. */
enum policy_set { SET_LEAVES, SET_LEAVES_LOSSLESS, SET_INNER, SET_COUNT };

/* In a pairing heap: first child; next sibling; previous sibling or, of a first child, the parent. */
struct policy_links {
    uint32_t child, next, previous;
};

struct policy_entry {
    struct kv_block_id id;
    uint64_t used_ms;
    uint64_t sequence; /* of its last use: later is greater; of one chain the deepest has the least */
    struct policy_links links[ORDER_COUNT];
    uint32_t tenant, size;
    float cost_s;
    uint32_t parent;       /* while held */
    uint32_t children;     /* that are held */
    uint32_t newer, older; /* list of all entries by last use */
    uint32_t hash_next;    /* also chains free entries */
    uint32_t uses;         /* 0: known only as somebody's parent */
    uint32_t request;      /* that it was first seen in */
    uint8_t kind, stage, generation;
    bool held, pinned, queued; /* queued: in the heaps (held) or in the heap of ghosts */
    bool lossless;             /* and nobody has been told yet to demote it */
    bool named;                /* to be demoted, and on its way: until then it is spared */
};

struct policy_heads { /* oldest leaf of each kind */
    uint32_t root[LEARN_KINDS];
};
struct policy_tenant {
    uint64_t quota_size, ttl_ms, size;
    struct policy_heads sets[SET_COUNT];
    bool demotes; /* stored worse rather than let go */
};

struct policy {
    struct learn learn;
    uint64_t now_ms, sequence, limit_size, size;
    struct policy_entry **pages;
    uint32_t entries_max, entries_made, free_entry;
    uint32_t *buckets, bucket_count, bucket_mask; /* in use: see policy.c */
    uint32_t blocks, blocks_max, ghosts, pinned, request;
    uint32_t newest, stage_oldest[LEARN_STAGES]; /* of the entries in that stage */
    struct policy_heads leaves;
    uint32_t ghost_root;            /* oldest ghost */
    struct policy_tenant **tenants; /* POLICY_TENANTS_MAX of them, or NULL; [0] is shared by those beyond */
    uint32_t tenants_top, ttl_turn, demoting_tenants;
    uint64_t touched, hits, inserted, refused, evicted, expired, memory_size;
};

static inline struct policy_entry *entry_at(const struct policy *p, uint32_t index)
{
    return &p->pages[index / ENTRIES_A_PAGE][index % ENTRIES_A_PAGE];
}

struct policy_tenant *policy_tenant_make(struct policy *p, uint32_t tenant);
void policy_advance(struct policy *p, uint64_t now_ms); /* time has come to now_ms */
/* Out of the heaps before anything changes that decides in which it is; back into those where it belongs, if any. */
void policy_unqueue(struct policy *p, uint32_t index);
void policy_queue(struct policy *p, uint32_t index);
double policy_value(const struct policy *p, uint32_t index);
/* Of the oldest blocks of each kind in one or two (b: may be NULL) sets; equal values: the least recently used. 0: there is none. */
uint32_t policy_least_valuable(const struct policy *p, const struct policy_heads *a,
                               const struct policy_heads *b);

/* Pairing heaps of entries, the least recently used at the root. O(log n) amortised; no memory of their own. */
void policy_heap_add(const struct policy *p, enum policy_order order, uint32_t *root, uint32_t index);
void policy_heap_remove(const struct policy *p, enum policy_order order, uint32_t *root, uint32_t index);

#endif
