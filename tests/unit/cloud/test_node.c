/* node: a whole node over a tiny model: start, both doors, the admin listener, a token that comes and goes, SIGTERM. Linked so that whoever asks whether a
 * model file is intact comes here first (tests/CMakeLists.txt). */
#include "edge_client.h"
#include "cloud/engine_internal.h"
#include "cloud/node_internal.h"
#include "store/operator.h"
#include "../protocol/http_client.h"
#include <fcntl.h>
#include <jansson.h>
#include <semaphore.h>
#include <signal.h>

static struct settings settings;
static struct config *config;
static struct node *node;
static pthread_t runner;

static int run_result;

static void *run(void *arg)
{
    (void)arg;
    run_result = node_run(node);
    return NULL;
}

static int start(void **state)
{
    (void)state;
    static char store[96], key[96];
    struct td_error err = {0};
    fixture_folder();
    fixture_tokens(true);
    snprintf(store, sizeof store, "%s/store", fx.folder);
    snprintf(key, sizeof key, "%s/store.key", fx.folder);
    const char *argv[] = {"tandem-cloud",
                          "--model",
                          TEST_DATA "/tiny/qwen2.gguf",
                          "--plain",
                          "--pages",
                          "64",
                          "--listen-port",
                          "0",
                          "--admin-port",
                          "0",
                          "--tokens-file",
                          fx.tokens_path,
                          "--store",
                          store,
                          "--store-key-file",
                          key,
                          "--chat-template",
                          "chatml",
                          "--threads",
                          "1",
                          "--device",
                          "cpu",
                          "--log-level",
                          "error"};
    if (settings_load(TD_COUNT(argv), (char **)argv, &settings, &config, &err) != 0)
        fail_msg("%s", err.text);
    log_set_level(settings.level);
    if (node_start(&settings, &node, &err) != 0)
        fail_msg("%s", err.text);
    fx.service = node->service; /* for edge_client: which loop, which model */
    fx.port = node->port;
    pthread_create(&runner, NULL, run, NULL);
    return 0;
}

/* SIGTERM, as an operator sends it. */
static int stop(void **state)
{
    (void)state;
    kill(getpid(), SIGTERM);
    pthread_join(runner, NULL);
    node_destroy(node);
    config_free(config);
    if (run_result != 0)
        return -1;
    return nftw(fx.folder, fixture_remove, 8, FTW_DEPTH | FTW_PHYS);
}

static struct response get(uint16_t port, const char *path, const char *extra)
{
    struct client c = client_open(port);
    client_request(&c, "GET", path, extra, NULL);
    struct response r = client_response(&c, false);
    client_close(&c);
    return r;
}

static struct response chat(const char *token, const char *body)
{
    struct client c = client_open(node->port);
    char headers[128];
    snprintf(headers, sizeof headers, "Authorization: Bearer %s\r\n", token);
    client_request(&c, "POST", "/v1/chat/completions", headers, body);
    struct response r = client_response(&c, false);
    client_close(&c);
    return r;
}

