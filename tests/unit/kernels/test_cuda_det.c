/* cuda_det: numerics cuda-det-v2: the bits of a row depend on nothing beside it. Products with any number of rows, attention, whole models
 * however the work is cut: chunks, batches, layer ranges, pages carried over. Skipped where no GPU is. */
#define DEVICE_SLACK 256
#include "kernels/cpu/blocks.h"
#include "tests/unit/kernels/models.h"
#include "tests/unit/kernels/on_gpu.h"
#include "tests/unit/kernels/small.h"

#ifdef TANDEM_HAS_CUDA
#include "kernels/bench_model.h"
#include "kernels/cuda/det_kernels.h"

/* --- products --------------------------------------------------------------------------------- */

enum { ROWS_MAX = 200 };

struct made { /* a matrix on the device, and act */
    struct cuda_matrix m;
    bool bf16;
    uint16_t *act;
    void *act_device;
};

/* Random planes: codes of any value, small scales; float forms between -1 and 1. */
static void make(struct made *p, enum cuda_form form, bool bf16, uint32_t n, uint32_t k)
{
    size_t values = (size_t)n * k, size = form == CUDA_F32    ? 4 * values
                                          : form <= CUDA_BF16 ? 2 * values
                                          : form == CUDA_W4   ? values / 2
                                                              : values;
    size_t groups = values / (form == CUDA_W8G16 ? 16 : 32);
    uint8_t *bytes = malloc(size);
    uint16_t *scales = malloc(4 * groups);
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)random32();
    for (size_t i = 0; form <= CUDA_BF16 && i < values; i++)
        if (form == CUDA_F32)
            store_le32(bytes + 4 * i, float_bits(uniform()));
        else
            store_le16(bytes + 2 * i, to16(uniform(), form == CUDA_BF16));
    for (size_t i = 0; i < groups; i++)
        scales[2 * i] = f32_to_f16(uniform() * 0.01f), scales[2 * i + 1] = f32_to_f16(uniform() * 0.05f);
    p->m = (struct cuda_matrix){form, k, n, device_copy(bytes, size), device_copy(scales, 4 * groups)};
    p->bf16 = bf16;
    p->act = malloc(sizeof *p->act * ROWS_MAX * k);
    for (size_t i = 0; i < (size_t)ROWS_MAX * k; i++)
        p->act[i] = to16(uniform(), bf16);
    p->act_device = device_copy(p->act, sizeof *p->act * ROWS_MAX * k);
    free(bytes), free(scales);
}

static void unmake(struct made *p)
{
    cudaFree((void *)(uintptr_t)p->m.values), cudaFree((void *)(uintptr_t)p->m.scales);
    cudaFree(p->act_device), free(p->act);
}

static size_t out_width(enum cuda_epilogue epilogue)
{
    return epilogue == CUDA_STORE16 ? 2 : 4;
}

/* Rows [first, first + rows) of act, into out [rows][n]; with CUDA_ADD_F32 added to 0.747. w_size: 0 for 128 rows of W at a time. */
static void run_product(const struct made *p, enum cuda_epilogue epilogue, uint32_t first, uint32_t rows,
                        size_t w_size, void *out)
{
    uint32_t n = p->m.rows, k = p->m.columns;
    size_t size = out_width(epilogue) * rows * n;
    struct cuda_det_buffers buffers = {.w_size = w_size ? w_size : (size_t)2 * 128 * (k + 128)};
    void *result;
    assert_int_equal(cudaMalloc(&buffers.w, buffers.w_size), cudaSuccess);
    assert_int_equal(cudaMalloc(&buffers.act, cuda_det_act_size(rows, k)), cudaSuccess);
    assert_int_equal(cudaMalloc(&result, size), cudaSuccess);
    assert_int_equal(cudaMemset(result, epilogue == CUDA_ADD_F32 ? 0x3f : 0xff, size), cudaSuccess);
    struct cuda_product q = {.m = p->m,
                             .act = (const uint16_t *)p->act_device + (size_t)first * k,
                             .act_bf16 = p->bf16,
                             .rows = rows,
                             .act_stride = k,
                             .epilogue = epilogue,
                             .out = result,
                             .out_stride = n};
    cuda_det_product(NULL, &q, &buffers);
    assert_int_equal(cuda_launch_error(), cudaSuccess);
    assert_int_equal(cudaMemcpy(out, result, size, cudaMemcpyDeviceToHost), cudaSuccess);
    cudaFree(buffers.w), cudaFree(buffers.act), cudaFree(result);
}

