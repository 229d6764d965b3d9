/* model: every golden model loads with the parameters and types that it is said to have and gives the reference's logits; files
 * that the engine cannot compute exactly are refused with a line that says why. */
#include "tests/unit/kernels/models.h"
#include <math.h>
#include <unistd.h>

struct golden {
    uint32_t id_count, position_count, vocab_count;
    int32_t *ids;
    uint32_t *positions;
    float *logits; /* [position_count][vocab_count] */
};

static void *read_words(FILE *f, size_t count)
{
    void *p = malloc(4 * count + 1);
    assert_non_null(p);
    assert_int_equal(fread(p, 4, count, f), count);
    return p;
}

static void golden_read(struct golden *g, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/tiny/%s.logits", TEST_DATA, name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    uint32_t *head = read_words(f, 5);
    assert_memory_equal(head, "TDTL\1\0\0\0", 8);
    g->id_count = head[2], g->position_count = head[3], g->vocab_count = head[4];
    g->ids = read_words(f, g->id_count);
    g->positions = read_words(f, g->position_count);
    g->logits = read_words(f, (size_t)g->position_count * g->vocab_count);
    free(head);
    fclose(f);
}

static void golden_free(struct golden *g)
{
    free(g->ids), free(g->positions), free(g->logits);
}

static double divergence(const float *reference, const float *got, uint32_t count)
{
    double sum_p = 0, sum_q = 0, kl = 0;
    for (uint32_t i = 0; i < count; i++)
        sum_p += exp((double)reference[i]), sum_q += exp((double)got[i]);
    for (uint32_t i = 0; i < count; i++) {
        double lp = (double)reference[i] - log(sum_p);
        kl += exp(lp) * (lp - ((double)got[i] - log(sum_q)));
    }
    return kl;
}

static bool is_quantised_file(const char *name)
{
    return strncmp(name, "type-", 5) == 0 && strcmp(name, "type-f32") != 0;
}

/* Bounds: with float activations only the f16 KV differs (llama.cpp: up to 0.06); with int8 activations about 1 (llama.cpp: up to
 * 1.01 and 0.0042). A mistake in RoPE, bias or norm gives 2.5 or more. */
static void logits_are_the_references(void **state)
{
    (void)state;
    for (size_t n = 0; n < TD_COUNT(golden_names); n++) {
        struct run r;
        struct golden g;
        run_open(&r, golden_names[n], 1, NULL);
        golden_read(&g, golden_names[n]);
        assert_int_equal(g.vocab_count, r.model->params.vocab_count);
        float *logits = new_logits(&r, g.id_count);
        run_chunks(&r, g.ids, g.id_count, g.id_count, r.pages, logits);
        double worst = 0, kl = 0;
        for (uint32_t i = 0; i < g.position_count; i++) {
            const float *got = logits + (size_t)g.positions[i] * g.vocab_count,
                        *want = g.logits + (size_t)i * g.vocab_count;
            for (uint32_t k = 0; k < g.vocab_count; k++)
                worst = fmax(worst, fabs((double)got[k] - (double)want[k]));
            kl += divergence(want, got, g.vocab_count) / g.position_count;
        }
        bool quantised = is_quantised_file(golden_names[n]);
        if (!(worst < (quantised ? 1.0 : 0.05) && kl < (quantised ? 0.0042 : 1e-5)))
            fail_msg("%s: largest error %g, divergence %g", golden_names[n], worst, kl);
        free(logits), golden_free(&g), run_close(&r);
    }
}

/* --- what the files say ---------------------------------------------------------------------------------------- */

static void parameters_are_read(void **state)
{
    (void)state;
    struct run r;
    run_open(&r, "llama-rope-linear", 1, NULL);
    const struct model_params *p = &r.model->params;
    assert_int_equal(p->arch, MODEL_LLAMA);
    assert_int_equal(p->rope_kind, ROPE_INTERLEAVED);
    assert_true(p->rope_scale == 4.0f && !p->has_rope_factors);
    run_close(&r);
    run_open(&r, "llama-rope-freqs", 1, NULL);
    assert_true(r.model->params.has_rope_factors &&
                r.model->rope_factors.columns == r.model->params.rope_dim / 2);
    run_close(&r);
    run_open(&r, "llama-gqa-untied", 1, NULL);
    assert_true(!r.model->params.tied_output &&
                r.model->params.head_count == 2 * r.model->params.kv_head_count);
    assert_ptr_not_equal(r.model->output.data, r.model->embed.data);
    run_close(&r);
    run_open(&r, "llama-mha-tied", 1, NULL);
    assert_true(r.model->params.tied_output && r.model->params.head_count == r.model->params.kv_head_count);
    assert_ptr_equal(r.model->output.data, r.model->embed.data);
    run_close(&r);
    run_open(&r, "qwen2", 1, NULL);
    assert_true(r.model->params.arch == MODEL_QWEN2 && r.model->params.rope_kind == ROPE_HALVES &&
                r.model->layers[0].bq.data);
    run_close(&r);
    run_open(&r, "qwen3", 1, NULL);
    p = &r.model->params;
    assert_true(p->arch == MODEL_QWEN3 && r.model->layers[0].q_norm.data &&
                p->head_count * p->head_dim > p->embd_size);
    run_close(&r);
}

