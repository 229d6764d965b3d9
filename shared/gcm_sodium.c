/* gcm_sodium: AES-256-GCM by libsodium, which needs AES and carry-less multiplication instructions and is several times as fast as mbedTLS with the same
 * ones. Empty where the library was not there when Tandem was built. */
#include "shared/gcm.h"
#include "shared/status.h"

#ifdef TANDEM_SODIUM
#include <sodium.h>

static bool usable(void)
{
    return sodium_init() >= 0 && crypto_aead_aes256gcm_is_available();
}

static int seal(const uint8_t key[CRYPTO_KEY_SIZE], const uint8_t nonce[GCM_NONCE_SIZE], const void *aad,
                size_t aad_size, const void *in, size_t size, void *out, uint8_t tag[CRYPTO_TAG_SIZE])
{
    crypto_aead_aes256gcm_state state;
    uint8_t nothing = 0;
    out = out ? out : &nothing; /* of no bytes; the library wants a pointer all the same */
    crypto_aead_aes256gcm_beforenm(&state, key);
    int status = crypto_aead_aes256gcm_encrypt_detached_afternm(out, tag, NULL, in, size, aad, aad_size, NULL,
                                                                nonce, &state);
    crypto_wipe(&state, sizeof state);
    return status == 0 ? 0 : -TD_ERR_CRYPTO;
}

static int open(const uint8_t key[CRYPTO_KEY_SIZE], const uint8_t nonce[GCM_NONCE_SIZE], const void *aad,
                size_t aad_size, const void *in, size_t size, void *out, const uint8_t tag[CRYPTO_TAG_SIZE])
{
    crypto_aead_aes256gcm_state state;
    uint8_t nothing = 0;
    out = out ? out : &nothing;
    in = in ? in : &nothing;
    crypto_aead_aes256gcm_beforenm(&state, key);
    int status = crypto_aead_aes256gcm_decrypt_detached_afternm(out, NULL, in, size, tag, aad, aad_size,
                                                                nonce, &state);
    crypto_wipe(&state, sizeof state);
    return status == 0 ? 0 : -TD_ERR_CRYPTO;
}

const struct gcm_engine gcm_sodium = {"libsodium", usable, seal, open};
#endif
