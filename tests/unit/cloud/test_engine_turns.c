/* engine: who of those that ask comes in, runs and has pages: tenants and principals take turns, however much one asks. */
#include "edge_scene.h"

/* No two prompts begin alike. */
static int try_to_ask(struct rig *r, struct client *c, const char *tenant, const char *principal,
                      uint32_t count, uint32_t reply)
{
    static uint32_t seed = 1000;
    int32_t ids[450];
    rig_ids(ids, count, 256, seed++);
    struct engine_open open = open_as(c, principal, ids, count);
    snprintf(open.tenant, sizeof open.tenant, "%s", tenant);
    open.direct = true;
    open.generate = rig_greedy(reply);
    *c = (struct client){0};
    return engine_open(r->engine, &open, &c->sequence);
}

static void ask(struct rig *r, struct client *c, const char *tenant, const char *principal, uint32_t count,
                uint32_t reply)
{
    assert_int_equal(try_to_ask(r, c, tenant, principal, count, reply), 0);
}

/* How many more of this principal come in; of what waits to be seen by the engine, too. */
static uint32_t fill(struct rig *r, const char *tenant, const char *principal)
{
    static struct client clients[64];
    static uint32_t used;
    for (uint32_t count = 0;; count++) {
        struct client *c = &clients[used];
        int rc = try_to_ask(r, c, tenant, principal, 10, 300);
        if (rc == -TD_ERR_FULL)
            return count;
        assert_int_equal(rc, 0);
        if (used++ % 2)
            rig_turn(r);
    }
}

/* 32 may run or wait. One client takes no more than leaves room to its colleagues, and these no more than leaves room to others. */
static void nobody_shuts_others_out(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.sequences_max = 4, .waiting_max = 28});
    struct client last;
    assert_int_equal(fill(r, "acme", "ann"), 24);
    assert_int_equal(fill(r, "acme", "ann"), 0);
    assert_int_equal(fill(r, "acme", "bob"), 4);
    assert_int_equal(fill(r, "acme", "carl"), 0);
    assert_int_equal(fill(r, "other", "ann"), 3);
    ask(r, &last, "third", "ann", 10, 1);
    rig_turn(r);
    assert_true(last.opened);
    assert_int_equal(rig_stats(r).waiting, 28);
    assert_int_equal(r->engine->share_count, 4);
    while (r->engine->live_count > 0)
        engine_drop(r->engine, r->engine->live[0]);
    assert_int_equal(r->engine->share_count + atomic_load(&r->engine->open_count), 0);
    rig_close(r);
}

/* Of those that wait the next is one of who runs least; where that is the same, who came first. */
static void principals_take_turns(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.sequences_max = 3});
    static struct client ann[6], bob[2], carl;
    for (int i = 0; i < 6; i++)
        ask(r, &ann[i], "acme", "ann", 10, 20);
    rig_until(r, ann[2].count > 0);
    ask(r, &bob[0], "acme", "bob", 10, 20);
    ask(r, &bob[1], "acme", "bob", 10, 20);
    ask(r, &carl, "other", "ann", 10, 5);
    rig_until(r, carl.done);
    assert_true(ann[3].count > 0 && bob[0].count > 0);
    assert_int_equal(ann[4].count + ann[5].count + bob[1].count, 0);
    rig_until(r, ann[5].done && bob[1].done);
    rig_close(r);
}

enum { DEVICES = 12, OTHERS = 4 };

static uint32_t count_begun(const struct client *clients, uint32_t count)
{
    uint32_t begun = 0;
    for (uint32_t i = 0; i < count; i++)
        begun += clients[i].count > 0;
    return begun;
}

/* Twelve devices of one tenant have all places, and wait for more, each with a prompt of three turns: two of another tenant's take six, and as many
 * of theirs. */
