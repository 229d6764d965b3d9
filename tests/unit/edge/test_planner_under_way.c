/* planner: a plan that is being carried out is left, or taken up again, where that is sooner; and for how long the cloud waits for its parts. */
#include "planner_states.h"

static void a_restore_on_a_link_that_breaks_down_is_left(void **state)
{
    (void)state;
    struct planner_state s = lost(1000);
    s.layers_wanted = 0;
    struct plan p, left;
    planner_plan(&s, &p);
    assert_int_equal(p.layers, 0);
    assert_true(planner_sends(&p));
    struct plan_progress at = {.computed = 1984, .rows = 2040, .run = 1984, .kv = 640};
    assert_false(planner_reconsider(&s, &p, &at, &left));
    s.model.rate_bytes_per_us = 0.125; /* 1 Mbit/s */
    assert_true(planner_reconsider(&s, &p, &at, &left));
    const struct plan_range *r = plan_at(left.ranges, left.range_count, 640);
    assert_int_equal(r->codec, PLAN_CODEC_NONE);
    r = plan_at(left.ranges, left.range_count, 639);
    assert_int_equal(r->codec, KV_L1);
}

static void a_link_that_breaks_down_leaves_the_rest_to_the_cloud(void **state)
{
    (void)state;
    struct planner_state s = choosing(100, 1, 2048, 31700, 31700);
    struct plan p, left;
    planner_plan(&s, &p);
    struct plan_progress at = {.computed = 640, .rows = 576, .run = 512, .kv = 320};
    assert_false(planner_reconsider(&s, &p, &at, &left)); /* as foretold */
    s.model.rate_bytes_per_us = 1.0 / 8;
    assert_true(planner_reconsider(&s, &p, &at, &left));
    assert_int_equal(left.ranges[0].first_token, 0);
    assert_int_equal(left.ranges[0].count, 320);
    assert_int_equal(left.ranges[0].codec, KV_L1);
    assert_int_equal(left.ranges[1].count, 576 - 320);
    assert_int_equal(left.ranges[1].codec, PLAN_CODEC_NONE);
    assert_int_equal(left.ranges[1].layers, p.layers);
    assert_int_equal(left.ranges[2].count, 2048 - 576);
    assert_int_equal(left.ranges[2].layers, 0);
    assert_int_equal(left.range_count, 3);
    at = (struct plan_progress){
        .computed = 2048, .rows = 2048, .run = 2048, .kv = 320}; /* rows are there, KV is not */
    assert_true(planner_reconsider(&s, &p, &at, &left));
    assert_int_equal(plan_range_end(&left.ranges[left.range_count - 1]), 2048);
    assert_int_equal(left.ranges[left.range_count - 1].layers, p.layers);
    assert_int_equal(left.ranges[left.range_count - 1].codec, PLAN_CODEC_NONE);
    assert_false(planner_reconsider(&s, &left, &at, &p)); /* nothing is left to leave */
}

/* A link of half the rate that was believed in: rows are still worth it, and their KV is not; that is left once the rows are there, and not before. */
static void rows_that_pay_are_not_left_with_their_kv(void **state)
{
    (void)state;
    struct planner_state s = choosing(40, 20, 512, 80000, 80000);
    struct plan p, left;
    planner_plan(&s, &p);
    s.model.rate_bytes_per_us = 19.0 / 8;
    struct plan_progress at = {.computed = 448, .rows = 256, .run = 256, .kv = 64};
    assert_false(planner_reconsider(&s, &p, &at, &left));
    s.prefer = PREFER_CLOUD_COST; /* what is left is more to compute there than what does not come */
    assert_false(planner_reconsider(&s, &p, &at, &left));
    s.prefer = PREFER_LATENCY;
    at.computed = at.rows = 512, at.run = 384;
    assert_true(planner_reconsider(&s, &p, &at, &left));
    assert_int_equal(left.range_count, 2);
    assert_int_equal(left.ranges[1].first_token, 64);
    assert_int_equal(left.ranges[1].layers, p.layers);
    assert_int_equal(left.ranges[1].codec, PLAN_CODEC_NONE);
    at = (struct plan_progress){.computed = 448, .rows = 256, .run = 256, .kv = 64};
    s.model.rate_bytes_per_us = 2.0 / 8; /* rows are too late, too */
    assert_true(planner_reconsider(&s, &p, &at, &left));
    assert_int_equal(left.ranges[left.range_count - 1].layers, 0);
}

