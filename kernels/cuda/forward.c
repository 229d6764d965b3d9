/* forward: one step of the CUDA backend.
 *
 * For each pass: its lists to the device, then on one stream
 *   x = embedding | hidden_in
 *   layer:  act = norm(x);  wide = act * [q k v];  q, pages = rope(wide);  act = attention(q, pages);  x += act * o
 *           act = norm(x);  wide = act * [gate up];  act = swiglu(wide);  x += act * down
 *   logits = norm(x) * output, LOGIT_ROWS at a time; hidden_out = x
 * With up to step_rows decode rows all layers are one kernel (step.cu), where the weights are of one kind; with few rows, up to
 * CUDA_STREAM_ROWS of 16-bit weights on sm_90a, gate, up and SwiGLU are one. Decode steps of one shape are recorded as a graph the second
 * time they are seen, and replayed: what changes from step to step is read from the lists.
 *
 * In the last layer only rows that somebody wants go on behind K and V: they are gathered into x_kept. */
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/det_kernels.h"
#include "kernels/cuda/kv_8bit.h"
#include "kernels/batch.h"
#include "kernels/sampler.h"
#include "shared/log.h"
#include <math.h>

#define LOG2_E          1.4426950408889634f
#define RECORD_AGAIN_US 5000000 /* after there was no memory for a recorded step */

/* --- products --------------------------------------------------------------------------------- */

static bool is_opened(const struct cuda_matrix *m, bool bf16)
{
    return !(m->form == CUDA_F16 || (m->form == CUDA_BF16 && bf16));
}

static void product_few(struct cuda_backend *b, struct cuda_product p, uint32_t rows)
{
    uint32_t width = p.epilogue == CUDA_ADD_F32 || p.epilogue == CUDA_STORE_F32 ? 4 : 2;
    for (uint32_t first = 0; first < rows; first += CUDA_MATVEC_ROWS) {
        p.rows = TD_MIN((uint32_t)CUDA_MATVEC_ROWS, rows - first);
        cuda_matvec(b->stream, &p);
        p.act = (const uint8_t *)p.act + (size_t)2 * CUDA_MATVEC_ROWS * p.act_stride;
        p.out = (uint8_t *)p.out + (size_t)width * CUDA_MATVEC_ROWS * p.out_stride;
    }
}

/* Weights that are not of act's kind are opened to f16 in `scratch`, as many rows as it holds at a time. */
static int product_many(struct cuda_backend *b, const struct cuda_product *p, uint32_t rows)
{
    uint32_t width = p->epilogue == CUDA_ADD_F32 || p->epilogue == CUDA_STORE_F32 ? 4 : 2;
    bool opened = is_opened(&p->m, p->act_bf16);
    uint32_t step =
        opened ? (uint32_t)TD_MIN((uint64_t)p->m.rows, b->scratch_rows_size / (2 * (uint64_t)p->m.columns))
               : p->m.rows;
    for (uint32_t first = 0; first < p->m.rows; first += step) {
        struct blas_product q = {.w = opened ? b->scratch : p->m.values,
                                 .act = p->act,
                                 .out = (uint8_t *)p->out + (size_t)width * first,
                                 .rows = rows,
                                 .n = TD_MIN(step, p->m.rows - first),
                                 .k = p->m.columns,
                                 .act_stride = p->act_stride,
                                 .out_stride = p->out_stride,
                                 .bf16 = p->act_bf16,
                                 .out_f32 = width == 4,
                                 .add = p->epilogue == CUDA_ADD_F32};
        if (opened)
            cuda_dequantise(b->stream, &p->m, first, q.n, b->scratch);
        const char *why = blas_run(b->blas, &q);
        if (why)
            return cuda_failed(b, -TD_ERR_INTERNAL, "multiplying by cuBLASLt", why);
    }
    return 0;
}

