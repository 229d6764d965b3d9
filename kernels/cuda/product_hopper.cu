/* product_hopper: 16-bit weights times 3 to 128 rows (sm_90a): the weights stream by, at the memory's speed.
 *
 * out[R][N] = act[R][K] * W[N][K]^T; a tile is up to 256 rows of W and all rows of act. Two warps feed a ring of slots each, 64 columns of
 * the tile and of act, through the copy engine; two groups of four warps multiply. Up to 64 rows this is W * act^T: the rows of wgmma's
 * product are W's, two planes of up to 64 a group, and its columns act's, padded to 16, 32 or 64. With more it is the other way round: 64
 * rows of act a group, each with slots of its own, and the tile the columns. Then no plane is padded, and shared memory is read a quarter
 * less; with so many rows the card is at the limit of its power, and what saves work makes it quicker. With CUDA_SWIGLU16 planes are by
 * turns rows of gate and the same of up, so that both lie in the registers of one thread.
 *
 * grid: tiles x splits, a block an SM. Where there are fewer tiles than SMs, `splits` blocks share a tile, a run of columns each. With
 * CUDA_ADD_F32 they add to memory as they come, by the copy engine, so that the last bit depends on their order; else they are a cluster,
 * and each adds up, for some of the rows of act, what all found, through the cluster's shared memory. With more tiles a block takes them in
 * turns.
 *
 * The kernel begins while the one before it ends (early.cuh): its ring is filled with weights, which nothing in a step writes; only
 * act has to wait. So memory works on while rows are normed or turned.
 *
 * bytes: W once from memory; act once a tile from L2, a quarter as much with 64 rows, half with 128. flops 2 * N * K * R. Predicted: the
 * read rate of the card. Measured on an H200 behind each other, in GB/s of W with 32 rows: 4,290 for 28672 x 4096, 4,140 for
 * 128256 x 4096; a smaller one loses 2 to 4 us at its ends. With 128 rows, in a step, 28672 x 4096 takes 60 us, its end 2, and
 * 4096 x 14336 in tiles of 160 takes 35, its end 4: the card's power is at its limit and the clock goes down to 1.4 GHz. There tiles that are
 * shared are narrower, and as much of act as of W is on its way; what is to be stored and not added is left to the library. */
#include "early.cuh"
#include "hopper.cuh"
#include "kernels.h"
#include "wgmma_product.cuh"

#define GROUPS     2
#define WORKERS    (128 * GROUPS)
#define THREADS    (WORKERS + 64) /* behind them one warp feeds weights, one act */
#define CHUNK      64             /* columns of a slot */
#define PLANES     4              /* of a slot of weights: up to 64 rows each */
#define SPLITS_MAX 8
#define SLOTS_MAX  16
#define WIDE       64 /* rows; with more, products are the other way round */
#define SHARED_SIZE                                                                                          \
    (225 * 1024) /* of a block: with room for two, SMs would get one or two, and those with two be late */
#define ON_THE_WAY                                                                                           \
    (108 * 1024) /* bytes of weights an SM has asked for: more only makes what others ask for wait */

struct stream_shape { /* how a product is shared out: blockIdx.x is tile * splits + rank */
    uint32_t tiles, splits, chunks, rows, planes,
        plane_rows; /* chunks: of K; rows: of W, of the gate with `pair` */
    bool pair, joins,
        adds; /* joins: blocks of a tile are a cluster, which adds up; adds: a block adds its one tile to memory */
};

__device__ __forceinline__ uint32_t first_chunk(const stream_shape &s, uint32_t rank)
{
    return s.chunks * rank / s.splits;
}
/* Rows of out that a tile makes. */
__host__ __device__ __forceinline__ uint32_t tile_width(const stream_shape &s)
{
    return (s.pair ? s.planes / 2 : s.planes) * s.plane_rows;
}
/* The first row of W in a plane; planes 0 and 1 are the first group's. */
__device__ __forceinline__ uint32_t plane_row(const stream_shape &s, uint32_t tile, uint32_t plane)
{
    return s.pair ? plane % 2 * s.rows + tile * tile_width(s) + plane / 2 * s.plane_rows
                  : tile * tile_width(s) + plane * s.plane_rows;
}

__host__ __device__ __forceinline__ uint32_t slot_rows(const stream_shape &s)
{
    return s.planes * s.plane_rows;
}
__device__ __forceinline__ bool shares_sums(const stream_shape &s) /* at the end, in the slots' place */
{
    return s.joins || s.adds;
}

