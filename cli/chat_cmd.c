/* tandem chat: a conversation on the terminal. Each turn sends only the new message and the conversation's id; the
 * agent and the cloud keep the rest, so /exit and a later --conversation ID go on where it stopped, without prefilling it again.
 *
 * Ctrl-C while a reply comes asks the server to end it there (POST .../stop, on a second connection): the stream then ends as at a stop string, and what
 * was said is the turn. Before the first word, or pressed again, it drops the connection instead, and nothing of the turn is kept. At the prompt it ends
 * the program, as it does after a reply that was not asked for at a prompt; then the exit code is CLI_INTERRUPTED. */
#include "cli/chat_cmd.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#define CLI_INTERRUPTED 130
#define MESSAGE_MAX     (8u << 20) /* of standard input: what a server takes */
#define LINE_TAIL_MAX   (1u << 20) /* one SSE line */
#define SILENCE_US      700000 /* of a server from which nothing has come, until it is asked why, and again */
#define ANSWER_US       1000000 /* it has to say so */

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
    {.name = "prefer",
     .type = CONFIG_STRING,
     .offset = FIELD(prefer),
     .metavar = "WISH",
     .help = "latency, cloud-cost, or private (an agent sends no token ids of the prompt); without it, what "
             "the agent was "
             "started with"},
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
    {.name = "json",
     .type = CONFIG_BOOL,
     .offset = FIELD(json),
     .help = "one JSON object a reply, when it is whole: the text, the conversation's id, usage, timings"},
};
static const struct config_spec SPEC = {
    .program = "tandem chat",
    .env_prefix = "TANDEM_CHAT",
    .summary = "Talk to a model: one question (-: all of standard input), or without MESSAGE line by line.",
    .usage = "[options] [MESSAGE]",
    .examples = "  tandem chat\n"
                "  tandem chat --stats 'Name three rivers.'\n"
                "  tandem chat --prefer private 'What helps against a cold?'\n"
                "  tandem chat --conversation conv-1f0c…\n"
                "  tandem chat - <letter.txt\n"
                "\nIn the chat: /save FILE, /id, /new, /help, /exit; Ctrl-C ends the reply\n",
    .options = OPTIONS,
    .option_count = TD_COUNT(OPTIONS),
};

static volatile sig_atomic_t interrupts; /* since the last prompt, or the last reply's beginning */

static void on_interrupt(int signal_number)
{
    (void)signal_number;
    interrupts++;
}

/* No SA_RESTART: reading a line ends, too. */
static void catch_interrupts(void)
{
    struct sigaction action = {.sa_handler = on_interrupt};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
}

/* ---- what comes --------------------------------------------------------------------------------------------- */

static void keep(json_t **where, json_t *value)
{
    if (!json_is_object(value))
        return;
    json_decref(*where);
    *where = json_incref(value);
}

static void take_event(struct chat *c, const char *json, size_t size)
{
    json_t *chunk = json_loadb(json, size, 0, NULL);
    json_t *choice = json_array_get(json_object_get(chunk, "choices"), 0);
    const char *text = json_string_value(json_object_get(json_object_get(choice, "delta"), "content"));
    const char *finish = json_string_value(json_object_get(choice, "finish_reason"));
    const char *error = json_string_value(json_object_get(json_object_get(chunk, "error"), "message"));
    if (text && !c->settings->json) {
        fputs(text, stdout);
        fflush(stdout);
    }
    if (text)
        fputs(text, c->reply);
    if (finish)
        snprintf(c->finish, sizeof c->finish, "%s", finish);
    if (error)
        snprintf(c->error, sizeof c->error, "%s", error);
    c->not_kept |= json_is_false(json_object_get(chunk, "conversation_kept"));
    keep(&c->usage, json_object_get(chunk, "usage"));
    keep(&c->timings, json_object_get(chunk, "timings"));
    json_decref(chunk);
}

/* Bytes of the stream as they come: events are the lines that begin with "data: ". */
static int take_stream(void *ctx, const char *data, size_t size)
{
    struct chat *c = ctx;
    c->ask_us = UINT64_MAX;
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
    int rc = 0; /* of what is not UTF-8 */
    if (s->system[0] && !c->conversation[0])
        rc |= json_array_append_new(messages, json_pack("{s:s,s:s}", "role", "system", "content", s->system));
    rc |= json_array_append_new(messages, json_pack("{s:s,s:s}", "role", "user", "content", message));
    json_t *request = json_pack("{s:o,s:b,s:{s:b},s:I,s:f,s:b}", "messages", messages, "stream", 1,
                                "stream_options", "include_usage", 1, "max_tokens", (json_int_t)s->max_tokens,
                                "temperature", s->temperature, "timings", 1);
    if (s->seed >= 0)
        json_object_set_new(request, "seed", json_integer(s->seed));
    if (s->model[0])
        rc |= json_object_set_new(request, "model", json_string(s->model));
    if (c->conversation[0])
        rc |= json_object_set_new(request, "conversation", json_string(c->conversation));
    if (s->prefer[0])
        rc |= json_object_set_new(request, "prefer", json_string(s->prefer));
    if (rc < 0) {
        json_decref(request);
        return NULL;
    }
    return request;
}

