/* tokenizer_pre: cuts text into the words inside which byte-level BPE merges.
 *
 * The published rules are regular expressions (\p{L} letters, \p{N} numbers, \s white space, first
 * alternative that matches wins): gpt2       's|'t|'re|'ve|'m|'ll|'d | ?\p{L}+ | ?\p{N}+ | ?[^\s\p{L}\p{N}]+
 * | \s+(?!\S) | \s+ smollm     every \p{N} alone, then gpt2 on what lies between llama-bpe
 * (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\r\n\p{L}\p{N}]?\p{L}+ | \p{N}{1,3} | ?[^\s\p{L}\p{N}]+[\r\n]* |
 * \s*[\r\n]+ | \s+(?!\S) | \s+ qwen2      the same with \p{N} in place of \p{N}{1,3} They are written out
 * here as scanners instead of being run by a regex engine: linear in time on any input, no match limits, no
 * dependence on the Unicode version of a library, and a byte that is no UTF-8 is simply a symbol character.
 */
#include "shared/tokenizer_internal.h"
#include "shared/utf8.h"

enum { CHAR_END = 4 }; /* after the last character of the piece */

struct scan {
    const char *text;
    size_t end;
    bool numbers_end; /* smollm: a number ends the piece */
};

static int ascii_class(uint8_t c)
{
    if ((uint8_t)((c | 0x20) - 'a') < 26)
        return CHAR_LETTER;
    if ((uint8_t)(c - '0') < 10)
        return CHAR_NUMBER;
    return c == ' ' || (uint8_t)(c - '\t') < 5 ? CHAR_SPACE : CHAR_OTHER;
}

/* Class of the character at `at` and, in *size, its bytes. */
static int class_at(const struct scan *s, size_t at, size_t *size)
{
    int class;
    *size = 0;
    if (at >= s->end)
        return CHAR_END;
    uint8_t first = (uint8_t)s->text[at];
    if (first < 128) {
        *size = 1;
        class = ascii_class(first);
    } else {
        uint32_t cp;
        *size = utf8_decode(s->text + at, s->end - at, &cp);
        class = unicode_class(cp);
    }
    return class == CHAR_NUMBER && s->numbers_end ? CHAR_END : class;
}

/* The end of the run of characters of one class from `at` on. */
static size_t run_end(const struct scan *s, size_t at, int class)
{
    size_t size;
    while (class_at(s, at, &size) == class)
        at += size;
    return at;
}

/* Bytes of 's 't 'm 'd 're 've 'll at `at`, or 0. `fold` ORs in 0x20: capitals count as well. */
static size_t contraction_size(const struct scan *s, size_t at, char fold)
{
    if (s->text[at] != '\'' || at + 1 >= s->end)
        return 0;
    char a = (char)(s->text[at + 1] | fold);
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return 2;
    if (at + 2 >= s->end)
        return 0;
    char b = (char)(s->text[at + 2] | fold);
    bool long_form = (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l');
    return long_form ? 3 : 0;
}

/* \s+(?!\S) | \s+ : all of the white space at the end of the text; before a word, all but its last character
 * (unless it is alone). */
static size_t space_end(const struct scan *s, size_t begin, bool newlines_end)
{
    size_t size, at = begin, last = begin, newline_end = 0;
    int class;
    while ((class = class_at(s, at, &size)) == CHAR_SPACE) {
        last = at;
        at += size;
        if (s->text[last] == '\r' || s->text[last] == '\n')
            newline_end = at;
    }
    if (newlines_end && newline_end)
        return newline_end;
    return class != CHAR_END && last > begin ? last : at;
}

static size_t word_gpt2(const struct scan *s, size_t begin)
{
    size_t size = contraction_size(s, begin, 0);
    if (size)
        return begin + size;
    size_t at = begin + (s->text[begin] == ' ');
    int class = class_at(s, at, &size);
    if (class != CHAR_SPACE && class != CHAR_END)
        return run_end(s, at, class);
    return space_end(s, begin, false);
}

static size_t word_llama(const struct scan *s, size_t begin, int digits_max)
{
    size_t size, next_size;
    size = contraction_size(s, begin, 0x20);
    if (size)
        return begin + size;
    char first = s->text[begin];
    int class = class_at(s, begin, &size);
    if (class == CHAR_NUMBER) {
        size_t at = begin;
        for (int i = 0; i < digits_max && class_at(s, at, &size) == CHAR_NUMBER; i++)
            at += size;
        return at;
    }
    if (first != '\r' && first != '\n' &&
        (class == CHAR_LETTER || class_at(s, begin + size, &next_size) == CHAR_LETTER))
        return run_end(s, begin + size, CHAR_LETTER);
    size_t at = begin + (first == ' ');
    if (class_at(s, at, &next_size) == CHAR_OTHER) {
        at = run_end(s, at, CHAR_OTHER);
        while (at < s->end && (s->text[at] == '\r' || s->text[at] == '\n'))
            at++;
        return at;
    }
    return space_end(s, begin, true);
}

size_t pre_next_word(enum pre_kind kind, const char *text, size_t begin, size_t end)
{
    struct scan s = {text, end, false};
    size_t size;
    switch (kind) {
    case PRE_SMOLLM:
        if (class_at(&s, begin, &size) == CHAR_NUMBER)
            return begin + size;
        s.numbers_end = true;
        return word_gpt2(&s, begin);
    case PRE_LLAMA_BPE:
        return word_llama(&s, begin, 3);
    case PRE_QWEN2:
        return word_llama(&s, begin, 1);
    }
    return end;
}
