/* step: all layers of a decode step with a few rows in one kernel, so that memory never waits for launches (sm_90).
 *
 * grid: a block an SM, all resident. A warp feeds, 8 work. The feeder walks over everything that the block will need, layer by layer,
 * and keeps a ring of slots in shared memory full through the copy engine: 16 rows of a weight matrix by 2 KB, or a page of KV of
 * one head. Neither depends on what is being computed, so it does not stop where the workers wait for other blocks: 130 to 200 KB
 * an SM come meanwhile, which is 5 us of the memory's time.
 *     norm, q k v  |  RoPE, KV write, attention  |  splits added up  |  o, added to x  |  norm, gate up, SwiGLU  |  down, added to x
 * Tiles go round the blocks through all phases, so that a block with one tile fewer here has one more in the next.
 * Norms are computed by every block for itself from x.
 *
 * There is no barrier of the grid. What one block computes and others need travels as letters: 8 bytes, of which 4 say what and 4 are a
 * stamp that says of which layer it is. A reader asks until the stamp is right, so a value costs one way to L2 and one back; a
 * barrier (fence, counter, asking, reading: four such ways) took 6 us beside a busy memory. A letter is not written again before all
 * have read it: whoever writes the next one to its place needs, directly or through others, something of every reader; who makes
 * nothing of it does not read it.
 *
 * bytes: the weights once and the rows' KV; flops: nothing. Predicted for the Llama-3-8B shape in bf16, one row, 1K context:
 * 14.1 GB at 4.4 TB/s = 3.2 ms, and 32 times 4 us in which attention outlasts the ring: 3.3 ms.
 * Measured on an H200: 3.54 ms; with 32K of context 4.47, with 128K 7.59; Q4_K 1.68, Q8_0 2.39 (with
 * scales of four bytes). */
#include "rope.cuh"
#include "step_product.cuh"

/* --- feeding ---------------------------------------------------------------------------------- */

template <cuda_form F, int HD> __device__ void feed(ring r, const cuda_step &a, const CUtensorMap *map)
{
    dealer d = {0};
    uint32_t kv_heads = a.rope.kv_head_count;
    bool early = false; /* pages in the ring may lack the step's own K and V (patch_page) */
#pragma unroll 1
    for (uint32_t i = 0; i < a.layer_count; i++) {
        const cuda_step_layer &l = a.layers[i];
        feed_product<F>(r, d, l.qkv, 1);
#pragma unroll 1
        for (uint32_t at = blockIdx.x; at < a.split_grid * kv_heads; at += gridDim.x)
            feed_split<HD>(r, a.splits[at / kv_heads], a.attention, {map, nullptr},
                           (i * 2 * kv_heads + at % kv_heads) * 64, early);
        feed_product<F>(r, d, l.o, 1);
        feed_product<F>(r, d, l.gate_up, 2);
        feed_product<F>(r, d, l.down, 1);
    }
}

/* --- norm ------------------------------------------------------------------------------------- */

/* The first weights that a thread needs; loaded before x is there. */
__device__ __forceinline__ void load_weights(float2 w[VECTORS], const float *weight, uint32_t first,
                                             uint32_t count)
{
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        w[i] = first + i * WORKERS < count ? __ldg((const float2 *)weight + first + i * WORKERS)
                                           : make_float2(0, 0);
}

