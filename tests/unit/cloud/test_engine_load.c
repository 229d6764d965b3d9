/* engine: reading blocks against computing them, in virtual time. A disk of any speed behind the store, a backend that takes a fixed time for each token:
 * restoring is never slower than computing by more than 5 %, and the reply is the same. Virtual time stands still while threads work, so what is
 * measured is the decision and not the machine. */
#include "engine_rig.h"
#include <errno.h>
#include <fcntl.h>

#define VOCAB    256
#define PROMPT   450 /* seven blocks and two tokens */
#define REPLY    8
#define TOKEN_US 1000

/* ---- a paced disk ------------------------------------------------------------------------------------------- */

#define READS_MAX 16

struct pace {
    struct io io; /* first */
    pthread_mutex_t lock;
    uint64_t bytes_per_s;      /* 0: as fast as it is */
    uint64_t free_us;          /* when the disk has done all that was asked for */
    uint64_t until[READS_MAX]; /* who waits for which time; 0: nobody */
    uint32_t bodies, fail_at;  /* large reads so far; the one that fails; 0: none */
};
static struct pace pace;

static uint64_t now(void)
{
    return rig_now;
}

static int64_t paced_pread(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    (void)io;
    int64_t n = io_posix.pread(&io_posix, fd, data, size, offset);
    uint64_t *until = NULL, at;
    pthread_mutex_lock(&pace.lock);
    if (size > RECORD_PAGE && ++pace.bodies == pace.fail_at)
        n = -EIO;
    if (pace.bytes_per_s) {
        at = pace.free_us = TD_MAX(pace.free_us, now()) + size * 1000000 / pace.bytes_per_s;
        for (int i = 0; i < READS_MAX && !until; i++)
            if (pace.until[i] == 0)
                until = &pace.until[i];
        *until = at;
    }
    pthread_mutex_unlock(&pace.lock);
    while (until && at > now())
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    if (until) {
        pthread_mutex_lock(&pace.lock);
        *until = 0;
        pthread_mutex_unlock(&pace.lock);
    }
    return n;
}

static void set_pace(uint64_t bytes_per_s)
{
    pthread_mutex_lock(&pace.lock);
    pace.bytes_per_s = bytes_per_s;
    pace.free_us = 0;
    pthread_mutex_unlock(&pace.lock);
}

/* All threads that read wait for virtual time, or none reads. */
static bool is_settled(struct rig *r)
{
    unsigned busy = loader_busy(r->engine->loader);
    pthread_mutex_lock(&pace.lock);
    unsigned waiting = 0;
    bool late = false; /* somebody's time has come, and he has not gone on yet */
    for (int i = 0; i < READS_MAX; i++) {
        waiting += pace.until[i] > now();
        late |= pace.until[i] != 0 && pace.until[i] <= now();
    }
    bool settled = !late && (busy == 0 || waiting >= TD_MIN(busy, tiers_threads(r->tiers)));
    pthread_mutex_unlock(&pace.lock);
    return settled;
}

