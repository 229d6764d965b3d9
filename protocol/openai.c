/* openai: the JSON of responses, stream chunks and errors, byte for byte where clients look.
 *
 * Each function builds a small tree and prints it; jansson keeps the order of keys. A tree that could not be
 * built (no memory, text that is not UTF-8) prints as NULL. Numbers that JSON cannot hold are clamped: a
 * probability of zero is -9999, as clients know it. */
#include "protocol/openai.h"
#include "protocol/api_internal.h"
#include "shared/tokenizer.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define JSON_DIGITS 9 /* a float survives the way through text */

static char *print_and_free(json_t *root)
{
    if (!root)
        return NULL;
    char *text = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(JSON_DIGITS));
    json_decref(root);
    return text;
}

static json_t *real(double x)
{
    return json_real(isfinite(x) ? x : x > 0 ? 9999.0 : -9999.0);
}

/* object[key] = value, which is taken over; false without memory. */
static bool put(json_t *object, const char *key, json_t *value)
{
    return json_object_set_new(object, key, value) == 0;
}

/* ---- logprobs ---- */

/* Chat: {"token","logprob","bytes"}. A token may hold part of a character: bytes is exact, token is for the
 * eyes. */
static json_t *chat_token(const char *text, size_t size, float logprob)
{
    size_t shown_size;
    char *shown = api_utf8_repair(text, size, &shown_size);
    json_t *bytes = json_array();
    for (size_t i = 0; bytes && i < size; i++)
        json_array_append_new(bytes, json_integer((unsigned char)text[i]));
    json_t *token = shown ? json_pack("{s:s%,s:o,s:o}", "token", shown, shown_size, "logprob", real(logprob),
                                      "bytes", bytes)
                          : NULL;
    if (!shown)
        json_decref(bytes);
    free(shown);
    return token;
}

static json_t *chat_logprobs(const struct api_token_logprob *tokens, size_t count)
{
    json_t *content = json_array();
    for (size_t i = 0; content && i < count; i++) {
        const struct api_token_logprob *t = &tokens[i];
        json_t *entry = chat_token(t->text, t->size, t->logprob), *top = json_array();
        for (uint32_t n = 0; top && n < t->top_count; n++)
            json_array_append_new(top, chat_token(t->top[n].text, t->top[n].size, t->top[n].logprob));
        if (!entry || !put(entry, "top_logprobs", top) || json_array_append(content, entry)) {
            json_decref(content);
            content = NULL;
        }
        json_decref(entry);
    }
    return content ? json_pack("{s:o,s:n}", "content", content, "refusal") : NULL;
}

/* Completions have no bytes field: a token that is no UTF-8 by itself is written "bytes:\xf0\x9f". */
static char *token_name(const char *text, size_t size, size_t *name_size)
{
    char *name = malloc(size * 4 + 7);
    if (!name)
        return NULL;
    if (utf8_valid(text, size)) {
        memcpy(name, text, size);
        *name_size = size;
        return name;
    }
    size_t used = (size_t)sprintf(name, "bytes:");
    for (size_t i = 0; i < size; i++)
        used += (size_t)sprintf(name + used, "\\x%02x", (unsigned char)text[i]);
    *name_size = used;
    return name;
}

static json_t *completion_top(const struct api_token_logprob *t)
{
    json_t *top = json_object();
    for (uint32_t n = 0; top && n < t->top_count; n++) {
        size_t size;
        char *name = token_name(t->top[n].text, t->top[n].size, &size);
        if (name)
            json_object_setn_new(top, name, size, real(t->top[n].logprob));
        free(name);
    }
    return top;
}

static size_t utf8_count(const char *text, size_t size)
{
    size_t count = 0;
    for (size_t i = 0; i < size; i++)
        count += ((unsigned char)text[i] & 0xc0) != 0x80;
    return count;
}

static json_t *completion_logprobs(const struct api_token_logprob *tokens, size_t count, uint64_t text_offset)
{
    json_t *names = json_array(), *values = json_array(), *tops = json_array(), *offsets = json_array();
    bool any_top = false;
    for (size_t i = 0; i < count; i++) {
        size_t size = 0;
        char *name = token_name(tokens[i].text, tokens[i].size, &size);
        json_array_append_new(names, name ? json_stringn(name, size) : NULL);
        json_array_append_new(values, real(tokens[i].logprob));
        json_array_append_new(tops, completion_top(&tokens[i]));
        json_array_append_new(offsets, json_integer((json_int_t)text_offset));
        any_top = any_top || tokens[i].top_count > 0;
        text_offset += utf8_count(tokens[i].text, tokens[i].size);
        free(name);
    }
    if (!any_top) {
        json_decref(tops);
        tops = json_null();
    }
    return json_pack("{s:o,s:o,s:o,s:o}", "tokens", names, "token_logprobs", values, "top_logprobs", tops,
                     "text_offset", offsets);
}

