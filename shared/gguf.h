/* gguf: a read-only GGUF v3 file, mapped into memory. Every count, length, type and offset is checked when it is
 * opened, so that accessors cannot run outside of the map; a damaged or hostile file is a clear error, never a crash.
 * Limits: GGUF_KEYS_MAX keys, GGUF_TENSORS_MAX tensors, GGUF_ARRAY_MAX array elements, 4 dimensions.
 * Source: the GGUF specification, version 3 (little-endian). */
#ifndef TANDEM_SHARED_GGUF_H
#define TANDEM_SHARED_GGUF_H
#include "shared/base.h"
#include "shared/status.h"

#define GGUF_KEYS_MAX    65536
#define GGUF_TENSORS_MAX 65536
#define GGUF_ARRAY_MAX   (1u << 24)

enum gguf_type { /* ggml tensor types that Tandem reads */
                 GGUF_F32 = 0,
                 GGUF_F16 = 1,
                 GGUF_Q4_0 = 2,
                 GGUF_Q4_1 = 3,
                 GGUF_Q5_0 = 6,
                 GGUF_Q5_1 = 7,
                 GGUF_Q8_0 = 8,
                 GGUF_Q4_K = 12,
                 GGUF_Q5_K = 13,
                 GGUF_Q6_K = 14,
                 GGUF_BF16 = 30,
};

struct gguf_type_info {
    const char *name;      /* "Q4_1" */
    uint32_t block_values; /* values a block: 1, 32 or 256 */
    uint32_t block_size;   /* bytes a block */
};
/* NULL for a type that Tandem does not read. */
const struct gguf_type_info *gguf_type_info(uint32_t type);

struct gguf_tensor {
    struct span name;
    uint32_t type; /* enum gguf_type; unknown types are kept so that the user of the tensor can name them */
    uint32_t dim_count;
    uint64_t dims[4]; /* dims[0] is the contiguous one; unused are 1 */
    /* borrowed from the map; NULL in a slice that leaves this tensor out, or for an unknown type */
    const void *data;
    uint64_t size; /* bytes */
};

enum gguf_value_type {
    GGUF_VALUE_U8,
    GGUF_VALUE_I8,
    GGUF_VALUE_U16,
    GGUF_VALUE_I16,
    GGUF_VALUE_U32,
    GGUF_VALUE_I32,
    GGUF_VALUE_F32,
    GGUF_VALUE_BOOL,
    GGUF_VALUE_STRING,
    GGUF_VALUE_ARRAY,
    GGUF_VALUE_U64,
    GGUF_VALUE_I64,
    GGUF_VALUE_F64,
};

struct gguf_value {
    struct span key;
    enum gguf_value_type type;
    enum gguf_value_type element_type; /* of an array */
    uint64_t count;                    /* array elements; else 1 */
    struct span raw; /* value bytes; for a string, its characters; for an array, its elements */
    /* arrays of strings: offset of each string's length field in raw; else NULL */
    const uint64_t *string_offsets;
};

struct gguf;

int gguf_open(const char *path, struct gguf **out, struct td_error *err);
/* gguf_parse: the same over borrowed bytes (tests). */
int gguf_parse(const void *data, size_t size, struct gguf **out, struct td_error *err);
void gguf_close(struct gguf *g);

const char *gguf_path(const struct gguf *g); /* "" after gguf_parse */
uint64_t gguf_file_size(const struct gguf *g);
const struct gguf_value *gguf_find(const struct gguf *g, const char *key); /* NULL: absent */
size_t gguf_tensor_count(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t index);
const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name);

/* Typed getters: true and *out when the key exists and converts without loss; false and *out untouched otherwise. */
bool gguf_get_u32(const struct gguf *g, const char *key, uint32_t *out);
bool gguf_get_f32(const struct gguf *g, const char *key, float *out);
bool gguf_get_bool(const struct gguf *g, const char *key, bool *out);
bool gguf_get_string(const struct gguf *g, const char *key, struct span *out);
/* Element of an array (any integer type → i64; f32/f64 → f32; string). index < count is checked. */
bool gguf_array_i64(const struct gguf_value *array, uint64_t index, int64_t *out);
bool gguf_array_f32(const struct gguf_value *array, uint64_t index, float *out);
bool gguf_array_string(const struct gguf_value *array, uint64_t index, struct span *out);

/* --- fingerprint and slices ------------------------------------------------------------------------------------
 * fingerprint = SHA-256 over a canonical form of: architecture hyper-parameters (all "<arch>.*" and "general.architecture"
 * keys), all "tokenizer.*" keys, and the table of per-tensor (name, type, dims, SHA-256 of its bytes), each part sorted by
 * name (byte order). shared/FINGERPRINT.md gives the exact bytes. Per-tensor digests are cached in a sidecar
 * "<path>.digests" keyed by (size, mtime, inode) and written only when possible.
 * A slice keeps the full digest table in the array keys "tandem.slice.names/types/dims/digests" plus
 * "tandem.slice.layer_end", so it shows the fingerprint of the model that it was cut from. */
typedef void (*progress_fn)(void *ctx, uint64_t done, uint64_t total);
int gguf_fingerprint(struct gguf *g, uint8_t out[TD_HASH_SIZE], progress_fn progress, void *ctx,
                     struct td_error *err);
/* Write layers [0, layer_end) + embedding to out_path (temp + fsync + rename). 0 < layer_end <= n_layer. Refuses a slice as input
 * that holds less. Output norm and output head are left out unless layer_end == n_layer. Verified by re-opening. */
int gguf_slice(struct gguf *g, uint32_t layer_end, const char *out_path, progress_fn progress, void *ctx,
               struct td_error *err);
/* Hash every tensor that is present and compare: a slice with its own table, a whole file with the digests that its sidecar kept from an
 * earlier start (if there are none yet they are taken now). -TD_ERR_CHECKSUM names the first tensor that differs. */
int gguf_verify(struct gguf *g, progress_fn progress, void *ctx, struct td_error *err);
/* gguf_intact: are the mapped tensors still those that gguf_digests last saw? For who computes with them, before a use and again before
 * what came of it counts: whoever writes into the file changes its time first. One look at that time; if it is another, every tensor is
 * hashed, so a mere touch does no harm. Once false, always false. Any thread. */
bool gguf_intact(struct gguf *g);
/* Layers whose tensors are present: n_layer for a full file, "tandem.slice.layer_end" for a slice. */
uint32_t gguf_layers_held(const struct gguf *g);

#endif
