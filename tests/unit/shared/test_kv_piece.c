/* Pieces: head, L0, L1, RAW. Bytes and values against files that tests/golden/check_kv.py made from
 * KV_FORMAT.md (L2's inner loops have test_kv_l2.c); error bounds against double arithmetic; the AVX2 twin of L1 against the plain one. */
#include "shared/kv_codec.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { CRC_AT = 32, PAYLOAD_SIZE_AT = 28 };

struct file {
    uint8_t bytes[8192];
    size_t size;
};

static struct file load(const char *name)
{
    struct file f;
    char path[512];
    snprintf(path, sizeof path, "%s/kv/%s", TEST_DATA, name);
    FILE *in = fopen(path, "rb");
    assert_non_null(in);
    f.size = fread(f.bytes, 1, sizeof f.bytes, in);
    fclose(in);
    return f;
}

static uint64_t rng_state = 1;
static uint32_t rng(void)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng_state >> 33);
}
static float rng_normal(void)
{
    float sum = 0;
    for (int i = 0; i < 12; i++)
        sum += (float)rng() / 2147483648.0f;
    return sum - 6;
}

static struct kv_codec_scratch *scratch_for(uint32_t heads, uint32_t dim)
{
    struct kv_shape shape = {1, heads, dim};
    struct kv_codec_scratch *s = kv_codec_scratch_create(&shape);
    assert_non_null(s);
    return s;
}

static struct kv_piece_head head_of(uint8_t codec, uint32_t heads, uint32_t tokens, uint32_t dim)
{
    return (struct kv_piece_head){.codec = codec,
                                  .quality = {0, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0},
                                  .block_index = 5,
                                  .token_count = (uint16_t)tokens,
                                  .layer = 7,
                                  .kv_head_count = (uint16_t)heads,
                                  .head_dim = (uint16_t)dim};
}

/* Recompute the checksum after a test has changed a piece on purpose. */
static void reseal(uint8_t *piece, size_t size)
{
    store_le32(piece + CRC_AT, 0);
    store_le32(piece + CRC_AT, crc32c(0, piece, size));
}

/* ---- golden -----------------------------------------------------------------------------------------------
 */

static void test_golden_pieces_decode(void **state)
{
    (void)state;
    static const char *const names[] = {"raw",           "l0",           "l0_even",     "l1",       "l1_tail",
                                        "l1_wide",       "l1_wide_tail", "l2",          "l2_first", "l2_5bit",
                                        "l2_5bit_first", "l2_odd",       "l2_odd_first"};
    struct kv_codec_scratch *s = scratch_for(2, 128);
    for (size_t i = 0; i < TD_COUNT(names); i++) {
        char name[64];
        snprintf(name, sizeof name, "%s.piece", names[i]);
        struct file piece = load(name);
        snprintf(name, sizeof name, "%s.f16", names[i]);
        struct file expected = load(name);
        struct kv_piece_head head;
        struct span payload;
        uint16_t values[4096];
        assert_int_equal(kv_piece_parse(piece.bytes, piece.size, &head, &payload), 0);
        assert_int_equal(kv_piece_decode(s, &head, payload, values, TD_COUNT(values)), 0);
        assert_memory_equal(values, expected.bytes, expected.size);
    }
    kv_codec_scratch_destroy(s);
}

static void test_golden_head_fields(void **state)
{
    (void)state;
    struct file piece = load("l1_tail.piece");
    struct kv_piece_head h;
    struct span payload;
    assert_int_equal(kv_piece_parse(piece.bytes, piece.size, &h, &payload), 0);
    assert_int_equal(h.codec, KV_L1);
    assert_int_equal(h.is_value, 0);
    assert_int_equal(h.quality.fidelity, 1);
    assert_int_equal(h.quality.numerics, 3);
    assert_int_equal(h.quality.provenance, 1);
    assert_int_equal(h.block_index, 4000000000u);
    assert_int_equal(h.first_token, 61);
    assert_int_equal(h.token_count, 3);
    assert_int_equal(h.layer, 1023);
    assert_int_equal(h.kv_head_count, 1);
    assert_int_equal(h.head_dim, 30);
    assert_int_equal(h.payload_size, 92);
    assert_ptr_equal(payload.data, piece.bytes + KV_PIECE_HEAD_SIZE);
}

