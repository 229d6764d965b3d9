/* The OpenAI API over real sockets: what clients look at, byte for byte, and what they do to servers: leave, repeat, send nonsense. */
#include "toy_owner.h"
#include "protocol/api_server.h"
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define AUTH "Authorization: Bearer secret\r\n"
#define JSON AUTH "Content-Type: application/json\r\n"

static int set_up(void **state)
{
    (void)state;
    toy_set_up(&(struct net_listen){.bind_address = "127.0.0.1"}, 4, false);
    return 0;
}

static int set_up_filter(void **state)
{
    (void)state;
    toy_set_up(&(struct net_listen){.bind_address = "127.0.0.1"}, 4, true);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    toy_tear_down();
    return 0;
}

/* ---- helpers ----------------------------------------------------------------------------------------------- */

static struct response ask(const char *method, const char *path, const char *headers, const char *body)
{
    struct client c = client_open(toy.port);
    client_request(&c, method, path, headers, body);
    struct response r = client_response(&c, false);
    client_close(&c);
    return r;
}

/* A chat request with one user message; more: further fields, each beginning with a comma. */
static struct response chat(const char *message, const char *more, const char *headers)
{
    char body[16384];
    snprintf(body, sizeof body, "{\"model\":\"toy\",\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}]%s}",
             message, more);
    return ask("POST", "/v1/chat/completions", headers, body);
}

static struct response complete(const char *prompt, const char *more)
{
    char body[16384];
    snprintf(body, sizeof body, "{\"prompt\":\"%s\"%s}", prompt, more);
    return ask("POST", "/v1/completions", JSON, body);
}

static json_t *body_of(struct response *r)
{
    json_error_t e;
    json_t *root = json_loads(r->body, 0, &e);
    if (!root)
        fail_msg("not JSON: %s", r->body);
    free(r->body);
    return root;
}

/* The value at a path like "choices.0.message.content". */
static json_t *at(json_t *v, const char *path)
{
    char copy[128], *save = NULL;
    snprintf(copy, sizeof copy, "%s", path);
    for (char *p = strtok_r(copy, ".", &save); p; p = strtok_r(NULL, ".", &save)) {
        v = json_is_array(v) ? json_array_get(v, (size_t)atoi(p)) : json_object_get(v, p);
        if (!v)
            fail_msg("no %s", path);
    }
    return v;
}

static void assert_text(json_t *root, const char *path, const char *expected)
{
    assert_true(json_is_string(at(root, path)));
    assert_string_equal(json_string_value(at(root, path)), expected);
}

static void assert_error(struct response *r, int status, const char *type, const char *code)
{
    assert_int_equal(r->status, status);
    assert_true(response_has(r, "Content-Type: application/json"));
    json_t *root = body_of(r);
    assert_text(root, "error.type", type);
    if (code)
        assert_text(root, "error.code", code);
    assert_true(json_string_length(at(root, "error.message")) > 0);
    assert_non_null(json_object_get(at(root, "error"), "param"));
    json_decref(root);
}

struct events {
    json_t *list[512];
    size_t count;
    bool done; /* [DONE] was the last one */
};

static struct events events_of(struct response *r)
{
    struct events e = {0};
    char *p = r->body;
    while (*p) {
        char *end = strstr(p, "\n\n");
        if (!end)
            fail_msg("an event is not ended: %s", p);
        *end = '\0';
        if (p[0] != ':') {
            assert_memory_equal(p, "data: ", 6);
            assert_false(e.done);
            if (strcmp(p + 6, "[DONE]") == 0)
                e.done = true;
            else
                assert_non_null(e.list[e.count++] = json_loads(p + 6, 0, NULL));
        }
        p = end + 2;
    }
    free(r->body);
    return e;
}

static void events_free(struct events *e)
{
    for (size_t i = 0; i < e->count; i++)
        json_decref(e->list[i]);
}

/* All text of a chat stream. */
static void stream_text(struct events *e, char *out, size_t size)
{
    out[0] = '\0';
    for (size_t i = 0; i < e->count; i++) {
        json_t *choice = json_array_get(json_object_get(e->list[i], "choices"), 0);
        const char *text = json_string_value(json_object_get(json_object_get(choice, "delta"), "content"));
        if (text)
            strncat(out, text, size - strlen(out) - 1);
    }
}

