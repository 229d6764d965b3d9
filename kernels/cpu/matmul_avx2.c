/* matmul_avx2: products of packed weights (avx2.h) with rows of activations.
 *
 * Quantised: four activations of a row are broadcast to all eight lanes and multiplied with four codes of each of the
 * eight rows of a tile (vpmaddubsw, then vpmaddwd). vpmaddubsw adds two products of u8 and s8 into 16 bits with
 * saturation, which must never happen. The largest pair sums are
 *     Q4 2 * 15 * 127 = 3810      eight of them fit in 16 bits: one vpmaddwd a block
 *     Q5 2 * 31 * 127 = 7874      four fit: two a block
 *     Q6 2 * 32 * 127 = 8128      of |code - 32| and the activation with that sign; four fit: one for each scale
 *     Q8 2 * 128 * 127 = 32512    of |code| and the activation with the code's sign; one fits
 * so every integer sum is exact. Codes of Q4_0 and Q5_0 stay unsigned; offset * sum(activations) is subtracted in 32
 * bits. A block of a tile is unpacked once for up to four rows of activations.
 *
 * Float: an outer product, eight rows of weights a vector, one activation broadcast. */
#if defined(__x86_64__)
#include "kernels/cpu/avx2.h"

AVX2_INLINE __m256i broadcast4(const int8_t *four)
{
    int32_t word;
    memcpy(&word, four, sizeof word);
    return _mm256_set1_epi32(word);
}

AVX2_INLINE __m256 load_f16x8(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

AVX2_INLINE __m256i load32(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

/* Codes of vector g of a block, as stored (unsigned), Q8_0 signed. */
AVX2_INLINE __m256i block_codes(const uint32_t type, const uint8_t *body, const unsigned g)
{
    if (type == GGUF_Q8_0)
        return load32(body + 32 * g);
    __m256i pair = load32(body + 32 * (g / 2));
    __m256i low = _mm256_and_si256(g % 2 ? _mm256_srli_epi16(pair, 4) : pair, _mm256_set1_epi8(15));
    if (type == GGUF_Q5_0 || type == GGUF_Q5_1 || type == GGUF_Q5_K) {
        __m256i bit = _mm256_and_si256(load32(body + 128), _mm256_set1_epi8((char)(1 << g)));
        return _mm256_or_si256(low, g <= 4 ? _mm256_slli_epi16(bit, 4 - (int)TD_MIN(g, 4u))
                                           : _mm256_srli_epi16(bit, (int)TD_MAX(g, 4u) - 4));
    }
    if (type == GGUF_Q6_K) {
        const unsigned at = 2 * (g % 4);
        __m256i bits = _mm256_and_si256(load32(body + 128 + 32 * (g / 4)), _mm256_set1_epi8((char)(3 << at)));
        return _mm256_or_si256(low, at <= 4 ? _mm256_slli_epi16(bits, 4 - (int)TD_MIN(at, 4u))
                                            : _mm256_srli_epi16(bits, (int)TD_MAX(at, 4u) - 4));
    }
    return low;
}

/* scale[half] of the eight rows as 16-bit pairs, for vpmaddwd. */
AVX2_INLINE __m256i scale_pairs(const uint8_t *scales)
{
    __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)scales));
    return _mm256_or_si256(_mm256_and_si256(wide, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(wide, 16));
}

/* isum[r]: of one block, for `rows` activation rows. scales: Q6_K's 16 bytes of the block, else unused. */
AVX2_INLINE void block_sums(const uint32_t type, const unsigned rows, const uint8_t *body,
                            const uint8_t *scales, const int8_t *const *q, __m256i *isum)
{
    const bool is_signed = type == GGUF_Q8_0 || type == GGUF_Q6_K;
    /* vectors whose pair sums fit in 16 bits together */
    const unsigned run = type == GGUF_Q8_0 ? 1 : packed_body_size(type) == 128 ? 8 : 4;
    __m256i pairs[4] = {0};
#pragma GCC unroll 8
    for (unsigned g = 0; g < 8; g++) {
        __m256i codes = block_codes(type, body, g), magnitude = codes;
        if (type == GGUF_Q6_K)
            codes = _mm256_sub_epi8(codes, _mm256_set1_epi8(32));
        if (is_signed)
            magnitude = _mm256_abs_epi8(codes);
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++) {
            __m256i x = broadcast4(q[r] + 4 * g);
            __m256i product = _mm256_maddubs_epi16(magnitude, is_signed ? _mm256_sign_epi8(x, codes) : x);
            pairs[r] = g % run == 0 ? product : _mm256_add_epi16(pairs[r], product);
        }
        if (g % run != run - 1)
            continue;
        __m256i factor = type == GGUF_Q6_K ? scale_pairs(scales + (g < 4 ? 0 : 8)) : _mm256_set1_epi16(1);
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++) {
            __m256i sum = _mm256_madd_epi16(pairs[r], factor);
            isum[r] = g < run ? sum : _mm256_add_epi32(isum[r], sum);
        }
    }
}

