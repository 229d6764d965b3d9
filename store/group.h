/* group: block records that are sealed and written side by side.
 *
 *     append.c places a record ── group_add ──> group ── group_flush: sealed and written by several threads ──> the sync
 *
 * A record's place is part of what its seal authenticates, so the writer gives out places first, in order; what takes the time, the cipher and
 * the write, then needs no order: none of it counts before the sync that comes after all of it. Each thread has a buffer of one record and while
 * it waits for the disk others seal: more of them than there are cores, or the disk waits while all seal and then the cores while all write.
 *
 * A large group goes past the page cache: copying into it costs half as much as the cipher, and the kernel then writes from there while
 * everybody waits for the sync. A small one does not: what a few requests wrote is likely to be read again from memory. */
#ifndef TANDEM_STORE_GROUP_H
#define TANDEM_STORE_GROUP_H
#include "store/record.h"

#define GROUP_RECORDS_MAX  64
#define GROUP_BUFFERS_SIZE (64u << 20) /* of all threads together, unless two records are larger */
#define GROUP_DIRECT_SIZE  (8u << 20)  /* from here on past the page cache */
#define GROUP_THREADS_MAX  16
#define GROUP_HUGE_PAGE    ((size_t)2 << 20)

struct store;
struct store_op;
struct tenant_keys;
struct workers;

struct group_slot {
    struct store_op *op; /* its plain parts */
    struct record_head head;
    uint8_t key[CRYPTO_KEY_SIZE];
    int status;
};

struct group {
    struct group_slot *slots; /* [GROUP_RECORDS_MAX] */
    unsigned count;
    uint64_t size;           /* placed and not written yet */
    bool one_by_one;         /* until the end of the commit */
    struct workers *workers; /* NULL: the writer alone */
    unsigned threads;
    uint8_t *buffers[GROUP_THREADS_MAX]; /* of a record, page-aligned; those in use come first */
    uint64_t buffer_size;
    uint64_t direct_size; /* GROUP_DIRECT_SIZE, but in tests */
    int direct_fd;        /* of the active segment, past the page cache; -1: none */
    bool direct_refused;  /* this segment's file system does not do it */
};

/* Memory to write from, of huge pages where there are any: a disk is told of few long stretches instead of many short ones. free() it. */
uint8_t *group_buffer(size_t size);

/* All on the writer's thread. */
/* threads, direct_size: 0 for what is usual (as many as there are cores, and some that wait for the disk). */
int group_open(struct store *s, unsigned threads, uint64_t direct_size);
void group_close(struct store *s);
/* Can this operation's record join those that wait? Otherwise they are to be flushed before anything is appended. */
bool group_takes(struct store *s, const struct store_op *op);
/* The record of `h`, placed at the active segment's end. */
int group_add(struct store *s, struct store_op *op, const struct record_head *h,
              const struct tenant_keys *keys);
/* Seal and write what waits. -TD_ERR_IO: the segment is in doubt. -TD_ERR_AGAIN: the disk had no room, all of it is taken back (its
 * operations are not appended any more), and records go one by one until the end of the commit; the other codes are those of such a one. */
int group_flush(struct store *s);
/* the active segment ends, or is given up with what waits for it */
void group_leave_segment(struct store *s);
void group_shrink(struct store *s); /* the commit is over: but for a few MiB of buffers they go back */

#endif
