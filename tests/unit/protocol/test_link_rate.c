/* link, rate: over a simulated path (a bottleneck with a queue, then a delay) the estimate finds the path's rate, the path is
 * kept full, its queue short, and neither idleness nor a change of path leads astray. */
#include "link_path.h"

/* After a short while at least 90 % of the path carries bulk, the estimate is right, and the queue in front of the bottleneck
 * is no longer than the margin and a frame. */
static void test_path_is_full_and_its_queue_short(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_COUNT(paths); i++) {
        path_start(paths[i].rate, paths[i].round_trip_us);
        path.queued_target = 16 << 20;
        path_run(3 * SECOND + 12 * paths[i].round_trip_us);
        path.received_size = 0;
        path.longest_queue_us = 0;
        path_run(3 * SECOND);
        assert_about(estimate(), paths[i].rate, 10);
        assert_true(path.received_size >= 3 * paths[i].rate * 90 / 100);
        uint64_t frame_us = TD_MAX(LIMIT_BULK_FRAME_US, LIMIT_BULK_FRAME_MIN * SECOND / paths[i].rate);
        assert_true(path.longest_queue_us <= LIMIT_UNACKED_MARGIN_US + 2 * frame_us + LINK_ACK_INTERVAL_US);
        path_stop();
    }
}

/* The search for the rate may not build a long queue either, and is over soon. */
static void test_search_is_quick(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_COUNT(paths); i++) {
        path_start(paths[i].rate, paths[i].round_trip_us);
        path.queued_target = 16 << 20;
        path_run(300 * MS + 10 * paths[i].round_trip_us);
        assert_true(estimate() >= paths[i].rate / 2);
        assert_true(path.longest_queue_us <= 2 * paths[i].round_trip_us + 200 * MS);
        path_stop();
    }
}

/* Two round trips and the margin may be on the way while the rate grows; one, once what is there queues. */
static void test_a_queue_ends_the_doubling(void **state)
{
    (void)state;
    struct rate r;
    rate_init(&r, 0);
    r.best = MBIT, r.min_rtt_us = r.rtt_us = 40 * MS;
    assert_int_equal(rate_window(&r), MBIT * 120 / 1000);
    r.rtt_us = 80 * MS; /* as a busy peer's acknowledgements do */
    assert_int_equal(rate_window(&r), MBIT * 120 / 1000);
    r.rtt_us = 80 * MS + 1;
    assert_int_equal(rate_window(&r), MBIT * 80 / 1000);
    r.min_rtt_us = 200 * MS, r.rtt_us = 400 * MS; /* a long path: as much again */
    assert_int_equal(rate_window(&r), MBIT * 440 / 1000);
    r.rtt_us = 200 * MS; /* a link that was full before it was idle: once it is seen that nothing queues */
    r.mean_size = MBIT, r.mean_us = SECOND, r.acked_size = r.woken_size = 1, r.queue_us = 8 * MS + 1;
    assert_int_equal(rate_window(&r), MBIT * 240 / 1000);
    r.queue_us = 8 * MS;
    assert_int_equal(rate_window(&r), MBIT * 440 / 1000);
    r.queue_us = 8 * MS + 1, r.mean_us = 0; /* it was not */
    assert_int_equal(rate_window(&r), MBIT * 440 / 1000);
    r.mean_us = SECOND, r.search_size = 1; /* of a longer path, it is looked for afresh */
    assert_int_equal(rate_window(&r), MBIT * 440 / 1000);
    r.startup = false;
    assert_int_equal(rate_window(&r), MBIT * 240 / 1000);
}

static uint64_t paced(struct rate *r, uint64_t *now_us, uint64_t for_us)
{
    uint64_t size = 0;
    for (uint64_t end_us = *now_us + for_us; *now_us < end_us; *now_us += MS)
        for (; rate_pace_wait_us(r, *now_us) == 0 && size < 200 * MBIT; size += rate_frame_size(r))
            rate_sent(r, rate_frame_size(r), *now_us);
    return size;
}

