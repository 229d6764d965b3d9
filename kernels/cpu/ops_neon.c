/* ops_neon: the tables for 64-bit Arm, and their operations on single rows. "neon" runs on every such processor,
 * "neon-dotprod" has the integer products of those with sdot (Armv8.2 and later), "neon-i8mm" of those with smmla too (Armv8.6
 * and later). What each gains could not be measured where this was written, which has no such processor. */
#if defined(__aarch64__)
#include "kernels/cpu/neon.h"
#include "kernels/cpu/tiles.h"
#include <math.h>

static size_t pack_size(const struct cpu_matrix *m)
{
    return tile_size(m->type, m->columns, TILE_ROWS) * tile_count(&cpu_ops_neon, m);
}

static void pack(const struct cpu_matrix *m, uint32_t tile_begin, uint32_t tile_end)
{
    tiles_pack(m, TILE_ROWS, false, tile_begin, tile_end);
}

static void quantise_block(const float *x, int8_t *q, float *d, float *s, int32_t *sum)
{
    float32x4_t v[8];
    uint32x4_t largest4 =
        vdupq_n_u32(0); /* magnitudes as bits: the same order, and a NaN is above infinity */
    for (unsigned i = 0; i < 8; i++) {
        v[i] = vld1q_f32(x + 4 * i);
        largest4 = vmaxq_u32(largest4, vreinterpretq_u32_f32(vabsq_f32(v[i])));
    }
    const uint32_t largest = vmaxvq_u32(largest4);
    const float amax = float_from_bits(largest);
    if (!(amax >= QUANT_ZERO_BELOW && largest < 0x7f800000u)) {
        memset(q, 0, NUMERICS_BLOCK);
        *d = *s = largest < 0x7f800000u ? 0.0f : float_from_bits(0x7fc00000u);
        *sum = 0;
        return;
    }
    const float inverse = 127.0f / amax;
    int32x4_t sum4 = vdupq_n_s32(0), rounded[8];
    for (unsigned i = 0; i < 8; i++) {
        rounded[i] = vcvtnq_s32_f32(vmulq_n_f32(v[i], inverse)); /* nearest, ties to even */
        sum4 = vaddq_s32(sum4, rounded[i]);
    }
    for (unsigned i = 0; i < 4; i++) {
        int16x8_t eight = vcombine_s16(vmovn_s32(rounded[2 * i]), vmovn_s32(rounded[2 * i + 1]));
        vst1_s8(q + 8 * i, vmovn_s16(eight));
    }
    *sum = vaddvq_s32(sum4);
    *d = amax / 127.0f;
    *s = *d * (float)*sum;
}

static void quantise(const struct activations *a, uint32_t row, uint32_t columns)
{
    const float *x = a->x + row * a->x_stride;
    int8_t *q = a->q + row * a->q_stride;
    for (size_t block = 0, at = row * a->block_stride; block < columns / NUMERICS_BLOCK; block++, at++)
        quantise_block(x + block * NUMERICS_BLOCK, q + block * NUMERICS_BLOCK, a->d + at, a->s + at,
                       a->sum + at);
}

static void norm(const float *x, const float *weight, float eps, uint32_t count, float *out)
{
    float32x4_t lanes[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    uint32_t i = 0;
    for (; i + NUMERICS_LANES <= count; i += NUMERICS_LANES)
        for (unsigned j = 0; j < 4; j++) {
            float32x4_t v = vld1q_f32(x + i + 4 * j);
            lanes[j] = vfmaq_f32(lanes[j], v, v);
        }
    float rest[NUMERICS_LANES] = {0}; /* zeros change no lane */
    memcpy(rest, x + i, sizeof(float) * (count - i));
    for (unsigned j = 0; j < 4; j++) {
        float32x4_t v = vld1q_f32(rest + 4 * j);
        lanes[j] = vfmaq_f32(lanes[j], v, v);
    }
    const float scale = 1.0f / sqrtf(neon_fold(lanes) / (float)count + eps);
    for (i = 0; i + 4 <= count; i += 4)
        vst1q_f32(out + i, vmulq_f32(vmulq_n_f32(vld1q_f32(x + i), scale), vld1q_f32(weight + i)));
    for (; i < count; i++)
        out[i] = x[i] * scale * weight[i];
}

static void swiglu(const float *gate, const float *up, uint32_t count, float *out)
{
    uint32_t i = 0;
    for (; i + 4 <= count; i += 4) {
        float32x4_t g = vld1q_f32(gate + i);
        float32x4_t silu = vdivq_f32(g, vaddq_f32(vdupq_n_f32(1.0f), neon_exp(vnegq_f32(g))));
        vst1q_f32(out + i, vmulq_f32(silu, vld1q_f32(up + i)));
    }
    for (; i < count; i++)
        out[i] = gate[i] / (1.0f + numerics_exp(-gate[i])) * up[i];
}

static void exp_scaled(const float *x, float shift, float scale, size_t count, float *out)
{
    size_t i = 0;
    for (; i + 4 <= count; i += 4)
        vst1q_f32(out + i, neon_exp(vmulq_n_f32(vsubq_f32(vld1q_f32(x + i), vdupq_n_f32(shift)), scale)));
    for (; i < count; i++)
        out[i] = numerics_exp((x[i] - shift) * scale);
}

#define TABLE(its_name, its_matmul)                                                                          \
    {                                                                                                        \
        .name = its_name, .tile_rows = TILE_ROWS, .pack_size = pack_size, .pack = pack,                      \
        .matmul = its_matmul, .quantise = quantise, .norm = norm, .swiglu = swiglu,                          \
        .exp_scaled = exp_scaled, .attention_scratch = neon_attention_scratch, .attention = neon_attention,  \
        .attention_reduce = neon_attention_reduce,                                                           \
    }
const struct cpu_ops cpu_ops_neon = TABLE("neon", neon_matmul);
const struct cpu_ops cpu_ops_neon_dotprod = TABLE("neon-dotprod", neon_dotprod_matmul);
const struct cpu_ops cpu_ops_neon_i8mm = TABLE("neon-i8mm", neon_i8mm_matmul);
#endif
