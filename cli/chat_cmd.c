/* tandem chat: a conversation on the terminal. Each turn sends only the new message and the conversation's id; the
 * agent and the cloud keep the rest, so /exit and a later --conversation ID go on where it stopped, without prefilling it again. */
#include "cli/cli.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define LINE_TAIL_MAX (1u << 20) /* one SSE line */

struct chat_settings {
    struct cli_server server;
    const char *conversation, *system, *model;
    int64_t max_tokens, seed;
    double temperature;
    bool stats, explain;
};
#define FIELD(name) offsetof(struct chat_settings, name)
static const struct config_option OPTIONS[] = {
    CLI_SERVER_OPTIONS(struct chat_settings, server),
    {.name = "conversation",
     .type = CONFIG_STRING,
     .offset = FIELD(conversation),
     .metavar = "ID",
     .help = "go on with a stored conversation"},
    {.name = "system",
     .type = CONFIG_STRING,
     .offset = FIELD(system),
     .metavar = "TEXT",
     .help = "system message of a new conversation"},
    {.name = "model",
     .type = CONFIG_STRING,
     .offset = FIELD(model),
     .metavar = "NAME",
     .help = "model name to ask for"},
    {.name = "max-tokens",
     .type = CONFIG_INT,
     .offset = FIELD(max_tokens),
     .fallback = "512",
     .min = 1,
     .max = 1 << 20,
     .metavar = "N",
     .help = "tokens of one reply"},
    {.name = "temperature",
     .type = CONFIG_FLOAT,
     .offset = FIELD(temperature),
     .fallback = "0.7",
     .min = 0,
     .max = 2,
     .metavar = "T",
     .help = "0: always the likeliest token"},
    {.name = "seed",
     .type = CONFIG_INT,
     .offset = FIELD(seed),
     .fallback = "-1",
     .min = -1,
     .max = 1e15,
     .metavar = "N",
     .help = "same seed, same reply; -1: random"},
    {.name = "stats",
     .type = CONFIG_BOOL,
     .offset = FIELD(stats),
     .help = "after each reply: tokens, cached tokens, times"},
    {.name = "explain",
     .type = CONFIG_BOOL,
     .offset = FIELD(explain),
     .help = "after each reply: the plan, what it was made by, and what happened"},
};
static const struct config_spec SPEC = {
    .program = "tandem chat",
    .env_prefix = "TANDEM_CHAT",
    .summary = "Talk to a model: one question, or without MESSAGE line by line.",
    .usage = "[options] [MESSAGE]",
    .examples = "  tandem chat\n"
                "  tandem chat --stats 'Name three rivers.'\n"
                "  tandem chat --conversation conv-1f0c…\n"
                "In the chat: /save FILE, /id, /new, /help, /exit\n",
    .options = OPTIONS,
    .option_count = TD_COUNT(OPTIONS),
};

struct chat {
    const struct chat_settings *settings;
    char conversation[80];
    FILE *transcript; /* memory stream of what was said, for /save */
    char *transcript_text;
    size_t transcript_size;
    char *line; /* SSE line so far */
    size_t line_size;
    json_t *usage, *timings;
    char error[TD_ERROR_TEXT_SIZE];
};

static void take_event(struct chat *c, const char *json, size_t size)
{
    json_t *chunk = json_loadb(json, size, 0, NULL);
    json_t *choice = json_array_get(json_object_get(chunk, "choices"), 0);
    const char *text = json_string_value(json_object_get(json_object_get(choice, "delta"), "content"));
    const char *error = json_string_value(json_object_get(json_object_get(chunk, "error"), "message"));
    json_t *usage = json_object_get(chunk, "usage"), *timings = json_object_get(chunk, "timings");
    if (text) {
        fputs(text, stdout);
        fflush(stdout);
        fputs(text, c->transcript);
    }
    if (error)
        snprintf(c->error, sizeof c->error, "%s", error);
    if (json_is_object(usage)) {
        json_decref(c->usage);
        c->usage = json_incref(usage);
    }
    if (json_is_object(timings)) {
        json_decref(c->timings);
        c->timings = json_incref(timings);
    }
    json_decref(chunk);
}

/* Bytes of the stream as they come: events are the lines that begin with "data: ". */
static int take_stream(void *ctx, const char *data, size_t size)
{
    struct chat *c = ctx;
    for (size_t i = 0; i < size; i++) {
        if (data[i] != '\n') {
            if (c->line_size == LINE_TAIL_MAX)
                return -1;
            c->line[c->line_size++] = data[i];
            continue;
        }
        if (c->line_size > 6 && !memcmp(c->line, "data: {", 7))
            take_event(c, c->line + 6, c->line_size - 6);
        c->line_size = 0;
    }
    return 0;
}