/* Against double precision on what the weights stand for, opened to f16 by the other kernel of the engine. */
static double error_of(const struct made *p, const float *got, uint32_t rows)
{
    uint32_t n = p->m.rows, k = p->m.columns;
    uint16_t *w = malloc(sizeof *w * n * k);
    void *opened;
    assert_int_equal(cudaMalloc(&opened, sizeof *w * n * k), cudaSuccess);
    cuda_dequantise(NULL, &p->m, 0, n, opened);
    assert_int_equal(cudaMemcpy(w, opened, sizeof *w * n * k, cudaMemcpyDeviceToHost), cudaSuccess);
    double error = 0, norm = 0;
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t i = 0; i < n; i++) {
            double sum = 0;
            for (uint32_t c = 0; c < k; c++)
                sum += (double)f16_to_f32(w[(size_t)i * k + c]) *
                       (double)from16(p->act[(size_t)r * k + c], p->bf16);
            error += (sum - (double)got[(size_t)r * n + i]) * (sum - (double)got[(size_t)r * n + i]);
            norm += sum * sum;
        }
    cudaFree(opened), free(w);
    return sqrt(error / norm);
}

static void rows_beside_a_row_change_nothing(void **state)
{
    (void)state;
    static const struct {
        enum cuda_form form;
        bool bf16;
    } kinds[] = {{CUDA_BF16, true},  {CUDA_W4, false}, {CUDA_F32, false},   {CUDA_F16, false},
                 {CUDA_BF16, false}, {CUDA_W8, false}, {CUDA_W8G16, false}, {CUDA_W8D, false}};
    static const uint32_t counts[] = {2, 33, 129, 8, 9, 16, 17, 32, 64, 65, 128, ROWS_MAX};
    static const uint32_t sizes[][2] = {{16, 32}, {300, 1056}, {130, 2336}, {300, 608}};
    uint32_t rows_max = (uint32_t)small_or(130, ROWS_MAX);
    for (size_t f = 0; f < small_or(2, TD_COUNT(kinds)); f++)
        for (size_t s = 0; s < small_or(2, TD_COUNT(sizes)); s++) {
            struct made p;
            uint32_t n = sizes[s][0];
            make(&p, kinds[f].form, kinds[f].bf16, n, sizes[s][1]);
            float *alone = malloc(sizeof *alone * ROWS_MAX * n), *got = malloc(sizeof *got * ROWS_MAX * n);
            for (uint32_t r = 0; r < rows_max; r++)
                run_product(&p, CUDA_STORE_F32, r, 1, 0, alone + (size_t)r * n);
            double error = error_of(&p, alone, 20);
            if (!(error <= 1e-3))
                fail_msg("form %d, %u x %u: relative error %.2e", kinds[f].form, n, sizes[s][1], error);
            for (size_t c = 0; c < small_or(3, TD_COUNT(counts)); c++) {
                run_product(&p, CUDA_STORE_F32, 0, counts[c], 0, got);
                if (memcmp(got, alone, sizeof *got * counts[c] * n) != 0)
                    fail_msg("form %d, %u x %u: with %u rows the bits are others", kinds[f].form, n,
                             sizes[s][1], counts[c]);
            }
            free(alone), free(got), unmake(&p);
        }
}

enum { SHARING = 64 << 20 }; /* bytes, that are enough for blocks to share a tile */

