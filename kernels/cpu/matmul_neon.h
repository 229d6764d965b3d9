/* matmul_neon: products of tiles of 8 weight rows (tiles.h) with rows of activations, on 64-bit Arm. The body of three
 * files: matmul_neon.c for every processor, matmul_dotprod_neon.c for those with sdot, matmul_i8mm_neon.c for those with smmla
 * too. They define
 *   NEON_TARGET    the attribute that lets a function use their instructions
 *   NEON_MATMUL    the name of the function that is made
 *   NEON_DOT(acc, weights, q, lane)   acc[i] += sum over j < 4 of weights[4 * i + j] * q[4 * lane + j], in int32; `lane` is
 *                  a literal, because the instructions want it so even where nothing is optimised
 *
 * Quantised: four activations of a row meet four codes of each of four weight rows: one lane a row, so nothing is ever
 * summed across lanes. Codes of Q4_0 and Q5_0 stay unsigned; the sum begins with -offset * sum(activations). All integer
 * sums are exact, so their order is free. A block of a tile is unpacked once for up to four rows of activations: with
 * eight integer and eight float accumulators that fills the 32 registers.
 *
 * Float: an outer product, four rows of weights a vector, one activation broadcast. */
#include "kernels/cpu/neon.h"
#include "kernels/cpu/panel.h"
#include "kernels/cpu/tiles.h"

#define HALVES 2 /* vectors of four rows in a tile */

#define TILE_INLINE static inline __attribute__((always_inline)) NEON_TARGET

TILE_INLINE int32x4_t dot_lane(int32x4_t acc, int8x16_t weights, int8x16_t q, const unsigned lane)
{
    return lane == 0   ? NEON_DOT(acc, weights, q, 0)
           : lane == 1 ? NEON_DOT(acc, weights, q, 1)
           : lane == 2 ? NEON_DOT(acc, weights, q, 2)
                       : NEON_DOT(acc, weights, q, 3);
}

/* Codes of columns 4 * g .. of block b of a unit, of half a tile's rows; Q6_K centred, others as in the file. */
TILE_INLINE int8x16_t unit_codes(const uint32_t type, const uint8_t *unit, const unsigned b, const unsigned g,
                                 const unsigned half)
{
    const bool k45 = type == GGUF_Q4_K || type == GGUF_Q5_K, k6 = type == GGUF_Q6_K;
    unit += 16 * half;
    if (type == GGUF_Q8_0)
        return vreinterpretq_s8_u8(vld1q_u8(unit + 32 * g));
    const unsigned vector = k45 ? 8 * (b / 2) + g : k6 ? 16 * (b / 4) + 8 * (b % 2) + g : g % 4;
    const bool is_high = k45 ? b % 2 : k6 ? b % 4 / 2 : g / 4;
    const uint8x16_t pair = vld1q_u8(unit + 32 * vector);
    uint8x16_t codes = is_high ? vshrq_n_u8(pair, 4) : vandq_u8(pair, vdupq_n_u8(15));
    if (type == GGUF_Q4_0 || type == GGUF_Q4_1 || type == GGUF_Q4_K)
        return vreinterpretq_s8_u8(codes);
    /* bit `at` of every byte of `high`, of Q6_K the next one too, belongs at bit 4 */
    const int at = (int)(k6 ? 2 * (b % 4) : k45 ? b : g);
    uint8x16_t high = vld1q_u8(unit + 32 * (k6 ? 32 + 8 * (b / 4) + g : k45 ? 32 + g : 4));
    high = vshlq_u8(high, vdupq_n_s8((int8_t)(4 - at))); /* to the right where that is negative */
    codes = vorrq_u8(codes, vandq_u8(high, vdupq_n_u8(k6 ? 0x30 : 0x10)));
    return k6 ? vsubq_s8(vreinterpretq_s8_u8(codes), vdupq_n_s8(32)) : vreinterpretq_s8_u8(codes);
}

/* Adds the columns of 16: those of the first (part 0) or second half of block b. sums: [rows][HALVES]. */
TILE_INLINE void part_sums(const uint32_t type, const unsigned rows, const unsigned b, const unsigned part,
                           const uint8_t *unit, const uint8_t *panel, int32x4_t *sums)
{
    int8x16_t q[4];
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++)
        q[r] = vreinterpretq_s8_u8(vld1q_u8(panel + 32 * r + 16 * part));
#pragma GCC unroll 8
    for (unsigned lane = 0; lane < 4; lane++)