static json_t *logprobs_of(const struct api_reply *r, const struct api_token_logprob *tokens, size_t count)
{
    if (!tokens)
        return json_null();
    return r->chat ? chat_logprobs(tokens, count) : completion_logprobs(tokens, count, r->text_offset);
}

/* ---- usage, timings ---- */

static json_t *usage_of(const struct api_usage *u)
{
    return json_pack("{s:I,s:I,s:I,s:{s:I}}", "prompt_tokens", (json_int_t)u->prompt_tokens,
                     "completion_tokens", (json_int_t)u->completion_tokens, "total_tokens",
                     (json_int_t)u->prompt_tokens + (json_int_t)u->completion_tokens, "prompt_tokens_details",
                     "cached_tokens", (json_int_t)u->cached_tokens);
}

static json_t *plan_of(const struct api_plan *p)
{
    json_t *o = json_object();
    put(o, "layers", json_integer(p->layers));
    put(o, "first_token", json_integer(p->first_token));
    put(o, "tokens", json_integer(p->token_count));
    put(o, "kv_tokens", json_integer(p->kv_tokens));
    put(o, "restored_tokens", json_integer(p->restored_tokens));
    put(o, "plans", json_integer(p->plan_count));
    put(o, "left_to_cloud_tokens", json_integer(p->left_tokens));
    put(o, "local", json_boolean(p->local));
    if (p->codec)
        put(o, "codec", json_string(p->codec));
    if (p->hidden_dtype)
        put(o, "hidden", json_string(p->hidden_dtype));
    if (p->why)
        put(o, "why", json_string(p->why));
    if (!p->chosen)
        return o;
    const struct {
        const char *name;
        double value;
    } foretold[] = {{"first_token_ms", p->first_token_ms},
                    {"t16_ms", p->t16_ms},
                    {"cloud_alone_first_token_ms", p->cloud_first_token_ms},
                    {"cloud_alone_t16_ms", p->cloud_t16_ms},
                    {"edge_alone_first_token_ms", p->edge_first_token_ms},
                    {"edge_alone_t16_ms", p->edge_t16_ms},
                    {"edge_layer_us", p->edge_layer_us},
                    {"cloud_layer_us", p->cloud_layer_us},
                    {"uplink_mbit", p->uplink_mbit},
                    {"delay_ms", p->delay_ms},
                    {"queue_ms", p->queue_ms}};
    json_t *estimates = json_object();
    for (size_t i = 0; i < TD_COUNT(foretold); i++)
        put(estimates, foretold[i].name, real(foretold[i].value));
    put(o, "estimates", estimates);
    return o;
}

/* The cloud's part, or how far it was. */
static void put_cloud(json_t *o, const struct api_timings *t)
{
    if (!t->cloud_told) {
        put(o, "confirmed_tokens", json_integer((json_int_t)t->confirmed_tokens));
        return;
    }
    put(o, "cloud_prefill_ms", real(t->cloud_prefill_ms));
    put(o, "queue_ms", real(t->queue_ms));
    put(o, "load_ms", real(t->load_ms));
    put(o, "cloud_prefill_tokens", json_integer((json_int_t)t->cloud_prefill_tokens));
    put(o, "recomputed_tokens", json_integer((json_int_t)t->recomputed_tokens));
}

