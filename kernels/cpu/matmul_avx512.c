/* matmul_avx512: products of tiles of 16 weight rows (tiles.h) with rows of activations.
 *
 * Quantised: the codes of a block, eight vectors, are unpacked once and stay in registers for up to eight rows of
 * activations; four activations of a row are broadcast to all lanes and vpdpbusd adds their products with four codes of
 * each of 16 weight rows in 32 bits: exact, no saturation. It wants unsigned codes, so sums start at -offset * sum(q)
 * (panel.h) and come out centred; Q8_0 is stored with 128 added. For one block of 16 rows and one row of activations
 * that is 8 vpdpbusd, a conversion, a product and one or two fma: 10 or 11 operations on the two pipes that multiply,
 * of which 8 count, so 73 to 80 % of the peak is what this layout can give; Q6_K, with two sums a block, 8 of 12.
 *
 * Float: an outer product, 16 rows of weights a vector, one activation broadcast. */
#if defined(__x86_64__)
#include "kernels/cpu/avx512.h"
#include "kernels/cpu/panel.h"
#include "kernels/cpu/tiles.h"

#define VECTOR            64 /* bytes */
#define PREFETCH_DISTANCE 16384

AVX512_INLINE __m512i load64(const uint8_t *p)
{
    return _mm512_loadu_si512(p);
}

AVX512_INLINE __m512 load_f16x16(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

AVX512_INLINE __m512 broadcast_float(const uint8_t *p)
{
    float f;
    memcpy(&f, p, sizeof f);
    return _mm512_set1_ps(f);
}

AVX512_INLINE __m512i broadcast_word(const uint8_t *p)
{
    int32_t word;
    memcpy(&word, p, sizeof word);
    return _mm512_set1_epi32(word);
}

/* Codes of columns 4 * g .. of block b of a unit, unsigned. */
AVX512_INLINE __m512i unit_codes(const uint32_t type, const uint8_t *unit, const unsigned b, const unsigned g)
{
    const bool k45 = type == GGUF_Q4_K || type == GGUF_Q5_K;
    if (type == GGUF_Q8_0)
        return load64(unit + VECTOR * g);
    const unsigned vector = k45                 ? 8 * (b / 2) + g
                            : type == GGUF_Q6_K ? 16 * (b / 4) + 8 * (b % 2) + g
                                                : g % 4;
    const bool is_high = k45 ? b % 2 : type == GGUF_Q6_K ? b % 4 / 2 : g / 4;
    __m512i pair = load64(unit + VECTOR * vector), fifteen = _mm512_set1_epi8(15);
    __m512i low = _mm512_and_si512(is_high ? _mm512_srli_epi16(pair, 4) : pair, fifteen);
    if (type == GGUF_Q5_0 || type == GGUF_Q5_1 || type == GGUF_Q5_K) {
        __m512i high = load64(unit + VECTOR * (k45 ? 32 + g : 4));
        __mmask64 bit = _mm512_test_epi8_mask(high, _mm512_set1_epi8((char)(1 << (k45 ? b : g))));
        return _mm512_mask_add_epi8(low, bit, low, _mm512_set1_epi8(16));
    }
    if (type == GGUF_Q6_K) {
        const unsigned at = 2 * (b % 4);
        __m512i high = load64(unit + VECTOR * (32 + 8 * (b / 4) + g));
        high = at <= 4 ? _mm512_slli_epi16(high, 4 - TD_MIN(at, 4u))
                       : _mm512_srli_epi16(high, TD_MAX(at, 4u) - 4);
        return _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi8(0x30)));
    }
    return low;
}

/* Vectors [begin, end) of a block's codes with one row's activations. */
AVX512_INLINE __m512i dot(const unsigned begin, const unsigned end, const __m512i *codes, const uint8_t *q,
                          __m512i sum)
{
#pragma GCC unroll 8
    for (unsigned g = begin; g < end; g++)
        sum = _mm512_dpbusd_epi32(sum, codes[g], broadcast_word(q + 4 * g));
    return sum;
}

