/* net: the loop itself: one libwebsockets context, served by one thread; posts from other threads, timers, and libwebsockets' log.
 *
 * Posts wait in a bounded queue and run between two turns of the loop. net_loop_stop only sets a flag and writes to the loop's wake-up
 * pipe, so a signal handler may call it. What libwebsockets logs as an error goes to our log, at most a few lines a minute: a peer can
 * cause such lines, and a log must not be something that peers can fill. */
#include "protocol/net_internal.h"
#include "shared/crypto.h"
#include "shared/log.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define LOG_LINES_PER_MINUTE 10u
#define POST_AGAIN_NS        2000000

struct post {
    void (*fn)(void *arg);
    void *arg;
};

/* ---- libwebsockets' log ------------------------------------------------------------------------------------ */

static _Thread_local char last_error[200];

const char *net_last_error(void)
{
    static _Thread_local char copy[sizeof last_error];
    memcpy(copy, last_error, sizeof copy);
    last_error[0] = '\0';
    return copy;
}

static void on_lws_log(int level, const char *line)
{
    static _Thread_local uint64_t minute;
    static _Thread_local unsigned count;
    (void)level;
    const char *text = strstr(line, "] E: "); /* behind a time stamp of its own */
    line = text ? text + 5 : line;
    snprintf(last_error, sizeof last_error, "%s", line);
    last_error[strcspn(last_error, "\r\n")] = '\0';
    if (strcmp(last_error, "Failed to generate handshake for client") == 0)
        return; /* as ws_connect_may_send would have it, for a reason that is told */
    uint64_t now = clock_mono_us() / 60000000;
    if (now != minute)
        minute = now, count = 0;
    if (count++ < LOG_LINES_PER_MINUTE)
        log_warn("net", "libwebsockets: %s", last_error);
}

/* ---- the loop ---------------------------------------------------------------------------------------------- */

static int base_callback(struct lws *wsi, enum lws_callback_reasons reason, void *user, void *in, size_t size)
{
    (void)wsi, (void)reason, (void)user, (void)in, (void)size;
    return 0;
}

static const struct lws_protocols base_protocols[] = {{.name = "base", .callback = base_callback},
                                                      {.name = NULL}};

static void set_up_process(void)
{
    lws_set_log_level(LLL_ERR, on_lws_log);
    crypto_init();
}

static struct lws_context *create_context(struct net_loop *l)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, set_up_process);
    struct lws_context_creation_info info = {
        .port = CONTEXT_PORT_NO_LISTEN,
        .options = LWS_SERVER_OPTION_EXPLICIT_VHOSTS | LWS_SERVER_OPTION_DO_SSL_GLOBAL_INIT,
        .max_http_header_data = LIMIT_HTTP_HEADER_SIZE,
        .max_http_header_pool = LIMIT_HTTP_EXCHANGES + NET_IDLE_MAX,
        .pt_serv_buf_size = 64u << 10,
        .timeout_secs = LIMIT_HTTP_IDLE_MS / 1000,
        .user = l,
    };
    return lws_create_context(&info);
}

struct net_loop *net_loop_create(struct td_error *err)
{
    struct net_loop *l = calloc(1, sizeof *l);
    if (!l)
        goto no_memory;
    l->idle_us = LIMIT_HTTP_IDLE_MS * 1000ull;
    l->connect_timeout_us = NET_CONNECT_TIMEOUT_US;
    l->idle_max = NET_IDLE_MAX;
    l->young_us = LIMIT_GREETING_MS * 1000ull;
    l->scratch = malloc(LWS_PRE + LIMIT_FRAME_SIZE);
    l->posts = queue_create(NET_POSTS_MAX);
    if (!l->scratch || !l->posts)
        goto no_memory;
    l->context = create_context(l);
    if (!l->context) {
        td_fail(err, -TD_ERR_INTERNAL, "cannot start the network loop: %s", net_last_error());
        goto fail;
    }
    struct lws_context_creation_info info = {
        .port = CONTEXT_PORT_NO_LISTEN, .vhost_name = "base", .protocols = base_protocols, .user = l};
    l->base_vhost = lws_create_vhost(l->context, &info);
    if (!l->base_vhost)
        goto no_memory;
    return l;
no_memory:
    td_fail(err, -TD_ERR_NOMEM, "cannot start the network loop: not enough memory");
fail:
    net_loop_destroy(l);
    return NULL;
}

/* What was posted before this turn; what these post waits for the next, so that the loop's sockets get their turn. */
static void run_posts(struct net_loop *l)
{
    for (size_t left = queue_count(l->posts); left > 0; left--) {
        struct post *p = queue_pop(l->posts, 0);
        if (!p)
            return;
        p->fn(p->arg);
        free(p);
    }
}

int net_loop_run(struct net_loop *l)
{
    while (!atomic_load(&l->stop)) {
        if (lws_service(l->context, 0) < 0)
            return -TD_ERR_IO;
        run_posts(l);
        if (queue_count(l->posts) > 0)
            lws_cancel_service(l->context);
    }
    return 0;
}

