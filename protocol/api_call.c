/* api_call: the life of one generation: from a request's body to the owner, from the owner's tokens to the client.
 *
 *   tokens -> bytes -> characters, stop strings held back -> the owner's output filter -> one JSON text, or events
 *
 * Who may end a call, and what follows (struct api_call says who owns it when):
 *   the owner finishes or fails        -> the response ends, the call is freed
 *   a stop string is complete          -> ops->cancel(finished); the response ends with the owner's api_done, so that a client's next
 *                                         turn finds this one persisted
 *   the client asks for its end        -> the same, with what was said so far
 *   the client leaves, or reads nothing -> ops->cancel(not finished); freed at once
 * ops->cancel(finished) may call api_done inside: nothing touches a call after it. */
#include "protocol/api_server.h"
#include "protocol/wire.h"
#include "shared/conversation_id.h"
#include "shared/crypto.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

_Static_assert(CONVERSATION_ID_MAX == LIMIT_NAME_SIZE, "a conversation's id is a name of the wire");

/* ---- life -------------------------------------------------------------------------------------------------- */

static void release(struct api_call *c)
{
    api_request_free(&c->request);
    api_text_stream_deinit(&c->text);
    api_text_free(&c->shown);
    api_text_free(&c->visible);
    free(c->idempotency_key);
    free(c->logprobs);
    free(c);
}

void api_call_free(struct api_call *c)
{
    struct api_server *s = c->server;
    if (c->previous)
        c->previous->next = c->next;
    else
        s->calls = c->next;
    if (c->next)
        c->next->previous = c->previous;
    if (--s->call_count == 0)
        net_timer_stop(s->ticker);
    c->dead = true;
    if (!c->starting)
        release(c);
}

void api_call_lost(struct api_call *c)
{
    c->exchange = NULL;
    if (c->ended)
        return;
    const struct api_config *config = &c->server->config;
    config->ops->cancel(config->ctx, c->handle, false, 0);
    api_call_free(c);
}

/* The client does not read, or there is no memory for it. */
static void drop_client(struct api_call *c)
{
    if (c->exchange)
        http_abort(c->exchange);
    api_call_lost(c);
}

static struct api_call *call_create(struct api_server *s, struct http_exchange *x,
                                    const struct http_request *r, const struct api_identity *who,
                                    struct api_request *request)
{
    struct api_call *c = calloc(1, sizeof *c);
    uint8_t random[12];
    char hex[2 * sizeof random + 1];
    if (!c || crypto_random(random, sizeof random) || !(c->idempotency_key = strdup(r->idempotency_key))) {
        free(c);
        return NULL;
    }
    c->server = s, c->exchange = x, c->who = *who, c->request = *request;
    *request = (struct api_request){0};
    hex_encode(random, sizeof random, hex);
    snprintf(c->id, sizeof c->id, "%s-%s", c->request.chat ? "chatcmpl" : "cmpl", hex);
    c->created_s = clock_wall_us() / 1000000;
    c->last_write_us = clock_mono_us();
    api_text_stream_init(&c->text, c->request.stops, c->request.stop_count,
                         c->request.chat && tokenizer_strips_leading_space(s->config.tokenizer));
    c->next = s->calls;
    if (s->calls)
        s->calls->previous = c;
    s->calls = c;
    if (s->call_count++ == 0)
        net_timer_start(s->ticker, 1000000);
    http_set_user(x, c);
    return c;
}

/* ---- the request -------------------------------------------------------------------------------------------- */

static bool key_is_good(const char *key)
{
    size_t size = strlen(key);
    for (size_t i = 0; i < size; i++)
        if (!isgraph((unsigned char)key[i]))
            return false;
    return size <= LIMIT_IDEMPOTENCY_SIZE;
}

static bool ids_in_vocabulary(const int32_t *ids, size_t count, uint32_t vocab_count)
{
    for (size_t i = 0; i < count; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= vocab_count)
            return false;
    return true;
}

static bool bias_in_vocabulary(const struct sampler_params *s, uint32_t vocab_count)
{
    for (uint32_t i = 0; i < s->bias_count; i++)
        if (!ids_in_vocabulary(&s->bias[i].id, 1, vocab_count))
            return false;
    return true;
}

