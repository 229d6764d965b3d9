/* link: a connection's life, its streams, its timers. See link.h for the states, link_internal.h for the other parts.
 *
 * Streams. An OPEN opens one at both ends. Both ends count the same number of open ones, because frames arrive in order:
 * the edge's CANCEL stops the counting at both, and so does the cloud's last frame (DONE, ERROR, CANCEL, or OPEN_ACK with
 * need_ids). A cancelled stream keeps its slot until its last frame or until slots run out, so that a DONE can still come.
 * A frame for a stream that was open once and is no more is late, not wrong: it is dropped. */
#include "protocol/link_internal.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

struct link *link_create(const struct link_config *config, uint64_t now_us)
{
    struct link *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->config = *config;
    if (l->config.connection_window == 0)
        l->config.connection_window = LIMIT_CONNECTION_WINDOW;
    if (l->config.stream_window == 0)
        l->config.stream_window = LIMIT_STREAM_WINDOW;
    l->created_us = l->heard_us = now_us;
    arena_init(&l->arena, WIRE_ARENA_SIZE);
    rate_init(&l->rate, config->rate_hint_bytes_per_s);
    return l;
}

void link_destroy(struct link *l)
{
    if (!l)
        return;
    for (uint32_t i = 0; l->streams && i < l->slot_count; i++)
        if (l->streams[i].id)
            stream_free(l, &l->streams[i]);
    free(l->streams);
    frame_queue_free(&l->control);
    frame_queue_free(&l->tokens);
    arena_deinit(&l->arena);
    free(l);
}

enum link_state link_state(const struct link *l)
{
    return l->state;
}

const char *link_error_text(const struct link *l)
{
    return l->error_text;
}

int link_ready(struct link *l, uint32_t peer_connection_window, uint32_t peer_stream_window,
               uint32_t stream_count_max)
{
    l->streams = calloc(LINK_SLOTS, sizeof *l->streams);
    if (!l->streams)
        return -TD_ERR_NOMEM;
    l->peer_connection_window = peer_connection_window ? peer_connection_window : LIMIT_CONNECTION_WINDOW;
    l->peer_stream_window = peer_stream_window ? peer_stream_window : LIMIT_STREAM_WINDOW;
    l->stream_count_max = stream_count_max ? TD_MIN(stream_count_max, LIMIT_STREAMS) : LIMIT_STREAMS;
    l->out.credit = l->peer_connection_window;
    l->in.window = l->in.open = l->config.connection_window;
    l->state = LINK_READY;
    return 0;
}

/* ---- streams ---- */

struct stream *stream_find(const struct link *l, uint32_t id)
{
    if (!l->streams || id == 0)
        return NULL;
    for (uint32_t i = 0; i < l->slot_count; i++)
        if (l->streams[i].id == id)
            return &l->streams[i];
    return NULL;
}

/* A free slot, or that of the stream which was cancelled longest ago: fewer than half are counted, so there is one. */
static struct stream *stream_slot(struct link *l)
{
    struct stream *oldest = NULL;
    for (uint32_t i = 0; i < LINK_SLOTS; i++) {
        struct stream *s = &l->streams[i];
        if (!s->id) {
            l->slot_count = TD_MAX(l->slot_count, i + 1);
            return s;
        }
        if (s->cancelled && (!oldest || s->id < oldest->id))
            oldest = s;
    }
    if (oldest)
        stream_free(l, oldest);
    return oldest;
}

int stream_open(struct link *l, uint32_t id)
{
    if (id % 2 == 0 || id <= l->stream_last)
        return -TD_ERR_ARG;
    if (l->stream_open_count >= l->stream_count_max)
        return -TD_ERR_FULL;
    struct stream *s = stream_slot(l);
    if (!s)
        return -TD_ERR_FULL;
    *s = (struct stream){.id = id};
    s->in.window = s->in.open = l->config.stream_window;
    s->out.credit = l->peer_stream_window;
    l->stream_last = id;
    l->stream_open_count++;
    return 0;
}

void stream_end(struct link *l, struct stream *s)
{
    if (!s->cancelled && !s->ended)
        l->stream_open_count--;
    s->ended = true;
}

