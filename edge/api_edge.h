/* api_edge: the OpenAI API of the device: what protocol/api asks of its owner, answered by the agent. Everything on the net loop's thread, but for what is asked of
 * conversations, which is the agent's worker's. */
#ifndef TANDEM_EDGE_API_EDGE_H
#define TANDEM_EDGE_API_EDGE_H
#include "edge/agent.h"

#define EDGE_PRINCIPAL "local" /* whoever may use the local API is one and the same */

struct api_edge;
/* api_key: "" for none. NULL without memory. */
struct api_edge *api_edge_create(struct agent *a, struct net_loop *loop, const char *api_key);
void api_edge_destroy(struct api_edge *e);
const struct http_handler *api_edge_http_handler(struct api_edge *e);

/* Conversations as JSON (malloc'ed), placeholders restored: for the API and for libtandem. */
int edge_conversations_list(struct agent *a, const char *principal, char **json);
int edge_conversation_show(struct agent *a, const char *principal, const char *id, char **json);
int edge_conversation_delete(struct agent *a, const char *principal, const char *id);
int edge_conversation_fork(struct agent *a, const char *principal, const char *id, char **json);
int edge_conversation_pin(struct agent *a, const char *principal, const char *id, bool pinned, char **json);
int edge_conversation_export(struct agent *a, const char *principal, const char *id, char **json);
int edge_conversation_import(struct agent *a, const char *principal, const char *body, size_t size,
                             char **json, struct td_error *err);

#endif
