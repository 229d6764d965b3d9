/* attention_decode: the work of a split, for the kernel that holds one layer's attention (attention_decode.cu, which says how it works)
 * and the one that holds a whole step (step.cu). */
#pragma once
#include "device.cuh"
#include "hopper.cuh"
#include "kernels.h"
#include <math_constants.h>

#define HEADS        8 /* of a block */
#define DECODE_TURNS 2 /* counters that lie before those of rows: attention_decode_hopper.cu's */

struct decode_args {
    cuda_attention a;
    const cuda_split *splits;
    float *partial;     /* [split][parts][HEADS][HD + 2]: values, then max and sum */
    uint32_t *counters; /* [row][parts] */
    uint32_t parts;     /* KV heads x groups of up to HEADS query heads */
};

static inline uint32_t head_parts(const cuda_attention &a)
{
    return a.kv_head_count * ((a.head_count / a.kv_head_count + HEADS - 1) / HEADS);
}

template <int WARPS> struct decode_ends { /* of a split: what its warps found */
    float *o;                             /* shared, [WARPS][heads][HD] */
    float max[WARPS][HEADS], sum[WARPS][HEADS];
    uint32_t is_last;
};

template <int HD> struct decode_state { /* of a warp: heads 2q and 2q + 1 of a lane */
    float o[HD / 16][4], max[2], sum[2];
};

/* Scores of 16 tokens to probabilities, those from token_count on to 0; what was summed up before is scaled to the new maximum. */
template <int HD>
__device__ __forceinline__ void soften(decode_state<HD> &st, float s[4], uint32_t token, int32_t token_count)
{
    uint32_t lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++)
        if ((int32_t)(token + lane / 4 + i / 2 * 8) >= token_count)
            s[i] = -CUDART_INF_F;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float max = fmaxf(s[h], s[h + 2]);
        for (int i = 4; i < 32; i *= 2)
            max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, i));
        max = fmaxf(max, st.max[h]);
        float alpha = exp2_fast(st.max[h] - max); /* maxima start finite, so this is never inf - inf */
        st.max[h] = max;
        s[h] = exp2_fast(s[h] - max), s[h + 2] = exp2_fast(s[h + 2] - max);
        st.sum[h] = st.sum[h] * alpha + s[h] + s[h + 2];
#pragma unroll
        for (int i = 0; i < HD / 16; i++)
            st.o[i][h] *= alpha, st.o[i][h + 2] *= alpha;
    }
}

/* 16 tokens of a page from `token` on, of which the row sees those below token_count; LAYOUT says where a token's piece of 8 values
 * lies, in bytes. */
template <int HD, class LAYOUT>
__device__ __forceinline__ void use_page(decode_state<HD> &st, const uint8_t *k, const uint8_t *v,
                                         const uint32_t q[HD / 16][2], uint32_t token, int32_t token_count)
{
    uint32_t lane = threadIdx.x % 32;
    float s[4] = {};
#pragma unroll
    for (int i = 0; i < HD / 16; i++) {
        uint32_t a[4];
        ldmatrix(a, k + LAYOUT::at(token + lane % 16, 2 * i + lane / 16));
        mma<false>(s, a[0], a[1], a[2], a[3], q[i][0], q[i][1]);
    }
    soften<HD>(st, s, token, token_count);
    uint32_t b0 = transpose8x8(to_pair<false>(s[0], s[1])), b1 = transpose8x8(to_pair<false>(s[2], s[3]));
#pragma unroll
    for (int i = 0; i < HD / 16; i++) {
        uint32_t a[4];
        ldmatrix_trans(a, v + LAYOUT::at(token + lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
        mma<false>(st.o[i], a[0], a[1], a[2], a[3], b0, b1);
    }
}

/* The warps' results to shared memory. PAIRS: a lane's two dimensions of 16 are neighbours instead of 8 apart. */
template <int HD, int WARPS, bool PAIRS = false>
__device__ __forceinline__ void share_state(decode_ends<WARPS> &sh, const decode_state<HD> &st,
                                            uint32_t heads)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    uint32_t place = PAIRS ? 2 * g : g;
    float *o = sh.o + warp * heads * HD;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = st.sum[h];
        for (int i = 4; i < 32; i *= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, i);
        if (g == 0)
            sh.max[warp][2 * q + h] = st.max[h], sh.sum[warp][2 * q + h] = sum;
        if (2 * q + h >= heads)
            continue;
#pragma unroll
        for (int i = 0; i < HD / 16; i++) {
            o[(2 * q + h) * HD + 16 * i + place] = st.o[i][h];
            o[(2 * q + h) * HD + 16 * i + place + (PAIRS ? 1 : 8)] = st.o[i][h + 2];
        }
    }
}

