/* no_memory: whoever waits for the writer needs no memory for it, and what the writer has none for fails by itself: it is told, and what was there stays. */
#include "shared/log.h"
#include "store_fixture.h"
#include <errno.h>

/* Stand in for the C library's, but under a sanitizer, which does that itself. */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MEMORY_CAN_FAIL 1
static atomic_bool nobody_gets_any;
static _Thread_local bool this_thread_gets_none;
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *p, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

static bool fails(void)
{
    if (this_thread_gets_none || atomic_load(&nobody_gets_any))
        errno = ENOMEM;
    return this_thread_gets_none || atomic_load(&nobody_gets_any);
}

void *malloc(size_t size)
{
    return fails() ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return fails() ? NULL : __libc_calloc(count, size);
}

void *realloc(void *p, size_t size)
{
    return fails() ? NULL : __libc_realloc(p, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    return fails() ? NULL : __libc_memalign(alignment, size);
}
#endif

static void waiting_takes_no_memory(void **state)
{
    (void)state;
#ifdef MEMORY_CAN_FAIL
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct fixture_block f[2];
    struct fixture_done ends[2] = {{0, 1}, {0, 1}};
    c.commit_interval_ms = 60000; /* nothing ends by itself */
    struct store *s = fixture_open(&c);
    for (int i = 0; i < 2; i++) {
        fixture_block_make(&f[i], 10 + (uint64_t)i);
        assert_int_equal(store_put(s, "acme", &f[i].block, fixture_on_done, &ends[i]), 0);
    }
    this_thread_gets_none = true;
    int rc = store_flush(s);
    this_thread_gets_none = false;
    assert_int_equal(rc, 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ends[i].calls, 1);
        assert_int_equal(ends[i].status, 0);
        assert_true(fixture_block_reads(s, "acme", &f[i]));
    }
    store_close(s);
    fixture_remove(dir);
#else
    skip();
#endif
}

static void what_a_writer_has_no_memory_for_fails_alone(void **state)
{
    (void)state;
#ifdef MEMORY_CAN_FAIL
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct fixture_block before, meanwhile;
    struct fixture_done end = {0, 1}, turn = {0, 1};
    uint64_t version;
    c.commit_interval_ms = 60000;
    struct store *s = fixture_open(&c);
    fixture_block_make(&before, 10);
    fixture_block_make(&meanwhile, 11);
    assert_int_equal(fixture_put(s, "acme", &before), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "first"), 0);
    assert_int_equal(store_put(s, "acme", &meanwhile.block, fixture_on_done, &end), 0);
    assert_int_equal(store_conv_put(s, "acme", "ann", "c", 1, "second", 6, fixture_on_done, &turn), 0);
    atomic_store(&nobody_gets_any, true);
    int rc = store_flush(s);
    atomic_store(&nobody_gets_any, false);
    assert_true(rc <= 0);
    assert_int_equal(end.calls, 1); /* kept, or told that it is not */
    assert_int_equal(turn.calls, 1);
    assert_true(fixture_block_reads(s, "acme", &before));
    assert_int_equal(fixture_block_reads(s, "acme", &meanwhile), end.status == 0);
    char *text = fixture_conv_get(s, "acme", "ann", "c", &version);
    assert_string_equal(text, turn.status == 0 ? "second" : "first");
    free(text);
    assert_int_equal(fixture_put(s, "acme", &meanwhile), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", version, "third"), 0);
    for (int life = 0; life < 2; life++) {
        assert_true(fixture_block_reads(s, "acme", &before));
        assert_true(fixture_block_reads(s, "acme", &meanwhile));
        text = fixture_conv_get(s, "acme", "ann", "c", &version);
        assert_string_equal(text, "third");
        free(text);
        store_close(s);
        s = fixture_open(&c);
    }
    store_close(s);
    fixture_remove(dir);
#else
    skip();
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(waiting_takes_no_memory),
        cmocka_unit_test(what_a_writer_has_no_memory_for_fails_alone),
    };
    log_set_level((enum log_level)(LOG_ERROR + 1));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
