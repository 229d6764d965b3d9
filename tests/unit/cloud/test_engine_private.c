/* engine: private prompts. Their ids are never here: the reply is the one that ids would have given, blocks are found under the edge's names and no
 * others, and whatever would have to be computed from ids is asked of the edge, or the request ends with one line. */
#include "engine_rig.h"
#include "shared/crypto.h"

#define VOCAB  256
#define PROMPT 200 /* three blocks and eight tokens */
#define REPLY  40

struct scene {
    struct rig *rig;
    struct rig_edge edge;
    struct client client;
    int32_t prompt[PROMPT], reply[REPLY];
    uint8_t request_id[GEN_REQUEST_ID_SIZE];
};

static struct scene *scene_open(uint32_t layers, struct rig_options options)
{
    struct scene *s = calloc(1, sizeof *s);
    s->rig = rig_open(options);
    rig_ids(s->prompt, PROMPT, VOCAB, 77);
    rig_reference(s->rig, s->prompt, PROMPT, rig_greedy(REPLY), s->reply);
    s->edge = rig_edge_compute(s->rig, s->prompt, PROMPT, layers);
    return s;
}

static void scene_close(struct scene *s)
{
    rig_edge_free(&s->edge);
    rig_until(s->rig, atomic_load(&s->rig->engine->staged_size) == 0);
    rig_close(s->rig);
    free(s);
}

/* names: any bytes do, `seed` tells two lists of them apart. held: what the edge has of s->reply. */
static struct engine_open private_open(struct scene *s, struct client *c, uint8_t seed, uint32_t held)
{
    int32_t ids[PROMPT + REPLY];
    memset(ids, 0xff, PROMPT * sizeof *ids);
    memcpy(ids + PROMPT, s->reply, held * sizeof *ids);
    struct engine_open open = client_open_of(c, ids, PROMPT, held);
    open.is_private = true;
    open.names = calloc(PROMPT / KV_BLOCK_TOKENS, sizeof *open.names);
    for (uint32_t i = 0; i < PROMPT / KV_BLOCK_TOKENS; i++)
        open.names[i].bytes[0] = seed, open.names[i].bytes[1] = (uint8_t)(i + 1);
    open.prompt_tag[0] = seed;
    memcpy(s->request_id, open.request_id, sizeof s->request_id);
    return open;
}

static void open_private(struct scene *s, uint8_t seed)
{
    client_send(s->rig, &s->client, private_open(s, &s->client, seed, 0));
}

static void plan_from(struct scene *s, uint32_t epoch, uint32_t first)
{
    struct plan_range range = {first, PROMPT - first, s->edge.layers, KV_L0, HIDDEN_F32};
    assert_int_equal(engine_plan(s->rig->engine, s->client.sequence, epoch, &range, 1, false), 0);
}

static void start(struct scene *s, struct engine_generate generate)
{
    assert_int_equal(engine_start(s->rig->engine, s->client.sequence, &generate), 0);
}

static void send_rows(struct scene *s, uint32_t epoch, uint32_t first)
{
    if (s->edge.layers == s->rig->model->params.layer_count)
        first = PROMPT - 1;
    rig_send_hidden(&s->edge, &s->client, epoch, first, PROMPT - first, HIDDEN_F32);
}

static void send_all(struct scene *s, uint32_t epoch, uint32_t first)
{
    send_rows(s, epoch, first);
    rig_send_kv(&s->edge, &s->client, epoch, first, PROMPT, KV_L0);
}

static void finish(struct scene *s)
{
    rig_until(s->rig, s->client.done || s->client.failed);
    assert_reply(&s->client, s->reply, REPLY);
    assert_int_equal(s->client.done_event.done.recomputed_tokens, 0);
    for (uint32_t i = 0; i < PROMPT; i++)
        assert_int_equal(s->client.done_ids[i], -1);
}

static void whole_turn(struct scene *s, uint8_t seed, uint32_t cached)
{
    open_private(s, seed);
    rig_until(s->rig, s->client.opened);
    assert_int_equal(s->client.open_event.opened.cached_tokens, cached);
    plan_from(s, 1, cached);
    start(s, rig_greedy(REPLY));
    send_all(s, 1, cached);
    finish(s);
    assert_int_equal(s->client.need_count, 0);
}

/* ---- the straight way ---- */

static void the_reply_is_the_one_of_the_ids(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers <= 2; layers++) {
        struct scene *s = scene_open(layers, (struct rig_options){.token_budget = 50});
        whole_turn(s, 1, 0);
        scene_close(s);
    }
}