struct refusal {
    int status;
    const char *param, *code;
    char message[TD_ERROR_TEXT_SIZE];
};

static bool refuse(struct refusal *out, int status, const char *param, const char *code, const char *message)
{
    *out = (struct refusal){.status = status, .param = param, .code = code};
    snprintf(out->message, sizeof out->message, "%s", message);
    return false;
}

bool api_is_own_model(const struct api_server *s, const char *name)
{
    return strcmp(name, s->config.model_name) == 0 || strcmp(name, "default") == 0;
}

static bool check_model(const struct api_server *s, const char *model, struct refusal *out)
{
    if (!model[0] || api_is_own_model(s, model))
        return true;
    refuse(out, 404, "model", "model_not_found", "");
    snprintf(out->message, sizeof out->message,
             "The model '%.100s' does not exist here. Available: '%.150s'.", model, s->config.model_name);
    return false;
}

/* What the parser cannot know: this server's model, its vocabulary, the headers. */
static bool check_request(const struct api_server *s, struct api_request *q, const struct http_request *r,
                          struct refusal *out)
{
    uint32_t vocab_count = tokenizer_vocab_count(s->config.tokenizer);
    if (!check_model(s, q->model, out))
        return false;
    if (q->unserved)
        return refuse(out, 400, q->unserved, "unsupported",
                      strcmp(q->unserved, "response_format") == 0
                          ? "a 'response_format' other than text is not supported"
                          : "tools are not supported");
    if (!ids_in_vocabulary(q->prompt_ids, q->prompt_id_count, vocab_count))
        return refuse(out, 400, "prompt", "invalid_value",
                      "'prompt' holds a token id that the model does not have");
    if (!bias_in_vocabulary(&q->sampling, vocab_count))
        return refuse(out, 400, "logit_bias", "invalid_value",
                      "'logit_bias' holds a token id that the model does not have");
    if (!key_is_good(r->idempotency_key))
        return refuse(out, 400, NULL, "invalid_header",
                      "Idempotency-Key must be at most 128 printable characters");
    if (!r->conversation_id[0])
        return true;
    if (!conversation_id_valid(r->conversation_id))
        return refuse(out, 400, NULL, "invalid_header",
                      "X-Conversation-Id must be 1 to 64 letters, digits or any of - _ . :");
    if (q->conversation && strcmp(q->conversation, r->conversation_id) != 0)
        return refuse(out, 400, "conversation", "invalid_value",
                      "'conversation' and X-Conversation-Id differ");
    if (!q->conversation && !(q->conversation = strdup(r->conversation_id)))
        return refuse(out, 503, NULL, "out_of_memory", "not enough memory for the request");
    return true;
}

static void start(struct api_call *c)
{
    const struct api_config *config = &c->server->config;
    struct td_error err = {0};
    c->starting = true;
    int code = config->ops->start(config->ctx, c, &c->who, &c->request, c->idempotency_key, &c->handle, &err);
    c->starting = false;
    if (c->dead)
        release(c);
    else if (code)
        api_error(c, code, err.text[0] ? err.text : td_status_text(code), 0);
}

void api_generate(struct api_server *s, struct http_exchange *x, const struct http_request *r,
                  const struct api_identity *who, bool chat)
{
    struct api_request request;
    struct td_error err = {0};
    struct refusal refusal;
    const char *param;
    if (!s->ready) {
        api_respond_error(s, x, 503, "the model is still being loaded", NULL, "loading");
        return;
    }
    if (s->config.call_count_max && s->call_count >= s->config.call_count_max) {
        api_respond_error(s, x, 429, "too many requests at once; try again", NULL, "rate_limit_exceeded");
        return;
    }
    int code = api_request_parse(r->body, r->body_size, chat, &request, &param, &err);
    if (code) {
        api_respond_error(s, x, api_http_status(code), err.text, param, api_error_code(code));
        return;
    }
    struct api_call *c = NULL;
    if (!check_request(s, &request, r, &refusal))
        api_respond_error(s, x, refusal.status, refusal.message, refusal.param, refusal.code);
    else if (!(c = call_create(s, x, r, who, &request)))
        api_respond_error(s, x, 503, "not enough memory for the request", NULL, "out_of_memory");
    api_request_free(&request);
    if (c)
        start(c);
}