static json_t *timings_of(const struct api_timings *t)
{
    const struct {
        const char *name;
        double value;
    } times[] = {{"edge_prefill_ms", t->edge_prefill_ms},
                 {"first_token_ms", t->first_token_ms},
                 {"t16_ms", t->t16_ms},
                 {"decode_ms", t->decode_ms},
                 {"total_ms", t->total_ms},
                 {"tokens_per_s", t->tokens_per_s}};
    const struct {
        const char *name;
        uint64_t value;
    } counts[] = {{"uplink_bytes", t->uplink_bytes},
                  {"uplink_raw_bytes", t->uplink_raw_bytes},
                  {"edge_layers", t->edge_layers},
                  {"edge_prefill_tokens", t->edge_prefill_tokens},
                  {"local_tokens", t->local_tokens},
                  {"cached_memory_tokens", t->cached_memory_tokens},
                  {"cached_disk_tokens", t->cached_disk_tokens}};
    json_t *o = json_object();
    for (size_t i = 0; i < TD_COUNT(times); i++)
        put(o, times[i].name, real(times[i].value));
    for (size_t i = 0; i < TD_COUNT(counts); i++)
        put(o, counts[i].name, json_integer((json_int_t)counts[i].value));
    put_cloud(o, t);
    if (t->was_offline)
        put(o, "offline",
            json_pack("{s:I,s:I,s:o}", "from_token", (json_int_t)t->offline_from, "tokens",
                      (json_int_t)t->offline_tokens, "estimate_ms", real(t->offline_estimate_ms)));
    if (t->plan.plan_count > 0)
        put(o, "plan", plan_of(&t->plan));
    return o;
}

/* ---- responses and chunks ---- */

static json_t *reply_head(const struct api_reply *r, bool chunk)
{
    const char *object = !r->chat ? "text_completion" : chunk ? "chat.completion.chunk" : "chat.completion";
    return json_pack("{s:s,s:s,s:I,s:s,s:n}", "id", r->id, "object", object, "created",
                     (json_int_t)r->created_s, "model", r->model, "system_fingerprint");
}

/* The fields that are Tandem's own come last. Takes root over; NULL root or a failed part gives NULL. */
static char *finish_reply(json_t *root, const struct api_reply *r, const struct api_timings *timings,
                          bool good)
{
    if (root && good && r->conversation)
        good = put(root, "conversation", json_string(r->conversation));
    if (root && good && r->conversation && r->not_kept)
        good = put(root, "conversation_kept", json_false());
    if (root && good && timings)
        good = put(root, "timings", timings_of(timings));
    if (!good) {
        json_decref(root);
        root = NULL;
    }
    return print_and_free(root);
}

char *api_json_response(const struct api_reply *r, const char *text, size_t size, const char *finish,
                        const struct api_usage *usage, const struct api_timings *timings,
                        const struct api_token_logprob *logprobs, size_t logprob_count)
{
    json_t *root = reply_head(r, false), *choice, *content = json_stringn(text, size);
    if (r->chat)
        choice = json_pack("{s:i,s:{s:s,s:o,s:n},s:o,s:s?}", "index", 0, "message", "role", "assistant",
                           "content", content, "refusal", "logprobs", logprobs_of(r, logprobs, logprob_count),
                           "finish_reason", finish);
    else
        choice = json_pack("{s:o,s:i,s:o,s:s?}", "text", content, "index", 0, "logprobs",
                           logprobs_of(r, logprobs, logprob_count), "finish_reason", finish);
    json_t *choices = json_pack("[o]", choice);
    bool good = put(root, "choices", choices) && put(root, "usage", usage_of(usage));
    return finish_reply(root, r, timings, good);
}

char *api_json_chunk(const struct api_reply *r, bool role_first, const char *text, size_t size,
                     const char *finish, const struct api_token_logprob *logprobs, size_t logprob_count,
                     bool usage_null)
{
    json_t *root = reply_head(r, true), *choice, *odds = logprobs_of(r, logprobs, logprob_count);
    if (r->chat) {
        json_t *delta = role_first ? json_pack("{s:s,s:s,s:n}", "role", "assistant", "content", "", "refusal")
                        : finish && !size ? json_object()
                                          : json_pack("{s:s%}", "content", size ? text : "", size);
        choice = json_pack("{s:i,s:o,s:o,s:s?}", "index", 0, "delta", delta, "logprobs", odds,
                           "finish_reason", finish);
    } else {
        choice = json_pack("{s:s%,s:i,s:o,s:s?}", "text", size ? text : "", size, "index", 0, "logprobs",
                           odds, "finish_reason", finish);
    }
    bool good = put(root, "choices", json_pack("[o]", choice));
    if (usage_null)
        good = good && put(root, "usage", json_null());
    return finish_reply(root, r, NULL, good);
}

char *api_json_usage_chunk(const struct api_reply *r, const struct api_usage *usage,
                           const struct api_timings *timings)
{
    json_t *root = reply_head(r, true);
    bool good =
        put(root, "choices", json_array()) && put(root, "usage", usage ? usage_of(usage) : json_null());
    return finish_reply(root, r, timings, good);
}

