/* gguf_fingerprint: digests of tensors, their cache beside the file, the fingerprint, and verification. FINGERPRINT.md gives the exact bytes
 * of all three. */
#include "shared/gguf_internal.h"
#include "shared/crypto.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define HASH_STEP         (4u << 20) /* bytes between two calls of the progress function */
#define SIDECAR_MAGIC     "TDGD"
#define SIDECAR_VERSION   2u
#define SIDECAR_HEAD_SIZE (4 + 4 + 5 * 8)
#define FINGERPRINT_TAG   "tandem-fingerprint-v1" /* its zero byte is part of it */

/* --- digests -------------------------------------------------------------------------------------------- */

static uint64_t present_size(const struct gguf *g)
{
    uint64_t total = 0;
    for (size_t i = 0; i < g->tensor_count; i++)
        if (g->tensors[i].data)
            total += g->tensors[i].size;
    return total;
}

static void hash_tensor(const struct gguf_tensor *t, uint8_t out[TD_HASH_SIZE], uint64_t *done,
                        uint64_t total, progress_fn progress, void *ctx)
{
    struct sha256 h;
    sha256_init(&h);
    for (uint64_t at = 0; at < t->size;) {
        size_t step = (size_t)TD_MIN(t->size - at, (uint64_t)HASH_STEP);
        sha256_update(&h, (const uint8_t *)t->data + at, step);
        at += step;
        *done += step;
        if (progress)
            progress(ctx, *done, total);
    }
    sha256_final(&h, out);
}

static int fail_unknown_type(const struct gguf *g, const struct gguf_tensor *t, struct td_error *err)
{
    char shown[GGUF_SHOW_SIZE];
    return td_fail(
        err, -TD_ERR_UNSUPPORTED,
        "cannot use %s: tensor %s has type %u, which Tandem does not read; convert the model to another type",
        gguf_label(g), gguf_show(t->name, shown), t->type);
}

static int compute_digests(const struct gguf *g, uint8_t *out, progress_fn progress, void *ctx,
                           struct td_error *err)
{
    uint64_t done = 0, total = present_size(g);
    for (size_t i = 0; i < g->tensor_count; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        if (!t->data)
            return fail_unknown_type(g, t, err);
        hash_tensor(t, out + i * TD_HASH_SIZE, &done, total, progress, ctx);
    }
    return 0;
}

/* --- sidecar -------------------------------------------------------------------------------------------- */

static size_t sidecar_size(const struct gguf *g)
{
    return SIDECAR_HEAD_SIZE + g->tensor_count * TD_HASH_SIZE + TD_HASH_SIZE;
}

static void sidecar_head(const struct gguf *g, uint8_t out[SIDECAR_HEAD_SIZE])
{
    memcpy(out, SIDECAR_MAGIC, 4);
    store_le32(out + 4, SIDECAR_VERSION);
    store_le64(out + 8, g->identity.size);
    store_le64(out + 16, g->identity.mtime_ns);
    store_le64(out + 24, g->identity.inode);
    store_le64(out + 32, g->identity.ctime_ns);
    store_le64(out + 40, g->tensor_count);
}

/* Fill `digests` from the sidecar; false if there is none that fits. */
static bool read_sidecar(const struct gguf *g, uint8_t *digests)
{
    char path[4096];
    uint8_t head[SIDECAR_HEAD_SIZE], sum[TD_HASH_SIZE];
    size_t size = sidecar_size(g);
    if (!g->mapped || snprintf(path, sizeof path, "%s.digests", g->path) >= (int)sizeof path)
        return false;
    FILE *file = fopen(path, "rbe");
    if (!file)
        return false;
    uint8_t *content = malloc(size + 1);
    bool fits = content && fread(content, 1, size + 1, file) == size;
    fclose(file);
    if (fits) {
        sidecar_head(g, head);
        sha256_once(content, size - TD_HASH_SIZE, sum);
        fits = memcmp(content, head, sizeof head) == 0 &&
               memcmp(content + size - TD_HASH_SIZE, sum, sizeof sum) == 0;
    }
    if (fits)
        memcpy(digests, content + SIDECAR_HEAD_SIZE, g->tensor_count * TD_HASH_SIZE);
    free(content);
    return fits;
}

