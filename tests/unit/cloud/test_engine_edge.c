/* engine: prompts whose bottom layers an edge computes. With exact values (L0 or raw, f32) the reply is the reference's for any k and any order of
 * arrival; what is late, lost or damaged is computed from ids and changes nothing. */
#include "edge_scene.h"

/* --- any k, any order ----------------------------------------------------------------------------- */

static void split_changes_nothing(void **state)
{
    (void)state;
    static const uint8_t codecs[] = {KV_L0, KV_RAW};
    static const uint32_t steps[] = {64, 1, 37, PROMPT};
    for (uint32_t layers = 1; layers <= 2; layers++)
        for (size_t i = 0; i < TD_COUNT(steps); i++)
            for (int kv_first = 0; kv_first < 2; kv_first++) {
                struct scene *s = scene_open(layers, (struct rig_options){.token_budget = i % 2 ? 256 : 50});
                uint8_t codec = codecs[i % 2];
                size_t size = 0;
                open_plan_start(s, codec, HIDDEN_F32);
                if (kv_first)
                    size += rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, codec);
                if (kv_first)
                    rig_turn(s->rig);
                size += send_hidden_all(s, 1, 0, steps[i], HIDDEN_F32);
                if (!kv_first)
                    size += rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, codec);
                finish(s);
                const struct client *c = &s->client;
                assert_int_equal(c->done_event.done.recomputed_tokens, 0);
                assert_int_equal(c->done_event.done.prefill_tokens, layers == 2 ? 1 : PROMPT);
                assert_int_equal(c->done_event.done.uplink_size, size);
                assert_true(c->done_event.done.uplink_raw_size > 0);
                assert_int_equal(c->consumed_size, size);
                assert_int_equal(c->ingested.ingested.epoch, 1);
                assert_int_equal(c->ingested.ingested.hidden_tokens, PROMPT);
                assert_int_equal(c->ingested.ingested.kv_tokens, PROMPT);
                scene_close(s);
            }
}

/* The first token needs [k, L) only; the second needs everything. */
static void first_token_does_not_wait_for_kv(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers <= 2; layers++) {
        struct scene *s = scene_open(layers, (struct rig_options){0});
        s->rig->engine->config.kv_stall_ms = 1000000;
        open_plan_start(s, KV_L0, HIDDEN_F32);
        send_hidden_all(s, 1, 0, 64, HIDDEN_F32);
        rig_until(s->rig, s->client.count == 1);
        for (int i = 0; i < 20; i++)
            rig_turn(s->rig);
        assert_int_equal(s->client.count, 1);
        assert_int_equal(s->client.ids[0], s->reply[0]);
        assert_int_equal(s->client.ingested.ingested.hidden_tokens, PROMPT);
        assert_int_equal(s->client.ingested.ingested.kv_tokens, 0);
        rig_send_kv(&s->edge, &s->client, 1, 0, 128, KV_L0);
        rig_until(s->rig, s->client.ingested.ingested.kv_tokens == 128);
        assert_int_equal(s->client.count, 1);
        rig_send_kv(&s->edge, &s->client, 1, 128, PROMPT, KV_L0);
        finish(s);
        assert_int_equal(s->client.done_event.done.recomputed_tokens, 0);
        assert_true(s->client.done_event.done.ingest_wait_us > 0);
        scene_close(s);
    }
}

/* Rows come before GENERATE: the logits wait for it. */
/* While pieces are still to come the edge waits for credit and for news: steps are short. With everything there nobody waits for their end. */
static void steps_are_short_while_an_edge_sends(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    struct engine *e = s->rig->engine;
    open_plan_start(s, KV_L0, HIDDEN_F32);
    send_hidden_all(s, 1, 0, 64, HIDDEN_F32);
    for (uint32_t run = 0; run < 128; run += SCHEDULER_TURN_ROWS) {
        assert_int_equal(s->client.ingested.ingested.run_tokens, run);
        e->prefill_rows_per_s = 10; /* 64 rows are the least */
        rig_turn(s->rig);
    }
    rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
    rig_until(s->rig, s->client.ingested.ingested.kv_tokens == PROMPT);
    finish(s);
    scene_close(s);
}