/* Eight outputs for `rows` activation rows, complete. */
AVX2_INLINE void tile_quantised(const uint32_t type, const unsigned rows, const struct cpu_matrix *m,
                                const uint8_t *tile, const struct activations *a, size_t row, __m256 *acc)
{
    const bool minimum = weight_has_minimum(type), k45 = type == GGUF_Q4_K || type == GGUF_Q5_K;
    const bool super = k45 || type == GGUF_Q6_K;
    const unsigned inner = super ? 8 : 1;
    const size_t body_size = packed_body_size(type), d_size = minimum ? 32 : 16;
    const int32_t offset = type == GGUF_Q4_0 ? 8 : type == GGUF_Q5_0 ? 16 : 0;
    const uint32_t blocks = m->columns / NUMERICS_BLOCK;
    const uint8_t *body = tile, *head = tile + body_size * blocks;
    const int8_t *q[4];
    const float *d[4], *s[4];
    const int32_t *sum[4];
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++) {
        q[r] = a->q + (row + r) * a->q_stride;
        d[r] = a->d + (row + r) * a->block_stride;
        s[r] = a->s + (row + r) * a->block_stride;
        sum[r] = a->sum + (row + r) * a->block_stride;
        acc[r] = _mm256_setzero_ps();
    }
    for (uint32_t block = 0; block < blocks;) {
        const __m256 file_d = load_f16x8(head),
                     file_m = minimum ? load_f16x8(head + 16) : _mm256_setzero_ps();
        head += d_size;
        for (unsigned i = 0; i < inner; i++, block++, body += body_size) {
            __m256 dw = file_d, mw = file_m;
            if (k45) {
                dw = _mm256_mul_ps(
                    dw, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)head))));
                mw = _mm256_mul_ps(mw, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(
                                           _mm_loadl_epi64((const __m128i *)(head + 8)))));
            }
            __m256i isum[4];
            block_sums(type, rows, body, head, q, isum);
#pragma GCC unroll 8
            for (unsigned r = 0; r < rows; r++) {
                if (offset)
                    isum[r] = _mm256_sub_epi32(isum[r], _mm256_set1_epi32(offset * sum[r][block]));
                __m256 scale = _mm256_mul_ps(dw, _mm256_broadcast_ss(d[r] + block));
                acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(isum[r]), scale, acc[r]);
                if (minimum)
                    acc[r] = k45 ? _mm256_fnmadd_ps(mw, _mm256_broadcast_ss(s[r] + block), acc[r])
                                 : _mm256_fmadd_ps(mw, _mm256_broadcast_ss(s[r] + block), acc[r]);
                q[r] += NUMERICS_BLOCK;
            }
            head += super ? 16 : 0;
        }
    }
}

/* The last tile of a matrix may have fewer rows than eight. */
AVX2_INLINE void store_outputs(float *out, __m256 values, uint32_t count)
{
    if (count >= TILE_ROWS) {
        _mm256_storeu_ps(out, values);
        return;
    }
    float all[TILE_ROWS];
    _mm256_storeu_ps(all, values);
    memcpy(out, all, sizeof(float) * count);
}

AVX2_INLINE void rows_quantised(const uint32_t type, const unsigned rows, const struct cpu_matrix *m,
                                const struct activations *a, size_t row, float *const *out,
                                uint32_t tile_begin, uint32_t tile_end)
{
    const size_t tile_size = packed_tile_size(type, m->columns);
    for (uint32_t tile = tile_begin; tile < tile_end; tile++) {
        __m256 acc[4];
        tile_quantised(type, rows, m, (const uint8_t *)m->packed + tile_size * tile, a, row, acc);
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++)
            store_outputs(out[r] + tile * TILE_ROWS, acc[r], m->rows - tile * TILE_ROWS);
    }
}

typedef void (*rows_function)(const struct cpu_matrix *m, const struct activations *a, size_t row,
                              float *const *out, uint32_t tile_begin, uint32_t tile_end);

#define QUANTISED_ROWS(name, type, rows)                                                                     \
    AVX2 static void name##_##rows(const struct cpu_matrix *m, const struct activations *a, size_t row,      \
                                   float *const *out, uint32_t tile_begin, uint32_t tile_end)                \
    {                                                                                                        \
        rows_quantised(type, rows, m, a, row, out, tile_begin, tile_end);                                    \
    }
#define QUANTISED(name, type)                                                                                \
    QUANTISED_ROWS(name, type, 1) QUANTISED_ROWS(name, type, 2) QUANTISED_ROWS(name, type, 4)
QUANTISED(q4_0, GGUF_Q4_0)
QUANTISED(q4_1, GGUF_Q4_1)
QUANTISED(q5_0, GGUF_Q5_0)
QUANTISED(q5_1, GGUF_Q5_1)
QUANTISED(q8_0, GGUF_Q8_0)
QUANTISED(q4_k, GGUF_Q4_K)
QUANTISED(q5_k, GGUF_Q5_K)
QUANTISED(q6_k, GGUF_Q6_K)

