/* device_twin: a backend that behaves like a GPU's and computes on the CPU: it draws tokens, takes pieces as they came, and swaps pages to
 * memory of its own making, all by naive means. Swaps are done late: when somebody waits for one, or has asked TWIN_SWAP_ASKS times. So the
 * engine's ways for a device are tested where there is none, and every reply must be the one that it gives on the CPU. */
#ifndef TANDEM_TESTS_CLOUD_DEVICE_TWIN_H
#define TANDEM_TESTS_CLOUD_DEVICE_TWIN_H
#include "kernels/backend.h"
#include "kernels/kv_layout.h"
#include "kernels/sampler.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

#define TWIN_SWAPS_MAX 64
#define TWIN_SWAP_ASKS 3

struct twin_swap {
    uint32_t *pages, count;
    void **hosts;
    bool to_host;
    int asks;
};
struct twin {
    struct backend base;
    struct backend *inner;
    struct backend_ops ops;
    struct kv_shape shape;
    struct kv_codec_scratch *scratch;
    struct sampler_scratch *sampler;
    float *logits; /* [BATCH_SEQS_MAX][vocab] */
    int32_t *zeros;
    struct twin_swap swaps[TWIN_SWAPS_MAX];
    int64_t given, done;
    _Atomic uint32_t taken, refused; /* pieces of memory that are out; that were not given */
    uint64_t drawn, pieces, swapped_out, swapped_in;
    _Atomic bool refuses; /* set by a test: there is no more memory */
    int failed;           /* the same: nothing works any more */
};

/* --- drawing -------------------------------------------------------------------------------------- */

static inline void twin_draw(struct twin *t, const struct sample_request *r, float *logits)
{
    uint32_t vocab = t->base.model->params.vocab_count;
    struct sampler_params plain = *r->params;
    for (uint32_t i = 0; i < r->adjust_count; i++) {
        const struct sample_adjust *a = &r->adjust[i];
        float x = logits[a->id] + a->bias, by = r->params->repetition_penalty;
        if (a->repeated)
            x = x > 0.0f ? x / by : x * by;
        logits[a->id] = x - a->minus;
    }
    plain.repetition_penalty = 1.0f;
    plain.presence_penalty = plain.frequency_penalty = 0.0f;
    plain.bias_count = 0;
    ((struct sample_request *)(uintptr_t)r)->status =
        sampler_draw(&plain, logits, vocab, t->zeros, r->index, 0, t->sampler, r->out);
    t->drawn++;
}

static inline int twin_forward(struct backend *b, const struct batch *batch)
{
    struct twin *t = (struct twin *)b;
    struct batch_seq seqs[BATCH_SEQS_MAX];
    size_t vocab = b->model->params.vocab_count;
    for (uint32_t i = 0; i < batch->count; i++) {
        seqs[i] = batch->seqs[i];
        if (seqs[i].sample) {
            assert_null(seqs[i].logits);
            seqs[i].logits = t->logits + i * vocab;
            seqs[i].sample = NULL;
        }
    }
    int rc = t->failed ? t->failed : t->inner->ops->forward(t->inner, &(struct batch){seqs, batch->count});
    for (uint32_t i = 0; i < batch->count && rc == 0; i++)
        if (batch->seqs[i].sample)
            twin_draw(t, batch->seqs[i].sample, seqs[i].logits);
    return rc;
}

/* --- pages ---------------------------------------------------------------------------------------- */

static inline int twin_page_read(struct backend *b, uint32_t page, uint32_t layer, uint32_t token_count,
                                 uint16_t *k, uint16_t *v)
{
    struct twin *t = (struct twin *)b;
    return t->failed ? t->failed : t->inner->ops->page_read(t->inner, page, layer, token_count, k, v);
}

static inline int twin_page_write(struct backend *b, uint32_t page, uint32_t layer, uint32_t token_count,
                                  const uint16_t *k, const uint16_t *v)
{
    struct twin *t = (struct twin *)b;
    return t->failed ? t->failed : t->inner->ops->page_write(t->inner, page, layer, token_count, k, v);
}

static inline int twin_page_copy(struct backend *b, uint32_t from, uint32_t to)
{
    struct twin *t = (struct twin *)b;
    return t->inner->ops->page_copy(t->inner, from, to);
}

static inline void twin_piece(struct twin *t, struct page_piece *p)
{
    const struct kv_piece_head *h = &p->head;
    size_t all = kv_piece_values(&t->shape, KV_BLOCK_TOKENS), dim = h->head_dim,
           count = kv_piece_values(&t->shape, h->token_count);
    uint16_t *both = malloc(2 * all * sizeof *both), *values = malloc(count * sizeof *values);
    uint16_t *half = h->is_value ? both + all : both;
    p->status = kv_piece_decode(t->scratch, h, p->payload, values, count);
    if (p->status == 0 && !kv_f16_all_finite(values, count))
        p->status = -TD_ERR_FORMAT;
    t->inner->ops->page_read(t->inner, p->page, h->layer, KV_BLOCK_TOKENS, both, both + all);
    for (size_t head = 0; head < h->kv_head_count; head++)
        memcpy(half + (head * KV_BLOCK_TOKENS + h->first_token) * dim, values + head * h->token_count * dim,
               h->token_count * dim * sizeof *half);
    if (p->status == 0)
        t->inner->ops->page_write(t->inner, p->page, h->layer, KV_BLOCK_TOKENS, both, both + all);
    free(both), free(values);
    t->pieces++;
}

