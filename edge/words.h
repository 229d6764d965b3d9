/* words: the operator's list of words to block or mask, and finding them in a text.
 *
 * The file is UTF-8, one entry a line: "block WORDS…", "mask WORDS…", "# comment", or nothing. Entries and texts
 * are compared in the folded form of filter_text.h. An entry matches whole words: beside a letter or digit of a
 * script with blanks between words no other such letter or digit may stand ("bomb" is not in "bombastic"); in
 * other scripts entries match anywhere, but never a part of a character. */
#ifndef TANDEM_EDGE_WORDS_H
#define TANDEM_EDGE_WORDS_H
#include "edge/filter_text.h"

#define WORDS_FILE_SIZE_MAX (16u << 20)
#define WORDS_SIZE_MAX      256u /* bytes of one entry, folded */

struct words; /* immutable, thread-safe */
int words_load(const char *path, struct words **out, struct td_error *err);
/* words_parse: the same from memory; name is for messages. */
int words_parse(const char *name, const char *text, size_t size, struct words **out, struct td_error *err);
void words_destroy(struct words *w);

/* words_scan: 0 with the places of masked words added (they may overlap), -TD_ERR_BLOCKED, -TD_ERR_NOMEM.
 * Linear in size, whatever the text. */
int words_scan(const struct words *w, const char *text, size_t size, struct filter_spans *masked);

#endif
