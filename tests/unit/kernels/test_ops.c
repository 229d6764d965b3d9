/* ops: the portable table against binary64 with stated bounds, and every other table of this CPU against the portable one, bit for
 * bit, over all weight types and odd shapes. */
#include "kernels/cpu/ops.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

static const uint32_t all_types[] = {GGUF_F32,  GGUF_F16,  GGUF_BF16, GGUF_Q8_0, GGUF_Q4_0, GGUF_Q4_1,
                                     GGUF_Q5_0, GGUF_Q5_1, GGUF_Q4_K, GGUF_Q5_K, GGUF_Q6_K};

static uint32_t random_state = 12345;

static uint32_t random_bits(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8 ^ random_state << 13;
}

static float random_float(float range)
{
    return ((float)(random_bits() >> 8) * 0x1p-23f - 1.0f) * range;
}

static void *allocate(size_t size)
{
    void *p = aligned_alloc(64, align_up(size + 1, 64));
    assert_non_null(p);
    return p;
}

static const struct cpu_ops *table; /* under test: each that this CPU runs, in turn */

/* --- matrices -------------------------------------------------------------------------------------------------- */

/* Random bytes, with plain numbers where a type has floats. */
static void fill_weights(uint32_t type, uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)random_bits();
    const struct gguf_type_info *info = gguf_type_info(type);
    for (size_t at = 0; at < size; at += info->block_size) {
        if (type == GGUF_F32)
            memcpy(bytes + at, &(float){random_float(1.0f)}, 4);
        else if (type == GGUF_BF16)
            store_le16(bytes + at, (uint16_t)(float_bits(random_float(1.0f)) >> 16));
        else
            store_le16(bytes + at + (type == GGUF_Q6_K ? 208 : 0), f32_to_f16(random_float(0.5f)));
        if (weight_has_minimum(type))
            store_le16(bytes + at + 2, f32_to_f16(random_float(0.5f)));
    }
}

static struct cpu_matrix make_matrix(uint32_t type, uint32_t columns, uint32_t rows)
{
    size_t size = weight_row_size(type, columns) * rows;
    uint8_t *source = allocate(size);
    fill_weights(type, source, size);
    return (struct cpu_matrix){.type = type, .columns = columns, .rows = rows, .source = source};
}

static void pack_for(const struct cpu_ops *ops, struct cpu_matrix *m)
{
    size_t size = ops->pack_size(m);
    m->packed = size ? allocate(size) : NULL;
    ops->pack(m, 0, tile_count(ops, m) / 2);
    ops->pack(m, tile_count(ops, m) / 2, tile_count(ops, m));
}

static struct activations make_activations(uint32_t columns, uint32_t rows)
{
    struct activations a = {
        .x_stride = columns + 3, .q_stride = align_up(columns, 32) + 32, .block_stride = columns / 32 + 2};
    a.x = allocate(a.x_stride * rows * 4);
    a.q = allocate(a.q_stride * rows);
    a.d = allocate(a.block_stride * rows * 4), a.s = allocate(a.block_stride * rows * 4);
    a.sum = allocate(a.block_stride * rows * 4);
    for (size_t i = 0; i < a.x_stride * rows; i++)
        a.x[i] = random_float(i % 7 ? 1.0f : 20.0f);
    return a;
}

static void free_activations(struct activations *a)
{
    free(a->x), free(a->q), free(a->d), free(a->s), free(a->sum);
}

