/* turn: whatever a client re-sends, the ids of its conversation only ever grow. The expected prompt text comes from the chat template over the
 * whole history (tested against Jinja2 elsewhere): the stored ids decoded, specials included, must read the same. */
#include "store_fixture.h"
#include "shared/log.h"
#include "store/conv_lost.h"
#include "store/store_internal.h"
#include "store/turn.h"

#define TURNS       10
#define MESSAGES    (2 * TURNS + 2)
#define KEY_A       "00112233445566778899aabbccddeeff"
#define KEY_B       "ffeeddccbbaa99887766554433221100"
#define CONTEXT_MAX 100000

static struct gguf *file, *other_file;
static struct tokenizer *tokenizer, *other_tokenizer;
static char *directory;
static struct store_config store_config;
static struct store *store;
static struct turn_config config;
static const uint8_t principal_key[32] = {9};

static struct tokenizer *load(const char *name, const char *pre, struct gguf **g)
{
    char path[512];
    struct tokenizer *t = NULL;
    struct td_error err = {0};
    snprintf(path, sizeof path, "%s/tiny/%s.gguf", TEST_DATA, name);
    if (gguf_open(path, g, &err) != 0 || tokenizer_create(*g, pre, &t, &err) != 0)
        fail_msg("%s", err.text);
    return t;
}

static int load_tokenizers(void **state)
{
    (void)state;
    crypto_init();
    log_set_level(LOG_ERROR);
    tokenizer = load("qwen2", NULL, &file);
    other_tokenizer = load("llama-spm", NULL, &other_file);
    return 0;
}

static int free_tokenizers(void **state)
{
    (void)state;
    tokenizer_destroy(tokenizer);
    tokenizer_destroy(other_tokenizer);
    gguf_close(file);
    gguf_close(other_file);
    return 0;
}

static void open_again(void)
{
    store = fixture_open(&store_config);
    config = (struct turn_config){.tokenizer = tokenizer,
                                  .template_kind = CHAT_CHATML,
                                  .conversations = conv_index_create(store, 1000),
                                  .context_max = CONTEXT_MAX};
    memset(config.fingerprint, 0xf1, sizeof config.fingerprint);
}

static void close_all(void)
{
    conv_index_destroy(config.conversations);
    store_close(store);
}

static int set_up(void **state)
{
    (void)state;
    directory = fixture_directory();
    store_config = fixture_config(directory);
    open_again();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    close_all();
    fixture_remove(directory);
    return 0;
}

/* ---- a client ---- */

struct client { /* what a stateless client keeps: text */
    struct chat_message messages[MESSAGES];
    char texts[MESSAGES][64];
    size_t count;
};

static void say(struct client *c, const char *role, const char *text)
{
    snprintf(c->texts[c->count], sizeof c->texts[0], "%s", text);
    c->messages[c->count] = (struct chat_message){role, c->texts[c->count], strlen(c->texts[c->count])};
    c->count++;
}

static struct turn_input input_of(const struct client *c, const char *conversation, const char *key)
{
    return (struct turn_input){.tenant = "t",
                               .principal = "p",
                               .principal_key = principal_key,
                               .messages = c->messages,
                               .model_messages = c->messages,
                               .count = c->count,
                               .conversation = conversation,
                               .request_key = key};
}

static void prepare(const struct turn_input *in, struct turn *t)
{
    struct td_error err = {0};
    int rc = turn_prepare(&config, in, t, &err);
    if (rc != 0)
        fail_msg("turn_prepare: %d %s", rc, err.text);
}

static int refuse(const struct turn_input *in)
{
    struct turn t;
    struct td_error err = {0};
    int rc = turn_prepare(&config, in, &t, &err);
    assert_true(rc < 0);
    assert_true(err.text[0] != '\0');
    turn_free(&t);
    return rc;
}

/* The reply's ids: its text in tokens that the tokenizer would not choose, one byte each, then the end. */
static uint32_t reply_ids(const char *text, bool closed, int32_t ids[64])
{
    uint32_t count = 0;
    for (const char *p = text; *p; p++)
        assert_int_equal(tokenizer_encode(tokenizer, p, 1, NULL, 0, false, ids + count++, 1), 1);
    if (closed)
        ids[count++] = tokenizer_find(tokenizer, "<|im_end|>");
    return count;
}

static int commit(const struct turn_input *in, struct turn *t, const char *text, bool closed)
{
    int32_t ids[64];
    uint32_t count = reply_ids(text, closed, ids);
    return turn_commit(&config, in, t, ids, count, text, strlen(text), NULL, 0);
}