/* Block b of a unit: adds to acc of `rows` rows. head: d, m, scales of the unit. */
AVX512_INLINE void block_add(const uint32_t type, const unsigned rows, const unsigned b, const uint8_t *unit,
                             const uint8_t *head, const uint8_t *panel, __m512 *acc)
{
    const bool minimum = weight_has_minimum(type), k45 = type == GGUF_Q4_K || type == GGUF_Q5_K;
    const bool six = type == GGUF_Q6_K, centred = type == GGUF_Q4_0 || type == GGUF_Q5_0 || type == GGUF_Q8_0;
    const uint8_t *scales = head + (minimum ? VECTOR : VECTOR / 2) + 32 * b;
    __m512 dw = load_f16x16(head), mw = minimum ? load_f16x16(head + 32) : _mm512_setzero_ps(), scale[2];
    if (k45) {
        dw = _mm512_mul_ps(
            dw, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)scales))));
        mw = _mm512_mul_ps(
            mw, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(scales + 16)))));
    }
    for (unsigned i = 0; six && i < 2; i++)
        scale[i] =
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(scales + 16 * i))));
    __m512i codes[8];
#pragma GCC unroll 8
    for (unsigned g = 0; g < 8; g++)
        codes[g] = unit_codes(type, unit, b, g);
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++) {
        const uint8_t *q = panel + 32 * r;
        __m512i start =
            centred || six ? broadcast_word(panel + PANEL_START(rows) + 4 * r) : _mm512_setzero_si512();
        __m512 isum;
        if (six) { /* two sums of at most 2^23 each after scaling: exact in floats too */
            __m512 last =
                _mm512_cvtepi32_ps(dot(4, 8, codes, q, broadcast_word(panel + PANEL_HALF(rows) + 4 * r)));
            isum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot(0, 4, codes, q, start)), scale[0],
                                   _mm512_mul_ps(last, scale[1]));
        } else {
            isum = _mm512_cvtepi32_ps(dot(0, 8, codes, q, start));
        }
        acc[r] =
            _mm512_fmadd_ps(isum, _mm512_mul_ps(dw, broadcast_float(panel + PANEL_D(rows) + 4 * r)), acc[r]);
        if (minimum) {
            __m512 s = broadcast_float(panel + PANEL_S(rows) + 4 * r);
            acc[r] = k45 ? _mm512_fnmadd_ps(mw, s, acc[r]) : _mm512_fmadd_ps(mw, s, acc[r]);
        }
    }
}

/* Q6_K's two sums start at -32 * sum of their own half. */
AVX512_INLINE void split_starts(uint8_t *panel, const unsigned rows, size_t blocks)
{
    for (size_t block = 0; block < blocks; block++, panel += (size_t)PANEL_ROW_SIZE * rows)
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++) {
            const __m256i q = _mm256_loadu_si256((const __m256i *)(panel + 32 * (size_t)r));
            __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(32), q);
            sums = _mm256_hadd_epi32(sums, sums);
            sums = _mm256_hadd_epi32(sums, sums); /* in every lane of a half its sum */
            sums = _mm256_sub_epi32(_mm256_setzero_si256(), sums);
            _mm_storeu_si32(panel + PANEL_START(rows) + 4 * (size_t)r, _mm256_castsi256_si128(sums));
            _mm_storeu_si32(panel + PANEL_HALF(rows) + 4 * (size_t)r, _mm256_extracti128_si256(sums, 1));
        }
}

/* With few rows memory is what a product waits for, and two streams, codes and heads, are too many for the processor's
 * own prefetching across pages. Behind a tile comes the next one, so codes are simply asked for some way ahead, into the second-level cache. */
AVX512_INLINE void prefetch_block(const uint32_t type, const unsigned b, const uint8_t *unit,
                                  const uint8_t *head, size_t tile)
{
    const unsigned lines = tile_unit_vectors(type) / tile_unit_blocks(type);
#pragma GCC unroll 8
    for (unsigned i = 0; i < lines; i++)
        _mm_prefetch((const char *)unit + PREFETCH_DISTANCE + VECTOR * (b * lines + i), _MM_HINT_T1);
    if (VECTOR * b < tile_head_size(type, AVX512_TILE_ROWS))
        _mm_prefetch((const char *)head + tile + VECTOR * b, _MM_HINT_T1);
}

