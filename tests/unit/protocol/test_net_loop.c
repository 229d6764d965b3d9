/* The network loop by itself: posts from other threads, timers, and the end. */
#include "net_rig.h"
#include <semaphore.h>
#include <signal.h>
#include <time.h>

static struct net_loop *loop;
static pthread_t thread;

static int set_up(void **state)
{
    (void)state;
    loop = loop_make();
    thread = loop_begin(loop);
    return 0;
}

static atomic_int posted, fired;
static struct net_timer *timer;

static void on_post(void *arg)
{
    atomic_fetch_add(&posted, (int)(intptr_t)arg);
}

static void on_timer(void *ctx)
{
    (void)ctx;
    if (atomic_fetch_add(&fired, 1) < 2)
        net_timer_start(timer, 1000); /* again, from its own callback */
}

static void start_timers(void *arg)
{
    (void)arg;
    timer = net_timer_create(loop, on_timer, NULL);
    struct net_timer *stopped = net_timer_create(loop, on_timer, NULL);
    net_timer_start(stopped, 500);
    net_timer_stop(stopped);
    net_timer_start(timer, 1000);
    net_timer_destroy(stopped);
}

static void test_posts_and_timers(void **state)
{
    (void)state;
    atomic_store(&posted, 0), atomic_store(&fired, 0);
    for (int i = 1; i <= 100; i++)
        assert_int_equal(net_loop_post(loop, on_post, (void *)(intptr_t)i), 0);
    assert_true(reaches(&posted, 5050));
    assert_int_equal(net_loop_post(loop, start_timers, NULL), 0);
    assert_true(reaches(&fired, 3));
    usleep(10000);
    assert_int_equal(atomic_load(&fired), 3);
    net_loop_stop(loop);
    pthread_join(thread, NULL);
    int code = 0;
    for (unsigned i = 0; i < NET_POSTS_MAX + 1 && !code; i++)
        code = net_loop_post(loop, on_post, (void *)(intptr_t)1);
    assert_int_equal(code, -TD_ERR_FULL);
    net_loop_destroy(loop); /* what was accepted runs */
    assert_int_equal(atomic_load(&posted), 5050 + (int)NET_POSTS_MAX);
    net_timer_start(timer, 1); /* harmless after the loop */
    net_timer_destroy(timer);
}

static sem_t gate;

static void on_gate(void *arg)
{
    (void)arg;
    sem_wait(&gate);
}

static void *post_and_wait(void *arg)
{
    (void)arg;
    return (void *)(intptr_t)net_loop_post_wait(loop, on_post, (void *)(intptr_t)1000000);
}

static void test_what_must_not_get_lost_waits_for_room(void **state)
{
    (void)state;
    pthread_t waiter;
    void *code;
    int count = 0;
    atomic_store(&posted, 0);
    sem_init(&gate, 0, 0);
    assert_int_equal(net_loop_post(loop, on_gate, NULL), 0);
    while (net_loop_post(loop, on_post, (void *)(intptr_t)1) == 0)
        count++;
    assert_int_equal(pthread_create(&waiter, NULL, post_and_wait, NULL), 0);
    usleep(10000);
    sem_post(&gate);
    pthread_join(waiter, &code);
    assert_int_equal((intptr_t)code, 0);
    assert_true(reaches(&posted, 1000000 + count));
    loop_end(loop, thread);
    sem_destroy(&gate);
}

static void on_signal(int number)
{
    (void)number;
    net_loop_stop(loop);
}

static void test_stopped_by_a_signal(void **state)
{
    (void)state;
    signal(SIGUSR1, on_signal);
    pthread_kill(thread, SIGUSR1);
#ifdef __SANITIZE_THREAD__ /* it keeps a signal back until the thread calls something: one more makes it do so */
    while (pthread_tryjoin_np(thread, NULL) != 0) {
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
        pthread_kill(thread, SIGUSR1);
    }
#else
    pthread_join(thread, NULL);
#endif
    signal(SIGUSR1, SIG_DFL);
    net_loop_destroy(loop);
}

/* A loop that was never run can be destroyed, and one that closes begins nothing new. */
static void test_never_run(void **state)
{
    (void)state;
    net_loop_destroy(loop_make());
    net_loop_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_posts_and_timers, set_up),
        cmocka_unit_test_setup(test_what_must_not_get_lost_waits_for_room, set_up),
        cmocka_unit_test_setup(test_stopped_by_a_signal, set_up),
        cmocka_unit_test(test_never_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