static void prompt_may_be_ready_before_generate(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    open_edge(s);
    plan_one(s, 1, 0, KV_L0, HIDDEN_F32);
    send_hidden_all(s, 1, 0, 64, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
    rig_until(s->rig, s->client.ingested.ingested.kv_tokens == PROMPT);
    assert_int_equal(rig_stats(s->rig).pages_cached,
                     0); /* GENERATE may still say that nothing is to be kept */
    start(s, rig_greedy(REPLY));
    finish(s);
    assert_int_equal(rig_stats(s->rig).pages_cached, 4);
    scene_close(s);
}

static void send_range(struct scene *s, struct rig_edge *edge, uint32_t epoch, uint32_t first, uint32_t end)
{
    if (edge->layers < 2)
        rig_send_hidden(edge, &s->client, epoch, first, end - first, HIDDEN_F32);
    else if (end == PROMPT)
        rig_send_hidden(edge, &s->client, epoch, PROMPT - 1, 1, HIDDEN_F32);
    rig_send_kv(edge, &s->client, epoch, first, end, KV_L0);
}

/* Ranges of different k, in every order of three, the cloud's own among them; borders within blocks where they may be. */
static void ranges_of_any_depth_follow_each_other(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.token_budget = 100});
    struct rig_edge edges[3] = {{0}, s->edge, rig_edge_compute(s->rig, s->prompt, PROMPT, 2)};
    for (uint32_t order = 0; order < 27; order++) {
        uint32_t depth[3] = {order % 3, order / 3 % 3, order / 9};
        uint32_t borders[4] = {0, depth[0] ? 64 : 50, depth[1] ? 128 : 150, PROMPT};
        struct plan_range ranges[3];
        struct engine_open open = client_open_of(&s->client, s->prompt, PROMPT, 0);
        open.no_cache = true;
        client_send(s->rig, &s->client, open);
        for (int i = 0; i < 3; i++)
            ranges[i] =
                (struct plan_range){borders[i], borders[i + 1] - borders[i], depth[i], KV_L0, HIDDEN_F32};
        plan(s, 1, ranges, 3);
        start(s, rig_greedy(REPLY));
        for (int i = 0; i < 3; i++)
            if (depth[i] > 0)
                send_range(s, &edges[depth[i]], 1, borders[i], borders[i + 1]);
        finish(s);
        assert_int_equal(s->client.done_event.done.recomputed_tokens, 0);
    }
    rig_edge_free(&edges[2]);
    scene_close(s);
}

/* --- cached prefixes and new plans ---------------------------------------------------------------- */

static void cached_prefix_makes_early_rows_superfluous(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    struct client first;
    client_direct(s->rig, &first, s->prompt, 140, rig_greedy(1));
    rig_until(s->rig, first.done);
    open_plan_start(s, KV_L0, HIDDEN_F32); /* as if nothing were cached: all rows are on their way */
    size_t size = send_hidden_all(s, 1, 0, 64, HIDDEN_F32);
    size += rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
    finish(s);
    assert_int_equal(s->client.open_event.opened.cached_tokens, 128);
    assert_int_equal(s->client.done_event.done.cached_tokens, 128);
    assert_int_equal(s->client.done_event.done.prefill_tokens, PROMPT - 128);
    assert_int_equal(s->client.consumed_size, size);

    open_edge(s); /* and with a second plan, made when OPENED had said what is cached: all of it by now */
    rig_until(s->rig, s->client.opened);
    assert_int_equal(s->client.open_event.opened.cached_tokens, 192);
    plan_one(s, 1, 0, KV_L0, HIDDEN_F32);
    plan_one(s, 2, 192, KV_L0, HIDDEN_F32);
    start(s, rig_greedy(REPLY));
    size = rig_send_hidden(&s->edge, &s->client, 1, 0, 64, HIDDEN_F32); /* was under way */
    size += rig_send_hidden(&s->edge, &s->client, 2, 192, 8, HIDDEN_F32);
    size += rig_send_kv(&s->edge, &s->client, 2, 192, PROMPT, KV_L0);
    finish(s);
    assert_int_equal(s->client.done_event.done.prefill_tokens, 8);
    assert_int_equal(s->client.consumed_size, size);
    scene_close(s);
}

