/* matmul_avx2: what the files of integer products with AVX2 share. Four activations of a row are broadcast to all eight lanes
 * and multiplied with four codes of each of the eight rows of a tile (vpmaddubsw, then vpmaddwd). vpmaddubsw adds two
 * products of u8 and s8 into 16 bits with saturation, which must never happen. The largest pair sums are
 *     Q4 2 * 15 * 127 = 3810      eight of them fit in 16 bits: one vpmaddwd a block
 *     Q5 2 * 31 * 127 = 7874      four fit: two a block
 *     Q6 2 * 32 * 127 = 8128      of |code - 32| and the activation with that sign; four fit: one for each scale
 *     Q8 2 * 128 * 127 = 32512    of |code| and the activation with the code's sign; one fits
 * so every integer sum is exact. Codes of Q4_0 and Q5_0 stay unsigned; offset * sum(activations) is subtracted in 32
 * bits. */
#ifndef TANDEM_KERNELS_CPU_MATMUL_AVX2_H
#define TANDEM_KERNELS_CPU_MATMUL_AVX2_H
#include "kernels/cpu/avx2.h"
#include "kernels/cpu/panel.h"
#include "kernels/cpu/tiles.h"

AVX2_INLINE __m256 broadcast_float(const uint8_t *p)
{
    float f;
    memcpy(&f, p, sizeof f);
    return _mm256_set1_ps(f);
}

AVX2_INLINE __m256i broadcast4(const uint8_t *four)
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

/* Codes of columns 4 * g .. of block b of a unit, as in the file. */
AVX2_INLINE __m256i unit_codes(const uint32_t type, const uint8_t *unit, const unsigned b, const unsigned g)
{
    const bool k45 = type == GGUF_Q4_K || type == GGUF_Q5_K;
    if (type == GGUF_Q8_0)
        return load32(unit + 32 * g);
    const unsigned vector = k45                 ? 8 * (b / 2) + g
                            : type == GGUF_Q6_K ? 16 * (b / 4) + 8 * (b % 2) + g
                                                : g % 4;
    const bool is_high = k45 ? b % 2 : type == GGUF_Q6_K ? b % 4 / 2 : g / 4;
    __m256i pair = load32(unit + 32 * vector);
    __m256i low = _mm256_and_si256(is_high ? _mm256_srli_epi16(pair, 4) : pair, _mm256_set1_epi8(15));
    if (type == GGUF_Q4_0 || type == GGUF_Q4_1 || type == GGUF_Q4_K)
        return low;
    /* bit `at` of every byte of `high` and the next, of Q6_K, belong at bit 4 */
    const unsigned at = type == GGUF_Q6_K ? 2 * (b % 4) : k45 ? b : g;
    __m256i high = load32(unit + 32 * (type == GGUF_Q6_K ? 32 + 8 * (b / 4) + g : k45 ? 32 + g : 4));
    high = at <= 4 ? _mm256_slli_epi16(high, 4 - (int)TD_MIN(at, 4u))
                   : _mm256_srli_epi16(high, (int)TD_MAX(at, 4u) - 4);
    return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(type == GGUF_Q6_K ? 0x30 : 0x10)));
}

/* scale[half] of the eight rows as 16-bit pairs, for vpmaddwd. */
AVX2_INLINE __m256i scale_pairs(const uint8_t *scales)
{
    __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)scales));
    return _mm256_or_si256(_mm256_and_si256(wide, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(wide, 16));
}

/* The compiler would rather form all products first and add them later, for which there are too few registers. */
AVX2_INLINE void keep_here(__m256i *sum)
{
    __asm__ volatile("" : "+x"(*sum));
}

/* Vectors of codes whose pair sums fit in 16 bits together. */
AVX2_INLINE unsigned sums_run(const uint32_t type)
{
    return type == GGUF_Q8_0 ? 1 : type == GGUF_Q4_0 || type == GGUF_Q4_1 || type == GGUF_Q4_K ? 8 : 4;
}

AVX2_INLINE bool codes_are_signed(const uint32_t type)
{
    return type == GGUF_Q8_0 || type == GGUF_Q6_K;
}

/* Rows of quantised weights, from the first on; returns how many: less than MANY_ROWS are left. */
uint32_t avx2_matmul_many(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                          uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end);

#endif
