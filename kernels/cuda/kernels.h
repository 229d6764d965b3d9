/* kernels: the CUDA kernels' launchers, in C. Each puts work on a stream and returns; arguments are checked by the caller
 * (backend.c, forward.c), which also asks what could not be launched at the end of a step.
 *
 * Names of sizes: R rows of the step, K columns and N rows of a weight matrix. 16-bit values are f16, or bf16 where a
 * flag says so. */
#ifndef TANDEM_KERNELS_CUDA_KERNELS_H
#define TANDEM_KERNELS_CUDA_KERNELS_H
#include "kernels/kv_dtype.h"
#include "kernels/sample.h"
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- launching -------------------------------------------------------------------------------- */

/* Told by each launcher: the answer of a launch. And the first of this thread that was an error, since it was last asked for. */
void cuda_launched(cudaError_t rc);
cudaError_t cuda_launch_error(void);

/* --- weights ---------------------------------------------------------------------------------- */

/* How a matrix lies on the device. Quantised ones are repacked into planes: codes, row by row, and one pair (d, m) of
 * f16 for each group of values along the row: value = d * code + m.
 *   W4     Q4_0, Q4_1, Q4_K: 16 bytes for 32 values; nibbles p and p + 4 of a 32-bit word are neighbours 2p, 2p + 1
 *   W8     Q5_0, Q5_1, Q5_K: a byte a value, code + 128
 *   W8D    Q8_0: the same, with d alone, as there is no m
 *   W8G16  Q6_K: as W8, with a pair for each 16 values */
enum cuda_form { CUDA_F32, CUDA_F16, CUDA_BF16, CUDA_W4, CUDA_W8, CUDA_W8D, CUDA_W8G16 };

struct cuda_matrix {
    enum cuda_form form;
    uint32_t columns, rows;
    const void *values;
    const void *scales; /* half2, W8D half [rows][columns / group]; NULL for float forms */
};

/* raw: GGUF blocks of `rows` rows; to the planes at values and scales (those of the first of these rows). */
void cuda_repack(cudaStream_t s, uint32_t gguf_type, const void *raw, uint32_t rows, uint32_t columns,
                 void *values, void *scales);
/* Rows [first, first + count) of m as f16, [count][columns]; too large values are cut to the range of f16. */
void cuda_dequantise(cudaStream_t s, const struct cuda_matrix *m, uint32_t first, uint32_t count, void *out);

/* --- rows ------------------------------------------------------------------------------------- */

/* x[r] = embedding of ids[r], f32 [R][K]. */
void cuda_embed(cudaStream_t s, const struct cuda_matrix *table, const int32_t *ids, uint32_t rows, float *x);
/* cos_sin[r] = cos of all pairs, then sin: f32 [R][2 * pairs]; angles in binary64. */
void cuda_angles(cudaStream_t s, const uint32_t *positions, const double *frequencies, uint32_t rows,
                 uint32_t pairs, float *cos_sin);
/* act[i] = rms_norm(x[index ? index[i] : i]) * weight, 16-bit. */
void cuda_norm(cudaStream_t s, const float *x, const uint32_t *index, const float *weight, float eps,
               uint32_t rows, uint32_t columns, bool bf16, void *act);
/* act = silu(gate) * up; wide rows are [gate | up], 2 * columns values. */
void cuda_swiglu(cudaStream_t s, const void *wide, uint32_t rows, uint32_t columns, bool bf16, bool out_bf16,
                 void *act);
/* out[i] = in[index[i]] for rows of row_size bytes, a multiple of 16. */
void cuda_gather(cudaStream_t s, const void *in, const uint32_t *index, uint32_t rows, uint32_t row_size,
                 void *out);

