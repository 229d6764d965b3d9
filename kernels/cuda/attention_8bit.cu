/* attention_8bit: one query row a sequence over pages whose KV has 8 bits; as attention_decode.cu and attention_decode_hopper.cu, with half of
 * the bytes. Codes become f16 behind the load, two by an instruction or two, and go to the tensor cores as they are: what a row's codes stand
 * for (S, kv_8bit.cuh) is one factor a token, which its score is multiplied by for K, and its probability for V.
 *
 * ldmatrix brings 16-bit pairs, that is two codes. Of K a lane gets four neighbouring dimensions of a token: they are taken for dimensions
 * 2q, 2q + 1 and 2q + 8, 2q + 9 of 16, and so are those of Q. Of V, transposed, it gets two dimensions of two tokens: dimension 2g is taken for row g
 * of the result, 2g + 1 for row g + 8 (PAIRS).
 *
 * bytes: 2 * head_dim + 4 a token, KV head and layer, each once (of the last page to the next 16 tokens).
 * Predicted on an H200, heads of 128: memory brings an SM 19 codes a clock, and so a warp's 16 tokens of K and V every 215 clocks; they cost about
 * 300 instructions of 860 that the SM can start meanwhile, and 16 of the tensor cores'. So memory-bound, with 12 warps an SM to hide a warp's
 * latency. Measured, 32 rows at 8K: 3,900 GB/s (by difference to f16 pages). */
#include "kv_8bit.cuh"
#include "kv_8bit.h"
#include "ring.cuh"

#define WARPS       4
#define BLOCKS      3                 /* an SM, where a ring is fed */
#define THREADS     (32 * WARPS)      /* that work; */
#define FED_THREADS (32 * WARPS + 32) /* the feeder comes last */

template <int HD> __host__ __device__ constexpr uint32_t slot_count()
{
    return HD == 128 ? 3 : 6;
}

template <int HD> __host__ __device__ constexpr uint32_t slot_size()
{
    return (kept_head_size(HD) + 127) / 128 * 128;
}

/* --- 16 tokens -------------------------------------------------------------------------------- */

template <int HD, kv_dtype T>
__device__ __forceinline__ void use_codes(decode_state<HD> &st, const uint8_t *head,
                                          const uint32_t q[HD / 16][2], uint32_t token, int32_t token_count)
{
    constexpr uint32_t PIECES = HD / 16;
    const uint8_t *k = head, *v = head + 64 * HD;
    const half *scales = (const half *)(head + 128 * HD) + token + threadIdx.x % 32 / 4;
    uint32_t row = token + threadIdx.x % 16, half_of = threadIdx.x % 32 / 16;
    float s[4] = {};
#pragma unroll
    for (uint32_t i = 0; i < PIECES; i += 2) {
        uint32_t r[4];
        ldmatrix(r, k + kept_at(HD, row, min(i + half_of, PIECES - 1)));
        mma<false>(s, open_codes<T, 0, 1>(r[0]), open_codes<T, 0, 1>(r[1]), open_codes<T, 2, 3>(r[0]),
                   open_codes<T, 2, 3>(r[1]), q[i][0], q[i][1]);
        if (i + 1 < PIECES)
            mma<false>(s, open_codes<T, 0, 1>(r[2]), open_codes<T, 0, 1>(r[3]), open_codes<T, 2, 3>(r[2]),
                       open_codes<T, 2, 3>(r[3]), q[i + 1][0], q[i + 1][1]);
    }
    float k_low = __half2float(scales[0]) * kept<T>::one, k_high = __half2float(scales[8]) * kept<T>::one;
    s[0] *= k_low, s[1] *= k_low, s[2] *= k_high, s[3] *= k_high;
    soften<HD>(st, s, token, token_count);
    /* tokens that the row does not see may be anybody's */
    int32_t own = (int32_t)(token + threadIdx.x % 32 / 4);
    float v_low = own < token_count ? __half2float(scales[64]) : 0.0f,
          v_high = own + 8 < token_count ? __half2float(scales[72]) : 0.0f;
    uint32_t b0 = transpose8x8(to_pair<false>(s[0] * v_low, s[1] * v_low)),
             b1 = transpose8x8(to_pair<false>(s[2] * v_high, s[3] * v_high));
#pragma unroll
    for (uint32_t i = 0; i < PIECES; i += 2) {
        uint32_t r[4];
        ldmatrix_trans(r, v + kept_at(HD, row, min(i + half_of, PIECES - 1)));
        mma<false>(st.o[i], open_codes<T, 0, 2>(r[0]), open_codes<T, 1, 3>(r[0]), open_codes<T, 0, 2>(r[1]),
                   open_codes<T, 1, 3>(r[1]), b0, b1);
        if (i + 1 < PIECES)
            mma<false>(st.o[i + 1], open_codes<T, 0, 2>(r[2]), open_codes<T, 1, 3>(r[2]),
                       open_codes<T, 0, 2>(r[3]), open_codes<T, 1, 3>(r[3]), b0, b1);
    }
}

