/* agent, links that break: each token once, the plan that the cloud knows goes on, nodes that leave are followed, and no cloud is an error in time. */
#include "agent_rig.h"
#include "edge/agent_internal.h"
#include "edge/api_edge.h"

/* ---- links that break ---- */

static void every_token_comes_once_over_a_cut_link(void **state)
{
    (void)state;
    for (int resumed = 0; resumed < 2; resumed++) {
        struct rig r;
        rig_make(&r, 1);
        r.cloud.cut_after = 7;
        r.cloud.resumed = resumed;
        r.cloud.wait_for_rows = true;
        rig_run(&r);
        struct client *c = client_asks(&r, long_text);
        client_run(&r, c);
        client_check_reply(c, FAKE_REPLY);
        assert_int_equal(r.cloud.open_count, 2);
        const struct fake_open *a = &r.cloud.opens[0], *b = &r.cloud.opens[1];
        assert_int_equal(b->held_count, 7);
        assert_true(b->attempt > a->attempt);
        assert_memory_equal(a->request_id, b->request_id, 16);
        assert_int_equal(b->ids_count, a->prompt_count + 7);
        assert_memory_equal(a->ids, b->ids, a->ids_count * 4);
        for (uint32_t i = 0; i < 7; i++)
            assert_int_equal(b->ids[a->prompt_count + i], fake_token(i));
        if (!resumed) { /* planned again, for the prompt alone */
            assert_int_equal(r.cloud.plan_count, 2);
            assert_int_equal(r.cloud.plans[1].ranges[0].count, a->prompt_count);
            assert_int_equal(r.cloud.plans[1].ranges[0].layers, 1);
            assert_string_equal(c->timings.plan.why, "continued");
        } else {
            assert_int_equal(r.cloud.plan_count, 1);
        }
        rig_free(&r);
    }
}

/* The cloud went on from ids where rows stayed away. That is part of what the reply was made from, and is planned so again when all is lost. */
static void what_the_cloud_did_by_itself_is_in_the_record(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.left_from = 64;
    r.cloud.silent = r.cloud.wait_for_plan = true;
    r.cloud.cut_after = 7;
    rig_run(&r);
    struct client *c = client_asks(&r, long_text);
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    uint32_t prompt = c->usage.prompt_tokens;
    assert_int_equal(r.cloud.open_count, 2);
    assert_int_equal(r.cloud.plan_count, 2);
    const struct fake_plan *p = &r.cloud.plans[1];
    assert_int_equal(p->range_count, 2);
    assert_int_equal(p->ranges[0].layers, 1);
    assert_int_equal(p->ranges[0].count, 64);
    assert_int_equal(p->ranges[1].layers, 0);
    assert_int_equal(p->ranges[1].count, prompt - 64);
    assert_int_equal(c->timings.plan.left_tokens, prompt - 64);
    rig_free(&r);
}

static _Atomic uint64_t clock_behind_us; /* how far the clock was set back */
uint64_t __real_clock_wall_us(void);
uint64_t __wrap_clock_wall_us(void);

uint64_t __wrap_clock_wall_us(void)
{
    return __real_clock_wall_us() - clock_behind_us;
}

/* A cloud that knows the first one takes a later attempt only. */
static void a_key_that_comes_again_is_later_whatever_the_clock_says(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    rig_run(&r);
    for (uint32_t i = 0; i < 3; i++) {
        struct client *c = client_asks(&r, "hello");
        strcpy(c->key, "k");
        r.cloud.cut_after = i == 1 ? 3 : 0; /* which is another attempt */
        clock_behind_us = i * UINT64_C(3600000000);
        client_run(&r, c);
        client_check_reply(c, FAKE_REPLY);
    }
    clock_behind_us = 0;
    assert_int_equal(r.cloud.open_count, 4);
    for (uint32_t i = 1; i < 4; i++) {
        assert_memory_equal(r.cloud.opens[i].request_id, r.cloud.opens[0].request_id, 16);
        assert_true(r.cloud.opens[i].attempt > r.cloud.opens[i - 1].attempt);
    }
    rig_free(&r);
}

