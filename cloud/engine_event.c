/* engine_event: what the engine tells others: events of a sequence to its sink, figures to /metrics. */
#include "cloud/engine_internal.h"

#define REPLAY_WITH_LOGPROBS 16u /* tokens in one event: their log probabilities fit a frame's header */
#define REPLAY_TOKENS        4096u
#define RETRY_MS_MIN         1000u
#define RETRY_MS_MAX         60000u

/* --- events --------------------------------------------------------------------------------------- */

void engine_emit(struct sequence *s, struct engine_event *event)
{
    if (!s->sink || s->handle == 0)
        return;
    event->sequence = s->handle;
    s->sink(s->sink_ctx, event);
}

/* Of tokens that an edge held at OPEN nothing is known but what they are. */
void engine_emit_tokens(struct sequence *s, uint32_t index, uint32_t count)
{
    uint32_t held = s->plan_end - s->prompt_count;
    while (count > 0) {
        bool drawn = s->sampled && index >= held;
        uint32_t part = TD_MIN(count, drawn ? REPLAY_WITH_LOGPROBS : REPLAY_TOKENS);
        if (s->sampled && !drawn)
            part = TD_MIN(part, held - index);
        engine_emit(s, &(struct engine_event){.type = ENGINE_TOKENS,
                                              .tokens = {.index = index,
                                                         .count = part,
                                                         .ids = s->ids + s->prompt_count + index,
                                                         .sampled = drawn ? s->sampled + index : NULL}});
        index += part;
        count -= part;
    }
}

void engine_emit_done(struct sequence *s)
{
    uint64_t first = s->first_token_us ? s->first_token_us : s->opened_us;
    engine_emit(s, &(struct engine_event){.type = ENGINE_DONE,
                                          .done = {.finish = s->finish,
                                                   .prompt_tokens = s->prompt_count,
                                                   .completion_tokens = sequence_reply_count(s),
                                                   .cached_tokens = s->cached_tokens,
                                                   .prefill_tokens = s->prefill_tokens,
                                                   .recomputed_tokens = s->recomputed_tokens,
                                                   .read_tokens = s->read_tokens,
                                                   .queue_us = s->queue_us,
                                                   .load_us = s->load_us,
                                                   .ingest_wait_us = s->ingest_wait_us,
                                                   .prefill_us = s->prefill_us,
                                                   .first_token_us = first - s->opened_us,
                                                   .decode_us = TD_MAX(s->last_token_us, first) - first,
                                                   .uplink_size = s->uplink_size,
                                                   .uplink_raw_size = s->uplink_raw_size,
                                                   .ids = s->ids,
                                                   .ids_count = s->ids_count}});
}

void engine_emit_need(struct sequence *s)
{
    engine_emit(
        s, &(struct engine_event){.type = ENGINE_NEED, .need = {.epoch = s->epoch, .first_token = s->high}});
}

void engine_emit_failed(struct sequence *s, int code, const char *text, uint32_t retry_after_ms)
{
    engine_emit(
        s, &(struct engine_event){.type = ENGINE_FAILED,
                                  .failed = {.code = code, .text = text, .retry_after_ms = retry_after_ms}});
}

void engine_emit_ingested(struct engine *e, struct sequence *s)
{
    if (!s->ingested_dirty)
        return;
    uint32_t consumed = s->consumed_size;
    atomic_fetch_sub(&e->staged_size, consumed);
    s->consumed_size = 0;
    s->ingested_dirty = false;
    struct engine_event event = {.type = ENGINE_INGESTED,
                                 .ingested = {.epoch = s->epoch,
                                              .hidden_tokens = sequence_hidden_tokens(s, &e->model),
                                              .kv_tokens = sequence_kv_tokens(s),
                                              .run_tokens = TD_MIN(s->high, s->plan_end),
                                              .plan_begin = s->plan_begin,
                                              .refill_begin = s->refill_begin,
                                              .refill_end = s->refill_end,
                                              .left_begin = TD_MIN(s->left_from, s->plan_end),
                                              .left_end = s->plan_end,
                                              .queue_tokens = engine_queue_tokens(e, s),
                                              .consumed_size = consumed}};
    event.ingested.layer_ns = engine_layer_ns(e, &event.ingested.layer_slope_ns);
    engine_emit(s, &event);
}

/* Prompt tokens that have not run yet, of all sequences up to `before` (NULL: all). */
uint32_t engine_queue_tokens(const struct engine *e, const struct sequence *before)
{
    uint64_t tokens = 0;
    for (uint32_t i = 0; i < e->live_count && e->live[i] != before; i++) {
        const struct sequence *s = e->live[i];
        if (s->state != SEQ_CLOSING && s->high < s->plan_end)
            tokens += s->plan_end - s->high;
    }
    return (uint32_t)TD_MIN(tokens, (uint64_t)UINT32_MAX);
}

/* Prefill cost as it is measured: nanoseconds a token and layer at position 0, and how much more for each position before. 0: unknown. */
double engine_prefill_ns(const struct engine *e, double *slope)
{
    *slope = line_common_slope(&e->prefill_cost, &(struct line){0}, e->prefill_rise);
    return line_base_of_slope(&e->prefill_cost, *slope);
}

/* As devices are told it, the slope for each 1,024 positions. */
uint32_t engine_layer_ns(const struct engine *e, uint32_t *slope_ns)
{
    double slope, base = engine_prefill_ns(e, &slope);
    *slope_ns = (uint32_t)TD_MIN(slope * 1024, (double)UINT32_MAX);
    return (uint32_t)TD_MIN(base, (double)UINT32_MAX);
}

