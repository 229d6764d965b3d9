/* tandem store: look into and check a store's directory that no node holds open (the store's lock refuses otherwise). */
#include "cli/cli.h"
#include "store/keys.h"
#include <stdio.h>

struct store_settings {
    const char *directory, *key_file;
    bool json;
};
#define FIELD(name) offsetof(struct store_settings, name)
static const struct config_option OPTIONS[] = {
    {.name = "store",
     .type = CONFIG_STRING,
     .offset = FIELD(directory),
     .metavar = "DIR",
     .help = "the store's directory"},
    {.name = "store-key-file",
     .type = CONFIG_STRING,
     .offset = FIELD(key_file),
     .metavar = "FILE",
     .help = "its master key, mode 0600"},
    {.name = "json", .type = CONFIG_BOOL, .offset = FIELD(json), .help = "JSON instead of a table"},
};
static const struct config_spec SPEC = {
    .program = "tandem store",
    .env_prefix = "TANDEM_STORE_CMD",
    .summary = "What a KV store's directory holds, and whether it is whole.",
    .usage = "ls --store DIR --store-key-file FILE\nverify --store DIR --store-key-file FILE",
    .examples = "  tandem store ls --store /var/lib/tandem/cloud --store-key-file /var/lib/tandem/store.key\n"
                "  tandem store verify --store /var/lib/tandem/cloud --store-key-file "
                "/var/lib/tandem/store.key --json\n",
    .options = OPTIONS,
    .option_count = TD_COUNT(OPTIONS),
};

struct tenant_row { /* blocks of one tenant, by quality */
    char tenant[STORE_TENANT_MAX + 1];
    uint64_t blocks, size, by_device, lossless;
};
struct listing {
    struct tenant_row rows[KEYS_TENANTS_MAX];
    size_t count;
};

static int count_block(void *ctx, const char *tenant, const struct kv_block_id *id,
                       const struct store_block_info *info)
{
    struct listing *l = ctx;
    (void)id;
    size_t at = 0;
    while (at < l->count && strcmp(l->rows[at].tenant, tenant) != 0)
        at++;
    if (at == TD_COUNT(l->rows))
        return 0; /* not met: a store has no more tenants */
    if (at == l->count)
        snprintf(l->rows[l->count++].tenant, sizeof l->rows[0].tenant, "%s", tenant);
    struct tenant_row *row = &l->rows[at];
    row->blocks++;
    row->size += info->stored_size;
    row->by_device += info->quality.provenance == KV_FROM_DEVICE;
    row->lossless += info->quality.fidelity == KV_L0;
    return 0;
}

static int list(struct store *s, bool json)
{
    static struct listing l;
    struct store_stats stats;
    char size[32], total[32];
    store_each_block(s, count_block, &l);
    store_stats(s, &stats);
    json_t *tenants = json_array();
    for (size_t i = 0; i < l.count; i++) {
        const struct tenant_row *r = &l.rows[i];
        json_array_append_new(tenants,
                              json_pack("{s:s,s:I,s:I,s:I,s:I}", "tenant", r->tenant, "blocks",
                                        (json_int_t)r->blocks, "bytes", (json_int_t)r->size, "from_device",
                                        (json_int_t)r->by_device, "lossless", (json_int_t)r->lossless));
    }
    if (json)
        return cli_print_json(json_pack(
            "{s:I,s:I,s:I,s:I,s:I,s:o}", "blocks", (json_int_t)stats.blocks, "conversations",
            (json_int_t)stats.conversations, "segments", (json_int_t)stats.segments, "segment_bytes",
            (json_int_t)stats.segment_bytes, "dead_bytes", (json_int_t)stats.dead_bytes, "tenants", tenants));
    json_decref(tenants);
    printf("%-24s %10s %12s %12s %10s\n", "tenant", "blocks", "size", "from device", "lossless");
    for (size_t i = 0; i < l.count; i++)
        printf("%-24s %10llu %12s %12llu %10llu\n", l.rows[i].tenant, (unsigned long long)l.rows[i].blocks,
               cli_bytes(l.rows[i].size, size), (unsigned long long)l.rows[i].by_device,
               (unsigned long long)l.rows[i].lossless);
    printf("%llu blocks of %u tokens, %llu conversations, %llu segments (%s, of which %s dead)\n",
           (unsigned long long)stats.blocks, (unsigned)KV_BLOCK_TOKENS,
           (unsigned long long)stats.conversations, (unsigned long long)stats.segments,
           cli_bytes(stats.segment_bytes, total), cli_bytes(stats.dead_bytes, size));
    return CLI_OK;
}

static int verify(struct store *s, bool json)
{
    struct td_error err = {0};
    uint64_t records = 0, bad = 0;
    if (store_verify(s, cli_progress, (char[]){"verifying"}, &records, &bad, &err) < 0)
        return cli_fail("store verify", &err);
    if (json)
        cli_print_json(json_pack("{s:I,s:I}", "records", (json_int_t)records, "bad", (json_int_t)bad));
    else
        printf("%llu records read, %llu damaged\n", (unsigned long long)records, (unsigned long long)bad);
    return bad ? CLI_FAILED : CLI_OK;
}

static int run(const struct store_settings *s, const char *verb)
{
    struct td_error err = {0};
    struct store_config config = {.directory = s->directory, .read_only = true};
    struct store *store = NULL;
    if (store_master_key_load(s->key_file[0] ? s->key_file : NULL, false, config.master_key, &err) < 0)
        return cli_fail("store", &err);
    int rc = store_open(&config, &store, &err);
    crypto_wipe(config.master_key, sizeof config.master_key);
    if (rc < 0)
        return cli_fail("store", &err);
    int code = !strcmp(verb, "ls") ? list(store, s->json) : verify(store, s->json);
    store_close(store);
    return code;
}

int cli_store(int argc, char **argv)
{
    struct store_settings s;
    struct config *config = NULL;
    char **rest = NULL;
    int rest_count = 0, code = CLI_USAGE;
    if (cli_load(&SPEC, argc, argv, &s, &config, &rest, &rest_count, &code) != 0)
        return code;
    if (rest_count != 1 || (strcmp(rest[0], "ls") != 0 && strcmp(rest[0], "verify") != 0) || !s.directory[0])
        fprintf(stderr, "usage: tandem store %s\n", SPEC.summary);
    else
        code = run(&s, rest[0]);
    config_free(config);
    return code;
}
