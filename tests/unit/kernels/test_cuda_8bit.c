/* cuda_8bit: pages whose KV has 8 bits. Rows come back within the bounds of kernels/kv_dtype.h, and once they have, come back bit for bit; what writes
 * rows agrees on their bytes; attention against double precision on what the bytes stand for; pieces and swaps; whole models against f16 pages; and
 * with cuda-det-v2 the bits of a row whatever the chunks, the batch and the way that its pages went. Skipped where no GPU is. */
#include "kernels/bench_model.h"
#include "tests/unit/kernels/models.h"
#include "tests/unit/kernels/on_gpu.h"
#include "tests/unit/kernels/small.h"
#include <math.h>

static const enum kv_dtype dtypes[] = {KV_DTYPE_FP8, KV_DTYPE_INT8};
static const char *const dtype_names[] = {"f16", "fp8", "int8"};

#ifdef TANDEM_HAS_CUDA
#include "kernels/cuda/kv_8bit.h"

/* Rows of every size that f16 has: largest values from 2^-24 to 65504, some rows of zeros, in some a value far above the others. */
static void fill_rows(uint16_t *values, size_t rows, uint32_t head_dim)
{
    for (size_t r = 0; r < rows; r++) {
        float size = exp2f((float)(int)(random32() % 41) - 24.0f) * (1.0f + 0.9f * fabsf(uniform()));
        for (uint32_t i = 0; i < head_dim; i++) {
            float x = size * uniform() * (random32() % 3 ? 1.0f : 0x1p-6f);
            values[r * head_dim + i] =
                r % 29 == 7 ? (uint16_t)0 : f32_to_f16(fminf(fmaxf(x, -65504.0f), 65504.0f));
        }
        if (r % 5 == 0)
            values[r * head_dim + random32() % head_dim] = f32_to_f16(fminf(8 * size, 65504.0f));
    }
}

static double bound_of(enum kv_dtype dtype, double x, double most)
{
    double to_f16 = fabs(x) * 0x1p-11 + 0x1p-25;
    return dtype == KV_DTYPE_INT8 ? most / 254 * (1 + 1e-4) + to_f16
                                  : fmax(fabs(x) * 0x1p-4, fmax(most / 220, 0x1p-24) * 0x1p-10) + to_f16;
}

static void check_rows(enum kv_dtype dtype, uint32_t kv_heads, uint32_t head_dim)
{
    enum { LAYERS = 3 };
    size_t rows = (size_t)LAYERS * 2 * kv_heads * 64, values = rows * head_dim;
    uint64_t layer = kv_dtype_layer_size(dtype, kv_heads, head_dim);
    uint32_t list[LAYERS] = {2, 0, 1};
    uint16_t *in = malloc(2 * values), *out = malloc(2 * values);
    uint8_t *first = malloc(LAYERS * layer), *second = malloc(LAYERS * layer);
    fill_rows(in, rows, head_dim);
    void *opened = device_copy(in, 2 * values), *dlist = device_copy(list, sizeof list);
    struct cuda_kept k = {dtype, kv_heads, head_dim, device_filled(0x5a, LAYERS * layer), layer, dlist};
    cuda_close_pages(NULL, &k, LAYERS, opened);
    fetch(first, k.kept, LAYERS * layer);
    assert_int_equal(cudaMemset(opened, 0xff, 2 * values), cudaSuccess);
    cuda_open_pages(NULL, &k, LAYERS, opened);
    fetch(out, opened, 2 * values);
    assert_int_equal(cudaMemset(k.kept, 0xa5, LAYERS * layer), cudaSuccess);
    cuda_close_pages(NULL, &k, LAYERS, opened);
    fetch(second, k.kept, LAYERS * layer);
    for (size_t r = 0; r < rows; r++) {
        double most = 0;
        for (uint32_t i = 0; i < head_dim; i++)
            most = fmax(most, fabs((double)f16_to_f32(in[r * head_dim + i])));
        for (uint32_t i = 0; i < head_dim; i++) {
            double x = (double)f16_to_f32(in[r * head_dim + i]),
                   y = (double)f16_to_f32(out[r * head_dim + i]);
            if (!(fabs(x - y) <= bound_of(dtype, x, most)))
                fail_msg("%s, heads of %u: %g of a row up to %g comes back as %g", dtype_names[dtype],
                         head_dim, x, most, y);
        }
    }
    if (memcmp(first, second, LAYERS * layer) != 0)
        fail_msg("%s, heads of %u: what was opened closes to other bytes", dtype_names[dtype], head_dim);
    cudaFree(opened), cudaFree(dlist), cudaFree(k.kept);
    free(in), free(out), free(first), free(second);
}

