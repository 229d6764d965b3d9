/* words: the automaton against its naive twin, the form of the list, and what matches. */
#include "edge/filter.h"
#include "edge/filter_automaton.h"
#include "edge/words.h"
#include "shared/utf8.h"
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>
#include <utf8proc.h>

static uint32_t random_state = 1;
static uint32_t random_below(uint32_t n)
{
    random_state = random_state * 1664525 + 1013904223;
    return (random_state >> 8) % n;
}

/* ---- automaton ---- */

/* The twin: the occurrence of each word that ends at `end`, counted one by one; equal words as their first. */
static size_t naive_matches(const struct span *words, size_t count, const uint8_t *text, size_t end,
                            bool *is_match)
{
    size_t matches = 0;
    for (size_t i = 0; i < count; i++) {
        is_match[i] =
            words[i].size <= end && memcmp(text + end - words[i].size, words[i].data, words[i].size) == 0;
        for (size_t j = 0; is_match[i] && j < i; j++)
            if (words[j].size == words[i].size && memcmp(words[j].data, words[i].data, words[i].size) == 0)
                is_match[i] = false;
        matches += is_match[i];
    }
    return matches;
}

static void compare_with_twin(const struct span *words, size_t count, const uint8_t *text, size_t size)
{
    struct automaton *a;
    bool is_match[64];
    assert_int_equal(automaton_create(words, count, &a), 0);
    uint32_t state = 0;
    for (size_t end = 1; end <= size; end++) {
        state = automaton_step(a, state, text[end - 1]);
        size_t expected = naive_matches(words, count, text, end, is_match), got = 0, previous = SIZE_MAX;
        for (uint32_t m = automaton_match(a, state); m != AUTOMATON_NONE; m = automaton_next(a, m), got++) {
            uint32_t word = automaton_word(a, m);
            assert_true(word < count && is_match[word]);
            assert_true(words[word].size < previous); /* the longest first */
            previous = words[word].size;
        }
        assert_int_equal(got, expected);
    }
    automaton_destroy(a);
}

static void test_automaton_against_twin(void **state)
{
    (void)state;
    for (int round = 0; round < 400; round++) {
        uint8_t bytes[64][8], text[200];
        struct span words[64];
        size_t count = random_below(TD_COUNT(words));
        uint32_t letters = 1 + random_below(4);
        for (size_t i = 0; i < count; i++) {
            words[i] = (struct span){bytes[i], 1 + random_below(sizeof bytes[i])};
            for (size_t j = 0; j < words[i].size; j++)
                bytes[i][j] = (uint8_t)(254 + random_below(letters)); /* over the edge: 254, 255, 0, 1 */
        }
        for (size_t i = 0; i < sizeof text; i++)
            text[i] = (uint8_t)(254 + random_below(letters));
        compare_with_twin(words, count, text, sizeof text);
    }
}

static void test_automaton_limits(void **state)
{
    (void)state;
    struct automaton *a;
    struct span empty = {(const uint8_t *)"", 0}, huge[2];
    assert_int_equal(automaton_create(&empty, 1, &a), -TD_ERR_ARG);
    assert_null(a);
    huge[0] = huge[1] = (struct span){(const uint8_t *)"x", AUTOMATON_BYTES_MAX / 2 + 1};
    assert_int_equal(automaton_create(huge, 2, &a), -TD_ERR_LIMIT);
    automaton_destroy(NULL);
}

/* ---- folding ---- */

struct folded_text {
    char text[4096];
    size_t size;
};

static int collect(void *ctx, const struct folded *c)
{
    struct folded_text *f = ctx;
    assert_true(c->begin < c->end);
    f->size +=
        (size_t)utf8proc_encode_char((utf8proc_int32_t)c->code_point, (utf8proc_uint8_t *)f->text + f->size);
    return 0;
}

