/* direct: calls: from request to sequence, from events to the client. See direct.h. */
#include "cloud/direct_internal.h"
#include "shared/log.h"
#include <stdio.h>
#include <stdlib.h>

#define LOGPROBS_AT_ONCE 64u /* tokens with logprobs handed to the API at once */

/* ---- life ---- */

static void call_free(struct direct_call *c)
{
    struct direct *d = c->direct;
    if (c->freed)
        *c->freed = true;
    engine_port_unbind(d->service->engine, &c->listener);
    *(c->previous ? &c->previous->next : &d->calls) = c->next;
    if (c->next)
        c->next->previous = c->previous;
    d->call_count--;
    if (c->has_turn)
        turn_free(&c->turn);
    if (c->ids)
        crypto_wipe(c->ids, c->ids_count * sizeof *c->ids);
    free(c->ids);
    if (c->reply)
        crypto_wipe(c->reply, c->reply_count * sizeof *c->reply);
    free(c->reply);
    direct_free_texts(c);
    crypto_wipe(c, sizeof *c);
    free(c);
}

/* text may lie in the call. */
static void fail(struct direct_call *c, int code, const char *text, uint32_t retry_after_ms)
{
    struct api_call *api = c->api;
    char copy[TD_ERROR_TEXT_SIZE];
    snprintf(copy, sizeof copy, "%s", text);
    call_free(c);
    if (api)
        api_error(api, code, copy, retry_after_ms);
}

/* A code that the engine or the worker answered with. */
static void fail_code(struct direct_call *c, int code)
{
    if (code == -TD_ERR_FULL)
        fail(c, code, "too many requests are waiting; try again", DIRECT_RETRY_MS);
    else if (code == -TD_ERR_CLOSED)
        fail(c, code, "this node is shutting down; try again", DIRECT_RETRY_MS);
    else
        fail(c, code, td_status_text(code), 0);
}

/* ---- the request ---- */

/* Which generation this is, and its random numbers. */
static int choose_identity(struct direct_call *c, const struct api_request *r, const char *key)
{
    uint64_t seed;
    c->keyed = key[0] != '\0';
    if (c->keyed) {
        gen_id_from_key(c->own_key, key, c->request_id, &seed);
        hex_encode(c->request_id, sizeof c->request_id, c->request_key);
    } else if (crypto_random(c->request_id, sizeof c->request_id) < 0 ||
               crypto_random(&seed, sizeof seed) < 0) {
        return -TD_ERR_CRYPTO;
    }
    if (!r->has_seed)
        c->generate.sampling.seed = seed;
    return 0;
}

static int fill_call(struct direct_call *c, const struct api_identity *who, const struct api_request *r,
                     const char *key, struct td_error *err)
{
    if (r->prefer == API_PREFER_PRIVATE) /* silence would be a promise */
        return td_fail(
            err, -TD_ERR_UNSUPPORTED,
            "a prompt that is sent to the cloud itself cannot be private: ask an agent on the device");
    c->chat = r->chat;
    c->no_cache = r->no_cache;
    c->accept = (enum kv_accept)r->accept;
    c->generate.token_count_max = r->max_tokens;
    c->generate.ignore_end = r->ignore_end;
    c->generate.sampling = r->sampling;
    memcpy(c->tenant, who->tenant, sizeof c->tenant);
    memcpy(c->principal, who->principal, sizeof c->principal);
    if (r->conversation) {
        if (!r->chat)
            return td_fail(err, -TD_ERR_ARG, "'conversation' goes with chat completions only");
        c->conversation_named = true;
        snprintf(c->conversation, sizeof c->conversation, "%s", r->conversation);
    }
    int rc = service_keys(c->direct->service, c->tenant, c->principal, c->shared_key, c->own_key, err);
    if (rc == 0)
        rc = choose_identity(c, r, key);
    if (rc == 0)
        rc = sampler_check(&c->generate.sampling, err);
    return rc == 0 ? direct_copy_texts(c, r) : rc;
}

static struct direct_call *call_create(struct direct *d, struct api_call *api)
{
    struct direct_call *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->direct = d;
    c->api = api;
    c->started_us = clock_mono_us();
    c->next = d->calls;
    if (c->next)
        c->next->previous = c;
    d->calls = c;
    d->call_count++;
    return c;
}

