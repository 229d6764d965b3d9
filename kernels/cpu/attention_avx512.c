/* attention_avx512: attention of cpu-v1 with 16 lanes.
 *
 * As in attention_avx2.c: a split's K is turned once into f32 [head_dim][64 positions] and its V into f32
 * [64][head_dim], then scores and weighted values are the same small product in which each element is one fma chain,
 * VECTORS query vectors to a load. A job with a few vectors only (decode) reads the page itself. Widths are rounded up
 * to 16 in scratch; a page is read under masks, since head_dim is a multiple of 8 alone. */
#if defined(__x86_64__)
#include "kernels/cpu/avx512.h"
#include <math.h>

#define VECTORS        6
#define DIRECT_VECTORS 4

struct split_scratch {
    size_t width;                     /* head_dim rounded up to 16 */
    float *k, *v;                     /* [width][64], [64][width] */
    float *p;                         /* [VECTORS][64] scores, then probabilities */
    float *o;                         /* [VECTORS][width] of this split */
    float *q;                         /* [vectors][width] */
    struct attention_running *before; /* [vectors] */
};

static size_t vectors_max(uint32_t group)
{
    return TD_MAX(group, (uint32_t)ATTENTION_VECTORS);
}

size_t avx512_attention_scratch(uint32_t head_dim, uint32_t group)
{
    size_t vectors = vectors_max(group), width = align_up(head_dim, 16);
    return sizeof(float) * (2 * KV_BLOCK_TOKENS * width + VECTORS * (KV_BLOCK_TOKENS + width) +
                            vectors * width + 2 * align_up(vectors, 16));
}

static struct split_scratch split_scratch_at(void *memory, uint32_t head_dim, uint32_t group)
{
    size_t vectors = vectors_max(group), width = align_up(head_dim, 16);
    struct split_scratch s = {.width = width};
    s.k = memory;
    s.v = s.k + KV_BLOCK_TOKENS * width;
    s.p = s.v + KV_BLOCK_TOKENS * width;
    s.o = s.p + VECTORS * KV_BLOCK_TOKENS;
    s.q = s.o + VECTORS * width;
    s.before = (void *)(s.q + vectors * width);
    return s;
}

/* Halves `mask` of a row of a page, as f32. */
AVX512_INLINE __m512 load_f16(__mmask16 mask, const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p));
}

/* Sixteen positions by `mask` values of K: r[i] becomes value i of the positions. Pairs of values move as dwords. */
AVX512_INLINE void load_turned(const uint16_t *k, uint32_t head_dim, __mmask16 mask, __m512 r[16])
{
    __m512i a[8], b[8];
#pragma GCC unroll 8
    for (unsigned i = 0; i < 8; i++)
        a[i] = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(mask, k + (size_t)i * head_dim)),
            _mm256_maskz_loadu_epi16(mask, k + (size_t)(i + 8) * head_dim), 1);
#pragma GCC unroll 8
    for (unsigned i = 0; i < 8; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 8
    for (unsigned i = 0; i < 8; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                  upper = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 8
    for (unsigned i = 0; i < 4; i++) {
        b[i] = _mm512_permutex2var_epi64(a[i], lower, a[i + 4]);
        b[i + 4] = _mm512_permutex2var_epi64(a[i], upper, a[i + 4]);
    }
#pragma GCC unroll 8
    for (unsigned i = 0; i < 8; i++) {
        r[2 * i] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(b[i]));
        r[2 * i + 1] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(b[i], 16)));
    }
}