/* The extremes that integer kernels could saturate on. */
static void make_extreme(struct cpu_matrix *m, struct activations *a, uint32_t rows)
{
    uint8_t *bytes = (uint8_t *)(uintptr_t)m->source;
    const struct gguf_type_info *info = gguf_type_info(m->type);
    size_t size = weight_row_size(m->type, m->columns) * m->rows;
    for (size_t at = 0; at < size; at += info->block_size) {
        memset(bytes + at, m->type == GGUF_Q8_0 ? 0x80 : 0xff,
               info->block_size); /* -128, or all bits of every code */
        if (m->type == GGUF_Q6_K && at % (2 * info->block_size) == 0)
            memset(bytes + at, 0, 192), memset(bytes + at + 192, 0x80, 16); /* code 0 is -32, scales -128 */
        store_le16(bytes + at + (m->type == GGUF_Q6_K ? 208 : 0), 0x3c00);
        if (weight_has_minimum(m->type))
            store_le16(bytes + at + 2, 0x3c00);
    }
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t i = 0; i < m->columns; i++)
            a->x[r * a->x_stride + i] = r % 3 == 0 ? 1.0f : r % 3 == 1 ? -1.0f : i % 2 ? 1.0f : -1.0f;
}

/* Results of a table for all rows, tiles in two ranges. */
static float *run_matmul(const struct cpu_ops *ops, struct cpu_matrix *m, const struct activations *a,
                         uint32_t rows)
{
    float *out = allocate(sizeof(float) * m->rows * rows), *out_rows[160];
    for (uint32_t r = 0; r < rows; r++)
        out_rows[r] = out + (size_t)r * m->rows;
    pack_for(ops, m);
    uint32_t middle = tile_count(ops, m) / 2;
    ops->matmul(m, a, 0, rows, out_rows, 0, middle);
    if (rows > 1) { /* rows in two parts */
        ops->matmul(m, a, 0, rows / 2, out_rows, middle, tile_count(ops, m));
        ops->matmul(m, a, rows / 2, rows - rows / 2, out_rows + rows / 2, middle, tile_count(ops, m));
    } else {
        ops->matmul(m, a, 0, rows, out_rows, middle, tile_count(ops, m));
    }
    free(m->packed);
    return out;
}

static void compare_tables(uint32_t type, uint32_t columns, uint32_t outputs, uint32_t rows, bool extreme)
{
    struct cpu_matrix m = make_matrix(type, columns, outputs);
    struct activations a = make_activations(columns, rows);
    if (extreme)
        make_extreme(&m, &a, rows);
    if (weight_is_quantised(type))
        for (uint32_t r = 0; r < rows; r++)
            cpu_ops_portable.quantise(&a, r, columns);
    float *want = run_matmul(&cpu_ops_portable, &m, &a, rows), *got = run_matmul(table, &m, &a, rows);
    for (uint32_t i = 0; i < rows * outputs; i++)
        if (float_bits(want[i]) != float_bits(got[i]))
            fail_msg("type %u, %u columns, %u outputs, row %u, output %u: %a, portable %a", type, columns,
                     outputs, i / outputs, i % outputs, (double)got[i], (double)want[i]);
    free(want), free(got), free_activations(&a), free((void *)(uintptr_t)m.source);
}

static void products_have_the_same_bits(void **state)
{
    (void)state;
    static const uint32_t outputs[] = {1, 7, 8, 9, 31, 41}, rows[] = {1, 2, 3, 4, 5, 7, 9};
    for (size_t t = 0; t < TD_COUNT(all_types); t++) {
        uint32_t unit = gguf_type_info(all_types[t])->block_values;
        for (size_t i = 0; i < TD_COUNT(outputs) * TD_COUNT(rows); i++)
            compare_tables(all_types[t], unit * (1 + (uint32_t)i % 5), outputs[i % 6], rows[i / 6], false);
        for (uint32_t r = 1; unit > 1 && r < 6; r++)
            compare_tables(all_types[t], unit * 2, 17, r, true);
        for (uint32_t r = 1; unit > 1 && r < 16;
             r = 2 * r + 1) /* more columns than a panel has, for 1 to 8 rows */
            compare_tables(all_types[t], 8192 / (r + 1) * 2 + 256, 19, r, false);
        for (uint32_t r = 16; unit > 1 && r < 160; r += 125) /* more rows than tiles are opened for */
            compare_tables(all_types[t], 256, 35, r, r == 16);
    }
    static const uint32_t odd[] = {1, 5, 255, 256, 257, 511, 700}; /* panels of float weights */
    for (size_t t = 0; t < 3; t++)
        for (size_t i = 0; i < TD_COUNT(odd); i++)
            for (uint32_t r = 1; r < 8; r++)
                compare_tables(all_types[t], odd[i], 19, r, false);
}

