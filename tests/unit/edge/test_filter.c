/* filter: the parts together: what the model sees, what comes back, overlaps, limits, and hostile texts in linear time. */
#include "edge/filter.h"
#include "edge/vault.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

static struct filter *filter;

static struct filter *filter_with(const char *list, bool pii)
{
    char path[] = "/tmp/tandem-filter-XXXXXX";
    int fd = mkstemp(path);
    assert_int_equal(write(fd, list, strlen(list)), (ssize_t)strlen(list));
    close(fd);
    struct filter *f;
    struct filter_config config = {.words_path = path, .pii = pii};
    assert_int_equal(filter_create(&config, &f, NULL), 0);
    unlink(path);
    return f;
}

static int set_up(void **state)
{
    (void)state;
    filter = filter_with("block bomb\nmask damn\nmask example\nmask see you at a@b.com\nmask email\nmask "
                         "mail m@n.org now\nmask big "
                         "damn\nmask damn deal\n",
                         true);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    filter_destroy(filter);
    return 0;
}

static char *apply(const struct filter *f, struct vault *v, const char *text)
{
    char *out, *copy = malloc(strlen(text) + 1);
    size_t size;
    memcpy(copy, text, strlen(text));
    assert_int_equal(filter_apply(f, v, copy, strlen(text), &out, &size, NULL), 0);
    assert_int_equal(strlen(out), size);
    free(copy);
    return out;
}

static void expect(const struct filter *f, struct vault *v, const char *text, const char *expected)
{
    char *out = apply(f, v, text);
    assert_string_equal(out, expected);
    free(out);
}

static void expect_restored(const struct vault *v, const char *reply, const char *expected)
{
    struct restorer *r = restorer_create(v);
    char *out;
    size_t size;
    assert_int_equal(restorer_push(r, reply, strlen(reply), true, &out, &size), 0);
    assert_int_equal(size, strlen(expected));
    assert_memory_equal(out, expected, size);
    free(out);
    restorer_destroy(r);
}

static void test_conversation(void **state)
{
    (void)state;
    struct vault *v = vault_create();
    expect(filter, v, "I am ann@x.org, +12125550123; not bob@x.org.",
           "I am [EMAIL_1], [PHONE_1]; not [EMAIL_2].");
    expect_restored(v, "Hi [EMAIL_1], I call [PHONE_1].", "Hi ann@x.org, I call +12125550123.");
    /* the client sends the restored reply back: the same placeholders */
    expect(filter, v, "Hi ann@x.org, I call +12125550123.", "Hi [EMAIL_1], I call [PHONE_1].");
    expect(filter, v, "new: cy@x.org and 4111 1111 1111 1111", "new: [EMAIL_3] and [CARD_1]");
    uint8_t *bytes;
    size_t size;
    assert_int_equal(vault_serialise(v, &bytes, &size), 0);
    vault_destroy(v);
    assert_int_equal(vault_parse(bytes, size, &v), 0); /* after a restart */
    free(bytes);
    expect(filter, v, "bob@x.org dan@x.org", "[EMAIL_2] [EMAIL_4]");
    vault_destroy(v);
}

static void test_known_values_are_masked_without_their_context(void **state)
{
    (void)state;
    struct vault *v = vault_create();
    expect(filter, v, "my phone: 5550123", "my phone: [PHONE_1]");
    expect(filter, v, "is 5550123 taken? 15550123", "is [PHONE_1] taken? 15550123");
    expect(filter, v, "77 5559876; phone: 5559876",
           "77 [PHONE_2]; phone: [PHONE_2]"); /* recognised later in the same text */
    struct filter *no_pii = filter_with("mask x\n", false);
    expect(no_pii, v, "5550123 bob@y.org", "[PHONE_1] bob@y.org"); /* recognisers off, the vault stays */
    filter_destroy(no_pii);
    vault_destroy(v);
}

