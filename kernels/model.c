/* model: from a GGUF file's keys and tensors to a checked table of weights.
 *
 * A file is accepted only if every number that the forward pass depends on is present and plausible, and if
 * it holds nothing that would change the result and that the engine does not compute: experts, an unknown
 * RoPE scaling, a tensor of an unknown name. Refusing is better than a model that quietly talks nonsense. */
#include "kernels/model.h"
#include "shared/kv_block.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define EMBD_MAX    (1u << 17)
#define FFN_MAX     (1u << 20)
#define HEADS_MAX   1024u
#define VOCAB_MAX   (1u << 22)
#define CONTEXT_MAX (1u << 24) /* positions are exact in the angles of RoPE well beyond it */

struct loader {
    struct gguf *file;
    struct model *model;
    const char *arch; /* prefix of its keys */
    size_t used_count;
    struct td_error *err;
};

static const char *file_name(const struct loader *l)
{
    const char *path = gguf_path(l->file);
    return path[0] ? path : "the model";
}

/* --- hyper-parameters ------------------------------------------------------------------------- */

static const char *arch_key(const struct loader *l, const char *name, char buffer[static 128])
{
    snprintf(buffer, 128, "%s.%s", l->arch, name);
    return buffer;
}

static bool has_u32(const struct loader *l, const char *name, uint32_t *out)
{
    char key[128];
    return gguf_get_u32(l->file, arch_key(l, name, key), out);
}

static int need_u32(const struct loader *l, const char *name, uint32_t low, uint32_t high, uint32_t *out)
{
    char key[128];
    if (!gguf_get_u32(l->file, arch_key(l, name, key), out))
        return td_fail(l->err, -TD_ERR_FORMAT, "cannot load %s: key %s is missing; convert the model again",
                       file_name(l), key);
    if (*out < low || *out > high)
        return td_fail(l->err, -TD_ERR_FORMAT, "cannot load %s: %s = %u is not in [%u, %u]", file_name(l),
                       key, *out, low, high);
    return 0;
}

static int read_arch(struct loader *l)
{
    static const struct {
        const char *name;
        enum model_arch arch;
        enum rope_kind rope;
    } known[] = {{"llama", MODEL_LLAMA, ROPE_INTERLEAVED},
                 {"qwen2", MODEL_QWEN2, ROPE_HALVES},
                 {"qwen3", MODEL_QWEN3, ROPE_HALVES}};
    struct span name;
    if (!gguf_get_string(l->file, "general.architecture", &name))
        return td_fail(l->err, -TD_ERR_FORMAT, "cannot load %s: key general.architecture is missing",
                       file_name(l));
    for (size_t i = 0; i < TD_COUNT(known); i++) {
        if (name.size == strlen(known[i].name) && memcmp(name.data, known[i].name, name.size) == 0) {
            l->arch = known[i].name;
            l->model->params.arch = known[i].arch;
            l->model->params.rope_kind = known[i].rope;
            return 0;
        }
    }
    return td_fail(l->err, -TD_ERR_UNSUPPORTED,
                   "cannot load %s: architecture '%.*s' is not supported; use a llama, qwen2 or qwen3 model",
                   file_name(l), (int)TD_MIN(name.size, (size_t)40), (const char *)name.data);
}

/* What the engine does not compute must not be in the file. */
static int refuse_extras(const struct loader *l)
{
    uint32_t n;
    bool causal;
    char key[128];
    if (has_u32(l, "expert_count", &n) && n > 0)
        return td_fail(l->err, -TD_ERR_UNSUPPORTED,
                       "cannot load %s: models with experts (%s.expert_count = %u) are not supported",
                       file_name(l), l->arch, n);
    if (gguf_get_bool(l->file, arch_key(l, "attention.causal", key), &causal) && !causal)
        return td_fail(l->err, -TD_ERR_UNSUPPORTED, "cannot load %s: it is an encoder (%s is false)",
                       file_name(l), key);
    return 0;
}

