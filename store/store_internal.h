/* store_internal: the store's own structures, shared by its files and its tests.
 *
 *     callers ── op ──> queue ──> writer thread: append … fsync ── publish ──> tables in RAM ── later ──> SQLite index
 *     readers ── tables ──> segment files
 *
 * Invariants
 *   1. A table entry points to a record only after the fsync that covers the record (and, for a new file, the directory's).
 *   2. Records are appended in one order, by one thread; a higher lsn always lies later. Among records of an id the last wins, so replaying
 *      segments in order of their ids gives the tables, whatever was forwarded or rewritten.
 *   3. A record is voided or its segment dropped only after whatever replaces it is synced.
 *   4. Entries with a pending operation are never removed; the operation's end decides.
 * Lock order: a shard of blocks or conversations, then one of pins; under them one of queue, segments, keys. Nothing is locked under those. */
#ifndef TANDEM_STORE_STORE_INTERNAL_H
#define TANDEM_STORE_STORE_INTERNAL_H
#include "shared/metrics.h"
#include "store/group.h"
#include "store/index.h"
#include "store/keys.h"
#include "store/policy.h"
#include "store/segment.h"
#include "store/store.h"
#include "store/table.h"
#include "store/tier.h"

#define STORE_BATCH_SIZE        (64u << 20)  /* bytes of one group commit; one operation may exceed it */
#define STORE_SEGMENT_SIZE      (256u << 20) /* defaults of store_config */
#define STORE_BALLAST_SIZE      (16u << 20)
#define STORE_COMMIT_MS         5
#define STORE_SEGMENTS_MIN      8 /* a limit_size holds at least so many segments */
#define STORE_SEGMENT_SIZE_MIN  (64u << 10)
#define STORE_COMMIT_ATTEMPTS   3          /* segments tried for one batch when syncs or writes fail */
#define STORE_WRITE_RETRY_US    1000000    /* after a failed commit, blocks are refused for so long */
#define STORE_INDEX_ROWS        4096       /* rows that wait for the index before it is written at once */
#define STORE_INDEX_ROWS_MAX    (1u << 20) /* and beyond which an index that stays locked is given up */
#define STORE_INDEX_INTERVAL_US 500000
/* How long a call into the disk, or an acknowledgement, may take before the disk counts as silent: longer than a good one ever rests (an SSD that
 * clears up, a queue that is full: 1 or 2 s), shorter than who asked for a reply gives up; and a second more for each so many bytes. */
#define STORE_ANSWER_US     5000000
#define STORE_ANSWER_RATE   8000000
#define GC_DEAD_PERCENT     50         /* of a segment, from which on store_gc rewrites it */
#define STORE_SPACE_RESERVE (1u << 20) /* left free for the index when judging whether a record fits */

/* ---- operations ------------------------------------------------------------------------------------------- */

enum op_kind {
    OP_BLOCK,
    OP_CONVERSATION,
    OP_DELETE,  /* `type` says of what */
    OP_ERASE,   /* all of a tenant */
    OP_FOLLOW,  /* a block that is there or on its way already: ends as `follows` does */
    OP_PIN,     /* block_index: type of what it pins */
    OP_BARRIER, /* store_flush, on its stack if `done` is set; or only to wake the writer */
};

struct store_op {
    struct store_op *next;
    atomic_uint references; /* the queue's, and readers' of a block that is not on disk yet */
    enum op_kind kind;
    uint8_t type; /* enum record_type of what it puts or deletes */
    uint32_t tenant;
    uint8_t id[32];
    uint8_t parent[32]; /* block: parent; conversation: HMAC of the principal */
    struct kv_quality quality;
    uint8_t codec;
    uint32_t block_index;
    uint16_t layer_begin, layer_end;
    uint64_t expected, version, time_us; /* conversation; a delete expects the version that it found */
    uint32_t part_count;
    struct record_part *parts; /* in the same allocation, as are part_data and data */
    uint8_t *data;             /* plain parts, one after the other, unless `held` has them */
    size_t size;               /* of them all */
    const uint8_t **part_data; /* block: the plain parts */
    struct tier_block *held;   /* block: a reference, or NULL */
    bool demotes;              /* block: a worse copy of the one on disk, which only saves room */
    size_t charge;            /* counted against STORE_QUEUE_SIZE; 0 for barriers, which must always get in */
    struct store_op *follows; /* a reference */
    store_done done;
    void *ctx;
    /* the writer's */
    bool appended, synced, published;
    bool keys_erased;              /* OP_ERASE */
    uint8_t key_id[RECORD_KEY_ID]; /* OP_ERASE: of the tenant whose keys are gone */
    int status;
    uint64_t segment_id, offset, lsn;
    uint32_t stored_size;
};

