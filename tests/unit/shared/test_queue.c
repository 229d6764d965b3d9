/* queue: order, bounds, closing, time-outs and waking, alone and between threads. */
#include "shared/base.h"
#include "shared/queue.h"
#include "shared/status.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

static int items[100000]; /* only their addresses matter */

static void test_first_in_first_out(void **state)
{
    (void)state;
    struct queue *q = queue_create(3);
    int in = 0, out = 0;
    for (int round = 0; round < 20; round++) { /* walks around the ring */
        while (queue_push(q, &items[in]) == 0)
            in++;
        assert_int_equal(queue_count(q), 3);
        for (int i = 0; i < 1 + round % 3; i++)
            assert_ptr_equal(queue_pop(q, 0), &items[out++]);
    }
    while (out < in)
        assert_ptr_equal(queue_pop(q, 1000), &items[out++]);
    assert_null(queue_pop(q, 0));
    queue_destroy(q);
}

static void test_full_closed_and_bad(void **state)
{
    (void)state;
    struct queue *q = queue_create(2);
    assert_int_equal(queue_push(q, NULL), -TD_ERR_ARG);
    assert_int_equal(queue_push(q, &items[0]), 0);
    assert_int_equal(queue_push(q, &items[1]), 0);
    assert_int_equal(queue_push(q, &items[2]), -TD_ERR_FULL);
    queue_close(q);
    assert_int_equal(queue_push(q, &items[2]), -TD_ERR_CLOSED);
    assert_ptr_equal(queue_pop(q, 0), &items[0]);
    assert_int_equal(queue_push(q, &items[2]), -TD_ERR_CLOSED);
    assert_ptr_equal(queue_pop(q, 1000000), &items[1]);
    assert_null(queue_pop(q, UINT64_MAX)); /* closed and empty: no waiting */
    queue_destroy(q);
    queue_destroy(NULL);
    assert_null(queue_create(0));
    assert_null(queue_create(SIZE_MAX / sizeof(void *)));
}

static void test_timeout(void **state)
{
    (void)state;
    struct queue *q = queue_create(1);
    uint64_t before = clock_mono_us();
    assert_null(queue_pop(q, 20000));
    uint64_t waited = clock_mono_us() - before;
    assert_true(waited >= 20000);
    queue_destroy(q);
}

struct waiter {
    struct queue *q;
    uint64_t timeout_us;
    void *got;
};

static void *waiter_main(void *arg)
{
    struct waiter *w = arg;
    w->got = queue_pop(w->q, w->timeout_us);
    return NULL;
}

static void test_waiting_pop_wakes_up(void **state)
{
    (void)state;
    struct queue *q = queue_create(1);
    struct waiter w = {.q = q, .timeout_us = UINT64_MAX};
    pthread_t thread;
    pthread_create(&thread, NULL, waiter_main, &w);
    usleep(5000);
    assert_int_equal(queue_push(q, &items[5]), 0);
    pthread_join(thread, NULL);
    assert_ptr_equal(w.got, &items[5]);

    struct waiter closed[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        closed[i] = (struct waiter){.q = q, .timeout_us = UINT64_MAX, .got = &items[0]};
        pthread_create(&threads[i], NULL, waiter_main, &closed[i]);
    }
    usleep(5000);
    queue_close(q);
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert_null(closed[i].got);
    }
    queue_destroy(q);
}

#define PRODUCERS    3
#define CONSUMERS    3
#define PER_PRODUCER 4000

struct producer {
    struct queue *q;
    int index;
};

static atomic_int seen[PRODUCERS * PER_PRODUCER];
static atomic_int out_of_order;

static void *producer_main(void *arg)
{
    struct producer *p = arg;
    for (int i = 0; i < PER_PRODUCER; i++)
        while (queue_push(p->q, &items[p->index * PER_PRODUCER + i]) == -TD_ERR_FULL)
            usleep(50);
    return NULL;
}

static void *consumer_main(void *arg)
{
    struct queue *q = arg;
    long last[PRODUCERS] = {-1, -1, -1};
    for (int *item; (item = queue_pop(q, UINT64_MAX));) {
        long number = item - items;
        atomic_fetch_add(&seen[number], 1);
        if (number <= last[number / PER_PRODUCER])
            atomic_fetch_add(&out_of_order, 1);
        last[number / PER_PRODUCER] = number;
    }
    return NULL;
}

static void test_many_producers_and_consumers(void **state)
{
    (void)state;
    struct queue *q = queue_create(16);
    pthread_t producers[PRODUCERS], consumers[CONSUMERS];
    struct producer inputs[PRODUCERS];
    for (int i = 0; i < CONSUMERS; i++)
        pthread_create(&consumers[i], NULL, consumer_main, q);
    for (int i = 0; i < PRODUCERS; i++) {
        inputs[i] = (struct producer){q, i};
        pthread_create(&producers[i], NULL, producer_main, &inputs[i]);
    }
    for (int i = 0; i < PRODUCERS; i++)
        pthread_join(producers[i], NULL);
    queue_close(q);
    for (int i = 0; i < CONSUMERS; i++)
        pthread_join(consumers[i], NULL);
    for (size_t i = 0; i < TD_COUNT(seen); i++)
        assert_int_equal(atomic_load(&seen[i]), 1);
    assert_int_equal(atomic_load(&out_of_order), 0); /* what one consumer sees of one producer is in order */
    queue_destroy(q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_in_first_out),
        cmocka_unit_test(test_full_closed_and_bad),
        cmocka_unit_test(test_timeout),
        cmocka_unit_test(test_waiting_pop_wakes_up),
        cmocka_unit_test(test_many_producers_and_consumers),
    };
    return cmocka_run_group_tests_name("queue", tests, NULL, NULL);
}
