/* pii: recognisers of personal data in a text: shape first, then what a value of that kind must satisfy.
 *
 *   e-mail  something@labels.letters; also with letters of other scripts
 *   phone   + or 00 and 7 to 15 digits; the usual national forms; any 7 to 15 digits right after a word such as "phone"
 *   card    13 to 19 digits, alone or in groups, that satisfy Luhn
 *   IP      IPv4 and IPv6 that inet_pton accepts
 *   IBAN    the length of its country and remainder 1 modulo 97
 *
 * Recognisers read raw bytes and never look further than a bound from where they begin, so all of them together
 * are linear in the text. They prefer to take too much: what is replaced comes back in the reply. */
#ifndef TANDEM_EDGE_PII_H
#define TANDEM_EDGE_PII_H
#include "edge/filter_text.h"

enum pii_kind { PII_EMAIL, PII_PHONE, PII_CARD, PII_IP, PII_IBAN, PII_KIND_COUNT };

/* Each adds its spans, in order of their begin, with their enum pii_kind. 0, -TD_ERR_NOMEM. */
int pii_scan_emails(const char *text, size_t size, struct filter_spans *out);
int pii_scan_ips(const char *text, size_t size, struct filter_spans *out);
int pii_scan_ibans(const char *text, size_t size, struct filter_spans *out);
int pii_scan_numbers(const char *text, size_t size, struct filter_spans *out); /* cards and phones */

int pii_scan(const char *text, size_t size, struct filter_spans *out); /* all of them */

#endif
