/* patience: a disk that hangs holds nobody but the thread that is in its call. */
#include "held_disk.h"
#include "shared/stop.h"
#include "store/operator.h"
#include <sys/wait.h>

/* A call that a put leads to is held, the clock goes on, and it is let go. roll: the put begins a segment. */
static void hangs_in(enum call call, int status, bool roll)
{
    struct fixture_done done = {0, 1};
    assert_int_equal(fixture_put(store, "acme", &blocks[0]), 0);
    assert_int_equal(save("old", 0), 0);
    if (roll)
        assert_int_equal(fixture_put(store, "acme", &blocks[5]), 0);
    hold(call, status);
    assert_int_equal(store_put(store, "acme", &blocks[1].block, fixture_on_done, &done), 0);
    wait_until_inside(call);
    assert_true(store_answers(store));
    assert_int_equal(store_put(store, "acme", &blocks[2].block, NULL, NULL), 0); /* not late yet */
    store->due_us = 1;
    only_the_writer_waits();
    assert_true(fixture_block_reads(store, "acme", &blocks[1])); /* what waits is read from memory */
    let_go();
    wait_until_it_answers();
    store_flush(store);
    assert_int_equal(done.calls, 1);
    assert_int_equal(done.status, 0);
    all_is_well();
    for (int i = 0; i < 3; i++)
        assert_true(fixture_block_reads(store, "acme", &blocks[i]));
}

static void a_write_hangs(void **state)
{
    (void)state;
    hangs_in(CALL_WRITE, 0, false);
}

static void a_sync_hangs(void **state)
{
    (void)state;
    hangs_in(CALL_SYNC, 0, false);
}

/* Then the rules of what failed hold: it goes to another segment, from memory. */
static void a_write_hangs_and_fails(void **state)
{
    (void)state;
    hangs_in(CALL_WRITE, -EIO, false);
}

static void a_sync_hangs_and_fails(void **state)
{
    (void)state;
    hangs_in(CALL_SYNC, -EIO, false);
}

static void a_new_file_hangs(void **state)
{
    (void)state;
    hangs_in(CALL_OPEN, 0, true);
}

static void a_new_name_hangs(void **state)
{
    (void)state;
    hangs_in(CALL_SYNC_DIRECTORY, 0, true);
}

static void a_removal_hangs(void **state)
{
    (void)state;
    for (int i = 1; i <= 4; i++) /* a segment of three */
        assert_int_equal(fixture_put(store, "acme", &blocks[i]), 0);
    assert_int_equal(fixture_put(store, "acme", &blocks[0]), 0);
    assert_int_equal(save("old", 0), 0);
    hold(CALL_UNLINK, 0);
    for (int i = 1; i <= 3; i++)
        assert_int_equal(store_delete(store, "acme", &blocks[i].id, NULL, NULL), 0);
    wait_until_inside(CALL_UNLINK);
    store->due_us = 1;
    only_the_writer_waits();
    let_go();
    all_is_well();
}

/* ---- other calls ---- */

static int nothing(void *ctx, const char *id, uint64_t version, uint64_t updated_us, const void *body,
                   size_t size)
{
    (void)ctx, (void)id, (void)version, (void)updated_us, (void)body, (void)size;
    return 0;
}

static void reading_hangs(void **state)
{
    (void)state;
    struct conversation c;
    uint64_t version;
    assert_int_equal(save("old", 0), 0);
    hold(CALL_READ, 0);
    store->answer_us = IMPATIENT_US;
    while (disk.inside[CALL_READ] == 0) /* its thread may be too late to begin */
        assert_int_equal(conv_load(conversations, "acme", "ann", "old", &version, &c), -TD_ERR_TIMEOUT);
    store->answer_us = PATIENT_US;
    /* at once, from now on; and what is not read is not taken for what is not there */
    assert_int_equal(conv_load(conversations, "acme", "ann", "old", &version, &c), -TD_ERR_TIMEOUT);
    assert_int_equal(store_conv_each(store, "acme", "ann", nothing, NULL), -TD_ERR_TIMEOUT);
    json_t *pin = json_pack("{s:s,s:s,s:s,s:b}", "tenant", "acme", "principal", "ann", "conversation", "old",
                            "pinned", true);
    struct td_error err = {0};
    assert_int_equal(operator_pin(store, pin, &err), -TD_ERR_TIMEOUT);
    json_decref(pin);
    assert_null(strstr(err.text, "no such"));
    assert_int_equal(save("new", 0), 0); /* writing goes on */
    let_go();
    while (version_of("old") != 1)
        ;
    assert_int_equal(store_conv_each(store, "acme", "ann", nothing, NULL), 0);
}

static atomic_bool closed_meanwhile;

static void close_while_reading(struct io *io, int fd)
{
    (void)io;
    if (disk.inside[CALL_READ] > 0)
        atomic_store(&closed_meanwhile, true);
    io_posix.close(&io_posix, fd);
}

static void *close_store(void *arg)
{
    store_close(arg);
    return NULL;
}

/* The file that it reads is there until it is back. */
static void closing_waits_for_a_read_that_was_left(void **state)
{
    pthread_t closer;
    assert_int_equal(save("old", 0), 0);
    disk.io.close = close_while_reading;
    hold(CALL_READ, 0);
    store->answer_us = IMPATIENT_US;
    while (disk.inside[CALL_READ] == 0)
        assert_int_equal(version_of("old"), 0);
    conv_index_destroy(conversations);
    assert_int_equal(pthread_create(&closer, NULL, close_store, store), 0);
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL); /* the time to do it wrong */
    let_go();
    pthread_join(closer, NULL);
    fixture_remove(directory);
    set_up(state); /* for the tear-down */
    assert_false(atomic_load(&closed_meanwhile));
}