static void many_devices_of_a_tenant_hold_no_other_up(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.sequences_max = 4, .token_budget = SCHEDULER_TURN_ROWS});
    static struct client acme[DEVICES], other[OTHERS];
    for (int i = 0; i < DEVICES; i++) {
        char name[16];
        snprintf(name, sizeof name, "device-%d", i);
        ask(r, &acme[i], "acme", name, 190, 300);
    }
    rig_until(r, acme[0].count > 0);
    for (int i = 0; i < OTHERS; i += 2) {
        uint32_t begun = count_begun(acme, DEVICES);
        ask(r, &other[i], "other", "ann", 190, 1);
        ask(r, &other[i + 1], "other", "bob", 190, 1);
        rig_until(r, other[i].done && other[i + 1].done);
        assert_true(count_begun(acme, DEVICES) <= begun + 3);
    }
    assert_true(count_begun(acme, DEVICES) < DEVICES);
    rig_close(r);
}

/* Prompts as they come, those given up by their devices too: these are placeless, and may have rows in their pages. */
static void who_gave_its_place_loses_nothing(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.sequences_max = 2, .token_budget = 64});
    static struct client acme[4], other;
    int32_t reply[5];
    rig_reference(s->rig, s->prompt, PROMPT, rig_greedy(5), reply);
    for (int i = 0; i < 4; i++) {
        char name[16];
        snprintf(name, sizeof name, "device-%d", i);
        struct engine_open open = open_as(&acme[i], name, s->prompt, PROMPT);
        open.direct = open.no_cache = true;
        open.generate = rig_greedy(5);
        client_send(s->rig, &acme[i], open);
    }
    rig_turn(s->rig);
    ask(s->rig, &other, "other", "ann", 190, 5);
    rig_until(s->rig, other.count > 0);
    assert_true(sequence_of(s, &acme[1])->placeless);
    assert_int_equal(s->rig->engine->running_count, 2);
    for (int i = 0; i < 4; i++) {
        rig_until(s->rig, acme[i].done || acme[i].failed);
        assert_reply(&acme[i], reply, 5);
        assert_int_equal(acme[i].done_event.done.recomputed_tokens, 0);
        assert_int_equal(acme[i].done_event.done.prefill_tokens, PROMPT);
    }
    assert_true(other.done);
    scene_close(s);
}

/* Devices of one tenant have, or wait for, all pages, and send nothing, or have prompts of which nothing has run. */
static void many_devices_of_a_tenant_keep_no_pages_from_others(void **state)
{
    (void)state;
    for (int sends = 0; sends < 2; sends++) {
        struct scene *s =
            scene_open(1, (struct rig_options){.pages = 16, .token_budget = SCHEDULER_TURN_ROWS});
        static struct client acme[DEVICES], other;
        for (int i = 0; i < DEVICES; i++) {
            char name[16];
            snprintf(name, sizeof name, "device-%d", i);
            if (sends)
                ask(s->rig, &acme[i], "acme", name, 190, 60);
            else
                stall(s, &acme[i], name, true);
        }
        rig_turn(s->rig);
        uint64_t opened_at = rig_now;
        ask(s->rig, &other, "other", "ann", 190, 1);
        rig_until(s->rig, other.done || other.failed);
        assert_true(other.done);
        assert_true(rig_now - opened_at < 10000000); /* what idle ones have where rows have come */
        assert_true(count_begun(acme, DEVICES) <= 2);
        for (int i = 0; i < DEVICES; i++) {
            rig_until(s->rig, acme[i].done || !sends);
            assert_false(acme[i].failed);
        }
        scene_close(s);
    }
}

