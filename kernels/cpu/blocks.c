/* blocks: see blocks.h. The layouts are those of the GGUF specification:
 *   Q4_0  d:f16 nibble[16]                  value i: low nibble of byte i, value 16 + i: its high nibble
 *   Q4_1  d:f16 m:f16 nibble[16]
 *   Q5_0  d:f16 high:u32 nibble[16]         bit i of `high` is bit 4 of value i
 *   Q5_1  d:f16 m:f16 high:u32 nibble[16]
 *   Q8_0  d:f16 value:i8[32]
 *   Q4_K  d:f16 dmin:f16 scales[12] nibble[128]                   256 values, 8 blocks of 32
 *   Q5_K  d:f16 dmin:f16 scales[12] high[32] nibble[128]          bit b of high[i]: bit 4 of value i of block b
 *   Q6_K  nibble[128] high[64] scale:i8[16] d:f16                 256 values, 16 scales of 16 */
#include "kernels/cpu/blocks.h"

static void read_nibbles(const uint8_t *nibbles, const uint8_t *high, int8_t code[static 32])
{
    uint32_t bits = high ? load_le32(high) : 0;
    for (unsigned i = 0; i < 16; i++) {
        code[i] = (int8_t)((nibbles[i] & 15) | (bits >> i & 1) << 4);
        code[16 + i] = (int8_t)(nibbles[i] >> 4 | (bits >> (16 + i) & 1) << 4);
    }
}

/* Eight 6-bit scales and eight 6-bit minima in 12 bytes: the low six bits of 0..3 in bytes 0..3 and 4..7;
 * of 4..7 the low four in bytes 8..11, the high two on top of bytes 0..3 and 4..7. */
static void read_scale_and_min(const uint8_t *packed, unsigned block, int8_t *scale, uint8_t *min)
{
    if (block < 4) {
        *scale = (int8_t)(packed[block] & 63);
        *min = packed[block + 4] & 63;
    } else {
        *scale = (int8_t)((packed[block + 4] & 15) | (packed[block - 4] >> 6) << 4);
        *min = (uint8_t)(packed[block + 4] >> 4 | (packed[block] >> 6) << 4);
    }
}

void weight_scales_read(uint32_t type, const void *super, unsigned block, struct weight_block *out)
{
    const uint8_t *bytes = super;
    if (type == GGUF_Q6_K) {
        memcpy(out->scale, bytes + 192 + 2 * block, 2);
        return;
    }
    read_scale_and_min(bytes + 4, block, &out->scale[0], &out->min);
    out->scale[1] = out->scale[0];
}

static void read_k45(uint32_t type, const uint8_t *super, unsigned block, struct weight_block *out)
{
    const uint8_t *high = super + 16, *nibbles = super + (type == GGUF_Q5_K ? 48 : 16) + 32 * (block / 2);
    out->d = load_le16(super);
    out->m = load_le16(super + 2);
    weight_scales_read(type, super, block, out);
    for (unsigned i = 0; i < 32; i++) {
        unsigned code = nibbles[i] >> (block % 2 * 4) & 15;
        if (type == GGUF_Q5_K)
            code |= (high[i] >> block & 1u) << 4;
        out->code[i] = (int8_t)code;
    }
}

static void read_k6(const uint8_t *super, unsigned block, struct weight_block *out)
{
    unsigned half = block / 4, quarter = block % 4;
    const uint8_t *low = super + 64 * half + 32 * (quarter % 2), *high = super + 128 + 32 * half;
    out->d = load_le16(super + 208);
    weight_scales_read(GGUF_Q6_K, super, block, out);
    for (unsigned i = 0; i < 32; i++)
        out->code[i] = (int8_t)((low[i] >> (quarter / 2 * 4) & 15) | (high[i] >> 2 * quarter & 3) << 4);
}

void weight_block_read(uint32_t type, const void *row, size_t index, struct weight_block *out)
{
    const uint8_t *bytes = row;
    *out = (struct weight_block){.scale = {1, 1}, .min = 1};
    const struct gguf_type_info *info = gguf_type_info(type);
    const uint8_t *b = bytes + index / (info->block_values / 32) * info->block_size;
    unsigned inner = (unsigned)(index % (info->block_values / 32));
    out->d = load_le16(b);
    switch (type) {
    case GGUF_Q4_0:
        read_nibbles(b + 2, NULL, out->code);
        break;
    case GGUF_Q4_1:
        out->m = load_le16(b + 2);
        read_nibbles(b + 4, NULL, out->code);
        break;
    case GGUF_Q5_0:
        read_nibbles(b + 6, b + 2, out->code);
        break;
    case GGUF_Q5_1:
        out->m = load_le16(b + 2);
        read_nibbles(b + 8, b + 4, out->code);
        break;
    case GGUF_Q8_0:
        memcpy(out->code, b + 2, 32);
        break;
    case GGUF_Q6_K:
        read_k6(b, inner, out);
        break;
    default:
        read_k45(type, b, inner, out);
        break;
    }
}

float weight_block_d(uint32_t type, const struct weight_block *b)
{
    float d = f16_to_f32(b->d);
    return type == GGUF_Q4_K || type == GGUF_Q5_K ? d * (float)b->scale[0] : d; /* exact: 11 by 6 bits */
}

float weight_block_m(uint32_t type, const struct weight_block *b)
{
    float m = f16_to_f32(b->m);
    return type == GGUF_Q4_K || type == GGUF_Q5_K ? -(m * (float)b->min) : m;
}

size_t weight_row_size(uint32_t type, uint32_t columns)
{
    const struct gguf_type_info *info = gguf_type_info(type);
    return (size_t)columns / info->block_values * info->block_size;
}

static void quantised_to_f32(uint32_t type, const void *row, size_t first, size_t count, float *out)
{
    int offset = weight_code_offset(type);
    for (size_t i = 0; i < count; i += 32) {
        struct weight_block b;
        weight_block_read(type, row, (first + i) / 32, &b);
        float d = weight_block_d(type, &b), m = weight_block_m(type, &b);
        for (unsigned k = 0; k < 32; k++) {
            float scale = type == GGUF_Q6_K ? d * (float)b.scale[k / 16] : d;
            float value = scale * (float)(b.code[k] - offset);
            out[i + k] = weight_has_minimum(type) ? value + m : value;
        }
    }
}

void weight_row_to_f32(uint32_t type, const void *row, size_t first, size_t count, float *out)
{
    const uint8_t *bytes = row; /* a file's tensors need not be aligned for their type */
    switch (type) {
    case GGUF_F32:
        memcpy(out, bytes + 4 * first, 4 * count);
        break;
    case GGUF_F16:
        for (size_t i = 0; i < count; i++)
            out[i] = f16_to_f32(load_le16(bytes + 2 * (first + i)));
        break;
    case GGUF_BF16:
        for (size_t i = 0; i < count; i++)
            out[i] = float_from_bits((uint32_t)load_le16(bytes + 2 * (first + i)) << 16);
        break;
    default:
        quantised_to_f32(type, row, first, count, out);
        break;
    }
}
