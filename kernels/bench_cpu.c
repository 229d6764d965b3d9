/* bench_cpu: see bench_cpu.h. */
#include "kernels/bench_cpu.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define READ_SIZE       ((size_t)128 << 20) /* of one sample */
#define READ_TASK_SIZE  ((size_t)2 << 20)
#define SPIN_ROUNDS     200000u /* under a millisecond */
#define SPIN_TASKS_EACH 4       /* a thread */

/* --- ceilings --------------------------------------------------------------------------------- */

/* The C library's search is as fast as this machine reads. */
static void read_task(void *ctx, size_t task, unsigned worker)
{
    (void)worker;
    struct bench_cpu *b = ctx;
    if (memchr(b->memory + task * READ_TASK_SIZE, 0, READ_TASK_SIZE))
        b->sample_count = BENCH_CPU_SAMPLES_MAX; /* cannot be: memory holds ones */
}

struct spin_job {
    double (*spin)(uint32_t rounds);
    double ops;
};

static void spin_task(void *ctx, size_t task, unsigned worker)
{
    (void)worker;
    struct spin_job *job = ctx;
    double ops = job->spin(SPIN_ROUNDS);
    if (task == 0)
        job->ops = ops;
}

static double spin_rate(struct workers *w, double (*spin)(uint32_t rounds))
{
    if (!spin)
        return 0;
    struct spin_job job = {spin, 0};
    size_t tasks = (size_t)workers_count(w) * SPIN_TASKS_EACH;
    uint64_t start = clock_mono_us();
    workers_run(w, tasks, spin_task, &job);
    return job.ops * (double)tasks / (double)TD_MAX(clock_mono_us() - start, 1u) * 1e-3;
}

void bench_cpu_sample(struct bench_cpu *b)
{
    struct workers *w = b->engine->workers;
    uint32_t i = b->sample_count;
    if (i >= BENCH_CPU_SAMPLES_MAX)
        return;
    b->dot_gop_s[i] = spin_rate(w, b->engine->ops->spin_dot);
    b->fma_gflop_s[i] = spin_rate(w, b->engine->ops->spin_fma);
    uint64_t start = clock_mono_us();
    workers_run(w, READ_SIZE / READ_TASK_SIZE, read_task, b);
    b->read_gb_s[i] = READ_SIZE / (double)TD_MAX(clock_mono_us() - start, 1u) * 1e-3;
    b->sample_count++;
}

int bench_cpu_init(struct bench_cpu *b, struct backend *engine, struct td_error *err)
{
    *b = (struct bench_cpu){.engine = (struct cpu_backend *)engine};
    b->memory = aligned_alloc(READ_TASK_SIZE, READ_SIZE);
    if (!b->memory)
        return td_fail(err, -TD_ERR_NOMEM, "cannot run the benchmark: out of memory");
    madvise(b->memory, READ_SIZE, MADV_HUGEPAGE);
    memset(b->memory, 1, READ_SIZE);
    return 0;
}

void bench_cpu_deinit(struct bench_cpu *b)
{
    free(b->memory);
}

/* --- families --------------------------------------------------------------------------------- */

static void name_family(size_t family, char *name, size_t size)
{
    static const char *const names[] = {"input", "norms", "rope, KV", "attention", "SwiGLU", "logits"};
    if (family < CPU_PRODUCTS)
        snprintf(name, size, "%s", names[family]);
    else
        snprintf(name, size, "products %s", gguf_type_info((uint32_t)(family - CPU_PRODUCTS))->name);
}

/* The ceiling of a family's arithmetic. */
static double family_peak(const struct bench_cpu *b, size_t family, const struct bench_engine_result *r)
{
    if (family == CPU_ATTENTION)
        return r->fma_gflop_s;
    if (family < CPU_LOGITS)
        return 0;
    uint32_t type = family == CPU_LOGITS ? b->engine->head.type : (uint32_t)(family - CPU_PRODUCTS);
    return weight_is_quantised(type) ? r->dot_gop_s : r->fma_gflop_s;
}

static uint32_t fill_families(const struct bench_cpu *b, const struct cpu_profile *p, uint32_t runs,
                              const struct bench_engine_result *r, struct bench_family *out)
{
    uint64_t total_us = 0;
    uint32_t count = 0;
    for (size_t i = 0; i < CPU_FAMILY_COUNT; i++)
        total_us += p->families[i].time_us;
    for (size_t i = 0; i < CPU_FAMILY_COUNT && count < BENCH_FAMILIES_MAX; i++) {
        if (p->families[i].time_us == 0 && p->families[i].ops <= 0)
            continue;
        double us = (double)TD_MAX(p->families[i].time_us, 1u), peak = family_peak(b, i, r);
        struct bench_family *f = &out[count++];
        name_family(i, f->name, sizeof f->name);
        f->ms = us * 1e-3 / runs;
        f->share = us / (double)TD_MAX(total_us, 1u);
        f->gop_s = p->families[i].ops / us * 1e-3;
        f->gb_s = p->families[i].bytes / us * 1e-3;
        f->of_peak = peak > 0 ? f->gop_s / peak : 0;
        f->of_read = r->read_gb_s > 0 ? f->gb_s / r->read_gb_s : 0;
    }
    return count;
}

void bench_cpu_result(struct bench_cpu *b, uint32_t runs, struct bench_engine_result *r)
{
    r->dot_gop_s = bench_median(b->dot_gop_s, b->sample_count);
    r->fma_gflop_s = bench_median(b->fma_gflop_s, b->sample_count);
    r->read_gb_s = bench_median(b->read_gb_s, b->sample_count);
    r->prefill_family_count = fill_families(b, &b->prefill, runs, r, r->prefill_families);
    r->decode_family_count = fill_families(b, &b->decode, runs, r, r->decode_families);
}
