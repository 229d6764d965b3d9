/* cuda_ops: each kernel against double precision on fresh random inputs (TANDEM_SEED repeats them): odd shapes, every weight type, every head size, outputs poisoned
 * with NaN before. The error is ||out - reference|| / ||reference||; each bound is what 16-bit operands explain. */
#define DEVICE_SLACK 256
#include "tests/unit/kernels/on_gpu.h"

#ifdef TANDEM_HAS_CUDA
static void check(const float *got, const double *want, size_t count, double bound, const char *what,
                  unsigned a, unsigned b)
{
    double error = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += want[i] * want[i];
    }
    double relative = sqrt(error / norm);
    if (!(relative <= bound))
        fail_msg("%s (%u, %u): relative error %.2e, at most %.2e", what, a, b, relative, bound);
}

/* --- weights and products ---------------------------------------------------------------------- */

static const struct {
    uint32_t type;
    enum cuda_form form;
    uint32_t columns;
} kinds[] = {{GGUF_F32, CUDA_F32, 160},  {GGUF_F16, CUDA_F16, 608},    {GGUF_BF16, CUDA_BF16, 1184},
             {GGUF_Q4_0, CUDA_W4, 160},  {GGUF_Q4_1, CUDA_W4, 1312},   {GGUF_Q5_0, CUDA_W8, 608},
             {GGUF_Q5_1, CUDA_W8, 96},   {GGUF_Q8_0, CUDA_W8D, 1184},  {GGUF_Q4_K, CUDA_W4, 768},
             {GGUF_Q5_K, CUDA_W8, 1280}, {GGUF_Q6_K, CUDA_W8G16, 2304}};

#define N_ROWS 90 /* even for gate and up, no multiple of 16 */

#define PAGES 8

struct matrix {
    struct cuda_matrix m;
    float *values; /* what the file's bytes mean */
    void *raw_device;
};

static void fill_block(uint32_t type, uint8_t *b, size_t size)
{
    for (size_t i = 0; i < size; i++)
        b[i] = (uint8_t)random64();
    float small = type == GGUF_Q4_K || type == GGUF_Q5_K || type == GGUF_Q6_K
                      ? 0x1p-6f
                      : 1.0f; /* their scales are integers */
    uint16_t d = f32_to_f16(small * (0.02f + 0.01f * uniform())), m = f32_to_f16(small * 0.1f * uniform());
    store_le16(b + (type == GGUF_Q6_K ? 208 : 0), d);
    if (weight_has_minimum(type))
        store_le16(b + 2, m);
}

static struct matrix matrix_new(size_t kind)
{
    uint32_t type = kinds[kind].type, columns = kinds[kind].columns;
    const struct gguf_type_info *info = gguf_type_info(type);
    size_t row_size = weight_row_size(type, columns), count = (size_t)N_ROWS * columns;
    uint8_t *raw = malloc(row_size * N_ROWS);
    struct matrix x = {.m = {.form = kinds[kind].form, .columns = columns, .rows = N_ROWS},
                       .values = malloc(sizeof(float) * count)};
    for (size_t i = 0; i < row_size * N_ROWS; i += info->block_size) {
        if (type == GGUF_F32)
            store_le32(raw + i, float_bits(uniform()));
        else if (info->block_values == 1)
            store_le16(raw + i, to16(uniform(), type == GGUF_BF16));
        else
            fill_block(type, raw + i, info->block_size);
    }
    for (uint32_t r = 0; r < N_ROWS; r++)
        weight_row_to_f32(type, raw + r * row_size, 0, columns, x.values + (size_t)r * columns);
    x.raw_device = device_copy(raw, row_size * N_ROWS);
    x.m.values = x.raw_device;
    if (weight_is_quantised(type)) {
        x.m.values = device_filled(0xff, count), x.m.scales = device_filled(0xff, count / 4);
        cuda_repack(0, type, x.raw_device, N_ROWS, columns, (void *)(uintptr_t)x.m.values,
                    (void *)(uintptr_t)x.m.scales);
    }
    free(raw);
    return x;
}

static void matrix_free(struct matrix *x)
{
    if (x->m.scales)
        cudaFree((void *)(uintptr_t)x->m.values), cudaFree((void *)(uintptr_t)x->m.scales);
    cudaFree(x->raw_device);
    free(x->values);
}

