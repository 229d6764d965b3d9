/* agent: tokens that the device makes itself, against a cloud that is late, says the same, or says something else. A bias makes every token of the device
 * the same one, so what both sides should say is known. */
#include "agent_rig.h"
#include "edge/agent_internal.h"
#include "edge/pipeline_internal.h"

#define LEAD 64

static void make(struct rig *r)
{
    rig_make(r, PLANNER_AUTO);
    r->config.local = LOCAL_ALWAYS;
    r->cloud.silent = true;
    r->cloud.same_token = RIG_TOKEN;
}

static void begin(struct rig *r, struct client *c)
{
    on_loop(r->cloud.loop, client_begin, c);
    assert_int_equal(c->begin_code, 0);
}

static bool all_are_gone(void *arg)
{
    return agent_flight_count(((struct rig *)arg)->agent) == 0;
}

static bool has_five(void *arg)
{
    return ((struct client *)arg)->count >= 5;
}

static bool cloud_is_asked(void *arg)
{
    return ((struct rig *)arg)->cloud.generate_count > 0;
}

/* The client has all of it before the cloud has said anything; the cloud then comes behind, and is not told to stop. */
static void a_whole_reply_ends_before_the_cloud_has_begun(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    r.cloud.token_count = 6;
    rig_run(&r);
    struct client *c = rig_asks(&r, 6);
    client_run(&r, c);
    assert_all_own(c, 6);
    assert_int_equal(c->finish, FINISH_LENGTH);
    assert_int_equal(c->timings.local_tokens, 6);
    assert_false(c->timings.cloud_told); /* what its part took: nobody knows yet */
    assert_int_equal(c->timings.confirmed_tokens, 0);
    assert_true(c->timings.plan.local);
    assert_true(c->timings.plan.edge_first_token_ms > 0);
    assert_true(comes_true(r.cloud.loop, cloud_is_asked, &r)); /* the device may be sooner than its OPEN */
    assert_int_equal(r.cloud.plans[0].range_count, 1);
    assert_int_equal(r.cloud.plans[0].ranges[0].layers, 0);
    assert_int_equal(agent_flight_count(r.agent), 1);
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, all_are_gone, &r));
    assert_int_equal(r.cloud.done_count, 1);
    assert_int_equal(r.cloud.cancel_count, 0);
    assert_int_equal(r.cloud.open_count, 1);
    rig_free(&r);
}

/* A stop string: the cloud would go on behind it, so it is stopped where the client stopped, but not before. */
static void a_reply_that_the_client_ends_is_ended_there(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    r.cloud.token_count = 100;
    rig_run(&r);
    struct client *c = rig_asks(&r, 100);
    c->finish_at = 4;
    client_run(&r, c);
    assert_int_equal(c->usage.completion_tokens, 4);
    assert_int_equal(c->finish, FINISH_STOP);
    assert_int_equal(r.cloud.cancel_count, 0);
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, all_are_gone, &r));
    assert_int_equal(r.cloud.cancel_count, 1);
    assert_true(r.cloud.cancel_finished);
    assert_int_equal(r.cloud.cancel_keep, 4);
    rig_free(&r);
}

static bool has_lead(void *arg)
{
    return ((struct client *)arg)->count >= LEAD;
}

static bool is_whole(void *arg)
{
    return ((struct client *)arg)->done;
}

static void the_device_is_ahead_by_so_many_at_most(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    r.cloud.token_count = 150;
    rig_run(&r);
    struct client *c = rig_asks(&r, 150);
    begin(&r, c);
    assert_true(comes_true(r.cloud.loop, has_lead, c));
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    assert_true(comes_true(r.cloud.loop, has_lead, c));
    assert_int_equal(c->count, LEAD);
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, is_whole, c));
    assert_all_own(c, 150);
    assert_true(comes_true(r.cloud.loop, all_are_gone, &r));
    assert_int_equal(r.cloud.open_count, 1);
    rig_free(&r);
}

static void let_four(void *arg)
{
    struct rig *r = arg;
    r->cloud.silent = false;
    r->cloud.hold_at = 4;
}

/* The device ends the reply at the limit of its lead; what the cloud had said by then is known, what its part took is not. */
static void a_lead_that_is_kept_is_told(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    r.cloud.token_count = LEAD + 4;
    rig_run(&r);
    struct client *c = rig_asks(&r, LEAD + 4);
    begin(&r, c);
    assert_true(comes_true(r.cloud.loop, has_lead, c));
    on_loop(r.cloud.loop, let_four, &r);
    assert_true(comes_true(r.cloud.loop, is_whole, c));
    assert_all_own(c, LEAD + 4);
    assert_int_equal(c->timings.local_tokens, LEAD + 4);
    assert_int_equal(c->timings.confirmed_tokens, 4);
    assert_false(c->timings.cloud_told);
    rig_free(&r);
}

