/* matmul_many: the loops around quantised products of MANY_ROWS rows of activations or more on x86: the body of two files,
 * matmul_many_avx2.c and matmul_many_avx512.c.
 *
 * A pair of tiles is opened once for up to PART_ROWS rows: codes as bytes, factors as floats, some blocks at a time, so that
 * they stay in the first-level cache. Then types cost what their sums cost, whatever their unpacking takes. Four rows by two
 * tiles are summed at a time: one load of codes for four rows, one broadcast of activations for two tiles. While a part is
 * multiplied, the weights of the next one are asked for.
 *
 *   for each PART_BLOCKS of the columns   activations of all rows to panels, in the second-level cache
 *     for each pair of tiles
 *       for each OPEN_BLOCKS of the part  open_tile
 *         for each four rows              the pair's run: acc += sums
 *
 * The file that includes it defines
 *   MANY_TARGET            the attribute that lets a function use its instructions
 *   MANY_MATMUL            the name of the function that is made: returns how many rows, from the first on, it has done,
 *                          less than MANY_ROWS are left
 *   MANY_TILE_ROWS         rows of a tile
 *   MANY_OFFSET(type)      what sums of codes have to be freed of, times sum(q): goes to PANEL_START
 *   struct open_pair       blocks of a pair of tiles as its run wants them
 *   open_tile(type, m, tile, begin, count, pair, t)   fills in tile t of the pair
 *   pair_function, pair_run_of(type, tiles)           the run for a pair, or a single tile
 *   panel_finish(type, panel, count)                  what a panel needs besides */
#include <immintrin.h>

#define MANY_INLINE static inline __attribute__((always_inline)) MANY_TARGET

/* `count` of four dwords, zeros behind them. */
MANY_INLINE __m128 load_up_to_four(const void *from, size_t count)
{
    float four[4] = {0};
    if (count >= 4)
        return _mm_castsi128_ps(_mm_loadu_si128(from));
    memcpy(four, from, sizeof(float) * count);
    return _mm_loadu_ps(four);
}

/* The same value of four rows for blocks of a panel: `values` of block i + j go to `to` of block j. */
MANY_INLINE void store_turned(__m128 values[4], size_t count, uint8_t *to)
{
    _MM_TRANSPOSE4_PS(values[0], values[1], values[2], values[3]);
    for (size_t j = 0; j < count; j++)
        _mm_storeu_si128((__m128i *)(to + GROUP_SIZE * j), _mm_castps_si128(values[j]));
}

/* panel_fill of four rows, four blocks at a time. */
MANY_INLINE void fill_four(const struct activations *a, size_t row, size_t begin, size_t count,
                           const int32_t offset, uint8_t *panel)
{
    for (size_t i = 0; i < count; i += 4, panel += GROUP_SIZE * 4) {
        const size_t blocks = TD_MIN(count - i, (size_t)4);
        __m128 d[OPEN_ROWS], s[OPEN_ROWS], start[OPEN_ROWS];
#pragma GCC unroll 4
        for (unsigned r = 0; r < OPEN_ROWS; r++) {
            const size_t at = (row + r) * a->block_stride + begin + i;
            const int8_t *q = a->q + (row + r) * a->q_stride + (begin + i) * NUMERICS_BLOCK;
            d[r] = load_up_to_four(a->d + at, blocks);
            s[r] = load_up_to_four(a->s + at, blocks);
            start[r] = _mm_castsi128_ps(_mm_mullo_epi32(
                _mm_castps_si128(load_up_to_four(a->sum + at, blocks)), _mm_set1_epi32(-offset)));
            for (size_t j = 0; j < blocks; j++)
                memcpy(panel + GROUP_SIZE * j + 32 * r, q + j * NUMERICS_BLOCK, NUMERICS_BLOCK);
        }
        store_turned(d, blocks, panel + PANEL_D(OPEN_ROWS));
        store_turned(s, blocks, panel + PANEL_S(OPEN_ROWS));
        store_turned(start, blocks, panel + PANEL_START(OPEN_ROWS));
    }
}

/* --- parts --------------------------------------------------------------------------------------- */

/* Of the columns: blocks [begin, begin + count); of the rows: row_count, a multiple of OPEN_ROWS. */
struct part {
    const struct cpu_matrix *m;
    const uint8_t *panels; /* [row_count / OPEN_ROWS][PART_BLOCKS] */
    float *const *out;
    uint32_t row_count, tile_end;
    size_t begin, count, open_count;
};

/* Memory that is wanted next: codes and heads of two tiles. */
struct ahead {
    const uint8_t *at[2 * PAIR];
    size_t size[2 * PAIR], step[2 * PAIR]; /* bytes; of these at a time */
};

/* Blocks [begin, begin + count), in as many steps as there are groups of rows. */
MANY_INLINE void look_ahead(const uint32_t type, const struct part *part, uint32_t tile, size_t begin,
                            size_t count, struct ahead *a)
{
    const size_t units = count / tile_unit_blocks(type), steps = part->row_count / OPEN_ROWS;
    memset(a, 0, sizeof *a);
    for (unsigned t = 0; t < PAIR && tile + t < part->tile_end; t++) {
        const struct tile_part p = tile_part_at(type, part->m, MANY_TILE_ROWS, tile + t, begin);
        const size_t sizes[2] = {units * p.unit_size, units * p.head_size};
        for (unsigned i = 0; i < 2; i++) {
            a->at[2 * t + i] = i ? p.head : p.unit;
            a->size[2 * t + i] = sizes[i];
            a->step[2 * t + i] = align_up((sizes[i] + steps - 1) / steps, 64);
        }
    }
}

