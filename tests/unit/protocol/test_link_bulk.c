/* link, bulk that comes in: messages put together from their frames, windows and grants at their edges, acknowledgements. */
#include "frames.h"
#include "protocol/link_internal.h"

static void fill(uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(i * 7 + i / 251);
}

static int give_hidden(struct owner *o, uint32_t stream, uint32_t offset, uint32_t size, uint32_t total)
{
    Tandem__Hidden m = hidden_valid(offset, total);
    return give(o, FRAME_HIDDEN, stream, &m.base, many_bytes + offset, size);
}

static int give_kv(struct owner *o, uint32_t stream, uint32_t offset, uint32_t size, uint32_t total)
{
    Tandem__KvBlock m = kv_valid(offset, total);
    return give(o, FRAME_KV_BLOCK, stream, &m.base, many_bytes + offset, size);
}

/* A whole message in frames of the largest size. */
static int give_message(struct owner *o, uint32_t stream, uint32_t total)
{
    int rc = 0;
    for (uint32_t offset = 0; rc == 0 && offset < total; offset += 1u << 19)
        rc = give_kv(o, stream, offset, TD_MIN(1u << 19, total - offset), total);
    return rc;
}

/* What the peer may still send, if the link keeps its promise. */
static void assert_balanced(const struct link *l)
{
    uint64_t held_all = 0;
    for (uint32_t i = 0; i < l->slot_count; i++) {
        const struct stream *s = &l->streams[i];
        uint64_t held = 0;
        for (int class = 0; class < BULK_CLASSES; class ++)
            held += s->partials[class].skip ? 0 : s->partials[class].have;
        if (!s->id)
            continue;
        assert_int_equal(s->in.open + held + s->in.unconsumed + s->in.ungranted, s->in.window);
        held_all += held;
    }
    assert_int_equal(l->in.open + held_all + l->in.unconsumed + l->in.ungranted, l->in.window);
}

/* ---- putting together ---- */

static uint8_t delivered[LIMIT_PIECE_SIZE];
static size_t delivered_size;
static uint32_t delivered_offset, delivered_total;

static void copy_it(struct owner *o, const struct wire_frame *f)
{
    (void)o;
    if (!frame_is_bulk(f->type))
        return;
    memcpy(delivered, f->payload.data, f->payload.size);
    delivered_size = f->payload.size;
    delivered_offset = f->type == FRAME_HIDDEN ? f->hidden->offset : f->kv_block->offset;
    delivered_total = f->type == FRAME_HIDDEN ? f->hidden->total : f->kv_block->total;
}

static void test_one_message_of_many_frames(void **state)
{
    (void)state;
    static const uint32_t parts[] = {100000, 100, 1, 33, 777, 99999};
    fill(many_bytes, sizeof many_bytes);
    for (size_t i = 0; i < TD_COUNT(parts); i++) {
        struct owner o;
        cloud_ready(&o, 0, 0);
        assert_int_equal(cloud_open(&o, 1), 0);
        o.react = copy_it;
        o.seen_count = 0;
        const uint32_t total = parts[i] == 1 ? 500 : 100000;
        for (uint32_t offset = 0; offset < total; offset += parts[i]) {
            assert_int_equal(o.seen_count, 0); /* only when it is whole */
            o.now_us += 1000;                  /* crumbs count as control frames */
            assert_int_equal(give_hidden(&o, 1, offset, TD_MIN(parts[i], total - offset), total), 0);
        }
        assert_int_equal(o.seen_count, 1);
        assert_int_equal(o.seen[0].type, FRAME_HIDDEN);
        assert_int_equal(delivered_size, total);
        assert_memory_equal(delivered, many_bytes, total);
        assert_int_equal(delivered_offset, 0);
        assert_int_equal(delivered_total, total);
        assert_balanced(o.link);
        owner_stop(&o);
    }
}

