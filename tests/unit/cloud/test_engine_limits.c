/* engine: every bound at its edge, and what happens when a helper is slow or the model says nonsense. */
#include "engine_rig.h"

#define VOCAB 256

static double metric_of(const char *name)
{
    return metric_value(metric_counter(name, NULL, ""));
}

/* A store that acknowledges nothing: all buffers on the way to it are taken. */
struct blocked {
    struct rig *rig;
    char directory[64];
    struct persist_block *taken[PERSIST_BUFFERS];
};

static struct blocked blocked_open(uint32_t pages)
{
    struct blocked b = {0};
    rig_directory(b.directory);
    char *directory = strdup(b.directory); /* options keep a pointer */
    b.rig = rig_open((struct rig_options){.store = directory, .pages = pages});
    for (int i = 0; i < PERSIST_BUFFERS; i++)
        assert_non_null(b.taken[i] = persist_take(b.rig->engine->persist));
    return b;
}

static void blocked_close(struct blocked *b)
{
    char command[128];
    char *directory = (char *)(uintptr_t)b->rig->options.store;
    for (int i = 0; i < PERSIST_BUFFERS; i++)
        persist_untake(b->rig->engine->persist, b->taken[i]);
    rig_close(b->rig);
    snprintf(command, sizeof command, "rm -rf %s", b->directory);
    assert_int_equal(system(command), 0);
    free(directory);
}

static void done_does_not_wait_for_a_store_for_ever(void **state)
{
    (void)state;
    struct blocked b = blocked_open(64);
    int32_t ids[200];
    struct client c;
    rig_ids(ids, 200, VOCAB, 1);
    client_direct(b.rig, &c, ids, 200, rig_greedy(5));
    rig_until(b.rig, c.count == 5);
    for (int i = 0; i < 50; i++)
        rig_turn(b.rig);
    assert_false(c.done);
    assert_int_equal(rig_stats(b.rig).running, 0); /* but it holds nobody up */
    rig_now += ENGINE_CLOSE_WAIT_US;
    rig_turn(b.rig);
    assert_true(c.done);
    struct store_stats stats;
    store_stats(b.rig->store, &stats);
    assert_int_equal(stats.blocks, 0);
    struct rig *r = b.rig; /* once the store can, it gets them all */
    persist_untake(r->engine->persist, b.taken[0]);
    rig_until(r, r->engine->pending_count == 0);
    rig_until(r, (b.taken[0] = persist_take(r->engine->persist)));
    store_flush(r->store);
    store_stats(r->store, &stats);
    assert_int_equal(stats.blocks, 3);
    blocked_close(&b);
}

/* Between its last token and DONE a reply can still be cut, and the node drained. */
static void closing_can_be_cut_and_drained(void **state)
{
    (void)state;
    for (int drain = 0; drain < 2; drain++) {
        struct blocked b = blocked_open(64);
        int32_t ids[200];
        struct client c;
        rig_ids(ids, 200, VOCAB, 1);
        client_direct(b.rig, &c, ids, 200, rig_greedy(5));
        rig_until(b.rig, c.count == 5);
        engine_cancel(b.rig->engine, c.sequence, true, 3);
        rig_turn(b.rig);
        assert_false(c.done);
        if (drain)
            b.rig->engine->drain_deadline_us = rig_now;
        else
            rig_now += ENGINE_CLOSE_WAIT_US;
        rig_turn(b.rig);
        assert_true(c.done);
        assert_int_equal(c.done_event.done.completion_tokens, 3);
        assert_int_equal(c.done_event.done.finish, FINISH_STOP);
        blocked_close(&b);
    }
}

