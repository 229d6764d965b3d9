/* fuzz_http_json: what a client of the API can send. The first byte of the input picks the way in:
 *   'J'  the rest is a request's body, given to the parser as chat and as text completion; what was parsed is used
 *   'B'  the rest is the body of a well-formed HTTP request, through the network loop and the API server to an owner that replies
 *   'H'  the rest is what the client writes to the socket
 *   'W'  the rest is what a client writes once its connection is a WebSocket; messages are echoed
 *   'T'  the rest is token bytes and stop strings for the text stream
 * The loop is served by hand, a turn at a time, on a Unix socket: no threads, no waiting. */
#include "../unit/protocol/toy_owner.h"
#include "protocol/api_internal.h"
#include "protocol/net_internal.h"
#include "shared/conversation_id.h"
#include <fcntl.h>

static char socket_path[64];

static void remove_socket(void)
{
    unlink(socket_path);
}

/* ---- a WebSocket owner that echoes the last message ----------------------------------------------------------- */

static struct echo {
    struct ws_conn *conn;
    uint8_t *data;
    size_t size;
} echo;

static int on_open(void *ctx, struct ws_conn *c, const char *peer, void **user)
{
    (void)ctx, (void)peer;
    echo.conn = c;
    *user = &echo;
    return 0;
}

static void on_message(void *user, const void *data, size_t size)
{
    struct echo *e = user;
    free(e->data);
    e->data = malloc(size + 1);
    memcpy(e->data, data, size);
    e->size = size;
    ws_want_write(e->conn);
}

static int64_t next(void *user, uint8_t *dst, size_t capacity)
{
    struct echo *e = user;
    int64_t size = (int64_t)e->size;
    if (e->size > capacity)
        abort();
    if (size)
        memcpy(dst, e->data, e->size);
    e->size = 0;
    return size;
}

static void on_closed(void *user, const char *why)
{
    struct echo *e = user;
    if (!why[0])
        abort();
    free(e->data);
    *e = (struct echo){0};
}

static const struct ws_handler ws_handler = {on_open, on_message, next, on_closed, NULL, NULL, NULL};

static void set_up(void)
{
    static bool done;
    if (done)
        return;
    done = true;
    static struct api_ops ops;
    struct td_error err = {0};
    ops = (struct api_ops){.authenticate = toy_authenticate,
                           .start = toy_start,
                           .cancel = toy_cancel,
                           .conversations = toy_conversations,
                           .conversation_show = toy_show,
                           .conversation_delete = toy_delete};
    toy_make_tokenizer();
    toy.loop = net_loop_create(&err);
    struct api_config config = {
        .loop = toy.loop, .tokenizer = toy.tokenizer, .model_name = "toy", .ops = &ops, .require_json = true};
    toy.server = api_create(&config);
    api_set_ready(toy.server, true);
    snprintf(socket_path, sizeof socket_path, "/tmp/td-fuzz-%d.sock", (int)getpid());
    static const char *const origins[] = {"http://app.example", NULL};
    struct net_listen listen = {.unix_path = socket_path,
                                .http = api_http_handler(toy.server),
                                .ws = &ws_handler,
                                .loopback_hosts_only = true,
                                .origins_allowed = origins};
    if (net_listen(toy.loop, &listen, NULL, &err))
        abort();
    atexit(remove_socket);
}

/* ---- J: the parser ------------------------------------------------------------------------------------------ */

static void use_request(struct api_request *r)
{
    struct api_reply reply = {
        .chat = r->chat, .id = "id", .model = r->model, .conversation = r->conversation};
    if (r->message_count > LIMIT_API_MESSAGES || r->stop_count > LIMIT_API_STOPS ||
        r->prompt_id_count > LIMIT_PROMPT_TOKENS || r->sampling.logprob_count > SAMPLER_LOGPROBS_MAX ||
        (r->conversation && !conversation_id_valid(r->conversation)))
        abort();
    for (size_t i = 0; i < r->message_count; i++) { /* what was taken for text must print as JSON */
        char *json = api_json_chunk(&reply, false, r->messages[i].content, r->messages[i].content_size, NULL,
                                    NULL, 0, false);
        if (!json)
            abort();
        free(json);
    }
}

static void fuzz_parser(const char *body, size_t size)
{
    for (int chat = 0; chat < 2; chat++) {
        struct api_request r;
        struct td_error err = {0};
        const char *param;
        if (api_request_parse(body, size, chat, &r, &param, &err) == 0) {
            use_request(&r);
            api_request_free(&r);
        } else if (!err.text[0] || err.code >= 0) {
            abort();
        }
    }
}

