/* agent: a device that goes on without its cloud. Computing is paced, so that a link can come back in the middle of it; a bias makes every token the
 * same on both sides. */
#include "agent_offline.h"
#include "edge/agent_internal.h"
#include "edge/api_edge.h"

static void the_rest_is_made_here(void **state)
{
    (void)state;
    struct rig r;
    rig_offline(&r);
    r.cloud.token_count = 40;
    r.cloud.cut_after = 10;
    r.cloud.away_then = true;
    rig_run(&r);
    struct client *c = rig_asks(&r, 40);
    client_run(&r, c);
    assert_all_own(c, 40);
    assert_int_equal(c->finish, FINISH_LENGTH);
    assert_true(c->timings.was_offline);
    assert_int_equal(c->timings.offline_from, 10);
    assert_int_equal(c->timings.offline_tokens, 30);
    assert_int_equal(c->timings.local_tokens, 30);
    assert_true(c->timings.offline_estimate_ms > 0);
    assert_int_equal(r.cloud.open_count, 1);
    rig_free(&r);
}

static bool was_cancelled(void *arg)
{
    return ((struct rig *)arg)->cloud.cancel_count > 0;
}

static bool drained;

static void on_drained(void *ctx)
{
    (void)ctx;
    drained = true;
}

static void drain(void *arg)
{
    drained = false;
    agent_drain(((struct rig *)arg)->agent, on_drained, NULL);
}

static bool is_drained(void *arg)
{
    (void)arg;
    return drained;
}

static void come_back(void *arg)
{
    ((struct rig *)arg)->cloud.away = false;
}

static void come_back_warm(void *arg)
{
    ((struct rig *)arg)->cloud.cached_tokens = KV_BLOCK_TOKENS; /* the prompt is shorter */
    come_back(arg);
}

static void it_hands_back(void **state)
{
    (void)state;
    struct rig r;
    rig_offline(&r);
    r.cloud.token_count = 400;
    r.cloud.cut_after = 10;
    r.cloud.away_then = true;
    rig_run(&r);
    struct client *c = rig_asks(&r, 400);
    c->then_at = 70, c->then = come_back_warm, c->then_arg = &r; /* at once: the device does not wait */
    client_run(&r, c);
    assert_all_own(c, 400);
    assert_true(c->usage.prompt_tokens < KV_BLOCK_TOKENS);
    const struct fake_open *again = &r.cloud.opens[r.cloud.open_count - 1];
    assert_int_equal(r.cloud.open_count, 2);
    assert_true(again->held_count >= 70);
    assert_true(again->attempt > r.cloud.opens[0].attempt);
    assert_int_equal(r.cloud.done_count, 1); /* the end is the cloud's */
    assert_int_equal(c->timings.offline_from, 10);
    assert_true(c->timings.offline_tokens >= 60);
    assert_true(c->timings.offline_tokens <= again->held_count - 10 + 64);
    const struct fake_plan *plan = &r.cloud.plans[r.cloud.plan_count - 1];
    assert_int_equal(plan->ranges[0].layers, 0); /* the cloud computes the context from ids */
    assert_string_equal(c->timings.plan.why, "continued");
    assert_int_equal(c->timings.plan.token_count, 0); /* of the prompt */
    rig_free(&r);
}

static void leave(void *arg)
{
    agent_cancel(((struct client *)arg)->flight, false, 0);
}

static bool is_lost(void *arg)
{
    return ((struct rig *)arg)->agent->away_since_us != 0;
}

static bool none_is_left(void *arg)
{
    return agent_flight_count(((struct rig *)arg)->agent) == 0;
}

/* A client that goes, or a reply that is whole, while the link is down: the cloud, which keeps the generation, is told as soon as it is back. */
static void the_cloud_hears_that_nobody_waits(void **state)
{
    (void)state;
    for (int leaves = 0; leaves < 2; leaves++) {
        struct rig r;
        rig_offline(&r);
        r.config.offline = leaves ? OFFLINE_WAIT : OFFLINE_CONTINUE;
        r.cloud.token_count = 40;
        r.cloud.cut_after = 10;
        r.cloud.away_then = true;
        rig_run(&r);
        struct client *c = rig_asks(&r, 40);
        on_loop(r.cloud.loop, client_begin, c);
        assert_true(comes_true(r.cloud.loop, has_ten, c));
        assert_true(comes_true(r.cloud.loop, is_lost, &r));
        if (leaves)
            on_loop(r.cloud.loop, leave, c);
        else
            assert_true(comes_true(r.cloud.loop, is_whole, c));
        assert_int_equal(agent_flight_count(r.agent), 1);
        assert_true(metric_value(r.agent->metrics.running) == 0);
        assert_int_equal(r.cloud.open_count, 1);
        r.cloud.silent = true; /* it would not come to an end by itself */
        on_loop(r.cloud.loop, come_back, &r);
        assert_true(comes_true(r.cloud.loop, none_is_left, &r));
        assert_true(comes_true(r.cloud.loop, was_cancelled, &r));
        assert_int_equal(r.cloud.open_count, 2);
        assert_memory_equal(r.cloud.opens[1].request_id, r.cloud.opens[0].request_id, 16);
        assert_true(r.cloud.opens[1].attempt > r.cloud.opens[0].attempt);
        assert_false(r.cloud.cancel_finished);
        assert_int_equal(r.cloud.generate_count, 1);
        rig_free(&r);
    }
}

