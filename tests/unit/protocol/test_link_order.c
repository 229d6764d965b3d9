/* link, order: which frame may come when, from whom, on which stream; how connections and streams begin and end. */
#include "frames.h"

/* ---- greetings ---- */

static void test_greeting_of_both_sides(void **state)
{
    (void)state;
    struct owner cloud, edge;
    owner_start(&cloud, LINK_CLOUD, 3 << 20, 1 << 20);
    owner_start(&edge, LINK_EDGE, 0, 0);
    assert_int_equal(link_message_max(edge.link), 0);
    Tandem__Hello hello = hello_valid();
    assert_int_equal(link_send(edge.link, FRAME_HELLO, 0, &hello.base, NULL, 0), 0);
    assert_int_equal(link_state(edge.link), LINK_GREETING);

    uint8_t bytes[4096];
    int64_t size = link_next(edge.link, bytes, sizeof bytes, 1);
    assert_true(size > 0);
    assert_int_equal(link_next(edge.link, bytes + size, sizeof bytes - (size_t)size, 1), 0);
    assert_int_equal(link_receive(cloud.link, bytes, (size_t)size, 1), 0);
    assert_int_equal(cloud.seen[0].type, FRAME_HELLO);
    assert_int_equal(link_state(cloud.link), LINK_GREETING);

    Tandem__Welcome welcome = welcome_valid();
    assert_int_equal(link_send(cloud.link, FRAME_WELCOME, 0, &welcome.base, NULL, 0), 0);
    assert_int_equal(link_state(cloud.link), LINK_READY);
    size = link_next(cloud.link, bytes, sizeof bytes, 1);
    assert_int_equal(link_receive(edge.link, bytes, (size_t)size, 1), 0);
    assert_int_equal(edge.seen[0].type, FRAME_WELCOME);
    assert_int_equal(link_state(edge.link), LINK_READY);
    assert_int_equal(link_message_max(edge.link), 1 << 20); /* the cloud's windows came with WELCOME */
    assert_int_equal(link_message_max(cloud.link), LIMIT_STREAM_WINDOW);
    owner_stop(&cloud), owner_stop(&edge);
}

static bool is_zero_only(unsigned type)
{
    return type == FRAME_HELLO || type == FRAME_WELCOME || type == FRAME_PING || type == FRAME_GOAWAY;
}

/* Nothing but HELLO comes first, and nothing more before WELCOME. */
static void test_cloud_wants_hello_first(void **state)
{
    (void)state;
    for (unsigned type = FRAME_HELLO; type < FRAME_TYPE_END; type++)
        for (int greeted = 0; greeted < 2; greeted++) {
            if (type == FRAME_HELLO && !greeted)
                continue;
            struct owner o;
            owner_start(&o, LINK_CLOUD, 0, 0);
            if (greeted)
                assert_int_equal(give_valid(&o, FRAME_HELLO, 0), 0);
            o.seen_count = 0;
            assert_int_equal(give_valid(&o, type, is_zero_only(type) ? 0 : 1), -TD_ERR_PROTOCOL);
            assert_int_equal(o.seen_count, 0);
            assert_failed(&o, -TD_ERR_PROTOCOL);
            owner_stop(&o);
        }
}

/* An edge hears nothing before its HELLO, then WELCOME or ERROR. */
static void test_edge_wants_welcome_first(void **state)
{
    (void)state;
    for (unsigned type = FRAME_HELLO; type < FRAME_TYPE_END; type++)
        for (int greeted = 0; greeted < 2; greeted++) {
            struct owner o;
            owner_start(&o, LINK_EDGE, 0, 0);
            Tandem__Hello hello = hello_valid();
            if (greeted) {
                assert_int_equal(link_send(o.link, FRAME_HELLO, 0, &hello.base, NULL, 0), 0);
                assert_int_equal(take(&o).type, FRAME_HELLO);
            }
            bool allowed = greeted && (type == FRAME_WELCOME || type == FRAME_ERROR);
            uint32_t stream = is_zero_only(type) || type == FRAME_ERROR ? 0 : 1;
            assert_int_equal(give_valid(&o, type, stream), allowed ? 0 : -TD_ERR_PROTOCOL);
            assert_int_equal(o.seen_count, allowed);
            if (!allowed)
                assert_failed(&o, -TD_ERR_PROTOCOL);
            else
                assert_int_equal(link_state(o.link), type == FRAME_WELCOME ? LINK_READY : LINK_CLOSED);
            owner_stop(&o);
        }
}

