/* The HTTP server over real sockets: what it refuses and how, connections that serve several requests, bodies at their limit, slow
 * clients, and listeners that cannot be. */
#include "net_rig.h"
#include <fcntl.h>
#include <sys/stat.h>

static struct server {
    struct net_loop *loop;
    pthread_t thread;
    uint16_t port;
    atomic_int requests, gone;
    atomic_size_t body_size;
    char method[16], path[256], query[256], content_type[64], peer[64];
    struct http_exchange *held; /* of /hold, answered by release() */
} server;

/* ---- the handler: answers with what it was asked -------------------------------------------------------------- */

static void on_request(void *ctx, struct http_exchange *x, const struct http_request *r)
{
    (void)ctx;
    snprintf(server.method, sizeof server.method, "%s", r->method);
    snprintf(server.path, sizeof server.path, "%s", r->path);
    snprintf(server.query, sizeof server.query, "%s", r->query);
    snprintf(server.content_type, sizeof server.content_type, "%s", r->content_type);
    snprintf(server.peer, sizeof server.peer, "%s", r->peer);
    atomic_store(&server.body_size, r->body_size);
    http_set_user(x, &server);
    if (strcmp(r->path, "/hold") == 0) {
        server.held = x;
    } else if (strcmp(r->path, "/stream") == 0) {
        http_stream_begin(x, 200, "text/plain", NULL, 0);
        http_stream_write(x, "one,", 4);
        http_stream_write(x, "", 0); /* must not end the stream */
        http_stream_write(x, "two", 3);
        http_stream_end(x);
    } else if (strcmp(r->path, "/abort") == 0) {
        http_abort(x);
    } else if (strcmp(r->path, "/big") == 0) {
        size_t size = 3u << 20;
        char *big = malloc(size);
        for (size_t i = 0; i < size; i++)
            big[i] = (char)('a' + i % 23);
        http_respond(x, 200, "text/plain", NULL, 0, big, size);
        free(big);
    } else {
        const struct http_header headers[] = {{"X-Good", "yes"}, {"X-Bad", "a\r\nX-Split: 1"}};
        char text[320];
        snprintf(text, sizeof text, "%s %s", r->method, r->path);
        http_respond(x, 200, "text/plain", headers, 2, r->body_size ? r->body : text,
                     r->body_size ? r->body_size : strlen(text));
    }
    atomic_fetch_add(&server.requests, 1);
}

static void on_client_gone(void *ctx, struct http_exchange *x)
{
    (void)ctx;
    assert_ptr_equal(http_user(x), &server);
    if (server.held == x)
        server.held = NULL;
    atomic_fetch_add(&server.gone, 1);
}

static const struct http_handler handler = {on_request, on_client_gone, NULL};

static void serve(const struct net_listen *listen, uint64_t idle_us)
{
    struct net_listen l = *listen;
    server = (struct server){.loop = loop_make()};
    if (idle_us)
        server.loop->idle_us = idle_us;
    l.http = l.http ? l.http : &handler;
    server.port = loop_listen(server.loop, &l);
    server.thread = loop_begin(server.loop);
}

static int set_up(void **state)
{
    (void)state;
    serve(&(struct net_listen){.bind_address = "127.0.0.1"}, 0);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    loop_end(server.loop, server.thread);
    return 0;
}

static void assert_response(struct response r, int status, const char *body)
{
    assert_int_equal(r.status, status);
    if (body)
        assert_string_equal(r.body, body);
    free(r.body);
}

/* Send raw text; the status of the response, which must be an error in the API's form that closes the connection. */
static int refused_status(const char *text)
{
    struct client c = client_open(server.port);
    client_send(&c, text, strlen(text));
    struct response r = client_response(&c, false);
    if (r.status) {
        assert_non_null(strstr(r.body, "\"error\""));
        assert_true(response_has(&r, "Content-Type: application/json"));
    }
    free(r.body);
    client_close(&c);
    return r.status;
}

/* ---- requests ---------------------------------------------------------------------------------------------- */

