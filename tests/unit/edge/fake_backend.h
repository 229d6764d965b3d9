/* fake_backend: a backend whose numbers can be written down without a model. Row of token id at position p after k layers: value c is
 * id + 1000 p + c; K of (layer, head, token, d) is a function of id, position, layer and d; the most likely token behind it is fake_next. It checks
 * what a real one would trust: that the pages of earlier positions hold what was computed for them. */
#ifndef TANDEM_TESTS_FAKE_BACKEND_H
#define TANDEM_TESTS_FAKE_BACKEND_H
#include "kernels/backend.h"
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define FAKE_EMBD  32
#define FAKE_HEADS 2
#define FAKE_DIM   16
#define FAKE_VOCAB 1000

struct fake_backend {
    struct backend base;
    struct model model;
    int32_t *ids; /* [page][token]: what was run there, -1: nothing */
    atomic_uint forwards, rows;
    atomic_uint pages_bad; /* a page of an earlier position did not hold its token */
    float scale;           /* of the rows; large: f16 cannot hold them */
    unsigned delay_us;
    atomic_uint ahead; /* pages that were taken ahead of need: each once, as many as are used */
    sem_t *gate;       /* each call waits for it; NULL: none does */
};

static inline int32_t fake_next(int32_t id, uint32_t position)
{
    return (int32_t)(((uint32_t)id * 7 + position) % FAKE_VOCAB);
}

static inline uint16_t fake_key(int32_t id, uint32_t token, uint32_t layer, uint32_t head, uint32_t d,
                                bool is_value)
{
    return f32_to_f16((float)(id % 97) + (float)token * 0.25f + (float)(layer * 8 + head * 2 + is_value) +
                      (float)d * 0.5f);
}

static inline int fake_forward(struct backend *b, const struct batch *batch)
{
    struct fake_backend *f = (struct fake_backend *)b;
    if (f->gate)
        sem_wait(f->gate);
    if (f->delay_us)
        nanosleep(&(struct timespec){.tv_nsec = (long)f->delay_us * 1000}, NULL);
    for (uint32_t s = 0; s < batch->count; s++) {
        const struct batch_seq *q = &batch->seqs[s];
        for (uint32_t p = 0; p < q->position; p++)
            if (f->ids[q->pages[p / KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + p % KV_BLOCK_TOKENS] < 0)
                f->pages_bad++;
        for (uint32_t r = 0; r < q->row_count; r++) {
            uint32_t p = q->position + r;
            f->ids[q->pages[p / KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + p % KV_BLOCK_TOKENS] = q->ids[r];
            for (uint32_t c = 0; q->hidden_out && c < FAKE_EMBD; c++)
                q->hidden_out[r * FAKE_EMBD + c] = f->scale * (float)(q->ids[r] + (int32_t)(1000 * p + c));
        }
        for (uint32_t i = 0; q->logits && i < FAKE_VOCAB; i++)
            q->logits[i] = 0;
        uint32_t last = q->row_count - 1;
        if (q->logits)
            q->logits[fake_next(q->ids[last], q->position + last)] = 9;
        f->rows += q->row_count;
    }
    f->forwards++;
    return 0;
}

static inline int fake_page_read(struct backend *b, uint32_t page, uint32_t layer, uint32_t token_count,
                                 uint16_t *k, uint16_t *v)
{
    struct fake_backend *f = (struct fake_backend *)b;
    for (uint32_t h = 0; h < FAKE_HEADS; h++)
        for (uint32_t t = 0; t < token_count; t++)
            for (uint32_t d = 0; d < FAKE_DIM; d++) {
                size_t at = (h * token_count + t) * FAKE_DIM + d;
                int32_t id = f->ids[page * KV_BLOCK_TOKENS + t];
                k[at] = fake_key(id, t, layer, h, d, false);
                v[at] = fake_key(id, t, layer, h, d, true);
            }
    return 0;
}

/* What comes in must be what fake_page_read would give of some tokens; those it then holds (but for multiples of 97). */
static inline int fake_page_write(struct backend *b, uint32_t page, uint32_t layer, uint32_t token_count,
                                  const uint16_t *k, const uint16_t *v)
{
    struct fake_backend *f = (struct fake_backend *)b;
    for (uint32_t t = 0; t < token_count; t++) {
        int32_t *id = &f->ids[page * KV_BLOCK_TOKENS + t];
        if (layer == 0)
            *id = (int32_t)(f16_to_f32(k[t * FAKE_DIM]) - (float)t * 0.25f);
        for (uint32_t h = 0; h < FAKE_HEADS; h++)
            for (uint32_t d = 0; d < FAKE_DIM; d++) {
                size_t at = (h * token_count + t) * FAKE_DIM + d;
                if (k[at] != fake_key(*id, t, layer, h, d, false) ||
                    v[at] != fake_key(*id, t, layer, h, d, true))
                    f->pages_bad++;
            }
    }
    return 0;
}

static inline bool fake_pages_ahead(struct backend *b, uint32_t used)
{
    struct fake_backend *f = (struct fake_backend *)b;
    if (f->ahead >= used)
        return false;
    f->ahead++;
    return true;
}

static inline void fake_destroy(struct backend *b)
{
    struct fake_backend *f = (struct fake_backend *)b;
    free(f->ids);
    free(f);
}

static inline struct fake_backend *fake_backend_create(uint32_t page_count, uint32_t layers,
                                                       uint32_t layer_count)
{
    static const struct backend_ops ops = {.name = "fake",
                                           .numerics = KV_NUMERICS_CPU_V1,
                                           .forward = fake_forward,
                                           .page_read = fake_page_read,
                                           .page_write = fake_page_write,
                                           .pages_ahead = fake_pages_ahead,
                                           .destroy = fake_destroy};
    struct fake_backend *f = calloc(1, sizeof *f);
    f->base.ops = &ops;
    f->base.model = &f->model;
    f->base.page_count = page_count;
    f->base.layers_paged = layers;
    f->model.params = (struct model_params){.layer_count = layer_count,
                                            .embd_size = FAKE_EMBD,
                                            .kv_head_count = FAKE_HEADS,
                                            .head_dim = FAKE_DIM,
                                            .head_count = FAKE_HEADS,
                                            .vocab_count = FAKE_VOCAB,
                                            .context_max = 4096};
    f->model.output.data = layers == layer_count ? f : NULL; /* a whole model has a head */
    f->scale = 1;
    f->ids = malloc((size_t)page_count * KV_BLOCK_TOKENS * sizeof *f->ids);
    memset(f->ids, 0xff, (size_t)page_count * KV_BLOCK_TOKENS * sizeof *f->ids);
    return f;
}

#endif
