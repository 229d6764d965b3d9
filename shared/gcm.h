/* gcm: the implementations of AES-256-GCM that crypto.c chooses from when the process starts. All give the same bytes; which one runs is a matter of
 * speed alone (ARCHITECTURE.md, Decisions). Only crypto.c, gcm_*.c and the test that compares them include this. */
#ifndef TANDEM_SHARED_GCM_H
#define TANDEM_SHARED_GCM_H
#include "shared/crypto.h"

#define GCM_NONCE_SIZE 12

struct gcm_engine {
    const char *name;
    bool (*usable)(void); /* by this processor; called before anything else */
    /* As gcm_seal and gcm_open, with the nonce made; open need not wipe. 0 or -TD_ERR_CRYPTO. */
    int (*seal)(const uint8_t key[CRYPTO_KEY_SIZE], const uint8_t nonce[GCM_NONCE_SIZE], const void *aad,
                size_t aad_size, const void *in, size_t size, void *out, uint8_t tag[CRYPTO_TAG_SIZE]);
    int (*open)(const uint8_t key[CRYPTO_KEY_SIZE], const uint8_t nonce[GCM_NONCE_SIZE], const void *aad,
                size_t aad_size, const void *in, size_t size, void *out, const uint8_t tag[CRYPTO_TAG_SIZE]);
};
extern const struct gcm_engine gcm_mbedtls;
#ifdef TANDEM_SODIUM
extern const struct gcm_engine gcm_sodium;
/* gcm_tls.c: mbedTLS's calls for a whole record go to it from now on, or no more; where gcm_sodium is usable, before there are other threads. */
void gcm_tls_use_sodium(bool yes);
#endif

#endif
