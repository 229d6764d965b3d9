/* pii: each recogniser on what it must find and what it must leave alone. Card numbers are the schemes' public test numbers, IBANs the
 * examples of the IBAN registry, addresses those set aside for documents (RFC 2606, 3849, 5737), phone numbers those set aside for drama. */
#include "edge/pii_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

struct row {
    const char *text, *expected; /* values in order, with '|' between */
};

/* What `scan` finds, as a list like row.expected. */
static char *found(int (*scan)(const char *, size_t, struct filter_spans *), const char *text, size_t size,
                   int kind)
{
    struct filter_spans spans = {0};
    struct filter_buffer list = {0};
    assert_int_equal(filter_buffer_add(&list, "", 0), 0);
    assert_int_equal(scan(text, size, &spans), 0);
    filter_spans_sort(&spans);
    for (size_t i = 0; i < spans.count; i++) {
        const struct filter_span *s = &spans.items[i];
        assert_true(s->begin < s->end && s->end <= size);
        if (s->kind != kind)
            continue;
        if (list.size)
            filter_buffer_add(&list, "|", 1);
        filter_buffer_add(&list, text + s->begin, s->end - s->begin);
    }
    filter_spans_free(&spans);
    return list.data;
}

/* The text is copied to its exact size, so that reading beyond it is seen under a sanitizer. */
static void check(int (*scan)(const char *, size_t, struct filter_spans *), int kind, const struct row *rows,
                  size_t count)
{
    int bad = 0;
    for (size_t i = 0; i < count; i++) {
        size_t size = strlen(rows[i].text);
        char *copy = malloc(size ? size : 1);
        memcpy(copy, rows[i].text, size);
        char *list = found(scan, copy, size, kind);
        if (strcmp(list, rows[i].expected) != 0) {
            print_error("in  \"%s\"\nwant \"%s\"\ngot  \"%s\"\n", rows[i].text, rows[i].expected, list);
            bad++;
        }
        free(list);
        free(copy);
    }
    assert_int_equal(bad, 0);
}

static void test_emails(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"a@example.com", "a@example.com"},
        {"to john.doe+tag@mail.example.co.uk.", "john.doe+tag@mail.example.co.uk"},
        {"<mailto:x_y-z@example.org>", "x_y-z@example.org"},
        {"'o'brien@example.org'", "o'brien@example.org"},
        {"a@example.com,b@example.com;c@example.com", "a@example.com|b@example.com|c@example.com"},
        {"--- a@example.com ---", "a@example.com"},
        {"user=a@example.com&x", "a@example.com"},
        {"J\xc3\xb6rg@b\xc3\xbc"
         "cher.example",
         "J\xc3\xb6rg@b\xc3\xbc"
         "cher.example"},
        {"\xd0\xb8\xd0\xb2\xd0\xb0\xd0\xbd@\xd0\xbf\xd0\xbe\xd1\x87\xd1\x82\xd0\xb0.\xd1\x80\xd1\x84",
         "\xd0\xb8\xd0\xb2\xd0\xb0\xd0\xbd@\xd0\xbf\xd0\xbe\xd1\x87\xd1\x82\xd0\xb0.\xd1\x80\xd1\x84"},
        {"\xe9\x82\xae\xe7\xae\xb1\xe6\x98\xafjohn@example.com\xe8\xb0\xa2\xe8\xb0\xa2",
         "john@example.com"}, /* between Chinese text */
        {"\xe7\x94\xa8\xe6\x88\xb7@\xe4\xbe\x8b\xe5\xad\x90.\xe5\x85\xac\xe5\x8f\xb8",
         "\xe7\x94\xa8\xe6\x88\xb7@\xe4\xbe\x8b\xe5\xad\x90.\xe5\x85\xac\xe5\x8f\xb8"},
        {"a@xn--bcher-kva.example and b@example.xn--p1ai", "a@xn--bcher-kva.example|b@example.xn--p1ai"},
        {"a@example.com.1", "a@example.com"},
        {"a@example.com-", "a@example.com"},
        /* none */
        {"", ""},
        {"@", ""},
        {"@example.com", ""},
        {"a@", ""},
        {"a@localhost", ""},
        {"a@.com", ""},
        {"a@-x.com", ""},
        {"pkg@1.2.3", ""},
        {"@scope/pkg@10.0.1", ""},
        {"icon@2x.png", ""},
        {"...@example.com", ""},
        {"a @example.com", ""},
        {"a@ example.com", ""},
        {"5 @ 3.50", ""},
        {"a@example.c", ""},
    };
    check(pii_scan_emails, PII_EMAIL, rows, TD_COUNT(rows));
}