static _Atomic bool keys_are_away;
int __real_store_chain_key(struct store *s, const char *tenant, uint8_t *out, struct td_error *err);
int __wrap_store_chain_key(struct store *s, const char *tenant, uint8_t *out, struct td_error *err);

int __wrap_store_chain_key(struct store *s, const char *tenant, uint8_t *out, struct td_error *err)
{
    return keys_are_away ? -TD_ERR_TIMEOUT : __real_store_chain_key(s, tenant, out, err);
}

static bool is_welcomed(void *arg)
{
    return ((struct rig *)arg)->agent->away_since_us == 0;
}

/* A disk that does not answer when the cloud greets: requests wait for it, and not for the next connection, or are told what is missing. */
static void keys_that_are_away_at_the_greeting_are_asked_for_again(void **state)
{
    (void)state;
    for (uint32_t come = 0; come < 2; come++) {
        struct rig r;
        rig_make(&r, 0);
        r.config.cloud_timeout_ms = come ? 60000 : 1;
        keys_are_away = true;
        rig_run(&r);
        struct client *c = client_asks(&r, "hello");
        assert_true(comes_true(r.cloud.loop, is_welcomed, &r));
        on_loop(r.cloud.loop, client_begin, c);
        keys_are_away = !come;
        assert_true(comes_true(r.cloud.loop, client_ended, c));
        keys_are_away = false;
        if (come) {
            client_check_reply(c, FAKE_REPLY);
        } else {
            assert_int_equal(c->code, -TD_ERR_CLOSED);
            assert_non_null(strstr(c->text, "does not give its keys"));
        }
        assert_int_equal(r.cloud.connections, 1);
        rig_free(&r);
    }
}

/* ---- a prompt that was left is taken up again ---- */

static const char prompt_text[] =
    "The keeper of the lighthouse had been told to light the lamp at dusk and to put it out at dawn, and to "
    "write down every ship that passed, and he did so for thirty years without a word, until one evening no "
    "ship came and no gull cried. He lit the lamp all the same, wrote that nothing had passed, and sat down "
    "at the window to wait for the morning, which came late and grey and brought a letter.";

/* The device has one layer of two, and chooses; a layer of a token takes the cloud 20 ms. */
static struct client *rig_slow_cloud(struct rig *r, uint32_t leaves)
{
    struct gguf *file;
    char slice[160];
    rig_make(r, PLANNER_AUTO);
    snprintf(slice, sizeof slice, "%s.slice", r->model);
    assert_int_equal(gguf_open(r->model, &file, NULL), 0);
    assert_int_equal(gguf_slice(file, 1, slice, NULL, NULL, NULL), 0);
    gguf_close(file);
    assert_int_equal(rename(slice, r->model), 0);
    r->config.local = LOCAL_OFF;
    r->cloud.layer_ns = 20000000;
    rig_run(r);
    client_run(r, client_asks(r, "hello")); /* tells it so */
    r->cloud.silent = true;
    r->cloud.leaves = leaves;
    r->cloud.open_count = r->cloud.plan_count = 0;
    return client_asks(r, prompt_text);
}

static bool was_left_for_good(void *arg)
{
    struct rig *r = arg;
    return r->cloud.leaves == 0 && r->agent->flights && r->agent->flights->left;
}

static bool is_helped_again(void *arg)
{
    const struct fake_cloud *f = &((struct rig *)arg)->cloud;
    return f->plan_count == 2 && f->rows > 0 && f->rows_begin + f->rows == f->opens[0].prompt_count;
}

/* Much later: nothing more is told. */
static void look_once_more(void *arg)
{
    struct flight *f = ((struct rig *)arg)->agent->flights;
    uint32_t epoch = f->epoch;
    assert_true(plan_reconsider(f, clock_mono_us() + 1000000)); /* it is still on its way */
    assert_int_equal(f->epoch, epoch);
}

static void check_rest(const struct fake_plan *p, uint32_t from, uint32_t prompt)
{
    uint32_t last = p->range_count - 1;
    assert_true(p->resumes);
    assert_int_equal(p->ranges[last].first_token, from);
    assert_int_equal(p->ranges[last].count, prompt - from);
    assert_int_equal(p->ranges[last].layers, 1);
}

