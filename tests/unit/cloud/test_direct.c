/* direct: the OpenAI API of a node over a fake engine: requests become sequences, tokens become text, turns become conversations, and every
 * way in which a request can end. */
#include "service_fixture.h"
#include "../protocol/http_client.h"
#include "shared/tokenizer_internal.h"
#include "store/store_internal.h"
#include <jansson.h>

/* ---- talking ---- */

static void post(struct client *c, const char *token, const char *extra, const char *path, const char *body)
{
    char headers[512];
    snprintf(headers, sizeof headers, "Authorization: Bearer %s\r\nContent-Type: application/json\r\n%s",
             token, extra);
    client_request(c, "POST", path, headers, body);
}

static void chat(struct client *c, const char *extra, const char *body)
{
    post(c, "alice", extra, "/v1/chat/completions", body);
}

/* The response as JSON; the caller's. */
static json_t *answer(struct client *c, int status)
{
    struct response r = client_response(c, false);
    if (r.status != status)
        fail_msg("status %d instead of %d: %s", r.status, status, r.body ? r.body : "");
    json_t *root = json_loads(r.body, 0, NULL);
    if (!root)
        fail_msg("no JSON: %s", r.body);
    free(r.body);
    return root;
}

static void assert_error(struct client *c, int status, const char *text)
{
    json_t *root = answer(c, status);
    const char *message = json_string_value(json_object_get(json_object_get(root, "error"), "message"));
    if (!message || !strstr(message, text))
        fail_msg("\"%s\" does not say \"%s\"", message ? message : "", text);
    json_decref(root);
}

static const char *content_of(json_t *root)
{
    json_t *choice = json_array_get(json_object_get(root, "choices"), 0);
    return json_string_value(json_object_get(json_object_get(choice, "message"), "content"));
}

/* Ids of a text without special tokens, with the end of a turn behind it if wanted. */
static uint32_t ids_of(const char *text, bool end, int32_t *ids, size_t capacity)
{
    int64_t count = tokenizer_encode(fx.tokenizer, text, strlen(text), NULL, 0, false, ids, capacity);
    assert_true(count > 0 && (size_t)count < capacity);
    if (end)
        ids[count++] = fx.tokenizer->eos;
    return (uint32_t)count;
}

static void reply_with(const struct fake_command *open, const char *text, bool end)
{
    int32_t ids[256];
    uint32_t count = ids_of(text, end, ids, 255);
    fake_opened(open, 0);
    fake_tokens(open, 0, ids, count);
    fake_done(open, end ? FINISH_STOP : FINISH_LENGTH, ids, count);
}

#define HELLO "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]}"

/* ---- requests ---- */

static void test_chat(void **state)
{
    (void)state;
    struct client c = client_open(fx.port);
    chat(&c, "",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],\"max_tokens\":9,\"temperature\":0.5,"
         "\"top_p\":0.9,"
         "\"seed\":5,\"logit_bias\":{\"3\":-2},\"fidelity\":\"exact\",\"cache\":false,\"timings\":true}");
    const struct fake_command *open = fake_next("open");
    assert_true(open->open.direct);
    assert_true(open->open.no_cache);
    assert_int_equal(open->open.accept, KV_ACCEPT_EXACT);
    assert_int_equal(open->open.held_count, 0);
    assert_string_equal(open->open.tenant, "acme");
    assert_string_equal(open->open.principal, "alice");
    const struct engine_generate *g = &open->open.generate;
    assert_int_equal(g->token_count_max, 9);
    assert_true(g->sampling.temperature == 0.5f && g->sampling.top_p == 0.9f && g->sampling.seed == 5);
    assert_int_equal(g->sampling.bias_count, 1);
    assert_int_equal(g->sampling.bias[0].id, 3);
    assert_true(g->sampling.bias[0].bias == -2);
    uint8_t chain[CRYPTO_KEY_SIZE], own[CRYPTO_KEY_SIZE];
    store_chain_key(fx.service.store, "acme", chain, NULL);
    kv_principal_key(chain, "alice", own);
    assert_memory_equal(open->open.shared_key, chain, sizeof chain);
    assert_memory_equal(open->open.own_key, own, sizeof own);
    /* The prompt is the template's text, with its special tokens. */
    struct chat_message message = {"user", "hello", 5};
    struct chat_text text;
    int32_t ids[256];
    assert_int_equal(chat_template_render(CHAT_CHATML, &message, 1, 0, false, true, &text, NULL), 0);
    int64_t count = tokenizer_encode(fx.tokenizer, text.text, text.size, text.special, text.special_count,
                                     text.add_bos, ids, 256);
    chat_text_free(&text);
    assert_int_equal(open->open.prompt_count, count);
    assert_memory_equal(open->open.ids, ids, (size_t)count * sizeof *ids);

    reply_with(open, "good day", true);
    json_t *root = answer(&c, 200);
    assert_string_equal(content_of(root), "good day");
    json_t *usage = json_object_get(root, "usage");
    assert_int_equal(json_integer_value(json_object_get(usage, "prompt_tokens")), count);
    assert_int_equal(json_integer_value(json_object_get(usage, "completion_tokens")),
                     ids_of("good day", true, ids, 255));
    const json_t *timings = json_object_get(root, "timings");
    assert_true(json_number_value(json_object_get(timings, "decode_ms")) == 2000);
    assert_int_equal(json_integer_value(json_object_get(timings, "cached_disk_tokens")), 2);
    assert_int_equal(json_integer_value(json_object_get(timings, "cached_memory_tokens")), 1);
    json_decref(root);
    client_close(&c);
}

