/* link_rate: how fast the link carries bulk, and how much of it may be on the way.
 *
 * Each acknowledgement gives a delivery rate: bytes acknowledged between the sending of a frame and its own
 * acknowledgement, over the time that took (the longer of the sending's and the acknowledging's, so that bunched
 * acknowledgements do not exaggerate). The estimate is the greatest over the last second or so of *busy* time. Samples
 * from flights that did not fill the link (nothing to send, no credit) may raise the estimate, never lower or age it.
 *
 * Only a queue shows a limit. What went a window at a time was held up by the window; taken for the link's rate it would end the search, and what a prompt plans by, at
 * any part of it: the longer the path, the sooner, as late answers of computing peers look like a queue.
 *
 * A greatest value is what keeps the link full, and too much to plan by: acknowledgements that come in bunches exaggerate it, lost packets are not in it.
 * The mean is bytes over time, of the last second or two in which the link was full, from a flight's first acknowledgement on.
 *
 * After idleness TCP may begin anew with ten packets a round trip, however fast the link. A frame of 20 ms of that link would then keep rows behind KV for
 * several round trips: frames grow with what has been acknowledged since, as TCP's window does. Nor does
 * that beginning say anything about the link: its samples may raise the estimate only, unless frames take longer than a round trip in which they wait
 * for the window, so that something queues.
 *
 * On the way at most: rate x (min RTT + LIMIT_UNACKED_MARGIN_US). The margin lets a faster link show itself, and bounds the
 * queue that bulk builds in front of a CANCEL. Until the rate has stopped growing, twice the round trip is allowed, as long as nothing queues.
 *
 * What is on the way at most may become free at once, as after a stall of the path or of either end. Sent at once it would be lost where the path's queue is shorter than a
 * round trip, and all behind it would wait for two more. So bulk is paced: beyond RATE_BURST_US of the rate at once no faster than one and a half of it,
 * and into an idle path, until the first acknowledgement of it, half of that and no faster than the rate: nobody says by then that it queues. But
 * not while what is on the way doubles each round trip, which a pace would slow down.
 *
 * The minimum RTT must be seen with an empty path, yet may not live for ever (paths change, and a minimum that is too small
 * would starve the link). So when it is old, bulk pauses until all is acknowledged and a ping is sent first; that costs one
 * round trip in RATE_MIN_RTT_AGE_US. Where nothing waits, one late answer is as well a machine that stumbled: the second tells. In mid-prompt it would be rows that stay away, so a new stream on an idle link has the minimum confirmed first.
 *
 * An idle link tells nothing about its rate unless it is asked. A padded ping is: its answer is late by what the padding took through the narrowest
 * place. Anything else that makes it late makes the rate look lower, never higher (RATE_PROBE_SLACK_US is for a minimum RTT that is itself too large), so it is a floor.
 *
 * Source of the idea: Cardwell et al., "BBR: congestion-based congestion control", ACM Queue 14(5), 2016; and its draft on
 * delivery rate estimation. TCP below does the congestion control proper; this only keeps its queues short. */
#include "protocol/link_internal.h"

/* bytes on the way before anything is known: about what TCP itself begins with */
#define RATE_WINDOW_START (16u << 10)
#define RATE_WINDOW_PROBED                                                                                   \
    (128u << 10) /* at most, where a probe has shown that so much is there within the margin */
#define RATE_FRAME_START    4096u
#define RATE_FRAME_WAKE     8192u /* of a link that was idle */
#define RATE_IDLE_US        200000u
#define RATE_INTERVAL_US    500000u /* busy time of one interval of the maximum */
#define RATE_BUSY_STEP_US   100000u /* a longer gap between samples was not busy */
#define RATE_SAMPLE_US_MIN  1000u   /* shorter samples say more about the clock than about the link */
#define RATE_PROBE_SLACK_US 3000u   /* by so much the minimum RTT may be too large */
#define RATE_MIN_RTT_AGE_US 10000000u
#define RATE_CONFIRM_US                                                                                      \
    2500000u /* a younger minimum needs no confirming; an answer that is not so late as from a longer path confirms it */
