/* net_idle: connections on which nothing has been asked yet: new, between two requests, in the middle of a handshake or of a request, or with a peer that has
 * not said who it is. Each holds a place, and anybody can open one, so places that run short are theirs: whoever has been idle for longest makes room. A loop
 * keeps its idle ones in that order, at most idle_max of them.
 *
 * libwebsockets carries our object in the connection's user pointer from the acceptance to the end, beside the opaque pointer for what is asked. */
#include "protocol/net_internal.h"
#include <stdlib.h>
#include <sys/socket.h>

struct net_idle {
    struct lws *wsi;
    struct net_loop *loop;
    struct net_idle *previous, *next; /* the loop's, while `listed` */
    uint64_t since_us;
    bool listed;
    bool dropped; /* it goes on the loop's next turn, whatever it sends */
};

static void leave_list(struct net_idle *i)
{
    struct net_loop *l = i->loop;
    if (!i->listed)
        return;
    *(i->previous ? &i->previous->next : &l->first_idle) = i->next;
    *(i->next ? &i->next->previous : &l->last_idle) = i->previous;
    l->idle_count--;
    i->listed = false;
}

static void join_list(struct net_idle *i)
{
    struct net_loop *l = i->loop;
    i->previous = l->last_idle, i->next = NULL;
    *(i->previous ? &i->previous->next : &l->first_idle) = i;
    l->last_idle = i;
    l->idle_count++;
    i->since_us = clock_mono_us();
    i->listed = true;
}

int net_idle_create(struct lws *wsi, struct net_loop *l)
{
    struct net_idle *i = calloc(1, sizeof *i);
    if (!i)
        return -TD_ERR_NOMEM;
    i->wsi = wsi, i->loop = l;
    lws_set_wsi_user(wsi, i);
    if (l->idle_count >= l->idle_max)
        net_idle_drop(l, false);
    join_list(i);
    return 0;
}

void net_idle_free(struct net_idle *i)
{
    if (!i)
        return;
    leave_list(i);
    i->loop->dropped_count -= i->dropped;
    free(i);
}

void net_idle_begin(struct lws *wsi)
{
    struct net_idle *i = lws_wsi_user(wsi);
    if (!i || i->dropped)
        return;
    leave_list(i);
    join_list(i);
}

void net_idle_end(struct lws *wsi)
{
    struct net_idle *i = lws_wsi_user(wsi);
    if (i)
        leave_list(i);
}

/* Not net_kill: what comes in before the loop's next turn would let libwebsockets forget it. */
bool net_idle_drop(struct net_loop *l, bool spares_young)
{
    struct net_idle *i = l->first_idle;
    if (!i || (spares_young && clock_mono_us() - i->since_us < l->young_us))
        return false;
    leave_list(i);
    i->dropped = true;
    l->dropped_count++;
    shutdown((int)lws_get_socket_fd(i->wsi), SHUT_RDWR);
    return true;
}
