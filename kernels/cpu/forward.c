/* forward: one step of the CPU backend: embed, layers, logits.
 *
 * A layer is a chain of jobs, each split over the workers by independent outputs: rows for what works on
 * rows, tiles of weight rows for products, (chunk of rows, KV head) for attention. No sum is ever split
 * between threads, so the number of threads cannot change a bit. Jobs number their tasks by rows, so that rows stay with
 * the core that has them in its cache (shared/workers.h).
 *
 *   x ─norm─▶ act ─q,k,v─▶ wide ─bias, head norms, rope─▶ wide(q), pages(k, v) ─attention─▶ act ─o─▶ wide
 *   x += wide;  x ─norm─▶ act ─gate,up─▶ wide ─swiglu─▶ act ─down─▶ wide;  x += wide */
#include "kernels/cpu/cpu_backend.h"
#include "shared/log.h"

#define ROWS_PER_TASK    8
#define TASKS_PER_THREAD 6
#define ROWS_PER_PRODUCT 32 /* at least, where rows are split */

/* A job over the workers; its time goes to `family`. */
static void run(struct cpu_backend *b, size_t family, size_t task_count, workers_task task, void *ctx)
{
    workers_run(b->workers, task_count, task, ctx);
    if (b->profile)
        cpu_profile_add(b->profile, family, 0, 0);
}

/* --- jobs over rows --------------------------------------------------------------------------- */

struct row_job {
    struct cpu_backend *b;
    uint32_t count;
    void (*row)(struct cpu_backend *b, uint32_t index); /* of a compact row */
};

static void row_task(void *ctx, size_t task, unsigned worker)
{
    (void)worker;
    const struct row_job *job = ctx;
    uint32_t begin = (uint32_t)task * ROWS_PER_TASK, end = TD_MIN(begin + ROWS_PER_TASK, job->count);
    for (uint32_t i = begin; i < end; i++)
        job->row(job->b, i);
}

static void for_rows(struct cpu_backend *b, size_t family, uint32_t count,
                     void (*row)(struct cpu_backend *b, uint32_t index))
{
    struct row_job job = {b, count, row};
    run(b, family, (count + ROWS_PER_TASK - 1) / ROWS_PER_TASK, row_task, &job);
}

static float *act_row(const struct cpu_backend *b, uint32_t index)
{
    return b->act.x + index * b->act.x_stride;
}

static float *wide_row(const struct cpu_backend *b, uint32_t index)
{
    return b->wide + index * b->wide_stride;
}

static float *x_row(const struct cpu_backend *b, uint32_t row)
{
    return b->x + (size_t)row * b->base.model->params.embd_size;
}

/* --- products --------------------------------------------------------------------------------- */

/* A task is a run of tiles for a run of rows. Where the table opens a tile once for part_rows rows, rows come first: many
 * tiles follow, so that the rows' activations are laid out (panel.h) for few tasks. Else tiles come first, as many as stay
 * in a core's cache while the rows pass, and rows are split when that leaves too few tasks. Tasks are numbered row by row:
 * then a worker's own run of them (shared/workers.h) is of the rows that it has written the operation before. */
struct product_job {
    struct cpu_backend *b;
    const struct cpu_matrix *matrices[3]; /* of the same input rows */
    uint32_t matrix_count, row_count, tile_total, tiles_per_task, rows_per_task, tile_parts;
};

static void product_task(void *ctx, size_t task, unsigned worker)
{
    (void)worker;
    const struct product_job *job = ctx;
    uint32_t begin = (uint32_t)task % job->tile_parts * job->tiles_per_task,
             end = TD_MIN(begin + job->tiles_per_task, job->tile_total);
    uint32_t row = (uint32_t)task / job->tile_parts * job->rows_per_task,
             rows = TD_MIN(job->rows_per_task, job->row_count - row);
    uint32_t base = 0; /* tiles of the matrices before this one */
    for (uint32_t i = 0; i < job->matrix_count && base < end; i++) {
        const struct cpu_matrix *m = job->matrices[i];
        uint32_t count = tile_count(job->b->ops, m), from = TD_MAX(begin, base),
                 to = TD_MIN(end, base + count);
        if (from < to)
            job->b->ops->matmul(m, &job->b->act, row, rows, job->b->out_rows[i] + row, from - base,
                                to - base);
        base += count;
    }
}