/* act[r] = norm(x[r]) in shared memory, rows columns + 8 apart. sums: [ROWS][WARPS] */
template <bool BF16>
__device__ __forceinline__ void norm_rows(const cuda_step &a, const uint2 *x, uint32_t stamp,
                                          const float *weight, float2 w[VECTORS], uint16_t *act, float *sums)
{
    uint32_t count = a.embd / 2;
    bool kept = count <= VECTORS * WORKERS;
    uint4 v[VECTORS];
#pragma unroll 1
    for (uint32_t r = 0; r < a.rows; r++) {
        float sum = 0.0f;
#pragma unroll 1
        for (uint32_t first = threadIdx.x; first < count; first += VECTORS * WORKERS) {
            receive(v, (const uint4 *)x + (uint64_t)r * count, first, count, stamp);
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                sum += __uint_as_float(v[i].x) * __uint_as_float(v[i].x) +
                       __uint_as_float(v[i].z) * __uint_as_float(v[i].z);
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0)
            sums[r * WARPS + threadIdx.x / 32] = sum;
    }
    meet_warps<WORKERS>(1);
#pragma unroll 1
    for (uint32_t r = 0; r < a.rows; r++) {
        float sum = 0.0f;
        for (int i = 0; i < WARPS; i++)
            sum += sums[r * WARPS + i];
        float scale = rsqrtf(sum / (float)a.embd + a.rope.norm_eps);
#pragma unroll 1
        for (uint32_t first = threadIdx.x; first < count; first += VECTORS * WORKERS) {
            if (!kept)
                load_weights(w, weight, first, count);
            if (!kept || a.rows > 1) /* else they are still here */
                receive(v, (const uint4 *)x + (uint64_t)r * count, first, count, stamp);
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                if (first + i * WORKERS < count)
                    ((uint32_t *)(act + r * (a.embd + 8)))[first + i * WORKERS] = to_pair<BF16>(
                        __uint_as_float(v[i].x) * scale * w[i].x, __uint_as_float(v[i].z) * scale * w[i].y);
        }
    }
    meet_warps<WORKERS>(1);
}

/* --- attention -------------------------------------------------------------------------------- */

template <int HD> struct attention_shared {
    half q[HEADS][HD];
    half fresh[2][HD]; /* the row's own K and V, which the page in the ring may lack */
    uint32_t raw[WARPS][HD / 2];
    float heads[WARPS][HD];
    float4 joined[WORKERS];
    decode_ends<WARPS> ends;
    float o[]; /* [warps][group][HD] */
};

struct item {     /* a split of one row, for one KV head */
    cuda_split s; /* no pages: there is none */
    uint32_t split, kv_head, position;
    bool writes; /* it has the row's last page */
};

__device__ __forceinline__ item item_of(const cuda_step &a, uint32_t at)
{
    uint32_t kv_heads = a.rope.kv_head_count;
    item it = {};
    if (at >= a.split_grid * kv_heads)
        return it;
    it.split = at / kv_heads, it.kv_head = at % kv_heads;
    it.s = a.splits[it.split];
    it.position = a.rope.positions[it.s.row];
    it.writes = it.split + 1 == it.s.first_split + it.s.split_count;
    return it;
}

/* q of the group to shared memory; K and V of the row there and to its page, by the block that has the row's last split. */
template <int HD, bool BF16>
__device__ __forceinline__ void make_heads(attention_shared<HD> &sh, const cuda_step &a,
                                           const cuda_step_layer &l, const item &it, uint32_t group, half *kv,
                                           const uint2 *qkv, uint32_t stamp)
{
    const cuda_rope &rope = a.rope;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = rope.head_count + 2 * rope.kv_head_count,
             kv_head = it.kv_head;
    const float *cos_sin = rope.cos_sin + (uint64_t)it.s.row * rope.rope_dim;
#pragma unroll 1
    for (uint32_t job = warp; job < group + (it.writes ? 2 : 0); job += WARPS) {
        bool is_q = job < group, is_v = job == group + 1;
        uint32_t head = is_q ? kv_head * group + job : kv_head,
                 in = is_q ? head : rope.head_count + (is_v ? rope.kv_head_count : 0) + kv_head;
        const float *bias = is_q   ? l.q_bias
                            : is_v ? l.v_bias
                                   : l.k_bias,
                    *norm = is_q   ? l.q_norm
                            : is_v ? nullptr
                                   : l.k_norm;
        if (lane < HD / 4) {
            uint4 v;
            do
                v = look((const uint4 *)(qkv + ((uint64_t)it.s.row * all + in) * (HD / 2)) + lane);
            while (v.y != stamp || v.w != stamp);
            sh.raw[warp][2 * lane] = v.x, sh.raw[warp][2 * lane + 1] = v.z;
        }
        __syncwarp();
        rope_head<BF16>(sh.heads[warp], (const uint16_t *)sh.raw[warp], bias ? bias + head * HD : nullptr,
                        norm, !is_v, cos_sin, rope, lane);
        half *out =
            is_q ? nullptr
                 : kv + rope.tables[it.s.table + it.position / 64] * rope.page_values +
                       (((is_v ? rope.kv_head_count : 0) + kv_head) * 64 + it.position % 64) * (uint64_t)HD;
#pragma unroll 1
        for (uint32_t i = lane; i < HD; i += 32) {
            half x =
                __ushort_as_half(to_bits<false>(is_q ? sh.heads[warp][i] * rope.q_scale : sh.heads[warp][i]));
            (is_q ? sh.q[job] : sh.fresh[is_v])[i] = x;
            if (!is_q)
                out[i] = x;
        }
        __syncwarp();
    }
}

