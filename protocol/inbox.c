/* inbox: see inbox.h. */
#include "protocol/inbox.h"
#include <pthread.h>
#include <stdlib.h>

struct inbox {
    struct net_loop *loop;
    pthread_mutex_t lock; /* guards all below */
    struct inbox_item *first, **last;
    bool posted; /* a post is on its way, and refers to this */
    bool dead;   /* that post frees it */
};

struct inbox *inbox_create(struct net_loop *loop)
{
    struct inbox *b = calloc(1, sizeof *b);
    if (!b)
        return NULL;
    b->loop = loop;
    b->last = &b->first;
    pthread_mutex_init(&b->lock, NULL);
    return b;
}

static void inbox_free(struct inbox *b)
{
    pthread_mutex_destroy(&b->lock);
    free(b);
}

void inbox_destroy(struct inbox *b)
{
    if (!b)
        return;
    inbox_drain(b);
    pthread_mutex_lock(&b->lock);
    b->dead = b->posted;
    pthread_mutex_unlock(&b->lock);
    if (!b->dead)
        inbox_free(b);
}

static void on_post(void *arg)
{
    struct inbox *b = arg;
    pthread_mutex_lock(&b->lock);
    b->posted = false;
    pthread_mutex_unlock(&b->lock);
    if (b->dead)
        inbox_free(b);
    else
        inbox_drain(b);
}

void inbox_push(struct inbox *b, struct inbox_item *item)
{
    item->next = NULL;
    pthread_mutex_lock(&b->lock);
    *b->last = item;
    b->last = &item->next;
    bool post = !b->posted;
    b->posted = true;
    pthread_mutex_unlock(&b->lock);
    if (!post || net_loop_post(b->loop, on_post, b) == 0)
        return;
    pthread_mutex_lock(&b->lock);
    b->posted = false;
    pthread_mutex_unlock(&b->lock);
}

void inbox_drain(struct inbox *b)
{
    pthread_mutex_lock(&b->lock);
    struct inbox_item *item = b->first;
    b->first = NULL;
    b->last = &b->first;
    pthread_mutex_unlock(&b->lock);
    while (item) {
        struct inbox_item *next = item->next;
        item->run(item);
        item = next;
    }
}