/* Names that dashboards are built on. */
static void test_admin(void **state)
{
    (void)state;
    uint16_t port = admin_port(node->admin);
    struct response r = get(port, "/health", "");
    assert_int_equal(r.status, 200);
    assert_string_equal(r.body, "{\"status\":\"ok\"}");
    free(r.body);
    r = get(port, "/metrics", "");
    assert_int_equal(r.status, 200);
    static const char *const names[] = {"tandem_build_info{",
                                        "tandem_requests_running ",
                                        "tandem_requests_waiting ",
                                        "tandem_kv_pages_free ",
                                        "tandem_kv_pages_cached ",
                                        "tandem_edge_connections ",
                                        "tandem_edge_streams ",
                                        "tandem_edge_refused_total ",
                                        "tandem_edge_protocol_errors_total ",
                                        "tandem_conversations_saved_total{door=\"api\"}",
                                        "tandem_conversation_save_failures_total{door=\"edge\"}",
                                        "tandem_store_conversations ",
                                        "tandem_store_writes_off ",
                                        "tandem_kv_tier_bytes{tier=\"disk\"}",
                                        "tandem_time_to_first_token_seconds_count",
                                        "tandem_prefix_cache_hits_total ",
                                        "tandem_api_unauthorized_total "};
    for (size_t i = 0; i < TD_COUNT(names); i++)
        if (!strstr(r.body, names[i]))
            fail_msg("no metric %s", names[i]);
    free(r.body);
    r = get(port, "/v1/models", "");
    assert_int_equal(r.status, 404);
    free(r.body);
    r = get(port, "/metrics", "Host: evil.example\r\n"); /* a web page that rebinds its name reads nothing */
    assert_int_equal(r.status, 403);
    free(r.body);
    r = get(port, "/metrics", "Origin: http://evil.example\r\n");
    assert_int_equal(r.status, 403);
    free(r.body);
    struct client c = client_open(port);
    client_request(&c, "POST", "/health", "", "{}");
    r = client_response(&c, false);
    assert_int_equal(r.status, 405);
    free(r.body);
    client_close(&c);
}

#define ASK                                                                                                  \
    "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],\"max_tokens\":12,\"temperature\":1,"         \
    "\"seed\":3,"                                                                                            \
    "\"ignore_eos\":true}"

static json_t *reply_of(const char *token, const char *body)
{
    struct response r = chat(token, body);
    if (r.status != 200)
        fail_msg("status %d: %s", r.status, r.body);
    json_t *root = json_loads(r.body, 0, NULL);
    assert_non_null(root);
    free(r.body);
    return root;
}

static void test_both_doors_say_the_same(void **state)
{
    (void)state;
    json_t *root = reply_of("alice", ASK), *again = reply_of("alice", ASK);
    json_t *message = json_object_get(json_array_get(json_object_get(root, "choices"), 0), "message");
    json_t *other = json_object_get(json_array_get(json_object_get(again, "choices"), 0), "message");
    assert_true(json_equal(message, other));
    uint64_t version;
    struct conversation kept;
    const char *id = json_string_value(json_object_get(root, "conversation"));
    assert_int_equal(conv_load(fx.service.conversations, "acme", "alice", id, &version, &kept), 0);
    uint32_t prompt_count = kept.ids_count - 12;

    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m = edge_open(prompt_count);
    edge_send_open(c, 1, &m, kept.ids, prompt_count);
    edge_send_plan(c, 1, 1, prompt_count, 0);
    Tandem__Generate g = TANDEM__GENERATE__INIT;
    g.token_count_max = 12, g.temperature = 1, g.top_p = 1, g.repetition_penalty = 1, g.seed = 3,
    g.ignore_end = true;
    edge_client_send(c, FRAME_GENERATE, 1, &g, NULL, 0);
    edge_client_next_frame(c, FRAME_OPEN_ACK);
    for (uint32_t got = 0; got < 12;) {
        struct wire_frame f = edge_client_next_frame(c, FRAME_TOKEN);
        assert_int_equal(f.token->index, got);
        for (size_t i = 0; i < f.payload.size / 4; i++, got++)
            assert_int_equal(load_le32(f.payload.data + 4 * i), kept.ids[prompt_count + got]);
    }
    struct wire_frame f = edge_client_next_frame(c, FRAME_DONE);
    assert_int_equal(f.done->finish, FINISH_LENGTH);
    assert_int_equal(f.done->prompt_tokens, prompt_count);
    assert_int_equal(f.done->completion_tokens, 12);
    edge_client_close(c);
    conv_free(&kept);
    json_decref(root);
    json_decref(again);
}

/* The same, but the client is asked for its name a second later. */
static void test_token_file_is_watched(void **state)
{
    (void)state;
    fixture_tokens(false);
    kill(getpid(), SIGHUP);
    int status = 200;
    for (int i = 0; i < 6000 && status == 200; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        struct response r = get(node->port, "/v1/models", "Authorization: Bearer alice\r\n");
        status = r.status;
        free(r.body);
    }
    assert_int_equal(status, 401);
    json_decref(reply_of("bob", ASK));
}

