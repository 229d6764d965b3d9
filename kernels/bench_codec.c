/* bench_codec: see bench_codec.h. */
#include "kernels/bench_codec.h"
#include "kernels/backend.h"
#include "kernels/cpu/blocks.h"
#include "kernels/kv_layout.h"
#include <math.h>
#include <stdlib.h>

#define CHUNK_TOKENS     256
#define SPEED_PIECES_MAX 240 /* pieces that rates are measured on: some MB, more than a cache */
#define SPEED_ROUNDS     5   /* the best counts: a busy neighbour only adds time */
#define CONFIDENCE       1.96

struct tally {      /* of one level */
    double *kl;     /* [rows] */
    double *change; /* [windows]: sum of the change of negative log likelihood */
    double bytes, values;
    uint64_t same_top;
};

struct bench {
    const struct model *model;
    const struct codec_window *windows;
    const struct bench_codec_options *options;
    uint32_t window_count, page_count, rows_max;
    uint64_t rows; /* compared so far */
    struct kv_shape shape;
    struct backend *backend;
    struct kv_codec_scratch *scratch;
    uint32_t *pages;
    uint16_t *kv;   /* [page][layer][K|V] pieces of the prefix, as computed */
    uint16_t *back; /* one layer's K and V, decoded */
    uint8_t *piece;
    float *before, *after; /* logits of a continuation */
    struct tally tallies[KV_LEVELS];
};

static size_t piece_values(const struct bench *b)
{
    return kv_piece_values(&b->shape, KV_BLOCK_TOKENS);
}
static uint16_t *kv_of(const struct bench *b, uint32_t page, uint32_t layer)
{
    return b->kv + 2 * piece_values(b) * ((size_t)page * b->shape.layer_count + layer);
}
static bool wanted(const struct bench *b, size_t level)
{
    return b->options->level_mask >> level & 1;
}

/* ---- forward ----------------------------------------------------------------------------------------------
 */

/* The weights of a model that are quantised matrices, one after another; NULL behind the last. A tied output is not listed. */
static struct weight *matrix_of(struct model *m, uint32_t index)
{
    if (index == 0)
        return &m->embed;
    if (index == 1)
        return &m->output;
    uint32_t layer = (index - 2) / 7;
    if (layer >= m->layers_held)
        return NULL;
    struct model_layer *l = &m->layers[layer];
    struct weight *all[7] = {&l->wq, &l->wk, &l->wv, &l->wo, &l->w_gate, &l->w_up, &l->w_down};
    return all[(index - 2) % 7];
}

static bool must_widen(const struct weight *w)
{
    return w->data && w->rows > 0 && weight_is_quantised(w->type);
}

int bench_codec_widen(struct model *m, float **memory, struct td_error *err)
{
    bool tied = m->output.data == m->embed.data;
    size_t count = 1;
    struct weight *w;
    for (uint32_t i = 0; (w = matrix_of(m, i)); i++)
        if (must_widen(w) && !(tied && i == 1))
            count += (size_t)w->rows * w->columns;
    float *at = *memory = malloc(sizeof *at * count);
    if (!at)
        return td_fail(err, -TD_ERR_NOMEM,
                       "cannot measure the codec: the weights as f32 would take %zu MiB, which there are not",
                       sizeof *at * count >> 20);
    for (uint32_t i = 0; (w = matrix_of(m, i)); i++) {
        if (tied && i == 1)
            m->output = m->embed;
        if (!must_widen(w))
            continue;
        size_t row_size = weight_row_size(w->type, w->columns);
        for (uint32_t r = 0; r < w->rows; r++)
            weight_row_to_f32(w->type, (const uint8_t *)w->data + r * row_size, 0, w->columns,
                              at + (size_t)r * w->columns);
        w->data = at;
        w->type = GGUF_F32;
        at += (size_t)w->rows * w->columns;
    }
    return 0;
}

static int forward(struct bench *b, const int32_t *ids, uint32_t from, uint32_t to, float *logits,
                   struct td_error *err)
{
    for (uint32_t at = from; at < to;) {
        uint32_t count = TD_MIN((uint32_t)CHUNK_TOKENS, to - at);
        struct batch_seq rows = {
            .layer_end = b->shape.layer_count,
            .position = at,
            .row_count = count,
            .ids = ids + at,
            .pages = b->pages,
            .logits = logits ? logits + (size_t)(at - from) * b->model->params.vocab_count : NULL,
            .logit_count = logits ? count : 0,
        };
        int rc = b->backend->ops->forward(b->backend, &(struct batch){&rows, 1});
        if (rc)
            return td_fail(err, rc, "cannot measure the codec: a step failed: %s", td_status_text(rc));
        at += count;
    }
    return 0;
}