/* `count` positions, rounded up to 16: what lies behind them in the page is read and then ignored. */
AVX512 static void open_split(const struct attention_job *job, const uint16_t *k, uint32_t count,
                              const struct split_scratch *s)
{
    const uint16_t *v = k + job->v_offset;
    for (uint32_t i = 0; i < job->head_dim; i += 16) {
        const __mmask16 mask = avx512_first(job->head_dim - i);
        for (uint32_t t = 0; t < count; t += 16) {
            __m512 r[16];
            load_turned(k + (size_t)t * job->head_dim + i, job->head_dim, mask, r);
#pragma GCC unroll 16
            for (unsigned j = 0; j < 16; j++)
                _mm512_storeu_ps(s->k + (size_t)(i + j) * KV_BLOCK_TOKENS + t, r[j]);
        }
        for (uint32_t t = 0; t < count; t++)
            _mm512_storeu_ps(s->v + t * s->width + i, load_f16(mask, v + (size_t)t * job->head_dim + i));
    }
}

/* C[rows][16 * vectors] = A[rows][depth] * B[depth][...]. Strides in values. */
AVX512_INLINE void product_strip(const unsigned rows, const unsigned vectors, const float *a, size_t a_stride,
                                 const float *b, size_t b_stride, uint32_t depth, float *c, size_t c_stride)
{
    __m512 acc[VECTORS * 4];
#pragma GCC unroll 24
    for (unsigned i = 0; i < rows * vectors; i++)
        acc[i] = _mm512_setzero_ps();
    for (uint32_t k = 0; k < depth; k++) {
        __m512 x[4];
#pragma GCC unroll 4
        for (unsigned j = 0; j < vectors; j++)
            x[j] = _mm512_loadu_ps(b + k * b_stride + 16 * j);
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++) {
            __m512 y = _mm512_set1_ps(a[r * a_stride + k]);
#pragma GCC unroll 4
            for (unsigned j = 0; j < vectors; j++)
                acc[r * vectors + j] = _mm512_fmadd_ps(y, x[j], acc[r * vectors + j]);
        }
    }
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (unsigned j = 0; j < vectors; j++)
            _mm512_storeu_ps(c + r * c_stride + 16 * j, acc[r * vectors + j]);
}

AVX512_INLINE void product_rows(const unsigned rows, const float *a, size_t a_stride, const float *b,
                                size_t b_stride, uint32_t depth, uint32_t columns, float *c, size_t c_stride)
{
    uint32_t column = 0;
    for (; column + 64 <= columns; column += 64)
        product_strip(rows, 4, a, a_stride, b + column, b_stride, depth, c + column, c_stride);
    if (column + 32 <= columns) {
        product_strip(rows, 2, a, a_stride, b + column, b_stride, depth, c + column, c_stride);
        column += 32;
    }
    if (column < columns)
        product_strip(rows, 1, a, a_stride, b + column, b_stride, depth, c + column, c_stride);
}

/* rows 1 .. VECTORS; columns a multiple of 16. */
AVX512 static void product(uint32_t rows, const float *a, size_t a_stride, const float *b, size_t b_stride,
                           uint32_t depth, uint32_t columns, float *c, size_t c_stride)
{
    switch (rows) {
    case 1:
        product_rows(1, a, a_stride, b, b_stride, depth, columns, c, c_stride);
        break;
    case 2:
        product_rows(2, a, a_stride, b, b_stride, depth, columns, c, c_stride);
        break;
    case 3:
        product_rows(3, a, a_stride, b, b_stride, depth, columns, c, c_stride);
        break;
    case 4:
        product_rows(4, a, a_stride, b, b_stride, depth, columns, c, c_stride);
        break;
    case 5:
        product_rows(5, a, a_stride, b, b_stride, depth, columns, c, c_stride);
        break;
    default:
        product_rows(6, a, a_stride, b, b_stride, depth, columns, c, c_stride);
        break;
    }
}

/* --- decode: straight from the page; what comes next is asked for meanwhile ------------------------------------------------------------ */

AVX512_INLINE void prefetch_values(const uint16_t *values, const unsigned count)
{
#pragma GCC unroll 8
    for (unsigned i = 0; i < count; i += 32)
        _mm_prefetch((const char *)(values + i), _MM_HINT_T0);
}

