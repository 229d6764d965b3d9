/* The OpenAI API's text: streams, characters and stop strings that tokens cut, the output filter, log probabilities. */
#include "api_client.h"

static int set_up_filter(void **state)
{
    (void)state;
    toy_set_up(&(struct net_listen){.bind_address = "127.0.0.1"}, 4, true);
    return 0;
}

/* ---- streams ----------------------------------------------------------------------------------------------- */

static void test_chat_stream(void **state)
{
    (void)state;
    struct response r = chat("say abc", ",\"stream\":true", JSON);
    assert_int_equal(r.status, 200);
    assert_true(response_has(&r, "Content-Type: text/event-stream"));
    assert_true(response_has(&r, "Transfer-Encoding: chunked"));
    struct events e = events_of(&r);
    assert_true(e.done);
    assert_int_equal(e.count, 5); /* role, a, b, c, finish */
    assert_text(e.list[0], "object", "chat.completion.chunk");
    assert_text(e.list[0], "choices.0.delta.role", "assistant");
    assert_text(e.list[0], "choices.0.delta.content", "");
    assert_true(json_is_null(at(e.list[0], "choices.0.finish_reason")));
    assert_text(e.list[1], "choices.0.delta.content", "a");
    assert_null(json_object_get(at(e.list[1], "choices.0.delta"), "role"));
    assert_null(json_object_get(e.list[1], "usage"));
    assert_int_equal(json_object_size(at(e.list[4], "choices.0.delta")), 0);
    assert_text(e.list[4], "choices.0.finish_reason", "stop");
    for (size_t i = 1; i < e.count; i++)
        assert_string_equal(json_string_value(at(e.list[i], "id")), json_string_value(at(e.list[0], "id")));
    events_free(&e);
}

static void test_stream_usage(void **state)
{
    (void)state;
    struct response r = chat(
        "batch abc", ",\"stream\":true,\"stream_options\":{\"include_usage\":true},\"timings\":true", JSON);
    struct events e = events_of(&r);
    assert_int_equal(e.count, 4); /* role, abc, finish, usage */
    for (size_t i = 0; i < 3; i++)
        assert_true(json_is_null(at(e.list[i], "usage")));
    assert_int_equal(json_array_size(at(e.list[3], "choices")), 0);
    assert_int_equal(json_integer_value(at(e.list[3], "usage.total_tokens")), 13);
    assert_int_equal(json_integer_value(at(e.list[3], "usage.prompt_tokens_details.cached_tokens")), 4);
    assert_int_equal(json_integer_value(at(e.list[3], "timings.edge_layers")), 3);
    assert_true(e.done);
    events_free(&e);
}

static void test_completion_stream(void **state)
{
    (void)state;
    struct response r = complete("say ab", ",\"stream\":true");
    struct events e = events_of(&r);
    assert_int_equal(e.count, 3); /* no role */
    assert_text(e.list[0], "object", "text_completion");
    assert_text(e.list[0], "choices.0.text", "a");
    assert_text(e.list[2], "choices.0.text", "");
    assert_text(e.list[2], "choices.0.finish_reason", "stop");
    assert_true(e.done);
    events_free(&e);
}

/* ---- text -------------------------------------------------------------------------------------------------- */

static void test_utf8(void **state)
{
    (void)state;
    char text[256];
    struct response r =
        chat("say \xe2\x82\xac\xf0\x9f\x98\x80x", ",\"stream\":true", JSON); /* 7 tokens, 3 characters */
    struct events e = events_of(&r);
    stream_text(&e, text, sizeof text);
    assert_string_equal(text, "\xe2\x82\xac\xf0\x9f\x98\x80x");
    assert_int_equal(e.count, 5);
    events_free(&e);
    /* A byte that is no UTF-8 can come from tokens only; here from ids. */
    r = ask("POST", "/detokenize", JSON, "{\"tokens\":[97,226,130,98,255]}");
    json_t *root = body_of(&r);
    assert_text(root, "content",
                "a\xef\xbf\xbd"
                "b\xef\xbf\xbd");
    json_decref(root);
}

static void test_stop_over_token_borders(void **state)
{
    (void)state;
    char text[256];
    struct response r = chat("say one two three", ",\"stream\":true,\"stop\":[\"xx\",\" thr\"]", JSON);
    struct events e = events_of(&r);
    stream_text(&e, text, sizeof text);
    assert_string_equal(text, "one two");
    assert_text(e.list[e.count - 1], "choices.0.finish_reason", "stop");
    assert_true(e.done);
    events_free(&e);
    assert_int_equal(atomic_load(&toy.finishes), 1);
    assert_int_equal(atomic_load(&toy.cancels), 0);
    assert_int_equal(atomic_load(&toy.keep_count), 11); /* "one two thr" */
    /* The same in one batch, not streamed. */
    r = chat("batch one two three", ",\"stop\":[\"xx\",\" thr\"]", JSON);
    json_t *root = body_of(&r);
    assert_text(root, "choices.0.message.content", "one two");
    json_decref(root);
    assert_int_equal(atomic_load(&toy.finishes), 2);
    assert_int_equal(atomic_load(&toy.keep_count), 11);
}