/* For cuda-det-v2: nothing depends on how many rows there are. */
static void product_fixed(struct cuda_backend *b, struct cuda_product p, uint32_t rows)
{
    struct cuda_det_buffers buffers = {b->scratch, b->scratch_rows_size, b->det_act};
    p.rows = rows;
    cuda_det_product(b->stream, &p, &buffers);
}

static bool few_rows(const struct cuda_backend *b, const struct cuda_group *g, uint32_t rows)
{
    return rows <= (is_opened(&g->m[0], g->bf16) ? CUDA_MATVEC_ROWS : b->matvec_rows_16);
}

/* p.m times p.act by what is fastest for so many rows. */
static int product_fast(struct cuda_backend *b, struct cuda_product p, uint32_t rows, bool few)
{
    p.rows = rows;
    if (!few && rows <= CUDA_STREAM_ROWS && cuda_product_hopper(b->stream, &p, 0))
        return 0;
    if (!few && b->blas)
        return product_many(b, &p, rows);
    product_few(b, p, rows);
    return 0;
}

/* act[rows][g's columns] times each matrix of g, side by side in rows of out. */
static int product(struct cuda_backend *b, const struct cuda_group *g, const void *act, uint32_t rows,
                   enum cuda_epilogue epilogue, void *out, uint32_t out_stride)
{
    uint32_t width = epilogue == CUDA_ADD_F32 || epilogue == CUDA_STORE_F32 ? 4 : 2;
    int rc = 0;
    for (uint32_t i = 0; i < g->count && !rc; i++) {
        struct cuda_product p = {.m = g->m[i],
                                 .act = act,
                                 .act_bf16 = g->bf16,
                                 .act_stride = g->m[i].columns,
                                 .epilogue = epilogue,
                                 .out = out,
                                 .out_stride = out_stride};
        if (b->deterministic)
            product_fixed(b, p, rows);
        else
            rc = product_fast(b, p, rows, few_rows(b, g, rows));
        out = (uint8_t *)out + (size_t)width * g->m[i].rows;
    }
    return rc;
}

/* --- a layer ---------------------------------------------------------------------------------- */

static struct cuda_attention attention_of(const struct cuda_backend *b, const struct cuda_layer *l,
                                          const void *q, const uint8_t *kv)
{
    const struct model_params *p = &b->base.model->params;
    return (struct cuda_attention){.q = q,
                                   .out = b->act,
                                   .out_bf16 = l->o.bf16,
                                   .head_count = p->head_count,
                                   .kv_head_count = p->kv_head_count,
                                   .head_dim = p->head_dim,
                                   .kv = kv,
                                   .page_values = b->page_values,
                                   .dtype = b->base.kv_dtype,
                                   .tables = cuda_staged(b, b->pass.tables),
                                   .old_pages = b->pass.row_count == b->pass.seq_count,
                                   .fixed_splits = b->deterministic};
}

static struct cuda_rope rope_of(const struct cuda_backend *b, const struct cuda_layer *l, uint8_t *kv)
{
    const struct model_params *p = &b->base.model->params;
    const struct cuda_pass *s = &b->pass;
    return (struct cuda_rope){.wide = b->wide,
                              .bf16 = l->qkv.bf16,
                              .rows = s->row_count,
                              .head_count = p->head_count,
                              .kv_head_count = p->kv_head_count,
                              .head_dim = p->head_dim,
                              .rope_dim = p->rope_dim,
                              .interleaved = p->rope_kind == ROPE_INTERLEAVED,
                              .norm_eps = p->norm_eps,
                              .q_scale = LOG2_E / sqrtf((float)p->head_dim),
                              .cos_sin = b->cos_sin,
                              .q_bias = l->q_bias,
                              .k_bias = l->k_bias,
                              .v_bias = l->v_bias,
                              .q_norm = l->q_norm,
                              .k_norm = l->k_norm,
                              .positions = cuda_staged(b, s->positions),
                              .row_table = cuda_staged(b, s->row_table),
                              .tables = cuda_staged(b, s->tables),
                              .q_out = b->q,
                              .kv = kv,
                              .page_values = b->page_values,
                              .dtype = b->base.kv_dtype};
}

