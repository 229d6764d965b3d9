/* engine: places among those that run are for work. Who waits for its edge gives its place to others, loses nothing, and is first again with its data. */
#include "edge_scene.h"

#define STALLED 12

/* A direct request of another principal, while all those are open. Turns move the clock by less than any idle limit. */
static void others_are_served(struct scene *s, bool generate)
{
    struct client stalled[STALLED], bob[3];
    int32_t reply[20];
    rig_reference(s->rig, s->prompt + 7, 100, rig_greedy(20), reply);
    for (int i = 0; i < STALLED; i++)
        stall(s, &stalled[i], "ann", generate);
    for (int i = 0; i < 3; i++) {
        struct engine_open open = open_as(&bob[i], "bob", s->prompt + 7, 100);
        open.direct = true;
        open.generate = rig_greedy(20);
        client_send(s->rig, &bob[i], open);
    }
    uint64_t opened_at = rig_now;
    for (int i = 0; i < 3; i++) {
        rig_until(s->rig, bob[i].done || bob[i].failed);
        assert_reply(&bob[i], reply, 20);
    }
    assert_true(rig_now - opened_at < LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000));
    for (int i = 0; i < STALLED; i++) {
        assert_false(stalled[i].done || stalled[i].failed);
        assert_int_equal(stalled[i].count, 0);
        assert_non_null(sequence_of(s, &stalled[i]));
    }
}

static void who_sends_nothing_holds_nobody_up(void **state)
{
    (void)state;
    for (int generate = 0; generate < 2; generate++) {
        struct scene *s = scene_open(1, (struct rig_options){.sequences_max = 3});
        others_are_served(s, generate);
        scene_close(s);
    }
}

/* Devices that left in mid-upload. */
static void who_is_away_holds_nobody_up(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.sequences_max = 2});
    struct client gone[4], bob;
    for (int i = 0; i < 4; i++) {
        stall(s, &gone[i], "ann", true);
        rig_turn(s->rig);
        assert_int_equal(engine_detach(s->rig->engine, gone[i].sequence), 0);
    }
    client_direct(s->rig, &bob, s->prompt + 7, 100, rig_greedy(2));
    rig_until(s->rig, bob.done);
    assert_int_equal(s->rig->engine->live_count, 4);
    scene_close(s);
}

/* Its place went to another in mid-prompt. When its rows come it is before the one that came later, and nothing is computed that it had sent. */
static void place_comes_back_with_the_rows(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.sequences_max = 1});
    struct client busy, later;
    open_plan_start(s, KV_L0, HIDDEN_F32);
    rig_send_hidden(&s->edge, &s->client, 1, 0, 64, HIDDEN_F32);
    rig_until(s->rig, s->client.ingested.ingested.run_tokens == 64);
    client_direct(s->rig, &busy, s->prompt + 7, 100, rig_greedy(50));
    rig_until(s->rig, busy.count == 2);
    assert_true(sequence_of(s, &s->client)->placeless);
    client_direct(s->rig, &later, s->prompt + 9, 100, rig_greedy(1));
    rig_send_hidden(&s->edge, &s->client, 1, 64, 136, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0); /* into its pages, without a place */
    rig_until(s->rig, s->client.ingested.ingested.kv_tokens >= 64);
    assert_false(busy.done);
    assert_int_equal(s->client.count, 0);
    rig_until(s->rig, s->client.done || s->client.failed);
    assert_reply(&s->client, s->reply, REPLY);
    assert_true(busy.done);
    assert_int_equal(later.count, 0);
    assert_int_equal(s->client.done_event.done.recomputed_tokens, 0);
    assert_int_equal(s->client.done_event.done.prefill_tokens, PROMPT);
    rig_until(s->rig, later.done);
    assert_int_equal(s->rig->engine->running_count, 0);
    scene_close(s);
}

