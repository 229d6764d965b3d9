/* engine: exactly-once replies. A generation that loses its client goes on, is parked, is taken up again by it or by another node's successor, and
 * says the same text each time, each token once. */
#include "engine_rig.h"

#define VOCAB  256
#define PROMPT 100
#define REPLY  150

struct scene {
    struct rig *rig;
    int32_t prompt[PROMPT + REPLY], reply[REPLY];
    uint8_t request_id[GEN_REQUEST_ID_SIZE];
    uint64_t attempt;
};

static struct scene *scene_open(struct rig_options options)
{
    struct scene *s = calloc(1, sizeof *s);
    s->rig = rig_open(options);
    rig_ids(s->prompt, PROMPT, VOCAB, 21);
    rig_reference(s->rig, s->prompt, PROMPT, rig_sampling(REPLY, 99), s->reply);
    memcpy(s->prompt + PROMPT, s->reply, sizeof s->reply);
    memset(s->request_id, 0xab, sizeof s->request_id);
    return s;
}

static void scene_close(struct scene *s)
{
    rig_close(s->rig);
    free(s);
}

/* Open the scene's request, a higher attempt each time, with the first held_count reply tokens in hand. */
static void open_attempt(struct scene *s, struct client *c, uint32_t held_count)
{
    struct engine_open open = client_open_of(c, s->prompt, PROMPT, held_count);
    memcpy(open.request_id, s->request_id, sizeof open.request_id);
    open.attempt = ++s->attempt;
    client_send(s->rig, c, open);
}

static void plan_and_start(struct scene *s, struct client *c)
{
    struct plan_range all = {0, PROMPT, 0, 0, 0};
    struct engine_generate generate = rig_sampling(REPLY, 99);
    assert_int_equal(engine_plan(s->rig->engine, c->sequence, 1, &all, 1, false), 0);
    assert_int_equal(engine_start(s->rig->engine, c->sequence, &generate), 0);
}

static void assert_rest(const struct scene *s, const struct client *c, uint32_t from)
{
    assert_true(c->done);
    assert_int_equal(c->first_index, from);
    assert_int_equal(c->count, REPLY - from);
    assert_memory_equal(c->ids, s->reply + from, (REPLY - from) * sizeof *c->ids);
    assert_int_equal(c->done_event.done.completion_tokens, REPLY);
    assert_int_equal(c->done_event.done.prompt_tokens, PROMPT);
    assert_memory_equal(c->done_ids, s->prompt, (PROMPT + REPLY) * sizeof *c->ids);
    assert_int_equal(c->events_after_end, 0);
}

static void lost_client_comes_back_in_time(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct client first, second;
    open_attempt(s, &first, 0);
    plan_and_start(s, &first);
    rig_until(s->rig, first.count >= 10);
    engine_detach(s->rig->engine, first.sequence);
    for (int i = 0; i < 30; i++)
        rig_turn(s->rig);
    uint32_t had = first.count;
    assert_true(had < 15);
    open_attempt(s, &second, 8); /* it never saw the last ones */
    rig_until(s->rig, second.opened);
    assert_true(second.open_event.opened.resumed);
    assert_true(second.open_event.opened.reply_count > 30); /* went on without its client */
    plan_and_start(s, &second);                             /* were under way: of no consequence */
    rig_until(s->rig, second.done);
    assert_rest(s, &second, 8);
    assert_int_equal(first.count, had);
    scene_close(s);
}

static void parked_after_64_tokens_and_resumed(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct client first, second;
    open_attempt(s, &first, 0);
    plan_and_start(s, &first);
    rig_until(s->rig, first.count >= 10);
    engine_detach(s->rig->engine, first.sequence);
    for (int i = 0; i < 200; i++)
        rig_turn(s->rig);
    struct engine_stats stats = rig_stats(s->rig);
    assert_int_equal(stats.parked, 1);
    assert_int_equal(stats.running, 0);
    assert_int_equal(stats.pages_used, stats.pages_cached);
    open_attempt(s, &second, first.count);
    rig_until(s->rig, second.opened);
    assert_int_equal(second.open_event.opened.reply_count, first.count + LIMIT_DETACHED_TOKENS);
    rig_until(s->rig, second.done);
    assert_rest(s, &second, first.count);
    assert_int_equal(rig_stats(s->rig).parked, 0);
    scene_close(s);
}