static json_t *make_request(const struct chat *c, const char *message)
{
    const struct chat_settings *s = c->settings;
    json_t *messages = json_array();
    if (s->system[0] && !c->conversation[0])
        json_array_append_new(messages, json_pack("{s:s,s:s}", "role", "system", "content", s->system));
    json_array_append_new(messages, json_pack("{s:s,s:s}", "role", "user", "content", message));
    json_t *request = json_pack("{s:o,s:b,s:{s:b},s:I,s:f,s:b}", "messages", messages, "stream", 1,
                                "stream_options", "include_usage", 1, "max_tokens", (json_int_t)s->max_tokens,
                                "temperature", s->temperature, "timings", 1);
    if (s->seed >= 0)
        json_object_set_new(request, "seed", json_integer(s->seed));
    if (s->model[0])
        json_object_set_new(request, "model", json_string(s->model));
    if (c->conversation[0])
        json_object_set_new(request, "conversation", json_string(c->conversation));
    return request;
}

static double timing(const struct chat *c, const char *name)
{
    return json_number_value(json_object_get(c->timings, name));
}

static void print_stats(const struct chat *c)
{
    long long prompt = json_integer_value(json_object_get(c->usage, "prompt_tokens"));
    long long reply = json_integer_value(json_object_get(c->usage, "completion_tokens"));
    long long cached = json_integer_value(
        json_object_get(json_object_get(c->usage, "prompt_tokens_details"), "cached_tokens"));
    fprintf(
        stderr,
        "[%lld prompt tokens, %lld cached; first token %.0f ms; %lld tokens at %.1f/s; uplink %.1f KiB]\n",
        prompt, cached, timing(c, "first_token_ms"), reply, timing(c, "tokens_per_s"),
        timing(c, "uplink_bytes") / 1024);
}

static double member(const json_t *o, const char *name)
{
    return json_number_value(json_object_get(o, name));
}

/* What the device decided, by which estimates, and what came of it. A node that is asked directly plans nothing. */
static void print_plan(const struct chat *c)
{
    const json_t *offline = json_object_get(c->timings, "offline");
    if (offline)
        fprintf(stderr,
                "[the cloud was away: %.0f tokens from token %.0f on made here; the first was expected in "
                "%.0f ms]\n",
                member(offline, "tokens"), member(offline, "from_token"), member(offline, "estimate_ms"));
    const json_t *plan = json_object_get(c->timings, "plan"), *e = json_object_get(plan, "estimates");
    if (!plan) {
        fprintf(stderr, "[no plan: no device had a part in this prompt]\n");
        return;
    }
    fprintf(stderr,
            "[plan: %.0f layers here of %.0f prompt tokens from token %.0f on; KV of %.0f of them sent%s]\n",
            member(plan, "layers"), member(plan, "tokens"), member(plan, "first_token"),
            member(plan, "kv_tokens"), e ? "" : "; the number of layers was given");
    if (member(plan, "restored_tokens") > 0)
        fprintf(stderr, "[restored: KV of %.0f tokens that the cloud had lost, as this device held it]\n",
                member(plan, "restored_tokens"));
    if (json_is_true(json_object_get(plan, "local")))
        fprintf(stderr, "[first tokens here: all layers of the prompt on this device too, until the cloud's "
                        "are sooner]\n");
    if (e)
        fprintf(stderr,
                "[estimates: first token %.0f ms, 16th %.0f ms (the cloud alone: %.0f, %.0f; this device "
                "alone: %.0f, "
                "%.0f); a token and layer %.1f "
                "us here, %.1f us there; uplink %.1f Mbit/s, %.1f ms; queue %.0f ms]\n",
                member(e, "first_token_ms"), member(e, "t16_ms"), member(e, "cloud_alone_first_token_ms"),
                member(e, "cloud_alone_t16_ms"), member(e, "edge_alone_first_token_ms"),
                member(e, "edge_alone_t16_ms"), member(e, "edge_layer_us"), member(e, "cloud_layer_us"),
                member(e, "uplink_mbit"), member(e, "delay_ms"), member(e, "queue_ms"));
    fprintf(stderr,
            "[what happened: first token %.0f ms, 16th %.0f ms; computing %.0f ms here, %.0f ms there; %.1f "
            "KiB sent; "
            "%.0f tokens recomputed there; %.0f plans, %.0f tokens left to the cloud under way; %.0f tokens "
            "made here]\n",
            timing(c, "first_token_ms"), timing(c, "t16_ms"), timing(c, "edge_prefill_ms"),
            timing(c, "cloud_prefill_ms"), timing(c, "uplink_bytes") / 1024, timing(c, "recomputed_tokens"),
            member(plan, "plans"), member(plan, "left_to_cloud_tokens"), timing(c, "local_tokens"));
}

