/* conversation_move, conversation_messages: forks, portable conversations, and what people are shown. Prompts are rendered by the chat template, so
 * the messages that come out must be those that went in. */
#include "store_fixture.h"
#include "shared/chat_template.h"
#include "shared/log.h"
#include "store/conversation_json.h"

static char *directory;
static struct store_config store_config;
static struct store *store;
static struct conv_index *conversations;

struct vocabulary {
    struct gguf *file;
    struct tokenizer *tokenizer;
};
static struct vocabulary chatml, headers, inst;

static void load(const char *name, struct vocabulary *v)
{
    char path[512];
    struct td_error err = {0};
    snprintf(path, sizeof path, "%s/tiny/%s.gguf", TEST_DATA, name);
    if (gguf_open(path, &v->file, &err) != 0 || tokenizer_create(v->file, NULL, &v->tokenizer, &err) != 0)
        fail_msg("%s", err.text);
}

static int load_all(void **state)
{
    (void)state;
    crypto_init();
    log_set_level(LOG_ERROR);
    load("qwen2", &chatml);
    load("bpe-vocabulary", &headers);
    load("llama-spm", &inst);
    return 0;
}

static int free_all(void **state)
{
    (void)state;
    tokenizer_destroy(chatml.tokenizer);
    gguf_close(chatml.file);
    tokenizer_destroy(headers.tokenizer);
    gguf_close(headers.file);
    tokenizer_destroy(inst.tokenizer);
    gguf_close(inst.file);
    return 0;
}

static int set_up(void **state)
{
    (void)state;
    directory = fixture_directory();
    store_config = fixture_config(directory);
    store = fixture_open(&store_config);
    conversations = conv_index_create(store, 100);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    conv_index_destroy(conversations);
    store_close(store);
    fixture_remove(directory);
    return 0;
}

static size_t texts_made;

static json_t *as_it_is(const struct conversation *c, const char *bytes, size_t size)
{
    (void)c;
    texts_made++;
    return json_stringn(bytes, size);
}

/* One boundary after each reply, as turns leave it. */
static struct conversation talk(const struct vocabulary *v, enum chat_template_kind kind, const char *id,
                                const char *const *said, size_t count)
{
    struct conversation c = {.created_us = 5, .updated_us = 1000};
    strcpy(c.id, id);
    strcpy(c.title, "T\xc3\xa4lk");
    strcpy(c.last_request_key, "00ff");
    tokenizer_id(v->tokenizer, c.tokenizer_id);
    memset(c.fingerprint, 0x22, sizeof c.fingerprint);
    c.boundaries = calloc(count, sizeof *c.boundaries);
    for (size_t n = 2; n <= count; n += 2) {
        struct chat_message m[16];
        struct chat_text text;
        struct td_error err = {0};
        for (size_t i = 0; i < n; i++)
            m[i] = (struct chat_message){i % 2 ? "assistant" : "user", said[i], strlen(said[i])};
        assert_int_equal(chat_template_render(kind, m, n, 0, false, false, &text, &err), 0);
        int64_t ids = tokenizer_encode(v->tokenizer, text.text, text.size, text.special, text.special_count,
                                       text.add_bos, NULL, 0);
        c.ids = realloc(c.ids, (size_t)(ids + 1) * sizeof *c.ids);
        tokenizer_encode(v->tokenizer, text.text, text.size, text.special, text.special_count, text.add_bos,
                         c.ids, (size_t)ids);
        chat_text_free(&text);
        struct conv_boundary *b = &c.boundaries[c.boundary_count++];
        b->ids_count = c.ids_count = (uint32_t)ids;
        memset(b->history, (int)n, sizeof b->history);
    }
    return c;
}

static const char *const SAID[] = {"Name a river.\nOr two.", "\nThe Rhine <|im_end|> and more",
                                   "user\nAnother?", "The Elbe."};

