/* agent: a request's whole way, against a cloud that computes nothing: what is sent, what the client hears, and what both see when things break. */
#include "agent_rig.h"
#include "edge/api_edge.h"

static const char long_text[] =
    "The keeper of the lighthouse had been told to light the lamp at dusk and to put it out at dawn, and to "
    "write down every ship that passed, and he "
    "did so for thirty years without a word, until one evening no ship came and no gull cried.";

static bool planned_for_the_cloud(void *arg)
{
    struct rig *r = arg;
    const struct fake_plan *p = &r->cloud.plans[(r->cloud.plan_count + FAKE_PLANS - 1) % FAKE_PLANS];
    return r->cloud.plan_count > 1 && p->range_count == 1 && p->ranges[0].layers == 0;
}

static void let_tokens(void *arg)
{
    ((struct rig *)arg)->cloud.silent = false;
}

/* ---- the straight way ---- */

static void ids_alone_go_to_the_cloud_at_k_0(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    rig_run(&r);
    struct client *c = client_make(&r);
    client_says(c, "user", "hello");
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
    free(c);
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
    struct client *c = client_make(&r);
    client_says(c, "user", "hello");
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    assert_false(probe_came(&r));
    free(c);
    rig_free(&r);
}

static void rows_and_pieces_of_the_whole_prompt_are_sent(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.wait_for_rows = true;
    rig_run(&r);
    struct client *c = client_make(&r);
    client_says(c, "user", long_text);
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
    free(c);
    rig_free(&r);
}

static void all_layers_send_one_row(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 2);
    r.cloud.wait_for_rows = true;
    rig_run(&r);
    struct client *c = client_make(&r);
    client_says(c, "user", long_text);
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    assert_int_equal(r.cloud.rows, 1);
    assert_int_equal(r.cloud.rows_begin, c->usage.prompt_tokens - 1);
    assert_int_equal(r.cloud.row_layer, 2);
    free(c);
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
    struct client *c = client_make(&r);
    client_says(c, "user", long_text);
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
    free(c);
    rig_free(&r);
}

static void exact_requests_are_sent_lossless(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    rig_run(&r);
    struct client *c = client_make(&r);
    client_says(c, "user", long_text);
    c->request.accept = KV_ACCEPT_EXACT;
    c->request.has_accept = true;
    client_run(&r, c);
    assert_int_equal(r.cloud.opens[0].accept, KV_ACCEPT_EXACT);
    assert_int_equal(r.cloud.plans[0].ranges[0].codec, KV_L0);
    assert_int_equal(r.cloud.plans[0].ranges[0].hidden_dtype, HIDDEN_F32);
    free(c);
    rig_free(&r);
}

/* ---- private prompts ---- */

static void rig_make_private(struct rig *r, uint32_t layers)
{
    rig_make(r, layers);
    r->config.private_min_layers = 1;
    r->config.prefer_private = true;
    r->cloud.wait_for_rows = true;
}

static bool holds(const uint8_t *bytes, size_t size, const void *needle, size_t needle_size)
{
    for (size_t i = 0; i + needle_size <= size; i++)
        if (memcmp(bytes + i, needle, needle_size) == 0)
            return true;
    return false;
}

