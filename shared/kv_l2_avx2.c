/* kv_l2_avx2: the inner loops of L2 with AVX2 and F16C, for rows and groups of whole 64s. The same f32
 * operations in the same order as the plain ones in kv_l2.c, so the same bits.
 *
 * 64 values live in eight registers: steps 1, 2 and 4 of the transform are shuffles within them, 8, 16 and 32
 * additions between them, and larger steps go through memory. */
#include "shared/kv_codec.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2    __attribute__((target("avx2,f16c")))
#define LANES   8
#define VECTORS (KV_GROUP / LANES)

AVX2 static inline __m256 bits_to_signs(uint8_t bits)
{
    const __m256i lanes = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    __m256i moved = _mm256_sllv_epi32(_mm256_set1_epi32(bits), lanes);
    return _mm256_castsi256_ps(_mm256_and_si256(moved, _mm256_set1_epi32(INT32_MIN)));
}

/* (a, b) -> (a + b, a - b) of neighbours within a register: `swapped` has the partner in each lane, `second` the sign bit
 * where the lane is the second of its pair. */
AVX2 static inline __m256 butterfly(__m256 x, __m256 swapped, __m256 second)
{
    return _mm256_add_ps(swapped, _mm256_xor_ps(x, second));
}

AVX2 static inline void transform64(__m256 v[VECTORS], __m256 factor)
{
    const __m256 by1 =
        _mm256_castsi256_ps(_mm256_setr_epi32(0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN));
    const __m256 by2 =
        _mm256_castsi256_ps(_mm256_setr_epi32(0, 0, INT32_MIN, INT32_MIN, 0, 0, INT32_MIN, INT32_MIN));
    const __m256 by4 =
        _mm256_castsi256_ps(_mm256_setr_epi32(0, 0, 0, 0, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN));
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
        __m256 x = v[i];
        x = butterfly(x, _mm256_permute_ps(x, 0xb1), by1);
        x = butterfly(x, _mm256_permute_ps(x, 0x4e), by2);
        v[i] = butterfly(x, _mm256_permute2f128_ps(x, x, 1), by4);
    }
#pragma GCC unroll 3
    for (int step = 1; step < VECTORS; step *= 2)
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++)
            if (!(i & step)) {
                __m256 a = v[i], b = v[i + step];
                v[i] = _mm256_add_ps(a, b);
                v[i + step] = _mm256_sub_ps(a, b);
            }
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++)
        v[i] = _mm256_mul_ps(v[i], factor);
}

/* The steps of a block of n > 64 values beyond 32, and its factor. */
AVX2 static void transform_rest(float *y, uint32_t n, float factor)
{
    for (uint32_t step = KV_GROUP; step < n; step *= 2)
        for (uint32_t base = 0; base < n; base += 2 * step)
            for (uint32_t i = base; i < base + step; i += LANES) {
                __m256 a = _mm256_loadu_ps(y + i), b = _mm256_loadu_ps(y + i + step);
                _mm256_storeu_ps(y + i, _mm256_add_ps(a, b));
                _mm256_storeu_ps(y + i + step, _mm256_sub_ps(a, b));
            }
    for (uint32_t i = 0; i < n; i += LANES)
        _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_loadu_ps(y + i), _mm256_set1_ps(factor)));
}

static uint32_t block_size(uint32_t left)
{
    return 1u << (31 - __builtin_clz(left));
}

/* Multiplying by a power of two is exact here, so 1 now and the factor later is the same. */
static float factor_of(uint32_t n, bool round_up)
{
    return kv_power(-8 * ((__builtin_ctz(n) + round_up) / 2));
}

AVX2 static bool forward_avx2(const uint16_t *src, uint32_t dim, float *y)
{
    const __m128i exponent = _mm_set1_epi16(0x7c00);
    __m128i bad = _mm_setzero_si128();
    const uint8_t *signs = KV_L2_SIGNS;
    for (uint32_t left = dim, n; left > 0; left -= n) {
        n = block_size(left);
        __m256 factor = _mm256_set1_ps(n == KV_GROUP ? factor_of(n, true) : 1.0f);
        float *block = y;
        for (uint32_t at = 0; at < n; at += KV_GROUP, src += KV_GROUP, y += KV_GROUP, signs += VECTORS) {
            __m256 v[VECTORS];
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; i++) {
                __m128i x = _mm_loadu_si128((const __m128i *)(src + LANES * i));
                bad = _mm_or_si128(bad, _mm_cmpeq_epi16(_mm_and_si128(x, exponent), exponent));
                v[i] = _mm256_xor_ps(_mm256_cvtph_ps(x), bits_to_signs(signs[i]));
            }
            transform64(v, factor);
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; i++)
                _mm256_storeu_ps(y + LANES * i, v[i]);
        }
        if (n > KV_GROUP)
            transform_rest(block, n, factor_of(n, true));
    }
    return _mm_testz_si128(bad, bad);
}

AVX2 static inline void finish64(const __m256 v[VECTORS], const uint8_t *signs, uint16_t *dst)
{
    const __m256 most = _mm256_set1_ps(65504.0f), least = _mm256_set1_ps(-65504.0f);
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
        __m256 x = _mm256_xor_ps(v[i], bits_to_signs(signs[i]));
        x = _mm256_max_ps(_mm256_min_ps(x, most), least);
        _mm_storeu_si128((__m128i *)(dst + LANES * i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
}

AVX2 static inline void load64(const float *y, __m256 v[VECTORS])
{
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++)
        v[i] = _mm256_loadu_ps(y + LANES * i);
}

AVX2 static void inverse_avx2(float *y, uint32_t dim, uint16_t *dst)
{
    const uint8_t *signs = KV_L2_SIGNS;
    for (uint32_t left = dim, n; left > 0; left -= n, y += n) {
        n = block_size(left);
        __m256 v[VECTORS];
        for (uint32_t at = 0; at < n && n > KV_GROUP; at += KV_GROUP) {
            load64(y + at, v);
            transform64(v, _mm256_set1_ps(1.0f));
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; i++)
                _mm256_storeu_ps(y + at + LANES * i, v[i]);
        }
        if (n > KV_GROUP)
            transform_rest(y, n, factor_of(n, false));
        for (uint32_t at = 0; at < n; at += KV_GROUP, dst += KV_GROUP, signs += VECTORS) {
            load64(y + at, v);
            if (n == KV_GROUP)
                transform64(v, _mm256_set1_ps(factor_of(n, false)));
            finish64(v, signs, dst);
        }
    }
}

