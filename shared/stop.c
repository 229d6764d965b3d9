/* stop: see stop.h. The thread waits for signals, not on a clock alone, as whoever watched for them may have ended when the second one comes. */
#include "shared/stop.h"
#include "shared/base.h"
#include "shared/log.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#define LOOK_US UINT64_C(1000000) /* so often at the disk */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { /* under lock, but for `done` */
    bool running;
    pthread_t thread;
    const char *module;
    unsigned seconds, silent_seconds;
    atomic_bool done;
} guard;
static atomic_bool asked; /* a signal has come, here or to the caller */
static _Atomic uint64_t call_due_us;
static atomic_int late_count; /* of reads */

static void end_at_once(const char *module)
{
    log_warn(module, "second signal: stopping at once");
    _exit(1);
}

static bool disk_is_silent(void)
{
    uint64_t due_us = atomic_load(&call_due_us);
    return due_us ? clock_mono_us() > due_us : atomic_load(&late_count) > 0;
}

/* A disk may fall silent, or answer again, at any time. */
static void *watch(void *arg)
{
    (void)arg;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    uint64_t began_us = clock_mono_us(), took_us = 0;
    uint64_t end_us = guard.seconds * UINT64_C(1000000), silent_us = guard.silent_seconds * UINT64_C(1000000);
    int got = -1;
    while (got < 0 && took_us < end_us && (took_us < silent_us || !disk_is_silent())) {
        uint64_t wait_us = TD_MIN(LOOK_US, end_us - took_us);
        got = sigtimedwait(&set, NULL,
                           &(struct timespec){.tv_sec = (time_t)(wait_us / 1000000),
                                              .tv_nsec = (long)(wait_us % 1000000) * 1000});
        if (got > 0 && !atomic_load(&guard.done) && !atomic_exchange(&asked, true))
            got = -1; /* the first one, as the stop began without */
        took_us = clock_mono_us() - began_us;
    }
    if (atomic_load(&guard.done))
        return NULL;
    if (got > 0)
        end_at_once(guard.module);
    log_error(guard.module,
              "not stopped in %u s: a disk does not answer, or is very slow; stopping at once. What was "
              "acknowledged is kept",
              (unsigned)(took_us / 1000000));
    _exit(1);
}

void stop_note_call(uint64_t due_us)
{
    atomic_store(&call_due_us, due_us);
}

void stop_note_late(int change)
{
    atomic_fetch_add(&late_count, change);
}

void stop_begins(const char *module, unsigned seconds, unsigned silent_seconds, bool by_signal)
{
    if (by_signal && atomic_exchange(&asked, true))
        end_at_once(module);
    pthread_mutex_lock(&lock);
    if (!guard.running) {
        guard.module = module;
        guard.seconds = seconds;
        guard.silent_seconds = silent_seconds;
        atomic_store(&guard.done, false);
        guard.running = pthread_create(&guard.thread, NULL, watch, NULL) == 0;
    }
    pthread_mutex_unlock(&lock);
}

void stop_done(void)
{
    pthread_mutex_lock(&lock);
    if (guard.running) {
        atomic_store(&guard.done, true);
        pthread_kill(guard.thread, SIGTERM); /* blocked there, so it only ends the wait */
        pthread_join(guard.thread, NULL);
        guard.running = false;
    }
    atomic_store(&asked, false);
    pthread_mutex_unlock(&lock);
}
