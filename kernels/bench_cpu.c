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
        b->memory[0] = 1; /* cannot be: memory holds ones */
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

void bench_cpu_half(struct bench_cpu *b, uint32_t half)
{
    struct workers *w = b->engine->workers;
    struct bench_cpu_ceilings *c = &b->ceilings[half];
    c->dot_gop_s = spin_rate(w, b->engine->ops->spin_dot);
    c->fma_gflop_s = spin_rate(w, b->engine->ops->spin_fma);
    uint64_t start = clock_mono_us();
    workers_run(w, READ_SIZE / READ_TASK_SIZE, read_task, b);
    c->read_gb_s = READ_SIZE / (double)TD_MAX(clock_mono_us() - start, 1u) * 1e-3;
    b->engine->profile = half < 2 * b->runs ? &b->halves[half] : NULL;
}

int bench_cpu_init(struct bench_cpu *b, struct backend *engine, uint32_t runs, struct td_error *err)
{
    *b = (struct bench_cpu){.engine = (struct cpu_backend *)engine, .runs = runs};
    b->memory = aligned_alloc(READ_TASK_SIZE, READ_SIZE);
    b->halves = calloc(2 * (size_t)runs, sizeof *b->halves);
    b->ceilings = calloc(2 * (size_t)runs + 1, sizeof *b->ceilings);
    if (!b->memory || !b->halves || !b->ceilings)
        return td_fail(err, -TD_ERR_NOMEM, "cannot run the benchmark: out of memory");
    madvise(b->memory, READ_SIZE, MADV_HUGEPAGE);
    memset(b->memory, 1, READ_SIZE);
    return 0;
}

void bench_cpu_deinit(struct bench_cpu *b)
{
    free(b->ceilings);
    free(b->halves);
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

/* The ceiling of a family's arithmetic, and its name; NULL: none applies, or it has no measure. */
static const char *family_peak(const struct bench_cpu *b, size_t family, const struct bench_engine_result *r,
                               double *rate)
{
    *rate = 0;
    if (family < CPU_LOGITS && family != CPU_ATTENTION)
        return NULL;
    uint32_t type = family >= CPU_PRODUCTS ? (uint32_t)(family - CPU_PRODUCTS) : b->engine->head.type;
    bool is_int8 = family != CPU_ATTENTION && weight_is_quantised(type);
    *rate = is_int8 ? r->dot_gop_s : r->fma_gflop_s;
    return *rate <= 0 ? NULL : is_int8 ? "int8" : "f32";
}

static double ratio(double a, double b)
{
    return b > 0 ? a / b : 0;
}

/* Medians of a family over the halves of that kind (0: prefill, 1: decode), beside r's ceilings. */
static void fill_family(const struct bench_cpu *b, unsigned kind, size_t family,
                        const struct bench_engine_result *r, double *values, struct bench_family *f)
{
    enum { MS, SHARE, GOP_S, GB_S, VALUES };
    for (uint32_t run = 0; run < b->runs; run++) {
        const struct cpu_profile *p = &b->halves[2 * run + kind];
        double us = (double)p->families[family].time_us, total_us = 0;
        for (size_t i = 0; i < CPU_FAMILY_COUNT; i++)
            total_us += (double)p->families[i].time_us;
        values[MS * b->runs + run] = us * 1e-3;
        values[SHARE * b->runs + run] = ratio(us, total_us);
        values[GOP_S * b->runs + run] = ratio(p->families[family].ops, us) * 1e-3;
        values[GB_S * b->runs + run] = ratio(p->families[family].bytes, us) * 1e-3;
    }
    double peak, *const to[VALUES] = {&f->ms, &f->share, &f->gop_s, &f->gb_s};
    for (unsigned i = 0; i < VALUES; i++)
        *to[i] = bench_median(values + (size_t)i * b->runs, b->runs);
    f->peak = family_peak(b, family, r, &peak);
    f->of_peak = ratio(f->gop_s, peak);
    f->of_read = ratio(f->gb_s, r->read_gb_s);
    name_family(family, f->name, sizeof f->name);
}

static uint32_t fill_families(const struct bench_cpu *b, unsigned kind, const struct bench_engine_result *r,
                              double *values, struct bench_family *out)
{
    uint32_t count = 0;
    for (size_t i = 0; i < CPU_FAMILY_COUNT && count < BENCH_FAMILIES_MAX; i++) {
        bool is_used = false;
        for (uint32_t run = 0; run < b->runs; run++)
            is_used |= b->halves[2 * run + kind].families[i].time_us > 0 ||
                       b->halves[2 * run + kind].families[i].ops > 0;
        if (is_used)
            fill_family(b, kind, i, r, values, &out[count++]);
    }
    return count;
}

int bench_cpu_result(const struct bench_cpu *b, struct bench_engine_result *r, struct td_error *err)
{
    const uint32_t samples = 2 * b->runs + 1;
    double *values = calloc(3 * (size_t)samples, sizeof *values);
    if (!values)
        return td_fail(err, -TD_ERR_NOMEM, "cannot run the benchmark: out of memory");
    for (uint32_t i = 0; i < samples; i++) {
        values[i] = b->ceilings[i].dot_gop_s;
        values[samples + i] = b->ceilings[i].fma_gflop_s;
        values[2 * (size_t)samples + i] = b->ceilings[i].read_gb_s;
    }
    r->dot_gop_s = bench_median(values, samples);
    r->fma_gflop_s = bench_median(values + samples, samples);
    r->read_gb_s = bench_median(values + 2 * (size_t)samples, samples);
    r->prefill_family_count = fill_families(b, 0, r, values, r->prefill_families);
    r->decode_family_count = fill_families(b, 1, r, values, r->decode_families);
    free(values);
    return 0;
}