__device__ __forceinline__ void store_out(const cuda_attention &a, uint64_t at, float x)
{
    ((uint16_t *)a.out)[at] = a.out_bf16 ? to_bits<true>(x) : to_bits<false>(x);
}

/* Add up the splits of a row; every thread of the last block. */
template <int HD, int WARPS>
__device__ __forceinline__ void combine_splits(const decode_args &d, const cuda_split &s, uint32_t part,
                                               uint32_t first_head, uint32_t heads)
{
    constexpr int SIZE = HEADS * (HD + 2), AT_ONCE = 8; /* splits whose loads are on their way together */
    for (uint32_t i = threadIdx.x; i < heads * HD; i += 32 * WARPS) {
        uint32_t head = i / HD, dim = i % HD;
        const float *p = d.partial + ((uint64_t)s.first_split * d.parts + part) * SIZE + head * (HD + 2);
        uint64_t stride = (uint64_t)d.parts * SIZE;
        float max = -1e30f, sum = 0.0f, o = 0.0f;
        for (uint32_t k = 0; k < s.split_count; k += AT_ONCE, p += AT_ONCE * stride) {
            float m[AT_ONCE], l[AT_ONCE], v[AT_ONCE], before = max;
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                bool inside = k + j < s.split_count;
                m[j] = inside ? __ldcg(p + j * stride + HD) : -CUDART_INF_F;
                l[j] = inside ? __ldcg(p + j * stride + HD + 1) : 0.0f;
                v[j] = inside ? __ldcg(p + j * stride + dim) : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                max = fmaxf(max, m[j]);
            sum *= exp2_fast(before - max), o *= exp2_fast(before - max);
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                float scale = exp2_fast(m[j] - max);
                sum += l[j] * scale, o += v[j] * scale;
            }
        }
        store_out(d.a, ((uint64_t)s.row * d.a.head_count + first_head + head) * HD + dim, o / sum);
    }
}

template <int HD, int WARPS>
__device__ __forceinline__ void finish(const decode_ends<WARPS> &sh, const decode_args &d,
                                       const cuda_split &s, uint32_t split, uint32_t part,
                                       uint32_t first_head, uint32_t heads)
{
    float *partial = d.partial + ((uint64_t)split * d.parts + part) * HEADS * (HD + 2);
    for (uint32_t i = threadIdx.x; i < heads * HD; i += 32 * WARPS) {
        uint32_t head = i / HD, dim = i % HD;
        float max = -CUDART_INF_F, sum = 0.0f, value = 0.0f;
        for (int w = 0; w < WARPS; w++)
            max = fmaxf(max, sh.max[w][head]);
        for (int w = 0; w < WARPS; w++) {
            float scale = exp2_fast(sh.max[w][head] - max);
            sum += sh.sum[w][head] * scale;
            value += sh.o[(w * heads + head) * HD + dim] * scale;
        }
        if (s.split_count == 1) {
            store_out(d.a, ((uint64_t)s.row * d.a.head_count + first_head + head) * HD + dim, value / sum);
        } else {
            partial[head * (HD + 2) + dim] = value;
            if (dim == 0)
                partial[head * (HD + 2) + HD] = max, partial[head * (HD + 2) + HD + 1] = sum;
        }
    }
}

/* The results of a split; the last block of a row and part adds them up. Threads below 32 * WARPS; shared memory is free after
 * it. */
template <int HD, int WARPS, bool PAIRS = false>
__device__ __forceinline__ void finish_split(decode_ends<WARPS> &sh, const decode_state<HD> &st,
                                             const decode_args &d, const cuda_split &s, uint32_t split,
                                             uint32_t part, uint32_t first_head, uint32_t heads)
{
    share_state<HD, WARPS, PAIRS>(sh, st, heads);
    meet_warps<32 * WARPS>(1);
    finish<HD, WARPS>(sh, d, s, split, part, first_head, heads);
    if (s.split_count > 1) {
        meet_warps<32 * WARPS>(1);
        if (threadIdx.x == 0) {
            uint32_t *counter = d.counters + (uint64_t)s.row * d.parts + part, came;
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                         : "=r"(came)
                         : "l"(counter)
                         : "memory");
            sh.is_last = came == s.split_count - 1;
            if (sh.is_last)
                *counter = 0;
        }
        meet_warps<32 * WARPS>(1);
        if (sh.is_last) {
            combine_splits<HD, WARPS>(d, s, part, first_head, heads);
        }
    }
    meet_warps<32 * WARPS>(1);
}