static void test_keep_alive(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    for (int i = 0; i < 5; i++) {
        client_request(&c, "GET", "/a", "", NULL);
        struct response r = client_response(&c, false);
        assert_true(response_has(&r, "Connection: keep-alive"));
        assert_true(response_has(&r, "Date: "));
        assert_true(response_has(&r, "X-Good: yes"));
        assert_false(response_has(&r, "X-Split"));
        assert_false(response_has(&r, "Server:"));
        assert_response(r, 200, "GET /a");
        client_request(&c, "POST", "/b", "Content-Type: text/x\r\n", "hello");
        assert_response(client_response(&c, false), 200, "hello");
        assert_string_equal(server.content_type, "text/x");
        client_request(&c, "POST", "/b", "", "");
        assert_response(client_response(&c, false), 200, "POST /b");
        client_request(&c, "GET", "/stream", "", NULL);
        assert_response(client_response(&c, false), 200, "one,two");
        client_request(&c, "DELETE", "/c", "", NULL);
        assert_response(client_response(&c, false), 200, "DELETE /c");
    }
    client_request(&c, "GET", "/a", "Connection: close\r\n", NULL);
    struct response r = client_response(&c, false);
    assert_true(response_has(&r, "Connection: close"));
    assert_response(r, 200, "GET /a");
    assert_true(client_at_end(&c));
    client_close(&c);
    assert_int_equal(atomic_load(&server.gone), 0);
}

static void test_paths_and_query(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    client_request(&c, "GET", "/x%20y?a=1&b=%41", "", NULL);
    assert_response(client_response(&c, false), 200, "GET /x y");
    assert_string_equal(server.query, "a=1&b=A");
    assert_string_equal(server.peer, "127.0.0.1");
    client_request(&c, "HEAD", "/a", "", NULL);
    struct response r = client_response(&c, true);
    assert_true(response_has(&r, "Content-Length: 6"));
    assert_response(r, 200, "");
    client_request(&c, "GET", "/a", "", NULL); /* and no stray body in between */
    assert_response(client_response(&c, false), 200, "GET /a");
    client_close(&c);
    static const char *const hostile[] = {"GET /../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
                                          "GET /a/%2e%2e/%2e%2e/b HTTP/1.1\r\nHost: x\r\n\r\n",
                                          "GET /%00a HTTP/1.1\r\nHost: x\r\n\r\n"};
    for (size_t i = 0; i < TD_COUNT(hostile); i++) {
        c = client_open(server.port);
        client_send(&c, hostile[i], strlen(hostile[i]));
        r = client_response(&c, false);
        assert_null(strstr(server.path, ".."));
        free(r.body);
        client_close(&c);
    }
}

static void test_pipelined_gets(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    char text[2048] = "";
    for (int i = 0; i < 8; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "GET /%d HTTP/1.1\r\nHost: x\r\n\r\n", i);
    client_send(&c, text, strlen(text));
    for (int i = 0; i < 8; i++) {
        char expected[16];
        snprintf(expected, sizeof expected, "GET /%d", i);
        assert_response(client_response(&c, false), 200, expected);
    }
    client_close(&c);
}

/* A request with a body behind one without: its bytes lie in the buffer that the first one came in. */
static void test_pipelined_body(void **state)
{
    (void)state;
    static const char text[] =
        "GET /1 HTTP/1.1\r\nHost: x\r\n\r\nPOST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 26\r\n\r\n"
        "abcdefghijklmnopqrstuvwxyz";
    for (size_t cut = 0; cut <= 30; cut += 10) { /* the whole body, or a part of it, comes along */
        struct client c = client_open(server.port);
        client_send(&c, text, sizeof text - 1 - cut);
        assert_response(client_response(&c, false), 200, "GET /1");
        client_send(&c, text + sizeof text - 1 - cut, cut);
        assert_response(client_response(&c, false), 200, "abcdefghijklmnopqrstuvwxyz");
        client_close(&c);
    }
}

/* Bytes behind a body: this request is answered in full, and only it. */
static void test_surplus_after_body(void **state)
{
    (void)state;
    static const char text[] =
        "POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabcGET /q HTTP/1.1\r\nHost: x\r\n\r\n";
    struct client c = client_open(server.port);
    client_send(&c, text, sizeof text - 1);
    assert_response(client_response(&c, false), 200, "abc");
    assert_true(client_at_end(&c));
    client_close(&c);
    assert_int_equal(atomic_load(&server.requests), 1);
    assert_int_equal(atomic_load(&server.gone), 0);
}

