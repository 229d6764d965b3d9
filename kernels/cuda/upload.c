/* upload: the model's weights to the device, in the forms that the kernels read. Float types are copied as they are; quantised
 * ones pass through a buffer on the device and are repacked there. Matrices with the same input and form lie one after
 * the other, so that they are one product.
 *
 * The file is mapped, and the bus takes 55 GB/s from pinned memory, but 6 from any other. So several threads copy a piece to one of
 * two pinned buffers while the other is on the bus; they also meet the mapping's page faults, side by side. */
#include "kernels/cuda/cuda_backend.h"

#define RAW_SIZE   ((size_t)64 << 20) /* of a file's rows on their way */
#define PIECE_SIZE ((size_t)32 << 20) /* of a pinned buffer */
#define TASK_SIZE  ((size_t)1 << 20)  /* of a thread's copy */

/* --- the way ---------------------------------------------------------------------------------- */

struct road {
    struct cuda_backend *b;
    uint8_t *pinned[2]; /* NULL where the system pins none: copies take the slow way */
    cudaEvent_t came[2];
    uint32_t turn;
};

static void road_close(struct road *r)
{
    for (int i = 0; i < 2; i++) {
        if (r->came[i])
            cudaEventDestroy(r->came[i]);
        if (r->pinned[i])
            cudaFreeHost(r->pinned[i]);
    }
    *r = (struct road){.b = r->b};
}

static void road_open(struct road *r)
{
    bool fails = false;
    for (int i = 0; i < 2 && !fails; i++)
        fails = cudaMallocHost((void **)&r->pinned[i], PIECE_SIZE) ||
                cudaEventCreateWithFlags(&r->came[i], cudaEventDisableTiming);
    if (fails)
        road_close(r);
}

struct piece {
    uint8_t *to;
    const uint8_t *from;
    size_t size;
};

static void copy_task(void *ctx, size_t task, unsigned worker)
{
    (void)worker;
    const struct piece *p = ctx;
    size_t at = task * TASK_SIZE;
    memcpy(p->to + at, p->from + at, TD_MIN(TASK_SIZE, p->size - at));
}

/* At most PIECE_SIZE; when it returns `from` has been read. */
static cudaError_t road_send(struct road *r, void *to, const void *from, size_t size)
{
    if (!r->pinned[0])
        return cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, r->b->stream);
    struct piece p = {r->pinned[r->turn], from, size};
    cudaError_t rc = cudaEventSynchronize(r->came[r->turn]);
    if (rc)
        return rc;
    workers_run(r->b->workers, (size + TASK_SIZE - 1) / TASK_SIZE, copy_task, &p);
    rc = cudaMemcpyAsync(to, p.to, size, cudaMemcpyHostToDevice, r->b->stream);
    if (!rc)
        rc = cudaEventRecord(r->came[r->turn], r->b->stream);
    r->turn ^= 1;
    return rc;
}

/* --- forms ------------------------------------------------------------------------------------ */

static enum cuda_form form_of(uint32_t type)
{
    switch (type) {
    case GGUF_F32:
        return CUDA_F32;
    case GGUF_F16:
        return CUDA_F16;
    case GGUF_BF16:
        return CUDA_BF16;
    case GGUF_Q4_0:
    case GGUF_Q4_1:
    case GGUF_Q4_K:
        return CUDA_W4;
    case GGUF_Q6_K:
        return CUDA_W8G16;
    case GGUF_Q8_0:
        return CUDA_W8D;
    default:
        return CUDA_W8;
    }
}

/* Bytes of `values` columns' codes, and of their scales. */
static uint64_t codes_size(enum cuda_form form, uint64_t values)
{
    return form == CUDA_F32    ? 4 * values
           : form <= CUDA_BF16 ? 2 * values
           : form == CUDA_W4   ? values / 2
                               : values;
}

static uint64_t scales_size(enum cuda_form form, uint64_t values)
{
    return form <= CUDA_BF16 ? 0 : values / (form == CUDA_W8G16 ? 16 : 32) * (form == CUDA_W8D ? 2 : 4);
}

