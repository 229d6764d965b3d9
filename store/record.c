/* record: heads to bytes and back, and the sealing of parts. Byte tables: FORMAT.md. */
#include "store/record.h"

#define SEGMENT_MAGIC   "TDSEGMNT"
#define SEGMENT_VERSION 1
#define RECORD_MAGIC    0x43524454u /* "TDRC" */
#define RECORD_VERSION  1
#define PART_SIZE_MAX   (1u << 30)
#define RECORD_LABEL    "tandem-record"

enum { /* segment head */
       SEGMENT_AT_VERSION = 8,
       SEGMENT_AT_ID = 16,
       SEGMENT_AT_NONCE = 24,
       SEGMENT_AT_CREATED = 32,
       SEGMENT_AT_FIRST_LSN = 40,
       SEGMENT_END = 48,
};
enum { /* record head */
       AT_MAGIC = 0,
       AT_VERSION = 4,
       AT_TYPE = 5,
       AT_CODEC = 6,
       AT_TARGET = 7,
       AT_LSN = 8,
       AT_SEGMENT_ID = 16,
       AT_SEGMENT_NONCE = 24,
       AT_SEQUENCE = 32,
       AT_PART_COUNT = 36,
       AT_OFFSET = 40,
       AT_BODY_SIZE = 48,
       AT_DURABLE_END = 56,
       AT_KEY_ID = 64,
       AT_ID = 80,
       AT_PARENT = 112,
       AT_SALT = 144,
       AT_QUALITY = 176,
       AT_BLOCK_INDEX = 180,
       AT_LAYER_BEGIN = 184,
       AT_LAYER_END = 186,
       AT_RECORD_VERSION = 192,
       AT_TIME = 200,
       AT_WRAPPED_KEY = 208,
       AT_PARTS = 256,
       PARTS_END = AT_PARTS + 8 * RECORD_PARTS_MAX,
       AT_BODY_CRC = RECORD_PAGE - 8,
       AT_CRC = RECORD_PAGE - 4,
};
_Static_assert(AT_WRAPPED_KEY + CRYPTO_KEY_SIZE + CRYPTO_TAG_SIZE == AT_PARTS,
               "the fixed part ends where the parts begin");
_Static_assert(PARTS_END <= AT_BODY_CRC, "the table of parts fits in the page");

static bool all_zero(const uint8_t *data, size_t size)
{
    uint8_t any = 0;
    for (size_t i = 0; i < size; i++)
        any |= data[i];
    return any == 0;
}

/* ---- segment head ----------------------------------------------------------------------------------------- */

void segment_head_write(const struct segment_head *h, uint8_t out[RECORD_PAGE])
{
    memset(out, 0, RECORD_PAGE);
    memcpy(out, SEGMENT_MAGIC, 8);
    store_le32(out + SEGMENT_AT_VERSION, SEGMENT_VERSION);
    store_le64(out + SEGMENT_AT_ID, h->id);
    store_le64(out + SEGMENT_AT_NONCE, h->nonce);
    store_le64(out + SEGMENT_AT_CREATED, h->created_us);
    store_le64(out + SEGMENT_AT_FIRST_LSN, h->first_lsn);
    store_le32(out + AT_CRC, crc32c(0, out, AT_CRC));
}

int segment_head_parse(const uint8_t in[RECORD_PAGE], struct segment_head *h)
{
    if (memcmp(in, SEGMENT_MAGIC, 8) != 0)
        return -TD_ERR_FORMAT;
    if (crc32c(0, in, AT_CRC) != load_le32(in + AT_CRC))
        return -TD_ERR_CHECKSUM;
    if (load_le32(in + SEGMENT_AT_VERSION) != SEGMENT_VERSION)
        return -TD_ERR_VERSION;
    *h = (struct segment_head){
        .id = load_le64(in + SEGMENT_AT_ID),
        .nonce = load_le64(in + SEGMENT_AT_NONCE),
        .created_us = load_le64(in + SEGMENT_AT_CREATED),
        .first_lsn = load_le64(in + SEGMENT_AT_FIRST_LSN),
    };
    return all_zero(in + SEGMENT_END, AT_CRC - SEGMENT_END) ? 0 : -TD_ERR_FORMAT;
}

/* ---- record head ------------------------------------------------------------------------------------------ */