static void test_streams_and_types_interleave(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(cloud_open(&o, 3), 0);
    o.seen_count = 0;
    for (uint32_t offset = 0; offset < 9000; offset += 3000) {
        assert_int_equal(give_hidden(&o, 1, offset, 3000, 9000), 0);
        assert_int_equal(give_kv(&o, 1, offset, 3000, 9000), 0);
        assert_int_equal(give_kv(&o, 3, offset, 3000, 9000), 0);
    }
    assert_int_equal(o.seen_count, 3);
    assert_true(o.seen[0].type == FRAME_HIDDEN && o.seen[0].stream == 1 && o.seen[0].payload_size == 9000);
    assert_true(o.seen[1].type == FRAME_KV_BLOCK && o.seen[1].stream == 1);
    assert_true(o.seen[2].type == FRAME_KV_BLOCK && o.seen[2].stream == 3);
    assert_balanced(o.link);
    owner_stop(&o);
}

static void test_parts_that_do_not_fit(void **state)
{
    (void)state;
    static const uint32_t offsets[] = {2999, 3001, 6000, 1};
    for (size_t i = 0; i < TD_COUNT(offsets); i++) {
        struct owner o;
        cloud_ready(&o, 0, 0);
        assert_int_equal(cloud_open(&o, 1), 0);
        assert_int_equal(give_hidden(&o, 1, 0, 3000, 9000), 0);
        assert_int_equal(give_hidden(&o, 1, offsets[i], 3000, 9000), -TD_ERR_PROTOCOL);
        assert_failed(&o, -TD_ERR_PROTOCOL);
        owner_stop(&o);
    }
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(give_hidden(&o, 1, 3000, 3000, 9000), -TD_ERR_PROTOCOL); /* begins in the middle */
    owner_stop(&o);
}

/* A frame that goes on must be of the same message in every field. */
static void test_parts_of_another_message(void **state)
{
    (void)state;
    for (int field = 0; field < 10; field++) {
        struct owner o;
        cloud_ready(&o, 0, 0);
        assert_int_equal(cloud_open(&o, 1), 0);
        Tandem__Hidden h = hidden_valid(0, 9000);
        Tandem__KvBlock k = kv_valid(0, 9000);
        unsigned type = field < 6 ? FRAME_HIDDEN : FRAME_KV_BLOCK;
        const ProtobufCMessage *header = field < 6 ? &h.base : &k.base;
        assert_int_equal(give(&o, type, 1, header, many_bytes, 3000), 0);
        uint32_t *fields[] = {&h.epoch, &h.first_token, &h.count,       &h.layer, &h.dtype,
                              &h.total, &k.epoch,       &k.block_index, &k.layer, &k.total};
        h.offset = k.offset = 3000;
        *fields[field] += 1;
        assert_int_equal(give(&o, type, 1, header, many_bytes, 3000), -TD_ERR_PROTOCOL);
        owner_stop(&o);
    }
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    Tandem__KvBlock k = kv_valid(0, 9000);
    assert_int_equal(give(&o, FRAME_KV_BLOCK, 1, &k.base, many_bytes, 3000), 0);
    k.offset = 3000, k.is_value = true;
    assert_int_equal(give(&o, FRAME_KV_BLOCK, 1, &k.base, many_bytes, 3000), -TD_ERR_PROTOCOL);
    owner_stop(&o);
}

static void test_next_message_replaces_an_abandoned_one(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 100000, 100000);
    assert_int_equal(cloud_open(&o, 1), 0);
    o.seen_count = 0;
    assert_int_equal(give_hidden(&o, 1, 0, 9000, 90000), 0);
    while (take(&o).type)
        ;
    assert_int_equal(give_hidden(&o, 1, 0, 100, 100), 0); /* begins, and is whole at once */
    assert_int_equal(o.seen_count, 1);
    assert_int_equal(o.seen[0].payload_size, 100);
    unsigned granted = 0; /* the abandoned bytes are granted again at once, though far less than a quarter */
    for (struct wire_frame f = take(&o); f.type; f = take(&o))
        if (f.type == FRAME_CREDIT) {
            assert_int_equal(f.credit->size, 9000);
            granted |= f.stream == 0 ? 1 : f.stream == 1 ? 2 : 4;
        }
    assert_int_equal(granted, 3);
    assert_balanced(o.link);
    assert_int_equal(give_hidden(&o, 1, 9000, 9000, 90000), -TD_ERR_PROTOCOL); /* and it cannot go on */
    owner_stop(&o);
}

