/* agent: where exactly the link breaks: in a prompt, at the end of a reply, beside a token that came too late. The device goes on by itself.
 * And what must not be tried for ever. */
#include "agent_offline.h"
#include "edge/agent_internal.h"

static unsigned break_at; /* a frame's type */

/* What the cloud said is a whole reply already; the link broke before it said so. */
static void an_end_that_was_not_heard_is_one(void **state)
{
    (void)state;
    for (int ends = 0; ends < 2; ends++) {
        struct rig r;
        rig_offline(&r);
        r.cloud.token_count = 40;
        r.cloud.cut_after = ends ? 1 : 12;
        r.cloud.away_then = true;
        rig_run(&r);
        int32_t end = 0;
        while (!tokenizer_is_end(r.agent->tokenizer, end))
            end++;
        if (ends)
            r.cloud.same_token = end;
        struct client *c = rig_asks(&r, 12);
        c->request.ignore_end = false;
        client_run(&r, c);
        assert_int_equal(c->failed, 0);
        assert_int_equal(c->count, ends ? 1 : 12);
        assert_int_equal(c->finish, ends ? FINISH_STOP : FINISH_LENGTH);
        assert_int_equal(c->timings.offline_tokens, 0);
        rig_free(&r);
    }
}

static void break_next(void *arg)
{
    struct fake_cloud *cloud = &((struct rig *)arg)->cloud;
    cloud->silent = cloud->away_then = true;
    cloud->cut_at = break_at;
}

/* Wherever in its prompt the link breaks: when it is opened, planned, or rows are on their way. */
static void a_prompt_that_breaks_off_is_done_here(void **state)
{
    (void)state;
    static const unsigned types[] = {FRAME_OPEN, FRAME_PLAN, FRAME_GENERATE, FRAME_HIDDEN, FRAME_KV_BLOCK};
    for (size_t i = 0; i < TD_COUNT(types); i++) {
        struct rig r;
        rig_offline(&r);
        r.config.local = LOCAL_OFF;
        r.cloud.layer_ns = 20000000; /* so slow that the device is to compute, however busy it is */
        rig_run(&r);
        struct client *c = rig_asks(&r, 4);
        client_run(&r, c); /* tells it so */
        break_at = types[i];
        on_loop(r.cloud.loop, break_next, &r);
        c = rig_asks(&r, 12);
        c->messages[0].content = long_text, c->messages[0].content_size = strlen(long_text);
        client_run(&r, c);
        assert_all_own(c, 12);
        assert_int_equal(r.cloud.cut_at, 0);
        assert_int_equal(c->timings.offline_from, 0);
        assert_int_equal(c->timings.offline_tokens, 12);
        rig_free(&r);
    }
}

/* As if the device had been stopped with a token that it had drawn, and not handed on: the last of so many. */
static void leave_a_late_token(struct rig *r, uint32_t count)
{
    struct flight *f = r->agent->flights;
    int32_t ids[11];
    for (uint32_t i = 0; i < count; i++)
        ids[i] = i + 1 < count ? RIG_TOKEN : RIG_TOKEN + 1;
    f->local.run_last = 1;
    assert_int_equal(f->work_count, f->turn.ids_count);
    pipeline_append(r->agent->pipeline, f->work, f->work_count, ids, count);
}

static void late_in_place_of_the_tenth(void *arg)
{
    leave_a_late_token(arg, 10);
}

static void late_behind_the_tenth(void *arg)
{
    leave_a_late_token(arg, 11);
}

static void a_token_that_came_too_late_does_not_count(void **state)
{
    (void)state;
    void (*const late[])(void *) = {late_in_place_of_the_tenth, late_behind_the_tenth};
    for (size_t i = 0; i < TD_COUNT(late); i++) {
        struct rig r;
        rig_offline(&r);
        r.cloud.token_count = 40;
        r.cloud.cut_after = 10;
        r.cloud.away_then = true;
        rig_run(&r);
        struct client *c = rig_asks(&r, 40);
        c->then_at = 10, c->then = late[i], c->then_arg = &r; /* before the device goes on */
        client_run(&r, c);
        assert_all_own(c, 40);
        assert_int_equal(c->timings.offline_tokens, 30);
        rig_free(&r);
    }
}

/* ---- over and over ---- */