/* One whole turn; the reply joins the client's history. The conversation's id goes to `id` (may be NULL). */
static void take_turn(struct client *c, const char *conversation, const char *key, const char *reply,
                      char *id)
{
    struct turn t;
    struct turn_input in = input_of(c, conversation, key);
    prepare(&in, &t);
    assert_int_equal(commit(&in, &t, reply, true), 0);
    if (id)
        strcpy(id, t.conversation.id);
    turn_free(&t);
    say(c, "assistant", reply);
}

static void assert_prompt_reads(const struct turn *t, const struct client *c)
{
    struct chat_text expected;
    char got[8192];
    assert_int_equal(
        chat_template_render(CHAT_CHATML, c->messages, c->count, 0, false, true, &expected, NULL), 0);
    int64_t size = tokenizer_decode(tokenizer, t->ids, t->ids_count, true, got, sizeof got);
    assert_int_equal(size, expected.size);
    assert_memory_equal(got, expected.text, expected.size);
    chat_text_free(&expected);
}

static void load_conversation(const char *id, struct conversation *c)
{
    uint64_t version;
    assert_int_equal(conv_load(config.conversations, "t", "p", id, &version, c), 0);
}

/* ---- tests ---- */

static void test_ten_turns_keep_all_ids(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    int32_t previous[4096];
    uint32_t previous_count = 0;
    char id[STORE_CONV_ID_MAX + 1] = "";
    say(&c, "system", "Be brief.");
    for (int i = 0; i < TURNS; i++) {
        char text[64];
        struct turn t;
        snprintf(text, sizeof text, "question %d, please", i);
        say(&c, "user", text);
        struct turn_input in = input_of(&c, NULL, "");
        prepare(&in, &t);
        assert_int_equal(t.known_count, previous_count);
        assert_int_equal(t.first_new, i == 0 ? 0 : 2 * i + 1);
        assert_false(t.is_repeat);
        assert_true(t.ids_count > t.known_count);
        assert_memory_equal(t.ids, previous, previous_count * sizeof *previous);
        assert_prompt_reads(&t, &c);
        if (i > 0)
            assert_string_equal(t.conversation.id, id);
        strcpy(id, t.conversation.id);
        snprintf(text, sizeof text, "answer %d", i);
        assert_int_equal(commit(&in, &t, text, true), 0);
        previous_count = t.conversation.ids_count;
        memcpy(previous, t.conversation.ids, previous_count * sizeof *previous);
        turn_free(&t);
        say(&c, "assistant", text);
        if (i == 5) { /* a restart changes nothing */
            close_all();
            open_again();
        }
    }
    struct conversation stored;
    load_conversation(id, &stored);
    assert_int_equal(stored.ids_count, previous_count);
    assert_int_equal(stored.boundary_count, TURNS);
    assert_string_equal(stored.title, "question 0, please");
    conv_free(&stored);
}

/* The stored ids are not what the tokenizer makes of the whole text; that is why they are kept. */
static void test_stored_ids_win_over_tokenising_again(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    struct turn t;
    say(&c, "user", "hello there");
    take_turn(&c, NULL, "", "hello there, hello there", NULL);
    say(&c, "user", "go on");
    struct turn_input in = input_of(&c, NULL, "");
    prepare(&in, &t);
    struct chat_text whole;
    assert_int_equal(chat_template_render(CHAT_CHATML, c.messages, c.count, 0, false, true, &whole, NULL), 0);
    int64_t count = tokenizer_encode(tokenizer, whole.text, whole.size, whole.special, whole.special_count,
                                     false, NULL, 0);
    assert_int_not_equal(count, t.ids_count);
    assert_prompt_reads(&t, &c);
    chat_text_free(&whole);
    turn_free(&t);
}

static void test_reply_without_end_is_closed(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    struct turn t;
    say(&c, "user", "count");
    struct turn_input in = input_of(&c, NULL, "");
    prepare(&in, &t);
    assert_int_equal(commit(&in, &t, "one two", false), 0);
    assert_true(t.conversation.boundaries[0].reply_open);
    uint32_t known = t.conversation.ids_count;
    turn_free(&t);
    say(&c, "assistant", "one two");
    say(&c, "user", "more");
    in = input_of(&c, NULL, "");
    prepare(&in, &t);
    assert_int_equal(t.known_count, known);
    assert_prompt_reads(&t, &c);
    turn_free(&t);
}

