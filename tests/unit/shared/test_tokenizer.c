/* tokenizer: special tokens only where they are meant; any bytes survive; merging against a naive twin; vocabularies that are wrong are refused.
 * The references' ids: test_tokenizer_golden.c. */
#include "tokenizer_fixture.h"
#include "gguf_build.h"
#include <time.h>

/* --- models --------------------------------------------------------------------------------------------- */

static struct tokenizer *make(struct gguf_build *b)
{
    struct bytes file = gguf_build_end(b);
    struct gguf *g;
    struct tokenizer *t = NULL;
    struct td_error err = {0};
    if (gguf_parse(file.data, file.size, &g, &err) != 0 || tokenizer_create(g, NULL, &t, &err) != 0)
        fail_msg("%s", err.text);
    gguf_close(g);
    memset(file.data, 0xee, file.size); /* nothing may be borrowed from it */
    free(file.data);
    return t;
}

/* Byte-level BPE in small: tokens 0 to 255 are the bytes, then `more`. */
struct mini {
    const char *pre, *more[24], *merges[16];
    int32_t more_types[24];
};

static void add_mini(struct gguf_build *b, const struct mini *m)
{
    static char bytes[256][4];
    const char *tokens[300];
    int32_t types[300];
    size_t count = 256, merge_count = 0;
    int other = 256;
    for (int i = 0; i < 256; i++) { /* GPT-2's table of visible bytes */
        bool visible = (i >= '!' && i <= '~') || (i >= 0xa1 && i <= 0xac) || i >= 0xae;
        int cp = visible ? i : other++;
        snprintf(bytes[i], 4, cp < 0x80 ? "%c" : "%c%c", cp < 0x80 ? cp : 0xc0 | cp >> 6, 0x80 | (cp & 0x3f));
        tokens[i] = bytes[i];
        types[i] = 1;
    }
    for (size_t i = 0; i < TD_COUNT(m->more) && m->more[i]; i++, count++) {
        tokens[count] = m->more[i];
        types[count] = m->more_types[i] ? m->more_types[i] : 1;
    }
    while (merge_count < TD_COUNT(m->merges) && m->merges[merge_count])
        merge_count++;
    key_string(b, "tokenizer.ggml.model", "gpt2");
    key_string(b, "tokenizer.ggml.pre", m->pre ? m->pre : "smollm");
    key_strings(b, "tokenizer.ggml.tokens", tokens, count);
    key_array32(b, "tokenizer.ggml.token_type", GGUF_VALUE_I32, types, count);
    key_strings(b, "tokenizer.ggml.merges", m->merges, merge_count);
}

static struct tokenizer *make_mini(const struct mini *m)
{
    struct gguf_build b = {0};
    add_mini(&b, m);
    return make(&b);
}

static void expect_ids(const struct tokenizer *t, const char *text, const struct text_range *special,
                       size_t special_count, const int32_t *want, size_t count)
{
    int64_t got = tokenizer_encode(t, text, strlen(text), special, special_count, false, ids, IDS_MAX);
    assert_int_equal(got, count);
    if (count)
        assert_memory_equal(ids, want, count * sizeof *want);
}