static void a_private_prompt_sends_names_and_no_ids(void **state)
{
    (void)state;
    struct fake_open opens[2];
    uint32_t prompt = 0;
    for (int is_private = 0; is_private < 2; is_private++) {
        struct rig r;
        rig_make_private(&r, 1);
        r.config.prefer_private = false;
        rig_run(&r);
        struct client *c = client_make(&r);
        client_says(c, "user", long_text);
        c->request.prefer = is_private ? API_PREFER_PRIVATE : API_PREFER_NONE;
        client_run(&r, c);
        client_check_reply(c, FAKE_REPLY);
        opens[is_private] = r.cloud.opens[0];
        prompt = c->usage.prompt_tokens;
        if (is_private) {
            assert_int_equal(r.cloud.plan_count, 1); /* made when the cloud had said what it has */
            assert_int_equal(r.cloud.plans[0].ranges[0].first_token, 0);
            assert_int_equal(r.cloud.plans[0].ranges[0].layers, 1);
        }
        free(c);
        rig_free(&r);
    }
    const struct fake_open *normal = &opens[0], *o = &opens[1];
    assert_true(prompt > 128 && prompt % 64 > 8);
    assert_int_equal(normal->ids_count, prompt);
    assert_true(holds(normal->payload, normal->payload_size, &normal->ids[3], 4)); /* the control */
    assert_true(o->is_private);
    assert_string_equal(o->conversation, "");
    assert_int_equal(o->conversation_length, 0);
    assert_int_equal(o->payload_size, prompt / 64 * 32);
    for (uint32_t i = 0; i + 3 < prompt; i++)
        assert_false(holds(o->payload, o->payload_size, &normal->ids[i], 12));
}

static void a_second_turn_of_a_private_conversation_names_no_conversation(void **state)
{
    (void)state;
    struct rig r;
    rig_make_private(&r, 1);
    rig_run(&r);
    struct client *c = client_make(&r);
    client_says(c, "user", long_text);
    client_run(&r, c);
    r.cloud.cached_tokens = 128;
    struct client *d = client_make(&r);
    client_says(d, "user", "and then?");
    d->request.conversation = c->conversation;
    client_run(&r, d);
    client_check_reply(d, FAKE_REPLY);
    assert_string_equal(d->conversation, c->conversation);
    const struct fake_open *first = &r.cloud.opens[0], *second = &r.cloud.opens[1];
    assert_true(second->is_private);
    assert_string_equal(second->conversation, "");
    assert_int_equal(second->payload_size, d->usage.prompt_tokens / 64 * 32);
    assert_memory_equal(first->payload, second->payload, 128 / 64 * 32); /* by which the cloud finds them */
    assert_int_equal(d->usage.cached_tokens, 128);
    free(c);
    free(d);
    rig_free(&r);
}

static void held_tokens_of_a_private_reply_go_back(void **state)
{
    (void)state;
    struct rig r;
    rig_make_private(&r, 1);
    r.cloud.cut_after = 5;
    rig_run(&r);
    struct client *c = client_make(&r);
    client_says(c, "user", long_text);
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    const struct fake_open *again = &r.cloud.opens[1];
    uint32_t names = c->usage.prompt_tokens / 64 * 32;
    assert_int_equal(r.cloud.open_count, 2);
    assert_true(again->is_private);
    assert_int_equal(again->held_count, 5);
    assert_int_equal(again->payload_size, names + 5 * 4);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(load_le32(again->payload + names + 4 * i), fake_token(i));
    free(c);
    rig_free(&r);
}

/* How deep a private prompt is run here is not the cloud's to say. */
static void fewer_layers_than_promised_are_not_sent(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers <= 2; layers++) {
        struct rig r;
        rig_make_private(&r, 2);
        r.config.private_min_layers = 2;
        r.cloud.cut_after = 1;
        r.cloud.resumed = r.cloud.plan_wanted = true;
        r.cloud.wanted_layers = layers;
        r.cloud.wanted_epoch = 4000000000u;
        rig_run(&r);
        struct client *c = client_make(&r);
        client_says(c, "user", long_text);
        client_run(&r, c);
        assert_int_equal(r.cloud.open_count, 2);
        assert_int_equal(c->failed, layers < 2);
        assert_int_equal(r.cloud.plan_count, layers == 2);
        free(c);
        rig_free(&r);
    }
}

