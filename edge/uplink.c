/* uplink: see uplink.h. */
#include "edge/uplink.h"
#include "shared/crypto.h"
#include "shared/kv_block.h"
#include "shared/log.h"
#include "shared/metrics.h"
#include <stdio.h>
#include <stdlib.h>

#define MODULE "uplink"
#define OWNERS (2 * LIMIT_STREAMS) /* streams that were cancelled may still get their last frame */

struct uplink {
    struct uplink_config config;
    struct ws_handler handler;
    struct ws_conn *conn; /* NULL: none */
    struct link *link;    /* NULL: not connected */
    enum uplink_state state;
    bool stopping, refused, restarting;
    unsigned failures; /* attempts in a row that did not get to READY, or not for UPLINK_SOUND_US */
    uint64_t ready_us, renewed_us;
    uint64_t rate_hint;
    struct net_timer *pace;  /* the link has something to do */
    struct net_timer *retry; /* next attempt */
    char why[UPLINK_WHY_SIZE], logged[UPLINK_WHY_SIZE];
    char node_host[LIMIT_NAME_SIZE + 1]; /* GOAWAY named another node; "": the configured one */
    uint16_t node_port;
    uint32_t stream_last;
    struct {
        uint32_t stream; /* 0: free */
        void *owner;
    } owners[OWNERS];
    struct metric *reconnects, *connected;
};

uint64_t uplink_backoff_us(unsigned failures, uint32_t random)
{
    uint64_t whole = (uint64_t)UPLINK_BACKOFF_MIN_US << TD_MIN(failures, 16u);
    whole = TD_MIN(whole, (uint64_t)UPLINK_BACKOFF_MAX_US);
    return whole / 2 + (uint64_t)random % (whole / 2 + 1);
}

/* ---- what is known about the link ---- */

/* The reason is logged when it changes, not at each attempt. */
static void because(struct uplink *u, const char *why)
{
    snprintf(u->why, sizeof u->why, "%s", why);
    if (strcmp(u->why, u->logged) == 0)
        return;
    snprintf(u->logged, sizeof u->logged, "%s", why);
    if (!u->stopping)
        log_warn(MODULE, "%s; trying again", why);
}

enum uplink_state uplink_state(const struct uplink *u)
{
    return u->state;
}

bool uplink_refused(const struct uplink *u)
{
    return u->refused;
}

bool uplink_stats(const struct uplink *u, struct link_stats *out)
{
    if (u->link)
        link_stats(u->link, out);
    return u->link != NULL;
}

const char *uplink_why(const struct uplink *u)
{
    return u->why;
}

/* ---- owners ---- */

static void **owner_slot(struct uplink *u, uint32_t stream)
{
    for (size_t i = 0; i < OWNERS; i++)
        if (u->owners[i].stream == stream)
            return &u->owners[i].owner;
    return NULL;
}

static void owner_remove(struct uplink *u, uint32_t stream)
{
    for (size_t i = 0; i < OWNERS; i++)
        if (u->owners[i].stream == stream)
            u->owners[i].stream = 0, u->owners[i].owner = NULL;
}

static bool has_owners(const struct uplink *u)
{
    for (size_t i = 0; i < OWNERS; i++)
        if (u->owners[i].stream)
            return true;
    return false;
}

/* ---- driving the link ---- */

static void schedule(struct uplink *u)
{
    if (!u->link || !u->conn)
        return;
    uint64_t wait_us = link_wait_us(u->link, clock_mono_us());
    if (wait_us == 0 || link_state(u->link) == LINK_CLOSED)
        ws_want_write(u->conn);
    else if (wait_us != UINT64_MAX)
        net_timer_start(u->pace, wait_us);
}

static void on_pace(void *ctx)
{
    struct uplink *u = ctx;
    if (!u->link || !u->conn)
        return;
    if (link_tick(u->link, clock_mono_us()) < 0) {
        because(u, "the cloud fell silent");
        ws_abort(u->conn, "silence");
        return;
    }
    schedule(u);
}

static int64_t on_next(void *user, uint8_t *dst, size_t capacity)
{
    struct uplink *u = user;
    if (!u->link)
        return -1;
    int64_t size = link_next(u->link, dst, capacity, clock_mono_us());
    if (size > 0 && frame_is_bulk(dst[0]))
        u->config.events->room(u->config.ctx);
    if (size == 0 && u->stopping)
        return -1;
    if (size == 0)
        schedule(u);
    return size;
}

static void on_message(void *user, const void *data, size_t size)
{
    struct uplink *u = user;
    if (!u->link)
        return;
    if (link_receive(u->link, data, size, clock_mono_us()) < 0) {
        char line[UPLINK_WHY_SIZE];
        snprintf(line, sizeof line, "the cloud broke the protocol: %.300s", link_error_text(u->link));
        because(u, line);
    }
    schedule(u);
}

