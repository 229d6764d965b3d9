/* auth: who may use this node. A tokens file names each credential by its SHA-256 and says whose it is; the credentials themselves are
 * nowhere but with their owners.
 *
 *     # one line a token; '#' starts a comment
 *     <64 hex digits: SHA-256 of the token's characters> <tenant> <principal> [<expiry, 2027-01-31T00:00:00Z>]
 *
 * Rules
 *   - The file belongs to this user (or root) and is readable by nobody else; else it is not used.
 *   - It is read again when it changes. A change that cannot be read keeps the old table and is reported, and is tried again at each look where
 *     that is the system's fault; a file that is gone for two looks in a row leaves nobody in.
 *   - Every check compares the hash with every entry, in constant time: a wrong token, an expired and an unknown one take the same time.
 * Thread-safe. */
#ifndef TANDEM_CLOUD_AUTH_H
#define TANDEM_CLOUD_AUTH_H
#include "protocol/limits.h"
#include "shared/base.h"
#include "shared/status.h"

#define AUTH_FILE_SIZE_MAX (4u << 20)
#define AUTH_ID_DIGITS     12 /* of the hash: what people call a token by */

struct auth;
struct auth_identity {
    char tenant[LIMIT_NAME_SIZE + 1], principal[LIMIT_NAME_SIZE + 1];
    uint8_t hash[TD_HASH_SIZE]; /* of the token: for auth_still_valid */
};

/* A file that does not exist yet is an empty one. */
int auth_open(const char *path, struct auth **out, struct td_error *err);
void auth_close(struct auth *a);
/* Read the file again if it has changed, or in any case (force): 1 if the table is another now, 0, or a negative code (old table kept). */
int auth_reload(struct auth *a, bool force, struct td_error *err);
/* 0 and *out, or -TD_ERR_AUTH. */
int auth_check(struct auth *a, const char *token, struct auth_identity *out);
/* Is the token with this hash still good? Has this principal any good token? */
bool auth_still_valid(struct auth *a, const uint8_t hash[TD_HASH_SIZE]);
bool auth_principal_valid(struct auth *a, const char *tenant, const char *principal);
size_t auth_count(struct auth *a);
/* Each tenant of the table, possibly more than once. */
void auth_each_tenant(struct auth *a, void (*fn)(void *ctx, const char *tenant), void *ctx);

bool auth_name_valid(const char *name); /* 1 to LIMIT_NAME_SIZE of [A-Za-z0-9._-] */

/* ---- one line of the file ---- */
struct auth_entry {
    uint8_t hash[TD_HASH_SIZE];
    char tenant[LIMIT_NAME_SIZE + 1], principal[LIMIT_NAME_SIZE + 1];
    uint64_t expires_s; /* Unix time; 0: never */
};
/* 1 with *out, 0 for a blank or comment line, or -TD_ERR_FORMAT with err->text (which does not quote the line). */
int auth_parse_line(const char *line, size_t size, struct auth_entry *out, struct td_error *err);
int auth_no_file(const char *path, struct td_error *err); /* -TD_ERR_NOTFOUND, and what to do */
/* malloc'ed text of the file, NUL-terminated, after the checks of owner and mode. -TD_ERR_NOTFOUND: there is none. */
int auth_read_file(const char *path, char **text, size_t *size, struct td_error *err);

#endif
