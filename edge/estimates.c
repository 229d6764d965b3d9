/* estimates: see estimates.h. */
#include "edge/estimates.h"
#include "shared/base.h"
#include <math.h>

#define SMOOTH     0.25 /* weight of a new value */
#define PROBE_HOPE 1.5  /* answers are some milliseconds late for other reasons than the link, too */
#define PROBE_GAIN 1.25 /* a probe must show so much more than is believed */

static double edge_slope(const struct estimates *e)
{
    return line_common_slope(&e->edge, &e->alone, e->edge_rise);
}

void estimates_edge(struct estimates *e, uint64_t took_us, uint32_t tokens, uint32_t layers,
                    uint32_t position, bool alone)
{
    if (tokens == 0 || layers == 0)
        return;
    double at = position + tokens / 2.0, ns = (double)took_us * 1e3 / ((double)tokens * layers);
    if (alone) {
        line_add(&e->alone, at, ns);
        e->alone_count++;
        return;
    }
    double slope = edge_slope(e);
    double told = line_base_of_slope(&e->edge, slope) + slope * at;
    if (e->edge.weight > 0 && told > 0)
        e->edge_off += SMOOTH * (TD_MIN(fabs(ns - told) / told, 1.0) - e->edge_off);
    line_add(&e->edge, at, ns);
}

void estimates_cloud(struct estimates *e, uint32_t layer_ns, uint32_t slope_ns)
{
    if (layer_ns == 0 && slope_ns == 0)
        return;
    e->cloud_ns = layer_ns;
    e->cloud_slope_ns = slope_ns / 1024.0;
}

static uint64_t probe_wait_us(const struct estimates *e)
{
    uint32_t shift = TD_MAX(e->probes_vain - TD_MIN(e->probes_vain, ESTIMATES_PROBE_SOON), e->probes_wrong);
    if (e->probes_vain < ESTIMATES_PROBE_SOON && e->probes_wrong == 0)
        return ESTIMATES_SOON_US;
    return (uint64_t)ESTIMATES_PROBE_US << TD_MIN(shift, ESTIMATES_PROBE_SHIFT);
}

/* So late that it says nothing, of a link that may be much better than it is believed to be. */
static bool probe_was_late(const struct estimates *e, double floor)
{
    return e->rate < ESTIMATES_RATE_UNKNOWN / 2 && floor < e->rate / PROBE_GAIN;
}

static void take_probe(struct estimates *e, double floor, uint64_t now_us)
{
    bool raises = e->rate > 0 ? floor > PROBE_GAIN * e->rate : floor < ESTIMATES_RATE_UNKNOWN / 2;
    if (!raises && probe_was_late(e, floor) && e->probes_vain > 0 && e->probes_late < ESTIMATES_PROBES_LATE) {
        e->probes_late++;
        e->probes_vain--;
        e->probe_due_us = now_us + probe_wait_us(e);
    }
    if (!raises)
        return;
    e->probes_late = 0;
    estimates_set_rate(e, floor);
    e->probed = true;
    e->probes_vain = 0;
    e->probe_due_us = now_us + probe_wait_us(e);
}

uint64_t estimates_probe_wait_us(const struct estimates *e, uint64_t now_us)
{
    if (e->rate >= ESTIMATES_RATE_UNKNOWN)
        return 0;
    return TD_MAX(e->probe_due_us, now_us + (e->unacked_size > 0 ? ESTIMATES_SOON_US : 1)) - now_us;
}

bool estimates_wants_probe(struct estimates *e, bool busy, uint64_t now_us)
{
    uint64_t due_us = e->probe_due_us + (busy ? ESTIMATES_PROBE_US : 0);
    if (e->rate >= ESTIMATES_RATE_UNKNOWN || e->unacked_size > 0 || now_us < due_us)
        return false;
    e->probes_vain++; /* until its answer says otherwise */
    e->probe_due_us = now_us + probe_wait_us(e);
    return true;
}

size_t estimates_probe_size(const struct estimates *e)
{
    bool small_tells = e->rate < ESTIMATES_RATE_UNKNOWN / 3 || e->probes_vain > 2 * ESTIMATES_PROBE_SOON;
    if (e->rate > 0 && e->rate < ESTIMATES_RATE_SLOW)
        return TD_MAX((size_t)(e->rate * ESTIMATES_PROBE_MOST_US), (size_t)ESTIMATES_PROBE_LEAST);
    return small_tells ? 0 : (size_t)(2 * TD_MIN(e->rate, ESTIMATES_RATE_UNKNOWN) * ESTIMATES_PROBE_SPAN_US);
}

/* The link has shown its limit with bulk. */
static void take_rate(struct estimates *e, double rate, uint64_t now_us)
{
    if (e->probed)
        e->probes_wrong = rate < e->rate / 2 ? e->probes_wrong + 1 : 0;
    if (rate < e->rate / PROBE_GAIN || e->rate == 0) {
        e->probes_vain = e->probes_late = 0;
        e->probe_due_us = e->probes_wrong ? now_us + probe_wait_us(e) : now_us;
    }
    double off = fabs(rate - e->rate);
    e->rate_deviation = e->rate > 0 && !e->probed
                            ? e->rate_deviation + SMOOTH * (TD_MIN(off, e->rate / 2) - e->rate_deviation)
                            : 0;
    e->rate = rate;
    e->probed = false;
}