/* ---- limits of size ---- */

static void test_largest_message(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 2 * LIMIT_PIECE_SIZE, 2 * LIMIT_PIECE_SIZE);
    assert_int_equal(cloud_open(&o, 1), 0);
    o.seen_count = 0;
    assert_int_equal(give_message(&o, 1, LIMIT_PIECE_SIZE), 0);
    assert_int_equal(o.seen[0].payload_size, LIMIT_PIECE_SIZE);
    assert_int_equal(give_kv(&o, 1, 0, 1000, LIMIT_PIECE_SIZE + 1), -TD_ERR_LIMIT);
    assert_failed(&o, -TD_ERR_LIMIT);
    owner_stop(&o);
}

/* A message that the window could never hold is refused at its first frame. */
static void test_message_larger_than_a_window(void **state)
{
    (void)state;
    for (int which = 0; which < 2; which++) {
        struct owner o;
        cloud_ready(&o, which ? 10000 : 50000, which ? 50000 : 10000);
        assert_int_equal(cloud_open(&o, 1), 0);
        assert_int_equal(give_kv(&o, 1, 0, 5000, 10000), 0);
        assert_int_equal(give_kv(&o, 1, 0, 10, 10001), -TD_ERR_PROTOCOL);
        assert_failed(&o, -TD_ERR_PROTOCOL);
        owner_stop(&o);
    }
}

/* What is held grows with what has come, not with what was announced. */
static void test_memory_follows_arrival(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    const uint32_t total = LIMIT_STREAM_WINDOW;
    for (uint32_t have = 0, part = 10; have < total; have += part, part = TD_MIN(part * 3, 1u << 19)) {
        part = TD_MIN(part, total - have);
        assert_int_equal(give_hidden(&o, 1, have, part, total), 0);
        const struct partial *p = &o.link->streams[0].partials[BULK_HIDDEN];
        if (have + part < total) {
            assert_int_equal(p->have, have + part);
            assert_true(p->capacity <= 2 * p->have);
        } else {
            assert_null(p->data);
        }
    }
    owner_stop(&o);
}

/* ---- windows ---- */

static void test_stream_window_to_the_byte(void **state)
{
    (void)state;
    for (uint32_t beyond = 0; beyond < 2; beyond++) {
        struct owner o;
        cloud_ready(&o, 0, 0);
        assert_int_equal(cloud_open(&o, 1), 0);
        assert_int_equal(give_message(&o, 1, LIMIT_STREAM_WINDOW - 10), 0);
        assert_int_equal(give_kv(&o, 1, 0, 10 + beyond, 10 + beyond), beyond ? -TD_ERR_PROTOCOL : 0);
        if (beyond)
            assert_failed(&o, -TD_ERR_PROTOCOL);
        owner_stop(&o);
    }
}

static void test_connection_window_to_the_byte(void **state)
{
    (void)state;
    const uint32_t streams = LIMIT_CONNECTION_WINDOW / LIMIT_STREAM_WINDOW;
    for (uint32_t beyond = 0; beyond < 2; beyond++) {
        struct owner o;
        cloud_ready(&o, 0, 0);
        for (uint32_t i = 0; i < streams; i++) {
            assert_int_equal(cloud_open(&o, 2 * i + 1), 0);
            assert_int_equal(give_message(&o, 2 * i + 1, LIMIT_STREAM_WINDOW - 100), 0);
        }
        assert_int_equal(cloud_open(&o, 99), 0);
        const uint32_t rest = streams * 100 + beyond;
        assert_int_equal(give_kv(&o, 99, 0, rest, rest), beyond ? -TD_ERR_PROTOCOL : 0);
        owner_stop(&o);
    }
}

/* Parts of a message count as much as whole ones. */
static void test_unfinished_messages_count(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 100000, 50000);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(give_kv(&o, 1, 0, 30000, 50000), 0);
    assert_int_equal(give_hidden(&o, 1, 0, 20000, 40000), 0);
    assert_balanced(o.link);
    assert_int_equal(give_hidden(&o, 1, 20000, 1, 40000), -TD_ERR_PROTOCOL);
    owner_stop(&o);
}

