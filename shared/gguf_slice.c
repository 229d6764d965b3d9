/* gguf_slice: writes the bottom layers of a model as a file of their own, which still shows the model's fingerprint.
 *
 * The new file is written beside its destination, synced, opened and verified there, and only then renamed: a file under the final name
 * is always whole. Keys are copied byte for byte, because the fingerprint is over these bytes. */
#include "shared/gguf_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define WRITE_STEP    (4u << 20) /* bytes between two calls of the progress function */
#define PATH_SIZE_MAX 4096

struct blob { /* the head of the new file, in memory */
    uint8_t *data;
    size_t size, capacity;
    bool failed; /* out of memory; later additions do nothing */
};

static void blob_add(struct blob *b, const void *data, size_t size)
{
    if (b->failed)
        return;
    if (size > b->capacity - b->size) {
        size_t capacity = (b->size + size) * 2 + 4096;
        uint8_t *grown = realloc(b->data, capacity);
        b->failed = !grown;
        if (!grown)
            return;
        b->data = grown;
        b->capacity = capacity;
    }
    if (size)
        memcpy(b->data + b->size, data, size);
    b->size += size;
}

static void blob_u32(struct blob *b, uint32_t value)
{
    uint8_t bytes[4];
    store_le32(bytes, value);
    blob_add(b, bytes, sizeof bytes);
}

static void blob_u64(struct blob *b, uint64_t value)
{
    uint8_t bytes[8];
    store_le64(bytes, value);
    blob_add(b, bytes, sizeof bytes);
}

static void blob_string(struct blob *b, const void *data, size_t size)
{
    blob_u64(b, size);
    blob_add(b, data, size);
}

static void blob_array_head(struct blob *b, const char *key, enum gguf_value_type type, uint64_t count)
{
    blob_string(b, key, strlen(key));
    blob_u32(b, GGUF_VALUE_ARRAY);
    blob_u32(b, type);
    blob_u64(b, count);
}

/* Where a long job stands: its phases add up to `total`. */
struct phase {
    progress_fn progress;
    void *ctx;
    uint64_t before, total;
};

static void phase_progress(void *ctx, uint64_t done, uint64_t total)
{
    const struct phase *p = ctx;
    (void)total;
    if (p->progress)
        p->progress(p->ctx, p->before + done, p->total);
}

struct job {
    struct gguf *g;
    uint32_t layer_end;
    const char *out_path;
    char temporary[PATH_SIZE_MAX];
    struct phase phase;
    struct td_error *err;
};

/* --- the head ------------------------------------------------------------------------------------------- */

static bool kept(const struct job *j, const struct gguf_tensor *t)
{
    return gguf_tensor_kept(t->name, j->layer_end, j->g->layer_count);
}

static void add_slice_keys(const struct job *j, struct blob *b, const uint8_t *digests)
{
    const struct gguf *g = j->g;
    blob_array_head(b, GGUF_SLICE_NAMES, GGUF_VALUE_STRING, g->tensor_count);
    for (size_t i = 0; i < g->tensor_count; i++)
        blob_string(b, g->tensors[i].name.data, g->tensors[i].name.size);
    blob_array_head(b, GGUF_SLICE_TYPES, GGUF_VALUE_U32, g->tensor_count);
    for (size_t i = 0; i < g->tensor_count; i++)
        blob_u32(b, g->tensors[i].type);
    blob_array_head(b, GGUF_SLICE_DIMS, GGUF_VALUE_U64, g->tensor_count * 4);
    for (size_t i = 0; i < g->tensor_count; i++)
        for (size_t d = 0; d < 4; d++)
            blob_u64(b, g->tensors[i].dims[d]);
    blob_array_head(b, GGUF_SLICE_DIGESTS, GGUF_VALUE_U8, g->tensor_count * TD_HASH_SIZE);
    blob_add(b, digests, g->tensor_count * TD_HASH_SIZE);
    blob_string(b, GGUF_SLICE_LAYER_END, strlen(GGUF_SLICE_LAYER_END));
    blob_u32(b, GGUF_VALUE_U32);
    blob_u32(b, j->layer_end);
}

