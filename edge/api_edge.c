/* api_edge: see api_edge.h. A flight is the handle of a call; its sink's context is the call. */
#include "edge/api_edge.h"
#include "shared/crypto.h"
#include <stdlib.h>

struct api_edge {
    struct agent *agent;
    struct api_server *server;
    bool has_key;
    uint8_t key_hash[TD_HASH_SIZE];
};

/* ---- the agent's answers go to the call ---- */

static void on_started(void *ctx, const char *conversation, const struct api_usage *usage)
{
    api_started(ctx, conversation[0] ? conversation : NULL, usage);
}

static void on_tokens(void *ctx, const int32_t *ids, size_t count, const struct api_logprob_in *logprobs)
{
    api_tokens(ctx, ids, count, logprobs);
}

static void on_done(void *ctx, unsigned finish, const struct api_usage *usage,
                    const struct api_timings *timings)
{
    api_done(ctx, finish, usage, timings);
}

static void on_failed(void *ctx, int code, const char *text, uint32_t retry_after_ms)
{
    api_error(ctx, code, text, retry_after_ms);
}

static void on_failed_context(void *ctx, uint32_t context_max, uint32_t asked_tokens, uint32_t prompt_tokens)
{
    api_error_context(ctx, context_max, asked_tokens, prompt_tokens);
}

static void on_not_kept(void *ctx)
{
    api_not_kept(ctx);
}

static const struct agent_sink sink = {on_started, on_tokens,         on_done,
                                       on_failed,  on_failed_context, on_not_kept};

/* ---- what the API asks ---- */

/* Hashes are compared, in constant time: neither length nor prefix of the key can be felt. */
static int authenticate(void *ctx, const char *bearer, struct api_identity *out)
{
    struct api_edge *e = ctx;
    uint8_t hash[TD_HASH_SIZE];
    sha256_once(bearer, strlen(bearer), hash);
    if (e->has_key && !crypto_equal(hash, e->key_hash, sizeof hash))
        return -TD_ERR_AUTH;
    memset(out, 0, sizeof *out);
    memcpy(out->tenant, EDGE_TENANT, sizeof EDGE_TENANT);
    memcpy(out->principal, EDGE_PRINCIPAL, sizeof EDGE_PRINCIPAL);
    return 0;
}

static int start(void *ctx, struct api_call *call, const struct api_identity *who,
                 const struct api_request *request, const char *idempotency_key, void **handle,
                 struct td_error *err)
{
    struct api_edge *e = ctx;
    struct flight *flight;
    int rc = agent_begin(e->agent, request, who->principal, idempotency_key, &sink, call, &flight, err);
    if (rc == 0)
        *handle = flight;
    return rc;
}

static void cancel(void *ctx, void *handle, bool finished, uint32_t keep_count)
{
    (void)ctx;
    agent_cancel(handle, finished, keep_count);
}

static int filter_output(void *ctx, void *handle, const char *text, size_t size, bool flush, char **out,
                         size_t *out_size)
{
    (void)ctx;
    return agent_restore(handle, text, size, flush, out, out_size);
}

static int conversations(void *ctx, const struct api_identity *who, char **json)
{
    struct api_edge *e = ctx;
    return edge_conversations_list(e->agent, who->principal, json);
}

static int conversation_show(void *ctx, const struct api_identity *who, const char *id, char **json)
{
    struct api_edge *e = ctx;
    return edge_conversation_show(e->agent, who->principal, id, json);
}

static int conversation_delete(void *ctx, const struct api_identity *who, const char *id)
{
    struct api_edge *e = ctx;
    return edge_conversation_delete(e->agent, who->principal, id);
}

static int conversation_fork(void *ctx, const struct api_identity *who, const char *id, char **json)
{
    struct api_edge *e = ctx;
    return edge_conversation_fork(e->agent, who->principal, id, json);
}

static int conversation_pin(void *ctx, const struct api_identity *who, const char *id, bool pinned,
                            char **json)
{
    struct api_edge *e = ctx;
    return edge_conversation_pin(e->agent, who->principal, id, pinned, json);
}

static int conversation_export(void *ctx, const struct api_identity *who, const char *id, char **json)
{
    struct api_edge *e = ctx;
    return edge_conversation_export(e->agent, who->principal, id, json);
}

static int conversation_import(void *ctx, const struct api_identity *who, const char *body, size_t size,
                               char **json, struct td_error *err)
{
    struct api_edge *e = ctx;
    return edge_conversation_import(e->agent, who->principal, body, size, json, err);
}

static const char *unhealthy(void *ctx)
{
    struct api_edge *e = ctx;
    return agent_unhealthy(e->agent);
}

static const struct api_ops ops = {
    .authenticate = authenticate,
    .start = start,
    .cancel = cancel,
    .filter_output = filter_output,
    .conversations = conversations,
    .conversation_show = conversation_show,
    .conversation_delete = conversation_delete,
    .conversation_fork = conversation_fork,
    .conversation_pin = conversation_pin,
    .conversation_export = conversation_export,
    .conversation_import = conversation_import,
    .unhealthy = unhealthy,
};

/* ---- life ---- */

struct api_edge *api_edge_create(struct agent *a, struct net_loop *loop, const char *api_key)
{
    struct api_edge *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    e->agent = a;
    e->has_key = api_key[0] != '\0';
    sha256_once(api_key, strlen(api_key), e->key_hash);
    struct api_config config = {
        .loop = loop,
        .tokenizer = agent_tokenizer(a),
        .model_name = agent_model_name(a),
        .ops = &ops,
        .ctx = e,
        .worker = agent_worker(a),
        .require_json = true,
        .call_count_max = AGENT_FLIGHTS_MAX,
    };
    e->server = api_create(&config);
    if (!e->server) {
        free(e);
        return NULL;
    }
    api_set_ready(e->server, true);
    return e;
}

void api_edge_destroy(struct api_edge *e)
{
    if (!e)
        return;
    api_destroy(e->server);
    free(e);
}

const struct http_handler *api_edge_http_handler(struct api_edge *e)
{
    return api_http_handler(e->server);
}
