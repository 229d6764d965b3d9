/* WebSocket between two real loops: messages of every size, the reasons for which a connection is refused or ends, and TLS with
 * authorities, names and client certificates that are right and wrong. Certificates come from deploy/certs.sh. */
#include "net_rig.h"
#include "protocol/ws_internal.h"
#include <signal.h>
#include <netinet/tcp.h>
#include <sys/wait.h>

/* ---- peers: echo server, scripted client ----------------------------------------------------------------------- */

struct message {
    struct message *next;
    size_t size;
    uint8_t data[];
};

struct peer { /* one end of a connection */
    struct ws_conn *conn;
    struct message *out;
    bool echo;
    atomic_int opened, closed, failed, messages, parts;
    atomic_size_t last_size, total_size;
    atomic_uint last_crc;
    char why[512], from[64];
    int refuse;        /* on_open's answer */
    int64_t next_code; /* negative: what `next` answers */
};

static struct net {
    struct net_loop *loop;
    pthread_t thread;
    uint16_t port;
    struct peer server, client;
} net;

static void peer_send(struct peer *p, const void *data, size_t size)
{
    struct message *m = malloc(sizeof *m + size), **end = &p->out;
    *m = (struct message){.size = size};
    memcpy(m->data, data, size);
    while (*end)
        end = &(*end)->next;
    *end = m;
    ws_want_write(p->conn);
}

static int on_open(void *ctx, struct ws_conn *c, const char *from, void **user)
{
    struct peer *p = ctx;
    snprintf(p->from, sizeof p->from, "%s", from);
    int lowat = 0;
    socklen_t size = sizeof lowat;
    getsockopt((int)lws_get_socket_fd(c->wsi), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lowat, &size);
    assert_int_equal(lowat, 16384); /* or urgent frames would wait behind megabytes of bulk in the kernel */
    if (p->refuse)
        return p->refuse;
    p->conn = c;
    *user = p;
    if (p->out || p->next_code)
        ws_want_write(c);
    atomic_fetch_add(&p->opened, 1);
    return 0;
}

static void on_message(void *user, const void *data, size_t size)
{
    struct peer *p = user;
    atomic_store(&p->last_size, size);
    atomic_store(&p->last_crc, crc32c(0, data, size));
    atomic_fetch_add(&p->total_size, size);
    if (p->echo)
        peer_send(p, data, size);
    if (size == 5 && memcmp(data, "close", 5) == 0)
        ws_close(p->conn, "asked to");
    atomic_fetch_add(&p->messages, 1);
}

static int64_t next(void *user, uint8_t *dst, size_t capacity)
{
    struct peer *p = user;
    if (p->next_code < 0)
        return p->next_code;
    struct message *m = p->out;
    if (!m)
        return 0;
    assert_true(m->size <= capacity);
    int64_t size = (int64_t)m->size;
    memcpy(dst, m->data, m->size);
    p->out = m->next;
    free(m);
    return size;
}

static void on_closed(void *user, const char *why)
{
    struct peer *p = user;
    snprintf(p->why, sizeof p->why, "%s", why);
    p->conn = NULL;
    atomic_fetch_add(&p->closed, 1);
}

static void on_failed(void *ctx, const char *why)
{
    struct peer *p = ctx;
    snprintf(p->why, sizeof p->why, "%s", why);
    atomic_fetch_add(&p->failed, 1);
}

static void on_part(void *user)
{
    atomic_fetch_add(&((struct peer *)user)->parts, 1);
}

static struct ws_handler server_handler = {on_open, on_message, next, on_closed, NULL, &net.server, on_part};
static struct ws_handler client_handler = {on_open,   on_message,  next,   on_closed,
                                           on_failed, &net.client, on_part};

/* ---- the loop ---------------------------------------------------------------------------------------------- */

#define TEST_DEPLOY TEST_DATA "/../../deploy"

static char certs[64]; /* folder of certificates */

static char *cert(const char *name)
{
    static char paths[8][128];
    static int n;
    n = (n + 1) % 8;
    snprintf(paths[n], sizeof paths[n], "%s/%s", certs, name);
    return paths[n];
}

/* The server alone; the client connects on the same loop, later. */
static void serve(const struct net_listen *config)
{
    struct net_listen l = *config;
    net = (struct net){.loop = loop_make()};
    net.server.echo = true;
    l.bind_address = "127.0.0.1";
    l.ws = &server_handler;
    net.port = loop_listen(net.loop, &l);
    net.thread = loop_begin(net.loop);
}