struct store_op *op_create(enum op_kind kind, uint32_t part_count, size_t data_size);
void op_hold(struct store_op *op);
void op_release(struct store_op *op); /* wipes conversations */

struct op_queue {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct store_op *first, **last;
    size_t limit; /* STORE_QUEUE_SIZE, or less */
    size_t size;  /* charges of what waits or is being written: until op_queue_done */
    uint64_t oldest_us;
    bool urgent, closing;
};
int op_queue_init(struct op_queue *q);
void op_queue_deinit(struct op_queue *q);
/* Takes the caller's reference on success. -TD_ERR_FULL beyond q->limit, -TD_ERR_CLOSED. `urgent`: do not wait for company. */
int op_queue_push(struct op_queue *q, struct store_op *op, bool urgent);
/* Wait for a batch: up to timeout_us for the first operation, then until interval_us after it, STORE_BATCH_SIZE or an urgent one.
 * NULL on time-out or when closing and empty (*closing). */
struct store_op *op_queue_take(struct op_queue *q, uint64_t timeout_us, uint64_t interval_us, bool *closing);
void op_queue_done(struct op_queue *q, size_t charge); /* an operation has ended */
size_t op_queue_size(struct op_queue *q);
void op_queue_close(struct op_queue *q);

/* ---- the store -------------------------------------------------------------------------------------------- */

struct record_place { /* where a record lies */
    uint64_t segment_id, offset;
    uint32_t stored_size;
};
struct record_claim { /* which record is said to lie at a place */
    struct record_place place;
    uint64_t lsn;
    uint32_t tenant;
    uint8_t type;
    uint8_t id[32];
};
struct record_void { /* a record to void */
    struct record_claim claim;
    bool alone; /* nothing else in the log says that it is gone */
};

struct store_counters {
    _Atomic uint64_t hits, misses, evictions, demotions, demoted_bytes, puts, put_failures, reads,
        read_failures, damaged, bytes_written, bytes_read, fsyncs;
};
struct store_metrics {
    struct metric *bytes, *blocks, *hits, *misses, *damaged, *demotions, *demoted_bytes, *fsyncs,
        *write_bytes, *queue_bytes, *policy_bytes, *writes_off, *index_behind;
};

struct tenant_count { /* blocks on the disk; see entry_count */
    _Atomic uint64_t blocks, size, from_device, by_level[KV_L4 + 1];
};

struct store {
    char directory[IO_PATH_MAX];
    struct io *io;
    bool read_only;
    _Atomic uint64_t limit_size; /* may change while the writer runs */
    uint64_t segment_size, ballast_size, commit_interval_us;
    int lock_fd, directory_fd; /* the locks: on the file, which names the holder, and on the directory; -1 */
    struct keys *keys;
    struct table blocks, conversations, pins;
    struct segment_set segments;
    pthread_mutex_t policy_lock; /* under a table's shard; guards the next two */
    struct policy *policy;       /* NULL: read_only, or still recovering */
    uint64_t tenants_limited[POLICY_TENANTS_MAX / 64 + 1];
    uint64_t tenant_quota_size, ttl_ms;
    struct demoter *demoter; /* NULL: no tenant allows it */
    struct op_queue queue;
    pthread_t writer;
    bool writer_started;
    struct store_counters counters;
    _Atomic uint64_t block_size; /* of all tenants */
    struct tenant_count tenants[KEYS_TENANTS_MAX + 1];
    struct store_metrics metrics;
    _Atomic int write_error; /* why the last commit failed; 0: writes work */
    _Atomic uint64_t write_retry_us;
    _Atomic uint64_t damage_due_us; /* when the next line about damage may be written */
    _Atomic uint64_t answer_us;     /* STORE_ANSWER_US, but in tests */
    _Atomic uint64_t call_us,
        due_us;              /* when the writer's call began, and should be back; due_us 0: it is in none */
    atomic_uint left_behind; /* acknowledgements that come too late for who waited */
    atomic_bool jobs_end;    /* see store_end_jobs */
    atomic_bool silent;      /* what store_answers last said the other way round */
    pthread_mutex_t silence_lock; /* nothing is locked under it; guards the next */
    uint64_t silent_since_us;
    struct lane *readers, *key_makers; /* of conversations; of new tenants' keys, which may lie elsewhere */
    /* the writer's alone, recovery's before it starts */
    struct segment *active; /* NULL: the next append makes one */
    uint64_t next_lsn, next_segment_id;
    struct store_op *batch;   /* being committed */
    struct store_task *tasks; /* under the queue's lock: what the writer is to do between commits */
    struct group group;       /* block records on their way to the active segment */
    uint8_t *buffer;          /* one sealed record of another kind */
    size_t buffer_size;
    struct record_void *voids; /* at the end of the commit */
    size_t void_count, void_capacity;
    struct index *index; /* NULL: off */
    bool index_behind;   /* somebody else locks it, or there is no room: tried again */
    char index_directory[IO_PATH_MAX];
    uint64_t index_retry_us, index_wait_us; /* off, and to be made anew then; 0: not wanted */
    bool index_complete; /* rows and segments together describe the log; not so while recovery is at it … */
    bool index_partial;  /* … and not when it could not read all of it, or the next start is to */
    bool index_false;    /* it was found out, and set aside */
    atomic_bool index_doubted; /* a reader has found another record where it says that one is */
    bool segment_unread; /* there is a segment that could not be opened: what tombstones cover may be in it */
    struct index_row *rows; /* changes that the index lacks */
    size_t row_count, row_capacity;
    uint64_t rows_since_us;
    bool ballast_there, making_room;
    bool last_resort; /* the record at hand may take the reserve */
    uint64_t ballast_retry_us, limits_due_us;
    bool retire_off; /* an unlink or directory sync failed: nothing is dropped any more, see space.c */
};