static void test_hello_and_welcome_once(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(give_valid(&o, FRAME_HELLO, 0), -TD_ERR_PROTOCOL);
    assert_failed(&o, -TD_ERR_PROTOCOL);
    owner_stop(&o);
    edge_ready(&o, 0, 0);
    assert_int_equal(give_valid(&o, FRAME_WELCOME, 0), -TD_ERR_PROTOCOL);
    assert_failed(&o, -TD_ERR_PROTOCOL);
    owner_stop(&o);
}

static void test_error_from_the_peer_closes(void **state)
{
    (void)state;
    for (int role = LINK_EDGE; role <= LINK_CLOUD; role++) {
        struct owner o;
        if (role == LINK_EDGE)
            edge_ready(&o, 0, 0);
        else
            cloud_ready(&o, 0, 0);
        assert_int_equal(give_valid(&o, FRAME_ERROR, 0), 0);
        assert_int_equal(o.seen[0].type, FRAME_ERROR);
        assert_int_equal(link_state(o.link), LINK_CLOSED);
        uint8_t none[64]; /* no ERROR in answer to an ERROR */
        assert_int_equal(link_next(o.link, none, sizeof none, o.now_us), -TD_ERR_CLOSED);
        assert_int_equal(link_send(o.link, FRAME_GOAWAY, 0, NULL, NULL, 0), -TD_ERR_CLOSED);
        owner_stop(&o);
    }
}

/* ---- who sends what ---- */

/* From the table in WIRE.md, not from the code's. */
static const char *edge_sends =
    "HELLO OPEN PLAN HIDDEN KV_BLOCK INGESTED FETCH GENERATE CANCEL CREDIT PING ERROR GOAWAY";
static const char *cloud_sends =
    "WELCOME OPEN_ACK KV_BLOCK INGESTED NEED TOKEN DONE CANCEL CREDIT PING ERROR GOAWAY";

static bool lists(const char *names, const char *name)
{
    const char *at = strstr(names, name);
    size_t size = strlen(name);
    while (at && !((at == names || at[-1] == ' ') && (at[size] == ' ' || at[size] == '\0')))
        at = strstr(at + 1, name);
    return at != NULL;
}

static void test_only_the_right_side_sends(void **state)
{
    (void)state;
    for (unsigned type = FRAME_WELCOME; type < FRAME_TYPE_END; type++)
        for (int to = LINK_EDGE; to <= LINK_CLOUD; to++) {
            struct owner o;
            if (to == LINK_EDGE) {
                edge_ready(&o, 0, 0);
                assert_int_equal(edge_open(&o, 1), 0);
            } else {
                cloud_ready(&o, 0, 0);
                assert_int_equal(cloud_open(&o, 1), 0);
            }
            uint32_t stream = is_zero_only(type) ? 0 : type == FRAME_OPEN ? 3 : 1;
            bool allowed = type != FRAME_WELCOME &&
                           lists(to == LINK_EDGE ? cloud_sends : edge_sends, frame_type_name(type));
            if (to == LINK_CLOUD && (type == FRAME_INGESTED || type == FRAME_ERROR))
                allowed = false; /* from an edge on stream 0 only */
            if (type == FRAME_PLAN || type == FRAME_CREDIT)
                while (take(&o).type)
                    ;
            assert_int_equal(give_valid(&o, type, stream), allowed ? 0 : -TD_ERR_PROTOCOL);
            if (!allowed)
                assert_failed(&o, -TD_ERR_PROTOCOL);
            owner_stop(&o);
        }
}