/* Begun when the plan comes: 150 ms of computing, 7 tokens of a layer; so help comes back with the next block. What the cloud had said before it heard of
 * it does not count, whenever that comes. */
static void a_prompt_that_was_left_is_taken_up_again(void **state)
{
    (void)state;
    for (int says_again = 0; says_again < 2; says_again++) {
        struct rig r;
        struct client *c = rig_slow_cloud(&r, 1);
        r.cloud.says_again = says_again;
        on_loop(r.cloud.loop, client_begin, c);
        assert_true(comes_true(r.cloud.loop, is_helped_again, &r));
        on_loop(r.cloud.loop, let_tokens, &r);
        assert_true(comes_true(r.cloud.loop, client_ended, c));
        client_check_reply(c, FAKE_REPLY);
        const struct fake_plan *p = r.cloud.plans;
        assert_int_equal(r.cloud.plan_count, 2);
        assert_false(p[0].resumes);
        assert_int_equal(p[0].ranges[p[0].range_count - 1].layers, 1);
        uint32_t left = p[0].ranges[0].layers ? 0 : p[0].ranges[0].count, from = left + KV_BLOCK_TOKENS;
        check_rest(&p[1], from, c->usage.prompt_tokens);
        assert_int_equal(r.cloud.rows_begin, from);
        assert_int_equal(p[1].ranges[0].layers, 0); /* nothing of the plan before had run */
        assert_int_equal(c->timings.plan.left_tokens, KV_BLOCK_TOKENS);
        rig_free(&r);
    }
}

/* As if the device had run a block only: it catches up from there, and the cloud is told to wait so much longer. */
static void look_with_little_computed(void *arg)
{
    struct flight *f = ((struct rig *)arg)->agent->flights;
    f->computed = KV_BLOCK_TOKENS;
    f->given_up.resumes = 0;
    assert_true(plan_reconsider(f, clock_mono_us() + 1000000));
    assert_int_equal(f->plan.compute_begin, KV_BLOCK_TOKENS);
    assert_int_equal(f->rows_until, f->plan.send_begin);
    assert_int_equal(f->computed, KV_BLOCK_TOKENS);
}

/* Whoever stumbles again and again is helped RESUMES_MAX times. */
static void it_is_not_taken_up_for_ever(void **state)
{
    (void)state;
    struct rig r;
    struct client *c = rig_slow_cloud(&r, 5);
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, was_left_for_good, &r));
    on_loop(r.cloud.loop, look_once_more, &r);
    assert_int_equal(r.cloud.plan_count, 5);
    on_loop(r.cloud.loop, look_with_little_computed, &r);
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, client_ended, c));
    client_check_reply(c, FAKE_REPLY);
    for (uint32_t i = 1; i < 5; i++) {
        assert_true(r.cloud.plans[i].epoch > r.cloud.plans[i - 1].epoch);
        check_rest(&r.cloud.plans[i], i * KV_BLOCK_TOKENS, c->usage.prompt_tokens);
    }
    rig_free(&r);
}

/* What is known of a plan that was given up goes over with it: how often the prompt was taken up, that the cloud has it, and what it was told. */
static void who_takes_over_knows_what_was_left(void **state)
{
    (void)state;
    struct rig r;
    struct client *c = rig_slow_cloud(&r, 5), *second = client_asks(&r, prompt_text);
    strcpy(c->key, "k");
    strcpy(second->key, "k");
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, was_left_for_good, &r));
    const struct flight before = *c->flight; /* nothing changes it any more */
    assert_true(before.patient);
    on_loop(r.cloud.loop, client_begin, second);
    assert_true(comes_true(r.cloud.loop, client_ended, c));
    assert_int_equal(c->code, -TD_ERR_CONFLICT);
    assert_int_equal(second->flight->patient, before.patient);
    assert_true(second->flight->left && second->flight->given_up.now);
    assert_int_equal(second->flight->given_up.resumes, before.given_up.resumes);
    assert_int_equal(second->flight->given_up.resumed_epoch, before.given_up.resumed_epoch);
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, client_ended, second));
    client_check_reply(second, FAKE_REPLY);
    assert_int_equal(r.cloud.plan_count, 5);
    assert_int_equal(second->timings.plan.left_tokens, second->usage.prompt_tokens - 4 * KV_BLOCK_TOKENS);
    rig_free(&r);
}

