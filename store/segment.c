/* segment: the set of segment files. See segment.h. */
#include "store/segment.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define HINT_COUNT      32           /* heads asked for ahead of the scan */
#define CHECK_PART_SIZE (256u << 10) /* bytes read at once to check a body */

void segments_init(struct segment_set *set, struct io *io, const char *directory)
{
    *set = (struct segment_set){.io = io, .directory = directory};
    pthread_mutex_init(&set->lock, NULL);
}

void segments_deinit(struct segment_set *set)
{
    for (size_t i = 0; i < set->count; i++) {
        if (set->list[i]->fd >= 0)
            set->io->close(set->io, set->list[i]->fd);
        free(set->list[i]);
    }
    free(set->list);
    pthread_mutex_destroy(&set->lock);
}

void segment_name(uint64_t id, char out[SEGMENT_NAME_SIZE])
{
    snprintf(out, SEGMENT_NAME_SIZE, "seg-%016" PRIx64 ".td", id);
}

bool segment_name_parse(const char *name, uint64_t *id)
{
    char again[SEGMENT_NAME_SIZE];
    if (strncmp(name, "seg-", 4) != 0 || strlen(name) != 4 + 16 + 3)
        return false;
    *id = strtoull(name + 4, NULL, 16);
    segment_name(*id, again);
    return strcmp(name, again) == 0 && *id > 0;
}

/* ---- list and descriptors --------------------------------------------------------------------------------- */