/* What the warps found of a split: to `out`, if the row has no other, else to `parts`. */
template <int HD>
__device__ __forceinline__ void post_split(const attention_shared<HD> &sh, const cuda_step &a, const item &it,
                                           uint32_t group, const letters &p, uint32_t stamp)
{
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < group * HD / 2; i += WORKERS) {
        uint32_t head = i / (HD / 2), pair = i % (HD / 2);
        float max = -CUDART_INF_F, sum = 0.0f;
        float2 value = {0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            max = fmaxf(max, sh.ends.max[w][head]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float scale = exp2_fast(sh.ends.max[w][head] - max);
            float2 o = *(const float2 *)(sh.o + (w * group + head) * HD + 2 * pair);
            sum += sh.ends.sum[w][head] * scale;
            value.x += o.x * scale, value.y += o.y * scale;
        }
        uint32_t heads = a.rope.kv_head_count * group, in_all = it.kv_head * group + head;
        if (it.s.split_count == 1) {
            float x = value.x / sum, y = value.y / sum;
            send(p.out + ((uint64_t)it.s.row * heads + in_all) * (HD / 2) + pair,
                 a.attention.out_bf16 ? to_pair<true>(x, y) : to_pair<false>(x, y), stamp);
        } else {
            uint2 *part = p.parts + ((uint64_t)it.split * heads + in_all) * (HD + 2);
            send_two(part + 2 * pair, value.x, value.y, stamp);
            if (pair == 0)
                send_two(part + HD, max, sum, stamp);
        }
    }
}

template <int HD, bool BF16>
__device__ __forceinline__ void attend(ring &r, attention_shared<HD> &sh, const cuda_step &a,
                                       const cuda_step_layer &l, item it, half *kv, const letters &p,
                                       uint32_t stamp)
{
    uint32_t group = a.rope.head_count / a.rope.kv_head_count, at = blockIdx.x;
    meet_warps<WORKERS>(1); /* nobody works with what was there before */
    if (threadIdx.x == 0)
        sh.ends.o = sh.o;
#pragma unroll 1
    while (it.s.page_count > 0) {
        uint32_t q[HD / 16][2];
        make_heads<HD, BF16>(sh, a, l, it, group, kv, p.qkv, stamp);
        meet_warps<WORKERS>(1);
        load_heads<HD>(q, sh.q[0], group);
        decode_state<HD> st = {};
        st.max[0] = st.max[1] = -1e30f;
        use_split<HD, WARPS>(st, r, it.s, it.writes ? sh.fresh[0] : nullptr, q);
        share_state<HD, WARPS>(sh.ends, st, group);
        meet_warps<WORKERS>(1);
        post_split<HD>(sh, a, it, group, p, stamp);
        it = item_of(a, at += gridDim.x);
        if (it.s.page_count > 0)
            meet_warps<WORKERS>(1);
    }
}

/* --- splits added up -------------------------------------------------------------------------- */

struct joint {                                    /* a head of a row with several splits */
    uint32_t row, head, first_split, split_count; /* splits 0: there is none */
};

/* Heads go to blocks from the last on: the first have more splits. */
__device__ __forceinline__ joint joint_of(const cuda_step &a, uint32_t turn)
{
    uint32_t at = turn * gridDim.x + gridDim.x - 1 - blockIdx.x, row = at / a.rope.head_count;
    joint j = {row, at % a.rope.head_count, 0, 0};
    if (row < a.rows)
#pragma unroll 1
        for (uint32_t i = 0; i < a.split_grid; i++)
            if (a.splits[i].page_count > 0 && a.splits[i].row == row) {
                j.first_split = i, j.split_count = a.splits[i].split_count;
                break;
            }
    if (j.split_count == 1)
        j.split_count = 0;
    return j;
}

