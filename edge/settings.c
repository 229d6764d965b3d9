/* settings: see settings.h. No option may be called `port`: container platforms set TANDEM_EDGE_PORT for a service called tandem-edge. */
#include "edge/settings.h"
#include "shared/workers.h"
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>

#define MIB                 1048576.0
#define OPTION(field, kind) .type = kind, .offset = offsetof(struct edge_settings, field)

/* clang-format off */
static const struct config_option options[] = {
    {.name = "model", OPTION(model, CONFIG_STRING), .metavar = "FILE", .help = "the model, a GGUF file: whole, or a slice made by `tandem model slice`"},
    {.name = "model-name", OPTION(model_name, CONFIG_STRING), .metavar = "NAME", .help = "what the API calls it; without it, the file's name"},
    {.name = "chat-template", OPTION(chat_template, CONFIG_STRING), .metavar = "NAME", .help = "instead of the one in the file: chatml, smollm, qwen, llama2, llama3, mistral, ..."},
    {.name = "cloud", OPTION(cloud, CONFIG_STRING), .fallback = "localhost:8443", .metavar = "HOST:PORT", .help = "the cloud node; its certificate must be for HOST"},
    {.name = "ca", OPTION(ca, CONFIG_STRING), .metavar = "FILE", .help = "authority that signed the cloud's certificate (PEM); without it, the system's"},
    {.name = "client-cert", OPTION(client_cert, CONFIG_STRING), .metavar = "FILE", .help = "certificate of this device (PEM), where the cloud wants one"},
    {.name = "client-key", OPTION(client_key, CONFIG_STRING), .metavar = "FILE", .help = "its private key (PEM)"},
    {.name = "token-file", OPTION(token_file, CONFIG_STRING), .metavar = "FILE", .help = "credential for the cloud, in a file that only its owner can read (0600); or TANDEM_EDGE_TOKEN"},
    {.name = "token", OPTION(token, CONFIG_STRING), .metavar = "TOKEN", .help = "credential for the cloud", .secret = true},
    {.name = "plain", OPTION(plain, CONFIG_BOOL), .help = "no TLS to the cloud; for tests on one machine"},
    {.name = "edge-layers", OPTION(edge_layers, CONFIG_STRING), .fallback = "auto", .metavar = "K", .help = "layers that this device computes of each prompt, 0 to those that it holds; auto: as many as pay, by what link, device and cloud are measured to do"},
    {.name = "local", OPTION(local, CONFIG_STRING), .fallback = "auto", .metavar = "WHEN", .help = "with auto and the whole model: make first tokens on this device while the cloud begins: auto (where that is sooner), always, off"},
    {.name = "prefer", OPTION(prefer, CONFIG_STRING), .fallback = "latency", .metavar = "WISH", .help = "of requests that name none: latency (the soonest reply), cloud-cost (the least computing in the cloud, for a first token up to a quarter later), both with auto; or private (the cloud is not sent the prompt's token ids)"},
    {.name = "private-min-layers", OPTION(private_min_layers, CONFIG_INT), .fallback = "8", .min = 1, .max = KV_LAYERS_MAX, .metavar = "K", .help = "layers that this device computes of a private prompt, at least"},
    {.name = "cloud-price", OPTION(cloud_price, CONFIG_FLOAT), .fallback = "0", .max = EDGE_PRICE_MAX, .metavar = "S", .help = "with auto: seconds of waiting that a second of computing in the cloud is worth"},
    {.name = "codec", OPTION(codec, CONFIG_STRING), .fallback = "auto", .metavar = "CODEC", .help = "of KV on the wire: auto (the smallest that the model's quality record lets pass; l1 without one), raw, l0 (lossless), l1 (8 bits); for requests that accept any fidelity also l2 (4 bits), l2-k5 (K: 5 bits), l2-5bit: the others get l1 then"},
    {.name = "codec-unchecked", OPTION(codec_unchecked, CONFIG_BOOL), .help = "use --codec also where the model has no quality record (tandem bench codec) that shows no visible loss"},
    {.name = "hidden", OPTION(hidden, CONFIG_STRING), .fallback = "f16", .metavar = "TYPE", .help = "of hidden states on the wire: f32, f16, int8"},
    {.name = "fidelity", OPTION(fidelity, CONFIG_STRING), .fallback = "visible-lossless", .metavar = "LEVEL", .help = "for requests that name none: exact, visible-lossless, any"},
    {.name = "chunk", OPTION(chunk, CONFIG_INT), .fallback = "64", .min = KV_BLOCK_TOKENS, .max = EDGE_CHUNK_MAX, .metavar = "TOKENS", .help = "prompt tokens computed and sent at a time, a multiple of 64"},
    {.name = "threads", OPTION(threads, CONFIG_INT), .max = WORKERS_MAX, .metavar = "N", .help = "compute threads; 0: all cores"},
    {.name = "kv-memory", OPTION(kv_memory, CONFIG_SIZE), .min = 1 * MIB, .fallback = "256M", .metavar = "SIZE", .help = "memory for this device's own KV"},
    {.name = "kv-disk", OPTION(kv_disk, CONFIG_SIZE), .min = 16 * MIB, .fallback = "1G", .metavar = "SIZE", .help = "disk for it, encrypted, in the data folder, so that later turns compute their new tokens only, also after a restart; 0: none"},
    {.name = "kv-whole", OPTION(kv_whole, CONFIG_BOOL), .help = "keep it of all layers, in idle time: those that this device holds it computes; with a slice of the model the cloud gives it the others after each reply, sealed, where giving them back would be sooner than computing; what a restart left undone waits for the conversation's next turn. What the cloud has lost is then sent instead of computed again, where that is sooner"},
    {.name = "listen", OPTION(listen, CONFIG_STRING), .fallback = "127.0.0.1", .metavar = "ADDRESS", .help = "where to serve the API"},
    {.name = "listen-port", OPTION(listen_port, CONFIG_INT), .fallback = "8081", .max = 65535, .metavar = "PORT", .help = "0: any free one"},
    {.name = "unix-socket", OPTION(unix_socket, CONFIG_STRING), .metavar = "PATH", .help = "serve the API there too"},
    {.name = "api-key-file", OPTION(api_key_file, CONFIG_STRING), .metavar = "FILE", .help = "bearer key that clients of the API must show, in a 0600 file; without it, none"},
    {.name = "allow-origin", OPTION(allow_origin, CONFIG_STRING), .metavar = "ORIGIN,...", .help = "web pages that may call the API; without it, none"},
    {.name = "filter", OPTION(filter, CONFIG_BOOL), .fallback = "true", .help = "replace e-mail addresses, phone and card numbers, IBANs and IP addresses by placeholders before anything is sent; words too"},
    {.name = "words-file", OPTION(words_file, CONFIG_STRING), .metavar = "FILE", .help = "words that are blocked or masked: lines `block WORDS` and `mask WORDS`"},
    {.name = "data", OPTION(data, CONFIG_STRING), .metavar = "DIR", .help = "conversations and keys; without it, /var/lib/tandem/edge for root, else ~/.local/share/tandem/edge"},
    {.name = "cloud-timeout", OPTION(cloud_timeout, CONFIG_INT), .fallback = "30", .min = 1, .max = EDGE_TIMEOUT_MAX, .metavar = "S", .help = "how long a request waits for a cloud that cannot be reached"},
    {.name = "offline", OPTION(offline, CONFIG_STRING), .fallback = "wait", .metavar = "WHAT", .help = "when the cloud is away: wait (as long as --cloud-timeout says), or continue: with the whole model and --edge-layers auto this device makes the reply, or the rest of it, and hands back when the cloud is there again"},
    {.name = "log-level", OPTION(log_level, CONFIG_STRING), .fallback = "info", .metavar = "LEVEL", .help = "info, warn, error"},
};
/* clang-format on */

