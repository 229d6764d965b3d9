/* agent: a reply that its client stops, or leaves, while the turn is being stored. Stops while it comes: test_agent.c, test_agent_local.c. */
#include "agent_rig.h"
#include "edge/agent_internal.h"
#include "edge/api_edge.h"

struct held_worker { /* of an agent, until it may go */
    struct io_job job;
    sem_t may_go;
    struct rig *rig;
    struct client *client;
    bool drained;
    size_t pending_then;
};

static void hold_worker(struct io_job *job)
{
    sem_wait(&((struct held_worker *)job)->may_go);
}

static void held_done(struct io_job *job)
{
    (void)job;
}

static void submit_held(void *arg)
{
    struct held_worker *h = arg;
    h->job = (struct io_job){.work = hold_worker, .done = held_done};
    assert_int_equal(io_worker_submit(h->rig->agent->worker, &h->job), 0);
}

static bool is_being_stored(void *arg)
{
    return ((struct held_worker *)arg)->client->flight->state == FLIGHT_ENDING;
}

/* As of one that was made while the link was lost: the cloud is to be told that it is over. */
static void leave_reply(void *arg)
{
    struct flight *f = ((struct held_worker *)arg)->client->flight;
    f->left_there = true;
    agent_cancel(f, false, 0);
}

static void stop_reply(void *arg)
{
    struct client *c = ((struct held_worker *)arg)->client;
    agent_cancel(c->flight, true, c->count);
}

static bool nothing_flies(void *arg)
{
    return agent_flight_count(((struct rig *)arg)->agent) == 0;
}

static bool generates(void *arg)
{
    return ((struct rig *)arg)->cloud.generate_count > 0;
}

/* A reply is whole, and the worker is held before it stores the turn. */
static void reply_waits_to_be_stored(struct rig *r, struct held_worker *held)
{
    rig_make(r, 0);
    r->cloud.silent = true;
    rig_run(r);
    *held = (struct held_worker){.rig = r, .client = client_asks(r, "hello")};
    sem_init(&held->may_go, 0, 0);
    on_loop(r->cloud.loop, client_begin, held->client);
    assert_true(comes_true(r->cloud.loop, generates, r)); /* its prompt is prepared */
    on_loop(r->cloud.loop, submit_held, held);
    on_loop(r->cloud.loop, let_tokens, r);
    assert_true(comes_true(r->cloud.loop, is_being_stored, held));
}

/* It is whole already: it is told and kept once, as it is. */
static void a_stop_while_the_turn_is_stored_changes_nothing(void **state)
{
    (void)state;
    struct rig r;
    struct held_worker held;
    reply_waits_to_be_stored(&r, &held);
    struct client *c = held.client;
    on_loop(r.cloud.loop, stop_reply, &held);
    assert_int_equal(c->done + c->failed, 0);
    sem_post(&held.may_go);
    assert_true(comes_true(r.cloud.loop, client_ended, c));
    assert_true(comes_true(r.cloud.loop, nothing_flies, &r));
    client_check_reply(c, FAKE_REPLY);
    assert_int_equal(c->not_kept, 0);
    assert_int_equal(r.cloud.cancel_count, 0);
    char *json, tokens[32];
    assert_int_equal(edge_conversation_show(r.agent, "local", c->conversation, &json), 0);
    snprintf(tokens, sizeof tokens, "\"tokens\":%u,", c->usage.prompt_tokens + FAKE_REPLY);
    assert_non_null(strstr(json, tokens));
    free(json);
    sem_destroy(&held.may_go);
    rig_free(&r);
}

/* The turn is the worker's: it is kept, and the cloud is told after that. */
static void who_leaves_while_the_turn_is_stored_has_it_kept(void **state)
{
    (void)state;
    struct rig r;
    struct held_worker held;
    reply_waits_to_be_stored(&r, &held);
    struct client *c = held.client;
    on_loop(r.cloud.loop, leave_reply, &held);
    assert_int_equal(c->flight->state, FLIGHT_ENDING);
    sem_post(&held.may_go);
    assert_true(comes_true(r.cloud.loop, nothing_flies, &r));
    assert_int_equal(c->done + c->failed, 0);
    assert_int_equal(r.cloud.open_count, 2);
    char *json;
    assert_int_equal(edge_conversation_show(r.agent, "local", c->conversation, &json), 0);
    free(json);
    sem_destroy(&held.may_go);
    rig_free(&r);
}

static void on_drained(void *ctx)
{
    struct held_worker *h = ctx;
    h->drained = true;
    h->pending_then = io_worker_pending(h->rig->agent->worker);
}

static void drain(void *arg)
{
    struct held_worker *h = arg;
    agent_drain(h->rig->agent, on_drained, h);
}

static void end_flights(void *arg)
{
    agent_end_flights(((struct held_worker *)arg)->rig->agent);
}

static bool is_drained(void *arg)
{
    return ((struct held_worker *)arg)->drained;
}

/* Somebody waits for the answer, as to what is asked of conversations; but not for ever. */
static void what_the_worker_has_is_answered_before_the_end(void **state)
{
    (void)state;
    for (size_t pending = 0; pending < 2; pending++) {
        struct rig r;
        rig_make(&r, 0);
        rig_run(&r);
        struct held_worker held = {.rig = &r};
        sem_init(&held.may_go, 0, 0);
        on_loop(r.cloud.loop, submit_held, &held);
        on_loop(r.cloud.loop, drain, &held);
        struct fake_question q = {is_drained, &held, false};
        for (int i = 0; i < 10 && !q.answer; i++)
            on_loop(r.cloud.loop, fake_ask, &q);
        assert_false(q.answer);
        if (pending)
            on_loop(r.cloud.loop, end_flights, &held);
        else
            sem_post(&held.may_go);
        assert_true(comes_true(r.cloud.loop, is_drained, &held));
        assert_int_equal(held.pending_then, pending);
        if (pending)
            sem_post(&held.may_go);
        rig_free(&r);
        sem_destroy(&held.may_go);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stop_while_the_turn_is_stored_changes_nothing),
        cmocka_unit_test(who_leaves_while_the_turn_is_stored_has_it_kept),
        cmocka_unit_test(what_the_worker_has_is_answered_before_the_end),
    };
    return cmocka_run_group_tests(tests, rig_set_up, NULL);
}
