/* settings: see settings.h. */
#include "cloud/settings.h"
#include "kernels/backend.h"
#include "protocol/limits.h"
#include "shared/kv_record.h"
#include "store/keys.h"
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>

#define REDIS_PORT_DEFAULT 6379
#define MIB                1048576.0

#define OPTION(field, kind) .type = kind, .offset = offsetof(struct settings, field)

/* clang-format off */
static const struct config_option options[] = {
    {.name = "model", OPTION(model, CONFIG_STRING), .metavar = "FILE", .help = "the model, a GGUF file with all its layers; edges must have the same"},
    {.name = "model-name", OPTION(model_name, CONFIG_STRING), .metavar = "NAME", .help = "what the API calls it; without it, the file's name"},
    {.name = "chat-template", OPTION(chat_template, CONFIG_STRING), .metavar = "NAME", .help = "instead of the one in the file: chatml, smollm, qwen, llama2, llama3, mistral, ..."},
    {.name = "listen", OPTION(listen, CONFIG_STRING), .fallback = "127.0.0.1", .metavar = "ADDRESS", .help = "where to serve: the API over HTTPS, and edges over WSS at /tandem; 0.0.0.0 or :: for all interfaces"},
    {.name = "listen-port", OPTION(listen_port, CONFIG_INT), .fallback = "8443", .max = 65535, .metavar = "PORT", .help = "0: any free one"},
    {.name = "admin-port", OPTION(admin_port, CONFIG_INT), .fallback = "9443", .max = 65535, .metavar = "PORT", .help = "/metrics, /health and the store's upkeep over plain HTTP on 127.0.0.1; 0: any free one"},
    {.name = "cert", OPTION(cert, CONFIG_STRING), .metavar = "FILE", .help = "certificate chain (PEM); deploy/certs.sh makes one"},
    {.name = "key", OPTION(key, CONFIG_STRING), .metavar = "FILE", .help = "its private key (PEM)"},
    {.name = "client-ca", OPTION(client_ca, CONFIG_STRING), .metavar = "FILE", .help = "let in only clients with a certificate of this authority"},
    {.name = "plain", OPTION(plain, CONFIG_BOOL), .help = "no TLS; on a loopback address only"},
    {.name = "tokens-file", OPTION(tokens_file, CONFIG_STRING), .metavar = "FILE", .help = "who may come in; made by `tandem-cloud token new`; without it, `tokens` beside the default store"},
    {.name = "store", OPTION(store, CONFIG_STRING), .metavar = "DIR", .help = "blocks and conversations; without it, /var/lib/tandem/cloud for root, else ~/.local/share/tandem/cloud"},
    {.name = "store-key-file", OPTION(store_key_file, CONFIG_STRING), .metavar = "FILE", .help = "master key of the store, made at the first start; without it, `store.key` beside the default store. TANDEM_STORE_KEY in the environment comes before it"},
    {.name = "store-size", OPTION(store_size, CONFIG_SIZE), .min = 16 * MIB, .metavar = "SIZE", .help = "the most that the store takes on disk; 0: 90 % of the file system"},
    {.name = "store-tenant", OPTION(store_tenant, CONFIG_SIZE), .min = 1 * MIB, .metavar = "SIZE", .help = "the most that one tenant's blocks take on disk; 0: no limit"},
    {.name = "store-ttl-hours", OPTION(store_ttl_hours, CONFIG_INT), .max = 1000000, .metavar = "N", .help = "blocks go so long after their last use; 0: when there is no room"},
    {.name = "store-demote", OPTION(store_demote, CONFIG_STRING), .metavar = "LIST", .help = "tenants whose cold blocks may be re-encoded at a lossy level before any goes: NAME or NAME=LEVEL, separated by commas; * for all others; l1 if no level is named, off for none; without it, nobody's"},
    {.name = "store-ram", OPTION(store_ram, CONFIG_SIZE), .min = 1 * MIB, .fallback = "256M", .metavar = "SIZE", .help = "memory for blocks as encoded as on disk, in front of it; less where weights and KV pages leave less; 0: none"},
    {.name = "store-ram-tenant", OPTION(store_ram_tenant, CONFIG_SIZE), .min = 1 * MIB, .metavar = "SIZE", .help = "the most that one tenant's blocks take of it; 0: no limit"},
    {.name = "store-keys", OPTION(store_keys, CONFIG_STRING), .metavar = "DIR", .help = "where the tenants' keys lie, for nodes that share them; without it, in the store"},
    {.name = "redis", OPTION(redis, CONFIG_STRING), .metavar = "HOST:PORT", .help = "a Redis server that several nodes share blocks through; its password in TANDEM_REDIS_PASSWORD. Needs --store-keys on a directory that all of them have"},
    {.name = "device", OPTION(device, CONFIG_STRING), .fallback = "auto", .metavar = "NAME", .help = "what computes: cpu, cuda:N, or auto: the first GPU if there is one"},
    {.name = "gpu-memory-utilization", OPTION(gpu_memory, CONFIG_FLOAT), .fallback = "0.9", .min = 0.05, .max = 1, .metavar = "SHARE", .help = "of a GPU's memory that may be in use, other programs' part included; KV pages take what the weights leave"},
    {.name = "deterministic", OPTION(deterministic, CONFIG_BOOL), .help = "on a GPU: the same bits whatever runs beside a request, slower; a CPU computes so always"},
    {.name = "kv-dtype", OPTION(kv_dtype_name, CONFIG_STRING), .fallback = "f16", .metavar = "NAME", .help = "on a GPU: what pages keep KV in: f16, or fp8 or int8 for twice as many tokens, a little less exact"},
    {.name = "threads", OPTION(threads, CONFIG_INT), .max = WORKERS_MAX, .metavar = "N", .help = "compute threads; 0: all cores"},
    {.name = "kv-memory", OPTION(kv_memory, CONFIG_SIZE), .min = 1 * MIB, .metavar = "SIZE", .help = "memory for KV pages; 0: a quarter of what is available, or what the weights leave, on a GPU all that --gpu-memory-utilization leaves"},
    {.name = "pages", OPTION(pages, CONFIG_INT), .max = 1 << 24, .metavar = "N", .help = "the same as a number of pages of 64 tokens; wins over --kv-memory"},
    {.name = "swap-memory", OPTION(swap_memory, CONFIG_SIZE), .min = 1 * MIB, .fallback = "4G", .metavar = "SIZE", .help = "beside a GPU: memory of this machine for KV that its own has no room for; 0: none"},
    {.name = "token-budget", OPTION(token_budget, CONFIG_INT), .fallback = "512", .min = 16, .max = BATCH_ROWS_MAX, .metavar = "N", .help = "rows of one step, prefill and decode together: more is faster in sum, less keeps replies flowing"},
    {.name = "sequences", OPTION(sequences, CONFIG_INT), .fallback = "64", .min = 1, .max = BATCH_SEQS_MAX, .metavar = "N", .help = "requests that run at once; more wait"},
    {.name = "context", OPTION(context, CONFIG_INT), .max = LIMIT_PROMPT_TOKENS, .metavar = "N", .help = "longest context in tokens; 0: the model's"},
    {.name = "kv-stall-ms", OPTION(kv_stall_ms, CONFIG_INT), .fallback = "2000", .min = 1, .max = 600000, .metavar = "MS", .help = "KV that an edge owes and that makes no progress for so long is recomputed"},
    {.name = "log-level", OPTION(log_level, CONFIG_STRING), .fallback = "info", .metavar = "LEVEL", .help = "info, warn, error"},
};
/* clang-format on */

