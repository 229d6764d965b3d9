/* early: kernels that begin while the one before them on the stream ends (programmatic dependent launch, sm_90). A kernel started by
 * launch_early does, before early_wait, only what needs nothing that a kernel of this step wrote and writes nothing that one reads;
 * and every one of its threads that does more calls early_wait first, even if the kernel before it is known to be over: who waits for
 * this kernel takes it that those before it have ended too. early_start lets the next one begin as soon as there is room.
 * Other devices start kernels one after the other. */
#pragma once
#include "device.cuh"

__device__ __forceinline__ void early_start()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void early_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Is the kernel's code for this device one that waits? PTX of an older one, compiled by the driver, does not. All kernels of a file
 * are made for the same devices. */
static bool waits(const void *kernel)
{
    static known_devices known;
    return known_of_device(known, [kernel] {
               cudaFuncAttributes code;
               return !cudaFuncGetAttributes(&code, kernel) && code.ptxVersion >= 90;
           }) > 0;
}

/* cluster: blocks that share their memory, or 1. */
template <class... P, class... A>
static void launch_early(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                         uint32_t cluster, A... args)
{
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = attributes;
    if (waits((const void *)kernel)) {
        attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[0].val.programmaticStreamSerializationAllowed = 1;
        config.numAttrs = 1;
    }
    if (cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs].val.clusterDim.x = cluster;
        attributes[config.numAttrs].val.clusterDim.y = attributes[config.numAttrs].val.clusterDim.z = 1;
        config.numAttrs++;
    }
    cuda_launched(cudaLaunchKernelEx(&config, kernel, (P)args...));
}
