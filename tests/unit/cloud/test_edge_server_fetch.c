/* edge_server: FETCH: what a device is given to keep, what it is not, and what the node does before it has time for that. */
#include "service_fixture.h"
#include "cloud/edge_server_internal.h"
#include "edge_client.h"
#include <sched.h>
#include <semaphore.h>

#define BLOCKS 3u
#define LAYERS 2u /* of the fixture's model */

static const struct kv_shape shape = {LAYERS, 1, 32};
static const uint8_t master[CRYPTO_KEY_SIZE] = {9, 9};
static int32_t ids[(BLOCKS + 20) * KV_BLOCK_TOKENS];

static void answer_fetches(void *arg)
{
    struct service *v = &fx.service;
    struct tiers_config config = {.store = v->store, .ram_size = 1 << 20, .threads = 1};
    struct td_error err;
    (void)arg;
    if (tiers_create(&config, &v->tiers, &err) < 0)
        abort();
    v->fetcher = io_worker_create(v->inbox);
    kv_seal_derive(master, &v->seal);
}

static int fetch_start(void **state)
{
    int rc = fixture_start(state);
    on_loop(answer_fetches, NULL);
    for (size_t i = 0; i < TD_COUNT(ids); i++)
        ids[i] = (int32_t)(i * 7 % 100);
    return rc;
}

/* ---- what the store has ---- */

static void name_of(const uint8_t key[CRYPTO_KEY_SIZE], uint32_t block, struct kv_block_id *id)
{
    *id = (struct kv_block_id){{0}};
    for (uint32_t i = 0; i <= block; i++) {
        struct kv_block_id parent = *id;
        kv_block_id_next(key, &parent, fx.service.fingerprint, fx.service.layout, ids + i * KV_BLOCK_TOKENS,
                         id);
    }
}

/* Values that tell block, layer and K or V. malloc'ed. */
static struct span piece_of(uint32_t block, uint32_t i, uint8_t fidelity)
{
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&shape);
    size_t count = kv_piece_values(&shape, KV_BLOCK_TOKENS), bound = kv_piece_bound(&shape, KV_BLOCK_TOKENS);
    uint16_t *values = malloc(count * sizeof *values);
    uint8_t *bytes = malloc(bound);
    for (size_t j = 0; j < count; j++)
        values[j] = (uint16_t)(block * 1000 + i * 100 + j % 90);
    struct kv_piece_head head = {.codec = KV_L0,
                                 .is_value = i % 2,
                                 .quality = {fidelity, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0},
                                 .block_index = block,
                                 .token_count = KV_BLOCK_TOKENS,
                                 .layer = (uint16_t)(i / 2),
                                 .kv_head_count = (uint16_t)shape.kv_head_count,
                                 .head_dim = (uint16_t)shape.head_dim};
    int64_t size = kv_piece_encode(scratch, &head, values, bytes, bound);
    assert_true(size > 0);
    free(values);
    kv_codec_scratch_destroy(scratch);
    return (struct span){bytes, (size_t)size};
}

static void put(const char *principal, uint32_t block, uint8_t fidelity)
{
    uint8_t chain[CRYPTO_KEY_SIZE], own[CRYPTO_KEY_SIZE];
    struct span pieces[2 * LAYERS];
    struct store_block b = {.quality = {fidelity, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0},
                            .block_index = block,
                            .layer_end = LAYERS,
                            .pieces = pieces};
    assert_int_equal(store_chain_key(fx.service.store, "acme", chain, NULL), 0);
    if (principal)
        kv_principal_key(chain, principal, own);
    name_of(principal ? own : chain, block, &b.id);
    for (uint32_t i = 0; i < 2 * LAYERS; i++)
        pieces[i] = piece_of(block, i, fidelity);
    assert_int_equal(store_put(fx.service.store, "acme", &b, NULL, NULL), 0);
    assert_int_equal(store_flush(fx.service.store), 0);
    for (uint32_t i = 0; i < 2 * LAYERS; i++)
        free((void *)(uintptr_t)pieces[i].data);
}

/* ---- asking ---- */

static void fetch(struct edge_client *c, uint32_t stream, uint32_t block, uint32_t count)
{
    Tandem__Fetch m = TANDEM__FETCH__INIT;
    size_t size = (block + count) * KV_BLOCK_TOKENS * 4u;
    uint8_t *payload = malloc(size);
    for (uint32_t i = 0; i < size / 4; i++)
        store_le32(payload + 4 * i, (uint32_t)ids[i]);
    m.block_index = block, m.block_count = count, m.layer_end = LAYERS;
    edge_client_send(c, FRAME_FETCH, stream, &m, payload, size);
    free(payload);
}

