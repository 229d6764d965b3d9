/* ops_portable: cpu-v1 in plain C: the definition that other instruction sets are compared with, and what
 * runs where there is none of them. Weights are read as they lie in the file. */
#include "kernels/cpu/ops.h"
#include <math.h>

static size_t no_pack_size(const struct cpu_matrix *m)
{
    (void)m;
    return 0;
}

static void no_pack(const struct cpu_matrix *m, uint32_t tile_begin, uint32_t tile_end)
{
    (void)m, (void)tile_begin, (void)tile_end;
}

/* --- products --------------------------------------------------------------------------------- */

static int32_t dot16(const int8_t *a, const int8_t *b)
{
    int32_t sum = 0;
    for (unsigned i = 0; i < 16; i++)
        sum += a[i] * b[i];
    return sum;
}

/* One output of quantised weights for all rows. */
static void output_quantised(const struct cpu_matrix *m, uint32_t output, const struct activations *a,
                             uint32_t first_row, uint32_t row_count, float *const *out)
{
    const uint8_t *weights = (const uint8_t *)m->source + weight_row_size(m->type, m->columns) * output;
    int offset = weight_code_offset(m->type);
    bool has_minimum = weight_has_minimum(m->type), halves = m->type == GGUF_Q6_K;
    for (uint32_t r = 0; r < row_count; r++)
        out[r][output] = 0.0f;
    for (size_t block = 0; block < m->columns / NUMERICS_BLOCK; block++) {
        struct weight_block w;
        weight_block_read(m->type, weights, block, &w);
        float dw = weight_block_d(m->type, &w), mw = weight_block_m(m->type, &w);
        for (unsigned i = 0; i < NUMERICS_BLOCK; i++)
            w.code[i] = (int8_t)(w.code[i] - offset);
        int32_t scale0 = halves ? w.scale[0] : 1, scale1 = halves ? w.scale[1] : 1;
        for (uint32_t r = 0; r < row_count; r++) {
            const int8_t *q = a->q + (first_row + r) * a->q_stride + block * NUMERICS_BLOCK;
            size_t at = (first_row + r) * a->block_stride + block;
            int32_t isum = scale0 * dot16(w.code, q) + scale1 * dot16(w.code + 16, q + 16);
            float acc = fmaf((float)isum, dw * a->d[at], out[r][output]);
            out[r][output] = has_minimum ? fmaf(mw, a->s[at], acc) : acc;
        }
    }
}

static void output_float(const struct cpu_matrix *m, uint32_t output, const struct activations *a,
                         uint32_t first_row, uint32_t row_count, float *const *out)
{
    const uint8_t *weights = (const uint8_t *)m->source + weight_row_size(m->type, m->columns) * output;
    for (uint32_t panel = 0; panel < m->columns; panel += NUMERICS_PANEL) {
        float w[NUMERICS_PANEL];
        uint32_t count = TD_MIN(m->columns - panel, (uint32_t)NUMERICS_PANEL);
        weight_row_to_f32(m->type, weights, panel, count, w);
        for (uint32_t r = 0; r < row_count; r++) {
            const float *x = a->x + (first_row + r) * a->x_stride + panel;
            float acc = 0.0f;
            for (uint32_t i = 0; i < count; i++)
                acc = fmaf(w[i], x[i], acc);
            out[r][output] = (panel == 0 ? 0.0f : out[r][output]) + acc;
        }
    }
}

static void matmul(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                   uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end)
{
    bool quantised = weight_is_quantised(m->type);
    for (uint32_t output = tile_begin * TILE_ROWS; output < TD_MIN(tile_end * TILE_ROWS, m->rows); output++)
        (quantised ? output_quantised : output_float)(m, output, a, first_row, row_count, out);
}

/* --- rows ------------------------------------------------------------------------------------- */

static void quantise_block(const float *x, int8_t *q, float *d, float *s, int32_t *sum)
{
    uint32_t largest = 0; /* as bits: for magnitudes the same order, and a NaN is above infinity */
    for (unsigned i = 0; i < NUMERICS_BLOCK; i++)
        largest = TD_MAX(largest, float_bits(x[i]) & 0x7fffffffu);
    float amax = float_from_bits(largest);
    if (!(amax >= QUANT_ZERO_BELOW && largest < 0x7f800000u)) {
        memset(q, 0, NUMERICS_BLOCK);
        *d = *s = largest < 0x7f800000u ? 0.0f : float_from_bits(0x7fc00000u); /* not finite stays visible */
        *sum = 0;
        return;
    }
    float inverse = 127.0f / amax;
    *sum = 0;
    for (unsigned i = 0; i < NUMERICS_BLOCK; i++) {
        float rounded = (x[i] * inverse + EXP_MAGIC) - EXP_MAGIC; /* to the nearest integer, ties to even */
        q[i] = (int8_t)rounded;
        *sum += q[i];
    }
    *d = amax / 127.0f;
    *s = *d * (float)*sum;
}

static void quantise(const struct activations *a, uint32_t row, uint32_t columns)
{
    for (size_t block = 0; block < columns / NUMERICS_BLOCK; block++) {
        size_t at = row * a->block_stride + block;
        quantise_block(a->x + row * a->x_stride + block * NUMERICS_BLOCK,
                       a->q + row * a->q_stride + block * NUMERICS_BLOCK, a->d + at, a->s + at, a->sum + at);
    }
}

static void norm(const float *x, const float *weight, float eps, uint32_t count, float *out)
{
    float lanes[NUMERICS_LANES] = {0};
    for (uint32_t i = 0; i < count; i++)
        lanes[i % NUMERICS_LANES] = fmaf(x[i], x[i], lanes[i % NUMERICS_LANES]);
    float scale = 1.0f / sqrtf(numerics_fold(lanes) / (float)count + eps);
    for (uint32_t i = 0; i < count; i++)
        out[i] = x[i] * scale * weight[i];
}