static void dequantised_weights(void **state)
{
    (void)state;
    for (size_t k = 0; k < TD_COUNT(kinds); k++) {
        struct matrix x = matrix_new(k);
        size_t count = (size_t)(N_ROWS - 7) * x.m.columns;
        uint16_t *out = malloc(2 * count);
        float *got = malloc(sizeof(float) * count);
        double *want = malloc(sizeof(double) * count);
        void *device = device_filled(0xff, 2 * count);
        cuda_dequantise(0, &x.m, 7, N_ROWS - 7, device);
        fetch(out, device, 2 * count);
        for (size_t i = 0; i < count; i++)
            got[i] = f16_to_f32(out[i]), want[i] = (double)x.values[7 * x.m.columns + i];
        check(got, want, count, 6e-4, "dequantise", kinds[k].type, x.m.columns);
        cudaFree(device), free(out), free(got), free(want), matrix_free(&x);
    }
}

struct product_case {
    const struct matrix *x;
    uint32_t rows;
    bool bf16;
    enum cuda_epilogue epilogue;
};

static void check_product(const struct product_case *c)
{
    const struct cuda_matrix *m = &c->x->m;
    uint32_t k = m->columns, outs = c->epilogue == CUDA_SWIGLU16 ? N_ROWS / 2 : N_ROWS, stride = outs + 6;
    bool wide = c->epilogue == CUDA_ADD_F32 || c->epilogue == CUDA_STORE_F32;
    uint16_t *act = malloc(2 * (size_t)c->rows * k), *out16 = malloc(2 * (size_t)c->rows * stride);
    float *out = calloc((size_t)c->rows * stride, sizeof *out), got[CUDA_MATVEC_ROWS * N_ROWS];
    double want[CUDA_MATVEC_ROWS * N_ROWS], *sums = calloc((size_t)c->rows * N_ROWS, sizeof *sums);
    for (size_t i = 0; i < (size_t)c->rows * k; i++)
        act[i] = to16(uniform(), c->bf16);
    for (size_t i = 0; i < (size_t)c->rows * stride; i++)
        out[i] = c->epilogue == CUDA_ADD_F32 ? 1.0f : NAN;
    for (uint32_t r = 0; r < c->rows; r++)
        for (uint32_t n = 0; n < N_ROWS; n++)
            for (uint32_t i = 0; i < k; i++)
                sums[r * N_ROWS + n] +=
                    (double)from16(act[(size_t)r * k + i], c->bf16) * (double)c->x->values[(size_t)n * k + i];
    void *act_device = device_copy(act, 2 * (size_t)c->rows * k),
         *out_device = wide ? device_copy(out, 4 * (size_t)c->rows * stride)
                            : device_filled(0xff, 2 * (size_t)c->rows * stride);
    struct cuda_product p = {.m = *m,
                             .act = act_device,
                             .act_bf16 = c->bf16,
                             .rows = c->rows,
                             .act_stride = k,
                             .epilogue = c->epilogue,
                             .out = out_device,
                             .out_stride = stride};
    cuda_matvec(0, &p);
    fetch(wide ? (void *)out : out16, out_device, (wide ? 4 : 2) * (size_t)c->rows * stride);
    for (uint32_t r = 0; r < c->rows; r++)
        for (uint32_t n = 0; n < outs; n++) {
            double y = sums[r * N_ROWS + n];
            if (c->epilogue == CUDA_SWIGLU16)
                y = y / (1 + exp(-y)) * sums[r * N_ROWS + outs + n];
            want[r * outs + n] = y + (c->epilogue == CUDA_ADD_F32);
            got[r * outs + n] = wide ? out[r * stride + n] : from16(out16[r * stride + n], c->bf16);
        }
    check(got, want, (size_t)c->rows * outs, c->bf16 ? 4e-3 : 1.5e-3, "product", m->form,
          c->rows * 10 + c->epilogue);
    cudaFree(act_device), cudaFree(out_device), free(act), free(out16), free(out), free(sums);
}