/* |result - exact| over the quantised activations; for float types over the activations themselves. Rounding of f32 only: every
 * term is rounded at most three times, so n * 2^-23 * sum of |terms| is generous. */
static void products_are_right(void **state)
{
    (void)state;
    for (size_t t = 0; t < TD_COUNT(all_types); t++) {
        enum { COLUMNS = 512, OUTPUTS = 11, ROWS = 3 };
        struct cpu_matrix m = make_matrix(all_types[t], COLUMNS, OUTPUTS);
        struct activations a = make_activations(COLUMNS, ROWS);
        bool quantised = weight_is_quantised(m.type);
        for (uint32_t r = 0; r < ROWS && quantised; r++)
            cpu_ops_portable.quantise(&a, r, COLUMNS);
        float *got = run_matmul(&cpu_ops_portable, &m, &a, ROWS);
        for (uint32_t o = 0; o < OUTPUTS; o++) {
            float w[COLUMNS];
            weight_row_to_f32(m.type, (const uint8_t *)m.source + weight_row_size(m.type, COLUMNS) * o, 0,
                              COLUMNS, w);
            for (uint32_t r = 0; r < ROWS; r++) {
                double exact = 0, magnitude = 0;
                for (uint32_t i = 0; i < COLUMNS; i++) {
                    double x = quantised ? (double)a.d[r * a.block_stride + i / 32] * a.q[r * a.q_stride + i]
                                         : (double)a.x[r * a.x_stride + i];
                    exact += (double)w[i] * x, magnitude += fabs((double)w[i] * x);
                }
                if (!(fabs(got[r * OUTPUTS + o] - exact) <= 0x1p-20 * magnitude + 1e-9))
                    fail_msg("type %u: %g, exact %g", m.type, (double)got[r * OUTPUTS + o], exact);
            }
        }
        free(got), free_activations(&a), free((void *)(uintptr_t)m.source);
    }
}

/* --- rows ------------------------------------------------------------------------------------------------------ */

static void check_quantised(const struct activations *a, uint32_t columns)
{
    for (uint32_t i = 0; i < columns; i++) {
        const float *block = a->x + i / 32 * 32;
        double amax = 0, d = (double)a->d[i / 32];
        for (int k = 0; k < 32; k++)
            amax = fmax(amax, fabs((double)block[k]));
        assert_true(fabs(d - amax / 127) <= 1e-7 * d);
        assert_true(fabs(d * a->q[i] - (double)a->x[i]) <= d * 0.5001);
        int32_t sum = 0;
        for (int k = 0; k < 32; k++)
            sum += a->q[i / 32 * 32 + k];
        assert_int_equal(a->sum[i / 32], sum);
        assert_true(fabs((double)a->s[i / 32] - d * sum) <= 1e-6 * fabs(d * sum));
    }
}

static void quantised_rows(void **state)
{
    (void)state;
    enum { COLUMNS = 32 * 40 };
    struct activations a = make_activations(COLUMNS, 1), b = make_activations(COLUMNS, 1);
    for (int i = 0; i < COLUMNS; i++) /* from subnormal to large, some ties at half a step */
        a.x[i] = i < 960 ? ldexpf(random_float(1.0f), i / 32 * 5 - 70)
                         : (float)(i % 256 - 127) + 0.5f * (float)(i & 1);
    for (int i = 1152; i < 1184; i++)
        a.x[i] = i == 1160 ? 127.0f : (float)(i - 1168) + 0.5f; /* step 1: every value a tie */
    for (int i = 1184; i < 1216; i++)
        a.x[i] = -0.0f;
    memcpy(b.x, a.x, sizeof(float) * COLUMNS);
    cpu_ops_portable.quantise(&a, 0, COLUMNS);
    table->quantise(&b, 0, COLUMNS);
    check_quantised(&a, COLUMNS);
    assert_int_equal(a.q[1168], 0), assert_int_equal(a.q[1169], 2); /* 0.5 and 1.5 go to even */
    assert_memory_equal(a.q, b.q, COLUMNS);
    assert_memory_equal(a.d, b.d, COLUMNS / 8);
    assert_memory_equal(a.s, b.s, COLUMNS / 8);
    assert_memory_equal(a.sum, b.sum, COLUMNS / 8);
    free_activations(&a), free_activations(&b);
}