struct stream_args {
    cuda_product p;
    stream_shape shape;
    uint32_t slots, ahead; /* of weights; ahead: at most on their way */
    bool twos;             /* two slots are asked for together, plane by plane */
    bool once;             /* L2 lets W go first */
};

struct share { /* of a block */
    uint32_t tile, tile_step, begin, end;
};

__device__ __forceinline__ share share_of(const stream_shape &s)
{
    uint32_t rank = blockIdx.x % s.splits;
    return {blockIdx.x / s.splits, gridDim.x / s.splits, first_chunk(s, rank), first_chunk(s, rank + 1)};
}

/* --- the rings -------------------------------------------------------------------------------- */

struct stream_shared {
    uint64_t weights[SLOTS_MAX], weights_free[SLOTS_MAX], act[SLOTS_MAX], act_free[SLOTS_MAX];
    uint8_t head[1024 - 4 * 8 * SLOTS_MAX];
    uint8_t
        slots[]; /* of weights, then of act; products read 64 rows of a plane that has fewer, and use none of
                        what lies behind it. At the end of a tile that is shared: float sums[N][sums_row(WIDTH)] */
};

/* Of act, N rows, or with more than WIDE each group's WIDE; a slot is free only once the product behind it has begun. width: rows of W in a slot.
 * Both together are what an SM has room for. With 128 rows and 224 of W, 6 slots of W and not 5, of which two are asked for together, make a
 * step 0.5 to 1 % shorter, and 4 make it 10 % longer. With 128 or 160 of W most is waited for act. */
__host__ __device__ constexpr uint32_t act_slots(uint32_t n, uint32_t width)
{
    return n < WIDE ? 8 : n == WIDE ? 4 : width == 224 ? 6 : width >= 256 ? 8 : width == 160 ? 10 : 12;
}
__host__ __device__ constexpr uint32_t act_slot_size(uint32_t n)
{
    return (n > WIDE ? WIDE : n) * 2 * CHUNK;
}

/* Floats between rows of sums: no bank conflicts. width: of a tile, with more than WIDE rows; else 0. */
__host__ __device__ constexpr uint32_t sums_row(uint32_t width)
{
    return width ? width / 16 * 16 + 8 : PLANES * 64 + 4;
}

struct stream_ring { /* one side's view of the slots of weights, or of act */
    uint8_t *slots;
    uint64_t *full, *free;
    uint32_t size, count, at, parity;
    __device__ __forceinline__ uint8_t *slot() const
    {
        return slots + at * size;
    }
    __device__ __forceinline__ void await_full() const
    {
        bell_wait(&full[at], parity);
    }
    __device__ __forceinline__ void await_free() const
    {
        bell_wait(&free[at], parity ^ 1);
    }
    __device__ __forceinline__ void let_go(uint32_t slot) const
    {
        if (threadIdx.x % 32 == 0)
            bell_arrive(&free[slot]);
    }
    /* Until what was asked for `ahead` slots ago has come. */
    __device__ __forceinline__ void await_older(uint32_t ahead) const
    {
        bell_wait(&full[at >= ahead ? at - ahead : at + count - ahead], at >= ahead ? parity : parity ^ 1);
    }
    __device__ __forceinline__ void step()
    {
        if (++at == count)
            at = 0, parity ^= 1;
    }
};

struct rings {
    stream_ring weights, act;
    /* The next slots are awaited, and what the slots at w and x were read for may still be running: if weights have not come, there is time to
     * see it end, and the slots are free so much earlier. Is it still running? */
    __device__ __forceinline__ bool await_full(uint32_t w, uint32_t x, bool running) const
    {
        if (running && !bell_rang(&weights.full[weights.at], weights.parity)) {
            wgmma_wait<0>();
            weights.let_go(w), act.let_go(x);
            running = false;
        }
        weights.await_full();
        act.await_full();
        return running;
    }
};

/* One thread. What is not there (behind the last row or column) comes as zeros, and counts. Slots that are asked for together lie side by
 * side in W: memory likes longer runs. */