/* What runs may finish, what comes is told to come again, and the turn is there after the next start. */
static void test_drain(void **state)
{
    (void)state;
    static const char body[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],\"max_tokens\":60,\"stream\":true,"
        "\"ignore_eos\":true,\"conversation\":\"c1\"}";
    struct edge_client *edge = edge_client_ready("bob");
    struct client c = client_open(node->port), late = client_open(node->port);
    client_request(&c, "POST", "/v1/chat/completions", "Authorization: Bearer alice\r\n", body);
    assert_true(client_wait_for(&c, "\"content\":"));
    kill(getpid(), SIGTERM);
    edge_client_next_frame(edge, FRAME_GOAWAY);
    client_request(&late, "POST", "/v1/chat/completions", "Authorization: Bearer bob\r\n", ASK);
    struct response r = client_response(&late, false);
    assert_int_not_equal(r.status, 200); /* 503; on a slow day the node is gone already */
    free(r.body);
    assert_true(client_wait_for(&c, "[DONE]"));
    assert_int_equal(edge_client_next_frame(edge, FRAME_ERROR).error->code, TD_ERR_CLOSED);
    client_close(&c);
    client_close(&late);
    pthread_join(runner, NULL);
    uint64_t version;
    struct conversation kept;
    assert_int_equal(conv_load(node->service.conversations, "acme", "alice", "c1", &version, &kept), 0);
    conv_free(&kept);
    net_timer_destroy(edge->timer);
    node_destroy(node);
    link_destroy(edge->link);
    queue_close(edge->frames);
    for (void *frame; (frame = queue_pop(edge->frames, 0));)
        free(frame);
    queue_destroy(edge->frames);
    free(edge->last);
    arena_deinit(&edge->arena);
    free(edge);
    config_free(config);
    assert_int_equal(nftw(fx.folder, fixture_remove, 8, FTW_DEPTH | FTW_PHYS), 0);
}

static void test_refuses_to_start(void **state)
{
    (void)state;
    struct td_error err = {0};
    struct node *second;
    static char text[80];
    uint16_t port = node->port;
    struct settings other = settings; /* the store is taken */
    if (node_start(&other, &second, &err) == 0)
        fail_msg("two nodes on one store");
    assert_non_null(strstr(err.text, "holds it"));
    snprintf(other.store_path, sizeof other.store_path, "%s/store2", fx.folder); /* the port is */
    other.listen_port = port;
    assert_true(node_start(&other, &second, &err) < 0);
    snprintf(text, sizeof text, "port %u: another program uses it", port);
    assert_non_null(strstr(err.text, text));
    other.listen_port = 0;
    other.admin_port = admin_port(node->admin);
    assert_true(node_start(&other, &second, &err) < 0);
    assert_non_null(strstr(err.text, "--admin-port"));
    other.admin_port = 0;
    other.model = TEST_DATA "/tiny/none.gguf";
    assert_true(node_start(&other, &second, &err) < 0);
    assert_non_null(strstr(err.text, "none.gguf"));
    other.model = settings.model;
    other.plain = false;
    other.cert = other.key = "/no/such.crt";
    assert_true(node_start(&other, &second, &err) < 0);
    assert_non_null(strstr(err.text, "deploy/certs.sh"));
}

static const char *written_into; /* a model file, while its node loads it; NULL: none */

bool __real_gguf_intact(struct gguf *g);
bool __wrap_gguf_intact(struct gguf *g);

bool __wrap_gguf_intact(struct gguf *g)
{
    uint8_t byte;
    if (written_into && strcmp(gguf_path(g), written_into) == 0) {
        int fd = open(written_into, O_RDWR);
        off_t last = (off_t)gguf_file_size(g) - 1;
        assert_int_equal(pread(fd, &byte, 1, last), 1);
        byte ^= 1;
        assert_int_equal(pwrite(fd, &byte, 1, last), 1);
        assert_int_equal(futimens(fd, (const struct timespec[]){{1, 0}, {1, 0}}),
                         0); /* clocks of files are coarse */
        close(fd);
        written_into = NULL;
    }
    return __real_gguf_intact(g);
}

