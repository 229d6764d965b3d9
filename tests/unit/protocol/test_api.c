/* The OpenAI API over real sockets: what clients look at, byte for byte, and what they do to servers: leave, repeat, send nonsense. */
#include "api_client.h"

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
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"say x\"}],"
         "\"response_format\":{\"type\":\"json_object\"}}",
         "response_format"},
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
    assert_text(root, "error.param", "messages");
    json_decref(root);
}

/* Named is what asks for too much: the reply's length, by the name that the client gave it, or the prompt. */
static void test_context_error_names_the_field(void **state)
{
    (void)state;
    static const struct {
        const char *message, *more, *param;
    } cases[] = {{"context", ",\"max_tokens\":10", "messages"}, /* the prompt alone is too long */
                 {"long reply", ",\"max_tokens\":2000", "max_tokens"},
                 {"long reply", ",\"max_completion_tokens\":2000", "max_completion_tokens"},
                 {"long reply", "", "messages"}};
    for (size_t i = 0; i < TD_COUNT(cases) + 1; i++) {
        bool text = i == TD_COUNT(cases);
        struct response r = text ? complete("context", "") : chat(cases[i].message, cases[i].more, JSON);
        assert_int_equal(r.status, 400);
        json_t *root = body_of(&r);
        assert_text(root, "error.param", text ? "prompt" : cases[i].param);
        json_decref(root);
    }
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
    static const struct {
        const char *path, *hint;
    } nothing[] = {{"/v1/nothing", "begins at /v1/chat/completions"},
                   {"/", "begins at /v1/chat/completions"},
                   {"/chat/completions", "/v1/chat/completions is: a client's base URL ends in /v1"},
                   {"/conversations/c-1", "/v1/conversations/c-1 is"},
                   {"/v1/v1/models", "/v1 twice"}};
    struct response r;
    for (size_t i = 0; i < TD_COUNT(nothing); i++) {
        r = ask("GET", nothing[i].path, AUTH, NULL);
        assert_non_null(strstr(r.body, nothing[i].hint));
        assert_error(&r, 404, "not_found_error", "not_found");
    }
    char path[1200] = "/conversations/";
    memset(path + 15, 'x', 1000);
    r = ask("GET", path, AUTH, NULL);
    assert_error(&r, 404, "not_found_error", "not_found");
    r = ask("POST", "/v1/chat/completions", AUTH, NULL);
    assert_non_null(strstr(r.body, "no body"));
    assert_error(&r, 400, "invalid_request_error", NULL);
    r = ask("GET", "/v1/chat/completions", AUTH, NULL);
    assert_true(response_has(&r, "Allow: POST\r\n"));
    assert_error(&r, 405, "invalid_request_error", "method_not_allowed");
    r = ask("DELETE", "/v1/models", AUTH, NULL);
    assert_error(&r, 405, "invalid_request_error", NULL);
}

/* A web page can send a form or a text without being asked whether it may; nothing of it is served. */
static void test_content_type(void **state)
{
    (void)state;
    static const struct {
        const char *path, *type, *body;
        int status;
    } cases[] = {{"/v1/chat/completions", "Content-Type: text/plain\r\n", "{}", 415},
                 {"/v1/chat/completions", "", "{}", 415},
                 {"/v1/chat/completions", "Content-Type: application/x-www-form-urlencoded\r\n", "", 415},
                 {"/v1/chat/completions", "Content-Type: application/jsonx\r\n", "{}", 415},
                 {"/v1/conversations/c-1/fork", "Content-Type: text/plain\r\n", "{}", 415},
                 {"/v1/nothing", "Content-Type: text/plain\r\n", "{}", 404},
                 {"/v1/chat/completions", "", NULL, 400}, /* there is nothing that could be of a type */
                 {"/v1/chat/completions", "", "", 400},
                 {"/v1/chat/completions", "Content-Type: Application/JSON; charset=utf-8\r\n",
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"say x\"}]}", 200}};
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        char headers[256];
        snprintf(headers, sizeof headers, AUTH "%s", cases[i].type);
        struct response r = ask("POST", cases[i].path, headers, cases[i].body);
        if (r.status != cases[i].status)
            fail_msg("case %zu: %d %s", i, r.status, r.body);
        free(r.body);
    }
    assert_int_equal(atomic_load(&toy.starts), 1);
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
    static const char *const own[] = {"/v1/models/toy", "/v1/models/default"};
    for (size_t i = 0; i < TD_COUNT(own); i++) {
        r = ask("GET", own[i], AUTH, NULL);
        root = body_of(&r);
        assert_text(root, "id", "toy");
        json_decref(root);
    }
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
    r = ask("POST", "/tokenize", JSON, "{\"text\":\"the\"}");
    assert_non_null(strstr(r.body, "'content' is missing"));
    free(r.body);
    r = ask("POST", "/detokenize", JSON, "{\"ids\":[1]}");
    assert_non_null(strstr(r.body, "'tokens' is missing"));
    free(r.body);
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

