/* backend: makes and unmakes the CPU backend: weights repacked, KV pages and working memory taken once. */
#include "kernels/cpu/cpu_backend.h"
#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB            ((size_t)1 << 20)
#define CHUNK_SIZE_MIN ((size_t)192 << 10)
#define AHEAD_SIZE_MAX (128 * MIB) /* of pages' memory, ahead of what has been used */
#define AHEAD_PART     (2 * MIB)
#define AHEAD_STRIDE   4096 /* no system has smaller pages */

/* --- memory ----------------------------------------------------------------------------------- */

/* Zeroed whole pages, huge ones where the kernel has them: weights and KV are read in long runs. NULL without
 * memory. */
static void *map_memory(size_t size)
{
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    madvise(p, size, MADV_HUGEPAGE); /* advice: without it everything still works */
    return p;
}

static void unmap_memory(void *p, size_t size)
{
    if (p)
        munmap(p, size);
}

/* Half of the second-level cache, where the system says how large it is. */
static size_t weights_in_cache(void)
{
    long size = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
    size = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return TD_MIN(TD_MAX(size > 0 ? (size_t)size / 2 : 0, CHUNK_SIZE_MIN), MIB);
}

static size_t physical_memory(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? (size_t)pages * (size_t)size : SIZE_MAX;
}

/* Parts of one block of memory, 64-byte aligned. With base NULL it only counts. */
struct carver {
    uint8_t *base;
    size_t used;
};

static void *carve(struct carver *c, size_t count, size_t size)
{
    size_t at = c->used;
    c->used += align_up(count * size, 64);
    return c->base ? c->base + at : NULL;
}

/* A distance between rows of at least `count` values, an odd number of cache lines: the same column of many rows then does
 * not fall into the same few sets of the caches. */
static size_t row_stride(size_t count, size_t value_size)
{
    size_t line = 64 / value_size;
    return (align_up(count, line) / line | 1) * line;
}