/* Tiny blocks become zero, blocks with a NaN or an infinity show it. */
static void quantised_blocks_at_the_edges(void **state)
{
    (void)state;
    const struct cpu_ops *tables[] = {&cpu_ops_portable, table};
    for (size_t t = 0; t < 2; t++) {
        struct activations a = make_activations(96, 1);
        for (int i = 0; i < 32; i++)
            a.x[i] = 0x1p-101f;
        a.x[40] = INFINITY, a.x[70] = NAN;
        tables[t]->quantise(&a, 0, 96);
        assert_true(a.d[0] == 0.0f && a.s[0] == 0.0f && a.sum[0] == 0 && a.q[5] == 0);
        assert_int_equal(float_bits(a.d[1]), 0x7fc00000);
        assert_int_equal(float_bits(a.s[2]), 0x7fc00000);
        free_activations(&a);
    }
}

static void norms_and_swiglu(void **state)
{
    (void)state;
    for (uint32_t n = 1; n < 90; n++) {
        float x[90], w[90], want[90], got[90];
        double sum = 0;
        for (uint32_t i = 0; i < n; i++) {
            x[i] = random_float(4.0f), w[i] = random_float(2.0f);
            sum += (double)x[i] * (double)x[i];
        }
        cpu_ops_portable.norm(x, w, 1e-5f, n, want);
        table->norm(x, w, 1e-5f, n, got);
        assert_memory_equal(want, got, sizeof(float) * n);
        for (uint32_t i = 0; i < n; i++) {
            double exact = (double)x[i] / sqrt(sum / n + (double)1e-5f) * (double)w[i];
            assert_true(fabs((double)want[i] - exact) <= 1e-6 * fabs(exact));
        }
        for (uint32_t i = 0; i < n; i++)
            x[i] *= i % 5 ? 1.0f : 40.0f;
        cpu_ops_portable.swiglu(x, w, n, want);
        table->swiglu(x, w, n, got);
        assert_memory_equal(want, got, sizeof(float) * n);
        for (uint32_t i = 0; i < n; i++) {
            double exact = (double)x[i] / (1 + exp(-(double)x[i])) * (double)w[i];
            assert_true(fabs((double)want[i] - exact) <= 1e-6 * fabs(exact) + 1e-35); /* exp stops at 2^127 */
        }
        table->norm(x, w, 1e-5f, n, x); /* in place */
    }
}

static void rope_turns_pairs(void **state)
{
    (void)state;
    const float cos_sin[] = {0.6f, 0.0f, 0.8f, 1.0f}; /* angles of pair 0 and pair 1 */
    float interleaved[] = {1, 2, 3, 4, 5}, halves[] = {1, 2, 3, 4, 5};
    rope_rotate(interleaved, cos_sin, 4, ROPE_INTERLEAVED);
    rope_rotate(halves, cos_sin, 4, ROPE_HALVES);
    const float want_interleaved[] = {0.6f - 1.6f, 0.8f + 1.2f, -4, 3, 5},
                want_halves[] = {0.6f - 2.4f, -4, 0.8f + 1.8f, 2, 5};
    for (int i = 0; i < 5; i++) {
        assert_true(fabsf(interleaved[i] - want_interleaved[i]) < 1e-6f);
        assert_true(fabsf(halves[i] - want_halves[i]) < 1e-6f);
    }
}

