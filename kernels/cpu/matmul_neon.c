/* matmul_neon: products on any 64-bit Arm processor (matmul_neon.h). A dot product of four is two widening
 * multiplications and two pairwise additions; the sum of two products fits in 16 bits: 2 * 128 * 127 = 32512. */
#if defined(__aarch64__)
#include "kernels/cpu/neon.h"

NEON_INLINE int32x4_t dot(int32x4_t acc, int8x16_t weights, int8x16_t four)
{
    int16x8_t low = vmull_s8(vget_low_s8(weights), vget_low_s8(four)), high = vmull_high_s8(weights, four);
    return vpadalq_s16(acc, vpaddq_s16(low, high));
}

#define NEON_TARGET
#define NEON_MATMUL neon_matmul
#define NEON_DOT(acc, weights, q, lane)                                                                      \
    dot(acc, weights, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(q), lane)))
#include "kernels/cpu/matmul_neon.h"
#endif