static const struct config_spec spec = {
    .program = "tandem-edge",
    .env_prefix = "TANDEM_EDGE",
    .summary = "Tandem's agent on a device: an OpenAI API that filters, computes the bottom layers, and lets "
               "the cloud do the rest.",
    .examples = "  tandem-edge --model model.gguf --cloud cloud.example:8443 --ca ca.crt --token-file token\n"
                "  tandem-edge --model slice.gguf --edge-layers 4 --codec l0 --hidden f32 --fidelity exact\n"
                "  curl http://127.0.0.1:8081/v1/chat/completions -H 'Content-Type: application/json' \\\n"
                "    -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'\n"
                "\nSIGTERM lets running replies finish (10 s), then stops.\n",
    .options = options,
    .option_count = TD_COUNT(options),
};

/* ---- names ---- */

struct named {
    const char *name;
    int value;
};

static int find_name(const struct named *list, size_t count, const char *text, int *out)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(list[i].name, text) == 0) {
            *out = list[i].value;
            return 0;
        }
    return -TD_ERR_ARG;
}

int edge_codec_parse(const char *text, const struct kv_level **out)
{
    *out = kv_level_find(text);
    return *out || !strcmp(text, "auto") ? 0 : -TD_ERR_ARG;
}

int edge_hidden_parse(const char *text, uint8_t *out)
{
    static const struct named names[] = {{"f32", HIDDEN_F32}, {"f16", HIDDEN_F16}, {"int8", HIDDEN_INT8}};
    int value, rc = find_name(names, TD_COUNT(names), text, &value);
    if (rc == 0)
        *out = (uint8_t)value;
    return rc;
}