static void new_plan_voids_the_old_one(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    struct rig_edge two = rig_edge_compute(s->rig, s->prompt, PROMPT, 2);
    s->rig->engine->config.kv_stall_ms = 10;
    open_plan_start(s, KV_L0, HIDDEN_F32);
    rig_send_hidden(&s->edge, &s->client, 1, 0, 100, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 1, 0, 64, KV_L0);
    rig_until(s->rig, s->client.ingested.ingested.kv_tokens == 64);
    /* The edge gives up on what is left: the cloud does it. */
    plan(s, 2, (struct plan_range[]){{0, PROMPT, 0, 0, 0}}, 1);
    rig_send_hidden(&s->edge, &s->client, 1, 100, 28, HIDDEN_F32); /* late */
    finish(s);
    assert_true(s->client.done_event.done.recomputed_tokens >= 36); /* [64, 100) lacked its pieces */

    s->rig->engine->config.kv_stall_ms = 2000;
    open_plan_start(s, KV_L0, HIDDEN_F32); /* the other way round: the edge takes more on, with more layers */
    rig_send_hidden(&s->edge, &s->client, 1, 0, 64, HIDDEN_F32);
    rig_turn(s->rig);
    plan(s, 2,
         (struct plan_range[]){{0, 128, 1, KV_L0, HIDDEN_F32}, {128, PROMPT - 128, 2, KV_L0, HIDDEN_F32}}, 2);
    rig_send_hidden(&s->edge, &s->client, 2, 0, 128, HIDDEN_F32);
    rig_send_hidden(&two, &s->client, 2, PROMPT - 1, 1, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 2, 0, 128, KV_L0);
    rig_send_kv(&two, &s->client, 2, 128, PROMPT, KV_L0);
    finish(s);
    rig_edge_free(&two);
    scene_close(s);
}

/* The border between cloud and edge moves within a block of which some rows have run and some pieces have come: those pieces are of another shape. */
static void new_plan_may_move_borders_within_a_block(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.token_budget = 32, .sequences_max = 1});
    struct rig_edge two = rig_edge_compute(s->rig, s->prompt, PROMPT, 2);
    struct client first; /* has the only slot until all pieces are here */
    client_direct(s->rig, &first, s->prompt + 100, 10, rig_greedy(900));
    rig_until(s->rig, first.count > 0);
    open_edge(s);
    plan(s, 1, (struct plan_range[]){{0, 187, 0, 0, 0}, {187, PROMPT - 187, 2, KV_L0, HIDDEN_F32}}, 2);
    start(s, rig_greedy(REPLY));
    rig_turn(s->rig);
    const struct sequence *sequence = engine_find(s->rig->engine, s->client.sequence);
    size_t size = rig_send_kv(&two, &s->client, 1, 187, PROMPT, KV_L0);
    rig_until(s->rig, sequence->staged_size == size);
    engine_cancel(s->rig->engine, first.sequence, false, 0);
    rig_until(s->rig, sequence->high == 160);
    assert_int_equal(sequence->blocks[2].missing, 0);
    plan(s, 2, (struct plan_range[]){{0, 172, 0, 0, 0}, {172, PROMPT - 172, 1, KV_L0, HIDDEN_F32}}, 2);
    rig_send_hidden(&s->edge, &s->client, 2, 172, PROMPT - 172, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 2, 172, PROMPT, KV_L0);
    finish(s);
    rig_edge_free(&two);
    scene_close(s);
}

/* A plan that leaves to the cloud the rest of a block of which some rows have run: the rows that are here are used up to the block's end, whatever
 * messages they came in. What it says of the blocks before holds all the same: their pieces, of another depth, are no fault and not in vain. */
