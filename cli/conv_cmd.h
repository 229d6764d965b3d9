/* conv_cmd: what conv_cmd.c and conv_file.c share: exported conversations as files. */
#ifndef TANDEM_CLI_CONV_CMD_H
#define TANDEM_CLI_CONV_CMD_H
#include "cli/cli.h"

/* key_file: the words that seal the file; "" with plain: clear JSON, mode 0600. */
int conv_file_write(const char *path, const char *key_file, bool plain, const char *json, size_t size,
                    struct td_error *err);
/* *json: malloc'ed, the caller's. The file itself says whether it is sealed. */
int conv_file_read(const char *path, const char *key_file, char **json, size_t *size, struct td_error *err);
/* What the server gets: all but the part that is for people, and a vault only where it stays on this machine. malloc'ed. */
int conv_file_body(const char *json, size_t size, bool loopback, char **body, struct td_error *err);

#endif
