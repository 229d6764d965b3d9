/* det_attention: attention of cuda-det-v1 for rows that are alone in their sequence, as in decoding (sm_90a; heads of 64 and 128 values).
 *
 * The rule is what attention_hopper.cu does with a tile, whose other vectors change nothing for one: blocks of 128 tokens on absolute
 * positions, a running maximum a block; a score is one chain of tensor-core instructions over the dimensions, 16 each; a value one over the
 * tokens, scaled at each block; of the exponentials of a block, tokens that lie 8 apart are added up one after the other, neighbours
 * then, and the last four sums at the end. A tile of one row would fill 4 of its 128 vectors and read pages one SM a block at a time;
 * here tensor cores see tokens as rows and heads as columns, as in attention_decode.cu:
 *     S^T[128 tokens][8 heads] = K * Q^T      P = 2^(S - max)      O^T[head_dim][8 heads] += V^T * P^T
 *
 * grid: two blocks an SM, which take rows and KV heads in turns. Of a block's scores each of four warps makes a quarter of the tokens, of its
 * values a quarter of the dimensions; maxima and P go through shared memory. A fifth warp feeds pages, K and V apart, without a stop.
 *
 * bytes: 4 * head_dim a token, KV head and layer, each once. Memory-bound where items fill the SMs; one alone takes 1.4 us a block of tokens.
 * Measured on an H200, 32/8 heads of 128: 128 rows at 1K 4,400 GB/s (tiles of one row: 3,810), 32 at 8K 4,500 (4,140), 1 at 8K 93 us (97). */
#include "det_kernels.h"
#include "ring.cuh"

#define WARPS   4
#define BLOCKS  2                 /* an SM */
#define THREADS (32 * WARPS + 32) /* the feeder comes last */
#define TOKENS  128               /* of a block of the rule: two pages */

#define SLOTS     6  /* of a page's K, or V, with two blocks an SM */
#define SLOTS_ONE 12 /* with one */

template <int HD> struct det_shared {
    uint64_t full[SLOTS_ONE], empty[SLOTS_ONE];
    float p[TOKENS][HEADS];
    half p16[HEADS][TOKENS + 8];
    float max[WARPS][HEADS], sum[HEADS];
    alignas(1024) uint8_t slots[][128 * HD];
};

struct det_args {
    cuda_attention a;
    const cuda_split *splits;
    uint32_t items; /* splits x KV heads */
    uint32_t slots;
};

struct place { /* in the slots */
    uint32_t count, at, parity;
    __device__ __forceinline__ void step()
    {
        if (++at == count)
            at = 0, parity ^= 1;
    }
};

/* --- feeding ---------------------------------------------------------------------------------- */

/* One thread. The last page is written by kernels before this one; the others too, unless they are old. */
template <int HD>
__device__ __forceinline__ void feed(det_shared<HD> &sh, const det_args &d, const CUtensorMap *map)
{
    place p = {d.slots, 0, 0};
    uint32_t kv_heads = d.a.kv_head_count, page_rows = (uint32_t)(d.a.page_values / HD);
    bool early = d.a.old_pages;
    if (!early)
        early_wait();
    for (uint32_t item = blockIdx.x; item < d.items; item += gridDim.x) {
        cuda_split s = d.splits[item / kv_heads];
        for (uint32_t first = 0; first < s.page_count; first += 2)
            for (uint32_t i = 0; i < 4; i++) { /* K of both pages, V of both */
                uint32_t page = first + i % 2;
                if (page >= s.page_count)
                    continue;
                if (early && page + 1 == s.page_count) {
                    early_wait();
                    early = false;
                }
                int32_t y = (int32_t)(d.a.tables[s.table + page] * page_rows +
                                      (i / 2 * kv_heads + item % kv_heads) * 64);
                bell_wait(&sh.empty[p.at], p.parity ^ 1);
                bell_expect(&sh.full[p.at], 128 * HD);
                for (int plane = 0; plane < HD / 64; plane++)
                    copy_box(sh.slots[p.at] + plane * PLANE_SIZE, map, 64 * plane, y, &sh.full[p.at]);
                p.step();
            }
    }
}

/* --- computing -------------------------------------------------------------------------------- */

template <int HD> struct state { /* of a warp: heads 2q and 2q + 1 of a lane, a quarter of their dimensions */
    float o[HD / 64][4], max[2],
        sum[2]; /* sum: of warp q's lanes; g / 2 is the pair of tokens in each eight */
};

template <int HD> __device__ __forceinline__ void let_go(det_shared<HD> &sh, place &p)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        bell_arrive(&sh.empty[p.at]);
    p.step();
}

