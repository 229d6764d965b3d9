/* sim_io: see sim_io.h. */
#include "sim_io.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

#define SECTOR 512

enum change_kind { FILE_WRITE, FILE_TRUNCATE, FILE_PUNCH, NAME_ADD, NAME_REMOVE };

struct sim_change { /* of a file or of the directory, not yet synced */
    struct sim_change *next;
    enum change_kind kind;
    uint64_t offset, size;
    uint8_t *data;
    bool failed; /* a part of a write that was reported as failed */
    char name[64];
    struct sim_file *file;
};
struct bytes {
    uint8_t *data;
    uint64_t size, capacity;
};
struct sim_file {
    struct sim_file *next;
    struct bytes seen, durable; /* what reading shows; what is on the platter */
    struct sim_change *changes;
    uint64_t punched;
};
struct sim_name {
    struct sim_name *next;
    char name[64];
    struct sim_file *file;
};

static uint32_t next_random(uint64_t *rng, uint32_t bound)
{
    *rng = *rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*rng >> 33) % bound;
}

uint32_t sim_random(struct sim *s, uint32_t bound)
{
    return next_random(&s->rng, bound);
}

static uint32_t disk_random(struct sim *s, uint32_t bound)
{
    return next_random(&s->disk_rng, bound);
}

const char *sim_violation(struct sim *s)
{
    pthread_mutex_lock(&s->lock);
    const char *violation = s->violation;
    pthread_mutex_unlock(&s->lock);
    return violation;
}

/* ---- bytes ------------------------------------------------------------------------------------------------ */

static void bytes_resize(struct bytes *b, uint64_t size)
{
    if (size > b->capacity) {
        b->capacity = size * 2;
        b->data = realloc(b->data, b->capacity);
        if (!b->data)
            abort();
    }
    if (size > b->size)
        memset(b->data + b->size, 0, size - b->size);
    b->size = size;
}

static void bytes_apply(struct bytes *b, const struct sim_change *c, uint64_t from, uint64_t to)
{
    if (c->kind == FILE_TRUNCATE) {
        bytes_resize(b, c->size);
    } else if (c->kind == FILE_WRITE) {
        if (c->offset + to > b->size)
            bytes_resize(b, c->offset + to);
        memcpy(b->data + c->offset + from, c->data + from, to - from);
    } else if (c->offset < b->size) {
        uint64_t end = TD_MIN(c->offset + c->size, b->size);
        memset(b->data + c->offset, 0, end - c->offset);
    }
}

static void changes_free(struct sim_change **list)
{
    for (struct sim_change *c = *list, *next; c; c = next) {
        next = c->next;
        free(c->data);
        free(c);
    }
    *list = NULL;
}

static struct sim_change *change_add(struct sim_change **list, enum change_kind kind)
{
    struct sim_change *c = calloc(1, sizeof *c);
    if (!c)
        abort();
    c->kind = kind;
    while (*list)
        list = &(*list)->next;
    *list = c;
    return c;
}

/* ---- names ------------------------------------------------------------------------------------------------ */

