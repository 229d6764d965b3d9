/* profile: where the time of the CPU engine's steps goes, by family of operations: for the bench alone, off otherwise.
 * Steps are chains of jobs on one thread, so a family's time is what lies between the end of the job before and its own
 * end; nothing is counted twice and nothing is left out. */
#ifndef TANDEM_KERNELS_CPU_PROFILE_H
#define TANDEM_KERNELS_CPU_PROFILE_H
#include "shared/base.h"

enum cpu_family {
    CPU_INPUT,      /* embedding, angles of RoPE */
    CPU_NORM,       /* residual, RMS norm, quantising */
    CPU_ROPE,       /* bias, head norms, rotation, K and V to the page */
    CPU_ATTENTION,  /* scores, softmax, values, quantising */
    CPU_ACTIVATION, /* SwiGLU, quantising */
    CPU_LOGITS,     /* output norm and the head's product */
    CPU_PRODUCTS,   /* + enum gguf_type of the weights; of the first matrix where a job has several types */
    CPU_FAMILY_COUNT = CPU_PRODUCTS + 31
};

struct cpu_profile {
    uint64_t stamp_us; /* end of the last job */
    struct {
        uint64_t time_us;
        double ops, bytes; /* multiplications and additions; weights or KV that must be read */
    } families[CPU_FAMILY_COUNT];
};

/* Everything since the last stamp belongs to `family`. */
static inline void cpu_profile_add(struct cpu_profile *p, size_t family, double ops, double bytes)
{
    uint64_t now = clock_mono_us();
    p->families[family].time_us += now - p->stamp_us;
    p->families[family].ops += ops;
    p->families[family].bytes += bytes;
    p->stamp_us = now;
}

#endif