/* Our own owner is held to the same table, and leaves alone what the link sends by itself. */
static void test_owner_cannot_send_for_the_other_side(void **state)
{
    (void)state;
    for (unsigned type = 0; type <= FRAME_TYPE_END; type++)
        for (int role = LINK_EDGE; role <= LINK_CLOUD; role++) {
            bool own = lists("HELLO WELCOME HIDDEN KV_BLOCK CREDIT PING", frame_type_name(type));
            if (!own && lists(role == LINK_EDGE ? edge_sends : cloud_sends, frame_type_name(type)))
                continue; /* tested where it is used */
            struct owner o;
            if (role == LINK_EDGE)
                edge_ready(&o, 0, 0);
            else
                cloud_ready(&o, 0, 0);
            uint32_t stream = is_zero_only(type) ? 0 : 1;
            assert_int_equal(link_send(o.link, type, stream, NULL, NULL, 0), -TD_ERR_ARG);
            assert_int_equal(take(&o).type, 0);
            owner_stop(&o);
        }
}

static void test_owner_waits_for_ready(void **state)
{
    (void)state;
    struct owner o;
    owner_start(&o, LINK_EDGE, 0, 0);
    assert_int_equal(edge_open(&o, 1), -TD_ERR_AGAIN);
    Tandem__Hidden hidden = hidden_valid(0, 4);
    assert_int_equal(link_send_bulk(o.link, FRAME_HIDDEN, 1, &hidden.base, 1, many_bytes, 4), -TD_ERR_AGAIN);
    Tandem__Hello hello = hello_valid();
    assert_int_equal(link_send(o.link, FRAME_HELLO, 0, &hello.base, NULL, 0), 0);
    assert_int_equal(link_send(o.link, FRAME_HELLO, 0, &hello.base, NULL, 0), -TD_ERR_AGAIN);
    assert_int_equal(edge_open(&o, 1), -TD_ERR_AGAIN);
    owner_stop(&o);
    owner_start(&o, LINK_CLOUD, 0, 0);
    Tandem__Welcome welcome = welcome_valid();
    assert_int_equal(link_send(o.link, FRAME_WELCOME, 0, &welcome.base, NULL, 0),
                     -TD_ERR_AGAIN); /* no HELLO yet */
    assert_int_equal(link_state(o.link), LINK_START);
    owner_stop(&o);
}

/* A frame that the peer would refuse is refused here, and the link lives on. */
static void test_owner_cannot_send_wrong_frames(void **state)
{
    (void)state;
    struct owner o;
    edge_ready(&o, 0, 0);
    Tandem__Open open = open_valid(2);
    assert_int_equal(link_send(o.link, FRAME_OPEN, 1, &open.base, many_bytes, 4), -TD_ERR_PROTOCOL);
    assert_int_equal(edge_open(&o, 1), 0); /* the stream was not used up */
    assert_int_equal(link_send(o.link, FRAME_GOAWAY, 1, NULL, NULL, 0), -TD_ERR_PROTOCOL);
    assert_int_equal(link_send(o.link, FRAME_GENERATE, 0, NULL, NULL, 0), -TD_ERR_ARG);
    Tandem__Ping ping = TANDEM__PING__INIT;
    assert_int_equal(link_send(o.link, FRAME_GENERATE, 1, &ping.base, NULL, 0),
                     -TD_ERR_ARG); /* another's header */
    assert_int_equal(take_owned(&o).type, FRAME_OPEN);
    assert_int_equal(take_owned(&o).type, 0);
    owner_stop(&o);
}

/* ---- frames of another version ---- */

static void test_unknown_frames(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    size_t size = frame_raw(FRAME_TYPE_END, WIRE_FLAG_OPTIONAL, 9, NULL, many_bytes, 10);
    assert_int_equal(link_receive(o.link, frame_bytes, size, o.now_us), 0);
    size = frame_raw(255, WIRE_FLAG_OPTIONAL | 0xf0, 0, NULL, NULL, 0); /* other flags mean nothing yet */
    assert_int_equal(link_receive(o.link, frame_bytes, size, o.now_us), 0);
    assert_int_equal(o.seen_count, 0);
    size = frame_raw(FRAME_TYPE_END, 0, 0, NULL, NULL, 0);
    assert_int_equal(link_receive(o.link, frame_bytes, size, o.now_us), -TD_ERR_PROTOCOL);
    assert_failed(&o, -TD_ERR_PROTOCOL);
    owner_stop(&o);
    owner_start(&o, LINK_CLOUD, 0, 0); /* but HELLO still comes first */
    size = frame_raw(FRAME_TYPE_END, WIRE_FLAG_OPTIONAL, 0, NULL, NULL, 0);
    assert_int_equal(link_receive(o.link, frame_bytes, size, o.now_us), -TD_ERR_PROTOCOL);
    owner_stop(&o);
}

