/* L2: the AVX2 loops against the plain ones, the error against what the steps allow, hostile payloads, sizes. Bytes
 * and values against an independent implementation are in test_kv_piece.c. */
#include "shared/kv_codec.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

static uint64_t rng_state = 7;
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

/* Rows about a mean for each head, as K and V are; the magnitude changes from row to row. */
static void fill(uint16_t *src, uint32_t heads, uint32_t tokens, uint32_t dim)
{
    for (uint32_t h = 0; h < heads; h++) {
        float mean[KV_HEAD_DIM_MAX];
        for (uint32_t i = 0; i < dim; i++)
            mean[i] = 3 * rng_normal();
        for (uint32_t t = 0; t < tokens; t++, src += dim) {
            float size = ldexpf(1, (int)(t * 5 % 7) - 4);
            for (uint32_t i = 0; i < dim; i++)
                src[i] = f32_to_f16(mean[i] + size * rng_normal());
        }
    }
}

static struct kv_codec_scratch *scratch_for(uint32_t heads, uint32_t dim)
{
    struct kv_shape shape = {1, heads, dim};
    struct kv_codec_scratch *s = kv_codec_scratch_create(&shape);
    assert_non_null(s);
    return s;
}

/* ---- twins ------------------------------------------------------------------------------------------------
 */

static void assert_same_rows(uint32_t dim)
{
    const struct kv_l2_ops *a = &kv_l2_portable, *b = kv_l2_avx2();
    uint16_t src[KV_HEAD_DIM_MAX], out_a[KV_HEAD_DIM_MAX], out_b[KV_HEAD_DIM_MAX];
    float y[KV_HEAD_DIM_MAX], z[KV_HEAD_DIM_MAX];
    fill(src, 1, 1, dim);
    src[3] = 0x8000;
    src[dim - 1] = 0x0001;
    assert_true(a->forward(src, dim, y) && b->forward(src, dim, z));
    assert_memory_equal(y, z, dim * sizeof *y);
    a->add(y, y, dim);
    b->add(z, z, dim);
    assert_memory_equal(y, z, dim * sizeof *y);
    y[1] = z[1] = 1e9f; /* far beyond f16 */
    a->inverse(y, dim, out_a);
    b->inverse(z, dim, out_b);
    assert_memory_equal(out_a, out_b, dim * sizeof *out_a);
    assert_true(kv_f16_all_finite(out_a, dim));
    for (uint32_t at = 0; at < dim; at++) {
        uint16_t kept = src[at];
        src[at] = at % 2 ? 0x7c00 : 0xfe01;
        assert_false(a->forward(src, dim, y) || b->forward(src, dim, z));
        src[at] = kept;
    }
}

static void assert_same_groups(bool five, float inverse)
{
    const struct kv_l2_ops *a = &kv_l2_portable, *b = kv_l2_avx2();
    float y[KV_GROUP], mean[KV_GROUP], back_a[KV_GROUP], back_b[KV_GROUP], peaks[4];
    uint8_t bytes[2][KV_GROUP / 2 + KV_GROUP / 8];
    for (int i = 0; i < KV_GROUP; i++) {
        mean[i] = rng_normal();
        y[i] = rng() % 4 ? 6 * rng_normal() : mean[i] + ((float)(rng() % 64) - 32) / 4; /* ties */
    }
    a->peaks(y, mean, KV_GROUP, &peaks[0], &peaks[1]);
    b->peaks(y, mean, KV_GROUP, &peaks[2], &peaks[3]);
    assert_memory_equal(peaks, peaks + 2, 2 * sizeof *peaks);
    struct kv_l2_codes codes[2] = {{bytes[0], five ? bytes[0] + 32 : NULL, NULL},
                                   {bytes[1], five ? bytes[1] + 32 : NULL, NULL}};
    memset(bytes, 0xaa, sizeof bytes);
    a->put(y, mean, KV_GROUP, inverse, codes[0]);
    b->put(y, mean, KV_GROUP, inverse, codes[1]);
    assert_memory_equal(bytes[0], bytes[1], sizeof bytes[0]);
    struct kv_l2_const_codes read = {codes[0].low, codes[0].fifth, NULL};
    a->get(read, KV_GROUP, inverse == 0 ? 0 : 1 / inverse, mean, back_a);
    b->get(read, KV_GROUP, inverse == 0 ? 0 : 1 / inverse, mean, back_b);
    assert_memory_equal(back_a, back_b, sizeof back_a);
}

