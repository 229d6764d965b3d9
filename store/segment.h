/* segment: the set of segment files of a store, their descriptors, and the scan that finds records in one.
 *
 *     (created) ── append ──> active ── full, closed or failed sync ──> sealed ── all live records copied out ──> dropped
 *
 * One thread (the writer; before it starts, recovery) appends, seals and drops; any thread reads through segment_acquire.
 * A store may have thousands of segments: descriptors are opened on demand and the least recently used are closed. */
#ifndef TANDEM_STORE_SEGMENT_H
#define TANDEM_STORE_SEGMENT_H
#include "store/io.h"
#include "store/record.h"
#include <pthread.h>
#include <stdatomic.h>

#define SEGMENT_FDS_MAX   128
#define SEGMENT_NAME_SIZE 32

struct segment {
    uint64_t id, nonce, first_lsn;
    _Atomic uint64_t end;      /* where the next record goes; page-aligned */
    uint64_t durable_end;      /* bytes before it are synced */
    _Atomic uint64_t told_end; /* before it the tables know what the index says; 0: what the log says */
    uint32_t next_sequence;
    uint32_t tombstone_count;
    bool sealed;
    bool name_durable; /* the directory was synced after the file was made */
    bool sync_due; /* voids in it are the only word of their records: the index hears of it after a sync */
    _Atomic uint64_t live_count, live_size; /* records that the tables point to */
    _Atomic uint64_t hole_size;             /* punched out */
    _Atomic bool
        suspect; /* reading failed: what looks dead in it may live, so it is not dropped for being empty */
    /* guarded by segment_set.lock */
    int fd; /* -1: closed */
    unsigned users;
    bool dropped; /* freed when the last user leaves */
    uint64_t used_at;
};

struct segment_set {
    struct io *io;
    const char *directory; /* borrowed */
    pthread_mutex_t lock;  /* guards the list and the descriptors */
    struct segment **list; /* by ascending id; changed by the one appending thread only */
    size_t count, capacity, open_count;
    uint64_t use_clock;
};

void segments_init(struct segment_set *set, struct io *io, const char *directory);
void segments_deinit(struct segment_set *set);

void segment_name(uint64_t id, char out[SEGMENT_NAME_SIZE]);
bool segment_name_parse(const char *name, uint64_t *id);

/* Register a segment (recovery, or just created). Takes ownership of the struct on success. */
int segments_add(struct segment_set *set, struct segment *s);
/* Make a new file with its head written, not yet synced, and register it. */
int segment_create(struct segment_set *set, uint64_t id, uint64_t first_lsn, uint64_t now_us,
                   struct segment **out);
/* Another descriptor of a segment's file, whose writes go past the page cache; negative errno where that is not to be had. */
int segment_open_direct(struct segment_set *set, const struct segment *s);
/* On the appending thread: find without pinning; NULL. */
struct segment *segment_find(struct segment_set *set, uint64_t id);
/* Find and pin an open segment. Read s->fd while pinned. NULL with *rc (may be NULL): -TD_ERR_NOTFOUND, there is none, or its file has
 * gone; -TD_ERR_IO, it cannot be opened. */
struct segment *segment_acquire(struct segment_set *set, uint64_t id, int *rc);
void segment_release(struct segment_set *set, struct segment *s);
void segments_trim(struct segment_set *set); /* close descriptors above SEGMENT_FDS_MAX */
/* Count a live record in (added) or out; a segment that is gone is ignored. */
void segment_account(struct segment_set *set, uint64_t id, uint32_t stored_size, bool added);
void segment_suspect(struct segment_set *set, uint64_t id);
/* Take out of the list; freed once nobody uses it. */
void segment_drop(struct segment_set *set, struct segment *s);
int segment_unlink(struct segment_set *set, uint64_t id); /* the file; negative errno */
uint64_t segments_size(struct segment_set *set);          /* bytes of all files, holes taken off */

/* ---- scan ---- */

struct segment_scan {
    uint64_t end;         /* after the last good record */
    uint64_t durable_end; /* the largest that any head states */
    uint32_t record_count;
    uint32_t skipped_pages; /* pages inside the log without a good head where one was due */
    bool unreadable;        /* the disk refused to read some page: the tail may be there after all */
};
/* Called for each good head; `page` holds its bytes. Non-zero stops the scan and is returned. */
typedef int (*segment_scan_fn)(void *ctx, const struct record_head *head, const uint8_t *page);
/* Visit the record heads of [from, size) of a file. A page that should hold a head and does not is skipped and the next one
 * tried, so damage costs the records that it hit. Reads heads only, with the next ones asked for ahead of time. */
int segment_scan(struct io *io, int fd, const struct segment *s, uint64_t from, uint64_t size,
                 segment_scan_fn fn, void *ctx, struct segment_scan *out);
/* Does the body of a record have the CRC that its head states? 0, -TD_ERR_CHECKSUM, or a reading error. */
int segment_check_body(struct io *io, int fd, const struct record_head *head);

#endif
