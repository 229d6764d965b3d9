/* store: persistent KV blocks, conversations and pins of one directory. The segment log is the only truth; SQLite is an index
 * written behind; look-ups use an index in RAM. store/FORMAT.md gives every byte.
 *
 * Promises
 *   1. What was acknowledged (its callback ran with 0) is found again, bit for bit, after any crash or power loss.
 *   2. What was deleted does not come back, not even by `rebuild`.
 *   3. Every read is verified (CRC of the head, GCM tag a layer, id and segment bound into the authenticated data). A bad, missing or
 *      short piece is -TD_ERR_NOTFOUND and is counted; never wrong bytes.
 *   4. Nothing readable lies on disk: payloads, token ids, titles, histories, placeholder maps are sealed; ids of conversations are HMACs.
 *   5. One process per directory (lock file); a full disk stops writes, not reads.
 *   6. On a disk that hangs puts and deletes, conversations and pins end within seconds (patience.c): -TD_ERR_TIMEOUT, which says that it is not
 *      acknowledged, not that it will not be there. store_flush, erasing, compacting and closing wait.
 * Threads: all functions are thread-safe; writes are queued to one writer thread (group commit), reads run on the caller. */
#ifndef TANDEM_STORE_STORE_H
#define TANDEM_STORE_STORE_H
#include "shared/kv_block.h"
#include "shared/crypto.h"

#define STORE_TENANT_MAX    64 /* characters of a tenant or principal name, [A-Za-z0-9._-] */
#define STORE_CONV_ID_MAX   64 /* characters of a conversation id */
#define STORE_CONV_SIZE_MAX (16u << 20)
/* bytes waiting for the writer; beyond it puts answer -TD_ERR_FULL (dropped, counted) */
#define STORE_QUEUE_SIZE (256u << 20)
#define STORE_QUEUE_KEPT (32u << 20) /* of it, not for blocks: no turn is lost to blocks that wait */

/* Which tenants allow that cold blocks of theirs are re-encoded at a lossy level (shared/kv_record.h) before any is evicted. */
struct kv_level;
struct store_demotion_tenant {
    char name[STORE_TENANT_MAX + 1];
    const struct kv_level *level; /* NULL: it does not */
};
struct store_demotion {
    struct kv_shape shape; /* of the model that the levels were found good for: other blocks are left alone */
    const struct kv_level *others; /* of tenants that are not listed; NULL: they do not */
    const struct store_demotion_tenant *tenants;
    size_t count;
};

struct store;
struct store_config {
    const char *directory;
    const char *keys_directory;          /* of keys.td, for nodes that share it; NULL: `directory` */
    uint64_t limit_size;                 /* bytes of segments; 0: 90 % of the file system */
    uint64_t tenant_quota_size;          /* bytes of blocks of one tenant; 0: no quota */
    uint32_t ttl_s;                      /* blocks go so long after their last use; 0: never for that */
    uint64_t segment_size;               /* 0: 256 MiB */
    uint64_t ballast_size;               /* 0: 16 MiB */
    uint64_t queue_size;                 /* bytes that wait for the writer; 0: STORE_QUEUE_SIZE */
    uint32_t commit_interval_ms;         /* group commit at least this often while records wait; 0: 5 */
    bool read_only;                      /* command line, on a directory that no node holds */
    uint8_t master_key[CRYPTO_KEY_SIZE]; /* wraps keys.td */
    const char *master_key_path;         /* the file that it came from, to finish a rotation; NULL: none */

    const struct store_demotion *demotion; /* copied; NULL: nobody allows it */
};

int store_open(const struct store_config *config, struct store **out, struct td_error *err);
/* Write what is queued, sync, checkpoint the index, release the lock. */
void store_close(struct store *s);

/* ---- keys ---- */
/* The tenant's chain key (for block ids); makes and persists the tenant's keys on first use. */
int store_chain_key(struct store *s, const char *tenant, uint8_t out[CRYPTO_KEY_SIZE], struct td_error *err);
bool store_has_tenant(struct store *s, const char *tenant);
/* Drop the tenant's keys (its bytes can never be read again) and tombstone its records. */
int store_erase_tenant(struct store *s, const char *tenant, struct td_error *err);

