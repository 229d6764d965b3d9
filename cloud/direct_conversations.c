/* direct_conversations: a principal's conversations as JSON: list, show, delete. Another principal's is simply not there. */
#include "cloud/direct_internal.h"
#include "protocol/api_text.h"
#include <jansson.h>
#include <stdlib.h>

#define LISTED_MAX 1000u /* newest first */

static uint32_t message_count(const struct conversation *c)
{
    return 2 * c->boundary_count; /* each boundary ends a turn: what was asked, and its reply */
}

static json_t *summary_of(const struct conversation *c)
{
    return json_pack("{s:s,s:s,s:s,s:I,s:I,s:I,s:I}", "id", c->id, "object", "conversation", "title",
                     utf8_valid(c->title, strlen(c->title)) ? c->title : "", "created",
                     (json_int_t)(c->created_us / 1000000), "updated", (json_int_t)(c->updated_us / 1000000),
                     "tokens", (json_int_t)c->ids_count, "messages", (json_int_t)message_count(c));
}

static int dump(json_t *root, char **json)
{
    *json = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    return *json ? 0 : -TD_ERR_NOMEM;
}

/* ---- list ---- */

static int append_summary(void *ctx, const char *conv_id, uint64_t version, uint64_t updated_us,
                          const void *body, size_t size)
{
    json_t *data = ctx;
    struct conversation c;
    (void)conv_id, (void)version, (void)updated_us;
    if (conv_parse(body, size, &c) < 0)
        return 0; /* damaged: not shown, never in the way */
    json_array_append_new(data, summary_of(&c));
    conv_free(&c);
    return json_array_size(data) >= LISTED_MAX;
}

int direct_conversation_list(void *ctx, const struct api_identity *who, char **json)
{
    struct direct *d = ctx;
    json_t *data = json_array();
    if (!data)
        return -TD_ERR_NOMEM;
    int rc = store_conv_each(d->service->store, who->tenant, who->principal, append_summary, data);
    if (rc < 0) {
        json_decref(data);
        return rc;
    }
    return dump(json_pack("{s:s,s:o}", "object", "list", "data", data), json);
}

/* ---- show ---- */

/* A JSON text out of any bytes. */
static json_t *text_json(const char *bytes, size_t size)
{
    size_t used = 0;
    char *text = api_utf8_repair(bytes, size, &used);
    json_t *value = text ? json_stringn(text, used) : NULL;
    if (text)
        crypto_wipe(text, used);
    free(text);
    return value;
}

static json_t *decoded(const struct tokenizer *t, const struct conversation *c)
{
    int64_t size = tokenizer_decode(t, c->ids, c->ids_count, true, NULL, 0);
    char *bytes = size < 0 ? NULL : malloc((size_t)size + 1);
    if (!bytes)
        return NULL;
    tokenizer_decode(t, c->ids, c->ids_count, true, bytes, (size_t)size);
    json_t *value = text_json(bytes, (size_t)size);
    crypto_wipe(bytes, (size_t)size);
    free(bytes);
    return value;
}

int direct_conversation_show(void *ctx, const struct api_identity *who, const char *id, char **json)
{
    struct direct *d = ctx;
    struct conversation c;
    uint64_t version;
    int rc = conv_load(d->service->conversations, who->tenant, who->principal, id, &version, &c);
    if (rc < 0)
        return rc;
    json_t *root = summary_of(&c), *text = decoded(d->service->tokenizer, &c);
    if (text)
        json_object_set_new(root, "text", text);
    conv_free(&c);
    if (!text) {
        json_decref(root);
        return -TD_ERR_NOMEM;
    }
    return dump(root, json);
}

/* ---- delete ---- */

int direct_conversation_delete(void *ctx, const struct api_identity *who, const char *id)
{
    struct direct *d = ctx;
    return conv_delete(d->service->conversations, who->tenant, who->principal, id);
}
