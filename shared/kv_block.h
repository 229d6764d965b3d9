/* kv_block: identity, quality and the wire/storage form of KV. Frozen formats; shared/KV_FORMAT.md has the byte tables and
 * tests/golden/ the vectors.
 *
 * A block is KV_BLOCK_TOKENS consecutive tokens of one sequence, all layers, K and V, f16.
 * A piece is one (block, layer, K|V), self-describing and decodable alone; a damaged piece costs only itself. */
#ifndef TANDEM_SHARED_KV_BLOCK_H
#define TANDEM_SHARED_KV_BLOCK_H
#include "shared/base.h"
#include "shared/status.h"

#define KV_BLOCK_TOKENS   64
#define KV_LAYOUT_VERSION 1
#define KV_GROUP          64 /* values that share a scale at L1 (along head_dim, then token: consecutive values) */
#define KV_HEADS_MAX      256
#define KV_HEAD_DIM_MAX   512
#define KV_LAYERS_MAX     1024

/* ---- identity --------------------------------------------------------------------------------------------- */

struct kv_layout {         /* what must be equal for KV bytes to mean the same */
    uint32_t block_tokens; /* KV_BLOCK_TOKENS */
    uint32_t dtype;        /* 1 = f16 */
    uint32_t rope_kind;    /* enum rope_kind */
    uint32_t rope_dim;
    float rope_base, rope_scale;
    uint8_t rope_factors[TD_HASH_SIZE]; /* SHA-256 of rope_freqs.weight's f32 bytes, zeros without */
    uint8_t adapter[TD_HASH_SIZE];      /* zeros: none */
    uint32_t version;                   /* KV_LAYOUT_VERSION */
};
/* layout hash = SHA-256("tandem-kv-layout" ‖ u32le block_tokens ‖ dtype ‖ rope_kind ‖ rope_dim ‖ f32le rope_base ‖ rope_scale ‖
 * rope_factors[32] ‖ adapter[32] ‖ u32le version) */
void kv_layout_hash(const struct kv_layout *l, uint8_t out[TD_HASH_SIZE]);

struct kv_block_id {
    uint8_t bytes[TD_HASH_SIZE];
};
/* id = HMAC-SHA-256(key, parent ‖ fingerprint ‖ layout_hash ‖ u32le ids[64]); the root's parent is zeros. */
void kv_block_id_next(const uint8_t key[32], const struct kv_block_id *parent,
                      const uint8_t fingerprint[TD_HASH_SIZE], const uint8_t layout_hash[TD_HASH_SIZE],
                      const int32_t ids[KV_BLOCK_TOKENS], struct kv_block_id *out);
/* The key of a principal's `own` namespace: HKDF-SHA-256(tenant chain key, salt none, info = "tandem-own" ‖ principal). */
void kv_principal_key(const uint8_t tenant_chain_key[32], const char *principal, uint8_t out[32]);

/* ---- quality ---------------------------------------------------------------------------------------------- */

enum kv_codec {            /* also fidelity: the worst level that values went through */
                KV_L0 = 0, /* lossless: byte planes split, exponent plane through zstd */
                KV_L1 = 1, /* int8, u8 log scale a group of 64 or 128 */
                KV_L2 = 2, /* Hadamard, 4 or 5 bits, u8 log scale a group of 64 */
                KV_L3 = 3,
                KV_L4 = 4,
                KV_SEALED = 14, /* a piece in any of the others, sealed by a cloud: shared/kv_seal.h */
                KV_RAW = 15,    /* f16 as it is; fidelity equals KV_L0 */
};
/* What this version takes on the wire: bit n is codec n. */
#define KV_CODEC_MASK (1u << KV_L0 | 1u << KV_L1 | 1u << KV_L2 | 1u << KV_RAW)
enum kv_numerics {
    KV_NUMERICS_CPU_V1 = 1,
    KV_NUMERICS_CUDA_DET_V1 = 2,
    KV_NUMERICS_CUDA_FAST = 3,
    /* The same where pages keep KV in 8 bits: what was computed by them carries that loss (kernels/kv_dtype.h). */
    KV_NUMERICS_CUDA_DET_V1_FP8 = 4,
    KV_NUMERICS_CUDA_FAST_FP8 = 5,
    KV_NUMERICS_CUDA_DET_V1_INT8 = 6,
    KV_NUMERICS_CUDA_FAST_INT8 = 7,
    /* As v1, which is made no more, but for attention behind 2,048 tokens (kernels/cuda/det_attention.cuh). */
    KV_NUMERICS_CUDA_DET_V2 = 8,
    KV_NUMERICS_CUDA_DET_V2_FP8 = 9,
    KV_NUMERICS_CUDA_DET_V2_INT8 = 10,
    /* cuda-det on devices that do not keep v2's rule: one arithmetic for each compute capability and kind of pages, from
     * KV_CAPABILITY_LEAST on (kv_numerics_cuda_det). */
    KV_NUMERICS_CUDA_DET_OTHER = 16,
    KV_NUMERICS_LAST = 240
};
#define KV_CAPABILITY_LEAST 75u /* 10 * major + minor */
#define KV_CAPABILITY_MOST  149u
enum kv_provenance { KV_FROM_CLOUD = 0, KV_FROM_DEVICE = 1 };
enum kv_accept { KV_ACCEPT_EXACT = 0, KV_ACCEPT_VISIBLE_LOSSLESS = 1 /* default */, KV_ACCEPT_ANY = 2 };

