/* paths: where programs keep what they are not told a place for, and the folders that lead there. */
#ifndef TANDEM_SHARED_PATHS_H
#define TANDEM_SHARED_PATHS_H
#include "shared/status.h"
#include <stddef.h>

#define PATH_SIZE_MAX 4096 /* with the NUL */

/* /var/lib/tandem/NAME for root, else NAME below $XDG_DATA_HOME/tandem or ~/.local/share/tandem. -TD_ERR_NOTFOUND without a home: err asks for
 * `options`, the flags that would name a place. */
int path_default(char *out, size_t size, const char *name, const char *options, struct td_error *err);
/* Make the folders that lead to `path` (0700), not `path` itself. */
int path_make_parents(const char *path, struct td_error *err);
/* What a model is called that nobody named: "models/SmolLM2.Q4_1.gguf" -> "SmolLM2.Q4_1". Cut to size. */
void path_model_name(const char *path, char *out, size_t size);

/* files_settle: let this process have as many descriptors as the system grants, at most FILES_MAX. Connections, segments and the index share them,
 * and the usual 1,024 are taken by a few idle clients. For a program's main, before it opens anything; a library leaves that to its program. */
#define FILES_MAX 16384
void files_settle(void);

#endif
