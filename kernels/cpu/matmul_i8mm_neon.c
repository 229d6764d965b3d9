/* matmul_i8mm_neon: products with smmla (matmul_neon.h), for processors that have it: two weight rows by two rows of
 * activations, eight columns an instruction, twice what sdot does. A single row of activations goes through sdot. */
#if defined(__aarch64__)
#include "kernels/cpu/neon.h"

#define NEON_TARGET                     __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#define NEON_MATMUL                     neon_i8mm_matmul
#define NEON_DOT(acc, weights, q, lane) vdotq_laneq_s32(acc, weights, q, lane)
#define NEON_MMLA                       vmmlaq_s32
#include "kernels/cpu/matmul_neon.h"
#endif