/* The slot of a parked one is somebody else's at once, not when the engine next has a reason to look. */
static void parking_makes_room_at_once(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){.sequences_max = 1});
    struct client first, second;
    open_attempt(s, &first, 0);
    plan_and_start(s, &first);
    rig_until(s->rig, first.count >= 1);
    engine_detach(s->rig->engine, first.sequence);
    client_direct(s->rig, &second, s->prompt, 10, rig_greedy(5));
    bool again = false;
    for (int i = 0; i < 100 && rig_stats(s->rig).parked == 0; i++)
        again = engine_turn(s->rig->engine);
    assert_int_equal(rig_stats(s->rig).parked, 1);
    assert_int_equal(rig_stats(s->rig).waiting, 1);
    assert_true(again);
    rig_until(s->rig, second.done);
    scene_close(s);
}

static void parked_is_forgotten_in_the_end(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct client first, second;
    open_attempt(s, &first, 0);
    plan_and_start(s, &first);
    rig_until(s->rig, first.count >= 10);
    engine_detach(s->rig->engine, first.sequence);
    rig_until(s->rig, rig_stats(s->rig).parked == 1);
    rig_now += LIMIT_PARK_MS * UINT64_C(1000) - 100000;
    rig_turn(s->rig);
    assert_int_equal(rig_stats(s->rig).parked, 1);
    rig_now += 2000000;
    rig_turn(s->rig);
    assert_int_equal(rig_stats(s->rig).parked, 0);
    open_attempt(s, &second, 10); /* as on another node: the held tokens extend the prompt */
    plan_and_start(s, &second);
    rig_until(s->rig, second.opened);
    assert_false(second.open_event.opened.resumed);
    assert_int_equal(second.open_event.opened.reply_count, 10);
    rig_until(s->rig, second.done);
    assert_rest(s, &second, 10);
    scene_close(s);
}

static void detached_but_running_is_forgotten_too(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){.sequences_max = 1});
    struct client running, waiting;
    int32_t other[10] = {1, 2, 3};
    client_direct(s->rig, &running, other, 10, rig_greedy(1000));
    rig_until(s->rig, running.count >= 1);
    open_attempt(s, &waiting, 0);
    plan_and_start(s, &waiting);
    rig_turn(s->rig);
    engine_detach(s->rig->engine, waiting.sequence);
    rig_turn(s->rig);
    assert_int_equal(rig_stats(s->rig).waiting, 1);
    rig_now += LIMIT_PARK_MS * UINT64_C(1000);
    rig_turn(s->rig);
    assert_int_equal(rig_stats(s->rig).waiting, 0);
    assert_int_equal(atomic_load(&s->rig->engine->open_count), 1);
    scene_close(s);
}

/* Any number of held tokens, on a node that knows nothing: the rest of the reply is the rest of the reply. */
static void adopted_reply_goes_on(void **state)
{
    (void)state;
    static const uint32_t held[] = {1, 28, 29, 92, REPLY - 1};
    struct scene *s = scene_open((struct rig_options){0});
    for (size_t i = 0; i < TD_COUNT(held); i++) {
        struct client c;
        memset(s->request_id, (int)i + 1, sizeof s->request_id);
        open_attempt(s, &c, held[i]);
        plan_and_start(s, &c);
        rig_until(s->rig, c.done);
        assert_rest(s, &c, held[i]);
    }
    scene_close(s);
}

/* Who asks again after that gets all tokens; log probabilities only of those that were drawn here, not some for the others. */
static void adopted_tokens_have_no_logprobs(void **state)
{
    (void)state;
    static const uint32_t held = 28;
    struct scene *s = scene_open((struct rig_options){0});
    struct plan_range all = {0, PROMPT, 0, 0, 0};
    struct engine_generate generate = rig_sampling(REPLY, 99);
    generate.sampling.want_logprobs = true;
    struct client first, again;
    open_attempt(s, &first, held);
    assert_int_equal(engine_plan(s->rig->engine, first.sequence, 1, &all, 1, false), 0);
    assert_int_equal(engine_start(s->rig->engine, first.sequence, &generate), 0);
    rig_until(s->rig, first.done);
    assert_int_equal(first.sampled_count, REPLY - held);
    open_attempt(s, &again, 0);
    rig_until(s->rig, again.done);
    assert_rest(s, &again, 0);
    assert_int_equal(again.sampled_count, REPLY - held);
    for (uint32_t i = 0; i < REPLY; i++)
        assert_true(i < held ? again.sampled[i].logprob == 0 : again.sampled[i].logprob < 0);
    scene_close(s);
}

