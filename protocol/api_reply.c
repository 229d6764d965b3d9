/* api_reply: what goes out to a client: whole JSON responses, server-sent events, errors in either form. */
#include "protocol/api_server.h"
#include <stdio.h>
#include <stdlib.h>

static void count_status(struct api_server *s, int status)
{
    metric_add(s->requests[status < 400 ? 0 : status < 500 ? 1 : 2], 1);
}

/* ---- whole responses ---------------------------------------------------------------------------------------- */

void api_respond_json(struct api_server *s, struct http_exchange *x, int status, char *json,
                      uint32_t retry_after_ms, const char *allow)
{
    static const char no_memory[] =
        "{\"error\":{\"message\":\"out of memory\",\"type\":\"server_error\",\"param\":null,\"code\":null}}";
    struct http_header headers[2];
    size_t count = 0;
    char seconds[16];
    if (!json)
        status = 503;
    if (retry_after_ms) {
        snprintf(seconds, sizeof seconds, "%u", (retry_after_ms - 1) / 1000 + 1);
        headers[count++] = (struct http_header){"Retry-After", seconds};
    }
    if (allow)
        headers[count++] = (struct http_header){"Allow", allow};
    count_status(s, status);
    http_respond(x, status, "application/json", headers, count, json ? json : no_memory,
                 strlen(json ? json : no_memory));
    free(json);
}

void api_respond_error(struct api_server *s, struct http_exchange *x, int status, const char *message,
                       const char *param, const char *code)
{
    api_respond_json(s, x, status, api_json_error(status, message, param, code),
                     status == 429 || status == 503 ? 1000 : 0, NULL);
}

static struct api_reply reply_of(const struct api_call *c)
{
    return (struct api_reply){.chat = c->request.chat,
                              .id = c->id,
                              .model = c->server->config.model_name,
                              .created_s = c->created_s,
                              .conversation = c->conversation[0] ? c->conversation : NULL,
                              .not_kept = c->not_kept,
                              .text_offset = c->text_offset};
}

/* The logprobs that belong to what is shown, as one array, malloc'ed; NULL with *count 0 if none were asked for. Entries of tokens that
 * ended up in a swallowed stop string are dropped. */
static struct api_token_logprob *take_logprobs(struct api_call *c, size_t *count)
{
    *count = 0;
    if (!c->request.sampling.want_logprobs)
        return NULL;
    struct api_token_logprob *out = calloc(c->logprob_count + 1, sizeof *out);
    for (size_t i = 0; out && i < c->logprob_count; i++)
        if (!c->text.stopped || c->logprobs[i].start < c->text.shown_size)
            out[(*count)++] = c->logprobs[i].entry;
    c->logprob_count = 0;
    return out;
}

void api_respond_whole(struct api_call *c, const char *finish, const struct api_usage *usage,
                       const struct api_timings *timings)
{
    struct api_reply reply = reply_of(c);
    struct http_header headers[] = {{"X-Conversation-Id", c->conversation}, {"X-Conversation-Kept", "false"}};
    size_t header_count = !c->conversation[0] ? 0 : c->not_kept ? 2 : 1, count;
    struct api_token_logprob *logprobs = take_logprobs(c, &count);
    char *json = api_json_response(&reply, c->visible.data ? c->visible.data : "", c->visible.size, finish,
                                   usage, c->request.echo_timings ? timings : NULL, logprobs, count);
    free(logprobs);
    struct http_exchange *x = c->exchange;
    c->exchange = NULL;
    if (!json) {
        api_respond_error(c->server, x, 503, "not enough memory for the reply", NULL, "out_of_memory");
        return;
    }
    count_status(c->server, 200);
    http_respond(x, 200, "application/json", headers, header_count, json, strlen(json));
    free(json);
}

/* ---- server-sent events --------------------------------------------------------------------------------------- */

int api_stream_event(struct api_call *c, char *json)
{
    if (!json)
        return -TD_ERR_NOMEM;
    size_t size = strlen(json);
    char *event = malloc(size + 9);
    int code = -TD_ERR_NOMEM;
    if (event) {
        memcpy(event, "data: ", 6);
        memcpy(event + 6, json, size);
        memcpy(event + 6 + size, "\n\n", 2);
        code = http_stream_write(c->exchange, event, size + 8);
        c->last_write_us = clock_mono_us();
    }
    free(event);
    free(json);
    return code;
}

int api_stream_begin(struct api_call *c)
{
    if (c->streaming)
        return 0;
    struct http_header header = {"X-Conversation-Id", c->conversation};
    struct api_reply reply = reply_of(c);
    int code = http_stream_begin(c->exchange, 200, "text/event-stream; charset=utf-8", &header,
                                 c->conversation[0] != 0);
    if (code)
        return code;
    count_status(c->server, 200);
    c->streaming = true;
    c->last_write_us = clock_mono_us();
    if (!c->request.chat)
        return 0;
    return api_stream_event(c,
                            api_json_chunk(&reply, true, NULL, 0, NULL, NULL, 0, c->request.include_usage));
}

static size_t characters(const struct api_text *b)
{
    size_t count = 0;
    for (size_t i = 0; i < b->size; i++)
        count += ((unsigned char)b->data[i] & 0xc0) != 0x80;
    return count;
}

/* Send what is visible. Logprobs travel with text; the last ones may go without. */
int api_stream_text(struct api_call *c, bool last)
{
    int code = api_stream_begin(c);
    if (code)
        return code;
    if (c->visible.size == 0 && !(last && c->logprob_count > 0))
        return 0;
    struct api_reply reply = reply_of(c);
    size_t count;
    struct api_token_logprob *logprobs = take_logprobs(c, &count);
    if (c->visible.size > 0 || count > 0)
        code = api_stream_event(c, api_json_chunk(&reply, false, c->visible.data, c->visible.size, NULL,
                                                  logprobs, count, c->request.include_usage));
    free(logprobs);
    c->text_offset += characters(&c->visible);
    c->visible.size = 0;
    return code;
}

int api_stream_finish(struct api_call *c, const char *finish, const struct api_usage *usage,
                      const struct api_timings *timings)
{
    struct api_reply reply = reply_of(c);
    const struct api_request *r = &c->request;
    int code = api_stream_text(c, true);
    if (code == 0)
        code = api_stream_event(c, api_json_chunk(&reply, false, NULL, 0, finish, NULL, 0, r->include_usage));
    if (code == 0 && (r->include_usage || r->echo_timings))
        code = api_stream_event(c, api_json_usage_chunk(&reply, r->include_usage ? usage : NULL,
                                                        r->echo_timings ? timings : NULL));
    if (code == 0)
        code = api_stream_event(c, strdup("[DONE]"));
    return code;
}
