/* restorer: the restored text does not depend on how the reply was cut, and nothing is held back that need not be. */
#include "edge/vault.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

static struct vault *vault;

static int set_up(void **state)
{
    (void)state;
    struct vault_placeholder p;
    vault = vault_create();
    vault_put(vault, PII_EMAIL, "ann@example.com", 15, &p);
    vault_put(vault, PII_EMAIL, "[EMAIL_1]", 9,
              &p); /* a value that looks like a placeholder is not restored in turn */
    vault_put(vault, PII_IP, "::1", 3, &p);
    vault_reserve(vault, (struct vault_placeholder){PII_IP, 2});
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    vault_destroy(vault);
    return 0;
}

static const struct {
    const char *reply, *expected;
} rows[] = {
    {"", ""},
    {"plain [text] ] [", "plain [text] ] ["},
    {"Write to [EMAIL_1].", "Write to ann@example.com."},
    {"[EMAIL_1][IP_1][EMAIL_1]", "ann@example.com::1ann@example.com"},
    {"[EMAIL_2]", "[EMAIL_1]"},
    {"[EMAIL_3] [IP_2] [PHONE_1]", "[EMAIL_3] [IP_2] [PHONE_1]"}, /* no value */
    {"[[IP_1]]", "[::1]"},
    {"[EMAIL[EMAIL_1]", "[EMAILann@example.com"},
    {"[EMAIL_[IP_1]", "[EMAIL_::1"},
    {"[EMAIL_1[IP_1]", "[EMAIL_1::1"},
    {"[email_1] [EMAIL 1] [EMAIL_01] [EMAIL_1 ] EMAIL_1",
     "[email_1] [EMAIL 1] [EMAIL_01] [EMAIL_1 ] EMAIL_1"},
    {"[EMAIL_12345] [EMAIL_1", "[EMAIL_12345] [EMAIL_1"},
    {"[IP_9999", "[IP_9999"},
    {"\xe2\x82\xac[IP_1]\xe2\x82\xac", "\xe2\x82\xac::1\xe2\x82\xac"},
};

/* Pushes reply in pieces that end at a, at b and at its end; compares the whole. */
static void check_cut(size_t row, size_t a, size_t b)
{
    struct restorer *r = restorer_create(vault);
    struct filter_buffer got = {0};
    const char *reply = rows[row].reply;
    size_t size = strlen(reply), ends[3] = {a, b, size}, at = 0;
    for (int i = 0; i < 3; i++) {
        char *out, *piece = malloc(ends[i] - at + 1);
        size_t out_size;
        memcpy(piece, reply + at, ends[i] - at);
        assert_int_equal(restorer_push(r, piece, ends[i] - at, i == 2, &out, &out_size), 0);
        assert_non_null(out);
        filter_buffer_add(&got, out, out_size);
        free(out);
        free(piece);
        at = ends[i];
    }
    restorer_destroy(r);
    assert_int_equal(got.size, strlen(rows[row].expected));
    assert_memory_equal(got.data, rows[row].expected, got.size);
    filter_buffer_free(&got);
}

static void test_all_cuts(void **state)
{
    (void)state;
    for (size_t row = 0; row < TD_COUNT(rows); row++) {
        size_t size = strlen(rows[row].reply);
        for (size_t a = 0; a <= size; a++)
            for (size_t b = a; b <= size; b++)
                check_cut(row, a, b);
    }
}

static void push(struct restorer *r, const char *text, bool flush, const char *expected)
{
    char *out;
    size_t size;
    assert_int_equal(restorer_push(r, text, strlen(text), flush, &out, &size), 0);
    assert_int_equal(size, strlen(expected));
    assert_memory_equal(out, expected, size);
    free(out);
}

static void test_holds_back_only_what_may_become_one(void **state)
{
    (void)state;
    struct restorer *r = restorer_create(vault);
    push(r, "a", false, "a");
    push(r, "b[", false, "b");
    push(r, "I", false, "");
    push(r, "t", false, "[It");
    push(r, "[IP_", false, "");
    push(r, "1", false, "");
    push(r, "]", false, "::1");
    push(r, "[EMAIL", false, "");
    push(r, "", true, "[EMAIL"); /* flush ends it */
    push(r, "_1]", true, "_1]");
    restorer_destroy(r);
    restorer_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_cuts),
        cmocka_unit_test(test_holds_back_only_what_may_become_one),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