/* Finished blocks that wait for the store give way when their pages are needed: serving goes on. */
static void slow_store_does_not_take_the_pages(void **state)
{
    (void)state;
    struct blocked b = blocked_open(8);
    int32_t ids[300], reply[30];
    struct client c;
    double before = metric_of("tandem_persist_dropped_total");
    for (uint32_t round = 0; round < 3; round++) {
        rig_ids(ids, 300, VOCAB, round);
        rig_reference(b.rig, ids, 300, rig_greedy(30), reply);
        client_direct(b.rig, &c, ids, 300, rig_greedy(30));
        rig_until(b.rig, c.count == 30);
        rig_now += ENGINE_CLOSE_WAIT_US;
        rig_until(b.rig, c.done);
        assert_reply(&c, reply, 30);
    }
    assert_true(metric_of("tandem_persist_dropped_total") > before);
    blocked_close(&b);
}

/* Before a running sequence gives its pages up, blocks that wait for the store do. */
static void waiting_blocks_go_before_running_sequences(void **state)
{
    (void)state;
    struct blocked b = blocked_open(10);
    int32_t ids[200];
    static struct client closing, older, younger;
    double preempted = metric_of("tandem_preemptions_total"),
           dropped = metric_of("tandem_persist_dropped_total");
    rig_ids(ids, 200, VOCAB, 1);
    client_direct(b.rig, &older, ids + 100, 30, rig_greedy(440));
    client_direct(b.rig, &closing, ids, 150, rig_greedy(2));
    rig_until(b.rig, closing.count == 2);
    assert_true(b.rig->engine->pending_count >= 2);
    client_direct(b.rig, &younger, ids + 50, 10, rig_greedy(440));
    rig_until(b.rig,
              older.count ==
                  240); /* five pages, as the younger has; the blocks of the third were in two of them */
    assert_true(metric_of("tandem_persist_dropped_total") > dropped);
    assert_int_equal(metric_of("tandem_preemptions_total"), preempted);
    blocked_close(&b);
}

/* The end of a chain waits for the store, its beginning is only cached: that cannot be evicted before its child, and the child cannot while it waits. */
static void stuck_store_is_given_up_on(void **state)
{
    (void)state;
    struct blocked b = blocked_open(8);
    int32_t ids[300];
    struct client c, next;
    rig_ids(ids, 300, VOCAB, 1);
    client_direct(b.rig, &c, ids, 300, rig_greedy(5));
    rig_until(b.rig, c.count == 5);
    assert_int_equal(b.rig->engine->pending_count, 4);
    for (int i = 0; i < 3; i++)
        assert_true(engine_drop_pending(b.rig->engine));
    rig_ids(ids, 300, VOCAB, 2);
    client_direct(b.rig, &next, ids, 300, rig_greedy(5));
    for (int i = 0; i < 50; i++)
        rig_turn(b.rig);
    assert_int_equal(rig_stats(b.rig).running, 0);
    rig_now += ENGINE_CLOSE_WAIT_US;
    rig_until(b.rig, next.count == 5);
    blocked_close(&b);
}

static void pieces_wait_until_there_is_a_page(void **state)
{
    (void)state;
    enum { PROMPT = 200, REPLY = 20 };
    struct rig *r = rig_open((struct rig_options){.pages = 6});
    int32_t ids[PROMPT], other[100], reply[REPLY];
    struct client first, second;
    rig_ids(ids, PROMPT, VOCAB, 2);
    rig_ids(other, 100, VOCAB, 3);
    rig_reference(r, ids, PROMPT, rig_greedy(REPLY), reply);
    struct rig_edge edge = rig_edge_compute(r, ids, PROMPT, 1);
    client_direct(r, &first, other, 100, rig_greedy(250));
    rig_until(r, first.count > 1);
    client_send(r, &second, client_open_of(&second, ids, PROMPT, 0));
    struct plan_range range = {0, PROMPT, 1, KV_L0, HIDDEN_F32};
    struct engine_generate generate = rig_greedy(REPLY);
    engine_plan(r->engine, second.sequence, 1, &range, 1, false);
    engine_start(r->engine, second.sequence, &generate);
    rig_until(r, first.count > 240); /* six pages are its own by now */
    assert_int_equal(rig_stats(r).running, 2);
    size_t size = rig_send_kv(&edge, &second, 1, 0, PROMPT, KV_L0);
    const struct sequence *s = engine_find(r->engine, second.sequence);
    while (s->staged_size < size && first.count < 248)
        rig_turn(r);
    assert_int_equal(second.consumed_size, 0);
    rig_until(r, first.done);
    rig_until(r, second.consumed_size == size);
    rig_send_hidden(&edge, &second, 1, 0, PROMPT, HIDDEN_F32);
    rig_until(r, second.done || second.failed);
    assert_reply(&second, reply, REPLY);
    assert_int_equal(second.done_event.done.recomputed_tokens, 0);
    rig_edge_free(&edge);
    rig_close(r);
}

