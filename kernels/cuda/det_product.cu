/* det_product: the products of cuda-det-v2: a row's result is the same bits whatever other rows are beside it, however many.
 *
 * One rule for every size. Columns are taken in spans of 128 (the last filled up with zeros), and the spans of a row are cut into
 * eight runs, [T * i / 8, T * (i + 1) / 8) of T. A run's sum is one chain of tensor-core instructions (m16n8k16, f32), span by span,
 * eight a span; the instruction j of a span adds columns 32 * q + 4 * j + {0, 1, 2, 3} of q = 0..3. The runs' sums are added in order
 * to 0. Four kernels keep to it:
 *
 *   few    up to 64 rows. A block has 16 rows of W, a warp each run; weights go from memory to registers as in matvec.cu: a lane's
 *          32 columns of a span lie together. Memory-bound: W once for all rows.
 *   many   W, opened, and act are first laid out so that what one instruction adds lies together (det_open, det_permute); then tiles
 *          of 128 x 128, 8 warps of 64 x 32, four stages of 64 columns in shared memory; at the end of a run the sums so far are
 *          added up and begin again from zero.
 *   wide   as `many`, on sm_90a, with wgmma: its instruction adds the same 16 columns to the same bits.
 *   stream det_stream.cu, on sm_90a: 2 rows and more of 16-bit weights of act's kind, with wgmma, without opening them.
 * No size, device or library chooses another order. Predicted for `wide`: a tile of 128 x 128 reads 32 KB for each 64 columns from L2,
 * so 6 TB/s give 390 TFLOP/s. Measured on an H200, Llama-3-8B shape, bf16: prompts of 1K in 43.6 ms and 8K in 299 ms, with `many` (whose
 * mma.sync reaches 60 % of wgmma's rate at best) 73.9 and 520. */
#include "det_kernels.h"
#include "early.cuh"
#include "wgmma_product.cuh"

#define SPAN CUDA_DET_SPAN
#define RUNS CUDA_DET_RUNS

/* --- opening ---------------------------------------------------------------------------------- */

/* Bytes of 32 columns of a row. */
template <cuda_form F> __host__ __device__ constexpr int chunk_size()
{
    return F == CUDA_F32 ? 128 : F <= CUDA_BF16 ? 64 : F == CUDA_W4 ? 16 : 32;
}

template <cuda_form F> struct chunk { /* 32 columns of a row, as they lie in memory */
    uint4 w[chunk_size<F>() / 16];
    uint32_t scale[2];
};

template <cuda_form F>
__device__ __forceinline__ void load_chunk(chunk<F> &c, const cuda_matrix &m, uint64_t row, uint32_t column)
{
    uint64_t at = row * m.columns + column;
    const uint4 *from = (const uint4 *)((const uint8_t *)m.values + at / 32 * chunk_size<F>());
#pragma unroll
    for (int i = 0; i < chunk_size<F>() / 16; i++)
        c.w[i] = __ldg(from + i);
    if (F == CUDA_W8G16) {
        uint2 both = __ldg((const uint2 *)((const uint32_t *)m.scales + at / 16));
        c.scale[0] = both.x, c.scale[1] = both.y;
    } else if (F == CUDA_W8D) {
        c.scale[0] = c.scale[1] = __ldg((const uint16_t *)m.scales + at / 32);
    } else if (F > CUDA_BF16) {
        c.scale[0] = c.scale[1] = __ldg((const uint32_t *)m.scales + at / 32);
    }
}

template <cuda_form F> __device__ __forceinline__ void clear_chunk(chunk<F> &c)
{
#pragma unroll
    for (int i = 0; i < chunk_size<F>() / 16; i++)
        c.w[i] = make_uint4(0, 0, 0, 0);
    c.scale[0] = c.scale[1] = 0;
}

__device__ __forceinline__ uint32_t word_of(const uint4 *w, int i)
{
    return i % 4 == 0 ? w[i / 4].x : i % 4 == 1 ? w[i / 4].y : i % 4 == 2 ? w[i / 4].z : w[i / 4].w;
}

