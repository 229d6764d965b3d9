/* matmul_avx512: what the files of integer products with AVX-512 share. The codes of a block of 32 columns of a tile, 16
 * weight rows, are eight vectors; four activations of a row are broadcast to all lanes and vpdpbusd adds their products
 * with four codes of each weight row in 32 bits: exact, no saturation. It wants unsigned codes, so sums start at
 * -offset * sum(q) (panel.h) and come out centred; Q8_0 is stored with 128 added. For one block and one row of
 * activations that is 8 vpdpbusd, a product and one or two fma: 10 or 11 operations on the pipes that multiply, of which
 * 8 count, so 73 to 80 % of the peak is what this layout can give; Q6_K, with two sums a block, 8 of 12. */
#ifndef TANDEM_KERNELS_CPU_MATMUL_AVX512_H
#define TANDEM_KERNELS_CPU_MATMUL_AVX512_H
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

AVX512_INLINE int32_t code_offset(const uint32_t type)
{
    return type == GGUF_Q8_0 ? 128 : weight_code_offset(type);
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

/* What the sums of a block are multiplied with. mw: of types with a minimum; half: of Q6_K. */
struct block_scales {
    __m512 dw, mw, half[2];
};

AVX512_INLINE __m512 load_i8x16(const uint8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* head: d, m, scales of the unit that block b is of. */
AVX512_INLINE struct block_scales block_scales(const uint32_t type, const unsigned b, const uint8_t *head)
{
    const bool minimum = weight_has_minimum(type);
    const uint8_t *scales = head + (minimum ? VECTOR : VECTOR / 2) + 32 * b;
    struct block_scales s = {.dw = load_f16x16(head)};
    if (minimum)
        s.mw = load_f16x16(head + 32);
    if (type == GGUF_Q4_K || type == GGUF_Q5_K) { /* both 0..63, so signed or not is the same */
        s.dw = _mm512_mul_ps(s.dw, load_i8x16(scales));
        s.mw = _mm512_xor_ps(_mm512_mul_ps(s.mw, load_i8x16(scales + 16)), _mm512_set1_ps(-0.0f));
    }
    for (unsigned i = 0; type == GGUF_Q6_K && i < 2; i++)
        s.half[i] = load_i8x16(scales + 16 * i);
    return s;
}

/* Q6_K: two sums of at most 2^23 each after scaling, exact in floats too. */
AVX512_INLINE __m512 sum_of_halves(__m512i first, __m512i last, __m512 first_scale, __m512 last_scale)
{
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(first), first_scale,
                           _mm512_mul_ps(_mm512_cvtepi32_ps(last), last_scale));
}

/* acc and a block's sum for row r of a panel. */
AVX512_INLINE __m512 scaled_add(const uint32_t type, const unsigned rows, const unsigned r,
                                const uint8_t *panel, __m512 isum, __m512 dw, __m512 mw, __m512 acc)
{
    acc = _mm512_fmadd_ps(isum, _mm512_mul_ps(dw, broadcast_float(panel + PANEL_D(rows) + 4 * r)), acc);
    if (weight_has_minimum(type))
        acc = _mm512_fmadd_ps(mw, broadcast_float(panel + PANEL_S(rows) + 4 * r), acc);
    return acc;
}

AVX512_INLINE __m512i sum_start(const uint32_t type, const unsigned rows, const unsigned r,
                                const uint8_t *panel)
{
    return weight_has_minimum(type) ? _mm512_setzero_si512()
                                    : broadcast_word(panel + PANEL_START(rows) + 4 * r);
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

/* Rows of quantised weights, from the first on; returns how many: less than MANY_ROWS are left. */
uint32_t avx512_matmul_many(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                            uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end);

#endif
