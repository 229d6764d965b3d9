/* edge_server_stream: frames of a stream become commands of the engine. See edge_server.h.
 *
 * The edge sends OPEN, PLAN, GENERATE and its first HIDDEN in one flight. While the ids of the conversation that OPEN named are being read,
 * what follows waits in the stream, in order; it is bounded by the link's windows and EDGE_WAITING_MAX. */
#include "cloud/edge_server_internal.h"
#include <stdlib.h>

/* ---- commands ---- */

static int make_plan(struct edge_command *cmd, const Tandem__Plan *m)
{
    cmd->type = EDGE_PLAN;
    cmd->plan.epoch = m->epoch;
    cmd->plan.count = (uint32_t)m->n_ranges;
    cmd->plan.rows_patience_ms = m->rows_patience_ms;
    cmd->plan.rows_patience_token_us = m->rows_patience_token_us;
    cmd->plan.kv_patience_ms = m->kv_patience_ms;
    cmd->plan.resumes = m->resumes;
    for (size_t i = 0; i < m->n_ranges; i++) {
        const Tandem__Range *r = m->ranges[i];
        if (r->codec > UINT8_MAX || r->hidden_dtype > UINT8_MAX)
            return -TD_ERR_UNSUPPORTED;
        cmd->plan.ranges[i] = (struct plan_range){.first_token = r->first_token,
                                                  .count = r->count,
                                                  .layers = r->layers,
                                                  .codec = (uint8_t)r->codec,
                                                  .hidden_dtype = (uint8_t)r->hidden_dtype};
    }
    return 0;
}

static int make_hidden(struct edge_command *cmd, const Tandem__Hidden *m)
{
    if (m->dtype > UINT8_MAX)
        return -TD_ERR_UNSUPPORTED;
    cmd->type = EDGE_HIDDEN;
    cmd->hidden.epoch = m->epoch;
    cmd->hidden.first_token = m->first_token;
    cmd->hidden.count = m->count;
    cmd->hidden.layer = m->layer;
    cmd->hidden.dtype = (uint8_t)m->dtype;
    return 0;
}

/* Layer and K or V stand in the piece's own head as well, and that one is checked. */
static int make_kv(struct edge_command *cmd, const Tandem__KvBlock *m)
{
    cmd->type = EDGE_KV;
    cmd->kv.epoch = m->epoch;
    cmd->kv.block_index = m->block_index;
    return 0;
}

static int make_generate(struct edge_command *cmd, const Tandem__Generate *m, struct span bias)
{
    cmd->type = EDGE_GENERATE;
    struct engine_generate *g = &cmd->generate;
    *g = (struct engine_generate){
        .token_count_max = m->token_count_max, .ignore_end = m->ignore_end, .no_persist = m->no_persist};
    struct sampler_params *p = &g->sampling;
    sampler_defaults(p);
    p->temperature = m->temperature;
    p->top_k = m->top_k;
    p->top_p = m->top_p;
    p->min_p = m->min_p;
    p->repetition_penalty = m->repetition_penalty;
    p->repetition_window = m->repetition_window;
    p->presence_penalty = m->presence_penalty;
    p->frequency_penalty = m->frequency_penalty;
    p->seed = m->seed;
    p->want_logprobs = m->logprobs;
    p->logprob_count = m->top_logprobs;
    p->bias_count = (uint32_t)(bias.size / 8);
    if (p->bias_count > SAMPLER_BIAS_MAX)
        return -TD_ERR_LIMIT;
    for (uint32_t i = 0; i < p->bias_count; i++) {
        uint32_t bits = load_le32(bias.data + 8 * i + 4);
        p->bias[i].id = (int32_t)load_le32(bias.data + 8 * i);
        memcpy(&p->bias[i].bias, &bits, sizeof bits);
    }
    return 0;
}

static void command_drop(struct edge_command *cmd)
{
    if (cmd->payload)
        crypto_wipe(cmd->payload, cmd->payload_size);
    free(cmd->payload);
    cmd->payload = NULL;
}