/* Are RoPE and the KV write part of attention? Where each sequence has one row, and every layer runs them all; and while blocks have one
 * of them each: with 64 rows it gains nothing, with 128 it costs 2 to 4 % of the step. */
static bool attention_turns(const struct cuda_backend *b)
{
    const struct cuda_pass *s = &b->pass;
    const struct model_params *p = &b->base.model->params;
    return !b->deterministic && !cuda_is_8bit(b) && s->row_count == s->seq_count && s->keeps_all &&
           s->all.tile_count == 0 &&
           s->row_count * p->kv_head_count <=
               cuda_attention_ring_blocks(p->head_dim, p->head_count / p->kv_head_count);
}

/* Tiles read f16: 8-bit pages are opened for them, as many at a time as there is room for. */
static void attend_tiles(struct cuda_backend *b, const struct cuda_work *w, struct cuda_attention a)
{
    const struct cuda_tile *tiles = cuda_staged(b, w->tiles);
    struct cuda_kept k = {.dtype = a.dtype,
                          .kv_head_count = a.kv_head_count,
                          .head_dim = a.head_dim,
                          .kept = (void *)(uintptr_t)a.kv,
                          .stride = a.page_values};
    if (!cuda_is_8bit(b)) {
        cuda_attention_prefill(b->stream, &a, tiles, w->tile_count);
        return;
    }
    a.dtype = KV_DTYPE_F16, a.kv = b->opened, a.tables = cuda_staged(b, w->opened);
    a.page_values = (uint64_t)2 * cuda_kv_size(&b->base.model->params) * KV_BLOCK_TOKENS;
    for (const struct cuda_turn *t = w->turns; t < w->turns + w->turn_count; t++) {
        k.list = (const uint32_t *)cuda_staged(b, w->closed) + t->first_page;
        cuda_open_pages(b->stream, &k, t->page_count, b->opened);
        cuda_attention_prefill(b->stream, &a, tiles + t->first_tile, t->tile_count);
    }
}

static void attend(struct cuda_backend *b, const struct cuda_layer *l, const struct cuda_work *w,
                   const void *q, uint8_t *kv)
{
    struct cuda_attention a = attention_of(b, l, q, kv);
    struct cuda_rope rope = rope_of(b, l, kv);
    if (attention_turns(b)) {
        cuda_attention_fresh(b->stream, &rope, &a, cuda_staged(b, w->splits), w->split_grid, b->partial,
                             b->counters);
        return;
    }
    if (w->split_grid && b->deterministic)
        cuda_det_attention(b->stream, &a, cuda_staged(b, w->splits), w->split_grid, b->partial, b->counters);
    else if (w->split_grid)
        cuda_attention_decode(b->stream, &a, cuda_staged(b, w->splits), w->split_grid, b->partial,
                              b->counters);
    if (w->tile_count)
        attend_tiles(b, w, a);
}

/* norm, q, k and v, RoPE and the KV write: for all rows. */
static int make_kv(struct cuda_backend *b, const struct cuda_layer *l, uint8_t *kv)
{
    const struct model_params *p = &b->base.model->params;
    const struct cuda_pass *s = &b->pass;
    cuda_norm(b->stream, b->x, NULL, l->attn_norm, p->norm_eps, s->row_count, p->embd_size, l->qkv.bf16,
              b->act);
    cuda_profile_mark(b, CUDA_PART_OTHER);
    int rc = product(b, &l->qkv, b->act, s->row_count, CUDA_STORE16, b->wide, l->qkv.rows);
    if (rc)
        return rc;
    cuda_profile_mark(b, CUDA_PART_PRODUCTS);
    if (attention_turns(b))
        return 0;
    struct cuda_rope rope = rope_of(b, l, kv);
    cuda_rope_write(b->stream, &rope);
    cuda_profile_mark(b, CUDA_PART_OTHER);
    return 0;
}