static void rows_come_back(void **state)
{
    (void)state;
    static const uint32_t dims[] = {80, 128, 32, 64, 96, 256};
    for (size_t t = 0; t < TD_COUNT(dtypes); t++)
        for (size_t d = 0; d < small_or(2, TD_COUNT(dims)); d++)
            check_rows(dtypes[t], 3, dims[d]);
}

/* --- RoPE and the KV write -------------------------------------------------------------------- */

/* Written at once, and written as f16 and closed then: the same bytes, in q too. */
static void check_rope(enum kv_dtype dtype, uint32_t dim, bool interleaved, bool with_bias)
{
    enum { ROWS = 5, PAGES = 3, KV = 3, HEADS_ALL = 6 };
    uint32_t positions[ROWS] = {0, 63, 64, 100, 127}, row_table[ROWS] = {0, 0, 0, 0, 0}, table[2] = {2, 0};
    size_t values = (size_t)PAGES * 2 * KV * 64 * dim, q_values = (size_t)ROWS * HEADS_ALL * dim;
    uint64_t layer = kv_dtype_layer_size(dtype, KV, dim);
    struct cuda_rope r = {.wide = device_16((size_t)ROWS * (HEADS_ALL + 2 * KV) * dim, false, 1.0f),
                          .rows = ROWS,
                          .head_count = HEADS_ALL,
                          .kv_head_count = KV,
                          .head_dim = dim,
                          .rope_dim = dim,
                          .interleaved = interleaved,
                          .q_scale = 0.2f,
                          .cos_sin = device_floats((size_t)ROWS * dim),
                          .k_bias = with_bias ? device_floats((size_t)KV * dim) : NULL,
                          .positions = device_copy(positions, sizeof positions),
                          .row_table = device_copy(row_table, sizeof row_table),
                          .tables = device_copy(table, sizeof table),
                          .q_out = device_filled(0xff, 2 * q_values),
                          .kv = device_16(values, false, 1.0f),
                          .page_values = values / PAGES};
    struct cuda_rope r8 = r;
    struct cuda_kept k = {dtype, KV, dim, device_filled(0, PAGES * layer), layer, NULL};
    r8.q_out = device_filled(0xff, 2 * q_values), r8.kv = device_filled(0, PAGES * layer);
    r8.page_values = layer, r8.dtype = dtype;
    cuda_close_pages(NULL, &(struct cuda_kept){dtype, KV, dim, r8.kv, layer, NULL}, PAGES, r.kv);
    cuda_rope_write(NULL, &r);
    cuda_close_pages(NULL, &k, PAGES, r.kv);
    cuda_rope_write(NULL, &r8);
    uint8_t *want = malloc(PAGES * layer), *got = malloc(PAGES * layer),
            *q[2] = {malloc(2 * q_values), malloc(2 * q_values)};
    fetch(want, k.kept, PAGES * layer), fetch(got, r8.kv, PAGES * layer);
    fetch(q[0], r.q_out, 2 * q_values), fetch(q[1], r8.q_out, 2 * q_values);
    if (memcmp(want, got, PAGES * layer) != 0 || memcmp(q[0], q[1], 2 * q_values) != 0)
        fail_msg("%s, heads of %u, interleaved %d, bias %d: other bytes", dtype_names[dtype], dim,
                 interleaved, with_bias);
    const void *owned[] = {r.wide,  r.cos_sin, r.k_bias, r.positions, r.row_table, r.tables,
                           r.q_out, r.kv,      r8.q_out, r8.kv,       k.kept};
    for (size_t i = 0; i < TD_COUNT(owned); i++)
        cudaFree((void *)(uintptr_t)owned[i]);
    free(want), free(got), free(q[0]), free(q[1]);
}

static void rows_are_written_as_pages_are_closed(void **state)
{
    (void)state;
    static const uint32_t dims[] = {128, 80, 64, 256};
    for (size_t t = 0; t < TD_COUNT(dtypes); t++)
        for (size_t d = 0; d < small_or(2, TD_COUNT(dims)); d++)
            for (int kind = 0; kind < 4; kind++)
                check_rope(dtypes[t], dims[d], kind & 1, kind & 2);
}

