/* pii_address: e-mail and IP addresses. See pii.h. Sources: RFC 5321 (sizes), RFC 6531 (other scripts),
 * RFC 4291 (IPv6 as text). */
#include "edge/pii_internal.h"
#include "shared/utf8.h"
#include <arpa/inet.h>

#define EMAIL_SIZE_MAX 254
#define LABEL_SIZE_MAX 63
#define LABELS_MAX     32

/* ---- e-mail ---- */

/* Characters of a local part as people have them. The rest that RFC 5322 allows ("=", "/", …) is more often what
 * stands around an address. */
static bool is_local_punctuation(char c)
{
    return c == '.' || c == '_' || c == '%' || c == '+' || c == '-' || c == '\'' || c == '&' || c == '~';
}

/* May c be in an address part whose nearest character is of an unspaced script, or not? In Chinese text an
 * address stands between characters without a blank; it must not swallow them. */
static bool is_address_letter(uint32_t c, bool unspaced)
{
    return filter_is_word(c) || (unspaced && filter_is_unspaced(c));
}

/* Where the local part before the '@' at `at` begins; `at` if there is none. */
static size_t local_begin(const char *text, size_t at)
{
    size_t begin = at;
    bool unspaced = filter_is_unspaced(filter_before(text, at));
    while (begin > 0 && at - begin < EMAIL_SIZE_MAX) {
        if (is_local_punctuation(text[begin - 1])) {
            begin--;
            continue;
        }
        uint32_t c = filter_before(text, begin);
        if (!is_address_letter(c, unspaced))
            break;
        do
            begin--;
        while (((uint8_t)text[begin] & 0xc0) == 0x80);
    }
    while (begin < at && is_local_punctuation(text[begin]) && text[begin] != '_' && text[begin] != '+')
        begin++; /* quotes, dashes and dots before an address */
    return begin;
}

struct label {
    size_t begin, end, letters_end; /* [begin, letters_end): letters only */
};

static struct label read_label(const char *text, size_t size, size_t at)
{
    struct label l = {at, at, at};
    bool unspaced = filter_is_unspaced(filter_after(text, size, at)), letters = true;
    while (l.end < size && l.end - at < LABEL_SIZE_MAX) {
        uint32_t c;
        size_t bytes = utf8_decode(text + l.end, size - l.end, &c);
        if (c != '-' && !is_address_letter(c, unspaced))
            break;
        letters = letters && c != '-' && (c >= 0x80 || !pii_is_digit((char)c));
        l.end += bytes;
        if (letters)
            l.letters_end = l.end;
    }
    return l;
}

/* Where a domain ends whose last label is l; 0 if l cannot be a top level. */
static size_t domain_end(const char *text, const struct label *l)
{
    if (l->end - l->begin > 4 && memcmp(text + l->begin, "xn--", 4) == 0)
        return l->end;
    return l->letters_end - l->begin >= 2 ? l->letters_end : 0;
}

/* "icon@2x.png" is a picture. */
static bool is_picture(const char *text, size_t at, size_t end)
{
    static const char *const names[] = {"x.png", "x.jpg", "x.jpeg", "x.gif", "x.svg", "x.webp"};
    size_t digits = at;
    while (digits < end && pii_is_digit(text[digits]))
        digits++;
    for (size_t i = 0; digits > at && i < TD_COUNT(names); i++)
        if (end - digits == strlen(names[i]) && memcmp(text + digits, names[i], end - digits) == 0)
            return true;
    return false;
}

/* The end of the domain that begins at `at`; 0 if none does. */
static size_t read_domain(const char *text, size_t size, size_t at)
{
    size_t begin = at, end = 0;
    size = TD_MIN(size, at + EMAIL_SIZE_MAX);
    for (int labels = 0; labels < LABELS_MAX; labels++) {
        struct label l = read_label(text, size, at);
        if (l.end == l.begin || text[l.begin] == '-')
            break;
        size_t here = labels > 0 ? domain_end(text, &l) : 0;
        if (here)
            end = here;
        if (l.end >= size || text[l.end] != '.')
            break;
        at = l.end + 1;
    }
    return end && !is_picture(text, begin, end) ? end : 0;
}

int pii_scan_emails(const char *text, size_t size, struct filter_spans *out)
{
    int rc = 0;
    const char *next;
    for (size_t at = 0; rc == 0 && (next = memchr(text + at, '@', size - at)); at++) {
        at = (size_t)(next - text);
        size_t begin = local_begin(text, at);
        size_t end = begin < at ? read_domain(text, size, at + 1) : 0;
        if (end == 0)
            continue;
        if (end - begin > EMAIL_SIZE_MAX) /* no address is so long: keep the part nearest to the '@' */
            begin = end - EMAIL_SIZE_MAX;
        while (((uint8_t)text[begin] & 0xc0) == 0x80)
            begin++;
        rc = filter_spans_add(out, begin, end, PII_EMAIL);
    }
    return rc;
}

