/* patience: a disk that hangs holds nobody but the thread that is in its call. The disk is a real one whose calls can be held; no test waits for time to
 * pass: what is due is made due, or whoever is patient is made impatient. */
#include "store_fixture.h"
#include "shared/log.h"
#include "store/operator.h"
#include "store/turn.h"
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

static int pass(enum call call)
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

static void hold(enum call call, int status)
{
    pthread_mutex_lock(&disk.lock);
    disk.held = call;
    disk.status = status;
    pthread_cond_broadcast(&disk.changed);
    pthread_mutex_unlock(&disk.lock);
}

static void let_go(void)
{
    pthread_mutex_lock(&disk.lock);
    disk.held = CALL_NONE;
    pthread_cond_broadcast(&disk.changed);
    pthread_mutex_unlock(&disk.lock);
}

static void wait_until_inside(enum call call)
{
    pthread_mutex_lock(&disk.lock);
    while (disk.inside[call] == 0)
        pthread_cond_wait(&disk.changed, &disk.lock);
    pthread_mutex_unlock(&disk.lock);
}

static int held_open(struct io *io, const char *path, int flags)
{
    (void)io;
    int rc = pass(CALL_OPEN);
    return rc < 0 ? rc : io_posix.open(&io_posix, path, flags);
}

static int64_t held_pread(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    (void)io;
    int rc = pass(CALL_READ);
    return rc < 0 ? rc : io_posix.pread(&io_posix, fd, data, size, offset);
}

static int64_t held_pwrite(struct io *io, int fd, const void *data, size_t size, uint64_t offset)
{
    (void)io;
    int rc = pass(CALL_WRITE);
    return rc < 0 ? rc : io_posix.pwrite(&io_posix, fd, data, size, offset);
}

static int held_fsync(struct io *io, int fd)
{
    (void)io;
    int rc = pass(CALL_SYNC);
    return rc < 0 ? rc : io_posix.fsync(&io_posix, fd);
}

static int held_sync_directory(struct io *io, const char *path)
{
    (void)io;
    int rc = pass(CALL_SYNC_DIRECTORY);
    return rc < 0 ? rc : io_posix.sync_directory(&io_posix, path);
}

static int held_rename(struct io *io, const char *from, const char *to)
{
    (void)io;
    int rc = pass(CALL_RENAME);
    return rc < 0 ? rc : io_posix.rename(&io_posix, from, to);
}

static int held_unlink(struct io *io, const char *path)
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

static int set_up(void **state)
{
    (void)state;
    struct td_error err;
    directory = fixture_directory();
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
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    let_go();
    conv_index_destroy(conversations);
    store_close(store);
    fixture_remove(directory);
    return 0;
}