/* All pieces of a block: alice's, or nobody can open them. */
static void expect_block(struct edge_client *c, uint32_t stream, uint32_t block, uint8_t fidelity)
{
    uint8_t key[CRYPTO_KEY_SIZE];
    struct kv_block_id expected, name;
    kv_seal_name_key(&fx.service.seal, "acme", "alice", key);
    name_of(key, block, &expected);
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        struct wire_frame f = edge_client_next_frame(c, FRAME_KV_BLOCK);
        assert_int_equal(f.stream, stream);
        assert_int_equal(f.kv_block->block_index, block);
        assert_int_equal(f.kv_block->layer, i / 2);
        assert_int_equal(f.kv_block->is_value, i % 2);
        struct span plain = piece_of(block, i, fidelity);
        uint8_t *opened = malloc(f.payload.size);
        assert_int_equal(kv_seal_open(&fx.service.seal, f.payload, &name, opened), plain.size);
        assert_memory_equal(opened, plain.data, plain.size);
        assert_memory_equal(&name, &expected, sizeof name);
        free(opened);
        free((void *)(uintptr_t)plain.data);
    }
}

static void expect_done(struct edge_client *c, uint32_t stream)
{
    assert_int_equal(edge_client_next_frame(c, FRAME_DONE).stream, stream);
}

static void test_welcome_names_the_seal(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_open(edge_hello("alice"));
    struct wire_frame f = edge_client_next_frame(c, FRAME_WELCOME);
    struct kv_seal seal;
    kv_seal_derive(master, &seal);
    assert_int_equal(f.welcome->seal.len, sizeof seal.tag);
    assert_memory_equal(f.welcome->seal.data, seal.tag, sizeof seal.tag);
    edge_client_close(c);
}

/* The cloud's own blocks and the principal's, each as it lies in the store; what is not there is left out. */
static void test_blocks_come_sealed(void **state)
{
    (void)state;
    put(NULL, 0, KV_L0);
    put("alice", 2, KV_L1);
    struct edge_client *c = edge_client_ready("alice");
    fetch(c, 1, 0, BLOCKS + 2);
    expect_block(c, 1, 0, KV_L0);
    expect_block(c, 1, 2, KV_L1);
    expect_done(c, 1);
    fetch(c, 3, 2, 1); /* the connection lives on */
    expect_block(c, 3, 2, KV_L1);
    expect_done(c, 3);
    edge_client_close(c);
    assert_true(fake_is_quiet());
}

static void test_nobody_gets_anothers(void **state)
{
    (void)state;
    put("bob", 0, KV_L0);
    put("alice", 1, KV_L2); /* nor what a usual request would not take */
    struct edge_client *c = edge_client_ready("alice");
    fetch(c, 1, 0, BLOCKS);
    expect_done(c, 1);
    edge_client_close(c);
    c = edge_client_ready("eve"); /* of another tenant */
    put(NULL, 2, KV_L0);
    fetch(c, 1, 0, BLOCKS);
    expect_done(c, 1);
    edge_client_close(c);
}

static void set_waiting(uint32_t count)
{
    pthread_mutex_lock(&fake.lock);
    fake.waiting = count;
    pthread_mutex_unlock(&fake.lock);
}

static void set_most(void *arg)
{
    fx.edges->fetches_max = *(uint32_t *)arg;
}

static void count_fetches(void *arg)
{
    *(uint32_t *)arg = fx.edges->fetch_count;
}

/* Requests first. */
static void test_busy(void **state)
{
    (void)state;
    put(NULL, 0, KV_L0);
    struct edge_client *c = edge_client_ready("alice");
    set_waiting(1);
    fetch(c, 1, 0, 1);
    assert_stream_error(c, 1, TD_ERR_BUSY, true);
    set_waiting(0);
    uint32_t most = 0;
    on_loop(set_most, &most); /* as many as may be are under way elsewhere */
    fetch(c, 3, 0, 1);
    assert_stream_error(c, 3, TD_ERR_BUSY, true);
    most = 1;
    on_loop(set_most, &most);
    for (uint32_t stream = 5; stream < 9; stream += 2) { /* whatever ends gives its place back */
        fetch(c, stream, 0, 1);
        expect_block(c, stream, 0, KV_L0);
        expect_done(c, stream);
    }
    edge_client_close(c);
}

