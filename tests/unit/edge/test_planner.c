/* planner: every plan covers the prompt, keeps to block borders, and follows the rules of planner.h. */
#include "planner_states.h"

static void new_prompt_is_one_edge_range(void **state)
{
    (void)state;
    struct planner_state s = base();
    struct plan p;
    planner_plan(&s, &p);
    assert_int_equal(p.range_count, 1);
    assert_int_equal(p.ranges[0].first_token, 0);
    assert_int_equal(p.ranges[0].count, 1000);
    assert_int_equal(p.ranges[0].layers, 8);
    assert_int_equal(p.ranges[0].codec, KV_L1);
    assert_int_equal(p.ranges[0].hidden_dtype, HIDDEN_F16);
    assert_int_equal(p.layers, 8);
    assert_int_equal(p.compute_begin, 0);
    assert_int_equal(p.send_begin, 0);
}

static void answer_of_the_cloud_cuts_the_front_off(void **state)
{
    (void)state;
    struct planner_state s = base();
    s.cached_tokens = 640, s.cached_known = true;
    hold(&s, 512);
    struct plan p;
    planner_plan(&s, &p);
    assert_int_equal(p.range_count, 1);
    assert_int_equal(p.ranges[0].first_token, 640);
    assert_int_equal(p.ranges[0].count, 360);
    assert_int_equal(p.ranges[0].layers, 8);
    assert_int_equal(p.compute_begin, 512); /* catches up on 128 tokens */
    assert_int_equal(p.send_begin, 640);
}

static void what_is_held_beyond_the_cache_is_still_sent(void **state)
{
    (void)state;
    struct planner_state s = base();
    s.cached_tokens = 640, s.cached_known = true;
    hold(&s, 960);
    struct plan p;
    planner_plan(&s, &p);
    assert_int_equal(p.compute_begin, 640);
    assert_int_equal(p.send_begin, 640);
}

static void a_guess_leaves_its_prefix_to_the_cloud(void **state)
{
    (void)state;
    struct planner_state s = base();
    s.cached_tokens = 640;
    hold(&s, 640);
    struct plan p;
    planner_plan(&s, &p);
    assert_int_equal(p.range_count, 2);
    assert_int_equal(p.ranges[0].first_token, 0);
    assert_int_equal(p.ranges[0].count, 640);
    assert_int_equal(p.ranges[0].layers, 0);
    assert_int_equal(p.ranges[1].first_token, 640);
    assert_int_equal(p.ranges[1].count, 360);
    assert_int_equal(p.ranges[1].layers, 8);
}

static void catching_up_has_a_price(void **state)
{
    (void)state;
    /* 360 tokens are left: 720 may be caught up, 721 may not. */
    assert_true(planner_catch_up_pays(0, 720, 1080));
    assert_false(planner_catch_up_pays(0, 721, 1081));
    assert_true(planner_catch_up_pays(64, 64, 65));
    assert_true(planner_catch_up_pays(UINT32_MAX, 64, 65));
    struct planner_state s = base();
    s.cached_tokens = 960, s.cached_known = true;
    hold(&s, 832);
    struct plan p;
    planner_plan(&s, &p); /* 128 missing, 40 left */
    assert_int_equal(p.layers, 0);
    assert_int_equal(p.range_count, 1);
    assert_int_equal(p.ranges[0].first_token, 960);
    assert_int_equal(p.ranges[0].count, 40);
    assert_int_equal(p.ranges[0].layers, 0);
    hold(&s, 896); /* 64 missing, 40 left */
    planner_plan(&s, &p);
    assert_int_equal(p.layers, 8);
    assert_int_equal(p.compute_begin, 896);
}

static void without_layers_the_cloud_does_all(void **state)
{
    (void)state;
    struct planner_state s = base();
    s.layers_wanted = 0, s.cached_tokens = 128;
    struct plan p;
    planner_plan(&s, &p);
    assert_int_equal(p.layers, 0);
    assert_int_equal(p.range_count, 1);
    assert_int_equal(p.ranges[0].first_token, 0); /* a guess is not worth a second range here */
    assert_int_equal(p.ranges[0].count, 1000);
    assert_int_equal(p.ranges[0].layers, 0);
}

