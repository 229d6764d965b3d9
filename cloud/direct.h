/* direct: the OpenAI API of a node, for an app without an edge agent: the whole prompt is the cloud's (k = 0). Implements struct api_ops.
 *
 *   PREPARING (worker: history matched, messages templated and tokenised) -> RUNNING (one engine sequence)
 *   -> COMMITTING (worker: the turn is appended to its conversation, durably) -> answered
 *
 * Rules
 *   - A client that leaves ends its generation at once, in any state; only a turn that is being committed already is kept.
 *   - The last chunk is sent after the turn is durable: who has seen a reply end finds it in the conversation, whatever happens to the node.
 *   - With an Idempotency-Key, request id and seed come from the key: the same key re-attaches to a running generation, or makes the same
 *     reply again, and the conversation holds the turn once.
 *   - Two turns that continue the same conversation by its id: the later one to end gets 409. A client that only re-sends its history named
 *     no conversation, gets its reply in any case, and is matched by what it sends next.
 * Everything runs on the loop's thread, but for what is asked of conversations, which is the worker's; direct*.c share direct_internal.h. */
#ifndef TANDEM_CLOUD_DIRECT_H
#define TANDEM_CLOUD_DIRECT_H
#include "cloud/service.h"
#include "protocol/api.h"

#define DIRECT_CALLS_MAX 1024u /* generations asked for at once; the engine's queue is shorter */

struct direct;
struct direct *direct_create(struct service *service); /* NULL without memory */
/* After the loop has closed its connections or before it runs; calls that are left are dropped. */
void direct_destroy(struct direct *d);
const struct http_handler *direct_http_handler(struct direct *d); /* for net_listen */
void direct_set_ready(struct direct *d, bool ready);
/* Once a second: calls of principals that have no good token any more are ended. */
void direct_tick(struct direct *d);
/* End what a tenant has here; what the worker has of it already comes to its end without an answer. */
void direct_end_tenant(struct direct *d, const char *tenant, const char *why);
uint32_t direct_calls(const struct direct *d);

#endif