static void swiglu(const float *gate, const float *up, uint32_t count, float *out)
{
    for (uint32_t i = 0; i < count; i++)
        out[i] = gate[i] / (1.0f + numerics_exp(-gate[i])) * up[i];
}

static void exp_scaled(const float *x, float shift, float scale, size_t count, float *out)
{
    for (size_t i = 0; i < count; i++)
        out[i] = numerics_exp((x[i] - shift) * scale);
}

/* --- attention -------------------------------------------------------------------------------- */

/* Scratch: one split's weighted values, and the split's K and V as f32. */
static size_t attention_scratch(uint32_t head_dim, uint32_t group)
{
    (void)group;
    return sizeof(float) * head_dim * (1 + 2 * KV_BLOCK_TOKENS);
}

/* Probabilities (not yet divided) of `count` positions of a split; the others stay 0. Returns their sum. */
static float split_probabilities(const float *q, const float *k, uint32_t head_dim, uint32_t count,
                                 float p[KV_BLOCK_TOKENS], float *max_out)
{
    float max = -INFINITY, lanes[NUMERICS_LANES] = {0};
    for (uint32_t t = 0; t < count; t++) {
        float score = 0.0f;
        for (uint32_t i = 0; i < head_dim; i++)
            score = fmaf(q[i], k[t * head_dim + i], score);
        p[t] = score;
        max = max > score ? max : score;
    }
    for (uint32_t t = 0; t < count; t++) {
        p[t] = numerics_exp(p[t] - max);
        lanes[t % NUMERICS_LANES] += p[t];
    }
    *max_out = max;
    return numerics_fold(lanes);
}

static void split_values(const float *p, const float *v, uint32_t head_dim, uint32_t count, float *o)
{
    memset(o, 0, sizeof(float) * head_dim);
    for (uint32_t t = 0; t < count; t++)
        for (uint32_t i = 0; i < head_dim; i++)
            o[i] = fmaf(p[t], v[t * head_dim + i], o[i]);
}

static void combine(struct attention_running *before, bool is_first, float max, float sum, const float *o,
                    uint32_t dim, float *out)
{
    if (is_first) {
        *before = (struct attention_running){max, sum};
        memcpy(out, o, sizeof(float) * dim);
        return;
    }
    float new_max = before->max > max ? before->max : max;
    float a = numerics_exp(before->max - new_max), b = numerics_exp(max - new_max);
    *before = (struct attention_running){new_max, fmaf(before->sum, a, sum * b)};
    for (uint32_t i = 0; i < dim; i++)
        out[i] = fmaf(out[i], a, o[i] * b);
}

static void divide(float *out, float sum, uint32_t dim)
{
    float inverse = 1.0f / sum;
    for (uint32_t i = 0; i < dim; i++)
        out[i] = out[i] * inverse;
}

static void attention_vector(const struct attention_job *job, uint32_t vector, const float *q,
                             uint32_t position, float *out, float *scratch)
{
    uint32_t dim = job->head_dim, splits = position / KV_BLOCK_TOKENS + 1;
    float *o = scratch, *k = o + dim, *v = k + KV_BLOCK_TOKENS * dim;
    struct attention_running before = {0};
    uint32_t begin = job->partial ? job->split_begin : 0,
             end = job->partial ? TD_MIN(job->split_end, splits) : splits;
    for (uint32_t split = begin; split < end; split++) {
        const uint16_t *keys = job->kv + job->pages[split] * job->page_stride;
        uint32_t count = TD_MIN(position + 1 - split * KV_BLOCK_TOKENS, (uint32_t)KV_BLOCK_TOKENS);
        float p[KV_BLOCK_TOKENS], max;
        f16_to_f32_row(keys, k, (size_t)count * dim);
        f16_to_f32_row(keys + job->v_offset, v, (size_t)count * dim);
        float sum = split_probabilities(q, k, dim, count, p, &max);
        if (job->partial) {
            float *to = attention_partial(job, split, vector);
            split_values(p, v, dim, count, to);
            attention_keep(job, split, vector, max, sum, to);
            continue;
        }
        split_values(p, v, dim, count, o);
        combine(&before, split == 0, max, sum, o, dim, out);
    }
    if (!job->partial)
        divide(out, before.sum, dim);
}

static void attention(const struct attention_job *job, void *scratch)
{
    for (uint32_t i = 0; i < job->vector_count; i++) {
        size_t row = i / job->group, head = (size_t)(i % job->group) * job->head_dim;
        attention_vector(job, i, job->q + row * job->q_stride + head, job->positions[row],
                         job->out + row * job->out_stride + head, scratch);
    }
}

static void attention_reduce(const struct attention_job *job)
{
    uint32_t dim = job->head_dim, splits = attention_splits(job);
    for (uint32_t i = 0; i < job->vector_count; i++) {
        float *out = job->out + (size_t)i * dim;
        struct attention_running before = {0};
        for (uint32_t split = 0; split < splits; split++) {
            struct attention_running state;
            const float *o = attention_kept(job, split, i, &state);
            combine(&before, split == 0, state.max, state.sum, o, dim, out);
        }
        divide(out, before.sum, dim);
    }
}

const struct cpu_ops cpu_ops_portable = {
    .name = "portable",
    .tile_rows = TILE_ROWS,
    .pack_size = no_pack_size,
    .pack = no_pack,
    .matmul = matmul,
    .quantise = quantise,
    .norm = norm,
    .swiglu = swiglu,
    .exp_scaled = exp_scaled,
    .attention_scratch = attention_scratch,
    .attention = attention,
    .attention_reduce = attention_reduce,
};