static void another_text_of_the_cloud_goes_on_behind_the_devices(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    r.cloud.token_count = 100;
    r.cloud.same_token = RIG_TOKEN + 1;
    rig_run(&r);
    struct client *c = rig_asks(&r, 100);
    begin(&r, c);
    assert_true(comes_true(r.cloud.loop, has_five, c));
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, is_whole, c));
    assert_int_equal(c->count, 100);
    const struct fake_open *again = &r.cloud.opens[1];
    assert_int_equal(r.cloud.open_count, 2);
    assert_int_equal(r.cloud.cancel_count, 1);
    assert_false(r.cloud.cancel_finished);
    assert_true(again->attempt > r.cloud.opens[0].attempt);
    assert_memory_equal(again->request_id, r.cloud.opens[0].request_id, 16);
    assert_true(again->held_count >= 5 && again->held_count <= LEAD);
    for (uint32_t i = 0; i < 100; i++)
        assert_int_equal(c->ids[i], i < again->held_count ? RIG_TOKEN : RIG_TOKEN + 1);
    assert_int_equal(c->timings.local_tokens, again->held_count);
    assert_int_equal(r.cloud.plans[1].ranges[0].layers, 0);
    rig_free(&r);
}

/* Too busy, says the cloud; the client has tokens already. */
static void a_cloud_that_is_busy_is_asked_again(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    r.cloud.token_count = 80;
    rig_run(&r);
    struct client *c = rig_asks(&r, 80);
    begin(&r, c);
    assert_true(comes_true(r.cloud.loop, has_five, c));
    assert_true(comes_true(r.cloud.loop, cloud_is_asked, &r));
    r.cloud.error_code = TD_ERR_FULL;
    r.cloud.error_retry = true;
    r.cloud.same_token = RIG_TOKEN + 1; /* makes it open again, which is refused once */
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, is_whole, c));
    assert_int_equal(c->failed, 0);
    assert_int_equal(c->count, 80);
    assert_int_equal(r.cloud.open_count, 3);
    assert_int_equal(r.cloud.opens[2].held_count, r.cloud.opens[1].held_count);
    assert_true(r.cloud.opened_us - r.cloud.error_us >= FAKE_RETRY_MS * 1000); /* when it said so */
    rig_free(&r);
}

static bool is_back(void *arg)
{
    return ((struct rig *)arg)->cloud.open_count == 2;
}

struct begin_many {
    struct rig *rig;
    uint32_t begun;
    int code; /* of the last */
};

static void begin_many(void *arg)
{
    struct begin_many *m = arg;
    for (uint32_t i = 0; i <= AGENT_FLIGHTS_MAX; i++) {
        struct client *c = rig_asks(m->rig, 2);
        client_begin(c);
        m->code = c->begin_code;
        m->begun += m->code == 0;
    }
    agent_end_flights(m->rig->agent);
}

static void cut(void *arg)
{
    struct rig *r = arg;
    for (size_t i = 0; i < FAKE_CONNS; i++)
        if (r->cloud.conns[i])
            ws_close(r->cloud.conns[i]->ws, "cut");
}

static void a_lost_link_does_not_stop_the_device(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    r.cloud.token_count = 90;
    rig_run(&r);
    struct client *c = rig_asks(&r, 90);
    begin(&r, c);
    assert_true(comes_true(r.cloud.loop, has_five, c));
    assert_true(comes_true(r.cloud.loop, cloud_is_asked, &r));
    on_loop(r.cloud.loop, cut, &r);
    assert_true(comes_true(r.cloud.loop, is_back, &r));
    assert_true(r.cloud.opens[1].held_count >= 5);
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, is_whole, c));
    assert_all_own(c, 90);
    rig_free(&r);
}

static void a_reply_may_be_whole_without_a_link(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    r.cloud.token_count = 64;
    rig_run(&r);
    struct client *c = rig_asks(&r, 64), *next = rig_asks(&r, 3);
    begin(&r, c);
    assert_true(comes_true(r.cloud.loop, has_five, c));
    on_loop(r.cloud.loop, cut, &r);
    assert_true(comes_true(r.cloud.loop, is_whole, c));
    assert_all_own(c, 64);
    client_run(&r, next); /* and one that is whole is let go of when the link is lost */
    assert_all_own(next, 3);
    on_loop(r.cloud.loop, cut, &r);
    assert_true(comes_true(r.cloud.loop, all_are_gone, &r));
    rig_free(&r);
}

static void a_client_that_leaves_ends_it(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    rig_run(&r);
    struct client *c = rig_asks(&r, 200);
    c->cancel_at = 5;
    begin(&r, c);
    assert_true(comes_true(r.cloud.loop, all_are_gone, &r));
    assert_int_equal(c->count, 5);
    assert_int_equal(c->done + c->failed, 0);
    rig_free(&r);
}