#pragma GCC unroll 8
        for (unsigned half = 0; half < HALVES; half++) {
            int8x16_t codes = unit_codes(type, unit, b, 4 * part + lane, half);
#pragma GCC unroll 8
            for (unsigned r = 0; r < rows; r++)
                sums[r * HALVES + half] = dot_lane(sums[r * HALVES + half], codes, q[r], lane);
        }
}

/* Four scales of a K type. */
TILE_INLINE int32x4_t load_scales(const uint8_t *scales)
{
    int32_t word;
    memcpy(&word, scales, sizeof word);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word)))));
}

TILE_INLINE float panel_float(const uint8_t *at)
{
    float f;
    memcpy(&f, at, sizeof f);
    return f;
}

/* What the sums of row r begin with. */
TILE_INLINE int32_t sum_start(const uint32_t type, const unsigned rows, const unsigned r,
                              const uint8_t *panel)
{
    int32_t start = 0;
    if (type == GGUF_Q4_0 || type == GGUF_Q5_0)
        memcpy(&start, panel + PANEL_START(rows) + 4 * (size_t)r, sizeof start);
    return start;
}

#ifdef NEON_MMLA
/* Parts [begin, end) of block b for an even number of rows, two by two: a sum holds two weight rows by two rows, so the
 * dwords of weights are turned before, and the sums after. sums: [rows][HALVES], added to. */
TILE_INLINE void sums_by_pairs(const uint32_t type, const unsigned rows, const unsigned b,
                               const unsigned begin, const unsigned end, const uint8_t *unit,
                               const uint8_t *panel, int32x4_t *sums)
{
    int32x4_t square[2][HALVES]
                    [2]; /* of rows 2 * pair and the next: weight rows 0 and 1, 2 and 3 of a half */
#pragma GCC unroll 8
    for (unsigned i = 0; i < rows / 2 * HALVES * 2; i++)
        square[i / 4][i / 2 % 2][i % 2] = vdupq_n_s32(0);
#pragma GCC unroll 8
    for (unsigned g = 4 * begin; g < 4 * end; g += 2) { /* eight columns */
        int8x16_t q[2];
#pragma GCC unroll 2
        for (unsigned pair = 0; pair < rows / 2; pair++)
            q[pair] = vreinterpretq_s8_u8(
                vcombine_u8(vld1_u8(panel + 64 * pair + 4 * g), vld1_u8(panel + 64 * pair + 32 + 4 * g)));
#pragma GCC unroll 2
        for (unsigned half = 0; half < HALVES; half++) {
            const int32x4_t left = vreinterpretq_s32_s8(unit_codes(type, unit, b, g, half)),
                            right = vreinterpretq_s32_s8(unit_codes(type, unit, b, g + 1, half));
            const int8x16_t weights[2] = {vreinterpretq_s8_s32(vzip1q_s32(left, right)),
                                          vreinterpretq_s8_s32(vzip2q_s32(left, right))};
#pragma GCC unroll 4
            for (unsigned i = 0; i < rows / 2 * 2; i++)
                square[i / 2][half][i % 2] = NEON_MMLA(square[i / 2][half][i % 2], weights[i % 2], q[i / 2]);
        }
    }
#pragma GCC unroll 8
    for (unsigned i = 0; i < rows * HALVES; i++) {
        const int32x4_t *two = square[i / HALVES / 2][i % HALVES];
        sums[i] =
            vaddq_s32(sums[i], i / HALVES % 2 ? vuzp2q_s32(two[0], two[1]) : vuzp1q_s32(two[0], two[1]));
    }
}
#endif

/* Parts [begin, end) of block b. sums: [rows][HALVES], added to. */
TILE_INLINE void parts_sums(const uint32_t type, const unsigned rows, const unsigned b, const unsigned begin,
                            const unsigned end, const uint8_t *unit, const uint8_t *panel, int32x4_t *sums)
{
#ifdef NEON_MMLA
    if (rows % 2 == 0) {
        sums_by_pairs(type, rows, b, begin, end, unit, panel, sums);
        return;
    }
#endif
#pragma GCC unroll 2
    for (unsigned part = begin; part < end; part++)
        part_sums(type, rows, b, part, unit, panel, sums);
}

