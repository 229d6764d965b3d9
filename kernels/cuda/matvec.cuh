/* matvec: products with few rows on the tensor cores, for the kernels that hold one (matvec.cu) and the one that holds a whole step
 * (step.cu). matvec.cu says how it works. */
#pragma once
#include "device.cuh"
#include "kernels.h"

#define MATVEC_WARPS   8
#define MATVEC_THREADS (32 * MATVEC_WARPS)
#define SPAN           128 /* columns that the four lanes of a row take in one go: 32 each */

/* --- weights to A registers ------------------------------------------------------------------- */

/* What a form loads: LOADS x 16 bytes a row and span, VALUES of each; UNITS spans are loaded together so that about 64 bytes a
 * row are on their way. SCALE bytes for each GROUP of values. */
template <cuda_form F> struct form_of;
template <> struct form_of<CUDA_F32> {
    static constexpr int values = 4, units = 1, group = 0, scale = 0;
};
template <> struct form_of<CUDA_F16> {
    static constexpr int values = 8, units = 1, group = 0, scale = 0;
};
template <> struct form_of<CUDA_BF16> {
    static constexpr int values = 8, units = 1, group = 0, scale = 0;
};
template <> struct form_of<CUDA_W8> {
    static constexpr int values = 16, units = 2, group = 32, scale = 4;
};
template <> struct form_of<CUDA_W8D> {
    static constexpr int values = 16, units = 2, group = 32, scale = 2;
};
template <> struct form_of<CUDA_W8G16> {
    static constexpr int values = 16, units = 2, group = 16, scale = 4;
};
template <> struct form_of<CUDA_W4> {
    static constexpr int values = 32, units = 4, group = 32, scale = 4;
};

/* Four values from a load, as two registers of 16-bit pairs: values 4 * step to 4 * step + 3. */
template <cuda_form F, bool BF16>
__device__ __forceinline__ void open4(const uint4 &load, uint32_t scale, int step, uint32_t &low,
                                      uint32_t &high)
{
    const uint32_t *w = reinterpret_cast<const uint32_t *>(&load);
    if (F == CUDA_F32) {
        low = to_pair<BF16>(__uint_as_float(w[0]), __uint_as_float(w[1]));
        high = to_pair<BF16>(__uint_as_float(w[2]), __uint_as_float(w[3]));
    } else if (F == CUDA_F16 || (F == CUDA_BF16 && BF16)) {
        low = w[2 * step], high = w[2 * step + 1];
    } else if (F == CUDA_BF16) { /* beside weights of another type */
        uint32_t a = w[2 * step], b = w[2 * step + 1];
        low = to_pair<false>(__uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u));
        high = to_pair<false>(__uint_as_float(b << 16), __uint_as_float(b & 0xffff0000u));
    } else {
        half2 dm = bits_half2(scale), d = __low2half2(dm), m = __high2half2(dm), c0, c1;
        if (F == CUDA_W4) { /* 0x6400 | n is 1024 + n */
            uint32_t x = w[step / 2] >> (step % 2 * 8);
            c0 = __hsub2(bits_half2((x & 0x000f000fu) | 0x64006400u), __float2half2_rn(1024.0f));
            c1 = __hsub2(bits_half2((x >> 4 & 0x000f000fu) | 0x64006400u), __float2half2_rn(1024.0f));
        } else {
            c0 = __hsub2(bits_half2(__byte_perm(w[step], 0x64646464u, 0x4140)), __float2half2_rn(1152.0f));
            c1 = __hsub2(bits_half2(__byte_perm(w[step], 0x64646464u, 0x4342)), __float2half2_rn(1152.0f));
        }
        low = half2_bits(__hfma2(c0, d, m));
        high = half2_bits(__hfma2(c1, d, m));
    }
}

template <cuda_form F> struct stage { /* of two rows of W: UNITS spans */
    static constexpr int loads = 32 / form_of<F>::values, units = form_of<F>::units;
    uint4 w[2][units][loads];
    uint32_t scale[2][units][loads];
};

struct lane_rows { /* where a lane reads: rows g and g + 8 of the tile */
    const uint8_t *w[2];
    const uint8_t *scales[2];
    uint32_t columns, q;
};

