/* swap: a layer of many pages to or from pinned host memory, read and written by the kernel itself over the bus.
 *
 * grid: a few blocks, 512 threads, four 16-byte moves on their way each: 32 KiB a block, and a bus of 55 GB/s and 2 us holds 110 KB.
 * bytes: each once over the bus, which is the bound; a handful of multiprocessors suffices, the rest computes on. */
#include "device.cuh"
#include "kv_kernels.h"

#define THREADS 512
#define MOVES   4

template <bool TO_HOST>
__global__ void __launch_bounds__(THREADS)
    swap_kernel(uint8_t *layer, uint64_t page_size, const uint32_t *page_list, uint64_t units,
                uint32_t units_per_page, uint4 *host)
{
    uint64_t stride = (uint64_t)gridDim.x * THREADS;
    for (uint64_t first = (uint64_t)blockIdx.x * THREADS + threadIdx.x; first < units;
         first += MOVES * stride) {
        uint4 moved[MOVES];
#pragma unroll
        for (int k = 0; k < MOVES; k++) {
            uint64_t i = first + k * stride;
            if (i >= units)
                continue;
            const uint4 *page =
                (const uint4 *)(layer + page_list[i / units_per_page] * page_size) + i % units_per_page;
            moved[k] = TO_HOST ? __ldcs(page) : __ldcs(host + i);
        }
#pragma unroll
        for (int k = 0; k < MOVES; k++) {
            uint64_t i = first + k * stride;
            if (i >= units)
                continue;
            uint4 *page = (uint4 *)(layer + page_list[i / units_per_page] * page_size) + i % units_per_page;
            __stcs(TO_HOST ? host + i : page, moved[k]);
        }
    }
}

void cuda_swap_layer(cudaStream_t s, uint8_t *layer, uint64_t page_size, const uint32_t *page_list,
                     uint32_t count, uint64_t layer_size, uint8_t *host, int to_host, uint32_t blocks)
{
    launch(to_host ? swap_kernel<true> : swap_kernel<false>, dim3(blocks), dim3(THREADS), 0, s, layer,
           page_size, page_list, count * (layer_size / 16), (uint32_t)(layer_size / 16), (uint4 *)host);
}