int edge_accept_parse(const char *text, enum kv_accept *out)
{
    static const struct named names[] = {
        {"exact", KV_ACCEPT_EXACT}, {"visible-lossless", KV_ACCEPT_VISIBLE_LOSSLESS}, {"any", KV_ACCEPT_ANY}};
    int value, rc = find_name(names, TD_COUNT(names), text, &value);
    if (rc == 0)
        *out = (enum kv_accept)value;
    return rc;
}

/* "auto" or a number. */
static int parse_layers(const char *text, uint32_t *out)
{
    char *end;
    unsigned long k = strtoul(text, &end, 10);
    *out = PLANNER_AUTO;
    if (strcmp(text, "auto") == 0)
        return 0;
    if (text[0] < '0' || text[0] > '9' || *end || k > KV_LAYERS_MAX)
        return -TD_ERR_ARG;
    *out = (uint32_t)k;
    return 0;
}

int edge_prefer_parse(const char *text, enum planner_prefer *out, bool *is_private)
{
    static const struct named names[] = {{"latency", PREFER_LATENCY}, {"cloud-cost", PREFER_CLOUD_COST}};
    int value = PREFER_LATENCY;
    *is_private = strcmp(text, "private") == 0;
    int rc = *is_private ? 0 : find_name(names, TD_COUNT(names), text, &value);
    if (rc == 0)
        *out = (enum planner_prefer)value;
    return rc;
}

int edge_local_parse(const char *text, enum planner_local *out)
{
    static const struct named names[] = {{"off", LOCAL_OFF}, {"auto", LOCAL_AUTO}, {"always", LOCAL_ALWAYS}};
    int value, rc = find_name(names, TD_COUNT(names), text, &value);
    if (rc == 0)
        *out = (enum planner_local)value;
    return rc;
}

int edge_offline_parse(const char *text, enum agent_offline *out)
{
    static const struct named names[] = {{"wait", OFFLINE_WAIT}, {"continue", OFFLINE_CONTINUE}};
    int value, rc = find_name(names, TD_COUNT(names), text, &value);
    if (rc == 0)
        *out = (enum agent_offline)value;
    return rc;
}

static int check_names(struct edge_settings *s, struct td_error *err)
{
    if (parse_layers(s->edge_layers, &s->layers) < 0)
        return td_fail(err, -TD_ERR_ARG, "--edge-layers %s: want auto, or a number of layers up to %d",
                       s->edge_layers, KV_LAYERS_MAX);
    if (edge_local_parse(s->local, &s->local_id) < 0)
        return td_fail(err, -TD_ERR_ARG, "--local %s: want auto, always or off", s->local);
    if (edge_offline_parse(s->offline, &s->offline_id) < 0)
        return td_fail(err, -TD_ERR_ARG, "--offline %s: want wait or continue", s->offline);
    if (edge_prefer_parse(s->prefer, &s->prefer_id, &s->prefer_private) < 0)
        return td_fail(err, -TD_ERR_ARG, "--prefer %s: want latency, cloud-cost or private", s->prefer);
    if (edge_codec_parse(s->codec, &s->level_kv) < 0)
        return td_fail(err, -TD_ERR_ARG, "--codec %s: want auto, %s", s->codec, KV_LEVEL_NAMES);
    if (edge_hidden_parse(s->hidden, &s->hidden_id) < 0)
        return td_fail(err, -TD_ERR_ARG, "--hidden %s: want f32, f16 or int8", s->hidden);
    if (edge_accept_parse(s->fidelity, &s->accept) < 0)
        return td_fail(err, -TD_ERR_ARG, "--fidelity %s: want exact, visible-lossless or any", s->fidelity);
    if (log_level_parse(s->log_level, &s->level) < 0)
        return td_fail(err, -TD_ERR_ARG, "--log-level %s: want info, warn or error", s->log_level);
    return 0;
}