AVX512_INLINE void scores_rows(const unsigned rows, const float *q, size_t q_stride, const uint16_t *k,
                               uint32_t count, uint32_t head_dim, const uint16_t *next, float *p)
{
    for (uint32_t t = 0; t < count; t += 16) {
        __m512 acc[DIRECT_VECTORS];
#pragma GCC unroll 4
        for (unsigned r = 0; r < rows; r++)
            acc[r] = _mm512_setzero_ps();
        for (uint32_t i = 0; i < head_dim; i += 16) {
            __m512 x[16];
            const uint32_t values = TD_MIN(head_dim - i, 16u);
            prefetch_values(next + (size_t)t * head_dim + 16 * (size_t)i, 256);
            load_turned(k + (size_t)t * head_dim + i, head_dim, avx512_first(values), x);
#pragma GCC unroll 2
            for (unsigned half = 0; half < 16; half += 8) {
                if (half >= values)
                    break;
#pragma GCC unroll 8
                for (unsigned j = half; j < half + 8; j++)
#pragma GCC unroll 4
                    for (unsigned r = 0; r < rows; r++)
                        acc[r] = _mm512_fmadd_ps(_mm512_set1_ps(q[r * q_stride + i + j]), x[j], acc[r]);
            }
        }
#pragma GCC unroll 4
        for (unsigned r = 0; r < rows; r++)
            _mm512_storeu_ps(p + r * (size_t)KV_BLOCK_TOKENS + t, acc[r]);
    }
}

AVX512_INLINE void values_strip(const unsigned rows, const unsigned vectors, const float *p,
                                const uint16_t *v, uint32_t count, uint32_t head_dim, __mmask16 mask,
                                const uint16_t *next, float *o, size_t width)
{
    __m512 acc[DIRECT_VECTORS * 4];
#pragma GCC unroll 16
    for (unsigned i = 0; i < rows * vectors; i++)
        acc[i] = _mm512_setzero_ps();
    for (uint32_t t = 0; t < count; t++) {
#pragma GCC unroll 4
        for (unsigned j = 0; j < vectors; j++) {
            __m512 x = load_f16(mask, v + (size_t)t * head_dim + 16 * j);
            if (j % 2 == 0)
                prefetch_values(next + (size_t)t * head_dim + 16 * j, 32);
#pragma GCC unroll 4
            for (unsigned r = 0; r < rows; r++)
                acc[r * vectors + j] = _mm512_fmadd_ps(_mm512_set1_ps(p[r * (size_t)KV_BLOCK_TOKENS + t]), x,
                                                       acc[r * vectors + j]);
        }
    }
#pragma GCC unroll 4
    for (unsigned r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (unsigned j = 0; j < vectors; j++)
            _mm512_storeu_ps(o + r * width + 16 * j, acc[r * vectors + j]);
}

AVX512_INLINE void values_rows(const unsigned rows, const float *p, const uint16_t *v, uint32_t count,
                               uint32_t head_dim, const uint16_t *next, float *o, size_t width)
{
    uint32_t i = 0;
    for (; i + 64 <= head_dim; i += 64)
        values_strip(rows, 4, p, v + i, count, head_dim, 0xffff, next + i, o + i, width);
    for (; i < head_dim; i += 16)
        values_strip(rows, 1, p, v + i, count, head_dim, avx512_first(head_dim - i), next + i, o + i, width);
}

#define DIRECT(rows)                                                                                         \
    AVX512 static void scores_direct_##rows(const float *q, size_t q_stride, const uint16_t *k,              \
                                            uint32_t count, uint32_t head_dim, const uint16_t *next,         \
                                            float *p)                                                        \
    {                                                                                                        \
        scores_rows(rows, q, q_stride, k, count, head_dim, next, p);                                         \
    }                                                                                                        \
    AVX512 static void values_direct_##rows(const float *p, const uint16_t *v, uint32_t count,               \
                                            uint32_t head_dim, const uint16_t *next, float *o, size_t width) \
    {                                                                                                        \
        values_rows(rows, p, v, count, head_dim, next, o, width);                                            \
    }