static void assert_said(json_t *messages, const char *const *said, size_t count, size_t skip)
{
    assert_int_equal(json_array_size(messages), count + skip);
    for (size_t i = 0; i < count; i++) {
        json_t *m = json_array_get(messages, i + skip);
        assert_string_equal(json_string_value(json_object_get(m, "role")), i % 2 ? "assistant" : "user");
        assert_string_equal(json_string_value(json_object_get(m, "content")), said[i]);
    }
}

/* ---- messages ------------------------------------------------------------------------------------------------- */

/* A template's words in what somebody wrote are text. */
static void test_messages(void **state)
{
    (void)state;
    struct conversation c = talk(&chatml, CHAT_CHATML, "c", SAID, 4);
    json_t *messages = conversation_messages_json(&c, chatml.tokenizer, as_it_is, NULL);
    assert_said(messages, SAID, 4, 0);
    json_decref(messages);
    c.ids_count -= 3; /* a reply that was cut short is shown as far as it goes */
    messages = conversation_messages_json(&c, chatml.tokenizer, as_it_is, NULL);
    assert_int_equal(json_array_size(messages), 4);
    const char *last = json_string_value(json_object_get(json_array_get(messages, 3), "content"));
    assert_true(strlen(last) < strlen(SAID[3]) && strncmp(last, SAID[3], strlen(last)) == 0);
    json_decref(messages);
    conv_free(&c);

    c = talk(&chatml, CHAT_QWEN, "c", SAID, 2); /* with its system message */
    messages = conversation_messages_json(&c, chatml.tokenizer, as_it_is, NULL);
    assert_said(messages, SAID, 2, 1);
    assert_string_equal(json_string_value(json_object_get(json_array_get(messages, 0), "role")), "system");
    json_decref(messages);
    conv_free(&c);

    static const char *const stripped[] = {"Name a river.\nOr two.", "<|eot_id|>", "user\n\nAnother?",
                                           "The Elbe."};
    c = talk(&headers, CHAT_LLAMA3, "c", stripped, 4); /* this template strips what is said */
    messages = conversation_messages_json(&c, headers.tokenizer, as_it_is, NULL);
    assert_said(messages, stripped, 4, 0);
    json_decref(messages);
    conv_free(&c);
}

/* A reply that the model ended with another word than the template's ends there all the same. */
static void test_a_reply_ends_at_its_boundary(void **state)
{
    (void)state;
    struct conversation c = talk(&chatml, CHAT_CHATML, "c", SAID, 4);
    int32_t end = tokenizer_find(chatml.tokenizer, "<|im_end|>");
    uint32_t at = c.boundaries[0].ids_count - 1;
    while (c.ids[at] != end)
        at--;
    c.boundaries[0].ids_count = at + 1;
    c.ids[at] = tokenizer_find(chatml.tokenizer, "<|endoftext|>");
    assert_true(c.ids[at] >= 0 && c.ids[at] != end);
    json_t *messages = conversation_messages_json(&c, chatml.tokenizer, as_it_is, NULL);
    assert_said(messages, SAID, 4, 0);
    json_decref(messages);
    conv_free(&c);
}

/* What is counted before a boundary is what a conversation that ends there shows, wherever it lies. */
static void test_messages_before_each_boundary(void **state)
{
    (void)state;
    enum { BOUNDARIES = 6 };
    struct conversation c = talk(&chatml, CHAT_CHATML, "c", SAID, 4);
    uint32_t random = 1, counts[BOUNDARIES];
    c.boundaries = realloc(c.boundaries, BOUNDARIES * sizeof *c.boundaries);
    c.boundary_count = BOUNDARIES;
    for (int round = 0; round < 200; round++) {
        uint32_t end = 1 + (random >> 8) % c.ids_count;
        for (uint32_t i = 0; i < BOUNDARIES; i++) {
            c.boundaries[i] = (struct conv_boundary){.ids_count = end};
            random = random * 1664525 + 1013904223;
            end += (random >> 8) % (c.ids_count - end + 1);
        }
        json_t *all = conversation_messages_json(&c, chatml.tokenizer, as_it_is, counts);
        for (uint32_t i = 0; i < BOUNDARIES; i++) {
            struct conversation part = c; /* borrows */
            part.ids_count = c.boundaries[i].ids_count;
            part.boundary_count = i + 1;
            json_t *some = conversation_messages_json(&part, chatml.tokenizer, as_it_is, NULL);
            assert_int_equal(json_array_size(some), counts[i]);
            for (uint32_t j = 0; j < counts[i]; j++)
                assert_true(json_equal(json_array_get(some, j), json_array_get(all, j)));
            json_decref(some);
        }
        json_decref(all);
    }
    conv_free(&c);
}

