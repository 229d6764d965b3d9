/* agent: a request's whole way, against a cloud that computes nothing: what is sent, what the client hears, how it ends. Private prompts and
 * links that break have files of their own. */
#include "agent_rig.h"
#include "edge/agent_internal.h"
#include "edge/api_edge.h"
#include "store/store_internal.h"

/* ---- the straight way ---- */

static void ids_alone_go_to_the_cloud_at_k_0(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    rig_run(&r);
    struct client *c = client_asks(&r, "hello");
    c->request.max_tokens = 50;
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    const struct fake_open *o = &r.cloud.opens[0];
    assert_int_equal(r.cloud.open_count, 1);
    assert_int_equal(o->prompt_count, c->usage.prompt_tokens);
    assert_int_equal(o->ids_count, o->prompt_count);
    assert_int_equal(o->held_count, 0);
    assert_string_equal(o->conversation, c->conversation);
    assert_int_equal(strncmp(c->conversation, "conv-", 5), 0);
    assert_int_equal(r.cloud.plan_count, 1);
    assert_int_equal(r.cloud.plans[0].range_count, 1);
    assert_int_equal(r.cloud.plans[0].ranges[0].layers, 0);
    assert_int_equal(r.cloud.plans[0].ranges[0].count, o->prompt_count);
    assert_int_equal(r.cloud.generate_count, 1);
    assert_int_equal(r.cloud.token_count_max, 50);
    assert_int_equal(r.cloud.rows, 0);
    rig_free(&r);
}

static uint64_t heard_size(const struct rig *r)
{
    struct link_stats stats = {0};
    if (r->cloud.conns[0])
        link_stats(r->cloud.conns[0]->link, &stats);
    return stats.bytes_in;
}

static bool probe_came(void *arg)
{
    return heard_size(arg) > 12000;
}

static bool another_probe_came(void *arg)
{
    return heard_size(arg) > 24000;
}

/* The planner wants to know the link before the first request; a fixed split asks nobody. */
static void an_idle_link_is_probed_for_the_planner(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, PLANNER_AUTO);
    rig_run(&r);
    assert_true(comes_true(r.cloud.loop, probe_came, &r));
    assert_true(comes_true(r.cloud.loop, another_probe_came, &r)); /* nobody asks for anything meanwhile */
    rig_free(&r);
    rig_make(&r, 1);
    rig_run(&r);
    struct client *c = client_asks(&r, "hello");
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    struct fake_question came = {probe_came, &r, true};
    on_loop(r.cloud.loop, fake_ask, &came);
    assert_false(came.answer);
    rig_free(&r);
}

static void rows_and_pieces_of_the_whole_prompt_are_sent(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.wait_for_rows = true;
    rig_run(&r);
    struct client *c = client_asks(&r, long_text);
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    uint32_t prompt = c->usage.prompt_tokens, blocks = (prompt + 63) / 64;
    assert_true(prompt > 128);
    assert_int_equal(r.cloud.plans[0].ranges[0].layers, 1);
    assert_int_equal(r.cloud.plans[0].ranges[0].codec, KV_L1);
    assert_int_equal(r.cloud.plans[0].ranges[0].hidden_dtype, HIDDEN_F16);
    assert_int_equal(r.cloud.rows_begin, 0);
    assert_int_equal(r.cloud.rows, prompt);
    assert_int_equal(r.cloud.row_layer, 1);
    assert_true(r.cloud.pieces <= 2 * blocks); /* the last may still be on their way */
    assert_int_equal(c->timings.edge_layers, 1);
    assert_int_equal(c->timings.edge_prefill_tokens, prompt);
    assert_true(c->timings.uplink_bytes > 0);
    assert_true(c->timings.uplink_raw_bytes > c->timings.uplink_bytes);
    rig_free(&r);
}

static void all_layers_send_one_row(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 2);
    r.cloud.wait_for_rows = true;
    rig_run(&r);
    struct client *c = client_asks(&r, long_text);
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    assert_int_equal(r.cloud.rows, 1);
    assert_int_equal(r.cloud.rows_begin, c->usage.prompt_tokens - 1);
    assert_int_equal(r.cloud.row_layer, 2);
    rig_free(&r);
}

