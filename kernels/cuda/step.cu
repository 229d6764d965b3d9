/* step: all layers of a decode step with up to 8 rows in one kernel, so that memory never waits for launches (sm_90).
 *
 * grid: a block an SM, all resident. A warp feeds, 8 work. The feeder walks over everything that the block will need, layer by layer,
 * and keeps a ring of slots in shared memory full through the copy engine: 16 rows of a weight matrix by 2 KB, or a page of KV of
 * one head. Neither depends on what is being computed, so it does not stop where the others meet: while they wait, 130 to 170 KB
 * an SM are on their way, which is 4 us of the memory's time. The workers meet at a barrier of the grid after each phase,
 * 5 a layer:
 *     norm, q k v  |  RoPE, KV write, attention  |  o, added to x  |  norm, gate up, SwiGLU  |  down, added to x
 * Tiles go round the blocks through all phases, so that a block with one tile fewer here has one more in the next.
 * Norms are computed by every block for itself from x (16 KB a row, from L2).
 *
 * bytes: the weights once and the rows' KV; flops: nothing. Predicted for the Llama-3-8B shape in bf16, one row, 1K context:
 * 14.1 GB at 4.4 TB/s = 3.2 ms, and 32 times 5 us in which attention outlasts the ring: 3.4 ms. */
#include "attention_decode.cuh"
#include "matvec.cuh"
#include "rope.cuh"

#define ROWS    CUDA_STEP_ROWS
#define WORKERS MATVEC_THREADS /* the feeder comes behind them */
#define THREADS (WORKERS + 32)

/* --- meeting ---------------------------------------------------------------------------------- */

struct meeting {
    uint32_t *arrived; /* how many blocks came, since the start */
    uint32_t number;
};

__device__ __forceinline__ void meet(meeting &m)
{
    meet_warps<WORKERS>(1);
    m.number++;
    if (threadIdx.x == 0) {
        uint32_t seen;
        __threadfence();
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(m.arrived) : "memory");
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(m.arrived) : "memory");
        } while (seen < m.number * gridDim.x);
    }
    meet_warps<WORKERS>(1);
}

/* --- the ring --------------------------------------------------------------------------------- */

#define SLOTS_MAX 8
#define PIECE     2048 /* bytes of a row of weights in a slot */

struct bells {
    uint64_t full[SLOTS_MAX], empty[SLOTS_MAX];
};

struct ring { /* one side's view */
    uint8_t *slots;
    bells *b;
    uint32_t slot_size, count, at, parity;
    __device__ __forceinline__ uint8_t *slot() const
    {
        return slots + at * slot_size;
    }
    __device__ __forceinline__ uint8_t *page() const
    {
        return slots + (at * slot_size + 1023) / 1024 * 1024;
    }
    __device__ __forceinline__ void step()
    {
        if (++at == count)
            at = 0, parity ^= 1;
    }
};

/* What of a matrix lies in a slot: 16 rows of `columns` columns, of which two neighbours never begin in the same half of the banks,
 * and behind them rows of 4-byte scales, 16 bytes further apart than they are long. A page lies at the first multiple of 1024. */
template <cuda_form F> struct slot_of {
    static constexpr int columns = PIECE / 16 * form_of<F>::values, rows_size = 16 * PIECE + 8 * 64,
                         scales = form_of<F>::group ? columns / (form_of<F>::group ? form_of<F>::group : 1) * 4 : 0,
                         scale_row = scales ? scales + 16 : 0, size = rows_size + 16 * scale_row;
    static __device__ __forceinline__ uint32_t row(uint32_t r)
    {
        return r * PIECE + (r + 1) / 2 * 64;
    }
};

/* Where a block begins in a phase, when all tiles of all phases are dealt round. */
struct dealer {
    uint32_t turn;
    __device__ __forceinline__ uint32_t first(uint32_t tiles)
    {
        uint32_t tile = (blockIdx.x + gridDim.x - turn) % gridDim.x;
        turn = (turn + tiles) % gridDim.x;
        return tile;
    }
};

/* --- feeding ---------------------------------------------------------------------------------- */