/* --- placing ---------------------------------------------------------------------------------- */

struct placing {
    struct cuda_backend *b;
    struct cuda_carver *c;
    struct road road;
    uint8_t *raw; /* buffer on the device for quantised rows; NULL while counting */
    uint64_t largest_scratch;
    uint64_t total; /* bytes of all */
    cudaError_t rc;
};

/* Everything in front of `end` is on its way. */
static void show_progress(const struct placing *p, const uint8_t *end)
{
    const struct backend_config *c = p->b->config;
    if (p->c->base && c->progress)
        c->progress(c->progress_ctx, TD_MIN((uint64_t)(end - p->c->base), p->total), p->total);
}

/* shows: they stay where they come to. */
static cudaError_t send_all(struct placing *p, uint8_t *to, const uint8_t *from, uint64_t size, bool shows)
{
    cudaError_t rc = cudaSuccess;
    for (uint64_t at = 0; at < size && !rc; at += PIECE_SIZE) {
        uint64_t count = TD_MIN((uint64_t)PIECE_SIZE, size - at);
        rc = road_send(&p->road, to + at, from + at, count);
        if (shows)
            show_progress(p, to + at + count);
    }
    return rc;
}

static cudaError_t copy_quantised(struct placing *p, const struct weight *w, uint8_t *values, uint8_t *scales)
{
    const struct gguf_type_info *info = gguf_type_info(w->type);
    size_t row_size = (size_t)w->columns / info->block_values * info->block_size;
    uint32_t step = (uint32_t)TD_MAX((size_t)1, RAW_SIZE / row_size);
    enum cuda_form form = form_of(w->type);
    for (uint32_t first = 0; first < w->rows; first += step) {
        uint32_t rows = TD_MIN(step, w->rows - first);
        uint64_t before = (uint64_t)first * w->columns;
        cudaError_t rc =
            send_all(p, p->raw, (const uint8_t *)w->data + first * row_size, rows * row_size, false);
        if (rc)
            return rc;
        cuda_repack(p->b->stream, w->type, p->raw, rows, w->columns, values + codes_size(form, before),
                    scales + scales_size(form, before));
        if ((rc = cuda_launch_error()))
            return rc;
        show_progress(p, values + codes_size(form, before + (uint64_t)rows * w->columns));
    }
    return cudaSuccess;
}

static void want_scratch(struct placing *p, const struct cuda_matrix *m)
{
    p->largest_scratch = TD_MAX(p->largest_scratch, (uint64_t)2 * m->rows * m->columns);
}

/* One matrix, or several of one form and width, one after the other. */
static struct cuda_matrix place_matrices(struct placing *p, const struct weight *const *w, uint32_t count)
{
    enum cuda_form form = form_of(w[0]->type);
    uint64_t rows = 0, columns = w[0]->columns;
    for (uint32_t i = 0; i < count; i++)
        rows += w[i]->rows;
    uint8_t *values = cuda_carve(p->c, codes_size(form, rows * columns)),
            *scales = scales_size(form, 1 << 10) ? cuda_carve(p->c, scales_size(form, rows * columns)) : NULL;
    struct cuda_matrix m = {
        .form = form, .columns = w[0]->columns, .rows = (uint32_t)rows, .values = values, .scales = scales};
    for (uint32_t i = 0; i < count && p->c->base && !p->rc; i++) {
        uint64_t size = (uint64_t)w[i]->rows * columns;
        if (form <= CUDA_BF16)
            p->rc = send_all(p, values, w[i]->data, codes_size(form, size), true);
        else
            p->rc = copy_quantised(p, w[i], values, scales);
        values += codes_size(form, size);
        scales = scales ? scales + scales_size(form, size) : NULL;
    }
    return m;
}

