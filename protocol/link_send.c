/* link_send: what goes out, most urgent first.
 *
 *     control queue > the link's own frames (PING, INGESTED, CREDIT) > tokens > HIDDEN > KV_BLOCK
 *
 * One exception: the ping that wakes a fast link goes before the OPEN that it is for (wakes_padded).
 *
 * Within a bulk class the streams take turns, a frame each. A bulk frame leaves when the stream's and the connection's credit
 * and the unacknowledged-bytes window allow. A message begins only when the credit for all of it is there and is then reserved,
 * so whatever has begun can be finished without another grant: no two half-sent messages can wait for each other. (Bytes of a
 * voided message are counted as there: the peer frees them when it sees the next one of that stream and type begin.)
 *
 * A stream's last frame and ERROR go through the token queue, so that they never overtake its tokens. */
#include "protocol/link_internal.h"
#include <stdlib.h>

/* ---- control and tokens ---- */

static bool may_send_before_ready(const struct link *l, unsigned type)
{
    if (l->config.role == LINK_EDGE)
        return l->state == LINK_START && type == FRAME_HELLO;
    return l->state == LINK_GREETING && type == FRAME_WELCOME;
}

static int send_hello(struct link *l, const ProtobufCMessage *header)
{
    if (!header || header->descriptor != &tandem__hello__descriptor)
        return -TD_ERR_ARG;
    Tandem__Hello hello;
    memcpy(&hello, header, sizeof hello);
    hello.connection_window = l->config.connection_window;
    hello.stream_window = l->config.stream_window;
    int rc = frame_queue_push(&l->control, FRAME_HELLO, 0, &hello.base, NULL, 0);
    if (rc == 0)
        l->state = LINK_GREETING;
    return rc;
}

static int send_welcome(struct link *l, const ProtobufCMessage *header)
{
    if (!header || header->descriptor != &tandem__welcome__descriptor)
        return -TD_ERR_ARG;
    Tandem__Welcome welcome;
    memcpy(&welcome, header, sizeof welcome);
    welcome.connection_window = l->config.connection_window;
    welcome.stream_window = l->config.stream_window;
    welcome.stream_count_max = LIMIT_STREAMS;
    int rc = frame_queue_push(&l->control, FRAME_WELCOME, 0, &welcome.base, NULL, 0);
    if (rc < 0)
        return rc;
    rc = link_ready(l, l->peer_connection_window, l->peer_stream_window, LIMIT_STREAMS);
    if (rc < 0)
        link_fault(l, rc, "no memory for streams");
    return rc;
}

static int send_open(struct link *l, unsigned type, uint32_t id, const ProtobufCMessage *header,
                     const void *payload, size_t payload_size)
{
    if (id % 2 == 0 || id <= l->stream_last)
        return -TD_ERR_ARG;
    if (l->stream_open_count >= l->stream_count_max)
        return -TD_ERR_FULL;
    int rc = frame_queue_push(&l->control, type, id, header, payload, payload_size);
    l->confirm_wanted = true;
    return rc < 0 ? rc : stream_open(l, id);
}

/* Cumulative: only the latest of a stream matters, so it waits in the stream and not in a queue. */
static int send_ingested(struct link *l, struct stream *s, const ProtobufCMessage *header)
{
    if (!header || header->descriptor != &tandem__ingested__descriptor || l->config.role != LINK_CLOUD)
        return -TD_ERR_ARG;
    memcpy(&s->ingested, header, sizeof s->ingested);
    s->ingested.base.n_unknown_fields = 0;
    s->ingested.base.unknown_fields = NULL;
    s->ingested_due = true;
    return 0;
}

static bool is_last(const struct link *l, unsigned type, const ProtobufCMessage *header)
{
    if (l->config.role == LINK_EDGE)
        return false;
    if (type == FRAME_OPEN_ACK && header && header->descriptor == &tandem__open_ack__descriptor) {
        Tandem__OpenAck ack;
        memcpy(&ack, header, sizeof ack);
        return ack.need_ids;
    }
    return type == FRAME_DONE || type == FRAME_ERROR || type == FRAME_CANCEL;
}