static void carve_work(struct cpu_backend *b, struct carver *c)
{
    const struct model_params *p = &b->base.model->params;
    size_t rows = b->rows_max;
    size_t width = TD_MAX(TD_MAX(p->embd_size, q_size(p)), p->ffn_size);
    struct activations *a = &b->act;
    a->x_stride = row_stride(width, sizeof(float));
    a->q_stride = row_stride(width, 1);
    a->block_stride = row_stride(width / NUMERICS_BLOCK + 1, sizeof(float));
    b->wide_stride =
        row_stride(TD_MAX(TD_MAX((size_t)q_size(p) + 2 * kv_size(p), (size_t)2 * p->ffn_size), p->embd_size),
                   sizeof(float));
    b->scratch_stride = align_up(b->ops->attention_scratch(p->head_dim, head_group(p)), 4096);
    b->x = carve(c, rows * p->embd_size, sizeof(float));
    b->cos_sin = carve(c, rows * p->rope_dim, sizeof(float));
    a->x = carve(c, rows * a->x_stride, sizeof(float));
    a->q = carve(c, rows * a->q_stride, 1);
    a->d = carve(c, rows * a->block_stride, sizeof(float));
    a->s = carve(c, rows * a->block_stride, sizeof(float));
    a->sum = carve(c, rows * a->block_stride, sizeof(int32_t));
    b->wide = carve(c, rows * b->wide_stride, sizeof(float));
    uint32_t **lists[] = {&b->row_seq, &b->row_position, &b->all, &b->kept, &b->kept_from, &b->kept_position};
    for (size_t i = 0; i < TD_COUNT(lists); i++)
        *lists[i] = carve(c, rows, sizeof(uint32_t));
    b->seq_row = carve(c, BATCH_SEQS_MAX, sizeof(uint32_t));
    b->chunks = carve(c, rows, sizeof *b->chunks);
    if (workers_count(b->workers) > 1)
        b->splits_max = TD_MIN(b->base.page_count, (p->context_max + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS);
    b->partials = carve(c, b->splits_max, sizeof(float) * p->head_count * ATTENTION_PARTIAL(p->head_dim));
    for (size_t i = 0; i < TD_COUNT(b->out_rows); i++)
        b->out_rows[i] = carve(c, rows, sizeof(float *));
    b->scratch = carve(c, workers_count(b->workers), b->scratch_stride);
}

static int take_work(struct cpu_backend *b, struct td_error *err)
{
    struct carver c = {NULL, 0};
    carve_work(b, &c);
    b->work_size = c.used;
    b->work = map_memory(c.used);
    if (!b->work)
        return td_fail(
            err, -TD_ERR_NOMEM,
            "cannot start the CPU engine: no %zu MiB of working memory for steps of %u rows; lower them",
            c.used / MIB + 1, b->rows_max);
    c = (struct carver){b->work, 0};
    carve_work(b, &c);
    return 0;
}

static int take_pages(struct cpu_backend *b, struct td_error *err)
{
    const struct model_params *p = &b->base.model->params;
    b->page_values = page_offset(p, b->base.layers_paged, false, 0);
    size_t page_size = b->page_values * sizeof(uint16_t), physical = physical_memory();
    size_t fit = physical / page_size;
    if (b->base.page_count <= fit) {
        b->pages_size = b->base.page_count * page_size;
        b->pages = map_memory(b->pages_size);
        if (!b->pages) /* there is as much, and it is not to be had: ulimit -v, or promised to others */
            return td_fail(
                err, -TD_ERR_NOMEM,
                "cannot start the CPU engine: the system refuses %zu MiB for %u KV pages (is there a "
                "limit, as of ulimit -v?); take fewer",
                b->pages_size / MIB, b->base.page_count);
    }
    if (!b->pages)
        return td_fail(err, -TD_ERR_NOMEM,
                       "cannot start the CPU engine: %u KV pages of %zu KiB do not fit into %zu MiB of "
                       "memory; at most %zu "
                       "pages do, take fewer",
                       b->base.page_count, page_size / 1024, physical / MIB, fit);
    return 0;
}

/* --- weights ---------------------------------------------------------------------------------- */

static struct cpu_matrix matrix_of(const struct weight *w)
{
    return (struct cpu_matrix){.type = w->type, .columns = w->columns, .rows = w->rows, .source = w->data};
}

static size_t vector_size(const struct weight *w)
{
    return w->data ? align_up(sizeof(float) * w->columns, 64) : 0;
}

/* Norms and biases are copied: a file need not align them. */
static const float *copy_vector(const struct weight *w, struct carver *c)
{
    if (!w->data)
        return NULL;
    float *copy = carve(c, w->columns, sizeof(float));
    memcpy(copy, w->data, sizeof(float) * w->columns);
    return copy;
}

static void fill_layer(struct cpu_layer *l, const struct model_layer *y, struct carver *c)
{
    l->q = matrix_of(&y->wq), l->k = matrix_of(&y->wk), l->v = matrix_of(&y->wv), l->o = matrix_of(&y->wo);
    l->gate = matrix_of(&y->w_gate), l->up = matrix_of(&y->w_up), l->down = matrix_of(&y->w_down);
    l->attn_norm = copy_vector(&y->attn_norm, c), l->ffn_norm = copy_vector(&y->ffn_norm, c);
    l->q_bias = copy_vector(&y->bq, c), l->k_bias = copy_vector(&y->bk, c),
    l->v_bias = copy_vector(&y->bv, c);
    l->q_norm = copy_vector(&y->q_norm, c), l->k_norm = copy_vector(&y->k_norm, c);
}

static int fill_weights(struct cpu_backend *b, struct td_error *err)
{
    const struct model *m = b->base.model;
    size_t size = vector_size(&m->output_norm) + 64;
    for (uint32_t i = 0; i < b->base.layers_paged; i++) {
        const struct model_layer *y = &m->layers[i];
        size += vector_size(&y->attn_norm) + vector_size(&y->ffn_norm) + vector_size(&y->bq) +
                vector_size(&y->bk) + vector_size(&y->bv) + vector_size(&y->q_norm) + vector_size(&y->k_norm);
    }
    b->layers = calloc(b->base.layers_paged, sizeof *b->layers);
    b->vectors = aligned_alloc(64, size);
    if (!b->layers || !b->vectors)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the CPU engine: out of memory");
    struct carver c = {(uint8_t *)b->vectors, 0};
    for (uint32_t i = 0; i < b->base.layers_paged; i++)
        fill_layer(&b->layers[i], &m->layers[i], &c);
    b->has_head = m->output.data && m->output_norm.data && b->base.layers_paged == m->params.layer_count;
    if (b->has_head) {
        b->head = matrix_of(&m->output);
        b->output_norm = copy_vector(&m->output_norm, &c);
    }
    return 0;
}

/* The n-th matrix of the backend, NULL behind the last. */
static struct cpu_matrix *matrix_at(struct cpu_backend *b, uint32_t n)
{
    if (n / 7 >= b->base.layers_paged)
        return n == b->base.layers_paged * 7 && b->has_head ? &b->head : NULL;
    struct cpu_layer *l = &b->layers[n / 7];
    struct cpu_matrix *all[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
    return all[n % 7];
}

#define PACK_TILES_PER_TASK 64

struct pack_job {
    const struct cpu_backend *b;
    const struct cpu_matrix *m;
};

static void pack_task(void *ctx, size_t task, unsigned worker)
{
    (void)worker;
    const struct pack_job *job = ctx;
    uint32_t begin = (uint32_t)task * PACK_TILES_PER_TASK;
    job->b->ops->pack(job->m, begin, TD_MIN(begin + PACK_TILES_PER_TASK, tile_count(job->b->ops, job->m)));
}

static int pack_weights(struct cpu_backend *b, struct td_error *err)
{
    struct cpu_matrix *m;
    for (uint32_t n = 0; (m = matrix_at(b, n)); n++)
        b->packed_size += align_up(b->ops->pack_size(m), 64);
    if (b->packed_size == 0)
        return 0;
    b->packed = map_memory(b->packed_size);
    if (!b->packed)
        return td_fail(
            err, -TD_ERR_NOMEM,
            "cannot start the CPU engine: no %zu MiB of memory for its weights; use a smaller model",
            b->packed_size / MIB + 1);
    struct carver c = {b->packed, 0};
    for (uint32_t n = 0; (m = matrix_at(b, n)); n++) {
        m->packed = carve(&c, b->ops->pack_size(m), 1);
        struct pack_job job = {b, m};
        workers_run(b->workers, (tile_count(b->ops, m) + PACK_TILES_PER_TASK - 1) / PACK_TILES_PER_TASK,
                    pack_task, &job);
    }
    return 0;
}

/* Radians a position: base^(-2i / rope_dim), divided by the linear scale and by the file's factor. */
static int fill_frequencies(struct cpu_backend *b, struct td_error *err)
{
    const struct model *m = b->base.model;
    const struct model_params *p = &m->params;
    b->frequencies = calloc(p->rope_dim / 2, sizeof(double));
    if (!b->frequencies)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the CPU engine: out of memory");
    double log_base = numerics_log((double)p->rope_base);
    for (uint32_t i = 0; i < p->rope_dim / 2; i++) {
        float factor = 1.0f;
        if (p->has_rope_factors)
            memcpy(&factor, (const uint8_t *)m->rope_factors.data + sizeof factor * i, sizeof factor);
        b->frequencies[i] =
            numerics_exp64(-(2.0 * i / p->rope_dim) * log_base) / (double)p->rope_scale / (double)factor;
    }
    b->q_scale = 1.0f / sqrtf((float)p->head_dim);
    return 0;
}

/* --- pages ------------------------------------------------------------------------------------ */

static bool page_call_ok(const struct backend *base, uint32_t page, uint32_t layer, uint32_t token_count)
{
    return page < base->page_count && layer < base->layers_paged && token_count >= 1 &&
           token_count <= KV_BLOCK_TOKENS;
}

static int cpu_page_read(struct backend *base, uint32_t page, uint32_t layer, uint32_t token_count,
                         uint16_t *k, uint16_t *v)
{
    const struct cpu_backend *b = (const struct cpu_backend *)base;
    const struct model_params *p = &base->model->params;
    if (!page_call_ok(base, page, layer, token_count))
        return -TD_ERR_ARG;
    size_t row = (size_t)token_count * p->head_dim;
    for (uint32_t h = 0; h < p->kv_head_count; h++) {
        const uint16_t *at = b->pages + page * b->page_values;
        memcpy(k + h * row, at + page_offset(p, layer, false, h), sizeof(uint16_t) * row);
        memcpy(v + h * row, at + page_offset(p, layer, true, h), sizeof(uint16_t) * row);
    }
    return 0;
}

static int cpu_page_write(struct backend *base, uint32_t page, uint32_t layer, uint32_t token_count,
                          const uint16_t *k, const uint16_t *v)
{
    struct cpu_backend *b = (struct cpu_backend *)base;
    const struct model_params *p = &base->model->params;
    if (!page_call_ok(base, page, layer, token_count))
        return -TD_ERR_ARG;
    size_t row = (size_t)token_count * p->head_dim;
    for (uint32_t h = 0; h < p->kv_head_count; h++) {
        uint16_t *at = b->pages + page * b->page_values;
        if (k)
            memcpy(at + page_offset(p, layer, false, h), k + h * row, sizeof(uint16_t) * row);
        if (v)
            memcpy(at + page_offset(p, layer, true, h), v + h * row, sizeof(uint16_t) * row);
    }
    return 0;
}

static int cpu_page_copy(struct backend *base, uint32_t from, uint32_t to)
{
    struct cpu_backend *b = (struct cpu_backend *)base;
    if (from >= base->page_count || to >= base->page_count)
        return -TD_ERR_ARG;
    if (from != to)
        memcpy(b->pages + to * b->page_values, b->pages + from * b->page_values,
               sizeof(uint16_t) * b->page_values);
    return 0;
}

/* The system takes as long to clear memory that is used for the first time as a step computes some layers (in a virtual machine up to 5 ms for 2 MiB), so
 * that is done before. As much as has been used is taken ahead: who asks little takes little. A store instead of madvise(MADV_POPULATE_WRITE): that would
 * hold the process's lock of its memory map for so long. */
static bool cpu_pages_ahead(struct backend *base, uint32_t used)
{
    struct cpu_backend *b = (struct cpu_backend *)base;
    size_t used_size = TD_MIN(used * b->page_values * sizeof(uint16_t), b->pages_size);
    size_t want = TD_MIN(used_size + TD_MIN(used_size, AHEAD_SIZE_MAX), b->pages_size);
    size_t at = TD_MAX(b->pages_taken, used_size), end = TD_MIN(at + AHEAD_PART, want);
    if (at >= want)
        return false;
    for (volatile uint8_t *bytes = (uint8_t *)b->pages; at < end; at += AHEAD_STRIDE)
        bytes[at] = 0;
    b->pages_taken = end;
    return true;
}

/* --- life ------------------------------------------------------------------------------------- */

static void cpu_destroy(struct backend *base)
{
    struct cpu_backend *b = (struct cpu_backend *)base;
    unmap_memory(b->work, b->work_size);
    unmap_memory(b->pages, b->pages_size);
    unmap_memory(b->packed, b->packed_size);
    free(b->frequencies);
    free(b->vectors);
    free(b->layers);
    workers_destroy(b->workers);
    free(b);
}

static int cpu_state(const struct backend *base)
{
    return ((const struct cpu_backend *)base)->lost;
}

static const struct backend_ops cpu_backend_ops = {
    .name = "cpu",
    .numerics = KV_NUMERICS_CPU_V1,
    .forward = cpu_forward,
    .page_read = cpu_page_read,
    .page_write = cpu_page_write,
    .page_copy = cpu_page_copy,
    .pages_ahead = cpu_pages_ahead,
    .state = cpu_state,
    .destroy = cpu_destroy,
};

static unsigned thread_count(unsigned wanted)
{
    cpu_set_t set;
    if (wanted == 0)
        wanted = sched_getaffinity(0, sizeof set, &set) == 0 ? (unsigned)CPU_COUNT(&set) : 1;
    return TD_MIN(wanted, (unsigned)WORKERS_MAX);
}

static int check_config(const struct model *m, const struct backend_config *c, struct td_error *err)
{
    if (c->layers_paged == 0 || c->layers_paged > m->layers_held)
        return td_fail(err, -TD_ERR_ARG,
                       "cannot start the CPU engine: %u layers wanted, the model file holds %u of %u",
                       c->layers_paged, m->layers_held, m->params.layer_count);
    if (c->page_count == 0 || c->rows_max == 0 || c->rows_max > BATCH_ROWS_MAX)
        return td_fail(
            err, -TD_ERR_ARG,
            "cannot start the CPU engine: it needs pages, and steps of 1 to %d rows (%u pages, %u rows)",
            BATCH_ROWS_MAX, c->page_count, c->rows_max);
    if (c->kv_dtype != KV_DTYPE_F16)
        return td_fail(err, -TD_ERR_UNSUPPORTED,
                       "cannot start the CPU engine: KV in 8 bits (--kv-dtype) needs a GPU");
    if (!cpu_ops_find(c->isa))
        return td_fail(err, -TD_ERR_UNSUPPORTED,
                       "cannot start the CPU engine: no instruction set '%s' here; this CPU runs '%s'",
                       c->isa, cpu_backend_isa());
    return 0;
}

static int build(struct cpu_backend *b, struct td_error *err)
{
    int rc;
    if ((rc = fill_weights(b, err)) || (rc = fill_frequencies(b, err)) || (rc = take_pages(b, err)) ||
        (rc = take_work(b, err)))
        return rc;
    return pack_weights(b, err);
}

int cpu_backend_create(const struct model *m, const struct backend_config *config, struct backend **out,
                       struct td_error *err)
{
    *out = NULL;
    int rc = check_config(m, config, err);
    if (rc)
        return rc;
    struct cpu_backend *b = calloc(1, sizeof *b);
    if (!b)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the CPU engine: out of memory");
    b->base = (struct backend){&cpu_backend_ops, m, config->page_count, config->layers_paged, KV_DTYPE_F16};
    b->ops = cpu_ops_find(config->isa);
    b->rows_max = config->rows_max;
    b->chunk_size = weights_in_cache();
    b->workers = workers_create(thread_count(config->threads));
    if (!b->workers)
        rc = td_fail(err, -TD_ERR_NOMEM, "cannot start the CPU engine: threads cannot be made");
    else
        rc = build(b, err);
    if (rc) {
        cpu_destroy(&b->base);
        return rc;
    }
    *out = &b->base;
    return 0;
}

static uint64_t size_packed(const struct weight *w)
{
    struct cpu_matrix m = matrix_of(w);
    return align_up(cpu_ops_find(NULL)->pack_size(&m), 64);
}

uint64_t cpu_backend_weights_size(const struct model *m)
{
    uint64_t size = m->output.data && m->output_norm.data ? size_packed(&m->output) : 0;
    for (uint32_t i = 0; i < m->layers_held; i++) {
        const struct model_layer *y = &m->layers[i];
        const struct weight *all[] = {&y->wq, &y->wk, &y->wv, &y->wo, &y->w_gate, &y->w_up, &y->w_down};
        for (size_t j = 0; j < TD_COUNT(all); j++)
            size += size_packed(all[j]);
    }
    return size;
}

const char *cpu_backend_isa(void)
{
    return cpu_ops_find(NULL)->name;
}
