/* step_letters: how blocks of the step kernel tell each other what they computed (step.cu says why). */
#pragma once
#include "ring.cuh"

#define ROWS    CUDA_STEP_ROWS
#define WARPS   8            /* that work */
#define WORKERS (32 * WARPS) /* the feeder comes behind them */
#define THREADS (WORKERS + 32)

/* --- letters ---------------------------------------------------------------------------------- */

__device__ __forceinline__ void send(uint2 *to, uint32_t value, uint32_t stamp)
{
    asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(value), "r"(stamp) : "memory");
}
__device__ __forceinline__ void send_two(uint2 *to, float x, float y, uint32_t stamp)
{
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(__float_as_uint(x)),
                 "r"(stamp), "r"(__float_as_uint(y))
                 : "memory");
}
__device__ __forceinline__ uint4 look(const uint4 *from) /* at two letters */
{
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint2 look_one(const uint2 *from)
{
    uint2 v;
    asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
    return v;
}

#define VECTORS 8 /* pairs of letters that a thread asks for together */

/* Pairs first, first + WORKERS, ... below count, all with this stamp. */
__device__ __forceinline__ void receive(uint4 v[VECTORS], const uint4 *from, uint32_t first, uint32_t count,
                                        uint32_t stamp)
{
    bool all;
    do {
        all = true;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            v[i] = make_uint4(0, stamp, 0, stamp);
            if (first + i * WORKERS < count)
                v[i] = look(from + first + i * WORKERS);
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            all = all && v[i].y == stamp && v[i].w == stamp;
    } while (!all);
}

struct letters {            /* where what is, of all rows */
    uint2 *x[2];            /* [rows][embd] f32: the even and the odd states of x */
    uint2 *qkv, *out, *ffn; /* [rows][.. / 2] pairs of 16-bit values */
    uint2 *parts;           /* [split][KV head][group][HD + 2] f32: of a split, maximum and sum at the end */
};

__host__ __device__ static letters letters_of(const cuda_step &a)
{
    uint64_t rows = a.rows, width = a.rope.head_count * a.rope.head_dim,
             qkv = width + 2 * a.rope.kv_head_count * a.rope.head_dim;
    letters p;
    p.x[0] = (uint2 *)a.letters, p.x[1] = p.x[0] + rows * a.embd;
    p.qkv = p.x[1] + rows * a.embd, p.out = p.qkv + rows * qkv / 2;
    p.ffn = p.out + rows * width / 2, p.parts = p.ffn + rows * a.ffn / 2;
    return p;
}

__device__ __forceinline__ uint2 *x_of(const letters &p, uint32_t state)
{
    return state % 2 ? p.x[1] : p.x[0];
}

/* x goes through 2 * layer_count + 1 states. */
__device__ __forceinline__ uint32_t stamp_of_x(uint32_t state)
{
    return state + 1;
}

/* Rows of pairs to shared memory, columns + 8 values apart. */
__device__ __forceinline__ void receive_rows(uint16_t *act, const uint2 *from, uint32_t rows,
                                             uint32_t columns, uint32_t stamp)
{
    uint32_t count = columns / 4;
    uint4 v[VECTORS];
#pragma unroll 1
    for (uint32_t r = 0; r < rows; r++)
#pragma unroll 1
        for (uint32_t first = threadIdx.x; first - threadIdx.x < count; first += VECTORS * WORKERS) {
            receive(v, (const uint4 *)from + (uint64_t)r * count, first, count, stamp);
            if (r == 0 && first == threadIdx.x)
                meet_warps<WORKERS>(1); /* nobody works with what was there before */
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                if (first + i * WORKERS < count)
                    *(uint2 *)(act + r * (columns + 8) + 4 * (first + i * WORKERS)) =
                        make_uint2(v[i].x, v[i].z);
        }
    meet_warps<WORKERS>(1);
}