/* NEED is answered by a plan from there on; one that a plan has crossed is not. */
static void what_the_cloud_needs_is_sent_again(void **state)
{
    (void)state;
    for (int late = 0; late < 2; late++) {
        struct rig r;
        rig_make_private(&r, 1);
        r.cloud.need_from = 64;
        r.cloud.need_late = late;
        rig_run(&r);
        struct client *c = client_make(&r);
        client_says(c, "user", long_text);
        client_run(&r, c);
        client_check_reply(c, FAKE_REPLY);
        assert_int_equal(r.cloud.plan_count, 2);
        assert_true(r.cloud.plans[1].epoch > r.cloud.plans[0].epoch);
        assert_int_equal(r.cloud.plans[1].ranges[0].first_token, 64);
        assert_int_equal(r.cloud.rows_begin, 64);
        free(c);
        rig_free(&r);
    }
}

static void private_prompts_that_cannot_be_are_refused(void **state)
{
    (void)state;
    for (int why = 0; why < 4; why++) {
        struct rig r;
        rig_make_private(&r, why == 1 ? 0 : 1);
        if (why == 0)
            r.config.private_min_layers = 2; /* of which this device computes one */
        if (why == 2)
            r.cloud.features = 0; /* an older cloud */
        if (why == 3)
            r.cloud.codec_mask = 0; /* one that takes no KV */
        rig_run(&r);
        struct client *c = client_make(&r);
        client_says(c, "user", long_text);
        on_loop(r.cloud.loop, client_begin, c);
        if (why < 2) {
            assert_int_equal(c->begin_code, -TD_ERR_ARG);
            assert_non_null(strstr(c->text, "--private-min-layers"));
        } else {
            assert_true(comes_true(r.cloud.loop, client_ended, c));
            assert_int_equal(c->code, -TD_ERR_UNSUPPORTED);
        }
        assert_non_null(strstr(c->text, "private prompt"));
        assert_int_equal(r.cloud.plan_count, 0);
        free(c);
        rig_free(&r);
    }
}

/* ---- conversations ---- */

/* The reply's text, as a client would send it back. */
static char *text_of(struct rig *r, const struct client *c)
{
    int64_t size = tokenizer_decode(agent_tokenizer(r->agent), c->ids, c->count, false, NULL, 0);
    char *text = malloc((size_t)size + 1);
    tokenizer_decode(agent_tokenizer(r->agent), c->ids, c->count, false, text, (size_t)size);
    text[size] = '\0';
    return text;
}

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
    free(first);
    free(second);
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
    free(first);
    free(second);
    rig_free(&r);
}

static void conversations_outlive_the_agent(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    rig_run(&r);
    struct client *first = client_make(&r);
    client_says(first, "user", "hello");
    client_run(&r, first);
    char *json;
    assert_int_equal(edge_conversation_show(r.agent, "local", first->conversation, &json), 0);
    assert_non_null(strstr(json, "hello"));
    free(json);
    assert_int_equal(edge_conversation_show(r.agent, "other", first->conversation, &json), -TD_ERR_NOTFOUND);
    /* The same folder, a new agent. */
    fake_cloud_stop(&r.cloud);
    agent_shutdown(r.agent);
    fake_cloud_free(&r.cloud);
    agent_destroy(r.agent);
    uint8_t layout[32];
    model_layout(r.model, layout);
    assert_int_equal(fake_cloud_make(&r.cloud, layout), 0);
    r.config.cloud_port = r.cloud.port;
    rig_run(&r);
    assert_int_equal(edge_conversations_list(r.agent, "local", &json), 0);
    assert_non_null(strstr(json, first->conversation));
    free(json);
    assert_int_equal(edge_conversation_delete(r.agent, "local", first->conversation), 0);
    assert_int_equal(edge_conversation_show(r.agent, "local", first->conversation, &json), -TD_ERR_NOTFOUND);
    free(first);
    rig_free(&r);
}

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
        struct client *c = client_make(&r);
        client_says(c, "user", long_text);
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
        } else {
            assert_int_equal(r.cloud.plan_count, 1);
        }
        free(c);
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
    r.cloud.silent = true;
    r.cloud.cut_after = 7;
    rig_run(&r);
    struct client *c = client_make(&r);
    client_says(c, "user", long_text);
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
    free(c);
    rig_free(&r);
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
        struct client *c = client_make(&r);
        client_says(c, "user", long_text);
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
        free(c);
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
    struct client *c = client_make(r);
    client_says(c, "user", long_text);
    client_run(r, c);
    client_check_reply(c, FAKE_REPLY);
    *prompt_count = c->usage.prompt_tokens;
    free(c);
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
        struct client *c = client_make(&r);
        client_says(c, "user", long_text);
        client_run(&r, c);
        client_check_reply(c, FAKE_REPLY);
        const struct api_plan *p = &c->timings.plan;
        assert_true(p->chosen);
        assert_true(p->plan_count >= 1);
        assert_true(p->layers <= 2);
        assert_int_equal(p->token_count, c->usage.prompt_tokens);
        assert_true(p->first_token_ms > 0 && p->first_token_ms <= p->cloud_first_token_ms);
        assert_true(p->t16_ms > p->first_token_ms);
        assert_true(p->edge_layer_us > 0 && p->cloud_layer_us > 0 && p->uplink_mbit > 0);
        free(c);
    }
    rig_free(&r);
}