static void new_plan_begins_behind_a_block_under_way(void **state)
{
    (void)state;
    for (uint32_t split = 0; split <= 100; split += 50) { /* between two messages of rows */
        struct scene *s = scene_open(1, (struct rig_options){.token_budget = 48});
        struct rig_edge two = rig_edge_compute(s->rig, s->prompt, PROMPT, 2);
        open_plan_start(s, KV_L0, HIDDEN_F32);
        if (split > 0)
            rig_send_hidden(&s->edge, &s->client, 1, 0, split, HIDDEN_F32);
        rig_send_hidden(&s->edge, &s->client, 1, split, 150 - split, HIDDEN_F32);
        rig_turn(s->rig);
        const struct sequence *sequence = engine_find(s->rig->engine, s->client.sequence);
        rig_until(s->rig, sequence->high == 96);
        plan(s, 2, (struct plan_range[]){{0, 64, 2, KV_L0, HIDDEN_F32}, {64, PROMPT - 64, 0, 0, 0}}, 2);
        rig_send_kv(&two, &s->client, 2, 0, 64, KV_L0);
        finish(s);
        assert_int_equal(s->client.done_event.done.recomputed_tokens, 64); /* of the second block */
        assert_true(s->client.done_event.done.ingest_wait_us < 1000000);
        rig_edge_free(&two);
        scene_close(s);
    }
}

/* --- what does not come --------------------------------------------------------------------------- */

static void stalled_kv_is_recomputed(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers <= 2; layers++)
        for (uint32_t blocks = 0; blocks < 4; blocks++) {
            struct scene *s = scene_open(layers, (struct rig_options){.token_budget = 30});
            s->rig->engine->config.kv_stall_ms = 10;
            open_plan_start(s, KV_L0, HIDDEN_F32);
            size_t total = blocks > 0 ? rig_send_kv(&s->edge, &s->client, 1, 0, blocks * 64, KV_L0) : 0;
            size_t size; /* one piece of the next block: of no use alone */
            uint8_t *piece = rig_piece(&s->edge, blocks, 0, true, KV_L0, 0, PROMPT, &size);
            engine_kv(s->rig->engine, s->client.sequence, 1, blocks, piece, size);
            rig_until(s->rig, s->client.consumed_size == total + size);
            send_hidden_all(s, 1, 0, 64, HIDDEN_F32);
            rig_until(s->rig, s->client.count == 1);
            uint64_t first_at = rig_now;
            rig_until(s->rig, s->client.count == 2);
            assert_true(rig_now - first_at >= 8000); /* about the stall limit of 10 ms */
            rig_send_kv(&s->edge, &s->client, 1, 64 * blocks, PROMPT, KV_L0); /* too late: dropped */
            finish(s);
            assert_int_equal(s->client.done_event.done.recomputed_tokens, PROMPT - blocks * 64);
            assert_int_equal(s->client.ingested.ingested.refill_begin, blocks * 64);
            assert_int_equal(s->client.ingested.ingested.refill_end, (PROMPT + 63) / 64 * 64);
            scene_close(s);
        }
}

/* Rows that stay away for longer than the edge said: the cloud goes on from ids, and says from where on. Not before the first have come. */
static void rows_that_stay_away_are_not_waited_for(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    open_edge(s);
    assert_int_equal(engine_patience(s->rig->engine, s->client.sequence, 20, 100, 0), 0);
    plan_one(s, 1, 0, KV_L0, HIDDEN_F32);
    start(s, rig_greedy(REPLY));
    rig_turn(s->rig);
    rig_now += 1000000;
    for (int i = 0; i < 10; i++)
        rig_turn(s->rig);
    assert_int_equal(s->client.ingested.ingested.left_begin, s->client.ingested.ingested.left_end);
    size_t size = rig_send_hidden(&s->edge, &s->client, 1, 0, 64, HIDDEN_F32);
    size += rig_send_kv(&s->edge, &s->client, 1, 0, 64, KV_L0);
    uint64_t came_at = rig_now;
    rig_until(s->rig, s->client.ingested.ingested.left_begin < s->client.ingested.ingested.left_end);
    assert_int_equal(s->client.ingested.ingested.left_begin, 64);
    assert_int_equal(s->client.ingested.ingested.left_end, PROMPT);
    assert_in_range(rig_now - came_at, 20000 + (PROMPT - 64) * 100, 20000 + (PROMPT - 64) * 100 + 5000);
    size += rig_send_hidden(&s->edge, &s->client, 1, 64, 64, HIDDEN_F32); /* too late: dropped */
    size += rig_send_kv(&s->edge, &s->client, 1, 64, PROMPT, KV_L0);
    finish(s);
    assert_int_equal(s->client.done_event.done.recomputed_tokens, PROMPT - 64);
    rig_until(s->rig, s->client.consumed_size == size);
    scene_close(s);
}