/* Takes the payload. */
static int command_run(struct edge_stream *s, struct edge_command *cmd)
{
    struct engine *e = engine_port_engine(s->connection->server->service->engine);
    uint64_t sequence = s->listener.sequence;
    uint8_t *payload = cmd->payload;
    if (!e) {
        command_drop(cmd);
        return -TD_ERR_CLOSED;
    }
    cmd->payload = NULL;
    int rc;
    switch (cmd->type) {
    case EDGE_PLAN:
        rc = engine_patience(e, sequence, cmd->plan.rows_patience_ms, cmd->plan.rows_patience_token_us,
                             cmd->plan.kv_patience_ms);
        return rc < 0 ? rc
                      : engine_plan(e, sequence, cmd->plan.epoch, cmd->plan.ranges, cmd->plan.count,
                                    cmd->plan.resumes);
    case EDGE_HIDDEN:
        return engine_hidden(e, sequence, cmd->hidden.epoch, cmd->hidden.first_token, cmd->hidden.count,
                             cmd->hidden.layer, cmd->hidden.dtype, payload, cmd->payload_size);
    case EDGE_KV:
        return engine_kv(e, sequence, cmd->kv.epoch, cmd->kv.block_index, payload, cmd->payload_size);
    case EDGE_GENERATE:
        return engine_start(e, sequence, &cmd->generate);
    }
    return -TD_ERR_INTERNAL;
}

static int command_wait(struct edge_stream *s, const struct edge_command *cmd)
{
    if (s->waiting_count == EDGE_WAITING_MAX)
        return -TD_ERR_LIMIT;
    struct edge_command *copy = malloc(sizeof *copy);
    if (!copy)
        return -TD_ERR_NOMEM;
    *copy = *cmd;
    copy->next = NULL;
    *s->waiting_last = copy;
    s->waiting_last = &copy->next;
    s->waiting_count++;
    return 0;
}

/* ---- streams ---- */

static struct edge_stream *edge_stream_find(struct edge_connection *c, uint32_t id)
{
    struct edge_stream *s = c->streams;
    while (s && s->id != id)
        s = s->next;
    return s;
}

void edge_stream_free(struct edge_stream *s)
{
    struct edge_connection *c = s->connection;
    struct edge_stream **at = &c->streams;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    engine_port_unbind(c->server->service->engine, &s->listener);
    if (s->reading)
        edge_conversation_forget(s);
    while (s->waiting) {
        struct edge_command *next = s->waiting->next;
        command_drop(s->waiting);
        free(s->waiting);
        s->waiting = next;
    }
    if (s->unconsumed_size)
        link_consumed(c->link, s->id, (size_t)s->unconsumed_size);
    metric_set(c->server->streams_gauge, --c->server->stream_count);
    free(s);
}

void edge_stream_send_error(struct edge_connection *c, uint32_t id, int code, const char *text,
                            uint32_t retry_after_ms)
{
    Tandem__Error m = TANDEM__ERROR__INIT;
    char cut[LIMIT_TEXT_SIZE + 1];
    size_t size = strnlen(text, LIMIT_TEXT_SIZE);
    memcpy(cut, text, size);
    cut[size] = '\0';
    m.code = (uint32_t)(code < 0 ? -code : code);
    m.text = cut;
    m.retry = retry_after_ms > 0;
    m.retry_after_ms = retry_after_ms;
    int rc = link_send(c->link, FRAME_ERROR, id, &m.base, NULL, 0);
    if (rc < 0 && rc != -TD_ERR_CLOSED)
        link_fail(c->link, rc, "the peer does not read");
}

void edge_stream_fail(struct edge_stream *s, int code, const char *text, uint32_t retry_after_ms)
{
    struct edge_connection *c = s->connection;
    uint32_t id = s->id;
    engine_port_cancel(c->server->service->engine, &s->listener, false, 0);
    edge_stream_free(s); /* before ERROR ends the stream in the link: its bytes are granted again */
    edge_stream_send_error(c, id, code, text, retry_after_ms);
    edge_connection_flush(c);
}