static void test_edited_history_forks(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    char id[STORE_CONV_ID_MAX + 1];
    struct turn t;
    struct conversation before, after;
    say(&c, "user", "one");
    take_turn(&c, NULL, "", "first", id);
    say(&c, "user", "two");
    take_turn(&c, NULL, "", "second", NULL);
    load_conversation(id, &before);
    c.count = 2;
    say(&c, "user", "another two");
    struct turn_input in = input_of(&c, NULL, "");
    prepare(&in, &t);
    assert_string_not_equal(t.conversation.id, id);
    assert_int_equal(t.version, 0);
    assert_int_equal(t.known_count, before.boundaries[0].ids_count);
    assert_int_equal(t.first_new, 2);
    assert_memory_equal(t.ids, before.ids, t.known_count * sizeof *t.ids);
    assert_prompt_reads(&t, &c);
    assert_int_equal(commit(&in, &t, "other", true), 0);
    assert_int_equal(t.conversation.boundary_count, 2);
    turn_free(&t);
    load_conversation(id, &after); /* not truncated */
    assert_int_equal(after.ids_count, before.ids_count);
    assert_int_equal(after.boundary_count, 2);
    conv_free(&before);
    conv_free(&after);

    c.count = 0; /* an edited first message matches nothing */
    say(&c, "user", "uno");
    say(&c, "assistant", "first");
    say(&c, "user", "two");
    in = input_of(&c, NULL, "");
    prepare(&in, &t);
    assert_int_equal(t.known_count, 0);
    assert_prompt_reads(&t, &c);
    turn_free(&t);
}

/* The same request again, as it is after its turn was stored: same prompt, and nothing stored twice. */
static void repeat(struct client *c, const char *conversation, const char *key, const char *id)
{
    struct turn t;
    struct conversation before, after;
    load_conversation(id, &before);
    struct turn_input in = input_of(c, conversation, key);
    prepare(&in, &t);
    assert_true(t.is_repeat);
    assert_string_equal(t.conversation.id, id);
    assert_true(t.ids_count < before.ids_count);
    assert_memory_equal(t.ids, before.ids, t.ids_count * sizeof *t.ids);
    assert_int_equal(t.known_count,
                     before.boundary_count > 1 ? before.boundaries[before.boundary_count - 2].ids_count : 0);
    assert_int_equal(commit(&in, &t, "a different reply", true), 0);
    turn_free(&t);
    load_conversation(id, &after);
    assert_int_equal(after.ids_count, before.ids_count);
    assert_int_equal(after.boundary_count, before.boundary_count);
    conv_free(&before);
    conv_free(&after);
}

static void test_repeats_store_once(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    char id[STORE_CONV_ID_MAX + 1], fork[STORE_CONV_ID_MAX + 1];
    say(&c, "user", "one");
    take_turn(&c, NULL, KEY_A, "first", id);
    c.count--;
    repeat(&c, NULL, KEY_A, id); /* of a first turn, which no history leads to */
    say(&c, "assistant", "first");
    say(&c, "user", "two");
    take_turn(&c, NULL, KEY_B, "second", NULL);
    c.count--;
    repeat(&c, NULL, KEY_B, id);
    close_all();
    open_again();
    repeat(&c, NULL, KEY_B, id); /* after a restart */

    c.count = 2; /* a fork, whose parent goes on before the fork is repeated */
    say(&c, "user", "edited");
    static const char key_fork[] = "0f0e0d0c0b0a09080706050403020100";
    take_turn(&c, NULL, key_fork, "other", fork);
    assert_string_not_equal(fork, id);
    struct client parent = {.count = 0};
    say(&parent, "user", "three");
    take_turn(&parent, id, "", "third", NULL);
    c.count--;
    repeat(&c, NULL, key_fork, fork);
}

static void test_repeat_of_an_appended_message(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    say(&c, "user", "one");
    take_turn(&c, "mine", KEY_A, "first", NULL);
    c.count = 0;
    say(&c, "user", "two"); /* only the new message */
    take_turn(&c, "mine", KEY_B, "second", NULL);
    c.count--;
    repeat(&c, "mine", KEY_B, "mine");
}