/* ---- streams ---- */

static void test_stream_ids(void **state)
{
    (void)state;
    static const uint32_t wrong[] = {2, 4, 3, 5, 1};
    for (size_t i = 0; i < TD_COUNT(wrong); i++) {
        struct owner o;
        cloud_ready(&o, 0, 0);
        assert_int_equal(cloud_open(&o, 5), 0); /* gaps are fine */
        assert_int_equal(o.seen_count, 1);
        assert_int_equal(cloud_open(&o, wrong[i]), -TD_ERR_PROTOCOL);
        assert_int_equal(o.seen_count, 1);
        assert_failed(&o, -TD_ERR_PROTOCOL);
        owner_stop(&o);
        edge_ready(&o, 0, 0);
        assert_int_equal(edge_open(&o, 5), 0);
        assert_int_equal(edge_open(&o, wrong[i]), -TD_ERR_ARG);
        assert_int_equal(edge_open(&o, 7), 0);
        owner_stop(&o);
    }
}

static void test_frames_of_streams_never_opened(void **state)
{
    (void)state;
    static const uint32_t wrong[] = {7, 2, UINT32_MAX};
    for (size_t i = 0; i < TD_COUNT(wrong); i++) {
        struct owner o;
        cloud_ready(&o, 0, 0);
        assert_int_equal(cloud_open(&o, 5), 0);
        assert_int_equal(give_valid(&o, FRAME_PLAN, 3), 0); /* odd and lower: late, dropped */
        assert_int_equal(o.seen_count, 1);
        assert_int_equal(give_valid(&o, FRAME_PLAN, 5), 0);
        assert_int_equal(o.seen_count, 2);
        assert_int_equal(give_valid(&o, FRAME_PLAN, wrong[i]), -TD_ERR_PROTOCOL);
        assert_failed(&o, -TD_ERR_PROTOCOL);
        owner_stop(&o);
    }
}

/* On a new one it opens that, and only there; what has ended it does not open again. */
static void test_fetch_opens_a_stream(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(give_valid(&o, FRAME_FETCH, 3), 0);
    assert_int_equal(o.seen[0].type, FRAME_FETCH);
    assert_int_equal(link_send(o.link, FRAME_DONE, 3, NULL, NULL, 0), 0);
    assert_int_equal(give_valid(&o, FRAME_FETCH, 3), 0); /* late */
    assert_int_equal(give_valid(&o, FRAME_FETCH, 1), 0);
    assert_int_equal(o.seen_count, 1);
    assert_int_equal(cloud_open(&o, 5), 0);
    assert_int_equal(give_valid(&o, FRAME_FETCH, 5), 0); /* of a stream that is there */
    assert_int_equal(o.seen_count, 3);
    assert_int_equal(give_valid(&o, FRAME_FETCH, 8), -TD_ERR_PROTOCOL);
    assert_failed(&o, -TD_ERR_PROTOCOL);
    owner_stop(&o);
    edge_ready(&o, 0, 0);
    assert_int_equal(link_send(o.link, FRAME_FETCH, 2, NULL, NULL, 0), -TD_ERR_ARG);
    assert_int_equal(link_send(o.link, FRAME_FETCH, 1, NULL, NULL, 0), 0);
    assert_int_equal(edge_open(&o, 1), -TD_ERR_ARG);
    assert_int_equal(edge_open(&o, 3), 0);
    owner_stop(&o);
}

/* How a stream ends, seen by an edge (what it receives or sends) and by a cloud. */
enum ending { END_DONE, END_ERROR, END_CLOUD_CANCEL, END_NEED_IDS, END_EDGE_CANCEL, END_COUNT };

static void cloud_end(struct owner *o, uint32_t stream, enum ending how)
{
    Tandem__OpenAck ack = TANDEM__OPEN_ACK__INIT;
    ack.need_ids = true;
    static const unsigned types[] = {FRAME_DONE, FRAME_ERROR, FRAME_CANCEL, FRAME_OPEN_ACK};
    if (how == END_EDGE_CANCEL)
        assert_int_equal(give_valid(o, FRAME_CANCEL, stream), 0);
    else
        assert_int_equal(
            link_send(o->link, types[how], stream, how == END_NEED_IDS ? &ack.base : NULL, NULL, 0), 0);
}