static int read_sizes(struct loader *l)
{
    struct model_params *p = &l->model->params;
    int rc;
    if ((rc = need_u32(l, "block_count", 1, KV_LAYERS_MAX, &p->layer_count)) ||
        (rc = need_u32(l, "embedding_length", 1, EMBD_MAX, &p->embd_size)) ||
        (rc = need_u32(l, "feed_forward_length", 1, FFN_MAX, &p->ffn_size)) ||
        (rc = need_u32(l, "attention.head_count", 1, HEADS_MAX, &p->head_count)) ||
        (rc = need_u32(l, "context_length", 1, UINT32_MAX, &p->context_max)))
        return rc;
    uint32_t window;
    if (has_u32(l, "attention.sliding_window", &window) && window > 0)
        p->context_max = TD_MIN(p->context_max, window); /* up to there a window changes nothing */
    p->context_max = TD_MIN(p->context_max, CONTEXT_MAX);
    p->kv_head_count = p->head_count;
    has_u32(l, "attention.head_count_kv", &p->kv_head_count);
    if (p->kv_head_count == 0 || p->kv_head_count > KV_HEADS_MAX || p->head_count % p->kv_head_count != 0)
        return td_fail(l->err, -TD_ERR_FORMAT,
                       "cannot load %s: %u heads cannot share %u KV heads (at most %u)", file_name(l),
                       p->head_count, p->kv_head_count, KV_HEADS_MAX);
    p->head_dim = p->embd_size / p->head_count;
    has_u32(l, "attention.key_length", &p->head_dim);
    uint32_t value_dim = p->head_dim;
    has_u32(l, "attention.value_length", &value_dim);
    if (p->head_dim == 0 || p->head_dim % 8 != 0 || p->head_dim > KV_HEAD_DIM_MAX || value_dim != p->head_dim)
        return td_fail(
            l->err, -TD_ERR_UNSUPPORTED,
            "cannot load %s: heads of %u (keys) and %u (values) are not supported; they must be equal, a "
            "multiple of 8 and at most %u",
            file_name(l), p->head_dim, value_dim, KV_HEAD_DIM_MAX);
    return 0;
}

static int read_floats(struct loader *l)
{
    struct model_params *p = &l->model->params;
    char key[128];
    if (!gguf_get_f32(l->file, arch_key(l, "attention.layer_norm_rms_epsilon", key), &p->norm_eps) ||
        !(p->norm_eps > 0.0f && p->norm_eps < 1.0f))
        return td_fail(l->err, -TD_ERR_FORMAT, "cannot load %s: %s is missing or not in (0, 1)", file_name(l),
                       key);
    p->rope_base = 10000.0f;
    gguf_get_f32(l->file, arch_key(l, "rope.freq_base", key), &p->rope_base);
    if (!(p->rope_base > 1.0f && p->rope_base < 1e12f))
        return td_fail(l->err, -TD_ERR_FORMAT, "cannot load %s: %s = %g is not in (1, 1e12)", file_name(l),
                       key, (double)p->rope_base);
    return 0;
}

static int read_rope(struct loader *l)
{
    struct model_params *p = &l->model->params;
    char key[128];
    p->rope_dim = p->head_dim;
    has_u32(l, "rope.dimension_count", &p->rope_dim);
    if (p->rope_dim == 0 || p->rope_dim % 2 != 0 || p->rope_dim > p->head_dim)
        return td_fail(l->err, -TD_ERR_FORMAT,
                       "cannot load %s: %s.rope.dimension_count = %u does not fit heads of %u", file_name(l),
                       l->arch, p->rope_dim, p->head_dim);
    p->rope_scale = 1.0f;
    struct span kind = {(const uint8_t *)"none", 4};
    bool named = gguf_get_string(l->file, arch_key(l, "rope.scaling.type", key), &kind);
    bool linear = kind.size == 6 && memcmp(kind.data, "linear", 6) == 0;
    bool none = kind.size == 4 && memcmp(kind.data, "none", 4) == 0;
    if (named && !linear && !none)
        return td_fail(
            l->err, -TD_ERR_UNSUPPORTED,
            "cannot load %s: RoPE scaling '%.*s' is not supported (linear and Llama 3 factors are)",
            file_name(l), (int)TD_MIN(kind.size, (size_t)40), (const char *)kind.data);
    if (linear) {
        gguf_get_f32(l->file, arch_key(l, "rope.scaling.factor", key), &p->rope_scale);
    } else if (!named) {
        gguf_get_f32(l->file, arch_key(l, "rope.scale_linear", key), &p->rope_scale); /* files of 2023 */
    }
    if (!(p->rope_scale > 0.0f && p->rope_scale < 1e6f))
        return td_fail(l->err, -TD_ERR_FORMAT, "cannot load %s: %s = %g is not in (0, 1e6)", file_name(l),
                       key, (double)p->rope_scale);
    return 0;
}