/* Returns the number of tasks. tile_size: bytes of the largest tile. */
static size_t cut_products(const struct cpu_backend *b, size_t tile_size, struct product_job *job)
{
    const uint32_t wanted = workers_count(b->workers) * TASKS_PER_THREAD;
    uint32_t fitting = TD_MAX(1u, (uint32_t)(b->chunk_size / tile_size)), row_parts;
    if (weight_is_quantised(job->matrices[0]->type) && job->row_count >= ROWS_PER_TASK && b->ops->part_rows) {
        fitting = job->tile_total;
        row_parts = (job->row_count + b->ops->part_rows - 1) / b->ops->part_rows;
    } else {
        const uint32_t parts = (job->tile_total + fitting - 1) / fitting;
        row_parts = TD_MIN((wanted + parts - 1) / parts, TD_MAX(1u, job->row_count / ROWS_PER_PRODUCT));
    }
    job->rows_per_task = (uint32_t)align_up((job->row_count + row_parts - 1) / row_parts, ROWS_PER_TASK);
    row_parts = (job->row_count + job->rows_per_task - 1) / job->rows_per_task;
    job->tiles_per_task = TD_MAX(1u, TD_MIN(fitting, job->tile_total * row_parts / wanted));
    job->tile_parts = (job->tile_total + job->tiles_per_task - 1) / job->tiles_per_task;
    return (size_t)row_parts * job->tile_parts;
}

/* Product of act's rows with up to three matrices; results go to out_rows, which the caller has set. */
static void run_products(struct cpu_backend *b, uint32_t row_count, uint32_t matrix_count,
                         const struct cpu_matrix *const *matrices)
{
    struct product_job job = {.b = b, .matrix_count = matrix_count, .row_count = row_count};
    size_t tile_size = 1;
    for (uint32_t i = 0; i < matrix_count; i++) {
        job.matrices[i] = matrices[i];
        job.tile_total += tile_count(b->ops, matrices[i]);
        tile_size =
            TD_MAX(tile_size, weight_row_size(matrices[i]->type, matrices[i]->columns) * b->ops->tile_rows);
    }
    const size_t family = matrices[0] == &b->head ? CPU_LOGITS : CPU_PRODUCTS + matrices[0]->type;
    run(b, family, cut_products(b, tile_size, &job), product_task, &job);
    for (uint32_t i = 0; b->profile && i < matrix_count; i++) {
        const struct cpu_matrix *m = matrices[i];
        cpu_profile_add(b->profile, family, 2.0 * m->columns * m->rows * row_count,
                        (double)weight_row_size(m->type, m->columns) * m->rows);
    }
}

/* The usual case: outputs side by side in a row of `wide`. */
static void products_to_wide(struct cpu_backend *b, uint32_t row_count, uint32_t matrix_count,
                             const struct cpu_matrix *const *matrices)
{
    size_t column = 0;
    for (uint32_t i = 0; i < matrix_count; i++) {
        for (uint32_t r = 0; r < row_count; r++)
            b->out_rows[i][r] = wide_row(b, r) + column;
        column += matrices[i]->rows;
    }
    run_products(b, row_count, matrix_count, matrices);
}

/* --- the operations of a layer ---------------------------------------------------------------- */

static void quantise_for(const struct cpu_backend *b, uint32_t index, uint32_t columns,
                         const struct cpu_matrix *first, const struct cpu_matrix *second,
                         const struct cpu_matrix *third)
{
    if (weight_is_quantised(first->type) || weight_is_quantised(second->type) ||
        weight_is_quantised(third->type))
        b->ops->quantise(&b->act, index, columns);
}

static void norm_attention_row(struct cpu_backend *b, uint32_t index)
{
    const struct model_params *p = &b->base.model->params;
    const struct cpu_layer *l = b->layer;
    b->ops->norm(x_row(b, b->all[index]), l->attn_norm, p->norm_eps, p->embd_size, act_row(b, index));
    quantise_for(b, index, p->embd_size, &l->q, &l->k, &l->v);
}