/* What its edge never sent is computed when the wait is over, though its place had gone to another. */
static void place_comes_back_when_the_wait_is_over(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.sequences_max = 1});
    struct client busy;
    open_plan_start(s, KV_L0, HIDDEN_F32);
    rig_turn(s->rig);
    client_direct(s->rig, &busy, s->prompt + 7, 100, rig_greedy(1));
    rig_until(s->rig, busy.done);
    assert_true(sequence_of(s, &s->client)->placeless);
    rig_now += LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000);
    assert_true(engine_turn(s->rig->engine)); /* it ran */
    finish(s);
    assert_int_equal(s->client.done_event.done.recomputed_tokens, PROMPT);
    scene_close(s);
}

/* Those who came in one turn are seen to be idle at its end: the next turn is at once, not when something happens. */
static void places_change_hands_without_delay(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.sequences_max = 1});
    struct client ann[3], bob;
    for (int i = 0; i < 3; i++)
        stall(s, &ann[i], "ann", true);
    client_direct(s->rig, &bob, s->prompt + 7, 100, rig_greedy(1));
    while (engine_turn(s->rig->engine))
        continue;
    assert_true(bob.done);
    scene_close(s);
}

/* Without others nobody's place is taken, and of those that others take it is first the places of who has most. */
static void who_has_most_idle_ones_gives_first(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.sequences_max = 4});
    struct client carl, ann[3], bob[3];
    stall(s, &ann[0], "ann", true);
    stall(s, &carl, "carl", true);
    stall(s, &ann[1], "ann", true);
    stall(s, &ann[2], "ann", true);
    for (int i = 0; i < 5; i++)
        rig_turn(s->rig);
    for (int i = 0; i < 3; i++)
        assert_false(sequence_of(s, &ann[i])->placeless);
    for (int i = 0; i < 3; i++) {
        client_direct(s->rig, &bob[i], s->prompt + i, 60, rig_greedy(200));
        rig_until(s->rig, bob[i].count > 0);
        assert_int_equal(sequence_of(s, &ann[2])->placeless, true);
        assert_int_equal(sequence_of(s, &ann[1])->placeless, i > 0);
        assert_int_equal(sequence_of(s, &ann[0])->placeless + sequence_of(s, &carl)->placeless, i > 1);
    }
    assert_int_equal(s->rig->engine->running_count, 4);
    for (int i = 0; i < 3; i++)
        engine_cancel(s->rig->engine, ann[i].sequence, false, 0);
    rig_turn(s->rig);
    assert_int_equal(s->rig->engine->running_count, 3 + !sequence_of(s, &carl)->placeless);
    scene_close(s);
}

/* Who it is by the words of engine_places.c: of the principal that has most idle ones with a place the youngest; of equals the one whose youngest is youngest. */
static struct sequence *naive_idle(const struct engine *e)
{
    struct sequence *best = NULL;
    uint32_t most = 0;
    for (uint32_t i = e->live_count; i-- > 0;) {
        struct sequence *s = e->live[i];
        uint32_t count = 0;
        for (uint32_t j = 0; j < e->live_count && s->state == SEQ_RUNNING && s->idle && !s->placeless; j++) {
            const struct sequence *o = e->live[j];
            count += o->state == SEQ_RUNNING && o->idle && !o->placeless &&
                     strcmp(o->principal, s->principal) == 0 && strcmp(o->tenant, s->tenant) == 0;
        }
        if (count > most) {
            most = count;
            best = s;
        }
    }
    return best;
}

/* Many of many principals, whose keys begin with the same bytes. */
enum { LIVE = 60, ROUNDS = 40 };

static void live_at_random(struct sequence *live[LIVE], int round)
{
    static struct sequence all[LIVE];
    static uint32_t random = 7;
    memset(all, 0, sizeof all);
    for (uint32_t i = 0; i < LIVE; i++) {
        struct sequence *s = live[i] = &all[i];
        random = random * 1664525u + 1013904223u;
        uint32_t who = (random >> 8) % (1 + (uint32_t)round);
        s->state = random >> 28 ? SEQ_RUNNING : SEQ_WAITING;
        s->idle = random >> 30;
        s->placeless = random >> 24 & 3 ? false : true;
        s->own_key[0] = (uint8_t)(who % 3);
        s->turn = who % 2;
        snprintf(s->tenant, sizeof s->tenant, "tenant-%u", who % 2);
        snprintf(s->principal, sizeof s->principal, "person-%u", who / 2);
    }
}

