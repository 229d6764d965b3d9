/* kv_8bit: pages whose KV has 8 bits. A page is [layer][kv_head], and of each
 *     codes of K  [64 tokens][head_dim]      codes of V  the same      S of K  f16 [64]      S of V  f16 [64]
 * so that all of a head comes by one copy. Codes: e4m3, or int8 + 128. Pieces of 16 codes of a token are exchanged by the token's low bits,
 * as far as it takes that the same piece of 8 tokens lies in different banks of shared memory.
 *
 * What S is and why it comes back from opened values: kernels/kv_dtype.h. */
#pragma once
#include "device.cuh"
#include "kernels.h"
#include <cuda_fp8.h>

__host__ __device__ __forceinline__ constexpr uint32_t kept_head_size(uint32_t head_dim)
{
    return 2 * 64 * head_dim + 2 * 64 * 2;
}

/* Where 16 codes of a token lie among a head's of K, or of V. */
__host__ __device__ __forceinline__ constexpr uint32_t kept_at(uint32_t head_dim, uint32_t token,
                                                               uint32_t piece)
{
    uint32_t pieces = head_dim / 16, turn = pieces % 8 == 0              ? token % 8
                                            : pieces == 4                ? token / 2 % 4
                                            : pieces == 2 || pieces == 6 ? token / 4 % 2
                                                                         : 0;
    return token * head_dim + (piece ^ turn) * 16;
}

template <kv_dtype T> struct kept {
    static constexpr float one = T == KV_DTYPE_FP8 ? 1.0f / 128 : 1.0f / 127; /* of S, for a code of 1 */
};

/* --- two codes to f16 ------------------------------------------------------------------------- */

/* Codes A and B, bytes of x. */
template <kv_dtype T, int A, int B> __device__ __forceinline__ uint32_t open_codes(uint32_t x)
{
    if (T == KV_DTYPE_INT8) /* 1024 + code + 128, which has its last bit at 1 */
        return half2_bits(
            __hsub2(bits_half2(__byte_perm(x, 0x64646464u, 0x4040 | A | B << 8)), bits_half2(0x64806480u)));
#if __CUDA_ARCH__ >= 890
    uint32_t y;
    uint16_t two = (uint16_t)(A == 0 && B == 1   ? x
                              : A == 2 && B == 3 ? x >> 16
                                                 : __byte_perm(x, 0, A | B << 4));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(two));
    return y;
#else /* the exponent is 8 too small as it stands */
    uint32_t high = __byte_perm(x, 0, 0x0404 | A << 4 | B << 12);
    return half2_bits(
        __hmul2(bits_half2((high & 0x80008000u) | (high >> 1 & 0x3f803f80u)), bits_half2(0x5c005c00u)));
#endif
}

/* --- a row ------------------------------------------------------------------------------------ */

/* Of a row's largest f16 value: what comes before a code is made of a value, and S. */
template <kv_dtype T> __device__ __forceinline__ float scale_of(float most, half &s)
{
    if (T == KV_DTYPE_INT8) {
        s = __float2half_rn(most);
        return most > 0.0f ? 127.0f / most : 0.0f;
    }
    /* 2^k, the least for which `most`, with 4 bits as it will have, is at most 448 = 1.75 * 2^8 of it; f16 has none below 2^-24 */
    uint32_t bits = __float_as_uint(most);
    bits += 0x7ffffu + (bits >> 20 & 1);
    int k = (int)(bits >> 23) - 127 - 8 + ((bits >> 20 & 7) > 6);
    k = max(k, -24);
    s = __float2half_rn(__uint_as_float((uint32_t)(127 + k + 7) << 23));
    return __uint_as_float((uint32_t)(127 - k) << 23);
}

template <kv_dtype T> __device__ __forceinline__ uint32_t code_of(float x)
{
    if (T == KV_DTYPE_INT8)
        return (uint32_t)(min(max(__float2int_rn(x), -127), 127) + 128);
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

#define ROW_PARTS 2 /* of 128 values, 4 a lane: heads up to 256 wide */

/* A warp writes a row. head: of the page; v: values that f16 holds, 0 behind the row's end. */
template <kv_dtype T>
__device__ __forceinline__ void keep_row(uint8_t *head, uint32_t head_dim, bool is_v, uint32_t token,
                                         const float v[ROW_PARTS][4])
{
    uint32_t lane = threadIdx.x % 32;
    float most = 0.0f;
    half s;
#pragma unroll
    for (int p = 0; p < ROW_PARTS; p++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            most = fmaxf(most, fabsf(v[p][i]));
    for (int i = 16; i > 0; i /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
    float scale = scale_of<T>(most, s);
    uint8_t *codes = head + (is_v ? 64 * head_dim : 0);
#pragma unroll
    for (int p = 0; p < ROW_PARTS; p++) {
        uint32_t at = 128 * p + 4 * lane, four = 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            four |= code_of<T>(v[p][i] * scale) << 8 * i;
        if (at < head_dim)
            *(uint32_t *)(codes + kept_at(head_dim, token, at / 16) + at % 16) = four;
    }
    if (lane == 0)
        ((half *)(head + 128 * head_dim))[(is_v ? 64 : 0) + token] = s;
}

/* The row's values of a lane; 0 behind its end. What is not finite becomes a number: nobody's tokens must not spoil a page. */
__device__ __forceinline__ void load_row(float v[ROW_PARTS][4], const uint16_t *row, uint32_t head_dim)
{
#pragma unroll
    for (int p = 0; p < ROW_PARTS; p++) {
        uint32_t at = 128 * p + 4 * (threadIdx.x % 32);
        uint2 raw = at < head_dim ? *(const uint2 *)(row + at) : make_uint2(0, 0);
        v[p][0] = clamp_f16(from_bits<false>((uint16_t)raw.x));
        v[p][1] = clamp_f16(from_bits<false>((uint16_t)(raw.x >> 16)));
        v[p][2] = clamp_f16(from_bits<false>((uint16_t)raw.y));
        v[p][3] = clamp_f16(from_bits<false>((uint16_t)(raw.y >> 16)));
    }
}
