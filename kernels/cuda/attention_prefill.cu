/* attention_prefill: causal attention of chunks of rows over paged KV, on the tensor cores (mma, sm_80 and later).
 *
 * grid (KV heads, tiles), 8 warps. A tile is up to 128 query vectors: `128 / group` rows of a sequence times the heads that share the
 * KV head, so that K and V are read once for all of them. A warp keeps 16 vectors' Q, O, maxima and sums in registers and
 * goes over the pages with the others, two pages in shared memory:
 *     S = Q * K^T      P = 2^(S - max)      O = O * 2^(max before - max) + P * V
 *
 * flops: 4 * head_dim * heads for each pair of positions; bytes: 256 * head_dim a page, tile and KV head, from L2.
 * Predicted: each warp reads all 32 KB of a page pair from shared memory for 0.52 MFLOP, so 128 bytes a clock and SM allow
 * 470 TFLOP/s on an H200; exponentials and barriers leave about 300. */
#include "device.cuh"
#include "kernels.h"
#include <math_constants.h>

#define WARPS   8
#define THREADS (32 * WARPS)
#define VECTORS (16 * WARPS)

struct prefill_args {
    cuda_attention a;
    const cuda_tile *tiles;
};

template <int HD> struct prefill_shared {
    half kv[2][2][64 * (HD + 8)]; /* [stage][K, V] */
};

template <int HD>
__device__ __forceinline__ void start_page(prefill_shared<HD> &sh, const cuda_attention &a,
                                           const cuda_tile &t, uint32_t page_index, uint32_t page_count)
{
    if (page_index < page_count) {
        const half *page = (const half *)a.kv + a.tables[t.table + page_index] * a.page_values;
        copy_page<HD, THREADS>(sh.kv[page_index % 2][0], page + (uint64_t)blockIdx.x * 64 * HD);
        copy_page<HD, THREADS>(sh.kv[page_index % 2][1],
                               page + (uint64_t)(a.kv_head_count + blockIdx.x) * 64 * HD);
    }
    copies_commit();
}

template <int HD> struct vectors { /* of a lane: two vectors, g and g + 8 of the warp's 16 */
    const uint32_t *q[2];          /* NULL: behind the last */
    uint32_t position[2];
    float o[HD / 8][4], max[2], sum[2];
};

/* A registers of Q for 16 of its dimensions. */
template <int HD> __device__ __forceinline__ void load_q(uint32_t a[4], const vectors<HD> &v, int step)
{
    uint32_t at = 8 * step + threadIdx.x % 4;
    for (int i = 0; i < 2; i++) {
        a[i] = v.q[i] ? v.q[i][at] : 0;
        a[i + 2] = v.q[i] ? v.q[i][at + 4] : 0;
    }
}

template <int HD, bool KEPT>
__device__ __forceinline__ void scores(float s[8][4], const vectors<HD> &v,
                                       const uint32_t q[KEPT ? HD / 16 : 1][4], const half *k)
{
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < HD / 16; i++) {
        uint32_t a[4];
        if (KEPT)
            for (int r = 0; r < 4; r++)
                a[r] = q[KEPT ? i : 0][r];
        else
            load_q<HD>(a, v, i);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t b[4];
            ldmatrix(b, k + (16 * j + lane % 8 + lane / 16 * 8) * (HD + 8) + 16 * i + lane / 8 % 2 * 8);
            mma<false>(s[2 * j], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma<false>(s[2 * j + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

template <int HD>
__device__ __forceinline__ void mask(float s[8][4], const vectors<HD> &v, uint32_t first_token)
{
#pragma unroll
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 4; i++)
            if (first_token + 8 * j + 2 * (threadIdx.x % 4) + i % 2 > v.position[i / 2])
                s[j][i] = -CUDART_INF_F;
}

/* Scores to probabilities; what was summed up before is scaled to the new maximum. */
template <int HD> __device__ __forceinline__ void soften(float s[8][4], vectors<HD> &v)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float max = v.max[r];
#pragma unroll
        for (int j = 0; j < 8; j++)
            max = fmaxf(max, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
        float alpha = exp2_fast(v.max[r] - max), sum = 0.0f;
        v.max[r] = max;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            s[j][2 * r] = exp2_fast(s[j][2 * r] - max);
            s[j][2 * r + 1] = exp2_fast(s[j][2 * r + 1] - max);
            sum += s[j][2 * r] + s[j][2 * r + 1];
        }
        v.sum[r] = v.sum[r] * alpha + sum;
#pragma unroll
        for (int j = 0; j < HD / 8; j++)
            v.o[j][2 * r] *= alpha, v.o[j][2 * r + 1] *= alpha;
    }
}

template <int HD>
__device__ __forceinline__ void add_values(const float s[8][4], vectors<HD> &v, const half *values)
{
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) { /* 16 tokens */
        uint32_t a0 = half2_bits(__floats2half2_rn(s[2 * i][0], s[2 * i][1])),
                 a1 = half2_bits(__floats2half2_rn(s[2 * i][2], s[2 * i][3])),
                 a2 = half2_bits(__floats2half2_rn(s[2 * i + 1][0], s[2 * i + 1][1])),
                 a3 = half2_bits(__floats2half2_rn(s[2 * i + 1][2], s[2 * i + 1][3]));
#pragma unroll
        for (int j = 0; j < HD / 16; j++) {
            uint32_t b[4];
            ldmatrix_trans(b, values + (16 * i + lane % 16) * (HD + 8) + 16 * j + lane / 16 * 8);
            mma<false>(v.o[2 * j], a0, a1, a2, a3, b[0], b[1]);
            mma<false>(v.o[2 * j + 1], a0, a1, a2, a3, b[2], b[3]);
        }
    }
}

