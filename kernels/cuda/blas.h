/* blas: products with many rows through cuBLASLt, opened at run time, so that programs start without it.
 * Plans (the library's choice of kernel) are kept for the last BLAS_PLANS shapes. */
#ifndef TANDEM_KERNELS_CUDA_BLAS_H
#define TANDEM_KERNELS_CUDA_BLAS_H
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct blas;
/* NULL: the library is not on this machine, or does not start; `why` says what. One device, one stream. */
struct blas *blas_create(cudaStream_t stream, char *why, size_t size);
void blas_destroy(struct blas *b);

struct blas_product { /* out[R][N] (+)= act[R][K] * w[N][K]^T, 16-bit operands, f32 sums */
    const void *w, *act;
    void *out;
    uint32_t rows, n, k, act_stride, out_stride; /* strides in values */
    bool bf16;                                   /* operands, and a 16-bit out; else f16 */
    bool out_f32, add;                           /* add: to what is in out */
};
/* NULL, or why it could not be started: a text that stays. */
const char *blas_run(struct blas *b, const struct blas_product *p);

#endif
