/* engine: what an edge may not do and whom it harms. What breaks the rules is refused, and what a device sends is nobody's but its principal's,
 * and never exact where its arithmetic or its codec was not. */
#include "edge_scene.h"

/* --- what is not allowed -------------------------------------------------------------------------- */

static void expect_refusal(struct scene *s)
{
    rig_until(s->rig, s->client.failed || s->client.done);
    assert_true(s->client.failed);
    assert_int_equal(s->client.fail_code, -TD_ERR_PROTOCOL);
    assert_int_equal(rig_stats(s->rig).pages_used, rig_stats(s->rig).pages_cached);
    assert_int_equal(rig_stats(s->rig).running, 0);
}

static void bad_plans_are_refused(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    static const struct plan_range plans[][2] = {
        {{0, 100, 1, KV_L0, 0}, {100, 100, 1, KV_L0, 0}},  /* an edge range that ends within a block */
        {{0, 64, 1, KV_L0, 0}, {128, 72, 1, KV_L0, 0}},    /* a hole */
        {{0, 128, 1, KV_L0, 0}, {64, 136, 1, KV_L0, 0}},   /* overlap */
        {{0, 64, 3, KV_L0, 0}, {64, 136, 1, KV_L0, 0}},    /* more layers than there are */
        {{0, 64, 1, KV_L3, 0}, {64, 136, 1, KV_L0, 0}},    /* unknown codec */
        {{0, 64, 1, KV_L0, 3}, {64, 136, 1, KV_L0, 0}},    /* unknown type */
        {{0, 64, 1, KV_L0, 0}, {64, 100, 1, KV_L0, 0}},    /* not to the end */
        {{0, 64, 1, KV_L0, 0}, {64, 137, 1, KV_L0, 0}},    /* beyond the end */
        {{0, 64, 1, KV_L0, 0}, {64, UINT32_MAX, 1, 0, 0}}, /* far beyond */
        {{0, 64, 1, KV_L0, 0}, {64, 0, 1, KV_L0, 0}},      /* nothing */
    };
    for (size_t i = 0; i < TD_COUNT(plans); i++) {
        open_edge(s);
        plan(s, 1, plans[i], 2);
        expect_refusal(s);
    }
    scene_close(s);
}

static void bad_rows_are_refused(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    uint32_t embd = s->rig->model->params.embd_size;
    static const struct {
        uint32_t epoch, first, count, layer;
        uint8_t dtype;
        int size_off;
    } cases[] = {
        {2, 0, 64, 1, HIDDEN_F32, 0},         /* no such plan */
        {1, 0, 64, 2, HIDDEN_F32, 0},         /* another layer */
        {1, 0, 64, 1, HIDDEN_F16, 0},         /* another type */
        {1, PROMPT - 1, 2, 1, HIDDEN_F32, 0}, /* beyond the range */
        {1, UINT32_MAX, 2, 1, HIDDEN_F32, 0}, /* far beyond */
        {1, 0, 64, 1, HIDDEN_F32, -4},        /* too few bytes */
        {1, 0, 64, 1, HIDDEN_F32, 4},         /* too many */
        {1, 0, 64, 1, HIDDEN_F32, 0},         /* not finite, below */
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        open_plan_start(s, KV_L0, HIDDEN_F32);
        size_t size = hidden_wire_size(cases[i].dtype, cases[i].count, embd) + (size_t)cases[i].size_off;
        uint8_t *payload = calloc(1, size);
        if (i + 1 == TD_COUNT(cases))
            store_le32(payload + size - 4, 0x7f800000);
        engine_hidden(s->rig->engine, s->client.sequence, cases[i].epoch, cases[i].first, cases[i].count,
                      cases[i].layer, cases[i].dtype, payload, size);
        expect_refusal(s);
        assert_int_equal(s->client.consumed_size, size);
    }
    scene_close(s);
}

