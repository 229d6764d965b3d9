/* chat_cmd: what the files of `tandem chat` share. */
#ifndef TANDEM_CLI_CHAT_CMD_H
#define TANDEM_CLI_CHAT_CMD_H
#include "cli/cli.h"
#include <stdio.h>

struct chat_settings {
    struct cli_server server;
    const char *conversation, *system, *model, *prefer;
    int64_t max_tokens, seed;
    double temperature;
    bool stats, explain, json;
};

struct chat {
    const struct chat_settings *settings;
    char conversation[80];
    FILE *transcript; /* memory stream of what was said, for /save */
    char *transcript_text;
    size_t transcript_size;
    char *line; /* SSE line so far */
    size_t line_size;
    /* of the reply under way */
    struct cli_response response;
    FILE *reply; /* memory stream */
    char *reply_text;
    size_t reply_size;
    json_t *usage, *timings;
    char finish[32];
    bool not_kept;
    bool stopping; /* the server has been asked to end it */
    uint64_t
        ask_us; /* when the server is asked what it waits for; UINT64_MAX: it said so, did not answer, or the stream has begun */
    char error[TD_ERROR_TEXT_SIZE];
};

/* ---- chat_show.c: what stands beside the reply; all on stderr but the object ---- */
void chat_print_stats(const struct chat *c);
void chat_print_plan(const struct chat *c);
int chat_print_object(const struct chat *c); /* --json: the reply and all that is known of it, on stdout */
/* `lead` and the command that goes on with this conversation, for a shell. */
void chat_print_resume(const struct chat *c, const char *lead);

#endif