/* --- attention -------------------------------------------------------------------------------- */

#define PAGES 8

struct attention_case { /* a sequence of `tokens`, of which the last decodes */
    enum kv_dtype dtype;
    uint32_t head_dim, kv_heads, group, tokens, pages_per_split;
    bool bf16;
};

static void launch_decode(const struct attention_case *c, const struct cuda_attention *a)
{
    struct cuda_split splits[PAGES + 1] = {{0}};
    uint32_t count = add_splits(splits, 0, 0, 0, c->tokens, c->pages_per_split), zero[256] = {0};
    void *list = device_copy(splits, sizeof splits),
         *partial = device_filled(0xff, cuda_partial_size(a, count + 1)),
         *counters = device_copy(zero, sizeof zero);
    for (int i = 0; i < 2; i++) /* one empty split behind; counters are left as they were */
        cuda_attention_decode(NULL, a, list, count + 1, partial, counters);
    assert_int_equal(cuda_launch_error(), cudaSuccess);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    cudaFree(list), cudaFree(partial), cudaFree(counters);
}

static void check_attention(const struct attention_case *c)
{
    uint32_t heads = c->kv_heads * c->group, table[PAGES] = {5, 2, 7, 0, 3, 6, 1, 4}, d = c->head_dim;
    size_t values = (size_t)PAGES * 2 * c->kv_heads * 64 * d;
    uint64_t layer = kv_dtype_layer_size(c->dtype, c->kv_heads, d);
    uint16_t *pages = malloc(2 * values), *q = malloc((size_t)2 * heads * d),
             *out = malloc((size_t)2 * heads * d);
    double *want = malloc(sizeof *want * heads * d), error = 0, norm = 0;
    for (size_t i = 0; i < values; i++)
        pages[i] = f32_to_f16(uniform() * (i / d % 7 == 0 ? 0.05f : 1.0f));
    for (uint32_t i = 0; i < heads * d; i++)
        q[i] = f32_to_f16(uniform());
    void *opened = device_copy(pages, 2 * values), *dq = device_copy(q, (size_t)2 * heads * d),
         *dout = device_filled(0xff, (size_t)2 * heads * d), *dtable = device_copy(table, sizeof table);
    struct cuda_kept k = {c->dtype, c->kv_heads, d, device_filled(0, PAGES * layer), layer, NULL};
    cuda_close_pages(NULL, &k, PAGES, opened);
    cuda_open_pages(NULL, &k, PAGES, opened);
    fetch(pages, opened, 2 * values);
    struct cuda_attention a = {.q = dq,
                               .out = dout,
                               .out_bf16 = c->bf16,
                               .head_count = heads,
                               .kv_head_count = c->kv_heads,
                               .head_dim = d,
                               .kv = k.kept,
                               .page_values = layer,
                               .dtype = c->dtype,
                               .tables = dtable};
    launch_decode(c, &a);
    fetch(out, dout, (size_t)2 * heads * d);
    for (uint32_t h = 0; h < heads; h++)
        reference_head(&(struct reference){pages, table, c->kv_heads, d}, q + (size_t)h * d, c->tokens,
                       h / c->group, want + (size_t)h * d);
    for (uint32_t i = 0; i < heads * d; i++) {
        double got = (double)from16(out[i], c->bf16);
        error += (got - want[i]) * (got - want[i]), norm += want[i] * want[i];
    }
    if (!(sqrt(error / norm) <= (c->bf16 ? 3e-3 : 1.5e-3)))
        fail_msg("%s, heads of %u, %u x %u, %u tokens, %u pages a split: relative error %.2e",
                 dtype_names[c->dtype], d, c->kv_heads, c->group, c->tokens, c->pages_per_split,
                 sqrt(error / norm));
    cudaFree(opened), cudaFree(dq), cudaFree(dout), cudaFree(dtable), cudaFree(k.kept);
    free(pages), free(q), free(out), free(want);
}

static void attention_of_every_head_size(void **state)
{
    (void)state;
    static const uint32_t dims[] = {32, 64, 80, 96, 128, 256};
    for (size_t t = 0; t < TD_COUNT(dtypes); t++)
        for (size_t i = 0; i < TD_COUNT(dims); i++)
            check_attention(&(struct attention_case){dtypes[t], dims[i], 2, 4, 300, 1 + i % 2 * 2, i % 2});
}