static void exact_requests_get_lossless_forms(void **state)
{
    (void)state;
    struct planner_state s = base();
    s.accept = KV_ACCEPT_EXACT;
    struct plan p;
    planner_plan(&s, &p);
    assert_int_equal(p.codec, KV_L0);
    assert_int_equal(p.hidden_dtype, HIDDEN_F32);
    s.codec = KV_RAW;
    planner_plan(&s, &p);
    assert_int_equal(p.codec, KV_RAW);
    s.codec = KV_L1, s.codec_mask = 1u << KV_L1;
    planner_plan(&s, &p); /* no lossless codec at the cloud: no edge range */
    assert_int_equal(p.layers, 0);
    s.codec_mask = 1u << KV_RAW;
    planner_plan(&s, &p);
    assert_int_equal(p.codec, KV_RAW);
    s.hidden_mask = 1u << HIDDEN_F16;
    planner_plan(&s, &p);
    assert_int_equal(p.layers, 0);
}

static void unknown_codecs_fall_back_to_lossless(void **state)
{
    (void)state;
    struct planner_state s = base();
    s.codec_mask = 1u << KV_RAW, s.hidden_mask = 1u << HIDDEN_F32;
    struct plan p;
    planner_plan(&s, &p);
    assert_int_equal(p.codec, KV_RAW);
    assert_int_equal(p.hidden_dtype, HIDDEN_F32);
    assert_int_equal(p.layers, 8);
    s.codec_mask = 0;
    planner_plan(&s, &p);
    assert_int_equal(p.layers, 0);
}

static void rows_that_do_not_fit_go_as_f32(void **state)
{
    (void)state;
    struct planner_state s = base();
    s.rows_need_f32 = true;
    struct plan p;
    planner_plan(&s, &p);
    assert_int_equal(p.hidden_dtype, HIDDEN_F32);
    assert_int_equal(p.codec, KV_L1);
}

static void guess_is_whole_blocks_below_the_prompts_end(void **state)
{
    (void)state;
    assert_int_equal(planner_guess_cached(0, 1), 0);
    assert_int_equal(planner_guess_cached(63, 1000), 0);
    assert_int_equal(planner_guess_cached(64, 1000), 64);
    assert_int_equal(planner_guess_cached(64, 64), 0); /* the last token is always computed */
    assert_int_equal(planner_guess_cached(64, 65), 64);
    assert_int_equal(planner_guess_cached(999, 1000), 960);
}

/* ---- the planner's choice ---- */

static struct plan_times foretold(const struct planner_state *s, uint32_t layers, uint32_t kv_end)
{
    struct plan_range ranges[2] = {{.count = s->prompt_count}};
    uint32_t count = 1;
    if (layers > 0) {
        ranges[0] = (struct plan_range){0, kv_end, layers, KV_L1, HIDDEN_F16};
        ranges[1] =
            (struct plan_range){kv_end, s->prompt_count - kv_end, layers, PLAN_CODEC_NONE, HIDDEN_F16};
        count = kv_end == 0 ? 1 : kv_end < s->prompt_count ? 2 : 1;
        if (kv_end == 0)
            ranges[0] = ranges[1];
    }
    return plan_model_run(&s->model, ranges, count, &(struct plan_progress){0});
}

static double sum(struct plan_times t)
{
    return 0.125 * t.first_us + t.t16_us;
}

static void reading_from_the_disk_takes_its_time(void **state)
{
    (void)state;
    struct planner_state s = choosing(300, 1, 2048, 31700, 31700);
    struct plan held, unread, lost;
    s.cached_tokens = 1024;
    hold(&s, 1024);
    planner_plan(&s, &held);
    assert_true(held.layers > 0);
    s.unread_tokens = 512; /* as if so many had to be computed */
    planner_plan(&s, &unread);
    assert_true(unread.times.first_us > held.times.first_us);
    hold(&s, 512);
    s.unread_tokens = 0;
    planner_plan(&s, &lost);
    assert_int_equal(unread.layers, lost.layers);
    assert_true(unread.times.first_us == lost.times.first_us);
    hold(&s, 1024);
    s.unread_tokens = 100000; /* never worse than having nothing */
    planner_plan(&s, &unread);
    hold(&s, 0);
    s.unread_tokens = 0;
    planner_plan(&s, &lost);
    assert_true(unread.times.first_us == lost.times.first_us);
}