/* A device that is ahead, or has drawn other tokens, goes on from its own, whatever has become of ours: running, parked, ended. */
static void tokens_of_the_device_replace_ours(void **state)
{
    (void)state;
    for (int what = 0; what < 3; what++) {
        struct scene *s = scene_open((struct rig_options){0});
        struct client first, second;
        open_attempt(s, &first, 0);
        plan_and_start(s, &first);
        rig_until(s->rig, first.count >= 10);
        uint32_t held = first.count + LIMIT_DETACHED_TOKENS + 5;
        if (what == 1) {
            engine_detach(s->rig->engine, first.sequence);
            rig_until(s->rig, rig_stats(s->rig).parked == 1);
        } else if (what == 2) {
            rig_until(s->rig, first.done);
            int32_t *token = &s->prompt[PROMPT + 1];
            *token = (*token + 1) % VOCAB;
        }
        uint64_t now = rig_now;
        open_attempt(s, &second, held);
        plan_and_start(s, &second);
        rig_until(s->rig, second.done);
        assert_true(now + 5000000 > rig_now); /* it did not wait for anything to be forgotten */
        assert_false(second.open_event.opened.resumed);
        assert_int_equal(second.open_event.opened.reply_count, held);
        assert_int_equal(second.first_index, held);
        assert_int_equal(second.done_event.done.completion_tokens, REPLY);
        assert_memory_equal(second.done_ids, s->prompt, (PROMPT + held) * sizeof *second.ids);
        if (what < 2)
            assert_rest(s, &second, held);
        assert_int_equal(first.failed, what == 0);
        assert_int_equal(atomic_load(&s->rig->engine->open_count), 0);
        assert_int_equal(rig_stats(s->rig).parked, 0);
        scene_close(s);
    }
}

static void adopted_reply_that_is_whole_ends_at_once(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){.end_tokens = true});
    struct client c;
    open_attempt(s, &c, REPLY);
    plan_and_start(s, &c);
    rig_until(s->rig, c.done);
    assert_int_equal(c.count, 0);
    assert_int_equal(c.done_event.done.finish, FINISH_LENGTH);
    s->prompt[PROMPT + 9] = s->rig->tokenizer->eos;
    memset(s->request_id, 1, sizeof s->request_id);
    open_attempt(s, &c, 10);
    plan_and_start(s, &c);
    rig_until(s->rig, c.done);
    assert_int_equal(c.count, 0);
    assert_int_equal(c.done_event.done.finish, FINISH_STOP);
    scene_close(s);
}

/* An edge plans again for prompt and held tokens together. */
static void adopted_prompt_may_be_split(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    for (uint32_t layers = 1; layers <= 2; layers++) {
        struct client c;
        uint32_t total = PROMPT + 50;
        struct rig_edge edge = rig_edge_compute(s->rig, s->prompt, total, layers);
        struct plan_range range = {0, total, layers, KV_L0, HIDDEN_F32};
        struct engine_generate generate = rig_sampling(REPLY, 99);
        memset(s->request_id, (int)layers, sizeof s->request_id);
        struct engine_open open = client_open_of(&c, s->prompt, PROMPT, 50);
        memcpy(open.request_id, s->request_id, sizeof open.request_id);
        open.no_cache = true;
        client_send(s->rig, &c, open);
        engine_plan(s->rig->engine, c.sequence, 1, &range, 1, false);
        engine_start(s->rig->engine, c.sequence, &generate);
        if (layers == 1)
            rig_send_hidden(&edge, &c, 1, 0, total, HIDDEN_F32);
        else
            rig_send_hidden(&edge, &c, 1, total - 1, 1, HIDDEN_F32);
        rig_send_kv(&edge, &c, 1, 0, total, KV_L0);
        rig_until(s->rig, c.done || c.failed);
        assert_rest(s, &c, 50);
        assert_int_equal(c.done_event.done.recomputed_tokens, 0);
        rig_edge_free(&edge);
    }
    scene_close(s);
}