static void attention_at_its_edges(void **state)
{
    (void)state;
    static const uint32_t tokens[] = {65, 1, 449, 15, 16, 17, 63, 64, 128, 512}, groups[] = {3, 8, 1, 7, 12};
    for (size_t t = 0; t < small_or(3, TD_COUNT(tokens)); t++)
        for (size_t g = 0; g < small_or(2, TD_COUNT(groups)); g++)
            for (uint32_t split = 1; split <= 8; split += 3)
                check_attention(&(struct attention_case){dtypes[(t + g) % 2], (t + split) % 2 ? 64 : 128, 3,
                                                         groups[g], tokens[t], split, split == 4});
}
#endif

/* --- engines ---------------------------------------------------------------------------------- */

enum { TOKENS = 150 };

static void engine_open(struct run *r, const char *name, enum kv_dtype dtype, bool deterministic)
{
    char path[512];
    struct td_error err = {0};
    snprintf(path, sizeof path, "%s/tiny/%s.gguf", TEST_DATA, name);
    if (gguf_open(path, &r->file, &err) || model_load(r->file, &r->model, &err))
        fail_msg("%s", err.text);
    struct backend_config config = {.page_count = RUN_PAGES,
                                    .layers_paged = r->model->layers_held,
                                    .rows_max = 512,
                                    .deterministic = deterministic,
                                    .kv_dtype = dtype};
    if (cuda_backend_create(r->model, &config, "cuda", &r->backend, &err))
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < RUN_PAGES; i++)
        r->pages[i] = (i * 37 + 11) % RUN_PAGES;
}

static double divergence_of(const float *p, const float *q, uint32_t vocab) /* KL(p || q) of logits */
{
    double max_p = -1e30, max_q = -1e30, sum_p = 0, sum_q = 0, kl = 0;
    for (uint32_t i = 0; i < vocab; i++)
        max_p = fmax(max_p, (double)p[i]), max_q = fmax(max_q, (double)q[i]);
    for (uint32_t i = 0; i < vocab; i++)
        sum_p += exp((double)p[i] - max_p), sum_q += exp((double)q[i] - max_q);
    for (uint32_t i = 0; i < vocab; i++)
        kl += exp((double)p[i] - max_p) / sum_p *
              ((double)p[i] - max_p - log(sum_p) - ((double)q[i] - max_q - log(sum_q)));
    return kl;
}

static double mean_divergence(const float *p, const float *q, uint32_t rows, uint32_t vocab)
{
    double sum = 0;
    for (uint32_t i = 0; i < rows; i++)
        sum += divergence_of(p + (size_t)i * vocab, q + (size_t)i * vocab, vocab);
    return sum / rows;
}

/* The largest difference of logits; a NaN sticks. */
static double difference(const float *a, const float *b, size_t count)
{
    double most = 0;
    for (size_t i = 0; i < count; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= most))
            most = d;
    }
    return most;
}

static const char *const names[] = {"llama-gqa-untied", "type-k", "qwen3",
                                    "llama-mha-tied",   "qwen2",  "type-q8_0"};

#define KL_FP8  0.1
#define KL_INT8 0.005
/* Logits reach 4. Of ways to cut the same work: what differs by a last bit in front of a row of 8 bits may differ by one of its steps behind it. */
#define SELF_FP8  1.0
#define SELF_INT8 0.4

