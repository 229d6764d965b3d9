/* The measurement of codec levels, on tiny models: what is lossless measures as nothing, each coarser level as more, and a codec that
 * is broken does not pass the gate. */
#include "kernels/bench_codec.h"
#include "tests/unit/kernels/models.h"

#define PREFIX  128
#define COUNT   64
#define WINDOWS 24

static struct gguf *file;
static struct model *model;
static int32_t ids[WINDOWS][PREFIX + COUNT];
static struct codec_window windows[WINDOWS];

static int setup(void **state)
{
    (void)state;
    struct td_error err = {0};
    if (gguf_open(TEST_DATA "/tiny/type-f32.gguf", &file, &err) || model_load(file, &model, &err))
        fail_msg("%s", err.text);
    for (uint32_t w = 0; w < WINDOWS; w++) {
        fill_ids(ids[w], PREFIX + COUNT, model->params.vocab_count, w + 1);
        windows[w] = (struct codec_window){ids[w], PREFIX, COUNT};
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    model_free(model);
    gguf_close(file);
    return 0;
}

static uint32_t bit(const char *level)
{
    return 1u << (kv_level_find(level) - KV_LEVEL_LIST);
}

static struct kv_record measured(uint32_t levels, void (*spoil)(const struct kv_piece_head *, uint8_t *))
{
    struct td_error err = {0};
    struct kv_record r = {.text_count = KV_GATE_TEXTS_MIN};
    struct bench_codec_options options = {.threads = 1, .level_mask = levels, .spoil = spoil};
    if (bench_codec(model, windows, WINDOWS, &options, &r, &err))
        fail_msg("%s", err.text);
    assert_int_equal(r.token_count, WINDOWS * (COUNT - 1));
    r.token_count = KV_GATE_TOKENS_MIN; /* the gate's wish for more text is not what is tested here */
    return r;
}

static const struct kv_level_quality *of(const struct kv_record *r, const char *level)
{
    return &r->levels[kv_level_find(level) - KV_LEVEL_LIST];
}

static void test_levels_are_in_order(void **state)
{
    (void)state;
    struct kv_record r = measured(UINT32_MAX, NULL);
    static const char *const lossless[] = {"raw", "l0"};
    for (size_t i = 0; i < TD_COUNT(lossless); i++) {
        const struct kv_level_quality *q = of(&r, lossless[i]);
        assert_true(q->known && q->kl_mean == 0 && q->kl_p99 == 0 && q->top1 == 1);
        assert_true(q->ppl_change == 0 && q->ppl_change_low == 0 && q->ppl_change_high == 0);
        assert_null(kv_gate(&r, kv_level_find(lossless[i])));
    }
    assert_true(of(&r, "raw")->bits_per_value > 16 && of(&r, "l1")->bits_per_value < 9);
    assert_true(of(&r, "l2-5bit")->bits_per_value < of(&r, "l1")->bits_per_value);
    assert_true(of(&r, "l1")->kl_mean > 0);
    assert_true(of(&r, "l2-5bit")->kl_mean > of(&r, "l1")->kl_mean);
    assert_true(of(&r, "l2")->kl_mean > of(&r, "l2-5bit")->kl_mean);
    assert_true(of(&r, "l2")->kl_p99 > of(&r, "l2")->kl_mean);
    assert_true(of(&r, "l2")->ppl_change_high > of(&r, "l2")->ppl_change_low);
    assert_true(of(&r, "l2")->encode_gb_s > 0 && of(&r, "l2")->decode_gb_s > 0);
    assert_null(kv_gate(&r, kv_level_find("l1")));
}

/* Scales of neighbouring groups change places. */
static void swap_scales(const struct kv_piece_head *head, uint8_t *payload)
{
    if (head->codec != KV_L1)
        return;
    for (size_t i = 0;
         i + 1 < (size_t)head->token_count * head->kv_head_count * head->head_dim / (KV_GROUP << head->table);
         i += 2) {
        uint8_t kept = payload[i];
        payload[i] = payload[i + 1];
        payload[i + 1] = kept;
    }
}

/* Every step is an octave too large. */
static void wrong_scales(const struct kv_piece_head *head, uint8_t *payload)
{
    size_t groups = (size_t)head->kv_head_count * (1u + head->token_count) * ((head->head_dim + 63u) / 64u);
    payload += (size_t)head->kv_head_count * (head->token_count / 8u);
    for (size_t i = 0; i < groups && head->codec == KV_L2; i++)
        payload[i] = (uint8_t)(payload[i] + 8);
}

static void test_a_broken_codec_fails_the_gate(void **state)
{
    (void)state;
    struct kv_record good = measured(bit("l1") | bit("l2-5bit"), NULL);
    struct kv_record swapped = measured(bit("l1"), swap_scales);
    struct kv_record wrong = measured(bit("l2-5bit"), wrong_scales);
    assert_true(of(&swapped, "l1")->kl_mean > 10 * of(&good, "l1")->kl_mean);
    assert_true(of(&wrong, "l2-5bit")->kl_mean > 10 * of(&good, "l2-5bit")->kl_mean);
    assert_null(kv_gate(&good, kv_level_find("l1")));
    assert_non_null(kv_gate(&swapped, kv_level_find("l1")));
    assert_non_null(kv_gate(&wrong, kv_level_find("l2-5bit")));
}

static void test_widened_weights_are_the_same_model(void **state)
{
    (void)state;
    struct td_error err = {0};
    struct gguf *small;
    struct model *m = NULL;
    float *memory = NULL;
    if (gguf_open(TEST_DATA "/tiny/type-q4_1.gguf", &small, &err) || model_load(small, &m, &err))
        fail_msg("%s", err.text);
    assert_int_equal(bench_codec_widen(m, &memory, &err), 0);
    assert_int_equal(m->layers[0].wq.type, GGUF_F32);
    assert_int_equal(m->layers[m->layers_held - 1].w_down.type, GGUF_F32);
    assert_int_equal(m->output.type, GGUF_F32);
    struct kv_record r = {0};
    struct bench_codec_options options = {.threads = 1, .level_mask = bit("raw") | bit("l1")};
    struct codec_window w = windows[0];
    assert_int_equal(bench_codec(m, &w, 1, &options, &r, &err), 0);
    assert_true(of(&r, "raw")->kl_mean == 0 && of(&r, "l1")->kl_mean < 0.005);
    free(memory);
    model_free(m);
    gguf_close(small);
}

static void test_windows_are_checked(void **state)
{
    (void)state;
    struct td_error err = {0};
    struct kv_record r = {0};
    struct bench_codec_options options = {.threads = 1, .level_mask = 1};
    struct codec_window bad[] = {{ids[0], 100, 64}, {ids[0], 0, 64}, {ids[0], 64, 1}};
    for (size_t i = 0; i < TD_COUNT(bad); i++)
        assert_int_equal(bench_codec(model, &bad[i], 1, &options, &r, &err), -TD_ERR_ARG);
    assert_int_equal(bench_codec(model, bad, 0, &options, &r, &err), -TD_ERR_ARG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_levels_are_in_order),
        cmocka_unit_test(test_a_broken_codec_fails_the_gate),
        cmocka_unit_test(test_widened_weights_are_the_same_model),
        cmocka_unit_test(test_windows_are_checked),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
