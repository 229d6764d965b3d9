/* group: see group.h. */
#include "store/group.h"
#include "shared/workers.h"
#include "store/store_internal.h"
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define WAITING_THREADS 8u         /* beyond one a core: while they wait for the disk the others seal */
#define KEEP_SIZE       (8u << 20) /* buffers beyond it are given back after the commit */

/* ---- life --------------------------------------------------------------------------------------------------- */

static unsigned choose_threads(unsigned wanted)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned threads = wanted ? wanted : (unsigned)TD_MAX(cores, 1L) + WAITING_THREADS;
    return TD_MIN(threads, (unsigned)GROUP_THREADS_MAX);
}

int group_open(struct store *s, unsigned threads, uint64_t direct_size)
{
    struct group *g = &s->group;
    g->slots = calloc(GROUP_RECORDS_MAX, sizeof *g->slots);
    g->threads = choose_threads(threads);
    g->direct_size = direct_size ? direct_size : GROUP_DIRECT_SIZE;
    g->direct_fd = -1;
    return g->slots ? 0 : -TD_ERR_NOMEM;
}

/* All but the first `kept`. */
static void free_buffers(struct group *g, size_t kept)
{
    for (size_t i = kept; i < TD_COUNT(g->buffers); i++) {
        free(g->buffers[i]);
        g->buffers[i] = NULL;
    }
    if (kept == 0)
        g->buffer_size = 0;
}

static size_t buffer_whole(const struct group *g)
{
    return align_up((size_t)g->buffer_size, GROUP_HUGE_PAGE);
}

void group_close(struct store *s)
{
    group_leave_segment(s);
    workers_destroy(s->group.workers);
    free_buffers(&s->group, 0);
    free(s->group.slots);
}

void group_leave_segment(struct store *s)
{
    struct group *g = &s->group;
    for (unsigned i = 0; i < g->count; i++)
        crypto_wipe(g->slots[i].key, sizeof g->slots[i].key);
    g->count = 0;
    g->size = 0;
    if (g->direct_fd >= 0 && g->slots)
        s->io->close(s->io, g->direct_fd);
    g->direct_fd = -1;
    g->direct_refused = false;
}

void group_shrink(struct store *s)
{
    struct group *g = &s->group;
    g->one_by_one = false;
    if (g->buffer_size > 0)
        free_buffers(g, KEEP_SIZE / buffer_whole(g));
}

/* ---- in ----------------------------------------------------------------------------------------------------- */

static uint64_t size_of_op(const struct store_op *op)
{
    return record_size(op->size + (uint64_t)op->part_count * CRYPTO_TAG_SIZE);
}

bool group_takes(struct store *s, const struct store_op *op)
{
    const struct group *g = &s->group;
    uint64_t size = size_of_op(op);
    if (op->kind != OP_BLOCK || g->one_by_one)
        return false;
    return g->count == 0 ||
           (g->count < GROUP_RECORDS_MAX && s->active->end + size <= s->segment_size && space_fits(s, size));
}

int group_add(struct store *s, struct store_op *op, const struct record_head *h,
              const struct tenant_keys *keys)
{
    struct group *g = &s->group;
    struct group_slot *slot = &g->slots[g->count];
    int rc = record_open_key(keys->data_key, h, slot->key);
    if (rc < 0)
        return rc;
    slot->op = op;
    slot->head = *h;
    slot->status = 0;
    g->count++;
    g->size += record_size(h->body_size);
    return 0;
}

/* ---- out ---------------------------------------------------------------------------------------------------- */

uint8_t *group_buffer(size_t size)
{
    size_t whole = align_up(size, GROUP_HUGE_PAGE);
    uint8_t *buffer = aligned_alloc(GROUP_HUGE_PAGE, whole);
    if (buffer) /* or not: it is as good for anything but speed */
        (void)madvise(buffer, whole, MADV_HUGEPAGE);
    return buffer;
}

/* Buffers for the largest record, one each for that many threads; for every record where there are no more than that, so that a small
 * group touches few. How many threads; 0: no memory. */
static unsigned reserve_buffers(struct group *g)
{
    uint64_t size = 0;
    for (unsigned i = 0; i < g->count; i++)
        size = TD_MAX(size, record_size(g->slots[i].head.body_size));
    if (size > g->buffer_size)
        free_buffers(g, 0);
    g->buffer_size = TD_MAX(g->buffer_size, size);
    uint64_t fit = TD_MAX(GROUP_BUFFERS_SIZE / buffer_whole(g), UINT64_C(2));
    unsigned threads = g->count == 1 ? 1 : (unsigned)TD_MIN(fit, (uint64_t)g->threads);
    unsigned wanted = TD_MIN(threads, g->count), count = 0;
    for (; count < wanted; count++) {
        if (!g->buffers[count])
            g->buffers[count] = group_buffer((size_t)g->buffer_size);
        if (!g->buffers[count])
            break;
    }
    return count == wanted ? threads : count;
}

