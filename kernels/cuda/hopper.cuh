/* hopper: what sm_90 adds: barriers in shared memory that count bytes, and copies that arrive at them. Code for older devices is
 * compiled too, but must not be started: callers ask for the device first. */
#pragma once
#include <cuda.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* --- barriers --------------------------------------------------------------------------------- */

__device__ __forceinline__ void bell_init(uint64_t *bell, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bell)), "r"(arrivals)
                 : "memory");
}
/* Before other threads, or copies, use bells just made. */
__device__ __forceinline__ void bells_made()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void bell_arrive(uint64_t *bell)
{
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0]; }" ::"r"(shared_address(bell))
                 : "memory");
}
/* Arrive, and let the phase last until so many bytes have come. */
__device__ __forceinline__ void bell_expect(uint64_t *bell, uint32_t bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1; }" ::"r"(shared_address(bell)),
        "r"(bytes)
        : "memory");
#endif
}
/* Until the phase of this parity has ended; a bell just made starts in phase 0, and its "phase 1" has ended. */
__device__ __forceinline__ void bell_wait(uint64_t *bell, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
    uint32_t done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(shared_address(bell)), "r"(parity)
            : "memory");
    } while (!done);
#endif
}
/* Has it ended? One answer for the warp. */
__device__ __forceinline__ bool bell_rang(uint64_t *bell, uint32_t parity)
{
    uint32_t done = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(bell)), "r"(parity)
        : "memory");
#endif
    return __all_sync(0xffffffffu, done);
}

/* --- copies ----------------------------------------------------------------------------------- */

/* Addresses and bytes are multiples of 16. */
__device__ __forceinline__ void copy_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *bell)
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(bell))
        : "memory");
#endif
}
/* A box of a 2-dimensional map, from its column x and row y on. */
__device__ __forceinline__ void copy_box(void *shared, const CUtensorMap *map, int32_t x, int32_t y,
                                         uint64_t *bell)
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
        "%3}], [%4];" ::"r"(shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(shared_address(bell))
        : "memory");
#endif
}
/* The same of what is read once: L2 lets it go before all else. once: read_once(). */
__device__ __forceinline__ void copy_box_once(void *shared, const CUtensorMap *map, int32_t x, int32_t y,
                                              uint64_t *bell, uint64_t once)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_"
                 "hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(shared_address(bell)), "l"(once)
                 : "memory");
#endif
}
__device__ __forceinline__ uint64_t read_once()
{
    uint64_t once = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
#endif
    return once;
}
/* So that the first copy with it does not wait for the map itself. */
__device__ __forceinline__ void fetch_map(const CUtensorMap *map)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}
/* What was written by stores, before the copy engine or wgmma touches it. */
__device__ __forceinline__ void fence_async()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* --- clusters --------------------------------------------------------------------------------- */

/* All threads of a cluster's blocks; what they wrote to their shared memory before is there after it. */
__device__ __forceinline__ void cluster_meet()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
#endif
}
/* The same where nobody wrote anything that others read. */
__device__ __forceinline__ void cluster_part()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
/* Four values at the place of `own` in the shared memory of the cluster's block `rank`. */
__device__ __forceinline__ float4 cluster_load(const float *own, uint32_t rank)
{
    float4 v = {};
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .b32 at; mapa.shared::cluster.u32 at, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, "
        "%3}, [at]; }"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(shared_address(own)), "r"(rank)
        : "memory");
#endif
    return v;
}

/* --- adding in memory ------------------------------------------------------------------------- */

/* Nothing waits for what was there. Aligned to all values. */
__device__ __forceinline__ void add_two(float *to, float x, float y)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#endif
}
/* `bytes` of floats from shared memory, which must last until adds_read; multiples of 16. fence_async comes first. */
__device__ __forceinline__ void add_bulk(float *to, const float *shared, uint32_t bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
#endif
}
__device__ __forceinline__ void adds_read() /* the thread's own; they are done when the kernel is */
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

/* Some of the block's warps: all THREADS of them meet; number: 1 to 15. */
template <int THREADS> __device__ __forceinline__ void meet_warps(int number)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

/* --- pages ------------------------------------------------------------------------------------ */

/* A page of one KV head, K or V: 64 tokens by HD f16, lies in shared memory as HD / 64 planes of 64 rows of 128 bytes, whose
 * 16-byte pieces are exchanged by the token's low bits, as the copy engine and wgmma do it: no bank conflicts. */
#define PLANE_SIZE 8192

__device__ __forceinline__ uint32_t page_at(uint32_t token, uint32_t piece) /* bytes */
{
    return piece / 8 * PLANE_SIZE + token * 128 + ((piece % 8) ^ (token % 8)) * 16;
}

/* A map of all rows of head_dim f16 behind kv, in boxes of `tokens` rows by 64 values. A box's neighbour along the rows comes to L2 with
 * it, but for `alone`: where both are asked for behind each other, memory is quicker without. False: there is no such thing here. */
bool cuda_page_map(CUtensorMap *map, const void *kv, uint32_t head_dim, uint32_t tokens, bool alone);
/* The same of rows of 16-bit values, `stride` values apart, in boxes of box_rows by 64; behind the last row or column lie zeros. */
bool cuda_map_rows(CUtensorMap *map, const void *values, uint64_t rows, uint32_t columns, uint32_t stride,
                   uint32_t box_rows, bool alone);