static void test_key_of_another_request(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    char id[STORE_CONV_ID_MAX + 1], later[STORE_CONV_ID_MAX + 1];
    say(&c, "user", "one");
    take_turn(&c, NULL, KEY_A, "first", id);
    c.count = 0;
    say(&c, "user", "something else");
    struct turn_input in = input_of(&c, NULL, KEY_A);
    assert_int_equal(refuse(&in), -TD_ERR_CONFLICT);
    /* once the conversation has gone on, an old key begins a conversation of its own */
    c.count = 0;
    say(&c, "user", "two");
    take_turn(&c, id, KEY_B, "second", NULL);
    c.count = 0;
    say(&c, "user", "one");
    take_turn(&c, NULL, KEY_A, "first", later);
    assert_string_not_equal(later, id);
    struct conversation stored;
    load_conversation(id, &stored);
    assert_int_equal(stored.boundary_count, 2);
    conv_free(&stored);
}

static void test_asked_for_conversation(void **state)
{
    (void)state;
    struct client c = {.count = 0}, all = {.count = 0};
    struct turn t;
    say(&c, "user", "one");
    say(&all, "user", "one");
    take_turn(&c, "mine", "", "first", NULL); /* made under that id */
    say(&all, "assistant", "first");
    c.count = 0;
    say(&c, "user", "two"); /* only the new message: appended */
    say(&all, "user", "two");
    struct turn_input in = input_of(&c, "mine", "");
    prepare(&in, &t);
    assert_string_equal(t.conversation.id, "mine");
    assert_int_equal(t.first_new, 0);
    assert_true(t.known_count > 0);
    assert_prompt_reads(&t, &all);
    assert_int_equal(commit(&in, &t, "second", true), 0);
    turn_free(&t);
    in = input_of(&all, "mine", ""); /* the history of the first turn: a fork */
    prepare(&in, &t);
    assert_string_not_equal(t.conversation.id, "mine");
    turn_free(&t);
    in.principal = "q"; /* has none of it */
    prepare(&in, &t);
    assert_int_equal(t.known_count, 0);
    turn_free(&t);
}

/* What an id of the form that is made here means has been here, or it means nothing: no other conversation is begun under it. */
static void test_an_unknown_id_of_our_form_is_refused(void **state)
{
    (void)state;
    static const char *const free_names[] = {"conv-0123456789abcdef0123456",   /* a digit less */
                                             "conv-0123456789abcdef012345678", /* a digit more */
                                             "conv-0123456789abcdef0123456G", "Conv-0123456789abcdef01234567",
                                             "conv-"};
    struct client c = {.count = 0};
    char id[STORE_CONV_ID_MAX + 1];
    struct turn t;
    say(&c, "user", "hello");
    struct turn_input in = input_of(&c, "conv-0123456789abcdef01234567", "");
    assert_int_equal(refuse(&in), -TD_ERR_NOTFOUND);
    in = input_of(&c, "conv-0123456789abcdef01234567", KEY_A);
    assert_int_equal(refuse(&in), -TD_ERR_NOTFOUND);
    for (size_t i = 0; i < TD_COUNT(free_names); i++) {
        in = input_of(&c, free_names[i], "");
        prepare(&in, &t);
        assert_string_equal(t.conversation.id, free_names[i]);
        turn_free(&t);
    }
    take_turn(&c, NULL, "", "hi", id);
    say(&c, "user", "go on");
    in = input_of(&c, id, "");
    prepare(&in, &t); /* control */
    turn_free(&t);
    assert_int_equal(conv_delete(config.conversations, "t", "p", id), 0);
    assert_int_equal(refuse(&in), -TD_ERR_NOTFOUND);
}

static void fill_the_store(bool full)
{
    store->limit_size = full ? 1 : UINT64_C(1) << 40;
}

/* A turn for which there is no room. */
static void lose_turn(struct client *c, const char *conversation, const char *key, const char *reply)
{
    struct turn t;
    struct turn_input in = input_of(c, conversation, key);
    prepare(&in, &t);
    fill_the_store(true);
    assert_int_equal(commit(&in, &t, reply, true), -TD_ERR_DISKFULL);
    fill_the_store(false);
    turn_lost(&config, &in, &t);
    turn_free(&t);
    say(c, "assistant", reply);
}

static bool is_taken(struct client *c, size_t from, const char *conversation, const char *key,
                     uint32_t known_turns)
{
    struct client part = {.count = 0};
    struct turn t;
    struct td_error err = {0};
    for (size_t i = from; i < c->count; i++)
        say(&part, c->messages[i].role, c->texts[i]);
    struct turn_input in = input_of(&part, conversation, key);
    int rc = turn_prepare(&config, &in, &t, &err);
    if (rc < 0) {
        if (rc != -TD_ERR_CONFLICT)
            fail_msg("%d %s", rc, err.text);
        char holds[32];
        snprintf(holds, sizeof holds, known_turns ? "holds %u;" : "no turn", known_turns);
        assert_non_null(strstr(err.text, holds));
        return false;
    }
    assert_int_equal(t.conversation.boundary_count, known_turns);
    turn_free(&t);
    return true;
}

