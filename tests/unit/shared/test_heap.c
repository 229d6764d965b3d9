/* heap: few arenas however many threads, and large blocks that go back to the system. */
#include "shared/heap.h"
#include <malloc.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <cmocka.h>

#define THREADS 12

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
static pthread_barrier_t all_there;

static void *use_heap(void *arg)
{
    (void)arg;
    void *volatile block = malloc(100);
    pthread_barrier_wait(&all_there);
    free(block);
    return NULL;
}

static unsigned arenas(void)
{
    char *text = NULL;
    size_t size = 0;
    unsigned count = 0;
    FILE *f = open_memstream(&text, &size);
    assert_int_equal(malloc_info(0, f), 0);
    fclose(f);
    for (const char *p = text; (p = strstr(p, "<heap nr=")); p++)
        count++;
    free(text);
    return count;
}

static void test_arenas_are_few(void **state)
{
    (void)state;
    pthread_t threads[THREADS];
    pthread_barrier_init(&all_there, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, use_heap, NULL), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&all_there);
    assert_in_range(arenas(), 1, HEAP_ARENAS_MAX);
}

/* By itself the C library would keep the second one in an arena, as the first has been freed. */
static void test_large_blocks_go_back(void **state)
{
    (void)state;
    size_t before = mallinfo2().hblkhd;
    for (int i = 0; i < 3; i++) {
        void *volatile block = malloc(3 * HEAP_LARGE_SIZE);
        assert_true(mallinfo2().hblkhd >= before + 3 * HEAP_LARGE_SIZE);
        free(block);
        assert_int_equal(mallinfo2().hblkhd, before);
    }
}

static bool is_resident(uintptr_t page)
{
    unsigned char state = 0;
    return mincore((void *)page, 4096, &state) == 0 && (state & 1);
}

/* What is free between two that live is given back, too. */
static void test_gaps_are_given_back(void **state)
{
    (void)state;
    enum { COUNT = 4, SIZE = HEAP_LARGE_SIZE / 4 };
    char *blocks[COUNT];
    for (int i = 0; i < COUNT; i++)
        memset(blocks[i] = malloc(SIZE), 1, SIZE);
    uintptr_t middle = ((uintptr_t)blocks[1] + SIZE / 2) & ~(uintptr_t)4095;
    free(blocks[1]);
    assert_true(is_resident(middle)); /* control */
    heap_trim();
    assert_false(is_resident(middle));
    assert_true(is_resident(((uintptr_t)blocks[2] + SIZE / 2) & ~(uintptr_t)4095));
    free(blocks[0]);
    free(blocks[2]);
    free(blocks[3]);
}
#endif

static void test_nothing_breaks(void **state)
{
    (void)state;
    heap_trim();
    free(malloc(1));
}

int main(void)
{
    heap_settle();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_breaks),
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        cmocka_unit_test(test_arenas_are_few),
        cmocka_unit_test(test_large_blocks_go_back),
        cmocka_unit_test(test_gaps_are_given_back),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
