/* tandem conv: stored conversations, through the API of an agent or a node. */
#include "cli/cli.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

struct conv_settings {
    struct cli_server server;
    bool json;
};
static const struct config_option OPTIONS[] = {
    CLI_SERVER_OPTIONS(struct conv_settings, server),
    {.name = "json",
     .type = CONFIG_BOOL,
     .offset = offsetof(struct conv_settings, json),
     .help = "the API's JSON instead of a table"},
};
static const struct config_spec SPEC = {
    .program = "tandem conv",
    .env_prefix = "TANDEM_CONV",
    .summary = "Stored conversations.",
    .usage = "ls\nshow ID\nrm ID",
    .examples = "  tandem conv ls\n  tandem conv show conv-1f0c…\n  tandem conv rm conv-1f0c…\n",
    .options = OPTIONS,
    .option_count = TD_COUNT(OPTIONS),
};

static void print_row(json_t *c)
{
    char when[32] = "";
    time_t seconds = (time_t)json_integer_value(json_object_get(c, "updated"));
    struct tm tm;
    if (localtime_r(&seconds, &tm))
        strftime(when, sizeof when, "%Y-%m-%d %H:%M", &tm);
    const char *id = json_string_value(json_object_get(c, "id")),
               *title = json_string_value(json_object_get(c, "title"));
    printf("%-32s %-17s %7lld  %s\n", id ? id : "?", when,
           (long long)json_integer_value(json_object_get(c, "tokens")), title ? title : "");
}

static void print_list(json_t *body)
{
    size_t i;
    json_t *c;
    printf("%-32s %-17s %7s  %s\n", "id", "updated", "tokens", "title");
    json_array_foreach(json_object_get(body, "data"), i, c)
    {
        print_row(c);
    }
}

static int answer(const char *verb, const struct cli_response *r, bool json)
{
    struct td_error err = {0};
    if (r->status != 200) {
        cli_http_error(r, &err);
        return cli_fail("conv", &err);
    }
    if (json) {
        printf("%s\n", r->body ? r->body : "{}");
        return CLI_OK;
    }
    json_t *body = r->body ? json_loadb(r->body, r->size, 0, NULL) : NULL;
    if (!strcmp(verb, "ls"))
        print_list(body);
    else if (!strcmp(verb, "rm"))
        printf("removed\n");
    else {
        const char *text = json_string_value(json_object_get(body, "text"));
        printf("%s\n", text ? text : r->body);
    }
    json_decref(body);
    return CLI_OK;
}

static bool valid_id(const char *id)
{
    return id[0] && strlen(id) <= 64 &&
           strspn(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == strlen(id);
}

static int run(const struct conv_settings *s, const char *verb, const char *id)
{
    struct td_error err = {0};
    struct cli_response r;
    char path[128] = "/v1/conversations";
    if (id && !valid_id(id)) {
        fprintf(stderr, "tandem conv: '%s' is no conversation id; see tandem conv ls\n", id);
        return CLI_USAGE;
    }
    if (id)
        snprintf(path, sizeof path, "/v1/conversations/%s", id);
    if (cli_http(&s->server, !strcmp(verb, "rm") ? "DELETE" : "GET", path, NULL, NULL, NULL, &r, &err) < 0)
        return cli_fail("conv", &err);
    int code = answer(verb, &r, s->json);
    free(r.body);
    return code;
}

int cli_conv(int argc, char **argv)
{
    struct conv_settings s;
    struct config *config = NULL;
    char **rest = NULL;
    int rest_count = 0, code = CLI_USAGE;
    if (cli_load(&SPEC, argc, argv, &s, &config, &rest, &rest_count, &code) != 0)
        return code;
    bool list = rest_count == 1 && !strcmp(rest[0], "ls");
    bool one = rest_count == 2 && (!strcmp(rest[0], "show") || !strcmp(rest[0], "rm"));
    if (list || one)
        code = run(&s, rest[0], one ? rest[1] : NULL);
    else
        fprintf(stderr, "usage: tandem conv %s\n", SPEC.summary);
    config_free(config);
    return code;
}
