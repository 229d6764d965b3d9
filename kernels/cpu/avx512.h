/* avx512: what the files of the AVX-512 (F, BW, DQ, VL, VNNI) table share: cpu-v1's exp and fold on 16 lanes, which here
 * are the 16 virtual lanes themselves. Weights lie in tiles (tiles.h) of 16 rows. */
#ifndef TANDEM_KERNELS_CPU_AVX512_H
#define TANDEM_KERNELS_CPU_AVX512_H
#include "kernels/cpu/ops.h"
#include <immintrin.h>

#define AVX512_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
#define AVX512        __attribute__((target(AVX512_TARGET)))
#define AVX512_INLINE static inline __attribute__((always_inline, target(AVX512_TARGET)))

#define AVX512_TILE_ROWS 16

void avx512_matmul(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                   uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end);
size_t avx512_attention_scratch(uint32_t head_dim, uint32_t group);
void avx512_attention(const struct attention_job *job, void *scratch);
void avx512_attention_reduce(const struct attention_job *job);

/* numerics_exp, sixteen at a time. */
AVX512_INLINE __m512 avx512_exp(__m512 x)
{
    __m512 c = _mm512_min_ps(_mm512_set1_ps(EXP_HIGH), x); /* the second operand passes when it is a NaN */
    c = _mm512_max_ps(_mm512_set1_ps(EXP_LOW), c);
    __m512 z = _mm512_fmadd_ps(c, _mm512_set1_ps(EXP_LOG2E), _mm512_set1_ps(EXP_MAGIC));
    __m512 n = _mm512_sub_ps(z, _mm512_set1_ps(EXP_MAGIC));
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-EXP_LN2_HI), c);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-EXP_LN2_LO), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(EXP_P4), r, _mm512_set1_ps(EXP_P3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_P2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_P1));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_P0));
    p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0f));
    __m512i power =
        _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(z), 23), _mm512_set1_epi32(0x3f800000));
    __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(EXP_LOW), _CMP_NLT_UQ);
    return _mm512_maskz_mul_ps(kept, p, _mm512_castsi512_ps(power));
}

/* numerics_fold. */
AVX512_INLINE float avx512_fold(__m512 lanes)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* The first `count` lanes, all when there are more. */
AVX512_INLINE __mmask16 avx512_first(uint32_t count)
{
    return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1);
}

#endif
