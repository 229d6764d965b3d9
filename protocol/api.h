/* api: the OpenAI API server that edge and cloud share: routes, authentication hook, JSON in and out, SSE, detokenising with held-back
 * partial code points, stop strings (across token borders, never shown), logprobs, usage, keep-alive comments, cancel on disconnect, Idempotency-Key.
 * What a prompt's ids are and who computes the reply is the owner's: struct api_ops. Everything runs on the net loop's thread, but for what is asked of
 * conversations.
 *
 * Routes: POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health (503 until api_set_ready), GET /metrics,
 *         POST /tokenize {"content","add_special"?} → {"tokens"}, POST /detokenize {"tokens"} → {"content"};
 *         GET /v1/conversations, POST there (what export gave), GET|DELETE /v1/conversations/{id}, GET /v1/conversations/{id}/export,
 *         POST /v1/conversations/{id}/fork|pin|unpin|stop, GET /v1/models/{id}. Anything else: 404; wrong method: 405.
 * All but /health ask ops->authenticate. A request's model may be model_name, "default" or absent; else 404. */
#ifndef TANDEM_PROTOCOL_API_H
#define TANDEM_PROTOCOL_API_H
#include "protocol/io_worker.h"
#include "protocol/openai.h"
#include "shared/tokenizer.h"

struct api_server;
struct api_call; /* one generation asked for by a client; opaque */

struct api_identity { /* filled by ops->authenticate */
    char tenant[LIMIT_NAME_SIZE + 1], principal[LIMIT_NAME_SIZE + 1];
};

struct api_ops {
    /* bearer: the token text ("" if none). 0, or -TD_ERR_AUTH (401). */
    int (*authenticate)(void *ctx, const char *bearer, struct api_identity *out);
    /* Begin: the owner turns the request (borrowed until it calls api_done/api_error or cancel is called) into ids and computes. It answers, then or later, on the loop's
     * thread: api_started, api_tokens …, api_done; or api_error at any time. *handle is passed to cancel (set it before calling back from inside start).
     * Negative: error with err->text. A key ("": none) that a running call has already: end that one with api_error(-TD_ERR_CONFLICT) and
     * give this one the whole reply, from its first token. */
    int (*start)(void *ctx, struct api_call *call, const struct api_identity *who,
                 const struct api_request *request, const char *idempotency_key, void **handle,
                 struct td_error *err);
    /* The reply needs no more tokens. finished: it ended by a stop string after keep_count tokens (whole tokens, the one that completed the stop string included),
     * or there by its client's wish (which may come while the owner is already storing the reply: then nothing is left to do);
     * else the client has gone. The owner must not call back for this call afterwards, except: finished → it still persists, then calls api_done. */
    void (*cancel)(void *ctx, void *handle, bool finished, uint32_t keep_count);
    /* Optional (NULL: identity): the edge's output filter. Streamed text in, text for the client out (malloc'ed, may be empty), flush at the end. */
    int (*filter_output)(void *ctx, void *handle, const char *text, size_t size, bool flush, char **out,
                         size_t *out_size);
    /* Conversations as JSON (malloc'ed), NULL ops: 404. On the worker's thread: they may wait for a disk. */
    int (*conversations)(void *ctx, const struct api_identity *who, char **json);
    int (*conversation_show)(void *ctx, const struct api_identity *who, const char *id, char **json);
    int (*conversation_delete)(void *ctx, const struct api_identity *who, const char *id);
    int (*conversation_fork)(void *ctx, const struct api_identity *who, const char *id, char **json);
    int (*conversation_pin)(void *ctx, const struct api_identity *who, const char *id, bool pinned,
                            char **json);
    int (*conversation_export)(void *ctx, const struct api_identity *who, const char *id, char **json);
    int (*conversation_import)(void *ctx, const struct api_identity *who, const char *body, size_t size,
                               char **json, struct td_error *err);
    /* Optional: why a generation would have to wait now, one line (borrowed), or NULL: /health answers 503 with it. */
    const char *(*unhealthy)(void *ctx);
};

struct api_config {
    struct net_loop *loop;
    const struct tokenizer *tokenizer;
    const char *model_name;
    const struct api_ops *ops;
    void *ctx;
    struct io_worker *worker; /* stopped before api_destroy; NULL (tests): the loop does its work */
    bool require_json;        /* the edge: POST needs application/json */
    uint32_t call_count_max;  /* concurrent generations; beyond: 429 */
};
struct api_server *api_create(const struct api_config *config);
void api_destroy(struct api_server *s);
const struct http_handler *api_http_handler(struct api_server *s); /* for net_listen */
void api_set_ready(struct api_server *s, bool ready);

/* ---- the owner's answers (loop thread) ---- */
/* prompt counted, before the first token */
void api_started(struct api_call *c, const char *conversation, const struct api_usage *prompt_usage);
struct api_logprob_in {
    float logprob;
    uint32_t top_count;
    const int32_t *top_ids;
    const float *top_logprobs;
};
/* ids as sampled, end token included (it adds no text). logprobs: NULL or [count]. May call ops->cancel (stop string, client gone). */
void api_tokens(struct api_call *c, const int32_t *ids, size_t count, const struct api_logprob_in *logprobs);
/* Optional, after the last token and before api_done: what is still held back goes through ops->filter_output now, so that an owner who keeps
 * the reply's text as the client sees it has all of it. 0; or negative: end with api_error. */
int api_flush(struct api_call *c);
/* Before api_done: the conversation that api_started named does not hold this turn. The reply says so: "conversation_kept": false. */
void api_not_kept(struct api_call *c);
/* finish: enum finish_reason. The call is freed. */
void api_done(struct api_call *c, unsigned finish, const struct api_usage *usage,
              const struct api_timings *timings);
/* Before the first byte: an HTTP error; in a stream: data: {"error": …} then the end. The call is freed. retry_after_ms: 0 or for 429/503. */
void api_error(struct api_call *c, int code, const char *text, uint32_t retry_after_ms);
void api_error_context(struct api_call *c, uint32_t context_max, uint32_t asked_tokens,
                       uint32_t prompt_tokens);

#endif
