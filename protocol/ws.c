/* ws: WebSocket connections, server and client alike: whole binary messages in, one frame for each time that the socket takes one out.
 *
 * Messages arrive in pieces of up to 64 KiB and are put together here, at most LIMIT_FRAME_SIZE; a message that comes in one piece is passed on
 * as it lies. A frame is produced straight into the loop's scratch, where a client's is masked in place.
 * TCP_NOTSENT_LOWAT makes "the socket takes one" mean that little is waiting in the kernel, so what is urgent overtakes bulk there too. */
#include "protocol/ws_internal.h"
#include "protocol/tcp.h"
#include "shared/crypto.h"
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

#define MASKED_HEAD_MAX 14
_Static_assert(LWS_PRE >= MASKED_HEAD_MAX, "a client's frame needs room for its head");

void ws_conn_free(struct ws_conn *c)
{
    if (c->wsi)
        lws_set_opaque_user_data(c->wsi, NULL);
    net_timer_deinit(&c->timer);
    net_timer_deinit(&c->deadline);
    free(c->message);
    free(c->host);
    free(c->path);
    free(c);
}

void ws_because(struct ws_conn *c, const char *why)
{
    if (c->why[0])
        return;
    snprintf(c->why, sizeof c->why, "%s", why ? why : "");
    for (unsigned char *p = (unsigned char *)c->why; *p; p++)
        if (*p < 0x20 || *p == 0x7f)
            *p = ' ';
}

/* Socket options of a connection that carries frames. */
static void tune_socket(struct lws *wsi)
{
    int fd = (int)lws_get_socket_fd(wsi), on = 1, lowat = NET_NOTSENT_LOWAT;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on,
               sizeof on); /* not TCP (a Unix socket): refused, and not needed */
    setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lowat, sizeof lowat);
}

void ws_renew(struct ws_conn *c)
{
    if (c->wsi)
        tcp_renew((int)lws_get_socket_fd(c->wsi));
}

void ws_want_write(struct ws_conn *c)
{
    if (c->wsi && c->open && !c->closing)
        lws_callback_on_writable(c->wsi);
}

void ws_keep(struct ws_conn *c)
{
    if (c->wsi)
        net_idle_end(c->wsi);
}

/* A peer that does not read would never give us the chance to close politely, so the connection is cut if that takes long. */
void ws_close(struct ws_conn *c, const char *why)
{
    ws_because(c, why);
    if (c->closing)
        return;
    c->closing = true;
    if (!c->open) {
        net_timer_start(&c->timer, 1); /* on_failed comes from the loop, not from in here */
        return;
    }
    lws_callback_on_writable(c->wsi);
    lws_set_timeout(c->wsi, PENDING_TIMEOUT_USER_OK, 2);
}

void ws_abort(struct ws_conn *c, const char *why)
{
    if (!c->open) {
        ws_close(c, why);
        return;
    }
    struct linger none = {.l_onoff = 1, .l_linger = 0};
    setsockopt((int)lws_get_socket_fd(c->wsi), SOL_SOCKET, SO_LINGER, &none, sizeof none);
    ws_because(c, why);
    c->closing = true;
    lws_set_timeout(c->wsi, PENDING_TIMEOUT_USER_OK, LWS_TO_KILL_ASYNC);
}

/* ---- the server's handshake ---------------------------------------------------------------------------------- */

/* Answer in HTTP before libwebsockets drops the connection: the other side then knows why. */
static int refuse_upgrade(struct lws *wsi, const char *status)
{
    struct listener *l = net_listener_of(wsi);
    char *out = (char *)net_scratch(l->loop);
    int n = snprintf(out, LIMIT_FRAME_SIZE, "HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
                     status);
    lws_write(wsi, (unsigned char *)out, (size_t)n, LWS_WRITE_HTTP_HEADERS);
    return 1;
}

static int judge_upgrade(const struct listener *l, const struct http_head *h)
{
    if (!l->ws || strcmp(h->path, NET_WS_PATH) != 0)
        return 404;
    if (http_host_refused(l, h->host))
        return 403;
    if (h->origin[0] && !http_origin_allowed(l, h->origin))
        return 403;
    return 0;
}