static void test_who_may(void **state)
{
    (void)state;
    struct client c = client_open(fx.port);
    post(&c, "mallory", "", "/v1/chat/completions", HELLO);
    assert_error(&c, 401, "API key");
    client_request(&c, "POST", "/v1/chat/completions", "", HELLO);
    assert_error(&c, 401, "API key");
    assert_true(fake_is_quiet());
    client_close(&c);
}

static void test_refused(void **state)
{
    (void)state;
    struct client c = client_open(fx.port);
    chat(&c, "",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]}");
    assert_error(&c, 400, "last message");
    chat(&c, "", "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],\"max_tokens\":4096}");
    assert_error(&c, 400, "maximum context length is 4096 tokens");
    char *body = malloc(40000);
    int n = sprintf(body, "{\"messages\":[{\"role\":\"user\",\"content\":\"");
    memset(body + n, 'x', 20000);
    strcpy(body + n + 20000, "\"}]}");
    chat(&c, "", body);
    assert_error(&c, 400, "maximum context length");
    free(body);
    post(&c, "alice", "", "/v1/completions", "{\"prompt\":\"a\",\"conversation\":\"c\"}");
    assert_error(&c, 400, "conversation");
    chat(&c, "", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"prefer\":\"private\"}");
    assert_error(&c, 400, "cannot be private");
    fake_refuse("open", -TD_ERR_FULL, 1);
    chat(&c, "", HELLO);
    struct response r = client_response(&c, false);
    assert_int_equal(r.status, 429);
    assert_true(response_has(&r, "Retry-After: 1"));
    free(r.body);
    fx.service.draining = true;
    chat(&c, "", HELLO);
    assert_error(&c, 503, "shutting down");
    client_request(&c, "GET", "/health", "", NULL);
    assert_error(&c, 503, "shutting down");
    assert_true(fake_is_quiet());
    client_close(&c);
}

static void test_completions(void **state)
{
    (void)state;
    struct client c = client_open(fx.port);
    post(&c, "alice", "", "/v1/completions", "{\"prompt\":\"the <|im_end|> cat\"}");
    const struct fake_command *open = fake_next("open");
    int32_t ids[256];
    uint32_t count =
        ids_of("the <|im_end|> cat", false, ids, 255); /* what a user wrote is never a special token */
    assert_int_equal(open->open.prompt_count, count);
    assert_memory_equal(open->open.ids, ids, count * sizeof *ids);
    assert_int_equal(open->open.generate.token_count_max, 16);
    reply_with(open, " sat", false);
    json_t *root = answer(&c, 200);
    json_t *choice = json_array_get(json_object_get(root, "choices"), 0);
    assert_string_equal(json_string_value(json_object_get(choice, "text")), " sat");
    assert_string_equal(json_string_value(json_object_get(choice, "finish_reason")), "length");
    assert_null(json_object_get(root, "conversation"));
    json_decref(root);
    post(&c, "alice", "", "/v1/completions", "{\"prompt\":[1,2,3]}");
    open = fake_next("open");
    assert_int_equal(open->open.prompt_count, 3);
    assert_int_equal(open->open.ids[2], 3);
    fake_failed(open, -TD_ERR_NOSPACE, "no room for so long a request", 0);
    assert_error(&c, api_http_status(-TD_ERR_NOSPACE), "no room");
    client_close(&c);
}