#define RATE_DRAIN_US_MAX     2000000u
#define RATE_FLAT_ROUNDS      3u
#define RATE_MEAN_US_MIN      200000u  /* a mean over less says little */
#define RATE_MEAN_US          1000000u /* what is older than one or two of these is forgotten */
#define RATE_QUEUE_SPAN_US    50000u   /* or a round trip: a computing peer is not late for so long */
#define RATE_QUEUE_US         12000u /* every answer is so late: something queues, the margin less a frame */
#define RATE_EMPTY_US         8000u  /* some answer is no later: nothing does */
#define RATE_QUEUE_UNKNOWN_US 10000u /* neither */
#define RATE_SEARCH_SIZE      (4u << 20) /* acknowledged: from then on the search goes in small steps */
#define RATE_BURST_US         LIMIT_UNACKED_MARGIN_US

void rate_init(struct rate *r, uint64_t hint_bytes_per_s)
{
    *r = (struct rate){.startup = true, .hint = hint_bytes_per_s, .queue_us = RATE_QUEUE_UNKNOWN_US};
}

uint64_t rate_estimate(const struct rate *r)
{
    return TD_MAX(r->best, r->best_before);
}

uint64_t rate_mean(const struct rate *r)
{
    return r->mean_us >= RATE_MEAN_US_MIN ? r->mean_size * 1000000 / r->mean_us : 0;
}

/* A limit is what a full link has shown. While the rate is searched for, one more round trip is TCP's own beginning, which doubles what may be on the way; what is
 * longer queues. A round trip that did not bring more is one in which there was little to send, or TCP let no more go, as long as nothing queues. */
bool rate_grows(const struct rate *r)
{
    uint64_t tcp_us = r->flat_rounds == 0 ? r->min_rtt_us : 0;
    uint64_t late_us = r->flat_rounds == 0 ? LIMIT_UNACKED_MARGIN_US / 2 : LIMIT_UNACKED_MARGIN_US;
    bool unseen = rate_mean(r) == 0 && r->queue_us <= RATE_QUEUE_US;
    return unseen || (r->startup && r->rtt_us <= r->min_rtt_us + tcp_us + late_us);
}

/* What stands in front of the narrowest place makes every answer late; a peer that computes, one or another. And then they come all the time: what goes a window at a
 * time, with a pause of nearly a round trip, is held up by the window, however late its answers. */
static void rate_take_span(struct rate *r, uint64_t rtt_us, uint64_t pause_us, uint64_t now_us)
{
    if (r->quick_rtt_us == 0)
        r->span_us = now_us, r->quick_rtt_us = rtt_us, r->pause_us = pause_us;
    r->quick_rtt_us = TD_MIN(r->quick_rtt_us, rtt_us);
    r->pause_us = TD_MAX(r->pause_us, pause_us);
    if (now_us - r->span_us < TD_MAX((uint64_t)RATE_QUEUE_SPAN_US, r->min_rtt_us))
        return;
    uint64_t frames_us = LIMIT_UNACKED_MARGIN_US + LIMIT_BULK_FRAME_US;
    bool steady = r->pause_us <= TD_MAX(r->quick_rtt_us / 4 * 3, frames_us);
    r->queue_us = steady ? r->quick_rtt_us - TD_MIN(r->min_rtt_us, r->quick_rtt_us) : 0;
    r->quick_rtt_us = 0;
    if (r->queue_us <= RATE_QUEUE_US && rate_estimate(r) > 2 * rate_mean(r))
        r->mean_size = r->mean_us = 0; /* it is faster than it was */
}

/* The link was full between the last acknowledgement and this one. */
static void rate_take_mean(struct rate *r, uint64_t size, uint64_t us)
{
    r->mean_size += size;
    r->mean_us += us;
    if (r->mean_us >= 2 * (uint64_t)RATE_MEAN_US)
        r->mean_size /= 2, r->mean_us /= 2;
}

/* The estimate, or what an earlier connection had found. */
static uint64_t rate_believed(const struct rate *r)
{
    uint64_t estimate = rate_estimate(r);
    return estimate > 0 ? estimate : r->hint;
}

static uint64_t bytes_in(uint64_t bytes_per_s, uint64_t us)
{
    const uint64_t top =
        UINT64_C(1) << 40; /* a terabyte a second, twelve days: no overflow, whatever a clock says */
    return TD_MIN(bytes_per_s, top) * TD_MIN(us, top / 1000000) / 1000000;
}