#ifdef __SANITIZE_THREAD__ /* what is left behind a hung call never ends, and the process does not wait for it */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
    return "report_thread_leaks=0";
}
#endif

/* In a process of its own: how it ends if its stop comes while such a call of a late disk is held. */
static void stop_while(enum call held)
{
    alarm(200); /* it waits after all */
    open_store();
    if (save("old", 0) < 0)
        return;
    hold(held, 0);
    store->answer_us = IMPATIENT_US;
    while (disk.inside[held] == 0)
        held == CALL_READ ? (int)version_of("old") : save("late", 0);
    store->answer_us = PATIENT_US;
    stop_begins("test", 1000, 0, false);
    store_close(store);
}

static int status_of_a_stop_while(enum call held)
{
    int status;
    directory = fixture_directory();
    pid_t pid = fork();
    if (pid == 0) {
        stop_while(held);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    fixture_remove(directory);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void a_stop_does_not_wait_for_a_call_that_is_late(void **state)
{
    (void)state;
    assert_int_equal(status_of_a_stop_while(CALL_READ), 1);
    assert_int_equal(status_of_a_stop_while(CALL_SYNC), 1);
}

static void a_new_tenant_hangs(void **state)
{
    (void)state;
    uint8_t key[CRYPTO_KEY_SIZE];
    struct td_error err;
    assert_int_equal(fixture_put(store, "acme", &blocks[0]), 0);
    assert_int_equal(save("old", 0), 0);
    hold(CALL_RENAME, 0);
    store->answer_us = IMPATIENT_US;
    while (disk.inside[CALL_RENAME] == 0)
        assert_int_equal(store_chain_key(store, "evil", key, &err), -TD_ERR_TIMEOUT);
    store->answer_us = PATIENT_US;
    assert_non_null(strstr(err.text, "the disk does not answer"));
    assert_int_equal(store_put(store, "evil", &blocks[1].block, NULL, NULL), -TD_ERR_TIMEOUT);
    assert_int_equal(fixture_put(store, "acme", &blocks[1]), 0);
    assert_int_equal(version_of("old"), 1); /* the keys may lie on a disk of their own */
    let_go();
    while (store_chain_key(store, "evil", key, &err) < 0)
        ;
    assert_int_equal(fixture_put(store, "evil", &blocks[1]), 0);
}

static void *read_first(void *arg)
{
    *(bool *)arg = fixture_block_reads(store, "acme", &blocks[0]);
    return NULL;
}

/* Whoever opens a file holds no lock. */
static void opening_hangs(void **state)
{
    (void)state;
    struct store_block_info info;
    pthread_t reader;
    bool good = false;
    for (int i = 0; i <= 3; i++)
        assert_int_equal(fixture_put(store, "acme", &blocks[i]), 0);
    struct segment *first = store->segments.list[0];
    assert_true(first->sealed);
    disk.io.close(&disk.io, first->fd);
    first->fd = -1;
    store->segments.open_count--;
    hold(CALL_OPEN, 0);
    assert_int_equal(pthread_create(&reader, NULL, read_first, &good), 0);
    wait_until_inside(CALL_OPEN);
    assert_int_equal(stats().segments, 2);
    assert_int_equal(store_find(store, "acme", &blocks[0].id, &info), 0);
    assert_int_equal(fixture_put(store, "acme", &blocks[4]), 0);
    let_go();
    pthread_join(reader, NULL);
    assert_true(good);
    assert_true(fixture_block_reads(store, "acme", &blocks[0]));
}

/* Nor does the writer when it looks, after a failed sync, what is left of the segment. */
static void a_look_at_what_is_left_hangs(void **state)
{
    (void)state;
    struct store_block_info info;
    struct fixture_done done = {0, 1};
    assert_int_equal(fixture_put(store, "acme", &blocks[0]), 0);
    hold(CALL_SYNC, -EIO);
    assert_int_equal(store_put(store, "acme", &blocks[1].block, fixture_on_done, &done), 0);
    wait_until_inside(CALL_SYNC);
    hold(CALL_READ, 0);
    wait_until_inside(CALL_READ);
    assert_int_equal(store_find(store, "acme", &blocks[0].id, &info), 0);
    store->segments.open_count += SEGMENT_FDS_MAX; /* somebody wants a descriptor, and not this one */
    segments_trim(&store->segments);
    store->segments.open_count -= SEGMENT_FDS_MAX;
    bool is_open = store->segments.list[0]->fd >= 0;
    let_go();
    store_flush(store);
    assert_true(is_open);
    assert_int_equal(done.status, 0);
    assert_true(fixture_block_reads(store, "acme", &blocks[0]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stop_does_not_wait_for_a_call_that_is_late), /* first, as it forks */
        TEST(a_write_hangs),
        TEST(a_sync_hangs),
        TEST(a_write_hangs_and_fails),
        TEST(a_sync_hangs_and_fails),
        TEST(a_new_file_hangs),
        TEST(a_new_name_hangs),
        TEST(a_removal_hangs),
        TEST(reading_hangs),
        TEST(closing_waits_for_a_read_that_was_left),
        TEST(a_new_tenant_hangs),
        TEST(opening_hangs),
        TEST(a_look_at_what_is_left_hangs),
    };
    log_set_level((enum log_level)(LOG_ERROR + 1)); /* trouble is the point here */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
