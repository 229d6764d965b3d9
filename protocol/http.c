/* http: the life of a request: its head judged, its body put together within limits, the handler called, a lost client reported.
 *
 * What libwebsockets 4.3 does not do is done here: it takes a POST without a length for one of 100 MB, hands bytes behind a body to the
 * body's owner, and counts below zero then. So bodies are counted here; a POST without a length is taken for what HTTP says it is, one without a
 * body, and closes its connection, on which libwebsockets waits for those 100 MB; and bytes that follow a body before its response has ended
 * close the connection after that response. (Requests without a body may be pipelined: they are answered on the spot.) A request with
 * Transfer-Encoding is refused: 411.
 *
 * Who may send is only known when the body is here, so slow bodies must not keep others out: where a listener has no room for another request,
 * or its bytes, the oldest one is dropped that is refused and whose body still arrives, else the one whose body has been arriving for longest. */
#include "protocol/http_internal.h"
#include "shared/crypto.h"
#include "shared/log.h"
#include "protocol/api_internal.h"
#include <stdlib.h>
#include <strings.h>
#include <sys/resource.h>

/* a body must grow by so much within LIMIT_HTTP_IDLE_MS, or be complete */
#define BODY_PROGRESS_SIZE (16u << 10)

/* ---- life -------------------------------------------------------------------------------------------------- */

static void drop_body(struct http_exchange *x)
{
    x->listener->body_size -= x->body_capacity;
    free(x->body);
    x->body = NULL;
    x->body_capacity = 0;
}

static void release(struct http_exchange *x)
{
    drop_body(x);
    http_head_free(&x->head);
    free(x->cors_origin);
    free(x->out);
    free(x);
}

static void join_list(struct http_exchange *x)
{
    struct listener *l = x->listener;
    l->exchange_count++;
    x->previous = l->last_exchange;
    *(x->previous ? &x->previous->next : &l->first_exchange) = x;
    l->last_exchange = x;
}

static void leave_list(struct http_exchange *x)
{
    struct listener *l = x->listener;
    l->exchange_count--;
    *(x->previous ? &x->previous->next : &l->first_exchange) = x->next;
    *(x->next ? &x->next->previous : &l->last_exchange) = x->previous;
}

static struct http_exchange *oldest(const struct http_exchange *but_this, enum exchange_state state,
                                    bool with_bytes)
{
    struct http_exchange *x = but_this->listener->first_exchange;
    while (x && (x == but_this || x->state != state || x->dispatching || (with_bytes && !x->body_capacity)))
        x = x->next;
    return x;
}

/* False: there is nobody to drop. Who is answered and sends all the same goes before who may yet be right. */
static bool make_room(const struct http_exchange *for_this, bool of_bytes)
{
    struct http_exchange *x = oldest(for_this, X_DRAIN, of_bytes);
    if (!x)
        x = oldest(for_this, X_BODY, of_bytes);
    if (x)
        http_abort(x);
    return x != NULL;
}

void exchange_free(struct http_exchange *x)
{
    if (x->wsi) {
        lws_set_opaque_user_data(x->wsi, NULL);
        net_idle_begin(x->wsi);
    }
    net_timer_deinit(&x->timer);
    leave_list(x);
    x->dead = true;
    if (!x->dispatching)
        release(x);
}

static void on_timer(void *ctx)
{
    struct http_exchange *x = ctx;
    switch (x->state) {
    case X_BODY:
        exchange_refuse(x, 408, "request_timeout", "The request's body did not arrive in time.");
        break;
    case X_CALL:
    case X_STREAM: /* bytes behind the body made libwebsockets wait for more of it: see take_body */
        lws_set_timeout(x->wsi, NO_PENDING_TIMEOUT, 0);
        break;
    default:
        http_abort(x);
    }
}

