/* estimates: what is believed of link, device and cloud after which measurements. */
#include "edge/estimates.h"
#include "kernels/model.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static struct plan_model filled(const struct estimates *e, uint64_t now_us)
{
    struct plan_model m = {.layer_count = 30};
    estimates_fill(e, now_us, &m);
    return m;
}

static void assert_near(double value, double expected)
{
    assert_true(value > expected - 1 && value < expected + 1);
}

static void before_anything_is_measured_it_guesses(void **state)
{
    (void)state;
    struct estimates e = {0};
    struct plan_model m = filled(&e, 5);
    assert_true(m.rate_bytes_per_us == ESTIMATES_RATE_UNKNOWN);
    assert_true(m.edge.base_ns == ESTIMATES_COST_UNKNOWN && m.cloud.base_ns == m.edge.base_ns);
    assert_true(m.decode_us > 0);
}

static void costs_come_from_chunks_and_from_the_cloud(void **state)
{
    (void)state;
    struct estimates e = {0};
    for (uint32_t i = 0; i < 20; i++) /* 20 us a token and layer, and 1 more for each 1,000 positions */
        estimates_edge(&e, (uint64_t)(64 * 8 * (20 + (64 * i + 32) / 1000.0)), 64, 8, 64 * i, false);
    struct plan_model m = filled(&e, 0);
    assert_true(m.edge.base_ns > 19900 && m.edge.base_ns < 20100);
    assert_true(m.edge.slope_ns > 0.9 && m.edge.slope_ns < 1.05);
    assert_true(m.cloud.base_ns == m.edge.base_ns); /* as long as it has not said anything */
    estimates_cloud(&e, 5000, 2048);
    estimates_cloud(&e, 0, 0); /* it does not know yet */
    m = filled(&e, 0);
    assert_true(m.cloud.base_ns == 5000 && m.cloud.slope_ns == 2);
}

/* 33 us a token and layer for itself, 42 with sending; each is believed of what it is. */
static void what_sending_adds_is_kept_apart(void **state)
{
    (void)state;
    struct estimates e = {0};
    estimates_edge(&e, 64 * 8 * 33, 64, 8, 0, true);
    struct plan_model m = filled(&e, 0);
    assert_true(m.edge.base_ns == 33000 && m.edge_sending_ns == 0 && !m.edge_tried);
    for (uint32_t i = 0; i < 100; i++)
        estimates_edge(&e, 64 * 30 * 33, 64, 30, 0, true);
    for (uint32_t i = 0; i < 2; i++) /* however much of the other there was before */
        estimates_edge(&e, 64 * 15 * 42, 64, 15, 0, false);
    m = filled(&e, 0);
    assert_near(m.edge.base_ns, 42000);
    assert_near(m.edge_sending_ns, 9000);
    for (uint32_t i = 0; i < 500; i++)
        estimates_edge(&e, 64 * 30 * 50, 64, 30, 0, true);
    m = filled(&e, 0); /* it cannot be slower alone */
    assert_near(m.edge.base_ns, 42000);
    assert_near(m.edge_sending_ns, 0);
    for (uint32_t i = 0; i < 500; i++)
        estimates_edge(&e, 64 * 30, 64, 30, 0, true);
    assert_near(filled(&e, 0).edge_sending_ns, 21000);
}

/* A long prompt for itself and the beginning of a short one with sending: what the end of a long one takes with sending is known. */
static void positions_cost_alike_with_sending_and_without(void **state)
{
    (void)state;
    struct estimates e = {0};
    for (uint32_t i = 0; i < 32; i++) /* 30 us, and 20 more for each 1,000 positions */
        estimates_edge(&e, (uint64_t)(64 * 30 * (30 + (64 * i + 32) / 50.0)), 64, 30, 64 * i, true);
    for (uint32_t i = 0; i < 2; i++)
        estimates_edge(&e, (uint64_t)(64 * 15 * (38 + 32 / 50.0)), 64, 15, 0, false);
    struct plan_model m = filled(&e, 0);
    assert_true(m.edge.base_ns > 37900 && m.edge.base_ns < 38100);
    assert_true(m.edge.slope_ns > 19 && m.edge.slope_ns < 20.1);
    assert_true(m.edge_sending_ns > 7000 && m.edge_sending_ns < 8100);
}