/* The engine did not take a command. */
static void fail_command(struct edge_stream *s, int code)
{
    bool full = code == -TD_ERR_FULL, closed = code == -TD_ERR_CLOSED;
    const char *text = full     ? "this node is overloaded"
                       : closed ? "this node is shutting down"
                                : td_status_text(code);
    edge_stream_fail(s, code, text, full || closed ? EDGE_RETRY_MS : 0);
}

void edge_stream_begin(struct edge_stream *s, struct engine_open *open)
{
    struct service *service = s->connection->server->service;
    s->listener.on_event = edge_stream_event;
    int rc = engine_port_open(service->engine, open, &s->listener);
    while (rc == 0 && s->waiting) {
        struct edge_command *cmd = s->waiting;
        s->waiting = cmd->next;
        rc = command_run(s, cmd);
        free(cmd);
    }
    if (rc < 0) {
        fail_command(s, rc);
        return;
    }
    s->waiting_last = &s->waiting;
    s->waiting_count = 0;
}

/* ---- OPEN ---- */

int edge_stream_ids(struct span payload, uint32_t vocab_count, int32_t **out)
{
    size_t count = payload.size / 4;
    int32_t *ids = malloc((count + 1) * sizeof *ids);
    if (!ids)
        return -TD_ERR_NOMEM;
    for (size_t i = 0; i < count; i++) {
        uint32_t id = load_le32(payload.data + 4 * i);
        if (id >= vocab_count) {
            crypto_wipe(ids, i * sizeof *ids);
            free(ids);
            return -TD_ERR_FORMAT;
        }
        ids[i] = (int32_t)id;
    }
    *out = ids;
    return 0;
}

/* A name is the device's own; under the principal's key, and chained to the one before, it becomes one that nobody else's can equal, whoever knows it, and
 * whose blocks hang behind each other as all blocks do, whatever a device sends. */
static void name_private(const struct edge_connection *c, const struct kv_block_id *previous,
                         const uint8_t name[TD_HASH_SIZE], struct kv_block_id *out)
{
    static const char label[] = "tandem-private-block"; /* with its NUL */
    struct span parts[] = {{(const uint8_t *)label, sizeof label},
                           {previous->bytes, sizeof previous->bytes},
                           {name, TD_HASH_SIZE}};
    hmac_sha256(c->own_key, parts, TD_COUNT(parts), out->bytes);
}

/* A private prompt: names of its whole blocks, and the reply tokens that the edge holds, which came from here. */
static int decode_private(const struct edge_connection *c, const Tandem__Open *m, struct span payload,
                          uint32_t vocab_count, struct engine_open *open)
{
    static const struct kv_block_id root;
    uint32_t blocks = m->prompt_count / KV_BLOCK_TOKENS;
    struct span held = {payload.data + (size_t)blocks * TD_HASH_SIZE, m->held_count * sizeof(uint32_t)};
    int32_t *reply = NULL;
    int rc = edge_stream_ids(held, vocab_count, &reply);
    if (rc < 0)
        return rc;
    open->ids = malloc(((size_t)m->prompt_count + m->held_count) * sizeof *open->ids);
    open->names = malloc((blocks + 1) * sizeof *open->names);
    if (open->ids && open->names) {
        memset(open->ids, 0xff, m->prompt_count * sizeof *open->ids);
        memcpy(open->ids + m->prompt_count, reply, held.size);
        for (uint32_t i = 0; i < blocks; i++)
            name_private(c, i ? &open->names[i - 1] : &root, payload.data + (size_t)i * TD_HASH_SIZE,
                         &open->names[i]);
        memcpy(open->prompt_tag, m->prompt_tag.data, sizeof open->prompt_tag);
    } else {
        rc = -TD_ERR_NOMEM; /* what there is of the two, the caller frees */
    }
    free(reply);
    return rc;
}

