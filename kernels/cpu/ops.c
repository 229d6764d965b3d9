/* ops: which table this CPU runs, and what needs no table. */
#include "kernels/cpu/ops.h"

#if defined(__x86_64__)
#include <cpuid.h>

static bool has_avx2(void)
{
    unsigned a, b, c, d; /* "avx2" and "avx512f" say too that the operating system saves the registers */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
#include <sys/auxv.h>

static bool has_dotprod(void)
{
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
}

static bool has_i8mm(void)
{
    return has_dotprod() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM);
}
#endif

static bool always(void)
{
    return true;
}

static const struct {
    const struct cpu_ops *ops;
    bool (*runs_here)(void);
} tables[] = {/* best first */
#if defined(__x86_64__)
              {&cpu_ops_avx512, has_avx512},
              {&cpu_ops_avx2, has_avx2},
#elif defined(__aarch64__)
              {&cpu_ops_neon_i8mm, has_i8mm},
              {&cpu_ops_neon_dotprod, has_dotprod},
              {&cpu_ops_neon, always},
#endif
              {&cpu_ops_portable, always}};

const struct cpu_ops *cpu_ops_at(size_t index)
{
    for (size_t i = 0; i < TD_COUNT(tables); i++)
        if (tables[i].runs_here() && index-- == 0)
            return tables[i].ops;
    return NULL;
}

const struct cpu_ops *cpu_ops_find(const char *name)
{
    const struct cpu_ops *ops;
    for (size_t i = 0; (ops = cpu_ops_at(i)); i++)
        if (!name || strcmp(name, ops->name) == 0)
            return ops;
    return NULL;
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