static void on_part(void *user)
{
    struct uplink *u = user;
    if (u->link)
        link_heard(u->link, clock_mono_us());
}

/* ---- frames ---- */

static bool version_is_ours(const struct uplink *u, const Tandem__Version *v)
{
    return v->protocol == WIRE_PROTOCOL && memcmp(v->layout.data, u->config.layout_hash, TD_HASH_SIZE) == 0;
}

static int on_welcome(struct uplink *u, const Tandem__Welcome *w)
{
    if (!version_is_ours(u, w->version))
        return -TD_ERR_VERSION;
    u->state = UPLINK_READY;
    u->ready_us = u->renewed_us = clock_mono_us();
    u->refused = false;
    u->why[0] = u->logged[0] = '\0';
    metric_set(u->connected, 1);
    log_info(MODULE, "connected to %s:%u (node %s)", u->node_host[0] ? u->node_host : u->config.host,
             u->node_host[0] ? u->node_port : u->config.port, w->node[0] ? w->node : "unnamed");
    if (w->version->numerics != u->config.numerics)
        log_info(MODULE,
                 "the cloud computes with other arithmetic (numerics %u, here %u): no request can be exact",
                 w->version->numerics, u->config.numerics);
    u->config.events->ready(u->config.ctx, w);
    return 0;
}

/* Printable ASCII only: it goes to a log and to clients. */
static void printable(char *text)
{
    for (unsigned char *p = (unsigned char *)text; *p; p++)
        if (*p < 0x20 || *p > 0x7e)
            *p = '?';
}

static void on_connection_error(struct uplink *u, const Tandem__Error *e)
{
    char text[UPLINK_WHY_SIZE], line[UPLINK_WHY_SIZE];
    snprintf(text, sizeof text, "%.340s", e->text[0] ? e->text : td_status_text((int)e->code));
    printable(text);
    switch (e->code) {
    case TD_ERR_AUTH:
    case TD_ERR_MISMATCH:
    case TD_ERR_VERSION:
    case TD_ERR_UNSUPPORTED:
        u->refused = true;
        snprintf(line, sizeof line, "the cloud refuses this device: %.350s", text);
        break;
    default:
        snprintf(line, sizeof line, "the cloud closed the connection: %.350s", text);
    }
    because(u, line);
}

static void drain_done(struct uplink *u)
{
    if (u->state == UPLINK_DRAINING && !has_owners(u) && u->conn)
        ws_close(u->conn, "the cloud asked to leave");
}

static void on_goaway(struct uplink *u, const Tandem__Goaway *g)
{
    const char *colon = strrchr(g->node, ':');
    unsigned long port = colon ? strtoul(colon + 1, NULL, 10) : 0;
    if (colon && colon > g->node && port > 0 && port < 65536) {
        snprintf(u->node_host, sizeof u->node_host, "%.*s", (int)(colon - g->node), g->node);
        u->node_port = (uint16_t)port;
    }
    u->state = UPLINK_DRAINING;
    because(u, "the cloud node is going away");
    drain_done(u);
}

static bool ends_stream(const struct wire_frame *f)
{
    return f->type == FRAME_DONE || f->type == FRAME_ERROR || f->type == FRAME_CANCEL ||
           (f->type == FRAME_OPEN_ACK && f->open_ack->need_ids);
}

static int on_frame(void *ctx, const struct wire_frame *f)
{
    struct uplink *u = ctx;
    if (f->stream == 0) {
        if (f->type == FRAME_WELCOME)
            return on_welcome(u, f->welcome);
        if (f->type == FRAME_ERROR)
            on_connection_error(u, f->error);
        if (f->type == FRAME_GOAWAY)
            on_goaway(u, f->goaway);
        return 0;
    }
    void **slot = owner_slot(u, f->stream);
    if (!slot)
        return 0;
    void *owner = *slot;
    if (ends_stream(f))
        owner_remove(u, f->stream);
    int rc = u->config.events->frame(u->config.ctx, owner, f);
    drain_done(u);
    return rc;
}

/* ---- connecting ---- */

static int say_hello(struct uplink *u)
{
    const struct uplink_config *c = &u->config;
    Tandem__Version version = TANDEM__VERSION__INIT;
    Tandem__Version *versions[] = {&version};
    Tandem__Hello hello = TANDEM__HELLO__INIT;
    version.protocol = WIRE_PROTOCOL;
    version.layout = (ProtobufCBinaryData){TD_HASH_SIZE, u->config.layout_hash};
    version.numerics = c->numerics;
    hello.n_versions = 1;
    hello.versions = versions;
    hello.fingerprint = (ProtobufCBinaryData){TD_HASH_SIZE, u->config.fingerprint};
    hello.layer_count = c->layer_count;
    hello.layers_held = c->layers_held;
    hello.codec_mask = c->codec_mask;
    hello.hidden_mask = c->hidden_mask;
    hello.token = (char *)(uintptr_t)c->token;
    hello.agent = (char *)(uintptr_t) "tandem-edge/" TANDEM_VERSION;
    return link_send(u->link, FRAME_HELLO, 0, &hello.base, NULL, 0);
}

