/* libtandem: see tandem.h. One thread of its own runs the net loop and the agent; what callers ask for is posted to it.
 *
 * A request becomes the JSON that the HTTP API would have got and goes through the same parser, so that both have the same rules. What the caller's
 * struct does not reach (an older header) is at its default. */
#include "edge/tandem.h"
#include "edge/api_edge.h"
#include "edge/settings.h"
#include "protocol/api_internal.h"
#include "shared/crypto.h"
#include "shared/workers.h"
#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define READY_POLL_NS    10000000L
#define KV_MEMORY        (256u << 20)
#define KV_DISK          (UINT64_C(1) << 30)
#define CHUNK_TOKENS     64u
#define CLOUD_TIMEOUT_MS 30000u
#define LOOK_US          50000u /* how often `ready` is brought up to date */

#define SAME(name) _Static_assert((int)TANDEM_##name == (int)TD_##name, "tandem.h has the codes of status.h")
SAME(ERR_ARG);
SAME(ERR_NOMEM);
SAME(ERR_FULL);
SAME(ERR_CLOSED);
SAME(ERR_TIMEOUT);
SAME(ERR_IO);
SAME(ERR_NOTFOUND);
SAME(ERR_FORMAT);
SAME(ERR_AUTH);
SAME(ERR_UNSUPPORTED);
SAME(ERR_MISMATCH);
SAME(ERR_CANCELLED);
SAME(ERR_PROTOCOL);
SAME(ERR_CONFLICT);
SAME(ERR_CONTEXT);
SAME(ERR_BLOCKED);
SAME(ERR_INTERNAL);

struct tandem {
    struct agent_config config;
    char *strings[8]; /* copies that the agent borrows */
    char cloud_host[256], data_dir[PATH_SIZE_MAX], token[LIMIT_TOKEN_SIZE + 1];
    struct net_loop *loop;
    struct agent *agent;
    struct net_timer *look;
    pthread_t thread;
    bool running;
    atomic_bool ready, closing;
    atomic_uint_fast64_t last_id;
    struct call *calls; /* loop's thread */
};

struct call {
    struct call *next;
    struct tandem *tandem;
    uint64_t id;
    struct api_request request;
    char key[LIMIT_IDEMPOTENCY_SIZE + 1];
    tandem_text_fn on_text;
    tandem_end_fn on_end;
    void *context;
    struct flight *flight; /* NULL: not begun, or ended */
    struct api_text_stream text;
    struct api_text shown;
    uint32_t token_count;
    char conversation[LIMIT_NAME_SIZE + 1];
    bool not_kept;
};

/* ---- the end of a call ---- */

static void call_free(struct call *c)
{
    api_request_free(&c->request);
    api_text_stream_deinit(&c->text);
    if (c->shown.data)
        crypto_wipe(c->shown.data, c->shown.size);
    api_text_free(&c->shown);
    free(c);
}

static void call_end(struct call *c, struct tandem_result *result)
{
    struct call **at = &c->tandem->calls;
    while (*at && *at != c)
        at = &(*at)->next;
    if (*at)
        *at = c->next;
    result->size = sizeof *result;
    result->conversation = c->conversation;
    result->not_kept = c->not_kept;
    if (!result->error)
        result->error = "";
    if (!result->finish)
        result->finish = "";
    c->on_end(c->context, result);
    call_free(c);
}

static void call_fail(struct call *c, int code, const char *text)
{
    call_end(c, &(struct tandem_result){.code = code, .error = text});
}

/* ---- text ---- */

/* What may be shown goes through the vault to the caller. */
static int show(struct call *c, bool flush)
{
    char *out = NULL;
    size_t size = 0;
    if (c->shown.size == 0 && !flush)
        return 0;
    int rc = agent_restore(c->flight, c->shown.data ? c->shown.data : "", c->shown.size, flush, &out, &size);
    c->shown.size = 0;
    if (rc == 0 && size > 0)
        c->on_text(c->context, out, size);
    if (out)
        crypto_wipe(out, size);
    free(out);
    return rc;
}

/* ---- the agent's sink ---- */

