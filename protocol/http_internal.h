/* http_internal: one request and its response, between http.c (receiving, life) and http_reply.c (queueing, writing).
 *
 *      BODY --whole--> CALL --http_stream_begin--> STREAM --http_stream_end--> ENDING --written--> (keep-alive: gone)
 *        |               '--------------http_respond---------------------------^  |
 *        '--refused: 4xx, 5xx------------------------------------------------------'  --body still arriving--> DRAIN --> (closed)
 *
 * In CALL and STREAM the handler owns the exchange and hears of a lost client; in the other states nobody outside knows it. */
#ifndef TANDEM_PROTOCOL_HTTP_INTERNAL_H
#define TANDEM_PROTOCOL_HTTP_INTERNAL_H
#include "protocol/net_internal.h"

enum exchange_state { X_BODY, X_CALL, X_STREAM, X_ENDING, X_DRAIN };

struct http_exchange {
    struct lws *wsi;
    struct listener *listener;
    struct http_exchange *previous, *next; /* the listener's */
    void *user;
    enum exchange_state state;
    bool has_body, body_complete;
    bool close_after; /* the connection ends with this exchange */
    bool chunked;     /* a stream can be delimited without closing */
    bool head_only;   /* HEAD: everything but the body */
    /* inside the handler's on_request: if the exchange ends there, its memory stays until that returns */
    bool dispatching;
    bool dead; /* it has ended there */
    struct http_head head;
    char *cors_origin; /* NULL, or the allowed Origin to name in the response */
    uint8_t *body;
    size_t body_size, body_capacity, body_progress;
    uint64_t body_expected;
    uint8_t *out; /* [out_begin, out_end) waits to be written */
    size_t out_begin, out_end, out_capacity;
    struct net_timer timer;
};

/* Forget the connection and free; the handler is not called. */
void exchange_free(struct http_exchange *x);
/* Write one piece, at most `most` bytes. Returns what the libwebsockets callback must return; x may be freed. */
int exchange_flush(struct http_exchange *x, size_t most);
/* An error response in the API's JSON form, from the network layer itself. */
void exchange_refuse(struct http_exchange *x, int status, const char *code, const char *message);
void exchange_preflight(struct http_exchange *x);

#endif
