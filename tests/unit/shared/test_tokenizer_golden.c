/* tokenizer: the same ids as the references on golden/tokens_*.bin.zst, and the same bytes back. */
#include "tokenizer_fixture.h"
#include <unistd.h>
#include <zstd.h>

/* The real model: TANDEM_MODEL, or where deploy/fetch-model.sh keeps it. NULL: none here. */
static const char *model_path(void)
{
    static char path[512];
    const char *home = getenv("HOME");
    if (getenv("TANDEM_MODEL"))
        return getenv("TANDEM_MODEL");
    snprintf(path, sizeof path, "/var/cache/tandem/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if (access(path, R_OK) != 0)
        snprintf(path, sizeof path, "%s/.cache/tandem/models/SmolLM2-135M-Instruct.Q4_1.gguf",
                 home ? home : "");
    return access(path, R_OK) == 0 ? path : NULL;
}

/* --- golden sets ---------------------------------------------------------------------------------------- */

struct golden {
    uint8_t *data;
    struct reader r;
    uint32_t line_count;
};

static void open_golden(struct golden *s, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/tokens_%s.bin.zst", TEST_DATA, name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    size_t size = (size_t)ftell(f);
    rewind(f);
    uint8_t *packed = malloc(size);
    assert_int_equal(fread(packed, 1, size, f), size);
    fclose(f);
    size_t unpacked = (size_t)ZSTD_getFrameContentSize(packed, size);
    s->data = malloc(unpacked);
    assert_int_equal(ZSTD_decompress(s->data, unpacked, packed, size), unpacked);
    free(packed);
    s->r = reader_over(s->data, unpacked);
    assert_memory_equal(reader_take(&s->r, 4), "TDTK", 4);
    assert_int_equal(reader_u32(&s->r), 1);
    s->line_count = reader_u32(&s->r);
}

/* Can the vocabulary say every byte of the text? (SmolLM2's lacks 21 bytes, SentencePiece makes U+2581 a blank.) */
static bool sayable(const struct tokenizer *t, const char *text, size_t size)
{
    if (tokenizer_strips_leading_space(t))
        return memmem(text, size, "\xe2\x96\x81", 3) == NULL;
    for (size_t i = 0; i < size; i++) {
        int32_t id;
        if (tokenizer_encode(t, text + i, 1, NULL, 0, false, &id, 1) != 1)
            return false;
    }
    return true;
}

static void check_line(const struct tokenizer *t, const char *text, size_t size, bool special,
                       const uint8_t *want, uint32_t count, size_t *round_trips)
{
    struct text_range all = {0, size};
    int64_t got = tokenizer_encode(t, text, size, special ? &all : NULL, special, false, ids, IDS_MAX);
    bool same = got == count;
    for (uint32_t i = 0; i < count && same; i++)
        same = ids[i] == (int32_t)load_le32(want + 4 * i);
    if (!same)
        fail_msg("ids differ on: %.*s", (int)TD_MIN(size, (size_t)200), text);
    if (!sayable(t, text, size))
        return;
    int64_t length = tokenizer_decode(t, ids, count, special, decoded, sizeof decoded);
    const char *from = decoded + (tokenizer_strips_leading_space(t) && length > 0);
    assert_int_equal(length - (from - decoded), size);
    if (size)
        assert_memory_equal(from, text, size);
    ++*round_trips;
}

static void check_golden(const struct tokenizer *t, const char *name, bool special, uint32_t lines_min)
{
    struct golden s;
    size_t round_trips = 0;
    open_golden(&s, name);
    for (uint32_t i = 0; i < s.line_count; i++) {
        uint32_t size = reader_u32(&s.r), count = reader_u32(&s.r);
        const char *text = (const char *)reader_take(&s.r, size);
        const uint8_t *want = reader_take(&s.r, (size_t)count * 4);
        assert_false(s.r.bad);
        check_line(t, text, size, special, want, count, &round_trips);
    }
    assert_ptr_equal(s.r.next, s.r.end);
    assert_true(s.line_count >= lines_min);
    assert_true(round_trips >= lines_min - lines_min / 20);
    free(s.data);
}

static void test_golden_smollm(void **state)
{
    (void)state;
    if (!model_path())
        skip();
    struct tokenizer *t = load(model_path(), NULL);
    int32_t first = -1;
    assert_int_equal(tokenizer_vocab_count(t), 49152);
    assert_int_equal(tokenizer_encode(t, "", 0, NULL, 0, true, &first, 1), 1);
    assert_int_equal(first, 1);
    assert_false(tokenizer_add_bos(t));
    assert_true(tokenizer_is_end(t, 2) && tokenizer_is_end(t, 0) && !tokenizer_is_end(t, 1));
    check_golden(t, "smollm", false, 10000);
    check_golden(t, "smollm_special", true, 200);
    tokenizer_destroy(t);
}

static void test_golden_pre(void **state)
{
    (void)state;
    static const char *const names[] = {"smollm", "llama-bpe", "qwen2"};
    for (size_t i = 0; i < TD_COUNT(names); i++) {
        char set[32];
        struct tokenizer *t = load_tiny("bpe-vocabulary", names[i]);
        snprintf(set, sizeof set, "pre_%s", names[i]);
        check_golden(t, set, false, 1000);
        tokenizer_destroy(t);
    }
}

static void test_golden_spm(void **state)
{
    (void)state;
    struct tokenizer *t = load_tiny("llama-spm", NULL);
    assert_true(tokenizer_add_bos(t));
    assert_true(tokenizer_strips_leading_space(t));
    check_golden(t, "spm", false, 1000);
    tokenizer_destroy(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_smollm),
        cmocka_unit_test(test_golden_pre),
        cmocka_unit_test(test_golden_spm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
