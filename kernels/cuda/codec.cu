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
    decode_kernel(const uint8_t *staged, const cuda_piece *pieces, const float *l1_scales,
                  uint32_t head_values, uint16_t *pages, uint8_t *bad)
{
    cuda_piece p = pieces[blockIdx.y];
    uint32_t i = (blockIdx.x * THREADS + threadIdx.x) * 8;
    if (i >= p.value_count)
        return;
    bool wrong = false;
    uint4 values;
    if (p.form == CUDA_PIECE_L1)
        values = open_l1(staged + p.body + i, l1_scales[staged[p.side + i / 64]], wrong);
    else if (p.form == CUDA_PIECE_PLANES)
        values = join_planes(staged + p.body + i, staged + p.side + i);
    else
        values = *(const uint4 *)(staged + p.body + 2 * (uint64_t)i);
    uint32_t head = i / p.row_values, within = i % p.row_values;
    *(uint4 *)(pages + p.out + (uint64_t)head * head_values + within) = values;
    if (wrong || any_not_finite(values))
        bad[blockIdx.y] = 1;
}

void cuda_pieces_decode(cudaStream_t s, const uint8_t *staged, const struct cuda_piece *pieces,
                        uint32_t count, uint32_t values_max, const float *l1_scales, uint32_t head_values,
                        uint16_t *pages, uint8_t *bad)
{
    uint32_t per_block = 8 * THREADS;
    launch(decode_kernel, dim3((values_max + per_block - 1) / per_block, count), dim3(THREADS), 0, s, staged,
           pieces, l1_scales, head_values, pages, bad);
}
