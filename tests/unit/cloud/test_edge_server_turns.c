/* edge_server over more than one request: conversations are found, saved once and cut where the reply was; credit comes back. */
#include "service_fixture.h"
#include "cloud/edge_server_internal.h"
#include "edge_client.h"
#include "store/store_internal.h"
#include <semaphore.h>

/* ---- credit ---- */

#define BULK_SIZE (1u << 20)

static void send_bulk(struct edge_client *c, uint32_t stream)
{
    static uint8_t bytes[BULK_SIZE];
    Tandem__Hidden hidden = TANDEM__HIDDEN__INIT;
    hidden.epoch = 1, hidden.count = 1, hidden.layer = 1;
    edge_client_send(c, FRAME_HIDDEN, stream, &hidden, bytes, sizeof bytes);
}

/* More than the connection's window, stream after stream, none of it ever consumed: each end must give its bytes back. */
static void test_credit_returns_with_the_stream(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    uint32_t stream = 1;
    for (unsigned sent = 0; sent < 2 * LIMIT_CONNECTION_WINDOW; stream += 2) {
        edge_send_open(c, stream, &m, prompt, 4);
        const struct fake_command *open = fake_next("open");
        for (unsigned i = 0; i < LIMIT_STREAM_WINDOW / BULK_SIZE; i++, sent += BULK_SIZE) {
            send_bulk(c, stream);
            assert_int_equal(fake_next("hidden")->size, BULK_SIZE);
        }
        if (stream % 6 == 1) {
            fake_done(open, FINISH_STOP, reply, 1);
            edge_client_next_frame(c, FRAME_DONE);
        } else if (stream % 6 == 3) {
            fake_failed(open, -TD_ERR_INTERNAL, "broken", 0);
            edge_client_next_frame(c, FRAME_ERROR);
        } else {
            Tandem__Cancel cancel = TANDEM__CANCEL__INIT;
            edge_client_send(c, FRAME_CANCEL, stream, &cancel, NULL, 0);
            fake_next("cancel");
        }
    }
    edge_client_close(c);
}

static void test_credit_returns_when_consumed(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    edge_send_open(c, 1, &m, prompt, 4);
    const struct fake_command *open = fake_next("open");
    struct engine_event e = {.type = ENGINE_INGESTED};
    for (unsigned sent = 0; sent < 2 * LIMIT_STREAM_WINDOW; sent += BULK_SIZE) {
        send_bulk(c, 1);
        fake_next("hidden");
        e.ingested.epoch = 1;
        e.ingested.hidden_tokens = sent >> 20;
        e.ingested.kv_tokens = 64;
        e.ingested.consumed_size = BULK_SIZE;
        fake_emit(open, e);
    }
    for (;;) { /* the latest of a stream may replace earlier ones; the link's own are on stream 0 */
        struct wire_frame f = edge_client_next_frame(c, FRAME_INGESTED);
        if (f.stream == 1 && f.ingested->hidden_tokens == 3) {
            assert_int_equal(f.ingested->epoch, 1);
            assert_int_equal(f.ingested->kv_tokens, 64);
            break;
        }
    }
    edge_client_close(c);
}

/* ---- conversations ---- */

static Tandem__Open open_after(const char *id, const int32_t *ids, uint32_t length, uint32_t prompt_count,
                               uint8_t hash[TD_HASH_SIZE])
{
    Tandem__Open m = edge_open(prompt_count);
    ids_hash(ids, length, hash);
    m.conversation = (char *)id;
    m.conversation_length = length;
    m.conversation_hash = (ProtobufCBinaryData){TD_HASH_SIZE, hash};
    return m;
}

/* Turn one of conversation "c1": prompt and reply, saved. */
static void first_turn(struct edge_client *c, uint32_t stream)
{
    Tandem__Open m = edge_open(4);
    m.conversation = (char *)"c1";
    edge_send_open(c, stream, &m, prompt, 4);
    const struct fake_command *open = fake_next("open");
    edge_send_generate(c, stream, false);
    fake_next("start");
    fake_done(open, FINISH_STOP, reply, 3);
    edge_client_next_frame(c, FRAME_DONE);
    fixture_settle();
}

