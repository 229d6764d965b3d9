/* page_pool: a long random history against a naive twin that only counts. */
#include "kernels/page_pool.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define PAGES 37

static uint32_t next_random(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static uint32_t twin_free(const uint32_t *references)
{
    uint32_t n = 0;
    for (unsigned i = 0; i < PAGES; i++)
        n += references[i] == 0;
    return n;
}

static void random_history_equals_the_twin(void **state)
{
    (void)state;
    struct page_pool *pool = page_pool_create(PAGES);
    uint32_t references[PAGES] = {0}, seed = 7, full_count = 0, used = 0;
    assert_non_null(pool);
    for (int step = 0; step < 200000; step++) {
        uint32_t page = next_random(&seed) % PAGES, what = next_random(&seed) % 8;
        if (what < 4) { /* more allocs than releases, so that the pool runs full */
            uint32_t got = page_pool_alloc(pool);
            assert_true((got == PAGE_NONE) == (twin_free(references) == 0));
            full_count += got == PAGE_NONE;
            if (got != PAGE_NONE) {
                assert_true(got < PAGES && references[got] == 0);
                references[got] = 1;
                used = TD_MAX(used, got + 1);
            }
        } else if (what < 5 && references[page] > 0) {
            page_pool_share(pool, page);
            references[page]++;
        } else if (references[page] > 0) {
            page_pool_release(pool, page);
            references[page]--;
        }
        assert_int_equal(page_pool_references(pool, page), references[page]);
        assert_int_equal(page_pool_free_count(pool), twin_free(references));
        assert_int_equal(page_pool_used_until(pool), used);
    }
    assert_true(full_count > 100);
    assert_int_equal(page_pool_count(pool), PAGES);
    page_pool_destroy(pool);
}

static void an_empty_pool_has_nothing_to_give(void **state)
{
    (void)state;
    struct page_pool *pool = page_pool_create(0);
    assert_non_null(pool);
    assert_int_equal(page_pool_alloc(pool), PAGE_NONE);
    page_pool_destroy(pool);
    page_pool_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_history_equals_the_twin),
        cmocka_unit_test(an_empty_pool_has_nothing_to_give),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