#define EXPECT(t, text, special, count, ...)                                                                 \
    expect_ids(t, text, special, count, (const int32_t[]){__VA_ARGS__},                                      \
               sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

/* --- encoding ------------------------------------------------------------------------------------------- */

static void test_capacity(void **state)
{
    (void)state;
    struct mini m = {.more = {"ab"}, .merges = {"a b"}};
    struct tokenizer *t = make_mini(&m);
    int32_t out[4] = {-7, -7, -7, -7};
    assert_int_equal(tokenizer_encode(t, "abcab", 5, NULL, 0, false, NULL, 0), 3);
    assert_int_equal(tokenizer_encode(t, "abcab", 5, NULL, 0, false, out, 2), 3);
    assert_true(out[0] == 256 && out[1] == 'c' && out[2] == -7);
    assert_int_equal(tokenizer_encode(t, "", 0, NULL, 0, false, out, 4), 0);
    assert_int_equal(tokenizer_encode(t, NULL, 0, NULL, 0, false, out, 4), 0);
    assert_int_equal(tokenizer_encode(t, "x", TOKENIZER_TEXT_MAX + 1, NULL, 0, false, out, 4), -TD_ERR_LIMIT);
    static const int32_t three[] = {256, 'c', 256};
    char text[5] = "-----";
    assert_int_equal(tokenizer_decode(t, three, 3, false, text, 3), 5);
    assert_memory_equal(text, "abc--", 5);
    assert_int_equal(tokenizer_decode(t, three, 3, false, NULL, 0), 5);
    tokenizer_destroy(t);
}

static void test_bos(void **state)
{
    (void)state;
    struct gguf_build b = {0};
    struct mini m = {.more = {"<s>", "</s>"}, .more_types = {3, 3}};
    add_mini(&b, &m);
    key_u32(&b, "tokenizer.ggml.bos_token_id", 256);
    key_u32(&b, "tokenizer.ggml.eos_token_id", 257);
    key_bool(&b, "tokenizer.ggml.add_bos_token", true);
    struct tokenizer *t = make(&b);
    assert_true(tokenizer_add_bos(t));
    assert_true(tokenizer_is_end(t, 257) && !tokenizer_is_end(t, 256));
    assert_int_equal(tokenizer_encode(t, "a", 1, NULL, 0, true, ids, IDS_MAX), 2);
    assert_true(ids[0] == 256 && ids[1] == 'a');
    assert_int_equal(tokenizer_encode(t, "", 0, NULL, 0, true, ids, IDS_MAX), 1);
    EXPECT(t, "a", NULL, 0, 'a'); /* the caller decides, not the file */
    tokenizer_destroy(t);
    t = make_mini(&m);
    assert_int_equal(tokenizer_encode(t, "a", 1, NULL, 0, true, ids, IDS_MAX), 1);
    tokenizer_destroy(t);
}

/* What files without the key add_bos_token get. */
static void test_default_of_add_bos(void **state)
{
    (void)state;
    static const struct {
        const char *pre;
        bool add;
    } cases[] = {{"smollm", false}, {"qwen2", false}, {"llama-bpe", true}, {"llama3", true}};
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct mini m = {.pre = cases[i].pre};
        struct tokenizer *t = make_mini(&m);
        assert_int_equal(tokenizer_add_bos(t), cases[i].add);
        tokenizer_destroy(t);
    }
}

static void test_special_tokens_only_in_ranges(void **state)
{
    (void)state;
    struct mini m = {.more = {"<s>", "<s><s>", "<unk>", "<t>"}, .more_types = {3, 3, 2, 3}};
    struct tokenizer *t = make_mini(&m);
    struct text_range all = {0, 7}, front = {0, 3}, cut = {0, 2}, none = {3, 3};
    struct text_range two[] = {{0, 3}, {4, 7}}, adjacent[] = {{0, 3}, {3, 6}};
    EXPECT(t, "<s>x<s>", NULL, 0, '<', 's', '>', 'x', '<', 's', '>');
    EXPECT(t, "<s>x<s>", &all, 1, 256, 'x', 256);
    EXPECT(t, "<s>x<s>", &front, 1, 256, 'x', '<', 's', '>');
    EXPECT(t, "<s>x<s>", two, 2, 256, 'x', 256);
    EXPECT(t, "<s>x<s>", &two[1], 1, '<', 's', '>', 'x', 256);
    EXPECT(t, "<s>x<s>", &cut, 1, '<', 's', '>', 'x', '<', 's', '>');
    EXPECT(t, "<s>x<s>", &none, 1, '<', 's', '>', 'x', '<', 's', '>');
    EXPECT(t, "<s><s><s>", &(struct text_range){.end = 9}, 1, 257, 256); /* the longest first */
    EXPECT(t, "<s><s>", adjacent, 2, 256, 256);                          /* none reaches over a border */
    EXPECT(t, "<t><s><unk>", &(struct text_range){.end = 11}, 1, 259, 256, 258);
    EXPECT(t, "a<unk>b<s>", &(struct text_range){.end = 10}, 1, 'a', 258, 'b', 256); /* a range over pieces */
    EXPECT(t, "<unk>", NULL, 0, '<', 'u', 'n', 'k', '>');
    struct text_range backwards[] = {{4, 7}, {0, 3}}, beyond = {0, 8}, turned = {5, 4};
    assert_int_equal(tokenizer_encode(t, "<s>x<s>", 7, backwards, 2, false, ids, IDS_MAX), -TD_ERR_ARG);
    assert_int_equal(tokenizer_encode(t, "<s>x<s>", 7, &beyond, 1, false, ids, IDS_MAX), -TD_ERR_ARG);
    assert_int_equal(tokenizer_encode(t, "<s>x<s>", 7, &turned, 1, false, ids, IDS_MAX), -TD_ERR_ARG);
    tokenizer_destroy(t);
}