/* ---- codec ------------------------------------------------------------------------------------------------
 */

static struct kv_piece_head head_of(const struct bench *b, const struct kv_level *level, uint32_t page,
                                    uint32_t layer, uint8_t is_value)
{
    return (struct kv_piece_head){.codec = level->codec,
                                  .is_value = is_value,
                                  .table = kv_level_table(level, is_value, page),
                                  .quality = {0, (uint8_t)b->backend->ops->numerics, KV_FROM_CLOUD, 0},
                                  .block_index = page,
                                  .token_count = KV_BLOCK_TOKENS,
                                  .layer = (uint16_t)layer,
                                  .kv_head_count = (uint16_t)b->shape.kv_head_count,
                                  .head_dim = (uint16_t)b->shape.head_dim};
}

static int transcode(struct bench *b, struct kv_piece_head *head, const uint16_t *src, uint16_t *dst,
                     struct tally *t)
{
    int64_t size =
        kv_piece_encode(b->scratch, head, src, b->piece, kv_piece_bound(&b->shape, KV_BLOCK_TOKENS));
    if (size < 0)
        return (int)size;
    uint8_t *payload = b->piece + KV_PIECE_HEAD_SIZE;
    if (b->options->spoil)
        b->options->spoil(head, payload);
    t->bytes += (double)size;
    t->values += (double)piece_values(b);
    return kv_piece_decode(b->scratch, head, (struct span){payload, head->payload_size}, dst,
                           piece_values(b));
}

/* Put the prefix's KV, through the codec, back into the pages. */
static int transcode_prefix(struct bench *b, size_t level, uint32_t page_count, struct td_error *err)
{
    size_t n = piece_values(b);
    for (uint32_t page = 0; page < page_count; page++)
        for (uint32_t layer = 0; layer < b->shape.layer_count; layer++) {
            int rc = 0;
            for (uint8_t v = 0; v < 2 && rc >= 0; v++) {
                struct kv_piece_head head = head_of(b, &KV_LEVEL_LIST[level], page, layer, v);
                rc = transcode(b, &head, kv_of(b, page, layer) + v * n, b->back + v * n, &b->tallies[level]);
            }
            if (rc >= 0)
                rc = b->backend->ops->page_write(b->backend, page, layer, KV_BLOCK_TOKENS, b->back,
                                                 b->back + n);
            if (rc < 0)
                return td_fail(err, rc, "cannot measure the codec: layer %u, level %s: %s", layer,
                               KV_LEVEL_LIST[level].name, td_status_text(rc));
        }
    return 0;
}

/* ---- comparison -------------------------------------------------------------------------------------------
 */

struct row_summary {
    uint32_t top;
    double log_sum; /* log of the sum of e^x */
};

static struct row_summary summarise(const float *x, uint32_t count)
{
    struct row_summary r = {0};
    for (uint32_t i = 1; i < count; i++)
        if (x[i] > x[r.top])
            r.top = i;
    double sum = 1; /* e^0 of the largest */
    for (uint32_t i = 0; i < count; i++)
        sum += i == r.top ? 0 : (double)expf(x[i] - x[r.top]);
    r.log_sum = (double)x[r.top] + log(sum);
    return r;
}

static void compare_row(struct tally *t, const float *before, const float *after, uint32_t vocab,
                        int32_t next, double *kl, double *change)
{
    struct row_summary p = summarise(before, vocab), q = summarise(after, vocab);
    double sum = 0, apart = q.log_sum - p.log_sum;
    for (uint32_t i = 0; i < vocab; i++) /* p (log p - log q) */
        sum += (double)expf(before[i] - (float)p.log_sum) * ((double)before[i] - (double)after[i] + apart);
    *kl = sum > 0 ? sum : 0; /* f32 rounding may leave a little below */
    *change += ((double)before[next] - p.log_sum) - ((double)after[next] - q.log_sum);
    t->same_top += p.top == q.top;
}

