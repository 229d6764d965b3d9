/* engine: whole prompts from token ids. Whatever else runs, however the prompt is cut, wherever its prefix comes from: the reply is the reference's. */
#include "engine_rig.h"

#define VOCAB 256 /* ids without the special ones */

static struct metric *preemptions(void)
{
    return metric_counter("tandem_preemptions_total", NULL, "");
}

static void reply_is_the_reference(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65, 128, 200};
    struct rig *r = rig_open((struct rig_options){0});
    for (size_t i = 0; i < TD_COUNT(lengths); i++) {
        int32_t prompt[256], reply[70];
        struct client c;
        rig_ids(prompt, lengths[i], VOCAB, (uint32_t)i + 1);
        struct engine_generate generate = i % 2 ? rig_sampling(70, 42 + i) : rig_greedy(70);
        rig_reference(r, prompt, lengths[i], generate, reply);
        client_direct(r, &c, prompt, lengths[i], generate);
        rig_until(r, c.done || c.failed);
        assert_reply(&c, reply, 70);
        assert_int_equal(c.done_event.done.finish, FINISH_LENGTH);
        assert_int_equal(c.done_event.done.prompt_tokens, lengths[i]);
        assert_int_equal(c.done_event.done.prefill_tokens, lengths[i]);
        assert_int_equal(c.done_event.done.ids_count, lengths[i] + 70);
        assert_memory_equal(c.done_ids, prompt, lengths[i] * sizeof *prompt);
        assert_memory_equal(c.done_ids + lengths[i], reply, sizeof reply);
    }
    assert_int_equal(rig_stats(r).running, 0);
    rig_close(r);
}

/* Sixteen at once, chunks of every size: the same replies. */
static void company_and_chunks_change_nothing(void **state)
{
    (void)state;
    static const uint32_t budgets[] = {17, 64, 256};
    enum { COUNT = 16, REPLY = 20 };
    static int32_t prompts[COUNT][300], replies[COUNT][REPLY];
    static struct client clients[COUNT];
    for (size_t b = 0; b < TD_COUNT(budgets); b++) {
        struct rig *r = rig_open((struct rig_options){.token_budget = budgets[b], .pages = 128});
        for (uint32_t i = 0; i < COUNT; i++) {
            uint32_t length = 1 + i * 19;
            rig_ids(prompts[i], length, VOCAB, i + 100);
            if (b == 0)
                rig_reference(r, prompts[i], length, rig_sampling(REPLY, i), replies[i]);
            client_direct(r, &clients[i], prompts[i], length, rig_sampling(REPLY, i));
        }
        rig_turn(r);
        assert_int_equal(rig_stats(r).running, COUNT);
        for (uint32_t i = 0; i < COUNT; i++) {
            rig_until(r, clients[i].done || clients[i].failed);
            assert_reply(&clients[i], replies[i], REPLY);
        }
        rig_close(r);
    }
}

static void prefix_is_reused_from_memory(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    int32_t ids[512], reply[60], second[30];
    struct client c;
    rig_ids(ids, 200, VOCAB, 3);
    rig_reference(r, ids, 200, rig_greedy(60), reply);
    client_direct(r, &c, ids, 200, rig_greedy(60));
    rig_until(r, c.done);
    assert_reply(&c, reply, 60);
    assert_int_equal(c.done_event.done.cached_tokens, 0);
    assert_int_equal(rig_stats(r).pages_cached, 4); /* 260 tokens, the reply's blocks included */

    memcpy(ids + 200, reply, sizeof reply); /* the conversation goes on */
    rig_ids(ids + 260, 20, VOCAB, 4);
    rig_reference(r, ids, 280, rig_greedy(30), second);
    client_direct(r, &c, ids, 280, rig_greedy(30));
    rig_until(r, c.done);
    assert_reply(&c, second, 30);
    assert_int_equal(c.open_event.opened.cached_tokens, 256);
    assert_int_equal(c.open_event.opened.cached_memory, 256);
    assert_int_equal(c.done_event.done.cached_tokens, 256);
    assert_int_equal(c.done_event.done.prefill_tokens, 24);

    rig_reference(r, ids, 256, rig_greedy(30), second); /* capped: the last token is always computed */
    client_direct(r, &c, ids, 256, rig_greedy(30));
    rig_until(r, c.done);
    assert_reply(&c, second, 30);
    assert_int_equal(c.done_event.done.cached_tokens, 192);

    struct engine_open open = client_open_of(&c, ids, 256, 0);
    open.direct = open.no_cache = true;
    open.generate = rig_greedy(30);
    client_send(r, &c, open);
    rig_until(r, c.done);
    assert_reply(&c, second, 30);
    assert_int_equal(c.done_event.done.cached_tokens, 0);
    rig_close(r);
}