static void test_conversation_goes_on(void **state)
{
    (void)state;
    static const int32_t all[] = {5, 6, 7, 8, 20, 21, 22, 30, 31};
    uint8_t hash[TD_HASH_SIZE];
    uint64_t version;
    struct edge_client *c = edge_client_ready("alice");
    first_turn(c, 1);
    struct conversation kept = fixture_conversation("alice", "c1", &version);
    assert_int_equal(kept.ids_count, 7);
    assert_memory_equal(kept.ids, all, 7 * sizeof *all);
    assert_int_equal(kept.boundary_count, 1);
    assert_int_equal(kept.boundaries[0].ids_count, 7);
    conv_free(&kept);

    edge_request_id[0] = 10;
    Tandem__Open m = open_after("c1", all, 7, 9, hash);
    edge_send_open(c, 3, &m, all + 7, 2); /* all in one flight: what follows waits for the ids */
    edge_send_plan(c, 3, 1, 9, 0);
    edge_send_generate(c, 3, false);
    send_bulk(c, 3);
    const struct fake_command *open = fake_next("open");
    assert_int_equal(open->open.prompt_count, 9);
    assert_memory_equal(open->open.ids, all, sizeof all);
    fake_next("plan");
    fake_next("start");
    assert_int_equal(fake_next("hidden")->size, BULK_SIZE);
    fake_done(open, FINISH_STOP, reply, 1);
    edge_client_next_frame(c, FRAME_DONE);
    fixture_settle();
    kept = fixture_conversation("alice", "c1", &version);
    assert_int_equal(kept.ids_count, 10);
    assert_int_equal(kept.boundary_count, 2);
    assert_int_equal(version, 2);
    conv_free(&kept);
    edge_client_close(c);
}

static void test_need_ids(void **state)
{
    (void)state;
    static const int32_t all[] = {5, 6, 7, 8, 20, 21, 22, 30, 31};
    uint8_t hash[TD_HASH_SIZE];
    struct edge_client *c = edge_client_ready("alice"), *bob = edge_client_ready("bob");
    first_turn(c, 1);
    Tandem__Open m = open_after("unknown", all, 7, 9, hash);
    edge_send_open(c, 3, &m, all + 7, 2);
    edge_send_plan(c, 3, 1, 9, 0);
    assert_true(edge_client_next_frame(c, FRAME_OPEN_ACK).open_ack->need_ids);
    m = open_after("c1", all, 7, 9, hash);
    hash[5] ^= 1; /* another state of it */
    edge_send_open(c, 5, &m, all + 7, 2);
    assert_true(edge_client_next_frame(c, FRAME_OPEN_ACK).open_ack->need_ids);
    m = open_after("c1", all, 8, 9, hash); /* longer than it is */
    edge_send_open(c, 7, &m, all + 8, 1);
    assert_true(edge_client_next_frame(c, FRAME_OPEN_ACK).open_ack->need_ids);
    m = open_after("c1", all, 7, 9, hash); /* somebody else's */
    edge_send_open(bob, 1, &m, all + 7, 2);
    assert_true(edge_client_next_frame(bob, FRAME_OPEN_ACK).open_ack->need_ids);
    m = open_after("c1", all, 5, 7, hash); /* a beginning of it: a fork */
    edge_send_open(c, 9, &m, all + 7, 2);
    const struct fake_command *open = fake_next("open");
    static const int32_t fork[] = {5, 6, 7, 8, 20, 30, 31};
    assert_memory_equal(open->open.ids, fork, sizeof fork);
    edge_client_close(bob);
    edge_client_close(c);
}

static void test_repeat_is_saved_once(void **state)
{
    (void)state;
    uint64_t version;
    struct edge_client *c = edge_client_ready("alice");
    edge_request_id[0] = 11;
    first_turn(c, 1);
    first_turn(c, 3); /* the same request id */
    struct conversation kept = fixture_conversation("alice", "c1", &version);
    assert_int_equal(version, 1);
    assert_int_equal(kept.boundary_count, 1);
    conv_free(&kept);
    edge_client_close(c);
}

