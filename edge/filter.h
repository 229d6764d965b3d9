/* filter: what leaves the device. Runs over each message before anything else sees it, and over the reply as it streams back.
 *
 *   words: a list with actions block / mask, matched by Aho-Corasick over normalised text (NFKC, case folded, zero-width characters removed)
 *   pii:   e-mail, phone, card (Luhn), IP, IBAN (mod 97) -> reversible typed placeholders "[EMAIL_1]", numbered by first appearance in the
 *          conversation; restored in the reply, across token borders
 * The vault (placeholder <-> value) belongs to a conversation and never leaves the device; it is stored sealed with it. Values that are already in the vault
 * are masked again by exact match before the recognisers run, so the same value always has the same placeholder. One thread at a time per vault;
 * struct filter is immutable and thread-safe. */
#ifndef TANDEM_EDGE_FILTER_H
#define TANDEM_EDGE_FILTER_H
#include "shared/base.h"
#include "shared/status.h"

#define FILTER_TEXT_MAX  (8u << 20)
#define FILTER_VAULT_MAX 4096u /* values of one conversation */
#define FILTER_VALUE_MAX 256u  /* bytes of one value */
#define FILTER_WORDS_MAX 100000u

struct filter;
struct filter_config {
    /* NULL: none. Lines: "block WORDS…" | "mask WORDS…" | "# comment"; errors name file:line */
    const char *words_path;
    bool pii; /* recognisers on */
};
int filter_create(const struct filter_config *config, struct filter **out, struct td_error *err);
void filter_destroy(struct filter *f);

struct vault;
struct vault *vault_create(void);
void vault_destroy(struct vault *v); /* wipes */
/* malloc'ed; the caller seals and wipes it */
int vault_serialise(const struct vault *v, uint8_t **out, size_t *size);
int vault_parse(const void *data, size_t size, struct vault **out); /* hostile bytes */
size_t vault_count(const struct vault *v);

/* filter_apply: malloc'ed filtered text for the model. -TD_ERR_BLOCKED: a blocked word; err->text says so without quoting it. Adds new values to the vault.
 * A text that already looks like a placeholder ("[EMAIL_1]") typed by the user is left alone and never restored to another's value unless it is in the vault. */
int filter_apply(const struct filter *f, struct vault *v, const char *text, size_t size, char **out,
                 size_t *out_size, struct td_error *err);

/* Streamed restore of one reply: bytes in, bytes out (malloc'ed, may be empty). A possible placeholder at the end is held back until it is decided; flush ends it. */
struct restorer;
struct restorer *restorer_create(const struct vault *v); /* v must outlive it */
void restorer_destroy(struct restorer *r);
int restorer_push(struct restorer *r, const char *text, size_t size, bool flush, char **out,
                  size_t *out_size);

#endif
