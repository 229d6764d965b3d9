/* conversations: those of the device's user as JSON. They are stored as the model saw them, with placeholders; here, on the device, the vault's values
 * are put back before they are shown. */
#include "edge/api_edge.h"
#include "protocol/api_text.h"
#include "shared/crypto.h"
#include <jansson.h>
#include <stdlib.h>

#define LISTED_MAX 1000u /* newest first */

static int dump(json_t *root, char **json)
{
    *json = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    return *json ? 0 : -TD_ERR_NOMEM;
}

/* Valid text with the values of the conversation's vault in it; NULL without memory. */
static json_t *restored(const struct conversation *c, const char *bytes, size_t size)
{
    struct vault *vault = NULL;
    char *out = NULL, *text = NULL;
    size_t out_size = 0, text_size = 0;
    if (!c->vault || vault_parse(c->vault, c->vault_size, &vault) < 0)
        vault = vault_create();
    struct restorer *restorer = vault ? restorer_create(vault) : NULL;
    if (restorer && restorer_push(restorer, bytes, size, true, &out, &out_size) == 0)
        text = api_utf8_repair(out, out_size, &text_size);
    json_t *value = text ? json_stringn(text, text_size) : NULL;
    if (text)
        crypto_wipe(text, text_size);
    if (out)
        crypto_wipe(out, out_size);
    free(text);
    free(out);
    restorer_destroy(restorer);
    vault_destroy(vault);
    return value;
}

static json_t *summary_of(const struct conversation *c)
{
    json_t *title = restored(c, c->title, strlen(c->title));
    return json_pack(
        "{s:s,s:s,s:o,s:I,s:I,s:I,s:I}", "id", c->id, "object", "conversation", "title",
        title ? title : json_string(""), "created", (json_int_t)(c->created_us / 1000000), "updated",
        (json_int_t)(c->updated_us / 1000000), "tokens", (json_int_t)c->ids_count, "messages",
        (json_int_t)(2 * c->boundary_count)); /* each boundary ends a turn: what was asked, and its reply */
}

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

int edge_conversations_list(struct agent *a, const char *principal, char **json)
{
    json_t *data = json_array();
    if (!data)
        return -TD_ERR_NOMEM;
    int rc = store_conv_each(agent_store(a), EDGE_TENANT, principal, append_summary, data);
    if (rc < 0) {
        json_decref(data);
        return rc;
    }
    return dump(json_pack("{s:s,s:o}", "object", "list", "data", data), json);
}

static json_t *decoded(const struct tokenizer *t, const struct conversation *c)
{
    int64_t size = tokenizer_decode(t, c->ids, c->ids_count, true, NULL, 0);
    char *bytes = size < 0 ? NULL : malloc((size_t)size + 1);
    if (!bytes)
        return NULL;
    tokenizer_decode(t, c->ids, c->ids_count, true, bytes, (size_t)size);
    json_t *value = restored(c, bytes, (size_t)size);
    crypto_wipe(bytes, (size_t)size);
    free(bytes);
    return value;
}

int edge_conversation_show(struct agent *a, const char *principal, const char *id, char **json)
{
    struct conversation c;
    uint64_t version;
    int rc = conv_load(agent_conversations(a), EDGE_TENANT, principal, id, &version, &c);
    if (rc < 0)
        return rc;
    json_t *root = summary_of(&c), *text = decoded(agent_tokenizer(a), &c);
    conv_free(&c);
    if (!root || !text) {
        json_decref(root);
        json_decref(text);
        return -TD_ERR_NOMEM;
    }
    json_object_set_new(root, "text", text);
    return dump(root, json);
}

int edge_conversation_delete(struct agent *a, const char *principal, const char *id)
{
    return conv_delete(agent_conversations(a), EDGE_TENANT, principal, id);
}
