/* workers: every task once, on valid workers, in parallel, with sleeping helpers, under load, and cheaply. */
#include "shared/base.h"
#include "shared/workers.h"
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

#define TASKS_MAX 1000

struct job {
    atomic_int runs[TASKS_MAX];
    atomic_bool busy[WORKERS_MAX]; /* one task at a time on a worker */
    atomic_int faults;
    unsigned worker_count;
    unsigned *plain; /* written without atomics: workers_run must order it (TSan watches) */
};

static void count_task(void *ctx, size_t task_index, unsigned worker_index)
{
    struct job *job = ctx;
    if (worker_index >= job->worker_count || atomic_exchange(&job->busy[worker_index], true))
        atomic_fetch_add(&job->faults, 1);
    atomic_fetch_add(&job->runs[task_index], 1);
    job->plain[task_index] += (unsigned)task_index;
    atomic_store(&job->busy[worker_index], false);
}

static void test_every_task_once(void **state)
{
    (void)state;
    static const size_t task_counts[] = {0, 1, 2, 3, 7, 64, TASKS_MAX};
    static unsigned plain[TASKS_MAX];
    for (unsigned threads = 1; threads <= 8; threads++) {
        struct workers *w = workers_create(threads);
        assert_non_null(w);
        assert_int_equal(workers_count(w), threads);
        for (size_t c = 0; c < TD_COUNT(task_counts); c++) {
            struct job job = {.worker_count = threads, .plain = plain};
            memset(plain, 0, sizeof plain);
            for (int round = 1; round <= 3; round++)
                workers_run(w, task_counts[c], count_task, &job);
            assert_int_equal(atomic_load(&job.faults), 0);
            for (size_t i = 0; i < TASKS_MAX; i++) {
                assert_int_equal(atomic_load(&job.runs[i]), i < task_counts[c] ? 3 : 0);
                assert_int_equal(plain[i], i < task_counts[c] ? 3 * i : 0);
            }
        }
        workers_destroy(w);
    }
}

static void test_bad_counts(void **state)
{
    (void)state;
    assert_null(workers_create(0));
    assert_null(workers_create(WORKERS_MAX + 1));
    struct workers *w = workers_create(WORKERS_MAX);
    assert_non_null(w);
    workers_destroy(w);
    workers_destroy(NULL);
}

struct meeting {
    atomic_int missing, strangers; /* strangers: tasks that another than the worker of their share took */
};

/* Tasks that wait for each other finish only if all of them run at once, each taken by the worker that begins with it. */
static void meet_task(void *ctx, size_t task_index, unsigned worker_index)
{
    struct meeting *m = ctx;
    if (task_index != worker_index)
        atomic_fetch_add(&m->strangers, 1);
    atomic_fetch_sub(&m->missing, 1);
    uint64_t give_up_us = clock_mono_us() + 60000000;
    while (atomic_load(&m->missing) > 0 && clock_mono_us() < give_up_us)
        usleep(100);
}

static void test_all_threads_work_at_once(void **state)
{
    (void)state;
    for (unsigned threads = 2; threads <= 5; threads++) {
        struct workers *w = workers_create(threads);
        for (int round = 0; round < 5; round++) {
            usleep(round * 1000); /* helpers spin in the first round and sleep in the later ones */
            struct meeting m = {(int)threads, 0};
            workers_run(w, threads, meet_task, &m);
            assert_int_equal(atomic_load(&m.missing), 0);
            assert_int_equal(atomic_load(&m.strangers), 0);
        }
        workers_destroy(w);
    }
}

/* The caller finishes first and has to sleep until the helper is done. */
static void slow_helper_task(void *ctx, size_t task_index, unsigned worker_index)
{
    (void)task_index;
    atomic_int *started = ctx;
    atomic_fetch_add(started, 1);
    uint64_t give_up_us = clock_mono_us() + 60000000;
    while (atomic_load(started) < 2 && clock_mono_us() < give_up_us)
        usleep(100);
    if (worker_index != 0) {
        usleep(3000);
        atomic_fetch_add(started, 100);
    }
}

static void test_run_waits_for_slow_helper(void **state)
{
    (void)state;
    struct workers *w = workers_create(2);
    for (int round = 0; round < 5; round++) {
        atomic_int started = 0;
        workers_run(w, 2, slow_helper_task, &started);
        assert_int_equal(atomic_load(&started), 102);
    }
    workers_destroy(w);
}

static void add_task(void *ctx, size_t task_index, unsigned worker_index)
{
    (void)worker_index;
    ((uint64_t *)ctx)[task_index]++;
}

/* Many tiny jobs in a row, some after a pause: the races between opening, joining, leaving and sleeping. */
static void test_many_small_jobs(void **state)
{
    (void)state;
    for (unsigned threads = 2; threads <= 6; threads += 2) {
        struct workers *w = workers_create(threads);
        uint64_t sums[6] = {0};
        for (int i = 0; i < 5000; i++) {
            workers_run(w, 6, add_task, sums);
            if (i % 100 == 0)
                usleep(i % 300);
        }
        for (int i = 0; i < 6; i++)
            assert_true(sums[i] == 5000);
        workers_destroy(w);
    }
}

static void mask_task(void *ctx, size_t task_index, unsigned worker_index)
{
    sigset_t *masks = ctx;
    pthread_sigmask(SIG_BLOCK, NULL, &masks[worker_index]);
    (void)task_index;
    usleep(2000);
}

static void test_helpers_leave_signals_to_the_program(void **state)
{
    (void)state;
    sigset_t before, after, masks[2];
    pthread_sigmask(SIG_BLOCK, NULL, &before);
    sigfillset(&masks[1]);
    struct workers *w = workers_create(2);
    workers_run(w, 8, mask_task, masks);
    pthread_sigmask(SIG_BLOCK, NULL, &after);
    assert_int_equal(sigismember(&masks[1], SIGTERM), 1);
    assert_int_equal(sigismember(&masks[0], SIGTERM), sigismember(&before, SIGTERM));
    assert_int_equal(sigismember(&after, SIGTERM), sigismember(&before, SIGTERM));
    workers_destroy(w);
}

static void empty_task(void *ctx, size_t task_index, unsigned worker_index)
{
    (void)ctx, (void)task_index, (void)worker_index;
}

/* The figure is printed for whoever wants to know; the machine may be busy. */
static void test_what_an_empty_job_takes(void **state)
{
    (void)state;
    struct workers *w = workers_create(2);
    uint64_t best_us = UINT64_MAX;
    for (int round = 0; round < 10; round++) {
        uint64_t before = clock_mono_us();
        for (int i = 0; i < 1000; i++)
            workers_run(w, 2, empty_task, NULL);
        best_us = TD_MIN(best_us, clock_mono_us() - before);
    }
    print_message("an empty job on 2 threads: %.2f us\n", (double)best_us / 1000);
    workers_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_task_once),
        cmocka_unit_test(test_bad_counts),
        cmocka_unit_test(test_all_threads_work_at_once),
        cmocka_unit_test(test_run_waits_for_slow_helper),
        cmocka_unit_test(test_many_small_jobs),
        cmocka_unit_test(test_helpers_leave_signals_to_the_program),
        cmocka_unit_test(test_what_an_empty_job_takes),
    };
    return cmocka_run_group_tests_name("workers", tests, NULL, NULL);
}
