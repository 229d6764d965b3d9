/* workers: persistent threads that help the caller with one job at a time.
 *
 * A job is open while the caller still hands out tasks. A helper *joins* an open job, takes tasks and leaves. Each
 * thread has a run of tasks of its own, the same part of every job, and takes from the others' when it is done: jobs in a
 * row that split the same data alike leave it in the caches of the same cores, and still nobody waits for a slow one. The caller takes tasks too; when none are left it closes the job and waits only
 * for helpers that have joined: one that the scheduler did not run in time is simply not needed. So a job
 * costs little when cores are taken by others, and no task is ever late because a helper woke up late.
 *
 * `state` is the whole protocol in one word:
 *
 *     bit 31..16  generation: one more for every job, so that a helper sees a job that it has not served yet
 *     bit 15      open: helpers may join
 *     bit 14      caller_sleeps: the last helper to leave must wake the caller
 *     bit 13..0   joined helpers
 *
 *         run: gen+1, open ──▶ helpers +1 … -1 ──▶ run: clear open ──▶ joined == 0 ──▶ run returns
 *
 * A generation that wraps around exactly while a helper sleeps only means that it sits one job out.
 * task, ctx and the runs are written while closed with nobody joined, and read after joining (acquire on
 * state). Waiting spins for SPIN_ROUNDS pauses (some tens of microseconds: longer than what the caller does
 * alone between two jobs of a decode step, as being woken costs more), and not at all when the pool has more threads than the process has cores; then it sleeps on
 * a futex. */
#include "shared/workers.h"
#include "shared/base.h"
#include <assert.h>
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CACHE_LINE       64
#define SPIN_ROUNDS      4096
#define GENERATION_ONE   (1u << 16)
#define STATE_OPEN       (1u << 15)
#define STATE_SLEEPS     (1u << 14)
#define STATE_JOINED     (STATE_SLEEPS - 1)
#define STATE_GENERATION (~(GENERATION_ONE - 1))

struct task_run {
    _Alignas(CACHE_LINE) atomic_size_t next;
    size_t end;
};

struct helper {
    struct workers *pool;
    unsigned index; /* worker_index; the caller is 0 */
    pthread_t thread;
};

struct workers {
    unsigned count; /* threads with the caller */
    unsigned spin_rounds;
    struct helper *helpers; /* count - 1 */
    workers_task task;
    void *ctx;
    struct task_run *runs; /* of each thread */
    _Alignas(CACHE_LINE) _Atomic uint32_t state;
    _Atomic uint32_t stopping;
    _Alignas(CACHE_LINE) _Atomic uint32_t call; /* futex of sleeping helpers: one more for every job */
    _Atomic uint32_t sleepers;
    _Alignas(CACHE_LINE) _Atomic uint32_t done; /* futex of the sleeping caller */
};

static void futex_wait(_Atomic uint32_t *word, uint32_t expected)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL,
            0); /* callers look again, whatever it says */
}

static void futex_wake(_Atomic uint32_t *word, unsigned count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static void spin_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_tasks(struct workers *w, unsigned worker_index)
{
    for (unsigned k = 0; k < w->count; k++) {
        struct task_run *run = &w->runs[(worker_index + k) % w->count];
        while (atomic_load_explicit(&run->next, memory_order_relaxed) < run->end) {
            size_t i = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed);
            if (i < run->end)
                w->task(w->ctx, i, worker_index);
        }
    }
}

/* --- helpers --- */

static bool job_waits(const struct workers *w, uint32_t served)
{
    uint32_t state = atomic_load(&w->state);
    return (state & STATE_OPEN) && (state & STATE_GENERATION) != served;
}

/* Wait for a job of another generation than `served`; false when the pool stops. */
static bool wait_for_job(struct workers *w, uint32_t served)
{
    for (unsigned i = 0; i < w->spin_rounds; i++) {
        if (job_waits(w, served))
            return true;
        spin_pause();
    }
    atomic_fetch_add(&w->sleepers, 1);
    for (;;) {
        /* Read before looking: a call between the look and the wait changes the word, and the wait returns.
         */
        uint32_t call = atomic_load(&w->call);
        if (atomic_load(&w->stopping) || job_waits(w, served))
            break;
        futex_wait(&w->call, call);
    }
    atomic_fetch_sub(&w->sleepers, 1);
    return !atomic_load(&w->stopping);
}

/* Join the job that is open now; false if it closed meanwhile. *served: its generation. */
static bool join_job(struct workers *w, uint32_t *served)
{
    uint32_t state = atomic_load(&w->state);
    while (state & STATE_OPEN)
        if (atomic_compare_exchange_weak(&w->state, &state, state + 1)) {
            *served = state & STATE_GENERATION;
            return true;
        }
    return false;
}