static void release(void *arg)
{
    (void)arg;
    if (server.held)
        http_respond(server.held, 200, "text/plain", NULL, 0, "released", 8);
    server.held = NULL;
}

/* … also when they come while the answer is being worked on. */
static void test_surplus_while_working(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    client_request(&c, "POST", "/hold", "", "x");
    assert_true(reaches(&server.requests, 1));
    client_send(&c, "\r\nGET", 5);
    usleep(20000);
    assert_int_equal(atomic_load(&server.gone), 0);
    net_loop_post(server.loop, release, NULL);
    assert_response(client_response(&c, false), 200, "released");
    assert_true(client_at_end(&c));
    client_close(&c);
}

static void test_big_response(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    for (int round = 0; round < 2; round++) {
        client_request(&c, "GET", "/big", "", NULL);
        struct response r = client_response(&c, false);
        assert_int_equal(r.size, 3u << 20);
        for (size_t i = 0; i < r.size; i++)
            if (r.body[i] != (char)('a' + i % 23))
                fail_msg("byte %zu is wrong", i);
        free(r.body);
    }
    client_close(&c);
}

static void test_http_1_0(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    static const char text[] = "GET /stream HTTP/1.0\r\n\r\n";
    client_send(&c, text, sizeof text - 1);
    struct response r = client_response(&c, false);
    assert_false(response_has(&r, "chunked"));
    assert_response(r, 200, "one,two");
    assert_true(client_at_end(&c));
    client_close(&c);
}

/* ---- bodies ------------------------------------------------------------------------------------------------ */

static atomic_int buffered; /* -1, then the bytes of bodies that are still in memory; 0 is right */

static void read_buffered(void *arg)
{
    (void)arg;
    atomic_store(&buffered, server.loop->listeners->body_size == 0 ? 0 : -2);
}

static void test_body_limit(void **state)
{
    (void)state;
    char *body = malloc(LIMIT_HTTP_BODY_SIZE + 2);
    atomic_store(&buffered, -1);
    memset(body, 'z', LIMIT_HTTP_BODY_SIZE + 1);
    body[LIMIT_HTTP_BODY_SIZE + 1] = '\0';
    struct client c = client_open(server.port);
    client_request(&c, "POST", "/p", "", body); /* one byte too many */
    struct response r = client_response(&c, false);
    assert_true(response_has(&r, "Connection: close"));
    assert_non_null(strstr(r.body, "\"error\""));
    assert_response(r, 413, NULL);
    client_close(&c);
    body[LIMIT_HTTP_BODY_SIZE] = '\0';
    c = client_open(server.port);
    client_request(&c, "POST", "/p", "", body);
    r = client_response(&c, false);
    assert_int_equal(r.size, LIMIT_HTTP_BODY_SIZE);
    assert_string_equal(r.body, body);
    assert_response(r, 200, NULL);
    client_close(&c);
    net_loop_post(server.loop, read_buffered, NULL);
    assert_true(reaches(&buffered, 0));
    free(body);
}

/* A refused client that goes on sending gets its answer all the same: the connection is not reset under it. */
static void test_refusal_reaches_a_sender(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    char block[65536] = {0};
    static const char head[] = "POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n";
    client_send(&c, head, sizeof head - 1);
    for (int i = 0; i < 16; i++) {
        usleep(2000);
        assert_true(send(c.fd, block, sizeof block, MSG_NOSIGNAL) > 0);
    }
    usleep(20000);
    assert_response(client_response(&c, false), 413, NULL);
    client_close(&c);
}

static void test_lengths_that_are_none(void **state)
{
    (void)state;
    assert_int_equal(
        refused_status(
            "POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"),
        411);
    assert_int_equal(
        refused_status(
            "POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc"),
        411);
    assert_int_equal(refused_status("POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n"), 400);
    assert_int_equal(refused_status("POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3x\r\n\r\nabc"), 400);
    assert_int_equal(
        refused_status("POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\nabc"),
        400);
    assert_int_equal(
        refused_status("POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999999999\r\n\r\nabc"), 413);
    assert_int_equal(atomic_load(&server.requests), 0);
}

