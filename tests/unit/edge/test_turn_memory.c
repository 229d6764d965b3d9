/* edge_turn without memory: each allocation of the worker's thread fails once. A turn is prepared as ever or refused, never with another prompt or without
 * what the vault holds; and stored whole or not at all. */
#include "../no_memory.h"
#include "turn_fixture.h"

static const struct says one[] = {{"user", "Write to ann@example.org."}},
                         two[] = {{"user", "Write to ann@example.org."},
                                  {"assistant", "To ann@example.org: hello"},
                                  {"user", "And to bob@example.org, not to ann@example.org."}};

static void prepare_each(struct fixture *f, const struct says *says, size_t count, const char *conversation)
{
    struct edge_turn expected, t;
    begin(f, &expected, says, count, conversation);
    assert_int_equal(edge_turn_prepare(&expected), 0);
    assert_non_null(strstr(prompt_text(&expected), "[EMAIL_2]"));
    bool came = true;
    int n = 1;
    for (; came; n++) {
        begin(f, &t, says, count, conversation);
        no_memory_at(n);
        int rc = edge_turn_prepare(&t);
        came = no_memory_came();
        if (rc < 0 && (rc != -TD_ERR_NOMEM || !came || !t.err.text[0]))
            fail_msg("allocation %d: %s: %s", n, td_status_text(rc), t.err.text);
        if (rc == 0) {
            if (t.ids_count != expected.ids_count ||
                memcmp(t.ids, expected.ids, t.ids_count * sizeof *t.ids) != 0)
                fail_msg("allocation %d: another prompt: %s", n, prompt_text(&t));
            assert_int_equal(vault_count(t.vault), 2);
            assert_string_equal(t.turn.conversation.id, expected.turn.conversation.id);
        }
        edge_turn_free(&t);
    }
    assert_true(n > 20);
    edge_turn_free(&expected);
}

static void a_turn_is_prepared_whole_or_not_at_all(void **state)
{
    struct fixture *f = *state;
    struct edge_turn t;
    begin(f, &t, one, 1, "mine");
    assert_int_equal(edge_turn_prepare(&t), 0);
    commit(f, &t, "To [EMAIL_1]: hello", 0);
    edge_turn_free(&t);
    prepare_each(f, &two[2], 1, "mine"); /* what is in the vault alone says which is which */
    prepare_each(f, two, 3, "mine");
    prepare_each(f, two, 3, NULL); /* found by its history */
}

static void a_turn_is_stored_whole_or_not_at_all(void **state)
{
    struct fixture *f = *state;
    static int32_t reply[64];
    uint32_t count = encode(f, "To [EMAIL_1]: hello", reply, TD_COUNT(reply));
    bool came = true;
    int n = 1;
    for (; came; n++) {
        struct edge_turn t;
        struct conversation c;
        char name[24];
        uint64_t version;
        snprintf(name, sizeof name, "stored-%d", n);
        begin(f, &t, one, 1, name);
        assert_int_equal(edge_turn_prepare(&t), 0);
        t.reply = reply, t.reply_count = count;
        no_memory_at(n);
        int rc = edge_turn_commit(&t);
        came = no_memory_came();
        if (rc < 0 && (rc != -TD_ERR_NOMEM || !came))
            fail_msg("allocation %d: %s", n, td_status_text(rc));
        int loaded = conv_load(f->env.conversations, EDGE_TENANT, "local", name, &version, &c);
        assert_int_equal(loaded, rc == 0 ? 0 : -TD_ERR_NOTFOUND);
        if (rc == 0) {
            assert_int_equal(c.ids_count, t.ids_count + count);
            assert_true(c.vault_size > 0);
            conv_free(&c);
        }
        edge_turn_free(&t);
    }
    assert_true(n > 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_turn_is_prepared_whole_or_not_at_all),
        cmocka_unit_test(a_turn_is_stored_whole_or_not_at_all),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
