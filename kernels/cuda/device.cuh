/* device: what the kernels share: 16-bit conversions, tensor-core and copy instructions of sm_80, sums over a
 * block. */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "kernels.h"
#include <cuda_runtime.h>
#include <stdint.h>

#define F16_MAX 65504.0f

/* --- launching -------------------------------------------------------------------------------- */

/* Every launch answers for itself (launches.c): what kernel<<<>>> answers is thrown away by the compiler. */
template <class... P, class... A>
static void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream, A... args)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = stream;
    cuda_launched(cudaLaunchKernelEx(&config, kernel, (P)args...));
}

#define DEVICES_MAX 64
struct known_devices { /* what was found out about each, once */
    uint32_t plus_one[DEVICES_MAX];
};

/* What `ask` answers about the current device: a number, or yes or no; 0 of a device that does not answer. */
template <class ASK> static uint32_t known_of_device(known_devices &known, ASK ask)
{
    int device = 0;
    if (cudaGetDevice(&device))
        return 0;
    if (device >= DEVICES_MAX)
        return ask();
    if (known.plus_one[device] == 0)
        known.plus_one[device] = (uint32_t)ask() + 1;
    return known.plus_one[device] - 1;
}

/* Is a kernel's code for the current device one of sm_90 (the PTX of an older one, compiled by the driver, is not), and may a block have so
 * much shared memory? */
template <class... P> static bool has_hopper_code(void (*kernel)(P...), size_t shared)
{
    cudaFuncAttributes code;
    return !cudaFuncGetAttributes(&code, kernel) && code.ptxVersion >= 90 &&
           !cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
}

static inline uint32_t device_sm_count() /* of the current one; 0: it does not answer */
{
    int device = 0, count = 0;
    return cudaGetDevice(&device) ||
                   cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device)
               ? 0
               : (uint32_t)count;
}

/* --- 16-bit values ---------------------------------------------------------------------------- */

/* 2^x, to about 2 units in the last place; 0 far below. */
__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float clamp_f16(float x)
{
    return fminf(fmaxf(x, -F16_MAX), F16_MAX);
}
template <bool BF16> __device__ __forceinline__ uint16_t to_bits(float x)
{
    return BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x))
                : __half_as_ushort(__float2half_rn(clamp_f16(x)));
}
template <bool BF16> __device__ __forceinline__ float from_bits(uint16_t x)
{
    return BF16 ? __uint_as_float((uint32_t)x << 16) : __half2float(__ushort_as_half(x));
}
template <bool BF16> __device__ __forceinline__ uint32_t to_pair(float low, float high)
{
    return (uint32_t)to_bits<BF16>(low) | (uint32_t)to_bits<BF16>(high) << 16;
}
__device__ __forceinline__ uint32_t half2_bits(half2 h)
{
    return *reinterpret_cast<uint32_t *>(&h);
}
__device__ __forceinline__ half2 bits_half2(uint32_t u)
{
    return *reinterpret_cast<half2 *>(&u);
}

/* --- tensor cores ----------------------------------------------------------------------------- */

/* D[16][8] += A[16][16] * B[16][8]. Lane l = 4 * g + q holds A rows g and g + 8, B column g, D rows g and g + 8, columns 2q, 2q + 1. */
template <bool BF16>
__device__ __forceinline__ void mma(float d[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                    uint32_t b0, uint32_t b1)
{
    if (BF16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                     "{%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                     "{%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Four 8x8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8. */
__device__ __forceinline__ void ldmatrix(uint32_t r[4], const void *row)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(uint32_t r[4], const void *row)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ uint32_t transpose8x8(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* --- copies to shared memory ------------------------------------------------------------------ */

__device__ __forceinline__ void copy16_async(void *shared, const void *global)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(global) : "memory");
}
__device__ __forceinline__ void copies_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT> __device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

/* One page of one KV head, [64][HD] f16, into rows of HD + 8 values (16 bytes apart: no bank conflicts in ldmatrix). */
template <int HD, int THREADS> __device__ __forceinline__ void copy_page(half *shared, const half *global)
{
    constexpr int PIECES = HD / 8;
    for (int i = threadIdx.x; i < 64 * PIECES; i += THREADS) {
        int token = i / PIECES, piece = i % PIECES;
        copy16_async(shared + token * (HD + 8) + piece * 8, global + (size_t)i * 8);
    }
}

/* --- sums ------------------------------------------------------------------------------------- */

__device__ __forceinline__ float warp_sum(float x)
{
    for (int i = 16; i > 0; i /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, i);
    return x;
}

/* The sum over the block in every thread; `shared` holds 33 floats. */
__device__ __forceinline__ float block_sum(float x, float *shared)
{
    int warp = threadIdx.x / 32, count = (blockDim.x + 31) / 32;
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0)
        shared[warp] = x;
    __syncthreads();
    if (warp == 0) {
        float y = warp_sum((int)threadIdx.x < count ? shared[threadIdx.x] : 0.0f);
        if (threadIdx.x == 0)
            shared[32] = y;
    }
    __syncthreads();
    return shared[32];
}
