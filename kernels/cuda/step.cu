/* step: all layers of a decode step with up to 8 rows in one kernel, so that memory need not wait for launches.
 *
 * grid: 2 blocks an SM, 8 warps each, all resident; they meet at a barrier after each phase, 5 a layer:
 *     norm, q k v  |  RoPE, KV write, attention  |  o, added to x  |  norm, gate up, SwiGLU  |  down, added to x
 * Norms are computed by every block for itself from x (16 KB a row, from L2).
 *
 * bytes: the weights once and the rows' KV; flops: nothing. Predicted for the Llama-3-8B shape in bf16, one row, 1K context:
 * 15.1 GB at 4.5 TB/s = 3.34 ms, and 160 barriers of 1.2 us and 32 attention phases of 6 us without full use of memory: 3.7 ms.
 * Measured on an H200: 5.28 ms. A barrier takes 2.5 us, attention 10 us a layer, and the products
 * reach 3.2 (o) to 3.8 TB/s (gate and up). Asking for the next tiles into L2 before a barrier (cp.async.bulk.prefetch)
 * changed nothing. */
#include "attention_decode.cuh"
#include "matvec.cuh"
#include "rope.cuh"

#define ROWS CUDA_STEP_ROWS

/* --- meeting ---------------------------------------------------------------------------------- */

struct meeting {
    uint32_t *arrived,
        *open; /* how many blocks came; the number of the last meeting that all came to, in another line */
    uint32_t number;
};

__device__ __forceinline__ void meet(meeting &m)
{
    __syncthreads();
    m.number++;
    if (threadIdx.x == 0) {
        uint32_t seen;
        __threadfence();
        if (atomicAdd(m.arrived, 1) == m.number * gridDim.x - 1)
            asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(m.open), "r"(m.number) : "memory");
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(m.open) : "memory");
        } while (seen < m.number);
    }
    __syncthreads();
}

/* --- products --------------------------------------------------------------------------------- */

struct product_job {
    const cuda_matrix *m;
    const uint16_t *act; /* shared or global */
    uint32_t act_stride;
    cuda_epilogue epilogue;
    void *out;
    uint32_t out_stride, rows;
};

template <cuda_form F>
__device__ __forceinline__ lane_rows rows_of(const cuda_matrix &m, uint32_t tile, uint32_t rows,
                                             uint32_t part)
{
    constexpr int group = form_of<F>::group ? form_of<F>::group : 1;
    lane_rows lr;
    lr.columns = m.columns, lr.q = threadIdx.x % 4;
    for (int i = 0; i < 2; i++) {
        uint64_t n = min(tile * 16 + threadIdx.x % 32 / 4 + 8 * i, rows - 1) + (uint64_t)part * rows;
        lr.w[i] = (const uint8_t *)m.values + n * ((uint64_t)m.columns * 16 / form_of<F>::values);
        lr.scales[i] = (const uint32_t *)m.scales + (form_of<F>::group ? n * (m.columns / group) : 0);
    }
    return lr;
}

/* As matvec_kernel, tile after tile; the next tile's first weights are on their way while one is summed up. */
template <cuda_form F, bool BF16, int PARTS>
__device__ __noinline__ void multiply(const product_job &job, float (*sums)[8][17])
{
    constexpr int SHARERS = MATVEC_WARPS / PARTS, units = stage<F>::units;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4,
             part = warp / SHARERS, rows = job.m->rows / PARTS, tiles = (rows + 15) / 16,
             columns = job.m->columns, spans = (columns + SPAN - 1) / SPAN, step = SHARERS * units,
             first = warp % SHARERS * units;
    if (blockIdx.x >= tiles)
        return;
    const uint16_t *act[1] = {g < job.rows ? job.act + (uint64_t)g * job.act_stride : nullptr};
    lane_rows lr = rows_of<F>(*job.m, blockIdx.x, rows, part);
    stage<F> now, next;
    load_stage<F>(now, lr, first);
    cuda_product p = {};
    p.epilogue = job.epilogue, p.out = job.out, p.out_stride = job.out_stride;
    for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float acc[1][4] = {};
        for (uint32_t span = first; span < spans; span += 2 * step) {
            load_stage<F>(next, lr, span + step);
            use_stage<F, BF16, 1>(acc, now, lr, span, act);
            load_stage<F>(now, lr, span + 2 * step);
            use_stage<F, BF16, 1>(acc, next, lr, span + step, act);
        }
        if (tile + gridDim.x < tiles) {
            lr = rows_of<F>(*job.m, tile + gridDim.x, rows, part);
            load_stage<F>(now, lr, first);
        }
        for (int i = 0; i < 4; i++)
            sums[warp][2 * q + i % 2][g + 8 * (i / 2)] = acc[0][i];
        __syncthreads();
        uint32_t n = threadIdx.x % 16, r = threadIdx.x / 16;
        if (r < job.rows && tile * 16 + n < rows) {
            float total[2] = {0.0f, 0.0f};
            for (int w = 0; w < MATVEC_WARPS; w++)
                total[w / SHARERS] += sums[w][r][n];
            write_out<BF16>(p, r, tile * 16 + n, total[0], total[1]);
        }
        __syncthreads();
    }
}

