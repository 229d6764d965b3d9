/* tiles: weights repacked for vectors with one 32-bit lane a row, so that sums need no shuffles and a vector of results
 * leaves in one store. `rows` rows of a matrix (8 with AVX2, 16 with AVX-512) form a tile; rows behind the last are zero.
 *
 *   quantised   tile = [codes of unit 0][codes of unit 1] ... [heads of unit 0] ...
 *     A unit is what shares d in the file: 32 columns, or 256 (8 blocks of 32) of the K types. Its codes are vectors of
 *     4 bytes a row: dword k of a row's codes in the file is lane `row` of vector k, so packing only moves dwords. The
 *     codes of columns 4 * g .. 4 * g + 3 of block b of the unit are
 *       Q4_0 Q4_1  nibble g / 4 of vector g % 4
 *       Q5_0 Q5_1  the same; bit 4 of byte j is bit g of byte j of vector 4
 *       Q8_0       vector g; signed, or with 128 added when `flip`
 *       Q4_K Q5_K  nibble b % 2 of vector 8 * (b / 2) + g; Q5_K: bit 4 is bit b of vector 32 + g
 *       Q6_K       nibble b % 4 / 2 of vector 16 * (b / 4) + 8 * (b % 2) + g; bits 4 and 5 are bits 2 * (b % 4) and the
 *                  next of vector 32 + 8 * (b / 4) + g
 *     Heads of a unit: d f16[rows]; m (dmin) f16[rows] of types with a minimum; of K types, for each block,
 *     scale[0] i8[rows] and scale[1] (Q6_K) or min (Q4_K, Q5_K) u8[rows].
 *   float       [column][rows] in the type of the file */
#ifndef TANDEM_KERNELS_CPU_TILES_H
#define TANDEM_KERNELS_CPU_TILES_H
#include "kernels/cpu/ops.h"

static inline bool tile_is_super(uint32_t type) /* units of 256 columns */
{
    return type == GGUF_Q4_K || type == GGUF_Q5_K || type == GGUF_Q6_K;
}

static inline uint32_t tile_unit_blocks(uint32_t type)
{
    return tile_is_super(type) ? 8 : 1;
}

static inline uint32_t tile_unit_vectors(uint32_t type)
{
    switch (type) {
    case GGUF_Q5_0:
    case GGUF_Q5_1:
        return 5;
    case GGUF_Q8_0:
        return 8;
    case GGUF_Q4_K:
        return 32;
    case GGUF_Q5_K:
        return 40;
    case GGUF_Q6_K:
        return 48;
    default:
        return 4;
    }
}

static inline size_t tile_head_size(uint32_t type, uint32_t rows) /* of a unit */
{
    return (size_t)rows * ((weight_has_minimum(type) ? 4 : 2) + (tile_is_super(type) ? 16 : 0));
}

static inline size_t tile_codes_size(uint32_t type, uint32_t columns, uint32_t rows)
{
    return (size_t)columns / NUMERICS_BLOCK / tile_unit_blocks(type) * tile_unit_vectors(type) * 4 * rows;
}

/* A multiple of 64, so that every tile begins on a cache line. */
static inline size_t tile_size(uint32_t type, uint32_t columns, uint32_t rows)
{
    if (!weight_is_quantised(type))
        return align_up(weight_row_size(type, columns) * rows, 64);
    size_t units = columns / NUMERICS_BLOCK / tile_unit_blocks(type);
    return align_up(tile_codes_size(type, columns, rows) + units * tile_head_size(type, rows), 64);
}

/* Where block `begin`, the first of a unit, of a tile of quantised weights lies. */
struct tile_part {
    const uint8_t *unit, *head;
    size_t unit_size, head_size, tile_size;
};

static inline struct tile_part tile_part_at(const uint32_t type, const struct cpu_matrix *m,
                                            const uint32_t rows, uint32_t tile, size_t begin)
{
    struct tile_part p = {.unit_size = (size_t)4 * rows * tile_unit_vectors(type),
                          .head_size = tile_head_size(type, rows),
                          .tile_size = tile_size(type, m->columns, rows)};
    const uint8_t *base = (const uint8_t *)m->packed + p.tile_size * tile;
    const size_t unit = begin / tile_unit_blocks(type);
    p.unit = base + p.unit_size * unit;
    p.head = base + tile_codes_size(type, m->columns, rows) + p.head_size * unit;
    return p;
}

/* Tiles [begin, end) from m->source into m->packed. */
void tiles_pack(const struct cpu_matrix *m, uint32_t rows, bool flip, uint32_t begin, uint32_t end);

#endif
