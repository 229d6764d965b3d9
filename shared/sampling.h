/* sampling: what a request says of how its tokens are drawn; one struct from the API's parser to the sampler (kernels/sampler.h) and the
 * GENERATE frame. Ranges are the sampler's to check. */
#ifndef TANDEM_SHARED_SAMPLING_H
#define TANDEM_SHARED_SAMPLING_H
#include <stdbool.h>
#include <stdint.h>

#define SAMPLER_BIAS_MAX     300 /* logit_bias entries (the OpenAI API's limit) */
#define SAMPLER_LOGPROBS_MAX 20  /* the same of top_logprobs */

struct sampler_bias {
    int32_t id;
    float bias;
};

struct sampler_params {
    float temperature;         /* 0: greedy */
    int32_t top_k;             /* 0: off */
    float top_p;               /* 1: off */
    float min_p;               /* 0: off */
    float repetition_penalty;  /* 1: off; over the last repetition_window ids, prompt included */
    int32_t repetition_window; /* 0: none, -1: all */
    float presence_penalty, frequency_penalty; /* 0: off; over generated ids only */
    uint64_t seed;
    uint32_t bias_count;
    struct sampler_bias bias[SAMPLER_BIAS_MAX];
    /* alternatives to report, <= SAMPLER_LOGPROBS_MAX; the chosen token's is always computed when want_logprobs */
    uint32_t logprob_count;
    bool want_logprobs;
};

/* Temperature 1, everything else off. */
static inline void sampler_defaults(struct sampler_params *p)
{
    *p = (struct sampler_params){.temperature = 1, .top_p = 1, .repetition_penalty = 1};
}

#endif
