/* io_worker: see io_worker.h. Each job has its turn: one more than the last of its owner's that waits or has been begun in this one, so that of each owner
 * one job goes before anybody's second. The list is in order of turns, and within one of submission; the turn of the job at work never runs backwards. */
#include "protocol/io_worker.h"
#include <pthread.h>
#include <stdlib.h>

struct io_worker {
    struct inbox *inbox;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct io_job *first; /* under lock, as the next three */
    uint64_t turn;        /* of the job that was begun last */
    uint64_t begun;       /* in that turn: a bit for each owner; who shares one waits for the next */
    bool closed;
    pthread_t thread;
    size_t pending; /* the loop's thread alone */
    bool started;
};

/* FNV-1a, the end of the text included. */
static uint64_t hash_on(uint64_t hash, const char *text)
{
    do
        hash = (hash ^ (uint8_t)*text) * 1099511628211u;
    while (*text++);
    return hash;
}

uint64_t io_owner(const char *tenant, const char *principal)
{
    return hash_on(hash_on(14695981039346656037u, tenant), principal) | 1;
}

static void on_done(struct inbox_item *item)
{
    struct io_job *job = (struct io_job *)item;
    job->worker->pending--;
    job->done(job);
}

static uint64_t bit_of(uint64_t owner)
{
    return owner ? UINT64_C(1) << (owner >> 58) : 0;
}

/* NULL: it was closed, and all is done. */
static struct io_job *take(struct io_worker *w)
{
    pthread_mutex_lock(&w->lock);
    while (!w->first && !w->closed)
        pthread_cond_wait(&w->changed, &w->lock);
    struct io_job *job = w->first;
    if (job) {
        w->first = job->next;
        w->begun = (job->turn == w->turn ? w->begun : 0) | bit_of(job->owner);
        w->turn = job->turn;
    }
    pthread_mutex_unlock(&w->lock);
    return job;
}

static void *run_jobs(void *arg)
{
    struct io_worker *w = arg;
    for (struct io_job *job; (job = take(w));) {
        job->work(job);
        job->item.run = on_done;
        inbox_push(w->inbox, &job->item);
    }
    return NULL;
}

static void worker_free(struct io_worker *w)
{
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

struct io_worker *io_worker_create(struct inbox *inbox)
{
    struct io_worker *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    w->inbox = inbox;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    w->started = pthread_create(&w->thread, NULL, run_jobs, w) == 0;
    if (!w->started) {
        worker_free(w);
        return NULL;
    }
    pthread_setname_np(w->thread, "td-io");
    return w;
}

void io_worker_stop(struct io_worker *w)
{
    if (!w || !w->started)
        return;
    pthread_mutex_lock(&w->lock);
    w->closed = true;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    w->started = false;
}

void io_worker_destroy(struct io_worker *w)
{
    if (!w)
        return;
    io_worker_stop(w);
    inbox_drain(w->inbox);
    worker_free(w);
}

/* Under the lock. Nobody's job goes behind all that wait. */
static void put_in_turn(struct io_worker *w, struct io_job *job)
{
    struct io_job **at = &w->first;
    job->turn = w->turn + ((w->begun & bit_of(job->owner)) != 0);
    for (const struct io_job *j = w->first; j; j = j->next)
        if (!job->owner || j->owner == job->owner)
            job->turn = j->turn + (job->owner != 0);
    while (*at && (*at)->turn <= job->turn)
        at = &(*at)->next;
    job->next = *at;
    *at = job;
}

int io_worker_submit(struct io_worker *w, struct io_job *job)
{
    if (w->pending >= IO_WORKER_JOBS_MAX)
        return -TD_ERR_FULL;
    job->worker = w;
    pthread_mutex_lock(&w->lock);
    int rc = w->closed ? -TD_ERR_CLOSED : 0;
    if (rc == 0)
        put_in_turn(w, job);
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
    if (rc == 0)
        w->pending++;
    return rc;
}

size_t io_worker_pending(struct io_worker *w)
{
    return w->pending;
}
