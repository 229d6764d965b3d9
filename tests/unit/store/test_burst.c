/* burst: more blocks at once than a full disk has room for. What is kept of a chain is its beginning, and what was there before pays as the policy says. */
#include "shared/log.h"
#include "store_fixture.h"
#include <fcntl.h>
#include <sys/stat.h>

#define LIMIT     (4u << 20)
#define CHAIN_MAX 120
#define VALUES    (2 * 64 * 64) /* 2 heads, 64 tokens, 64 dimensions */
#define PIECE     (KV_PIECE_HEAD_SIZE + 2 * VALUES)
#define PIECES    (2 * FIXTURE_LAYERS)

static struct store_block chain[CHAIN_MAX];
static struct span pieces[CHAIN_MAX][PIECES];
static uint8_t bytes[CHAIN_MAX][PIECES][PIECE];
static struct fixture_done ends[CHAIN_MAX];

/* Room for some forty blocks; what is put within a minute is one commit. */
static struct store_config small_disk(const char *dir)
{
    struct store_config c = fixture_config(dir);
    c.limit_size = LIMIT;
    c.commit_interval_ms = 60000;
    return c;
}

/* Large blocks, as a model's are: what a record adds to one is little. */
static void make_block(int i, uint64_t seed, struct kv_quality quality)
{
    static struct kv_codec_scratch *scratch;
    static uint16_t values[VALUES];
    if (!scratch)
        scratch = kv_codec_scratch_create(&(struct kv_shape){FIXTURE_LAYERS, 2, 64});
    for (int j = 0; j < VALUES; j++)
        values[j] = (uint16_t)((seed * 131 + (uint64_t)j * 7) & 0x3fff);
    for (int j = 0; j < PIECES; j++) {
        struct kv_piece_head h = {.codec = quality.fidelity == KV_L1 ? KV_L1 : KV_RAW,
                                  .is_value = (uint8_t)(j % 2),
                                  .quality = quality,
                                  .block_index = (uint32_t)i,
                                  .token_count = 64,
                                  .layer = (uint16_t)(j / 2),
                                  .kv_head_count = 2,
                                  .head_dim = 64};
        if (h.codec == KV_L1)
            h.table = kv_level_table(kv_level_find("l1"), h.is_value, h.block_index);
        int64_t size = kv_piece_encode(scratch, &h, values, bytes[i][j], PIECE);
        assert_true(size > 0);
        pieces[i][j] = (struct span){bytes[i][j], (size_t)size};
    }
    chain[i] = (struct store_block){
        .quality = quality, .block_index = (uint32_t)i, .layer_end = FIXTURE_LAYERS, .pieces = pieces[i]};
    fixture_id(seed, &chain[i].id);
    if (i)
        chain[i].parent = chain[i - 1].id;
}

static void make_chain(uint64_t first, int count)
{
    for (int i = 0; i < count; i++)
        make_block(i, first + (uint64_t)i, quality_exact);
}

/* As a request does: it asks for the whole chain, then what was not there is put, at once. */
static void put_at_once(struct store *s, int count)
{
    struct kv_block_id ids[CHAIN_MAX];
    for (int i = 0; i < count; i++)
        ids[i] = chain[i].id;
    store_touch(s, "acme", ids, (size_t)count);
    for (int i = 0; i < count; i++) {
        ends[i] = (struct fixture_done){0, 1};
        assert_int_equal(store_put(s, "acme", &chain[i], fixture_on_done, &ends[i]), 0);
    }
    assert_int_equal(store_flush(s), 0);
    for (int i = 0; i < count; i++)
        assert_int_equal(ends[i].calls, 1);
    assert_int_equal(store_flush(s), 0); /* and what the writer does between two commits */
}

static bool holds(struct store *s, const struct store_block *b)
{
    struct store_block_info info;
    return store_find(s, "acme", &b->id, &info) == 0;
}

/* How many from the first on are there; and *strays, those behind the first gap. */
static int leading(struct store *s, int count, int *strays)
{
    int run = 0;
    *strays = 0;
    while (run < count && holds(s, &chain[run]))
        run++;
    for (int i = run; i < count; i++)
        *strays += holds(s, &chain[i]);
    return run;
}

/* Three times what there is room for, and again at each try: what is kept is a beginning, and it stays. */
static void burst(const struct store_config *c, struct io *io)
{
    struct store_stats stats;
    struct store *s;
    int strays, kept = 0;
    assert_int_equal(store_open_with(c, &(struct store_env){.io = io}, &s, NULL), 0);
    make_chain(1000, CHAIN_MAX);
    for (int i = 0; i < 3; i++) {
        put_at_once(s, CHAIN_MAX);
        int run = leading(s, CHAIN_MAX, &strays);
        store_stats(s, &stats);
        assert_int_equal(strays, 0);
        assert_true(run >= 20 && run >= kept - 2);
        assert_true(stats.evictions > 0); /* control */
        assert_true(stats.segment_bytes <= LIMIT);
        assert_false(stats.writes_off);
        kept = run;
    }
    store_close(s);
    s = fixture_open(c);
    assert_int_equal(leading(s, CHAIN_MAX, &strays), kept);
    assert_int_equal(strays, 0);
    store_close(s);
}