/* It has no body, and what follows it is no request: libwebsockets waits for a body, so the connection ends. */
static void test_post_without_length(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    static const char text[] = "POST /p HTTP/1.1\r\nHost: x\r\n\r\nGET /q HTTP/1.1\r\nHost: x\r\n\r\n";
    client_send(&c, text, sizeof text - 1);
    struct response r = client_response(&c, false);
    assert_true(response_has(&r, "Connection: close\r\n") || response_has(&r, "connection: close\r\n"));
    assert_response(r, 200, "POST /p");
    assert_true(client_at_end(&c));
    client_close(&c);
    assert_int_equal(atomic_load(&server.requests), 1);
    c = client_open(server.port); /* one that takes a while */
    client_request(&c, "POST", "/hold", "", NULL);
    assert_true(reaches(&server.requests, 2));
    client_send(&c, "x", 1);
    net_loop_post(server.loop, release, NULL);
    assert_response(client_response(&c, false), 200, "released");
    client_close(&c);
}

static void test_get_with_body(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    client_request(&c, "GET", "/a", "", "ignored or not");
    assert_response(client_response(&c, false), 200, "ignored or not");
    client_request(&c, "GET", "/a", "", NULL);
    assert_response(client_response(&c, false), 200, "GET /a");
    client_close(&c);
}

static void test_expect_continue(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    static const char head[] =
        "POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n";
    client_send(&c, head, sizeof head - 1);
    assert_true(client_wait_for(&c, "HTTP/1.1 100 Continue\r\n\r\n"));
    client_send(&c, "abc", 3);
    assert_response(client_response(&c, false), 200, "abc");
    client_close(&c);
}

static void test_body_in_pieces(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    static const char text[] = "POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n0123456789";
    for (size_t i = 0; i < sizeof text - 1; i++) {
        client_send(&c, text + i, 1);
        if (i % 8 == 0)
            usleep(500);
    }
    assert_response(client_response(&c, false), 200, "0123456789");
    client_close(&c);
}

static void test_broken_requests(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "\r\n\r\n",
        "NONSENSE\r\n\r\n",
        "GET\r\n\r\n",
        "CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\nzzz",
        ("GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
         "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nHost: x\r\n\r\n"),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not TLS"};
    for (size_t i = 0; i < TD_COUNT(texts); i++) {
        struct client c = client_open(server.port);
        client_send(&c, texts[i], strlen(texts[i]));
        shutdown(c.fd, SHUT_WR);
        client_at_end(&c);
        client_close(&c);
    }
    char *huge = malloc(70000);
    memset(huge, 'h', 70000);
    memcpy(huge, "GET /a HTTP/1.1\r\nX-H: ", 22);
    struct client c = client_open(server.port);
    client_send(&c, huge, 70000);
    assert_true(client_at_end(&c)); /* cut off, not waited for */
    client_close(&c);
    free(huge);
    assert_int_equal(atomic_load(&server.requests), 0);
    c = client_open(server.port); /* and the server is well */
    client_request(&c, "GET", "/a", "", NULL);
    assert_response(client_response(&c, false), 200, "GET /a");
    client_close(&c);
}

/* ---- limits of a listener -------------------------------------------------------------------------------------- */

static void fill_exchanges(void *arg)
{
    server.loop->listeners->exchange_count += (uint32_t)(intptr_t)arg;
}

static void fill_bodies(void *arg)
{
    server.loop->listeners->body_size += (size_t)(intptr_t)arg;
}

static void test_too_many_exchanges(void **state)
{
    (void)state;
    struct client last = client_open(server.port), more = client_open(server.port);
    net_loop_post(server.loop, fill_exchanges, (void *)(intptr_t)(LIMIT_HTTP_EXCHANGES - 1));
    client_request(&last, "GET", "/hold", "", NULL);
    assert_true(reaches(&server.requests, 1));
    client_request(&more, "GET", "/a", "", NULL);
    struct response r = client_response(&more, false);
    assert_true(response_has(&r, "Retry-After: 1"));
    assert_response(r, 503, NULL);
    net_loop_post(server.loop, release, NULL);
    assert_response(client_response(&last, false), 200, "released");
    client_request(&more, "GET", "/a", "", NULL);
    assert_response(client_response(&more, false), 200, "GET /a");
    net_loop_post(server.loop, fill_exchanges, (void *)-(intptr_t)(LIMIT_HTTP_EXCHANGES - 1));
    client_close(&last);
    client_close(&more);
}