static void assert_encodes_to(const char *name, const char *source)
{
    struct file expected = load(name), src = load(source);
    struct kv_piece_head head, golden;
    struct span payload;
    assert_int_equal(kv_piece_parse(expected.bytes, expected.size, &golden, &payload), 0);
    head = golden;
    head.version = 0;
    head.payload_size = head.crc = 77;
    uint8_t out[8192];
    struct kv_codec_scratch *s = scratch_for(2, 128);
    assert_int_equal(kv_piece_encode(s, &head, (const uint16_t *)src.bytes, out, sizeof out), expected.size);
    assert_memory_equal(out, expected.bytes, expected.size);
    assert_memory_equal(&head, &golden, sizeof head);
    kv_codec_scratch_destroy(s);
}

static void test_golden_encoding(void **state)
{
    (void)state;
    assert_encodes_to("raw.piece", "raw.f16");
    assert_encodes_to("l1.piece", "l1.src.f16");
    assert_encodes_to("l1_tail.piece", "l1_tail.src.f16");
    assert_encodes_to("l1_wide.piece", "l1_wide.src.f16");
    assert_encodes_to("l1_wide_tail.piece", "l1_wide_tail.src.f16");
    assert_encodes_to("l2.piece", "l2.src.f16");
    assert_encodes_to("l2_first.piece", "l2_first.src.f16");
    assert_encodes_to("l2_5bit.piece", "l2_5bit.src.f16");
    assert_encodes_to("l2_5bit_first.piece", "l2_5bit_first.src.f16");
    assert_encodes_to("l2_odd.piece", "l2_odd.src.f16");
    assert_encodes_to("l2_odd_first.piece", "l2_odd_first.src.f16");
}

static void test_scales_match_exact_powers(void **state)
{
    (void)state;
    struct file scales = load("scales.f32");
    assert_int_equal(scales.size, 1024);
    for (int s = 1; s < 256; s++) {
        float expected, value = kv_power(s - 183);
        memcpy(&expected, scales.bytes + 4 * s, 4);
        assert_memory_equal(&value, &expected, 4);
    }
}

/* ---- L1 ---------------------------------------------------------------------------------------------------
 */

static uint8_t scale_index(uint16_t max_bits)
{
    uint16_t src[KV_GROUP] = {[3] = max_bits};
    uint8_t index;
    int8_t q[KV_GROUP];
    assert_true(kv_l1_portable.encode(src, KV_GROUP, KV_GROUP, &index, q));
    return index;
}

static void test_scale_index_is_the_smallest_that_holds(void **state)
{
    (void)state;
    assert_int_equal(scale_index(0), 0);
    for (uint16_t bits = 1; bits < 0x7c00; bits++) {
        double max = f16_to_f32(bits);
        int expected =
            (int)ceil(183 + 8 * (log2(max) - log2(127.0)) - 1e-9); /* no f16 lies that near to a step */
        expected = expected < 1 ? 1 : expected > 255 ? 255 : expected;
        assert_int_equal(scale_index(bits), expected);
    }
}

static void assert_l1_bound(const uint16_t *src, const uint16_t *out, size_t count, size_t group)
{
    for (size_t at = 0; at < count; at += group) {
        size_t end = TD_MIN(count, at + group);
        double max = 0;
        for (size_t i = at; i < end; i++)
            max = fmax(max, fabs((double)f16_to_f32(src[i])));
        double scale = max == 0 ? 0 : pow(2, fmax(1, ceil(183 + 8 * log2(max / 127) - 1e-9)) / 8 - 183 / 8.0);
        for (size_t i = at; i < end; i++) {
            double decoded = f16_to_f32(out[i]);
            double ulp = fmax(ldexp(1, -24), ldexp(1, ilogb(decoded == 0 ? 1e-9 : decoded) - 10));
            double error = fabs((double)f16_to_f32(src[i]) - decoded);
            assert_true(error <= scale * 0.50001 + ulp / 2);
        }
    }
}

static void test_l1_error_bound_at_every_size(void **state)
{
    (void)state;
    enum { COUNT = 1 << 16 };
    uint16_t *src = malloc(COUNT * 2), *out = malloc(COUNT * 2);
    uint8_t *payload = malloc(kv_l1_size(COUNT, 0));
    for (size_t i = 0; i < COUNT; i++) /* each group has its own magnitude, subnormal to 2^15 */
        src[i] = f32_to_f16(ldexpf(rng_normal() / 8, (int)(i / KV_GROUP * 41 % 40) - 24));
    for (unsigned table = 0; table < KV_TABLES; table++) {
        int64_t size = kv_l1_encode(src, COUNT, table, payload, kv_l1_size(COUNT, table));
        assert_int_equal(size, COUNT + COUNT / (KV_GROUP << table));
        assert_int_equal(kv_l1_decode((struct span){payload, (size_t)size}, table, out, COUNT), 0);
        assert_l1_bound(src, out, COUNT, (size_t)KV_GROUP << table);
    }
    free(payload);
    free(out);
    free(src);
}

