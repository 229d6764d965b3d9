/* matmul_many_avx2: the sums of quantised products of many rows (matmul_many.h) with vpmaddubsw (matmul_avx2.h): eight 16-bit
 * sums in registers, results in the first-level cache. Signed codes go through vpmaddwd alone: opened to 16 bits, those of even
 * columns and those of odd ones, as two shifts make activations of four columns; Q6_K's with their scale already, at most
 * 32 * 128, so that its sums are Q8_0's. */
#if defined(__x86_64__)
#include "kernels/cpu/matmul_avx2.h"

struct open_pair {
    _Alignas(64) uint8_t codes[OPEN_BLOCKS][16][PAIR][32]; /* 8 vectors, or 16 of signed codes */
    float dw[OPEN_BLOCKS][PAIR][8], mw[OPEN_BLOCKS][PAIR][8];
};

AVX2_INLINE __m256i even_bytes(__m256i x) /* of every four, as 16 bits with their sign */
{
    return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
}

AVX2_INLINE __m256i odd_bytes(__m256i x)
{
    return _mm256_srai_epi16(x, 8);
}

/* Factors of block b of a unit, whose head is given: as block i, tile t. */
AVX2_INLINE void open_scales(const uint32_t type, const unsigned b, const uint8_t *head,
                             struct open_pair *pair, size_t i, const unsigned t)
{
    const bool minimum = weight_has_minimum(type);
    const uint8_t *scales = head + (minimum ? 32 : 16) + 16 * b;
    __m256 dw = load_f16x8(head), mw = minimum ? load_f16x8(head + 16) : _mm256_setzero_ps();
    if (type == GGUF_Q4_K || type == GGUF_Q5_K) {
        dw = _mm256_mul_ps(
            dw, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)scales))));
        mw = _mm256_mul_ps(
            mw, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(scales + 8)))));
        mw = _mm256_xor_ps(mw, _mm256_set1_ps(-0.0f));
    }
    _mm256_store_ps(pair->dw[i][t], dw);
    if (minimum)
        _mm256_store_ps(pair->mw[i][t], mw);
}

/* Vector g of a block's codes, whose unit's head is given. */
AVX2_INLINE void open_codes(const uint32_t type, const unsigned b, const unsigned g, const uint8_t *head,
                            __m256i codes, uint8_t (*to)[PAIR][32], const unsigned t)
{
    if (!codes_are_signed(type)) {
        _mm256_store_si256((__m256i *)to[g][t], codes);
        return;
    }
    __m256i even, odd;
    if (type == GGUF_Q6_K) {
        const __m256i scale = scale_pairs(head + 16 + 16 * b + 8 * (g / 4));
        codes = _mm256_sub_epi8(codes, _mm256_set1_epi8(32));
        even = _mm256_mullo_epi16(even_bytes(codes), scale),
        odd = _mm256_mullo_epi16(odd_bytes(codes), scale);
    } else {
        even = even_bytes(codes), odd = odd_bytes(codes);
    }
    _mm256_store_si256((__m256i *)to[2 * g][t], even);
    _mm256_store_si256((__m256i *)to[2 * g + 1][t], odd);
}

/* Blocks [begin, begin + count) of a tile, as tile t of the pair. */
AVX2_INLINE void open_tile(const uint32_t type, const struct cpu_matrix *m, uint32_t tile, size_t begin,
                           size_t count, struct open_pair *pair, const unsigned t)
{
    const unsigned inner = tile_unit_blocks(type);
    struct tile_part p = tile_part_at(type, m, TILE_ROWS, tile, begin);
    for (size_t i = 0; i < count; i += inner, p.unit += p.unit_size, p.head += p.head_size)
#pragma GCC unroll 8
        for (unsigned b = 0; b < inner; b++) {
            open_scales(type, b, p.head, pair, i + b, t);
#pragma GCC unroll 8
            for (unsigned g = 0; g < 8; g++)
                open_codes(type, b, g, p.head, unit_codes(type, p.unit, b, g), pair->codes[i + b], t);
        }
}

/* isum of a block of unsigned codes. sums: [OPEN_ROWS][tiles]. */
AVX2_INLINE void pair_sums(const uint32_t type, const unsigned tiles, const struct open_pair *pair,
                           size_t block, const uint8_t *panel, __m256i *sums)
{
    const unsigned run = sums_run(type);
    __m256i pairs[OPEN_ROWS * PAIR];
#pragma GCC unroll 8
    for (unsigned g = 0; g < 8; g++) {
#pragma GCC unroll 8
        for (unsigned i = 0; i < OPEN_ROWS * tiles; i++) {
            const __m256i codes = _mm256_load_si256((const __m256i *)pair->codes[block][g][i % tiles]),
                          product = _mm256_maddubs_epi16(codes, broadcast4(panel + 32 * (i / tiles) + 4 * g));
            pairs[i] = g % run == 0 ? product : _mm256_add_epi16(pairs[i], product);
            keep_here(&pairs[i]);
        }
        if (g % run != run - 1)
            continue;
#pragma GCC unroll 8
        for (unsigned i = 0; i < OPEN_ROWS * tiles; i++) {
            const __m256i sum = _mm256_madd_epi16(pairs[i], _mm256_set1_epi16(1));
            sums[i] = g < run ? sum : _mm256_add_epi32(sums[i], sum);
            keep_here(&sums[i]);
        }
    }
}