static void begin_upload(struct scene *s, struct client *c, const struct plan_range *range, uint32_t reply)
{
    struct engine_generate generate = rig_sampling(reply, 99);
    open_attempt(s, c, 0);
    engine_plan(s->rig->engine, c->sequence, 1, range, 1, false);
    engine_start(s->rig->engine, c->sequence, &generate);
}

/* Attempt again as an edge that goes on with its plan. */
static void open_resuming(struct scene *s, struct client *c)
{
    struct engine_open open = client_open_of(c, s->prompt, PROMPT, 0);
    memcpy(open.request_id, s->request_id, sizeof open.request_id);
    open.attempt = ++s->attempt;
    open.resumes = true;
    client_send(s->rig, c, open);
    rig_until(s->rig, c->opened);
}

/* The link breaks in the middle of an upload. Whoever comes back without a plan gets the reply all the same; until then nothing is computed that
 * the edge was to do. */
static void upload_that_breaks_off_is_finished_here(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct client first, second;
    struct rig_edge edge = rig_edge_compute(s->rig, s->prompt, PROMPT, 1);
    struct plan_range range = {0, PROMPT, 1, KV_L0, HIDDEN_F32};
    begin_upload(s, &first, &range, REPLY);
    rig_send_hidden(&edge, &first, 1, 0, 50, HIDDEN_F32);
    for (int i = 0; i < 5; i++)
        rig_turn(s->rig);
    engine_detach(s->rig->engine, first.sequence);
    for (int i = 0; i < 20; i++)
        rig_turn(s->rig);
    open_attempt(s, &second, 0);
    rig_until(s->rig, second.done);
    assert_true(second.open_event.opened.resumed);
    assert_false(second.open_event.opened.plan_wanted);
    assert_int_equal(second.open_event.opened.reply_count, 0);
    assert_rest(s, &second, 0);
    assert_int_equal(second.done_event.done.recomputed_tokens, PROMPT);
    rig_edge_free(&edge);
    scene_close(s);
}

/* A parked reply has lost all that its edge sent. Until the plan comes again its old ranges say nothing: no page is read that was never written. */
static void parked_upload_of_all_layers_is_wanted_again(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct client first, second;
    struct rig_edge edge = rig_edge_compute(s->rig, s->prompt, PROMPT, 2);
    struct plan_range range = {0, PROMPT, 2, KV_L0, HIDDEN_F32};
    struct engine_generate generate = rig_sampling(REPLY, 99);
    for (uint32_t again = 0; again <= 1; again++) {
        struct client *c = again ? &second : &first;
        struct engine_open open = client_open_of(c, s->prompt, PROMPT, again ? first.count : 0);
        memcpy(open.request_id, s->request_id, sizeof open.request_id);
        open.attempt = ++s->attempt;
        open.no_cache = true;
        open.resumes = again;
        client_send(s->rig, c, open);
        rig_until(s->rig, !again || c->opened);
        for (uint32_t i = 0; again && i < 20; i++)
            rig_turn(s->rig);
        engine_plan(s->rig->engine, c->sequence, 1 + again, &range, 1, false);
        engine_start(s->rig->engine, c->sequence, &generate);
        rig_send_hidden(&edge, c, 1 + again, PROMPT - 1, 1, HIDDEN_F32);
        rig_send_kv(&edge, c, 1 + again, 0, PROMPT, KV_L0);
        rig_until(s->rig, again ? c->done || c->failed : c->count >= 10);
        if (!again)
            engine_detach(s->rig->engine, c->sequence);
        rig_until(s->rig, again || rig_stats(s->rig).parked == 1);
    }
    assert_true(second.open_event.opened.plan_wanted);
    assert_rest(s, &second, first.count);
    rig_edge_free(&edge);
    scene_close(s);
}

