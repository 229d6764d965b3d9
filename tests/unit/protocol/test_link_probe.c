/* link, probe: what an idle path is found to carry, without bulk. */
#include "link_path.h"

/* What an idle path carries, without bulk: exact where it is slow, a floor where the clock is too coarse. */
static void test_a_probe_finds_what_an_idle_path_carries(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_COUNT(paths); i++) {
        struct link_stats stats;
        path_start(paths[i].rate, paths[i].round_trip_us);
        path_run(2 * paths[i].round_trip_us);
        link_probe(path.edge.link, 0);
        path_run(2 * paths[i].round_trip_us + 200 * MS);
        link_stats(path.edge.link, &stats);
        assert_int_equal(stats.probe_count, 1);
        uint64_t takes_us = LINK_PROBE_SIZE * SECOND / paths[i].rate;
        assert_about(stats.probe_bytes_per_s, LINK_PROBE_SIZE * SECOND / (takes_us + 3 * MS), 12);
        assert_about(stats.min_rtt_us, paths[i].round_trip_us, 20); /* the padding is no part of it */
        assert_int_equal(stats.rate_bytes_per_s, 0);
        path_run(60 * SECOND); /* once only */
        link_stats(path.edge.link, &stats);
        assert_int_equal(stats.probe_count, 1);
        path_stop();
    }
}

/* What is through within a probe's slack looks alike; a larger one tells. It ends where bulk begins, and the next one is whole again. */
static void test_a_larger_probe_shows_more(void **state)
{
    (void)state;
    struct link_stats stats;
    path_start(100 * MBIT, 200 * MS);
    path_run(500 * MS);
    for (uint64_t frames = 1; frames <= 15; frames += 14) {
        link_probe(path.edge.link, frames * LINK_PROBE_SIZE - 1);
        path_run(500 * MS);
        link_stats(path.edge.link, &stats);
        uint64_t size = frames * LINK_PROBE_SIZE;
        assert_about(stats.probe_bytes_per_s, size * SECOND / (size * SECOND / (100 * MBIT) + 3 * MS), 5);
    }
    uint64_t before = stats.bytes_out;
    link_probe(path.edge.link, SIZE_MAX - LINK_PROBE_SIZE);
    path_run(500 * MS);
    link_stats(path.edge.link, &stats);
    assert_about(stats.bytes_out - before, LINK_PROBE_FRAMES_MAX * LINK_PROBE_SIZE, 1);
    static uint8_t bytes[LIMIT_FRAME_SIZE];
    link_probe(path.edge.link, 4 * LINK_PROBE_SIZE);
    int64_t size = link_next(path.edge.link, bytes, sizeof bytes, path.now_us);
    pipe_put(&path.up, bytes, (size_t)size, path.now_us);
    path.edge.link->rate.sent_size++; /* bulk has gone */
    path_run(500 * MS);
    path.edge.link->rate.acked_size++;
    link_stats(path.edge.link, &stats);
    assert_int_equal(stats.probe_count, 3);
    link_probe(path.edge.link, 4 * LINK_PROBE_SIZE);
    path_run(500 * MS);
    link_stats(path.edge.link, &stats);
    assert_int_equal(stats.probe_count, 4);
    path_stop();
}

/* What it finds is of the bytes that went. */
static void test_a_slow_link_is_probed_with_little(void **state)
{
    (void)state;
    enum { RATE = 4000, SIZE = 1200 };
    struct link_stats stats;
    path_start(RATE, 40 * MS);
    path_run(2 * SECOND);
    link_stats(path.edge.link, &stats);
    uint64_t before = stats.bytes_out;
    link_probe(path.edge.link, SIZE);
    path_run(SECOND);
    link_stats(path.edge.link, &stats);
    assert_in_range(stats.bytes_out - before, SIZE, SIZE + 64);
    assert_int_equal(stats.probe_count, 1);
    assert_about(stats.probe_bytes_per_s, RATE, 12);
    path_stop();
}