MANY_INLINE void ask_ahead(const struct ahead *a, size_t step)
{
    for (unsigned i = 0; i < 2 * PAIR; i++) {
        const size_t begin = a->step[i] * step, end = TD_MIN(begin + a->step[i], a->size[i]);
        for (size_t at = begin; at < end; at += 64)
            _mm_prefetch((const char *)a->at[i] + at, _MM_HINT_T1);
    }
}

/* Blocks [at, at + count) of the part with the pair of tiles that begins with `tile`. */
MANY_INLINE void pair_part(const uint32_t type, const struct part *part, uint32_t tile, size_t at,
                           size_t count, const struct ahead *ahead)
{
    const unsigned tiles = TD_MIN(part->tile_end - tile, (uint32_t)PAIR);
    struct open_pair pair;
    const pair_function run = pair_run_of(type, tiles);
    for (unsigned t = 0; t < tiles; t++)
        open_tile(type, part->m, tile + t, part->begin + at, count, &pair, t);
    const uint8_t *panel = part->panels + GROUP_SIZE * at;
    for (uint32_t r = 0; r < part->row_count; r += OPEN_ROWS, panel += GROUP_SIZE * PART_BLOCKS) {
        ask_ahead(ahead, r / OPEN_ROWS);
        run(&pair, count, panel, part->begin + at == 0, part->m->rows - tile * MANY_TILE_ROWS, part->out + r,
            (size_t)tile * MANY_TILE_ROWS);
    }
}

MANY_INLINE void run_part(const uint32_t type, const struct part *part, uint32_t tile_begin)
{
    for (uint32_t tile = tile_begin; tile < part->tile_end; tile += PAIR)
        for (size_t at = 0; at < part->count; at += part->open_count) {
            const bool is_last = at + part->open_count >= part->count;
            const size_t next = is_last ? 0 : at + part->open_count;
            struct ahead ahead;
            look_ahead(type, part, is_last ? tile + PAIR : tile, part->begin + next,
                       TD_MIN(part->count - next, part->open_count), &ahead);
            pair_part(type, part, tile, at, TD_MIN(part->count - at, part->open_count), &ahead);
        }
}

/* The smallest even share of `count` blocks that is at most `most`, in whole units. */
static size_t share(uint32_t type, size_t count, size_t most)
{
    const size_t parts = (count + most - 1) / most;
    return align_up((count + parts - 1) / parts, tile_unit_blocks(type));
}

MANY_INLINE void many_quantised(const uint32_t type, const struct cpu_matrix *m, const struct activations *a,
                                size_t row, uint32_t row_count, float *const *out, uint32_t tile_begin,
                                uint32_t tile_end)
{
    const size_t blocks = m->columns / NUMERICS_BLOCK, part_count = share(type, blocks, PART_BLOCKS);
    _Alignas(64) uint8_t panels[PANEL_ROW_SIZE * PART_BLOCKS * PART_ROWS];
    struct part part = {m, panels, out, row_count, tile_end, 0, 0, 0};
    for (; part.begin < blocks; part.begin += part_count) {
        part.count = TD_MIN(blocks - part.begin, part_count);
        part.open_count = share(type, part.count, OPEN_BLOCKS);
        for (uint32_t r = 0; r < row_count; r += OPEN_ROWS) {
            uint8_t *panel = panels + (size_t)PANEL_ROW_SIZE * PART_BLOCKS * r;
            fill_four(a, row + r, part.begin, part.count, MANY_OFFSET(type), panel);
            panel_finish(type, panel, part.count);
        }
        run_part(type, &part, tile_begin);
    }
}

typedef void (*many_function)(const struct cpu_matrix *m, const struct activations *a, size_t row,
                              uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end);

#define MANY(name, type)                                                                                     \
    MANY_TARGET static void name(const struct cpu_matrix *m, const struct activations *a, size_t row,        \
                                 uint32_t row_count, float *const *out, uint32_t tile_begin,                 \
                                 uint32_t tile_end)                                                          \
    {                                                                                                        \
        many_quantised(type, m, a, row, row_count, out, tile_begin, tile_end);                               \
    }
MANY(q4_0, GGUF_Q4_0)
MANY(q4_1, GGUF_Q4_1)
MANY(q5_0, GGUF_Q5_0)
MANY(q5_1, GGUF_Q5_1)
MANY(q8_0, GGUF_Q8_0)
MANY(q4_k, GGUF_Q4_K)
MANY(q5_k, GGUF_Q5_K)
MANY(q6_k, GGUF_Q6_K)

static const many_function functions[] = {
    [GGUF_Q4_0] = q4_0, [GGUF_Q4_1] = q4_1, [GGUF_Q5_0] = q5_0, [GGUF_Q5_1] = q5_1,
    [GGUF_Q8_0] = q8_0, [GGUF_Q4_K] = q4_k, [GGUF_Q5_K] = q5_k, [GGUF_Q6_K] = q6_k,
};

uint32_t MANY_MATMUL(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                     uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end)
{
    uint32_t done = 0;
    while (row_count - done >= MANY_ROWS) {
        const uint32_t rows = TD_MIN(row_count - done, (uint32_t)PART_ROWS) / OPEN_ROWS * OPEN_ROWS;
        functions[m->type](m, a, first_row + done, rows, out + done, tile_begin, tile_end);
        done += rows;
    }
    return done;
}