/* s[page]: of 16 tokens of each of two pages; left: tokens from the block's first on that the row sees. */
template <int HD>
__device__ __forceinline__ void scores(float (&s)[2][4], det_shared<HD> &sh, place &p,
                                       const uint32_t q[HD / 16][2], uint32_t pages, int32_t left)
{
    uint32_t lane = threadIdx.x % 32, token = threadIdx.x / 32 * 16;
    place next = p;
    next.step();
#pragma unroll
    for (int i = 0; i < 8; i++)
        s[i / 4][i % 4] = 0.0f;
    bell_wait(&sh.full[p.at], p.parity);
    if (pages == 2)
        bell_wait(&sh.full[next.at], next.parity);
#pragma unroll
    for (int i = 0; i < HD / 16; i++) {
        uint32_t a[4], at = page_at(token + lane % 16, 2 * i + lane / 16);
        ldmatrix(a, sh.slots[p.at] + at);
        mma<false>(s[0], a[0], a[1], a[2], a[3], q[i][0], q[i][1]);
        if (pages == 2) {
            ldmatrix(a, sh.slots[next.at] + at);
            mma<false>(s[1], a[0], a[1], a[2], a[3], q[i][0], q[i][1]);
        }
    }
    let_go(sh, p);
    if (pages == 2)
        let_go(sh, p);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if ((int32_t)(64 * (i / 4) + token + lane / 4 + i % 4 / 2 * 8) >= left)
            s[i / 4][i % 4] = -CUDART_INF_F;
}

/* The block's maximum among all warps; P to shared memory, for all warps. What was added up before is scaled. */
template <int HD>
__device__ __forceinline__ void soften(const float (&s)[2][4], det_shared<HD> &sh, state<HD> &st)
{
    uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float alpha[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float max = fmaxf(fmaxf(s[0][h], s[0][h + 2]), fmaxf(s[1][h], s[1][h + 2]));
        for (int i = 4; i < 32; i *= 2)
            max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, i));
        if (g == 0)
            sh.max[warp][2 * q + h] = max;
    }
    meet_warps<32 * WARPS>(1);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float max = st.max[h];
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            max = fmaxf(max, sh.max[w][2 * q + h]);
        alpha[h] = exp2_fast(st.max[h] - max);
        st.max[h] = max;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) { /* tokens g and g + 8 of the warp's 16 of each page */
        uint32_t token = 64 * (i / 2) + 16 * warp + 8 * (i % 2) + g;
        float2 e = make_float2(exp2_fast(s[i / 2][i % 2 * 2] - st.max[0]),
                               exp2_fast(s[i / 2][i % 2 * 2 + 1] - st.max[1]));
        *(float2 *)&sh.p[token][2 * q] = e;
        sh.p16[2 * q][token] = __float2half_rn(e.x), sh.p16[2 * q + 1][token] = __float2half_rn(e.y);
    }
    meet_warps<32 * WARPS>(1);
#pragma unroll
    for (int i = 0; i < HD / 64; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            st.o[i][j] *= alpha[j % 2];
    float2 sum = {0.0f, 0.0f};
    if (q == warp)
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++) {
            float2 e = *(const float2 *)&sh.p[8 * i + g][2 * q];
            sum.x += e.x, sum.y += e.y;
        }
    sum.x += __shfl_xor_sync(0xffffffffu, sum.x, 4), sum.y += __shfl_xor_sync(0xffffffffu, sum.y, 4);
    st.sum[0] = st.sum[0] * alpha[0] + sum.x, st.sum[1] = st.sum[1] * alpha[1] + sum.y;
}

template <int HD>
__device__ __forceinline__ void add_values(det_shared<HD> &sh, place &p, state<HD> &st, uint32_t pages,
                                           int32_t left)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (uint32_t page = 0; page < pages; page++) {
        const uint32_t *heads = (const uint32_t *)(sh.p16[lane / 4] + 64 * page) + lane % 4;
        uint32_t b[4][2];
#pragma unroll
        for (uint32_t t = 0; t < 4; t++)
            b[t][0] = heads[8 * t], b[t][1] = heads[8 * t + 4];
        bell_wait(&sh.full[p.at], p.parity);
#pragma unroll
        for (uint32_t t = 0; t < 4; t++) {
            if ((int32_t)(64 * page + 16 * t) >= left) /* P is 0 there */
                break;
#pragma unroll
            for (uint32_t i = 0; i < HD / 64; i++) {
                uint32_t a[4];
                ldmatrix_trans(a, sh.slots[p.at] + page_at(16 * t + lane % 8 + lane / 16 * 8,
                                                           2 * (HD / 64 * warp + i) + lane / 8 % 2));
                mma<false>(st.o[i], a[0], a[1], a[2], a[3], b[t][0], b[t][1]);
            }
        }
        let_go(sh, p);
    }
}

