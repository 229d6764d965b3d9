/* uplink: greets, opens streams, tells owners what comes, and comes back after every kind of loss. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include "edge/uplink.h"
#include "fake_cloud.h"
#include "shared/crypto.h"
#include "shared/log.h"
#include <cmocka.h>

static const uint8_t layout[32] = {5}, other_layout[32] = {6};

struct owner {
    uint32_t stream, tokens;
    bool done, failed;
};
struct rig {
    struct fake_cloud cloud;
    struct uplink *uplink;
    unsigned ready, lost;
    struct owner owner;
};

static void on_ready(void *ctx, const Tandem__Welcome *w)
{
    struct rig *r = ctx;
    if (w->principal_key.len == 32 && w->principal_key.data[0] == 7)
        r->ready++;
}

static void on_lost(void *ctx)
{
    ((struct rig *)ctx)->lost++;
}

static int on_frame(void *ctx, void *owner, const struct wire_frame *f)
{
    struct owner *o = owner;
    (void)ctx;
    o->tokens += f->type == FRAME_TOKEN;
    o->done |= f->type == FRAME_DONE;
    o->failed |= f->type == FRAME_ERROR;
    return 0;
}

static void on_room(void *ctx)
{
    (void)ctx;
}

static const struct uplink_events events = {on_ready, on_lost, on_frame, on_room};

static void start_uplink(void *arg)
{
    uplink_start(((struct rig *)arg)->uplink);
}

static void make(struct rig *r)
{
    memset(r, 0, sizeof *r);
    assert_int_equal(fake_cloud_make(&r->cloud, layout), 0);
    struct uplink_config config = {.loop = r->cloud.loop,
                                   .host = "localhost",
                                   .port = r->cloud.port,
                                   .token = "secret",
                                   .numerics = 1,
                                   .layer_count = 2,
                                   .layers_held = 1,
                                   .events = &events,
                                   .ctx = r};
    memcpy(config.layout_hash, layout, 32);
    r->uplink = uplink_create(&config);
    assert_non_null(r->uplink);
}

static void run(struct rig *r)
{
    fake_cloud_run(&r->cloud);
    on_loop(r->cloud.loop, start_uplink, r);
}

static void finish(struct rig *r)
{
    fake_cloud_stop(&r->cloud);
    fake_cloud_free(&r->cloud);
    uplink_destroy(r->uplink);
}

/* ---- questions and orders, on the loop's thread ---- */

static bool is_ready(void *arg)
{
    struct rig *r = arg;
    return uplink_state(r->uplink) == UPLINK_READY;
}

static bool is_done(void *arg)
{
    return ((struct rig *)arg)->owner.done;
}

static bool is_refused(void *arg)
{
    struct rig *r = arg;
    return uplink_refused(r->uplink) && r->cloud.connections >= 1 && uplink_state(r->uplink) == UPLINK_DOWN;
}

static bool is_ready_twice(void *arg)
{
    return ((struct rig *)arg)->ready == 2;
}

static void open_stream(void *arg)
{
    struct rig *r = arg;
    uint8_t id[16] = {1}, ids[8] = {0};
    Tandem__Open open = TANDEM__OPEN__INIT;
    Tandem__Generate generate = TANDEM__GENERATE__INIT;
    open.request_id = (ProtobufCBinaryData){16, id};
    open.attempt = 1;
    open.prompt_count = 2;
    r->owner = (struct owner){0};
    if (uplink_open(r->uplink, &r->owner, &open, ids, sizeof ids, &r->owner.stream) == 0)
        uplink_send(r->uplink, r->owner.stream, FRAME_GENERATE, &generate.base, NULL, 0);
}

static void close_stream(void *arg)
{
    struct rig *r = arg;
    uplink_close(r->uplink, r->owner.stream);
}

static void say_goaway(void *arg)
{
    struct rig *r = arg;
    static char none[] = "";
    Tandem__Goaway g = TANDEM__GOAWAY__INIT;
    g.node = g.reason = none;
    for (size_t i = 0; i < FAKE_CONNS; i++)
        if (r->cloud.conns[i])
            fake_send(r->cloud.conns[i], FRAME_GOAWAY, 0, &g.base, NULL, 0);
}

/* ---- tests ---- */

