/* engine: on its own thread, with many others that open, upload, leave, come back and go away for good. Meant for the thread sanitizer too. */
#include "engine_rig.h"

#define VOCAB    256
#define PROMPT   150
#define REPLY    30
#define USERS    4
#define REQUESTS 6

struct user {
    pthread_t thread;
    struct rig *rig;
    const int32_t *prompt, *reply;
    uint32_t number;
};

/* A client whose sink runs on the engine's thread while a user waits. */
struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct client client; /* under lock */
};

static void waiter_sink(void *ctx, const struct engine_event *event)
{
    struct waiter *w = ctx;
    pthread_mutex_lock(&w->lock);
    if (w->client.sequence == 0)
        w->client.sequence = event->sequence;
    client_sink(&w->client, event);
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

static void wait_for(struct waiter *w, uint32_t tokens)
{
    pthread_mutex_lock(&w->lock);
    while (!w->client.done && !w->client.failed && w->client.count < tokens)
        pthread_cond_wait(&w->changed, &w->lock);
    pthread_mutex_unlock(&w->lock);
}

static struct waiter *send(struct rig *r, struct engine_open open)
{
    struct waiter *w = calloc(1, sizeof *w);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    open.sink = waiter_sink;
    open.sink_ctx = w;
    uint64_t sequence;
    int rc = engine_open(r->engine, &open, &sequence);
    assert_int_equal(rc, 0);
    pthread_mutex_lock(&w->lock);
    w->client.sequence = sequence;
    pthread_mutex_unlock(&w->lock);
    return w;
}

static void forget(struct waiter *w)
{
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

static struct engine_open open_of(struct user *u, uint32_t request, uint64_t attempt)
{
    struct engine_open open = {
        .tenant = "acme", .attempt = attempt, .prompt_count = PROMPT, .accept = KV_ACCEPT_EXACT};
    snprintf(open.principal, sizeof open.principal, "user-%u", u->number);
    memset(open.shared_key, 1, sizeof open.shared_key);
    kv_principal_key(open.shared_key, open.principal, open.own_key);
    store_le32(open.request_id, request);
    open.ids = malloc(PROMPT * sizeof *open.ids);
    memcpy(open.ids, u->prompt, PROMPT * sizeof *open.ids);
    return open;
}

static void check(const struct user *u, struct waiter *w)
{
    wait_for(w, UINT32_MAX);
    if (w->client.failed)
        fail_msg("failed: %s", w->client.fail_text);
    assert_int_equal(w->client.count, REPLY);
    assert_memory_equal(w->client.ids, u->reply, REPLY * sizeof *u->reply);
    forget(w);
}

static void ask_directly(struct user *u, uint32_t request)
{
    struct engine_open open = open_of(u, request, 1);
    open.direct = true;
    open.generate = rig_greedy(REPLY);
    check(u, send(u->rig, open));
}

static void ask_through_edge(struct user *u, uint32_t request)
{
    struct rig_edge edge = rig_edge_compute(u->rig, u->prompt, PROMPT, 1);
    struct waiter *w = send(u->rig, open_of(u, request, 1));
    struct client *c = &w->client;
    struct plan_range range = {0, PROMPT, 1, KV_L0, HIDDEN_F32};
    struct engine_generate generate = rig_greedy(REPLY);
    assert_int_equal(engine_plan(u->rig->engine, c->sequence, 1, &range, 1, false), 0);
    assert_int_equal(engine_start(u->rig->engine, c->sequence, &generate), 0);
    for (uint32_t at = 0; at < PROMPT; at += 50)
        rig_send_hidden(&edge, c, 1, at, 50, HIDDEN_F32);
    rig_send_kv(&edge, c, 1, 0, PROMPT, KV_L0);
    check(u, w);
    rig_edge_free(&edge);
}

static void leave_and_come_back(struct user *u, uint32_t request)
{
    struct engine_open open = open_of(u, request, 1);
    open.direct = true;
    open.generate = rig_greedy(REPLY);
    struct waiter *first = send(u->rig, open);
    wait_for(first, 3);
    engine_detach(u->rig->engine, first->client.sequence);
    open = open_of(u, request, 2);
    open.direct = true;
    open.generate = rig_greedy(REPLY);
    check(u, send(u->rig, open)); /* its first event comes when nothing more can come of the other */
    forget(first);
}

static void leave_for_good(struct user *u, uint32_t request)
{
    struct engine_open open = open_of(u, request, 1);
    open.direct = true;
    open.generate = rig_greedy(REPLY);
    struct waiter *w = send(u->rig, open);
    wait_for(w, 1);
    engine_cancel(u->rig->engine, w->client.sequence, false, 0);
    ask_directly(u, request + 1); /* behind it in the queue: then the sink is called no more */
    forget(w);
}

static void *user_main(void *arg)
{
    struct user *u = arg;
    for (uint32_t i = 0; i < REQUESTS; i++) {
        uint32_t request = i * 10 + 1;
        switch ((i + u->number) % 4) {
        case 0:
            ask_directly(u, request);
            break;
        case 1:
            ask_through_edge(u, request);
            break;
        case 2:
            leave_and_come_back(u, request);
            break;
        default:
            leave_for_good(u, request);
        }
    }
    return NULL;
}

/* An engine of the rig's, replaced by one with a thread of its own and a real clock. */
static void give_it_a_thread(struct rig *r)
{
    struct td_error err;
    struct engine_config config = r->engine->config;
    config.backend = rig_backend(r, r->options.pages, r->options.token_budget);
    config.kv_stall_ms = 20;
    engine_destroy(r->engine);
    assert_int_equal(engine_create(&config, &r->engine, &err), 0);
}

static struct backend_ops ahead_ops;
static struct engine *_Atomic ahead_engine;
static atomic_uint ahead_used;

static bool note_ahead(struct backend *b, uint32_t used)
{
    const struct engine *e = ahead_engine;
    (void)b;
    assert_true(!e || e->live_count == 0);
    ahead_used = used;
    return false;
}

static void memory_is_taken_ahead_between_requests(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.pages = 24, .token_budget = 64});
    int32_t prompt[PROMPT], reply[REPLY];
    rig_ids(prompt, PROMPT, VOCAB, 4);
    rig_reference(r, prompt, PROMPT, rig_greedy(REPLY), reply);
    struct td_error err;
    struct engine_config config = r->engine->config;
    config.backend = rig_backend(r, r->options.pages, r->options.token_budget);
    ahead_ops = *config.backend->ops;
    ahead_ops.pages_ahead = note_ahead;
    config.backend->ops = &ahead_ops;
    engine_destroy(r->engine);
    assert_int_equal(engine_create(&config, &r->engine, &err), 0);
    ahead_engine = r->engine;
    ask_directly(&(struct user){.rig = r, .prompt = prompt, .reply = reply}, 1);
    uint32_t pages = (PROMPT + REPLY - 1 + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    for (int left = 120000; ahead_used != pages && left > 0; left--)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    assert_int_equal(ahead_used, pages);
    ahead_engine = NULL;
    rig_close(r);
}

static void remove_directory(const char *path)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", path);
    assert_int_equal(system(command), 0);
}

