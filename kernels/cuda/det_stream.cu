/* det_stream: products of cuda-det-v2 (det_product.cu has the rule) whose 16-bit weights stream by as they lie (sm_90a).
 *
 * out[R][N] = act[R][K] * W[N][K]^T by wgmma, 64 rows of W by up to 128 of act an instruction, with W from registers: a lane takes its 32
 * columns of a span from shared memory, and what one instruction adds lies together there as it does in memory. So W is neither opened nor
 * laid out anew; act is, which is small.
 *
 * An item is 128 rows of W by up to 128 of act. Two warps feed slots of a span each through the copy engine, one with W, one with act; two
 * groups of four warps multiply, 64 rows of W each. Where there are fewer items than SMs, 2, 4 or 8 blocks share one, each with as many of its
 * runs: what they find goes through memory, and a second kernel adds up, in the rule's order, the runs of each item. No block waits for another.
 *
 * The kernel begins while the one before it ends (early.cuh): slots are filled with weights, which nothing in a step writes; only act
 * has to wait.
 *
 * bytes: W once from memory for each 128 rows of act; act once an item from L2, with 128 rows as much as W. flops 2 * N * K * R. Predicted: the
 * read rate of the card with few rows; with 128 what L2 gives, 7 TB/s, so 3,500 GB/s of W. Measured on an H200 behind each other, act's new
 * layout included, 28672 x 4096: 3,790 GB/s of W with 2 rows, 3,130 with 64, 2,940 with 128, 620 TFLOP/s with 1024; 128256 x 4096: 4,340, 3,840,
 * 3,440. A smaller W loses 6 us at its ends, and a shared one with 128 rows 20, for 17 MB of runs' sums (then added up by the blocks that had
 * made them, which waited for each other). Predicted for the second kernel: 17 MB from L2 in 4 us, and 2 for its beginning. */
#include "det_kernels.h"
#include "early.cuh"
#include "wgmma_product.cuh"

#define SPAN    CUDA_DET_SPAN
#define RUNS    CUDA_DET_RUNS
#define TILE    128 /* rows of W */
#define WORKERS 256
#define THREADS (WORKERS + 128) /* of the third group, two warps feed */
#define HALF    (TILE * 128)    /* bytes of 64 columns of W in a slot */
#define SHIFT   256             /* between the halves: then lanes q and q + 2 meet other banks */
#define W_SIZE  (2 * HALF + 1024)

/* N: rows of act. */
template <int N> __host__ __device__ constexpr uint32_t slot_size()
{
    return W_SIZE + N * SPAN * 2;
}
template <int N> __host__ __device__ constexpr uint32_t slot_count()
{
    return N == 128 ? 3 : N == 64 ? 4 : 5;
}

template <int N> struct stream_shared {
    uint64_t full[8], empty[8];
    uint8_t head[1024 - 2 * 8 * 8]; /* what swizzling wants */
    uint8_t slots[slot_count<N>()][slot_size<N>()];
};

struct stream_args {
    cuda_product p;
    uint32_t spans, row_tiles,
        items;       /* item: a tile of W by N rows of act; those of one tile after each other */
    uint32_t blocks; /* of an item: 1, 2, 4 or 8, each with as many runs; more than 1: an item only */
    float *sums;     /* of shared items: [item][run][N / 8][WORKERS][4] */
};

struct share { /* of a block */
    uint32_t item, step, run, run_end;
};

__device__ __forceinline__ share share_of(const stream_args &d)
{
    uint32_t rank = blockIdx.x % d.blocks;
    return {blockIdx.x / d.blocks, gridDim.x / d.blocks, RUNS * rank / d.blocks,
            RUNS * (rank + 1) / d.blocks};
}

template <int N> struct place { /* in the slots */
    uint32_t at, parity;
    __device__ __forceinline__ void step()
    {
        if (++at == slot_count<N>())
            at = 0, parity ^= 1;
    }
};