static void settle(struct rig *r)
{
    for (int i = 0; !is_settled(r) && i < 1000000; i++)
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

static void paced_turn(struct rig *r)
{
    settle(r);
    rig_let_decode(r);
    if (!engine_turn(r->engine))
        rig_now += 100;
}

/* ---- a paced backend ---------------------------------------------------------------------------------------- */

static struct backend_ops paced_ops;
static int (*real_forward)(struct backend *b, const struct batch *batch);
static struct rig *paced_rig;

static int paced_forward(struct backend *b, const struct batch *batch)
{
    uint64_t rows = 0;
    for (uint32_t i = 0; i < batch->count; i++)
        rows += batch->seqs[i].row_count;
    for (; rows > 0; rows -= TD_MIN(rows, UINT64_C(4))) { /* those who read go on meanwhile */
        settle(paced_rig);
        rig_now += TD_MIN(rows, UINT64_C(4)) * TOKEN_US;
    }
    return real_forward(b, batch);
}

/* ---- a node ------------------------------------------------------------------------------------------------- */

struct node {
    struct rig *rig;
    char directory[64];
    int32_t prompt[PROMPT], reply[REPLY];
    uint64_t block_size;
};

static void start(struct node *n)
{
    rig_start_engine(n->rig);
    paced_ops = *n->rig->engine->backend->ops;
    real_forward = paced_ops.forward;
    paced_ops.forward = paced_forward;
    n->rig->engine->backend->ops = &paced_ops;
    n->rig->engine->prefill_rise = 0; /* it takes the same anywhere */
    paced_rig = n->rig;
}

/* The reply is right; returns the virtual time to the first token. */
static uint64_t ask(struct node *n, const int32_t *ids, bool no_cache, struct client *c)
{
    struct engine_open open = client_open_of(c, ids, PROMPT, 0);
    open.direct = true;
    open.no_cache = no_cache;
    open.generate = rig_sampling(REPLY, 5);
    uint64_t begin = now();
    client_send(n->rig, c, open);
    while (c->count == 0 && !c->failed)
        paced_turn(n->rig);
    uint64_t took = now() - begin;
    while (!c->done && !c->failed)
        paced_turn(n->rig);
    if (ids == n->prompt)
        assert_reply(c, n->reply, REPLY);
    return took;
}

static struct node *node_open_with(uint32_t token_budget)
{
    struct node *n = calloc(1, sizeof *n);
    struct client c;
    struct store_stats stats;
    pace.io = io_posix;
    pace.io.pread = paced_pread;
    pthread_mutex_init(&pace.lock, NULL);
    set_pace(0);
    pace.fail_at = 0;
    rig_directory(n->directory);
    n->rig = calloc(1, sizeof *n->rig);
    n->rig->options = (struct rig_options){
        .store = n->directory, .io = &pace.io, .pages = 48, .token_budget = token_budget};
    assert_int_equal(crypto_init(), 0);
    rig_load(n->rig, NULL);
    start(n);
    rig_ids(n->prompt, PROMPT, VOCAB, 31);
    rig_reference(n->rig, n->prompt, PROMPT, rig_sampling(REPLY, 5), n->reply);
    ask(n, n->prompt, false, &c);
    do {
        paced_turn(n->rig);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        store_flush(n->rig->store);
        store_stats(n->rig->store, &stats);
    } while (stats.blocks < 7 || stats.queue_bytes > 0);
    n->block_size = stats.block_bytes / stats.blocks;
    return n;
}

static struct node *node_open(void)
{
    return node_open_with(32);
}

/* Whatever is still being read comes at once. */
static void let_reads_end(void)
{
    set_pace(0);
    rig_now += 3600000000u;
}

/* Nothing in memory, nothing measured but how long computing takes. */
static uint64_t restart(struct node *n)
{
    int32_t other[PROMPT];
    struct client c;
    let_reads_end();
    rig_stop_engine(n->rig);
    start(n);
    rig_ids(other, PROMPT, VOCAB, 77);
    return ask(n, other, true, &c);
}

/* Nothing in memory, all measurements kept. */
static void forget_memory(struct node *n)
{
    struct engine *e = n->rig->engine;
    uint32_t pages[64], count = 0;
    do { /* what waits to be written holds its pages */
        store_flush(n->rig->store);
        paced_turn(n->rig);
    } while (e->pending_count > 0);
    while (count < TD_COUNT(pages) && (pages[count] = prefix_cache_alloc(e->cache)) != PAGE_NONE)
        count++;
    while (count > 0)
        page_pool_release(e->pool, pages[--count]);
    assert_int_equal(prefix_cache_count(e->cache), 0);
}

static void node_close(struct node *n)
{
    char command[128];
    let_reads_end();
    rig_close(n->rig);
    snprintf(command, sizeof command, "rm -rf %s", n->directory);
    assert_int_equal(system(command), 0);
    free(n);
}

#define SLACK_US (LOAD_SLACK_US + 2000) /* and a few turns */

/* ---- tests -------------------------------------------------------------------------------------------------- */

static void restoring_is_never_slower_than_computing(void **state)
{
    (void)state;
    struct node *n = node_open();
    struct client c;
    /* What a block takes to read, in hundredths of what it takes to compute. */
    static const uint32_t shares[] = {10000, 1000, 200, 120, 100, 80, 50, 20, 5, 1, 0};
    for (size_t i = 0; i < TD_COUNT(shares); i++) {
        uint64_t block_us = KV_BLOCK_TOKENS * TOKEN_US * shares[i] / 100;
        uint64_t computing = restart(n);
        set_pace(block_us ? n->block_size * 1000000 / block_us : 0);
        for (int time = 0; time < 3; time++) {
            uint64_t took = ask(n, n->prompt, false, &c);
            if (took > computing + computing / 20 + SLACK_US)
                fail_msg("a block takes %u %% to read: %llu us, computing takes %llu", shares[i],
                         (unsigned long long)took, (unsigned long long)computing);
            if (getenv("TANDEM_TEST_VERBOSE"))
                print_message("a block takes %u %%: request %d %llu us, cached %u\n", shares[i], time + 1,
                              (unsigned long long)took, c.done_event.done.cached_tokens);
            if (time > 0 && shares[i] <= 20 && c.done_event.done.cached_tokens < 7 * KV_BLOCK_TOKENS)
                fail_msg("a block takes %u %% to read, and was not read", shares[i]);
            forget_memory(n);
        }
        set_pace(0);
    }
    node_close(n);
}

/* A prompt of two blocks and a bit, at a disk of this pace; what it was longer than computing. */
static int64_t ask_short(struct node *n, struct client *c)
{
    uint64_t begun = now();
    struct engine_open open = client_open_of(c, n->prompt, 2 * KV_BLOCK_TOKENS + 1, 0);
    open.direct = true;
    open.generate = rig_sampling(1, 5);
    client_send(n->rig, c, open);
    while (!c->done && !c->failed)
        paced_turn(n->rig);
    return (int64_t)(now() - begun) - (2 * KV_BLOCK_TOKENS + 1) * TOKEN_US;
}

/* What was told of a disk at the start counts until a block has been read: a short prompt waits longer than its slack where that is worth it, … */
static void a_disk_that_is_known_is_waited_for(void **state)
{
    (void)state;
    const uint32_t block_us = 2 * LOAD_SLACK_US + 4000;
    assert_true(block_us < KV_BLOCK_TOKENS * TOKEN_US);
    for (int known = 0; known < 2; known++) {
        struct node *n = node_open();
        struct client c;
        restart(n);
        set_pace(n->block_size * 1000000 / block_us);
        if (known)
            engine_know_load(n->rig->engine, TIER_DISK, block_us / 2);
        ask_short(n, &c);
        assert_int_equal(c.done_event.done.cached_tokens, known ? 2 * KV_BLOCK_TOKENS : 0);
        node_close(n);
    }
}

/* … and is not read at all where it is not. */
static void a_disk_that_is_known_to_be_slow_costs_nothing(void **state)
{
    (void)state;
    struct node *n = node_open();
    struct client c;
    restart(n);
    set_pace(n->block_size); /* a second for each block */
    engine_know_load(n->rig->engine, TIER_DISK, 1000000);
    int64_t lost_us = ask_short(n, &c);
    assert_int_equal(c.done_event.done.cached_tokens, 0);
    assert_in_range(lost_us, 0, LOAD_SLACK_US / 2);
    node_close(n);
}

/* What a disk that says nothing costs a short prompt is its slack, each time. */
static void a_disk_that_is_silent_costs_its_slack(void **state)
{
    (void)state;
    struct node *n = node_open();
    struct client c;
    restart(n);
    set_pace(n->block_size); /* a second for each block */
    for (int i = 0; i < 2; i++) {
        int64_t lost_us = ask_short(n, &c);
        assert_int_equal(c.done_event.done.cached_tokens, 0);
        assert_in_range(lost_us, 0, 2 * LOAD_SLACK_US + 4000);
        forget_memory(n);
    }
    node_close(n);
}

/* Two requests at a disk that reads a block in a share of what it takes to compute: the first has measured it. Returns what the second takes. */
static uint64_t ask_twice(struct node *n, uint32_t share, struct client *c)
{
    restart(n);
    set_pace(n->block_size * 1000000 / ((uint64_t)KV_BLOCK_TOKENS * TOKEN_US * share / 100));
    for (int i = 0; i < 2;
         i++) { /* where the first was given up, what the second reads for nobody is the measurement */
        ask(n, n->prompt, false, c);
        forget_memory(n);
    }
    return ask(n, n->prompt, false, c);
}

/* From both ends it is sooner than either alone: half where they are equal. Steps are of half a block, reads of one, and the last two tokens
 * are computed in any case. */
static void both_ends_meet(void **state)
{
    (void)state;
    struct node *n = node_open();
    struct client c;
    static const struct {
        uint32_t share, of_computing;
    } cases[] = {{100, 60}, {80, 60}, {50, 45}, {200, 90}};
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        uint64_t took = ask_twice(n, cases[i].share, &c), computing = (uint64_t)PROMPT * TOKEN_US;
        uint64_t reading = 7u * KV_BLOCK_TOKENS * TOKEN_US * cases[i].share / 100;
        if (took * 100 > computing * cases[i].of_computing || took > reading)
            fail_msg("a block takes %u %% to read: %llu us", cases[i].share, (unsigned long long)took);
        uint32_t cached = c.done_event.done.cached_tokens;
        assert_in_range(cached, KV_BLOCK_TOKENS, 6 * KV_BLOCK_TOKENS);
        assert_int_equal(cached + c.done_event.done.prefill_tokens, PROMPT);
        assert_int_equal(c.done_event.done.read_tokens, cached);
        set_pace(0);
        uint64_t again = ask(n, n->prompt, false, &c); /* all of it is in memory now */
        assert_int_equal(c.done_event.done.cached_tokens, 7 * KV_BLOCK_TOKENS);
        assert_int_equal(c.done_event.done.read_tokens, 0);
        assert_true(again < 4 * TOKEN_US);
    }
    node_close(n);
}

