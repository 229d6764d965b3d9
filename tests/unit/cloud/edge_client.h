/* edge_client: the other end of a tandem.v1 connection for tests: a real link over a real socket, on the fixture's loop. What comes in is kept
 * as encoded frames and taken apart by the test's thread. */
#ifndef TANDEM_TESTS_EDGE_CLIENT_H
#define TANDEM_TESTS_EDGE_CLIENT_H
#include "loop_fixture.h"
#include "protocol/link.h"
#include "shared/queue.h"

#define CLIENT_POLL_US 1000u
#define CLIENT_WAIT_US 60000000 /* long: the machine may be busy */

struct edge_frame {
    size_t size;
    uint8_t bytes[];
};

struct edge_client {
    struct ws_handler handler;
    struct ws_conn *ws;
    struct link *link;
    struct net_timer *timer;
    struct queue *frames;       /* struct edge_frame; an empty one: the connection is closed */
    const Tandem__Hello *hello; /* sent once the socket is open; NULL: the test stays silent */
    bool closed;
    char why[64]; /* it was closed */
    struct arena arena;
    struct edge_frame *last;
};

static inline void edge_client_keep(struct edge_client *c, const struct wire_frame *f)
{
    size_t capacity = 65536 + (f ? f->payload.size : 0);
    struct edge_frame *copy = calloc(1, sizeof *copy + capacity);
    if (f) {
        int64_t size = wire_encode(f->type, f->flags, f->stream, f->header, f->payload.data, f->payload.size,
                                   copy->bytes, capacity);
        if (size < 0)
            abort();
        copy->size = (size_t)size;
    }
    if (queue_push(c->frames, copy) != 0)
        abort();
}

static inline int edge_client_on_frame(void *ctx, const struct wire_frame *f)
{
    edge_client_keep(ctx, f);
    return 0;
}

static inline void edge_client_poll(void *ctx)
{
    struct edge_client *c = ctx;
    if (c->closed)
        return;
    ws_want_write(c->ws);
    net_timer_start(c->timer, CLIENT_POLL_US);
}

static inline int edge_client_on_open(void *ctx, struct ws_conn *ws, const char *peer, void **user)
{
    struct edge_client *c = ctx;
    (void)ws, (void)peer, (void)user;
    if (c->hello && link_send(c->link, FRAME_HELLO, 0, &c->hello->base, NULL, 0) != 0)
        abort();
    edge_client_poll(c);
    return 0;
}

static inline void edge_client_on_message(void *user, const void *data, size_t size)
{
    struct edge_client *c = user;
    link_receive(c->link, data, size, clock_mono_us());
}

static inline int64_t edge_client_next(void *user, uint8_t *dst, size_t capacity)
{
    struct edge_client *c = user;
    return link_next(c->link, dst, capacity, clock_mono_us());
}

static inline void edge_client_end(struct edge_client *c)
{
    c->closed = true;
    edge_client_keep(c, NULL);
}

static inline void edge_client_on_closed(void *user, const char *why)
{
    struct edge_client *c = user;
    snprintf(c->why, sizeof c->why, "%s", why);
    edge_client_end(c);
}

static inline void edge_client_on_failed(void *ctx, const char *why)
{
    (void)why;
    edge_client_end(ctx);
}

static inline void edge_client_open_now(void *arg)
{
    struct edge_client *c = arg;
    struct link_config config = {.role = LINK_EDGE, .on_frame = edge_client_on_frame, .ctx = c};
    struct td_error err;
    c->link = link_create(&config, clock_mono_us());
    c->timer = net_timer_create(fx.service.loop, edge_client_poll, c);
    c->handler = (struct ws_handler){edge_client_on_open,
                                     edge_client_on_message,
                                     edge_client_next,
                                     edge_client_on_closed,
                                     edge_client_on_failed,
                                     c,
                                     NULL};
    struct net_connect connect = {
        .host = "localhost", .port = fx.port, .path = "/tandem", .ws = &c->handler, .user = c};
    if (ws_connect(fx.service.loop, &connect, &c->ws, &err) != 0)
        abort();
}

static inline struct edge_client *edge_client_open(const Tandem__Hello *hello)
{
    struct edge_client *c = calloc(1, sizeof *c);
    c->frames = queue_create(4096);
    c->hello = hello;
    arena_init(&c->arena, WIRE_ARENA_SIZE);
    on_loop(edge_client_open_now, c);
    return c;
}

static inline void edge_client_close_now(void *arg)
{
    struct edge_client *c = arg;
    if (!c->closed)
        ws_close(c->ws, "the test is over");
}

static inline void edge_client_free_now(void *arg)
{
    struct edge_client *c = arg;
    net_timer_destroy(c->timer);
    link_destroy(c->link);
}

static inline struct wire_frame edge_client_take_frame(struct edge_client *c, unsigned wanted)
{
    struct wire_frame f = {0};
    free(c->last);
    c->last = queue_pop(c->frames, CLIENT_WAIT_US);
    if (!c->last)
        fail_msg("no frame came; %s was expected", frame_type_name(wanted));
    if (c->last->size) {
        arena_reset(&c->arena);
        assert_int_equal(wire_decode(c->last->bytes, c->last->size, LIMIT_HEADER_SIZE, &c->arena, &f), 0);
    }
    return f;
}

/* The next frame, of a type that the test knows; decoded until the next call. 0: the connection closed instead. INGESTED may
 * come at any time, and is skipped unless it is wanted. */
