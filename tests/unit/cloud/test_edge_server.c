/* edge_server: greetings, frames to commands, events to frames, and what happens when either side goes away. Private prompts, conversations
 * and credit have files of their own. */
#include "service_fixture.h"
#include "cloud/edge_server_internal.h"
#include "edge_client.h"
#include "protocol/net_internal.h"

/* ---- greetings ---- */

static void test_welcome(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_open(edge_hello("alice"));
    struct wire_frame f = edge_client_next_frame(c, FRAME_WELCOME);
    uint8_t chain[CRYPTO_KEY_SIZE], own[CRYPTO_KEY_SIZE];
    assert_int_equal(store_chain_key(fx.service.store, "acme", chain, NULL), 0);
    kv_principal_key(chain, "alice", own);
    assert_string_equal(f.welcome->tenant, "acme");
    assert_string_equal(f.welcome->principal, "alice");
    assert_memory_equal(f.welcome->principal_key.data, own, sizeof own);
    assert_int_equal(f.welcome->version->protocol, WIRE_PROTOCOL);
    assert_int_equal(f.welcome->version->numerics, KV_NUMERICS_CPU_V1);
    assert_memory_equal(f.welcome->version->layout.data, fx.service.layout, TD_HASH_SIZE);
    assert_true(f.welcome->node_epoch == fx.service.node_epoch);
    assert_string_equal(f.welcome->node, "test-node");
    assert_int_equal(f.welcome->context_max, FIXTURE_CONTEXT);
    assert_int_equal(f.welcome->codec_mask, 1 << KV_L0 | 1 << KV_L1 | 1 << KV_L2 | 1 << KV_RAW);
    edge_client_close(c);
}

static void assert_refused(const Tandem__Hello *hello, unsigned code, const char *text)
{
    struct edge_client *c = edge_client_open(hello);
    struct wire_frame f = edge_client_next_frame(c, FRAME_ERROR);
    assert_int_equal(f.error->code, code);
    if (!strstr(f.error->text, text))
        fail_msg("\"%s\" does not say \"%s\"", f.error->text, text);
    edge_client_next_frame(c, 0);
    edge_client_close_now(c);
    on_loop(edge_client_free_now, c);
    free(c->last);
    queue_destroy(c->frames);
    arena_deinit(&c->arena);
    free(c);
}

static void test_refusals(void **state)
{
    (void)state;
    uint8_t other[TD_HASH_SIZE] = {0xab, 0xcd, 0xef, 0x01, 0x02};
    assert_refused(edge_hello("mallory"), TD_ERR_AUTH, "token");
    assert_refused(edge_hello(""), TD_ERR_AUTH, "token");

    Tandem__Hello *m = edge_hello("alice");
    m->fingerprint.data = other;
    assert_refused(m, TD_ERR_MISMATCH, "fingerprint abcdef01, the cloud f1f1f1f1");
    m = edge_hello("mallory"); /* who has no token learns nothing about the model */
    m->fingerprint.data = other;
    assert_refused(m, TD_ERR_AUTH, "token");
    m = edge_hello("alice");
    m->layer_count = 3;
    assert_refused(m, TD_ERR_MISMATCH, "models differ");

    m = edge_hello("alice");
    m->versions[0]->protocol = 9;
    assert_refused(m, TD_ERR_VERSION, "protocol 9");
    m = edge_hello("alice");
    m->versions[0]->layout.data = other;
    assert_refused(m, TD_ERR_VERSION, "lay KV out");
    m = edge_hello("alice");
    m->versions[0]->numerics = KV_NUMERICS_LAST + 1;
    assert_refused(m, TD_ERR_VERSION, "arithmetic");

    fx.service.draining = true;
    assert_refused(edge_hello("alice"), TD_ERR_CLOSED, "shutting down");
}

/* One of several versions fits. */
static void test_version_is_picked(void **state)
{
    (void)state;
    Tandem__Hello *m = edge_hello("alice");
    Tandem__Version old = *m->versions[0], *versions[] = {&old, m->versions[0]};
    old.protocol = 9;
    m->n_versions = 2;
    m->versions = versions;
    struct edge_client *c = edge_client_open(m);
    assert_int_equal(edge_client_next_frame(c, FRAME_WELCOME).welcome->version->protocol, WIRE_PROTOCOL);
    edge_client_close(c);
}

