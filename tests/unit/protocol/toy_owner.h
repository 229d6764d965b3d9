/* toy_owner: an owner of API calls whose replies are what the prompt says, on a real net loop in a thread of its own.
 *
 * The last message (or the prompt) is a command and a text; the text is replied byte by byte, a token each:
 *   say T      token by token          batch T   all in one api_tokens       length T   ends with finish "length"
 *   late T     says T, ends 30 ms later
 *   later T    on the next turn        hang T    says T, then never ends     hang       never even starts
 *   error N    api_error(-N) at once   broken T  says T, then api_error(INTERNAL)        context   api_error_context
 *   long reply the same, for what it asks for
 *   refuse     start() fails           flood     replies until it is cancelled
 *   hold T     says T, ends (as cancelled) when it is told that it is finished */
#ifndef TANDEM_TESTS_TOY_OWNER_H
#define TANDEM_TESTS_TOY_OWNER_H
#include "http_client.h"
#include "protocol/api.h"
#include "protocol/wire.h"
#include "../shared/gguf_build.h"
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>

#define TOY_END 256 /* id of the end token */

static struct toy {
    struct net_loop *loop;
    struct api_server *server;
    struct tokenizer *tokenizer;
    struct gguf *gguf;
    struct bytes file;
    pthread_t thread;
    uint16_t port;
    /* cancels: not finished; finishes: cancelled as finished; ends: by timer */
    atomic_int starts, cancels, finishes, ends;
    atomic_uint keep_count;
    atomic_ulong flooded;
    char last_key[LIMIT_IDEMPOTENCY_SIZE + 1], last_conversation[LIMIT_NAME_SIZE + 1],
        last_principal[LIMIT_NAME_SIZE + 1];
    struct inbox *inbox;
    struct io_worker *worker;
    sem_t *disk;       /* lists of conversations wait for it; NULL: they do not */
    bool filter_upper; /* the output filter: upper case, one byte held back until flush */
    char filter_held;
} toy;

struct toy_call {
    struct api_call *call; /* NULL: cancelled */
    struct net_timer *timer;
    char *text;
    bool logprobs, flooding, said, holding;
};

/* ---- a tokenizer whose ids are bytes ------------------------------------------------------------------------ */

static inline void toy_make_tokenizer(void)
{
    struct gguf_build g = {0};
    static char texts[TOY_END][4];
    const char *tokens[TOY_END + 2];
    int32_t types[TOY_END + 2];
    uint32_t other = 256;
    for (uint32_t b = 0; b < 256;
         b++) { /* the byte alphabet of GPT-2: printable Latin-1 as it is, the rest from U+0100 on */
        bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b != 0xad);
        uint32_t cp = printable ? b : other++;
        if (cp < 0x80)
            texts[b][0] = (char)cp;
        else
            texts[b][0] = (char)(0xc0 | cp >> 6), texts[b][1] = (char)(0x80 | (cp & 0x3f));
        tokens[b] = texts[b], types[b] = 1;
    }
    tokens[TOY_END] = "<|im_end|>", types[TOY_END] = 3;
    tokens[TOY_END + 1] = "th", types[TOY_END + 1] = 1;
    const char *merges[] = {"t h"};
    key_string(&g, "general.architecture", "llama");
    key_string(&g, "tokenizer.ggml.model", "gpt2");
    key_string(&g, "tokenizer.ggml.pre", "smollm");
    key_strings(&g, "tokenizer.ggml.tokens", tokens, TOY_END + 2);
    key_array32(&g, "tokenizer.ggml.token_type", GGUF_VALUE_I32, types, TOY_END + 2);
    key_strings(&g, "tokenizer.ggml.merges", merges, 1);
    key_u32(&g, "tokenizer.ggml.eos_token_id", TOY_END);
    struct td_error err = {0};
    toy.file = gguf_build_end(&g);
    if (gguf_parse(toy.file.data, toy.file.size, &toy.gguf, &err) ||
        tokenizer_create(toy.gguf, NULL, &toy.tokenizer, &err)) {
        fprintf(stderr, "%s\n", err.text);
        abort();
    }
}

/* ---- the owner --------------------------------------------------------------------------------------------- */

static inline void toy_free(struct toy_call *t)
{
    net_timer_destroy(t->timer);
    free(t->text);
    free(t);
}

static inline void toy_say(struct toy_call *t, const char *text, bool batch)
{
    size_t size = strlen(text);
    int32_t ids[4096];
    struct api_logprob_in odds[4096];
    static const int32_t top_ids[] = {'a', 'b'};
    static const float top_odds[] = {-0.25f, -1.5f};
    for (size_t i = 0; i < size; i++) {
        ids[i] = (unsigned char)text[i];
        odds[i] = (struct api_logprob_in){-0.5f, 2, top_ids, top_odds};
    }
    if (batch)
        api_tokens(t->call, ids, size, t->logprobs ? odds : NULL);
    else
        for (size_t i = 0; i < size && t->call; i++)
            api_tokens(t->call, &ids[i], 1, t->logprobs ? &odds[i] : NULL);
}