/* In lossy forms the same reply can only come of the same values: what has come is kept, the rest is sent in the same form. */
static void upload_goes_on_where_it_broke_off(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct rig_edge edge = rig_edge_compute(s->rig, s->prompt, PROMPT, 1);
    struct plan_range range = {0, PROMPT, 1, KV_L1, HIDDEN_INT8};
    for (uint32_t rows = 0; rows <= PROMPT; rows += 50)
        for (uint32_t pieces = 0; pieces <= 1; pieces++) {
            struct client whole, first, second;
            memset(s->request_id, (int)(2 * rows + pieces), sizeof s->request_id);
            s->request_id[8] ^= 0x80;
            begin_upload(s, &whole, &range, REPLY);
            rig_send_hidden(&edge, &whole, 1, 0, PROMPT, HIDDEN_INT8);
            rig_send_kv(&edge, &whole, 1, 0, PROMPT, KV_L1);
            rig_until(s->rig, whole.done);
            assert_int_equal(whole.done_event.done.recomputed_tokens, 0);
            assert_memory_not_equal(whole.ids, s->reply,
                                    sizeof s->reply); /* else this test would show nothing */

            s->request_id[8] ^= 0x81;
            begin_upload(s, &first, &range, REPLY);
            if (rows)
                rig_send_hidden(&edge, &first, 1, 0, rows, HIDDEN_INT8);
            rig_send_kv(&edge, &first, 1, 0, pieces * KV_BLOCK_TOKENS, KV_L1);
            for (int i = 0; i < 5; i++)
                rig_turn(s->rig);
            engine_detach(s->rig->engine, first.sequence);
            rig_now += 5000000; /* longer than pieces are waited for while somebody is there */
            for (int i = 0; i < 20; i++)
                rig_turn(s->rig);
            open_resuming(s, &second);
            assert_true(second.open_event.opened.plan_wanted);
            assert_int_equal(second.open_event.opened.hidden_tokens, rows);
            assert_int_equal(second.open_event.opened.kv_tokens, pieces * KV_BLOCK_TOKENS);
            assert_int_equal(second.open_event.opened.epoch, 1);
            engine_plan(s->rig->engine, second.sequence, 2, &range, 1, false);
            if (rows < PROMPT)
                rig_send_hidden(&edge, &second, 2, rows, PROMPT - rows, HIDDEN_INT8);
            rig_send_kv(&edge, &second, 2, pieces * KV_BLOCK_TOKENS, PROMPT, KV_L1);
            rig_until(s->rig, second.done);
            assert_int_equal(second.done_event.done.recomputed_tokens, 0);
            assert_memory_equal(second.done_ids, whole.done_ids, (PROMPT + REPLY) * sizeof *whole.done_ids);
        }
    rig_edge_free(&edge);
    scene_close(s);
}

static void without_generate_a_lost_stream_is_dropped(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct client first, second;
    open_attempt(s, &first, 0);
    rig_turn(s->rig);
    engine_detach(s->rig->engine, first.sequence);
    rig_turn(s->rig);
    assert_int_equal(atomic_load(&s->rig->engine->open_count), 0);
    open_attempt(s, &second, 0);
    plan_and_start(s, &second);
    rig_until(s->rig, second.done);
    assert_false(second.open_event.opened.resumed);
    assert_rest(s, &second, 0);
    scene_close(s);
}

static void later_attempt_fences_the_earlier(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct client first, second, stale;
    open_attempt(s, &first, 0);
    plan_and_start(s, &first);
    rig_until(s->rig, first.count >= 10);
    open_attempt(s, &second, 10);
    rig_until(s->rig, second.done);
    assert_true(first.failed);
    assert_int_equal(first.fail_code, -TD_ERR_CANCELLED);
    assert_rest(s, &second, 10);
    s->attempt -= 1; /* the first one's frame was late */
    open_attempt(s, &stale, 0);
    rig_until(s->rig, stale.failed);
    assert_int_equal(stale.fail_code, -TD_ERR_BUSY);
    assert_int_equal(atomic_load(&s->rig->engine->open_count), 0);
    scene_close(s);
}