/* A reply that is gone on with: of its held tokens' blocks, which are read like the prompt's, none counts as a part of the prompt. */
static void what_both_ends_read_is_the_prompts_at_most(void **state)
{
    (void)state;
    enum { OWN = 100, HELD = PROMPT - OWN };
    struct node *n = node_open();
    struct client c;
    ask_twice(n, 100, &c);
    forget_memory(n);
    struct engine_open open = client_open_of(&c, n->prompt, OWN, HELD);
    open.direct = true;
    open.generate = rig_sampling(HELD + REPLY, 5);
    client_send(n->rig, &c, open);
    while (!c.done && !c.failed)
        paced_turn(n->rig);
    assert_true(c.done);
    assert_true(c.done_event.done.prefill_tokens < PROMPT); /* some of it was read */
    assert_int_equal(c.done_event.done.cached_tokens, OWN);
    assert_in_range(c.done_event.done.read_tokens, 1, OWN);
    node_close(n);
}

static struct sequence *only_sequence(struct node *n)
{
    assert_int_equal(n->rig->engine->live_count, 1);
    return n->rig->engine->live[0];
}

/* An edge that has said that all is the cloud's work changes its mind while blocks are read from behind: what it sends from there on counts, what is
 * read of that is dropped, and the reply is the same. */
