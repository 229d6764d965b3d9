/* base and status: little-endian access, bounded reading, hex, clocks, half precision against a slow
 * reference, CRC-32C against RFC 3720's vectors and a bitwise twin. */
#include "shared/base.h"
#include "shared/status.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <cmocka.h>

static uint64_t random_state = 0x9e3779b97f4a7c15u;

static uint32_t random_u32(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 16);
}

static uint32_t bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* --- status --- */

static void test_status_texts(void **state)
{
    (void)state;
    assert_string_equal(td_status_text(0), "success");
    assert_string_equal(td_status_text(-TD_ERR_FULL), "queue full");
    assert_string_equal(td_status_text(TD_ERR_FULL), "queue full");
    assert_string_equal(td_status_text(-9999), "unknown error");
    assert_string_equal(td_status_text(-2147483647 - 1), "unknown error");
    for (int a = 1; a <= TD_ERR_INTERNAL; a++)
        for (int b = 1; b < a; b++)
            assert_string_not_equal(td_status_text(-a), td_status_text(-b));
}

static void test_fail_formats_one_safe_line(void **state)
{
    (void)state;
    struct td_error err;
    assert_int_equal(td_fail(&err, -TD_ERR_FORMAT, "cannot load %s: %d", "a\nb\x1b[0m", 7), -TD_ERR_FORMAT);
    assert_int_equal(err.code, -TD_ERR_FORMAT);
    assert_string_equal(err.text, "cannot load a?b?[0m: 7");
    assert_int_equal(td_fail(NULL, -TD_ERR_IO, "%s", "nobody listens"), -TD_ERR_IO);
}

static void test_fail_cuts_between_characters(void **state)
{
    (void)state;
    struct td_error err;
    char text[2 * TD_ERROR_TEXT_SIZE];
    for (size_t lead = 0; lead < 3; lead++) { /* "…" is three bytes: every cut position */
        memset(text, 'x', sizeof text);
        for (size_t i = lead; i + 3 < sizeof text; i += 3)
            memcpy(text + i, "\xe2\x80\xa6", 3);
        text[sizeof text - 1] = '\0';
        td_fail(&err, -TD_ERR_IO, "%s", text);
        size_t size = strlen(err.text);
        assert_true(size > TD_ERROR_TEXT_SIZE - 5);
        assert_int_equal((size - lead) % 3, 0);
    }
}

/* --- little-endian and readers --- */

static void test_little_endian(void **state)
{
    (void)state;
    uint8_t bytes[8];
    store_le64(bytes, 0x0123456789abcdefu);
    assert_memory_equal(bytes, "\xef\xcd\xab\x89\x67\x45\x23\x01", 8);
    assert_int_equal(load_le16(bytes), 0xcdef);
    assert_int_equal(load_le32(bytes), 0x89abcdefu);
    assert_true(load_le64(bytes) == 0x0123456789abcdefu);
    assert_int_equal(align_up(0, 64), 0);
    assert_int_equal(align_up(1, 64), 64);
    assert_int_equal(align_up(64, 64), 64);
    assert_int_equal(align_up(10, 3), 12);
}

static void test_reader_stops_at_the_end(void **state)
{
    (void)state;
    static const uint8_t bytes[15] = {1, 2, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0x80};
    struct reader r = reader_over(bytes, sizeof bytes);
    assert_int_equal(reader_u8(&r), 1);
    assert_int_equal(reader_u16(&r), 2);
    assert_int_equal(reader_u32(&r), 3);
    assert_true(reader_u64(&r) == 0x8000000000000004u);
    assert_false(r.bad);
    assert_non_null(reader_take(&r, 0));
    assert_int_equal(reader_u8(&r), 0);
    assert_true(r.bad);

    r = reader_over(bytes, 3);
    assert_null(reader_take(&r, SIZE_MAX));
    assert_true(r.bad);
    assert_int_equal(reader_u8(&r), 0); /* bad stays bad, though bytes are left */
}

/* --- clocks and hex --- */

static void test_clocks(void **state)
{
    (void)state;
    uint64_t before = clock_mono_us();
    struct timespec pause = {.tv_nsec = 3000000};
    nanosleep(&pause, NULL);
    uint64_t passed = clock_mono_us() - before;
    assert_true(passed >= 3000);
    time_t first = time(NULL);
    uint64_t wall_s = clock_wall_us() / 1000000;
    assert_in_range(wall_s, first, time(NULL) + 1);
}