/* ---- blocks: tier interface ---- */
/* A block record holds, for each layer of [layer_begin, layer_end), the K and V piece (shared/kv_block.h, head included). */
struct store_block {
    struct kv_block_id id, parent;
    struct kv_quality quality;
    uint32_t block_index;
    uint16_t layer_begin, layer_end;
    const struct span *pieces; /* [(layer_end - layer_begin) * 2], K then V of each layer */
};
typedef void (*store_done)(void *ctx, int status); /* on the writer thread */
/* store_put: copies and queues; done (may be NULL) is called with 0 after the fsync that covers the record, or with the error.
 * An equal or better block that is there already: done(0) without a write. A better one replaces. */
int store_put(struct store *s, const char *tenant, const struct store_block *block, store_done done,
              void *ctx);
/* The same for pieces that this process has made or checked: no CRC is looked at, and nothing copied where each V piece follows its K, but
 * the block held until it is written. */
struct tier_block;
int store_put_held(struct store *s, const char *tenant, struct tier_block *b, store_done done, void *ctx);

struct store_block_info {
    struct kv_quality quality;
    uint32_t block_index;
    uint16_t layer_begin, layer_end;
    uint32_t stored_size;
};
/* RAM only, no I/O: 0 or -TD_ERR_NOTFOUND. Includes blocks that are queued. */
int store_find(struct store *s, const char *tenant, const struct kv_block_id *id,
               struct store_block_info *info);
/* Read, verified and decrypted: one reference for the caller (store/tier.h). -TD_ERR_NOTFOUND for any doubt (a damaged block is dropped from the
 * index). */
int store_read_block(struct store *s, const char *tenant, const struct kv_block_id *id,
                     struct tier_block **out);
/* One block goes (tests). */
int store_delete(struct store *s, const char *tenant, const struct kv_block_id *id, store_done done,
                 void *ctx);
/* A request has looked up this chain, first block first: its blocks, held or not, count as used (store/policy.h). */
void store_touch(struct store *s, const char *tenant, const struct kv_block_id *chain, size_t count);
/* Limits of one tenant instead of those of store_config; 0: none. What is over goes with the next store_gc or when room is needed. */
int store_set_tenant(struct store *s, const char *tenant, uint64_t quota_size, uint64_t ttl_ms);

/* ---- sealed blocks: what leaves the directory, for a remote tier or a file, as it lies in the segment ---- */
/* The record's head and body, CRC checked, still sealed; malloc'ed, the caller's. The head names the block: see store_sealed_mask.
 * -TD_ERR_AGAIN: it waits for the writer, or was replaced meanwhile. */
int store_read_sealed(struct store *s, const char *tenant, const struct kv_block_id *id, uint8_t **record,
                      size_t *size);
/* Open such a record, which may be hostile: it must be of this tenant and id, or it is -TD_ERR_NOTFOUND. Works with any store that has the
 * same keys.td. record is opened in place and so destroyed. */
int store_open_sealed(struct store *s, const char *tenant, const struct kv_block_id *id, uint8_t *record,
                      size_t size, struct tier_block **out);
/* The name that a block has outside: HMAC-SHA-256 of its id under a key derived from the tenant's data key. */
int store_sealed_name(struct store *s, const char *tenant, const struct kv_block_id *id, uint8_t name[32]);
/* Hide, or show again, the ids in a record's head under a stream that only this tenant's keys and the name give. */
int store_sealed_mask(struct store *s, const char *tenant, const uint8_t name[32], uint8_t *record,
                      size_t size);

/* ---- conversations ---- */
/* A conversation record is one opaque sealed body (store/conversation.h gives its content) under (tenant, principal, conversation id). Newer replaces
 * older: compare-and-swap on `expected_version` (0: must not exist). Versions start at 1 and grow by one. */
int store_conv_put(struct store *s, const char *tenant, const char *principal, const char *conv_id,
                   uint64_t expected_version, const void *body, size_t size, store_done done,
                   void *ctx); /* -TD_ERR_CONFLICT */
/* malloc'ed body, the caller's. */
int store_conv_get(struct store *s, const char *tenant, const char *principal, const char *conv_id,
                   uint64_t *version, uint8_t **body, size_t *size);
int store_conv_delete(struct store *s, const char *tenant, const char *principal, const char *conv_id,
                      store_done done, void *ctx);
/* Bodies of all conversations of a principal, newest first; stops when fn returns non-zero. */
typedef int (*store_conv_fn)(void *ctx, const char *conv_id, uint64_t version, uint64_t updated_us,
                             const void *body, size_t size);
int store_conv_each(struct store *s, const char *tenant, const char *principal, store_conv_fn fn, void *ctx);

/* The version that is on the disk; 0: none. RAM only. */
uint64_t store_conv_durable(struct store *s, const char *tenant, const char *principal, const char *conv_id);