static bool layers_hold(const struct model *m, uint32_t type)
{
    bool found = false;
    for (uint32_t i = 0; i < m->params.layer_count; i++) {
        const struct model_layer *y = &m->layers[i];
        found |= y->wq.type == type || y->wk.type == type || y->wv.type == type || y->wo.type == type ||
                 y->w_gate.type == type || y->w_up.type == type || y->w_down.type == type;
    }
    return found;
}

/* The logits above test a type only if a product uses it. */
static void every_type_is_in_some_file(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        uint32_t type;
    } holds[] = {{"type-f32", GGUF_F32},   {"llama-gqa-untied", GGUF_F16}, {"llama-mha-tied", GGUF_BF16},
                 {"type-q8_0", GGUF_Q8_0}, {"type-q4_0", GGUF_Q4_0},       {"type-q4_1", GGUF_Q4_1},
                 {"type-q5_0", GGUF_Q5_0}, {"type-q5_1", GGUF_Q5_1},       {"type-k", GGUF_Q4_K},
                 {"type-k", GGUF_Q5_K},    {"type-k", GGUF_Q6_K}};
    for (size_t i = 0; i < TD_COUNT(holds); i++) {
        struct run r;
        run_open(&r, holds[i].name, 1, NULL);
        if (!layers_hold(r.model, holds[i].type))
            fail_msg("%s holds no %s", holds[i].name, gguf_type_info(holds[i].type)->name);
        run_close(&r);
    }
}

static void weight_bytes_are_those_of_the_tensors(void **state)
{
    (void)state;
    struct run r;
    run_open(&r, "llama-gqa-untied", 1, NULL);
    uint64_t all = 0, embed = 0, ends = 0;
    for (size_t i = 0; i < gguf_tensor_count(r.file); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(r.file, i);
        all += t->size;
        embed += t == gguf_tensor(r.file, "token_embd.weight") ? t->size : 0;
        ends += t == gguf_tensor(r.file, "output.weight") || t == gguf_tensor(r.file, "output_norm.weight")
                    ? t->size
                    : 0;
    }
    uint32_t layers = r.model->params.layer_count;
    assert_int_equal(model_weight_bytes(r.model, 0, layers), all - embed);
    assert_int_equal(model_weight_bytes(r.model, 0, layers - 1) +
                         model_weight_bytes(r.model, layers - 1, layers),
                     all - embed);
    assert_int_equal(model_weight_bytes(r.model, layers, layers), ends);
    run_close(&r);
}

/* A device's file: layers [0, 1) and the embedding. The same hidden rows as the whole model, and no head. */
static void a_slice_runs_its_layers(void **state)
{
    (void)state;
    static const char *const sliced[] = {"llama-gqa-untied", "llama-mha-tied", "llama-rope-freqs"};
    for (size_t n = 0; n < TD_COUNT(sliced); n++) {
        struct run whole, part;
        struct td_error err = {0};
        char path[] = "/tmp/td-test-slice-XXXXXX";
        int fd = mkstemp(path);
        assert_true(fd >= 0);
        close(fd);
        run_open(&whole, sliced[n], 1, NULL);
        if (gguf_slice(whole.file, 1, path, NULL, NULL, &err))
            fail_msg("%s", err.text);
        run_open_path(&part, path, 1, NULL, 64);
        const struct model_params *p = &part.model->params, *q = &whole.model->params;
        assert_true(part.model->layers_held == 1 && p->layer_count == 2 && !part.model->output.data);
        assert_true(p->tied_output == q->tied_output && p->has_rope_factors == q->has_rope_factors);
        assert_null(part.model->layers[1].wq.data);
        int32_t ids[50];
        float *want = calloc(50 * (size_t)p->embd_size, sizeof *want),
              *got = calloc(50 * (size_t)p->embd_size, sizeof *got);
        fill_ids(ids, 50, p->vocab_count, 3);
        struct batch_seq s = {
            .layer_end = 1, .row_count = 50, .ids = ids, .hidden_out = want, .pages = whole.pages};
        assert_int_equal(run_batch(&whole, &s, 1), 0);
        s.hidden_out = got, s.pages = part.pages;
        assert_int_equal(run_batch(&part, &s, 1), 0);
        assert_memory_equal(want, got, sizeof(float) * 50 * p->embd_size);
        s.layer_end = 2;
        assert_int_equal(run_batch(&part, &s, 1), -TD_ERR_UNSUPPORTED);
        free(want), free(got), run_close(&whole), run_close(&part);
        unlink(path);
    }
}

/* --- refusals -------------------------------------------------------------------------------------------------- */

struct bytes {
    uint8_t *data;
    size_t size;
};

static struct bytes read_tiny(const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/tiny/%s.gguf", TEST_DATA, name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    struct bytes b = {.size = (size_t)ftell(f)};
    b.data = malloc(b.size);
    rewind(f);
    assert_int_equal(fread(b.data, 1, b.size, f), b.size);
    fclose(f);
    return b;
}

