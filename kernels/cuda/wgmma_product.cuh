/* wgmma_product: as wgmma.cuh, for products of bf16 or f16: D[64][N] += A[64][16] * B[16][N], both operands from shared
 * memory with rows along M and N, or A from registers; D in N / 2 registers of a thread. */
#pragma once
#include "wgmma.cuh"

#define D4(i)   "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i)   D4(i), D4(i + 4)
#define D16(i)  D8(i), D8(i + 8)
#define D32(i)  D16(i), D16(i + 16)
#define D64(i)  D32(i), D32(i + 32)
#define D80(i)  D64(i), D16(i + 64)
#define D112(i) D64(i), D32(i + 64), D16(i + 96)
#define D128(i) D64(i), D64(i + 64)
#define NAMES8  "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES16                                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, "                                                                       \
    "%8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES32                                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, "                                                                       \
    "%8, %9, %10, %11, %12, %13, %14, %15, "                                                                 \
    "%16, %17, %18, %19, %20, %21, %22, %23, "                                                               \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES64                                                                                              \
    NAMES32 ", "                                                                                             \
            "%32, %33, %34, %35, %36, %37, %38, %39, "                                                       \
            "%40, %41, %42, %43, %44, %45, %46, %47, "                                                       \
            "%48, %49, %50, %51, %52, %53, %54, %55, "                                                       \
            "%56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES80                                                                                              \
    NAMES64 ", "                                                                                             \
            "%64, %65, %66, %67, %68, %69, %70, %71, "                                                       \
            "%72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES112                                                                                             \
    NAMES64 ", "                                                                                             \
            "%64, %65, %66, %67, %68, %69, %70, %71, "                                                       \
            "%72, %73, %74, %75, %76, %77, %78, %79, "                                                       \
            "%80, %81, %82, %83, %84, %85, %86, %87, "                                                       \
            "%88, %89, %90, %91, %92, %93, %94, %95, "                                                       \
            "%96, %97, %98, %99, %100, %101, %102, %103, "                                                   \
            "%104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES128                                                                                             \
    NAMES112 ", "                                                                                            \
             "%112, %113, %114, %115, %116, %117, %118, %119, "                                              \
             "%120, %121, %122, %123, %124, %125, %126, %127"

/* n: columns; count: registers; a, b, adds: the numbers of the operands behind them. */
#define WGMMA(n, count, type, a, b, p)                                                                       \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" p ", 0; wgmma.mma_async.sync.aligned.m64n" n             \
                 "k16.f32." type "." type " {" NAMES##count "}, %" a ", %" b ", p, 1, 1, 0, 0; }"            \
                 : D##count(0)                                                                               \
                 : "l"(w), "l"(x), "r"(adds))

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PRODUCT(n, count, a, b, p)                                                                           \
    template <bool BF16>                                                                                     \
    __device__ __forceinline__ void wgmma_product(float(&d)[count], uint64_t w, uint64_t x, int adds)        \
    {                                                                                                        \
        if (BF16)                                                                                            \
            WGMMA(n, count, "bf16", a, b, p);                                                                \
        else                                                                                                 \
            WGMMA(n, count, "f16", a, b, p);                                                                 \
    }
#else
#define PRODUCT(n, count, a, b, p)                                                                           \
    template <bool BF16>                                                                                     \
    __device__ __forceinline__ void wgmma_product(float(&)[count], uint64_t, uint64_t, int)                  \
    {                                                                                                        \
    }
#endif
/* D = A * B, or D += with `adds`. */
PRODUCT("16", 8, "8", "9", "10")
PRODUCT("32", 16, "16", "17", "18")
PRODUCT("64", 32, "32", "33", "34")
PRODUCT("128", 64, "64", "65", "66")
PRODUCT("160", 80, "80", "81", "82")
PRODUCT("224", 112, "112", "113", "114")
PRODUCT("256", 128, "128", "129", "130")
#undef PRODUCT
#undef WGMMA

/* a0 to p: the numbers of the operands behind D. A register of A may be changed once the instruction has been waited for. */
#define WGMMA(n, count, type, a0, a1, a2, a3, b, p)                                                          \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" p ", 0; wgmma.mma_async.sync.aligned.m64n" n             \
                 "k16.f32." type "." type " {" NAMES##count "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b   \
                 ", p, 1, 1, 0; }"                                                                           \
                 : D##count(0)                                                                               \
                 : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "l"(x), "r"(adds))

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PRODUCT(n, count, a0, a1, a2, a3, b, p)                                                              \
    template <bool BF16>                                                                                     \
    __device__ __forceinline__ void wgmma_product(float(&d)[count], uint32_t w0, uint32_t w1, uint32_t w2,   \
                                                  uint32_t w3, uint64_t x, int adds)                         \
    {                                                                                                        \
        if (BF16)                                                                                            \
            WGMMA(n, count, "bf16", a0, a1, a2, a3, b, p);                                                   \
        else                                                                                                 \
            WGMMA(n, count, "f16", a0, a1, a2, a3, b, p);                                                    \
    }
#else
#define PRODUCT(n, count, a0, a1, a2, a3, b, p)                                                              \
    template <bool BF16>                                                                                     \
    __device__ __forceinline__ void wgmma_product(float(&)[count], uint32_t, uint32_t, uint32_t, uint32_t,   \
                                                  uint64_t, int)                                             \
    {                                                                                                        \
    }
#endif
PRODUCT("16", 8, "8", "9", "10", "11", "12", "13")
PRODUCT("32", 16, "16", "17", "18", "19", "20", "21")
PRODUCT("64", 32, "32", "33", "34", "35", "36", "37")
PRODUCT("128", 64, "64", "65", "66", "67", "68", "69")
#undef PRODUCT
#undef WGMMA
