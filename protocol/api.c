/* api: the routes of the OpenAI API server, authentication, and the small requests that need no generation. */
#include "protocol/api_server.h"
#include "shared/conversation_id.h"
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

#define TICK_US 1000000u

struct route_call { /* what every route gets */
    struct api_server *server;
    struct http_exchange *exchange;
    const struct http_request *request;
    struct api_identity who;
    const char *rest; /* of the path, for routes that end in a name */
};

/* Takes json over. */
static void respond(const struct route_call *r, int status, char *json)
{
    api_respond_json(r->server, r->exchange, status, json, 0, NULL);
}

static void respond_error(const struct route_call *r, int status, const char *message, const char *param,
                          const char *code)
{
    api_respond_error(r->server, r->exchange, status, message, param, code);
}

static void respond_code(const struct route_call *r, int code)
{
    int status = api_http_status(code);
    respond_error(r, status, status == 404 ? "there is no such conversation" : td_status_text(code), NULL,
                  api_error_code(code));
}

/* ---- generations ------------------------------------------------------------------------------------------- */

static void on_chat(const struct route_call *r)
{
    api_generate(r->server, r->exchange, r->request, &r->who, true);
}

static void on_completions(const struct route_call *r)
{
    api_generate(r->server, r->exchange, r->request, &r->who, false);
}

/* ---- models, health, metrics -------------------------------------------------------------------------------- */

static void on_models(const struct route_call *r)
{
    respond(r, 200, api_json_models(&r->server->config.model_name, 1, r->server->created_s));
}

static void on_model(const struct route_call *r)
{
    const struct api_server *s = r->server;
    if (!api_is_own_model(s, r->rest)) {
        respond_error(r, 404, "there is no such model", "model", "model_not_found");
        return;
    }
    json_t *root = json_pack("{s:s,s:s,s:I,s:s}", "id", s->config.model_name, "object", "model", "created",
                             (json_int_t)s->created_s, "owned_by", "tandem");
    respond(r, 200, root ? json_dumps(root, JSON_COMPACT) : NULL);
    json_decref(root);
}

static void on_health(const struct route_call *r)
{
    const struct api_config *config = &r->server->config;
    const char *why = NULL;
    if (!r->server->ready)
        respond_error(r, 503, "the model is still being loaded", NULL, "loading");
    else if (config->ops->unhealthy && (why = config->ops->unhealthy(config->ctx)))
        respond_error(r, 503, why, NULL, "unavailable");
    else
        respond(r, 200, strdup("{\"status\":\"ok\"}"));
}

static void on_metrics(const struct route_call *r)
{
    size_t size;
    char *text = metrics_render(&size);
    if (!text) {
        respond_error(r, 503, "not enough memory", NULL, "out_of_memory");
        return;
    }
    http_respond(r->exchange, 200, "text/plain; version=0.0.4; charset=utf-8", NULL, 0, text, size);
    free(text);
}

/* ---- tokens ------------------------------------------------------------------------------------------------ */

static char *ids_to_json(const int32_t *ids, size_t count)
{
    json_t *list = json_array();
    for (size_t i = 0; list && i < count; i++)
        json_array_append_new(list, json_integer(ids[i]));
    json_t *root = json_pack("{s:o}", "tokens", list);
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    return text;
}

static json_t *load_body(const struct route_call *r)
{
    struct td_error err = {0};
    json_t *root = api_json_load(r->request->body, r->request->body_size, &err);
    if (!root)
        respond_error(r, 400, err.text, NULL, api_error_code(err.code));
    return root;
}

static void encode(const struct route_call *r, const char *text, size_t size, bool add_special)
{
    const struct tokenizer *t = r->server->config.tokenizer;
    size_t capacity = size + 16; /* a token is at least a byte, but for BOS and an added space */
    int32_t *ids = malloc(capacity * sizeof *ids);
    int64_t count =
        ids ? tokenizer_encode(t, text, size, NULL, 0, add_special && tokenizer_add_bos(t), ids, capacity)
            : -TD_ERR_NOMEM;
    if (count < 0 || (size_t)count > capacity)
        respond_code(r, count < 0 ? (int)count : -TD_ERR_INTERNAL);
    else
        respond(r, 200, ids_to_json(ids, (size_t)count));
    free(ids);
}

