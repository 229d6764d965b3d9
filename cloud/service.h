/* service: what the two front doors of a node, the edges' WSS and the OpenAI API, have in common: the engine behind its port, the store,
 * who may come in, and which model this is. Filled once at start-up by node.c; borrowed by everybody; `draining` and `erasing` change on the loop's thread. */
#ifndef TANDEM_CLOUD_SERVICE_H
#define TANDEM_CLOUD_SERVICE_H
#include "cloud/auth.h"
#include "cloud/engine_port.h"
#include "protocol/io_worker.h"
#include "cloud/tenant_keys.h"
#include "shared/chat_template.h"
#include "shared/kv_seal.h"
#include "store/conversation.h"

struct service {
    struct net_loop *loop;
    struct inbox *inbox;
    struct io_worker *io;
    struct engine_port *engine;
    struct store *store;
    struct conv_index *conversations;
    struct auth *auth;
    struct tenant_keys *keys;
    struct io_worker *fetcher; /* NULL: FETCH is not answered here; else the next two are set */
    struct tiers *tiers;
    struct kv_seal seal;
    const struct tokenizer *tokenizer;
    enum chat_template_kind template_kind;
    const char *model_name, *node;
    uint8_t fingerprint[TD_HASH_SIZE], layout[TD_HASH_SIZE];
    uint32_t numerics; /* enum kv_numerics */
    uint32_t layer_count, vocab_count, context_max;
    uint64_t node_epoch; /* random: another one after every start */
    bool draining;       /* nothing new is taken */
    char erasing
        [STORE_TENANT_MAX +
         1]; /* nobody of this tenant is let in; "": none (node_erase.c). Loop's thread, as the one above */
};

/* The two keys of a principal. Nearly always from memory. */
static inline int service_keys(struct service *s, const char *tenant, const char *principal,
                               uint8_t shared_key[CRYPTO_KEY_SIZE], uint8_t own_key[CRYPTO_KEY_SIZE],
                               struct td_error *err)
{
    int rc = tenant_keys_get(s->keys, tenant, shared_key, err);
    if (rc == 0)
        kv_principal_key(shared_key, principal, own_key);
    return rc;
}

#endif
