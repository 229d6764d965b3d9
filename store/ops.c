/* ops: operations that wait for the writer, and their bounded queue. A producer never waits: a full queue is an answer. */
#include "store/store_internal.h"
#include <stdlib.h>
#include <time.h>

struct store_op *op_create(enum op_kind kind, uint32_t part_count, size_t data_size)
{
    size_t head = align_up(sizeof(struct store_op), 16),
           parts = align_up(part_count * (sizeof(struct record_part) + sizeof(uint8_t *)), 16);
    struct store_op *op = malloc(head + parts + data_size);
    if (!op)
        return NULL;
    memset(op, 0, sizeof *op);
    atomic_init(&op->references, 1);
    op->kind = kind;
    op->part_count = part_count;
    op->part_data = (const uint8_t **)((uint8_t *)op + head);
    op->parts = (struct record_part *)(op->part_data + part_count);
    op->data = (uint8_t *)op + head + parts;
    op->size = data_size;
    op->charge = kind == OP_BARRIER ? 0 : head + parts + data_size;
    return op;
}

void op_hold(struct store_op *op)
{
    atomic_fetch_add_explicit(&op->references, 1, memory_order_relaxed);
}

void op_release(struct store_op *op)
{
    while (op && atomic_fetch_sub_explicit(&op->references, 1, memory_order_acq_rel) == 1) {
        if (op->kind == OP_BARRIER && op->done) { /* whoever waits has it on his stack, until now */
            op->done(op->ctx, op->status);
            return;
        }
        struct store_op *follows = op->follows;
        if (op->type == RECORD_CONVERSATION)
            crypto_wipe(op->data, op->size);
        tier_block_release(op->held);
        free(op);
        op = follows;
    }
}

int op_queue_init(struct op_queue *q)
{
    pthread_condattr_t attributes;
    memset(q, 0, sizeof *q);
    q->last = &q->first;
    q->limit = STORE_QUEUE_SIZE;
    pthread_mutex_init(&q->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    int rc = pthread_cond_init(&q->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    return rc ? -TD_ERR_NOMEM : 0;
}

void op_queue_deinit(struct op_queue *q)
{
    for (struct store_op *op = q->first, *next; op; op = next) {
        next = op->next;
        op_release(op);
    }
    pthread_cond_destroy(&q->changed);
    pthread_mutex_destroy(&q->lock);
}

int op_queue_push(struct op_queue *q, struct store_op *op, bool urgent)
{
    int rc = 0;
    size_t kept = TD_MIN((size_t)STORE_QUEUE_KEPT, q->limit / 2);
    size_t limit = q->limit - (op->kind == OP_BLOCK ? kept : 0);
    pthread_mutex_lock(&q->lock);
    if (q->closing) {
        rc = -TD_ERR_CLOSED;
    } else if (op->charge > 0 && q->size + op->charge > limit) {
        rc = -TD_ERR_FULL;
    } else {
        if (!q->first)
            q->oldest_us = clock_mono_us();
        op->next = NULL;
        *q->last = op;
        q->last = &op->next;
        q->size += op->charge;
        q->urgent |= urgent;
        pthread_cond_signal(&q->changed);
    }
    pthread_mutex_unlock(&q->lock);
    return rc;
}

/* Wait for a change until a time of the monotonic clock; false when it has come. Caller holds the lock. */
static bool wait_until(struct op_queue *q, uint64_t deadline_us)
{
    struct timespec deadline = {(time_t)(deadline_us / 1000000), (long)(deadline_us % 1000000 * 1000)};
    return pthread_cond_timedwait(&q->changed, &q->lock, &deadline) == 0;
}

/* Cut a batch off the front. Caller holds the lock. */
static struct store_op *cut_batch(struct op_queue *q)
{
    struct store_op *batch = q->first, **link = &q->first;
    size_t size = 0;
    while (*link && (link == &q->first || size + (*link)->charge <= STORE_BATCH_SIZE)) {
        size += (*link)->charge;
        link = &(*link)->next;
    }
    q->first = *link;
    *link = NULL;
    if (!q->first) {
        q->last = &q->first;
        q->urgent = false;
    }
    q->oldest_us = clock_mono_us();
    return batch;
}

struct store_op *op_queue_take(struct op_queue *q, uint64_t timeout_us, uint64_t interval_us, bool *closing)
{
    uint64_t deadline_us = clock_mono_us() + timeout_us;
    struct store_op *batch = NULL;
    pthread_mutex_lock(&q->lock);
    while (!q->first && !q->closing && wait_until(q, deadline_us))
        ;
    while (q->first && !q->urgent && !q->closing && q->size < STORE_BATCH_SIZE &&
           wait_until(q, q->oldest_us + interval_us))
        ;
    if (q->first)
        batch = cut_batch(q);
    *closing = q->closing;
    pthread_mutex_unlock(&q->lock);
    return batch;
}

void op_queue_done(struct op_queue *q, size_t charge)
{
    pthread_mutex_lock(&q->lock);
    q->size -= charge;
    pthread_mutex_unlock(&q->lock);
}

size_t op_queue_size(struct op_queue *q)
{
    pthread_mutex_lock(&q->lock);
    size_t size = q->size;
    pthread_mutex_unlock(&q->lock);
    return size;
}

void op_queue_close(struct op_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->closing = true;
    pthread_cond_signal(&q->changed);
    pthread_mutex_unlock(&q->lock);
}
