/* blocks: the quantised blocks of a GGUF tensor, opened into a common form of 32 values. Reference code:
 * plain and the same for every instruction set; kernels that need speed repack the weights once (tiles.h). */
#ifndef TANDEM_KERNELS_CPU_BLOCKS_H
#define TANDEM_KERNELS_CPU_BLOCKS_H
#include "kernels/cpu/numerics.h"
#include "shared/gguf.h"

/* 32 values of one row: value i is (d * scale[i / 16]) * (code[i] - offset) + m, offset by type. */
struct weight_block {
    int8_t code[NUMERICS_BLOCK]; /* as stored: 0..15, 0..31, 0..63; Q8_0 is signed */
    uint16_t d, m;               /* f16 bits; m is dmin for Q4_K and Q5_K, 0 for types without a minimum */
    int8_t scale[2];             /* Q6_K: of each half; Q4_K, Q5_K: both the same, 0..63; others 1 */
    uint8_t min;                 /* Q4_K, Q5_K: 0..63; others 1 */
};

/* Inline, as kernels ask with a type that the compiler knows. */
static inline bool weight_is_quantised(uint32_t type)
{
    return type != GGUF_F32 && type != GGUF_F16 && type != GGUF_BF16;
}

static inline bool weight_has_minimum(uint32_t type)
{
    return type == GGUF_Q4_1 || type == GGUF_Q5_1 || type == GGUF_Q4_K || type == GGUF_Q5_K;
}

static inline int weight_code_offset(uint32_t type)
{
    return type == GGUF_Q4_0 ? 8 : type == GGUF_Q5_0 ? 16 : type == GGUF_Q6_K ? 32 : 0;
}

/* Block `index` (of 32 values) of a row of quantised weights. */
void weight_block_read(uint32_t type, const void *row, size_t index, struct weight_block *out);
/* Only scale and min, of block 0..7 of 256 values of a K type. */
void weight_scales_read(uint32_t type, const void *super, unsigned block, struct weight_block *out);
float weight_block_d(uint32_t type, const struct weight_block *b); /* dw of cpu-v1 */
float weight_block_m(uint32_t type, const struct weight_block *b); /* mw of cpu-v1 */

size_t weight_row_size(uint32_t type, uint32_t columns); /* bytes */
/* Any type to f32: values [first, first + count); count a multiple of 32 for quantised types, first too. */
void weight_row_to_f32(uint32_t type, const void *row, size_t first, size_t count, float *out);

#endif