static void test_not_persisted(void **state)
{
    (void)state;
    uint64_t version;
    struct conversation kept;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    m.conversation = (char *)"secret";
    edge_send_open(c, 1, &m, prompt, 4);
    const struct fake_command *open = fake_next("open");
    edge_send_generate(c, 1, true);
    assert_true(fake_next("start")->generate.no_persist);
    fake_done(open, FINISH_STOP, reply, 3);
    edge_client_next_frame(c, FRAME_DONE);
    fixture_settle();
    assert_int_equal(conv_load(fx.service.conversations, "acme", "alice", "secret", &version, &kept),
                     -TD_ERR_NOTFOUND);
    edge_client_close(c);
}

/* The engine was ahead of the client when a stop string ended the reply. */
static void test_cut_reply_is_saved_cut(void **state)
{
    (void)state;
    uint64_t version;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    m.conversation = (char *)"cut";
    edge_send_open(c, 1, &m, prompt, 4);
    const struct fake_command *open = fake_next("open");
    Tandem__Cancel cancel = TANDEM__CANCEL__INIT;
    cancel.finished = true, cancel.keep_count = 1;
    edge_client_send(c, FRAME_CANCEL, 1, &cancel, NULL, 0);
    fake_next("cancel");
    fake_done(open, FINISH_LENGTH, reply, 3);
    struct wire_frame f = edge_client_next_frame(c, FRAME_DONE);
    assert_int_equal(f.done->finish, FINISH_STOP);
    assert_int_equal(f.done->completion_tokens, 1);
    fixture_settle();
    struct conversation kept = fixture_conversation("alice", "cut", &version);
    assert_int_equal(kept.ids_count, 5);
    assert_true(kept.boundaries[0].reply_open);
    conv_free(&kept);
    edge_client_close(c);
}

/* The stream ends while its conversation is still being read. */
static void test_gone_while_reading(void **state)
{
    (void)state;
    static const int32_t all[] = {5, 6, 7, 8, 20, 21, 22, 30, 31};
    uint8_t hash[TD_HASH_SIZE];
    struct edge_client *c = edge_client_ready("alice");
    first_turn(c, 1);
    Tandem__Open m = open_after("c1", all, 7, 9, hash);
    Tandem__Cancel cancel = TANDEM__CANCEL__INIT;
    for (uint32_t stream = 3; stream < 43; stream += 2) {
        edge_send_open(c, stream, &m, all + 7, 2);
        edge_client_send(c, FRAME_CANCEL, stream, &cancel, NULL, 0);
    }
    edge_send_open(c, 43, &m, all + 7, 2);
    edge_client_close(c);
    fixture_settle();
    unsigned opened = 0, ended = 0;
    for (; fake.taken < fake.count; fake.taken++) {
        opened += strcmp(fake.commands[fake.taken].name, "open") == 0;
        ended += strcmp(fake.commands[fake.taken].name, "open") != 0;
    }
    assert_int_equal(opened, ended); /* no sequence is left behind */
}

struct waiting_job {
    struct io_job job; /* first */
    sem_t go;
    int submitted;
};

static void wait_for_go(struct io_job *job)
{
    struct timespec until; /* if the test fails */
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 60;
    sem_timedwait(&((struct waiting_job *)job)->go, &until);
}

static void job_done(struct io_job *job)
{
    (void)job;
}

static void submit_job(void *arg)
{
    struct waiting_job *w = arg;
    w->submitted = io_worker_submit(fx.service.io, &w->job);
}

struct pieces {
    struct edge_client *client;
    uint32_t stream, count;
    int rc;
};

/* As many rows of a byte: of bulk no number a second is the limit. */
static void send_pieces(void *arg)
{
    struct pieces *p = arg;
    Tandem__Hidden m = TANDEM__HIDDEN__INIT;
    m.epoch = 1, m.count = 1, m.layer = 1;
    for (uint32_t i = 0; i < p->count && p->rc == 0; i++)
        p->rc = link_send_bulk(p->client->link, FRAME_HIDDEN, p->stream, &m.base, 1, calloc(1, 1), 1);
    ws_want_write(p->client->ws);
}