static void test_email_sizes(void **state)
{
    (void)state;
    /* An address of 254 bytes is one; of a longer one the part next to the '@' goes. */
    static const char domain[] = "@example.com";
    for (size_t local = 240; local < 246; local++) {
        char text[300];
        memset(text, 'x', local);
        memcpy(text + local, domain, sizeof domain);
        char *list = found(pii_scan_emails, text, strlen(text), PII_EMAIL);
        assert_int_equal(strlen(list), TD_MIN(local + sizeof domain - 1, 254u));
        free(list);
    }
}

static void test_cards(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"4111111111111111", "4111111111111111"}, /* Visa */
        {"card: 4111 1111 1111 1111.", "4111 1111 1111 1111"},
        {"4111-1111-1111-1111", "4111-1111-1111-1111"},
        {"5555555555554444, 378282246310005",
         "5555555555554444|378282246310005"}, /* Mastercard, American Express */
        {"3782 822463 10005", "3782 822463 10005"},
        {"6011111111111117 30569309025904 3530111333300000",
         "6011111111111117|30569309025904|3530111333300000"},
        {"4222222222222", "4222222222222"},             /* 13 digits */
        {"6304000000000000000", "6304000000000000000"}, /* 19 digits */
        {"4111\xc2\xa0"
         "1111\xc2\xa0"
         "1111\xc2\xa0"
         "1111",
         "4111\xc2\xa0"
         "1111\xc2\xa0"
         "1111\xc2\xa0"
         "1111"},
        {"\xef\xbc\x94"
         "111111111111111",
         "\xef\xbc\x94"
         "111111111111111"}, /* a full-width 4 */
        {"on 12 4111 1111 1111 1111 24", "4111 1111 1111 1111"},
        {"\xe5\x8d\xa1\xe5\x8f\xb7"
         "4111111111111111",
         "4111111111111111"}, /* after Chinese text */
        /* none */
        {"4111111111111112", ""},
        {"4111 1111 1111 1112", ""},
        {"411111111111111", ""}, /* 15 digits, wrong check */
        {"42222222222224", ""},
        {"0000 0000 0000 0000", ""},
        {"4-111-111111-11111-1", ""}, /* not written like a card */
        {"79927398713", ""},          /* satisfies Luhn, but 11 digits */
        {"4111111111111111a", ""},
        {"a4111111111111111", ""},
        {"41111111111111111111", ""}, /* inside a longer run */
        {"4111 1111-1111 1111", ""},  /* mixed */
        {"978-0-306-40615-7", ""},    /* ISBN */
        {"4111  1111 1111 1111", ""},
        {"63040000000000000009", ""}, /* 20 digits */
    };
    check(pii_scan_numbers, PII_CARD, rows, TD_COUNT(rows));
}

static void test_ibans(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"DE89370400440532013000", "DE89370400440532013000"},
        {"IBAN: DE89 3704 0044 0532 0130 00, thanks", "DE89 3704 0044 0532 0130 00"},
        {"GB29 NWBK 6016 1331 9268 19", "GB29 NWBK 6016 1331 9268 19"},
        {"gb29nwbk60161331926819", "gb29nwbk60161331926819"},
        {"FR1420041010050500013M02606", "FR1420041010050500013M02606"},
        {"NO9386011117947", "NO9386011117947"}, /* the shortest */
        {"MT84MALT011000012345MTLCAST001S", "MT84MALT011000012345MTLCAST001S"},
        {"CH93-0076-2011-6238-5295-7", "CH93-0076-2011-6238-5295-7"},
        {"NL91ABNA0417164300 ES9121000418450200051332", "NL91ABNA0417164300|ES9121000418450200051332"},
        {"BE68539007547034BIC", ""},
        /* none */
        {"DE88370400440532013000", ""},  /* remainder 0 */
        {"DE8937040044053201300", ""},   /* too short */
        {"DE893704004405320130001", ""}, /* too long */
        {"ZZ89370400440532013000", ""},  /* no such country */
        {"XDE89370400440532013000", ""},
        {"DE89 3704  0044 0532 0130 00", ""},
        {"DE89.3704.0044.0532.0130.00", ""},
        {"NO938601111794", ""},
    };
    check(pii_scan_ibans, PII_IBAN, rows, TD_COUNT(rows));
}

