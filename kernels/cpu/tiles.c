/* tiles: packs weights into the tiles of tiles.h. Plain code: it moves dwords, and start-up waits for pages rather than for it. */
#include "kernels/cpu/tiles.h"

/* Where the dwords of a block's codes lie in the file. */
struct code_run {
    uint32_t offset, count;
};

static void code_runs(uint32_t type, struct code_run runs[2])
{
    runs[1] = (struct code_run){0, 0};
    switch (type) {
    case GGUF_Q4_1:
        runs[0] = (struct code_run){4, 4};
        break;
    case GGUF_Q5_0:
        runs[0] = (struct code_run){6, 4};
        break;
    case GGUF_Q5_1:
        runs[0] = (struct code_run){8, 4};
        break;
    case GGUF_Q8_0:
        runs[0] = (struct code_run){2, 8};
        break;
    case GGUF_Q4_K:
        runs[0] = (struct code_run){16, 32};
        break;
    case GGUF_Q5_K:
        runs[0] = (struct code_run){48, 32};
        runs[1] = (struct code_run){16, 8};
        break;
    case GGUF_Q6_K:
        runs[0] = (struct code_run){0, 48}; /* nibbles, then pairs of bits */
        break;
    default:
        runs[0] = (struct code_run){2, 4};
        break;
    }
}

/* 32 bits, bit 4 * g + i for column 4 * g + i, to four bytes: bit g of byte i. */
static uint32_t turn_high_bits(uint32_t high)
{
    uint32_t out = 0;
    for (unsigned i = 0; i < 4; i++) {
        uint32_t t = high >> i & 0x11111111u;
        t = (t | t >> 3) & 0x03030303u;
        t = (t | t >> 6) & 0x000f000fu;
        out |= ((t | t >> 12) & 0xffu) << 8 * i;
    }
    return out;
}

static void pack_codes(uint32_t type, const uint8_t *block, uint32_t rows, uint32_t flip, uint8_t *out)
{
    struct code_run runs[2];
    code_runs(type, runs);
    for (unsigned run = 0; run < 2; run++) {
        const uint8_t *from = block + runs[run].offset;
        for (uint32_t k = 0; k < runs[run].count; k++, out += 4 * (size_t)rows)
            store_le32(out, load_le32(from + 4 * (size_t)k) ^ flip);
    }
    if (type == GGUF_Q5_0 || type == GGUF_Q5_1)
        store_le32(out, turn_high_bits(load_le32(block + (type == GGUF_Q5_0 ? 2 : 4))));
}

static void pack_head(uint32_t type, const uint8_t *block, uint32_t rows, uint32_t row, uint8_t *head)
{
    memcpy(head + 2 * (size_t)row, block + (type == GGUF_Q6_K ? 208 : 0), 2);
    head += 2 * (size_t)rows;
    if (weight_has_minimum(type)) {
        memcpy(head + 2 * (size_t)row, block + 2, 2);
        head += 2 * (size_t)rows;
    }
    for (unsigned b = 0; tile_is_super(type) && b < 8; b++, head += 2 * (size_t)rows) {
        struct weight_block scales;
        weight_scales_read(type, block, b, &scales);
        head[row] = (uint8_t)scales.scale[0];
        head[rows + row] = type == GGUF_Q6_K ? (uint8_t)scales.scale[1] : scales.min;
    }
}

static void pack_quantised(const struct cpu_matrix *m, uint32_t rows, bool flip, uint32_t tile, uint8_t *out)
{
    const size_t units = m->columns / NUMERICS_BLOCK / tile_unit_blocks(m->type),
                 block_size = gguf_type_info(m->type)->block_size,
                 unit_size = 4 * (size_t)rows * tile_unit_vectors(m->type),
                 head_size = tile_head_size(m->type, rows);
    const uint32_t xor = flip && m->type == GGUF_Q8_0 ? 0x80808080u : 0,
                   held = TD_MIN(rows, m->rows - tile * rows);
    const uint8_t *source = (const uint8_t *)m->source + block_size * units * tile * rows;
    uint8_t *heads = out + unit_size * units;
    if (held < rows)
        memset(out, 0, tile_size(m->type, m->columns, rows));
    for (size_t unit = 0; unit < units; unit++)
        for (uint32_t row = 0; row < held; row++) {
            const uint8_t *block = source + block_size * (units * row + unit);
            pack_codes(m->type, block, rows, xor, out + unit_size *unit + 4 * (size_t)row);
            pack_head(m->type, block, rows, row, heads + head_size * unit);
        }
}

static void pack_float(const struct cpu_matrix *m, uint32_t rows, uint32_t tile, uint8_t *out)
{
    const size_t value_size = m->type == GGUF_F32 ? 4 : 2, row_size = value_size * m->columns;
    const uint32_t held = TD_MIN(rows, m->rows - tile * rows);
    const uint8_t *source = (const uint8_t *)m->source + row_size * tile * rows;
    if (held < rows)
        memset(out, 0, row_size * rows);
    for (uint32_t column = 0; column < m->columns; column++)
        for (uint32_t row = 0; row < held; row++) {
            const uint8_t *from = source + row_size * row + value_size * column;
            uint8_t *to = out + value_size * ((size_t)column * rows + row);
            if (value_size == 4)
                memcpy(to, from, 4);
            else
                memcpy(to, from, 2);
        }
}

void tiles_pack(const struct cpu_matrix *m, uint32_t rows, bool flip, uint32_t begin, uint32_t end)
{
    const size_t size = tile_size(m->type, m->columns, rows);
    for (uint32_t tile = begin; tile < end; tile++) {
        uint8_t *out = (uint8_t *)m->packed + size * tile;
        if (weight_is_quantised(m->type))
            pack_quantised(m, rows, flip, tile, out);
        else
            pack_float(m, rows, tile, out);
    }
}
