/* mailbox: messages from other threads to the net loop's: a bounded queue, and one post to the loop for all that are waiting. */
#ifndef TANDEM_EDGE_MAILBOX_H
#define TANDEM_EDGE_MAILBOX_H
#include "protocol/net.h"

#define MAILBOX_SIZE 4096u

struct mailbox;
/* handle(ctx, item): on the loop's thread, in the order of sending. NULL without memory. */
struct mailbox *mailbox_create(struct net_loop *loop, void (*handle)(void *ctx, void *item), void *ctx);
void mailbox_destroy(struct mailbox *m);         /* no senders any more; after mailbox_drain */
int mailbox_send(struct mailbox *m, void *item); /* any thread: 0 or -TD_ERR_FULL */
/* Handle what is waiting now (loop's thread, or when the loop does not run any more). */
void mailbox_drain(struct mailbox *m);

#endif