static const double mbits[] = {0.5, 1, 5, 20, 50, 100, 300, 1000, 10000};
static const double delays[] = {1, 10, 50};
static const uint32_t prompts[] = {40, 128, 500, 2048};
static const double speeds[][2] = {
    {31700, 31700}, {31700, 3170}, {3170, 31700}, {200000, 500}, {31700, 63400}};

#define EACH(i, list) (size_t i = 0; i < TD_COUNT(list); i++)

/* Every (k, KV sent): none that respects both limits is much better than what was chosen. */
static void choice_is_the_best_of_all(void **state)
{
    (void)state;
    for
        EACH(a, mbits)
        for
            EACH(b, delays)
            for
                EACH(c, prompts)
                for
                    EACH(d, speeds)
                    {
                        struct planner_state s =
                            choosing(mbits[a], delays[b], prompts[c], speeds[d][0], speeds[d][1]);
                        struct plan p;
                        planner_plan(&s, &p);
                        struct plan_times alone = foretold(&s, 0, 0);
                        double best = sum(alone);
                        for (uint32_t k = 1; k <= 30; k++)
                            for (uint32_t kv = 0; kv < prompts[c] + 64; kv += 64) {
                                struct plan_times t = foretold(&s, k, TD_MIN(kv, prompts[c]));
                                if (t.first_us <= alone.first_us && t.t16_us <= alone.t16_us)
                                    best = TD_MIN(best, sum(t));
                            }
                        if (sum(p.times) > best * 1.04)
                            fail_msg(
                                "%g Mbit/s, %g ms, %u tokens, %g:%g ns: chose k = %u, %.1f ms; best %.1f ms",
                                mbits[a], delays[b], prompts[c], speeds[d][0], speeds[d][1], p.layers,
                                sum(p.times) / 1e3, best / 1e3);
                    }
}

/* The cloud alone is the better single side, unless the device does everything (k = L) sooner: never more than 5 % later than either. */
static void never_slower_than_either_side(void **state)
{
    (void)state;
    for
        EACH(a, mbits)
        for
            EACH(b, delays)
            for
                EACH(c, prompts)
                for
                    EACH(d, speeds)
                    {
                        struct planner_state s =
                            choosing(mbits[a], delays[b], prompts[c], speeds[d][0], speeds[d][1]);
                        struct plan p;
                        planner_plan(&s, &p);
                        struct plan_times cloud = foretold(&s, 0, 0), edge = foretold(&s, 30, prompts[c]);
                        bool edge_wins = edge.first_us <= cloud.first_us && edge.t16_us <= cloud.t16_us;
                        assert_true(p.times.first_us <= 1.05 * cloud.first_us);
                        assert_true(p.times.t16_us <= 1.05 * cloud.t16_us);
                        if (edge_wins)
                            assert_true(sum(p.times) <= 1.05 * sum(edge));
                    }
}

static void equal_machines_share_a_prompt_over_a_fast_link(void **state)
{
    (void)state;
    struct planner_state s = choosing(1000, 1, 2048, 31700, 31700);
    struct plan p;
    planner_plan(&s, &p);
    assert_in_range(p.layers, 13, 17);
    assert_true(p.times.first_us < 0.6 * p.cloud_alone.first_us);
    s = choosing(100, 1, 2048, 31700, 31700);
    planner_plan(&s, &p);
    assert_true(p.times.first_us < 0.65 * p.cloud_alone.first_us);
    assert_true(p.times.t16_us <= p.cloud_alone.t16_us);
    s = choosing(1, 1, 2048, 31700, 31700); /* 9.4 s of rows against 2 s of computing */
    planner_plan(&s, &p);
    assert_int_equal(p.layers, 0);
    assert_int_equal(p.range_count, 1);
}