/* A cache: where it cannot be written, the next start hashes again and nobody needs to hear of it. */
static void write_sidecar(const struct gguf *g, const uint8_t *digests)
{
    char path[4096], temporary[4096 + 32];
    size_t size = sidecar_size(g);
    if (!g->mapped || snprintf(path, sizeof path, "%s.digests", g->path) >= (int)sizeof path)
        return;
    snprintf(temporary, sizeof temporary, "%s.tmp.%ld", path, (long)getpid());
    uint8_t *content = malloc(size);
    int fd = content ? open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644) : -1;
    if (fd >= 0) {
        sidecar_head(g, content);
        memcpy(content + SIDECAR_HEAD_SIZE, digests, g->tensor_count * TD_HASH_SIZE);
        sha256_once(content, size - TD_HASH_SIZE, content + size - TD_HASH_SIZE);
        bool good = write(fd, content, size) == (ssize_t)size;
        good = close(fd) == 0 && good;
        if (!good || rename(temporary, path) != 0)
            unlink(temporary);
    }
    free(content);
}

/* --- fingerprint ---------------------------------------------------------------------------------------- */

int gguf_digests(struct gguf *g, uint8_t **out, progress_fn progress, void *ctx, struct td_error *err)
{
    size_t size = g->tensor_count * TD_HASH_SIZE;
    uint8_t *digests = malloc(size + 1);
    *out = NULL;
    if (!digests)
        return td_fail(err, -TD_ERR_NOMEM, "cannot hash %s: out of memory", gguf_label(g));
    int rc = 0;
    if (g->slice_digests) {
        memcpy(digests, g->slice_digests, size);
    } else if (!read_sidecar(g, digests)) {
        rc = compute_digests(g, digests, progress, ctx, err);
        if (rc == 0)
            write_sidecar(g, digests);
    }
    if (rc != 0) {
        free(digests);
        return rc;
    }
    free(g->digests);
    g->digests = malloc(size + 1);
    if (g->digests)
        memcpy(g->digests, digests, size);
    *out = digests;
    return 0;
}

static void hash_u32(struct sha256 *h, uint32_t value)
{
    uint8_t bytes[4];
    store_le32(bytes, value);
    sha256_update(h, bytes, sizeof bytes);
}

static void hash_u64(struct sha256 *h, uint64_t value)
{
    uint8_t bytes[8];
    store_le64(bytes, value);
    sha256_update(h, bytes, sizeof bytes);
}

static bool key_counts(struct span key, struct span arch)
{
    bool of_arch =
        key.size > arch.size && memcmp(key.data, arch.data, arch.size) == 0 && key.data[arch.size] == '.';
    return gguf_span_is(key, "general.architecture") || gguf_has_prefix(key, "tokenizer.") ||
           (of_arch && !gguf_has_prefix(key, GGUF_SLICE_PREFIX));
}

static void hash_keys(const struct gguf *g, struct sha256 *h, struct span arch)
{
    uint64_t count = 0;
    for (size_t i = 0; i < g->value_count; i++)
        count += key_counts(g->values[i].key, arch);
    hash_u64(h, count);
    for (size_t i = 0; i < g->value_count; i++) {
        const struct gguf_value *v = &g->values[g->value_order[i]];
        const uint8_t *begin = v->key.data - 8; /* the length field in front of the name */
        if (key_counts(v->key, arch))
            sha256_update(h, begin, (size_t)(v->raw.data + v->raw.size - begin));
    }
}

