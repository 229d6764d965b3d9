/* loader: blocks on their way from the store's tiers into pages. A few threads wait for tiers and decode, each into one of a few buffers; the
 * engine copies a finished buffer into a page. Threads come back by the tiers' deadlines, and the engine has its own and does not wait for them.
 * Bounded: LOADER_BUFFERS blocks are between loader_take and loader_release. */
#ifndef TANDEM_CLOUD_LOADER_H
#define TANDEM_CLOUD_LOADER_H
#include "store/tiers.h"

#define LOADER_BUFFERS 8

struct loader_block {
    char tenant[STORE_TENANT_MAX + 1];
    struct kv_block_id id;
    uint32_t block_index;
    enum kv_accept accept; /* as poor a copy as may be read, for */
    enum kv_numerics numerics;
    uint64_t owner, asked_us;  /* the engine's, as the next */
    uint32_t depth;            /* blocks under way when it was asked for, itself included */
    int status;                /* out: 0, or the block is missing or damaged: a miss */
    struct kv_quality quality; /* out: worst of its pieces */
    enum tier_kind tier;       /* out: where it was */
    uint64_t (*clock)(void);   /* the engine's: when it was read, by which clock */
    uint64_t done_us;          /* out */
    uint16_t *values;          /* out: [layer][K|V][kv_head][KV_BLOCK_TOKENS][head_dim], the buffer's */
};

struct loader;
/* values: LOADER_BUFFERS whole blocks, borrowed. */
struct loader *loader_create(struct tiers *tiers, const struct kv_shape *shape, uint16_t *values,
                             void (*wake)(void *ctx), void *ctx);
void loader_destroy(struct loader *l);              /* waits for reads in progress */
struct loader_block *loader_take(struct loader *l); /* NULL: all buffers are in use */
void loader_submit(struct loader *l, struct loader_block *block);
struct loader_block *loader_pop(struct loader *l); /* a finished one, in any order; NULL: none now */
unsigned loader_busy(struct loader *l);            /* blocks that are wanted or being read (tests) */
void loader_release(struct loader *l, struct loader_block *block);

#endif