static void on_started(void *ctx, const char *conversation, const struct api_usage *usage)
{
    struct call *c = ctx;
    (void)usage;
    snprintf(c->conversation, sizeof c->conversation, "%s", conversation);
}

static void on_tokens(void *ctx, const int32_t *ids, size_t count, const struct api_logprob_in *logprobs)
{
    struct call *c = ctx;
    const struct tokenizer *t = agent_tokenizer(c->tandem->agent);
    int rc = 0;
    (void)logprobs;
    for (size_t i = 0; rc == 0 && i < count && !c->text.stopped; i++) {
        struct span piece = tokenizer_piece(t, ids[i], false);
        c->token_count++;
        if (!tokenizer_is_end(t, ids[i]))
            rc = api_text_stream_feed(&c->text, piece.data, piece.size, false, &c->shown);
    }
    if (rc == 0)
        rc = show(c, false);
    if (rc < 0) {
        struct flight *f = c->flight;
        c->flight = NULL;
        agent_cancel(f, false, 0);
        call_fail(c, rc, td_status_text(rc));
    } else if (c->text.stopped) {
        agent_cancel(c->flight, true, c->token_count);
    }
}

static void on_done(void *ctx, unsigned finish, const struct api_usage *usage,
                    const struct api_timings *timings)
{
    struct call *c = ctx;
    int rc = api_text_stream_feed(&c->text, NULL, 0, true, &c->shown);
    if (rc == 0)
        rc = show(c, true);
    c->flight = NULL;
    if (rc == 0 && !c->text.stopped && (finish == FINISH_ERROR || finish == FINISH_CANCELLED))
        rc = finish == FINISH_ERROR ? -TD_ERR_INTERNAL : -TD_ERR_CANCELLED;
    if (rc < 0) {
        call_fail(c, rc, td_status_text(rc));
        return;
    }
    call_end(
        c, &(struct tandem_result){.finish = finish == FINISH_LENGTH && !c->text.stopped ? "length" : "stop",
                                   .prompt_tokens = usage->prompt_tokens,
                                   .completion_tokens = usage->completion_tokens,
                                   .cached_tokens = usage->cached_tokens,
                                   .first_token_ms = timings->first_token_ms,
                                   .total_ms = timings->total_ms,
                                   .tokens_per_s = timings->tokens_per_s,
                                   .edge_prefill_ms = timings->edge_prefill_ms,
                                   .uplink_bytes = timings->uplink_bytes,
                                   .uplink_raw_bytes = timings->uplink_raw_bytes,
                                   .local_tokens = timings->local_tokens,
                                   .offline_tokens = timings->offline_tokens,
                                   .offline_from_token = timings->offline_from,
                                   .offline_estimate_ms = timings->offline_estimate_ms});
}

static void on_failed(void *ctx, int code, const char *text, uint32_t retry_after_ms)
{
    struct call *c = ctx;
    c->flight = NULL;
    call_end(c, &(struct tandem_result){.code = code, .error = text, .retry_after_ms = retry_after_ms});
}

static void on_failed_context(void *ctx, uint32_t context_max, uint32_t asked_tokens, uint32_t prompt_tokens)
{
    char text[160];
    snprintf(text, sizeof text, "prompt and reply want %u tokens (%u of them prompt), the context holds %u",
             asked_tokens, prompt_tokens, context_max);
    on_failed(ctx, -TD_ERR_CONTEXT, text, 0);
}

static void on_not_kept(void *ctx)
{
    ((struct call *)ctx)->not_kept = true;
}

static const struct agent_sink sink = {on_started, on_tokens,         on_done,
                                       on_failed,  on_failed_context, on_not_kept};

/* ---- requests ---- */

/* The part of a caller's struct that its header knew, over our defaults. */
#define TAKE(type, given, defaults)                                                                          \
    type taken = defaults;                                                                                   \
    memcpy((char *)&taken + sizeof taken.size, (const char *)(given) + sizeof taken.size,                    \
           TD_MIN((given)->size, sizeof taken) - sizeof taken.size)

