/* kv_kernels: launchers of the kernels that bring KV in and out of pages, beside those of the steps (kernels.h). Each puts work on
 * a stream and returns. A page holds [layer][K|V][kv_head][64 tokens][head_dim] f16. */
#ifndef TANDEM_KERNELS_CUDA_KV_KERNELS_H
#define TANDEM_KERNELS_CUDA_KV_KERNELS_H
#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- pieces: codec.cu ------------------------------------------------------------------------- */

enum cuda_piece_form {
    CUDA_PIECE_RAW,    /* body: f16 */
    CUDA_PIECE_PLANES, /* body: low bytes of all values; side: high bytes (level L0, its planes opened) */
    CUDA_PIECE_L1      /* body: int8; side: a scale index for 64 values */
};

struct cuda_piece {      /* values [kv_head][token][head_dim] on their way into a page */
    uint64_t body, side; /* where they begin in the staged bytes; body at a multiple of 16, side of 8 */
    uint64_t out;        /* of the first token's values of head 0, in values from `pages` */
    uint32_t value_count, row_values; /* row_values: token_count * head_dim, one head's */
    uint32_t form;
};
/* pieces: [count] on the device. l1_scales: f32 [256]. head_values: 64 * head_dim; head_dim a multiple of 8. bad[i]
 * becomes 1 where piece i holds what no piece may: a code that L1 forbids, or a value that is not finite. */
void cuda_pieces_decode(cudaStream_t s, const uint8_t *staged, const struct cuda_piece *pieces,
                        uint32_t count, uint32_t values_max, const float *l1_scales, uint32_t head_values,
                        uint16_t *pages, uint8_t *bad);

/* --- swap: swap.cu ---------------------------------------------------------------------------- */

/* One layer of `count` pages between the pages and pinned host memory, [count][layer_size] bytes there, by a few blocks that leave
 * the rest of the device to other work. page_list: on the device. layer_size a multiple of 16. */
void cuda_swap_layer(cudaStream_t s, uint8_t *layer, uint64_t page_size, const uint32_t *page_list,
                     uint32_t count, uint64_t layer_size, uint8_t *host, int to_host, uint32_t blocks);

#ifdef __cplusplus
}
#endif
#endif
