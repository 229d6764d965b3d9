/* ops_avx2: the table for CPUs with AVX2, FMA and F16C, and its operations on single rows. */
#if defined(__x86_64__)
#include "kernels/cpu/avx2.h"
#include "kernels/cpu/panel.h"
#include "kernels/cpu/tiles.h"
#include <math.h>

static size_t pack_size(const struct cpu_matrix *m)
{
    return tile_size(m->type, m->columns, TILE_ROWS) * tile_count(&cpu_ops_avx2, m);
}

static void pack(const struct cpu_matrix *m, uint32_t tile_begin, uint32_t tile_end)
{
    tiles_pack(m, TILE_ROWS, false, tile_begin, tile_end);
}

AVX2_INLINE __m256 absolute(__m256 x)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

AVX2_INLINE uint32_t largest_lane(__m256i x)
{
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

AVX2_INLINE int32_t sum_lanes(__m256i x)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}

AVX2_INLINE void quantise_block(const float *x, int8_t *q, float *d, float *s, int32_t *sum)
{
    __m256 v[4];
    __m256i largest8 = _mm256_setzero_si256(), q32[4];
    for (unsigned i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        largest8 = _mm256_max_epi32(largest8, _mm256_castps_si256(absolute(v[i])));
    }
    uint32_t largest = largest_lane(largest8);
    float amax = float_from_bits(largest);
    if (!(amax >= QUANT_ZERO_BELOW && largest < 0x7f800000u)) {
        _mm256_storeu_si256((__m256i *)q, _mm256_setzero_si256());
        *d = *s = largest < 0x7f800000u ? 0.0f : float_from_bits(0x7fc00000u);
        *sum = 0;
        return;
    }
    const __m256 inverse = _mm256_set1_ps(127.0f / amax);
    for (unsigned i = 0; i < 4; i++)
        q32[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse)); /* nearest, ties to even */
    *sum = sum_lanes(_mm256_add_epi32(_mm256_add_epi32(q32[0], q32[1]), _mm256_add_epi32(q32[2], q32[3])));
    __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(q32[0], q32[1]), _mm256_packs_epi32(q32[2], q32[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes,
                                        _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); /* packs work on halves */
    _mm256_storeu_si256((__m256i *)q, bytes);
    *d = amax / 127.0f;
    *s = *d * (float)*sum;
}

AVX2 static void quantise(const struct activations *a, uint32_t row, uint32_t columns)
{
    const float *x = a->x + row * a->x_stride;
    int8_t *q = a->q + row * a->q_stride;
    for (size_t block = 0, at = row * a->block_stride; block < columns / NUMERICS_BLOCK; block++, at++)
        quantise_block(x + block * NUMERICS_BLOCK, q + block * NUMERICS_BLOCK, a->d + at, a->s + at,
                       a->sum + at);
}

AVX2 static void norm(const float *x, const float *weight, float eps, uint32_t count, float *out)
{
    __m256 low = _mm256_setzero_ps(), high = low;
    uint32_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        low = _mm256_fmadd_ps(a, a, low);
        high = _mm256_fmadd_ps(b, b, high);
    }
    float rest[NUMERICS_LANES] = {0}; /* zeros change no lane */
    memcpy(rest, x + i, sizeof(float) * (count - i));
    low = _mm256_fmadd_ps(_mm256_loadu_ps(rest), _mm256_loadu_ps(rest), low);
    high = _mm256_fmadd_ps(_mm256_loadu_ps(rest + 8), _mm256_loadu_ps(rest + 8), high);
    const float scale = 1.0f / sqrtf(avx2_fold(low, high) / (float)count + eps);
    for (i = 0; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(scale)),
                                                _mm256_loadu_ps(weight + i)));
    for (; i < count; i++)
        out[i] = x[i] * scale * weight[i];
}

AVX2 static void swiglu(const float *gate, const float *up, uint32_t count, float *out)
{
    uint32_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 g = _mm256_loadu_ps(gate + i);
        __m256 e = avx2_exp(_mm256_xor_ps(g, _mm256_set1_ps(-0.0f)));
        __m256 silu = _mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(silu, _mm256_loadu_ps(up + i)));
    }
    for (; i < count; i++)
        out[i] = gate[i] / (1.0f + numerics_exp(-gate[i])) * up[i];
}

AVX2 static void exp_scaled(const float *x, float shift, float scale, size_t count, float *out)
{
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 v = _mm256_sub_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(shift));
        _mm256_storeu_ps(out + i, avx2_exp(_mm256_mul_ps(v, _mm256_set1_ps(scale))));
    }
    for (; i < count; i++)
        out[i] = numerics_exp((x[i] - shift) * scale);
}

/* Six sums that do not wait for each other: vpmaddubsw and an addition in 16 bits, as a product of 4-bit codes takes. */
AVX2 static double spin_dot(uint32_t rounds)
{
    __m256i sums[6], codes = _mm256_set1_epi32(0x01020304);
#pragma GCC unroll 6
    for (unsigned i = 0; i < 6; i++)
        sums[i] = codes;
    for (uint32_t round = 0; round < rounds; round++)
#pragma GCC unroll 6
        for (unsigned i = 0; i < 6; i++) {
            __asm__ volatile("" : "+x"(codes)); /* the compiler must not keep the product */
            sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(codes, codes));
        }
    __asm__ volatile(""
                     :
                     : "x"(sums[0]), "x"(sums[1]), "x"(sums[2]), "x"(sums[3]), "x"(sums[4]), "x"(sums[5]));
    return 6.0 * 64 * rounds;
}

AVX2 static double spin_fma(uint32_t rounds)
{
    __m256 sums[12], value = _mm256_set1_ps(1.0f);
#pragma GCC unroll 12
    for (unsigned i = 0; i < 12; i++)
        sums[i] = value;
    for (uint32_t round = 0; round < rounds; round++)
#pragma GCC unroll 12
        for (unsigned i = 0; i < 12; i++) {
            sums[i] = _mm256_fmadd_ps(value, value, sums[i]);
            __asm__ volatile("" : "+x"(sums[i]));
        }
    return 12.0 * 16 * rounds;
}

const struct cpu_ops cpu_ops_avx2 = {
    .name = "avx2",
    .tile_rows = TILE_ROWS,
    .part_rows = PART_ROWS,
    .pack_size = pack_size,
    .pack = pack,
    .matmul = avx2_matmul,
    .quantise = quantise,
    .norm = norm,
    .swiglu = swiglu,
    .exp_scaled = exp_scaled,
    .attention_scratch = avx2_attention_scratch,
    .attention = avx2_attention,
    .attention_reduce = avx2_attention_reduce,
    .spin_dot = spin_dot,
    .spin_fma = spin_fma,
};
#endif
