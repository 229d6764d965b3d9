/* attention_avx2: attention of cpu-v1 with eight lanes.
 *
 * A split's K is turned once into f32 [head_dim][64 positions] and its V into f32 [64 positions][head_dim]; then scores
 * and weighted values are the same small product, C[vectors][columns] = A[vectors][k] * B[k][columns], each element
 * one fma chain over k: no sums across lanes, and the loads of B are shared by VECTORS query vectors. When a job has only a few
 * vectors (decode), the same chains read K and V straight from the page. */
#if defined(__x86_64__)
#include "kernels/cpu/avx2.h"
#include <math.h>

#define VECTORS        3
#define DIRECT_VECTORS 4
struct split_scratch {
    float *k, *v;                     /* [head_dim][64], [64][head_dim] */
    float *p;                         /* [vectors][64] scores, then probabilities */
    float *o;                         /* [vectors][head_dim] of this split */
    float *q;                         /* [vectors][head_dim] */
    struct attention_running *before; /* [vectors] */
};

AVX2_INLINE __m256 load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

static size_t vectors_max(uint32_t group)
{
    return TD_MAX(group, (uint32_t)ATTENTION_VECTORS);
}

size_t avx2_attention_scratch(uint32_t head_dim, uint32_t group)
{
    size_t vectors = vectors_max(group);
    return sizeof(float) * (2 * (size_t)KV_BLOCK_TOKENS * head_dim +
                            vectors * (KV_BLOCK_TOKENS + 2 * head_dim) + 2 * align_up(vectors, 16));
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

/* Eight positions by eight values of K: r[i] becomes value i of the eight positions. */
AVX2_INLINE void load_transposed(const uint16_t *k, uint32_t head_dim, __m256 r[8])
{
    __m256 s[8];
#pragma GCC unroll 8
    for (unsigned i = 0; i < 8; i++)
        r[i] = load_f16(k + (size_t)i * head_dim);
#pragma GCC unroll 8
    for (unsigned i = 0; i < 4; i++) {
        s[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        s[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    __m256 t[8];
#pragma GCC unroll 8
    for (unsigned half = 0; half < 8; half += 4) {
        t[half + 0] = _mm256_shuffle_ps(s[half + 0], s[half + 2], 0x44);
        t[half + 1] = _mm256_shuffle_ps(s[half + 0], s[half + 2], 0xee);
        t[half + 2] = _mm256_shuffle_ps(s[half + 1], s[half + 3], 0x44);
        t[half + 3] = _mm256_shuffle_ps(s[half + 1], s[half + 3], 0xee);
    }
#pragma GCC unroll 8
    for (unsigned i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(t[i], t[4 + i], 0x20);
        r[4 + i] = _mm256_permute2f128_ps(t[i], t[4 + i], 0x31);
    }
}

/* `count` positions, rounded up to eight: what lies behind them in the page is read and then ignored. */
AVX2 static void open_split(const struct attention_job *job, const uint16_t *k, uint32_t count,
                            const struct split_scratch *s)
{
    for (uint32_t t = 0; t < count; t += 8)
        for (uint32_t i = 0; i < job->head_dim; i += 8) {
            __m256 r[8];
            load_transposed(k + (size_t)t * job->head_dim + i, job->head_dim, r);
#pragma GCC unroll 8
            for (unsigned j = 0; j < 8; j++)
                _mm256_storeu_ps(s->k + (size_t)(i + j) * KV_BLOCK_TOKENS + t, r[j]);
        }
    const uint16_t *v = k + job->v_offset;
    for (size_t i = 0; i < (size_t)count * job->head_dim; i += 8)
        _mm256_storeu_ps(s->v + i, load_f16(v + i));
}

/* C[rows][8 * vectors] = A[rows][depth] * B[depth][...]; B is f32, or f16 when `half`. Strides in values. */
AVX2_INLINE void product_strip(const bool half, const unsigned rows, const unsigned vectors, const float *a,
                               size_t a_stride, const void *b, size_t b_stride, uint32_t depth, float *c,
                               size_t c_stride)
{
    __m256 acc[12];
#pragma GCC unroll 8
    for (unsigned i = 0; i < rows * vectors; i++)
        acc[i] = _mm256_setzero_ps();
    for (uint32_t k = 0; k < depth; k++) {
        __m256 x[4];
#pragma GCC unroll 8
        for (unsigned j = 0; j < vectors; j++)
            x[j] = half ? load_f16((const uint16_t *)b + k * b_stride + 8 * j)
                        : _mm256_loadu_ps((const float *)b + k * b_stride + 8 * j);
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++) {
            __m256 y = _mm256_broadcast_ss(a + r * a_stride + k);
#pragma GCC unroll 8
            for (unsigned j = 0; j < vectors; j++)
                acc[r * vectors + j] = _mm256_fmadd_ps(y, x[j], acc[r * vectors + j]);
        }
    }
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (unsigned j = 0; j < vectors; j++)
            _mm256_storeu_ps(c + r * c_stride + 8 * j, acc[r * vectors + j]);
}

AVX2_INLINE void product_rows(const bool half, const unsigned rows, const float *a, size_t a_stride,
                              const void *b, size_t b_stride, uint32_t depth, uint32_t columns, float *c,
                              size_t c_stride)
{
    const unsigned vectors = rows > 3 ? 2 : 4; /* 16 registers */
    const size_t value_size = half ? sizeof(uint16_t) : sizeof(float);
    const uint8_t *at = b;
    uint32_t column = 0;
    for (; column + 8 * vectors <= columns; column += 8 * vectors, at += 8 * vectors * value_size)
        product_strip(half, rows, vectors, a, a_stride, at, b_stride, depth, c + column, c_stride);
    for (; column < columns; column += 8, at += 8 * value_size)
        product_strip(half, rows, 1, a, a_stride, at, b_stride, depth, c + column, c_stride);
}

/* columns a multiple of eight. */
AVX2 static void product_f32(uint32_t rows, const float *a, size_t a_stride, const float *b, size_t b_stride,
                             uint32_t depth, uint32_t columns, float *c, size_t c_stride)
{
    if (rows == 3)
        product_rows(false, 3, a, a_stride, b, b_stride, depth, columns, c, c_stride);
    else if (rows == 2)
        product_rows(false, 2, a, a_stride, b, b_stride, depth, columns, c, c_stride);
    else
        product_rows(false, 1, a, a_stride, b, b_stride, depth, columns, c, c_stride);
}

AVX2 static void values_direct(uint32_t rows, const float *p, const uint16_t *v, uint32_t count,
                               uint32_t head_dim, float *o)
{
    if (rows == 4)
        product_rows(true, 4, p, KV_BLOCK_TOKENS, v, head_dim, count, head_dim, o, head_dim);
    else if (rows == 3)
        product_rows(true, 3, p, KV_BLOCK_TOKENS, v, head_dim, count, head_dim, o, head_dim);
    else if (rows == 2)
        product_rows(true, 2, p, KV_BLOCK_TOKENS, v, head_dim, count, head_dim, o, head_dim);
    else
        product_rows(true, 1, p, KV_BLOCK_TOKENS, v, head_dim, count, head_dim, o, head_dim);
}

/* Scores straight from the page: K is turned in registers. */
AVX2_INLINE void scores_rows(const unsigned rows, const float *q, const uint16_t *k, uint32_t count,
                             uint32_t head_dim, float *p)
{
    for (uint32_t t = 0; t < count; t += 8) {
        __m256 acc[DIRECT_VECTORS];
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++)
            acc[r] = _mm256_setzero_ps();
        for (uint32_t i = 0; i < head_dim; i += 8) {
            __m256 x[8];
            load_transposed(k + (size_t)t * head_dim + i, head_dim, x);
#pragma GCC unroll 8
            for (unsigned r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (unsigned j = 0; j < 8; j++)
                    acc[r] =
                        _mm256_fmadd_ps(_mm256_broadcast_ss(q + r * (size_t)head_dim + i + j), x[j], acc[r]);
        }
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++)
            _mm256_storeu_ps(p + r * KV_BLOCK_TOKENS + t, acc[r]);
    }
}

AVX2 static void scores_direct(uint32_t rows, const float *q, const uint16_t *k, uint32_t count,
                               uint32_t head_dim, float *p)
{
    if (rows == 4)
        scores_rows(4, q, k, count, head_dim, p);
    else if (rows == 3)
        scores_rows(3, q, k, count, head_dim, p);
    else if (rows == 2)
        scores_rows(2, q, k, count, head_dim, p);
    else
        scores_rows(1, q, k, count, head_dim, p);
}

/* Scores of `count` positions to probabilities, zero behind them. Returns their sum. */
AVX2 static float split_softmax(float *p, uint32_t count, float *max_out)
{
    const __m256 masked = _mm256_set1_ps(-INFINITY);
    __m256 scores[8], max8 = masked;
#pragma GCC unroll 8
    for (unsigned i = 0; i < 8; i++) {
        __m256i index =
            _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32((int)(8 * i)));
        __m256 valid = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), index));
        scores[i] = _mm256_blendv_ps(masked, _mm256_loadu_ps(p + 8 * i), valid);
        max8 = _mm256_max_ps(max8, scores[i]);
    }
    __m128 max4 = _mm_max_ps(_mm256_castps256_ps128(max8), _mm256_extractf128_ps(max8, 1));
    max4 = _mm_max_ps(max4, _mm_movehl_ps(max4, max4));
    const float max = _mm_cvtss_f32(_mm_max_ss(max4, _mm_movehdup_ps(max4)));
    __m256 low = _mm256_setzero_ps(), high = low;
