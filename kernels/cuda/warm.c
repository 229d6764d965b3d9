/* warm: see cuda_backend.h. One step for each kind of kernel that there is by the number of rows: a prompt's, and decode of few and of many. */
#include "kernels/cuda/cuda_backend.h"
#include "kernels/sampler.h"
#include <stdlib.h>

#define SEQS_MAX 100 /* decode rows that cuBLASLt multiplies */

struct warm {
    struct batch_seq seqs[SEQS_MAX];
    struct sample_request requests[SEQS_MAX];
    struct sampled sampled[SEQS_MAX];
    struct sampler_params params;
    uint32_t pages[BATCH_ROWS_MAX / KV_BLOCK_TOKENS + SEQS_MAX];
    int32_t ids[BATCH_ROWS_MAX];
};

static struct batch_seq seq_of(const struct cuda_backend *b, struct warm *w, uint32_t i, uint32_t rows)
{
    struct batch_seq s = {
        .layer_end = b->base.layers_paged, .row_count = rows, .ids = w->ids, .pages = w->pages + i};
    w->requests[i] = (struct sample_request){.params = &w->params, .out = &w->sampled[i]};
    if (b->has_head)
        s.sample = &w->requests[i], s.logit_count = 1;
    return s;
}

static int run(struct cuda_backend *b, struct warm *w, uint32_t seqs, uint32_t rows)
{
    for (uint32_t i = 0; i < seqs; i++)
        w->seqs[i] = seq_of(b, w, i, rows);
    return cuda_forward(&b->base, &(struct batch){w->seqs, seqs});
}

int cuda_warm_up(struct cuda_backend *b)
{
    static const uint32_t decode[] = {1, 4, 24, 48, SEQS_MAX};
    struct warm *w = calloc(1, sizeof *w);
    if (!w)
        return -TD_ERR_NOMEM;
    sampler_defaults(&w->params);
    for (uint32_t i = 0; i < TD_COUNT(w->pages); i++)
        w->pages[i] = i % b->base.page_count;
    uint64_t tokens =
        TD_MIN((uint64_t)b->base.page_count * KV_BLOCK_TOKENS, (uint64_t)b->base.model->params.context_max);
    int rc = run(b, w, 1, (uint32_t)TD_MIN(tokens, (uint64_t)b->rows_max));
    for (size_t i = 0; i < TD_COUNT(decode) && rc == 0; i++)
        if (decode[i] <= TD_MIN(b->rows_max, b->base.page_count))
            rc = run(b, w, decode[i], 1);
    free(w);
    cuda_profiler_destroy(b->profiler); /* of this nobody wants to know */
    b->profiler = cuda_profiler_create();
    return rc == 0 && !b->profiler ? -TD_ERR_NOMEM : rc;
}