static void add_bias(float *x, const float *bias, uint32_t count)
{
    for (uint32_t i = 0; bias && i < count; i++)
        x[i] = x[i] + bias[i];
}

static void rotate_heads(const struct cpu_backend *b, float *heads, uint32_t head_count, const float *norm,
                         uint32_t row)
{
    const struct model_params *p = &b->base.model->params;
    for (uint32_t h = 0; h < head_count; h++) {
        float *head = heads + (size_t)h * p->head_dim;
        if (norm)
            b->ops->norm(head, norm, p->norm_eps, p->head_dim, head);
        rope_rotate(head, b->cos_sin + (size_t)row * p->rope_dim, p->rope_dim, p->rope_kind);
    }
}

/* K and V become f16 here, before anything reads them: attention never sees more than what is stored. */
static void write_kv(const struct cpu_backend *b, uint32_t row, const float *k, const float *v)
{
    const struct model_params *p = &b->base.model->params;
    uint32_t position = b->row_position[row],
             page = b->batch->seqs[b->row_seq[row]].pages[position / KV_BLOCK_TOKENS];
    uint16_t *at = b->pages + page * b->page_values + (size_t)(position % KV_BLOCK_TOKENS) * p->head_dim;
    for (uint32_t h = 0; h < p->kv_head_count; h++) {
        f32_to_f16_row(k + (size_t)h * p->head_dim, at + page_offset(p, b->layer_index, false, h),
                       p->head_dim);
        f32_to_f16_row(v + (size_t)h * p->head_dim, at + page_offset(p, b->layer_index, true, h),
                       p->head_dim);
    }
}

static void rope_row(struct cpu_backend *b, uint32_t index)
{
    const struct model_params *p = &b->base.model->params;
    uint32_t row = b->all[index];
    float *q = wide_row(b, index), *k = q + q_size(p), *v = k + kv_size(p);
    add_bias(q, b->layer->q_bias, q_size(p));
    add_bias(k, b->layer->k_bias, kv_size(p));
    add_bias(v, b->layer->v_bias, kv_size(p));
    rotate_heads(b, q, p->head_count, b->layer->q_norm, row);
    rotate_heads(b, k, p->kv_head_count, b->layer->k_norm, row);
    for (uint32_t i = 0; i < q_size(p); i++)
        q[i] = q[i] * b->q_scale;
    write_kv(b, row, k, v);
}

/* Of one KV head of a chunk. */
static struct attention_job attention_job_of(const struct cpu_backend *b, const struct attention_chunk *c,
                                             uint32_t kv_head)
{
    const struct model_params *p = &b->base.model->params;
    const uint32_t group = head_group(p);
    size_t head = (size_t)kv_head * group * p->head_dim, k = page_offset(p, b->layer_index, false, kv_head);
    struct attention_job job = {
        .q = wide_row(b, b->kept_from[c->kept_begin]) + head,
        .out = act_row(b, c->kept_begin) + head,
        .q_stride = b->wide_stride,
        .out_stride = b->act.x_stride,
        .positions = b->kept_position + c->kept_begin,
        .vector_count = c->row_count * group,
        .group = group,
        .head_dim = p->head_dim,
        .pages = b->batch->seqs[c->seq].pages,
        .kv = b->pages + k,
        .page_stride = b->page_values,
        .v_offset = page_offset(p, b->layer_index, true, kv_head) - k,
    };
    if (c->ranges > 1) {
        const size_t splits = attention_splits(&job), values = group * ATTENTION_PARTIAL(p->head_dim);
        job.partial = b->partials + (c->first_split * (size_t)p->kv_head_count + splits * kv_head) * values;
    }
    return job;
}