static json_t *messages_json(const struct tandem_request *r)
{
    json_t *list = json_array();
    for (size_t i = 0; list && i < r->message_count; i++) {
        const struct tandem_message *m = &r->messages[i];
        json_t *item =
            json_pack("{s:s,s:s}", "role", m->role ? m->role : "", "content", m->content ? m->content : "");
        if (!item || json_array_append_new(list, item) < 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

/* A string, if there is one. False: it is no UTF-8, or there is no memory. */
static bool put_text(json_t *root, const char *name, const char *text)
{
    return !text || json_object_set_new(root, name, json_string(text)) == 0;
}

static bool put_stops(json_t *root, const struct tandem_request *r)
{
    json_t *stops = r->stop_count ? json_array() : NULL;
    bool whole = r->stop_count == 0 || json_object_set_new(root, "stop", stops) == 0;
    for (size_t i = 0; whole && i < r->stop_count; i++)
        whole = json_array_append_new(stops, json_string(r->stops[i])) == 0;
    return whole;
}

static json_t *request_json(const struct tandem_request *r)
{
    json_t *root = json_pack("{s:o,s:f,s:f,s:f,s:i,s:f,s:f}", "messages", messages_json(r), "temperature",
                             r->temperature < 0 ? 1.0 : (double)r->temperature, "top_p",
                             r->top_p > 0 ? (double)r->top_p : 1.0, "min_p", (double)r->min_p, "top_k",
                             (int)r->top_k, "presence_penalty", (double)r->presence_penalty,
                             "frequency_penalty", (double)r->frequency_penalty);
    if (!root)
        return NULL;
    bool whole = put_text(root, "conversation", r->conversation) && put_text(root, "fidelity", r->fidelity) &&
                 put_text(root, "prefer", r->prefer) && put_stops(root, r);
    if (r->max_tokens)
        whole &= json_object_set_new(root, "max_tokens", json_integer((json_int_t)r->max_tokens)) == 0;
    if (whole)
        return root;
    json_decref(root);
    return NULL;
}

static int parse_request(const struct tandem_request *r, struct api_request *out)
{
    json_t *root = request_json(r);
    char *body = root ? json_dumps(root, JSON_COMPACT) : NULL;
    const char *param;
    json_decref(root);
    if (!body)
        return -TD_ERR_ARG; /* a text that is no UTF-8 */
    int rc = api_request_parse(body, strlen(body), true, out, &param, NULL);
    crypto_wipe(body, strlen(body));
    free(body);
    if (rc == 0 && r->has_seed) {
        out->sampling.seed = r->seed;
        out->has_seed = true;
    }
    return rc;
}

static void begin_call(void *arg)
{
    struct call *c = arg;
    struct tandem *t = c->tandem;
    struct td_error err = {0};
    c->next = t->calls;
    t->calls = c;
    int rc = agent_begin(t->agent, &c->request, EDGE_PRINCIPAL, c->key, &sink, c, &c->flight, &err);
    if (rc < 0)
        call_fail(c, rc, err.text);
}

int tandem_generate(struct tandem *t, const struct tandem_request *request, tandem_text_fn on_text,
                    tandem_end_fn on_end, void *context, uint64_t *id)
{
    static const struct tandem_request defaults = TANDEM_REQUEST_INIT;
    if (!t || !request || !on_text || !on_end ||
        request->size < offsetof(struct tandem_request, conversation))
        return -TD_ERR_ARG;
    TAKE(struct tandem_request, request, defaults);
    if (taken.idempotency_key && strlen(taken.idempotency_key) > LIMIT_IDEMPOTENCY_SIZE)
        return -TD_ERR_ARG;
    if (atomic_load(&t->closing))
        return -TD_ERR_CLOSED;
    struct call *c = calloc(1, sizeof *c);
    if (!c)
        return -TD_ERR_NOMEM;
    int rc = parse_request(&taken, &c->request);
    if (rc < 0) {
        free(c);
        return rc;
    }
    c->tandem = t;
    c->id = atomic_fetch_add(&t->last_id, 1) + 1;
    c->on_text = on_text;
    c->on_end = on_end;
    c->context = context;
    snprintf(c->key, sizeof c->key, "%s", taken.idempotency_key ? taken.idempotency_key : "");
    api_text_stream_init(&c->text, c->request.stops, c->request.stop_count,
                         tokenizer_strips_leading_space(agent_tokenizer(t->agent)));
    uint64_t call_id = c->id;
    rc = net_loop_post(t->loop, begin_call, c);
    if (rc < 0)
        call_free(c);
    else if (id)
        *id = call_id;
    return rc;
}

struct cancel_order {
    struct tandem *tandem;
    uint64_t id;
};

static void cancel_call(void *arg)
{
    struct cancel_order order = *(struct cancel_order *)arg;
    free(arg);
    for (struct call *c = order.tandem->calls; c; c = c->next)
        if (c->id == order.id) {
            struct flight *f = c->flight;
            c->flight = NULL;
            if (f)
                agent_cancel(f, false, 0);
            call_fail(c, -TD_ERR_CANCELLED, "cancelled");
            return;
        }
}

int tandem_cancel(struct tandem *t, uint64_t id)
{
    struct cancel_order *order = malloc(sizeof *order);
    if (!order)
        return -TD_ERR_NOMEM;
    *order = (struct cancel_order){t, id};
    int rc = net_loop_post(t->loop, cancel_call, order);
    if (rc < 0)
        free(order);
    return rc;
}

/* ---- open and close ---- */

static int fail_open(char *error, size_t error_size, const struct td_error *err, int rc)
{
    if (error && error_size)
        snprintf(error, error_size, "%s", err->text[0] ? err->text : td_status_text(rc));
    return rc;
}

/* A copy that lives as long as t; "" and NULL stay NULL. */
static int keep(struct tandem *t, const char *text, const char **out)
{
    *out = NULL;
    if (!text || !text[0])
        return 0;
    for (size_t i = 0; i < TD_COUNT(t->strings); i++)
        if (!t->strings[i]) {
            t->strings[i] = strdup(text);
            *out = t->strings[i];
            return t->strings[i] ? 0 : -TD_ERR_NOMEM;
        }
    return -TD_ERR_INTERNAL;
}

static int take_credential(struct tandem *t, const struct tandem_options *o, struct td_error *err)
{
    if (o->token_path)
        return config_read_secret(o->token_path, t->token, sizeof t->token, err);
    if (!o->token || !o->token[0] || strlen(o->token) > LIMIT_TOKEN_SIZE)
        return td_fail(err, -TD_ERR_ARG, "no usable credential for the cloud: set token or token_path");
    memcpy(t->token, o->token, strlen(o->token) + 1);
    return 0;
}

static int take_names(struct tandem *t, const struct tandem_options *o, struct td_error *err)
{
    struct agent_config *c = &t->config;
    if (edge_codec_parse(o->codec ? o->codec : "auto", &c->codec) < 0)
        return td_fail(err, -TD_ERR_ARG, "codec: want auto, " KV_LEVEL_NAMES);
    if (edge_hidden_parse(o->hidden ? o->hidden : "f16", &c->hidden_dtype) < 0)
        return td_fail(err, -TD_ERR_ARG, "hidden: want f32, f16 or int8");
    if (edge_accept_parse(o->fidelity ? o->fidelity : "visible-lossless", &c->accept) < 0)
        return td_fail(err, -TD_ERR_ARG, "fidelity: want exact, visible-lossless or any");
    if (edge_offline_parse(o->offline ? o->offline : "wait", &c->offline) < 0)
        return td_fail(err, -TD_ERR_ARG, "offline: want wait or continue");
    if (edge_local_parse(o->local ? o->local : "auto", &c->local) < 0)
        return td_fail(err, -TD_ERR_ARG, "local: want auto, always or off");
    if (edge_prefer_parse(o->prefer ? o->prefer : "latency", &c->prefer, &c->prefer_private) < 0)
        return td_fail(err, -TD_ERR_ARG, "prefer: want latency, cloud-cost or private");
    if (!o->client_cert_path != !o->client_key_path)
        return td_fail(err, -TD_ERR_ARG, "client_cert_path and client_key_path belong together");
    if (!o->model_path || !o->model_path[0])
        return td_fail(err, -TD_ERR_ARG, "no model: set model_path");
    return 0;
}

static int take_numbers(struct tandem *t, const struct tandem_options *o, struct td_error *err)
{
    struct agent_config *c = &t->config;
    if (o->threads < 0 || o->threads > WORKERS_MAX || o->edge_layers < -1 || o->edge_layers > KV_LAYERS_MAX)
        return td_fail(err, -TD_ERR_ARG, "threads: want 0 to %d; edge_layers: want -1 to %d", WORKERS_MAX,
                       KV_LAYERS_MAX);
    if (o->private_min_layers < 0 || o->private_min_layers > KV_LAYERS_MAX)
        return td_fail(err, -TD_ERR_ARG, "private_min_layers: want 1 to %d, or 0 for %d", KV_LAYERS_MAX,
                       AGENT_PRIVATE_LAYERS);
    if (!(o->cloud_price >= 0 && o->cloud_price <= EDGE_PRICE_MAX))
        return td_fail(err, -TD_ERR_ARG, "cloud_price: want 0 to %g seconds", EDGE_PRICE_MAX);
    if (o->chunk_tokens < 0 || o->chunk_tokens > EDGE_CHUNK_MAX || o->chunk_tokens % KV_BLOCK_TOKENS != 0)
        return td_fail(err, -TD_ERR_ARG, "chunk_tokens: want a multiple of %d, at most %d", KV_BLOCK_TOKENS,
                       EDGE_CHUNK_MAX);
    if (o->cloud_timeout_s > EDGE_TIMEOUT_MAX)
        return td_fail(err, -TD_ERR_ARG, "cloud_timeout_s: want 1 to %d, or 0 for %u", EDGE_TIMEOUT_MAX,
                       CLOUD_TIMEOUT_MS / 1000);
    c->edge_layers = o->edge_layers < 0 ? PLANNER_AUTO : (uint32_t)o->edge_layers;
    c->private_min_layers = o->private_min_layers ? (uint32_t)o->private_min_layers : AGENT_PRIVATE_LAYERS;
    c->cloud_price = o->cloud_price;
    c->chunk_tokens = o->chunk_tokens ? (uint32_t)o->chunk_tokens : CHUNK_TOKENS;
    c->threads = (unsigned)o->threads;
    c->kv_memory = o->kv_memory ? o->kv_memory : KV_MEMORY;
    c->kv_disk = o->kv_disk < 0 ? 0 : o->kv_disk ? (uint64_t)o->kv_disk : KV_DISK;
    c->cloud_timeout_ms = o->cloud_timeout_s ? o->cloud_timeout_s * 1000 : CLOUD_TIMEOUT_MS;
    return 0;
}

static int take_options(struct tandem *t, const struct tandem_options *o, struct td_error *err)
{
    struct agent_config *c = &t->config;
    int rc;
    if ((rc = take_names(t, o, err)) < 0 || (rc = take_numbers(t, o, err)) < 0 ||
        (rc = take_credential(t, o, err)) < 0 ||
        (rc = edge_parse_address(o->cloud ? o->cloud : "localhost", t->cloud_host, sizeof t->cloud_host,
                                 &c->cloud_port, err)) < 0)
        return rc;
    if (!o->data_dir)
        rc = path_default(t->data_dir, sizeof t->data_dir, EDGE_DATA_NAME, "data_dir", err);
    else if ((size_t)snprintf(t->data_dir, sizeof t->data_dir, "%s", o->data_dir) >= sizeof t->data_dir)
        rc = td_fail(err, -TD_ERR_ARG, "data_dir: the path is too long");
    if (rc < 0 || (rc = keep(t, o->model_path, &c->model_path)) < 0 ||
        (rc = keep(t, o->ca_path, &c->ca_path)) < 0 ||
        (rc = keep(t, o->client_cert_path, &c->cert_path)) < 0 ||
        (rc = keep(t, o->client_key_path, &c->key_path)) < 0 ||
        (rc = keep(t, o->words_path, &c->words_path)) < 0 ||
        (rc = keep(t, o->chat_template, &c->chat_template)) < 0)
        return rc;
    if (o->plain && !edge_is_loopback(t->cloud_host))
        return td_fail(err, -TD_ERR_ARG, "plain: only for a cloud on this machine");
    c->cloud_host = t->cloud_host;
    c->data_dir = t->data_dir;
    c->token = t->token;
    c->tls = !o->plain;
    c->kv_whole = o->kv_whole != 0;
    c->codec_unchecked = o->codec_unchecked != 0;
    c->filter_pii = !o->no_filter;
    return 0;
}

static void look(void *ctx)
{
    struct tandem *t = ctx;
    atomic_store(&t->ready, agent_unhealthy(t->agent) == NULL);
    net_timer_start(t->look, LOOK_US);
}

static void *run(void *arg)
{
    struct tandem *t = arg;
    net_loop_run(t->loop);
    return NULL;
}

static void release(struct tandem *t)
{
    if (t->agent)
        agent_shutdown(t->agent);
    net_loop_destroy(t->loop);
    agent_destroy(t->agent);
    while (t->calls)
        call_fail(t->calls, -TD_ERR_CLOSED, "the agent was closed");
    if (t->look)
        net_timer_destroy(t->look);
    for (size_t i = 0; i < TD_COUNT(t->strings); i++)
        free(t->strings[i]);
    crypto_wipe(t->token, sizeof t->token);
    free(t);
}

int tandem_open(const struct tandem_options *options, struct tandem **out, char *error, size_t error_size)
{
    static const struct tandem_options defaults = TANDEM_OPTIONS_INIT;
    struct td_error err = {0};
    if (!options || !out || options->size < offsetof(struct tandem_options, cloud)) {
        td_fail(&err, -TD_ERR_ARG, "options: want TANDEM_OPTIONS_INIT");
        return fail_open(error, error_size, &err, -TD_ERR_ARG);
    }
    TAKE(struct tandem_options, options, defaults);
    log_set_level(LOG_WARN); /* the terminal is the application's */
    struct tandem *t = calloc(1, sizeof *t);
    if (!t)
        return fail_open(error, error_size, &err, -TD_ERR_NOMEM);
    int rc = take_options(t, &taken, &err);
    if (rc == 0 && !(t->loop = net_loop_create(&err)))
        rc = -TD_ERR_NOMEM;
    if (rc == 0)
        rc = agent_create(&t->config, t->loop, &t->agent, &err);
    if (rc == 0 && !(t->look = net_timer_create(t->loop, look, t)))
        rc = -TD_ERR_NOMEM;
    if (rc == 0) {
        agent_connect(t->agent);
        net_timer_start(t->look, 1);
        t->running = pthread_create(&t->thread, NULL, run, t) == 0;
        rc = t->running ? 0 : -TD_ERR_NOMEM;
    }
    if (rc < 0) {
        release(t);
        return fail_open(error, error_size, &err, rc);
    }
    *out = t;
    return 0;
}

static void end_all(void *arg)
{
    struct tandem *t = arg;
    agent_end_flights(t->agent);
    net_loop_stop(t->loop);
}

void tandem_close(struct tandem *t)
{
    if (!t)
        return;
    atomic_store(&t->closing, true);
    net_loop_post_wait(t->loop, end_all, t);
    pthread_join(t->thread, NULL);
    release(t);
}

int tandem_wait_ready(struct tandem *t, uint32_t timeout_ms)
{
    uint64_t end_us = clock_mono_us() + timeout_ms * UINT64_C(1000);
    while (!atomic_load(&t->ready)) {
        if (clock_mono_us() >= end_us)
            return -TD_ERR_TIMEOUT;
        nanosleep(&(struct timespec){.tv_nsec = READY_POLL_NS}, NULL);
    }
    return 0;
}

/* ---- conversations: the store is safe from any thread ---- */

int tandem_conversations(struct tandem *t, char **json)
{
    return edge_conversations_list(t->agent, EDGE_PRINCIPAL, json);
}

int tandem_conversation_show(struct tandem *t, const char *id, char **json)
{
    return edge_conversation_show(t->agent, EDGE_PRINCIPAL, id, json);
}

int tandem_conversation_delete(struct tandem *t, const char *id)
{
    return edge_conversation_delete(t->agent, EDGE_PRINCIPAL, id);
}

void tandem_free(void *memory)
{
    free(memory);
}

const char *tandem_error_text(int code)
{
    return td_status_text(code);
}

const char *tandem_version(void)
{
    return TANDEM_VERSION;
}
