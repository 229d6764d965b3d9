/* kv_8bit: rows into pages of 8 bits, and whole pages opened to f16 and closed again.
 *
 * Prefill attention works on opened pages: those of a sequence are opened one layer at a time, and the kernels for f16 run as they are. For
 * the Llama-3-8B shape at 32K that is 67 MB read and 134 MB written a layer and chunk, 0.05 ms beside 4 ms of attention for 4,096 rows.
 *
 * One warp a row of head_dim values everywhere: memory-bound, 3 bytes a value. */
#include "early.cuh"
#include "kv_8bit.cuh"
#include "kv_8bit.h"
#include "rope.cuh"

#define WARPS   4
#define THREADS (32 * WARPS)

/* --- RoPE and the KV write -------------------------------------------------------------------- */

/* As rope_kernel: grid (heads of q, k and v / 4, R), a warp for each head of a row. */
template <bool BF16, kv_dtype T> __global__ void __launch_bounds__(THREADS) rope_8bit_kernel(cuda_rope a)
{
    __shared__ float heads[WARPS][256];
    uint32_t head = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y,
             all = a.head_count + 2 * a.kv_head_count;
    early_start();
    if (head >= all)
        return early_wait();
    bool is_q = head < a.head_count, is_v = head >= a.head_count + a.kv_head_count;
    uint32_t own = is_q ? head : (head - a.head_count) % a.kv_head_count, position = a.positions[row],
             page = is_q ? 0 : a.tables[a.row_table[row] + position / 64];
    const float *bias = is_q   ? a.q_bias
                        : is_v ? a.v_bias
                               : a.k_bias,
                *norm = is_q   ? a.q_norm
                        : is_v ? nullptr
                               : a.k_norm;
    float *x = heads[threadIdx.x / 32], v[ROW_PARTS][4];
    early_wait();
    rope_head<BF16>(x, (const uint16_t *)a.wide + ((uint64_t)row * all + head) * a.head_dim,
                    bias ? bias + own * a.head_dim : nullptr, norm, !is_v,
                    a.cos_sin + (uint64_t)row * a.rope_dim, a, lane);
    if (is_q) {
        uint16_t *out = (uint16_t *)a.q_out + ((uint64_t)row * a.head_count + head) * a.head_dim;
        for (uint32_t i = lane; i < a.head_dim; i += 32)
            out[i] = to_bits<false>(x[i] * a.q_scale);
        return;
    }
#pragma unroll
    for (int p = 0; p < ROW_PARTS; p++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t at = 128 * p + 4 * lane + i;
            v[p][i] = at < a.head_dim ? from_bits<false>(to_bits<false>(x[at])) : 0.0f;
        }
    keep_row<T>((uint8_t *)a.kv + page * a.page_values + own * kept_head_size(a.head_dim), a.head_dim, is_v,
                position % 64, v);
}

void cuda_rope_8bit(cudaStream_t s, const struct cuda_rope *a)
{
    bool fp8 = a->dtype == KV_DTYPE_FP8;
    launch_early(a->bf16 ? fp8 ? rope_8bit_kernel<true, KV_DTYPE_FP8> : rope_8bit_kernel<true, KV_DTYPE_INT8>
                 : fp8 ? rope_8bit_kernel<false, KV_DTYPE_FP8>
                         : rope_8bit_kernel<false, KV_DTYPE_INT8>,
                 dim3((a->head_count + 2 * a->kv_head_count + WARPS - 1) / WARPS, a->rows), dim3(THREADS), 0,
                 s, 1, *a);
}

/* --- pages ------------------------------------------------------------------------------------ */

struct row_place { /* of row `at` of a layer's [K|V][kv_head][64] */
    uint32_t token, head;
    bool is_v;
};

__device__ __forceinline__ row_place place_of(const cuda_kept &k, uint32_t at)
{
    return {at % 64, at / 64 % k.kv_head_count, at >= 64 * k.kv_head_count};
}

__device__ __forceinline__ uint8_t *head_of(const cuda_kept &k, uint32_t page, uint32_t head)
{
    return (uint8_t *)k.kept + k.stride * (k.list ? k.list[page] : page) + head * kept_head_size(k.head_dim);
}