static void attention_task(void *ctx, size_t task, unsigned worker)
{
    struct cpu_backend *b = ctx;
    const uint32_t heads = b->base.model->params.kv_head_count;
    const struct attention_chunk *c = b->chunks;
    if (b->cut_splits == 0) {
        c += task / heads;
        task %= heads;
    } else { /* few chunks */
        for (; task >= (size_t)c->ranges * heads; c++)
            task -= (size_t)c->ranges * heads;
    }
    const uint32_t kv_head = (uint32_t)(task / c->ranges);
    struct attention_job job = attention_job_of(b, c, kv_head);
    job.split_begin = (uint32_t)(task % c->ranges) * SPLITS_PER_RANGE;
    job.split_end = job.split_begin + SPLITS_PER_RANGE;
    b->ops->attention(&job, b->scratch + worker * b->scratch_stride);
    if (c->ranges == 1)
        return;
    /* whoever finishes a head's last range combines them all */
    _Atomic uint32_t *left = &b->ranges_left[(uint32_t)(c - b->chunks) * heads + kv_head];
    if (atomic_fetch_sub_explicit(left, 1, memory_order_acq_rel) == 1)
        b->ops->attention_reduce(&job);
}

/* Two products of 2 * head_dim operations for every position that a query vector sees; K and V are read once a chunk. */
static void count_attention(const struct cpu_backend *b)
{
    const struct model_params *p = &b->base.model->params;
    double seen = 0, read = 0;
    for (uint32_t i = 0; i < b->kept_count; i++)
        seen += b->kept_position[i] + 1;
    for (uint32_t i = 0; i < b->chunk_count; i++)
        read += b->kept_position[b->chunks[i].kept_begin + b->chunks[i].row_count - 1] + 1;
    cpu_profile_add(b->profile, CPU_ATTENTION, 4.0 * q_size(p) * seen, 4.0 * kv_size(p) * read);
}

static void quantise_attention_row(struct cpu_backend *b, uint32_t index)
{
    b->ops->quantise(&b->act, index, q_size(&b->base.model->params));
}

static void add_residual(struct cpu_backend *b, uint32_t index)
{
    float *x = x_row(b, b->kept[index]);
    const float *y = wide_row(b, index);
    for (uint32_t i = 0; i < b->base.model->params.embd_size; i++)
        x[i] = x[i] + y[i];
}

static void norm_ffn_row(struct cpu_backend *b, uint32_t index)
{
    const struct model_params *p = &b->base.model->params;
    const struct cpu_layer *l = b->layer;
    add_residual(b, index);
    b->ops->norm(x_row(b, b->kept[index]), l->ffn_norm, p->norm_eps, p->embd_size, act_row(b, index));
    quantise_for(b, index, p->embd_size, &l->gate, &l->up, &l->up);
}

static void swiglu_row(struct cpu_backend *b, uint32_t index)
{
    uint32_t ffn = b->base.model->params.ffn_size;
    const float *gate = wide_row(b, index);
    b->ops->swiglu(gate, gate + ffn, ffn, act_row(b, index));
    quantise_for(b, index, ffn, &b->layer->down, &b->layer->down, &b->layer->down);
}

static void run_layer(struct cpu_backend *b, uint32_t index)
{
    const struct cpu_layer *l = &b->layers[index];
    b->layer = l;
    b->layer_index = index;
    batch_map_layer(b, index);
    if (b->all_count == 0)
        return;
    for_rows(b, CPU_NORM, b->all_count, norm_attention_row);
    products_to_wide(b, b->all_count, 3, (const struct cpu_matrix *const[]){&l->q, &l->k, &l->v});
    for_rows(b, CPU_ROPE, b->all_count, rope_row);
    if (b->kept_count == 0)
        return;
    run(b, CPU_ATTENTION, b->attention_tasks, attention_task, b);
    if (b->profile)
        count_attention(b);
    if (weight_is_quantised(l->o.type))
        for_rows(b, CPU_ATTENTION, b->kept_count, quantise_attention_row);
    products_to_wide(b, b->kept_count, 1, (const struct cpu_matrix *const[]){&l->o});
    for_rows(b, CPU_NORM, b->kept_count, norm_ffn_row);
    products_to_wide(b, b->kept_count, 2, (const struct cpu_matrix *const[]){&l->gate, &l->up});
    for_rows(b, CPU_ACTIVATION, b->kept_count, swiglu_row);
    products_to_wide(b, b->kept_count, 1, (const struct cpu_matrix *const[]){&l->down});
    for_rows(b, CPU_NORM, b->kept_count, add_residual);
}

/* --- the two ends ----------------------------------------------------------------------------- */