static void test_bodies_together(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    net_loop_post(server.loop, fill_bodies, (void *)(intptr_t)(LIMIT_HTTP_BUFFERED_SIZE - 5));
    client_request(&c, "POST", "/p", "", "12345");
    assert_response(client_response(&c, false), 200, "12345");
    client_request(&c, "POST", "/p", "", "123456");
    assert_response(client_response(&c, false), 503, NULL);
    net_loop_post(server.loop, fill_bodies, (void *)-(intptr_t)(LIMIT_HTTP_BUFFERED_SIZE - 5));
    client_close(&c);
}

static void test_header_limit(void **state)
{
    (void)state;
    char headers[LIMIT_HTTP_HEADER_SIZE + 64];
    for (int more = 0; more <= 1; more++) {
        size_t size = more ? LIMIT_HTTP_HEADER_SIZE + 1
                           : LIMIT_HTTP_HEADER_SIZE - 200; /* the rest of the head counts too */
        memset(headers, 'h', sizeof headers);
        memcpy(headers, "X-Long: ", 8);
        strcpy(headers + size, "\r\n");
        struct client c = client_open(server.port);
        client_request(&c, "GET", "/a", headers, NULL);
        struct response r = client_response(&c, false);
        assert_int_equal(r.status, more ? 0 : 200);
        free(r.body);
        client_close(&c);
    }
}

/* ---- clients that leave, or are slow ------------------------------------------------------------------------- */

static void test_gone_is_reported_once(void **state)
{
    (void)state;
    static const char *const methods[] = {"GET", "POST"};
    for (int i = 0; i < 2; i++) {
        struct client c = client_open(server.port);
        client_request(&c, methods[i], "/hold", "", i ? "x" : NULL);
        assert_true(reaches(&server.requests, i + 1));
        client_close(&c);
        assert_true(reaches(&server.gone, i + 1));
    }
    struct client c = client_open(server.port);
    client_request(&c, "POST", "/abort", "", "x");
    assert_true(client_at_end(&c));
    client_close(&c);
    usleep(10000);
    assert_int_equal(atomic_load(&server.gone), 2); /* an abort is the handler's own doing */
}

static void test_open_exchange_at_the_end(void **state)
{
    (void)state;
    struct client c = client_open(server.port);
    client_request(&c, "POST", "/hold", "", "x");
    assert_true(reaches(&server.requests, 1));
    tear_down(NULL); /* net_loop_destroy reports it */
    assert_int_equal(atomic_load(&server.gone), 1);
    client_close(&c);
    set_up(NULL);
}

static int set_up_slow(void **state)
{
    (void)state;
    serve(&(struct net_listen){.bind_address = "127.0.0.1"}, 1000000);
    return 0;
}

/* Three kinds of slowness at once: a head that never ends, a body that trickles, and silence between requests. */
static void test_slow_clients(void **state)
{
    (void)state;
    struct client head = client_open(server.port), body = client_open(server.port),
                  idle = client_open(server.port);
    client_send(&head, "GET /a HTTP/1.1\r\nX: ", 20);
    client_request(&idle, "GET", "/a", "", NULL);
    assert_response(client_response(&idle, false), 200, "GET /a");
    static const char post[] = "POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n";
    client_send(&body, post, sizeof post - 1);
    struct pollfd answer = {.fd = body.fd, .events = POLLIN};
    int bytes = 0;
    /* A byte each 100 ms: time is counted from the start, not from the last byte. */
    while (poll(&answer, 1, 100) == 0) {
        assert_true(bytes++ < 100);
        client_send(&body, "b", 1);
        client_send(&head, "y", 1);
    }
    struct response r = client_response(&body, false);
    assert_non_null(strstr(r.body, "request_timeout"));
    assert_response(r, 408, NULL);
    assert_true(client_at_end(&head));
    assert_true(client_at_end(&idle));
    client_close(&head);
    client_close(&body);
    client_close(&idle);
    assert_int_equal(atomic_load(&server.requests), 1);
}

