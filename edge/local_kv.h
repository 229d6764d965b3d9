/* local_kv: the device's own KV of layers [0, k): which blocks it holds, in which pages of the prefill backend.
 *
 * Blocks are named by a chain of their own under the principal's key, from the root (zeros), so KV of one principal is never another's. A block is
 * published once all of its 64 tokens have been run through [0, k); from then on it is shared and read-only, and outlives the request that made it,
 * until room is needed: this is the prefix cache of the device, and what makes a second turn prefill its new tokens only.
 *
 * Edge depth: the layers that are held at a position. A block is published with the layers that it was run through; a deeper one replaces a
 * shallower one. Layers [0, k) can be run on a token when every earlier one has depth k or more.
 *
 * Behind it the same blocks lie on the device's disk (kv_disk.h), if it is given one; they count as held, and the prefill thread brings them back.
 *
 * Threads: everything here may be called from any thread (one lock, held briefly); the bytes of pages belong to the prefill thread. */
#ifndef TANDEM_EDGE_LOCAL_KV_H
#define TANDEM_EDGE_LOCAL_KV_H
#include "edge/kv_disk.h"
#include "kernels/prefix_cache.h"

struct local_kv;
struct local_kv *local_kv_create(uint32_t page_count); /* NULL without memory */
void local_kv_destroy(struct local_kv *kv);
/* Before anybody else uses kv. disk: borrowed, NULL for none. */
void local_kv_set_disk(struct local_kv *kv, struct kv_disk *disk);
struct kv_disk *local_kv_disk(const struct local_kv *kv);

/* The names of the whole blocks of ids: count / KV_BLOCK_TOKENS entries. previous: the block before ids, or NULL at the root. */
void local_kv_chain(const uint8_t principal_key[32], const uint8_t fingerprint[TD_HASH_SIZE],
                    const uint8_t layout_hash[TD_HASH_SIZE], const struct kv_block_id *previous,
                    const int32_t *ids, uint32_t count, struct kv_block_id *out);

/* depths[i]: the layers that every block up to i is held with, in memory or on the disk, so that it falls and never rises. Returns how many are
 * above 0. *unread: those of them whose layers the disk has and memory has not. */
uint32_t local_kv_depths(struct local_kv *kv, const struct kv_block_id *chain, uint32_t block_count,
                         uint16_t *depths, uint32_t *unread);
/* Leading blocks of the chain that memory holds with so many layers. */
uint32_t local_kv_held(struct local_kv *kv, const struct kv_block_id *chain, uint32_t block_count,
                       uint32_t layers);
/* The same, but each gets one more reference, and pages[i] is its page: the caller's until local_kv_release. */
uint32_t local_kv_take(struct local_kv *kv, const struct kv_block_id *chain, uint32_t block_count,
                       uint32_t layers, uint32_t *pages);
/* A page for writing, with one reference; PAGE_NONE when all are in use. May evict what nobody uses. */
uint32_t local_kv_alloc(struct local_kv *kv);
void local_kv_release(struct local_kv *kv, uint32_t page);
uint32_t local_kv_used_until(struct local_kv *kv); /* pages from here on have never been taken */
/* Block `index` of the chain is complete in `page`, in layers [0, layers). 0, or -TD_ERR_NOMEM (then it is not kept). */
int local_kv_publish(struct local_kv *kv, const struct kv_block_id *chain, uint32_t index, uint32_t page,
                     uint32_t layers, enum kv_numerics numerics);

#endif