/* ---- IP ---- */

#define IP_TEXT_MAX 45 /* "ffff:…:255.255.255.255" */

static bool parses(int family, const char *text, size_t size)
{
    char copy[IP_TEXT_MAX + 1];
    uint8_t address[16];
    if (size == 0 || size > IP_TEXT_MAX)
        return false;
    memcpy(copy, text, size);
    copy[size] = '\0';
    return inet_pton(family, copy, address) == 1;
}

/* text[at..end) is a run of digits and dots, no such character beside it. */
static bool is_ipv4(const char *text, size_t size, size_t at, size_t *end)
{
    while (*end > at && text[*end - 1] == '.') /* the end of a sentence */
        --*end;
    if (filter_is_word(filter_before(text, at)) || filter_is_word(filter_after(text, size, *end)))
        return false;
    return parses(AF_INET, text + at, *end - at);
}

static bool is_hex(char c)
{
    return pii_is_digit(c) || ((c | 0x20) >= 'a' && (c | 0x20) <= 'f');
}

/* "a::b" and "::add" are names in programs before they are addresses: a digit, three groups or four hex digits in
 * a row are wanted. */
static bool is_plausible_ipv6(const char *text, size_t size)
{
    size_t groups = 0, run = 0, longest = 0;
    bool digit = false;
    for (size_t i = 0; i < size; i++) {
        digit = digit || pii_is_digit(text[i]);
        run = is_hex(text[i]) ? run + 1 : 0;
        groups += run == 1;
        longest = TD_MAX(longest, run);
    }
    return groups > 0 && (digit || groups >= 3 || longest == 4);
}

/* text[begin..end) is a run of hex digits, colons and dots. Finds the address in it. */
static bool find_ipv6(const char *text, size_t size, size_t *begin, size_t *end)
{
    if (filter_is_word(filter_before(text, *begin)))
        while (*begin < *end && is_hex(text[*begin]))
            ++*begin; /* the end of a word: "addr:fe80::1" */
    bool after_word = filter_is_word(filter_before(text, *begin));
    if (*end - *begin >= 2 && text[*begin] == ':' && text[*begin + 1] == ':') {
        if (after_word)
            return false; /* "std::1" */
    } else if (*begin < *end && text[*begin] == ':') {
        ++*begin;
    }
    if (filter_is_word(filter_after(text, size, *end)))
        return false;
    while (*end > *begin &&
           (text[*end - 1] == '.' || (text[*end - 1] == ':' && *end - *begin >= 2 && text[*end - 2] != ':')))
        --*end;
    if (!parses(AF_INET6, text + *begin, *end - *begin)) {
        const char *dot = memchr(text + *begin, '.', *end - *begin); /* "…::1.But" */
        if (!dot || !parses(AF_INET6, text + *begin, (size_t)(dot - text) - *begin))
            return false;
        *end = (size_t)(dot - text);
    }
    return is_plausible_ipv6(text + *begin, *end - *begin);
}

/* The run of hex digits, colons and dots that begins at `at`. IPv4 addresses lie in it or are it. */
static int scan_run(const char *text, size_t size, size_t at, size_t run_end, bool colons,
                    struct filter_spans *out)
{
    size_t begin = at, end = run_end;
    int rc = 0;
    if (colons && run_end - at <= 2 * IP_TEXT_MAX && find_ipv6(text, size, &begin, &end))
        return filter_spans_add(out, begin, end, PII_IP);
    while (rc == 0 && at < run_end) {
        for (end = at; end < run_end && (pii_is_digit(text[end]) || text[end] == '.');)
            end++;
        size_t next = end;
        if (end > at && is_ipv4(text, size, at, &end))
            rc = filter_spans_add(out, at, end, PII_IP);
        at = TD_MAX(next, at + 1);
    }
    return rc;
}

int pii_scan_ips(const char *text, size_t size, struct filter_spans *out)
{
    int rc = 0;
    for (size_t at = 0; rc == 0 && at < size;) {
        size_t end = at, colons = 0, dots = 0;
        for (; end < size && (is_hex(text[end]) || text[end] == ':' || text[end] == '.'); end++) {
            colons += text[end] == ':';
            dots += text[end] == '.';
        }
        if (colons >= 2 || dots >= 3)
            rc = scan_run(text, size, at, end, colons >= 2, out);
        at = TD_MAX(end, at + 1);
    }
    return rc;
}