/* The worker holds the first list until `disk` lets it. */
static void ask_for_lists(sem_t *disk, struct client *clients, size_t count)
{
    sem_init(disk, 0, 0);
    toy.disk = disk;
    for (size_t i = 0; i < count; i++) {
        clients[i] = client_open(toy.port);
        client_request(&clients[i], "GET", "/v1/conversations", AUTH, NULL);
    }
}

/* Clients of a list that takes long; one of them gives up. Everybody else is answered meanwhile, and so are they in the end. */
static void test_conversations_hold_nobody_up(void **state)
{
    (void)state;
    sem_t disk;
    struct client c[3];
    ask_for_lists(&disk, c, TD_COUNT(c));
    client_close(&c[0]);
    struct response r = chat("say x", "", JSON);
    assert_int_equal(r.status, 200);
    free(r.body);
    for (size_t i = 0; i < TD_COUNT(c); i++)
        sem_post(&disk);
    for (size_t i = 1; i < TD_COUNT(c); i++) {
        r = client_response(&c[i], false);
        assert_int_equal(r.status, 200);
        assert_non_null(strstr(r.body, "\"list\""));
        free(r.body);
        client_close(&c[i]);
    }
    sem_destroy(&disk);
}

/* The server goes while the worker has a question, and another waits. */
static void test_conversations_at_the_end(void **state)
{
    (void)state;
    sem_t disk;
    struct client c[2];
    ask_for_lists(&disk, c, TD_COUNT(c));
    struct response r = ask("GET", "/health", AUTH, NULL);
    assert_int_equal(r.status, 200);
    free(r.body);
    sem_post(&disk);
    sem_post(&disk);
    toy_tear_down();
    for (size_t i = 0; i < TD_COUNT(c); i++)
        client_close(&c[i]);
    sem_destroy(&disk);
    set_up(state);
}

static void test_too_many_questions(void **state)
{
    (void)state;
    sem_t disk;
    struct client c[API_ASKED_EACH + 1];
    struct pollfd answers[TD_COUNT(c)];
    ask_for_lists(&disk, c, TD_COUNT(c));
    for (size_t i = 0; i < TD_COUNT(c); i++)
        answers[i] = (struct pollfd){.fd = c[i].fd, .events = POLLIN};
    assert_int_equal(poll(answers, TD_COUNT(c), CLIENT_WAIT_MS), 1); /* whichever came last */
    for (size_t i = 0; i < API_ASKED_EACH; i++)
        sem_post(&disk);
    for (size_t i = 0; i < TD_COUNT(c); i++) {
        struct response r = client_response(&c[i], false);
        assert_int_equal(r.status, answers[i].revents ? 429 : 200);
        free(r.body);
        client_close(&c[i]);
    }
    sem_destroy(&disk);
}

struct questions {
    uint32_t count;
    size_t size;
    atomic_bool done;
};

static void on_questions(void *arg)
{
    struct questions *q = arg;
    toy.server->asked_count += q->count;
    toy.server->asked_size += q->size;
    atomic_store(&q->done, true);
}

/* As if others had asked so much more. */
static void add_questions(uint32_t count, size_t size)
{
    struct questions q = {.count = count, .size = size};
    assert_int_equal(net_loop_post(toy.loop, on_questions, &q), 0);
    while (!atomic_load(&q.done))
        usleep(1000);
}

static void assert_status(const char *method, const char *body, int status)
{
    struct response r = ask(method, "/v1/conversations", JSON, body);
    assert_int_equal(r.status, status);
    free(r.body);
}