static void test_l1_saturates_only_above_65024(void **state)
{
    (void)state;
    uint16_t src[3] = {f32_to_f16(65504), f32_to_f16(-65504), f32_to_f16(-65024)}, out[3];
    uint8_t payload[4];
    assert_int_equal(kv_l1_encode(src, 3, 1, payload, sizeof payload), 4);
    assert_int_equal(kv_l1_decode((struct span){payload, 4}, 1, out, 3), 0);
    assert_true(f16_to_f32(out[0]) == 65024 && f16_to_f32(out[1]) == -65024 && f16_to_f32(out[2]) == -65024);
}

static void assert_l1_twins(size_t group)
{
    const struct kv_l1_ops *fast = kv_l1_avx2();
    enum { GROUPS = 2048, COUNT = GROUPS * KV_GROUP };
    uint16_t *src = malloc(COUNT * 2), *a = malloc(COUNT * 2), *b = malloc(COUNT * 2);
    uint8_t *scales_a = malloc(GROUPS), *scales_b = malloc(GROUPS);
    int8_t *q_a = malloc(COUNT), *q_b = malloc(COUNT);
    for (size_t i = 0; i < COUNT; i++) { /* every second group: any finite bits; else noise of one size */
        src[i] = (uint16_t)rng();
        if (i / KV_GROUP % 2 || (src[i] & 0x7c00) == 0x7c00)
            src[i] = f32_to_f16(ldexpf(rng_normal(), (int)(i / KV_GROUP) % 37 - 24));
    }
    assert_true(kv_l1_portable.encode(src, GROUPS * KV_GROUP, group, scales_a, q_a));
    assert_true(fast->encode(src, GROUPS * KV_GROUP, group, scales_b, q_b));
    assert_memory_equal(scales_a, scales_b, COUNT / group);
    assert_memory_equal(q_a, q_b, COUNT);
    for (size_t i = 0; i < GROUPS; i++) /* every scale, not only likely ones */
        scales_a[i] = (uint8_t)i;
    assert_true(kv_l1_portable.decode(scales_a, q_a, GROUPS * KV_GROUP, group, a));
    assert_true(fast->decode(scales_a, q_a, GROUPS * KV_GROUP, group, b));
    assert_memory_equal(a, b, COUNT * 2);
    for (size_t at = 0; at < group; at++) {
        int8_t bad[KV_L1_GROUP_MAX] = {0};
        bad[at] = -128;
        assert_false(kv_l1_portable.decode(scales_a, bad, group, group, a));
        assert_false(fast->decode(scales_a, bad, group, group, b));
        uint16_t infinite[KV_L1_GROUP_MAX] = {0};
        infinite[at] = at % 2 ? 0xfc00 : 0x7e00;
        assert_false(kv_l1_portable.encode(infinite, group, group, scales_a, q_a));
        assert_false(fast->encode(infinite, group, group, scales_a, q_a));
    }
    free(q_b), free(q_a), free(scales_b), free(scales_a), free(b), free(a), free(src);
}

static void test_l1_twins_give_the_same_bits(void **state)
{
    (void)state;
    if (!kv_l1_avx2())
        skip();
    assert_l1_twins(KV_GROUP);
    assert_l1_twins(KV_L1_GROUP_MAX);
}

static void test_l1_refuses(void **state)
{
    (void)state;
    uint16_t values[70] = {0};
    uint8_t payload[72] = {0};
    assert_int_equal(kv_l1_encode(values, 70, 0, payload, 71), -TD_ERR_NOSPACE);
    values[69] = 0x7c00; /* in the short last group */
    assert_int_equal(kv_l1_encode(values, 70, 0, payload, 72), -TD_ERR_FORMAT);
    assert_int_equal(kv_l1_decode((struct span){payload, 71}, 0, values, 70), -TD_ERR_FORMAT);
    payload[71] = 0x80;
    assert_int_equal(kv_l1_decode((struct span){payload, 72}, 0, values, 70), -TD_ERR_FORMAT);
    payload[71] = 0;
    payload[2] = 0x80;
    assert_int_equal(kv_l1_decode((struct span){payload, 72}, 0, values, 70), -TD_ERR_FORMAT);
    payload[2] = 0xff; /* q = -1 under scale 0 */
    assert_int_equal(kv_l1_decode((struct span){payload, 72}, 0, values, 70), 0);
    assert_int_equal(values[0], 0);
}