static void no_kv_is_sent_that_is_computed_sooner(void **state)
{
    (void)state;
    uint32_t cut = 0;
    for (double mbit = 5; mbit < 60; mbit *= 1.01) {
        struct planner_state s = choosing(mbit, 1, 2048, 31700, 31700);
        struct plan p;
        planner_plan(&s, &p);
        const struct plan_range *last = &p.ranges[p.range_count - 1];
        assert_int_equal(plan_range_end(last), 2048);
        if (last->codec != PLAN_CODEC_NONE)
            continue;
        assert_int_equal(last->first_token % KV_BLOCK_TOKENS, 0);
        assert_true(sum(p.times) <= sum(foretold(&s, p.layers, 2048)));
        cut++;
    }
    assert_true(cut > 0); /* between two k, a part of the KV is the best */
}

/* An early first token with a gap behind it, while KV is computed or waited for, is not what is wanted. */
static void no_gap_follows_the_first_token(void **state)
{
    (void)state;
    for (double mbit = 1; mbit < 1000; mbit *= 1.2)
        for
            EACH(c, prompts)
            {
                struct planner_state s = choosing(mbit, 20, prompts[c], 80000, 80000);
                struct plan p;
                planner_plan(&s, &p);
                double gap_us = p.times.t16_us - p.times.first_us - 15 * s.model.decode_us;
                assert_true(gap_us <= 0.1 * p.times.t16_us);
            }
}

static void a_dear_cloud_gets_less_to_do(void **state)
{
    (void)state;
    struct planner_state s = choosing(100, 1, 2048, 31700, 31700);
    struct plan latency, cost;
    planner_plan(&s, &latency);
    s.prefer = PREFER_CLOUD_COST;
    planner_plan(&s, &cost);
    assert_true(cost.layers > latency.layers);
    assert_true(cost.times.cloud_us <= 0.45 * latency.cloud_alone.cloud_us);
    assert_true(cost.times.first_us <= 1.25 * latency.times.first_us);
    for
        EACH(i, mbits)
        {
            s.model.rate_bytes_per_us = mbits[i] / 8;
            s.prefer = PREFER_LATENCY;
            planner_plan(&s, &latency);
            s.prefer = PREFER_CLOUD_COST;
            planner_plan(&s, &cost);
            assert_true(cost.times.first_us <= 1.25 * latency.times.first_us);
            assert_true(cost.times.t16_us <= 1.25 * latency.times.t16_us);
            assert_true(cost.times.cloud_us <= latency.times.cloud_us * 1.01);
        }
    s = choosing(100, 1, 2048, 31700, 31700);
    planner_plan(&s, &latency);
    s.cloud_price = 1;
    planner_plan(&s, &cost);
    assert_true(cost.layers > latency.layers);
    assert_true(cost.times.cloud_us < latency.times.cloud_us);
}

static void a_cloud_with_a_queue_makes_the_device_do_more(void **state)
{
    (void)state;
    struct planner_state s = choosing(1000, 1, 1024, 31700, 31700);
    struct plan idle, busy;
    planner_plan(&s, &idle);
    s.model.queue_us = 300e3;
    planner_plan(&s, &busy);
    assert_true(busy.layers > idle.layers);
}

static void a_device_that_lacks_the_prefix_counts_what_it_costs(void **state)
{
    (void)state;
    struct planner_state s = choosing(1000, 1, 2048, 31700, 31700);
    struct plan p;
    s.cached_tokens = 1920;
    planner_plan(&s, &p);
    assert_int_equal(p.layers, 0); /* 1,920 tokens to catch up with for 128 */
    hold(&s, 1920);
    planner_plan(&s, &p);
    assert_true(p.layers > 0);
    assert_int_equal(p.compute_begin, 1920);
    for (uint32_t i = 0; i < BLOCKS; i++)
        depths[i] = TD_MIN(depths[i], 5); /* held, but not deeply */
    planner_plan(&s, &p);
    assert_in_range(p.layers, 1, 5);
}

/* ---- restoring ---- */