static void products_of_few_rows(void **state)
{
    (void)state;
    static const uint32_t rows[] = {3, 16, 1, 8, 9};
    for (size_t k = 0; k < TD_COUNT(kinds); k++) {
        struct matrix x = matrix_new(k);
        for (size_t r = 0; r < small_or(2, TD_COUNT(rows)); r++)
            for (int e = CUDA_STORE16; e <= CUDA_SWIGLU16; e++)
                for (int bf16 = 0; bf16 <= (x.m.form == CUDA_BF16); bf16++)
                    check_product(&(struct product_case){&x, rows[r], bf16, (enum cuda_epilogue)e});
        matrix_free(&x);
    }
}

/* --- rows ------------------------------------------------------------------------------------- */

static void norm_and_swiglu(void **state)
{
    (void)state;
    static const uint32_t columns[] = {576, 32, 4096, 16384};
    for (size_t c = 0; c < small_or(2, TD_COUNT(columns)); c++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            uint32_t k = columns[c], index[3] = {2, 0, 2};
            float *x = malloc(sizeof(float) * 3 * k), *w = malloc(sizeof(float) * k),
                  *got = malloc(sizeof(float) * 3 * k);
            double *want = malloc(sizeof(double) * 3 * k);
            uint16_t *out = malloc(2 * 3 * (size_t)k), *wide = malloc(2 * 3 * (size_t)k);
            for (uint32_t i = 0; i < 3 * k; i++)
                x[i] = uniform(), wide[i] = to16(4 * uniform(), bf16);
            for (uint32_t i = 0; i < k; i++)
                w[i] = 1 + 0.5f * uniform();
            void *dx = device_copy(x, sizeof(float) * 3 * k), *dw = device_copy(w, sizeof(float) * k),
                 *di = device_copy(index, sizeof index), *dout = device_filled(0xff, 2 * 3 * (size_t)k);
            cuda_norm(0, dx, di, dw, 1e-5f, 3, k, bf16, dout);
            fetch(out, dout, 2 * 3 * (size_t)k);
            for (uint32_t r = 0; r < 3; r++) {
                double sum = 0;
                for (uint32_t i = 0; i < k; i++)
                    sum += (double)x[index[r] * k + i] * (double)x[index[r] * k + i];
                for (uint32_t i = 0; i < k; i++) {
                    want[r * k + i] = (double)x[index[r] * k + i] * (double)w[i] / sqrt(sum / k + 1e-5);
                    got[r * k + i] = from16(out[r * k + i], bf16);
                }
            }
            check(got, want, 3 * (size_t)k, bf16 ? 3e-3 : 4e-4, "norm", k, (unsigned)bf16);
            uint32_t half = 3 * k / 2 / 8 * 8; /* one row of gate and up */
            void *dwide = device_copy(wide, 4 * (size_t)half);
            cuda_swiglu(0, dwide, 1, half, bf16, bf16, dout);
            fetch(out, dout, 2 * (size_t)half);
            for (uint32_t i = 0; i < half; i++) {
                double g = (double)from16(wide[i], bf16), u = (double)from16(wide[half + i], bf16);
                want[i] = g / (1 + exp(-g)) * u, got[i] = from16(out[i], bf16);
            }
            check(got, want, half, bf16 ? 3e-3 : 4e-4, "swiglu", k, (unsigned)bf16);
            cudaFree(dx), cudaFree(dw), cudaFree(di), cudaFree(dout), cudaFree(dwide);
            free(x), free(w), free(got), free(want), free(out), free(wide);
        }
}

static void embedding(void **state)
{
    (void)state;
    static const int32_t ids[5] = {N_ROWS - 1, 0, 17, 17, 64};
    for (size_t k = 0; k < TD_COUNT(kinds); k++) {
        struct matrix x = matrix_new(k);
        uint32_t columns = x.m.columns, count = 5 * columns;
        float *got = malloc(sizeof(float) * count);
        double *want = malloc(sizeof(double) * count);
        void *dids = device_copy(ids, sizeof ids), *out = device_filled(0xff, sizeof(float) * count);
        cuda_embed(0, &x.m, dids, 5, out);
        fetch(got, out, sizeof(float) * count);
        for (uint32_t i = 0; i < count; i++)
            want[i] = (double)x.values[(size_t)ids[i / columns] * columns + i % columns];
        check(got, want, count, weight_is_quantised(kinds[k].type) ? 6e-4 : 1e-7, "embedding", kinds[k].type,
              columns);
        cudaFree(dids), cudaFree(out), free(got), free(want), matrix_free(&x);
    }
}

