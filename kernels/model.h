/* model: hyper-parameters and the weight table of a GGUF file, for any layer range that the file holds.
 * The table borrows from the mapped file; a backend may copy or repack it. */
#ifndef TANDEM_KERNELS_MODEL_H
#define TANDEM_KERNELS_MODEL_H
#include "shared/gguf.h"

enum model_arch { MODEL_LLAMA, MODEL_QWEN2, MODEL_QWEN3 };
enum rope_kind {
    ROPE_INTERLEAVED /* llama GGUF: pairs (2i, 2i+1) */,
    ROPE_HALVES /* NEOX: pairs (i, i + d/2) */
};
enum rope_scaling { ROPE_SCALING_NONE, ROPE_SCALING_LINEAR, ROPE_SCALING_YARN_REFUSED };

struct model_params {
    enum model_arch arch;
    uint32_t layer_count, embd_size, ffn_size, head_count, kv_head_count, head_dim, vocab_count, context_max;
    float norm_eps;
    enum rope_kind rope_kind;
    uint32_t rope_dim;           /* rotated values of each head, <= head_dim */
    float rope_base, rope_scale; /* position is divided by rope_scale (linear); 1 otherwise */
    bool tied_output;
    bool has_rope_factors; /* rope_freqs.weight: frequency i is divided by factor i (Llama 3) */
};

struct weight {    /* [rows][columns] row-major, quantised along columns */
    uint32_t type; /* enum gguf_type */
    uint32_t columns, rows;
    const void *data; /* NULL: absent (optional bias, layer not held) */
};

struct model_layer {
    struct weight attn_norm, wq, wk, wv, wo, ffn_norm, w_gate, w_up, w_down;
    struct weight bq, bk, bv;     /* qwen2 */
    struct weight q_norm, k_norm; /* qwen3, [head_dim] */
};

struct model {
    struct gguf *file; /* borrowed */
    struct model_params params;
    uint32_t layers_held; /* layers [0, layers_held) are present */
    struct weight embed, output_norm, output, rope_factors;
    struct model_layer *layers;
    uint8_t fingerprint[TD_HASH_SIZE]; /* filled by the caller through gguf_fingerprint when it needs it */
};

/* Check architecture, hyper-parameters (plausible ranges, head_dim multiples), presence, shape and type of every tensor.
 * The file must outlive the model. */
int model_load(struct gguf *file, struct model **out, struct td_error *err);
void model_free(struct model *m);
/* bytes of weights of layers [begin, end) that a forward pass reads (for estimates and roofline). */
uint64_t model_weight_bytes(const struct model *m, uint32_t layer_begin, uint32_t layer_end);
/* The share of a token's cost at position 0 that each position before it adds, reckoned from operations: one of attention, between floats, takes as long as
 * MODEL_ATTENTION of a product with quantised weights. */
#define MODEL_ATTENTION 3.0
double model_rise(const struct model_params *p);

#endif
