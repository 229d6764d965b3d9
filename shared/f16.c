/* f16: IEEE binary16 <-> binary32, round to nearest even, subnormals kept.
 *
 * The scalar functions are plain integer code and define the result. The row functions use F16C, eight values
 * at a time, where the CPU has it; the only difference of the instruction, NaN payloads that survive, is
 * taken out, so both give the same bits. half -> float keeps a NaN's payload and makes it quiet, as the
 * instruction does; float -> half gives one NaN. */
#include "shared/base.h"
#include <stdatomic.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define F32_SIGN     0x80000000u
#define F32_INFINITY 0x7f800000u
#define F16_INFINITY 0x7c00u
#define F16_NAN      0x7e00u

static float f32_from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 31)
        return f32_from_bits(sign | F32_INFINITY | fraction << 13 | (fraction ? 0x400000u : 0));
    if (exponent > 0)
        return f32_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float magnitude = (float)fraction * 0x1p-24f; /* exact: a subnormal half is a whole number of 2^-24 */
    return sign ? -magnitude : magnitude;
}

uint16_t f32_to_f16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    uint32_t magnitude = bits & ~F32_SIGN;
    if (magnitude > F32_INFINITY)
        return sign | F16_NAN;
    if (magnitude >= 0x47800000) /* 2^16 and more */
        return sign | F16_INFINITY;
    if (magnitude >=
        0x38800000) { /* 2^-14 and more: normal; a carry runs into the exponent, up to infinity */
        uint32_t odd = magnitude >> 13 & 1;
        return (uint16_t)(sign | (magnitude - (112u << 23) + 0xfff + odd) >> 13);
    }
    uint32_t shift = 126 - (magnitude >> 23); /* to units of 2^-24 */
    if (shift > 24)
        return sign; /* below 2^-25: nearer to zero */
    uint32_t significand = (magnitude & 0x7fffff) | 0x800000;
    uint32_t half = significand >> shift;
    uint32_t rest = significand & ((1u << shift) - 1), tie = 1u << (shift - 1);
    half += rest > tie || (rest == tie && (half & 1));
    return (uint16_t)(sign | half);
}

#if defined(__x86_64__)

/* Compilers do not agree on "f16c" in __builtin_cpu_supports; "avx" there also says that the OS saves the
 * registers. */
static bool has_f16c(void)
{
    static atomic_int known; /* 0: not asked yet, 1: no, 2: yes */
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer == 0) {
        unsigned a, b, c = 0, d;
        bool found = __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
        answer = found ? 2 : 1;
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer == 2;
}

__attribute__((target("avx,f16c"))) static size_t f16_to_f32_f16c(const uint16_t *src, float *dst,
                                                                  size_t count)
{
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
    return i;
}

__attribute__((target("avx,f16c"))) static size_t f32_to_f16_f16c(const float *src, uint16_t *dst,
                                                                  size_t count)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 x = _mm256_loadu_ps(src + i);
        __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
        x = _mm256_blendv_ps(x, _mm256_or_ps(_mm256_and_ps(x, sign), quiet), is_nan);
        _mm_storeu_si128((__m128i *)(dst + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    return i;
}

#endif

void f16_to_f32_row(const uint16_t *src, float *dst, size_t count)
{
    size_t i = 0;
#if defined(__x86_64__)
    if (has_f16c())
        i = f16_to_f32_f16c(src, dst, count);
#endif
    for (; i < count; i++)
        dst[i] = f16_to_f32(src[i]);
}

void f32_to_f16_row(const float *src, uint16_t *dst, size_t count)
{
    size_t i = 0;
#if defined(__x86_64__)
    if (has_f16c())
        i = f32_to_f16_f16c(src, dst, count);
#endif
    for (; i < count; i++)
        dst[i] = f32_to_f16(src[i]);
}