int ws_filter_upgrade(struct lws *wsi)
{
    struct listener *l = net_listener_of(wsi);
    struct http_head h;
    const struct lws_protocols *protocol = lws_get_protocol(wsi);
    if (!l)
        return 1;
    int status = http_head_read(wsi, &h) ? 503 : judge_upgrade(l, &h);
    http_head_free(&h);
    if (!status && !net_client_verified(l, wsi))
        status = 403;
    if (!status && (!protocol || strcmp(protocol->name, NET_SUBPROTOCOL) != 0))
        status = 400;
    switch (status) {
    case 0:
        return 0;
    case 400:
        return refuse_upgrade(wsi, "400 Bad Request");
    case 403:
        return refuse_upgrade(wsi, "403 Forbidden");
    case 404:
        return refuse_upgrade(wsi, "404 Not Found");
    default:
        return refuse_upgrade(wsi, "503 Service Unavailable");
    }
}

static int on_server_open(struct lws *wsi)
{
    struct listener *l = net_listener_of(wsi);
    struct ws_conn *c = l && l->ws ? calloc(1, sizeof *c) : NULL;
    if (!c)
        return -1;
    c->loop = l->loop, c->wsi = wsi, c->handler = l->ws;
    c->open = true;
    lws_set_opaque_user_data(wsi, c);
    tune_socket(wsi);
    char peer[64];
    net_peer_text(l, wsi, peer, sizeof peer);
    if (l->ws->on_open(l->ws->ctx, c, peer, &c->user)) {
        ws_conn_free(c);
        return -1;
    }
    return 0;
}

static int on_client_open(struct ws_conn *c)
{
    ws_connect_done(c);
    c->open = true;
    c->why[0] = '\0'; /* why another of its addresses did not do */
    tune_socket(c->wsi);
    char peer[320];
    snprintf(peer, sizeof peer, "%.255s:%u", c->host, c->port);
    if (c->handler->on_open && c->handler->on_open(c->handler->ctx, c, peer, &c->user)) {
        ws_conn_free(c);
        return -1;
    }
    return 0;
}

/* ---- messages ----------------------------------------------------------------------------------------------- */

static int message_append(struct ws_conn *c, const void *data, size_t size)
{
    if (c->message_size + size > LIMIT_FRAME_SIZE)
        return -TD_ERR_LIMIT;
    if (c->message_size + size > c->message_capacity) {
        size_t capacity =
            TD_MIN(TD_MAX(2 * c->message_capacity, c->message_size + size), (size_t)LIMIT_FRAME_SIZE);
        uint8_t *grown = realloc(c->message, capacity);
        if (!grown)
            return -TD_ERR_NOMEM;
        c->message = grown, c->message_capacity = capacity;
    }
    if (size)
        memcpy(c->message + c->message_size, data, size);
    c->message_size += size;
    return 0;
}

static int refuse_message(struct ws_conn *c, enum lws_close_status status, const char *why)
{
    ws_because(c, why);
    c->closing = true;
    lws_close_reason(c->wsi, status, NULL, 0);
    return -1;
}

static int on_piece(struct ws_conn *c, const void *data, size_t size)
{
    bool first = lws_is_first_fragment(c->wsi) && c->message_size == 0,
         last = lws_is_final_fragment(c->wsi) != 0;
    if (c->closing)
        return 0;
    if (!lws_frame_is_binary(c->wsi))
        return refuse_message(c, LWS_CLOSE_STATUS_UNACCEPTABLE_OPCODE,
                              "the peer sent text instead of binary messages");
    if (first && last && size <= LIMIT_FRAME_SIZE) {
        c->handler->on_message(c->user, size ? data : "", size);
        return 0;
    }
    if (message_append(c, data, size))
        return refuse_message(c, LWS_CLOSE_STATUS_MESSAGE_TOO_LARGE,
                              "the peer sent a message that is too large");
    if (!last && c->handler->on_part)
        c->handler->on_part(c->user);
    if (!last)
        return 0;
    size_t whole = c->message_size;
    c->message_size = 0;
    c->handler->on_message(c->user, whole ? c->message : (const void *)"", whole);
    if (whole)
        crypto_wipe(c->message, whole);
    return 0;
}

/* libwebsockets keeps its receive buffer for ever; what a peer said must not stay in it. */
static int on_receive(struct ws_conn *c, void *in, size_t size)
{
    int rc = on_piece(c, in, size);
    if (size)
        crypto_wipe(in, size);
    return rc;
}

/* Say good-bye properly; what a libwebsockets callback returns to close. */
static int close_now(struct ws_conn *c)
{
    c->closing = true;
    lws_close_reason(c->wsi, LWS_CLOSE_STATUS_NORMAL, NULL, 0);
    return -1;
}