static void a_node_that_leaves_is_followed(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    r.cloud.error_code = TD_ERR_CLOSED;
    r.cloud.error_retry = true;
    rig_run(&r);
    struct client *c = client_make(&r);
    client_says(c, "user", "hello");
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    assert_int_equal(r.cloud.open_count, 2);
    free(c);
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
    struct client *c = client_make(&r);
    client_says(c, "user", "hello");
    client_run(&r, c);
    assert_int_equal(c->failed, 1);
    assert_int_equal(c->code, -TD_ERR_FULL);
    assert_int_equal(c->retry_ms, 700);
    assert_int_equal(c->started, 0);
    free(c);
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
    struct client *c = client_make(&r);
    client_says(c, "user", "hello");
    client_run(&r, c);
    assert_int_equal(c->failed, 1);
    assert_int_equal(c->code, -TD_ERR_CLOSED);
    assert_non_null(strstr(c->text, "could not be reached"));
    assert_non_null(agent_unhealthy(r.agent));
    free(c);
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
    struct client *waiting = client_make(&r), *later = client_make(&r);
    client_says(waiting, "user", "hello");
    client_says(later, "user", "hello");
    on_loop(r.cloud.loop, client_begin, waiting); /* before the cloud has said anything */
    assert_int_equal(waiting->begin_code, 0);
    on_loop(r.cloud.loop, rig_connect, r.agent);
    assert_true(comes_true(r.cloud.loop, unhealthy_says_refused, r.agent));
    assert_true(comes_true(r.cloud.loop, client_ended, waiting));
    assert_int_equal(waiting->code, -TD_ERR_CLOSED);
    assert_non_null(strstr(waiting->text, "refuses this device"));
    on_loop(r.cloud.loop, client_begin, later);
    assert_int_equal(later->begin_code, -TD_ERR_CLOSED);
    free(waiting);
    free(later);
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
    struct client *c = client_make(&r);
    client_says(c, "user", "hello");
    c->cancel_at = 5;
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, heard_cancel, &r));
    assert_false(r.cloud.cancel_finished);
    assert_int_equal(c->count, 5);
    assert_int_equal(c->done + c->failed, 0);
    assert_int_equal(agent_flight_count(r.agent), 0);
    char *json;
    assert_int_equal(edge_conversation_show(r.agent, "local", c->conversation, &json), -TD_ERR_NOTFOUND);
    free(c);
    rig_free(&r);
}

static void a_stop_string_keeps_what_was_shown(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.token_count = 400;
    rig_run(&r);
    struct client *c = client_make(&r);
    client_says(c, "user", "hello");
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
    free(c);
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
    free(c);
    free(d);
    free(e);
    rig_free(&r);
}

