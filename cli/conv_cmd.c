/* tandem conv: stored conversations, through the API of an agent or a node. */
#include "cli/conv_cmd.h"
#include "shared/conversation_id.h"
#include "shared/crypto.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

struct conv_settings {
    struct cli_server server;
    const char *key_file;
    bool json, plain;
};
static const struct config_option OPTIONS[] = {
    CLI_SERVER_OPTIONS(struct conv_settings, server),
    {.name = "export-key-file",
     .type = CONFIG_STRING,
     .offset = offsetof(struct conv_settings, key_file),
     .metavar = "FILE",
     .help = "export, import: the words that seal the file, one line, mode 0600"},
    {.name = "plain",
     .type = CONFIG_BOOL,
     .offset = offsetof(struct conv_settings, plain),
     .help = "export: JSON that anybody can read, in a file of mode 0600"},
    {.name = "json",
     .type = CONFIG_BOOL,
     .offset = offsetof(struct conv_settings, json),
     .help = "the API's JSON instead of a table"},
};
static const struct config_spec SPEC = {
    .program = "tandem conv",
    .env_prefix = "TANDEM_CONV",
    .summary = "Stored conversations.",
    .usage = "ls\nshow ID\nrm ID\nfork ID\npin ID\nunpin ID\nexport ID FILE\nimport FILE",
    .examples = "  tandem conv ls\n  tandem conv show conv-1f0c…\n"
                "  tandem conv export conv-1f0c… talk.tandem --export-key-file words\n"
                "  tandem conv import talk.tandem --export-key-file words --url http://127.0.0.1:8082\n",
    .options = OPTIONS,
    .option_count = TD_COUNT(OPTIONS),
};

/* ---- answers ------------------------------------------------------------------------------------------------ */

static const char *text_of(json_t *o, const char *name)
{
    const char *text = json_string_value(json_object_get(o, name));
    return text ? text : "?";
}

static void print_row(json_t *c)
{
    char when[32] = "";
    time_t seconds = (time_t)json_integer_value(json_object_get(c, "updated"));
    struct tm tm;
    if (localtime_r(&seconds, &tm))
        strftime(when, sizeof when, "%Y-%m-%d %H:%M", &tm);
    printf("%-32s %-17s %7lld  %-6s  %s\n", text_of(c, "id"), when,
           (long long)json_integer_value(json_object_get(c, "tokens")),
           json_is_true(json_object_get(c, "pinned")) ? "yes" : "", text_of(c, "title"));
}

static void print_list(json_t *body)
{
    size_t i;
    json_t *c;
    printf("%-32s %-17s %7s  %-6s  %s\n", "id", "updated", "tokens", "pinned", "title");
    json_array_foreach(json_object_get(body, "data"), i, c)
    {
        print_row(c);
    }
}

static void print_turns(json_t *body)
{
    size_t i;
    json_t *m;
    json_array_foreach(json_object_get(body, "messages"), i, m)
    {
        printf("%s%s: %s\n", i ? "\n" : "", text_of(m, "role"), text_of(m, "content"));
    }
}

static void print_removed(json_t *body)
{
    (void)body;
    printf("removed\n");
}

static void print_pinned(json_t *body)
{
    printf("%s\n", json_is_true(json_object_get(body, "pinned")) ? "pinned" : "unpinned");
}

/* The new id alone, for scripts. */
static void print_new(json_t *body)
{
    printf("%s\n", text_of(json_object_get(body, "conversation"), "id"));
}

/* ---- verbs -------------------------------------------------------------------------------------------------- */

static const struct verb {
    const char *name, *method, *suffix; /* of the path, behind the id */
    int operands;
    void (*print)(json_t *body); /* NULL: the answer goes to a file */
} VERBS[] = {
    {"ls", "GET", "", 0, print_list},         {"show", "GET", "", 1, print_turns},
    {"rm", "DELETE", "", 1, print_removed},   {"fork", "POST", "/fork", 1, print_new},
    {"pin", "POST", "/pin", 1, print_pinned}, {"unpin", "POST", "/unpin", 1, print_pinned},
    {"export", "GET", "/export", 2, NULL},    {"import", "POST", "", 1, print_new},
};