static inline void toy_done(struct toy_call *t, unsigned finish)
{
    struct api_usage usage = {10, (uint32_t)strlen(t->text), 4};
    struct api_timings timings = {
        .edge_layers = 3,
        .total_ms = 12.5,
        .uplink_bytes = 77,
        .plan = {.chosen = true, .plan_count = 2, .layers = 15, .kv_tokens = 640, .t16_ms = 99.5}};
    int32_t end = TOY_END;
    if (!t->call)
        return;
    if (finish == FINISH_STOP)
        api_tokens(t->call, &end, 1, t->logprobs ? &(struct api_logprob_in){-0.5f, 0, NULL, NULL} : NULL);
    api_done(t->call, finish, &usage, &timings);
    toy_free(t);
}

static inline void toy_on_timer(void *ctx)
{
    struct toy_call *t = ctx;
    if (!t->flooding) {
        if (!t->said)
            toy_say(t, t->text, false);
        atomic_fetch_add(&toy.ends, 1);
        toy_done(t, FINISH_STOP);
        return;
    }
    char block[1025];
    memset(block, 'x', 1024);
    block[1024] = '\0';
    for (int i = 0; i < 64 && t->call; i++) {
        toy_say(t, block, true);
        atomic_fetch_add(&toy.flooded, 1024);
    }
    if (t->call)
        net_timer_start(t->timer, 1);
    else
        toy_free(t);
}

static inline int toy_start(void *ctx, struct api_call *call, const struct api_identity *who,
                            const struct api_request *request, const char *key, void **handle,
                            struct td_error *err)
{
    (void)ctx;
    const char *said =
        request->chat ? request->messages[request->message_count - 1].content : request->prompt;
    const char *text = said ? strchr(said, ' ') : NULL;
    struct toy_call *t = calloc(1, sizeof *t);
    t->call = call, t->logprobs = request->sampling.want_logprobs;
    t->timer = net_timer_create(toy.loop, toy_on_timer, t);
    t->text = strdup(text ? text + 1 : "");
    *handle = t;
    atomic_fetch_add(&toy.starts, 1);
    snprintf(toy.last_key, sizeof toy.last_key, "%s", key);
    snprintf(toy.last_principal, sizeof toy.last_principal, "%s", who->principal);
    snprintf(toy.last_conversation, sizeof toy.last_conversation, "%s",
             request->conversation ? request->conversation : "");
    if (!said || strncmp(said, "refuse", 6) == 0) {
        toy_free(t);
        return td_fail(err, -TD_ERR_BLOCKED, "the prompt holds a blocked word");
    }
    if (strcmp(said, "hang") == 0)
        return 0;
    if (strncmp(said, "error ", 6) == 0) {
        api_error(call, -atoi(t->text), "it went wrong", 2500);
        toy_free(t);
        return 0;
    }
    if (strcmp(said, "context") == 0 || strcmp(said, "long reply") == 0) {
        api_error_context(call, 2048, 3000, said[0] == 'c' ? 2990 : 1000);
        toy_free(t);
        return 0;
    }
    struct api_usage prompt = {10, 0, 4};
    api_started(call, request->conversation, &prompt);
    if (!t->call)
        return 0;
    t->flooding = strcmp(said, "flood") == 0;
    if (strncmp(said, "late ", 5) == 0) {
        toy_say(t, t->text, false);
        t->said = true;
        net_timer_start(t->timer, 30000);
        return 0;
    }
    if (strncmp(said, "later", 5) == 0 || t->flooding) {
        net_timer_start(t->timer, 1000);
        return 0;
    }
    toy_say(t, t->text, strncmp(said, "batch", 5) == 0);
    t->holding = strncmp(said, "hold", 4) == 0;
    if (t->holding)
        return 0;
    if (strncmp(said, "broken", 6) == 0) {
        api_error(call, -TD_ERR_INTERNAL, "it broke", 0);
        toy_free(t);
    } else if (strncmp(said, "hang", 4) != 0) {
        toy_done(t, strncmp(said, "length", 6) == 0 ? FINISH_LENGTH : FINISH_STOP);
    }
    return 0;
}

static inline void toy_cancel(void *ctx, void *handle, bool finished, uint32_t keep_count)
{
    (void)ctx;
    struct toy_call *t = handle;
    atomic_fetch_add(finished ? &toy.finishes : &toy.cancels, 1);
    atomic_store(&toy.keep_count, keep_count);
    if (!t)
        abort();
    if (finished && t->holding)
        toy_done(t, FINISH_CANCELLED);
    if (finished)
        return;
    t->call = NULL;
    if (!t->flooding)
        toy_free(t);
}

static inline int toy_authenticate(void *ctx, const char *bearer, struct api_identity *out)
{
    (void)ctx;
    if (strcmp(bearer, "secret") != 0 && strspn(bearer, "k") < LIMIT_TOKEN_SIZE)
        return -TD_ERR_AUTH;
    snprintf(out->tenant, sizeof out->tenant, "t");
    snprintf(out->principal, sizeof out->principal, "alice");
    return 0;
}

