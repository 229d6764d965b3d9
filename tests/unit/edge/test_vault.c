/* vault: placeholders, numbers, bytes (the layout at the head of vault.c), hostile bytes, values found again in a text. */
#include "edge/vault.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static struct vault_placeholder put(struct vault *v, uint8_t kind, const char *value)
{
    struct vault_placeholder p = {0, 0};
    assert_int_equal(vault_put(v, kind, value, strlen(value), &p), 0);
    return p;
}

static void test_placeholder_text(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int result; /* bytes, 0, or -1 for "may become one" */
        uint8_t kind;
        uint16_t number;
    } rows[] = {
        {"[EMAIL_1]", 9, PII_EMAIL, 1},
        {"[PHONE_20]x", 10, PII_PHONE, 20},
        {"[CARD_9999]", 11, PII_CARD, 9999},
        {"[IP_7]", 6, PII_IP, 7},
        {"[IBAN_10]", 9, PII_IBAN, 10},
        {"", -1, 0, 0},
        {"[", -1, 0, 0},
        {"[I", -1, 0, 0},
        {"[IP", -1, 0, 0},
        {"[IBAN", -1, 0, 0},
        {"[IP_", -1, 0, 0},
        {"[IP_99", -1, 0, 0},
        {"[IP_9999", -1, 0, 0},
        {"[IP_99999", 0, 0, 0},
        {"[IP_0", 0, 0, 0},
        {"[IP_01]", 0, 0, 0},
        {"[IP_]", 0, 0, 0},
        {"[IP_1 ]", 0, 0, 0},
        {"[ip_1]", 0, 0, 0},
        {"[IPX_1]", 0, 0, 0},
        {"[X_1]", 0, 0, 0},
        {"EMAIL_1]", 0, 0, 0},
        {"[[IP_1]", 0, 0, 0},
    };
    for (size_t i = 0; i < TD_COUNT(rows); i++) {
        struct vault_placeholder p = {0, 0};
        int got = vault_placeholder_parse(rows[i].text, strlen(rows[i].text), &p);
        assert_int_equal(got, rows[i].result < 0 ? -TD_ERR_TRUNCATED : rows[i].result);
        if (got <= 0)
            continue;
        assert_int_equal(p.kind, rows[i].kind);
        assert_int_equal(p.number, rows[i].number);
        char text[VAULT_PLACEHOLDER_MAX + 1];
        assert_int_equal(vault_placeholder_print(p, text), got);
        assert_memory_equal(text, rows[i].text, got);
        assert_int_equal(strlen(text), got);
    }
}

static void test_numbers_by_first_appearance(void **state)
{
    (void)state;
    struct vault *v = vault_create();
    assert_int_equal(put(v, PII_EMAIL, "a@example.com").number, 1);
    assert_int_equal(put(v, PII_EMAIL, "b@example.com").number, 2);
    assert_int_equal(put(v, PII_IP, "192.0.2.1").number, 1);
    assert_int_equal(put(v, PII_EMAIL, "a@example.com").number, 1);
    assert_int_equal(put(v, PII_PHONE, "a@example.com").kind, PII_EMAIL); /* one value, one placeholder */
    vault_reserve(v, (struct vault_placeholder){PII_EMAIL, 3});
    vault_reserve(v, (struct vault_placeholder){PII_EMAIL, 1}); /* has a value: stays */
    assert_int_equal(put(v, PII_EMAIL, "c@example.com").number, 4);
    assert_int_equal(vault_count(v), 4);
    struct span s = vault_find(v, (struct vault_placeholder){PII_EMAIL, 1});
    assert_int_equal(s.size, 13);
    assert_memory_equal(s.data, "a@example.com", 13);
    assert_int_equal(vault_find(v, (struct vault_placeholder){PII_EMAIL, 3}).size, 0);
    assert_int_equal(vault_find(v, (struct vault_placeholder){PII_EMAIL, 5}).size, 0);
    vault_destroy(v);
    vault_destroy(NULL);
}

