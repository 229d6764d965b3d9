/* ops: which table this CPU runs, and what needs no table. */
#include "kernels/cpu/ops.h"

#if defined(__x86_64__)
#include <cpuid.h>

static bool has_avx2(void)
{
    unsigned a, b, c, d; /* "avx2" includes that the operating system saves the registers */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

const struct cpu_ops *cpu_ops_find(const char *name)
{
#if defined(__x86_64__)
    if ((!name || strcmp(name, "avx2") == 0) && has_avx2())
        return &cpu_ops_avx2;
#endif
    return !name || strcmp(name, "portable") == 0 ? &cpu_ops_portable : NULL;
}

/* cos_sin: rope_dim / 2 cosines, then as many sines. */
void rope_rotate(float *head, const float *cos_sin, uint32_t rope_dim, enum rope_kind kind)
{
    uint32_t pairs = rope_dim / 2;
    const float *c = cos_sin, *s = cos_sin + pairs;
    if (kind == ROPE_HALVES) {
        for (uint32_t i = 0; i < pairs; i++) {
            float x0 = head[i], x1 = head[i + pairs];
            head[i] = x0 * c[i] - x1 * s[i];
            head[i + pairs] = x0 * s[i] + x1 * c[i];
        }
        return;
    }
    for (uint32_t i = 0; i < pairs; i++) {
        float x0 = head[2 * i], x1 = head[2 * i + 1];
        head[2 * i] = x0 * c[i] - x1 * s[i];
        head[2 * i + 1] = x0 * s[i] + x1 * c[i];
    }
}