/* A GPU has its weights from then on, and its steps ask no more. */
static void test_a_model_that_is_written_into_while_it_is_loaded(void **state)
{
    (void)state;
    struct td_error err = {0};
    struct node *second;
    struct settings other = settings;
    char command[300], model[80];
    snprintf(model, sizeof model, "%s/model.gguf", fx.folder);
    snprintf(command, sizeof command, "cp %s %s", settings.model, model);
    assert_int_equal(system(command), 0);
    snprintf(other.store_path, sizeof other.store_path, "%s/store4", fx.folder);
    other.model = model;
    other.listen_port = other.admin_port = 0;
    written_into = model;
    assert_int_equal(node_start(&other, &second, &err), -TD_ERR_IO);
    assert_null(written_into);
    assert_non_null(strstr(err.text, "model.gguf"));
    assert_non_null(strstr(err.text, "changed while it was being loaded"));
}

static int lost_state(const struct backend *b)
{
    (void)b;
    return -TD_ERR_NOMEM;
}
static const struct backend_ops lost_ops = {.name = "cpu", .state = lost_state};
static const struct backend lost_backend = {.ops = &lost_ops};

static void lose_device(void *arg)
{
    (void)arg;
    node->backend = &lost_backend; /* the node only looks at it; the engine has its own */
}

/* The node drains by itself and says that it failed. */
static void test_lost_device(void **state)
{
    (void)state;
    on_loop(lose_device, NULL);
    pthread_join(runner, NULL);
    assert_int_equal(run_result, -TD_ERR_NOMEM);
    node_destroy(node);
    config_free(config);
    assert_int_equal(nftw(fx.folder, fixture_remove, 8, FTW_DEPTH | FTW_PHYS), 0);
}

/* ---- a tenant is erased ---- */

static sem_t worker_is_held, worker_may_go;

/* Not for ever, so that a test that fails ends. */
static void hold_worker(struct io_job *job)
{
    struct timespec until;
    (void)job;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 60;
    sem_post(&worker_is_held);
    sem_timedwait(&worker_may_go, &until);
}

static void held_done(struct io_job *job)
{
    (void)job;
}

static void submit_held(void *arg)
{
    assert_int_equal(io_worker_submit(node->service.io, arg), 0);
}

static void *erase_acme(void *arg)
{
    *(atomic_int *)arg = node_erase_tenant(node, "acme", NULL);
    return NULL;
}

static void reply_on(struct edge_client *c, const char *conversation)
{
    static uint32_t stream = 1; /* odd, and above all before */
    int32_t ids[8] = {3, 4, 5, 6, 7, 8, 9, 10};
    Tandem__Open m = edge_open(8);
    m.conversation = (char *)conversation;
    edge_send_open(c, stream += 2, &m, ids, 8);
    edge_send_plan(c, stream, 1, 8, 0);
    edge_send_generate(c, stream, false);
    edge_client_next_frame(c, FRAME_OPEN_ACK);
    for (unsigned type = 0; type != FRAME_DONE;) {
        struct wire_frame f = edge_client_take_frame(c, FRAME_DONE);
        if (f.type != FRAME_TOKEN && f.type != FRAME_INGESTED && f.type != FRAME_DONE)
            fail_msg("%s came", frame_type_name(f.type));
        type = f.type;
    }
}

static struct edge_client *greet(const char *token, uint8_t principal_key[CRYPTO_KEY_SIZE])
{
    struct edge_client *c = edge_client_open(edge_hello(token));
    struct wire_frame f = edge_client_next_frame(c, FRAME_WELCOME);
    assert_int_equal(f.welcome->principal_key.len, CRYPTO_KEY_SIZE);
    memcpy(principal_key, f.welcome->principal_key.data, CRYPTO_KEY_SIZE);
    return c;
}