/* A prompt at once and in chunks, and decode steps of one and of two sequences, which are recorded and replayed. */
static void models_are_near_those_of_f16(void **state)
{
    (void)state;
    uint32_t failed = 0;
    for (size_t n = 0; n < small_or(1, TD_COUNT(names)); n++)
        for (size_t t = 0; t < TD_COUNT(dtypes); t++) {
            struct run f16, r;
            int32_t ids[TOKENS];
            engine_open(&f16, names[n], KV_DTYPE_F16, false), engine_open(&r, names[n], dtypes[t], false);
            uint32_t vocab = r.model->params.vocab_count, layers = r.model->params.layer_count;
            uint32_t end = (uint32_t)small_or(72, TOKENS);
            float *want = new_logits(&f16, TOKENS), *whole = new_logits(&r, TOKENS),
                  *got = new_logits(&r, TOKENS);
            fill_ids(ids, TOKENS, vocab, 42);
            run_chunks(&f16, ids, TOKENS, TOKENS, f16.pages, want);
            run_chunks(&r, ids, TOKENS, TOKENS, r.pages, whole);
            double kl = mean_divergence(want, whole, TOKENS, vocab);
            run_chunks(&r, ids, TOKENS, 37, r.pages + 5, got);
            double worst = difference(got, whole, (size_t)TOKENS * vocab);
            struct batch_seq prompt = {
                .layer_end = layers, .row_count = 60, .ids = ids, .pages = r.pages + 10};
            assert_int_equal(run_batch(&r, &prompt, 1), 0);
            prompt.pages = r.pages + 15;
            assert_int_equal(run_batch(&r, &prompt, 1), 0);
            for (uint32_t at = 60; at < end; at++) {
                struct batch_seq seqs[2];
                for (uint32_t i = 0; i < 2; i++)
                    seqs[i] = (struct batch_seq){.layer_end = layers,
                                                 .position = at,
                                                 .row_count = 1,
                                                 .ids = ids + at,
                                                 .logits = got + (size_t)i * vocab,
                                                 .logit_count = 1,
                                                 .pages = r.pages + 10 + 5 * i};
                memset(got, 0xff, sizeof *got * 2 * vocab);
                if (at % 4) {
                    assert_int_equal(run_batch(&r, seqs, 2), 0);
                } else {
                    assert_int_equal(run_batch(&r, seqs, 1), 0);
                    assert_int_equal(run_batch(&r, seqs + 1, 1), 0);
                }
                for (uint32_t i = 0; i < 2; i++)
                    worst = fmax(worst, difference(seqs[i].logits, whole + (size_t)at * vocab, vocab));
            }
            print_message("%s, %s: mean KL to f16 pages %.6f; cut otherwise, logits differ by %.4f\n",
                          names[n], dtype_names[dtypes[t]], kl, worst);
            failed += !(kl <= (dtypes[t] == KV_DTYPE_FP8 ? KL_FP8 : KL_INT8)) ||
                      !(worst <= (dtypes[t] == KV_DTYPE_FP8 ? SELF_FP8 : SELF_INT8));
            free(want), free(whole), free(got), run_close(&f16), run_close(&r);
        }
    assert_int_equal(failed, 0);
}

/* --- KV in and out ---------------------------------------------------------------------------- */

static struct kv_codec_scratch *scratch;

static struct kv_shape shape_of(const struct run *r)
{
    return (struct kv_shape){r->model->params.layer_count, r->model->params.kv_head_count,
                             r->model->params.head_dim};
}

static void fill_values(uint16_t *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        values[i] = f32_to_f16(uniform() * (i / 16 % 5 == 0 ? 30.0f : 1.0f));
}

static void read_layer(struct run *r, uint32_t page, uint32_t layer, uint16_t *out)
{
    struct kv_shape shape = shape_of(r);
    size_t half = kv_piece_values(&shape, KV_BLOCK_TOKENS);
    assert_int_equal(r->backend->ops->page_read(r->backend, page, layer, KV_BLOCK_TOKENS, out, out + half),
                     0);
}

