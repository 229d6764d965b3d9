/* cuda_stream: products of 16-bit weights with up to 128 rows against double precision: widths that fill no tile and no slot, every
 * epilogue, alone and shared by a cluster's blocks, outputs poisoned before and untouched where they are nobody's. */
#include "tests/unit/kernels/on_gpu.h"

#ifdef TANDEM_HAS_CUDA
#define ROWS CUDA_STREAM_ROWS
#define GAP  16 /* columns of out behind the product's */

struct scene {
    uint32_t n, k;
    bool bf16;
    float *w, *act;              /* [n][k], [ROWS][k] */
    double *sums;                /* [ROWS][n] */
    void *w_device, *act_device; /* act with 8 more values a row */
};

static struct scene scene_new(uint32_t n, uint32_t k, bool bf16)
{
    struct scene s = {.n = n, .k = k, .bf16 = bf16};
    size_t stride = k + 8;
    uint16_t *w = malloc(2 * (size_t)n * k), *act = malloc(2 * ROWS * stride);
    s.w = malloc(sizeof *s.w * n * k), s.act = malloc(sizeof *s.act * ROWS * k);
    s.sums = calloc((size_t)ROWS * n, sizeof *s.sums);
    for (size_t i = 0; i < (size_t)n * k; i++)
        s.w[i] = from16(w[i] = to16(uniform(), bf16), bf16);
    for (size_t r = 0; r < ROWS; r++)
        for (size_t i = 0; i < stride; i++) {
            act[r * stride + i] = i < k ? to16(uniform(), bf16) : 0x7fff; /* NaN: nobody's */
            if (i < k)
                s.act[r * k + i] = from16(act[r * stride + i], bf16);
        }
    for (size_t r = 0; r < ROWS; r++)
        for (size_t i = 0; i < n; i++) {
            double sum = 0;
            for (size_t j = 0; j < k; j++)
                sum += (double)s.act[r * k + j] * (double)s.w[i * k + j];
            s.sums[r * n + i] = sum;
        }
    s.w_device = device_copy(w, 2 * (size_t)n * k), s.act_device = device_copy(act, 2 * ROWS * stride);
    free(w), free(act);
    return s;
}

static void scene_free(struct scene *s)
{
    cudaFree(s->w_device), cudaFree(s->act_device);
    free(s->w), free(s->act), free(s->sums);
}

struct outcome {
    double error, norm;
    size_t touched; /* values that are nobody's */
};

static void compare(struct outcome *o, const struct scene *s, uint32_t rows, enum cuda_epilogue epilogue,
                    const void *out, const void *before)
{
    bool wide = epilogue == CUDA_ADD_F32 || epilogue == CUDA_STORE_F32;
    uint32_t outs = epilogue == CUDA_SWIGLU16 ? s->n / 2 : s->n, stride = outs + GAP, size = wide ? 4 : 2;
    for (uint32_t r = 0; r < ROWS; r++)
        for (uint32_t i = 0; i < stride; i++) {
            size_t at = (size_t)r * stride + i;
            if (r >= rows || i >= outs) {
                o->touched +=
                    memcmp((const uint8_t *)out + at * size, (const uint8_t *)before + at * size, size) != 0;
                continue;
            }
            double want = s->sums[(size_t)r * s->n + i],
                   got = wide ? (double)((const float *)out)[at]
                              : (double)from16(((const uint16_t *)out)[at], s->bf16);
            if (epilogue == CUDA_SWIGLU16)
                want = want / (1 + exp(-want)) * s->sums[(size_t)r * s->n + outs + i];
            if (epilogue == CUDA_ADD_F32)
                want += 1;
            o->error += (got - want) * (got - want), o->norm += want * want;
        }
}