/* Columns 4 * step to 4 * step + 3 of the chunk, as two registers of 16-bit pairs. */
template <cuda_form F, bool BF16>
__device__ __forceinline__ void open4(const chunk<F> &c, int step, uint32_t &low, uint32_t &high)
{
    if (F == CUDA_F32) {
        low = to_pair<BF16>(__uint_as_float(word_of(c.w, 4 * step)),
                            __uint_as_float(word_of(c.w, 4 * step + 1)));
        high = to_pair<BF16>(__uint_as_float(word_of(c.w, 4 * step + 2)),
                             __uint_as_float(word_of(c.w, 4 * step + 3)));
    } else if (F == CUDA_F16 || F == CUDA_BF16) {
        uint32_t a = word_of(c.w, 2 * step), b = word_of(c.w, 2 * step + 1);
        if (F == CUDA_BF16 && !BF16) { /* beside weights of another type */
            a = to_pair<false>(__uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u));
            b = to_pair<false>(__uint_as_float(b << 16), __uint_as_float(b & 0xffff0000u));
        }
        low = a, high = b;
    } else {
        half2 dm = bits_half2(c.scale[step / 4]), d = __low2half2(dm), m = __high2half2(dm), c0, c1;
        if (F == CUDA_W4) { /* 0x6400 | n is 1024 + n */
            uint32_t x = word_of(c.w, step / 2) >> (step % 2 * 8);
            c0 = __hsub2(bits_half2((x & 0x000f000fu) | 0x64006400u), __float2half2_rn(1024.0f));
            c1 = __hsub2(bits_half2((x >> 4 & 0x000f000fu) | 0x64006400u), __float2half2_rn(1024.0f));
        } else {
            uint32_t x = word_of(c.w, step);
            c0 = __hsub2(bits_half2(__byte_perm(x, 0x64646464u, 0x4140)), __float2half2_rn(1152.0f));
            c1 = __hsub2(bits_half2(__byte_perm(x, 0x64646464u, 0x4342)), __float2half2_rn(1152.0f));
        }
        low = half2_bits(__hfma2(c0, d, m));
        high = half2_bits(__hfma2(c1, d, m));
    }
}

template <bool BF16>
__device__ __forceinline__ void put(const cuda_product &p, uint32_t r, uint32_t n, float value)
{
    uint64_t at = (uint64_t)r * p.out_stride + n;
    if (p.epilogue == CUDA_STORE16)
        ((uint16_t *)p.out)[at] = to_bits<BF16>(value);
    else if (p.epilogue == CUDA_ADD_F32)
        ((float *)p.out)[at] += value;
    else
        ((float *)p.out)[at] = value;
}

/* --- few rows --------------------------------------------------------------------------------- */

/* NT: tiles of 8 rows of act. */
template <cuda_form F, bool BF16, int NT>
__global__ void __launch_bounds__(32 * RUNS) few_kernel(cuda_product p)
{
    __shared__ float sums[RUNS][8 * NT][17];
    uint32_t run = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4,
             tile = blockIdx.x * 16;
    uint32_t spans = (p.m.columns + SPAN - 1) / SPAN, end = spans * (run + 1) / RUNS;
    uint64_t row[2] = {min(tile + g, p.m.rows - 1),
                       min(tile + g + 8, p.m.rows - 1)}; /* behind the last: not written */
    chunk<F> now[2], next[2];
    float acc[NT][4] = {};
    auto load = [&](chunk<F>(&c)[2], uint32_t span) {
        uint32_t column = span * SPAN + 32 * q;
        for (int i = 0; i < 2; i++)
            if (span < end && column < p.m.columns)
                load_chunk<F>(c[i], p.m, row[i], column);
            else
                clear_chunk<F>(c[i]);
    };
    load(now, spans * run / RUNS);
    for (uint32_t span = spans * run / RUNS; span < end; span++) {
        load(next, span + 1);
        uint32_t column = span * SPAN + 32 * q;
        bool inside = column < p.m.columns;
#pragma unroll
        for (int piece = 0; piece < 4; piece++) { /* 8 columns: two instructions */
            uint4 b[NT];
#pragma unroll
            for (int t = 0; t < NT; t++)
                b[t] = inside && g + 8 * t < p.rows
                           ? *(const uint4 *)((const uint16_t *)p.act + (uint64_t)(g + 8 * t) * p.act_stride +
                                              column + 8 * piece)
                           : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t a[4];
                open4<F, BF16>(now[0], 2 * piece + i, a[0], a[2]);
                open4<F, BF16>(now[1], 2 * piece + i, a[1], a[3]);
#pragma unroll
                for (int t = 0; t < NT; t++)
                    mma<BF16>(acc[t], a[0], a[1], a[2], a[3], i ? b[t].z : b[t].x, i ? b[t].w : b[t].y);
            }
        }
        now[0] = next[0], now[1] = next[1];
    }
