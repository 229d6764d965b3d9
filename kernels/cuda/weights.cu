/* weights: quantised tensors from GGUF blocks into planes, once when loaded; from any form back to f16 for products with many
 * rows; and rows of the embedding.
 *
 * cuda_repack      grid: a thread for each 32 values; run once a tensor, speed does not matter
 * cuda_dequantise  grid: a thread for each 8 values; reads 0.63 (W4) or 1.13 (W8) bytes and writes 2 a value: memory-bound
 * cuda_embed       grid (columns / 8 / 128, R): a few rows, microseconds */
#include "device.cuh"
#include "kernels.h"

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 }; /* of GGUF */

/* --- repacking -------------------------------------------------------------------------------- */

struct block32 { /* 32 values: d[i / 16] * code[i] + m */
    int code[32];
    float d[2], m;
};

__device__ float load_f16(const uint8_t *p)
{
    return __half2float(__ushort_as_half((uint16_t)(p[0] | p[1] << 8)));
}

__device__ void read_simple(uint32_t type, const uint8_t *b, block32 &o)
{
    bool has_m = type == Q4_1 || type == Q5_1, has_high = type == Q5_0 || type == Q5_1;
    const uint8_t *p = b + (has_m ? 4 : 2);
    o.d[0] = o.d[1] = load_f16(b);
    o.m = has_m ? load_f16(b + 2) : type == Q4_0 ? -8.0f * o.d[0] : type == Q5_0 ? -16.0f * o.d[0] : 0.0f;
    uint32_t high = 0;
    if (has_high) {
        high = p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24;
        p += 4;
    }
    for (int i = 0; i < 32; i++)
        o.code[i] =
            type == Q8_0 ? (int8_t)p[i] : (int)((i < 16 ? p[i] & 15 : p[i - 16] >> 4) | (high >> i & 1) << 4);
}

__device__ void read_k45(uint32_t type, const uint8_t *b, int inner, block32 &o)
{
    const uint8_t *s = b + 4, *high = b + 16, *p = b + (type == Q5_K ? 48 : 16) + 32 * (inner / 2);
    int scale, min;
    if (inner < 4) {
        scale = s[inner] & 63, min = s[inner + 4] & 63;
    } else {
        scale = (s[inner + 4] & 15) | s[inner - 4] >> 6 << 4;
        min = s[inner + 4] >> 4 | s[inner] >> 6 << 4;
    }
    o.d[0] = o.d[1] = load_f16(b) * (float)scale;
    o.m = -load_f16(b + 2) * (float)min;
    for (int i = 0; i < 32; i++)
        o.code[i] = (p[i] >> inner % 2 * 4 & 15) | (type == Q5_K ? (high[i] >> inner & 1) << 4 : 0);
}

__device__ void read_k6(const uint8_t *b, int inner, block32 &o)
{
    int half = inner / 4, quarter = inner % 4;
    const uint8_t *low = b + 64 * half + 32 * (quarter % 2), *high = b + 128 + 32 * half;
    for (int i = 0; i < 2; i++)
        o.d[i] = load_f16(b + 208) * (float)(int8_t)b[192 + 2 * inner + i];
    o.m = 0.0f;
    for (int i = 0; i < 32; i++)
        o.code[i] = ((low[i] >> quarter / 2 * 4 & 15) | (high[i] >> 2 * quarter & 3) << 4) - 32;
}

__global__ void repack_kernel(uint32_t type, const uint8_t *raw, uint64_t blocks, uint32_t block_size,
                              uint32_t inner_count, uint32_t *values, void *scales)
{
    uint64_t at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= blocks)
        return;
    const uint8_t *b = raw + at / inner_count * block_size;
    block32 o;
    if (type == Q6_K)
        read_k6(b, (int)(at % inner_count), o);
    else if (type == Q4_K || type == Q5_K)
        read_k45(type, b, (int)(at % inner_count), o);
    else
        read_simple(type, b, o);
    if (type == Q4_0 || type == Q4_1 || type == Q4_K) {
        for (int w = 0; w < 4; w++) {
            uint32_t word = 0;
            for (int p = 0; p < 4; p++)
                word |= (uint32_t)o.code[8 * w + 2 * p] << 4 * p | (uint32_t)o.code[8 * w + 2 * p + 1]
                                                                       << (16 + 4 * p);
            values[at * 4 + w] = word;
        }
    } else {
        for (int w = 0; w < 8; w++) {
            uint32_t word = 0;
            for (int i = 0; i < 4; i++)
                word |= (uint32_t)(o.code[4 * w + i] + 128) << 8 * i;
            values[at * 8 + w] = word;
        }
    }
    if (type == Q6_K)
        for (int i = 0; i < 2; i++)
            ((half2 *)scales)[at * 2 + i] = __floats2half2_rn(o.d[i], 0.0f);
    else if (type == Q8_0)
        ((half *)scales)[at] = __float2half_rn(o.d[0]);
    else
        ((half2 *)scales)[at] = __floats2half2_rn(o.d[0], o.m);
}