static void test_limits(void **state)
{
    (void)state;
    struct vault *v = vault_create();
    struct vault_placeholder p;
    char value[FILTER_VALUE_MAX + 1];
    memset(value, 'x', sizeof value);
    assert_int_equal(vault_put(v, PII_EMAIL, value, sizeof value, &p), -TD_ERR_LIMIT);
    assert_int_equal(vault_put(v, PII_EMAIL, value, FILTER_VALUE_MAX, &p), 0);
    for (unsigned i = 1; i < FILTER_VAULT_MAX; i++) {
        snprintf(value, sizeof value, "v%u", i);
        assert_int_equal(put(v, PII_EMAIL, value).number, i + 1);
    }
    assert_int_equal(vault_put(v, PII_EMAIL, "one more", 8, &p), -TD_ERR_LIMIT);
    assert_int_equal(put(v, PII_EMAIL, "v17").number, 18); /* known ones still work */
    assert_int_equal(vault_count(v), FILTER_VAULT_MAX);
    uint8_t *bytes;
    size_t size;
    struct vault *back;
    assert_int_equal(vault_serialise(v, &bytes, &size), 0);
    assert_int_equal(vault_parse(bytes, size, &back), 0);
    assert_int_equal(vault_count(back), FILTER_VAULT_MAX);
    assert_int_equal(put(back, PII_EMAIL, "v4095").number, 4096);
    free(bytes);
    vault_destroy(back);
    vault_destroy(v);

    v = vault_create(); /* all numbers of a kind reserved */
    for (unsigned i = 1; i <= VAULT_NUMBER_MAX; i++)
        vault_reserve(v, (struct vault_placeholder){PII_IP, (uint16_t)i});
    assert_int_equal(vault_put(v, PII_IP, "192.0.2.1", 9, &p), -TD_ERR_LIMIT);
    assert_int_equal(put(v, PII_IBAN, "x").number, 1);
    vault_destroy(v);
}

/* Written by hand from the description. */
static const uint8_t golden[] = {
    'T', 'D', 'V', 'T', 1, 0, 0,   0,   3,   0,   0,   0,        /**/
    0,   0,   1,   0,   7, 0, 'a', '@', 'b', '.', 'c', 'o', 'm', /* [EMAIL_1] */
    3,   0,   2,   0,   3, 0, ':', ':', '1',                     /* [IP_2] */
    3,   0,   1,   0,   0, 0,                                    /* [IP_1] reserved */
};

static void test_bytes(void **state)
{
    (void)state;
    struct vault *v = vault_create(), *back;
    put(v, PII_EMAIL, "a@b.com");
    vault_reserve(v, (struct vault_placeholder){PII_IP, 1});
    put(v, PII_IP, "::1");
    uint8_t *bytes;
    size_t size;
    assert_int_equal(vault_serialise(v, &bytes, &size), 0);
    assert_int_equal(size, sizeof golden);
    assert_memory_equal(bytes, golden, size);
    free(bytes);
    vault_destroy(v);

    assert_int_equal(vault_parse(golden, sizeof golden, &back), 0);
    assert_int_equal(vault_count(back), 2);
    assert_memory_equal(vault_find(back, (struct vault_placeholder){PII_IP, 2}).data, "::1", 3);
    assert_int_equal(vault_find(back, (struct vault_placeholder){PII_IP, 1}).size, 0);
    assert_int_equal(put(back, PII_IP, "192.0.2.1").number, 3); /* 1 is still reserved */
    vault_destroy(back);
}

static int parse_changed(size_t at, uint8_t value)
{
    uint8_t bytes[sizeof golden];
    struct vault *v;
    memcpy(bytes, golden, sizeof golden);
    bytes[at] = value;
    int rc = vault_parse(bytes, sizeof bytes, &v);
    vault_destroy(v);
    return rc;
}