static void blocks_have_the_names_of_the_edge_alone(void **state)
{
    (void)state;
    char directory[] = "/tmp/td-private-XXXXXX";
    assert_non_null(mkdtemp(directory));
    struct scene *s = scene_open(1, (struct rig_options){.store = directory});
    whole_turn(s, 1, 0);
    whole_turn(s, 1, 192);
    whole_turn(s, 2, 0); /* the same prompt under other names */
    struct client normal;
    client_send(s->rig, &normal, client_open_of(&normal, s->prompt, PROMPT, 0));
    rig_until(s->rig, normal.opened);
    assert_int_equal(normal.open_event.opened.cached_tokens, 0);
    rig_stop_engine(s->rig);
    rig_start_engine(s->rig);
    whole_turn(s, 1, 192); /* and from the disk */
    scene_close(s);
}

/* The reply's blocks begin in the prompt's last one, or hang behind it: nobody here could name them. */
static void what_the_reply_fills_is_not_kept(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    open_private(s, 1);
    plan_from(s, 1, 0);
    start(s, rig_greedy(120));
    send_all(s, 1, 0);
    rig_until(s->rig, s->client.done);
    assert_int_equal(s->client.count, 120);
    assert_int_equal(rig_stats(s->rig).pages_cached, 3);
    scene_close(s);
}

static void penalties_see_the_reply_alone(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    struct engine_generate generate = rig_greedy(REPLY);
    generate.sampling.repetition_penalty = 1.7f;
    generate.sampling.repetition_window = -1;
    rig_reference_seen(s->rig, s->prompt, PROMPT, generate, s->reply, PROMPT);
    open_private(s, 1);
    plan_from(s, 1, 0);
    start(s, generate);
    send_all(s, 1, 0);
    finish(s);
    int32_t with_prompt[REPLY];
    rig_reference(s->rig, s->prompt, PROMPT, generate, with_prompt);
    assert_memory_not_equal(with_prompt, s->reply, sizeof with_prompt);
    scene_close(s);
}

/* ---- what would need ids ---- */

static void plans_that_leave_something_to_ids_are_refused(void **state)
{
    (void)state;
    static const struct plan_range bad[][2] = {
        {{0, PROMPT, 0, 0, 0}},
        {{0, PROMPT, 1, PLAN_CODEC_NONE, HIDDEN_F32}},
        {{0, 64, 1, KV_L0, HIDDEN_F32}, {64, PROMPT - 64, 0, 0, 0}},
    };
    struct scene *s = scene_open(1, (struct rig_options){0});
    for (size_t i = 0; i < TD_COUNT(bad); i++) {
        open_private(s, 1);
        engine_plan(s->rig->engine, s->client.sequence, 1, bad[i], bad[i][1].count ? 2 : 1, false);
        start(s, rig_greedy(REPLY));
        rig_until(s->rig, s->client.failed);
        assert_int_equal(s->client.fail_code, -TD_ERR_PROTOCOL);
        assert_non_null(strstr(s->client.fail_text, "private prompt"));
    }
    scene_close(s);
}

static void damaged_pieces_are_asked_for_again(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers <= 2; layers++) {
        struct scene *s = scene_open(layers, (struct rig_options){.token_budget = 50});
        open_private(s, 1);
        plan_from(s, 1, 0);
        start(s, rig_greedy(REPLY));
        rig_send_kv(&s->edge, &s->client, 1, 0, 64, KV_L0);
        size_t size;
        uint8_t *piece = rig_piece(&s->edge, 1, 0, false, KV_L0, 0, PROMPT, &size);
        piece[size - 1] ^= 1;
        assert_int_equal(engine_kv(s->rig->engine, s->client.sequence, 1, 1, piece, size), 0);
        send_rows(s, 1, 0);
        rig_until(s->rig, s->client.need_count == 1);
        assert_int_equal(s->client.need.need.first_token, 64); /* the first block is whole and stays */
        assert_int_equal(s->client.need.need.epoch, 1);
        assert_int_equal(s->client.count, 1); /* the first token needs rows alone, and is not drawn twice */
        plan_from(s, 2, 64);
        send_all(s, 2, 64);
        finish(s);
        assert_int_equal(s->client.need_count, 1);
        scene_close(s);
    }
}

