/* crypto: thin layers over mbedTLS, and libsodium for AES-GCM where the processor has what it needs. HMAC and HKDF are built here on SHA-256, because mbedTLS's own allocate
 * and can therefore fail, while a hash that every block id goes through must not.
 *
 * mbedTLS's SHA-256 in software cannot fail with valid arguments; should it ever, going on with a wrong
 * digest would be worse than stopping, so that (and only that) aborts. */
#include "shared/gcm.h"
#include "shared/status.h"
#include <errno.h>
#include <mbedtls/constant_time.h>
#include <mbedtls/gcm.h>
#include <mbedtls/platform_util.h>
#include <mbedtls/sha256.h>
#include <psa/crypto.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/random.h>

#define SHA256_BLOCK_SIZE 64

static int init_status;
static pthread_once_t init_once = PTHREAD_ONCE_INIT;

/* TLS 1.3 and X.509 of mbedTLS need PSA to be up, and its first call is not thread-safe in every build. */
static void choose_gcm(void);

static void init_once_only(void)
{
    choose_gcm();
    uint8_t probe[16];
    bool good = psa_crypto_init() == PSA_SUCCESS && crypto_random(probe, sizeof probe) == 0;
    init_status = good ? 0 : -TD_ERR_CRYPTO;
    crypto_wipe(probe, sizeof probe);
}

int crypto_init(void)
{
    pthread_once(&init_once, init_once_only);
    return init_status;
}

/* --- SHA-256 --- */

_Static_assert(sizeof(mbedtls_sha256_context) <= sizeof(struct sha256), "the opaque state holds mbedTLS's");
_Static_assert(_Alignof(mbedtls_sha256_context) <= _Alignof(struct sha256), "and is aligned for it");

static mbedtls_sha256_context *sha256_state(struct sha256 *h)
{
    return (mbedtls_sha256_context *)h->opaque;
}

static void require(int mbedtls_status)
{
    if (mbedtls_status != 0)
        abort();
}

void sha256_init(struct sha256 *h)
{
    mbedtls_sha256_init(sha256_state(h));
    require(mbedtls_sha256_starts(sha256_state(h), 0));
}

void sha256_update(struct sha256 *h, const void *data, size_t size)
{
    if (size > 0)
        require(mbedtls_sha256_update(sha256_state(h), data, size));
}

void sha256_final(struct sha256 *h, uint8_t out[TD_HASH_SIZE])
{
    require(mbedtls_sha256_finish(sha256_state(h), out));
    mbedtls_sha256_free(sha256_state(h)); /* wipes: the state may have come from a key */
}

void sha256_once(const void *data, size_t size, uint8_t out[TD_HASH_SIZE])
{
    struct sha256 h;
    sha256_init(&h);
    sha256_update(&h, data, size);
    sha256_final(&h, out);
}

/* --- HMAC (RFC 2104) and HKDF (RFC 5869) --- */

static void hmac(const void *key, size_t key_size, const struct span *parts, size_t count,
                 uint8_t out[TD_HASH_SIZE])
{
    uint8_t block[SHA256_BLOCK_SIZE] = {0};
    if (key_size > sizeof block)
        sha256_once(key, key_size, block);
    else if (key_size > 0)
        memcpy(block, key, key_size);
    for (size_t i = 0; i < sizeof block; i++)
        block[i] ^= 0x36;
    struct sha256 h;
    uint8_t inner[TD_HASH_SIZE];
    sha256_init(&h);
    sha256_update(&h, block, sizeof block);
    for (size_t i = 0; i < count; i++)
        sha256_update(&h, parts[i].data, parts[i].size);
    sha256_final(&h, inner);

    for (size_t i = 0; i < sizeof block; i++)
        block[i] ^= 0x36 ^ 0x5c;
    sha256_init(&h);
    sha256_update(&h, block, sizeof block);
    sha256_update(&h, inner, sizeof inner);
    sha256_final(&h, out);
    crypto_wipe(block, sizeof block);
    crypto_wipe(inner, sizeof inner);
}

void hmac_sha256(const uint8_t key[CRYPTO_KEY_SIZE], const struct span *parts, size_t count,
                 uint8_t out[TD_HASH_SIZE])
{
    hmac(key, CRYPTO_KEY_SIZE, parts, count, out);
}

void hkdf_sha256(const uint8_t key[CRYPTO_KEY_SIZE], const void *salt, size_t salt_size, const void *info,
                 size_t info_size, uint8_t out[CRYPTO_KEY_SIZE])
{
    uint8_t extracted[TD_HASH_SIZE];
    /* No salt means a hash's length of zeros, which HMAC pads to the same block as an empty key. */
    hmac(salt, salt ? salt_size : 0, &(struct span){key, CRYPTO_KEY_SIZE}, 1, extracted);
    static const uint8_t first_block = 1; /* 32 bytes of output are exactly T(1) */
    const struct span expand[] = {{info, info ? info_size : 0}, {&first_block, 1}};
    hmac(extracted, sizeof extracted, expand, TD_COUNT(expand), out);
    crypto_wipe(extracted, sizeof extracted);
}