static void on_tokenize(const struct route_call *r)
{
    json_t *root = load_body(r);
    if (!root)
        return;
    const json_t *content = json_object_get(root, "content"), *special = json_object_get(root, "add_special");
    if (!json_is_string(content))
        respond_error(r, 400,
                      content ? "'content' must be a string"
                              : "'content' is missing: the text to tokenize, a string",
                      "content", "invalid_value");
    else if (special && !json_is_boolean(special) && !json_is_null(special))
        respond_error(r, 400, "'add_special' must be true or false", "add_special", "invalid_value");
    else
        encode(r, json_string_value(content), json_string_length(content), json_is_true(special));
    json_decref(root);
}

static int read_ids(json_t *list, uint32_t vocab_count, int32_t *ids)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        json_int_t id = json_integer_value(v);
        if (!json_is_integer(v) || id < 0 || id >= vocab_count)
            return -TD_ERR_ARG;
        ids[i] = (int32_t)id;
    }
    return 0;
}

static char *decode(const struct tokenizer *t, const int32_t *ids, size_t count)
{
    struct api_text bytes = {0};
    for (size_t i = 0; i < count; i++) {
        struct span piece = tokenizer_piece(t, ids[i], true);
        if (api_text_append(&bytes, piece.data, piece.size)) {
            api_text_free(&bytes);
            return NULL;
        }
    }
    size_t size = 0;
    char *text = api_utf8_repair(bytes.data ? bytes.data : "", bytes.size, &size);
    json_t *root = text ? json_pack("{s:s%}", "content", text, size) : NULL;
    char *json = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    free(text);
    api_text_free(&bytes);
    return json;
}

static void on_detokenize(const struct route_call *r)
{
    const struct tokenizer *t = r->server->config.tokenizer;
    json_t *root = load_body(r);
    if (!root)
        return;
    json_t *list = json_object_get(root, "tokens");
    size_t count = json_array_size(list);
    int32_t *ids = calloc(count + 1, sizeof *ids);
    if (!ids)
        respond_code(r, -TD_ERR_NOMEM);
    else if (!list)
        respond_error(r, 400, "'tokens' is missing: a list of the model's token ids", "tokens",
                      "invalid_value");
    else if (!json_is_array(list) || read_ids(list, tokenizer_vocab_count(t), ids))
        respond_error(r, 400, "'tokens' must be a list of the model's token ids", "tokens", "invalid_value");
    else
        respond(r, 200, decode(t, ids, count));
    free(ids);
    json_decref(root);
}

/* ---- conversations ----------------------------------------------------------------------------------------- */

static int stop_replies(struct api_server *s, const struct api_identity *who, const char *id, char **json)
{
    char text[LIMIT_NAME_SIZE + 64];
    snprintf(text, sizeof text, "{\"id\":\"%s\",\"stopped\":%u}", id, api_stop(s, who, id));
    *json = strdup(text);
    return *json ? 0 : -TD_ERR_NOMEM;
}

static void ask(const struct route_call *r, enum api_verb verb, const char *id)
{
    bool imports = verb == API_IMPORT;
    api_ask(r->server, r->exchange,
            &(struct api_question){.who = &r->who,
                                   .verb = verb,
                                   .id = id,
                                   .body = imports ? r->request->body : NULL,
                                   .body_size = imports ? r->request->body_size : 0});
}

static void stop(const struct route_call *r, const char *id)
{
    char *json;
    int code = stop_replies(r->server, &r->who, id, &json);
    if (code)
        respond_code(r, code);
    else
        respond(r, 200, json);
}

/* {id}/fork, {id}/pin, {id}/unpin, {id}/stop, {id}/export. */
static void on_conversation_verb(const struct route_call *r, const char *verb)
{
    static const struct {
        const char *name;
        enum api_verb verb;
    } verbs[] = {{"fork", API_FORK}, {"pin", API_PIN}, {"unpin", API_UNPIN}, {"export", API_EXPORT}};
    char id[LIMIT_NAME_SIZE + 1];
    bool reads = strcmp(verb, "export") == 0;
    size_t size = (size_t)(verb - 1 - r->rest);
    snprintf(id, sizeof id, "%.*s", (int)TD_MIN(size, sizeof id - 1), r->rest);
    bool known = size < sizeof id && conversation_id_valid(id);
    if (strcmp(r->request->method, reads ? "GET" : "POST") != 0) {
        respond_error(r, 405, "this path does not know that method", NULL, "method_not_allowed");
        return;
    }
    if (known && strcmp(verb, "stop") == 0) {
        stop(r, id);
        return;
    }
    for (size_t i = 0; known && i < TD_COUNT(verbs); i++)
        if (strcmp(verb, verbs[i].name) == 0) {
            ask(r, verbs[i].verb, id);
            return;
        }
    respond_code(r, -TD_ERR_NOTFOUND);
}

