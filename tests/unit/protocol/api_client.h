/* api_client: requests to the toy owner's server and their answers as JSON, whole or as a stream of events. */
#ifndef TANDEM_TESTS_API_CLIENT_H
#define TANDEM_TESTS_API_CLIENT_H
#include "toy_owner.h"
#include "protocol/api_server.h"
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define AUTH "Authorization: Bearer secret\r\n"

#define JSON AUTH "Content-Type: application/json\r\n"

static inline int set_up(void **state)
{
    (void)state;
    toy_set_up(&(struct net_listen){.bind_address = "127.0.0.1"}, 4, false);
    return 0;
}

static inline int tear_down(void **state)
{
    (void)state;
    toy_tear_down();
    return 0;
}

static inline struct response ask(const char *method, const char *path, const char *headers, const char *body)
{
    struct client c = client_open(toy.port);
    client_request(&c, method, path, headers, body);
    struct response r = client_response(&c, false);
    client_close(&c);
    return r;
}

/* A chat request with one user message; more: further fields, each beginning with a comma. */
static inline struct response chat(const char *message, const char *more, const char *headers)
{
    char body[16384];
    snprintf(body, sizeof body, "{\"model\":\"toy\",\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}]%s}",
             message, more);
    return ask("POST", "/v1/chat/completions", headers, body);
}

static inline struct response complete(const char *prompt, const char *more)
{
    char body[16384];
    snprintf(body, sizeof body, "{\"prompt\":\"%s\"%s}", prompt, more);
    return ask("POST", "/v1/completions", JSON, body);
}

static inline json_t *body_of(struct response *r)
{
    json_error_t e;
    json_t *root = json_loads(r->body, 0, &e);
    if (!root)
        fail_msg("not JSON: %s", r->body);
    free(r->body);
    return root;
}

/* The value at a path like "choices.0.message.content". */
static inline json_t *at(json_t *v, const char *path)
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

static inline void assert_text(json_t *root, const char *path, const char *expected)
{
    assert_true(json_is_string(at(root, path)));
    assert_string_equal(json_string_value(at(root, path)), expected);
}

static inline void assert_error(struct response *r, int status, const char *type, const char *code)
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

static inline struct events events_of(struct response *r)
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

static inline void events_free(struct events *e)
{
    for (size_t i = 0; i < e->count; i++)
        json_decref(e->list[i]);
}

/* All text of a chat stream. */
static inline void stream_text(struct events *e, char *out, size_t size)
{
    out[0] = '\0';
    for (size_t i = 0; i < e->count; i++) {
        json_t *choice = json_array_get(json_object_get(e->list[i], "choices"), 0);
        const char *text = json_string_value(json_object_get(json_object_get(choice, "delta"), "content"));
        if (text)
            strncat(out, text, size - strlen(out) - 1);
    }
}
#endif