static void test_messages_of_plain_marks(void **state)
{
    (void)state;
    static const char *const said[] = {"Name a river.", "The Rhine.", "Another?", "The Elbe."};
    struct conversation c = talk(&inst, CHAT_LLAMA2, "c", said, 4);
    uint32_t counts[2];
    json_t *messages = conversation_messages_json(&c, inst.tokenizer, as_it_is, counts);
    assert_int_equal(json_array_size(messages), 4);
    assert_true(counts[0] == 2 && counts[1] == 4);
    for (size_t i = 0; i < 4; i++) {
        const char *text = json_string_value(json_object_get(json_array_get(messages, i), "content"));
        assert_non_null(strstr(text, said[i]));
        assert_null(strstr(text, "INST"));
    }
    json_decref(messages);
    conv_free(&c);

    struct conv_boundary end = {.ids_count = 3};
    int32_t ids[3];
    tokenizer_encode(inst.tokenizer, "abc", 3, NULL, 0, false, ids, 3);
    c = (struct conversation){.ids = ids, .ids_count = 1, .boundaries = &end, .boundary_count = 1};
    end.ids_count = 1;
    messages = conversation_messages_json(&c, inst.tokenizer, as_it_is, NULL); /* no marks at all */
    assert_int_equal(json_array_size(messages), 1);
    assert_string_equal(json_string_value(json_object_get(json_array_get(messages, 0), "role")), "text");
    json_decref(messages);
}

/* ---- copies --------------------------------------------------------------------------------------------------- */

static void save(const struct conversation *c)
{
    assert_int_equal(conv_save(conversations, "acme", "ann", 0, c), 0);
}

static struct conversation get(const char *principal, const char *id)
{
    struct conversation c;
    uint64_t version;
    assert_int_equal(conv_load(conversations, "acme", principal, id, &version, &c), 0);
    return c;
}

static void assert_same_tokens(const struct conversation *a, const struct conversation *b)
{
    assert_int_equal(a->ids_count, b->ids_count);
    assert_memory_equal(a->ids, b->ids, a->ids_count * sizeof *a->ids);
    assert_int_equal(a->boundary_count, b->boundary_count);
    for (uint32_t i = 0; i < a->boundary_count; i++) {
        assert_int_equal(a->boundaries[i].ids_count, b->boundaries[i].ids_count);
        assert_int_equal(a->boundaries[i].reply_open, b->boundaries[i].reply_open);
    }
}

static char *new_id(const char *json)
{
    json_t *root = json_loads(json, 0, NULL);
    char *id = strdup(json_string_value(json_object_get(json_object_get(root, "conversation"), "id")));
    json_decref(root);
    return id;
}

static void test_fork(void **state)
{
    (void)state;
    char *json;
    struct conversation c = talk(&chatml, CHAT_CHATML, "origin", SAID, 4);
    save(&c);
    assert_int_equal(conversation_fork_json(conversations, "acme", "bob", "origin", &json), -TD_ERR_NOTFOUND);
    assert_int_equal(conversation_fork_json(conversations, "acme", "ann", "origin", &json), 0);
    char *id = new_id(json);
    struct conversation fork = get("ann", id);
    assert_string_not_equal(fork.id, "origin");
    assert_same_tokens(&c, &fork);
    assert_memory_equal(fork.boundaries[1].history, c.boundaries[1].history, TD_HASH_SIZE);
    assert_string_equal(fork.last_request_key, "");
    /* A history that fits both goes on with the original, also when all is read anew. */
    for (int i = 0; i < 2; i++) {
        char found[STORE_CONV_ID_MAX + 1];
        uint32_t boundary;
        uint8_t history[1][TD_HASH_SIZE];
        memset(history[0], 4, sizeof history[0]);
        assert_int_equal(conv_index_match(conversations, "acme", "ann",
                                          (const uint8_t(*)[TD_HASH_SIZE])history, 1, found, &boundary),
                         0);
        assert_string_equal(found, "origin");
        conv_index_destroy(conversations);
        conversations = conv_index_create(store, 100);
    }
    free(id);
    free(json);
    conv_free(&fork);
    conv_free(&c);
}