static void what_the_cloud_has_is_not_sent_again(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.wait_for_rows = true;
    r.cloud.cached_tokens = 64;
    rig_run(&r);
    struct client *c = client_asks(&r, long_text);
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    assert_int_equal(r.cloud.plan_count, 2);
    assert_true(r.cloud.plans[1].epoch > r.cloud.plans[0].epoch);
    assert_int_equal(r.cloud.plans[1].range_count, 1);
    assert_int_equal(r.cloud.plans[1].ranges[0].first_token, 64);
    assert_int_equal(r.cloud.plans[1].ranges[0].count, c->usage.prompt_tokens - 64);
    assert_int_equal(r.cloud.rows_begin, 64);
    assert_int_equal(c->usage.cached_tokens, 64);
    assert_int_equal(c->start_usage.cached_tokens, 64);
    assert_int_equal(c->timings.cached_memory_tokens, 64);
    rig_free(&r);
}

/* Found, and not read in time: the reply says what was used, and where it came from. */
static void what_was_used_is_told_at_the_end(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.cached_tokens = 192;
    r.cloud.done_cached = 128, r.cloud.done_read = 64;
    rig_run(&r);
    struct client *c = client_asks(&r, long_text);
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    assert_int_equal(c->start_usage.cached_tokens, 192);
    assert_int_equal(c->usage.cached_tokens, 128);
    assert_int_equal(c->timings.cached_memory_tokens, 64);
    assert_int_equal(c->timings.cached_disk_tokens, 64);
    rig_free(&r);
}

/* What it has then is also what it computed before. */
static void of_a_reply_that_was_opened_again_what_was_found_first_is_told(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    r.cloud.done_cached = 128;
    r.cloud.cut_after = 3;
    rig_run(&r);
    struct client *c = client_asks(&r, long_text);
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    assert_int_equal(r.cloud.open_count, 2);
    assert_int_equal(c->usage.cached_tokens, 0);
    rig_free(&r);
}

static void exact_requests_are_sent_lossless(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    rig_run(&r);
    struct client *c = client_asks(&r, long_text);
    c->request.accept = KV_ACCEPT_EXACT;
    c->request.has_accept = true;
    client_run(&r, c);
    assert_int_equal(r.cloud.opens[0].accept, KV_ACCEPT_EXACT);
    assert_int_equal(r.cloud.plans[0].ranges[0].codec, KV_L0);
    assert_int_equal(r.cloud.plans[0].ranges[0].hidden_dtype, HIDDEN_F32);
    rig_free(&r);
}

/* ---- conversations ---- */

static void a_sent_history_keeps_its_ids(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.need_ids = false;
    rig_run(&r);
    struct client *first = client_make(&r), *second = client_make(&r);
    client_says(first, "user", "hello");
    client_run(&r, first);
    uint32_t known = first->usage.prompt_tokens + FAKE_REPLY;
    char *reply = text_of(&r, first);
    client_says(second, "user", "hello");
    client_says(second, "assistant", reply);
    client_says(second, "user", "and more");
    client_run(&r, second);
    client_check_reply(second, FAKE_REPLY);
    assert_string_equal(second->conversation, first->conversation);
    const struct fake_open *o = &r.cloud.opens[1];
    assert_int_equal(o->conversation_length, known);
    assert_int_equal(o->ids_count, o->prompt_count - known);
    assert_true(o->attempt > 0);
    free(reply);
    rig_free(&r);
}

static void a_cloud_that_forgot_gets_all_ids(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.need_ids = true;
    r.cloud.wait_for_rows = true;
    rig_run(&r);
    struct client *first = client_make(&r), *second = client_make(&r);
    client_says(first, "user", "hello");
    client_run(&r, first);
    client_says(second, "user", "and more");
    second->request.conversation = first->conversation; /* by name, with the new message alone */
    client_run(&r, second);
    client_check_reply(second, FAKE_REPLY);
    assert_int_equal(r.cloud.open_count, 3);
    assert_true(r.cloud.opens[1].conversation_length > 0);
    assert_int_equal(r.cloud.opens[2].conversation_length, 0);
    assert_int_equal(r.cloud.opens[2].ids_count, second->usage.prompt_tokens);
    assert_true(r.cloud.opens[2].attempt > r.cloud.opens[1].attempt);
    assert_memory_equal(r.cloud.opens[2].request_id, r.cloud.opens[1].request_id, 16);
    /* The ids of the first turn, reply included, lead the prompt of the second. */
    assert_memory_equal(r.cloud.opens[2].ids, r.cloud.opens[0].ids, r.cloud.opens[0].ids_count * 4);
    for (uint32_t i = 0; i < FAKE_REPLY; i++)
        assert_int_equal(r.cloud.opens[2].ids[r.cloud.opens[0].ids_count + i], fake_token(i));
    rig_free(&r);
}