void net_loop_stop(struct net_loop *l)
{
    atomic_store(&l->stop, true);
    lws_cancel_service(l->context);
}

int net_loop_post(struct net_loop *l, void (*fn)(void *arg), void *arg)
{
    struct post *p = malloc(sizeof *p);
    if (!p)
        return -TD_ERR_NOMEM;
    *p = (struct post){fn, arg};
    int code = queue_push(l->posts, p);
    if (code)
        free(p);
    else
        lws_cancel_service(l->context);
    return code;
}

int net_loop_post_wait(struct net_loop *l, void (*fn)(void *arg), void *arg)
{
    int code;
    while ((code = net_loop_post(l, fn, arg)) < 0 && code != -TD_ERR_CLOSED)
        nanosleep(&(struct timespec){.tv_nsec = POST_AGAIN_NS}, NULL);
    return code;
}

static void free_listeners(struct net_loop *l)
{
    while (l->listeners) {
        struct listener *next = l->listeners->next;
        for (char **o = l->listeners->origins; o && *o; o++)
            free(*o);
        free(l->listeners->origins);
        free(l->listeners->unix_path);
        free(l->listeners->cert_path);
        free(l->listeners->key_path);
        free(l->listeners->client_ca_path);
        free(l->listeners);
        l->listeners = next;
    }
    while (l->client_vhosts) {
        struct client_vhost *next = l->client_vhosts->next;
        free(l->client_vhosts->ca_path);
        free(l->client_vhosts->cert_path);
        free(l->client_vhosts->key_path);
        free(l->client_vhosts);
        l->client_vhosts = next;
    }
}

/* Numbered, because the order matters:
 * 1. no more posts are taken, and those that were accepted run, because they may own memory;
 * 2. timers are cut loose: none fires any more, and starting, stopping or destroying one later is harmless;
 * 3. connections close, and their owners hear of it, while the listeners that they belong to are still there. */
void net_loop_destroy(struct net_loop *l)
{
    if (!l)
        return;
    if (l->posts) {
        queue_close(l->posts);
        run_posts(l);
    }
    l->closing = true;
    ws_destroy_connecting(l);
    if (l->context) {
        while (l->timers)
            net_timer_deinit(l->timers);
        lws_context_destroy(l->context);
    }
    if (l->posts)
        queue_destroy(l->posts);
    free_listeners(l);
    free(l->scratch);
    free(l);
}

/* ---- timers ------------------------------------------------------------------------------------------------ */

static void on_sul(lws_sorted_usec_list_t *sul)
{
    struct net_timer *t = lws_container_of(sul, struct net_timer, sul);
    t->fn(t->ctx);
}

void net_timer_init(struct net_timer *t, struct net_loop *l, void (*fn)(void *ctx), void *ctx)
{
    *t = (struct net_timer){.loop = l, .fn = fn, .ctx = ctx, .next = l->timers};
    if (l->timers)
        l->timers->previous = t;
    l->timers = t;
}

void net_timer_deinit(struct net_timer *t)
{
    if (!t->loop)
        return;
    lws_sul_cancel(&t->sul);
    if (t->previous)
        t->previous->next = t->next;
    else
        t->loop->timers = t->next;
    if (t->next)
        t->next->previous = t->previous;
    t->loop = NULL;
}

struct net_timer *net_timer_create(struct net_loop *l, void (*fn)(void *ctx), void *ctx)
{
    struct net_timer *t = malloc(sizeof *t);
    if (t)
        net_timer_init(t, l, fn, ctx);
    return t;
}

void net_timer_start(struct net_timer *t, uint64_t delay_us)
{
    uint64_t longest = (uint64_t)INT64_MAX / 4;
    if (t->loop)
        lws_sul_schedule(t->loop->context, 0, &t->sul, on_sul,
                         (lws_usec_t)TD_MAX(1u, TD_MIN(delay_us, longest)));
}

void net_timer_stop(struct net_timer *t)
{
    if (t->loop)
        lws_sul_cancel(&t->sul);
}

void net_timer_destroy(struct net_timer *t)
{
    if (!t)
        return;
    net_timer_deinit(t);
    free(t);
}

/* ---- small shared parts ------------------------------------------------------------------------------------- */

void net_kill(struct lws *wsi)
{
    lws_set_timeout(wsi, PENDING_TIMEOUT_USER_OK, LWS_TO_KILL_ASYNC);
}

struct listener *net_listener_of(struct lws *wsi)
{
    struct lws_vhost *v = lws_get_vhost(wsi);
    return v ? lws_get_vhost_user(v) : NULL;
}

bool net_client_verified(const struct listener *l, struct lws *wsi)
{
    if (!l->client_ca_path)
        return true;
    union lws_tls_cert_info_results result = {0};
    return lws_tls_peer_cert_info(wsi, LWS_TLS_CERT_INFO_VERIFIED, &result, sizeof result) == 0 &&
           result.verified;
}

void net_peer_text(const struct listener *l, struct lws *wsi, char *out, size_t size)
{
    snprintf(out, size, "unix");
    if (!l->unix_path)
        lws_get_peer_simple(wsi, out, size);
}