/* Late frames of a stream that is over: dropped, but within the connection's window, which they give back. */
static void test_late_bulk(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 100000, 50000);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(give_kv(&o, 1, 0, 3000, 50000), 0);
    link_close_stream(o.link, 1);
    o.seen_count = 0;
    assert_int_equal(give_kv(&o, 1, 3000, 20000, 50000), 0);
    assert_int_equal(o.seen_count, 0);
    assert_balanced(o.link);
    assert_int_equal(give_kv(&o, 1, 23000, 77000, 200000), 0);
    assert_int_equal(give_kv(&o, 1, 0, 1, 1), -TD_ERR_PROTOCOL); /* nothing was granted yet */
    owner_stop(&o);
}

/* ---- grants ---- */

static uint32_t granted(struct owner *o, uint32_t stream)
{
    uint32_t size = 0;
    for (struct wire_frame f = take(o); f.type; f = take(o))
        if (f.type == FRAME_CREDIT && f.stream == stream)
            size += f.credit->size;
    return size;
}

static void test_grant_of_a_quarter(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 1000000, 100000);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(give_kv(&o, 1, 0, 50000, 50000), 0);
    granted(&o, 1);
    link_consumed(o.link, 1, 24999);
    assert_int_equal(granted(&o, 1), 0);
    link_consumed(o.link, 1, 1);
    assert_int_equal(granted(&o, 1), 25000);
    assert_balanced(o.link);
    /* the granted bytes may really be sent, not one more */
    assert_int_equal(give_kv(&o, 1, 0, 75000, 75000), 0);
    assert_int_equal(give_kv(&o, 1, 0, 1, 1), -TD_ERR_PROTOCOL);
    owner_stop(&o);
}

/* Little is granted too, once nothing else is unconsumed: else a large message might wait for ever. */
static void test_grant_of_the_rest(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 1000000, 100000);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(give_kv(&o, 1, 0, 40000, 40000), 0);
    link_consumed(o.link, 1, 30000);
    assert_int_equal(granted(&o, 1), 30000);
    link_consumed(o.link, 1, 9000);
    o.now_us += 10 * LINK_GRANT_DELAY_US;
    assert_int_equal(granted(&o, 1), 0); /* 1000 bytes are still unconsumed */
    assert_int_equal(give_kv(&o, 1, 0, 10, 10), 0);
    link_consumed(o.link, 1, 1010);
    assert_int_equal(granted(&o, 1), 10010);
    assert_int_equal(give_kv(&o, 1, 0, 10, 10), 0);
    link_consumed(o.link, 1, 10);
    assert_int_equal(granted(&o, 1), 0); /* not a grant for every crumb */
    assert_int_equal(link_wait_us(o.link, o.now_us), LINK_ACK_INTERVAL_US);
    o.now_us += LINK_ACK_INTERVAL_US;
    take(&o); /* INGESTED */
    assert_int_equal(link_wait_us(o.link, o.now_us), LINK_GRANT_DELAY_US - LINK_ACK_INTERVAL_US);
    o.now_us += LINK_GRANT_DELAY_US - LINK_ACK_INTERVAL_US;
    assert_int_equal(granted(&o, 1), 10);
    assert_balanced(o.link);
    owner_stop(&o);
}

static void test_consumed_no_more_than_came(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 100000, 50000);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(give_kv(&o, 1, 0, 20000, 20000), 0);
    link_consumed(o.link, 1, 1000000);
    assert_balanced(o.link);
    assert_int_equal(granted(&o, 1), 20000);
    link_consumed(o.link, 1, 1000);
    assert_balanced(o.link);
    assert_int_equal(granted(&o, 1), 0);
    owner_stop(&o);
}

/* What a stream had left unconsumed at its end comes back to the connection by link_consumed, under its id or 0. */
static void test_consumed_after_the_stream(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 100000, 50000);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(give_kv(&o, 1, 0, 40000, 40000), 0);
    link_close_stream(o.link, 1);
    assert_balanced(o.link);
    assert_int_equal(granted(&o, 0), 0);
    link_consumed(o.link, 1, 30000);
    assert_int_equal(granted(&o, 0), 30000);
    link_consumed(o.link, 0, 10000);
    o.now_us += LINK_GRANT_DELAY_US;
    assert_int_equal(granted(&o, 0), 10000);
    assert_balanced(o.link);
    owner_stop(&o);
}