static void conversations_outlive_the_agent(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    rig_run(&r);
    struct client *first = client_asks(&r, "hello");
    client_run(&r, first);
    char *json;
    assert_int_equal(edge_conversation_show(r.agent, "local", first->conversation, &json), 0);
    assert_non_null(strstr(json, "hello"));
    free(json);
    assert_int_equal(edge_conversation_show(r.agent, "other", first->conversation, &json), -TD_ERR_NOTFOUND);
    /* The same folder, a new agent. */
    rig_make_again(&r);
    rig_run(&r);
    assert_int_equal(edge_conversations_list(r.agent, "local", &json), 0);
    assert_non_null(strstr(json, first->conversation));
    free(json);
    assert_int_equal(edge_conversation_delete(r.agent, "local", first->conversation), 0);
    assert_int_equal(edge_conversation_show(r.agent, "local", first->conversation, &json), -TD_ERR_NOTFOUND);
    rig_free(&r);
}

/* ---- ends ---- */

static bool heard_cancel(void *arg)
{
    return ((struct rig *)arg)->cloud.cancel_count > 0;
}

static void a_client_that_leaves_stops_the_cloud(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.token_count = 400;
    rig_run(&r);
    struct client *c = client_asks(&r, "hello");
    c->cancel_at = 5;
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, heard_cancel, &r));
    assert_false(r.cloud.cancel_finished);
    assert_int_equal(c->count, 5);
    assert_int_equal(c->done + c->failed, 0);
    assert_int_equal(agent_flight_count(r.agent), 0);
    char *json;
    assert_int_equal(edge_conversation_show(r.agent, "local", c->conversation, &json), -TD_ERR_NOTFOUND);
    rig_free(&r);
}

static void a_stop_string_keeps_what_was_shown(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.token_count = 400;
    rig_run(&r);
    struct client *c = client_asks(&r, "hello");
    c->finish_at = 6;
    client_run(&r, c);
    assert_true(r.cloud.cancel_finished);
    assert_int_equal(r.cloud.cancel_keep, 6);
    assert_int_equal(c->finish, FINISH_STOP);
    assert_int_equal(c->usage.completion_tokens, 6);
    char *json, tokens[32];
    assert_int_equal(edge_conversation_show(r.agent, "local", c->conversation, &json), 0);
    snprintf(tokens, sizeof tokens, "\"tokens\":%u,", c->usage.prompt_tokens + 6);
    assert_non_null(strstr(json, tokens));
    free(json);
    rig_free(&r);
}

static void what_does_not_fit_is_refused_with_counts(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    r.cloud.context_max = 100;
    rig_run(&r);
    struct client *c = client_make(&r), *d = client_make(&r), *e = client_make(&r);
    client_says(c, "user", long_text);
    client_run(&r, c);
    assert_int_equal(c->code, -TD_ERR_CONTEXT);
    assert_int_equal(c->context_max, 100);
    assert_true(c->prompt > 100);
    client_says(d, "user", "hello");
    d->request.max_tokens = 100;
    client_run(&r, d);
    assert_int_equal(d->code, -TD_ERR_CONTEXT);
    assert_int_equal(d->asked, d->prompt + 100);
    client_says(e, "user", "hello"); /* no wish: what is left */
    client_run(&r, e);
    assert_int_equal(e->done, 1);
    assert_int_equal(r.cloud.token_count_max, 100 - e->usage.prompt_tokens);
    assert_int_equal(r.cloud.open_count, 1);
    rig_free(&r);
}

/* ---- Idempotency-Key ---- */

static bool has_tokens(void *arg)
{
    return ((struct client *)arg)->count >= 3;
}

static bool has_many_tokens(void *arg)
{
    return ((struct client *)arg)->count >= 40; /* more than are handed on at once */
}

