/* config: settings from, in rising order of force: built-in defaults, an INI file (--config), environment
 * (PREFIX_NAME), flags (--name value, --name=value, --flag, --no-flag). One table per program describes all of them
 * and is also its --help. Unknown names, bad values and values out of range are errors that name the source. */
#ifndef TANDEM_SHARED_CONFIG_H
#define TANDEM_SHARED_CONFIG_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "shared/status.h"

enum config_type {
    CONFIG_STRING,
    CONFIG_INT,
    CONFIG_FLOAT,
    CONFIG_BOOL,
    CONFIG_SIZE
}; /* SIZE: 64K, 2M, 4G → uint64_t */

struct config_option {
    /* "listen-port": flag --listen-port, INI key listen_port or listen-port, env PREFIX_LISTEN_PORT */
    const char *name;
    enum config_type type; /* STRING: const char *; INT: int64_t; FLOAT: double; BOOL: bool; SIZE: uint64_t */
    size_t offset;         /* of the field in the settings struct */
    const char *fallback;  /* default as text; NULL: "" / 0 / false */
    double min, max;       /* numbers only; both 0: any. SIZE: min alone, and 0 is always allowed */
    const char *metavar;   /* "PORT" */
    const char *help;      /* one line */
    bool secret;           /* never accepted as a flag's value (argv is public): file or environment only */
};

struct config_spec {
    const char *program;    /* "tandem-edge" */
    const char *env_prefix; /* "TANDEM_EDGE" */
    const char *summary;    /* first line of --help */
    const char *examples;   /* of --help, and what stands behind them */
    const char *usage;      /* NULL, or the forms of its arguments, one a line: "inspect FILE\nverify FILE" */
    const struct config_option *options;
    size_t option_count;
};

struct config; /* owns the strings that settings point to */

/* config_load: fill `settings` (the caller's struct). Returns 0 with *out to be freed by config_free (settings' strings
 * live as long), 1 when --help or --version was printed (exit 0), or a negative code with err.
 * Positional arguments are left in *rest (argv pointers) if rest is not NULL; else they are an error. */
int config_load(const struct config_spec *spec, int argc, char **argv, void *settings, struct config **out,
                char ***rest, int *rest_count, struct td_error *err);
void config_free(struct config *c);

/* config_read_secret: first line of a file that must be 0600 or stricter (checked; also owner). At most size-1 chars. */
int config_read_secret(const char *path, char *out, size_t size, struct td_error *err);

#endif