__device__ __forceinline__ void feed_weights(stream_ring r, const stream_args &d, const share &own,
                                             const CUtensorMap *map)
{
    uint32_t fed = 0, planes = d.shape.planes, plane_size = d.shape.plane_rows * 2 * CHUNK,
             together = d.twos ? 2 : 1;
    uint64_t once = read_once();
    for (uint32_t tile = own.tile; tile < d.shape.tiles; tile += own.tile_step)
        for (uint32_t chunk = own.begin; chunk < own.end; chunk += together) {
            stream_ring first = r;
            uint32_t count = min(together, own.end - chunk);
            for (uint32_t j = 0; j < count; j++, fed++) {
                r.await_free();
                if (fed >= d.ahead)
                    r.await_older(d.ahead);
                bell_expect(&r.full[r.at], planes * plane_size);
                r.step();
            }
            for (uint32_t i = 0; i < planes; i++) {
                stream_ring q = first;
                for (uint32_t j = 0; j < count; j++) {
                    uint8_t *to = q.slot() + i * plane_size;
                    int32_t x = (int32_t)((chunk + j) * CHUNK), y = (int32_t)plane_row(d.shape, tile, i);
                    if (d.once)
                        copy_box_once(to, map, x, y, &q.full[q.at], once);
                    else
                        copy_box(to, map, x, y, &q.full[q.at]);
                    q.step();
                }
            }
        }
}

/* One thread: what the kernels before this one make. */
template <int N>
__device__ __forceinline__ void feed_act(stream_ring r, const stream_args &d, const share &own,
                                         const CUtensorMap *map)
{
    fetch_map(map);
    early_wait();
    for (uint32_t tile = own.tile; tile < d.shape.tiles; tile += own.tile_step)
        for (uint32_t chunk = own.begin; chunk < own.end; chunk++)
            for (int32_t row = 0; row < N; row += WIDE) {
                r.await_free();
                bell_expect(&r.full[r.at], r.size);
                copy_box(r.slot(), map, (int32_t)(chunk * CHUNK), row, &r.full[r.at]);
                r.step();
            }
}

/* --- multiplying ------------------------------------------------------------------------------ */

/* The block's chunks of a tile: of two planes, for all rows of act. */
template <bool BF16, int N>
__device__ __forceinline__ void multiply(float (&sum)[2][N / 2], rings &r, uint32_t chunks,
                                         uint32_t plane_size)
{
    uint32_t planes = threadIdx.x / 128 * 2 * plane_size, weights = 0,
             act = 0; /* slots of the chunk before */
    for (uint32_t i = 0; i < chunks; i++) {
        bool running = r.await_full(weights, act, i > 0);
        uint32_t w = shared_address(r.weights.slot()) + planes, x = shared_address(r.act.slot());
        wgmma_begin();
#pragma unroll
        for (uint32_t k = 0; k < CHUNK / 16; k++)
#pragma unroll
            for (uint32_t m = 0; m < 2; m++)
                wgmma_product<BF16>(sum[m], wgmma_operand(w + m * plane_size + 32 * k, 16),
                                    wgmma_operand(x + 32 * k, 16), i > 0 || k > 0);
        wgmma_commit();
        wgmma_wait<1>(); /* what the slots before were read for */
        if (running)
            r.weights.let_go(weights), r.act.let_go(act);
        weights = r.weights.at, act = r.act.at;
        r.weights.step(), r.act.step();
    }
    wgmma_wait<0>();
    wgmma_hold(sum[0]), wgmma_hold(sum[1]);
    r.weights.let_go(weights), r.act.let_go(act);
}

/* The same the other way round: of a whole tile, for the group's 64 rows of act, whose slots are every other one. */
template <bool BF16, int WIDTH>
__device__ __forceinline__ void multiply_wide(float (&sum)[WIDTH / 2], rings &r, uint32_t chunks)
{
    uint32_t weights = 0, act = 0; /* slots of the chunk before */
    for (uint32_t i = 0; i < chunks; i++) {
        bool running = r.await_full(weights, act, i > 0);
        uint32_t w = shared_address(r.weights.slot()), x = shared_address(r.act.slot());
        wgmma_begin();
#pragma unroll
        for (uint32_t k = 0; k < CHUNK / 16; k++)
            wgmma_product<BF16>(sum, wgmma_operand(x + 32 * k, 16), wgmma_operand(w + 32 * k, 16),
                                i > 0 || k > 0);
        wgmma_commit();
        wgmma_wait<1>(); /* what the slots before were read for */
        if (running)
            r.weights.let_go(weights), r.act.let_go(act);
        weights = r.weights.at, act = r.act.at;
        r.weights.step(), r.act.step(), r.act.step();
    }
    wgmma_wait<0>();
    wgmma_hold(sum);
    r.weights.let_go(weights), r.act.let_go(act);
}

