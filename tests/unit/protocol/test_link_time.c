/* link, time: HELLO and silence at their edges, pings, the rate of control frames, and that link_wait_us tells the truth. */
#include "frames.h"
#include "protocol/link_internal.h"

#define MS UINT64_C(1000)

static void drain(struct owner *o)
{
    while (take(o).type)
        ;
}

static void test_hello_in_time(void **state)
{
    (void)state;
    struct owner o;
    owner_start(&o, LINK_CLOUD, 0, 0);
    assert_int_equal(link_wait_us(o.link, o.now_us), LIMIT_HELLO_TIMEOUT_MS * MS);
    o.now_us += LIMIT_HELLO_TIMEOUT_MS * MS - 1;
    assert_int_equal(link_tick(o.link, o.now_us), 0);
    assert_int_equal(link_wait_us(o.link, o.now_us), 1);
    assert_int_equal(give_valid(&o, FRAME_HELLO, 0), 0);
    o.now_us += LIMIT_HELLO_TIMEOUT_MS * MS; /* from now on the owner may take its time */
    assert_int_equal(link_tick(o.link, o.now_us), 0);
    owner_stop(&o);
}

static void test_hello_too_late(void **state)
{
    (void)state;
    struct owner o;
    owner_start(&o, LINK_CLOUD, 0, 0);
    o.now_us += LIMIT_HELLO_TIMEOUT_MS * MS;
    assert_int_equal(link_wait_us(o.link, o.now_us), 0);
    assert_int_equal(link_tick(o.link, o.now_us), -TD_ERR_TIMEOUT);
    assert_failed(&o, -TD_ERR_TIMEOUT);
    assert_int_equal(link_tick(o.link, o.now_us), 0);
    owner_stop(&o);
}

/* Every other frame is a sign of life, and every part of one; nothing at all for so long is not. */
static void test_silence(void **state)
{
    (void)state;
    for (int role = LINK_EDGE; role <= LINK_CLOUD; role++) {
        struct owner o;
        if (role == LINK_EDGE)
            edge_ready(&o, 0, 0);
        else
            cloud_ready(&o, 0, 0);
        o.now_us += LIMIT_PEER_SILENCE_MS * MS - 1;
        assert_int_equal(link_tick(o.link, o.now_us), 0);
        assert_int_equal(give_valid(&o, FRAME_GOAWAY, 0), 0);
        o.now_us += LIMIT_PEER_SILENCE_MS * MS - 1;
        assert_int_equal(link_tick(o.link, o.now_us), 0);
        link_heard(o.link, o.now_us);
        o.now_us += LIMIT_PEER_SILENCE_MS * MS - 1;
        assert_int_equal(link_tick(o.link, o.now_us), 0);
        drain(&o);
        assert_int_equal(link_wait_us(o.link, o.now_us), 1);
        o.now_us += 1;
        assert_int_equal(link_tick(o.link, o.now_us), -TD_ERR_TIMEOUT);
        assert_failed(&o, -TD_ERR_TIMEOUT);
        owner_stop(&o);
    }
}

static void test_silent_cloud_never_welcomes(void **state)
{
    (void)state;
    struct owner o;
    owner_start(&o, LINK_EDGE, 0, 0);
    Tandem__Hello hello = hello_valid();
    assert_int_equal(link_send(o.link, FRAME_HELLO, 0, &hello.base, NULL, 0), 0);
    drain(&o);
    o.now_us += LIMIT_PEER_SILENCE_MS * MS - 1;
    assert_int_equal(link_tick(o.link, o.now_us), 0);
    assert_int_equal(link_wait_us(o.link, o.now_us), 1);
    o.now_us += 1;
    assert_int_equal(link_tick(o.link, o.now_us), -TD_ERR_TIMEOUT);
    owner_stop(&o);
}

/* ---- pings ---- */

static int pong(struct owner *o, uint64_t id)
{
    Tandem__Ping m = TANDEM__PING__INIT;
    m.id = id;
    m.reply = true;
    return give(o, FRAME_PING, 0, &m.base, NULL, 0);
}

