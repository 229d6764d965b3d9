/* tandem store: look into, check and look after a store. On the directory itself while no node holds it (the store's lock decides), or, with --admin,
 * through the running node that does. What changes the directory says so by opening it for writing. */
#include "cli/store_cmd.h"
#include "store/operator.h"
#include <stdio.h>
#include <stdlib.h>

#define FIELD(name) offsetof(struct store_settings, name)
static const struct config_option OPTIONS[] = {
    {.name = "store",
     .type = CONFIG_STRING,
     .offset = FIELD(directory),
     .metavar = "DIR",
     .help = "the store's directory, while no node holds it"},
    {.name = "store-key-file",
     .type = CONFIG_STRING,
     .offset = FIELD(key_file),
     .metavar = "FILE",
     .help = "its master key, mode 0600"},
    {.name = "store-keys",
     .type = CONFIG_STRING,
     .offset = FIELD(keys_directory),
     .metavar = "DIR",
     .help = "where the tenants' keys lie, for nodes that share them; without it, in the store"},
    {.name = "admin",
     .type = CONFIG_STRING,
     .offset = FIELD(admin),
     .metavar = "URL",
     .help = "ask the running node instead, at its admin listener (http://127.0.0.1:9443); it takes the same "
             "key file"},
    {.name = "tenant", .type = CONFIG_STRING, .offset = FIELD(tenant), .metavar = "NAME", .help = "whose"},
    {.name = "principal",
     .type = CONFIG_STRING,
     .offset = FIELD(principal),
     .metavar = "NAME",
     .help = "who within the tenant; pin and unpin: without it, a block"},
    {.name = "dead-percent",
     .type = CONFIG_INT,
     .offset = FIELD(dead_percent),
     .fallback = "50",
     .min = 0,
     .max = 100,
     .metavar = "N",
     .help = "compact: segments of which at least so much is dead"},
    {.name = "transfer-key-file",
     .type = CONFIG_STRING,
     .offset = FIELD(transfer_key_file),
     .metavar = "FILE",
     .help = "export, import: the words that seal the file, one line, mode 0600"},
    {.name = "model",
     .type = CONFIG_STRING,
     .offset = FIELD(model),
     .metavar = "FILE",
     .help = "export: the model whose KV it is"},
    {.name = "trusted",
     .type = CONFIG_BOOL,
     .offset = FIELD(trusted),
     .help =
         "import: the file comes from a store of ours, so blocks may serve the whole tenant; without it they "
         "are the principal's own"},
    {.name = "yes",
     .type = CONFIG_BOOL,
     .offset = FIELD(yes),
     .help = "erase-tenant: yes, destroy its keys, blocks and conversations for good"},
    {.name = "json", .type = CONFIG_BOOL, .offset = FIELD(json), .help = "JSON instead of a table"},
};
static const struct config_spec SPEC = {
    .program = "tandem store",
    .env_prefix = "TANDEM_STORE_CMD",
    .summary = "What a KV store holds, whether it is whole, and its upkeep.",
    .usage = "ls|stat|verify|compact|gc --store DIR|--admin URL --store-key-file FILE\n"
             "pin|unpin ID --tenant NAME [--principal NAME] --store DIR|--admin URL --store-key-file FILE\n"
             "erase-tenant NAME --yes --store DIR|--admin URL --store-key-file FILE\n"
             "rebuild|rotate-key --store DIR --store-key-file FILE\n"
             "export FILE --tenant NAME --principal NAME --model FILE --transfer-key-file FILE --store DIR "
             "--store-key-file FILE\n"
             "import FILE [--trusted] --transfer-key-file FILE --store DIR --store-key-file FILE",
    .examples = "  tandem store ls --store /var/lib/tandem/cloud --store-key-file /var/lib/tandem/store.key\n"
                "  tandem store stat --admin http://127.0.0.1:9443 --store-key-file "
                "/var/lib/tandem/store.key --json\n"
                "  tandem store pin conv-1f0c… --tenant acme --principal alice --admin http://127.0.0.1:9443 "
                "--store-key-file /var/lib/tandem/store.key\n",
    .options = OPTIONS,
    .option_count = TD_COUNT(OPTIONS),
};

/* ---- verbs -------------------------------------------------------------------------------------------------- */

static int no_memory(void)
{
    return cli_fail("store", &(struct td_error){.text = "out of memory"});
}

static int list(struct store *store, const struct store_settings *s, const char *name)
{
    json_t *stats = operator_stats(store);
    (void)name;
    return stats ? store_cmd_print_tenants(s, stats) : no_memory();
}

