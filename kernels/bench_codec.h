/* bench_codec: what a level of the KV codec does to a model's predictions.
 *
 * Each window is a prefix and its continuation. The prefix runs once; its KV, of all layers, goes through the codec; then
 * the continuation runs on what came back, and each of its predictions is compared with the one on the KV as it was. Only
 * continuation tokens count: they alone look at nothing but decoded KV. All layers are the worst case, as a device
 * sends [0, k) alone.
 *
 * The forward pass should have f32 activations (bench_codec_widen): with weights of 4 bits an engine rounds
 * activations to 8, which moves predictions by more than a codec does and would drown it. */
#ifndef TANDEM_KERNELS_BENCH_CODEC_H
#define TANDEM_KERNELS_BENCH_CODEC_H
#include "kernels/model.h"
#include "shared/kv_record.h"

struct codec_window {
    const int32_t *ids;    /* [prefix_count + count]; borrowed */
    uint32_t prefix_count; /* a multiple of KV_BLOCK_TOKENS */
    uint32_t count; /* continuation tokens; the last one's prediction has nothing to be compared with */
};

struct bench_codec_options {
    unsigned threads;
    uint32_t level_mask; /* bit i: KV_LEVEL_LIST[i] is measured */
    progress_fn progress;
    void *progress_ctx;
    /* NULL, or called with each payload before it is decoded: how tests make a codec that is broken. */
    void (*spoil)(const struct kv_piece_head *head, uint8_t *payload);
};

/* Make all quantised weights f32, 4 bytes each, in *memory: to be freed when the model is done with. */
int bench_codec_widen(struct model *m, float **memory, struct td_error *err);

/* Fills token_count and the levels asked for. Confidence: 1.96 standard errors of the mean change of log likelihood, windows
 * being the independent samples. */
int bench_codec(const struct model *m, const struct codec_window *windows, uint32_t window_count,
                const struct bench_codec_options *options, struct kv_record *out, struct td_error *err);

#endif