/* The last token of a reply has no KV until it is fed. When it fills a block, that is done before the end. */
static void last_block_of_a_reply_is_whole(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    int32_t ids[512], reply[28];
    struct client c;
    rig_ids(ids, 100, VOCAB, 8);
    client_direct(r, &c, ids, 100, rig_greedy(28));
    rig_until(r, c.done);
    assert_int_equal(rig_stats(r).pages_cached, 2);
    memcpy(ids, c.done_ids, 128 * sizeof *ids);
    rig_ids(ids + 128, 10, VOCAB, 9);
    rig_reference(r, ids, 138, rig_greedy(28), reply);
    client_direct(r, &c, ids, 138, rig_greedy(28));
    rig_until(r, c.done);
    assert_reply(&c, reply, 28);
    assert_int_equal(c.done_event.done.cached_tokens, 128);
    rig_close(r);
}

static void tenants_share_principals_do_not_own(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    int32_t ids[200];
    struct client c;
    rig_ids(ids, 200, VOCAB, 5);
    client_direct(r, &c, ids, 200, rig_greedy(2));
    rig_until(r, c.done);
    for (int other_tenant = 0; other_tenant < 2; other_tenant++) {
        struct engine_open open = client_open_of(&c, ids, 200, 0);
        strcpy(open.principal, "bob");
        if (other_tenant) {
            strcpy(open.tenant, "other");
            memset(open.shared_key, 2, sizeof open.shared_key);
        }
        kv_principal_key(open.shared_key, open.principal, open.own_key);
        open.direct = true;
        open.generate = rig_greedy(2);
        client_send(r, &c, open);
        rig_until(r, c.done);
        assert_int_equal(c.done_event.done.cached_tokens, other_tenant ? 0 : 192);
    }
    rig_close(r);
}

static void no_persist_leaves_nothing_behind(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    int32_t ids[200];
    struct client c;
    rig_ids(ids, 200, VOCAB, 5);
    struct engine_generate generate = rig_greedy(100);
    generate.no_persist = true;
    client_direct(r, &c, ids, 200, generate);
    rig_until(r, c.done);
    assert_int_equal(rig_stats(r).pages_cached, 0);
    assert_int_equal(rig_stats(r).pages_used, 0);
    rig_close(r);
}

static void end_token_ends_the_reply(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.end_tokens = true});
    int32_t ids[10];
    struct client c;
    rig_ids(ids, 10, VOCAB, 6);
    struct engine_generate generate = rig_greedy(50);
    generate.sampling.bias_count = 1;
    generate.sampling.bias[0] = (struct sampler_bias){r->tokenizer->eos, 100};
    client_direct(r, &c, ids, 10, generate);
    rig_until(r, c.done);
    assert_int_equal(c.count, 1);
    assert_int_equal(c.ids[0], r->tokenizer->eos);
    assert_int_equal(c.done_event.done.finish, FINISH_STOP);
    generate.ignore_end = true;
    client_direct(r, &c, ids, 10, generate);
    rig_until(r, c.done);
    assert_int_equal(c.count, 50);
    assert_int_equal(c.done_event.done.finish, FINISH_LENGTH);
    rig_close(r);
}

