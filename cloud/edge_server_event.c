/* edge_server_event: events of the engine become frames of their stream. See edge_server.h. */
#include "cloud/edge_server_internal.h"
#include <stdlib.h>

#define TOKENS_A_FRAME   4096u
#define LOGPROBS_A_FRAME 32u /* with 20 alternatives each a header of about 6 KiB */

_Static_assert(LOGPROBS_A_FRAME *(SAMPLER_LOGPROBS_MAX * 10 + 32) < LIMIT_HEADER_SIZE,
               "logprobs of one TOKEN frame fit its header");

/* What an edge does not read piles up in its link until that is full: then it is no longer an edge to wait for. */
static bool sent(struct edge_connection *c, int rc)
{
    if (rc == 0)
        return true;
    if (rc != -TD_ERR_CLOSED)
        link_fail(c->link, rc, "the peer does not read");
    return false;
}

static void on_opened(struct edge_stream *s, const struct engine_event *e)
{
    Tandem__OpenAck m = TANDEM__OPEN_ACK__INIT;
    m.attempt = s->attempt;
    m.cached_tokens = e->opened.cached_tokens;
    m.cached_memory = e->opened.cached_memory;
    m.cached_disk = e->opened.cached_disk;
    m.reply_count = e->opened.reply_count;
    m.resumed = e->opened.resumed;
    m.load_us = e->opened.load_us;
    m.prefill_tokens_per_s = e->opened.prefill_tokens_per_s;
    m.queue_tokens = e->opened.queue_tokens;
    m.layer_ns = e->opened.layer_ns;
    m.layer_slope_ns = e->opened.layer_slope_ns;
    m.plan_wanted = e->opened.plan_wanted;
    m.epoch = e->opened.epoch;
    m.hidden_tokens = e->opened.hidden_tokens;
    m.kv_tokens = e->opened.kv_tokens;
    Tandem__Range ranges[LIMIT_RANGES], *pointers[LIMIT_RANGES];
    for (uint32_t i = 0; i < e->opened.range_count; i++) {
        const struct plan_range *r = &e->opened.ranges[i];
        ranges[i] = (Tandem__Range)TANDEM__RANGE__INIT;
        ranges[i].first_token = r->first_token;
        ranges[i].count = r->count;
        ranges[i].layers = r->layers;
        ranges[i].codec = r->codec;
        ranges[i].hidden_dtype = r->hidden_dtype;
        pointers[i] = &ranges[i];
    }
    m.n_ranges = e->opened.range_count;
    m.ranges = pointers;
    sent(s->connection, link_send(s->connection->link, FRAME_OPEN_ACK, s->id, &m.base, NULL, 0));
}

static void on_ingested(struct edge_stream *s, const struct engine_event *e)
{
    struct edge_connection *c = s->connection;
    uint64_t consumed = TD_MIN((uint64_t)e->ingested.consumed_size, s->unconsumed_size);
    if (consumed) {
        s->unconsumed_size -= consumed;
        link_consumed(c->link, s->id, (size_t)consumed);
    }
    Tandem__Ingested m = TANDEM__INGESTED__INIT;
    m.epoch = e->ingested.epoch;
    m.hidden_tokens = e->ingested.hidden_tokens;
    m.kv_tokens = e->ingested.kv_tokens;
    m.run_tokens = e->ingested.run_tokens;
    m.plan_begin = e->ingested.plan_begin;
    m.refill_begin = e->ingested.refill_begin;
    m.refill_end = e->ingested.refill_end;
    m.left_begin = e->ingested.left_begin;
    m.left_end = e->ingested.left_end;
    m.queue_tokens = e->ingested.queue_tokens;
    m.layer_ns = e->ingested.layer_ns;
    m.layer_slope_ns = e->ingested.layer_slope_ns;
    sent(c, link_send(c->link, FRAME_INGESTED, s->id, &m.base, NULL, 0));
}

static void on_need(struct edge_stream *s, const struct engine_event *e)
{
    Tandem__Need m = TANDEM__NEED__INIT;
    m.epoch = e->need.epoch;
    m.first_token = e->need.first_token;
    sent(s->connection, link_send(s->connection->link, FRAME_NEED, s->id, &m.base, NULL, 0));
}

struct logprob_buffers { /* one TOKEN frame's, on the stack: no allocation per token */
    Tandem__TokenLogprobs messages[LOGPROBS_A_FRAME];
    Tandem__TokenLogprobs *pointers[LOGPROBS_A_FRAME];
    int32_t ids[LOGPROBS_A_FRAME][SAMPLER_LOGPROBS_MAX];
    float values[LOGPROBS_A_FRAME][SAMPLER_LOGPROBS_MAX];
};

static void fill_logprobs(struct logprob_buffers *b, const struct sampled *sampled, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t tops = TD_MIN(sampled[i].top_count, (uint32_t)SAMPLER_LOGPROBS_MAX);
        for (uint32_t j = 0; j < tops; j++) {
            b->ids[i][j] = sampled[i].top[j].id;
            b->values[i][j] = sampled[i].top[j].logprob;
        }
        Tandem__TokenLogprobs *m = &b->messages[i];
        *m = (Tandem__TokenLogprobs)TANDEM__TOKEN_LOGPROBS__INIT;
        m->logprob = sampled[i].logprob;
        m->n_top_ids = m->n_top_logprobs = tops;
        m->top_ids = b->ids[i];
        m->top_logprobs = b->values[i];
        b->pointers[i] = m;
    }
}

