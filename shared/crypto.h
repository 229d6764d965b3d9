/* crypto: the primitives that Tandem uses, over mbedTLS and libsodium: SHA-256, HMAC, HKDF, AES-256-GCM, random bytes.
 * Call crypto_init once per process. All functions are thread-safe. */
#ifndef TANDEM_SHARED_CRYPTO_H
#define TANDEM_SHARED_CRYPTO_H
#include "shared/base.h"

#define CRYPTO_KEY_SIZE 32
#define CRYPTO_TAG_SIZE 16

int crypto_init(void); /* idempotent; 0 or -TD_ERR_CRYPTO */

struct sha256 {
    _Alignas(16) uint8_t opaque[256];
};
void sha256_init(struct sha256 *h);
void sha256_update(struct sha256 *h, const void *data, size_t size);
void sha256_final(struct sha256 *h, uint8_t out[TD_HASH_SIZE]);
void sha256_once(const void *data, size_t size, uint8_t out[TD_HASH_SIZE]);

/* hmac_sha256: over the concatenation of `count` spans. */
void hmac_sha256(const uint8_t key[CRYPTO_KEY_SIZE], const struct span *parts, size_t count,
                 uint8_t out[TD_HASH_SIZE]);
/* hkdf_sha256: RFC 5869 extract + expand to 32 bytes; salt may be NULL/0. */
void hkdf_sha256(const uint8_t key[CRYPTO_KEY_SIZE], const void *salt, size_t salt_size, const void *info,
                 size_t info_size, uint8_t out[CRYPTO_KEY_SIZE]);

/* AES-256-GCM with a 96-bit nonce = u32le(nonce_index) || zeros. A (key, nonce_index) pair must be used once: keys
 * are derived per record from 32 random salt bytes, so the index only separates the layers of one record.
 * out may equal in. gcm_open returns -TD_ERR_CRYPTO on any mismatch and leaves out zeroed. */
int gcm_seal(const uint8_t key[CRYPTO_KEY_SIZE], uint32_t nonce_index, const void *aad, size_t aad_size,
             const void *in, size_t size, void *out, uint8_t tag[CRYPTO_TAG_SIZE]);
int gcm_open(const uint8_t key[CRYPTO_KEY_SIZE], uint32_t nonce_index, const void *aad, size_t aad_size,
             const void *in, size_t size, void *out, const uint8_t tag[CRYPTO_TAG_SIZE]);

int crypto_random(void *out, size_t size);                    /* 0 or -TD_ERR_CRYPTO */
bool crypto_equal(const void *a, const void *b, size_t size); /* constant time */
void crypto_wipe(void *data, size_t size);                    /* not optimised away */

#endif
