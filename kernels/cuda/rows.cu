/* rows: what works on one row at a time: angles, norms, RoPE with the KV write, SwiGLU, gathering.
 *
 * All are memory-bound and small beside the products: for R rows of the Llama-3-8B shape a layer moves
 *   norm      20 KB read, 8 KB written a row     rope_write  12 KB and 12 KB     swiglu  56 KB and 28 KB
 * so 4096 rows take 0.15 ms a layer at 4 TB/s, beside 1.3 ms of products. With one row they cost their launch. */
#include "early.cuh"
#include "kv_8bit.h"
#include "rope.cuh"

/* --- angles ----------------------------------------------------------------------------------- */

__global__ void angles_kernel(const uint32_t *positions, const double *frequencies, uint32_t pairs,
                              float *cos_sin)
{
    for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) {
        double sine, cosine;
        sincos((double)positions[blockIdx.x] * frequencies[i], &sine, &cosine);
        cos_sin[(uint64_t)blockIdx.x * 2 * pairs + i] = (float)cosine;
        cos_sin[(uint64_t)blockIdx.x * 2 * pairs + pairs + i] = (float)sine;
    }
}

void cuda_angles(cudaStream_t s, const uint32_t *positions, const double *frequencies, uint32_t rows,
                 uint32_t pairs, float *cos_sin)
{
    launch(angles_kernel, dim3(rows), dim3(64), 0, s, positions, frequencies, pairs, cos_sin);
}

/* --- norm ------------------------------------------------------------------------------------- */

#define NORM_THREADS 512

/* VECTORS: float4 a thread keeps. Weights are asked for before x is there. */
template <bool BF16, int VECTORS>
__global__ void __launch_bounds__(NORM_THREADS)
    norm_kernel(const float *x, const uint32_t *index, const float *weight, float eps, uint32_t columns,
                uint16_t *act)
{
    __shared__ float sums[33];
    const float4 *row = (const float4 *)(x + (uint64_t)(index ? index[blockIdx.x] : blockIdx.x) * columns);
    float4 kept[VECTORS], w[VECTORS];
    float sum = 0.0f;
    early_start();
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        uint32_t at = threadIdx.x + i * NORM_THREADS;
        if (at < columns / 4)
            w[i] = __ldg((const float4 *)weight + at);
    }
    early_wait();
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        uint32_t at = threadIdx.x + i * NORM_THREADS;
        if (at < columns / 4) {
            kept[i] = row[at];
            sum +=
                kept[i].x * kept[i].x + kept[i].y * kept[i].y + kept[i].z * kept[i].z + kept[i].w * kept[i].w;
        }
    }
    float scale = rsqrtf(block_sum(sum, sums) / (float)columns + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        uint32_t at = threadIdx.x + i * NORM_THREADS;
        if (at < columns / 4) {
            uint2 out = {to_pair<BF16>(kept[i].x * scale * w[i].x, kept[i].y * scale * w[i].y),
                         to_pair<BF16>(kept[i].z * scale * w[i].z, kept[i].w * scale * w[i].w)};
            ((uint2 *)(act + (uint64_t)blockIdx.x * columns))[at] = out;
        }
    }
}

void cuda_norm(cudaStream_t s, const float *x, const uint32_t *index, const float *weight, float eps,
               uint32_t rows, uint32_t columns, bool bf16, void *act)
{
    bool narrow = columns <= 2 * 4 * NORM_THREADS; /* rows up to 16384 wide in registers, else */
    launch_early(bf16     ? narrow ? norm_kernel<true, 2> : norm_kernel<true, 8>
                     : narrow ? norm_kernel<false, 2>
                          : norm_kernel<false, 8>,
                 dim3(rows), dim3(NORM_THREADS), 0, s, 1, x, index, weight, eps, columns, (uint16_t *)act);
}

/* --- SwiGLU ----------------------------------------------------------------------------------- */

template <bool BF16, bool OUT_BF16>
__global__ void swiglu_kernel(const uint16_t *wide, uint32_t columns, uint16_t *act)
{
    uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    early_start();
    early_wait();
    if (at >= columns)
        return;
    const uint16_t *row = wide + (uint64_t)blockIdx.y * 2 * columns;
    uint4 g4 = *(const uint4 *)(row + at), u4 = *(const uint4 *)(row + columns + at);
    uint32_t g[4] = {g4.x, g4.y, g4.z, g4.w}, u[4] = {u4.x, u4.y, u4.z, u4.w}, out[4];
    for (int i = 0; i < 4; i++) {
        float y[2];
        for (int k = 0; k < 2; k++) {
            float gate = from_bits<BF16>((uint16_t)(g[i] >> 16 * k)),
                  up = from_bits<BF16>((uint16_t)(u[i] >> 16 * k));
            y[k] = gate / (1.0f + __expf(-gate)) * up;
        }
        out[i] = to_pair<OUT_BF16>(y[0], y[1]);
    }
    *(uint4 *)(act + (uint64_t)blockIdx.y * columns + at) = make_uint4(out[0], out[1], out[2], out[3]);
}

void cuda_swiglu(cudaStream_t s, const void *wide, uint32_t rows, uint32_t columns, bool bf16, bool out_bf16,
                 void *act)
{
    launch_early(bf16       ? out_bf16 ? swiglu_kernel<true, true> : swiglu_kernel<true, false>
                       : out_bf16 ? swiglu_kernel<false, true>
                            : swiglu_kernel<false, false>,
                 dim3((columns / 8 + 255) / 256, rows), dim3(256), 0, s, 1, (const uint16_t *)wide, columns,
                 (uint16_t *)act);
}

