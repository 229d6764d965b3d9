/* sample: what an engine is asked when it draws the next token itself (backend_ops.samples), next to the logits: sampler.h says what a
 * draw is. The adjustments are a draw's bias and penalties, made ready by sampler_adjust; no engine sees the ids so far. */
#ifndef TANDEM_KERNELS_SAMPLE_H
#define TANDEM_KERNELS_SAMPLE_H
#include <stdint.h>

#define SAMPLE_ADJUST_MAX 1024 /* of one request: with more, ask for logits */

/* x += bias; repeated: x is divided by the repetition penalty (multiplied when <= 0); x -= minus. */
struct sample_adjust {
    int32_t id;
    float bias, minus;
    uint32_t repeated;
};

struct sampler_params;
struct sampled;
struct sample_request {
    const struct sampler_params *params;
    uint64_t index; /* of the token among the generated ones */
    const struct sample_adjust *adjust;
    uint32_t adjust_count; /* different ids */
    struct sampled *out;
    int status; /* out: 0, or -TD_ERR_FORMAT: logits that are not finite */
};

#endif
