/* panel: quantised activations of a few rows side by side, as the integer kernels read them: one pointer and constant
 * distances instead of four pointers a row, and a piece that stays in the first-level cache while tiles of weights
 * stream past. Filled on the stack for each call of a product: some hundred cycles against some ten thousand. */
#ifndef TANDEM_KERNELS_CPU_PANEL_H
#define TANDEM_KERNELS_CPU_PANEL_H
#include "kernels/cpu/ops.h"

#define PANEL_ROW_BLOCKS 256 /* row by row of 32 columns: fewer rows, longer pieces */
/* a multiple of the 8 that K types want together */
#define PANEL_BLOCKS(rows) (PANEL_ROW_BLOCKS / (size_t)(rows))

/* A block of `rows` rows: q i8[rows][32], d f32[rows], s f32[rows], start i32[rows], half i32[rows]. start: what a sum of
 * unsigned codes begins with to come out centred, -offset * sum(q). half: sum(q of the first 16 columns). */
#define PANEL_ROW_SIZE    48
#define PANEL_SIZE        (PANEL_ROW_BLOCKS * PANEL_ROW_SIZE)
#define PANEL_D(rows)     (32 * (size_t)(rows))
#define PANEL_S(rows)     (36 * (size_t)(rows))
#define PANEL_START(rows) (40 * (size_t)(rows))
#define PANEL_HALF(rows)  (44 * (size_t)(rows))

/* Many rows (matmul_many.h). */
#define MANY_ROWS   8   /* from as many on */
#define PAIR        2   /* tiles side by side */
#define OPEN_ROWS   4   /* rows of activations that meet a pair at a time */
#define OPEN_BLOCKS 16  /* of a pair at a time: they stay in the first-level cache */
#define PART_BLOCKS 32  /* of activations at a time */
#define PART_ROWS   128 /* that a pair is opened for: their panels stay in the second-level cache */
#define GROUP_SIZE  ((size_t)PANEL_ROW_SIZE * OPEN_ROWS) /* bytes of a block of four rows */

/* Blocks [begin, begin + count) of rows [row, row + rows). */
static inline void panel_fill(const struct activations *a, size_t row, unsigned rows, size_t begin,
                              size_t count, int32_t offset, uint8_t *panel)
{
    for (unsigned r = 0; r < rows; r++) {
        const int8_t *q = a->q + (row + r) * a->q_stride + begin * NUMERICS_BLOCK;
        const size_t at = (row + r) * a->block_stride + begin;
        uint8_t *block = panel;
        for (size_t i = 0; i < count; i++, block += (size_t)PANEL_ROW_SIZE * rows) {
            const int32_t start = -offset * a->sum[at + i];
            memcpy(block + 32 * (size_t)r, q + i * NUMERICS_BLOCK, NUMERICS_BLOCK);
            memcpy(block + PANEL_D(rows) + 4 * (size_t)r, a->d + at + i, 4);
            memcpy(block + PANEL_S(rows) + 4 * (size_t)r, a->s + at + i, 4);
            memcpy(block + PANEL_START(rows) + 4 * (size_t)r, &start, 4);
        }
    }
}

#endif