static const struct config_spec spec = {
    .program = "tandem-cloud",
    .env_prefix = "TANDEM_CLOUD",
    .summary =
        "Tandem's decode service: runs the upper layers for edges, decodes, keeps every conversation's KV.",
    .examples =
        "  tandem-cloud token new --tenant acme --principal alice\n"
        "  tandem-cloud --model model.gguf --cert certs/server.crt --key certs/server.key\n"
        "  tandem-cloud --model model.gguf --plain --listen-port 8080\n"
        "\nCommands:\n  tandem-cloud token new|list|revoke    credentials; see tandem-cloud token --help\n"
        "\nSIGTERM lets running replies finish (10 s), then stops. SIGHUP reads the tokens file again.\n",
    .options = options,
    .option_count = TD_COUNT(options),
};

bool settings_is_loopback(const char *address)
{
    struct in_addr v4;
    struct in6_addr v6;
    if (strcmp(address, "localhost") == 0)
        return true;
    if (inet_pton(AF_INET, address, &v4) == 1)
        return ntohl(v4.s_addr) >> 24 == 127;
    return inet_pton(AF_INET6, address, &v6) == 1 && memcmp(&v6, &in6addr_loopback, sizeof v6) == 0;
}

/* ---- what belongs together ---- */

static int check_tls(const struct settings *s, struct td_error *err)
{
    if (s->plain && !settings_is_loopback(s->listen))
        return td_fail(
            err, -TD_ERR_ARG,
            "cannot serve without TLS on %s: --plain is for loopback addresses (--listen 127.0.0.1)",
            s->listen);
    if (s->plain && (s->cert[0] || s->key[0] || s->client_ca[0]))
        return td_fail(err, -TD_ERR_ARG, "--plain and --cert, --key, --client-ca exclude each other");
    if (!s->plain && (!s->cert[0] || !s->key[0]))
        return td_fail(
            err, -TD_ERR_ARG,
            "cannot serve without a certificate: give --cert and --key (deploy/certs.sh makes both), or "
            "--plain to try it on loopback");
    return 0;
}

