/* arena: alignment, zeroing, the limit at its edge, and that a warm arena takes no more memory. */
#include "shared/arena.h"
#include "shared/base.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define LIMIT (1u << 20)

static bool all_bytes(const uint8_t *p, size_t size, uint8_t value)
{
    for (size_t i = 0; i < size; i++)
        if (p[i] != value)
            return false;
    return true;
}

static void test_aligned_zeroed_and_apart(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 63, 64, 65, 1000, 4096, 5000, 100000, 3, 700};
    uint8_t *pieces[TD_COUNT(sizes)];
    struct arena a;
    arena_init(&a, LIMIT);
    for (int round = 0; round < 3; round++) { /* after a reset the same memory, dirty by now, is handed out */
        for (size_t i = 0; i < TD_COUNT(sizes); i++) {
            pieces[i] = arena_alloc(&a, sizes[i]);
            assert_non_null(pieces[i]);
            assert_int_equal((uintptr_t)pieces[i] % 64, 0);
            assert_true(all_bytes(pieces[i], sizes[i], 0));
            memset(pieces[i], (int)i + 1, sizes[i]);
        }
        for (size_t i = 0; i < TD_COUNT(sizes); i++)
            assert_true(all_bytes(pieces[i], sizes[i], (uint8_t)(i + 1)));
        assert_ptr_not_equal(pieces[0], pieces[1]);
        arena_reset(&a);
    }
    arena_deinit(&a);
}

static void test_warm_arena_takes_nothing(void **state)
{
    (void)state;
    struct arena a;
    arena_init(&a, LIMIT);
    size_t warm_size = 0;
    for (int round = 0; round < 50; round++) {
        for (size_t i = 0; i < 200; i++)
            assert_non_null(arena_alloc(&a, (i * 37) % 2000));
        if (round == 0)
            warm_size = a.taken_size;
        assert_int_equal(a.taken_size, warm_size);
        arena_reset(&a);
    }
    arena_deinit(&a);
    assert_int_equal(a.taken_size, 0);
}

static void test_limit_holds(void **state)
{
    (void)state;
    struct arena a;
    arena_init(&a, LIMIT);
    assert_null(arena_alloc(&a, LIMIT)); /* a chunk's head needs room too */
    assert_null(arena_alloc(&a, LIMIT + 1));
    assert_null(arena_alloc(&a, SIZE_MAX));
    assert_non_null(arena_alloc(&a, LIMIT - 64));
    assert_int_equal(a.taken_size, LIMIT);
    assert_null(arena_alloc(&a, 1));
    arena_reset(&a);
    size_t count = 0;
    while (arena_alloc(&a, 1024))
        count++;
    assert_int_equal(count, LIMIT / 1024 - 1);
    arena_deinit(&a);

    arena_init(
        &a, 100000); /* many small ones: the chunks together stay below the limit, and most of it is usable */
    for (count = 0; arena_alloc(&a, 64); count++)
        assert_true(a.taken_size <= 100000);
    assert_in_range(count, 1500, 100000 / 64);
    arena_deinit(&a);

    arena_init(&a, SIZE_MAX);
    assert_null(arena_alloc(&a, SIZE_MAX)); /* rounding up must not wrap around */
    assert_null(arena_alloc(&a, SIZE_MAX - 63));
    assert_null(arena_strndup(&a, "", SIZE_MAX));
    arena_deinit(&a);

    arena_init(&a, 0);
    assert_null(arena_alloc(&a, 1));
    arena_deinit(&a);
}

static void test_strndup(void **state)
{
    (void)state;
    struct arena a;
    arena_init(&a, LIMIT);
    assert_string_equal(arena_strndup(&a, "tandem bicycle", 6), "tandem");
    assert_string_equal(arena_strndup(&a, NULL, 0), "");
    assert_null(arena_strndup(&a, "x", LIMIT));
    arena_deinit(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_aligned_zeroed_and_apart),
        cmocka_unit_test(test_warm_arena_takes_nothing),
        cmocka_unit_test(test_limit_holds),
        cmocka_unit_test(test_strndup),
    };
    return cmocka_run_group_tests_name("arena", tests, NULL, NULL);
}