static void on_failed(void *ctx, const char *why);

static int on_open(void *ctx, struct ws_conn *conn, const char *peer, void **user)
{
    struct uplink *u = ctx;
    (void)peer, (void)user;
    struct link_config config = {
        .role = LINK_EDGE, .on_frame = on_frame, .ctx = u, .rate_hint_bytes_per_s = u->rate_hint};
    u->conn = conn;
    u->link = link_create(&config, clock_mono_us());
    if (!u->link || say_hello(u) < 0) { /* refused here: neither on_closed nor on_failed follows */
        link_destroy(u->link);
        u->link = NULL;
        on_failed(u, "no memory for the connection to the cloud");
        return -1;
    }
    u->state = UPLINK_GREETING;
    u->why[0] = '\0'; /* what ends this connection is another reason than what ended the last one */
    u->stream_last = 0;
    schedule(u);
    return 0;
}

static void connect_again(struct uplink *u)
{
    uint32_t random = 0;
    if (u->stopping)
        return;
    crypto_random(&random, sizeof random);
    if (u->restarting) {
        u->restarting = false;
        net_timer_start(u->retry, 1);
        return;
    }
    net_timer_start(u->retry, uplink_backoff_us(u->refused ? 16 : u->failures, random));
    u->failures++;
    u->node_host[0] =
        u->failures > 2 ? '\0' : u->node_host[0]; /* the node we were sent to may be gone: back home */
}

static void on_closed(void *user, const char *why)
{
    struct uplink *u = user;
    bool was_ready = u->state == UPLINK_READY || u->state == UPLINK_DRAINING;
    if (u->link) {
        struct link_stats stats;
        link_stats(u->link, &stats);
        if (!u->restarting && stats.rate_bytes_per_s)
            u->rate_hint = stats.rate_bytes_per_s;
        link_destroy(u->link);
    }
    if (u->state != UPLINK_DRAINING && !u->why[0]) {
        char line[UPLINK_WHY_SIZE];
        snprintf(line, sizeof line, "the link to the cloud was lost: %.300s", why);
        because(u, line);
    }
    u->link = NULL;
    u->conn = NULL;
    u->state = UPLINK_DOWN;
    net_timer_stop(u->pace);
    metric_set(u->connected, 0);
    memset(u->owners, 0, sizeof u->owners);
    if (was_ready && clock_mono_us() - u->ready_us >= UPLINK_SOUND_US)
        u->failures = 0;
    if (was_ready)
        u->config.events->lost(u->config.ctx);
    connect_again(u);
}

static void on_failed(void *ctx, const char *why)
{
    struct uplink *u = ctx;
    u->conn = NULL;
    u->refused = false;
    because(u, why);
    connect_again(u);
}

static void try_connect(void *ctx)
{
    struct uplink *u = ctx;
    const struct uplink_config *c = &u->config;
    struct net_connect connect = {
        .host = u->node_host[0] ? u->node_host : c->host,
        .port = u->node_host[0] ? u->node_port : c->port,
        .path = "/tandem",
        .ca_path = c->ca_path,
        .cert_path = c->cert_path,
        .key_path = c->key_path,
        .tls = c->tls,
        .ws = &u->handler,
        .user = u,
    };
    struct td_error err = {0};
    if (u->stopping || u->conn)
        return;
    metric_add(u->reconnects, u->failures > 0);
    if (ws_connect(c->loop, &connect, &u->conn, &err) < 0)
        on_failed(u, err.text);
}

/* ---- streams ---- */

static int open_stream(struct uplink *u, void *owner, unsigned type, const ProtobufCMessage *header,
                       const void *ids, size_t size, uint32_t *stream)
{
    if (u->state != UPLINK_READY)
        return -TD_ERR_CLOSED;
    void **slot = owner_slot(u, 0);
    if (!slot)
        return -TD_ERR_FULL;
    uint32_t id = u->stream_last ? u->stream_last + 2 : 1;
    int rc = link_send(u->link, type, id, header, ids, size);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < OWNERS; i++)
        if (!u->owners[i].stream) {
            u->owners[i].stream = id;
            u->owners[i].owner = owner;
            break;
        }
    u->stream_last = id;
    *stream = id;
    schedule(u);
    return 0;
}

bool uplink_renews(const struct link_stats *link, uint64_t renewed_us, uint64_t now_us)
{
    return link->bulk_sent_size == link->bulk_acked_size && now_us - renewed_us >= UPLINK_RENEW_US;
}