/* False: not on this device, or so many blocks cannot share it. */
static bool check_product(const struct scene *s, uint32_t rows, enum cuda_epilogue epilogue, uint32_t splits)
{
    bool wide = epilogue == CUDA_ADD_F32 || epilogue == CUDA_STORE_F32;
    uint32_t outs = epilogue == CUDA_SWIGLU16 ? s->n / 2 : s->n, stride = outs + GAP;
    size_t count = (size_t)ROWS * stride, size = (wide ? 4 : 2) * count;
    uint8_t *before = malloc(size), *out = malloc(size);
    memset(before, 0xff, size); /* NaN */
    for (size_t i = 0; epilogue == CUDA_ADD_F32 && i < count; i++)
        ((float *)(void *)before)[i] = 1;
    void *device = device_copy(before, size);
    struct cuda_product p = {
        .m = {.form = s->bf16 ? CUDA_BF16 : CUDA_F16, .columns = s->k, .rows = s->n, .values = s->w_device},
        .act = s->act_device,
        .act_bf16 = s->bf16,
        .rows = rows,
        .act_stride = s->k + 8,
        .epilogue = epilogue,
        .out = device,
        .out_stride = stride};
    bool ran = cuda_product_hopper(0, &p, splits);
    struct outcome o = {0};
    assert_int_equal(cuda_launch_error(), cudaSuccess);
    assert_int_equal(cudaMemcpy(out, device, size, cudaMemcpyDeviceToHost), cudaSuccess);
    if (ran)
        compare(&o, s, rows, epilogue, out, before);
    double relative = sqrt(o.error / o.norm), bound = wide ? 2e-5 : s->bf16 ? 3e-3 : 4e-4;
    if (ran && (!(relative <= bound) || o.touched))
        fail_msg(
            "%u x %u, %u rows, epilogue %d, %u blocks: relative error %.2e, at most %.2e; %zu values touched",
            s->n, s->k, rows, (int)epilogue, splits, relative, bound, o.touched);
    cudaFree(device), free(before), free(out);
    return ran;
}

static void products_of_many_rows(void **state)
{
    (void)state;
    static const struct {
        uint32_t n, k;
    } shapes[] = {{528, 72}, {16, 8}, {784, 648}, {272, 1000}};
    static const uint32_t rows[] = {64, 17, 9, 16, 32, 33, 50, 1, 128, 65, 100};
    uint32_t splits_max = (uint32_t)small_or(2, 8);
    for (size_t i = 0; i < small_or(2, TD_COUNT(shapes)); i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            struct scene s = scene_new(shapes[i].n, shapes[i].k, bf16);
            for (size_t r = 0; r < small_or(2, TD_COUNT(rows)); r++)
                for (int e = CUDA_STORE16; e <= CUDA_SWIGLU16; e++)
                    for (uint32_t splits = 0; splits <= splits_max; splits += 1 + (r > 0) * 2)
                        if (!check_product(&s, rows[r], (enum cuda_epilogue)e, splits) && splits < 2 &&
                            (splits > 0 ||
                             rows[r] <= 64)) { /* what is left to the library is not refused when asked for */
                            puts("skipped: this device has no wgmma");
                            return scene_free(&s);
                        }
            scene_free(&s);
        }
}

/* More tiles than SMs: blocks take them in turns, and their rings run through. */
static void products_of_many_tiles(void **state)
{
    (void)state;
    struct scene s = scene_new(256 * 140 + 32, 72, true);
    check_product(&s, 33, CUDA_STORE16, 0);
    check_product(&s, 64, CUDA_STORE_F32, 1);
    check_product(&s, 16, CUDA_SWIGLU16, 0);
    check_product(&s, 128, CUDA_STORE16, 0);
    check_product(&s, 90, CUDA_SWIGLU16, 1);
    scene_free(&s);
}

/* What is added by more than 64 rows has tiles of its own, as wide as lets the SMs share the columns. */
static void sums_of_many_rows(void **state)
{
    (void)state;
    static const uint32_t rows[] = {128, 65, 100}, splits[] = {5, 4, 8, 0, 3};
    struct scene s = scene_new(4096, 648, true), t = scene_new(4112, 72, false);
    for (size_t r = 0; r < small_or(1, TD_COUNT(rows)); r++)
        for (size_t i = 0; i < small_or(2, TD_COUNT(splits)); i++) {
            check_product(&s, rows[r], CUDA_ADD_F32, splits[i]);
            check_product(&t, rows[r], CUDA_ADD_F32, splits[i]);
        }
    scene_free(&s), scene_free(&t);
}

static void what_it_is_not_for(void **state)
{
    (void)state;
    struct cuda_product p = {.m = {.form = CUDA_BF16, .columns = 64, .rows = 64},
                             .act_bf16 = true,
                             .rows = 16,
                             .act_stride = 64,
                             .out_stride = 64};
    struct cuda_product q[] = {p, p, p, p, p};
    q[0].m.form = CUDA_F16, q[1].rows = CUDA_STREAM_ROWS + 1, q[2].m.rows = 72, q[3].m.columns = 60,
    q[4].out_stride = 68;
    for (size_t i = 0; i < TD_COUNT(q); i++)
        assert_false(cuda_product_hopper(0, &q[i], 0));
    assert_int_equal(cuda_launch_error(), cudaSuccess);
}
#endif

int main(void)
{
    if (!gpu_is_here())
        return 0;
#ifdef TANDEM_HAS_CUDA
    seed_anew();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_of_many_rows),
        cmocka_unit_test(products_of_many_tiles),
        cmocka_unit_test(sums_of_many_rows),
        cmocka_unit_test(what_it_is_not_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
#endif
}