static bool is_kept(const char *tenant, const char *principal, const char *id)
{
    uint64_t version;
    struct conversation c;
    int rc = conv_load(node->service.conversations, tenant, principal, id, &version, &c);
    if (rc == 0)
        conv_free(&c);
    return rc == 0;
}

static void pending(void *arg)
{
    *(size_t *)arg = io_worker_pending(node->service.io);
}

static void settle(void)
{
    for (size_t count = 1; count > 0;)
        on_loop(pending, &count);
}

/* A conversation that waits to be saved while its tenant is erased does not bring the tenant back; who was connected has to greet again, and gets
 * other keys; meanwhile nobody of it is let in. */
static void test_erased_while_saving(void **state)
{
    (void)state;
    uint8_t before[CRYPTO_KEY_SIZE], after[CRYPTO_KEY_SIZE], other[CRYPTO_KEY_SIZE];
    struct edge_client *alice = greet("alice", before), *eve = greet("eve", other);
    reply_on(eve, "theirs");
    reply_on(alice, "kept");
    settle();
    assert_true(is_kept("acme", "alice", "kept")); /* control */
    static struct io_job held = {.work = hold_worker, .done = held_done};
    sem_init(&worker_is_held, 0, 0);
    sem_init(&worker_may_go, 0, 0);
    on_loop(submit_held, &held);
    sem_wait(&worker_is_held);
    edge_client_close(alice);
    alice = greet("alice", after);
    assert_memory_equal(before, after, sizeof before);
    edge_request_id[0]++; /* another request */
    reply_on(alice, "late");

    pthread_t eraser;
    atomic_int rc = 1;
    pthread_create(&eraser, NULL, erase_acme, &rc);
    struct wire_frame f = edge_client_next_frame(alice, FRAME_ERROR);
    assert_int_equal(f.stream, 0);
    assert_non_null(strstr(f.error->text, "erased"));
    struct edge_client *refused = edge_client_open(edge_hello("bob"));
    assert_int_equal(edge_client_next_frame(refused, FRAME_ERROR).error->code, TD_ERR_AGAIN);
    assert_int_equal(rc, 1);
    sem_post(&worker_may_go);
    pthread_join(eraser, NULL);
    assert_int_equal(rc, 0);
    settle();
    assert_false(store_has_tenant(node->service.store, "acme"));
    assert_false(is_kept("acme", "alice", "kept") || is_kept("acme", "alice", "late"));
    assert_true(is_kept("globex", "eve", "theirs"));
    edge_client_close(alice);
    edge_client_close(refused);
    alice = greet("alice", after);
    assert_memory_not_equal(before, after, sizeof before);
    reply_on(alice, "new");
    edge_request_id[0]++;
    reply_on(eve, "more"); /* the same connection as before */
    settle();
    assert_true(is_kept("acme", "alice", "new") && is_kept("globex", "eve", "more"));
    assert_int_equal(node_erase_tenant(node, "nobody", NULL), -TD_ERR_NOTFOUND);
    edge_client_close(alice);
    edge_client_close(eve);
}

static void submit_to_fetcher(void *arg)
{
    assert_int_equal(io_worker_submit(node->service.fetcher, arg), 0);
}

static void pending_for_edges(void *arg)
{
    *(size_t *)arg = io_worker_pending(node->service.fetcher);
}

/* What is being read for a device to keep is read to its end, before the keys go that it was asked for with. */
static void test_erased_while_fetching(void **state)
{
    (void)state;
    uint8_t key[CRYPTO_KEY_SIZE];
    struct edge_client *alice = greet("alice", key);
    reply_on(alice, "kept");
    settle();
    static struct io_job held = {.work = hold_worker, .done = held_done};
    sem_init(&worker_is_held, 0, 0);
    sem_init(&worker_may_go, 0, 0);
    on_loop(submit_to_fetcher, &held);
    sem_wait(&worker_is_held);
    pthread_t eraser;
    atomic_int rc = 1;
    pthread_create(&eraser, NULL, erase_acme, &rc);
    for (size_t count = 1; count < 2 && rc == 1;) /* until it waits behind that */
        on_loop(pending_for_edges, &count);
    assert_int_equal(rc, 1);
    assert_true(store_has_tenant(node->service.store, "acme"));
    sem_post(&worker_may_go);
    pthread_join(eraser, NULL);
    assert_int_equal(rc, 0);
    assert_false(store_has_tenant(node->service.store, "acme"));
    edge_client_close(alice);
}