static void test_typed_placeholders(void **state)
{
    (void)state;
    struct vault *v = vault_create();
    /* never in the vault: stays what it is, now and in replies */
    expect(filter, v, "what is [EMAIL_1]? ann@x.org", "what is [EMAIL_1]? [EMAIL_2]");
    expect_restored(v, "[EMAIL_1] [EMAIL_2]", "[EMAIL_1] ann@x.org");
    expect(filter, v, "tell me [EMAIL_2]", "tell me [EMAIL_2]"); /* in the vault: means the same value */
    expect(filter, v, "[email] [EMAIL_] [EMAIL_0]",
           "[***] [***_] [***_0]"); /* not of the form; a masked word */
    vault_destroy(v);
}

static void test_overlaps(void **state)
{
    (void)state;
    struct vault *v = vault_create();
    expect(filter, v, "damn it, ann@example.com", "*** it, [EMAIL_1]"); /* a masked word inside a value */
    expect(filter, v, "ok: see you at a@b.com!", "ok: ***[EMAIL_2]!");  /* a value inside a masked phrase */
    expect(filter, v, "so mail m@n.org now!", "so ***[EMAIL_3]***!");
    expect(filter, v, "a big damn deal", "a ***");        /* masks that overlap */
    expect(filter, v, "x a@b.com.au y", "x [EMAIL_4] y"); /* longer than the known a@b.com */
    expect_restored(v, "[EMAIL_4]", "a@b.com.au");
    expect(filter, v, "::ffff:192.0.2.1", "[IP_1]");
    expect_restored(v, "[IP_1]", "::ffff:192.0.2.1");
    expect(filter, v, "0612345678@x.org", "[EMAIL_5]");         /* the longest names it */
    expect(filter, v, "4111 1111 1111 1111@x.org", "[CARD_1]"); /* they cross: nothing is left behind */
    expect_restored(v, "[CARD_1]", "4111 1111 1111 1111@x.org");
    struct vault_placeholder p;
    assert_int_equal(vault_put(v, 0, "q [IP", 5, &p), 0);
    expect(filter, v, "q [IP_9]",
           "[EMAIL_6]_9]"); /* what crosses a typed placeholder takes no more than its own */
    vault_destroy(v);
}

static void test_overlap_longer_than_a_value(void **state)
{
    (void)state;
    struct vault *v = vault_create();
    char text[600];
    size_t at = (size_t)snprintf(text, sizeof text, "4111 1111 1111 1111");
    for (int i = 0; i < 240; i++) /* an address of 250 bytes whose local part begins in the card */
        text[at++] = '.';
    snprintf(text + at, sizeof text - at, "y@x.org");
    char *out = apply(filter, v, text);
    assert_null(strstr(out, "1111"));
    assert_null(strstr(out, "x.org"));
    expect_restored(v, out, text);
    free(out);
    vault_destroy(v);
}

static void test_blocked(void **state)
{
    (void)state;
    struct vault *v = vault_create();
    struct td_error err = {0};
    char *out = (char *)1;
    size_t size;
    static const char text[] = "ann@x.org has a BOMB";
    assert_int_equal(filter_apply(filter, v, text, sizeof text - 1, &out, &size, &err), -TD_ERR_BLOCKED);
    assert_null(out);
    assert_true(err.text[0]);
    assert_null(strstr(err.text, "BOMB"));
    assert_null(strstr(err.text, "bomb"));
    assert_int_equal(vault_count(v), 0);
    vault_destroy(v);
}