static struct cuda_group place_group(struct placing *p, const struct weight *first,
                                     const struct weight *second, const struct weight *third)
{
    const struct weight *w[] = {first, second, third};
    struct cuda_group g = {.bf16 = true};
    uint32_t count = third ? 3 : second ? 2 : 1;
    bool same = true;
    for (uint32_t i = 0; i < count; i++) {
        g.bf16 = g.bf16 && w[i]->type == GGUF_BF16;
        same = same && form_of(w[i]->type) == form_of(w[0]->type);
        g.rows += w[i]->rows;
    }
    g.count = same ? 1 : count;
    for (uint32_t i = 0; i < g.count; i++) {
        g.m[i] = place_matrices(p, w + i, same ? count : 1);
        bool opened = g.m[i].form != CUDA_BF16 && g.m[i].form != CUDA_F16;
        if (opened || (g.m[i].form == CUDA_BF16 && !g.bf16))
            want_scratch(p, &g.m[i]);
    }
    return g;
}

static const float *place_vector(struct placing *p, const struct weight *w)
{
    if (!w->data)
        return NULL;
    float *at = cuda_carve(p->c, sizeof(float) * w->columns);
    if (p->c->base && !p->rc)
        p->rc = cudaMemcpy(at, w->data, sizeof(float) * w->columns, cudaMemcpyHostToDevice);
    return at;
}

static void place_layer(struct placing *p, struct cuda_layer *l, const struct model_layer *y)
{
    l->qkv = place_group(p, &y->wq, &y->wk, &y->wv);
    l->o = place_group(p, &y->wo, NULL, NULL);
    l->gate_up = place_group(p, &y->w_gate, &y->w_up, NULL);
    l->down = place_group(p, &y->w_down, NULL, NULL);
    l->attn_norm = place_vector(p, &y->attn_norm), l->ffn_norm = place_vector(p, &y->ffn_norm);
    l->q_bias = place_vector(p, &y->bq), l->k_bias = place_vector(p, &y->bk),
    l->v_bias = place_vector(p, &y->bv);
    l->q_norm = place_vector(p, &y->q_norm), l->k_norm = place_vector(p, &y->k_norm);
}

static void place_ends(struct placing *p)
{
    struct cuda_backend *b = p->b;
    const struct model *m = b->base.model;
    const struct weight *embed = &m->embed;
    b->embed = place_matrices(p, &embed, 1);
    b->has_head = m->output.data && m->output_norm.data && b->base.layers_paged == m->params.layer_count;
    if (!b->has_head)
        return;
    b->output_norm = place_vector(p, &m->output_norm);
    if (m->output.data != m->embed.data) {
        b->head = place_group(p, &m->output, NULL, NULL);
        return;
    }
    b->head = (struct cuda_group){
        .m = {b->embed}, .count = 1, .rows = b->embed.rows, .bf16 = b->embed.form == CUDA_BF16};
    if (b->embed.form != CUDA_F16 && b->embed.form != CUDA_BF16)
        want_scratch(p, &b->embed);
}

int cuda_place_weights(struct cuda_backend *b, struct cuda_carver *c, uint64_t total,
                       uint64_t *largest_scratch, struct td_error *err)
{
    struct placing p = {.b = b, .c = c, .total = total, .road = {.b = b}};
    if (c->base) {
        p.rc = cudaMalloc((void **)&p.raw, RAW_SIZE);
        road_open(&p.road);
    }
    for (uint32_t i = 0; i < b->base.layers_paged && !p.rc; i++)
        place_layer(&p, &b->layers[i], &b->base.model->layers[i]);
    if (!p.rc)
        place_ends(&p);
    if (c->base && !p.rc)
        p.rc = cudaStreamSynchronize(b->stream);
    road_close(&p.road);
    cudaFree(p.raw);
    if (!p.rc && c->base && b->config->progress)
        b->config->progress(b->config->progress_ctx, total, total);
    *largest_scratch = p.largest_scratch;
    if (p.rc)
        return td_fail(err, cuda_note(b, p.rc, "copying weights"),
                       "cannot start the engine on cuda:%d: copying the weights failed: %s", b->device,
                       cudaGetErrorString(p.rc));
    return 0;
}
