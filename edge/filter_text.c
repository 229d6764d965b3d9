/* filter_text: see filter_text.h. Source of the order of combining marks: the Unicode Standard, 3.11. */
#include "edge/filter_text.h"
#include "shared/crypto.h"
#include "shared/utf8.h"
#include <stdlib.h>
#include <utf8proc.h>

/* in one run; a longer run is cut: real text has at most a handful (UAX 15, stream-safe: 30) */
#define MARKS_MAX     32
#define DECOMPOSE_MAX 32 /* code points from one; U+FDFA gives 18 */

/* ---- spans and buffers ---- */

int filter_spans_add(struct filter_spans *s, size_t begin, size_t end, uint8_t kind)
{
    if (s->count == s->capacity) {
        size_t capacity = s->capacity ? 2 * s->capacity : 16;
        struct filter_span *items = realloc(s->items, capacity * sizeof *items);
        if (!items)
            return -TD_ERR_NOMEM;
        s->items = items;
        s->capacity = capacity;
    }
    s->items[s->count++] = (struct filter_span){(uint32_t)begin, (uint32_t)end, kind};
    return 0;
}

static int compare_spans(const void *a, const void *b)
{
    const struct filter_span *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end)
        return x->end > y->end ? -1 : 1;
    return (int)x->kind - (int)y->kind;
}

void filter_spans_sort(struct filter_spans *s)
{
    if (s->count > 1)
        qsort(s->items, s->count, sizeof *s->items, compare_spans);
}

void filter_spans_free(struct filter_spans *s)
{
    free(s->items);
    *s = (struct filter_spans){0};
}

int filter_buffer_add(struct filter_buffer *b, const char *data, size_t size)
{
    if (size >= b->capacity - b->size) {
        if (size > SIZE_MAX / 4 - b->size)
            return -TD_ERR_NOMEM;
        size_t capacity = 2 * (b->size + size) + 32;
        char *grown = malloc(capacity);
        if (!grown)
            return -TD_ERR_NOMEM;
        if (b->size)
            memcpy(grown, b->data, b->size);
        if (b->data)
            crypto_wipe(b->data, b->size);
        free(b->data);
        b->data = grown;
        b->capacity = capacity;
    }
    if (size)
        memcpy(b->data + b->size, data, size);
    b->size += size;
    b->data[b->size] = '\0';
    return 0;
}

void filter_buffer_free(struct filter_buffer *b)
{
    if (b->data)
        crypto_wipe(b->data, b->size);
    free(b->data);
    *b = (struct filter_buffer){0};
}

/* ---- characters ---- */

static const struct {
    uint32_t first, last;
} unspaced[] = {
    {0x0e00, 0x0fff},   /* Thai, Lao, Tibetan */
    {0x1000, 0x109f},   /* Myanmar */
    {0x1100, 0x11ff},   /* Hangul jamo */
    {0x1780, 0x17ff},   /* Khmer */
    {0x2e80, 0x2fdf},   /* radicals */
    {0x3005, 0x3007},   /* iteration mark, closing mark, zero */
    {0x3021, 0x318f},   /* Hangzhou numerals, kana, Bopomofo, Hangul */
    {0x31a0, 0x31ff},   /* Bopomofo, strokes, kana */
    {0x3400, 0x9fff},   /* Han */
    {0xa960, 0xa97f},   /* Hangul jamo */
    {0xac00, 0xd7ff},   /* Hangul */
    {0xf900, 0xfaff},   /* Han */
    {0xff66, 0xff9f},   /* kana, half width */
    {0x1b000, 0x1b16f}, /* kana */
    {0x20000, 0x3ffff}, /* Han */
};

bool filter_is_unspaced(uint32_t c)
{
    if (c < unspaced[0].first)
        return false;
    for (size_t i = 0; i < TD_COUNT(unspaced); i++)
        if (c >= unspaced[i].first && c <= unspaced[i].last)
            return true;
    return false;
}

static bool is_mark_category(utf8proc_category_t category)
{
    return category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC ||
           category == UTF8PROC_CATEGORY_ME;
}

bool filter_is_mark(uint32_t c)
{
    if (c < 0x300 || c == UTF8_INVALID)
        return false;
    if ((c >= 0x1160 && c <= 0x11ff) || (c >= 0xd7b0 && c <= 0xd7ff))
        return true;
    return is_mark_category(utf8proc_category((utf8proc_int32_t)c));
}

