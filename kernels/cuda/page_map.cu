/* page_map: how the copy engine sees KV pages: rows of one head's values, in boxes of 64 tokens by 64 values. */
#include "hopper.cuh"
#include <cuda_runtime.h>

bool cuda_page_map(CUtensorMap *map, const void *kv, uint32_t head_dim)
{
    static decltype(&cuTensorMapEncodeTiled) encode;
    cudaDriverEntryPointQueryResult found;
    void *entry = nullptr;
    if (!encode) {
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                             &found) ||
            found != cudaDriverEntryPointSuccess) {
            cudaGetLastError();
            return false;
        }
        encode = (decltype(encode))entry;
    }
    cuuint64_t size[2] = {head_dim, (cuuint64_t)1 << 31}, stride[1] = {(cuuint64_t)head_dim * 2};
    cuuint32_t box[2] = {64, 64}, steps[2] = {1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, (void *)(uintptr_t)kv, size, stride, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
