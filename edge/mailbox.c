/* mailbox: see mailbox.h. `posted` is set while a post is on its way, and cleared before the queue is emptied: whoever sends after that posts
 * again, so nothing is left lying. If the loop's own queue is full the flag stays clear, and the next send or drain takes what waits. */
#include "edge/mailbox.h"
#include "shared/queue.h"
#include <stdatomic.h>
#include <stdlib.h>

struct mailbox {
    struct net_loop *loop;
    struct queue *queue;
    atomic_bool posted;
    void (*handle)(void *ctx, void *item);
    void *ctx;
};

struct mailbox *mailbox_create(struct net_loop *loop, void (*handle)(void *ctx, void *item), void *ctx)
{
    struct mailbox *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->loop = loop;
    m->handle = handle;
    m->ctx = ctx;
    m->queue = queue_create(MAILBOX_SIZE);
    if (!m->queue) {
        free(m);
        return NULL;
    }
    return m;
}

void mailbox_destroy(struct mailbox *m)
{
    if (!m)
        return;
    queue_destroy(m->queue);
    free(m);
}

void mailbox_drain(struct mailbox *m)
{
    atomic_store(&m->posted, false);
    for (size_t left = queue_count(m->queue); left > 0; left--) {
        void *item = queue_pop(m->queue, 0);
        if (!item)
            return;
        m->handle(m->ctx, item);
    }
}

static void on_post(void *arg)
{
    mailbox_drain(arg);
}

int mailbox_send(struct mailbox *m, void *item)
{
    int rc = queue_push(m->queue, item);
    if (rc == 0 && !atomic_exchange(&m->posted, true) && net_loop_post(m->loop, on_post, m) < 0)
        atomic_store(&m->posted, false);
    return rc;
}