template <cuda_form F> __device__ void feed_product(ring &r, dealer &d, const cuda_matrix &m, uint32_t parts)
{
    using slot = slot_of<F>;
    constexpr uint32_t group = form_of<F>::group ? form_of<F>::group : 1, values = form_of<F>::values;
    uint32_t lane = threadIdx.x % 32, rows = m.rows / parts, tiles = (rows + 15) / 16, columns = m.columns;
    for (uint32_t tile = d.first(tiles); tile < tiles; tile += gridDim.x)
        for (uint32_t part = 0; part < parts; part++) {
            uint64_t n = min(tile * 16 + lane % 16, rows - 1) + (uint64_t)part * rows;
            const uint8_t *w = (const uint8_t *)m.values + n * ((uint64_t)columns * 16 / values);
            const uint8_t *scales = (const uint8_t *)m.scales + (slot::scales ? n * (columns / group) * 4 : 0);
            for (uint32_t first = 0; first < columns; first += slot::columns) {
                uint32_t here = min(columns - first, (uint32_t)slot::columns), bytes = here / values * 16,
                         scale_bytes = slot::scales ? here / group * 4 : 0;
                bell_wait(&r.b->empty[r.at], r.parity ^ 1);
                if (lane == 0)
                    bell_expect(&r.b->full[r.at], 16 * (bytes + scale_bytes));
                __syncwarp();
                if (lane < 16)
                    copy_bulk(r.slot() + slot::row(lane), w + (uint64_t)first / values * 16, bytes,
                              &r.b->full[r.at]);
                else if (slot::scales)
                    copy_bulk(r.slot() + slot::rows_size + (lane - 16) * slot::scale_row, scales + first / group * 4,
                              scale_bytes, &r.b->full[r.at]);
                r.step();
            }
        }
}

template <int HD> __device__ void feed_pages(ring &r, const cuda_step &a, const CUtensorMap *map, uint32_t layer)
{
    uint32_t lane = threadIdx.x % 32, kv_heads = a.rope.kv_head_count, count = a.split_grid * kv_heads,
             page_rows = (uint32_t)(a.rope.page_values / HD);
    for (uint32_t item = blockIdx.x; item < count; item += gridDim.x) {
        const cuda_split &s = a.splits[item / kv_heads];
        for (uint32_t i = 0; i < s.page_count; i++) {
            bell_wait(&r.b->empty[r.at], r.parity ^ 1);
            if (lane == 0) {
                uint32_t row = a.attention.tables[s.table + s.page_begin + i] * page_rows +
                               (layer * 2 * kv_heads + item % kv_heads) * 64;
                bell_expect(&r.b->full[r.at], 2 * 64 * HD * 2);
                for (int p = 0; p < HD / 64; p++) {
                    copy_box(r.page() + p * PLANE_SIZE, map, 64 * p, (int32_t)row, &r.b->full[r.at]);
                    copy_box(r.page() + (HD / 64 + p) * PLANE_SIZE, map, 64 * p, (int32_t)(row + kv_heads * 64),
                             &r.b->full[r.at]);
                }
            }
            __syncwarp();
            r.step();
        }
    }
}