struct store_env { /* what tests replace, and who watches */
    struct io *io;
    const char *index_directory; /* SQLite's; NULL: the store's */
    bool segments_only;          /* no policy: whole segments are all that is evicted */
    void (*progress)(void *ctx, uint64_t done, uint64_t total); /* of recovery, by segments; may be NULL */
    void *progress_ctx;
    unsigned write_threads; /* see group_open */
    uint64_t answer_us;     /* 0: STORE_ANSWER_US */
    uint64_t direct_size;
};
int store_open_with(const struct store_config *config, const struct store_env *env, struct store **out,
                    struct td_error *err);

static inline struct table *store_table(struct store *s, uint8_t type)
{
    return type == RECORD_BLOCK ? &s->blocks : type == RECORD_PIN ? &s->pins : &s->conversations;
}

/* append.c: records into the active segment. All on the writer thread. */
/* Seal and append one record; the caller has set type, ids, parts, version …; place, lsn, salt and keys are set here. plain: the
 * parts' bytes. Rolls to a new segment when the active one is full. */
int append_record(struct store *s, struct record_head *h, const struct tenant_keys *keys,
                  const uint8_t *plain);
/* The same for a block of the batch, whose record may wait for others; then it is written when group_flush says so. */
int append_block(struct store *s, struct record_head *h, const struct tenant_keys *keys, struct store_op *op);
int append_sync(struct store *s);     /* make all that was appended durable; marks the batch's operations */
void append_abandon(struct store *s); /* after a failed write or sync: never write to this segment again */
void append_seal(struct store *s);    /* the active segment, which is synced, ends in good order */

/* commit.c: the writer thread. */
void *writer_main(void *store);
/* make the batch's synced operations visible and call them back */
void commit_publish_synced(struct store *s);
void store_void_later(struct store *s, uint8_t type, const struct entry *e);
/* The same for one that goes without a newer record or a tombstone. */
void store_void_alone(struct store *s, uint8_t type, const struct entry *e);
void store_void_now(struct store *s); /* all that wait */
void store_note_change(struct store *s, uint8_t type, const struct entry *e, bool deleted);
struct index_row *store_row_add(struct store *s); /* for the caller to fill; NULL: too many */
/* Write waiting rows to the index. `checkpoint`: and sync it. Never fails the caller: an index in trouble waits or is given up. */
void store_index_flush(struct store *s, bool checkpoint);
/* The log may hold what neither the index nor another record explains: the next start reads all of it. */
void store_index_incomplete(struct store *s);
/* The index says what is not so: set it aside, and do without for the rest of this life. */
void store_index_distrust(struct store *s);
/* An entry that has a place counts, if it is a block's: once its quality is set; no more before that, or its place, changes. Its shard is locked, or the
 * store is opening. */
void entry_count(struct store *s, const struct entry *e, bool counts);
/* Take the place out of an entry (it keeps only what is pending). True: nothing is left, remove it. */
bool entry_clear_place(struct store *s, struct entry *e);
void entry_set_place(struct store *s, struct entry *e, uint64_t segment_id, uint64_t offset, uint64_t lsn,
                     uint32_t stored_size);