/* ---- whole responses ---------------------------------------------------------------------------------------- */

static void test_chat_whole(void **state)
{
    (void)state;
    struct response r = chat("say Hi there", "", JSON);
    assert_int_equal(r.status, 200);
    assert_true(response_has(&r, "Content-Type: application/json"));
    assert_false(response_has(&r, "Server:"));
    assert_false(response_has(&r, "X-Conversation-Id"));
    assert_false(response_has(&r, "Access-Control"));
    json_t *root = body_of(&r);
    assert_text(root, "object", "chat.completion");
    assert_memory_equal(json_string_value(at(root, "id")), "chatcmpl-", 9);
    assert_text(root, "model", "toy");
    assert_true(json_integer_value(at(root, "created")) > 1700000000);
    assert_text(root, "choices.0.message.role", "assistant");
    assert_text(root, "choices.0.message.content", "Hi there");
    assert_text(root, "choices.0.finish_reason", "stop");
    assert_int_equal(json_integer_value(at(root, "choices.0.index")), 0);
    assert_true(json_is_null(at(root, "choices.0.logprobs")));
    assert_int_equal(json_integer_value(at(root, "usage.prompt_tokens")), 10);
    assert_int_equal(json_integer_value(at(root, "usage.completion_tokens")), 8);
    assert_int_equal(json_integer_value(at(root, "usage.total_tokens")), 18);
    assert_int_equal(json_integer_value(at(root, "usage.prompt_tokens_details.cached_tokens")), 4);
    assert_null(json_object_get(root, "timings"));
    json_decref(root);
    assert_string_equal(toy.last_principal, "alice");
}

static void test_length_and_timings(void **state)
{
    (void)state;
    struct response r = chat("length abc", ",\"timings\":true", JSON);
    json_t *root = body_of(&r);
    assert_text(root, "choices.0.finish_reason", "length");
    assert_int_equal(json_integer_value(at(root, "timings.edge_layers")), 3);
    assert_int_equal(json_integer_value(at(root, "timings.uplink_bytes")), 77);
    assert_true(json_real_value(at(root, "timings.total_ms")) == 12.5);
    assert_int_equal(json_integer_value(at(root, "timings.plan.layers")), 15);
    assert_int_equal(json_integer_value(at(root, "timings.plan.kv_tokens")), 640);
    assert_int_equal(json_integer_value(at(root, "timings.plan.plans")), 2);
    assert_true(json_real_value(at(root, "timings.plan.estimates.t16_ms")) == 99.5);
    json_decref(root);
}

static void test_completions_whole(void **state)
{
    (void)state;
    struct response r = complete("say once", "");
    json_t *root = body_of(&r);
    assert_text(root, "object", "text_completion");
    assert_memory_equal(json_string_value(at(root, "id")), "cmpl-", 5);
    assert_text(root, "choices.0.text", "once");
    assert_text(root, "choices.0.finish_reason", "stop");
    json_decref(root);
    r = ask("POST", "/v1/completions", JSON, "{\"prompt\":[300]}");
    assert_error(&r, 400, "invalid_request_error", "invalid_value");
}

static void test_later_reply(void **state)
{
    (void)state;
    struct response r = chat("later patience", "", JSON);
    json_t *root = body_of(&r);
    assert_text(root, "choices.0.message.content", "patience");
    json_decref(root);
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
    assert_true(toy_reaches(&toy.finishes, 2));
    client_close(&c);
    assert_true(toy_reaches(&toy.ends, 2));
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

/* ---- errors ------------------------------------------------------------------------------------------------ */

static void test_bad_requests(void **state)
{
    (void)state;
    static const struct {
        const char *body, *param;
    } cases[] = {
        {"", NULL},
        {"{", NULL},
        {"[]", NULL},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"say x\"}]} x", NULL},
        {"{}", "messages"},
        {"{\"messages\":[]}", "messages"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"say x\"}],\"n\":2}", "n"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"say x\"}],\"max_tokens\":0}", "max_tokens"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"say x\"}],\"tools\":[{}]}", "tools"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"say x\"}],\"logit_bias\":{\"999\":1}}",
         "logit_bias"},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct response r = ask("POST", "/v1/chat/completions", JSON, cases[i].body);
        assert_int_equal(r.status, 400);
        json_t *root = body_of(&r);
        assert_text(root, "error.type", "invalid_request_error");
        if (cases[i].param)
            assert_text(root, "error.param", cases[i].param);
        json_decref(root);
    }
    assert_int_equal(atomic_load(&toy.starts), 0); /* nothing started */
}

