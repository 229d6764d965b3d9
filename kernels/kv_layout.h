/* kv_layout: what a model says about the meaning of its KV bytes, in one place, so that both sides of a connection name the same layout. */
#ifndef TANDEM_KERNELS_KV_LAYOUT_H
#define TANDEM_KERNELS_KV_LAYOUT_H
#include "kernels/model.h"
#include "shared/kv_block.h"

/* The hash of kv_layout_hash, for a model without an adapter. Slices of one model give the same. */
void model_layout_hash(const struct model *m, uint8_t out[TD_HASH_SIZE]);
struct kv_shape model_kv_shape(const struct model *m); /* all layers of the model */

#endif