__device__ __forceinline__ float gated(float gate, float up)
{
    return __fdividef(gate, 1.0f + __expf(-gate)) *
           up; /* without a branch; an exact quotient takes 2 us of a layer */
}

/* --- the end of a tile, alone ------------------------------------------------------------------- */

/* out[r][n], out[r][n + 1] */
template <bool BF16>
__device__ __forceinline__ void put_two(const cuda_product &p, uint32_t r, uint32_t n, float x, float y)
{
    uint64_t at = (uint64_t)r * p.out_stride + n;
    if (p.epilogue == CUDA_STORE_F32)
        *(float2 *)((float *)p.out + at) = make_float2(x, y);
    else if (p.epilogue == CUDA_ADD_F32)
        add_two((float *)p.out + at, x, y);
    else
        *(uint32_t *)((uint16_t *)p.out + at) = to_pair<BF16>(x, y);
}

/* A thread has two neighbours along act's rows; exchanged with the lane beside it, two neighbours along W's. first: the plane's. */
template <bool BF16, int N>
__device__ __forceinline__ void put_plane(const stream_args &d, const float (&sum)[N / 2], uint32_t first)
{
    uint32_t within = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, q = threadIdx.x % 4,
             odd = within % 2;
#pragma unroll
    for (uint32_t j = 0; j < N / 8; j++)
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            float x = sum[4 * j + 2 * i], y = sum[4 * j + 2 * i + 1],
                  got = __shfl_xor_sync(0xffffffffu, odd ? x : y, 4);
            uint32_t r = 8 * j + 2 * q + odd, at = within + 8 * i - odd;
            if (r < d.p.rows && at < d.shape.plane_rows && first + at < d.shape.rows)
                put_two<BF16>(d.p, r, first + at, odd ? got : x, odd ? y : got);
        }
}

template <bool BF16, int N>
__device__ __forceinline__ void put_tile(const stream_args &d, float (&sum)[2][N / 2], uint32_t tile)
{
    uint32_t group = threadIdx.x / 128;
    if (d.shape.pair) {
#pragma unroll
        for (uint32_t i = 0; i < N / 2; i++)
            sum[0][i] = gated(sum[0][i], sum[1][i]);
        put_plane<BF16, N>(d, sum[0], plane_row(d.shape, tile, 2 * group));
    } else {
#pragma unroll
        for (uint32_t m = 0; m < 2; m++)
            put_plane<BF16, N>(d, sum[m], plane_row(d.shape, tile, 2 * group + m));
    }
}

/* Lanes of four hold four words each; then lane q has word q of all four. */
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4])
{
#pragma unroll
    for (uint32_t k = 1; k <= 2; k *= 2) {
        bool upper = threadIdx.x & k;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t low = k == 1 ? 2 * i : i,
                     got = __shfl_xor_sync(0xffffffffu, upper ? w[low] : w[low + k], k);
            if (upper)
                w[low] = got;
            else
                w[low + k] = got;
        }
    }
}

/* A thread has, of rows r and r + 8 of act, two neighbours along W's in each eight; of up the same as of gate, a plane later. Exchanged
 * with the lanes beside it, eights are stored whole: four of a row, or the last two of both. */