/* Composed again, the folded form is the library's NFKC_Casefold. */
static void test_fold_is_nfkc_casefold(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "Hello World",
        "\xef\xbc\xa1\xef\xbc\x92",
        "Stra\xc3\x9f"
        "e",
        "\xef\xac\x81n",
        "e\xcc\x81\xcc\xa3",
        "e\xcc\xa3\xcc\x81",
        "\xea\xb0\x81\xea\xb0\x80",
        "\xe3\x8e\x8f",
        "a\xe2\x80\x8b"
        "b\xc2\xad"
        "c\xef\xbb\xbf",
        "\xe2\x84\xa1",
        "\xef\xb7\xba",
        "\xce\xa3\xcf\x82\xcf\x83",
        "\xef\xbd\xb6\xef\xbe\x9e",
        "\xc4\xb0",
        "\xe1\xba\x9e",
    };
    for (size_t i = 0; i < TD_COUNT(texts); i++) {
        struct folded_text f = {.size = 0};
        assert_int_equal(filter_fold(texts[i], strlen(texts[i]), collect, &f), 0);
        f.text[f.size] = '\0';
        utf8proc_uint8_t *ours = utf8proc_NFC((const utf8proc_uint8_t *)f.text);
        utf8proc_uint8_t *reference = utf8proc_NFKC_Casefold((const utf8proc_uint8_t *)texts[i]);
        assert_string_equal((char *)ours, (char *)reference);
        free(ours);
        free(reference);
    }
}

static void test_fold_blanks_and_long_runs(void **state)
{
    (void)state;
    struct folded_text f = {.size = 0};
    static const char blanks[] = " a \t\r\n\xc2\xa0 b  ";
    assert_int_equal(filter_fold(blanks, sizeof blanks - 1, collect, &f), 0);
    assert_int_equal(f.size, 4);
    assert_memory_equal(f.text, "a b ", 4);
    char run[1 + 2 * 1000] = "e"; /* a thousand marks: all there, in bounded memory */
    for (int i = 0; i < 1000; i++)
        memcpy(run + 1 + 2 * i, i % 2 ? "\xcc\x81" : "\xcc\xa3", 2);
    f.size = 0;
    assert_int_equal(filter_fold(run, sizeof run, collect, &f), 0);
    assert_int_equal(f.size, sizeof run);
}

/* ---- the list ---- */

static void expect_refused(const char *list, size_t size, int code, const char *message)
{
    struct words *w;
    struct td_error err = {0};
    assert_int_equal(words_parse("list.txt", list, size, &w, &err), code);
    assert_null(w);
    if (!strstr(err.text, message))
        print_error("%s\n", err.text);
    assert_non_null(strstr(err.text, message));
}

static void test_list_errors_name_the_line(void **state)
{
    (void)state;
    expect_refused("# x\n\nblok bomb\n", 15, -TD_ERR_FORMAT, "list.txt:3:");
    expect_refused("block a\nblock\n", 14, -TD_ERR_FORMAT, "list.txt:2:");
    expect_refused("block a\nmask \xe2\x80\x8b\n", 17, -TD_ERR_FORMAT, "list.txt:2:");
    expect_refused("mask \xff\n", 7, -TD_ERR_FORMAT, "list.txt:1:");
    expect_refused("blocked x", 9, -TD_ERR_FORMAT, "list.txt:1:");
    char line[WORDS_SIZE_MAX + 16] = "mask ";
    memset(line + 5, 'x', WORDS_SIZE_MAX + 1);
    expect_refused(line, 5 + WORDS_SIZE_MAX + 1, -TD_ERR_LIMIT, "list.txt:1:");
    struct words *w;
    assert_int_equal(words_parse("list.txt", line, 5 + WORDS_SIZE_MAX, &w, NULL), 0); /* the longest */
    struct filter_spans spans = {0};
    assert_int_equal(words_scan(w, line + 5, WORDS_SIZE_MAX, &spans), 0);
    assert_int_equal(spans.count, 1);
    assert_int_equal(spans.items[0].end, WORDS_SIZE_MAX);
    filter_spans_free(&spans);
    words_destroy(w);
}