static int stat(struct store *store, const struct store_settings *s, const char *name)
{
    json_t *stats = operator_stats(store);
    (void)name;
    return stats ? store_cmd_print_stats(s, stats) : no_memory();
}

static int verify(struct store *store, const struct store_settings *s, const char *name)
{
    struct td_error err = {0};
    uint64_t records = 0, bad = 0;
    (void)name;
    if (store_verify(store, cli_progress, (char[]){"verifying"}, &records, &bad, &err) < 0)
        return cli_fail("store verify", &err);
    return store_cmd_print_verified(
        s, json_pack("{s:I,s:I}", "records", (json_int_t)records, "bad", (json_int_t)bad));
}

int store_cmd_print_verified(const struct store_settings *s, json_t *result)
{
    json_int_t records = json_integer_value(json_object_get(result, "records")),
               bad = json_integer_value(json_object_get(result, "bad"));
    if (s->json)
        cli_print_json(json_incref(result));
    else
        printf("%lld records read, %lld damaged\n", (long long)records, (long long)bad);
    json_decref(result);
    return bad ? CLI_FAILED : CLI_OK;
}

static int compact(struct store *store, const struct store_settings *s, const char *name)
{
    struct td_error err = {0};
    uint64_t freed = 0;
    (void)name;
    if (store_compact(store, (unsigned)s->dead_percent, cli_progress, (char[]){"compacting"}, &freed, &err) <
        0)
        return cli_fail("store compact", &err);
    return store_cmd_print_freed(s, json_pack("{s:I}", "freed_bytes", (json_int_t)freed));
}

static int collect(struct store *store, const struct store_settings *s, const char *name)
{
    struct td_error err = {0};
    uint64_t blocks = 0, freed = 0;
    (void)name;
    if (store_gc(store, cli_progress, (char[]){"collecting"}, &blocks, &freed, &err) < 0)
        return cli_fail("store gc", &err);
    return store_cmd_print_freed(
        s, json_pack("{s:I,s:I}", "blocks", (json_int_t)blocks, "freed_bytes", (json_int_t)freed));
}

json_t *store_cmd_pin_request(const struct store_settings *s, const char *verb, const char *name)
{
    bool conversation = s->principal[0] != '\0';
    if (!name || !s->tenant[0]) {
        fprintf(stderr,
                "tandem store: %s wants --tenant NAME, and --principal NAME with a conversation's id or a "
                "block's id alone\n",
                verb);
        return NULL;
    }
    json_t *request = json_pack("{s:s,s:s,s:b}", "tenant", s->tenant, conversation ? "conversation" : "block",
                                name, "pinned", strcmp(verb, "pin") == 0);
    if (conversation)
        json_object_set_new(request, "principal", json_string(s->principal));
    return request;
}

static int set_pin(struct store *store, const struct store_settings *s, const char *verb, const char *name)
{
    struct td_error err = {0};
    json_t *request = store_cmd_pin_request(s, verb, name);
    if (!request)
        return CLI_USAGE;
    int rc = operator_pin(store, request, &err);
    json_decref(request);
    if (rc < 0)
        return cli_fail("store", &err);
    if (s->json)
        return cli_print_json(json_pack("{s:b}", "pinned", strcmp(verb, "pin") == 0));
    printf("%sned\n", verb);
    return CLI_OK;
}

static int pin(struct store *store, const struct store_settings *s, const char *name)
{
    return set_pin(store, s, "pin", name);
}

static int unpin(struct store *store, const struct store_settings *s, const char *name)
{
    return set_pin(store, s, "unpin", name);
}

bool store_cmd_is_sure(const struct store_settings *s, const char *name)
{
    if (!s->yes)
        fprintf(stderr,
                "tandem store: erase-tenant destroys the keys of %s, and with them its blocks and "
                "conversations, for good; say --yes if that is meant\n",
                name);
    return s->yes;
}

int store_cmd_print_erased(const struct store_settings *s, const char *name)
{
    if (s->json)
        return cli_print_json(json_pack("{s:s}", "erased", name));
    printf("%s is erased; who has an older copy of keys.td and of the segments can still read it with the "
           "master "
           "key of then: rotate-key gives the store another one\n",
           name);
    return CLI_OK;
}

static int erase(struct store *store, const struct store_settings *s, const char *name)
{
    struct td_error err = {0};
    if (!store_cmd_is_sure(s, name))
        return CLI_USAGE;
    if (store_erase_tenant(store, name, &err) < 0)
        return cli_fail("store erase-tenant", &err);
    return store_cmd_print_erased(s, name);
}

