/* kv_disk: the device's own KV on its disk, behind local_kv: what a restart, or want of memory, would take is read back instead of being computed again.
 *
 * It is the store of the conversations (store/store.h) that holds the blocks: sealed under the device's keys, bounded by a quota, evicted by the
 * store's rule. A block record has layers [0, k), lossless. Its id names principal, model, layout and all tokens up to it, so what is found is the
 * right block or nothing; what is damaged is nothing.
 *
 * Reading runs on a thread of its own, a few blocks ahead of whoever takes them. Whoever takes says how long it may wait: so long as computing would
 * have taken. A disk that is later than that counts as empty until it has answered, and KV_DISK_REST_US longer: reading is never slower than computing
 * by more than one block, or a few hundredths of a second.
 *
 * Threads: kv_disk_take from one thread, everything else from any. */
#ifndef TANDEM_EDGE_KV_DISK_H
#define TANDEM_EDGE_KV_DISK_H
#include "store/tier.h"

#define KV_DISK_AHEAD    8u   /* blocks read and not taken yet */
#define KV_DISK_WANT_MAX 256u /* blocks that one chain is read ahead for; what is behind is asked for then */
#define KV_DISK_REST_US  10000000

struct kv_disk;
/* store: borrowed. limit_size: bytes of blocks. */
int kv_disk_create(struct store *store, const char *tenant, uint64_t limit_size, struct kv_disk **out,
                   struct td_error *err);
/* Nothing is to be kept: blocks of earlier runs go. */
void kv_disk_clear(struct store *store, const char *tenant);
void kv_disk_destroy(struct kv_disk *d); /* NULL: nothing happens */

/* Layers [0, n) of the block that could be read; 0: none. No I/O. */
uint32_t kv_disk_layers(struct kv_disk *d, const struct kv_block_id *id);
/* Has it so many layers, of a quality that will do? */
bool kv_disk_accepts(struct kv_disk *d, const struct kv_block_id *id, uint32_t layers, enum kv_accept accept,
                     enum kv_numerics numerics);
/* A request uses this chain; its blocks count as used, wherever they are. */
void kv_disk_touch(struct kv_disk *d, const struct kv_block_id *chain, uint32_t count);
/* Does a put of so many layers add anything? */
bool kv_disk_lacks(struct kv_disk *d, const struct kv_block_id *id, uint32_t layers);
/* As store_put; what does not fit its queue is dropped and counted. */
int kv_disk_put(struct kv_disk *d, const struct store_block *block);
/* The first block of a chain, of which the next ones will be taken too. One reference for the caller. Waits for wait_us at most, 0: not at all.
 * -TD_ERR_NOTFOUND: it is not there, or damaged; -TD_ERR_AGAIN: not in time. */
int kv_disk_take(struct kv_disk *d, const struct kv_block_id *chain, uint32_t count, uint64_t wait_us,
                 struct tier_block **out);
/* What taking a block and putting it into its page has taken, for the planner: microseconds a layer; 0: not known yet. */
void kv_disk_measured(struct kv_disk *d, uint64_t took_us, uint32_t layers);
double kv_disk_layer_us(struct kv_disk *d);

#endif
