/* edge_worker: see edge_worker.h. The mailbox never is too small for what the worker sends back: no more jobs are taken than fit. */
#include "edge/edge_worker.h"
#include "shared/queue.h"
#include <pthread.h>
#include <stdlib.h>

#define WAIT_US 60000000u

_Static_assert(EDGE_WORKER_JOBS_MAX < MAILBOX_SIZE, "finished jobs always find room");

struct edge_worker {
    struct queue *jobs;
    struct mailbox *finished;
    pthread_t thread;
    bool running;
    size_t pending; /* submitted and not done; the loop's thread */
};

static void on_finished(void *ctx, void *item)
{
    struct edge_worker *w = ctx;
    struct edge_job *job = item;
    w->pending--;
    job->done(job);
}

/* queue_pop gives NULL after a time-out too: a job without `work` marks the end. */
static void *run(void *arg)
{
    struct edge_worker *w = arg;
    for (;;) {
        struct edge_job *job = queue_pop(w->jobs, WAIT_US);
        if (!job)
            continue;
        if (!job->work)
            return NULL;
        job->work(job);
        mailbox_send(w->finished, job);
    }
}

struct edge_worker *edge_worker_create(struct net_loop *loop)
{
    struct edge_worker *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    w->jobs = queue_create(EDGE_WORKER_JOBS_MAX + 1); /* one more, for the end */
    w->finished = mailbox_create(loop, on_finished, w);
    w->running = w->jobs && w->finished && pthread_create(&w->thread, NULL, run, w) == 0;
    if (!w->running) {
        edge_worker_destroy(w);
        return NULL;
    }
    return w;
}

void edge_worker_stop(struct edge_worker *w)
{
    if (!w || !w->running)
        return;
    struct edge_job end = {0};
    queue_push(w->jobs, &end);
    queue_close(w->jobs);
    pthread_join(w->thread, NULL);
    w->running = false;
}

void edge_worker_destroy(struct edge_worker *w)
{
    if (!w)
        return;
    edge_worker_stop(w);
    if (w->finished)
        mailbox_drain(w->finished);
    mailbox_destroy(w->finished);
    if (w->jobs)
        queue_destroy(w->jobs);
    free(w);
}

int edge_worker_submit(struct edge_worker *w, struct edge_job *job)
{
    if (w->pending >= EDGE_WORKER_JOBS_MAX)
        return -TD_ERR_FULL;
    int rc = queue_push(w->jobs, job);
    w->pending += rc == 0;
    return rc;
}
