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

struct ZSTD_CCtx_s;
struct ZSTD_DCtx_s;
struct kv_codec_scratch {
    size_t value_count; /* capacity: values of a whole piece of the shape */
    struct ZSTD_CCtx_s *compressor;
    struct ZSTD_DCtx_s *decompressor;
    uint8_t *high, *low; /* planes, value_count bytes each */
};

int64_t kv_l0_encode(struct kv_codec_scratch *s, const uint16_t *src, size_t count, uint8_t *dst,
                     size_t capacity);
int kv_l0_decode(struct kv_codec_scratch *s, struct span payload, uint16_t *dst, size_t count);
/* The planes of a payload, `count` bytes each; joined they are what kv_l0_decode gives. */
int kv_l0_planes(struct kv_codec_scratch *s, struct span payload, size_t count, uint8_t *high, uint8_t *low);

static inline size_t kv_l1_group_count(size_t count)
{
    return (count + KV_GROUP - 1) / KV_GROUP;
}
static inline size_t kv_l1_size(size_t count)
{
    return kv_l1_group_count(count) + count;
}
int64_t kv_l1_encode(const uint16_t *src, size_t count, uint8_t *dst, size_t capacity);
int kv_l1_decode(struct span payload, uint16_t *dst, size_t count);

/* One implementation of L1's inner loops, over whole groups: src and dst hold group_count * KV_GROUP values.
 * encode returns false at a non-finite value, decode at q = -128. */
struct kv_l1_ops {
    bool (*encode)(const uint16_t *src, size_t group_count, uint8_t *scales, int8_t *q);
    bool (*decode)(const uint8_t *scales, const int8_t *q, size_t group_count, uint16_t *dst);
};
extern const struct kv_l1_ops kv_l1_portable;
const struct kv_l1_ops *kv_l1_avx2(void); /* NULL where the CPU (or the build) lacks AVX2 and F16C */

uint8_t
kv_l1_scale_index(uint16_t max_bits); /* of a group's largest magnitude, f16 bits without sign, finite */
float kv_l1_power(int eighths);       /* 2^(eighths / 8) rounded to f32, |eighths| < 800 */

#endif