static void a_plan_that_comes_meanwhile_ends_it(void **state)
{
    (void)state;
    enum { FIRST = 4 * KV_BLOCK_TOKENS };
    struct node *n = node_open();
    struct client c;
    ask_twice(n, 100, &c);
    forget_memory(n);
    struct rig_edge edge = rig_edge_compute(n->rig, n->prompt, PROMPT, 1);
    struct engine_generate generate = rig_sampling(REPLY, 5);
    struct plan_range ids = {.count = PROMPT},
                      both[] = {{.count = FIRST}, {FIRST, PROMPT - FIRST, 1, KV_RAW, HIDDEN_F32}};
    client_send(n->rig, &c, client_open_of(&c, n->prompt, PROMPT, 0));
    assert_int_equal(engine_plan(n->rig->engine, c.sequence, 1, &ids, 1, false), 0);
    assert_int_equal(engine_start(n->rig->engine, c.sequence, &generate), 0);
    do
        paced_turn(n->rig);
    while (only_sequence(n)->load_id == 0 || only_sequence(n)->high == 0);
    assert_true(only_sequence(n)->high < FIRST && only_sequence(n)->load_end == 7);
    assert_int_equal(engine_plan(n->rig->engine, c.sequence, 2, both, 2, false), 0);
    while (only_sequence(n)->epoch != 2)
        paced_turn(n->rig);
    assert_int_equal(only_sequence(n)->load_id, 0);
    rig_send_kv(&edge, &c, 2, FIRST, PROMPT, KV_RAW);
    rig_send_hidden(&edge, &c, 2, FIRST, PROMPT - FIRST, HIDDEN_F32);
    while (!c.done && !c.failed)
        paced_turn(n->rig);
    assert_reply(&c, n->reply, REPLY);
    assert_int_equal(c.done_event.done.cached_tokens, 0);
    assert_int_equal(c.done_event.done.recomputed_tokens, 0);
    rig_edge_free(&edge);
    node_close(n);
}

/* A step that could take the whole prompt ends where the two meet. */
static void steps_end_where_they_meet(void **state)
{
    (void)state;
    struct node *n = node_open_with(512);
    struct client c;
    uint64_t took = ask_twice(n, 100, &c);
    assert_true(took * 100 <= (uint64_t)PROMPT * TOKEN_US * 60);
    assert_in_range(c.done_event.done.cached_tokens, 3 * KV_BLOCK_TOKENS, 4 * KV_BLOCK_TOKENS);
    node_close(n);
}