template <cuda_form F>
__device__ __forceinline__ uint32_t column_of(const lane_rows &r, uint32_t span, int load)
{
    return span * SPAN + load * 4 * form_of<F>::values + r.q * form_of<F>::values;
}

/* (d, m) of a row's group; m is 0 where there is none. */
template <cuda_form F> __device__ __forceinline__ uint32_t load_scale(const uint8_t *scales, uint32_t group)
{
    return form_of<F>::scale == 2 ? __ldg((const uint16_t *)scales + group)
                                  : __ldg((const uint32_t *)scales + group);
}

template <cuda_form F>
__device__ __forceinline__ void load_stage(stage<F> &s, const lane_rows &r, uint32_t first_span)
{
    constexpr int values = form_of<F>::values;
#pragma unroll
    for (int u = 0; u < stage<F>::units; u++)
#pragma unroll
        for (int l = 0; l < stage<F>::loads; l++) {
            uint32_t column = column_of<F>(r, first_span + u, l);
            bool inside = column < r.columns;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                s.w[i][u][l] = make_uint4(0, 0, 0, 0);
                s.scale[i][u][l] = 0;
                if (inside) {
                    const uint4 *at = (const uint4 *)(r.w[i] + (uint64_t)column * 16 / values);
                    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(s.w[i][u][l].x), "=r"(s.w[i][u][l].y), "=r"(s.w[i][u][l].z),
                                   "=r"(s.w[i][u][l].w)
                                 : "l"(at));
                    if (form_of<F>::group)
                        s.scale[i][u][l] =
                            load_scale<F>(r.scales[i], column / (form_of<F>::group ? form_of<F>::group : 1));
                }
            }
        }
}

template <cuda_form F, bool BF16, int NT>
__device__ __forceinline__ void use_stage(float acc[NT][4], const stage<F> &s, const lane_rows &r,
                                          uint32_t first_span, const uint16_t *const act[NT])
{
    constexpr int values = form_of<F>::values;
#pragma unroll
    for (int u = 0; u < stage<F>::units; u++)
#pragma unroll
        for (int l = 0; l < stage<F>::loads; l++) {
            uint32_t column = column_of<F>(r, first_span + u, l);
            bool inside = column < r.columns;
            constexpr int pieces = values >= 8 ? values / 8 : 1;
#pragma unroll
            for (int p = 0; p < pieces; p++) { /* 8 (or 4) values */
                uint32_t b[NT][4];
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    b[t][0] = b[t][1] = b[t][2] = b[t][3] = 0;
                    if (inside && act[t]) {
                        const uint16_t *at = act[t] + column + p * 8;
                        if (values >= 8) {
                            uint4 v = *(const uint4 *)at;
                            b[t][0] = v.x, b[t][1] = v.y, b[t][2] = v.z, b[t][3] = v.w;
                        } else {
                            uint2 v = *(const uint2 *)at;
                            b[t][0] = v.x, b[t][1] = v.y;
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < (values >= 8 ? 2 : 1); i++) {
                    uint32_t a[4];
                    open4<F, BF16>(s.w[0][u][l], s.scale[0][u][l], p * 2 + i, a[0], a[2]);
                    open4<F, BF16>(s.w[1][u][l], s.scale[1][u][l], p * 2 + i, a[1], a[3]);
#pragma unroll
                    for (int t = 0; t < NT; t++)
                        mma<BF16>(acc[t], a[0], a[1], a[2], a[3], b[t][2 * i], b[t][2 * i + 1]);
                }
            }
        }
}

/* --- the end of a tile ------------------------------------------------------------------------ */

template <bool BF16>
__device__ __forceinline__ void write_out(const cuda_product &p, uint32_t r, uint32_t n, float value,
                                          float up)
{
    uint64_t at = (uint64_t)r * p.out_stride + n;
    switch (p.epilogue) {
    case CUDA_STORE16:
        ((uint16_t *)p.out)[at] = to_bits<BF16>(value);
        break;
    case CUDA_ADD_F32:
        atomicAdd((float *)p.out + at, value); /* nobody else adds to it; nothing waits for what was there */
        break;
    case CUDA_STORE_F32:
        ((float *)p.out)[at] = value;
        break;
    case CUDA_SWIGLU16:
        ((uint16_t *)p.out)[at] = to_bits<BF16>(value / (1.0f + __expf(-value)) * up);
        break;
    }
}
