/* codec: KV pieces from the bytes that were received into pages, wherever these lie.
 *
 * grid: (values / 8 / 256, pieces): a thread for 8 values, which share a row of the page and, at L1, a scale.
 * bytes: 1 (L1) or 2 a value read, 2 written, both in lines of 16 a thread: memory-bound and far above what a link or a disk brings.
 * Bits: one product and one rounding a value at L1, as on every other machine (shared/KV_FORMAT.md). */
#include "device.cuh"
#include "kv_kernels.h"

#define THREADS 256

__device__ __forceinline__ uint4 open_l1(const uint8_t *codes, float scale, bool &bad)
{
    uint2 packed = *(const uint2 *)codes;
    uint32_t words[2] = {packed.x, packed.y}, out[4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        int low = (int8_t)(words[i / 4] >> 8 * (i % 4)), high = (int8_t)(words[i / 4] >> 8 * (i % 4 + 1));
        bad = bad || low == -128 || high == -128;
        uint16_t a = __half_as_ushort(__float2half_rn(__fmul_rn((float)low, scale))),
                 b = __half_as_ushort(__float2half_rn(__fmul_rn((float)high, scale)));
        out[i / 2] = scale == 0.0f ? 0u : (uint32_t)a | (uint32_t)b << 16; /* never -0 */
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

__device__ __forceinline__ uint4 join_planes(const uint8_t *low, const uint8_t *high)
{
    uint2 l = *(const uint2 *)low, h = *(const uint2 *)high;
    return make_uint4(__byte_perm(l.x, h.x, 0x5140), __byte_perm(l.x, h.x, 0x7362),
                      __byte_perm(l.y, h.y, 0x5140), __byte_perm(l.y, h.y, 0x7362));
}

/* Is one of the eight infinite or no number: all bits of its exponent set? */
__device__ __forceinline__ bool any_not_finite(uint4 v)
{
    uint32_t words[4] = {v.x, v.y, v.z, v.w};
    bool found = false;
#pragma unroll
    for (int i = 0; i < 4; i++)
        found = found || (words[i] & 0x7c00u) == 0x7c00u || (words[i] & 0x7c000000u) == 0x7c000000u;
    return found;
}

__global__ void __launch_bounds__(THREADS)
    decode_kernel(const uint8_t *staged, const cuda_piece *pieces, const cuda_piece_tables *tables,
                  uint32_t head_values, uint16_t *pages, uint8_t *bad)
{
    cuda_piece p = pieces[blockIdx.y];
    uint32_t i = (blockIdx.x * THREADS + threadIdx.x) * 8;
    if (i >= p.value_count || p.form == CUDA_PIECE_L2)
        return;
    bool wrong = false;
    uint4 values;
    if (p.form == CUDA_PIECE_L1)
        values = open_l1(staged + p.body + i, tables->l1_scale[staged[p.side + i / p.group]], wrong);
    else if (p.form == CUDA_PIECE_PLANES)
        values = join_planes(staged + p.body + i, staged + p.side + i);
    else
        values = *(const uint4 *)(staged + p.body + 2 * (uint64_t)i);
    uint32_t head = i / p.row_values, within = i % p.row_values;
    *(uint4 *)(pages + p.out + (uint64_t)head * (head_values ? head_values : p.row_values) + within) = values;
    if (wrong || any_not_finite(values))
        bad[blockIdx.y] = 1;
}

/* --- L2 --------------------------------------------------------------------------------------- */

#define L2_THREADS 128
#define DIM_MAX    512

struct l2_parts { /* of a payload: where its fields begin, and sizes of a row's */
    const uint8_t *scales, *low, *fifth, *wide;
    uint32_t groups, low_size, fifth_size;
};

__device__ __forceinline__ l2_parts parts_of(const cuda_piece &p, const uint8_t *payload)
{
    uint32_t rows = p.heads * (1 + p.tokens), d = p.head_dim;
    l2_parts o;
    o.groups = (d + 63) / 64;
    o.low_size = d / 2;
    o.fifth_size = p.bits == 5 ? d / 8 : 0;
    o.scales = payload + p.heads * ((p.tokens + 7) / 8);
    o.low = o.scales + rows * o.groups;
    o.fifth = o.low + rows * o.low_size;
    o.wide = o.fifth + rows * o.fifth_size;
    return o;
}

__device__ __forceinline__ uint32_t nibble(const uint8_t *codes, uint32_t within, uint32_t half)
{
    return within < half ? codes[within] & 15 : codes[within - half] >> 4;
}

/* Value i of row r (0: the mean) of a head, before it is turned back. */
__device__ __forceinline__ float l2_value(const cuda_piece &p, const l2_parts &o, const float *step,
                                          uint32_t head, uint32_t r, uint32_t i)
{
    uint32_t row = head * (1 + p.tokens) + r, g = i / 64, within = i % 64,
             half = min(64u, p.head_dim - 64 * g) / 2;
    uint32_t bits = p.bits, scale = o.scales[row * o.groups + g],
             q = nibble(o.low + row * o.low_size + 32 * g, within, half);
    if (bits == 5)
        q += (uint32_t)(o.fifth[row * o.fifth_size + 8 * g + within / 8] >> within % 8 & 1) << 4;
    if (p.wide && r == 1) {
        q = 16 * q + nibble(o.wide + head * o.low_size + 32 * g, within, half);
        bits += 4;
    }
    return scale ? __fmul_rn((float)q - ((float)(1u << (bits - 1)) - 0.5f), step[scale]) : 0.0f;
}

/* grid (head and token, pieces): a block for each row of head_dim values. Few bytes and few sums a value: bound by latency, and as
 * many blocks as there are rows hide it. */
__global__ void __launch_bounds__(L2_THREADS)
    l2_kernel(const uint8_t *staged, const cuda_piece *pieces, const cuda_piece_tables *tables,
              uint32_t head_values, uint16_t *pages)
{
    __shared__ float y[DIM_MAX];
    cuda_piece p = pieces[blockIdx.y];
    if (p.form != CUDA_PIECE_L2 || blockIdx.x >= p.heads * p.tokens)
        return;
    const uint8_t *payload = staged + p.body;
    uint32_t head = blockIdx.x / p.tokens, t = blockIdx.x % p.tokens, d = p.head_dim;
    bool flag = payload[head * ((p.tokens + 7) / 8) + t / 8] >> t % 8 & 1;
    l2_parts o = parts_of(p, payload);
    for (uint32_t i = threadIdx.x; i < d; i += L2_THREADS) {
        float v = l2_value(p, o, tables->l2_step, head, 1 + t, i);
        y[i] = flag ? __fadd_rn(v, l2_value(p, o, tables->l2_step, head, 0, i)) : v;
    }
    for (uint32_t begin = 0; begin < d;) { /* blocks of powers of two, the largest first */
        uint32_t k = 31 - __clz(d - begin), size = 1u << k;
        for (uint32_t step = 1; step < size; step *= 2) {
            __syncthreads();
            for (uint32_t pair = threadIdx.x; pair < size / 2; pair += L2_THREADS) {
                uint32_t i = begin + (pair / step * 2 * step) + pair % step;
                float a = y[i], b = y[i + step];
                y[i] = __fadd_rn(a, b), y[i + step] = __fsub_rn(a, b);
            }
        }
        __syncthreads();
        for (uint32_t i = begin + threadIdx.x; i < begin + size; i += L2_THREADS)
            y[i] = __fmul_rn(y[i], __uint_as_float((127 - k / 2) << 23));
        begin += size;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < d; i += L2_THREADS) {
        float v = tables->l2_sign[i / 8] >> i % 8 & 1 ? -y[i] : y[i];
        pages[p.out + (uint64_t)head * (head_values ? head_values : p.row_values) + t * d + i] =
            to_bits<false>(v);
    }
}

void cuda_pieces_decode(cudaStream_t s, const uint8_t *staged, const struct cuda_piece *pieces,
                        uint32_t count, uint32_t values_max, uint32_t rows_max,
                        const struct cuda_piece_tables *tables, uint32_t head_values, uint16_t *pages,
                        uint8_t *bad)
{
    uint32_t per_block = 8 * THREADS;
    launch(decode_kernel, dim3((values_max + per_block - 1) / per_block, count), dim3(THREADS), 0, s, staged,
           pieces, tables, head_values, pages, bad);
    if (rows_max)
        launch(l2_kernel, dim3(rows_max, count), dim3(L2_THREADS), 0, s, staged, pieces, tables, head_values,
               pages);
}
