/* gguf_internal: what the files gguf*.c share and nobody else may include.
 *
 * Invariants of an opened file:
 *   - every span and pointer below lies inside [map, map + map_size) or is NULL;
 *   - keys are unique, tensor names are unique; value_order and tensor_order list them by name (byte order);
 *   - in a slice, `tensors` is the table of the whole model in its order and digests[i] belongs to
 * tensors[i]. */
#ifndef TANDEM_SHARED_GGUF_INTERNAL_H
#define TANDEM_SHARED_GGUF_INTERNAL_H
#include "shared/gguf.h"
#include <pthread.h>

#define GGUF_MAGIC             0x46554747u /* "GGUF" read as a little-endian u32 */
#define GGUF_VERSION           3u
#define GGUF_ALIGNMENT_DEFAULT 32u
#define GGUF_ALIGNMENT_MIN     8u /* every tensor type may be read in place */
#define GGUF_ALIGNMENT_MAX     (1u << 20)
#define GGUF_NAME_MAX          65535u /* bytes of a key or tensor name */

#define GGUF_SLICE_PREFIX    "tandem.slice."
#define GGUF_SLICE_NAMES     "tandem.slice.names"     /* array of string, one a tensor of the whole model */
#define GGUF_SLICE_TYPES     "tandem.slice.types"     /* array of u32 */
#define GGUF_SLICE_DIMS      "tandem.slice.dims"      /* array of u64, four a tensor */
#define GGUF_SLICE_DIGESTS   "tandem.slice.digests"   /* array of u8, TD_HASH_SIZE a tensor */
#define GGUF_SLICE_LAYER_END "tandem.slice.layer_end" /* u32 */

struct gguf_identity { /* names the bytes of a file without reading them */
    uint64_t size, mtime_ns, inode, ctime_ns;
};

struct gguf {
    const uint8_t *map; /* the file; unmapped by gguf_close when `mapped` */
    size_t map_size;
    bool mapped;
    char *path; /* owned; "" for borrowed bytes */
    int fd;     /* of the mapped file, -1 without one: its time tells whether somebody writes into it */
    struct gguf_identity identity;
    uint8_t *digests;            /* owned: what gguf_digests said last; NULL before */
    pthread_mutex_t intact_lock; /* who asks while all is hashed for another waits */
    bool changed;                /* what gguf_intact has found */

    struct gguf_value *values;
    size_t value_count;
    uint32_t *value_order;

    struct gguf_tensor *tensors;
    size_t tensor_count;
    uint32_t *tensor_order;

    uint32_t alignment;
    uint32_t layer_count;         /* "<arch>.block_count", 0 when absent */
    uint32_t layer_end;           /* layers whose tensors are present */
    const uint8_t *slice_digests; /* borrowed from the map; NULL unless the file is a slice */
};

/* gguf_parse_map: fill g from g->map; on failure the caller closes g. */
int gguf_parse_map(struct gguf *g, struct td_error *err);

/* gguf_is_touched: the file has another size or modification time than at the last call, or when it was opened. */
bool gguf_is_touched(struct gguf *g);

/* How messages name the file. */
const char *gguf_label(const struct gguf *g);

/* gguf_show: a name from the file, made fit for a one-line message (control and non-ASCII bytes become '?').
 */
#define GGUF_SHOW_SIZE 72
const char *gguf_show(struct span name, char out[GGUF_SHOW_SIZE]);

int gguf_span_compare(struct span a, struct span b);
bool gguf_span_is(struct span s, const char *text);
bool gguf_has_prefix(struct span s, const char *prefix);

const struct gguf_tensor *gguf_find_tensor(const struct gguf *g, struct span name);

/* gguf_tensor_kept: does a slice [0, layer_end) of a model of layer_count layers hold the tensor `name`? */
bool gguf_tensor_kept(struct span name, uint32_t layer_end, uint32_t layer_count);

/* gguf_digests: SHA-256 of every tensor in tensor order, *out malloc'ed (TD_HASH_SIZE each) and the caller's.
 * From the slice's table, else from the sidecar, else computed (and the sidecar written when possible). */
int gguf_digests(struct gguf *g, uint8_t **out, progress_fn progress, void *ctx, struct td_error *err);

/* gguf_fingerprint_of: the fingerprint from digests that are at hand. */
int gguf_fingerprint_of(const struct gguf *g, const uint8_t *digests, uint8_t out[TD_HASH_SIZE],
                        struct td_error *err);

#endif
