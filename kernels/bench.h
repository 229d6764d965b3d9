/* bench: how fast the engine of this machine runs a model: the numbers behind `tandem bench engine`, and the
 * compute rates that planners start from. The prompt is made of fixed pseudo-random ids: speed does not
 * depend on them. */
#ifndef TANDEM_KERNELS_BENCH_H
#define TANDEM_KERNELS_BENCH_H
#include "shared/gguf.h"

struct bench_engine_options {
    const char *model_path;
    unsigned threads;       /* 0: all cores */
    uint32_t prompt_tokens; /* >= 1: tokens of the prefill */
    uint32_t gen_tokens;    /* >= 0: tokens decoded one by one behind it */
    uint32_t chunk_tokens;  /* rows of one prefill step; 0: 512 */
    uint32_t repeat_count;  /* medians of so many runs; 0: 1 */
    const char *isa;        /* NULL: best */
    const char *device;     /* NULL or "cpu"; "cuda", "cuda:N" */
    const char *shape;      /* instead of model_path: random weights of a known shape (bench_model.h) ... */
    const char *dtype;      /* ... and of this type; NULL: "bf16" */
    uint32_t batch_count;   /* sequences decoded side by side, each with its own prompt; 0: 1 */
    bool deterministic;     /* a GPU's numerics cuda-det-v2 */
    const char *kv_dtype;   /* of a GPU's pages; NULL: "f16" */
    uint32_t swap_tokens;   /* of KV to host memory and back into scattered pages; 0: none; a GPU's */
    progress_fn progress;   /* NULL, or called with what is being done, a text, as ctx; with done 0 first */
};

#define BENCH_FAMILIES_MAX 12

/* One family of operations of an engine's steps (kernels/cpu/profile.h, enum cuda_part). */
struct bench_family {
    char name[24];
    double ms, share;        /* of one run; of all families' time */
    double gop_s, gb_s;      /* multiplications and additions; weights or KV read */
    double of_peak, of_read; /* fractions of the ceilings in the result, 0 where none applies */
    const char *peak;        /* which one of_peak is of, on the CPU: "int8", "f32"; NULL: none */
};

struct bench_engine_result {
    double prefill_tps, decode_tps; /* tokens a second, medians; decode_tps is 0 without gen_tokens */
    double load_s;                  /* opening the file and preparing the weights */
    double first_token_s;           /* that and the first run's first prompt */
    unsigned threads;               /* that computed */
    const char *isa;                /* static; the device's kind where it is not the CPU */
    double prefill_ms;              /* of one sequence's prompt */
    /* of all sequences' next tokens, drawn by the engine where it can, else with their logits copied; the median of all steps, where
     * decode_tps is of whole runs, with the first steps, which an engine may use to prepare the others */
    double decode_step_ms;
    /* Of the CPU, measured between the runs, all threads; medians. 0 where the table has no measure. */
    double dot_gop_s, fma_gflop_s; /* int8 dot products, f32 */
    /* Of both; a GPU's in some more steps behind the runs, in which nothing overlaps. */
    struct bench_family prefill_families[BENCH_FAMILIES_MAX], decode_families[BENCH_FAMILIES_MAX];
    uint32_t prefill_family_count, decode_family_count;
    double read_gb_s;
    /* Of a GPU, measured in the same run; 0 on the CPU. What a step cannot do without, over the ceilings: */
    double copy_gb_s, matmul_tflop_s, to_device_gb_s;
    double decode_floor_ms, prefill_floor_ms;
    double
        host_ms; /* of a decode step, what a recorded one does not take: the host's part and the copy of its lists; 0: none is recorded */
    double swap_gib, swap_out_s, swap_in_s; /* medians; until the pages can be used */
};

/* Returns 0, or a negative code with one line in err: the file, its model, memory, context_max < prompt +
 * gen. */
int bench_engine(const struct bench_engine_options *options, struct bench_engine_result *result,
                 struct td_error *err);

double bench_median(double *values, uint32_t count); /* sorts them; 0 of none */

#endif