static inline struct wire_frame edge_client_next_frame(struct edge_client *c, unsigned type)
{
    struct wire_frame f = edge_client_take_frame(c, type);
    while (f.type == FRAME_INGESTED && type != FRAME_INGESTED)
        f = edge_client_take_frame(c, type);
    if (f.type != type)
        fail_msg("%s came; %s was expected%s%s", frame_type_name(f.type), frame_type_name(type),
                 f.type == FRAME_ERROR ? ": " : "", f.type == FRAME_ERROR ? f.error->text : "");
    return f;
}

static inline void edge_client_close(struct edge_client *c)
{
    on_loop(edge_client_close_now, c);
    for (bool closed = false; !closed;) {
        struct edge_frame *f = queue_pop(c->frames, CLIENT_WAIT_US);
        assert_non_null(f);
        closed = f->size == 0;
        free(f);
    }
    on_loop(edge_client_free_now, c);
    free(c->last);
    queue_destroy(c->frames);
    arena_deinit(&c->arena);
    free(c);
}

/* ---- sending ---- */

struct edge_send {
    struct edge_client *client;
    unsigned type;
    uint32_t stream, epoch;
    const ProtobufCMessage *header;
    const void *payload;
    size_t size;
    int rc;
};

static inline void edge_client_send_now(void *arg)
{
    struct edge_send *s = arg;
    if (frame_is_bulk(s->type)) {
        uint8_t *copy = malloc(s->size);
        memcpy(copy, s->payload, s->size);
        s->rc = link_send_bulk(s->client->link, s->type, s->stream, s->header, s->epoch, copy, s->size);
        if (s->rc != 0)
            free(copy);
    } else {
        s->rc = link_send(s->client->link, s->type, s->stream, s->header, s->payload, s->size);
    }
    ws_want_write(s->client->ws);
}

static inline void edge_client_send(struct edge_client *c, unsigned type, uint32_t stream, const void *header,
                                    const void *payload, size_t size)
{
    struct edge_send s = {c, type, stream, 1, header, payload, size, 0};
    on_loop(edge_client_send_now, &s);
    /* An answer that ends the stream may overtake the PLAN that flies behind its OPEN. */
    assert_true(s.rc == 0 || (type == FRAME_PLAN && s.rc == -TD_ERR_CLOSED));
}

/* ---- usual messages ---- */

static inline Tandem__Hello *edge_hello(const char *token)
{
    static Tandem__Hello m;
    static Tandem__Version version, *versions[] = {&version};
    tandem__version__init(&version);
    version.protocol = WIRE_PROTOCOL;
    version.layout = (ProtobufCBinaryData){TD_HASH_SIZE, fx.service.layout};
    version.numerics = fx.service.numerics;
    tandem__hello__init(&m);
    m.n_versions = 1;
    m.versions = versions;
    m.fingerprint = (ProtobufCBinaryData){TD_HASH_SIZE, fx.service.fingerprint};
    m.layer_count = fx.service.layer_count;
    m.layers_held = 1;
    m.token = (char *)token;
    m.agent = (char *)"test";
    return &m;
}

static inline struct edge_client *edge_client_ready(const char *token)
{
    struct edge_client *c = edge_client_open(edge_hello(token));
    edge_client_next_frame(c, FRAME_WELCOME);
    return c;
}

static uint8_t edge_request_id[GEN_REQUEST_ID_SIZE] = {9, 8, 7};

static inline Tandem__Open edge_open(uint32_t prompt_count)
{
    Tandem__Open m = TANDEM__OPEN__INIT;
    m.request_id = (ProtobufCBinaryData){GEN_REQUEST_ID_SIZE, edge_request_id};
    m.attempt = 1;
    m.prompt_count = prompt_count;
    m.accept = KV_ACCEPT_VISIBLE_LOSSLESS;
    return m;
}

static inline void edge_send_open(struct edge_client *c, uint32_t stream, const Tandem__Open *m,
                                  const int32_t *ids, uint32_t count)
{
    uint8_t *payload = malloc(4 * count + 1);
    for (uint32_t i = 0; i < count; i++)
        store_le32(payload + 4 * i, (uint32_t)ids[i]);
    edge_client_send(c, FRAME_OPEN, stream, m, payload, 4 * count);
    free(payload);
}

static inline void edge_send_plan(struct edge_client *c, uint32_t stream, uint32_t epoch, uint32_t count,
                                  uint32_t layers)
{
    Tandem__Range range = TANDEM__RANGE__INIT, *ranges[] = {&range};
    range.count = count;
    range.layers = layers;
    range.codec = KV_L1;
    range.hidden_dtype = HIDDEN_F16;
    Tandem__Plan m = TANDEM__PLAN__INIT;
    m.epoch = epoch;
    m.n_ranges = 1;
    m.ranges = ranges;
    edge_client_send(c, FRAME_PLAN, stream, &m, NULL, 0);
}

static inline void edge_send_generate(struct edge_client *c, uint32_t stream, bool no_persist)
{
    Tandem__Generate m = TANDEM__GENERATE__INIT;
    m.token_count_max = 10;
    m.temperature = 0.5f;
    m.top_p = 1;
    m.repetition_penalty = 1;
    m.seed = 77;
    m.no_persist = no_persist;
    edge_client_send(c, FRAME_GENERATE, stream, &m, NULL, 0);
}

static const int32_t prompt[] = {5, 6, 7, 8}, reply[] = {20, 21, 22};

static inline void assert_stream_error(struct edge_client *c, uint32_t stream, unsigned code, bool retry)
{
    struct wire_frame f = edge_client_next_frame(c, FRAME_ERROR);
    assert_int_equal(f.stream, stream);
    assert_int_equal(f.error->code, code);
    assert_int_equal(f.error->retry, retry);
    assert_int_equal(f.error->retry_after_ms > 0, retry);
}
#endif
