/* io_worker: one thread for what may wait for a disk or take long: reading and saving conversations, tokenising prompts. Jobs run one
 * after the other, in the order of submission: a conversation that was saved before it is asked for is found. Bounded. */
#ifndef TANDEM_CLOUD_IO_WORKER_H
#define TANDEM_CLOUD_IO_WORKER_H
#include "cloud/inbox.h"

#define IO_WORKER_JOBS_MAX 1024u

struct io_worker;
struct io_job {             /* the first member of the caller's job, which the caller owns again in `done` */
    struct inbox_item item; /* the worker's */
    void (*work)(struct io_job *job); /* on the worker's thread */
    void (*done)(struct io_job *job); /* on the loop's thread */
    struct io_worker *worker;         /* set by io_worker_submit */
};

struct io_worker *io_worker_create(struct inbox *inbox); /* NULL without memory or threads */
/* Finishes what was submitted; `done` of the last jobs runs when the inbox is drained. */
void io_worker_destroy(struct io_worker *w);
int io_worker_submit(struct io_worker *w, struct io_job *job); /* 0, -TD_ERR_FULL, -TD_ERR_CLOSED */
size_t io_worker_pending(struct io_worker *w);                 /* submitted and not done; loop's thread */

#endif