static const char *base(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static bool is_segment(const char *name)
{
    return strncmp(name, "seg-", 4) == 0;
}

static struct sim_name **name_find(struct sim_name **list, const char *name)
{
    while (*list && strcmp((*list)->name, name) != 0)
        list = &(*list)->next;
    return list;
}

static void name_set(struct sim_name **list, const char *name, struct sim_file *file)
{
    struct sim_name **at = name_find(list, name);
    if (!*at) {
        *at = calloc(1, sizeof **at);
        if (!*at)
            abort();
        strcpy((*at)->name, name);
    }
    (*at)->file = file;
}

static void name_unset(struct sim_name **list, const char *name)
{
    struct sim_name **at = name_find(list, name), *gone = *at;
    if (gone) {
        *at = gone->next;
        free(gone);
    }
}

static void name_change(struct sim *s, enum change_kind kind, const char *name, struct sim_file *file)
{
    struct sim_change *c = change_add(&s->changes, kind);
    strcpy(c->name, name);
    c->file = file;
    if (kind == NAME_ADD)
        name_set(&s->names, name, file);
    else
        name_unset(&s->names, name);
}

static void apply_name(struct sim_name **list, const struct sim_change *c)
{
    if (c->kind == NAME_ADD)
        name_set(list, c->name, c->file);
    else
        name_unset(list, c->name);
}

/* ---- faults ----------------------------------------------------------------------------------------------- */

/* Called with the lock held at the start of every operation: 0, or the errno to fail with. */
static int enter(struct sim *s, enum sim_kind kind, bool changes)
{
    if (s->off)
        return EIO;
    if (changes && s->power_off_at && ++s->operations >= s->power_off_at) {
        s->off = true;
        return EIO;
    }
    uint64_t n = ++s->counts[kind], first = s->fail_at[kind],
             last = first + (s->fail_for[kind] ? s->fail_for[kind] : 1);
    return first && n >= first && n < last ? s->fail_errno : 0;
}

static uint64_t used_now(const struct sim *s)
{
    uint64_t used = 0;
    for (const struct sim_name *n = s->names; n; n = n->next)
        used += n->file->seen.size - TD_MIN(n->file->punched, n->file->seen.size);
    return used;
}

uint64_t sim_used(struct sim *s)
{
    pthread_mutex_lock(&s->lock);
    uint64_t used = used_now(s);
    pthread_mutex_unlock(&s->lock);
    return used;
}

static bool skips(const struct sim *s, enum sim_kind kind)
{
    return s->skip_sync[kind] && (!s->skip_when || s->skip_when(s->skip_ctx));
}

static struct sim *of(struct io *io)
{
    return (struct sim *)io;
}

/* ---- operations ------------------------------------------------------------------------------------------- */

static int sim_open(struct io *io, const char *path, int flags)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    int error = enter(s, SIM_OPEN, flags & O_CREAT);
    struct sim_name *n = *name_find(&s->names, base(path));
    int fd = -1;
    if (!error && n && (flags & O_EXCL))
        error = EEXIST;
    else if (!error && !n && !(flags & O_CREAT))
        error = ENOENT;
    for (int i = 0; i < (int)TD_COUNT(s->handles) && fd < 0 && !error; i++)
        fd = s->handles[i].file ? -1 : i;
    if (!error && fd < 0)
        error = EMFILE;
    if (!error && !n) {
        struct sim_file *f = calloc(1, sizeof *f);
        if (!f)
            abort();
        f->next = s->files;
        s->files = f;
        name_change(s, NAME_ADD, base(path), f);
        n = *name_find(&s->names, base(path));
    }
    if (!error)
        s->handles[fd].file = n->file;
    pthread_mutex_unlock(&s->lock);
    return error ? -error : fd;
}

static void sim_close(struct io *io, int fd)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    s->handles[fd].file = NULL;
    pthread_mutex_unlock(&s->lock);
}

static int64_t sim_pread(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    int error = enter(s, SIM_READ, false);
    const struct bytes *b = &s->handles[fd].file->seen;
    int64_t got = offset >= b->size ? 0 : (int64_t)TD_MIN((uint64_t)size, b->size - offset);
    if (!error && got > 0)
        memcpy(data, b->data + offset, (size_t)got);
    pthread_mutex_unlock(&s->lock);
    return error ? -error : got;
}

static struct sim_change *file_change(struct sim_file *f, enum change_kind kind, uint64_t offset,
                                      uint64_t size, const void *data)
{
    struct sim_change *c = change_add(&f->changes, kind);
    c->offset = offset;
    c->size = size;
    if (data) {
        c->data = malloc(size + 1);
        if (!c->data)
            abort();
        memcpy(c->data, data, size);
    }
    bytes_apply(&f->seen, c, 0, size);
    return c;
}

