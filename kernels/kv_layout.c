/* kv_layout: see kv_layout.h. */
#include "kernels/kv_layout.h"
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
