/* node: one running tandem-cloud: everything between its settings and its exit code.
 *
 *   start   admin listener -> model -> store -> engine -> listener -> "listening on …"
 *   stop    first SIGTERM or SIGINT: nothing new, edges are told to go elsewhere, running replies get DRAIN_MS, conversations are saved,
 *           connections closed, store closed. Second, or STOP_MAX_S later: at once (the store is safe at any moment).
 *
 * Threads: the caller's runs the network loop; a watcher waits for signals and looks at the tokens file once a second; the admin listener
 * has a loop of its own, so that /health and /metrics answer whatever the others do; engine, store and io_worker have theirs. */
#ifndef TANDEM_CLOUD_NODE_H
#define TANDEM_CLOUD_NODE_H
#include "cloud/settings.h"

#define NODE_DRAIN_MS  10000u /* running replies may finish for so long */
#define NODE_SETTLE_MS 2000u  /* then answers and saves that are on their way */

struct node;
/* Before any thread is started: the signals that a node takes are blocked in this thread and all that come after it. */
void node_block_signals(void);
int node_start(const struct settings *settings, struct node **out, struct td_error *err);
/* Until a signal ends it: 0; or the network loop failed. */
int node_run(struct node *n);
void node_destroy(struct node *n);

#endif
