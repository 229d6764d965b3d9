/* settings: what tandem-edge can be told, from flags, environment (TANDEM_EDGE_…) and an INI file, checked and in the form that the agent takes. */
#ifndef TANDEM_EDGE_SETTINGS_H
#define TANDEM_EDGE_SETTINGS_H
#include "edge/agent.h"
#include "shared/config.h"
#include "shared/log.h"
#include "shared/paths.h"

#define EDGE_ORIGINS_MAX 16
#define EDGE_CLOUD_PORT  8443
#define EDGE_DATA_NAME   "edge" /* of the data folder when nobody says, for path_default */
#define EDGE_API_KEY_MAX 256
#define EDGE_CHUNK_MAX   4096   /* tokens */
#define EDGE_TIMEOUT_MAX 86400  /* seconds of waiting for the cloud */
#define EDGE_PRICE_MAX   1000.0 /* seconds a second */

struct edge_settings {
    /* as given */
    const char *model, *model_name, *chat_template, *cloud, *ca, *client_cert, *client_key, *token_file,
        *token, *edge_layers, *local, *offline, *prefer, *codec, *hidden, *fidelity, *listen, *unix_socket,
        *api_key_file, *allow_origin, *words_file, *data, *log_level;
    int64_t private_min_layers, chunk, listen_port, threads, cloud_timeout;
    uint64_t kv_memory, kv_disk;
    double cloud_price;
    bool plain, filter, codec_unchecked, kv_whole, prefer_private;

    /* checked */
    char cloud_host[256];
    uint16_t cloud_port;
    char token_text[LIMIT_TOKEN_SIZE + 1];
    char api_key[EDGE_API_KEY_MAX + 1]; /* "": none */
    char data_dir[PATH_SIZE_MAX];
    char origin_text[1024];
    const char *origins[EDGE_ORIGINS_MAX + 1]; /* NULL-terminated */
    uint32_t layers;                           /* or PLANNER_AUTO */
    enum planner_local local_id;
    enum agent_offline offline_id;
    enum planner_prefer prefer_id;
    const struct kv_level *level_kv; /* --codec; NULL: auto */
    uint8_t hidden_id;
    enum kv_accept accept;
    enum log_level level;
};

/* 0 with *config to be freed after the settings' last use; 1: --help or --version was printed; negative with err (usage). */
int edge_settings_load(int argc, char **argv, struct edge_settings *out, struct config **config,
                       struct td_error *err);
/* "host:port", "[address]:port" or "host". */
int edge_parse_address(const char *text, char *host, size_t size, uint16_t *port, struct td_error *err);
int edge_codec_parse(const char *text, const struct kv_level **out); /* KV_LEVEL_NAMES */
int edge_hidden_parse(const char *text, uint8_t *out);               /* "f32", "f16", "int8" */
int edge_accept_parse(const char *text, enum kv_accept *out);
int edge_prefer_parse(const char *text, enum planner_prefer *out, bool *is_private);
int edge_local_parse(const char *text, enum planner_local *out);
int edge_offline_parse(const char *text, enum agent_offline *out);
/* Is it a name or address of this very machine? */
bool edge_is_loopback(const char *host);
/* The agent's part of the settings; borrows their strings. */
void edge_settings_agent(const struct edge_settings *s, struct agent_config *out);

#endif