/* group: query heads that are there. */
template <int HD>
__device__ __forceinline__ void store(det_shared<HD> &sh, const det_args &d, state<HD> &st, uint64_t first,
                                      uint32_t group)
{
    uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = st.sum[h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 8);
        sum += __shfl_xor_sync(0xffffffffu, sum, 16);
        if (q == warp && g == 0)
            sh.sum[2 * q + h] = sum;
    }
    meet_warps<32 * WARPS>(1);
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        if (2 * q + h >= group)
            continue;
        float scale = 1.0f / sh.sum[2 * q + h];
        uint64_t at = (first + 2 * q + h) * HD + HD / 4 * warp + g;
#pragma unroll
        for (int i = 0; i < HD / 64; i++) {
            store_out(d.a, at + 16 * i, st.o[i][h] * scale);
            store_out(d.a, at + 16 * i + 8, st.o[i][h + 2] * scale);
        }
    }
}

template <int HD> __device__ __forceinline__ void compute(det_shared<HD> &sh, const det_args &d)
{
    place p = {d.slots, 0, 0};
    uint32_t kv_heads = d.a.kv_head_count, group = d.a.head_count / kv_heads;
    early_wait();
    for (uint32_t item = blockIdx.x; item < d.items; item += gridDim.x) {
        cuda_split s = d.splits[item / kv_heads];
        uint64_t first = (uint64_t)s.row * d.a.head_count + item % kv_heads * group;
        uint32_t q[HD / 16][2];
        state<HD> st = {};
        if (s.page_count == 0) /* behind the last */
            continue;
        load_heads<HD>(q, (const half *)d.a.q + first * HD, group);
        st.max[0] = st.max[1] = -1e30f;
        for (uint32_t page = 0; page < s.page_count; page += 2) {
            uint32_t pages = min(s.page_count - page, 2u);
            int32_t left = (int32_t)(s.token_count - page * 64);
            float sc[2][4];
            scores<HD>(sc, sh, p, q, pages, left);
            soften<HD>(sc, sh, st);
            add_values<HD>(sh, p, st, pages, left);
        }
        store<HD>(sh, d, st, first, group);
    }
}

template <int HD>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    det_kernel(const __grid_constant__ det_args d, const __grid_constant__ CUtensorMap map)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    det_shared<HD> &sh = *reinterpret_cast<det_shared<HD> *>(memory);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < d.slots; i++)
            bell_init(&sh.full[i], 1), bell_init(&sh.empty[i], WARPS);
        bells_made();
    }
    __syncthreads();
    early_start();
    if (threadIdx.x < 32 * WARPS)
        compute<HD>(sh, d);
    else if (threadIdx.x == 32 * WARPS)
        feed<HD>(sh, d, &map);
}

/* --- launching -------------------------------------------------------------------------------- */

template <int HD> static size_t shared_size(uint32_t slots)
{
    return sizeof(det_shared<HD>) + (size_t)slots * 128 * HD;
}

template <int HD> static uint32_t sm_count() /* 0: not on this device */
{
    static int count = -1;
    cudaFuncAttributes code;
    int device = 0;
    if (count >= 0)
        return (uint32_t)count;
    bool fits = !cudaFuncGetAttributes(&code, det_kernel<HD>) && code.ptxVersion >= 90 &&
                !cudaFuncSetAttribute(det_kernel<HD>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)shared_size<HD>(SLOTS_ONE)) &&
                !cudaGetDevice(&device) &&
                !cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    count = fits ? count : 0;
    return (uint32_t)count;
}

bool cuda_det_attention_has(uint32_t head_dim, uint32_t heads_per_kv_head)
{
    return heads_per_kv_head <= HEADS &&
           ((head_dim == 128 && sm_count<128>() > 0) || (head_dim == 64 && sm_count<64>() > 0));
}

template <int HD>
static void launch_det(cudaStream_t s, const struct cuda_attention *a, const struct cuda_split *splits,
                       uint32_t grid_splits)
{
    det_args d = {*a, splits, grid_splits * a->kv_head_count, 0};
    uint32_t blocks = d.items > sm_count<HD>() ? BLOCKS * sm_count<HD>() : d.items;
    CUtensorMap map;
    if (!cuda_page_map(&map, a->kv, HD, 64, true))
        return cuda_launched(cudaErrorInvalidValue);
    d.slots = blocks > sm_count<HD>() ? SLOTS : SLOTS_ONE; /* one alone keeps as much on its way */
    launch_early(det_kernel<HD>, dim3(min(d.items, blocks)), dim3(THREADS), shared_size<HD>(d.slots), s, 1, d,
                 map);
}

void cuda_det_attention(cudaStream_t s, const struct cuda_attention *a, const struct cuda_split *splits,
                        uint32_t grid_splits)
{
    if (a->head_dim == 128)
        launch_det<128>(s, a, splits, grid_splits);
    else
        launch_det<64>(s, a, splits, grid_splits);
}