static void edge_end(struct owner *o, uint32_t stream, enum ending how)
{
    Tandem__OpenAck ack = TANDEM__OPEN_ACK__INIT;
    ack.need_ids = true;
    static const unsigned types[] = {FRAME_DONE, FRAME_ERROR, FRAME_CANCEL};
    if (how == END_EDGE_CANCEL)
        assert_int_equal(link_send(o->link, FRAME_CANCEL, stream, NULL, NULL, 0), 0);
    else if (how == END_NEED_IDS)
        assert_int_equal(give(o, FRAME_OPEN_ACK, stream, &ack.base, NULL, 0), 0);
    else
        assert_int_equal(give_valid(o, types[how], stream), 0);
}

static void drain(struct owner *o)
{
    while (take(o).type)
        ;
}

static void test_64_streams_and_no_more(void **state)
{
    (void)state;
    for (int how = 0; how < END_COUNT; how++) {
        struct owner cloud, edge;
        cloud_ready(&cloud, 0, 0);
        edge_ready(&edge, 0, 0);
        for (uint32_t i = 0; i < LIMIT_STREAMS; i++) {
            assert_int_equal(cloud_open(&cloud, 2 * i + 1), 0);
            assert_int_equal(edge_open(&edge, 2 * i + 1), 0);
        }
        assert_int_equal(edge_open(&edge, 1001), -TD_ERR_FULL);
        cloud_end(&cloud, 7, how), edge_end(&edge, 7, how);
        assert_int_equal(cloud_open(&cloud, 1001), 0); /* one ended: room for one, at both ends */
        assert_int_equal(edge_open(&edge, 1001), 0);
        assert_int_equal(edge_open(&edge, 1003), -TD_ERR_FULL);
        assert_int_equal(cloud_open(&cloud, 1003), -TD_ERR_LIMIT);
        assert_failed(&cloud, -TD_ERR_LIMIT);
        owner_stop(&cloud), owner_stop(&edge);
    }
}

static void test_streams_come_and_go_for_ever(void **state)
{
    (void)state;
    struct owner cloud, edge;
    cloud_ready(&cloud, 0, 0);
    edge_ready(&edge, 0, 0);
    for (uint32_t i = 0; i < 2000; i++) {
        cloud.now_us += 10000, edge.now_us += 10000;
        assert_int_equal(cloud_open(&cloud, 2 * i + 1), 0);
        assert_int_equal(edge_open(&edge, 2 * i + 1), 0);
        cloud_end(&cloud, 2 * i + 1, (int)(i % END_COUNT));
        edge_end(&edge, 2 * i + 1, (int)(i % END_COUNT));
        drain(&cloud), drain(&edge);
    }
    owner_stop(&cloud), owner_stop(&edge);
}

static void test_welcome_may_allow_fewer_streams(void **state)
{
    (void)state;
    struct owner o;
    owner_start(&o, LINK_EDGE, 0, 0);
    Tandem__Hello hello = hello_valid();
    assert_int_equal(link_send(o.link, FRAME_HELLO, 0, &hello.base, NULL, 0), 0);
    Tandem__Welcome welcome = welcome_valid();
    welcome.stream_count_max = 2;
    assert_int_equal(give(&o, FRAME_WELCOME, 0, &welcome.base, NULL, 0), 0);
    assert_int_equal(edge_open(&o, 1), 0);
    assert_int_equal(edge_open(&o, 3), 0);
    assert_int_equal(edge_open(&o, 5), -TD_ERR_FULL);
    owner_stop(&o);
}