/* --- RoPE and the KV write ---------------------------------------------------------------------- */

#define ROPE_ROWS 5
#define ROPE_KV   2 /* heads */
#define ROPE_Q    6

struct rope_case {
    uint32_t head_dim, rope_dim;
    bool interleaved, bf16, extras; /* extras: biases, and norms of q's and k's heads */
};

static const uint32_t rope_positions[ROPE_ROWS] = {63, 64, 65, 0, 200},
                      rope_row_table[ROPE_ROWS] = {0, 0, 0, 2, 2}, rope_tables[] = {5, 2, 7, 0, 3, 6};

/* One head of a row, in double. */
static void turn_head(const struct rope_case *c, const uint16_t *in, const float *bias, const float *norm,
                      const float *cos_sin, double *out)
{
    uint32_t d = c->head_dim, pairs = c->rope_dim / 2;
    double sum = 0;
    for (uint32_t i = 0; i < d; i++) {
        out[i] = (double)from16(in[i], c->bf16) + (bias ? (double)bias[i] : 0);
        sum += out[i] * out[i];
    }
    for (uint32_t i = 0; i < d && norm; i++)
        out[i] *= (double)norm[i] / sqrt(sum / d + 1e-5);
    for (uint32_t i = 0; i < pairs && cos_sin; i++) {
        uint32_t first = c->interleaved ? 2 * i : i, second = c->interleaved ? 2 * i + 1 : i + pairs;
        double x = out[first], y = out[second], cosine = (double)cos_sin[i],
               sine = (double)cos_sin[pairs + i];
        out[first] = x * cosine - y * sine, out[second] = x * sine + y * cosine;
    }
}

static float *random_floats(size_t count)
{
    float *x = malloc(sizeof(float) * count);
    for (size_t i = 0; i < count; i++)
        x[i] = 1 + 0.5f * uniform();
    return x;
}

