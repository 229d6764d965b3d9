/* turn_fixture: what tests of an edge's turns share: a tokenizer, a store in a folder of its own, a filter with two words. */
#ifndef TANDEM_TESTS_TURN_FIXTURE_H
#define TANDEM_TESTS_TURN_FIXTURE_H
#include "agent_rig.h"
#include "edge/edge_turn.h"

struct fixture {
    char dir[64];
    struct gguf *file;
    struct tokenizer *tokenizer;
    struct store *store;
    struct filter *filter;
    struct edge_turn_env env;
};
static const uint8_t key[32] = {3};

static inline int set_up(void **state)
{
    static struct fixture f;
    char path[128];
    struct td_error err = {0};
    log_set_level(LOG_ERROR);
    snprintf(f.dir, sizeof f.dir, "/tmp/td-turn-XXXXXX");
    if (crypto_init() || !mkdtemp(f.dir))
        return -1;
    snprintf(path, sizeof path, "%s/words", f.dir);
    FILE *words = fopen(path, "w");
    fputs("block forbidden fruit\nmask damn\n", words);
    fclose(words);
    struct filter_config filter = {.words_path = path, .pii = true};
    char store_path[128];
    snprintf(store_path, sizeof store_path, "%s/store", f.dir);
    struct store_config store = {.directory = store_path};
    if (gguf_open(TEST_DATA RIG_MODEL, &f.file, &err) || tokenizer_create(f.file, NULL, &f.tokenizer, &err) ||
        filter_create(&filter, &f.filter, &err) || store_open(&store, &f.store, &err)) {
        fprintf(stderr, "%s\n", err.text);
        return -1;
    }
    f.env = (struct edge_turn_env){.tokenizer = f.tokenizer,
                                   .template_kind = CHAT_CHATML,
                                   .conversations = conv_index_create(f.store, 1000),
                                   .filter = f.filter};
    *state = &f;
    return f.env.conversations ? 0 : -1;
}

static inline int tear_down(void **state)
{
    struct fixture *f = *state;
    conv_index_destroy(f->env.conversations);
    store_close(f->store);
    filter_destroy(f->filter);
    tokenizer_destroy(f->tokenizer);
    gguf_close(f->file);
    nftw(f->dir, rig_remove, 16, FTW_DEPTH | FTW_PHYS);
    return 0;
}

/* ---- helpers ---- */

struct says {
    const char *role, *content;
};

static inline void begin(struct fixture *f, struct edge_turn *t, const struct says *says, size_t count,
                         const char *conversation)
{
    struct chat_message messages[8];
    struct api_request request = {.chat = true, .messages = messages, .message_count = count};
    for (size_t i = 0; i < count; i++)
        messages[i] = (struct chat_message){says[i].role, says[i].content, strlen(says[i].content)};
    request.conversation = (char *)(uintptr_t)conversation;
    assert_int_equal(edge_turn_init(t, &f->env, &request, "local"), 0);
    memcpy(t->principal_key, key, sizeof key);
    t->context_max = 4096;
}

/* The prompt as text, special tokens included. Static. */
static inline const char *prompt_text(const struct edge_turn *t)
{
    static char text[8192];
    int64_t size = tokenizer_decode(t->env->tokenizer, t->ids, t->ids_count, true, text, sizeof text - 1);
    assert_true(size >= 0 && size < (int64_t)sizeof text);
    text[size] = '\0';
    return text;
}

static inline uint32_t encode(const struct fixture *f, const char *text, int32_t *ids, size_t capacity)
{
    int64_t count = tokenizer_encode(f->tokenizer, text, strlen(text), NULL, 0, false, ids, capacity);
    assert_true(count >= 0 && (size_t)count <= capacity);
    return (uint32_t)count;
}

static inline void commit(const struct fixture *f, struct edge_turn *t, const char *reply, int expected)
{
    static int32_t ids[512];
    t->reply_count = encode(f, reply, ids, TD_COUNT(ids));
    t->reply = ids;
    assert_int_equal(edge_turn_commit(t), expected);
}

#endif
