/* ini: reads "key = value" lines. The form, one setting a line:
 *
 *     # comment              ; comment too
 *     [section]              for the reader's eye only: a key means the same in every section
 *     key = value            blanks around both are dropped
 *     key = value # why      a '#' or ';' after a blank starts a comment
 *     key = "a # \"b\" \\"    in quotes only \" and \\ are special, and blanks count
 *
 * A line of another form, or with a NUL byte, is an error that names file and line. */
#ifndef TANDEM_SHARED_INI_H
#define TANDEM_SHARED_INI_H
#include <stddef.h>
#include "shared/status.h"

/* Called for each setting, in the order of the file; key is not empty. Another result than 0 ends the reading. */
typedef int (*ini_entry_fn)(void *ctx, const char *key, const char *value, unsigned line,
                            struct td_error *err);

/* ini_parse: text has size bytes and room for one more; it is cut up in place. path is for messages only.
 * Returns 0, the first other result of `entry`, or -TD_ERR_FORMAT. */
int ini_parse(char *text, size_t size, const char *path, ini_entry_fn entry, void *ctx, struct td_error *err);

#endif