static void the_right_one_of_many_gives_its_place(void **state)
{
    (void)state;
    struct sequence *live[LIVE];
    struct backend backend = {.page_count = 16};
    struct engine e = {.live = live, .live_count = LIVE, .backend = &backend};
    uint32_t given = 0;
    for (int round = 0; round < ROUNDS; round++) {
        live_at_random(live, round);
        for (struct sequence *next; (next = naive_idle(&e)); given++) {
            assert_true(engine_place_is_free(&e, NULL));
            assert_true(engine_take_place(&e, NULL));
            assert_true(next->placeless);
        }
        assert_false(engine_place_is_free(&e, NULL));
        assert_false(engine_take_place(&e, NULL));
    }
    assert_true(given > 10 * ROUNDS);
}

static bool naive_is_too_much(const struct engine *e, uint32_t others, uint32_t own)
{
    return others > 0 && others + own > e->backend->page_count / 2;
}

/* A place where those are first whose tenant has fewest, of these whose principal has, but behind all others where its idle ones leave too few pages, and
 * behind these where its tenant's do. */
static uint64_t naive_turn(const struct engine *e, const struct sequence *of)
{
    uint32_t placed = 0, idle = 0, tenants = 0, pages = sequence_blocks(of->ids_count + 1);
    for (uint32_t i = 0; i < e->live_count; i++) {
        const struct sequence *s = e->live[i];
        if (s->state != SEQ_RUNNING || strcmp(s->tenant, of->tenant) != 0)
            continue;
        placed += s->placeless ? 0 : 100;
        tenants += s != of ? sequence_blocks(s->ids_count + 1) : 0;
        if (!engine_same_principal(s, of))
            continue;
        placed += !s->placeless;
        idle += s->idle && s != of ? sequence_blocks(s->ids_count + 1) : 0;
    }
    return placed + (naive_is_too_much(e, idle, pages) ? 100000 : 0) +
           (tenants > e->backend->page_count / 2 ? 1000000 : 0);
}

static bool naive_comes_behind(const struct engine *e, const struct sequence *s)
{
    bool behind = false;
    for (uint32_t i = 0; i < e->live_count; i++) {
        const struct sequence *other = e->live[i];
        bool is_first = other->state == SEQ_WAITING && !engine_same_principal(other, s);
        for (uint32_t j = 0; j < i && is_first; j++)
            is_first = e->live[j]->state != SEQ_WAITING || !engine_same_principal(e->live[j], other);
        behind |= is_first && naive_turn(e, other) < naive_turn(e, s);
    }
    return behind;
}

/* Whatever there is, the right ones are first, and of those that wait first of their principals somebody is. */
static void somebody_is_next(void **state)
{
    (void)state;
    struct sequence *live[LIVE];
    struct backend backend = {.page_count = 32};
    struct engine e = {.live = live, .live_count = LIVE, .backend = &backend};
    uint32_t next = 0, behind = 0;
    for (int round = 0; round < ROUNDS; round++) {
        live_at_random(live, round);
        backend.page_count = 32 + 6 * (uint32_t)round;
        const struct sequence *first = NULL;
        for (uint32_t i = 0; i < LIVE; i++) {
            live[i]->state = i % 3 ? live[i]->state : SEQ_WAITING;
            live[i]->ids_count = i * 7 % 500;
        }
        for (uint32_t i = 0; i < LIVE; i++) {
            if (live[i]->state != SEQ_WAITING)
                continue;
            bool is_behind = engine_comes_behind(&e, live[i]);
            assert_int_equal(is_behind, naive_comes_behind(&e, live[i]));
            behind += is_behind;
            first = is_behind ? first : live[i];
        }
        next += first != NULL;
    }
    assert_int_equal(next, ROUNDS);
    assert_true(behind > 5 * ROUNDS);
}