static void bad_pieces_are_refused(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    struct rig_edge two = rig_edge_compute(s->rig, s->prompt, PROMPT, 2);
    for (int kind = 0; kind < 6; kind++) {
        size_t size = 0;
        uint8_t *piece = NULL;
        uint32_t block = 0, epoch = 1;
        open_plan_start(s, KV_L0, HIDDEN_F32);
        switch (kind) {
        case 0: /* a layer that the cloud computes */
            piece = rig_piece(&two, 0, 1, false, KV_L0, 0, PROMPT, &size);
            break;
        case 1: /* another codec */
            piece = rig_piece(&s->edge, 0, 0, false, KV_RAW, 0, PROMPT, &size);
            break;
        case 2: /* part of a block */
            piece = rig_piece(&s->edge, 0, 0, false, KV_L0, 0, 63, &size);
            break;
        case 3: /* a plan that there is not */
            piece = rig_piece(&s->edge, 0, 0, false, KV_L0, 0, PROMPT, &size);
            epoch = 2;
            break;
        case 4: { /* a block behind the prompt */
            struct kv_shape shape = model_kv_shape(s->rig->model);
            uint16_t *zeros = calloc(kv_piece_values(&shape, 64), sizeof *zeros);
            struct kv_piece_head head = {.version = 1,
                                         .codec = KV_L0,
                                         .block_index = block = 1000,
                                         .token_count = 64,
                                         .kv_head_count = (uint16_t)shape.kv_head_count,
                                         .head_dim = (uint16_t)shape.head_dim};
            head.quality.numerics = KV_NUMERICS_CPU_V1;
            piece = malloc(kv_piece_bound(&shape, 64));
            size = (size_t)kv_piece_encode(s->edge.scratch, &head, zeros, piece, kv_piece_bound(&shape, 64));
            free(zeros);
            break;
        }
        default: { /* a value that is not finite */
            struct kv_shape shape = model_kv_shape(s->rig->model);
            uint16_t *values = calloc(kv_piece_values(&shape, 64), sizeof *values);
            values[77] = 0x7c00;
            struct kv_piece_head head = {.version = 1,
                                         .codec = KV_L0,
                                         .token_count = 64,
                                         .kv_head_count = (uint16_t)shape.kv_head_count,
                                         .head_dim = (uint16_t)shape.head_dim};
            head.quality.numerics = KV_NUMERICS_CPU_V1;
            piece = malloc(kv_piece_bound(&shape, 64));
            size = (size_t)kv_piece_encode(s->edge.scratch, &head, values, piece, kv_piece_bound(&shape, 64));
            free(values);
        }
        }
        assert_int_equal(engine_kv(s->rig->engine, s->client.sequence, epoch, block, piece, size), 0);
        expect_refusal(s);
        assert_int_equal(s->client.consumed_size, size);
    }
    rig_edge_free(&two);
    scene_close(s);
}