/* --- gather ----------------------------------------------------------------------------------- */

__global__ void gather_kernel(const uint4 *in, const uint32_t *index, uint32_t pieces, uint4 *out)
{
    for (uint32_t i = threadIdx.x; i < pieces; i += blockDim.x)
        out[(uint64_t)blockIdx.x * pieces + i] = in[(uint64_t)index[blockIdx.x] * pieces + i];
}

void cuda_gather(cudaStream_t s, const void *in, const uint32_t *index, uint32_t rows, uint32_t row_size,
                 void *out)
{
    launch(gather_kernel, dim3(rows), dim3(256), 0, s, (const uint4 *)in, index, row_size / 16, (uint4 *)out);
}

/* --- RoPE and the KV write -------------------------------------------------------------------- */

#define ROPE_WARPS 4

/* Heads without bias and norm whose pairs are neighbours: four values a lane, without a stop, which is 2.5 us of a layer less with 128 rows. */
static bool is_plain(const cuda_rope &a)
{
    return a.interleaved && a.head_dim % 4 == 0 && a.rope_dim % 4 == 0 && !a.q_bias && !a.k_bias &&
           !a.v_bias && !a.q_norm && !a.k_norm;
}

template <bool BF16>
__device__ __forceinline__ void rope_plain(uint16_t *out, const uint16_t *in, bool rotates, float scale,
                                           const float *cos_sin, const cuda_rope &a, uint32_t lane)
{
    for (uint32_t i = 4 * lane; i < a.head_dim; i += 128) {
        uint2 raw = *(const uint2 *)(in + i);
        float x[4] = {from_bits<BF16>((uint16_t)raw.x), from_bits<BF16>((uint16_t)(raw.x >> 16)),
                      from_bits<BF16>((uint16_t)raw.y), from_bits<BF16>((uint16_t)(raw.y >> 16))};
        if (rotates && i < a.rope_dim) {
            float2 c = *(const float2 *)(cos_sin + i / 2),
                   s = *(const float2 *)(cos_sin + a.rope_dim / 2 + i / 2);
            turn(x[0], x[1], c.x, s.x), turn(x[2], x[3], c.y, s.y);
        }
        *(uint2 *)(out + i) = make_uint2(to_pair<false>(x[0] * scale, x[1] * scale),
                                         to_pair<false>(x[2] * scale, x[3] * scale));
    }
}

/* grid (heads of q, k and v / 4, R): a warp for each head of a row. */
template <bool BF16, bool PLAIN> __global__ void rope_kernel(cuda_rope a)
{
    __shared__ float heads[PLAIN ? 1 : ROPE_WARPS][256];
    uint32_t head = blockIdx.x * ROPE_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y,
             all = a.head_count + 2 * a.kv_head_count;
    early_start();
    if (head >= all)
        return early_wait();
    bool is_q = head < a.head_count, is_v = head >= a.head_count + a.kv_head_count;
    uint32_t own = is_q ? head : (head - a.head_count) % a.kv_head_count;
    uint16_t *out; /* from lists that no kernel writes */
    if (is_q) {
        out = (uint16_t *)a.q_out + ((uint64_t)row * a.head_count + head) * a.head_dim;
    } else {
        uint32_t position = a.positions[row], page = a.tables[a.row_table[row] + position / 64];
        out = (uint16_t *)a.kv + page * a.page_values +
              (((is_v ? a.kv_head_count : 0) + own) * 64 + position % 64) * (uint64_t)a.head_dim;
    }
    early_wait();
    const uint16_t *in = (const uint16_t *)a.wide + ((uint64_t)row * all + head) * a.head_dim;
    if (PLAIN)
        return rope_plain<BF16>(out, in, !is_v, is_q ? a.q_scale : 1.0f,
                                a.cos_sin + (uint64_t)row * a.rope_dim, a, lane);
    const float *bias = is_q   ? a.q_bias
                        : is_v ? a.v_bias
                               : a.k_bias,
                *norm = is_q   ? a.q_norm
                        : is_v ? nullptr
                               : a.k_norm;
    float *x = heads[PLAIN ? 0 : threadIdx.x / 32];
    rope_head<BF16>(x, in, bias ? bias + own * a.head_dim : nullptr, norm, !is_v,
                    a.cos_sin + (uint64_t)row * a.rope_dim, a, lane);
    for (uint32_t i = lane; i < a.head_dim; i += 32)
        out[i] = to_bits<false>(is_q ? x[i] * a.q_scale : x[i]);
}

void cuda_rope_write(cudaStream_t s, const struct cuda_rope *a)
{
    if (a->dtype != KV_DTYPE_F16)
        return cuda_rope_8bit(s, a);
    uint32_t heads = a->head_count + 2 * a->kv_head_count;
    bool plain = is_plain(*a);
    launch_early(a->bf16 ? plain ? rope_kernel<true, true> : rope_kernel<true, false>
                 : plain ? rope_kernel<false, true>
                         : rope_kernel<false, false>,
                 dim3((heads + ROPE_WARPS - 1) / ROPE_WARPS, a->rows), dim3(32 * ROPE_WARPS), 0, s, 1, *a);
}