static void a_stream_gets_its_tokens(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    run(&r);
    assert_true(comes_true(r.cloud.loop, is_ready, &r));
    on_loop(r.cloud.loop, open_stream, &r);
    assert_int_equal(r.owner.stream, 1);
    assert_true(comes_true(r.cloud.loop, is_done, &r));
    assert_int_equal(r.owner.tokens, FAKE_REPLY);
    assert_string_equal(r.cloud.token, "secret");
    assert_int_equal(r.cloud.layers_held, 1);
    on_loop(r.cloud.loop, open_stream, &r);
    assert_int_equal(r.owner.stream, 3);
    assert_true(comes_true(r.cloud.loop, is_done, &r));
    assert_string_equal(uplink_why(r.uplink), "");
    finish(&r);
}

static bool was_cancelled(void *arg)
{
    return ((struct rig *)arg)->cloud.cancel_count == 1;
}

static void the_cloud_hears_that_a_stream_is_given_up(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    r.cloud.silent = true;
    run(&r);
    assert_true(comes_true(r.cloud.loop, is_ready, &r));
    on_loop(r.cloud.loop, open_stream, &r);
    on_loop(r.cloud.loop, close_stream, &r);
    assert_true(comes_true(r.cloud.loop, was_cancelled, &r));
    assert_false(r.cloud.cancel_finished);
    finish(&r);
}

static void a_lost_link_comes_back(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    r.cloud.cut_after = 5;
    run(&r);
    assert_true(comes_true(r.cloud.loop, is_ready, &r));
    on_loop(r.cloud.loop, open_stream, &r);
    assert_true(comes_true(r.cloud.loop, is_ready_twice, &r));
    assert_int_equal(r.lost, 1);
    assert_int_equal(r.owner.tokens, 5);
    assert_false(r.owner.done);
    on_loop(r.cloud.loop, open_stream, &r); /* streams begin anew */
    assert_int_equal(r.owner.stream, 1);
    assert_true(comes_true(r.cloud.loop, is_done, &r));
    finish(&r);
}

static bool is_ready_again(void *arg)
{
    struct rig *r = arg;
    return uplink_state(r->uplink) == UPLINK_READY && r->ready == r->lost + 1;
}

static void cut_all(void *arg)
{
    struct rig *r = arg;
    for (size_t i = 0; i < FAKE_CONNS; i++)
        if (r->cloud.conns[i])
            fake_cut(r->cloud.conns[i]);
}

static bool is_lost(void *arg)
{
    struct rig *r = arg;
    return r->lost == r->ready;
}

/* A cloud that greets and goes, over and over. */
static void a_greeting_alone_does_not_end_the_backoff(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    run(&r);
    assert_true(comes_true(r.cloud.loop, is_ready, &r));
    uint64_t begin_us = clock_mono_us();
    for (int i = 0; i < 5; i++) {
        on_loop(r.cloud.loop, cut_all, &r);
        assert_true(comes_true(r.cloud.loop, is_lost, &r));
        assert_true(comes_true(r.cloud.loop, is_ready_again, &r));
    }
    assert_true(clock_mono_us() - begin_us >= (50 + 100 + 200 + 400) * UINT64_C(1000));
    finish(&r);
}

static void goaway_lets_streams_finish_first(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    run(&r);
    assert_true(comes_true(r.cloud.loop, is_ready, &r));
    on_loop(r.cloud.loop, open_stream, &r);
    on_loop(r.cloud.loop, say_goaway, &r);
    assert_true(comes_true(r.cloud.loop, is_ready_twice, &r)); /* it came back by itself */
    assert_true(r.owner.done);
    assert_int_equal(r.owner.tokens, FAKE_REPLY);
    finish(&r);
}

static void refusal_is_told_apart(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    r.cloud.refuse_code = TD_ERR_AUTH;
    run(&r);
    assert_true(comes_true(r.cloud.loop, is_refused, &r));
    assert_string_equal(uplink_why(r.uplink), "the cloud refuses this device: token not known");
    assert_int_equal(r.ready, 0);
    finish(&r);
}

static bool has_failed(void *arg)
{
    struct rig *r = arg;
    return strstr(uplink_why(r->uplink), "broke the protocol") != NULL;
}

