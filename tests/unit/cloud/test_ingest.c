/* ingest: pieces in, values or verdicts out, in order and bounded. */
#include "cloud/ingest.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <cmocka.h>

static const struct kv_shape shape = {4, 2, 16};
static atomic_uint wakes;

static void count_wake(void *ctx)
{
    atomic_uint *counter = ctx;
    atomic_fetch_add(counter, 1);
}

static void fill(uint16_t *values, size_t count, uint32_t seed)
{
    for (size_t i = 0; i < count; i++)
        values[i] = f32_to_f16((float)((i * 37 + seed) % 200) - 100.0f);
}

static struct ingest_piece *make(const struct kv_shape *of, uint32_t block, uint16_t layer, uint8_t codec,
                                 uint16_t tokens, uint32_t seed, bool infinite)
{
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(of);
    size_t count = kv_piece_values(of, tokens), capacity = kv_piece_bound(of, tokens);
    uint16_t *values = malloc(count * sizeof *values);
    uint8_t *wire = malloc(capacity);
    fill(values, count, seed);
    if (infinite)
        values[count - 1] = 0xfc00;
    struct kv_piece_head head = {
        .version = 1,
        .codec = codec,
        .quality = {codec == KV_RAW ? KV_L0 : codec, KV_NUMERICS_CPU_V1, KV_FROM_DEVICE, 0},
        .block_index = block,
        .token_count = tokens,
        .layer = layer,
        .kv_head_count = (uint16_t)of->kv_head_count,
        .head_dim = (uint16_t)of->head_dim};
    int64_t size = kv_piece_encode(scratch, &head, values, wire, capacity);
    assert_true(size > 0);
    free(values);
    kv_codec_scratch_destroy(scratch);
    return ingest_piece_create(9, 3, block, wire, (size_t)size);
}

static struct ingest_piece *wait_for(struct ingest *g)
{
    struct ingest_piece *piece = NULL;
    for (int i = 0; i < 1000000 && (ingest_gather(g), !(piece = ingest_pop(g))); i++)
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    assert_non_null(piece);
    return piece;
}

static void values_come_back_in_order(void **state)
{
    (void)state;
    static const uint8_t codecs[] = {KV_L0, KV_RAW, KV_L0};
    uint16_t want[64 * 2 * 16];
    atomic_store(&wakes, 0);
    struct ingest *g = ingest_create(&shape, false, NULL, count_wake, &wakes);
    for (uint32_t i = 0; i < 200; i++)
        assert_int_equal(
            ingest_push(g, make(&shape, i, i % 4, codecs[i % 3], (uint16_t)(1 + i % 64), i, false)), 0);
    for (uint32_t i = 0; i < 200; i++) {
        struct ingest_piece *piece = wait_for(g);
        size_t count = kv_piece_values(&shape, 1 + i % 64);
        fill(want, count, i);
        assert_int_equal(piece->status, 0);
        assert_int_equal(piece->sequence, 9);
        assert_int_equal(piece->epoch, 3);
        assert_int_equal(piece->block_index, i);
        assert_int_equal(piece->head.layer, i % 4);
        assert_memory_equal(piece->values, want, count * sizeof *want);
        assert_null(piece->wire);
        ingest_piece_free(piece);
    }
    ingest_gather(g);
    assert_null(ingest_pop(g));
    ingest_destroy(g); /* its thread has done all its waking */
    assert_int_equal(atomic_load(&wakes), 200);
}

/* A piece that is decoded after the engine gathered waits: commands that were given before it may not have run yet. */
static void later_results_wait(void **state)
{
    (void)state;
    atomic_store(&wakes, 0);
    struct ingest *g = ingest_create(&shape, false, NULL, count_wake, &wakes);
    ingest_gather(g);
    assert_int_equal(ingest_push(g, make(&shape, 0, 0, KV_RAW, 64, 0, false)), 0);
    while (atomic_load(&wakes) == 0)
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    assert_null(ingest_pop(g));
    assert_true(ingest_has_more(g));
    ingest_piece_free(wait_for(g));
    assert_false(ingest_has_more(g));
    ingest_destroy(g);
}

static int status_of(struct ingest_piece *piece)
{
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&shape);
    ingest_decode(piece, &shape, false, NULL, scratch);
    int status = piece->status;
    ingest_piece_free(piece);
    kv_codec_scratch_destroy(scratch);
    return status;
}