/* One turn: 0, or -1 with the error shown. */
static int say(struct chat *c, const char *message)
{
    struct td_error err = {0};
    struct cli_response r;
    json_t *request = make_request(c, message);
    char *body = request ? json_dumps(request, JSON_COMPACT) : NULL;
    json_decref(request);
    if (!body) {
        fprintf(stderr, "tandem chat: the message is not valid UTF-8\n");
        return -1;
    }
    fprintf(c->transcript, "> %s\n", message);
    c->error[0] = 0, c->line_size = 0;
    int rc = cli_http(&c->settings->server, "POST", "/v1/chat/completions", body, take_stream, c, &r, &err);
    free(body);
    if (rc == 0 && r.status != 200)
        cli_http_error(&r, &err), rc = err.code;
    if (rc == 0 && c->error[0])
        rc = td_fail(&err, -TD_ERR_IO, "%s", c->error);
    if (rc == 0 && r.conversation[0])
        memcpy(c->conversation, r.conversation, sizeof c->conversation);
    free(r.body);
    fputs("\n", stdout);
    fputs("\n", c->transcript);
    if (rc < 0)
        cli_fail("chat", &err);
    if (rc == 0 && c->settings->stats)
        print_stats(c);
    if (rc == 0 && c->settings->explain)
        print_plan(c);
    return rc < 0 ? -1 : 0;
}

static void save(struct chat *c, const char *path)
{
    fflush(c->transcript);
    FILE *f = *path ? fopen(path, "w") : NULL;
    if (!*path) {
        fprintf(stderr, "/save wants a file name\n");
        return;
    }
    if (!f || fwrite(c->transcript_text, 1, c->transcript_size, f) != c->transcript_size) {
        fprintf(stderr, "cannot write %s: %s\n", path, strerror(errno));
    } else {
        fprintf(stderr, "saved to %s; resume with: tandem chat --url %s --conversation %s\n", path,
                c->settings->server.url, c->conversation[0] ? c->conversation : "ID");
    }
    if (f)
        fclose(f);
}

/* A line that begins with a slash. Returns false for /exit. */
static bool run_command(struct chat *c, const char *line)
{
    if (!strcmp(line, "/exit") || !strcmp(line, "/quit"))
        return false;
    if (!strncmp(line, "/save", 5))
        save(c, line + 5 + strspn(line + 5, " "));
    else if (!strcmp(line, "/id"))
        fprintf(stderr, "%s\n", c->conversation[0] ? c->conversation : "no conversation yet");
    else if (!strcmp(line, "/new"))
        c->conversation[0] = 0;
    else
        fprintf(stderr, "/save FILE writes what was said; /id shows the conversation's id; /new starts "
                        "another; /exit leaves\n");
    return true;
}

static int talk(struct chat *c)
{
    bool terminal = cli_is_terminal(STDIN_FILENO);
    char *line = NULL;
    size_t capacity = 0;
    int code = CLI_OK;
    for (;;) {
        if (terminal)
            fputs("> ", stderr);
        ssize_t size = getline(&line, &capacity, stdin);
        if (size < 0)
            break;
        while (size > 0 && (line[size - 1] == '\n' || line[size - 1] == '\r'))
            line[--size] = 0;
        if (size == 0)
            continue;
        if (line[0] == '/') {
            if (!run_command(c, line))
                break;
            continue;
        }
        if (say(c, line) < 0)
            code = CLI_FAILED;
    }
    free(line);
    if (c->conversation[0])
        fprintf(stderr, "%sgo on later with: tandem chat --url %s --conversation %s\n", terminal ? "\n" : "",
                c->settings->server.url, c->conversation);
    return code;
}

static int run(const struct chat_settings *s, const char *message)
{
    struct chat c = {.settings = s, .line = malloc(LINE_TAIL_MAX)};
    c.transcript = open_memstream(&c.transcript_text, &c.transcript_size);
    int code = CLI_FAILED;
    if (strlen(s->conversation) >= sizeof c.conversation)
        fprintf(stderr, "tandem chat: that conversation id is too long\n");
    else if (!c.line || !c.transcript)
        fprintf(stderr, "tandem chat: out of memory\n");
    else {
        memcpy(c.conversation, s->conversation, strlen(s->conversation) + 1);
        code = !message ? talk(&c) : say(&c, message) < 0 ? CLI_FAILED : CLI_OK;
        if (message && c.conversation[0] && s->stats)
            fprintf(stderr, "go on with: tandem chat --url %s --conversation %s\n", s->server.url,
                    c.conversation);
    }
    if (c.transcript)
        fclose(c.transcript);
    free(c.transcript_text);
    free(c.line);
    json_decref(c.usage);
    json_decref(c.timings);
    return code;
}

int cli_chat(int argc, char **argv)
{
    struct chat_settings s = {0};
    struct config *config = NULL;
    char **rest = NULL;
    int rest_count = 0, code = CLI_USAGE;
    if (cli_load(&SPEC, argc, argv, &s, &config, &rest, &rest_count, &code) != 0)
        return code;
    if (rest_count > 1)
        fprintf(stderr, "tandem chat: put the message in quotes\n");
    else
        code = run(&s, rest_count == 1 ? rest[0] : NULL);
    config_free(config);
    return code;
}
