/* pii: IBANs, the shared small parts, and running all recognisers. See pii.h. Source of the IBAN lengths: the
 * SWIFT IBAN registry; of the check: ISO 7064 MOD 97-10. */
#include "edge/pii_internal.h"
#include "shared/utf8.h"

/* ---- parts ---- */

size_t pii_digit(const char *text, size_t size, size_t at, unsigned *value)
{
    static const uint32_t zeros[] = {0xff10, 0x0660, 0x06f0};
    if (at >= size)
        return 0;
    if ((uint8_t)text[at] < 0x80) {
        *value = (unsigned)(text[at] - '0');
        return *value <= 9;
    }
    uint32_t c;
    size_t bytes = utf8_decode(text + at, size - at, &c);
    for (size_t i = 0; i < TD_COUNT(zeros); i++)
        if (c >= zeros[i] && c <= zeros[i] + 9) {
            *value = c - zeros[i];
            return bytes;
        }
    return 0;
}

size_t pii_gap(const char *text, size_t size, size_t at, enum pii_gap *kind)
{
    if (at >= size)
        return 0;
    uint32_t c = (uint8_t)text[at];
    if (c >= 0x80)
        c = filter_after(text, size, at);
    switch (c) {
    case ' ':
    case 0xa0:   /* no-break */
    case 0x2007: /* figure space */
    case 0x2009: /* thin */
    case 0x202f: /* narrow no-break */
    case 0x3000: /* ideographic */
        *kind = GAP_BLANK;
        break;
    case '-':
    case 0x2010:
    case 0x2011:
    case 0x2012:
    case 0x2013:
    case 0xff0d:
        *kind = GAP_DASH;
        break;
    case '.':
        *kind = GAP_DOT;
        break;
    case '/':
        *kind = GAP_SLASH;
        break;
    default:
        return 0;
    }
    return c < 0x80 ? 1 : c < 0x800 ? 2 : 3;
}

/* Up to `most` ASCII digits at *at, which moves behind them. */
static size_t take_digits(const char *text, size_t size, size_t *at, size_t most)
{
    size_t begin = *at;
    while (*at < size && *at - begin < most && pii_is_digit(text[*at]))
        ++*at;
    return *at - begin;
}

bool pii_date_at(const char *text, size_t size, size_t at)
{
    size_t counts[3];
    char separator = 0;
    for (int i = 0; i < 3; i++) {
        counts[i] = take_digits(text, size, &at, 4);
        if (i == 2)
            break;
        if (at >= size || !(text[at] == '-' || text[at] == '.' || text[at] == '/') ||
            (separator && text[at] != separator))
            return false;
        separator = text[at++];
    }
    if (at < size && pii_is_digit(text[at]))
        return false;
    if (at + 1 < size && text[at] == separator &&
        pii_is_digit(text[at + 1])) /* more groups than a date has */
        return false;
    bool year_first = counts[0] == 4 && counts[2] >= 1 && counts[2] <= 2;
    bool year_last = counts[0] >= 1 && counts[0] <= 2 && (counts[2] == 2 || counts[2] == 4);
    return counts[1] >= 1 && counts[1] <= 2 && (year_first || year_last);
}

/* ---- IBAN ---- */

static const char iban_lengths[] =
    "AD24AE23AL28AT20AZ28BA20BE16BG22BH22BI27BR29BY28CH21CR22CY28CZ24DE22DJ27DK18DO28EE20EG29ES24FI18FK18FO18"
    "FR27GB22GE22GI23GL18GR27GT28HN28HR21HU28IE22IL23IQ23IS26IT27JO30KW30KZ20LB28LC32LI21LT20LU20LV21LY25MC27"
    "MD24ME22MK19MN20MR27MT31MU30NI28NL18NO15OM23PK24PL28PS29PT25QA29RO24RS22RU33SA24SC31SD18SE24SI19SK24SM27"
    "SO23ST25SV28TL23TN24TR26UA29VA22VG24XK20YE30";

static char upper(char c)
{
    return c >= 'a' && c <= 'z' ? (char)(c - 32) : c;
}

static size_t iban_length(char first, char second)
{
    for (const char *p = iban_lengths; *p; p += 4)
        if (p[0] == upper(first) && p[1] == upper(second))
            return (size_t)((p[2] - '0') * 10 + (p[3] - '0'));
    return 0;
}

/* Country and check digits count as if they stood at the end. */
static bool iban_valid(const char *characters, size_t length)
{
    unsigned remainder = 0;
    for (size_t i = 0; i < length; i++) {
        char c = characters[(i + 4) % length];
        unsigned value = pii_is_digit(c) ? (unsigned)(c - '0') : (unsigned)(c - 'A' + 10);
        remainder = (remainder * (value >= 10 ? 100 : 10) + value) % 97;
    }
    return remainder == 1;
}

static size_t iban_at(const char *text, size_t size, size_t at)
{
    if (size - at < 15 || !pii_is_letter(text[at + 1]) || !pii_is_digit(text[at + 2]) ||
        !pii_is_digit(text[at + 3]))
        return 0;
    char characters[40];
    size_t length = iban_length(text[at], text[at + 1]), count = 0, i = at;
    if (length == 0 || filter_is_word(filter_before(text, at)))
        return 0;
    while (count < length && i < size) {
        enum pii_gap kind;
        size_t gap = count > 0 ? pii_gap(text, size, i, &kind) : 0;
        i += gap && (kind == GAP_BLANK || kind == GAP_DASH) ? gap : 0;
        if (i >= size || !(pii_is_digit(text[i]) || pii_is_letter(text[i])))
            return 0;
        characters[count++] = upper(text[i++]);
    }
    if (count < length || filter_is_word(filter_after(text, size, i)))
        return 0;
    return iban_valid(characters, length) ? i - at : 0;
}

int pii_scan_ibans(const char *text, size_t size, struct filter_spans *out)
{
    int rc = 0;
    for (size_t at = 0; rc == 0 && at < size;) {
        size_t found = pii_is_letter(text[at]) ? iban_at(text, size, at) : 0;
        if (found)
            rc = filter_spans_add(out, at, at + found, PII_IBAN);
        at += found ? found : 1;
    }
    return rc;
}

/* ---- all ---- */

int pii_scan(const char *text, size_t size, struct filter_spans *out)
{
    int rc = pii_scan_emails(text, size, out);
    if (rc == 0)
        rc = pii_scan_ips(text, size, out);
    if (rc == 0)
        rc = pii_scan_ibans(text, size, out);
    if (rc == 0)
        rc = pii_scan_numbers(text, size, out);
    return rc;
}