/* B registers of the query heads, by the order of dimensions above. */
template <int HD>
__device__ __forceinline__ void load_queries(uint32_t q[HD / 16][2], const decode_args &d, uint32_t row,
                                             uint32_t first_head, uint32_t heads)
{
    uint32_t g = threadIdx.x % 32 / 4;
    const uint2 *head =
        (const uint2 *)((const half *)d.a.q + ((uint64_t)row * d.a.head_count + first_head + g) * HD) +
        threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < HD / 16; i++) {
        uint2 two = g < heads ? head[4 * i] : make_uint2(0, 0);
        q[i][0] = two.x, q[i][1] = two.y;
    }
}

/* Values for a code of 1 so far. */
template <int HD, kv_dtype T>
__device__ __forceinline__ void finish_codes(decode_ends<WARPS> &ends, decode_state<HD> &st,
                                             const decode_args &d, const cuda_split &s, uint32_t split,
                                             uint32_t part, uint32_t first_head, uint32_t heads)
{
#pragma unroll
    for (int i = 0; i < HD / 16; i++)
        for (int j = 0; j < 4; j++)
            st.o[i][j] *= kept<T>::one;
    finish_split<HD, WARPS, true>(ends, st, d, s, split, part, first_head, heads);
}

__device__ __forceinline__ const uint8_t *head_at(const decode_args &d, const cuda_split &s, uint32_t page,
                                                  uint32_t kv_head)
{
    return (const uint8_t *)d.a.kv + d.a.tables[s.table + s.page_begin + page] * d.a.page_values +
           kv_head * kept_head_size(d.a.head_dim);
}

/* --- any device ------------------------------------------------------------------------------- */

/* grid (splits, KV heads x groups of up to 8 query heads); two pages in flight. */
template <int HD> struct codes_shared {
    uint8_t pages[2][kept_head_size(HD)]; /* at the end: the warps' results */
    decode_ends<WARPS> ends;
};

template <int HD>
__device__ __forceinline__ void start_page(codes_shared<HD> &sh, const decode_args &d, const cuda_split &s,
                                           uint32_t i, uint32_t kv_head)
{
    if (i < s.page_count) {
        const uint8_t *from = head_at(d, s, i, kv_head);
        for (uint32_t at = 16 * threadIdx.x; at < kept_head_size(HD); at += 16 * THREADS)
            copy16_async(sh.pages[i % 2] + at, from + at);
    }
    copies_commit();
}

