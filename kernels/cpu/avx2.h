/* avx2: what the files of the AVX2 + FMA + F16C table share: the packed weights, and cpu-v1's exp and fold on vectors.
 *
 * Packed weights: TILE_ROWS = 8 rows of a matrix form a tile; each 32-bit lane of a vector belongs to one row, so sums
 * need no shuffles and eight results leave in one store.
 *
 *   quantised   tile = [body of block 0][body of block 1] ... [heads]; a block is 32 columns of the 8 rows
 *     vector g of a block (g = 0..7) has in byte 4 * row + i the code of column 4 * g + i
 *     body  Q4  128 bytes: 4 vectors, vector v holds g = 2v in the low nibbles and g = 2v + 1 in the high ones
 *           Q5  160 bytes: the same, then one vector: bit g of byte j is bit 4 of the code at byte j of vector g
 *           Q6  192 bytes: the same, then two vectors: bits 2 * (g % 4) and the next of byte j of vector g / 4 are bits
 *                          4 and 5 of the code
 *           Q8  256 bytes: 8 vectors
 *     head  Q4_0, Q5_0, Q8_0: d f16[8];  Q4_1, Q5_1: d f16[8], m f16[8];
 *           K types, per 256 columns: d f16[8], Q4_K and Q5_K also dmin f16[8], then for each block scale[0] i8[8] and
 *           (Q6_K) scale[1] i8[8] or (Q4_K, Q5_K) min u8[8]
 *   float       [column][8 rows] in the type of the file
 * Rows behind the last are zero. */
#ifndef TANDEM_KERNELS_CPU_AVX2_H
#define TANDEM_KERNELS_CPU_AVX2_H
#include "kernels/cpu/ops.h"
#include <immintrin.h>

#define AVX2        __attribute__((target("avx2,fma,f16c")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma,f16c")))

static inline size_t packed_body_size(uint32_t type) /* of one block of a tile */
{
    switch (type) {
    case GGUF_Q5_0:
    case GGUF_Q5_1:
    case GGUF_Q5_K:
        return 160;
    case GGUF_Q6_K:
        return 192;
    case GGUF_Q8_0:
        return 256;
    default:
        return 128;
    }
}

static inline size_t packed_heads_size(uint32_t type, uint32_t blocks) /* of a tile */
{
    switch (type) {
    case GGUF_Q4_K:
    case GGUF_Q5_K:
        return (size_t)blocks / 8 * (32 + 8 * 16);
    case GGUF_Q6_K:
        return (size_t)blocks / 8 * (16 + 8 * 16);
    default:
        return (size_t)blocks * (weight_has_minimum(type) ? 32 : 16);
    }
}

static inline size_t packed_tile_size(uint32_t type, uint32_t columns)
{
    if (!weight_is_quantised(type))
        return weight_row_size(type, columns) * TILE_ROWS;
    uint32_t blocks = columns / NUMERICS_BLOCK;
    return packed_body_size(type) * blocks + packed_heads_size(type, blocks);
}

size_t avx2_pack_size(const struct cpu_matrix *m);
void avx2_pack(const struct cpu_matrix *m, uint32_t tile_begin, uint32_t tile_end);
void avx2_matmul(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                 uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end);
size_t avx2_attention_scratch(uint32_t head_dim, uint32_t group);
void avx2_attention(const struct attention_job *job, void *scratch);

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
