/* pii_internal: what the recognisers share. Each *_at gives the bytes of a value that begins at `at`, 0 if none. */
#ifndef TANDEM_EDGE_PII_INTERNAL_H
#define TANDEM_EDGE_PII_INTERNAL_H
#include "edge/pii.h"

enum pii_gap { GAP_NONE, GAP_BLANK, GAP_DASH, GAP_DOT, GAP_SLASH };

static inline bool pii_is_digit(char c)
{
    return c >= '0' && c <= '9';
}
static inline bool pii_is_letter(char c)
{
    return (c | 0x20) >= 'a' && (c | 0x20) <= 'z';
}

/* A digit, ASCII, full-width or Arabic: its bytes and value. */
size_t pii_digit(const char *text, size_t size, size_t at, unsigned *value);
/* One separator as people type them in numbers: blank, no-break and thin blanks, hyphens, '.', '/'. */
size_t pii_gap(const char *text, size_t size, size_t at, enum pii_gap *kind);
bool pii_date_at(const char *text, size_t size, size_t at); /* 2026-01-31, 31.1.2026, 1/31/26 */

#endif