/* More tiles than a device has SMs, in turns; tiles that blocks share; what is stored in 16 bits, or added. */
static void large_products_and_every_epilogue(void **state)
{
    (void)state;
    static const uint32_t sizes[][2] = {{260, 1280}, {258, 96}, {3000, 4128}, {17000, 160}},
                          counts[] = {100, 200, 40, 12};
    static const enum cuda_epilogue epilogues[] = {CUDA_STORE16, CUDA_ADD_F32, CUDA_STORE_F32};
    for (size_t s = 0; s < small_or(1, TD_COUNT(sizes)); s++)
        for (size_t e = 0; e < TD_COUNT(epilogues); e++) {
            struct made p;
            uint32_t n = sizes[s][0], most = (uint32_t)small_or(100, ROWS_MAX);
            size_t row = out_width(epilogues[e]) * n;
            uint8_t *alone = malloc(row * most), *got = malloc(row * most);
            make(&p, CUDA_BF16, true, n, sizes[s][1]);
            for (uint32_t r = 0; r < most; r++)
                run_product(&p, epilogues[e], r, 1, 0, alone + row * r);
            for (size_t c = 0; c < small_or(1, TD_COUNT(counts)); c++) {
                run_product(&p, epilogues[e], 0, counts[c], SHARING, got);
                if (memcmp(got, alone, row * counts[c]) != 0)
                    fail_msg("%u x %u, epilogue %d: with %u rows the bits are others", n, sizes[s][1],
                             epilogues[e], counts[c]);
            }
            free(alone), free(got), unmake(&p);
        }
}

/* --- attention -------------------------------------------------------------------------------- */

enum { PAGES = 100, KV_HEADS = 2, TILED = 200, SPLITS = 1024, SPLIT_PAGES = CUDA_DET_SPLIT_TOKENS / 64 };

struct tiled { /* the last `rows` of `tokens`, on the device */
    struct cuda_attention a;
    uint32_t tokens, rows;
    size_t size; /* of a.out */
};

static void make_tiled(struct tiled *t, uint32_t head_dim, uint32_t group, uint32_t tokens)
{
    uint32_t table[PAGES];
    t->tokens = tokens, t->rows = (uint32_t)small_or(72, TILED);
    size_t page = (size_t)2 * KV_HEADS * 64 * head_dim,
           values = (size_t)t->rows * KV_HEADS * group * head_dim;
    void *out;
    for (uint32_t i = 0; i < PAGES; i++)
        table[i] = (i * 7 + 3) % PAGES;
    assert_int_equal(cudaMalloc(&out, 2 * values), cudaSuccess);
    t->a = (struct cuda_attention){.q = device_16(values, false, 2.0f),
                                   .out = out,
                                   .out_bf16 = group % 2 == 0,
                                   .head_count = KV_HEADS * group,
                                   .kv_head_count = KV_HEADS,
                                   .head_dim = head_dim,
                                   .kv = device_16(page * PAGES, false, 1.0f),
                                   .page_values = page,
                                   .tables = device_copy(table, sizeof table),
                                   .fixed_splits = true};
    t->size = 2 * values;
}

static void unmake_tiled(struct tiled *t)
{
    cudaFree((void *)(uintptr_t)t->a.q), cudaFree(t->a.out), cudaFree((void *)(uintptr_t)t->a.kv);
    cudaFree((void *)(uintptr_t)t->a.tables);
}

static void fetch_out(const struct tiled *t, void *out)
{
    assert_int_equal(cuda_launch_error(), cudaSuccess);
    assert_int_equal(cudaMemcpy(out, t->a.out, t->size, cudaMemcpyDeviceToHost), cudaSuccess);
    assert_int_equal(cudaMemset(t->a.out, 0xff, t->size), cudaSuccess);
}

/* Tiles of at most so many rows. */
static void attend_in_tiles(struct tiled *t, uint32_t most, void *out)
{
    struct cuda_tile tiles[TILED];
    uint32_t count = 0;
    for (uint32_t at = 0; at < t->rows; at += most)
        tiles[count++] = (struct cuda_tile){at, TD_MIN(most, t->rows - at), t->tokens - t->rows + at, 0};
    void *list = device_copy(tiles, sizeof tiles);
    cuda_attention_prefill(NULL, &t->a, list, count);
    fetch_out(t, out);
    cudaFree(list);
}

enum way { WHOLE, APART, MIXED, WAYS }; /* every third row apart */