/* ---- L0 and RAW -------------------------------------------------------------------------------------------
 */

static size_t round_trip(uint8_t codec, const uint16_t *src, uint32_t heads, uint32_t tokens, uint32_t dim)
{
    struct kv_codec_scratch *s = scratch_for(heads, dim);
    struct kv_shape shape = {1, heads, dim};
    size_t count = kv_piece_values(&shape, tokens), bound = kv_piece_bound(&shape, tokens);
    uint8_t *piece = malloc(bound);
    uint16_t *out = calloc(count, 2);
    struct kv_piece_head head = head_of(codec, heads, tokens, dim), parsed;
    struct span payload;
    int64_t size = kv_piece_encode(s, &head, src, piece, bound);
    assert_true(size > 0 && (size_t)size <= bound);
    assert_int_equal(kv_piece_parse(piece, (size_t)size, &parsed, &payload), 0);
    assert_int_equal(kv_piece_decode(s, &parsed, payload, out, count), 0);
    assert_memory_equal(out, src, count * 2);
    for (size_t room = 0; room < (size_t)size; room += 1 + (size_t)size / 50) {
        struct kv_piece_head again = head_of(codec, heads, tokens, dim);
        int64_t rc = kv_piece_encode(s, &again, src, piece, room);
        assert_true(rc == -TD_ERR_NOSPACE || (codec == KV_L0 && rc > 0 && (size_t)rc <= room));
    }
    free(out);
    free(piece);
    kv_codec_scratch_destroy(s);
    return (size_t)size;
}

static void test_lossless_keeps_every_bit(void **state)
{
    (void)state;
    enum { HEADS = 3, DIM = 64, COUNT = HEADS * 64 * DIM };
    uint16_t *src = malloc(COUNT * 2);
    for (size_t i = 0; i < COUNT; i++) /* noise with NaN payloads and infinities: nothing shrinks */
        src[i] = (uint16_t)rng();
    assert_int_equal(round_trip(KV_L0, src, HEADS, 64, DIM),
                     KV_PIECE_HEAD_SIZE + KV_L0_HEAD_SIZE + COUNT * 2);
    assert_int_equal(round_trip(KV_RAW, src, HEADS, 64, DIM), KV_PIECE_HEAD_SIZE + COUNT * 2);
    for (uint32_t tokens = 1; tokens < 64; tokens += 9)
        round_trip(KV_L0, src, HEADS, tokens, DIM);
    round_trip(KV_L0, src, 1, 1, 1);
    round_trip(KV_L0, src, 1, 1, 3);

    for (size_t i = 0; i < COUNT; i++)
        src[i] = f32_to_f16(rng_normal());
    size_t size = round_trip(KV_L0, src, HEADS, 64, DIM);
    assert_true(size * 8 < COUNT * 14.2); /* sign, exponent, 2 of 10 mantissa bits: 5.6-5.9 bits + 8 */
    for (size_t i = 0; i < COUNT; i++)
        src[i] &= 0xffe0; /* as if from bf16, nearly: the low plane has 3 bits left */
    assert_true(round_trip(KV_L0, src, HEADS, 64, DIM) * 8 < COUNT * 9.3);
    memset(src, 0, COUNT * 2);
    assert_true(round_trip(KV_L0, src, HEADS, 64, DIM) < 200);
    free(src);
}

