/* edge_server: connections: sockets, greetings, time. See edge_server.h. */
#include "cloud/edge_server_internal.h"
#include "shared/log.h"
#include <stdio.h>
#include <stdlib.h>

#define HEX_SHOWN 4 /* bytes of a hash that a message shows: 8 digits */

/* ---- the greeting ---- */

static int refuse(struct edge_connection *c, int code, const char *text)
{
    metric_add(c->server->refused, 1);
    if (log_limit_allows(&c->server->log_refused, clock_mono_us()))
        log_warn("cloud", "edge at %s refused: %s", c->peer, text);
    link_fail(c->link, code, text);
    return 0;
}

static int refuse_fingerprint(struct edge_connection *c, const Tandem__Hello *hello)
{
    char theirs[2 * HEX_SHOWN + 1], ours[2 * HEX_SHOWN + 1], text[200];
    hex_encode(hello->fingerprint.data, HEX_SHOWN, theirs);
    hex_encode(c->server->service->fingerprint, HEX_SHOWN, ours);
    snprintf(text, sizeof text,
             "the models differ: the edge has fingerprint %s, the cloud %s; give both the same model file",
             theirs, ours);
    return refuse(c, -TD_ERR_MISMATCH, text);
}

/* No offered version fits: say what the nearest one lacks. */
static int refuse_versions(struct edge_connection *c, const Tandem__Hello *hello)
{
    char text[200];
    bool protocol = false;
    for (size_t i = 0; i < hello->n_versions; i++)
        protocol |= hello->versions[i]->protocol == WIRE_PROTOCOL;
    if (!protocol)
        snprintf(text, sizeof text, "the edge speaks protocol %u, the cloud %d; install matching versions",
                 hello->versions[0]->protocol, WIRE_PROTOCOL);
    else
        snprintf(
            text, sizeof text,
            "edge and cloud lay KV out differently, or one computes with arithmetic that the other does not "
            "know; install matching versions");
    return refuse(c, -TD_ERR_VERSION, text);
}

/* The numerics of the first version that fits, or of the one with the cloud's own numerics; 0: none fits. Numerics may differ: what
 * the two compute together is then no `exact` (edge_server_stream.c), and says so (sequence_plan.c). */
static uint32_t fitting_numerics(const struct service *s, const Tandem__Hello *hello)
{
    uint32_t found = 0;
    for (size_t i = 0; i < hello->n_versions; i++) {
        const Tandem__Version *v = hello->versions[i];
        if (v->protocol == WIRE_PROTOCOL && kv_numerics_known(v->numerics) &&
            memcmp(v->layout.data, s->layout, TD_HASH_SIZE) == 0 &&
            (found == 0 || v->numerics == s->numerics))
            found = v->numerics;
    }
    return found;
}

static int welcome(struct edge_connection *c)
{
    struct service *s = c->server->service;
    Tandem__Version version = TANDEM__VERSION__INIT;
    version.protocol = WIRE_PROTOCOL;
    version.layout = (ProtobufCBinaryData){TD_HASH_SIZE, s->layout};
    version.numerics = s->numerics;
    Tandem__Welcome m = TANDEM__WELCOME__INIT;
    m.version = &version;
    m.tenant = c->who.tenant;
    m.principal = c->who.principal;
    m.principal_key = (ProtobufCBinaryData){CRYPTO_KEY_SIZE, c->own_key};
    m.node_epoch = s->node_epoch;
    m.context_max = s->context_max;
    m.codec_mask = KV_CODEC_MASK;
    m.hidden_mask = 1u << HIDDEN_F32 | 1u << HIDDEN_F16 | 1u << HIDDEN_INT8;
    m.node = (char *)s->node;
    m.features = WIRE_FEATURE_PRIVATE;
    if (s->fetcher) {
        m.seal = (ProtobufCBinaryData){sizeof s->seal.tag, s->seal.tag};
        kv_seal_name_key(&s->seal, c->who.tenant, c->who.principal, c->seal_key);
    }
    int rc = link_send(c->link, FRAME_WELCOME, 0, &m.base, NULL, 0);
    c->ready = rc == 0;
    if (c->ready)
        ws_keep(c->ws);
    return rc;
}

