/* det_attention: attention of cuda-det-v2 for rows that are alone in their sequence, as in decoding (sm_90a; heads of 64 and 128 values).
 *
 * det_attention.cuh has the rule. A tile of one row would fill 4 of its 128 vectors and read pages one SM a block at a time;
 * here tensor cores see tokens as rows and heads as columns, as in attention_decode.cu:
 *     S^T[128 tokens][8 heads] = K * Q^T      P = 2^(S - max)      O^T[head_dim][8 heads] += V^T * P^T
 *
 * grid: two blocks an SM, which take items in turns: a KV head of a row, or of one split of it where rows are too few or too unlike to fill the
 * SMs. Splits go through memory, and the block that is done last joins them; a block with a whole row joins them as it goes. Of a block's scores
 * each of four warps makes a quarter of the tokens, of its values a quarter of the dimensions; maxima and P go through shared memory. A fifth
 * warp feeds pages, K and V apart, without a stop.
 *
 * bytes: 4 * head_dim a token, KV head and layer, each once. Memory-bound where items fill the SMs; one alone takes 1.4 us a block of tokens,
 * and so a split 22 us. Measured on an H200, 32/8 heads of 128, rows whole: 128 at 1K 4,400 GB/s (tiles of one row: 3,810), 32 at 8K 4,500
 * (4,140), 1 at 8K 93 us (97). 1 row in splits, from whole steps: at 8K 23 us, at 32K 34, as predicted, at 128K 191 (predicted 130). */
#include "det_attention.cuh"
#include "det_kernels.h"
#include "ring.cuh"

#define WARPS   4
#define BLOCKS  2                 /* an SM */
#define THREADS (32 * WARPS + 32) /* the feeder comes last */
#define TOKENS  128               /* of a block of the rule: two pages */

#define SPLIT_PAGES (DET_SPLIT_TOKENS / 64)
#define PARTIAL_SIZE(HD)                                                                                     \
    (HEADS * ((HD) + 2)) /* floats of a split and KV head: of each head its values, maximum and sum */

#define SLOTS     6  /* of a page's K, or V, with two blocks an SM */
#define SLOTS_ONE 12 /* with one */

template <int HD> struct det_shared {
    uint64_t full[SLOTS_ONE], empty[SLOTS_ONE];
    float p[TOKENS][HEADS];
    half p16[HEADS][TOKENS + 8];
    float max[WARPS][HEADS], sum[HEADS];
    uint32_t is_last;
    alignas(1024) uint8_t slots[][128 * HD];
};

struct det_args {
    cuda_attention a;
    const cuda_split *splits;
    float *partial;     /* [first_split + i of the row][KV head][PARTIAL_SIZE] */
    uint32_t *counters; /* [row][KV head]: splits that are done */
    uint32_t items;     /* splits x KV heads */
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
                if (early && (page + 1) * 64 >= s.token_count) {
                    early_wait();
                    early = false;
                }
                int32_t y = (int32_t)(d.a.tables[s.table + s.page_begin + page] * page_rows +
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

template <int HD> struct joined { /* splits from the row's first on */
    float o[HD / 64][4];
    det_joined all[2]; /* sum: of warp q's lanes */
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

/* A split is added up: it joins those before it, and the next begins. */
template <int HD> __device__ __forceinline__ void join(joined<HD> &to, state<HD> &st, bool is_first)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = st.sum[h], before = 1.0f, own = 0.0f;
        sum += __shfl_xor_sync(0xffffffffu, sum, 8);
        sum += __shfl_xor_sync(0xffffffffu, sum, 16);
        det_joined split = {st.max[h], sum};
        if (is_first)
            to.all[h] = split;
        else
            det_join(to.all[h], split, before, own);
#pragma unroll
        for (int i = 0; i < HD / 64; i++)
#pragma unroll
            for (int j = h; j < 4; j += 2)
                to.o[i][j] = is_first ? st.o[i][j] : det_join(to.o[i][j], st.o[i][j], before, own);
    }
    st = {};
    st.max[0] = st.max[1] = -1e30f;
}

/* group: query heads that are there. */
template <int HD>
__device__ __forceinline__ void store(det_shared<HD> &sh, const det_args &d, const joined<HD> &row,
                                      uint64_t first, uint32_t group)
{
    uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    for (int h = 0; h < 2; h++)
        if (q == warp && g == 0)
            sh.sum[2 * q + h] = row.all[h].sum;
    meet_warps<32 * WARPS>(1);
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        if (2 * q + h >= group)
            continue;
        float scale = 1.0f / sh.sum[2 * q + h];
        uint64_t at = (first + 2 * q + h) * HD + HD / 4 * warp + g;
#pragma unroll
        for (int i = 0; i < HD / 64; i++) {
            store_out(d.a, at + 16 * i, row.o[i][h] * scale);
            store_out(d.a, at + 16 * i + 8, row.o[i][h + 2] * scale);
        }
    }
}