/* ---- addresses, paths ---- */

int edge_parse_address(const char *text, char *host, size_t size, uint16_t *port, struct td_error *err)
{
    const char *begin = text, *end, *colon;
    if (text[0] == '[') {
        begin = text + 1;
        end = strchr(begin, ']');
        colon = end && end[1] == ':' ? end + 1 : NULL;
        if (!end || (end[1] != '\0' && !colon))
            return td_fail(err, -TD_ERR_ARG, "'%s' is no address: want HOST:PORT or [ADDRESS]:PORT", text);
    } else {
        colon = strrchr(text, ':');
        end = colon ? colon : text + strlen(text);
    }
    char *rest = NULL;
    unsigned long number = colon ? strtoul(colon + 1, &rest, 10) : EDGE_CLOUD_PORT;
    bool digits = !colon || (colon[1] >= '0' && colon[1] <= '9' && *rest == '\0');
    bool is_url = begin == text &&
                  (memchr(begin, '/', (size_t)(end - begin)) || memchr(begin, ':', (size_t)(end - begin)));
    if (is_url || end == begin || (size_t)(end - begin) >= size || !digits || number == 0 || number > 65535)
        return td_fail(err, -TD_ERR_ARG, "'%s' is no address: want HOST:PORT or [ADDRESS]:PORT", text);
    memcpy(host, begin, (size_t)(end - begin));
    host[end - begin] = '\0';
    *port = (uint16_t)number;
    return 0;
}

bool edge_is_loopback(const char *host)
{
    struct in_addr v4;
    struct in6_addr v6;
    if (inet_pton(AF_INET, host, &v4) == 1)
        return (ntohl(v4.s_addr) >> 24) == 127;
    if (inet_pton(AF_INET6, host, &v6) == 1)
        return IN6_IS_ADDR_LOOPBACK(&v6);
    return strcmp(host, "localhost") == 0;
}

/* What is only safe on one machine stays there. */
static int check_reach(const struct edge_settings *s, struct td_error *err)
{
    if (s->plain && !edge_is_loopback(s->cloud_host))
        return td_fail(
            err, -TD_ERR_ARG,
            "--plain would send the credential to %s in the clear; it is for a cloud on this machine",
            s->cloud_host);
    if (!edge_is_loopback(s->listen) && !s->api_key[0])
        return td_fail(err, -TD_ERR_ARG,
                       "--listen %s: others than this machine could use the API; give --api-key-file too",
                       s->listen);
    return 0;
}

static int check_paths(struct edge_settings *s, struct td_error *err)
{
    if (!s->model[0])
        return td_fail(err, -TD_ERR_ARG, "no model: give --model FILE (deploy/fetch-model.sh gets one)");
    if (!s->client_cert[0] != !s->client_key[0])
        return td_fail(err, -TD_ERR_ARG,
                       "--client-cert and --client-key belong together: give both or neither");
    if (!s->data[0])
        return path_default(s->data_dir, sizeof s->data_dir, EDGE_DATA_NAME, "--data", err);
    if ((size_t)snprintf(s->data_dir, sizeof s->data_dir, "%s", s->data) >= sizeof s->data_dir)
        return td_fail(err, -TD_ERR_LIMIT, "--data: the path is too long");
    return 0;
}

/* ---- secrets ---- */

