/* attention_hopper: causal attention of chunks of rows over paged KV with wgmma (sm_90a), for heads of 64 and 128 values.
 *
 * grid (KV heads, tiles), 3 groups of 4 warps. A tile is up to 128 query vectors: `128 / group` rows of a sequence times the heads that
 * share the KV head. Two groups compute 64 vectors each; of the third, one thread feeds them with blocks of two pages of K and of V
 * through the copy engine, two blocks ahead. For block j a computing group starts S = Q * K[j]^T and then O += P * V[j - 1], and
 * makes P of block j (maximum, exponentials, sum) while the second product runs; the other group has its products then. Taking
 * turns at starting products was tried: 587 TFLOP/s at 8K and 569 at 32K instead of 596 and 633.
 *
 * With FIXED sums begin anew at each split of cuda-det-v2 (det_attention.cuh). Those of the splits before wait in shared memory, 64 KB of
 * 64 registers a thread, which are written and read once a split: 1,024 clocks beside 16 blocks of 1,024 at least, so at most 6 %.
 *
 * flops: 4 * head_dim * heads for each pair of positions; bytes: 256 * head_dim a page, tile and KV head, from L2.
 * Predicted: 64 x 128 scores take 512 clocks of the tensor cores for both products and 8192 exponentials 512 clocks of the
 * special function units, which overlap: 450 to 600 TFLOP/s. Measured on an H200, 32/8 heads of 128: 596 at 8K, 633 at 32K. */
#include "det_attention.cuh"
#include "kernels.h"
#include "wgmma.cuh"
#include <math_constants.h>

#define COMPUTING 2 /* groups */
#define GROUP     128
#define THREADS   (GROUP * (COMPUTING + 1))
#define TOKENS    128 /* of a block: two pages */
#define STAGES    2

struct hopper_args {
    cuda_attention a;
    const cuda_tile *tiles;
};

template <int HD> struct hopper_shared {
    uint8_t q[COMPUTING][64 * HD * 2];
    uint8_t k[STAGES][TOKENS * HD * 2], v[STAGES][TOKENS * HD * 2]; /* planes of 64 values, 128 tokens each */
    uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    float4 joined[]; /* FIXED: [HD / 8][computing threads] */
};

#define KV_PLANE (TOKENS * 128)
#define Q_PLANE  (64 * 128)

/* --- feeding ---------------------------------------------------------------------------------- */

template <int HD>
__device__ __forceinline__ void feed(hopper_shared<HD> &sh, const hopper_args &d, const CUtensorMap *map,
                                     const cuda_tile &t, uint32_t blocks)
{
    uint32_t pages = (t.position + t.count - 1) / 64 + 1, page_rows = (uint32_t)(d.a.page_values / HD);
    for (uint32_t j = 0; j < blocks; j++) {
        uint32_t s = j % STAGES, parity = j / STAGES % 2 ^ 1;
        int32_t rows[2];
        for (uint32_t i = 0; i < 2; i++) /* a page that is not there is masked, but must be numbers */
            rows[i] =
                (int32_t)(d.a.tables[t.table + min(2 * j + i, pages - 1)] * page_rows + blockIdx.x * 64);
        bell_wait(&sh.k_empty[s], parity);
        bell_expect(&sh.k_full[s], sizeof sh.k[s]);
        for (int p = 0; p < HD / 64; p++)
            for (int i = 0; i < 2; i++)
                copy_box(sh.k[s] + p * KV_PLANE + i * PLANE_SIZE, map, 64 * p, rows[i], &sh.k_full[s]);
        bell_wait(&sh.v_empty[s], parity);
        bell_expect(&sh.v_full[s], sizeof sh.v[s]);
        for (int p = 0; p < HD / 64; p++)
            for (int i = 0; i < 2; i++)
                copy_box(sh.v[s] + p * KV_PLANE + i * PLANE_SIZE, map, 64 * p,
                         rows[i] + (int32_t)d.a.kv_head_count * 64, &sh.v_full[s]);
    }
}

/* --- computing -------------------------------------------------------------------------------- */