static void test_hostile_bytes(void **state)
{
    (void)state;
    struct vault *v;
    for (size_t size = 0; size < sizeof golden; size++) {
        uint8_t *exact = malloc(size + 1);
        memcpy(exact, golden, size);
        assert_int_equal(vault_parse(exact, size, &v), -TD_ERR_TRUNCATED);
        assert_null(v);
        free(exact);
    }
    uint8_t longer[sizeof golden + 1] = {0};
    memcpy(longer, golden, sizeof golden);
    assert_int_equal(vault_parse(longer, sizeof longer, &v), -TD_ERR_FORMAT);
    assert_int_equal(parse_changed(0, 'X'), -TD_ERR_FORMAT);
    assert_int_equal(parse_changed(4, 2), -TD_ERR_VERSION);
    assert_int_equal(parse_changed(6, 1), -TD_ERR_FORMAT);
    assert_int_equal(parse_changed(8, 4), -TD_ERR_TRUNCATED);
    assert_int_equal(parse_changed(8, 2), -TD_ERR_FORMAT); /* bytes left over */
    assert_int_equal(parse_changed(11, 255), -TD_ERR_TRUNCATED);
    assert_int_equal(parse_changed(12, PII_KIND_COUNT), -TD_ERR_FORMAT);
    assert_int_equal(parse_changed(13, 1), -TD_ERR_FORMAT);
    assert_int_equal(parse_changed(14, 0), -TD_ERR_FORMAT);    /* number 0 */
    assert_int_equal(parse_changed(15, 0x28), -TD_ERR_FORMAT); /* 10,241 */
    assert_int_equal(parse_changed(18, 0xff), -TD_ERR_FORMAT); /* not UTF-8 */
    assert_int_equal(parse_changed(27, 1), -TD_ERR_FORMAT);    /* [IP_1] twice */
    static const uint8_t same_value[] = {'T', 'D', 'V', 'T', 1, 0,   0, 0, 2, 0, 0, 0, 0,
                                         0,   1,   0,   1,   0, 'x', 1, 0, 1, 0, 1, 0, 'x'};
    assert_int_equal(vault_parse(same_value, sizeof same_value, &v), -TD_ERR_FORMAT);
    uint8_t large[18 + FILTER_VALUE_MAX + 1];
    memset(large, 'x', sizeof large);
    memcpy(large, golden, 18);
    large[8] = 1;
    store_le16(large + 16, FILTER_VALUE_MAX + 1);
    assert_int_equal(vault_parse(large, sizeof large, &v), -TD_ERR_LIMIT);
    store_le16(large + 16, FILTER_VALUE_MAX);
    assert_int_equal(vault_parse(large, sizeof large - 1, &v), 0);
    vault_destroy(v);
}

static void test_scan(void **state)
{
    (void)state;
    struct vault *v = vault_create();
    struct filter_spans spans = {0};
    assert_int_equal(vault_scan(v, "a@b.com", 7, &spans), 0); /* an empty vault */
    assert_int_equal(spans.count, 0);
    put(v, PII_EMAIL, "a@b.com");
    put(v, PII_PHONE, "555-0123");
    put(v, PII_CARD, "+5");
    static const char text[] =
        "a@b.com xa@b.com a@b.community a@b.com\xcc\x81 555-0123. 555-01234 1555-0123 +5 5+5 +55 a@b.com";
    assert_int_equal(vault_scan(v, text, sizeof text - 1, &spans), 0);
    static const uint32_t begins[] = {0, 41, 71, 75, 82};
    assert_int_equal(spans.count, TD_COUNT(begins));
    for (size_t i = 0; i < spans.count; i++)
        assert_int_equal(spans.items[i].begin, begins[i]);
    assert_int_equal(spans.items[1].end, 49);
    assert_int_equal(spans.items[1].kind, PII_PHONE);
    spans.count = 0;
    put(v, PII_EMAIL, "b.com"); /* the end of another value: only the longest is given */
    assert_int_equal(vault_scan(v, "a@b.com", 7, &spans), 0);
    assert_int_equal(spans.count, 1);
    assert_int_equal(spans.items[0].begin, 0);
    spans.count = 0;
    put(v, PII_IP, "::1"); /* a new value is looked for as well */
    assert_int_equal(vault_scan(v, "at ::1", 6, &spans), 0);
    assert_int_equal(spans.count, 1);
    filter_spans_free(&spans);
    vault_destroy(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_placeholder_text), cmocka_unit_test(test_numbers_by_first_appearance),
        cmocka_unit_test(test_limits),           cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_hostile_bytes),    cmocka_unit_test(test_scan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