/* --- norm ------------------------------------------------------------------------------------- */

/* This layer's second norm, the next layer's first and its pointers into L2, by one block. */
__device__ __forceinline__ void prefetch_norms(const cuda_step &a, uint32_t layer)
{
    const float *next = layer + 1 < a.layer_count ? a.layers[layer + 1].attn_norm : a.layers[layer].ffn_norm;
    if (blockIdx.x == gridDim.x - 1)
        for (uint32_t i = threadIdx.x * 32; i < a.embd; i += MATVEC_THREADS * 32) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(a.layers[layer].ffn_norm + i));
            asm volatile("prefetch.global.L2 [%0];" ::"l"(next + i));
        }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < 2 && layer + 1 < a.layer_count)
        asm volatile(
            "prefetch.global.L2 [%0];" ::"l"((const uint8_t *)&a.layers[layer + 1] + 128 * threadIdx.x));
}

#define VECTORS 4 /* float4 that a thread keeps on their way */

/* act[r] = norm(x[r]) in shared memory, rows columns + 8 apart. All sums first, so that the block waits once. */
template <bool BF16>
__device__ __forceinline__ void norm_rows(const cuda_step &a, const float *__restrict__ weight,
                                          uint16_t *__restrict__ act, float (*sums)[MATVEC_WARPS])
{
    uint32_t count = a.embd / 4;
    for (uint32_t r = 0; r < a.rows; r++) {
        const float4 *__restrict__ x = (const float4 *)(a.x + (uint64_t)r * a.embd);
        float sum = 0.0f;
        for (uint32_t first = threadIdx.x; first < count; first += VECTORS * MATVEC_THREADS) {
            float4 v[VECTORS];
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                v[i] = first + i * MATVEC_THREADS < count ? x[first + i * MATVEC_THREADS]
                                                          : make_float4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0)
            sums[r][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    for (uint32_t first = threadIdx.x; first < count; first += VECTORS * MATVEC_THREADS) {
        float4 w[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            w[i] = first + i * MATVEC_THREADS < count ? ((const float4 *)weight)[first + i * MATVEC_THREADS]
                                                      : make_float4(0, 0, 0, 0);
        for (uint32_t r = 0; r < a.rows; r++) {
            const float4 *__restrict__ x = (const float4 *)(a.x + (uint64_t)r * a.embd);
            float sum = 0.0f;
            for (int i = 0; i < MATVEC_WARPS; i++)
                sum += sums[r][i];
            float scale = rsqrtf(sum / (float)a.embd + a.rope.norm_eps);
            float4 v[VECTORS];
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                v[i] = first + i * MATVEC_THREADS < count ? x[first + i * MATVEC_THREADS]
                                                          : make_float4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                if (first + i * MATVEC_THREADS < count)
                    ((uint2 *)(act + (uint64_t)r * (a.embd + 8)))[first + i * MATVEC_THREADS] =
                        make_uint2(to_pair<BF16>(v[i].x * scale * w[i].x, v[i].y * scale * w[i].y),
                                   to_pair<BF16>(v[i].z * scale * w[i].z, v[i].w * scale * w[i].w));
        }
    }
    __syncthreads();
}

/* --- attention -------------------------------------------------------------------------------- */

template <int HD> struct attention_shared {
    decode_shared<HD, MATVEC_WARPS> pages;
    half q[HEADS][HD];
    float heads[MATVEC_WARPS][HD];
};

/* q of the group to shared memory; K and V of the row to its page, by the block that has the row's last split. */
template <int HD, bool BF16>
__device__ __forceinline__ void make_heads(attention_shared<HD> &sh, const cuda_step &a,
                                           const cuda_step_layer &l, const cuda_split &s, uint32_t kv_head,
                                           uint32_t group, half *kv, bool writes)
{
    const cuda_rope &rope = a.rope;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = rope.head_count + 2 * rope.kv_head_count;
    const uint16_t *wide = (const uint16_t *)rope.wide + (uint64_t)s.row * all * HD;
    const float *cos_sin = rope.cos_sin + (uint64_t)s.row * rope.rope_dim;
    for (uint32_t job = warp; job < group + (writes ? 2 : 0); job += MATVEC_WARPS) {
        bool is_q = job < group, is_v = job == group + 1;
        uint32_t head = is_q ? kv_head * group + job : kv_head;
        const uint16_t *in =
            wide + (uint64_t)(is_q ? head : rope.head_count + (is_v ? rope.kv_head_count : 0) + kv_head) * HD;
        const float *bias = is_q   ? l.q_bias
                            : is_v ? l.v_bias
                                   : l.k_bias,
                    *norm = is_q   ? l.q_norm
                            : is_v ? nullptr
                                   : l.k_norm;
        rope_head<BF16>(sh.heads[warp], in, bias ? bias + head * HD : nullptr, norm, !is_v, cos_sin, rope,
                        lane);
        half *out = sh.q[job];
        if (!is_q) {
            uint32_t position = rope.positions[s.row], page = rope.tables[s.table + position / 64];
            out = kv + page * rope.page_values +
                  (((is_v ? rope.kv_head_count : 0) + kv_head) * 64 + position % 64) * (uint64_t)HD;
        }
        for (uint32_t i = lane; i < HD; i += 32)
            out[i] =
                __ushort_as_half(to_bits<false>(is_q ? sh.heads[warp][i] * rope.q_scale : sh.heads[warp][i]));
        __syncwarp();
    }
}

template <int HD, bool BF16>
__device__ __noinline__ void attend(attention_shared<HD> &sh, const cuda_step &a, const cuda_step_layer &l,
                                    half *kv)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4,
             group = a.rope.head_count / a.rope.kv_head_count;
    decode_args d = {a.attention, a.splits, a.partial, a.counters, a.rope.kv_head_count};
    d.a.kv = kv;
    for (uint32_t item = blockIdx.x; item < a.split_grid * a.rope.kv_head_count; item += gridDim.x) {
        uint32_t split = item / a.rope.kv_head_count, kv_head = item % a.rope.kv_head_count;
        cuda_split s = a.splits[split];
        if (s.page_count == 0) /* behind the last split */
            return;
        bool writes = split + 1 == s.first_split + s.split_count, early = !writes || s.page_count > 2;
        if (early) { /* before the page that the row is in */
            start_page<HD, MATVEC_WARPS>(sh.pages, d, s, 0, kv_head);
            start_page<HD, MATVEC_WARPS>(sh.pages, d, s, 1, kv_head);
        }
        make_heads<HD, BF16>(sh, a, l, s, kv_head, group, kv, writes);
        __threadfence_block();
        __syncthreads();
        uint32_t q[HD / 16][2] = {};
        if (g < group)
            for (int i = 0; i < HD / 16; i++) {
                q[i][0] = *(const uint32_t *)&sh.q[g][16 * i + 2 * (lane % 4)];
                q[i][1] = *(const uint32_t *)&sh.q[g][16 * i + 8 + 2 * (lane % 4)];
            }
        decode_state<HD> st = {};
        st.max[0] = st.max[1] = -1e30f;
        for (uint32_t i = 0; i < s.page_count; i += 2) { /* a page for each half of the warps */
            if (i > 0 || !early) {
                start_page<HD, MATVEC_WARPS>(sh.pages, d, s, i, kv_head);
                start_page<HD, MATVEC_WARPS>(sh.pages, d, s, i + 1, kv_head);
            }
            copies_wait<0>();
            __syncthreads();
            uint32_t page = i + warp / 4, first = warp % 4 * 16 * (HD + 8);
            if (page < s.page_count)
                use_page<HD>(st, sh.pages.kv[page % 2][0] + first, sh.pages.kv[page % 2][1] + first, q,
                             page * 64 + warp % 4 * 16, s.token_count);
            __syncthreads();
        }
        finish_split<HD, MATVEC_WARPS>(sh.pages, st, d, s, split, kv_head, kv_head * group, group);
    }
}

/* --- the step --------------------------------------------------------------------------------- */

template <cuda_form F, bool BF16, int HD>
__global__ void __launch_bounds__(MATVEC_THREADS, 2) step_kernel(const __grid_constant__ cuda_step a)
{
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ float sums[MATVEC_WARPS][8][17], row_sums[ROWS][MATVEC_WARPS];
    uint16_t *act = (uint16_t *)memory;
    meeting m = {a.barrier, a.barrier + CUDA_BARRIER_WORDS / 2, 0};
    uint32_t embd = a.embd, qkv = (a.rope.head_count + 2 * a.rope.kv_head_count) * HD;
    for (uint32_t i = 0; i < a.layer_count; i++) {
        const cuda_step_layer &l = a.layers[i];
        half *kv = (half *)a.rope.kv + (uint64_t)i * 2 * a.rope.kv_head_count * 64 * HD;
        prefetch_norms(a, i);
        norm_rows<BF16>(a, l.attn_norm, act, row_sums);
        multiply<F, BF16, 1>({&l.qkv, act, embd + 8, CUDA_STORE16, (void *)a.rope.wide, qkv, a.rows}, sums);
        meet(m);
        attend<HD, BF16>(*(attention_shared<HD> *)memory, a, l, kv);
        meet(m);
        multiply<F, BF16, 1>({&l.o, (const uint16_t *)a.attention.out, a.rope.head_count * HD, CUDA_ADD_F32,
                              a.x, embd, a.rows},
                             sums);
        meet(m);
        norm_rows<BF16>(a, l.ffn_norm, act, row_sums);
        multiply<F, BF16, 2>({&l.gate_up, act, embd + 8, CUDA_SWIGLU16, (void *)a.rope.wide, a.ffn, a.rows},
                             sums);
        meet(m);
        multiply<F, BF16, 1>({&l.down, (const uint16_t *)a.rope.wide, a.ffn, CUDA_ADD_F32, a.x, embd, a.rows},
                             sums);
        meet(m);
    }
}

template <cuda_form F, bool BF16, int HD>
static bool launch_step(cudaStream_t s, const cuda_step *a, uint32_t sm_count, bool only_asks)
{
    size_t act = 2 * (size_t)a->rows * (a->embd + 8),
           shared = act > sizeof(attention_shared<HD>) ? act : sizeof(attention_shared<HD>);
    void (*kernel)(cuda_step) = step_kernel<F, BF16, HD>;
    int blocks = 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared) ||
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, MATVEC_THREADS, shared) ||
        blocks < 1) {
        cudaGetLastError(); /* not here: layer by layer, then */
        return false;
    }
    if (only_asks)
        return true;
    cudaMemsetAsync(a->barrier, 0, sizeof *a->barrier * CUDA_BARRIER_WORDS, s);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((uint32_t)blocks * sm_count), config.blockDim = dim3(MATVEC_THREADS),
    config.dynamicSmemBytes = shared;
    config.stream = s, config.attrs = &attribute, config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, *a);
    return true;
}

template <int HD>
static bool run_step(cudaStream_t s, enum cuda_form form, bool bf16, const cuda_step *a, uint32_t sm_count,
                     bool only_asks)
{
    switch (form) {
    case CUDA_BF16:
        return bf16 && launch_step<CUDA_BF16, true, HD>(s, a, sm_count, only_asks);
    case CUDA_F16:
        return launch_step<CUDA_F16, false, HD>(s, a, sm_count, only_asks);
    case CUDA_W4:
        return launch_step<CUDA_W4, false, HD>(s, a, sm_count, only_asks);
    case CUDA_W8:
        return launch_step<CUDA_W8, false, HD>(s, a, sm_count, only_asks);
    default:
        return false;
    }
}

bool cuda_step_run(cudaStream_t s, enum cuda_form form, bool bf16, const struct cuda_step *a,
                   uint32_t sm_count, bool only_asks)
{
    if (a->rope.head_count / a->rope.kv_head_count > HEADS || a->rows > ROWS)
        return false;
    switch (a->rope.head_dim) {
    case 64:
        return run_step<64>(s, form, bf16, a, sm_count, only_asks);
    case 128:
        return run_step<128>(s, form, bf16, a, sm_count, only_asks);
    default:
        return false;
    }
}