static int read_secrets(struct edge_settings *s, struct td_error *err)
{
    int rc = 0;
    if (s->token[0] && strlen(s->token) > LIMIT_TOKEN_SIZE)
        return td_fail(err, -TD_ERR_LIMIT, "the credential for the cloud is longer than %u characters",
                       LIMIT_TOKEN_SIZE);
    if (s->token_file[0])
        rc = config_read_secret(s->token_file, s->token_text, sizeof s->token_text, err);
    else
        snprintf(s->token_text, sizeof s->token_text, "%s", s->token);
    if (rc == 0 && !s->token_text[0])
        return td_fail(err, -TD_ERR_ARG,
                       "no credential for the cloud: give --token-file FILE or set TANDEM_EDGE_TOKEN "
                       "(`tandem-cloud token new` makes one)");
    if (rc == 0 && s->api_key_file[0])
        rc = config_read_secret(s->api_key_file, s->api_key, sizeof s->api_key, err);
    if (rc == 0 && s->api_key_file[0] && !s->api_key[0])
        return td_fail(err, -TD_ERR_ARG, "--api-key-file %s is empty", s->api_key_file);
    return rc;
}

static int split_origins(struct edge_settings *s, struct td_error *err)
{
    size_t count = 0;
    if ((size_t)snprintf(s->origin_text, sizeof s->origin_text, "%s", s->allow_origin) >=
        sizeof s->origin_text)
        return td_fail(err, -TD_ERR_LIMIT, "--allow-origin is too long");
    char *save = NULL;
    for (char *p = strtok_r(s->origin_text, ", ", &save); p; p = strtok_r(NULL, ", ", &save)) {
        if (count == EDGE_ORIGINS_MAX)
            return td_fail(err, -TD_ERR_LIMIT, "--allow-origin: at most %d origins", EDGE_ORIGINS_MAX);
        s->origins[count++] = p;
    }
    s->origins[count] = NULL;
    return 0;
}

/* ---- all of it ---- */

int edge_settings_load(int argc, char **argv, struct edge_settings *out, struct config **config,
                       struct td_error *err)
{
    memset(out, 0, sizeof *out);
    *config = NULL;
    int rc = config_load(&spec, argc, argv, out, config, NULL, NULL, err);
    if (rc != 0)
        return rc;
    if ((rc = check_names(out, err)) < 0 || (rc = check_paths(out, err)) < 0 ||
        (rc = split_origins(out, err)) < 0 ||
        (rc = edge_parse_address(out->cloud, out->cloud_host, sizeof out->cloud_host, &out->cloud_port,
                                 err)) < 0 ||
        (rc = read_secrets(out, err)) < 0 || (rc = check_reach(out, err)) < 0)
        goto fail;
    if (out->chunk % KV_BLOCK_TOKENS != 0) {
        rc = td_fail(err, -TD_ERR_ARG, "--chunk %lld: want a multiple of %d", (long long)out->chunk,
                     KV_BLOCK_TOKENS);
        goto fail;
    }
    return 0;
fail:
    config_free(*config);
    *config = NULL;
    return rc;
}

static const char *or_null(const char *text)
{
    return text[0] ? text : NULL;
}

void edge_settings_agent(const struct edge_settings *s, struct agent_config *out)
{
    *out = (struct agent_config){
        .model_path = s->model,
        .model_name = or_null(s->model_name),
        .chat_template = or_null(s->chat_template),
        .cloud_host = s->cloud_host,
        .cloud_port = s->cloud_port,
        .ca_path = or_null(s->ca),
        .cert_path = or_null(s->client_cert),
        .key_path = or_null(s->client_key),
        .tls = !s->plain,
        .token = s->token_text,
        .edge_layers = s->layers,
        .local = s->local_id,
        .offline = s->offline_id,
        .prefer = s->prefer_id,
        .prefer_private = s->prefer_private,
        .private_min_layers = (uint32_t)s->private_min_layers,
        .cloud_price = s->cloud_price,
        .codec = s->level_kv,
        .codec_unchecked = s->codec_unchecked,
        .hidden_dtype = s->hidden_id,
        .accept = s->accept,
        .chunk_tokens = (uint32_t)s->chunk,
        .threads = (unsigned)s->threads,
        .kv_memory = s->kv_memory,
        .kv_disk = s->kv_disk,
        .kv_whole = s->kv_whole,
        .words_path = s->filter ? or_null(s->words_file) : NULL,
        .filter_pii = s->filter,
        .data_dir = s->data_dir,
        .cloud_timeout_ms = (uint32_t)s->cloud_timeout * 1000,
    };
}