/* wide = swiglu(act * [gate up]) in one kernel. False: there is none for this; nothing was started. */
static bool gate_up_fused(struct cuda_backend *b, const struct cuda_layer *l, uint32_t rows)
{
    struct cuda_product p = {.m = l->gate_up.m[0],
                             .act = b->act,
                             .act_bf16 = l->gate_up.bf16,
                             .rows = rows,
                             .act_stride = l->gate_up.m[0].columns,
                             .epilogue = CUDA_SWIGLU16,
                             .out = b->wide,
                             .out_stride = l->down.m[0].columns};
    if (b->deterministic || l->gate_up.count != 1 || l->gate_up.bf16 != l->down.bf16)
        return false;
    if (!few_rows(b, &l->gate_up, rows))
        return rows <= CUDA_STREAM_ROWS && cuda_product_hopper(b->stream, &p, 0);
    cuda_matvec(b->stream, &p);
    return true;
}

static int feed_forward(struct cuda_backend *b, const struct cuda_layer *l, float *x, uint32_t rows)
{
    const struct model_params *p = &b->base.model->params;
    cuda_norm(b->stream, x, NULL, l->ffn_norm, p->norm_eps, rows, p->embd_size, l->gate_up.bf16, b->act);
    cuda_profile_mark(b, CUDA_PART_OTHER);
    if (gate_up_fused(b, l, rows))
        return product(b, &l->down, b->wide, rows, CUDA_ADD_F32, x, p->embd_size);
    int rc = product(b, &l->gate_up, b->act, rows, CUDA_STORE16, b->wide, 2 * p->ffn_size);
    if (rc)
        return rc;
    cuda_profile_mark(b, CUDA_PART_PRODUCTS);
    cuda_swiglu(b->stream, b->wide, rows, p->ffn_size, l->gate_up.bf16, l->down.bf16, b->act);
    cuda_profile_mark(b, CUDA_PART_OTHER);
    return product(b, &l->down, b->act, rows, CUDA_ADD_F32, x, p->embd_size);
}

static int run_layer(struct cuda_backend *b, uint32_t index)
{
    const struct model_params *p = &b->base.model->params;
    const struct cuda_layer *l = &b->layers[index];
    const struct cuda_pass *s = &b->pass;
    uint8_t *kv = b->pages + index * cuda_layer_size(b);
    bool cuts = index + 1 == s->layer_end && !s->keeps_all;
    uint32_t rows = cuts ? s->kept_count : s->row_count;
    float *x = cuts ? b->x_kept : b->x;
    const void *q = b->q;
    int rc = make_kv(b, l, kv);
    if (rc || rows == 0)
        return rc;
    if (cuts) {
        const uint32_t *kept = cuda_staged(b, s->kept);
        cuda_gather(b->stream, b->x, kept, rows, 4 * p->embd_size, b->x_kept);
        cuda_gather(b->stream, b->q, kept, rows, 2 * cuda_q_size(p), b->wide);
        q = b->wide;
    }
    attend(b, l, cuts ? &s->last : &s->all, q, kv);
    cuda_profile_mark(b, CUDA_PART_ATTENTION);
    if ((rc = product(b, &l->o, b->act, rows, CUDA_ADD_F32, x, p->embd_size)))
        return rc;
    cuda_profile_mark(b, CUDA_PART_PRODUCTS);
    rc = feed_forward(b, l, x, rows);
    cuda_profile_mark(b, CUDA_PART_PRODUCTS);
    return rc;
}

/* --- the two ends ----------------------------------------------------------------------------- */

static float *last_x(const struct cuda_backend *b)
{
    const struct cuda_pass *s = &b->pass;
    return s->keeps_all ? b->x : b->x_kept;
}