static void test_stream_with_logprobs(void **state)
{
    (void)state;
    struct client c = client_open(fx.port);
    chat(&c, "",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],\"stream\":true,\"logprobs\":true,\"top_"
         "logprobs\":2}");
    const struct fake_command *open = fake_next("open");
    assert_true(open->open.generate.sampling.want_logprobs);
    assert_int_equal(open->open.generate.sampling.logprob_count, 2);
    fake_opened(open, 64);
    assert_true(client_wait_for(&c, "\"role\":\"assistant\""));
    enum { COUNT = 70 }; /* more than are handed over at once */
    int32_t ids[COUNT];
    static struct sampled sampled[COUNT];
    for (int i = 0; i < COUNT; i++) {
        ids[i] = sampled[i].id = 'a'; /* some byte's token */
        sampled[i].logprob = -0.5f;
        sampled[i].top_count = 2;
        sampled[i].top[0] = (struct sampler_logprob){'a', -0.5f};
        sampled[i].top[1] = (struct sampler_logprob){'b', -1.5f};
    }
    struct engine_event e = {.type = ENGINE_TOKENS};
    e.tokens.count = COUNT, e.tokens.ids = ids, e.tokens.sampled = sampled;
    fake_emit(open, e);
    fake_done(open, FINISH_LENGTH, ids, COUNT);
    assert_true(client_wait_for(&c, "[DONE]"));
    size_t entries = 0;
    for (const char *p = c.data; (p = strstr(p, "\"logprob\":-1.5")); p++)
        entries++;
    assert_int_equal(entries, COUNT);
    client_close(&c);
}

/* ---- endings ---- */

static void test_stop_string(void **state)
{
    (void)state;
    struct client c = client_open(fx.port);
    uint64_t version;
    int32_t ids[64];
    chat(&c, "",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],\"stop\":[\"END\"],\"conversation\":"
         "\"c1\"}");
    const struct fake_command *open = fake_next("open");
    uint32_t count = ids_of("abcENDxyz", false, ids, 63), until = ids_of("abcEND", false, ids + 32, 31);
    fake_opened(open, 0);
    fake_tokens(open, 0, ids, count);
    const struct fake_command *cancel = fake_next("cancel");
    assert_true(cancel->finished);
    assert_int_equal(cancel->keep_count, until);
    fake_done(open, FINISH_LENGTH, ids, count); /* it was ahead: what is beyond the stop is not kept */
    json_t *root = answer(&c, 200);
    assert_string_equal(content_of(root), "abc");
    json_decref(root);
    struct conversation kept = fixture_conversation("alice", "c1", &version);
    assert_int_equal(kept.ids_count, open->open.prompt_count + until);
    conv_free(&kept);
    client_close(&c);
}

static void count_calls(void *arg)
{
    *(uint32_t *)arg = direct_calls(fx.direct);
}

static void test_client_leaves(void **state)
{
    (void)state;
    uint32_t calls = 1;
    struct client c = client_open(fx.port);
    chat(&c, "", HELLO);
    const struct fake_command *open = fake_next("open");
    client_close(&c);
    const struct fake_command *cancel = fake_next("cancel");
    assert_int_equal(cancel->sequence, open->sequence);
    assert_false(cancel->finished);
    on_loop(count_calls, &calls);
    assert_int_equal(calls, 0);     /* nothing of it stays until the node ends */
    reply_with(open, "late", true); /* to nobody */
    fixture_settle();
    assert_true(fake_is_quiet());
}