/* ---- tokens ------------------------------------------------------------------------------------------------ */

/* The text that may be shown goes through the owner's filter, if it has one, into c->visible. */
static int filter(struct api_call *c, bool flush)
{
    const struct api_config *config = &c->server->config;
    int code;
    if (!config->ops->filter_output) {
        code = api_text_append(&c->visible, c->shown.data, c->shown.size);
    } else {
        char *out = NULL;
        size_t size = 0;
        code = config->ops->filter_output(config->ctx, c->handle, c->shown.data ? c->shown.data : "",
                                          c->shown.size, flush, &out, &size);
        if (code == 0)
            code = api_text_append(&c->visible, out, size);
        free(out);
    }
    c->shown.size = 0;
    return code;
}

static int keep_logprob(struct api_call *c, struct span piece, const struct api_logprob_in *in)
{
    if (c->logprob_count == c->logprob_capacity) {
        size_t capacity = TD_MAX(2 * c->logprob_capacity, 16u);
        struct api_pending_logprob *grown = realloc(c->logprobs, capacity * sizeof *grown);
        if (!grown)
            return -TD_ERR_NOMEM;
        c->logprobs = grown, c->logprob_capacity = capacity;
    }
    struct api_pending_logprob *p = &c->logprobs[c->logprob_count++];
    *p = (struct api_pending_logprob){
        .entry = {.text = (const char *)piece.data, .size = piece.size, .logprob = in->logprob},
        .start = c->text.shown_size + c->text.held.size + c->text.partial_size};
    uint32_t most = TD_MIN((uint32_t)TD_COUNT(p->entry.top), c->request.sampling.logprob_count);
    for (uint32_t i = 0; i < in->top_count && i < most; i++) {
        struct span top = tokenizer_piece(c->server->config.tokenizer, in->top_ids[i], true);
        p->entry.top[i].text = (const char *)top.data;
        p->entry.top[i].size = top.size;
        p->entry.top[i].logprob = in->top_logprobs[i];
        p->entry.top_count = i + 1;
    }
    return 0;
}

static int take_token(struct api_call *c, int32_t id, const struct api_logprob_in *logprob)
{
    const struct tokenizer *t = c->server->config.tokenizer;
    struct span piece = tokenizer_piece(t, id, false);
    c->token_count++;
    if (tokenizer_is_end(t, id))
        return 0;
    int code = logprob && c->request.sampling.want_logprobs ? keep_logprob(c, piece, logprob) : 0;
    return code ? code : api_text_stream_feed(&c->text, piece.data, piece.size, false, &c->shown);
}

/* The owner stops; the client is told why. */
static void fail(struct api_call *c, int code)
{
    const struct api_config *config = &c->server->config;
    config->ops->cancel(config->ctx, c->handle, false, 0);
    api_error(c, code, td_status_text(code), 0);
}

void api_started(struct api_call *c, const char *conversation, const struct api_usage *prompt_usage)
{
    if (conversation && conversation_id_valid(conversation))
        snprintf(c->conversation, sizeof c->conversation, "%s", conversation);
    if (prompt_usage)
        c->prompt_usage = *prompt_usage;
    if (c->request.stream && c->exchange && api_stream_begin(c))
        drop_client(c);
}

/* The reply is whole: the owner keeps what there is, and calls api_done. */
static void end_here(struct api_call *c)
{
    const struct api_config *config = &c->server->config;
    c->ended = true;
    config->ops->cancel(config->ctx, c->handle, true, c->token_count);
}

void api_tokens(struct api_call *c, const int32_t *ids, size_t count, const struct api_logprob_in *logprobs)
{
    int code = 0;
    if (c->ended)
        return;
    for (size_t i = 0; i < count && code == 0 && !c->text.stopped; i++)
        code = take_token(c, ids[i], logprobs ? &logprobs[i] : NULL);
    if (code == 0 && c->shown.size > 0)
        code = filter(c, false);
    if (code) {
        fail(c, code);
        return;
    }
    if (c->request.stream && api_stream_text(c, false)) {
        drop_client(c);
        return;
    }
    if (c->text.stopped)
        end_here(c);
}