/* Restored KV is read by the rows behind it: the cloud would wait for both, and then compute what had not come. So it is left at once where it is too late, whatever the
 * rows are worth; once it has come, they count. */
static void what_rows_read_is_not_put_off(void **state)
{
    (void)state;
    struct planner_state s = choosing(20, 5, 2048, 31700, 31700);
    struct plan p = {.layers = 12, .restore_end = 1024, .codec = KV_L1, .chosen = true, .range_count = 2},
                left;
    p.ranges[0] = (struct plan_range){0, 1024, 30, KV_L1, HIDDEN_F16};
    p.ranges[1] = (struct plan_range){1024, 1024, 12, KV_L1, HIDDEN_F16};
    struct plan_progress at = {.computed = 1280, .rows = 1152, .kv = 512};
    assert_true(planner_reconsider(&s, &p, &at, &left));
    at.run = at.kv = 1024;
    assert_false(planner_reconsider(&s, &p, &at, &left));
}

/* Left at 576 of 2,048 tokens on a link that is sound again: help comes back behind what the cloud has begun, and not where that is of no use. */
static void what_was_left_is_taken_up_again(void **state)
{
    (void)state;
    struct planner_state s = choosing(100, 20, 2048, 31700, 31700);
    struct plan p, fresh;
    planner_plan(&s, &p);
    struct plan_range record[] = {{0, 576, p.layers, p.codec, p.hidden_dtype}, {576, 2048 - 576, 0, 0, 0}};
    struct plan_progress at = {.computed = 704, .run = 576};
    assert_true(planner_resume(&s, &p, record, 2, &at, &fresh));
    uint32_t from = fresh.send_begin, begun = (uint32_t)(150000 / ((30 - p.layers) * 31.7 * 1.6));
    assert_true(from >= 576 + begun && from < 1024 && from % KV_BLOCK_TOKENS == 0);
    assert_int_equal(fresh.range_count, 3);
    assert_memory_equal(&fresh.ranges[0], &record[0], sizeof record[0]);
    assert_int_equal(plan_range_end(&fresh.ranges[1]), from);
    assert_int_equal(fresh.ranges[1].layers, 0);
    assert_int_equal(plan_range_end(&fresh.ranges[2]), 2048);
    assert_int_equal(fresh.ranges[2].layers, p.layers);
    assert_int_equal(fresh.ranges[2].codec, p.codec);
    struct plan_range alone = {576, 2048 - 576, 0, 0, 0};
    struct plan_progress now = {.rows = 576, .run = 576};
    struct plan_times on = plan_model_run(&s.model, &alone, 1, &now);
    assert_true(fresh.times.t16_us < 0.8 * on.t16_us);
    struct planner_state slow = s;
    slow.model.rate_bytes_per_us = 1.0 / 8;
    assert_false(planner_resume(&slow, &p, record, 2, &at, &fresh));
    at.run = at.computed = 1984; /* as good as done */
    assert_false(planner_resume(&s, &p, record, 2, &at, &fresh));
    at.run = 576, at.computed = 0; /* the device catches up first */
    assert_true(planner_resume(&s, &p, record, 2, &at, &fresh));
    assert_int_equal(fresh.compute_begin, 0);
    s.private_layers = 4;
    assert_false(planner_resume(&s, &p, record, 2, &at, &fresh));
}

/* What the device has still to run before the rows that are wanted next makes these late: going on may then be worth nothing. */
static void catching_up_under_way_counts(void **state)
{
    (void)state;
    struct planner_state s = choosing(100, 20, 2048, 127000, 31700);
    struct plan p = {.layers = 15, .range_count = 3}, left;
    const struct plan_range ranges[] = {
        {0, 576, 15, KV_L1, HIDDEN_F16}, {576, 448, 0, 0, 0}, {1024, 1024, 15, KV_L1, HIDDEN_F16}};
    s.model.edge.slope_ns = 20;
    memcpy(p.ranges, ranges, sizeof ranges);
    struct plan_progress at = {.computed = 1024, .rows = 576, .run = 576, .kv = 576};
    struct plan_times on = plan_model_run(&s.model, p.ranges, 3, &at);
    at.catch_up = 448;
    struct plan_times behind = plan_model_run(&s.model, p.ranges, 3, &at);
    double catch_up_us = plan_model_edge_us(&s.model, 576, 1024, 15);
    assert_true(fabs(behind.first_us - on.first_us - catch_up_us) < 1);
    assert_true(planner_reconsider(&s, &p, &at, &left));
}