void rate_wake(struct rate *r, uint64_t now_us)
{
    if (r->sent_size == r->acked_size && now_us - r->acked_us >= RATE_IDLE_US)
        r->woken_size = r->acked_size, r->quick_rtt_us = 0, r->queue_us = RATE_QUEUE_UNKNOWN_US;
}

size_t rate_frame_size(const struct rate *r)
{
    uint64_t believed = rate_believed(r);
    if (believed == 0)
        return RATE_FRAME_START;
    uint64_t size = bytes_in(believed, LIMIT_BULK_FRAME_US);
    size = TD_MIN(size, RATE_FRAME_WAKE + (r->acked_size - r->woken_size) / 2);
    return (size_t)TD_MAX(TD_MIN(size, (uint64_t)LIMIT_BULK_FRAME_MAX), (uint64_t)LIMIT_BULK_FRAME_MIN);
}

/* How much longer than a round trip what is sent may be on the way, to find out whether the link carries more. At the beginning as long again, unless what is on the
 * way queues: then it is the link that limits, and more would only lie in front of a CANCEL. Nor behind idleness, of a link that was full before, until it is seen that
 * nothing queues: all of it would leave at once. Later, where little to send has kept the search from its end, a quarter: a
 * queue of the path that is shorter than a round trip would lose what goes beyond, and all behind it would wait for two more.
 * By less than the margin a busy peer's acknowledgements are late, too; taken for a queue they would end the search at any part of the link's rate, for good: what is
 * on the way then takes as long as it is meant to. */
static uint64_t search_us(const struct rate *r)
{
    uint64_t queue_us = TD_MAX((uint64_t)LIMIT_UNACKED_MARGIN_US, r->min_rtt_us);
    if (!r->startup || r->rtt_us > r->min_rtt_us + queue_us)
        return 0;
    bool was_full = r->woken_size > r->search_size && rate_mean(r) > 0 && r->queue_us > RATE_EMPTY_US;
    if (!was_full && r->acked_size - r->search_size < RATE_SEARCH_SIZE)
        return r->min_rtt_us;
    return rate_mean(r) == 0 && r->queue_us <= RATE_EMPTY_US ? r->min_rtt_us / 4 : 0;
}

/* Nothing was acknowledged since the link was idle. */
static bool goes_out_first(const struct rate *r)
{
    return r->acked_size == r->woken_size;
}

/* Bytes/s; 0: none. */
static uint64_t pace(const struct rate *r)
{
    uint64_t believed = TD_MAX(rate_believed(r), r->pace_rate);
    if (search_us(r) == r->min_rtt_us)
        return 0;
    return goes_out_first(r) ? rate_believed(r) : believed + believed / 2;
}

static uint64_t ahead_of_pace(const struct rate *r, uint64_t now_us)
{
    uint64_t through = bytes_in(pace(r), now_us - TD_MIN(r->paced_us, now_us));
    return r->paced_size - TD_MIN(through, r->paced_size);
}

uint64_t rate_pace_wait_us(const struct rate *r, uint64_t now_us)
{
    uint64_t burst_us = goes_out_first(r) ? RATE_BURST_US / 2 : RATE_BURST_US;
    uint64_t burst = bytes_in(rate_believed(r), burst_us), frame = rate_frame_size(r), bytes_per_s = pace(r);
    uint64_t ahead = ahead_of_pace(r, now_us), may = burst - TD_MIN(frame, burst);
    return bytes_per_s == 0 || ahead <= may ? 0 : (ahead - may) * 1000000 / bytes_per_s + 1;
}

uint64_t rate_window(const struct rate *r)
{
    uint64_t believed = rate_believed(r);
    uint64_t window = bytes_in(r->probe_rate, r->min_rtt_us + LIMIT_UNACKED_MARGIN_US);
    window = TD_MAX(TD_MIN(window, (uint64_t)RATE_WINDOW_PROBED), (uint64_t)RATE_WINDOW_START);
    if (believed > 0)
        window = bytes_in(believed, r->min_rtt_us + search_us(r) + LIMIT_UNACKED_MARGIN_US);
    return TD_MAX(window, 2 * (uint64_t)rate_frame_size(r));
}

bool rate_allows(const struct rate *r, size_t size)
{
    return !r->draining && r->sent_size - r->acked_size + size <= rate_window(r);
}

void rate_limited(struct rate *r)
{
    r->limited_until_size = r->sent_size;
}