/* What a stall has held up may be two round trips: it is not sent at once, or half of it would be lost in front of a narrow place. */
static void test_bulk_is_paced_but_not_while_it_doubles(void **state)
{
    (void)state;
    struct rate r;
    uint64_t now_us = SECOND;
    rate_init(&r, 0);
    r.min_rtt_us = r.rtt_us = 200 * MS;
    assert_true(paced(&r, &now_us, MS) >= 100 * MBIT); /* nothing is known */
    r.best = 80 * MBIT;
    assert_true(paced(&r, &now_us, MS) >= 100 * MBIT);
    r.startup = false, r.acked_size = 8 << 20;
    now_us += SECOND;
    uint64_t frame = rate_frame_size(&r);
    assert_int_equal(frame, 80 * MBIT * LIMIT_BULK_FRAME_US / SECOND);
    assert_int_equal(paced(&r, &now_us, MS), 2 * frame);
    assert_in_range(paced(&r, &now_us, SECOND), 120 * MBIT - frame, 120 * MBIT + frame);
    assert_int_equal(rate_pace_wait_us(&r, now_us + rate_pace_wait_us(&r, now_us)), 0);
    rate_acked(&r, r.sent_size, now_us);
    now_us += SECOND;
    rate_wake(&r, now_us);
    r.best = 80 * MBIT;
    frame = rate_frame_size(&r); /* of an idle link */
    uint64_t at_once = paced(&r, &now_us, MS), half = 80 * MBIT * LIMIT_UNACKED_MARGIN_US / SECOND / 2;
    assert_in_range(at_once, half - frame, half + frame);
    r.pace_rate = 160 * MBIT; /* which it had once */
    assert_in_range(paced(&r, &now_us, SECOND), 80 * MBIT - frame, 80 * MBIT + frame);
}

/* What an idle link carried before goes out at that pace, not faster, until it is seen that nothing queues; also where its limit is looked for still. */
static void test_an_idle_link_that_was_full_is_not_flooded(void **state)
{
    (void)state;
    for (size_t i = 0; i < 2 * TD_COUNT(paths); i++) {
        size_t at = i / 2;
        path_start(paths[at].rate, paths[at].round_trip_us);
        path.queued_target = 16 << 20;
        path_run(3 * SECOND + 12 * paths[at].round_trip_us);
        path.queued_target = 0;
        while (path.edge.link->bulk_queued_size > 0)
            path_run(10 * MS);
        path_run(SECOND);
        struct rate *r = &path.edge.link->rate;
        if (i % 2)
            r->startup = true, r->search_size = r->acked_size - 1, r->rtt_us = r->min_rtt_us;
        path.longest_queue_us = 0;
        path.queued_target = 16 << 20;
        path_run(paths[at].round_trip_us);
        uint64_t frame_us = TD_MAX(LIMIT_BULK_FRAME_US, LIMIT_BULK_FRAME_MIN * SECOND / paths[at].rate);
        assert_true(path.longest_queue_us <= LIMIT_UNACKED_MARGIN_US / 2 + 2 * frame_us);
        path_stop();
    }
}

/* A peer that computes acknowledges 25 ms late once it has something to do: that is no queue, and no limit of the link. */
static void test_a_busy_peer_does_not_end_the_search(void **state)
{
    (void)state;
    path_start(300 * MBIT, 40 * MS);
    path_run(50 * MS); /* a ping has shown the empty path */
    path.down.delay_us += 25 * MS;
    path.queued_target = 16 << 20;
    path_run(2 * SECOND);
    assert_true(estimate() >= 200 * MBIT);
    path_stop();
}

/* What may be planned by: the least of what is told as a limit. */
static uint64_t least_limit(uint64_t least)
{
    struct link_stats stats;
    link_stats(path.edge.link, &stats);
    uint64_t limit = stats.mean_bytes_per_s > 0 ? TD_MIN(stats.mean_bytes_per_s, stats.rate_bytes_per_s)
                                                : stats.rate_bytes_per_s;
    return stats.rate_grows ? least : TD_MIN(least, limit);
}

/* A device that computes sends a chunk at a time, and a peer that computes acknowledges one or another 60 ms late. Never is what a long path has carried so far its limit. */
static void test_computing_at_both_ends_of_a_long_path_is_no_limit(void **state)
{
    (void)state;
    for (uint64_t every_ms = 30; every_ms <= 90; every_ms += 10) {
        uint64_t least = UINT64_MAX;
        path_start(300 * MBIT, 200 * MS);
        path_run(500 * MS);
        for (uint32_t prompt = 0; prompt < 3; prompt++) {
            for (uint32_t chunk = 0; chunk < 32; chunk++) {
                path_queue(64 * (1152 + 13 * 390));
                path.down.delay_us = (chunk % 3 == 1 ? 160 : 100) * MS;
                path_run(every_ms * MS);
                least = least_limit(least);
            }
            path_run(3 * SECOND);
        }
        assert_true(least >= 30 * MBIT);
        path_stop();
    }
}