static void test_many_ranges(void **state)
{
    (void)state;
    enum { TURNS = 2000 };
    struct mini m = {.more = {"<s>", "<e>"}, .more_types = {3, 3}};
    struct tokenizer *t = make_mini(&m);
    char *text = malloc(TURNS * 9 + 1);
    struct text_range *ranges = malloc(TURNS * 2 * sizeof *ranges);
    for (size_t i = 0; i < TURNS; i++) { /* every second <s> is the user's */
        memcpy(text + i * 9, "<s><s><e>", 9);
        ranges[2 * i] = (struct text_range){i * 9, i * 9 + 3};
        ranges[2 * i + 1] = (struct text_range){i * 9 + 6, i * 9 + 9};
    }
    assert_int_equal(tokenizer_encode(t, text, TURNS * 9, ranges, TURNS * 2, false, ids, IDS_MAX), TURNS * 5);
    for (size_t i = 0; i < TURNS; i++)
        assert_memory_equal(ids + i * 5, ((int32_t[]){256, '<', 's', '>', 257}), 20);
    free(text);
    free(ranges);
    tokenizer_destroy(t);
}

/* User-defined tokens are found everywhere, before anything else; they are no control tokens. */
static void test_user_defined_tokens(void **state)
{
    (void)state;
    struct mini m = {.more = {"ABC", "BCDE", "<tool>", "zz"}, .more_types = {4, 4, 4, 0}, .merges = {"z z"}};
    struct tokenizer *t = make_mini(&m);
    EXPECT(t, "x<tool>y", NULL, 0, 'x', 258, 'y');
    EXPECT(t, "ABCDE", NULL, 0, 'A', 257);
    EXPECT(t, "ABCABCDE", NULL, 0, 256, 'A', 257);
    EXPECT(t, "z<tool>zz", NULL, 0, 'z', 258, 259);
    assert_int_equal(tokenizer_piece(t, 258, false).size, 6);
    tokenizer_destroy(t);
}

/* Names that mean control tokens whatever type a file gives them: no text that a user writes may be one. */
static void test_well_known_names(void **state)
{
    (void)state;
    struct mini m = {.more = {"<|im_end|>", "<|fim_pad|>", "<|eot_id|>"}, .more_types = {4, 4, 1}};
    struct tokenizer *t = make_mini(&m);
    EXPECT(t, "<|im_end|>", NULL, 0, '<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|', '>');
    EXPECT(t, "<|im_end|><|fim_pad|>", &(struct text_range){.end = 21}, 1, 256, 257);
    assert_true(tokenizer_is_end(t, 256) && tokenizer_is_end(t, 258) && !tokenizer_is_end(t, 257));
    for (int32_t id = 256; id <= 258; id++)
        assert_true(tokenizer_piece(t, id, false).size == 0 && tokenizer_piece(t, id, true).size > 0);
    tokenizer_destroy(t);
}

/* Even a vocabulary whose merges spell a control token cannot be talked into giving it. */
static void test_merges_never_make_control_tokens(void **state)
{
    (void)state;
    static const char *const pres[] = {"smollm", "llama-bpe"}; /* merged, and looked up whole */
    for (size_t i = 0; i < TD_COUNT(pres); i++) {
        struct mini m = {
            .pre = pres[i], .more = {"ab", "abc"}, .more_types = {1, 3}, .merges = {"a b", "ab c"}};
        struct tokenizer *t = make_mini(&m);
        EXPECT(t, "ab", NULL, 0, 256);
        int64_t count = tokenizer_encode(t, "abc", 3, NULL, 0, false, ids, IDS_MAX);
        for (int64_t k = 0; k < count; k++)
            assert_int_not_equal(ids[k], 257);
        assert_int_equal(tokenizer_decode(t, ids, (size_t)count, false, decoded, sizeof decoded), 3);
        assert_memory_equal(decoded, "abc", 3);
        tokenizer_destroy(t);
    }
}