/* --- attention ------------------------------------------------------------------------------------------------- */

#define PAGES 5

struct attention_case {
    uint32_t head_dim, group, first_position, rows;
    uint32_t positions[80], pages[PAGES];
    float *q, *out, *other;
    uint16_t *kv;
    struct attention_job job;
};

static void make_case(struct attention_case *c, uint32_t head_dim, uint32_t group, uint32_t first_position,
                      uint32_t rows)
{
    *c = (struct attention_case){head_dim, group, first_position, rows, .pages = {3, 0, 4, 1, 2}};
    size_t stride = (size_t)group * head_dim + 8, values = (size_t)KV_BLOCK_TOKENS * head_dim;
    c->q = allocate(stride * rows * 4), c->out = allocate(stride * rows * 4),
    c->other = allocate(stride * rows * 4);
    c->kv = allocate(values * 2 * PAGES * 2);
    for (size_t i = 0; i < stride * rows; i++)
        c->q[i] = random_float(1.0f), c->out[i] = c->other[i] = 0;
    for (size_t i = 0; i < values * 2 * PAGES; i++)
        c->kv[i] = 0x7e00; /* what was never written is NaN: nobody may look at it */
    for (uint32_t p = 0; p < first_position + rows; p++)
        for (uint32_t i = 0; i < head_dim; i++) {
            uint16_t *at = c->kv + c->pages[p / 64] * values * 2 + (size_t)(p % 64) * head_dim + i;
            at[0] = f32_to_f16(random_float(1.0f)), at[values] = f32_to_f16(random_float(1.0f));
        }
    for (uint32_t r = 0; r < rows; r++)
        c->positions[r] = first_position + r;
    c->job = (struct attention_job){c->q,         c->out, stride,   stride,   c->positions,
                                    rows * group, group,  head_dim, c->pages, c->kv,
                                    values * 2,   values, NULL,     0,        0};
}

static void free_case(struct attention_case *c)
{
    free(c->q), free(c->out), free(c->other), free(c->kv);
}

static void check_attention(const struct attention_case *c, uint32_t row, uint32_t head)
{
    uint32_t dim = c->head_dim, count = c->positions[row] + 1;
    size_t values = (size_t)KV_BLOCK_TOKENS * dim;
    const float *q = c->q + row * c->job.q_stride + (size_t)head * dim, *got = c->out + (q - c->q);
    double score[PAGES * 64], max = -1e9, sum = 0;
    for (uint32_t t = 0; t < count; t++) {
        const uint16_t *k = c->kv + c->pages[t / 64] * values * 2 + (size_t)(t % 64) * dim;
        score[t] = 0;
        for (uint32_t i = 0; i < dim; i++)
            score[t] += (double)q[i] * (double)f16_to_f32(k[i]);
        max = fmax(max, score[t]);
    }
    for (uint32_t t = 0; t < count; t++)
        sum += score[t] = exp(score[t] - max);
    for (uint32_t i = 0; i < dim; i++) {
        double exact = 0;
        for (uint32_t t = 0; t < count; t++)
            exact += score[t] / sum *
                     (double)f16_to_f32(
                         c->kv[c->pages[t / 64] * values * 2 + values + (size_t)(t % 64) * dim + i]);
        if (!(fabs((double)got[i] - exact) <= 1e-5))
            fail_msg("dim %u row %u: %g, exact %g", dim, row, (double)got[i], exact);
    }
}

/* A row alone, its splits `count` at a time, the last first, each kept; then all combined. */
static void check_in_ranges(const struct attention_case *c, const struct cpu_ops *ops, uint32_t row,
                            uint32_t count)
{
    struct attention_job job = c->job;
    size_t values = (size_t)c->group * c->head_dim;
    float *out = allocate(sizeof(float) * values);
    void *scratch = allocate(ops->attention_scratch(c->head_dim, c->group));
    job.q += row * c->job.q_stride, job.positions += row, job.vector_count = c->group, job.out = out;
    uint32_t splits = attention_splits(&job);
    job.partial = allocate(sizeof(float) * splits * c->group * ATTENTION_PARTIAL(c->head_dim));
    for (uint32_t begin = (splits - 1) / count * count + count; begin > 0;) {
        job.split_end = begin, begin -= count, job.split_begin = begin;
        ops->attention(&job, scratch);
    }
    ops->attention_reduce(&job);
    assert_memory_equal(out, c->out + row * c->job.out_stride, sizeof(float) * values);
    free(out), free(scratch), free(job.partial);
}