static void a_key_names_one_generation(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    rig_run(&r);
    struct client *a = client_asks(&r, "hello"), *b = client_asks(&r, "hello"),
                  *other = client_asks(&r, "hello");
    strcpy(a->key, "k1");
    strcpy(b->key, "k1");
    strcpy(other->key, "k2");
    client_run(&r, a);
    uint64_t seed = r.cloud.seed;
    client_run(&r, b); /* the same again, after its end */
    client_check_reply(b, FAKE_REPLY);
    uint8_t request_id[16];
    uint64_t expected_seed;
    gen_id_from_key(r.cloud.principal_key, "k1", request_id, &expected_seed);
    assert_memory_equal(r.cloud.opens[0].request_id, request_id, 16);
    assert_memory_equal(r.cloud.opens[1].request_id, request_id, 16);
    assert_int_equal(seed, expected_seed);
    assert_int_equal(r.cloud.seed, expected_seed);
    assert_true(r.cloud.opens[1].attempt > r.cloud.opens[0].attempt);
    assert_string_equal(a->conversation, b->conversation);
    char *json, tokens[32];
    assert_int_equal(edge_conversation_show(r.agent, "local", a->conversation, &json), 0);
    snprintf(tokens, sizeof tokens, "\"tokens\":%u,", a->usage.prompt_tokens + FAKE_REPLY);
    assert_non_null(strstr(json, tokens)); /* the turn is there once */
    free(json);
    client_run(&r, other);
    assert_memory_not_equal(r.cloud.opens[2].request_id, request_id, 16);
    rig_free(&r);
}

static void the_later_of_two_takes_over(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.token_count = 60;
    r.cloud.hold_at = 30; /* it is still under way, however long the next ones take */
    rig_run(&r);
    struct client *a = client_asks(&r, "hello"), *b = client_asks(&r, "hello"),
                  *wrong = client_asks(&r, "another prompt");
    strcpy(a->key, "k");
    strcpy(b->key, "k");
    strcpy(wrong->key, "k");
    on_loop(r.cloud.loop, client_begin, a);
    assert_true(comes_true(r.cloud.loop, has_tokens, a));
    client_run(&r, wrong);
    assert_int_equal(wrong->code, -TD_ERR_CONFLICT);
    assert_int_equal(a->failed, 0);
    on_loop(r.cloud.loop, client_begin, b);
    assert_true(comes_true(r.cloud.loop, has_tokens, b));
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, client_ended, b));
    client_check_reply(b, 60); /* from the first token on */
    assert_int_equal(a->failed, 1);
    assert_int_equal(a->code, -TD_ERR_CONFLICT);
    assert_int_equal(r.cloud.open_count, 1); /* the cloud noticed nothing */
    assert_int_equal(r.cloud.cancel_count, 0);
    rig_free(&r);
}

static void hold_at_60(void *arg)
{
    ((struct rig *)arg)->cloud.hold_at = 60;
}

/* Each token's are the cloud's, whoever of the two the cloud told; the second asks for as many alternatives as the first. */
static void who_takes_over_hears_of_every_token(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.token_count = 100;
    r.cloud.hold_at = 20; /* some tokens for each of the three */
    rig_run(&r);
    struct client *list[3];
    for (size_t i = 0; i < TD_COUNT(list); i++) {
        list[i] = client_asks(&r, "hello");
        strcpy(list[i]->key, "k");
        list[i]->request.sampling.want_logprobs = true;
        list[i]->request.sampling.logprob_count = FAKE_TOPS;
    }
    on_loop(r.cloud.loop, client_begin, list[0]);
    assert_true(comes_true(r.cloud.loop, has_tokens, list[0]));
    on_loop(r.cloud.loop, client_begin, list[1]);
    on_loop(r.cloud.loop, hold_at_60, &r);
    assert_true(comes_true(r.cloud.loop, has_many_tokens, list[1]));
    on_loop(r.cloud.loop, client_begin, list[2]);
    on_loop(r.cloud.loop, let_tokens, &r);
    struct client *last = list[2];
    assert_true(comes_true(r.cloud.loop, client_ended, last));
    client_check_reply(last, 100);
    assert_int_equal(list[0]->code, -TD_ERR_CONFLICT);
    assert_int_equal(list[1]->code, -TD_ERR_CONFLICT);
    for (uint32_t i = 0; i < 100; i++) {
        assert_true(last->logprobs[i] == fake_logprob(i, 0));
        assert_int_equal(last->top_counts[i], FAKE_TOPS);
        assert_int_equal(last->last_top_ids[i], fake_token(i + FAKE_TOPS - 1));
    }
    rig_free(&r);
}

static bool sent_cancel(void *arg)
{
    return ((struct rig *)arg)->cloud.cancel_finished;
}

static void let_done(void *arg)
{
    ((struct rig *)arg)->cloud.hold_done = false;
}