static bool is_listed_as_pinned(void)
{
    char *json;
    assert_int_equal(conversation_list_json(store, "acme", "ann", as_it_is, &json), 0);
    json_t *root = json_loads(json, 0, NULL), *data = json_object_get(root, "data");
    assert_int_equal(json_array_size(data), 1);
    bool pinned = json_is_true(json_object_get(json_array_get(data, 0), "pinned"));
    json_decref(root);
    free(json);
    return pinned;
}

static void test_pin(void **state)
{
    (void)state;
    char *json;
    struct conversation c = talk(&chatml, CHAT_CHATML, "c", SAID, 2);
    save(&c);
    assert_int_equal(conversation_pin_json(store, conversations, "acme", "ann", "other", true, &json),
                     -TD_ERR_NOTFOUND);
    assert_int_equal(conversation_pin_json(store, conversations, "acme", "ann", "c", true, &json), 0);
    assert_true(store_conv_is_pinned(store, "acme", "ann", "c"));
    assert_true(is_listed_as_pinned());
    free(json);
    assert_int_equal(conversation_pin_json(store, conversations, "acme", "ann", "c", false, &json), 0);
    assert_false(store_conv_is_pinned(store, "acme", "ann", "c"));
    assert_false(is_listed_as_pinned());
    free(json);
    conv_free(&c);
}

static const uint8_t bobs_key[32] = {9, 8, 7};

static int import(const struct vocabulary *v, const char *body, bool take_vault, char **json)
{
    struct td_error err = {0};
    const struct conversation_home home = {v->tokenizer, CHAT_CHATML, bobs_key, as_it_is};
    int rc = conversation_import_json(conversations, &home, "acme", "bob", body, strlen(body), take_vault,
                                      json, &err);
    assert_true(rc == 0 || err.text[0]);
    return rc;
}

static void test_move(void **state)
{
    (void)state;
    char *file, *json;
    struct conversation c = talk(&chatml, CHAT_CHATML, "team:talk", SAID, 4);
    c.boundaries[1].reply_open = true;
    c.vault = malloc(4);
    memcpy(c.vault, "\0va\xff", c.vault_size = 4);
    save(&c);
    assert_int_equal(conversation_export_json(conversations, chatml.tokenizer, "acme", "bob", "team:talk",
                                              as_it_is, &file),
                     -TD_ERR_NOTFOUND);
    assert_int_equal(conversation_export_json(conversations, chatml.tokenizer, "acme", "ann", "team:talk",
                                              as_it_is, &file),
                     0);
    for (int i = 0; i < 2; i++) { /* the second time its name is taken */
        assert_int_equal(import(&chatml, file, i == 0, &json), 0);
        char *id = new_id(json);
        assert_int_equal(strcmp(id, "team:talk") == 0, i == 0);
        struct conversation copy = get("bob", id);
        assert_same_tokens(&c, &copy);
        assert_string_equal(copy.title, c.title);
        assert_int_equal(copy.created_us, c.created_us);
        assert_memory_equal(copy.fingerprint, c.fingerprint, TD_HASH_SIZE);
        assert_int_equal(copy.vault_size, i == 0 ? 4 : 0);
        assert_memory_equal(copy.vault, c.vault, copy.vault_size);
        /* Hashes under another principal's key would say what is equal. */
        assert_memory_not_equal(copy.boundaries[0].history, c.boundaries[0].history, TD_HASH_SIZE);
        conv_free(&copy);
        free(id);
        free(json);
    }
    assert_int_equal(import(&inst, file, true, &json), -TD_ERR_MISMATCH);
    free(file);
    conv_free(&c);
}

