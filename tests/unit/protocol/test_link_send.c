/* link, what goes out: urgency, sizes of bulk frames, credit, voiding, turns, full queues. */
#include "frames.h"
#include "protocol/link_internal.h"

static uint8_t *bytes_of(size_t size)
{
    uint8_t *bytes = malloc(size);
    assert_non_null(bytes);
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(i * 13 + i / 256);
    return bytes;
}

static int send_bulk(struct owner *o, unsigned type, uint32_t stream, uint32_t epoch, uint32_t name,
                     size_t size)
{
    Tandem__Hidden h = hidden_valid(7, 7); /* offset and total are the link's */
    Tandem__KvBlock k = kv_valid(7, 7);
    h.epoch = k.epoch = epoch;
    h.first_token = k.block_index = name;
    uint8_t *bytes = bytes_of(size);
    int rc =
        link_send_bulk(o->link, type, stream, type == FRAME_HIDDEN ? &h.base : &k.base, epoch, bytes, size);
    if (rc < 0)
        free(bytes);
    return rc;
}

static uint32_t name_of(const struct wire_frame *f)
{
    return f->type == FRAME_HIDDEN ? f->hidden->first_token : f->kv_block->block_index;
}

static int credit(struct owner *o, uint32_t stream, uint32_t size)
{
    Tandem__Credit m = TANDEM__CREDIT__INIT;
    m.size = size;
    return give(o, FRAME_CREDIT, stream, &m.base, NULL, 0);
}

/* The peer acknowledges all that was sent. */
static void acknowledge(struct owner *o)
{
    struct link_stats stats;
    link_stats(o->link, &stats);
    Tandem__Ingested m = TANDEM__INGESTED__INIT;
    m.bulk_size = stats.bulk_sent_size;
    assert_int_equal(give(o, FRAME_INGESTED, 0, &m.base, NULL, 0), 0);
}

/* An edge that knows its uplink: `rate` bytes/s. */
static void edge_with_rate(struct owner *o, uint64_t rate)
{
    edge_ready(o, 0, 0);
    o->link->rate.hint = rate;
    assert_int_equal(edge_open(o, 1), 0);
    while (take(o).type)
        ;
}

/* ---- urgency ---- */

static void test_urgency_at_an_edge(void **state)
{
    (void)state;
    struct owner o;
    edge_with_rate(&o, 1 << 20);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 0, 1000), 0);
    assert_int_equal(send_bulk(&o, FRAME_HIDDEN, 1, 1, 0, 1000), 0);
    Tandem__Generate generate = TANDEM__GENERATE__INIT;
    assert_int_equal(link_send(o.link, FRAME_GENERATE, 1, &generate.base, NULL, 0), 0);
    assert_int_equal(take_owned(&o).type, FRAME_GENERATE);
    assert_int_equal(take_owned(&o).type, FRAME_HIDDEN);
    assert_int_equal(take_owned(&o).type, FRAME_KV_BLOCK);
    assert_int_equal(take_owned(&o).type, 0);
    owner_stop(&o);
}

static void test_urgency_at_a_cloud(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 0, 1000), 0);
    assert_int_equal(link_send(o.link, FRAME_TOKEN, 1, NULL, many_bytes, 4), 0);
    Tandem__Ingested ingested = TANDEM__INGESTED__INIT;
    assert_int_equal(link_send(o.link, FRAME_INGESTED, 1, &ingested.base, NULL, 0), 0);
    assert_int_equal(link_send(o.link, FRAME_OPEN_ACK, 1, NULL, NULL, 0), 0);
    assert_int_equal(link_send(o.link, FRAME_GOAWAY, 0, NULL, NULL, 0), 0);
    static const unsigned expected[] = {FRAME_OPEN_ACK, FRAME_GOAWAY,   FRAME_INGESTED,
                                        FRAME_TOKEN,    FRAME_KV_BLOCK, 0};
    for (size_t i = 0; i < TD_COUNT(expected); i++)
        assert_int_equal(take(&o).type, expected[i]);
    owner_stop(&o);
}