static void test_list_count(void **state)
{
    (void)state;
    size_t size = (FILTER_WORDS_MAX + 1) * 16, at = 0;
    char *list = malloc(size);
    for (unsigned i = 0; i < FILTER_WORDS_MAX; i++)
        at += (size_t)snprintf(list + at, size - at, "mask w%u\n", i);
    struct words *w;
    assert_int_equal(words_parse("list.txt", list, at, &w, NULL), 0);
    struct filter_spans spans = {0};
    assert_int_equal(words_scan(w, "w0 w99999 w100000", 17, &spans), 0);
    assert_int_equal(spans.count, 2);
    filter_spans_free(&spans);
    words_destroy(w);
    at += (size_t)snprintf(list + at, size - at, "mask x\n");
    expect_refused(list, at, -TD_ERR_LIMIT, "list.txt:100001:");
    free(list);
}

static void test_list_files(void **state)
{
    (void)state;
    struct words *w;
    struct td_error err = {0};
    assert_int_equal(words_load("/nonexistent/words", &w, &err), -TD_ERR_IO);
    assert_non_null(strstr(err.text, "/nonexistent/words"));
    assert_int_equal(words_load("/tmp", &w, &err), -TD_ERR_IO);
    char path[] = "/tmp/tandem-words-XXXXXX";
    int fd = mkstemp(path);
    close(fd);
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0); /* must not wait for a writer */
    assert_int_equal(words_load(path, &w, &err), -TD_ERR_IO);
    unlink(path);
    fd = open(path, O_WRONLY | O_CREAT, 0600);
    static const char list[] = "\xef\xbb\xbf# comment\r\n\r\n  block\tbad  word \r\nmask last";
    assert_int_equal(write(fd, list, sizeof list - 1), sizeof list - 1);
    assert_int_equal(words_load(path, &w, &err), 0);
    struct filter_spans spans = {0};
    assert_int_equal(words_scan(w, "bad word", 8, &spans), -TD_ERR_BLOCKED);
    assert_int_equal(words_scan(w, "at last", 7, &spans), 0);
    assert_int_equal(spans.count, 1);
    filter_spans_free(&spans);
    words_destroy(w);
    assert_int_equal(ftruncate(fd, WORDS_FILE_SIZE_MAX + 1), 0);
    assert_int_equal(words_load(path, &w, &err), -TD_ERR_LIMIT);
    close(fd);
    unlink(path);
}

/* ---- matching ---- */

#define BOMB_ZH "\xe7\x82\xb8\xe5\xbc\xb9"
static const char list[] =
    "block bomb\nmask damn\nmask stra\xc3\x9f"
    "e\nblock " BOMB_ZH "\nmask secret project\nmask caf\xc3\xa9\n"
    "mask \xea\xb0\x80\nmask \xe3\x81\x8b\nmask c++\nmask cat\nblock the cat sat\nblock twice\nmask twice\n"
    "mask sat on the mat\nmask sat\nmask on the fence\nblock fence\nmask e\xcc\xa3\xcc\x81z\n";

