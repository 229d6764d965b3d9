/* record: the bytes of a segment file. FORMAT.md has the tables.
 *
 * A segment file is a head of one page, then records. A record is a head of one page and a body, padded to whole pages, so
 * every head lies on a page border and a scan that meets damage goes on at the next border with a good head. A head proves that
 * it belongs where it stands: it carries segment id, the segment's nonce, its own offset and a CRC. The body is one sealed part a layer
 * (or one in all); the head up to its table of parts is the parts' authenticated data, so a record moved elsewhere or joined with another
 * head does not open. */
#ifndef TANDEM_STORE_RECORD_H
#define TANDEM_STORE_RECORD_H
#include "shared/crypto.h"
#include "shared/kv_block.h"

#define RECORD_PAGE       4096
#define RECORD_PARTS_MAX  448 /* layers of a block record */
#define RECORD_KEY_ID     16  /* bytes of a tenant's key id */
#define RECORD_SALT       32
#define RECORD_BODY_MAX   (1ull << 31)
#define RECORD_ANY_TENANT 0xff /* tombstone of all that a tenant has */

enum record_type {
    RECORD_BLOCK = 1,
    RECORD_CONVERSATION = 2,
    RECORD_TOMBSTONE = 3,
    RECORD_PIN = 4,  /* `target` and id of what eviction spares; a tombstone takes the pin away */
    RECORD_SEAL = 5, /* end of a segment that was closed in good order */
    RECORD_VOID = 6, /* was a record; its body is punched out, its key material gone */
};

struct segment_head {
    uint64_t id, nonce, created_us, first_lsn;
};

struct record_part {
    /* of the plain text: K and V piece; a conversation has only the first */
    uint32_t first_size, second_size;
};

struct record_head {
    uint8_t type;   /* enum record_type */
    uint8_t codec;  /* block: the worst codec of its pieces */
    uint8_t target; /* tombstone: type of what it deletes, or RECORD_ANY_TENANT; pin: type of what it pins */
    uint64_t lsn, segment_id, segment_nonce;
    uint32_t sequence; /* records before it in the segment */
    uint64_t offset;   /* of the head in the file */
    uint64_t body_size;
    uint64_t durable_end; /* bytes of the segment that were synced when this was written */
    uint8_t key_id[RECORD_KEY_ID];
    uint8_t id[32];     /* block id, or HMAC of the conversation id */
    uint8_t parent[32]; /* block: parent's id; conversation: HMAC of the principal */
    uint8_t salt[RECORD_SALT];
    struct kv_quality quality;
    uint32_t block_index;
    uint16_t layer_begin, layer_end;
    uint64_t version; /* conversation: its version; tombstone: what it deletes has an lsn below this */
    uint64_t time_us; /* wall clock of the write */
    uint8_t wrapped_key[CRYPTO_KEY_SIZE + CRYPTO_TAG_SIZE]; /* conversation: key of the body */
    uint32_t part_count;
    struct record_part parts[RECORD_PARTS_MAX];
    uint32_t body_crc; /* CRC32C of the sealed body */
};

void segment_head_write(const struct segment_head *h, uint8_t out[RECORD_PAGE]);
/* -TD_ERR_FORMAT, _VERSION, _CHECKSUM */
int segment_head_parse(const uint8_t in[RECORD_PAGE], struct segment_head *h);

/* Serialise; record_head_finish adds the body's CRC and the head's own once the body is known. */
void record_head_write(const struct record_head *h, uint8_t out[RECORD_PAGE]);
void record_head_finish(uint8_t out[RECORD_PAGE], uint32_t body_crc);
/* Check magic, version, CRC and every field of hostile bytes. */
int record_head_parse(const uint8_t in[RECORD_PAGE], struct record_head *h);

/* Bytes of the head page that authenticate the parts. */
static inline size_t record_aad_size(const struct record_head *h)
{
    return 256 + 8 * (size_t)h->part_count;
}
static inline uint64_t record_part_sealed_size(const struct record_part *p)
{
    return (uint64_t)p->first_size + p->second_size + CRYPTO_TAG_SIZE;
}
uint64_t record_part_offset(const struct record_head *h, uint32_t part); /* within the body */
static inline uint64_t record_size(uint64_t body_size) /* on disk, head and padding included */
{
    return RECORD_PAGE + (body_size + RECORD_PAGE - 1) / RECORD_PAGE * RECORD_PAGE;
}

/* ---- sealing ---- */

/* The key of a record's parts: for a block derived from data key, salt, type, codec and id; for a conversation the random key that this
 * derived one wraps in the head. */
void record_derive_key(const uint8_t data_key[CRYPTO_KEY_SIZE], const struct record_head *h,
                       uint8_t out[CRYPTO_KEY_SIZE]);
int record_wrap_key(const uint8_t data_key[CRYPTO_KEY_SIZE], struct record_head *h,
                    const uint8_t body_key[CRYPTO_KEY_SIZE]);
/* Key to open the parts of a parsed head with; head_page is the page that it was parsed from. */
int record_open_key(const uint8_t data_key[CRYPTO_KEY_SIZE], const struct record_head *h,
                    uint8_t out[CRYPTO_KEY_SIZE]);
/* Seal part `part` (plain = first ‖ second) into out, tag after it; page is the written head. */
int record_seal_part(const uint8_t key[CRYPTO_KEY_SIZE], const struct record_head *h, const uint8_t *page,
                     uint32_t part, const uint8_t *plain, uint8_t *out);
/* A whole record of record_size(body_size) bytes: head, sealed parts, padding. parts[i]: the plain text of part i. */
int record_seal(const uint8_t key[CRYPTO_KEY_SIZE], const struct record_head *h, const uint8_t *const *parts,
                uint8_t *out);
/* Open in place: data holds the part's cipher text without the tag. */
int record_open_part(const uint8_t key[CRYPTO_KEY_SIZE], const struct record_head *h, const uint8_t *page,
                     uint32_t part, uint8_t *data, const uint8_t tag[CRYPTO_TAG_SIZE]);

#endif