static int window_measure(struct bench *b, uint32_t index, struct td_error *err)
{
    const struct codec_window *w = &b->windows[index];
    uint32_t end = w->prefix_count + w->count, page_count = w->prefix_count / KV_BLOCK_TOKENS;
    uint32_t vocab = b->model->params.vocab_count;
    size_t n = piece_values(b);
    int rc = forward(b, w->ids, 0, w->prefix_count, NULL, err);
    rc = rc ? rc : forward(b, w->ids, w->prefix_count, end, b->before, err);
    for (uint32_t page = 0; page < page_count && !rc; page++)
        for (uint32_t layer = 0; layer < b->shape.layer_count && !rc; layer++)
            rc = b->backend->ops->page_read(b->backend, page, layer, KV_BLOCK_TOKENS, kv_of(b, page, layer),
                                            kv_of(b, page, layer) + n);
    for (size_t level = 0; level < KV_LEVELS && !rc; level++) {
        struct tally *t = &b->tallies[level];
        if (!wanted(b, level))
            continue;
        rc = transcode_prefix(b, level, page_count, err);
        rc = rc ? rc : forward(b, w->ids, w->prefix_count, end, b->after, err);
        for (uint32_t row = 0; row + 1 < w->count && !rc; row++)
            compare_row(t, b->before + (size_t)row * vocab, b->after + (size_t)row * vocab, vocab,
                        w->ids[w->prefix_count + row + 1], &t->kl[b->rows + row], &t->change[index]);
    }
    b->rows += w->count - 1;
    return rc;
}

/* ---- rates ------------------------------------------------------------------------------------------------
 */

/* Encode and decode what the last window left in b->kv, on this thread alone. */
static int measure_rates(struct bench *b, size_t level, struct kv_level_quality *q)
{
    uint32_t pieces = TD_MIN(2 * b->shape.layer_count, (uint32_t)SPEED_PIECES_MAX);
    size_t n = piece_values(b), bound = kv_piece_bound(&b->shape, KV_BLOCK_TOKENS);
    uint8_t *wire = malloc(pieces * bound);
    struct kv_piece_head *heads = calloc(pieces, sizeof *heads);
    int64_t rc = wire && heads ? 0 : -TD_ERR_NOMEM;
    uint64_t encode_us = UINT64_MAX, decode_us = UINT64_MAX;
    for (int round = 0; round < SPEED_ROUNDS && rc >= 0; round++) {
        uint64_t start = clock_mono_us();
        for (uint32_t i = 0; i < pieces && rc >= 0; i++) {
            heads[i] = head_of(b, &KV_LEVEL_LIST[level], 1, i / 2, i % 2);
            rc = kv_piece_encode(b->scratch, &heads[i], b->kv + i * n, wire + i * bound, bound);
        }
        encode_us = TD_MIN(encode_us, clock_mono_us() - start);
        start = clock_mono_us();
        for (uint32_t i = 0; i < pieces && rc >= 0; i++)
            rc = kv_piece_decode(b->scratch, &heads[i],
                                 (struct span){wire + i * bound + KV_PIECE_HEAD_SIZE, heads[i].payload_size},
                                 b->back, n);
        decode_us = TD_MIN(decode_us, clock_mono_us() - start);
    }
    q->encode_gb_s = 2e-3 * (double)(pieces * n) / (double)TD_MAX(encode_us, 1u);
    q->decode_gb_s = 2e-3 * (double)(pieces * n) / (double)TD_MAX(decode_us, 1u);
    free(heads);
    free(wire);
    return rc < 0 ? (int)rc : 0;
}

/* ---- summary ----------------------------------------------------------------------------------------------
 */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void summarise_level(const struct bench *b, struct tally *t, struct kv_level_quality *q)
{
    double rows = (double)b->rows, kl = 0, change = 0, spread = 0, windows = b->window_count;
    for (uint64_t i = 0; i < b->rows; i++)
        kl += t->kl[i];
    for (uint32_t w = 0; w < b->window_count; w++)
        change += t->change[w];
    double mean = change / rows;
    for (uint32_t w = 0; w < b->window_count; w++) {
        double off = t->change[w] - mean * (double)(b->windows[w].count - 1);
        spread += off * off;
    }
    double error = windows > 1 ? sqrt(spread * windows / (windows - 1)) / rows : INFINITY;
    qsort(t->kl, b->rows, sizeof *t->kl, compare_doubles);
    q->known = true;
    q->kl_mean = kl / rows;
    q->kl_p99 = t->kl[(uint64_t)((rows - 1) * 0.99)];
    q->top1 = (double)t->same_top / rows;
    q->ppl_change = expm1(mean);
    q->ppl_change_low = expm1(mean - CONFIDENCE * error);
    q->ppl_change_high = expm1(mean + CONFIDENCE * error);
    q->bits_per_value = 8 * t->bytes / t->values;
}