/* --- splits apart ----------------------------------------------------------------------------- */

/* at: of the split and KV head. */
template <int HD>
__device__ __forceinline__ void put_split(float *at, const joined<HD> &split, uint32_t group)
{
    uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        float *head = at + (2 * q + h) * (HD + 2);
        if (2 * q + h >= group)
            continue;
#pragma unroll
        for (int i = 0; i < HD / 64; i++) {
            head[HD / 4 * warp + 16 * i + g] = split.o[i][h];
            head[HD / 4 * warp + 16 * i + g + 8] = split.o[i][h + 2];
        }
        if (q == warp && g == 0)
            head[HD] = split.all[h].max, head[HD + 1] = split.all[h].sum;
    }
}

/* Is this block the last of the row's splits to be done? What the others put can be read then. */
template <int HD>
__device__ __forceinline__ bool is_last(det_shared<HD> &sh, uint32_t *counter, uint32_t split_count)
{
    meet_warps<32 * WARPS>(1);
    if (threadIdx.x == 0) {
        uint32_t came;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(came) : "l"(counter) : "memory");
        sh.is_last = came == split_count - 1;
        if (sh.is_last)
            *counter = 0;
    }
    meet_warps<32 * WARPS>(1);
    return sh.is_last != 0;
}

/* at: of the row's first split; stride: floats to the next. first: the row's first query head. */
template <int HD>
__device__ __forceinline__ void join_splits(const det_args &d, const float *at, uint64_t stride,
                                            uint32_t count, uint64_t first, uint32_t group)
{
    constexpr uint32_t AT_ONCE =
        16; /* splits whose loads are on their way together: 64 take four turns of 0.8 us for each head */
    for (uint32_t i = threadIdx.x; i < group * HD; i += 32 * WARPS) {
        uint32_t dim = i % HD;
        const float *p = at + i / HD * (HD + 2);
        det_joined all = {__ldcg(p + HD), __ldcg(p + HD + 1)};
        float o = __ldcg(p + dim);
        for (uint32_t k = 1; k < count; k += AT_ONCE) {
            det_joined next[AT_ONCE];
            float v[AT_ONCE];
#pragma unroll
            for (uint32_t j = 0; j < AT_ONCE; j++) {
                const float *from = p + min(k + j, count - 1) * stride;
                next[j] = {__ldcg(from + HD), __ldcg(from + HD + 1)}, v[j] = __ldcg(from + dim);
            }
#pragma unroll
            for (uint32_t j = 0; j < AT_ONCE; j++) {
                float before = 1.0f, own = 0.0f;
                if (k + j >= count)
                    break;
                det_join(all, next[j], before, own);
                o = det_join(o, v[j], before, own);
            }
        }
        store_out(d.a, first * HD + i, o * (1.0f / all.sum));
    }
}