/* The edge that was left helps again from a block on that has not run; late: the cloud has got beyond it, and goes on alone. */
static void an_edge_that_was_left_may_help_again(void **state)
{
    (void)state;
    for (int late = 0; late < 2; late++) {
        struct scene *s = scene_open(1, (struct rig_options){.token_budget = 16});
        open_edge(s);
        engine_patience(s->rig->engine, s->client.sequence, 20, 0, 0);
        plan_one(s, 1, 0, KV_L0, HIDDEN_F32);
        start(s, rig_greedy(REPLY));
        size_t size = rig_send_hidden(&s->edge, &s->client, 1, 0, 64, HIDDEN_F32);
        rig_until(s->rig, s->client.ingested.ingested.left_begin == 64);
        rig_until(s->rig, s->client.ingested.ingested.run_tokens > 64);
        const struct sequence *sequence = engine_find(s->rig->engine, s->client.sequence);
        assert_true(sequence->high <
                    128); /* nothing of the second block's end: its KV came from nobody but the cloud */
        uint32_t from = late ? 64 : 128;
        struct plan_range ranges[] = {{0, 64, 1, KV_L0, HIDDEN_F32},
                                      {64, from - 64, 0, 0, 0},
                                      {from, PROMPT - from, 1, KV_L0, HIDDEN_F32}};
        struct plan_range whole = {0, PROMPT, 1, KV_L0, HIDDEN_F32};
        assert_int_equal(
            engine_plan(s->rig->engine, s->client.sequence, 2, late ? &whole : ranges, late ? 1 : 3, true),
            0);
        size += rig_send_hidden(&s->edge, &s->client, 2, from, PROMPT - from, HIDDEN_F32);
        size += rig_send_kv(&s->edge, &s->client, 2, from, PROMPT, KV_L0);
        rig_until(s->rig, s->client.ingested.ingested.epoch == 2);
        bool left = s->client.ingested.ingested.left_begin < s->client.ingested.ingested.left_end;
        assert_int_equal(left, late);
        finish(s);
        /* KV of the first block had not come, and some rows of the second ran before the plan was another */
        assert_int_equal(s->client.done_event.done.recomputed_tokens, late ? PROMPT : 64 + 16);
        rig_until(s->rig, s->client.consumed_size == size);
        scene_close(s);
    }
}

/* What ran is from the edge's rows, and stays so in what the cloud says that it computed from what. */
static void the_record_says_where_the_rows_ended(void **state)
{
    (void)state;
    struct plan_range record[LIMIT_RANGES];
    struct scene *s = scene_open(1, (struct rig_options){0});
    open_edge(s);
    engine_patience(s->rig->engine, s->client.sequence, 20, 0, 0);
    plan_one(s, 1, 0, KV_L0, HIDDEN_F32);
    start(s, rig_greedy(REPLY));
    rig_send_hidden(&s->edge, &s->client, 1, 0, 128, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 1, 0, 64, KV_L0);
    rig_until(s->rig, s->client.count == 1);
    assert_int_equal(s->rig->engine->live_count, 1);
    assert_int_equal(sequence_record(s->rig->engine->live[0], record), 3);
    assert_int_equal(record[0].layers, 1);
    assert_int_equal(record[0].codec, KV_L0);
    assert_int_equal(plan_range_end(&record[0]), 64);
    assert_int_equal(record[1].layers, 1);
    assert_int_equal(record[1].codec, PLAN_CODEC_NONE); /* its rows had come, its KV had not */
    assert_int_equal(plan_range_end(&record[1]), 128);
    assert_int_equal(record[2].layers, 0);
    assert_int_equal(plan_range_end(&record[2]), PROMPT);
    finish(s);
    scene_close(s);
}