/* A device that stops does not wait until it can tell the cloud so. */
static void an_end_waits_for_no_link(void **state)
{
    (void)state;
    struct rig r;
    rig_offline(&r);
    r.config.offline = OFFLINE_WAIT;
    r.cloud.token_count = 40;
    r.cloud.cut_after = 10;
    r.cloud.away_then = true;
    rig_run(&r);
    struct client *c = rig_asks(&r, 40);
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, has_ten, c));
    assert_true(comes_true(r.cloud.loop, is_lost, &r));
    on_loop(r.cloud.loop, leave, c);
    on_loop(r.cloud.loop, drain, &r);
    assert_true(comes_true(r.cloud.loop, is_drained, &r));
    rig_free(&r);
}

/* ---- a device that is ahead ---- */

static void make_ahead(struct rig *r)
{
    rig_offline(r);
    r->config.local = LOCAL_ALWAYS;
    r->cloud.silent = true;
}

static bool has_all_of_its_lead(void *arg)
{
    return ((struct client *)arg)->count >= 64;
}

static void kill_cloud(void *arg)
{
    struct rig *r = arg;
    r->cloud.away = true;
    for (size_t i = 0; i < FAKE_CONNS; i++)
        if (r->cloud.conns[i])
            ws_close(r->cloud.conns[i]->ws, "killed");
}

/* A reply whose device has all of its lead when the cloud is killed. */
static struct client *ahead_of_a_killed_cloud(struct rig *r, const char *text, uint32_t token_count)
{
    r->cloud.token_count = token_count;
    rig_run(r);
    struct client *c = rig_asks(r, token_count);
    c->messages[0] = (struct chat_message){"user", text, strlen(text)};
    on_loop(r->cloud.loop, client_begin, c);
    assert_true(comes_true(r->cloud.loop, has_all_of_its_lead, c));
    on_loop(r->cloud.loop, kill_cloud, r);
    return c;
}

/* The link was lost just now, however often that is asked. */
static bool is_whole_at_once(void *arg)
{
    struct client *c = arg;
    if (c->agent->away_since_us)
        c->agent->away_since_us = clock_mono_us();
    return c->done;
}

static void who_is_ahead_goes_on_at_once(void **state)
{
    (void)state;
    struct rig r;
    make_ahead(&r);
    struct client *c = ahead_of_a_killed_cloud(&r, "hello", 150);
    assert_true(comes_true(r.cloud.loop, is_whole_at_once, c));
    assert_all_own(c, 150);
    rig_free(&r);
}

/* The link was lost long ago. */
static bool is_without_the_cloud(void *arg)
{
    struct client *c = arg;
    if (c->agent->away_since_us)
        c->agent->away_since_us = 1;
    return c->done || c->flight->local.was_offline;
}

struct ahead {
    struct rig *rig;
    struct client *client;
};

static bool is_open_again_and_behind(void *arg)
{
    struct ahead *a = arg;
    return a->rig->cloud.open_count == 2 && a->client->count > a->rig->cloud.opens[1].held_count;
}

static void let_one(void *arg)
{
    struct rig *r = arg;
    r->cloud.hold_at = r->cloud.opens[1].held_count + 1;
    r->cloud.silent = false;
}

/* The cloud comes back, far behind, and says a token that the client has long had: nothing that the device has to wait for. */
static void who_is_ahead_stays_so(void **state)
{
    (void)state;
    struct rig r;
    make_ahead(&r);
    struct client *c = ahead_of_a_killed_cloud(&r, "hello", 400);
    assert_true(comes_true(r.cloud.loop, is_without_the_cloud, c));
    on_loop(r.cloud.loop, come_back, &r);
    assert_true(comes_true(r.cloud.loop, is_open_again_and_behind, &(struct ahead){&r, c}));
    on_loop(r.cloud.loop, let_one, &r);
    assert_true(comes_true(r.cloud.loop, is_whole, c));
    assert_all_own(c, 400);
    assert_true(c->timings.was_offline);
    assert_int_equal(c->timings.local_tokens, 400);
    assert_true(r.cloud.opens[1].attempt > r.cloud.opens[0].attempt);
    rig_free(&r);
}

static bool is_planned_again(void *arg)
{
    return ((struct rig *)arg)->cloud.plan_count >= 2;
}

