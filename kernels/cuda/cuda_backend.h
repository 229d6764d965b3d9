/* cuda_backend: what the files of the CUDA backend share: weights on the device, working memory, and the pass in progress.
 *
 * Memory, all taken by cuda_backend_create: `weights`, `pages` and `work` on the device, `stage` and `io` pinned on the host.
 * A step is cut into passes: the sequences with one layer range. A pass's lists (ids, positions, page tables, work of the
 * attention kernels) are laid out in `stage` and copied to the device at once. */
#ifndef TANDEM_KERNELS_CUDA_CUDA_BACKEND_H
#define TANDEM_KERNELS_CUDA_CUDA_BACKEND_H
#include "kernels/cuda/blas.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/kernels.h"

#define LOGIT_ROWS    128        /* logits are made and copied so many rows at a time */
#define GRAPHS        64         /* recorded decode steps kept */
#define GRAPH_ROWS    LOGIT_ROWS /* the most rows of a recorded step */
#define STEP_SPLITS   256        /* the most of a step kernel */
#define SPLITS_PER_SM 8          /* of decode attention, at most */

/* Matrices with the same input, their outputs side by side; one where all have the same form. */
struct cuda_group {
    struct cuda_matrix m[3];
    uint32_t count, rows; /* rows: of all */
    bool bf16;            /* the kind of the input */
};

struct cuda_layer {
    struct cuda_group qkv, o, gate_up, down;
    const float *attn_norm, *ffn_norm;
    const float *q_bias, *k_bias, *v_bias, *q_norm, *k_norm; /* or NULL */
};

/* Tiles whose 8-bit pages are opened together; of f16 pages all are one. */
struct cuda_turn {
    uint32_t first_tile, tile_count, first_page, page_count;
};

/* The lists of the attention kernels: rows of a list are compact. */
struct cuda_work {
    struct cuda_split *splits; /* in stage; NULL-terminated by empty ones up to split_grid */
    struct cuda_tile *tiles;
    uint32_t split_grid, tile_count;
    /* of 8-bit pages, in stage: those that tiles read; and where each is while it is opened, which their tables point to */
    uint32_t *closed, *opened;
    struct cuda_turn turns[BATCH_SEQS_MAX];
    uint32_t turn_count;
};

struct cuda_pass {
    const struct batch_seq *seqs[BATCH_SEQS_MAX];
    uint32_t seq_count, row_count, layer_begin, layer_end;
    /* rows that go on behind the last layer's K and V; rows that want logits */
    uint32_t kept_count, logit_count;
    bool keeps_all, has_hidden_out;
    /* in stage */
    int32_t *ids;
    uint32_t *positions, *row_table, *kept, *logit_rows, *tables;
    struct cuda_sample *samples; /* of each logit row */
    uint32_t sample_count;       /* wanted ones */
    struct cuda_work all, last;  /* of all layers but the last, and of the last */
    size_t stage_size;
};

struct cuda_graph {
    uint32_t rows, split_grid, sample_count; /* the key; rows 0: free */
    cudaGraphExec_t exec;                    /* NULL: seen once */
    uint64_t used_at;
};

struct cuda_backend {
    struct backend base; /* first: a backend * is a cuda_backend * */
    struct backend_ops ops;
    int device, sm_count;
    cudaStream_t stream;
    struct blas *blas;                   /* or NULL */
    struct workers *workers;             /* for copies on the host */
    const struct backend_config *config; /* while it is made */
    uint32_t rows_max, step_rows;        /* a step of more rows is run layer by layer */
    /* products of 16-bit weights with more rows are product_hopper's, or the library's */
    uint32_t matvec_rows_16;
    bool deterministic; /* products by det_product.cu; attention by tiles, and det_attention.cu */
    int failed;         /* a code, once the device has failed: nothing works after it; atomic */

    struct cuda_layer *layers; /* [layers_paged] */
    struct cuda_matrix embed;
    struct cuda_group head;
    struct cuda_step_layer *step_layers; /* on the device, or NULL: steps are run layer by layer */
    bool has_head;
    const float *output_norm;
    double *frequencies;
    uint8_t *weights, *pages, *work;
    uint64_t page_values; /* f16 values, or bytes of 8-bit pages */
    uint32_t opened_max;  /* pages of one layer that `opened` holds; 0: pages are f16 */
    void *opened;
    uint64_t scratch_rows_size; /* bytes of scratch */

    float *x, *x_kept, *cos_sin, *logits; /* f32 [rows][...] */
    void *act, *wide, *q;                 /* 16-bit [rows][...] */
    void *scratch, *partial, *det_act;
    uint32_t *counters;
    void *letters; /* of the step kernel */
    uint64_t letters_size;
    uint8_t *stage_device, *stage; /* the same layout on both sides */
    size_t stage_size;
    struct cuda_sampled *sampled; /* [LOGIT_ROWS], pinned: the device writes here */
    uint8_t *io;                  /* pinned: hidden states or logits on their way */
    size_t io_size;