static int check_open(const struct edge_connection *c, const Tandem__Open *m, const char **text)
{
    const struct service *s = c->server->service;
    *text = "this node is shutting down";
    if (s->draining)
        return -TD_ERR_CLOSED;
    *text = "the prompt is longer than the context";
    /* a reply that fills it is whole, and only to be ended */
    if (m->prompt_count >= s->context_max || m->prompt_count + m->held_count > s->context_max)
        return -TD_ERR_CONTEXT;
    *text = "OPEN asks for a fidelity that does not exist";
    if (m->accept > KV_ACCEPT_ANY)
        return -TD_ERR_ARG;
    *text =
        "edge and cloud compute with other arithmetic, so nothing that both take part in is exact: ask for "
        "visible-lossless";
    if (m->accept == KV_ACCEPT_EXACT && c->numerics != s->numerics)
        return -TD_ERR_UNSUPPORTED;
    *text = "OPEN names a part of a conversation, but no conversation";
    if (m->conversation_length > 0 && !m->conversation[0])
        return -TD_ERR_ARG;
    return 0;
}

static void fill_open(struct engine_open *open, const struct edge_connection *c, const Tandem__Open *m)
{
    *open = (struct engine_open){.attempt = m->attempt,
                                 .prompt_count = m->prompt_count,
                                 .held_count = m->held_count,
                                 .accept = (enum kv_accept)m->accept,
                                 .edge_numerics = (uint8_t)c->numerics,
                                 .no_cache = m->no_cache,
                                 .is_private = m->private_prompt,
                                 .resumes = m->resumes};
    memcpy(open->tenant, c->who.tenant, sizeof open->tenant);
    memcpy(open->principal, c->who.principal, sizeof open->principal);
    memcpy(open->shared_key, c->shared_key, CRYPTO_KEY_SIZE);
    memcpy(open->own_key, c->own_key, CRYPTO_KEY_SIZE);
    memcpy(open->seal_key, c->seal_key, CRYPTO_KEY_SIZE);
    memcpy(open->request_id, m->request_id.data, GEN_REQUEST_ID_SIZE);
}

static struct edge_stream *stream_create(struct edge_connection *c, uint32_t id, const Tandem__Open *m)
{
    struct edge_stream *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->connection = c;
    s->id = id;
    s->attempt = m->attempt;
    s->waiting_last = &s->waiting;
    memcpy(s->request_id, m->request_id.data, GEN_REQUEST_ID_SIZE);
    memcpy(s->conversation, m->conversation, strlen(m->conversation) + 1); /* LIMIT_NAME_SIZE: wire_check */
    s->next = c->streams;
    c->streams = s;
    metric_set(c->server->streams_gauge, ++c->server->stream_count);
    return s;
}

/* The ids that were sent end with the held reply tokens. */
static bool held_as_promised(const Tandem__Open *m, const int32_t *ids, size_t count)
{
    if (m->held_count == 0)
        return true;
    uint8_t hash[TD_HASH_SIZE];
    ids_hash(ids + count - m->held_count, m->held_count, hash);
    return memcmp(hash, m->held_hash.data, TD_HASH_SIZE) == 0;
}

static int on_open(struct edge_connection *c, const struct wire_frame *f)
{
    struct service *service = c->server->service;
    const Tandem__Open *m = f->open;
    const char *text = "not enough memory";
    struct engine_open open;
    fill_open(&open, c, m);
    struct edge_stream *s = NULL;
    int rc = check_open(c, m, &text);
    if (rc == 0 &&
        (rc = m->private_prompt ? decode_private(c, m, f->payload, service->vocab_count, &open)
                                : edge_stream_ids(f->payload, service->vocab_count, &open.ids)) < 0)
        text = rc == -TD_ERR_FORMAT ? "OPEN carries a token id that the model does not have"
                                    : "not enough memory";
    size_t ids_count = m->private_prompt ? (size_t)m->prompt_count + m->held_count : f->payload.size / 4;
    if (rc == 0 && !held_as_promised(m, open.ids, ids_count))
        rc = -TD_ERR_CHECKSUM, text = "OPEN carries other reply tokens than it says";
    if (rc == 0 && !(s = stream_create(c, f->stream, m)))
        rc = -TD_ERR_NOMEM, text = "not enough memory";
    if (rc < 0) {
        if (open.ids)
            crypto_wipe(open.ids, ids_count * sizeof *open.ids);
        free(open.ids);
        free(open.names);
        edge_stream_send_error(c, f->stream, rc, text,
                               rc == -TD_ERR_CLOSED || rc == -TD_ERR_NOMEM ? EDGE_RETRY_MS : 0);
    } else if (m->conversation_length == 0) {
        edge_stream_begin(s, &open);
    } else {
        rc = edge_conversation_read(s, &open, m->conversation_length, m->conversation_hash.data);
        if (rc < 0)
            fail_command(s, rc);
    }
    crypto_wipe(open.shared_key, sizeof open.shared_key);
    crypto_wipe(open.own_key, sizeof open.own_key);
    crypto_wipe(open.seal_key, sizeof open.seal_key);
    return 0;
}