/* Whoever waits asks after half of its patience and takes the peer for gone after all of it, counted from when it began to wait; far away it is patient. */
static void test_a_peer_that_is_waited_for(void **state)
{
    (void)state;
    struct owner o;
    edge_ready(&o, 0, 0);
    drain(&o);
    o.now_us += 5000 * MS; /* nobody minds */
    link_set_patience(o.link, 2000 * MS, o.now_us);
    assert_int_equal(link_tick(o.link, o.now_us), 0);
    assert_int_equal(link_wait_us(o.link, o.now_us), 1000 * MS);
    o.now_us += 1000 * MS - 1;
    assert_int_equal(take(&o).type, 0);
    o.now_us += 1;
    struct wire_frame f = take(&o);
    assert_int_equal(f.type, FRAME_PING);
    assert_int_equal(take(&o).type, 0); /* once */
    o.now_us += 600 * MS;
    assert_int_equal(pong(&o, f.ping->id), 0); /* a round trip of 600 ms: four of them */
    o.now_us += 1200 * MS;
    f = take(&o);
    assert_int_equal(f.type, FRAME_PING);
    o.now_us += 1200 * MS - 1;
    link_set_patience(o.link, 2000 * MS, o.now_us); /* it waits already */
    assert_int_equal(link_tick(o.link, o.now_us), 0);
    assert_int_equal(link_wait_us(o.link, o.now_us), 1);
    o.now_us += 1;
    link_set_patience(o.link, 0, o.now_us);
    assert_int_equal(link_tick(o.link, o.now_us), 0);
    link_set_patience(o.link, 2000 * MS, o.now_us);
    o.now_us += 8000 * MS; /* this end has slept: nobody was asked */
    assert_int_equal(link_tick(o.link, o.now_us), 0);
    assert_int_equal(link_wait_us(o.link, o.now_us), 0);
    assert_int_equal(take(&o).type, FRAME_PING);
    o.now_us += 1200 * MS - 1;
    assert_int_equal(link_tick(o.link, o.now_us), 0);
    o.now_us += 1;
    assert_int_equal(link_tick(o.link, o.now_us), -TD_ERR_TIMEOUT);
    owner_stop(&o);
}

static void test_ping_measures_the_round_trip(void **state)
{
    (void)state;
    struct owner o;
    owner_start(&o, LINK_EDGE, 0, 0);
    Tandem__Hello hello = hello_valid();
    assert_int_equal(link_send(o.link, FRAME_HELLO, 0, &hello.base, NULL, 0), 0);
    drain(&o);
    assert_int_equal(give_valid(&o, FRAME_WELCOME, 0), 0);
    struct wire_frame f = take(&o); /* the first at once */
    assert_int_equal(f.type, FRAME_PING);
    assert_false(f.ping->reply);
    uint64_t id = f.ping->id;
    assert_int_equal(take(&o).type, 0);
    o.now_us += 12345;
    assert_int_equal(pong(&o, id + 1), 0); /* not ours: nothing is learnt */
    struct link_stats stats;
    link_stats(o.link, &stats);
    assert_int_equal(stats.rtt_us, 0);
    assert_int_equal(pong(&o, id), 0);
    link_stats(o.link, &stats);
    assert_int_equal(stats.rtt_us, 12345);
    assert_int_equal(stats.min_rtt_us, 12345);
    assert_int_equal(pong(&o, id), 0); /* once only */
    o.now_us += LIMIT_PING_INTERVAL_MS * MS - 12345 - 1;
    assert_int_equal(take(&o).type, 0);
    assert_int_equal(link_wait_us(o.link, o.now_us), 1);
    o.now_us += 1;
    assert_int_equal(link_wait_us(o.link, o.now_us), 0);
    f = take(&o);
    assert_int_equal(f.type, FRAME_PING);
    id = f.ping->id;
    o.now_us += 4000;
    assert_int_equal(pong(&o, id), 0);
    link_stats(o.link, &stats);
    assert_int_equal(stats.min_rtt_us, 4000);
    assert_int_equal(o.seen_count, 1); /* WELCOME; pings are not the owner's */
    owner_stop(&o);
}

/* However many pings come, one answer waits. */
static void test_pings_are_answered(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    Tandem__Ping m = TANDEM__PING__INIT;
    for (m.id = 1; m.id <= 500; m.id++)
        assert_int_equal(give(&o, FRAME_PING, 0, &m.base, NULL, 0), 0);
    struct wire_frame f = take(&o);
    assert_int_equal(f.type, FRAME_PING);
    assert_true(f.ping->reply);
    assert_int_equal(f.ping->id, 500);
    assert_int_equal(take(&o).type, 0);
    owner_stop(&o);
}