uint32_t engine_retry_after_ms(const struct engine *e)
{
    uint64_t ms =
        e->prefill_rows_per_s ? engine_queue_tokens(e, NULL) * UINT64_C(1000) / e->prefill_rows_per_s : 0;
    return (uint32_t)TD_MAX(RETRY_MS_MIN, TD_MIN(ms, (uint64_t)RETRY_MS_MAX));
}

/* --- figures -------------------------------------------------------------------------------------- */

void engine_metrics_init(struct engine_metrics *m)
{
    const double *bounds = METRIC_SECONDS_BOUNDS;
    size_t count = METRIC_SECONDS_BOUNDS_COUNT;
    m->running = metric_gauge("tandem_requests_running", NULL, "Generations that hold KV pages.");
    m->waiting = metric_gauge("tandem_requests_waiting", NULL, "Generations that wait for a place or pages.");
    m->parked = metric_gauge("tandem_generations_parked", NULL,
                             "Generations whose client is away, kept for its return.");
    m->pages_used =
        metric_gauge("tandem_kv_pages_used", NULL, "KV pages that hold blocks, cached ones included.");
    m->pages_free = metric_gauge("tandem_kv_pages_free", NULL, "KV pages that hold nothing.");
    m->pages_cached =
        metric_gauge("tandem_kv_pages_cached", NULL,
                     "KV pages of which the prefix cache holds a block; idle, all that are used.");
    m->prefix_queries =
        metric_counter("tandem_prefix_cache_queries_total", NULL, "Prompt tokens looked up in the caches.");
    m->prefix_hits =
        metric_counter("tandem_prefix_cache_hits_total", NULL, "Prompt tokens whose KV a cache had.");
    m->memory_hits =
        metric_counter("tandem_kv_tier_hits_total", "tier=\"memory\"", "Blocks found in a tier.");
    m->memory_misses =
        metric_counter("tandem_kv_tier_misses_total", "tier=\"memory\"", "Blocks not found in a tier.");
    m->prefill = metric_counter("tandem_prefill_tokens_total", NULL,
                                "Prompt tokens that the cloud ran through its layers.");
    m->edge_prefill = metric_counter("tandem_edge_prefill_tokens_total", NULL,
                                     "Prompt tokens whose first layers an edge computed.");
    m->generated = metric_counter("tandem_generated_tokens_total", NULL, "Reply tokens sampled.");
    m->drawn_by_device = metric_counter("tandem_drawn_by_device_total", NULL,
                                        "Reply tokens that the GPU drew itself, without copying logits.");
    m->recomputed = metric_counter("tandem_recomputed_tokens_total", NULL,
                                   "Tokens computed from ids because data of an edge was missing.");
    m->load_declined =
        metric_counter("tandem_kv_load_declined_total", NULL,
                       "Stored blocks that were computed again because reading them is slower.");
    m->preemptions =
        metric_counter("tandem_preemptions_total", NULL, "Generations that gave their pages to older ones.");
    m->rejected = metric_counter("tandem_ingest_rejected_total", NULL,
                                 "Messages of edges that were damaged or refused.");
    m->persist_dropped =
        metric_counter("tandem_persist_dropped_total", NULL, "Finished blocks that did not reach the store.");
    m->device_pieces = metric_counter("tandem_kv_pieces_on_device_total", NULL,
                                      "KV pieces of edges that the GPU put into their pages itself.");
    m->swapped_out = metric_counter("tandem_kv_pages_swapped_total", "direction=\"out\"",
                                    "KV pages copied between the GPU and host memory kept for them.");
    m->swapped_in = metric_counter("tandem_kv_pages_swapped_total", "direction=\"in\"",
                                   "KV pages copied between the GPU and host memory kept for them.");
    m->swap_memory = metric_gauge("tandem_kv_swap_memory_bytes", NULL,
                                  "Host memory that is held, pinned, for KV pages of the GPU.");
    m->first_token = metric_histogram("tandem_time_to_first_token_seconds", NULL,
                                      "From OPEN to the first reply token.", bounds, count);
    m->inter_token =
        metric_histogram("tandem_inter_token_latency_seconds", NULL, "Between reply tokens.", bounds, count);
}

void engine_update_stats(struct engine *e)
{
    struct engine_stats stats = {.parked = e->parked_count,
                                 .pages_free = page_pool_free_count(e->pool),
                                 .pages_cached = prefix_cache_count(e->cache),
                                 .steps = e->steps,
                                 .rows = e->rows};
    stats.pages_used = page_pool_count(e->pool) - stats.pages_free;
    for (uint32_t i = 0; i < e->live_count; i++) {
        enum seq_state state = e->live[i]->state;
        stats.waiting += state == SEQ_WAITING;
        stats.running += state == SEQ_LOADING || state == SEQ_RUNNING;
    }
    memcpy(stats.load_us, e->load_us, sizeof stats.load_us);
    pthread_mutex_lock(&e->lock);
    e->stats = stats;
    pthread_mutex_unlock(&e->lock);
    metric_set(e->metrics.running, stats.running);
    metric_set(e->metrics.waiting, stats.waiting);
    metric_set(e->metrics.parked, stats.parked);
    metric_set(e->metrics.pages_used, stats.pages_used);
    metric_set(e->metrics.pages_free, stats.pages_free);
    metric_set(e->metrics.pages_cached, stats.pages_cached);
}