static void check_rope(const struct rope_case *c)
{
    enum { HEADS = ROPE_Q + 2 * ROPE_KV };
    uint32_t d = c->head_dim, wide = HEADS * d, page = 2 * ROPE_KV * 64 * d;
    uint16_t *in = malloc(2 * (size_t)ROPE_ROWS * wide), *q = malloc(2 * (size_t)ROPE_ROWS * ROPE_Q * d),
             *kv = malloc(2 * (size_t)PAGES * page);
    float *bias = random_floats(wide), *norm = random_floats(2 * d),
          *turns = random_floats(ROPE_ROWS * c->rope_dim), *got = malloc(sizeof(float) * ROPE_ROWS * wide);
    double *want = malloc(sizeof(double) * ROPE_ROWS * wide);
    for (uint32_t i = 0; i < ROPE_ROWS * wide; i++)
        in[i] = to16(uniform(), c->bf16);
    void *din = device_copy(in, 2 * (size_t)ROPE_ROWS * wide),
         *dq = device_filled(0xff, 2 * (size_t)ROPE_ROWS * ROPE_Q * d),
         *dkv = device_filled(0xff, 2 * (size_t)PAGES * page),
         *dbias = device_copy(bias, sizeof(float) * wide), *dnorm = device_copy(norm, sizeof(float) * 2 * d),
         *dturns = device_copy(turns, sizeof(float) * ROPE_ROWS * c->rope_dim),
         *dpositions = device_copy(rope_positions, sizeof rope_positions),
         *drow = device_copy(rope_row_table, sizeof rope_row_table),
         *dtables = device_copy(rope_tables, sizeof rope_tables);
    const float *biases = c->extras ? dbias : NULL, *norms = c->extras ? dnorm : NULL;
    cuda_rope_write(0, &(struct cuda_rope){.wide = din,
                                           .bf16 = c->bf16,
                                           .rows = ROPE_ROWS,
                                           .head_count = ROPE_Q,
                                           .kv_head_count = ROPE_KV,
                                           .head_dim = d,
                                           .rope_dim = c->rope_dim,
                                           .interleaved = c->interleaved,
                                           .norm_eps = 1e-5f,
                                           .q_scale = 0.125f,
                                           .cos_sin = dturns,
                                           .q_bias = biases,
                                           .k_bias = biases ? biases + ROPE_Q * d : NULL,
                                           .v_bias = biases ? biases + (ROPE_Q + ROPE_KV) * d : NULL,
                                           .q_norm = norms,
                                           .k_norm = norms ? norms + d : NULL,
                                           .positions = dpositions,
                                           .row_table = drow,
                                           .tables = dtables,
                                           .q_out = dq,
                                           .kv = dkv,
                                           .page_values = page});
    fetch(q, dq, 2 * (size_t)ROPE_ROWS * ROPE_Q * d);
    fetch(kv, dkv, 2 * (size_t)PAGES * page);
    for (uint32_t r = 0; r < ROPE_ROWS; r++)
        for (uint32_t h = 0; h < HEADS; h++) {
            bool is_q = h < ROPE_Q, is_v = h >= ROPE_Q + ROPE_KV;
            size_t at = ((size_t)r * HEADS + h) * d;
            const float *n = !c->extras || is_v ? NULL : is_q ? norm : norm + d;
            turn_head(c, in + at, c->extras ? bias + h * d : NULL, n, is_v ? NULL : turns + r * c->rope_dim,
                      want + at);
            uint32_t position = rope_positions[r];
            uint16_t *row = is_q ? q + ((size_t)r * ROPE_Q + h) * d
                                 : kv + (size_t)rope_tables[rope_row_table[r] + position / 64] * page +
                                       ((h - ROPE_Q) * 64 + position % 64) * d;
            for (uint32_t i = 0; i < d; i++) {
                want[at + i] *= is_q ? 0.125 : 1;
                got[at + i] = f16_to_f32(row[i]);
                row[i] = is_q ? row[i] : 0xffff;
            }
        }
    check(got, want, (size_t)ROPE_ROWS * wide, 6e-4, "RoPE and KV write", d, c->rope_dim + c->bf16);
    for (size_t i = 0; i < (size_t)PAGES * page; i++)
        assert_int_equal(kv[i], 0xffff); /* nothing beside the rows was written */
    void *all[] = {din, dq, dkv, dbias, dnorm, dturns, dpositions, drow, dtables};
    for (size_t i = 0; i < TD_COUNT(all); i++)
        cudaFree(all[i]);
    free(in), free(q), free(kv), free(bias), free(norm), free(turns), free(got), free(want);
}

static void rope_of_every_head_size(void **state)
{
    (void)state;
    static const uint32_t dims[][2] = {{32, 32},   {64, 64},  {80, 32},  {96, 96},
                                       {128, 128}, {128, 64}, {256, 256}};
    for (size_t i = 0; i < TD_COUNT(dims); i++)
        for (int kind = 0; kind < 8; kind++)
            check_rope(&(struct rope_case){dims[i][0], dims[i][1], kind & 1, kind & 2, kind & 4});
}

/* --- attention -------------------------------------------------------------------------------- */

struct attention_case { /* one sequence of `tokens`; the last `count` rows are computed */
    uint32_t head_dim, kv_heads, group, tokens, count, pages_per_split;
    bool bf16;
};

static void launch_attention(const struct attention_case *c, struct cuda_attention *a)
{
    uint32_t first = c->tokens - c->count;
    if (c->pages_per_split) {
        struct cuda_split splits[PAGES + 1] = {{0}};
        uint32_t count = add_splits(splits, 0, 0, 0, c->tokens, c->pages_per_split), zero[256] = {0};
        void *list = device_copy(splits, sizeof splits),
             *partial = device_filled(0xff, cuda_partial_size(a, count)),
             *counters = device_copy(zero, sizeof zero);
        cuda_attention_decode(0, a, list, count + 1, partial, counters); /* one empty split behind */
        cuda_attention_decode(0, a, list, count + 1, partial, counters); /* counters are left as they were */
        assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
        cudaFree(list), cudaFree(partial), cudaFree(counters);
        return;
    }
    uint32_t step = cuda_tile_rows(a->head_count, a->kv_head_count), count = 0;
    struct cuda_tile tiles[64 * PAGES];
    for (uint32_t at = 0; at < c->count; at += step)
        tiles[count++] = (struct cuda_tile){at, TD_MIN(step, c->count - at), first + at, 0};
    void *list = device_copy(tiles, sizeof tiles);
    cuda_attention_prefill(0, a, list, count);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    cudaFree(list);
}