/* Of `tokens` of a row, in the rule's splits or not; those of all rows that are apart have places in `partial` behind each other. */
static uint32_t add_row(struct cuda_split *out, uint32_t row, uint32_t tokens, bool apart, uint32_t *places)
{
    uint32_t pages = (tokens + 63) / 64, count = apart ? (pages + SPLIT_PAGES - 1) / SPLIT_PAGES : 1;
    for (uint32_t i = 0; i < count; i++) /* the last comes first: their order in the list does not matter */
        out[count - 1 - i] = (struct cuda_split){
            .row = row,
            .page_begin = i * SPLIT_PAGES,
            .page_count = apart ? TD_MIN((uint32_t)SPLIT_PAGES, pages - i * SPLIT_PAGES) : pages,
            .token_count = tokens - i * CUDA_DET_SPLIT_TOKENS,
            .first_split = *places,
            .split_count = count};
    *places += count > 1 ? count : 0;
    return count;
}

static void attend_alone(struct tiled *t, bool old_pages, enum way way, void *out)
{
    struct cuda_split splits[SPLITS] = {{0}}; /* those behind the last are empty */
    uint32_t count = 0, places = 0, counters[TILED * KV_HEADS] = {0}, zero[TILED * KV_HEADS] = {0};
    for (uint32_t r = 0; r < t->rows; r++)
        count += add_row(splits + count, t->rows - 1 - r, t->tokens - r,
                         way == APART || (way == MIXED && r % 3 == 0), &places);
    assert_true(count < SPLITS);
    size_t size = cuda_partial_size(&t->a, places + 1);
    void *list = device_copy(splits, sizeof splits), *told = device_copy(zero, sizeof zero), *partial;
    assert_int_equal(cudaMalloc(&partial, size), cudaSuccess);
    assert_int_equal(cudaMemset(partial, 0xff, size), cudaSuccess);
    t->a.old_pages = old_pages;
    cuda_det_attention(NULL, &t->a, list, TD_COUNT(splits), partial, told);
    fetch_out(t, out);
    assert_int_equal(cudaMemcpy(counters, told, sizeof counters, cudaMemcpyDeviceToHost), cudaSuccess);
    assert_memory_equal(counters, zero, sizeof zero);
    cudaFree(list), cudaFree(partial), cudaFree(told);
}

/* Values of at most 1, which a split less or a scale missed would change by more than this. */
static void check_near_unsplit(struct tiled *t, const uint16_t *fixed)
{
    size_t count = t->size / 2;
    uint16_t *fast = malloc(t->size);
    t->a.fixed_splits = false;
    attend_in_tiles(t, cuda_tile_rows(t->a.head_count, KV_HEADS), fast);
    t->a.fixed_splits = true;
    for (size_t i = 0; i < count; i++) {
        float x = from16(fixed[i], t->a.out_bf16), y = from16(fast[i], t->a.out_bf16);
        if (!(fabsf(x - y) <= (t->a.out_bf16 ? 0x1p-7f : 0x1p-10f)))
            fail_msg("heads of %u, %u tokens: %g, without splits %g", t->a.head_dim, t->tokens, (double)x,
                     (double)y);
    }
    free(fast);
}