static void on_prepared(struct io_job *job);

/* struct api_ops.start. Once this returns an error the API answers by itself. */
static int start(void *ctx, struct api_call *api, const struct api_identity *who, const struct api_request *r,
                 const char *idempotency_key, void **handle, struct td_error *err)
{
    struct direct *d = ctx;
    if (d->service->draining)
        return td_fail(err, -TD_ERR_CLOSED, "this node is shutting down; try again");
    struct direct_call *c = call_create(d, api);
    if (!c)
        return td_fail(err, -TD_ERR_NOMEM, "not enough memory for the request");
    int rc = fill_call(c, who, r, idempotency_key, err);
    if (rc == 0) {
        c->job.work = direct_prepare;
        c->job.done = on_prepared;
        c->job.owner = io_owner(c->tenant, c->principal);
        rc = io_worker_submit(d->service->io, &c->job);
        if (rc == -TD_ERR_FULL)
            td_fail(err, rc, "too many requests are waiting; try again");
    }
    if (rc < 0) {
        call_free(c);
        return rc;
    }
    *handle = c;
    return 0;
}

/* ---- the sequence ---- */

static void on_event(struct engine_listener *l, const struct engine_event *e);

/* Prompt and the reply's limit must fit the context together. */
static bool fits(const struct direct_call *c)
{
    return c->status == 0 &&
           (uint64_t)c->ids_count + c->generate.token_count_max <= c->direct->service->context_max;
}

static int open_sequence(struct direct_call *c)
{
    struct direct *d = c->direct;
    /* By the clock, so that it rises over restarts, and whatever that does: a repeat re-attaches. */
    d->attempt = TD_MAX(d->attempt + 1, clock_wall_us());
    struct engine_open open = {.prompt_count = c->ids_count,
                               .ids = c->ids,
                               .accept = c->accept,
                               .no_cache = c->no_cache,
                               .direct = true,
                               .generate = c->generate,
                               .attempt = d->attempt};
    memcpy(open.tenant, c->tenant, sizeof open.tenant);
    memcpy(open.principal, c->principal, sizeof open.principal);
    memcpy(open.shared_key, c->shared_key, CRYPTO_KEY_SIZE);
    memcpy(open.own_key, c->own_key, CRYPTO_KEY_SIZE);
    memcpy(open.request_id, c->request_id, GEN_REQUEST_ID_SIZE);
    c->ids = NULL; /* the engine's in any case */
    c->listener.on_event = on_event;
    c->state = DIRECT_RUNNING;
    int rc = engine_port_open(c->direct->service->engine, &open, &c->listener);
    crypto_wipe(open.shared_key, sizeof open.shared_key);
    crypto_wipe(open.own_key, sizeof open.own_key);
    return rc;
}

static void on_prepared(struct io_job *job)
{
    struct direct_call *c = (struct direct_call *)((char *)job - offsetof(struct direct_call, job));
    if (!c->api) {
        call_free(c);
        return;
    }
    if (c->status == -TD_ERR_CONTEXT || (c->status == 0 && !fits(c))) {
        struct api_call *api = c->api;
        uint32_t prompt = c->ids_count, context = c->direct->service->context_max;
        uint64_t asked = (uint64_t)prompt + c->generate.token_count_max;
        call_free(c);
        api_error_context(api, context, (uint32_t)TD_MIN(asked, (uint64_t)UINT32_MAX), prompt);
        return;
    }
    if (c->status < 0) {
        fail(c, c->status, c->error.text, 0);
        return;
    }
    int rc = open_sequence(c);
    if (rc < 0)
        fail_code(c, rc);
}

/* ---- events ---- */

static void on_opened(struct direct_call *c, const struct engine_event *e)
{
    c->usage.prompt_tokens = c->ids_count;
    c->usage.cached_tokens = e->opened.cached_tokens;
    if (c->api)
        api_started(c->api, c->chat ? c->conversation : NULL, &c->usage);
}

/* The API may call cancel inside, which may free the call. */
static bool give_tokens(struct direct_call *c, const int32_t *ids, uint32_t count,
                        const struct api_logprob_in *logprobs)
{
    bool freed = false;
    c->freed = &freed;
    api_tokens(c->api, ids, count, logprobs);
    if (freed)
        return false;
    c->freed = NULL;
    return c->api && !c->finishing;
}

