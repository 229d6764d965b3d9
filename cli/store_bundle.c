/* store_bundle: `tandem store export|import`: a principal's conversations with their KV from one node's store to another's. */
#include "cli/store_cmd.h"
#include "kernels/kv_layout.h"
#include "store/bundle.h"
#include <stdio.h>

static int print(const struct store_settings *s, const char *verb, const struct bundle_counts *n)
{
    char size[32];
    if (s->json)
        return cli_print_json(json_pack("{s:I,s:I,s:I,s:I}", "conversations", (json_int_t)n->conversations,
                                        "blocks", (json_int_t)n->blocks, "bytes", (json_int_t)n->bytes,
                                        "kept", (json_int_t)n->kept));
    printf("%s %llu conversation%s and %llu block%s (%s)", verb, (unsigned long long)n->conversations,
           TD_S(n->conversations), (unsigned long long)n->blocks, TD_S(n->blocks), cli_bytes(n->bytes, size));
    if (n->kept)
        printf("; %llu conversation%s already here %s kept", (unsigned long long)n->kept, TD_S(n->kept),
               n->kept == 1 ? "is" : "are");
    printf("\n");
    return CLI_OK;
}

static int names_of_model(const char *path, uint8_t fingerprint[TD_HASH_SIZE], uint8_t layout[TD_HASH_SIZE],
                          struct td_error *err)
{
    struct gguf *file = NULL;
    struct model *m = NULL;
    int rc = gguf_open(path, &file, err);
    rc = rc < 0 ? rc : model_load(file, &m, err);
    rc = rc < 0 ? rc : gguf_fingerprint(file, fingerprint, cli_progress, (char[]){"hashing"}, err);
    if (rc >= 0)
        model_layout_hash(m, layout);
    model_free(m);
    gguf_close(file);
    return rc < 0 ? rc : 0;
}

static int words_of(const struct store_settings *s, char words[PORTABLE_WORDS_MAX], struct td_error *err)
{
    if (!s->transfer_key_file[0])
        return td_fail(err, -TD_ERR_ARG,
                       "name the words that seal the file, in a file of mode 0600: --transfer-key-file FILE");
    return config_read_secret(s->transfer_key_file, words, PORTABLE_WORDS_MAX, err);
}

int store_cmd_export(struct store *store, const struct store_settings *s, const char *name)
{
    struct td_error err = {0};
    struct portable *file = NULL;
    struct bundle_counts counts;
    const struct bundle_progress progress = {cli_progress, (char[]){"exporting"}};
    uint8_t fingerprint[TD_HASH_SIZE], layout[TD_HASH_SIZE];
    char words[PORTABLE_WORDS_MAX];
    if (!s->tenant[0] || !s->principal[0] || !s->model[0]) {
        fprintf(stderr, "tandem store: export wants --tenant NAME, --principal NAME and --model FILE\n");
        return CLI_USAGE;
    }
    int rc = names_of_model(s->model, fingerprint, layout, &err);
    rc = rc < 0 ? rc : words_of(s, words, &err);
    rc = rc < 0 ? rc : portable_create(name, words, &file, &err);
    crypto_wipe(words, sizeof words);
    rc = rc < 0 ? rc
                : bundle_export(store, s->tenant, s->principal, fingerprint, layout, file, &progress, &counts,
                                &err);
    if (rc == 0)
        rc = portable_finish(file, &err);
    else
        portable_close(file);
    return rc < 0 ? cli_fail("store export", &err) : print(s, "exported", &counts);
}

int store_cmd_import(struct store *store, const struct store_settings *s, const char *name)
{
    struct td_error err = {0};
    struct portable *file = NULL;
    struct bundle_counts counts;
    const struct bundle_progress progress = {cli_progress, (char[]){"importing"}};
    char words[PORTABLE_WORDS_MAX];
    int rc = words_of(s, words, &err);
    rc = rc < 0 ? rc : portable_open(name, words, &file, &err);
    crypto_wipe(words, sizeof words);
    rc = rc < 0 ? rc
                : bundle_import(store, s->tenant, s->principal, s->trusted, file, &progress, &counts, &err);
    portable_close(file);
    return rc < 0 ? cli_fail("store import", &err) : print(s, "imported", &counts);
}