/* HOST:PORT, [v6]:PORT; the port may be left out. */
static int parse_redis(struct settings *s, struct td_error *err)
{
    const char *text = s->redis, *colon = strrchr(text, ':'), *bracket = strrchr(text, ']');
    bool v6 = text[0] == '[';
    char *end = NULL;
    if (!text[0])
        return 0;
    if (colon && bracket && colon < bracket)
        colon = NULL;
    unsigned long port = colon ? strtoul(colon + 1, &end, 10) : REDIS_PORT_DEFAULT;
    size_t size = v6 && bracket ? (size_t)(bracket - text - 1)
                  : colon       ? (size_t)(colon - text)
                                : strlen(text);
    if (size == 0 || size >= sizeof s->redis_host || port == 0 || port > 65535 || (end && *end) ||
        (v6 && !bracket))
        return td_fail(err, -TD_ERR_ARG, "--redis wants HOST:PORT, such as 10.0.0.5:6379, not \"%s\"", text);
    memcpy(s->redis_host, text + v6, size);
    s->redis_host[size] = '\0';
    s->redis_port = (uint16_t)port;
    return 0;
}

/* One NAME[=LEVEL] of --store-demote. */
static int parse_demotion(struct settings *s, const char *text, size_t size, struct td_error *err)
{
    char name[STORE_TENANT_MAX + 1] = "", level_name[16] = "l1";
    const char *equals = memchr(text, '=', size);
    size_t name_size = equals ? (size_t)(equals - text) : size,
           level_size = equals ? size - name_size - 1 : 0;
    if (name_size < sizeof name)
        memcpy(name, text, name_size);
    if (equals && level_size < sizeof level_name) {
        memcpy(level_name, equals + 1, level_size);
        level_name[level_size] = '\0';
    }
    bool all = strcmp(name, "*") == 0, off = strcmp(level_name, "off") == 0;
    const struct kv_level *level = off ? NULL : kv_level_find(level_name);
    if ((!all && !keys_name_is_valid(name)) || (equals && level_size >= sizeof level_name) ||
        (!off && (!level || level->codec == KV_RAW || level->codec == KV_L0)) ||
        s->demote_count == SETTINGS_DEMOTE_MAX)
        return td_fail(
            err, -TD_ERR_ARG,
            "--store-demote wants up to %d tenants, NAME or NAME=LEVEL with l1, l2, l2-k5, l2-5bit or "
            "off, not \"%.*s\"",
            SETTINGS_DEMOTE_MAX, (int)TD_MIN(size, (size_t)100), text);
    if (all) {
        s->demote_others = level;
        return 0;
    }
    struct store_demotion_tenant *t = &s->demote[s->demote_count++];
    memcpy(t->name, name, sizeof name);
    t->level = level;
    return 0;
}

