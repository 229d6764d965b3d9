/* rope: one head of a row, by one warp: bias, norm, rotation. */
#pragma once
#include "device.cuh"
#include "kernels.h"

#define ROPE_VALUES 8 /* of a lane: heads up to 256 wide */

/* A pair by its angle: whoever turns a head, these are the bits. */
__device__ __forceinline__ void turn(float &x0, float &x1, float cosine, float sine)
{
    float y0 = __fmaf_rn(x0, cosine, -__fmul_rn(x1, sine)), y1 = __fmaf_rn(x0, sine, __fmul_rn(x1, cosine));
    x0 = y0, x1 = y1;
}

/* in: 16-bit [head_dim]; x: shared, f32 [head_dim], the warp's own. bias, norm: of this head, or NULL.
 * All loads are on their way before the first is used. */
template <bool BF16>
__device__ __forceinline__ void rope_head(float *x, const uint16_t *in, const float *bias, const float *norm,
                                          bool rotates, const float *cos_sin, const cuda_rope &a,
                                          uint32_t lane)
{
    uint32_t pairs = a.rope_dim / 2;
    float v[ROPE_VALUES], w[ROPE_VALUES], c[ROPE_VALUES / 2], s[ROPE_VALUES / 2], sum = 0.0f;
#pragma unroll
    for (int j = 0; j < ROPE_VALUES; j++) {
        uint32_t i = lane + 32 * j;
        bool inside = i < a.head_dim;
        v[j] = inside ? from_bits<BF16>(in[i]) + (bias ? bias[i] : 0.0f) : 0.0f;
        w[j] = inside && norm ? norm[i] : 1.0f;
        if (j < ROPE_VALUES / 2) {
            bool turns = rotates && i < pairs;
            c[j % (ROPE_VALUES / 2)] = turns ? cos_sin[i] : 1.0f;
            s[j % (ROPE_VALUES / 2)] = turns ? cos_sin[pairs + i] : 0.0f;
        }
        sum += v[j] * v[j];
    }
    float scale = norm ? rsqrtf(warp_sum(sum) / (float)a.head_dim + a.norm_eps) : 1.0f;
#pragma unroll
    for (int j = 0; j < ROPE_VALUES; j++)
        if (lane + 32 * j < a.head_dim)
            x[lane + 32 * j] = v[j] * scale * w[j];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < ROPE_VALUES / 2; j++) {
        uint32_t i = lane + 32 * j;
        if (rotates && i < pairs) {
            uint32_t first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + pairs;
            turn(x[first], x[second], c[j], s[j]);
        }
    }
    __syncwarp();
}