#pragma GCC unroll 8
    for (unsigned i = 0; i < 8; i++) {
        __m256 e = avx2_exp(_mm256_sub_ps(scores[i], _mm256_set1_ps(max))); /* exp(-infinity) = 0 */
        _mm256_storeu_ps(p + 8 * i, e);
        if (i % 2 == 0)
            low = _mm256_add_ps(low, e);
        else
            high = _mm256_add_ps(high, e);
    }
    *max_out = max;
    return avx2_fold(low, high);
}

/* So few vectors that converting a split first would cost more than it saves: decode. */
static bool is_direct(const struct attention_job *job)
{
    return job->vector_count <= DIRECT_VECTORS;
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

AVX2 static void combine(const struct attention_job *job, uint32_t vector, bool is_first, float max,
                         float sum, const float *o, struct attention_running *before)
{
    float *out = out_vector(job, vector);
    if (is_first) {
        memcpy(out, o, sizeof(float) * job->head_dim);
        *before = (struct attention_running){max, sum};
        return;
    }
    float new_max = before->max > max ? before->max : max;
    __m256 a = avx2_exp(_mm256_set1_ps(before->max - new_max)), b = avx2_exp(_mm256_set1_ps(max - new_max));
    before->sum = _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(before->sum), _mm256_castps256_ps128(a),
                                             _mm_mul_ss(_mm_set_ss(sum), _mm256_castps256_ps128(b))));
    before->max = new_max;
    for (uint32_t i = 0; i < job->head_dim; i += 8)
        _mm256_storeu_ps(
            out + i, _mm256_fmadd_ps(_mm256_loadu_ps(out + i), a, _mm256_mul_ps(_mm256_loadu_ps(o + i), b)));
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
    uint32_t dim = job->head_dim;
    const float *q = s->q + (size_t)begin * dim;
    float *p = s->p + (size_t)begin * KV_BLOCK_TOKENS, *o = s->o + (size_t)begin * dim;
    float max[DIRECT_VECTORS], sum[DIRECT_VECTORS];
    if (is_direct(job))
        scores_direct(rows, q, k, count, dim, p);
    else
        product_f32(rows, q, dim, s->k, KV_BLOCK_TOKENS, dim, (uint32_t)align_up(count, 8), p,
                    KV_BLOCK_TOKENS);
    for (uint32_t r = 0; r < rows; r++)
        sum[r] = split_softmax(p + (size_t)r * KV_BLOCK_TOKENS, count, &max[r]);
    if (is_direct(job))
        values_direct(rows, p, k + job->v_offset, count, dim, o);
    else
        product_f32(rows, p, KV_BLOCK_TOKENS, s->v, dim, count, dim, o, dim);
    for (uint32_t r = 0; r < rows; r++)
        finish(job, begin + r, first / KV_BLOCK_TOKENS, max[r], sum[r], o + (size_t)r * dim, s);
}

static void run_split(const struct attention_job *job, uint32_t first, const struct split_scratch *s)
{
    const uint16_t *k = job->kv + job->pages[first / KV_BLOCK_TOKENS] * job->page_stride;
    const uint32_t most = is_direct(job) ? DIRECT_VECTORS : VECTORS;
    if (!is_direct(job))
        open_split(job, k, seen_count(job, job->vector_count - 1, first), s);
    for (uint32_t i = 0; i < job->vector_count;) {
        uint32_t count = seen_count(job, i, first), rows = 1;
        while (rows < most && i + rows < job->vector_count && seen_count(job, i + rows, first) == count)
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

void avx2_attention(const struct attention_job *job, void *scratch)
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

void avx2_attention_reduce(const struct attention_job *job)
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
