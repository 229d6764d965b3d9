/* direct_conversations: a principal's conversations in a node's store, as the API asks for them. */
#include "cloud/direct_internal.h"
#include "protocol/api_text.h"
#include "store/conversation_json.h"
#include <stdlib.h>

static json_t *text_of(const struct conversation *c, const char *bytes, size_t size)
{
    (void)c;
    size_t used = 0;
    char *text = api_utf8_repair(bytes, size, &used);
    json_t *value = text ? json_stringn(text, used) : NULL;
    if (text)
        crypto_wipe(text, used);
    free(text);
    return value;
}

int direct_conversation_list(void *ctx, const struct api_identity *who, char **json)
{
    struct direct *d = ctx;
    return conversation_list_json(d->service->store, who->tenant, who->principal, text_of, json);
}

int direct_conversation_show(void *ctx, const struct api_identity *who, const char *id, char **json)
{
    struct direct *d = ctx;
    return conversation_show_json(d->service->conversations, d->service->tokenizer, who->tenant,
                                  who->principal, id, text_of, json);
}

int direct_conversation_delete(void *ctx, const struct api_identity *who, const char *id)
{
    struct direct *d = ctx;
    return conv_delete(d->service->conversations, who->tenant, who->principal, id);
}

int direct_conversation_fork(void *ctx, const struct api_identity *who, const char *id, char **json)
{
    struct direct *d = ctx;
    return conversation_fork_json(d->service->conversations, who->tenant, who->principal, id, json);
}

/* Names of a conversation's blocks under one key; malloc'ed, the caller's. */
static struct kv_block_id *chain_of(const struct service *v, const uint8_t key[CRYPTO_KEY_SIZE],
                                    const struct conversation *c)
{
    struct kv_block_id parent = {{0}}, *ids = malloc((c->ids_count / KV_BLOCK_TOKENS + 1) * sizeof *ids);
    for (uint32_t i = 0; i < c->ids_count / KV_BLOCK_TOKENS && ids; i++) {
        kv_block_id_next(key, &parent, v->fingerprint, v->layout, c->ids + (size_t)i * KV_BLOCK_TOKENS,
                         &ids[i]);
        parent = ids[i];
    }
    return ids;
}

/* What is held of a conversation's KV, in both namespaces. A prefix that several pinned conversations have is spared until one of them is unpinned. */
static int pin_blocks(struct service *v, const struct api_identity *who, const struct conversation *c,
                      bool pinned)
{
    struct td_error err = {0};
    uint8_t keys[2][CRYPTO_KEY_SIZE];
    int rc = service_keys(v, who->tenant, who->principal, keys[0], keys[1], &err);
    for (int i = 0; i < 2 && rc == 0; i++) {
        struct kv_block_id *ids = chain_of(v, keys[i], c);
        rc = ids ? store_pin_held(v->store, who->tenant, ids, c->ids_count / KV_BLOCK_TOKENS, pinned, &err)
                 : -TD_ERR_NOMEM;
        free(ids);
    }
    crypto_wipe(keys, sizeof keys);
    return rc;
}

int direct_conversation_pin(void *ctx, const struct api_identity *who, const char *id, bool pinned,
                            char **json)
{
    struct direct *d = ctx;
    struct conversation c;
    uint64_t version;
    int rc = conv_load(d->service->conversations, who->tenant, who->principal, id, &version, &c);
    if (rc < 0)
        return rc;
    rc = pin_blocks(d->service, who, &c, pinned);
    conv_free(&c);
    if (rc < 0)
        return rc;
    return conversation_pin_json(d->service->store, d->service->conversations, who->tenant, who->principal,
                                 id, pinned, json);
}

int direct_conversation_export(void *ctx, const struct api_identity *who, const char *id, char **json)
{
    struct direct *d = ctx;
    return conversation_export_json(d->service->conversations, d->service->tokenizer, who->tenant,
                                    who->principal, id, text_of, json);
}

int direct_conversation_import(void *ctx, const struct api_identity *who, const char *body, size_t size,
                               char **json, struct td_error *err)
{
    struct service *v = ((struct direct *)ctx)->service;
    uint8_t shared_key[CRYPTO_KEY_SIZE], own_key[CRYPTO_KEY_SIZE];
    int rc = service_keys(v, who->tenant, who->principal, shared_key, own_key, err);
    if (rc < 0)
        return rc;
    const struct conversation_home home = {v->tokenizer, v->template_kind, own_key, text_of};
    rc = conversation_import_json(v->conversations, &home, who->tenant, who->principal, body, size, false,
                                  json, err);
    crypto_wipe(shared_key, sizeof shared_key);
    crypto_wipe(own_key, sizeof own_key);
    return rc;
}
