/* bench_model: see bench_model.h. Values do not matter to speed, but they must be finite and differ: random bits with small scales. */
#include "kernels/bench_model.h"
#include <stdlib.h>
#include <strings.h>

struct bench_model {
    struct model model;
    void *buffers[16];
    size_t buffer_count;
    uint64_t random;
};

static const struct {
    const char *name;
    struct model_params params;
} shapes[] = {
    {"llama-8b",
     {.arch = MODEL_LLAMA,
      .layer_count = 32,
      .embd_size = 4096,
      .ffn_size = 14336,
      .head_count = 32,
      .kv_head_count = 8,
      .head_dim = 128,
      .vocab_count = 128256,
      .context_max = 131072 + 1024,
      .norm_eps = 1e-5f,
      .rope_kind = ROPE_INTERLEAVED,
      .rope_dim = 128,
      .rope_base = 500000.0f,
      .rope_scale = 1.0f}},
    {"tiny",
     {.arch = MODEL_LLAMA,
      .layer_count = 2,
      .embd_size = 256,
      .ffn_size = 512,
      .head_count = 4,
      .kv_head_count = 2,
      .head_dim = 64,
      .vocab_count = 512,
      .context_max = 4096,
      .norm_eps = 1e-5f,
      .rope_kind = ROPE_INTERLEAVED,
      .rope_dim = 64,
      .rope_base = 10000.0f,
      .rope_scale = 1.0f}},
};

static const uint32_t types[] = {GGUF_F32,  GGUF_F16,  GGUF_BF16, GGUF_Q8_0, GGUF_Q4_0, GGUF_Q4_1,
                                 GGUF_Q5_0, GGUF_Q5_1, GGUF_Q4_K, GGUF_Q5_K, GGUF_Q6_K};

static uint64_t next_random(struct bench_model *m) /* xorshift64* */
{
    m->random ^= m->random >> 12, m->random ^= m->random << 25, m->random ^= m->random >> 27;
    return m->random * 0x2545f4914f6cdd1du;
}

static void *take(struct bench_model *m, size_t size)
{
    void *p = m->buffer_count < TD_COUNT(m->buffers) ? malloc(size) : NULL;
    if (p)
        m->buffers[m->buffer_count++] = p;
    return p;
}

/* Scales into a quantised block of random bytes, so that its values average 0 and have a root mean square of about 0.02 in every
 * type, as the float types have. With weights near 1 the scores of attention run into thousands: each head then sees one token,
 * which one is chance, and two engines cannot be compared. */
static void set_scales(uint32_t type, uint8_t *block)
{
    float d = 0, centre = 0; /* minimum: centre * d */
    switch (type) {
    case GGUF_Q8_0:
        d = 2.7e-4f;
        break;
    case GGUF_Q4_0:
    case GGUF_Q4_1:
        d = 4.3e-3f, centre = -7.5f;
        break;
    case GGUF_Q5_0:
    case GGUF_Q5_1:
        d = 2.2e-3f, centre = -15.5f;
        break;
    case GGUF_Q4_K: /* what is stored is subtracted */
        d = 7.8e-5f, centre = 7.5f;
        break;
    case GGUF_Q5_K:
        d = 3.8e-5f, centre = 15.5f;
        break;
    default:
        d = 1.5e-5f;
        break;
    }
    bool has_m = type == GGUF_Q4_1 || type == GGUF_Q5_1 || type == GGUF_Q4_K || type == GGUF_Q5_K;
    store_le16(block + (type == GGUF_Q6_K ? 208 : 0), f32_to_f16(d));
    if (has_m)
        store_le16(block + 2, f32_to_f16(centre * d));
}

static void fill(struct bench_model *m, uint32_t type, uint8_t *out, size_t size)
{
    const struct gguf_type_info *info = gguf_type_info(type);
    for (size_t i = 0; i + 8 <= size; i += 8)
        store_le64(out + i, next_random(m));
    if (info->block_values > 1) {
        for (size_t i = 0; i < size; i += info->block_size)
            set_scales(type, out + i);
        return;
    }
    for (size_t i = 0; i < size; i += info->block_size) { /* sign and mantissa random, size 2^-6 to 2^-5 */
        if (type == GGUF_F32)
            store_le32(out + i, (load_le32(out + i) & 0x807fffffu) | 0x3c800000u);
        else if (type == GGUF_F16)
            store_le16(out + i, (uint16_t)((load_le16(out + i) & 0x83ffu) | 0x2400u));
        else
            store_le16(out + i, (uint16_t)((load_le16(out + i) & 0x807fu) | 0x3c80u));
    }
}