static struct cuda_step step_of(const struct cuda_backend *b)
{
    const struct model_params *p = &b->base.model->params;
    struct cuda_step a = {.layers = b->step_layers,
                          .layer_count = p->layer_count,
                          .rows = b->pass.row_count,
                          .embd = p->embd_size,
                          .ffn = p->ffn_size,
                          .x = b->x,
                          .rope = rope_of(b, &b->layers[0], b->pages),
                          .attention = attention_of(b, &b->layers[0], NULL, b->pages),
                          .splits = cuda_staged(b, b->pass.all.splits),
                          .split_grid = b->pass.all.split_grid,
                          .letters = b->letters,
                          .letters_size = b->letters_size};
    return a;
}

static bool is_form(const struct cuda_group *g, enum cuda_form form)
{
    return g->count == 1 && g->m[0].form == form && g->bf16 == (form == CUDA_BF16);
}

bool cuda_step_possible(struct cuda_backend *b)
{
    const struct model_params *p = &b->base.model->params;
    enum cuda_form form = b->layers[0].qkv.m[0].form;
    for (uint32_t i = 0; i < b->base.layers_paged; i++) {
        const struct cuda_layer *l = &b->layers[i];
        if (!is_form(&l->qkv, form) || !is_form(&l->o, form) || !is_form(&l->gate_up, form) ||
            !is_form(&l->down, form))
            return false;
    }
    struct cuda_step a = {
        .rows = 1,
        .embd = p->embd_size,
        .ffn = p->ffn_size,
        .rope = {.head_count = p->head_count, .kv_head_count = p->kv_head_count, .head_dim = p->head_dim}};
    return b->base.layers_paged == p->layer_count &&
           cuda_step_run(b->stream, form, form == CUDA_BF16, &a, (uint32_t)b->sm_count, true);
}

/* All layers in one kernel: one row a sequence, all of them wanted. */
static bool try_step(struct cuda_backend *b)
{
    const struct cuda_pass *s = &b->pass;
    if (!b->step_layers || s->row_count > b->step_rows || s->row_count != s->seq_count || !s->keeps_all ||
        s->layer_begin != 0 || s->layer_end != b->base.model->params.layer_count)
        return false;
    const struct cuda_group *g = &b->layers[0].qkv;
    struct cuda_step a = step_of(b);
    return cuda_step_run(b->stream, g->m[0].form, g->bf16, &a, (uint32_t)b->sm_count, false);
}

/* Everything from the ids (or x, when hidden states came in) to x behind the last layer. */
static int enqueue_layers(struct cuda_backend *b)
{
    const struct model_params *p = &b->base.model->params;
    const struct cuda_pass *s = &b->pass;
    if (s->layer_begin == 0)
        cuda_embed(b->stream, &b->embed, cuda_staged(b, s->ids), s->row_count, b->x);
    cuda_angles(b->stream, cuda_staged(b, s->positions), b->frequencies, s->row_count, p->rope_dim / 2,
                b->cos_sin);
    int rc = 0;
    cuda_profile_mark(b, CUDA_PART_OTHER);
    if (try_step(b)) {
        cuda_profile_mark(b, CUDA_PART_LAYERS);
        return 0;
    }
    for (uint32_t i = s->layer_begin; i < s->layer_end && !rc; i++)
        rc = run_layer(b, i);
    return rc;
}