static void the_same_key_takes_the_run_over(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    r.cloud.token_count = 120;
    rig_run(&r);
    struct client *first = rig_asks(&r, 120), *second = rig_asks(&r, 120);
    snprintf(first->key, sizeof first->key, "key");
    snprintf(second->key, sizeof second->key, "key");
    begin(&r, first);
    assert_true(comes_true(r.cloud.loop, has_five, first));
    begin(&r, second);
    assert_true(comes_true(r.cloud.loop, has_lead, second));
    assert_int_equal(first->failed, 1);
    assert_int_equal(first->code, -TD_ERR_CONFLICT);
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, is_whole, second));
    assert_all_own(second, 120);
    assert_int_equal(r.cloud.open_count, 1);
    rig_free(&r);
}

static bool is_decoding(void *arg)
{
    struct pipeline *p = ((struct rig *)arg)->agent->pipeline;
    bool any = false;
    pthread_mutex_lock(&p->lock);
    for (const struct pipeline_job *job = p->jobs; job; job = job->next)
        any |= decode_has_work(job);
    pthread_mutex_unlock(&p->lock);
    return any;
}

static bool is_done_and_still(void *arg)
{
    struct client *c = arg;
    return c->done && c->count == c->finish_at;
}

/* What the client does not want is not made for nothing. */
static void behind_a_stop_string_nothing_is_made(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    rig_run(&r);
    struct client *c = rig_asks(&r, 200);
    c->finish_at = 4;
    begin(&r, c);
    assert_true(comes_true(r.cloud.loop, is_done_and_still, c));
    assert_false(is_decoding(&r));
    assert_int_equal(agent_flight_count(r.agent), 1); /* the cloud comes behind */
    rig_free(&r);
}

/* Replies that only the cloud still works on are in nobody's way: neither by their number nor by their streams. */
static void those_behind_are_in_nobodys_way(void **state)
{
    (void)state;
    struct rig r;
    make(&r);
    rig_run(&r);
    for (uint32_t i = 0; i <= LIMIT_STREAMS; i++) { /* one more than there are streams */
        struct client *c = rig_asks(&r, 2);
        client_run(&r, c);
        assert_all_own(c, 2);
    }
    struct begin_many many = {.rig = &r};
    on_loop(r.cloud.loop, begin_many, &many);
    assert_int_equal(many.begun, AGENT_FLIGHTS_MAX);
    assert_int_equal(many.code, -TD_ERR_FULL);
    rig_free(&r);
}

static void shutting_down_waits_for_no_cloud(void **state)
{
    (void)state;
    for (int ends = 0; ends < 2; ends++) {
        struct rig r;
        make(&r);
        rig_run(&r);
        struct client *c = rig_asks(&r, ends ? 5 : 300);
        begin(&r, c);
        assert_true(comes_true(r.cloud.loop, has_five, c));
        assert_true(!ends || comes_true(r.cloud.loop, is_whole, c));
        on_loop(r.cloud.loop, (void (*)(void *))agent_end_flights, r.agent);
        assert_true(comes_true(r.cloud.loop, all_are_gone, &r));
        assert_int_equal(c->done, ends);
        rig_free(&r);
    }
}

static void without_it_the_cloud_makes_all(void **state)
{
    (void)state;
    for (int what = 0; what < 2; what++) {
        struct rig r;
        make(&r);
        r.cloud.silent = false;
        r.cloud.done_cached = KV_BLOCK_TOKENS; /* with timings */
        r.config.local = what ? LOCAL_AUTO : LOCAL_OFF;
        if (what)
            r.config.edge_layers = 0;
        rig_run(&r);
        struct client *c = rig_asks(&r, 20);
        client_run(&r, c);
        assert_all_own(c, FAKE_REPLY);
        assert_int_equal(c->timings.local_tokens, 0);
        assert_true(c->timings.cloud_told);
        assert_false(c->timings.plan.local);
        rig_free(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_whole_reply_ends_before_the_cloud_has_begun),
        cmocka_unit_test(a_reply_that_the_client_ends_is_ended_there),
        cmocka_unit_test(the_device_is_ahead_by_so_many_at_most),
        cmocka_unit_test(a_lead_that_is_kept_is_told),
        cmocka_unit_test(another_text_of_the_cloud_goes_on_behind_the_devices),
        cmocka_unit_test(a_cloud_that_is_busy_is_asked_again),
        cmocka_unit_test(a_lost_link_does_not_stop_the_device),
        cmocka_unit_test(a_reply_may_be_whole_without_a_link),
        cmocka_unit_test(a_client_that_leaves_ends_it),
        cmocka_unit_test(the_same_key_takes_the_run_over),
        cmocka_unit_test(behind_a_stop_string_nothing_is_made),
        cmocka_unit_test(those_behind_are_in_nobodys_way),
        cmocka_unit_test(shutting_down_waits_for_no_cloud),
        cmocka_unit_test(without_it_the_cloud_makes_all),
    };
    return cmocka_run_group_tests(tests, rig_set_up, NULL);
}