static void what_the_cloud_lost_is_restored_where_that_is_sooner(void **state)
{
    (void)state;
    static const struct {
        double mbit;
        bool restored;
    } cases[] = {{0.1, false}, {1, false}, {2, false}, {1000, true}, {10000, true}};
    for
        EACH(i, cases)
        {
            struct planner_state s = lost(cases[i].mbit);
            struct plan p, without;
            planner_plan(&s, &p);
            assert_int_equal(p.restore_end > p.restore_begin, cases[i].restored);
            hold(&s, 0);
            planner_plan(&s, &without);
            assert_int_equal(without.restore_end, 0);
            if (!cases[i].restored) {
                assert_true(sum(p.times) == sum(without.times));
                continue;
            }
            /* 23.5 MB take 188 ms at 1,000 Mbit/s, and 56 tokens are computed. */
            assert_int_equal(p.restore_end, 1984);
            assert_true(sum(p.times) < 0.5 * sum(without.times));
            uint32_t at = 0;
            for (uint32_t j = 0; j < p.range_count; j++) {
                assert_int_equal(p.ranges[j].first_token, at);
                at = plan_range_end(&p.ranges[j]);
                if (p.ranges[j].first_token >= p.restore_begin && at <= p.restore_end)
                    assert_true(p.ranges[j].layers == 30 && p.ranges[j].codec == KV_L1);
            }
            assert_int_equal(at, 2040);
        }
}

/* In between both work at once: the cloud computes the beginning while the rest is on its way. */
static void a_middling_link_restores_the_end(void **state)
{
    (void)state;
    struct planner_state s = lost(120);
    s.layers_wanted = 0;
    struct plan p;
    planner_plan(&s, &p);
    assert_true(p.restore_begin > 256 && p.restore_begin < p.restore_end);
    assert_int_equal(p.restore_begin % KV_BLOCK_TOKENS, 0);
    assert_int_equal(p.ranges[0].layers, 0);
    assert_int_equal(p.ranges[1].layers, 30);
    assert_int_equal(p.ranges[2].layers, 0);
    /* A naive twin: every border, by hand. Computing and sending at once, then the 56 new tokens. */
    double best = 1e12, best_at = 0;
    for (uint32_t x = 0; x < 1984; x += 64) {
        double compute = x * 30 * (31.7 + 31.7 / 4000 * x / 2);
        double send = 5e3 + (1984 - x) * 30 * 392.0 / (120 / 8.0);
        if (TD_MAX(compute, send) < best)
            best = TD_MAX(compute, send), best_at = x;
    }
    assert_in_range(p.restore_begin, (uint32_t)best_at - 64, (uint32_t)best_at + 64);
}

static void nothing_is_restored_that_cannot_be(void **state)
{
    (void)state;
    struct plan p;
    struct planner_state s = lost(1000);
    s.layers_held = 15; /* a slice: its KV ends below the top */
    for (uint32_t i = 0; i < BLOCKS; i++)
        depths[i] = TD_MIN(depths[i], 15);
    planner_plan(&s, &p);
    assert_int_equal(p.restore_end, 0);
    s = lost(1000);
    s.cached_known = false; /* the cloud may have it all */
    planner_plan(&s, &p);
    assert_int_equal(p.restore_end, 0);
    s = lost(1000);
    s.cached_tokens = 1984; /* it has */
    planner_plan(&s, &p);
    assert_int_equal(p.restore_end, 0);
    s = lost(1000);
    s.prompt_count = 1984; /* the last token is always computed */
    planner_plan(&s, &p);
    assert_int_equal(p.restore_end, 1920);
    s = lost(1000);
    s.codec_mask = 0;
    planner_plan(&s, &p);
    assert_int_equal(p.restore_end, 0);
    s = lost(1000);
    s.unread_tokens = 1984; /* a disk on which reading takes as long as computing */
    planner_plan(&s, &p);
    assert_int_equal(p.restore_end, 0);
}

static void a_fixed_split_restores_too(void **state)
{
    (void)state;
    struct plan p;
    struct planner_state s = lost(1000);
    s.layers_wanted = 8;
    planner_plan(&s, &p);
    assert_int_equal(p.layers, 8);
    assert_int_equal(p.restore_end, 1984);
    assert_int_equal(p.ranges[p.range_count - 1].first_token, 1984);
    assert_int_equal(p.ranges[p.range_count - 1].layers, 8);
    s = lost(1);
    s.layers_wanted = 8;
    planner_plan(&s, &p);
    assert_int_equal(p.restore_end, 0);
    assert_int_equal(p.range_count, 1);
}