/* isum of block b of a unit. scales: of the block, of Q6_K. */
TILE_INLINE void block_sums(const uint32_t type, const unsigned rows, const unsigned b, const uint8_t *unit,
                            const uint8_t *scales, const uint8_t *panel, int32x4_t *isum)
{
#pragma GCC unroll 8
    for (unsigned i = 0; i < rows * HALVES; i++)
        isum[i] = vdupq_n_s32(sum_start(type, rows, i / HALVES, panel));
    if (type != GGUF_Q6_K) {
        parts_sums(type, rows, b, 0, 2, unit, panel, isum);
        return;
    }
    int32x4_t second[4 * HALVES];
#pragma GCC unroll 8
    for (unsigned i = 0; i < rows * HALVES; i++)
        second[i] = vdupq_n_s32(0);
    parts_sums(type, rows, b, 0, 1, unit, panel, isum);
    parts_sums(type, rows, b, 1, 2, unit, panel, second);
#pragma GCC unroll 8
    for (unsigned i = 0; i < rows * HALVES; i++) {
        isum[i] = vmulq_s32(isum[i], load_scales(scales + 4 * (size_t)(i % HALVES)));
        isum[i] = vmlaq_s32(isum[i], second[i], load_scales(scales + TILE_ROWS + 4 * (size_t)(i % HALVES)));
    }
}

/* Block b of a unit: adds to acc [rows][HALVES]. head: d, m, scales of the unit. */
TILE_INLINE void block_add(const uint32_t type, const unsigned rows, const unsigned b, const uint8_t *unit,
                           const uint8_t *head, const uint8_t *panel, float32x4_t *acc)
{
    const bool minimum = weight_has_minimum(type), k45 = type == GGUF_Q4_K || type == GGUF_Q5_K;
    const uint8_t *scales = head + (minimum ? 32 : 16) + 16 * b;
    int32x4_t isum[4 * HALVES];
    block_sums(type, rows, b, unit, scales, panel, isum);
#pragma GCC unroll 8
    for (unsigned half = 0; half < HALVES; half++) {
        float32x4_t dw = neon_load_f16(head + 8 * half),
                    mw = minimum ? neon_load_f16(head + 16 + 8 * half) : vdupq_n_f32(0);
        if (k45) { /* both 0..63, so signed or not is the same */
            dw = vmulq_f32(dw, vcvtq_f32_s32(load_scales(scales + 4 * half)));
            mw = vnegq_f32(vmulq_f32(mw, vcvtq_f32_s32(load_scales(scales + TILE_ROWS + 4 * half))));
        }
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++) {
            float32x4_t scale = vmulq_n_f32(dw, panel_float(panel + PANEL_D(rows) + 4 * (size_t)r)),
                        *to = &acc[r * HALVES + half];
            *to = vfmaq_f32(*to, vcvtq_f32_s32(isum[r * HALVES + half]), scale);
            if (minimum)
                *to = vfmaq_n_f32(*to, mw, panel_float(panel + PANEL_S(rows) + 4 * (size_t)r));
        }
    }
}

/* The last tile of a matrix may have fewer rows than eight. */
TILE_INLINE void load_outputs(const float *out, uint32_t count, float32x4_t values[HALVES])
{
    float all[TILE_ROWS] = {0};
    if (count < TILE_ROWS) {
        memcpy(all, out, sizeof(float) * count);
        out = all;
    }
    values[0] = vld1q_f32(out), values[1] = vld1q_f32(out + 4);
}

TILE_INLINE void store_outputs(float *out, const float32x4_t values[HALVES], uint32_t count)
{
    float all[TILE_ROWS] = {0};
    float *to = count < TILE_ROWS ? all : out;
    vst1q_f32(to, values[0]), vst1q_f32(to + 4, values[1]);
    if (count < TILE_ROWS)
        memcpy(out, all, sizeof(float) * count);
}

/* One tile, blocks [begin, begin + count). */
TILE_INLINE void tile_quantised(const uint32_t type, const unsigned rows, const struct cpu_matrix *m,
                                const uint8_t *panel, size_t begin, size_t count, float *const *out,
                                uint32_t tile)
{
    const unsigned inner = tile_unit_blocks(type);
    const size_t unit_size = (size_t)32 * tile_unit_vectors(type),
                 head_size = tile_head_size(type, TILE_ROWS);
    const uint8_t *base = (const uint8_t *)m->packed + tile_size(type, m->columns, TILE_ROWS) * tile,
                  *unit = base + unit_size * (begin / inner),
                  *head = base + tile_codes_size(type, m->columns, TILE_ROWS) + head_size * (begin / inner);
    const uint32_t held = m->rows - tile * TILE_ROWS;
    const size_t at = (size_t)tile * TILE_ROWS;
    float32x4_t acc[4 * HALVES];
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++) {
        acc[r * HALVES] = acc[r * HALVES + 1] = vdupq_n_f32(0);
        if (begin > 0)
            load_outputs(out[r] + at, held, acc + r * (size_t)HALVES);
    }
    for (size_t block = 0; block < count; block += inner, unit += unit_size, head += head_size)