static void test_hex(void **state)
{
    (void)state;
    char text[9];
    uint8_t bytes[4] = {0x00, 0x9f, 0xa5, 0xff};
    hex_encode(bytes, 4, text);
    assert_string_equal(text, "009fa5ff");
    uint8_t back[4] = {0};
    assert_int_equal(hex_decode("009FA5fF", back, 4), 0);
    assert_memory_equal(back, bytes, 4);
    assert_int_equal(hex_decode("", back, 0), 0);
    static const char *const bad[] = {"009fa5f",  "009fa5ff0", "",           "009fa5fg",
                                      "g09fa5ff", "00 9fa5f",  "009fa5f\xe9"};
    for (size_t i = 0; i < TD_COUNT(bad); i++)
        assert_int_equal(hex_decode(bad[i], back, 4), -TD_ERR_FORMAT);
}

/* --- half precision --- */

/* The value of a finite half, and 2^16 for the place after the largest one, by its definition. */
static double half_value(uint32_t h)
{
    uint32_t exponent = h >> 10 & 31, fraction = h & 0x3ff;
    double magnitude = exponent ? ldexp(1024 + fraction, (int)exponent - 25) : ldexp(fraction, -24);
    return h & 0x8000 ? -magnitude : magnitude;
}

/* The nearest half by search; a tie goes to the even one. 0x7c00 stands for 2^16, so rounding to it is
 * infinity. */
static uint16_t nearest_half(float f)
{
    uint32_t sign = bits_of(f) >> 16 & 0x8000;
    if (isnan(f))
        return (uint16_t)(sign | 0x7e00);
    double x = fabs((double)f);
    uint32_t low = 0, high = 0x7c00;
    if (x >= half_value(high))
        return (uint16_t)(sign | high);
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        *(half_value(middle) <= x ? &low : &high) = middle;
    }
    double below = x - half_value(low), above = half_value(high) - x;
    uint32_t nearest = below < above || (below == above && low % 2 == 0) ? low : high;
    return (uint16_t)(sign | nearest);
}

static void test_every_half_to_float(void **state)
{
    (void)state;
    static uint16_t halves[65536];
    static float floats[65536];
    for (uint32_t h = 0; h < 65536; h++)
        halves[h] = (uint16_t)h;
    f16_to_f32_row(halves, floats, 65536);
    for (uint32_t h = 0; h < 65536; h++) {
        float f = f16_to_f32((uint16_t)h);
        assert_int_equal(bits_of(f), bits_of(floats[h]));
        if ((h & 0x7c00) != 0x7c00) {
            assert_int_equal(bits_of(f), bits_of((float)half_value(h)));
            assert_int_equal(f32_to_f16(f), h);
        } else if (h & 0x3ff) {
            assert_true(isnan(f));
            assert_int_equal(bits_of(f) >> 22 & 1, 1);
            assert_int_equal(f32_to_f16(f), (h & 0x8000) | 0x7e00);
        } else {
            assert_int_equal(bits_of(f), bits_of(h & 0x8000 ? -INFINITY : INFINITY));
            assert_int_equal(f32_to_f16(f), h);
        }
    }
}

static void check_floats(const float *floats, size_t count)
{
    uint16_t row[64];
    assert_true(count <= TD_COUNT(row));
    f32_to_f16_row(floats, row, count);
    for (size_t i = 0; i < count; i++) {
        uint16_t expected = nearest_half(floats[i]);
        if (row[i] != expected || f32_to_f16(floats[i]) != expected)
            fail_msg("%a: row %04x, scalar %04x, expected %04x", (double)floats[i], row[i],
                     f32_to_f16(floats[i]), expected);
    }
}

static void test_float_to_half_at_every_border(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7c00; h++) {
        float here = (float)half_value(h), tie = (float)((half_value(h) + half_value(h + 1)) / 2);
        float floats[8] = {here, nextafterf(here, INFINITY), nextafterf(tie, 0), tie,
                           nextafterf(tie, INFINITY)};
        for (int i = 0; i < 3; i++)
            floats[5 + i] = -floats[2 + i];
        check_floats(floats, 8);
    }
}

static void test_float_to_half_random_and_special(void **state)
{
    (void)state;
    float floats[61]; /* not a multiple of eight: the tail too */
    for (int round = 0; round < 4000; round++) {
        for (size_t i = 0; i < TD_COUNT(floats); i++) {
            uint32_t bits = random_u32();
            if (i % 2) /* most random exponents are far outside: half of these are where halves live */
                bits = (bits & 0x807fffff) | (100 + random_u32() % 45) << 23;
            floats[i] = float_of(bits);
        }
        check_floats(floats, TD_COUNT(floats));
    }
    static const uint32_t special[] = {0,          0x80000000, 1,          0x007fffff, 0x00800000, 0x33000000,
                                       0x33000001, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7f800001, 0xffc12345,
                                       0x7fffffff, 0xffffffff, 0x477fefff, 0x477ff000};
    for (size_t i = 0; i < TD_COUNT(special); i++)
        floats[i] = float_of(special[i]);
    check_floats(floats, TD_COUNT(special));
}