static void wait_for_fetches(uint32_t count)
{
    for (uint32_t now = count + 1; now != count; sched_yield())
        on_loop(count_fetches, &now);
}

static void much_later(void *arg)
{
    (void)arg;
    edge_fetch_tick(fx.edges->connections, clock_mono_us() + EDGE_FETCH_LATE_US);
}

/* Nobody keeps a place with a link that takes nothing. */
static void test_late(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    for (uint32_t i = 0; i < LIMIT_FETCH_BLOCKS; i++)
        put(NULL, i, KV_L0);
    fetch(c, 1, 0, LIMIT_FETCH_BLOCKS);
    on_loop(much_later, NULL);
    for (struct wire_frame f = {0}; f.type != FRAME_ERROR;) {
        f = edge_client_take_frame(c, FRAME_ERROR);
        if (f.type == FRAME_DONE)
            break; /* it was quicker */
    }
    fetch(c, 3, 0, 1);
    expect_block(c, 3, 0, KV_L0);
    expect_done(c, 3);
    uint32_t left = 1;
    on_loop(count_fetches, &left);
    assert_int_equal(left, 0);
    edge_client_close(c);
}

/* One at a time; the first is not disturbed. */
static void test_one_at_a_time(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    for (uint32_t i = 0; i < LIMIT_FETCH_BLOCKS; i++)
        put(NULL, i, KV_L0);
    fetch(c, 1, 0, LIMIT_FETCH_BLOCKS);
    fetch(c, 3, 0, 1);
    bool done[2] = {false, false};
    uint32_t pieces = 0, refused = 0;
    while (!done[0] || !done[1]) {
        struct wire_frame f = edge_client_take_frame(c, FRAME_DONE);
        bool second = f.stream == 3;
        if (f.type == FRAME_KV_BLOCK) {
            pieces += !second;
        } else if (f.type == FRAME_ERROR) {
            assert_true(second);
            assert_int_equal(f.error->code, TD_ERR_BUSY);
            refused++;
        }
        if (f.stream != 0 && (f.type == FRAME_ERROR || f.type == FRAME_DONE))
            done[second] = true;
    }
    assert_int_equal(pieces, LIMIT_FETCH_BLOCKS * 2 * LAYERS);
    assert_true(refused <= 1); /* unless it had come to its end before */
    edge_client_close(c);
}

static sem_t may_read;

static void wait_to_read(struct io_job *job)
{
    (void)job;
    sem_wait(&may_read);
}

static void nothing(struct io_job *job)
{
    (void)job;
}

static void hold_reads(void *job)
{
    assert_int_equal(io_worker_submit(fx.service.fetcher, job), 0);
}

/* None of them comes to its end meanwhile. */
static void test_nobody_holds_all_places(void **state)
{
    (void)state;
    struct io_job job = {.work = wait_to_read, .done = nothing};
    struct edge_client *alice[EDGE_FETCHES_EACH + 1], *bob = edge_client_ready("bob");
    sem_init(&may_read, 0, 0);
    on_loop(hold_reads, &job);
    for (uint32_t i = 0; i < TD_COUNT(alice); i++) {
        alice[i] = edge_client_ready("alice");
        fetch(alice[i], 1, 0, 1);
        if (i < EDGE_FETCHES_EACH)
            wait_for_fetches(i + 1);
    }
    assert_stream_error(alice[EDGE_FETCHES_EACH], 1, TD_ERR_BUSY, true);
    fetch(bob, 1, 0, 1);
    wait_for_fetches(EDGE_FETCHES_EACH + 1);
    sem_post(&may_read);
    expect_done(bob, 1);
    for (uint32_t i = 0; i < TD_COUNT(alice); i++)
        edge_client_close(alice[i]);
    edge_client_close(bob);
    sem_destroy(&may_read);
}

/* Under as many names as it likes. */
static void test_no_tenant_holds_all_places(void **state)
{
    (void)state;
    static const char *const names[] = {"alice", "bob", "alice", "eve"}; /* eve is of another tenant */
    struct io_job job = {.work = wait_to_read, .done = nothing};
    struct edge_client *clients[TD_COUNT(names)];
    uint32_t most = 3;
    sem_init(&may_read, 0, 0);
    on_loop(set_most, &most);
    on_loop(hold_reads, &job);
    for (uint32_t i = 0, count = 0; i < TD_COUNT(names); i++) {
        clients[i] = edge_client_ready(names[i]);
        fetch(clients[i], 1, 0, 1);
        if (i == 2)
            assert_stream_error(clients[i], 1, TD_ERR_BUSY, true);
        else
            wait_for_fetches(++count);
    }
    sem_post(&may_read);
    for (uint32_t i = 0; i < TD_COUNT(names); i++) {
        if (i != 2)
            expect_done(clients[i], 1);
        edge_client_close(clients[i]);
    }
    sem_destroy(&may_read);
}