DIRECT(1)
DIRECT(2)
DIRECT(3)
DIRECT(4)

static const struct {
    void (*scores)(const float *q, size_t q_stride, const uint16_t *k, uint32_t count, uint32_t head_dim,
                   const uint16_t *next, float *p);
    void (*values)(const float *p, const uint16_t *v, uint32_t count, uint32_t head_dim, const uint16_t *next,
                   float *o, size_t width);
} direct[DIRECT_VECTORS] = {{scores_direct_1, values_direct_1},
                            {scores_direct_2, values_direct_2},
                            {scores_direct_3, values_direct_3},
                            {scores_direct_4, values_direct_4}};

/* --- a split ----------------------------------------------------------------------------------- */

/* Scores of `count` positions to probabilities, zero behind them. Returns their sum. */
AVX512 static float split_softmax(float *p, uint32_t count, float *max_out)
{
    __m512 scores[4], largest = _mm512_set1_ps(-INFINITY);
#pragma GCC unroll 4
    for (unsigned i = 0; i < 4; i++) {
        const __mmask16 seen = count > 16 * i ? avx512_first(count - 16 * i) : 0;
        scores[i] = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), seen, p + 16 * i);
        largest = _mm512_max_ps(largest, scores[i]);
    }
    const float max = _mm512_reduce_max_ps(largest);
    __m512 lanes = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (unsigned i = 0; i < 4; i++) {
        __m512 e = avx512_exp(_mm512_sub_ps(scores[i], _mm512_set1_ps(max))); /* exp(-infinity) = 0 */
        _mm512_storeu_ps(p + 16 * i, e);
        lanes = _mm512_add_ps(lanes, e);
    }
    *max_out = max;
    return avx512_fold(lanes);
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

AVX512 static void combine(const struct attention_job *job, uint32_t vector, bool is_first, float max,
                           float sum, const float *o, struct attention_running *before)
{
    float *out = out_vector(job, vector);
    if (is_first) {
        memcpy(out, o, sizeof(float) * job->head_dim);
        *before = (struct attention_running){max, sum};
        return;
    }
    float new_max = before->max > max ? before->max : max;
    const __m512 both = avx512_exp(
        _mm512_mask_blend_ps(2, _mm512_set1_ps(before->max - new_max), _mm512_set1_ps(max - new_max)));
    const __m512 a = _mm512_broadcastss_ps(_mm512_castps512_ps128(both)),
                 b = _mm512_permutexvar_ps(_mm512_set1_epi32(1), both);
    before->sum = _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(before->sum), _mm512_castps512_ps128(a),
                                             _mm_mul_ss(_mm_set_ss(sum), _mm512_castps512_ps128(b))));
    before->max = new_max;
    for (uint32_t i = 0; i < job->head_dim; i += 16) {
        const __mmask16 mask = avx512_first(job->head_dim - i);
        __m512 old = _mm512_maskz_loadu_ps(mask, out + i);
        _mm512_mask_storeu_ps(out + i, mask,
                              _mm512_fmadd_ps(old, a, _mm512_mul_ps(_mm512_loadu_ps(o + i), b)));
    }
}

static void finish(const struct attention_job *job, uint32_t vector, uint32_t split, float max, float sum,
                   const float *o, const struct split_scratch *s)
{
    if (job->partial)
        attention_keep(job, split, vector, max, sum, o);
    else
        combine(job, vector, split == 0, max, sum, o, &s->before[vector]);
}