static void one_that_is_ending_is_waited_for(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    r.cloud.hold_done = true;
    r.cloud.token_count = 300;
    rig_run(&r);
    struct client *a = client_asks(&r, "hello"), *b = client_asks(&r, "hello");
    strcpy(a->key, "k");
    strcpy(b->key, "k");
    a->finish_at = b->finish_at = 6;
    on_loop(r.cloud.loop, client_begin, a);
    assert_true(comes_true(r.cloud.loop, sent_cancel, &r));
    on_loop(r.cloud.loop, client_begin, b);
    nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
    assert_int_equal(r.cloud.open_count, 1);
    assert_int_equal(a->done + b->done, 0);
    on_loop(r.cloud.loop, let_done, &r);
    assert_true(comes_true(r.cloud.loop, client_ended, a));
    assert_true(comes_true(r.cloud.loop, client_ended, b));
    client_check_reply(a, 6);
    client_check_reply(b, 6);
    assert_string_equal(a->conversation, b->conversation);
    char *json, tokens[32];
    assert_int_equal(edge_conversation_show(r.agent, "local", a->conversation, &json), 0);
    snprintf(tokens, sizeof tokens, "\"tokens\":%u,", a->usage.prompt_tokens + 6);
    assert_non_null(strstr(json, tokens)); /* once */
    free(json);
    rig_free(&r);
}

/* ---- prompts that the device cannot do ---- */

static void without_room_the_cloud_gets_the_prompt(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.config.kv_memory = 1; /* two pages, the least there is; the prompt wants more */
    rig_run(&r);
    struct client *c = client_asks(&r, long_text);
    r.cloud.silent = true;
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, planned_for_the_cloud, &r));
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, client_ended, c));
    client_check_reply(c, FAKE_REPLY);
    assert_string_equal(c->timings.plan.why, "unable");
    rig_free(&r);
}

static void send_need(void *arg)
{
    struct rig *r = arg;
    Tandem__Need need = TANDEM__NEED__INIT;
    need.count = 1;
    for (size_t i = 0; i < FAKE_CONNS; i++)
        if (r->cloud.conns[i])
            fake_send(r->cloud.conns[i], FRAME_NEED, r->cloud.conns[i]->stream, &need.base, NULL, 0);
}

static bool has_planned(void *arg)
{
    return ((struct rig *)arg)->cloud.plan_count > 0;
}

static void what_was_damaged_is_left_to_the_cloud(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.silent = true;
    rig_run(&r);
    struct client *c = client_asks(&r, long_text);
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, has_planned, &r));
    assert_int_equal(r.cloud.plans[0].ranges[0].layers, 1);
    on_loop(r.cloud.loop, send_need, &r);
    assert_true(comes_true(r.cloud.loop, planned_for_the_cloud, &r));
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, client_ended, c));
    client_check_reply(c, FAKE_REPLY);
    rig_free(&r);
}

/* ---- many ---- */

static void many_clients_at_once_hear_their_own(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.token_count = 10;
    rig_run(&r);
    struct client *clients[8];
    for (size_t i = 0; i < TD_COUNT(clients); i++) {
        clients[i] = client_asks(&r, i % 2 ? "hello" : long_text);
        clients[i]->cancel_at = i == 3 ? 4 : 0;
    }
    /* The fake cloud serves the last stream of a connection only, so one after the other begins when the one before has been heard. */
    for (size_t i = 0; i < TD_COUNT(clients); i++) {
        on_loop(r.cloud.loop, client_begin, clients[i]);
        assert_true(comes_true(r.cloud.loop, has_tokens, clients[i]));
        if (i != 3)
            assert_true(comes_true(r.cloud.loop, client_ended, clients[i]));
    }
    for (size_t i = 0; i < TD_COUNT(clients); i++)
        if (i != 3)
            client_check_reply(clients[i], 10);
    rig_free(&r);
}

static void shutdown_in_the_middle_leaves_nothing(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.token_count = 400;
    r.cloud.hold_at = 100;
    rig_run(&r);
    struct client *a = client_asks(&r, long_text), *b = client_asks(&r, "hello");
    on_loop(r.cloud.loop, client_begin, a);
    assert_true(comes_true(r.cloud.loop, has_tokens, a));
    on_loop(r.cloud.loop, client_begin, b);
    rig_end(&r); /* under a sanitizer: nothing leaks, nothing is touched */
    assert_int_equal(a->done, 0);
    rig_clear(&r);
}

/* ---- a full disk ---- */

static void device_is_full(struct rig *r, bool full)
{
    agent_store(r->agent)->limit_size = full ? 1 : UINT64_C(1) << 40;
}

static struct client *says_in(struct rig *r, const char *text, char *conversation)
{
    struct client *c = client_asks(r, text);
    c->request.conversation = conversation;
    return c;
}

