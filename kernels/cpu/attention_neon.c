/* attention_neon: attention of cpu-v1 with four lanes.
 *
 * A split's K is turned once into f32 [head_dim][64 positions]; then scores and weighted values are the same small product,
 * C[vectors][columns] = A[vectors][k] * B[k][columns], each element one fma chain over k: no sums across lanes, and the
 * loads of B are shared by up to VECTORS query vectors. V becomes f32 too when there are more vectors than one product
 * takes; else (decode) it is read from the page once and converted on the way. */
#if defined(__aarch64__)
#include "kernels/cpu/neon.h"
#include <math.h>

#define VECTORS 4 /* times 4 vectors of columns: 16 accumulators of 32 registers */
#define COLUMNS 16

struct split_scratch {
    float *k, *v;                     /* [head_dim][64], [64][head_dim] */
    float *p;                         /* [vectors][64] scores, then probabilities */
    float *o;                         /* [vectors][head_dim] of this split */
    float *q;                         /* [vectors][head_dim] */
    struct attention_running *before; /* [vectors] */
};

static size_t vectors_max(uint32_t group)
{
    return TD_MAX(group, (uint32_t)ATTENTION_VECTORS);
}

size_t neon_attention_scratch(uint32_t head_dim, uint32_t group)
{
    size_t vectors = vectors_max(group);
    return sizeof(float) * (2 * (size_t)KV_BLOCK_TOKENS * head_dim +
                            vectors * (KV_BLOCK_TOKENS + 2 * (size_t)head_dim) + 2 * align_up(vectors, 16));
}

static struct split_scratch split_scratch_at(void *memory, uint32_t head_dim, uint32_t group)
{
    size_t vectors = vectors_max(group);
    struct split_scratch s;
    s.k = memory;
    s.v = s.k + (size_t)KV_BLOCK_TOKENS * head_dim;
    s.p = s.v + (size_t)KV_BLOCK_TOKENS * head_dim;
    s.o = s.p + vectors * KV_BLOCK_TOKENS;
    s.q = s.o + vectors * head_dim;
    s.before = (void *)(s.q + vectors * head_dim);
    return s;
}

static bool keeps_v(const struct attention_job *job)
{
    return job->vector_count > VECTORS;
}

/* Four positions by four values of K, turned: out + i * KV_BLOCK_TOKENS is value i of the four positions. */
NEON_INLINE void turn4(const uint16_t *k, uint32_t head_dim, float *out)
{
    float32x4_t r0 = neon_load_f16(k), r1 = neon_load_f16(k + head_dim),
                r2 = neon_load_f16(k + 2 * (size_t)head_dim), r3 = neon_load_f16(k + 3 * (size_t)head_dim);
    float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(r0, r1)), b = vreinterpretq_f64_f32(vtrn2q_f32(r0, r1)),
                c = vreinterpretq_f64_f32(vtrn1q_f32(r2, r3)), d = vreinterpretq_f64_f32(vtrn2q_f32(r2, r3));
    vst1q_f32(out, vreinterpretq_f32_f64(vtrn1q_f64(a, c)));
    vst1q_f32(out + KV_BLOCK_TOKENS, vreinterpretq_f32_f64(vtrn1q_f64(b, d)));
    vst1q_f32(out + 2 * KV_BLOCK_TOKENS, vreinterpretq_f32_f64(vtrn2q_f64(a, c)));
    vst1q_f32(out + 3 * KV_BLOCK_TOKENS, vreinterpretq_f32_f64(vtrn2q_f64(b, d)));
}

/* `count` positions, rounded up to four: what lies behind them in the page is read and then ignored. */
static void open_split(const struct attention_job *job, const uint16_t *k, uint32_t count,
                       const struct split_scratch *s)
{
    for (uint32_t t = 0; t < count; t += 4)
        for (uint32_t i = 0; i < job->head_dim; i += 4)
            turn4(k + (size_t)t * job->head_dim + i, job->head_dim, s->k + (size_t)i * KV_BLOCK_TOKENS + t);
    const uint16_t *v = k + job->v_offset;
    for (size_t i = 0; keeps_v(job) && i < (size_t)count * job->head_dim; i += 4)
        vst1q_f32(s->v + i, neon_load_f16(v + i));
}