template <int HD>
__device__ __forceinline__ void finish(det_shared<HD> &sh, const det_args &d, const cuda_split &s,
                                       const joined<HD> &found, uint32_t kv_head)
{
    uint32_t kv_heads = d.a.kv_head_count, group = d.a.head_count / kv_heads;
    uint64_t first = (uint64_t)s.row * d.a.head_count + kv_head * group,
             stride = (uint64_t)kv_heads * PARTIAL_SIZE(HD);
    if (s.split_count == 1)
        return store<HD>(sh, d, found, first, group);
    float *at = d.partial + s.first_split * stride + kv_head * PARTIAL_SIZE(HD);
    put_split<HD>(at + s.page_begin / SPLIT_PAGES * stride, found, group);
    if (is_last<HD>(sh, d.counters + (uint64_t)s.row * kv_heads + kv_head, s.split_count))
        join_splits<HD>(d, at, stride, s.split_count, first, group);
}

template <int HD> __device__ __forceinline__ void compute(det_shared<HD> &sh, const det_args &d)
{
    place p = {d.slots, 0, 0};
    uint32_t kv_heads = d.a.kv_head_count, group = d.a.head_count / kv_heads;
    early_wait();
    for (uint32_t item = blockIdx.x; item < d.items; item += gridDim.x) {
        cuda_split s = d.splits[item / kv_heads];
        uint32_t q[HD / 16][2];
        state<HD> st = {};
        joined<HD> found;
        if (s.page_count == 0) /* behind the last */
            continue;
        load_heads<HD>(
            q, (const half *)d.a.q + ((uint64_t)s.row * d.a.head_count + item % kv_heads * group) * HD,
            group);
        st.max[0] = st.max[1] = -1e30f;
        for (uint32_t page = 0; page < s.page_count; page += 2) {
            uint32_t pages = min(s.page_count - page, 2u);
            int32_t left = (int32_t)(s.token_count - page * 64);
            float sc[2][4];
            scores<HD>(sc, sh, p, q, pages, left);
            soften<HD>(sc, sh, st);
            add_values<HD>(sh, p, st, pages, left);
            if ((page + 2) % SPLIT_PAGES == 0 || page + 2 >= s.page_count)
                join<HD>(found, st, page < SPLIT_PAGES);
        }
        finish<HD>(sh, d, s, found, item % kv_heads);
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
    static known_devices known;
    return known_of_device(known, [] { return has_hopper_code(det_kernel<HD>, shared_size<HD>(SLOTS_ONE)); })
               ? device_sm_count()
               : 0;
}

bool cuda_det_attention_has(uint32_t head_dim, uint32_t heads_per_kv_head)
{
    return heads_per_kv_head <= HEADS &&
           ((head_dim == 128 && sm_count<128>() > 0) || (head_dim == 64 && sm_count<64>() > 0));
}

template <int HD>
static void launch_det(cudaStream_t s, const struct cuda_attention *a, const struct cuda_split *splits,
                       uint32_t grid_splits, void *partial, uint32_t *counters)
{
    det_args d = {*a, splits, (float *)partial, counters, grid_splits * a->kv_head_count, 0};
    uint32_t blocks = d.items > sm_count<HD>() ? BLOCKS * sm_count<HD>() : d.items;
    CUtensorMap map;
    if (!cuda_page_map(&map, a->kv, HD, 64, true))
        return cuda_launched(cudaErrorInvalidValue);
    d.slots = blocks > sm_count<HD>() ? SLOTS : SLOTS_ONE; /* one alone keeps as much on its way */
    launch_early(det_kernel<HD>, dim3(min(d.items, blocks)), dim3(THREADS), shared_size<HD>(d.slots), s, 1, d,
                 map);
}

void cuda_det_attention(cudaStream_t s, const struct cuda_attention *a, const struct cuda_split *splits,
                        uint32_t grid_splits, void *partial, uint32_t *counters)
{
    if (a->head_dim == 128)
        launch_det<128>(s, a, splits, grid_splits, partial, counters);
    else
        launch_det<64>(s, a, splits, grid_splits, partial, counters);
}