template <cuda_form F, int HD> __device__ void feed(ring r, const cuda_step &a, const CUtensorMap *map)
{
    dealer d = {0};
    for (uint32_t i = 0; i < a.layer_count; i++) {
        const cuda_step_layer &l = a.layers[i];
        feed_product<F>(r, d, l.qkv, 1);
        feed_pages<HD>(r, a, map, i);
        feed_product<F>(r, d, l.o, 1);
        feed_product<F>(r, d, l.gate_up, 2);
        feed_product<F>(r, d, l.down, 1);
    }
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

/* act: of the lane's row, from the slot's first column on; NULL: no such row. */
template <cuda_form F, bool BF16>
__device__ __forceinline__ void use_slot(float acc[2][4], const uint8_t *slot, const uint16_t *act,
                                         uint32_t columns)
{
    constexpr int values = form_of<F>::values, group = form_of<F>::group ? form_of<F>::group : 1;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const uint8_t *w = slot + slot_of<F>::row(g) + warp * 256 + q * 16,
                  *scales = slot + slot_of<F>::rows_size + g * slot_of<F>::scale_row;
#pragma unroll
    for (int l = 0; l < 4; l++) {
        uint32_t column = (warp * 16 + l * 4 + q) * values, scale[2] = {0, 0};
        if ((warp * 16 + l * 4) * values >= columns)
            break;
        uint4 v[2] = {*(const uint4 *)(w + l * 64), *(const uint4 *)(w + l * 64 + slot_of<F>::row(8))};
        if (form_of<F>::group) {
            scale[0] = *(const uint32_t *)(scales + column / group * 4);
            scale[1] = *(const uint32_t *)(scales + 8 * slot_of<F>::scale_row + column / group * 4);
        }
#pragma unroll
        for (int p = 0; p < values / 8; p++) {
            uint4 b = act ? *(const uint4 *)(act + column + p * 8) : make_uint4(0, 0, 0, 0);
            uint32_t words[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t x[4];
                open4<F, BF16>(v[0], scale[0], p * 2 + i, x[0], x[2]);
                open4<F, BF16>(v[1], scale[1], p * 2 + i, x[1], x[3]);
                mma<BF16>(acc[i], x[0], x[1], x[2], x[3], words[2 * i], words[2 * i + 1]);
            }
        }
    }
}

/* sums: [2][warps][parts * rows][17], the first index from tile to tile, so that one meeting a tile is enough. */
template <cuda_form F, bool BF16, int PARTS>
__device__ __noinline__ void multiply(ring &from, dealer &d, const product_job &job, float *sums)
{
    ring r = from;
    constexpr uint32_t width = slot_of<F>::columns;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4,
             rows = job.m->rows / PARTS, tiles = (rows + 15) / 16, columns = job.m->columns,
             size = MATVEC_WARPS * 2 * job.rows * 17, half = 0;
    const uint16_t *act = g < job.rows ? job.act + (uint64_t)g * job.act_stride : nullptr;
    cuda_product p = {};
    p.epilogue = job.epilogue, p.out = job.out, p.out_stride = job.out_stride;
    for (uint32_t tile = d.first(tiles); tile < tiles; tile += gridDim.x, half ^= 1) {
        float *own = sums + half * size;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            float acc[2][4] = {};
            for (uint32_t first = 0; first < columns; first += width) {
                bell_wait(&r.b->full[r.at], r.parity);
                use_slot<F, BF16>(acc, r.slot(), act ? act + first : nullptr, min(columns - first, width));
                __syncwarp();
                if (lane == 0)
                    bell_arrive(&r.b->empty[r.at]);
                r.step();
            }
            for (int i = 0; i < 4; i++)
                if (2 * q + i % 2 < job.rows)
                    own[((warp * PARTS + part) * job.rows + 2 * q + i % 2) * 17 + g + 8 * (i / 2)] =
                        acc[0][i] + acc[1][i];
        }
        meet_warps<WORKERS>(1);
        uint32_t n = threadIdx.x % 16, row = threadIdx.x / 16;
        if (row < job.rows && tile * 16 + n < rows) {
            float total[2] = {0.0f, 0.0f};
            for (int w = 0; w < MATVEC_WARPS; w++)
                for (int part = 0; part < PARTS; part++)
                    total[part] += own[((w * PARTS + part) * job.rows + row) * 17 + n];
            write_out<BF16>(p, row, tile * 16 + n, total[0], total[1]);
        }
    }
    from = r;
}

/* Rows of 16-bit values from another block's hands to shared memory, columns + 8 apart. */
__device__ __forceinline__ void fetch_rows(uint16_t *act, const void *from, uint32_t rows, uint32_t columns)
{
    uint32_t count = columns / 8;
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t i = threadIdx.x; i < count; i += WORKERS)
            *(uint4 *)(act + r * (columns + 8) + 8 * i) = __ldcg((const uint4 *)from + r * count + i);
    meet_warps<WORKERS>(1);
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

#define VECTORS 4 /* float4 that a thread keeps */

__device__ __forceinline__ void load_vectors(float4 v[VECTORS], const float4 *from, uint32_t first, uint32_t count)
{
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        v[i] = first + i * WORKERS < count ? __ldcg(from + first + i * WORKERS) : make_float4(0, 0, 0, 0);
}

