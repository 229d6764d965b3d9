/* io_worker and inbox: jobs in the order of submission, but owners in turn, one more than may wait is refused, `done` comes on the loop's thread, and what was
 * submitted is finished when the worker is stopped. */
#include "protocol/io_worker.h"
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <cmocka.h>
#include <errno.h>

static struct bench {
    struct net_loop *loop;
    struct inbox *inbox;
    struct io_worker *worker;
    sem_t gate;  /* holds the first job, and others that are to be held */
    sem_t begun; /* such a job is at work */
    uint32_t worked, waited, finished;
    uint32_t told;     /* calls of done */
    uint32_t order[8]; /* of what jobs, where these are few */
    pthread_t loop_thread;
} b;

struct job {
    uint32_t before; /* something that is not the job */
    struct io_job io;
    uint32_t number;
    bool held;
};

static struct job *job_of(struct io_job *io)
{
    return (struct job *)((char *)io - offsetof(struct job, io));
}

static void work(struct io_job *io)
{
    if (job_of(io)->number == 0 || job_of(io)->held) {
        sem_post(&b.begun);
        sem_wait(&b.gate);
    }
    if (job_of(io)->number == b.worked)
        b.worked++;
}

static void done(struct io_job *io)
{
    b.order[b.told++ % TD_COUNT(b.order)] = job_of(io)->number;
    if (job_of(io)->number == b.finished && pthread_equal(pthread_self(), b.loop_thread))
        b.finished++;
    if (b.finished == IO_WORKER_JOBS_MAX)
        net_loop_stop(b.loop);
}

static int set_up(void **state)
{
    struct td_error err;
    (void)state;
    b = (struct bench){.loop_thread = pthread_self()};
    sem_init(&b.gate, 0, 0);
    sem_init(&b.begun, 0, 0);
    b.loop = net_loop_create(&err);
    if (!b.loop)
        return -1;
    b.inbox = inbox_create(b.loop);
    b.worker = io_worker_create(b.inbox);
    return b.worker ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    sem_post(&b.gate);
    io_worker_destroy(b.worker);
    inbox_destroy(b.inbox);
    net_loop_destroy(b.loop);
    return 0;
}

static struct job *submit_all(void)
{
    struct job *jobs = calloc(IO_WORKER_JOBS_MAX + 1, sizeof *jobs);
    for (uint32_t i = 0; i <= IO_WORKER_JOBS_MAX; i++) {
        jobs[i] = (struct job){.io = {.work = work, .done = done}, .number = i};
        assert_int_equal(io_worker_submit(b.worker, &jobs[i].io), i < IO_WORKER_JOBS_MAX ? 0 : -TD_ERR_FULL);
    }
    assert_int_equal(io_worker_pending(b.worker), IO_WORKER_JOBS_MAX);
    return jobs;
}

static void jobs_come_back_in_their_order(void **state)
{
    (void)state;
    struct job *jobs = submit_all();
    sem_post(&b.gate);
    assert_int_equal(net_loop_run(b.loop), 0);
    assert_int_equal(b.worked, IO_WORKER_JOBS_MAX);
    assert_int_equal(b.finished, IO_WORKER_JOBS_MAX);
    assert_int_equal(io_worker_pending(b.worker), 0);
    free(jobs);
}

static void a_stopped_worker_has_finished_and_takes_no_more(void **state)
{
    (void)state;
    struct job *jobs = submit_all();
    sem_post(&b.gate);
    io_worker_stop(b.worker);
    assert_int_equal(b.worked, IO_WORKER_JOBS_MAX);
    assert_int_equal(b.finished, 0);
    inbox_drain(b.inbox);
    assert_int_equal(b.finished, IO_WORKER_JOBS_MAX);
    inbox_drain(b.inbox); /* what has been taken out is its owner's again */
    assert_int_equal(b.told, IO_WORKER_JOBS_MAX);
    assert_int_equal(io_worker_submit(b.worker, &jobs[0].io), -TD_ERR_CLOSED);
    assert_int_equal(io_worker_pending(b.worker), 0);
    free(jobs);
}

static void submit(struct job *job, uint64_t owner, uint32_t number, bool held)
{
    *job = (struct job){.io = {.work = work, .done = done, .owner = owner}, .number = number, .held = held};
    assert_int_equal(io_worker_submit(b.worker, &job->io), 0);
    if (number == 0)
        sem_wait(&b.begun);
}

static void all_came_in_their_turn(uint32_t count)
{
    sem_post(&b.gate);
    io_worker_stop(b.worker);
    inbox_drain(b.inbox);
    assert_int_equal(b.worked, count);
    assert_int_equal(b.told, count);
}

/* Each owner's next before anybody's next but one; nobody's behind all that was there. Numbers say what is to come when. */
static void owners_take_turns(void **state)
{
    (void)state;
    struct job jobs[7];
    uint64_t ann = io_owner("t", "ann"), bob = io_owner("t", "bob"), cat = io_owner("tcat", "");
    assert_true(ann && ann != bob && ann != cat && cat != io_owner("t", "cat"));
    submit(&jobs[0], ann, 0, true);
    submit(&jobs[1], ann, 3, false);
    submit(&jobs[2], ann, 4, false);
    submit(&jobs[3], bob, 1, false);
    submit(&jobs[4], 0, 5, false);
    submit(&jobs[5], cat, 2, false);
    submit(&jobs[6], ann, 6, false);
    all_came_in_their_turn(7);
}

