/* conversation_json: a principal's conversations as the API shows them; another principal's are simply not there. One place for their
 * shape at both ends. How stored bytes become text is the caller's: a node shows them as they are, a device puts its vault's values back. */
#ifndef TANDEM_STORE_CONVERSATION_JSON_H
#define TANDEM_STORE_CONVERSATION_JSON_H
#include "shared/tokenizer.h"
#include "store/conversation.h"
#include <jansson.h>

/* A JSON string, the caller's; NULL without memory. */
typedef json_t *(*conversation_text_fn)(const struct conversation *c, const char *bytes, size_t size);

/* *json: malloc'ed, the caller's. Both read the disk. */
int conversation_list_json(struct store *s, const char *tenant, const char *principal,
                           conversation_text_fn text, char **json);
int conversation_show_json(struct conv_index *x, const struct tokenizer *t, const char *tenant,
                           const char *principal, const char *id, conversation_text_fn text, char **json);

#endif
