/* kv_block: ids and quality of KV blocks. The piece form is in kv_piece.c. KV_FORMAT.md has the bytes. */
#include "shared/kv_block.h"
#include "shared/crypto.h"

#define LAYOUT_LABEL     "tandem-kv-layout"
#define OWN_LABEL        "tandem-own"
#define PRINCIPAL_MAX    1024 /* bytes of a name that enter the key; STORE_TENANT_MAX is far below */
#define LAYOUT_BYTES_MAX 128

static uint8_t *put(uint8_t *at, const void *data, size_t size)
{
    memcpy(at, data, size);
    return at + size;
}
static uint8_t *put_u32(uint8_t *at, uint32_t value)
{
    store_le32(at, value);
    return at + 4;
}
static uint8_t *put_f32(uint8_t *at, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return put_u32(at, bits);
}

void kv_layout_hash(const struct kv_layout *l, uint8_t out[TD_HASH_SIZE])
{
    uint8_t bytes[LAYOUT_BYTES_MAX];
    uint8_t *at = put(bytes, LAYOUT_LABEL, sizeof LAYOUT_LABEL - 1);
    at = put_u32(at, l->block_tokens);
    at = put_u32(at, l->dtype);
    at = put_u32(at, l->rope_kind);
    at = put_u32(at, l->rope_dim);
    at = put_f32(at, l->rope_base);
    at = put_f32(at, l->rope_scale);
    at = put(at, l->rope_factors, TD_HASH_SIZE);
    at = put(at, l->adapter, TD_HASH_SIZE);
    at = put_u32(at, l->version);
    sha256_once(bytes, (size_t)(at - bytes), out);
}

void kv_block_id_next(const uint8_t key[32], const struct kv_block_id *parent,
                      const uint8_t fingerprint[TD_HASH_SIZE], const uint8_t layout_hash[TD_HASH_SIZE],
                      const int32_t ids[KV_BLOCK_TOKENS], struct kv_block_id *out)
{
    uint8_t tokens[4 * KV_BLOCK_TOKENS];
    for (size_t i = 0; i < KV_BLOCK_TOKENS; i++)
        store_le32(tokens + 4 * i, (uint32_t)ids[i]);
    struct kv_block_id above = *parent; /* parent and out may be the same */
    const struct span parts[] = {
        {above.bytes, TD_HASH_SIZE},
        {fingerprint, TD_HASH_SIZE},
        {layout_hash, TD_HASH_SIZE},
        {tokens, sizeof tokens},
    };
    hmac_sha256(key, parts, TD_COUNT(parts), out->bytes);
    crypto_wipe(tokens, sizeof tokens); /* token ids are text */
}

void kv_principal_key(const uint8_t tenant_chain_key[32], const char *principal, uint8_t out[32])
{
    uint8_t info[sizeof OWN_LABEL - 1 + PRINCIPAL_MAX];
    size_t size = strnlen(principal, PRINCIPAL_MAX);
    uint8_t *at = put(info, OWN_LABEL, sizeof OWN_LABEL - 1);
    at = put(at, principal, size);
    hkdf_sha256(tenant_chain_key, NULL, 0, info, (size_t)(at - info), out);
}

/* ---- quality ----------------------------------------------------------------------------------------------
 */

/* 0: pages of 16 bits. */
static uint32_t page_kind(uint32_t numerics)
{
    if (numerics >= KV_NUMERICS_CUDA_DET_OTHER)
        return (numerics - KV_NUMERICS_CUDA_DET_OTHER) % 3;
    switch (numerics) {
    case KV_NUMERICS_CUDA_DET_V1_FP8:
    case KV_NUMERICS_CUDA_DET_V2_FP8:
    case KV_NUMERICS_CUDA_FAST_FP8:
        return 1;
    case KV_NUMERICS_CUDA_DET_V1_INT8:
    case KV_NUMERICS_CUDA_DET_V2_INT8:
    case KV_NUMERICS_CUDA_FAST_INT8:
        return 2;
    default:
        return 0;
    }
}

static bool is_fast(uint32_t numerics)
{
    return numerics == KV_NUMERICS_CUDA_FAST || numerics == KV_NUMERICS_CUDA_FAST_FP8 ||
           numerics == KV_NUMERICS_CUDA_FAST_INT8;
}

static const enum kv_numerics fast[] = {KV_NUMERICS_CUDA_FAST, KV_NUMERICS_CUDA_FAST_FP8,
                                        KV_NUMERICS_CUDA_FAST_INT8};

bool kv_numerics_known(uint32_t numerics)
{
    return (numerics >= KV_NUMERICS_CPU_V1 && numerics <= KV_NUMERICS_CUDA_DET_V2_INT8) ||
           (numerics >= KV_NUMERICS_CUDA_DET_OTHER && numerics <= KV_NUMERICS_LAST);
}

enum kv_numerics kv_numerics_cuda_det(bool keeps_v2, uint32_t capability, uint32_t kind)
{
    if (keeps_v2)
        return KV_NUMERICS_CUDA_DET_V2 + kind;
    if (capability < KV_CAPABILITY_LEAST || capability > KV_CAPABILITY_MOST)
        return fast[kind];
    return KV_NUMERICS_CUDA_DET_OTHER + 3 * (capability - KV_CAPABILITY_LEAST) + kind;
}

enum kv_numerics kv_numerics_mixed(enum kv_numerics a, enum kv_numerics b)
{
    return a == b ? a : fast[TD_MAX(page_kind(a), page_kind(b))];
}

bool kv_quality_accepts(struct kv_quality q, enum kv_accept accept, enum kv_numerics numerics)
{
    switch (accept) {
    case KV_ACCEPT_EXACT:
        return q.fidelity == KV_L0 && q.numerics == numerics;
    case KV_ACCEPT_VISIBLE_LOSSLESS:
        return q.fidelity <= KV_L1 &&
               (page_kind(q.numerics) == 0 || page_kind(q.numerics) == page_kind(numerics));
    case KV_ACCEPT_ANY:
        return q.fidelity <= KV_L4;
    }
    return false;
}

bool kv_quality_better(struct kv_quality a, struct kv_quality b)
{
    if (a.fidelity != b.fidelity)
        return a.fidelity < b.fidelity;
    bool a_8bit = page_kind(a.numerics) > 0, b_8bit = page_kind(b.numerics) > 0;
    if (a_8bit != b_8bit)
        return b_8bit;
    if (is_fast(a.numerics) != is_fast(b.numerics))
        return is_fast(b.numerics);
    return a.provenance < b.provenance;
}

struct kv_quality kv_quality_worst(struct kv_quality a, struct kv_quality b)
{
    uint32_t a_kind = page_kind(a.numerics), b_kind = page_kind(b.numerics);
    bool both = a_kind > 0 && b_kind > 0 && a_kind != b_kind; /* no engine has pages that lose so */
    return (struct kv_quality){
        .fidelity = TD_MAX(TD_MAX(a.fidelity, b.fidelity), both ? KV_L2 : KV_L0),
        /* A mixture repeats under neither arithmetic, so it must never pass for exact. */
        .numerics = (uint8_t)kv_numerics_mixed(a.numerics, b.numerics),
        .provenance = TD_MAX(a.provenance, b.provenance),
    };
}