/* Who names a conversation and sends its new message alone does not build on a turn before the last without knowing. */
static void test_after_a_lost_turn_the_history_is_wanted(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    say(&c, "user", "one");
    take_turn(&c, "mine", "", "first", NULL);
    say(&c, "user", "two");
    lose_turn(&c, "mine", KEY_A, "second");
    say(&c, "user", "three");
    assert_false(is_taken(&c, 4, "mine", "", 1));
    assert_true(is_taken(&c, 4, "other", "", 0));
    assert_false(is_taken(&c, 4, "mine", KEY_B, 1));
    assert_true(is_taken(&c, 0, "mine", "", 1)); /* with what was lost, and what it stood on */
    assert_true(is_taken(&c, 0, NULL, "", 1));
    c.count = 3;
    assert_true(is_taken(&c, 2, "mine", KEY_A, 1)); /* the same request again */
    c.count = 4;
    say(&c, "user", "three");
    take_turn(&c, "mine", "", "third", NULL);
    say(&c, "user", "four");
    assert_true(is_taken(&c, 6, "mine", "", 2)); /* it is whole again */
}

static void test_a_lost_beginning(void **state)
{
    (void)state;
    struct client c = {.count = 0}, again = {.count = 0};
    say(&c, "user", "one");
    lose_turn(&c, "mine", "", "first");
    say(&c, "user", "two");
    assert_false(is_taken(&c, 2, "mine", "", 0));
    assert_true(is_taken(&c, 0, "mine", "", 0));
    assert_int_equal(conv_delete(config.conversations, "t", "p", "mine"), -TD_ERR_NOTFOUND);
    assert_true(is_taken(&c, 2, "mine", "", 0)); /* it begins anew, as was wished */

    say(&again, "user", "one");
    struct turn_input in = input_of(&again, NULL, "");
    struct turn t;
    char id[STORE_CONV_ID_MAX + 1];
    prepare(&in, &t);
    strcpy(id, t.conversation.id);
    turn_lost(&config, &in, &t);
    turn_free(&t);
    in.conversation = id; /* of our form: there is none */
    assert_int_equal(refuse(&in), -TD_ERR_NOTFOUND);
}

/* The note that was made first goes first; a tenant's go with it. */
static void test_lost_turns_are_bounded(void **state)
{
    (void)state;
    char id[16];
    struct conv_index *x = config.conversations;
    for (int i = 0; i <= CONV_LOST_MAX; i++) {
        snprintf(id, sizeof id, "c%d", i);
        conv_note_lost(x, i % 2 ? "t" : "u", "p", id, 1, "");
    }
    assert_false(conv_has_lost(x, "u", "p", "c0", ""));
    assert_true(conv_has_lost(x, "t", "p", "c1", ""));
    assert_true(conv_has_lost(x, "u", "p", "c2", ""));
    assert_true(conv_has_lost(x, "u", "p", id, ""));
    assert_false(conv_has_lost(x, "t", "p", "c2", ""));
    assert_false(conv_has_lost(x, "u", "q", "c2", ""));
    conv_index_forget_tenant(x, "u");
    assert_false(conv_has_lost(x, "u", "p", "c2", ""));
    assert_true(conv_has_lost(x, "t", "p", "c1", ""));
}

static void test_the_later_of_two_writers_loses(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    struct turn a, b;
    struct conversation stored;
    say(&c, "user", "one");
    take_turn(&c, "mine", "", "first", NULL);
    say(&c, "user", "two");
    struct turn_input in = input_of(&c, "mine", "");
    prepare(&in, &a);
    prepare(&in, &b);
    assert_int_equal(commit(&in, &a, "by a", true), 0);
    uint32_t count = a.conversation.ids_count;
    assert_int_equal(commit(&in, &b, "by b, longer", true), -TD_ERR_CONFLICT);
    turn_free(&a);
    turn_free(&b);
    load_conversation("mine", &stored);
    assert_int_equal(stored.ids_count, count);
    conv_free(&stored);
}