static int send_on_stream(struct link *l, unsigned type, uint32_t id, const ProtobufCMessage *header,
                          const void *payload, size_t payload_size)
{
    struct stream *s = stream_find(l, id);
    if (!s || s->ended)
        return -TD_ERR_CLOSED;
    if (type == FRAME_INGESTED)
        return send_ingested(l, s, header);
    bool last = is_last(l, type, header);
    if (l->config.role == LINK_EDGE && s->cancelled)
        return -TD_ERR_CLOSED;
    bool token = type == FRAME_TOKEN || (last && type != FRAME_OPEN_ACK);
    int rc = frame_queue_push(token ? &l->tokens : &l->control, type, id, header, payload, payload_size);
    if (rc < 0)
        return rc;
    if (last) {
        stream_free(l, s);
    } else if (type == FRAME_CANCEL) {
        stream_drop_bulk(l, s, UINT32_MAX);
        l->stream_open_count--;
        s->cancelled = true;
    }
    return 0;
}

int link_send(struct link *l, unsigned type, uint32_t stream, const ProtobufCMessage *header,
              const void *payload, size_t payload_size)
{
    const struct frame_schema *known = frame_schema(type);
    if (l->state == LINK_CLOSED)
        return -TD_ERR_CLOSED;
    if (!known || !(known->from & (l->config.role == LINK_EDGE ? FROM_EDGE : FROM_CLOUD)) ||
        frame_is_bulk(type) || type == FRAME_CREDIT || type == FRAME_PING)
        return -TD_ERR_ARG;
    if (type == FRAME_ERROR && stream == 0) {
        if (!header || header->descriptor != &tandem__error__descriptor)
            return -TD_ERR_ARG;
        Tandem__Error error;
        memcpy(&error, header, sizeof error);
        link_fail(l, -(int)(error.code & 0xffff), error.text);
        return 0;
    }
    if (l->state != LINK_READY && !may_send_before_ready(l, type))
        return -TD_ERR_AGAIN;
    if (type == FRAME_HELLO)
        return l->state == LINK_START ? send_hello(l, header) : -TD_ERR_ARG;
    if (type == FRAME_WELCOME)
        return l->state == LINK_GREETING ? send_welcome(l, header) : -TD_ERR_ARG;
    if (type == FRAME_GOAWAY)
        return frame_queue_push(&l->control, type, stream, header, payload, payload_size);
    if (stream == 0 || (type == FRAME_ERROR && l->config.role == LINK_EDGE))
        return -TD_ERR_ARG;
    if (opens_stream(l, type, stream))
        return send_open(l, type, stream, header, payload, payload_size);
    return send_on_stream(l, type, stream, header, payload, payload_size);
}

/* ---- bulk: the queues ---- */

int link_send_bulk(struct link *l, unsigned type, uint32_t stream, const ProtobufCMessage *header,
                   uint32_t epoch, uint8_t *payload, size_t payload_size)
{
    const struct frame_schema *known = frame_schema(type);
    if (l->state != LINK_READY)
        return l->state == LINK_CLOSED ? -TD_ERR_CLOSED : -TD_ERR_AGAIN;
    if (!frame_is_bulk(type) || !(known->from & (l->config.role == LINK_EDGE ? FROM_EDGE : FROM_CLOUD)) ||
        !header || header->descriptor != known->descriptor || !payload || payload_size == 0)
        return -TD_ERR_ARG;
    struct stream *s = stream_find(l, stream);
    if (!s || s->cancelled || s->ended)
        return -TD_ERR_CLOSED;
    if (payload_size > link_message_max(l))
        return -TD_ERR_LIMIT;
    if (l->bulk_queued_size + payload_size > LIMIT_SEND_QUEUE_SIZE)
        return -TD_ERR_FULL;
    struct bulk_message *m = calloc(1, sizeof *m);
    if (!m)
        return -TD_ERR_NOMEM;
    memcpy(&m->header, header, known->descriptor->sizeof_message);
    m->header.base.n_unknown_fields = 0;
    m->header.base.unknown_fields = NULL;
    l->probe_frames -= l->probe_left; /* it does not wait for the rest of a probe */
    l->probe_left = 0;
    m->epoch = epoch;
    m->size = (uint32_t)payload_size;
    m->payload = payload;
    struct bulk_queue *q = &s->queues[bulk_class_of(type)];
    *(q->last ? &q->last->next : &q->first) = m;
    q->last = m;
    l->bulk_queued_size += payload_size;
    return 0;
}