static int parse_demotions(struct settings *s, struct td_error *err)
{
    int rc = 0;
    for (const char *at = s->store_demote; *at && rc == 0;) {
        size_t size = strcspn(at, ",");
        rc = parse_demotion(s, at, size, err);
        at += size + (at[size] == ',');
    }
    return rc;
}

static int check(struct settings *s, struct td_error *err)
{
    if (!s->model[0])
        return td_fail(err, -TD_ERR_ARG,
                       "no model: name one with --model FILE (deploy/fetch-model.sh gets one)");
    if (!s->listen[0])
        return td_fail(err, -TD_ERR_ARG, "--listen wants an address such as 127.0.0.1, 0.0.0.0 or ::");
    if (strcmp(s->device, "auto") != 0 && strcmp(s->device, "cpu") != 0 && strncmp(s->device, "cuda", 4) != 0)
        return td_fail(err, -TD_ERR_ARG, "--device is auto, cpu or cuda:N, not \"%s\"", s->device);
    if (!kv_dtype_find(s->kv_dtype_name, &s->kv_dtype))
        return td_fail(err, -TD_ERR_ARG, "--kv-dtype is f16, fp8 or int8, not \"%s\"", s->kv_dtype_name);
    if (log_level_parse(s->log_level, &s->level) < 0)
        return td_fail(err, -TD_ERR_ARG, "--log-level is info, warn or error, not \"%s\"", s->log_level);
    if (s->listen_port != 0 && s->listen_port == s->admin_port)
        return td_fail(err, -TD_ERR_ARG, "--listen-port and --admin-port are both %d: choose two ports",
                       (int)s->listen_port);
    int rc = parse_redis(s, err);
    rc = rc < 0 ? rc : parse_demotions(s, err);
    return rc < 0 ? rc : check_tls(s, err);
}

static int choose_path(char *out, size_t size, const char *given, const char *name, struct td_error *err)
{
    if (!given[0])
        return path_default(out, size, name, "--store, --store-key-file and --tokens-file", err);
    if (strlen(given) >= size)
        return td_fail(err, -TD_ERR_LIMIT, "the path %.60s... is too long", given);
    strcpy(out, given);
    return 0;
}

int settings_load(int argc, char **argv, struct settings *out, struct config **config, struct td_error *err)
{
    memset(out, 0, sizeof *out);
    int rc = config_load(&spec, argc, argv, out, config, NULL, NULL, err);
    if (rc != 0)
        return rc;
    rc = check(out, err);
    if (rc == 0)
        rc = choose_path(out->store_path, sizeof out->store_path, out->store, "cloud", err);
    if (rc == 0)
        rc = choose_path(out->store_key_path, sizeof out->store_key_path, out->store_key_file, "store.key",
                         err);
    if (rc == 0)
        rc = choose_path(out->tokens_path, sizeof out->tokens_path, out->tokens_file, "tokens", err);
    if (rc < 0) {
        config_free(*config);
        *config = NULL;
        return rc;
    }
    path_model_name(out->model, out->model_name_default, sizeof out->model_name_default);
    if (!out->model_name[0])
        out->model_name = out->model_name_default;
    return 0;
}