static struct http_exchange *exchange_create(struct lws *wsi, struct listener *l)
{
    struct http_exchange *x = calloc(1, sizeof *x);
    if (!x)
        return NULL;
    x->wsi = wsi, x->listener = l;
    net_timer_init(&x->timer, l->loop, on_timer, x);
    join_list(x);
    lws_set_opaque_user_data(wsi, x);
    if (http_head_read(wsi, &x->head)) {
        exchange_free(x);
        return NULL;
    }
    const struct http_head *h = &x->head;
    x->chunked = strcmp(h->version, "HTTP/1.1") == 0;
    x->close_after = x->chunked ? http_token_in_list(h->connection, "close")
                                : strcasecmp(h->connection, "keep-alive") != 0;
    x->head_only = strcmp(h->method, "HEAD") == 0;
    return x;
}

/* The connection is gone. */
static void exchange_lost(struct http_exchange *x)
{
    const struct http_handler *handler = x->listener->http;
    bool owned = x->state == X_CALL || x->state == X_STREAM;
    lws_set_opaque_user_data(x->wsi, NULL);
    x->wsi = NULL;
    if (owned && handler->on_client_gone)
        handler->on_client_gone(handler->ctx, x);
    exchange_free(x);
}

/* ---- the handler ------------------------------------------------------------------------------------------- */

/* Returns false if the exchange was freed during the call. */
static bool dispatch(struct http_exchange *x)
{
    const struct http_handler *handler = x->listener->http;
    const struct http_head *h = &x->head;
    char peer[64];
    net_peer_text(x->listener, x->wsi, peer, sizeof peer);
    lws_set_timeout(x->wsi, NO_PENDING_TIMEOUT, 0);
    net_timer_stop(&x->timer);
    net_idle_end(x->wsi);
    x->state = X_CALL;
    struct http_request r = {.method = x->head_only ? "GET" : h->method,
                             .path = h->path,
                             .query = h->query,
                             .authorization = h->authorization,
                             .content_type = h->content_type,
                             .idempotency_key = h->idempotency_key,
                             .conversation_id = h->conversation_id,
                             .origin = h->origin,
                             .peer = peer,
                             .body = x->body ? (const char *)x->body : "",
                             .body_size = x->body_size};
    x->dispatching = true;
    handler->on_request(handler->ctx, x, &r);
    x->dispatching = false;
    if (x->dead) {
        release(x);
        return false;
    }
    drop_body(x);
    http_head_free(&x->head);
    return true;
}

/* ---- judging the head -------------------------------------------------------------------------------------- */

/* False: refused, and answered. */
static bool admit_body(struct http_exchange *x)
{
    const struct http_head *h = &x->head;
    bool posts = strcmp(h->method, "POST") == 0;
    bool sends = posts || strcmp(h->method, "PUT") == 0 || strcmp(h->method, "PATCH") == 0;
    x->has_body = sends && !h->content_length[0]; /* as libwebsockets sees it */
    if (h->transfer_encoding
            [0]) /* whatever the method: where the body ends is unknown, so nothing after it can be a request */
        return x->close_after = true,
               exchange_refuse(x, 411, "length_required",
                               "Send the body with a Content-Length, not chunked."),
               false;
    if (http_content_length(h->content_length, &x->body_expected))
        return x->close_after = true,
               exchange_refuse(x, 400, "invalid_header", "Content-Length is not a number."), false;
    x->close_after = x->close_after || (sends && !h->content_length[0]);
    x->has_body = x->body_expected > 0 || posts;
    if (x->body_expected > LIMIT_HTTP_BODY_SIZE)
        return exchange_refuse(x, 413, "body_too_large", "The request's body is larger than 8 MiB."), false;
    return true;
}

static bool admit_origin(struct http_exchange *x)
{
    const struct http_head *h = &x->head;
    if (http_host_refused(x->listener, h->host))
        return exchange_refuse(x, 403, "host_not_allowed",
                               "The Host header must be localhost, 127.0.0.1 or [::1]."),
               false;
    if (!h->origin[0])
        return true;
    if (!http_origin_allowed(x->listener, h->origin))
        return exchange_refuse(x, 403, "origin_not_allowed",
                               "Requests from this web page's origin are not allowed."),
               false;
    x->cors_origin = strdup(h->origin);
    if (strcmp(h->method, "OPTIONS") == 0)
        return exchange_preflight(x), false;
    return true;
}

