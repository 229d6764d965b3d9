/* admin: /metrics, /health and /store (admin_store.h) over plain HTTP on 127.0.0.1, on a loop and a thread of its own. Host must be a loopback
 * name and no Origin is taken, so no web page can read it. Nothing that it says holds text, token ids or credentials. */
#ifndef TANDEM_CLOUD_ADMIN_H
#define TANDEM_CLOUD_ADMIN_H
#include "store/store.h"

enum admin_health { ADMIN_STARTING, ADMIN_READY, ADMIN_DRAINING };

struct admin;
int admin_start(uint16_t port, struct admin **out, struct td_error *err);
uint16_t admin_port(const struct admin *a);
void admin_set_health(struct admin *a, enum admin_health health); /* any thread */
/* Once, from the thread that starts the node: /store answers from then on. The store is borrowed until admin_stop. */
int admin_set_store(struct admin *a, struct store *store, const uint8_t master[CRYPTO_KEY_SIZE]);
/* What erases a tenant everywhere on this node; until then, and without, /store/erase-tenant answers 503. Waits; called on a thread of the listener's. */
typedef int (*admin_erase_fn)(void *ctx, const char *tenant, struct td_error *err);
void admin_set_erase(struct admin *a, admin_erase_fn erase, void *ctx);
/* Waits for a job under way, which uses what the node is made of. */
void admin_stop(struct admin *a);

#endif