/* --- feeding: one thread each ------------------------------------------------------------------- */

template <int N>
__device__ __forceinline__ void feed_weights(stream_shared<N> &sh, const stream_args &d, const share &own,
                                             const CUtensorMap *map)
{
    place<N> p = {0, 0};
    uint32_t end = d.spans * own.run_end / RUNS;
    for (uint32_t item = own.item; item < d.items; item += own.step)
        for (uint32_t span = d.spans * own.run / RUNS; span < end; span++, p.step()) {
            int32_t x = (int32_t)(span * SPAN), y = (int32_t)(item / d.row_tiles * TILE);
            bell_wait(&sh.empty[p.at], p.parity ^ 1);
            bell_expect(&sh.full[p.at], 2 * HALF);
            copy_box(sh.slots[p.at], map, x, y, &sh.full[p.at]);
            copy_box(sh.slots[p.at] + HALF + SHIFT, map, x + SPAN / 2, y, &sh.full[p.at]);
        }
}

template <int N>
__device__ __forceinline__ void feed_act(stream_shared<N> &sh, const stream_args &d, const share &own,
                                         const CUtensorMap *map)
{
    place<N> p = {0, 0};
    uint32_t end = d.spans * own.run_end / RUNS;
    early_wait();
    for (uint32_t item = own.item; item < d.items; item += own.step)
        for (uint32_t span = d.spans * own.run / RUNS; span < end; span++, p.step()) {
            int32_t x = (int32_t)(span * SPAN), y = (int32_t)(item % d.row_tiles * N);
            bell_wait(&sh.empty[p.at], p.parity ^ 1);
            bell_expect(&sh.full[p.at], N * SPAN * 2);
            copy_box(sh.slots[p.at] + W_SIZE, map, x, y, &sh.full[p.at]);
            copy_box(sh.slots[p.at] + W_SIZE + N * SPAN, map, x + SPAN / 2, y, &sh.full[p.at]);
        }
}

/* --- multiplying ------------------------------------------------------------------------------ */

/* Bytes from a slot's beginning to the lane's 32 columns of row g of its warp's 16, eight columns each; those of row g + 8 lie 1024 on. */
__device__ __forceinline__ void find_columns(uint32_t (&at)[4])
{
    uint32_t q = threadIdx.x % 4, half = q / 2, row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        at[i] = half * (HALF + SHIFT) + row * 128 + ((q % 2 * 4 + i) ^ ((row + half * SHIFT / 128) % 8)) * 16;
}

__device__ __forceinline__ void let_go(uint64_t *bell)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        bell_arrive(bell);
}

/* Registers that an instruction reads are not used again before this. */
__device__ __forceinline__ void hold_weights(uint4 (&w)[2][2])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile(""
                     : "+r"(w[i / 2][i % 2].x), "+r"(w[i / 2][i % 2].y), "+r"(w[i / 2][i % 2].z),
                       "+r"(w[i / 2][i % 2].w)::"memory");
}

/* Half a span: four instructions. */
template <bool BF16, int N>
__device__ __forceinline__ void multiply_half(float (&acc)[N / 2], uint4 (&w)[2][2], const uint8_t *slot,
                                              const uint32_t (&at)[4], int half, bool adds)
{
    uint32_t act = shared_address(slot) + W_SIZE + half * N * SPAN;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int row = 0; row < 2; row++)
            w[i][row] = *(const uint4 *)(slot + at[2 * half + i] + 1024 * row);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        wgmma_product<BF16>(acc, w[i][0].x, w[i][1].x, w[i][0].y, w[i][1].y, wgmma_operand(act + 64 * i, 16),
                            adds || i > 0);
        wgmma_product<BF16>(acc, w[i][0].z, w[i][1].z, w[i][0].w, w[i][1].w,
                            wgmma_operand(act + 64 * i + 32, 16), true);
    }
    wgmma_commit();
}

