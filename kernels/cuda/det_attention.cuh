/* det_attention: the rule of cuda-det-v2 for attention (sm_90a, heads of 64 and 128 values), which attention_hopper.cu keeps to for tiles and det_attention.cu for rows that are
 * alone in their sequence.
 *
 * Tokens are taken in splits of DET_SPLIT_TOKENS on absolute positions, each from a maximum of -1e30 and sums of 0. Within a split: blocks of
 * 128 tokens, a running maximum a block; a score is one chain of tensor-core instructions over the dimensions, 16 each; a value one over the
 * tokens, scaled at each block; of the exponentials of a block, tokens that lie 8 apart are added up one after the other, neighbours
 * then, and, at the split's end, the last four sums. The splits that a row sees are joined from the first to the last (det_join), and what
 * they come to is multiplied by 1 / sum.
 * So the bits of a row depend on its position and on nothing else, and splits may be many blocks' or one's. */
#pragma once
#include "det_kernels.h"
#include "device.cuh"

#define DET_SPLIT_TOKENS CUDA_DET_SPLIT_TOKENS

struct det_joined { /* splits from the first on, or one */
    float max, sum;
};

/* A value of the splits before and of the next. Never contracted otherwise. */
__device__ __forceinline__ float det_join(float value, float next, float before, float own)
{
    return __fmaf_rn(next, own, __fmul_rn(value, before));
}

/* The next split; before, own: what values of those before it and of its own are to be multiplied by. */
__device__ __forceinline__ void det_join(det_joined &all, const det_joined &next, float &before, float &own)
{
    float max = fmaxf(all.max, next.max);
    before = exp2_fast(all.max - max), own = exp2_fast(next.max - max);
    all = {max, det_join(all.sum, next.sum, before, own)};
}
