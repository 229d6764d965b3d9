/* planner: when the device makes tokens itself, and what is foretold of it. */
#include "edge/estimates.h"
#include "edge/planner.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define LAYERS 30
static uint16_t depths[64];

static struct planner_state state_of(double mbit, double delay_ms, uint32_t prompt, double edge_ns,
                                     double cloud_ns)
{
    return (struct planner_state){.layer_count = LAYERS,
                                  .layers_wanted = PLANNER_AUTO,
                                  .layers_held = LAYERS,
                                  .prompt_count = prompt,
                                  .cached_known = true,
                                  .accept = KV_ACCEPT_VISIBLE_LOSSLESS,
                                  .codec = KV_L1,
                                  .hidden_dtype = HIDDEN_F16,
                                  .codec_mask = 1u << KV_L0 | 1u << KV_L1 | 1u << KV_RAW,
                                  .hidden_mask = 7,
                                  .local = LOCAL_AUTO,
                                  .local_share = 1,
                                  .model = {.layer_count = LAYERS,
                                            .edge = {edge_ns, 0},
                                            .cloud = {cloud_ns, 0},
                                            .rate_bytes_per_us = mbit / 8,
                                            .delay_us = delay_ms * 1e3,
                                            .decode_us = 4000,
                                            .edge_decode_us = 4000,
                                            .row_size = {2304, 1152, 580},
                                            .kv_size = 392,
                                            .chunk_tokens = 64}};
}

static void assert_near(double value, double expected)
{
    if (fabs(value - expected) > 1e-6 * fabs(expected))
        fail_msg("%f, not %f", value, expected);
}