static int allocations_left; /* of Jansson's; the one after the last fails */

static void *maybe(size_t size)
{
    return allocations_left-- == 0 ? NULL : malloc(size);
}

/* A file that leaves something out would be found out too late. */
static void test_export_is_whole_or_none(void **state)
{
    (void)state;
    char *whole, *file = NULL;
    struct conversation c = talk(&chatml, CHAT_CHATML, "talk", SAID, 4);
    c.vault = malloc(4);
    memcpy(c.vault, "\0va\xff", c.vault_size = 4);
    save(&c);
    assert_int_equal(
        conversation_export_json(conversations, chatml.tokenizer, "acme", "ann", "talk", as_it_is, &whole),
        0);
    int n = 0;
    json_set_alloc_funcs(maybe, free);
    for (int rc = -1; rc < 0; n++) {
        allocations_left = n;
        rc =
            conversation_export_json(conversations, chatml.tokenizer, "acme", "ann", "talk", as_it_is, &file);
        assert_true(rc == 0 || rc == -TD_ERR_NOMEM);
    }
    json_set_alloc_funcs(malloc, free);
    assert_true(n > 50);
    assert_string_equal(file, whole);
    free(file);
    free(whole);
    conv_free(&c);
}

/* Whoever re-sends what was said finds the imported conversation, at each of its turns, with and without a system message of their own. */
static void test_histories_after_import(void **state)
{
    (void)state;
    static const char *const with_system[] = {"Be brief.", "Name a river.", "The Rhine.", "Another?",
                                              "The Elbe."};
    struct conversation c = talk(&chatml, CHAT_CHATML, "talk", SAID, 4);
    char *file, *json, found[STORE_CONV_ID_MAX + 1];
    save(&c);
    assert_int_equal(
        conversation_export_json(conversations, chatml.tokenizer, "acme", "ann", "talk", as_it_is, &file), 0);
    texts_made = 0;
    assert_int_equal(import(&chatml, file, false, &json), 0);
    assert_int_equal(texts_made, 4); /* once, whatever it is the history of */
    for (int again = 0; again < 2; again++) {
        uint8_t h[5][TD_HASH_SIZE], previous[TD_HASH_SIZE];
        uint32_t boundary;
        conv_history_start(bobs_key, CHAT_CHATML, previous);
        for (size_t i = 0; i < 4; i++) {
            conv_history_next(bobs_key, previous, i % 2 ? "assistant" : "user", SAID[i], strlen(SAID[i]),
                              h[i]);
            memcpy(previous, h[i], TD_HASH_SIZE);
        }
        for (size_t count = 1; count <= 4; count++) {
            int rc = conv_index_match(conversations, "acme", "bob", (const uint8_t(*)[TD_HASH_SIZE])h, count,
                                      found, &boundary);
            assert_int_equal(rc, count < 2 ? -TD_ERR_NOTFOUND : 0);
            if (rc == 0) {
                assert_string_equal(found, "talk");
                assert_int_equal(boundary, count / 2 - 1);
            }
        }
        conv_history_start(bobs_key, CHAT_CHATML, previous); /* something else was said */
        for (size_t i = 0; i < 5; i++) {
            const char *role = i == 0 ? "system" : i % 2 ? "user" : "assistant";
            conv_history_next(bobs_key, previous, role, with_system[i], strlen(with_system[i]), h[i]);
            memcpy(previous, h[i], TD_HASH_SIZE);
        }
        assert_int_equal(conv_index_match(conversations, "acme", "bob", (const uint8_t(*)[TD_HASH_SIZE])h, 5,
                                          found, &boundary),
                         -TD_ERR_NOTFOUND);
        conv_index_destroy(conversations); /* and when all is read anew */
        conversations = conv_index_create(store, 100);
    }
    free(json);
    free(file);
    conv_free(&c);
}

