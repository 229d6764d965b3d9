/* identity: what the cloud said this device is, kept for a start without the cloud (--offline continue): conversations and the device's KV have their
 * names from it. One small file beside the store, sealed under the store's keys; what is damaged, another store's, or was said to a device with another
 * model counts as absent: that device alone would say something else than the cloud. */
#ifndef TANDEM_EDGE_IDENTITY_H
#define TANDEM_EDGE_IDENTITY_H
#include "protocol/limits.h"
#include "store/store.h"

struct edge_identity {
    char tenant[LIMIT_NAME_SIZE + 1], principal[LIMIT_NAME_SIZE + 1];
    uint8_t principal_key[CRYPTO_KEY_SIZE];
    uint32_t context_max, codec_mask, hidden_mask; /* as WELCOME has them */
};

/* 0, -TD_ERR_NOTFOUND, -TD_ERR_IO, or the store's. */
int identity_load(struct store *store, const char *path, const uint8_t fingerprint[TD_HASH_SIZE],
                  struct edge_identity *out);
int identity_save(struct store *store, const char *path, const uint8_t fingerprint[TD_HASH_SIZE],
                  const struct edge_identity *identity);

#endif