static void a_row_alone_attends_as_in_a_tile(void **state)
{
    (void)state;
    /* rows on both sides of a split's edge, tiles that straddle it; rows of one to four splits */
    static const uint32_t dims[] = {128, 64}, groups[] = {4, 1, 3, 8},
                          tokens[] = {2100, 330, 200, 1200, 513, 2048, 2049, 2113, 4097, 4250, 6400};
    for (size_t d = 0; d < TD_COUNT(dims); d++)
        for (size_t g = 0; g < small_or(1, TD_COUNT(groups)); g++)
            for (size_t n = 0; n < small_or(1, TD_COUNT(tokens)); n++) {
                struct tiled t;
                if (!cuda_det_attention_has(dims[d], groups[g]))
                    continue;
                make_tiled(&t, dims[d], groups[g], tokens[n]);
                uint8_t *tiled = malloc(t.size), *other = malloc(t.size);
                attend_in_tiles(&t, cuda_tile_rows(t.a.head_count, KV_HEADS), tiled);
                check_near_unsplit(&t, (const uint16_t *)tiled);
                for (uint32_t most = 1; most < 16; most += 10) { /* as rows of other chunks */
                    attend_in_tiles(&t, most, other);
                    if (memcmp(tiled, other, t.size) != 0)
                        fail_msg(
                            "heads of %u, %u a KV head, %u tokens: in tiles of %u rows the bits are others",
                            dims[d], groups[g], tokens[n], most);
                }
                for (int kind = 0; kind < 2 * WAYS; kind++) {
                    attend_alone(&t, kind % 2, kind / 2, other);
                    if (memcmp(tiled, other, t.size) != 0)
                        fail_msg("heads of %u, %u a KV head, %u tokens, way %d: alone the bits are others",
                                 dims[d], groups[g], tokens[n], kind / 2);
                }
                free(tiled), free(other), unmake_tiled(&t);
            }
}
#endif

/* --- models ----------------------------------------------------------------------------------- */

enum { TOKENS = 150 };

static const char *const names[] = {"llama-mha-tied", "type-k",   "llama-gqa-untied", "llama-rope-freqs",
                                    "qwen2",          "qwen3",    "type-f32",         "type-q8_0",
                                    "type-q4_0",      "type-q5_1"};

struct scene {
    struct run run;
    int32_t ids[TOKENS];
    float *alone; /* [TOKENS][vocab]: of the ids in one piece */
    uint32_t vocab, layers, embd;
};

static void det_open(struct run *r, const char *name)
{
    char path[512];
    struct td_error err = {0};
    snprintf(path, sizeof path, "%s/tiny/%s.gguf", TEST_DATA, name);
    if (gguf_open(path, &r->file, &err) || model_load(r->file, &r->model, &err))
        fail_msg("%s", err.text);
    struct backend_config config = {.page_count = RUN_PAGES,
                                    .layers_paged = r->model->layers_held,
                                    .rows_max = 512,
                                    .deterministic = true};
    if (cuda_backend_create(r->model, &config, "cuda", &r->backend, &err))
        fail_msg("%s", err.text);
    check_det_numerics(r->backend);
    for (uint32_t i = 0; i < RUN_PAGES; i++)
        r->pages[i] = (i * 37 + 11) % RUN_PAGES;
}

static void scene_open(struct scene *s, const char *name)
{
    det_open(&s->run, name);
    const struct model_params *p = &s->run.model->params;
    s->vocab = p->vocab_count, s->layers = p->layer_count, s->embd = p->embd_size;
    fill_ids(s->ids, TOKENS, s->vocab, 42);
    s->alone = new_logits(&s->run, TOKENS);
    run_chunks(&s->run, s->ids, TOKENS, TOKENS, s->run.pages, s->alone);
}

static void scene_close(struct scene *s)
{
    free(s->alone), run_close(&s->run);
}

static void check_bits(const struct scene *s, const float *got, uint32_t first, uint32_t count,
                       const char *name, const char *what)
{
    for (uint32_t i = 0; i < count; i++)
        if (memcmp(got + (size_t)i * s->vocab, s->alone + (size_t)(first + i) * s->vocab,
                   sizeof(float) * s->vocab) != 0)
            fail_msg("%s, %s: row %u has other bits", name, what, first + i);
}

static void chunks_change_nothing(void **state)
{
    (void)state;
    static const uint32_t chunks[] = {37, 100, 1, 5, 64, 149};
    for (size_t n = 0; n < small_or(2, TD_COUNT(names)); n++) {
        struct scene s;
        scene_open(&s, names[n]);
        float *got = new_logits(&s.run, TOKENS);
        for (size_t c = 0; c < small_or(2, TD_COUNT(chunks)); c++) {
            memset(got, 0xff, sizeof *got * TOKENS * s.vocab);
            run_chunks(&s.run, s.ids, TOKENS, chunks[c], s.run.pages + 20, got);
            check_bits(&s, got, 0, TOKENS, names[n], "chunks");
        }
        free(got), scene_close(&s);
    }
}