/* Prompts that have all but their last page in common: two tenants have, each, more than half of the pages by their count, and there is none for a sixth. */
static void who_would_have_too_much_takes_no_pages(void **state)
{
    (void)state;
    static const char *const tenants[] = {"acme", "other", "acme", "other", "acme", "other"},
                             *const names[] = {"ann", "ann", "bob", "bob", "carl", "carl"};
    struct scene *s = scene_open(1, (struct rig_options){.pages = 8});
    static struct client clients[TD_COUNT(tenants)];
    client_direct(s->rig, &s->client, s->prompt, PROMPT, rig_greedy(1));
    rig_until(s->rig, s->client.done);
    for (uint32_t i = 0; i < TD_COUNT(tenants); i++) {
        stall_as(s, &clients[i], tenants[i], names[i], true);
        rig_turn(s->rig);
    }
    for (int turn = 0; turn < 10; turn++, rig_turn(s->rig))
        for (uint32_t i = 0; i < TD_COUNT(tenants); i++)
            assert_int_equal(sequence_of(s, &clients[i])->state, i < 5 ? SEQ_RUNNING : SEQ_WAITING);
    scene_close(s);
}

/* It needs half of the pages; two tenants have always more small ones than there are pages for. */
static void a_large_prompt_is_not_behind_all_small_ones(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.pages = 16, .token_budget = SCHEDULER_TURN_ROWS});
    static struct client small[2 * DEVICES], large;
    uint32_t done = 0;
    memset(small, 0, sizeof small);
    for (large = (struct client){0}; !large.done && done < 400; rig_turn(r)) {
        for (uint32_t i = 0; i < 2 * DEVICES; i++) {
            char name[16];
            if (small[i].sequence && !small[i].done)
                continue;
            done += small[i].done;
            snprintf(name, sizeof name, "device-%u", i);
            ask(r, &small[i], i % 2 ? "acme" : "other", name, 70, 20 + i % 7);
        }
        if (done >= 2 * DEVICES && !large.sequence)
            ask(r, &large, "acme", "ann", 450, 1);
    }
    assert_true(large.done);
    rig_close(r);
}

/* Of each principal one prompt is begun before anybody's second. */
static void a_colleague_is_not_behind_all_of_anothers_prompts(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.token_budget = SCHEDULER_TURN_ROWS});
    static struct client ann[8], bob[4];
    for (int i = 0; i < 8; i++)
        ask(r, &ann[i], "acme", "ann", 190, 300);
    rig_until(r, ann[0].count > 0);
    for (int i = 0; i < 4; i++) {
        uint32_t begun = count_begun(ann, 8);
        ask(r, &bob[i], "acme", "bob", 190, 1);
        rig_until(r, bob[i].done);
        assert_true(count_begun(ann, 8) <= begun + 2);
    }
    assert_true(count_begun(ann, 8) >= 3); /* nor is it before all of them, one after the other */
    rig_close(r);
}

/* Beside a reply of the same principal, while there is always somebody's prompt that is not through when the next comes. */
static void a_second_prompt_does_not_wait_for_all_who_come(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.token_budget = SCHEDULER_TURN_ROWS});
    static struct client ann[2], other[DEVICES];
    ask(r, &ann[0], "acme", "ann", 10, 300);
    rig_until(r, ann[0].count > 0);
    for (int i = 0; i < DEVICES; i++) {
        char name[16];
        snprintf(name, sizeof name, "device-%d", i);
        ask(r, &other[i], "acme", name, 190, 1);
        if (i == 0)
            ask(r, &ann[1], "acme", "ann", 190, 1);
        rig_until(r, i == 0 ? ann[1].opened : other[i - 1].done);
    }
    assert_true(ann[1].done);
    assert_false(ann[0].done);
    rig_close(r);
}

static void join(struct engine *e, struct sequence *s, const char *tenant, const char *principal)
{
    snprintf(s->tenant, sizeof s->tenant, "%s", tenant);
    snprintf(s->principal, sizeof s->principal, "%s", principal);
    s->state = SEQ_RUNNING;
    s->ids_count = 100;
    engine_join_turns(e, s);
    e->live[e->live_count++] = s;
}