static json_t *admin_json(const char *method, const char *path, int status)
{
    uint8_t master[CRYPTO_KEY_SIZE];
    char token[OPERATOR_TOKEN_SIZE + 1], headers[160], key[96];
    snprintf(key, sizeof key, "%s/store.key", fx.folder);
    assert_int_equal(store_master_key_load(key, false, master, NULL), 0);
    operator_token(master, token);
    snprintf(headers, sizeof headers, "Authorization: Bearer %s\r\n", token);
    struct client c = client_open(admin_port(node->admin));
    client_request(&c, method, path, headers, strcmp(method, "POST") == 0 ? "{\"tenant\":\"acme\"}" : NULL);
    struct response r = client_response(&c, false);
    client_close(&c);
    if (r.status != status)
        fail_msg("%s: status %d: %s", path, r.status, r.body);
    json_t *root = json_loads(r.body, 0, NULL);
    assert_non_null(root);
    free(r.body);
    return root;
}

static void assert_progress(const char *running, json_int_t done, json_int_t total)
{
    json_t *root = admin_json("GET", "/store/progress", 200);
    const char *name = json_string_value(json_object_get(root, "running"));
    if (running)
        assert_string_equal(name, running);
    else
        assert_null(name);
    assert_int_equal(json_integer_value(json_object_get(root, "done")), done);
    assert_int_equal(json_integer_value(json_object_get(root, "total")), total);
    json_decref(root);
}

static void *erase_by_admin(void *arg)
{
    (void)arg;
    json_decref(admin_json("POST", "/store/erase-tenant", 200));
    return NULL;
}

/* How far a job has come is said while it runs, and what it came to afterwards; and only to who may ask for the job. */
static void test_progress_is_told(void **state)
{
    (void)state;
    struct edge_client *alice = edge_client_ready("alice"), *eve = edge_client_ready("eve");
    reply_on(alice, "one");
    edge_request_id[0]++;
    reply_on(eve, "two");
    settle();
    assert_progress(NULL, 0, 0);
    json_t *root = admin_json("POST", "/store/verify", 200);
    assert_int_equal(json_integer_value(json_object_get(root, "records")), 2);
    assert_int_equal(json_integer_value(json_object_get(root, "bad")), 0);
    json_decref(root);
    assert_progress(NULL, 2, 2);
    struct response r = get(admin_port(node->admin), "/store/progress", "");
    assert_int_equal(r.status, 401);
    free(r.body);

    static struct io_job held = {.work = hold_worker, .done = held_done};
    sem_init(&worker_is_held, 0, 0);
    sem_init(&worker_may_go, 0, 0);
    on_loop(submit_held, &held);
    sem_wait(&worker_is_held);
    pthread_t eraser;
    pthread_create(&eraser, NULL, erase_by_admin, NULL);
    edge_client_next_frame(alice, FRAME_ERROR);
    assert_progress("erase-tenant", 0, 0);
    json_decref(admin_json("POST", "/store/verify", 409));
    sem_post(&worker_may_go);
    pthread_join(eraser, NULL);
    edge_client_close(alice);
    edge_client_close(eve);
}

/* Nothing that reads all of the store holds up its end. */
static void test_jobs_of_the_store_end(void **state)
{
    (void)state;
    uint64_t freed;
    kill(getpid(), SIGTERM);
    pthread_join(runner, NULL);
    admin_stop(node->admin); /* as node_destroy */
    node->admin = NULL;
    assert_int_equal(store_compact(node->service.store, 0, NULL, NULL, &freed, NULL), -TD_ERR_CANCELLED);
    node_destroy(node);
    config_free(config);
    assert_int_equal(nftw(fx.folder, fixture_remove, 8, FTW_DEPTH | FTW_PHYS), 0);
}