/* Bulk does not wait for the rest of a probe, whose answer is of what had gone. */
static void test_bulk_ends_a_probe(void **state)
{
    (void)state;
    static uint8_t bytes[LIMIT_FRAME_SIZE];
    path_start(100 * MBIT, 40 * MS);
    path_run(500 * MS);
    struct link *l = path.edge.link;
    link_probe(l, SIZE_MAX - LINK_PROBE_SIZE);
    for (int i = 0; i < 3; i++) {
        int64_t size = link_next(l, bytes, sizeof bytes, path.now_us);
        assert_int_equal(bytes[0], FRAME_PING);
        assert_true(size > LINK_PROBE_SIZE);
        pipe_put(&path.up, bytes, (size_t)size, path.now_us);
    }
    link_probe(l, 0); /* another is asked for: this one is as large as it was */
    path_queue(1000);
    assert_true(link_next(l, bytes, sizeof bytes, path.now_us) > 0);
    assert_int_equal(bytes[0], FRAME_KV_BLOCK);
    assert_int_equal(l->probe_frames, 3);
    path_stop();
}

/* The minimum was seen in a queue of others' traffic, which has gone since: the probe corrects it and says nothing of the rate; a ping without padding is due, and then
 * the next one tells. */
static void test_a_probe_sooner_than_the_minimum(void **state)
{
    (void)state;
    struct rate r;
    rate_init(&r, 0);
    uint64_t now_us = 100 * SECOND;
    rate_ping(&r, 80 * MS, true, now_us);
    assert_int_equal(r.min_rtt_us, 80 * MS);
    rate_probed(&r, LINK_PROBE_SIZE, 45 * MS, now_us += SECOND);
    assert_int_equal(r.probe_count, 0);
    assert_int_equal(r.min_rtt_us, 45 * MS);
    assert_true(rate_wants_ping(&r, now_us));
    rate_ping(&r, 40 * MS, true, now_us);
    rate_probed(&r, LINK_PROBE_SIZE, 45 * MS, now_us += SECOND);
    assert_int_equal(r.probe_count, 1);
    assert_int_equal(r.probe_rate, LINK_PROBE_SIZE * SECOND / (8 * MS));
}

/* Before bulk has shown anything a search begins with what a probe has, as far as it may be trusted. */
static void test_a_search_begins_with_what_a_probe_has_shown(void **state)
{
    (void)state;
    static const struct {
        uint64_t rate, round_trip_us, window;
    } links[] = {{MBIT, 20 * MS, 16 << 10},
                 {MBIT, 200 * MS, MBIT * 24 / 100},
                 {8 * MBIT, 200 * MS, 128 << 10},
                 {300 * MBIT, 200 * MS, 128 << 10}};
    for (size_t i = 0; i < TD_COUNT(links); i++) {
        path_start(links[i].rate, links[i].round_trip_us);
        path_run(500 * MS);
        assert_int_equal(rate_window(&path.edge.link->rate), 16 << 10);
        link_probe(path.edge.link, 0);
        path_run(SECOND);
        assert_about(rate_window(&path.edge.link->rate), links[i].window, 5);
        path_stop();
    }
}

/* It waits for the path to be empty, and for the round trip to be known; bulk that follows it closely spoils it. */
static void test_a_probe_has_the_path_for_itself(void **state)
{
    (void)state;
    struct link_stats stats;
    path_start(5 * MBIT, 40 * MS);
    link_probe(path.edge.link, 0);
    path_run(42 * MS); /* the first ping has come back */
    path.queued_target = 200000;
    path_run(2 * SECOND);
    link_probe(path.edge.link, 0);
    path_run(2 * SECOND);
    link_stats(path.edge.link, &stats);
    assert_int_equal(stats.probe_count, 0);
    path.queued_target = 0;
    path_run(SECOND);
    link_stats(path.edge.link, &stats);
    assert_int_equal(stats.probe_count, 1);
    assert_about(stats.probe_bytes_per_s, 5 * MBIT * 19 / 22, 12);
    path_stop();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_probe_finds_what_an_idle_path_carries),
        cmocka_unit_test(test_a_larger_probe_shows_more),
        cmocka_unit_test(test_a_slow_link_is_probed_with_little),
        cmocka_unit_test(test_bulk_ends_a_probe),
        cmocka_unit_test(test_a_probe_sooner_than_the_minimum),
        cmocka_unit_test(test_a_search_begins_with_what_a_probe_has_shown),
        cmocka_unit_test(test_a_probe_has_the_path_for_itself),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