/* Everything in front of the data section, its padding included. */
static void build_head(const struct job *j, struct blob *b, const uint8_t *digests)
{
    static const uint8_t zeros[64];
    const struct gguf *g = j->g;
    uint64_t key_count = 5, tensor_count = 0, offset = 0;
    for (size_t i = 0; i < g->value_count; i++)
        key_count += !gguf_has_prefix(g->values[i].key, GGUF_SLICE_PREFIX);
    for (size_t i = 0; i < g->tensor_count; i++)
        tensor_count += kept(j, &g->tensors[i]);
    blob_u32(b, GGUF_MAGIC);
    blob_u32(b, GGUF_VERSION);
    blob_u64(b, tensor_count);
    blob_u64(b, key_count);
    for (size_t i = 0; i < g->value_count; i++) {
        const struct gguf_value *v = &g->values[i];
        const uint8_t *begin = v->key.data - 8; /* the length field in front of the name */
        if (!gguf_has_prefix(v->key, GGUF_SLICE_PREFIX))
            blob_add(b, begin, (size_t)(v->raw.data + v->raw.size - begin));
    }
    add_slice_keys(j, b, digests);
    for (size_t i = 0; i < g->tensor_count; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        if (!kept(j, t))
            continue;
        blob_string(b, t->name.data, t->name.size);
        blob_u32(b, t->dim_count);
        for (uint32_t d = 0; d < t->dim_count; d++)
            blob_u64(b, t->dims[d]);
        blob_u32(b, t->type);
        blob_u64(b, offset);
        offset = align_up((size_t)(offset + t->size), g->alignment);
    }
    for (size_t pad = align_up(b->size, g->alignment) - b->size; pad && !b->failed;) {
        size_t step = TD_MIN(pad, sizeof zeros);
        blob_add(b, zeros, step);
        pad -= step;
    }
}

/* --- the file ------------------------------------------------------------------------------------------- */

static int fail_write(const struct job *j, int error)
{
    if (error == ENOSPC || error == EDQUOT)
        return td_fail(j->err, -TD_ERR_DISKFULL,
                       "cannot write %s: the disk is full; free space and try again", j->out_path);
    return td_fail(j->err, -TD_ERR_IO, "cannot write %s: %s; check the folder", j->out_path, strerror(error));
}

static int write_all(const struct job *j, int fd, const void *data, size_t size)
{
    const uint8_t *next = data;
    while (size) {
        ssize_t n = write(fd, next, TD_MIN(size, (size_t)WRITE_STEP));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return fail_write(j, n ? errno : EIO);
        next += n;
        size -= (size_t)n;
    }
    return 0;
}

static int write_tensors(const struct job *j, int fd)
{
    static const uint8_t zeros[4096];
    struct phase phase = j->phase;
    uint64_t done = 0;
    int rc = 0;
    for (size_t i = 0; i < j->g->tensor_count && rc == 0; i++) {
        const struct gguf_tensor *t = &j->g->tensors[i];
        if (!kept(j, t))
            continue;
        for (uint64_t at = 0; at < t->size && rc == 0;) {
            size_t step = (size_t)TD_MIN(t->size - at, (uint64_t)WRITE_STEP);
            rc = write_all(j, fd, (const uint8_t *)t->data + at, step);
            at += step;
            done += step;
            phase_progress(&phase, done, 0);
        }
        for (size_t pad = align_up((size_t)t->size, j->g->alignment) - (size_t)t->size; pad && rc == 0;) {
            size_t step = TD_MIN(pad, sizeof zeros);
            rc = write_all(j, fd, zeros, step);
            pad -= step;
        }
    }
    return rc;
}

static int write_file(const struct job *j, const struct blob *head)
{
    int fd = open(j->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0)
        return fail_write(j, errno);
    int rc = write_all(j, fd, head->data, head->size);
    if (rc == 0)
        rc = write_tensors(j, fd);
    if (rc == 0 && fsync(fd) != 0)
        rc = fail_write(j, errno);
    if (close(fd) != 0 && rc == 0)
        rc = fail_write(j, errno);
    return rc;
}

/* Open what was written as any reader would: whole, undamaged, of the same model. */
static int check_file(const struct job *j, const uint8_t *digests)
{
    uint8_t wanted[TD_HASH_SIZE], got[TD_HASH_SIZE];
    struct phase phase = j->phase;
    struct gguf *slice;
    int rc = gguf_open(j->temporary, &slice, j->err);
    if (rc != 0)
        return rc;
    rc = gguf_verify(slice, phase_progress, &phase, j->err);
    if (rc == 0)
        rc = gguf_fingerprint(slice, got, NULL, NULL, j->err);
    if (rc == 0)
        rc = gguf_fingerprint_of(j->g, digests, wanted, j->err);
    if (rc == 0 && memcmp(wanted, got, TD_HASH_SIZE) != 0)
        rc = td_fail(j->err, -TD_ERR_CHECKSUM, "%s was written but does not match its model; check the disk",
                     j->out_path);
    gguf_close(slice);
    return rc;
}