/* A piece of every codec gives what its values give that are written as rows, and leaves other tokens alone. */
static void check_piece(struct run *r, enum kv_codec codec, bool is_value, uint16_t first, uint16_t tokens)
{
    const struct backend_ops *ops = r->backend->ops;
    struct kv_shape shape = shape_of(r);
    size_t half = kv_piece_values(&shape, KV_BLOCK_TOKENS), count = kv_piece_values(&shape, tokens),
           row = shape.head_dim, capacity = kv_piece_bound(&shape, tokens);
    uint16_t *mark = malloc(4 * half), *source = malloc(2 * count), *values = malloc(2 * count),
             *got = malloc(4 * half), *want = malloc(4 * half);
    uint8_t *wire = malloc(capacity);
    fill_values(mark, 2 * half), fill_values(source, count);
    struct kv_piece_head head = {
        .version = 1,
        .codec = (uint8_t)codec,
        .is_value = is_value,
        .quality = {codec == KV_RAW ? KV_L0 : (uint8_t)codec, KV_NUMERICS_CPU_V1, 0, 0},
        .first_token = first,
        .token_count = tokens,
        .layer = 1,
        .kv_head_count = (uint16_t)shape.kv_head_count,
        .head_dim = (uint16_t)shape.head_dim};
    struct page_piece piece = {.page = 3};
    int64_t size = kv_piece_encode(scratch, &head, source, wire, capacity);
    assert_true(size > 0);
    assert_int_equal(kv_piece_parse(wire, (size_t)size, &piece.head, &piece.payload), 0);
    assert_int_equal(kv_piece_decode(scratch, &piece.head, piece.payload, values, count), 0);
    assert_int_equal(ops->page_write(r->backend, 3, 1, KV_BLOCK_TOKENS, mark, mark + half), 0);
    assert_int_equal(ops->pieces_write(r->backend, &piece, 1), 0);
    assert_int_equal(piece.status, 0);
    for (uint32_t h = 0; h < shape.kv_head_count; h++)
        memcpy(mark + (is_value ? half : 0) + ((size_t)h * KV_BLOCK_TOKENS + first) * row,
               values + h * tokens * row, 2 * tokens * row);
    assert_int_equal(ops->page_write(r->backend, 4, 1, KV_BLOCK_TOKENS, mark, mark + half), 0);
    read_layer(r, 3, 1, got), read_layer(r, 4, 1, want);
    if (memcmp(got, want, 4 * half) != 0)
        fail_msg("%s: codec %d, tokens %u on, %u of them", dtype_names[r->backend->kv_dtype], codec, first,
                 tokens);
    free(mark), free(source), free(values), free(got), free(want), free(wire);
}

static void check_swaps(struct run *r)
{
    const struct backend_ops *ops = r->backend->ops;
    struct kv_shape shape = shape_of(r);
    size_t half = kv_piece_values(&shape, KV_BLOCK_TOKENS), layers = shape.layer_count,
           all = 2 * half * layers;
    size_t kept =
        (size_t)kv_dtype_layer_size(r->backend->kv_dtype, shape.kv_head_count, shape.head_dim) * layers;
    uint16_t *values = malloc(2 * all), *before = malloc(2 * all), *after = malloc(2 * all);
    uint8_t *host = ops->host_take(r->backend, 2 * all + kept);
    assert_non_null(host);
    fill_values(values, all);
    for (uint32_t l = 0; l < layers; l++) {
        uint16_t *at = values + 2 * half * l;
        assert_int_equal(ops->page_write(r->backend, 7, l, KV_BLOCK_TOKENS, at, at + half), 0);
        read_layer(r, 7, l, before + 2 * half * l);
    }
    uint32_t pages[] = {7, 9, 11, 13}; /* out both ways, in both ways, a copy */
    for (int i = 0; i < 4; i++) {
        void *to = i % 2 ? host : host + 2 * all;
        struct page_swap swap = {.pages = &pages[i < 2 ? 0 : i - 1],
                                 .hosts = &to,
                                 .count = 1,
                                 .layer_end = (uint32_t)layers,
                                 .to_host = i < 2,
                                 .as_kept = i % 2 == 0};
        int64_t ticket = ops->swap_start(r->backend, &swap);
        assert_true(ticket > 0);
        assert_int_equal(ops->swap_done(r->backend, ticket, true), 1);
    }
    assert_memory_equal(host, before, 2 * all);
    assert_int_equal(ops->page_copy(r->backend, 11, 13), 0);
    for (size_t i = 1; i < TD_COUNT(pages); i++) {
        for (uint32_t l = 0; l < layers; l++)
            read_layer(r, pages[i], l, after + 2 * half * l);
        assert_memory_equal(after, before, 2 * all);
    }
    ops->host_give(r->backend, host);
    free(values), free(before), free(after);
}

static void pieces_and_swaps(void **state)
{
    (void)state;
    static const enum kv_codec codecs[] = {KV_L1, KV_L2, KV_RAW, KV_L0};
    static const uint16_t spans[][2] = {{0, 64}, {5, 17}, {63, 1}, {0, 24}};
    for (size_t t = 0; t < TD_COUNT(dtypes); t++) {
        struct run r;
        engine_open(&r, names[0], dtypes[t], false);
        struct kv_shape shape = shape_of(&r);
        scratch = kv_codec_scratch_create(&shape);
        for (size_t c = 0; c < TD_COUNT(codecs); c++)
            for (size_t s = 0; s < TD_COUNT(spans); s++)
                check_piece(&r, codecs[c], (c + s) % 2, spans[s][0], spans[s][1]);
        check_swaps(&r);
        kv_codec_scratch_destroy(scratch);
        run_close(&r);
    }
}