/* The sequence as a prompt and then row by row, among others of all lengths, more of them from step to step. */
static void a_crowd_changes_nothing(void **state)
{
    (void)state;
    enum { OTHERS = 20, PROMPT = 100 };
    for (size_t n = 0; n < small_or(2, TD_COUNT(names)); n++) {
        struct scene s;
        scene_open(&s, names[n]);
        float *got = new_logits(&s.run, PROMPT), *rest = new_logits(&s.run, OTHERS + 1);
        uint32_t end = (uint32_t)small_or(PROMPT + 6, TOKENS);
        for (uint32_t at = 0; at < end;) {
            uint32_t rows = at == 0 ? PROMPT : 1, others = at == 0 ? 5 : 1 + at % OTHERS;
            struct batch_seq seqs[OTHERS + 1];
            for (uint32_t i = 0; i <= others; i++)
                seqs[i] = (struct batch_seq){.layer_end = s.layers,
                                             .row_count = 1 + i % 3,
                                             .ids = s.ids + 3 * i,
                                             .logits = rest + (size_t)i * s.vocab,
                                             .logit_count = 1,
                                             .pages = s.run.pages + 10 + i};
            uint32_t mine = others / 2;
            seqs[mine] = (struct batch_seq){.layer_end = s.layers,
                                            .position = at,
                                            .row_count = rows,
                                            .ids = s.ids + at,
                                            .logits = got,
                                            .logit_count = rows,
                                            .pages = s.run.pages + 40};
            assert_int_equal(run_batch(&s.run, seqs, others + 1), 0);
            check_bits(&s, got, at, rows, names[n], "crowd");
            at += rows;
        }
        free(got), free(rest), scene_close(&s);
    }
}

/* Layers [0, k) on one engine, the rest on another with the first's pages carried over through the host; then decode. */
static void splits_and_carried_pages_change_nothing(void **state)
{
    (void)state;
    enum { PROMPT = 140 };
    for (size_t n = 0; n < small_or(2, TD_COUNT(names)); n++) {
        struct scene s;
        struct run upper;
        scene_open(&s, names[n]);
        det_open(&upper, names[n]);
        const struct model_params *p = &upper.model->params;
        float *hidden = calloc((size_t)PROMPT * s.embd, sizeof *hidden), *got = new_logits(&upper, PROMPT);
        struct batch_seq below = {.layer_end = 1,
                                  .row_count = PROMPT,
                                  .ids = s.ids,
                                  .hidden_out = hidden,
                                  .pages = s.run.pages + 20};
        struct batch_seq above = {.layer_begin = 1,
                                  .layer_end = s.layers,
                                  .row_count = PROMPT,
                                  .hidden_in = hidden,
                                  .logits = got,
                                  .logit_count = PROMPT,
                                  .pages = upper.pages};
        assert_int_equal(run_batch(&s.run, &below, 1), 0);
        assert_int_equal(run_batch(&upper, &above, 1), 0);
        check_bits(&s, got, 0, PROMPT, names[n], "split");
        size_t values = (size_t)KV_BLOCK_TOKENS * p->kv_head_count * p->head_dim;
        uint16_t *k = calloc(values, 2), *v = calloc(values, 2);
        for (uint32_t block = 0; block < 3; block++) {
            uint32_t count = TD_MIN((uint32_t)KV_BLOCK_TOKENS, PROMPT - KV_BLOCK_TOKENS * block);
            s.run.backend->ops->page_read(s.run.backend, s.run.pages[20 + block], 0, count, k, v);
            upper.backend->ops->page_write(upper.backend, upper.pages[block], 0, count, k, v);
        }
        for (uint32_t at = PROMPT; at < TOKENS; at++) {
            struct batch_seq step = {.layer_end = s.layers,
                                     .position = at,
                                     .row_count = 1,
                                     .ids = s.ids + at,
                                     .logits = got,
                                     .logit_count = 1,
                                     .pages = upper.pages};
            assert_int_equal(run_batch(&upper, &step, 1), 0);
            check_bits(&s, got, at, 1, names[n], "carried pages");
        }
        free(k), free(v), free(hidden), free(got), run_close(&upper), scene_close(&s);
    }
}