/* A boundary that is behind no reply, or before anything was said, is no history of this principal's. */
static void test_boundaries_without_a_reply(void **state)
{
    (void)state;
    struct conversation c = talk(&chatml, CHAT_CHATML, "odd", SAID, 2), copy;
    struct conv_boundary boundaries[3] = {{.ids_count = 1}, {.ids_count = 5}, {.ids_count = c.ids_count + 1}};
    int32_t ids[300] = {c.ids[c.ids_count - 1]}; /* a line's end before all else */
    uint8_t said_nothing[TD_HASH_SIZE], said_half[TD_HASH_SIZE];
    char *file, *json;
    uint64_t version;
    memcpy(ids + 1, c.ids, c.ids_count * sizeof *ids);
    struct conversation odd = c;
    odd.ids = ids;
    odd.ids_count++;
    odd.boundaries = boundaries;
    odd.boundary_count = 3;
    save(&odd);
    json_t *messages = conversation_messages_json(&odd, chatml.tokenizer, as_it_is, NULL);
    json_t *half = json_object_get(json_array_get(messages, 0), "content");
    conv_history_start(bobs_key, CHAT_CHATML, said_nothing);
    conv_history_next(bobs_key, said_nothing, "user", json_string_value(half), json_string_length(half),
                      said_half);
    assert_int_equal(
        conversation_export_json(conversations, chatml.tokenizer, "acme", "ann", "odd", as_it_is, &file), 0);
    assert_int_equal(import(&chatml, file, false, &json), 0);
    assert_int_equal(conv_load(conversations, "acme", "bob", "odd", &version, &copy), 0);
    assert_memory_not_equal(copy.boundaries[0].history, said_nothing, TD_HASH_SIZE);
    assert_memory_not_equal(copy.boundaries[1].history, said_half, TD_HASH_SIZE);
    json_decref(messages);
    free(file);
    free(json);
    conv_free(&copy);
    conv_free(&c);
}

/* Every member of a good file replaced by each of these, or taken away: refused, or it makes no difference. */
static void test_hostile_import(void **state)
{
    (void)state;
    static const char *const values[] = {"null",
                                         "-1",
                                         "1e99",
                                         "\"\"",
                                         "\"zz\"",
                                         "[]",
                                         "[[]]",
                                         "[-1]",
                                         "[99999999]",
                                         "{}",
                                         "[{\"end\":1}]",
                                         "[{\"end\":9999}]",
                                         "[{\"end\":2},{\"end\":1}]"};
    char *file, *json;
    const char *name;
    json_t *value;
    struct conversation c = talk(&chatml, CHAT_CHATML, "talk", SAID, 2);
    save(&c);
    assert_int_equal(
        conversation_export_json(conversations, chatml.tokenizer, "acme", "ann", "talk", as_it_is, &file), 0);
    json_t *good = json_loads(file, 0, NULL);
    json_object_foreach(good, name, value)
    {
        for (size_t i = 0; i <= TD_COUNT(values); i++) {
            json_t *bad = json_copy(good);
            if (i == TD_COUNT(values))
                json_object_del(bad, name);
            else
                json_object_set_new(bad, name, json_loads(values[i], JSON_DECODE_ANY, NULL));
            char *text = json_dumps(bad, 0);
            bool optional = !strcmp(name, "id") || !strcmp(name, "created_us") ||
                            !strcmp(name, "updated_us") || !strcmp(name, "messages") ||
                            (!strcmp(name, "title") && i < TD_COUNT(values) && !strcmp(values[i], "\"\""));
            int rc = import(&chatml, text, false, &json);
            assert_int_equal(rc == 0, optional);
            if (rc == 0)
                free(json);
            json_decref(bad);
            free(text);
        }
    }
    assert_true(import(&chatml, "", false, &json) < 0 && import(&chatml, "[]", false, &json) < 0);
    json_decref(good);
    free(file);
    conv_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_a_reply_ends_at_its_boundary),
        cmocka_unit_test(test_messages_before_each_boundary),
        cmocka_unit_test(test_messages_of_plain_marks),
        cmocka_unit_test_setup_teardown(test_fork, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_pin, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_move, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_export_is_whole_or_none, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_histories_after_import, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_boundaries_without_a_reply, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_hostile_import, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, load_all, free_all);
}