/* SmolLM2-135M: 576 wide, 9 heads of 64, 3 of KV, 1,536. A layer has 3.54 million products a token, and 1,152 for each position before it. */
static void before_a_second_position_is_known_the_shape_tells_the_slope(void **state)
{
    (void)state;
    struct model_params p = {
        .embd_size = 576, .ffn_size = 1536, .head_count = 9, .kv_head_count = 3, .head_dim = 64};
    double rise = MODEL_ATTENTION * 1152 / 3538944;
    assert_true(model_rise(&p) > 0.999 * rise && model_rise(&p) < 1.001 * rise);
    assert_true(model_rise(&(struct model_params){0}) == 0);
    struct estimates e = {.edge_rise = rise};
    struct plan_model m = filled(&e, 0);
    assert_true(m.edge.base_ns == ESTIMATES_COST_UNKNOWN && m.edge.slope_ns == 0);
    estimates_edge(&e, 64 * 30 * 27, 64, 30, 0, true);
    m = filled(&e, 0);
    assert_near(m.edge.base_ns + 32 * m.edge.slope_ns, 27000); /* where it was measured it is as measured */
    assert_near(m.edge.slope_ns / m.edge.base_ns * 1e6, rise * 1e6);
    for (uint32_t i = 0; i < 32; i++) /* level after all */
        estimates_edge(&e, 64 * 15 * 27, 64, 15, 64 * i, false);
    m = filled(&e, 0);
    assert_true(m.edge.slope_ns < 0.1 * rise * m.edge.base_ns);
    assert_near(m.edge_sending_ns, 0);
}

static void a_device_is_tried_once_it_has_run_some_chunks_for_itself(void **state)
{
    (void)state;
    struct estimates e = {0};
    for (uint32_t i = 0; i < 20; i++)
        estimates_edge(&e, 64 * 15 * 42, 64, 15, 0, false);
    for (uint32_t i = 1; i <= ESTIMATES_ALONE_TRIED; i++) {
        assert_false(filled(&e, 0).edge_tried);
        estimates_edge(&e, 64 * 30 * 33, 64, 30, 0, true);
    }
    assert_true(filled(&e, 0).edge_tried);
}

static void a_device_that_wavers_is_known_to(void **state)
{
    (void)state;
    struct estimates steady = {0}, wavers = {0};
    for (uint32_t i = 0; i < 40; i++) {
        estimates_edge(&steady, 64 * 8 * 20, 64, 8, 64 * (i % 20), false);
        estimates_edge(&wavers, 64 * 8 * (i % 2 ? 30 : 10), 64, 8, 64 * (i % 20), false);
    }
    assert_true(filled(&steady, 0).edge_off < 0.01);
    assert_true(filled(&wavers, 0).edge_off > 0.3 && filled(&wavers, 0).edge_off < 0.8);
}

static struct link_stats stats_of(uint64_t sent, uint64_t acked, uint64_t rate)
{
    return (struct link_stats){
        .rate_bytes_per_s = rate, .min_rtt_us = 10000, .bulk_sent_size = sent, .bulk_acked_size = acked};
}

static void told(struct estimates *e, uint64_t now_us, uint64_t sent, uint64_t acked, uint64_t rate)
{
    struct link_stats s = stats_of(sent, acked, rate);
    estimates_link(e, &s, now_us);
}

static void steady_link_is_believed_and_a_wavering_one_less(void **state)
{
    (void)state;
    struct estimates steady = {0}, wavers = {0};
    for (uint64_t i = 1; i < 50; i++) {
        told(&steady, i * 10000, i * 100000, i * 100000, 10000000);
        told(&wavers, i * 10000, i * 100000, i * 100000, i % 2 ? 10000000 : 6000000);
    }
    assert_true(estimates_rate(&steady, 490000) > 9.9);
    assert_true(estimates_rate(&wavers, 490000) < 8);
    assert_true(filled(&steady, 490000).delay_us == 5000);
}

static void the_mean_is_believed_rather_than_the_best(void **state)
{
    (void)state;
    struct estimates e = {0};
    struct link_stats s = stats_of(65536, 65536, 12500000);
    s.mean_bytes_per_s = 10000000;
    estimates_link(&e, &s, 10000);
    assert_true(estimates_rate(&e, 10000) == 10);
    s = stats_of(165536, 165536, 9000000);
    s.mean_bytes_per_s = 10000000; /* older than the best */
    estimates_link(&e, &s, 20000);
    assert_true(estimates_rate(&e, 20000) <= 9);
}