/* ---- an idle link ---- */

static bool has_nothing_to_send(void *arg)
{
    struct client *c = arg;
    agent_look_at_link(c->agent);
    return c->flight->acked && !planner_sends(&c->flight->plan) && c->agent->estimates.unacked_size == 0;
}

/* It is believed to be slow, though not so that an answer would say otherwise, and a probe is due if nobody computes. */
static void make_due(void *arg)
{
    struct estimates *e = &((struct client *)arg)->agent->estimates;
    e->rate = 0.9 * ESTIMATES_RATE_UNKNOWN;
    e->unacked_size = 0;
    e->probes_vain = 0;
    e->probe_due_us = clock_mono_us();
    e->progress_us = 0;
}

static void leave_to_the_cloud(void *arg)
{
    ((struct client *)arg)->flight->given_up.now = true;
}

static bool has_ticked(void *arg)
{
    return ((struct client *)arg)->agent->estimates.progress_us > 0;
}

static bool was_probed(void *arg)
{
    return ((struct client *)arg)->agent->estimates.probes_vain > 0;
}

/* Beside a prompt a probe waits, unless that was left to the cloud: it may be taken up again. */
static void a_link_is_probed_while_nobody_computes(void **state)
{
    (void)state;
    for (uint32_t left = 0; left < 2; left++) {
        struct rig r;
        rig_make(&r, PLANNER_AUTO);
        r.config.local = LOCAL_OFF;
        r.cloud.layer_ns = 1; /* nobody sends such a cloud rows */
        rig_run(&r);
        client_run(&r, client_asks(&r, "hello"));
        r.cloud.silent = true;
        struct client *c = client_asks(&r, "hello");
        on_loop(r.cloud.loop, client_begin, c);
        assert_true(comes_true(r.cloud.loop, has_nothing_to_send, c));
        if (left)
            on_loop(r.cloud.loop, leave_to_the_cloud, c);
        on_loop(r.cloud.loop, make_due, c);
        assert_true(comes_true(r.cloud.loop, has_ticked, c));
        struct fake_question q = {was_probed, c, false};
        on_loop(r.cloud.loop, fake_ask, &q);
        assert_int_equal(q.answer, left);
        rig_free(&r);
    }
}

/* The cloud has the first block: what is behind goes, in the form that the cloud's plan says, whatever the agent's own would be. */
static void an_upload_goes_on_as_the_cloud_has_it_planned(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers <= 3; layers++) { /* 3 are more than there are: the cloud's */
        struct rig r;
        rig_make(&r, 2);
        r.cloud.cut_after = 1;
        r.cloud.resumed = r.cloud.plan_wanted = true;
        r.cloud.wanted_layers = layers;
        r.cloud.wanted_epoch = 4000000000u;
        rig_run(&r);
        struct client *c = client_asks(&r, long_text);
        client_run(&r, c);
        client_check_reply(c, FAKE_REPLY);
        assert_int_equal(r.cloud.open_count, 2);
        const struct fake_plan *p = &r.cloud.plans[r.cloud.plan_count - 1];
        assert_true(p->epoch > 4000000000u);
        assert_int_equal(p->range_count, 1);
        assert_int_equal(p->ranges[0].first_token, 0);
        assert_int_equal(p->ranges[0].layers, layers == 3 ? 0 : layers);
        if (layers < 3)
            assert_int_equal(p->ranges[0].hidden_dtype, HIDDEN_INT8);
        if (layers == 1 && r.cloud.rows > 0) { /* the reply does not wait for them */
            assert_int_equal(r.cloud.rows_begin, KV_BLOCK_TOKENS);
            assert_int_equal(r.cloud.row_layer, 1);
        }
        rig_free(&r);
    }
}

