/* matmul_avx512: products of tiles of 16 weight rows (tiles.h) with rows of activations.
 *
 * Quantised (matmul_avx512.h): a few rows here, with the codes of a block unpacked into registers for each 1, 2 or 4 of
 * them; memory is what these wait for. Many rows: matmul_many_avx512.c.
 *
 * Float: an outer product, 16 rows of weights a vector, one activation broadcast. */
#if defined(__x86_64__)
#include "kernels/cpu/matmul_avx512.h"

/* --- a few rows: every block is unpacked into registers ------------------------------------------ */

/* Vectors [begin, end) of a block's codes with one row's activations. */
AVX512_INLINE __m512i dot(const unsigned begin, const unsigned end, const __m512i *codes, const uint8_t *q,
                          __m512i sum)
{
#pragma GCC unroll 8
    for (unsigned g = begin; g < end; g++)
        sum = _mm512_dpbusd_epi32(sum, codes[g], broadcast_word(q + 4 * g));
    return sum;
}

/* Block b of a unit: adds to acc of `rows` rows. */
AVX512_INLINE void block_add(const uint32_t type, const unsigned rows, const unsigned b, const uint8_t *unit,
                             const uint8_t *head, const uint8_t *panel, __m512 *acc)
{
    const struct block_scales s = block_scales(type, b, head);
    __m512i codes[8];
#pragma GCC unroll 8
    for (unsigned g = 0; g < 8; g++)
        codes[g] = unit_codes(type, unit, b, g);
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++) {
        const uint8_t *q = panel + 32 * r;
        __m512i start = sum_start(type, rows, r, panel);
        __m512 isum;
        if (type == GGUF_Q6_K)
            isum = sum_of_halves(dot(0, 4, codes, q, start),
                                 dot(4, 8, codes, q, broadcast_word(panel + PANEL_HALF(rows) + 4 * r)),
                                 s.half[0], s.half[1]);
        else
            isum = _mm512_cvtepi32_ps(dot(0, 8, codes, q, start));
        acc[r] = scaled_add(type, rows, r, panel, isum, s.dw, s.mw, acc[r]);
    }
}

/* One tile, blocks [begin, begin + count). */
AVX512_INLINE void tile_quantised(const uint32_t type, const unsigned rows, const struct cpu_matrix *m,
                                  const uint8_t *panel, size_t begin, size_t count, float *const *out,
                                  uint32_t tile)
{
    const unsigned inner = tile_unit_blocks(type);
    struct tile_part p = tile_part_at(type, m, AVX512_TILE_ROWS, tile, begin);
    const __mmask16 held = avx512_first(m->rows - tile * AVX512_TILE_ROWS);
    const size_t at = (size_t)tile * AVX512_TILE_ROWS;
    __m512 acc[4];
#pragma GCC unroll 4
    for (unsigned r = 0; r < rows; r++)
        acc[r] = begin == 0 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(held, out[r] + at);
    for (size_t block = 0; block < count; block += inner, p.unit += p.unit_size, p.head += p.head_size) {
#pragma GCC unroll 8
        for (unsigned b = 0; b < inner; b++, panel += (size_t)PANEL_ROW_SIZE * rows) {
            prefetch_block(type, b, p.unit, p.head, p.tile_size);
            block_add(type, rows, b, p.unit, p.head, panel, acc);
        }
    }
#pragma GCC unroll 4
    for (unsigned r = 0; r < rows; r++)
        _mm512_mask_storeu_ps(out[r] + at, held, acc[r]);
}

AVX512_INLINE void rows_quantised(const uint32_t type, const unsigned rows, const struct cpu_matrix *m,
                                  const struct activations *a, size_t row, float *const *out,
                                  uint32_t tile_begin, uint32_t tile_end)
{
    const size_t blocks = m->columns / NUMERICS_BLOCK;
    _Alignas(64) uint8_t panel[PANEL_SIZE];
    for (size_t begin = 0; begin < blocks; begin += PANEL_BLOCKS(rows)) {
        const size_t count = TD_MIN(blocks - begin, PANEL_BLOCKS(rows));
        panel_fill(a, row, rows, begin, count, code_offset(type), panel);
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

#define FLOATS(type, name)  [type] = {name##_1, name##_2, name##_4, name##_8}
#define INTEGER(type, name) [type] = {name##_1, name##_2, name##_4, NULL}
static const rows_function functions[][4] = {
    /* 1, 2, 4, 8 rows */
    FLOATS(GGUF_F32, f32),    FLOATS(GGUF_F16, f16),    FLOATS(GGUF_BF16, bf16),  INTEGER(GGUF_Q4_0, q4_0),
    INTEGER(GGUF_Q4_1, q4_1), INTEGER(GGUF_Q5_0, q5_0), INTEGER(GGUF_Q5_1, q5_1), INTEGER(GGUF_Q8_0, q8_0),
    INTEGER(GGUF_Q4_K, q4_k), INTEGER(GGUF_Q5_K, q5_k), INTEGER(GGUF_Q6_K, q6_k),
};

void avx512_matmul(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                   uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end)
{
    uint32_t r = 0;
    if (weight_is_quantised(m->type))
        r = avx512_matmul_many(m, a, first_row, row_count, out, tile_begin, tile_end);
    for (unsigned power = 4; power-- > 0;)
        for (const uint32_t rows = 1u << power; functions[m->type][power] && r + rows <= row_count; r += rows)
            functions[m->type][power](m, a, first_row + r, out + r, tile_begin, tile_end);
}
#endif
