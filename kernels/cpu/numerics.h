/* numerics: the arithmetic "cpu-v1", written down once. Every instruction set computes exactly this, bit for bit,
 * so a result may be stored, sent and reused between machines. Changing any line here is a new numerics id.
 *
 *  1. IEEE binary32, round to nearest even, no contraction; `fma` is the fused operation. Division and square root
 *     are the correctly rounded ones. Results that are not finite are outside the promise.
 *  2. Sums over a row (norm, softmax) use LANES = 16 virtual lanes: element i goes to lane i % 16, each lane in
 *     ascending order from +0; then lanes are folded 16 -> 8 -> 4 -> 2 -> 1, lane i with lane i + half.
 *  3. Quantised weights: activations are quantised per 32 consecutive values to int8:
 *         q = rne(x * (127 / amax)), d = amax / 127, s = d * sum(q); all zero if amax < 2^-100.
 *     For each output, blocks in ascending order from acc = +0:
 *         acc = fma((float)isum, dw * d, acc), then, for types with a minimum, acc = fma(mw, s, acc)
 *     where isum = sum(qw * q) is exact in int32.
 *         Q4_0, Q5_0   qw is centred
 *         Q4_K, Q5_K   dw = d * scale, mw = -(dmin * min) of these 32 values
 *         Q6_K         isum = scale0 * sum(first 16) + scale1 * sum(last 16), below 2^24, so (float)isum is exact
 *  4. Float weights (F32, F16, BF16; activations stay f32): columns in panels of PANEL = 256; in a panel
 *     acc = fma(w, x, acc) in ascending order from +0; panel sums are added in ascending order from +0.
 *  5. Attention: q is scaled by 1 / sqrt(head_dim), rounded. Splits are the KV blocks (64 positions). In a split:
 *         score = fma chain over head_dim from +0; m = max(score); p = exp(score - m);
 *         l = lane sum of p over 64 positions (0 where masked); o = fma chain of p * v over positions from +0.
 *     Splits are combined in ascending order, starting with the first as it is:
 *         M' = max(M, m), a = exp(M - M'), b = exp(m - M'), L = fma(L, a, l * b), O = fma(O, a, o * b)
 *     and the result is O * (1 / L).
 *  6. RMS norm: (x * (1 / sqrt(sum(x * x) / n + eps))) * w, the sum by fma in lanes.
 *     SwiGLU: (g / (1 + exp(-g))) * u.
 *  7. RoPE: the angle is position * frequency in binary64 with this folder's own sin and cos, rounded to f32;
 *     x0' = x0 * c - x1 * s, x1' = x0 * s + x1 * c, each operation rounded. */
#ifndef TANDEM_KERNELS_CPU_NUMERICS_H
#define TANDEM_KERNELS_CPU_NUMERICS_H
#include "shared/base.h"

#define NUMERICS_LANES 16
#define NUMERICS_PANEL 256
#define NUMERICS_BLOCK 32 /* values that share an activation scale */

#define QUANT_ZERO_BELOW 0x1p-100f /* keeps 127 / amax finite */

/* exp: x = n * ln 2 + r, |r| <= ln 2 / 2; 1 + r + r^2 * P(r), P the minimax polynomial of degree 4 (relative error of
 * the formula 3e-9); n by adding and subtracting 1.5 * 2^23. Below EXP_LOW the result is +0; above EXP_HIGH it stays
 * at exp(EXP_HIGH). */
#define EXP_LOW    -87.33654022f
#define EXP_HIGH   88.37626266f
#define EXP_LOG2E  0x1.715476p+0f
#define EXP_LN2_HI 0x1.62e400p-1f
#define EXP_LN2_LO 0x1.7f7d1cp-20f
#define EXP_MAGIC  0x1.8p+23f
#define EXP_P0     0x1.fffffcp-2f
#define EXP_P1     0x1.555492p-3f
#define EXP_P2     0x1.5558f2p-5f
#define EXP_P3     0x1.123a20p-7f
#define EXP_P4     0x1.6a23d0p-10f

static inline float float_from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t float_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float numerics_exp(float x)
{
    float c = EXP_HIGH < x ? EXP_HIGH : x; /* a NaN passes, as through vminps and vmaxps with x second */
    c = EXP_LOW > c ? EXP_LOW : c;
    float z = __builtin_fmaf(c, EXP_LOG2E, EXP_MAGIC);
    float n = z - EXP_MAGIC;
    float r = __builtin_fmaf(n, -EXP_LN2_HI, c);
    r = __builtin_fmaf(n, -EXP_LN2_LO, r);
    float p = __builtin_fmaf(EXP_P4, r, EXP_P3);
    p = __builtin_fmaf(p, r, EXP_P2);
    p = __builtin_fmaf(p, r, EXP_P1);
    p = __builtin_fmaf(p, r, EXP_P0);
    p = __builtin_fmaf(p * r, r, r) + 1.0f;
    float power = float_from_bits((float_bits(z) << 23) + 0x3f800000u); /* z's low bits are n */
    return x < EXP_LOW ? 0.0f : p * power;
}

/* Fold 16 lanes; destroys them. */
static inline float numerics_fold(float lanes[NUMERICS_LANES])
{
    for (unsigned half = NUMERICS_LANES / 2; half > 0; half /= 2)
        for (unsigned i = 0; i < half; i++)
            lanes[i] = lanes[i] + lanes[i + half];
    return lanes[0];
}

/* Binary64, for RoPE. Deterministic on every machine; errors below 1e-15 relative (log, exp) and absolute
 * (sin, cos). */
double numerics_log(double x);                                        /* x > 0, normal */
double numerics_exp64(double x);                                      /* |x| < 700 */
void numerics_sincos(double angle, double *sin_out, double *cos_out); /* |angle| < 2^30 */

#endif