/* ---- B, H: through the socket ------------------------------------------------------------------------------- */

static void one_turn(void)
{
    lws_cancel_service(toy.loop->context); /* or it would wait for something to happen */
    lws_service(toy.loop->context, 0);
}

static void fuzz_socket(const char *text, size_t size)
{
    struct client c = client_open_unix(socket_path);
    char drop[65536];
    fcntl(c.fd, F_SETFL, O_NONBLOCK);
    for (int idle = 0; size > 0 && idle < 100; idle++) {
        ssize_t n = send(c.fd, text, size, MSG_NOSIGNAL);
        if (n > 0)
            text += n, size -= (size_t)n, idle = 0;
        one_turn();
        while (recv(c.fd, drop, sizeof drop, 0) > 0)
            ;
    }
    for (int i = 0; i < 4; i++)
        one_turn();
    shutdown(c.fd, SHUT_WR);
    for (int i = 0; i < 100; i++) {
        one_turn();
        ssize_t n = recv(c.fd, drop, sizeof drop, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN))
            break;
    }
    close(c.fd);
    for (int i = 0; i < 4; i++)
        one_turn();
}

static void fuzz_body(const char *body, size_t size)
{
    char *text = malloc(size + 256);
    int n = snprintf(text, 256,
                     "POST /v1/%s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
                     "secret\r\nContent-Type: application/json\r\n"
                     "Content-Length: %zu\r\n\r\n",
                     size % 2 ? "chat/completions" : "completions", size);
    memcpy(text + n, body, size);
    fuzz_socket(text, (size_t)n + size);
    free(text);
}

static void fuzz_websocket(const char *bytes, size_t size)
{
    static const char upgrade[] =
        "GET /tandem HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        "Sec-WebSocket-Protocol: tandem.v1\r\n\r\n";
    char *text = malloc(sizeof upgrade + size);
    memcpy(text, upgrade, sizeof upgrade - 1);
    memcpy(text + sizeof upgrade - 1, bytes, size);
    fuzz_socket(text, sizeof upgrade - 1 + size);
    free(text);
}

/* ---- T: text ------------------------------------------------------------------------------------------------- */

/* Up to two stop strings, each ended by a zero byte, then pieces: a length byte and bytes. */
static void fuzz_text(const char *data, size_t size)
{
    char *stops[2];
    size_t stop_count = 0;
    for (; stop_count < 2; stop_count++) {
        size_t n = strnlen(data, size);
        if (n == 0 || n == size || n > LIMIT_API_STOP_SIZE)
            break;
        size_t valid_size; /* JSON lets no other through */
        stops[stop_count] = api_utf8_repair(data, n, &valid_size);
        data += n + 1, size -= n + 1;
    }
    struct api_text_stream t;
    struct api_text out = {0};
    api_text_stream_init(&t, stops, stop_count, size % 2);
    while (size > 0) {
        size_t n = TD_MIN((size_t)(unsigned char)data[0], size - 1);
        api_text_stream_feed(&t, data + 1, n, false, &out);
        data += 1 + n, size -= 1 + n;
    }
    api_text_stream_feed(&t, NULL, 0, true, &out);
    size_t repaired = 0;
    char *again = api_utf8_repair(out.data ? out.data : "", out.size, &repaired);
    if (repaired != out.size || memcmp(again, out.data ? out.data : "", out.size) != 0)
        abort(); /* something that is no UTF-8 was shown */
    for (size_t i = 0; i < stop_count; i++) {
        if (out.size && memmem(out.data, out.size, stops[i], strlen(stops[i])))
            abort(); /* a stop string was shown */
        free(stops[i]);
    }
    free(again);
    api_text_free(&out);
    api_text_stream_deinit(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    set_up();
    if (size == 0)
        return 0;
    char *text = malloc(size); /* ends where the input ends, for the sanitizer */
    memcpy(text, data + 1, size - 1);
    switch (data[0]) {
    case 'B':
        fuzz_body(text, size - 1);
        break;
    case 'H':
        fuzz_socket(text, size - 1);
        break;
    case 'W':
        fuzz_websocket(text, size - 1);
        break;
    case 'T':
        fuzz_text(text, size - 1);
        break;
    default:
        fuzz_parser(text, size - 1);
    }
    free(text);
    return 0;
}