template <int HD> struct vectors { /* of a thread: two, rows g and g + 8 of its warp's 16 */
    uint32_t position[2];
    float o[HD / 2], max[2], sum[2], alpha[2];
};

__device__ __forceinline__ const uint8_t *q_of(const hopper_args &d, const cuda_tile &t, uint32_t vector,
                                               uint32_t size)
{
    uint32_t group = d.a.head_count / d.a.kv_head_count, row = vector / group;
    return row < t.count
               ? (const uint8_t *)d.a.q +
                     ((uint64_t)(t.row + row) * d.a.head_count + blockIdx.x * group + vector % group) * size
               : nullptr;
}

template <int HD>
__device__ __forceinline__ void load_q(uint8_t *shared, const hopper_args &d, const cuda_tile &t,
                                       uint32_t first)
{
    for (uint32_t i = threadIdx.x % GROUP; i < 64 * HD / 8; i += GROUP) {
        uint32_t vector = i / (HD / 8), piece = i % (HD / 8);
        const uint8_t *from = q_of(d, t, first + vector, 2 * HD);
        *(uint4 *)(shared + page_at(vector, piece)) =
            from ? *(const uint4 *)(from + 16 * piece) : make_uint4(0, 0, 0, 0);
    }
    fence_async();
}

template <int HD>
__device__ __forceinline__ void start_scores(float (&s)[64], const uint8_t *q, const uint8_t *k)
{
    uint32_t qa = shared_address(q), ka = shared_address(k);
#pragma unroll
    for (int i = 0; i < HD / 16; i++)
        wgmma_shared(s, wgmma_operand(qa + i / 4 * Q_PLANE + i % 4 * 32, 16),
                     wgmma_operand(ka + i / 4 * KV_PLANE + i % 4 * 32, 16), i > 0);
    wgmma_commit();
}

template <int HD>
__device__ __forceinline__ void start_values(float (&o)[HD / 2], const uint32_t (&p)[32], const uint8_t *v)
{
    uint32_t va = shared_address(v);
#pragma unroll
    for (int i = 0; i < TOKENS / 16; i++)
        wgmma_registers(o, p + 4 * i, wgmma_operand(va + i * 2048, KV_PLANE));
    wgmma_commit();
}

template <int HD>
__device__ __forceinline__ void mask(float (&s)[64], const vectors<HD> &v, uint32_t first_token)
{
#pragma unroll
    for (int i = 0; i < 64; i++)
        if (first_token + 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2 > v.position[i / 2 % 2])
            s[i] = -CUDART_INF_F;
}

/* Scores to probabilities; alpha is what the sums so far are to be multiplied by. */
template <int HD> __device__ __forceinline__ void soften(float (&s)[64], vectors<HD> &v)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float max = v.max[r], sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < 16; j++)
            max = fmaxf(max, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
        v.alpha[r] = exp2_fast(v.max[r] - max);
        v.max[r] = max;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            s[4 * j + 2 * r] = exp2_fast(s[4 * j + 2 * r] - max);
            s[4 * j + 2 * r + 1] = exp2_fast(s[4 * j + 2 * r + 1] - max);
            sum[0] += s[4 * j + 2 * r], sum[1] += s[4 * j + 2 * r + 1];
        }
        v.sum[r] = v.sum[r] * v.alpha[r] + (sum[0] + sum[1]);
    }
}

/* A registers of P: 16 tokens take four. */
__device__ __forceinline__ void pack(uint32_t (&p)[32], const float (&s)[64])
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        p[i] = half2_bits(__floats2half2_rn(s[2 * i], s[2 * i + 1]));
}

template <int HD> __device__ __forceinline__ void scale_values(vectors<HD> &v)
{
#pragma unroll
    for (int i = 0; i < HD / 2; i++)
        v.o[i] *= v.alpha[i / 2 % 2];
}