static void message_free(struct link *l, struct bulk_message *m)
{
    l->bulk_queued_size -= m->size - m->sent;
    free(m->payload);
    free(m);
}

static void queue_drop(struct link *l, struct stream *s, struct bulk_queue *q, uint32_t epoch)
{
    struct bulk_message **at = &q->first;
    q->last = NULL;
    while (*at) {
        struct bulk_message *m = *at;
        if (epoch != UINT32_MAX && m->epoch >= epoch) {
            q->last = m;
            at = &m->next;
            continue;
        }
        if (m->sent > 0) {
            s->out.reserved -= m->size - m->sent;
            l->out.reserved -= m->size - m->sent;
            q->abandoned = m->sent;
        }
        *at = m->next;
        message_free(l, m);
    }
}

void stream_drop_bulk(struct link *l, struct stream *s, uint32_t epoch)
{
    for (int class = 0; class < BULK_CLASSES; class ++)
        queue_drop(l, s, &s->queues[class], epoch);
}

/* ---- bulk: the next frame ---- */

/* May a message of `total` bytes begin, if `abandoned` bytes come back when it does? */
static bool credit_begins(const struct link *l, const struct stream *s, uint32_t abandoned, uint32_t total)
{
    return s->out.credit + abandoned >= s->out.reserved + total &&
           l->out.credit + abandoned >= l->out.reserved + total;
}

/* Credit that is not reserved for other messages. */
static uint64_t window_free(const struct window_out *w, uint32_t own_reserved)
{
    uint64_t others = w->reserved - own_reserved;
    return w->credit > others ? w->credit - others : 0;
}

/* Payload bytes of the queue's first message that may go in one frame by its credit; 0: none. */
static uint32_t bulk_part(const struct link *l, const struct stream *s, const struct bulk_queue *q)
{
    const struct bulk_message *m = q->first;
    if (!m)
        return 0;
    uint32_t rest = m->size - m->sent;
    uint64_t part = TD_MIN((uint64_t)rest, (uint64_t)(rate_frame_size(&l->rate) - LINK_BULK_OVERHEAD));
    if (m->sent > 0 && m->backed)
        return (uint32_t)part;
    if (m->sent == 0 && !credit_begins(l, s, q->abandoned, rest))
        return 0;
    uint32_t own = m->sent > 0 ? rest : 0;
    part = TD_MIN(part, window_free(&s->out, own));
    return (uint32_t)TD_MIN(part, window_free(&l->out, own));
}

struct bulk_choice {
    uint32_t slot, part;
    enum bulk_class class;
};

/* The next bulk frame by urgency and turn, whatever the unacknowledged-bytes window says. */
static bool bulk_choose(const struct link *l, struct bulk_choice *out)
{
    for (int class = 0; l->bulk_queued_size > 0 && class < BULK_CLASSES; class ++)
        for (uint32_t i = 1; i <= l->slot_count; i++) {
            uint32_t slot = (l->turn[class] + i) % l->slot_count;
            const struct stream *s = &l->streams[slot];
            uint32_t part = s->id ? bulk_part(l, s, &s->queues[class]) : 0;
            if (part > 0) {
                *out = (struct bulk_choice){slot, part, (enum bulk_class) class};
                return true;
            }
        }
    return false;
}

uint64_t link_bulk_wait_us(const struct link *l, uint64_t now_us)
{
    struct bulk_choice choice;
    return bulk_choose(l, &choice) && rate_allows(&l->rate, choice.part) ? rate_pace_wait_us(&l->rate, now_us)
                                                                         : UINT64_MAX;
}

