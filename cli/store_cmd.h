/* store_cmd: what the files of `tandem store` share. */
#ifndef TANDEM_CLI_STORE_CMD_H
#define TANDEM_CLI_STORE_CMD_H
#include "cli/cli.h"
#include "store/store.h"

struct store_settings {
    const char *directory, *key_file, *keys_directory, *admin;
    const char *tenant, *principal, *transfer_key_file, *model;
    int64_t dead_percent;
    bool json, yes, trusted;
};

/* Ask a running node's admin listener instead of the directory: stat, ls, verify, compact, gc, pin, unpin, erase-tenant. */
int store_cmd_remote(const struct store_settings *s, const char *verb, const char *name);
/* The request of pin and unpin; NULL: wrong usage, which has been said. */
json_t *store_cmd_pin_request(const struct store_settings *s, const char *verb, const char *name);
int store_cmd_export(struct store *store, const struct store_settings *s, const char *name);
int store_cmd_import(struct store *store, const struct store_settings *s, const char *name);
/* Print what a verb has answered, as JSON or for people. Take the reference. */
int store_cmd_print_tenants(const struct store_settings *s, json_t *stats);
int store_cmd_print_stats(const struct store_settings *s, json_t *stats);
int store_cmd_print_freed(const struct store_settings *s, json_t *result);
int store_cmd_print_verified(const struct store_settings *s,
                             json_t *result); /* fails if something is damaged */
/* erase-tenant: has it been said that this is meant? If not, that is asked for. */
bool store_cmd_is_sure(const struct store_settings *s, const char *name);
int store_cmd_print_erased(const struct store_settings *s, const char *name);

#endif