static void stop(void)
{
    loop_end(net.loop, net.thread);
    while (net.client.out || net.server.out) {
        struct message **m = net.client.out ? &net.client.out : &net.server.out, *rest = (*m)->next;
        free(*m);
        *m = rest;
    }
}

static struct net_connect target;
static atomic_int connect_code;

static void do_connect(void *arg)
{
    (void)arg;
    struct td_error err = {0};
    int code = ws_connect(net.loop, &target, &net.client.conn, &err);
    if (code)
        snprintf(net.client.why, sizeof net.client.why, "%s", err.text);
    atomic_store(&connect_code, code ? code : 1);
}

static void start_connecting(const struct net_connect *config)
{
    target = *config;
    target.ws = &client_handler;
    target.port = config->port ? config->port : net.port;
    target.host = config->host ? config->host : "localhost";
    atomic_store(&connect_code, 0);
    net_loop_post(net.loop, do_connect, NULL);
    for (int i = 0; i < CLIENT_WAIT_MS && !atomic_load(&connect_code); i++)
        usleep(1000);
}

static void connect_and_open(const struct net_connect *config)
{
    start_connecting(config);
    if (!reaches(&net.client.opened, 1))
        fail_msg("not open: %s", net.client.why);
}

static void connect_and_fail(const struct net_connect *config, const char *expected)
{
    start_connecting(config);
    assert_true(reaches(&net.client.failed, 1));
    if (!strstr(net.client.why, expected))
        fail_msg("'%s' does not say '%s'", net.client.why, expected);
    assert_non_null(strstr(net.client.why, "cannot connect to"));
    assert_null(strchr(net.client.why, '\n'));
    assert_int_equal(atomic_load(&net.client.opened), 0);
    assert_int_equal(atomic_load(&net.server.opened), 0);
    assert_int_equal(atomic_load(&net.client.closed), 0);
}

struct outgoing {
    struct peer *peer;
    const void *data;
    size_t size;
};

static void do_send(void *arg)
{
    struct outgoing *o = arg;
    peer_send(o->peer, o->data, o->size);
    free(o);
}

static void send_from(struct peer *p, const void *data, size_t size)
{
    struct outgoing *o = malloc(sizeof *o);
    *o = (struct outgoing){p, data, size};
    net_loop_post(net.loop, do_send, o);
}

static void do_close(void *arg)
{
    struct peer *p = arg;
    ws_close(p->conn, "enough");
}

/* ---- messages ---------------------------------------------------------------------------------------------- */

static uint8_t *random_bytes(size_t size)
{
    uint8_t *data = malloc(size);
    uint64_t x = size * 0x9e3779b97f4a7c15u + 1;
    for (size_t i = 0; i < size; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        data[i] = (uint8_t)x;
    }
    return data;
}

static void exchange_messages(void)
{
    static const size_t sizes[] = {
        1, 125, 126, 65535, 65536, 65537, 300000, LIMIT_FRAME_SIZE - 1, LIMIT_FRAME_SIZE};
    for (size_t i = 0; i < TD_COUNT(sizes); i++) {
        uint8_t *data = random_bytes(sizes[i]);
        send_from(&net.client, data, sizes[i]);
        assert_true(reaches(&net.client.messages, (int)i + 1));
        assert_int_equal(atomic_load(&net.server.last_size), sizes[i]);
        assert_int_equal(atomic_load(&net.server.last_crc), crc32c(0, data, sizes[i]));
        assert_int_equal(atomic_load(&net.client.last_size), sizes[i]);
        assert_int_equal(atomic_load(&net.client.last_crc), crc32c(0, data, sizes[i]));
        free(data);
    }
}

static void test_plain(void **state)
{
    (void)state;
    serve(&(struct net_listen){0});
    connect_and_open(&(struct net_connect){0});
    assert_string_equal(net.server.from, "127.0.0.1");
    exchange_messages();
    uint8_t *data = random_bytes(1000); /* many small ones keep their borders */
    for (int i = 0; i < 500; i++)
        send_from(&net.client, data, 1000);
    assert_true(reaches(&net.client.messages, 509));
    assert_int_equal(atomic_load(&net.client.last_crc), crc32c(0, data, 1000));
    net_loop_post(net.loop, do_close, &net.client);
    assert_true(reaches(&net.client.closed, 1));
    assert_true(reaches(&net.server.closed, 1));
    assert_string_equal(net.client.why, "enough");
    assert_non_null(strstr(net.server.why, "closed by the peer"));
    stop();
    free(data);
}