/* ---- Idempotency-Key ---- */

static bool has_tokens(void *arg)
{
    return ((struct client *)arg)->count >= 3;
}

static void a_key_names_one_generation(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 0);
    rig_run(&r);
    struct client *a = client_make(&r), *b = client_make(&r), *other = client_make(&r);
    client_says(a, "user", "hello");
    client_says(b, "user", "hello");
    client_says(other, "user", "hello");
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
    free(a);
    free(b);
    free(other);
    rig_free(&r);
}

static void the_later_of_two_takes_over(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.token_count = 60;
    rig_run(&r);
    struct client *a = client_make(&r), *b = client_make(&r), *wrong = client_make(&r);
    client_says(a, "user", "hello");
    client_says(b, "user", "hello");
    client_says(wrong, "user", "another prompt");
    strcpy(a->key, "k");
    strcpy(b->key, "k");
    strcpy(wrong->key, "k");
    on_loop(r.cloud.loop, client_begin, a);
    assert_true(comes_true(r.cloud.loop, has_tokens, a));
    client_run(&r, wrong);
    assert_int_equal(wrong->code, -TD_ERR_CONFLICT);
    assert_int_equal(a->failed, 0);
    client_run(&r, b);
    client_check_reply(b, 60); /* from the first token on */
    assert_int_equal(a->failed, 1);
    assert_int_equal(a->code, -TD_ERR_CONFLICT);
    assert_int_equal(r.cloud.open_count, 1); /* the cloud noticed nothing */
    assert_int_equal(r.cloud.cancel_count, 0);
    free(a);
    free(b);
    free(wrong);
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
    struct client *a = client_make(&r), *b = client_make(&r);
    client_says(a, "user", "hello");
    client_says(b, "user", "hello");
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
    free(a);
    free(b);
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
    struct client *c = client_make(&r);
    client_says(c, "user", long_text);
    r.cloud.silent = true;
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, planned_for_the_cloud, &r));
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, client_ended, c));
    client_check_reply(c, FAKE_REPLY);
    free(c);
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
    struct client *c = client_make(&r);
    client_says(c, "user", long_text);
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, has_planned, &r));
    assert_int_equal(r.cloud.plans[0].ranges[0].layers, 1);
    on_loop(r.cloud.loop, send_need, &r);
    assert_true(comes_true(r.cloud.loop, planned_for_the_cloud, &r));
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, client_ended, c));
    client_check_reply(c, FAKE_REPLY);
    free(c);
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
        clients[i] = client_make(&r);
        client_says(clients[i], "user", i % 2 ? "hello" : long_text);
        clients[i]->cancel_at = i == 3 ? 4 : 0;
    }
    /* The fake cloud serves the last stream of a connection only, so one after the other begins when the one before has been heard. */
    for (size_t i = 0; i < TD_COUNT(clients); i++) {
        on_loop(r.cloud.loop, client_begin, clients[i]);
        assert_true(comes_true(r.cloud.loop, has_tokens, clients[i]));
        if (i != 3)
            assert_true(comes_true(r.cloud.loop, client_ended, clients[i]));
    }
    for (size_t i = 0; i < TD_COUNT(clients); i++) {
        if (i != 3)
            client_check_reply(clients[i], 10);
        free(clients[i]);
    }
    rig_free(&r);
}

static void shutdown_in_the_middle_leaves_nothing(void **state)
{
    (void)state;
    struct rig r;
    rig_make(&r, 1);
    r.cloud.token_count = 400;
    rig_run(&r);
    struct client *a = client_make(&r), *b = client_make(&r);
    client_says(a, "user", long_text);
    client_says(b, "user", "hello");
    on_loop(r.cloud.loop, client_begin, a);
    assert_true(comes_true(r.cloud.loop, has_tokens, a));
    on_loop(r.cloud.loop, client_begin, b);
    rig_free(&r); /* under a sanitizer: nothing leaks, nothing is touched */
    assert_int_equal(a->done, 0);
    free(a);
    free(b);
}

