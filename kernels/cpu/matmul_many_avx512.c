/* matmul_many_avx512: quantised products (matmul_avx512.h) of eight rows of activations or more.
 *
 * A pair of tiles is opened once for up to AVX512_PART_ROWS rows: codes as unsigned bytes, factors as floats, some blocks at
 * a time, so that they stay in the first-level cache. Then every type costs the same, whatever its unpacking takes. Four
 * rows by two tiles are summed at a time: eight sums and eight results in registers, one load of codes for four rows, one
 * broadcast of activations for two tiles. While a part is multiplied, the weights of the next one are asked for.
 *
 *   for each PANEL_PART of the columns    activations of all rows to panels, in the second-level cache
 *     for each pair of tiles
 *       for each OPEN_BLOCKS of the part  open
 *         for each four rows              acc += sums */
#if defined(__x86_64__)
#include "kernels/cpu/matmul_avx512.h"

/* --- many rows: a pair of tiles is opened once for all of them ------------------------------------ */

#define PAIR        2
#define OPEN_ROWS   4  /* rows of activations that meet a pair at a time: the sums fill the registers */
#define OPEN_BLOCKS 16 /* of a pair at a time: they stay in the first-level cache */
#define PART_BLOCKS 32 /* of activations at a time */
#define GROUP_SIZE  ((size_t)PANEL_ROW_SIZE * OPEN_ROWS) /* bytes of a block of a panel */

struct open_pair {
    _Alignas(VECTOR) uint8_t codes[OPEN_BLOCKS][8][PAIR][VECTOR]; /* unsigned */
    float dw[OPEN_BLOCKS][PAIR][16], mw[OPEN_BLOCKS][PAIR][16], half[OPEN_BLOCKS][2][PAIR][16];
};

/* Blocks [begin, begin + count) of a tile, as tile t of the pair. */
AVX512_INLINE void open_tile(const uint32_t type, const struct cpu_matrix *m, uint32_t tile, size_t begin,
                             size_t count, struct open_pair *pair, const unsigned t)
{
    const unsigned inner = tile_unit_blocks(type);
    struct tile_part p = tile_part_at(type, m, tile, begin);
    for (size_t i = 0; i < count; i += inner, p.unit += p.unit_size, p.head += p.head_size)
#pragma GCC unroll 8
        for (unsigned b = 0; b < inner; b++) {
            const struct block_scales s = block_scales(type, b, p.head);
            _mm512_store_ps(pair->dw[i + b][t], s.dw);
            if (weight_has_minimum(type))
                _mm512_store_ps(pair->mw[i + b][t], s.mw);
            for (unsigned half = 0; type == GGUF_Q6_K && half < 2; half++)
                _mm512_store_ps(pair->half[i + b][half][t], s.half[half]);
#pragma GCC unroll 8
            for (unsigned g = 0; g < 8; g++)
                _mm512_store_si512(pair->codes[i + b][g][t], unit_codes(type, p.unit, b, g));
        }
}

/* Columns 4 * begin .. 4 * end of a block. sums: [OPEN_ROWS][tiles]. */
AVX512_INLINE void pair_sums(const unsigned tiles, const unsigned begin, const unsigned end,
                             const struct open_pair *pair, size_t block, const uint8_t *panel, __m512i *sums)
{
#pragma GCC unroll 8
    for (unsigned g = begin; g < end; g++)
#pragma GCC unroll 4
        for (unsigned r = 0; r < OPEN_ROWS; r++) {
            const __m512i q = broadcast_word(panel + 32 * r + 4 * g);
#pragma GCC unroll 2
            for (unsigned t = 0; t < tiles; t++)
                sums[r * tiles + t] =
                    _mm512_dpbusd_epi32(sums[r * tiles + t], _mm512_load_si512(pair->codes[block][g][t]), q);
        }
}

/* acc: [OPEN_ROWS][tiles]. type stands for all that are summed alike. */
AVX512_INLINE void pair_block(const uint32_t type, const unsigned tiles, const struct open_pair *pair,
                              size_t block, const uint8_t *panel, __m512 *acc)
{
    const unsigned rows = OPEN_ROWS;
    __m512i sums[OPEN_ROWS * PAIR], last[OPEN_ROWS * PAIR];
#pragma GCC unroll 8
    for (unsigned i = 0; i < rows * tiles; i++) {
        sums[i] = sum_start(type, rows, i / tiles, panel);
        if (type == GGUF_Q6_K)
            last[i] = broadcast_word(panel + PANEL_HALF(rows) + 4 * (i / tiles));
    }
    pair_sums(tiles, 0, 4, pair, block, panel, sums);
    pair_sums(tiles, 4, 8, pair, block, panel, type == GGUF_Q6_K ? last : sums);
#pragma GCC unroll 8
    for (unsigned i = 0; i < rows * tiles; i++) {
        const unsigned t = i % tiles;
        const __m512 isum = type == GGUF_Q6_K
                                ? sum_of_halves(sums[i], last[i], _mm512_load_ps(pair->half[block][0][t]),
                                                _mm512_load_ps(pair->half[block][1][t]))
                                : _mm512_cvtepi32_ps(sums[i]);
        acc[i] = scaled_add(type, rows, i / tiles, panel, isum, _mm512_load_ps(pair->dw[block][t]),
                            _mm512_load_ps(pair->mw[block][t]), acc[i]);
    }
}