template <bool BF16, int WIDTH, bool PAIR>
__device__ __forceinline__ void put_eights(const stream_args &d, const float (&sum)[WIDTH / 2], uint32_t tile)
{
    constexpr uint32_t PLANE = WIDTH / PLANES, EIGHTS = WIDTH / 8 / (PAIR ? 2 : 1), FOURS = EIGHTS / 4;
    static_assert(EIGHTS % 2 == 0, "two are left, or none");
    uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, q = threadIdx.x % 4,
             first = tile * tile_width(d.shape);
    uint16_t *out = (uint16_t *)d.p.out + (uint64_t)row * d.p.out_stride + first;
#pragma unroll
    for (uint32_t k = 0; k < EIGHTS / 2; k++) {
        bool last = k >= 2 * FOURS;
        uint32_t w[4];
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t i = last ? j / 2 : k % 2, column = 8 * (last ? 4 * FOURS + j % 2 : k / 2 * 4 + j),
                     at = (PAIR ? column + column / PLANE * PLANE : column) / 2 + 2 * i;
            float x = sum[at], y = sum[at + 1];
            if (PAIR)
                x = gated(x, sum[at + PLANE / 2]), y = gated(y, sum[at + PLANE / 2 + 1]);
            w[j] = to_pair<BF16>(x, y);
        }
        transpose_quad(w);
        uint32_t r = 8 * (last ? q / 2 : k % 2), n = 8 * (last ? 4 * FOURS + q % 2 : k / 2 * 4 + q);
        if (row + r < d.p.rows && first + n < d.shape.rows)
            *(uint4 *)(out + (uint64_t)r * d.p.out_stride + n) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

template <bool BF16, int WIDTH>
__device__ __forceinline__ void put_wide(const stream_args &d, const float (&sum)[WIDTH / 2], uint32_t tile)
{
    if constexpr (WIDTH >= 224) { /* narrower tiles are added */
        if (d.shape.pair)
            return put_eights<BF16, WIDTH, true>(d, sum, tile);
        if (d.p.epilogue == CUDA_STORE16)
            return put_eights<BF16, WIDTH, false>(d, sum, tile);
    }
    uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4,
             first = tile * tile_width(d.shape) + 2 * (threadIdx.x % 4);
#pragma unroll
    for (uint32_t j = 0; j < WIDTH / 8; j++)
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
            if (row + 8 * i < d.p.rows && first + 8 * j < d.shape.rows)
                put_two<BF16>(d.p, row + 8 * i, first + 8 * j, sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]);
}

/* --- the end of a tile, in a cluster ------------------------------------------------------------ */

template <int N> __device__ __forceinline__ void share_sums(float *sums, const float (&sum)[2][N / 2])
{
    uint32_t q = threadIdx.x % 4,
             first = threadIdx.x / 128 * 128 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (uint32_t m = 0; m < 2; m++)
#pragma unroll
        for (uint32_t i = 0; i < N / 2; i++)
            sums[(i / 4 * 8 + 2 * q + i % 2) * sums_row(0) + first + m * 64 + i / 2 % 2 * 8] = sum[m][i];
}

template <int WIDTH> __device__ __forceinline__ void share_wide(float *sums, const float (&sum)[WIDTH / 2])
{
    constexpr uint32_t ROW = sums_row(WIDTH);
    float *own = sums + (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * ROW + 2 * (threadIdx.x % 4);
#pragma unroll
    for (uint32_t j = 0; j < WIDTH / 8; j++)
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
            *(float2 *)(own + 8 * i * ROW + 8 * j) = make_float2(sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]);
}

/* Four values, added up over the cluster. */
__device__ __forceinline__ float4 add_up(const float *own, uint32_t splits)
{
    float4 v[SPLITS_MAX], total = make_float4(0, 0, 0, 0);
#pragma unroll
    for (uint32_t i = 0; i < SPLITS_MAX; i++)
        if (i < splits)
            v[i] = cluster_load(own, i);
#pragma unroll
    for (uint32_t i = 0; i < SPLITS_MAX; i++)
        if (i < splits)
            total.x += v[i].x, total.y += v[i].y, total.z += v[i].z, total.w += v[i].w;
    return total;
}

template <bool BF16>
__device__ __forceinline__ void put_four(const cuda_product &p, uint32_t r, uint32_t n, float4 v)
{
    uint64_t at = (uint64_t)r * p.out_stride + n;
    if (p.epilogue == CUDA_STORE_F32)
        *(float4 *)((float *)p.out + at) = v;
    else
        *(uint2 *)((uint16_t *)p.out + at) = make_uint2(to_pair<BF16>(v.x, v.y), to_pair<BF16>(v.z, v.w));
}

/* The block's part of act's rows. */
template <bool BF16, int WIDTH>
__device__ __forceinline__ void put_shared(const stream_args &d, const float *sums, uint32_t tile)
{
    const stream_shape &s = d.shape;
    uint32_t rank = blockIdx.x % s.splits, first = d.p.rows * rank / s.splits,
             count = d.p.rows * (rank + 1) / s.splits - first, width = tile_width(s),
             apart = WIDTH ? s.plane_rows : 64; /* planes of sums */
    for (uint32_t i = threadIdx.x; i < count * (width / 4); i += WORKERS) {
        uint32_t r = first + i / (width / 4), column = i % (width / 4) * 4, n = tile * width + column,
                 plane = column / s.plane_rows * (s.pair ? 2 : 1);
        const float *at = sums + r * sums_row(WIDTH) + plane * apart + column % s.plane_rows;
        if (n >= s.rows)
            continue;
        float4 v = add_up(at, s.splits);
        if (s.pair) {
            float4 up = add_up(at + apart, s.splits);
            v = make_float4(gated(v.x, up.x), gated(v.y, up.y), gated(v.z, up.z), gated(v.w, up.w));
        }
        put_four<BF16>(d.p, r, n, v);
    }
}

