/* agent_rig: an agent with a tiny model, a store in a temporary folder and a fake cloud, and clients that write down what they hear. */
#ifndef TANDEM_TESTS_AGENT_RIG_H
#define TANDEM_TESTS_AGENT_RIG_H
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include "edge/agent.h"
#include "fake_cloud.h"
#include "kernels/kv_layout.h"
#include "shared/crypto.h"
#include "shared/log.h"
#include <ftw.h>
#include <unistd.h>
#include <cmocka.h>

#define RIG_MODEL "/tiny/llama-gqa-untied.gguf" /* 2 layers, context 512 */

struct client { /* of a rig, which frees it */
    struct client *next;
    struct agent *agent;
    struct flight *flight;
    struct api_request request;
    struct chat_message messages[8];
    char key[64], stop_text[16];
    int begin_code;
    uint32_t cancel_at; /* tokens after which the client leaves; 0: never */
    uint32_t finish_at; /* tokens after which its stop string is complete */
    uint32_t then_at;   /* tokens after which `then` is called, on the loop; once */
    void (*then)(void *arg);
    void *then_arg;

    unsigned started, done, failed, not_kept;
    char conversation[LIMIT_NAME_SIZE + 1];
    int32_t ids[600];
    float logprobs[600]; /* 1: none came with it */
    uint32_t top_counts[600];
    int32_t last_top_ids[600];
    uint32_t count;
    unsigned finish;
    struct api_usage usage, start_usage;
    struct api_timings timings;
    int code;
    char text[400];
    uint32_t context_max, asked, prompt, retry_ms;
};

struct rig {
    struct fake_cloud cloud;
    struct agent *agent;
    struct agent_config config;
    char dir[64], model[128], data[128];
    struct client *clients;
};

/* ---- what a client hears ---- */

static inline void client_started(void *ctx, const char *conversation, const struct api_usage *usage)
{
    struct client *c = ctx;
    c->started++;
    c->start_usage = *usage;
    snprintf(c->conversation, sizeof c->conversation, "%s", conversation);
}

static inline void client_tokens(void *ctx, const int32_t *ids, size_t count,
                                 const struct api_logprob_in *logprobs)
{
    struct client *c = ctx;
    for (size_t i = 0; i < count && c->count < TD_COUNT(c->ids); i++) {
        uint32_t tops = logprobs ? logprobs[i].top_count : 0;
        c->logprobs[c->count] = logprobs ? logprobs[i].logprob : 1;
        c->top_counts[c->count] = tops;
        c->last_top_ids[c->count] = tops ? logprobs[i].top_ids[tops - 1] : 0;
        c->ids[c->count++] = ids[i];
    }
    if (c->then_at && c->count >= c->then_at) {
        c->then_at = 0;
        c->then(c->then_arg);
    }
    if (c->cancel_at && c->count >= c->cancel_at)
        agent_cancel(c->flight, false, 0);
    else if (c->finish_at && c->count >= c->finish_at)
        agent_cancel(c->flight, true, c->count);
}

static inline void client_done(void *ctx, unsigned finish, const struct api_usage *usage,
                               const struct api_timings *timings)
{
    struct client *c = ctx;
    c->done++;
    c->finish = finish;
    c->usage = *usage;
    c->timings = *timings;
}

static inline void client_failed(void *ctx, int code, const char *text, uint32_t retry_after_ms)
{
    struct client *c = ctx;
    c->failed++;
    c->code = code;
    c->retry_ms = retry_after_ms;
    snprintf(c->text, sizeof c->text, "%s", text);
}

static inline void client_failed_context(void *ctx, uint32_t context_max, uint32_t asked, uint32_t prompt)
{
    struct client *c = ctx;
    c->failed++;
    c->code = -TD_ERR_CONTEXT;
    c->context_max = context_max;
    c->asked = asked;
    c->prompt = prompt;
}

static inline void client_not_kept(void *ctx)
{
    ((struct client *)ctx)->not_kept++;
}