static void a_far_or_slow_link_makes_the_device_begin(void **state)
{
    (void)state;
    static const struct {
        double mbit, delay_ms;
        uint32_t prompt;
        double edge_ns, cloud_ns;
        bool local;
    } cases[] = {
        {1, 20, 128, 20000, 20000, true}, /* rows do not fit through, and the round trip is half of the time */
        {1, 100, 2048, 20000, 20000, true},
        {100, 100, 128, 20000, 20000, true},  /* 0.08 s against 0.28 */
        {1000, 2, 2048, 20000, 20000, false}, /* together they take half of the time */
        {100, 20, 2048, 20000, 20000, false},
        {1, 100, 512, 20000, 500, false}, /* a cloud forty times as fast */
        {1, 2, 512, 20000, 20000, true},  /* about even: who is sooner no estimate tells */
        {1, 2, 512, 24000, 20000, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct planner_state s =
            state_of(cases[i].mbit, cases[i].delay_ms, cases[i].prompt, cases[i].edge_ns, cases[i].cloud_ns);
        struct plan p;
        planner_plan(&s, &p);
        if (p.local != cases[i].local)
            fail_msg("case %zu: local %d", i, p.local);
        if (!p.local)
            continue;
        assert_int_equal(p.layers, 0);
        assert_int_equal(p.range_count, 1);
        assert_int_equal(p.ranges[0].layers, 0);
        assert_int_equal(p.ranges[0].count, cases[i].prompt);
        double first = cases[i].prompt * LAYERS * cases[i].edge_ns * 1e-3;
        assert_near(p.device_alone.first_us, first);
        assert_near(p.device_alone.t16_us, first + 15 * 4000);
        assert_near(p.times.first_us, first);
        assert_near(p.times.t16_us, first + 15 * 4000);
    }
}

/* Alone it needs what it needs without sending; and where that is a guess, working together must be clearly better. */
static void the_device_alone_is_tried_before_a_split_that_is_hardly_better(void **state)
{
    (void)state;
    struct planner_state s = state_of(1000, 20, 128, 42000, 36000);
    struct plan p;
    s.model.edge_tried = true;
    planner_plan(&s, &p);
    assert_true(p.layers > 0 && p.times.t16_us > PLANNER_GAIN_UNTRIED * p.device_alone.t16_us);
    s.model.edge_tried = false;
    planner_plan(&s, &p);
    assert_true(p.local);
    s.model.edge_tried = true;
    s.model.edge_sending_ns = 9000; /* the race has shown it */
    planner_plan(&s, &p);
    assert_true(p.local);
    assert_near(p.device_alone.first_us, 128 * LAYERS * 33.0);
    unsigned little = 0;
    for (double mbit = 2; mbit < 20;
         mbit += 0.25) { /* little better too, but not worth a whole long prompt */
        struct planner_state longer = state_of(mbit, 20, 2048, 42000, 36000);
        struct plan tried;
        planner_plan(&longer, &p);
        longer.model.edge_tried = true;
        planner_plan(&longer, &tried);
        assert_int_equal(p.layers, tried.layers);
        little += p.layers > 0 && p.times.t16_us > PLANNER_GAIN_UNTRIED * p.cloud_alone.t16_us;
    }
    assert_true(little > 0);
    s = state_of(1000, 20, 128, 42000, 36000);
    s.local = LOCAL_OFF; /* there is nothing to be tried */
    planner_plan(&s, &p);
    assert_true(p.layers > 0);
}

static double least(double a, double b)
{
    return a < b ? a : b;
}

/* Whatever is chosen, it is foretold to be no later than either side alone, but for what counts as even. */
static void never_later_than_either_side(void **state)
{
    (void)state;
    static const double mbits[] = {0.5, 1, 5, 20, 100, 1000}, delays[] = {1, 20, 100};
    static const uint32_t prompts[] = {20, 128, 512, 2048};
    static const double speeds[][2] = {{20000, 20000}, {80000, 20000}, {20000, 80000}, {300000, 500}};
    unsigned local = 0, together = 0;
    for (size_t m = 0; m < 6; m++)
        for (size_t d = 0; d < 3; d++)
            for (size_t n = 0; n < 4; n++)
                for (size_t v = 0; v < 4; v++) {
                    struct planner_state s =
                        state_of(mbits[m], delays[d], prompts[n], speeds[v][0], speeds[v][1]);
                    struct plan p;
                    planner_plan(&s, &p);
                    double first = least(p.device_alone.first_us, p.cloud_alone.first_us),
                           t16 = least(p.device_alone.t16_us, p.cloud_alone.t16_us);
                    assert_true(p.times.first_us <= first * 1.05);
                    assert_true(p.times.t16_us <= t16 * 1.05);
                    local += p.local;
                    together += p.layers > 0;
                }
    assert_true(local > 20 && together > 20);
}

/* The device is first with the first token, the cloud with the sixteenth: both count. */
static void each_time_is_the_better_sides(void **state)
{
    (void)state;
    struct planner_state s = state_of(1, 100, 128, 20000, 20000);
    s.model.edge_decode_us = 60000;
    struct plan p;
    planner_plan(&s, &p);
    assert_true(p.local);
    assert_near(p.times.first_us, p.device_alone.first_us);
    assert_near(p.times.t16_us, p.cloud_alone.t16_us);
    assert_true(p.cloud_alone.t16_us < p.device_alone.t16_us);
}

static void not_where_it_may_or_can_not(void **state)
{
    (void)state;
    struct plan p;
    for (int what = 0; what < 6; what++) {
        struct planner_state s = state_of(1, 100, 128, 20000, 20000);
        switch (what) {
        case 0:
            s.local = LOCAL_OFF;
            break;
        case 1: /* a slice */
            s.layers_held = 29;
            break;
        case 2:
            s.prefer = PREFER_CLOUD_COST;
            break;
        case 3:
            s.prefer = PREFER_CLOUD_COST;
            s.local = LOCAL_ALWAYS;
            break;
        case 4:
            s.layers_wanted = 0;
            break;
        case 5:
            s.layers_wanted = 8;
            s.local = LOCAL_ALWAYS;
            break;
        }
        planner_plan(&s, &p);
        assert_false(p.local);
    }
    struct planner_state s = state_of(1000, 1, 2048, 20000, 20000);
    planner_plan(&s, &p);
    assert_false(p.local);
    s.local = LOCAL_ALWAYS;
    planner_plan(&s, &p);
    assert_true(p.local);
    assert_int_equal(p.layers, 0);
}

static void other_requests_of_the_device_count(void **state)
{
    (void)state;
    struct planner_state s = state_of(1, 100, 128, 20000, 20000);
    struct plan p;
    s.local_queue_us = 50000;
    s.local_share = 3;
    planner_plan(&s, &p);
    assert_true(p.local);
    assert_near(p.device_alone.first_us, 50000 + 128 * LAYERS * 20.0);
    assert_near(p.device_alone.t16_us, 50000 + 128 * LAYERS * 20.0 + 2 * 15 * 4000); /* they share passes */
    s.local_queue_us = 1e6;
    planner_plan(&s, &p);
    assert_false(p.local);
}

/* What it holds in all layers it does not compute; but the last token always, and what lies on the disk is read. */
static void what_the_device_holds_is_not_computed(void **state)
{
    (void)state;
    struct planner_state s = state_of(1, 100, 640, 20000, 20000);
    struct plan p;
    for (uint32_t i = 0; i < 64; i++)
        depths[i] = i < 4 ? LAYERS : i < 8 ? LAYERS - 1 : 0;
    s.depths = depths;
    s.depth_count = 64;
    planner_plan(&s, &p);
    assert_near(p.device_alone.first_us, (640 - 256) * LAYERS * 20.0);
    s.unread_tokens = 10;
    planner_plan(&s, &p);
    assert_near(p.device_alone.first_us, (640 - 256 + 10) * LAYERS * 20.0);
    s.unread_tokens = 0;
    for (uint32_t i = 0; i < 64; i++)
        depths[i] = LAYERS;
    planner_plan(&s, &p);
    assert_near(p.device_alone.first_us, 64 * LAYERS * 20.0);
}

/* A device that has run one chunk, at a prompt's beginning, and a cloud that has run whole ones: what later positions cost here is expected, not taken for
 * nothing. */
static void a_first_long_prompt_is_not_left_to_the_device(void **state)
{
    (void)state;
    struct estimates e = {.edge_rise = 0.001};
    struct planner_state s = state_of(100, 20, 2048, 0, 0);
    struct plan p;
    estimates_edge(&e, 64 * LAYERS * 27, 64, LAYERS, 0, true);
    estimates_cloud(&e, 27000, 27 * 1024);
    estimates_fill(&e, 0, &s.model);
    planner_plan(&s, &p);
    assert_true(!p.local && p.layers > 8 && p.layers < 22);
    s.prompt_count = 128;
    planner_plan(&s, &p);
    assert_true(p.local);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_far_or_slow_link_makes_the_device_begin),
        cmocka_unit_test(the_device_alone_is_tried_before_a_split_that_is_hardly_better),
        cmocka_unit_test(never_later_than_either_side),
        cmocka_unit_test(each_time_is_the_better_sides),
        cmocka_unit_test(not_where_it_may_or_can_not),
        cmocka_unit_test(other_requests_of_the_device_count),
        cmocka_unit_test(what_the_device_holds_is_not_computed),
        cmocka_unit_test(a_first_long_prompt_is_not_left_to_the_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