/* space.c: limits, eviction, ballast. Writer thread. */
bool space_fits(struct store *s, uint64_t size);
/* -TD_ERR_DISKFULL when nothing helps; -TD_ERR_NOSPACE for a block: what is there may not go for it. */
int space_make_room(struct store *s, uint64_t size, bool is_block);
void space_housekeeping(struct store *s);
void space_publish(struct store *s);  /* the figures of metrics */
bool space_is_short(struct store *s); /* what comes will soon cost something else its place */
/* Is a closed segment dead by so many per cent of what it takes? */
bool space_is_dead(const struct segment *g, unsigned percent);
/* Copy all that lives in a sealed segment forward and drop it. Codes as in space.c. */
int space_rewrite(struct store *s, struct segment *v);
void space_open_ballast(struct store *s);
uint64_t
space_over_demotion(struct store *s); /* bytes beyond the mark from which on cold blocks are demoted */

/* master_key.c: the key in `path`.new, if there is one that fits, is the master key now: see store_rotate_master_file. 0 with *key, or
 * negative. */
int master_key_finish_rotation(const char *path, uint8_t key[CRYPTO_KEY_SIZE],
                               int (*fits)(void *ctx, const uint8_t key[CRYPTO_KEY_SIZE]), void *ctx,
                               struct td_error *err);

/* evict.c */
int evict_open(struct store *s);
/* The entry of a block, its shard locked, has got a place or is about to lose it. */
void evict_note(struct store *s, const struct entry *e, bool held);
/* The policy may have let this block go, and it stays. Its shard is locked; what is no block on disk is left alone. */
void evict_take_back(struct store *s, const struct entry *e);
/* It was to be demoted, and cannot be; retry: not now. Is it held still? */
bool evict_not_demoted(struct store *s, uint32_t tenant, const struct kv_block_id *id, bool retry);
void evict_pin(struct store *s, uint32_t tenant, const uint8_t id[32], bool pinned);
uint64_t evict_memory_size(struct store *s);
/* A better copy of the block is on its way: it stays until that has ended. Its shard is locked. */
void evict_spare(struct store *s, const struct entry *e);
/* Can a request get to the block: is its parent there, or on its way? */
bool evict_reachable(struct store *s, const struct store_op *op);
/* Where something has to go for what comes, a block that no request can get to is not worth it. */
bool evict_admits(struct store *s, const struct store_op *op);
/* On the writer, with nothing of the batch unpublished: let blocks go until `size` bytes more are free (0: only what has expired or is over a
 * tenant's quota). *count: how many went, at most a batch. Codes as append_record. */
int evict_blocks(struct store *s, uint64_t size, size_t *count);
/* The same on a disk that has no room for tombstones: records are voided where they lie. One that a crash brings back is good, or found
 * damaged when it is read. */
void evict_unburied(struct store *s, uint64_t size);

/* demote.c */
struct demoter;
int demote_open(struct store *s, const struct store_demotion *allowed);
void demote_stop(struct store *s); /* no new ones; those that the writer has end with it */
void demote_close(struct store *s);
bool demote_allows(struct store *s, uint32_t tenant);
/* On the writer: name cold blocks until re-encoding them will save so many bytes, and what brings tenants below their quotas. How many are on their
 * way now that were not. */
size_t demote_ask(struct store *s, uint64_t size);
bool demote_is_busy(struct store *s); /* some are on their way */
/* On any thread but the writer: until there is nothing that demote_ask would name, or as many as the store has blocks have had their turn. */
int demote_all(struct store *s);

/* recover.c */
int recover(struct store *s, const struct store_env *env, bool keys_found, struct td_error *err);

/* audit.c: on the writer, or before it starts. */
struct record_claim audit_claim(uint8_t type, const struct entry *e);
/* Is that record there? 1, 0, or why its head cannot be read now. */
int audit_claim_holds(struct store *s, const struct record_claim *c);
/* Does an entry stand on nothing but the word of the index? */
bool audit_is_told(struct store *s, const struct entry *e);
/* On the writer: if a reader has met what only a false index can have said. */
void audit_doubts(struct store *s);
/* Is all that the index told of a segment as its heads say? 0; -TD_ERR_BUSY: no, or they cannot be read now: it must stay. */
int audit_segment(struct store *s, struct segment *v);

/* reindex.c: on the writer, or before it starts. */
void index_want(struct store *s);   /* it is off: try again later */
void index_regain(struct store *s); /* now, if it is time */

/* read.c */
struct read_head {
    struct segment *segment; /* pinned; segment_release when done */
    struct record_head head;
    uint8_t page[RECORD_PAGE];
    uint8_t key[CRYPTO_KEY_SIZE]; /* wipe */
};
/* Read and check the head at a place and derive its key. -TD_ERR_IO: not readable now; other codes: damaged or gone. */
int read_open(struct store *s, const struct tenant_keys *keys, const struct record_place *place, uint8_t type,
              const uint8_t id[32], uint64_t lsn, struct read_head *out);