void stream_free(struct link *l, struct stream *s)
{
    stream_end(l, s);
    stream_drop_bulk(l, s, UINT32_MAX);
    for (int class = 0; class < BULK_CLASSES; class ++)
        partial_drop(l, s, &s->partials[class]);
    s->id = 0;
}

void link_close_stream(struct link *l, uint32_t id)
{
    struct stream *s = stream_find(l, id);
    if (!s)
        return;
    if (!s->ended && !s->cancelled && l->state == LINK_READY) { /* the peer does not know yet */
        int rc;
        if (l->config.role == LINK_EDGE) {
            rc = link_send(l, FRAME_CANCEL, id, NULL, NULL, 0);
        } else {
            Tandem__Error error = TANDEM__ERROR__INIT;
            error.code = TD_ERR_CANCELLED;
            rc = link_send(l, FRAME_ERROR, id, &error.base, NULL, 0);
        }
        if (rc < 0 && rc != -TD_ERR_CLOSED)
            link_fault(l, rc, "cannot tell the peer that stream %u is over", id);
        s = stream_find(l, id);
    }
    if (s)
        stream_free(l, s);
}

void link_void(struct link *l, uint32_t id, uint32_t epoch)
{
    struct stream *s = stream_find(l, id);
    if (s)
        stream_drop_bulk(l, s, epoch);
}

void link_consumed(struct link *l, uint32_t id, size_t payload_size)
{
    struct stream *s = stream_find(l, id);
    if (s) {
        uint32_t size = (uint32_t)TD_MIN(payload_size, (size_t)s->in.unconsumed);
        s->in.unconsumed -= size;
        s->in.ungranted += size;
    }
    uint32_t size = (uint32_t)TD_MIN(payload_size, (size_t)l->in.unconsumed);
    l->in.unconsumed -= size;
    l->in.ungranted += size;
}

size_t link_message_max(const struct link *l)
{
    if (l->state != LINK_READY)
        return 0;
    return TD_MIN(LIMIT_PIECE_SIZE, TD_MIN(l->peer_stream_window, l->peer_connection_window));
}

/* ---- the end ---- */

int link_fault(struct link *l, int code, const char *format, ...)
{
    if (l->state == LINK_CLOSED)
        return code;
    va_list args;
    va_start(args, format);
    vsnprintf(l->error_text, sizeof l->error_text, format, args);
    va_end(args);
    link_fail(l, code, l->error_text);
    return code;
}

void link_fail(struct link *l, int code, const char *text)
{
    if (l->state == LINK_CLOSED)
        return;
    char cut[LIMIT_TEXT_SIZE + 1];
    snprintf(cut, sizeof cut, "%s", text ? text : td_status_text(code));
    if (text != l->error_text)
        snprintf(l->error_text, sizeof l->error_text, "%.*s", (int)sizeof l->error_text - 1, cut);
    frame_queue_clear(&l->control);
    frame_queue_clear(&l->tokens);
    Tandem__Error error = TANDEM__ERROR__INIT;
    error.code = (uint32_t)(code < 0 ? -code : code);
    error.text = cut;
    /* Nothing is to be done without memory for the reason: the peer sees the connection close. */
    (void)frame_queue_push(&l->control, FRAME_ERROR, 0, &error.base, NULL, 0);
    l->error = code;
    l->state = LINK_CLOSED;
}

/* ---- timers ---- */

static uint64_t until_us(uint64_t due_us, uint64_t now_us)
{
    return due_us > now_us ? due_us - now_us : 0;
}

void link_set_patience(struct link *l, uint64_t patience_us, uint64_t now_us)
{
    if (l->patience_us == 0)
        l->waits_us = now_us;
    l->patience_us = patience_us;
}

/* Half of how much silence is too much, and since when it counts. */
static uint64_t half_silence_us(const struct link *l, uint64_t *since_us)
{
    uint64_t limit_us = LIMIT_PEER_SILENCE_MS * UINT64_C(1000);
    *since_us = TD_MAX(l->heard_us, l->waits_us);
    return TD_MIN(TD_MAX(l->patience_us, 4 * l->rate.rtt_us), limit_us) / 2;
}