static void test_owner_errors(void **state)
{
    (void)state;
    struct response r = chat("error 3", "", JSON); /* TD_ERR_NOSPACE */
    assert_error(&r, 500, "server_error", "internal_error");
    r = chat("error 4", "", JSON); /* TD_ERR_FULL, with 2,500 ms */
    assert_true(response_has(&r, "Retry-After: 3\r\n"));
    assert_error(&r, 429, "rate_limit_error", "rate_limit_exceeded");
    r = chat("error 4", ",\"stream\":true",
             JSON); /* before the first byte: an HTTP error also for a stream */
    assert_error(&r, 429, "rate_limit_error", NULL);
    r = chat("refuse", "", JSON);
    assert_error(&r, 400, "invalid_request_error", "content_filter");
    r = chat("context", "", JSON);
    assert_int_equal(r.status, 400);
    json_t *root = body_of(&r);
    assert_text(root, "error.code", "context_length_exceeded");
    assert_non_null(strstr(json_string_value(at(root, "error.message")), "2048"));
    assert_non_null(strstr(json_string_value(at(root, "error.message")), "2990"));
    json_decref(root);
}

static void test_error_in_stream(void **state)
{
    (void)state;
    struct response r = chat("broken ab", ",\"stream\":true", JSON);
    assert_int_equal(r.status, 200);
    struct events e = events_of(&r);
    assert_text(e.list[e.count - 1], "error.message", "it broke");
    assert_text(e.list[e.count - 1], "error.type", "server_error");
    assert_false(e.done);
    events_free(&e);
    r = chat("broken ab", "", JSON);
    assert_error(&r, 500, "server_error", NULL);
}

static void test_credentials(void **state)
{
    (void)state;
    struct response r = chat("say x", "", "Content-Type: application/json\r\n");
    assert_error(&r, 401, "authentication_error", "invalid_api_key");
    r = chat("say x", "", "Authorization: Bearer wrong\r\nContent-Type: application/json\r\n");
    assert_error(&r, 401, "authentication_error", "invalid_api_key");
    r = chat("say x", "", "authorization: bearer secret\r\nContent-Type: application/json\r\n");
    assert_int_equal(r.status, 200);
    free(r.body);
    static const char *const closed[] = {"/v1/models", "/metrics", "/v1/conversations",
                                         "/v1/conversations/known"};
    for (size_t i = 0; i < TD_COUNT(closed); i++) {
        r = ask("GET", closed[i], "", NULL);
        assert_error(&r, 401, "authentication_error", NULL);
    }
}

/* The longest credential is asked about; a longer one is not. */
static void test_credential_limit(void **state)
{
    (void)state;
    for (int more = 0; more <= 1; more++) {
        char headers[256], token[LIMIT_TOKEN_SIZE + 2];
        memset(token, 'k', sizeof token);
        token[LIMIT_TOKEN_SIZE + more] = '\0';
        snprintf(headers, sizeof headers, "Authorization: Bearer %s\r\n", token);
        struct response r = ask("GET", "/v1/models", headers, NULL);
        assert_int_equal(r.status, more ? 401 : 200);
        free(r.body);
    }
}

static void test_routes(void **state)
{
    (void)state;
    struct response r = ask("GET", "/v1/nothing", AUTH, NULL);
    assert_error(&r, 404, "not_found_error", "not_found");
    r = ask("GET", "/v1/chat/completions", AUTH, NULL);
    assert_true(response_has(&r, "Allow: POST\r\n"));
    assert_error(&r, 405, "invalid_request_error", "method_not_allowed");
    r = ask("DELETE", "/v1/models", AUTH, NULL);
    assert_error(&r, 405, "invalid_request_error", NULL);
    r = ask("POST", "/v1/chat/completions", AUTH "Content-Type: text/plain\r\n", "{}");
    assert_error(&r, 415, "invalid_request_error", NULL);
    r = ask("POST", "/v1/chat/completions", AUTH "Content-Type: application/json; charset=utf-8\r\n",
            "{\"messages\":[{\"role\":\"user\",\"content\":\"say x\"}]}");
    assert_int_equal(r.status, 200);
    free(r.body);
}

