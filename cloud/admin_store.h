/* admin_store: the store's part of the admin listener.
 *
 *     GET  /store/stat                                            counts, as `tandem store stat --json`
 *     POST /store/compact {"dead_percent": N}                     → {"freed_bytes"}
 *     POST /store/gc                                              → {"blocks", "freed_bytes"}
 *     POST /store/verify                                          → {"records", "bad"}
 *     POST /store/erase-tenant {"tenant": NAME}                   → {"erased": NAME}
 *     POST /store/pin     store/operator.h says what is in it     → {"pinned"}
 *     GET  /store/progress                                        → {"running": NAME or null, "done", "total"}, of the last job that has any
 *
 * All of them want the bearer token that the master key gives (operator_token). They wait for the disk, so they run on a thread of their own,
 * one at a time; a second one gets 409. Only how far that has come is said at once. Everything else here is called on the listener's loop. */
#ifndef TANDEM_CLOUD_ADMIN_STORE_H
#define TANDEM_CLOUD_ADMIN_STORE_H
#include "cloud/admin.h"
#include "protocol/net.h"
#include "store/store.h"

struct admin_store;
/* store: borrowed, as loop. NULL without memory. */
struct admin_store *admin_store_create(struct net_loop *loop, struct store *store,
                                       const uint8_t token_hash[TD_HASH_SIZE]);
/* Once the loop runs no more: end a job under way and wait for it, so that nobody posts to a loop that is gone. */
void admin_store_stop(struct admin_store *a);
/* After net_loop_destroy, which still closes exchanges. */
void admin_store_destroy(struct admin_store *a);
void admin_store_set_erase(struct admin_store *a, admin_erase_fn erase, void *ctx); /* any thread */
/* A request whose path begins with /store/. */
void admin_store_request(struct admin_store *a, struct http_exchange *x, const struct http_request *r);
void admin_store_client_gone(struct admin_store *a, const struct http_exchange *x);

#endif