/* act[r] = norm(x[r]) in shared memory, rows columns + 8 apart. */
template <bool BF16>
__device__ __forceinline__ void norm_rows(const cuda_step &a, const float *weight, uint16_t *act, float *sums)
{
    uint32_t count = a.embd / 4;
    bool kept = count <= VECTORS * WORKERS;
    float4 w[VECTORS], v[VECTORS];
    load_vectors(w, (const float4 *)weight, threadIdx.x, count);
    for (uint32_t r = 0; r < a.rows; r++) {
        const float4 *x = (const float4 *)(a.x + (uint64_t)r * a.embd);
        float sum = 0.0f;
        for (uint32_t first = threadIdx.x; first < count; first += VECTORS * WORKERS) {
            load_vectors(v, x, first, count);
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0)
            sums[r * MATVEC_WARPS + threadIdx.x / 32] = sum;
    }
    meet_warps<WORKERS>(1);
    for (uint32_t r = 0; r < a.rows; r++) {
        const float4 *x = (const float4 *)(a.x + (uint64_t)r * a.embd);
        float sum = 0.0f;
        for (int i = 0; i < MATVEC_WARPS; i++)
            sum += sums[r * MATVEC_WARPS + i];
        float scale = rsqrtf(sum / (float)a.embd + a.rope.norm_eps);
        for (uint32_t first = threadIdx.x; first < count; first += VECTORS * WORKERS) {
            if (!kept)
                load_vectors(w, (const float4 *)weight, first, count);
            if (!kept || a.rows > 1) /* else they are still here */
                load_vectors(v, x, first, count);
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                if (first + i * WORKERS < count)
                    ((uint2 *)(act + (uint64_t)r * (a.embd + 8)))[first + i * WORKERS] =
                        make_uint2(to_pair<BF16>(v[i].x * scale * w[i].x, v[i].y * scale * w[i].y),
                                   to_pair<BF16>(v[i].z * scale * w[i].z, v[i].w * scale * w[i].w));
        }
    }
    meet_warps<WORKERS>(1);
}

/* --- attention -------------------------------------------------------------------------------- */

template <int HD> struct attention_shared {
    half q[HEADS][HD];
    half fresh[2][HD]; /* the row's own K and V, which the page in the ring may lack */
    float heads[MATVEC_WARPS][HD];
    decode_ends<MATVEC_WARPS> ends;
    float o[]; /* [warps][group][HD] */
};

struct swizzled {
    static __device__ __forceinline__ uint32_t at(uint32_t token, uint32_t piece)
    {
        return page_at(token, piece);
    }
};

struct item { /* a split of one row, for one KV head */
    cuda_split s;
    uint32_t split, kv_head;
    bool writes; /* it has the row's last page */
};

/* q of the group to shared memory; K and V of the row there and to its page, by the block that has the row's last split. */
template <int HD, bool BF16>
__device__ __forceinline__ void make_heads(attention_shared<HD> &sh, const cuda_step &a,
                                           const cuda_step_layer &l, const item &it, uint32_t group, half *kv)
{
    const cuda_rope &rope = a.rope;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = rope.head_count + 2 * rope.kv_head_count,
             kv_head = it.kv_head;
    const uint16_t *wide = (const uint16_t *)rope.wide + (uint64_t)it.s.row * all * HD;
    const float *cos_sin = rope.cos_sin + (uint64_t)it.s.row * rope.rope_dim;
    for (uint32_t job = warp; job < group + (it.writes ? 2 : 0); job += MATVEC_WARPS) {
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
        uint32_t position = rope.positions[it.s.row];
        half *out = is_q ? nullptr
                         : kv + rope.tables[it.s.table + position / 64] * rope.page_values +
                               (((is_v ? rope.kv_head_count : 0) + kv_head) * 64 + position % 64) * (uint64_t)HD;
        for (uint32_t i = lane; i < HD; i += 32) {
            half x = __ushort_as_half(
                to_bits<false>(is_q ? sh.heads[warp][i] * rope.q_scale : sh.heads[warp][i]));
            (is_q ? sh.q[job] : sh.fresh[is_v])[i] = x;
            if (!is_q)
                out[i] = x;
        }
        __syncwarp();
    }
}

/* The row's own token into the page, by the warp that is going to read it. */
template <int HD> __device__ __forceinline__ void patch_page(attention_shared<HD> &sh, uint8_t *page, uint32_t token)
{
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t i = lane; i < 2 * HD / 8; i += 32) {
        uint32_t is_v = i / (HD / 8), piece = i % (HD / 8);
        *(uint4 *)(page + is_v * 128 * HD + page_at(token, piece)) = *(const uint4 *)&sh.fresh[is_v][8 * piece];
    }
    fence_async(); /* before the copy engine writes here again */
    __syncwarp();
}