/* Of the four threads of a vector. */
__device__ __forceinline__ float whole_sum(float sum)
{
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

/* The split that begins at first_token, of these maxima and sums, joins those before it; v.o is of all of them then. Vectors that do not see
 * it stay as they are. */
template <int HD>
__device__ __forceinline__ void join_split(const float4 *joined, vectors<HD> &v, det_joined (&all)[2],
                                           const float (&max)[2], const float (&sum)[2], uint32_t first_token)
{
    float before[2], own[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        det_joined split = {max[r], whole_sum(sum[r])};
        before[r] = 1.0f, own[r] = 0.0f;
        if (first_token == 0)
            all[r] = split;
        else if (v.position[r] >= first_token)
            det_join(all[r], split, before[r], own[r]);
    }
    if (first_token == 0)
        return;
#pragma unroll
    for (int i = 0; i < HD / 8; i++) {
        float4 o = joined[i * GROUP * COMPUTING];
        float old[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float both = det_join(old[j], v.o[4 * i + j], before[j / 2], own[j / 2]);
            v.o[4 * i + j] = v.position[j / 2] >= first_token ? both : old[j];
        }
    }
}

/* And the next begins. */
template <int HD> __device__ __forceinline__ void keep_joined(float4 *joined, vectors<HD> &v)
{
#pragma unroll
    for (int i = 0; i < HD / 8; i++) {
        joined[i * GROUP * COMPUTING] =
            make_float4(v.o[4 * i], v.o[4 * i + 1], v.o[4 * i + 2], v.o[4 * i + 3]);
        v.o[4 * i] = v.o[4 * i + 1] = v.o[4 * i + 2] = v.o[4 * i + 3] = 0.0f;
    }
}

template <int HD, bool FIXED>
__device__ __forceinline__ void store(const hopper_args &d, const cuda_tile &t, const vectors<HD> &v,
                                      const det_joined (&all)[2], uint32_t first)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = FIXED ? all[r].sum : whole_sum(v.sum[r]);
        const uint8_t *q = q_of(d, t, first + 8 * r, 2 * HD);
        if (!q)
            continue;
        uint32_t *out = (uint32_t *)((uint8_t *)d.a.out + (q - (const uint8_t *)d.a.q)) + threadIdx.x % 4;
        float scale = 1.0f / sum;
#pragma unroll
        for (int j = 0; j < HD / 8; j++) {
            float x = v.o[4 * j + 2 * r] * scale, y = v.o[4 * j + 2 * r + 1] * scale;
            out[4 * j] = d.a.out_bf16 ? to_pair<true>(x, y) : to_pair<false>(x, y);
        }
    }
}

__device__ __forceinline__ void let_go(uint64_t *bell)
{
    if (threadIdx.x % 32 == 0)
        bell_arrive(bell);
}

