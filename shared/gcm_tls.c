/* gcm_tls: TLS's records go through libsodium's AES-256-GCM too. mbedTLS has no hook for that, so the linker turns its calls to the two functions of a whole
 * record to those here (--wrap, CMakeLists.txt), which take the key out of mbedTLS's context; what libsodium cannot do stays mbedTLS's: other
 * keys, other nonces, another processor. Before TLS begins it is seen that the key is where it is looked for. The suites that the library offers are
 * put in another order, as it can do nothing with keys of 128 bits. */
#define MBEDTLS_ALLOW_PRIVATE_ACCESS
#include "shared/gcm.h"

#ifdef TANDEM_SODIUM
#include <mbedtls/aes.h>
#include <mbedtls/gcm.h>
#include <mbedtls/ssl_ciphersuites.h>

static bool used; /* set once, before there are other threads */

/* Weak, for who links the archive without --wrap: then nothing here is called. */
#define REAL __attribute__((weak))

REAL int __real_mbedtls_gcm_crypt_and_tag(mbedtls_gcm_context *ctx, int mode, size_t size,
                                          const unsigned char *nonce, size_t nonce_size,
                                          const unsigned char *aad, size_t aad_size, const unsigned char *in,
                                          unsigned char *out, size_t tag_size, unsigned char *tag);
REAL int __real_mbedtls_gcm_auth_decrypt(mbedtls_gcm_context *ctx, size_t size, const unsigned char *nonce,
                                         size_t nonce_size, const unsigned char *aad, size_t aad_size,
                                         const unsigned char *tag, size_t tag_size, const unsigned char *in,
                                         unsigned char *out);
REAL const int *__real_mbedtls_ssl_list_ciphersuites(void);
int __wrap_mbedtls_gcm_crypt_and_tag(mbedtls_gcm_context *ctx, int mode, size_t size,
                                     const unsigned char *nonce, size_t nonce_size, const unsigned char *aad,
                                     size_t aad_size, const unsigned char *in, unsigned char *out,
                                     size_t tag_size, unsigned char *tag);
int __wrap_mbedtls_gcm_auth_decrypt(mbedtls_gcm_context *ctx, size_t size, const unsigned char *nonce,
                                    size_t nonce_size, const unsigned char *aad, size_t aad_size,
                                    const unsigned char *tag, size_t tag_size, const unsigned char *in,
                                    unsigned char *out);
const int *__wrap_mbedtls_ssl_list_ciphersuites(void);

/* The key of 256 bits: the first round keys of AES are the key itself. NULL: it is of another kind. */
static const uint8_t *key_of(const mbedtls_gcm_context *ctx)
{
    const mbedtls_cipher_context_t *cipher = &ctx->cipher_ctx;
    if (mbedtls_cipher_get_type(cipher) != MBEDTLS_CIPHER_AES_256_ECB)
        return NULL;
    const mbedtls_aes_context *aes = cipher->cipher_ctx;
    return (const uint8_t *)(aes->buf + aes->rk_offset);
}

static const uint8_t *key_if_ours(const mbedtls_gcm_context *ctx, size_t nonce_size, size_t tag_size)
{
    return used && nonce_size == GCM_NONCE_SIZE && tag_size == CRYPTO_TAG_SIZE ? key_of(ctx) : NULL;
}

int __wrap_mbedtls_gcm_crypt_and_tag(mbedtls_gcm_context *ctx, int mode, size_t size,
                                     const unsigned char *nonce, size_t nonce_size, const unsigned char *aad,
                                     size_t aad_size, const unsigned char *in, unsigned char *out,
                                     size_t tag_size, unsigned char *tag)
{
    const uint8_t *key = mode == MBEDTLS_GCM_ENCRYPT ? key_if_ours(ctx, nonce_size, tag_size) : NULL;
    if (!key)
        return __real_mbedtls_gcm_crypt_and_tag(ctx, mode, size, nonce, nonce_size, aad, aad_size, in, out,
                                                tag_size, tag);
    return gcm_sodium.seal(key, nonce, aad, aad_size, in, size, out, tag) == 0 ? 0
                                                                               : MBEDTLS_ERR_GCM_BAD_INPUT;
}

int __wrap_mbedtls_gcm_auth_decrypt(mbedtls_gcm_context *ctx, size_t size, const unsigned char *nonce,
                                    size_t nonce_size, const unsigned char *aad, size_t aad_size,
                                    const unsigned char *tag, size_t tag_size, const unsigned char *in,
                                    unsigned char *out)
{
    const uint8_t *key = key_if_ours(ctx, nonce_size, tag_size);
    if (!key)
        return __real_mbedtls_gcm_auth_decrypt(ctx, size, nonce, nonce_size, aad, aad_size, tag, tag_size, in,
                                               out);
    if (gcm_sodium.open(key, nonce, aad, aad_size, in, size, out, tag) == 0)
        return 0;
    crypto_wipe(out, size);
    return MBEDTLS_ERR_GCM_AUTH_FAILED;
}

const int *__wrap_mbedtls_ssl_list_ciphersuites(void)
{
    static const int suites[] = {MBEDTLS_TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
                                 MBEDTLS_TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
                                 MBEDTLS_TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
                                 MBEDTLS_TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
                                 MBEDTLS_TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
                                 MBEDTLS_TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
                                 0};
    return used ? suites : __real_mbedtls_ssl_list_ciphersuites();
}

void gcm_tls_use_sodium(bool yes)
{
    static const uint8_t key[CRYPTO_KEY_SIZE] = "the key is where it is looked f";
    mbedtls_gcm_context gcm;
    mbedtls_gcm_init(&gcm);
    used = yes && mbedtls_gcm_setkey(&gcm, MBEDTLS_CIPHER_ID_AES, key, sizeof key * 8) == 0 && key_of(&gcm) &&
           memcmp(key_of(&gcm), key, sizeof key) == 0;
    mbedtls_gcm_free(&gcm);
}
#endif