/* One at a time: ending it may end others. Before its first token there is nothing to keep. */
static bool stop_one(struct api_server *s, const struct api_identity *who, const char *conversation)
{
    struct api_call *c = s->calls;
    while (c && (c->ended || strcmp(c->conversation, conversation) != 0 ||
                 strcmp(c->who.tenant, who->tenant) != 0 || strcmp(c->who.principal, who->principal) != 0))
        c = c->next;
    if (c && c->token_count > 0)
        end_here(c);
    else if (c)
        fail(c, -TD_ERR_CANCELLED);
    return c != NULL;
}

unsigned api_stop(struct api_server *s, const struct api_identity *who, const char *conversation)
{
    unsigned count = 0;
    while (stop_one(s, who, conversation))
        count++;
    return count;
}

/* ---- the end ----------------------------------------------------------------------------------------------- */

static struct api_usage usage_of(const struct api_call *c, const struct api_usage *given)
{
    if (given)
        return *given;
    struct api_usage usage = c->prompt_usage;
    usage.completion_tokens = c->token_count;
    return usage;
}

int api_flush(struct api_call *c)
{
    if (c->flushed)
        return 0;
    c->flushed = true;
    int code = api_text_stream_feed(&c->text, NULL, 0, true, &c->shown);
    return code ? code : filter(c, true);
}

void api_not_kept(struct api_call *c)
{
    c->not_kept = true;
}

void api_done(struct api_call *c, unsigned finish, const struct api_usage *usage,
              const struct api_timings *timings)
{
    struct api_usage total = usage_of(c, usage);
    bool ended_here = c->ended;
    c->ended = true;
    if (!c->exchange) {
        api_call_free(c);
        return;
    }
    if (!ended_here && (finish == FINISH_CANCELLED || finish == FINISH_ERROR)) {
        api_error(c, finish == FINISH_CANCELLED ? -TD_ERR_CANCELLED : -TD_ERR_INTERNAL,
                  "the reply was ended before it was complete", 0);
        return;
    }
    int code = api_flush(c);
    if (code) {
        api_error(c, code, td_status_text(code), 0);
        return;
    }
    const char *reason = finish == FINISH_LENGTH && !ended_here ? "length" : "stop";
    if (!c->request.stream) {
        api_respond_whole(c, reason, &total, timings);
    } else if (api_stream_finish(c, reason, &total, timings)) {
        http_abort(c->exchange);
    } else {
        http_stream_end(c->exchange);
    }
    api_call_free(c);
}

/* Takes json over. */
static void end_with_error(struct api_call *c, int status, char *json, uint32_t retry_after_ms)
{
    struct http_exchange *x = c->exchange;
    if (!x) {
        free(json);
    } else if (!c->streaming) {
        if (!retry_after_ms && (status == 429 || status == 503))
            retry_after_ms = 1000;
        api_respond_json(c->server, x, status, json, status == 429 || status == 503 ? retry_after_ms : 0,
                         NULL);
    } else if (api_stream_event(c, json)) {
        http_abort(x);
    } else {
        http_stream_end(x);
    }
    api_call_free(c);
}

void api_error(struct api_call *c, int code, const char *text, uint32_t retry_after_ms)
{
    int status = api_http_status(code);
    char *json =
        api_json_error(status, text && text[0] ? text : td_status_text(code), NULL, api_error_code(code));
    end_with_error(c, status, json, retry_after_ms);
}

void api_error_context(struct api_call *c, uint32_t context_max, uint32_t asked_tokens,
                       uint32_t prompt_tokens)
{
    bool prompt_fits = prompt_tokens < context_max && asked_tokens > prompt_tokens;
    const char *param = prompt_fits && c->request.max_tokens_field ? c->request.max_tokens_field
                        : c->request.chat                          ? "messages"
                                                                   : "prompt";
    end_with_error(c, 400, api_json_context_error(param, context_max, asked_tokens, prompt_tokens), 0);
}