static void leave_job(struct workers *w)
{
    uint32_t before = atomic_fetch_sub(&w->state, 1);
    if ((before & STATE_JOINED) == 1 && (before & STATE_SLEEPS)) {
        atomic_fetch_add(&w->done, 1);
        futex_wake(&w->done, 1);
    }
}

static void *helper_main(void *arg)
{
    struct helper *self = arg;
    struct workers *w = self->pool;
    uint32_t served = 0;
    while (wait_for_job(w, served))
        if (join_job(w, &served)) {
            take_tasks(w, self->index);
            leave_job(w);
        }
    return NULL;
}

/* --- the pool --- */

static unsigned usable_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return (unsigned)CPU_COUNT(&set);
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (unsigned)online : 1;
}

/* Signals belong to the program's own threads: helpers block them all. */
static int start_helpers(struct workers *w, unsigned *started)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = 0;
    for (*started = 0; *started < w->count - 1; ++*started) {
        struct helper *h = &w->helpers[*started];
        *h = (struct helper){.pool = w, .index = *started + 1};
        status = pthread_create(&h->thread, NULL, helper_main, h);
        if (status != 0)
            break;
        pthread_setname_np(h->thread, "td-worker");
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

static void stop_helpers(struct workers *w, unsigned started)
{
    atomic_store(&w->stopping, 1);
    atomic_fetch_add(&w->call, 1);
    futex_wake(&w->call, WORKERS_MAX);
    for (unsigned i = 0; i < started; i++)
        pthread_join(w->helpers[i].thread, NULL);
}

struct workers *workers_create(unsigned thread_count)
{
    if (thread_count == 0 || thread_count > WORKERS_MAX)
        return NULL;
    struct workers *w = aligned_alloc(CACHE_LINE, align_up(sizeof *w, CACHE_LINE));
    if (!w)
        return NULL;
    memset(w, 0, sizeof *w);
    w->count = thread_count;
    w->spin_rounds = thread_count <= usable_cores() ? SPIN_ROUNDS : 0;
    unsigned started = 0;
    w->helpers = calloc(thread_count, sizeof *w->helpers);
    w->runs = aligned_alloc(CACHE_LINE, thread_count * sizeof *w->runs);
    if (w->helpers && w->runs && start_helpers(w, &started) == 0)
        return w;
    if (w->helpers && w->runs)
        stop_helpers(w, started);
    free(w->runs);
    free(w->helpers);
    free(w);
    return NULL;
}

void workers_destroy(struct workers *w)
{
    if (!w)
        return;
    stop_helpers(w, w->count - 1);
    free(w->runs);
    free(w->helpers);
    free(w);
}

unsigned workers_count(const struct workers *w)
{
    return w->count;
}

/* --- a job --- */

static void open_job(struct workers *w, size_t task_count, workers_task task, void *ctx)
{
    uint32_t state = atomic_load(&w->state);
    assert(!(state & (STATE_OPEN | STATE_JOINED)) && "one job at a time");
    w->task = task;
    w->ctx = ctx;
    for (unsigned i = 0; i < w->count; i++) {
        atomic_store_explicit(&w->runs[i].next, task_count * i / w->count, memory_order_relaxed);
        w->runs[i].end = task_count * (i + 1) / w->count;
    }
    atomic_store(&w->state, ((state & STATE_GENERATION) + GENERATION_ONE) | STATE_OPEN);
    /* A helper counts itself as a sleeper before it looks at state for the last time: one of us sees the
     * other. */
    if (atomic_load(&w->sleepers) > 0) {
        atomic_fetch_add(&w->call, 1);
        futex_wake(&w->call, (unsigned)TD_MIN(task_count - 1, (size_t)WORKERS_MAX));
    }
}

static void close_job(struct workers *w)
{
    uint32_t state = atomic_fetch_and(&w->state, ~STATE_OPEN);
    for (unsigned i = 0; i < w->spin_rounds && (state & STATE_JOINED); i++) {
        spin_pause();
        state = atomic_load(&w->state);
    }
    while (state & STATE_JOINED) {
        uint32_t done = atomic_load(&w->done);
        state = atomic_fetch_or(&w->state, STATE_SLEEPS);
        if (!(state & STATE_JOINED))
            break;
        futex_wait(&w->done, done);
        state = atomic_load(&w->state);
    }
    /* STATE_SLEEPS may be left set; the next open_job writes the whole word. */
}

void workers_run(struct workers *w, size_t task_count, workers_task task, void *ctx)
{
    if (w->count == 1 || task_count <= 1) {
        for (size_t i = 0; i < task_count; i++)
            task(ctx, i, 0);
        return;
    }
    open_job(w, task_count, task, ctx);
    take_tasks(w, 0);
    close_job(w);
}
