/* step_product: products of the step kernel: weights from the ring, the input from shared memory, what comes out by letters. */
#pragma once
#include "matvec.cuh"
#include "step_letters.cuh"

/* --- weights in the ring ---------------------------------------------------------------------- */

#define PIECE 2048 /* bytes of a row of weights in a slot */

/* What of a matrix lies in a slot: 16 rows of `columns` columns, of which two neighbours never begin in the same half of the banks,
 * and behind them rows of scales, 16 bytes further apart than they are long. A page lies at the first multiple of 1024. */
template <cuda_form F> struct slot_of {
    static constexpr int columns = PIECE / 16 * form_of<F>::values, rows_size = 16 * PIECE + 8 * 64,
                         scales = form_of<F>::group ? columns / (form_of<F>::group ? form_of<F>::group : 1) *
                                                          form_of<F>::scale
                                                    : 0,
                         scale_row = scales ? scales + 16 : 0, size = rows_size + 16 * scale_row;
    static __device__ __forceinline__ uint32_t row(uint32_t r)
    {
        return r * PIECE + (r + 1) / 2 * 64;
    }
};

/* Where a block begins in a phase, when all tiles of all phases are dealt round. */
struct dealer {
    uint32_t turn;
    __device__ __forceinline__ uint32_t next() const
    {
        return (blockIdx.x + gridDim.x - turn) % gridDim.x;
    }
    __device__ __forceinline__ uint32_t first(uint32_t tiles)
    {
        uint32_t tile = next();
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
#pragma unroll 1
    for (uint32_t tile = d.first(tiles); tile < tiles; tile += gridDim.x)
#pragma unroll 1
        for (uint32_t part = 0; part < parts; part++) {
            uint64_t n = min(tile * 16 + lane % 16, rows - 1) + (uint64_t)part * rows;
            const uint8_t *w = (const uint8_t *)m.values + n * ((uint64_t)columns * 16 / values);
            const uint8_t *scales =
                (const uint8_t *)m.scales + (slot::scales ? n * (columns / group) * form_of<F>::scale : 0);
#pragma unroll 1
            for (uint32_t first = 0; first < columns; first += slot::columns) {
                uint32_t here = min(columns - first, (uint32_t)slot::columns), bytes = here / values * 16,
                         scale_bytes = slot::scales ? here / group * form_of<F>::scale : 0;
                r.make_room();
                if (lane == 0)
                    bell_expect(&r.b->full[r.at], 16 * (bytes + scale_bytes));
                __syncwarp();
                if (lane < 16)
                    copy_bulk(r.slot() + slot::row(lane), w + (uint64_t)first / values * 16, bytes,
                              &r.b->full[r.at]);
                else if (slot::scales)
                    copy_bulk(r.slot() + slot::rows_size + (lane - 16) * slot::scale_row,
                              scales + first / group * form_of<F>::scale, scale_bytes, &r.b->full[r.at]);
                r.step();
            }
        }
}

/* --- products --------------------------------------------------------------------------------- */

#define STEP_PASSES (ROWS / 2) /* of a warp over a tile's sums */

enum sending { SEND_PAIRS, SEND_SWIGLU, SEND_SUM };

struct product_job {
    const cuda_matrix *m;
    const uint16_t *act; /* shared */
    uint32_t parts;      /* 2: gate rows, then as many up rows */
    sending how;
    uint2 *to;           /* letters [rows][columns], or [rows][columns / 2] pairs */
    const uint2 *to_add; /* SEND_SUM: x before */
    uint32_t stamp, add_stamp;
    float *plain; /* SEND_SUM: also here, or NULL */
};

/* act: of the lane's row, from the slot's first column on; NULL: no such row. */
template <cuda_form F, bool BF16>
__device__ __forceinline__ void use_slot(float acc[2][4], const uint8_t *slot, const uint16_t *act,
                                         uint32_t columns)
{
    constexpr int values = form_of<F>::values, group = form_of<F>::group ? form_of<F>::group : 1;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    constexpr int loads = PIECE / 64 / WARPS; /* of a warp and row */
    const uint8_t *w = slot + slot_of<F>::row(g) + warp * loads * 64 + q * 16,
                  *scales = slot + slot_of<F>::rows_size + g * slot_of<F>::scale_row;
#pragma unroll
    for (int l = 0; l < loads; l++) {
        uint32_t column = ((warp * loads + l) * 4 + q) * values, scale[2] = {0, 0};
        if ((warp * loads + l) * 4 * values >= columns)
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

struct block_sums { /* of a tile, from all warps to one of them, which adds them up while the others go on */
    float *sums;    /* shared, [2][warps][2 parts][rows][17] */
    uint64_t *full,
        *empty; /* [2]; every lane that wrote, or read, arrives for itself: racecheck sees no other order */
    uint32_t count; /* tiles so far */
};

__device__ __forceinline__ uint32_t
sum_writers(uint32_t rows) /* lanes of all warps that have something of a tile */
{
    return WARPS * 8 * ((rows + 1) / 2);
}
__device__ __forceinline__ uint32_t sum_readers(uint32_t rows) /* lanes of the warp that adds up */
{
    return min(rows * 16, 32u);
}

/* One value of a product to where it is needed; `next` is the one to its right. */
template <bool BF16>
__device__ __forceinline__ void post(const product_job &job, uint32_t row, uint32_t n, uint32_t n_rows,
                                     bool inside, float value, float next, uint2 before)
{
    uint64_t at = (uint64_t)row * n_rows + n;
    if (job.how == SEND_SUM) {
        while (inside && before.y != job.add_stamp)
            before = look_one(job.to_add + at);
        value += __uint_as_float(before.x);
        if (inside)
            send(job.to + at, __float_as_uint(value), job.stamp);
        if (inside && job.plain)
            job.plain[at] = value;
    } else if (inside && n % 2 == 0) {
        send(job.to + at / 2, to_pair<BF16>(value, next), job.stamp);
    }
}

__device__ __forceinline__ float gated(float gate, float up)
{
    return gate / (1.0f + __expf(-gate)) * up;
}

/* What the warps found of a tile, by one warp. before: of x, asked for when the tile began. */
template <bool BF16>
__device__ __forceinline__ void post_tile(const product_job &job, const float *own, uint32_t tile,
                                          uint32_t n_rows, uint32_t rows, const uint2 before[STEP_PASSES])
{
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t k = 0; k < STEP_PASSES; k++) {
        if (k * 32 >= rows * 16)
            break;
        uint32_t i = k * 32 + lane, row = i / 16, n = tile * 16 + i % 16;
        float total[2] = {0.0f, 0.0f};
        if (row < rows)
            for (int w = 0; w < WARPS; w++)
#pragma unroll
                for (int part = 0; part < 2; part++)
                    if (part < (int)job.parts)
                        total[part] += own[((w * 2 + part) * rows + row) * 17 + i % 16];
        float value = job.how == SEND_SWIGLU ? gated(total[0], total[1]) : total[0],
              next = __shfl_down_sync(0xffffffffu, value, 1);
        post<BF16>(job, row, n, n_rows, row < rows && n < n_rows, value, next, before[k]);
    }
}

__device__ __forceinline__ void ask_before(uint2 before[STEP_PASSES], const product_job &job, uint32_t tile,
                                           uint32_t n_rows, uint32_t rows)
{
#pragma unroll
    for (uint32_t k = 0; k < STEP_PASSES; k++) {
        uint32_t i = k * 32 + threadIdx.x % 32, n = tile * 16 + i % 16;
        before[k] = make_uint2(0, 0);
        if (job.how == SEND_SUM && i / 16 < rows && n < n_rows)
            before[k] = look_one(job.to_add + (uint64_t)(i / 16) * n_rows + n);
    }
}

template <cuda_form F, bool BF16>
__device__ __forceinline__ void multiply(ring &r, dealer &d, block_sums &b, uint32_t act_rows,
                                         const product_job &job)
{
    constexpr uint32_t width = slot_of<F>::columns;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4,
             rows = job.m->rows / job.parts, tiles = (rows + 15) / 16, columns = job.m->columns;
    const uint16_t *act = g < act_rows ? job.act + g * (columns + 8) : nullptr;
#pragma unroll 1
    for (uint32_t tile = d.first(tiles); tile < tiles; tile += gridDim.x, b.count++) {
        uint32_t half = b.count % 2, parity = b.count / 2 % 2;
        bool posts = b.count % WARPS == warp;
        float *own = b.sums + half * (WARPS * 2 * act_rows * 17);
        uint2 before[STEP_PASSES];
        if (posts)
            ask_before(before, job, tile, rows, act_rows);
#pragma unroll 1
        for (uint32_t part = 0; part < job.parts; part++) {
            float acc[2][4] = {};
#pragma unroll 1
            for (uint32_t first = 0; first < columns; first += width) {
                r.await();
                use_slot<F, BF16>(acc, r.slot(), act ? act + first : nullptr, min(columns - first, width));
                r.let_go();
            }
            if (part == 0)
                bell_wait(&b.empty[half], parity ^ 1);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (2 * q + i % 2 < act_rows)
                    own[((warp * 2 + part) * act_rows + 2 * q + i % 2) * 17 + g + 8 * (i / 2)] =
                        acc[0][i] + acc[1][i];
        }
        if (2 * q < act_rows)
            bell_arrive(&b.full[half]);
        if (posts) {
            bell_wait(&b.full[half], parity);
            post_tile<BF16>(job, own, tile, rows, act_rows, before);
            if (lane < sum_readers(act_rows))
                bell_arrive(&b.empty[half]);
        }
    }
}

/* --- products with quantised weights ---------------------------------------------------------- */

/* Codes are multiplied as integers, four at a time (dp4a). The input is made integers of 16 bits for that, 32 values with one scale,
 * high and low bytes apart. Of a row of the input lie in shared memory: for each group of 32 the high bytes of positions 0 to 15; then
 * of all groups those of 16 to 31; the low bytes likewise; and (scale, scale * sum of the integers) of each group.
 * With W4, the eight values of a word lie in the order in which two masks take its nibbles apart: 0 4 1 5 2 6 3 7. */
#define CODED_SIZE 72   /* bytes a group */
#define STAGED     8192 /* values of the input that lie there as f16, at most, on their way to be coded */

__device__ __forceinline__ uint32_t bytes_of(int a, int b, int c, int d) /* the lowest of each */
{
    return __byte_perm(__byte_perm((uint32_t)a, (uint32_t)b, 0x0040),
                       __byte_perm((uint32_t)c, (uint32_t)d, 0x0040), 0x5410);
}

/* Eight values of a word in their order. */
template <cuda_form F> __device__ __forceinline__ uint2 eight_bytes(const int x[8], int shift)
{
    int y[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        y[i] = x[i] >> shift;
    return F == CUDA_W4 ? make_uint2(bytes_of(y[0], y[4], y[1], y[5]), bytes_of(y[2], y[6], y[3], y[7]))
                        : make_uint2(bytes_of(y[0], y[1], y[2], y[3]), bytes_of(y[4], y[5], y[6], y[7]));
}

/* f16 values from column `first` on, a multiple of 256; all threads. Eight are a lane's, 32 those of four lanes. */
template <cuda_form F>
__device__ __forceinline__ void code_row(uint8_t *to, const uint16_t *from, uint32_t columns, uint32_t first,
                                         uint32_t count)
{
    uint32_t groups = columns / 32;
#pragma unroll 2
    for (uint32_t at = threadIdx.x; at < count / 8; at += WORKERS) {
        uint4 v = ((const uint4 *)from)[at];
        uint32_t words[4] = {v.x, v.y, v.z, v.w}, group = (first + 8 * at) / 32;
        float values[8], most = 0.0f;
        int x[8], sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 two = __half22float2(bits_half2(words[i]));
            values[2 * i] = two.x, values[2 * i + 1] = two.y;
            most = fmaxf(most, fmaxf(fabsf(two.x), fabsf(two.y)));
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        float inverse = most > 0.0f ? __fdividef(32767.0f, most) : 0.0f, scale = most * (1.0f / 32767.0f);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum += x[i] = __float2int_rn(values[i] * inverse);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        uint8_t *place = to + (at % 4 / 2 * groups + group) * 16 + at % 2 * 8;
        *(uint2 *)place = eight_bytes<F>(x, 8);
        *(uint2 *)(place + groups * 32) = eight_bytes<F>(x, 0);
        if (at % 4 == 0)
            ((float2 *)(to + groups * 64))[group] = make_float2(scale, scale * (float)sum);
    }
    meet_warps<WORKERS>(1);
}

__device__ __forceinline__ int dot_signed(uint32_t codes, uint32_t x, int sum) /* x: signed bytes */
{
    int y;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(y) : "r"(codes), "r"(x), "r"(sum));
    return y;
}

/* Codes of one group in the order of the input's bytes, a word for each four. */
template <cuda_form F> __device__ __forceinline__ void take_codes(uint32_t codes[8], const uint8_t *from)
{
    if (F == CUDA_W4) {
        uint4 v = *(const uint4 *)from;
        uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            codes[2 * i] = w[i] & 0x0f0f0f0fu, codes[2 * i + 1] = w[i] >> 4 & 0x0f0f0f0fu;
    } else {
        uint4 v = *(const uint4 *)from, u = *(const uint4 *)(from + 16);
        codes[0] = v.x, codes[1] = v.y, codes[2] = v.z, codes[3] = v.w;
        codes[4] = u.x, codes[5] = u.y, codes[6] = u.z, codes[7] = u.w;
    }
}

/* Two rows of a slot by a warp, a group a lane at a time. first: the slot's first group; here: how many it has. */
template <cuda_form F>
__device__ __forceinline__ void use_codes(float acc[2], const uint8_t *slot, const uint8_t *act,
                                          uint32_t groups, uint32_t first, uint32_t here)
{
    constexpr uint32_t bytes = F == CUDA_W4 ? 16 : 32;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t c = 0; c < PIECE / bytes; c += 32) {
        if (c + lane >= here)
            break;
        float2 scale = ((const float2 *)(act + groups * 64))[first + c + lane];
        uint32_t x[16];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint4 v = *(const uint4 *)(act + ((uint32_t)k * groups + first + c + lane) * 16);
            x[4 * k] = v.x, x[4 * k + 1] = v.y, x[4 * k + 2] = v.z, x[4 * k + 3] = v.w;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t codes[8], low[2] = {0, 0};
            int high[2] = {0, 0};
            take_codes<F>(codes, slot + slot_of<F>::row(2 * warp + i) + (c + lane) * bytes);
            const uint8_t *scales = slot + slot_of<F>::rows_size + (2 * warp + i) * slot_of<F>::scale_row +
                                    (c + lane) * form_of<F>::scale;
            float2 dm = F == CUDA_W8D ? make_float2(__half2float(*(const half *)scales), 0.0f)
                                      : __half22float2(*(const half2 *)scales);
            if (F != CUDA_W4) /* code + 128 */
                dm.y -= 128.0f * dm.x;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                high[k % 2] = dot_signed(codes[k], x[k], high[k % 2]);
                low[k % 2] = __dp4a(codes[k], x[8 + k], low[k % 2]);
            }
            int sum = (high[0] + high[1]) * 256 + (int)(low[0] + low[1]);
            acc[i] += dm.x * scale.x * (float)sum + dm.y * scale.y;
        }
    }
}