/* One run. */
template <bool BF16, int N>
__device__ __forceinline__ void multiply(float (&acc)[N / 2], stream_shared<N> &sh, place<N> &p,
                                         const uint32_t (&at)[4], uint32_t spans)
{
    uint4 w[2][2][2] = {};
    uint32_t before = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < spans; i++) {
        const uint8_t *slot = sh.slots[p.at];
        bell_wait(&sh.full[p.at], p.parity);
        multiply_half<BF16, N>(acc, w[0], slot, at, 0, i > 0);
        wgmma_wait<1>();
        hold_weights(w[1]);
        if (i > 0)
            let_go(&sh.empty[before]);
        multiply_half<BF16, N>(acc, w[1], slot, at, 1, true);
        wgmma_wait<1>();
        hold_weights(w[0]);
        before = p.at;
        p.step();
    }
    wgmma_wait<0>();
    wgmma_hold(acc);
    hold_weights(w[1]);
    let_go(&sh.empty[before]);
}

/* --- the end of an item ------------------------------------------------------------------------- */

/* Of a thread's sums four at a time are its own rows of W and two of eight rows of act: d[4 * j + 2 * i + c] is row g + 8 * i of W in the
 * warp's 16, row 8 * j + 2 * q + c of act. */

template <int N> __device__ __forceinline__ float4 *sums_at(const stream_args &d, uint32_t item, uint32_t run)
{
    return (float4 *)d.sums + ((uint64_t)item * RUNS + run) * (N / 8) * WORKERS + threadIdx.x;
}

template <int N>
__device__ __forceinline__ void keep_run(const stream_args &d, const float (&acc)[N / 2], uint32_t item,
                                         uint32_t run)
{
    float4 *to = sums_at<N>(d, item, run);
#pragma unroll
    for (uint32_t j = 0; j < N / 8; j++)
        to[j * WORKERS] = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
}

/* Eight rows of act and 16 of W in a warp's registers; exchanged, a lane has four neighbours along W's of one row of act. */
template <bool BF16>
__device__ __forceinline__ void put_16(const cuda_product &p, const float *v, uint32_t r0, uint32_t n0)
{
    uint32_t q = threadIdx.x % 4, odd = q % 2, r = r0 + threadIdx.x % 32 / 4,
             n = n0 + (odd ? 8 + 2 * (q - 1) : 2 * q);
    uint32_t low = transpose8x8(to_pair<BF16>(v[0], v[1])), high = transpose8x8(to_pair<BF16>(v[2], v[3])),
             got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
    if (n < p.m.rows && r < p.rows)
        *(uint2 *)((uint16_t *)p.out + (uint64_t)r * p.out_stride + n) =
            odd ? make_uint2(got, high) : make_uint2(low, got);
}

/* r0, n0: the first of eight rows of act and of the warp's 16 of W. With CUDA_ADD_F32 what is there is added first, before anything is
 * put: loads would wait for the stores before them. */
template <bool READS, bool BF16>
__device__ __forceinline__ void put_four(const cuda_product &p, float *v, uint32_t r0, uint32_t n0)
{
    if (!READS && p.epilogue == CUDA_STORE16 && p.m.rows % 4 == 0 && p.out_stride % 4 == 0)
        return put_16<BF16>(p, v, r0, n0);
    r0 += threadIdx.x % 4 * 2, n0 += threadIdx.x % 32 / 4;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t r = r0 + i % 2, n = n0 + i / 2 * 8;
        uint64_t at = (uint64_t)r * p.out_stride + n;
        if (n >= p.m.rows || r >= p.rows)
            continue;
        if (READS)
            v[i] += ((const float *)p.out)[at];
        else if (p.epilogue == CUDA_STORE16)
            ((uint16_t *)p.out)[at] = to_bits<BF16>(v[i]);
        else
            ((float *)p.out)[at] = v[i];
    }
}