void rate_windowed(struct rate *r)
{
    if (r->queue_us <= RATE_QUEUE_US)
        r->windowed_until_size = r->sent_size;
}

void rate_sent(struct rate *r, size_t size, uint64_t now_us)
{
    if (r->sent_size == r->acked_size) /* a new flight */
        r->first_sent_us = r->acked_us = now_us, r->flight_acked = false;
    r->paced_size = pace(r) > 0 ? ahead_of_pace(r, now_us) + size : 0;
    r->paced_us = now_us;
    r->sent_size += size;
    if (r->sample_count == LINK_RATE_SAMPLES)
        return; /* enough are on the way; this frame's bytes count, its own times do not */
    r->samples[(r->sample_head + r->sample_count++) % LINK_RATE_SAMPLES] =
        (struct rate_sample){.end_size = r->sent_size,
                             .sent_us = now_us,
                             .first_sent_us = r->first_sent_us,
                             .acked_size = r->acked_size,
                             .acked_us = r->acked_us,
                             .limited = r->acked_size <= r->limited_until_size,
                             .windowed = r->acked_size <= r->windowed_until_size};
}

/* Has the rate stopped growing? Asked once a round trip of a busy link. */
static void rate_round(struct rate *r)
{
    if (!r->startup || r->acked_size < r->round_end_size)
        return;
    uint64_t estimate = rate_estimate(r);
    r->round_end_size = r->sent_size;
    if (estimate >= r->round_rate + r->round_rate / 4) {
        r->round_rate = estimate;
        r->flat_rounds = 0;
        r->mean_size = r->mean_us = 0; /* it was not full before */
    } else if (++r->flat_rounds >= RATE_FLAT_ROUNDS) {
        r->startup = false;
    }
}

static void rate_take_busy(struct rate *r, uint64_t rate, uint64_t now_us)
{
    r->busy_us += TD_MIN(now_us - r->last_busy_us, (uint64_t)RATE_BUSY_STEP_US);
    r->last_busy_us = now_us;
    if (r->busy_us >= TD_MAX((uint64_t)RATE_INTERVAL_US, 2 * r->min_rtt_us)) {
        r->busy_us = 0;
        r->pace_rate -= r->pace_rate / 16;
        r->best_before = r->best;
        r->best = 0;
    }
    r->best = TD_MAX(r->best, rate);
    r->pace_rate = TD_MAX(r->pace_rate, rate);
    rate_round(r);
}

static void rate_take_rtt(struct rate *r, uint64_t rtt_us, uint64_t now_us)
{
    r->rtt_us = r->rtt_us ? (7 * r->rtt_us + rtt_us) / 8 : rtt_us;
    if (r->min_rtt_us == 0 || rtt_us <= r->min_rtt_us) {
        r->min_rtt_us = TD_MAX(rtt_us, (uint64_t)1);
        r->min_rtt_at_us = now_us;
        r->late_rtt_us = 0;
    }
}

/* Behind idleness it is TCP's window that limits, until it has doubled up to what the link holds; a slow link is told by what queues. */
static bool tcp_begins(const struct rate *r, uint64_t rtt_us)
{
    uint64_t grown = 2 * bytes_in(rate_estimate(r), r->min_rtt_us);
    return !r->startup && r->acked_size - r->woken_size < grown &&
           rtt_us <= 2 * r->min_rtt_us + LIMIT_UNACKED_MARGIN_US / 2;
}

void rate_acked(struct rate *r, uint64_t acked_size, uint64_t now_us)
{
    if (acked_size <= r->acked_size)
        return;
    struct rate_sample newest;
    bool found = false;
    while (r->sample_count > 0 && r->samples[r->sample_head].end_size <= acked_size) {
        newest = r->samples[r->sample_head];
        found = true;
        r->sample_head = (r->sample_head + 1) % LINK_RATE_SAMPLES;
        r->sample_count--;
    }
    if (found)
        newest.limited |= tcp_begins(r, now_us - newest.sent_us);
    bool full = found && !newest.limited && (!newest.windowed || r->queue_us > RATE_QUEUE_US);
    uint64_t pause_us = now_us - r->acked_us;
    if (full && r->flight_acked)
        rate_take_mean(r, acked_size - r->acked_size, pause_us);
    r->flight_acked = true;
    r->acked_size = acked_size;
    r->acked_us = now_us;
    if (!found)
        return;
    r->first_sent_us = newest.sent_us;
    rate_take_rtt(r, now_us - newest.sent_us, now_us);
    rate_take_span(r, now_us - newest.sent_us, pause_us, now_us);
    uint64_t interval_us = TD_MAX(newest.sent_us - newest.first_sent_us, now_us - newest.acked_us);
    if (interval_us < RATE_SAMPLE_US_MIN)
        return;
    uint64_t rate = (acked_size - newest.acked_size) * 1000000 / interval_us;
    if (!newest.limited)
        rate_take_busy(r, rate, now_us);
    else if (rate > rate_estimate(r))
        r->best = rate;
}

