/* agent, private prompts: names and rows go to the cloud, ids never; what the cloud needs of one is sent again; what cannot be private is refused. */
#include "agent_rig.h"
#include "edge/agent_internal.h"
#include "edge/local_kv.h"

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
        struct client *c = client_asks(&r, long_text);
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
    struct client *c = client_asks(&r, long_text);
    client_run(&r, c);
    r.cloud.cached_tokens = 128;
    struct client *d = client_asks(&r, "and then?");
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
    rig_free(&r);
}

static void held_tokens_of_a_private_reply_go_back(void **state)
{
    (void)state;
    struct rig r;
    rig_make_private(&r, 1);
    r.cloud.cut_after = 5;
    rig_run(&r);
    struct client *c = client_asks(&r, long_text);
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
        struct client *c = client_asks(&r, long_text);
        client_run(&r, c);
        assert_int_equal(r.cloud.open_count, 2);
        assert_int_equal(c->failed, layers < 2);
        assert_int_equal(r.cloud.plan_count, layers == 2);
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
        struct client *c = client_asks(&r, long_text);
        client_run(&r, c);
        client_check_reply(c, FAKE_REPLY);
        assert_int_equal(r.cloud.plan_count, 2);
        assert_true(r.cloud.plans[1].epoch > r.cloud.plans[0].epoch);
        assert_int_equal(r.cloud.plans[1].ranges[0].first_token, 64);
        assert_int_equal(r.cloud.rows_begin, 64);
        rig_free(&r);
    }
}

static void private_prompts_that_cannot_be_are_refused(void **state)
{
    (void)state;
    for (int why = 0; why < 4; why++) {
        struct rig r;
        rig_make_private(&r, why == 1 ? 0 : 1);
        if (why < 2) { /* the default, of which this device computes too few: told when it is asked for */
            r.config.private_min_layers = AGENT_PRIVATE_LAYERS;
            r.config.prefer_private = false;
        }
        if (why == 2)
            r.cloud.features = 0; /* an older cloud */
        if (why == 3)
            r.cloud.codec_mask = 0; /* one that takes no KV */
        rig_run(&r);
        struct client *c = client_asks(&r, long_text);
        c->request.prefer = API_PREFER_PRIVATE;
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
        rig_free(&r);
    }
}

static void take_memory(void *arg)
{
    struct rig *r = arg;
    while (local_kv_alloc(r->agent->kv) != PAGE_NONE)
        continue;
}

/* What others have taken of the device's memory comes back: the request may be made again, and is told so. */
static void a_private_prompt_without_memory_may_come_again(void **state)
{
    (void)state;
    struct rig r;
    rig_make_private(&r, 1);
    rig_run(&r);
    on_loop(r.cloud.loop, take_memory, &r);
    struct client *c = client_asks(&r, long_text);
    on_loop(r.cloud.loop, client_begin, c);
    assert_true(comes_true(r.cloud.loop, client_ended, c));
    assert_int_equal(c->code, -TD_ERR_FULL);
    assert_true(c->retry_ms > 0);
    assert_non_null(strstr(c->text, "--kv-memory"));
    rig_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_private_prompt_sends_names_and_no_ids),
        cmocka_unit_test(a_second_turn_of_a_private_conversation_names_no_conversation),
        cmocka_unit_test(held_tokens_of_a_private_reply_go_back),
        cmocka_unit_test(fewer_layers_than_promised_are_not_sent),
        cmocka_unit_test(what_the_cloud_needs_is_sent_again),
        cmocka_unit_test(private_prompts_that_cannot_be_are_refused),
        cmocka_unit_test(a_private_prompt_without_memory_may_come_again),
    };
    return cmocka_run_group_tests(tests, rig_set_up, NULL);
}
