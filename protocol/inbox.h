/* inbox: how other threads hand things to the network loop: a list under a lock, and one post to the loop for as many items as have come
 * together. A push never fails and never waits, so nothing gets lost because the loop is busy; whoever pushes bounds what may be waiting.
 * If the loop's own post queue is full, the next push or inbox_drain tries again. Items are run in the order of their pushes. */
#ifndef TANDEM_PROTOCOL_INBOX_H
#define TANDEM_PROTOCOL_INBOX_H
#include "protocol/net.h"

struct inbox;
struct inbox_item { /* the first member of what is handed over */
    struct inbox_item *next;
    void (*run)(struct inbox_item *item); /* on the loop's thread; frees the item if it was allocated */
};

struct inbox *inbox_create(struct net_loop *loop); /* NULL without memory */
/* Loop's thread, when nobody pushes any more: runs what is left. Before the loop's end or after it: a post on its way does no harm. */
void inbox_destroy(struct inbox *b);
void inbox_push(struct inbox *b, struct inbox_item *item);
void inbox_drain(struct inbox *b); /* loop's thread */

#endif