static void another_layout_is_not_accepted(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    memcpy(r.cloud.layout, other_layout, 32);
    run(&r);
    assert_true(comes_true(r.cloud.loop, has_failed, &r));
    assert_int_equal(r.ready, 0);
    finish(&r);
}

static bool why_is_refused_port(void *arg)
{
    struct rig *r = arg;
    return strstr(uplink_why(r->uplink), "refused") != NULL;
}

static void nobody_there_is_said_clearly(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    struct uplink_config config = {.loop = r.cloud.loop,
                                   .host = "localhost",
                                   .port = 1, /* nobody listens */
                                   .token = "secret",
                                   .numerics = 1,
                                   .events = &events,
                                   .ctx = &r};
    uplink_destroy(r.uplink);
    r.uplink = uplink_create(&config);
    run(&r);
    assert_true(comes_true(r.cloud.loop, why_is_refused_port, &r));
    assert_false(uplink_refused(r.uplink));
    finish(&r);
}

static void backoff_doubles_to_its_cap(void **state)
{
    (void)state;
    for (uint32_t random = 0; random < 5; random++) {
        uint64_t first = uplink_backoff_us(0, random * 0x33333333u);
        assert_in_range(first, 50000, 100000);
        assert_in_range(uplink_backoff_us(3, random * 0x33333333u), 400000, 800000);
        assert_in_range(uplink_backoff_us(6, random * 0x33333333u), 2500000, 5000000);
        assert_in_range(uplink_backoff_us(4000000000u, random * 0x33333333u), 2500000, 5000000);
    }
    assert_int_equal(uplink_backoff_us(0, 0), 50000);
    assert_int_equal(uplink_backoff_us(0, 50000), 100000);
}

static _Atomic uint64_t clock_stands_us; /* 0: it runs */
static unsigned renewals;
uint64_t __real_clock_mono_us(void);
uint64_t __wrap_clock_mono_us(void);
void __wrap_ws_renew(struct ws_conn *c);

uint64_t __wrap_clock_mono_us(void)
{
    uint64_t stands_us = clock_stands_us;
    return stands_us ? stands_us : __real_clock_mono_us();
}

void __wrap_ws_renew(struct ws_conn *c)
{
    renewals += c != NULL;
}

static void open_stream_later(void *arg)
{
    clock_stands_us = clock_mono_us() + UPLINK_RENEW_US;
    renewals = 0;
    open_stream(arg);
}

static void a_stream_renews_the_path_when_that_is_old(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    run(&r);
    assert_true(comes_true(r.cloud.loop, is_ready, &r));
    on_loop(r.cloud.loop, open_stream_later, &r);
    assert_int_equal(renewals, 1);
    on_loop(r.cloud.loop, open_stream, &r);
    assert_int_equal(renewals, 1);
    clock_stands_us = 0;
    finish(&r);
}

static void a_prompt_on_an_idle_link_begins_with_a_path_that_is_new_to_tcp(void **state)
{
    (void)state;
    struct link_stats idle = {.bulk_sent_size = 70, .bulk_acked_size = 70},
                      busy = {.bulk_sent_size = 70, .bulk_acked_size = 69};
    assert_false(uplink_renews(&idle, 1000, 1000 + UPLINK_RENEW_US - 1));
    assert_true(uplink_renews(&idle, 1000, 1000 + UPLINK_RENEW_US));
    assert_false(uplink_renews(&busy, 1000, 1000 + UPLINK_RENEW_US));
}

static int set_up(void **state)
{
    (void)state;
    log_set_level(LOG_ERROR);
    return crypto_init();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_gets_its_tokens),
        cmocka_unit_test(the_cloud_hears_that_a_stream_is_given_up),
        cmocka_unit_test(a_lost_link_comes_back),
        cmocka_unit_test(a_greeting_alone_does_not_end_the_backoff),
        cmocka_unit_test(goaway_lets_streams_finish_first),
        cmocka_unit_test(refusal_is_told_apart),
        cmocka_unit_test(another_layout_is_not_accepted),
        cmocka_unit_test(nobody_there_is_said_clearly),
        cmocka_unit_test(backoff_doubles_to_its_cap),
        cmocka_unit_test(a_stream_renews_the_path_when_that_is_old),
        cmocka_unit_test(a_prompt_on_an_idle_link_begins_with_a_path_that_is_new_to_tcp),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