/* An edge's owner need not care. */
static void test_edge_consumes_by_itself(void **state)
{
    (void)state;
    struct owner o;
    edge_ready(&o, 0, 0);
    assert_int_equal(edge_open(&o, 1), 0);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(give_message(&o, 1, 1u << 20), 0);
        assert_balanced(o.link);
        o.now_us += 20000;
        while (take(&o).type)
            ;
    }
    assert_int_equal(o.seen_count, 100);
    owner_stop(&o);
}

static void test_random_traffic_stays_balanced(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    srand(1);
    uint32_t last = 0, unconsumed[200] = {0};
    for (int step = 0; step < 20000; step++) {
        o.now_us += (uint64_t)rand() % 20000;
        uint32_t stream = last ? last - 2 * ((uint32_t)rand() % TD_MIN(10u, (last + 1) / 2)) : 0;
        struct stream *s = stream_find(o.link, stream);
        switch (rand() % 8) {
        case 0:
            if (o.link->stream_open_count < LIMIT_STREAMS && last < 390) {
                last = last ? last + 2 : 1;
                assert_int_equal(cloud_open(&o, last), 0);
            }
            break;
        case 1:
            if (rand() % 20 == 0)
                link_close_stream(o.link, stream);
            break;
        case 2:
            if (stream) {
                uint32_t size = unconsumed[stream / 2] / 2 + 1;
                unconsumed[stream / 2] -= TD_MIN(size, unconsumed[stream / 2]);
                link_consumed(o.link, stream, size);
            }
            break;
        case 3:
            while (take(&o).type)
                ;
            break;
        default: {
            if (!s)
                break;
            struct partial *p = &s->partials[BULK_KV];
            uint32_t total = p->id.total && rand() % 10 ? p->id.total : 1 + (uint32_t)rand() % 200000;
            uint32_t offset = total == p->id.total ? p->have : 0;
            uint32_t part = 1 + (uint32_t)rand() % (total - offset);
            if (part > s->in.open || part > o.link->in.open || (part < 2000 && offset + part < total))
                break;
            assert_int_equal(give_kv(&o, stream, offset, part, total), 0);
            if (offset + part == total)
                unconsumed[stream / 2] += total;
            break;
        }
        }
        assert_balanced(o.link);
    }
    owner_stop(&o);
}

/* ---- acknowledgements ---- */

static struct wire_frame take_type(struct owner *o, unsigned type)
{
    for (;;) {
        struct wire_frame f = take(o);
        if (f.type == type || f.type == 0)
            return f;
    }
}

static void test_acknowledgements(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(take_type(&o, FRAME_INGESTED).type, 0);
    assert_int_equal(give_kv(&o, 1, 0, 5000, 100000), 0); /* a part is enough */
    struct wire_frame f = take_type(&o, FRAME_INGESTED);
    assert_int_equal(f.type, FRAME_INGESTED);
    assert_int_equal(f.stream, 0);
    assert_int_equal(f.ingested->bulk_size, 5000);
    assert_int_equal(give_kv(&o, 1, 5000, 5000, 100000), 0);
    assert_int_equal(take_type(&o, FRAME_INGESTED).type, 0); /* not so soon again */
    assert_int_equal(link_wait_us(o.link, o.now_us), LINK_ACK_INTERVAL_US);
    o.now_us += LINK_ACK_INTERVAL_US - 1;
    assert_int_equal(take_type(&o, FRAME_INGESTED).type, 0);
    o.now_us += 1;
    assert_int_equal(link_wait_us(o.link, o.now_us), 0);
    assert_int_equal(take_type(&o, FRAME_INGESTED).ingested->bulk_size, 10000);
    o.now_us += LINK_ACK_INTERVAL_US;
    assert_int_equal(take_type(&o, FRAME_INGESTED).type, 0); /* nothing new */
    owner_stop(&o);
}