static void a_rate_that_still_grows_only_raises(void **state)
{
    (void)state;
    struct estimates e = {0};
    struct link_stats s = stats_of(65536, 65536, 400000);
    s.rate_grows = true;
    estimates_link(&e, &s, 10000);
    assert_true(estimates_rate(&e, 10000) == ESTIMATES_RATE_UNKNOWN);
    s = stats_of(200000, 200000, 12500000);
    s.rate_grows = true;
    estimates_link(&e, &s, 20000);
    assert_true(estimates_rate(&e, 20000) == 12.5);
    s = stats_of(300000, 300000, 2500000); /* another connection begins anew */
    s.rate_grows = true;
    estimates_link(&e, &s, 30000);
    assert_true(estimates_rate(&e, 30000) == 12.5);
    told(&e, 40000, 400000, 400000, 2500000); /* it has shown its limit */
    assert_true(estimates_rate(&e, 40000) < 2.5);
}

static void silence_bounds_the_rate(void **state)
{
    (void)state;
    struct estimates e = {0};
    told(&e, 1000000, 500000, 400000, 12500000);
    told(&e, 1010000, 900000, 500000, 12500000);
    assert_true(estimates_rate(&e, 1020000) > 12); /* nothing is late yet */
    told(&e, 1510000, 900000, 500000, 12500000);   /* 400,000 bytes for half a second */
    double rate = estimates_rate(&e, 1510000);
    assert_true(rate > 0.8 && rate < 0.83);
    double backlog_us = estimates_backlog_us(&e, 1510000);
    assert_true(backlog_us > 480000 && backlog_us < 500000);
    told(&e, 1520000, 900000, 900000, 12500000); /* it was only a pause */
    assert_true(estimates_rate(&e, 1520000) > 12);
}

static void an_idle_link_is_not_silent(void **state)
{
    (void)state;
    struct estimates e = {0};
    told(&e, 1000000, 500000, 500000, 12500000);
    told(&e, 9000000, 500000, 500000, 12500000);
    told(&e, 9010000, 600000, 500000, 12500000); /* sent just now */
    assert_true(estimates_rate(&e, 9050000) > 12);
}

/* The link answers the probe that was asked for: it carries that much at least. */
static void probed(struct estimates *e, uint64_t now_us, uint64_t floor)
{
    struct link_stats s = stats_of(e->acked_size, e->acked_size, 0);
    s.probe_count = e->probe_count + 1;
    s.probe_bytes_per_s = floor;
    estimates_link(e, &s, now_us);
}

static void the_first_probe_tells_a_slow_link_from_the_unknown(void **state)
{
    (void)state;
    struct estimates slow = {0}, fast = {0};
    assert_true(estimates_wants_probe(&slow, false, 1000));
    assert_false(estimates_wants_probe(&slow, false, 1001)); /* it is on its way */
    probed(&slow, 100000, 125000);
    assert_true(estimates_rate(&slow, 200000) ==
                1.5 * 0.125); /* it is a floor, and hopes are half as high again */
    assert_true(estimates_wants_probe(&fast, false, 1000));
    probed(&fast, 100000,
           3200000); /* as much as a probe can tell from the clock: 1000 Mbit/s may be behind it */
    assert_true(estimates_rate(&fast, 200000) == ESTIMATES_RATE_UNKNOWN);
}

static void a_rate_that_bulk_has_lowered_is_probed_at_once_and_raised(void **state)
{
    (void)state;
    struct estimates e = {0};
    told(&e, 1000000, 200000, 100000, 300000);
    assert_false(estimates_wants_probe(&e, false, 1000001));                   /* something is under way */
    assert_int_equal(estimates_probe_wait_us(&e, 1000001), ESTIMATES_SOON_US); /* nobody asks all the time */
    told(&e, 1100000, 200000, 200000, 300000);
    assert_true(estimates_wants_probe(&e, false, 1100001));
    probed(&e, 1200000, 3000000);
    assert_true(estimates_rate(&e, 1200000) == 4.5);
    told(&e, 1300000, 300000, 300000, 12500000); /* and it was so */
    assert_true(estimates_rate(&e, 1300000) == 12.5);
    assert_false(estimates_wants_probe(&e, false, UINT64_MAX / 2)); /* a fast link finds out by itself */
}

