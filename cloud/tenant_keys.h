/* tenant_keys: the chain keys of tenants, kept in memory, so that greeting an edge does not wait for the store. Warmed with every tenant of
 * the tokens file whenever that is read. Thread-safe. */
#ifndef TANDEM_CLOUD_TENANT_KEYS_H
#define TANDEM_CLOUD_TENANT_KEYS_H
#include "store/store.h"

struct tenant_keys;
struct tenant_keys *tenant_keys_create(struct store *store); /* NULL without memory */
void tenant_keys_destroy(struct tenant_keys *k);             /* wipes */
/* 0, or what store_chain_key says. */
int tenant_keys_get(struct tenant_keys *k, const char *tenant, uint8_t out[CRYPTO_KEY_SIZE],
                    struct td_error *err);
/* The tenant has been erased: whoever asks next gets its new keys. */
void tenant_keys_forget(struct tenant_keys *k, const char *tenant);

#endif