static struct rig *resuming_rig(uint32_t layers)
{
    struct rig *r = calloc(1, sizeof *r);
    rig_make(r, 2);
    r->cloud.cut_after = 1;
    r->cloud.resumed = r->cloud.plan_wanted = true;
    r->cloud.wanted_layers = layers;
    return r;
}

static const struct fake_plan *last_plan_of_a_reply(struct rig *r, uint32_t *prompt_count)
{
    rig_run(r);
    struct client *c = client_asks(r, long_text);
    client_run(r, c);
    client_check_reply(c, FAKE_REPLY);
    *prompt_count = c->usage.prompt_tokens;
    return &r->cloud.plans[r->cloud.plan_count - 1];
}

/* A device that has run tokens through fewer layers cannot go on behind them through more: that range is the cloud's. */
static void a_plan_does_not_get_deeper_under_way(void **state)
{
    (void)state;
    struct rig *r = resuming_rig(1);
    r->cloud.wanted_deeper = true;
    uint32_t prompt_count;
    const struct fake_plan *p = last_plan_of_a_reply(r, &prompt_count);
    assert_int_equal(p->range_count, 2);
    assert_int_equal(p->ranges[0].layers, 1);
    assert_int_equal(p->ranges[1].layers, 0);
    rig_free(r);
    free(r);
}

/* A cloud that names more tokens than there are: the agent plans for those that it knows. */
static void a_plan_beyond_the_prompt_is_not_carried_out(void **state)
{
    (void)state;
    struct rig *r = resuming_rig(2);
    r->cloud.wanted_beyond = 100000;
    uint32_t prompt_count;
    const struct fake_plan *p = last_plan_of_a_reply(r, &prompt_count);
    uint32_t last = p->range_count - 1;
    assert_int_equal(p->ranges[last].first_token + p->ranges[last].count, prompt_count);
    rig_free(r);
    free(r);
}

static void an_agent_that_chooses_says_by_what(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, PLANNER_AUTO);
    rig_run(&r);
    for (int turn = 0; turn < 2; turn++) {
        struct client *c = client_asks(&r, long_text);
        client_run(&r, c);
        client_check_reply(c, FAKE_REPLY);
        const struct api_plan *p = &c->timings.plan;
        assert_true(p->chosen && !p->why);
        assert_true(p->plan_count >= 1);
        assert_true(p->layers <= 2);
        assert_int_equal(p->token_count, c->usage.prompt_tokens);
        assert_true(p->first_token_ms > 0 && p->first_token_ms <= p->cloud_first_token_ms);
        assert_true(p->t16_ms > p->first_token_ms);
        assert_true(p->edge_layer_us > 0 && p->cloud_layer_us > 0 && p->uplink_mbit > 0);
    }
    rig_free(&r);
}

/* Rows are sent of some of the layers only, KV of those that the device runs. */
static void an_agent_that_was_told_says_what_it_sends(void **state)
{
    (void)state;
    for (uint32_t layers = 0; layers <= 2; layers++) {
        struct rig r;
        rig_make(&r, layers);
        rig_run(&r);
        struct client *c = client_asks(&r, long_text);
        client_run(&r, c);
        const struct api_plan *p = &c->timings.plan;
        assert_false(p->chosen);
        assert_string_equal(p->why, "given");
        assert_int_equal(p->layers, layers);
        assert_int_equal(p->token_count, c->usage.prompt_tokens);
        assert_int_equal(p->kv_tokens, layers ? p->token_count : 0);
        assert_true(layers ? p->codec && !strcmp(p->codec, "l1") : !p->codec);
        assert_true(layers == 1 ? p->hidden_dtype && !strcmp(p->hidden_dtype, "f16") : !p->hidden_dtype);
        rig_free(&r);
    }
}

static void a_node_that_leaves_is_followed(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    r.cloud.error_code = TD_ERR_CLOSED;
    r.cloud.error_retry = true;
    rig_run(&r);
    struct client *c = client_asks(&r, "hello");
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    assert_int_equal(r.cloud.open_count, 2);
    rig_free(&r);
}