static void on_conversations(const struct route_call *r)
{
    struct td_error err;
    if (strcmp(r->request->method, "POST") != 0)
        ask(r, API_LIST, "");
    else if (api_json_check(r->request->body, r->request->body_size, &err) < 0)
        respond_error(r, 400, err.text, NULL, api_error_code(err.code));
    else
        ask(r, API_IMPORT, "");
}

static void on_conversation(const struct route_call *r)
{
    const char *slash = strchr(r->rest, '/');
    if (slash)
        on_conversation_verb(r, slash + 1);
    else if (strcmp(r->request->method, "POST") == 0)
        respond_error(r, 405, "this path does not know that method", NULL, "method_not_allowed");
    else if (!conversation_id_valid(r->rest))
        respond_code(r, -TD_ERR_NOTFOUND);
    else
        ask(r, strcmp(r->request->method, "DELETE") == 0 ? API_DELETE : API_SHOW, r->rest);
}

/* ---- routing ------------------------------------------------------------------------------------------------ */

struct route {
    const char *path; /* ending in '/': a name follows */
    const char *methods;
    bool open; /* for anybody: no credentials needed */
    void (*serve)(const struct route_call *r);
};

static const struct route routes[] = {{"/v1/chat/completions", "POST", false, on_chat},
                                      {"/v1/completions", "POST", false, on_completions},
                                      {"/v1/models", "GET", false, on_models},
                                      {"/v1/models/", "GET", false, on_model},
                                      {"/health", "GET", true, on_health},
                                      {"/metrics", "GET", false, on_metrics},
                                      {"/tokenize", "POST", false, on_tokenize},
                                      {"/detokenize", "POST", false, on_detokenize},
                                      {"/v1/conversations", "GET, POST", false, on_conversations},
                                      {"/v1/conversations/", "GET, DELETE, POST", false, on_conversation}};

static const struct route *find_route(const char *path, const char **rest)
{
    for (size_t i = 0; i < TD_COUNT(routes); i++) {
        size_t size = strlen(routes[i].path);
        bool prefix = routes[i].path[size - 1] == '/';
        if (prefix ? strncmp(path, routes[i].path, size) == 0 && path[size]
                   : strcmp(path, routes[i].path) == 0) {
            *rest = path + size;
            return &routes[i];
        }
    }
    return NULL;
}

static bool method_allowed(const char *methods, const char *method)
{
    size_t size = strlen(method);
    for (const char *p = methods; (p = strstr(p, method)) != NULL; p += size)
        if ((p == methods || p[-1] == ' ') && (p[size] == '\0' || p[size] == ','))
            return true;
    return false;
}

static int authenticate(struct api_server *s, const char *authorization, struct api_identity *who)
{
    static const char scheme[] = "Bearer ";
    const char *token = "";
    if (strncasecmp(authorization, scheme, sizeof scheme - 1) == 0)
        token = authorization + sizeof scheme - 1 + strspn(authorization + sizeof scheme - 1, " ");
    if (strlen(token) > LIMIT_TOKEN_SIZE)
        return -TD_ERR_AUTH;
    return s->config.ops->authenticate ? s->config.ops->authenticate(s->config.ctx, token, who) : 0;
}

/* Clients put the path behind a base URL that people type: with /v1, without, or with one too many. */
static void respond_no_route(const struct route_call *r)
{
    const char *path = r->request->path, *rest;
    char meant[LIMIT_NAME_SIZE + 64], message[sizeof meant + 120];
    snprintf(meant, sizeof meant, "/v1%s", path);
    if (strncmp(path, "/v1/v1/", 7) == 0)
        snprintf(message, sizeof message,
                 "there is nothing at this path: it has /v1 twice; the base URL ends in one");
    else if (strlen(path) < sizeof meant - 3 && find_route(meant, &rest))
        snprintf(message, sizeof message,
                 "there is nothing at this path; %s is: a client's base URL ends in /v1", meant);
    else
        snprintf(message, sizeof message,
                 "there is nothing at this path; the API begins at /v1/chat/completions");
    respond_error(r, 404, message, NULL, "not_found");
}

