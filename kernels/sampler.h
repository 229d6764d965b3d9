/* sampler: the next token as a pure function of (logits, parameters, seed, token index, ids so far). No state survives between
 * calls, so a resumed generation goes on with the same text on any node.
 * Random numbers: Philox-4x32-10 with key = seed, counter = token index (Salmon et al., SC'11).
 * Order: logit bias, penalties, (greedy if temperature == 0: lowest id among equal maxima), top-k, softmax at temperature,
 * top-p, min-p, draw. Ties are ordered by id, so results do not depend on a sort's whims. exp and log are the engine's own (same bits everywhere). */
#ifndef TANDEM_KERNELS_SAMPLER_H
#define TANDEM_KERNELS_SAMPLER_H
#include "kernels/sample.h"
#include "shared/base.h"
#include "shared/sampling.h"
#include "shared/status.h"

struct sampler_logprob {
    int32_t id;
    float logprob; /* of the unmodified distribution (softmax of the raw logits) */
};
struct sampled {
    int32_t id;
    float logprob; /* when want_logprobs */
    uint32_t top_count;
    struct sampler_logprob top[SAMPLER_LOGPROBS_MAX];
};
/* ranges, with the field's name in the message */
int sampler_check(const struct sampler_params *p, struct td_error *err);

struct sampler_scratch; /* for one vocabulary size; one per thread */
struct sampler_scratch *sampler_scratch_create(uint32_t vocab_count);
void sampler_scratch_destroy(struct sampler_scratch *s);

/* sampler_draw: logits [vocab_count] (not modified). ids[0..prompt_count) is the prompt, ids[prompt_count..count) was generated; the token
 * index used for randomness is count - prompt_count. Non-finite logits: -TD_ERR_FORMAT. */
int sampler_draw(const struct sampler_params *p, const float *logits, uint32_t vocab_count,
                 const int32_t *ids, size_t count, size_t prompt_count, struct sampler_scratch *scratch,
                 struct sampled *out);

/* For an engine that draws (kernels/sample.h): the same bias and penalties as a list of at most SAMPLE_ADJUST_MAX ids; the count, or
 * -TD_ERR_LIMIT when there are more, -TD_ERR_ARG for an id outside the vocabulary. */
int sampler_adjust(const struct sampler_params *p, const int32_t *ids, size_t count, size_t prompt_count,
                   struct sampler_scratch *scratch, struct sample_adjust out[SAMPLE_ADJUST_MAX]);
/* The random number of a draw, in [0, 1). */
double sampler_uniform(uint64_t seed, uint64_t index);

#endif