/* `count` blocks of a pair of tiles, or of its first only, with OPEN_ROWS rows. */
AVX512_INLINE void pair_run(const uint32_t type, const unsigned tiles, const struct open_pair *pair,
                            size_t count, const uint8_t *panel, bool is_first, const __mmask16 *held,
                            float *const *out, size_t at)
{
    __m512 acc[OPEN_ROWS * PAIR];
#pragma GCC unroll 8
    for (unsigned i = 0; i < OPEN_ROWS * tiles; i++)
        acc[i] = is_first ? _mm512_setzero_ps()
                          : _mm512_maskz_loadu_ps(held[i % tiles], out[i / tiles] + at + 16 * (i % tiles));
    for (size_t block = 0; block < count; block++, panel += (size_t)PANEL_ROW_SIZE * OPEN_ROWS)
        pair_block(type, tiles, pair, block, panel, acc);
#pragma GCC unroll 8
    for (unsigned i = 0; i < OPEN_ROWS * tiles; i++)
        _mm512_mask_storeu_ps(out[i / tiles] + at + 16 * (i % tiles), held[i % tiles], acc[i]);
}

#define PAIR_RUN(name, type, tiles)                                                                          \
    AVX512 static void name(const struct open_pair *pair, size_t count, const uint8_t *panel, bool is_first, \
                            const __mmask16 *held, float *const *out, size_t at)                             \
    {                                                                                                        \
        pair_run(type, tiles, pair, count, panel, is_first, held, out, at);                                  \
    }
PAIR_RUN(centred_one, GGUF_Q4_0, 1)
PAIR_RUN(centred_two, GGUF_Q4_0, 2)
PAIR_RUN(minimum_one, GGUF_Q4_1, 1)
PAIR_RUN(minimum_two, GGUF_Q4_1, 2)
PAIR_RUN(halves_one, GGUF_Q6_K, 1)
PAIR_RUN(halves_two, GGUF_Q6_K, 2)

typedef void (*pair_function)(const struct open_pair *pair, size_t count, const uint8_t *panel, bool is_first,
                              const __mmask16 *held, float *const *out, size_t at);

/* The same value of four rows for blocks of a panel: `values` of block i + j go to `to` of block j. */
AVX512_INLINE void store_turned(__m128 values[4], size_t count, uint8_t *to)
{
    _MM_TRANSPOSE4_PS(values[0], values[1], values[2], values[3]);
    for (size_t j = 0; j < count; j++)
        _mm_storeu_si128((__m128i *)(to + GROUP_SIZE * j), _mm_castps_si128(values[j]));
}

/* panel_fill of four rows, four blocks at a time. */
AVX512_INLINE void fill_four(const struct activations *a, size_t row, size_t begin, size_t count,
                             const int32_t offset, uint8_t *panel)
{
    for (size_t i = 0; i < count; i += 4, panel += GROUP_SIZE * 4) {
        const size_t blocks = TD_MIN(count - i, (size_t)4);
        const __mmask8 mask = (__mmask8)avx512_first((uint32_t)blocks);
        __m128 d[OPEN_ROWS], s[OPEN_ROWS], start[OPEN_ROWS];
#pragma GCC unroll 4
        for (unsigned r = 0; r < OPEN_ROWS; r++) {
            const size_t at = (row + r) * a->block_stride + begin + i;
            const int8_t *q = a->q + (row + r) * a->q_stride + (begin + i) * NUMERICS_BLOCK;
            d[r] = _mm_maskz_loadu_ps(mask, a->d + at);
            s[r] = _mm_maskz_loadu_ps(mask, a->s + at);
            start[r] = _mm_castsi128_ps(
                _mm_mullo_epi32(_mm_maskz_loadu_epi32(mask, a->sum + at), _mm_set1_epi32(-offset)));
            for (size_t j = 0; j < blocks; j++)
                memcpy(panel + GROUP_SIZE * j + 32 * r, q + j * NUMERICS_BLOCK, NUMERICS_BLOCK);
        }
        store_turned(d, blocks, panel + PANEL_D(OPEN_ROWS));
        store_turned(s, blocks, panel + PANEL_S(OPEN_ROWS));
        store_turned(start, blocks, panel + PANEL_START(OPEN_ROWS));
    }
}

/* --- parts --------------------------------------------------------------------------------------- */

