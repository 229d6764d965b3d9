/* auth_command: `tandem-cloud token new|list|revoke`: makes and withdraws credentials by editing the tokens file, which running nodes
 * watch. A token is 32 random bytes in hex; it is printed once and kept nowhere. */
#ifndef TANDEM_CLOUD_AUTH_COMMAND_H
#define TANDEM_CLOUD_AUTH_COMMAND_H
#include "cloud/auth.h"

#define AUTH_TOKEN_DIGITS 64

/* Make a token, append its line (the file is made 0600 if need be) durably. expires_s: 0 never. */
int auth_token_new(const char *path, const char *tenant, const char *principal, uint64_t expires_s,
                   char token[AUTH_TOKEN_DIGITS + 1], struct td_error *err);
/* Take out the line whose hash begins with `id` (AUTH_ID_DIGITS hex digits or more); the others stay as they are. -TD_ERR_NOTFOUND. */
int auth_token_revoke(const char *path, const char *id, struct td_error *err);
/* argv[0] is "token". The exit code: 0, 1 for trouble, 2 for usage. */
int auth_command(int argc, char **argv);

#endif