static void test_closed_by_server(void **state)
{
    (void)state;
    serve(&(struct net_listen){0});
    connect_and_open(&(struct net_connect){0});
    send_from(&net.client, "close", 5); /* the server closes inside on_message */
    assert_true(reaches(&net.client.closed, 1));
    assert_true(reaches(&net.server.closed, 1));
    assert_string_equal(net.server.why, "asked to");
    stop();
}

static atomic_bool no_random;
int __real_crypto_random(void *out, size_t size);
int __wrap_crypto_random(void *out, size_t size);

int __wrap_crypto_random(void *out, size_t size)
{
    return atomic_load(&no_random) ? -TD_ERR_CRYPTO : __real_crypto_random(out, size);
}

static void test_closed_by_client(void **state)
{
    (void)state;
    serve(&(struct net_listen){0});
    net.client.next_code = -TD_ERR_PROTOCOL;
    connect_and_open(&(struct net_connect){0});
    assert_true(reaches(&net.client.closed, 1));
    assert_true(reaches(&net.server.closed, 1));
    stop();
    serve(&(struct net_listen){0});
    connect_and_open(&(struct net_connect){0});
    atomic_store(&no_random, true); /* no mask, no message */
    send_from(&net.client, "hello", 5);
    assert_true(reaches(&net.client.closed, 1) && reaches(&net.server.closed, 1));
    atomic_store(&no_random, false);
    assert_int_equal(atomic_load(&net.server.messages), 0);
    stop();
}

static void test_loop_destroyed_while_open(void **state)
{
    (void)state;
    serve(&(struct net_listen){0});
    connect_and_open(&(struct net_connect){0});
    stop();
    assert_int_equal(atomic_load(&net.client.closed), 1);
    assert_int_equal(atomic_load(&net.server.closed), 1);
}

static void test_loop_destroyed_while_connecting(void **state)
{
    (void)state;
    serve(&(struct net_listen){0});
    net_loop_stop(net.loop);
    pthread_join(net.thread, NULL);
    target = (struct net_connect){.host = "localhost", .port = net.port, .ws = &client_handler};
    do_connect(NULL);
    net_loop_destroy(net.loop);
    assert_int_equal(atomic_load(&net.client.failed), 1);
    assert_non_null(strstr(net.client.why, "closing"));
}

static void test_closed_before_open(void **state)
{
    (void)state;
    serve(&(struct net_listen){0});
    int fd = socket(AF_INET, SOCK_STREAM, 0); /* listens, never answers */
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    assert_int_equal(bind(fd, (struct sockaddr *)&at, size) || listen(fd, 1) ||
                         getsockname(fd, (struct sockaddr *)&at, &size),
                     0);
    start_connecting(&(struct net_connect){.port = ntohs(at.sin_port)});
    usleep(20000);
    net_loop_post(net.loop, do_close, &net.client);
    assert_true(reaches(&net.client.failed, 1));
    assert_non_null(strstr(net.client.why, "enough"));
    net.loop->connect_timeout_us = 100000;
    start_connecting(&(struct net_connect){.port = ntohs(at.sin_port)});
    assert_true(reaches(&net.client.failed, 2));
    assert_non_null(strstr(net.client.why, "timed out"));
    close(fd);
    stop();
}

/* ---- hand-made WebSocket, to send what our client would not --------------------------------------------------------- */

static struct client raw_upgrade(const char *path, const char *headers)
{
    struct client c = client_open(net.port);
    char text[1024];
    snprintf(text, sizeof text,
             "GET %s HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: "
             "Upgrade\r\nSec-WebSocket-Version: 13\r\n"
             "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n%s\r\n",
             path, headers);
    client_send(&c, text, strlen(text));
    return c;
}

static int upgrade_status(const char *path, const char *headers)
{
    struct client c = raw_upgrade(path, headers);
    int status = client_wait_for(&c, "\r\n\r\n") ? atoi(c.data + 9) : 0;
    client_close(&c);
    return status;
}

#define OURS "Sec-WebSocket-Protocol: tandem.v1\r\n"

