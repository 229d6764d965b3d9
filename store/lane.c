/* lane: see lane.h. A job belongs to its waiter and to the thread that runs it; who lets go last frees it. */
#include "store/lane.h"
#include "shared/log.h"
#include "shared/metrics.h"
#include "shared/stop.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

struct get {             /* of a block */
    struct lane_job job; /* first */
    struct tier *tier;
    char tenant[STORE_TENANT_MAX + 1];
    struct kv_block_id id;
    struct tier_block *block;
};

struct lane {
    struct tier *tier;
    const char *name;
    struct metric *timeouts_total, *sick_gauge; /* NULL: none */
    pthread_mutex_t lock;
    pthread_cond_t wanted, ended; /* for threads; for waiters */
    struct lane_job *first, **last;
    unsigned queued, left_behind; /* left_behind > 0: sick */
    uint64_t timeouts;
    bool stopping;
    unsigned thread_count;
    pthread_t threads[LANE_THREADS_MAX];
};

/* With the lock. */
static void count_left_behind(struct lane *l, int change)
{
    unsigned before = l->left_behind;
    l->left_behind += (unsigned)change;
    if ((before > 0) == (l->left_behind > 0))
        return;
    if (l->sick_gauge)
        metric_set(l->sick_gauge, l->left_behind > 0);
    if (l->left_behind > 0)
        log_warn("store", "%s does not answer: what it has is not read until it does", l->name);
    else
        log_info("store", "%s answers again", l->name);
}

static void *lane_main(void *arg)
{
    struct lane *l = arg;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        struct lane_job *r = l->first;
        if (!r && l->stopping)
            break;
        if (!r) {
            pthread_cond_wait(&l->wanted, &l->lock);
            continue;
        }
        l->first = r->next;
        if (!l->first)
            l->last = &l->first;
        l->queued--;
        r->running = true;
        bool needless = r->left;
        pthread_mutex_unlock(&l->lock);
        int status = needless ? -TD_ERR_CANCELLED : r->run(r);
        pthread_mutex_lock(&l->lock);
        r->status = status;
        r->done = true;
        if (!r->left) {
            pthread_cond_broadcast(&l->ended);
            continue;
        }
        if (!needless)
            count_left_behind(l, -1);
        r->free(r);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static struct timespec deadline_after(uint64_t timeout_us)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    uint64_t ns = (uint64_t)at.tv_nsec + timeout_us % 1000000 * 1000;
    at.tv_sec += (time_t)(timeout_us / 1000000 + ns / 1000000000);
    at.tv_nsec = (long)(ns % 1000000000);
    return at;
}

/* With the lock. True: r was taken. */
static bool push(struct lane *l, struct lane_job *r)
{
    if (l->stopping || l->left_behind > 0 || l->queued >= LANE_QUEUE_MAX)
        return false;
    *l->last = r;
    l->last = &r->next;
    l->queued++;
    pthread_cond_signal(&l->wanted);
    return true;
}

/* With the lock: its time is over. Who is only queued stays there, for the thread to throw away. */
static void leave(struct lane *l, struct lane_job *r)
{
    r->left = true;
    l->timeouts++;
    if (l->timeouts_total)
        metric_add(l->timeouts_total, 1);
    if (r->running)
        count_left_behind(l, +1);
}

int lane_run(struct lane *l, struct lane_job *job, uint64_t timeout_us)
{
    struct timespec at = deadline_after(timeout_us);
    pthread_mutex_lock(&l->lock);
    if (!push(l, job)) {
        pthread_mutex_unlock(&l->lock);
        job->free(job);
        return -TD_ERR_BUSY;
    }
    int rc = 0;
    while (!job->done && rc != ETIMEDOUT)
        rc = pthread_cond_timedwait(&l->ended, &l->lock, &at);
    rc = job->done ? 0 : -TD_ERR_TIMEOUT;
    if (rc < 0)
        leave(l, job);
    pthread_mutex_unlock(&l->lock);
    return rc;
}

static int run_get(struct lane_job *job)
{
    struct get *g = (struct get *)job;
    return g->tier->ops->get(g->tier, g->tenant, &g->id, &g->block);
}

static void free_get(struct lane_job *job)
{
    struct get *g = (struct get *)job;
    tier_block_release(g->block);
    free(g);
}

int lane_get(struct lane *l, const char *tenant, const struct kv_block_id *id, uint64_t timeout_us,
             struct tier_block **out)
{
    struct get *g = calloc(1, sizeof *g);
    if (!g)
        return -TD_ERR_NOMEM;
    g->job = (struct lane_job){.run = run_get, .free = free_get};
    g->tier = l->tier;
    g->id = *id;
    memcpy(g->tenant, tenant, strnlen(tenant, STORE_TENANT_MAX));
    int rc = lane_run(l, &g->job, timeout_us);
    if (rc < 0)
        return rc;
    rc = g->job.status;
    if (rc == 0) {
        *out = g->block;
        g->block = NULL;
    }
    free_get(&g->job);
    return rc;
}

bool lane_is_sick(struct lane *l)
{
    pthread_mutex_lock(&l->lock);
    bool sick = l->left_behind > 0;
    pthread_mutex_unlock(&l->lock);
    return sick;
}

uint64_t lane_timeouts(struct lane *l)
{
    pthread_mutex_lock(&l->lock);
    uint64_t count = l->timeouts;
    pthread_mutex_unlock(&l->lock);
    return count;
}

struct lane *lane_create(struct tier *t, const char *name, const char *label, unsigned threads)
{
    struct lane *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    pthread_condattr_t monotonic;
    l->tier = t;
    l->name = name;
    l->last = &l->first;
    if (label) {
        l->timeouts_total = metric_counter("tandem_kv_tier_timeouts_total", label,
                                           "Reads of a tier that did not answer in time and became misses");
        l->sick_gauge = metric_gauge("tandem_kv_tier_sick", label, "1 while a tier hangs or is away");
        metric_set(l->sick_gauge, 0);
    }
    pthread_mutex_init(&l->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&l->wanted, NULL);
    pthread_cond_init(&l->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    threads = TD_MIN(threads, (unsigned)LANE_THREADS_MAX);
    for (; l->thread_count < threads; l->thread_count++)
        if (pthread_create(&l->threads[l->thread_count], NULL, lane_main, l) != 0) {
            lane_destroy(l);
            return NULL;
        }
    return l;
}

void lane_destroy(struct lane *l)
{
    if (!l)
        return;
    pthread_mutex_lock(&l->lock);
    l->stopping = true;
    int late = l->left_behind > 0;
    pthread_cond_broadcast(&l->wanted);
    pthread_mutex_unlock(&l->lock);
    stop_note_late(late);
    for (unsigned i = 0; i < l->thread_count; i++)
        pthread_join(l->threads[i], NULL);
    stop_note_late(-late);
    pthread_cond_destroy(&l->ended);
    pthread_cond_destroy(&l->wanted);
    pthread_mutex_destroy(&l->lock);
    free(l);
}