/* What was on its way when the device heard of NEED: of no use, and no fault. */
static void what_comes_late_is_no_fault(void **state)
{
    (void)state;
    for (int rows = 0; rows < 2; rows++) {
        struct scene *s = scene_open(1, (struct rig_options){.token_budget = 50});
        size_t size;
        open_private(s, 1);
        plan_from(s, 1, 0);
        start(s, rig_greedy(REPLY));
        uint8_t *piece = rig_piece(&s->edge, 0, 0, false, KV_L0, 0, PROMPT, &size);
        piece[size - 1] ^= 1;
        assert_int_equal(engine_kv(s->rig->engine, s->client.sequence, 1, 0, piece, size), 0);
        send_rows(s, 1, 0);
        rig_until(s->rig, s->client.need_count == 1);
        if (rows)
            send_rows(s, 1, 0);
        else
            rig_send_kv(&s->edge, &s->client, 1, 64, PROMPT, KV_L0);
        plan_from(s, 2, 0);
        send_all(s, 2, 0);
        finish(s);
        scene_close(s);
    }
}

/* OPENED spoke of blocks that have given way until the sequence runs. */
static void blocks_that_have_gone_are_asked_for(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.sequences_max = 1, .pages = 8});
    whole_turn(s, 1, 0);
    int32_t other[64];
    struct client first; /* needs all pages, and has the only place */
    rig_ids(other, 64, VOCAB, 5);
    client_direct(s->rig, &first, other, 64, rig_greedy(8 * 64 - 64 - 1));
    rig_until(s->rig, first.count > 0);
    open_private(s, 1);
    rig_until(s->rig, s->client.opened);
    assert_int_equal(s->client.open_event.opened.cached_tokens, 192);
    plan_from(s, 1, 192);
    start(s, rig_greedy(REPLY));
    send_all(s, 1, 192);
    rig_until(s->rig, s->client.need_count == 1);
    assert_true(first.done);
    uint32_t from = s->client.need.need.first_token;
    assert_true(from < 192 && from % KV_BLOCK_TOKENS == 0);
    plan_from(s, 2, from);
    send_all(s, 2, from);
    finish(s);
    scene_close(s);
}

/* Later than the stall limit is not too late: there is no other way to get it. */
static void late_pieces_are_waited_for(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    s->rig->engine->config.kv_stall_ms = 10;
    open_private(s, 1);
    plan_from(s, 1, 0);
    start(s, rig_greedy(REPLY));
    send_rows(s, 1, 0);
    rig_until(s->rig, s->client.count == 1);
    rig_now += 20000000; /* 20 s */
    for (int i = 0; i < 20; i++)
        rig_turn(s->rig);
    assert_int_equal(s->client.count, 1);
    assert_int_equal(s->client.need_count, 0);
    rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
    finish(s);
    scene_close(s);
}

static void a_silent_device_ends_the_request(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    for (int rows = 0; rows < 3; rows++) { /* no plan; a plan; and half of its rows */
        open_private(s, 1);
        start(s, rig_greedy(REPLY));
        if (rows > 0)
            plan_from(s, 1, 0);
        if (rows > 1)
            rig_send_hidden(&s->edge, &s->client, 1, 0, 100, HIDDEN_F32);
        for (int i = 0; i < 20; i++)
            rig_turn(s->rig);
        assert_false(s->client.failed);
        rig_now += LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000);
        rig_until(s->rig, s->client.failed);
        assert_int_equal(s->client.fail_code, -TD_ERR_TIMEOUT);
        assert_non_null(strstr(s->client.fail_text, "private prompt"));
    }
    scene_close(s);
}

/* A device that answers with what is of no use is not asked for ever. */
static void a_useless_device_ends_the_request(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    open_private(s, 1);
    start(s, rig_greedy(REPLY));
    for (uint32_t epoch = 1; !s->client.failed; epoch++) {
        uint32_t asked = s->client.need_count;
        plan_from(s, epoch, 64); /* but nothing is cached */
        rig_until(s->rig, s->client.need_count > asked || s->client.failed);
    }
    assert_int_equal(s->client.need_count, ENGINE_ASKS_MAX);
    assert_int_equal(s->client.fail_code, -TD_ERR_TIMEOUT);
    scene_close(s);
}

/* ---- when either side goes away ---- */