/* Who asks again as soon as the last is at work has no more turns than who asks for much at once. */
static void who_asks_one_by_one_takes_turns_as_well(void **state)
{
    (void)state;
    struct job jobs[6];
    uint64_t ann = io_owner("t", "ann"), bob = io_owner("t", "bob");
    submit(&jobs[0], ann, 0, true);
    submit(&jobs[1], ann, 2, false);
    submit(&jobs[2], ann, 4, false);
    submit(&jobs[3], bob, 1, true);
    sem_post(&b.gate);
    sem_wait(&b.begun);
    submit(&jobs[4], bob, 3, true);
    sem_post(&b.gate);
    sem_wait(&b.begun);
    submit(&jobs[5], bob, 5, false);
    all_came_in_their_turn(6);
}

/* Two who ask again while the other's is at work, and so always have one that waits, do not keep a third's second for ever. */
static void two_who_alternate_do_not_keep_others_out(void **state)
{
    (void)state;
    struct job jobs[6];
    uint64_t ann = io_owner("t", "ann"), bob = io_owner("t", "bob"), cat = io_owner("t", "cat");
    submit(&jobs[0], ann, 0, true);
    submit(&jobs[1], bob, 1, true);
    submit(&jobs[2], cat, 2, false);
    submit(&jobs[3], cat, 3, false);
    sem_post(&b.gate);
    sem_wait(&b.begun);
    submit(&jobs[4], ann, 4, false);
    submit(&jobs[5], bob, 5, false);
    all_came_in_their_turn(6);
}

static void tell(uint32_t count)
{
    for (; b.told < count; sched_yield())
        inbox_drain(b.inbox);
}

static bool no_more_threads;
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *a, void *(*fn)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *a, void *(*fn)(void *), void *arg);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *a, void *(*fn)(void *), void *arg)
{
    return no_more_threads ? EAGAIN : __real_pthread_create(thread, a, fn, arg);
}

static void wait_in_order(struct io_job *io)
{
    if (job_of(io)->number + 1 == b.worked)
        b.waited++;
}

/* Nor is anything lost where nobody else can wait: the worker does it itself, before the next. */
static void without_a_second_thread_the_first_waits(void **state)
{
    (void)state;
    struct job jobs[3];
    no_more_threads = true;
    for (uint32_t i = 0; i < 3; i++) {
        jobs[i] = (struct job){.io = {.work = work, .wait = wait_in_order, .done = done}, .number = i};
        assert_int_equal(io_worker_submit(b.worker, &jobs[i].io), 0);
    }
    sem_post(&b.gate);
    tell(3);
    no_more_threads = false;
    assert_int_equal(b.worked, 3);
    assert_int_equal(b.waited, 3);
    assert_int_equal(b.finished, 3);
}

static void wait_at_gate(struct io_job *io)
{
    (void)io;
    sem_post(&b.begun);
    sem_wait(&b.gate);
}

/* Nor does its owner's next wait for it; what is nobody's does. */
static void who_only_waits_holds_nobody_up(void **state)
{
    (void)state;
    static const uint32_t order[] = {2, 3, 5, 1, 4};
    uint64_t ann = io_owner("t", "ann"), bob = io_owner("t", "bob");
    struct job jobs[] = {
        {.io = {.work = work, .wait = wait_at_gate, .done = done, .owner = ann}, .number = 1},
        {.io = {.work = work, .done = done, .owner = bob}, .number = 2},
        {.io = {.work = work, .done = done, .owner = ann}, .number = 3},
        {.io = {.work = work, .done = done, .owner = 0}, .number = 4},
        {.io = {.work = work, .done = done, .owner = ann}, .number = 5}};
    for (size_t i = 0; i < TD_COUNT(jobs); i++) {
        assert_int_equal(io_worker_submit(b.worker, &jobs[i].io), 0);
        if (i == 0)
            sem_wait(&b.begun);
    }
    tell(3);
    assert_int_equal(io_worker_pending(b.worker), 2);
    sem_post(&b.gate);
    tell(5);
    assert_memory_equal(b.order, order, sizeof order);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(who_only_waits_holds_nobody_up, set_up, tear_down),
        cmocka_unit_test_setup_teardown(without_a_second_thread_the_first_waits, set_up, tear_down),
        cmocka_unit_test_setup_teardown(jobs_come_back_in_their_order, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_stopped_worker_has_finished_and_takes_no_more, set_up, tear_down),
        cmocka_unit_test_setup_teardown(owners_take_turns, set_up, tear_down),
        cmocka_unit_test_setup_teardown(who_asks_one_by_one_takes_turns_as_well, set_up, tear_down),
        cmocka_unit_test_setup_teardown(two_who_alternate_do_not_keep_others_out, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