/* Gone while the worker still prepares the prompt: nothing is opened, nothing stays. */
static void test_client_leaves_at_once(void **state)
{
    (void)state;
    uint32_t calls = 1;
    for (int i = 0; i < 20; i++) {
        struct client c = client_open(fx.port);
        chat(&c, "", HELLO);
        client_close(&c);
    }
    for (int i = 0; i < 12000 && calls > 0; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
        on_loop(count_calls, &calls);
    }
    assert_int_equal(calls, 0);
    unsigned opened = 0, ended = 0;
    for (; fake.taken < fake.count; fake.taken++) {
        opened += strcmp(fake.commands[fake.taken].name, "open") == 0;
        ended += strcmp(fake.commands[fake.taken].name, "cancel") == 0;
    }
    assert_int_equal(opened, ended);
}

static void test_engine_fails_in_a_stream(void **state)
{
    (void)state;
    struct client c = client_open(fx.port);
    chat(&c, "", "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],\"stream\":true}");
    const struct fake_command *open = fake_next("open");
    fake_opened(open, 0);
    assert_true(client_wait_for(&c, "\"role\":\"assistant\""));
    fake_failed(open, -TD_ERR_INTERNAL, "the engine broke", 0);
    assert_true(client_wait_for(&c, "data: {\"error\""));
    assert_true(client_wait_for(&c, "the engine broke"));
    client_close(&c);
    assert_true(fake_is_quiet());
}

static void test_revoked_token(void **state)
{
    (void)state;
    struct td_error err;
    struct client alice = client_open(fx.port), bob = client_open(fx.port);
    chat(&alice, "", HELLO);
    uint64_t first = fake_next("open")->sequence;
    post(&bob, "bob", "", "/v1/chat/completions", HELLO);
    const struct fake_command *open = fake_next("open");
    fixture_tokens(false);
    assert_int_equal(auth_reload(fx.service.auth, false, &err), 1);
    fixture_tick();
    assert_int_equal(fake_next("cancel")->sequence, first);
    assert_error(&alice, 401, "revoked");
    reply_with(open, "hi", true);
    json_decref(answer(&bob, 200));
    client_close(&alice);
    client_close(&bob);
}

static void end_acme(void *arg)
{
    (void)arg;
    strcpy(fx.service.erasing, "acme");
    direct_end_tenant(fx.direct, "acme", "erased");
}

static void let_acme_in(void *arg)
{
    (void)arg;
    fx.service.erasing[0] = '\0';
}

struct held_job { /* keeps the worker from what comes behind it */
    struct io_job job;
    pthread_mutex_t lock;
};

static void hold_worker(struct io_job *job)
{
    struct held_job *h = (struct held_job *)job;
    pthread_mutex_lock(&h->lock);
    pthread_mutex_unlock(&h->lock);
}

static void held_done(struct io_job *job)
{
    (void)job;
}

static void submit_held(void *arg)
{
    assert_int_equal(io_worker_submit(fx.service.io, arg), 0);
}

static void count_pending(void *arg)
{
    *(size_t *)arg = io_worker_pending(fx.service.io);
}

static void assert_stopped(const char *token, const char *said)
{
    struct client c = client_open(fx.port);
    post(&c, token, "", "/v1/conversations/c1/stop", "");
    struct response r = client_response(&c, false);
    assert_int_equal(r.status, 200);
    assert_string_equal(r.body, said);
    free(r.body);
    client_close(&c);
}

/* The reply is whole: it is answered and kept as it is, once, and the engine hears nothing of it. */
static void test_stopped_while_it_is_stored(void **state)
{
    (void)state;
    struct client c = client_open(fx.port);
    struct held_job held = {.job = {.work = hold_worker, .done = held_done},
                            .lock = PTHREAD_MUTEX_INITIALIZER};
    uint64_t version;
    int32_t ids[64];
    uint32_t count = ids_of("good day", true, ids, 63);
    chat(&c, "", "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],\"conversation\":\"c1\"}");
    const struct fake_command *open = fake_next("open");
    pthread_mutex_lock(&held.lock);
    on_loop(submit_held, &held);
    reply_with(open, "good day", true);
    for (size_t pending = 0; pending < 2;) /* the turn waits behind it */
        on_loop(count_pending, &pending);
    assert_stopped("eve", "{\"id\":\"c1\",\"stopped\":0}");
    assert_stopped("alice", "{\"id\":\"c1\",\"stopped\":1}");
    assert_stopped("alice", "{\"id\":\"c1\",\"stopped\":0}");
    pthread_mutex_unlock(&held.lock);
    json_t *root = answer(&c, 200);
    assert_string_equal(content_of(root), "good day");
    assert_null(json_object_get(root, "conversation_kept"));
    json_decref(root);
    struct conversation kept = fixture_conversation("alice", "c1", &version);
    assert_int_equal(kept.ids_count, open->open.prompt_count + count);
    assert_int_equal(version, 1);
    conv_free(&kept);
    assert_true(fake_is_quiet());
    client_close(&c);
}