template <int HD, kv_dtype T> __global__ void __launch_bounds__(THREADS) codes_kernel(decode_args d)
{
    extern __shared__ __align__(128) uint8_t memory[];
    codes_shared<HD> &sh = *reinterpret_cast<codes_shared<HD> *>(memory);
    cuda_split s = d.splits[blockIdx.x];
    uint32_t group = d.a.head_count / d.a.kv_head_count, parts = (group + HEADS - 1) / HEADS,
             kv_head = blockIdx.y / parts, part = blockIdx.y % parts,
             first_head = kv_head * group + part * HEADS, heads = min(group - part * HEADS, (uint32_t)HEADS);
    if (s.page_count == 0) /* behind the last split */
        return;
    start_page(sh, d, s, 0, kv_head);
    uint32_t q[HD / 16][2];
    load_queries<HD>(q, d, s.row, first_head, heads);
    decode_state<HD> st = {};
    st.max[0] = st.max[1] = -1e30f;
    for (uint32_t i = 0; i < s.page_count; i++) {
        start_page(sh, d, s, i + 1, kv_head);
        copies_wait<1>();
        __syncthreads();
        int32_t left = (int32_t)s.token_count - (int32_t)i * 64;
        uint32_t first = threadIdx.x / 32 * 16;
        if ((int32_t)first < left)
            use_codes<HD, T>(st, sh.pages[i % 2], q, first, left);
        __syncthreads();
    }
    if (threadIdx.x == 0)
        sh.ends.o = reinterpret_cast<float *>(sh.pages);
    __syncthreads();
    finish_codes<HD, T>(sh.ends, st, d, s, blockIdx.x, blockIdx.y, first_head, heads);
}

/* --- through the copy engine (sm_90) ---------------------------------------------------------- */

template <int HD> struct fed_shared {
    uint8_t pages[slot_count<HD>()][slot_size<HD>()];
    decode_ends<WARPS> ends;
    bells b;
    float o[]; /* [warps][group][HD] */
};

/* A head of one page, of which the row sees `left` tokens. */
template <int HD> __device__ __forceinline__ void copy_head(const ring &r, const uint8_t *from, uint32_t left)
{
    uint64_t *bell = &r.b->full[r.at];
    uint32_t codes = min((left + 15) / 16 * 16, 64u) * HD;
    bell_expect(bell, 2 * codes + 256);
    if (codes == 64 * HD)
        return copy_bulk(r.slot(), from, kept_head_size(HD), bell);
    copy_bulk(r.slot(), from, codes, bell);
    copy_bulk(r.slot() + 64 * HD, from + 64 * HD, codes, bell);
    copy_bulk(r.slot() + 128 * HD, from + 128 * HD, 256, bell);
}

/* early: as in feed_split. */
template <int HD>
__device__ __forceinline__ void feed_codes(ring &r, const decode_args &d, const cuda_split &s,
                                           uint32_t kv_head, bool &early)
{
#pragma unroll 1
    for (uint32_t i = 0; i < s.page_count; i++) {
        if (early && (i + 1) * 64 >= s.token_count) {
            early_wait();
            early = false;
        }
        r.make_room();
        if (threadIdx.x % 32 == 0)
            copy_head<HD>(r, head_at(d, s, i, kv_head), s.token_count - i * 64);
        __syncwarp();
        r.step();
    }
}

template <int HD, kv_dtype T>
__global__ void __launch_bounds__(FED_THREADS, BLOCKS)
    fed_kernel(const __grid_constant__ decode_args d, uint32_t items)
{
    extern __shared__ __align__(128) uint8_t memory[];
    fed_shared<HD> &sh = *reinterpret_cast<fed_shared<HD> *>(memory);
    uint32_t kv_heads = d.a.kv_head_count, group = d.a.head_count / kv_heads;
    if (threadIdx.x == 0) {
        bells_init(sh.b, slot_count<HD>(), THREADS);
        sh.ends.o = sh.o;
    }
    __syncthreads();
    early_start();
    ring r = {memory, &sh.b, slot_size<HD>(), slot_count<HD>(), 0, 0, slot_count<HD>(), 0};
    if (threadIdx.x >= THREADS) {
        bool early = d.a.old_pages;
        if (!early)
            early_wait();
        for (uint32_t i = blockIdx.x; i < items; i += gridDim.x)
            feed_codes<HD>(r, d, d.splits[i / kv_heads], i % kv_heads, early);
        return;
    }
    early_wait();
    uint32_t first = threadIdx.x / 32 * 16;
    for (uint32_t i = blockIdx.x; i < items; i += gridDim.x) {
        cuda_split s = d.splits[i / kv_heads];
        uint32_t kv_head = i % kv_heads, q[HD / 16][2];
        if (s.page_count == 0) /* behind the last split */
            return;
        load_queries<HD>(q, d, s.row, kv_head * group, group);
        decode_state<HD> st = {};
        st.max[0] = st.max[1] = -1e30f;
#pragma unroll 1
        for (uint32_t page = 0; page < s.page_count; page++) {
            int32_t left = (int32_t)s.token_count - (int32_t)page * 64;
            r.await();
            if ((int32_t)first < left)
                use_codes<HD, T>(st, r.slot(), q, first, left);
            bell_arrive(
                &sh.b.empty
                     [r.at]); /* each lane for itself: racecheck does not see that one may for its warp */
            r.step();
        }
        finish_codes<HD, T>(sh.ends, st, d, s, i / kv_heads, kv_head, kv_head * group, group);
    }
}