    struct cuda_paging *paging;     /* pages.c's */
    struct cuda_profiler *profiler; /* profile.c's */

    struct cuda_graph graphs[GRAPHS];
    const struct cuda_graph *last_graph; /* of the last pass, whose lists are in stage; or NULL */
    uint64_t graph_clock, record_at_us;  /* the second: 0, or when recording is tried again */
    struct cuda_pass pass;
};

static inline uint32_t cuda_q_size(const struct model_params *p)
{
    return p->head_count * p->head_dim;
}
static inline uint32_t cuda_kv_size(const struct model_params *p)
{
    return p->kv_head_count * p->head_dim;
}
static inline bool cuda_is_8bit(const struct cuda_backend *b)
{
    return b->base.kv_dtype != KV_DTYPE_F16;
}
static inline uint64_t cuda_layer_size(const struct cuda_backend *b) /* bytes of a layer of a page */
{
    const struct model_params *p = &b->base.model->params;
    return kv_dtype_layer_size(b->base.kv_dtype, p->kv_head_count, p->head_dim);
}

/* Parts of one allocation, 256-byte aligned. With base NULL it only counts. */
struct cuda_carver {
    uint8_t *base;
    uint64_t used;
};
static inline void *cuda_carve(struct cuda_carver *c, uint64_t size)
{
    uint64_t at = c->used;
    c->used += (size + 255) / 256 * 256;
    return c->base ? c->base + at : NULL;
}

static inline int cuda_code(const struct cuda_backend *b)
{
    return __atomic_load_n(&b->failed, __ATOMIC_RELAXED);
}

/* Something has failed for good: logged once, and the code stays with the backend. The second: by a CUDA error, if it is one. Any thread. */
int cuda_failed(struct cuda_backend *b, int code, const char *what, const char *why);
int cuda_note(struct cuda_backend *b, cudaError_t rc, const char *what);

/* warm.c: steps of all kinds that nobody asked for, so that kernels are loaded and libraries set up before somebody waits, while there is
 * memory for it, and before the time that a step takes is measured. Pages are written. 0, or the code of the step that failed. */
int cuda_warm_up(struct cuda_backend *b);

/* pages.c: pages to and from host memory. The functions are the backend's; made and unmade with it. */
struct cuda_paging;
int cuda_paging_create(struct cuda_backend *b, struct td_error *err);
void cuda_paging_destroy(struct cuda_backend *b);
int cuda_page_read(struct backend *base, uint32_t page, uint32_t layer, uint32_t token_count, uint16_t *k,
                   uint16_t *v);
int cuda_page_write(struct backend *base, uint32_t page, uint32_t layer, uint32_t token_count,
                    const uint16_t *k, const uint16_t *v);
int cuda_page_copy(struct backend *base, uint32_t from, uint32_t to);
int cuda_pieces_write(struct backend *base, struct page_piece *pieces, uint32_t count);
int64_t cuda_swap_start(struct backend *base, const struct page_swap *swap);
int cuda_swap_done(struct backend *base, int64_t ticket, bool wait);
cudaError_t cuda_swaps_query(const struct cuda_backend *b); /* of their stream; any thread */
void *cuda_host_take(struct backend *base, size_t size);
void cuda_host_give(struct backend *base, void *memory);

/* upload.c: with c->base NULL only counts bytes; else fills b's layers and copies, `total` bytes. */
int cuda_place_weights(struct cuda_backend *b, struct cuda_carver *c, uint64_t total,
                       uint64_t *largest_scratch, struct td_error *err);

/* profile.c: a step begins or ends; a pass begins (true: it is looked at, and must not be a graph); what was put on the stream since
 * the last mark is this part; the pass has ended, and the stream was waited for. */
struct cuda_profiler *cuda_profiler_create(void);
void cuda_profiler_destroy(struct cuda_profiler *f);
void cuda_profile_step(struct cuda_profiler *f, bool begins);
bool cuda_profile_begin(struct cuda_backend *b);
void cuda_profile_mark(struct cuda_backend *b, enum cuda_part part);
void cuda_profile_end(struct cuda_backend *b);

/* pass.c: is the batch well formed; the next pass of a batch: fills b->pass from the sequences of one layer range. `done` marks
 * sequences taken; false: none is left. */
bool cuda_pass_next(struct cuda_backend *b, const struct batch *batch, bool *done);
size_t cuda_stage_size(const struct cuda_backend *b);
uint32_t cuda_splits_max(const struct cuda_backend *b);
/* The device's address of something in stage. */
static inline void *cuda_staged(const struct cuda_backend *b, const void *p)
{
    return b->stage_device + ((const uint8_t *)p - b->stage);
}

/* forward.c: can all layers of a decode step be one kernel? Asked once the weights are placed. */
bool cuda_step_possible(struct cuda_backend *b);
int cuda_forward(struct backend *base, const struct batch *batch);

#endif