/* The server's own line, and which conversation there is not. */
static int refused(const struct conv_settings *s, const struct cli_response *r, const char *id)
{
    struct td_error err = {0};
    cli_http_error(&s->server, r, &err);
    size_t used = strlen(err.text);
    if (r->status == 404 && id)
        snprintf(err.text + used, sizeof err.text - used, ": %s", id);
    return cli_fail("conv", &err);
}

static int answer(const struct verb *v, const struct cli_response *r, const struct conv_settings *s,
                  const char *id, const char *file)
{
    struct td_error err = {0};
    const char *said = r->body ? r->body : "{}";
    if (r->status != 200)
        return refused(s, r, id);
    if (!v->print) {
        if (conv_file_write(file, s->key_file, s->plain, said, strlen(said), &err) < 0)
            return cli_fail("conv export", &err);
        fprintf(stderr, "%s\n", s->plain ? "written in the clear" : "sealed");
        return CLI_OK;
    }
    if (s->json) {
        printf("%s\n", said);
        return CLI_OK;
    }
    json_t *body = json_loads(said, 0, NULL);
    v->print(body);
    json_decref(body);
    return CLI_OK;
}

static int ask(const struct conv_settings *s, const struct verb *v, const char *path, const char *body,
               const char *id, const char *file)
{
    struct td_error err = {0};
    struct cli_response r;
    if (cli_http(&s->server, v->method, path, body, NULL, NULL, &r, &err) < 0)
        return cli_fail("conv", &err);
    int code = answer(v, &r, s, id, file);
    if (r.body)
        crypto_wipe(r.body, r.size);
    free(r.body);
    return code;
}

static int import(const struct conv_settings *s, const struct verb *v, const char *file)
{
    struct td_error err = {0};
    char *json = NULL, *body = NULL;
    size_t size = 0;
    int rc = conv_file_read(file, s->key_file, &json, &size, &err);
    rc = rc < 0 ? rc : conv_file_body(json, size, cli_is_loopback(s->server.url), &body, &err);
    int code = rc < 0 ? cli_fail("conv import", &err) : ask(s, v, "/v1/conversations", body, NULL, NULL);
    if (json)
        crypto_wipe(json, size);
    if (body)
        crypto_wipe(body, strlen(body));
    free(json);
    free(body);
    return code;
}

static int run(const struct conv_settings *s, const struct verb *v, char **operands)
{
    char path[128] = "/v1/conversations";
    if (strcmp(v->name, "import") == 0)
        return import(s, v, operands[0]);
    if (v->operands > 0 && !conversation_id_valid(operands[0])) {
        fprintf(stderr, "tandem conv: '%s' is no conversation id; see tandem conv ls\n", operands[0]);
        return CLI_USAGE;
    }
    if (!v->print && s->plain == (s->key_file[0] != '\0')) {
        fprintf(stderr, "tandem conv: export seals the file with the words in --export-key-file FILE, or "
                        "writes it in the clear "
                        "with --plain\n");
        return CLI_USAGE;
    }
    if (v->operands > 0)
        snprintf(path, sizeof path, "/v1/conversations/%s%s", operands[0], v->suffix);
    return ask(s, v, path, strcmp(v->method, "POST") == 0 ? "{}" : NULL, v->operands > 0 ? operands[0] : NULL,
               v->operands > 1 ? operands[1] : NULL);
}

int cli_conv(int argc, char **argv)
{
    struct conv_settings s = {0};
    struct config *config = NULL;
    char **rest = NULL;
    int rest_count = 0, code = CLI_USAGE;
    const struct verb *v = NULL;
    if (cli_load(&SPEC, argc, argv, &s, &config, &rest, &rest_count, &code) != 0)
        return code;
    for (size_t i = 0; i < TD_COUNT(VERBS) && rest_count > 0; i++)
        if (strcmp(VERBS[i].name, rest[0]) == 0)
            v = &VERBS[i];
    if (v && rest_count == 1 + v->operands)
        code = run(&s, v, rest + 1);
    else
        code = cli_usage_of_verb(&SPEC, rest_count > 0 ? rest[0] : NULL, v != NULL);
    config_free(config);
    return code;
}
