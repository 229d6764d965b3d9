/* http_reply: responses: status line, headers, body or chunks, all queued as bytes of the wire and written piece by piece when
 * the socket takes them. The bytes are ours to the last one: no banner, and errors in the API's JSON form. */
#include "protocol/http_internal.h"
#include "protocol/openai.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define HEADERS_SIZE 4096

static const char *status_text(int status)
{
    static const struct {
        int status;
        const char *text;
    } texts[] = {{200, "OK"},
                 {204, "No Content"},
                 {400, "Bad Request"},
                 {401, "Unauthorized"},
                 {403, "Forbidden"},
                 {404, "Not Found"},
                 {405, "Method Not Allowed"},
                 {408, "Request Timeout"},
                 {409, "Conflict"},
                 {411, "Length Required"},
                 {413, "Content Too Large"},
                 {415, "Unsupported Media Type"},
                 {429, "Too Many Requests"},
                 {500, "Internal Server Error"},
                 {502, "Bad Gateway"},
                 {503, "Service Unavailable"},
                 {504, "Gateway Timeout"}};
    for (size_t i = 0; i < TD_COUNT(texts); i++)
        if (texts[i].status == status)
            return texts[i].text;
    return "Status";
}

/* ---- the queue --------------------------------------------------------------------------------------------- */

static int out_append(struct http_exchange *x, const void *data, size_t size)
{
    if (x->out_begin > 0 && size > x->out_capacity - x->out_end) {
        memmove(x->out, x->out + x->out_begin, x->out_end - x->out_begin);
        x->out_end -= x->out_begin, x->out_begin = 0;
    }
    if (size > x->out_capacity - x->out_end) {
        size_t capacity = TD_MAX(x->out_end + size, TD_MAX(2 * x->out_capacity, 4096u));
        uint8_t *grown = realloc(x->out, capacity);
        if (!grown)
            return -TD_ERR_NOMEM;
        x->out = grown, x->out_capacity = capacity;
    }
    if (size)
        memcpy(x->out + x->out_end, data, size);
    x->out_end += size;
    return 0;
}

/* ---- headers ----------------------------------------------------------------------------------------------- */

struct text { /* a bounded text; too much is cut and noticed at the end */
    char data[HEADERS_SIZE];
    size_t size;
    bool full;
};

static void text_add(struct text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void text_add(struct text *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->data + t->size, sizeof t->data - t->size, format, args);
    va_end(args);
    if (n < 0 || (size_t)n >= sizeof t->data - t->size)
        t->full = true;
    else
        t->size += (size_t)n;
}

/* What would split a response in two is left out. */
static bool header_is_clean(const struct http_header *h)
{
    return h->name && h->value && !strpbrk(h->name, "\r\n: ") && !strpbrk(h->value, "\r\n");
}

