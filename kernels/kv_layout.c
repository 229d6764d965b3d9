/* kv_layout: see kv_layout.h. */
#include "kernels/kv_layout.h"
#include "kernels/kv_dtype.h"
#include "shared/crypto.h"

void model_layout_hash(const struct model *m, uint8_t out[TD_HASH_SIZE])
{
    const struct model_params *p = &m->params;
    struct kv_layout layout = {.block_tokens = KV_BLOCK_TOKENS,
                               .dtype = 1,
                               .rope_kind = (uint32_t)p->rope_kind,
                               .rope_dim = p->rope_dim,
                               .rope_base = p->rope_base,
                               .rope_scale = p->rope_scale,
                               .version = KV_LAYOUT_VERSION};
    if (p->has_rope_factors)
        sha256_once(m->rope_factors.data, sizeof(float) * (p->rope_dim / 2), layout.rope_factors);
    kv_layout_hash(&layout, out);
}

struct kv_shape model_kv_shape(const struct model *m)
{
    return (struct kv_shape){m->params.layer_count, m->params.kv_head_count, m->params.head_dim};
}

bool kv_dtype_find(const char *name, enum kv_dtype *out)
{
    static const char *const names[] = {"f16", "fp8", "int8"};
    for (size_t i = 0; i < TD_COUNT(names); i++)
        if (strcmp(names[i], name) == 0) {
            *out = (enum kv_dtype)i;
            return true;
        }
    return false;
}

uint64_t kv_dtype_layer_size(enum kv_dtype dtype, uint32_t kv_head_count, uint32_t head_dim)
{
    uint64_t rows = (uint64_t)2 * kv_head_count * KV_BLOCK_TOKENS;
    return rows * (dtype == KV_DTYPE_F16 ? 2 * (uint64_t)head_dim : head_dim + sizeof(uint16_t));
}