static bool min_rtt_is_old(const struct rate *r, uint64_t now_us)
{
    return r->min_rtt_us > 0 && now_us - r->min_rtt_at_us >= RATE_MIN_RTT_AGE_US;
}

bool rate_wants_confirming(const struct rate *r, uint64_t now_us)
{
    return r->min_rtt_us > 0 && r->sent_size == r->acked_size && now_us - r->min_rtt_at_us >= RATE_CONFIRM_US;
}

/* The minimum is old, and the empty path was longer. If that is more than what any answer may be late by, it has to be so twice; bulk is not held up for it. */
static void rate_take_longer(struct rate *r, uint64_t rtt_us, uint64_t now_us)
{
    uint64_t before_us = r->late_rtt_us;
    bool idle = now_us - r->acked_us > 2 * rtt_us;
    r->late_rtt_us = rtt_us;
    if (before_us == 0 && idle && rtt_us > r->min_rtt_us + RATE_PROBE_SLACK_US)
        return;
    rtt_us = before_us ? TD_MIN(before_us, rtt_us) : rtt_us;
    if (rtt_us > r->min_rtt_us + LIMIT_UNACKED_MARGIN_US / 2) { /* a longer path: look for its rate afresh */
        r->startup = true;
        r->search_size = r->acked_size;
        r->mean_size = r->mean_us = 0;
        r->flat_rounds = 0;
        r->round_rate = 0;
        r->round_end_size = r->sent_size;
    }
    r->min_rtt_us = rtt_us;
    r->min_rtt_at_us = now_us;
    r->late_rtt_us = 0;
}

void rate_ping(struct rate *r, uint64_t rtt_us, bool clean, uint64_t now_us)
{
    if (clean && !min_rtt_is_old(r, now_us) && rtt_us <= r->min_rtt_us + LIMIT_UNACKED_MARGIN_US / 2)
        r->min_rtt_at_us = now_us;
    if (clean && min_rtt_is_old(r, now_us) && rtt_us > r->min_rtt_us)
        rate_take_longer(r, rtt_us, now_us);
    rate_take_rtt(r, rtt_us, now_us);
}

void rate_probed(struct rate *r, size_t size, uint64_t rtt_us, uint64_t now_us)
{
    if (rtt_us + RATE_PROBE_SLACK_US <
        r->min_rtt_us) { /* the minimum was seen behind others' traffic: a probe held against it would show any rate */
        r->min_rtt_us = rtt_us;
        r->min_rtt_at_us = now_us - TD_MIN(now_us, (uint64_t)RATE_MIN_RTT_AGE_US);
        return;
    }
    uint64_t over_us = rtt_us > r->min_rtt_us ? rtt_us - r->min_rtt_us : 0;
    r->probe_rate = (uint64_t)size * 1000000 / (over_us + RATE_PROBE_SLACK_US);
    r->probe_count++;
}

bool rate_wants_ping(struct rate *r, uint64_t now_us)
{
    if (!r->draining && min_rtt_is_old(r, now_us)) {
        r->draining = true;
        r->drain_since_us = now_us;
    }
    if (!r->draining || rate_ping_wait_us(r, now_us) > 0)
        return false;
    r->draining = false;
    return true;
}

uint64_t rate_ping_wait_us(const struct rate *r, uint64_t now_us)
{
    if (r->min_rtt_us == 0)
        return UINT64_MAX;
    if (r->draining && r->sent_size == r->acked_size)
        return 0;
    uint64_t due_us =
        r->draining ? r->drain_since_us + RATE_DRAIN_US_MAX : r->min_rtt_at_us + RATE_MIN_RTT_AGE_US;
    return due_us > now_us ? due_us - now_us : 0;
}