static void test_cancel_arrives_soon(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_COUNT(paths); i++) {
        path_start(paths[i].rate, paths[i].round_trip_us);
        path.queued_target = 16 << 20;
        path_run(3 * SECOND + 12 * paths[i].round_trip_us);
        path.cancel_seen = false;
        Tandem__Open open = open_valid(1);
        assert_int_equal(link_send(path.edge.link, FRAME_OPEN, 3, &open.base, many_bytes, 4), 0);
        assert_int_equal(link_send(path.edge.link, FRAME_CANCEL, 3, NULL, NULL, 0), 0);
        uint64_t frame_us = TD_MAX(LIMIT_BULK_FRAME_US, LIMIT_BULK_FRAME_MIN * SECOND / paths[i].rate);
        path_run(paths[i].round_trip_us / 2 + LIMIT_UNACKED_MARGIN_US + frame_us + LINK_ACK_INTERVAL_US);
        assert_true(path.cancel_seen);
        path_stop();
    }
}

/* Half a minute of small messages now and then says nothing about the link: the estimate stays. */
static void test_idleness_does_not_lower_the_estimate(void **state)
{
    (void)state;
    path_start(50 * MBIT, 40 * MS);
    path.queued_target = 16 << 20;
    path_run(4 * SECOND);
    path.queued_target = 0;
    path_run(4 * SECOND);
    uint64_t before = estimate();
    assert_about(before, 50 * MBIT, 10);
    for (int i = 0; i < 300; i++) {
        path_queue(3000);
        path_run(100 * MS);
    }
    assert_int_equal(estimate(), before);
    path_stop();
}

/* A peer that grants credit slowly is no slow link. */
static void test_credit_does_not_lower_the_estimate(void **state)
{
    (void)state;
    path_start(50 * MBIT, 40 * MS);
    path.queued_target = 16 << 20;
    path_run(4 * SECOND);
    path.edge.link->out.credit = 0;
    for (int i = 0; i < 100; i++) {
        path.edge.link->out.credit += 100000;
        path_run(100 * MS);
    }
    assert_true(estimate() >= 45 * MBIT);
    path_stop();
}

static void test_slower_link(void **state)
{
    (void)state;
    path_start(100 * MBIT, 20 * MS);
    path.queued_target = 16 << 20;
    path_run(4 * SECOND);
    path.up.rate = 10 * MBIT;
    path_run(4 * SECOND);
    assert_about(estimate(), 10 * MBIT, 15);
    path.longest_queue_us = 0;
    path_run(2 * SECOND);
    assert_true(path.longest_queue_us <= LIMIT_UNACKED_MARGIN_US + 3 * LIMIT_BULK_FRAME_US);
    path_stop();
}

static void test_faster_link(void **state)
{
    (void)state;
    path_start(2 * MBIT, 50 * MS);
    path.queued_target = 16 << 20;
    path_run(10 * SECOND);
    path.up.rate = 80 * MBIT;
    path_run(4 * SECOND);
    assert_about(estimate(), 80 * MBIT, 10);
    path_stop();
}

/* A longer path: the minimum round trip is measured afresh in time, and the rate comes back. */
static void test_longer_path(void **state)
{
    (void)state;
    path_start(40 * MBIT, 10 * MS);
    path.queued_target = 16 << 20;
    path_run(4 * SECOND);
    path.up.delay_us = path.down.delay_us = 120 * MS;
    struct link_stats stats;
    link_stats(path.edge.link, &stats);
    assert_false(stats.rate_grows); /* it has found its limit long ago */
    path_run(20 * SECOND);
    link_stats(path.edge.link, &stats);
    assert_about(stats.min_rtt_us, 240 * MS, 10);
    assert_about(stats.rate_bytes_per_s, 40 * MBIT, 15);
    path_stop();
}

/* A prompt is not held up for a look at the empty path: that is had when its stream is opened. */
static void test_an_opened_stream_has_the_minimum_confirmed(void **state)
{
    (void)state;
    path_start(20 * MBIT, 40 * MS);
    const struct rate *r = &path.edge.link->rate;
    path_run(7 * SECOND);
    assert_true(r->min_rtt_us > 0 && path.now_us - r->min_rtt_at_us > 6 * SECOND);
    assert_int_equal(edge_open(&path.edge, 3), 0);
    path_run(100 * MS);
    assert_true(path.now_us - r->min_rtt_at_us < 100 * MS);
    uint64_t before_us = r->min_rtt_at_us;
    assert_int_equal(edge_open(&path.edge, 5), 0); /* it is young enough */
    path_run(100 * MS);
    assert_int_equal(r->min_rtt_at_us, before_us);
    path.queued_target = 16 << 20;
    for (int i = 0; i < 500; i++) {
        path_run(10 * MS);
        assert_false(r->draining);
    }
    path_stop();
}