void record_head_write(const struct record_head *h, uint8_t out[RECORD_PAGE])
{
    memset(out, 0, RECORD_PAGE);
    store_le32(out + AT_MAGIC, RECORD_MAGIC);
    out[AT_VERSION] = RECORD_VERSION;
    out[AT_TYPE] = h->type;
    out[AT_CODEC] = h->codec;
    out[AT_TARGET] = h->target;
    store_le64(out + AT_LSN, h->lsn);
    store_le64(out + AT_SEGMENT_ID, h->segment_id);
    store_le64(out + AT_SEGMENT_NONCE, h->segment_nonce);
    store_le32(out + AT_SEQUENCE, h->sequence);
    store_le32(out + AT_PART_COUNT, h->part_count);
    store_le64(out + AT_OFFSET, h->offset);
    store_le64(out + AT_BODY_SIZE, h->body_size);
    store_le64(out + AT_DURABLE_END, h->durable_end);
    memcpy(out + AT_KEY_ID, h->key_id, sizeof h->key_id);
    memcpy(out + AT_ID, h->id, sizeof h->id);
    memcpy(out + AT_PARENT, h->parent, sizeof h->parent);
    memcpy(out + AT_SALT, h->salt, sizeof h->salt);
    out[AT_QUALITY] = h->quality.fidelity;
    out[AT_QUALITY + 1] = h->quality.numerics;
    out[AT_QUALITY + 2] = h->quality.provenance;
    store_le32(out + AT_BLOCK_INDEX, h->block_index);
    store_le16(out + AT_LAYER_BEGIN, h->layer_begin);
    store_le16(out + AT_LAYER_END, h->layer_end);
    store_le64(out + AT_RECORD_VERSION, h->version);
    store_le64(out + AT_TIME, h->time_us);
    memcpy(out + AT_WRAPPED_KEY, h->wrapped_key, sizeof h->wrapped_key);
    for (uint32_t i = 0; i < h->part_count; i++) {
        store_le32(out + AT_PARTS + 8 * i, h->parts[i].first_size);
        store_le32(out + AT_PARTS + 8 * i + 4, h->parts[i].second_size);
    }
}

void record_head_finish(uint8_t out[RECORD_PAGE], uint32_t body_crc)
{
    store_le32(out + AT_BODY_CRC, body_crc);
    store_le32(out + AT_CRC, crc32c(0, out, AT_CRC));
}

static void head_read(const uint8_t *in, struct record_head *h)
{
    h->type = in[AT_TYPE];
    h->codec = in[AT_CODEC];
    h->target = in[AT_TARGET];
    h->lsn = load_le64(in + AT_LSN);
    h->segment_id = load_le64(in + AT_SEGMENT_ID);
    h->segment_nonce = load_le64(in + AT_SEGMENT_NONCE);
    h->sequence = load_le32(in + AT_SEQUENCE);
    h->part_count = load_le32(in + AT_PART_COUNT);
    h->offset = load_le64(in + AT_OFFSET);
    h->body_size = load_le64(in + AT_BODY_SIZE);
    h->durable_end = load_le64(in + AT_DURABLE_END);
    memcpy(h->key_id, in + AT_KEY_ID, sizeof h->key_id);
    memcpy(h->id, in + AT_ID, sizeof h->id);
    memcpy(h->parent, in + AT_PARENT, sizeof h->parent);
    memcpy(h->salt, in + AT_SALT, sizeof h->salt);
    h->quality =
        (struct kv_quality){in[AT_QUALITY], in[AT_QUALITY + 1], in[AT_QUALITY + 2], in[AT_QUALITY + 3]};
    h->block_index = load_le32(in + AT_BLOCK_INDEX);
    h->layer_begin = load_le16(in + AT_LAYER_BEGIN);
    h->layer_end = load_le16(in + AT_LAYER_END);
    h->version = load_le64(in + AT_RECORD_VERSION);
    h->time_us = load_le64(in + AT_TIME);
    memcpy(h->wrapped_key, in + AT_WRAPPED_KEY, sizeof h->wrapped_key);
    h->body_crc = load_le32(in + AT_BODY_CRC);
}

/* The table of parts adds up to the body; what a type does not use is zero. */
static int parts_read(const uint8_t *in, struct record_head *h)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < h->part_count; i++) {
        struct record_part *p = &h->parts[i];
        p->first_size = load_le32(in + AT_PARTS + 8 * i);
        p->second_size = load_le32(in + AT_PARTS + 8 * i + 4);
        bool one_piece = h->type == RECORD_CONVERSATION; /* its reader makes room for the first */
        if (p->first_size > PART_SIZE_MAX || p->second_size > (one_piece ? 0 : PART_SIZE_MAX))
            return -TD_ERR_FORMAT;
        sum += record_part_sealed_size(p);
    }
    bool sealed = h->type == RECORD_BLOCK || h->type == RECORD_CONVERSATION;
    if ((sealed && sum != h->body_size) || h->body_size > RECORD_BODY_MAX)
        return -TD_ERR_FORMAT;
    size_t used = AT_PARTS + 8 * (size_t)h->part_count;
    return all_zero(in + used, AT_BODY_CRC - used) ? 0 : -TD_ERR_FORMAT;
}

static bool type_is_consistent(const struct record_head *h)
{
    bool of_something = h->target == RECORD_BLOCK || h->target == RECORD_CONVERSATION;
    bool target_good = h->type == RECORD_TOMBSTONE
                           ? of_something || h->target == RECORD_PIN || h->target == RECORD_ANY_TENANT
                       : h->type == RECORD_PIN ? of_something
                                               : h->target == 0;
    switch (h->type) {
    case RECORD_BLOCK:
        return target_good && h->layer_begin < h->layer_end && h->layer_end <= KV_LAYERS_MAX &&
               h->part_count == (uint32_t)(h->layer_end - h->layer_begin) && h->quality.fidelity <= KV_L4;
    case RECORD_CONVERSATION:
        return target_good && h->part_count == 1 && h->version > 0;
    case RECORD_TOMBSTONE:
    case RECORD_PIN:
    case RECORD_SEAL:
        return target_good && h->part_count == 0 && h->body_size == 0;
    case RECORD_VOID:
        return target_good && h->part_count == 0;
    default:
        return false;
    }
}

