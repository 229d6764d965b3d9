/* patience: does the disk answer? A call into a disk that hangs (a server that is away, a device that dies) can be neither ended nor left, and what it
 * reads from must live until it returns: so it is the writer that hangs, with its batch, and nobody else.
 *
 *     (answers) -- a call of the writer is late, or who waited for an acknowledgement went without --> (silent)
 *     (silent)  -- the call has returned, and what was left has been acknowledged or has failed    --> (answers)
 *
 * The writer notes before each call by when it should be back; the others look at the clock. While the disk is silent nothing more is queued
 * and nobody waits: a put is refused, a turn is told that it is not kept. What was queued before stays, and is written when the disk is
 * back: that it was given up by whoever waited makes it no less durable then, only later. */
#include "shared/log.h"
#include "shared/stop.h"
#include "store/lane.h"
#include "store/store_internal.h"
#include <stdlib.h>
#include <time.h>

#define READERS    2u
#define KEY_MAKERS 1u /* who changes the keys' file is alone with it anyway */

/* ---- the writer's calls ------------------------------------------------------------------------------------- */

static bool is_late(const struct store *s)
{
    uint64_t due_us = s->due_us;
    return due_us && clock_mono_us() > due_us;
}

static void note(struct store *s)
{
    pthread_mutex_lock(&s->silence_lock);
    uint64_t now_us = clock_mono_us();
    bool late = is_late(s), silent = late || s->left_behind > 0;
    if (silent && !s->silent) {
        s->silent_since_us = late ? s->call_us : now_us - s->answer_us;
        log_error("store",
                  "the disk has not answered for %.1f s: until it does nothing is written, blocks and turns "
                  "are not kept, and reading goes on",
                  (double)(now_us - s->silent_since_us) / 1e6);
    } else if (!silent && s->silent) {
        log_info("store", "the disk answers again, after %.1f s",
                 (double)(now_us - s->silent_since_us) / 1e6);
    }
    s->silent = silent;
    metric_set(s->metrics.writes_off, silent || s->write_error < 0);
    pthread_mutex_unlock(&s->silence_lock);
}

bool store_answers(struct store *s)
{
    bool silent = is_late(s) || s->left_behind > 0;
    if (silent != s->silent)
        note(s);
    return !silent;
}

static uint64_t patience_for(const struct store *s, uint64_t size)
{
    return s->answer_us + size * 1000000 / STORE_ANSWER_RATE;
}

void patience_call(struct store *s, uint64_t size)
{
    uint64_t now_us = clock_mono_us();
    s->call_us = now_us;
    s->due_us = now_us + patience_for(s, size);
    stop_note_call(s->due_us);
    store_answers(s);
}

void patience_rest(struct store *s)
{
    s->due_us = 0;
    stop_note_call(0);
    store_answers(s);
}

/* ---- who waits for an acknowledgement ----------------------------------------------------------------------- */

struct store_waiter *patience_waiter(struct store *s)
{
    struct store_waiter *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    w->store = s;
    w->since_us = clock_mono_us();
    return w;
}

static void free_waiter(struct store_waiter *w)
{
    pthread_cond_destroy(&w->ended);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

int patience_wait(struct store_waiter *w, int queued)
{
    if (queued < 0) {
        free_waiter(w);
        return queued;
    }
    struct store *s = w->store;
    /* the writer may have begun to rewrite a segment, or have to for what is queued */
    uint64_t ahead_size = op_queue_size(&s->queue) + s->segment_size;
    uint64_t end_us = w->since_us + patience_for(s, ahead_size);
    pthread_mutex_lock(&w->lock);
    while (!w->done && clock_mono_us() < end_us && !is_late(s)) {
        uint64_t due_us = s->due_us, look_us = due_us ? due_us + 1 : clock_mono_us() + s->answer_us;
        uint64_t until_us = TD_MIN(end_us, look_us);
        struct timespec until = {(time_t)(until_us / 1000000), (long)(until_us % 1000000 * 1000)};
        pthread_cond_timedwait(&w->ended, &w->lock, &until);
    }
    bool done = w->done;
    int status = w->status;
    if (!done) {
        w->left = true;
        atomic_fetch_add(&s->left_behind, 1);
    }
    pthread_mutex_unlock(&w->lock);
    if (done)
        free_waiter(w);
    store_answers(s);
    return done ? status : -TD_ERR_TIMEOUT;
}

void patience_done(void *ctx, int status)
{
    struct store_waiter *w = ctx;
    struct store *s = w->store;
    pthread_mutex_lock(&w->lock);
    bool left = w->left;
    w->done = true;
    w->status = status;
    pthread_cond_signal(&w->ended);
    pthread_mutex_unlock(&w->lock);
    if (!left)
        return;
    free_waiter(w);
    atomic_fetch_sub(&s->left_behind, 1);
    store_answers(s);
}

/* ---- reading, and making a tenant ---------------------------------------------------------------------------- */

int patience_open(struct store *s, uint64_t answer_us)
{
    s->answer_us = answer_us ? answer_us : STORE_ANSWER_US;
    s->readers = lane_create(NULL, "the store's disk", NULL, READERS);
    s->key_makers = lane_create(NULL, "the disk of the tenants' keys", NULL, KEY_MAKERS);
    return s->readers && s->key_makers ? 0 : -TD_ERR_NOMEM;
}

static int run_by_deadline(struct lane *l, struct lane_job *job, uint64_t patience_us)
{
    int rc = lane_run(l, job, patience_us);
    return rc == -TD_ERR_BUSY ? -TD_ERR_TIMEOUT : rc;
}

int patience_read(struct store *s, struct lane_job *job, uint64_t size)
{
    return run_by_deadline(s->readers, job, patience_for(s, size));
}

struct tenant_making {
    struct lane_job job; /* first */
    struct keys *keys;
    char name[STORE_TENANT_MAX + 1];
    uint32_t tenant;
    struct td_error err;
};

static int run_making(struct lane_job *job)
{
    struct tenant_making *m = (struct tenant_making *)job;
    return keys_ensure(m->keys, m->name, &m->tenant, &m->err);
}

static void free_making(struct lane_job *job)
{
    free(job);
}

int patience_tenant(struct store *s, const char *name, uint32_t *tenant, struct td_error *err)
{
    *tenant = keys_find(s->keys, name);
    if (*tenant || s->read_only || !keys_name_is_valid(name))
        return keys_ensure(s->keys, name, tenant, err);
    struct tenant_making *m = calloc(1, sizeof *m);
    int rc = m ? 0 : -TD_ERR_NOMEM;
    if (m) {
        m->job = (struct lane_job){.run = run_making, .free = free_making};
        m->keys = s->keys;
        strcpy(m->name, name); /* its length is checked */
        rc = run_by_deadline(s->key_makers, &m->job, patience_for(s, 0));
    }
    if (rc < 0)
        return td_fail(err, rc, "cannot make keys for a new tenant: %s",
                       rc == -TD_ERR_TIMEOUT ? "the disk does not answer" : td_status_text(rc));
    rc = m->job.status;
    *tenant = m->tenant;
    if (rc < 0 && err)
        *err = m->err;
    free(m);
    return rc;
}

void patience_close(struct store *s)
{
    lane_destroy(s->readers);
    lane_destroy(s->key_makers);
}
