/* edge_turn: what the model sees is filtered, what is stored is found again by what the client saw, and what the client sees is whole. */
#include "edge/local_kv.h"
#include "turn_fixture.h"

/* ---- tests ---- */

static void values_never_reach_the_model(void **state)
{
    struct fixture *f = *state;
    struct edge_turn t;
    const struct says says[] = {{"user", "Write to ann@example.org and damn quickly."}};
    begin(f, &t, says, 1, NULL);
    assert_int_equal(edge_turn_prepare(&t), 0);
    assert_null(strstr(prompt_text(&t), "ann@example.org"));
    assert_null(strstr(prompt_text(&t), "damn"));
    assert_non_null(strstr(prompt_text(&t), "[EMAIL_1]"));
    struct kv_block_id chain[8];
    local_kv_chain(key, f->env.fingerprint, f->env.layout_hash, NULL, t.ids, t.ids_count, chain);
    assert_memory_equal(chain, t.chain, t.ids_count / KV_BLOCK_TOKENS * sizeof *chain);
    edge_turn_free(&t);
}

static void the_reply_is_restored_across_pieces(void **state)
{
    struct fixture *f = *state;
    struct edge_turn t;
    const struct says says[] = {{"user", "Write to ann@example.org."}};
    begin(f, &t, says, 1, NULL);
    assert_int_equal(edge_turn_prepare(&t), 0);
    static const char *const pieces[] = {"To: [EM", "AIL_", "1], ", "not [EMAIL_9]"};
    char seen[128] = "";
    for (size_t i = 0; i < TD_COUNT(pieces); i++) {
        char *out;
        size_t size;
        assert_int_equal(
            edge_turn_restore(&t, pieces[i], strlen(pieces[i]), i + 1 == TD_COUNT(pieces), &out, &size), 0);
        strncat(seen, out, size);
        free(out);
    }
    assert_string_equal(seen, "To: ann@example.org, not [EMAIL_9]");
    edge_turn_free(&t);
}

static void a_blocked_word_is_an_error_that_does_not_quote_it(void **state)
{
    struct fixture *f = *state;
    struct edge_turn t;
    const struct says says[] = {{"user", "Tell me of the FORBIDDEN fruit."}};
    begin(f, &t, says, 1, NULL);
    assert_int_equal(edge_turn_prepare(&t), -TD_ERR_BLOCKED);
    assert_true(t.err.text[0] != '\0');
    assert_null(strstr(t.err.text, "fruit"));
    edge_turn_free(&t);
}

static void the_next_turn_has_the_same_placeholders(void **state)
{
    struct fixture *f = *state;
    struct edge_turn a, b;
    const struct says first[] = {{"user", "I am bob@example.net."}};
    begin(f, &a, first, 1, NULL);
    assert_int_equal(edge_turn_prepare(&a), 0);
    commit(f, &a, "Hello [EMAIL_1]!", 0);
    uint32_t known = a.ids_count + a.reply_count;
    /* The client sends back what it saw, and a new value before the old one. */
    const struct says second[] = {{"user", "I am bob@example.net."},
                                  {"assistant", "Hello bob@example.net!"},
                                  {"user", "Now eve@example.com asks bob@example.net."}};
    begin(f, &b, second, 3, NULL);
    assert_int_equal(edge_turn_prepare(&b), 0);
    assert_string_equal(b.conversation, a.conversation);
    assert_int_equal(b.known_count, known);
    assert_memory_equal(b.ids, a.ids, a.ids_count * sizeof *a.ids);
    assert_non_null(strstr(prompt_text(&b), "Now [EMAIL_2] asks [EMAIL_1]."));
    edge_turn_free(&a);
    edge_turn_free(&b);
}

static void two_that_go_on_from_one_history_both_keep_their_turn(void **state)
{
    struct fixture *f = *state;
    struct edge_turn root, a, b, named;
    const struct says first[] = {{"user", "Begin."}};
    const struct says next[] = {{"user", "Begin."}, {"assistant", "So."}, {"user", "Go on."}};
    begin(f, &root, first, 1, NULL);
    assert_int_equal(edge_turn_prepare(&root), 0);
    commit(f, &root, "So.", 0);
    begin(f, &a, next, 3, NULL);
    begin(f, &b, next, 3, NULL);
    begin(f, &named, next, 3, root.conversation);
    assert_int_equal(edge_turn_prepare(&a), 0);
    assert_int_equal(edge_turn_prepare(&b), 0);
    assert_int_equal(edge_turn_prepare(&named), 0);
    commit(f, &a, "One.", 0);
    commit(f, &b, "Two.", 0); /* in a conversation of its own */
    assert_string_equal(a.conversation, root.conversation);
    assert_string_not_equal(b.conversation, root.conversation);
    commit(f, &named, "Three.", -TD_ERR_CONFLICT); /* asked for by name: told so */
    struct conversation c;
    uint64_t version;
    assert_int_equal(conv_load(f->env.conversations, EDGE_TENANT, "local", b.conversation, &version, &c), 0);
    assert_int_equal(c.ids_count, b.ids_count + b.reply_count);
    conv_free(&c);
    edge_turn_free(&root);
    edge_turn_free(&a);
    edge_turn_free(&b);
    edge_turn_free(&named);
}

