/* planner: a device with a part of the model gives back what the cloud has sealed for it, where that is sooner than computing it. */
#include "edge/planner.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define BLOCKS 64
static uint16_t depths[BLOCKS];

/* A device with 15 of 30 layers, which it holds of its first tokens. The cloud has lost 2,000 tokens; 1,984 of them lie here as it sealed them: 657 bytes a
 * token and layer, 39 MB, against 1.9 s of computing. 40 are new. */
static struct planner_state sealed(double mbit, uint32_t own_tokens)
{
    for (uint32_t i = 0; i < BLOCKS; i++)
        depths[i] = i < own_tokens / KV_BLOCK_TOKENS ? 15 : 0;
    return (struct planner_state){.layer_count = 30,
                                  .layers_wanted = PLANNER_AUTO,
                                  .layers_held = 15,
                                  .depths = depths,
                                  .depth_count = BLOCKS,
                                  .sealed_until = 1984,
                                  .cached_known = true,
                                  .prompt_count = 2040,
                                  .accept = KV_ACCEPT_VISIBLE_LOSSLESS,
                                  .codec = KV_L1,
                                  .hidden_dtype = HIDDEN_F16,
                                  .codec_mask = 1u << KV_L0 | 1u << KV_L1 | 1u << KV_RAW,
                                  .hidden_mask = 7,
                                  .model = {.layer_count = 30,
                                            .edge = {31700, 31700.0 / 4000},
                                            .cloud = {31700, 31700.0 / 4000},
                                            .rate_bytes_per_us = mbit / 8,
                                            .delay_us = 5e3,
                                            .decode_us = 7400,
                                            .row_size = {2304, 1152, 580},
                                            .kv_size = 392,
                                            .sealed_size = 657,
                                            .chunk_tokens = 64}};
}

static double sum(struct plan_times t)
{
    return t.first_us + t.t16_us;
}

static void what_the_cloud_sealed_is_given_back_where_that_is_sooner(void **state)
{
    (void)state;
    static const double links[] = {0.1, 1, 1000, 10000};
    for (size_t i = 0; i < TD_COUNT(links); i++) {
        struct planner_state s = sealed(links[i], 1984);
        struct plan p, without;
        planner_plan(&s, &p);
        s.sealed_until = 0;
        planner_plan(&s, &without);
        assert_int_equal(without.restore_end, 0);
        assert_int_equal(p.restore_end > p.restore_begin, links[i] > 500);
        assert_int_equal(plan_model_sealed_pays(&s.model, 1984), links[i] > 500);
        if (links[i] < 500)
            continue;
        assert_int_equal(p.restore_end, 1984);
        assert_true(sum(p.times) < 0.7 * sum(without.times));
        for (uint32_t j = 0; j < p.range_count; j++) {
            const struct plan_range *r = &p.ranges[j];
            bool given_back = r->first_token >= p.restore_begin && plan_range_end(r) <= p.restore_end;
            assert_int_equal(r->codec == KV_SEALED, given_back);
            assert_true(given_back ? r->layers == 30 : r->layers <= 15);
        }
    }
}

/* What lies behind may be split only by a device that has its own layers of all that it gives back, or makes them first. */
static void a_split_behind_what_is_given_back_is_caught_up_on(void **state)
{
    (void)state;
    struct plan has;
    struct planner_state s = sealed(1000, 1984);
    s.layers_wanted = 15;
    s.prompt_count = 4000;
    planner_plan(&s, &has);
    assert_int_equal(has.restore_end, 1984);
    assert_int_equal(has.layers, 15);
    struct plan_progress none = {.computed = 1984}, all = {.computed = 1984, .catch_up = 1984};
    struct plan_times early = plan_model_run(&s.model, has.ranges, has.range_count, &none);
    struct plan_times late = plan_model_run(&s.model, has.ranges, has.range_count, &all);
    double layers15 = plan_model_edge_us(&s.model, 0, 1984, 15);
    assert_true(late.first_us >
                early.first_us + 0.5 * layers15); /* of 15 layers, not of the 30 that are only sent */
    assert_true(late.first_us < early.first_us + 1.1 * layers15);
}

/* And the planner counts that. */
static void what_has_to_be_caught_up_on_is_foretold(void **state)
{
    (void)state;
    for (uint32_t own = 0; own <= 1984; own += 992) {
        struct planner_state s = sealed(10000, own); /* what comes back is there long before */
        struct plan p;
        s.model.edge = (struct plan_cost){3000, 0.7}; /* so quick that it does so */
        s.prefer = PREFER_CLOUD_COST; /* all is given back: the cloud waits for the rows behind it */
        s.prompt_count = 4000;
        planner_plan(&s, &p);
        assert_true(p.restore_end == 1984 && p.layers > 0);
        uint32_t held = own - own % KV_BLOCK_TOKENS;
        struct plan_progress at = {.computed = 1984, .catch_up = 1984 - held};
        struct plan_times times = plan_model_run(&s.model, p.ranges, p.range_count, &at);
        assert_true(p.times.first_us == times.first_us);
    }
}

static void nothing_is_given_back_that_cannot_be(void **state)
{
    (void)state;
    struct plan p;
    struct planner_state s = sealed(1000, 1984);
    s.cached_known = false;
    planner_plan(&s, &p);
    assert_int_equal(p.restore_end, 0);
    s = sealed(1000, 1984);
    s.cached_tokens = 1984;
    planner_plan(&s, &p);
    assert_int_equal(p.restore_end, 0);
    s = sealed(1000, 1984);
    s.prompt_count = 1984;
    planner_plan(&s, &p);
    assert_int_equal(p.restore_end, 1920);
    s = sealed(1000, 1984);
    s.layers_held = 30; /* who has the whole model sends its own */
    for (uint32_t i = 0; i < BLOCKS; i++)
        depths[i] = 0;
    planner_plan(&s, &p);
    assert_int_equal(p.restore_end, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_the_cloud_sealed_is_given_back_where_that_is_sooner),
        cmocka_unit_test(a_split_behind_what_is_given_back_is_caught_up_on),
        cmocka_unit_test(what_has_to_be_caught_up_on_is_foretold),
        cmocka_unit_test(nothing_is_given_back_that_cannot_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
