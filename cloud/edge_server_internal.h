/* edge_server_internal: what edge_server.c (connections), edge_server_stream.c (streams: frames to commands), edge_server_event.c (events to frames),
 * edge_server_conversation.c (reading and saving conversations) and edge_server_fetch.c (KV for devices to keep) share. */
#ifndef TANDEM_CLOUD_EDGE_SERVER_INTERNAL_H
#define TANDEM_CLOUD_EDGE_SERVER_INTERNAL_H
#include "cloud/edge_server.h"
#include "cloud/log_limit.h"
#include "protocol/link.h"
#include "shared/metrics.h"

#define EDGE_WAITING_MAX 4096u    /* commands that wait in one stream while it is OPENING */
#define EDGE_LINGER_US   2000000u /* from the link's end to the socket's: time for the last frames */
#define EDGE_FETCHES_MAX                                                                                     \
    8u /* of all edges together; one of each connection; of a tenant no more than are left */
#define EDGE_FETCHES_EACH  2u        /* of these, of one principal */
#define EDGE_FETCH_LATE_US 30000000u /* for a block: what takes longer gives its place up */
#define EDGE_FETCH_MS      5000u     /* what an edge is told when the node has no time for it */
#define EDGE_RETRY_MS      1000u     /* what an edge is told when there is no room */

struct edge_server {
    struct service *service;
    struct ws_handler handler;
    struct edge_connection *connections;
    uint32_t connection_count, stream_count;
    uint32_t connections_max; /* of one principal; tests lower it, as the next */
    uint32_t fetches_max, fetch_count;
    uint64_t greeting_us; /* LIMIT_GREETING_MS; tests change it */
    struct log_limit log_refused, log_failures;
    struct metric *connections_gauge, *streams_gauge, *refused, *protocol_errors, *saved, *save_failures;
};

struct edge_connection {
    struct edge_server *server;
    struct edge_connection *previous, *next;
    struct ws_conn *ws;
    struct link *link;
    struct net_timer *timer;
    char peer[64];
    uint64_t opened_us;
    bool ready;     /* WELCOME was sent */
    bool lingering; /* the link is closed; the socket follows */
    bool dropped;   /* not greeted in time for others: it goes on the loop's next turn */
    bool receiving; /* inside link_receive: it flushes once at the end */
    struct auth_identity who;
    uint8_t shared_key[CRYPTO_KEY_SIZE], own_key[CRYPTO_KEY_SIZE];
    uint8_t seal_key[CRYPTO_KEY_SIZE]; /* zeros: this node seals nothing */
    struct edge_fetch *fetch;          /* NULL: none is under way */
    uint32_t numerics;                 /* the edge's: enum kv_numerics */
    struct edge_stream *streams;
};

enum edge_command_type { EDGE_PLAN, EDGE_HIDDEN, EDGE_KV, EDGE_GENERATE };
struct edge_command { /* a frame, ready for the engine */
    struct edge_command *next;
    enum edge_command_type type;
    union {
        struct {
            uint32_t epoch, count, rows_patience_ms, rows_patience_token_us, kv_patience_ms;
            bool resumes;
            struct plan_range ranges[LIMIT_RANGES];
        } plan;
        struct {
            uint32_t epoch, first_token, count, layer;
            uint8_t dtype;
        } hidden;
        struct {
            uint32_t epoch, block_index;
        } kv;
        struct engine_generate generate;
    };
    uint8_t *payload; /* owned */
    size_t payload_size;
};

struct edge_stream {
    struct engine_listener listener; /* first: events find the stream through it */
    struct edge_connection *connection;
    struct edge_stream *next;
    uint32_t id;
    uint64_t attempt;
    uint8_t request_id[GEN_REQUEST_ID_SIZE];
    char conversation[LIMIT_NAME_SIZE + 1]; /* "": none */
    bool generate_seen, no_persist;
    bool finishing; /* the edge's CANCEL (finished) has come */
    uint32_t keep_count;
    uint64_t unconsumed_size;          /* bulk bytes that the engine holds */
    struct conversation_read *reading; /* OPENING */
    struct edge_command *waiting, **waiting_last;
    uint32_t waiting_count;
};

/* ---- connections ---- */
/* After anything that may have given the link something to send. */
void edge_connection_flush(struct edge_connection *c);

/* ---- streams ---- */
/* what link_config.on_frame returns */
int edge_stream_frame(struct edge_connection *c, const struct wire_frame *f);
/* The stream is over; ends nothing at the engine. */
void edge_stream_free(struct edge_stream *s);
/* ERROR to the edge, the sequence cancelled, the stream freed. */
void edge_stream_fail(struct edge_stream *s, int code, const char *text, uint32_t retry_after_ms);
/* The ids are complete: open the sequence and send on what has waited. Takes ids. */
void edge_stream_begin(struct edge_stream *s, struct engine_open *open);

/* ERROR as the last frame of a stream that is none of ours (any more). */
void edge_stream_send_error(struct edge_connection *c, uint32_t id, int code, const char *text,
                            uint32_t retry_after_ms);
int edge_stream_ids(struct span payload, uint32_t vocab_count, int32_t **out); /* malloc'ed; to be wiped */

/* ---- FETCH ---- */
int edge_fetch_begin(struct edge_connection *c, const struct wire_frame *f);
/* The link has sent something: the next block, or the end. */
void edge_fetch_go_on(struct edge_connection *c);
void edge_fetch_tick(struct edge_connection *c, uint64_t now_us);
void edge_fetch_cancelled(struct edge_connection *c, uint32_t stream); /* if it is this one */
void edge_fetch_forget(struct edge_connection *c);                     /* the connection is over */

/* ---- events ---- */
void edge_stream_event(struct engine_listener *l, const struct engine_event *event);

/* ---- conversations ---- */
/* Read the first `length` ids of s->conversation; then edge_stream_begin with them in front of `open`'s, or need_ids. Takes open's ids. */
int edge_conversation_read(struct edge_stream *s, struct engine_open *open, uint32_t length,
                           const uint8_t hash[TD_HASH_SIZE]);
/* the stream goes away while its conversation is being read */
void edge_conversation_forget(struct edge_stream *s);
/* Save what the conversation holds now. ids are copied. */
void edge_conversation_save(struct edge_stream *s, const int32_t *ids, uint32_t count);

#endif