static void test_upgrades(void **state)
{
    (void)state;
    static const char *const origins[] = {"http://app.example", NULL};
    serve(&(struct net_listen){.loopback_hosts_only = true, .origins_allowed = origins});
    assert_int_equal(upgrade_status("/tandem", OURS), 101);
    assert_int_equal(upgrade_status("/tandem", OURS "Origin: http://app.example\r\n"), 101);
    assert_int_equal(upgrade_status("/other", OURS), 404);
    assert_int_equal(upgrade_status("/tandem", OURS "Origin: http://evil.example\r\n"), 403);
    assert_int_equal(upgrade_status("/tandem", ""), 400);
    assert_int_not_equal(upgrade_status("/tandem", "Sec-WebSocket-Protocol: chat\r\n"), 101);
    net.server.refuse = 1;
    assert_true(reaches(&net.server.opened, 2));
    struct client c = raw_upgrade("/tandem", OURS);
    assert_true(client_at_end(&c)); /* the owner refused */
    client_close(&c);
    assert_int_equal(atomic_load(&net.server.opened), 2);
    stop();
}

static void raw_frame(struct client *c, uint8_t first, const void *data, uint64_t claimed, size_t size)
{
    uint8_t head[14] = {first, 0x80 | 127};
    for (int i = 0; i < 8; i++)
        head[2 + i] = (uint8_t)(claimed >> (56 - 8 * i)); /* the mask is zero: the data goes as it is */
    client_send(c, head, sizeof head);
    client_send(c, data, size);
}

static void test_messages_that_are_refused(void **state)
{
    (void)state;
    serve(&(struct net_listen){0});
    uint8_t *data = random_bytes(LIMIT_FRAME_SIZE + 1);
    struct client c = raw_upgrade("/tandem", OURS);
    assert_true(reaches(&net.server.opened, 1));
    raw_frame(&c, 0x82, data, LIMIT_FRAME_SIZE + 1, LIMIT_FRAME_SIZE + 1); /* one byte too large */
    assert_true(reaches(&net.server.closed, 1));
    assert_non_null(strstr(net.server.why, "too large"));
    client_close(&c);
    c = raw_upgrade("/tandem", OURS);
    assert_true(reaches(&net.server.opened, 2));
    raw_frame(&c, 0x81, "text", 4, 4);
    assert_true(reaches(&net.server.closed, 2));
    assert_non_null(strstr(net.server.why, "text"));
    client_close(&c);
    c = raw_upgrade("/tandem", OURS); /* too large over fragments */
    assert_true(reaches(&net.server.opened, 3));
    for (int i = 0; i < 17 && atomic_load(&net.server.closed) < 3; i++)
        raw_frame(&c, i ? 0x00 : 0x02, data, 65536, 65536);
    assert_true(reaches(&net.server.closed, 3));
    assert_non_null(strstr(net.server.why, "too large"));
    client_close(&c);
    assert_int_equal(atomic_load(&net.server.messages), 0);
    c = raw_upgrade("/tandem", OURS); /* a good one in fragments */
    assert_true(reaches(&net.server.opened, 4));
    int parts = atomic_load(&net.server.parts);
    raw_frame(&c, 0x02, data, 70000, 70000);
    assert_true(reaches(&net.server.parts, parts + 1)); /* it is heard before it is whole */
    raw_frame(&c, 0x00, data + 70000, 0, 0);
    raw_frame(&c, 0x80, data + 70000, 30000, 30000);
    assert_true(reaches(&net.server.messages, 1));
    assert_int_equal(atomic_load(&net.server.last_crc), crc32c(0, data, 100000));
    raw_frame(&c, 0x82, data, 0, 0); /* empty ones, whole and in fragments */
    raw_frame(&c, 0x02, data, 0, 0);
    raw_frame(&c, 0x80, data, 0, 0);
    assert_true(reaches(&net.server.messages, 3));
    assert_int_equal(atomic_load(&net.server.last_size), 0);
    client_close(&c); /* without a word */
    assert_true(reaches(&net.server.closed, 4));
    assert_string_equal(net.server.why, "the connection was lost");
    stop();
    free(data);
}

/* ---- connecting ------------------------------------------------------------------------------------------------ */