static void logprobs_come_with_tokens(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    int32_t ids[10];
    struct client c;
    rig_ids(ids, 10, VOCAB, 6);
    struct engine_generate generate = rig_greedy(5);
    generate.sampling.want_logprobs = true;
    generate.sampling.logprob_count = 3;
    client_direct(r, &c, ids, 10, generate);
    rig_until(r, c.done);
    assert_int_equal(c.sampled_count, 5);
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(c.sampled[i].id, c.ids[i]);
        assert_int_equal(c.sampled[i].top_count, 3);
        assert_int_equal(c.sampled[i].top[0].id, c.ids[i]);
        assert_true(c.sampled[i].logprob < 0);
    }
    rig_close(r);
}

static void impossible_requests_fail_at_once(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.pages = 4, .context_max = 300});
    static int32_t ids[400];
    struct client c;
    rig_ids(ids, 400, VOCAB, 7);
    static const struct {
        uint32_t count;
        int code;
    } cases[] = {{300, -TD_ERR_CONTEXT}, {400, -TD_ERR_CONTEXT}, {256, -TD_ERR_LIMIT}, {0, -TD_ERR_ARG}};
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        client_direct(r, &c, ids, cases[i].count, rig_greedy(1));
        rig_turn(r);
        assert_true(c.failed);
        assert_int_equal(c.fail_code, cases[i].code);
    }
    int32_t bad[2][2] = {{1, -1}, {(int32_t)r->model->params.vocab_count, 1}};
    for (int i = 0; i < 2; i++) {
        client_direct(r, &c, bad[i], 2, rig_greedy(1));
        rig_turn(r);
        assert_int_equal(c.fail_code, -TD_ERR_ARG);
    }
    client_direct(r, &c, ids, 255, rig_greedy(0)); /* fits, to the last position of the last page */
    rig_until(r, c.done || c.failed);
    assert_false(c.failed);
    assert_int_equal(c.done_event.done.completion_tokens, 1);
    assert_int_equal(c.done_event.done.finish, FINISH_LENGTH);
    rig_close(r);
}

static void waiting_is_bounded(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.sequences_max = 1, .waiting_max = 2});
    int32_t ids[10];
    static struct client c[4];
    rig_ids(ids, 10, VOCAB, 7);
    for (int i = 0; i < 3; i++)
        client_direct(r, &c[i], ids, 10, rig_greedy(5));
    struct engine_open open = client_open_of(&c[3], ids, 10, 0);
    uint64_t sequence;
    assert_int_equal(engine_open(r->engine, &open, &sequence), -TD_ERR_FULL);
    rig_turn(r);
    assert_int_equal(rig_stats(r).running, 1);
    assert_int_equal(rig_stats(r).waiting, 2);
    assert_int_equal(c[2].open_event.opened.queue_tokens, 20);
    rig_until(r, c[0].done);
    client_direct(r, &c[3], ids, 10, rig_greedy(5)); /* there is room again */
    rig_until(r, c[1].done && c[2].done && c[3].done);
    rig_close(r);
}

static void cancel_frees_pages_within_a_turn(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    int32_t ids[50];
    struct client c;
    rig_ids(ids, 50, VOCAB, 7);
    client_direct(r, &c, ids, 50, rig_greedy(100));
    rig_until(r, c.count >= 5);
    assert_int_equal(rig_stats(r).pages_used, 1);
    engine_cancel(r->engine, c.sequence, false, 0);
    uint32_t count = c.count;
    rig_turn(r);
    assert_int_equal(rig_stats(r).pages_used, 0);
    assert_int_equal(rig_stats(r).running, 0);
    rig_turn(r);
    assert_int_equal(c.count, count);
    assert_false(c.done || c.failed);
    rig_close(r);
}

