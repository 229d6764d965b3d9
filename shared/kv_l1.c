/* kv_l1: int8 with one log-spaced scale for 64 or 128 values. Two implementations of the inner loops, plain C and
 * AVX2 with F16C, which give the same bits: each value goes through exactly one f32 product and one rounding
 * to nearest-even in either.
 *
 * The scale index needs no logarithm: the grid has eight steps an octave, so the exponent of the group's
 * maximum gives the octave and comparing its ten mantissa bits with eight constants gives the step. The
 * constants and the eight mantissas of 2^(k/8) were computed with exact integers (tests/golden/check_kv.py
 * does it again and compares).
 *
 * Cost per 64 values with AVX2: 8 conversions, 8 products, 8 roundings, 3 + 1 packs; bound by those, some 6
 * GB/s of f16 a core. */
#include "shared/kv_codec.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define GRID_ZERO 183 /* scale index of 1.0 */

static inline float scale_of(uint8_t index)
{
    return index == 0 ? 0.0f : kv_power(index - GRID_ZERO);
}

static inline float inverse_of(uint8_t index)
{
    return index == 0 ? 0.0f : kv_power(GRID_ZERO - index);
}

static inline uint8_t scale_index(uint16_t max_bits)
{
    /* With max = 2^(e-15) (1 + m/1024): the smallest index with 127 * 2^((index-183)/8) >= max is 8e + 8 +
     * #{limits < m}. */
    static const uint16_t limits[8] = {83, 184, 293, 412, 542, 684, 839, 1008};
    if (max_bits == 0)
        return 0;
    int exponent = max_bits >> 10;
    uint32_t mantissa = max_bits & 1023;
    if (exponent == 0) { /* subnormal: shift the leading one to where a normal number has it */
        int shift = __builtin_clz(mantissa) - 21;
        exponent = 1 - shift;
        mantissa = mantissa << shift & 1023;
    }
    int index = 8 * exponent + 8;
    for (size_t i = 0; i < TD_COUNT(limits); i++)
        index += mantissa > limits[i];
    return (uint8_t)(index < 1 ? 1 : index > 255 ? 255 : index);
}

/* ---- plain C ----------------------------------------------------------------------------------------------
 */

static bool encode_portable(const uint16_t *src, size_t count, size_t group, uint8_t *scales, int8_t *q)
{
    for (size_t g = 0; g < count / group; g++, src += group, q += group) {
        uint16_t max = 0;
        for (size_t i = 0; i < group; i++) {
            uint16_t magnitude = src[i] & 0x7fff;
            max = magnitude > max ? magnitude : max;
        }
        if (max >= 0x7c00)
            return false;
        scales[g] = scale_index(max);
        float inverse = inverse_of(scales[g]);
        for (size_t i = 0; i < group; i++) {
            int rounded = kv_round_even(f16_to_f32(src[i]) * inverse);
            q[i] = (int8_t)(rounded < -127 ? -127 : rounded > 127 ? 127 : rounded);
        }
    }
    return true;
}

static bool decode_portable(const uint8_t *scales, const int8_t *q, size_t count, size_t group, uint16_t *dst)
{
    bool good = true;
    for (size_t g = 0; g < count / group; g++, q += group, dst += group) {
        float scale = scale_of(scales[g]);
        for (size_t i = 0; i < group; i++) {
            good &= q[i] != -128;
            /* + 0.0f turns the -0 of a negative q under scale 0 into +0 and changes nothing else. */
            dst[i] = f32_to_f16((float)q[i] * scale + 0.0f);
        }
    }
    return good;
}

const struct kv_l1_ops kv_l1_portable = {encode_portable, decode_portable};

/* ---- AVX2 -------------------------------------------------------------------------------------------------
 */

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,f16c")))

AVX2 static inline __m256i load16(const uint16_t *src)
{
    return _mm256_loadu_si256((const __m256i *)src);
}

/* The largest of 64 magnitudes. The values are loaded again for the products: they are in L1 cache, and an
 * array of vectors would be spilled and reloaded in other widths. */
AVX2 static inline uint16_t max_magnitude_avx2(const uint16_t *src)
{
    const __m256i mask = _mm256_set1_epi16(0x7fff);
    __m256i a =
        _mm256_max_epu16(_mm256_and_si256(load16(src), mask), _mm256_and_si256(load16(src + 16), mask));
    __m256i b =
        _mm256_max_epu16(_mm256_and_si256(load16(src + 32), mask), _mm256_and_si256(load16(src + 48), mask));
    __m256i m = _mm256_max_epu16(a, b);
    __m128i h = _mm_max_epu16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    /* minpos finds the smallest of eight u16: of the complements, that is the complement of the largest */
    __m128i least = _mm_minpos_epu16(_mm_xor_si128(h, _mm_set1_epi16(-1)));
    return (uint16_t)~_mm_extract_epi16(least, 0);
}

/* 8 values to 8 rounded products as i32. */
AVX2 static inline __m256i quantise8_avx2(const uint16_t *src, __m256 inverse)
{
    __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)src));
    return _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse));
}