static void a_turn_that_is_not_kept_is_told(void **state)
{
    (void)state;
    struct rig r;
    static char name[] = "mine";
    rig_make(&r, 0);
    rig_run(&r);
    struct client *list[4];
    for (size_t i = 0; i < TD_COUNT(list); i++)
        list[i] = says_in(&r, "hello", name);
    client_run(&r, list[0]);
    assert_int_equal(list[0]->not_kept, 0);
    device_is_full(&r, true);
    client_run(&r, list[1]);
    client_check_reply(list[1], FAKE_REPLY);
    assert_int_equal(list[1]->not_kept, 1);
    device_is_full(&r, false);
    client_run(&r, list[2]);
    assert_int_equal(list[2]->code, -TD_ERR_CONFLICT);
    assert_non_null(strstr(list[2]->text, "it holds 1;"));
    char *json, name_json[] = "mine";
    assert_int_equal(edge_conversation_fork(r.agent, "local", name_json, &json), 0);
    char fork[64];
    assert_int_equal(sscanf(json, "{\"conversation\":{\"id\":\"%29s", fork), 1);
    fork[29] = '\0';
    free(json);
    list[3]->request.conversation = fork;
    client_run(&r, list[3]);
    client_check_reply(list[3], FAKE_REPLY);
    assert_int_equal(list[3]->not_kept, 0);
    rig_free(&r);
}

struct late_item { /* one that its inbox could not tell the loop of */
    struct inbox_item item;
    struct rig *rig;
    bool ran;
};

static void late_item_runs(struct inbox_item *item)
{
    ((struct late_item *)item)->ran = true;
}

static void post_of_nothing(void *arg)
{
    (void)arg;
}

static void push_without_room(void *arg)
{
    struct late_item *late = arg;
    while (net_loop_post(late->rig->cloud.loop, post_of_nothing, NULL) == 0)
        continue;
    inbox_push(late->rig->agent->inbox, &late->item);
}

static bool late_item_ran(void *arg)
{
    return ((struct late_item *)arg)->ran;
}

static bool cloud_is_asked(void *arg)
{
    return ((struct rig *)arg)->cloud.generate_count > 0;
}

static void nothing_waits_for_the_next_to_come(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    r.cloud.silent = true;
    rig_run(&r);
    struct client *c = client_asks(&r, "hello");
    struct late_item late = {.item.run = late_item_runs, .rig = &r};
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, cloud_is_asked, &r)); /* and nothing else is under way */
    on_loop(r.cloud.loop, push_without_room, &late);
    assert_true(comes_true(r.cloud.loop, late_item_ran, &late));
    rig_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ids_alone_go_to_the_cloud_at_k_0),
        cmocka_unit_test(an_idle_link_is_probed_for_the_planner),
        cmocka_unit_test(rows_and_pieces_of_the_whole_prompt_are_sent),
        cmocka_unit_test(all_layers_send_one_row),
        cmocka_unit_test(what_the_cloud_has_is_not_sent_again),
        cmocka_unit_test(what_was_used_is_told_at_the_end),
        cmocka_unit_test(of_a_reply_that_was_opened_again_what_was_found_first_is_told),
        cmocka_unit_test(exact_requests_are_sent_lossless),
        cmocka_unit_test(a_sent_history_keeps_its_ids),
        cmocka_unit_test(a_cloud_that_forgot_gets_all_ids),
        cmocka_unit_test(conversations_outlive_the_agent),
        cmocka_unit_test(a_client_that_leaves_stops_the_cloud),
        cmocka_unit_test(a_stop_string_keeps_what_was_shown),
        cmocka_unit_test(what_does_not_fit_is_refused_with_counts),
        cmocka_unit_test(a_key_names_one_generation),
        cmocka_unit_test(the_later_of_two_takes_over),
        cmocka_unit_test(who_takes_over_hears_of_every_token),
        cmocka_unit_test(a_turn_that_is_not_kept_is_told),
        cmocka_unit_test(one_that_is_ending_is_waited_for),
        cmocka_unit_test(without_room_the_cloud_gets_the_prompt),
        cmocka_unit_test(what_was_damaged_is_left_to_the_cloud),
        cmocka_unit_test(many_clients_at_once_hear_their_own),
        cmocka_unit_test(nothing_waits_for_the_next_to_come),
        cmocka_unit_test(shutdown_in_the_middle_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, rig_set_up, NULL);
}