/* expected: "B", or the masked parts with '|' between. */
static const struct {
    const char *text, *expected;
} matches[] = {
    {"bomb", "B"},
    {"a BOMB!", "B"},
    {"bombastic", ""},
    {"abomb", ""},
    {"bomb2", ""},
    {"bomb_x", "B"},
    {"bomb\xc3\xa9", ""},
    {"bomb\xcc\x81", ""},
    {"\xef\xbd\x82\xef\xbd\x8f\xef\xbd\x8d\xef\xbd\x82", "B"}, /* full width */
    {"bo\xe2\x80\x8bmb", "B"},                                 /* zero-width space */
    {"bo\xc2\xadmb", "B"},                                     /* soft hyphen */
    {"b\xef\xb8\x8fomb", "B"},                                 /* variation selector */
    {"bo\xffmb", ""},
    {"bomb\xff", "B"},
    {"\xc3"
     "bomb",
     "B"},
    {"\xe5\x81\x9a" BOMB_ZH "\xe5\x90\x97", "B"}, /* inside Chinese text */
    {"\xe5\x81\x9a"
     "bomb"
     "\xe5\x90\x97",
     "B"}, /* a Latin word inside Chinese text */
    {"Damn, damnation", "Damn"},
    {"STRASSE Stra\xc3\x9f"
     "e Stra\xe1\xba\x9e"
     "E",
     "STRASSE|Stra\xc3\x9f"
     "e|Stra\xe1\xba\x9e"
     "E"},
    {"a secret \n project b", "secret \n project"},
    {"secretproject", ""},
    {"cafe\xcc\x81 caf\xc3\xa9 cafe", "cafe\xcc\x81|caf\xc3\xa9"},
    {"\xea\xb0\x81", ""}, /* another syllable that begins with the same letters */
    {"\xea\xb0\x80\xea\xb0\x80", "\xea\xb0\x80|\xea\xb0\x80"},
    {"\xe3\x81\x8c", ""},             /* ga is not ka */
    {"\xe3\x81\x8b\xe3\x82\x99", ""}, /* nor in two parts */
    {"\xef\xbd\xb6", ""},             /* katakana is not hiragana */
    {"i like c++, C++17", "c++|C++"},
    {"the cat sat", "B"},
    {"the cat sang", "cat"},
    {"a cat sat on the mat", "cat|sat|sat on the mat"},
    {"on the fence", "B"},                        /* a blocked word inside a longer masked one */
    {"e\xcc\x81\xcc\xa3z", "e\xcc\x81\xcc\xa3z"}, /* marks in another order */
    {"twice", "B"},                               /* blocked and masked: blocked */
    {"", ""},
};

static void test_matching(void **state)
{
    (void)state;
    struct words *w;
    struct td_error err = {0};
    int bad = 0;
    assert_int_equal(words_parse("list", list, sizeof list - 1, &w, &err), 0);
    for (size_t i = 0; i < TD_COUNT(matches); i++) {
        struct filter_spans spans = {0};
        struct filter_buffer got = {0};
        int rc = words_scan(w, matches[i].text, strlen(matches[i].text), &spans);
        filter_buffer_add(&got, "", 0);
        filter_spans_sort(&spans);
        if (rc == -TD_ERR_BLOCKED)
            filter_buffer_add(&got, "B", 1);
        for (size_t j = spans.count; rc == 0 && j-- > 0;) { /* longest last, as the table has them */
            size_t n = spans.count - 1 - j;
            const struct filter_span *s = &spans.items[n];
            bool swap = n + 1 < spans.count && s[1].begin == s->begin;
            const struct filter_span *first = swap ? s + 1 : s;
            filter_buffer_add(&got, got.size ? "|" : "", got.size ? 1 : 0);
            filter_buffer_add(&got, matches[i].text + first->begin, first->end - first->begin);
            if (swap) {
                filter_buffer_add(&got, "|", 1);
                filter_buffer_add(&got, matches[i].text + s->begin, s->end - s->begin);
                j--;
            }
        }
        if (strcmp(got.data, matches[i].expected) != 0) {
            print_error("row %zu \"%s\": want \"%s\", got \"%s\"\n", i, matches[i].text, matches[i].expected,
                        got.data);
            bad++;
        }
        filter_buffer_free(&got);
        filter_spans_free(&spans);
    }
    words_destroy(w);
    assert_int_equal(bad, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_automaton_against_twin),
        cmocka_unit_test(test_automaton_limits),
        cmocka_unit_test(test_fold_is_nfkc_casefold),
        cmocka_unit_test(test_fold_blanks_and_long_runs),
        cmocka_unit_test(test_list_errors_name_the_line),
        cmocka_unit_test(test_list_count),
        cmocka_unit_test(test_list_files),
        cmocka_unit_test(test_matching),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