/* A client's frame, with its head (RFC 6455, 5.2). libwebsockets masks byte by byte: 30 ms of a device's core more for the 14 MB of a prompt. */
static int write_masked(struct ws_conn *c, uint8_t *data, size_t size)
{
    uint8_t key[sizeof(uint64_t)], head[MASKED_HEAD_MAX] = {0x82, 0x80};
    size_t extra = size < 126 ? 0 : size < 65536 ? 2 : 8, head_size = 2 + extra + 4;
    if (crypto_random(key, 4))
        return -1;
    memcpy(key + 4, key, 4);
    head[1] |= (uint8_t)(extra == 0 ? size : extra == 2 ? 126 : 127);
    for (size_t i = 0; i < extra; i++)
        head[2 + i] = (uint8_t)((uint64_t)size >> 8 * (extra - 1 - i));
    memcpy(head + 2 + extra, key, 4);
    uint64_t mask, word;
    memcpy(&mask, key, sizeof mask);
    size_t at = 0;
    for (; at + sizeof word <= size; at += sizeof word) {
        memcpy(&word, data + at, sizeof word);
        word ^= mask;
        memcpy(data + at, &word, sizeof word);
    }
    for (; at < size; at++)
        data[at] ^= key[at % 4];
    memcpy(data - head_size, head, head_size);
    return lws_write(c->wsi, data - head_size, head_size + size, LWS_WRITE_HTTP); /* as it is */
}

static int on_writeable(struct ws_conn *c)
{
    if (c->closing)
        return close_now(c);
    uint8_t *out = net_scratch(c->loop);
    int64_t size = c->handler->next(c->user, out, LIMIT_FRAME_SIZE);
    if (size < 0)
        ws_because(c, "closed");
    if (size < 0 || c->closing)
        return close_now(c);
    if (size == 0)
        return 0;
    bool client = c->host != NULL;
    int rc =
        client ? write_masked(c, out, (size_t)size) : lws_write(c->wsi, out, (size_t)size, LWS_WRITE_BINARY);
    if (rc < 0)
        return -1;
    lws_callback_on_writable(c->wsi);
    return 0;
}

static void on_closed(struct ws_conn *c)
{
    ws_because(c, "the connection was lost");
    lws_set_opaque_user_data(c->wsi, NULL);
    c->wsi = NULL;
    if (c->open && c->handler->on_closed)
        c->handler->on_closed(c->user, c->why);
    ws_conn_free(c);
}

/* `in`: two bytes of status, then a reason that the peer chose: the status is enough. */
static void on_peer_closes(struct ws_conn *c, const uint8_t *in, size_t size)
{
    char text[64];
    snprintf(text, sizeof text, "closed by the peer");
    if (size >= 2)
        snprintf(text, sizeof text, "closed by the peer (status %u)", (unsigned)in[0] << 8 | in[1]);
    ws_because(c, text);
}

/* ---- libwebsockets ------------------------------------------------------------------------------------------ */

int ws_callback(struct lws *wsi, enum lws_callback_reasons reason, void *user, void *in, size_t size)
{
    (void)user;
    struct ws_conn *c = lws_get_opaque_user_data(wsi);
    switch (reason) {
    case LWS_CALLBACK_FILTER_PROTOCOL_CONNECTION:
        return ws_filter_upgrade(wsi);
    case LWS_CALLBACK_ESTABLISHED:
        return on_server_open(wsi);
    case LWS_CALLBACK_CLIENT_APPEND_HANDSHAKE_HEADER:
        return c && ws_connect_may_send(c) ? 0 : -1;
    case LWS_CALLBACK_CLIENT_ESTABLISHED:
        return c && ws_connect_may_send(c) ? on_client_open(c) : -1;
    case LWS_CALLBACK_RECEIVE:
    case LWS_CALLBACK_CLIENT_RECEIVE:
        return c ? on_receive(c, in, size) : -1;
    case LWS_CALLBACK_SERVER_WRITEABLE:
    case LWS_CALLBACK_CLIENT_WRITEABLE:
        return c ? on_writeable(c) : -1;
    case LWS_CALLBACK_WS_PEER_INITIATED_CLOSE:
        if (c)
            on_peer_closes(c, in, size);
        return 0;
    case LWS_CALLBACK_CLIENT_CONNECTION_ERROR:
        if (c && !c->open)
            ws_connect_failed(c, in, size);
        return 0;
    case LWS_CALLBACK_CLOSED:
    case LWS_CALLBACK_CLIENT_CLOSED:
    case LWS_CALLBACK_WSI_DESTROY:
        if (c && c->open)
            on_closed(c);
        else if (c)
            ws_connect_failed(c, NULL, 0);
        return 0;
    default:
        return 0;
    }
}
