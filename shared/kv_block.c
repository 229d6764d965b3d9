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

bool kv_quality_accepts(struct kv_quality q, enum kv_accept accept, enum kv_numerics numerics)
{
    switch (accept) {
    case KV_ACCEPT_EXACT:
        return q.fidelity == KV_L0 && q.numerics == numerics;
    case KV_ACCEPT_VISIBLE_LOSSLESS:
        return q.fidelity <= KV_L1;
    case KV_ACCEPT_ANY:
        return q.fidelity <= KV_L4;
    }
    return false;
}

bool kv_quality_better(struct kv_quality a, struct kv_quality b)
{
    if (a.fidelity != b.fidelity)
        return a.fidelity < b.fidelity;
    bool a_fast = a.numerics == KV_NUMERICS_CUDA_FAST, b_fast = b.numerics == KV_NUMERICS_CUDA_FAST;
    if (a_fast != b_fast)
        return b_fast;
    return a.provenance < b.provenance;
}

struct kv_quality kv_quality_worst(struct kv_quality a, struct kv_quality b)
{
    return (struct kv_quality){
        .fidelity = TD_MAX(a.fidelity, b.fidelity),
        /* A mixture repeats under neither arithmetic, so it must never pass for exact. */
        .numerics = a.numerics == b.numerics ? a.numerics : KV_NUMERICS_CUDA_FAST,
        .provenance = TD_MAX(a.provenance, b.provenance),
    };
}