static void input_row(struct cpu_backend *b, uint32_t row)
{
    const struct model *m = b->base.model;
    const struct batch_seq *s = &b->batch->seqs[b->row_seq[row]];
    uint32_t embd = m->params.embd_size, pairs = m->params.rope_dim / 2,
             within = row - b->seq_row[b->row_seq[row]];
    if (s->layer_begin == 0) {
        const uint8_t *table = m->embed.data;
        weight_row_to_f32(m->embed.type,
                          table + weight_row_size(m->embed.type, embd) * (size_t)s->ids[within], 0, embd,
                          x_row(b, row));
    } else {
        memcpy(x_row(b, row), s->hidden_in + (size_t)within * embd, sizeof(float) * embd);
    }
    float *cos_sin = b->cos_sin + (size_t)row * m->params.rope_dim;
    for (uint32_t i = 0; i < pairs; i++) {
        double sin_value, cos_value;
        numerics_sincos((double)b->row_position[row] * b->frequencies[i], &sin_value, &cos_value);
        cos_sin[i] = (float)cos_value;
        cos_sin[pairs + i] = (float)sin_value;
    }
}

static void norm_output_row(struct cpu_backend *b, uint32_t index)
{
    const struct model_params *p = &b->base.model->params;
    b->ops->norm(x_row(b, b->kept[index]), b->output_norm, p->norm_eps, p->embd_size, act_row(b, index));
    quantise_for(b, index, p->embd_size, &b->head, &b->head, &b->head);
}

static void write_outputs(struct cpu_backend *b)
{
    const struct model_params *p = &b->base.model->params;
    b->kept_count = 0;
    for (uint32_t i = 0; i < b->batch->count; i++) {
        const struct batch_seq *s = &b->batch->seqs[i];
        if (s->hidden_out)
            memcpy(s->hidden_out, x_row(b, b->seq_row[i]), sizeof(float) * s->row_count * p->embd_size);
        for (uint32_t r = 0; s->logits && r < s->logit_count; r++) {
            b->out_rows[0][b->kept_count] = s->logits + (size_t)r * p->vocab_count;
            b->kept[b->kept_count++] = b->seq_row[i] + s->row_count - s->logit_count + r;
        }
    }
    if (b->kept_count == 0)
        return;
    for_rows(b, CPU_LOGITS, b->kept_count, norm_output_row);
    run_products(b, b->kept_count, 1, (const struct cpu_matrix *const[]){&b->head});
}

static int run_batch(struct cpu_backend *b, const struct batch *batch)
{
    int rc = batch_check(&b->base, b->rows_max, b->has_head, batch);
    if (rc || batch->count == 0)
        return rc;
    if (b->profile)
        b->profile->stamp_us = clock_mono_us();
    batch_map_rows(b, batch);
    for_rows(b, CPU_INPUT, b->row_count, input_row);
    uint32_t begin = UINT32_MAX, end = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        begin = TD_MIN(begin, batch->seqs[i].layer_begin);
        end = TD_MAX(end, batch->seqs[i].layer_end);
    }
    for (uint32_t layer = begin; layer < end; layer++)
        run_layer(b, layer);
    write_outputs(b);
    b->batch = NULL;
    return 0;
}

/* Some weights are read where the file is mapped: what was computed while somebody wrote into it would be kept under the name of what the
 * model was, by this node and others. So the file is looked at before a step, lest pages are gone, and behind it. */
static bool weights_intact(struct cpu_backend *b)
{
    struct gguf *file = b->base.model->file; /* a model made in memory has none */
    if (b->lost == 0 && file && !gguf_intact(file)) {
        b->lost = -TD_ERR_IO;
        log_error("cpu",
                  "%s was changed while it was in use: nothing more is computed with it; start again, and "
                  "replace model "
                  "files by renaming, not by writing into them",
                  gguf_path(file));
    }
    return b->lost == 0;
}

int cpu_forward(struct backend *base, const struct batch *batch)
{
    struct cpu_backend *b = (struct cpu_backend *)base;
    if (!weights_intact(b))
        return -TD_ERR_IO;
    int rc = run_batch(b, batch);
    return rc == 0 && !weights_intact(b) ? -TD_ERR_IO : rc;
}
