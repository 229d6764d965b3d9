/* config_help: the texts behind --help and --version, made from the table of options. */
#ifndef TANDEM_SHARED_CONFIG_HELP_H
#define TANDEM_SHARED_CONFIG_HELP_H
#include "shared/config.h"
#include <stdio.h>

#define CONFIG_NAME_SIZE 128 /* of an environment variable */

/* The environment variable of an option: PREFIX_LOG_LEVEL of log-level. */
void config_env_name(const struct config_spec *spec, const char *option, char out[CONFIG_NAME_SIZE]);

/* The forms of its arguments and its examples, for who got them wrong. */
void config_print_usage(const struct config_spec *spec, FILE *out);

/* config_print_wanted: if arg asks for help or the version, print that to stdout and return true. */
bool config_print_wanted(const struct config_spec *spec, const char *arg, bool takes_arguments);

#endif