/* Does the disk answer? Until it does nothing is queued. */
bool store_answers(struct store *s);
/* Wait until everything queued before this call is acknowledged (tests, shutdown, end of a turn). */
int store_flush(struct store *s);

/* ---- command line ---- */
struct store_stats {
    uint64_t blocks, block_bytes, conversations, segments, segment_bytes, dead_bytes;
    uint64_t limit_bytes;  /* of segments; UINT64_MAX: the file system does not say how large it is */
    uint64_t hits, misses; /* of store_find */
    /* blocks that went to make room, or for their age; not those that went with a whole segment */
    uint64_t evictions;
    /* blocks that were re-encoded at a lossy level, and what that saved */
    uint64_t demotions, demoted_bytes;
    uint64_t puts, put_failures, reads, read_failures, damaged;
    uint64_t bytes_written, bytes_read, fsyncs;
    uint64_t queue_bytes, policy_bytes; /* of memory, the latter for the choice of what stays */
    bool writes_off;                    /* disk full, failing or silent */
    bool silent;                        /* the disk does not answer */
};
void store_stats(struct store *s, struct store_stats *out);
struct store_tenant_stats { /* blocks of one tenant on the disk */
    uint64_t blocks, size, from_device;
    uint64_t by_level[KV_L4 + 1]; /* the worst that their values went through */
};
/* Tenants that have any, until fn returns non-zero, which it returns. RAM only, whatever there is. */
typedef int (*store_tenant_fn)(void *ctx, const char *tenant, const struct store_tenant_stats *stats);
int store_each_tenant(struct store *s, store_tenant_fn fn, void *ctx);
/* Read and check every live record. bad: number found damaged. */
int store_verify(struct store *s, void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx,
                 uint64_t *records, uint64_t *bad, struct td_error *err);
/* Remake the SQLite index from segments alone (directory must not be open). progress: by segments. */
int store_rebuild(const struct store_config *config,
                  void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx, uint64_t *records,
                  struct td_error *err);
/* Rewrite, one after the other, the closed segments of which at least dead_percent of a hundred bytes are dead (0: all of them), while the
 * store goes on serving. *freed: bytes that the store takes less. -TD_ERR_DISKFULL when there is no room for the copies. */
int store_compact(struct store *s, unsigned dead_percent,
                  void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx, uint64_t *freed,
                  struct td_error *err);

/* Demote where room is short or a quota nearly used up (store_demotion), let go what has expired or is over its tenant's quota, then compact what is
 * half dead. progress: of compacting. */
int store_gc(struct store *s, void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx,
             uint64_t *blocks, uint64_t *freed, struct td_error *err);
/* Of these three what is under way ends soon with -TD_ERR_CANCELLED, as does what is asked for later: the store is to be closed. Any thread. */
void store_end_jobs(struct store *s);

/* ---- pins ---- */
/* Pinned blocks and conversations are spared by eviction; deleting works all the same. Durable on return. The block need not be there yet. */
int store_pin(struct store *s, const char *tenant, const struct kv_block_id *id, bool pinned,
              struct td_error *err);
/* The same for those of these blocks that are held, in one go. */
int store_pin_held(struct store *s, const char *tenant, const struct kv_block_id *ids, size_t count,
                   bool pinned, struct td_error *err);
int store_conv_pin(struct store *s, const char *tenant, const char *principal, const char *conv_id,
                   bool pinned, struct td_error *err);
/* Is it? In memory. A block: (tests) */
bool store_is_pinned(struct store *s, const char *tenant, const struct kv_block_id *id);
bool store_conv_is_pinned(struct store *s, const char *tenant, const char *principal, const char *conv_id);
uint64_t store_pin_count(struct store *s);

/* ---- master key ---- */
/* 64 hex digits from a 0600 file or the environment variable TANDEM_STORE_KEY; makes the file (0600) when `create` and absent. */
int store_master_key_load(const char *path, bool create, uint8_t out[CRYPTO_KEY_SIZE], struct td_error *err);
/* Wrap the tenants' keys with a new master key: keys.td is rewritten, ids and records stay as they are. */
int store_rotate_master(struct store *s, const uint8_t new_master[CRYPTO_KEY_SIZE], struct td_error *err);
/* The same with a new random key in a key file: `path`.new is written and synced, then keys.td, then `path`.new takes the place of `path`. Cut off
 * between the last two, the next store_open with master_key_path finishes it. */
int store_rotate_master_file(struct store *s, const char *path, struct td_error *err);

#endif
