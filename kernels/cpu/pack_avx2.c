/* pack_avx2: weights from the file's blocks into the tiles that avx2.h describes. Runs once a matrix; plain code. */
#if defined(__x86_64__)
#include "kernels/cpu/avx2.h"

size_t avx2_pack_size(const struct cpu_matrix *m)
{
    return packed_tile_size(m->type, m->columns) * tile_count(&cpu_ops_avx2, m);
}

static void pack_codes(uint32_t type, const struct weight_block rows[TILE_ROWS], uint8_t *body)
{
    for (unsigned row = 0; row < TILE_ROWS; row++) {
        for (unsigned column = 0; column < NUMERICS_BLOCK; column++) {
            unsigned g = column / 4, at = 4 * row + column % 4;
            uint8_t code = (uint8_t)rows[row].code[column];
            if (type == GGUF_Q8_0) {
                body[32 * g + at] = code;
                continue;
            }
            body[32 * (g / 2) + at] |= (uint8_t)((code & 15) << (g % 2 * 4));
            if (packed_body_size(type) == 160)
                body[128 + at] |= (uint8_t)((code >> 4) << g);
            else if (type == GGUF_Q6_K)
                body[128 + 32 * (g / 4) + at] |= (uint8_t)((code >> 4) << (2 * (g % 4)));
        }
    }
}

/* One block's part of the heads; `block` counts from the start of the tile. */
static void pack_head(uint32_t type, const struct weight_block rows[TILE_ROWS], size_t block, uint8_t *heads)
{
    bool six = type == GGUF_Q6_K, k45 = type == GGUF_Q4_K || type == GGUF_Q5_K,
         minimum = weight_has_minimum(type);
    size_t d_size = minimum ? 32 : 16;
    uint8_t *super = six || k45 ? heads + block / 8 * (d_size + 128) : heads + block * d_size;
    uint8_t *scales = super + d_size + block % 8 * 16;
    for (unsigned row = 0; row < TILE_ROWS; row++) {
        store_le16(super + 2 * row, rows[row].d);
        if (minimum)
            store_le16(super + 16 + 2 * row, rows[row].m);
        if (six || k45) {
            scales[row] = (uint8_t)rows[row].scale[0];
            scales[8 + row] = six ? (uint8_t)rows[row].scale[1] : rows[row].min;
        }
    }
}

static void pack_quantised(const struct cpu_matrix *m, uint32_t tile, uint8_t *out)
{
    uint32_t blocks = m->columns / NUMERICS_BLOCK;
    size_t row_size = weight_row_size(m->type, m->columns), body_size = packed_body_size(m->type);
    const uint8_t *source = m->source;
    uint8_t *heads = out + body_size * blocks;
    memset(out, 0, packed_tile_size(m->type, m->columns));
    for (uint32_t block = 0; block < blocks; block++) {
        struct weight_block rows[TILE_ROWS] = {0};
        for (uint32_t row = 0; row < TILE_ROWS && tile * TILE_ROWS + row < m->rows; row++)
            weight_block_read(m->type, source + row_size * (tile * TILE_ROWS + row), block, &rows[row]);
        pack_codes(m->type, rows, out + body_size * block);
        pack_head(m->type, rows, block, heads);
    }
}

static void pack_float(const struct cpu_matrix *m, uint32_t tile, uint8_t *out)
{
    size_t value_size = m->type == GGUF_F32 ? 4 : 2, row_size = value_size * m->columns;
    const uint8_t *source = m->source;
    memset(out, 0, row_size * TILE_ROWS);
    for (uint32_t row = 0; row < TILE_ROWS && tile * TILE_ROWS + row < m->rows; row++) {
        const uint8_t *from = source + row_size * (tile * TILE_ROWS + row);
        for (uint32_t column = 0; column < m->columns; column++)
            memcpy(out + value_size * ((size_t)column * TILE_ROWS + row), from + value_size * column,
                   value_size);
    }
}

void avx2_pack(const struct cpu_matrix *m, uint32_t tile_begin, uint32_t tile_end)
{
    size_t tile_size = packed_tile_size(m->type, m->columns);
    for (uint32_t tile = tile_begin; tile < tile_end; tile++) {
        uint8_t *out = (uint8_t *)m->packed + tile_size * tile;
        if (weight_is_quantised(m->type))
            pack_quantised(m, tile, out);
        else
            pack_float(m, tile, out);
    }
}
#endif
