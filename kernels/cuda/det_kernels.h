/* det_kernels: products whose results for a row depend on that row alone (numerics cuda-det-v1); det_product.cu has the rule. */
#ifndef TANDEM_KERNELS_CUDA_DET_KERNELS_H
#define TANDEM_KERNELS_CUDA_DET_KERNELS_H
#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_DET_FEW    64           /* rows that need no buffers */
#define CUDA_DET_SHARED (128 * 1024) /* bytes of shared memory that a block must be able to have */

struct cuda_det_buffers { /* on the device, for more rows */
    void *w;              /* opened weights: as many rows at a time as go in, at least 128 */
    uint64_t w_size;
    void *act; /* cuda_det_act_size of the product */
};
uint64_t cuda_det_act_size(uint32_t rows, uint32_t columns);
/* Any number of rows; epilogue: all but CUDA_SWIGLU16. */
void cuda_det_product(cudaStream_t s, const struct cuda_product *p, const struct cuda_det_buffers *b);

#ifdef __cplusplus
}
#endif
#endif
