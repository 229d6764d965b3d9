/* fuzz_kv_piece: hostile bytes as a piece. The checksum is made right first, so that the fuzzer reaches the
 * fields and the codecs; none of it is a seal's; what decodes must encode and decode again to the same values. */
#include "shared/kv_seal.h"
#include <stdlib.h>

#define INPUT_SIZE_MAX  (1u << 16)
#define CRC_AT          32
#define PAYLOAD_SIZE_AT 28

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_again(struct kv_codec_scratch *s, struct kv_piece_head head, const uint16_t *values,
                        size_t count)
{
    if (head.codec != KV_RAW) {
        head.codec = KV_L0; /* lossy is not re-encoded from lossy */
        head.table = 0;
    }
    struct kv_shape shape = {1, head.kv_head_count, head.head_dim};
    size_t bound = kv_piece_bound(&shape, head.token_count);
    uint8_t *piece = malloc(bound);
    uint16_t *out = malloc(count * sizeof *out);
    int64_t size = kv_piece_encode(s, &head, values, piece, bound);
    struct kv_piece_head parsed;
    struct span payload;
    if (size < 0 || kv_piece_parse(piece, (size_t)size, &parsed, &payload) < 0 ||
        kv_piece_decode(s, &parsed, payload, out, count) < 0 || memcmp(out, values, count * sizeof *out) != 0)
        abort();
    free(out);
    free(piece);
}

/* Hostile bytes as a sealed piece: nobody has sealed them. */
static void check_seal(const uint8_t *piece, size_t size)
{
    static struct kv_seal seal;
    struct kv_block_id name;
    uint8_t *out = malloc(size);
    if (kv_seal_open(&seal, (struct span){piece, size}, &name, out) >= 0)
        abort();
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct kv_codec_scratch *s;
    if (!s)
        s = kv_codec_scratch_create(&(struct kv_shape){1, 4, 128});
    if (!s || size < KV_PIECE_HEAD_SIZE || size > INPUT_SIZE_MAX)
        return 0;
    struct kv_piece_head head;
    struct span payload;
    kv_piece_parse(data, size, &head, &payload);

    uint8_t *piece = malloc(size);
    memcpy(piece, data, size);
    store_le32(piece + PAYLOAD_SIZE_AT, (uint32_t)(size - KV_PIECE_HEAD_SIZE));
    store_le32(piece + CRC_AT, 0);
    store_le32(piece + CRC_AT, crc32c(0, piece, size));
    check_seal(piece, size);
    if (kv_piece_parse(piece, size, &head, &payload) == 0) {
        size_t count = (size_t)head.token_count * head.kv_head_count * head.head_dim;
        uint16_t *values = malloc(count * sizeof *values);
        int rc = kv_piece_decode(s, &head, payload, values, count);
        if (rc == 0 && head.codec == KV_L2 && !kv_f16_all_finite(values, count))
            abort();
        if (rc == 0)
            check_again(s, head, values, count);
        free(values);
    }
    free(piece);
    return 0;
}