/* Logits of `count` of the pass's logit rows, into io; drawn tokens into sampled. */
static int enqueue_logits(struct cuda_backend *b, uint32_t first, uint32_t count)
{
    const struct model_params *p = &b->base.model->params;
    const uint32_t *rows = cuda_staged(b, b->pass.logit_rows);
    cuda_norm(b->stream, last_x(b), rows + first, b->output_norm, p->norm_eps, count, p->embd_size,
              b->head.bf16, b->act);
    cuda_profile_mark(b, CUDA_PART_OTHER);
    int rc = product(b, &b->head, b->act, count, CUDA_STORE_F32, b->logits, p->vocab_count);
    if (rc)
        return rc;
    cuda_profile_mark(b, CUDA_PART_PRODUCTS);
    if (b->pass.sample_count > 0) {
        cuda_sample_rows(b->stream, (struct cuda_sample *)cuda_staged(b, b->pass.samples) + first,
                         b->stage_device, b->logits, count, p->vocab_count, b->sampled);
        cuda_profile_mark(b, CUDA_PART_SAMPLING);
    }
    if (b->pass.sample_count == b->pass.logit_count)
        return 0;
    return cuda_note(b,
                     cudaMemcpyAsync(b->io, b->logits, sizeof(float) * count * p->vocab_count,
                                     cudaMemcpyDeviceToHost, b->stream),
                     "copying logits");
}

static int finish(struct cuda_backend *b)
{
    cuda_profile_mark(b, CUDA_PART_COPIES);
    int rc = cuda_note(b, cuda_launch_error(), "launching kernels");
    return rc ? rc : cuda_note(b, cudaStreamSynchronize(b->stream), "computing");
}

static void hand_out_sample(const struct sample_request *r, const struct cuda_sampled *from)
{
    struct sampled *out = r->out;
    *out = (struct sampled){.id = from->id, .logprob = from->logprob};
    if (!r->params->want_logprobs)
        return;
    out->top_count = r->params->logprob_count;
    for (uint32_t i = 0; i < out->top_count; i++)
        out->top[i] = (struct sampler_logprob){from->top_id[i], from->top_logprob[i]};
}

struct hand_out {
    const struct cuda_backend *b;
    float *to[LOGIT_ROWS];
};

static void hand_out_row(void *ctx, size_t row, unsigned worker)
{
    (void)worker;
    const struct hand_out *h = ctx;
    size_t size = sizeof(float) * h->b->base.model->params.vocab_count;
    if (h->to[row])
        memcpy(h->to[row], h->b->io + size * row, size);
}

/* Logit rows [first, first + count) from io to the sequences. One thread copies 8 GB/s: 32 rows of 128,256 would take it 2 ms. */
static void hand_out_logits(struct cuda_backend *b, uint32_t first, uint32_t count)
{
    struct hand_out h = {.b = b};
    uint32_t row = 0;
    for (uint32_t i = 0; i < b->pass.seq_count; i++) {
        const struct batch_seq *s = b->pass.seqs[i];
        for (uint32_t r = 0; r < s->logit_count; r++, row++)
            if (row >= first && row < first + count && s->sample) {
                s->sample->status = b->sampled[row - first].id < 0 ? -TD_ERR_FORMAT : 0;
                hand_out_sample(s->sample, &b->sampled[row - first]);
            } else if (row >= first && row < first + count) {
                h.to[row - first] = s->logits + (size_t)r * b->base.model->params.vocab_count;
            }
    }
    if (b->pass.sample_count < b->pass.logit_count)
        workers_run(b->workers, count, hand_out_row, &h);
}

static int take_hidden_in(struct cuda_backend *b)
{
    const struct cuda_pass *s = &b->pass;
    size_t row_size = sizeof(float) * b->base.model->params.embd_size, at = 0;
    for (uint32_t i = 0; i < s->seq_count; i++) {
        memcpy(b->io + at, s->seqs[i]->hidden_in, row_size * s->seqs[i]->row_count);
        at += row_size * s->seqs[i]->row_count;
    }
    return cuda_note(b, cudaMemcpyAsync(b->x, b->io, at, cudaMemcpyHostToDevice, b->stream),
                     "copying hidden states");
}

