/* io_worker: one thread for what may wait for a disk or take long: filtering and tokenising prompts, reading and saving conversations. Jobs run
 * one after the other, an owner's in the order of submission: a conversation that was saved before it is asked for is found. Owners take turns, so that
 * who imports many long ones delays another by one. What only waits, as for a disk to acknowledge what was queued, waits on a second thread, where
 * nobody's work is behind it. Bounded. */
#ifndef TANDEM_PROTOCOL_IO_WORKER_H
#define TANDEM_PROTOCOL_IO_WORKER_H
#include "protocol/inbox.h"

#define IO_WORKER_JOBS_MAX 1024u

struct io_worker;
struct io_job {             /* a member of the caller's object, which the caller leaves alone until `done` */
    struct inbox_item item; /* the worker's */
    void (*work)(struct io_job *job); /* on the worker's thread */
    void (*wait)(struct io_job *job); /* on another thread, behind the work, in the order of that; or NULL */
    void (*done)(struct io_job *job); /* on the loop's thread, or in io_worker_destroy */
    uint64_t owner;                   /* io_owner; 0: nobody's, done when all that was submitted before is */
    struct io_worker *worker;         /* the worker's, as the next two */
    struct io_job *next;
    uint64_t turn;
};
uint64_t io_owner(const char *tenant, const char *principal);

struct io_worker *io_worker_create(struct inbox *inbox); /* NULL without memory or threads */
void io_worker_stop(struct io_worker *w);                /* finishes what was submitted, takes no more */
/* Stops it and drains the inbox, as `done` of the last jobs refers to the worker. */
void io_worker_destroy(struct io_worker *w);
int io_worker_submit(struct io_worker *w, struct io_job *job); /* 0, -TD_ERR_FULL, -TD_ERR_CLOSED */
size_t io_worker_pending(struct io_worker *w);                 /* submitted and not done; loop's thread */

#endif