/* Who waits for a loop that has ended is told so. */
static void test_stopped_while_erasing(void **state)
{
    (void)state;
    static struct io_job held = {.work = hold_worker, .done = held_done};
    sem_init(&worker_is_held, 0, 0);
    sem_init(&worker_may_go, 0, 0);
    on_loop(submit_held, &held);
    sem_wait(&worker_is_held);
    struct edge_client *alice = edge_client_ready("alice");
    pthread_t eraser;
    atomic_int rc = 1;
    pthread_create(&eraser, NULL, erase_acme, &rc);
    edge_client_next_frame(alice, FRAME_ERROR);
    node_erase_stop(node);
    pthread_join(eraser, NULL);
    assert_int_equal(rc, -TD_ERR_CLOSED);
    assert_true(store_has_tenant(node->service.store, "acme"));
    sem_post(&worker_may_go);
    edge_client_close(alice);
    settle();
}

static void stop_loop(void *arg)
{
    (void)arg;
    net_loop_stop(node->service.loop);
}

/* Before anybody has read a block the engine knows what reading one takes, and so does the next start. */
static void test_the_disk_is_measured(void **state)
{
    (void)state;
    uint64_t known = 0;
    for (int i = 0; i < 6000 && known == 0; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        known = engine_tier_us(node->engine, TIER_DISK);
    }
    assert_int_not_equal(known, 0);
    struct engine_stats stats;
    engine_stats(node->engine, &stats);
    assert_int_equal(stats.load_us[TIER_DISK], 0); /* no block was read */
    on_loop(stop_loop, NULL);
    pthread_join(runner, NULL);
    pthread_mutex_lock(&node->engine->lock);
    node->engine->stats.load_us[TIER_DISK] = 12345678; /* as if one had been; the engine is idle */
    pthread_mutex_unlock(&node->engine->lock);
    node_speed_stop(node);
    node_destroy(node);
    assert_int_equal(node_start(&settings, &node, &(struct td_error){0}), 0);
    assert_int_equal(engine_tier_us(node->engine, TIER_DISK), 12345678);
    fx.service = node->service; /* the loop's, once it runs */
    fx.port = node->port;
    pthread_create(&runner, NULL, run, NULL);
}

/* A GPU that is asked for by name is there, or the node does not start. */
static void test_device_by_name(void **state)
{
    (void)state;
    struct td_error err = {0};
    struct node *second;
    struct settings other = settings;
    char path[sizeof other.store_path];
    snprintf(path, sizeof path, "%s/store3", fx.folder);
    memcpy(other.store_path, path, sizeof path);
    other.device = "cuda:1023";
    other.listen_port = other.admin_port = 0;
    assert_true(node_start(&other, &second, &err) < 0);
    assert_non_null(strstr(err.text, "cuda:1023"));
    other.device = "cpu"; /* whose pages are f16 */
    other.kv_dtype = KV_DTYPE_FP8, other.kv_dtype_name = "fp8";
    assert_int_equal(node_start(&other, &second, &err), -TD_ERR_ARG);
    assert_non_null(strstr(err.text, "--kv-dtype fp8 needs a GPU"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(void)
{
    crypto_init();
    node_block_signals();
    const struct CMUnitTest tests[] = {
        TEST(test_admin),
        TEST(test_both_doors_say_the_same),
        TEST(test_token_file_is_watched),
        TEST(test_refuses_to_start),
        TEST(test_device_by_name),
        TEST(test_a_model_that_is_written_into_while_it_is_loaded),
        TEST(test_the_disk_is_measured),
        TEST(test_erased_while_saving),
        TEST(test_erased_while_fetching),
        TEST(test_stopped_while_erasing),
        TEST(test_progress_is_told),
        cmocka_unit_test_setup(test_jobs_of_the_store_end, start),
        cmocka_unit_test_setup(test_drain, start),
        cmocka_unit_test_setup(test_lost_device, start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
