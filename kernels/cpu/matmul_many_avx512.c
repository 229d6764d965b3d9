/* matmul_many_avx512: the sums of quantised products of many rows (matmul_many.h) with vpdpbusd (matmul_avx512.h): eight sums
 * and eight results in registers. */
#if defined(__x86_64__)
#include "kernels/cpu/matmul_avx512.h"

struct open_pair {
    _Alignas(VECTOR) uint8_t codes[OPEN_BLOCKS][8][PAIR][VECTOR]; /* unsigned */
    float dw[OPEN_BLOCKS][PAIR][16], mw[OPEN_BLOCKS][PAIR][16], half[OPEN_BLOCKS][2][PAIR][16];
};

/* Blocks [begin, begin + count) of a tile, as tile t of the pair. */
AVX512_INLINE void open_tile(const uint32_t type, const struct cpu_matrix *m, uint32_t tile, size_t begin,
                             size_t count, struct open_pair *pair, const unsigned t)
{
    const unsigned inner = tile_unit_blocks(type);
    struct tile_part p = tile_part_at(type, m, AVX512_TILE_ROWS, tile, begin);
    for (size_t i = 0; i < count; i += inner, p.unit += p.unit_size, p.head += p.head_size)
#pragma GCC unroll 8
        for (unsigned b = 0; b < inner; b++) {
            const struct block_scales s = block_scales(type, b, p.head);
            _mm512_store_ps(pair->dw[i + b][t], s.dw);
            if (weight_has_minimum(type))
                _mm512_store_ps(pair->mw[i + b][t], s.mw);
            for (unsigned half = 0; type == GGUF_Q6_K && half < 2; half++)
                _mm512_store_ps(pair->half[i + b][half][t], s.half[half]);
#pragma GCC unroll 8
            for (unsigned g = 0; g < 8; g++)
                _mm512_store_si512(pair->codes[i + b][g][t], unit_codes(type, p.unit, b, g));
        }
}

/* Columns 4 * begin .. 4 * end of a block. sums: [OPEN_ROWS][tiles]. */
AVX512_INLINE void pair_sums(const unsigned tiles, const unsigned begin, const unsigned end,
                             const struct open_pair *pair, size_t block, const uint8_t *panel, __m512i *sums)
{
#pragma GCC unroll 8
    for (unsigned g = begin; g < end; g++)
#pragma GCC unroll 4
        for (unsigned r = 0; r < OPEN_ROWS; r++) {
            const __m512i q = broadcast_word(panel + 32 * r + 4 * g);
#pragma GCC unroll 2
            for (unsigned t = 0; t < tiles; t++)
                sums[r * tiles + t] =
                    _mm512_dpbusd_epi32(sums[r * tiles + t], _mm512_load_si512(pair->codes[block][g][t]), q);
        }
}

/* acc: [OPEN_ROWS][tiles]. type stands for all that are summed alike. */
AVX512_INLINE void pair_block(const uint32_t type, const unsigned tiles, const struct open_pair *pair,
                              size_t block, const uint8_t *panel, __m512 *acc)
{
    const unsigned rows = OPEN_ROWS;
    __m512i sums[OPEN_ROWS * PAIR], last[OPEN_ROWS * PAIR];
#pragma GCC unroll 8
    for (unsigned i = 0; i < rows * tiles; i++) {
        sums[i] = sum_start(type, rows, i / tiles, panel);
        if (type == GGUF_Q6_K)
            last[i] = broadcast_word(panel + PANEL_HALF(rows) + 4 * (i / tiles));
    }
    pair_sums(tiles, 0, 4, pair, block, panel, sums);
    pair_sums(tiles, 4, 8, pair, block, panel, type == GGUF_Q6_K ? last : sums);
#pragma GCC unroll 8
    for (unsigned i = 0; i < rows * tiles; i++) {
        const unsigned t = i % tiles;
        const __m512 isum = type == GGUF_Q6_K
                                ? sum_of_halves(sums[i], last[i], _mm512_load_ps(pair->half[block][0][t]),
                                                _mm512_load_ps(pair->half[block][1][t]))
                                : _mm512_cvtepi32_ps(sums[i]);
        acc[i] = scaled_add(type, rows, i / tiles, panel, isum, _mm512_load_ps(pair->dw[block][t]),
                            _mm512_load_ps(pair->mw[block][t]), acc[i]);
    }
}

/* `count` blocks of a pair of tiles, or of its first only, with OPEN_ROWS rows. row_count: weight rows from the pair on. */
AVX512_INLINE void pair_run(const uint32_t type, const unsigned tiles, const struct open_pair *pair,
                            size_t count, const uint8_t *panel, bool is_first, uint32_t row_count,
                            float *const *out, size_t at)
{
    const __mmask16 held[PAIR] = {avx512_first(row_count),
                                  tiles < 2 ? 0 : avx512_first(row_count - AVX512_TILE_ROWS)};
    __m512 acc[OPEN_ROWS * PAIR];
#pragma GCC unroll 8
    for (unsigned i = 0; i < OPEN_ROWS * tiles; i++)
        acc[i] = is_first ? _mm512_setzero_ps()
                          : _mm512_maskz_loadu_ps(held[i % tiles], out[i / tiles] + at + 16 * (i % tiles));
    for (size_t block = 0; block < count; block++, panel += (size_t)PANEL_ROW_SIZE * OPEN_ROWS)
        pair_block(type, tiles, pair, block, panel, acc);
#pragma GCC unroll 8
    for (unsigned i = 0; i < OPEN_ROWS * tiles; i++)
        _mm512_mask_storeu_ps(out[i / tiles] + at + 16 * (i % tiles), held[i % tiles], acc[i]);
}

#define PAIR_RUN(name, type, tiles)                                                                          \
    AVX512 static void name(const struct open_pair *pair, size_t count, const uint8_t *panel, bool is_first, \
                            uint32_t row_count, float *const *out, size_t at)                                \
    {                                                                                                        \
        pair_run(type, tiles, pair, count, panel, is_first, row_count, out, at);                             \
    }
PAIR_RUN(centred_one, GGUF_Q4_0, 1)
PAIR_RUN(centred_two, GGUF_Q4_0, 2)
PAIR_RUN(minimum_one, GGUF_Q4_1, 1)
PAIR_RUN(minimum_two, GGUF_Q4_1, 2)
PAIR_RUN(halves_one, GGUF_Q6_K, 1)
PAIR_RUN(halves_two, GGUF_Q6_K, 2)

typedef void (*pair_function)(const struct open_pair *pair, size_t count, const uint8_t *panel, bool is_first,
                              uint32_t row_count, float *const *out, size_t at);

AVX512_INLINE pair_function pair_run_of(const uint32_t type, unsigned tiles)
{
    if (weight_has_minimum(type))
        return tiles == 2 ? minimum_two : minimum_one;
    if (type == GGUF_Q6_K)
        return tiles == 2 ? halves_two : halves_one;
    return tiles == 2 ? centred_two : centred_one;
}

AVX512_INLINE void panel_finish(const uint32_t type, uint8_t *panel, size_t count)
{
    if (type == GGUF_Q6_K)
        split_starts(panel, OPEN_ROWS, count);
}

#define MANY_TARGET       AVX512
#define MANY_MATMUL       avx512_matmul_many
#define MANY_TILE_ROWS    AVX512_TILE_ROWS
#define MANY_OFFSET(type) code_offset(type)
#include "kernels/cpu/matmul_many.h"
#endif