static bool admit(struct http_exchange *x)
{
    struct listener *l = x->listener;
    if (!net_client_verified(l, x->wsi))
        return x->close_after = true,
               exchange_refuse(x, 403, "certificate_required", "A valid client certificate is required."),
               false;
    if (!admit_body(x) || !admit_origin(x))
        return false;
    if (l->exchange_count > LIMIT_HTTP_EXCHANGES && !make_room(x, false))
        return exchange_refuse(x, 503, "overloaded", "Too many open requests; try again."), false;
    if (!l->http)
        return exchange_refuse(x, 404, "not_found", "There is nothing here."), false;
    return true;
}

static int on_head(struct lws *wsi)
{
    static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";
    struct listener *l = net_listener_of(wsi);
    struct http_exchange *x = l && !lws_get_opaque_user_data(wsi) ? exchange_create(wsi, l) : NULL;
    if (!x)
        return -1;
    bool alive = true;
    x->dispatching = true; /* a refusal that finds no memory frees it, but not yet */
    bool admitted = admit(x);
    x->dispatching = false;
    if (x->dead) {
        release(x);
        return -1;
    }
    if (admitted) {
        if (x->has_body && x->head.content_length[0]) {
            net_timer_start(&x->timer, x->listener->loop->idle_us);
            if (strcasecmp(x->head.expect, "100-continue") == 0 && x->chunked) {
                memcpy(net_scratch(l->loop), go_on, sizeof go_on - 1);
                return lws_write(wsi, net_scratch(l->loop), sizeof go_on - 1, LWS_WRITE_HTTP) < 0 ? -1 : 0;
            }
            return 0;
        }
        alive = dispatch(x);
    }
    /* What is answered already goes out now: so pipelined requests without bodies work. */
    if (alive && x->state == X_ENDING && !x->has_body)
        return exchange_flush(x, LIMIT_FRAME_SIZE);
    return 0;
}

/* ---- the body ---------------------------------------------------------------------------------------------- */

static int body_append(struct http_exchange *x, const uint8_t *data, size_t size)
{
    if (x->body_size + size > x->body_capacity) {
        size_t capacity = TD_MIN(TD_MAX(2 * x->body_capacity, x->body_size + size), (size_t)x->body_expected);
        bool fits;
        do
            fits = x->listener->body_size + capacity - x->body_capacity <= LIMIT_HTTP_BUFFERED_SIZE;
        while (!fits && make_room(x, true));
        uint8_t *grown = fits ? realloc(x->body, capacity) : NULL;
        if (!grown)
            return -TD_ERR_NOMEM;
        x->listener->body_size += capacity - x->body_capacity;
        x->body = grown, x->body_capacity = capacity;
    }
    memcpy(x->body + x->body_size, data, size);
    return 0;
}

static int take_body(struct http_exchange *x, const uint8_t *data, size_t size)
{
    uint64_t wanted = x->body_expected - x->body_size;
    size_t taken = (size_t)TD_MIN(wanted, size);
    bool surplus = size > taken;
    x->close_after = x->close_after || surplus;
    if (x->state == X_BODY) {
        if (taken && body_append(x, data, taken)) {
            exchange_refuse(x, 503, "overloaded", "Too many large requests at once; try again.");
            return 0;
        }
        x->body_progress += taken;
        if (x->body_progress >= BODY_PROGRESS_SIZE) {
            x->body_progress = 0;
            net_idle_begin(x->wsi);
            net_timer_start(&x->timer, x->listener->loop->idle_us);
        }
    }
    x->body_size += taken;
    if (!surplus)
        return 0;
    x->body_complete = true; /* libwebsockets has lost count and will not say so */
    if (x->state == X_BODY && !dispatch(x))
        return 0;
    if (x->state == X_CALL || x->state == X_STREAM)
        net_timer_start(&x->timer, 1);
    return 0;
}

/* libwebsockets keeps its receive buffer for ever; a prompt must not stay in it. */
static int receive_body(struct http_exchange *x, uint8_t *data, size_t size)
{
    int rc = take_body(x, data, size);
    if (size)
        crypto_wipe(data, size);
    return rc;
}