static void test_models(void **state)
{
    (void)state;
    struct response r = ask("GET", "/v1/models", AUTH, NULL);
    json_t *root = body_of(&r);
    assert_text(root, "object", "list");
    assert_text(root, "data.0.id", "toy");
    assert_text(root, "data.0.object", "model");
    json_decref(root);
    r = ask("GET", "/v1/models/toy", AUTH, NULL);
    root = body_of(&r);
    assert_text(root, "id", "toy");
    json_decref(root);
    r = ask("GET", "/v1/models/other", AUTH, NULL);
    assert_error(&r, 404, "not_found_error", "model_not_found");
    r = ask("POST", "/v1/chat/completions", JSON,
            "{\"model\":\"gpt-4o\",\"messages\":[{\"role\":\"user\",\"content\":\"say x\"}]}");
    assert_non_null(strstr(r.body, "'toy'"));
    assert_error(&r, 404, "not_found_error", "model_not_found");
    r = ask("POST", "/v1/chat/completions", JSON,
            "{\"model\":\"default\",\"messages\":[{\"role\":\"user\",\"content\":\"say x\"}]}");
    assert_int_equal(r.status, 200);
    free(r.body);
}

static void set_ready(void *arg)
{
    api_set_ready(toy.server, arg != NULL);
}

static void test_health(void **state)
{
    (void)state;
    struct response r = ask("GET", "/health", "", NULL);
    assert_int_equal(r.status, 200);
    free(r.body);
    net_loop_post(toy.loop, set_ready, NULL);
    r = ask("GET", "/health", "", NULL);
    assert_error(&r, 503, "server_error", "loading");
    r = chat("say x", "", JSON);
    assert_true(response_has(&r, "Retry-After:"));
    assert_error(&r, 503, "server_error", "loading");
    net_loop_post(toy.loop, set_ready, &toy);
    r = ask("GET", "/health", "", NULL);
    assert_int_equal(r.status, 200);
    free(r.body);
}

static void test_tokens_and_metrics(void **state)
{
    (void)state;
    struct response r = ask("POST", "/tokenize", JSON, "{\"content\":\"the\"}");
    assert_string_equal(r.body, "{\"tokens\":[257,101]}");
    free(r.body);
    r = ask("POST", "/detokenize", JSON, "{\"tokens\":[257,101,256]}");
    assert_string_equal(r.body, "{\"content\":\"the<|im_end|>\"}");
    free(r.body);
    r = ask("POST", "/detokenize", JSON, "{\"tokens\":[100000]}");
    assert_error(&r, 400, "invalid_request_error", NULL);
    r = ask("POST", "/tokenize", JSON, "{\"content\":7}");
    assert_error(&r, 400, "invalid_request_error", NULL);
    r = ask("GET", "/metrics", AUTH, NULL);
    assert_int_equal(r.status, 200);
    assert_true(response_has(&r, "Content-Type: text/plain; version=0.0.4"));
    assert_non_null(strstr(r.body, "tandem_api_responses_total{status=\"2xx\"}"));
    free(r.body);
}

/* ---- conversations, keys ------------------------------------------------------------------------------------- */

