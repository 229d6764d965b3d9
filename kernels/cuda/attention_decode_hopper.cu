/* attention_decode_hopper: as attention_decode.cu, for sm_90 and heads of 64 and 128 values: two blocks an SM, whose feeders run through the
 * pages of all their splits without a stop, so that memory never waits for a split's beginning or end.
 *
 * bytes: 4 * head_dim a token, KV head and layer, each once, up to 192 KB an SM on their way. Measured on an H200, 32/8
 * heads of 128: 4,153 GB/s for 32 rows at 8K, 3,996 for 128 at 1K. */
#include "ring.cuh"

#define WARPS   4
#define BLOCKS  2                 /* an SM */
#define THREADS (32 * WARPS + 32) /* the feeder comes last */
#define SLOTS   3

template <int HD> struct ring_shared {
    uint8_t pages[SLOTS][256 * HD];
    decode_ends<WARPS> ends;
    bells b;
    float o[]; /* [warps][group][HD] */
};

template <int HD>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    ring_kernel(const __grid_constant__ decode_args d, uint32_t items,
                const __grid_constant__ CUtensorMap map)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    ring_shared<HD> &sh = *reinterpret_cast<ring_shared<HD> *>(memory);
    uint32_t kv_heads = d.a.kv_head_count, group = d.a.head_count / kv_heads;
    if (threadIdx.x == 0) {
        bells_init(sh.b, SLOTS, WARPS);
        sh.ends.o = sh.o;
    }
    __syncthreads();
    early_start();
    ring r = {memory, &sh.b, 256 * HD, SLOTS, 0, 0, SLOTS, 0};
    if (threadIdx.x >= 32 * WARPS) {
        bool early = d.a.old_pages;
        if (!early)
            early_wait();
        for (uint32_t i = blockIdx.x; i < items; i += gridDim.x)
            feed_split<HD>(r, d.splits[i / kv_heads], d.a, &map, i % kv_heads * 64, early);
        return;
    }
    early_wait();
    for (uint32_t i = blockIdx.x; i < items; i += gridDim.x) {
        cuda_split s = d.splits[i / kv_heads];
        uint32_t kv_head = i % kv_heads, q[HD / 16][2];
        if (s.page_count == 0) /* behind the last split */
            return;
        load_heads<HD>(q, (const half *)d.a.q + ((uint64_t)s.row * d.a.head_count + kv_head * group) * HD,
                       group);
        decode_state<HD> st = {};
        st.max[0] = st.max[1] = -1e30f;
        use_split<HD, WARPS>(st, r, s, nullptr, q);
        finish_split<HD, WARPS>(sh.ends, st, d, s, i / kv_heads, kv_head, kv_head * group, group);
    }
}

/* --- launching -------------------------------------------------------------------------------- */

template <int HD> static size_t shared_size(uint32_t group)
{
    return sizeof(ring_shared<HD>) + sizeof(float) * WARPS * group * HD;
}

template <int HD> static uint32_t blocks_of() /* 0: not on this device */
{
    static int known; /* blocks + 1 */
    if (known == 0) {
        cudaFuncAttributes code;
        int device = 0, count = 0;
        bool fits = !cudaFuncGetAttributes(&code, ring_kernel<HD>) && code.ptxVersion >= 90 &&
                    !cudaFuncSetAttribute(ring_kernel<HD>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)shared_size<HD>(HEADS)) &&
                    !cudaGetDevice(&device) &&
                    !cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
        cudaGetLastError();
        known = fits ? BLOCKS * count + 1 : 1;
    }
    return (uint32_t)known - 1;
}

uint32_t cuda_attention_ring_blocks(uint32_t head_dim, uint32_t heads_per_kv_head)
{
    return heads_per_kv_head > HEADS ? 0
           : head_dim == 128         ? blocks_of<128>()
           : head_dim == 64          ? blocks_of<64>()
                                     : 0;
}

template <int HD>
static bool launch_ring(cudaStream_t s, const decode_args &d, uint32_t items, uint32_t blocks)
{
    CUtensorMap map;
    if (!cuda_page_map(&map, d.a.kv, HD))
        return false;
    launch_early(ring_kernel<HD>, dim3(items < blocks ? items : blocks), dim3(THREADS),
                 shared_size<HD>(d.a.head_count / d.a.kv_head_count), s, 1, d, items, map);
    return true;
}

bool cuda_attention_ring(cudaStream_t s, const struct cuda_attention *a, const struct cuda_split *splits,
                         uint32_t grid_splits, void *partial, uint32_t *counters)
{
    uint32_t blocks = cuda_attention_ring_blocks(a->head_dim, a->head_count / a->kv_head_count),
             items = grid_splits * a->kv_head_count;
    decode_args d = {*a, splits, (float *)partial, counters, a->kv_head_count};
    if (blocks == 0)
        return false;
    return a->head_dim == 128 ? launch_ring<128>(s, d, items, blocks) : launch_ring<64>(s, d, items, blocks);
}