static int64_t sim_pwrite(struct io *io, int fd, const void *data, size_t size, uint64_t offset)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    bool was_off = s->off;
    int error = enter(s, SIM_WRITE, true);
    struct sim_file *f = s->handles[fd].file;
    size_t take = size;
    if (s->off && !was_off) /* the power goes in the middle of this write */
        take = disk_random(s, (uint32_t)size + 1);
    else if (error)
        take = disk_random(s, 2) * size / 2; /* a failed write may have written a part */
    if (!error && s->capacity && offset + size > f->seen.size &&
        used_now(s) + (offset + size - f->seen.size) > s->capacity) {
        uint64_t room = s->capacity - TD_MIN(s->capacity, used_now(s));
        take = (size_t)TD_MIN((uint64_t)size, room / SECTOR * SECTOR);
        error = take == 0 ? ENOSPC : 0;
    }
    if (take && !was_off)
        file_change(f, FILE_WRITE, offset, take, data)->failed = error != 0;
    pthread_mutex_unlock(&s->lock);
    return error ? -error : (int64_t)take;
}

static int64_t sim_size(struct io *io, int fd)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    int64_t size = (int64_t)s->handles[fd].file->seen.size;
    pthread_mutex_unlock(&s->lock);
    return size;
}

static int64_t sim_allocated(struct io *io, int fd)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    const struct sim_file *f = s->handles[fd].file;
    int64_t size = (int64_t)(f->seen.size - TD_MIN(f->punched, f->seen.size));
    pthread_mutex_unlock(&s->lock);
    return size;
}

static bool file_has_name(struct sim_name *list, const struct sim_file *f, bool segments)
{
    for (; list; list = list->next)
        if (list->file == f && is_segment(list->name) == segments)
            return true;
    return false;
}

static int sim_fsync(struct io *io, int fd)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    struct sim_file *f = s->handles[fd].file;
    enum sim_kind kind = file_has_name(s->names, f, true) ? SIM_SYNC_SEGMENT : SIM_SYNC_OTHER;
    bool was_off = s->off;
    int error = enter(s, kind, true);
    if (!error && skips(s, kind)) {
        s->skipped++;
    } else if (!was_off) {
        for (struct sim_change *c = f->changes; c && !error; c = c->next)
            bytes_apply(&f->durable, c, 0, c->size);
        if (!s->off) /* a failed sync loses the writes; a lost machine decides later */
            changes_free(&f->changes);
    }
    pthread_mutex_unlock(&s->lock);
    return -error;
}

static int sim_truncate(struct io *io, int fd, uint64_t size)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    int error = enter(s, SIM_TRUNCATE, true);
    if (!error)
        file_change(s->handles[fd].file, FILE_TRUNCATE, 0, size, NULL);
    pthread_mutex_unlock(&s->lock);
    return -error;
}

/* Holes within the bytes asked for are not filled: nobody asks for any. */
static int sim_allocate(struct io *io, int fd, uint64_t offset, uint64_t size)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    struct sim_file *f = s->handles[fd].file;
    uint64_t more = offset + size - TD_MIN(offset + size, f->seen.size);
    int error = enter(s, SIM_TRUNCATE, true);
    if (!error && s->capacity && used_now(s) + more > s->capacity)
        error = ENOSPC;
    if (!error && more)
        file_change(f, FILE_TRUNCATE, 0, offset + size, NULL);
    pthread_mutex_unlock(&s->lock);
    return -error;
}

static int sim_punch(struct io *io, int fd, uint64_t offset, uint64_t size)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    int error = enter(s, SIM_TRUNCATE, true);
    if (!error) {
        file_change(s->handles[fd].file, FILE_PUNCH, offset, size, NULL);
        s->handles[fd].file->punched += size;
    }
    pthread_mutex_unlock(&s->lock);
    return -error;
}

static void sim_advise(struct io *io, int fd, uint64_t offset, uint64_t size, enum io_advice advice)
{
    (void)io, (void)fd, (void)offset, (void)size, (void)advice;
}

static int sim_rename(struct io *io, const char *from, const char *to)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    int error = enter(s, SIM_RENAME, true);
    struct sim_name *n = *name_find(&s->names, base(from));
    if (!error && !n)
        error = ENOENT;
    if (!error) {
        struct sim_file *f = n->file;
        name_change(s, NAME_ADD, base(to), f);
        name_change(s, NAME_REMOVE, base(from), f);
    }
    pthread_mutex_unlock(&s->lock);
    return -error;
}

