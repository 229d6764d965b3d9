/* pii_number: payment cards and phone numbers: digits in groups. See pii.h. Sources: ISO/IEC 7812-1 (Luhn, 13 to 19
 * digits here), ITU-T E.164 (at most 15 digits), and national habits of writing.
 *
 * A number that stands in a longer one, in a name, a path, an amount or a date is no phone number. Reading stops
 * after DIGITS_MAX digits, so a text of digits alone costs no more than any other. */
#include "edge/pii_internal.h"
#include "shared/utf8.h"

#define DIGITS_MAX    19
#define CARD_MIN      13
#define PHONE_MIN     7
#define PHONE_MAX     15
#define KEYWORD_REACH 32 /* bytes before a number in which "phone" counts */

struct groups { /* digits and where their groups end */
    uint8_t digits[DIGITS_MAX];
    size_t count; /* groups */
    struct {
        size_t end;         /* in the text */
        size_t digit_count; /* up to here */
        enum pii_gap gap;   /* before it */
    } items[DIGITS_MAX];
};

/* Between groups: one separator, or for phones one with parentheses: " (", ") ", ")-". */
static size_t gap_at(const char *text, size_t size, size_t at, bool parentheses, enum pii_gap *kind)
{
    size_t begin = at, bytes = 0;
    bool opened = false, closed = false;
    *kind = GAP_NONE;
    for (int i = 0; i < 4; i++) {
        enum pii_gap k;
        if (parentheses && at < size && ((text[at] == '(' && !opened) || (text[at] == ')' && !closed))) {
            opened = opened || text[at] == '(';
            closed = closed || text[at] == ')';
            at++;
        } else if (*kind == GAP_NONE && (bytes = pii_gap(text, size, at, &k))) {
            *kind = k;
            at += bytes;
        } else {
            break;
        }
    }
    if (at > begin && *kind == GAP_NONE)
        *kind = GAP_BLANK;
    return at - begin;
}

/* The groups at `at`, as far as they have digits_max digits together. A group that has more is left out. */
static void read_groups(const char *text, size_t size, size_t at, size_t digits_max, bool phone,
                        struct groups *g)
{
    size_t count = 0;
    enum pii_gap gap = GAP_NONE;
    g->count = 0;
    for (;;) {
        unsigned value;
        size_t bytes, before = count;
        if (phone && gap == GAP_BLANK && pii_date_at(text, size, at)) /* not part of it */
            return;
        while ((bytes = pii_digit(text, size, at, &value))) {
            if (count == digits_max)
                return;
            g->digits[count++] = (uint8_t)value;
            at += bytes;
        }
        if (count == before)
            return;
        g->items[g->count].end = at;
        g->items[g->count].digit_count = count;
        g->items[g->count++].gap = gap;
        size_t gap_bytes = gap_at(text, size, at, phone, &gap);
        if (gap_bytes == 0)
            return;
        at += gap_bytes;
    }
}

static size_t group_size(const struct groups *g, size_t i)
{
    return g->items[i].digit_count - (i ? g->items[i - 1].digit_count : 0);
}

/* ---- cards ---- */

static bool luhn_valid(const uint8_t *digits, size_t count)
{
    unsigned sum = 0;
    bool same = true;
    for (size_t i = 0; i < count; i++) {
        unsigned d = digits[count - 1 - i];
        same = same && digits[i] == digits[0];
        d = i % 2 ? 2 * d : d;
        sum += d > 9 ? d - 9 : d;
    }
    return sum % 10 == 0 && !same;
}

/* Written like a card: one kind of separator; groups alike, or of three digits and more. */
static bool is_card_grouping(const struct groups *g, size_t last)
{
    bool alike = true, large = true;
    for (size_t i = 0; i < last; i++) {
        alike = alike && group_size(g, i) == group_size(g, 0);
        large = large && group_size(g, i) >= 3;
    }
    for (size_t i = 1; i <= last; i++)
        if (g->items[i].gap != g->items[1].gap)
            return false;
    return alike || large;
}

static size_t card_at(const char *text, size_t size, size_t at)
{
    struct groups g;
    if (filter_is_word(filter_before(text, at)))
        return 0;
    read_groups(text, size, at, DIGITS_MAX, false, &g);
    for (size_t i = g.count; i-- > 0;) {
        size_t count = g.items[i].digit_count;
        if (count < CARD_MIN)
            break;
        if (is_card_grouping(&g, i) && !filter_is_word(filter_after(text, size, g.items[i].end)) &&
            luhn_valid(g.digits, count))
            return g.items[i].end - at;
    }
    return 0;
}

/* ---- phones: what stands around ---- */