struct logprob_buffers {
    struct api_logprob_in in[LOGPROBS_AT_ONCE];
    int32_t ids[LOGPROBS_AT_ONCE][SAMPLER_LOGPROBS_MAX];
    float values[LOGPROBS_AT_ONCE][SAMPLER_LOGPROBS_MAX];
};

static void convert_logprobs(struct logprob_buffers *b, const struct sampled *sampled, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t tops = TD_MIN(sampled[i].top_count, (uint32_t)SAMPLER_LOGPROBS_MAX);
        for (uint32_t j = 0; j < tops; j++) {
            b->ids[i][j] = sampled[i].top[j].id;
            b->values[i][j] = sampled[i].top[j].logprob;
        }
        b->in[i] = (struct api_logprob_in){sampled[i].logprob, tops, b->ids[i], b->values[i]};
    }
}

static void on_tokens(struct direct_call *c, const struct engine_event *e)
{
    if (!c->api || c->finishing)
        return;
    if (!e->tokens.sampled) {
        give_tokens(c, e->tokens.ids, e->tokens.count, NULL);
        return;
    }
    struct logprob_buffers buffers;
    for (uint32_t at = 0; at < e->tokens.count;) {
        uint32_t count = TD_MIN(LOGPROBS_AT_ONCE, e->tokens.count - at);
        convert_logprobs(&buffers, e->tokens.sampled + at, count);
        if (!give_tokens(c, e->tokens.ids + at, count, buffers.in))
            return;
        at += count;
    }
}

static void fill_timings(struct direct_call *c, const struct engine_event *e)
{
    struct api_timings *t = &c->timings;
    t->cloud_told = true;
    t->cloud_prefill_ms = (double)e->done.prefill_us / 1e3;
    t->queue_ms = (double)e->done.queue_us / 1e3;
    t->load_ms = (double)e->done.load_us / 1e3;
    t->first_token_ms = (double)e->done.first_token_us / 1e3;
    t->decode_ms = (double)e->done.decode_us / 1e3;
    t->total_ms = (double)(clock_mono_us() - c->started_us) / 1e3;
    t->cloud_prefill_tokens = e->done.prefill_tokens;
    t->recomputed_tokens = e->done.recomputed_tokens;
    t->cached_disk_tokens = e->done.read_tokens;
    t->cached_memory_tokens = e->done.cached_tokens - e->done.read_tokens;
    if (e->done.decode_us && c->usage.completion_tokens > 1) /* the first token is prefill's */
        t->tokens_per_s = (c->usage.completion_tokens - 1) * 1e6 / (double)e->done.decode_us;
}

/* The reply's ids, cut where a stop string ended it: the engine may have been a few tokens further. */
static int keep_reply(struct direct_call *c, const struct engine_event *e)
{
    uint32_t prompt = TD_MIN(e->done.prompt_tokens, e->done.ids_count);
    c->reply_count = e->done.ids_count - prompt;
    if (c->finishing)
        c->reply_count = TD_MIN(c->reply_count, c->keep_count);
    c->reply = malloc((c->reply_count + 1u) * sizeof *c->reply);
    if (!c->reply) {
        c->reply_count = 0;
        return -TD_ERR_NOMEM;
    }
    if (c->reply_count)
        memcpy(c->reply, e->done.ids + prompt, c->reply_count * sizeof *c->reply);
    return 0;
}

/* not_kept: there was a turn to be stored, and the conversation does not hold it. */
static void answer(struct direct_call *c, bool not_kept)
{
    struct api_call *api = c->api;
    unsigned finish = c->finish;
    struct api_usage usage = c->usage;
    struct api_timings timings = c->timings;
    call_free(c);
    if (api && not_kept)
        api_not_kept(api);
    if (api)
        api_done(api, finish, &usage, &timings);
}

static void report_save(struct direct_call *c)
{
    struct direct *d = c->direct;
    metric_add(c->status == 0 ? d->saved : d->save_failures, 1);
    if (c->status < 0 && log_limit_allows(&d->log_failures, clock_mono_us()))
        log_warn("cloud", "a turn of %s/%s was not saved: %s", c->tenant, c->principal,
                 td_status_text(c->status));
}