#pragma unroll
    for (int t = 0; t < NT; t++)
        for (int i = 0; i < 4; i++)
            sums[run][8 * t + 2 * q + i % 2][g + 8 * (i / 2)] = acc[t][i];
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < 16 * p.rows; i += 32 * RUNS) {
        uint32_t n = i % 16, r = i / 16;
        float total = 0.0f;
        for (int k = 0; k < RUNS; k++)
            total += sums[k][r][n];
        if (tile + n < p.m.rows)
            put<BF16>(p, r, tile + n, total);
    }
}

template <cuda_form F, bool BF16> static void launch_few(cudaStream_t s, const cuda_product &p)
{
    void (*kernel)(cuda_product) = p.rows <= 8    ? few_kernel<F, BF16, 1>
                                   : p.rows <= 16 ? few_kernel<F, BF16, 2>
                                   : p.rows <= 32 ? few_kernel<F, BF16, 4>
                                                  : few_kernel<F, BF16, 8>;
    launch(kernel, dim3((p.m.rows + 15) / 16), dim3(32 * RUNS), 0, s, p);
}

/* --- layouts of `many` ------------------------------------------------------------------------ */

/* Where columns 32 * q + 4 * step of a span and the next lie: those of an instruction side by side, as its registers want them. */
__device__ __forceinline__ uint32_t place(uint32_t q, int step, int half)
{
    return 16 * step + 8 * half + 2 * q;
}

/* grid: a thread for 32 columns of a row of W. */
template <cuda_form F, bool BF16>
__global__ void open_kernel(cuda_matrix m, uint32_t first, uint64_t chunks, uint32_t spans, uint16_t *out)
{
    uint64_t at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= chunks)
        return;
    uint64_t row = at / (4 * spans);
    uint32_t within = (uint32_t)(at % (4 * spans)), q = within % 4, column = within * 32;
    chunk<F> c;
    if (column < m.columns)
        load_chunk<F>(c, m, first + row, column);
    else
        clear_chunk<F>(c);
    uint16_t *to = out + (row * spans + within / 4) * SPAN;
#pragma unroll
    for (int step = 0; step < 8; step++) {
        uint32_t low, high;
        open4<F, BF16>(c, step, low, high);
        *(uint32_t *)(to + place(q, step, 0)) = low;
        *(uint32_t *)(to + place(q, step, 1)) = high;
    }
}

/* grid: a thread for 32 columns of a row of act. */
__global__ void permute_kernel(const uint16_t *act, uint32_t columns, uint32_t stride, uint64_t chunks,
                               uint32_t spans, uint16_t *out)
{
    uint64_t at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    early_start();
    early_wait();
    if (at >= chunks)
        return;
    uint64_t row = at / (4 * spans);
    uint32_t within = (uint32_t)(at % (4 * spans)), column = within * 32;
    const uint4 *from = (const uint4 *)(act + row * stride + column);
    uint16_t *to = out + (row * spans + within / 4) * SPAN;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 v = column < columns ? from[i] : make_uint4(0, 0, 0, 0);
        *(uint32_t *)(to + place(within % 4, 2 * i, 0)) = v.x;
        *(uint32_t *)(to + place(within % 4, 2 * i, 1)) = v.y;
        *(uint32_t *)(to + place(within % 4, 2 * i + 1, 0)) = v.z;
        *(uint32_t *)(to + place(within % 4, 2 * i + 1, 1)) = v.w;
    }
}

/* --- many rows -------------------------------------------------------------------------------- */

#define TILE    128
#define CHUNK   64 /* columns of a stage */
#define STAGES  4
#define THREADS 256