/* A page at a time for each half of the warps. */
template <int HD>
__device__ __forceinline__ void use_pages(decode_state<HD> &st, ring &r, attention_shared<HD> &sh, const item &it,
                                          const uint32_t q[HD / 16][2])
{
    uint32_t warp = threadIdx.x / 32, first = warp % 4 * 16;
    for (uint32_t i = 0; i < it.s.page_count; i++) {
        int32_t left = (int32_t)it.s.token_count - (int32_t)i * 64; /* tokens that the row sees */
        bell_wait(&r.b->full[r.at], r.parity);
        if (warp / 4 == i % 2 && (int32_t)first < left) {
            uint8_t *page = r.page();
            if (it.writes && i + 1 == it.s.page_count && (uint32_t)(left - 1) / 16 == warp % 4)
                patch_page<HD>(sh, page, (uint32_t)left - 1);
            use_page<HD, swizzled>(st, page, page + 128 * HD, q, first, left);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            bell_arrive(&r.b->empty[r.at]);
        r.step();
    }
}

template <int HD, bool BF16>
__device__ __noinline__ void attend(ring &r, attention_shared<HD> &sh, const cuda_step &a,
                                    const cuda_step_layer &l, half *kv)
{
    uint32_t lane = threadIdx.x % 32, g = lane / 4, kv_heads = a.rope.kv_head_count,
             group = a.rope.head_count / kv_heads;
    decode_args d = {a.attention, a.splits, a.partial, a.counters, kv_heads};
    d.a.kv = kv;
    for (uint32_t at = blockIdx.x; at < a.split_grid * kv_heads; at += gridDim.x) {
        item it = {a.splits[at / kv_heads], at / kv_heads, at % kv_heads, false};
        if (it.s.page_count == 0) /* behind the last split */
            return;
        it.writes = it.split + 1 == it.s.first_split + it.s.split_count;
        make_heads<HD, BF16>(sh, a, l, it, group, kv);
        if (threadIdx.x == 0)
            sh.ends.o = sh.o;
        meet_warps<WORKERS>(1);
        uint32_t q[HD / 16][2] = {};
        if (g < group)
            for (int i = 0; i < HD / 16; i++) {
                q[i][0] = *(const uint32_t *)&sh.q[g][16 * i + 2 * (lane % 4)];
                q[i][1] = *(const uint32_t *)&sh.q[g][16 * i + 8 + 2 * (lane % 4)];
            }
        decode_state<HD> st = {};
        st.max[0] = st.max[1] = -1e30f;
        use_pages<HD>(st, r, sh, it, q);
        finish_split<HD, MATVEC_WARPS>(sh.ends, st, d, it.s, it.split, it.kv_head, it.kv_head * group, group);
    }
}

/* --- the step --------------------------------------------------------------------------------- */

struct layout { /* of dynamic shared memory: the ring first */
    uint32_t slot_size, slots, scratch, sums;
    bool keeps_down; /* the input of `down` fits into scratch */
};

template <cuda_form F, bool BF16, int HD>
__device__ __forceinline__ void work(ring r, const cuda_step &a, const layout &lay, uint8_t *memory)
{
    uint8_t *scratch = memory + lay.slots * lay.slot_size;
    uint16_t *act = (uint16_t *)scratch;
    float *sums = (float *)(scratch + lay.scratch);
    meeting m = {a.barrier, 0};
    dealer d = {0};
    uint32_t embd = a.embd, width = a.rope.head_count * HD, qkv = width + 2 * a.rope.kv_head_count * HD;
    for (uint32_t i = 0; i < a.layer_count; i++) {
        const cuda_step_layer &l = a.layers[i];
        half *kv = (half *)a.rope.kv + (uint64_t)i * 2 * a.rope.kv_head_count * 64 * HD;
        prefetch_norms(a, i);
        norm_rows<BF16>(a, l.attn_norm, act, sums);
        multiply<F, BF16, 1>(r, d, {&l.qkv, act, embd + 8, CUDA_STORE16, (void *)a.rope.wide, qkv, a.rows}, sums);
        meet(m);
        attend<HD, BF16>(r, *(attention_shared<HD> *)scratch, a, l, kv);
        meet(m);
        fetch_rows(act, a.attention.out, a.rows, width);
        multiply<F, BF16, 1>(r, d, {&l.o, act, width + 8, CUDA_ADD_F32, a.x, embd, a.rows}, sums);
        meet(m);
        norm_rows<BF16>(a, l.ffn_norm, act, sums);
        multiply<F, BF16, 2>(r, d, {&l.gate_up, act, embd + 8, CUDA_SWIGLU16, (void *)a.rope.wide, a.ffn, a.rows},
                             sums);
        meet(m);
        if (lay.keeps_down)
            fetch_rows(act, a.rope.wide, a.rows, a.ffn);
        multiply<F, BF16, 1>(r, d,
                             {&l.down, lay.keeps_down ? act : (const uint16_t *)a.rope.wide,
                              a.ffn + (lay.keeps_down ? 8 : 0), CUDA_ADD_F32, a.x, embd, a.rows},
                             sums);
        meet(m);
    }
}

template <cuda_form F, bool BF16, int HD>
__global__ void __launch_bounds__(THREADS, 1)
    step_kernel(const __grid_constant__ cuda_step a, const __grid_constant__ layout lay,
                const __grid_constant__ CUtensorMap map)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ bells b;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < lay.slots; i++)
            bell_init(&b.full[i], 1), bell_init(&b.empty[i], MATVEC_WARPS);
        bells_made();
    }
    __syncthreads();
    ring r = {memory, &b, lay.slot_size, lay.slots, 0, 0};
    if (threadIdx.x >= WORKERS)
        feed<F, HD>(r, a, &map);
    else
        work<F, BF16, HD>(r, a, lay, memory);
}