/* A client that named no conversation is matched by what it sends next: coming second costs it nothing. */
static void on_committed(struct io_job *job)
{
    struct direct_call *c = (struct direct_call *)((char *)job - offsetof(struct direct_call, job));
    if (c->status == -TD_ERR_CONFLICT && c->conversation_named) {
        fail(c, -TD_ERR_CONFLICT,
             "the conversation was continued by another request meanwhile; this turn is not part of it", 0);
        return;
    }
    if (c->status != -TD_ERR_CONFLICT)
        report_save(c);
    answer(c, c->status < 0);
}

static void commit(struct direct_call *c)
{
    c->state = DIRECT_COMMITTING;
    c->job.work = direct_commit;
    c->job.wait = direct_commit_wait;
    c->job.done = on_committed;
    if (io_worker_submit(c->direct->service->io, &c->job) == 0)
        return;
    metric_add(c->direct->save_failures, 1);
    if (log_limit_allows(&c->direct->log_failures, clock_mono_us()))
        log_warn("cloud", "a turn of %s/%s was not saved: too much is waiting for the store", c->tenant,
                 c->principal);
    turn_lost(&c->direct->turns, &c->input, &c->turn);
    answer(c, true);
}

static void on_done(struct direct_call *c, const struct engine_event *e)
{
    engine_port_unbind(c->direct->service->engine, &c->listener);
    c->finish = c->finishing ? FINISH_STOP : e->done.finish;
    int rc = keep_reply(c, e);
    c->usage = (struct api_usage){e->done.prompt_tokens, c->reply_count, e->done.cached_tokens};
    fill_timings(c, e);
    if (rc == 0 && c->api)
        rc = api_flush(c->api);
    if (rc < 0)
        fail_code(c, rc);
    else if (c->has_turn && c->finish != FINISH_ERROR && c->finish != FINISH_CANCELLED)
        commit(c);
    else
        answer(c, false);
}

static void on_event(struct engine_listener *l, const struct engine_event *e)
{
    struct direct_call *c = (struct direct_call *)l;
    switch (e->type) {
    case ENGINE_OPENED:
        on_opened(c, e);
        break;
    case ENGINE_INGESTED: /* nothing is uploaded here */
    case ENGINE_NEED:
        break;
    case ENGINE_TOKENS:
        on_tokens(c, e);
        break;
    case ENGINE_DONE:
        on_done(c, e);
        break;
    case ENGINE_FAILED:
        fail(c, e->failed.code < 0 ? e->failed.code : -e->failed.code,
             e->failed.text ? e->failed.text : td_status_text(e->failed.code), e->failed.retry_after_ms);
        break;
    }
}

/* ---- the rest of struct api_ops ---- */

static int authenticate(void *ctx, const char *bearer, struct api_identity *out)
{
    struct direct *d = ctx;
    struct auth_identity who;
    int rc = auth_check(d->service->auth, bearer, &who);
    if (rc < 0)
        return rc;
    if (strcmp(who.tenant, d->service->erasing) == 0)
        return -TD_ERR_AGAIN;
    memcpy(out->tenant, who.tenant, sizeof out->tenant);
    memcpy(out->principal, who.principal, sizeof out->principal);
    return 0;
}

/* The API has let go of its call unless it is `finished`. A worker that has the call frees it when it comes back. */
static void cancel(void *ctx, void *handle, bool finished, uint32_t keep_count)
{
    struct direct *d = ctx;
    struct direct_call *c = handle;
    if (finished && c->state != DIRECT_RUNNING) /* it is whole, and being stored */
        return;
    if (finished) {
        c->finishing = true;
        c->keep_count = keep_count;
        engine_port_cancel(d->service->engine, &c->listener, true, keep_count);
        return;
    }
    c->api = NULL;
    if (c->state != DIRECT_RUNNING)
        return;
    engine_port_cancel(d->service->engine, &c->listener, false, 0);
    call_free(c);
}