/* Where `text` starts behind its own 64-bit length, as GGUF writes strings. */
static uint8_t *find_string(const struct bytes *b, const char *text)
{
    size_t length = strlen(text);
    for (size_t i = 8; i + length <= b->size; i++)
        if (memcmp(b->data + i, text, length) == 0 && load_le32(b->data + i - 8) == length)
            return b->data + i;
    fail_msg("no string %s in the file", text);
    return NULL;
}

/* The value of a scalar key: behind its name and its 32-bit type. */
static uint8_t *find_value(const struct bytes *b, const char *key)
{
    return find_string(b, key) + strlen(key) + 4;
}

static void check_refused(struct bytes b, int code, const char *word)
{
    struct gguf *file;
    struct model *model;
    struct td_error err = {0};
    if (gguf_parse(b.data, b.size, &file, &err))
        fail_msg("the test's file does not parse: %s", err.text);
    int rc = model_load(file, &model, &err);
    if (rc != code || !strstr(err.text, word) || model != NULL)
        fail_msg("wanted code %d and '%s', got %d: %s", code, word, rc, err.text);
    gguf_close(file);
    free(b.data);
}

static void unusable_files_are_refused(void **state)
{
    (void)state;
    struct bytes b = read_tiny("llama-gqa-untied");
    memcpy(find_value(&b, "general.architecture") + 8, "gemma", 5);
    check_refused(b, -TD_ERR_UNSUPPORTED, "gemma");

    static const struct {
        const char *key;
        uint32_t value;
        int code;
    } numbers[] = {{"llama.block_count", 0, -TD_ERR_FORMAT},
                   {"llama.block_count", 5000, -TD_ERR_FORMAT},
                   {"llama.block_count", 3, -TD_ERR_FORMAT}, /* one more than the file has */
                   {"llama.embedding_length", 128, -TD_ERR_SHAPE},
                   {"llama.feed_forward_length", 65, -TD_ERR_SHAPE},
                   {"llama.attention.head_count", 3, -TD_ERR_UNSUPPORTED},
                   {"llama.attention.head_count_kv", 0, -TD_ERR_FORMAT},
                   {"llama.attention.head_count_kv", 3, -TD_ERR_FORMAT},
                   {"llama.context_length", 0, -TD_ERR_FORMAT}};
    for (size_t i = 0; i < TD_COUNT(numbers); i++) {
        b = read_tiny("llama-gqa-untied");
        store_le32(find_value(&b, numbers[i].key), numbers[i].value);
        check_refused(b, numbers[i].code, "cannot load");
    }
}

static void unusable_tensors_are_refused(void **state)
{
    (void)state;
    struct bytes b = read_tiny("llama-gqa-untied");
    memcpy(find_string(&b, "blk.0.attn_q.weight"), "blk.0.attn_x.weight", 19);
    check_refused(b, -TD_ERR_FORMAT, "blk.0.attn_q.weight is missing");

    b = read_tiny("llama-rope-freqs"); /* a tensor that would change the result, were it understood */
    memcpy(find_string(&b, "rope_freqs.weight"), "rope_freqx.weight", 17);
    check_refused(b, -TD_ERR_UNSUPPORTED, "rope_freqx.weight");

    b = read_tiny("qwen2"); /* a bias that qwen2 needs */
    memcpy(find_string(&b, "blk.1.attn_k.bias"), "blk.1.attn_k.bias", 17);
    find_string(&b, "blk.1.attn_k.bias")[13] = 'x';
    check_refused(b, -TD_ERR_FORMAT, "attn_k.bias is missing");

    b = read_tiny("llama-gqa-untied"); /* an unknown type: the 32 bits behind two dimensions */
    store_le32(find_string(&b, "blk.0.attn_q.weight") + 19 + 4 + 16, 99);
    check_refused(b, -TD_ERR_UNSUPPORTED, "type 99");
}

static void unusable_rope_is_refused(void **state)
{
    (void)state;
    struct bytes b = read_tiny("llama-rope-linear");
    memcpy(find_string(&b, "linear"), "yarnxx", 6);
    check_refused(b, -TD_ERR_UNSUPPORTED, "yarnxx");
    b = read_tiny("llama-rope-linear");
    store_le32(find_value(&b, "llama.rope.scaling.factor"), 0);
    check_refused(b, -TD_ERR_FORMAT, "rope.scaling.factor");
    b = read_tiny("llama-gqa-untied");
    store_le32(find_value(&b, "llama.attention.layer_norm_rms_epsilon"), 0x7fc00000); /* NaN */
    check_refused(b, -TD_ERR_FORMAT, "epsilon");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_the_references),
        cmocka_unit_test(parameters_are_read),
        cmocka_unit_test(every_type_is_in_some_file),
        cmocka_unit_test(weight_bytes_are_those_of_the_tensors),
        cmocka_unit_test(a_slice_runs_its_layers),
        cmocka_unit_test(unusable_files_are_refused),
        cmocka_unit_test(unusable_tensors_are_refused),
        cmocka_unit_test(unusable_rope_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
