/* uring: the same bytes as pread, at every size, offset and end; by many threads; and what it says of files that cannot be read. */
#include "store/uring.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

#define FILE_SIZE (5u * URING_PIECE_SIZE * URING_DEPTH / 4 + 12345)

static uint8_t *content;
static int fd;

static int set_up(void **state)
{
    (void)state;
    char path[] = "/tmp/tandem-uring-XXXXXX";
    fd = mkstemp(path);
    unlink(path);
    content = malloc(FILE_SIZE);
    for (size_t i = 0; i < FILE_SIZE; i++)
        content[i] = (uint8_t)(i * 2654435761u >> 13);
    return fd >= 0 && write(fd, content, FILE_SIZE) == FILE_SIZE ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    free(content);
    return close(fd);
}

static void check(size_t size, uint64_t offset)
{
    uint8_t *data = calloc(1, size + 1);
    size_t expected = offset >= FILE_SIZE ? 0 : TD_MIN(size, (size_t)(FILE_SIZE - offset));
    int64_t got = uring_read(fd, data, size, offset);
    if (got != (int64_t)expected)
        fail_msg("%zu bytes at %llu: %lld, not %zu", size, (unsigned long long)offset, (long long)got,
                 expected);
    assert_memory_equal(data, content + TD_MIN(offset, (uint64_t)FILE_SIZE), expected);
    assert_int_equal(data[size], 0);
    free(data);
}

static bool is_here(void)
{
    uint8_t byte;
    return uring_read(fd, &byte, 1, 0) != -ENOSYS;
}

static void reads_what_pread_reads(void **state)
{
    (void)state;
    if (!is_here())
        skip();
    static const size_t sizes[] = {1,
                                   4096,
                                   URING_PIECE_SIZE - 1,
                                   URING_PIECE_SIZE,
                                   URING_PIECE_SIZE + 1,
                                   3 * URING_PIECE_SIZE + 7,
                                   URING_DEPTH * URING_PIECE_SIZE,
                                   (URING_DEPTH + 1) * URING_PIECE_SIZE,
                                   FILE_SIZE,
                                   FILE_SIZE + 1,
                                   3 * FILE_SIZE};
    static const uint64_t offsets[] = {
        0, 1, 4096, URING_PIECE_SIZE - 3, FILE_SIZE - 1, FILE_SIZE, FILE_SIZE + 5};
    for (size_t i = 0; i < TD_COUNT(sizes); i++)
        for (size_t j = 0; j < TD_COUNT(offsets); j++)
            check(sizes[i], offsets[j]);
}

static void *read_all(void *arg)
{
    (void)arg;
    for (int i = 0; i < 20; i++)
        check(FILE_SIZE, 0);
    return NULL;
}

static void each_thread_has_its_own(void **state)
{
    (void)state;
    pthread_t threads[4];
    if (!is_here())
        skip();
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, read_all, NULL);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}

static void errors_are_told(void **state)
{
    (void)state;
    static uint8_t data[2 * URING_PIECE_SIZE];
    if (!is_here())
        skip();
    int closed = dup(fd), folder = open("/tmp", O_RDONLY);
    close(closed);
    assert_int_equal(uring_read(closed, data, sizeof data, 0), -EBADF);
    assert_int_equal(uring_read(folder, data, sizeof data, 0), -EISDIR);
    close(folder);
    check(FILE_SIZE, 0); /* and the ring goes on */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_what_pread_reads),
        cmocka_unit_test(each_thread_has_its_own),
        cmocka_unit_test(errors_are_told),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