/* The client found a stop string: the reply ends where it says, and what was computed beyond is no part of it. */
static void finished_cancel_truncates(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    int32_t ids[300], reply[40];
    struct client c;
    rig_ids(ids, 100, VOCAB, 7);
    client_direct(r, &c, ids, 100, rig_greedy(100));
    rig_until(r, c.count >= 60);
    engine_cancel(r->engine, c.sequence, true, 33);
    rig_until(r, c.done);
    assert_int_equal(c.done_event.done.finish, FINISH_STOP);
    assert_int_equal(c.done_event.done.completion_tokens, 33);
    assert_int_equal(c.done_event.done.ids_count, 133);
    memcpy(ids, c.done_ids, 133 * sizeof *ids);
    rig_ids(ids + 133, 7, VOCAB, 11);
    rig_reference(r, ids, 140, rig_greedy(40), reply);
    client_direct(r, &c, ids, 140, rig_greedy(40));
    rig_until(r, c.done);
    assert_reply(&c, reply, 40);
    assert_int_equal(c.done_event.done.cached_tokens, 128);
    rig_close(r);
}

/* Pages for two of five: the younger give way and come back, and nobody's reply changes. */
static void preemption_changes_no_reply(void **state)
{
    (void)state;
    enum { COUNT = 5, REPLY = 150 };
    struct rig *r = rig_open((struct rig_options){.pages = 8});
    static int32_t prompts[COUNT][100], replies[COUNT][REPLY];
    static struct client clients[COUNT];
    double before = metric_value(preemptions());
    for (uint32_t i = 0; i < COUNT; i++) {
        rig_ids(prompts[i], 60 + i * 10, VOCAB, i + 50);
        rig_reference(r, prompts[i], 60 + i * 10, rig_sampling(REPLY, i), replies[i]);
        client_direct(r, &clients[i], prompts[i], 60 + i * 10, rig_sampling(REPLY, i));
    }
    for (uint32_t i = 0; i < COUNT; i++) {
        rig_until(r, clients[i].done || clients[i].failed);
        assert_reply(&clients[i], replies[i], REPLY);
    }
    assert_true(metric_value(preemptions()) > before);
    rig_close(r);
}

static uint64_t ticking_clock(void) /* time passes whenever somebody looks */
{
    return atomic_fetch_add(&rig_now, 10) + 10;
}

static double counter(const char *name)
{
    return metric_value(metric_counter(name, NULL, ""));
}

static double observed(const char *name)
{
    return metric_value(metric_histogram(name, NULL, "", METRIC_SECONDS_BOUNDS, METRIC_SECONDS_BOUNDS_COUNT));
}

static void figures_add_up(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    r->engine->clock = ticking_clock;
    int32_t ids[200];
    struct client c;
    rig_ids(ids, 200, VOCAB, 5);
    double prefill = counter("tandem_prefill_tokens_total"),
           generated = counter("tandem_generated_tokens_total");
    double queries = counter("tandem_prefix_cache_queries_total"),
           hits = counter("tandem_prefix_cache_hits_total");
    double first = observed("tandem_time_to_first_token_seconds"),
           next = observed("tandem_inter_token_latency_seconds");
    for (int round = 0; round < 2; round++) {
        client_direct(r, &c, ids, 200, rig_greedy(10));
        rig_until(r, c.done);
        assert_int_equal(c.open_event.opened.prefill_tokens_per_s > 0, round > 0); /* measured by then */
        assert_true(c.done_event.done.prefill_us > 0);
        assert_true(c.done_event.done.first_token_us >= c.done_event.done.prefill_us);
        assert_true(c.done_event.done.decode_us > 0);
    }
    assert_int_equal(counter("tandem_prefill_tokens_total") - prefill, 200 + 8);
    assert_int_equal(counter("tandem_generated_tokens_total") - generated, 20);
    assert_int_equal(counter("tandem_prefix_cache_queries_total") - queries, 400);
    assert_int_equal(counter("tandem_prefix_cache_hits_total") - hits, 192);
    assert_int_equal(observed("tandem_time_to_first_token_seconds") - first, 2);
    assert_int_equal(observed("tandem_inter_token_latency_seconds") - next, 18);
    assert_int_equal(rig_stats(r).rows, 200 + 8 + 18);
    assert_int_equal(rig_stats(r).steps, 20);
    rig_close(r);
}

#define POISON 255 /* a prompt that starts with it cannot be run */

static int (*real_forward)(struct backend *b, const struct batch *batch);