/* One tile, blocks [begin, begin + count). */
AVX512_INLINE void tile_quantised(const uint32_t type, const unsigned rows, const struct cpu_matrix *m,
                                  const uint8_t *panel, size_t begin, size_t count, float *const *out,
                                  uint32_t tile)
{
    const unsigned inner = tile_unit_blocks(type);
    const size_t unit_size = (size_t)VECTOR * tile_unit_vectors(type),
                 head_size = tile_head_size(type, AVX512_TILE_ROWS),
                 size = tile_size(type, m->columns, AVX512_TILE_ROWS);
    const uint8_t *base = (const uint8_t *)m->packed + size * tile,
                  *unit = base + unit_size * (begin / inner),
                  *head = base + tile_codes_size(type, m->columns, AVX512_TILE_ROWS) +
                          head_size * (begin / inner);
    const __mmask16 held = avx512_first(m->rows - tile * AVX512_TILE_ROWS);
    const size_t at = (size_t)tile * AVX512_TILE_ROWS;
    __m512 acc[PANEL_ROWS_MAX];
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++)
        acc[r] = begin == 0 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(held, out[r] + at);
    for (size_t block = 0; block < count; block += inner, unit += unit_size, head += head_size) {
#pragma GCC unroll 8
        for (unsigned b = 0; b < inner; b++, panel += (size_t)PANEL_ROW_SIZE * rows) {
            if (rows <= 4)
                prefetch_block(type, b, unit, head, size);
            block_add(type, rows, b, unit, head, panel, acc);
        }
    }
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++)
        _mm512_mask_storeu_ps(out[r] + at, held, acc[r]);
}

AVX512_INLINE void rows_quantised(const uint32_t type, const unsigned rows, const struct cpu_matrix *m,
                                  const struct activations *a, size_t row, float *const *out,
                                  uint32_t tile_begin, uint32_t tile_end)
{
    const int32_t offset = type == GGUF_Q8_0 ? 128 : weight_code_offset(type);
    const size_t blocks = m->columns / NUMERICS_BLOCK;
    _Alignas(64) uint8_t panel[PANEL_SIZE];
    for (size_t begin = 0; begin < blocks; begin += PANEL_BLOCKS(rows)) {
        const size_t count = TD_MIN(blocks - begin, PANEL_BLOCKS(rows));
        panel_fill(a, row, rows, begin, count, offset, panel);
        if (type == GGUF_Q6_K)
            split_starts(panel, rows, count);
        for (uint32_t tile = tile_begin; tile < tile_end; tile++)
            tile_quantised(type, rows, m, panel, begin, count, out, tile);
    }
}

typedef void (*rows_function)(const struct cpu_matrix *m, const struct activations *a, size_t row,
                              float *const *out, uint32_t tile_begin, uint32_t tile_end);

#define QUANTISED_ROWS(name, type, rows)                                                                     \
    AVX512 static void name##_##rows(const struct cpu_matrix *m, const struct activations *a, size_t row,    \
                                     float *const *out, uint32_t tile_begin, uint32_t tile_end)              \
    {                                                                                                        \
        rows_quantised(type, rows, m, a, row, out, tile_begin, tile_end);                                    \
    }
#define QUANTISED(name, type)                                                                                \
    QUANTISED_ROWS(name, type, 1)                                                                            \
    QUANTISED_ROWS(name, type, 2) QUANTISED_ROWS(name, type, 4) QUANTISED_ROWS(name, type, 8)
QUANTISED(q4_0, GGUF_Q4_0)
QUANTISED(q4_1, GGUF_Q4_1)
QUANTISED(q5_0, GGUF_Q5_0)
QUANTISED(q5_1, GGUF_Q5_1)
QUANTISED(q8_0, GGUF_Q8_0)
QUANTISED(q4_k, GGUF_Q4_K)
QUANTISED(q5_k, GGUF_Q5_K)
QUANTISED(q6_k, GGUF_Q6_K)

/* --- float weights ---------------------------------------------------------------------------- */

AVX512_INLINE __m512 load_weights(const uint32_t type, const uint8_t *column)
{
    if (type == GGUF_F32)
        return _mm512_loadu_ps(column);
    if (type == GGUF_F16)
        return load_f16x16(column);
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)column)), 16));
}

/* Columns [begin, end), one panel, of `tiles` tiles side by side for `rows` rows. */
AVX512_INLINE void tiles_float(const uint32_t type, const unsigned rows, const unsigned tiles,
                               const struct cpu_matrix *m, const struct activations *a, size_t row,
                               uint32_t begin, uint32_t end, float *const *out, uint32_t tile)
{
    const size_t column_size = AVX512_TILE_ROWS * (type == GGUF_F32 ? 4 : 2),
                 size = tile_size(type, m->columns, AVX512_TILE_ROWS);
    const uint8_t *weights = (const uint8_t *)m->packed + size * tile;
    const float *x[8];
    __m512 acc[16];
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++)
        x[r] = a->x + (row + r) * a->x_stride;