/* --- launching -------------------------------------------------------------------------------- */

template <int HD> static size_t fed_size(uint32_t group)
{
    return sizeof(fed_shared<HD>) + sizeof(float) * WARPS * group * HD;
}

template <int HD> static uint32_t fed_blocks() /* 0: not on this device */
{
    static known_devices known;
    bool fits = known_of_device(known, [] {
        return has_hopper_code(fed_kernel<HD, KV_DTYPE_FP8>, fed_size<HD>(HEADS)) &&
               has_hopper_code(fed_kernel<HD, KV_DTYPE_INT8>, fed_size<HD>(HEADS));
    });
    return fits ? BLOCKS * device_sm_count() : 0;
}

uint32_t cuda_attention_8bit_blocks(uint32_t head_dim, uint32_t heads_per_kv_head)
{
    return heads_per_kv_head > HEADS ? 0
           : head_dim == 128         ? fed_blocks<128>()
           : head_dim == 64          ? fed_blocks<64>()
                                     : 0;
}

template <int HD>
static void launch_fed(cudaStream_t s, const decode_args &d, uint32_t items, uint32_t blocks)
{
    launch_early(d.a.dtype == KV_DTYPE_FP8 ? fed_kernel<HD, KV_DTYPE_FP8> : fed_kernel<HD, KV_DTYPE_INT8>,
                 dim3(items < blocks ? items : blocks), dim3(FED_THREADS),
                 fed_size<HD>(d.a.head_count / d.a.kv_head_count), s, 1, d, items);
}

template <int HD> static void launch_codes(cudaStream_t s, const decode_args &d, uint32_t grid_splits)
{
    void (*kernel)(decode_args) =
        d.a.dtype == KV_DTYPE_FP8 ? codes_kernel<HD, KV_DTYPE_FP8> : codes_kernel<HD, KV_DTYPE_INT8>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(codes_shared<HD>));
    launch(kernel, dim3(grid_splits, d.parts), dim3(THREADS), sizeof(codes_shared<HD>), s, d);
}

void cuda_attention_8bit(cudaStream_t s, const struct cuda_attention *a, const struct cuda_split *splits,
                         uint32_t grid_splits, void *partial, uint32_t *counters)
{
    uint32_t blocks = cuda_attention_8bit_blocks(a->head_dim, a->head_count / a->kv_head_count),
             items = grid_splits * a->kv_head_count;
    decode_args d = {*a, splits, (float *)partial, counters, head_parts(*a)};
    if (blocks > 0)
        return a->head_dim == 128 ? launch_fed<128>(s, d, items, blocks)
                                  : launch_fed<64>(s, d, items, blocks);
    switch (a->head_dim) {
    case 32:
        return launch_codes<32>(s, d, grid_splits);
    case 64:
        return launch_codes<64>(s, d, grid_splits);
    case 80:
        return launch_codes<80>(s, d, grid_splits);
    case 96:
        return launch_codes<96>(s, d, grid_splits);
    case 128:
        return launch_codes<128>(s, d, grid_splits);
    case 256:
        return launch_codes<256>(s, d, grid_splits);
    }
}