/* Rows of the largest finite numbers: whatever the model makes of them, it happens to the one who sent them. */
static void absurd_rows_harm_nobody_else(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    struct client other;
    uint32_t embd = s->rig->model->params.embd_size;
    size_t size = hidden_wire_size(HIDDEN_F32, PROMPT, embd);
    uint8_t *payload = malloc(size);
    for (size_t i = 0; i < size; i += 4)
        store_le32(payload + i, i % 8 ? 0x7f7fffff : 0xff7fffff);
    open_plan_start(s, KV_L0, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
    engine_hidden(s->rig->engine, s->client.sequence, 1, 0, PROMPT, 1, HIDDEN_F32, payload, size);
    struct engine_open open = client_open_of(&other, s->prompt, PROMPT, 0);
    strcpy(open.principal, "bob");
    kv_principal_key(open.shared_key, open.principal, open.own_key);
    open.direct = true;
    open.generate = rig_greedy(REPLY);
    client_send(s->rig, &other, open);
    rig_until(s->rig, s->client.done || s->client.failed);
    rig_until(s->rig, other.done || other.failed);
    assert_reply(&other, s->reply, REPLY);
    scene_close(s);
}

/* --- whose blocks are they ------------------------------------------------------------------------ */

/* A device that uploads wrong KV under right ids spoils its own principal's replies (so the test can tell) and nobody else's. */
static void lies_stay_with_the_liar(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    int32_t other[PROMPT];
    rig_ids(other, PROMPT, VOCAB, 78);
    struct rig_edge liar = rig_edge_compute(s->rig, other, PROMPT, 1);
    open_plan_start(s, KV_L0, HIDDEN_F32);
    rig_send_hidden(&liar, &s->client, 1, 0, PROMPT, HIDDEN_F32);
    rig_send_kv(&liar, &s->client, 1, 0, PROMPT, KV_L0);
    rig_until(s->rig, s->client.done || s->client.failed);
    assert_true(s->client.done);
    assert_memory_not_equal(s->client.ids, s->reply, sizeof s->reply);

    struct client ann, bob;
    client_direct(s->rig, &ann, s->prompt, PROMPT,
                  rig_greedy(REPLY)); /* the same principal: its own cache, its own fault */
    rig_until(s->rig, ann.done);
    assert_int_equal(ann.done_event.done.cached_tokens, 192);
    assert_memory_not_equal(ann.ids, s->reply, sizeof s->reply);

    struct engine_open open = client_open_of(&bob, s->prompt, PROMPT, 0);
    strcpy(open.principal, "bob");
    kv_principal_key(open.shared_key, open.principal, open.own_key);
    open.direct = true;
    open.generate = rig_greedy(REPLY);
    client_send(s->rig, &bob, open);
    rig_until(s->rig, bob.done);
    assert_int_equal(bob.done_event.done.cached_tokens, 0);
    assert_reply(&bob, s->reply, REPLY);

    rig_edge_free(&liar);
    scene_close(s);
}

/* Own blocks behind shared ones; once shared again never. */
static void chain_goes_from_shared_to_own(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    struct client bob;
    open_edge(s);
    plan(
        s, 1,
        (struct plan_range[]){{0, 64, 0, 0, 0}, {64, 64, 1, KV_L0, HIDDEN_F32}, {128, PROMPT - 128, 0, 0, 0}},
        3);
    start(s, rig_greedy(REPLY));
    rig_send_hidden(&s->edge, &s->client, 1, 64, 64, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 1, 64, 128, KV_L0);
    finish(s);
    struct engine_open open = client_open_of(&bob, s->prompt, PROMPT, 0);
    strcpy(open.principal, "bob");
    kv_principal_key(open.shared_key, open.principal, open.own_key);
    open.direct = true;
    open.generate = rig_greedy(REPLY);
    client_send(s->rig, &bob, open);
    rig_until(s->rig, bob.done);
    assert_int_equal(bob.done_event.done.cached_tokens, 64);
    assert_reply(&bob, s->reply, REPLY);
    /* Bob's sequence made blocks 1 and 2 of the shared chain. Ann's look-up tries that one first. */
    client_direct(s->rig, &bob, s->prompt, PROMPT, rig_greedy(REPLY));
    rig_until(s->rig, bob.done);
    assert_int_equal(bob.done_event.done.cached_tokens, 192);
    assert_reply(&bob, s->reply, REPLY);
    scene_close(s);
}

static uint32_t cached_for(struct scene *s, enum kv_accept accept)
{
    struct client c;
    struct engine_open open = client_open_of(&c, s->prompt, PROMPT, 0);
    open.accept = accept;
    open.direct = true;
    open.generate = rig_greedy(1);
    open.generate.no_persist = true;
    client_send(s->rig, &c, open);
    rig_until(s->rig, c.done);
    return c.done_event.done.cached_tokens;
}

/* Nor do pieces of other arithmetic, lossless as they are. */
static void other_arithmetic_is_never_exact(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    s->edge.numerics = KV_NUMERICS_CUDA_FAST;
    open_plan_start(s, KV_L0, HIDDEN_F32);
    send_hidden_all(s, 1, 0, PROMPT, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
    finish(s);
    assert_int_equal(cached_for(s, KV_ACCEPT_EXACT), 0);
    assert_int_equal(cached_for(s, KV_ACCEPT_VISIBLE_LOSSLESS), 192);
    scene_close(s);
}

/* Nor do blocks whose upper layers were computed from rows of other arithmetic, also where no piece came that says so. */
static void rows_of_other_arithmetic_are_never_exact(void **state)
{
    (void)state;
    for (uint8_t numerics = KV_NUMERICS_CPU_V1; numerics <= KV_NUMERICS_CUDA_FAST; numerics++) {
        struct scene *s = scene_open(1, (struct rig_options){0});
        struct engine_open open = client_open_of(&s->client, s->prompt, PROMPT, 0);
        open.edge_numerics = numerics;
        client_send(s->rig, &s->client, open);
        plan_one(s, 1, 0, PLAN_CODEC_NONE, HIDDEN_F32);
        start(s, rig_greedy(REPLY));
        send_hidden_all(s, 1, 0, PROMPT, HIDDEN_F32);
        finish(s);
        assert_int_equal(cached_for(s, KV_ACCEPT_EXACT), numerics == KV_NUMERICS_CPU_V1 ? 192 : 0);
        assert_int_equal(cached_for(s, KV_ACCEPT_VISIBLE_LOSSLESS), 192);
        scene_close(s);
    }
}

/* Lossy pieces or rows make blocks that an exact request does not take. */
static void lossy_is_never_exact(void **state)
{
    (void)state;
    static const struct {
        uint8_t codec, dtype;
        bool exact;
    } cases[] = {{KV_L0, HIDDEN_F32, true},
                 {KV_RAW, HIDDEN_F32, true},
                 {KV_L1, HIDDEN_F32, false},
                 {KV_L0, HIDDEN_F16, false},
                 {KV_L0, HIDDEN_INT8, false}};
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct scene *s = scene_open(1, (struct rig_options){0});
        open_plan_start(s, cases[i].codec, cases[i].dtype);
        send_hidden_all(s, 1, 0, 64, cases[i].dtype);
        rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, cases[i].codec);
        rig_until(s->rig, s->client.done || s->client.failed);
        assert_true(s->client.done);
        assert_int_equal(s->client.done_event.done.recomputed_tokens, 0);
        assert_int_equal(cached_for(s, KV_ACCEPT_VISIBLE_LOSSLESS), 192);
        assert_int_equal(cached_for(s, KV_ACCEPT_ANY), 192);
        assert_int_equal(cached_for(s, KV_ACCEPT_EXACT), cases[i].exact ? 192 : 0);
        scene_close(s);
    }
}