/* An urgent frame waits for no more than the bulk frame that has left. */
static void test_cancel_overtakes_half_a_message(void **state)
{
    (void)state;
    struct owner o;
    edge_with_rate(&o, 1 << 20);
    assert_int_equal(edge_open(&o, 3), 0);
    assert_int_equal(take_owned(&o).type, FRAME_OPEN);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 0, 1 << 20), 0);
    assert_int_equal(take_owned(&o).type, FRAME_KV_BLOCK);
    assert_int_equal(link_send(o.link, FRAME_CANCEL, 3, NULL, NULL, 0), 0);
    struct wire_frame f = take_owned(&o);
    assert_int_equal(f.type, FRAME_CANCEL);
    assert_int_equal(send_bulk(&o, FRAME_HIDDEN, 1, 1, 0, 100), 0);
    assert_int_equal(take_owned(&o).type, FRAME_HIDDEN); /* and so does HIDDEN overtake KV */
    f = take_owned(&o);
    assert_int_equal(f.type, FRAME_KV_BLOCK);
    assert_true(f.kv_block->offset > 0);
    owner_stop(&o);
}

/* A stream's last frame leaves after its tokens. */
static void test_last_frame_stays_behind_tokens(void **state)
{
    (void)state;
    static const unsigned lasts[] = {FRAME_DONE, FRAME_ERROR, FRAME_CANCEL};
    for (size_t i = 0; i < TD_COUNT(lasts); i++) {
        struct owner o;
        cloud_ready(&o, 0, 0);
        assert_int_equal(cloud_open(&o, 1), 0);
        assert_int_equal(link_send(o.link, FRAME_TOKEN, 1, NULL, many_bytes, 4), 0);
        assert_int_equal(link_send(o.link, FRAME_TOKEN, 1, NULL, many_bytes, 8), 0);
        assert_int_equal(link_send(o.link, lasts[i], 1, NULL, NULL, 0), 0);
        assert_int_equal(link_send(o.link, FRAME_TOKEN, 1, NULL, many_bytes, 4), -TD_ERR_CLOSED);
        assert_int_equal(take(&o).payload.size, 4);
        assert_int_equal(take(&o).payload.size, 8);
        assert_int_equal(take(&o).type, lasts[i]);
        owner_stop(&o);
    }
}

/* ---- frames of a message ---- */

static void test_message_in_frames(void **state)
{
    (void)state;
    struct owner o;
    edge_with_rate(&o, 1 << 20);
    const size_t total = 100001;
    uint8_t *expected = bytes_of(total);
    assert_int_equal(send_bulk(&o, FRAME_HIDDEN, 1, 3, 42, total), 0);
    struct link_stats stats;
    size_t offset = 0;
    while (offset < total) {
        link_stats(o.link, &stats);
        assert_int_equal(stats.bulk_queued_size, total - offset);
        assert_int_equal(stats.bulk_sent_size, offset);
        struct wire_frame f = take_owned(&o);
        if (f.type == 0) {
            acknowledge(&o);
            continue;
        }
        assert_int_equal(f.type, FRAME_HIDDEN);
        assert_int_equal(f.stream, 1);
        assert_int_equal(f.hidden->offset, offset);
        assert_int_equal(f.hidden->total, total);
        assert_int_equal(f.hidden->first_token, 42);
        assert_int_equal(f.hidden->epoch, 3);
        assert_memory_equal(f.payload.data, expected + offset, f.payload.size);
        offset += f.payload.size;
    }
    assert_int_equal(offset, total);
    assert_int_equal(take_owned(&o).type, 0);
    free(expected);
    owner_stop(&o);
}

/* About 20 ms of the link, between the two bounds. Whole frames, head included, never exceed them. */
static void test_size_of_bulk_frames(void **state)
{
    (void)state;
    static const struct {
        uint64_t rate;
        size_t frame;
    } cases[] = {
        {1, LIMIT_BULK_FRAME_MIN},
        {102400, LIMIT_BULK_FRAME_MIN},
        {102450, LIMIT_BULK_FRAME_MIN + 1},
        {1000000, 20000},
        {13107100, LIMIT_BULK_FRAME_MAX - 2},
        {13107200, LIMIT_BULK_FRAME_MAX},
        {14000000, LIMIT_BULK_FRAME_MAX},
        {UINT64_MAX, LIMIT_BULK_FRAME_MAX},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct owner o;
        edge_with_rate(&o, cases[i].rate);
        o.link->rate.acked_size = o.link->rate.sent_size = 1 << 20; /* it has been busy until now */
        o.link->rate.acked_us = o.now_us;
        assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 0, 1 << 20), 0);
        struct wire_frame f = take_owned(&o);
        assert_int_equal(f.payload.size, cases[i].frame - LINK_BULK_OVERHEAD);
        struct link_stats stats;
        uint64_t before = o.link->bytes_out;
        f = take_owned(&o);
        link_stats(o.link, &stats);
        assert_true(stats.bytes_out - before <= cases[i].frame);
        assert_true(stats.bytes_out - before > cases[i].frame - LINK_BULK_OVERHEAD);
        owner_stop(&o);
    }
}