static void test_conversations(void **state)
{
    (void)state;
    struct response r = chat("say x", ",\"conversation\":\"c-1\"", JSON);
    assert_true(response_has(&r, "X-Conversation-Id: c-1\r\n"));
    json_t *root = body_of(&r);
    assert_text(root, "conversation", "c-1");
    json_decref(root);
    r = chat("say x", ",\"stream\":true", JSON "X-Conversation-Id: c-2\r\n");
    assert_true(response_has(&r, "X-Conversation-Id: c-2\r\n"));
    assert_string_equal(toy.last_conversation, "c-2");
    free(r.body);
    r = chat("say x", ",\"conversation\":\"c-1\"", JSON "X-Conversation-Id: c-2\r\n");
    assert_error(&r, 400, "invalid_request_error", NULL);
    r = chat("say x", "", JSON "X-Conversation-Id: a/b\r\n");
    assert_error(&r, 400, "invalid_request_error", NULL);
    r = ask("GET", "/v1/conversations", AUTH, NULL);
    assert_int_equal(r.status, 200);
    free(r.body);
    r = ask("GET", "/v1/conversations/known", AUTH, NULL);
    assert_string_equal(r.body, "{\"id\":\"known\"}");
    free(r.body);
    r = ask("GET", "/v1/conversations/other", AUTH, NULL);
    assert_error(&r, 404, "not_found_error", "not_found");
    r = ask("DELETE", "/v1/conversations/known", AUTH, NULL);
    assert_non_null(strstr(r.body, "\"deleted\":true"));
    free(r.body);
}

static void test_conversation_verbs(void **state)
{
    (void)state;
    static const struct {
        const char *method, *path, *body, *said;
    } good[] = {
        {"POST", "/v1/conversations/known/fork", "{}", "{\"fork\":\"known\"}"},
        {"POST", "/v1/conversations/known/pin", "{}", "{\"pin\":\"known\"}"},
        {"POST", "/v1/conversations/known/unpin", "{}", "{\"unpin\":\"known\"}"},
        {"GET", "/v1/conversations/known/export", NULL, "{\"export\":\"known\"}"},
        {"POST", "/v1/conversations", "good", "{\"import\":\"known\"}"},
    };
    for (size_t i = 0; i < TD_COUNT(good); i++) {
        struct response r = ask(good[i].method, good[i].path, JSON, good[i].body);
        assert_string_equal(r.body, good[i].said);
        free(r.body);
        r = ask(good[i].method, good[i].path, "Content-Type: application/json\r\n", good[i].body);
        assert_error(&r, 401, "authentication_error", NULL);
        r = ask("DELETE", good[i].path, JSON, NULL);
        assert_int_equal(r.status, 405);
        free(r.body);
    }
    static const char *const unknown[] = {"/v1/conversations/other/fork", "/v1/conversations/known/burn",
                                          "/v1/conversations/known/", "/v1/conversations/k%20n/fork",
                                          "/v1/conversations/known/fork/fork"};
    for (size_t i = 0; i < TD_COUNT(unknown); i++) {
        struct response r = ask("POST", unknown[i], JSON, "{}");
        assert_error(&r, 404, "not_found_error", "not_found");
    }
    struct response r = ask("POST", "/v1/conversations", JSON, "bad");
    assert_int_equal(r.status, 400);
    assert_non_null(strstr(r.body, "this is no conversation"));
    free(r.body);
    r = ask("POST", "/v1/conversations/known", JSON, "{}");
    assert_int_equal(r.status, 405);
    free(r.body);
}

static void test_idempotency_key(void **state)
{
    (void)state;
    struct response r = chat("say x", "", JSON "Idempotency-Key: k-42\r\n");
    assert_int_equal(r.status, 200);
    free(r.body);
    assert_string_equal(toy.last_key, "k-42");
    char headers[512], key[LIMIT_IDEMPOTENCY_SIZE + 2];
    memset(key, 'k', sizeof key - 1);
    key[sizeof key - 1] = '\0';
    snprintf(headers, sizeof headers, JSON "Idempotency-Key: %s\r\n", key);
    r = chat("say x", "", headers);
    assert_error(&r, 400, "invalid_request_error", "invalid_header");
    key[LIMIT_IDEMPOTENCY_SIZE] = '\0';
    snprintf(headers, sizeof headers, JSON "Idempotency-Key: %s\r\n", key);
    r = chat("say x", "", headers);
    assert_int_equal(r.status, 200);
    free(r.body);
}

/* ---- clients that leave ---------------------------------------------------------------------------------------- */

