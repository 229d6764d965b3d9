/* uring: see uring.h.
 *
 * The kernel and a thread share two rings. We fill entries behind `sq_tail` and publish it (release); the kernel puts results behind `cq_tail` (read
 * with acquire), and we take them and publish `cq_head`. Nothing is left under way when uring_read returns: the buffer is the caller's. */
#include "store/uring.h"
#include <errno.h>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct ring {
    int fd;
    uint8_t *rings; /* both, in one mapping */
    size_t rings_size;
    struct io_uring_sqe *entries;
    size_t entries_size;
    atomic_uint *sq_tail, *cq_head, *cq_tail;
    uint32_t sq_mask, cq_mask, *sq_array;
    struct io_uring_cqe *results;
};

static pthread_key_t ring_key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static bool key_made;
static atomic_bool forbidden; /* the first refusal counts for all threads */

static void ring_destroy(void *arg)
{
    struct ring *r = arg;
    if (r->entries)
        munmap(r->entries, r->entries_size);
    if (r->rings)
        munmap(r->rings, r->rings_size);
    close(r->fd);
    free(r);
}

static void make_key(void)
{
    key_made = pthread_key_create(&ring_key, ring_destroy) == 0;
}

static void *map(int fd, size_t size, uint64_t what)
{
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, (off_t)what);
    return at == MAP_FAILED ? NULL : at;
}

static bool map_rings(struct ring *r, const struct io_uring_params *p)
{
    size_t sq = p->sq_off.array + p->sq_entries * sizeof(uint32_t);
    size_t cq = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    r->rings_size = TD_MAX(sq, cq);
    r->entries_size = p->sq_entries * sizeof(struct io_uring_sqe);
    if (!(p->features & IORING_FEAT_SINGLE_MMAP))
        return false; /* before Linux 5.4 */
    r->rings = map(r->fd, r->rings_size, IORING_OFF_SQ_RING);
    r->entries = map(r->fd, r->entries_size, IORING_OFF_SQES);
    if (!r->rings || !r->entries)
        return false;
    r->sq_tail = (atomic_uint *)(r->rings + p->sq_off.tail);
    r->sq_mask = *(uint32_t *)(r->rings + p->sq_off.ring_mask);
    r->sq_array = (uint32_t *)(r->rings + p->sq_off.array);
    r->cq_head = (atomic_uint *)(r->rings + p->cq_off.head);
    r->cq_tail = (atomic_uint *)(r->rings + p->cq_off.tail);
    r->cq_mask = *(uint32_t *)(r->rings + p->cq_off.ring_mask);
    r->results = (struct io_uring_cqe *)(r->rings + p->cq_off.cqes);
    return true;
}

static struct ring *ring_create(void)
{
    struct io_uring_params p = {0};
    struct ring *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->fd = (int)syscall(__NR_io_uring_setup, URING_DEPTH, &p);
    if (r->fd < 0) {
        free(r);
        return NULL;
    }
    if (!map_rings(r, &p)) {
        ring_destroy(r);
        return NULL;
    }
    return r;
}

/* This thread's. NULL: there is none to be had. */
static struct ring *ring_get(void)
{
    pthread_once(&key_once, make_key);
    if (!key_made || atomic_load(&forbidden))
        return NULL;
    struct ring *r = pthread_getspecific(ring_key);
    if (r)
        return r;
    r = ring_create();
    if (!r || pthread_setspecific(ring_key, r) != 0) {
        if (r)
            ring_destroy(r);
        atomic_store(&forbidden, true);
        return NULL;
    }
    return r;
}

struct whole { /* the read that is cut into pieces */
    int fd;
    uint8_t *data;
    size_t size, next; /* next: what has been asked for */
    uint64_t offset;
    size_t end; /* nothing counts from here on: the file ended, or a piece failed */
    int error;
    unsigned under_way;
};

static size_t piece_size(const struct whole *w, size_t at)
{
    return TD_MIN(w->size - at, (size_t)URING_PIECE_SIZE);
}

static void ask(struct ring *r, struct whole *w)
{
    unsigned tail = atomic_load_explicit(r->sq_tail, memory_order_relaxed), at = tail & r->sq_mask;
    r->entries[at] = (struct io_uring_sqe){.opcode = IORING_OP_READ,
                                           .fd = w->fd,
                                           .off = w->offset + w->next,
                                           .addr = (uint64_t)(uintptr_t)(w->data + w->next),
                                           .len = (uint32_t)piece_size(w, w->next),
                                           .user_data = w->next};
    r->sq_array[at] = at;
    atomic_store_explicit(r->sq_tail, tail + 1, memory_order_release);
    w->next += piece_size(w, w->next);
    w->under_way++;
}

/* A piece that came short or not at all is read in the plain way, which tells why: the kernel may do the first in the middle of a file. */
static void finish_piece(struct whole *w, size_t at, int64_t result)
{
    size_t wanted = piece_size(w, at), have = result > 0 ? (size_t)result : 0;
    int64_t got = 1;
    while (have < wanted && (got > 0 || got == -EINTR)) {
        got = pread(w->fd, w->data + at + have, wanted - have, (off_t)(w->offset + at + have));
        got = got < 0 ? -errno : got;
        have += got > 0 ? (size_t)got : 0;
    }
    if (have < wanted && at + have < w->end) {
        w->end = at + have;
        w->error = got < 0 ? (int)got : 0;
    }
}

static void take_results(struct ring *r, struct whole *w)
{
    unsigned head = atomic_load_explicit(r->cq_head, memory_order_relaxed);
    while (head != atomic_load_explicit(r->cq_tail, memory_order_acquire)) {
        const struct io_uring_cqe *c = &r->results[head & r->cq_mask];
        size_t at = (size_t)c->user_data;
        int64_t got = c->res;
        atomic_store_explicit(r->cq_head, ++head, memory_order_release);
        w->under_way--;
        finish_piece(w, at, got);
    }
}

int64_t uring_read(int fd, void *data, size_t size, uint64_t offset)
{
    struct ring *r = ring_get();
    struct whole w = {.fd = fd, .data = data, .size = size, .offset = offset, .end = size};
    if (!r)
        return -ENOSYS;
    unsigned fresh = 0; /* asked for, and the kernel has not been told */
    while (w.under_way > 0 || (w.next < size && w.next < w.end)) {
        for (; w.under_way < URING_DEPTH && w.next < size && w.next < w.end; fresh++)
            ask(r, &w);
        long n = syscall(__NR_io_uring_enter, r->fd, fresh, 1u, IORING_ENTER_GETEVENTS, NULL, (size_t)0);
        if (n >= 0) {
            fresh -= TD_MIN((unsigned)n, fresh);
        } else if (errno != EINTR &&
                   fresh == w.under_way) { /* refused, with nothing under way: this ring is not used again */
            atomic_store(&forbidden, true);
            return -ENOSYS;
        } else if (errno !=
                   EINTR) { /* what is under way writes into the caller's buffer: it must come back first */
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
        take_results(r, &w);
    }
    return w.error < 0 ? w.error : (int64_t)w.end;
}

#else
int64_t uring_read(int fd, void *data, size_t size, uint64_t offset)
{
    (void)fd, (void)data, (void)size, (void)offset;
    return -ENOSYS;
}
#endif