static int poisoned_forward(struct backend *b, const struct batch *batch)
{
    for (uint32_t i = 0; i < batch->count; i++)
        if (batch->seqs[i].ids && batch->seqs[i].position == 0 && batch->seqs[i].ids[0] == POISON)
            return -TD_ERR_NOMEM;
    return real_forward(b, batch);
}

/* A step that is refused because of one sequence fails that one only. */
static void failing_step_hits_one_sequence(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    static struct client clients[3];
    int32_t prompts[3][50], reply[30];
    struct backend_ops ops = *r->engine->backend->ops;
    real_forward = ops.forward;
    ops.forward = poisoned_forward;
    r->engine->backend->ops = &ops;
    for (uint32_t i = 0; i < 3; i++) {
        rig_ids(prompts[i], 50, 250, i);
        prompts[i][0] = i == 1 ? POISON : prompts[i][0];
        client_direct(r, &clients[i], prompts[i], 50, rig_greedy(30));
    }
    for (uint32_t i = 0; i < 3; i++) {
        rig_until(r, clients[i].done || clients[i].failed);
        if (i == 1) {
            assert_int_equal(clients[i].fail_code, -TD_ERR_NOMEM);
            continue;
        }
        rig_reference(r, prompts[i], 50, rig_greedy(30), reply);
        assert_reply(&clients[i], reply, 30);
    }
    assert_int_equal(rig_stats(r).pages_used, rig_stats(r).pages_cached);
    rig_close(r);
}

/* What devices plan by, and reads are weighed with: one place, or two near each other on a machine that wavers, say nothing about a long prompt's end. The model's shape does. */
static void cost_of_later_positions_is_told_before_it_is_known(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    struct engine *e = r->engine;
    uint32_t slope_ns;
    assert_int_equal(engine_layer_ns(e, &slope_ns), 0);
    assert_int_equal(slope_ns, 0);
    assert_true(e->prefill_rise == model_rise(&r->model->params) && e->prefill_rise > 0);
    e->prefill_rise = 0.001;
    line_add(&e->prefill_cost, 256, 30000 * (1 + 0.256));
    assert_in_range(engine_layer_ns(e, &slope_ns), 29900, 30100);
    assert_in_range(slope_ns, 30000, 31500); /* for 1,024 positions */
    assert_in_range(engine_compute_us(e, 16, 1) * 1000 / engine_compute_us(e, 0, 1), 1980,
                    2000); /* 2.056 by 1.032 */
    line_add(&e->prefill_cost, 384, 2 * 30000 * (1 + 0.384));
    assert_in_range(engine_layer_ns(e, &slope_ns), 25000, 50000);
    assert_in_range(slope_ns, 30000, 60000);
    /* and so are the first of them: what is stored is not computed again because of it */
    assert_true(engine_compute_us(e, 0, 1) > 25000e-3 * KV_BLOCK_TOKENS * e->model.shape.layer_count);
    for (int i = 0; i < 48; i++) /* level after all */
        line_add(&e->prefill_cost, 64 * i, 30000);
    engine_layer_ns(e, &slope_ns);
    assert_true(slope_ns < 5000);
    rig_close(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reply_is_the_reference),
        cmocka_unit_test(cost_of_later_positions_is_told_before_it_is_known),
        cmocka_unit_test(company_and_chunks_change_nothing),
        cmocka_unit_test(prefix_is_reused_from_memory),
        cmocka_unit_test(last_block_of_a_reply_is_whole),
        cmocka_unit_test(tenants_share_principals_do_not_own),
        cmocka_unit_test(no_persist_leaves_nothing_behind),
        cmocka_unit_test(end_token_ends_the_reply),
        cmocka_unit_test(logprobs_come_with_tokens),
        cmocka_unit_test(impossible_requests_fail_at_once),
        cmocka_unit_test(waiting_is_bounded),
        cmocka_unit_test(cancel_frees_pages_within_a_turn),
        cmocka_unit_test(finished_cancel_truncates),
        cmocka_unit_test(figures_add_up),
        cmocka_unit_test(failing_step_hits_one_sequence),
        cmocka_unit_test(preemption_changes_no_reply),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
