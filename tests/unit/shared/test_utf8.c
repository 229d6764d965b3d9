/* utf8: what may be shown of a stream cut anywhere, decoding and classes, each against utf8proc over every code point. */
#include "shared/tokenizer.h"
#include "shared/utf8.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <utf8proc.h>
#include "shared/base.h"
#include <cmocka.h>

static void test_utf8(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t complete; /* bytes that may be shown */
        bool valid;
    } cases[] = {
        {"", 0, true},
        {"abc", 3, true},
        {"\xc3\xa9", 2, true},
        {"a\xc3", 1, false},
        {"\xe4\xb8\xad", 3, true},
        {"x\xe4\xb8", 1, false},
        {"x\xe4", 1, false},
        {"\xf0\x9f\x99\x82", 4, true},
        {"\xf0\x9f\x99", 0, false},
        {"ab\xf0\x9f", 2, false},
        {"\xf4\x8f\xbf\xbf", 4, true},
        {"\xf4\x90\x80\x80", 4, false}, /* beyond U+10FFFF */
        {"\xf4\x90", 2, false},         /* cannot become valid: waiting would be in vain */
        {"\xed\xa0", 2, false},         /* a surrogate */
        {"\xed\x9f", 0, false},
        {"\xe0\x80", 2, false}, /* overlong */
        {"\xc0\x80", 2, false},
        {"\xc1", 1, false},
        {"\xf5", 1, false},
        {"\xff", 1, false},
        {"\x80", 1, false},
        {"\xc3\xa9\x80", 3, false},
        {"\x80\x80\x80\x80", 4, false},
        {"\xe4"
         "a",
         2, false},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        size_t size = strlen(cases[i].bytes);
        assert_int_equal(utf8_complete(cases[i].bytes, size), cases[i].complete);
        assert_int_equal(utf8_valid(cases[i].bytes, size), cases[i].valid);
    }
}

/* Every code point and every prefix of its encoding. */
static void test_utf8_decode_against_utf8proc(void **state)
{
    (void)state;
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        utf8proc_uint8_t bytes[4];
        uint32_t got;
        if (cp >= 0xd800 && cp < 0xe000)
            continue;
        size_t size = (size_t)utf8proc_encode_char((utf8proc_int32_t)cp, bytes);
        const char *text = (const char *)bytes;
        if (utf8_decode(text, size, &got) != size || got != cp)
            fail_msg("U+%04X is misread", cp);
        for (size_t part = 1; part < size; part++)
            if (utf8_complete(text, part) != 0 || utf8_decode(text, part, &got) != 1 || got != UTF8_INVALID)
                fail_msg("a part of U+%04X is misread", cp);
    }
}

/* Classes are fixed to Unicode 15.1. Where utf8proc knows 15.0 it agrees, but for the ideographs of extension I, which came with 15.1. */
static void test_classes_against_utf8proc(void **state)
{
    (void)state;
    if (strcmp(utf8proc_unicode_version(), "15.0.0") != 0)
        skip();
    static const uint32_t spaces[] = {0x9, 0xa, 0xb, 0xc, 0xd, 0x85};
    size_t space_count = 0;
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)cp);
        enum char_class want = CHAR_OTHER;
        if (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO)
            want = CHAR_LETTER;
        else if (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO)
            want = CHAR_NUMBER;
        else if (category >= UTF8PROC_CATEGORY_ZS && category <= UTF8PROC_CATEGORY_ZP)
            want = CHAR_SPACE;
        for (size_t i = 0; i < TD_COUNT(spaces); i++)
            want = cp == spaces[i] ? CHAR_SPACE : want;
        if (cp >= 0x2ebf0 && cp <= 0x2ee5d)
            want = CHAR_LETTER;
        space_count += want == CHAR_SPACE;
        if (unicode_class(cp) != want)
            fail_msg("U+%04X has class %d", cp, unicode_class(cp));
    }
    assert_int_equal(space_count, 25); /* White_Space in PropList.txt */
    assert_int_equal(unicode_class(UTF8_INVALID), CHAR_OTHER);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8),
        cmocka_unit_test(test_utf8_decode_against_utf8proc),
        cmocka_unit_test(test_classes_against_utf8proc),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