static void bulk_account(struct link *l, struct stream *s, struct bulk_queue *q, uint32_t part,
                         uint64_t now_us)
{
    struct bulk_message *m = q->first;
    if (m->sent == 0) {
        m->backed = credit_begins(l, s, 0, m->size);
        s->out.reserved += m->size;
        l->out.reserved += m->size;
        q->abandoned = 0;
    }
    s->out.reserved -= part, s->out.credit -= part;
    l->out.reserved -= part, l->out.credit -= part;
    l->bulk_queued_size -= part;
    m->sent += part;
    rate_sent(&l->rate, part, now_us);
    if (m->sent == m->size) {
        q->first = m->next;
        if (!q->first)
            q->last = NULL;
        message_free(l, m);
    }
}

static int64_t next_bulk(struct link *l, uint8_t *dst, size_t capacity, uint64_t now_us)
{
    struct bulk_choice choice;
    rate_wake(&l->rate, now_us);
    if (!bulk_choose(l, &choice)) {
        rate_limited(&l->rate);
        return 0;
    }
    if (!rate_allows(&l->rate, choice.part)) {
        rate_windowed(&l->rate);
        return 0;
    }
    if (rate_pace_wait_us(&l->rate, now_us) > 0) { /* the link is not kept full meanwhile */
        rate_limited(&l->rate);
        return 0;
    }
    if (capacity < LINK_BULK_OVERHEAD + choice.part)
        return -TD_ERR_NOSPACE;
    struct stream *s = &l->streams[choice.slot];
    struct bulk_queue *q = &s->queues[choice.class];
    struct bulk_message *m = q->first;
    unsigned type = choice.class == BULK_HIDDEN ? FRAME_HIDDEN : FRAME_KV_BLOCK;
    if (type == FRAME_HIDDEN)
        m->header.hidden.offset = m->sent, m->header.hidden.total = m->size;
    else
        m->header.kv_block.offset = m->sent, m->header.kv_block.total = m->size;
    int64_t size =
        wire_encode(type, 0, s->id, &m->header.base, m->payload + m->sent, choice.part, dst, capacity);
    if (size < 0) /* a header that no peer would take: the owner's mistake must not stop the others */
        return link_fault(l, (int)size, "cannot send a %s: %s", frame_type_name(type),
                          td_status_text((int)size));
    l->turn[choice.class] = choice.slot;
    bulk_account(l, s, q, choice.part, now_us);
    return size;
}

/* ---- the link's own frames ---- */

/* Grants are bunched: a quarter of the window at a time, or what little there is once nothing else is on its way to us. */
static bool grant_due(const struct window_in *w, uint64_t now_us)
{
    if (w->ungranted == 0)
        return false;
    return w->grant_now || w->ungranted >= w->window / 4 ||
           (w->unconsumed == 0 && now_us - w->granted_us >= LINK_GRANT_DELAY_US);
}

/* Microseconds until this window has something to grant without further input. */
static uint64_t grant_wait_us(const struct window_in *w, uint64_t now_us)
{
    if (w->ungranted == 0)
        return UINT64_MAX;
    if (grant_due(w, now_us))
        return 0;
    return w->unconsumed == 0 ? w->granted_us + LINK_GRANT_DELAY_US - now_us : UINT64_MAX;
}

static bool probe_due(const struct link *l)
{
    return l->probe_wanted && !l->ping_open && l->rate.min_rtt_us > 0 &&
           l->rate.sent_size == l->rate.acked_size;
}

/* The first of a probe's frames has gone, and nothing else of bulk since. */
static bool probe_goes_on(const struct link *l)
{
    return l->probe_left > 0 && l->ping_padded && l->rate.sent_size == l->probe_sent_size;
}

void link_probe(struct link *l, size_t size)
{
    size_t frames = (size + LINK_PROBE_SIZE - 1) / LINK_PROBE_SIZE;
    l->probe_wanted = true;
    l->probe_padding_wanted = frames == 1 ? (uint32_t)size : LINK_PROBE_SIZE;
    l->probe_frames_wanted = (uint32_t)TD_MIN(TD_MAX(frames, (size_t)1), (size_t)LINK_PROBE_FRAMES_MAX);
}