static void test_merge_order(void **state)
{
    (void)state;
    struct mini m = {.more = {"ab", "bc", "abc", "aa", "bcd"},
                     .merges = {"b c", "a b", "ab c", "a a", "bc d", "b c"}};
    struct tokenizer *t = make_mini(&m);
    EXPECT(t, "abc", NULL, 0, 'a', 257); /* "b c" is the earlier merge, and its first mention counts */
    EXPECT(t, "aaa", NULL, 0, 259, 'a'); /* leftmost of equals */
    EXPECT(t, "aaaaa", NULL, 0, 259, 259, 'a');
    EXPECT(t, "abcd", NULL, 0, 'a', 260);
    EXPECT(t, "abx", NULL, 0, 256, 'x');
    tokenizer_destroy(t);
    m.pre = "llama-bpe";
    t = make_mini(&m);
    EXPECT(t, "abc", NULL, 0, 258); /* llama-bpe looks up the whole word first */
    EXPECT(t, "abcd", NULL, 0, 'a', 260);
    tokenizer_destroy(t);
}

/* A merge whose result is no token may still lead on; if it stays, its bytes come out. */
static void test_merges_through_missing_tokens(void **state)
{
    (void)state;
    struct mini m = {.more = {"abc"}, .merges = {"a b", "ab c"}};
    struct tokenizer *t = make_mini(&m);
    EXPECT(t, "abc", NULL, 0, 256);
    EXPECT(t, "abx", NULL, 0, 'a', 'b', 'x');
    tokenizer_destroy(t);
}

/* More of them than the tables have room for at first. */
static void test_many_missing_tokens(void **state)
{
    (void)state;
    static char texts[26 * 26][4];
    const char *merges[26 * 26];
    struct gguf_build b = {0};
    struct mini m = {.more = {"azza"}};
    for (size_t i = 0; i < TD_COUNT(merges); i++) {
        snprintf(texts[i], sizeof texts[i], "%c %c", (char)('a' + i / 26), (char)('a' + i % 26));
        merges[i] = texts[i];
    }
    add_mini(&b, &m);
    b.keys.size -= 4 + 8; /* the empty array of merges, which add_mini puts last: fill it after all */
    add_u32(&b.keys, GGUF_VALUE_STRING);
    add_u64(&b.keys, TD_COUNT(merges) + 1);
    for (size_t i = 0; i < TD_COUNT(merges); i++)
        add_text(&b.keys, merges[i], 3);
    add_text(&b.keys, "az za", 5);
    struct tokenizer *t = make(&b);
    EXPECT(t, "azza", NULL, 0, 256);
    EXPECT(t, "zx", NULL, 0, 'z', 'x');
    assert_int_equal(tokenizer_find(t, "az"), -1); /* a symbol, but no token */
    tokenizer_destroy(t);
}