/* ---- the other frames ---- */

static int on_cancel(struct edge_stream *s, const Tandem__Cancel *m)
{
    struct service *service = s->connection->server->service;
    if (m->finished && s->listener.bound) { /* ENGINE_DONE follows */
        s->finishing = true;
        s->keep_count = m->keep_count;
        engine_port_cancel(service->engine, &s->listener, true, m->keep_count);
        return 0;
    }
    engine_port_cancel(service->engine, &s->listener, false, 0);
    edge_stream_free(s);
    return 0;
}

static int make_command(struct edge_stream *s, const struct wire_frame *f, struct edge_command *cmd)
{
    cmd->payload = NULL;
    cmd->payload_size = 0;
    switch (f->type) {
    case FRAME_PLAN:
        return make_plan(cmd, f->plan);
    case FRAME_HIDDEN:
        return make_hidden(cmd, f->hidden);
    case FRAME_KV_BLOCK:
        return make_kv(cmd, f->kv_block);
    case FRAME_GENERATE:
        if (s->generate_seen)
            return -TD_ERR_PROTOCOL;
        s->generate_seen = true;
        s->no_persist = f->generate->no_persist;
        return make_generate(cmd, f->generate, f->payload);
    default:
        return -TD_ERR_UNSUPPORTED;
    }
}

static int on_command(struct edge_stream *s, const struct wire_frame *f)
{
    struct edge_command cmd;
    struct td_error err = {0};
    int rc = make_command(s, f, &cmd);
    if (rc == 0 && cmd.type == EDGE_GENERATE)
        rc = sampler_check(&cmd.generate.sampling, &err);
    if (rc == 0 && frame_is_bulk(f->type)) {
        cmd.payload = malloc(f->payload.size);
        if (!cmd.payload)
            rc = -TD_ERR_NOMEM;
        else
            memcpy(cmd.payload, f->payload.data, f->payload.size);
        cmd.payload_size = f->payload.size;
    }
    if (frame_is_bulk(f->type)) /* also when refused: the stream's end grants it again */
        s->unconsumed_size += f->payload.size;
    if (rc == 0)
        rc = s->reading ? command_wait(s, &cmd) : command_run(s, &cmd);
    if (rc == 0)
        return 0;
    command_drop(&cmd);
    if (err.text[0])
        edge_stream_fail(s, rc, err.text, 0);
    else
        fail_command(s, rc);
    return 0;
}

int edge_stream_frame(struct edge_connection *c, const struct wire_frame *f)
{
    if (f->type == FRAME_OPEN)
        return on_open(c, f);
    struct edge_stream *s = edge_stream_find(c, f->stream);
    if (!s && f->type == FRAME_FETCH)
        return edge_fetch_begin(c, f);
    if (!s && f->type == FRAME_CANCEL)
        edge_fetch_cancelled(c, f->stream);
    if (!s || s->finishing) { /* it is over here; the edge did not know when it sent this */
        if (frame_is_bulk(f->type))
            link_consumed(c->link, f->stream, f->payload.size);
        return 0;
    }
    return f->type == FRAME_CANCEL ? on_cancel(s, f->cancel) : on_command(s, f);
}