static void attention_is_right_and_the_same(void **state)
{
    (void)state;
    static const uint32_t cases[][4] = {/* head_dim, group, first position, rows */
                                        {8, 1, 0, 1},      {64, 3, 0, 64},  {64, 1, 63, 2},
                                        {64, 3, 128, 1},   {32, 4, 60, 10}, {80, 5, 190, 12},
                                        {128, 2, 255, 30}, {24, 7, 300, 9}, {16, 3, 1, 64},
                                        {40, 1, 63, 64},   {64, 70, 70, 1}, {128, 4, 200, 1}};
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct attention_case c;
        make_case(&c, cases[i][0], cases[i][1], cases[i][2], cases[i][3]);
        const struct cpu_ops *tables[] = {&cpu_ops_portable, table};
        for (size_t t = 0; t < 2; t++) {
            void *scratch = allocate(tables[t]->attention_scratch(c.head_dim, c.group));
            struct attention_job job = c.job;
            job.out = t == 0 ? c.out : c.other;
            uint32_t step = TD_MAX(1u, ATTENTION_VECTORS / c.group); /* as the forward pass cuts jobs */
            for (uint32_t r = 0; r < c.rows; r += step) {
                job.q = c.q + r * c.job.q_stride, job.positions = c.positions + r;
                job.vector_count = TD_MIN(step, c.rows - r) * c.group;
                job.out = (t == 0 ? c.out : c.other) + r * c.job.out_stride;
                tables[t]->attention(&job, scratch);
            }
            free(scratch);
        }
        assert_memory_equal(c.out, c.other, sizeof(float) * c.job.out_stride * c.rows);
        for (uint32_t r = 0; r < c.rows; r++) {
            for (uint32_t h = 0; h < c.group; h += 2)
                check_attention(&c, r, h);
            check_in_ranges(&c, table, r, 1 + r % 3);
        }
        free_case(&c);
    }
}

static void tables_by_name(void **state)
{
    (void)state;
    assert_ptr_equal(cpu_ops_find("portable"), &cpu_ops_portable);
    assert_null(cpu_ops_find("sse9"));
    assert_ptr_equal(cpu_ops_find(cpu_ops_find(NULL)->name), cpu_ops_find(NULL));
    assert_ptr_equal(cpu_ops_find(NULL), cpu_ops_at(0));
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        assert_non_null(cpu_ops_find("avx2")); /* else the comparisons above compare nothing */
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl"))
        assert_string_equal(cpu_ops_find(NULL)->name, "avx512");
#elif defined(__aarch64__)
    assert_non_null(cpu_ops_find("neon"));
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP)
        assert_non_null(cpu_ops_find("neon-dotprod"));
    if (getauxval(AT_HWCAP2) & HWCAP2_I8MM)
        assert_string_equal(cpu_ops_find(NULL)->name, "neon-i8mm");
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_have_the_same_bits),
        cmocka_unit_test(products_are_right),
        cmocka_unit_test(quantised_rows),
        cmocka_unit_test(quantised_blocks_at_the_edges),
        cmocka_unit_test(norms_and_swiglu),
        cmocka_unit_test(rope_turns_pairs),
        cmocka_unit_test(attention_is_right_and_the_same),
        cmocka_unit_test(tables_by_name),
    };
    int failed = 0;
    for (size_t i = 0; (table = cpu_ops_at(i)); i++)
        failed += cmocka_run_group_tests_name(table->name, tests, NULL, NULL);
    return failed;
}