struct many_shared {
    uint16_t w[STAGES][TILE][CHUNK], act[STAGES][TILE][CHUNK];
};

static_assert(sizeof(many_shared) <= CUDA_DET_SHARED, "what backend.c asks a device for");

struct many_args {
    const uint16_t *w, *act; /* laid out; rows of spans * SPAN */
    uint32_t n, n_first, rows, spans;
    cuda_product p;
};

/* A row's eight pieces of 16 bytes are crossed with its number: ldmatrix then meets every bank once. */
__device__ __forceinline__ const uint16_t *piece_at(const uint16_t (*tile)[CHUNK], uint32_t row,
                                                    uint32_t piece)
{
    return tile[row] + 8 * (piece ^ (row % 8));
}

__device__ __forceinline__ void start_stage(many_shared &sh, const many_args &d, uint32_t chunk, uint32_t n0,
                                            uint32_t r0)
{
    if (chunk < 2 * d.spans) {
        uint32_t s = chunk % STAGES;
        uint64_t width = (uint64_t)d.spans * SPAN;
        for (uint32_t i = threadIdx.x; i < TILE * 8; i += THREADS) {
            uint32_t row = i / 8, piece = i % 8;
            copy16_async((void *)piece_at(sh.w[s], row, piece),
                         d.w + min(n0 + row, d.n - 1) * width + chunk * CHUNK + 8 * piece);
            copy16_async((void *)piece_at(sh.act[s], row, piece),
                         d.act + min(r0 + row, d.rows - 1) * width + chunk * CHUNK + 8 * piece);
        }
    }
    copies_commit();
}

