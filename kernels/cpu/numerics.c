/* numerics: log, exp, sin and cos in binary64 from + - * / and fma alone, so that RoPE's frequencies and
 * angles do not depend on the C library. Series are plain Taylor expansions on short intervals: a few
 * nanoseconds more than the best polynomial, and nothing to look up. */
#include "kernels/cpu/numerics.h"

#define LN2_HI      0x1.62e42fefa39efp-1
#define LN2_LO      0x1.abc9e3b39803fp-56
#define PI_2_HI     0x1.921fb54442d18p+0
#define PI_2_LO     0x1.1a62633145c07p-54
#define TWO_OVER_PI 0x1.45f306dc9c883p-1
#define ROUND_MAGIC 0x1.8p+52

/* log(x) = e * ln 2 + 2 atanh((m - 1) / (m + 1)) with m in [sqrt(1/2), sqrt(2)). */
double numerics_log(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffu) | (uint64_t)1023 << 52;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 0x1.6a09e667f3bcdp+0) {
        m *= 0.5;
        exponent++;
    }
    double t = (m - 1.0) / (m + 1.0), t2 = t * t, sum = 0.0;
    for (int k = 23; k >= 3; k -= 2)
        sum = (sum + 1.0 / k) * t2;
    return exponent * LN2_HI + (exponent * LN2_LO + 2.0 * (t + t * sum));
}

double numerics_exp64(double x)
{
    double n = (x * 0x1.71547652b82fep+0 + ROUND_MAGIC) - ROUND_MAGIC;
    double r = __builtin_fma(n, -LN2_LO, __builtin_fma(n, -LN2_HI, x));
    double sum = 1.0;
    for (int k = 14; k >= 1; k--)
        sum = sum * r / k + 1.0;
    uint64_t bits = (uint64_t)((int64_t)n + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

void numerics_sincos(double angle, double *sin_out, double *cos_out)
{
    double n = (angle * TWO_OVER_PI + ROUND_MAGIC) - ROUND_MAGIC;
    double r = __builtin_fma(n, -PI_2_LO, __builtin_fma(n, -PI_2_HI, angle));
    static const double odd[] = {-1.0 / 6,
                                 1.0 / 120,
                                 -1.0 / 5040,
                                 1.0 / 362880,
                                 -1.0 / 39916800,
                                 1.0 / 6227020800.0,
                                 -1.0 / 1307674368000.0,
                                 1.0 / 355687428096000.0};
    static const double even[] = {
        -1.0 / 2,       1.0 / 24,          -1.0 / 720,           1.0 / 40320,
        -1.0 / 3628800, 1.0 / 479001600.0, -1.0 / 87178291200.0, 1.0 / 20922789888000.0};
    double r2 = r * r, s = odd[7], c = even[7];
    for (int k = 6; k >= 0; k--) {
        s = s * r2 + odd[k];
        c = c * r2 + even[k];
    }
    s = r + r * (r2 * s);
    c = 1.0 + r2 * c;
    switch ((int64_t)n & 3) {
    case 0:
        *sin_out = s, *cos_out = c;
        break;
    case 1:
        *sin_out = c, *cos_out = -s;
        break;
    case 2:
        *sin_out = -s, *cos_out = -c;
        break;
    default:
        *sin_out = -c, *cos_out = s;
        break;
    }
}