#define AT_ONCE 4

/* Adds b to a: values in x and y, maximum in z, sum in w. */
__device__ __forceinline__ void add_part(float4 &a, const float4 &b)
{
    float max = fmaxf(a.z, b.z), old = exp2_fast(a.z - max), more = exp2_fast(b.z - max);
    a = make_float4(a.x * old + b.x * more, a.y * old + b.y * more, max, a.w * old + b.w * more);
}

template <int HD>
__device__ __forceinline__ void join(attention_shared<HD> &sh, const cuda_step &a, const joint &j,
                                     const letters &p, uint32_t stamp)
{
    constexpr uint32_t PAIRS = HD / 2, SHARES = WORKERS / PAIRS;
    uint32_t pair = threadIdx.x % PAIRS, share = threadIdx.x / PAIRS, heads = a.rope.head_count;
    float4 sum = {0.0f, 0.0f, -1e30f, 0.0f};
#pragma unroll 1
    for (uint32_t k = share; k < j.split_count; k += AT_ONCE * SHARES) {
        uint4 v[AT_ONCE], m[AT_ONCE];
        bool all;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                v[i] = m[i] = make_uint4(0, stamp, 0, stamp);
                if (k + i * SHARES < j.split_count) {
                    const uint2 *part =
                        p.parts + ((uint64_t)(j.first_split + k + i * SHARES) * heads + j.head) * (HD + 2);
                    v[i] = look((const uint4 *)part + pair), m[i] = look((const uint4 *)part + PAIRS);
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                all = all && v[i].y == stamp && v[i].w == stamp && m[i].y == stamp && m[i].w == stamp;
        } while (!all);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (k + i * SHARES < j.split_count)
                add_part(sum, make_float4(__uint_as_float(v[i].x), __uint_as_float(v[i].z),
                                          __uint_as_float(m[i].x), __uint_as_float(m[i].z)));
    }
    sh.joined[threadIdx.x] = sum;
    meet_warps<WORKERS>(1);
    if (share == 0) {
#pragma unroll 1
        for (uint32_t i = 1; i < SHARES; i++)
            add_part(sum, sh.joined[i * PAIRS + pair]);
        float x = sum.x / sum.w, y = sum.y / sum.w;
        send(p.out + ((uint64_t)j.row * heads + j.head) * PAIRS + pair,
             a.attention.out_bf16 ? to_pair<true>(x, y) : to_pair<false>(x, y), stamp);
    }
}

/* All of this block's. first: the one of turn 0. */
template <int HD>
__device__ __forceinline__ void join_all(attention_shared<HD> &sh, const cuda_step &a, const joint &first,
                                         const letters &p, uint32_t stamp)
{
    joint j = first;
#pragma unroll 1
    for (uint32_t turn = 0; turn * gridDim.x < a.rows * a.rope.head_count; turn++) {
        if (turn > 0) {
            j = joint_of(a, turn);
            meet_warps<WORKERS>(1);
        }
        if (j.split_count > 0)
            join<HD>(sh, a, j, p, stamp);
    }
}

/* --- the step --------------------------------------------------------------------------------- */

struct layout {                                                /* of dynamic shared memory: the ring first */
    uint32_t slot_size, slots, ahead, scratch, sums, coded_at; /* in scratch: the input once more, coded */
};

struct block_shared {
    bells b;
    uint64_t sums_full[2], sums_empty[2];
    float norm_sums[ROWS * WARPS];
};