/* ---- Host, Origin, content type ------------------------------------------------------------------------------- */

static int set_up_edge(void **state)
{
    (void)state;
    static const char *const origins[] = {"http://app.example", NULL};
    serve(&(struct net_listen){.bind_address = "127.0.0.1",
                               .loopback_hosts_only = true,
                               .origins_allowed = origins},
          0);
    return 0;
}

static int status_with(const char *method, const char *headers, const char *body)
{
    struct client c = client_open(server.port);
    client_request(&c, method, "/a", headers, body);
    struct response r = client_response(&c, false);
    free(r.body);
    client_close(&c);
    return r.status;
}

static void test_host(void **state)
{
    (void)state;
    assert_int_equal(status_with("GET", "Host: localhost\r\n", NULL), 200);
    assert_int_equal(status_with("GET", "Host: LocalHost:8081\r\n", NULL), 200);
    assert_int_equal(status_with("GET", "Host: 127.0.0.1:1\r\n", NULL), 200);
    assert_int_equal(status_with("GET", "Host: [::1]:8081\r\n", NULL), 200);
    assert_int_equal(status_with("GET", "Host: evil.example\r\n", NULL), 403);
    assert_int_equal(status_with("GET", "Host: localhost.evil.example\r\n", NULL), 403);
    assert_int_equal(status_with("GET", "Host: 127.0.0.1.evil.example:80\r\n", NULL), 403);
    assert_int_equal(status_with("GET", "Host: localhost:80x\r\n", NULL), 403);
    assert_int_equal(status_with("GET", "Host: 127.0.0.2\r\n", NULL), 403);
    assert_int_equal(refused_status("GET /a HTTP/1.0\r\n\r\n"), 403); /* none at all */
}

static void test_origin(void **state)
{
    (void)state;
    assert_int_equal(status_with("GET", "Origin: http://evil.example\r\n", NULL), 403);
    assert_int_equal(status_with("GET", "Origin: null\r\n", NULL), 403);
    assert_int_equal(status_with("OPTIONS", "Origin: http://evil.example\r\n", NULL), 403);
    struct client c = client_open(server.port);
    client_request(&c, "OPTIONS", "/a",
                   "Origin: http://app.example\r\nAccess-Control-Request-Method: POST\r\n", NULL);
    struct response r = client_response(&c, false);
    assert_true(response_has(&r, "Access-Control-Allow-Origin: http://app.example\r\n"));
    assert_true(response_has(&r, "Access-Control-Allow-Headers: Authorization, Content-Type"));
    assert_response(r, 204, "");
    client_request(&c, "POST", "/a", "Origin: http://app.example\r\nContent-Type: application/json\r\n",
                   "{}");
    r = client_response(&c, false);
    assert_true(response_has(&r, "Access-Control-Allow-Origin: http://app.example\r\n"));
    assert_true(response_has(&r, "Vary: Origin\r\n"));
    assert_true(response_has(
        &r, "Access-Control-Expose-Headers: X-Conversation-Id, X-Conversation-Kept, Retry-After\r\n"));
    assert_false(response_has(&r, "Access-Control-Allow-Credentials"));
    assert_response(r, 200, "{}");
    client_close(&c);
}

static void test_origin_without_list(void **state)
{
    (void)state;
    assert_int_equal(status_with("GET", "Origin: http://localhost\r\n", NULL), 403);
    assert_int_equal(status_with("GET", "", NULL), 200);
}

/* ---- listeners ---------------------------------------------------------------------------------------------- */