/* Its calls end, whoever has them; it is not let in until all is done; another tenant notices nothing. */
static void test_a_tenant_is_ended(void **state)
{
    (void)state;
    struct client alice = client_open(fx.port), bob = client_open(fx.port), eve = client_open(fx.port);
    chat(&alice, "", HELLO);
    uint64_t first = fake_next("open")->sequence;
    post(&eve, "eve", "", "/v1/chat/completions", HELLO);
    const struct fake_command *open = fake_next("open");
    struct held_job held = {.job = {.work = hold_worker, .done = held_done},
                            .lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_mutex_lock(&held.lock);
    on_loop(submit_held, &held);
    post(&bob, "bob", "", "/v1/chat/completions", HELLO); /* PREPARING, behind it */
    for (uint32_t calls = 0; calls < 3;)
        on_loop(count_calls, &calls);
    on_loop(end_acme, NULL);
    assert_int_equal(fake_next("cancel")->sequence, first);
    assert_error(&alice, 503, "erased");
    assert_error(&bob, 503, "erased");
    chat(&alice, "", HELLO);
    assert_error(&alice, 503, "try again");
    client_request(&bob, "GET", "/v1/conversations", "Authorization: Bearer bob\r\n", NULL);
    assert_error(&bob, 503, "try again");
    pthread_mutex_unlock(&held.lock);
    assert_true(fake_is_quiet()); /* bob's prompt is ready, and nobody wants it */
    reply_with(open, "hi", true);
    json_decref(answer(&eve, 200));
    on_loop(let_acme_in, NULL);
    chat(&alice, "", HELLO);
    reply_with(fake_next("open"), "hi", true);
    json_decref(answer(&alice, 200));
    client_close(&alice);
    client_close(&bob);
    client_close(&eve);
}

/* ---- conversations ---- */

static char *id_told(json_t *root)
{
    return strdup(json_string_value(json_object_get(root, "conversation")));
}

/* A client that re-sends its history, as every OpenAI client does: stored ids are used again, replies included. */
static void test_history_is_matched(void **state)
{
    (void)state;
    struct client c = client_open(fx.port);
    uint64_t version;
    int32_t known[512];
    chat(&c, "", HELLO);
    const struct fake_command *open = fake_next("open");
    int32_t ids[2] = {'h' - 33 + 1, fx.tokenizer->eos}; /* a reply that no tokenizer would have made */
    uint32_t prompt = open->open.prompt_count;
    memcpy(known, open->open.ids, prompt * sizeof *known);
    memcpy(known + prompt, ids, sizeof ids);
    fake_opened(open, 0);
    fake_tokens(open, 0, ids, 2);
    fake_done(open, FINISH_STOP, ids, 2);
    json_t *root = answer(&c, 200);
    char *id = id_told(root), body[512];
    snprintf(body, sizeof body,
             "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"},{\"role\":\"assistant\",\"content\":"
             "\"%s\"},"
             "{\"role\":\"user\",\"content\":\"more\"}]}",
             content_of(root));
    json_decref(root);
    chat(&c, "", body); /* at once: the turn was durable before the reply's end was sent */
    open = fake_next("open");
    assert_true(open->open.prompt_count > prompt + 2);
    assert_memory_equal(open->open.ids, known, (prompt + 2) * sizeof *known);
    reply_with(open, "yes", true);
    root = answer(&c, 200);
    char *second = id_told(root);
    assert_string_equal(id, second);
    json_decref(root);
    struct conversation kept = fixture_conversation("alice", id, &version);
    assert_int_equal(kept.boundary_count, 2);
    assert_string_equal(kept.title, "hello");
    conv_free(&kept);
    free(id);
    free(second);
    client_close(&c);
}

static _Atomic uint64_t clock_behind_us; /* how far the clock was set back */
uint64_t __real_clock_wall_us(void);
uint64_t __wrap_clock_wall_us(void);

uint64_t __wrap_clock_wall_us(void)
{
    return __real_clock_wall_us() - clock_behind_us;
}

static void test_idempotency_key(void **state)
{
    (void)state;
    static const char key[] = "Idempotency-Key: once-42\r\n";
    struct client c = client_open(fx.port);
    uint8_t chain[CRYPTO_KEY_SIZE], own[CRYPTO_KEY_SIZE], request_id[GEN_REQUEST_ID_SIZE];
    uint64_t seed, version;
    store_chain_key(fx.service.store, "acme", chain, NULL);
    kv_principal_key(chain, "alice", own);
    gen_id_from_key(own, "once-42", request_id, &seed);
    chat(&c, key, HELLO);
    const struct fake_command *first = fake_next("open");
    assert_memory_equal(first->open.request_id, request_id, sizeof request_id);
    assert_true(first->open.generate.sampling.seed == seed);
    reply_with(first, "done", true);
    json_t *root = answer(&c, 200);
    char *id = id_told(root);
    json_decref(root);
    clock_behind_us = UINT64_C(3600000000);
    chat(&c, key, HELLO);
    const struct fake_command *again = fake_next("open");
    clock_behind_us = 0;
    assert_memory_equal(again->open.request_id, request_id, sizeof request_id);
    assert_true(again->open.attempt > first->open.attempt);
    assert_int_equal(again->open.prompt_count,
                     first->open.prompt_count); /* the same prompt, not one turn more */
    assert_memory_equal(again->open.ids, first->open.ids, first->open.prompt_count * sizeof(int32_t));
    reply_with(again, "done", true);
    root = answer(&c, 200);
    assert_string_equal(content_of(root), "done");
    json_decref(root);
    struct conversation kept = fixture_conversation("alice", id, &version);
    assert_int_equal(kept.boundary_count, 1);
    assert_int_equal(version, 1);
    conv_free(&kept);
    chat(&c, "", HELLO); /* without a key every request is another one */
    again = fake_next("open");
    assert_memory_not_equal(again->open.request_id, request_id, sizeof request_id);
    assert_true(again->open.generate.sampling.seed != seed);
    free(id);
    client_close(&c);
}

static void test_conflict(void **state)
{
    (void)state;
    static const char body[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],\"conversation\":\"c1\"}";
    struct client a = client_open(fx.port), b = client_open(fx.port);
    chat(&a, "", body);
    const struct fake_command *first = fake_next("open");
    chat(&b, "", body);
    const struct fake_command *second = fake_next("open");
    reply_with(first, "one", true);
    json_decref(answer(&a, 200));
    reply_with(second, "two", true);
    assert_error(&b, 409, "meanwhile");
    client_close(&a);
    client_close(&b);
}

static void test_an_unknown_conversation(void **state)
{
    (void)state;
    struct client c = client_open(fx.port);
    chat(&c, "",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}],"
         "\"conversation\":\"conv-0123456789abcdef01234567\"}");
    assert_error(&c, 404,
                 "there is no conversation conv-0123456789abcdef01234567; leave the id out to begin one");
    client_close(&c);
}