/* … nor does it send the KV that it goes on with, however slow the cloud is. */
static void who_is_ahead_sends_nothing_back(void **state)
{
    (void)state;
    struct rig r;
    make_ahead(&r);
    r.config.kv_whole = true;
    r.cloud.layer_ns = 20000000; /* sending would be sooner */
    struct client *c = ahead_of_a_killed_cloud(&r, long_text, 250);
    assert_true(comes_true(r.cloud.loop, is_without_the_cloud, c));
    on_loop(r.cloud.loop, come_back, &r);
    assert_true(comes_true(r.cloud.loop, is_planned_again, &r));
    assert_int_equal(r.cloud.plans[1].ranges[0].layers, 0);
    assert_true(comes_true(r.cloud.loop, is_whole, c));
    assert_all_own(c, 250);
    assert_true(c->usage.prompt_tokens > KV_BLOCK_TOKENS);
    rig_free(&r);
}

static void again_in_the_same_folder(struct rig *r)
{
    rig_make_again(r);
    r->cloud.same_token = RIG_TOKEN;
}

/* It has known its cloud once; now it starts without it. */
static void whole_replies_are_made_here(void **state)
{
    (void)state;
    struct rig r;
    rig_offline(&r);
    rig_run(&r);
    struct client *c = rig_asks(&r, 8);
    client_run(&r, c);
    again_in_the_same_folder(&r);
    r.cloud.away = true;
    rig_run(&r);
    c = rig_asks(&r, 12);
    client_run(&r, c);
    assert_all_own(c, 12);
    assert_int_equal(c->timings.offline_from, 0);
    assert_int_equal(c->timings.offline_tokens, 12);
    assert_null(agent_unhealthy(r.agent));
    char *json;
    assert_int_equal(edge_conversation_show(r.agent, "local", c->conversation, &json), 0);
    free(json);
    assert_int_equal(r.cloud.open_count, 0);
    rig_free(&r);
}

static void a_device_that_was_never_connected_waits(void **state)
{
    (void)state;
    struct rig r;
    rig_offline(&r);
    r.cloud.away = true;
    r.config.cloud_timeout_ms = 300;
    rig_run(&r);
    struct client *c = rig_asks(&r, 12);
    client_run(&r, c);
    assert_int_equal(c->failed, 1);
    assert_int_equal(c->code, -TD_ERR_CLOSED);
    assert_non_null(agent_unhealthy(r.agent));
    rig_free(&r);
}

static bool is_ready(void *arg)
{
    return uplink_state(((struct rig *)arg)->agent->uplink) == UPLINK_READY;
}

/* The default: nothing is made here, nothing kept. */
static void without_the_wish_it_waits(void **state)
{
    (void)state;
    struct rig r;
    rig_offline(&r);
    r.config.offline = OFFLINE_WAIT;
    r.config.cloud_timeout_ms = 300;
    r.cloud.token_count = 40;
    r.cloud.cut_after = 10;
    r.cloud.away_then = true;
    rig_run(&r);
    assert_true(comes_true(r.cloud.loop, is_ready, &r)); /* the patience is for the link that breaks */
    struct client *c = rig_asks(&r, 40);
    client_run(&r, c);
    assert_int_equal(c->failed, 1);
    assert_int_equal(c->count, 10);
    char path[160];
    snprintf(path, sizeof path, "%s/identity", r.data);
    assert_int_equal(access(path, F_OK), -1);
    rig_free(&r);
}

static void a_device_without_all_layers_is_told_so(void **state)
{
    (void)state;
    for (uint32_t layers = 0; layers < 2; layers++) {
        struct rig r;
        struct td_error err = {0};
        rig_offline(&r);
        r.config.edge_layers = layers;
        assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_ARG);
        assert_non_null(strstr(err.text, "--offline continue"));
        fake_cloud_free(&r.cloud);
        rig_clear(&r);
    }
}

/* Slower than elsewhere: a link that comes back at its 70th token is there long before the last of 400. */
static int set_up_slow(void **state)
{
    return set_up_paced(state) || setenv("TANDEM_PACED_LAYER_US", "1000", 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_rest_is_made_here),
        cmocka_unit_test(it_hands_back),
        cmocka_unit_test(the_cloud_hears_that_nobody_waits),
        cmocka_unit_test(an_end_waits_for_no_link),
        cmocka_unit_test(who_is_ahead_goes_on_at_once),
        cmocka_unit_test(who_is_ahead_stays_so),
        cmocka_unit_test(who_is_ahead_sends_nothing_back),
        cmocka_unit_test(whole_replies_are_made_here),
        cmocka_unit_test(a_device_that_was_never_connected_waits),
        cmocka_unit_test(without_the_wish_it_waits),
        cmocka_unit_test(a_device_without_all_layers_is_told_so),
    };
    return cmocka_run_group_tests(tests, set_up_slow, NULL);
}