/* 1.1 chunks and a way; up to a tenth of what the device saves the cloud, 0.08 of it in a prompt of 2,048 tokens, 0.05 in one of 512. */
static void patience_is_what_is_foretold_and_some_more(void **state)
{
    (void)state;
    struct planner_state s = choosing(100, 20, 2048, 80000, 80000);
    struct plan p;
    planner_plan(&s, &p);
    struct planner_patience patience = planner_patience(&s, &p, 1);
    double chunk_us = 64 * p.layers * 80 * (1 + 2016 / 4000.0 * 1e-3);
    assert_true(patience.rows_us > 1.1 * chunk_us + 20000 - 100 &&
                patience.rows_us < 1.1 * chunk_us * 1.6 + 20000);
    double saved_us = p.layers * 80;
    assert_true(fabs(patience.rows_token_us - 0.08 * saved_us) < 1e-6 * saved_us);
    struct planner_state shorter = choosing(100, 20, 512, 80000, 80000);
    assert_true(fabs(planner_patience(&shorter, &p, 1).rows_token_us - 0.05 * saved_us) < 1e-6 * saved_us);
    assert_true(patience.kv_us >= 90000 && patience.kv_us < 90000 + 0.2 * p.times.t16_us);
    assert_true(planner_patience(&s, &p, 3).rows_us >
                patience.rows_us + 2 * chunk_us); /* others have their turns */
    struct planner_state far = s;
    far.model.delay_us = 100000; /* rows come in bursts of a round trip */
    assert_true(planner_patience(&far, &p, 1).rows_us == 300000);
    s.model.edge_off = 0.5; /* chunks take half as long again, or half */
    assert_true(planner_patience(&s, &p, 1).rows_us > patience.rows_us + 1.6 * chunk_us);
    s.model.edge_off = 0;
    s.prefer = PREFER_CLOUD_COST;
    assert_true(planner_patience(&s, &p, 1).rows_us == 4 * patience.rows_us);
    p.chosen = false; /* a fixed split is the operator's wish */
    assert_true(planner_patience(&s, &p, 1).rows_us == 0);
    p.chosen = true;
    s.private_layers = 1; /* the cloud cannot do without */
    assert_true(planner_patience(&s, &p, 1).rows_us == 0 && planner_patience(&s, &p, 1).kv_us == 0);
}

static void a_slow_device_leaves_the_rest_to_the_cloud(void **state)
{
    (void)state;
    struct planner_state s = choosing(1000, 1, 2048, 31700, 31700);
    struct plan p, left;
    planner_plan(&s, &p);
    struct plan_progress at = {.computed = 128, .rows = 128, .run = 128, .kv = 128};
    s.model.edge.base_ns *= 1.8; /* no slower than the cloud alone yet */
    assert_false(planner_reconsider(&s, &p, &at, &left));
    s.model.edge.base_ns *= 11;
    assert_true(planner_reconsider(&s, &p, &at, &left));
    assert_int_equal(left.ranges[left.range_count - 1].layers, 0);
    assert_int_equal(left.ranges[left.range_count - 1].first_token, 128);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_restore_on_a_link_that_breaks_down_is_left),
        cmocka_unit_test(a_link_that_breaks_down_leaves_the_rest_to_the_cloud),
        cmocka_unit_test(rows_that_pay_are_not_left_with_their_kv),
        cmocka_unit_test(what_rows_read_is_not_put_off),
        cmocka_unit_test(what_was_left_is_taken_up_again),
        cmocka_unit_test(catching_up_under_way_counts),
        cmocka_unit_test(patience_is_what_is_foretold_and_some_more),
        cmocka_unit_test(a_slow_device_leaves_the_rest_to_the_cloud),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