/* The longest header a bulk frame can have fits into what is reserved for it. */
static void test_overhead_of_bulk_frames(void **state)
{
    (void)state;
    Tandem__Hidden h = {.base = PROTOBUF_C_MESSAGE_INIT(&tandem__hidden__descriptor),
                        UINT32_MAX,
                        UINT32_MAX,
                        UINT32_MAX,
                        UINT32_MAX,
                        UINT32_MAX,
                        UINT32_MAX,
                        UINT32_MAX};
    Tandem__KvBlock k = {.base = PROTOBUF_C_MESSAGE_INIT(&tandem__kv_block__descriptor),
                         UINT32_MAX,
                         UINT32_MAX,
                         UINT32_MAX,
                         true,
                         UINT32_MAX,
                         UINT32_MAX};
    assert_true(WIRE_HEAD_SIZE + protobuf_c_message_get_packed_size(&h.base) <= LINK_BULK_OVERHEAD);
    assert_true(WIRE_HEAD_SIZE + protobuf_c_message_get_packed_size(&k.base) <= LINK_BULK_OVERHEAD);
}

/* ---- what may be on the way ---- */

static uint64_t send_all(struct owner *o)
{
    uint64_t size = 0;
    for (struct wire_frame f = take_owned(o); f.type; f = take_owned(o))
        size += f.payload.size;
    return size;
}

static void test_unacknowledged_bytes(void **state)
{
    (void)state;
    struct owner o;
    const uint64_t rate = 5000000;
    edge_with_rate(&o, rate);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 0, 2 << 20), 0);
    const uint64_t cap = rate * LIMIT_UNACKED_MARGIN_US / 1000000; /* no round trip known yet */
    uint64_t sent = send_all(&o);
    assert_true(sent <= cap && sent + rate / 50 > cap);
    assert_int_equal(link_wait_us(o.link, o.now_us) > 0, 1);
    o.now_us += 10000;
    acknowledge(&o);
    assert_int_equal(link_wait_us(o.link, o.now_us), 0);
    assert_true(send_all(&o) > 0);
    owner_stop(&o);
}

/* However slow the link: two bulk frames may be on the way. */
static void test_two_bulk_frames_at_least(void **state)
{
    (void)state;
    struct owner o;
    edge_with_rate(&o, 10);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 0, 100000), 0);
    assert_int_equal(take_owned(&o).type, FRAME_KV_BLOCK);
    assert_int_equal(take_owned(&o).type, FRAME_KV_BLOCK);
    assert_int_equal(take_owned(&o).type, 0);
    acknowledge(&o);
    assert_int_equal(take_owned(&o).type, FRAME_KV_BLOCK);
    owner_stop(&o);
}

static void test_acknowledged_more_than_was_sent(void **state)
{
    (void)state;
    for (uint64_t beyond = 0; beyond < 2; beyond++)
        for (uint32_t stream = 0; stream < 2; stream++) {
            struct owner o;
            edge_with_rate(&o, 1 << 20);
            assert_int_equal(send_bulk(&o, FRAME_HIDDEN, 1, 1, 0, 1000), 0);
            assert_int_equal(take_owned(&o).type, FRAME_HIDDEN);
            Tandem__Ingested m = TANDEM__INGESTED__INIT;
            m.bulk_size = 1000 + beyond;
            assert_int_equal(give(&o, FRAME_INGESTED, stream, &m.base, NULL, 0),
                             beyond ? -TD_ERR_PROTOCOL : 0);
            assert_int_equal(o.seen_count, stream && !beyond); /* on a stream it is the owner's too */
            owner_stop(&o);
        }
}

/* ---- credit ---- */

