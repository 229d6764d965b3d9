/* held_disk: a store on a real disk whose calls can be held. No test on it waits for time to pass: what is due is made due, or whoever is patient is made
 * impatient. */
#ifndef TANDEM_TESTS_HELD_DISK_H
#define TANDEM_TESTS_HELD_DISK_H
#include "store_fixture.h"
#include "shared/log.h"
#include "store/conversation.h"
#include <errno.h>
#include <time.h>

#define PATIENT_US   UINT64_C(3600000000)
#define IMPATIENT_US 1000

enum call {
    CALL_NONE,
    CALL_OPEN,
    CALL_READ,
    CALL_WRITE,
    CALL_SYNC,
    CALL_SYNC_DIRECTORY,
    CALL_RENAME,
    CALL_UNLINK
};

static struct disk {
    struct io io; /* first */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum call held;
    atomic_int inside[CALL_UNLINK + 1];
    int status; /* of what comes to be held; 0: as the disk says */
} disk = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static inline int pass(enum call call)
{
    int status = 0;
    pthread_mutex_lock(&disk.lock);
    if (disk.held == call) {
        disk.inside[call]++;
        status = disk.status;
        pthread_cond_broadcast(&disk.changed);
        while (disk.held == call)
            pthread_cond_wait(&disk.changed, &disk.lock);
        disk.inside[call]--;
    }
    pthread_mutex_unlock(&disk.lock);
    return status;
}

static inline void hold(enum call call, int status)
{
    pthread_mutex_lock(&disk.lock);
    disk.held = call;
    disk.status = status;
    pthread_cond_broadcast(&disk.changed);
    pthread_mutex_unlock(&disk.lock);
}

static inline void let_go(void)
{
    pthread_mutex_lock(&disk.lock);
    disk.held = CALL_NONE;
    pthread_cond_broadcast(&disk.changed);
    pthread_mutex_unlock(&disk.lock);
}

static inline void wait_until_inside(enum call call)
{
    pthread_mutex_lock(&disk.lock);
    while (disk.inside[call] == 0)
        pthread_cond_wait(&disk.changed, &disk.lock);
    pthread_mutex_unlock(&disk.lock);
}

static inline int held_open(struct io *io, const char *path, int flags)
{
    (void)io;
    int rc = pass(CALL_OPEN);
    return rc < 0 ? rc : io_posix.open(&io_posix, path, flags);
}

static inline int64_t held_pread(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    (void)io;
    int rc = pass(CALL_READ);
    return rc < 0 ? rc : io_posix.pread(&io_posix, fd, data, size, offset);
}

static inline int64_t held_pwrite(struct io *io, int fd, const void *data, size_t size, uint64_t offset)
{
    (void)io;
    int rc = pass(CALL_WRITE);
    return rc < 0 ? rc : io_posix.pwrite(&io_posix, fd, data, size, offset);
}

static inline int held_fsync(struct io *io, int fd)
{
    (void)io;
    int rc = pass(CALL_SYNC);
    return rc < 0 ? rc : io_posix.fsync(&io_posix, fd);
}

static inline int held_sync_directory(struct io *io, const char *path)
{
    (void)io;
    int rc = pass(CALL_SYNC_DIRECTORY);
    return rc < 0 ? rc : io_posix.sync_directory(&io_posix, path);
}

static inline int held_rename(struct io *io, const char *from, const char *to)
{
    (void)io;
    int rc = pass(CALL_RENAME);
    return rc < 0 ? rc : io_posix.rename(&io_posix, from, to);
}

static inline int held_unlink(struct io *io, const char *path)
{
    (void)io;
    int rc = pass(CALL_UNLINK);
    return rc < 0 ? rc : io_posix.unlink(&io_posix, path);
}

/* ---- a store on it ---- */

static char *directory;
static struct store *store;
static struct conv_index *conversations;
static struct fixture_block blocks[6];