struct
    part { /* of the columns: blocks [begin, begin + count); of the rows: row_count, a multiple of OPEN_ROWS */
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
AVX512_INLINE void look_ahead(const uint32_t type, const struct part *part, uint32_t tile, size_t begin,
                              size_t count, struct ahead *a)
{
    const size_t units = count / tile_unit_blocks(type), steps = part->row_count / OPEN_ROWS;
    memset(a, 0, sizeof *a);
    for (unsigned t = 0; t < PAIR && tile + t < part->tile_end; t++) {
        const struct tile_part p = tile_part_at(type, part->m, tile + t, begin);
        const size_t sizes[2] = {units * p.unit_size, units * p.head_size};
        for (unsigned i = 0; i < 2; i++) {
            a->at[2 * t + i] = i ? p.head : p.unit;
            a->size[2 * t + i] = sizes[i];
            a->step[2 * t + i] = align_up((sizes[i] + steps - 1) / steps, VECTOR);
        }
    }
}

AVX512_INLINE void ask_ahead(const struct ahead *a, size_t step)
{
    for (unsigned i = 0; i < 2 * PAIR; i++) {
        const size_t begin = a->step[i] * step, end = TD_MIN(begin + a->step[i], a->size[i]);
        for (size_t at = begin; at < end; at += VECTOR)
            _mm_prefetch((const char *)a->at[i] + at, _MM_HINT_T1);
    }
}

/* Blocks [at, at + count) of the part with the pair of tiles that begins with `tile`. */
AVX512_INLINE void pair_part(const uint32_t type, const struct part *part, uint32_t tile, size_t at,
                             size_t count, const struct ahead *ahead)
{
    static const pair_function centred[] = {centred_one, centred_two}, minimum[] = {minimum_one, minimum_two},
                               halves[] = {halves_one, halves_two};
    const pair_function *run = weight_has_minimum(type) ? minimum : type == GGUF_Q6_K ? halves : centred;
    const unsigned tiles = TD_MIN(part->tile_end - tile, (uint32_t)PAIR);
    struct open_pair pair;
    __mmask16 held[PAIR] = {0};
    for (unsigned t = 0; t < tiles; t++) {
        held[t] = avx512_first(part->m->rows - (tile + t) * AVX512_TILE_ROWS);
        open_tile(type, part->m, tile + t, part->begin + at, count, &pair, t);
    }
    const uint8_t *panel = part->panels + GROUP_SIZE * at;
    for (uint32_t r = 0; r < part->row_count; r += OPEN_ROWS, panel += GROUP_SIZE * PART_BLOCKS) {
        ask_ahead(ahead, r / OPEN_ROWS);
        run[tiles - 1](&pair, count, panel, part->begin + at == 0, held, part->out + r,
                       (size_t)tile * AVX512_TILE_ROWS);
    }
}

AVX512_INLINE void run_part(const uint32_t type, const struct part *part, uint32_t tile_begin)
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

AVX512_INLINE void many_quantised(const uint32_t type, const struct cpu_matrix *m,
                                  const struct activations *a, size_t row, uint32_t row_count,
                                  float *const *out, uint32_t tile_begin, uint32_t tile_end)
{
    const size_t blocks = m->columns / NUMERICS_BLOCK, part_count = share(type, blocks, PART_BLOCKS);
    _Alignas(64) uint8_t panels[PANEL_ROW_SIZE * PART_BLOCKS * AVX512_PART_ROWS];
    struct part part = {m, panels, out, row_count, tile_end, 0, 0, 0};
    for (; part.begin < blocks; part.begin += part_count) {
        part.count = TD_MIN(blocks - part.begin, part_count);
        part.open_count = share(type, part.count, OPEN_BLOCKS);
        for (uint32_t r = 0; r < row_count; r += OPEN_ROWS) {
            uint8_t *panel = panels + (size_t)PANEL_ROW_SIZE * PART_BLOCKS * r;
            fill_four(a, row + r, part.begin, part.count, code_offset(type), panel);
            if (type == GGUF_Q6_K)
                split_starts(panel, OPEN_ROWS, part.count);
        }
        run_part(type, &part, tile_begin);
    }
}

typedef void (*many_function)(const struct cpu_matrix *m, const struct activations *a, size_t row,
                              uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end);

#define MANY(name, type)                                                                                     \
    AVX512 static void name(const struct cpu_matrix *m, const struct activations *a, size_t row,             \
                            uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end)   \
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

uint32_t avx512_matmul_many(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                            uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end)
{
    uint32_t done = 0;
    while (row_count - done >= MANY_ROWS) {
        const uint32_t rows = TD_MIN(row_count - done, (uint32_t)AVX512_PART_ROWS) / OPEN_ROWS * OPEN_ROWS;
        functions[m->type](m, a, first_row + done, rows, out + done, tile_begin, tile_end);
        done += rows;
    }
    return done;
}
#endif
