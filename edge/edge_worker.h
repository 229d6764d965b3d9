/* edge_worker: one thread for what may wait for the disk or take long: filtering and tokenising prompts, reading and saving conversations. Jobs run one
 * after the other in the order of submission, so a turn that was saved before the next one is prepared is found. Bounded. */
#ifndef TANDEM_EDGE_WORKER_H
#define TANDEM_EDGE_WORKER_H
#include "edge/mailbox.h"

#define EDGE_WORKER_JOBS_MAX 1024u

struct edge_job { /* a member of the caller's object, which the caller leaves alone until `done` */
    void (*work)(struct edge_job *job); /* on the worker's thread */
    void (*done)(struct edge_job *job); /* on the loop's thread; not called when the process ends first */
};

struct edge_worker;
struct edge_worker *edge_worker_create(struct net_loop *loop); /* NULL without memory or threads */
/* Finishes what was submitted; `done` of these is called from edge_worker_destroy. */
void edge_worker_stop(struct edge_worker *w);
void edge_worker_destroy(struct edge_worker *w);
int edge_worker_submit(struct edge_worker *w, struct edge_job *job); /* 0, -TD_ERR_FULL, -TD_ERR_CLOSED */

#endif
