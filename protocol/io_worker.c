/* io_worker: see io_worker.h. */
#include "protocol/io_worker.h"
#include "shared/queue.h"
#include <pthread.h>
#include <stdlib.h>

#define WAIT_US 60000000u

struct io_worker {
    struct inbox *inbox;
    struct queue *jobs;
    pthread_t thread;
    size_t pending; /* the loop's thread alone */
    bool started;
};

static void on_done(struct inbox_item *item)
{
    struct io_job *job = (struct io_job *)item;
    job->worker->pending--;
    job->done(job);
}

/* queue_pop gives NULL after a time-out too: a job without `work` marks the end. */
static void *run_jobs(void *arg)
{
    struct io_worker *w = arg;
    for (;;) {
        struct io_job *job = queue_pop(w->jobs, WAIT_US);
        if (!job)
            continue;
        if (!job->work)
            return NULL;
        job->work(job);
        job->item.run = on_done;
        inbox_push(w->inbox, &job->item);
    }
}

struct io_worker *io_worker_create(struct inbox *inbox)
{
    struct io_worker *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    w->inbox = inbox;
    w->jobs = queue_create(IO_WORKER_JOBS_MAX + 1); /* one more, for the end */
    w->started = w->jobs && pthread_create(&w->thread, NULL, run_jobs, w) == 0;
    if (!w->started) {
        if (w->jobs)
            queue_destroy(w->jobs);
        free(w);
        return NULL;
    }
    pthread_setname_np(w->thread, "td-io");
    return w;
}

void io_worker_stop(struct io_worker *w)
{
    if (!w || !w->started)
        return;
    struct io_job end = {0};
    queue_push(w->jobs, &end); /* there is always room for it: see io_worker_submit */
    queue_close(w->jobs);
    pthread_join(w->thread, NULL);
    w->started = false;
}

void io_worker_destroy(struct io_worker *w)
{
    if (!w)
        return;
    io_worker_stop(w);
    inbox_drain(w->inbox);
    queue_destroy(w->jobs);
    free(w);
}

int io_worker_submit(struct io_worker *w, struct io_job *job)
{
    if (w->pending >= IO_WORKER_JOBS_MAX)
        return -TD_ERR_FULL;
    job->worker = w;
    int rc = queue_push(w->jobs, job);
    if (rc == 0)
        w->pending++;
    return rc;
}

size_t io_worker_pending(struct io_worker *w)
{
    return w->pending;
}
