/* ops_avx512: the table for CPUs with AVX-512 (F, BW, DQ, VL) and VNNI, and its operations on single rows. */
#if defined(__x86_64__)
#include "kernels/cpu/avx512.h"
#include "kernels/cpu/panel.h"
#include "kernels/cpu/tiles.h"
#include <math.h>

static size_t pack_size(const struct cpu_matrix *m)
{
    return tile_size(m->type, m->columns, AVX512_TILE_ROWS) * tile_count(&cpu_ops_avx512, m);
}

static void pack(const struct cpu_matrix *m, uint32_t tile_begin, uint32_t tile_end)
{
    tiles_pack(m, AVX512_TILE_ROWS, true, tile_begin, tile_end);
}

AVX512_INLINE void quantise_block(const float *x, int8_t *q, float *d, float *s, int32_t *sum)
{
    const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    uint32_t largest =
        _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(low), magnitude),
                                                 _mm512_and_si512(_mm512_castps_si512(high), magnitude)));
    float amax = float_from_bits(largest);
    if (!(amax >= QUANT_ZERO_BELOW && largest < 0x7f800000u)) {
        memset(q, 0, NUMERICS_BLOCK);
        *d = *s = largest < 0x7f800000u ? 0.0f : float_from_bits(0x7fc00000u);
        *sum = 0;
        return;
    }
    const __m512 inverse = _mm512_set1_ps(127.0f / amax);
    __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)), /* nearest, ties to even */
        b = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(a));
    _mm_storeu_si128((__m128i *)(q + 16), _mm512_cvtepi32_epi8(b));
    *sum = _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
    *d = amax / 127.0f;
    *s = *d * (float)*sum;
}

AVX512 static void quantise(const struct activations *a, uint32_t row, uint32_t columns)
{
    const float *x = a->x + row * a->x_stride;
    int8_t *q = a->q + row * a->q_stride;
    for (size_t block = 0, at = row * a->block_stride; block < columns / NUMERICS_BLOCK; block++, at++)
        quantise_block(x + block * NUMERICS_BLOCK, q + block * NUMERICS_BLOCK, a->d + at, a->s + at,
                       a->sum + at);
}

AVX512 static void norm(const float *x, const float *weight, float eps, uint32_t count, float *out)
{
    __m512 lanes = _mm512_setzero_ps();
    for (uint32_t i = 0; i < count; i += 16) { /* zeros behind the end change no lane */
        __m512 v = _mm512_maskz_loadu_ps(avx512_first(count - i), x + i);
        lanes = _mm512_fmadd_ps(v, v, lanes);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(avx512_fold(lanes) / (float)count + eps));
    for (uint32_t i = 0; i < count; i += 16) {
        __mmask16 held = avx512_first(count - i);
        __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(held, x + i), scale);
        _mm512_mask_storeu_ps(out + i, held, _mm512_mul_ps(v, _mm512_maskz_loadu_ps(held, weight + i)));
    }
}

AVX512 static void swiglu(const float *gate, const float *up, uint32_t count, float *out)
{
    for (uint32_t i = 0; i < count; i += 16) {
        __mmask16 held = avx512_first(count - i);
        __m512 g = _mm512_maskz_loadu_ps(held, gate + i);
        __m512 e = avx512_exp(_mm512_xor_ps(g, _mm512_set1_ps(-0.0f)));
        __m512 silu = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
        _mm512_mask_storeu_ps(out + i, held, _mm512_mul_ps(silu, _mm512_maskz_loadu_ps(held, up + i)));
    }
}

AVX512 static void exp_scaled(const float *x, float shift, float scale, size_t count, float *out)
{
    for (size_t i = 0; i < count; i += 16) {
        __mmask16 held = avx512_first((uint32_t)TD_MIN(count - i, (size_t)16));
        __m512 v = _mm512_sub_ps(_mm512_maskz_loadu_ps(held, x + i), _mm512_set1_ps(shift));
        _mm512_mask_storeu_ps(out + i, held, avx512_exp(_mm512_mul_ps(v, _mm512_set1_ps(scale))));
    }
}

/* Twelve sums that do not wait for each other. */
AVX512 static double spin_dot(uint32_t rounds)
{
    __m512i sums[12], codes = _mm512_set1_epi32(0x01020304);
#pragma GCC unroll 12
    for (unsigned i = 0; i < 12; i++)
        sums[i] = codes;
    for (uint32_t round = 0; round < rounds; round++)
#pragma GCC unroll 12
        for (unsigned i = 0; i < 12; i++) {
            sums[i] = _mm512_dpbusd_epi32(sums[i], codes, codes);
            __asm__ volatile("" : "+v"(sums[i])); /* the compiler must not add up rounds */
        }
    return 12.0 * 128 * rounds;
}

AVX512 static double spin_fma(uint32_t rounds)
{
    __m512 sums[12], value = _mm512_set1_ps(1.0f);
#pragma GCC unroll 12
    for (unsigned i = 0; i < 12; i++)
        sums[i] = value;
    for (uint32_t round = 0; round < rounds; round++)
#pragma GCC unroll 12
        for (unsigned i = 0; i < 12; i++) {
            sums[i] = _mm512_fmadd_ps(value, value, sums[i]);
            __asm__ volatile("" : "+v"(sums[i]));
        }
    return 12.0 * 32 * rounds;
}

const struct cpu_ops cpu_ops_avx512 = {
    .name = "avx512",
    .tile_rows = AVX512_TILE_ROWS,
    .part_rows = PART_ROWS,
    .pack_size = pack_size,
    .pack = pack,
    .matmul = avx512_matmul,
    .quantise = quantise,
    .norm = norm,
    .swiglu = swiglu,
    .exp_scaled = exp_scaled,
    .attention_scratch = avx512_attention_scratch,
    .attention = avx512_attention,
    .attention_reduce = avx512_attention_reduce,
    .spin_dot = spin_dot,
    .spin_fma = spin_fma,
};
#endif