static void test_connect_errors(void **state)
{
    (void)state;
    serve(&(struct net_listen){0});
    struct client probe = client_open(net.port);
    client_close(&probe);
    uint16_t port = net.port;
    stop();
    serve(&(struct net_listen){0});
    connect_and_fail(&(struct net_connect){.port = port == net.port ? 1 : port}, "refused");
    stop();
    serve(&(struct net_listen){0});
    connect_and_fail(&(struct net_connect){.path = "/elsewhere"}, "does not serve Tandem here");
    stop();
    serve(&(struct net_listen){0});
    connect_and_fail(
        &(struct net_connect){.host =
                                  "a-label-of-a-name-that-is-longer-than-sixty-three-characters-is-no-name"},
        "name");
    start_connecting(&(struct net_connect){.host = "::1"});
    assert_int_equal(atomic_load(&connect_code), -TD_ERR_ARG);
    start_connecting(&(struct net_connect){.tls = true, .ca_path = "/nonexistent/ca.crt"});
    assert_int_equal(atomic_load(&connect_code), -TD_ERR_NOTFOUND);
    assert_non_null(strstr(net.client.why, "/nonexistent/ca.crt"));
    stop();
}

/* Nothing listens at 127.0.0.2. */
static void do_connect_by_turns(void *arg)
{
    do_connect(arg);
    strcpy(net.client.conn->addresses[1], strcmp(target.host, "127.0.0.2") ? "127.0.0.2" : "127.0.0.1");
    net.client.conn->address_count = 2;
}

static void connect_by_turns(const char *first, const char *ca)
{
    target = (struct net_connect){
        .host = first, .port = net.port, .tls = ca, .ca_path = ca, .ws = &client_handler};
    net_loop_post(net.loop, do_connect_by_turns, NULL);
}

static void test_next_address(void **state)
{
    (void)state;
    serve(&(struct net_listen){0});
    connect_by_turns("127.0.0.2", NULL);
    assert_true(reaches(&net.client.opened, 1));
    assert_int_equal(atomic_load(&net.client.failed), 0);
    stop();
}

/* ---- TLS ------------------------------------------------------------------------------------------------------ */

static void serve_tls(bool client_certificates)
{
    serve(&(struct net_listen){.cert_path = cert("server.crt"),
                               .key_path = cert("server.key"),
                               .client_ca_path = client_certificates ? cert("ca.crt") : NULL});
}

static void test_tls(void **state)
{
    (void)state;
    serve_tls(false);
    connect_and_open(&(struct net_connect){.tls = true, .ca_path = cert("ca.crt")});
    exchange_messages();
    stop();
}

static void test_tls_names_and_addresses(void **state)
{
    (void)state;
    serve_tls(false);
    connect_and_open(&(struct net_connect){.host = "127.0.0.1", .tls = true, .ca_path = cert("ca.crt")});
    stop();
    serve(&(struct net_listen){.cert_path = cert("stranger/server.crt"),
                               .key_path = cert("stranger/server.key")});
    connect_and_fail(
        &(struct net_connect){.host = "127.0.0.1", .tls = true, .ca_path = cert("stranger/ca.crt")},
        "another name");
    stop();
    serve(&(struct net_listen){.cert_path = cert("stranger/server.crt"),
                               .key_path = cert("stranger/server.key")});
    connect_and_fail(&(struct net_connect){.tls = true, .ca_path = cert("stranger/ca.crt")}, "another name");
    stop();
}

static void test_tls_wrong_authority(void **state)
{
    (void)state;
    serve_tls(false);
    connect_and_fail(&(struct net_connect){.tls = true, .ca_path = cert("stranger/ca.crt")},
                     "is not trusted");
    stop();
    serve_tls(false); /* the address that answers says why, not the next one */
    connect_by_turns("127.0.0.1", cert("stranger/ca.crt"));
    assert_true(reaches(&net.client.failed, 1));
    assert_non_null(strstr(net.client.why, "--ca"));
    stop();
}

/* The reason says since when, and what to do; nobody comes in. */
static void test_tls_out_of_date(void **state)
{
    (void)state;
    static const char *const cases[][4] = {
        {"dates/expired.crt", "ca.crt", "expired on 2021-02-03 04:05 UTC", "deploy/certs.sh"},
        {"dates/future.crt", "ca.crt", "is valid from 2120-02-03 04:05 UTC on", "set the clock"},
        {"dates/orphan.crt", "dates/old.crt", "the authority", "deploy/certs.sh --force"},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        serve(&(struct net_listen){.cert_path = cert(cases[i][0]), .key_path = cert("server.key")});
        connect_and_fail(&(struct net_connect){.tls = true, .ca_path = cert(cases[i][1])}, cases[i][2]);
        assert_non_null(strstr(net.client.why, cases[i][3]));
        assert_int_equal(atomic_load(&net.server.opened) + atomic_load(&net.client.opened), 0);
        stop();
    }
}