/* After an edge's CANCEL the cloud may still say DONE, once; then the stream is gone for both. */
static void test_done_after_cancel(void **state)
{
    (void)state;
    struct owner cloud, edge;
    cloud_ready(&cloud, 0, 0);
    edge_ready(&edge, 0, 0);
    assert_int_equal(cloud_open(&cloud, 1), 0);
    assert_int_equal(edge_open(&edge, 1), 0);
    cloud_end(&cloud, 1, END_EDGE_CANCEL), edge_end(&edge, 1, END_EDGE_CANCEL);
    assert_int_equal(link_send(edge.link, FRAME_CANCEL, 1, NULL, NULL, 0), -TD_ERR_CLOSED);
    assert_int_equal(link_send(edge.link, FRAME_GENERATE, 1, NULL, NULL, 0), -TD_ERR_CLOSED);
    assert_int_equal(link_send(cloud.link, FRAME_DONE, 1, NULL, NULL, 0), 0);
    assert_int_equal(link_send(cloud.link, FRAME_DONE, 1, NULL, NULL, 0), -TD_ERR_CLOSED);
    assert_int_equal(take_owned(&cloud).type, FRAME_DONE);
    assert_int_equal(give_valid(&edge, FRAME_DONE, 1), 0);
    assert_int_equal(edge.seen[0].type, FRAME_DONE);
    assert_int_equal(give_valid(&edge, FRAME_TOKEN, 1), 0); /* late */
    assert_int_equal(edge.seen_count, 1);
    owner_stop(&cloud), owner_stop(&edge);
}

static void test_cancel_once(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(give_valid(&o, FRAME_CANCEL, 1), 0);
    assert_int_equal(give_valid(&o, FRAME_CANCEL, 1), -TD_ERR_PROTOCOL);
    owner_stop(&o);
}

/* Cancelled streams that never see a last frame do not pile up: the oldest give way. */
static void test_cancelled_streams_are_bounded(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    for (uint32_t i = 0; i < 3 * LIMIT_STREAMS; i++) {
        o.now_us += 10000;
        assert_int_equal(cloud_open(&o, 2 * i + 1), 0);
        assert_int_equal(give_valid(&o, FRAME_CANCEL, 2 * i + 1), 0);
    }
    assert_int_equal(link_send(o.link, FRAME_DONE, 1, NULL, NULL, 0), -TD_ERR_CLOSED);
    assert_int_equal(link_send(o.link, FRAME_DONE, 2 * (3 * LIMIT_STREAMS) - 1, NULL, NULL, 0), 0);
    owner_stop(&o);
}

static void test_close_stream_tells_the_peer(void **state)
{
    (void)state;
    struct owner cloud, edge;
    cloud_ready(&cloud, 0, 0);
    edge_ready(&edge, 0, 0);
    assert_int_equal(cloud_open(&cloud, 1), 0);
    assert_int_equal(edge_open(&edge, 1), 0);
    drain(&edge);
    link_close_stream(cloud.link, 1);
    struct wire_frame f = take_owned(&cloud);
    assert_int_equal(f.type, FRAME_ERROR);
    assert_int_equal(f.stream, 1);
    assert_int_equal(f.error->code, TD_ERR_CANCELLED);
    link_close_stream(edge.link, 1);
    f = take_owned(&edge);
    assert_int_equal(f.type, FRAME_CANCEL);
    assert_int_equal(f.stream, 1);
    link_close_stream(edge.link, 1); /* again, and of streams that never were: nothing */
    link_close_stream(edge.link, 9);
    link_close_stream(edge.link, 0);
    assert_int_equal(take_owned(&edge).type, 0);
    assert_int_equal(give_valid(&edge, FRAME_TOKEN, 1), 0);
    assert_int_equal(give_valid(&cloud, FRAME_PLAN, 1), 0);
    assert_int_equal(edge.seen_count, 0);
    assert_int_equal(cloud.seen_count, 1); /* the OPEN */
    owner_stop(&cloud), owner_stop(&edge);
}

static void close_it(struct owner *o, const struct wire_frame *f)
{
    if (f->type == FRAME_DONE || f->type == FRAME_CANCEL)
        link_close_stream(o->link, f->stream);
}

/* An owner may close the stream from inside the call that tells of its end: the peer is not told again. */
static void test_close_stream_while_hearing_its_end(void **state)
{
    (void)state;
    struct owner o;
    edge_ready(&o, 0, 0);
    assert_int_equal(edge_open(&o, 1), 0);
    drain(&o);
    o.react = close_it;
    assert_int_equal(give_valid(&o, FRAME_DONE, 1), 0);
    assert_int_equal(take_owned(&o).type, 0);
    owner_stop(&o);
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    o.react = close_it;
    assert_int_equal(give_valid(&o, FRAME_CANCEL, 1), 0);
    assert_int_equal(take_owned(&o).type, 0);
    assert_int_equal(link_send(o.link, FRAME_DONE, 1, NULL, NULL, 0), -TD_ERR_CLOSED);
    owner_stop(&o);
}