/* A sequence with hidden_out keeps all of its rows; the others' kept rows lie between. */
static int hand_out_hidden(struct cuda_backend *b)
{
    const struct cuda_pass *s = &b->pass;
    size_t row_size = sizeof(float) * b->base.model->params.embd_size, at = 0;
    bool cut = last_x(b) != b->x;
    uint32_t rows = cut ? s->kept_count : s->row_count;
    int rc =
        cuda_note(b, cudaMemcpyAsync(b->io, last_x(b), row_size * rows, cudaMemcpyDeviceToHost, b->stream),
                  "copying hidden states");
    if (rc || (rc = finish(b)))
        return rc;
    for (uint32_t i = 0; i < s->seq_count; i++) {
        const struct batch_seq *q = s->seqs[i];
        uint32_t here = !cut || q->hidden_out ? q->row_count : q->logit_count;
        if (q->hidden_out)
            memcpy(q->hidden_out, b->io + at, row_size * q->row_count);
        at += row_size * here;
    }
    return 0;
}

/* --- recorded steps --------------------------------------------------------------------------- */

static bool is_plain_decode(const struct cuda_backend *b)
{
    const struct cuda_pass *s = &b->pass;
    return s->layer_begin == 0 && s->layer_end == b->base.model->params.layer_count &&
           s->row_count == s->seq_count && s->logit_count == s->row_count && !s->has_hidden_out &&
           s->row_count <= GRAPH_ROWS &&
           !(cuda_is_8bit(b) && s->all.tile_count > 0); /* what is opened changes from step to step */
}

static int enqueue_plain(struct cuda_backend *b)
{
    int rc = enqueue_layers(b);
    if (!rc)
        rc = enqueue_logits(b, 0, b->pass.logit_count);
    return rc ? rc : cuda_note(b, cuda_launch_error(), "launching kernels");
}

/* Of the pass; NULL: it is seen for the first time. */
static struct cuda_graph *known_graph(struct cuda_backend *b)
{
    for (struct cuda_graph *g = b->graphs; g < b->graphs + GRAPHS; g++)
        if (g->rows == b->pass.row_count && g->split_grid == b->pass.all.split_grid &&
            g->sample_count == b->pass.sample_count)
            return g;
    return NULL;
}

static struct cuda_graph *find_graph(struct cuda_backend *b)
{
    struct cuda_graph *oldest = &b->graphs[0], *known = known_graph(b);
    if (known)
        return known;
    for (struct cuda_graph *g = b->graphs; g < b->graphs + GRAPHS; g++)
        if (g->used_at < oldest->used_at)
            oldest = g;
    if (oldest->exec) {
        cudaGraphExecDestroy(oldest->exec);
        b->record_at_us = TD_MIN(b->record_at_us, (uint64_t)1); /* there may be room for another now */
    }
    *oldest = (struct cuda_graph){0};
    return oldest;
}

/* Others have taken the memory that was left: steps go without. Said once, until one is recorded again. */
static void put_off_recording(struct cuda_backend *b, struct cuda_graph *g)
{
    g->exec = NULL;
    if (b->record_at_us == 0)
        log_warn(
            "cuda",
            "cuda:%d has no memory left to record steps: they go kernel by kernel, which is slower; leave it "
            "more (--gpu-memory-utilization)",
            b->device);
    b->record_at_us = clock_mono_us() + RECORD_AGAIN_US;
}

/* g->exec is NULL still where the device has no memory for it. */
static int record(struct cuda_backend *b, struct cuda_graph *g)
{
    cudaGraph_t graph = NULL;
    int rc =
        cuda_note(b, cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal), "recording a step");
    if (rc)
        return rc;
    rc = enqueue_plain(b);
    cudaError_t ended = cudaStreamEndCapture(b->stream, &graph);
    if (!rc)
        rc = cuda_note(b, ended, "recording a step");
    cudaError_t made = rc ? cudaSuccess : cudaGraphInstantiate(&g->exec, graph, 0);
    if (made == cudaErrorMemoryAllocation)
        put_off_recording(b, g);
    else if (!rc && !(rc = cuda_note(b, made, "recording a step")))
        b->record_at_us = 0;
    if (graph)
        cudaGraphDestroy(graph);
    return rc;
}