/* Right before a national number: not the rest of a name, a path, an amount or a longer number. */
static bool phone_may_begin(const char *text, size_t at)
{
    uint32_t c = filter_before(text, at);
    if (filter_is_word(c) || c == '#' || c == '$' || c == 0x20ac || c == 0xa3 || c == 0xa5 || c == 0x20b9)
        return false;
    bool joins =
        c == '-' || c == '.' || c == '/' || c == '_' || c == ',' || c == '+' || c == '\\' || c == '%';
    return !joins || !filter_is_word(filter_before(text, at - 1));
}

static bool phone_may_end(const char *text, size_t size, size_t end, bool grouped)
{
    uint32_t c = filter_after(text, size, end);
    if (filter_is_word(c) || c == '%' || c == '_')
        return false;
    if (c != '.' && c != ',' && c != '-' && c != '/')
        return true;
    uint32_t next = filter_after(text, size, end + 1);
    return !(grouped ? next < 0x80 && pii_is_digit((char)next) : filter_is_word(next));
}

/* A word before the number, on its line, that says what it is. */
static bool has_keyword(const char *text, size_t at)
{
    static const char *const words[] = {"phone",    "telephone",  "tel",   "mobile",  "cell",   "call",
                                        "fax",      "whatsapp",   "sms",   "handy",   "phones", "telefon",
                                        "telefono", "t\xc3\xa9l", "mobil", "portable"};
    static const char *const unspaced[] = {"\xe7\x94\xb5\xe8\xaf\x9d", "\xe6\x89\x8b\xe6\x9c\xba",
                                           "\xe9\x9b\xbb\xe8\xa9\xb1", "\xe6\x90\xba\xe5\xb8\xaf",
                                           "\xec\xa0\x84\xed\x99\x94"};
    char window[KEYWORD_REACH + 1];
    size_t begin = at, size = 0;
    while (begin > 0 && at - begin < KEYWORD_REACH && text[begin - 1] != '\n' &&
           !pii_is_digit(text[begin - 1]))
        begin--; /* not on another line, not before another number */
    if (at - begin < 3)
        return false;
    for (; begin < at; begin++) {
        char c = text[begin];
        window[size++] = c >= 'A' && c <= 'Z' ? (char)(c | 0x20) : c ? c : ' ';
    }
    window[size] = '\0';
    for (size_t i = 0; i < TD_COUNT(unspaced); i++)
        if (strstr(window, unspaced[i]))
            return true;
    for (size_t i = 0; i < TD_COUNT(words); i++) {
        size_t length = strlen(words[i]);
        for (const char *p = window; (p = strstr(p, words[i])); p++) {
            size_t place = (size_t)(p - window);
            bool whole = !filter_is_word(filter_before(window, place)) &&
                         !filter_is_word(filter_after(window, size, place + length));
            if (whole)
                return true;
        }
    }
    return false;
}

/* ---- phones: forms ---- */

/* Groups that people write after each other until the number is complete: at `enough` digits a blank ends it. */
static size_t complete_group(const struct groups *g, size_t enough, size_t most)
{
    size_t last = SIZE_MAX;
    for (size_t i = 0; i < g->count && g->items[i].digit_count <= most; i++) {
        bool complete = last != SIZE_MAX && g->items[last].digit_count >= enough;
        if (complete && g->items[i].gap == GAP_BLANK)
            break;
        last = i;
    }
    return last;
}

/* '+' or "00", prefix bytes, then the number with its country. */
static size_t international_at(const char *text, size_t size, size_t at, size_t prefix)
{
    struct groups g;
    size_t begin = at + prefix;
    enum pii_gap kind;
    if (prefix == 1)
        begin += pii_gap(text, size, begin, &kind);
    else if (!phone_may_begin(text, at))
        return 0;
    uint32_t before = filter_before(text, at);
    if (filter_is_word(before) || before == '+')
        return 0;
    read_groups(text, size, begin, PHONE_MAX, true, &g);
    if (g.count == 0 || g.digits[0] == 0)
        return 0;
    size_t enough = g.digits[0] == 1 ? 11 : group_size(&g, 0) >= 9 ? 9 : 13;
    size_t last = complete_group(&g, enough, PHONE_MAX);
    size_t count = g.items[last].digit_count, least = prefix == 1 ? PHONE_MIN : last > 0 ? 8 : 9;
    if (count < least || (prefix == 2 && !phone_may_end(text, size, g.items[last].end, last > 0)))
        return 0;
    return g.items[last].end - at;
}

