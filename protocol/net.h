/* net: the libwebsockets binding. One net_loop = one lws context = one thread; everything here except net_loop_post* and net_loop_stop is
 * called on that thread, and callbacks come on it. Serves HTTP/1.1 (JSON bodies, SSE), WSS (sub-protocol tandem.v1) and connects out as a WSS client.
 *
 * Facts that shape it (see ARCHITECTURE.md): a client's frame is masked in place, so frames are produced into the loop's own scratch;
 * one write per WRITEABLE; messages arrive in pieces and are put together here, bounded by LIMIT_FRAME_SIZE; TCP_NOTSENT_LOWAT is 16 KiB, so what libwebsockets has
 * taken is soon on the wire; LWS_CALLBACK_HTTP_CONFIRM_UPGRADE is not used (CVE-2025-11677); asynchronous DNS is off (CVE-2025-11678). */
#ifndef TANDEM_PROTOCOL_NET_H
#define TANDEM_PROTOCOL_NET_H
#include "shared/base.h"
#include "shared/status.h"
#include "protocol/limits.h"

struct net_loop;
struct net_loop *net_loop_create(struct td_error *err);
void net_loop_destroy(struct net_loop *l); /* closes everything; on_closed callbacks run */
int net_loop_run(struct net_loop *l);      /* until net_loop_stop */
void net_loop_stop(struct net_loop *l);    /* any thread, or a signal handler */
/* Run fn(arg) on the loop's thread soon. Any thread. Bounded: -TD_ERR_FULL, -TD_ERR_CLOSED. */
int net_loop_post(struct net_loop *l, void (*fn)(void *arg), void *arg);
/* The same of what must not get lost: waits for room and for memory, so not on the loop's thread. 0 or -TD_ERR_CLOSED. */
int net_loop_post_wait(struct net_loop *l, void (*fn)(void *arg), void *arg);

struct net_timer; /* fires once; may be started again from its callback */
struct net_timer *net_timer_create(struct net_loop *l, void (*fn)(void *ctx), void *ctx);
void net_timer_start(struct net_timer *t, uint64_t delay_us);
void net_timer_stop(struct net_timer *t);
void net_timer_destroy(struct net_timer *t);

/* ---- HTTP server ---- */
/* One request and its response; valid until on_closed or until the response has ended. */
struct http_exchange;

struct http_header {
    const char *name, *value;
};
struct http_request {   /* borrowed for the on_request call */
    const char *method; /* "GET", "POST", "DELETE", "OPTIONS" */
    const char *path;   /* decoded, without query; no NUL, no "..": refused before */
    const char *query;  /* raw, "" if none */
    const char *authorization, *content_type, *idempotency_key, *conversation_id, *origin; /* "" if absent */
    const char *peer; /* textual address, "unix" */
    const char *body;
    size_t body_size;
};
struct http_handler {
    /* Must lead, now or later, to http_respond or http_stream_begin … end. */
    void (*on_request)(void *ctx, struct http_exchange *x, const struct http_request *r);
    /* The client went away before the response ended; x->user is still there. Called once; x is invalid after it. */
    void (*on_client_gone)(void *ctx, struct http_exchange *x);
    void *ctx;
};
void http_set_user(struct http_exchange *x, void *user);
void *http_user(struct http_exchange *x);
/* Whole response. headers may be NULL/0. Body is copied. x is invalid afterwards. */
void http_respond(struct http_exchange *x, int status, const char *content_type,
                  const struct http_header *headers, size_t header_count, const void *body, size_t size);
int http_stream_begin(struct http_exchange *x, int status, const char *content_type,
                      const struct http_header *headers, size_t header_count);
/* Copied and queued; -TD_ERR_FULL beyond LIMIT_HTTP_STREAM_QUEUE: the client does not read; treat it as gone (http_abort). */
int http_stream_write(struct http_exchange *x, const void *data, size_t size);
void http_stream_end(struct http_exchange *x); /* after what is queued; x is invalid afterwards */
/* drop the connection; no on_client_gone; x is invalid afterwards */
void http_abort(struct http_exchange *x);

/* ---- WebSocket, both directions ---- */
struct ws_conn;
struct ws_handler {
    /* Server: a connection with our sub-protocol; *user is the owner's. Non-zero refuses. Client: it is open. */
    int (*on_open)(void *ctx, struct ws_conn *c, const char *peer, void **user);
    void (*on_message)(void *user, const void *data, size_t size); /* one whole binary message */
    /* Called when the socket can take a frame: fill dst, return its size, 0 for nothing now, negative to close. */
    int64_t (*next)(void *user, uint8_t *dst, size_t capacity);
    void (*on_closed)(void *user, const char *why); /* server, and client once open */
    /* Client: it could not connect (ctx is the handler's). why: one clear line (refused, certificate not trusted, name mismatch …). */
    void (*on_failed)(void *ctx, const char *why);
    void *ctx;
    void (*on_part)(void *user); /* something has come of a message that is not whole yet; or NULL */
};
void ws_want_write(struct ws_conn *c); /* `next` will be called */
/* Its peer is known: from now on it does not make room for others, as one does that may be anybody's. */
void ws_keep(struct ws_conn *c);
void ws_renew(struct ws_conn *c);                  /* nothing is on its way, and much will be: tcp.h */
void ws_close(struct ws_conn *c, const char *why); /* soon; on_closed follows */
/* The same, and what the kernel has not sent is thrown away. */
void ws_abort(struct ws_conn *c, const char *why);

/* ---- listening and connecting ---- */
/* Of the descriptors that the process may have so many, a quarter at most, are not for connections: a store must be able to open what it reads and writes,
 * however many clients there are. Before they are touched, who comes takes the place of whoever has asked nothing for longest; where all are busy, it is
 * closed as it comes. */
#define NET_FILES_KEPT 256
struct net_listen {
    const char *bind_address;         /* "127.0.0.1", "::", NULL with unix_path */
    uint16_t port;                    /* 0: any free one; see *bound_port */
    const char *unix_path;            /* NULL, or a Unix socket instead */
    const char *cert_path, *key_path; /* both or neither (plain HTTP) */
    const char *client_ca_path;       /* require and verify client certificates */
    const struct http_handler *http;  /* NULL: 404 */
    const struct ws_handler *ws;      /* NULL: no WebSocket */
    /* refuse a Host that is not localhost, 127.0.0.1, [::1] (with any port): DNS rebinding */
    bool loopback_hosts_only;
    /* NULL-terminated, or NULL: any request that carries an Origin is refused (403) */
    const char *const *origins_allowed;
    bool takes_all_files; /* an operator's: also the NET_FILES_KEPT */
};
/* The error line names what to do: port in use → another --listen-port; missing certificate → deploy/certs.sh. */
int net_listen(struct net_loop *l, const struct net_listen *config, uint16_t *bound_port,
               struct td_error *err);

struct net_connect {
    const char *host; /* name to verify and to send as SNI, e.g. "localhost" */
    uint16_t port;
    const char *path;                 /* "/tandem" */
    const char *ca_path;              /* trust anchor; NULL: the system's */
    const char *cert_path, *key_path; /* client certificate, or NULL */
    bool tls;                         /* false only for tests on loopback */
    const struct ws_handler *ws;
    void *user; /* becomes the connection's user */
};
int ws_connect(struct net_loop *l, const struct net_connect *config, struct ws_conn **out,
               struct td_error *err);
/* What ws_connect would say of such files (NULL: none), before anything is connected. */
int net_check_files(const char *ca_path, const char *cert_path, const char *key_path, struct td_error *err);

#endif