/* ---- private prompts ---- */

/* Whatever the link and the machines: the device's layers, and all KV. */
static void a_private_prompt_leaves_nothing_to_ids(void **state)
{
    (void)state;
    for
        EACH(a, mbits)
        for
            EACH(c, prompts)
            for
                EACH(d, speeds)
            for (int fixed = 0; fixed < 2; fixed++) {
                struct planner_state s = choosing(mbits[a], 10, prompts[c], speeds[d][0], speeds[d][1]);
                struct plan p;
                s.private_layers = 6;
                s.layers_wanted = fixed ? 9 : PLANNER_AUTO;
                s.cached_tokens =
                    prompts[c] > 500 ? 1984 : 0; /* that the device lacks: all is to be caught up */
                hold(&s, prompts[c] > 500 && a % 2 ? 2048 : 0);
                planner_plan(&s, &p);
                assert_true(fixed ? p.layers == 9 : p.layers >= 6);
                assert_int_equal(p.ranges[0].first_token, s.cached_tokens);
                assert_int_equal(plan_range_end(&p.ranges[p.range_count - 1]), prompts[c]);
                for (uint32_t i = 0; i < p.range_count; i++)
                    assert_true(p.ranges[i].layers >= 6 && p.ranges[i].codec != PLAN_CODEC_NONE);
            }
}

static void the_soonest_of_private_plans_is_taken(void **state)
{
    (void)state;
    struct planner_state s = choosing(5, 10, 2048, 31700, 31700); /* where k = 0 is the best */
    struct plan p;
    planner_plan(&s, &p);
    assert_int_equal(p.layers, 0);
    s.private_layers = 6;
    planner_plan(&s, &p);
    double best = 1e12;
    for (uint32_t k = 6; k <= 30; k++) {
        struct plan_times t = foretold(&s, k, 2048);
        best = TD_MIN(best, t.t16_us + PLANNER_FIRST * t.first_us);
    }
    assert_true(p.times.t16_us + PLANNER_FIRST * p.times.first_us <= best);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(new_prompt_is_one_edge_range),
        cmocka_unit_test(answer_of_the_cloud_cuts_the_front_off),
        cmocka_unit_test(what_is_held_beyond_the_cache_is_still_sent),
        cmocka_unit_test(a_guess_leaves_its_prefix_to_the_cloud),
        cmocka_unit_test(catching_up_has_a_price),
        cmocka_unit_test(without_layers_the_cloud_does_all),
        cmocka_unit_test(exact_requests_get_lossless_forms),
        cmocka_unit_test(unknown_codecs_fall_back_to_lossless),
        cmocka_unit_test(rows_that_do_not_fit_go_as_f32),
        cmocka_unit_test(guess_is_whole_blocks_below_the_prompts_end),
        cmocka_unit_test(choice_is_the_best_of_all),
        cmocka_unit_test(never_slower_than_either_side),
        cmocka_unit_test(equal_machines_share_a_prompt_over_a_fast_link),
        cmocka_unit_test(no_kv_is_sent_that_is_computed_sooner),
        cmocka_unit_test(no_gap_follows_the_first_token),
        cmocka_unit_test(a_dear_cloud_gets_less_to_do),
        cmocka_unit_test(a_cloud_with_a_queue_makes_the_device_do_more),
        cmocka_unit_test(a_device_that_lacks_the_prefix_counts_what_it_costs),
        cmocka_unit_test(what_the_cloud_lost_is_restored_where_that_is_sooner),
        cmocka_unit_test(a_middling_link_restores_the_end),
        cmocka_unit_test(nothing_is_restored_that_cannot_be),
        cmocka_unit_test(a_fixed_split_restores_too),
        cmocka_unit_test(a_private_prompt_leaves_nothing_to_ids),
        cmocka_unit_test(the_soonest_of_private_plans_is_taken),
        cmocka_unit_test(reading_from_the_disk_takes_its_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