static int complete_body(struct http_exchange *x)
{
    if (x->body_complete)
        return 0;
    x->body_complete = true;
    if (x->state == X_DRAIN) {
        exchange_free(x);
        return -1;
    }
    if (x->state == X_BODY)
        dispatch(x);
    return 0;
}

/* ---- libwebsockets ----------------------------------------------------------------------------------------- */

static void drop_idle(struct net_loop *l, rlim_t count, bool spares_young)
{
    while (l->dropped_count < count && net_idle_drop(l, spares_young))
        continue;
}

/* The lowest free descriptor is given out first: one this high means that all others are taken. Who makes room goes a moment later: therefore it does so
 * while there are some left; and all that are too many go, as low ones that became free have let others in unnoticed. */
static bool takes_kept_file(struct lws *wsi, int fd)
{
    static _Atomic uint64_t logged_us;
    const struct listener *l = net_listener_of(wsi);
    struct rlimit limit;
    if (!l || l->takes_all_files || getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return false;
    rlim_t most = limit.rlim_cur - TD_MIN((rlim_t)NET_FILES_KEPT, limit.rlim_cur / 4);
    rlim_t spare = TD_MIN((rlim_t)NET_FILES_SHORT, limit.rlim_cur / 16), good = most - spare;
    if ((rlim_t)fd < good)
        return false;
    drop_idle(l->loop, (rlim_t)fd - good + 1, true);
    if ((rlim_t)fd >= most - spare / 2)
        drop_idle(l->loop, (rlim_t)fd - (most - spare / 2) + 1, false);
    if ((rlim_t)fd < most)
        return false;
    uint64_t now_us = clock_mono_us();
    if (now_us - atomic_load(&logged_us) >= 60000000) {
        atomic_store(&logged_us, now_us);
        log_warn("net",
                 "connections are refused: nearly all %llu descriptors are in use; allow more (ulimit -n)",
                 (unsigned long long)limit.rlim_cur);
    }
    return true;
}

static int on_accept(struct lws *wsi)
{
    const struct listener *l = net_listener_of(wsi);
    return l ? net_idle_create(wsi, l->loop) : -1;
}

int http_callback(struct lws *wsi, enum lws_callback_reasons reason, void *user, void *in, size_t size)
{
    struct http_exchange *x;
    switch (reason) {
    case LWS_CALLBACK_FILTER_NETWORK_CONNECTION:
        return takes_kept_file(wsi, (int)(intptr_t)in);
    case LWS_CALLBACK_SERVER_NEW_CLIENT_INSTANTIATED:
        return on_accept(wsi);
    case LWS_CALLBACK_HTTP:
        return on_head(wsi);
    case LWS_CALLBACK_HTTP_BODY:
        x = lws_get_opaque_user_data(wsi);
        return x ? receive_body(x, in, size) : 0;
    case LWS_CALLBACK_HTTP_BODY_COMPLETION:
        x = lws_get_opaque_user_data(wsi);
        return x ? complete_body(x) : 0;
    case LWS_CALLBACK_HTTP_WRITEABLE:
        x = lws_get_opaque_user_data(wsi);
        return x ? exchange_flush(x, NET_WRITE_SIZE) : 0;
    case LWS_CALLBACK_CLOSED_HTTP:
    case LWS_CALLBACK_WSI_DESTROY:
        x = lws_get_opaque_user_data(wsi);
        if (x)
            exchange_lost(x);
        if (reason == LWS_CALLBACK_WSI_DESTROY)
            net_idle_free(user);
        return 0;
    case LWS_CALLBACK_FILTER_PROTOCOL_CONNECTION: /* WebSocket without our sub-protocol, or where none is served */
        return ws_filter_upgrade(wsi);
    case LWS_CALLBACK_RAW_ADOPT: /* CONNECT turns a connection into a raw one */
    case LWS_CALLBACK_RAW_RX:
        return -1;
    default:
        return 0;
    }
}