static inline int toy_filter(void *ctx, void *handle, const char *text, size_t size, bool flush, char **out,
                             size_t *out_size)
{
    (void)ctx, (void)handle;
    size_t n = 0;
    *out = malloc(size + 1);
    for (size_t i = 0; i < size; i++) {
        char c = text[i] >= 'a' && text[i] <= 'z' ? (char)(text[i] - 32) : text[i];
        if (toy.filter_held)
            (*out)[n++] = toy.filter_held;
        toy.filter_held = c;
    }
    if (flush && toy.filter_held) {
        (*out)[n++] = toy.filter_held;
        toy.filter_held = 0;
    }
    *out_size = n;
    return 0;
}

static inline int toy_conversations(void *ctx, const struct api_identity *who, char **json)
{
    (void)ctx, (void)who;
    if (toy.disk)
        sem_wait(toy.disk);
    *json = strdup("{\"object\":\"list\",\"data\":[]}");
    return 0;
}

static inline int toy_show(void *ctx, const struct api_identity *who, const char *id, char **json)
{
    (void)ctx, (void)who;
    if (strcmp(id, "known") != 0)
        return -TD_ERR_NOTFOUND;
    *json = strdup("{\"id\":\"known\"}");
    return 0;
}

static inline int toy_delete(void *ctx, const struct api_identity *who, const char *id)
{
    (void)ctx, (void)who;
    return strcmp(id, "known") == 0 ? 0 : -TD_ERR_NOTFOUND;
}

/* Says what it was asked. */
static inline int toy_verb(const char *verb, const char *id, char **json)
{
    char text[128];
    if (strcmp(id, "known") != 0)
        return -TD_ERR_NOTFOUND;
    snprintf(text, sizeof text, "{\"%s\":\"%s\"}", verb, id);
    *json = strdup(text);
    return 0;
}

static inline int toy_fork(void *ctx, const struct api_identity *who, const char *id, char **json)
{
    (void)ctx, (void)who;
    return toy_verb("fork", id, json);
}

static inline int toy_pin(void *ctx, const struct api_identity *who, const char *id, bool pinned, char **json)
{
    (void)ctx, (void)who;
    return toy_verb(pinned ? "pin" : "unpin", id, json);
}

static inline int toy_export(void *ctx, const struct api_identity *who, const char *id, char **json)
{
    (void)ctx, (void)who;
    return toy_verb("export", id, json);
}

static inline int toy_import(void *ctx, const struct api_identity *who, const char *body, size_t size,
                             char **json, struct td_error *err)
{
    (void)ctx, (void)who;
    if (size != 4 || memcmp(body, "good", 4) != 0)
        return td_fail(err, -TD_ERR_FORMAT, "this is no conversation");
    return toy_verb("import", "known", json);
}

/* ---- the loop ---------------------------------------------------------------------------------------------- */

static inline void *toy_run(void *arg)
{
    net_loop_run(arg);
    return NULL;
}

static inline void toy_set_up(const struct net_listen *listen, uint32_t call_count_max, bool filter)
{
    static struct api_ops ops;
    struct td_error err = {0};
    ops = (struct api_ops){.authenticate = toy_authenticate,
                           .start = toy_start,
                           .cancel = toy_cancel,
                           .filter_output = filter ? toy_filter : NULL,
                           .conversations = toy_conversations,
                           .conversation_show = toy_show,
                           .conversation_delete = toy_delete,
                           .conversation_fork = toy_fork,
                           .conversation_pin = toy_pin,
                           .conversation_export = toy_export,
                           .conversation_import = toy_import};
    toy = (struct toy){0};
    toy_make_tokenizer();
    toy.loop = net_loop_create(&err);
    toy.inbox = inbox_create(toy.loop);
    toy.worker = io_worker_create(toy.inbox);
    struct api_config config = {.loop = toy.loop,
                                .tokenizer = toy.tokenizer,
                                .model_name = "toy",
                                .ops = &ops,
                                .worker = toy.worker,
                                .require_json = true,
                                .call_count_max = call_count_max};
    toy.server = api_create(&config);
    api_set_ready(toy.server, true);
    struct net_listen l = *listen;
    l.http = api_http_handler(toy.server);
    if (!toy.loop || net_listen(toy.loop, &l, &toy.port, &err)) {
        fprintf(stderr, "%s\n", err.text);
        abort();
    }
    pthread_create(&toy.thread, NULL, toy_run, toy.loop);
}

static inline void toy_tear_down(void)
{
    net_loop_stop(toy.loop);
    pthread_join(toy.thread, NULL);
    io_worker_stop(toy.worker);
    api_destroy(toy.server);
    io_worker_destroy(toy.worker);
    inbox_destroy(toy.inbox);
    net_loop_destroy(toy.loop);
    tokenizer_destroy(toy.tokenizer);
    gguf_close(toy.gguf);
    free(toy.file.data);
}

#endif