static void store_is_full(bool full)
{
    fx.service.store->limit_size = full ? 1 : UINT64_C(1) << 40;
}

static void ask_c1(struct client *c)
{
    chat(c, "", "{\"messages\":[{\"role\":\"user\",\"content\":\"m\"}],\"conversation\":\"c1\"}");
}

/* The reply is good and says that its turn was not kept; by its name alone the conversation does not go on, with the history it does. */
static void test_a_full_disk_is_told(void **state)
{
    (void)state;
    struct client c = client_open(fx.port);
    ask_c1(&c);
    reply_with(fake_next("open"), "one", true);
    struct response r = client_response(&c, false);
    assert_int_equal(r.status, 200);
    assert_null(strstr(r.body, "conversation_kept"));
    assert_false(response_has(&r, "X-Conversation-Kept"));
    free(r.body);

    store_is_full(true);
    ask_c1(&c);
    reply_with(fake_next("open"), "two", true);
    r = client_response(&c, false);
    assert_int_equal(r.status, 200);
    assert_non_null(strstr(r.body, "\"two\""));
    assert_non_null(strstr(r.body, "\"conversation\":\"c1\",\"conversation_kept\":false"));
    assert_true(response_has(&r, "X-Conversation-Kept: false"));
    free(r.body);
    store_is_full(false);
    ask_c1(&c);
    assert_error(&c, 409, "was not kept: it holds 1;");

    store_is_full(true);
    chat(&c, "",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"m\"},{\"role\":\"assistant\",\"content\":\"one\"},"
         "{\"role\":\"user\",\"content\":\"m\"}],\"conversation\":\"c1\",\"stream\":true}");
    reply_with(fake_next("open"), "two", true);
    r = client_response(&c, false);
    assert_int_equal(r.status, 200);
    const char *told = strstr(r.body, "\"conversation_kept\":false");
    assert_non_null(told);
    assert_null(strstr(told, "\"role\"")); /* at the end of the stream */
    free(r.body);
    store_is_full(false);
    chat(&c, "",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"m\"},{\"role\":\"assistant\",\"content\":\"one\"},"
         "{\"role\":\"user\",\"content\":\"m\"}],\"conversation\":\"c1\"}");
    reply_with(fake_next("open"), "two", true);
    json_decref(answer(&c, 200));
    ask_c1(&c);
    reply_with(fake_next("open"), "three", true);
    json_decref(answer(&c, 200));
    client_close(&c);
}