/* Does nobody count on this write: it failed, or a later change of the file cut it off again? */
static bool is_void(const struct sim_change *write)
{
    if (write->failed)
        return true;
    for (const struct sim_change *c = write->next; c; c = c->next)
        if (c->kind == FILE_TRUNCATE && c->size <= write->offset)
            return true;
    return false;
}

/* A rule that holds whenever a segment goes: what was copied out of it, and where to, is on the platter. Overwriting in place
 * (voids) is no copy; it lies below the durable size. */
static void check_unlink(struct sim *s, const char *name)
{
    if (!is_segment(name))
        return;
    for (const struct sim_change *c = s->changes; c; c = c->next)
        if (c->kind == NAME_ADD && is_segment(c->name) && strcmp(c->name, name) != 0 &&
            *name_find(&s->names, c->name))
            s->violation = "a segment was removed before the name of a newer one was synced";
    for (const struct sim_name *n = s->names; n; n = n->next)
        for (const struct sim_change *c = n->file->changes; c; c = c->next)
            if (is_segment(n->name) && strcmp(n->name, name) != 0 && c->kind == FILE_WRITE &&
                c->size > 4096 && c->offset >= n->file->durable.size && !is_void(c))
                s->violation = "a segment was removed before records in another one were synced";
}

static int sim_unlink(struct io *io, const char *path)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    if (s->before_unlink)
        s->before_unlink(s->unlink_ctx, base(path));
    int error = enter(s, SIM_UNLINK, true);
    struct sim_name *n = *name_find(&s->names, base(path));
    if (!error && !n)
        error = ENOENT;
    if (!error) {
        check_unlink(s, base(path));
        name_change(s, NAME_REMOVE, base(path), n->file);
    }
    pthread_mutex_unlock(&s->lock);
    return -error;
}

static int sim_make_directory(struct io *io, const char *path)
{
    (void)path;
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    int error = s->off ? EIO : s->directory_made ? EEXIST : 0;
    s->directory_made |= !error;
    pthread_mutex_unlock(&s->lock);
    return -error;
}

static int sim_sync_directory(struct io *io, const char *path)
{
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    enum sim_kind kind = strcmp(path, s->directory) == 0 ? SIM_SYNC_DIRECTORY : SIM_SYNC_PARENT;
    int error = enter(s, kind, true);
    if (!error && skips(s, kind)) {
        s->skipped++;
    } else if (!error && kind == SIM_SYNC_PARENT) {
        s->directory_durable = true;
    } else if (!error) {
        for (const struct sim_change *c = s->changes; c; c = c->next)
            apply_name(&s->durable_names, c);
        changes_free(&s->changes);
    }
    pthread_mutex_unlock(&s->lock);
    return -error;
}

static int sim_list(struct io *io, const char *path, void (*fn)(void *ctx, const char *name), void *ctx)
{
    (void)path;
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    int error = s->off ? EIO : 0;
    for (const struct sim_name *n = s->names; n && !error; n = n->next)
        fn(ctx, n->name);
    pthread_mutex_unlock(&s->lock);
    return -error;
}

static int sim_space(struct io *io, const char *path, uint64_t *total_size, uint64_t *free_size)
{
    (void)path;
    struct sim *s = of(io);
    pthread_mutex_lock(&s->lock);
    *total_size = s->capacity && !s->is_quota ? s->capacity : 1ull << 40;
    *free_size = *total_size - TD_MIN(*total_size, used_now(s));
    pthread_mutex_unlock(&s->lock);
    return 0;
}

static int sim_lock(struct io *io, const char *path, bool read_only, pid_t *holder)
{
    (void)read_only;
    *holder = 0;
    return sim_open(io, path, O_RDWR | O_CREAT);
}

static int sim_lock_directory(struct io *io, const char *path)
{
    (void)io, (void)path;
    return -ENOTSUP;
}