/* Those of the same principal that have been let in. */
static uint32_t count_alike(const struct edge_connection *c)
{
    uint32_t count = 0;
    for (const struct edge_connection *o = c->server->connections; o; o = o->next)
        count += o->ready && strcmp(o->who.principal, c->who.principal) == 0 &&
                 strcmp(o->who.tenant, c->who.tenant) == 0;
    return count;
}

static int on_hello(struct edge_connection *c, const Tandem__Hello *hello)
{
    struct service *s = c->server->service;
    struct td_error err;
    if (s->draining)
        return refuse(c, -TD_ERR_CLOSED, "this node is shutting down");
    if (auth_check(s->auth, hello->token, &c->who) < 0)
        return refuse(c, -TD_ERR_AUTH, "the token is not known here, or has expired");
    if (strcmp(c->who.tenant, s->erasing) == 0)
        return refuse(c, -TD_ERR_AGAIN, "the data of this tenant is being erased; come again");
    if (count_alike(c) >= c->server->connections_max)
        return refuse(
            c, -TD_ERR_LIMIT,
            "this principal has as many connections as it may; give more devices tokens of other principals");
    if (memcmp(hello->fingerprint.data, s->fingerprint, TD_HASH_SIZE) != 0 ||
        hello->layer_count != s->layer_count)
        return refuse_fingerprint(c, hello);
    c->numerics = fitting_numerics(s, hello);
    if (c->numerics == 0)
        return refuse_versions(c, hello);
    if (service_keys(s, c->who.tenant, c->who.principal, c->shared_key, c->own_key, &err) < 0) {
        log_error("cloud", "no keys for tenant %s: %s", c->who.tenant, err.text);
        return refuse(c, -TD_ERR_INTERNAL,
                      "this node cannot read its keys; its operator finds the reason in the log");
    }
    int rc = welcome(c);
    if (rc == 0)
        log_info("cloud", "edge of %s/%s connected from %s", c->who.tenant, c->who.principal, c->peer);
    return rc;
}

/* ---- frames in and out ---- */

static int on_frame(void *ctx, const struct wire_frame *f)
{
    struct edge_connection *c = ctx;
    if (f->type == FRAME_HELLO)
        return on_hello(c, f->hello);
    if (f->stream == 0)
        return 0; /* the edge's ERROR or GOAWAY: it closes the connection itself */
    return edge_stream_frame(c, f);
}

/* The link says when it has something to do; the timer remembers it. */
static void arm(struct edge_connection *c, uint64_t least_us)
{
    uint64_t wait_us = link_wait_us(c->link, clock_mono_us());
    if (wait_us == UINT64_MAX)
        net_timer_stop(c->timer);
    else
        net_timer_start(c->timer, TD_MAX(wait_us, least_us));
}

static void detach_streams(struct edge_connection *c)
{
    edge_fetch_forget(c);
    while (c->streams) {
        engine_port_detach(c->server->service->engine, &c->streams->listener);
        edge_stream_free(c->streams);
    }
}

void edge_connection_flush(struct edge_connection *c)
{
    if (c->receiving)
        return;
    if (link_state(c->link) == LINK_CLOSED) {
        detach_streams(c);
        ws_want_write(c->ws); /* what is queued, then `next` says that it is over */
        if (!c->lingering)
            net_timer_start(c->timer, EDGE_LINGER_US);
        c->lingering = true;
    } else if (link_wait_us(c->link, clock_mono_us()) == 0) {
        ws_want_write(c->ws);
    } else {
        arm(c, 0);
    }
}

static void on_timer(void *ctx)
{
    struct edge_connection *c = ctx;
    if (link_state(c->link) == LINK_CLOSED) {
        ws_close(c->ws, link_error_text(c->link)); /* the peer does not read its last frames */
        return;
    }
    link_tick(c->link, clock_mono_us());
    edge_connection_flush(c);
}