/* What waits for the conversation is bounded, and then that stream ends, not the other. */
static void test_what_waits_is_bounded(void **state)
{
    (void)state;
    static const int32_t all[] = {5, 6, 7, 8, 20, 21, 22, 30, 31};
    static struct waiting_job held;
    uint8_t hash[TD_HASH_SIZE];
    struct edge_client *c = edge_client_ready("alice");
    first_turn(c, 1);
    held = (struct waiting_job){.job = {.work = wait_for_go, .done = job_done}};
    sem_init(&held.go, 0, 0);
    on_loop(submit_job, &held);
    assert_int_equal(held.submitted, 0);
    Tandem__Open m = open_after("c1", all, 7, 9, hash);
    for (uint32_t stream = 3; stream <= 5; stream += 2) {
        edge_send_open(c, stream, &m, all + 7, 2);
        struct pieces pieces = {c, stream, EDGE_WAITING_MAX + (stream == 5), 0};
        on_loop(send_pieces, &pieces);
        assert_int_equal(pieces.rc, 0);
    }
    struct wire_frame f = edge_client_next_frame(c, FRAME_ERROR);
    assert_int_equal(f.stream, 5);
    assert_int_equal(f.error->code, TD_ERR_LIMIT);
    Tandem__Cancel cancel = TANDEM__CANCEL__INIT;
    edge_client_send(c, FRAME_CANCEL, 3, &cancel, NULL, 0);
    edge_client_close(c);
    sem_post(&held.go);
    fixture_settle();
    sem_destroy(&held.go);
    assert_int_equal(fake.count, fake.taken); /* nothing has come to the engine */
}

static struct {
    struct store_task task; /* first */
    sem_t inside, go;
} writer;

static int hold_writer(struct store *s, struct store_task *t)
{
    (void)s, (void)t;
    sem_post(&writer.inside);
    sem_wait(&writer.go);
    return 0;
}

static void *run_task(void *arg)
{
    (void)arg;
    store_run_task(fx.service.store, &writer.task);
    return NULL;
}

/* A turn that waits for a slow disk does not hold up who asks for a conversation, be it this one. */
static void test_a_save_holds_nobody_up(void **state)
{
    (void)state;
    static const int32_t all[] = {5, 6, 7, 8, 20, 21, 22, 30, 31}, more[] = {40};
    uint8_t hash[TD_HASH_SIZE];
    size_t pending = 0;
    pthread_t thread;
    struct edge_client *c = edge_client_ready("alice");
    first_turn(c, 1);
    fx.service.store->answer_us = UINT64_C(3600000000);
    writer.task.run = hold_writer;
    sem_init(&writer.inside, 0, 0);
    sem_init(&writer.go, 0, 0);
    assert_int_equal(pthread_create(&thread, NULL, run_task, NULL), 0);
    sem_wait(&writer.inside);
    edge_request_id[0] = 91;
    Tandem__Open m = open_after("c1", all, 7, 9, hash);
    edge_send_open(c, 3, &m, all + 7, 2);
    const struct fake_command *open = fake_next("open");
    edge_send_generate(c, 3, false);
    fake_next("start");
    fake_done(open, FINISH_STOP, more, 1);
    edge_client_next_frame(c, FRAME_DONE);
    static const int32_t after[] = {5, 6, 7, 8, 20, 21, 22, 30, 31, 40, 50};
    edge_request_id[0] = 92;
    m = open_after("c1", after, 10, 11, hash);
    edge_send_open(c, 5, &m, after + 10, 1);
    open = fake_next("open");
    on_loop(fixture_pending, &pending);
    assert_int_equal(pending, 1); /* the save */
    sem_post(&writer.go);
    pthread_join(thread, NULL);
    fixture_settle();
    edge_client_close(c);
    sem_destroy(&writer.inside);
    sem_destroy(&writer.go);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_credit_returns_with_the_stream), TEST(test_credit_returns_when_consumed),
        TEST(test_conversation_goes_on),           TEST(test_need_ids),
        TEST(test_repeat_is_saved_once),           TEST(test_not_persisted),
        TEST(test_cut_reply_is_saved_cut),         TEST(test_gone_while_reading),
        TEST(test_what_waits_is_bounded),          TEST(test_a_save_holds_nobody_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