static uint32_t random_u32(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

/* Byte-level BPE by the book: look through all pairs, join the best, again. */
static size_t naive_merge(const struct gguf_value *merges, char parts[][64], size_t count)
{
    for (;;) {
        uint64_t best = UINT64_MAX;
        size_t at = 0;
        for (size_t i = 0; i + 1 < count; i++) {
            char pair[132];
            int size = snprintf(pair, sizeof pair, "%s %s", parts[i], parts[i + 1]);
            for (uint64_t k = 0; k < merges->count && k < best; k++) {
                struct span s;
                gguf_array_string(merges, k, &s);
                if (s.size == (size_t)size && memcmp(s.data, pair, s.size) == 0)
                    best = k, at = i;
            }
        }
        if (best == UINT64_MAX)
            return count;
        memcpy(parts[at] + strlen(parts[at]), parts[at + 1], strlen(parts[at + 1]) + 1);
        memmove(parts[at + 1], parts[at + 2], (count - at - 2) * 64);
        count--;
    }
}

static void test_against_a_naive_twin(void **state)
{
    (void)state;
    char path[512], parts[24][64];
    struct gguf *g;
    struct tokenizer *t;
    uint32_t seed = 42;
    snprintf(path, sizeof path, "%s/tiny/bpe-vocabulary.gguf", TEST_DATA);
    assert_int_equal(gguf_open(path, &g, NULL), 0);
    assert_int_equal(tokenizer_create(g, "qwen2", &t, NULL), 0);
    const struct gguf_value *merges = gguf_find(g, "tokenizer.ggml.merges");
    for (int round = 0; round < 300; round++) {
        static const char letters[] = "eeetttaaooinsrhldcu"; /* frequent ones, so that much merges */
        char word[24] = {0};
        size_t size = 1 + random_u32(&seed) % 20, count;
        for (size_t i = 0; i < size; i++) {
            word[i] = letters[random_u32(&seed) % (sizeof letters - 1)];
            snprintf(parts[i], 64, "%c", word[i]);
        }
        count = naive_merge(merges, parts, size);
        assert_int_equal(tokenizer_encode(t, word, size, NULL, 0, false, ids, IDS_MAX), count);
        for (size_t i = 0; i < count; i++)
            assert_int_equal(ids[i], tokenizer_find(t, parts[i]));
    }
    tokenizer_destroy(t);
    gguf_close(g);
}

/* Not quadratic: half a megabyte without a place to cut. */
static void test_endless_words(void **state)
{
    (void)state;
    enum { SIZE = 512 * 1024 };
    static const char *const names[] = {"bpe-vocabulary", "llama-spm"};
    static const char *const units[] = {"the", "a", " ", "\xe4\xb8\xad", "!", "\xff", "0"};
    char *text = malloc(SIZE);
    for (size_t n = 0; n < TD_COUNT(names); n++) {
        struct tokenizer *t = load_tiny(names[n], n ? NULL : "smollm");
        for (size_t u = 0; u < TD_COUNT(units); u++) {
            size_t unit = strlen(units[u]), size = SIZE / unit * unit;
            for (size_t i = 0; i < size; i++)
                text[i] = units[u][i % unit];
            clock_t begin = clock();
            int64_t count = tokenizer_encode(t, text, size, NULL, 0, false, ids, IDS_MAX);
            double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
            assert_true(count > 0 && count <= IDS_MAX);
            if (seconds > 5) /* quadratic would be minutes; sanitizers and a busy machine are not */
                fail_msg("%s takes %.1f s", names[n], seconds);
            int64_t length = tokenizer_decode(t, ids, (size_t)count, false, decoded, sizeof decoded);
            size_t lead = tokenizer_strips_leading_space(t);
            assert_int_equal(length, size + lead);
            assert_memory_equal(decoded + lead, text, size);
        }
        tokenizer_destroy(t);
    }
    free(text);
}

/* Any bytes come back, valid UTF-8 or not, from every kind. */
static void test_any_bytes_survive(void **state)
{
    (void)state;
    static const char *const pres[] = {"smollm", "llama-bpe", "qwen2", NULL};
    uint32_t seed = 7;
    for (size_t p = 0; p < TD_COUNT(pres); p++) {
        struct tokenizer *t = load_tiny(pres[p] ? "bpe-vocabulary" : "llama-spm", pres[p]);
        size_t lead = tokenizer_strips_leading_space(t);
        for (int round = 0; round < 2000; round++) {
            static const uint8_t lively[] = {0xe2, 0x96, 0x81, 0xc3, 0xf0, 0x9f, 0x20,
                                             0x0a, 0x27, 0x73, 0x80, 0xed, 0xa0, 0xff};
            char text[64];
            size_t size = 1 + random_u32(&seed) % sizeof text;
            for (size_t i = 0; i < size; i++)
                text[i] = (char)(round % 2 ? lively[random_u32(&seed) % sizeof lively] : random_u32(&seed));
            if (lead && memmem(text, size, "\xe2\x96\x81", 3))
                continue;
            int64_t count = tokenizer_encode(t, text, size, NULL, 0, false, ids, IDS_MAX);
            assert_true(count > 0);
            assert_int_equal(tokenizer_decode(t, ids, (size_t)count, false, decoded, sizeof decoded),
                             size + lead);
            assert_memory_equal(decoded + lead, text, size);
        }
        tokenizer_destroy(t);
    }
}

static void test_spm_blanks(void **state)
{
    (void)state;
    static const char *const tokens[] = {"<unk>",
                                         "<s>",
                                         "</s>",
                                         "\xe2\x96\x81",
                                         "a",
                                         "b",
                                         "ab",
                                         ("\xe2\x96\x81"
                                          "a"),
                                         "<0x63>",
                                         "<0xC3>",
                                         "\xe2\x96\x81\xe2\x96\x81",
                                         "<0x3C>",
                                         "[x]",
                                         "b\xe2\x96\x81"};
    static const int32_t types[] = {2, 3, 3, 1, 1, 1, 1, 1, 6, 6, 1, 6, 4, 1};
    static const float scores[] = {0, 0, 0, -9, -8, -7, -2, -1, 0, 0, -5, 0, 0, -3};
    for (int prefix = 0; prefix < 2; prefix++) {
        struct gguf_build b = {0};
        key_string(&b, "tokenizer.ggml.model", "llama");
        key_strings(&b, "tokenizer.ggml.tokens", tokens, TD_COUNT(tokens));
        key_array32(&b, "tokenizer.ggml.token_type", GGUF_VALUE_I32, types, TD_COUNT(types));
        key_array32(&b, "tokenizer.ggml.scores", GGUF_VALUE_F32, scores, TD_COUNT(scores));
        key_u32(&b, "tokenizer.ggml.unknown_token_id", 0);
        if (!prefix)
            key_bool(&b, "tokenizer.ggml.add_space_prefix", false);
        struct tokenizer *t = make(&b);
        assert_int_equal(tokenizer_strips_leading_space(t), prefix);
        assert_true(tokenizer_add_bos(t)); /* the default of this kind */
        struct text_range middle = {2, 6};
        if (prefix) {
            EXPECT(t, "ab", NULL, 0, 7, 5); /* "▁a" scores best */
            EXPECT(t, "ab</s>ab", &middle, 1, 7, 5, 2, 7,
                   5); /* a blank in front again behind a special token */
            EXPECT(t, "b[x]b", NULL, 0, 3, 5, 12, 3, 5);
            EXPECT(t, "c", NULL, 0, 3, 8);
        } else {
            EXPECT(t, "ab", NULL, 0, 6);
            EXPECT(t, "b a", NULL, 0, 5, 7); /* of "b▁" and "▁a" the better, though it crosses no word */
            EXPECT(t, "b b", NULL, 0, 13, 5);
            EXPECT(t, "b  b", NULL, 0, 13, 3, 5);
            EXPECT(t, "\xc3", NULL, 0, 9);
            EXPECT(t, "d", NULL, 0, 0); /* no byte token: unknown */
        }
        assert_int_equal(tokenizer_piece(t, 7, false).size, 2);
        assert_memory_equal(tokenizer_piece(t, 7, false).data, " a", 2);
        assert_int_equal(tokenizer_piece(t, 8, false).size, 1);
        assert_memory_equal(tokenizer_piece(t, 8, false).data, "c", 1);
        tokenizer_destroy(t);
    }
}

static void test_spm_never_makes_control_tokens(void **state)
{
    (void)state;
    static const char *const tokens[] = {"<unk>", "a", "b", "ab", "abc", "c", "bc", "<0x61>"};
    static const int32_t types[] = {2, 1, 1, 3, 1, 1, 1, 6};
    static const float scores[] = {0, -5, -5, 0, -1, -5, -2, 0};
    struct gguf_build b = {0};
    key_string(&b, "tokenizer.ggml.model", "llama");
    key_strings(&b, "tokenizer.ggml.tokens", tokens, TD_COUNT(tokens));
    key_array32(&b, "tokenizer.ggml.token_type", GGUF_VALUE_I32, types, TD_COUNT(types));
    key_array32(&b, "tokenizer.ggml.scores", GGUF_VALUE_F32, scores, TD_COUNT(scores));
    key_bool(&b, "tokenizer.ggml.add_space_prefix", false);
    struct tokenizer *t = make(&b);
    EXPECT(t, "ab", NULL, 0, 1, 2); /* not the control token, nor bytes because of it */
    EXPECT(t, "abc", NULL, 0, 4);   /* b and c join, as if "ab" were no token */
    EXPECT(t, "ab", &(struct text_range){.end = 2}, 1, 3);
    tokenizer_destroy(t);
}

static void test_pieces(void **state)
{
    (void)state;
    struct mini m = {.more = {"<s>", "\xc4\xa0x", "", "caf\xc3\xa9\xe4\xb8\xad"}, .more_types = {3}};
    struct tokenizer *t = make_mini(&m);
    assert_int_equal(tokenizer_piece(t, 256, false).size, 0);
    assert_int_equal(tokenizer_piece(t, 256, true).size, 3);
    assert_memory_equal(tokenizer_piece(t, 257, false).data, " x", 2);
    assert_int_equal(tokenizer_piece(t, 258, true).size, 0);
    assert_int_equal(tokenizer_piece(t, 259, true).size,
                     7); /* é stands for byte E9; 中 is no byte and stays */
    assert_memory_equal(tokenizer_piece(t, 259, true).data, "caf\xe9\xe4\xb8\xad", 7);
    for (int b = 0; b < 256; b++) {
        assert_int_equal(tokenizer_piece(t, b, false).size, 1);
        assert_int_equal(tokenizer_piece(t, b, false).data[0], b);
    }
    assert_int_equal(tokenizer_piece(t, -1, true).size, 0);
    assert_int_equal(tokenizer_piece(t, 260, true).size, 0);
    assert_false(tokenizer_is_end(t, -1) || tokenizer_is_end(t, 260));
    assert_int_equal(tokenizer_find(t, "<s>"), 256);
    assert_int_equal(tokenizer_find(t, "\xc4\xa0x"), 257);
    assert_int_equal(tokenizer_find(t, "nothing"), -1);
    assert_int_equal(tokenizer_find(t, ""), -1);
    tokenizer_destroy(t);
}

static void test_ends(void **state)
{
    (void)state;
    struct gguf_build b = {0};
    struct mini m = {
        .more = {"e1", "e2", "e3", "no", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"}};
    add_mini(&b, &m);
    key_u32(&b, "tokenizer.ggml.eos_token_id", 256);
    key_u32(&b, "tokenizer.ggml.eot_token_id", 257);
    key_u32(&b, "tokenizer.ggml.eom_token_id", 258);
    struct tokenizer *t = make(&b);
    for (int32_t id = 256; id < 264; id++)
        assert_int_equal(tokenizer_is_end(t, id), id != 259);
    tokenizer_destroy(t);
}

static void test_identity(void **state)
{
    (void)state;
    struct mini base = {.more = {"ab", "<s>"}, .more_types = {1, 3}, .merges = {"a b"}}, other[5];
    uint8_t want[TD_HASH_SIZE], got[TD_HASH_SIZE];
    struct tokenizer *t = make_mini(&base);
    tokenizer_id(t, want);
    tokenizer_destroy(t);
    t = make_mini(&base);
    tokenizer_id(t, got);
    tokenizer_destroy(t);
    assert_memory_equal(want, got, TD_HASH_SIZE);
    for (size_t i = 0; i < TD_COUNT(other); i++)
        other[i] = base;
    other[0].pre = "qwen2";
    other[1].more[0] = "ac";
    other[2].merges[1] = "b a";
    other[3].more_types[1] = 4;
    other[4].more[2] = "new";
    for (size_t i = 0; i < TD_COUNT(other); i++) {
        t = make_mini(&other[i]);
        tokenizer_id(t, got);
        tokenizer_destroy(t);
        assert_memory_not_equal(want, got, TD_HASH_SIZE);
    }
}

/* --- what is refused ------------------------------------------------------------------------------------ */

static void expect_refused(struct gguf_build *b, const char *pre, int code, const char *words)
{
    struct bytes file = gguf_build_end(b);
    struct gguf *g;
    struct tokenizer *t;
    struct td_error err = {0};
    assert_int_equal(gguf_parse(file.data, file.size, &g, &err), 0);
    assert_int_equal(tokenizer_create(g, pre, &t, &err), code);
    assert_null(t);
    if (!strstr(err.text, words))
        fail_msg("\"%s\" lacks \"%s\"", err.text, words);
    assert_non_null(strstr(err.text, "cannot use the tokenizer of"));
    gguf_close(g);
    free(file.data);
}

static void test_refused_kinds(void **state)
{
    (void)state;
    struct gguf_build b = {0};
    struct mini m = {.pre = "gpt-2"};
    key_u32(&b, "x", 1);
    expect_refused(&b, NULL, -TD_ERR_NOTFOUND, "tokenizer.ggml.model");
    key_string(&b, "tokenizer.ggml.model", "t5");
    expect_refused(&b, NULL, -TD_ERR_UNSUPPORTED, "none of gpt2 and llama");
    key_string(&b, "tokenizer.ggml.model", "gpt2");
    expect_refused(&b, NULL, -TD_ERR_UNSUPPORTED, "--pretokenizer");
    add_mini(&b, &m);
    expect_refused(&b, NULL, -TD_ERR_UNSUPPORTED, "none of smollm, llama-bpe and qwen2");
    m.pre = "smollm";
    add_mini(&b, &m);
    expect_refused(&b, "tekken", -TD_ERR_UNSUPPORTED, "none of smollm, llama-bpe and qwen2");
}

static void test_refused_vocabularies(void **state)
{
    (void)state;
    static const char *const two[] = {"a", "b"};
    struct gguf_build b = {0};
    key_string(&b, "tokenizer.ggml.model", "llama");
    expect_refused(&b, NULL, -TD_ERR_FORMAT, "lists no tokens");
    key_string(&b, "tokenizer.ggml.model", "llama");
    key_strings(&b, "tokenizer.ggml.tokens", two, 0);
    expect_refused(&b, NULL, -TD_ERR_FORMAT, "lists no tokens");
    key_string(&b, "tokenizer.ggml.model", "llama");
    key_strings(&b, "tokenizer.ggml.tokens", two, 2);
    key_array32(&b, "tokenizer.ggml.token_type", GGUF_VALUE_I32, (const int32_t[]){1}, 1);
    expect_refused(&b, NULL, -TD_ERR_FORMAT, "differ in length");
    key_string(&b, "tokenizer.ggml.model", "llama");
    key_strings(&b, "tokenizer.ggml.tokens", two, 2);
    key_array32(&b, "tokenizer.ggml.scores", GGUF_VALUE_F32, (const float[]){1, 2, 3}, 3);
    expect_refused(&b, NULL, -TD_ERR_FORMAT, "differ in length");
    key_string(&b, "tokenizer.ggml.model", "llama");
    key_strings(&b, "tokenizer.ggml.tokens", two, 2);
    key_array32(&b, "tokenizer.ggml.token_type", GGUF_VALUE_I32, (const int32_t[]){1, -1}, 2);
    expect_refused(&b, NULL, -TD_ERR_FORMAT, "wrong type of token 1");
    key_string(&b, "tokenizer.ggml.model", "llama");
    key_strings(&b, "tokenizer.ggml.tokens", (const char *const[]){"a", "b", "a"}, 3);
    expect_refused(&b, NULL, -TD_ERR_FORMAT, "two tokens, the second is 2");
    static const char *const id_keys[] = {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
                                          "tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id"};
    for (size_t i = 0; i < TD_COUNT(id_keys); i++) {
        key_string(&b, "tokenizer.ggml.model", "llama");
        key_strings(&b, "tokenizer.ggml.tokens", two, 2);
        key_u32(&b, id_keys[i], 2);
        expect_refused(&b, NULL, -TD_ERR_FORMAT, "outside the vocabulary: id 2");
    }
    key_string(&b, "tokenizer.ggml.model", "gpt2");
    key_string(&b, "tokenizer.ggml.pre", "qwen2");
    key_strings(&b, "tokenizer.ggml.tokens", two, 2);
    expect_refused(&b, NULL, -TD_ERR_FORMAT, "no merges");
    static const char *const bad_merges[] = {"ab", "a ", " a", " ", "", "a"};
    for (size_t i = 0; i < TD_COUNT(bad_merges); i++) {
        struct mini m = {.merges = {"a b", bad_merges[i]}};
        add_mini(&b, &m);
        expect_refused(&b, NULL, -TD_ERR_FORMAT, "no two parts in merge 1");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_capacity),
        cmocka_unit_test(test_bos),
        cmocka_unit_test(test_default_of_add_bos),
        cmocka_unit_test(test_special_tokens_only_in_ranges),
        cmocka_unit_test(test_many_ranges),
        cmocka_unit_test(test_user_defined_tokens),
        cmocka_unit_test(test_well_known_names),
        cmocka_unit_test(test_merges_never_make_control_tokens),
        cmocka_unit_test(test_merge_order),
        cmocka_unit_test(test_merges_through_missing_tokens),
        cmocka_unit_test(test_many_missing_tokens),
        cmocka_unit_test(test_against_a_naive_twin),
        cmocka_unit_test(test_endless_words),
        cmocka_unit_test(test_any_bytes_survive),
        cmocka_unit_test(test_spm_blanks),
        cmocka_unit_test(test_spm_never_makes_control_tokens),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_identity),
        cmocka_unit_test(test_refused_kinds),
        cmocka_unit_test(test_refused_vocabularies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