static void test_message_begins_with_credit_for_all_of_it(void **state)
{
    (void)state;
    for (int which = 0; which < 2; which++) { /* the connection's window, the stream's */
        struct owner o;
        edge_ready(&o, which ? 100000 : 10000, which ? 10000 : 100000);
        assert_int_equal(link_message_max(o.link), 10000);
        o.link->rate.hint = 1 << 20;
        assert_int_equal(edge_open(&o, 1), 0);
        assert_int_equal(take_owned(&o).type, FRAME_OPEN);
        assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 0, 10001), -TD_ERR_LIMIT);
        assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 0, 6000), 0);
        assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 0, 4001), 0);
        assert_int_equal(send_all(&o), 6000);
        acknowledge(&o);
        uint32_t stream = which ? 1 : 0;
        assert_int_equal(credit(&o, 1 - stream, 50000), 0); /* the other window: no help */
        assert_int_equal(send_all(&o), 0);
        assert_int_equal(credit(&o, stream, 1), 0);
        assert_int_equal(send_all(&o), 4001);
        assert_int_equal(credit(&o, 9, 5000), -TD_ERR_PROTOCOL); /* a stream that never was */
        owner_stop(&o);
    }
}

/* A small message must not take what a large one that has begun still needs. */
static void test_begun_messages_keep_their_credit(void **state)
{
    (void)state;
    struct owner o;
    edge_ready(&o, 50000, 50000);
    o.link->rate.hint = 102400; /* frames of 2 KiB, two at a time */
    assert_int_equal(edge_open(&o, 1), 0);
    assert_int_equal(edge_open(&o, 3), 0);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 0, 45000), 0);
    assert_int_equal(take_owned(&o).type, FRAME_OPEN);
    assert_int_equal(take_owned(&o).type, FRAME_OPEN);
    assert_int_equal(take_owned(&o).type, FRAME_KV_BLOCK);
    assert_int_equal(send_bulk(&o, FRAME_HIDDEN, 1, 1, 0, 5001), 0);
    assert_int_equal(send_bulk(&o, FRAME_HIDDEN, 3, 1, 0, 5000), 0);
    uint64_t kv = 0;
    bool fitting_seen = false;
    for (int i = 0; i < 100; i++) {
        struct wire_frame f = take_owned(&o);
        if (f.type == 0)
            acknowledge(&o);
        else if (f.type == FRAME_KV_BLOCK)
            kv += f.payload.size;
        else
            assert_true(f.type == FRAME_HIDDEN && f.stream == 3), fitting_seen = true;
    }
    assert_true(fitting_seen);
    assert_int_equal(kv, 45000 - (LIMIT_BULK_FRAME_MIN - LINK_BULK_OVERHEAD)); /* all of it went */
    assert_int_equal(credit(&o, 0, 5001), 0);
    assert_int_equal(credit(&o, 1, 1), 0);
    assert_int_equal(take_owned(&o).stream, 1);
    owner_stop(&o);
}

static void test_credit_has_a_limit(void **state)
{
    (void)state;
    struct owner o;
    edge_ready(&o, 0, 0);
    assert_int_equal(edge_open(&o, 1), 0);
    assert_int_equal(credit(&o, 1, LIMIT_CREDIT_SIZE - LIMIT_STREAM_WINDOW), 0);
    assert_int_equal(credit(&o, 0, LIMIT_CREDIT_SIZE - LIMIT_CONNECTION_WINDOW), 0);
    assert_int_equal(credit(&o, 1, 1), -TD_ERR_PROTOCOL);
    assert_failed(&o, -TD_ERR_PROTOCOL);
    owner_stop(&o);
}

/* ---- turns ---- */

static void test_streams_take_turns(void **state)
{
    (void)state;
    struct owner o;
    edge_with_rate(&o, 102400);
    assert_int_equal(edge_open(&o, 3), 0);
    assert_int_equal(edge_open(&o, 5), 0);
    for (uint32_t stream = 1; stream <= 5; stream += 2)
        assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, stream, 1, 0, 20000), 0);
    unsigned count[3] = {0};
    for (int i = 0; i < 12;) {
        struct wire_frame f = take_owned(&o);
        if (f.type == FRAME_KV_BLOCK)
            count[f.stream / 2]++, i++;
        else if (f.type == 0)
            acknowledge(&o);
    }
    assert_true(count[0] == 4 && count[1] == 4 && count[2] == 4);
    owner_stop(&o);
}

/* ---- voiding ---- */