static bool confirm_due(const struct link *l, uint64_t now_us)
{
    return l->confirm_wanted && !l->ping_open && rate_wants_confirming(&l->rate, now_us);
}

/* To TCP the answer to a lone small packet is no round trip, as it may have been put off. BBR, whose minimum is 10 s old, then empties the path to see it: three round
 * trips in which hardly anything goes, at the beginning of a prompt. So what wakes a fast link is a ping of more than a packet. */
static bool wakes_padded(const struct link *l, uint64_t now_us)
{
    return confirm_due(l, now_us) && rate_estimate(&l->rate) >= LINK_FAST;
}

/* Is a peer to be asked whether it is still there? */
static bool ask_due(const struct link *l, uint64_t now_us)
{
    return link_ask_us(l) <= now_us || l->ping_us < l->asked_us;
}

static uint64_t ping_wait_us(const struct link *l, uint64_t now_us)
{
    if (probe_due(l) || probe_goes_on(l) || confirm_due(l, now_us) || ask_due(l, now_us))
        return 0;
    uint64_t due_us = l->ping_us + LIMIT_PING_INTERVAL_MS * UINT64_C(1000);
    due_us = TD_MIN(due_us, link_ask_us(l));
    uint64_t wait_us = l->ping_us == 0 || due_us <= now_us ? 0 : due_us - now_us;
    return l->ping_open ? wait_us : TD_MIN(wait_us, rate_ping_wait_us(&l->rate, now_us));
}

static uint64_t ack_wait_us(const struct link *l, uint64_t now_us)
{
    if (!l->ack_due)
        return UINT64_MAX;
    uint64_t due_us = l->ack_us + LINK_ACK_INTERVAL_US;
    return due_us > now_us ? due_us - now_us : 0;
}

uint64_t link_own_wait_us(const struct link *l, uint64_t now_us)
{
    uint64_t wait_us = TD_MIN(ping_wait_us(l, now_us), ack_wait_us(l, now_us));
    wait_us = TD_MIN(wait_us, grant_wait_us(&l->in, now_us));
    if (l->pong_due)
        wait_us = 0;
    for (uint32_t i = 0; wait_us > 0 && i < l->slot_count; i++) {
        const struct stream *s = &l->streams[i];
        if (s->id)
            wait_us = s->ingested_due ? 0 : TD_MIN(wait_us, grant_wait_us(&s->in, now_us));
    }
    if (l->config.role == LINK_EDGE)
        wait_us = TD_MAX(wait_us, bucket_wait_us(&l->own_out, LINK_OWN_FRAMES_PER_S, now_us));
    return wait_us;
}

static int64_t next_ping(struct link *l, uint8_t *dst, size_t capacity, uint64_t now_us)
{
    static uint8_t padding[LINK_PROBE_SIZE]; /* zeros */
    Tandem__Ping ping = TANDEM__PING__INIT;
    if (l->pong_due) {
        ping.id = l->pong_id;
        ping.reply = true;
        l->pong_due = false;
        return wire_encode(FRAME_PING, 0, 0, &ping.base, NULL, 0, dst, capacity);
    }
    bool measure = !l->ping_open && rate_wants_ping(&l->rate, now_us);
    measure |= confirm_due(l, now_us);
    if (wakes_padded(l, now_us))
        ping.padding = (ProtobufCBinaryData){sizeof padding, padding};
    l->confirm_wanted = false;
    bool regular = l->ping_us == 0 || now_us - l->ping_us >= LIMIT_PING_INTERVAL_MS * UINT64_C(1000) ||
                   ask_due(l, now_us);
    bool begins = !measure && !regular && probe_due(l);
    bool padded = begins || (!measure && !regular && probe_goes_on(l));
    if (!measure && !regular && !padded)
        return 0;
    if (begins) {
        l->probe_wanted = false;
        l->probe_sent_size = l->rate.sent_size;
        l->probe_left = l->probe_frames = l->probe_frames_wanted;
        l->probe_padding = l->probe_padding_wanted;
        l->probe_us = now_us;
    }
    if (padded) {
        ping.padding = (ProtobufCBinaryData){l->probe_padding, padding};
        l->probe_left--;
    }
    if (link_ask_us(l) <= now_us)
        l->asked_us = now_us;
    ping.id = ++l->ping_id;
    l->ping_open = true;
    l->ping_padded = padded;
    l->ping_clean = l->rate.sent_size == l->rate.acked_size;
    l->ping_us = TD_MAX(now_us, (uint64_t)1);
    return wire_encode(FRAME_PING, 0, 0, &ping.base, NULL, 0, dst, capacity);
}