/* ---- one turn ----------------------------------------------------------------------------------------------- */

static bool was_pressed_once(void *ctx)
{
    (void)ctx;
    return interrupts <= 1;
}

/* Ask the server to end the reply here. False: it cannot be asked. */
static bool ask_to_stop(struct chat *c)
{
    struct cli_server server = c->settings->server;
    server.on_wait = was_pressed_once;
    struct cli_response r;
    struct td_error err = {0};
    char path[160];
    const char *id = c->response.conversation[0] ? c->response.conversation : c->conversation;
    if (!id[0])
        return false;
    snprintf(path, sizeof path, "/v1/conversations/%s/stop", id);
    bool asked = cli_http(&server, "POST", path, "{}", NULL, NULL, &r, &err) == 0 && r.status == 200;
    free(r.body);
    return asked;
}

static bool may_answer(void *until_us)
{
    return interrupts == 0 && clock_mono_us() < *(uint64_t *)until_us;
}

/* Nothing has come: an agent keeps a request while its cloud is away, and says why it does. */
static void ask_why(struct chat *c)
{
    uint64_t now_us = clock_mono_us(), until_us = now_us + ANSWER_US;
    if (now_us < c->ask_us)
        return;
    struct cli_server server = c->settings->server;
    server.on_wait = may_answer, server.wait_ctx = &until_us;
    struct cli_response r;
    struct td_error err = {0};
    bool answered = cli_http(&server, "GET", "/health", NULL, NULL, NULL, &r, &err) == 0;
    c->ask_us = answered && r.status != 503 ? clock_mono_us() + SILENCE_US : UINT64_MAX;
    if (answered && r.status == 503) {
        cli_http_error(&server, &r, &err);
        fprintf(stderr, "%swaiting: %s\n", cli_is_terminal(STDERR_FILENO) ? "\r\033[K" : "", err.text);
    }
    free(r.body);
}

/* While the reply is waited for. False: give it up. */
static bool on_wait(void *ctx)
{
    struct chat *c = ctx;
    if (interrupts == 0)
        ask_why(c);
    if (interrupts == 0 || (c->stopping && interrupts == 1))
        return true;
    fflush(c->reply);
    bool again = c->stopping;
    c->stopping = true;
    return !again && c->reply_size > 0 && ask_to_stop(c);
}

static void begin_turn(struct chat *c, const char *message)
{
    fprintf(c->transcript, "> %s\n", message);
    rewind(c->reply);
    fflush(c->reply);
    json_decref(c->usage);
    json_decref(c->timings);
    c->usage = c->timings = NULL;
    c->error[0] = c->finish[0] = '\0';
    c->line_size = 0, c->not_kept = c->stopping = false;
    c->ask_us = clock_mono_us() + SILENCE_US;
    interrupts = 0;
}

/* What is said of a reply that came. */
static void end_turn(struct chat *c)
{
    if (c->settings->stats)
        chat_print_stats(c);
    if (c->settings->explain)
        chat_print_plan(c);
    if (c->not_kept)
        fprintf(stderr, "[this turn could not be stored and is not part of the conversation; is the server's "
                        "disk full?]\n");
    else if (c->stopping)
        fprintf(stderr, "[ended here; what was said is kept]\n");
}

static int send_turn(struct chat *c, const char *body, struct td_error *err)
{
    struct cli_server server = c->settings->server;
    server.on_wait = on_wait, server.wait_ctx = c;
    int rc = cli_http(&server, "POST", "/v1/chat/completions", body, take_stream, c, &c->response, err);
    if (rc == 0 && c->response.status != 200)
        cli_http_error(&server, &c->response, err), rc = err->code;
    if (rc == 0 && c->error[0])
        rc = td_fail(err, -TD_ERR_IO, "%s", c->error);
    if (rc < 0 && c->stopping)
        rc = td_fail(err, -TD_ERR_CANCELLED, "ended; nothing of this turn is kept");
    if (rc == 0 && c->response.conversation[0])
        memcpy(c->conversation, c->response.conversation, sizeof c->conversation);
    free(c->response.body);
    c->response.body = NULL;
    return rc;
}

