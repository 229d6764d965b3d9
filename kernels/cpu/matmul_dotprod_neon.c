/* matmul_dotprod_neon: products with sdot (matmul_neon.h), for processors that have it. */
#if defined(__aarch64__)
#include "kernels/cpu/neon.h"

#define NEON_TARGET                  __attribute__((target("+dotprod")))
#define NEON_MATMUL                  neon_dotprod_matmul
#define NEON_DOT(acc, weights, four) vdotq_s32(acc, weights, four)
#include "kernels/cpu/matmul_neon.h"
#endif