static void test_ips(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"192.0.2.1", "192.0.2.1"},
        {"at 192.0.2.1:8080, 198.51.100.7/24.", "192.0.2.1|198.51.100.7"},
        {"from 203.0.113.255.", "203.0.113.255"},
        {"0.0.0.0-255.255.255.255", "0.0.0.0|255.255.255.255"},
        {"2001:db8::1", "2001:db8::1"},
        {"[2001:db8::1]:443", "2001:db8::1"},
        {"2001:DB8:0:0:8:800:200C:417A.", "2001:DB8:0:0:8:800:200C:417A"},
        {"ip:2001:db8::1,", "2001:db8::1"},
        {"::1 and fe80::1%eth0", "::1|fe80::1"},
        {"::ffff:192.0.2.128", "::ffff:192.0.2.128"},
        {"2001:db8::1: yes", "2001:db8::1"},
        {"2001:db8::", "2001:db8::"},
        {"2001:db8::1.But", ""}, /* a letter right behind */
        {"2001:db8::1.Bad", "2001:db8::1"},
        {"a 1.2.3.4", "1.2.3.4"},
        /* none */
        {"v1.2.3.4", ""},
        {"1.2.3.4.5", ""},
        {"256.1.1.1", ""},
        {"1.2.3", ""},
        {"01.2.3.4", ""},
        {"1..2.3.4", ""},
        {"1.2.3.4x", ""},
        {"12:30:45", ""},
        {"00:1a:2b:3c:4d:5e", ""},
        {"std::vector<int>", ""},
        {"std::1", ""},
        {"a::b", ""},
        {"::add", ""},
        {"::", ""},
        {"1:2:3:4:5:6:7:8:9", ""},
        {"1::2::3", ""},
        {"12345::1", ""},
        {"2026-01-31T12:30:45.123", ""},
    };
    check(pii_scan_ips, PII_IP, rows, TD_COUNT(rows));
}