static void test_tls_to_plain_server(void **state)
{
    (void)state;
    serve(&(struct net_listen){0});
    connect_and_fail(&(struct net_connect){.tls = true, .ca_path = cert("ca.crt")}, "TLS");
    stop();
    serve_tls(false);
    connect_and_fail(&(struct net_connect){0}, "during the handshake");
    stop();
}

static void test_client_certificates(void **state)
{
    (void)state;
    serve_tls(true);
    connect_and_open(&(struct net_connect){.tls = true,
                                           .ca_path = cert("ca.crt"),
                                           .cert_path = cert("client-alice.crt"),
                                           .key_path = cert("client-alice.key")});
    send_from(&net.client, "hello", 5);
    assert_true(reaches(&net.client.messages, 1));
    stop();
    serve_tls(true);
    connect_and_fail(&(struct net_connect){.tls = true, .ca_path = cert("ca.crt")}, "client certificate");
    stop();
    serve_tls(true);
    connect_and_fail(&(struct net_connect){.tls = true,
                                           .ca_path = cert("ca.crt"),
                                           .cert_path = cert("stranger/client-bob.crt"),
                                           .key_path = cert("stranger/client-bob.key")},
                     "client certificate");
    stop();
}

/* Without a CA of one's own the system's are taken, and do not know ours. */
static void test_system_authorities(void **state)
{
    (void)state;
    if (access("/etc/ssl/certs/ca-certificates.crt", R_OK) != 0)
        skip();
    serve_tls(false);
    connect_and_fail(&(struct net_connect){.tls = true}, "is not trusted");
    stop();
}

static void test_certificate_errors(void **state)
{
    (void)state;
    struct td_error err = {0};
    struct net_loop *l = net_loop_create(&err);
    struct net_listen config = {
        .bind_address = "127.0.0.1", .cert_path = cert("server.crt"), .key_path = cert("ca.key")};
    assert_int_equal(net_listen(l, &config, NULL, &err), -TD_ERR_MISMATCH);
    config.key_path = cert("server.crt");
    assert_int_equal(net_listen(l, &config, NULL, &err), -TD_ERR_FORMAT);
    config.cert_path = cert("server.key"), config.key_path = cert("server.key");
    assert_int_equal(net_listen(l, &config, NULL, &err), -TD_ERR_FORMAT);
    assert_non_null(strstr(err.text, "deploy/certs.sh"));
    net_loop_destroy(l);
}

/* Ask with openssl; true if the server let it in: an HTTP answer came. */
static bool openssl_gets_in(const char *options)
{
    char command[1024], answer[256] = "";
    snprintf(command, sizeof command,
             "printf 'GET /x HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' | "
             "OPENSSL_CONF=/dev/null timeout 5 openssl s_client "
             "-connect 127.0.0.1:%u -CAfile %s -ign_eof -quiet %s 2>/dev/null",
             net.port, cert("ca.crt"), options);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    size_t n = fread(answer, 1, sizeof answer - 1, f);
    answer[n] = '\0';
    pclose(f);
    return strncmp(answer, "HTTP/1.1", 8) == 0;
}

static void test_openssl(void **state)
{
    (void)state;
    char with[512];
    serve_tls(true);
    snprintf(with, sizeof with, "-servername localhost -cert %s -key %s", cert("client-alice.crt"),
             cert("client-alice.key"));
    assert_true(openssl_gets_in(with)); /* the control */
    snprintf(with, sizeof with, "-noservername -cert %s -key %s", cert("client-alice.crt"),
             cert("client-alice.key"));
    assert_true(openssl_gets_in(with));
    assert_false(openssl_gets_in("-noservername"));
    assert_false(openssl_gets_in("-servername localhost"));
    snprintf(with, sizeof with, "-noservername -cert %s -key %s", cert("stranger/client-bob.crt"),
             cert("stranger/client-bob.key"));
    assert_false(openssl_gets_in(with));
    stop();
    serve_tls(false);
    assert_true(openssl_gets_in("-tls1_2"));
    assert_true(openssl_gets_in("-tls1_2 -cipher ECDHE-ECDSA-AES128-GCM-SHA256"));
    assert_false(openssl_gets_in("-tls1_1 -cipher DEFAULT@SECLEVEL=0"));
    assert_false(openssl_gets_in("-tls1_2 -cipher AES128-SHA"));
    assert_false(openssl_gets_in("-tls1_2 -cipher ECDHE-ECDSA-AES128-SHA"));
    stop();
}