AVX2 static bool encode_avx2(const uint16_t *src, size_t count, size_t group, uint8_t *scales, int8_t *q)
{
    /* Two rounds of packs interleave 128-bit lanes; this puts each run of four values back in its place. */
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i least = _mm256_set1_epi8(-127);
    for (size_t g = 0; g < count / group; g++) {
        uint16_t max = max_magnitude_avx2(src);
        for (size_t i = KV_GROUP; i < group; i += KV_GROUP)
            max = TD_MAX(max, max_magnitude_avx2(src + i));
        if (max >= 0x7c00)
            return false;
        scales[g] = scale_index(max);
        __m256 inverse = _mm256_set1_ps(inverse_of(scales[g]));
        for (size_t i = 0; i < group; i += 32, src += 32, q += 32) {
            __m256i a = _mm256_packs_epi32(quantise8_avx2(src, inverse), quantise8_avx2(src + 8, inverse));
            __m256i b =
                _mm256_packs_epi32(quantise8_avx2(src + 16, inverse), quantise8_avx2(src + 24, inverse));
            __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order);
            _mm256_storeu_si256((__m256i *)q, _mm256_max_epi8(packed, least));
        }
    }
    return true;
}

AVX2 static bool decode_avx2(const uint8_t *scales, const int8_t *q, size_t count, size_t group,
                             uint16_t *dst)
{
    const __m256i refused = _mm256_set1_epi8(-128);
    const __m256 zero = _mm256_setzero_ps();
    __m256i bad = _mm256_setzero_si256();
    for (size_t g = 0; g < count / group; g++, q += group, dst += group) {
        __m256 scale = _mm256_set1_ps(scale_of(scales[g]));
        for (size_t i = 0; i < group; i += 32)
            bad = _mm256_or_si256(bad,
                                  _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)(q + i)), refused));
        for (size_t i = 0; i < group; i += 8) {
            __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(q + i))));
            x = _mm256_add_ps(_mm256_mul_ps(x, scale), zero);
            _mm_storeu_si128((__m128i *)(dst + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
        }
    }
    return _mm256_testz_si256(bad, bad);
}

static const struct kv_l1_ops ops_avx2 = {encode_avx2, decode_avx2};

const struct kv_l1_ops *kv_l1_avx2(void)
{
    static int known; /* 0 not asked, 1 no, 2 yes: a race writes the same answer twice */
    int answer = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (answer == 0) {
        unsigned a, b, c = 0, d;
        bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
        answer = f16c && __builtin_cpu_supports("avx2") ? 2 : 1;
        __atomic_store_n(&known, answer, __ATOMIC_RELAXED);
    }
    return answer == 2 ? &ops_avx2 : NULL;
}
#else
const struct kv_l1_ops *kv_l1_avx2(void)
{
    return NULL;
}
#endif

/* ---- payload ----------------------------------------------------------------------------------------------
 */

static const struct kv_l1_ops *ops_best(void)
{
    const struct kv_l1_ops *fast = kv_l1_avx2();
    return fast ? fast : &kv_l1_portable;
}

int64_t kv_l1_encode(const uint16_t *src, size_t count, unsigned table, uint8_t *dst, size_t capacity)
{
    if (capacity < kv_l1_size(count, table))
        return -TD_ERR_NOSPACE;
    const struct kv_l1_ops *ops = ops_best();
    size_t group = kv_l1_group(table), rest = count % group, whole = count - rest;
    uint8_t *scales = dst;
    int8_t *q = (int8_t *)(dst + kv_l1_group_count(count, table));
    if (!ops->encode(src, whole, group, scales, q))
        return -TD_ERR_FORMAT;
    if (rest) { /* a short last group is a whole one filled with zeros, which change no maximum */
        uint16_t values[KV_L1_GROUP_MAX] = {0};
        int8_t tail[KV_L1_GROUP_MAX];
        memcpy(values, src + whole, rest * sizeof *values);
        if (!ops->encode(values, group, group, scales + whole / group, tail))
            return -TD_ERR_FORMAT;
        memcpy(q + whole, tail, rest);
    }
    return (int64_t)kv_l1_size(count, table);
}

int kv_l1_decode(struct span payload, unsigned table, uint16_t *dst, size_t count)
{
    if (payload.size != kv_l1_size(count, table))
        return -TD_ERR_FORMAT;
    const struct kv_l1_ops *ops = ops_best();
    size_t group = kv_l1_group(table), rest = count % group, whole = count - rest;
    const uint8_t *scales = payload.data;
    const int8_t *q = (const int8_t *)(payload.data + kv_l1_group_count(count, table));
    if (!ops->decode(scales, q, whole, group, dst))
        return -TD_ERR_FORMAT;
    if (rest) {
        int8_t tail[KV_L1_GROUP_MAX] = {0};
        uint16_t values[KV_L1_GROUP_MAX];
        memcpy(tail, q + whole, rest);
        if (!ops->decode(scales + whole / group, tail, group, group, values))
            return -TD_ERR_FORMAT;
        memcpy(dst + whole, values, rest * sizeof *values);
    }
    return 0;
}