template <cuda_form F, bool BF16, int HD>
__device__ __forceinline__ void work(ring r, const cuda_step &a, const layout &lay, uint8_t *memory,
                                     block_shared &bs)
{
    uint8_t *scratch = memory + lay.slots * lay.slot_size;
    uint16_t *act = (uint16_t *)scratch;
    attention_shared<HD> &sh = *(attention_shared<HD> *)scratch;
    block_sums b = {(float *)(scratch + lay.scratch), bs.sums_full, bs.sums_empty, 0};
    dealer d = {0};
    letters p = letters_of(a);
    uint32_t embd = a.embd, width = a.rope.head_count * HD, rows = a.rows,
             qkv = width + 2 * a.rope.kv_head_count * HD;
    uint64_t layer_values = (uint64_t)2 * a.rope.kv_head_count * 64 * HD;
    item first = item_of(a, blockIdx.x);
    joint mine = joint_of(a, 0);
    float2 w[VECTORS];
#pragma unroll 1
    for (uint32_t i = blockIdx.x * WORKERS + threadIdx.x; i < rows * embd; i += gridDim.x * WORKERS)
        send(p.x[0] + i, __float_as_uint(a.x[i]), stamp_of_x(0));
    load_weights(w, a.layers[0].attn_norm, threadIdx.x, embd / 2);
    /* One loop over all products, with one copy of what they share: the instructions of a layer must stay in the SM. */
#pragma unroll 1
    for (uint32_t n = 0; n < 4 * a.layer_count; n++) {
        uint32_t layer = n / 4, kind = n % 4, stamp = layer + 1,
                 state = n / 2; /* state: of x, that is there */
        const cuda_step_layer &l = a.layers[layer];
        uint32_t made = kind == 0 ? qkv : kind == 2 ? a.ffn : embd;
        /* Who has no tile must not read: nobody waits for it, so what it reads may be written again meanwhile. */
        bool works = d.next() < (made + 15) / 16;
        product_job job = {};
        job.act = act, job.parts = 1, job.stamp = stamp;
        if (kind % 2 == 0) {
            if (works)
                norm_rows<BF16>(a, x_of(p, state), stamp_of_x(state), kind == 0 ? l.attn_norm : l.ffn_norm, w,
                                act, bs.norm_sums);
            job.m = kind == 0 ? &l.qkv : &l.gate_up, job.parts = kind == 0 ? 1 : 2;
            job.how = kind == 0 ? SEND_PAIRS : SEND_SWIGLU, job.to = kind == 0 ? p.qkv : p.ffn;
        } else {
            if (kind == 1) {
                attend<HD, BF16>(r, sh, a, l, first, (half *)a.rope.kv + layer * layer_values, p, stamp);
                join_all<HD>(sh, a, mine, p, stamp);
            }
            if (n + 1 < 4 * a.layer_count)
                load_weights(w, kind == 1 ? l.ffn_norm : a.layers[layer + 1].attn_norm, threadIdx.x,
                             embd / 2);
            if (works && form_of<F>::group == 0)
                receive_rows(act, kind == 1 ? p.out : p.ffn, rows, kind == 1 ? width : a.ffn, stamp);
            job.m = kind == 1 ? &l.o : &l.down, job.how = SEND_SUM;
            job.to = x_of(p, state + 1), job.stamp = stamp_of_x(state + 1);
            job.to_add = x_of(p, state), job.add_stamp = stamp_of_x(state);
            job.plain = n + 1 == 4 * a.layer_count ? a.x : nullptr;
        }
        if constexpr (form_of<F>::group != 0) {
            uint8_t *coded = (uint8_t *)act + lay.coded_at;
            uint32_t columns = job.m->columns;
            if (works && kind % 2 == 0)
                code_row<F>(coded, act, columns, 0, columns);
#pragma unroll 1
            for (uint32_t at = 0; works && kind % 2 == 1 && at < columns; at += STAGED) {
                uint32_t here = min(columns - at, (uint32_t)STAGED);
                receive_rows(act, (kind == 1 ? p.out : p.ffn) + at / 2, 1, here, stamp);
                code_row<F>(coded, act, columns, at, here);
            }
            multiply_codes<F>(r, d, job, coded);
        } else {
            multiply<F, BF16>(r, d, b, rows, job);
        }
    }
}

template <cuda_form F, bool BF16, int HD>
__global__ void __launch_bounds__(THREADS, 1)
    step_kernel(const __grid_constant__ cuda_step a, const __grid_constant__ layout lay,
                const __grid_constant__ CUtensorMap map)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ block_shared bs;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++)
            bell_init(&bs.sums_full[i], sum_writers(a.rows)),
                bell_init(&bs.sums_empty[i], sum_readers(a.rows));
        bells_init(bs.b, lay.slots, WARPS);
    }
    __syncthreads();
    ring r = {memory, &bs.b, lay.slot_size, lay.slots, 0, 0, lay.ahead, 0};
    if (threadIdx.x >= WORKERS)
        feed<F, HD>(r, a, &map);
    else
        work<F, BF16, HD>(r, a, lay, memory, bs);
}

