/* conversations: those of the device's user as JSON. They are stored as the model saw them, with placeholders; here, on the device, the vault's values
 * are put back before they are shown. */
#include "edge/api_edge.h"
#include "protocol/api_text.h"
#include "shared/crypto.h"
#include "store/conversation_json.h"
#include <stdlib.h>

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

int edge_conversations_list(struct agent *a, const char *principal, char **json)
{
    return conversation_list_json(agent_store(a), EDGE_TENANT, principal, restored, json);
}

int edge_conversation_show(struct agent *a, const char *principal, const char *id, char **json)
{
    return conversation_show_json(agent_conversations(a), agent_tokenizer(a), EDGE_TENANT, principal, id,
                                  restored, json);
}

int edge_conversation_delete(struct agent *a, const char *principal, const char *id)
{
    return conv_delete(agent_conversations(a), EDGE_TENANT, principal, id);
}

int edge_conversation_fork(struct agent *a, const char *principal, const char *id, char **json)
{
    return conversation_fork_json(agent_conversations(a), EDGE_TENANT, principal, id, json);
}

int edge_conversation_pin(struct agent *a, const char *principal, const char *id, bool pinned, char **json)
{
    return conversation_pin_json(agent_store(a), agent_conversations(a), EDGE_TENANT, principal, id, pinned,
                                 json);
}

int edge_conversation_export(struct agent *a, const char *principal, const char *id, char **json)
{
    return conversation_export_json(agent_conversations(a), agent_tokenizer(a), EDGE_TENANT, principal, id,
                                    restored, json);
}

int edge_conversation_import(struct agent *a, const char *principal, const char *body, size_t size,
                             char **json, struct td_error *err)
{
    struct conversation_home home = {.text = restored};
    uint8_t key[CRYPTO_KEY_SIZE];
    int rc = agent_history_home(a, &home, key);
    if (rc < 0)
        return td_fail(err, rc,
                       "this device has not been told yet whose conversations it holds: come again once it "
                       "has reached the cloud");
    rc = conversation_import_json(agent_conversations(a), &home, EDGE_TENANT, principal, body, size, true,
                                  json, err);
    crypto_wipe(key, sizeof key);
    return rc;
}
