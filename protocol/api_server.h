/* api_server: the server and its calls, between api.c (routes), api_call.c (a call's life) and api_reply.c (what goes out). */
#ifndef TANDEM_PROTOCOL_API_SERVER_H
#define TANDEM_PROTOCOL_API_SERVER_H
#include "protocol/api.h"
#include "protocol/api_internal.h"
#include "shared/metrics.h"

struct api_server {
    struct api_config config;
    struct http_handler handler;
    bool ready;
    uint64_t created_s;
    struct api_call *calls;
    uint32_t call_count;
    struct api_asked *asked; /* of conversations: what the worker has */
    uint32_t asked_count;
    size_t asked_size;          /* their bodies */
    struct net_timer *ticker;   /* keep-alive comments; runs while there are calls */
    struct metric *requests[3]; /* 2xx, 4xx, 5xx */
    struct metric *unauthorized;
};

struct api_pending_logprob {
    struct api_token_logprob entry;
    size_t start; /* of the token in the reply's text */
};

/* A call is the owner's to end (api_done, api_error) until `cancel` has been called for it; then it is gone, unless it ended by a stop string or by
 * its client's wish: then it waits, with or without a client, for api_done. */
struct api_call {
    struct api_server *server;
    struct api_call *previous, *next;
    struct http_exchange *exchange; /* NULL: the client is gone */
    struct api_request request;
    struct api_identity who;
    char *idempotency_key;
    void *handle;
    bool starting;  /* inside ops->start: if the call ends there, its memory stays until start returns */
    bool dead;      /* it has ended there */
    bool streaming; /* the response has begun */
    bool ended;     /* by a stop string, or its client's wish: only api_done is still expected */
    bool flushed;   /* all text went through the filter */
    bool not_kept;  /* this turn is not in the conversation */
    struct api_usage prompt_usage;
    char id[40];
    char conversation[LIMIT_NAME_SIZE + 1];
    uint64_t created_s, last_write_us;
    uint32_t token_count;
    struct api_text_stream text;
    struct api_text shown;                /* valid, not yet filtered */
    struct api_text visible;              /* filtered: the whole reply, or the next chunk */
    struct api_pending_logprob *logprobs; /* not sent yet */
    size_t logprob_count, logprob_capacity;
    uint64_t text_offset;
};

/* ---- api_call.c ---- */
void api_generate(struct api_server *s, struct http_exchange *x, const struct http_request *r,
                  const struct api_identity *who, bool chat);
void api_call_free(struct api_call *c);
bool api_is_own_model(const struct api_server *s, const char *name); /* by its own name, or `default` */
/* The replies of this principal's conversation that are under way end with what was said, which their turn keeps. Returns how many there were. */
unsigned api_stop(struct api_server *s, const struct api_identity *who, const char *conversation);
/* The client is gone: the owner stops; the call is freed unless it only waits for api_done. */
void api_call_lost(struct api_call *c);

/* ---- api_conversations.c ---- */
/* at once, of everybody, of a principal, and their bodies; beyond: 429 */
#define API_ASKED_MAX  64u
#define API_ASKED_EACH 16u
#define API_ASKED_SIZE (64u << 20)
enum api_verb { API_LIST, API_SHOW, API_DELETE, API_FORK, API_PIN, API_UNPIN, API_EXPORT, API_IMPORT };
struct api_question {
    const struct api_identity *who;
    enum api_verb verb;
    const char *id;   /* "": of none */
    const char *body; /* [body_size], API_IMPORT */
    size_t body_size;
};
/* The question is copied; the worker's answer is the response. */
void api_ask(struct api_server *s, struct http_exchange *x, const struct api_question *q);
void api_asked_lost(struct api_server *s, const struct http_exchange *x); /* the client is gone */
void api_asked_forget(struct api_server *s); /* the server goes; the worker still has its jobs */

/* ---- api_reply.c ---- */
void api_respond_json(struct api_server *s, struct http_exchange *x, int status, char *json,
                      uint32_t retry_after_ms, const char *allow);
void api_respond_error(struct api_server *s, struct http_exchange *x, int status, const char *message,
                       const char *param, const char *code);
/* These return 0, or negative when the client is to be counted as gone; nothing is freed. */
int api_stream_begin(struct api_call *c);
int api_stream_text(struct api_call *c, bool last);
int api_stream_event(struct api_call *c, char *json); /* takes json over; NULL: no memory */
int api_stream_finish(struct api_call *c, const char *finish, const struct api_usage *usage,
                      const struct api_timings *timings);
void api_respond_whole(struct api_call *c, const char *finish, const struct api_usage *usage,
                       const struct api_timings *timings);

#endif