/* Edge and cloud may compute with different arithmetic, but then no request is exact. */
static void test_other_numerics(void **state)
{
    (void)state;
    Tandem__Hello *m = edge_hello("alice");
    m->versions[0]->numerics = KV_NUMERICS_CUDA_FAST;
    struct edge_client *c = edge_client_open(m);
    assert_int_equal(edge_client_next_frame(c, FRAME_WELCOME).welcome->version->numerics, KV_NUMERICS_CPU_V1);
    Tandem__Open open = edge_open(4);
    open.accept = KV_ACCEPT_EXACT;
    edge_send_open(c, 1, &open, prompt, 4);
    struct wire_frame f = edge_client_next_frame(c, FRAME_ERROR);
    assert_int_equal(f.error->code, TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(f.error->text, "visible-lossless"));
    open.accept = KV_ACCEPT_VISIBLE_LOSSLESS;
    edge_send_open(c, 3, &open, prompt, 4);
    fake_next("open");
    edge_client_close(c);
}

static void count_connections(void *arg)
{
    *(uint32_t *)arg = edge_server_connections(fx.edges);
}

static void wait_for_connections(uint32_t wanted)
{
    uint32_t count = wanted + 1;
    for (int i = 0; i < 30000 && count != wanted; i++) {
        on_loop(count_connections, &count);
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    assert_int_equal(count, wanted);
}

static void assert_served(struct edge_client *c)
{
    Tandem__Open m = edge_open(4);
    edge_send_open(c, 1, &m, prompt, 4);
    fake_next("open");
}

static void allow_no_time(void *arg)
{
    (void)arg;
    fx.edges->greeting_us = 0;
}

static void allow_an_hour(void *arg)
{
    (void)arg;
    fx.edges->greeting_us = UINT64_C(3600000000);
}

/* Those who do not greet make room for others from the same address, once they have had the time to; the known do not. */
static void test_unauthenticated_connections(void **state)
{
    (void)state;
    struct edge_client *silent[LIMIT_UNAUTHENTICATED_PER_PEER], *known = edge_client_ready("alice"),
                                                                *one_more;
    assert_int_equal(fx.edges->greeting_us, LIMIT_GREETING_MS * 1000);
    on_loop(allow_an_hour, NULL);
    for (unsigned i = 0; i < TD_COUNT(silent); i++)
        silent[i] = edge_client_open(NULL);
    wait_for_connections(TD_COUNT(silent) + 1);
    one_more = edge_client_open(edge_hello("bob"));
    edge_client_next_frame(one_more, 0); /* closed */
    edge_client_keep(one_more, NULL);
    edge_client_close(one_more);
    on_loop(allow_no_time, NULL);
    edge_client_close(edge_client_ready("bob"));
    assert_served(known);
    edge_client_close(known);
    unsigned lost = 0;
    for (unsigned i = 0; i < TD_COUNT(silent); i++) {
        on_loop(edge_client_close_now, silent[i]);
        while (edge_client_take_frame(silent[i], 0).type)
            ;
        lost += strcmp(silent[i]->why, "the connection was lost") == 0;
        edge_client_keep(silent[i], NULL);
        edge_client_close(silent[i]);
    }
    assert_int_equal(lost, 1);
}

static void count_idle(void *arg)
{
    *(uint32_t *)arg = fx.service.loop->idle_count;
}

/* Wherever places run short, who has not greeted makes room, and the known do not. */
static void test_who_greets_is_idle_no_longer(void **state)
{
    (void)state;
    struct edge_client *known = edge_client_ready("alice"), *silent;
    uint32_t count;
    on_loop(count_idle, &count);
    assert_int_equal(count, 0);
    silent = edge_client_open(NULL);
    wait_for_connections(2);
    on_loop(count_idle, &count);
    assert_int_equal(count, 1);
    edge_client_close(known);
    edge_client_close(silent);
}

static void allow_two(void *arg)
{
    (void)arg;
    assert_int_equal(fx.edges->connections_max, LIMIT_CONNECTIONS_PER_PRINCIPAL);
    fx.edges->connections_max = 2;
}

static void test_connections_of_one_principal(void **state)
{
    (void)state;
    on_loop(allow_two, NULL);
    struct edge_client *first = edge_client_ready("alice"), *second = edge_client_ready("alice");
    assert_refused(edge_hello("alice"), TD_ERR_LIMIT, "connections");
    edge_client_close(edge_client_ready("bob"));
    edge_client_close(first);
    wait_for_connections(1);
    edge_client_close(edge_client_ready("alice"));
    edge_client_close(second);
}

/* ---- a request ---- */

static void test_one_flight(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    m.accept = KV_ACCEPT_EXACT;
    m.no_cache = true;
    m.attempt = 42;
    edge_send_open(c, 1, &m, prompt, 4);
    edge_send_plan(c, 1, 3, 4, 1);
    edge_send_generate(c, 1, false);
    Tandem__Hidden hidden = TANDEM__HIDDEN__INIT;
    hidden.epoch = 3, hidden.count = 4, hidden.layer = 1, hidden.dtype = HIDDEN_F16;
    edge_client_send(c, FRAME_HIDDEN, 1, &hidden, "rows", 4);
    Tandem__KvBlock kv = TANDEM__KV_BLOCK__INIT;
    kv.epoch = 3, kv.block_index = 2;
    edge_client_send(c, FRAME_KV_BLOCK, 1, &kv, "piece", 5);

    const struct fake_command *open = fake_next("open");
    assert_string_equal(open->open.tenant, "acme");
    assert_string_equal(open->open.principal, "alice");
    assert_memory_equal(open->open.request_id, edge_request_id, sizeof edge_request_id);
    assert_int_equal(open->open.attempt, 42);
    assert_int_equal(open->open.prompt_count, 4);
    assert_int_equal(open->open.held_count, 0);
    assert_memory_equal(open->open.ids, prompt, sizeof prompt);
    assert_int_equal(open->open.accept, KV_ACCEPT_EXACT);
    assert_true(open->open.no_cache);
    assert_false(open->open.direct);
    uint8_t chain[CRYPTO_KEY_SIZE], own[CRYPTO_KEY_SIZE];
    store_chain_key(fx.service.store, "acme", chain, NULL);
    kv_principal_key(chain, "alice", own);
    assert_memory_equal(open->open.shared_key, chain, sizeof chain);
    assert_memory_equal(open->open.own_key, own, sizeof own);
    const struct fake_command *plan = fake_next("plan");
    assert_int_equal(plan->sequence, open->sequence);
    assert_int_equal(plan->epoch, 3);
    assert_int_equal(plan->count, 1);
    assert_int_equal(plan->ranges[0].count, 4);
    assert_int_equal(plan->ranges[0].layers, 1);
    assert_int_equal(plan->ranges[0].codec, KV_L1);
    assert_int_equal(plan->ranges[0].hidden_dtype, HIDDEN_F16);
    const struct fake_command *start = fake_next("start");
    assert_int_equal(start->generate.token_count_max, 10);
    assert_true(start->generate.sampling.temperature == 0.5f && start->generate.sampling.seed == 77);
    const struct fake_command *rows = fake_next("hidden");
    assert_int_equal(rows->epoch, 3);
    assert_int_equal(rows->count, 4);
    assert_int_equal(rows->layer, 1);
    assert_int_equal(rows->dtype, HIDDEN_F16);
    assert_int_equal(rows->size, 4);
    assert_int_equal(rows->first_byte, 'r');
    const struct fake_command *piece = fake_next("kv");
    assert_int_equal(piece->block_index, 2);
    assert_int_equal(piece->size, 5);

    fake_opened(open, 64);
    struct wire_frame f = edge_client_next_frame(c, FRAME_OPEN_ACK);
    assert_int_equal(f.stream, 1);
    assert_int_equal(f.open_ack->attempt, 42);
    assert_int_equal(f.open_ack->cached_tokens, 64);
    assert_int_equal(f.open_ack->prefill_tokens_per_s, 1234);
    assert_false(f.open_ack->need_ids);
    fake_tokens(open, 0, reply, 2);
    f = edge_client_next_frame(c, FRAME_TOKEN);
    assert_int_equal(f.token->attempt, 42);
    assert_int_equal(f.token->index, 0);
    assert_int_equal(f.payload.size, 8);
    assert_int_equal(load_le32(f.payload.data + 4), 21);
    fake_tokens(open, 2, reply + 2, 1);
    assert_int_equal(edge_client_next_frame(c, FRAME_TOKEN).token->index, 2);
    fake_done(open, FINISH_LENGTH, reply, 3);
    f = edge_client_next_frame(c, FRAME_DONE);
    assert_int_equal(f.done->finish, FINISH_LENGTH);
    assert_int_equal(f.done->prompt_tokens, 4);
    assert_int_equal(f.done->completion_tokens, 3);
    assert_int_equal(f.done->timings->decode_us, 2000000);
    assert_int_equal(f.done->cached_tokens, 3);
    assert_int_equal(f.done->timings->read_tokens, 2);
    fake_tokens(open, 3, reply, 1); /* whatever still comes is for nobody */
    edge_client_close(c);
    assert_true(fake_is_quiet()); /* and nothing is detached */
}

static void test_held_tokens(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    static const int32_t ids[] = {5, 6, 7, 8, 20, 21};
    uint8_t hash[TD_HASH_SIZE];
    ids_hash(ids + 4, 2, hash);
    Tandem__Open m = edge_open(4);
    m.held_count = 2;
    m.held_hash = (ProtobufCBinaryData){TD_HASH_SIZE, hash};
    edge_send_open(c, 1, &m, ids, 6);
    const struct fake_command *open = fake_next("open");
    assert_int_equal(open->open.prompt_count, 4);
    assert_int_equal(open->open.held_count, 2);
    assert_memory_equal(open->open.ids, ids, sizeof ids);
    hash[0] ^= 1;
    edge_send_open(c, 3, &m, ids, 6);
    struct wire_frame f = edge_client_next_frame(c, FRAME_ERROR);
    assert_int_equal(f.stream, 3);
    assert_int_equal(f.error->code, TD_ERR_CHECKSUM);
    edge_client_close(c);
    fake_next("detach");
}

/* The reply has filled the context, and only the word that it ends was lost with the link. */
static void test_held_tokens_that_fill_the_context(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    int32_t *ids = calloc(FIXTURE_CONTEXT + 1, sizeof *ids);
    uint8_t hash[TD_HASH_SIZE];
    Tandem__Open m = edge_open(4);
    for (uint32_t more = 0; more < 2; more++) {
        m.held_count = FIXTURE_CONTEXT - 4 + more;
        ids_hash(ids + 4, m.held_count, hash);
        m.held_hash = (ProtobufCBinaryData){TD_HASH_SIZE, hash};
        edge_send_open(c, 1 + 2 * more, &m, ids, FIXTURE_CONTEXT + more);
        if (more)
            assert_stream_error(c, 3, TD_ERR_CONTEXT, false);
        else
            assert_int_equal(fake_next("open")->open.held_count, FIXTURE_CONTEXT - 4);
    }
    free(ids);
    edge_client_close(c);
    fake_next("detach");
}

static void test_bad_opens(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    int32_t ids[] = {5, 6, 7, (int32_t)fx.service.vocab_count};
    Tandem__Open m = edge_open(4);
    edge_send_open(c, 1, &m, ids, 4);
    assert_stream_error(c, 1, TD_ERR_FORMAT, false);
    m.accept = KV_ACCEPT_ANY + 1;
    edge_send_open(c, 3, &m, prompt, 4);
    assert_stream_error(c, 3, TD_ERR_ARG, false);
    int32_t *longest = calloc(FIXTURE_CONTEXT, sizeof *longest);
    m = edge_open(FIXTURE_CONTEXT);
    edge_send_open(c, 5, &m, longest, FIXTURE_CONTEXT);
    assert_stream_error(c, 5, TD_ERR_CONTEXT, false);
    m = edge_open(FIXTURE_CONTEXT - 1);
    edge_send_open(c, 7, &m, longest, FIXTURE_CONTEXT - 1);
    fake_next("open");
    free(longest);
    fake_refuse("open", -TD_ERR_FULL, 1);
    m = edge_open(4);
    edge_send_open(c, 9, &m, prompt, 4);
    assert_stream_error(c, 9, TD_ERR_FULL, true);
    edge_send_open(c, 11, &m, prompt, 4); /* the connection lives on */
    fake_next("open");
    edge_client_close(c);
    fake_next("detach");
    fake_next("detach");
}

static void test_bad_generate(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    edge_send_open(c, 1, &m, prompt, 4);
    fake_next("open");
    Tandem__Generate g = TANDEM__GENERATE__INIT;
    g.temperature = -1, g.top_p = 1, g.repetition_penalty = 1;
    edge_client_send(c, FRAME_GENERATE, 1, &g, NULL, 0);
    assert_stream_error(c, 1, TD_ERR_ARG, false);
    assert_false(fake_next("cancel")->finished);
    edge_send_open(c, 3, &m, prompt, 4);
    fake_next("open");
    edge_send_generate(c, 3, false);
    fake_next("start");
    edge_send_generate(c, 3, false);
    assert_stream_error(c, 3, TD_ERR_PROTOCOL, false);
    fake_next("cancel");
    edge_client_close(c);
}

static void test_logprobs(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    edge_send_open(c, 1, &m, prompt, 4);
    const struct fake_command *open = fake_next("open");
    enum { COUNT = 100 };
    static int32_t ids[COUNT];
    static struct sampled sampled[COUNT];
    for (int i = 0; i < COUNT; i++) {
        ids[i] = sampled[i].id = i;
        sampled[i].logprob = -(float)i;
        sampled[i].top_count = SAMPLER_LOGPROBS_MAX;
        for (int j = 0; j < SAMPLER_LOGPROBS_MAX; j++)
            sampled[i].top[j] = (struct sampler_logprob){200000 + i * 20 + j, -(float)j};
    }
    struct engine_event e = {.type = ENGINE_TOKENS};
    e.tokens.index = 7;
    e.tokens.count = COUNT;
    e.tokens.ids = ids;
    e.tokens.sampled = sampled;
    fake_emit(open, e);
    for (uint32_t got = 0; got < COUNT;) {
        struct wire_frame f = edge_client_next_frame(c, FRAME_TOKEN);
        assert_int_equal(f.token->index, 7 + got);
        assert_int_equal(f.token->n_logprobs, f.payload.size / 4);
        for (size_t i = 0; i < f.token->n_logprobs; i++, got++) {
            const Tandem__TokenLogprobs *l = f.token->logprobs[i];
            assert_int_equal(load_le32(f.payload.data + 4 * i), got);
            assert_true(l->logprob == -(float)got);
            assert_int_equal(l->n_top_ids, SAMPLER_LOGPROBS_MAX);
            assert_int_equal(l->top_ids[19], 200000 + got * 20 + 19);
            assert_true(l->top_logprobs[19] == -19);
        }
    }
    edge_client_close(c);
}

/* ---- endings ---- */

static void test_cancel(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    edge_send_open(c, 1, &m, prompt, 4);
    const struct fake_command *open = fake_next("open");
    Tandem__Cancel cancel = TANDEM__CANCEL__INIT;
    edge_client_send(c, FRAME_CANCEL, 1, &cancel, NULL, 0);
    const struct fake_command *got = fake_next("cancel");
    assert_int_equal(got->sequence, open->sequence);
    assert_false(got->finished);

    edge_send_open(c, 3, &m, prompt, 4);
    open = fake_next("open");
    cancel.finished = true, cancel.keep_count = 2;
    edge_client_send(c, FRAME_CANCEL, 3, &cancel, NULL, 0);
    got = fake_next("cancel");
    assert_true(got->finished);
    assert_int_equal(got->keep_count, 2);
    fake_done(open, FINISH_STOP, reply, 2);
    assert_int_equal(edge_client_next_frame(c, FRAME_DONE).stream, 3);
    edge_client_close(c);
    assert_true(fake_is_quiet());
}

/* A full engine is asked again until it has taken the end of a sequence. */
static void test_cancel_is_repeated(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    edge_send_open(c, 1, &m, prompt, 4);
    fake_next("open");
    fake_refuse("cancel", -TD_ERR_FULL, 2);
    Tandem__Cancel cancel = TANDEM__CANCEL__INIT;
    edge_client_send(c, FRAME_CANCEL, 1, &cancel, NULL, 0);
    assert_true(fake_is_quiet());
    fixture_tick();
    assert_true(fake_is_quiet());
    fixture_tick();
    fake_next("cancel");
    edge_client_close(c);
}

static void test_lost_connection(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    edge_send_open(c, 1, &m, prompt, 4);
    edge_send_open(c, 3, &m, prompt, 4);
    uint64_t sequences = fake_next("open")->sequence + fake_next("open")->sequence;
    edge_client_close(c);
    assert_int_equal(fake_next("detach")->sequence + fake_next("detach")->sequence, sequences);
}

static void test_engine_fails(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    edge_send_open(c, 1, &m, prompt, 4);
    fake_failed(fake_next("open"), -TD_ERR_NOSPACE, "no pages", 0);
    assert_stream_error(c, 1, TD_ERR_NOSPACE, true);
    edge_send_open(c, 3, &m, prompt, 4);
    fake_failed(fake_next("open"), -TD_ERR_MISMATCH, "other prompt", 0);
    assert_stream_error(c, 3, TD_ERR_MISMATCH, false);
    edge_send_open(c, 5, &m, prompt, 4);
    fake_next("open");
    fake_refuse("plan", -TD_ERR_FULL, 1);
    edge_send_plan(c, 5, 1, 4, 1);
    assert_stream_error(c, 5, TD_ERR_FULL, true);
    fake_next("cancel");
    edge_client_close(c);
    assert_true(fake_is_quiet());
}

/* An event that cannot be copied: nobody may go on with a gap, everybody is told to try again. */
static void test_lost_event(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    edge_send_open(c, 1, &m, prompt, 4);
    const struct fake_command *open = fake_next("open");
    edge_send_open(c, 3, &m, prompt, 4);
    fake_next("open");
    struct engine_event e = {.type = ENGINE_DONE};
    e.done.ids = prompt;
    e.done.ids_count = ENGINE_PORT_SIZE_MAX / sizeof *prompt;
    fake_emit(open, e);
    uint32_t streams = 0;
    for (int i = 0; i < 2; i++) {
        struct wire_frame f = edge_client_next_frame(c, FRAME_ERROR);
        assert_int_equal(f.error->code, TD_ERR_FULL);
        assert_true(f.error->retry);
        streams += f.stream;
        assert_false(fake_next("cancel")->finished);
    }
    assert_int_equal(streams, 1 + 3);
    edge_send_open(c, 5, &m, prompt, 4); /* and it goes on */
    fake_opened(fake_next("open"), 0);
    edge_client_next_frame(c, FRAME_OPEN_ACK);
    edge_client_close(c);
}

/* What this node does not serve ends the stream that asked for it, nothing more. */
static void test_fetch(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(4);
    edge_send_open(c, 1, &m, prompt, 4);
    fake_next("open");
    Tandem__Fetch fetch = TANDEM__FETCH__INIT;
    fetch.layer_end = 1;
    edge_client_send(c, FRAME_FETCH, 1, &fetch, NULL, 0);
    assert_stream_error(c, 1, TD_ERR_UNSUPPORTED, false);
    fake_next("cancel");
    edge_client_close(c);
}

static void test_revoked_token(void **state)
{
    (void)state;
    struct td_error err;
    struct edge_client *alice = edge_client_ready("alice"), *bob = edge_client_ready("bob");
    Tandem__Open m = edge_open(4);
    edge_send_open(alice, 1, &m, prompt, 4);
    fake_next("open");
    fixture_tokens(false);
    assert_int_equal(auth_reload(fx.service.auth, false, &err), 1);
    fixture_tick();
    fake_next("cancel");
    assert_int_equal(edge_client_next_frame(alice, FRAME_ERROR).error->code, TD_ERR_AUTH);
    edge_client_next_frame(alice, 0);
    edge_client_keep(alice, NULL);
    edge_client_close(alice);
    edge_send_open(bob, 1, &m, prompt, 4);
    fake_next("open");
    edge_client_close(bob);
    fake_next("detach");
}

static void say_goaway(void *arg)
{
    (void)arg;
    edge_server_goaway(fx.edges, "other:8443", "maintenance");
}

static void test_goaway(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    on_loop(say_goaway, NULL);
    struct wire_frame f = edge_client_next_frame(c, FRAME_GOAWAY);
    assert_string_equal(f.goaway->node, "other:8443");
    assert_string_equal(f.goaway->reason, "maintenance");
    edge_client_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_welcome),
        TEST(test_refusals),
        TEST(test_version_is_picked),
        TEST(test_other_numerics),
        TEST(test_unauthenticated_connections),
        TEST(test_who_greets_is_idle_no_longer),
        TEST(test_connections_of_one_principal),
        TEST(test_one_flight),
        TEST(test_held_tokens),
        TEST(test_held_tokens_that_fill_the_context),
        TEST(test_bad_opens),
        TEST(test_bad_generate),
        TEST(test_logprobs),
        TEST(test_cancel),
        TEST(test_cancel_is_repeated),
        TEST(test_lost_connection),
        TEST(test_engine_fails),
        TEST(test_lost_event),
        TEST(test_fetch),
        TEST(test_revoked_token),
        TEST(test_goaway),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