static void on_message(void *user, const void *data, size_t size)
{
    struct edge_connection *c = user;
    bool was_open = link_state(c->link) != LINK_CLOSED;
    c->receiving = true;
    int rc = link_receive(c->link, data, size, clock_mono_us());
    c->receiving = false;
    if (rc < 0 && was_open) {
        metric_add(c->server->protocol_errors, 1);
        if (log_limit_allows(&c->server->log_refused, clock_mono_us()))
            log_warn("cloud", "edge at %s cut off: %s", c->peer, link_error_text(c->link));
    }
    edge_connection_flush(c);
}

static void on_part(void *user)
{
    struct edge_connection *c = user;
    link_heard(c->link, clock_mono_us());
}

/* After a frame libwebsockets asks again by itself; after nothing the timer takes over. */
static int64_t next(void *user, uint8_t *dst, size_t capacity)
{
    struct edge_connection *c = user;
    edge_fetch_go_on(c);
    int64_t size = link_next(c->link, dst, capacity, clock_mono_us());
    if (size == 0 && !c->lingering)
        arm(c, 1000);
    return size;
}

/* ---- sockets ---- */

/* From there, and not greeted yet; *oldest: the one that has been there for longest. */
static uint32_t unauthenticated_of(const struct edge_server *s, const char *peer,
                                   struct edge_connection **oldest)
{
    uint32_t count = 0;
    for (struct edge_connection *c = s->connections; c; c = c->next)
        if (!c->ready && !c->dropped && strcmp(c->peer, peer) == 0)
            count++, *oldest = c;
    return count;
}

/* Many may come from one address, and who holds its places without greeting must not keep the others out. But all of them come at once when this node, or what
 * is in front of them, starts again: were the oldest pushed out before a round trip is over, nobody would ever get in. */
static int make_room(struct edge_server *s, const char *peer)
{
    struct edge_connection *oldest = NULL;
    if (unauthenticated_of(s, peer, &oldest) < LIMIT_UNAUTHENTICATED_PER_PEER)
        return 0;
    metric_add(s->refused, 1);
    if (clock_mono_us() - oldest->opened_us < s->greeting_us)
        return -TD_ERR_LIMIT;
    oldest->dropped = true;
    ws_abort(oldest->ws, "it did not greet, and others came");
    return 0;
}

static struct edge_connection *connection_create(struct edge_server *s, struct ws_conn *ws, const char *peer)
{
    struct edge_connection *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->server = s;
    c->ws = ws;
    c->opened_us = clock_mono_us();
    snprintf(c->peer, sizeof c->peer, "%s", peer);
    struct link_config config = {.role = LINK_CLOUD, .on_frame = on_frame, .ctx = c};
    c->link = link_create(&config, clock_mono_us());
    c->timer = net_timer_create(s->service->loop, on_timer, c);
    if (c->link && c->timer)
        return c;
    link_destroy(c->link);
    net_timer_destroy(c->timer);
    free(c);
    return NULL;
}

static int on_open(void *ctx, struct ws_conn *ws, const char *peer, void **user)
{
    struct edge_server *s = ctx;
    int rc = make_room(s, peer);
    if (rc < 0)
        return rc;
    struct edge_connection *c = connection_create(s, ws, peer);
    if (!c)
        return -TD_ERR_NOMEM;
    c->next = s->connections;
    if (c->next)
        c->next->previous = c;
    s->connections = c;
    metric_set(s->connections_gauge, ++s->connection_count);
    *user = c;
    arm(c, 0);
    return 0;
}

