/* conversation_json: a principal's conversations as the API shows them; another principal's are simply not there. One place for their
 * shape at both ends. How stored bytes become text is the caller's: a node shows them as they are, a device puts its vault's values back. */
#ifndef TANDEM_STORE_CONVERSATION_JSON_H
#define TANDEM_STORE_CONVERSATION_JSON_H
#include "shared/chat_template.h"
#include "store/conversation.h"
#include <jansson.h>

/* A JSON string, the caller's; NULL without memory. */
typedef json_t *(*conversation_text_fn)(const struct conversation *c, const char *bytes, size_t size);

/* *json: malloc'ed, the caller's. All of these wait for the disk. */
int conversation_list_json(struct store *s, const char *tenant, const char *principal,
                           conversation_text_fn text, char **json);
int conversation_show_json(struct conv_index *x, const struct tokenizer *t, const char *tenant,
                           const char *principal, const char *id, conversation_text_fn text, char **json);

/* What was said, [{"role", "content"}], split at the template's marks (conversation_messages.c). The caller's; NULL without memory.
 * counts: NULL, or for each boundary how many of them stand before it. */
json_t *conversation_messages_json(const struct conversation *c, const struct tokenizer *t,
                                   conversation_text_fn text, uint32_t *counts);

/* ---- copies: conversation_move.c ---- */
/* The same history under a new id. No KV is copied: blocks are named by tokens, so both find the same ones. {"conversation", "forked_from"} */
int conversation_fork_json(struct conv_index *x, const char *tenant, const char *principal, const char *id,
                           char **json);
/* {"id", "pinned"} */
int conversation_pin_json(struct store *s, struct conv_index *x, const char *tenant, const char *principal,
                          const char *id, bool pinned, char **json);
/* The portable form, in the clear: whoever writes it down seals it. Tokens, turns, and on a device the vault; "messages" is for people and ignored by
 * import. */
int conversation_export_json(struct conv_index *x, const struct tokenizer *t, const char *tenant,
                             const char *principal, const char *id, conversation_text_fn text, char **json);
/* By what a client's history is recognised here: whoever re-sends what was said goes on with what was imported. */
struct conversation_home {
    const struct tokenizer *tokenizer;
    enum chat_template_kind template_kind;
    const uint8_t *principal_key;
    conversation_text_fn text;
};
/* Hostile bytes. Under the id that it had, or under a new one where that is taken. Other weights with the same tokenizer compute from
 * its tokens; another tokenizer is -TD_ERR_MISMATCH. take_vault: a device's placeholder map is taken over. {"conversation"} */
int conversation_import_json(struct conv_index *x, const struct conversation_home *home, const char *tenant,
                             const char *principal, const char *body, size_t size, bool take_vault,
                             char **json, struct td_error *err);

#endif
