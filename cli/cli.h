/* cli: the tandem command. One file a group of subcommands; each takes argv from its own name on and returns the exit code:
 * 0 done, 1 failed (one line on stderr), 2 wrong usage. Results go to stdout, progress and errors to stderr. */
#ifndef TANDEM_CLI_CLI_H
#define TANDEM_CLI_CLI_H
#include <jansson.h>
#include "shared/base.h"
#include "shared/config.h"
#include "shared/status.h"

#define CLI_OK     0
#define CLI_FAILED 1
#define CLI_USAGE  2

int cli_model(int argc, char **argv);
int cli_bench(int argc, char **argv);
int cli_bench_codec(int argc, char **argv);
int cli_bench_store(int argc, char **argv);
int cli_bench_trace(int argc, char **argv);
int cli_store(int argc, char **argv);
int cli_conv(int argc, char **argv);
int cli_chat(int argc, char **argv);

/* ---- ui ---- */
int cli_fail(const char *what, const struct td_error *err); /* prints one line; returns CLI_FAILED */
int cli_usage(const struct config_spec
                  *spec); /* prints the forms of its arguments and its examples; returns CLI_USAGE */
/* The same behind a line that says what is wrong. verb: NULL: none is given; known: its arguments are wrong. */
int cli_usage_of_verb(const struct config_spec *spec, const char *verb, bool known);
/* A progress_fn for gguf_* and store_*: a bar on a terminal, nothing otherwise. ctx: a static label. */
void cli_progress(void *label, uint64_t done, uint64_t total);
bool cli_is_terminal(int fd);
const char *cli_bytes(uint64_t size, char out[32]); /* "1.5 GiB" */
int cli_print_json(json_t *json);                   /* takes the reference; one line; returns CLI_OK */

/* Run config_load for a subcommand: 0 go on; else *exit_code is set. */
int cli_load(const struct config_spec *spec, int argc, char **argv, void *settings, struct config **config,
             char ***rest, int *rest_count, int *exit_code);

/* ---- http ---- */
struct cli_server { /* where an API is and how to get in */
    const char *url, *ca_path, *key_file;
    const char *bearer; /* instead of key_file's; NULL: that */
    const char
        *no_answer; /* what to do where a connection ends without an answer; NULL: something about --url */
    /* NULL, or called about once a second while an answer is waited for, and after each signal; false: give it up */
    bool (*on_wait)(void *ctx);
    void *wait_ctx;
};
#define CLI_SERVER_OPTIONS(owner, member)                                                                    \
    {.name = "url",                                                                                          \
     .type = CONFIG_STRING,                                                                                  \
     .offset = offsetof(owner, member.url),                                                                  \
     .fallback = "http://127.0.0.1:8081",                                                                    \
     .metavar = "URL",                                                                                       \
     .help = "the agent's or a node's API"},                                                                 \
        {.name = "ca",                                                                                       \
         .type = CONFIG_STRING,                                                                              \
         .offset = offsetof(owner, member.ca_path),                                                          \
         .metavar = "FILE",                                                                                  \
         .help = "trust anchor of an https URL; the system's by default"},                                   \
    {                                                                                                        \
        .name = "key-file", .type = CONFIG_STRING, .offset = offsetof(owner, member.key_file),               \
        .metavar = "FILE", .help = "file with the API key, mode 0600"                                        \
    }

struct cli_response {
    long status;
    char *body; /* free */
    size_t size;
    char conversation[80]; /* X-Conversation-Id, "" without */
};
/* on_data: NULL, or called with body bytes of a 200 response as they come (non-zero stops); then body stays NULL. A failed transfer is a negative code with
 * err; an HTTP error status is 0 with the status set. */
int cli_http(const struct cli_server *server, const char *method, const char *path, const char *json_body,
             int (*on_data)(void *ctx, const char *data, size_t size), void *ctx, struct cli_response *out,
             struct td_error *err);
bool cli_is_loopback(const char *url); /* plain HTTP to this machine */
/* The message of an OpenAI error body or the status, and what to do about it. */
void cli_http_error(const struct cli_server *server, const struct cli_response *r, struct td_error *err);

#endif