static const struct agent_sink client_sink = {client_started, client_tokens,         client_done,
                                              client_failed,  client_failed_context, client_not_kept};

static inline struct client *client_make(struct rig *r)
{
    struct client *c = calloc(1, sizeof *c);
    c->next = r->clients;
    r->clients = c;
    c->agent = r->agent;
    c->request.chat = true;
    c->request.messages = c->messages;
    c->request.accept = KV_ACCEPT_VISIBLE_LOSSLESS;
    c->request.sampling.temperature = 1;
    c->request.sampling.top_p = 1;
    return c;
}

static inline void client_says(struct client *c, const char *role, const char *content)
{
    c->messages[c->request.message_count++] = (struct chat_message){role, content, strlen(content)};
}

/* One user message. */
static inline struct client *client_asks(struct rig *r, const char *content)
{
    struct client *c = client_make(r);
    client_says(c, "user", content);
    return c;
}

static inline void client_begin(void *arg)
{
    struct client *c = arg;
    struct td_error err = {0};
    c->begin_code = agent_begin(c->agent, &c->request, "local", c->key, &client_sink, c, &c->flight, &err);
    if (c->begin_code < 0)
        snprintf(c->text, sizeof c->text, "%s", err.text);
}

static inline bool client_ended(void *arg)
{
    struct client *c = arg;
    return c->done || c->failed;
}

/* Ask and wait for the end; asserts that it was `done`. */
static inline void client_run(struct rig *r, struct client *c)
{
    on_loop(r->cloud.loop, client_begin, c);
    assert_int_equal(c->begin_code, 0);
    assert_true(comes_true(r->cloud.loop, client_ended, c));
}

static inline void client_check_reply(const struct client *c, uint32_t count)
{
    assert_int_equal(c->failed, 0);
    assert_int_equal(c->done, 1);
    assert_int_equal(c->started, 1);
    assert_int_equal(c->count, count);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(c->ids[i], fake_token(i));
    assert_int_equal(c->usage.completion_tokens, count);
}

/* ---- the rig ---- */

static inline void copy_file(const char *from, const char *to)
{
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    assert_non_null(in);
    assert_non_null(out);
    char buffer[65536];
    size_t size;
    while ((size = fread(buffer, 1, sizeof buffer, in)) > 0)
        assert_int_equal(fwrite(buffer, 1, size, out), size);
    fclose(in);
    fclose(out);
}

static inline void model_layout(const char *path, uint8_t out[32])
{
    struct gguf *file;
    struct model *model;
    assert_int_equal(gguf_open(path, &file, NULL), 0);
    assert_int_equal(model_load(file, &model, NULL), 0);
    model_layout_hash(model, out);
    model_free(model);
    gguf_close(file);
}

