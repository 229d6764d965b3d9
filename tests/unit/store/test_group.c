/* Groups: records that several threads seal and write are the same records; held blocks are not copied, and let go. */
#include "store_fixture.h"
#include "store/tier.h"

enum { BLOCKS = 150 };

static struct store *open_with(const char *directory, struct io *io, unsigned threads, uint64_t direct_size)
{
    struct store_config c = fixture_config(directory);
    struct store_env env = {.io = io, .write_threads = threads, .direct_size = direct_size};
    struct store *s = NULL;
    c.segment_size = 1 << 20; /* of some fifty blocks */
    c.commit_interval_ms = 1000000;
    assert_int_equal(store_open_with(&c, &env, &s, NULL), 0);
    return s;
}

static void write_and_read(unsigned threads, uint64_t direct_size)
{
    char *directory = fixture_directory();
    struct store *s = open_with(directory, &io_posix, threads, direct_size);
    struct fixture_done done = {0, 1};
    struct store_stats stats;
    struct fixture_block f;
    for (uint64_t i = 0; i < BLOCKS; i++) {
        fixture_block_make(&f, i);
        assert_int_equal(store_put(s, "acme", &f.block, fixture_on_done, &done), 0);
    }
    assert_int_equal(store_flush(s), 0);
    assert_int_equal(done.calls, BLOCKS);
    assert_int_equal(done.status, 0);
    store_stats(s, &stats);
    assert_in_range(stats.segments, 3, 6);
    for (int life = 0; life < 2; life++) { /* from the tables, and from what the segments say */
        for (uint64_t i = 0; i < BLOCKS; i++) {
            fixture_block_make(&f, i);
            assert_true(fixture_block_reads(s, "acme", &f));
        }
        store_close(s);
        index_set_aside(directory, false);
        s = open_with(directory, &io_posix, threads, direct_size);
    }
    store_close(s);
    fixture_remove(directory);
}

static void one_thread(void **state)
{
    (void)state;
    write_and_read(1, UINT64_MAX);
}
static void several_threads(void **state)
{
    (void)state;
    write_and_read(4, UINT64_MAX);
}
static void past_the_page_cache(void **state)
{
    (void)state;
    write_and_read(4, 1);
}

static size_t buffers_of(const struct store *s)
{
    size_t count = 0;
    for (size_t i = 0; i < TD_COUNT(s->group.buffers); i++)
        count += s->group.buffers[i] != NULL;
    return count;
}

static const struct store *watched;
static _Atomic size_t buffers_at_a_write;

static int64_t watched_pwrite(struct io *io, int fd, const void *data, size_t size, uint64_t offset)
{
    if (watched)
        atomic_store(&buffers_at_a_write, buffers_of(watched));
    return io_posix.pwrite(io, fd, data, size, offset);
}

static void write_records(struct store *s, uint64_t from, uint64_t to, size_t buffers)
{
    struct fixture_block f;
    for (uint64_t i = from; i < to; i++) {
        fixture_block_make(&f, i);
        assert_int_equal(store_put(s, "acme", &f.block, NULL, NULL), 0);
    }
    assert_int_equal(store_flush(s), 0);
    assert_int_equal(atomic_load(&buffers_at_a_write), buffers);
}

/* A group of `count` records of which each takes a buffer of three huge pages, or of one; then a record alone, which finds what was kept. */
static void write_group(uint64_t count, bool large, size_t while_writing, size_t kept)
{
    char *directory = fixture_directory();
    struct io io = io_posix;
    io.pwrite = watched_pwrite;
    struct store *s = open_with(directory, &io, GROUP_THREADS_MAX, UINT64_MAX);
    if (large)
        s->group.buffer_size = 2 * GROUP_HUGE_PAGE + RECORD_PAGE; /* as after a record of that size */
    watched = s;
    write_records(s, 0, count, while_writing);
    write_records(s, count, count + 1, kept);
    watched = NULL;
    store_close(s);
    fixture_remove(directory);
}

/* Threads have as many buffers as their bound allows, each of whole huge pages; few records, as many as they are; 8 MiB stay afterwards. */
static void buffers_stay_within_their_bound(void **state)
{
    (void)state;
    write_group(30, true, GROUP_BUFFERS_SIZE / (3 * GROUP_HUGE_PAGE), 1);
    write_group(30, false, GROUP_THREADS_MAX, 4);
    write_group(3, false, 3, 3);
    write_group(1, false, 1, 1);
}

/* `gap` bytes between the pieces of a layer. */
static struct tier_block *tier_block_of(const struct fixture_block *f, size_t gap)
{
    struct tier_block *b = tier_block_create(FIXTURE_LAYERS, 2 * FIXTURE_LAYERS * (FIXTURE_PIECE + gap));
    assert_non_null(b);
    const struct span *pieces = b->block.pieces;
    b->block = f->block;
    b->block.pieces = pieces;
    uint8_t *at = b->data;
    for (int i = 0; i < 2 * FIXTURE_LAYERS; i++, at += FIXTURE_PIECE + gap) {
        memcpy(at, f->pieces[i].data, FIXTURE_PIECE);
        b->pieces[i] = (struct span){at, FIXTURE_PIECE};
    }
    return b;
}

static void put_held(size_t gap)
{
    char *directory = fixture_directory();
    struct store *s = open_with(directory, &io_posix, 2, 0);
    struct fixture_block f;
    struct fixture_done done = {0, 1};
    struct tier_block *there;
    fixture_block_make(&f, 1);
    struct tier_block *b = tier_block_of(&f, gap);
    assert_int_equal(store_put_held(s, "acme", b, fixture_on_done, &done), 0);
    assert_true(fixture_block_reads(s, "acme", &f)); /* from the queue */
    assert_int_equal(store_read_block(s, "acme", &f.id, &there), 0);
    assert_true(gap ? there != b : there == b);
    tier_block_release(there);
    assert_int_equal(atomic_load(&b->references), gap ? 1 : 2);
    assert_true(op_queue_size(&s->queue) >= 2 * FIXTURE_LAYERS * FIXTURE_PIECE); /* what is held counts too */
    store_flush(s);
    assert_int_equal(done.status, 0);
    store_close(s);
    assert_int_equal(atomic_load(&b->references), 1);
    tier_block_release(b);
    s = open_with(directory, &io_posix, 2, 0);
    assert_true(fixture_block_reads(s, "acme", &f));
    store_close(s);
    fixture_remove(directory);
}

static void a_held_block_is_not_copied(void **state)
{
    (void)state;
    put_held(0);
}
static void pieces_apart_are_copied(void **state)
{
    (void)state;
    put_held(16);
}

static void a_block_of_other_layers_is_refused(void **state)
{
    (void)state;
    char *directory = fixture_directory();
    struct store *s = open_with(directory, &io_posix, 2, 0);
    struct fixture_block f;
    fixture_block_make(&f, 1);
    struct tier_block *b = tier_block_of(&f, 0);
    b->block.block_index++;
    assert_int_equal(store_put_held(s, "acme", b, NULL, NULL), -TD_ERR_MISMATCH);
    tier_block_release(b);
    store_close(s);
    fixture_remove(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_thread),
        cmocka_unit_test(several_threads),
        cmocka_unit_test(past_the_page_cache),
        cmocka_unit_test(buffers_stay_within_their_bound),
        cmocka_unit_test(a_held_block_is_not_copied),
        cmocka_unit_test(pieces_apart_are_copied),
        cmocka_unit_test(a_block_of_other_layers_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