/* The same of signed codes. */
AVX2_INLINE void pair_sums_signed(const unsigned tiles, const struct open_pair *pair, size_t block,
                                  const uint8_t *panel, __m256i *sums)
{
#pragma GCC unroll 8
    for (unsigned g = 0; g < 8; g++)
#pragma GCC unroll 4
        for (unsigned r = 0; r < OPEN_ROWS; r++) {
            const __m256i q = broadcast4(panel + 32 * r + 4 * g), half[2] = {even_bytes(q), odd_bytes(q)};
#pragma GCC unroll 4
            for (unsigned i = 0; i < 2 * tiles; i++) {
                const unsigned t = i % tiles, odd = i / tiles;
                const __m256i codes = _mm256_load_si256((const __m256i *)pair->codes[block][2 * g + odd][t]),
                              product = _mm256_madd_epi16(codes, half[odd]);
                __m256i *sum = &sums[r * tiles + t];
                *sum = g + odd == 0 ? product : _mm256_add_epi32(*sum, product);
                keep_here(sum);
            }
        }
}

/* acc: [OPEN_ROWS][tiles]. type stands for all that are summed alike. */
AVX2_INLINE void pair_block(const uint32_t type, const unsigned tiles, const struct open_pair *pair,
                            size_t block, const uint8_t *panel, __m256 *acc)
{
    __m256i sums[OPEN_ROWS * PAIR];
    if (codes_are_signed(type))
        pair_sums_signed(tiles, pair, block, panel, sums);
    else
        pair_sums(type, tiles, pair, block, panel, sums);
#pragma GCC unroll 8
    for (unsigned i = 0; i < OPEN_ROWS * tiles; i++) {
        const unsigned r = i / tiles, t = i % tiles;
        if (type == GGUF_Q4_0 || type == GGUF_Q5_0)
            sums[i] = _mm256_add_epi32(sums[i], broadcast4(panel + PANEL_START(OPEN_ROWS) + 4 * r));
        const __m256 scale = _mm256_mul_ps(_mm256_load_ps(pair->dw[block][t]),
                                           broadcast_float(panel + PANEL_D(OPEN_ROWS) + 4 * r));
        acc[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[i]), scale, acc[i]);
        if (weight_has_minimum(type))
            acc[i] = _mm256_fmadd_ps(_mm256_load_ps(pair->mw[block][t]),
                                     broadcast_float(panel + PANEL_S(OPEN_ROWS) + 4 * r), acc[i]);
    }
}

/* `count` blocks of a pair of tiles, or of its first only, with OPEN_ROWS rows. row_count: weight rows from the pair on. */
AVX2_INLINE void pair_run(const uint32_t type, const unsigned tiles, const struct open_pair *pair,
                          size_t count, const uint8_t *panel, bool is_first, uint32_t row_count,
                          float *const *out, size_t at)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i held[PAIR];
    for (unsigned t = 0; t < tiles; t++)
        held[t] = _mm256_cmpgt_epi32(
            _mm256_set1_epi32((int)TD_MIN(row_count - t * TILE_ROWS, (uint32_t)TILE_ROWS)), lane);
    __m256 acc[OPEN_ROWS * PAIR];
#pragma GCC unroll 8
    for (unsigned i = 0; i < OPEN_ROWS * tiles; i++)
        acc[i] = is_first
                     ? _mm256_setzero_ps()
                     : _mm256_maskload_ps(out[i / tiles] + at + TILE_ROWS * (i % tiles), held[i % tiles]);
    for (size_t block = 0; block < count; block++, panel += GROUP_SIZE)
        pair_block(type, tiles, pair, block, panel, acc);
#pragma GCC unroll 8
    for (unsigned i = 0; i < OPEN_ROWS * tiles; i++)
        _mm256_maskstore_ps(out[i / tiles] + at + TILE_ROWS * (i % tiles), held[i % tiles], acc[i]);
}

#define PAIR_RUN(name, type, tiles)                                                                          \
    AVX2 static void name##_##tiles(const struct open_pair *pair, size_t count, const uint8_t *panel,        \
                                    bool is_first, uint32_t row_count, float *const *out, size_t at)         \
    {                                                                                                        \
        pair_run(type, tiles, pair, count, panel, is_first, row_count, out, at);                             \
    }
#define PAIR_RUNS(name, type) PAIR_RUN(name, type, 1) PAIR_RUN(name, type, 2)
PAIR_RUNS(four_centred, GGUF_Q4_0)
PAIR_RUNS(four_minimum, GGUF_Q4_1)
PAIR_RUNS(five_centred, GGUF_Q5_0)
PAIR_RUNS(five_minimum, GGUF_Q5_1)
PAIR_RUNS(signed, GGUF_Q8_0)

typedef void (*pair_function)(const struct open_pair *pair, size_t count, const uint8_t *panel, bool is_first,
                              uint32_t row_count, float *const *out, size_t at);

AVX2_INLINE pair_function pair_run_of(const uint32_t type, unsigned tiles)
{
    switch (type) {
    case GGUF_Q4_0:
        return tiles == 2 ? four_centred_2 : four_centred_1;
    case GGUF_Q5_0:
        return tiles == 2 ? five_centred_2 : five_centred_1;
    case GGUF_Q5_1:
    case GGUF_Q5_K:
        return tiles == 2 ? five_minimum_2 : five_minimum_1;
    case GGUF_Q6_K:
    case GGUF_Q8_0:
        return tiles == 2 ? signed_2 : signed_1;
    default:
        return tiles == 2 ? four_minimum_2 : four_minimum_1;
    }
}

AVX2_INLINE void panel_finish(const uint32_t type, uint8_t *panel, size_t count)
{
    (void)type, (void)panel, (void)count;
}

#define MANY_TARGET       AVX2
#define MANY_MATMUL       avx2_matmul_many
#define MANY_TILE_ROWS    TILE_ROWS
#define MANY_OFFSET(type) weight_code_offset(type)
#include "kernels/cpu/matmul_many.h"
#endif
