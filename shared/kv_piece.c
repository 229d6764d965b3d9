/* kv_piece: the self-describing head of a piece and the choice of codec. KV_FORMAT.md has the byte table.
 *
 * Invariants
 *   - What kv_piece_encode writes, kv_piece_parse accepts: both go through head_check.
 *   - kv_piece_parse decides by size, magic and version first, then by checksum, then by the fields: damage
 * is reported as damage, and only a piece that somebody made that way is reported as malformed.
 *   - A piece never claims a better fidelity than its codec gives. */
#include "shared/kv_codec.h"
#include "shared/kv_block.h"
#include <stdlib.h>
#include <zstd.h>

enum { /* offsets in the head */
       AT_MAGIC = 0,
       AT_VERSION = 4,
       AT_CODEC = 5,
       AT_IS_VALUE = 6,
       AT_TABLE = 7,
       AT_QUALITY = 8,
       AT_BLOCK_INDEX = 12,
       AT_FIRST_TOKEN = 16,
       AT_TOKEN_COUNT = 18,
       AT_LAYER = 20,
       AT_KV_HEAD_COUNT = 22,
       AT_HEAD_DIM = 24,
       AT_RESERVED_A = 26,
       AT_PAYLOAD_SIZE = 28,
       AT_CRC = 32,
       AT_RESERVED_B = 36,
};
#define PIECE_VERSION 1

static size_t head_value_count(const struct kv_piece_head *h)
{
    return (size_t)h->token_count * h->kv_head_count * h->head_dim;
}

/* ---- scratch ----------------------------------------------------------------------------------------------
 */

struct kv_codec_scratch *kv_codec_scratch_create(const struct kv_shape *shape)
{
    if (shape->kv_head_count == 0 || shape->kv_head_count > KV_HEADS_MAX || shape->head_dim == 0 ||
        shape->head_dim > KV_HEAD_DIM_MAX)
        return NULL;
    struct kv_codec_scratch *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->value_count = kv_piece_values(shape, KV_BLOCK_TOKENS);
    s->compressor = ZSTD_createCCtx();
    s->decompressor = ZSTD_createDCtx();
    s->high = malloc(s->value_count);
    s->low = malloc(s->value_count);
    s->rows = malloc(sizeof *s->rows * s->value_count);
    if (!s->compressor || !s->decompressor || !s->high || !s->low || !s->rows) {
        kv_codec_scratch_destroy(s);
        return NULL;
    }
    return s;
}

void kv_codec_scratch_destroy(struct kv_codec_scratch *s)
{
    if (!s)
        return;
    free(s->rows);
    free(s->low);
    free(s->high);
    ZSTD_freeDCtx(s->decompressor);
    ZSTD_freeCCtx(s->compressor);
    free(s);
}

/* ---- head -------------------------------------------------------------------------------------------------
 */

static uint8_t codec_level(uint8_t codec)
{
    return codec == KV_RAW || codec == KV_SEALED ? KV_L0 : codec; /* of a sealed one it is not known here */
}

/* Range checks that hold for every piece, made here or elsewhere. */
static int head_check(const struct kv_piece_head *h)
{
    if (h->codec > KV_L4 && h->codec != KV_RAW && h->codec != KV_SEALED)
        return -TD_ERR_FORMAT;
    if (h->is_value > 1 || h->quality.fidelity > KV_L4 || h->quality.fidelity < codec_level(h->codec))
        return -TD_ERR_FORMAT;
    if (!kv_numerics_known(h->quality.numerics))
        return -TD_ERR_FORMAT;
    if (h->quality.provenance > KV_FROM_DEVICE || h->quality.reserved != 0)
        return -TD_ERR_FORMAT;
    if (h->token_count == 0 || h->first_token + h->token_count > KV_BLOCK_TOKENS || h->layer >= KV_LAYERS_MAX)
        return -TD_ERR_SHAPE;
    if (h->kv_head_count == 0 || h->kv_head_count > KV_HEADS_MAX || h->head_dim == 0 ||
        h->head_dim > KV_HEAD_DIM_MAX)
        return -TD_ERR_SHAPE;
    bool has_tables = h->codec == KV_L1 || h->codec == KV_L2;
    bool known = h->codec <= KV_L2 || h->codec == KV_RAW || h->codec == KV_SEALED;
    if (!known || h->table >= (has_tables ? KV_TABLES : 1))
        return -TD_ERR_UNSUPPORTED;
    return 0;
}