struct cuda_rope {    /* bias, head norms, rotation; q to q_out, K and V to their pages */
    const void *wide; /* 16-bit [R][q | k | v] */
    bool bf16;
    uint32_t rows, head_count, kv_head_count, head_dim, rope_dim;
    bool interleaved;
    float norm_eps, q_scale;
    const float *cos_sin;
    const float *q_bias, *k_bias, *v_bias, *q_norm, *k_norm; /* or NULL */
    const uint32_t *positions, *row_table; /* row_table: where the row's sequence begins in `tables` */
    const uint32_t *tables;                /* pages of each sequence, one after the other */
    void *q_out;                           /* f16 [R][head_count][head_dim], times q_scale */
    void *kv;                              /* the layer's first byte in page 0 */
    uint64_t page_values;                  /* between pages: f16 values, or bytes of 8-bit pages */
    enum kv_dtype dtype;                   /* of pages */
};
void cuda_rope_write(cudaStream_t s, const struct cuda_rope *a);

/* --- products --------------------------------------------------------------------------------- */

#define CUDA_MATVEC_ROWS 16 /* the most rows of one call */

enum cuda_epilogue { CUDA_STORE16, CUDA_ADD_F32, CUDA_STORE_F32, CUDA_SWIGLU16 };

struct cuda_product {
    struct cuda_matrix m; /* with CUDA_SWIGLU16: gate rows, then as many up rows */
    const void *act;      /* 16-bit [R][act_stride] */
    bool act_bf16;
    uint32_t rows, act_stride;
    enum cuda_epilogue epilogue;
    void *out; /* [R][out_stride]: 16-bit of act's kind, or f32 */
    uint32_t out_stride;
};
/* rows <= CUDA_MATVEC_ROWS, columns a multiple of 32. */
void cuda_matvec(cudaStream_t s, const struct cuda_product *p);

#define CUDA_STREAM_ROWS 128
/* Up to CUDA_STREAM_ROWS rows, weights of act's 16-bit kind, every epilogue. False: not on this device, or not for these widths; nothing
 * was started. splits: blocks to share a tile's columns, up to 8; 0: what is best, and false where with more than 64 rows that is the
 * library. */
bool cuda_product_hopper(cudaStream_t s, const struct cuda_product *p, uint32_t splits);

/* --- attention -------------------------------------------------------------------------------- */

struct cuda_attention {
    const void *q; /* f16 [R][heads][head_dim], scaled by log2(e) / sqrt(head_dim) */
    void *out;     /* 16-bit [R][heads][head_dim] */
    bool out_bf16;
    uint32_t head_count, kv_head_count, head_dim;
    const void *kv; /* the layer's first byte in page 0 */
    uint64_t page_values;
    enum kv_dtype dtype;
    const uint32_t *tables;
    bool old_pages;    /* of each sequence only the last page is written in this step */
    bool fixed_splits; /* of tiles: as cuda-det-v2 has it (det_attention.cuh) */
};

struct cuda_split { /* a run of pages of one decode row */
    /* tokens from page_begin on that the row sees */
    uint32_t row, table, page_begin, page_count, token_count;
    /* of its row: indices in the list; of cuda-det-v2, whose list has another order, where in `partial` what they find lies */
    uint32_t first_split, split_count;
};
struct cuda_tile { /* rows [row, row + count) of one sequence */
    uint32_t row, count, position, table;
};

bool cuda_attention_has(uint32_t head_dim);
/* Query rows of one tile at most. */
uint32_t cuda_tile_rows(uint32_t head_count, uint32_t kv_head_count);
/* Bytes of `partial` for so many splits, and of `counters` (zeroed once) for so many rows. */
uint64_t cuda_partial_size(const struct cuda_attention *a, uint32_t splits);
uint64_t cuda_counters_size(const struct cuda_attention *a, uint32_t rows);
/* One row a sequence. splits: [grid_splits] on the device, of which *count are in use. Pages of any kind; all else here takes f16. */
void cuda_attention_decode(cudaStream_t s, const struct cuda_attention *a, const struct cuda_split *splits,
                           uint32_t grid_splits, void *partial, uint32_t *counters);
