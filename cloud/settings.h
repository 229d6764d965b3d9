/* settings: what tandem-cloud can be told, from flags, environment (TANDEM_CLOUD_…) and file, and what is wrong with it before anything is
 * opened. `port` alone is no option's name: Kubernetes sets TANDEM_CLOUD_PORT for a service of that name. */
#ifndef TANDEM_CLOUD_SETTINGS_H
#define TANDEM_CLOUD_SETTINGS_H
#include "kernels/kv_dtype.h"
#include "shared/base.h"
#include "shared/config.h"
#include "shared/log.h"
#include "shared/paths.h"
#include "store/store.h"

#define SETTINGS_DEMOTE_MAX 64 /* tenants that --store-demote names */

struct settings {
    const char *model, *model_name, *chat_template;
    const char *listen;
    int64_t listen_port, admin_port;
    const char *cert, *key, *client_ca;
    bool plain;
    const char *tokens_file;
    const char *store, *store_key_file, *store_keys, *store_demote, *redis;
    uint64_t store_size, store_ram, store_tenant, store_ram_tenant;
    int64_t store_ttl_hours;
    int64_t threads, pages, token_budget, sequences, context, kv_stall_ms;
    uint64_t kv_memory, swap_memory;
    const char *device;
    double gpu_memory;
    bool deterministic;
    const char *kv_dtype_name;
    enum kv_dtype kv_dtype;
    const char *log_level;
    /* filled in by settings_load */
    char redis_host[256]; /* "": no remote tier */
    uint16_t redis_port;
    struct store_demotion_tenant demote[SETTINGS_DEMOTE_MAX];
    size_t demote_count;
    const struct kv_level *demote_others; /* of tenants that are not named; NULL: not allowed */
    enum log_level level;
    char model_name_default[128]; /* of the model's file, without ".gguf" */
    /* given, or the defaults */
    char tokens_path[PATH_SIZE_MAX], store_path[PATH_SIZE_MAX], store_key_path[PATH_SIZE_MAX];
};

/* 0 with *config to be freed by config_free when the settings are no longer used; 1: help or version was printed; negative with err. */
int settings_load(int argc, char **argv, struct settings *out, struct config **config, struct td_error *err);
bool settings_is_loopback(const char *address); /* localhost, 127.x.x.x, ::1 */

#endif