static void test_void_by_epoch(void **state)
{
    (void)state;
    struct owner o;
    edge_with_rate(&o, 1 << 24);
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(send_bulk(&o, i % 2 ? FRAME_HIDDEN : FRAME_KV_BLOCK, 1, 1 + i / 2, i, 1000), 0);
    assert_int_equal(edge_open(&o, 3), 0);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 3, 1, 77, 1000), 0);
    link_void(o.link, 1, 3); /* epochs 1 and 2 of this stream */
    link_void(o.link, 99, UINT32_MAX);
    struct link_stats stats;
    link_stats(o.link, &stats);
    assert_int_equal(stats.bulk_queued_size, 3000);
    assert_int_equal(take_owned(&o).type, FRAME_OPEN);
    struct wire_frame f = take_owned(&o);
    assert_int_equal(name_of(&f), 5);
    f = take_owned(&o);
    assert_true(name_of(&f) == 77 || name_of(&f) == 4);
    f = take_owned(&o);
    assert_true(name_of(&f) == 77 || name_of(&f) == 4);
    assert_int_equal(take_owned(&o).type, 0);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 9, 8, 1000), 0); /* the queue still works */
    link_void(o.link, 1, UINT32_MAX);
    assert_int_equal(take_owned(&o).type, 0);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 9, 8, 1000), 0);
    assert_int_equal(take_owned(&o).type, FRAME_KV_BLOCK);
    owner_stop(&o);
}

/* A message voided when half of it has gone: the next may begin although the first's bytes are not granted again yet, and
 * goes on when they are. */
static void test_void_half_a_message(void **state)
{
    (void)state;
    for (uint32_t narrow = 0; narrow < 2; narrow++) { /* the connection's window, the stream's */
        struct owner o;
        edge_ready(&o, narrow ? 100000 : 10000, narrow ? 10000 : 100000);
        o.link->rate.hint = 1;
        assert_int_equal(edge_open(&o, 1), 0);
        assert_int_equal(take_owned(&o).type, FRAME_OPEN);
        assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 1, 10000), 0);
        uint64_t sent = 0;
        for (int i = 0; i < 4; i++) {
            struct wire_frame f = take_owned(&o);
            sent += f.payload.size;
            acknowledge(&o);
        }
        assert_true(sent > 0 && sent < 10000);
        link_void(o.link, 1, 2);
        assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 2, 2, 10000), 0);
        struct wire_frame f = take_owned(&o);
        assert_int_equal(f.kv_block->block_index, 2);
        assert_int_equal(f.kv_block->offset, 0);
        uint64_t second = f.payload.size;
        for (int i = 0; i < 10; i++) {
            acknowledge(&o);
            f = take_owned(&o);
            second += f.payload.size;
        }
        assert_int_equal(sent + second, 10000); /* never beyond what was granted */
        assert_int_equal(credit(&o, narrow, (uint32_t)sent), 0);
        for (int i = 0; i < 10; i++) {
            acknowledge(&o);
            f = take_owned(&o);
            second += f.payload.size;
        }
        assert_int_equal(second, 10000);
        owner_stop(&o);
    }
}

/* A message that begins on the strength of abandoned bytes leaves alone what another one has reserved. */
static void test_abandoned_bytes_are_not_anothers_credit(void **state)
{
    (void)state;
    struct owner o;
    edge_ready(&o, 50000, 50000);
    o.link->rate.hint = 1;
    assert_int_equal(edge_open(&o, 1), 0);
    assert_int_equal(edge_open(&o, 3), 0);
    while (take(&o).type)
        ;
    const uint32_t part = LIMIT_BULK_FRAME_MIN - LINK_BULK_OVERHEAD;
    assert_int_equal(send_bulk(&o, FRAME_HIDDEN, 1, 1, 1, 30000), 0);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(take_owned(&o).payload.size, part);
        acknowledge(&o);
    }
    link_void(o.link, 1, 2);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 3, 1, 3, 20000), 0);
    assert_int_equal(take_owned(&o).stream, 3);
    acknowledge(&o);
    assert_int_equal(send_bulk(&o, FRAME_HIDDEN, 1, 2, 2, 30000), 0);
    uint64_t sent[4] = {0};
    for (int i = 0; i < 60; i++) {
        struct wire_frame f = take_owned(&o);
        if (frame_is_bulk(f.type))
            sent[f.stream] += f.payload.size;
        acknowledge(&o);
    }
    assert_int_equal(sent[3], 20000 - part);
    assert_int_equal(sent[1], 50000 - 4 * part - 20000);
    owner_stop(&o);
}