static void head_write(const struct kv_piece_head *h, uint8_t out[KV_PIECE_HEAD_SIZE])
{
    memset(out, 0, KV_PIECE_HEAD_SIZE);
    store_le32(out + AT_MAGIC, KV_PIECE_MAGIC);
    out[AT_VERSION] = h->version;
    out[AT_CODEC] = h->codec;
    out[AT_IS_VALUE] = h->is_value;
    out[AT_TABLE] = h->table;
    out[AT_QUALITY] = h->quality.fidelity;
    out[AT_QUALITY + 1] = h->quality.numerics;
    out[AT_QUALITY + 2] = h->quality.provenance;
    out[AT_QUALITY + 3] = h->quality.reserved;
    store_le32(out + AT_BLOCK_INDEX, h->block_index);
    store_le16(out + AT_FIRST_TOKEN, h->first_token);
    store_le16(out + AT_TOKEN_COUNT, h->token_count);
    store_le16(out + AT_LAYER, h->layer);
    store_le16(out + AT_KV_HEAD_COUNT, h->kv_head_count);
    store_le16(out + AT_HEAD_DIM, h->head_dim);
    store_le32(out + AT_PAYLOAD_SIZE, h->payload_size);
    store_le32(out + AT_CRC, h->crc);
}

static void head_read(const uint8_t *in, struct kv_piece_head *h)
{
    *h = (struct kv_piece_head){
        .version = in[AT_VERSION],
        .codec = in[AT_CODEC],
        .is_value = in[AT_IS_VALUE],
        .table = in[AT_TABLE],
        .quality = {in[AT_QUALITY], in[AT_QUALITY + 1], in[AT_QUALITY + 2], in[AT_QUALITY + 3]},
        .block_index = load_le32(in + AT_BLOCK_INDEX),
        .first_token = load_le16(in + AT_FIRST_TOKEN),
        .token_count = load_le16(in + AT_TOKEN_COUNT),
        .layer = load_le16(in + AT_LAYER),
        .kv_head_count = load_le16(in + AT_KV_HEAD_COUNT),
        .head_dim = load_le16(in + AT_HEAD_DIM),
        .payload_size = load_le32(in + AT_PAYLOAD_SIZE),
        .crc = load_le32(in + AT_CRC),
    };
}

/* The checksum of a piece whose head bytes hold any crc. */
static uint32_t piece_crc(const uint8_t *head_bytes, const uint8_t *payload, size_t payload_size)
{
    uint8_t head[KV_PIECE_HEAD_SIZE];
    memcpy(head, head_bytes, sizeof head);
    memset(head + AT_CRC, 0, 4);
    return crc32c(crc32c(0, head, sizeof head), payload, payload_size);
}

static bool reserved_is_zero(const uint8_t *in)
{
    uint8_t any = (uint8_t)(in[AT_RESERVED_A] | in[AT_RESERVED_A + 1]);
    for (size_t i = AT_RESERVED_B; i < KV_PIECE_HEAD_SIZE; i++)
        any |= in[i];
    return any == 0;
}

static int parse(const void *data, size_t size, bool check_crc, struct kv_piece_head *head,
                 struct span *payload)
{
    const uint8_t *in = data;
    if (size < KV_PIECE_HEAD_SIZE)
        return -TD_ERR_TRUNCATED;
    if (load_le32(in + AT_MAGIC) != KV_PIECE_MAGIC)
        return -TD_ERR_FORMAT;
    if (in[AT_VERSION] != PIECE_VERSION)
        return -TD_ERR_VERSION;
    struct kv_piece_head h;
    head_read(in, &h);
    if (h.payload_size != size - KV_PIECE_HEAD_SIZE)
        return h.payload_size > size - KV_PIECE_HEAD_SIZE ? -TD_ERR_TRUNCATED : -TD_ERR_FORMAT;
    if (check_crc && piece_crc(in, in + KV_PIECE_HEAD_SIZE, h.payload_size) != h.crc)
        return -TD_ERR_CHECKSUM;
    if (!reserved_is_zero(in))
        return -TD_ERR_FORMAT;
    int rc = head_check(&h);
    if (rc < 0)
        return rc;
    *head = h;
    *payload = (struct span){in + KV_PIECE_HEAD_SIZE, h.payload_size};
    return 0;
}

int kv_piece_parse(const void *data, size_t size, struct kv_piece_head *head, struct span *payload)
{
    return parse(data, size, true, head, payload);
}

int kv_piece_peek(const void *data, size_t size, struct kv_piece_head *head)
{
    struct span payload;
    return parse(data, size, false, head, &payload);
}