static void test_conversation_list(void **state)
{
    (void)state;
    static const char alice[] = "Authorization: Bearer alice\r\n", eve[] = "Authorization: Bearer eve\r\n";
    struct client c = client_open(fx.port);
    chat(&c, "", "{\"messages\":[{\"role\":\"user\",\"content\":\"h\xc3\xa9llo\"}],\"conversation\":\"c1\"}");
    reply_with(fake_next("open"), "bye", true);
    json_decref(answer(&c, 200));
    client_request(&c, "GET", "/v1/conversations", alice, NULL);
    json_t *root = answer(&c, 200), *data = json_object_get(root, "data"), *first = json_array_get(data, 0);
    assert_int_equal(json_array_size(data), 1);
    assert_string_equal(json_string_value(json_object_get(first, "id")), "c1");
    assert_string_equal(json_string_value(json_object_get(first, "title")), "h\xc3\xa9llo");
    assert_int_equal(json_integer_value(json_object_get(first, "messages")), 2);
    assert_true(json_integer_value(json_object_get(first, "updated")) > 1700000000);
    json_decref(root);
    client_request(&c, "GET", "/v1/conversations/c1", alice, NULL);
    root = answer(&c, 200);
    const char *text = json_string_value(json_object_get(root, "text"));
    assert_non_null(strstr(text, "h\xc3\xa9llo"));
    assert_non_null(strstr(text, "bye"));
    assert_non_null(strstr(text, "<|im_start|>"));
    json_decref(root);
    client_request(&c, "GET", "/v1/conversations", eve, NULL); /* another tenant sees nothing of it */
    root = answer(&c, 200);
    assert_int_equal(json_array_size(json_object_get(root, "data")), 0);
    json_decref(root);
    client_request(&c, "GET", "/v1/conversations/c1", eve, NULL);
    assert_error(&c, 404, "no such conversation");
    client_request(&c, "DELETE", "/v1/conversations/c1", eve, NULL);
    assert_error(&c, 404, "no such conversation");
    client_request(&c, "DELETE", "/v1/conversations/c1", alice, NULL);
    json_decref(answer(&c, 200));
    client_request(&c, "GET", "/v1/conversations/c1", alice, NULL);
    assert_error(&c, 404, "no such conversation");
    client_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_chat),
        TEST(test_who_may),
        TEST(test_refused),
        TEST(test_completions),
        TEST(test_stream_with_logprobs),
        TEST(test_stop_string),
        TEST(test_client_leaves),
        TEST(test_client_leaves_at_once),
        TEST(test_engine_fails_in_a_stream),
        TEST(test_revoked_token),
        TEST(test_stopped_while_it_is_stored),
        TEST(test_a_tenant_is_ended),
        TEST(test_history_is_matched),
        TEST(test_idempotency_key),
        TEST(test_conflict),
        TEST(test_an_unknown_conversation),
        TEST(test_a_full_disk_is_told),
        TEST(test_conversation_list),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
