/* kv_kernels: launchers of the kernels that bring KV in and out of pages, beside those of the steps (kernels.h). Each puts work on
 * a stream and returns. A page holds [layer][K|V][kv_head][64 tokens][head_dim] f16, or what kv_8bit.cuh says. */
#ifndef TANDEM_KERNELS_CUDA_KV_KERNELS_H
#define TANDEM_KERNELS_CUDA_KV_KERNELS_H
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- pieces: codec.cu ------------------------------------------------------------------------- */

enum cuda_piece_form {
    CUDA_PIECE_RAW,    /* body: f16 */
    CUDA_PIECE_PLANES, /* body: low bytes of all values; side: high bytes (level L0, its planes opened) */
    CUDA_PIECE_L1,     /* body: int8; side: scale indices */
    CUDA_PIECE_L2      /* body: the payload; none of its bits unused */
};

struct cuda_piece {      /* values [kv_head][token][head_dim] on their way into a page */
    uint64_t body, side; /* where they begin in the staged bytes; body at a multiple of 16, side of 8 */
    uint64_t out;        /* of the first token's values of head 0, in values from `pages` */
    uint32_t value_count, row_values; /* row_values: token_count * head_dim, one head's */
    uint32_t form;
    uint32_t group;                               /* values that share a scale at L1: 64 or 128 */
    uint32_t tokens, heads, head_dim, bits, wide; /* of L2: B, W */
    uint64_t
        kept_at; /* of 8-bit pages, where `out` is not in them: of the layer, in bytes from the first page */
    uint32_t first_token;
    bool is_value;
};
struct cuda_piece_tables { /* on the device */
    float l1_scale[256], l2_step[256];
    uint8_t l2_sign[64];
};
/* pieces: [count] on the device. rows_max: of L2's pieces, 0: there is none. head_values: between heads, 64 * head_dim, or 0: they lie
 * close together; head_dim a multiple of 8. bad[i]
 * becomes 1 where piece i holds what no piece may: a code that L1 forbids, or a value that is not finite. */
void cuda_pieces_decode(cudaStream_t s, const uint8_t *staged, const struct cuda_piece *pieces,
                        uint32_t count, uint32_t values_max, uint32_t rows_max,
                        const struct cuda_piece_tables *tables, uint32_t head_values, uint16_t *pages,
                        uint8_t *bad);

#ifdef __cplusplus
}
#endif
#endif