/* All of a tenant have one turn, and no two tenants the same. */
static void a_tenant_has_one_turn(void **state)
{
    (void)state;
    static struct sequence all[5];
    struct sequence *live[5];
    struct engine e = {.live = live};
    join(&e, &all[0], "acme", "ann");
    join(&e, &all[1], "other", "ann");
    join(&e, &all[2], "acme", "bob");
    join(&e, &all[3], "other", "bob");
    assert_true(all[0].turn < all[1].turn);
    engine_take_turn(&e, &all[2], e.next_turn++);
    join(&e, &all[4], "acme", "carl");
    for (int i = 0; i < 5; i++)
        assert_int_equal(all[i].turn, all[i % 2].turn);
    assert_true(all[0].turn > all[1].turn);
}

static uint32_t turns_asked, places_asked;
bool __real_engine_place_is_free(const struct engine *e, const struct sequence *s);
bool __wrap_engine_place_is_free(const struct engine *e, const struct sequence *s);

bool __wrap_engine_place_is_free(const struct engine *e, const struct sequence *s)
{
    places_asked += s != NULL;
    return __real_engine_place_is_free(e, s);
}

bool __real_engine_comes_behind(const struct engine *e, const struct sequence *s);
bool __wrap_engine_comes_behind(const struct engine *e, const struct sequence *s);

bool __wrap_engine_comes_behind(const struct engine *e, const struct sequence *s)
{
    turns_asked++;
    return __real_engine_comes_behind(e, s);
}

/* Both take a look at all that live: whose turn it is, for each that waits, where one could come in; who gives a place, not for each tenant that has as
 * many. */
static void where_no_place_is_free_nobody_asks_whose_turn_it_is(void **state)
{
    (void)state;
    static const char *const tenants[] = {"other", "third", "fourth"};
    struct rig *r = rig_open((struct rig_options){.sequences_max = 2});
    static struct client ann[2], bob[TD_COUNT(tenants)];
    for (int i = 0; i < 2; i++)
        ask(r, &ann[i], "acme", "ann", 10, 50);
    rig_until(r, ann[1].count > 0);
    for (int i = 0; i < 3; i++)
        ask(r, &bob[i], tenants[i], "bob", 10, 1);
    rig_turn(r);
    assert_true(bob[2].opened);
    turns_asked = places_asked = 0;
    for (int i = 0; i < 10; i++)
        rig_turn(r);
    assert_int_equal(turns_asked, 0);
    assert_int_equal(places_asked, 10);
    rig_until(r, ann[1].done && bob[2].done);
    assert_true(turns_asked > 0);
    rig_close(r);
}

/* Free places go to all who wait in one turn, whoever comes behind whom. */
static void free_places_do_not_wait(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.sequences_max = 8});
    static struct client ann[4], bob[2];
    ask(r, &ann[0], "acme", "ann", 10, 100);
    rig_until(r, ann[0].count > 0);
    for (int i = 1; i < 4; i++)
        ask(r, &ann[i], "acme", "ann", 10, 100);
    for (int i = 0; i < 2; i++)
        ask(r, &bob[i], "acme", "bob", 10, 100);
    rig_turn(r);
    assert_int_equal(rig_stats(r).running, 6);
    rig_close(r);
}

/* Who comes behind as its idle ones have too many pages is nobody for whose sake others come behind, as these two would wait for each other. */
static void who_has_too_much_holds_nobody_up(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.pages = 16});
    struct client bob[3];
    static struct client ann[4];
    ask(s->rig, &ann[0], "acme", "ann", 10, 50);
    rig_until(s->rig, ann[0].count > 0);
    for (int i = 0; i < 2; i++) {
        stall(s, &bob[i], "bob", true);
        rig_until(s->rig, sequence_of(s, &bob[i]) && sequence_of(s, &bob[i])->idle);
    }
    stall(s, &bob[2], "bob", true);
    for (int i = 1; i < 4; i++)
        ask(s->rig, &ann[i], "acme", "ann", 10, 50);
    rig_until(s->rig, ann[3].count > 0);
    assert_false(ann[0].done);
    scene_close(s);
}

