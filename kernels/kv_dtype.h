/* kv_dtype: what a page keeps a value of K or V in. Blocks on disk and on the wire are f16 in any case.
 *
 * With 8 bits a row (head_dim values of one token and KV head, of K or of V) is a byte a value and one f16 S beside them:
 *   fp8   value = e4m3 * S / 128, S a power of two: the row's largest value comes to 240 to 448. Off by 2^-4 of itself, or 2^-10 * S / 128
 *   int8  value = code * S / 127, S the row's largest value, codes -127 to 127. Off by S / 254
 * Both of the row as rounded to f16, and what they stand for, rounded to f16, gives the same bytes again: a block that left a page and
 * comes back is what it was. */
#ifndef TANDEM_KERNELS_KV_DTYPE_H
#define TANDEM_KERNELS_KV_DTYPE_H
#include <stdbool.h>
#include <stdint.h>

enum kv_dtype { KV_DTYPE_F16, KV_DTYPE_FP8, KV_DTYPE_INT8 };

/* "f16", "fp8", "int8". False: it is none of them. */
bool kv_dtype_find(const char *name, enum kv_dtype *out);
/* Bytes of one layer of one page. */
uint64_t kv_dtype_layer_size(enum kv_dtype dtype, uint32_t kv_head_count, uint32_t head_dim);

#endif
