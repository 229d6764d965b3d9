/* persist: finished blocks on their way to the store. The engine copies a page into one of a few buffers; one thread encodes its pieces (L0)
 * and hands them to the tiers: the acknowledgement of the disk (after the fsync) comes back to the engine. Bounded: PERSIST_BUFFERS blocks are being
 * encoded, PERSIST_UNACKNOWLEDGED more wait for the disk; when either is used up persist_take says so and the engine keeps the page. */
#ifndef TANDEM_CLOUD_PERSIST_H
#define TANDEM_CLOUD_PERSIST_H
#include "store/tiers.h"

#define PERSIST_BUFFERS        4
#define PERSIST_UNACKNOWLEDGED 256

struct persist_block { /* what the engine fills in */
    char tenant[STORE_TENANT_MAX + 1];
    struct kv_block_id id, parent;
    struct kv_quality quality;
    uint32_t block_index;
    uint64_t owner;   /* comes back with the acknowledgement */
    uint16_t *values; /* [layer][K|V][kv_head][KV_BLOCK_TOKENS][head_dim], the buffer's */
};

struct persist;
/* wake(ctx): called on the persist or the store's writer thread when there is something to take or to pop. */
/* values: PERSIST_BUFFERS whole blocks, borrowed. */
struct persist *persist_create(struct tiers *tiers, const struct kv_shape *shape, uint16_t *values,
                               void (*wake)(void *ctx), void *ctx);
/* Encodes what was submitted, waits for its acknowledgements (the store must still be open), frees. */
void persist_destroy(struct persist *p);
struct persist_block *persist_take(struct persist *p); /* NULL: all buffers are in use */
void persist_submit(struct persist *p, struct persist_block *block);
void persist_untake(struct persist *p, struct persist_block *block); /* it will not be submitted after all */
/* An acknowledgement: true, its owner and the store's status; false: none now. */
bool persist_pop(struct persist *p, uint64_t *owner, int *status);
bool persist_is_idle(struct persist *p); /* nothing that was submitted waits to be acknowledged */

#endif