/* Vectors [begin, begin + rows), which all see `count` positions of the split whose K is at k; next: K of the next. */
static void run_vectors(const struct attention_job *job, uint32_t begin, uint32_t rows, uint32_t first,
                        uint32_t count, const uint16_t *k, const uint16_t *next,
                        const struct split_scratch *s)
{
    const float *q = s->q + begin * s->width;
    float *p = s->p, *o = s->o;
    float max[VECTORS], sum[VECTORS];
    if (is_direct(job))
        direct[rows - 1].scores(q, s->width, k, count, job->head_dim, k + job->v_offset, p);
    else
        product(rows, q, s->width, s->k, KV_BLOCK_TOKENS, job->head_dim, (uint32_t)align_up(count, 16), p,
                KV_BLOCK_TOKENS);
    for (uint32_t r = 0; r < rows; r++)
        sum[r] = split_softmax(p + (size_t)r * KV_BLOCK_TOKENS, count, &max[r]);
    if (is_direct(job))
        direct[rows - 1].values(p, k + job->v_offset, count, job->head_dim, next, o, s->width);
    else
        product(rows, p, KV_BLOCK_TOKENS, s->v, s->width, count, (uint32_t)s->width, o, s->width);
    for (uint32_t r = 0; r < rows; r++)
        finish(job, begin + r, first / KV_BLOCK_TOKENS, max[r], sum[r], o + r * s->width, s);
}

static void ask_for(const uint16_t *values, uint32_t head_dim)
{
    for (size_t at = 0; at < (size_t)KV_BLOCK_TOKENS * head_dim; at += 32)
        _mm_prefetch((const char *)(values + at), _MM_HINT_T1);
}

static void run_split(const struct attention_job *job, uint32_t first, const struct split_scratch *s)
{
    const uint16_t *k = job->kv + job->pages[first / KV_BLOCK_TOKENS] * job->page_stride;
    const bool is_last = first + KV_BLOCK_TOKENS > job->positions[job->vector_count / job->group - 1];
    const uint16_t *next = is_last ? k : job->kv + job->pages[first / KV_BLOCK_TOKENS + 1] * job->page_stride;
    const uint32_t most = is_direct(job) ? DIRECT_VECTORS : VECTORS;
    if (!is_direct(job)) {
        open_split(job, k, seen_count(job, job->vector_count - 1, first), s);
        ask_for(next, job->head_dim); /* long before they are opened */
        ask_for(next + job->v_offset, job->head_dim);
    }
    for (uint32_t i = 0; i < job->vector_count;) {
        uint32_t count = seen_count(job, i, first), rows = 1;
        while (rows < most && i + rows < job->vector_count && seen_count(job, i + rows, first) == count)
            rows++;
        if (count > 0)
            run_vectors(job, i, rows, first, count, k, next, s);
        i += rows;
    }
}

AVX512 static void scale_vector(float *x, float factor, uint32_t count)
{
    for (uint32_t i = 0; i < count; i += 16) {
        const __mmask16 mask = avx512_first(count - i);
        _mm512_mask_storeu_ps(x + i, mask,
                              _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), _mm512_set1_ps(factor)));
    }
}

void avx512_attention(const struct attention_job *job, void *scratch)
{
    struct split_scratch s = split_scratch_at(scratch, job->head_dim, job->group);
    for (uint32_t i = 0; i < job->vector_count; i++)
        memcpy(s.q + i * s.width,
               job->q + i / job->group * job->q_stride + (size_t)(i % job->group) * job->head_dim,
               sizeof(float) * job->head_dim);
    const uint32_t splits = attention_splits(job), begin = job->partial ? job->split_begin : 0,
                   end = job->partial ? TD_MIN(job->split_end, splits) : splits;
    for (uint32_t split = begin; split < end; split++)
        run_split(job, split * KV_BLOCK_TOKENS, &s);
    for (uint32_t i = 0; i < job->vector_count && !job->partial; i++)
        scale_vector(out_vector(job, i), 1.0f / s.before[i].sum, job->head_dim);
}

void avx512_attention_reduce(const struct attention_job *job)
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
