/* attention_decode: one query row a sequence over the pages of its KV, split among blocks.
 *
 * grid (splits, KV heads x groups of up to 8 query heads), 4 warps. A block goes over the pages of its split, two in flight; of each
 * page's 64 tokens a warp takes 16:
 *     S^T[16 tokens][8 heads] = K * Q^T      P = 2^(S - max)      O^T[head_dim][8 heads] += V^T * P^T
 * on the tensor cores, with running maxima a warp. All heads of a group share the bytes. The last block of a row and head group to
 * finish adds up the splits, in their order, so no second kernel is needed.
 *
 * bytes: 4 * head_dim a token, KV head and layer, each once; flops 4 * heads * head_dim a token. Memory-bound: 34.8 KB in flight a
 * block, 3 blocks an SM. */
#include "attention_decode.cuh"
#include "kv_8bit.h"

#define WARPS   4
#define THREADS (32 * WARPS)

template <int HD> struct decode_shared {
    half kv[2][2][64 * (HD + 8)]; /* [stage][K, V]; at the end: the warps' results */
    decode_ends<WARPS> ends;
};

template <int HD> struct padded_rows { /* rows of HD + 8 values */
    static __device__ __forceinline__ uint32_t at(uint32_t token, uint32_t piece)
    {
        return (token * (HD + 8) + piece * 8) * 2;
    }
};

template <int HD>
__device__ __forceinline__ void start_page(decode_shared<HD> &sh, const decode_args &d, const cuda_split &s,
                                           uint32_t i, uint32_t kv_head)
{
    if (i < s.page_count) {
        const half *page = (const half *)d.a.kv + d.a.tables[s.table + s.page_begin + i] * d.a.page_values;
        copy_page<HD, THREADS>(sh.kv[i % 2][0], page + (uint64_t)kv_head * 64 * HD);
        copy_page<HD, THREADS>(sh.kv[i % 2][1], page + (uint64_t)(d.a.kv_head_count + kv_head) * 64 * HD);
    }
    copies_commit();
}

template <int HD> __global__ void __launch_bounds__(THREADS) decode_kernel(decode_args d)
{
    extern __shared__ __align__(16) uint8_t memory[];
    decode_shared<HD> &sh = *reinterpret_cast<decode_shared<HD> *>(memory);
    cuda_split s = d.splits[blockIdx.x];
    uint32_t group = d.a.head_count / d.a.kv_head_count, parts = (group + HEADS - 1) / HEADS,
             kv_head = blockIdx.y / parts, part = blockIdx.y % parts,
             first_head = kv_head * group + part * HEADS, heads = min(group - part * HEADS, (uint32_t)HEADS),
             warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    if (s.page_count == 0) /* behind the last split */
        return;
    start_page(sh, d, s, 0, kv_head);
    uint32_t q[HD / 16][2] = {};
    if (g < heads) {
        const uint32_t *row =
            (const uint32_t *)d.a.q + ((uint64_t)s.row * d.a.head_count + first_head + g) * (HD / 2);
#pragma unroll
        for (int i = 0; i < HD / 16; i++)
            q[i][0] = row[8 * i + threadIdx.x % 4], q[i][1] = row[8 * i + 4 + threadIdx.x % 4];
    }
    decode_state<HD> st = {};
    st.max[0] = st.max[1] = -1e30f;
    for (uint32_t i = 0; i < s.page_count; i++) {
        start_page(sh, d, s, i + 1, kv_head);
        copies_wait<1>();
        __syncthreads();
        use_page<HD, padded_rows<HD>>(st, (const uint8_t *)sh.kv[i % 2][0], (const uint8_t *)sh.kv[i % 2][1],
                                      q, warp * 16, (int32_t)s.token_count - (int32_t)i * 64);
        __syncthreads();
    }
    if (threadIdx.x == 0)
        sh.ends.o = reinterpret_cast<float *>(sh.kv);
    __syncthreads();
    finish_split<HD, WARPS>(sh.ends, st, d, s, blockIdx.x, blockIdx.y, first_head, heads);
}

uint64_t cuda_partial_size(const struct cuda_attention *a, uint32_t splits)
{
    return (uint64_t)splits * head_parts(*a) * HEADS * (a->head_dim + 2) * sizeof(float);
}

uint64_t cuda_counters_size(const struct cuda_attention *a, uint32_t rows)
{
    return (DECODE_TURNS + (uint64_t)rows * head_parts(*a)) * sizeof(uint32_t);
}

template <int HD> static void launch_decode(cudaStream_t s, const decode_args &d, uint32_t grid_splits)
{
    cudaFuncSetAttribute(decode_kernel<HD>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)sizeof(decode_shared<HD>));
    launch(decode_kernel<HD>, dim3(grid_splits, d.parts), dim3(THREADS), sizeof(decode_shared<HD>),
           s, d);
}

void cuda_attention_decode(cudaStream_t s, const struct cuda_attention *a, const struct cuda_split *splits,
                           uint32_t grid_splits, void *partial, uint32_t *counters)
{
    decode_args d = {*a, splits, (float *)partial, counters + DECODE_TURNS, head_parts(*a)};
    if (a->dtype != KV_DTYPE_F16)
        return cuda_attention_8bit(s, a, splits, grid_splits, partial, counters + DECODE_TURNS);
    if (cuda_attention_ring(s, a, splits, grid_splits, partial, counters))
        return;
    switch (a->head_dim) {
    case 32:
        return launch_decode<32>(s, d, grid_splits);
    case 64:
        return launch_decode<64>(s, d, grid_splits);
    case 80:
        return launch_decode<80>(s, d, grid_splits);
    case 96:
        return launch_decode<96>(s, d, grid_splits);
    case 128:
        return launch_decode<128>(s, d, grid_splits);
    case 256:
        return launch_decode<256>(s, d, grid_splits);
    }
}
