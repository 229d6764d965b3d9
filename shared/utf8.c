/* utf8: see utf8.h. Source of the well-formed sequences: the Unicode Standard, table 3-7. */
#include "shared/utf8.h"
#include "shared/tokenizer.h"

#include "shared/unicode_class_table.h"

/* Length of the sequence that lead byte b begins (0: none), and the range of its second byte. */
static size_t lead_size(uint8_t b, uint8_t *low, uint8_t *high)
{
    *low = 0x80, *high = 0xbf;
    if (b < 0x80)
        return 1;
    if (b < 0xc2 || b > 0xf4)
        return 0;
    if (b < 0xe0)
        return 2;
    if (b == 0xe0)
        *low = 0xa0;
    else if (b == 0xed)
        *high = 0x9f;
    else if (b == 0xf0)
        *low = 0x90;
    else if (b == 0xf4)
        *high = 0x8f;
    return b < 0xf0 ? 3 : 4;
}

/* Bytes of data that agree with the well-formed sequence which data[0] begins; *wanted is its full length (0:
 * none). */
static size_t sequence_prefix(const uint8_t *data, size_t size, size_t *wanted)
{
    uint8_t low, high;
    *wanted = lead_size(data[0], &low, &high);
    size_t i = 1;
    for (; i < size && i < *wanted; i++) {
        if (data[i] < low || data[i] > high)
            break;
        low = 0x80, high = 0xbf;
    }
    return i;
}

size_t utf8_decode(const char *data, size_t size, uint32_t *code_point)
{
    const uint8_t *b = (const uint8_t *)data;
    size_t wanted;
    if (b[0] < 0x80) {
        *code_point = b[0];
        return 1;
    }
    if (sequence_prefix(b, size, &wanted) < wanted || wanted == 0) {
        *code_point = UTF8_INVALID;
        return 1;
    }
    uint32_t cp = b[0] & (0x7fu >> wanted);
    for (size_t i = 1; i < wanted; i++)
        cp = cp << 6 | (b[i] & 0x3fu);
    *code_point = cp;
    return wanted;
}

enum char_class unicode_class(uint32_t code_point)
{
    size_t low = 0, high = TD_COUNT(unicode_runs); /* the run is in [low, high) */
    if (code_point > 0x10ffff)
        return CHAR_OTHER;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (unicode_runs[middle] >> 2 <= code_point)
            low = middle;
        else
            high = middle;
    }
    return (enum char_class)(unicode_runs[low] & 3);
}

size_t utf8_complete(const char *data, size_t size)
{
    const uint8_t *b = (const uint8_t *)data;
    for (size_t back = 1; back <= 3 && back <= size; back++) {
        uint8_t lead = b[size - back];
        if ((lead & 0xc0) == 0x80)
            continue;
        size_t wanted;
        size_t good = sequence_prefix(b + size - back, back, &wanted);
        return good == back && wanted > back ? size - back : size;
    }
    return size;
}

bool utf8_valid(const char *data, size_t size)
{
    uint32_t cp;
    for (size_t i = 0; i < size;) {
        i += utf8_decode(data + i, size - i, &cp);
        if (cp == UTF8_INVALID)
            return false;
    }
    return true;
}