static void test_l0_refuses_hostile_planes(void **state)
{
    (void)state;
    struct file piece = load("l0.piece");
    struct kv_codec_scratch *s = scratch_for(2, 16);
    uint16_t values[2048];
    struct kv_piece_head h;
    struct span p;
    assert_int_equal(kv_piece_parse(piece.bytes, piece.size, &h, &p), 0);
    uint8_t *payload = piece.bytes + KV_PIECE_HEAD_SIZE;
    assert_int_equal(payload[0], 1); /* the high plane is zstd, the low one raw */
    assert_int_equal(payload[1], 0);
    uint32_t high_size = load_le32(payload + 4);

    struct {
        size_t at;
        uint8_t value;
    } edits[] = {{0, 0}, {0, 2}, {1, 1}, {1, 2}, {2, 1}, {3, 1}, {4, (uint8_t)(high_size - 1)}, {7, 255}};
    for (size_t i = 0; i < TD_COUNT(edits); i++) {
        uint8_t kept = payload[edits[i].at];
        payload[edits[i].at] = edits[i].value;
        assert_int_equal(kv_piece_decode(s, &h, p, values, 2048), -TD_ERR_FORMAT);
        payload[edits[i].at] = kept;
    }
    assert_int_equal(kv_piece_decode(s, &h, (struct span){p.data, p.size - 1}, values, 2048), -TD_ERR_FORMAT);
    assert_int_equal(kv_piece_decode(s, &h, (struct span){p.data, 7}, values, 2048), -TD_ERR_FORMAT);
    h.token_count = 63; /* zstd must give exactly what the shape implies */
    assert_int_equal(kv_piece_decode(s, &h, p, values, 2048), -TD_ERR_FORMAT);
    h.token_count = 64;
    assert_int_equal(kv_piece_decode(s, &h, p, values, 2048), 0);
    kv_codec_scratch_destroy(s);
}

/* ---- head -------------------------------------------------------------------------------------------------
 */

static void test_parse_refuses_damage(void **state)
{
    (void)state;
    struct file piece = load("l1.piece");
    struct kv_piece_head h;
    struct span p;
    for (size_t size = 0; size < piece.size; size++)
        assert_int_equal(kv_piece_parse(piece.bytes, size, &h, &p), -TD_ERR_TRUNCATED);
    piece.bytes[piece.size] = 0;
    assert_int_equal(kv_piece_parse(piece.bytes, piece.size + 1, &h, &p), -TD_ERR_FORMAT);
    for (size_t at = 0; at < piece.size; at++) {
        piece.bytes[at] ^= 0x10;
        assert_true(kv_piece_parse(piece.bytes, piece.size, &h, &p) < 0);
        piece.bytes[at] ^= 0x10;
    }
    assert_int_equal(kv_piece_parse(piece.bytes, piece.size, &h, &p), 0);
}

static void test_parse_refuses_fields(void **state)
{
    (void)state;
    struct file good = load("l1.piece");
    /* offset, value, answer; the checksum is made right, as a hostile peer would */
    const struct {
        size_t at;
        uint8_t value;
        int rc;
    } edits[] = {
        {0, 0, -TD_ERR_FORMAT},
        {4, 2, -TD_ERR_VERSION},
        {5, 2, -TD_ERR_FORMAT /* fidelity 1 under L2 */},
        {5, 5, -TD_ERR_FORMAT},
        {5, 13, -TD_ERR_FORMAT},
        {5, 16, -TD_ERR_FORMAT},
        {6, 2, -TD_ERR_FORMAT},
        {7, 2, -TD_ERR_UNSUPPORTED},
        {8, 0, -TD_ERR_FORMAT},
        {8, 5, -TD_ERR_FORMAT},
        {9, 0, -TD_ERR_FORMAT},
        {9, 10, 0}, /* cuda-det-v2 on pages in INT8 */
        {9, 11, -TD_ERR_FORMAT},
        {9, 16, 0}, /* cuda-det of compute capability 7.5 */
        {9, 240, 0},
        {9, 241, -TD_ERR_FORMAT},
        {10, 2, -TD_ERR_FORMAT},
        {11, 1, -TD_ERR_FORMAT},
        {16, 1, -TD_ERR_SHAPE},
        {18, 0, -TD_ERR_SHAPE},
        {18, 65, -TD_ERR_SHAPE},
        {19, 255, -TD_ERR_SHAPE},
        {21, 4, -TD_ERR_SHAPE},
        {22, 0, -TD_ERR_SHAPE},
        {23, 1, -TD_ERR_SHAPE},
        {24, 0, -TD_ERR_SHAPE},
        {25, 3, -TD_ERR_SHAPE},
        {26, 1, -TD_ERR_FORMAT},
        {27, 1, -TD_ERR_FORMAT},
        {36, 1, -TD_ERR_FORMAT},
        {63, 1, -TD_ERR_FORMAT},
    };
    for (size_t i = 0; i < TD_COUNT(edits); i++) {
        struct file piece = good;
        struct kv_piece_head h;
        struct span p;
        piece.bytes[edits[i].at] = edits[i].value;
        reseal(piece.bytes, piece.size);
        assert_int_equal(kv_piece_parse(piece.bytes, piece.size, &h, &p), edits[i].rc);
    }
    for (uint8_t level = 2; level <= 4; level++) { /* L2 has tables 0 and 1 */
        struct file piece = good;
        struct kv_piece_head h;
        struct span p;
        piece.bytes[5] = piece.bytes[8] = level;
        piece.bytes[7] = level == KV_L2 ? 2 : 0;
        reseal(piece.bytes, piece.size);
        assert_int_equal(kv_piece_parse(piece.bytes, piece.size, &h, &p), -TD_ERR_UNSUPPORTED);
    }
}