static void hash_tensors(const struct gguf *g, struct sha256 *h, const uint8_t *digests)
{
    hash_u64(h, g->tensor_count);
    for (size_t i = 0; i < g->tensor_count; i++) {
        uint32_t index = g->tensor_order[i];
        const struct gguf_tensor *t = &g->tensors[index];
        hash_u64(h, t->name.size);
        sha256_update(h, t->name.data, t->name.size);
        hash_u32(h, t->type);
        for (size_t d = 0; d < TD_COUNT(t->dims); d++)
            hash_u64(h, t->dims[d]);
        sha256_update(h, digests + (size_t)index * TD_HASH_SIZE, TD_HASH_SIZE);
    }
}

int gguf_fingerprint_of(const struct gguf *g, const uint8_t *digests, uint8_t out[TD_HASH_SIZE],
                        struct td_error *err)
{
    struct span arch;
    struct sha256 h;
    if (!gguf_get_string(g, "general.architecture", &arch) || arch.size == 0)
        return td_fail(err, -TD_ERR_FORMAT,
                       "cannot fingerprint %s: it names no general.architecture; use a complete model file",
                       gguf_label(g));
    sha256_init(&h);
    sha256_update(&h, FINGERPRINT_TAG, sizeof FINGERPRINT_TAG);
    hash_keys(g, &h, arch);
    hash_tensors(g, &h, digests);
    sha256_final(&h, out);
    return 0;
}

int gguf_fingerprint(struct gguf *g, uint8_t out[TD_HASH_SIZE], progress_fn progress, void *ctx,
                     struct td_error *err)
{
    uint8_t *digests;
    int rc = gguf_digests(g, &digests, progress, ctx, err);
    if (rc == 0)
        rc = gguf_fingerprint_of(g, digests, out, err);
    free(digests);
    return rc;
}

/* --- verification --------------------------------------------------------------------------------------- */

/* Hash what is there and compare with `expected`. */
static int check_tensors(const struct gguf *g, const uint8_t *expected, progress_fn progress, void *ctx,
                         struct td_error *err)
{
    uint64_t done = 0, total = present_size(g);
    for (size_t i = 0; i < g->tensor_count; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        uint8_t digest[TD_HASH_SIZE];
        char shown[GGUF_SHOW_SIZE];
        if (!t->data)
            continue;
        hash_tensor(t, digest, &done, total, progress, ctx);
        if (memcmp(digest, expected + i * TD_HASH_SIZE, TD_HASH_SIZE) != 0)
            return td_fail(
                err, -TD_ERR_CHECKSUM,
                "%s is damaged: the bytes of tensor %s do not match their SHA-256; install the file again",
                gguf_label(g), gguf_show(t->name, shown));
    }
    return 0;
}

/* A slice brings its digests along. A whole file has only those that were taken when it was first used: if there are none yet, they
 * are taken now, which at least reads every byte. */
int gguf_verify(struct gguf *g, progress_fn progress, void *ctx, struct td_error *err)
{
    if (g->slice_digests)
        return check_tensors(g, g->slice_digests, progress, ctx, err);
    uint8_t *digests = malloc(g->tensor_count * TD_HASH_SIZE + 1);
    if (!digests)
        return td_fail(err, -TD_ERR_NOMEM, "cannot verify %s: out of memory", gguf_label(g));
    int rc;
    if (read_sidecar(g, digests)) {
        rc = check_tensors(g, digests, progress, ctx, err);
    } else {
        rc = compute_digests(g, digests, progress, ctx, err);
        if (rc == 0)
            write_sidecar(g, digests);
    }
    free(digests);
    return rc;
}

/* --- a file in use -------------------------------------------------------------------------------------- */

bool gguf_intact(struct gguf *g)
{
    pthread_mutex_lock(&g->intact_lock);
    if (!g->changed && gguf_is_touched(g))
        g->changed = !g->digests || g->identity.size != g->map_size ||
                     check_tensors(g, g->digests, NULL, NULL, NULL) < 0;
    bool intact = !g->changed;
    pthread_mutex_unlock(&g->intact_lock);
    return intact;
}