void read_close(struct store *s, struct read_head *r);
/* Read, verify and decrypt one part into plain (its size is known from the head). */
int read_part(struct store *s, const struct read_head *r, uint32_t part, uint8_t *plain);
/* A block to read the body of a record into; its pieces lie where they will be once read_open_body has opened them where they are. NULL
 * without memory. */
struct tier_block *read_block_for(const struct record_head *h);
int read_open_body(const uint8_t key[CRYPTO_KEY_SIZE], const struct record_head *h, const uint8_t *page,
                   struct tier_block *b);
/* Is the entry's record still the one at `place`? */
bool read_place_is_current(struct store *s, uint8_t type, uint32_t tenant, const uint8_t id[32],
                           const struct record_place *place);
/* The entry's record is damaged: forget it if it is still the one at `place`. */
void read_drop_damaged(struct store *s, uint8_t type, uint32_t tenant, const uint8_t id[32],
                       const struct record_place *place);
/* The newest body of a conversation, pending ones included; malloc'ed, to be wiped and freed. */
int read_conversation(struct store *s, const struct tenant_keys *keys, uint32_t tenant, const uint8_t id[32],
                      uint64_t *version, uint64_t *updated_us, uint8_t **plain, size_t *size);

/* conversations.c: a tenant's number and the HMAC that a conversation has for a name. */
int conversation_id(struct store *s, const char *tenant, const char *principal, const char *conv_id,
                    uint32_t *number, uint8_t id[32]);

/* store.c */
/* Queue an operation of an entry; takes the reference. The shard is locked; the entry may be removed on failure. */
int store_push_entry(struct store *s, struct table_shard *shard, struct entry *e, struct store_op *op);
int store_delete_id(struct store *s, uint8_t type, uint32_t tenant, const uint8_t id[32], store_done done,
                    void *ctx);
/* Put a worse copy of a block in the place of the one that it was made of, of quality `before`. -TD_ERR_AGAIN: that is not there any more, or about
 * to be replaced. done: as store_put. */
int store_put_demoted(struct store *s, uint32_t tenant, struct tier_block *b, struct kv_quality before,
                      store_done done, void *ctx);

void counter_add(_Atomic uint64_t *counter, struct metric *m, uint64_t amount);

/* A store_done that wakes the thread that waits, however long that takes. */
struct store_waiter {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool done;
    int status;
    bool left; /* of those in patience.c, as the next two: nobody waits any more */
    uint64_t since_us;
    struct store *store;
};
#define STORE_WAITER                                                                                         \
    ((struct store_waiter){.lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER})
void store_waiter_done(void *waiter, int status);
int store_waiter_wait(struct store_waiter *w);

/* patience.c */
struct lane_job;
int patience_open(struct store *s, uint64_t answer_us);
void patience_close(struct store *s); /* waits for reads under way */
/* On the writer and its helpers: a call that brings so many bytes to the disk begins, or the next of a row; they do something else. */
void patience_call(struct store *s, uint64_t size);
void patience_rest(struct store *s);
/* A waiter that waits no longer than STORE_ANSWER_US and what is queued by then, behind the rewriting of a segment, may take. NULL without memory. */
struct store_waiter *patience_waiter(struct store *s);
void patience_done(void *waiter, int status); /* its store_done */
/* queued: what queueing said, which it returns where that failed. -TD_ERR_TIMEOUT: it was not acknowledged in time, and may be yet. w is gone. */
int patience_wait(struct store_waiter *w, int queued);
/* A tenant's number; it is made if it is new, by a deadline as well: who asks may be the network's thread. */
int patience_tenant(struct store *s, const char *name, uint32_t *tenant, struct td_error *err);
/* A read of so many bytes by a deadline. Codes and ownership as lane_run, but -TD_ERR_TIMEOUT for -TD_ERR_BUSY. */
int patience_read(struct store *s, struct lane_job *job, uint64_t size);

/* Work that only the writer may do, for a caller that waits: run between two commits, so that whoever has more of it than is good
 * for those who put comes again for the next piece. */
struct store_task {
    struct store_task *next;
    int (*run)(struct store *s, struct store_task *task);
    struct store_waiter waiter;
};
int store_run_task(struct store *s, struct store_task *task);
void store_hurry(struct store *s);                  /* somebody waits for what is queued: commit it at once */
void store_do_tasks(struct store *s, bool closing); /* the writer */

#endif