static void on_request(void *ctx, struct http_exchange *x, const struct http_request *q)
{
    struct api_server *s = ctx;
    struct route_call r = {.server = s, .exchange = x, .request = q};
    const struct route *route = find_route(q->path, &r.rest);
    if (!route) {
        respond_no_route(&r);
        return;
    }
    if (!method_allowed(route->methods, q->method)) {
        char *json = api_json_error(405, "this path does not know that method", NULL, "method_not_allowed");
        api_respond_json(s, x, 405, json, 0, route->methods);
        return;
    }
    int rc = route->open ? 0 : authenticate(s, q->authorization, &r.who);
    if (rc == -TD_ERR_AGAIN) { /* known, and not now */
        respond_code(&r, rc);
        return;
    }
    if (rc != 0) {
        metric_add(s->unauthorized, 1);
        respond_error(&r, 401, "the API key is missing or wrong", NULL, "invalid_api_key");
        return;
    }
    if (s->config.require_json && strcmp(q->method, "POST") == 0 &&
        !http_is_json_or_nothing(q->content_type, q->body_size)) {
        respond_error(&r, 415, "Content-Type must be application/json", NULL, "unsupported_media_type");
        return;
    }
    route->serve(&r);
}

static void on_client_gone(void *ctx, struct http_exchange *x)
{
    struct api_call *c = http_user(x);
    if (c)
        api_call_lost(c);
    else
        api_asked_lost(ctx, x);
}

/* ---- keep-alive ---------------------------------------------------------------------------------------------- */

/* A stream that is silent for long gets a comment, so that nothing between us and the client takes it for dead; one whose prompt takes so
 * long that nothing was sent yet is begun. */
static bool keep_alive(struct api_call *c, uint64_t now)
{
    if (!c->request.stream || !c->exchange || now - c->last_write_us < LIMIT_HTTP_KEEPALIVE_MS * 1000ull)
        return true;
    int code = c->streaming ? http_stream_write(c->exchange, ": keep-alive\n\n", 14) : api_stream_begin(c);
    c->last_write_us = now;
    if (code == 0)
        return true;
    http_abort(c->exchange);
    api_call_lost(c);
    return false;
}

static void on_tick(void *ctx)
{
    struct api_server *s = ctx;
    uint64_t now = clock_mono_us(), delay = TICK_US;
    for (struct api_call *c = s->calls; c; c = c->next)
        if (!keep_alive(c, now)) { /* the list may have changed in more than one place */
            delay = 1;
            break;
        }
    if (s->calls)
        net_timer_start(s->ticker, delay);
}

/* ---- the server ---------------------------------------------------------------------------------------------- */

struct api_server *api_create(const struct api_config *config)
{
    static const char *const labels[] = {"status=\"2xx\"", "status=\"4xx\"", "status=\"5xx\""};
    struct api_server *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->config = *config;
    s->handler = (struct http_handler){on_request, on_client_gone, s};
    s->created_s = clock_wall_us() / 1000000;
    s->ticker = net_timer_create(config->loop, on_tick, s);
    if (!s->ticker) {
        free(s);
        return NULL;
    }
    for (size_t i = 0; i < TD_COUNT(labels); i++)
        s->requests[i] = metric_counter("tandem_api_responses_total", labels[i],
                                        "Responses of the OpenAI API, by status.");
    s->unauthorized =
        metric_counter("tandem_api_unauthorized_total", NULL, "Requests with a wrong or missing API key.");
    return s;
}

void api_destroy(struct api_server *s)
{
    if (!s)
        return;
    while (s->calls) {
        struct api_call *c = s->calls;
        if (c->exchange)
            http_abort(c->exchange);
        if (c->ended)
            api_call_free(c);
        else
            api_call_lost(c);
    }
    api_asked_forget(s);
    net_timer_destroy(s->ticker);
    free(s);
}

const struct http_handler *api_http_handler(struct api_server *s)
{
    return &s->handler;
}

void api_set_ready(struct api_server *s, bool ready)
{
    s->ready = ready;
}