static void test_owner_acknowledgements_replace_each_other(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(give_kv(&o, 1, 0, 5000, 5000), 0);
    Tandem__Ingested m = TANDEM__INGESTED__INIT;
    for (uint32_t i = 1; i <= 1000; i++) {
        m.kv_tokens = i;
        m.bulk_size = 123456789; /* the link knows better */
        assert_int_equal(link_send(o.link, FRAME_INGESTED, 1, &m.base, NULL, 0), 0);
    }
    struct wire_frame f = take_type(&o, FRAME_INGESTED);
    assert_int_equal(f.stream, 1);
    assert_int_equal(f.ingested->kv_tokens, 1000);
    assert_int_equal(f.ingested->bulk_size, 5000);
    assert_int_equal(take_type(&o, FRAME_INGESTED).type, 0); /* it was the link's acknowledgement too */
    assert_int_equal(link_send(o.link, FRAME_INGESTED, 0, &m.base, NULL, 0), -TD_ERR_ARG);
    owner_stop(&o);
}

/* ---- uploads that stop ---- */

static void test_idle_upload_is_freed(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 100000, 50000);
    assert_int_equal(cloud_open(&o, 1), 0);
    o.seen_count = 0;
    o.now_us += 3000; /* not just when a ping is due */
    assert_int_equal(give_kv(&o, 1, 0, 9000, 50000), 0);
    for (uint64_t passed_ms = 0; passed_ms < LIMIT_UPLOAD_IDLE_MS; passed_ms += 10000) {
        while (take(&o).type)
            ;
        assert_int_equal(link_tick(o.link, o.now_us), 0);
        assert_int_equal(give_valid(&o, FRAME_PING, 0), 0); /* the peer is alive */
        o.now_us += 10000 * 1000 - (passed_ms == 20000);
    }
    assert_int_equal(link_tick(o.link, o.now_us), 0);
    assert_non_null(o.link->streams[0].partials[BULK_KV].data); /* a microsecond early */
    while (take(&o).type)
        ;
    assert_int_equal(link_wait_us(o.link, o.now_us), 1);
    o.now_us++;
    assert_int_equal(link_tick(o.link, o.now_us), 0);
    assert_null(o.link->streams[0].partials[BULK_KV].data);
    assert_balanced(o.link);
    assert_int_equal(granted(&o, 1), 9000);
    /* the rest comes after all: counted and dropped; the next message is welcome */
    assert_int_equal(give_kv(&o, 1, 9000, 20000, 50000), 0);
    assert_int_equal(give_kv(&o, 1, 29000, 21000, 50000), 0);
    assert_balanced(o.link);
    assert_int_equal(o.seen_count, 0);
    assert_int_equal(granted(&o, 1), 41000);
    assert_int_equal(give_kv(&o, 1, 0, 100, 100), 0);
    assert_int_equal(o.seen_count, 1);
    owner_stop(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_message_of_many_frames),
        cmocka_unit_test(test_streams_and_types_interleave),
        cmocka_unit_test(test_parts_that_do_not_fit),
        cmocka_unit_test(test_parts_of_another_message),
        cmocka_unit_test(test_next_message_replaces_an_abandoned_one),
        cmocka_unit_test(test_largest_message),
        cmocka_unit_test(test_message_larger_than_a_window),
        cmocka_unit_test(test_memory_follows_arrival),
        cmocka_unit_test(test_stream_window_to_the_byte),
        cmocka_unit_test(test_connection_window_to_the_byte),
        cmocka_unit_test(test_unfinished_messages_count),
        cmocka_unit_test(test_late_bulk),
        cmocka_unit_test(test_grant_of_a_quarter),
        cmocka_unit_test(test_grant_of_the_rest),
        cmocka_unit_test(test_consumed_no_more_than_came),
        cmocka_unit_test(test_consumed_after_the_stream),
        cmocka_unit_test(test_edge_consumes_by_itself),
        cmocka_unit_test(test_random_traffic_stays_balanced),
        cmocka_unit_test(test_acknowledgements),
        cmocka_unit_test(test_owner_acknowledgements_replace_each_other),
        cmocka_unit_test(test_idle_upload_is_freed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
