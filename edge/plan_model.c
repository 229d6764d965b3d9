/* plan_model: see plan_model.h. */
#include "edge/plan_model.h"
#include "protocol/wire.h"
#include "shared/base.h"
#include <math.h>

struct stages {
    const struct plan_model *m;
    const struct plan_progress *at;
    double edge_us, link_us, cloud_us; /* when each is free */
    double backlog;                    /* KV bytes that wait for the link */
    double refill_us;                  /* the cloud's work on [0, k) of ranges whose KV does not come */
    uint32_t deepest;                  /* k of earlier ranges */
    struct plan_times times;
};

static double cost_us(const struct plan_cost *c, uint32_t begin, uint32_t end, uint32_t layers)
{
    double tokens = end - begin;
    return tokens * layers * (c->base_ns + c->slope_ns * (begin + tokens / 2)) * 1e-3;
}

double plan_model_edge_us(const struct plan_model *m, uint32_t begin, uint32_t end, uint32_t layers)
{
    return cost_us(&m->edge, begin, end, layers);
}

bool plan_model_sealed_pays(const struct plan_model *m, uint32_t tokens)
{
    double size = (double)tokens * m->layer_count * m->sealed_size;
    return size < cost_us(&m->cloud, 0, tokens, m->layer_count) * m->rate_bytes_per_us;
}

static double cloud_works(struct stages *s, uint32_t begin, uint32_t end, uint32_t layers)
{
    double us = cost_us(&s->m->cloud, begin, end, layers);
    s->times.cloud_us += us;
    return us;
}

static double send_us(const struct stages *s, double size)
{
    return size / s->m->rate_bytes_per_us;
}

/* Until all KV that was made so far is in the cloud. */
static double kv_there_us(const struct stages *s)
{
    return s->link_us + send_us(s, s->backlog) + (s->backlog > 0 ? s->m->delay_us : 0);
}

/* Something reads layers of all earlier positions: they come, or are computed. */
static void complete_kv(struct stages *s)
{
    s->cloud_us = TD_MAX(s->cloud_us, s->deepest ? kv_there_us(s) : 0) + s->refill_us;
    s->times.cloud_us += s->refill_us;
    s->refill_us = 0;
    s->link_us += send_us(s, s->backlog);
    s->backlog = 0;
    s->deepest = 0;
}

/* Rows that are ready at `ready_us`; returns when they are in the cloud. KV uses the gap before them. */
static double send_rows(struct stages *s, double ready_us, double size)
{
    double gap_us = ready_us - s->link_us;
    if (gap_us > 0) {
        s->backlog = TD_MAX(s->backlog - gap_us * s->m->rate_bytes_per_us, 0);
        s->link_us = ready_us;
    }
    double front = TD_MIN(s->backlog, PLAN_MODEL_FRONT_US * s->m->rate_bytes_per_us);
    s->backlog -= front;
    s->link_us += send_us(s, front + size);
    return s->link_us + s->m->delay_us;
}

static void edge_chunk(struct stages *s, const struct plan_range *r, uint32_t begin, uint32_t end)
{
    const struct plan_model *m = s->m;
    bool whole = r->layers == m->layer_count;
    uint32_t tokens = end - begin;
    if (end > s->at->computed && r->codec != KV_SEALED) {
        double us = cost_us(&m->edge, TD_MAX(begin, s->at->computed), end, r->layers);
        s->edge_us += us;
        s->times.edge_us += us;
    }
    double there_us = 0;
    if (end > s->at->rows && (!whole || end == plan_range_end(r)))
        there_us = send_rows(s, s->edge_us, (whole ? 1 : tokens) * m->row_size[r->hidden_dtype]);
    if (r->codec == PLAN_CODEC_NONE)
        s->refill_us += cost_us(&m->cloud, begin, end, r->layers);
    else if (end > s->at->kv)
        s->backlog += (double)tokens * r->layers * (r->codec == KV_SEALED ? m->sealed_size : m->kv_size);
    if (end > s->at->run)
        s->cloud_us = TD_MAX(s->cloud_us, there_us) +
                      cloud_works(s, TD_MAX(begin, s->at->run), end, m->layer_count - r->layers);
}

static void run_range(struct stages *s, const struct plan_range *r, uint32_t step)
{
    uint32_t begin = r->first_token, end = plan_range_end(r);
    if (r->layers == 0) {
        begin = TD_MAX(begin, s->at->run);
        if (begin >= end)
            return;
        complete_kv(s);
        s->cloud_us += cloud_works(s, begin, end, s->m->layer_count);
        return;
    }
    if (r->layers < s->deepest && end > s->at->run)
        complete_kv(s);
    s->deepest = TD_MAX(s->deepest, r->layers);
    for (uint32_t at = begin; at < end; at += step)
        edge_chunk(s, r, at, TD_MIN(at + step, end));
}

struct plan_times plan_model_run(const struct plan_model *m, const struct plan_range *ranges, uint32_t count,
                                 const struct plan_progress *at)
{
    struct stages s = {.m = m, .at = at, .cloud_us = TD_MAX(m->queue_us, m->delay_us)};
    uint32_t tokens = count ? plan_range_end(&ranges[count - 1]) - ranges[0].first_token : 0, deepest = 0;
    uint32_t steps = TD_MAX(
        (tokens + m->chunk_tokens * PLAN_MODEL_CHUNKS - 1) / (m->chunk_tokens * PLAN_MODEL_CHUNKS), 1u);
    for (uint32_t i = 0; i < count; i++)
        if (ranges[i].codec != KV_SEALED)
            deepest = TD_MAX(deepest, ranges[i].layers);
    uint32_t caught_up = TD_MAX(at->computed, count ? ranges[0].first_token : 0);
    if (deepest > 0)
        s.edge_us =
            cost_us(&m->edge, caught_up - TD_MIN(at->catch_up, caught_up), caught_up, deepest) + at->read_us;
    for (uint32_t i = 0; i < count; i++)
        run_range(&s, &ranges[i], steps * m->chunk_tokens);
    s.times.first_us = s.cloud_us + m->delay_us;
    complete_kv(&s);
    s.times.t16_us = s.cloud_us + 15 * m->decode_us + m->delay_us;
    return s.times;
}
