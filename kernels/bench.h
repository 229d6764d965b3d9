/* bench: how fast the engine of this machine runs a model: the numbers behind `tandem bench engine`, and the
 * compute rates that planners start from. The prompt is made of fixed pseudo-random ids: speed does not
 * depend on them. */
#ifndef TANDEM_KERNELS_BENCH_H
#define TANDEM_KERNELS_BENCH_H
#include "shared/base.h"
#include "shared/status.h"

struct bench_engine_options {
    const char *model_path;
    unsigned threads;       /* 0: all cores */
    uint32_t prompt_tokens; /* >= 1: tokens of the prefill */
    uint32_t gen_tokens;    /* >= 0: tokens decoded one by one behind it */
    uint32_t chunk_tokens;  /* rows of one prefill step; 0: 512 */
    uint32_t repeat_count;  /* medians of so many runs; 0: 1 */
    const char *isa;        /* NULL: best */
};

struct bench_engine_result {
    double prefill_tps, decode_tps; /* tokens a second, medians; decode_tps is 0 without gen_tokens */
    double load_s;                  /* opening the file and preparing the weights */
    unsigned threads;               /* that computed */
    const char *isa;                /* static */
};

/* Returns 0, or a negative code with one line in err: the file, its model, memory, context_max < prompt +
 * gen. */
int bench_engine(const struct bench_engine_options *options, struct bench_engine_result *result,
                 struct td_error *err);

#endif