struct kv_quality {
    uint8_t fidelity;   /* enum kv_codec, 0..4 */
    uint8_t numerics;   /* enum kv_numerics */
    uint8_t provenance; /* enum kv_provenance */
    uint8_t reserved;   /* 0 */
};
bool kv_numerics_known(uint32_t numerics);
/* page_kind: 0 f16, 1 FP8, 2 INT8. Of a capability that has no number: cuda-fast, which promises nothing. */
enum kv_numerics kv_numerics_cuda_det(bool keeps_v2, uint32_t capability, uint32_t page_kind);
/* What was computed from both: the kind that promises least, of 8-bit pages if one of them is. */
enum kv_numerics kv_numerics_mixed(enum kv_numerics a, enum kv_numerics b);
/* May a request that accepts `accept` on an engine with `numerics` use this piece? exact: L0 and same numerics; visible-lossless: <= L1, and of
 * 8-bit pages only what pages of that kind made; any: all. */
bool kv_quality_accepts(struct kv_quality q, enum kv_accept accept, enum kv_numerics numerics);
/* Is `a` strictly better than `b` (lower fidelity level first; then 16-bit pages over 8-bit ones; then deterministic numerics over fast; then cloud over device)? */
bool kv_quality_better(struct kv_quality a, struct kv_quality b);
/* what was computed from both */
struct kv_quality kv_quality_worst(struct kv_quality a, struct kv_quality b);

/* ---- pieces ----------------------------------------------------------------------------------------------- */

struct kv_shape {
    uint32_t layer_count, kv_head_count, head_dim;
};
static inline size_t kv_piece_values(const struct kv_shape *s, uint32_t tokens)
{
    return (size_t)tokens * s->kv_head_count * s->head_dim;
}

#define KV_PIECE_MAGIC     0x4b564454u /* "TDVK" little-endian */
#define KV_PIECE_HEAD_SIZE 64

struct kv_piece_head { /* serialised as 64 bytes little-endian, order as here; see KV_FORMAT.md */
    uint8_t version;   /* 1 */
    uint8_t codec;     /* enum kv_codec */
    uint8_t is_value;  /* 0: K, 1: V */
    uint8_t table;     /* L1: a scale for 64 (0) or 128 values (1); L2: 4 bits (0) or 5 (1); otherwise 0 */
    struct kv_quality quality;
    uint32_t block_index; /* position / KV_BLOCK_TOKENS */
    uint16_t first_token; /* within the block */
    uint16_t token_count; /* 1..64 */
    uint16_t layer;
    uint16_t kv_head_count;
    uint16_t head_dim;
    uint32_t payload_size;
    uint32_t crc; /* CRC32C over the head with this field zero, then the payload */
};

struct kv_codec_scratch; /* zstd contexts and planes; one per thread */
struct kv_codec_scratch *kv_codec_scratch_create(const struct kv_shape *shape);
void kv_codec_scratch_destroy(struct kv_codec_scratch *s);

/* Largest encoded size of a piece, head included. */
size_t kv_piece_bound(const struct kv_shape *shape, uint32_t token_count);
/* kv_piece_encode: src f16 [kv_head][token_count][head_dim]. Fills head->payload_size and head->crc; the caller sets the rest.
 * Non-finite values: L0/RAW keep them bit for bit, L1 and L2 refuse (-TD_ERR_FORMAT). Returns bytes written (head + payload), or negative:
 * -TD_ERR_NOSPACE, -TD_ERR_SHAPE, -TD_ERR_UNSUPPORTED (codec). L1 error bound: |x - x'| <= scale / 2, scale = group max / 127 rounded up
 * to the log grid scale = 2^((n - 183) / 8), n in 1..255 (n = 0: all zero). Bits are the same on every instruction set. */
int64_t kv_piece_encode(struct kv_codec_scratch *s, struct kv_piece_head *head, const uint16_t *src,
                        uint8_t *dst, size_t capacity);
/* kv_piece_parse: check magic, version, sizes and CRC of hostile bytes; on success *head and *payload (borrowed). */
int kv_piece_parse(const void *data, size_t size, struct kv_piece_head *head, struct span *payload);
/* kv_piece_peek: the same but for the CRC, for a piece that this process has made or checked. */
int kv_piece_peek(const void *data, size_t size, struct kv_piece_head *head);
/* kv_piece_decode: dst f16, kv_piece_values of the head's shape; capacity in values. zstd output must be exactly the size that the shape implies. */
int kv_piece_decode(struct kv_codec_scratch *s, const struct kv_piece_head *head, struct span payload,
                    uint16_t *dst, size_t capacity);
bool kv_f16_all_finite(const uint16_t *values, size_t count);

#endif
