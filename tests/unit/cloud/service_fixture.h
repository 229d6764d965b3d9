/* service_fixture: a node's front doors on a loop of their own, over a fake engine, a real store and a real tokenizer. */
#ifndef TANDEM_TESTS_SERVICE_FIXTURE_H
#define TANDEM_TESTS_SERVICE_FIXTURE_H
#include "fake_engine.h"
#include "loop_fixture.h"
#include "store/tiers.h"

static inline void fixture_tick_now(void *arg)
{
    (void)arg;
    engine_port_tick(fx.service.engine);
    edge_server_tick(fx.edges);
    direct_tick(fx.direct);
}

static inline void fixture_tick(void)
{
    on_loop(fixture_tick_now, NULL);
}

static inline void *fixture_run(void *arg)
{
    (void)arg;
    net_loop_run(fx.service.loop);
    return NULL;
}

/* ---- start and stop ---- */

static inline void fixture_model(struct td_error *err)
{
    struct service *v = &fx.service;
    assert_int_equal(gguf_open(TEST_DATA "/tiny/qwen2.gguf", &fx.file, err), 0);
    assert_int_equal(tokenizer_create(fx.file, NULL, &fx.tokenizer, err), 0);
    v->tokenizer = fx.tokenizer;
    v->template_kind = CHAT_CHATML;
    v->model_name = "tiny";
    v->node = "test-node";
    memset(v->fingerprint, 0xf1, TD_HASH_SIZE);
    memset(v->layout, 0x1a, TD_HASH_SIZE);
    v->numerics = KV_NUMERICS_CPU_V1;
    v->layer_count = 2;
    v->vocab_count = tokenizer_vocab_count(fx.tokenizer);
    v->context_max = FIXTURE_CONTEXT;
    v->node_epoch = 0x1122334455667788;
}

static inline void fixture_store(struct td_error *err)
{
    struct service *v = &fx.service;
    struct store_config config = {.directory = fx.folder, .segment_size = 1 << 20, .ballast_size = 1 << 16};
    char path[96];
    memset(config.master_key, 7, sizeof config.master_key);
    snprintf(path, sizeof path, "%s/store", fx.folder);
    config.directory = path;
    if (store_open(&config, &v->store, err) != 0)
        fail_msg("%s", err->text);
    v->conversations = conv_index_create(v->store, 1000);
    v->keys = tenant_keys_create(v->store);
}

static inline int fixture_start(void **state)
{
    struct service *v = &fx.service;
    struct td_error err = {0};
    (void)state;
    crypto_init();
    log_set_level(LOG_ERROR);
    fixture_folder();
    fixture_tokens(true);
    fixture_model(&err);
    fixture_store(&err);
    assert_int_equal(auth_open(fx.tokens_path, &v->auth, &err), 0);
    v->loop = net_loop_create(&err);
    v->inbox = inbox_create(v->loop);
    v->io = io_worker_create(v->inbox);
    v->engine = engine_port_create(&fake, v->inbox);
    fx.edges = edge_server_create(v);
    fx.direct = direct_create(v);
    assert_non_null(fx.direct);
    direct_set_ready(fx.direct, true);
    struct net_listen listen = {.bind_address = "127.0.0.1",
                                .http = direct_http_handler(fx.direct),
                                .ws = edge_server_ws_handler(fx.edges)};
    if (net_listen(v->loop, &listen, &fx.port, &err) != 0)
        fail_msg("%s", err.text);
    pthread_create(&fx.thread, NULL, fixture_run, NULL);
    return 0;
}

static inline int fixture_stop(void **state)
{
    struct service *v = &fx.service;
    (void)state;
    net_loop_stop(v->loop);
    pthread_join(fx.thread, NULL);
    engine_port_stop(v->engine);
    io_worker_destroy(v->fetcher); /* of tests that made one */
    io_worker_destroy(v->io);
    net_loop_destroy(v->loop);
    direct_destroy(fx.direct);
    edge_server_destroy(fx.edges);
    engine_port_destroy(v->engine);
    inbox_destroy(v->inbox);
    conv_index_destroy(v->conversations);
    tenant_keys_destroy(v->keys);
    tiers_destroy(v->tiers);
    store_close(v->store);
    auth_close(v->auth);
    tokenizer_destroy(fx.tokenizer);
    gguf_close(fx.file);
    fake_reset();
    return nftw(fx.folder, fixture_remove, 8, FTW_DEPTH | FTW_PHYS);
}

/* A conversation as the store has it; asserts that it is there. */
static inline struct conversation fixture_conversation(const char *principal, const char *id,
                                                       uint64_t *version)
{
    struct conversation c;
    assert_int_equal(conv_load(fx.service.conversations, "acme", principal, id, version, &c), 0);
    return c;
}

/* Until the worker has done what was submitted before. */
static inline void fixture_pending(void *arg)
{
    *(size_t *)arg = io_worker_pending(fx.service.io);
}
static inline void fixture_settle(void)
{
    size_t pending = 1;
    for (int i = 0; i < 12000 && pending > 0; i++) {
        on_loop(fixture_pending, &pending);
        if (pending)
            nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    assert_int_equal(pending, 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_start, fixture_stop)
#endif