static void finished_reply_can_be_fetched_again(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct client c;
    open_attempt(s, &c, 0);
    plan_and_start(s, &c);
    rig_until(s->rig, c.done);
    for (uint32_t held = 0; held <= REPLY; held += 75) {
        open_attempt(s, &c, held);
        rig_turn(s->rig);
        assert_true(c.done && c.open_event.opened.resumed);
        if (held < REPLY)
            assert_rest(s, &c, held);
        else
            assert_int_equal(c.count, 0);
        assert_int_equal(c.done_event.done.finish, FINISH_LENGTH);
    }
    s->prompt[3] ^= 1; /* another prompt */
    open_attempt(s, &c, 10);
    rig_turn(s->rig);
    assert_int_equal(c.fail_code, -TD_ERR_MISMATCH);
    s->prompt[3] ^= 1;
    rig_now += LIMIT_PARK_MS * UINT64_C(1000) + 2000000;
    rig_turn(s->rig);
    open_attempt(s, &c, 0);
    rig_until(s->rig, c.opened);
    assert_false(c.open_event.opened.resumed);
    assert_int_equal(atomic_load(&s->rig->engine->open_count), 1);
    scene_close(s);
}

/* Finished while nobody listened: the one who asks later gets all of it. */
static void reply_that_ended_alone_is_kept(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct client first, second;
    open_attempt(s, &first, 0);
    plan_and_start(s, &first);
    rig_until(s->rig, first.count >= REPLY - 20);
    engine_detach(s->rig->engine, first.sequence);
    for (int i = 0; i < 50; i++)
        rig_turn(s->rig);
    assert_false(first.done);
    assert_int_equal(rig_stats(s->rig).running, 0);
    open_attempt(s, &second, 0);
    rig_turn(s->rig);
    assert_rest(s, &second, 0);
    scene_close(s);
}

static void repeated_direct_request_replays_with_logprobs(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    static struct client first, second;
    for (int i = 0; i < 2; i++) {
        struct client *c = i ? &second : &first;
        struct engine_open open = client_open_of(c, s->prompt, PROMPT, 0);
        memcpy(open.request_id, s->request_id, sizeof open.request_id);
        open.attempt = ++s->attempt;
        open.direct = true;
        open.generate = rig_sampling(REPLY, 99);
        open.generate.sampling.want_logprobs = true;
        open.generate.sampling.logprob_count = 2;
        client_send(s->rig, c, open);
        rig_until(s->rig, c->done);
        assert_rest(s, c, 0);
        assert_int_equal(c->sampled_count, REPLY);
    }
    assert_memory_equal(first.sampled, second.sampled, REPLY * sizeof *first.sampled);
    scene_close(s);
}

/* What only waits to be asked for again does not lie in memory as it is. */
static void kept_ids_are_sealed(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct client c;
    for (int parked = 0; parked < 2; parked++) {
        memset(s->request_id, parked, sizeof s->request_id);
        open_attempt(s, &c, 0);
        plan_and_start(s, &c);
        rig_until(s->rig, c.count >= 10);
        const struct sequence *kept = engine_find(s->rig->engine, c.sequence);
        assert_memory_equal(kept->ids, s->prompt, sizeof s->prompt[0] * PROMPT);
        if (parked)
            engine_detach(s->rig->engine, c.sequence);
        rig_until(s->rig, parked ? rig_stats(s->rig).parked == 1 : c.done);
        for (uint32_t held = 0; held < 2; held++) { /* and not after it was asked for either */
            assert_null(kept->ids);
            assert_non_null(kept->sealed);
            assert_null(memmem(kept->sealed, kept->ids_count * sizeof *kept->ids, s->prompt, 8));
            if (parked)
                break;
            open_attempt(s, &c, held);
            rig_turn(s->rig);
            assert_rest(s, &c, held);
        }
    }
    scene_close(s);
}

static void drain_lets_finish_then_fails(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct client quick, slow;
    client_direct(s->rig, &quick, s->prompt, PROMPT, rig_greedy(5));
    client_direct(s->rig, &slow, s->prompt, 10, rig_greedy(900));
    rig_turn(s->rig);
    struct engine_command *c = calloc(1, sizeof *c);
    c->type = COMMAND_DRAIN;
    c->drain_deadline_us = rig_now + 20000;
    assert_int_equal(queue_push(s->rig->engine->commands, c), 0);
    rig_until(s->rig, quick.done);
    assert_false(slow.failed);
    rig_until(s->rig, slow.failed);
    assert_int_equal(slow.fail_code, -TD_ERR_CLOSED);
    assert_true(s->rig->engine->is_drained);
    scene_close(s);
}