/* TCP takes no round trip from a lone small packet: a fast link is woken by a large one, in front of the OPEN. On a slow one that would take too long. */
static void test_a_fast_link_is_woken_by_more_than_a_packet(void **state)
{
    (void)state;
    static uint8_t bytes[LIMIT_FRAME_SIZE];
    for (int fast = 0; fast < 2; fast++) {
        path_start((fast ? 100 : 20) * MBIT, 40 * MS);
        path.queued_target = 4 << 20;
        path_run(3 * SECOND);
        path.queued_target = 0;
        path_run(6 * SECOND);
        assert_int_equal(edge_open(&path.edge, 3), 0);
        struct link *l = path.edge.link;
        uint64_t id = l->ping_id;
        int64_t size = link_next(l, bytes, sizeof bytes, path.now_us);
        assert_int_equal(bytes[0], fast ? FRAME_PING : FRAME_OPEN);
        assert_int_equal(size > LINK_PROBE_SIZE, fast);
        pipe_put(&path.up, bytes, (size_t)size, path.now_us);
        path_run(100 * MS);
        assert_int_equal(l->ping_id, id + 1);
        assert_true(path.now_us - l->rate.min_rtt_at_us < 100 * MS);
        path_stop();
    }
}

/* A machine that stumbles makes one answer late, and the next comes in time; a path that has become longer shows it twice. */
static void test_one_late_answer_is_no_longer_path(void **state)
{
    (void)state;
    struct rate r;
    rate_init(&r, 0);
    uint64_t now_us = SECOND;
    rate_ping(&r, 40 * MS, true, now_us);
    now_us += 11 * SECOND; /* it is old */
    rate_ping(&r, 82 * MS, true, now_us);
    assert_int_equal(r.min_rtt_us, 40 * MS);
    assert_true(rate_wants_ping(&r, now_us)); /* at once, as nothing is on the way */
    rate_ping(&r, 40 * MS, true, now_us);
    assert_int_equal(r.min_rtt_us, 40 * MS);
    assert_false(rate_wants_ping(&r, now_us));
    now_us += 11 * SECOND;
    rate_ping(&r, 41 * MS, true, now_us); /* so much any answer may be late */
    assert_int_equal(r.min_rtt_us, 41 * MS);
    now_us += 11 * SECOND;
    r.startup = false;
    rate_ping(&r, 90 * MS, true, now_us);
    assert_int_equal(r.min_rtt_us, 41 * MS);
    assert_false(r.startup);
    rate_ping(&r, 82 * MS, true, now_us);
    assert_int_equal(r.min_rtt_us, 82 * MS);
    assert_true(r.startup);
    assert_false(rate_wants_ping(&r, now_us));
    now_us += 11 * SECOND;
    r.acked_us = now_us - 130 * MS; /* bulk waits for the answer */
    rate_ping(&r, 120 * MS, true, now_us);
    assert_int_equal(r.min_rtt_us, 120 * MS);
}

/* Minutes of full load: the minimum does not creep up with the queue that bulk itself makes. */
static void test_minimum_does_not_creep(void **state)
{
    (void)state;
    path_start(10 * MBIT, 30 * MS);
    path.queued_target = 4 << 20;
    path_run(90 * SECOND);
    struct link_stats stats;
    link_stats(path.edge.link, &stats);
    assert_about(stats.min_rtt_us, 30 * MS, 15);
    assert_true(path.received_size >= 90 * 10 * MBIT * 95 / 100);
    path_stop();
}

/* A rate that is only a beginning is told from one that a queue has formed at. */
static void test_a_slow_link_shows_itself_by_its_queue(void **state)
{
    (void)state;
    struct link_stats stats;
    for (int slow = 0; slow < 2; slow++) {
        path_start(slow ? MBIT / 2 : 100 * MBIT, 40 * MS);
        path.queued_target = 16 << 20;
        path_run(slow ? 400 * MS : 100 * MS);
        link_stats(path.edge.link, &stats);
        assert_true(path.edge.link->rate.startup && stats.rate_bytes_per_s > 0);
        assert_int_equal(stats.rate_grows, !slow);
        path_stop();
    }
}