#pragma GCC unroll 16
    for (unsigned i = 0; i < rows * tiles; i++)
        acc[i] = _mm512_setzero_ps();
    for (uint32_t column = begin; column < end; column++) {
        __m512 w[4];
#pragma GCC unroll 4
        for (unsigned t = 0; t < tiles; t++)
            w[t] = load_weights(type, weights + size * t + column_size * column);
        if (rows <= 4 && (column_size == VECTOR || column % 2 == 0)) /* a line of each tile */
#pragma GCC unroll 4
            for (unsigned t = 0; t < tiles; t++)
                _mm_prefetch((const char *)weights + size * t + column_size * column + PREFETCH_DISTANCE / 4,
                             _MM_HINT_T1);
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++) {
            __m512 y = _mm512_set1_ps(x[r][column]);
#pragma GCC unroll 4
            for (unsigned t = 0; t < tiles; t++)
                acc[r * tiles + t] = _mm512_fmadd_ps(w[t], y, acc[r * tiles + t]);
        }
    }
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (unsigned t = 0; t < tiles; t++) {
            const __mmask16 held = avx512_first(m->rows - (tile + t) * AVX512_TILE_ROWS);
            float *to = out[r] + (size_t)(tile + t) * AVX512_TILE_ROWS;
            __m512 sum = acc[r * tiles + t];
            if (begin > 0)
                sum = _mm512_add_ps(_mm512_maskz_loadu_ps(held, to), sum);
            _mm512_mask_storeu_ps(to, held, sum);
        }
}

AVX512_INLINE void rows_float(const uint32_t type, const unsigned rows, const unsigned tiles,
                              const struct cpu_matrix *m, const struct activations *a, size_t row,
                              float *const *out, uint32_t tile_begin, uint32_t tile_end)
{
    for (uint32_t begin = 0; begin < m->columns; begin += NUMERICS_PANEL) {
        const uint32_t end = TD_MIN(begin + NUMERICS_PANEL, m->columns);
        uint32_t tile = tile_begin;
        for (; tile + tiles <= tile_end; tile += tiles)
            tiles_float(type, rows, tiles, m, a, row, begin, end, out, tile);
        for (; tile < tile_end; tile++)
            tiles_float(type, rows, 1, m, a, row, begin, end, out, tile);
    }
}

#define FLOAT_ROWS(name, type, rows, tiles)                                                                  \
    AVX512 static void name##_##rows(const struct cpu_matrix *m, const struct activations *a, size_t row,    \
                                     float *const *out, uint32_t tile_begin, uint32_t tile_end)              \
    {                                                                                                        \
        rows_float(type, rows, tiles, m, a, row, out, tile_begin, tile_end);                                 \
    }
#define FLOAT(name, type)                                                                                    \
    FLOAT_ROWS(name, type, 1, 4)                                                                             \
    FLOAT_ROWS(name, type, 2, 4) FLOAT_ROWS(name, type, 4, 4) FLOAT_ROWS(name, type, 8, 2)
FLOAT(f32, GGUF_F32)
FLOAT(f16, GGUF_F16)
FLOAT(bf16, GGUF_BF16)

/* --- dispatch --------------------------------------------------------------------------------- */

#define ENTRY(type, name) [type] = {name##_1, name##_2, name##_4, name##_8}
static const rows_function functions[][4] = {
    ENTRY(GGUF_F32, f32),   ENTRY(GGUF_F16, f16),   ENTRY(GGUF_BF16, bf16), ENTRY(GGUF_Q4_0, q4_0),
    ENTRY(GGUF_Q4_1, q4_1), ENTRY(GGUF_Q5_0, q5_0), ENTRY(GGUF_Q5_1, q5_1), ENTRY(GGUF_Q8_0, q8_0),
    ENTRY(GGUF_Q4_K, q4_k), ENTRY(GGUF_Q5_K, q5_k), ENTRY(GGUF_Q6_K, q6_k),
};

void avx512_matmul(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                   uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end)
{
    uint32_t r = 0;
    for (unsigned power = 4; power-- > 0;)
        for (const uint32_t rows = 1u << power; r + rows <= row_count; r += rows)
            functions[m->type][power](m, a, first_row + r, out + r, tile_begin, tile_end);
}
#endif
