/* matmul_dotprod_neon: products with sdot (matmul_neon.h), for processors that have it. */
#if defined(__aarch64__)
#include "kernels/cpu/neon.h"

#define NEON_TARGET                     __attribute__((target("arch=armv8.2-a+dotprod")))
#define NEON_MATMUL                     neon_dotprod_matmul
#define NEON_DOT(acc, weights, q, lane) vdotq_laneq_s32(acc, weights, q, lane)
#include "kernels/cpu/matmul_neon.h"
#endif