#pragma GCC unroll 8
        for (unsigned b = 0; b < inner; b++, panel += (size_t)PANEL_ROW_SIZE * rows)
            block_add(type, rows, b, unit, head, panel, acc);
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++)
        store_outputs(out[r] + at, acc + r * (size_t)HALVES, held);
}

TILE_INLINE void rows_quantised(const uint32_t type, const unsigned rows, const struct cpu_matrix *m,
                                const struct activations *a, size_t row, float *const *out,
                                uint32_t tile_begin, uint32_t tile_end)
{
    const size_t blocks = m->columns / NUMERICS_BLOCK,
                 fit =
                     PANEL_SIZE / PANEL_ROW_SIZE / rows; /* a multiple of the 8 that K types want together */
    _Alignas(64) uint8_t panel[PANEL_SIZE];
    for (size_t begin = 0; begin < blocks; begin += fit) {
        const size_t count = TD_MIN(blocks - begin, fit);
        panel_fill(a, row, rows, begin, count, weight_code_offset(type), panel);
        for (uint32_t tile = tile_begin; tile < tile_end; tile++)
            tile_quantised(type, rows, m, panel, begin, count, out, tile);
    }
}

typedef void (*rows_function)(const struct cpu_matrix *m, const struct activations *a, size_t row,
                              float *const *out, uint32_t tile_begin, uint32_t tile_end);

#define QUANTISED_ROWS(name, type, rows)                                                                     \
    NEON_TARGET static void name##_##rows(const struct cpu_matrix *m, const struct activations *a,           \
                                          size_t row, float *const *out, uint32_t tile_begin,                \
                                          uint32_t tile_end)                                                 \
    {                                                                                                        \
        rows_quantised(type, rows, m, a, row, out, tile_begin, tile_end);                                    \
    }
#define QUANTISED(name, type)                                                                                \
    QUANTISED_ROWS(name, type, 1) QUANTISED_ROWS(name, type, 2) QUANTISED_ROWS(name, type, 4)
QUANTISED(q4_0, GGUF_Q4_0)
QUANTISED(q4_1, GGUF_Q4_1)
QUANTISED(q5_0, GGUF_Q5_0)
QUANTISED(q5_1, GGUF_Q5_1)
QUANTISED(q8_0, GGUF_Q8_0)
QUANTISED(q4_k, GGUF_Q4_K)
QUANTISED(q5_k, GGUF_Q5_K)
QUANTISED(q6_k, GGUF_Q6_K)

/* --- float weights ---------------------------------------------------------------------------- */

TILE_INLINE float32x4_t load_weights(const uint32_t type, const uint8_t *four)
{
    if (type == GGUF_F32)
        return vreinterpretq_f32_u8(vld1q_u8(four));
    if (type == GGUF_F16)
        return neon_load_f16(four);
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(four)), 16));
}