template <bool BF16>
__device__ __forceinline__ void multiply(float acc[4][4][4], const many_shared &sh, uint32_t s, uint32_t wm,
                                         uint32_t wn)
{
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++) {
        uint32_t a[4][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) /* rows 0-7 and 8-15, then the same of the second half of the columns */
            ldmatrix(a[i], piece_at(sh.w[s], wm + 16 * i + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int i = 0; i < 2;
             i++) /* two tiles of 8 rows of act: halves of the first, halves of the second */
            ldmatrix(b[i], piece_at(sh.act[s], wn + 16 * i + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                mma<BF16>(acc[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2],
                          b[j / 2][j % 2 * 2 + 1]);
    }
}

template <bool BF16> __global__ void __launch_bounds__(THREADS, 1) many_kernel(many_args d)
{
    extern __shared__ __align__(128) uint8_t raw[];
    many_shared &sh = *reinterpret_cast<many_shared *>(raw);
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, wm = warp % 2 * 64, wn = warp / 2 * 32,
             r0 = blockIdx.x * TILE, n0 = blockIdx.y * TILE, run = 0;
    float acc[4][4][4] = {}, total[4][4][4] = {};
    for (uint32_t i = 0; i < STAGES - 1; i++)
        start_stage(sh, d, i, n0, r0);
    for (uint32_t chunk = 0; chunk < 2 * d.spans; chunk++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        start_stage(sh, d, chunk + STAGES - 1, n0, r0);
        multiply<BF16>(acc, sh, chunk % STAGES, wm, wn);
        if (chunk % 2 == 0)
            continue;
        while (d.spans * (run + 1) / RUNS < chunk / 2 + 1) /* empty runs add nothing */
            run++;
        if (d.spans * (run + 1) / RUNS != chunk / 2 + 1)
            continue;
#pragma unroll
        for (int i = 0; i < 64; i++) {
            (&total[0][0][0])[i] += (&acc[0][0][0])[i];
            (&acc[0][0][0])[i] = 0.0f;
        }
    }
    copies_wait<0>();
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                uint32_t n = n0 + wm + 16 * i + lane / 4 + 8 * (k / 2),
                         r = r0 + wn + 8 * j + lane % 4 * 2 + k % 2;
                if (n < d.n && r < d.rows)
                    put<BF16>(d.p, r, d.n_first + n, total[i][j][k]);
            }
}

/* --- many rows, with wgmma -------------------------------------------------------------------- */

/* The same chains by a block of two groups of four warps, 64 rows of act each, and a warp that feeds them through the copy engine. An
 * instruction of wgmma adds the 16 columns that one of mma does, to the same bits: kernels_test_cuda_det, whose few rows are mma's. */
#define WIDE_STAGES  5
#define WIDE_WORKERS 256
#define WIDE_THREADS (WIDE_WORKERS + 32)
#define WIDE_SIDE    (TILE * CHUNK * 2) /* bytes of a stage's rows of act, or of W */

struct wide_shared {
    uint8_t act[WIDE_STAGES][WIDE_SIDE], w[WIDE_STAGES][WIDE_SIDE];
    uint64_t full[WIDE_STAGES], empty[WIDE_STAGES];
};

__device__ __forceinline__ void feed_wide(wide_shared &sh, const many_args &d, const CUtensorMap *w,
                                          const CUtensorMap *act)
{
    for (uint32_t chunk = 0; chunk < 2 * d.spans; chunk++) {
        uint32_t s = chunk % WIDE_STAGES;
        bell_wait(&sh.empty[s], chunk / WIDE_STAGES % 2 ^ 1);
        bell_expect(&sh.full[s], 2 * WIDE_SIDE);
        copy_box(sh.act[s], act, (int32_t)(chunk * CHUNK), (int32_t)(blockIdx.x * TILE), &sh.full[s]);
        copy_box(sh.w[s], w, (int32_t)(chunk * CHUNK), (int32_t)(blockIdx.y * TILE), &sh.full[s]);
    }
}

__device__ __forceinline__ void let_go(uint64_t *bell)
{
    if (threadIdx.x % 32 == 0)
        bell_arrive(bell);
}

/* One run, of chunks [begin, end). */
template <bool BF16>
__device__ __forceinline__ void multiply_wide(float (&acc)[64], wide_shared &sh, uint32_t begin, uint32_t end)
{
    uint32_t group = threadIdx.x / 128 * (WIDE_SIDE / 2), before = 0;
    for (uint32_t chunk = begin; chunk < end; chunk++) {
        uint32_t s = chunk % WIDE_STAGES, a = shared_address(sh.act[s]) + group, b = shared_address(sh.w[s]);
        bell_wait(&sh.full[s], chunk / WIDE_STAGES % 2);
        wgmma_begin();
#pragma unroll
        for (uint32_t k = 0; k < CHUNK / 16; k++)
            wgmma_product<BF16>(acc, wgmma_operand(a + 32 * k, 16), wgmma_operand(b + 32 * k, 16),
                                chunk > begin || k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (chunk > begin)
            let_go(&sh.empty[before]);
        before = s;
    }
    wgmma_wait<0>();
    wgmma_hold(acc);
    let_go(&sh.empty[before]);
}

template <bool BF16>
__global__ void __launch_bounds__(WIDE_THREADS, 1)
    wide_kernel(const __grid_constant__ many_args d, const __grid_constant__ CUtensorMap w,
                const __grid_constant__ CUtensorMap act)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    wide_shared &sh = *reinterpret_cast<wide_shared *>(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < WIDE_STAGES; i++)
            bell_init(&sh.full[i], 1), bell_init(&sh.empty[i], WIDE_WORKERS / 32);
        bells_made();
    }
    __syncthreads();
    if (threadIdx.x >= WIDE_WORKERS) {
        if (threadIdx.x == WIDE_WORKERS)
            feed_wide(sh, d, &w, &act);
        return;
    }
    float total[64] = {}, acc[64];
#pragma unroll 1
    for (uint32_t run = 0; run < RUNS; run++) {
        uint32_t begin = 2 * (d.spans * run / RUNS), end = 2 * (d.spans * (run + 1) / RUNS);
        if (begin == end) /* adds nothing */
            continue;
        multiply_wide<BF16>(acc, sh, begin, end);
#pragma unroll
        for (int i = 0; i < 64; i++)
            total[i] += acc[i];
    }
    uint32_t r0 = blockIdx.x * TILE + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4,
             n0 = blockIdx.y * TILE + threadIdx.x % 4 * 2;
#pragma unroll
    for (uint32_t i = 0; i < 64; i++) {
        uint32_t r = r0 + i / 2 % 2 * 8, n = n0 + i / 4 * 8 + i % 2;
        if (n < d.n && r < d.rows)
            put<BF16>(d.p, r, d.n_first + n, total[i]);
    }
}