/* --- tensors ---------------------------------------------------------------------------------- */

enum tensor_kind { TENSOR_MATRIX, TENSOR_VECTOR /* f32 */ };

/* Fill *w from the tensor `name` of the wanted shape. required: absent is an error, else w->data stays NULL.
 */
static int take(struct loader *l, const char *name, enum tensor_kind kind, uint32_t columns, uint32_t rows,
                bool required, struct weight *w)
{
    *w = (struct weight){.type = GGUF_F32, .columns = columns, .rows = rows};
    const struct gguf_tensor *t = gguf_tensor(l->file, name);
    const struct gguf_type_info *info = t ? gguf_type_info(t->type) : NULL;
    if (t)
        l->used_count++;
    if (t && !info)
        return td_fail(
            l->err, -TD_ERR_UNSUPPORTED,
            "cannot load %s: tensor %s has type %u, which is not supported; quantise the model to one of "
            "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K",
            file_name(l), name, t->type);
    if (!t || !t->data) {
        if (required)
            return td_fail(l->err, -TD_ERR_FORMAT,
                           "cannot load %s: tensor %s is missing; the file is incomplete", file_name(l),
                           name);
        return 0;
    }
    if (t->dims[0] != columns || t->dims[1] != rows || t->dims[2] != 1 || t->dims[3] != 1)
        return td_fail(l->err, -TD_ERR_SHAPE,
                       "cannot load %s: tensor %s is [%llu, %llu], its hyper-parameters say [%u, %u]",
                       file_name(l), name, (unsigned long long)t->dims[0], (unsigned long long)t->dims[1],
                       columns, rows);
    if (kind == TENSOR_VECTOR && t->type != GGUF_F32)
        return td_fail(l->err, -TD_ERR_UNSUPPORTED, "cannot load %s: tensor %s has type %s; it must be F32",
                       file_name(l), name, info->name);
    if (columns % info->block_values != 0 ||
        t->size != (uint64_t)columns / info->block_values * info->block_size * rows)
        return td_fail(l->err, -TD_ERR_SHAPE, "cannot load %s: tensor %s is no whole number of %s blocks",
                       file_name(l), name, info->name);
    w->type = t->type;
    w->data = t->data;
    return 0;
}

static int take_layer(struct loader *l, uint32_t index, bool held)
{
    const struct model_params *p = &l->model->params;
    struct model_layer *y = &l->model->layers[index];
    uint32_t embd = p->embd_size, ffn = p->ffn_size;
    uint32_t q = p->head_count * p->head_dim, kv = p->kv_head_count * p->head_dim;
    bool bias = held && p->arch == MODEL_QWEN2, head_norms = held && p->arch == MODEL_QWEN3;
    const struct {
        const char *name;
        enum tensor_kind kind;
        uint32_t columns, rows;
        bool required;
        struct weight *w;
    } table[] = {
        {"attn_norm.weight", TENSOR_VECTOR, embd, 1, held, &y->attn_norm},
        {"attn_q.weight", TENSOR_MATRIX, embd, q, held, &y->wq},
        {"attn_k.weight", TENSOR_MATRIX, embd, kv, held, &y->wk},
        {"attn_v.weight", TENSOR_MATRIX, embd, kv, held, &y->wv},
        {"attn_output.weight", TENSOR_MATRIX, q, embd, held, &y->wo},
        {"ffn_norm.weight", TENSOR_VECTOR, embd, 1, held, &y->ffn_norm},
        {"ffn_gate.weight", TENSOR_MATRIX, embd, ffn, held, &y->w_gate},
        {"ffn_up.weight", TENSOR_MATRIX, embd, ffn, held, &y->w_up},
        {"ffn_down.weight", TENSOR_MATRIX, ffn, embd, held, &y->w_down},
        {"attn_q.bias", TENSOR_VECTOR, q, 1, bias, &y->bq},
        {"attn_k.bias", TENSOR_VECTOR, kv, 1, bias, &y->bk},
        {"attn_v.bias", TENSOR_VECTOR, kv, 1, bias, &y->bv},
        {"attn_q_norm.weight", TENSOR_VECTOR, p->head_dim, 1, head_norms, &y->q_norm},
        {"attn_k_norm.weight", TENSOR_VECTOR, p->head_dim, 1, head_norms, &y->k_norm},
    };
    for (size_t i = 0; i < TD_COUNT(table); i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s", index, table[i].name);
        int rc = take(l, name, table[i].kind, table[i].columns, table[i].rows, table[i].required, table[i].w);
        if (rc)
            return rc;
    }
    return 0;
}