/* --- the end of a tile that is added to memory ---------------------------------------------------- */

/* Rows, or their planes, by the copy engine: 1 % of a step with 32 or 64 rows less than by threads. */
template <int WIDTH>
__device__ __forceinline__ void put_added(const stream_args &d, const float *sums, uint32_t tile)
{
    const stream_shape &s = d.shape;
    uint32_t pieces = WIDTH || s.plane_rows == 64 ? 1 : PLANES, width = tile_width(s) / pieces;
    fence_async();
    meet_warps<WORKERS>(1);
    for (uint32_t i = threadIdx.x; i < d.p.rows * pieces; i += WORKERS) {
        uint32_t r = i / pieces, plane = i % pieces, n = tile * tile_width(s) + plane * s.plane_rows;
        if (n < s.rows)
            add_bulk((float *)d.p.out + (uint64_t)r * d.p.out_stride + n,
                     sums + r * sums_row(WIDTH) + plane * 64, 4 * min(width, s.rows - n));
    }
    adds_read();
}

/* --- the kernel ------------------------------------------------------------------------------- */

template <bool BF16, int N>
__device__ __forceinline__ void work(rings r, const stream_args &d, const share &own)
{
    float sum[2][N / 2];
    early_wait();
    for (uint32_t tile = own.tile; tile < d.shape.tiles; tile += own.tile_step) {
        multiply<BF16, N>(sum, r, own.end - own.begin, d.shape.plane_rows * 2 * CHUNK);
        if (!shares_sums(d.shape))
            put_tile<BF16, N>(d, sum, tile);
    }
    if (shares_sums(d.shape)) { /* one tile */
        meet_warps<WORKERS>(1);
        share_sums<N>((float *)r.weights.slots, sum);
    }
}

template <bool BF16, int WIDTH>
__device__ __forceinline__ void work_wide(rings r, const stream_args &d, const share &own)
{
    float sum[WIDTH / 2];
    if (threadIdx.x >= WORKERS / GROUPS)
        r.act.step();
    early_wait();
    for (uint32_t tile = own.tile; tile < d.shape.tiles; tile += own.tile_step) {
        multiply_wide<BF16, WIDTH>(sum, r, own.end - own.begin);
        if (!shares_sums(d.shape))
            put_wide<BF16, WIDTH>(d, sum, tile);
    }
    if (shares_sums(d.shape)) { /* one tile */
        meet_warps<WORKERS>(1);
        share_wide<WIDTH>((float *)r.weights.slots, sum);
    }
}

template <int N> __device__ __forceinline__ rings rings_of(stream_shared *sh, const stream_args &d)
{
    uint32_t size = slot_rows(d.shape) * 2 * CHUNK;
    return {{sh->slots, sh->weights, sh->weights_free, size, d.slots, 0, 0},
            {sh->slots + d.slots * size, sh->act, sh->act_free, act_slot_size(N),
             act_slots(N, slot_rows(d.shape)), 0, 0}};
}

__device__ __forceinline__ void make_bells(const stream_ring &r, uint32_t workers)
{
    for (uint32_t i = 0; i < r.count; i++)
        bell_init(&r.full[i], 1), bell_init(&r.free[i], workers / 32);
}

