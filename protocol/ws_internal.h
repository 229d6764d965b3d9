/* ws_internal: one WebSocket connection, between ws.c (frames, life) and ws_connect.c (getting connected). */
#ifndef TANDEM_PROTOCOL_WS_INTERNAL_H
#define TANDEM_PROTOCOL_WS_INTERNAL_H
#include "protocol/net_internal.h"

#define WS_WHY_SIZE 256

struct resolve_job; /* a name being looked up on a thread of its own */

struct ws_conn {
    struct net_loop *loop;
    struct lws *wsi; /* NULL while a client is between two addresses */
    const struct ws_handler *handler;
    void *user;
    bool open, closing;
    char why[WS_WHY_SIZE]; /* why it ends, once known */
    uint8_t *message;      /* the pieces of a message so far */
    size_t message_size, message_capacity;

    /* a client until it is open */
    struct ws_conn *next_connecting;
    struct client_vhost *vhost;
    struct resolve_job *job;
    char *host, *path;
    uint16_t port;
    bool tls, calling;   /* calling: inside lws_client_connect_via_info */
    const char *looking; /* why this address is asked once more, for its certificate, without a request */
    char addresses[NET_ADDRESSES_MAX][48];
    size_t address_count, address_next;
    struct net_timer timer, deadline;
};

void ws_conn_free(struct ws_conn *c);
/* The first reason given stays. */
void ws_because(struct ws_conn *c, const char *why);
/* libwebsockets could not connect: text is its reason (may be NULL). */
void ws_connect_failed(struct ws_conn *c, const char *text, size_t size);
/* TLS stands: false ends the connection before anything is sent. */
bool ws_connect_may_send(struct ws_conn *c);
void ws_connect_done(struct ws_conn *c); /* open: no longer on the loop's list of connecting ones */

#endif
