/* queue: a bounded FIFO of pointers between threads (many producers, many consumers).
 * A producer never blocks: a full queue is an answer. */
#ifndef TANDEM_SHARED_QUEUE_H
#define TANDEM_SHARED_QUEUE_H
#include <stddef.h>
#include <stdint.h>

struct queue;

struct queue *queue_create(size_t capacity); /* NULL without memory */
void queue_destroy(struct queue *q);         /* must be empty or its items owned elsewhere */
int queue_push(struct queue *q, void *item); /* 0, -TD_ERR_FULL, -TD_ERR_CLOSED */
/* queue_pop: wait up to timeout_us (0: do not wait). NULL on time-out, or when closed and empty. */
void *queue_pop(struct queue *q, uint64_t timeout_us);
void queue_close(struct queue *q); /* pushes fail from now on; pops drain what is left */
size_t queue_count(struct queue *q);

#endif
