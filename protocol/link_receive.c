/* link_receive: what comes in. Every frame passes the same gates, in this order: size and shape (wire_decode), the rate of
 * control frames, the state of the connection, who may send it, its stream; bulk also the windows. What passes is handed to
 * the owner, bulk once a message is whole.
 *
 * A part is kept in a buffer that grows with what has arrived, never with what the peer announces; all of it is within the
 * windows. Parts of one (stream, type) come in order; a new message there discards an unfinished one. */
#include "protocol/link_internal.h"
#include <stdlib.h>

/* ---- windows ---- */

static void window_release(struct window_in *w, uint32_t size, bool now)
{
    w->ungranted += size;
    w->grant_now |= now;
}

void partial_drop(struct link *l, struct stream *s, struct partial *p)
{
    if (p->id.total == 0)
        return;
    if (!p->skip) { /* the sender may be waiting for just these bytes: grant them at once */
        window_release(&s->in, p->have, true);
        window_release(&l->in, p->have, true);
        l->partial_count--;
    }
    free(p->data);
    *p = (struct partial){0};
}

/* ---- bulk ---- */

static struct bulk_id bulk_id_of(const struct wire_frame *f, uint32_t *offset)
{
    if (f->type == FRAME_HIDDEN) {
        const Tandem__Hidden *m = f->hidden;
        *offset = m->offset;
        return (struct bulk_id){{m->epoch, m->first_token, m->count, m->layer, m->dtype}, m->total};
    }
    const Tandem__KvBlock *m = f->kv_block;
    *offset = m->offset;
    return (struct bulk_id){{m->epoch, m->block_index, m->layer, m->is_value, 0}, m->total};
}

