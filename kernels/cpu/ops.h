/* ops: the operations of a forward pass, one table an instruction set. All tables give the same bits
 * (numerics.h); ops_portable.c is the definition in plain C, the others are measured and tested against it.
 *
 * Nothing here allocates or keeps state; scratch memory comes from the caller. */
#ifndef TANDEM_KERNELS_CPU_OPS_H
#define TANDEM_KERNELS_CPU_OPS_H
#include "kernels/cpu/blocks.h"
#include "kernels/model.h"
#include "shared/kv_block.h"

/* outputs (weight rows) that a matmul computes together, in tables of eight lanes or fewer */
#define TILE_ROWS 8

/* A weight matrix as a table's matmul wants it. */
struct cpu_matrix {
    uint32_t type, columns, rows;
    const void *source; /* as in the file */
    void *packed;       /* pack_size bytes, 64-byte aligned; NULL when the table reads `source` */
};

/* Rows of activations, in f32 and, for quantised weights, as int8 blocks. Row r of x is at x + r * x_stride,
 * and so on. */
struct activations {
    float *x;
    int8_t *q;    /* [columns], padded to q_stride */
    float *d, *s; /* [columns / 32] */
    int32_t *sum; /* [columns / 32]: of q */
    size_t x_stride, q_stride, block_stride;
};

/* One KV head of one layer of one sequence, for some query vectors; positions and heads are flattened: vector
 * i is head i % group of query row i / group. */
struct attention_job {
    const float *q; /* of the first row and head of the group, scaled; next head at + head_dim, next row at +
                       q_stride */
    float *out;     /* as q, rows at + out_stride */
    size_t q_stride, out_stride;
    const uint32_t *positions; /* [vector_count / group] of each row, ascending */
    uint32_t vector_count, group, head_dim;
    const uint32_t *pages;        /* the sequence's */
    const uint16_t *kv;           /* page 0, this layer's K of this KV head: [token][head_dim] */
    size_t page_stride, v_offset; /* in values: to the next page; from K to V of the same head */
    /* Not NULL: only splits [split_begin, split_end) are computed, each to its place here, and nothing to `out`;
     * attention_reduce combines them all later. [split][vector_count][ATTENTION_PARTIAL(head_dim)] */
    float *partial;
    uint32_t split_begin, split_end;
};
#define ATTENTION_VECTORS 64 /* most vectors of a job, or one row's group if that is more */
/* values: o, then max and sum of the split */
#define ATTENTION_PARTIAL(head_dim) (align_up(head_dim, 16) + 16)

static inline float *attention_partial(const struct attention_job *job, uint32_t split, uint32_t vector)
{
    return job->partial + ((size_t)split * job->vector_count + vector) * ATTENTION_PARTIAL(job->head_dim);
}

/* What the splits so far have given to a vector. */
struct attention_running {
    float max, sum;
};

static inline void attention_keep(const struct attention_job *job, uint32_t split, uint32_t vector, float max,
                                  float sum, const float *o)
{
    float *to = attention_partial(job, split, vector), *state = to + align_up(job->head_dim, 16);
    if (to != o)
        memcpy(to, o, sizeof(float) * job->head_dim);
    state[0] = max, state[1] = sum;
}

static inline const float *attention_kept(const struct attention_job *job, uint32_t split, uint32_t vector,
                                          struct attention_running *state)
{
    const float *from = attention_partial(job, split, vector);
    memcpy(state, from + align_up(job->head_dim, 16), sizeof *state);
    return from;
}

/* Splits that the last vector of a job sees. */
static inline uint32_t attention_splits(const struct attention_job *job)
{
    return job->positions[(job->vector_count - 1) / job->group] / KV_BLOCK_TOKENS + 1;
}

struct cpu_ops {
    const char *name;
    uint32_t tile_rows; /* rows of a tile: the unit of packing and of work */
    /* of quantised weights a tile is opened once for as many rows; 0: for a few at a time */
    uint32_t part_rows;
    /* bytes of the repacked form, 0: the source is used. pack: tiles [begin, end). */
    size_t (*pack_size)(const struct cpu_matrix *m);
    void (*pack)(const struct cpu_matrix *m, uint32_t tile_begin, uint32_t tile_end);
    /* out[r][i] = sum over columns of weight[i] * activation row (first_row + r), for i in the rows of tiles
     * [begin, end). */
    void (*matmul)(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                   uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end);
    void (*quantise)(const struct activations *a, uint32_t row,
                     uint32_t columns); /* x of a row to q, d, s, sum */
    void (*norm)(const float *x, const float *weight, float eps, uint32_t count,
                 float *out);                                                       /* out may be x */
    void (*swiglu)(const float *gate, const float *up, uint32_t count, float *out); /* out may be gate */
    void (*exp_scaled)(const float *x, float shift, float scale, size_t count,
                       float *out);                                 /* exp((x - shift) * scale) */
    size_t (*attention_scratch)(uint32_t head_dim, uint32_t group); /* bytes, 64-byte aligned, one a thread */
    void (*attention)(const struct attention_job *job, void *scratch);
    void (*attention_reduce)(
        const struct attention_job *job); /* all splits of `partial` to `out`, of one row */
    /* For the bench, or NULL: `rounds` of this instruction set's best integer dot product (which must be its products'
     * too) or fma on registers. Returns the operations done, multiplications and additions. */
    double (*spin_dot)(uint32_t rounds);
    double (*spin_fma)(uint32_t rounds);
};

extern const struct cpu_ops cpu_ops_portable;
#if defined(__x86_64__)
extern const struct cpu_ops cpu_ops_avx2, cpu_ops_avx512;
#elif defined(__aarch64__)
extern const struct cpu_ops cpu_ops_neon, cpu_ops_neon_dotprod, cpu_ops_neon_i8mm;
#endif
/* The table of that name, NULL: the best that this CPU can run. NULL is returned for a name that is unknown
 * or cannot run here. */
const struct cpu_ops *cpu_ops_find(const char *name);
/* The tables that this CPU can run, best first, cpu_ops_portable last; NULL behind it. */
const struct cpu_ops *cpu_ops_at(size_t index);

static inline uint32_t tile_count(const struct cpu_ops *ops, const struct cpu_matrix *m)
{
    return (m->rows + ops->tile_rows - 1) / ops->tile_rows;
}

/* Shared by all tables: three roundings a value, no fused operation, so plain C is already the same
 * everywhere. */
void rope_rotate(float *head, const float *cos_sin, uint32_t rope_dim, enum rope_kind kind);

#endif
