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

int direct_conversation_pin(void *ctx, const struct api_identity *who, const char *id, bool pinned,
                            char **json)
{
    struct direct *d = ctx;
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
    struct direct *d = ctx;
    return conversation_import_json(d->service->conversations, d->service->tokenizer, who->tenant,
                                    who->principal, body, size, false, json, err);
}