static void pieces_are_waited_for_as_long_as_the_edge_says(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    s->rig->engine->config.kv_stall_ms = 1000000;
    open_edge(s);
    engine_patience(s->rig->engine, s->client.sequence, 0, 0, 30);
    plan_one(s, 1, 0, KV_L0, HIDDEN_F32);
    start(s, rig_greedy(REPLY));
    send_hidden_all(s, 1, 0, 64, HIDDEN_F32);
    rig_until(s->rig, s->client.count == 1);
    uint64_t first_at = rig_now;
    for (int i = 0; i < 25; i++) { /* pieces that trickle in do not make it longer */
        size_t size;
        uint8_t *piece = rig_piece(&s->edge, 3, 0, true, KV_L0, 0, PROMPT, &size);
        engine_kv(s->rig->engine, s->client.sequence, 1, 3, piece, size);
        rig_now += 800;
        rig_turn(s->rig);
    }
    assert_int_equal(s->client.count, 1);
    rig_until(s->rig, s->client.count == 2);
    assert_in_range(rig_now - first_at, 29000, 36000);
    finish(s);
    scene_close(s);
}

static void idle_upload_is_recomputed(void **state)
{
    (void)state;
    for (int hidden_rows = 0; hidden_rows <= 100; hidden_rows += 50) {
        struct scene *s = scene_open(1, (struct rig_options){0});
        open_plan_start(s, KV_L0, HIDDEN_F32);
        if (hidden_rows > 0)
            rig_send_hidden(&s->edge, &s->client, 1, 0, (uint32_t)hidden_rows, HIDDEN_F32);
        for (int i = 0; i < 10; i++)
            rig_turn(s->rig);
        rig_now += LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000) - 10000;
        if (hidden_rows > 0) /* rows that are there already are no progress */
            rig_send_hidden(&s->edge, &s->client, 1, 0, (uint32_t)hidden_rows, HIDDEN_F32);
        for (int i = 0; i < 10; i++)
            rig_turn(s->rig);
        assert_int_equal(s->client.count, 0);
        rig_now += 10000;
        rig_until(s->rig, s->client.count > 5);
        if (hidden_rows == 50) { /* what comes after all is dropped, and its credit given back */
            rig_send_hidden(&s->edge, &s->client, 1, 50, 50, HIDDEN_F32);
            rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
        }
        finish(s);
        assert_int_equal(s->client.done_event.done.recomputed_tokens, PROMPT);
        scene_close(s);
    }
}

/* With k = L the last row comes at the very end: as long as pieces flow, the upload is not idle. */
static void flowing_pieces_keep_an_upload_alive(void **state)
{
    (void)state;
    struct scene *s = scene_open(2, (struct rig_options){0});
    open_plan_start(s, KV_L0, HIDDEN_F32);
    for (uint32_t block = 0; block < 4; block++) {
        for (int i = 0; i < 10; i++)
            rig_turn(s->rig);
        rig_now += LIMIT_UPLOAD_IDLE_MS * UINT64_C(600);
        rig_send_kv(&s->edge, &s->client, 1, block * 64, TD_MIN(PROMPT, block * 64 + 64), KV_L0);
        rig_until(s->rig, s->client.ingested.ingested.kv_tokens >= TD_MIN(PROMPT, block * 64 + 64));
    }
    send_hidden_all(s, 1, 0, 64, HIDDEN_F32);
    finish(s);
    assert_int_equal(s->client.done_event.done.recomputed_tokens, 0);
    scene_close(s);
}

static void plan_that_never_comes_is_not_waited_for(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    open_edge(s);
    start(s, rig_greedy(REPLY));
    for (int i = 0; i < 10; i++)
        rig_turn(s->rig);
    assert_int_equal(s->client.count, 0);
    rig_now += LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000);
    finish(s);
    scene_close(s);
}

static void generate_that_never_comes_ends_the_stream(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    open_edge(s);
    plan(s, 1, (struct plan_range[]){{0, PROMPT, 0, 0, 0}}, 1);
    for (int i = 0; i < 10; i++)
        rig_turn(s->rig);
    assert_false(s->client.failed);
    rig_now += LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000);
    rig_turn(s->rig);
    assert_true(s->client.failed);
    assert_int_equal(s->client.fail_code, -TD_ERR_TIMEOUT);
    assert_int_equal(rig_stats(s->rig).pages_used, 0);
    scene_close(s);
}

