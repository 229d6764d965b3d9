/* table: the look-up index in RAM: (tenant, id) -> where the newest record lies and what waits to be written.
 *
 * Open addressing with linear probing, in 64 shards with a lock each, so that a look-up is a hash, a lock that is rarely
 * contended and a probe, and growing moves a 64th of the entries at a time. Ids are HMACs, yet devices know the key of their own
 * namespace, so slots are chosen by a hash with a random seed. A pointer to an entry is good while its shard's lock is held and nothing
 * is inserted or removed. */
#ifndef TANDEM_STORE_TABLE_H
#define TANDEM_STORE_TABLE_H
#include "shared/kv_block.h"
#include <pthread.h>

struct store_op;

struct entry_conversation {
    uint8_t principal[32]; /* HMAC */
    uint64_t durable;      /* version on disk; 0: none */
    uint64_t written;      /* version appended last, synced or not */
    uint64_t updated_us;
};

struct entry {
    uint8_t id[32];
    uint8_t parent[32];   /* blocks */
    uint32_t tenant;      /* 0: free slot */
    uint32_t stored_size; /* bytes of the record on disk */
    uint64_t segment_id;  /* 0: nothing on disk yet */
    uint64_t offset, lsn;
    struct kv_quality quality;
    uint32_t block_index;
    uint16_t layer_begin, layer_end;
    /* the newest operation that waits for the writer; NULL: none. Owned by the queue */
    struct store_op *pending;
    struct entry_conversation *conversation; /* owned; conversations only */
};

struct table_shard {
    pthread_mutex_t lock;
    struct entry *slots; /* slot_count of them, a power of two, or NULL */
    size_t slot_count, used_count;
};

#define TABLE_SHARD_COUNT 64
struct table {
    uint64_t seed;
    struct table_shard shards[TABLE_SHARD_COUNT];
};

int table_init(struct table *t); /* 0 or -TD_ERR_CRYPTO (no randomness) */
void table_deinit(struct table *t);

/* Lock and return the shard of an id; table_unlock when done. */
struct table_shard *table_lock(struct table *t, const uint8_t id[32]);
void table_unlock(struct table_shard *s);

/* With the shard locked. */
struct entry *table_find(struct table *t, struct table_shard *s, uint32_t tenant, const uint8_t id[32]);
/* Find or make (zeroed but for tenant and id); NULL without memory. */
struct entry *table_insert(struct table *t, struct table_shard *s, uint32_t tenant, const uint8_t id[32]);
void table_remove(struct table *t, struct table_shard *s, struct entry *e); /* frees e->conversation */

size_t table_count(struct table *t);

#endif