static void check_attention(const struct attention_case *c)
{
    uint32_t heads = c->kv_heads * c->group, table[PAGES] = {5, 2, 7, 0, 3, 6, 1, 4}, d = c->head_dim;
    size_t page = (size_t)2 * c->kv_heads * 64 * d, values = (size_t)c->count * heads * d;
    uint16_t *pages = malloc(2 * page * PAGES), *q = malloc(2 * values), *out = malloc(2 * values);
    float *got = malloc(sizeof(float) * values);
    double *want = malloc(sizeof(double) * values);
    for (size_t i = 0; i < page * PAGES; i++)
        pages[i] = f32_to_f16(uniform());
    for (size_t i = 0; i < values; i++)
        q[i] = f32_to_f16(uniform());
    void *dpages = device_copy(pages, 2 * page * PAGES), *dq = device_copy(q, 2 * values),
         *dout = device_filled(0xff, 2 * values), *dtable = device_copy(table, sizeof table);
    struct cuda_attention a = {.q = dq,
                               .out = dout,
                               .out_bf16 = c->bf16,
                               .head_count = heads,
                               .kv_head_count = c->kv_heads,
                               .head_dim = d,
                               .kv = dpages,
                               .page_values = page,
                               .tables = dtable};
    launch_attention(c, &a);
    fetch(out, dout, 2 * values);
    struct reference reference = {pages, table, c->kv_heads, d};
    for (uint32_t r = 0; r < c->count; r++)
        for (uint32_t h = 0; h < heads; h++)
            reference_head(&reference, q + ((size_t)r * heads + h) * d, c->tokens - c->count + r + 1,
                           h / c->group, want + ((size_t)r * heads + h) * d);
    for (size_t i = 0; i < values; i++)
        got[i] = from16(out[i], c->bf16);
    check(got, want, values, c->bf16 ? 3e-3 : 1.5e-3,
          c->pages_per_split ? "decode attention" : "prefill attention", d, c->tokens * 100 + c->group);
    cudaFree(dpages), cudaFree(dq), cudaFree(dout), cudaFree(dtable);
    free(pages), free(q), free(out), free(got), free(want);
}

/* More splits and heads than two for each block of the kernel with the copy engine, so that blocks take what is left in turns; every
 * third row is split. All rows see the same pages, each up to its own position. */
#define TURN_ROWS 80

static void check_turns(uint32_t head_dim)
{
    struct attention_case c = {.head_dim = head_dim, .kv_heads = 8, .group = 2, .count = TURN_ROWS};
    uint32_t heads = c.kv_heads * c.group, table[PAGES] = {5, 2, 7, 0, 3, 6, 1, 4}, tokens[TURN_ROWS],
             count = 0;
    size_t page = (size_t)2 * c.kv_heads * 64 * head_dim, values = (size_t)TURN_ROWS * heads * head_dim;
    struct cuda_split splits[128] = {{0}};
    uint16_t *pages = malloc(2 * page * PAGES), *q = malloc(2 * values), *out = malloc(2 * values);
    float *got = malloc(sizeof(float) * values);
    double *want = malloc(sizeof(double) * values);
    uint32_t zero[2 + TURN_ROWS * 8] = {0};
    for (size_t i = 0; i < page * PAGES; i++)
        pages[i] = f32_to_f16(uniform());
    for (size_t i = 0; i < values; i++)
        q[i] = f32_to_f16(uniform());
    for (uint32_t r = 0; r < TURN_ROWS; r++) {
        tokens[r] = 1 + r * 37 % (64 * (uint32_t)small_or(3, PAGES));
        uint32_t all = (tokens[r] + 63) / 64, parts = r % 3 == 0 && all > 1 ? 2 : 1, first = count;
        for (uint32_t i = 0; i < parts; i++) {
            uint32_t begin = all * i / parts;
            splits[count++] = (struct cuda_split){.row = r,
                                                  .page_begin = begin,
                                                  .page_count = all * (i + 1) / parts - begin,
                                                  .token_count = tokens[r] - begin * 64,
                                                  .first_split = first,
                                                  .split_count = parts};
        }
    }
    void *dpages = device_copy(pages, 2 * page * PAGES), *dq = device_copy(q, 2 * values),
         *dout = device_filled(0xff, 2 * values), *dtable = device_copy(table, sizeof table),
         *list = device_copy(splits, sizeof splits), *counters = device_copy(zero, sizeof zero);
    struct cuda_attention a = {.q = dq,
                               .out = dout,
                               .head_count = heads,
                               .kv_head_count = c.kv_heads,
                               .head_dim = head_dim,
                               .kv = dpages,
                               .page_values = page,
                               .tables = dtable};
    void *partial = device_filled(0xff, cuda_partial_size(&a, count));
    assert_true(cuda_counters_size(&a, TURN_ROWS) <= sizeof zero);
    struct reference reference = {pages, table, c.kv_heads, head_dim};
    for (uint32_t r = 0; r < TURN_ROWS; r++)
        for (uint32_t h = 0; h < heads; h++)
            reference_head(&reference, q + ((size_t)r * heads + h) * head_dim, tokens[r], h / c.group,
                           want + ((size_t)r * heads + h) * head_dim);
    for (int run = 0; run < 3; run++) { /* counters are left as they were */
        assert_int_equal(cudaMemset(dout, 0xff, 2 * values), cudaSuccess);
        cuda_attention_decode(0, &a, list, TD_COUNT(splits), partial, counters);
        assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
        fetch(out, dout, 2 * values);
        for (size_t i = 0; i < values; i++)
            got[i] = from16(out[i], false);
        check(got, want, values, 1.5e-3, "decode attention in turns", head_dim, (uint32_t)run);
    }
    cudaFree(dpages), cudaFree(dq), cudaFree(dout), cudaFree(dtable), cudaFree(list), cudaFree(counters),
        cudaFree(partial);
    free(pages), free(q), free(out), free(got), free(want);
}

