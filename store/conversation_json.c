/* conversation_json: see conversation_json.h. A damaged conversation is not listed: never in the way of the others. */
#include "store/conversation_json.h"
#include "shared/crypto.h"
#include <stdlib.h>

#define LISTED_MAX 1000u /* newest first */

static json_t *summary_of(const struct conversation *c, conversation_text_fn text)
{
    json_t *title = text(c, c->title, strlen(c->title));
    return json_pack(
        "{s:s,s:s,s:o,s:I,s:I,s:I,s:I}", "id", c->id, "object", "conversation", "title",
        title ? title : json_string(""), "created", (json_int_t)(c->created_us / 1000000), "updated",
        (json_int_t)(c->updated_us / 1000000), "tokens", (json_int_t)c->ids_count, "messages",
        (json_int_t)(2 * c->boundary_count)); /* each boundary ends a turn: what was asked, and its reply */
}

/* Takes root. */
static int dump(json_t *root, char **json)
{
    *json = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    return *json ? 0 : -TD_ERR_NOMEM;
}

/* ---- list ---- */

struct listing {
    json_t *data;
    conversation_text_fn text;
    struct store *store;
    const char *tenant, *principal;
};

static int append_summary(void *ctx, const char *conv_id, uint64_t version, uint64_t updated_us,
                          const void *body, size_t size)
{
    struct listing *l = ctx;
    struct conversation c;
    (void)conv_id, (void)version, (void)updated_us;
    if (conv_parse(body, size, &c) < 0)
        return 0;
    json_t *summary = summary_of(&c, l->text);
    json_object_set_new(summary, "pinned",
                        json_boolean(store_conv_is_pinned(l->store, l->tenant, l->principal, c.id)));
    json_array_append_new(l->data, summary);
    conv_free(&c);
    return json_array_size(l->data) >= LISTED_MAX;
}

int conversation_list_json(struct store *s, const char *tenant, const char *principal,
                           conversation_text_fn text, char **json)
{
    struct listing l = {json_array(), text, s, tenant, principal};
    if (!l.data)
        return -TD_ERR_NOMEM;
    int rc = store_conv_each(s, tenant, principal, append_summary, &l);
    if (rc < 0) {
        json_decref(l.data);
        return rc;
    }
    return dump(json_pack("{s:s,s:o}", "object", "list", "data", l.data), json);
}

/* ---- show ---- */

static json_t *decoded(const struct tokenizer *t, const struct conversation *c, conversation_text_fn text)
{
    int64_t size = tokenizer_decode(t, c->ids, c->ids_count, true, NULL, 0);
    char *bytes = size < 0 ? NULL : malloc((size_t)size + 1);
    if (!bytes)
        return NULL;
    tokenizer_decode(t, c->ids, c->ids_count, true, bytes, (size_t)size);
    json_t *value = text(c, bytes, (size_t)size);
    crypto_wipe(bytes, (size_t)size);
    free(bytes);
    return value;
}

int conversation_show_json(struct conv_index *x, const struct tokenizer *t, const char *tenant,
                           const char *principal, const char *id, conversation_text_fn text, char **json)
{
    struct conversation c;
    uint64_t version;
    int rc = conv_load(x, tenant, principal, id, &version, &c);
    if (rc < 0)
        return rc;
    json_t *root = summary_of(&c, text), *value = decoded(t, &c, text),
           *messages = conversation_messages_json(&c, t, text, NULL);
    conv_free(&c);
    if (!root || !value || !messages) {
        json_decref(root);
        json_decref(value);
        json_decref(messages);
        return -TD_ERR_NOMEM;
    }
    json_object_set_new(root, "text", value);
    json_object_set_new(root, "messages", messages); /* themselves, where a list only counts them */
    return dump(root, json);
}