/* As multiply, for one row; a warp has two rows of a tile for itself, so nothing is added up between warps. */
template <cuda_form F>
__device__ __forceinline__ void multiply_codes(ring &r, dealer &d, const product_job &job, const uint8_t *act)
{
    constexpr uint32_t width = slot_of<F>::columns;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = job.m->rows / job.parts,
             tiles = (rows + 15) / 16, columns = job.m->columns, groups = columns / 32;
#pragma unroll 1
    for (uint32_t tile = d.first(tiles); tile < tiles; tile += gridDim.x) {
        uint32_t n = tile * 16 + 2 * warp + lane % 2; /* lanes 0 and 1 post */
        bool inside = lane < 2 && n < rows;
        uint2 before = make_uint2(0, 0);
        if (job.how == SEND_SUM && inside)
            before = look_one(job.to_add + n);
        float value = 0.0f;
#pragma unroll 1
        for (uint32_t part = 0; part < job.parts; part++) {
            float acc[2] = {0.0f, 0.0f};
#pragma unroll 1
            for (uint32_t first = 0; first < columns; first += width) {
                r.await();
                use_codes<F>(acc, r.slot(), act, groups, first / 32, min(columns - first, width) / 32);
                r.let_go();
            }
            float sum[2] = {warp_sum(acc[0]), warp_sum(acc[1])}, mine = lane % 2 ? sum[1] : sum[0];
            value = part == 0 ? mine : gated(value, mine);
        }
        float next = __shfl_down_sync(0xffffffffu, value, 1);
        post<false>(job, 0, n, rows, inside, value, next, before);
    }
}