static void test_what_cannot_be_asked(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Fetch m = TANDEM__FETCH__INIT;
    edge_client_send(c, FRAME_FETCH, 1, &m, NULL, 0); /* no ids */
    assert_stream_error(c, 1, TD_ERR_UNSUPPORTED, false);
    ids[5] = (int32_t)fx.service.vocab_count;
    fetch(c, 3, 0, 1);
    assert_stream_error(c, 3, TD_ERR_FORMAT, false);
    ids[5] = 0;
    uint8_t payload[KV_BLOCK_TOKENS * 4] = {0};
    m.block_count = 1, m.layer_end = LAYERS + 1;
    edge_client_send(c, FRAME_FETCH, 5, &m, payload, sizeof payload);
    assert_stream_error(c, 5, TD_ERR_UNSUPPORTED, false);
    fetch(c, 7, 0, 1);
    expect_done(c, 7);
    edge_client_close(c);
}

/* Layers alone. */
static void test_some_layers(void **state)
{
    (void)state;
    put(NULL, 0, KV_L0);
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Fetch m = TANDEM__FETCH__INIT;
    uint8_t payload[KV_BLOCK_TOKENS * 4];
    for (uint32_t i = 0; i < KV_BLOCK_TOKENS; i++)
        store_le32(payload + 4 * i, (uint32_t)ids[i]);
    m.block_count = 1, m.layer_begin = 1, m.layer_end = 2;
    edge_client_send(c, FRAME_FETCH, 1, &m, payload, sizeof payload);
    for (uint32_t i = 0; i < 2; i++) {
        struct wire_frame f = edge_client_next_frame(c, FRAME_KV_BLOCK);
        assert_int_equal(f.kv_block->layer, 1);
        assert_int_equal(f.kv_block->is_value, i);
    }
    expect_done(c, 1);
    edge_client_close(c);
}

/* An edge that has something better to do, or goes: nothing is left behind. */
static void test_given_up(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < LIMIT_FETCH_BLOCKS; i++)
        put(NULL, i, KV_L0);
    struct edge_client *c = edge_client_ready("alice");
    fetch(c, 1, 0, LIMIT_FETCH_BLOCKS);
    Tandem__Cancel cancel = TANDEM__CANCEL__INIT;
    edge_client_send(c, FRAME_CANCEL, 1, &cancel, NULL, 0);
    fetch(c, 3, 0, 1); /* at once */
    for (struct wire_frame f = {0}; f.type != FRAME_DONE || f.stream != 3;) {
        f = edge_client_take_frame(c, FRAME_DONE);
        assert_int_not_equal(f.type, FRAME_ERROR);
    }
    fetch(c, 5, 0, LIMIT_FETCH_BLOCKS);
    edge_client_close(c);
    c = edge_client_ready("alice");
    fetch(c, 1, 0, 1);
    expect_block(c, 1, 0, KV_L0);
    expect_done(c, 1);
    edge_client_close(c);
}

/* A node without a key of its own answers none, and says so. */
static void test_not_here(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_open(edge_hello("alice"));
    assert_int_equal(edge_client_next_frame(c, FRAME_WELCOME).welcome->seal.len, 0);
    fetch(c, 1, 0, 1);
    assert_stream_error(c, 1, TD_ERR_UNSUPPORTED, false);
    edge_client_close(c);
}

#define FETCH_TEST(name) cmocka_unit_test_setup_teardown(name, fetch_start, fixture_stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        FETCH_TEST(test_welcome_names_the_seal),
        FETCH_TEST(test_blocks_come_sealed),
        FETCH_TEST(test_nobody_gets_anothers),
        FETCH_TEST(test_busy),
        FETCH_TEST(test_late),
        FETCH_TEST(test_one_at_a_time),
        FETCH_TEST(test_nobody_holds_all_places),
        FETCH_TEST(test_no_tenant_holds_all_places),
        FETCH_TEST(test_what_cannot_be_asked),
        FETCH_TEST(test_some_layers),
        FETCH_TEST(test_given_up),
        TEST(test_not_here),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