static void test_avx2_equals_plain(void **state)
{
    (void)state;
    if (!kv_l2_avx2())
        skip();
    static const uint32_t dims[] = {64, 128, 192, 256, 320, 512};
    for (size_t i = 0; i < TD_COUNT(dims); i++)
        assert_same_rows(dims[i]);
    for (int i = 0; i < 200; i++) {
        assert_same_groups(false, (float)(i % 5) * 0.5f);
        assert_same_groups(true, (float)(i % 5) * 0.75f);
    }
}

/* ---- error ------------------------------------------------------------------------------------------------
 */

static double error_of(uint8_t table, uint32_t block_index, uint32_t tokens, uint32_t dim)
{
    enum { HEADS = 2 };
    struct kv_piece_head head = {.codec = KV_L2,
                                 .table = table,
                                 .quality = {0, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0},
                                 .block_index = block_index,
                                 .token_count = (uint16_t)tokens,
                                 .kv_head_count = HEADS,
                                 .head_dim = (uint16_t)dim};
    struct kv_shape shape = {1, HEADS, dim};
    struct kv_codec_scratch *s = scratch_for(HEADS, dim);
    size_t count = kv_piece_values(&shape, tokens), bound = kv_piece_bound(&shape, tokens);
    uint16_t *src = malloc(2 * count), *out = malloc(2 * count);
    uint8_t *piece = malloc(bound);
    struct span payload;
    fill(src, HEADS, tokens, dim);
    int64_t size = kv_piece_encode(s, &head, src, piece, bound);
    assert_true(size > 0);
    assert_int_equal(head.quality.fidelity, KV_L2);
    assert_int_equal(kv_piece_parse(piece, (size_t)size, &head, &payload), 0);
    assert_int_equal(kv_piece_decode(s, &head, payload, out, count), 0);
    double wrong = 0, all = 0;
    for (size_t i = 0; i < count; i++) {
        double x = f16_to_f32(src[i]), y = f16_to_f32(out[i]);
        wrong += (x - y) * (x - y);
        all += x * x;
    }
    free(piece);
    free(out);
    free(src);
    kv_codec_scratch_destroy(s);
    return wrong / all;
}

/* 4 bits of a normal distribution with a scale for 64 leave less than 1 % of its energy, each further bit a
 * quarter of that; here nine tenths of the energy is the mean's, which costs nothing. */
static void test_error_is_what_the_bits_allow(void **state)
{
    (void)state;
    static const uint32_t dims[] = {64, 128, 96, 80, 512};
    for (size_t i = 0; i < TD_COUNT(dims); i++) {
        double four = error_of(0, 1, 64, dims[i]), five = error_of(1, 1, 64, dims[i]);
        assert_true(four > 0 && four < 0.0035);
        assert_true(five < four / 3);
        assert_true(error_of(0, 1, 1, dims[i]) < 0.001); /* a lone token is its own mean: coded twice */
        double wide = error_of(0, 0, 1, dims[i]);
        assert_true(wide < 0.0001); /* the first token of the sequence: 8 bits */
    }
    for (uint32_t dim = 1; dim < 40; dim++)
        assert_true(error_of((uint8_t)(dim % 2), dim % 3, 5, dim) < 0.02);
}

/* ---- sizes and hostile bytes ------------------------------------------------------------------------------
 */