static void test_closing_drops_bulk(void **state)
{
    (void)state;
    struct owner o;
    edge_with_rate(&o, 1 << 20);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 1, 100000), 0);
    assert_int_equal(take_owned(&o).type, FRAME_KV_BLOCK);
    assert_int_equal(link_send(o.link, FRAME_CANCEL, 1, NULL, NULL, 0), 0);
    assert_int_equal(take_owned(&o).type, FRAME_CANCEL);
    assert_int_equal(take_owned(&o).type, 0);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 1, 10), -TD_ERR_CLOSED);
    assert_int_equal(o.link->out.reserved, 0);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 3, 1, 1, 10), -TD_ERR_CLOSED);
    assert_int_equal(edge_open(&o, 3), 0); /* and when the cloud says DONE */
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 3, 1, 1, 100000), 0);
    assert_int_equal(give_valid(&o, FRAME_DONE, 3), 0);
    assert_int_equal(take_owned(&o).type, FRAME_OPEN);
    assert_int_equal(take_owned(&o).type, 0);
    struct link_stats stats;
    link_stats(o.link, &stats);
    assert_int_equal(stats.bulk_queued_size, 0);
    owner_stop(&o);
}

/* ---- full ---- */

static void test_bulk_arguments(void **state)
{
    (void)state;
    struct owner o;
    edge_with_rate(&o, 1 << 20);
    Tandem__Hidden h = hidden_valid(0, 4);
    Tandem__KvBlock k = kv_valid(0, 4);
    assert_int_equal(link_send_bulk(o.link, FRAME_HIDDEN, 1, NULL, 1, many_bytes, 4), -TD_ERR_ARG);
    assert_int_equal(link_send_bulk(o.link, FRAME_HIDDEN, 1, &k.base, 1, many_bytes, 4), -TD_ERR_ARG);
    assert_int_equal(link_send_bulk(o.link, FRAME_HIDDEN, 1, &h.base, 1, NULL, 4), -TD_ERR_ARG);
    assert_int_equal(link_send_bulk(o.link, FRAME_HIDDEN, 1, &h.base, 1, many_bytes, 0), -TD_ERR_ARG);
    assert_int_equal(link_send_bulk(o.link, FRAME_TOKEN, 1, &h.base, 1, many_bytes, 4), -TD_ERR_ARG);
    owner_stop(&o);
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(link_send_bulk(o.link, FRAME_HIDDEN, 1, &h.base, 1, many_bytes, 4), -TD_ERR_ARG);
    owner_stop(&o);
}

static void test_largest_message_out(void **state)
{
    (void)state;
    struct owner o;
    edge_ready(&o, LIMIT_CREDIT_SIZE, LIMIT_CREDIT_SIZE); /* windows that would take more */
    assert_int_equal(edge_open(&o, 1), 0);
    assert_int_equal(link_message_max(o.link), LIMIT_PIECE_SIZE);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 1, LIMIT_PIECE_SIZE), 0);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 1, LIMIT_PIECE_SIZE + 1), -TD_ERR_LIMIT);
    owner_stop(&o);
}

static void test_send_queue_is_bounded(void **state)
{
    (void)state;
    struct owner o;
    edge_with_rate(&o, 1 << 20);
    for (uint32_t i = 0; i < LIMIT_SEND_QUEUE_SIZE >> 20; i++)
        assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, i, (1 << 20) - (i == 0)), 0);
    assert_int_equal(send_bulk(&o, FRAME_HIDDEN, 1, 1, 0, 2), -TD_ERR_FULL);
    assert_int_equal(send_bulk(&o, FRAME_HIDDEN, 1, 1, 0, 1), 0);
    assert_int_equal(send_bulk(&o, FRAME_HIDDEN, 1, 1, 0, 1), -TD_ERR_FULL);
    assert_int_equal(take_owned(&o).payload.size, 1);
    assert_int_equal(send_bulk(&o, FRAME_HIDDEN, 1, 1, 0, 1), 0);
    owner_stop(&o);
}