/* A small probe goes through any link of 32 Mbit/s and more in the same time, so it could never raise a belief of 30. */
static void what_is_believed_says_how_large_a_probe_must_be(void **state)
{
    (void)state;
    struct estimates e = {0};
    assert_int_equal(estimates_probe_size(&e), 0);
    estimates_set_rate(&e, 0.125); /* 1 Mbit/s */
    assert_int_equal(estimates_probe_size(&e), 0);
    estimates_set_rate(&e, 0.0625); /* a question that comes behind it waits for 100 ms */
    assert_int_equal(estimates_probe_size(&e), 6250);
    estimates_set_rate(&e, 0.004);
    assert_int_equal(estimates_probe_size(&e), 1200);
    estimates_set_rate(&e, 2); /* 16 Mbit/s */
    assert_int_equal(estimates_probe_size(&e), 0);
    estimates_set_rate(&e, 4);
    assert_int_equal(estimates_probe_size(&e), 160000);
    estimates_set_rate(&e, 60);
    assert_int_equal(estimates_probe_size(&e), 250000);
    e.probes_vain = 2 * ESTIMATES_PROBE_SOON;
    assert_int_equal(estimates_probe_size(&e), 250000);
    e.probes_vain++; /* an idle day's */
    assert_int_equal(estimates_probe_size(&e), 0);
}

/* How long after the n-th vain probe the next is due: a few soon, in case something passing made them late. */
static uint64_t pause_us(uint32_t vain)
{
    return vain < ESTIMATES_PROBE_SOON
               ? ESTIMATES_SOON_US
               : (uint64_t)ESTIMATES_PROBE_US << TD_MIN(vain - ESTIMATES_PROBE_SOON, ESTIMATES_PROBE_SHIFT);
}

static void a_slow_link_is_probed_ever_more_rarely(void **state)
{
    (void)state;
    struct estimates e = {0};
    told(&e, 1000000, 100000, 100000, 125000);
    uint64_t now_us = 1000000, wait_us = 0;
    for (uint32_t i = 0; i < ESTIMATES_PROBE_SOON + ESTIMATES_PROBE_SHIFT + 3; i++) {
        uint64_t soon_us = estimates_probe_wait_us(&e, now_us);
        assert_true(soon_us == TD_MAX(wait_us, 1u));
        assert_false(wait_us && estimates_wants_probe(&e, false, now_us + wait_us - 1));
        now_us += wait_us;
        assert_true(estimates_wants_probe(&e, false, now_us));
        if (i != 1) /* one is not answered */
            probed(&e, now_us, 120000);
        assert_true(estimates_rate(&e, now_us + 3600000000u) == 0.125); /* and not forgotten in between */
        wait_us = pause_us(i + 1);
    }
    told(&e, now_us, 200000, 200000, 60000); /* slower still, or a busy machine */
    assert_true(estimates_wants_probe(&e, false, now_us));
}

/* Others compute: each answer is late by something else, and the best of them is what to believe. Only those that agree with it show that nothing better is to be had. */
static void a_late_probe_is_asked_again_soon(void **state)
{
    (void)state;
    struct estimates e = {0};
    uint64_t now_us = 1000000;
    assert_true(estimates_wants_probe(&e, false, now_us));
    probed(&e, now_us, 500000);
    for (uint32_t i = 0; i < ESTIMATES_PROBES_LATE; i++) {
        now_us += ESTIMATES_SOON_US;
        assert_true(estimates_wants_probe(&e, false, now_us));
        probed(&e, now_us, 200000 + 10000 * i);
        assert_true(estimates_rate(&e, now_us) == 1.5 * 0.5);
        assert_int_equal(estimates_probe_wait_us(&e, now_us), ESTIMATES_SOON_US);
    }
    struct estimates slow = e;
    for (uint32_t i = 0; i < ESTIMATES_PROBE_SOON; i++) {
        now_us += ESTIMATES_SOON_US;
        assert_true(estimates_wants_probe(&slow, false, now_us));
        probed(&slow, now_us, i == 0 ? 200000 : 410000);
    }
    assert_int_equal(estimates_probe_wait_us(&slow, now_us), ESTIMATES_PROBE_US);
    probed(&e, now_us, 4000000);
    assert_true(estimates_rate(&e, now_us) == 6);
}