#ifdef TANDEM_HAS_CUDA
/* Contexts that have more than one split: as a prompt in chunks that straddle its edge, and step by step over it, alone and beside others. */
static void splits_of_attention_change_nothing(void **state)
{
    (void)state;
    enum {
        CHECKED = 80,
        ALL = CUDA_DET_SPLIT_TOKENS + CHECKED / 2,
        FIRST = ALL - CHECKED,
        STEPS = 50,
        OWN_PAGES = ALL / KV_BLOCK_TOKENS + 1,
        OTHERS = RUN_PAGES - OWN_PAGES
    };
    static const uint32_t chunks[] = {500, 129, 512};
    struct bench_model *m;
    struct td_error err = {0};
    struct run r = {0};
    int32_t ids[ALL];
    assert_int_equal(bench_model_create("tiny", "f16", &m, &err), 0);
    r.model = bench_model_get(m);
    struct backend_config config = {
        .page_count = RUN_PAGES, .layers_paged = 2, .rows_max = 512, .deterministic = true};
    assert_int_equal(cuda_backend_create(r.model, &config, "cuda", &r.backend, &err), 0);
    struct scene s = {.run = r, .vocab = r.model->params.vocab_count, .layers = r.model->params.layer_count};
    for (uint32_t i = 0; i < RUN_PAGES; i++)
        s.run.pages[i] = (i * 37 + 11) % RUN_PAGES;
    fill_ids(ids, ALL, s.vocab, 42);
    float *want = new_logits(&s.run, ALL), *got = new_logits(&s.run, ALL),
          *rest = new_logits(&s.run, OTHERS + 1);
    run_chunks(&s.run, ids, ALL, 512, s.run.pages, want);
    s.alone = want + (size_t)FIRST * s.vocab;
    for (size_t c = 0; c < small_or(1, TD_COUNT(chunks)); c++) {
        run_chunks(&s.run, ids, ALL, chunks[c], s.run.pages, got);
        check_bits(&s, got + (size_t)FIRST * s.vocab, 0, CHECKED, "tiny", "chunks over a split's edge");
    }
    for (uint32_t others = 0; others <= OTHERS; others += OTHERS)
        for (uint32_t i = CHECKED - (uint32_t)small_or(45, STEPS); i < small_or(CHECKED - 38, CHECKED); i++) {
            struct batch_seq seqs[OTHERS + 1];
            for (uint32_t k = 0; k < others; k++)
                seqs[k] = (struct batch_seq){.layer_end = s.layers,
                                             .row_count = 1,
                                             .ids = ids + k,
                                             .logits = rest + (size_t)k * s.vocab,
                                             .logit_count = 1,
                                             .pages = s.run.pages + OWN_PAGES + k};
            seqs[others] = (struct batch_seq){.layer_end = s.layers,
                                              .position = FIRST + i,
                                              .row_count = 1,
                                              .ids = ids + FIRST + i,
                                              .logits = got,
                                              .logit_count = 1,
                                              .pages = s.run.pages};
            assert_int_equal(run_batch(&s.run, seqs, others + 1), 0);
            check_bits(&s, got, i, 1, "tiny", others ? "beside others over a split's edge" : "steps over it");
        }
    free(want), free(got), free(rest);
    r.backend->ops->destroy(r.backend);
    bench_model_destroy(m);
}
#endif

int main(void)
{
    if (!gpu_is_here())
        return 0;
    seed_anew();
    const struct CMUnitTest tests[] = {
#ifdef TANDEM_HAS_CUDA
        cmocka_unit_test(rows_beside_a_row_change_nothing),
        cmocka_unit_test(large_products_and_every_epilogue),
        cmocka_unit_test(a_row_alone_attends_as_in_a_tile),
#endif
        cmocka_unit_test(chunks_change_nothing),
        cmocka_unit_test(a_crowd_changes_nothing),
        cmocka_unit_test(splits_and_carried_pages_change_nothing),
#ifdef TANDEM_HAS_CUDA
        cmocka_unit_test(splits_of_attention_change_nothing),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