/* In a slice the head may be left out: whether the model it was cut from has one is in the slice's table of
 * names. */
static bool whole_model_has(const struct loader *l, const char *name)
{
    if (gguf_tensor(l->file, name))
        return true;
    const struct gguf_value *names = gguf_find(l->file, "tandem.slice.names");
    if (!names || names->type != GGUF_VALUE_ARRAY || names->element_type != GGUF_VALUE_STRING)
        return false;
    for (uint64_t i = 0; i < names->count; i++) {
        struct span s;
        if (gguf_array_string(names, i, &s) && s.size == strlen(name) && memcmp(s.data, name, s.size) == 0)
            return true;
    }
    return false;
}

static int take_ends(struct loader *l)
{
    struct model *m = l->model;
    struct model_params *p = &m->params;
    bool whole = m->layers_held == p->layer_count;
    const struct gguf_tensor *embed = gguf_tensor(l->file, "token_embd.weight");
    if (!embed || embed->dims[1] == 0 || embed->dims[1] > VOCAB_MAX)
        return td_fail(l->err, -TD_ERR_FORMAT,
                       "cannot load %s: tensor token_embd.weight is missing or has no or too many rows",
                       file_name(l));
    p->vocab_count = (uint32_t)embed->dims[1];
    p->tied_output = !whole_model_has(l, "output.weight");
    int rc;
    if ((rc = take(l, "token_embd.weight", TENSOR_MATRIX, p->embd_size, p->vocab_count, true, &m->embed)) ||
        (rc = take(l, "output_norm.weight", TENSOR_VECTOR, p->embd_size, 1, whole, &m->output_norm)) ||
        (rc = take(l, "output.weight", TENSOR_MATRIX, p->embd_size, p->vocab_count, whole && !p->tied_output,
                   &m->output)) ||
        (rc = take(l, "rope_freqs.weight", TENSOR_VECTOR, p->rope_dim / 2, 1, false, &m->rope_factors)))
        return rc;
    if (p->tied_output && whole)
        m->output = m->embed;
    p->has_rope_factors = m->rope_factors.data != NULL;
    if (!p->has_rope_factors && whole_model_has(l, "rope_freqs.weight"))
        return td_fail(l->err, -TD_ERR_FORMAT,
                       "cannot load %s: the slice lacks rope_freqs.weight; cut it again", file_name(l));
    for (uint32_t i = 0; p->has_rope_factors && i < p->rope_dim / 2; i++) {
        float factor;
        memcpy(&factor, (const uint8_t *)m->rope_factors.data + 4 * (size_t)i, sizeof factor);
        if (!(factor > 0.0f && factor < 1e6f))
            return td_fail(l->err, -TD_ERR_FORMAT, "cannot load %s: RoPE factor %u is %g", file_name(l), i,
                           (double)factor);
    }
    return 0;
}

