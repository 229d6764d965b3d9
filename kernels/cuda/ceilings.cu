/* ceilings: a kernel that only reads, for the read rate of the card.
 * grid: 4 blocks an SM, 512 threads, four loads of 16 bytes on their way each. */
#include "device.cuh"
#include "kernels.h"

__global__ void __launch_bounds__(512) read_kernel(const uint4 *in, uint64_t count, uint32_t *sink)
{
    uint32_t sum = 0;
    uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 4 * stride)
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * stride < count) {
                uint4 v = __ldcs(in + i + k * stride);
                sum ^= v.x ^ v.y ^ v.z ^ v.w;
            }
    if (sum == 0x12345678u) /* as good as never; keeps the loads */
        *sink = sum;
}

void cuda_read_all(cudaStream_t s, const void *in, uint64_t size, uint32_t blocks, uint32_t *sink)
{
    launch(read_kernel, dim3(blocks), dim3(512), 0, s, (const uint4 *)in, size / 16, sink);
}