static inline void open_store(void)
{
    struct td_error err;
    struct store_config c = fixture_config(directory);
    c.segment_size = 64 << 10;
    disk.io = io_posix;
    disk.io.open = held_open;
    disk.io.pread = held_pread;
    disk.io.pwrite = held_pwrite;
    disk.io.fsync = held_fsync;
    disk.io.sync_directory = held_sync_directory;
    disk.io.rename = held_rename;
    disk.io.unlink = held_unlink;
    struct store_env env = {.io = &disk.io, .answer_us = PATIENT_US};
    assert_int_equal(store_open_with(&c, &env, &store, &err), 0);
    conversations = conv_index_create(store, 100);
    for (size_t i = 0; i < TD_COUNT(blocks); i++)
        fixture_block_make(&blocks[i], i);
}

static inline int set_up(void **state)
{
    (void)state;
    directory = fixture_directory();
    open_store();
    return 0;
}

static inline int tear_down(void **state)
{
    (void)state;
    let_go();
    conv_index_destroy(conversations);
    store_close(store);
    fixture_remove(directory);
    return 0;
}

static inline void wait_until_it_answers(void)
{
    while (!store_answers(store))
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

static inline int save(const char *id, uint64_t expected)
{
    struct conversation c = {.created_us = 1, .updated_us = 2};
    strcpy(c.id, id);
    return conv_save(conversations, "acme", "ann", expected, &c);
}

static inline uint64_t version_of(const char *id)
{
    struct conversation c;
    uint64_t version;
    if (conv_load(conversations, "acme", "ann", id, &version, &c) < 0)
        return 0;
    conv_free(&c);
    return version;
}

static inline struct store_stats stats(void)
{
    struct store_stats s;
    store_stats(store, &s);
    return s;
}

/* Nobody but the writer stands still, and nothing more is queued. */
static inline void only_the_writer_waits(void)
{
    struct store_block_info info;
    struct td_error err;
    struct metric *off = metric_gauge("tandem_store_writes_off", NULL, "");
    uint64_t queued = stats().queue_bytes, refused = stats().put_failures;
    assert_true(stats().silent && stats().writes_off);
    assert_true(metric_value(off) == 1);
    assert_int_equal(store_put(store, "acme", &blocks[3].block, NULL, NULL), -TD_ERR_TIMEOUT);
    assert_int_equal(save("new", 0), -TD_ERR_TIMEOUT);
    assert_int_equal(stats().put_failures, refused + 2);
    assert_int_equal(conv_delete(conversations, "acme", "ann", "old"), -TD_ERR_TIMEOUT);
    assert_int_equal(store_delete(store, "acme", &blocks[0].id, NULL, NULL), -TD_ERR_TIMEOUT);
    assert_int_equal(store_pin(store, "acme", &blocks[0].id, true, &err), -TD_ERR_TIMEOUT);
    assert_int_equal(store_pin_held(store, "acme", &blocks[0].id, 1, true, &err), -TD_ERR_TIMEOUT);
    assert_int_equal(stats().queue_bytes, queued);
    assert_int_equal(store_find(store, "acme", &blocks[0].id, &info), 0);
    assert_int_equal(store_find(store, "acme", &blocks[3].id, &info), -TD_ERR_NOTFOUND);
    assert_true(fixture_block_reads(store, "acme", &blocks[0]));
    assert_int_equal(version_of("old"), 1);
    assert_int_equal(version_of("new"), 0);
}

static inline void all_is_well(void)
{
    struct metric *off = metric_gauge("tandem_store_writes_off", NULL, "");
    wait_until_it_answers();
    assert_false(stats().silent || stats().writes_off);
    assert_true(metric_value(off) == 0);
    assert_int_equal(fixture_put(store, "acme", &blocks[4]), 0);
    assert_int_equal(save("new", 0), 0);
    assert_true(fixture_block_reads(store, "acme", &blocks[4]));
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)

#endif