void sim_init(struct sim *s, const char *directory, uint64_t seed)
{
    memset(s, 0, sizeof *s);
    s->io = (struct io){
        .open = sim_open,
        .close = sim_close,
        .pread = sim_pread,
        .pwrite = sim_pwrite,
        .size = sim_size,
        .allocated = sim_allocated,
        .fsync = sim_fsync,
        .truncate = sim_truncate,
        .allocate = sim_allocate,
        .punch = sim_punch,
        .advise = sim_advise,
        .rename = sim_rename,
        .unlink = sim_unlink,
        .make_directory = sim_make_directory,
        .sync_directory = sim_sync_directory,
        .list = sim_list,
        .space = sim_space,
        .lock = sim_lock,
        .lock_directory = sim_lock_directory,
    };
    s->directory = directory;
    s->rng = seed * 0x9e3779b97f4a7c15u + 1;
    s->disk_rng = ~s->rng;
    s->fail_errno = EIO;
    pthread_mutex_init(&s->lock, NULL);
}

/* ---- power ------------------------------------------------------------------------------------------------ */

static void collect_files(struct sim *s)
{
    for (struct sim_file **at = &s->files; *at;) {
        struct sim_file *f = *at;
        bool used = file_has_name(s->names, f, true) || file_has_name(s->names, f, false) ||
                    file_has_name(s->durable_names, f, true) || file_has_name(s->durable_names, f, false);
        for (const struct sim_change *c = s->changes; c; c = c->next)
            used |= c->file == f;
        if (used) {
            at = &f->next;
            continue;
        }
        *at = f->next;
        changes_free(&f->changes);
        free(f->seen.data);
        free(f->durable.data);
        free(f);
    }
}

static void names_free(struct sim_name **list)
{
    while (*list)
        name_unset(list, (*list)->name);
}

static void survive_file(struct sim *s, struct sim_file *f, enum sim_survival mode)
{
    for (const struct sim_change *c = f->changes; c; c = c->next) {
        if (mode == SURVIVE_ALL || (mode != SURVIVE_NONE && c->kind != FILE_WRITE && disk_random(s, 2)) ||
            (mode == SURVIVE_SOME && disk_random(s, 2)))
            bytes_apply(&f->durable, c, 0, c->size);
        else if (mode == SURVIVE_SECTORS && c->kind == FILE_WRITE)
            for (uint64_t at = 0; at < c->size; at += SECTOR)
                if (disk_random(s, 2))
                    bytes_apply(&f->durable, c, at, TD_MIN(at + SECTOR, c->size));
    }
    changes_free(&f->changes);
    bytes_resize(&f->seen, 0);
    bytes_resize(&f->seen, f->durable.size);
    if (f->durable.size)
        memcpy(f->seen.data, f->durable.data, f->durable.size);
}

static void restart(struct sim *s)
{
    memset(s->handles, 0, sizeof s->handles);
    collect_files(s);
    s->off = false;
    s->power_off_at = s->operations = 0;
}

void sim_power_loss(struct sim *s)
{
    enum sim_survival mode = s->survival ? s->survival : (enum sim_survival)(1 + disk_random(s, 4));
    if (s->directory_made && !s->directory_durable && disk_random(s, 2)) {
        names_free(&s->durable_names); /* the directory itself is not there */
        changes_free(&s->changes);
        s->directory_made = false;
    }
    for (const struct sim_change *c = s->changes; c; c = c->next)
        if (mode == SURVIVE_ALL || (mode != SURVIVE_NONE && disk_random(s, 2)))
            apply_name(&s->durable_names, c);
    changes_free(&s->changes);
    for (struct sim_file *f = s->files; f; f = f->next)
        survive_file(s, f, mode);
    names_free(&s->names);
    for (const struct sim_name *n = s->durable_names; n; n = n->next)
        name_set(&s->names, n->name, n->file);
    restart(s);
}

void sim_process_death(struct sim *s)
{
    restart(s);
}

void sim_deinit(struct sim *s)
{
    changes_free(&s->changes);
    names_free(&s->names);
    names_free(&s->durable_names);
    collect_files(s);
    pthread_mutex_destroy(&s->lock);
}
