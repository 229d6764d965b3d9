/* matmul_avx2: products of tiles of 8 weight rows (tiles.h) with rows of activations.
 *
 * Quantised (matmul_avx2.h): a few rows here, with the codes of a block unpacked for each 1, 2 or 4 of them. Many rows:
 * matmul_many_avx2.c.
 *
 * Float: an outer product, eight rows of weights a vector, one activation broadcast. */
#if defined(__x86_64__)
#include "kernels/cpu/matmul_avx2.h"

/* isum[r] of block b of a unit, for `rows` rows. scales: Q6_K's 16 bytes of the block, else unused. */
AVX2_INLINE void block_sums(const uint32_t type, const unsigned rows, const unsigned b, const uint8_t *unit,
                            const uint8_t *scales, const uint8_t *panel, __m256i *isum)
{
    const bool is_signed = codes_are_signed(type);
    const unsigned run = sums_run(type);
    __m256i pairs[4] = {0};
#pragma GCC unroll 8
    for (unsigned g = 0; g < 8; g++) {
        __m256i codes = unit_codes(type, unit, b, g), magnitude = codes;
        if (type == GGUF_Q6_K)
            codes = _mm256_sub_epi8(codes, _mm256_set1_epi8(32));
        if (is_signed)
            magnitude = _mm256_abs_epi8(codes);
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++) {
            __m256i x = broadcast4(panel + 32 * r + 4 * g);
            __m256i product = _mm256_maddubs_epi16(magnitude, is_signed ? _mm256_sign_epi8(x, codes) : x);
            pairs[r] = g % run == 0 ? product : _mm256_add_epi16(pairs[r], product);
            keep_here(&pairs[r]);
        }
        if (g % run != run - 1)
            continue;
        __m256i factor = type == GGUF_Q6_K ? scale_pairs(scales + (g < 4 ? 0 : 8)) : _mm256_set1_epi16(1);
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++) {
            __m256i sum = _mm256_madd_epi16(pairs[r], factor);
            isum[r] = g < run ? sum : _mm256_add_epi32(isum[r], sum);
            keep_here(&isum[r]);
        }
    }
}

/* Block b of a unit: adds to acc of `rows` rows. head: d, m, scales of the unit. */
AVX2_INLINE void block_add(const uint32_t type, const unsigned rows, const unsigned b, const uint8_t *unit,
                           const uint8_t *head, const uint8_t *panel, __m256 *acc)
{
    const bool minimum = weight_has_minimum(type), k45 = type == GGUF_Q4_K || type == GGUF_Q5_K,
               centred = type == GGUF_Q4_0 || type == GGUF_Q5_0;
    const uint8_t *scales = head + (minimum ? 32 : 16) + 16 * b;
    __m256 dw = load_f16x8(head), mw = minimum ? load_f16x8(head + 16) : _mm256_setzero_ps();
    if (k45) {
        dw = _mm256_mul_ps(
            dw, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)scales))));
        mw = _mm256_mul_ps(
            mw, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(scales + 8)))));
    }
    __m256i isum[4];
    block_sums(type, rows, b, unit, scales, panel, isum);
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++) {
        if (centred)
            isum[r] = _mm256_add_epi32(isum[r], broadcast4(panel + PANEL_START(rows) + 4 * r));
        __m256 scale = _mm256_mul_ps(dw, broadcast_float(panel + PANEL_D(rows) + 4 * r));
        acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(isum[r]), scale, acc[r]);
        if (minimum) {
            __m256 s = broadcast_float(panel + PANEL_S(rows) + 4 * r);
            acc[r] = k45 ? _mm256_fnmadd_ps(mw, s, acc[r]) : _mm256_fmadd_ps(mw, s, acc[r]);
        }
    }
}

/* The last tile of a matrix may have fewer rows than eight. */
AVX2_INLINE __m256 load_outputs(const float *out, uint32_t count)
{
    if (count >= TILE_ROWS)
        return _mm256_loadu_ps(out);
    float all[TILE_ROWS] = {0};
    memcpy(all, out, sizeof(float) * count);
    return _mm256_loadu_ps(all);
}

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

/* One tile, blocks [begin, begin + count). */
AVX2_INLINE void tile_quantised(const uint32_t type, const unsigned rows, const struct cpu_matrix *m,
                                const uint8_t *panel, size_t begin, size_t count, float *const *out,
                                uint32_t tile)
{
    const unsigned inner = tile_unit_blocks(type);
    struct tile_part p = tile_part_at(type, m, TILE_ROWS, tile, begin);
    const uint32_t held = m->rows - tile * TILE_ROWS;
    const size_t at = (size_t)tile * TILE_ROWS;
    __m256 acc[4];
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++)
        acc[r] = begin == 0 ? _mm256_setzero_ps() : load_outputs(out[r] + at, held);
    for (size_t block = 0; block < count; block += inner, p.unit += p.unit_size, p.head += p.head_size)
#pragma GCC unroll 8
        for (unsigned b = 0; b < inner; b++, panel += (size_t)PANEL_ROW_SIZE * rows)
            block_add(type, rows, b, p.unit, p.head, panel, acc);
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++)
        store_outputs(out[r] + at, acc[r], held);
}

AVX2_INLINE void rows_quantised(const uint32_t type, const unsigned rows, const struct cpu_matrix *m,
                                const struct activations *a, size_t row, float *const *out,
                                uint32_t tile_begin, uint32_t tile_end)
{
    const size_t blocks = m->columns / NUMERICS_BLOCK;
    _Alignas(64) uint8_t panel[PANEL_SIZE];
    for (size_t begin = 0; begin < blocks; begin += PANEL_BLOCKS(rows)) {
        const size_t count = TD_MIN(blocks - begin, PANEL_BLOCKS(rows));
        panel_fill(a, row, rows, begin, count, weight_code_offset(type), panel);
        for (uint32_t tile = tile_begin; tile < tile_end; tile++)
            tile_quantised(type, rows, m, panel, begin, count, out, tile);
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
    const size_t column_size = TILE_ROWS * (type == GGUF_F32 ? 4 : 2),
                 size = tile_size(type, m->columns, TILE_ROWS);
    const uint8_t *weights = (const uint8_t *)m->packed + size * tile;
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
                w[t] = load_weights(type, weights + size * t + column_size * column);
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
    if (weight_is_quantised(m->type))
        r = avx2_matmul_many(m, a, first_row, row_count, out, tile_begin, tile_end);
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
