/* loader: blocks on their way from the store into pages. One thread reads, verifies and decodes into one of a few buffers; the engine copies a
 * finished buffer into a page. The thread may hang on a sick disk for as long as it likes: the engine has deadlines and does not wait for it.
 * Bounded: LOADER_BUFFERS blocks are between loader_take and loader_release. */
#ifndef TANDEM_CLOUD_LOADER_H
#define TANDEM_CLOUD_LOADER_H
#include "store/store.h"

#define LOADER_BUFFERS 4

struct loader_block {
    char tenant[STORE_TENANT_MAX + 1];
    struct kv_block_id id;
    uint32_t block_index;
    uint64_t owner;
    int status;                /* out: 0, or the block is missing or damaged: a miss */
    struct kv_quality quality; /* out: worst of its pieces */
    uint64_t load_us;          /* out: how long it took */
    uint16_t *values;          /* out: [layer][K|V][kv_head][KV_BLOCK_TOKENS][head_dim], the buffer's */
};

struct loader;
struct loader *loader_create(struct store *store, const struct kv_shape *shape, void (*wake)(void *ctx),
                             void *ctx);
void loader_destroy(struct loader *l);              /* waits for a read in progress */
struct loader_block *loader_take(struct loader *l); /* NULL: all buffers are in use */
void loader_submit(struct loader *l, struct loader_block *block);
struct loader_block *
loader_pop(struct loader *l); /* a finished one, in the order of submission; NULL: none now */
void loader_release(struct loader *l, struct loader_block *block);

#endif