static bool bulk_id_equal(const struct bulk_id *a, const struct bulk_id *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/* Hand a whole message on. Its bytes count as unconsumed until link_consumed. */
static int bulk_deliver(struct link *l, struct stream *s, const struct wire_frame *f)
{
    uint32_t id = s->id, size = (uint32_t)f->payload.size;
    s->in.unconsumed += size;
    l->in.unconsumed += size;
    int rc = l->config.on_frame(l->config.ctx, f);
    if (l->config.role == LINK_EDGE)
        link_consumed(l, id, size);
    return rc;
}

static int partial_append(struct partial *p, struct span bytes)
{
    uint32_t needed = p->have + (uint32_t)bytes.size;
    if (needed > p->capacity) {
        uint32_t capacity = TD_MIN(p->id.total, TD_MAX(needed, 2 * p->capacity));
        uint8_t *data = realloc(p->data, capacity);
        if (!data)
            return -TD_ERR_NOMEM;
        p->data = data;
        p->capacity = capacity;
    }
    memcpy(p->data + p->have, bytes.data, bytes.size);
    p->have = needed;
    return 0;
}

/* The message is complete: deliver it out of its buffer as one frame. */
static int partial_deliver(struct link *l, struct stream *s, struct partial *p, struct wire_frame *f)
{
    struct partial whole = *p;
    *p = (struct partial){0};
    l->partial_count--;
    f->payload = (struct span){whole.data, whole.have};
    if (f->type == FRAME_HIDDEN)
        f->hidden->offset = 0;
    else
        f->kv_block->offset = 0;
    int rc = bulk_deliver(l, s, f);
    free(whole.data);
    return rc;
}

/* The frame's bytes have been taken out of both windows; every path below puts them somewhere. */
static int bulk_join(struct link *l, struct stream *s, struct wire_frame *f)
{
    struct partial *p = &s->partials[bulk_class_of(f->type)];
    uint32_t offset, size = (uint32_t)f->payload.size;
    struct bulk_id id = bulk_id_of(f, &offset);
    if (offset == 0) {
        if (id.total > s->in.window || id.total > l->in.window)
            return link_fault(l, -TD_ERR_PROTOCOL, "%s larger than the window", frame_type_name(f->type));
        partial_drop(l, s, p);
        if (size == id.total)
            return bulk_deliver(l, s, f);
        p->id = id;
        l->partial_count++;
    } else if (p->id.total == 0 || offset != p->have || !bulk_id_equal(&id, &p->id)) {
        return link_fault(l, -TD_ERR_PROTOCOL, "%s continues nothing", frame_type_name(f->type));
    }
    if (p->skip) {
        window_release(&s->in, size, true);
        window_release(&l->in, size, true);
        p->have += size;
        if (p->have == p->id.total)
            *p = (struct partial){0};
        return 0;
    }
    int rc = partial_append(p, f->payload);
    if (rc < 0)
        return link_fault(l, rc, "no memory for a %s", frame_type_name(f->type));
    return p->have == p->id.total ? partial_deliver(l, s, p, f) : 0;
}

static int receive_bulk(struct link *l, struct stream *s, struct wire_frame *f, uint64_t now_us)
{
    uint32_t size = (uint32_t)f->payload.size;
    if (size > l->in.open)
        return link_fault(l, -TD_ERR_PROTOCOL, "%s beyond the connection's window", frame_type_name(f->type));
    if (s && size > s->in.open)
        return link_fault(l, -TD_ERR_PROTOCOL, "%s beyond the stream's window", frame_type_name(f->type));
    l->in.open -= size;
    l->bulk_received += size;
    l->bulk_heard_us = now_us;
    l->ack_due = true;
    if (!s) { /* late */
        window_release(&l->in, size, false);
        return 0;
    }
    s->in.open -= size;
    return bulk_join(l, s, f);
}

/* ---- frames of the link itself ---- */

static int receive_ack(struct link *l, const Tandem__Ingested *m, uint64_t now_us)
{
    if (m->bulk_size > l->rate.sent_size)
        return link_fault(l, -TD_ERR_PROTOCOL, "INGESTED acknowledges bytes that were not sent");
    rate_acked(&l->rate, m->bulk_size, now_us);
    return 0;
}

static int receive_credit(struct link *l, struct stream *s, const struct wire_frame *f)
{
    struct window_out *w = s ? &s->out : &l->out;
    if (f->credit->size > LIMIT_CREDIT_SIZE - TD_MIN(w->credit, (uint64_t)LIMIT_CREDIT_SIZE))
        return link_fault(l, -TD_ERR_PROTOCOL, "CREDIT opens too large a window");
    w->credit += f->credit->size;
    return 0;
}

static int receive_ping(struct link *l, const Tandem__Ping *m, uint64_t now_us)
{
    if (!m->reply) { /* only the latest is answered: what waits here stays bounded */
        l->pong_due = true;
        l->pong_id = m->id;
    } else if (l->ping_open && m->id == l->ping_id) {
        bool alone = l->ping_padded && l->rate.sent_size == l->probe_sent_size;
        l->ping_open = alone && l->probe_left > 0; /* the rest of the probe has not gone yet */
        if (alone && !l->ping_open)
            rate_probed(&l->rate, (size_t)l->probe_frames * l->probe_padding, now_us - l->probe_us, now_us);
        else if (!l->ping_padded)
            rate_ping(&l->rate, now_us - l->ping_us, l->ping_clean, now_us);
    }
    return 0;
}

/* ---- greetings ---- */

static int hand_on(struct link *l, const struct wire_frame *f)
{
    return l->config.on_frame(l->config.ctx, f);
}

/* Before READY: HELLO from an edge, once; WELCOME or ERROR from a cloud. */
static int receive_greeting(struct link *l, struct wire_frame *f)
{
    if (l->config.role == LINK_CLOUD) {
        if (l->state != LINK_START || f->type != FRAME_HELLO)
            return link_fault(l, -TD_ERR_PROTOCOL, "%s before WELCOME", frame_type_name(f->type));
        l->peer_connection_window = f->hello->connection_window;
        l->peer_stream_window = f->hello->stream_window;
        l->state = LINK_GREETING;
        return hand_on(l, f);
    }
    if (l->state == LINK_GREETING && f->type == FRAME_WELCOME) {
        const Tandem__Welcome *m = f->welcome;
        if (link_ready(l, m->connection_window, m->stream_window, m->stream_count_max) < 0)
            return link_fault(l, -TD_ERR_NOMEM, "no memory for streams");
        return hand_on(l, f);
    }
    if (l->state == LINK_GREETING && f->type == FRAME_ERROR && f->stream == 0) {
        l->state = LINK_CLOSED;
        return hand_on(l, f);
    }
    return link_fault(l, -TD_ERR_PROTOCOL, "%s before WELCOME", frame_type_name(f->type));
}

/* ---- READY ---- */

/* The last frame of a stream from a cloud; CANCEL ends it from either side, though after an edge's a DONE may still come. */
static bool ends_stream(const struct wire_frame *f)
{
    return f->type == FRAME_DONE || f->type == FRAME_ERROR || f->type == FRAME_CANCEL ||
           (f->type == FRAME_OPEN_ACK && f->open_ack->need_ids);
}

static int receive_last(struct link *l, struct stream *s, const struct wire_frame *f)
{
    uint32_t id = s->id;
    stream_end(l, s);
    int rc = hand_on(l, f);
    s = stream_find(l, id);
    if (s)
        stream_free(l, s);
    return rc;
}

static int receive_cancel(struct link *l, struct stream *s, const struct wire_frame *f)
{
    if (s->cancelled)
        return link_fault(l, -TD_ERR_PROTOCOL, "CANCEL twice on stream %u", s->id);
    l->stream_open_count--;
    s->cancelled = true;
    stream_drop_bulk(l, s, UINT32_MAX);
    return hand_on(l, f);
}

static int receive_open(struct link *l, const struct wire_frame *f)
{
    int rc = stream_open(l, f->stream);
    if (rc == -TD_ERR_FULL)
        return link_fault(l, -TD_ERR_LIMIT, "more than %u streams open", l->stream_count_max);
    if (rc < 0)
        return link_fault(l, -TD_ERR_PROTOCOL, "%s of stream %u out of order", frame_type_name(f->type),
                          f->stream);
    return hand_on(l, f);
}

static int receive_on_stream(struct link *l, struct wire_frame *f, uint64_t now_us)
{
    if (opens_stream(l, f->type, f->stream))
        return receive_open(l, f);
    struct stream *s = stream_find(l, f->stream);
    if (!s && (f->stream % 2 == 0 || f->stream > l->stream_last))
        return link_fault(l, -TD_ERR_PROTOCOL, "%s on stream %u, which was never opened",
                          frame_type_name(f->type), f->stream);
    if (frame_is_bulk(f->type))
        return receive_bulk(l, s, f, now_us);
    if (f->type == FRAME_INGESTED) {
        int rc = receive_ack(l, f->ingested, now_us);
        if (rc < 0)
            return rc;
    }
    if (!s)
        return 0; /* late */
    if (f->type == FRAME_CREDIT)
        return receive_credit(l, s, f);
    if (f->type == FRAME_CANCEL && l->config.role == LINK_CLOUD)
        return receive_cancel(l, s, f);
    return ends_stream(f) ? receive_last(l, s, f) : hand_on(l, f);
}

static int receive_on_connection(struct link *l, struct wire_frame *f, uint64_t now_us)
{
    switch (f->type) {
    case FRAME_INGESTED:
        return receive_ack(l, f->ingested, now_us);
    case FRAME_CREDIT:
        return receive_credit(l, NULL, f);
    case FRAME_PING:
        return receive_ping(l, f->ping, now_us);
    case FRAME_ERROR:
        l->state = LINK_CLOSED;
        frame_queue_clear(&l->control);
        return hand_on(l, f);
    case FRAME_GOAWAY:
        return hand_on(l, f);
    default:
        return link_fault(l, -TD_ERR_PROTOCOL, "a second %s", frame_type_name(f->type));
    }
}

static int receive_ready(struct link *l, struct wire_frame *f, uint64_t now_us)
{
    bool from_edge = l->config.role == LINK_CLOUD;
    if (!(frame_schema(f->type)->from & (from_edge ? FROM_EDGE : FROM_CLOUD)) ||
        (from_edge && f->type == FRAME_INGESTED && f->stream != 0) ||
        (from_edge && f->type == FRAME_ERROR && f->stream != 0))
        return link_fault(l, -TD_ERR_PROTOCOL, "%s from the wrong side", frame_type_name(f->type));
    return f->stream ? receive_on_stream(l, f, now_us) : receive_on_connection(l, f, now_us);
}

/* Does this frame count against LIMIT_CONTROL_FRAMES_PER_S? Bulk is held by its windows, except for crumbs. A cloud may answer
 * as fast as it was asked to: tokens, acknowledgements and credit come as bunched as the path delivers them. */
static bool counts_as_control(const struct link *l, const struct wire_frame *f, bool unknown)
{
    if (unknown)
        return true;
    if (frame_is_bulk(f->type)) {
        uint32_t offset, total = bulk_id_of(f, &offset).total;
        return f->payload.size < LIMIT_BULK_FRAME_MIN - LINK_BULK_OVERHEAD &&
               offset + f->payload.size < total;
    }
    return l->config.role == LINK_CLOUD || !(f->type == FRAME_TOKEN || f->type == FRAME_INGESTED ||
                                             f->type == FRAME_CREDIT || f->type == FRAME_DONE);
}

void link_heard(struct link *l, uint64_t now_us)
{
    l->heard_us = now_us;
}

int link_receive(struct link *l, const void *data, size_t size, uint64_t now_us)
{
    if (l->state == LINK_CLOSED)
        return -TD_ERR_CLOSED;
    l->bytes_in += size;
    link_heard(l, now_us);
    arena_reset(&l->arena);
    struct wire_frame frame;
    size_t header_limit = l->state == LINK_READY ? LIMIT_HEADER_SIZE : LIMIT_HEADER_SIZE_BEFORE_WELCOME;
    int rc = wire_decode(data, size, header_limit, &l->arena, &frame);
    bool unknown = rc == 1;
    if (rc < 0)
        return link_fault(l, rc, "%s frame refused: %s", frame_type_name(frame.type), td_status_text(rc));
    if (counts_as_control(l, &frame, unknown) &&
        !bucket_take(&l->control_in, LIMIT_CONTROL_FRAMES_PER_S, now_us))
        return link_fault(l, -TD_ERR_LIMIT, "more than %u control frames a second",
                          LIMIT_CONTROL_FRAMES_PER_S);
    if (unknown)
        return l->state == LINK_READY ? 0 : link_fault(l, -TD_ERR_PROTOCOL, "frame before WELCOME");
    rc = l->state == LINK_READY ? receive_ready(l, &frame, now_us) : receive_greeting(l, &frame);
    if (rc > 0)
        rc = -rc; /* a positive code from the owner is a refusal too */
    if (rc < 0)
        link_fault(l, rc, "%s refused: %s", frame_type_name(frame.type), td_status_text(rc));
    if (l->arena.taken_size > LINK_ARENA_KEEP)
        arena_deinit(&l->arena);
    return rc;
}