/* --- cuda-det-v2 ------------------------------------------------------------------------------ */

struct scene {
    struct run run;
    int32_t ids[TOKENS];
    float *alone; /* [TOKENS][vocab]: of the ids in one piece */
    uint32_t vocab, layers;
};

static void check_bits(const struct scene *s, const float *got, uint32_t first, uint32_t count,
                       const char *what)
{
    for (uint32_t i = 0; i < count; i++)
        if (memcmp(got + (size_t)i * s->vocab, s->alone + (size_t)(first + i) * s->vocab,
                   sizeof *got * s->vocab) != 0)
            fail_msg("%s, %s: row %u has other bits", dtype_names[s->run.backend->kv_dtype], what, first + i);
}

/* Step by step among others of all lengths. */
static void check_crowd(struct scene *s)
{
    enum { OTHERS = 9, PROMPT = 70 };
    float *got = new_logits(&s->run, PROMPT), *rest = new_logits(&s->run, OTHERS + 1);
    for (uint32_t at = 0; at < small_or(73, TOKENS);) {
        uint32_t rows = at == 0 ? PROMPT : 1, others = at == 0 ? 5 : 1 + at % OTHERS, mine = others / 2;
        struct batch_seq seqs[OTHERS + 1];
        for (uint32_t i = 0; i <= others; i++)
            seqs[i] = (struct batch_seq){.layer_end = s->layers,
                                         .row_count = 1 + i % 3,
                                         .ids = s->ids + 3 * i,
                                         .logits = rest + (size_t)i * s->vocab,
                                         .logit_count = 1,
                                         .pages = s->run.pages + 10 + i};
        seqs[mine] = (struct batch_seq){.layer_end = s->layers,
                                        .position = at,
                                        .row_count = rows,
                                        .ids = s->ids + at,
                                        .logits = got,
                                        .logit_count = rows,
                                        .pages = s->run.pages + 40};
        assert_int_equal(run_batch(&s->run, seqs, others + 1), 0);
        check_bits(s, got, at, rows, "crowd");
        at += rows;
    }
    free(got), free(rest);
}

/* 128 tokens' pages out and back elsewhere as they are kept, as f16, and through rows, as a block goes to the store; the rest behind each. */
static void check_carried(struct scene *s)
{
    enum { CARRIED = 2, FIRST = CARRIED * KV_BLOCK_TOKENS };
    struct backend *b = s->run.backend;
    const struct model_params *p = &s->run.model->params;
    size_t half = (size_t)KV_BLOCK_TOKENS * p->kv_head_count * p->head_dim, page = 4 * half * s->layers;
    uint16_t *kv = calloc(2 * half, 2);
    uint8_t *host = b->ops->host_take(b, CARRIED * page);
    float *got = new_logits(&s->run, TOKENS);
    assert_non_null(host);
    for (uint32_t way = 0; way < 3; way++) {
        uint32_t *to = s->run.pages + 30 + 5 * way;
        for (uint32_t l = 0; way == 2 && l < s->layers; l++)
            for (uint32_t i = 0; i < CARRIED; i++) {
                assert_int_equal(b->ops->page_read(b, s->run.pages[i], l, KV_BLOCK_TOKENS, kv, kv + half), 0);
                assert_int_equal(b->ops->page_write(b, to[i], l, KV_BLOCK_TOKENS, kv, kv + half), 0);
            }
        for (uint32_t in = 0; way < 2 && in < 2; in++) {
            struct page_swap swap = {.pages = in ? to : s->run.pages,
                                     .hosts = (void *[]){host, host + page},
                                     .count = CARRIED,
                                     .layer_end = s->layers,
                                     .to_host = !in,
                                     .as_kept = way == 0};
            int64_t ticket = b->ops->swap_start(b, &swap);
            assert_true(ticket > 0);
            assert_int_equal(b->ops->swap_done(b, ticket, true), 1);
        }
        for (uint32_t at = FIRST; at < small_or(FIRST + 2, TOKENS); at++) {
            struct batch_seq step = {.layer_end = s->layers,
                                     .position = at,
                                     .row_count = 1,
                                     .ids = s->ids + at,
                                     .logits = got,
                                     .logit_count = 1,
                                     .pages = to};
            assert_int_equal(run_batch(&s->run, &step, 1), 0);
            check_bits(s, got, at, 1, "carried pages");
        }
    }
    b->ops->host_give(b, host);
    free(kv), free(got);
}