static void reopen(struct scene *s, uint32_t held, uint64_t attempt)
{
    uint8_t request_id[GEN_REQUEST_ID_SIZE];
    memcpy(request_id, s->request_id, sizeof request_id);
    struct engine_open open = private_open(s, &s->client, 1, held);
    memcpy(open.request_id, request_id, sizeof request_id);
    memcpy(s->request_id, request_id, sizeof request_id);
    open.attempt = attempt;
    open.resumes = true;
    client_send(s->rig, &s->client, open);
    rig_until(s->rig, s->client.opened || s->client.failed);
}

static void a_lost_link_in_mid_prompt_goes_on(void **state)
{
    (void)state;
    for (int parked = 0; parked < 2; parked++) {
        struct scene *s = scene_open(1, (struct rig_options){0});
        open_private(s, 1);
        plan_from(s, 1, 0);
        start(s, rig_greedy(REPLY));
        rig_send_hidden(&s->edge, &s->client, 1, 0, 128, HIDDEN_F32);
        rig_send_kv(&s->edge, &s->client, 1, 0, 64, KV_L0);
        rig_until(s->rig, s->client.ingested.ingested.kv_tokens == 64);
        assert_int_equal(engine_detach(s->rig->engine, s->client.sequence), 0);
        rig_turn(s->rig);
        if (parked) { /* it waits for its device without pages, and finds what was whole in the cache */
            rig_now += 2 * LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000);
            rig_until(s->rig, rig_stats(s->rig).parked == 1);
        }
        reopen(s, 0, 2);
        const struct engine_event *e = &s->client.open_event;
        assert_true(e->opened.resumed && e->opened.plan_wanted);
        assert_int_equal(e->opened.hidden_tokens, parked ? 64 : 128);
        assert_int_equal(e->opened.kv_tokens, 64);
        uint32_t from = e->opened.kv_tokens;
        plan_from(s, 2, 0);
        rig_send_hidden(&s->edge, &s->client, 2, e->opened.hidden_tokens, PROMPT - e->opened.hidden_tokens,
                        HIDDEN_F32);
        rig_send_kv(&s->edge, &s->client, 2, from, PROMPT, KV_L0);
        finish(s);
        scene_close(s);
    }
}

/* A node that knows nothing takes the reply up from the tokens held, once the device has sent its part again. */
static void held_tokens_are_adopted(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    struct engine_open open = private_open(s, &s->client, 1, 17);
    client_send(s->rig, &s->client, open);
    rig_until(s->rig, s->client.opened);
    assert_false(s->client.open_event.opened.resumed);
    plan_from(s, 1, 0);
    start(s, rig_greedy(REPLY));
    send_all(s, 1, 0);
    rig_until(s->rig, s->client.done || s->client.failed);
    assert_true(s->client.done);
    assert_int_equal(s->client.first_index, 17);
    assert_int_equal(s->client.count, REPLY - 17);
    assert_memory_equal(s->client.ids, s->reply + 17, (REPLY - 17) * sizeof *s->reply);
    scene_close(s);
}

static void another_prompt_under_the_same_request_is_refused(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){0});
    whole_turn(s, 1, 0);
    uint8_t request_id[GEN_REQUEST_ID_SIZE];
    memcpy(request_id, s->request_id, sizeof request_id);
    for (uint8_t seed = 1; seed <= 2; seed++) {
        struct engine_open open = private_open(s, &s->client, seed, 0);
        memcpy(open.request_id, request_id, sizeof request_id);
        open.attempt = seed + 1;
        client_send(s->rig, &s->client, open);
        rig_until(s->rig, s->client.done || s->client.failed);
        assert_true(seed == 1 ? s->client.done : s->client.fail_code == -TD_ERR_MISMATCH);
    }
    scene_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_reply_is_the_one_of_the_ids),
        cmocka_unit_test(blocks_have_the_names_of_the_edge_alone),
        cmocka_unit_test(what_the_reply_fills_is_not_kept),
        cmocka_unit_test(penalties_see_the_reply_alone),
        cmocka_unit_test(plans_that_leave_something_to_ids_are_refused),
        cmocka_unit_test(damaged_pieces_are_asked_for_again),
        cmocka_unit_test(what_comes_late_is_no_fault),
        cmocka_unit_test(blocks_that_have_gone_are_asked_for),
        cmocka_unit_test(late_pieces_are_waited_for),
        cmocka_unit_test(a_silent_device_ends_the_request),
        cmocka_unit_test(a_useless_device_ends_the_request),
        cmocka_unit_test(a_lost_link_in_mid_prompt_goes_on),
        cmocka_unit_test(held_tokens_are_adopted),
        cmocka_unit_test(another_prompt_under_the_same_request_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