static void decode_attention_in_turns(void **state)
{
    (void)state;
    check_turns(128);
    check_turns(64);
}

static void attention_of_every_head_size(void **state)
{
    (void)state;
    static const uint32_t dims[] = {32, 64, 80, 96, 128, 256};
    for (size_t i = 0; i < TD_COUNT(dims); i++) {
        check_attention(&(struct attention_case){dims[i], 2, 4, 300, 1, 1, false});
        check_attention(&(struct attention_case){dims[i], 1, 3, 200, 200, 0, true});
    }
}

static void decode_attention_at_its_edges(void **state)
{
    (void)state;
    static const uint32_t tokens[] = {65, 1, 449, 15, 16, 17, 63, 64, 128, 512}, groups[] = {3, 8, 1, 7, 12};
    for (size_t t = 0; t < small_or(3, TD_COUNT(tokens)); t++)
        for (size_t g = 0; g < small_or(2, TD_COUNT(groups)); g++)
            for (uint32_t split = 1; split <= 8; split += 3)
                check_attention(&(struct attention_case){64, 3, groups[g], tokens[t], 1, split, split == 4});
}

static void prefill_attention_at_its_edges(void **state)
{
    (void)state;
    static const uint32_t tokens[] = {65, 257, 130, 2, 63, 64, 512}, groups[] = {3, 4, 1, 8};
    for (size_t t = 0; t < small_or(3, TD_COUNT(tokens)); t++)
        for (size_t g = 0; g < small_or(2, TD_COUNT(groups)); g++) {
            check_attention(
                &(struct attention_case){128, 2, groups[g], tokens[t], TD_MIN(tokens[t], 40u), 0, false});
            check_attention(
                &(struct attention_case){64, 1, groups[g], tokens[t], TD_MIN(tokens[t], 200u), 0, false});
        }
}

int main(void)
{
    if (!gpu_is_here())
        return 0;
    seed_anew();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dequantised_weights),
        cmocka_unit_test(products_of_few_rows),
        cmocka_unit_test(norm_and_swiglu),
        cmocka_unit_test(embedding),
        cmocka_unit_test(rope_of_every_head_size),
        cmocka_unit_test(attention_of_every_head_size),
        cmocka_unit_test(decode_attention_at_its_edges),
        cmocka_unit_test(decode_attention_in_turns),
        cmocka_unit_test(prefill_attention_at_its_edges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#else
int main(void)
{
    gpu_is_here();
    return 0;
}
#endif