/* The whole step up to the logits in io. */
static int enqueue_decode(struct cuda_backend *b)
{
    struct cuda_graph *g = find_graph(b);
    g->used_at = ++b->graph_clock;
    if (g->rows ==
        0) { /* seen for the first time: libraries set themselves up here, which cannot be recorded */
        g->rows = b->pass.row_count, g->split_grid = b->pass.all.split_grid,
        g->sample_count = b->pass.sample_count;
        return enqueue_plain(b);
    }
    if (!g->exec && b->record_at_us > 0 && clock_mono_us() < b->record_at_us)
        return enqueue_plain(b);
    int rc = g->exec ? 0 : record(b, g);
    if (!rc && !g->exec)
        return enqueue_plain(b);
    return rc ? rc : cuda_note(b, cudaGraphLaunch(g->exec, b->stream), "starting a step");
}

double cuda_replay_ms(struct backend *base, uint32_t count)
{
    struct cuda_backend *b = (struct cuda_backend *)base;
    const struct cuda_graph *g = b->last_graph;
    cudaEvent_t begin = NULL, end = NULL;
    float ms = 0;
    bool ok = g && g->exec && count > 0 && !cudaEventCreate(&begin) && !cudaEventCreate(&end) &&
              !cudaGraphLaunch(g->exec, b->stream) && !cudaEventRecord(begin, b->stream);
    for (uint32_t i = 0; ok && i < count; i++)
        ok = !cudaGraphLaunch(g->exec, b->stream);
    ok = ok && !cudaEventRecord(end, b->stream) && !cudaStreamSynchronize(b->stream) &&
         !cudaEventElapsedTime(&ms, begin, end);
    if (begin)
        cudaEventDestroy(begin);
    if (end)
        cudaEventDestroy(end);
    return ok ? (double)ms / count : 0;
}

/* --- the step --------------------------------------------------------------------------------- */

static int run_pass(struct cuda_backend *b)
{
    const struct cuda_pass *s = &b->pass;
    bool looks = cuda_profile_begin(b);
    b->last_graph = is_plain_decode(b) ? known_graph(b) : NULL;
    int rc = cuda_note(
        b, cudaMemcpyAsync(b->stage_device, b->stage, s->stage_size, cudaMemcpyHostToDevice, b->stream),
        "copying a step's lists");
    if (!rc && !looks && is_plain_decode(b)) {
        if ((rc = enqueue_decode(b)) || (rc = finish(b)))
            return rc;
        hand_out_logits(b, 0, s->logit_count);
        return 0;
    }
    if (!rc && s->layer_begin > 0)
        rc = take_hidden_in(b);
    cuda_profile_mark(b, CUDA_PART_COPIES);
    if (rc || (rc = enqueue_layers(b)))
        return rc;
    for (uint32_t first = 0; first < s->logit_count; first += LOGIT_ROWS) {
        uint32_t count = TD_MIN((uint32_t)LOGIT_ROWS, s->logit_count - first);
        if ((rc = enqueue_logits(b, first, count)) || (rc = finish(b)))
            return rc;
        hand_out_logits(b, first, count);
    }
    if (s->has_hidden_out)
        return hand_out_hidden(b);
    return finish(b);
}

int cuda_forward(struct backend *base, const struct batch *batch)
{
    struct cuda_backend *b = (struct cuda_backend *)base;
    bool done[BATCH_SEQS_MAX] = {false};
    if (cuda_code(b))
        return cuda_code(b);
    int rc = batch_check(&b->base, b->rows_max, b->has_head, batch);
    if (rc || (rc = cuda_note(b, cudaSetDevice(b->device), "choosing the device")))
        return rc;
    cuda_profile_step(b->profiler, true);
    while (!rc && cuda_pass_next(b, batch, done)) {
        rc = run_pass(b);
        cuda_profile_end(b);
    }
    cuda_profile_step(b->profiler, false);
    return rc;
}
