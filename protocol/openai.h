/* openai: the OpenAI request and response schema as structs: parsing (hostile JSON, strict types and ranges), and the exact JSON
 * of responses, stream chunks and errors. No I/O, no state. */
#ifndef TANDEM_PROTOCOL_OPENAI_H
#define TANDEM_PROTOCOL_OPENAI_H
#include "shared/base.h"
#include "shared/status.h"
#include "shared/chat_template.h"
#include "shared/sampling.h"
#include "protocol/limits.h"

enum api_prefer { API_PREFER_NONE, API_PREFER_LATENCY, API_PREFER_CLOUD_COST, API_PREFER_PRIVATE };

struct api_request { /* one parsed /v1/chat/completions or /v1/completions body; owns its memory */
    bool chat;
    char *model;                   /* as sent, "" if absent */
    struct chat_message *messages; /* chat; content parts of type text are joined; other part types: 400 */
    size_t message_count;
    char *prompt; /* completions: a string; or prompt_ids */
    size_t prompt_size;
    int32_t *prompt_ids;
    size_t prompt_id_count;
    struct sampler_params sampling;
    bool has_seed; /* the request named one: sampling.seed is not to be drawn */
    /* max_completion_tokens wins over max_tokens; 0: not given (chat: the context's rest; completions: 16) */
    uint32_t max_tokens;
    const char *max_tokens_field; /* the one that set it; NULL: neither. Static */
    char *stops[LIMIT_API_STOPS];
    size_t stop_count;
    bool stream, include_usage;
    bool echo_timings;  /* `timings: true`: add the timings object */
    char *conversation; /* extension field `conversation`, or the X-Conversation-Id header; NULL: none */
    char *user;
    bool no_cache, ignore_end; /* extensions for tests and benchmarks: "cache": false, "ignore_eos": true */
    int accept; /* extension "fidelity": "exact" | "visible-lossless" | "any" → enum kv_accept */
    /* extension "prefer": "latency" | "cloud-cost" | "private"; NONE: it names none */
    enum api_prefer prefer;
    bool has_accept; /* the request named one: the server's own default does not apply */
    /* NULL, or a field that asks for tools or for a format other than text: refused with 400 by the parser's caller. Static */
    const char *unserved;
};
/* 0, or negative with err->text for the client's eyes and *param naming the field (static string or NULL). Unknown fields are ignored; wrong types and ranges are not. */
int api_request_parse(const char *body, size_t size, bool chat, struct api_request *out, const char **param,
                      struct td_error *err);
void api_request_free(struct api_request *r);

struct api_usage {
    uint32_t prompt_tokens, completion_tokens, cached_tokens;
};
struct api_plan { /* of a device that planned: what it chose, why, and what became of it */
    bool chosen;  /* by the planner; else there are no estimates */
    /* Not chosen: "given": k was; "continued": a reply is taken up again; "unable": the device can have no part. Static */
    const char *why;
    /* k; the prompt tokens planned; of these, whose KV is sent */
    uint32_t layers, first_token, token_count, kv_tokens;
    double first_token_ms, t16_ms;             /* foretold: to the first and to the 16th token */
    double cloud_first_token_ms, cloud_t16_ms; /* the same with nothing done on the device */
    double edge_first_token_ms, edge_t16_ms;   /* with everything done there; 0: it cannot */
    double edge_layer_us, cloud_layer_us, uplink_mbit, delay_ms, queue_ms; /* what it went by */
    uint32_t restored_tokens;         /* sent as the device held them, all layers: computed by nobody */
    bool local;                       /* the device makes tokens too */
    const char *codec, *hidden_dtype; /* of what is sent: KV, rows; NULL: nothing. Static */
    uint32_t plan_count, left_tokens; /* plans that were sent; tokens that were left to the cloud under way */
};
struct api_timings { /* milliseconds / counts of one reply; 0 where it does not apply */
    /* queue, load, cloud_prefill and recomputed are known: not yet where a device has made the reply to its end before the cloud */
    bool cloud_told;
    uint32_t confirmed_tokens; /* without it: of the reply, that the cloud had confirmed when it ended */
    double edge_prefill_ms, cloud_prefill_ms, queue_ms, load_ms, first_token_ms, t16_ms, decode_ms, total_ms,
        tokens_per_s;
    uint64_t uplink_bytes, uplink_raw_bytes;
    uint32_t edge_layers, edge_prefill_tokens, cloud_prefill_tokens, recomputed_tokens, cached_memory_tokens,
        cached_disk_tokens;
    uint32_t local_tokens; /* of the reply, that the device made before the cloud's were here */
    bool was_offline;      /* the device went on without the cloud: the next are set */
    uint32_t offline_from, offline_tokens; /* the first of these tokens, and how many */
    double offline_estimate_ms;            /* what was thought to pass until the first of them */
    struct api_plan plan;                  /* plan_count 0: none */
};
struct api_token_logprob {
    const char *text;
    size_t size;
    float logprob;
    struct {
        const char *text;
        size_t size;
        float logprob;
    } top[20];
    uint32_t top_count;
};
struct api_reply { /* what a response or chunk is made of */
    bool chat;
    const char *id; /* "chatcmpl-…" / "cmpl-…" */
    const char *model;
    uint64_t created_s;
    const char *conversation; /* NULL: left out */
    bool not_kept;            /* "conversation_kept": false beside it */
    uint64_t text_offset;     /* completions with logprobs: characters of the reply before this chunk */
};
/* All return malloc'ed NUL-terminated JSON (NULL without memory), the caller's. finish: NULL, "stop", "length". text must be valid UTF-8. */
char *api_json_response(const struct api_reply *r, const char *text, size_t size, const char *finish,
                        const struct api_usage *usage, const struct api_timings *timings,
                        const struct api_token_logprob *logprobs, size_t logprob_count);
/* Chunks are the JSON only; the caller adds "data: " and the blank line. role_first: the chat's first delta {"role":"assistant","content":""}. */
char *api_json_chunk(const struct api_reply *r, bool role_first, const char *text, size_t size,
                     const char *finish, const struct api_token_logprob *logprobs, size_t logprob_count,
                     bool usage_null);
char *api_json_usage_chunk(const struct api_reply *r, const struct api_usage *usage,
                           const struct api_timings *timings);
/* {"error":{"message","type","param","code"}}. type and code by HTTP status and td code: 400 invalid_request_error, 401 authentication_error,
 * 404 not_found_error, 409 conflict, 429 rate_limit_error, 5xx server_error. */
char *api_json_error(int http_status, const char *message, const char *param, const char *code);
/* Code context_length_exceeded, both counts. param: the field that asks for too much; asked_tokens: prompt and completion together. */
char *api_json_context_error(const char *param, uint32_t context_max, uint32_t asked_tokens,
                             uint32_t prompt_tokens);
char *api_json_models(const char *const *ids, size_t count, uint64_t created_s);
int api_http_status(int td_code); /* -TD_ERR_CONTEXT → 400, -TD_ERR_FULL → 429, … */

#endif