/* ---- the rate of control frames ---- */

/* How many of `type` the link takes at one instant before it fails. */
static unsigned taken_at_once(struct owner *o, unsigned type, uint32_t stream, unsigned limit)
{
    unsigned count = 0;
    while (count < limit && give_valid(o, type, stream) == 0)
        count++;
    return count;
}

static void test_control_frames_at_once(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0); /* HELLO was one */
    assert_int_equal(taken_at_once(&o, FRAME_PING, 0, 5000), LIMIT_CONTROL_FRAMES_PER_S - 1);
    assert_failed(&o, -TD_ERR_LIMIT);
    owner_stop(&o);
    cloud_ready(&o, 0, 0);
    o.now_us += 500 * MS; /* the bucket has drained, and holds no more than a second's worth */
    assert_int_equal(taken_at_once(&o, FRAME_GOAWAY, 0, 5000), LIMIT_CONTROL_FRAMES_PER_S);
    owner_stop(&o);
}

static void test_control_frames_over_time(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(taken_at_once(&o, FRAME_PING, 0, LIMIT_CONTROL_FRAMES_PER_S - 1),
                     LIMIT_CONTROL_FRAMES_PER_S - 1);
    for (int i = 0; i < 3000; i++) { /* exactly the rate, for three seconds */
        o.now_us += 1000000 / LIMIT_CONTROL_FRAMES_PER_S;
        assert_int_equal(give_valid(&o, FRAME_PING, 0), 0);
    }
    o.now_us += 1000000 / LIMIT_CONTROL_FRAMES_PER_S - 1; /* a microsecond too soon */
    assert_int_equal(give_valid(&o, FRAME_PING, 0), -TD_ERR_LIMIT);
    owner_stop(&o);
}

static void test_unknown_frames_count(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    unsigned count = 0;
    while (count < 5000 && link_receive(o.link, frame_bytes,
                                        frame_raw(99, WIRE_FLAG_OPTIONAL, 0, NULL, NULL, 0), o.now_us) == 0)
        count++;
    assert_int_equal(count, LIMIT_CONTROL_FRAMES_PER_S - 1);
    owner_stop(&o);
}

/* Bulk is held by its windows; only crumbs of a message count, not its end and not small messages. */
static void test_bulk_does_not_count_but_crumbs_do(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    Tandem__KvBlock m = kv_valid(0, 10);
    for (int i = 0; i < 5000; i++)
        assert_int_equal(give(&o, FRAME_KV_BLOCK, 1, &m.base, many_bytes, 10), 0);
    const uint32_t crumb = LIMIT_BULK_FRAME_MIN - LINK_BULK_OVERHEAD - 1;
    m.total = 3 * crumb;
    unsigned count = 0;
    for (; count < 5000; count++) { /* begins anew each time */
        int rc = give(&o, FRAME_KV_BLOCK, 1, &m.base, many_bytes, crumb);
        if (rc < 0) {
            assert_int_equal(rc, -TD_ERR_LIMIT);
            break;
        }
        o.link->in.open = o.link->in.window; /* not what is tested here */
        stream_find(o.link, 1)->in.open = o.link->config.stream_window;
    }
    assert_int_equal(count, LIMIT_CONTROL_FRAMES_PER_S - 2);
    owner_stop(&o);
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    for (count = 0; count < 5000; count++) { /* one byte more is no crumb */
        assert_int_equal(give(&o, FRAME_KV_BLOCK, 1, &m.base, many_bytes, crumb + 1), 0);
        o.link->in.open = o.link->in.window;
        stream_find(o.link, 1)->in.open = o.link->config.stream_window;
    }
    owner_stop(&o);
}

/* A stall on the way bunches up what a cloud sent in time: that is nobody's fault. */
static void test_edge_takes_bunched_answers(void **state)
{
    (void)state;
    static const unsigned types[] = {FRAME_TOKEN, FRAME_INGESTED, FRAME_CREDIT};
    for (size_t i = 0; i < TD_COUNT(types); i++) {
        struct owner o;
        edge_ready(&o, 0, 0);
        assert_int_equal(edge_open(&o, 1), 0);
        assert_int_equal(taken_at_once(&o, types[i], 1, 20000), 20000);
        owner_stop(&o);
    }
    struct owner o;
    edge_ready(&o, 0, 0);
    assert_int_equal(taken_at_once(&o, FRAME_GOAWAY, 0, 20000),
                     LIMIT_CONTROL_FRAMES_PER_S - 1); /* WELCOME was one */
    owner_stop(&o);
}