static void bits_depend_on_nothing_beside_a_row(void **state)
{
    (void)state;
    static const uint32_t chunks[] = {37, 1, 64, 100};
    for (size_t n = 0; n < small_or(1, TD_COUNT(names)); n++)
        for (size_t t = 0; t < TD_COUNT(dtypes); t++) {
            struct scene s;
            engine_open(&s.run, names[n], dtypes[t], true);
            check_det_numerics(s.run.backend);
            s.vocab = s.run.model->params.vocab_count, s.layers = s.run.model->params.layer_count;
            fill_ids(s.ids, TOKENS, s.vocab, 42);
            s.alone = new_logits(&s.run, TOKENS);
            run_chunks(&s.run, s.ids, TOKENS, TOKENS, s.run.pages, s.alone);
            float *got = new_logits(&s.run, TOKENS);
            for (size_t c = 0; c < small_or(1, TD_COUNT(chunks)); c++) {
                memset(got, 0xff, sizeof *got * TOKENS * s.vocab);
                run_chunks(&s.run, s.ids, TOKENS, chunks[c], s.run.pages + 20, got);
                check_bits(&s, got, 0, TOKENS, "chunks");
            }
            check_carried(&s), check_crowd(&s);
            free(got), free(s.alone), run_close(&s.run);
        }
}

/* More prompts at once than there is room to open: they take turns. */
static void prompts_take_turns(void **state)
{
    (void)state;
    enum { SEQS = 6, LENGTH = 100 };
    struct bench_model *m;
    struct td_error err = {0};
    struct run r = {0};
    int32_t ids[LENGTH];
    assert_int_equal(bench_model_create("tiny", "f16", &m, &err), 0);
    r.model = bench_model_get(m);
    uint32_t context = r.model->params.context_max;
    r.model->params.context_max = 3 * KV_BLOCK_TOKENS; /* room for 4 pages: two sequences */
    struct backend_config config = {.page_count = RUN_PAGES,
                                    .layers_paged = 2,
                                    .rows_max = 1024,
                                    .deterministic = true,
                                    .kv_dtype = KV_DTYPE_FP8};
    assert_int_equal(cuda_backend_create(r.model, &config, "cuda", &r.backend, &err), 0);
    for (uint32_t i = 0; i < RUN_PAGES; i++)
        r.pages[i] = (i * 37 + 11) % RUN_PAGES;
    uint32_t vocab = r.model->params.vocab_count;
    fill_ids(ids, LENGTH, vocab, 3);
    float *alone = new_logits(&r, LENGTH), *got = new_logits(&r, SEQS * LENGTH);
    run_chunks(&r, ids, LENGTH, LENGTH, r.pages, alone);
    struct batch_seq seqs[SEQS];
    for (uint32_t i = 0; i < SEQS; i++)
        seqs[i] = (struct batch_seq){.layer_end = 2,
                                     .row_count = LENGTH - 13 * i,
                                     .ids = ids,
                                     .logits = got + (size_t)i * LENGTH * vocab,
                                     .logit_count = LENGTH - 13 * i,
                                     .pages = r.pages + 10 + 4 * i};
    assert_int_equal(run_batch(&r, seqs, SEQS), 0);
    for (uint32_t i = 0; i < SEQS; i++)
        assert_memory_equal(seqs[i].logits, alone, sizeof *got * seqs[i].logit_count * vocab);
    free(alone), free(got);
    r.backend->ops->destroy(r.backend);
    r.model->params.context_max = context;
    bench_model_destroy(m);
}

int main(void)
{
    if (!gpu_is_here())
        return 0;
    seed_anew();
    const struct CMUnitTest tests[] = {
#ifdef TANDEM_HAS_CUDA
        cmocka_unit_test(rows_come_back),
        cmocka_unit_test(rows_are_written_as_pages_are_closed),
        cmocka_unit_test(attention_of_every_head_size),
        cmocka_unit_test(attention_at_its_edges),
#endif
        cmocka_unit_test(models_are_near_those_of_f16),
        cmocka_unit_test(pieces_and_swaps),
        cmocka_unit_test(bits_depend_on_nothing_beside_a_row),
        cmocka_unit_test(prompts_take_turns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