/* The new name must survive a power cut as well. */
static int publish(const struct job *j)
{
    char folder[PATH_SIZE_MAX];
    if (rename(j->temporary, j->out_path) != 0)
        return fail_write(j, errno);
    snprintf(folder, sizeof folder, "%s", j->out_path);
    int fd = open(dirname(folder), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return fail_write(j, errno);
    int rc = fsync(fd) == 0 ? 0 : fail_write(j, errno);
    close(fd);
    return rc;
}

static int check_request(struct job *j)
{
    const struct gguf *g = j->g;
    struct stat in, out;
    if (g->layer_count == 0)
        return td_fail(j->err, -TD_ERR_FORMAT, "cannot slice %s: it does not say how many layers it has",
                       gguf_label(g));
    if (j->layer_end == 0 || j->layer_end > g->layer_count)
        return td_fail(j->err, -TD_ERR_ARG, "cannot slice %s: %u layers were asked for; give 1 to %u",
                       gguf_label(g), j->layer_end, g->layer_count);
    if (j->layer_end > g->layer_end)
        return td_fail(j->err, -TD_ERR_NOTFOUND,
                       "cannot slice %s: it is itself a slice of %u layers and lacks those up to %u; use the "
                       "whole model",
                       gguf_label(g), g->layer_end, j->layer_end);
    for (size_t i = 0; i < g->tensor_count; i++) {
        char shown[GGUF_SHOW_SIZE];
        if (kept(j, &g->tensors[i]) && !g->tensors[i].data)
            return td_fail(j->err, -TD_ERR_UNSUPPORTED,
                           "cannot slice %s: tensor %s has type %u, which Tandem does not read",
                           gguf_label(g), gguf_show(g->tensors[i].name, shown), g->tensors[i].type);
    }
    if (stat(gguf_path(g), &in) == 0 && stat(j->out_path, &out) == 0 && in.st_dev == out.st_dev &&
        in.st_ino == out.st_ino)
        return td_fail(j->err, -TD_ERR_ARG, "cannot slice %s onto itself; give another output path",
                       gguf_label(g));
    int length = snprintf(j->temporary, sizeof j->temporary, "%s.tmp.%ld", j->out_path, (long)getpid());
    if (length >= (int)sizeof j->temporary)
        return td_fail(j->err, -TD_ERR_ARG, "cannot write the slice: its path is longer than %d bytes",
                       PATH_SIZE_MAX);
    return 0;
}

int gguf_slice(struct gguf *g, uint32_t layer_end, const char *out_path, progress_fn progress, void *ctx,
               struct td_error *err)
{
    struct job j = {.g = g, .layer_end = layer_end, .out_path = out_path, .err = err};
    uint8_t *digests;
    struct blob head = {0};
    int rc = check_request(&j);
    if (rc != 0)
        return rc;
    uint64_t all_size = 0, kept_size = 0;
    for (size_t i = 0; i < g->tensor_count; i++) {
        all_size += g->tensors[i].data ? g->tensors[i].size : 0;
        kept_size += kept(&j, &g->tensors[i]) ? g->tensors[i].size : 0;
    }
    j.phase = (struct phase){progress, ctx, 0, all_size + 2 * kept_size};
    rc = gguf_digests(g, &digests, phase_progress, &j.phase, err);
    if (rc != 0)
        return rc;
    build_head(&j, &head, digests);
    if (head.failed)
        rc = td_fail(err, -TD_ERR_NOMEM, "cannot slice %s: out of memory", gguf_label(g));
    j.phase.before = all_size;
    if (rc == 0)
        rc = write_file(&j, &head);
    free(head.data);
    j.phase.before = all_size + kept_size;
    if (rc == 0)
        rc = check_file(&j, digests);
    free(digests);
    if (rc == 0)
        rc = publish(&j);
    if (rc != 0)
        unlink(j.temporary);
    return rc;
}
