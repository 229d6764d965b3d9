/* net_internal: what net.c, net_listen.c, net_idle.c, net_certificate.c, http*.c and ws*.c share, and nobody else sees.
 *
 * One libwebsockets connection (struct lws) carries one of our objects in its opaque pointer: a struct http_exchange while a request is
 * open, a struct ws_conn once it speaks WebSocket, else NULL. The object that leaves first clears the pointer, so neither outlives
 * the other unnoticed. One that was accepted also has a struct net_idle in its user pointer, to its end. */
#ifndef TANDEM_PROTOCOL_NET_INTERNAL_H
#define TANDEM_PROTOCOL_NET_INTERNAL_H
#include "protocol/net.h"
#include "shared/queue.h"
#include <libwebsockets.h>
#include <stdatomic.h>

#define NET_POSTS_MAX          4096u
#define NET_SUBPROTOCOL        "tandem.v1"
#define NET_WS_PATH            "/tandem"
#define NET_WRITE_SIZE         (32u << 10) /* bytes of one HTTP write */
#define NET_CONNECT_TIMEOUT_US 10000000u
/* after a refusal, time for the client to read it before the connection is cut */
#define NET_DRAIN_US      2000000u
#define NET_NOTSENT_LOWAT (16 << 10)
#define NET_ADDRESSES_MAX 8u
/* Connections on which nothing has been asked yet, a loop: with the requests of a listener they are as many as there are buffers for heads. */
#define NET_IDLE_MAX 1024u
/* Descriptors before NET_FILES_KEPT, a sixteenth at most, that are free again soon after they were taken: the idle make room. In the first half of them who
 * has just come, and may be in the middle of a handshake, need not yet. */
#define NET_FILES_SHORT 64

struct net_timer {
    lws_sorted_usec_list_t sul;
    struct net_loop *loop; /* NULL once the loop is gone */
    struct net_timer *previous, *next;
    void (*fn)(void *ctx);
    void *ctx;
};
void net_timer_init(struct net_timer *t, struct net_loop *l, void (*fn)(void *ctx), void *ctx);
void net_timer_deinit(struct net_timer *t);

struct listener { /* one vhost that listens; lives as long as the loop */
    struct net_loop *loop;
    struct listener *next;
    char name[32], address[64];
    char *unix_path, *cert_path, *key_path, *client_ca_path;
    char **origins; /* NULL-terminated, or NULL */
    const struct http_handler *http;
    const struct ws_handler *ws;
    bool loopback_hosts_only, takes_all_files;
    uint16_t port;
    struct lws_vhost *vhost;
    uint32_t exchange_count;
    struct http_exchange *first_exchange, *last_exchange; /* in the order of their beginning */
    size_t body_size;                                     /* bytes of request bodies that are in memory */
};

struct client_vhost { /* one set of trust anchor and client certificate; kept for later connections */
    struct client_vhost *next;
    char name[32];
    char *ca_path, *cert_path, *key_path;
    int64_t stamp; /* newest change of the files */
    struct lws_vhost *vhost;
};

struct net_loop {
    struct lws_context *context;
    struct lws_vhost *base_vhost;
    struct queue *posts;
    atomic_bool stop;
    bool closing; /* being destroyed: nothing new is begun */
    struct net_timer *timers;
    struct listener *listeners;
    struct client_vhost *client_vhosts;
    struct ws_conn *connecting;                   /* clients that are not open yet */
    struct net_idle *first_idle, *last_idle;      /* in the order in which they became so */
    uint32_t idle_count, idle_max, dropped_count; /* dropped: no longer of these, but still there */
    unsigned vhost_serial;
    uint64_t idle_us, connect_timeout_us; /* the limits, which tests change, as idle_max and young_us */
    uint64_t young_us;                    /* LIMIT_GREETING_MS: for so long an idle one has just come */
    uint8_t *scratch; /* LWS_PRE, then room for one frame: a client's is masked in place */
};
static inline uint8_t *net_scratch(struct net_loop *l)
{
    return l->scratch + LWS_PRE;
}
/* The newest line that libwebsockets logged as an error on this thread, for the reason of a failed call; cleared by reading. */
const char *net_last_error(void);

/* Cut the connection on the loop's next turn; safe inside its own callbacks. */
void net_kill(struct lws *wsi);
struct listener *net_listener_of(struct lws *wsi);
/* The client showed a certificate that our authority signed, or none is asked for. */
bool net_client_verified(const struct listener *l, struct lws *wsi);
void net_peer_text(const struct listener *l, struct lws *wsi, char *out, size_t size);
int net_check_certificate(const char *cert_path, const char *key_path, struct td_error *err);
int net_check_authority(const char *ca_path, struct td_error *err);
#define CERTIFICATE_SIZE_MAX 8192 /* of one whose dates are told */
/* In words why a server's certificate (DER) is out of date, since when, and what to do; false if it cannot be read. */
bool net_certificate_dates(const void *der, size_t size, char *out, size_t out_size);

/* ---- connections on which nothing has been asked yet (net_idle.c) ---- */

struct net_idle;
int net_idle_create(struct lws *wsi, struct net_loop *l); /* accepted, and idle. -TD_ERR_NOMEM */
void net_idle_free(struct net_idle *i);                   /* the connection has gone; NULL: nothing happens */
/* From now on, as if it had not been before; a connection that was not accepted here is none of these. */
void net_idle_begin(struct lws *wsi);
void net_idle_end(struct lws *wsi);
/* The one that is so for longest goes; false: there is none, or it has just come and is spared. */
bool net_idle_drop(struct net_loop *l, bool spares_young);

/* ---- the head of a request (http_head.c) ---- */

struct http_head { /* owned strings; "" where the header is absent */
    char *method, *path, *query, *host, *origin, *connection, *version, *authorization, *content_type,
        *content_length, *transfer_encoding, *expect, *idempotency_key, *conversation_id;
};
int http_head_read(struct lws *wsi, struct http_head *h); /* 0 or -TD_ERR_NOMEM; free in both cases */
void http_head_free(struct http_head *h);
/* 0 for no body, -TD_ERR_FORMAT for what is no number. */
int http_content_length(const char *text, uint64_t *out);
bool http_host_refused(const struct listener *l, const char *host);
bool http_origin_allowed(const struct listener *l, const char *origin);
bool http_token_in_list(const char *list, const char *token);

/* ---- callbacks of the two protocols ---- */

int http_callback(struct lws *wsi, enum lws_callback_reasons reason, void *user, void *in, size_t size);
int ws_callback(struct lws *wsi, enum lws_callback_reasons reason, void *user, void *in, size_t size);
int ws_filter_upgrade(struct lws *wsi); /* non-zero: refused, and the client was told */
void ws_destroy_connecting(struct net_loop *l);

#endif