/* A principal that has filled its share of the staging area: more of its data is dropped, and computed here instead. */
static void staging_of_a_principal_is_bounded(void **state)
{
    (void)state;
    enum { PROMPT = 200, REPLY = 20 };
    struct rig *r = rig_open((struct rig_options){0});
    int32_t ids[PROMPT], reply[REPLY];
    struct client hog, c;
    rig_ids(ids, PROMPT, VOCAB, 2);
    rig_reference(r, ids, PROMPT, rig_greedy(REPLY), reply);
    struct rig_edge edge = rig_edge_compute(r, ids, PROMPT, 1);
    struct plan_range range = {0, PROMPT, 1, KV_L0, HIDDEN_F32};
    struct engine_generate generate = rig_greedy(REPLY);
    client_send(r, &hog, client_open_of(&hog, ids, PROMPT, 0));
    client_send(r, &c, client_open_of(&c, ids, PROMPT, 0));
    engine_plan(r->engine, c.sequence, 1, &range, 1, false);
    engine_start(r->engine, c.sequence, &generate);
    rig_turn(r);
    struct sequence *s = engine_find(r->engine, hog.sequence);
    size_t hidden = hidden_wire_size(HIDDEN_F32, 100, r->model->params.embd_size);
    double before = metric_of("tandem_ingest_rejected_total");
    s->staged_size = LIMIT_STAGED_SIZE_PER_PRINCIPAL - hidden; /* as if it had */
    rig_send_hidden(&edge, &c, 1, 0, 100, HIDDEN_F32);         /* fits exactly */
    rig_turn(r);
    assert_int_equal(metric_of("tandem_ingest_rejected_total"), before);
    s->staged_size++;
    rig_send_hidden(&edge, &c, 1, 100, 100, HIDDEN_F32);
    rig_turn(r);
    assert_int_equal(metric_of("tandem_ingest_rejected_total"), before + 1);
    s->staged_size = 0;
    rig_send_kv(&edge, &c, 1, 0, PROMPT, KV_L0);
    rig_until(r, c.ingested.ingested.kv_tokens == PROMPT);
    rig_now += LIMIT_UPLOAD_IDLE_MS * UINT64_C(1001); /* the lost rows never come */
    rig_until(r, c.done || c.failed);
    assert_reply(&c, reply, REPLY);
    rig_edge_free(&edge);
    rig_close(r);
}

