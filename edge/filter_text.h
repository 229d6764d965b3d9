/* filter_text: what the parts of the filter share: places in a text, what stands beside a place, and the folded
 * form in which words are compared.
 *
 * Folded: decomposed (NFKD), case folded, characters that show nothing (zero-width, soft hyphen, variation
 * selectors) left out, runs of white space made one blank. Texts that NFKC makes equal are equal in this form
 * too; unlike NFKC it can be made piece by piece, in constant memory, with each character's place in the
 * source. */
#ifndef TANDEM_EDGE_FILTER_TEXT_H
#define TANDEM_EDGE_FILTER_TEXT_H
#include "shared/base.h"
#include "shared/status.h"

struct filter_span { /* bytes [begin, end) of the text */
    uint32_t begin, end;
    uint8_t kind; /* the list's owner says of what */
};
struct filter_spans {
    struct filter_span *items;
    size_t count, capacity;
};
int filter_spans_add(struct filter_spans *s, size_t begin, size_t end, uint8_t kind); /* 0, -TD_ERR_NOMEM */
void filter_spans_sort(struct filter_spans *s); /* by begin, longest first */
void filter_spans_free(struct filter_spans *s);

struct filter_buffer { /* grows; what it held is wiped when it moves */
    char *data;
    size_t size, capacity;
};
/* keeps a NUL behind; 0, -TD_ERR_NOMEM */
int filter_buffer_add(struct filter_buffer *b, const char *data, size_t size);
void filter_buffer_free(struct filter_buffer *b);

/* Letters, digits and marks of scripts that put blanks between words. */
bool filter_is_word(uint32_t code_point);
/* Scripts without blanks between words (Han, kana, Thai, …), and Hangul, whose words take particles. */
bool filter_is_unspaced(uint32_t code_point);
/* Belongs to the character before it: a combining mark, the vowel or the end of a Hangul syllable. */
bool filter_is_mark(uint32_t code_point);

/* The character that ends at / begins at byte `at`; UTF8_INVALID if there is none or it is damaged. */
uint32_t filter_before(const char *text, size_t at);
uint32_t filter_after(const char *text, size_t size, size_t at);

struct folded {          /* one character of the folded text and where it comes from */
    uint32_t code_point; /* UTF8_INVALID: a damaged byte */
    uint32_t begin, end;
};
/* filter_fold: calls fn for each folded character; another result than 0 ends it and is returned. size < 2^32.
 * A run of combining marks is one place. */
int filter_fold(const char *text, size_t size, int (*fn)(void *ctx, const struct folded *c), void *ctx);

#endif