/* ---- refusals ---- */

static void test_owner_refuses_a_frame(void **state)
{
    (void)state;
    static const int answers[] = {-TD_ERR_AUTH, TD_ERR_AUTH};
    for (size_t i = 0; i < TD_COUNT(answers); i++) {
        struct owner o;
        owner_start(&o, LINK_CLOUD, 0, 0);
        o.answer = answers[i];
        assert_int_equal(give_valid(&o, FRAME_HELLO, 0), -TD_ERR_AUTH);
        assert_failed(&o, -TD_ERR_AUTH);
        owner_stop(&o);
    }
}

static void fail_it(struct owner *o, const struct wire_frame *f)
{
    (void)f;
    link_fail(o->link, -TD_ERR_MISMATCH, "fingerprints differ");
}

static void test_owner_fails_the_link_from_inside(void **state)
{
    (void)state;
    struct owner o;
    owner_start(&o, LINK_CLOUD, 0, 0);
    o.react = fail_it;
    assert_int_equal(give_valid(&o, FRAME_HELLO, 0), 0);
    struct wire_frame f = take(&o);
    assert_int_equal(f.type, FRAME_ERROR);
    assert_int_equal(f.error->code, TD_ERR_MISMATCH);
    assert_string_equal(f.error->text, "fingerprints differ");
    assert_string_equal(link_error_text(o.link), "fingerprints differ");
    owner_stop(&o);
}

static void test_error_frame_on_the_connection(void **state)
{
    (void)state;
    struct owner o;
    cloud_ready(&o, 0, 0);
    assert_int_equal(cloud_open(&o, 1), 0);
    assert_int_equal(link_send(o.link, FRAME_TOKEN, 1, NULL, many_bytes, 4), 0);
    char *text = malloc(LIMIT_TEXT_SIZE + 10); /* longer than may be: cut */
    memset(text, 'x', LIMIT_TEXT_SIZE + 9);
    text[LIMIT_TEXT_SIZE + 9] = '\0';
    Tandem__Error error = TANDEM__ERROR__INIT;
    error.code = TD_ERR_BUSY;
    error.text = text;
    assert_int_equal(link_send(o.link, FRAME_ERROR, 0, &error.base, NULL, 0), 0);
    struct wire_frame f = take(&o);
    assert_int_equal(f.type, FRAME_ERROR); /* nothing else leaves any more */
    assert_int_equal(f.error->code, TD_ERR_BUSY);
    assert_int_equal(strlen(f.error->text), LIMIT_TEXT_SIZE);
    assert_int_equal(take(&o).type, 0);
    free(text);
    owner_stop(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greeting_of_both_sides),
        cmocka_unit_test(test_cloud_wants_hello_first),
        cmocka_unit_test(test_edge_wants_welcome_first),
        cmocka_unit_test(test_hello_and_welcome_once),
        cmocka_unit_test(test_error_from_the_peer_closes),
        cmocka_unit_test(test_only_the_right_side_sends),
        cmocka_unit_test(test_owner_cannot_send_for_the_other_side),
        cmocka_unit_test(test_owner_waits_for_ready),
        cmocka_unit_test(test_owner_cannot_send_wrong_frames),
        cmocka_unit_test(test_unknown_frames),
        cmocka_unit_test(test_stream_ids),
        cmocka_unit_test(test_frames_of_streams_never_opened),
        cmocka_unit_test(test_fetch_opens_a_stream),
        cmocka_unit_test(test_64_streams_and_no_more),
        cmocka_unit_test(test_streams_come_and_go_for_ever),
        cmocka_unit_test(test_welcome_may_allow_fewer_streams),
        cmocka_unit_test(test_done_after_cancel),
        cmocka_unit_test(test_cancel_once),
        cmocka_unit_test(test_cancelled_streams_are_bounded),
        cmocka_unit_test(test_close_stream_tells_the_peer),
        cmocka_unit_test(test_close_stream_while_hearing_its_end),
        cmocka_unit_test(test_owner_refuses_a_frame),
        cmocka_unit_test(test_owner_fails_the_link_from_inside),
        cmocka_unit_test(test_error_frame_on_the_connection),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