/* Not started: config and cloud can still be changed. */
static inline void rig_make(struct rig *r, uint32_t layers)
{
    uint8_t layout[32];
    memset(r, 0, sizeof *r);
    snprintf(r->dir, sizeof r->dir, "/tmp/td-agent-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->model, sizeof r->model, "%s/model.gguf", r->dir);
    snprintf(r->data, sizeof r->data, "%s/data", r->dir);
    copy_file(TEST_DATA RIG_MODEL, r->model);
    model_layout(r->model, layout);
    assert_int_equal(fake_cloud_make(&r->cloud, layout), 0);
    r->config = (struct agent_config){.model_path = r->model,
                                      .chat_template = "chatml",
                                      .cloud_host = "localhost",
                                      .cloud_port = r->cloud.port,
                                      .token = "secret",
                                      .edge_layers = layers,
                                      .codec = kv_level_find("l1"),
                                      .hidden_dtype = HIDDEN_F16,
                                      .accept = KV_ACCEPT_VISIBLE_LOSSLESS,
                                      .chunk_tokens = 64,
                                      .threads = 1,
                                      .kv_memory = 1u << 20,
                                      .data_dir = r->data,
                                      .cloud_timeout_ms = 60000};
}

static inline void rig_connect(void *arg)
{
    agent_connect(arg);
}

/* Without a connection yet. */
static inline void rig_start(struct rig *r)
{
    struct td_error err = {0};
    if (agent_create(&r->config, r->cloud.loop, &r->agent, &err) < 0)
        fail_msg("%s", err.text);
    fake_cloud_run(&r->cloud);
}

static inline void rig_run(struct rig *r)
{
    rig_start(r);
    on_loop(r->cloud.loop, rig_connect, r->agent);
}

static inline int rig_remove(const char *path, const struct stat *s, int type, struct FTW *f)
{
    (void)s, (void)type, (void)f;
    return remove(path);
}

static inline void rig_end(struct rig *r)
{
    fake_cloud_stop(&r->cloud);
    agent_shutdown(r->agent);
    fake_cloud_free(&r->cloud);
    agent_destroy(r->agent);
}

/* Another cloud, and no agent yet: the next one finds the folder of the one before. */
static inline void rig_make_again(struct rig *r)
{
    uint8_t layout[32];
    rig_end(r);
    model_layout(r->model, layout);
    assert_int_equal(fake_cloud_make(&r->cloud, layout), 0);
    r->config.cloud_port = r->cloud.port;
}

static inline void rig_clear(struct rig *r)
{
    while (r->clients) {
        struct client *next = r->clients->next;
        free(r->clients);
        r->clients = next;
    }
    nftw(r->dir, rig_remove, 16, FTW_DEPTH | FTW_PHYS);
}

static inline void rig_free(struct rig *r)
{
    rig_end(r);
    rig_clear(r);
}

/* ---- replies of one token over and over: a bias makes each token that the device draws this one ---- */

#define RIG_TOKEN 20

static inline struct client *rig_asks(struct rig *r, uint32_t token_count)
{
    struct client *c = client_asks(r, "hello");
    c->request.max_tokens = token_count;
    c->request.ignore_end = true;
    c->request.sampling.repetition_penalty = 1;
    c->request.sampling.bias_count = 1;
    c->request.sampling.bias[0] = (struct sampler_bias){RIG_TOKEN, 100};
    return c;
}

/* The reply is whole, and every token of it the one that the bias makes. */
static inline void assert_all_own(const struct client *c, uint32_t count)
{
    assert_int_equal(c->failed, 0);
    assert_int_equal(c->done, 1);
    assert_int_equal(c->started, 1);
    assert_int_equal(c->count, count);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(c->ids[i], RIG_TOKEN);
    assert_int_equal(c->usage.completion_tokens, count);
}

static const char long_text[] =
    "The keeper of the lighthouse had been told to light the lamp at dusk and to put it out at dawn, and to "
    "write down every ship that passed, and he "
    "did so for thirty years without a word, until one evening no ship came and no gull cried.";

static inline bool planned_for_the_cloud(void *arg)
{
    struct rig *r = arg;
    const struct fake_plan *p = &r->cloud.plans[(r->cloud.plan_count + FAKE_PLANS - 1) % FAKE_PLANS];
    return r->cloud.plan_count > 1 && p->range_count == 1 && p->ranges[0].layers == 0;
}

static inline void let_tokens(void *arg)
{
    struct rig *r = arg;
    r->cloud.silent = false;
    r->cloud.hold_at = 0;
}

/* The reply's text, as a client would send it back. */
static inline char *text_of(struct rig *r, const struct client *c)
{
    int64_t size = tokenizer_decode(agent_tokenizer(r->agent), c->ids, c->count, false, NULL, 0);
    char *text = malloc((size_t)size + 1);
    tokenizer_decode(agent_tokenizer(r->agent), c->ids, c->count, false, text, (size_t)size);
    text[size] = '\0';
    return text;
}

static inline int rig_set_up(void **state)
{
    (void)state;
    log_set_level(LOG_ERROR);
    return crypto_init();
}
#endif