static void test_half_rows_write_only_their_count(void **state)
{
    (void)state;
    float floats[24];
    uint16_t halves[24];
    for (size_t count = 0; count <= 20; count++) {
        for (size_t i = 0; i < 24; i++)
            floats[i] = 1.5f, halves[i] = 0xabcd;
        f32_to_f16_row(floats, halves, count);
        for (size_t i = 0; i < 24; i++)
            assert_int_equal(halves[i], i < count ? 0x3e00 : 0xabcd);
        for (size_t i = 0; i < 24; i++)
            floats[i] = -1, halves[i] = 0x4000;
        f16_to_f32_row(halves, floats, count);
        for (size_t i = 0; i < 24; i++)
            assert_true(floats[i] == (i < count ? 2.0f : -1.0f));
    }
}

/* --- CRC-32C --- */

static uint32_t crc_bitwise(uint32_t crc, const uint8_t *data, size_t size)
{
    crc = ~crc;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0x82f63b78 : crc >> 1;
    }
    return ~crc;
}

/* RFC 3720, appendix B.4 */
static void test_crc32c_vectors(void **state)
{
    (void)state;
    uint8_t zeros[32] = {0}, ones[32], up[32], down[32];
    memset(ones, 0xff, sizeof ones);
    for (uint8_t i = 0; i < 32; i++)
        up[i] = i, down[i] = 31 - i;
    static const uint8_t read_command[48] = {
        0x01, 0xc0, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
        0x14, 0x00, 0x00, 0x00, 0x00, 0x00, 0x04, 0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00, 0x18,
        0x28, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00};
    uint32_t (*const twins[])(uint32_t, const void *, size_t) = {crc32c, crc32c_portable};
    for (size_t i = 0; i < TD_COUNT(twins); i++) {
        assert_int_equal(twins[i](0, "123456789", 9), 0xe3069283);
        assert_int_equal(twins[i](0, zeros, 32), 0x8a9136aa);
        assert_int_equal(twins[i](0, ones, 32), 0x62a8ab43);
        assert_int_equal(twins[i](0, up, 32), 0x46dd794e);
        assert_int_equal(twins[i](0, down, 32), 0x113fdb5c);
        assert_int_equal(twins[i](0, read_command, 48), 0xd9963a56);
        assert_int_equal(twins[i](0, NULL, 0), 0);
    }
}

static void test_counted_nouns(void **state)
{
    (void)state;
    for (size_t count = 0; count < 3; count++)
        assert_string_equal(TD_S(count), count == 1 ? "" : "s");
}

static void test_crc32c_twins_agree(void **state)
{
    (void)state;
    static uint8_t data[10000];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)random_u32();
    for (int round = 0; round < 200; round++) {
        size_t begin = random_u32() % 64, size = random_u32() % (round % 2 ? 100 : sizeof data - 64);
        size_t cut = size ? random_u32() % size : 0;
        uint32_t expected = crc_bitwise(0, data + begin, size);
        assert_int_equal(crc32c(0, data + begin, size), expected);
        assert_int_equal(crc32c_portable(0, data + begin, size), expected);
        assert_int_equal(crc32c(crc32c(0, data + begin, cut), data + begin + cut, size - cut), expected);
        assert_int_equal(crc32c_portable(crc32c(0, data + begin, cut), data + begin + cut, size - cut),
                         expected);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_status_texts),
        cmocka_unit_test(test_fail_formats_one_safe_line),
        cmocka_unit_test(test_fail_cuts_between_characters),
        cmocka_unit_test(test_little_endian),
        cmocka_unit_test(test_reader_stops_at_the_end),
        cmocka_unit_test(test_clocks),
        cmocka_unit_test(test_hex),
        cmocka_unit_test(test_every_half_to_float),
        cmocka_unit_test(test_float_to_half_at_every_border),
        cmocka_unit_test(test_float_to_half_random_and_special),
        cmocka_unit_test(test_half_rows_write_only_their_count),
        cmocka_unit_test(test_crc32c_vectors),
        cmocka_unit_test(test_counted_nouns),
        cmocka_unit_test(test_crc32c_twins_agree),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