/* --- AES-256-GCM --- */

static bool mbedtls_usable(void)
{
    return true;
}

static int mbedtls_seal(const uint8_t key[CRYPTO_KEY_SIZE], const uint8_t nonce[GCM_NONCE_SIZE],
                        const void *aad, size_t aad_size, const void *in, size_t size, void *out,
                        uint8_t tag[CRYPTO_TAG_SIZE])
{
    mbedtls_gcm_context gcm;
    mbedtls_gcm_init(&gcm);
    int status = mbedtls_gcm_setkey(&gcm, MBEDTLS_CIPHER_ID_AES, key, CRYPTO_KEY_SIZE * 8);
    if (status == 0)
        status = mbedtls_gcm_crypt_and_tag(&gcm, MBEDTLS_GCM_ENCRYPT, size, nonce, GCM_NONCE_SIZE, aad,
                                           aad_size, in, out, CRYPTO_TAG_SIZE, tag);
    mbedtls_gcm_free(&gcm);
    return status == 0 ? 0 : -TD_ERR_CRYPTO;
}

static int mbedtls_open(const uint8_t key[CRYPTO_KEY_SIZE], const uint8_t nonce[GCM_NONCE_SIZE],
                        const void *aad, size_t aad_size, const void *in, size_t size, void *out,
                        const uint8_t tag[CRYPTO_TAG_SIZE])
{
    mbedtls_gcm_context gcm;
    mbedtls_gcm_init(&gcm);
    int status = mbedtls_gcm_setkey(&gcm, MBEDTLS_CIPHER_ID_AES, key, CRYPTO_KEY_SIZE * 8);
    if (status == 0)
        status = mbedtls_gcm_auth_decrypt(&gcm, size, nonce, GCM_NONCE_SIZE, aad, aad_size, tag,
                                          CRYPTO_TAG_SIZE, in, out);
    mbedtls_gcm_free(&gcm);
    return status == 0 ? 0 : -TD_ERR_CRYPTO;
}

const struct gcm_engine gcm_mbedtls = {"mbedTLS", mbedtls_usable, mbedtls_seal, mbedtls_open};

/* Until crypto_init has chosen, the one that runs everywhere. */
static const struct gcm_engine *gcm = &gcm_mbedtls;

static void choose_gcm(void)
{
#ifdef TANDEM_SODIUM
    if (!gcm_sodium.usable())
        return;
    gcm = &gcm_sodium;
    gcm_tls_use_sodium(true);
#endif
}

static void make_nonce(uint32_t index, uint8_t nonce[GCM_NONCE_SIZE])
{
    memset(nonce, 0, GCM_NONCE_SIZE);
    store_le32(nonce, index);
}

int gcm_seal(const uint8_t key[CRYPTO_KEY_SIZE], uint32_t nonce_index, const void *aad, size_t aad_size,
             const void *in, size_t size, void *out, uint8_t tag[CRYPTO_TAG_SIZE])
{
    uint8_t nonce[GCM_NONCE_SIZE];
    make_nonce(nonce_index, nonce);
    return gcm->seal(key, nonce, aad, aad_size, in, size, out, tag);
}

int gcm_open(const uint8_t key[CRYPTO_KEY_SIZE], uint32_t nonce_index, const void *aad, size_t aad_size,
             const void *in, size_t size, void *out, const uint8_t tag[CRYPTO_TAG_SIZE])
{
    uint8_t nonce[GCM_NONCE_SIZE];
    make_nonce(nonce_index, nonce);
    int rc = gcm->open(key, nonce, aad, aad_size, in, size, out, tag);
    if (rc < 0 && size > 0)
        crypto_wipe(out, size);
    return rc;
}

/* --- random bytes, comparing, wiping --- */

/* The kernel's generator directly: it needs no lock, no seed and survives fork. */
int crypto_random(void *out, size_t size)
{
    uint8_t *next = out;
    while (size > 0) {
        ssize_t got = getrandom(next, size, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return -TD_ERR_CRYPTO;
        next += got;
        size -= (size_t)got;
    }
    return 0;
}

bool crypto_equal(const void *a, const void *b, size_t size)
{
    return size == 0 || mbedtls_ct_memcmp(a, b, size) == 0;
}

void crypto_wipe(void *data, size_t size)
{
    if (size > 0)
        mbedtls_platform_zeroize(data, size);
}