static void test_no_words_no_pii(void **state)
{
    (void)state;
    struct filter *f;
    struct filter_config config = {.words_path = NULL, .pii = false};
    assert_int_equal(filter_create(&config, &f, NULL), 0);
    struct vault *v = vault_create();
    expect(f, v, "", "");
    expect(f, v, "ann@x.org bomb damn", "ann@x.org bomb damn");
    char *out;
    size_t size;
    assert_int_equal(filter_apply(f, v, "a\0b\xff", 4, &out, &size, NULL), 0); /* any bytes pass */
    assert_int_equal(size, 4);
    assert_memory_equal(out, "a\0b\xff", 4);
    free(out);
    vault_destroy(v);
    filter_destroy(f);
    struct td_error err = {0};
    config.words_path = "/nonexistent";
    assert_int_equal(filter_create(&config, &f, &err), -TD_ERR_IO);
    assert_null(f);
    assert_non_null(strstr(err.text, "/nonexistent"));
}

static void test_full_vault_refuses_the_text(void **state)
{
    (void)state;
    struct vault *v = vault_create();
    char text[64], *out;
    size_t size;
    struct td_error err = {0};
    for (unsigned i = 0; i < FILTER_VAULT_MAX; i++) {
        struct vault_placeholder p;
        size_t n = (size_t)snprintf(text, sizeof text, "u%u@x.org", i);
        assert_int_equal(vault_put(v, 0, text, n, &p), 0);
    }
    expect(filter, v, "u7@x.org", "[EMAIL_8]");
    assert_int_equal(filter_apply(filter, v, "new@x.org", 9, &out, &size, &err), -TD_ERR_LIMIT);
    assert_null(out);
    assert_true(err.text[0]);
    assert_null(strstr(err.text, "new@x.org"));
    vault_destroy(v);
}

static void test_size_limit(void **state)
{
    (void)state;
    char *text = malloc(FILTER_TEXT_MAX + 1), *out;
    size_t size;
    struct vault *v = vault_create();
    struct td_error err = {0};
    memset(text, ' ', FILTER_TEXT_MAX + 1);
    assert_int_equal(filter_apply(filter, v, text, FILTER_TEXT_MAX + 1, &out, &size, &err), -TD_ERR_LIMIT);
    memcpy(text + FILTER_TEXT_MAX - 9, "a@xyz.org", 9);
    assert_int_equal(filter_apply(filter, v, text, FILTER_TEXT_MAX, &out, &size, &err), 0);
    assert_int_equal(size, FILTER_TEXT_MAX);
    assert_memory_equal(out + size - 9, "[EMAIL_1]", 9);
    free(out);
    free(text);
    vault_destroy(v);
}

/* Texts on which something that looks back or ahead without a bound would take hours: an eighth of a mebibyte squared. */
static void test_hostile_texts_are_linear(void **state)
{
    (void)state;
    static const char *const patterns[] = {
        "1 ",       "1",          "1.", "a:",      "@",
        "a@",       "a@a.",       "a",  "+1",      "(1) ",
        "::",       "[EMAIL_1] ", "[",  "[EMAIL_", "damn ",
        "\xcc\x81", "DE89 ",      "1-", "1/1/26 ", "phone 1234567 ",
        "\xff",     "4111 1111 ", "a.",
    };
    enum { SIZE = 1 << 17 };
    char *text = malloc(SIZE);
    struct vault *v = vault_create();
    for (size_t p = 0; p < TD_COUNT(patterns); p++) {
        size_t length = strlen(patterns[p]), size;
        for (size_t i = 0; i < SIZE; i++)
            text[i] = patterns[p][i % length];
        char *out;
        assert_int_equal(filter_apply(filter, v, text, SIZE, &out, &size, NULL), 0);
        free(out);
    }
    vault_destroy(v);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conversation),
        cmocka_unit_test(test_known_values_are_masked_without_their_context),
        cmocka_unit_test(test_typed_placeholders),
        cmocka_unit_test(test_overlaps),
        cmocka_unit_test(test_overlap_longer_than_a_value),
        cmocka_unit_test(test_blocked),
        cmocka_unit_test(test_no_words_no_pii),
        cmocka_unit_test(test_full_vault_refuses_the_text),
        cmocka_unit_test(test_size_limit),
        cmocka_unit_test(test_hostile_texts_are_linear),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
