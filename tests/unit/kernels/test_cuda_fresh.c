/* cuda_fresh: attention that turns its rows itself gives the bits of RoPE and the KV write followed by attention, in the output and in the
 * pages: several rows, rows that begin and fill pages, several splits, biases, norms, both kinds of rotation, of all or half of a head, and of
 * input. */
#include "kernels/cuda/cuda.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#ifdef TANDEM_HAS_CUDA
#include "kernels/cuda/kernels.h"
#include "kernels/cpu/blocks.h"
#include "tests/unit/kernels/small.h"
#include <string.h>

#define ROWS  3
#define PAGES 9 /* of a row */

static uint64_t seed = 0x2545f4914f6cdd1du;

static float uniform(void) /* -1 to 1 */
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (float)((double)(seed >> 11) * 0x1p-52 - 1.0);
}

struct scene {
    uint32_t head_dim, kv_heads, group, pages_per_split;
    bool bf16, interleaved, with_bias, with_norm, in_part; /* in_part: half of a head is turned */
};

static void *to_device(const void *host, size_t size)
{
    void *p;
    assert_int_equal(cudaMalloc(&p, size), cudaSuccess);
    assert_int_equal(cudaMemcpy(p, host, size, cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

static void *random_floats(size_t count)
{
    float *x = malloc(sizeof *x * count);
    for (size_t i = 0; i < count; i++)
        x[i] = uniform();
    void *p = to_device(x, sizeof *x * count);
    free(x);
    return p;
}

/* 16-bit values; rows of nobody's pages too. */
static void *random_values(size_t count, bool bf16)
{
    uint16_t *x = malloc(sizeof *x * count);
    for (size_t i = 0; i < count; i++)
        x[i] = bf16 ? (uint16_t)(float_bits(uniform()) >> 16) : f32_to_f16(uniform());
    void *p = to_device(x, sizeof *x * count);
    free(x);
    return p;
}

static uint32_t make_splits(struct cuda_split *out, const uint32_t *positions, uint32_t pages)
{
    uint32_t count = 0;
    for (uint32_t row = 0; row < ROWS; row++) {
        uint32_t all = positions[row] / 64 + 1, parts = (all + pages - 1) / pages, first = count;
        for (uint32_t i = 0; i < parts; i++)
            out[count++] = (struct cuda_split){.row = row,
                                               .table = row * PAGES,
                                               .page_begin = i * pages,
                                               .page_count = TD_MIN(pages, all - i * pages),
                                               .token_count = positions[row] + 1 - i * pages * 64,
                                               .first_split = first,
                                               .split_count = parts};
    }
    return count;
}

static void *copy_of(const void *device, size_t size)
{
    void *p;
    assert_int_equal(cudaMalloc(&p, size), cudaSuccess);
    assert_int_equal(cudaMemcpy(p, device, size, cudaMemcpyDeviceToDevice), cudaSuccess);
    return p;
}

static void expect_same(const void *a, const void *b, size_t size, const char *what, const struct scene *c)
{
    uint8_t *x = malloc(size), *y = malloc(size);
    assert_int_equal(cudaMemcpy(x, a, size, cudaMemcpyDeviceToHost), cudaSuccess);
    assert_int_equal(cudaMemcpy(y, b, size, cudaMemcpyDeviceToHost), cudaSuccess);
    size_t at = 0;
    while (at < size && x[at] == y[at])
        at++;
    if (at < size)
        fail_msg("%s differ at byte %zu of %zu: heads of %u, %u x %u, %u pages a split", what, at, size,
                 c->head_dim, c->kv_heads, c->group, c->pages_per_split);
    free(x), free(y);
}

/* False: not on this device. */
static bool check(const struct scene *c, const uint32_t positions[ROWS])
{
    uint32_t heads = c->kv_heads * c->group, all = heads + 2 * c->kv_heads, table[ROWS * PAGES],
             row_table[ROWS] = {0, PAGES, 2 * PAGES}, zero[ROWS * 64] = {0};
    size_t page_values = (size_t)2 * c->kv_heads * 64 * c->head_dim, kv_size = 2 * page_values * ROWS * PAGES,
           out_size = (size_t)2 * ROWS * heads * c->head_dim;
    struct cuda_split splits[ROWS * PAGES + 1] = {{0}};
    uint32_t count = make_splits(splits, positions, c->pages_per_split);
    for (uint32_t i = 0; i < ROWS * PAGES; i++)
        table[i] = (i * 7 + 3) % (ROWS * PAGES);
    struct cuda_rope r = {.wide = random_values((size_t)ROWS * all * c->head_dim, c->bf16),
                          .bf16 = c->bf16,
                          .rows = ROWS,
                          .head_count = heads,
                          .kv_head_count = c->kv_heads,
                          .head_dim = c->head_dim,
                          .rope_dim = c->in_part ? c->head_dim / 2 : c->head_dim,
                          .interleaved = c->interleaved,
                          .norm_eps = 1e-5f,
                          .q_scale = 0.2f,
                          .cos_sin = random_floats((size_t)ROWS * c->head_dim),
                          .q_bias = c->with_bias ? random_floats((size_t)heads * c->head_dim) : NULL,
                          .k_bias = c->with_bias ? random_floats((size_t)c->kv_heads * c->head_dim) : NULL,
                          .v_bias = c->with_bias ? random_floats((size_t)c->kv_heads * c->head_dim) : NULL,
                          .q_norm = c->with_norm ? random_floats(c->head_dim) : NULL,
                          .k_norm = c->with_norm ? random_floats(c->head_dim) : NULL,
                          .positions = to_device(positions, sizeof *positions * ROWS),
                          .row_table = to_device(row_table, sizeof row_table),
                          .tables = to_device(table, sizeof table),
                          .q_out = random_values(out_size / 2, false),
                          .kv = random_values(kv_size / 2, false),
                          .page_values = page_values};
    struct cuda_attention a = {.q = r.q_out,
                               .out = random_values(out_size / 2, false),
                               .out_bf16 = c->bf16,
                               .head_count = heads,
                               .kv_head_count = c->kv_heads,
                               .head_dim = c->head_dim,
                               .kv = r.kv,
                               .page_values = page_values,
                               .tables = r.tables,
                               .old_pages = true};
    struct cuda_rope r2 = r;
    struct cuda_attention a2 = a;
    a2.kv = r2.kv = copy_of(r.kv, kv_size), a2.out = random_values(out_size / 2, false), a2.q = NULL;
    void *list = to_device(splits, sizeof splits), *counters = to_device(zero, sizeof zero), *partial;
    assert_int_equal(cudaMalloc(&partial, cuda_partial_size(&a, count + 1)), cudaSuccess);
    bool ran = cuda_attention_fresh(0, &r2, &a2, list, count + 1, partial, counters);
    if (ran) {
        assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
        cuda_rope_write(0, &r);
        cuda_attention_decode(0, &a, list, count + 1, partial, counters);
        assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
        expect_same(a.out, a2.out, out_size, "outputs", c);
        expect_same(r.kv, r2.kv, kv_size, "pages", c);
    }
    const void *owned[] = {r.wide,   r.cos_sin,   r.q_bias,    r.k_bias, r.v_bias, r.q_norm,
                           r.k_norm, r.positions, r.row_table, r.tables, r.q_out,  r.kv,
                           r2.kv,    a.out,       a2.out,      list,     counters, partial};
    for (size_t i = 0; i < TD_COUNT(owned); i++)
        cudaFree((void *)(uintptr_t)owned[i]);
    return ran;
}

static void rows_turned_by_attention(void **state)
{
    (void)state;
    static const uint32_t positions[][ROWS] = {{0, 63, 64}, {5, 128, 500}, {575, 1, 447}},
                          groups[] = {1, 3, 4, 8};
    uint32_t kind = 0;
    for (size_t p = 0; p < small_or(2, TD_COUNT(positions)); p++)
        for (size_t g = 0; g < small_or(2, TD_COUNT(groups)); g++)
            for (uint32_t pages = 1; pages <= 9; pages += 4)
                for (uint32_t dim = 64; dim <= 128; dim += 64, kind++) {
                    struct scene c = {dim,
                                      1 + kind % 3,
                                      groups[g],
                                      pages,
                                      kind % 2 > 0,
                                      kind / 2 % 2 > 0,
                                      kind / 3 % 2 > 0,
                                      kind / 5 % 2 > 0,
                                      kind / 7 % 2 > 0};
                    if (!check(&c, positions[p])) {
                        puts("skipped: this device has no bulk copies");
                        return;
                    }
                }
}
#endif

int main(void)
{
    char why[200];
    if (!cuda_available(why, sizeof why)) {
        printf("skipped: %s\n", why);
        return 0;
    }
#ifdef TANDEM_HAS_CUDA
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_turned_by_attention),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
#endif
}