template <int HD, bool FIXED>
__device__ __forceinline__ void compute(hopper_shared<HD> &sh, const hopper_args &d, const cuda_tile &t,
                                        uint32_t blocks)
{
    constexpr uint32_t SPLIT = DET_SPLIT_TOKENS / TOKENS; /* blocks */
    uint32_t group = threadIdx.x / GROUP,
             first = group * 64 + threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4,
             heads = d.a.head_count / d.a.kv_head_count;
    vectors<HD> v = {};
    det_joined all[2];
    float s[64];
    uint32_t p[32];
    for (int r = 0; r < 2; r++) {
        v.position[r] = t.position + min((first + 8 * r) / heads, t.count - 1);
        v.max[r] = -1e30f;
    }
    load_q<HD>(sh.q[group], d, t, group * 64);
    meet_warps<GROUP>(4 + group);
    for (uint32_t j = 0; j < blocks; j++) {
        uint32_t now = j % STAGES, before = (j + STAGES - 1) % STAGES;
        bell_wait(&sh.k_full[now], j / STAGES % 2);
        if (j > 0)
            bell_wait(&sh.v_full[before], (j - 1) / STAGES % 2);
        wgmma_begin();
        start_scores<HD>(s, sh.q[group], sh.k[now]);
        if (j > 0) {
            start_values<HD>(v.o, p, sh.v[before]);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        wgmma_hold(s);
        let_go(&sh.k_empty[now]);
        if (j * TOKENS + TOKENS - 1 > t.position)
            mask<HD>(s, v, j * TOKENS);
        bool begins = FIXED && j > 0 && j % SPLIT == 0; /* a split, which is not the first */
        float max[2] = {}, sum[2] = {};
        if (begins)
            for (int r = 0; r < 2; r++) {
                max[r] = v.max[r], sum[r] = v.sum[r];
                v.max[r] = -1e30f, v.sum[r] = 0.0f;
            }
        soften<HD>(s, v);
        wgmma_wait<0>();
        wgmma_hold(v.o);
        if (j > 0)
            let_go(&sh.v_empty[before]);
        pack(p, s);
        if (begins) {
            join_split<HD>(sh.joined + threadIdx.x, v, all, max, sum, (j - SPLIT) * TOKENS);
            keep_joined<HD>(sh.joined + threadIdx.x, v);
        } else {
            scale_values<HD>(v);
        }
    }
    uint32_t last = (blocks - 1) % STAGES;
    bell_wait(&sh.v_full[last], (blocks - 1) / STAGES % 2);
    wgmma_begin();
    start_values<HD>(v.o, p, sh.v[last]);
    wgmma_wait<0>();
    wgmma_hold(v.o);
    if (FIXED)
        join_split<HD>(sh.joined + threadIdx.x, v, all, v.max, v.sum, (blocks - 1) / SPLIT * DET_SPLIT_TOKENS);
    store<HD, FIXED>(d, t, v, all, first);
}

template <int HD, bool FIXED>
__global__ void __launch_bounds__(THREADS, 1)
    hopper_kernel(const __grid_constant__ hopper_args d, const __grid_constant__ CUtensorMap map)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    hopper_shared<HD> &sh = *reinterpret_cast<hopper_shared<HD> *>(memory);
    cuda_tile t = d.tiles[blockIdx.y];
    uint32_t blocks = (t.position + t.count - 1) / TOKENS + 1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            bell_init(&sh.k_full[i], 1), bell_init(&sh.k_empty[i], 4 * COMPUTING);
            bell_init(&sh.v_full[i], 1), bell_init(&sh.v_empty[i], 4 * COMPUTING);
        }
        bells_made();
    }
    __syncthreads();
    if (threadIdx.x / GROUP == COMPUTING) {
        registers_fewer<24>();
        if (threadIdx.x % GROUP == 0)
            feed<HD>(sh, d, &map, t, blocks);
    } else {
        registers_more<240>();
        compute<HD, FIXED>(sh, d, t, blocks);
    }
}

/* --- launching -------------------------------------------------------------------------------- */

template <int HD, bool FIXED>
static bool launch_hopper(cudaStream_t s, const struct cuda_attention *a, const struct cuda_tile *tiles,
                          uint32_t tile_count)
{
    constexpr size_t shared =
        sizeof(hopper_shared<HD>) + (FIXED ? sizeof(float4) * HD / 8 * GROUP * COMPUTING : 0);
    static_assert(shared <= 227 * 1024, "what a block of sm_90 can have");
    static known_devices known;
    CUtensorMap map;
    if (!known_of_device(known, [] { return has_hopper_code(hopper_kernel<HD, FIXED>, shared); }) ||
        !cuda_page_map(&map, a->kv, HD, 64, false))
        return false;
    hopper_args d = {*a, tiles};
    launch(hopper_kernel<HD, FIXED>, dim3(a->kv_head_count, tile_count), dim3(THREADS), shared, s, d, map);
    return true;
}

template <int HD>
static bool launch_either(cudaStream_t s, const struct cuda_attention *a, const struct cuda_tile *tiles,
                          uint32_t tile_count)
{
    return a->fixed_splits ? launch_hopper<HD, true>(s, a, tiles, tile_count)
                           : launch_hopper<HD, false>(s, a, tiles, tile_count);
}

bool cuda_attention_hopper(cudaStream_t s, const struct cuda_attention *a, const struct cuda_tile *tiles,
                           uint32_t tile_count)
{
    return a->head_dim == 128  ? launch_either<128>(s, a, tiles, tile_count)
           : a->head_dim == 64 ? launch_either<64>(s, a, tiles, tile_count)
                               : false;
}
