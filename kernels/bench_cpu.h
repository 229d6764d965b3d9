/* bench_cpu: what the CPU engine's bench measures besides rates: what this machine can do at best, in the same run, and
 * which part of it each family of operations reaches. */
#ifndef TANDEM_KERNELS_BENCH_CPU_H
#define TANDEM_KERNELS_BENCH_CPU_H
#include "kernels/bench.h"
#include "kernels/cpu/cpu_backend.h"

#define BENCH_CPU_SAMPLES_MAX 128

/* Ceilings are sampled beside the runs, as neighbours come and go; medians count. */
struct bench_cpu {
    struct cpu_backend *engine; /* borrowed */
    uint8_t *memory;            /* more than caches hold */
    uint32_t sample_count;
    double dot_gop_s[BENCH_CPU_SAMPLES_MAX], fma_gflop_s[BENCH_CPU_SAMPLES_MAX],
        read_gb_s[BENCH_CPU_SAMPLES_MAX];
    struct cpu_profile prefill, decode;
};

/* Returns 0 or -TD_ERR_NOMEM. engine: a backend made by cpu_backend_create. */
int bench_cpu_init(struct bench_cpu *b, struct backend *engine, struct td_error *err);
void bench_cpu_deinit(struct bench_cpu *b);
void bench_cpu_sample(struct bench_cpu *b); /* some 20 ms; beyond BENCH_CPU_SAMPLES_MAX nothing happens */
/* Ceilings and families; runs: prompts run, for times of one. */
void bench_cpu_result(struct bench_cpu *b, uint32_t runs, struct bench_engine_result *r);

#endif