static void test_bits_a_value(void **state)
{
    (void)state;
    struct kv_l2_form f = {.head_count = 3, .token_count = 64, .dim = 64, .bits = 4};
    double values = 3 * 64 * 64;
    assert_true(8.0 * (double)(kv_l2_size(&f) + KV_PIECE_HEAD_SIZE) / values < 4.25);
    f.wide = true;
    assert_true(8.0 * (double)(kv_l2_size(&f) + KV_PIECE_HEAD_SIZE) / values < 4.32);
    f = (struct kv_l2_form){.head_count = 8, .token_count = 64, .dim = 128, .bits = 5};
    assert_true(8.0 * (double)(kv_l2_size(&f) + KV_PIECE_HEAD_SIZE) / (8 * 64 * 128) < 5.225);
}

static void test_sizes_and_padding_are_checked(void **state)
{
    (void)state;
    struct kv_l2_form f = {.head_count = 1, .token_count = 3, .dim = 31, .bits = 5, .wide = true};
    uint16_t src[93], out[93];
    uint8_t payload[512];
    struct kv_codec_scratch *s = scratch_for(2, 64);
    size_t size = kv_l2_size(&f);
    assert_int_equal(size, 1 + 4 + 4 * 16 + 4 * 4 + 16);
    fill(src, 1, 3, 31);
    assert_int_equal(kv_l2_encode(s, &f, src, payload, size - 1), -TD_ERR_NOSPACE);
    assert_int_equal(kv_l2_encode(s, &f, src, payload, size), size);
    assert_int_equal(kv_l2_decode(&f, (struct span){payload, size}, out), 0);
    assert_int_equal(kv_l2_decode(&f, (struct span){payload, size - 1}, out), -TD_ERR_FORMAT);
    assert_int_equal(kv_l2_decode(&f, (struct span){payload, size + 1}, out), -TD_ERR_FORMAT);
    const struct {
        size_t at;
        uint8_t bit;
    } unused[] = {{0, 3}, {5 + 15, 4}, {5 + 63, 7}, {69 + 3, 7}, {69 + 15, 7}, {85 + 15, 4}};
    for (size_t i = 0; i < TD_COUNT(unused); i++) {
        payload[unused[i].at] ^= (uint8_t)(1 << unused[i].bit);
        assert_int_equal(kv_l2_decode(&f, (struct span){payload, size}, out), -TD_ERR_FORMAT);
        payload[unused[i].at] ^= (uint8_t)(1 << unused[i].bit);
    }
    src[92] = 0x7c00;
    assert_int_equal(kv_l2_encode(s, &f, src, payload, size), -TD_ERR_FORMAT);
    kv_codec_scratch_destroy(s);
}

static void test_any_bytes_decode_to_finite_values(void **state)
{
    (void)state;
    struct kv_l2_form f = {.head_count = 2, .token_count = 8, .dim = 128, .bits = 4, .wide = true};
    uint16_t out[2 * 8 * 128];
    uint8_t payload[4096];
    size_t size = kv_l2_size(&f);
    assert_true(size <= sizeof payload);
    memset(payload, 0xff, size); /* the largest steps and codes there are, over a mean of the same */
    assert_int_equal(kv_l2_decode(&f, (struct span){payload, size}, out), 0);
    assert_true(kv_f16_all_finite(out, TD_COUNT(out)));
    for (int round = 0; round < 50; round++) {
        for (size_t i = 0; i < size; i++)
            payload[i] = (uint8_t)rng();
        assert_int_equal(kv_l2_decode(&f, (struct span){payload, size}, out), 0);
        assert_true(kv_f16_all_finite(out, TD_COUNT(out)));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_avx2_equals_plain),
        cmocka_unit_test(test_error_is_what_the_bits_allow),
        cmocka_unit_test(test_bits_a_value),
        cmocka_unit_test(test_sizes_and_padding_are_checked),
        cmocka_unit_test(test_any_bytes_decode_to_finite_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