/* One turn: 0, or -1 with the error shown. */
static int say(struct chat *c, const char *message)
{
    struct td_error err = {0};
    if (!message[0]) {
        fprintf(stderr, "tandem chat: the message is empty\n");
        return -1;
    }
    json_t *request = make_request(c, message);
    char *body = request ? json_dumps(request, JSON_COMPACT) : NULL;
    json_decref(request);
    if (!body) {
        fprintf(stderr, "tandem chat: the message or an option is not valid UTF-8\n");
        return -1;
    }
    begin_turn(c, message);
    int rc = send_turn(c, body, &err);
    free(body);
    fflush(c->reply);
    if (c->reply_size > 0 && !c->settings->json)
        fputs("\n", stdout);
    fwrite(c->reply_text, 1, c->reply_size, c->transcript);
    fputs("\n", c->transcript);
    if (rc == 0 && c->settings->json && chat_print_object(c) != CLI_OK)
        return -1;
    fflush(stdout); /* before what stderr says of it */
    if (rc == 0)
        end_turn(c);
    else
        cli_fail("chat", &err);
    return rc < 0 ? -1 : 0;
}

/* ---- the conversation --------------------------------------------------------------------------------------- */

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
        fprintf(stderr, "saved to %s; ", path);
        chat_print_resume(c, "resume with:");
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

/* A line without its end; NULL: there is none, or Ctrl-C. */
static char *read_line(char **line, size_t *capacity, bool terminal)
{
    interrupts = 0;
    if (terminal)
        fputs("> ", stderr);
    ssize_t size = getline(line, capacity, stdin);
    while (size > 0 && ((*line)[size - 1] == '\n' || (*line)[size - 1] == '\r'))
        (*line)[--size] = 0;
    return size < 0 ? NULL : *line;
}

static int talk(struct chat *c)
{
    bool terminal = cli_is_terminal(STDIN_FILENO), interrupted = false;
    char *line = NULL;
    size_t capacity = 0;
    int code = CLI_OK;
    while (!interrupted && read_line(&line, &capacity, terminal)) {
        if (line[0] == '/') {
            if (!run_command(c, line))
                break;
        } else if (line[0] && say(c, line) < 0) {
            code = CLI_FAILED;
        }
        interrupted = interrupts > terminal; /* at a prompt the first one has ended the reply */
    }
    interrupted = interrupted || interrupts > 0;
    bool ended = feof(stdin) || interrupted; /* the cursor is behind the prompt */
    free(line);
    if (terminal && ended)
        fputs("\n", stderr);
    if (c->conversation[0] && !c->settings->json)
        chat_print_resume(c, "go on later with:");
    return interrupted ? CLI_INTERRUPTED : code;
}

/* One question: the answer alone is on stdout, and how to go on is for people. */
static int ask_once(struct chat *c, const char *message)
{
    int code = say(c, message) < 0 ? CLI_FAILED : CLI_OK;
    if (code == CLI_OK && c->conversation[0] && (c->settings->stats || cli_is_terminal(STDERR_FILENO)))
        chat_print_resume(c, "go on with:");
    return interrupts > 0 ? CLI_INTERRUPTED : code;
}

/* Standard input as one message, malloc'ed; NULL: there is too much of it, or no memory. */
static char *read_message(void)
{
    char *text = malloc(MESSAGE_MAX + 1);
    size_t size = text ? fread(text, 1, MESSAGE_MAX + 1, stdin) : 0;
    if (!text || size > MESSAGE_MAX || memchr(text, '\0', size)) {
        fprintf(stderr,
                "tandem chat: standard input is no message: it holds a NUL byte or more than %u MiB\n",
                MESSAGE_MAX >> 20);
        free(text);
        return NULL;
    }
    while (size > 0 && (text[size - 1] == '\n' || text[size - 1] == '\r'))
        size--;
    text[size] = '\0';
    return text;
}

static int answer(struct chat *c, const char *message)
{
    if (!message)
        return talk(c);
    if (strcmp(message, "-") != 0)
        return ask_once(c, message);
    char *text = read_message();
    int code = text ? ask_once(c, text) : CLI_FAILED;
    free(text);
    return code;
}

static int run(const struct chat_settings *s, const char *message)
{
    struct chat c = {.settings = s, .line = malloc(LINE_TAIL_MAX)};
    c.transcript = open_memstream(&c.transcript_text, &c.transcript_size);
    c.reply = open_memstream(&c.reply_text, &c.reply_size);
    int code = CLI_FAILED;
    if (strlen(s->conversation) >= sizeof c.conversation)
        fprintf(stderr, "tandem chat: that conversation id is too long\n");
    else if (!c.line || !c.transcript || !c.reply)
        fprintf(stderr, "tandem chat: out of memory\n");
    else {
        memcpy(c.conversation, s->conversation, strlen(s->conversation) + 1);
        catch_interrupts();
        code = answer(&c, message);
    }
    if (c.transcript)
        fclose(c.transcript);
    if (c.reply)
        fclose(c.reply);
    free(c.transcript_text);
    free(c.reply_text);
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