/* What an edge's link says by itself stays far below the limit, whatever a cloud sends. */
static void test_edge_keeps_its_own_frames_few(void **state)
{
    (void)state;
    struct owner o;
    edge_ready(&o, 0, 0);
    for (uint32_t i = 0; i < LIMIT_STREAMS; i++)
        assert_int_equal(edge_open(&o, 2 * i + 1), 0);
    drain(&o);
    unsigned own = 0;
    Tandem__KvBlock m = kv_valid(0, 1000);
    for (int step = 0; step < 5000; step++) { /* five seconds */
        o.now_us += 1000;
        for (uint32_t i = 0; i < LIMIT_STREAMS; i++)
            if (stream_find(o.link, 2 * i + 1)->in.open >= 1000 && o.link->in.open >= 1000)
                assert_int_equal(give(&o, FRAME_KV_BLOCK, 2 * i + 1, &m.base, many_bytes, 1000), 0);
        while (take(&o).type)
            own++;
    }
    assert_true(own > 1000);
    assert_true(own <= 6 * LINK_OWN_FRAMES_PER_S);
    owner_stop(&o);
}

/* ---- link_wait_us ---- */

/* Two links over a perfect pipe, driven by link_wait_us alone: when it says 0 something happens, when it says more nothing
 * would have. */
static void test_wait_tells_the_truth(void **state)
{
    (void)state;
    struct owner ends[2];
    edge_ready(&ends[0], 0, 0);
    cloud_ready(&ends[1], 0, 0);
    assert_int_equal(edge_open(&ends[0], 1), 0);
    for (int i = 0; i < 20; i++) {
        Tandem__KvBlock m = kv_valid(0, 0);
        uint8_t *payload = calloc(1, 90000);
        assert_int_equal(link_send_bulk(ends[0].link, FRAME_KV_BLOCK, 1, &m.base, 1, payload, 90000), 0);
    }
    uint8_t bytes[LIMIT_FRAME_SIZE / 2];
    uint64_t now_us = 2000000, end_us = now_us + 60000 * MS;
    unsigned idle = 0;
    while (now_us < end_us) {
        uint64_t wait_us = UINT64_MAX;
        for (int side = 0; side < 2; side++) {
            struct link *l = ends[side].link;
            wait_us = TD_MIN(wait_us, link_wait_us(l, now_us));
            if (link_wait_us(l, now_us) > 0) {
                int64_t nothing = link_next(l, bytes, sizeof bytes, now_us);
                assert_int_equal(nothing, 0);
                continue;
            }
            assert_int_equal(link_tick(l, now_us), 0);
            int64_t size = link_next(l, bytes, sizeof bytes, now_us);
            idle = size == 0 ? idle + 1 : 0;
            assert_true(idle < 3); /* it may have had something to note down, but does not spin */
            if (size > 0)
                assert_int_equal(link_receive(ends[1 - side].link, bytes, (size_t)size, now_us), 0);
        }
        if (ends[1].seen_count > 1) /* the ingest consumes at once */
            link_consumed(ends[1].link, 1, 1000000);
        now_us += wait_us;
    }
    assert_int_equal(ends[1].seen_count, 21);
    owner_stop(&ends[0]), owner_stop(&ends[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hello_in_time),
        cmocka_unit_test(test_hello_too_late),
        cmocka_unit_test(test_silence),
        cmocka_unit_test(test_silent_cloud_never_welcomes),
        cmocka_unit_test(test_a_peer_that_is_waited_for),
        cmocka_unit_test(test_ping_measures_the_round_trip),
        cmocka_unit_test(test_pings_are_answered),
        cmocka_unit_test(test_control_frames_at_once),
        cmocka_unit_test(test_control_frames_over_time),
        cmocka_unit_test(test_unknown_frames_count),
        cmocka_unit_test(test_bulk_does_not_count_but_crumbs_do),
        cmocka_unit_test(test_edge_takes_bunched_answers),
        cmocka_unit_test(test_edge_keeps_its_own_frames_few),
        cmocka_unit_test(test_wait_tells_the_truth),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