static void renew_tcp(struct uplink *u)
{
    struct link_stats stats;
    uint64_t now_us = clock_mono_us();
    if (u->state != UPLINK_READY)
        return;
    link_stats(u->link, &stats);
    if (!uplink_renews(&stats, u->renewed_us, now_us))
        return;
    u->renewed_us = now_us;
    ws_renew(u->conn);
}

int uplink_open(struct uplink *u, void *owner, const Tandem__Open *open, const void *ids, size_t size,
                uint32_t *stream)
{
    renew_tcp(u);
    return open_stream(u, owner, FRAME_OPEN, &open->base, ids, size, stream);
}

int uplink_fetch(struct uplink *u, void *owner, const Tandem__Fetch *fetch, const void *ids, size_t size,
                 uint32_t *stream)
{
    return open_stream(u, owner, FRAME_FETCH, &fetch->base, ids, size, stream);
}

int uplink_send(struct uplink *u, uint32_t stream, unsigned type, const ProtobufCMessage *header,
                const void *payload, size_t size)
{
    if (!u->link || stream == 0)
        return -TD_ERR_CLOSED;
    int rc = link_send(u->link, type, stream, header, payload, size);
    schedule(u);
    return rc;
}

int uplink_send_bulk(struct uplink *u, uint32_t stream, unsigned type, const ProtobufCMessage *header,
                     uint32_t epoch, uint8_t *payload, size_t size)
{
    if (!u->link || stream == 0)
        return -TD_ERR_CLOSED;
    int rc = link_send_bulk(u->link, type, stream, header, epoch, payload, size);
    schedule(u);
    return rc;
}

void uplink_void(struct uplink *u, uint32_t stream, uint32_t epoch)
{
    if (u->link && stream)
        link_void(u->link, stream, epoch);
}

void uplink_restart(struct uplink *u, uint64_t rate_bytes_per_s)
{
    if (!u->conn || u->state != UPLINK_READY || u->restarting)
        return;
    u->restarting = true;
    u->rate_hint = rate_bytes_per_s;
    snprintf(u->why, sizeof u->why, "connecting anew");
    log_info(MODULE,
             "the uplink has broken down to %llu kbit/s: what was on its way is given up, connecting anew",
             (unsigned long long)(rate_bytes_per_s / 125));
    ws_abort(u->conn, "too slow");
}

void uplink_probe(struct uplink *u, size_t size)
{
    if (u->state != UPLINK_READY)
        return;
    link_probe(u->link, size);
    schedule(u);
}

void uplink_set_patience(struct uplink *u, uint64_t patience_us)
{
    if (u->state != UPLINK_READY && u->state != UPLINK_DRAINING)
        return;
    link_set_patience(u->link, patience_us, clock_mono_us());
    on_pace(u); /* with a full socket nothing else looks at the clock */
}

void uplink_set_owner(struct uplink *u, uint32_t stream, void *owner)
{
    void **slot = stream ? owner_slot(u, stream) : NULL;
    if (slot)
        *slot = owner;
}

void uplink_close(struct uplink *u, uint32_t stream)
{
    if (!stream)
        return;
    owner_remove(u, stream);
    if (u->link)
        link_close_stream(u->link, stream);
    schedule(u);
    drain_done(u);
}

/* ---- life ---- */

struct uplink *uplink_create(const struct uplink_config *config)
{
    struct uplink *u = calloc(1, sizeof *u);
    if (!u)
        return NULL;
    u->config = *config;
    u->handler = (struct ws_handler){.on_open = on_open,
                                     .on_message = on_message,
                                     .on_part = on_part,
                                     .next = on_next,
                                     .on_closed = on_closed,
                                     .on_failed = on_failed,
                                     .ctx = u};
    u->pace = net_timer_create(config->loop, on_pace, u);
    u->retry = net_timer_create(config->loop, try_connect, u);
    if (!u->pace || !u->retry) {
        uplink_destroy(u);
        return NULL;
    }
    snprintf(u->why, sizeof u->why, "not connected to the cloud yet");
    u->reconnects = metric_counter("tandem_edge_reconnects_total", NULL,
                                   "Attempts to connect to the cloud after the first.");
    u->connected = metric_gauge("tandem_edge_connected", NULL, "1 while the link to the cloud is ready.");
    return u;
}

void uplink_destroy(struct uplink *u)
{
    if (!u)
        return;
    link_destroy(u->link);
    if (u->pace)
        net_timer_destroy(u->pace);
    if (u->retry)
        net_timer_destroy(u->retry);
    free(u);
}

void uplink_start(struct uplink *u)
{
    net_timer_start(u->retry, 1);
}

void uplink_stop(struct uplink *u)
{
    u->stopping = true;
    net_timer_stop(u->retry);
    if (u->conn)
        ws_want_write(u->conn);
}