static inline int twin_pieces_write(struct backend *b, struct page_piece *pieces, uint32_t count)
{
    struct twin *t = (struct twin *)b;
    for (uint32_t i = 0; i < count && !t->failed; i++)
        twin_piece(t, &pieces[i]);
    return t->failed;
}

/* --- swap ----------------------------------------------------------------------------------------- */

static inline void twin_swap_now(struct twin *t, struct twin_swap *w)
{
    size_t half = kv_piece_values(&t->shape, KV_BLOCK_TOKENS);
    for (uint32_t i = 0; i < w->count; i++) {
        uint16_t *at = w->hosts[i];
        for (uint32_t layer = 0; layer < t->shape.layer_count; layer++, at += 2 * half)
            assert_int_equal(
                w->to_host
                    ? t->inner->ops->page_read(t->inner, w->pages[i], layer, KV_BLOCK_TOKENS, at, at + half)
                    : t->inner->ops->page_write(t->inner, w->pages[i], layer, KV_BLOCK_TOKENS, at, at + half),
                0);
    }
    *(w->to_host ? &t->swapped_out : &t->swapped_in) += w->count;
    free(w->pages), free(w->hosts);
}

static inline int64_t twin_swap_start(struct backend *b, const struct page_swap *swap)
{
    struct twin *t = (struct twin *)b;
    assert_true(swap->count >= 1 && swap->layer_begin == 0 && swap->layer_end == t->shape.layer_count);
    assert_true(t->given - t->done < TWIN_SWAPS_MAX);
    if (t->failed)
        return t->failed;
    struct twin_swap *w = &t->swaps[t->given % TWIN_SWAPS_MAX];
    *w = (struct twin_swap){.pages = malloc(swap->count * sizeof *w->pages),
                            .hosts = malloc(swap->count * sizeof *w->hosts),
                            .count = swap->count,
                            .to_host = swap->to_host};
    memcpy(w->pages, swap->pages, swap->count * sizeof *w->pages);
    memcpy(w->hosts, swap->hosts, swap->count * sizeof *w->hosts);
    return ++t->given;
}

static inline int twin_swap_done(struct backend *b, int64_t ticket, bool wait)
{
    struct twin *t = (struct twin *)b;
    assert_true(ticket > 0 && ticket <= t->given);
    if (ticket <= t->done)
        return 1;
    if (!wait && ++t->swaps[(ticket - 1) % TWIN_SWAPS_MAX].asks < TWIN_SWAP_ASKS)
        return 0;
    while (t->done < ticket)
        twin_swap_now(t, &t->swaps[t->done++ % TWIN_SWAPS_MAX]);
    return t->failed ? t->failed : 1;
}

static inline void *twin_host_take(struct backend *b, size_t size)
{
    struct twin *t = (struct twin *)b;
    if (t->refuses) {
        t->refused++;
        return NULL;
    }
    void *memory = malloc(size);
    t->taken += memory != NULL;
    return memory;
}

static inline void twin_host_give(struct backend *b, void *memory)
{
    ((struct twin *)b)->taken--;
    free(memory);
}

/* --- life ----------------------------------------------------------------------------------------- */

static inline int twin_state(const struct backend *b)
{
    return ((const struct twin *)b)->failed;
}

static inline void twin_destroy(struct backend *b)
{
    struct twin *t = (struct twin *)b;
    assert_int_equal(t->taken, 0);
    assert_int_equal(t->done, t->given); /* whoever begins a swap sees its end */
    t->inner->ops->destroy(t->inner);
    kv_codec_scratch_destroy(t->scratch);
    sampler_scratch_destroy(t->sampler);
    free(t->logits), free(t->zeros), free(t);
}

/* Takes the backend over. */
static inline struct backend *twin_create(struct backend *inner)
{
    struct twin *t = calloc(1, sizeof *t);
    const struct model_params *p = &inner->model->params;
    t->inner = inner;
    t->ops = (struct backend_ops){.name = "twin",
                                  .numerics = inner->ops->numerics,
                                  .samples = true,
                                  .forward = twin_forward,
                                  .page_read = twin_page_read,
                                  .page_write = twin_page_write,
                                  .page_copy = twin_page_copy,
                                  .pieces_write = twin_pieces_write,
                                  .swap_start = twin_swap_start,
                                  .swap_done = twin_swap_done,
                                  .state = twin_state,
                                  .host_take = twin_host_take,
                                  .host_give = twin_host_give,
                                  .destroy = twin_destroy};
    t->base = *inner;
    t->base.ops = &t->ops;
    t->shape = model_kv_shape(inner->model);
    t->scratch = kv_codec_scratch_create(&t->shape);
    t->sampler = sampler_scratch_create(p->vocab_count);
    t->logits = malloc((size_t)BATCH_SEQS_MAX * p->vocab_count * sizeof *t->logits);
    t->zeros = calloc(p->context_max + 1, sizeof *t->zeros);
    return &t->base;
}

#endif
