/* sealed: block records outside of the segment that they were written to. They keep every byte, so the seal (record.h) is the same; what it does not
 * prove any more is the place, and that does not matter: key id, type and id are checked against what was asked for, and the
 * layers' tags bind all of the head. */
#include "store/store_internal.h"
#include "store/tier.h"
#include <stdlib.h>

static const char name_label[] = "tandem-remote-name", mask_label[] = "tandem-remote-mask";

enum { IDS_AT = 80, IDS_SIZE = 64 }; /* id and parent in a record's head: FORMAT.md */

static int tenant_keys_of(struct store *s, const char *tenant, struct tenant_keys *keys)
{
    return keys_get(s->keys, keys_find(s->keys, tenant), keys);
}

/* ---- out ---------------------------------------------------------------------------------------------------- */

static int read_whole(struct store *s, const struct read_head *r, uint8_t **record, size_t *size)
{
    *size = RECORD_PAGE + (size_t)r->head.body_size;
    *record = malloc(*size);
    if (!*record)
        return -TD_ERR_NOMEM;
    memcpy(*record, r->page, RECORD_PAGE);
    int rc = io_read_all(s->io, r->segment->fd, *record + RECORD_PAGE, (size_t)r->head.body_size,
                         r->head.offset + RECORD_PAGE);
    if (rc == 0 && crc32c(0, *record + RECORD_PAGE, (size_t)r->head.body_size) != r->head.body_crc)
        rc = -TD_ERR_CHECKSUM;
    if (rc < 0)
        free(*record);
    return rc;
}

int store_read_sealed(struct store *s, const char *tenant, const struct kv_block_id *id, uint8_t **record,
                      size_t *size)
{
    struct record_place place = {0};
    struct tenant_keys keys;
    struct read_head r;
    uint64_t lsn = 0;
    uint32_t number = keys_find(s->keys, tenant);
    struct table_shard *shard = table_lock(&s->blocks, id->bytes);
    const struct entry *e = number ? table_find(&s->blocks, shard, number, id->bytes) : NULL;
    bool waits = e && e->pending && e->pending->kind != OP_DELETE;
    if (e && e->segment_id && !e->pending) {
        place = (struct record_place){e->segment_id, e->offset, e->stored_size};
        lsn = e->lsn;
    }
    table_unlock(shard);
    int rc = place.segment_id ? keys_get(s->keys, number, &keys) : -TD_ERR_NOTFOUND;
    if (rc < 0)
        return waits ? -TD_ERR_AGAIN : -TD_ERR_NOTFOUND;
    rc = read_open(s, &keys, &place, RECORD_BLOCK, id->bytes, lsn, &r);
    crypto_wipe(&keys, sizeof keys);
    if (rc == 0) {
        rc = read_whole(s, &r, record, size);
        read_close(s, &r);
    }
    if (rc == 0 || rc == -TD_ERR_NOMEM)
        return rc;
    return read_place_is_current(s, RECORD_BLOCK, number, id->bytes, &place) ? -TD_ERR_NOTFOUND
                                                                             : -TD_ERR_AGAIN;
}

/* ---- in ----------------------------------------------------------------------------------------------------- */

int store_open_sealed(struct store *s, const char *tenant, const struct kv_block_id *id, uint8_t *record,
                      size_t size, struct tier_block **out)
{
    struct tenant_keys keys;
    struct record_head h;
    uint8_t key[CRYPTO_KEY_SIZE];
    if (size < RECORD_PAGE || record_head_parse(record, &h) < 0 || h.type != RECORD_BLOCK ||
        h.body_size != size - RECORD_PAGE || memcmp(h.id, id->bytes, sizeof h.id) != 0)
        return -TD_ERR_NOTFOUND;
    if (tenant_keys_of(s, tenant, &keys) < 0)
        return -TD_ERR_NOTFOUND;
    int rc = memcmp(h.key_id, keys.key_id, sizeof h.key_id) != 0 ? -TD_ERR_NOTFOUND
                                                                 : record_open_key(keys.data_key, &h, key);
    crypto_wipe(&keys, sizeof keys);
    struct tier_block *b = rc < 0 ? NULL : read_block_for(&h);
    rc = rc < 0 ? rc : b ? 0 : -TD_ERR_NOMEM;
    if (rc == 0) {
        memcpy(b->data, record + RECORD_PAGE, b->data_size);
        rc = read_open_body(key, &h, record, b);
    }
    crypto_wipe(key, sizeof key);
    if (rc < 0) {
        tier_block_release(b);
        return rc == -TD_ERR_NOMEM ? rc : -TD_ERR_NOTFOUND;
    }
    *out = b;
    return 0;
}

/* ---- names -------------------------------------------------------------------------------------------------- */

int store_sealed_name(struct store *s, const char *tenant, const struct kv_block_id *id, uint8_t name[32])
{
    struct tenant_keys keys;
    uint8_t key[CRYPTO_KEY_SIZE];
    int rc = tenant_keys_of(s, tenant, &keys);
    if (rc < 0)
        return rc;
    hkdf_sha256(keys.data_key, NULL, 0, name_label, sizeof name_label - 1, key);
    hmac_sha256(key, &(struct span){id->bytes, sizeof id->bytes}, 1, name);
    crypto_wipe(&keys, sizeof keys);
    crypto_wipe(key, sizeof key);
    return 0;
}

int store_sealed_mask(struct store *s, const char *tenant, const uint8_t name[32], uint8_t *record,
                      size_t size)
{
    struct tenant_keys keys;
    uint8_t key[CRYPTO_KEY_SIZE], stream[IDS_SIZE];
    int rc = size < RECORD_PAGE ? -TD_ERR_TRUNCATED : tenant_keys_of(s, tenant, &keys);
    if (rc < 0)
        return rc;
    hkdf_sha256(keys.data_key, NULL, 0, mask_label, sizeof mask_label - 1, key);
    for (uint8_t half = 0; half < 2; half++)
        hmac_sha256(key, (const struct span[]){{&half, 1}, {name, 32}}, 2, stream + 32 * half);
    for (int i = 0; i < IDS_SIZE; i++)
        record[IDS_AT + i] ^= stream[i];
    crypto_wipe(&keys, sizeof keys);
    crypto_wipe(key, sizeof key);
    crypto_wipe(stream, sizeof stream);
    return 0;
}