/* --- launching -------------------------------------------------------------------------------- */

#define AHEAD        2 /* slots on their way; with 3, some SMs get more of the memory than others */
#define SHARED_MOST  (227u << 10) /* of a block of sm_90 */
#define SHARED_FIXED 1024u        /* what the kernel has beside the dynamic memory */

static uint32_t larger(uint32_t x, uint32_t y)
{
    return x > y ? x : y;
}

/* False: the rows leave no room for a ring. */
template <cuda_form F, int HD> static bool lay_out(const cuda_step *a, layout *lay)
{
    uint32_t group = a->rope.head_count / a->rope.kv_head_count, width = a->rope.head_count * HD,
             attention = (uint32_t)sizeof(attention_shared<HD>) + WARPS * group * HD * 4,
             page = 2 * 64 * HD * 2;
    lay->slot_size = (larger(slot_of<F>::size, page + 512) + 127) / 128 * 128;
    uint32_t most = larger(larger(a->embd, width), a->ffn),
             staged = form_of<F>::group && most > STAGED ? larger(a->embd, STAGED) : most,
             act = a->rows * 2 * (staged + 8);
    lay->coded_at = (act + 127) / 128 * 128;
    lay->scratch = larger(attention, form_of<F>::group ? lay->coded_at + most / 32 * CODED_SIZE : act);
    lay->scratch = (lay->scratch + 127) / 128 * 128;
    lay->sums = form_of<F>::group ? 0 : 2 * WARPS * 2 * a->rows * 17 * 4;
    uint32_t fixed = lay->scratch + lay->sums + SHARED_FIXED;
    lay->slots = fixed < SHARED_MOST ? (SHARED_MOST - fixed) / lay->slot_size : 0;
    lay->slots = lay->slots > SLOTS_MAX ? SLOTS_MAX : lay->slots;
    lay->ahead = lay->slots < AHEAD ? lay->slots : AHEAD;
    return lay->slots >= 3;
}

uint64_t cuda_step_letters(const struct cuda_step *a)
{
    letters p = letters_of(*a);
    uint64_t parts = (uint64_t)a->split_grid * a->rope.head_count * (a->rope.head_dim + 2);
    return (uint64_t)((uint8_t *)(p.parts + parts) - (uint8_t *)a->letters);
}

template <cuda_form F, bool BF16, int HD>
static bool launch_step(cudaStream_t s, const cuda_step *a, uint32_t sm_count, bool only_asks)
{
    void (*kernel)(cuda_step, layout, CUtensorMap) = step_kernel<F, BF16, HD>;
    layout lay = {};
    CUtensorMap map;
    cudaFuncAttributes code;
    if (cudaFuncGetAttributes(&code, kernel) || code.ptxVersion < 90)
        return false; /* not the code of sm_90 */
    if (form_of<F>::group && (a->embd % 256 || a->ffn % 256 || a->rope.head_count * HD % 256))
        return false; /* code_row does not take them, nor the copy engine their scales */
    if ((form_of<F>::group && a->rows > 1) || !lay_out<F, HD>(a, &lay))
        return false;
    uint32_t shared = lay.slots * lay.slot_size + lay.scratch + lay.sums;
    int blocks = 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared) ||
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, THREADS, shared) || blocks < 1)
        return false; /* not here: layer by layer, then */
    if (only_asks)
        return true;
    if (cuda_step_letters(a) > a->letters_size || !cuda_page_map(&map, a->rope.kv, HD, 64, false))
        return false;
    cuda_launched(cudaMemsetAsync(a->letters, 0, cuda_step_letters(a), s));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(sm_count), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = shared;
    config.stream = s, config.attrs = &attribute, config.numAttrs = 1;
    cuda_launched(cudaLaunchKernelEx(&config, kernel, *a, lay, map));
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
    case CUDA_W8D:
        return launch_step<CUDA_W8D, false, HD>(s, a, sm_count, only_asks);
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