static bool make_weight(struct bench_model *m, uint32_t type, uint32_t columns, uint32_t rows,
                        struct weight *w)
{
    const struct gguf_type_info *info = gguf_type_info(type);
    size_t size = (size_t)columns / info->block_values * info->block_size * rows;
    uint8_t *data = take(m, size);
    if (data)
        fill(m, type, data, size);
    *w = (struct weight){type, columns, rows, data};
    return data != NULL;
}

static bool make_norm(struct bench_model *m, struct weight *w)
{
    uint32_t columns = m->model.params.embd_size;
    float *ones = take(m, sizeof *ones * columns);
    for (uint32_t i = 0; ones && i < columns; i++)
        ones[i] = 1.0f;
    *w = (struct weight){GGUF_F32, columns, 1, ones};
    return ones != NULL;
}

static bool make_weights(struct bench_model *m, uint32_t type)
{
    const struct model_params *p = &m->model.params;
    uint32_t q = p->head_count * p->head_dim, kv = p->kv_head_count * p->head_dim;
    struct model_layer l = {0};
    bool ok = make_norm(m, &m->model.output_norm) &&
              make_weight(m, type, p->embd_size, p->vocab_count, &m->model.embed) &&
              make_weight(m, type, p->embd_size, p->vocab_count, &m->model.output) &&
              make_weight(m, type, p->embd_size, q, &l.wq) && make_weight(m, type, p->embd_size, kv, &l.wk) &&
              make_weight(m, type, p->embd_size, kv, &l.wv) && make_weight(m, type, q, p->embd_size, &l.wo) &&
              make_weight(m, type, p->embd_size, p->ffn_size, &l.w_gate) &&
              make_weight(m, type, p->embd_size, p->ffn_size, &l.w_up) &&
              make_weight(m, type, p->ffn_size, p->embd_size, &l.w_down);
    m->model.layers = calloc(p->layer_count, sizeof *m->model.layers);
    if (!ok || !m->model.layers)
        return false;
    l.attn_norm = l.ffn_norm = m->model.output_norm;
    for (uint32_t i = 0; i < p->layer_count; i++)
        m->model.layers[i] = l;
    m->model.layers_held = p->layer_count;
    return true;
}

static int find(const char *shape, const char *dtype, const struct model_params **params, uint32_t *type,
                struct td_error *err)
{
    *params = NULL;
    *type = UINT32_MAX;
    for (size_t i = 0; i < TD_COUNT(shapes); i++)
        if (strcmp(shapes[i].name, shape) == 0)
            *params = &shapes[i].params;
    for (size_t i = 0; i < TD_COUNT(types); i++)
        if (strcasecmp(gguf_type_info(types[i])->name, dtype) == 0)
            *type = types[i];
    if (*params && *type != UINT32_MAX)
        return 0;
    return td_fail(err, -TD_ERR_ARG,
                   "cannot make a model of shape '%s' and type '%s': shapes are " BENCH_MODEL_SHAPES
                   "; types those of GGUF: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k",
                   shape, dtype);
}

int bench_model_check(const char *shape, const char *dtype, struct td_error *err)
{
    const struct model_params *params;
    uint32_t type;
    return find(shape, dtype, &params, &type, err);
}

int bench_model_create(const char *shape, const char *dtype, struct bench_model **out, struct td_error *err)
{
    const struct model_params *params;
    uint32_t type;
    *out = NULL;
    int rc = find(shape, dtype, &params, &type, err);
    if (rc)
        return rc;
    struct bench_model *m = calloc(1, sizeof *m);
    if (m) {
        m->random = 0x9e3779b97f4a7c15u;
        m->model.params = *params;
    }
    if (!m || !make_weights(m, type)) {
        bench_model_destroy(m);
        return td_fail(err, -TD_ERR_NOMEM, "cannot make a model of shape %s: out of memory", shape);
    }
    *out = m;
    return 0;
}

struct model *bench_model_get(struct bench_model *m)
{
    return &m->model;
}

void bench_model_destroy(struct bench_model *m)
{
    if (!m)
        return;
    for (size_t i = 0; i < m->buffer_count; i++)
        free(m->buffers[i]);
    free(m->model.layers);
    free(m);
}