/* Replies whose edge has lost its link, one of them before its plan: an edge that comes back is refused, so the stop waits for neither. */
static void drain_waits_for_nobody_who_is_away(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct engine *e = s->rig->engine;
    struct client planned, unplanned;
    struct engine_generate generate = rig_sampling(REPLY, 99);
    open_attempt(s, &planned, 0);
    plan_and_start(s, &planned);
    rig_until(s->rig, planned.count >= 1);
    memset(s->request_id, 0xcd, sizeof s->request_id);
    open_attempt(s, &unplanned, 0);
    assert_int_equal(engine_start(e, unplanned.sequence, &generate), 0);
    rig_until(s->rig, unplanned.opened);
    engine_detach(e, planned.sequence);
    engine_detach(e, unplanned.sequence);
    struct engine_command *c = calloc(1, sizeof *c);
    c->type = COMMAND_DRAIN;
    c->drain_deadline_us = UINT64_MAX;
    assert_int_equal(queue_push(e->commands, c), 0);
    rig_turn(s->rig);
    rig_turn(s->rig);
    assert_true(e->is_drained);
    assert_int_equal(rig_stats(s->rig).parked, 0);
    scene_close(s);
}

/* A full table refuses nobody as long as it remembers replies that only might be asked for again: the oldest gives way. */
static void a_finished_generation_gives_its_place(void **state)
{
    (void)state;
    struct scene *s = scene_open((struct rig_options){0});
    struct engine *e = s->rig->engine;
    struct client c[2], more;
    gen_table_destroy(e->gens);
    e->gens = gen_table_create(2);
    for (int i = 0; i < 4; i++) {
        rig_now++;
        client_direct(s->rig, &c[0], s->prompt, PROMPT, rig_greedy(3));
        rig_until(s->rig, c[0].done || c[0].failed);
        assert_true(c[0].done);
    }
    for (int i = 0; i < 2; i++)
        client_direct(s->rig, &c[i], s->prompt, PROMPT, rig_greedy(100));
    rig_until(s->rig, c[0].count > 1 && c[1].count > 1);
    client_direct(s->rig, &more, s->prompt, PROMPT, rig_greedy(3));
    rig_until(s->rig, more.failed);
    assert_int_equal(more.fail_code, -TD_ERR_BUSY);
    rig_until(s->rig, c[0].done && c[1].done);
    scene_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lost_client_comes_back_in_time),
        cmocka_unit_test(a_finished_generation_gives_its_place),
        cmocka_unit_test(parked_after_64_tokens_and_resumed),
        cmocka_unit_test(parked_upload_of_all_layers_is_wanted_again),
        cmocka_unit_test(parking_makes_room_at_once),
        cmocka_unit_test(parked_is_forgotten_in_the_end),
        cmocka_unit_test(detached_but_running_is_forgotten_too),
        cmocka_unit_test(adopted_reply_goes_on),
        cmocka_unit_test(adopted_tokens_have_no_logprobs),
        cmocka_unit_test(tokens_of_the_device_replace_ours),
        cmocka_unit_test(adopted_reply_that_is_whole_ends_at_once),
        cmocka_unit_test(adopted_prompt_may_be_split),
        cmocka_unit_test(upload_that_breaks_off_is_finished_here),
        cmocka_unit_test(upload_goes_on_where_it_broke_off),
        cmocka_unit_test(without_generate_a_lost_stream_is_dropped),
        cmocka_unit_test(later_attempt_fences_the_earlier),
        cmocka_unit_test(finished_reply_can_be_fetched_again),
        cmocka_unit_test(reply_that_ended_alone_is_kept),
        cmocka_unit_test(repeated_direct_request_replays_with_logprobs),
        cmocka_unit_test(kept_ids_are_sealed),
        cmocka_unit_test(drain_lets_finish_then_fails),
        cmocka_unit_test(drain_waits_for_nobody_who_is_away),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