/* A message of rows is lost: the rows behind it show the gap, and only the gap is computed from ids. */
static void gap_in_hidden_is_recomputed(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    open_plan_start(s, KV_L0, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
    rig_send_hidden(&s->edge, &s->client, 1, 0, 30, HIDDEN_F32);
    rig_send_hidden(&s->edge, &s->client, 1, 80, PROMPT - 80, HIDDEN_F32);
    finish(s);
    uint32_t recomputed = s->client.done_event.done.recomputed_tokens;
    assert_true(recomputed >= 50 &&
                recomputed <= 128); /* the gap, and rows of its blocks whose pieces came too late */
    scene_close(s);
}

/* What was computed here stays as computed here: pieces for such rows are dropped, whatever they say. */
static void pieces_for_recomputed_rows_are_dropped(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    int32_t other[PROMPT];
    rig_ids(other, PROMPT, VOCAB, 78);
    struct rig_edge liar = rig_edge_compute(s->rig, other, PROMPT, 1);
    open_plan_start(s, KV_L0, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 1, 0, 64, KV_L0);
    rig_until(s->rig, s->client.ingested.ingested.kv_tokens == 64);
    rig_send_hidden(&s->edge, &s->client, 1, 0, 64, HIDDEN_F32);
    rig_send_hidden(&s->edge, &s->client, 1, 70, 58,
                    HIDDEN_F32); /* [64, 70) is computed here, as [128, 200) will be */
    const struct sequence *sequence = engine_find(s->rig->engine, s->client.sequence);
    rig_until(s->rig, sequence->high == 128);
    rig_send_kv(&liar, &s->client, 1, 64, 128, KV_L0);
    rig_now += LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000) - 5000; /* time for the pieces to come in */
    finish(s);
    rig_edge_free(&liar);
    scene_close(s);
}

static void damaged_piece_is_recomputed(void **state)
{
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        struct scene *s = scene_open(1, (struct rig_options){0});
        open_plan_start(s, KV_L0, HIDDEN_F32);
        for (uint32_t block = 0; block < 4; block++)
            for (uint32_t i = 0; i < 2; i++) {
                size_t size;
                uint8_t *piece = rig_piece(&s->edge, block, 0, i, KV_L0, 0, PROMPT, &size);
                uint32_t at = block;
                if (block == 2 && i == 1 && kind == 0)
                    piece[size / 2] ^= 4;
                if (block == 2 && i == 1 && kind == 1)
                    size -= 10;
                if (kind == 2 && (block == 1 || block == 2)) /* two blocks swapped */
                    at = 3 - block;
                engine_kv(s->rig->engine, s->client.sequence, 1, at, piece, size);
            }
        send_hidden_all(s, 1, 0, 64, HIDDEN_F32);
        finish(s);
        assert_int_equal(s->client.done_event.done.recomputed_tokens, kind == 2 ? 128 : 64);
        scene_close(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(split_changes_nothing),
        cmocka_unit_test(first_token_does_not_wait_for_kv),
        cmocka_unit_test(steps_are_short_while_an_edge_sends),
        cmocka_unit_test(prompt_may_be_ready_before_generate),
        cmocka_unit_test(ranges_of_any_depth_follow_each_other),
        cmocka_unit_test(cached_prefix_makes_early_rows_superfluous),
        cmocka_unit_test(new_plan_voids_the_old_one),
        cmocka_unit_test(new_plan_may_move_borders_within_a_block),
        cmocka_unit_test(new_plan_begins_behind_a_block_under_way),
        cmocka_unit_test(stalled_kv_is_recomputed),
        cmocka_unit_test(rows_that_stay_away_are_not_waited_for),
        cmocka_unit_test(an_edge_that_was_left_may_help_again),
        cmocka_unit_test(the_record_says_where_the_rows_ended),
        cmocka_unit_test(pieces_are_waited_for_as_long_as_the_edge_says),
        cmocka_unit_test(idle_upload_is_recomputed),
        cmocka_unit_test(flowing_pieces_keep_an_upload_alive),
        cmocka_unit_test(plan_that_never_comes_is_not_waited_for),
        cmocka_unit_test(generate_that_never_comes_ends_the_stream),
        cmocka_unit_test(gap_in_hidden_is_recomputed),
        cmocka_unit_test(pieces_for_recomputed_rows_are_dropped),
        cmocka_unit_test(damaged_piece_is_recomputed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