/* Short bursts pass, long ones are held back. */
static void probes_that_promise_too_much_become_rare(void **state)
{
    (void)state;
    struct estimates e = {0};
    uint64_t now_us = 1000000, sent = 100000;
    told(&e, now_us, sent, sent, 125000);
    for (uint32_t i = 0; i < ESTIMATES_PROBE_SHIFT + 3; i++) {
        uint64_t wait_us = i ? (uint64_t)ESTIMATES_PROBE_US << TD_MIN(i, ESTIMATES_PROBE_SHIFT) : 0;
        assert_false(wait_us && estimates_wants_probe(&e, false, now_us + wait_us - 1));
        now_us += wait_us;
        assert_true(estimates_wants_probe(&e, false, now_us));
        probed(&e, now_us, 6000000);
        assert_true(estimates_rate(&e, now_us) == ESTIMATES_RATE_UNKNOWN); /* not twice as much */
        sent += 100000;
        told(&e, now_us, sent, sent, 125000);
        assert_true(estimates_rate(&e, now_us) == 0.125); /* no part of a deviation comes from a probe */
        assert_int_equal(estimates_probe_wait_us(&e, now_us),
                         (uint64_t)ESTIMATES_PROBE_US << TD_MIN(i + 1, ESTIMATES_PROBE_SHIFT));
    }
    e.probe_due_us = 0;
    assert_true(estimates_wants_probe(&e, false, now_us));
    probed(&e, now_us, 6000000);
    told(&e, now_us, sent + 100000, sent + 100000, 5000000); /* kept at last */
    told(&e, now_us, sent + 200000, sent + 200000, 125000);
    assert_true(estimates_wants_probe(&e, false, now_us));
}

/* Who computes answers late, and a fast link would look like a slow one: it is waited for, and not for ever. */
static void a_probe_waits_for_a_quiet_moment(void **state)
{
    (void)state;
    struct estimates e = {0};
    told(&e, 1000000, 100000, 100000, 125000);
    assert_false(estimates_wants_probe(&e, true, 1000000));
    assert_false(estimates_wants_probe(&e, true, 999999 + ESTIMATES_PROBE_US));
    struct estimates quiet = e;
    assert_true(estimates_wants_probe(&quiet, false, 1000000));
    assert_true(estimates_wants_probe(&e, true, 1000000 + ESTIMATES_PROBE_US));
}

static void another_connection_counts_its_probes_anew(void **state)
{
    (void)state;
    struct estimates e = {0};
    probed(&e, 1000, 125000);
    probed(&e, 2000, 125000);
    estimates_link_lost(&e);
    probed(&e, 3000, 1250000);
    assert_int_equal(e.probe_count, 1);
    assert_true(estimates_rate(&e, 4000) == 1.875);
}

static void reply_tokens_give_the_time_between_them(void **state)
{
    (void)state;
    struct estimates e = {0};
    estimates_token(&e, true, 1000);
    for (uint64_t i = 1; i < 40; i++)
        estimates_token(&e, false, 1000 + i * 8000);
    estimates_token(&e, true, 90000000); /* the next reply: the time since the last is no token's */
    assert_true(filled(&e, 0).decode_us > 7999 && filled(&e, 0).decode_us < 8001);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(before_anything_is_measured_it_guesses),
        cmocka_unit_test(costs_come_from_chunks_and_from_the_cloud),
        cmocka_unit_test(what_sending_adds_is_kept_apart),
        cmocka_unit_test(positions_cost_alike_with_sending_and_without),
        cmocka_unit_test(before_a_second_position_is_known_the_shape_tells_the_slope),
        cmocka_unit_test(a_device_is_tried_once_it_has_run_some_chunks_for_itself),
        cmocka_unit_test(a_device_that_wavers_is_known_to),
        cmocka_unit_test(steady_link_is_believed_and_a_wavering_one_less),
        cmocka_unit_test(the_mean_is_believed_rather_than_the_best),
        cmocka_unit_test(a_rate_that_still_grows_only_raises),
        cmocka_unit_test(silence_bounds_the_rate),
        cmocka_unit_test(an_idle_link_is_not_silent),
        cmocka_unit_test(the_first_probe_tells_a_slow_link_from_the_unknown),
        cmocka_unit_test(a_rate_that_bulk_has_lowered_is_probed_at_once_and_raised),
        cmocka_unit_test(what_is_believed_says_how_large_a_probe_must_be),
        cmocka_unit_test(a_slow_link_is_probed_ever_more_rarely),
        cmocka_unit_test(a_late_probe_is_asked_again_soon),
        cmocka_unit_test(probes_that_promise_too_much_become_rare),
        cmocka_unit_test(a_probe_waits_for_a_quiet_moment),
        cmocka_unit_test(another_connection_counts_its_probes_anew),
        cmocka_unit_test(reply_tokens_give_the_time_between_them),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