/* It is so with the request that it has already, and no reason to give up a reply that has begun. */
static void a_node_that_is_full_after_a_cut_is_asked_again(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    r.cloud.cut_after = 3;
    r.cloud.error_behind = 1;
    r.cloud.error_code = TD_ERR_FULL;
    r.cloud.error_retry = true;
    rig_run(&r);
    struct client *c = client_asks(&r, "hello");
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    assert_int_equal(r.cloud.open_count, 3);
    rig_free(&r);
}

static void the_clouds_error_reaches_the_client(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.error_code = TD_ERR_FULL;
    r.cloud.error_retry = true;
    rig_run(&r);
    struct client *c = client_asks(&r, "hello");
    client_run(&r, c);
    assert_int_equal(c->failed, 1);
    assert_int_equal(c->code, -TD_ERR_FULL);
    assert_int_equal(c->retry_ms, 700);
    assert_int_equal(c->started, 0);
    rig_free(&r);
}

static void no_cloud_is_an_error_after_the_timeout(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    r.config.cloud_port = 1; /* nobody listens */
    r.config.cloud_timeout_ms = 100;
    rig_run(&r);
    struct client *c = client_asks(&r, "hello");
    client_run(&r, c);
    assert_int_equal(c->failed, 1);
    assert_int_equal(c->code, -TD_ERR_CLOSED);
    assert_non_null(strstr(c->text, "could not be reached"));
    const char *why = agent_unhealthy(r.agent);
    assert_non_null(why);
    assert_non_null(strstr(why, "no link to the cloud (a request waits for it up to 0 s): "));
    rig_free(&r);
}

static bool unhealthy_says_refused(void *arg)
{
    const char *why = agent_unhealthy(arg);
    return why && strstr(why, "token not known");
}

static void a_refusal_fails_requests_at_once(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    r.cloud.refuse_code = TD_ERR_AUTH;
    rig_start(&r);
    struct client *waiting = client_asks(&r, "hello"), *later = client_asks(&r, "hello");
    on_loop(r.cloud.loop, client_begin, waiting); /* before the cloud has said anything */
    assert_int_equal(waiting->begin_code, 0);
    on_loop(r.cloud.loop, rig_connect, r.agent);
    assert_true(comes_true(r.cloud.loop, unhealthy_says_refused, r.agent));
    assert_true(comes_true(r.cloud.loop, client_ended, waiting));
    assert_int_equal(waiting->code, -TD_ERR_CLOSED);
    assert_non_null(strstr(waiting->text, "refuses this device"));
    on_loop(r.cloud.loop, client_begin, later);
    assert_int_equal(later->begin_code, -TD_ERR_CLOSED);
    rig_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_token_comes_once_over_a_cut_link),
        cmocka_unit_test(a_node_that_leaves_is_followed),
        cmocka_unit_test(a_node_that_is_full_after_a_cut_is_asked_again),
        cmocka_unit_test(the_clouds_error_reaches_the_client),
        cmocka_unit_test(no_cloud_is_an_error_after_the_timeout),
        cmocka_unit_test(a_refusal_fails_requests_at_once),
        cmocka_unit_test(what_the_cloud_did_by_itself_is_in_the_record),
        cmocka_unit_test(a_key_that_comes_again_is_later_whatever_the_clock_says),
        cmocka_unit_test(keys_that_are_away_at_the_greeting_are_asked_for_again),
        cmocka_unit_test(a_prompt_that_was_left_is_taken_up_again),
        cmocka_unit_test(it_is_not_taken_up_for_ever),
        cmocka_unit_test(who_takes_over_knows_what_was_left),
        cmocka_unit_test(a_link_is_probed_while_nobody_computes),
        cmocka_unit_test(an_upload_goes_on_as_the_cloud_has_it_planned),
        cmocka_unit_test(a_plan_does_not_get_deeper_under_way),
        cmocka_unit_test(a_plan_beyond_the_prompt_is_not_carried_out),
        cmocka_unit_test(an_agent_that_chooses_says_by_what),
        cmocka_unit_test(an_agent_that_was_told_says_what_it_sends),
    };
    return cmocka_run_group_tests(tests, rig_set_up, NULL);
}
