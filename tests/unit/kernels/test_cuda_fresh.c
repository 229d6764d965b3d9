/* cuda_fresh: attention that turns its rows itself gives the bits of RoPE and the KV write followed by attention, in the output and in the
 * pages: several rows, rows that begin and fill pages, several splits, biases, norms, both kinds of rotation, of all or half of a head, and of
 * input. */
#include "tests/unit/kernels/on_gpu.h"

#ifdef TANDEM_HAS_CUDA
#define ROWS  3
#define PAGES 9 /* of a row */

struct scene {
    uint32_t head_dim, kv_heads, group, pages_per_split;
    bool bf16, interleaved, with_bias, with_norm, in_part; /* in_part: half of a head is turned */
};

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
    uint32_t count = 0;
    for (uint32_t row = 0; row < ROWS; row++)
        count = add_splits(splits, count, row, row * PAGES, positions[row] + 1, c->pages_per_split);
    for (uint32_t i = 0; i < ROWS * PAGES; i++)
        table[i] = (i * 7 + 3) % (ROWS * PAGES);
    struct cuda_rope r = {.wide = device_16((size_t)ROWS * all * c->head_dim, c->bf16, 1.0f),
                          .bf16 = c->bf16,
                          .rows = ROWS,
                          .head_count = heads,
                          .kv_head_count = c->kv_heads,
                          .head_dim = c->head_dim,
                          .rope_dim = c->in_part ? c->head_dim / 2 : c->head_dim,
                          .interleaved = c->interleaved,
                          .norm_eps = 1e-5f,
                          .q_scale = 0.2f,
                          .cos_sin = device_floats((size_t)ROWS * c->head_dim),
                          .q_bias = c->with_bias ? device_floats((size_t)heads * c->head_dim) : NULL,
                          .k_bias = c->with_bias ? device_floats((size_t)c->kv_heads * c->head_dim) : NULL,
                          .v_bias = c->with_bias ? device_floats((size_t)c->kv_heads * c->head_dim) : NULL,
                          .q_norm = c->with_norm ? device_floats(c->head_dim) : NULL,
                          .k_norm = c->with_norm ? device_floats(c->head_dim) : NULL,
                          .positions = device_copy(positions, sizeof *positions * ROWS),
                          .row_table = device_copy(row_table, sizeof row_table),
                          .tables = device_copy(table, sizeof table),
                          .q_out = device_16(out_size / 2, false, 1.0f),
                          .kv = device_16(kv_size / 2, false, 1.0f),
                          .page_values = page_values};
    struct cuda_attention a = {.q = r.q_out,
                               .out = device_16(out_size / 2, false, 1.0f),
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
    a2.kv = r2.kv = copy_of(r.kv, kv_size), a2.out = device_16(out_size / 2, false, 1.0f), a2.q = NULL;
    void *list = device_copy(splits, sizeof splits), *counters = device_copy(zero, sizeof zero), *partial;
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
    if (!gpu_is_here())
        return 0;
#ifdef TANDEM_HAS_CUDA
    seed_anew();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_turned_by_attention),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
#endif
}
