/* bench_model: a model of a known shape with random weights, so that speed can be measured without a file. All layers share
 * one set of weights on the host (a backend on a device still keeps each layer's own copy). */
#ifndef TANDEM_KERNELS_BENCH_MODEL_H
#define TANDEM_KERNELS_BENCH_MODEL_H
#include "kernels/model.h"

#define BENCH_MODEL_SHAPES "llama-8b, tiny"

struct bench_model;
/* shape: one of BENCH_MODEL_SHAPES; dtype: "f32", "f16", "bf16", or a quantised type's GGUF name in any case ("q4_k").
 * -TD_ERR_ARG names what there is. */
int bench_model_create(const char *shape, const char *dtype, struct bench_model **out, struct td_error *err);
/* Whether there is such a shape and type: the same error, and nothing is made. */
int bench_model_check(const char *shape, const char *dtype, struct td_error *err);
struct model *bench_model_get(struct bench_model *m); /* borrowed */
void bench_model_destroy(struct bench_model *m);

#endif