/* A round trip of full use without a faster one is enough, though looking goes on for two more. */
static void test_one_flat_round_is_no_growth(void **state)
{
    (void)state;
    path_start(10 * MBIT, 200 * MS);
    path.queued_target = 16 << 20;
    const struct rate *r = &path.edge.link->rate;
    bool seen = false;
    for (int i = 0; i < 1000 && !seen; i++) {
        struct link_stats stats;
        path_run(10 * MS);
        link_stats(path.edge.link, &stats);
        seen = r->startup && r->flat_rounds == 1 && r->rtt_us <= 2 * r->min_rtt_us;
        if (seen)
            assert_false(stats.rate_grows);
    }
    assert_true(seen);
    path_stop();
}

/* It may have been for want of something to send: what queues tells. */
static void test_a_flat_round_without_a_queue_is_no_limit(void **state)
{
    (void)state;
    struct rate r;
    rate_init(&r, 0);
    r.min_rtt_us = 40 * MS, r.rtt_us = 100 * MS, r.queue_us = 60 * MS;
    assert_true(rate_grows(&r)); /* TCP's beginning */
    r.rtt_us = 101 * MS;
    assert_false(rate_grows(&r));
    r.flat_rounds = 1, r.rtt_us = 80 * MS;
    assert_true(rate_grows(&r));
    r.rtt_us = 81 * MS;
    assert_false(rate_grows(&r));
    r.startup = false, r.rtt_us = 40 * MS;
    assert_false(rate_grows(&r));
}

static void send_flight(struct rate *r, uint64_t size, uint64_t now_us)
{
    for (int i = 0; i < 10; i++)
        rate_sent(r, size / 10, now_us);
}

/* After idleness a few packets a round trip go, then twice as many: that is TCP's beginning, not the link's rate. Where the answers come late it is the link. */
static void test_a_new_beginning_of_tcp_does_not_lower_the_estimate(void **state)
{
    (void)state;
    for (int slow = 0; slow < 2; slow++) {
        const uint64_t rate = 300 * MBIT, rtt_us = 40 * MS;
        struct rate r;
        rate_init(&r, 0);
        r.startup = false;
        r.best = r.best_before = r.mean_size = rate;
        r.mean_us = SECOND;
        r.rtt_us = r.min_rtt_us = rtt_us;
        r.acked_us = r.min_rtt_at_us = SECOND;
        uint64_t now_us = 3 * SECOND;
        rate_wake(&r, now_us);
        uint64_t flight = 90000;
        send_flight(&r, flight, now_us);
        for (; flight <= 720000; flight *= 2) {
            uint64_t from = r.acked_size;
            now_us += slow ? 200 * MS : rtt_us;
            for (uint64_t i = 1; i <= 10; i++) {
                if (i == 10) /* there is always something on the way */
                    send_flight(&r, 2 * flight, now_us);
                rate_acked(&r, from + i * flight / 10, now_us + i * MS / 2);
            }
        }
        if (slow)
            assert_true(rate_mean(&r) < rate * 3 / 4);
        else
            assert_true(rate_mean(&r) == rate && rate_estimate(&r) == rate);
    }
}

static void test_hint_of_an_earlier_connection(void **state)
{
    (void)state;
    struct link_config config = {
        .role = LINK_EDGE, .on_frame = owner_on_frame, .rate_hint_bytes_per_s = 1000000};
    struct link *l = link_create(&config, 1);
    assert_int_equal(rate_frame_size(&l->rate), 8192); /* TCP begins small too */
    l->rate.acked_size = l->rate.sent_size = 20000;
    assert_int_equal(rate_frame_size(&l->rate), 18192);
    l->rate.acked_size = l->rate.sent_size = 1 << 20;
    assert_int_equal(rate_frame_size(&l->rate), 20000);
    assert_int_equal(rate_window(&l->rate), 40000);
    struct link_stats stats;
    link_stats(l, &stats);
    assert_int_equal(stats.rate_bytes_per_s, 0); /* believed, not measured */
    assert_true(stats.rate_grows);
    link_destroy(l);
}

