/* patience: how long a turn, or a deletion, waits for a disk that hangs or is slow; and what becomes of it when nobody waits any more. */
#include "held_disk.h"
#include "store/turn.h"

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
    assert_int_equal(conv_delete(conversations, "acme", "ann", "late"), -TD_ERR_TIMEOUT); /* not even begun */
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

static void hold_a_commit(void)
{
    assert_int_equal(fixture_put(store, "acme", &blocks[0]), 0);
    hold(CALL_SYNC, 0);
    assert_int_equal(store_put(store, "acme", &blocks[1].block, NULL, NULL), 0);
    wait_until_inside(CALL_SYNC);
}

/* What lies before a turn in the queue is given its time as well: a disk that takes it slowly is none that does not answer. */
static void a_turn_behind_much_else_is_waited_for(void **state)
{
    (void)state;
    enum { MUCH = 1 << 30 };
    pthread_t thread;
    hold_a_commit();
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

static atomic_bool given_up;

/* The writer was between two calls when it began to wait, and the next one is late. */
static void *hang_meanwhile(void *arg)
{
    uint64_t queued = *(const uint64_t *)arg, until_us;
    while (stats().queue_bytes == queued)
        ;
    for (until_us = clock_mono_us() + 20 * IMPATIENT_US; clock_mono_us() < until_us;)
        ;
    store->due_us = 1;
    for (until_us = clock_mono_us() + 60 * UINT64_C(1000000); !given_up && clock_mono_us() < until_us;)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    let_go(); /* it waits all the time that it was given */
    return NULL;
}

static void a_turn_behind_much_else_is_given_up_when_a_call_hangs(void **state)
{
    (void)state;
    enum { MUCH = 1 << 30 };
    pthread_t thread;
    hold_a_commit();
    store->due_us = 0;
    count_as_queued(MUCH);
    uint64_t queued = stats().queue_bytes;
    given_up = false;
    assert_int_equal(pthread_create(&thread, NULL, hang_meanwhile, &queued), 0);
    store->answer_us = IMPATIENT_US;
    int rc = save("old", 0);
    store->answer_us = PATIENT_US;
    given_up = true;
    pthread_join(thread, NULL);
    store_flush(store);
    count_as_queued(-MUCH);
    assert_int_equal(rc, -TD_ERR_TIMEOUT);
}

/* A turn's time begins where it was queued, not where somebody comes to wait for it who waited for others before. It is found meanwhile. */
static void a_turn_has_its_time_from_its_beginning(void **state)
{
    (void)state;
    struct conversation c = {.id = "begun"};
    struct store_waiter *waiter;
    hold_a_commit();
    assert_int_equal(conv_save_begin(conversations, "acme", "ann", 0, &c, &waiter), 0);
    assert_int_equal(version_of("begun"), 1);
    waiter->since_us =
        0 - PATIENT_US; /* as if the clock had been there at its start, which may be less than that ago */
    assert_int_equal(conv_save_end(conversations, "acme", "ann", 0, &c, waiter), -TD_ERR_TIMEOUT);
    let_go();
    store_flush(store);
    assert_true(conv_is_durable(conversations, "acme", "ann", "begun", 1));
}

/* So is what the writer does between two commits. */
static void a_turn_behind_a_segment_that_is_rewritten_is_waited_for(void **state)
{
    (void)state;
    pthread_t thread;
    for (int i = 0; i <= 4; i++) /* a segment of three, and more */
        assert_int_equal(fixture_put(store, "acme", &blocks[i]), 0);
    hold(CALL_UNLINK, 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(store_delete(store, "acme", &blocks[i].id, NULL, NULL), 0);
    wait_until_inside(CALL_UNLINK);
    uint64_t queued = stats().queue_bytes, segment_size = store->segment_size;
    store->segment_size = UINT64_C(1) << 30;
    assert_int_equal(pthread_create(&thread, NULL, answer_in_time, &queued), 0);
    store->answer_us = IMPATIENT_US;
    int rc = save("old", 0);
    pthread_join(thread, NULL);
    store_flush(store);
    store->segment_size = segment_size;
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

/* "old" has lost a turn, and whoever is told so deletes it, which nobody waits for. */
static void a_deletion_is_given_up(int status)
{
    assert_int_equal(save("old", 0), 0);
    conv_note_lost(conversations, "acme", "ann", "old", 2, "");
    hold(CALL_SYNC, status);
    store->answer_us = IMPATIENT_US;
    assert_int_equal(conv_delete(conversations, "acme", "ann", "old"), -TD_ERR_TIMEOUT);
    store->answer_us = PATIENT_US;
    wait_until_inside(CALL_SYNC);
    assert_true(conv_has_lost(conversations, "acme", "ann", "old", ""));
}

/* Nothing is left to be missed, and a new one of its name can be begun. */
static void a_deletion_is_given_up_and_happens_later(void **state)
{
    (void)state;
    a_deletion_is_given_up(0);
    let_go();
    wait_until_it_answers();
    assert_int_equal(version_of("old"), 0);
    assert_false(conv_has_lost(conversations, "acme", "ann", "old", ""));
    conv_note_lost(conversations, "acme", "ann", "old", 1, ""); /* of the new one */
    assert_true(conv_has_lost(conversations, "acme", "ann", "old", ""));
    assert_int_equal(conv_delete(conversations, "acme", "ann", "old"), -TD_ERR_NOTFOUND);
    assert_false(conv_has_lost(conversations, "acme", "ann", "old", ""));
}

static int fail_to_sync(struct io *io, int fd)
{
    (void)io, (void)fd;
    return -EIO;
}

/* Then what was lost is missing still. */
static void a_deletion_is_given_up_and_fails(void **state)
{
    (void)state;
    a_deletion_is_given_up(-EIO);
    disk.io.fsync = fail_to_sync; /* when it is tried again */
    let_go();
    wait_until_it_answers();
    assert_int_equal(version_of("old"), 1);
    assert_true(conv_has_lost(conversations, "acme", "ann", "old", ""));
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
    struct tokenizer *tokenizer = NULL;
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

/* A pin that is given up is kept later as well. held: as for a chain. */
static void a_pin_is_given_up(bool held)
{
    struct td_error err;
    assert_int_equal(fixture_put(store, "acme", &blocks[0]), 0);
    hold(CALL_SYNC, 0);
    store->answer_us = IMPATIENT_US;
    assert_int_equal(held ? store_pin_held(store, "acme", &blocks[0].id, 1, true, &err)
                          : store_pin(store, "acme", &blocks[0].id, true, &err),
                     -TD_ERR_TIMEOUT);
    store->answer_us = PATIENT_US;
    assert_false(store_is_pinned(store, "acme", &blocks[0].id));
    wait_until_inside(CALL_SYNC);
    let_go();
    wait_until_it_answers();
    assert_true(store_is_pinned(store, "acme", &blocks[0].id));
}

static void a_pin_is_given_up_and_kept_later(void **state)
{
    (void)state;
    a_pin_is_given_up(false);
}

static void a_chains_pin_is_given_up_and_kept_later(void **state)
{
    (void)state;
    a_pin_is_given_up(true);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_turn_is_given_up_and_kept_later),
        TEST(a_turn_is_given_up_and_written_again),
        TEST(a_turn_behind_much_else_is_waited_for),
        TEST(a_turn_behind_much_else_is_given_up_when_a_call_hangs),
        TEST(a_turn_has_its_time_from_its_beginning),
        TEST(a_turn_behind_a_segment_that_is_rewritten_is_waited_for),
        TEST(a_later_turn_stays_lost),
        TEST(a_deletion_is_given_up_and_happens_later),
        TEST(a_pin_is_given_up_and_kept_later),
        TEST(a_chains_pin_is_given_up_and_kept_later),
        TEST(a_deletion_is_given_up_and_fails),
        TEST(a_repeated_turn_is_kept_with_the_first),
        TEST(a_turn_whose_history_is_not_read),
    };
    log_set_level((enum log_level)(LOG_ERROR + 1)); /* trouble is the point here */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