/* --- launching -------------------------------------------------------------------------------- */

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
             attention = (uint32_t)sizeof(attention_shared<HD>) + MATVEC_WARPS * group * HD * 4,
             page = 2 * 64 * HD * 2, down = 2 * a->rows * (a->ffn + 8);
    lay->slot_size = (larger(slot_of<F>::size, page + 512) + 127) / 128 * 128;
    lay->scratch = larger(attention, larger(2 * a->rows * (a->embd + 8), 2 * a->rows * (width + 8)));
    lay->keeps_down = down <= larger(lay->scratch, 32 << 10);
    if (lay->keeps_down)
        lay->scratch = larger(lay->scratch, down);
    lay->scratch = (lay->scratch + 127) / 128 * 128;
    lay->sums = 2 * MATVEC_WARPS * 2 * a->rows * 17 * 4;
    uint32_t fixed = lay->scratch + lay->sums + SHARED_FIXED;
    lay->slots = fixed < SHARED_MOST ? (SHARED_MOST - fixed) / lay->slot_size : 0;
    lay->slots = lay->slots > SLOTS_MAX ? SLOTS_MAX : lay->slots;
    return lay->slots >= 2;
}

template <cuda_form F, bool BF16, int HD>
static bool launch_step(cudaStream_t s, const cuda_step *a, uint32_t sm_count, bool only_asks)
{
    void (*kernel)(cuda_step, layout, CUtensorMap) = step_kernel<F, BF16, HD>;
    layout lay = {};
    CUtensorMap map;
    cudaFuncAttributes code;
    if (cudaFuncGetAttributes(&code, kernel) || code.ptxVersion < 90) { /* not the code of sm_90 */
        cudaGetLastError();
        return false;
    }
    if (form_of<F>::group && (a->embd % 128 || a->ffn % 128 || a->rope.head_count * HD % 128))
        return false; /* rows of scales that the copy engine does not take */
    if (!lay_out<F, HD>(a, &lay))
        return false;
    uint32_t shared = lay.slots * lay.slot_size + lay.scratch + lay.sums;
    int blocks = 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared) ||
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, THREADS, shared) || blocks < 1) {
        cudaGetLastError(); /* not here: layer by layer, then */
        return false;
    }
    if (only_asks)
        return true;
    if (!cuda_page_map(&map, a->rope.kv, HD))
        return false;
    cudaMemsetAsync(a->barrier, 0, sizeof *a->barrier * CUDA_BARRIER_WORDS, s);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(sm_count), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = shared;
    config.stream = s, config.attrs = &attribute, config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, *a, lay, map);
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
