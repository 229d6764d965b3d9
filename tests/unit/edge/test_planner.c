/* planner: every plan covers the prompt, keeps to block borders, and follows the rules of planner.h. */
#include "edge/planner.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static struct planner_state base(void)
{
    return (struct planner_state){.layer_count = 30,
                                  .layers_wanted = 8,
                                  .prompt_count = 1000,
                                  .accept = KV_ACCEPT_VISIBLE_LOSSLESS,
                                  .codec = KV_L1,
                                  .hidden_dtype = HIDDEN_F16,
                                  .codec_mask = 1u << KV_L0 | 1u << KV_L1 | 1u << KV_RAW,
                                  .hidden_mask = 7};
}

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
    s.cached_tokens = 640, s.cached_known = true, s.held_tokens = 512;
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
    s.cached_tokens = 640, s.cached_known = true, s.held_tokens = 960;
    struct plan p;
    planner_plan(&s, &p);
    assert_int_equal(p.compute_begin, 640);
    assert_int_equal(p.send_begin, 640);
}

static void a_guess_leaves_its_prefix_to_the_cloud(void **state)
{
    (void)state;
    struct planner_state s = base();
    s.cached_tokens = 640, s.held_tokens = 640;
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
    s.cached_tokens = 960, s.cached_known = true, s.held_tokens = 832;
    struct plan p;
    planner_plan(&s, &p); /* 128 missing, 40 left */
    assert_int_equal(p.layers, 0);
    assert_int_equal(p.range_count, 1);
    assert_int_equal(p.ranges[0].first_token, 960);
    assert_int_equal(p.ranges[0].count, 40);
    assert_int_equal(p.ranges[0].layers, 0);
    s.held_tokens = 896; /* 64 missing, 40 left */
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
