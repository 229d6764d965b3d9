/* det_kernels: products and attention whose results for a row depend on that row alone (numerics cuda-det-v2); det_product.cu and
 * det_attention.cuh have the rules. */
#ifndef TANDEM_KERNELS_CUDA_DET_KERNELS_H
#define TANDEM_KERNELS_CUDA_DET_KERNELS_H
#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_DET_SPAN   128          /* columns */
#define CUDA_DET_RUNS   8            /* of spans; each is summed up by itself */
#define CUDA_DET_FEW    64           /* rows that need no buffers */
#define CUDA_DET_SHARED (128 * 1024) /* bytes of shared memory that a block must be able to have */

struct cuda_det_buffers { /* on the device, for more rows */
    void *w;              /* opened weights: as many rows at a time as go in, at least 128; or sums */
    uint64_t w_size;
    void *act; /* cuda_det_act_size of the product */
};
uint64_t cuda_det_act_size(uint32_t rows, uint32_t columns);
/* Any number of rows; epilogue: all but CUDA_SWIGLU16. */
void cuda_det_product(cudaStream_t s, const struct cuda_product *p, const struct cuda_det_buffers *b);
/* Weights of act's 16-bit kind, as they lie; b->act: as cuda_det_product lays it out. False: not on this device, or not for these; nothing
 * was started. */
bool cuda_det_streams(const struct cuda_product *p);
bool cuda_det_stream(cudaStream_t s, const struct cuda_product *p, const struct cuda_det_buffers *b);

#define CUDA_DET_SPLIT_TOKENS 2048 /* of attention, on absolute positions */

/* One row a sequence, each with one split of all its pages, or with all that the rule has: the bits that cuda_attention_hopper makes of it with
 * fixed_splits. partial, counters: as cuda_attention_decode's, splits without those of rows that have one. */
bool cuda_det_attention_has(uint32_t head_dim, uint32_t heads_per_kv_head); /* on this device */
void cuda_det_attention(cudaStream_t s, const struct cuda_attention *a, const struct cuda_split *splits,
                        uint32_t grid_splits, void *partial, uint32_t *counters);

#ifdef __cplusplus
}
#endif
#endif