static void test_refusals(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    struct turn_input in = input_of(&c, NULL, "");
    assert_int_equal(refuse(&in), -TD_ERR_ARG);
    say(&c, "user", "one");
    in = input_of(&c, "", "");
    assert_int_equal(refuse(&in), -TD_ERR_ARG);
    char long_id[STORE_CONV_ID_MAX + 2];
    memset(long_id, 'x', sizeof long_id - 1);
    long_id[sizeof long_id - 1] = '\0';
    in = input_of(&c, long_id, "");
    assert_int_equal(refuse(&in), -TD_ERR_ARG);
    in = input_of(&c, long_id + 1, "");
    struct turn t;
    prepare(&in, &t);
    turn_free(&t);
    in = input_of(&c, NULL, "abc");
    assert_int_equal(refuse(&in), -TD_ERR_ARG);
    say(&c, "assistant", "prefill");
    in = input_of(&c, NULL, "");
    assert_int_equal(refuse(&in), -TD_ERR_ARG);
    in.count = CONV_MESSAGES_MAX + 1;
    assert_int_equal(refuse(&in), -TD_ERR_ARG);
}

static void test_context_limit(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    struct turn t;
    struct td_error err = {0};
    say(&c, "user", "one two three");
    struct turn_input in = input_of(&c, NULL, "");
    prepare(&in, &t);
    uint32_t count = t.ids_count;
    turn_free(&t);
    config.context_max = count;
    assert_int_equal(turn_prepare(&config, &in, &t, &err), -TD_ERR_CONTEXT);
    assert_int_equal(t.ids_count, count);
    turn_free(&t);
    config.context_max = count + 1;
    prepare(&in, &t);
    turn_free(&t);
}

static void test_another_tokenizer(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    struct turn t;
    say(&c, "user", "one");
    take_turn(&c, "mine", "", "first", NULL);
    say(&c, "user", "two");
    config.tokenizer = other_tokenizer;
    struct turn_input in = input_of(&c, "mine", "");
    assert_int_equal(refuse(&in), -TD_ERR_MISMATCH);
    in = input_of(&c, NULL, ""); /* by history: begins anew from the text */
    prepare(&in, &t);
    assert_int_equal(t.known_count, 0);
    assert_string_not_equal(t.conversation.id, "mine");
    turn_free(&t);
}

static void test_vault_and_key_are_stored(void **state)
{
    (void)state;
    struct client c = {.count = 0};
    struct turn t;
    struct conversation stored;
    int32_t ids[64];
    say(&c, "user", "a\nb");
    struct chat_message seen = {"user", "\xc3\xa4 b\tc", 6}; /* what the model sees names the conversation */
    struct turn_input in = input_of(&c, "mine", KEY_A);
    in.model_messages = &seen;
    prepare(&in, &t);
    uint32_t count = reply_ids("x", true, ids);
    assert_int_equal(turn_commit(&config, &in, &t, ids, count, "x", 1, (const uint8_t *)"vault", 5), 0);
    turn_free(&t);
    load_conversation("mine", &stored);
    assert_int_equal(stored.vault_size, 5);
    assert_memory_equal(stored.vault, "vault", 5);
    assert_string_equal(stored.last_request_key, KEY_A);
    assert_string_equal(stored.title, "\xc3\xa4 b c");
    conv_free(&stored);
    say(&c, "assistant", "x");
    say(&c, "user", "more");
    take_turn(&c, "mine", "", "y", NULL); /* no vault given: the old one stays; no key: the old one goes */
    load_conversation("mine", &stored);
    assert_int_equal(stored.vault_size, 5);
    assert_string_equal(stored.last_request_key, "");
    conv_free(&stored);
}

#define TURN_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TURN_TEST(test_ten_turns_keep_all_ids),
        TURN_TEST(test_stored_ids_win_over_tokenising_again),
        TURN_TEST(test_reply_without_end_is_closed),
        TURN_TEST(test_edited_history_forks),
        TURN_TEST(test_repeats_store_once),
        TURN_TEST(test_repeat_of_an_appended_message),
        TURN_TEST(test_key_of_another_request),
        TURN_TEST(test_asked_for_conversation),
        TURN_TEST(test_an_unknown_id_of_our_form_is_refused),
        TURN_TEST(test_after_a_lost_turn_the_history_is_wanted),
        TURN_TEST(test_a_lost_beginning),
        TURN_TEST(test_lost_turns_are_bounded),
        TURN_TEST(test_the_later_of_two_writers_loses),
        TURN_TEST(test_refusals),
        TURN_TEST(test_context_limit),
        TURN_TEST(test_another_tokenizer),
        TURN_TEST(test_vault_and_key_are_stored),
    };
    return cmocka_run_group_tests(tests, load_tokenizers, free_tokenizers);
}
