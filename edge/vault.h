/* vault: the values of one conversation and their placeholders; what filter.h says of them, and more for the filter's own parts. */
#ifndef TANDEM_EDGE_VAULT_H
#define TANDEM_EDGE_VAULT_H
#include "edge/filter.h"
#include "edge/filter_text.h"
#include "edge/pii.h"

#define VAULT_NUMBER_MAX      9999u /* of a placeholder; more than FILTER_VAULT_MAX, as some are reserved */
#define VAULT_PLACEHOLDER_MAX 12u   /* bytes: "[EMAIL_9999]" */

struct vault_placeholder {
    uint8_t kind; /* enum pii_kind */
    uint16_t number;
};

/* vault_placeholder_parse: is text[0..size) a placeholder, or the beginning of one? The bytes of a whole one; 0: not
 * one; -TD_ERR_TRUNCATED: may become one. */
int vault_placeholder_parse(const char *text, size_t size, struct vault_placeholder *out);
size_t vault_placeholder_print(struct vault_placeholder p, char out[VAULT_PLACEHOLDER_MAX + 1]);

/* vault_find: the value of a placeholder, borrowed as long as the vault is not changed; an empty span if it has none. */
struct span vault_find(const struct vault *v, struct vault_placeholder p);
/* vault_put: the placeholder of a value, a new one if the value is new. -TD_ERR_LIMIT: full; -TD_ERR_NOMEM. */
int vault_put(struct vault *v, uint8_t kind, const char *value, size_t size, struct vault_placeholder *out);
/* vault_reserve: the text has this placeholder without a value: no value shall get it. */
void vault_reserve(struct vault *v, struct vault_placeholder p);
/* vault_scan: where values of the vault stand as words of their own; adds spans with their kind. 0, -TD_ERR_NOMEM. */
int vault_scan(struct vault *v, const char *text, size_t size, struct filter_spans *out);

#endif