/* "(030) 1234567", "(555) 123-4567" */
static size_t parenthesised_at(const char *text, size_t size, size_t at)
{
    struct groups g;
    if (!phone_may_begin(text, at))
        return 0;
    read_groups(text, size, at + 1, PHONE_MAX, true, &g);
    if (g.count < 2 || group_size(&g, 0) < 2 || group_size(&g, 0) > 5 || g.items[0].end >= size ||
        text[g.items[0].end] != ')')
        return 0;
    unsigned area = g.digits[0] * 10u + g.digits[1];
    if (group_size(&g, 0) == 4 && (area == 19 || area == 20)) /* a year */
        return 0;
    size_t last = complete_group(&g, 10, 12);
    size_t count = g.items[last].digit_count;
    if (last == 0 || count < 8 || !phone_may_end(text, size, g.items[last].end, true))
        return 0;
    return g.items[last].end - at;
}

/* A trunk 0: "030 123456", "06 12 34 56 78", "07911123456" */
static size_t trunk_form(const struct groups *g)
{
    if (g->digits[0] != 0 || group_size(g, 0) < 2 || g->digits[1] == 0)
        return SIZE_MAX;
    size_t last = complete_group(g, 10, 12);
    size_t count = last == SIZE_MAX ? 0 : g->items[last].digit_count;
    return count >= (last == 0 ? 10u : 9u) && count <= (last == 0 ? 11u : 12u) ? last : SIZE_MAX;
}

static bool sizes_are(const struct groups *g, const uint8_t *sizes, size_t count)
{
    if (g->count < count)
        return false;
    for (size_t i = 0; i < count; i++)
        if (group_size(g, i) != sizes[i])
            return false;
    return true;
}

/* "212-555-0123" (area and exchange begin with 2 to 9), with or without the 1; "138 0013 8000"; "98765 43210" */
static size_t grouped_form(const struct groups *g)
{
    static const uint8_t us[] = {3, 3, 4}, us_long[] = {1, 3, 3, 4}, china[] = {3, 4, 4}, india[] = {5, 5};
    const uint8_t *d = g->digits;
    if (sizes_are(g, us, 3) && d[0] >= 2 && d[3] >= 2)
        return 2;
    if (sizes_are(g, us_long, 4) && d[0] == 1 && d[1] >= 2 && d[4] >= 2)
        return 3;
    if (sizes_are(g, china, 3) && d[0] == 1 && d[1] >= 3)
        return 2;
    if (sizes_are(g, india, 2) && d[0] >= 6)
        return 1;
    if (group_size(g, 0) == 11 && d[0] == 1 && d[1] >= 3) /* a Chinese mobile number in one piece */
        return 0;
    return SIZE_MAX;
}

static size_t national_at(const char *text, size_t size, size_t at)
{
    struct groups g;
    if (!phone_may_begin(text, at) || pii_date_at(text, size, at))
        return 0;
    read_groups(text, size, at, PHONE_MAX, true, &g);
    if (g.count == 0)
        return 0;
    size_t last = trunk_form(&g);
    if (last == SIZE_MAX)
        last = grouped_form(&g);
    if (last == SIZE_MAX && g.items[g.count - 1].digit_count >= PHONE_MIN && has_keyword(text, at))
        last = complete_group(&g, 10, PHONE_MAX);
    if (last == SIZE_MAX || g.items[last].digit_count < PHONE_MIN ||
        !phone_may_end(text, size, g.items[last].end, last > 0))
        return 0;
    return g.items[last].end - at;
}

static size_t phone_at(const char *text, size_t size, size_t at)
{
    if (text[at] == '+')
        return international_at(text, size, at, 1);
    if (text[at] == '(')
        return parenthesised_at(text, size, at);
    if (size - at > 2 && text[at] == '0' && text[at + 1] == '0' && text[at + 2] != '0') {
        size_t found = international_at(text, size, at, 2);
        if (found)
            return found;
    }
    return national_at(text, size, at);
}

/* ---- both ---- */

int pii_scan_numbers(const char *text, size_t size, struct filter_spans *out)
{
    int rc = 0;
    bool in_digits = false;
    for (size_t at = 0; rc == 0 && at < size;) {
        unsigned value;
        size_t digit = pii_digit(text, size, at, &value);
        bool begins = digit ? !in_digits : text[at] == '+' || text[at] == '(';
        size_t card = begins && digit ? card_at(text, size, at) : 0;
        size_t phone = begins && !card ? phone_at(text, size, at) : 0;
        in_digits = digit > 0 || card || phone;
        if (card || phone)
            rc = filter_spans_add(out, at, at + card + phone, card ? PII_CARD : PII_PHONE);
        at += card + phone ? card + phone : digit ? digit : 1;
    }
    return rc;
}
