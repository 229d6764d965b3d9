/* conversation_id: each byte, and both ends of the length. */
#include "shared/conversation_id.h"
#include <ctype.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

static void test_bytes(void **state)
{
    (void)state;
    for (int byte = 1; byte < 256; byte++) {
        char id[] = {'a', (char)byte, 'b', '\0'};
        bool allowed = byte < 128 && (isalnum(byte) || strchr("-_.:", byte));
        assert_int_equal(conversation_id_valid(id), allowed);
    }
}

static void test_length(void **state)
{
    (void)state;
    char id[CONVERSATION_ID_MAX + 2] = "";
    assert_false(conversation_id_valid(id));
    for (size_t i = 0; i <= CONVERSATION_ID_MAX; i++) {
        id[i] = 'x';
        assert_int_equal(conversation_id_valid(id), i < CONVERSATION_ID_MAX);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bytes), cmocka_unit_test(test_length)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