static void test_control_queue_is_bounded(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    const size_t frame = 1 << 16, cost = frame + 4; /* a frame and its size in the queue */
    const size_t fitting = LIMIT_CONTROL_QUEUE_SIZE / cost;
    for (size_t i = 0; i < fitting; i++)
        assert_int_equal(link_send(o.link, FRAME_TOKEN, 1, NULL, many_bytes, frame - WIRE_HEAD_SIZE), 0);
    const size_t rest = LIMIT_CONTROL_QUEUE_SIZE - fitting * cost - 4 - WIRE_HEAD_SIZE;
    assert_int_equal(link_send(o.link, FRAME_TOKEN, 1, NULL, many_bytes, rest + 4), -TD_ERR_FULL);
    assert_int_equal(link_send(o.link, FRAME_TOKEN, 1, NULL, many_bytes, rest), 0);
    assert_int_equal(link_send(o.link, FRAME_DONE, 1, NULL, NULL, 0), -TD_ERR_FULL);
    assert_int_equal(link_send(o.link, FRAME_GOAWAY, 0, NULL, NULL, 0), 0); /* control has room of its own */
    while (take(&o).type)
        ;
    assert_int_equal(link_send(o.link, FRAME_DONE, 1, NULL, NULL, 0), 0);
    owner_stop(&o);
}

static void test_queue_in_order_through_growth(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    uint32_t sent = 0, taken = 0;
    srand(3);
    while (taken < 5000) {
        for (int burst = rand() % 40; burst > 0; burst--) {
            Tandem__Token token = TANDEM__TOKEN__INIT;
            token.index = sent++;
            assert_int_equal(
                link_send(o.link, FRAME_TOKEN, 1, &token.base, many_bytes, 4 * (1 + (size_t)rand() % 30)), 0);
        }
        for (int burst = rand() % 42; burst > 0 && taken < sent; burst--)
            assert_int_equal(take(&o).token->index, taken++);
    }
    owner_stop(&o);
}

static void test_small_buffers_are_refused(void **state)
{
    (void)state;
    struct owner o;
    uint8_t bytes[4096];
    edge_with_rate(&o, 1 << 20);
    assert_int_equal(link_send(o.link, FRAME_GOAWAY, 0, NULL, NULL, 0), 0);
    assert_int_equal(link_next(o.link, bytes, WIRE_HEAD_SIZE - 1, o.now_us), -TD_ERR_NOSPACE);
    assert_int_equal(link_next(o.link, bytes, WIRE_HEAD_SIZE, o.now_us), WIRE_HEAD_SIZE);
    assert_int_equal(send_bulk(&o, FRAME_KV_BLOCK, 1, 1, 0, 2000), 0);
    assert_int_equal(link_next(o.link, bytes, 2000, o.now_us), -TD_ERR_NOSPACE);
    assert_true(link_next(o.link, bytes, 2000 + LINK_BULK_OVERHEAD, o.now_us) > 2000);
    owner_stop(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_urgency_at_an_edge),
        cmocka_unit_test(test_urgency_at_a_cloud),
        cmocka_unit_test(test_cancel_overtakes_half_a_message),
        cmocka_unit_test(test_last_frame_stays_behind_tokens),
        cmocka_unit_test(test_message_in_frames),
        cmocka_unit_test(test_size_of_bulk_frames),
        cmocka_unit_test(test_overhead_of_bulk_frames),
        cmocka_unit_test(test_unacknowledged_bytes),
        cmocka_unit_test(test_two_bulk_frames_at_least),
        cmocka_unit_test(test_acknowledged_more_than_was_sent),
        cmocka_unit_test(test_message_begins_with_credit_for_all_of_it),
        cmocka_unit_test(test_begun_messages_keep_their_credit),
        cmocka_unit_test(test_credit_has_a_limit),
        cmocka_unit_test(test_streams_take_turns),
        cmocka_unit_test(test_void_by_epoch),
        cmocka_unit_test(test_void_half_a_message),
        cmocka_unit_test(test_abandoned_bytes_are_not_anothers_credit),
        cmocka_unit_test(test_closing_drops_bulk),
        cmocka_unit_test(test_bulk_arguments),
        cmocka_unit_test(test_largest_message_out),
        cmocka_unit_test(test_send_queue_is_bounded),
        cmocka_unit_test(test_control_queue_is_bounded),
        cmocka_unit_test(test_queue_in_order_through_growth),
        cmocka_unit_test(test_small_buffers_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
