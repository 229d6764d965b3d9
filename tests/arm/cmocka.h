/* cmocka: the few macros of cmocka that the unit tests of the CPU engine use, so that the same sources are built for a
 * machine for which there is no cmocka. In place of its longjmp a failure ends the program: a test that fails is
 * found all the same, only those behind it are not run. */
#ifndef TANDEM_TESTS_ARM_CMOCKA_H
#define TANDEM_TESTS_ARM_CMOCKA_H
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};
#define cmocka_unit_test(f)                                                                                  \
    {                                                                                                        \
#f, f                                                                                                \
    }

static inline int run_tests(const char *group, const struct CMUnitTest *tests, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        void *state = NULL;
        printf("%s: %s\n", group, tests[i].name);
        fflush(stdout);
        tests[i].run(&state);
    }
    return 0;
}
#define cmocka_run_group_tests_name(name, tests, setup, teardown)                                            \
    run_tests(name, tests, sizeof(tests) / sizeof((tests)[0]))
#define cmocka_run_group_tests(tests, setup, teardown)                                                       \
    cmocka_run_group_tests_name(__FILE__, tests, setup, teardown)

#define fail_msg(...)                                                                                        \
    (printf("%s:%d: ", __FILE__, __LINE__), printf(__VA_ARGS__), printf("\n"), fflush(stdout), exit(1))

static inline void check(bool holds, const char *what, const char *file, int line)
{
    if (holds)
        return;
    printf("%s:%d: %s does not hold\n", file, line, what);
    exit(1);
}
#define assert_true(c)                   check(c, #c, __FILE__, __LINE__)
#define assert_false(c)                  assert_true(!(c))
#define assert_null(p)                   assert_true((p) == NULL)
#define assert_non_null(p)               assert_true((p) != NULL)
#define assert_ptr_equal(a, b)           assert_true((const void *)(a) == (const void *)(b))
#define assert_int_equal(a, b)           assert_true((intmax_t)(a) == (intmax_t)(b))
#define assert_int_not_equal(a, b)       assert_true((intmax_t)(a) != (intmax_t)(b))
#define assert_string_equal(a, b)        assert_true(strcmp(a, b) == 0)
#define assert_memory_equal(a, b, n)     assert_true(memcmp(a, b, n) == 0)
#define assert_memory_not_equal(a, b, n) assert_true(memcmp(a, b, n) != 0)

#endif