/* The space comes first: then there is room for all or nothing is written, and writes within a file's size need not wait for each
 * other. */
static int open_direct(struct store *s, uint64_t start)
{
    struct group *g = &s->group;
    if (g->size < g->direct_size || g->direct_refused)
        return 0;
    if (g->direct_fd < 0)
        g->direct_fd = segment_open_direct(&s->segments, s->active);
    int rc = g->direct_fd < 0 ? g->direct_fd : s->io->allocate(s->io, s->active->fd, start, g->size);
    g->direct_refused =
        rc < 0 && io_status(rc) != -TD_ERR_DISKFULL; /* what that means for the disk, writing will tell */
    return rc < 0 && !g->direct_refused ? io_status(rc) : 0;
}

/* What the direct way refuses or leaves over goes through the page cache; what it says of the disk counts. */
static int write_at(struct store *s, bool direct, const uint8_t *data, size_t size, uint64_t offset)
{
    int64_t put = direct ? s->io->pwrite(s->io, s->group.direct_fd, data, size, offset) : 0;
    if (put < 0 && put != -EINVAL && put != -EINTR)
        return io_status(put);
    size_t done = put > 0 ? (size_t)put : 0;
    return io_write_all(s->io, s->active->fd, data + done, size - done, offset + done);
}

struct flush {
    struct store *store;
    bool direct;
    bool buffer_each; /* of the records, not of the threads */
};

static void seal_and_write(void *ctx, size_t task, unsigned worker)
{
    const struct flush *f = ctx;
    struct group *g = &f->store->group;
    struct group_slot *slot = &g->slots[task];
    uint8_t *record = g->buffers[f->buffer_each ? task : worker];
    slot->status = record_seal(slot->key, &slot->head, slot->op->part_data, record);
    crypto_wipe(slot->key, sizeof slot->key);
    patience_call(f->store, g->size);
    if (slot->status == 0)
        slot->status = write_at(f->store, f->direct, record, (size_t)record_size(slot->head.body_size),
                                slot->head.offset);
}

static int run(struct store *s, uint64_t start)
{
    struct group *g = &s->group;
    unsigned threads = reserve_buffers(g);
    if (threads == 0)
        return -TD_ERR_NOMEM;
    int rc = open_direct(s, start);
    if (rc < 0)
        return rc;
    struct flush f = {s, g->size >= g->direct_size && !g->direct_refused, g->count <= threads};
    if (threads > 1 && (!g->workers || workers_count(g->workers) != threads)) {
        workers_destroy(g->workers);
        g->workers = workers_create(threads); /* without them the writer is alone */
    }
    if (threads > 1 && g->workers)
        workers_run(g->workers, g->count, seal_and_write, &f);
    else
        for (unsigned i = 0; i < g->count; i++)
            seal_and_write(&f, i, 0);
    for (unsigned i = 0; i < g->count; i++) /* a segment in doubt is the worse news */
        if (g->slots[i].status < 0 && rc != -TD_ERR_IO)
            rc = g->slots[i].status;
    return rc;
}

/* Nothing of the group was ever placed. */
static int take_back(struct store *s, int rc)
{
    struct group *g = &s->group;
    struct segment *a = s->active;
    a->end = g->slots[0].head.offset;
    a->next_sequence = g->slots[0].head.sequence;
    if (s->io->truncate(s->io, a->fd, a->end) < 0)
        return -TD_ERR_IO;
    if (g->one_by_one)
        return rc;
    g->one_by_one = true;
    for (unsigned i = 0; i < g->count; i++)
        g->slots[i].op->appended = false;
    return -TD_ERR_AGAIN;
}

int group_flush(struct store *s)
{
    struct group *g = &s->group;
    if (g->count == 0)
        return 0;
    int rc = run(s, g->slots[0].head.offset);
    if (rc == 0)
        counter_add(&s->counters.bytes_written, s->metrics.write_bytes, g->size);
    else if (rc != -TD_ERR_IO)
        rc = take_back(s, rc);
    g->count = 0;
    g->size = 0;
    return rc;
}