/* WIDTH: of a tile in rows of W, of gate and up together, with more than WIDE rows; else 0. */
template <bool BF16, int N, int WIDTH>
__global__ void __launch_bounds__(THREADS, 1)
    stream_kernel(const __grid_constant__ stream_args d, const __grid_constant__ CUtensorMap w,
                  const __grid_constant__ CUtensorMap act)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    stream_shared *sh = (stream_shared *)memory;
    static_assert(sizeof *sh == 1024 && 1024 + 4 * N * sums_row(WIDTH) <= SHARED_SIZE,
                  "what swizzling wants; sums fit");
    static_assert(WIDTH == 0 || act_slots(N, WIDTH) % GROUPS == 0,
                  "a slot is one group's for good: who waits on a bell has seen each phase of it before");
    rings r = rings_of<N>(sh, d);
    share own = share_of(d.shape);
    uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        make_bells(r.weights, WORKERS), make_bells(r.act, WIDTH > 0 ? WORKERS / GROUPS : WORKERS);
        bells_made();
    }
    __syncthreads();
    early_start();
    if (warp < WORKERS / 32) {
        if constexpr (WIDTH > 0)
            work_wide<BF16, WIDTH>(r, d, own);
        else
            work<BF16, N>(r, d, own);
    } else if (threadIdx.x == WORKERS)
        feed_weights(r.weights, d, own, &w);
    else if (threadIdx.x == WORKERS + 32)
        feed_act<N>(r.act, d, own, &act);
    __syncwarp();
    if (d.shape.joins) {
        cluster_meet();
        if (warp < WORKERS / 32)
            put_shared<BF16, WIDTH>(d, (const float *)sh->slots, own.tile);
        cluster_part(); /* nobody leaves while others read */
    } else if (d.shape.adds && warp < WORKERS / 32) {
        put_added<WIDTH>(d, (const float *)sh->slots, own.tile);
    }
}

/* --- sharing out ------------------------------------------------------------------------------ */

template <bool BF16, int N> static auto kernel_of(uint32_t width)
{
    if constexpr (N > WIDE)
        return width == 128   ? stream_kernel<BF16, N, 128>
               : width == 160 ? stream_kernel<BF16, N, 160>
               : width == 224 ? stream_kernel<BF16, N, 224>
                              : stream_kernel<BF16, N, 256>;
    else
        return stream_kernel<BF16, N, 0>;
}

