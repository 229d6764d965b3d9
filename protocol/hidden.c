/* hidden: rows of the residual stream as HIDDEN carries them.
 *     f32   width little-endian floats a row: the engine's own values, bit for bit
 *     f16   width halves a row
 *     int8  one f32 scale, then width signed bytes a row; value = scale * byte, scale = largest magnitude / 127
 * A row with a value that is not finite is refused on both sides: it would poison every later token. */
#include "protocol/wire.h"
#include <math.h>

_Static_assert(sizeof(float) == 4, "IEEE binary32");

#define INT8_TOP 127.0f

static size_t row_size(enum hidden_dtype dtype, uint32_t width)
{
    switch (dtype) {
    case HIDDEN_F32:
        return (size_t)width * 4;
    case HIDDEN_F16:
        return (size_t)width * 2;
    case HIDDEN_INT8:
        return 4 + (size_t)width;
    }
    return 0;
}

size_t hidden_wire_size(enum hidden_dtype dtype, uint32_t rows, uint32_t width)
{
    return rows * row_size(dtype, width);
}

static uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static bool row_is_finite(const float *row, uint32_t width)
{
    bool finite = true;
    for (uint32_t i = 0; i < width; i++)
        finite &= (float_bits(row[i]) & 0x7f800000u) != 0x7f800000u;
    return finite;
}

static float row_top(const float *row, uint32_t width)
{
    float top = 0;
    for (uint32_t i = 0; i < width; i++)
        top = fmaxf(top, fabsf(row[i]));
    return top;
}

static int encode_row_f16(const float *row, uint32_t width, uint8_t *dst)
{
    for (uint32_t i = 0; i < width; i++) {
        uint16_t half = f32_to_f16(row[i]);
        if ((half & 0x7c00u) == 0x7c00u)
            return -TD_ERR_FORMAT;
        store_le16(dst + 2 * (size_t)i, half);
    }
    return 0;
}

static void encode_row_int8(const float *row, uint32_t width, uint8_t *dst)
{
    float scale = row_top(row, width) / INT8_TOP;
    store_le32(dst, float_bits(scale));
    for (uint32_t i = 0; i < width; i++) {
        /* scale is 0 for a row of zeros, or of values so small that a 127th of them is no float any more */
        float value = scale > 0 ? rintf(row[i] / scale) : 0;
        dst[4 + i] = (uint8_t)(int8_t)fmaxf(-INT8_TOP, fminf(INT8_TOP, value));
    }
}

int hidden_encode(enum hidden_dtype dtype, const float *rows, uint32_t row_count, uint32_t width,
                  uint8_t *dst, size_t capacity)
{
    size_t stride = row_size(dtype, width);
    if (stride == 0 && width > 0)
        return -TD_ERR_UNSUPPORTED;
    if (hidden_wire_size(dtype, row_count, width) > capacity)
        return -TD_ERR_SHAPE;
    for (uint32_t r = 0; r < row_count; r++, rows += width, dst += stride) {
        if (!row_is_finite(rows, width))
            return -TD_ERR_FORMAT;
        if (dtype == HIDDEN_F32) {
            for (uint32_t i = 0; i < width; i++)
                store_le32(dst + 4 * (size_t)i, float_bits(rows[i]));
        } else if (dtype == HIDDEN_F16) {
            int rc = encode_row_f16(rows, width, dst);
            if (rc < 0)
                return rc;
        } else {
            encode_row_int8(rows, width, dst);
        }
    }
    return 0;
}

static void decode_row(enum hidden_dtype dtype, const uint8_t *src, uint32_t width, float *row)
{
    if (dtype == HIDDEN_F32) {
        for (uint32_t i = 0; i < width; i++)
            row[i] = float_from_bits(load_le32(src + 4 * (size_t)i));
    } else if (dtype == HIDDEN_F16) {
        for (uint32_t i = 0; i < width; i++)
            row[i] = f16_to_f32(load_le16(src + 2 * (size_t)i));
    } else {
        float scale = float_from_bits(load_le32(src));
        for (uint32_t i = 0; i < width; i++)
            row[i] = scale * (float)(int8_t)src[4 + i];
    }
}

int hidden_decode(enum hidden_dtype dtype, struct span src, uint32_t row_count, uint32_t width, float *rows)
{
    size_t stride = row_size(dtype, width);
    if (stride == 0 && width > 0)
        return -TD_ERR_UNSUPPORTED;
    if (hidden_wire_size(dtype, row_count, width) != src.size)
        return -TD_ERR_SHAPE;
    for (uint32_t r = 0; r < row_count; r++, rows += width) {
        decode_row(dtype, src.data + r * stride, width, rows);
        if (!row_is_finite(rows, width))
            return -TD_ERR_FORMAT;
    }
    return 0;
}
