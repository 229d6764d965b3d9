/* store_remote: `tandem store` through the admin listener of a running node, which holds its directory's lock. The bearer token comes from the master
 * key (store/operator.h), so the key file that opens the directory opens this door too. */
#include "cli/store_cmd.h"
#include "store/operator.h"
#include <stdio.h>
#include <stdlib.h>

#define POLL_US 500000u

static const struct {
    const char *verb, *method, *path;
    const char *doing; /* of what may take long; NULL: no progress is shown */
} VERBS[] = {
    {"ls", "GET", "/store/stat", NULL},
    {"stat", "GET", "/store/stat", NULL},
    {"verify", "POST", "/store/verify", "verifying"},
    {"compact", "POST", "/store/compact", "compacting"},
    {"gc", "POST", "/store/gc", "collecting"},
    {"pin", "POST", "/store/pin", NULL},
    {"unpin", "POST", "/store/pin", NULL},
    {"erase-tenant", "POST", "/store/erase-tenant", NULL},
};

static int print(const struct store_settings *s, const char *verb, const char *name, json_t *answer)
{
    if (!answer)
        return cli_fail(
            "store",
            &(struct td_error){.text = "the node's answer is not JSON; is --admin its admin listener?"});
    if (!strcmp(verb, "ls"))
        return store_cmd_print_tenants(s, answer);
    if (!strcmp(verb, "stat"))
        return store_cmd_print_stats(s, answer);
    if (!strcmp(verb, "verify"))
        return store_cmd_print_verified(s, answer);
    if (!strcmp(verb, "compact") || !strcmp(verb, "gc"))
        return store_cmd_print_freed(s, answer);
    if (!strcmp(verb, "erase-tenant")) {
        json_decref(answer);
        return store_cmd_print_erased(s, name);
    }
    if (s->json)
        return cli_print_json(answer);
    printf("%sned\n", verb);
    json_decref(answer);
    return CLI_OK;
}

/* ---- how far it has come --------------------------------------------------------------------------------------- */

struct watch {
    struct cli_server server; /* without this watch */
    const char *doing;
    bool json;
    uint64_t asked_us, done, total; /* as shown last */
};

/* A bar for people, lines of JSON for programs; both on stderr, as the answer is on stdout. */
static void show(struct watch *w, uint64_t done, uint64_t total)
{
    if (total == 0 || (done == w->done && total == w->total))
        return;
    w->done = done, w->total = total;
    if (w->json)
        fprintf(stderr, "{\"done\": %llu, \"total\": %llu}\n", (unsigned long long)done,
                (unsigned long long)total);
    else
        cli_progress((void *)(uintptr_t)w->doing, done, total);
}

static bool look(void *ctx)
{
    struct watch *w = ctx;
    struct cli_response r;
    struct td_error err = {0};
    if (clock_mono_us() - w->asked_us < POLL_US)
        return true;
    w->asked_us = clock_mono_us();
    if (cli_http(&w->server, "GET", "/store/progress", NULL, NULL, NULL, &r, &err) < 0)
        return true;
    json_t *body = r.body && r.status == 200 ? json_loadb(r.body, r.size, 0, NULL) : NULL;
    json_int_t done = json_integer_value(json_object_get(body, "done")),
               total = json_integer_value(json_object_get(body, "total"));
    if (json_is_string(json_object_get(body, "running")) && done >= 0 && total >= done)
        show(w, (uint64_t)done, (uint64_t)total);
    json_decref(body);
    free(r.body);
    return true;
}

static int ask(const struct store_settings *s, size_t which, const char *name, const char *bearer,
               const char *body)
{
    struct td_error err = {0};
    struct cli_response r;
    struct cli_server server = {
        .url = s->admin,
        .bearer = bearer,
        .no_answer = "is --admin the node's admin listener (--admin-port), and does the node go on running?"};
    struct watch watch = {
        .server = server, .doing = VERBS[which].doing, .json = s->json, .asked_us = clock_mono_us()};
    if (watch.doing)
        server.on_wait = look, server.wait_ctx = &watch;
    if (cli_http(&server, VERBS[which].method, VERBS[which].path, body, NULL, NULL, &r, &err) < 0)
        return cli_fail("store", &err);
    int code;
    if (r.status == 200 && watch.total)
        show(&watch, watch.total, watch.total);
    if (r.status == 200)
        code = print(s, VERBS[which].verb, name, json_loadb(r.body ? r.body : "", r.size, 0, NULL));
    else {
        cli_http_error(&server, &r, &err);
        code = cli_fail("store", &err);
    }
    free(r.body);
    return code;
}

int store_cmd_remote(const struct store_settings *s, const char *verb, const char *name)
{
    struct td_error err = {0};
    uint8_t master[CRYPTO_KEY_SIZE];
    char bearer[OPERATOR_TOKEN_SIZE + 1];
    size_t which = 0;
    while (which < TD_COUNT(VERBS) && strcmp(VERBS[which].verb, verb) != 0)
        which++;
    if (which == TD_COUNT(VERBS)) {
        fprintf(stderr,
                "tandem store: %s works on the directory of a node that is stopped; a running node does ls, "
                "stat, verify, "
                "compact, gc, pin, unpin and erase-tenant\n",
                verb);
        return CLI_USAGE;
    }
    if (!cli_is_loopback(s->admin)) { /* the token is not for the network */
        fprintf(stderr, "tandem store: --admin is an address of this machine, such as http://127.0.0.1:9443; "
                        "for another one, "
                        "use an SSH tunnel\n");
        return CLI_USAGE;
    }
    if (!strcmp(verb, "erase-tenant") && !store_cmd_is_sure(s, name))
        return CLI_USAGE;
    if (store_master_key_load(s->key_file, false, master, &err) < 0)
        return cli_fail("store", &err);
    operator_token(master, bearer);
    crypto_wipe(master, sizeof master);
    json_t *request = NULL;
    if (!strcmp(verb, "erase-tenant"))
        request = json_pack("{s:s}", "tenant", name);
    else if (strstr(verb, "pin"))
        request = store_cmd_pin_request(s, verb, name);
    else if (!strcmp(verb, "compact"))
        request = json_pack("{s:I}", "dead_percent", (json_int_t)s->dead_percent);
    if (strstr(verb, "pin") && !request)
        return CLI_USAGE;
    char *body = strcmp(VERBS[which].method, "POST") == 0
                     ? request ? json_dumps(request, JSON_COMPACT) : strdup("{}")
                     : NULL;
    int code = ask(s, which, name, bearer, body);
    crypto_wipe(bearer, sizeof bearer);
    json_decref(request);
    free(body);
    return code;
}