bool filter_is_word(uint32_t c)
{
    if (c < 0x80)
        return (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z');
    if (c == UTF8_INVALID || filter_is_unspaced(c))
        return false;
    enum char_class class = unicode_class(c);
    return class == CHAR_LETTER || class == CHAR_NUMBER || filter_is_mark(c);
}

uint32_t filter_before(const char *text, size_t at)
{
    uint32_t c;
    for (size_t back = 1; back <= 4 && back <= at; back++) {
        if (((uint8_t)text[at - back] & 0xc0) == 0x80)
            continue;
        return utf8_decode(text + at - back, back, &c) == back ? c : UTF8_INVALID;
    }
    return UTF8_INVALID;
}

uint32_t filter_after(const char *text, size_t size, size_t at)
{
    uint32_t c = UTF8_INVALID;
    if (at < size)
        utf8_decode(text + at, size - at, &c);
    return c;
}

/* ---- folding ---- */

struct folder {
    int (*fn)(void *ctx, const struct folded *c);
    void *ctx;
    struct folded marks[MARKS_MAX]; /* of the run under way, sorted by class */
    uint8_t classes[MARKS_MAX];
    size_t mark_count;
    bool after_blank;
};

static int flush_marks(struct folder *f)
{
    if (f->mark_count == 0)
        return 0;
    uint32_t begin = UINT32_MAX, end = 0;
    for (size_t i = 0; i < f->mark_count; i++) {
        begin = TD_MIN(begin, f->marks[i].begin);
        end = TD_MAX(end, f->marks[i].end);
    }
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < f->mark_count; i++) {
        f->marks[i].begin = begin;
        f->marks[i].end = end;
        rc = f->fn(f->ctx, &f->marks[i]);
    }
    f->mark_count = 0;
    return rc;
}

static int emit(struct folder *f, struct folded c)
{
    uint8_t class = 0;
    if (c.code_point >= 0x300 && c.code_point != UTF8_INVALID)
        class = (uint8_t)utf8proc_get_property((utf8proc_int32_t)c.code_point)->combining_class;
    if (class == 0 || f->mark_count == MARKS_MAX) {
        int rc = flush_marks(f);
        if (rc != 0)
            return rc;
    }
    bool blank = c.code_point == ' ';
    if (blank && f->after_blank)
        return 0;
    f->after_blank = blank;
    if (class == 0)
        return f->fn(f->ctx, &c);
    size_t at = f->mark_count++;
    for (; at > 0 && f->classes[at - 1] > class; at--) {
        f->marks[at] = f->marks[at - 1];
        f->classes[at] = f->classes[at - 1];
    }
    f->marks[at] = c;
    f->classes[at] = class;
    return 0;
}

static int fold_one(struct folder *f, struct folded c)
{
    if (c.code_point < 0x80 && c.code_point > ' ' && c.code_point != 0x7f) {
        if (c.code_point >= 'A' && c.code_point <= 'Z')
            c.code_point |= 0x20;
        return emit(f, c);
    }
    if (c.code_point == UTF8_INVALID)
        return emit(f, c);
    if (unicode_class(c.code_point) == CHAR_SPACE) {
        c.code_point = ' ';
        return emit(f, c);
    }
    utf8proc_int32_t parts[DECOMPOSE_MAX];
    int last_class = 0;
    utf8proc_ssize_t count = utf8proc_decompose_char(
        (utf8proc_int32_t)c.code_point, parts, DECOMPOSE_MAX,
        UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT | UTF8PROC_CASEFOLD | UTF8PROC_IGNORE, &last_class);
    if (count < 0 || count > DECOMPOSE_MAX)
        return emit(f, c);
    int rc = 0;
    for (utf8proc_ssize_t i = 0; rc == 0 && i < count; i++)
        rc = emit(f, (struct folded){(uint32_t)parts[i], c.begin, c.end});
    return rc;
}

int filter_fold(const char *text, size_t size, int (*fn)(void *ctx, const struct folded *c), void *ctx)
{
    struct folder f = {.fn = fn, .ctx = ctx, .after_blank = true}; /* no blank at the beginning */
    int rc = 0;
    for (size_t at = 0; rc == 0 && at < size;) {
        struct folded c = {.begin = (uint32_t)at};
        at += utf8_decode(text + at, size - at, &c.code_point);
        c.end = (uint32_t)at;
        rc = fold_one(&f, c);
    }
    return rc != 0 ? rc : flush_marks(&f);
}