static void on_closed(void *user, const char *why)
{
    struct edge_connection *c = user;
    struct edge_server *s = c->server;
    if (c->ready)
        log_info("cloud", "edge of %s/%s at %s is gone: %s", c->who.tenant, c->who.principal, c->peer,
                 link_error_text(c->link)[0] ? link_error_text(c->link) : why);
    detach_streams(c);
    *(c->previous ? &c->previous->next : &s->connections) = c->next;
    if (c->next)
        c->next->previous = c->previous;
    metric_set(s->connections_gauge, --s->connection_count);
    net_timer_destroy(c->timer);
    link_destroy(c->link);
    crypto_wipe(c, sizeof *c);
    free(c);
}

/* ---- the server ---- */

struct edge_server *edge_server_create(struct service *service)
{
    struct edge_server *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->service = service;
    s->connections_max = LIMIT_CONNECTIONS_PER_PRINCIPAL;
    s->fetches_max = EDGE_FETCHES_MAX;
    s->greeting_us = LIMIT_GREETING_MS * UINT64_C(1000);
    s->handler = (struct ws_handler){.on_open = on_open,
                                     .on_message = on_message,
                                     .on_part = on_part,
                                     .next = next,
                                     .on_closed = on_closed,
                                     .ctx = s};
    s->connections_gauge = metric_gauge("tandem_edge_connections", NULL, "Connections of edges");
    s->streams_gauge = metric_gauge("tandem_edge_streams", NULL, "Open streams of edges");
    s->refused = metric_counter("tandem_edge_refused_total", NULL,
                                "Edges refused: token, fingerprint, version or too many connections");
    s->protocol_errors =
        metric_counter("tandem_edge_protocol_errors_total", NULL, "Edges cut off because they broke a rule");
    s->saved = metric_counter("tandem_conversations_saved_total", "door=\"edge\"", "Conversations saved");
    s->save_failures = metric_counter("tandem_conversation_save_failures_total", "door=\"edge\"",
                                      "Conversations that could not be saved");
    return s;
}

void edge_server_destroy(struct edge_server *s)
{
    free(s);
}

const struct ws_handler *edge_server_ws_handler(struct edge_server *s)
{
    return &s->handler;
}

/* Requests first: who may not come in any more must not compute here either. */
static void end_connection(struct edge_connection *c, int code, const char *why)
{
    log_info("cloud", "edge of %s/%s at %s is sent away: %s", c->who.tenant, c->who.principal, c->peer, why);
    edge_fetch_forget(c);
    while (c->streams)
        edge_stream_fail(c->streams, code, why, 0);
    link_fail(c->link, code, why);
    c->ready = false;
    edge_connection_flush(c);
}

void edge_server_tick(struct edge_server *s)
{
    for (struct edge_connection *c = s->connections, *after; c; c = after) {
        after = c->next;
        edge_fetch_tick(c, clock_mono_us());
        if (c->ready && !auth_still_valid(s->service->auth, c->who.hash))
            end_connection(c, -TD_ERR_AUTH, "the token was revoked or has expired");
    }
}

void edge_server_end_tenant(struct edge_server *s, const char *tenant, const char *why)
{
    for (struct edge_connection *c = s->connections, *after; c; c = after) {
        after = c->next;
        if (c->ready && strcmp(c->who.tenant, tenant) == 0)
            end_connection(c, -TD_ERR_CANCELLED, why);
    }
}

void edge_server_goaway(struct edge_server *s, const char *node, const char *reason)
{
    Tandem__Goaway m = TANDEM__GOAWAY__INIT;
    m.node = (char *)node;
    m.reason = (char *)reason;
    for (struct edge_connection *c = s->connections; c; c = c->next) {
        if (!c->ready)
            continue;
        link_send(c->link, FRAME_GOAWAY, 0, &m.base, NULL,
                  0); /* one that cannot be told sees the connection close */
        edge_connection_flush(c);
    }
}

void edge_server_close(struct edge_server *s, const char *why)
{
    for (struct edge_connection *c = s->connections; c; c = c->next) {
        link_fail(c->link, -TD_ERR_CLOSED, why);
        edge_connection_flush(c);
    }
}

uint32_t edge_server_connections(const struct edge_server *s)
{
    return s->connection_count;
}