/* A third of the time nothing gets through, as when packets are lost: the best rate does not know, the mean does. */
static void test_pauses_of_the_path_are_in_the_mean(void **state)
{
    (void)state;
    size_t too_good = 0;
    for (size_t i = 0; i < TD_COUNT(paths); i++) {
        struct link_stats stats;
        path_start(paths[i].rate, paths[i].round_trip_us);
        path.queued_target = 16 << 20;
        path_run(3 * SECOND + 12 * paths[i].round_trip_us);
        path.received_size = 0;
        for (int turn = 0; turn < 20; turn++) {
            path.up.free_us = TD_MAX(path.up.free_us, path.now_us) + 100 * MS;
            path_run(300 * MS);
        }
        link_stats(path.edge.link, &stats);
        too_good += stats.rate_bytes_per_s > path.received_size / 6 * 5 / 4;
        assert_about(stats.mean_bytes_per_s, path.received_size / 6, 20);
        path_stop();
    }
    assert_true(too_good > TD_COUNT(paths) / 2);
}

/* Frames of 20 ms of a fast link would stand in the way of more urgent ones while TCP begins anew. */
static void test_frames_begin_small_after_idleness(void **state)
{
    (void)state;
    path_start(100 * MBIT, 40 * MS);
    path.queued_target = 16 << 20;
    path_run(4 * SECOND);
    size_t full = rate_frame_size(&path.edge.link->rate);
    assert_about(full, 100 * MBIT / 50, 15);
    path.queued_target = 0;
    while (path.edge.link->bulk_queued_size > 0)
        path_run(10 * MS);
    path_run(150 * MS); /* a short pause is none */
    path_queue(1000);
    path_run(MS);
    assert_int_equal(rate_frame_size(&path.edge.link->rate), full);
    path_run(SECOND);
    path_queue(1000);
    path_run(MS);
    assert_true(rate_frame_size(&path.edge.link->rate) <= 8192);
    path.queued_target = 16 << 20;
    path_run(SECOND);
    assert_int_equal(rate_frame_size(&path.edge.link->rate), full);
    path_stop();
}

/* Before the link is full, and for a moment, nothing is a mean; a pause does not count. */
static void test_the_mean_is_of_a_full_link(void **state)
{
    (void)state;
    struct link_stats stats;
    path_start(20 * MBIT, 40 * MS);
    path.queued_target = 1 << 20;
    path_run(150 * MS);
    link_stats(path.edge.link, &stats);
    assert_int_equal(stats.mean_bytes_per_s, 0);
    path_run(2 * SECOND);
    path.queued_target = 0;
    path_run(3 * SECOND);
    for (int i = 0; i < 50; i++) {
        path_queue(3000);
        path_run(100 * MS);
    }
    link_stats(path.edge.link, &stats);
    assert_about(stats.mean_bytes_per_s, 20 * MBIT, 5);
    path_stop();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_path_is_full_and_its_queue_short),
        cmocka_unit_test(test_search_is_quick),
        cmocka_unit_test(test_a_queue_ends_the_doubling),
        cmocka_unit_test(test_bulk_is_paced_but_not_while_it_doubles),
        cmocka_unit_test(test_an_idle_link_that_was_full_is_not_flooded),
        cmocka_unit_test(test_a_busy_peer_does_not_end_the_search),
        cmocka_unit_test(test_computing_at_both_ends_of_a_long_path_is_no_limit),
        cmocka_unit_test(test_cancel_arrives_soon),
        cmocka_unit_test(test_idleness_does_not_lower_the_estimate),
        cmocka_unit_test(test_credit_does_not_lower_the_estimate),
        cmocka_unit_test(test_slower_link),
        cmocka_unit_test(test_faster_link),
        cmocka_unit_test(test_longer_path),
        cmocka_unit_test(test_an_opened_stream_has_the_minimum_confirmed),
        cmocka_unit_test(test_a_fast_link_is_woken_by_more_than_a_packet),
        cmocka_unit_test(test_one_late_answer_is_no_longer_path),
        cmocka_unit_test(test_minimum_does_not_creep),
        cmocka_unit_test(test_a_slow_link_shows_itself_by_its_queue),
        cmocka_unit_test(test_one_flat_round_is_no_growth),
        cmocka_unit_test(test_a_flat_round_without_a_queue_is_no_limit),
        cmocka_unit_test(test_pauses_of_the_path_are_in_the_mean),
        cmocka_unit_test(test_frames_begin_small_after_idleness),
        cmocka_unit_test(test_the_mean_is_of_a_full_link),
        cmocka_unit_test(test_a_new_beginning_of_tcp_does_not_lower_the_estimate),
        cmocka_unit_test(test_hint_of_an_earlier_connection),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
