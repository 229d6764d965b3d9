/* net_rig: a network loop that runs on a thread of its own, and a handler that answers whatever it is asked. */
#ifndef TANDEM_TESTS_NET_RIG_H
#define TANDEM_TESTS_NET_RIG_H
#include "http_client.h"
#include "protocol/net_internal.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static inline struct net_loop *loop_make(void)
{
    struct td_error err = {0};
    struct net_loop *loop = net_loop_create(&err);
    if (!loop)
        fail_msg("%s", err.text);
    return loop;
}

/* Returns the port. */
static inline uint16_t loop_listen(struct net_loop *loop, const struct net_listen *listen)
{
    struct td_error err = {0};
    uint16_t port = 0;
    if (net_listen(loop, listen, &port, &err))
        fail_msg("%s", err.text);
    return port;
}

static inline void *loop_main(void *loop)
{
    net_loop_run(loop);
    return NULL;
}

static inline pthread_t loop_begin(struct net_loop *loop)
{
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, loop_main, loop), 0);
    return thread;
}

static inline void loop_end(struct net_loop *loop, pthread_t thread)
{
    net_loop_stop(loop);
    pthread_join(thread, NULL);
    net_loop_destroy(loop);
}

/* 200, with the body that came or "yes"; /held begins with "held" and never ends. */
static inline void answer(void *ctx, struct http_exchange *x, const struct http_request *r)
{
    (void)ctx;
    if (strcmp(r->path, "/held") == 0) {
        http_stream_begin(x, 200, "text/plain", NULL, 0);
        http_stream_write(x, "held", 4);
        return;
    }
    bool sent = r->body_size > 0;
    http_respond(x, 200, "text/plain", NULL, 0, sent ? r->body : "yes", sent ? r->body_size : 3);
}

static inline void ignore_client_gone(void *ctx, struct http_exchange *x)
{
    (void)ctx, (void)x;
}

static const struct http_handler answering = {answer, ignore_client_gone, NULL};

#endif