/* Index of the first segment whose id is at least `id`. Caller holds the lock or is the appending thread. */
static size_t lower_bound(const struct segment_set *set, uint64_t id)
{
    size_t low = 0, high = set->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (set->list[middle]->id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct segment *segment_find(struct segment_set *set, uint64_t id)
{
    size_t at = lower_bound(set, id);
    return at < set->count && set->list[at]->id == id ? set->list[at] : NULL;
}

int segments_add(struct segment_set *set, struct segment *s)
{
    pthread_mutex_lock(&set->lock);
    int rc = 0;
    if (set->count == set->capacity) {
        size_t capacity = set->capacity ? 2 * set->capacity : 16;
        struct segment **list = realloc(set->list, capacity * sizeof(*list));
        if (list) {
            set->list = list;
            set->capacity = capacity;
        } else {
            rc = -TD_ERR_NOMEM;
        }
    }
    if (rc == 0) {
        size_t at = lower_bound(set, s->id);
        memmove(set->list + at + 1, set->list + at, (set->count - at) * sizeof(struct segment *));
        set->list[at] = s;
        set->count++;
        set->open_count += s->fd >= 0;
    }
    pthread_mutex_unlock(&set->lock);
    return rc;
}

static bool path_of(const struct segment_set *set, uint64_t id, char out[IO_PATH_MAX])
{
    char name[SEGMENT_NAME_SIZE];
    segment_name(id, name);
    return io_path(out, set->directory, name);
}

static int write_segment_head(struct io *io, const struct segment *s, uint64_t now_us)
{
    uint8_t page[RECORD_PAGE];
    struct segment_head head = {s->id, s->nonce, now_us, s->first_lsn};
    segment_head_write(&head, page);
    return io_write_all(io, s->fd, page, sizeof page, 0);
}

int segment_create(struct segment_set *set, uint64_t id, uint64_t first_lsn, uint64_t now_us,
                   struct segment **out)
{
    char path[IO_PATH_MAX];
    if (!path_of(set, id, path))
        return -TD_ERR_ARG;
    struct segment *s = calloc(1, sizeof *s);
    if (!s)
        return -TD_ERR_NOMEM;
    s->id = id;
    s->first_lsn = first_lsn;
    s->end = RECORD_PAGE;
    s->fd = set->io->open(set->io, path, O_RDWR | O_CREAT | O_EXCL);
    int rc = s->fd < 0 ? io_status(s->fd) : crypto_random(&s->nonce, sizeof s->nonce);
    rc = rc < 0 ? rc : write_segment_head(set->io, s, now_us);
    rc = rc < 0 ? rc : segments_add(set, s);
    if (rc < 0) {
        if (s->fd >= 0) {
            set->io->close(set->io, s->fd);
            set->io->unlink(set->io, path);
        }
        free(s);
        return rc;
    }
    segments_trim(set);
    *out = s;
    return 0;
}

int segment_open_direct(struct segment_set *set, const struct segment *s)
{
    char path[IO_PATH_MAX];
    return path_of(set, s->id, path) ? set->io->open(set->io, path, O_RDWR | O_DIRECT) : -ENAMETOOLONG;
}

/* A file that is opened or closed may hang like one that is read, and everybody needs the lock: so neither is done under it. */
static void close_files(struct segment_set *set, const int *fds, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (fds[i] >= 0)
            set->io->close(set->io, fds[i]);
}

/* Take the descriptor that was idle longest out, for the caller to close; -1 when all are in use. Caller holds the lock. */
static int take_one_idle(struct segment_set *set)
{
    struct segment *oldest = NULL;
    for (size_t i = 0; i < set->count; i++) {
        struct segment *s = set->list[i];
        if (s->fd >= 0 && s->users == 0 && s->sealed && (!oldest || s->used_at < oldest->used_at))
            oldest = s;
    }
    if (!oldest)
        return -1;
    int fd = oldest->fd;
    oldest->fd = -1;
    set->open_count--;
    return fd;
}

void segments_trim(struct segment_set *set)
{
    for (int fd = 0; fd >= 0;) {
        pthread_mutex_lock(&set->lock);
        fd = set->open_count > SEGMENT_FDS_MAX ? take_one_idle(set) : -1;
        pthread_mutex_unlock(&set->lock);
        close_files(set, &fd, 1);
    }
}

/* A descriptor, or a code of the project. */
static int open_file(struct segment_set *set, uint64_t id)
{
    char path[IO_PATH_MAX];
    if (!path_of(set, id, path))
        return -TD_ERR_IO;
    int fd = set->io->open(set->io, path, O_RDWR);
    if (fd == -EROFS || fd == -EACCES)
        fd = set->io->open(set->io, path, O_RDONLY);
    return fd >= 0 ? fd : fd == -ENOENT ? -TD_ERR_NOTFOUND : -TD_ERR_IO;
}

/* Its file is closed: open it, unless somebody else does so meanwhile. The caller's pin keeps it. */
static int open_pinned(struct segment_set *set, struct segment *s)
{
    int fd = open_file(set, s->id), spare[2] = {-1, -1};
    pthread_mutex_lock(&set->lock);
    int rc = s->fd < 0 && fd < 0 ? fd : 0;
    if (s->fd >= 0) {
        spare[0] = fd;
    } else if (fd >= 0) {
        spare[1] = set->open_count >= SEGMENT_FDS_MAX ? take_one_idle(set) : -1;
        s->fd = fd;
        set->open_count++;
    }
    pthread_mutex_unlock(&set->lock);
    close_files(set, spare, TD_COUNT(spare));
    return rc;
}

struct segment *segment_acquire(struct segment_set *set, uint64_t id, int *rc)
{
    pthread_mutex_lock(&set->lock);
    struct segment *s = segment_find(set, id);
    bool closed = s && s->fd < 0;
    if (s) {
        s->users++;
        s->used_at = ++set->use_clock;
    }
    pthread_mutex_unlock(&set->lock);
    int result = !s ? -TD_ERR_NOTFOUND : closed ? open_pinned(set, s) : 0;
    if (s && result < 0)
        segment_release(set, s);
    if (rc)
        *rc = result;
    return result == 0 ? s : NULL;
}

void segment_suspect(struct segment_set *set, uint64_t id)
{
    pthread_mutex_lock(&set->lock);
    struct segment *s = segment_find(set, id);
    if (s)
        s->suspect = true;
    pthread_mutex_unlock(&set->lock);
}

void segment_account(struct segment_set *set, uint64_t id, uint32_t stored_size, bool added)
{
    pthread_mutex_lock(&set->lock);
    struct segment *s = segment_find(set, id);
    if (s && added) {
        s->live_count++;
        s->live_size += stored_size;
    } else if (s) {
        s->live_count--;
        s->live_size -= stored_size;
    }
    pthread_mutex_unlock(&set->lock);
}

/* Caller holds the lock; nobody uses s any more. Returns what is to be closed, or -1. */
static int dispose(struct segment_set *set, struct segment *s)
{
    int fd = s->fd;
    set->open_count -= fd >= 0;
    free(s);
    return fd;
}

void segment_release(struct segment_set *set, struct segment *s)
{
    int fd = -1;
    pthread_mutex_lock(&set->lock);
    if (--s->users == 0 && s->dropped)
        fd = dispose(set, s);
    pthread_mutex_unlock(&set->lock);
    close_files(set, &fd, 1);
}

void segment_drop(struct segment_set *set, struct segment *s)
{
    pthread_mutex_lock(&set->lock);
    size_t at = lower_bound(set, s->id);
    memmove(set->list + at, set->list + at + 1, (set->count - at - 1) * sizeof(struct segment *));
    set->count--;
    s->dropped = true;
    int fd = s->users == 0 ? dispose(set, s) : -1;
    pthread_mutex_unlock(&set->lock);
    close_files(set, &fd, 1);
}

int segment_unlink(struct segment_set *set, uint64_t id)
{
    char path[IO_PATH_MAX];
    int rc = path_of(set, id, path) ? set->io->unlink(set->io, path) : -ENAMETOOLONG;
    return rc == -ENOENT ? 0 : rc; /* somebody was quicker */
}

uint64_t segments_size(struct segment_set *set)
{
    uint64_t size = 0;
    pthread_mutex_lock(&set->lock);
    for (size_t i = 0; i < set->count; i++)
        size += set->list[i]->end - set->list[i]->hole_size;
    pthread_mutex_unlock(&set->lock);
    return size;
}

/* ---- scan ------------------------------------------------------------------------------------------------- */

/* Records of one model have one size: when two in a row are alike, the heads that would follow are asked for together. */
static void hint_ahead(struct io *io, int fd, uint64_t at, uint64_t stride, uint64_t size,
                       uint64_t *hinted_to)
{
    if (at < *hinted_to || stride <= 4 * RECORD_PAGE)
        return; /* small records: the kernel's own readahead is better */
    uint64_t next = at;
    for (int i = 0; i < HINT_COUNT && next < size; i++, next += stride)
        io->advise(io, fd, next, RECORD_PAGE, IO_WILL_READ);
    *hinted_to = next;
}

static bool head_belongs(const struct record_head *h, const struct segment *s, uint64_t at, uint64_t size)
{
    return h->segment_id == s->id && h->segment_nonce == s->nonce && h->offset == at &&
           record_size(h->body_size) <= size - at;
}

int segment_scan(struct io *io, int fd, const struct segment *s, uint64_t from, uint64_t size,
                 segment_scan_fn fn, void *ctx, struct segment_scan *out)
{
    uint8_t page[RECORD_PAGE];
    struct record_head head;
    uint64_t stride = 0, hinted_to = 0;
    uint32_t skipped = 0; /* since the last good record: a torn tail is no damage inside the log */
    *out = (struct segment_scan){.end = from};
    for (uint64_t at = from; at + RECORD_PAGE <= size;) {
        int rc = io_read_all(io, fd, page, sizeof page, at);
        if (rc < 0 || record_head_parse(page, &head) < 0 || !head_belongs(&head, s, at, size)) {
            if (rc == -TD_ERR_TRUNCATED)
                break; /* the file has shrunk under us */
            out->unreadable |= rc < 0;
            skipped++;
            at += RECORD_PAGE;
            continue;
        }
        out->skipped_pages += skipped;
        skipped = 0;
        out->record_count++;
        out->durable_end = TD_MAX(out->durable_end, head.durable_end);
        rc = fn(ctx, &head, page);
        if (rc != 0)
            return rc;
        uint64_t whole = record_size(head.body_size);
        at += whole;
        out->end = at;
        if (whole == stride)
            hint_ahead(io, fd, at, stride, size, &hinted_to);
        stride = whole;
    }
    return 0;
}

int segment_check_body(struct io *io, int fd, const struct record_head *head)
{
    uint8_t *part = malloc(CHECK_PART_SIZE);
    if (!part)
        return -TD_ERR_NOMEM;
    uint32_t crc = 0;
    int rc = 0;
    for (uint64_t at = 0; at < head->body_size && rc == 0;) {
        size_t size = (size_t)TD_MIN(head->body_size - at, (uint64_t)CHECK_PART_SIZE);
        rc = io_read_all(io, fd, part, size, head->offset + RECORD_PAGE + at);
        crc = crc32c(crc, part, size);
        at += size;
    }
    free(part);
    if (rc == 0 && crc != head->body_crc)
        rc = -TD_ERR_CHECKSUM;
    return rc;
}