static bool send_tokens(struct edge_stream *s, uint32_t index, const int32_t *ids,
                        const struct sampled *sampled, uint32_t count)
{
    uint8_t payload[TOKENS_A_FRAME * 4];
    struct logprob_buffers buffers;
    Tandem__Token m = TANDEM__TOKEN__INIT;
    m.attempt = s->attempt;
    m.index = index;
    for (uint32_t i = 0; i < count; i++)
        store_le32(payload + 4 * i, (uint32_t)ids[i]);
    if (sampled) {
        fill_logprobs(&buffers, sampled, count);
        m.n_logprobs = count;
        m.logprobs = buffers.pointers;
    }
    return sent(s->connection,
                link_send(s->connection->link, FRAME_TOKEN, s->id, &m.base, payload, 4u * count));
}

static void on_tokens(struct edge_stream *s, const struct engine_event *e)
{
    uint32_t most = e->tokens.sampled ? LOGPROBS_A_FRAME : TOKENS_A_FRAME;
    for (uint32_t at = 0; at < e->tokens.count;) {
        uint32_t count = TD_MIN(most, e->tokens.count - at);
        if (!send_tokens(s, e->tokens.index + at, e->tokens.ids + at,
                         e->tokens.sampled ? e->tokens.sampled + at : NULL, count))
            return;
        at += count;
    }
}

/* A reply that ended at the client: the engine may have been a few tokens further when it heard. */
static uint32_t kept_count(const struct edge_stream *s, const struct engine_event *e)
{
    uint64_t end = (uint64_t)e->done.prompt_tokens + s->keep_count;
    return s->finishing ? (uint32_t)TD_MIN(end, (uint64_t)e->done.ids_count) : e->done.ids_count;
}

static void on_done(struct edge_stream *s, const struct engine_event *e)
{
    struct edge_connection *c = s->connection;
    Tandem__Timings t = TANDEM__TIMINGS__INIT;
    t.queue_us = e->done.queue_us;
    t.load_us = e->done.load_us;
    t.ingest_wait_us = e->done.ingest_wait_us;
    t.prefill_us = e->done.prefill_us;
    t.first_token_us = e->done.first_token_us;
    t.decode_us = e->done.decode_us;
    t.prefill_tokens = e->done.prefill_tokens;
    t.recomputed_tokens = e->done.recomputed_tokens;
    t.read_tokens = e->done.read_tokens;
    t.uplink_size = e->done.uplink_size;
    t.uplink_raw_size = e->done.uplink_raw_size;
    Tandem__Done m = TANDEM__DONE__INIT;
    m.attempt = s->attempt;
    m.finish = s->finishing ? FINISH_STOP : e->done.finish;
    m.prompt_tokens = e->done.prompt_tokens;
    m.completion_tokens = kept_count(s, e) - TD_MIN(e->done.prompt_tokens, e->done.ids_count);
    m.cached_tokens = e->done.cached_tokens;
    m.timings = &t;
    if (s->conversation[0] && !s->no_persist && e->done.finish != FINISH_ERROR)
        edge_conversation_save(s, e->done.ids, kept_count(s, e));
    uint32_t id = s->id;
    edge_stream_free(s);
    sent(c, link_send(c->link, FRAME_DONE, id, &m.base, NULL, 0));
}

/* May the same request succeed a little later? */
static bool passes(int code)
{
    return code == -TD_ERR_FULL || code == -TD_ERR_BUSY || code == -TD_ERR_CLOSED || code == -TD_ERR_AGAIN ||
           code == -TD_ERR_NOMEM || code == -TD_ERR_NOSPACE || code == -TD_ERR_TIMEOUT;
}

static void on_failed(struct edge_stream *s, const struct engine_event *e)
{
    int code = e->failed.code < 0 ? e->failed.code : -e->failed.code;
    uint32_t retry_ms = e->failed.retry_after_ms;
    if (retry_ms == 0 && passes(code))
        retry_ms = EDGE_RETRY_MS;
    engine_port_unbind(s->connection->server->service->engine, &s->listener);
    edge_stream_fail(s, code, e->failed.text ? e->failed.text : td_status_text(code), retry_ms);
}

void edge_stream_event(struct engine_listener *l, const struct engine_event *e)
{
    struct edge_stream *s = (struct edge_stream *)l;
    struct edge_connection *c = s->connection;
    switch (e->type) {
    case ENGINE_OPENED:
        on_opened(s, e);
        break;
    case ENGINE_INGESTED:
        on_ingested(s, e);
        break;
    case ENGINE_NEED:
        on_need(s, e);
        break;
    case ENGINE_TOKENS:
        on_tokens(s, e);
        break;
    case ENGINE_DONE:
        on_done(s, e);
        break;
    case ENGINE_FAILED:
        on_failed(s, e);
        break;
    }
    edge_connection_flush(c);
}