/* ---- codecs -----------------------------------------------------------------------------------------------
 */

size_t kv_piece_bound(const struct kv_shape *shape, uint32_t token_count)
{
    const struct kv_l2_form largest = {.head_count = shape->kv_head_count,
                                       .token_count = token_count,
                                       .dim = shape->head_dim,
                                       .bits = 4 + KV_TABLES - 1,
                                       .wide = true};
    size_t l0 = KV_L0_HEAD_SIZE + 2 * kv_piece_values(shape, token_count), l2 = kv_l2_size(&largest);
    return KV_PIECE_HEAD_SIZE + TD_MAX(l0, l2); /* L2 is the longer one for very short rows alone */
}

static int64_t raw_encode(const uint16_t *src, size_t count, uint8_t *dst, size_t capacity)
{
    if (capacity < 2 * count)
        return -TD_ERR_NOSPACE;
    for (size_t i = 0; i < count; i++)
        store_le16(dst + 2 * i, src[i]);
    return (int64_t)(2 * count);
}

static int raw_decode(struct span payload, uint16_t *dst, size_t count)
{
    if (payload.size != 2 * count)
        return -TD_ERR_FORMAT;
    for (size_t i = 0; i < count; i++)
        dst[i] = load_le16(payload.data + 2 * i);
    return 0;
}

void kv_piece_authenticated(const struct kv_piece_head *head, size_t payload_size,
                            uint8_t out[KV_PIECE_HEAD_SIZE])
{
    struct kv_piece_head h = *head;
    h.payload_size = (uint32_t)payload_size;
    h.crc = 0;
    head_write(&h, out);
}

int64_t kv_piece_close(struct kv_piece_head *head, size_t payload_size, uint8_t *dst)
{
    head->payload_size = (uint32_t)payload_size;
    head_write(head, dst);
    head->crc = piece_crc(dst, dst + KV_PIECE_HEAD_SIZE, payload_size);
    store_le32(dst + AT_CRC, head->crc);
    return (int64_t)(KV_PIECE_HEAD_SIZE + payload_size);
}

int64_t kv_piece_encode(struct kv_codec_scratch *s, struct kv_piece_head *head, const uint16_t *src,
                        uint8_t *dst, size_t capacity)
{
    head->version = PIECE_VERSION;
    head->quality.fidelity = TD_MAX(head->quality.fidelity, codec_level(head->codec));
    int rc = head->codec == KV_SEALED ? -TD_ERR_UNSUPPORTED : head_check(head);
    if (rc < 0)
        return rc;
    size_t count = head_value_count(head);
    if (count > s->value_count)
        return -TD_ERR_SHAPE;
    if (capacity < KV_PIECE_HEAD_SIZE)
        return -TD_ERR_NOSPACE;
    uint8_t *payload = dst + KV_PIECE_HEAD_SIZE;
    size_t room = capacity - KV_PIECE_HEAD_SIZE;
    struct kv_l2_form form = kv_l2_form_of(head);
    int64_t size = head->codec == KV_L0   ? kv_l0_encode(s, src, count, payload, room)
                   : head->codec == KV_L1 ? kv_l1_encode(src, count, head->table, payload, room)
                   : head->codec == KV_L2 ? kv_l2_encode(s, &form, src, payload, room)
                                          : raw_encode(src, count, payload, room);
    return size < 0 ? size : kv_piece_close(head, (size_t)size, dst);
}

int kv_piece_decode(struct kv_codec_scratch *s, const struct kv_piece_head *head, struct span payload,
                    uint16_t *dst, size_t capacity)
{
    int rc = head->codec == KV_SEALED ? -TD_ERR_UNSUPPORTED : head_check(head);
    if (rc < 0)
        return rc;
    size_t count = head_value_count(head);
    if (count > s->value_count)
        return -TD_ERR_SHAPE;
    if (count > capacity)
        return -TD_ERR_NOSPACE;
    switch (head->codec) {
    case KV_L0:
        return kv_l0_decode(s, payload, dst, count);
    case KV_L1:
        return kv_l1_decode(payload, head->table, dst, count);
    case KV_L2: {
        struct kv_l2_form form = kv_l2_form_of(head);
        return kv_l2_decode(&form, payload, dst);
    }
    default:
        return raw_decode(payload, dst, count);
    }
}

bool kv_f16_all_finite(const uint16_t *values, size_t count)
{
    uint16_t max = 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t magnitude = values[i] & 0x7fff;
        max = magnitude > max ? magnitude : max;
    }
    return max < 0x7c00;
}