/* grid (rows of a layer / 4, pages). */
template <kv_dtype T> __global__ void __launch_bounds__(THREADS) open_kernel(cuda_kept k, uint16_t *opened)
{
    uint32_t at = blockIdx.x * WARPS + threadIdx.x / 32, rows = gridDim.x * WARPS, lane = threadIdx.x % 32;
    early_start();
    early_wait();
    row_place r = place_of(k, at);
    const uint8_t *head = head_of(k, blockIdx.y, r.head), *codes = head + (r.is_v ? 64 * k.head_dim : 0);
    float one =
        __half2float(((const half *)(head + 128 * k.head_dim))[(r.is_v ? 64 : 0) + r.token]) * kept<T>::one;
    uint16_t *out = opened + ((uint64_t)blockIdx.y * rows + at) * k.head_dim;
    for (uint32_t i = 4 * lane; i < k.head_dim; i += 128) {
        uint32_t four = *(const uint32_t *)(codes + kept_at(k.head_dim, r.token, i / 16) + i % 16);
        float2 a = __half22float2(bits_half2(open_codes<T, 0, 1>(four))),
               b = __half22float2(bits_half2(open_codes<T, 2, 3>(four)));
        *(uint2 *)(out + i) =
            make_uint2(to_pair<false>(a.x * one, a.y * one), to_pair<false>(b.x * one, b.y * one));
    }
}

template <kv_dtype T>
__global__ void __launch_bounds__(THREADS) close_kernel(cuda_kept k, const uint16_t *opened)
{
    uint32_t at = blockIdx.x * WARPS + threadIdx.x / 32, rows = gridDim.x * WARPS;
    row_place r = place_of(k, at);
    float v[ROW_PARTS][4];
    load_row(v, opened + ((uint64_t)blockIdx.y * rows + at) * k.head_dim, k.head_dim);
    keep_row<T>(head_of(k, blockIdx.y, r.head), k.head_dim, r.is_v, r.token, v);
}

/* grid (rows of a piece / 4, pieces). */
template <kv_dtype T>
__global__ void __launch_bounds__(THREADS)
    close_pieces_kernel(cuda_kept k, const cuda_piece *pieces, const uint16_t *opened)
{
    cuda_piece p = pieces[blockIdx.y];
    uint32_t at = blockIdx.x * WARPS + threadIdx.x / 32, tokens = p.row_values / k.head_dim;
    if (at >= tokens * k.kv_head_count)
        return;
    float v[ROW_PARTS][4];
    load_row(v, opened + p.out + (uint64_t)at * k.head_dim, k.head_dim);
    keep_row<T>((uint8_t *)k.kept + p.kept_at + at / tokens * kept_head_size(k.head_dim), k.head_dim,
                p.is_value, p.first_token + at % tokens, v);
}

static dim3 grid_of(const cuda_kept *k, uint32_t count)
{
    return dim3(2 * 64 * k->kv_head_count / WARPS, count);
}

void cuda_open_pages(cudaStream_t s, const struct cuda_kept *k, uint32_t count, void *opened)
{
    launch_early(k->dtype == KV_DTYPE_FP8 ? open_kernel<KV_DTYPE_FP8> : open_kernel<KV_DTYPE_INT8>,
                 grid_of(k, count), dim3(THREADS), 0, s, 1, *k, (uint16_t *)opened);
}

void cuda_close_pages(cudaStream_t s, const struct cuda_kept *k, uint32_t count, const void *opened)
{
    launch(k->dtype == KV_DTYPE_FP8 ? close_kernel<KV_DTYPE_FP8> : close_kernel<KV_DTYPE_INT8>,
           grid_of(k, count), dim3(THREADS), 0, s, *k, (const uint16_t *)opened);
}

void cuda_close_pieces(cudaStream_t s, const struct cuda_kept *k, const struct cuda_piece *pieces,
                       uint32_t count, uint32_t rows_max, const void *opened)
{
    launch(k->dtype == KV_DTYPE_FP8 ? close_pieces_kernel<KV_DTYPE_FP8> : close_pieces_kernel<KV_DTYPE_INT8>,
           dim3((rows_max + WARPS - 1) / WARPS, count), dim3(THREADS), 0, s, *k, pieces,
           (const uint16_t *)opened);
}