static void damage_is_told_from_deceit(void **state)
{
    (void)state;
    struct ingest_piece *p = make(&shape, 1, 0, KV_L0, 64, 1, false);
    uint32_t size = p->wire_size;
    ingest_piece_free(p);
    for (uint32_t at = 0; at < size; at += 7) { /* any byte flipped, any end cut off: damaged */
        p = make(&shape, 1, 0, KV_L0, 64, 1, false);
        p->wire[at] ^= 1;
        assert_int_equal(status_of(p), -TD_ERR_CHECKSUM);
        p = make(&shape, 1, 0, KV_L0, 64, 1, false);
        p->wire_size = at;
        assert_int_equal(status_of(p), -TD_ERR_CHECKSUM);
    }
    p = make(&shape, 1, 0, KV_L0, 64, 1, false);
    p->block_index = 2; /* one block's bytes under another's name */
    assert_int_equal(status_of(p), -TD_ERR_CHECKSUM);

    static const struct kv_shape others[] = {{4, 1, 16}, {4, 2, 8}, {4, 4, 16}, {4, 2, 32}};
    for (size_t i = 0; i < TD_COUNT(others); i++)
        assert_int_equal(status_of(make(&others[i], 1, 0, KV_L0, 64, 1, false)), -TD_ERR_SHAPE);
    assert_int_equal(status_of(make(&(struct kv_shape){5, 2, 16}, 1, 4, KV_L0, 64, 1, false)), -TD_ERR_SHAPE);
    assert_int_equal(status_of(make(&shape, 1, 3, KV_L0, 64, 1, false)), 0);
    assert_int_equal(status_of(make(&shape, 1, 0, KV_L0, 64, 1, true)), -TD_ERR_FORMAT);
    assert_int_equal(status_of(make(&shape, 1, 0, KV_RAW, 64, 1, true)), -TD_ERR_FORMAT);
}

/* For a device pieces are checked and stay as they are; L0, which it cannot open, does not. */
static void what_a_device_decodes_stays_encoded(void **state)
{
    (void)state;
    static const uint8_t codecs[] = {KV_RAW, KV_L0, KV_L1, KV_L2};
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&shape);
    uint16_t want[64 * 2 * 16], got[64 * 2 * 16];
    for (size_t i = 0; i < TD_COUNT(codecs); i++) {
        struct ingest_piece *twin = make(&shape, 1, 0, codecs[i], 64, 5, false),
                            *piece = make(&shape, 1, 0, codecs[i], 64, 5, false);
        ingest_decode(twin, &shape, false, NULL, scratch);
        memcpy(want, twin->values, sizeof want);
        ingest_decode(piece, &shape, true, NULL, scratch);
        assert_int_equal(piece->status, 0);
        if (codecs[i] == KV_L0) {
            assert_null(piece->wire);
            memcpy(got, piece->values, sizeof got);
        } else {
            assert_null(piece->values);
            assert_true(piece->payload.data == piece->wire + KV_PIECE_HEAD_SIZE);
            assert_int_equal(kv_piece_decode(scratch, &piece->head, piece->payload, got, TD_COUNT(got)), 0);
        }
        assert_memory_equal(got, want, sizeof want);
        ingest_piece_free(twin);
        ingest_piece_free(piece);
    }
    struct ingest_piece *bad = make(&shape, 1, 0, KV_L1, 64, 5, false);
    bad->wire[bad->wire_size - 1] ^= 1;
    ingest_decode(bad, &shape, true, NULL, scratch);
    assert_int_equal(bad->status, -TD_ERR_CHECKSUM);
    assert_null(bad->wire);
    ingest_piece_free(bad);
    bad = make(&(struct kv_shape){4, 2, 8}, 1, 0, KV_L1, 64, 5, false);
    ingest_decode(bad, &shape, true, NULL, scratch);
    assert_int_equal(bad->status, -TD_ERR_SHAPE);
    ingest_piece_free(bad);
    kv_codec_scratch_destroy(scratch);
}

static void never_more_than_the_bound(void **state)
{
    (void)state;
    struct ingest *g = ingest_create(&shape, false, NULL, count_wake, &wakes);
    for (uint32_t i = 0; i < INGEST_PIECES_MAX; i++)
        assert_int_equal(ingest_push(g, make(&shape, i, 0, KV_RAW, 1, i, false)), 0);
    struct ingest_piece *more = make(&shape, 0, 0, KV_RAW, 1, 0, false);
    assert_int_equal(ingest_push(g, more), -TD_ERR_FULL);
    ingest_piece_free(wait_for(g));
    assert_int_equal(ingest_push(g, more), 0);
    ingest_destroy(g); /* frees what nobody took */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_come_back_in_order),  cmocka_unit_test(later_results_wait),
        cmocka_unit_test(damage_is_told_from_deceit), cmocka_unit_test(what_a_device_decodes_stays_encoded),
        cmocka_unit_test(never_more_than_the_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
