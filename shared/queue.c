/* queue: a ring of pointers under one mutex. A lock is enough here: queues carry messages (a request, a
 * chunk, a block), thousands a second, not single tokens' arithmetic. Invariants: count <= capacity; items
 * are at ring[(first + i) % capacity], i < count; closed never goes back. */
#include "shared/queue.h"
#include "shared/status.h"
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#define WAIT_MAX_US (365ull * 86400 * 1000000) /* "for ever", small enough to add to any clock */

struct queue {
    pthread_mutex_t lock;
    pthread_cond_t filled; /* an item came, or the queue was closed */
    size_t capacity;
    size_t first, count; /* under lock */
    bool closed;         /* under lock */
    void *ring[];        /* under lock */
};

struct queue *queue_create(size_t capacity)
{
    if (capacity == 0 || capacity > (SIZE_MAX - sizeof(struct queue)) / sizeof(void *))
        return NULL;
    struct queue *q = calloc(1, sizeof *q + capacity * sizeof(void *));
    if (!q)
        return NULL;
    q->capacity = capacity;
    pthread_mutex_init(&q->lock, NULL);
    pthread_condattr_t monotonic; /* time-outs must not move with the date */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&q->filled, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return q;
}

void queue_destroy(struct queue *q)
{
    if (!q)
        return;
    pthread_cond_destroy(&q->filled);
    pthread_mutex_destroy(&q->lock);
    free(q);
}

int queue_push(struct queue *q, void *item)
{
    if (!item)
        return -TD_ERR_ARG; /* NULL is how queue_pop says "nothing" */
    int status = 0;
    pthread_mutex_lock(&q->lock);
    if (q->closed) {
        status = -TD_ERR_CLOSED;
    } else if (q->count == q->capacity) {
        status = -TD_ERR_FULL;
    } else {
        q->ring[(q->first + q->count) % q->capacity] = item;
        q->count++;
        pthread_cond_signal(&q->filled);
    }
    pthread_mutex_unlock(&q->lock);
    return status;
}

static struct timespec deadline_after(uint64_t timeout_us)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t wait_us = timeout_us < WAIT_MAX_US ? timeout_us : WAIT_MAX_US;
    uint64_t nanoseconds = (uint64_t)t.tv_nsec + wait_us % 1000000 * 1000;
    t.tv_sec += (time_t)(wait_us / 1000000 + nanoseconds / 1000000000);
    t.tv_nsec = (long)(nanoseconds % 1000000000);
    return t;
}

void *queue_pop(struct queue *q, uint64_t timeout_us)
{
    struct timespec deadline = {0};
    if (timeout_us > 0)
        deadline = deadline_after(timeout_us);
    void *item = NULL;
    bool waiting = timeout_us > 0;
    pthread_mutex_lock(&q->lock);
    while (q->count == 0 && !q->closed && waiting)
        waiting = pthread_cond_timedwait(&q->filled, &q->lock, &deadline) == 0;
    if (q->count > 0) {
        item = q->ring[q->first];
        q->first = (q->first + 1) % q->capacity;
        q->count--;
    }
    pthread_mutex_unlock(&q->lock);
    return item;
}

void queue_close(struct queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->closed = true;
    pthread_cond_broadcast(&q->filled);
    pthread_mutex_unlock(&q->lock);
}

size_t queue_count(struct queue *q)
{
    pthread_mutex_lock(&q->lock);
    size_t count = q->count;
    pthread_mutex_unlock(&q->lock);
    return count;
}
