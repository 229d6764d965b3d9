/* avx2: what the files of the AVX2 + FMA + F16C table share: cpu-v1's exp and fold on vectors of eight. Weights lie in
 * tiles (tiles.h) of TILE_ROWS = 8 rows. */
#ifndef TANDEM_KERNELS_CPU_AVX2_H
#define TANDEM_KERNELS_CPU_AVX2_H
#include "kernels/cpu/ops.h"
#include <immintrin.h>

#define AVX2        __attribute__((target("avx2,fma,f16c")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma,f16c")))

void avx2_matmul(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                 uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end);
size_t avx2_attention_scratch(uint32_t head_dim, uint32_t group);
void avx2_attention(const struct attention_job *job, void *scratch);
void avx2_attention_reduce(const struct attention_job *job);

/* numerics_exp, eight at a time. */
AVX2_INLINE __m256 avx2_exp(__m256 x)
{
    __m256 c = _mm256_min_ps(_mm256_set1_ps(EXP_HIGH), x); /* the second operand passes when it is a NaN */
    c = _mm256_max_ps(_mm256_set1_ps(EXP_LOW), c);
    __m256 z = _mm256_fmadd_ps(c, _mm256_set1_ps(EXP_LOG2E), _mm256_set1_ps(EXP_MAGIC));
    __m256 n = _mm256_sub_ps(z, _mm256_set1_ps(EXP_MAGIC));
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-EXP_LN2_HI), c);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-EXP_LN2_LO), r);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(EXP_P4), r, _mm256_set1_ps(EXP_P3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_P2));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_P1));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_P0));
    p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r), _mm256_set1_ps(1.0f));
    __m256i power =
        _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(z), 23), _mm256_set1_epi32(0x3f800000));
    __m256 low = _mm256_cmp_ps(x, _mm256_set1_ps(EXP_LOW), _CMP_LT_OQ);
    return _mm256_andnot_ps(low, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

/* numerics_fold of lanes 0..7 and 8..15. */
AVX2_INLINE float avx2_fold(__m256 low, __m256 high)
{
    __m256 eight = _mm256_add_ps(low, high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

#endif