static int rotate(struct store *store, const struct store_settings *s, const char *name)
{
    struct td_error err = {0};
    (void)name;
    if (!s->key_file[0] || getenv("TANDEM_STORE_KEY")) {
        fprintf(stderr, "tandem store: rotate-key replaces the key in --store-key-file; TANDEM_STORE_KEY "
                        "must not be set\n");
        return CLI_USAGE;
    }
    if (store_rotate_master_file(store, s->key_file, &err) < 0)
        return cli_fail("store rotate-key", &err);
    if (s->json)
        return cli_print_json(json_pack("{s:s}", "key_file", s->key_file));
    printf("the store opens with a new master key now, in %s; backups of the old keys.td still open with the "
           "old one\n",
           s->key_file);
    return CLI_OK;
}

/* ---- the directory ------------------------------------------------------------------------------------------ */

static const struct verb {
    const char *name;
    bool writes, online; /* online: a running node does it, too */
    bool names;          /* takes an id or a file */
    int (*run)(struct store *store, const struct store_settings *s, const char *name);
} VERBS[] = {
    {"ls", false, true, false, list},
    {"stat", false, true, false, stat},
    {"verify", false, true, false, verify},
    {"rebuild", true, false, false, NULL},
    {"compact", true, true, false, compact},
    {"gc", true, true, false, collect},
    {"pin", true, true, true, pin},
    {"unpin", true, true, true, unpin},
    {"erase-tenant", true, true, true, erase},
    {"rotate-key", true, false, false, rotate},
    {"export", false, false, true, store_cmd_export},
    {"import", true, false, true, store_cmd_import},
};

/* The store's own line, and what to do about it with this command. */
static int cannot_open(const struct verb *v, struct td_error *err)
{
    size_t used = strlen(err->text);
    if (err->code == -TD_ERR_BUSY)
        snprintf(
            err->text + used, sizeof err->text - used, "%s",
            v->online
                ? ": tandem store --admin http://127.0.0.1:PORT, with a node's --admin-port (9443 by default)"
                : "");
    return cli_fail("store", err);
}

static int rebuild(const struct verb *v, const struct store_config *config, bool json)
{
    struct td_error err = {0};
    uint64_t records = 0;
    if (store_rebuild(config, cli_progress, (char[]){"rebuilding"}, &records, &err) < 0)
        return cannot_open(v, &err);
    if (json)
        return cli_print_json(json_pack("{s:I}", "records", (json_int_t)records));
    printf("the index holds %llu record%s again, read from the segments\n", (unsigned long long)records,
           TD_S(records));
    return CLI_OK;
}

static int run(const struct store_settings *s, const struct verb *v, const char *name)
{
    struct td_error err = {0};
    struct store_config config = {.directory = s->directory,
                                  .keys_directory = s->keys_directory[0] ? s->keys_directory : NULL,
                                  .master_key_path = s->key_file[0] ? s->key_file : NULL,
                                  .read_only = !v->writes};
    struct store *store = NULL;
    if (store_master_key_load(config.master_key_path, false, config.master_key, &err) < 0)
        return cli_fail("store", &err);
    if (!v->run) {
        int code = rebuild(v, &config, s->json);
        crypto_wipe(config.master_key, sizeof config.master_key);
        return code;
    }
    int rc = store_open(&config, &store, &err);
    crypto_wipe(config.master_key, sizeof config.master_key);
    if (rc < 0)
        return cannot_open(v, &err);
    int code = v->run(store, s, name);
    store_close(store);
    return code;
}

static const struct verb *find_verb(const char *name)
{
    for (size_t i = 0; i < TD_COUNT(VERBS); i++)
        if (strcmp(VERBS[i].name, name) == 0)
            return &VERBS[i];
    return NULL;
}

int cli_store(int argc, char **argv)
{
    struct store_settings s;
    struct config *config = NULL;
    char **rest = NULL;
    int rest_count = 0, code = CLI_USAGE;
    if (cli_load(&SPEC, argc, argv, &s, &config, &rest, &rest_count, &code) != 0)
        return code;
    const struct verb *v = rest_count > 0 ? find_verb(rest[0]) : NULL;
    if (!v || rest_count != 1 + v->names)
        code = cli_usage_of_verb(&SPEC, rest_count > 0 ? rest[0] : NULL, v != NULL);
    else if (!s.directory[0] == !s.admin[0])
        fprintf(stderr, "tandem store: name the directory of a stopped node (--store DIR) or a running node "
                        "(--admin URL)\n");
    else
        code = s.admin[0] ? store_cmd_remote(&s, rest[0], rest_count > 1 ? rest[1] : NULL)
                          : run(&s, v, rest_count > 1 ? rest[1] : NULL);
    config_free(config);
    return code;
}