static void the_beginning_of_what_is_too_much_is_kept(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = small_disk(dir);
    burst(&c, &io_posix);
    fixture_remove(dir);
}

/* A disk with little more than the limit of the other tests on it, whatever the store's own is. */
static int small_space(struct io *io, const char *path, uint64_t *total_size, uint64_t *free_size)
{
    (void)io;
    DIR *d = opendir(path);
    uint64_t used = 0;
    struct stat st;
    for (const struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] != '.' && fstatat(dirfd(d), e->d_name, &st, 0) == 0)
            used += (uint64_t)st.st_blocks * 512;
    if (d)
        closedir(d);
    *total_size = LIMIT + STORE_SPACE_RESERVE;
    *free_size = *total_size > used ? *total_size - used : 0;
    return 0;
}

static void and_where_the_disk_sets_the_limit(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = small_disk(dir);
    struct io io = io_posix;
    io.space = small_space;
    c.limit_size = 1 << 30;
    c.segment_size = LIMIT / 8;
    burst(&c, &io);
    fixture_remove(dir);
}

/* Of old chains the ends go: each keeps a beginning, or nothing. */
static void old_chains_go_from_their_ends(void **state)
{
    (void)state;
    enum { CHAINS = 6, LENGTH = 15 };
    char *dir = fixture_directory();
    struct store_config c = small_disk(dir);
    struct store_stats stats;
    int strays, held = 0;
    struct store *s = fixture_open(&c);
    for (uint64_t i = 0; i < CHAINS; i++) {
        make_chain(1000 + 100 * i, LENGTH);
        put_at_once(s, LENGTH);
    }
    for (uint64_t i = 0; i < CHAINS; i++) {
        make_chain(1000 + 100 * i, LENGTH);
        held += leading(s, LENGTH, &strays);
        assert_int_equal(strays, 0);
    }
    store_stats(s, &stats);
    assert_true(stats.evictions > 0); /* control */
    assert_true(held >= 25);
    store_close(s);
    fixture_remove(dir);
}

/* Better copies of all that a full disk holds, at some twice its bytes: those for which there is no room are refused, and what they were to replace stays. */
static void better_copies_cost_nothing_that_they_were_to_replace(void **state)
{
    (void)state;
    enum { LENGTH = 80 };
    char *dir = fixture_directory();
    struct store_config c = small_disk(dir);
    int strays;
    struct store *s = fixture_open(&c);
    for (int i = 0; i < LENGTH; i++)
        make_block(i, 1000 + (uint64_t)i, quality_lossy);
    put_at_once(s, LENGTH);
    int before = leading(s, LENGTH, &strays);
    assert_true(before >= 30); /* control: it is full */
    make_chain(1000, LENGTH);
    put_at_once(s, LENGTH);
    int better = 0, run = leading(s, LENGTH, &strays);
    struct store_block_info info;
    while (better < run && store_find(s, "acme", &chain[better].id, &info) == 0 &&
           info.quality.fidelity == KV_L0)
        better++;
    assert_int_equal(strays, 0);
    assert_true(better >= 5 && run >= before / 2);
    store_close(s);
    fixture_remove(dir);
}

/* Nothing of what is there may go: what does not fit is refused, which is no trouble of the disk's. */
static void what_is_pinned_stays_whatever_comes(void **state)
{
    (void)state;
    enum { PINNED = 33, LENGTH = 50 };
    char *dir = fixture_directory();
    struct store_config c = small_disk(dir);
    struct store_stats before, after;
    struct kv_block_id ids[PINNED];
    int strays;
    struct store *s = fixture_open(&c);
    make_chain(1000, PINNED);
    put_at_once(s, PINNED);
    int held = leading(s, PINNED, &strays);
    for (int i = 0; i < PINNED; i++)
        ids[i] = chain[i].id;
    assert_int_equal(store_pin_held(s, "acme", ids, (size_t)held, true, NULL), 0);
    store_stats(s, &before);
    make_chain(2000, LENGTH);
    put_at_once(s, LENGTH);
    assert_true(leading(s, LENGTH, &strays) < 10);
    store_stats(s, &after);
    assert_int_equal(strays, 0);
    assert_true(after.put_failures - before.put_failures > LENGTH - 10);
    assert_false(after.writes_off);
    make_chain(1000, PINNED);
    assert_int_equal(leading(s, PINNED, &strays), held);
    store_close(s);
    fixture_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_beginning_of_what_is_too_much_is_kept),
        cmocka_unit_test(and_where_the_disk_sets_the_limit),
        cmocka_unit_test(old_chains_go_from_their_ends),
        cmocka_unit_test(better_copies_cost_nothing_that_they_were_to_replace),
        cmocka_unit_test(what_is_pinned_stays_whatever_comes),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