void estimates_link(struct estimates *e, const struct link_stats *stats, uint64_t now_us)
{
    e->rtt_us = stats->min_rtt_us ? stats->min_rtt_us : e->rtt_us;
    if (stats->bulk_acked_size != e->acked_size || e->unacked_size == 0)
        e->progress_us = now_us;
    bool acked = stats->bulk_acked_size > e->acked_size;
    e->acked_size = stats->bulk_acked_size;
    e->unacked_size = stats->bulk_sent_size - stats->bulk_acked_size;
    if (stats->probe_count > e->probe_count)
        take_probe(e, (double)stats->probe_bytes_per_s * 1e-6, now_us);
    e->probe_count = stats->probe_count;
    if (!acked || stats->rate_bytes_per_s == 0)
        return;
    double rate = (double)stats->rate_bytes_per_s * 1e-6;
    if (stats->rate_grows) {
        if (rate > (e->rate > 0 ? e->rate : ESTIMATES_RATE_UNKNOWN))
            estimates_set_rate(e, rate), e->probes_wrong = 0;
        return;
    }
    if (stats->mean_bytes_per_s > 0)
        rate = TD_MIN(rate, (double)stats->mean_bytes_per_s * 1e-6);
    take_rate(e, rate, now_us);
}

void estimates_link_lost(struct estimates *e)
{
    e->acked_size = e->unacked_size = 0;
    e->probe_count = 0;
}

void estimates_token(struct estimates *e, bool fresh, uint64_t now_us)
{
    if (!fresh && e->token_us && now_us > e->token_us) {
        double us = (double)(now_us - e->token_us);
        e->decode_us =
            e->decode_us > 0 ? e->decode_us + SMOOTH * (TD_MIN(us, 4 * e->decode_us) - e->decode_us) : us;
    }
    e->token_us = now_us;
}

void estimates_edge_token(struct estimates *e, uint64_t took_us)
{
    double us = (double)took_us;
    e->edge_decode_us = e->edge_decode_us > 0 ? e->edge_decode_us + SMOOTH * (us - e->edge_decode_us) : us;
}

double estimates_rate(const struct estimates *e, uint64_t now_us)
{
    double rate = e->rate > 0 ? TD_MAX(e->rate - e->rate_deviation, e->rate / 4) : ESTIMATES_RATE_UNKNOWN;
    if (e->probed) /* a floor: to try a little more is how the rate is found */
        rate = TD_MAX(rate, TD_MIN(PROBE_HOPE * rate, ESTIMATES_RATE_UNKNOWN));
    uint64_t silent_us = e->unacked_size > 0 && now_us > e->progress_us ? now_us - e->progress_us : 0;
    uint64_t allowed_us = e->rtt_us + ESTIMATES_SLACK_US;
    if (silent_us > allowed_us)
        rate = TD_MIN(rate, (double)e->unacked_size / (double)(silent_us - e->rtt_us));
    return TD_MAX(rate, 1e-6);
}

double estimates_backlog_us(const struct estimates *e, uint64_t now_us)
{
    return (double)e->unacked_size / estimates_rate(e, now_us);
}

void estimates_set_rate(struct estimates *e, double rate)
{
    e->rate = rate;
    e->rate_deviation = 0;
    e->probed = false;
}

void estimates_fill(const struct estimates *e, uint64_t now_us, struct plan_model *m)
{
    const struct line *edge = e->edge.weight > 0 ? &e->edge : &e->alone;
    m->edge.slope_ns = edge_slope(e);
    m->edge.base_ns = line_base_of_slope(edge, m->edge.slope_ns);
    double sending_ns = m->edge.base_ns - line_base_of_slope(&e->alone, m->edge.slope_ns);
    m->edge_sending_ns = e->alone.weight > 0 ? TD_MIN(TD_MAX(sending_ns, 0), m->edge.base_ns / 2) : 0;
    m->edge_tried = e->alone_count >= ESTIMATES_ALONE_TRIED;
    m->edge_off = e->edge_off;
    if (m->edge.base_ns + m->edge.slope_ns == 0)
        m->edge.base_ns = ESTIMATES_COST_UNKNOWN;
    m->cloud = m->edge; /* until it has said better */
    if (e->cloud_ns + e->cloud_slope_ns > 0)
        m->cloud = (struct plan_cost){e->cloud_ns, e->cloud_slope_ns};
    m->rate_bytes_per_us = estimates_rate(e, now_us);
    m->delay_us = (double)e->rtt_us / 2;
    m->decode_us = e->decode_us > 0 ? e->decode_us : (m->cloud.base_ns * m->layer_count) * 8e-3;
    m->edge_decode_us = e->edge_decode_us > 0 ? e->edge_decode_us : (m->edge.base_ns * m->layer_count) * 8e-3;
}