/* Nothing is filtered here; the text is kept, because the conversation's history is hashed over what the client saw. */
static int keep_text(void *ctx, void *handle, const char *text, size_t size, bool flush, char **out,
                     size_t *out_size)
{
    struct direct_call *c = handle;
    (void)ctx, (void)flush;
    if (c->text_size + size >= c->text_capacity) {
        size_t capacity = TD_MAX(2 * c->text_capacity, c->text_size + size + 256);
        char *grown = malloc(capacity);
        if (!grown)
            return -TD_ERR_NOMEM;
        if (c->text_size)
            memcpy(grown, c->text, c->text_size);
        if (c->text)
            crypto_wipe(c->text, c->text_size);
        free(c->text);
        c->text = grown;
        c->text_capacity = capacity;
    }
    char *copy = malloc(size + 1);
    if (!copy)
        return -TD_ERR_NOMEM;
    if (size) {
        memcpy(c->text + c->text_size, text, size);
        memcpy(copy, text, size);
    }
    c->text_size += size;
    *out = copy;
    *out_size = size;
    return 0;
}

static const char *unhealthy(void *ctx)
{
    const struct direct *d = ctx;
    return d->service->draining ? "this node is shutting down" : NULL;
}

/* ---- the server ---- */

static const struct api_ops ops = {.authenticate = authenticate,
                                   .start = start,
                                   .cancel = cancel,
                                   .filter_output = keep_text,
                                   .conversations = direct_conversation_list,
                                   .conversation_show = direct_conversation_show,
                                   .conversation_delete = direct_conversation_delete,
                                   .conversation_fork = direct_conversation_fork,
                                   .conversation_pin = direct_conversation_pin,
                                   .conversation_export = direct_conversation_export,
                                   .conversation_import = direct_conversation_import,
                                   .unhealthy = unhealthy};

struct direct *direct_create(struct service *service)
{
    struct direct *d = calloc(1, sizeof *d);
    if (!d)
        return NULL;
    d->service = service;
    d->turns = (struct turn_config){.tokenizer = service->tokenizer,
                                    .template_kind = service->template_kind,
                                    .conversations = service->conversations,
                                    .context_max = service->context_max};
    memcpy(d->turns.fingerprint, service->fingerprint, TD_HASH_SIZE);
    d->saved = metric_counter("tandem_conversations_saved_total", "door=\"api\"", "Conversations saved");
    d->save_failures = metric_counter("tandem_conversation_save_failures_total", "door=\"api\"",
                                      "Conversations that could not be saved");
    struct api_config config = {.loop = service->loop,
                                .tokenizer = service->tokenizer,
                                .model_name = service->model_name,
                                .ops = &ops,
                                .ctx = d,
                                .worker = service->io,
                                .call_count_max = DIRECT_CALLS_MAX};
    d->api = api_create(&config);
    if (!d->api) {
        free(d);
        return NULL;
    }
    return d;
}

/* The worker must have come to rest before: it may not have a call any more. */
void direct_destroy(struct direct *d)
{
    if (!d)
        return;
    api_destroy(d->api);
    while (d->calls)
        call_free(d->calls);
    free(d);
}

const struct http_handler *direct_http_handler(struct direct *d)
{
    return api_http_handler(d->api);
}

void direct_set_ready(struct direct *d, bool ready)
{
    api_set_ready(d->api, ready);
}

/* Whoever is being answered right now is let through: what was computed is only a few bytes more. */
void direct_tick(struct direct *d)
{
    for (struct direct_call *c = d->calls, *after; c; c = after) {
        after = c->next;
        if (c->state != DIRECT_RUNNING || auth_principal_valid(d->service->auth, c->tenant, c->principal))
            continue;
        engine_port_cancel(d->service->engine, &c->listener, false, 0);
        fail(c, -TD_ERR_AUTH, "the API key was revoked or has expired", 0);
    }
}

void direct_end_tenant(struct direct *d, const char *tenant, const char *why)
{
    for (struct direct_call *c = d->calls, *after; c; c = after) {
        after = c->next;
        if (strcmp(c->tenant, tenant) != 0)
            continue;
        struct api_call *api = c->api;
        if (c->state == DIRECT_RUNNING) {
            engine_port_cancel(d->service->engine, &c->listener, false, 0);
            fail(c, -TD_ERR_CANCELLED, why, 0);
        } else if (api) { /* the worker has it, and gives it back to be freed */
            c->api = NULL;
            api_error(api, -TD_ERR_CANCELLED, why, 0);
        }
    }
}

uint32_t direct_calls(const struct direct *d)
{
    return d->call_count;
}