/* --- float weights ---------------------------------------------------------------------------- */

AVX2_INLINE __m256 load_weights(const uint32_t type, const uint8_t *column)
{
    if (type == GGUF_F32)
        return _mm256_loadu_ps((const float *)(const void *)column);
    if (type == GGUF_F16)
        return load_f16x8(column);
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)column)), 16));
}

/* `tiles` tiles side by side for `rows` activation rows. */
AVX2_INLINE void tiles_float(const uint32_t type, const unsigned rows, const unsigned tiles,
                             const struct cpu_matrix *m, const struct activations *a, size_t row,
                             float *const *out, uint32_t tile)
{
    const size_t column_size = TILE_ROWS * (type == GGUF_F32 ? 4 : 2), tile_size = column_size * m->columns;
    const uint8_t *weights = (const uint8_t *)m->packed + tile_size * tile;
    __m256 total[8];
#pragma GCC unroll 8
    for (unsigned i = 0; i < rows * tiles; i++)
        total[i] = _mm256_setzero_ps();
    for (uint32_t panel = 0; panel < m->columns; panel += NUMERICS_PANEL) {
        uint32_t end = TD_MIN(panel + NUMERICS_PANEL, m->columns);
        __m256 acc[8];
#pragma GCC unroll 8
        for (unsigned i = 0; i < rows * tiles; i++)
            acc[i] = _mm256_setzero_ps();
        for (uint32_t column = panel; column < end; column++) {
            __m256 w[4];
#pragma GCC unroll 8
            for (unsigned t = 0; t < tiles; t++)
                w[t] = load_weights(type, weights + tile_size * t + column_size * column);
#pragma GCC unroll 8
            for (unsigned r = 0; r < rows; r++) {
                __m256 x = _mm256_broadcast_ss(a->x + (row + r) * a->x_stride + column);
#pragma GCC unroll 8
                for (unsigned t = 0; t < tiles; t++)
                    acc[r * tiles + t] = _mm256_fmadd_ps(w[t], x, acc[r * tiles + t]);
            }
        }
#pragma GCC unroll 8
        for (unsigned i = 0; i < rows * tiles; i++)
            total[i] = panel == 0 ? acc[i] : _mm256_add_ps(total[i], acc[i]);
    }
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (unsigned t = 0; t < tiles; t++)
            store_outputs(out[r] + (tile + t) * TILE_ROWS, total[r * tiles + t],
                          m->rows - (tile + t) * TILE_ROWS);
}

AVX2_INLINE void rows_float(const uint32_t type, const unsigned rows, const unsigned tiles,
                            const struct cpu_matrix *m, const struct activations *a, size_t row,
                            float *const *out, uint32_t tile_begin, uint32_t tile_end)
{
    uint32_t tile = tile_begin;
    for (; tile + tiles <= tile_end; tile += tiles)
        tiles_float(type, rows, tiles, m, a, row, out, tile);
    for (; tile < tile_end; tile++)
        tiles_float(type, rows, 1, m, a, row, out, tile);
}

#define FLOAT_ROWS(name, type, rows, tiles)                                                                  \
    AVX2 static void name##_##rows(const struct cpu_matrix *m, const struct activations *a, size_t row,      \
                                   float *const *out, uint32_t tile_begin, uint32_t tile_end)                \
    {                                                                                                        \
        rows_float(type, rows, tiles, m, a, row, out, tile_begin, tile_end);                                 \
    }
#define FLOAT(name, type)                                                                                    \
    FLOAT_ROWS(name, type, 1, 4) FLOAT_ROWS(name, type, 2, 4) FLOAT_ROWS(name, type, 4, 2)
FLOAT(f32, GGUF_F32)
FLOAT(f16, GGUF_F16)
FLOAT(bf16, GGUF_BF16)

/* --- dispatch --------------------------------------------------------------------------------- */

#define ENTRY(type, name) [type] = {name##_1, name##_2, name##_4}
static const rows_function functions[][3] = {
    ENTRY(GGUF_F32, f32),   ENTRY(GGUF_F16, f16),   ENTRY(GGUF_BF16, bf16), ENTRY(GGUF_Q4_0, q4_0),
    ENTRY(GGUF_Q4_1, q4_1), ENTRY(GGUF_Q5_0, q5_0), ENTRY(GGUF_Q5_1, q5_1), ENTRY(GGUF_Q8_0, q8_0),
    ENTRY(GGUF_Q4_K, q4_k), ENTRY(GGUF_Q5_K, q5_k), ENTRY(GGUF_Q6_K, q6_k),
};

void avx2_matmul(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                 uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end)
{
    const rows_function *f = functions[m->type];
    uint32_t r = 0;
    for (; r + 4 <= row_count; r += 4)
        f[2](m, a, first_row + r, out + r, tile_begin, tile_end);
    if (r + 2 <= row_count) {
        f[1](m, a, first_row + r, out + r, tile_begin, tile_end);
        r += 2;
    }
    if (r < row_count)
        f[0](m, a, first_row + r, out + r, tile_begin, tile_end);
}
#endif
