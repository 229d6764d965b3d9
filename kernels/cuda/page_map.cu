/* page_map: how the copy engine sees rows of 16-bit values: KV pages (boxes of tokens by 64 values of a head), weights, activations. */
#include "device.cuh"
#include "hopper.cuh"
#include <cuda_runtime.h>

static decltype(&cuTensorMapEncodeTiled) encoder() /* or NULL */
{
    static decltype(&cuTensorMapEncodeTiled) encode;
    cudaDriverEntryPointQueryResult found;
    void *entry = nullptr;
    if (encode)
        return encode;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &found) ||
        found != cudaDriverEntryPointSuccess)
        return nullptr;
    return encode = (decltype(encode))entry;
}

bool cuda_map_rows(CUtensorMap *map, const void *values, uint64_t rows, uint32_t columns, uint32_t stride,
                   uint32_t box_rows, bool alone)
{
    cuuint64_t size[2] = {columns, rows}, strides[1] = {(cuuint64_t)stride * 2};
    cuuint32_t box[2] = {64, box_rows}, steps[2] = {1, 1};
    return encoder() &&
           encoder()(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, (void *)(uintptr_t)values, size, strides, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     alone ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool cuda_page_map(CUtensorMap *map, const void *kv, uint32_t head_dim, uint32_t tokens, bool alone)
{
    return cuda_map_rows(map, kv, (uint64_t)1 << 31, head_dim, head_dim, tokens, alone);
}