/* ---- HTTPS ---------------------------------------------------------------------------------------------------- */

static atomic_int requests, gone;

static void on_request(void *ctx, struct http_exchange *x, const struct http_request *r)
{
    (void)ctx, (void)r;
    http_stream_begin(x, 200, "text/plain", NULL, 0);
    atomic_fetch_add(&requests, 1);
}

static void on_client_gone(void *ctx, struct http_exchange *x)
{
    (void)ctx, (void)x;
    atomic_fetch_add(&gone, 1);
}

/* A client that leaves in the middle of a reply is noticed at once behind TLS too. */
static void test_https_client_gone(void **state)
{
    (void)state;
    static const struct http_handler handler = {on_request, on_client_gone, NULL};
    char command[512];
    atomic_store(&requests, 0), atomic_store(&gone, 0);
    serve(&(struct net_listen){
        .cert_path = cert("server.crt"), .key_path = cert("server.key"), .http = &handler});
    snprintf(command, sizeof command,
             "printf 'POST /x HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: 1\\r\\n\\r\\nx' | "
             "OPENSSL_CONF=/dev/null "
             "openssl s_client -connect 127.0.0.1:%u -quiet -ign_eof >/dev/null 2>&1 & echo $!",
             net.port);
    FILE *f = popen(command, "r");
    int client = 0;
    assert_int_equal(fscanf(f, "%d", &client), 1);
    pclose(f);
    bool came = reaches(&requests, 1);
    int gone_before = atomic_load(&gone);
    kill(client, SIGKILL); /* once its request is here, however long that took */
    assert_true(came);
    assert_int_equal(gone_before, 0);
    assert_true(reaches(&gone, 1));
    stop();
}

/* ---- set-up ---------------------------------------------------------------------------------------------------- */

static void shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void shell(const char *format, ...)
{
    char command[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    if (system(command) != 0)
        fail_msg("failed: %s", command);
}

static int make_certificates(void **state)
{
    (void)state;
    snprintf(certs, sizeof certs, "/tmp/td-certs-%d", (int)getpid());
    shell("'%s/certs.sh' %s --client alice >/dev/null", TEST_DEPLOY, certs);
    /* Another authority, whose server answers to another name than localhost. */
    shell("'%s/certs.sh' %s/stranger --client bob >/dev/null && cd %s/stranger && export "
          "OPENSSL_CONF=/dev/null && "
          "openssl req -new -key server.key -subj /CN=other.example -out s.csr 2>/dev/null && "
          "printf 'subjectAltName=DNS:other.example\\n' >s.ext && "
          "openssl x509 -req -in s.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 9 -extfile s.ext -out "
          "server.crt 2>/dev/null",
          TEST_DEPLOY, certs, certs);
    shell("'%s/../tests/dated_certs.sh' %s", TEST_DEPLOY, certs);
    return 0;
}

static int remove_certificates(void **state)
{
    (void)state;
    shell("rm -rf %s", certs);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_closed_by_server),
        cmocka_unit_test(test_closed_by_client),
        cmocka_unit_test(test_loop_destroyed_while_open),
        cmocka_unit_test(test_loop_destroyed_while_connecting),
        cmocka_unit_test(test_closed_before_open),
        cmocka_unit_test(test_upgrades),
        cmocka_unit_test(test_messages_that_are_refused),
        cmocka_unit_test(test_connect_errors),
        cmocka_unit_test(test_next_address),
        cmocka_unit_test(test_tls),
        cmocka_unit_test(test_tls_names_and_addresses),
        cmocka_unit_test(test_tls_wrong_authority),
        cmocka_unit_test(test_tls_out_of_date),
        cmocka_unit_test(test_tls_to_plain_server),
        cmocka_unit_test(test_client_certificates),
        cmocka_unit_test(test_certificate_errors),
        cmocka_unit_test(test_openssl),
        cmocka_unit_test(test_https_client_gone),
        cmocka_unit_test(test_system_authorities),
    };
    return cmocka_run_group_tests(tests, make_certificates, remove_certificates);
}
