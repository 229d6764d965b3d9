/* config_help: the texts behind --help and --version, made from the table of options. */
#ifndef TANDEM_SHARED_CONFIG_HELP_H
#define TANDEM_SHARED_CONFIG_HELP_H
#include "shared/config.h"

/* config_print_wanted: if arg asks for help or the version, print that to stdout and return true. */
bool config_print_wanted(const struct config_spec *spec, const char *arg, bool takes_arguments);

#endif