int record_head_parse(const uint8_t in[RECORD_PAGE], struct record_head *h)
{
    if (load_le32(in + AT_MAGIC) != RECORD_MAGIC)
        return -TD_ERR_FORMAT;
    if (crc32c(0, in, AT_CRC) != load_le32(in + AT_CRC))
        return -TD_ERR_CHECKSUM;
    if (in[AT_VERSION] != RECORD_VERSION)
        return -TD_ERR_VERSION;
    head_read(in, h);
    if (h->part_count > RECORD_PARTS_MAX || load_le32(in + AT_LAYER_END + 2) != 0 ||
        h->quality.reserved != 0 || !type_is_consistent(h))
        return -TD_ERR_FORMAT;
    return parts_read(in, h);
}

uint64_t record_part_offset(const struct record_head *h, uint32_t part)
{
    uint64_t offset = 0;
    for (uint32_t i = 0; i < part; i++)
        offset += record_part_sealed_size(&h->parts[i]);
    return offset;
}

/* ---- sealing ---------------------------------------------------------------------------------------------- */

void record_derive_key(const uint8_t data_key[CRYPTO_KEY_SIZE], const struct record_head *h,
                       uint8_t out[CRYPTO_KEY_SIZE])
{
    uint8_t info[sizeof RECORD_LABEL - 1 + 2 + 32];
    memcpy(info, RECORD_LABEL, sizeof RECORD_LABEL - 1);
    info[sizeof RECORD_LABEL - 1] = h->type;
    info[sizeof RECORD_LABEL] = h->codec;
    memcpy(info + sizeof RECORD_LABEL + 1, h->id, 32);
    hkdf_sha256(data_key, h->salt, sizeof h->salt, info, sizeof info, out);
}

int record_wrap_key(const uint8_t data_key[CRYPTO_KEY_SIZE], struct record_head *h,
                    const uint8_t body_key[CRYPTO_KEY_SIZE])
{
    uint8_t page[RECORD_PAGE], key[CRYPTO_KEY_SIZE];
    record_head_write(h, page);
    record_derive_key(data_key, h, key);
    int rc = gcm_seal(key, 0, page, AT_WRAPPED_KEY, body_key, CRYPTO_KEY_SIZE, h->wrapped_key,
                      h->wrapped_key + CRYPTO_KEY_SIZE);
    crypto_wipe(key, sizeof key);
    return rc;
}

int record_open_key(const uint8_t data_key[CRYPTO_KEY_SIZE], const struct record_head *h,
                    uint8_t out[CRYPTO_KEY_SIZE])
{
    record_derive_key(data_key, h, out);
    if (h->type != RECORD_CONVERSATION)
        return 0;
    uint8_t page[RECORD_PAGE], key[CRYPTO_KEY_SIZE];
    record_head_write(h, page);
    memcpy(key, out, sizeof key);
    int rc = gcm_open(key, 0, page, AT_WRAPPED_KEY, h->wrapped_key, CRYPTO_KEY_SIZE, out,
                      h->wrapped_key + CRYPTO_KEY_SIZE);
    crypto_wipe(key, sizeof key);
    return rc;
}

int record_seal_part(const uint8_t key[CRYPTO_KEY_SIZE], const struct record_head *h, const uint8_t *page,
                     uint32_t part, const uint8_t *plain, uint8_t *out)
{
    size_t size = (size_t)h->parts[part].first_size + h->parts[part].second_size;
    return gcm_seal(key, h->layer_begin + part, page, record_aad_size(h), plain, size, out, out + size);
}

/* The checksum is taken part by part, while they are in the core's cache. */
int record_seal(const uint8_t key[CRYPTO_KEY_SIZE], const struct record_head *h, const uint8_t *const *parts,
                uint8_t *out)
{
    uint8_t *body = out + RECORD_PAGE;
    uint32_t crc = 0;
    int rc = 0;
    record_head_write(h, out);
    for (uint32_t i = 0; i < h->part_count && rc == 0; i++) {
        size_t size = (size_t)record_part_sealed_size(&h->parts[i]);
        rc = record_seal_part(key, h, out, i, parts[i], body);
        crc = crc32c(crc, body, size);
        body += size;
    }
    memset(body, 0, (size_t)(record_size(h->body_size) - (uint64_t)(body - out)));
    record_head_finish(out, crc);
    return rc;
}

int record_open_part(const uint8_t key[CRYPTO_KEY_SIZE], const struct record_head *h, const uint8_t *page,
                     uint32_t part, uint8_t *data, const uint8_t tag[CRYPTO_TAG_SIZE])
{
    size_t size = (size_t)h->parts[part].first_size + h->parts[part].second_size;
    return gcm_open(key, h->layer_begin + part, page, record_aad_size(h), data, size, data, tag);
}