static int64_t next_ack(struct link *l, uint8_t *dst, size_t capacity, uint64_t now_us)
{
    Tandem__Ingested ingested = TANDEM__INGESTED__INIT;
    uint32_t stream = 0;
    for (uint32_t i = 0; i < l->slot_count && stream == 0; i++) {
        struct stream *s = &l->streams[i];
        if (s->id && s->ingested_due) {
            ingested = s->ingested;
            stream = s->id;
            s->ingested_due = false;
        }
    }
    if (stream == 0 && ack_wait_us(l, now_us) > 0)
        return 0;
    ingested.bulk_size = l->bulk_received;
    l->ack_due = false;
    l->ack_us = now_us;
    return wire_encode(FRAME_INGESTED, 0, stream, &ingested.base, NULL, 0, dst, capacity);
}

static int64_t send_grant(struct window_in *w, uint32_t stream, uint8_t *dst, size_t capacity,
                          uint64_t now_us)
{
    Tandem__Credit credit = TANDEM__CREDIT__INIT;
    credit.size = w->ungranted;
    w->open += w->ungranted;
    w->ungranted = 0;
    w->granted_us = now_us;
    w->grant_now = false;
    return wire_encode(FRAME_CREDIT, 0, stream, &credit.base, NULL, 0, dst, capacity);
}

static int64_t next_grant(struct link *l, uint8_t *dst, size_t capacity, uint64_t now_us)
{
    if (grant_due(&l->in, now_us))
        return send_grant(&l->in, 0, dst, capacity, now_us);
    for (uint32_t i = 0; i < l->slot_count; i++)
        if (l->streams[i].id && grant_due(&l->streams[i].in, now_us))
            return send_grant(&l->streams[i].in, l->streams[i].id, dst, capacity, now_us);
    return 0;
}

static int64_t next_own(struct link *l, uint8_t *dst, size_t capacity, uint64_t now_us)
{
    if (link_own_wait_us(l, now_us) > 0)
        return 0;
    if (capacity < LINK_BULK_OVERHEAD)
        return -TD_ERR_NOSPACE;
    int64_t size = next_ping(l, dst, capacity, now_us);
    if (size == 0)
        size = next_ack(l, dst, capacity, now_us);
    if (size == 0)
        size = next_grant(l, dst, capacity, now_us);
    if (size > 0 && l->config.role == LINK_EDGE)
        bucket_take(&l->own_out, LINK_OWN_FRAMES_PER_S, now_us);
    return size;
}

/* ---- all ---- */

static int64_t next_queued(struct frame_queue *q, uint8_t *dst, size_t capacity)
{
    size_t size = frame_queue_first_size(q);
    if (size > capacity)
        return -TD_ERR_NOSPACE;
    return size > 0 ? (int64_t)frame_queue_pop(q, dst) : 0;
}

int64_t link_next(struct link *l, uint8_t *dst, size_t capacity, uint64_t now_us)
{
    bool wakes = l->state == LINK_READY && wakes_padded(l, now_us);
    int64_t size = wakes ? next_own(l, dst, capacity, now_us) : 0;
    if (size == 0)
        size = next_queued(&l->control, dst, capacity);
    if (size == 0 && l->state == LINK_CLOSED)
        return -TD_ERR_CLOSED;
    if (size == 0 && l->state == LINK_READY) {
        size = next_own(l, dst, capacity, now_us);
        if (size == 0)
            size = next_queued(&l->tokens, dst, capacity);
        if (size == 0)
            size = next_bulk(l, dst, capacity, now_us);
    }
    if (size > 0)
        l->bytes_out += (uint64_t)size;
    return size;
}