/* Of two who both have too many pages idle neither comes behind the other. */
static void two_who_have_too_much_do_not_wait(void **state)
{
    (void)state;
    static const char *const names[] = {"ann", "bob"};
    struct scene *s = scene_open(1, (struct rig_options){.pages = 20});
    struct client idle[4];
    static struct client direct[2];
    for (int i = 0; i < 4; i++) {
        stall(s, &idle[i], names[i / 2], true);
        rig_until(s->rig, sequence_of(s, &idle[i]) && sequence_of(s, &idle[i])->idle);
    }
    for (int i = 0; i < 2; i++)
        ask(s->rig, &direct[i], "acme", names[i], 180, 5);
    rig_until(s->rig, direct[0].done && direct[1].done);
    for (int i = 0; i < 4; i++)
        assert_true(sequence_of(s, &idle[i])->idle);
    scene_close(s);
}

/* Who comes behind holds up with it what its principal asked for later, and others do not wait for that. */
static void who_waits_behind_its_own_holds_nobody_up(void **state)
{
    (void)state;
    struct scene *s = scene_open(1, (struct rig_options){.pages = 20});
    struct client idle[2];
    static struct client ann[2], bob[4];
    for (int i = 0; i < 2; i++) {
        stall(s, &idle[i], "ann", true);
        rig_until(s->rig, sequence_of(s, &idle[i]) && sequence_of(s, &idle[i])->idle);
    }
    for (int i = 0; i < 3; i++)
        ask(s->rig, &bob[i], "acme", "bob", 10, 50);
    rig_until(s->rig, bob[2].count > 0);
    ask(s->rig, &ann[0], "acme", "ann", 180, 5); /* too much beside its idle ones */
    ask(s->rig, &ann[1], "acme", "ann", 10, 5);  /* not so */
    ask(s->rig, &bob[3], "acme", "bob", 10, 5);
    rig_until(s->rig, bob[3].count > 0);
    assert_false(bob[0].done);
    scene_close(s);
}

/* Whose replies outgrow the pages takes them from its own first, also where others came later. */
static void growth_is_paid_by_its_principal(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.pages = 6});
    static struct client ann[2], bob;
    struct metric *preemptions = metric_counter("tandem_preemptions_total", NULL, "");
    double before = metric_value(preemptions);
    ask(r, &ann[0], "acme", "ann", 100, 150);
    ask(r, &ann[1], "acme", "ann", 70, 150);
    rig_until(r, ann[1].count > 0);
    ask(r, &bob, "acme", "bob", 70, 50);
    rig_until(r, metric_value(preemptions) > before);
    assert_int_equal(engine_find(r->engine, ann[1].sequence)->state, SEQ_WAITING);
    assert_int_equal(engine_find(r->engine, bob.sequence)->state, SEQ_RUNNING);
    rig_until(r, bob.done && ann[0].done && ann[1].done);
    rig_close(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nobody_shuts_others_out),
        cmocka_unit_test(principals_take_turns),
        cmocka_unit_test(many_devices_of_a_tenant_hold_no_other_up),
        cmocka_unit_test(many_devices_of_a_tenant_keep_no_pages_from_others),
        cmocka_unit_test(who_would_have_too_much_takes_no_pages),
        cmocka_unit_test(a_large_prompt_is_not_behind_all_small_ones),
        cmocka_unit_test(who_gave_its_place_loses_nothing),
        cmocka_unit_test(a_tenant_has_one_turn),
        cmocka_unit_test(a_colleague_is_not_behind_all_of_anothers_prompts),
        cmocka_unit_test(a_second_prompt_does_not_wait_for_all_who_come),
        cmocka_unit_test(where_no_place_is_free_nobody_asks_whose_turn_it_is),
        cmocka_unit_test(free_places_do_not_wait),
        cmocka_unit_test(who_has_too_much_holds_nobody_up),
        cmocka_unit_test(two_who_have_too_much_do_not_wait),
        cmocka_unit_test(who_waits_behind_its_own_holds_nobody_up),
        cmocka_unit_test(growth_is_paid_by_its_principal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