static int bench_begin(struct bench *b, struct td_error *err)
{
    uint32_t tokens_max = 0, prefix_max = 0;
    uint64_t rows = 0;
    for (uint32_t w = 0; w < b->window_count; w++) {
        const struct codec_window *window = &b->windows[w];
        if (window->prefix_count == 0 || window->prefix_count % KV_BLOCK_TOKENS || window->count < 2)
            return td_fail(err, -TD_ERR_ARG, "cannot measure the codec: a window of %u + %u tokens",
                           window->prefix_count, window->count);
        tokens_max = TD_MAX(tokens_max, window->prefix_count + window->count);
        prefix_max = TD_MAX(prefix_max, window->prefix_count);
        b->rows_max = TD_MAX(b->rows_max, window->count);
        rows += window->count - 1;
    }
    b->page_count = tokens_max / KV_BLOCK_TOKENS + 1;
    const struct backend_config config = {.page_count = b->page_count,
                                          .layers_paged = b->shape.layer_count,
                                          .threads = b->options->threads,
                                          .rows_max = CHUNK_TOKENS};
    size_t logits = (size_t)b->rows_max * b->model->params.vocab_count, n = piece_values(b);
    b->scratch = kv_codec_scratch_create(&b->shape);
    b->pages = calloc(b->page_count, sizeof *b->pages);
    b->kv = calloc(2 * n * b->shape.layer_count, sizeof *b->kv * (prefix_max / KV_BLOCK_TOKENS));
    b->back = calloc(2 * n, sizeof *b->back);
    b->piece = malloc(kv_piece_bound(&b->shape, KV_BLOCK_TOKENS));
    b->before = calloc(logits, sizeof *b->before);
    b->after = calloc(logits, sizeof *b->after);
    bool good = b->scratch && b->pages && b->kv && b->back && b->piece && b->before && b->after;
    for (size_t i = 0; i < KV_LEVELS && good; i++) {
        b->tallies[i].kl = calloc(rows, sizeof(double));
        b->tallies[i].change = calloc(b->window_count, sizeof(double));
        good = b->tallies[i].kl && b->tallies[i].change;
    }
    if (!good)
        return td_fail(err, -TD_ERR_NOMEM, "cannot measure the codec: out of memory");
    for (uint32_t i = 0; i < b->page_count; i++)
        b->pages[i] = i;
    return cpu_backend_create(b->model, &config, &b->backend, err);
}

static void bench_end(struct bench *b)
{
    if (b->backend)
        b->backend->ops->destroy(b->backend);
    for (size_t i = 0; i < KV_LEVELS; i++) {
        free(b->tallies[i].change);
        free(b->tallies[i].kl);
    }
    free(b->after);
    free(b->before);
    free(b->piece);
    free(b->back);
    free(b->kv);
    free(b->pages);
    kv_codec_scratch_destroy(b->scratch);
}

int bench_codec(const struct model *m, const struct codec_window *windows, uint32_t window_count,
                const struct bench_codec_options *options, struct kv_record *out, struct td_error *err)
{
    struct bench b = {.model = m,
                      .windows = windows,
                      .options = options,
                      .window_count = window_count,
                      .shape = model_kv_shape(m)};
    if (m->layers_held < m->params.layer_count)
        return td_fail(err, -TD_ERR_UNSUPPORTED, "cannot measure the codec on a slice; use the whole model");
    if (window_count == 0)
        return td_fail(err, -TD_ERR_ARG, "cannot measure the codec without text");
    int rc = bench_begin(&b, err);
    for (uint32_t w = 0; w < window_count && !rc; w++) {
        if (options->progress)
            options->progress(options->progress_ctx, w, window_count);
        rc = window_measure(&b, w, err);
    }
    if (options->progress)
        options->progress(options->progress_ctx, window_count, window_count);
    for (size_t level = 0; level < KV_LEVELS && !rc; level++)
        if (wanted(&b, level)) {
            summarise_level(&b, &b.tallies[level], &out->levels[level]);
            rc = measure_rates(&b, level, &out->levels[level]);
        }
    out->token_count = b.rows;
    bench_end(&b);
    return rc;
}