uint64_t link_ask_us(const struct link *l)
{
    uint64_t since_us, half_us = half_silence_us(l, &since_us);
    return l->patience_us && l->asked_us <= since_us ? since_us + half_us : UINT64_MAX;
}

/* When the silence has lasted for too long. */
static uint64_t gone_us(const struct link *l)
{
    uint64_t since_us, half_us = half_silence_us(l, &since_us);
    uint64_t latest_us = l->heard_us + LIMIT_PEER_SILENCE_MS * UINT64_C(1000);
    bool was_asked = l->patience_us && l->asked_us > since_us;
    return was_asked ? TD_MIN(l->asked_us + half_us, latest_us) : latest_us;
}

static bool waits_for_hello(const struct link *l)
{
    return l->config.role == LINK_CLOUD && l->state == LINK_START;
}

uint64_t link_wait_us(const struct link *l, uint64_t now_us)
{
    if (frame_queue_first_size(&l->control) > 0)
        return 0;
    if (l->state == LINK_CLOSED)
        return UINT64_MAX;
    if (waits_for_hello(l))
        return until_us(l->created_us + LIMIT_HELLO_TIMEOUT_MS * UINT64_C(1000), now_us);
    uint64_t wait_us = until_us(gone_us(l), now_us);
    if (l->state != LINK_READY)
        return wait_us;
    if (frame_queue_first_size(&l->tokens) > 0)
        return 0;
    wait_us = TD_MIN(wait_us, link_bulk_wait_us(l, now_us));
    if (l->partial_count > 0)
        wait_us = TD_MIN(wait_us, until_us(l->bulk_heard_us + LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000), now_us));
    return TD_MIN(wait_us, link_own_wait_us(l, now_us));
}

/* Parts of messages whose sender has stopped: give the memory back. Should the rest come after all, it is dropped. */
static void free_idle_partials(struct link *l)
{
    for (uint32_t i = 0; i < l->slot_count; i++) {
        struct stream *s = &l->streams[i];
        for (int class = 0; s->id && class < BULK_CLASSES; class ++) {
            struct partial *p = &s->partials[class];
            if (p->id.total == 0 || p->skip)
                continue;
            struct partial given_up = {.id = p->id, .have = p->have, .skip = true};
            partial_drop(l, s, p);
            *p = given_up;
        }
    }
}

int link_tick(struct link *l, uint64_t now_us)
{
    if (l->state == LINK_CLOSED)
        return 0;
    if (waits_for_hello(l) && now_us - l->created_us >= LIMIT_HELLO_TIMEOUT_MS * UINT64_C(1000))
        return link_fault(l, -TD_ERR_TIMEOUT, "no HELLO within %u ms", LIMIT_HELLO_TIMEOUT_MS);
    if (now_us >= link_ask_us(l))
        l->asked_us = now_us;
    if (now_us >= gone_us(l))
        return link_fault(l, -TD_ERR_TIMEOUT, "nothing heard for %llu ms",
                          (unsigned long long)((now_us - l->heard_us) / 1000));
    if (l->partial_count > 0 && now_us - l->bulk_heard_us >= LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000))
        free_idle_partials(l);
    return 0;
}

void link_stats(const struct link *l, struct link_stats *out)
{
    *out = (struct link_stats){
        .rate_bytes_per_s = rate_estimate(&l->rate),
        .mean_bytes_per_s = rate_mean(&l->rate),
        .rate_grows = rate_grows(&l->rate),
        .probe_count = l->rate.probe_count,
        .probe_bytes_per_s = l->rate.probe_rate,
        .min_rtt_us = l->rate.min_rtt_us,
        .rtt_us = l->rate.rtt_us,
        .bulk_sent_size = l->rate.sent_size,
        .bulk_acked_size = l->rate.acked_size,
        .bulk_queued_size = l->bulk_queued_size,
        .bytes_in = l->bytes_in,
        .bytes_out = l->bytes_out,
    };
}
