/* kv_codec: what the files of the KV codec share with each other (kv_piece.c, kv_l0.c, kv_l1.c). Nobody else
 * includes it, except tests that compare the twins of L1, and engines that decode on a device. Formats: KV_FORMAT.md.
 *
 * An encoder writes the payload of one piece and returns its size, -TD_ERR_NOSPACE when it does not fit, or
 * another code. A decoder reads exactly `payload` and writes exactly `count` values, or returns a code; it
 * trusts nothing. */
#ifndef TANDEM_SHARED_KV_CODEC_H
#define TANDEM_SHARED_KV_CODEC_H
#include "shared/kv_block.h"

#define KV_L0_HEAD_SIZE 8
#define KV_TABLES       2 /* of L1: a scale for 64 or for 128 values; of L2: 4 or 5 bits */

struct ZSTD_CCtx_s;
struct ZSTD_DCtx_s;
struct kv_codec_scratch {
    size_t value_count; /* capacity: values of a whole piece of the shape */
    struct ZSTD_CCtx_s *compressor;
    struct ZSTD_DCtx_s *decompressor;
    uint8_t *high, *low; /* planes, value_count bytes each */
    float *rows;         /* L2: transformed rows of one head, room for value_count */
};

/* The head's bytes as a seal authenticates them: without the checksum. */
void kv_piece_authenticated(const struct kv_piece_head *head, size_t payload_size,
                            uint8_t out[KV_PIECE_HEAD_SIZE]);
/* The head, and its checksum, in front of a payload that lies at dst + KV_PIECE_HEAD_SIZE; the piece's size. */
int64_t kv_piece_close(struct kv_piece_head *head, size_t payload_size, uint8_t *dst);

int64_t kv_l0_encode(struct kv_codec_scratch *s, const uint16_t *src, size_t count, uint8_t *dst,
                     size_t capacity);
int kv_l0_decode(struct kv_codec_scratch *s, struct span payload, uint16_t *dst, size_t count);
/* The planes of a payload, `count` bytes each; joined they are what kv_l0_decode gives. */
int kv_l0_planes(struct kv_codec_scratch *s, struct span payload, size_t count, uint8_t *high, uint8_t *low);

#define KV_L1_GROUP_MAX (2 * KV_GROUP)
/* Values that share a scale: table 0 is 64, table 1 is 128. */
static inline size_t kv_l1_group(unsigned table)
{
    return (size_t)KV_GROUP << table;
}
static inline size_t kv_l1_group_count(size_t count, unsigned table)
{
    return (count + kv_l1_group(table) - 1) / kv_l1_group(table);
}
static inline size_t kv_l1_size(size_t count, unsigned table)
{
    return kv_l1_group_count(count, table) + count;
}
int64_t kv_l1_encode(const uint16_t *src, size_t count, unsigned table, uint8_t *dst, size_t capacity);
int kv_l1_decode(struct span payload, unsigned table, uint16_t *dst, size_t count);

/* One implementation of L1's inner loops, over whole groups: src and dst hold `count` values, a multiple of `group`, which is
 * 64 or 128. encode returns false at a non-finite value, decode at q = -128. */
struct kv_l1_ops {
    bool (*encode)(const uint16_t *src, size_t count, size_t group, uint8_t *scales, int8_t *q);
    bool (*decode)(const uint8_t *scales, const int8_t *q, size_t count, size_t group, uint16_t *dst);
};
extern const struct kv_l1_ops kv_l1_portable;
const struct kv_l1_ops *kv_l1_avx2(void); /* NULL where the CPU (or the build) lacks AVX2 and F16C */

/* 2^(k / 8) - 1 in units of 2^-23, rounded: the mantissas of the grid that all scales lie on. */
static const uint32_t KV_GRID_MANTISSAS[8] = {0x000000, 0x0b95c2, 0x1837f0, 0x25fed7,
                                              0x3504f3, 0x45672a, 0x5744fd, 0x6ac0c7};
/* 2^(eighths / 8) rounded to f32, |eighths| < 800. Inlined into the loops: a call between AVX code and plain
 * code costs more than the work. */
static inline float kv_power(int eighths)
{
    int step = eighths & 7, octave = (eighths - step) / 8;
    uint32_t bits = (uint32_t)(127 + octave) << 23 | KV_GRID_MANTISSAS[step];
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
/* Round to nearest, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves the integer in the low mantissa
 * bits. */
static inline int kv_round_even(float x)
{
    float shifted = x + 12582912.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    return (int)(bits & 0x7fffff) - 0x400000;
}

/* ---- L2 ---------------------------------------------------------------------------------------------------
 */

/* What the head says about the payload's parts; KV_FORMAT.md has the letters. */
struct kv_l2_form {
    uint32_t head_count, token_count, dim;
    unsigned bits; /* B */
    bool wide;     /* W */
};
struct kv_l2_form kv_l2_form_of(const struct kv_piece_head *head);
size_t kv_l2_size(const struct kv_l2_form *f);
int64_t kv_l2_encode(struct kv_codec_scratch *s, const struct kv_l2_form *f, const uint16_t *src,
                     uint8_t *dst, size_t capacity);
int kv_l2_decode(const struct kv_l2_form *f, struct span payload, uint16_t *dst);

struct kv_l2_codes {             /* where a group's codes are */
    uint8_t *low, *fifth, *wide; /* fifth, wide: NULL without */
};
struct kv_l2_const_codes {
    const uint8_t *low, *fifth, *wide;
};
/* One implementation of L2's inner loops. Rows are `dim` values, groups `count`; `mean` is a row of zeros where
 * nothing is to be taken out. The AVX2 one wants dim and count to be multiples of KV_GROUP and no wide codes. */
struct kv_l2_ops {
    bool (*forward)(const uint16_t *src, uint32_t dim, float *y); /* false: a value is not finite */
    void (*inverse)(float *y, uint32_t dim, uint16_t *dst);       /* y is used up */
    void (*add)(float *sum, const float *y, uint32_t dim);
    /* largest |y| and largest |y - mean| */
    void (*peaks)(const float *y, const float *mean, uint32_t count, float *plain, float *rest);
    void (*put)(const float *y, const float *mean, uint32_t count, float inverse, struct kv_l2_codes codes);
    void (*get)(struct kv_l2_const_codes codes, uint32_t count, float step, const float *mean, float *y);
};
extern const struct kv_l2_ops kv_l2_portable;
const struct kv_l2_ops *kv_l2_avx2(void); /* NULL where the CPU (or the build) lacks AVX2 and F16C */
extern const uint8_t KV_L2_SIGNS[KV_HEAD_DIM_MAX / 8];

#endif