/* False: not on this device; nothing was started. */
template <bool BF16> static bool launch_wide(cudaStream_t s, const many_args &d)
{
    static known_devices known;
    CUtensorMap w, act;
    if (!known_of_device(known, [] { return has_hopper_code(wide_kernel<BF16>, sizeof(wide_shared)); }) ||
        !cuda_map_rows(&w, d.w, d.n, d.spans * SPAN, d.spans * SPAN, TILE, false) ||
        !cuda_map_rows(&act, d.act, d.rows, d.spans * SPAN, d.spans * SPAN, TILE, false))
        return false;
    launch(wide_kernel<BF16>, dim3((d.rows + TILE - 1) / TILE, (d.n + TILE - 1) / TILE), dim3(WIDE_THREADS),
           sizeof(wide_shared), s, d, w, act);
    return true;
}

/* --- launching -------------------------------------------------------------------------------- */

template <cuda_form F, bool BF16>
static void open_rows(cudaStream_t s, const cuda_matrix &m, uint32_t first, uint32_t count, uint32_t spans,
                      uint16_t *out)
{
    uint64_t chunks = (uint64_t)count * spans * 4;
    launch(open_kernel<F, BF16>, dim3((unsigned)((chunks + 255) / 256)), dim3(256), 0, s, m, first, chunks,
           spans, out);
}

template <cuda_form F, bool BF16>
static void run_form(cudaStream_t s, const cuda_product &p, const cuda_det_buffers &b)
{
    bool streams = p.rows > 1 && cuda_det_streams(&p);
    if (p.rows <= CUDA_DET_FEW && !streams)
        return launch_few<F, BF16>(s, p);
    uint32_t spans = (p.m.columns + SPAN - 1) / SPAN,
             step = (uint32_t)min((uint64_t)p.m.rows, b.w_size / (2 * (uint64_t)spans * SPAN) / TILE * TILE);
    uint64_t chunks = (uint64_t)p.rows * spans * 4;
    launch_early(permute_kernel, dim3((unsigned)((chunks + 255) / 256)), dim3(256), 0, s, 1,
                 (const uint16_t *)p.act, p.m.columns, p.act_stride, chunks, spans, (uint16_t *)b.act);
    if (streams && cuda_det_stream(s, &p, &b))
        return;
    cudaFuncSetAttribute(many_kernel<BF16>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)sizeof(many_shared));
    for (uint32_t first = 0; first < p.m.rows; first += step) {
        many_args d = {(const uint16_t *)b.w,
                       (const uint16_t *)b.act,
                       min(step, p.m.rows - first),
                       first,
                       p.rows,
                       spans,
                       p};
        open_rows<F, BF16>(s, p.m, first, d.n, spans, (uint16_t *)b.w);
        if (launch_wide<BF16>(s, d))
            continue;
        launch(many_kernel<BF16>, dim3((p.rows + TILE - 1) / TILE, (d.n + TILE - 1) / TILE), dim3(THREADS),
               sizeof(many_shared), s, d);
    }
}

uint64_t cuda_det_act_size(uint32_t rows, uint32_t columns)
{
    return (uint64_t)rows * ((columns + SPAN - 1) / SPAN * SPAN) * 2;
}

void cuda_det_product(cudaStream_t s, const struct cuda_product *p, const struct cuda_det_buffers *b)
{
    switch (p->m.form) {
    case CUDA_F32:
        return run_form<CUDA_F32, false>(s, *p, *b);
    case CUDA_F16:
        return run_form<CUDA_F16, false>(s, *p, *b);
    case CUDA_BF16:
        return p->act_bf16 ? run_form<CUDA_BF16, true>(s, *p, *b) : run_form<CUDA_BF16, false>(s, *p, *b);
    case CUDA_W4:
        return run_form<CUDA_W4, false>(s, *p, *b);
    case CUDA_W8:
        return run_form<CUDA_W8, false>(s, *p, *b);
    case CUDA_W8D:
        return run_form<CUDA_W8D, false>(s, *p, *b);
    case CUDA_W8G16:
        return run_form<CUDA_W8G16, false>(s, *p, *b);
    }
}