static void test_unix_socket(void **state)
{
    (void)state;
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/tmp/td-net-%d.sock", (int)getpid());
    serve(&(struct net_listen){.unix_path = path, .loopback_hosts_only = true}, 0);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    struct client c = client_open_unix(path);
    client_request(&c, "POST", "/u", "Host: anything\r\n", "over unix"); /* no browser comes this way */
    assert_response(client_response(&c, false), 200, "over unix");
    assert_string_equal(server.peer, "unix");
    client_close(&c);
    struct td_error err = {0};
    struct net_loop *other = net_loop_create(&err);
    assert_int_equal(net_listen(other, &(struct net_listen){.unix_path = path}, NULL, &err), -TD_ERR_EXISTS);
    assert_non_null(strstr(err.text, "another program"));
    net_loop_destroy(other);
    tear_down(NULL);
    assert_int_not_equal(stat(path, &st), 0); /* gone with the loop */
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    close(fd);
    other = net_loop_create(&err);
    assert_int_equal(net_listen(other, &(struct net_listen){.unix_path = path}, NULL, &err), -TD_ERR_EXISTS);
    assert_int_equal(stat(path, &st), 0); /* a file that is no socket is not touched */
    unlink(path);
    int left = socket(AF_UNIX, SOCK_STREAM, 0); /* one whose program was killed is taken over */
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%s", path);
    assert_int_equal(bind(left, (struct sockaddr *)&at, sizeof at), 0);
    close(left);
    assert_int_equal(net_listen(other, &(struct net_listen){.unix_path = path}, NULL, &err), 0);
    net_loop_destroy(other);
    other = net_loop_create(&err);
    assert_int_equal(net_listen(other, &(struct net_listen){.unix_path = "/nonexistent/socket"}, NULL, &err),
                     -TD_ERR_IO);
    assert_non_null(strstr(err.text, "No such file"));
    net_loop_destroy(other);
}

static void test_listen_errors(void **state)
{
    (void)state;
    struct td_error err = {0};
    struct net_loop *l = net_loop_create(&err);
    struct net_listen config = {.bind_address = "127.0.0.1", .port = server.port};
    assert_int_equal(net_listen(l, &config, NULL, &err), -TD_ERR_EXISTS);
    assert_non_null(strstr(err.text, "another program uses it"));
    assert_non_null(strstr(err.text, "--listen-port"));
    config = (struct net_listen){.bind_address = "nowhere", .port = 0};
    assert_int_equal(net_listen(l, &config, NULL, &err), -TD_ERR_ARG);
    config = (struct net_listen){.bind_address = "192.0.2.1", .port = 0}; /* not ours */
    assert_int_equal(net_listen(l, &config, NULL, &err), -TD_ERR_IO);
    config = (struct net_listen){
        .bind_address = "127.0.0.1", .cert_path = "/nonexistent/a.crt", .key_path = "/nonexistent/a.key"};
    assert_int_equal(net_listen(l, &config, NULL, &err), -TD_ERR_NOTFOUND);
    assert_non_null(strstr(err.text, "/nonexistent/a.crt"));
    assert_non_null(strstr(err.text, "deploy/certs.sh"));
    config.key_path = NULL;
    assert_int_equal(net_listen(l, &config, NULL, &err), -TD_ERR_ARG);
    uint16_t port;
    config = (struct net_listen){.bind_address = "::1"};
    assert_int_equal(net_listen(l, &config, &port, &err), 0);
    assert_true(port != 0);
    config = (struct net_listen){.bind_address = "127.0.0.1", .port = port};
    assert_int_equal(net_listen(l, &config, NULL, &err), -TD_ERR_EXISTS);
    assert_non_null(strstr(err.text, "already listens"));
    net_loop_destroy(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_keep_alive, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_paths_and_query, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_pipelined_gets, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_pipelined_body, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_surplus_after_body, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_surplus_while_working, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_big_response, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_http_1_0, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_body_limit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_refusal_reaches_a_sender, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_lengths_that_are_none, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_post_without_length, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_get_with_body, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_expect_continue, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_body_in_pieces, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_broken_requests, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_too_many_exchanges, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_bodies_together, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_header_limit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_gone_is_reported_once, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_open_exchange_at_the_end, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_slow_clients, set_up_slow, tear_down),
        cmocka_unit_test_setup_teardown(test_host, set_up_edge, tear_down),
        cmocka_unit_test_setup_teardown(test_origin, set_up_edge, tear_down),
        cmocka_unit_test_setup_teardown(test_origin_without_list, set_up, tear_down),
        cmocka_unit_test(test_unix_socket),
        cmocka_unit_test_setup_teardown(test_listen_errors, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