/* The owner persists after a stop string: the response ends with it, and a client that leaves meanwhile cancels nothing. */
static void test_owner_ends_after_stop(void **state)
{
    (void)state;
    uint64_t begun = clock_mono_us();
    struct response r = chat("late one STOP", ",\"stop\":\"STOP\"", JSON);
    json_t *root = body_of(&r);
    assert_text(root, "choices.0.message.content", "one ");
    json_decref(root);
    assert_true(clock_mono_us() - begun >= 30000);
    assert_int_equal(atomic_load(&toy.ends), 1);
    struct client c = client_open(toy.port);
    client_request(&c, "POST", "/v1/chat/completions", JSON,
                   "{\"stop\":\"STOP\",\"messages\":[{\"role\":\"user\",\"content\":\"late one STOP\"}]}");
    assert_true(reaches(&toy.finishes, 2));
    client_close(&c);
    assert_true(reaches(&toy.ends, 2));
    assert_int_equal(atomic_load(&toy.cancels), 0);
    /* Whatever the owner says, a stop string is the reason. */
    r = chat("length one STOP", ",\"stop\":\"STOP\"", JSON);
    root = body_of(&r);
    assert_text(root, "choices.0.finish_reason", "stop");
    json_decref(root);
}

static void test_false_stop_is_shown(void **state)
{
    (void)state;
    char text[256];
    struct response r = chat("say aab aaa", ",\"stream\":true,\"stop\":\"aac\"", JSON);
    struct events e = events_of(&r);
    stream_text(&e, text, sizeof text);
    assert_string_equal(text, "aab aaa"); /* held back at the end, then shown */
    events_free(&e);
    r = chat("length a st", ",\"stop\":\"stop\"", JSON);
    json_t *root = body_of(&r);
    assert_text(root, "choices.0.message.content", "a st");
    assert_text(root, "choices.0.finish_reason", "length");
    json_decref(root);
}

static void test_output_filter(void **state)
{
    (void)state;
    char text[256];
    struct response r = chat("say abc", ",\"stream\":true", JSON);
    struct events e = events_of(&r);
    stream_text(&e, text, sizeof text);
    assert_string_equal(text, "ABC");
    events_free(&e);
    r = chat("batch abc", "", JSON);
    json_t *root = body_of(&r);
    assert_text(root, "choices.0.message.content", "ABC");
    json_decref(root);
}

static void test_logprobs(void **state)
{
    (void)state;
    struct response r = chat("say \xe2\x82\xac!", ",\"logprobs\":true,\"top_logprobs\":1", JSON);
    json_t *root = body_of(&r);
    json_t *list = at(root, "choices.0.logprobs.content");
    assert_int_equal(json_array_size(list), 4); /* three bytes, then '!'; not the end token */
    assert_text(list, "0.token", "\xef\xbf\xbd");
    assert_int_equal(json_integer_value(at(list, "0.bytes.0")), 0xe2);
    assert_text(list, "3.token", "!");
    assert_true(json_real_value(at(list, "3.logprob")) == -0.5);
    assert_int_equal(json_array_size(at(list, "3.top_logprobs")), 1);
    assert_text(list, "3.top_logprobs.0.token", "a");
    json_decref(root);
    r = complete("say ab", ",\"logprobs\":2");
    root = body_of(&r);
    assert_text(root, "choices.0.logprobs.tokens.1", "b");
    assert_int_equal(json_integer_value(at(root, "choices.0.logprobs.text_offset.1")), 1);
    assert_true(json_real_value(at(root, "choices.0.logprobs.top_logprobs.0.b")) == -1.5);
    json_decref(root);
}

static void test_logprob_offsets_in_a_stream(void **state)
{
    (void)state;
    struct response r = complete("say \xe2\x82\xac"
                                 "bc",
                                 ",\"logprobs\":0,\"stream\":true");
    struct events e = events_of(&r);
    assert_text(e.list[2], "choices.0.text", "c");
    assert_int_equal(json_integer_value(at(e.list[2], "choices.0.logprobs.text_offset.0")),
                     2); /* characters, not bytes */
    events_free(&e);
}

static void test_logprobs_of_swallowed_stop(void **state)
{
    (void)state;
    struct response r = chat("say abSTOP", ",\"logprobs\":true,\"stream\":true,\"stop\":\"STOP\"", JSON);
    struct events e = events_of(&r);
    size_t count = 0;
    for (size_t i = 0; i < e.count; i++) {
        json_t *odds = at(e.list[i], "choices.0.logprobs");
        count += json_array_size(json_object_get(odds, "content"));
    }
    assert_int_equal(count, 2);
    events_free(&e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_chat_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_stream_usage, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_completion_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_utf8, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_stop_over_token_borders, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_owner_ends_after_stop, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_false_stop_is_shown, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_output_filter, set_up_filter, tear_down),
        cmocka_unit_test_setup_teardown(test_logprobs, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_logprob_offsets_in_a_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_logprobs_of_swallowed_stop, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