static void add_date(struct text *t)
{
    char date[64];
    struct tm tm;
    time_t now = (time_t)(clock_wall_us() / 1000000);
    if (gmtime_r(&now, &tm) && strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", &tm))
        text_add(t, "Date: %s\r\n", date);
}

static void add_cors(struct text *t, const struct http_exchange *x)
{
    if (x->cors_origin)
        text_add(t,
                 "Access-Control-Allow-Origin: %s\r\nVary: Origin\r\n"
                 "Access-Control-Expose-Headers: X-Conversation-Id, X-Conversation-Kept, Retry-After\r\n",
                 x->cors_origin);
}

/* size: of the body, or -1 for a stream. */
static int queue_headers(struct http_exchange *x, int status, const char *content_type,
                         const struct http_header *headers, size_t count, int64_t size)
{
    struct text t = {.size = 0};
    if (size < 0 && !x->chunked)
        x->close_after = true;
    text_add(&t, "HTTP/1.1 %d %s\r\n", status, status_text(status));
    add_date(&t);
    if (content_type)
        text_add(&t, "Content-Type: %s\r\n", content_type);
    if (size >= 0 && status != 204)
        text_add(&t, "Content-Length: %lld\r\n", (long long)size);
    else if (size < 0 && x->chunked)
        text_add(&t, "Transfer-Encoding: chunked\r\n");
    text_add(&t, "Connection: %s\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n",
             x->close_after ? "close" : "keep-alive");
    add_cors(&t, x);
    for (size_t i = 0; i < count; i++)
        if (header_is_clean(&headers[i]))
            text_add(&t, "%s: %s\r\n", headers[i].name, headers[i].value);
    text_add(&t, "\r\n");
    return t.full ? -TD_ERR_NOSPACE : out_append(x, t.data, t.size);
}

/* ---- the handler's side ------------------------------------------------------------------------------------- */

void http_set_user(struct http_exchange *x, void *user)
{
    x->user = user;
}

void *http_user(struct http_exchange *x)
{
    return x->user;
}

/* From now on nobody owns the exchange: a client that does not read is given up after a while without progress. */
static void begin_ending(struct http_exchange *x)
{
    x->state = X_ENDING;
    net_timer_start(&x->timer, x->listener->loop->idle_us);
    lws_callback_on_writable(x->wsi);
}

void http_abort(struct http_exchange *x)
{
    net_kill(x->wsi);
    exchange_free(x);
}

void http_respond(struct http_exchange *x, int status, const char *content_type,
                  const struct http_header *headers, size_t header_count, const void *body, size_t size)
{
    if (queue_headers(x, status, content_type, headers, header_count, (int64_t)size) ||
        (!x->head_only && status != 204 && out_append(x, body, size))) {
        http_abort(x);
        return;
    }
    begin_ending(x);
}

int http_stream_begin(struct http_exchange *x, int status, const char *content_type,
                      const struct http_header *headers, size_t header_count)
{
    int code = queue_headers(x, status, content_type, headers, header_count, -1);
    if (code)
        return code;
    x->state = X_STREAM;
    lws_callback_on_writable(x->wsi);
    return 0;
}

int http_stream_write(struct http_exchange *x, const void *data, size_t size)
{
    if (size == 0 || x->head_only)
        return 0;
    if (x->out_end - x->out_begin + size > LIMIT_HTTP_STREAM_QUEUE)
        return -TD_ERR_FULL;
    char frame[24];
    int n = x->chunked ? snprintf(frame, sizeof frame, "%zx\r\n", size) : 0;
    int code = out_append(x, frame, (size_t)n);
    if (code == 0)
        code = out_append(x, data, size);
    if (code == 0 && x->chunked)
        code = out_append(x, "\r\n", 2);
    lws_callback_on_writable(x->wsi);
    return code;
}

void http_stream_end(struct http_exchange *x)
{
    if (x->chunked && !x->head_only && out_append(x, "0\r\n\r\n", 5)) {
        http_abort(x);
        return;
    }
    begin_ending(x);
}

/* ---- the network's side -------------------------------------------------------------------------------------- */

void exchange_refuse(struct http_exchange *x, int status, const char *code, const char *message)
{
    if (x->has_body && !x->body_complete)
        x->close_after = true;
    char *json = api_json_error(status, message, NULL, code);
    struct http_header retry = {"Retry-After", "1"};
    http_respond(x, status, "application/json", &retry, status == 503, json ? json : "{}",
                 json ? strlen(json) : 2);
    free(json);
}

void exchange_preflight(struct http_exchange *x)
{
    static const struct http_header headers[] = {
        {"Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS"},
        {"Access-Control-Allow-Headers", "Authorization, Content-Type, Idempotency-Key, X-Conversation-Id"},
        {"Access-Control-Max-Age", "600"}};
    http_respond(x, 204, NULL, headers, TD_COUNT(headers), NULL, 0);
}

/* All is written. A connection that is to close while its request still arrives stays a moment longer: closing it at once would reset
 * it, and the client would lose the answer. */
static int finish(struct http_exchange *x)
{
    struct lws *wsi = x->wsi;
    bool close = x->close_after;
    if (close && x->has_body && !x->body_complete) {
        x->state = X_DRAIN;
        net_timer_start(&x->timer, NET_DRAIN_US);
        return 0;
    }
    exchange_free(x);
    if (close)
        return -1;
    return lws_http_transaction_completed(wsi) ? -1 : 0;
}

int exchange_flush(struct http_exchange *x, size_t most)
{
    size_t size = TD_MIN(x->out_end - x->out_begin, most);
    if (size > 0) {
        uint8_t *scratch = net_scratch(x->listener->loop);
        memcpy(scratch, x->out + x->out_begin, size);
        if (lws_write(x->wsi, scratch, size, LWS_WRITE_HTTP) < 0)
            return -1;
        x->out_begin += size;
        if (x->state == X_ENDING)
            net_timer_start(&x->timer, x->listener->loop->idle_us);
    }
    if (x->out_begin < x->out_end)
        lws_callback_on_writable(x->wsi);
    else if (x->state == X_ENDING)
        return finish(x);
    return 0;
}