/* A prompt of so many blocks and a token has been read; each of the others is known to take this long. */
static void first_blocks_in_memory(struct node *n, uint32_t blocks, uint64_t block_us, struct client *c)
{
    set_pace(0);
    struct engine_open open = client_open_of(c, n->prompt, blocks * KV_BLOCK_TOKENS + 1, 0);
    open.direct = true;
    open.generate = rig_sampling(1, 5);
    client_send(n->rig, c, open);
    while (!c->done && !c->failed)
        paced_turn(n->rig);
    set_pace(n->block_size * 1000000 / block_us);
    n->rig->engine->load_us[TIER_DISK] = block_us;
}

/* Four blocks that a single step computes: from both ends none would ever be read in time. */
static void what_one_step_would_compute_is_read(void **state)
{
    (void)state;
    struct node *n = node_open_with(512);
    struct client c;
    ask_twice(n, 50, &c);
    forget_memory(n);
    first_blocks_in_memory(n, 3, KV_BLOCK_TOKENS * TOKEN_US / 2, &c);
    uint64_t took = ask(n, n->prompt, false, &c);
    assert_true(took <= 2 * KV_BLOCK_TOKENS * TOKEN_US +
                            4 * TOKEN_US); /* four blocks at half of what one takes to compute */
    assert_int_equal(c.done_event.done.cached_tokens, 7 * KV_BLOCK_TOKENS);
    node_close(n);
}

/* The first blocks are in memory. */
static void both_ends_of_what_is_not_in_memory(void **state)
{
    (void)state;
    struct node *n = node_open();
    struct client c;
    ask_twice(n, 100, &c);
    forget_memory(n);
    first_blocks_in_memory(n, 2, KV_BLOCK_TOKENS * TOKEN_US, &c);
    uint64_t took = ask(n, n->prompt, false, &c);
    assert_true(took <= 3 * KV_BLOCK_TOKENS * TOKEN_US + 4 * TOKEN_US); /* five blocks, read or computed */
    assert_in_range(c.done_event.done.cached_tokens, 4 * KV_BLOCK_TOKENS, 5 * KV_BLOCK_TOKENS);
    node_close(n);
}

/* What cannot be read is computed, and so is all in front of it. */
static void a_block_that_cannot_be_read_is_computed(void **state)
{
    (void)state;
    struct node *n = node_open();
    struct client c;
    ask_twice(n, 100, &c);
    forget_memory(n);
    pace.fail_at = pace.bodies + 3; /* two threads read the last two, then one of them the one before */
    ask(n, n->prompt, false, &c);
    assert_true(pace.bodies >= pace.fail_at);
    assert_int_equal(c.done_event.done.cached_tokens, 2 * KV_BLOCK_TOKENS);
    node_close(n);
}

/* A disk that was slow is not given up for ever. */
static void a_disk_that_recovers_is_read_again(void **state)
{
    (void)state;
    struct node *n = node_open();
    struct client c;
    uint64_t computing = restart(n);
    set_pace(n->block_size); /* a second for each block */
    for (int i = 0; i < 2; i++) {
        assert_true(ask(n, n->prompt, false, &c) <= computing + computing / 20 + SLACK_US);
        forget_memory(n);
    }
    assert_int_equal(c.done_event.done.cached_tokens, 0);
    let_reads_end();
    uint32_t cached = 0;
    for (int i = 0; i < 3 && cached == 0; i++) {
        ask(n, n->prompt, false, &c);
        cached = c.done_event.done.cached_tokens;
        forget_memory(n);
    }
    assert_int_equal(cached, 7 * KV_BLOCK_TOKENS);
    node_close(n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(restoring_is_never_slower_than_computing),
        cmocka_unit_test(a_disk_that_is_known_is_waited_for),
        cmocka_unit_test(a_disk_that_is_known_to_be_slow_costs_nothing),
        cmocka_unit_test(a_disk_that_is_silent_costs_its_slack),
        cmocka_unit_test(both_ends_meet),
        cmocka_unit_test(what_both_ends_read_is_the_prompts_at_most),
        cmocka_unit_test(a_plan_that_comes_meanwhile_ends_it),
        cmocka_unit_test(steps_end_where_they_meet),
        cmocka_unit_test(what_one_step_would_compute_is_read),
        cmocka_unit_test(both_ends_of_what_is_not_in_memory),
        cmocka_unit_test(a_block_that_cannot_be_read_is_computed),
        cmocka_unit_test(a_disk_that_recovers_is_read_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