/* --- pages ---------------------------------------------------------------------------------------- */

/* Four pages each of 16. None of what comes later is lost. */
static void who_sends_nothing_keeps_no_pages_from_others(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers <= 2; layers++) {
        struct scene *s = scene_open(layers, (struct rig_options){.pages = 16});
        others_are_served(s, true);
        scene_close(s);
    }
}

static void what_comes_later_is_not_lost(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers <= 2; layers++) {
        struct scene *s = scene_open(layers, (struct rig_options){.pages = 14});
        struct client cached, ann[3], bob;
        client_direct(s->rig, &cached, s->prompt, 65, rig_greedy(1)); /* a block of the prompt */
        rig_until(s->rig, cached.done);
        for (int i = 0; i < 3; i++)
            stall(s, &ann[i], "ann", true);
        open_plan_start(s, KV_L0, HIDDEN_F32); /* the youngest of them */
        rig_until(s->rig, sequence_of(s, &s->client) && sequence_of(s, &s->client)->idle);
        assert_int_equal(sequence_of(s, &s->client)->cached_count, 64);
        struct engine_open open = open_as(&bob, "bob", s->prompt + 7, 190);
        open.direct = true;
        open.generate = rig_greedy(200);
        client_send(s->rig, &bob, open);
        rig_until(s->rig, bob.count > 1);
        assert_int_equal(sequence_of(s, &s->client)->state, SEQ_WAITING);
        assert_int_equal(sequence_of(s, &ann[0])->state, SEQ_RUNNING); /* no more than were needed */
        send_hidden_all(s, 1, 0, 64, HIDDEN_F32);
        rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
        for (int i = 0; i < 3; i++)
            engine_cancel(s->rig->engine, ann[i].sequence, false, 0);
        finish(s);
        assert_int_equal(s->client.done_event.done.recomputed_tokens, 0);
        assert_int_equal(s->client.done_event.done.cached_tokens, 64);
        scene_close(s);
    }
}

/* Rows that have run are worth waiting for; not for ever while others wait. One alone is left in peace. */
static void what_has_come_is_given_up_late(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.pages = 8});
    struct client other, bob;
    open_plan_start(s, KV_L0, HIDDEN_F32);
    rig_send_hidden(&s->edge, &s->client, 1, 0, 64, HIDDEN_F32);
    rig_until(s->rig, s->client.ingested.ingested.run_tokens == 64);
    struct engine_open open = open_as(&bob, "bob", s->prompt + 7, 190);
    open.direct = true;
    open.generate = rig_greedy(150);
    client_send(s->rig, &bob, open);
    rig_until(s->rig, bob.count > 1);
    stall(s, &other, "ann", true);
    rig_turn(s->rig);
    struct client more; /* for whom there are no pages */
    open = open_as(&more, "carl", s->prompt + 3, 190);
    open.direct = true;
    open.generate = rig_greedy(1);
    client_send(s->rig, &more, open);
    for (int i = 0; i < 20; i++)
        rig_turn(s->rig);
    assert_int_equal(sequence_of(s, &s->client)->high, 64);
    assert_int_equal(more.count, 0);
    rig_until(s->rig, bob.done && more.done);
    assert_int_equal(sequence_of(s, &s->client)->high, 64);
    rig_send_hidden(&s->edge, &s->client, 1, 64, 136, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
    finish(s);
    assert_int_equal(s->client.done_event.done.recomputed_tokens, 0);
    scene_close(s);
}

/* One alone is left in peace, whatever it takes. */
static void one_alone_keeps_its_pages(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.pages = 4});
    struct client bob;
    open_plan_start(s, KV_L0, HIDDEN_F32);
    rig_turn(s->rig);
    client_send(s->rig, &bob, open_as(&bob, "bob", s->prompt + 7, 100));
    for (int i = 0; i < 20; i++)
        rig_turn(s->rig);
    assert_int_equal(sequence_of(s, &s->client)->state, SEQ_RUNNING);
    assert_int_equal(sequence_of(s, &bob)->state, SEQ_WAITING);
    scene_close(s);
}