template <bool BF16, int N> static uint32_t ask_clusters(uint32_t splits)
{
    int count = 0;
    for (uint32_t width : {128, 160, 224, 256})
        if (!has_hopper_code(kernel_of<BF16, N>(width), SHARED_SIZE))
            return 0;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {splits, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(splits), config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = SHARED_SIZE;
    config.attrs = &attribute, config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(&count, kernel_of<BF16, N>(256), &config) ? 0 : (uint32_t)count;
}

template <bool BF16, int N> static uint32_t clusters_of(uint32_t splits) /* that fit on the device together */
{
    static known_devices known[SPLITS_MAX + 1];
    return known_of_device(known[splits], [splits] { return ask_clusters<BF16, N>(splits); });
}

/* Tiles that fit on the device together. */
template <bool BF16, int N> static uint32_t tiles_at_once(const stream_shape &s)
{
    return s.joins ? clusters_of<BF16, N>(s.splits) : clusters_of<BF16, N>(1) / s.splits;
}

/* How long the last block takes, in rows of a slot: W from memory, act from L2, and what a cluster's end is worth. (Planes of fewer than
 * 40 rows would share out a small W more evenly and leave less to add up, but cost the copy engine and the tensor cores as much as full
 * ones: 16 rows in 5.24 ms a step instead of 4.67.) */
template <int N> static uint32_t cost_of(const stream_shape &s, uint32_t turns)
{
    return turns * ((s.chunks + s.splits - 1) / s.splits) * (slot_rows(s) + N / 2) + (s.joins ? 400 : 0);
}

/* More than WIDE rows that are added: a narrow tile has less to add up, but reads more of act. splits: 0, or what it must be. */
template <bool BF16, int N> static bool adding_plan(stream_shape *s, const cuda_product &p, uint32_t splits)
{
    static const uint32_t widths[] = {128, 160, 256};
    uint32_t least = UINT32_MAX, blocks = clusters_of<BF16, N>(1), chunks = (p.m.columns + CHUNK - 1) / CHUNK;
    for (uint32_t width : widths) {
        uint32_t tiles = (p.m.rows + width - 1) / width,
                 most = min(min(blocks / tiles, chunks), (uint32_t)SPLITS_MAX), n = splits ? splits : most,
                 own = n ? (chunks + n - 1) / n : 0, cost = own * (width + N / 2) + 18 * width;
        if (n > 0 && n <= most && cost < least)
            least = cost, *s = {tiles, n, chunks, p.m.rows, 1, width, false, false, false};
    }
    return least < UINT32_MAX && (splits || s->tiles * s->splits >= blocks * 3 / 4);
}

/* The quickest for W; splits: 0, or what it must be. */
template <bool BF16, int N> static bool shape_plan(stream_shape *s, const cuda_product &p, uint32_t splits)
{
    bool pair = p.epilogue == CUDA_SWIGLU16, adds = p.epilogue == CUDA_ADD_F32;
    uint32_t least = UINT32_MAX, rows = pair ? p.m.rows / 2 : p.m.rows,
             chunks = (p.m.columns + CHUNK - 1) / CHUNK;
    uint32_t most = splits      ? splits
                    : N <= WIDE ? SPLITS_MAX
                                : 1; /* of 128 rows there would be too much to add up */
    for (uint32_t n = splits ? splits : 1; n <= most && n <= chunks; n++)
        for (uint32_t plane_rows = 64; plane_rows >= (N > WIDE ? 56 : 40); plane_rows -= 8) {
            stream_shape t = {0, n, chunks, rows, PLANES, plane_rows, pair, n > 1 && !adds, false};
            t.tiles = (rows + tile_width(t) - 1) / tile_width(t);
            uint32_t together = tiles_at_once<BF16, N>(t);
            if (together == 0 || (n > 1 && t.tiles > together))
                continue;
            uint32_t cost = cost_of<N>(t, (t.tiles + together - 1) / together);
            if (cost < least)
                least = cost, *s = t;
        }
    if (N > WIDE && splits == 0 && least < UINT32_MAX && s->tiles < clusters_of<BF16, N>(1) * 3 / 4)
        return false; /* the library is quicker */
    return least < UINT32_MAX;
}

/* --- launching -------------------------------------------------------------------------------- */

template <bool BF16, int N> static bool launch_stream(cudaStream_t s, const cuda_product &p, uint32_t splits)
{
    stream_args d = {p, {}, 0, 0, false, N <= 32};
    CUtensorMap w, act;
    if (!(N > WIDE && p.epilogue == CUDA_ADD_F32 && adding_plan<BF16, N>(&d.shape, p, splits)) &&
        !shape_plan<BF16, N>(&d.shape, p, splits))
        return false;
    uint32_t width = slot_rows(d.shape), size = width * 2 * CHUNK;
    d.twos = N != 64 && (N > WIDE || width >= 224); /* others lose, smaller planes up to 10 % */
    if (!cuda_map_rows(&w, p.m.values, p.m.rows, p.m.columns, p.m.columns, d.shape.plane_rows, d.twos) ||
        !cuda_map_rows(&act, p.act, p.rows, p.m.columns, p.act_stride, min(N, WIDE), false))
        return false;
    uint32_t room = SHARED_SIZE - sizeof(stream_shared) - act_slots(N, width) * act_slot_size(N);
    d.slots = min(room / size, (uint32_t)SLOTS_MAX);
    d.ahead = min(d.slots, (ON_THE_WAY + size - 1) / size);
    static_assert(ON_THE_WAY >= 2 * PLANES * 64 * 2 * CHUNK, "two slots may be on their way");
    uint32_t together = min(d.shape.tiles, tiles_at_once<BF16, N>(d.shape));
    d.shape.adds = p.epilogue == CUDA_ADD_F32 && together == d.shape.tiles;
    launch_early(kernel_of<BF16, N>(width), dim3(together * d.shape.splits), dim3(THREADS), SHARED_SIZE, s,
                 d.shape.joins ? d.shape.splits : 1, d, w, act);
    return true;
}

template <bool BF16> static bool launch_rows(cudaStream_t s, const cuda_product &p, uint32_t splits)
{
    return p.rows <= 16   ? launch_stream<BF16, 16>(s, p, splits)
           : p.rows <= 32 ? launch_stream<BF16, 32>(s, p, splits)
           : p.rows <= 64 ? launch_stream<BF16, 64>(s, p, splits)
                          : launch_stream<BF16, 128>(s, p, splits);
}

bool cuda_product_hopper(cudaStream_t s, const struct cuda_product *p, uint32_t splits)
{
    if (p->m.form != (p->act_bf16 ? CUDA_BF16 : CUDA_F16) || p->rows > CUDA_STREAM_ROWS || p->m.rows % 16 ||
        p->m.columns % 8 || p->act_stride % 8 || p->out_stride % 8)
        return false;
    return p->act_bf16 ? launch_rows<true>(s, *p, splits) : launch_rows<false>(s, *p, splits);
}