template <bool BF16, int N>
__device__ __forceinline__ void put_item(const stream_args &d, float (&sum)[N / 2], uint32_t item)
{
    uint32_t r0 = item % d.row_tiles * N, n0 = item / d.row_tiles * TILE + threadIdx.x / 32 * 16;
    if (d.p.epilogue == CUDA_ADD_F32)
#pragma unroll
        for (uint32_t j = 0; j < N / 8; j++)
            put_four<true, BF16>(d.p, sum + 4 * j, r0 + 8 * j, n0);
#pragma unroll
    for (uint32_t j = 0; j < N / 8; j++)
        put_four<false, BF16>(d.p, sum + 4 * j, r0 + 8 * j, n0);
}

/* --- the kernel ------------------------------------------------------------------------------- */

template <bool BF16, int N>
__device__ __forceinline__ void work(stream_shared<N> &sh, const stream_args &d, const share &own)
{
    place<N> p = {0, 0};
    uint32_t at[4];
    find_columns(at);
    early_wait();
    for (uint32_t item = own.item; item < d.items; item += own.step) {
        float total[N / 2] = {}, acc[N / 2];
#pragma unroll 1
        for (uint32_t run = own.run; run < own.run_end; run++) {
            uint32_t spans = d.spans * (run + 1) / RUNS - d.spans * run / RUNS;
            if (spans == 0) /* adds nothing */
                continue;
            multiply<BF16, N>(acc, sh, p, at, spans);
            if (d.blocks > 1) { /* join_kernel has the rest */
                keep_run<N>(d, acc, item, run);
                continue;
            }
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                total[i] += acc[i];
        }
        if (d.blocks == 1)
            put_item<BF16, N>(d, total, item);
    }
}

template <bool BF16, int N>
__global__ void __launch_bounds__(THREADS, 1)
    stream_kernel(const __grid_constant__ stream_args d, const __grid_constant__ CUtensorMap w,
                  const __grid_constant__ CUtensorMap act)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    stream_shared<N> &sh = *reinterpret_cast<stream_shared<N> *>(memory);
    share own = share_of(d);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < slot_count<N>(); i++)
            bell_init(&sh.full[i], 2), bell_init(&sh.empty[i], WORKERS / 32);
        bells_made();
    }
    __syncthreads();
    early_start();
    if (threadIdx.x >= WORKERS) {
        registers_fewer<24>();
        if (threadIdx.x == WORKERS)
            feed_weights<N>(sh, d, own, &w);
        else if (threadIdx.x == WORKERS + 32)
            feed_act<N>(sh, d, own, &act);
    } else {
        registers_more<240>();
        work<BF16, N>(sh, d, own);
    }
}