/* A tensor that nobody asked for would change what the model computes. */
static int refuse_unknown_tensors(const struct loader *l)
{
    if (l->used_count == gguf_tensor_count(l->file))
        return 0;
    static const char *const ends[] = {"token_embd.weight", "output_norm.weight", "output.weight",
                                       "rope_freqs.weight"};
    static const char *const parts[] = {"attn_norm.weight",   "attn_q.weight",      "attn_k.weight",
                                        "attn_v.weight",      "attn_output.weight", "ffn_norm.weight",
                                        "ffn_gate.weight",    "ffn_up.weight",      "ffn_down.weight",
                                        "attn_q.bias",        "attn_k.bias",        "attn_v.bias",
                                        "attn_q_norm.weight", "attn_k_norm.weight"};
    for (size_t i = 0; i < gguf_tensor_count(l->file); i++) {
        struct span name = gguf_tensor_at(l->file, i)->name;
        char text[96], rest[64] = "";
        unsigned layer = UINT32_MAX;
        snprintf(text, sizeof text, "%.*s", (int)TD_MIN(name.size, sizeof text - 1), (const char *)name.data);
        bool known = false;
        for (size_t k = 0; k < TD_COUNT(ends); k++)
            known |= strcmp(text, ends[k]) == 0;
        if (sscanf(text, "blk.%u.%63s", &layer, rest) == 2 && layer < l->model->params.layer_count)
            for (size_t k = 0; k < TD_COUNT(parts); k++)
                known |= strcmp(rest, parts[k]) == 0;
        if (!known)
            return td_fail(l->err, -TD_ERR_UNSUPPORTED,
                           "cannot load %s: tensor %s is not part of architecture %s as it is supported here",
                           file_name(l), text, l->arch);
    }
    return td_fail(l->err, -TD_ERR_FORMAT, "cannot load %s: it holds a tensor twice", file_name(l));
}

static int load(struct loader *l)
{
    struct model *m = l->model;
    int rc;
    if ((rc = read_arch(l)) || (rc = refuse_extras(l)) || (rc = read_sizes(l)) || (rc = read_floats(l)) ||
        (rc = read_rope(l)))
        return rc;
    m->layers_held = gguf_layers_held(l->file);
    if (m->layers_held == 0 || m->layers_held > m->params.layer_count)
        return td_fail(l->err, -TD_ERR_FORMAT, "cannot load %s: it says that it holds %u of %u layers",
                       file_name(l), m->layers_held, m->params.layer_count);
    m->layers = calloc(m->params.layer_count, sizeof *m->layers);
    if (!m->layers)
        return td_fail(l->err, -TD_ERR_NOMEM, "cannot load %s: out of memory", file_name(l));
    if ((rc = take_ends(l)))
        return rc;
    for (uint32_t i = 0; i < m->params.layer_count; i++)
        if ((rc = take_layer(l, i, i < m->layers_held)))
            return rc;
    return refuse_unknown_tensors(l);
}

int model_load(struct gguf *file, struct model **out, struct td_error *err)
{
    *out = NULL;
    struct model *m = calloc(1, sizeof *m);
    if (!m)
        return td_fail(err, -TD_ERR_NOMEM, "cannot load the model: out of memory");
    m->file = file;
    struct loader l = {.file = file, .model = m, .err = err};
    int rc = load(&l);
    if (rc) {
        model_free(m);
        return rc;
    }
    *out = m;
    return 0;
}

void model_free(struct model *m)
{
    if (!m)
        return;
    free(m->layers);
    free(m);
}

static uint64_t weight_bytes(const struct weight *w)
{
    const struct gguf_type_info *info = gguf_type_info(w->type);
    return w->data && info ? (uint64_t)w->columns / info->block_values * info->block_size * w->rows : 0;
}

uint64_t model_weight_bytes(const struct model *m, uint32_t layer_begin, uint32_t layer_end)
{
    uint64_t sum = 0;
    for (uint32_t i = layer_begin; i < TD_MIN(layer_end, m->layers_held); i++) {
        const struct model_layer *y = &m->layers[i];
        const struct weight *all[] = {&y->attn_norm, &y->wq,     &y->wk,     &y->wv,     &y->wo,
                                      &y->ffn_norm,  &y->w_gate, &y->w_up,   &y->w_down, &y->bq,
                                      &y->bk,        &y->bv,     &y->q_norm, &y->k_norm};
        for (size_t k = 0; k < TD_COUNT(all); k++)
            sum += weight_bytes(all[k]);
    }
    if (layer_end == m->params.layer_count)
        sum += weight_bytes(&m->output_norm) + weight_bytes(&m->output);
    return sum;
}

double model_rise(const struct model_params *p)
{
    double width = (double)p->head_count * p->head_dim, kv_width = (double)p->kv_head_count * p->head_dim;
    double products = p->embd_size * (2 * width + 2 * kv_width + 3.0 * p->ffn_size);
    double attention = 2 * width; /* with a position's key, and with its value */
    return products > 0 ? MODEL_ATTENTION * attention / products : 0;
}
