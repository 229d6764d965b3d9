/* edge_server: the WSS side of a node: one link (protocol/link.h) a connection, one engine sequence a stream.
 *
 *   connection   OPENED --HELLO good--> READY --lost, revoked, GOAWAY--> gone: each stream is detached
 *   stream       OPENING (its conversation's ids are being read; what follows waits here, in order)
 *                -> RUNNING (frames become engine commands, events become frames) -> DONE | ERROR | CANCEL: gone
 *
 * Rules
 *   - HELLO is answered in this order: token, fingerprint, versions; whoever has no good token learns nothing about the model.
 *   - Bulk bytes handed to the engine are counted a stream; what it had not consumed when the stream ends is granted again then.
 *   - FETCH is work for idle moments: one at a time a connection, EDGE_FETCHES_EACH a principal, half a tenant, EDGE_FETCHES_MAX a node, none while a request waits for a place; one block is in memory
 *     at a time, and the next is read when that has left.
 *   - After DONE the conversation that OPEN named is saved under the principal, once a request id, so that a later OPEN can name
 *     (id, length, hash) instead of sending all ids.
 * Everything runs on the loop's thread; the files edge_server*.c share edge_server_internal.h. */
#ifndef TANDEM_CLOUD_EDGE_SERVER_H
#define TANDEM_CLOUD_EDGE_SERVER_H
#include "cloud/service.h"

struct edge_server;
struct edge_server *edge_server_create(struct service *service); /* NULL without memory */
/* After the loop has closed its connections, or before it runs. */
void edge_server_destroy(struct edge_server *s);
const struct ws_handler *edge_server_ws_handler(struct edge_server *s); /* for net_listen */
/* Once a second: connections whose token is no longer good are closed. */
void edge_server_tick(struct edge_server *s);
/* Tell every edge to go elsewhere ("": anywhere). Running streams go on. */
void edge_server_goaway(struct edge_server *s, const char *node, const char *reason);
/* End what a tenant has here, and its connections with it: their keys are no longer its keys, so each edge has to greet again. */
void edge_server_end_tenant(struct edge_server *s, const char *tenant, const char *why);
/* Close every connection, once what is queued has been sent. */
void edge_server_close(struct edge_server *s, const char *why);
uint32_t edge_server_connections(const struct edge_server *s);

#endif