/* grid (items, N / 8): all runs of an item that blocks share, from the first to the last. */
template <bool BF16, int N> __global__ void __launch_bounds__(WORKERS) join_kernel(stream_args d)
{
    uint32_t item = blockIdx.x, j = blockIdx.y, r0 = item % d.row_tiles * N + 8 * j,
             n0 = item / d.row_tiles * TILE + threadIdx.x / 32 * 16;
    float sum[4] = {};
    early_start();
    early_wait();
#pragma unroll
    for (uint32_t run = 0; run < RUNS; run++) {
        float4 v = __ldcg(sums_at<N>(d, item, run) + j * WORKERS);
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
    if (d.p.epilogue == CUDA_ADD_F32)
        put_four<true, BF16>(d.p, sum, r0, n0);
    put_four<false, BF16>(d.p, sum, r0, n0);
}

/* --- launching -------------------------------------------------------------------------------- */

/* Blocks on the device at a time, one an SM; 0: not on this device. */
template <bool BF16, int N> static uint32_t together()
{
    static known_devices known;
    bool fits = known_of_device(
        known, [] { return has_hopper_code(stream_kernel<BF16, N>, sizeof(stream_shared<N>)); });
    return fits ? device_sm_count() : 0;
}

struct plan {
    uint64_t cost;
    uint32_t row_tiles, items, blocks; /* as in stream_args */
};

/* How long blocks take, in bytes that they read times SMs: each gets what 84 of them get at most, more share what L2 gives. What joining an item
 * costs was measured where blocks waited for each other, and not since. */
template <int N> static uint64_t cost_of(uint32_t items, uint32_t spans, uint32_t blocks, uint32_t at_once)
{
    enum { BUSY = 84, ALL = 132, JOIN = 6144 * N };
    uint64_t turns = (items * blocks + at_once - 1) / at_once,
             busy = max(min(items * blocks, at_once), (uint32_t)BUSY);
    return turns * ((spans + blocks - 1) / blocks) * slot_size<N>() * busy + (blocks > 1 ? JOIN * ALL : 0);
}

template <bool BF16, int N> static plan plan_of(const cuda_product &p, uint64_t room)
{
    uint32_t spans = (p.m.columns + SPAN - 1) / SPAN, row_tiles = (p.rows + N - 1) / N,
             items = (p.m.rows + TILE - 1) / TILE * row_tiles, at_once = together<BF16, N>();
    plan best = {cost_of<N>(items, spans, 1, at_once), row_tiles, items, 1};
    bool can_share = spans >= RUNS && (uint64_t)items * RUNS * TILE * N * sizeof(float) <= room;
    for (uint32_t n = 2; can_share && n <= RUNS && n * items <= at_once; n *= 2) {
        uint64_t cost = cost_of<N>(items, spans, n, at_once);
        if (cost < best.cost)
            best.cost = cost, best.blocks = n;
    }
    return best;
}

template <bool BF16, int N>
static bool launch_stream(cudaStream_t s, const cuda_product &p, const cuda_det_buffers &b)
{
    plan own = plan_of<BF16, N>(p, b.w_size);
    stream_args d = {p, (p.m.columns + SPAN - 1) / SPAN, own.row_tiles, own.items, own.blocks, (float *)b.w};
    CUtensorMap w, act;
    if (!cuda_map_rows(&w, p.m.values, p.m.rows, p.m.columns, p.m.columns, TILE, true) ||
        !cuda_map_rows(&act, b.act, p.rows, d.spans * SPAN, d.spans * SPAN, N, true))
        return false;
    launch_early(stream_kernel<BF16, N>, dim3(min(d.items * d.blocks, together<BF16, N>())), dim3(THREADS),
                 sizeof(stream_shared<N>), s, 1, d, w, act);
    if (d.blocks > 1)
        launch_early(join_kernel<BF16, N>, dim3(d.items, N / 8), dim3(WORKERS), 0, s, 1, d);
    return true;
}

/* N rows an item, or half as many. */
template <bool BF16, int N>
static bool launch_either(cudaStream_t s, const cuda_product &p, const cuda_det_buffers &b)
{
    return plan_of<BF16, N / 2>(p, b.w_size).cost < plan_of<BF16, N>(p, b.w_size).cost
               ? launch_stream<BF16, N / 2>(s, p, b)
               : launch_stream<BF16, N>(s, p, b);
}

template <bool BF16> static bool launch_rows(cudaStream_t s, const cuda_product &p, const cuda_det_buffers &b)
{
    return p.rows <= 16   ? launch_stream<BF16, 16>(s, p, b)
           : p.rows <= 32 ? launch_either<BF16, 32>(s, p, b)
           : p.rows <= 64 ? launch_either<BF16, 64>(s, p, b)
                          : launch_either<BF16, 128>(s, p, b);
}

bool cuda_det_streams(const struct cuda_product *p)
{
    return p->m.form == (p->act_bf16 ? CUDA_BF16 : CUDA_F16) && p->m.columns % 8 == 0 &&
           together<true, 128>() > 0;
}

bool cuda_det_stream(cudaStream_t s, const struct cuda_product *p, const struct cuda_det_buffers *b)
{
    if (!cuda_det_streams(p))
        return false;
    return p->act_bf16 ? launch_rows<true>(s, *p, *b) : launch_rows<false>(s, *p, *b);
}
