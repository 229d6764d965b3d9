/* kv_seal: see kv_seal.h. The key of a piece is derived from the block's salt, and the nonce tells the block's pieces apart. */
#include "shared/kv_seal.h"
#include "shared/kv_codec.h"

#define AAD_SIZE (KV_PIECE_HEAD_SIZE + KV_SEAL_SALT_SIZE + TD_HASH_SIZE) /* head, salt, name */
#define AT_SALT  KV_PIECE_HEAD_SIZE
#define AT_NAME  (AT_SALT + KV_SEAL_SALT_SIZE)

static void derive(const uint8_t key[CRYPTO_KEY_SIZE], const char *label, uint8_t out[CRYPTO_KEY_SIZE])
{
    hkdf_sha256(key, NULL, 0, label, strlen(label), out);
}

void kv_seal_derive(const uint8_t master[CRYPTO_KEY_SIZE], struct kv_seal *out)
{
    uint8_t tag[CRYPTO_KEY_SIZE];
    derive(master, "tandem-seal-key", out->key);
    derive(master, "tandem-seal-names", out->names);
    derive(master, "tandem-seal-tag", tag);
    memcpy(out->tag, tag, sizeof out->tag);
}

void kv_seal_name_key(const struct kv_seal *s, const char *tenant, const char *principal,
                      uint8_t out[CRYPTO_KEY_SIZE])
{
    struct span parts[] = {
        {(const uint8_t *)tenant, strlen(tenant) + 1}, /* with its NUL: no two join alike */
        {(const uint8_t *)principal, strlen(principal)}};
    hmac_sha256(s->names, parts, TD_COUNT(parts), out);
}

static void piece_key(const struct kv_seal *s, const uint8_t *salt, uint8_t out[CRYPTO_KEY_SIZE])
{
    static const char label[] = "tandem-sealed-piece";
    hkdf_sha256(s->key, salt, KV_SEAL_SALT_SIZE, label, sizeof label - 1, out);
}

static uint32_t nonce_of(const struct kv_piece_head *h)
{
    return h->layer * 2u + h->is_value;
}

int64_t kv_seal_piece(const struct kv_seal *s, const uint8_t salt[KV_SEAL_SALT_SIZE],
                      const struct kv_block_id *name, struct span piece, uint8_t *dst, size_t capacity)
{
    struct kv_piece_head head;
    uint8_t key[CRYPTO_KEY_SIZE];
    int rc = kv_piece_peek(piece.data, piece.size, &head);
    if (rc < 0)
        return rc;
    if (capacity < piece.size + KV_SEAL_OVERHEAD)
        return -TD_ERR_NOSPACE;
    size_t payload_size = piece.size + KV_SEAL_OVERHEAD - KV_PIECE_HEAD_SIZE;
    head.codec = KV_SEALED;
    head.table = 0;
    memcpy(dst + AT_SALT, salt, KV_SEAL_SALT_SIZE);
    memcpy(dst + AT_NAME, name->bytes, TD_HASH_SIZE);
    kv_piece_authenticated(&head, payload_size, dst);
    piece_key(s, salt, key);
    rc = gcm_seal(key, nonce_of(&head), dst, AAD_SIZE, piece.data, piece.size, dst + AAD_SIZE,
                  dst + AAD_SIZE + piece.size);
    crypto_wipe(key, sizeof key);
    return rc < 0 ? rc : kv_piece_close(&head, payload_size, dst);
}

/* What lies in it is of the place that its head says: whoever sealed it saw to that, and nobody has altered it since. */
int64_t kv_seal_open(const struct kv_seal *s, struct span sealed, struct kv_block_id *name, uint8_t *dst)
{
    struct kv_piece_head head;
    uint8_t key[CRYPTO_KEY_SIZE], aad[AAD_SIZE];
    int rc = kv_piece_peek(sealed.data, sealed.size, &head);
    if (rc < 0)
        return rc;
    if (head.codec != KV_SEALED || sealed.size <= KV_SEAL_OVERHEAD)
        return -TD_ERR_FORMAT;
    size_t size = sealed.size - KV_SEAL_OVERHEAD;
    memcpy(aad, sealed.data, sizeof aad);
    kv_piece_authenticated(&head, head.payload_size, aad);
    piece_key(s, sealed.data + AT_SALT, key);
    rc = gcm_open(key, nonce_of(&head), aad, sizeof aad, sealed.data + AAD_SIZE, size, dst,
                  sealed.data + AAD_SIZE + size);
    crypto_wipe(key, sizeof key);
    memcpy(name->bytes, sealed.data + AT_NAME, TD_HASH_SIZE);
    return rc < 0 ? rc : (int64_t)size;
}
