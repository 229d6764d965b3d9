/* kv_seal: pieces of a cloud's KV that devices keep for it and give back (FETCH), and can neither read, alter nor use for anything else.
 *
 * A sealed piece is a piece whose codec is KV_SEALED and whose payload is another piece under AES-256-GCM; KV_FORMAT.md has the bytes. What is
 * authenticated: the whole piece with its head, and the block's name, which is an HMAC over model, layout and all tokens up to the block under a
 * key of one principal of one tenant. Whoever opens it compares the name with the one that the tokens at hand give: a piece of another principal,
 * model, prompt or block has another name, one of another layer another head.
 *
 * All keys come from the store's master key and not from the store, so what devices hold outlives the store. Another master key is another tag:
 * a device does not even send what was sealed under the one before. */
#ifndef TANDEM_SHARED_KV_SEAL_H
#define TANDEM_SHARED_KV_SEAL_H
#include "shared/crypto.h"
#include "shared/kv_block.h"

#define KV_SEAL_SALT_SIZE 32
#define KV_SEAL_TAG_SIZE  16
/* bytes that a sealed piece is longer than the piece in it */
#define KV_SEAL_OVERHEAD (KV_PIECE_HEAD_SIZE + KV_SEAL_SALT_SIZE + TD_HASH_SIZE + CRYPTO_TAG_SIZE)

struct kv_seal {
    uint8_t key[CRYPTO_KEY_SIZE], names[CRYPTO_KEY_SIZE];
    uint8_t tag[KV_SEAL_TAG_SIZE]; /* no secret: devices tell by it whose seal it is */
};
void kv_seal_derive(const uint8_t master[CRYPTO_KEY_SIZE], struct kv_seal *out);
/* The key for kv_block_id_next, which then gives the names that blocks of this principal are sealed with. */
void kv_seal_name_key(const struct kv_seal *s, const char *tenant, const char *principal,
                      uint8_t out[CRYPTO_KEY_SIZE]);

/* salt: random, one for each block and sealing. piece: whole, of a layer below 2^31. Returns the bytes written; -TD_ERR_NOSPACE, -TD_ERR_CRYPTO, or what
 * kv_piece_peek says of the piece. Thread-safe; allocates nothing. */
int64_t kv_seal_piece(const struct kv_seal *s, const uint8_t salt[KV_SEAL_SALT_SIZE],
                      const struct kv_block_id *name, struct span piece, uint8_t *dst, size_t capacity);
/* Hostile bytes. The piece, whose head agrees with the sealed one's, at dst, which has room for sealed.size - KV_SEAL_OVERHEAD, and the name that it
 * was sealed with. Returns its size; -TD_ERR_CRYPTO: not sealed by this key, or altered. */
int64_t kv_seal_open(const struct kv_seal *s, struct span sealed, struct kv_block_id *name, uint8_t *dst);

#endif