static void leave_after(const char *message, const char *more, const char *seen)
{
    char body[512];
    int before = atomic_load(&toy.cancels), started = atomic_load(&toy.starts);
    struct client c = client_open(toy.port);
    snprintf(body, sizeof body, "{\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}]%s}", message, more);
    client_request(&c, "POST", "/v1/chat/completions", JSON, body);
    if (seen)
        assert_true(client_wait_for(&c, seen));
    else
        assert_true(toy_reaches(&toy.starts, started + 1));
    assert_int_equal(atomic_load(&toy.cancels), before);
    client_close(&c);
    assert_true(toy_reaches(&toy.cancels, before + 1));
}

static void test_disconnect_cancels(void **state)
{
    (void)state;
    leave_after("hang", "", NULL);                       /* queued, nothing sent */
    leave_after("hang", ",\"stream\":true", NULL);       /* the same, streaming */
    leave_after("hang ab", "", NULL);                    /* computing, nothing sent */
    leave_after("hang ab", ",\"stream\":true", "\"b\""); /* in the reply */
    assert_int_equal(atomic_load(&toy.finishes), 0);
}

/* A client that asks for ever more and reads nothing is cut off when its queue is full. */
static void test_client_that_does_not_read(void **state)
{
    (void)state;
    struct client c = client_open(toy.port);
    client_request(&c, "POST", "/v1/chat/completions", JSON,
                   "{\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"flood\"}]}");
    assert_true(toy_reaches(&toy.cancels, 1));
    assert_true(atomic_load(&toy.flooded) < 64ul << 20);
    client_close(&c);
}

/* ---- silence ------------------------------------------------------------------------------------------------ */

/* As if nothing had been sent for the keep-alive time. */
static void let_time_pass(void *arg)
{
    (void)arg;
    for (struct api_call *c = toy.server->calls; c; c = c->next)
        c->last_write_us -= LIMIT_HTTP_KEEPALIVE_MS * 1000ull;
    net_timer_start(toy.server->ticker, 1);
}

static void test_keep_alive_comments(void **state)
{
    (void)state;
    struct client c = client_open(toy.port);
    client_request(&c, "POST", "/v1/chat/completions", JSON,
                   "{\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"hang ab\"}]}");
    assert_true(client_wait_for(&c, "\"b\""));
    assert_null(strstr(c.data, "\n: keep-alive"));
    net_loop_post(toy.loop, let_time_pass, NULL);
    assert_true(client_wait_for(&c, "\n: keep-alive\n\n"));
    client_close(&c);
    /* A prompt that takes long: the stream begins without having been started. */
    c = client_open(toy.port);
    int before = atomic_load(&toy.starts);
    client_request(&c, "POST", "/v1/chat/completions", JSON,
                   "{\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"hang\"}]}");
    assert_true(toy_reaches(&toy.starts, before + 1));
    net_loop_post(toy.loop, let_time_pass, NULL);
    assert_true(client_wait_for(&c, "\"role\":\"assistant\""));
    client_close(&c);
}

static void test_too_many_calls(void **state)
{
    (void)state;
    struct client waiting[4];
    for (size_t i = 0; i < 4; i++) {
        waiting[i] = client_open(toy.port);
        client_request(&waiting[i], "POST", "/v1/chat/completions", JSON,
                       "{\"messages\":[{\"role\":\"user\",\"content\":\"hang\"}]}");
    }
    assert_true(toy_reaches(&toy.starts, 4));
    struct response r = chat("say x", "", JSON);
    assert_true(response_has(&r, "Retry-After: 1\r\n"));
    assert_error(&r, 429, "rate_limit_error", "rate_limit_exceeded");
    client_close(&waiting[0]);
    assert_true(toy_reaches(&toy.cancels, 1));
    r = chat("say x", "", JSON);
    assert_int_equal(r.status, 200);
    free(r.body);
    for (size_t i = 1; i < 4; i++)
        client_close(&waiting[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_chat_whole, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_length_and_timings, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_completions_whole, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_later_reply, set_up, tear_down),
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
        cmocka_unit_test_setup_teardown(test_bad_requests, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_owner_errors, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_error_in_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_credentials, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_credential_limit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_routes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_conversation_verbs, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_models, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_health, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_tokens_and_metrics, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_conversations, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_idempotency_key, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_disconnect_cancels, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_client_that_does_not_read, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_keep_alive_comments, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_too_many_calls, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