template <int HD> __device__ __forceinline__ void store(const cuda_attention &a, vectors<HD> &v)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = v.sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (!v.q[r])
            continue;
        uint32_t *out = (uint32_t *)a.out + (v.q[r] - (const uint32_t *)a.q) + threadIdx.x % 4;
        float scale = 1.0f / sum;
#pragma unroll
        for (int j = 0; j < HD / 8; j++) {
            float x = v.o[j][2 * r] * scale, y = v.o[j][2 * r + 1] * scale;
            out[4 * j] = a.out_bf16 ? to_pair<true>(x, y) : to_pair<false>(x, y);
        }
    }
}

template <int HD> __global__ void __launch_bounds__(THREADS) prefill_kernel(prefill_args d)
{
    extern __shared__ __align__(16) uint8_t memory[];
    prefill_shared<HD> &sh = *reinterpret_cast<prefill_shared<HD> *>(memory);
    constexpr bool KEPT = HD <= 128;
    cuda_tile t = d.tiles[blockIdx.y];
    uint32_t group = d.a.head_count / d.a.kv_head_count, page_count = (t.position + t.count - 1) / 64 + 1;
    vectors<HD> v = {};
    for (int i = 0; i < 2; i++) {
        uint32_t m = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i, row = m / group;
        bool inside = row < t.count;
        v.q[i] = inside ? (const uint32_t *)d.a.q +
                              ((uint64_t)(t.row + row) * d.a.head_count + blockIdx.x * group + m % group) *
                                  (HD / 2)
                        : nullptr;
        v.position[i] = t.position + min(row, t.count - 1);
        v.max[i] = -1e30f;
    }
    uint32_t q[KEPT ? HD / 16 : 1][4];
    if (KEPT)
#pragma unroll
        for (int i = 0; i < HD / 16; i++)
            load_q<HD>(q[KEPT ? i : 0], v, i);
    start_page(sh, d.a, t, 0, page_count);
    for (uint32_t page = 0; page < page_count; page++) {
        start_page(sh, d.a, t, page + 1, page_count);
        copies_wait<1>();
        __syncthreads();
        float s[8][4] = {};
        scores<HD, KEPT>(s, v, q, sh.kv[page % 2][0]);
        if (page * 64 + 63 > t.position)
            mask<HD>(s, v, page * 64);
        soften<HD>(s, v);
        add_values<HD>(s, v, sh.kv[page % 2][1]);
        __syncthreads();
    }
    store<HD>(d.a, v);
}

bool cuda_attention_has(uint32_t head_dim)
{
    return head_dim == 32 || head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 ||
           head_dim == 256;
}

uint32_t cuda_tile_rows(uint32_t head_count, uint32_t kv_head_count)
{
    return VECTORS / (head_count / kv_head_count);
}

template <int HD> static void launch_prefill(cudaStream_t s, const prefill_args &d, uint32_t tile_count)
{
    cudaFuncSetAttribute(prefill_kernel<HD>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)sizeof(prefill_shared<HD>));
    launch(prefill_kernel<HD>, dim3(d.a.kv_head_count, tile_count), dim3(THREADS), sizeof(prefill_shared<HD>),
           s, d);
}

void cuda_attention_prefill(cudaStream_t s, const struct cuda_attention *a, const struct cuda_tile *tiles,
                            uint32_t tile_count)
{
    prefill_args d = {*a, tiles};
    if (cuda_attention_hopper(s, a, tiles, tile_count))
        return;
    switch (a->head_dim) {
    case 32:
        return launch_prefill<32>(s, d, tile_count);
    case 64:
        return launch_prefill<64>(s, d, tile_count);
    case 80:
        return launch_prefill<80>(s, d, tile_count);
    case 96:
        return launch_prefill<96>(s, d, tile_count);
    case 128:
        return launch_prefill<128>(s, d, tile_count);
    case 256:
        return launch_prefill<256>(s, d, tile_count);
    }
}