static void the_hash_is_over_what_the_client_saw(void **state)
{
    struct fixture *f = *state;
    struct edge_turn a, b;
    const struct says first[] = {{"user", "Count."}};
    begin(f, &a, first, 1, NULL);
    a.stops[a.stop_count++] = strdup("three");
    assert_int_equal(edge_turn_prepare(&a), 0);
    commit(f, &a, "one two three four", 0);
    const struct says second[] = {{"user", "Count."}, {"assistant", "one two "}, {"user", "More."}};
    begin(f, &b, second, 3, NULL);
    assert_int_equal(edge_turn_prepare(&b), 0);
    assert_string_equal(b.conversation, a.conversation);
    assert_int_equal(b.known_count, a.ids_count + a.reply_count);
    edge_turn_free(&a);
    edge_turn_free(&b);
}

static void damaged_characters_are_replaced(void **state)
{
    struct fixture *f = *state;
    struct edge_turn t;
    const struct says says[] = {{"user", "x"}};
    int32_t ids[16];
    begin(f, &t, says, 1, NULL);
    assert_int_equal(edge_turn_prepare(&t), 0);
    int64_t count = tokenizer_encode(f->tokenizer, "a\xc3", 2, NULL, 0, false, ids, TD_COUNT(ids));
    char *out;
    size_t size;
    assert_int_equal(edge_turn_reply_text(&t, ids, (uint32_t)count, &out, &size), 0);
    assert_int_equal(size, 4);
    assert_memory_equal(out, "a\xef\xbf\xbd", 4);
    free(out);
    edge_turn_free(&t);
}

static int prepare_completion(struct fixture *f, struct edge_turn *t, const char *text, int32_t *ids,
                              size_t id_count)
{
    struct api_request request = {.prompt = (char *)(uintptr_t)text,
                                  .prompt_size = text ? strlen(text) : 0,
                                  .prompt_ids = ids,
                                  .prompt_id_count = id_count};
    assert_int_equal(edge_turn_init(t, &f->env, &request, "local"), 0);
    memcpy(t->principal_key, key, sizeof key);
    t->context_max = 100;
    return edge_turn_prepare(t);
}

static void completions_are_filtered_also_as_ids(void **state)
{
    struct fixture *f = *state;
    struct edge_turn t;
    int32_t ids[100];
    assert_int_equal(prepare_completion(f, &t, "mail joe@example.org", NULL, 0), 0);
    assert_non_null(strstr(prompt_text(&t), "mail [EMAIL_1]"));
    assert_false(t.has_turn);
    edge_turn_free(&t);
    uint32_t count = encode(f, "mail joe@example.org", ids, TD_COUNT(ids));
    assert_int_equal(prepare_completion(f, &t, NULL, ids, count), 0);
    assert_non_null(strstr(prompt_text(&t), "mail [EMAIL_1]"));
    edge_turn_free(&t);
    /* Ids without anything to hide stay exactly as they are, however odd. */
    int32_t odd[4], whole[4];
    for (int i = 0; i < 4; i++) /* letters, where the tokeniser has a token for two of them */
        assert_int_equal(encode(f, (const char[2]){"here"[i]}, &odd[i], 1), 1);
    assert_true(encode(f, "here", whole, 4) < 4);
    assert_int_equal(prepare_completion(f, &t, NULL, odd, 4), 0);
    assert_int_equal(t.ids_count, 4);
    assert_memory_equal(t.ids, odd, sizeof odd);
    assert_int_equal(edge_turn_prepare(&t), 0); /* once more, behind another request under its key */
    assert_int_equal(t.ids_count, 4);
    assert_memory_equal(t.ids, odd, sizeof odd);
    edge_turn_free(&t);
}

static void completions_have_limits(void **state)
{
    struct fixture *f = *state;
    struct edge_turn t;
    int32_t ids[100];
    memset(ids, 0, sizeof ids);
    assert_int_equal(prepare_completion(f, &t, NULL, ids, 99), 0);
    edge_turn_free(&t);
    assert_int_equal(prepare_completion(f, &t, NULL, ids, 100), -TD_ERR_CONTEXT);
    assert_int_equal(t.ids_count, 100);
    edge_turn_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_never_reach_the_model),
        cmocka_unit_test(the_reply_is_restored_across_pieces),
        cmocka_unit_test(a_blocked_word_is_an_error_that_does_not_quote_it),
        cmocka_unit_test(the_next_turn_has_the_same_placeholders),
        cmocka_unit_test(two_that_go_on_from_one_history_both_keep_their_turn),
        cmocka_unit_test(the_hash_is_over_what_the_client_saw),
        cmocka_unit_test(damaged_characters_are_replaced),
        cmocka_unit_test(completions_are_filtered_also_as_ids),
        cmocka_unit_test(completions_have_limits),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