void cuda_repack(cudaStream_t s, uint32_t type, const void *raw, uint32_t rows, uint32_t columns,
                 void *values, void *scales)
{
    static const uint32_t sizes[] = {0, 0, 18, 20, 0, 0, 22, 24, 34, 0, 0, 0, 144, 176, 210};
    uint64_t blocks = (uint64_t)rows * columns / 32;
    launch(repack_kernel, dim3((unsigned)((blocks + 127) / 128)), dim3(128), 0, s, type, (const uint8_t *)raw,
           blocks, sizes[type], type >= Q4_K ? 8 : 1, (uint32_t *)values, scales);
}

/* --- back to values --------------------------------------------------------------------------- */

/* Eight values from column `column`, a multiple of 8. */
__device__ void load8(const cuda_matrix &m, uint64_t row, uint32_t column, float out[8])
{
    uint64_t at = row * m.columns + column;
    if (m.form == CUDA_F32) {
        for (int i = 0; i < 8; i++)
            out[i] = ((const float *)m.values)[at + i];
    } else if (m.form == CUDA_F16 || m.form == CUDA_BF16) {
        uint4 v = *(const uint4 *)((const uint16_t *)m.values + at);
        uint32_t words[4] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < 8; i++) {
            uint16_t bits = (uint16_t)(words[i / 2] >> 16 * (i % 2));
            out[i] = m.form == CUDA_F16 ? from_bits<false>(bits) : from_bits<true>(bits);
        }
    } else {
        float2 dm = m.form == CUDA_W8D
                        ? make_float2(__half2float(((const half *)m.scales)[at / 32]), 0.0f)
                        : __half22float2(((const half2 *)m.scales)[at / (m.form == CUDA_W8G16 ? 16 : 32)]);
        for (int i = 0; i < 8; i++) {
            int code;
            if (m.form == CUDA_W4)
                code = (int)(((const uint32_t *)m.values)[at / 8] >> (4 * (i / 2) + 16 * (i % 2)) & 15);
            else
                code = (int)((const uint8_t *)m.values)[at + i] - 128;
            out[i] = dm.x * (float)code + dm.y;
        }
    }
}

__global__ void dequantise_kernel(cuda_matrix m, uint32_t first, uint64_t pieces, uint4 *out)
{
    uint64_t at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= pieces)
        return;
    uint32_t per_row = m.columns / 8;
    float v[8];
    load8(m, first + at / per_row, (uint32_t)(at % per_row) * 8, v);
    out[at] = make_uint4(to_pair<false>(v[0], v[1]), to_pair<false>(v[2], v[3]), to_pair<false>(v[4], v[5]),
                         to_pair<false>(v[6], v[7]));
}

void cuda_dequantise(cudaStream_t s, const struct cuda_matrix *m, uint32_t first, uint32_t count, void *out)
{
    uint64_t pieces = (uint64_t)count * (m->columns / 8);
    launch(dequantise_kernel, dim3((unsigned)((pieces + 255) / 256)), dim3(256), 0, s, *m, first, pieces,
           (uint4 *)out);
}

__global__ void embed_kernel(cuda_matrix m, const int32_t *ids, float *x)
{
    uint32_t piece = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (piece >= m.columns / 8)
        return;
    float v[8];
    load8(m, (uint64_t)ids[row], piece * 8, v);
    for (int i = 0; i < 8; i++)
        x[(uint64_t)row * m.columns + piece * 8 + i] = v[i];
}

void cuda_embed(cudaStream_t s, const struct cuda_matrix *table, const int32_t *ids, uint32_t rows, float *x)
{
    launch(embed_kernel, dim3((table->columns / 8 + 127) / 128, rows), dim3(128), 0, s, *table, ids, x);
}