/* C[rows][4 * vectors] = A[rows][depth] * B[depth][...]; B is f32, or f16 when `half`. Strides in values. */
NEON_INLINE void product_strip(const bool half, const unsigned rows, const unsigned vectors, const float *a,
                               size_t a_stride, const void *b, size_t b_stride, uint32_t depth, float *c,
                               size_t c_stride)
{
    float32x4_t acc[VECTORS * 4];
#pragma GCC unroll 16
    for (unsigned i = 0; i < rows * vectors; i++)
        acc[i] = vdupq_n_f32(0);
    for (uint32_t k = 0; k < depth; k++) {
        float32x4_t x[4];
#pragma GCC unroll 4
        for (unsigned j = 0; j < vectors; j++)
            x[j] = half ? neon_load_f16((const uint16_t *)b + k * b_stride + (size_t)4 * j)
                        : vld1q_f32((const float *)b + k * b_stride + (size_t)4 * j);
#pragma GCC unroll 4
        for (unsigned r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (unsigned j = 0; j < vectors; j++)
                acc[r * vectors + j] = vfmaq_n_f32(acc[r * vectors + j], x[j], a[r * a_stride + k]);
    }
#pragma GCC unroll 4
    for (unsigned r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (unsigned j = 0; j < vectors; j++)
            vst1q_f32(c + r * c_stride + (size_t)4 * j, acc[r * vectors + j]);
}

NEON_INLINE void product_rows(const bool half, const unsigned rows, const float *a, size_t a_stride,
                              const void *b, size_t b_stride, uint32_t depth, uint32_t columns, float *c,
                              size_t c_stride)
{
    const size_t value_size = half ? sizeof(uint16_t) : sizeof(float);
    const uint8_t *at = b;
    uint32_t column = 0;
    for (; column + COLUMNS <= columns; column += COLUMNS)
        product_strip(half, rows, 4, a, a_stride, at + column * value_size, b_stride, depth, c + column,
                      c_stride);
    for (; column < columns; column += 4)
        product_strip(half, rows, 1, a, a_stride, at + column * value_size, b_stride, depth, c + column,
                      c_stride);
}

/* columns a multiple of four, rows at most VECTORS. */
NEON_INLINE void product(const bool half, uint32_t rows, const float *a, size_t a_stride, const void *b,
                         size_t b_stride, uint32_t depth, uint32_t columns, float *c, size_t c_stride)
{
    if (rows == 4)
        product_rows(half, 4, a, a_stride, b, b_stride, depth, columns, c, c_stride);
    else if (rows == 3)
        product_rows(half, 3, a, a_stride, b, b_stride, depth, columns, c, c_stride);
    else if (rows == 2)
        product_rows(half, 2, a, a_stride, b, b_stride, depth, columns, c, c_stride);
    else
        product_rows(half, 1, a, a_stride, b, b_stride, depth, columns, c, c_stride);
}

static void product_f32(uint32_t rows, const float *a, size_t a_stride, const float *b, size_t b_stride,
                        uint32_t depth, uint32_t columns, float *c, size_t c_stride)
{
    product(false, rows, a, a_stride, b, b_stride, depth, columns, c, c_stride);
}

static void product_f16(uint32_t rows, const float *a, size_t a_stride, const uint16_t *b, size_t b_stride,
                        uint32_t depth, uint32_t columns, float *c, size_t c_stride)
{
    product(true, rows, a, a_stride, b, b_stride, depth, columns, c, c_stride);
}

/* Scores of `count` positions to probabilities, zero behind them. Returns their sum. */
static float split_softmax(float *p, uint32_t count, float *max_out)
{
    const float32x4_t masked = vdupq_n_f32(-INFINITY);
    static const uint32_t first4[4] = {0, 1, 2, 3};
    float32x4_t max4 = masked, lanes[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    for (uint32_t i = 0; i < KV_BLOCK_TOKENS; i += 4) {
        uint32x4_t valid = vcltq_u32(vaddq_u32(vld1q_u32(first4), vdupq_n_u32(i)), vdupq_n_u32(count));
        float32x4_t score = vbslq_f32(valid, vld1q_f32(p + i), masked);
        vst1q_f32(p + i, score);
        max4 = vmaxq_f32(max4, score);
    }
    const float max = vmaxvq_f32(max4);
    for (uint32_t i = 0; i < KV_BLOCK_TOKENS; i += NUMERICS_LANES)
        for (unsigned j = 0; j < 4; j++) {
            float *at = p + i + 4 * (size_t)j;
            float32x4_t e = neon_exp(vsubq_f32(vld1q_f32(at), vdupq_n_f32(max))); /* exp(-infinity) = 0 */
            vst1q_f32(at, e);
            lanes[j] = vaddq_f32(lanes[j], e);
        }
    *max_out = max;
    return neon_fold(lanes);
}

/* Positions of the split starting at `first` that vector i sees. */
static uint32_t seen_count(const struct attention_job *job, uint32_t vector, uint32_t first)
{
    uint32_t position = job->positions[vector / job->group];
    return position < first ? 0 : TD_MIN(position + 1 - first, (uint32_t)KV_BLOCK_TOKENS);
}

static float *out_vector(const struct attention_job *job, uint32_t vector)
{
    return job->out + vector / job->group * job->out_stride + (size_t)(vector % job->group) * job->head_dim;
}

static void combine(const struct attention_job *job, uint32_t vector, bool is_first, float max, float sum,
                    const float *o, struct attention_running *before)
{
    float *out = out_vector(job, vector);
    if (is_first) {
        memcpy(out, o, sizeof(float) * job->head_dim);
        *before = (struct attention_running){max, sum};
        return;
    }
    const float new_max = before->max > max ? before->max : max;
    const float a = numerics_exp(before->max - new_max), b = numerics_exp(max - new_max);
    before->sum = __builtin_fmaf(before->sum, a, sum * b);
    before->max = new_max;
    for (uint32_t i = 0; i < job->head_dim; i += 4)
        vst1q_f32(out + i, vfmaq_n_f32(vmulq_n_f32(vld1q_f32(o + i), b), vld1q_f32(out + i), a));
}

static void finish(const struct attention_job *job, uint32_t vector, uint32_t split, float max, float sum,
                   const float *o, const struct split_scratch *s)
{
    if (job->partial)
        attention_keep(job, split, vector, max, sum, o);
    else
        combine(job, vector, split == 0, max, sum, o, &s->before[vector]);
}

/* Vectors [begin, begin + rows), which all see `count` positions of the split whose K is at k. */
static void run_vectors(const struct attention_job *job, uint32_t begin, uint32_t rows, uint32_t first,
                        uint32_t count, const uint16_t *k, const struct split_scratch *s)
{
    const uint32_t dim = job->head_dim;
    float *p = s->p + (size_t)begin * KV_BLOCK_TOKENS, *o = s->o + (size_t)begin * dim;
    float max[VECTORS], sum[VECTORS];
    product_f32(rows, s->q + (size_t)begin * dim, dim, s->k, KV_BLOCK_TOKENS, dim,
                (uint32_t)align_up(count, 4), p, KV_BLOCK_TOKENS);
    for (uint32_t r = 0; r < rows; r++)
        sum[r] = split_softmax(p + (size_t)r * KV_BLOCK_TOKENS, count, &max[r]);
    if (keeps_v(job))
        product_f32(rows, p, KV_BLOCK_TOKENS, s->v, dim, count, dim, o, dim);
    else
        product_f16(rows, p, KV_BLOCK_TOKENS, k + job->v_offset, dim, count, dim, o, dim);
    for (uint32_t r = 0; r < rows; r++)
        finish(job, begin + r, first / KV_BLOCK_TOKENS, max[r], sum[r], o + (size_t)r * dim, s);
}

static void run_split(const struct attention_job *job, uint32_t first, const struct split_scratch *s)
{
    const uint16_t *k = job->kv + job->pages[first / KV_BLOCK_TOKENS] * job->page_stride;
    open_split(job, k, seen_count(job, job->vector_count - 1, first), s);
    for (uint32_t i = 0; i < job->vector_count;) {
        uint32_t count = seen_count(job, i, first), rows = 1;
        while (rows < VECTORS && i + rows < job->vector_count && seen_count(job, i + rows, first) == count)
            rows++;
        if (count > 0)
            run_vectors(job, i, rows, first, count, k, s);
        i += rows;
    }
}

static void scale_vector(float *x, float factor, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        x[i] = x[i] * factor;
}

void neon_attention(const struct attention_job *job, void *scratch)
{
    struct split_scratch s = split_scratch_at(scratch, job->head_dim, job->group);
    for (uint32_t i = 0; i < job->vector_count; i++)
        memcpy(s.q + (size_t)i * job->head_dim,
               job->q + i / job->group * job->q_stride + (size_t)(i % job->group) * job->head_dim,
               sizeof(float) * job->head_dim);
    const uint32_t splits = attention_splits(job), begin = job->partial ? job->split_begin : 0,
                   end = job->partial ? TD_MIN(job->split_end, splits) : splits;
    for (uint32_t split = begin; split < end; split++)
        run_split(job, split * KV_BLOCK_TOKENS, &s);
    for (uint32_t i = 0; i < job->vector_count && !job->partial; i++)
        scale_vector(out_vector(job, i), 1.0f / s.before[i].sum, job->head_dim);
}

void neon_attention_reduce(const struct attention_job *job)
{
    const uint32_t splits = attention_splits(job);
    for (uint32_t i = 0; i < job->vector_count; i++) {
        struct attention_running before = {0}, state;
        for (uint32_t split = 0; split < splits; split++) {
            const float *o = attention_kept(job, split, i, &state);
            combine(job, i, split == 0, state.max, state.sum, o, &before);
        }
        scale_vector(out_vector(job, i), 1.0f / before.sum, job->head_dim);
    }
}
#endif