/* Columns [begin, end): one fma chain from +0 each. acc: [rows][HALVES * tiles]. */
TILE_INLINE void float_panel(const uint32_t type, const unsigned rows, const unsigned tiles,
                             const uint8_t *weights, size_t tile_bytes, const float *x, size_t x_stride,
                             uint32_t begin, uint32_t end, float32x4_t *acc)
{
    const unsigned value_size = type == GGUF_F32 ? 4 : 2, vectors = HALVES * tiles;
#pragma GCC unroll 16
    for (unsigned i = 0; i < rows * vectors; i++)
        acc[i] = vdupq_n_f32(0);
    for (uint32_t column = begin; column < end; column++) {
        const uint8_t *at = weights + (size_t)TILE_ROWS * value_size * column;
        float32x4_t w[8];
#pragma GCC unroll 8
        for (unsigned v = 0; v < vectors; v++)
            w[v] = load_weights(type, at + tile_bytes * (v / HALVES) + (size_t)4 * value_size * (v % HALVES));
#pragma GCC unroll 8
        for (unsigned r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (unsigned v = 0; v < vectors; v++)
                acc[r * vectors + v] = vfmaq_n_f32(acc[r * vectors + v], w[v], x[r * x_stride + column]);
    }
}

/* `tiles` tiles side by side for `rows` activation rows; at most 16 vectors of results. */
TILE_INLINE void tiles_float(const uint32_t type, const unsigned rows, const unsigned tiles,
                             const struct cpu_matrix *m, const struct activations *a, size_t row,
                             float *const *out, uint32_t tile)
{
    const size_t size = tile_size(type, m->columns, TILE_ROWS);
    const uint8_t *weights = (const uint8_t *)m->packed + size * tile;
    float32x4_t total[16], acc[16];
#pragma GCC unroll 16
    for (unsigned i = 0; i < rows * tiles * HALVES; i++)
        total[i] = vdupq_n_f32(0);
    for (uint32_t panel = 0; panel < m->columns; panel += NUMERICS_PANEL) {
        float_panel(type, rows, tiles, weights, size, a->x + row * a->x_stride, a->x_stride, panel,
                    TD_MIN(panel + NUMERICS_PANEL, m->columns), acc);
#pragma GCC unroll 16
        for (unsigned i = 0; i < rows * tiles * HALVES; i++)
            total[i] = vaddq_f32(total[i], acc[i]);
    }
#pragma GCC unroll 8
    for (unsigned r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (unsigned t = 0; t < tiles; t++)
            store_outputs(out[r] + (tile + t) * (size_t)TILE_ROWS, total + (r * tiles + t) * (size_t)HALVES,
                          m->rows - (tile + t) * TILE_ROWS);
}

TILE_INLINE void rows_float(const uint32_t type, const unsigned rows, const unsigned tiles,
                            const struct cpu_matrix *m, const struct activations *a, size_t row,
                            float *const *out, uint32_t tile_begin, uint32_t tile_end)
{
    uint32_t tile = tile_begin;
    for (; tile + tiles <= tile_end; tile += tiles)
        tiles_float(type, rows, tiles, m, a, row, out, tile);
    for (; tile < tile_end; tile++)
        tiles_float(type, rows, 1, m, a, row, out, tile);
}

#define FLOAT_ROWS(name, type, rows, tiles)                                                                  \
    NEON_TARGET static void name##_##rows(const struct cpu_matrix *m, const struct activations *a,           \
                                          size_t row, float *const *out, uint32_t tile_begin,                \
                                          uint32_t tile_end)                                                 \
    {                                                                                                        \
        rows_float(type, rows, tiles, m, a, row, out, tile_begin, tile_end);                                 \
    }
#define FLOAT(name, type)                                                                                    \
    FLOAT_ROWS(name, type, 1, 4) FLOAT_ROWS(name, type, 2, 4) FLOAT_ROWS(name, type, 4, 2)
FLOAT(f32, GGUF_F32)
FLOAT(f16, GGUF_F16)
FLOAT(bf16, GGUF_BF16)

/* --- dispatch --------------------------------------------------------------------------------- */

#define ENTRY(type, name) [type] = {name##_1, name##_2, name##_4}
static const rows_function functions[][3] = {
    ENTRY(GGUF_F32, f32),   ENTRY(GGUF_F16, f16),   ENTRY(GGUF_BF16, bf16), ENTRY(GGUF_Q4_0, q4_0),
    ENTRY(GGUF_Q4_1, q4_1), ENTRY(GGUF_Q5_0, q5_0), ENTRY(GGUF_Q5_1, q5_1), ENTRY(GGUF_Q8_0, q8_0),
    ENTRY(GGUF_Q4_K, q4_k), ENTRY(GGUF_Q5_K, q5_k), ENTRY(GGUF_Q6_K, q6_k),
};

void NEON_MATMUL(const struct cpu_matrix *m, const struct activations *a, uint32_t first_row,
                 uint32_t row_count, float *const *out, uint32_t tile_begin, uint32_t tile_end)
{
    const rows_function *f = functions[m->type];
    uint32_t r = 0;
    for (; r + 4 <= row_count; r += 4)
        f[2](m, a, first_row + r, out + r, tile_begin, tile_end);
    if (r + 2 <= row_count) {
        f[1](m, a, first_row + r, out + r, tile_begin, tile_end);
        r += 2;
    }
    if (r < row_count)
        f[0](m, a, first_row + r, out + r, tile_begin, tile_end);
}
