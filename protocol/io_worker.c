/* io_worker: see io_worker.h. Each job has its turn: one more than the last of its owner's that waits or has been begun in this one, so that of each owner
 * one job goes before anybody's second. The list is in order of turns, and within one of submission; the turn of the job at work never runs backwards.
 * The thread that waits is made when somebody has to. */
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
    struct io_job *waiting, **last_waiting; /* that have worked */
    pthread_cond_t worked;                  /* one more is waiting, or none will */
    bool ended;                             /* none will */
    pthread_t thread;
    pthread_t waiter; /* the worker's thread alone, as the next */
    bool has_waiter;
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

static void give_back(struct io_worker *w, struct io_job *job)
{
    job->item.run = on_done;
    inbox_push(w->inbox, &job->item);
}

/* NULL: none is left, and no more will come. */
static struct io_job *take_waiting(struct io_worker *w)
{
    pthread_mutex_lock(&w->lock);
    while (!w->waiting && !w->ended)
        pthread_cond_wait(&w->worked, &w->lock);
    struct io_job *job = w->waiting;
    if (job)
        w->waiting = job->next;
    if (!w->waiting)
        w->last_waiting = &w->waiting;
    pthread_mutex_unlock(&w->lock);
    return job;
}

static void *run_waits(void *arg)
{
    struct io_worker *w = arg;
    for (struct io_job *job; (job = take_waiting(w));) {
        if (job->wait)
            job->wait(job);
        give_back(w, job);
    }
    return NULL;
}

static void pass_on(struct io_worker *w, struct io_job *job)
{
    pthread_mutex_lock(&w->lock);
    job->next = NULL;
    *w->last_waiting = job;
    w->last_waiting = &job->next;
    pthread_cond_signal(&w->worked);
    pthread_mutex_unlock(&w->lock);
}

static bool can_wait(struct io_worker *w)
{
    if (w->has_waiter)
        return true;
    w->has_waiter = pthread_create(&w->waiter, NULL, run_waits, w) == 0;
    if (w->has_waiter)
        pthread_setname_np(w->waiter, "td-io-wait");
    return w->has_waiter;
}

static void *run_jobs(void *arg)
{
    struct io_worker *w = arg;
    for (struct io_job *job; (job = take(w));) {
        job->work(job);
        bool is_barrier = !job->owner && w->has_waiter;
        if (is_barrier || (job->wait && can_wait(w))) {
            pass_on(w, job);
            continue;
        }
        if (job->wait)
            job->wait(job);
        give_back(w, job);
    }
    pthread_mutex_lock(&w->lock);
    w->ended = true;
    pthread_cond_signal(&w->worked);
    pthread_mutex_unlock(&w->lock);
    if (w->has_waiter)
        pthread_join(w->waiter, NULL);
    return NULL;
}

static void worker_free(struct io_worker *w)
{
    pthread_cond_destroy(&w->changed);
    pthread_cond_destroy(&w->worked);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

struct io_worker *io_worker_create(struct inbox *inbox)
{
    struct io_worker *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    w->inbox = inbox;
    w->last_waiting = &w->waiting;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    pthread_cond_init(&w->worked, NULL);
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