/* A piece that waits for a page takes the memory of its values, however little came: many more may wait than a window has bytes. */
static void unpacked_pieces_are_bounded(void **state)
{
    (void)state;
    enum { PROMPT = 192, REPLY = 20 };
    struct rig *r = rig_open((struct rig_options){.sequences_max = 1});
    const struct model_params *p = &r->model->params;
    size_t values = (size_t)p->kv_head_count * KV_BLOCK_TOKENS * p->head_dim * 2; /* bytes of one piece */
    int32_t ids[PROMPT], other[100], reply[REPLY];
    struct client first, second;
    rig_ids(ids, PROMPT, VOCAB, 2);
    rig_ids(other, 100, VOCAB, 3);
    rig_reference(r, ids, PROMPT, rig_greedy(REPLY), reply);
    struct rig_edge edge = rig_edge_compute(r, ids, PROMPT, 1);
    struct plan_range range = {0, PROMPT, 1, KV_L0, HIDDEN_F32};
    struct engine_generate generate = rig_greedy(REPLY);
    client_direct(r, &first, other, 100, rig_greedy(100));
    rig_until(r, first.count > 1);
    client_send(r, &second, client_open_of(&second, ids, PROMPT, 0));
    engine_plan(r->engine, second.sequence, 1, &range, 1, false);
    engine_start(r->engine, second.sequence, &generate);
    rig_send_kv(&edge, &second, 1, 0, 64, KV_L0); /* K and V of the first block */
    rig_turn(r);
    struct sequence *s = engine_find(r->engine, second.sequence), *o = engine_find(r->engine, first.sequence);
    assert_int_equal(s->state, SEQ_WAITING);
    assert_int_equal(s->unpacked_size, 2 * values);
    double before = metric_of("tandem_ingest_rejected_total");
    s->unpacked_size = LIMIT_STAGED_SIZE_PER_PRINCIPAL; /* as if there were more; these two are dropped */
    size_t dropped = rig_send_kv(&edge, &second, 1, 64, 128, KV_L0);
    rig_until(r, second.consumed_size == dropped);
    assert_int_equal(metric_of("tandem_ingest_rejected_total"), before + 2);
    memcpy(o->principal, "bob",
           sizeof "bob"); /* another's, so that the node's limit is the one that counts */
    o->unpacked_size = LIMIT_STAGED_SIZE;
    s->unpacked_size = 2 * values;
    rig_send_kv(&edge, &second, 1, 128, 192, KV_L0);
    rig_until(r, second.consumed_size > dropped);
    assert_int_equal(metric_of("tandem_ingest_rejected_total"), before + 4);
    o->unpacked_size = 0;
    assert_int_equal(s->unpacked_size, 2 * values);
    rig_until(r, first.done && s->state == SEQ_RUNNING);
    rig_until(r, s->pieces_first == NULL);
    assert_int_equal(s->unpacked_size, 0);
    rig_send_hidden(&edge, &second, 1, 0, PROMPT, HIDDEN_F32);
    rig_until(r, second.done || second.failed);
    assert_reply(&second, reply, REPLY);
    assert_int_equal(second.done_event.done.recomputed_tokens, 128); /* what was dropped */
    rig_edge_free(&edge);
    rig_close(r);
}

static void staging_of_the_node_is_bounded(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    atomic_store(&r->engine->staged_size, LIMIT_STAGED_SIZE - 10);
    assert_int_equal(engine_hidden(r->engine, 1, 1, 0, 1, 1, HIDDEN_F32, malloc(11), 11), -TD_ERR_FULL);
    assert_int_equal(engine_kv(r->engine, 1, 1, 0, malloc(11), 11), -TD_ERR_FULL);
    assert_int_equal(engine_hidden(r->engine, 1, 1, 0, 1, 1, HIDDEN_F32, malloc(10), 10), 0);
    atomic_store(&r->engine->staged_size, 10);
    rig_turn(r); /* nobody's: given back at once */
    assert_int_equal(atomic_load(&r->engine->staged_size), 0);
    assert_int_equal(engine_kv(r->engine, 1, 1, 0, malloc(10), 10), 0);
    rig_until(r, atomic_load(&r->engine->staged_size) == 0);
    rig_close(r);
}

static void full_command_queue_is_an_answer(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    int32_t ids[4] = {1, 2, 3, 4};
    struct client c;
    for (uint32_t i = 0; i < ENGINE_COMMANDS_MAX; i++)
        assert_int_equal(engine_detach(r->engine, 1000000), 0);
    struct engine_open open = client_open_of(&c, ids, 4, 0);
    struct engine_generate generate = rig_greedy(1);
    struct plan_range range = {0, 4, 0, 0, 0};
    uint64_t sequence;
    assert_int_equal(engine_open(r->engine, &open, &sequence), -TD_ERR_FULL);
    assert_int_equal(engine_hidden(r->engine, 1, 1, 0, 1, 1, HIDDEN_F32, malloc(8), 8), -TD_ERR_FULL);
    assert_int_equal(engine_plan(r->engine, 1, 1, &range, 1, false), -TD_ERR_FULL);
    assert_int_equal(engine_start(r->engine, 1, &generate), -TD_ERR_FULL);
    assert_int_equal(engine_cancel(r->engine, 1, false, 0), -TD_ERR_FULL);
    assert_int_equal(engine_detach(r->engine, 1), -TD_ERR_FULL);
    assert_int_equal(atomic_load(&r->engine->open_count), 0);
    assert_int_equal(atomic_load(&r->engine->staged_size), 0);
    rig_turn(r);
    client_direct(r, &c, ids, 4, rig_greedy(1));
    rig_until(r, c.done);
    assert_int_equal(engine_hidden(r->engine, 1, 1, 0, 1, 1, HIDDEN_F32, malloc(8), 8), 0);
    rig_close(r); /* with a command in the queue, whose payload goes with it */
}

