/* kv_8bit: launchers of what reads and writes pages whose KV has 8 bits (kernels/kv_dtype.h); kv_8bit.cuh has their layout. */
#ifndef TANDEM_KERNELS_CUDA_KV_8BIT_H
#define TANDEM_KERNELS_CUDA_KV_8BIT_H
#include "kernels.h"
#include "kv_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cuda_rope_write and cuda_attention_decode for such pages. */
void cuda_rope_8bit(cudaStream_t s, const struct cuda_rope *a);
void cuda_attention_8bit(cudaStream_t s, const struct cuda_attention *a, const struct cuda_split *splits,
                         uint32_t grid_splits, void *partial, uint32_t *counters);
/* Blocks that take splits in turns; 0: it is not so on this device, or not for these heads. */
uint32_t cuda_attention_8bit_blocks(uint32_t head_dim, uint32_t heads_per_kv_head);

/* A layer of several pages: number i begins at `kept` + stride * (list ? list[i] : i) bytes. Opened it is f16 [i][K|V][kv_head][64][head_dim]. */
struct cuda_kept {
    enum kv_dtype dtype;
    uint32_t kv_head_count, head_dim;
    void *kept;
    uint64_t stride;
    const uint32_t *list; /* on the device, or NULL */
};
void cuda_open_pages(cudaStream_t s, const struct cuda_kept *k, uint32_t count, void *opened);
void cuda_close_pages(cudaStream_t s, const struct cuda_kept *k, uint32_t count, const void *opened);

/* Pieces that cuda_pieces_decode laid out densely at `opened` + out, into pages: k->kept + kept_at is the layer's first byte. */
void cuda_close_pieces(cudaStream_t s, const struct cuda_kept *k, const struct cuda_piece *pieces,
                       uint32_t count, uint32_t rows_max, const void *opened);

#ifdef __cplusplus
}
#endif
#endif