/* What comes while the sequence waits for its turn stays in RAM, and its credit with it. */
static void data_waits_for_a_slot(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.sequences_max = 1});
    int32_t other[100];
    struct client first;
    rig_ids(other, 100, VOCAB, 5);
    client_direct(s->rig, &first, other, 100, rig_greedy(100));
    rig_until(s->rig, first.count > 2);
    open_plan_start(s, KV_L0, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
    send_hidden_all(s, 1, 0, 64, HIDDEN_F32);
    rig_until(s->rig, first.count > 20);
    assert_int_equal(rig_stats(s->rig).waiting, 1);
    assert_int_equal(s->client.consumed_size, 0);
    assert_true(atomic_load(&s->rig->engine->staged_size) > 0);
    finish(s);
    assert_true(first.done);
    assert_int_equal(s->client.done_event.done.recomputed_tokens, 0);
    assert_true(s->client.done_event.done.queue_us > 0);
    scene_close(s);
}

/* An older sequence needs the pages: what the edge sent is gone, and the prompt is computed from ids later. */
static void preempted_upload_is_recomputed(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.pages = 6});
    int32_t other[100];
    struct client first;
    rig_ids(other, 100, VOCAB, 5);
    client_direct(s->rig, &first, other, 100, rig_greedy(150));
    rig_until(s->rig, first.count > 2);
    open_plan_start(s, KV_L0, HIDDEN_F32);
    size_t size = rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
    size += rig_send_hidden(&s->edge, &s->client, 1, 0, 100, HIDDEN_F32);
    rig_until(s->rig, rig_stats(s->rig).waiting == 1);
    assert_false(first.done);
    size += rig_send_hidden(&s->edge, &s->client, 1, 100, 100, HIDDEN_F32); /* of no use any more */
    finish(s);
    assert_true(first.done);
    const struct engine_event *done =
        &s->client.done_event; /* blocks that were whole before may have stayed in the cache */
    assert_true(done->done.recomputed_tokens > 0);
    assert_int_equal(done->done.recomputed_tokens + done->done.cached_tokens, PROMPT);
    assert_int_equal(s->client.consumed_size, size);
    scene_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_plans_are_refused),
        cmocka_unit_test(bad_rows_are_refused),
        cmocka_unit_test(bad_pieces_are_refused),
        cmocka_unit_test(absurd_rows_harm_nobody_else),
        cmocka_unit_test(lies_stay_with_the_liar),
        cmocka_unit_test(chain_goes_from_shared_to_own),
        cmocka_unit_test(other_arithmetic_is_never_exact),
        cmocka_unit_test(rows_of_other_arithmetic_are_never_exact),
        cmocka_unit_test(lossy_is_never_exact),
        cmocka_unit_test(data_waits_for_a_slot),
        cmocka_unit_test(preempted_upload_is_recomputed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