char *api_json_models(const char *const *ids, size_t count, uint64_t created_s)
{
    json_t *data = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(data, json_pack("{s:s,s:s,s:I,s:s}", "id", ids[i], "object", "model", "created",
                                              (json_int_t)created_s, "owned_by", "tandem"));
    return print_and_free(json_pack("{s:s,s:o}", "object", "list", "data", data));
}

/* ---- errors ---- */

static const char *error_type(int http_status)
{
    switch (http_status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 409:
        return "conflict";
    case 429:
        return "rate_limit_error";
    default:
        return http_status >= 500 ? "server_error" : "invalid_request_error";
    }
}

char *api_json_error(int http_status, const char *message, const char *param, const char *code)
{
    size_t size;
    char *text = api_utf8_repair(message, strlen(message), &size);
    if (!text)
        return NULL;
    json_t *root = json_pack("{s:{s:s%,s:s,s:s?,s:s?}}", "error", "message", text, size, "type",
                             error_type(http_status), "param", param, "code", code);
    free(text);
    return print_and_free(root);
}

char *api_json_context_error(const char *param, uint32_t context_max, uint32_t asked_tokens,
                             uint32_t prompt_tokens)
{
    char text[256];
    uint32_t reply_tokens = asked_tokens > prompt_tokens ? asked_tokens - prompt_tokens : 0;
    if (reply_tokens)
        snprintf(text, sizeof text,
                 "This model's maximum context length is %u tokens. However, you requested %u tokens (%u in "
                 "the prompt, %u in the "
                 "completion). Please reduce the length of the prompt or of the completion.",
                 context_max, asked_tokens, prompt_tokens, reply_tokens);
    else
        snprintf(text, sizeof text,
                 "This model's maximum context length is %u tokens. However, your prompt has %u tokens. "
                 "Please reduce its length.",
                 context_max, prompt_tokens);
    return print_and_free(json_pack("{s:{s:s,s:s,s:s,s:s,s:I,s:I}}", "error", "message", text, "type",
                                    "invalid_request_error", "param", param, "code",
                                    "context_length_exceeded", "n_prompt_tokens", (json_int_t)prompt_tokens,
                                    "n_ctx", (json_int_t)context_max));
}

/* One row a td code: the HTTP status, and the `code` of the error object. */
static const struct {
    int td_code, status;
    const char *code;
} error_table[] = {
    {TD_ERR_ARG, 400, "invalid_value"},        {TD_ERR_FORMAT, 400, "invalid_json"},
    {TD_ERR_TRUNCATED, 400, "invalid_json"},   {TD_ERR_SHAPE, 400, "invalid_value"},
    {TD_ERR_LIMIT, 400, "limit_exceeded"},     {TD_ERR_UNSUPPORTED, 400, "unsupported"},
    {TD_ERR_VERSION, 400, "unsupported"},      {TD_ERR_CONTEXT, 400, "context_length_exceeded"},
    {TD_ERR_BLOCKED, 400, "content_filter"},   {TD_ERR_AUTH, 401, "invalid_api_key"},
    {TD_ERR_NOTFOUND, 404, "not_found"},       {TD_ERR_CONFLICT, 409, "conflict"},
    {TD_ERR_EXISTS, 409, "conflict"},          {TD_ERR_MISMATCH, 409, "conflict"},
    {TD_ERR_FULL, 429, "rate_limit_exceeded"}, {TD_ERR_BUSY, 429, "rate_limit_exceeded"},
    {TD_ERR_PROTOCOL, 502, "bad_upstream"},    {TD_ERR_AGAIN, 503, "unavailable"},
    {TD_ERR_CLOSED, 503, "unavailable"},       {TD_ERR_CANCELLED, 503, "cancelled"},
    {TD_ERR_NOMEM, 503, "out_of_memory"},      {TD_ERR_TIMEOUT, 504, "timeout"},
};

int api_http_status(int td_code)
{
    for (size_t i = 0; i < TD_COUNT(error_table); i++)
        if (error_table[i].td_code == (td_code < 0 ? -td_code : td_code))
            return error_table[i].status;
    return 500;
}

const char *api_error_code(int td_code)
{
    for (size_t i = 0; i < TD_COUNT(error_table); i++)
        if (error_table[i].td_code == (td_code < 0 ? -td_code : td_code))
            return error_table[i].code;
    return "internal_error";
}