static void test_phones(void **state)
{
    (void)state;
    static const struct row rows[] = {
        /* with the country */
        {"+12125550123", "+12125550123"},
        {"+1 (212) 555-0123.", "+1 (212) 555-0123"},
        {"+44 (0)20 7946 0958", "+44 (0)20 7946 0958"},
        {"+49/30/123456", "+49/30/123456"},
        {"+33\xc2\xa0"
         "6\xc2\xa0"
         "39\xc2\xa0"
         "98\xc2\xa0"
         "12\xc2\xa0"
         "34",
         "+33\xc2\xa0"
         "6\xc2\xa0"
         "39\xc2\xa0"
         "98\xc2\xa0"
         "12\xc2\xa0"
         "34"},
        {"tel:+81-3-5550-1234", "+81-3-5550-1234"},
        {"0044 20 7946 0958", "0044 20 7946 0958"},
        {"004915550123456", "004915550123456"},
        {"+4712345", "+4712345"},                 /* 7 digits */
        {"+123456789012345", "+123456789012345"}, /* 15 digits */
        {"+1 212 555 0123 2026-01-31", "+1 212 555 0123"},
        {"+49 30 123456 31.01.2026", "+49 30 123456"},
        {"+12125550123 42 apples", "+12125550123"},
        /* national */
        {"(212) 555-0123", "(212) 555-0123"},
        {"(030) 1234567", "(030) 1234567"},
        {"(11) 91234-5678", "(11) 91234-5678"},
        {"212-555-0123", "212-555-0123"},
        {"212.555.0123", "212.555.0123"},
        {"1-800-555-0199", "1-800-555-0199"},
        {"020 7946 0958", "020 7946 0958"},
        {"07700 900123", "07700 900123"},
        {"07700900123", "07700900123"},
        {"06 39 98 12 34 est", "06 39 98 12 34"},
        {"06.39.98.12.34", "06.39.98.12.34"},
        {"0170/1234567", "0170/1234567"},
        {"030 123456", "030 123456"},
        {"03-1234-5678", "03-1234-5678"},
        {"\xe6\x89\x93"
         "13800138000",
         "13800138000"},
        {"138 0013 8000", "138 0013 8000"},
        {"98765 43210", "98765 43210"},
        {"a 020 7946 0958, b 020 7946 0959", "020 7946 0958|020 7946 0959"},
        /* by what stands before */
        {"my phone number is 5550123", "5550123"},
        {"Call 555-0123 now", "555-0123"},
        {"\xe7\x94\xb5\xe8\xaf\x9d\xef\xbc\x9a"
         "5550 1234",
         "5550 1234"},
        {"t\xc3\xa9l. 612 345 678", "612 345 678"},
        /* none */
        {"hotel 5550123", ""},
        {"phone\n5550123", ""},
        {"phone 7 of 5550123", ""},
        {"555-0123", ""},
        {"phone 123456", ""}, /* 6 digits */
        {"+123456", ""},
        {"+1234567890123456", ""}, /* 16 digits */
        {"5+1234567", ""},
        {"x+12125550123", ""},
        {"++12125550123", ""},
        {"+0770090012", "0770090012"}, /* no country begins with 0 */
        {"2026-01-31", ""},
        {"31.01.2026 14", ""},
        {"01/02/2026", ""},
        {"01.02.2026 14 30 12", ""},
        {"1,234,567.89", ""},
        {"$2125550123", ""},
        {"$ 1 234 567 890", ""},
        {"123456789012", ""},
        {"5551234567", ""},
        {"112-555-0123", ""}, /* no such area code */
        {"212-155-0123", ""},
        {"212-555-0123-9", ""},
        {"212-555-01234", ""},
        {"9-212-555-0123", ""},
        {"0.123456789", ""},
        {"#0770090012", ""},
        {"id_0770090012", ""},
        {"x/0770090012", ""},
        {"550e8400-e29b-41d4-a716-446655440000", ""},
        {"0770090012-abc", ""},
        {"0077009001", ""}, /* 00, but too short */
        {"(1999) 1234-5678", ""},
        {"(1) 2345678", ""},
        {"20260131123456", ""},
        {"1706745600", ""}, /* a time in seconds */
    };
    check(pii_scan_numbers, PII_PHONE, rows, TD_COUNT(rows));
}

static void test_dates(void **state)
{
    (void)state;
    static const char *const dates[] = {"2026-01-31", "31.1.2026", "1/31/26", "2026/1/1 x"};
    static const char *const others[] = {"2026-01-311", "2026-01/31", "2026-01", "1.2.3",
                                         "123.4.2026",  "2026-123-1", "",        "31-01-"};
    for (size_t i = 0; i < TD_COUNT(dates); i++)
        assert_true(pii_date_at(dates[i], strlen(dates[i]), 0));
    for (size_t i = 0; i < TD_COUNT(others); i++)
        assert_false(pii_date_at(others[i], strlen(others[i]), 0));
}

static int scan_all(const char *text, size_t size, struct filter_spans *out)
{
    return pii_scan(text, size, out);
}

static void test_all_kinds_are_scanned(void **state)
{
    (void)state;
    static const char text[] = "a@example.com +12125550123 4111111111111111 192.0.2.1 DE89370400440532013000";
    static const char *const expected[PII_KIND_COUNT] = {"a@example.com", "+12125550123", "4111111111111111",
                                                         "192.0.2.1", "DE89370400440532013000"};
    for (int kind = 0; kind < PII_KIND_COUNT; kind++) {
        char *list = found(scan_all, text, sizeof text - 1, kind);
        assert_string_equal(list, expected[kind]);
        free(list);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_emails), cmocka_unit_test(test_email_sizes),
        cmocka_unit_test(test_cards),  cmocka_unit_test(test_ibans),
        cmocka_unit_test(test_ips),    cmocka_unit_test(test_phones),
        cmocka_unit_test(test_dates),  cmocka_unit_test(test_all_kinds_are_scanned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
