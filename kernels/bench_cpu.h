/* bench_cpu: what the CPU engine's bench measures besides rates: what this machine can do at best, in the same run, and
 * which part of it each family of operations reaches. */
#ifndef TANDEM_KERNELS_BENCH_CPU_H
#define TANDEM_KERNELS_BENCH_CPU_H
#include "kernels/bench.h"
#include "kernels/cpu/cpu_backend.h"

/* Ceilings are sampled before and after every half of a run, prefill and decode, as neighbours come and go. The medians of all
 * samples are the ceilings that are printed and that every family's fractions are of. */
struct bench_cpu_ceilings {
    double dot_gop_s, fma_gflop_s, read_gb_s;
};

struct bench_cpu {
    struct cpu_backend *engine;          /* borrowed */
    uint8_t *memory;                     /* more than caches hold */
    uint32_t runs;                       /* at most */
    struct cpu_profile *halves;          /* [2 * runs]: prefill, decode, prefill ... */
    struct bench_cpu_ceilings *ceilings; /* [2 * runs + 1]: before each half, and behind the last */
};

/* Returns 0 or -TD_ERR_NOMEM. engine: a backend made by cpu_backend_create. */
int bench_cpu_init(struct bench_cpu *b, struct backend *engine, uint32_t runs, struct td_error *err);
void bench_cpu_deinit(struct bench_cpu *b);
/* Samples the ceilings, some 20 ms, and has the engine's steps counted as that half from here on; half 2 * runs: as none. */
void bench_cpu_half(struct bench_cpu *b, uint32_t half);
/* Ceilings and families. Returns 0 or -TD_ERR_NOMEM. */
int bench_cpu_result(const struct bench_cpu *b, struct bench_engine_result *r, struct td_error *err);

#endif