/* The prompt asked of an engine that has just been started on the folder: what of it was cached, and how long that was waited for. */
static uint32_t ask_a_new_one(const char *directory, uint64_t *load_us)
{
    int32_t prompt[PROMPT * 3], reply[REPLY];
    rig_ids(prompt, PROMPT * 3, VOCAB, 4);
    struct rig *r = rig_open((struct rig_options){.store = directory, .pages = 24, .token_budget = 64});
    rig_reference(r, prompt, PROMPT * 3, rig_greedy(REPLY), reply);
    give_it_a_thread(r);
    struct user u = {.rig = r, .prompt = prompt, .reply = reply};
    struct engine_open open = open_of(&u, 1, 1);
    open.ids = realloc(open.ids, sizeof prompt);
    memcpy(open.ids, prompt, sizeof prompt);
    open.prompt_count = PROMPT * 3;
    open.direct = true;
    open.generate = rig_greedy(REPLY);
    struct waiter *w = send(r, open);
    wait_for(w, UINT32_MAX);
    uint32_t cached = w->client.done_event.done.cached_tokens;
    *load_us = w->client.done_event.done.load_us;
    check(&u, w);
    rig_close(r);
    return cached;
}

/* Nothing else is going on: each block that is read must wake the engine, not wait until it looks for itself. On a busy machine a thread may be late: then
 * once more, but an engine that is not woken is late each time. */
static void idle_engine_reads_from_disk_at_once(void **state)
{
    (void)state;
    enum { TRIES = 20 };
    char directory[64];
    rig_directory(directory);
    uint64_t load_us = 0;
    bool at_once = false;
    assert_int_equal(ask_a_new_one(directory, &load_us), 0);
    for (int i = 0; i < TRIES && !at_once; i++)
        at_once = ask_a_new_one(directory, &load_us) == 448 && load_us < ENGINE_LOAD_FLOOR_US / 2;
    assert_true(at_once);
    remove_directory(directory);
}

static void many_users_at_once(void **state)
{
    (void)state;
    char directory[64];
    rig_directory(directory);
    struct rig *r = rig_open((struct rig_options){.store = directory, .pages = 24, .token_budget = 64});
    int32_t prompt[PROMPT], reply[REPLY];
    rig_ids(prompt, PROMPT, VOCAB, 3);
    rig_reference(r, prompt, PROMPT, rig_greedy(REPLY), reply);
    give_it_a_thread(r);
    struct user users[USERS];
    for (uint32_t i = 0; i < USERS; i++) {
        users[i] = (struct user){.rig = r, .prompt = prompt, .reply = reply, .number = i};
        assert_int_equal(pthread_create(&users[i].thread, NULL, user_main, &users[i]), 0);
    }
    for (uint32_t i = 0; i < USERS; i++)
        pthread_join(users[i].thread, NULL);
    engine_drain(r->engine, 5000);
    struct engine_open late = open_of(&users[0], 999, 1);
    uint64_t sequence;
    assert_int_equal(engine_open(r->engine, &late, &sequence), -TD_ERR_CLOSED);
    assert_int_equal(rig_stats(r).running, 0);
    rig_close(r);
    remove_directory(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(idle_engine_reads_from_disk_at_once),
        cmocka_unit_test(many_users_at_once),
        cmocka_unit_test(memory_is_taken_ahead_between_requests),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