static void test_too_many_questions_of_everybody(void **state)
{
    (void)state;
    add_questions(API_ASKED_MAX - 1, 0);
    assert_status("GET", NULL, 200);
    add_questions(1, 0);
    assert_status("GET", NULL, 429);
    add_questions(-API_ASKED_MAX, API_ASKED_SIZE - 4);
    assert_status("POST", "good", 200);
    add_questions(0, 1);
    assert_status("POST", "good", 429);
    assert_status("GET", NULL, 200);
    add_questions(0, 3 - (size_t)API_ASKED_SIZE);
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
        bool empty = good[i].body && strcmp(good[i].body, "{}") == 0;
        r = empty ? ask("POST", good[i].path, AUTH, NULL)
                  : ask(good[i].method, good[i].path, JSON, good[i].body);
        assert_string_equal(r.body, good[i].said); /* what needs no body needs none */
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
    char *values = calloc(LIMIT_JSON_VALUES + 2, 1); /* what would cost out of proportion is not parsed */
    memset(values, ',', LIMIT_JSON_VALUES);
    for (uint32_t more = 0; more < 2; more++) {
        values[LIMIT_JSON_VALUES] = more ? ',' : '\0';
        r = ask("POST", "/v1/conversations", JSON, values);
        assert_int_equal(r.status, 400);
        assert_non_null(strstr(r.body, more ? "holds more values" : "this is no conversation"));
        free(r.body);
    }
    free(values);
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
        assert_true(reaches(&toy.starts, started + 1));
    assert_int_equal(atomic_load(&toy.cancels), before);
    client_close(&c);
    assert_true(reaches(&toy.cancels, before + 1));
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

/* Begin a reply that goes on until it is told to end; the client has seen `seen` of it. */
static struct client hold(const char *text, const char *conversation, const char *seen)
{
    char body[256];
    struct client c = client_open(toy.port);
    snprintf(
        body, sizeof body,
        "{\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}],\"conversation\":\"%s\",\"stream\":true}",
        text, conversation);
    client_request(&c, "POST", "/v1/chat/completions", JSON, body);
    assert_true(client_wait_for(&c, seen));
    return c;
}

static void assert_stopped(const char *conversation, const char *said)
{
    char path[64];
    snprintf(path, sizeof path, "/v1/conversations/%s/stop", conversation);
    struct response r = ask("POST", path, AUTH, NULL);
    assert_int_equal(r.status, 200);
    assert_string_equal(r.body, said);
    free(r.body);
}

/* Where a client stops its reply from a second connection it ends as it would at a stop string; nobody else's does. */
static void test_stop(void **state)
{
    (void)state;
    struct client c = hold("hold ab", "c-1", "\"b\""), other = hold("hold ab", "c-2", "\"b\"");
    struct response r = ask("POST", "/v1/conversations/c-1/stop", "Content-Type: application/json\r\n", "{}");
    assert_error(&r, 401, "authentication_error", NULL);
    r = ask("GET", "/v1/conversations/c-1/stop", AUTH, NULL);
    assert_error(&r, 405, "invalid_request_error", NULL);
    assert_stopped("c-3", "{\"id\":\"c-3\",\"stopped\":0}");
    assert_int_equal(atomic_load(&toy.finishes), 0);
    assert_stopped("c-1", "{\"id\":\"c-1\",\"stopped\":1}");
    assert_true(client_wait_for(&c, "\"finish_reason\":\"stop\""));
    assert_true(client_wait_for(&c, "[DONE]"));
    assert_int_equal(atomic_load(&toy.finishes), 1);
    assert_int_equal(atomic_load(&toy.keep_count), 2);
    assert_stopped("c-1", "{\"id\":\"c-1\",\"stopped\":0}");
    struct client twin = hold("hold xyz", "c-2", "\"z\"");
    assert_stopped("c-2", "{\"id\":\"c-2\",\"stopped\":2}");
    assert_true(client_wait_for(&other, "[DONE]") && client_wait_for(&twin, "[DONE]"));
    assert_int_equal(atomic_load(&toy.cancels), 0);
    client_close(&c), client_close(&other), client_close(&twin);
    c = hold("hold ", "c-4", "\"role\""); /* nothing was said: there is nothing to keep */
    assert_stopped("c-4", "{\"id\":\"c-4\",\"stopped\":1}");
    assert_true(client_wait_for(&c, "\"error\""));
    assert_int_equal(atomic_load(&toy.cancels), 1);
    assert_int_equal(atomic_load(&toy.finishes), 3);
    client_close(&c);
}

/* A client that asks for ever more and reads nothing is cut off when its queue is full. */
static void test_client_that_does_not_read(void **state)
{
    (void)state;
    struct client c = client_open(toy.port);
    client_request(&c, "POST", "/v1/chat/completions", JSON,
                   "{\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"flood\"}]}");
    assert_true(reaches(&toy.cancels, 1));
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
    assert_true(reaches(&toy.starts, before + 1));
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
    assert_true(reaches(&toy.starts, 4));
    struct response r = chat("say x", "", JSON);
    assert_true(response_has(&r, "Retry-After: 1\r\n"));
    assert_error(&r, 429, "rate_limit_error", "rate_limit_exceeded");
    client_close(&waiting[0]);
    assert_true(reaches(&toy.cancels, 1));
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
        cmocka_unit_test_setup_teardown(test_bad_requests, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_owner_errors, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_context_error_names_the_field, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_error_in_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_credentials, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_credential_limit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_routes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_conversation_verbs, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_conversations_hold_nobody_up, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_conversations_at_the_end, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_too_many_questions, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_too_many_questions_of_everybody, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_content_type, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_models, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_health, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_tokens_and_metrics, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_conversations, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_idempotency_key, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_disconnect_cancels, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_stop, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_client_that_does_not_read, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_keep_alive_comments, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_too_many_calls, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
