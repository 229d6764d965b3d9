/* probe: what reading a block takes, asked of the disk; and what is noted beside the store for the next start. */
#include "store_fixture.h"
#include "store/probe.h"
#include <time.h>

static struct io slow; /* io_posix whose reads take READ_MS, and are counted */
static size_t read_size, largest_read;
static unsigned forgotten;
#define READ_MS 3

static int64_t slow_pread(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    (void)io;
    nanosleep(&(struct timespec){.tv_nsec = READ_MS * 1000000}, NULL);
    read_size += size;
    largest_read = TD_MAX(largest_read, size);
    return io_posix.pread(&io_posix, fd, data, size, offset);
}

static void counted_advise(struct io *io, int fd, uint64_t offset, uint64_t size, enum io_advice advice)
{
    (void)io;
    forgotten += advice == IO_FORGET;
    io_posix.advise(&io_posix, fd, offset, size, advice);
}

static struct store *open_slow(char *directory)
{
    struct store_config config = {.directory = directory, .ballast_size = 1 << 16, .segment_size = 1 << 20};
    struct store_env env = {.io = &slow};
    struct store *s;
    slow = io_posix;
    slow.pread = slow_pread;
    slow.advise = counted_advise;
    assert_int_equal(store_open_with(&config, &env, &s, NULL), 0);
    read_size = largest_read = forgotten = 0;
    return s;
}

static void test_an_empty_store_is_probed(void **state)
{
    (void)state;
    char *directory = fixture_directory(), path[256];
    struct store *s = open_slow(directory);
    uint64_t us = 0;
    assert_int_equal(store_probe(s, 3 * PROBE_SIZE, &us), 0);
    assert_int_equal(read_size, PROBE_SIZE); /* not more, however large a block is … */
    assert_true(us >= 3 * READ_MS * 1000);   /* … and what it says is of a whole block */
    assert_int_equal(forgotten, 1);          /* of the disk, not of memory */
    snprintf(path, sizeof path, "%s/probe.tmp", directory);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(store_probe(s, 5000, &us), 0);
    assert_int_equal(read_size, PROBE_SIZE + 5000);
    store_close(s);
    fixture_remove(directory);
}

/* A segment that is long enough serves; nothing is written. */
static void test_segments_are_probed(void **state)
{
    (void)state;
    char *directory = fixture_directory();
    struct store *s = open_slow(directory);
    struct fixture_block f;
    uint64_t us = 0;
    fixture_block_make(&f, 1);
    assert_int_equal(store_put(s, "acme", &f.block, NULL, NULL), 0);
    assert_int_equal(store_flush(s), 0);
    read_size = forgotten = 0;
    slow.open = NULL; /* no file is made or opened: this one is */
    assert_int_equal(store_probe(s, 4096, &us), 0);
    slow.open = io_posix.open;
    assert_int_equal(read_size, 4096);
    assert_int_equal(forgotten, 1);
    assert_true(us >= READ_MS * 1000);
    store_close(s);
    fixture_remove(directory);
}

static void write_note(const char *directory, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/" SPEED_FILE, directory);
    FILE *f = fopen(path, "w");
    fputs(text, f);
    fclose(f);
}

static void test_what_is_noted(void **state)
{
    (void)state;
    char *directory = fixture_directory();
    struct store *s = open_slow(directory);
    const uint64_t noted[TIER_COUNT] = {0, 1234, 98765432109};
    uint64_t us[TIER_COUNT] = {7, 7, 7}, none[TIER_COUNT] = {0};
    assert_int_equal(store_speed_load(s, 1000, us), -TD_ERR_NOTFOUND);
    assert_memory_equal(us, none, sizeof us);
    assert_int_equal(store_speed_save(s, 1000, noted), 0);
    store_close(s);
    s = open_slow(directory);
    assert_int_equal(store_speed_load(s, 1000, us), 0);
    assert_memory_equal(us, noted, sizeof us);
    assert_int_equal(store_speed_load(s, 1001, us), -TD_ERR_NOTFOUND); /* another model */
    assert_memory_equal(us, none, sizeof us);
    static const char *const garbage[] = {"", "tandem-speed 1 block 1000 ram 0 disk",
                                          "tandem-speed 2 block 1000 ram 0 disk 1 remote 1\n",
                                          "tandem-speed 1 block x ram y disk z remote w"};
    for (size_t i = 0; i < TD_COUNT(garbage); i++) {
        write_note(directory, garbage[i]);
        assert_int_equal(store_speed_load(s, 1000, us), -TD_ERR_NOTFOUND);
        assert_memory_equal(us, none, sizeof us);
    }
    char *endless = calloc(1, 4097);
    memset(endless, '1', 4096);
    write_note(directory, endless);
    assert_int_equal(store_speed_load(s, 1000, us), -TD_ERR_NOTFOUND);
    free(endless);
    store_close(s);
    fixture_remove(directory);
}

int main(void)
{
    crypto_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_empty_store_is_probed),
        cmocka_unit_test(test_segments_are_probed),
        cmocka_unit_test(test_what_is_noted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
