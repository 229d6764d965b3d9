/* cpu_backend: what the files of the CPU backend share: prepared weights, working memory, and the step in
 * progress.
 *
 * Memory, all taken by cpu_backend_create: `packed` (repacked weights, none for the portable table), `pages`
 * (KV), and `work` (everything that a step writes, for rows_max rows). Rows of a step lie in `x` in the order
 * of the batch; each operation works on a *compact* list of the rows that take part in the layer at hand. */
#ifndef TANDEM_KERNELS_CPU_CPU_BACKEND_H
#define TANDEM_KERNELS_CPU_CPU_BACKEND_H
#include "kernels/backend.h"
#include "kernels/batch.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/profile.h"
#include <stdatomic.h>

struct cpu_layer {
    struct cpu_matrix q, k, v, o, gate, up, down;
    const float *attn_norm, *ffn_norm;
    const float *q_bias, *k_bias, *v_bias; /* or NULL */
    const float *q_norm, *k_norm;          /* or NULL */
};

#define SPLITS_PER_RANGE 2 /* of attention that is cut by pages too: as many make a task */
#define CUT_BELOW        4 /* tasks of attention for each worker */

struct attention_chunk { /* consecutive kept rows of one sequence */
    uint32_t seq, kept_begin, row_count;
    uint32_t ranges;      /* tasks of each KV head: 1, or one row's pages are cut */
    uint32_t first_split; /* then: its splits lie behind those of the chunks before in `partials` */
};

struct cpu_backend {
    struct backend base; /* first: a backend * is a cpu_backend * */
    const struct cpu_ops *ops;
    struct workers *workers;
    uint32_t rows_max;
    /* bytes of weights that a product's task goes over for all its rows: half of a core's cache */
    size_t chunk_size;

    struct cpu_layer *layers; /* [layers_paged] */
    struct cpu_matrix head;
    bool has_head; /* logits can be computed here */
    const float *output_norm;
    void *packed;
    size_t packed_size;
    float *vectors;      /* all norms and biases */
    double *frequencies; /* [rope_dim / 2], radians a position */
    float q_scale;       /* 1 / sqrt(head_dim) */

    uint16_t *pages;
    size_t page_values, pages_size; /* values of one page, bytes of all */
    size_t pages_taken;             /* bytes that cpu_pages_ahead has been at */

    void *work;
    size_t work_size;
    float *x;               /* [rows][embd]: the residual stream */
    float *cos_sin;         /* [rows][rope_dim] */
    struct activations act; /* compact rows: input of the next product */
    float *wide;            /* compact rows: output of the last product */
    size_t wide_stride;
    uint32_t *row_seq, *row_position; /* [rows] in batch order */
    uint32_t *seq_row;                /* [BATCH_SEQS_MAX] first row of each sequence */
    /* compact lists: rows that run the layer; those that go on after its K and V are written */
    uint32_t *all, *kept;
    uint32_t *kept_from, *kept_position; /* index in `all`, and position, of each kept row */
    struct attention_chunk *chunks;      /* [rows] */
    float *partials;     /* [splits_max][q heads][ATTENTION_PARTIAL]: splits of chunks that are cut */
    uint32_t splits_max; /* as one sequence may have */
    _Atomic uint32_t
        ranges_left[CUT_BELOW * WORKERS_MAX]; /* of each KV head of each chunk, where some are cut */
    float **out_rows[3];                      /* [rows] each */
    uint8_t *scratch;                         /* of each worker */
    size_t scratch_stride;

    /* the step in progress, for the tasks */
    const struct batch *batch;
    const struct cpu_layer *layer;
    uint32_t layer_index, row_count, all_count, kept_count, chunk_count, attention_tasks, cut_splits;

    _Atomic int lost; /* the code since when nothing is computed any more: the weights have changed */

    struct cpu_profile *profile; /* borrowed; NULL: nothing is timed */
};

static inline uint32_t q_size(const struct model_params *p)
{
    return p->head_count * p->head_dim;
}
static inline uint32_t head_group(const struct model_params *p) /* query heads of a KV head */
{
    return p->head_count / p->kv_head_count;
}
static inline uint32_t kv_size(const struct model_params *p)
{
    return p->kv_head_count * p->head_dim;
}

/* Values from the start of a page to K (or V) of one layer and head. */
static inline size_t page_offset(const struct model_params *p, uint32_t layer, bool is_value,
                                 uint32_t kv_head)
{
    return (((size_t)layer * 2 + is_value) * p->kv_head_count + kv_head) * KV_BLOCK_TOKENS * p->head_dim;
}

/* batch.c: of a checked batch, fill row_seq, row_position, seq_row,
 * row_count. */
void batch_map_rows(struct cpu_backend *b, const struct batch *batch);
/* The compact lists and attention chunks of one layer. */
void batch_map_layer(struct cpu_backend *b, uint32_t layer);

/* forward.c */
int cpu_forward(struct backend *base, const struct batch *batch);

#endif
