/* api_edge: a device's OpenAI API over an agent with a fake cloud: who may ask, a reply whole and as a stream, and what is done with its conversation. */
#define client agent_client /* agent_rig.h's, which are not used here: clients speak HTTP */
#include "agent_rig.h"
#undef client
#include "../protocol/http_json_client.h"
#include "edge/api_edge.h"

static struct rig rig;
static struct api_edge *api;
static uint16_t port;

static int start(void **state, bool away)
{
    struct td_error err = {0};
    rig_set_up(state);
    rig_make(&rig, 0);
    rig.config.private_min_layers = AGENT_PRIVATE_LAYERS;
    if (agent_create(&rig.config, rig.cloud.loop, &rig.agent, &err) < 0)
        fail_msg("%s", err.text);
    api = api_edge_create(rig.agent, rig.cloud.loop, "key");
    assert_non_null(api);
    const struct net_listen listen = {.bind_address = "127.0.0.1", .http = api_edge_http_handler(api)};
    if (net_listen(rig.cloud.loop, &listen, &port, &err))
        fail_msg("%s", err.text);
    rig.cloud.away = away;
    fake_cloud_run(&rig.cloud);
    on_loop(rig.cloud.loop, rig_connect, rig.agent);
    return 0;
}

static int set_up(void **state)
{
    return start(state, false);
}

static int set_up_away(void **state)
{
    return start(state, true);
}

/* In the order of a program's end. */
static int tear_down(void **state)
{
    (void)state;
    fake_cloud_stop(&rig.cloud);
    agent_shutdown(rig.agent);
    fake_cloud_free(&rig.cloud);
    api_edge_destroy(api);
    agent_destroy(rig.agent);
    rig_clear(&rig);
    return 0;
}

#define KEY     "Authorization: Bearer key\r\n"
#define HEADERS KEY "Content-Type: application/json\r\n"

static json_t *ask(const char *method, const char *path, const char *body, int status)
{
    return client_json(port, method, path, KEY, body, status);
}

static const char *text_at(json_t *root, const char *name)
{
    return json_string_value(json_object_get(root, name));
}

#define CHAT(more) "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]" more "}"

static void a_reply_and_its_conversation(void **state)
{
    (void)state;
    json_t *root = ask("POST", "/v1/chat/completions", CHAT(",\"conversation\":\"mine\""), 200), *again;
    assert_string_equal(text_at(root, "conversation"), "mine");
    assert_int_equal(json_integer_value(json_object_get(json_object_get(root, "usage"), "completion_tokens")),
                     FAKE_REPLY);
    json_decref(root);
    root = ask("GET", "/v1/conversations", NULL, 200);
    assert_int_equal(json_array_size(json_object_get(root, "data")), 1);
    json_decref(root);
    root = ask("GET", "/v1/conversations/mine", NULL, 200);
    assert_non_null(strstr(text_at(root, "text"), "hello"));
    json_decref(root);
    json_decref(ask("POST", "/v1/conversations/mine/fork", "{}", 200));
    json_decref(ask("POST", "/v1/conversations/mine/pin", "{}", 200));
    assert_true(store_pin_count(agent_store(rig.agent)) == 1);
    json_decref(ask("POST", "/v1/conversations/mine/unpin", "{}", 200));
    assert_true(store_pin_count(agent_store(rig.agent)) == 0);
    root = ask("POST", "/v1/conversations/mine/stop", "{}", 200);
    assert_int_equal(json_integer_value(json_object_get(root, "stopped")), 0);
    json_decref(root);
    root = ask("GET", "/v1/conversations/mine/export", NULL, 200);
    char *text = json_dumps(root, JSON_COMPACT);
    again = ask("POST", "/v1/conversations", text, 200);
    free(text), json_decref(root), json_decref(again);
    json_decref(ask("DELETE", "/v1/conversations/mine", NULL, 200));
    json_decref(ask("GET", "/v1/conversations/mine", NULL, 404));
    root = ask("GET", "/v1/conversations", NULL, 200);
    assert_int_equal(json_array_size(json_object_get(root, "data")), 2); /* the fork and what was taken in */
    json_decref(root);
}

static void what_is_refused(void **state)
{
    (void)state;
    struct client c = client_open(port);
    client_request(&c, "GET", "/v1/models", "Authorization: Bearer other\r\n", NULL);
    struct response r = client_response(&c, false);
    assert_int_equal(r.status, 401);
    free(r.body);
    client_request(&c, "GET", "/health", "", NULL);
    r = client_response(&c, false);
    assert_true(r.status == 200 || r.status == 503); /* until the cloud has answered */
    free(r.body);
    client_close(&c);
    json_decref(ask("POST", "/v1/chat/completions", CHAT(",\"max_tokens\":100000"), 400));
    json_t *root = ask("POST", "/v1/chat/completions", CHAT(",\"prefer\":\"private\""), 400);
    assert_non_null(strstr(text_at(json_object_get(root, "error"), "message"), "private"));
    json_decref(root);
    json_decref(ask("POST", "/v1/conversations", "{}", 400));
}

static void set_there(void *arg)
{
    (void)arg;
    rig.cloud.away = false;
}

/* Histories are hashed with a key of the user's, whom only the cloud names. */
static void nothing_is_taken_in_before_the_first_welcome(void **state)
{
    (void)state;
    json_t *root = ask("POST", "/v1/conversations", "{}", 503);
    assert_non_null(strstr(text_at(json_object_get(root, "error"), "message"), "come again"));
    json_decref(root);
    on_loop(rig.cloud.loop, set_there, NULL);
    json_decref(ask("POST", "/v1/chat/completions", CHAT(""), 200));
    json_decref(ask("POST", "/v1/conversations", "{}", 400));
}

static bool nothing_flies(void *arg)
{
    (void)arg;
    return agent_flight_count(rig.agent) == 0;
}

static void set_silent(void *arg)
{
    rig.cloud.silent = arg != NULL;
}

/* As a stream; then one whose client leaves before the first token. */
static void a_stream_and_a_client_that_leaves(void **state)
{
    (void)state;
    struct client c = client_open(port);
    client_request(&c, "POST", "/v1/chat/completions", HEADERS, CHAT(",\"stream\":true"));
    assert_true(client_wait_for(&c, "[DONE]"));
    client_close(&c);
    assert_true(comes_true(rig.cloud.loop, nothing_flies, NULL));
    on_loop(rig.cloud.loop, set_silent, &rig);
    c = client_open(port);
    client_request(&c, "POST", "/v1/chat/completions", HEADERS, CHAT(",\"stream\":true"));
    assert_true(client_wait_for(&c, "\"role\""));
    client_close(&c);
    assert_true(comes_true(rig.cloud.loop, nothing_flies, NULL));
}

/* Who is still being answered when it ends is let go of. */
static void ended_under_a_reply(void **state)
{
    (void)state;
    struct client c = client_open(port);
    on_loop(rig.cloud.loop, set_silent, &rig);
    client_request(&c, "POST", "/v1/chat/completions", HEADERS, CHAT(",\"stream\":true"));
    assert_true(client_wait_for(&c, "\"role\""));
    tear_down(state);
    assert_true(client_at_end(&c));
    client_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_reply_and_its_conversation, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_is_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(nothing_is_taken_in_before_the_first_welcome, set_up_away, tear_down),
        cmocka_unit_test_setup_teardown(a_stream_and_a_client_that_leaves, set_up, tear_down),
        cmocka_unit_test_setup(ended_under_a_reply, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