static void wait_until_it_answers(void)
{
    while (!store_answers(store))
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

static int save(const char *id, uint64_t expected)
{
    struct conversation c = {.created_us = 1, .updated_us = 2};
    strcpy(c.id, id);
    return conv_save(conversations, "acme", "ann", expected, &c);
}

static uint64_t version_of(const char *id)
{
    struct conversation c;
    uint64_t version;
    if (conv_load(conversations, "acme", "ann", id, &version, &c) < 0)
        return 0;
    conv_free(&c);
    return version;
}

static struct store_stats stats(void)
{
    struct store_stats s;
    store_stats(store, &s);
    return s;
}

/* Nobody but the writer stands still, and nothing more is queued. */
static void only_the_writer_waits(void)
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

static void all_is_well(void)
{
    struct metric *off = metric_gauge("tandem_store_writes_off", NULL, "");
    wait_until_it_answers();
    assert_false(stats().silent || stats().writes_off);
    assert_true(metric_value(off) == 0);
    assert_int_equal(fixture_put(store, "acme", &blocks[4]), 0);
    assert_int_equal(save("new", 0), 0);
    assert_true(fixture_block_reads(store, "acme", &blocks[4]));
}

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

/* ---- who waits ---- */

/* A turn that was not acknowledged in time is not kept, as far as anybody is told; until it has been after all. */
static void a_turn_is_given_up(int status)
{
    assert_int_equal(fixture_put(store, "acme", &blocks[0]), 0);
    assert_int_equal(save("old", 0), 0);
    hold(CALL_SYNC, status);
    store->answer_us = IMPATIENT_US;
    assert_int_equal(save("late", 0), -TD_ERR_TIMEOUT);
    store->answer_us = PATIENT_US;
    conv_note_lost(conversations, "acme", "ann", "late", 1, "");
    wait_until_inside(CALL_SYNC);
    only_the_writer_waits();
    assert_int_equal(version_of("late"), 1);
    assert_false(conv_is_durable(conversations, "acme", "ann", "late", 1));
    assert_true(conv_has_lost(conversations, "acme", "ann", "late", ""));
    assert_int_equal(save("late", 1), -TD_ERR_TIMEOUT);
    let_go();
    all_is_well();
    assert_true(conv_is_durable(conversations, "acme", "ann", "late", 1));
    assert_false(conv_has_lost(conversations, "acme", "ann", "late", ""));
    assert_int_equal(save("late", 1), 0);
    assert_int_equal(version_of("late"), 2);
}

static void a_turn_is_given_up_and_kept_later(void **state)
{
    (void)state;
    a_turn_is_given_up(0);
}

static void a_turn_is_given_up_and_written_again(void **state)
{
    (void)state;
    a_turn_is_given_up(-EIO);
}

static void *answer_in_time(void *arg)
{
    uint64_t queued = *(const uint64_t *)arg, until_us;
    while (stats().queue_bytes == queued)
        ;
    for (until_us = clock_mono_us() + 20 * IMPATIENT_US; clock_mono_us() < until_us;)
        ;
    store->answer_us = PATIENT_US;
    let_go();
    return NULL;
}

static void count_as_queued(int64_t size)
{
    pthread_mutex_lock(&store->queue.lock);
    store->queue.size += (size_t)size;
    store->queue.limit += (size_t)size;
    pthread_mutex_unlock(&store->queue.lock);
}

/* What lies before a turn in the queue is given its time as well: a disk that takes it slowly is none that does not answer. */
static void a_turn_behind_much_else_is_waited_for(void **state)
{
    (void)state;
    enum { MUCH = 1 << 30 };
    pthread_t thread;
    assert_int_equal(fixture_put(store, "acme", &blocks[0]), 0);
    hold(CALL_SYNC, 0);
    assert_int_equal(store_put(store, "acme", &blocks[1].block, NULL, NULL), 0);
    wait_until_inside(CALL_SYNC);
    count_as_queued(MUCH);
    uint64_t queued = stats().queue_bytes;
    assert_int_equal(pthread_create(&thread, NULL, answer_in_time, &queued), 0);
    store->answer_us = IMPATIENT_US;
    int rc = save("old", 0);
    pthread_join(thread, NULL);
    store_flush(store);
    count_as_queued(-MUCH);
    assert_int_equal(rc, 0);
}

/* The later turn, which was never queued, stays lost when the one before it is kept after all. */
static void a_later_turn_stays_lost(void **state)
{
    (void)state;
    assert_int_equal(save("old", 0), 0);
    hold(CALL_SYNC, 0);
    store->answer_us = IMPATIENT_US;
    assert_int_equal(save("late", 0), -TD_ERR_TIMEOUT);
    store->answer_us = PATIENT_US;
    conv_note_lost(conversations, "acme", "ann", "late", 2, "");
    let_go();
    wait_until_it_answers();
    assert_true(conv_is_durable(conversations, "acme", "ann", "late", 1));
    assert_true(conv_has_lost(conversations, "acme", "ann", "late", ""));
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

/* ---- turns ---- */

struct speaker {
    struct gguf *file;
    struct turn_config config;
    struct chat_message messages[5];
    struct turn_input input;
};

static void speaker_init(struct speaker *p)
{
    static const uint8_t key[32] = {9};
    struct td_error err = {0};
    struct tokenizer *tokenizer;
    if (gguf_open(TEST_DATA "/tiny/qwen2.gguf", &p->file, &err) != 0 ||
        tokenizer_create(p->file, NULL, &tokenizer, &err) != 0)
        fail_msg("%s", err.text);
    p->config = (struct turn_config){.tokenizer = tokenizer,
                                     .template_kind = CHAT_CHATML,
                                     .conversations = conversations,
                                     .context_max = 10000};
    for (int i = 0; i < 5; i++)
        p->messages[i] = (struct chat_message){i % 2 ? "assistant" : "user", "so", 2};
    p->input = (struct turn_input){.tenant = "acme",
                                   .principal = "ann",
                                   .principal_key = key,
                                   .messages = p->messages,
                                   .model_messages = p->messages,
                                   .count = 1,
                                   .request_key = ""};
}

static void speaker_deinit(struct speaker *p)
{
    tokenizer_destroy((struct tokenizer *)p->config.tokenizer);
    gguf_close(p->file);
}

/* How turn_prepare ends, and with which conversation. */
static int prepare(const struct speaker *p, char id[STORE_CONV_ID_MAX + 1])
{
    struct turn t;
    struct td_error err = {0};
    int rc = turn_prepare(&p->config, &p->input, &t, &err);
    if (rc == 0)
        strcpy(id, t.conversation.id);
    if (rc == 0)
        turn_free(&t);
    return rc;
}

/* What turn_commit says to the reply to it. */
static int commit(const struct speaker *p)
{
    static const int32_t reply[] = {1, 2};
    struct turn t;
    struct td_error err = {0};
    assert_int_equal(turn_prepare(&p->config, &p->input, &t, &err), 0);
    int rc = turn_commit(&p->config, &p->input, &t, reply, 2, "so", 2, NULL, 0);
    turn_free(&t);
    return rc;
}

/* The same request again is the same turn, and is kept once that is. */
static void a_repeated_turn_is_kept_with_the_first(void **state)
{
    (void)state;
    struct speaker p;
    speaker_init(&p);
    p.input.request_key = "00112233445566778899aabbccddeeff";
    p.input.conversation = "mine";
    assert_int_equal(save("old", 0), 0);
    hold(CALL_SYNC, 0);
    store->answer_us = IMPATIENT_US;
    assert_int_equal(commit(&p), -TD_ERR_TIMEOUT);
    assert_int_equal(commit(&p), -TD_ERR_TIMEOUT);
    store->answer_us = PATIENT_US;
    let_go();
    wait_until_it_answers();
    assert_int_equal(commit(&p), 0);
    assert_int_equal(version_of("mine"), 1);
    speaker_deinit(&p);
}

/* Who brings the history is served without what cannot be read; who names what cannot be read is told. */
static void a_turn_whose_history_is_not_read(void **state)
{
    (void)state;
    struct speaker p;
    char id[STORE_CONV_ID_MAX + 1];
    speaker_init(&p);
    p.input.conversation = "mine";
    assert_int_equal(commit(&p), 0);
    conv_index_destroy(conversations);
    conversations = conv_index_create(store, 100); /* it has read nothing yet */
    p.config.conversations = conversations;
    p.input.count = 3;
    hold(CALL_READ, 0);
    store->answer_us = IMPATIENT_US;
    while (disk.inside[CALL_READ] == 0)
        assert_int_equal(prepare(&p, id), -TD_ERR_TIMEOUT);
    store->answer_us = PATIENT_US;
    assert_int_equal(prepare(&p, id), -TD_ERR_TIMEOUT);
    p.input.conversation = NULL;
    assert_int_equal(prepare(&p, id), 0);
    assert_string_not_equal(id, "mine");
    let_go();
    while (prepare(&p, id) == 0 && strcmp(id, "mine") != 0)
        ;
    assert_string_equal(id, "mine");
    speaker_deinit(&p);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_write_hangs),
        TEST(a_sync_hangs),
        TEST(a_write_hangs_and_fails),
        TEST(a_sync_hangs_and_fails),
        TEST(a_new_file_hangs),
        TEST(a_new_name_hangs),
        TEST(a_removal_hangs),
        TEST(a_turn_is_given_up_and_kept_later),
        TEST(a_turn_is_given_up_and_written_again),
        TEST(a_turn_behind_much_else_is_waited_for),
        TEST(a_later_turn_stays_lost),
        TEST(reading_hangs),
        TEST(closing_waits_for_a_read_that_was_left),
        TEST(a_new_tenant_hangs),
        TEST(opening_hangs),
        TEST(a_look_at_what_is_left_hangs),
        TEST(a_repeated_turn_is_kept_with_the_first),
        TEST(a_turn_whose_history_is_not_read),
    };
    log_set_level((enum log_level)(LOG_ERROR + 1)); /* trouble is the point here */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