static int (*real_forward)(struct backend *b, const struct batch *batch);

static int nonsense_forward(struct backend *b, const struct batch *batch)
{
    int rc = real_forward(b, batch);
    for (uint32_t i = 0; i < batch->count; i++)
        if (batch->seqs[i].logits && batch->seqs[i].ids && batch->seqs[i].ids[0] == 99)
            memset(batch->seqs[i].logits, 0xff, sizeof(float));
    return rc;
}

static void logits_that_are_no_numbers_fail_the_request(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    struct backend_ops ops = *r->engine->backend->ops;
    real_forward = ops.forward;
    ops.forward = nonsense_forward;
    r->engine->backend->ops = &ops;
    struct client bad, good;
    int32_t ids[2][3] = {{99, 2, 3}, {1, 2, 3}};
    client_direct(r, &bad, ids[0], 3, rig_greedy(5));
    client_direct(r, &good, ids[1], 3, rig_greedy(5));
    rig_until(r, bad.failed && good.done);
    assert_int_equal(bad.fail_code, -TD_ERR_INTERNAL);
    assert_int_equal(rig_stats(r).pages_used, 0);
    rig_close(r);
}

static void bad_sampling_is_refused(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    struct client c;
    int32_t ids[3] = {1, 2, 3};
    struct engine_generate generate = rig_greedy(5);
    generate.sampling.temperature = -1;
    client_direct(r, &c, ids, 3, generate);
    rig_turn(r);
    assert_true(c.failed);
    assert_int_equal(c.fail_code, -TD_ERR_ARG);
    rig_close(r);
}

static void impossible_engines_are_refused(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    struct engine_config config = r->engine->config;
    struct engine *e = NULL;
    struct td_error err = {0};
    config.token_budget = BATCH_ROWS_MAX + 1;
    assert_int_equal(engine_create(&config, &e, &err), -TD_ERR_ARG);
    config = r->engine->config;
    config.sequences_max = BATCH_SEQS_MAX + 1;
    assert_int_equal(engine_create(&config, &e, &err), -TD_ERR_ARG);
    config = r->engine->config;
    struct backend half = *config.backend;
    half.layers_paged = 1;
    config.backend = &half;
    assert_int_equal(engine_create(&config, &e, &err), -TD_ERR_ARG);
    assert_non_null(strstr(err.text, "1 of 2 layers"));
    assert_null(e);
    rig_close(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(done_does_not_wait_for_a_store_for_ever),
        cmocka_unit_test(closing_can_be_cut_and_drained),
        cmocka_unit_test(slow_store_does_not_take_the_pages),
        cmocka_unit_test(waiting_blocks_go_before_running_sequences),
        cmocka_unit_test(stuck_store_is_given_up_on),
        cmocka_unit_test(pieces_wait_until_there_is_a_page),
        cmocka_unit_test(staging_of_a_principal_is_bounded),
        cmocka_unit_test(unpacked_pieces_are_bounded),
        cmocka_unit_test(staging_of_the_node_is_bounded),
        cmocka_unit_test(full_command_queue_is_an_answer),
        cmocka_unit_test(logits_that_are_no_numbers_fail_the_request),
        cmocka_unit_test(bad_sampling_is_refused),
        cmocka_unit_test(impossible_engines_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