static void layers_beyond_the_file_are_refused(void **state)
{
    (void)state;
    struct rig r;
    struct td_error err = {0};
    rig_make(&r, 3);
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_ARG);
    assert_non_null(strstr(err.text, "--edge-layers 2 or fewer"));
    r.config.edge_layers = PLANNER_AUTO;
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), 0);
    assert_int_equal(agent_layers(r.agent), 2);
    fake_cloud_run(&r.cloud);
    rig_free(&r);
}

static void missing_certificates_are_told_at_the_start(void **state)
{
    (void)state;
    struct rig r;
    struct td_error err = {0};
    rig_make(&r, 0);
    r.config.tls = true;
    r.config.ca_path = "/nonexistent/ca.crt";
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_IO);
    assert_non_null(strstr(err.text, "/nonexistent/ca.crt"));
    fake_cloud_free(&r.cloud);
    nftw(r.dir, rig_remove, 16, FTW_DEPTH | FTW_PHYS);
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
        cmocka_unit_test(ids_alone_go_to_the_cloud_at_k_0),
        cmocka_unit_test(an_idle_link_is_probed_for_the_planner),
        cmocka_unit_test(rows_and_pieces_of_the_whole_prompt_are_sent),
        cmocka_unit_test(all_layers_send_one_row),
        cmocka_unit_test(what_the_cloud_has_is_not_sent_again),
        cmocka_unit_test(a_private_prompt_sends_names_and_no_ids),
        cmocka_unit_test(a_second_turn_of_a_private_conversation_names_no_conversation),
        cmocka_unit_test(held_tokens_of_a_private_reply_go_back),
        cmocka_unit_test(fewer_layers_than_promised_are_not_sent),
        cmocka_unit_test(what_the_cloud_needs_is_sent_again),
        cmocka_unit_test(private_prompts_that_cannot_be_are_refused),
        cmocka_unit_test(exact_requests_are_sent_lossless),
        cmocka_unit_test(a_sent_history_keeps_its_ids),
        cmocka_unit_test(a_cloud_that_forgot_gets_all_ids),
        cmocka_unit_test(conversations_outlive_the_agent),
        cmocka_unit_test(every_token_comes_once_over_a_cut_link),
        cmocka_unit_test(a_node_that_leaves_is_followed),
        cmocka_unit_test(the_clouds_error_reaches_the_client),
        cmocka_unit_test(no_cloud_is_an_error_after_the_timeout),
        cmocka_unit_test(a_refusal_fails_requests_at_once),
        cmocka_unit_test(a_client_that_leaves_stops_the_cloud),
        cmocka_unit_test(a_stop_string_keeps_what_was_shown),
        cmocka_unit_test(what_does_not_fit_is_refused_with_counts),
        cmocka_unit_test(a_key_names_one_generation),
        cmocka_unit_test(the_later_of_two_takes_over),
        cmocka_unit_test(one_that_is_ending_is_waited_for),
        cmocka_unit_test(without_room_the_cloud_gets_the_prompt),
        cmocka_unit_test(what_was_damaged_is_left_to_the_cloud),
        cmocka_unit_test(many_clients_at_once_hear_their_own),
        cmocka_unit_test(shutdown_in_the_middle_leaves_nothing),
        cmocka_unit_test(layers_beyond_the_file_are_refused),
        cmocka_unit_test(what_the_cloud_did_by_itself_is_in_the_record),
        cmocka_unit_test(an_upload_goes_on_as_the_cloud_has_it_planned),
        cmocka_unit_test(a_plan_does_not_get_deeper_under_way),
        cmocka_unit_test(a_plan_beyond_the_prompt_is_not_carried_out),
        cmocka_unit_test(an_agent_that_chooses_says_by_what),
        cmocka_unit_test(missing_certificates_are_told_at_the_start),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