/* The prefix that it was admitted with has gone when it is admitted again: the rows that its edge sent of it are used. */
static void a_prefix_may_go_meanwhile(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.pages = 8});
    struct client cached, ann, bob;
    client_direct(s->rig, &cached, s->prompt, 65, rig_greedy(1));
    rig_until(s->rig, cached.done);
    struct engine_open open = open_as(&ann, "ann", s->prompt, PROMPT);
    open.no_cache = true;
    client_send(s->rig, &ann, open);
    open_plan_start(s, KV_L0, HIDDEN_F32);
    rig_until(s->rig, sequence_of(s, &s->client) && sequence_of(s, &s->client)->idle);
    assert_int_equal(sequence_of(s, &s->client)->cached_count, 64);
    open = open_as(&bob, "bob", s->prompt + 7, 190);
    open.direct = true;
    open.generate = rig_greedy(322); /* which takes all pages */
    client_send(s->rig, &bob, open);
    rig_until(s->rig, bob.count > 0);
    assert_int_equal(sequence_of(s, &s->client)->state, SEQ_WAITING);
    rig_until(s->rig, bob.done);
    send_hidden_all(s, 1, 0, 64, HIDDEN_F32);
    rig_send_kv(&s->edge, &s->client, 1, 0, PROMPT, KV_L0);
    finish(s);
    assert_int_equal(s->client.done_event.done.cached_tokens, 0);
    assert_int_equal(s->client.done_event.done.recomputed_tokens, 0);
    scene_close(s);
}

/* Two that have stalled behind their first rows, with all pages: the younger one's are taken after a while, and its text is the same. */
static void who_stalls_in_mid_prompt_gives_way(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.pages = 8});
    struct client older, bob;
    stall(s, &older, "ann", true);
    rig_send_hidden(&s->edge, &older, 1, 0, 64, HIDDEN_F32);
    open_plan_start(s, KV_L0, HIDDEN_F32);
    rig_send_hidden(&s->edge, &s->client, 1, 0, 64, HIDDEN_F32);
    rig_until(s->rig, s->client.ingested.ingested.run_tokens == 64);
    struct engine_open open = open_as(&bob, "bob", s->prompt + 7, 100);
    open.direct = true;
    open.generate = rig_greedy(5);
    client_send(s->rig, &bob, open);
    for (int i = 0; i < 20; i++)
        rig_turn(s->rig);
    assert_int_equal(bob.count, 0); /* they may go on in a moment */
    rig_now += 11000000;
    rig_until(s->rig, bob.done || bob.failed);
    assert_true(bob.done);
    assert_int_equal(sequence_of(s, &older)->high, 64);
    assert_true(rig_now < sequence_of(s, &older)->upload_us + LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000));
    finish(s); /* from ids */
    assert_false(older.done || older.failed);
    scene_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_sends_nothing_holds_nobody_up),
        cmocka_unit_test(who_is_away_holds_nobody_up),
        cmocka_unit_test(place_comes_back_with_the_rows),
        cmocka_unit_test(place_comes_back_when_the_wait_is_over),
        cmocka_unit_test(places_change_hands_without_delay),
        cmocka_unit_test(who_has_most_idle_ones_gives_first),
        cmocka_unit_test(the_right_one_of_many_gives_its_place),
        cmocka_unit_test(somebody_is_next),
        cmocka_unit_test(who_sends_nothing_keeps_no_pages_from_others),
        cmocka_unit_test(what_comes_later_is_not_lost),
        cmocka_unit_test(what_has_come_is_given_up_late),
        cmocka_unit_test(one_alone_keeps_its_pages),
        cmocka_unit_test(a_prefix_may_go_meanwhile),
        cmocka_unit_test(who_stalls_in_mid_prompt_gives_way),
    };
    return cmocka_run_group_tests_name("engine_places", tests, NULL, NULL);
}
