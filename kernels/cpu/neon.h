/* neon: what the files of the tables for 64-bit Arm share: cpu-v1's exp and fold on vectors of four. Everything here
 * is in every Armv8 processor, fused multiply-add and conversion from f16 included; what is not (sdot, smmla) is asked for at run
 * time and confined to matmul_dotprod_neon.c and matmul_i8mm_neon.c. Weights lie in tiles (tiles.h) of TILE_ROWS = 8 rows, two vectors. */
#ifndef TANDEM_KERNELS_CPU_NEON_H
#define TANDEM_KERNELS_CPU_NEON_H
#include "kernels/cpu/ops.h"
#include <arm_neon.h>

#define NEON_INLINE static inline __attribute__((always_inline))

void neon_matmul(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                 uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end);
void neon_dotprod_matmul(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                         uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end);
void neon_i8mm_matmul(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                      uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end);
size_t neon_attention_scratch(uint32_t head_dim, uint32_t group);
void neon_attention(const struct attention_job *job, void *scratch);
void neon_attention_reduce(const struct attention_job *job);

NEON_INLINE float32x4_t neon_load_f16(const void *four)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(four)));
}

/* numerics_exp, four at a time. Comparisons and selections instead of fmin and fmax, so that a NaN passes as it does
 * there. */
NEON_INLINE float32x4_t neon_exp(float32x4_t x)
{
    const float32x4_t low = vdupq_n_f32(EXP_LOW), high = vdupq_n_f32(EXP_HIGH),
                      magic = vdupq_n_f32(EXP_MAGIC);
    float32x4_t c = vbslq_f32(vcltq_f32(high, x), high, x);
    c = vbslq_f32(vcgtq_f32(low, c), low, c);
    float32x4_t z = vfmaq_f32(magic, c, vdupq_n_f32(EXP_LOG2E));
    float32x4_t n = vsubq_f32(z, magic);
    float32x4_t r = vfmaq_f32(c, n, vdupq_n_f32(-EXP_LN2_HI));
    r = vfmaq_f32(r, n, vdupq_n_f32(-EXP_LN2_LO));
    float32x4_t p = vfmaq_f32(vdupq_n_f32(EXP_P3), vdupq_n_f32(EXP_P4), r);
    p = vfmaq_f32(vdupq_n_f32(EXP_P2), p, r);
    p = vfmaq_f32(vdupq_n_f32(EXP_P1), p, r);
    p = vfmaq_f32(vdupq_n_f32(EXP_P0), p, r);
    p = vaddq_f32(vfmaq_f32(r, vmulq_f32(p, r), r), vdupq_n_f32(1.0f));
    uint32x4_t power = vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(z), 23), vdupq_n_u32(0x3f800000));
    float32x4_t result = vmulq_f32(p, vreinterpretq_f32_u32(power));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(result), vcltq_f32(x, low)));
}

/* numerics_fold: lanes[i] holds lanes 4 * i .. 4 * i + 3. */
NEON_INLINE float neon_fold(const float32x4_t lanes[4])
{
    float32x4_t four = vaddq_f32(vaddq_f32(lanes[0], lanes[2]), vaddq_f32(lanes[1], lanes[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

#endif