static bool wanted_to_restore(void *arg)
{
    const struct rig *r = arg;
    for (uint32_t i = 0; i < TD_MIN(r->cloud.plan_count, FAKE_PLANS); i++)
        for (uint32_t j = 0; j < r->cloud.plans[i].range_count; j++)
            if (r->cloud.plans[i].ranges[j].layers == 2)
                return true;
    return false;
}

static bool all_is_on_disk(void *arg)
{
    static const char name[] = "tandem_edge_kv_disk_written_total";
    return metric_value(metric_counter(name, NULL, "")) >= *(double *)arg;
}

/* A device that has no room for what it would have to send tries it once. */
static void without_room_nothing_is_restored(void **state)
{
    (void)state;
    struct rig r;
    double blocks = 3;
    rig_make(&r, 0);
    r.config.kv_whole = true;
    r.config.kv_disk = 64u << 20;
    rig_run(&r);
    client_run(&r, client_asks(&r, long_text));
    assert_true(comes_true(r.cloud.loop, all_is_on_disk, &blocks));
    rig_make_again(&r);
    r.config.kv_memory = 1;
    r.cloud.layer_ns = 20000000; /* so slow that sending is sooner */
    r.cloud.silent = true;
    rig_run(&r);
    struct client *c = client_asks(&r, long_text);
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, wanted_to_restore, &r));
    assert_true(comes_true(r.cloud.loop, planned_for_the_cloud, &r));
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, client_ended, c));
    client_check_reply(c, FAKE_REPLY);
    rig_free(&r);
}

static bool has_acked(void *arg)
{
    struct flight *f = ((struct rig *)arg)->agent->flights;
    return f && f->acked;
}

static void take_no_plan(void *arg)
{
    plan_failed(((struct rig *)arg)->agent->flights, -TD_ERR_CLOSED);
}

/* The connection had ended, and the flight found that out before the agent was told. A cloud refuses an attempt that it has seen. */
static void each_attempt_is_a_higher_one(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    r.cloud.silent = true;
    rig_run(&r);
    struct client *c = client_asks(&r, "hello");
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, has_acked, &r));
    on_loop(r.cloud.loop, take_no_plan, &r);
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, client_ended, c));
    client_check_reply(c, FAKE_REPLY);
    assert_int_equal(r.cloud.open_count, 2);
    assert_memory_equal(r.cloud.opens[1].request_id, r.cloud.opens[0].request_id, 16);
    assert_true(r.cloud.opens[1].attempt > r.cloud.opens[0].attempt);
    rig_free(&r);
}

static void lose_it_once_more(void *arg)
{
    struct rig *r = arg;
    assert_int_equal(r->agent->flights->vain_acks, 1);
    r->agent->flights->vain_acks = FLIGHT_VAIN_MAX;
    for (size_t i = 0; i < FAKE_CONNS; i++)
        if (r->cloud.conns[i])
            fake_cut(r->cloud.conns[i]);
}

static void forget_the_vain_ones(void *arg)
{
    struct client *c = arg;
    assert_int_equal(c->agent->flights->vain_acks, 0);
}

/* It may be the request that the cloud is lost by, over and over. */
static void a_cloud_that_is_always_lost_is_not_asked_for_ever(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    r.cloud.silent = true;
    rig_run(&r);
    struct client *c = client_asks(&r, "hello");
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, has_acked, &r));
    r.cloud.away_then = true;
    on_loop(r.cloud.loop, lose_it_once_more, &r);
    assert_true(comes_true(r.cloud.loop, client_ended, c));
    assert_int_equal(c->failed, 1);
    assert_int_equal(c->code, -TD_ERR_CLOSED);
    assert_non_null(strstr(c->text, "taken this request up 16 times"));
    rig_free(&r);

    rig_make(&r, 0); /* control: tokens are progress */
    rig_run(&r);
    c = client_asks(&r, "hello");
    c->then_at = 1, c->then = forget_the_vain_ones, c->then_arg = c;
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    rig_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_end_that_was_not_heard_is_one),
        cmocka_unit_test(a_prompt_that_breaks_off_is_done_here),
        cmocka_unit_test(a_token_that_came_too_late_does_not_count),
        cmocka_unit_test(without_room_nothing_is_restored),
        cmocka_unit_test(each_attempt_is_a_higher_one),
        cmocka_unit_test(a_cloud_that_is_always_lost_is_not_asked_for_ever),
    };
    return cmocka_run_group_tests(tests, set_up_paced, NULL);
}