static void test_encode_refuses(void **state)
{
    (void)state;
    struct kv_codec_scratch *s = scratch_for(1, 16);
    uint16_t src[2048] = {0};
    uint8_t out[8192];
    struct kv_piece_head h = head_of(KV_L3, 1, 64, 16);
    assert_int_equal(kv_piece_encode(s, &h, src, out, sizeof out), -TD_ERR_UNSUPPORTED);
    h = head_of(KV_L0, 2, 64, 16); /* larger than the scratch */
    assert_int_equal(kv_piece_encode(s, &h, src, out, sizeof out), -TD_ERR_SHAPE);
    h = head_of(KV_L0, 1, 65, 16);
    assert_int_equal(kv_piece_encode(s, &h, src, out, sizeof out), -TD_ERR_SHAPE);
    h = head_of(KV_L0, 1, 64, 16);
    h.quality.numerics = 0;
    assert_int_equal(kv_piece_encode(s, &h, src, out, sizeof out), -TD_ERR_FORMAT);
    h = head_of(KV_L1, 1, 64, 16);
    src[100] = 0x7c00;
    assert_int_equal(kv_piece_encode(s, &h, src, out, sizeof out), -TD_ERR_FORMAT);
    src[100] = 0;
    h = head_of(KV_L1, 1, 64, 16);
    assert_true(kv_piece_encode(s, &h, src, out, sizeof out) > 0);
    assert_int_equal(h.quality.fidelity, KV_L1); /* raised: a piece never claims more than its codec gives */
    struct span p = {out + KV_PIECE_HEAD_SIZE, h.payload_size};
    assert_int_equal(kv_piece_decode(s, &h, p, src, 1023), -TD_ERR_NOSPACE);
    assert_int_equal(kv_piece_decode(s, &h, p, src, 1024), 0);
    h.kv_head_count = 2;
    assert_int_equal(kv_piece_decode(s, &h, p, src, 2048), -TD_ERR_SHAPE);
    kv_codec_scratch_destroy(s);
}

static void test_scratch_checks_its_shape(void **state)
{
    (void)state;
    const struct kv_shape bad[] = {{1, 0, 64}, {1, 257, 64}, {1, 1, 0}, {1, 1, 513}};
    for (size_t i = 0; i < TD_COUNT(bad); i++)
        assert_null(kv_codec_scratch_create(&bad[i]));
    kv_codec_scratch_destroy(NULL);
}

static void test_all_finite(void **state)
{
    (void)state;
    uint16_t values[37];
    for (size_t i = 0; i < 37; i++)
        values[i] = i % 2 ? 0xfbff : 0x7bff;
    assert_true(kv_f16_all_finite(values, 37));
    assert_true(kv_f16_all_finite(values, 0));
    values[36] = 0xfc00;
    assert_false(kv_f16_all_finite(values, 37));
    assert_true(kv_f16_all_finite(values, 36));
    values[36] = 0x7c01;
    assert_false(kv_f16_all_finite(values, 37));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_pieces_decode),
        cmocka_unit_test(test_golden_head_fields),
        cmocka_unit_test(test_golden_encoding),
        cmocka_unit_test(test_scales_match_exact_powers),
        cmocka_unit_test(test_scale_index_is_the_smallest_that_holds),
        cmocka_unit_test(test_l1_error_bound_at_every_size),
        cmocka_unit_test(test_l1_saturates_only_above_65024),
        cmocka_unit_test(test_l1_twins_give_the_same_bits),
        cmocka_unit_test(test_l1_refuses),
        cmocka_unit_test(test_lossless_keeps_every_bit),
        cmocka_unit_test(test_l0_refuses_hostile_planes),
        cmocka_unit_test(test_parse_refuses_damage),
        cmocka_unit_test(test_parse_refuses_fields),
        cmocka_unit_test(test_encode_refuses),
        cmocka_unit_test(test_scratch_checks_its_shape),
        cmocka_unit_test(test_all_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