AVX2 static void add_avx2(float *sum, const float *y, uint32_t dim)
{
    for (uint32_t i = 0; i < dim; i += LANES)
        _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), _mm256_loadu_ps(y + i)));
}

AVX2 static inline float largest(__m256 v)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

AVX2 static void peaks_avx2(const float *y, const float *mean, uint32_t count, float *plain, float *rest)
{
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MAX));
    __m256 a = _mm256_setzero_ps(), b = a;
    for (uint32_t i = 0; i < count; i += LANES) {
        __m256 x = _mm256_loadu_ps(y + i), r = _mm256_sub_ps(x, _mm256_loadu_ps(mean + i));
        a = _mm256_max_ps(a, _mm256_and_ps(x, magnitude));
        b = _mm256_max_ps(b, _mm256_and_ps(r, magnitude));
    }
    *plain = largest(a);
    *rest = largest(b);
}

AVX2 static inline __m256i code8(const float *y, const float *mean, __m256 inverse, __m256 middle)
{
    __m256 r = _mm256_sub_ps(_mm256_loadu_ps(y), _mm256_loadu_ps(mean));
    return _mm256_cvtps_epi32(_mm256_add_ps(_mm256_mul_ps(r, inverse), middle));
}

/* 32 codes as bytes, kept within 0..most. */
AVX2 static inline __m256i code32(const float *y, const float *mean, __m256 inverse, __m256 middle,
                                  __m256i most)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* as packs mix 128-bit lanes */
    __m256i a = _mm256_packs_epi32(code8(y, mean, inverse, middle), code8(y + 8, mean + 8, inverse, middle));
    __m256i b = _mm256_packs_epi32(code8(y + 16, mean + 16, inverse, middle),
                                   code8(y + 24, mean + 24, inverse, middle));
    return _mm256_min_epu8(_mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), order), most);
}

AVX2 static void put_avx2(const float *y, const float *mean, uint32_t count, float inverse,
                          struct kv_l2_codes codes)
{
    (void)count;
    int levels = codes.fifth ? 32 : 16;
    __m256 inv = _mm256_set1_ps(inverse), middle = _mm256_set1_ps((float)(levels - 1) / 2);
    __m256i most = _mm256_set1_epi8((char)(levels - 1)), nibble = _mm256_set1_epi8(15);
    __m256i a = code32(y, mean, inv, middle, most), b = code32(y + 32, mean + 32, inv, middle, most);
    if (codes.fifth) {
        store_le32(codes.fifth, (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(a, 3)));
        store_le32(codes.fifth + 4, (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(b, 3)));
        a = _mm256_and_si256(a, nibble);
        b = _mm256_and_si256(b, nibble);
    }
    _mm256_storeu_si256((__m256i *)codes.low, _mm256_or_si256(a, _mm256_slli_epi16(b, 4)));
}

/* 16 in each byte whose bit of 32 is set. */
AVX2 static inline __m256i fifth32(const uint8_t *bits)
{
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i which = _mm256_set1_epi64x((int64_t)0x8040201008040201u);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)load_le32(bits)), spread);
    __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, which), which);
    return _mm256_and_si256(set, _mm256_set1_epi8(16));
}

AVX2 static inline void get32(__m256i q, __m256 step, __m256 middle, const float *mean, float *y)
{
    __m128i part[2] = {_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m128i eight = i & 1 ? _mm_srli_si128(part[i / 2], 8) : part[i / 2];
        __m256 x = _mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight)), middle);
        x = _mm256_add_ps(_mm256_mul_ps(x, step), _mm256_loadu_ps(mean + LANES * i));
        _mm256_storeu_ps(y + LANES * i, x);
    }
}

AVX2 static void get_avx2(struct kv_l2_const_codes codes, uint32_t count, float step, const float *mean,
                          float *y)
{
    (void)count;
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256 middle = _mm256_set1_ps(codes.fifth ? 15.5f : 7.5f), scale = _mm256_set1_ps(step);
    __m256i both = _mm256_loadu_si256((const __m256i *)codes.low);
    __m256i a = _mm256_and_si256(both, nibble), b = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    if (codes.fifth) {
        a = _mm256_or_si256(a, fifth32(codes.fifth));
        b = _mm256_or_si256(b, fifth32(codes.fifth + 4));
    }
    get32(a, scale, middle, mean, y);
    get32(b, scale, middle, mean + 32, y + 32);
}

static const struct kv_l2_ops ops_avx2 = {.forward = forward_avx2,
                                          .inverse = inverse_avx2,
                                          .add = add_avx2,
                                          .peaks = peaks_avx2,
                                          .put = put_avx2,
                                          .get = get_avx2};

const struct kv_l2_ops *kv_l2_avx2(void)
{
    return kv_l1_avx2() ? &ops_avx2 : NULL; /* the same instructions */
}
#else
const struct kv_l2_ops *kv_l2_avx2(void)
{
    return NULL;
}
#endif