/* The same with the copy engine: two blocks an SM take splits in turns. False: not on this device, or not for these heads; nothing was
 * started. Blocks: 0 where it is so. */
bool cuda_attention_ring(cudaStream_t s, const struct cuda_attention *a, const struct cuda_split *splits,
                         uint32_t grid_splits, void *partial, uint32_t *counters);
/* cuda_rope_write and cuda_attention_decode in one, where each sequence has one row and all rows have splits; a->q is not read. False: as
 * above. */
bool cuda_attention_fresh(cudaStream_t s, const struct cuda_rope *rope, const struct cuda_attention *a,
                          const struct cuda_split *splits, uint32_t grid_splits, void *partial,
                          uint32_t *counters);
uint32_t cuda_attention_ring_blocks(uint32_t head_dim, uint32_t heads_per_kv_head);
void cuda_attention_prefill(cudaStream_t s, const struct cuda_attention *a, const struct cuda_tile *tiles,
                            uint32_t tile_count);
/* The same with wgmma, and a->fixed_splits. False: not on this device, or for this head size; nothing was started. */
bool cuda_attention_hopper(cudaStream_t s, const struct cuda_attention *a, const struct cuda_tile *tiles,
                           uint32_t tile_count);

/* --- a whole decode step ------------------------------------------------------------------------ */

#define CUDA_STEP_ROWS 4

struct cuda_step_layer {
    struct cuda_matrix qkv, o, gate_up, down;
    const float *attn_norm, *ffn_norm, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm;
};

struct cuda_step {                        /* one row a sequence, all layers: x in, x out */
    const struct cuda_step_layer *layers; /* on the device; all matrices of one form */
    uint32_t layer_count, rows, embd, ffn;
    float *x;
    struct cuda_rope rope; /* without wide, biases and norms; kv: of layer 0 */
    struct cuda_attention attention;
    const struct cuda_split *splits;
    uint32_t split_grid;
    void *letters; /* what blocks tell each other */
    uint64_t letters_size;
};
/* Bytes of `letters` for these rows, widths and splits. */
uint64_t cuda_step_letters(const struct cuda_step *a);
/* False: this form, head size or device is not made for it; nothing was started. only_asks: nothing is started. */
bool cuda_step_run(cudaStream_t s, enum cuda_form form, bool bf16, const struct cuda_step *a,
                   uint32_t sm_count, bool only_asks);

/* --- sampling --------------------------------------------------------------------------------- */

#define SAMPLE_TOP_MAX 20 /* SAMPLER_LOGPROBS_MAX */

struct cuda_sample { /* one row's draw: kernels/sampler.h, made ready */
    bool wanted, wants_logprob;
    float inverse; /* 1 / temperature; 0: greedy */
    uint32_t top_k, top_count;
    float top_p, min_p, repetition_penalty;
    double uniform;     /* the random number, in [0, 1) */
    uint64_t adjust_at; /* bytes behind `lists` */
    uint32_t adjust_count;
    const struct sample_adjust *adjust; /* the device's */
};
struct cuda_sampled {
    int32_t id; /* -1: logits that are not finite */
    float logprob;
    int32_t top_id[SAMPLE_TOP_MAX];
    float top_logprob[SAMPLE_TOP_MAX];
};
/* logits: [rows][vocab]; those of wanted rows are changed. */
void cuda_sample_rows(cudaStream_t s, const struct cuda_sample *samples, const void *lists, float *logits,
                      uint32_t rows, uint32_t vocab, struct cuda_sampled *out);

/* --- ceilings --------------------------------------------------------------------------------- */

/* Reads `size` bytes, a multiple of 16, and keeps nothing. */
void cuda_read_all(cudaStream_t s, const void *in, uint64_t size, uint32_t blocks, uint32_t *sink);

#ifdef __cplusplus
}
#endif
#endif
