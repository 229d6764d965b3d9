/* conversation_move: copies of conversations: forks, and the portable form that export gives and import takes. Token ids are what is carried; KV is not:
 * blocks are named by the ids, so a copy finds those of the original where they are reachable, and the others are computed again.
 *
 * What does not travel: hashes of histories, which are keyed with the principal's key (an imported conversation goes on by its id), and the
 * key of its last request. */
#include "shared/crypto.h"
#include "store/conversation_json.h"
#include <stdlib.h>

#define MOVE_FORMAT  "tandem-conversation"
#define MOVE_VERSION 1

static int random_id(char out[STORE_CONV_ID_MAX + 1])
{
    uint8_t random[12];
    int rc = crypto_random(random, sizeof random);
    memcpy(out, "conv-", 5);
    hex_encode(random, sizeof random, out + 5);
    return rc;
}

static int answer(json_t *root, char **json)
{
    *json = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    return *json ? 0 : -TD_ERR_NOMEM;
}

static json_t *brief(const struct conversation *c)
{
    return json_pack("{s:s,s:s,s:I,s:I}", "id", c->id, "object", "conversation", "tokens",
                     (json_int_t)c->ids_count, "messages", (json_int_t)(2 * c->boundary_count));
}

/* ---- fork ---------------------------------------------------------------------------------------------------- */

int conversation_fork_json(struct conv_index *x, const char *tenant, const char *principal, const char *id,
                           char **json)
{
    struct conversation c;
    uint64_t version;
    int rc = conv_load(x, tenant, principal, id, &version, &c);
    if (rc < 0)
        return rc;
    rc = random_id(c.id);
    c.last_request_key[0] = '\0'; /* a repeat of the last request belongs to the original */
    c.created_us = clock_wall_us();
    if (c.updated_us > 0)
        c.updated_us--; /* a history that fits both goes on with the original, until the fork has a turn of its own */
    rc = rc < 0 ? rc : conv_save(x, tenant, principal, 0, &c);
    rc = rc < 0 ? rc : answer(json_pack("{s:o,s:s}", "conversation", brief(&c), "forked_from", id), json);
    conv_free(&c);
    return rc;
}

int conversation_pin_json(struct store *s, struct conv_index *x, const char *tenant, const char *principal,
                          const char *id, bool pinned, char **json)
{
    struct conversation c;
    struct td_error err = {0};
    uint64_t version;
    int rc = conv_load(x, tenant, principal, id, &version, &c);
    if (rc < 0)
        return rc;
    conv_free(&c);
    rc = store_conv_pin(s, tenant, principal, id, pinned, &err);
    return rc < 0 ? rc : answer(json_pack("{s:s,s:b}", "id", id, "pinned", pinned), json);
}

/* ---- export -------------------------------------------------------------------------------------------------- */

static json_t *hex_json(const uint8_t *bytes, size_t size)
{
    char *text = malloc(2 * size + 1);
    if (!text)
        return NULL;
    hex_encode(bytes, size, text);
    text[2 * size] = '\0';
    json_t *value = json_string(text);
    crypto_wipe(text, 2 * size);
    free(text);
    return value;
}

static json_t *ids_json(const struct conversation *c)
{
    json_t *ids = json_array();
    for (uint32_t i = 0; i < c->ids_count && ids; i++)
        json_array_append_new(ids, json_integer(c->ids[i]));
    return ids;
}

static json_t *turns_json(const struct conversation *c)
{
    json_t *turns = json_array();
    for (uint32_t i = 0; i < c->boundary_count && turns; i++)
        json_array_append_new(turns, json_pack("{s:I,s:b}", "end", (json_int_t)c->boundaries[i].ids_count,
                                               "open", c->boundaries[i].reply_open));
    return turns;
}

int conversation_export_json(struct conv_index *x, const struct tokenizer *t, const char *tenant,
                             const char *principal, const char *id, conversation_text_fn text, char **json)
{
    struct conversation c;
    uint64_t version;
    int rc = conv_load(x, tenant, principal, id, &version, &c);
    if (rc < 0)
        return rc;
    json_t *root = json_pack(
        "{s:s,s:i,s:s,s:o,s:I,s:I,s:o,s:o,s:o,s:o,s:o}", "format", MOVE_FORMAT, "version", MOVE_VERSION, "id",
        c.id, "title", hex_json((const uint8_t *)c.title, strlen(c.title)), "created_us",
        (json_int_t)c.created_us, "updated_us", (json_int_t)c.updated_us, "tokenizer",
        hex_json(c.tokenizer_id, TD_HASH_SIZE), "fingerprint", hex_json(c.fingerprint, TD_HASH_SIZE),
        "tokens", ids_json(&c), "turns", turns_json(&c), "messages", conversation_messages_json(&c, t, text));
    if (root && c.vault_size)
        json_object_set_new(root, "vault", hex_json(c.vault, c.vault_size));
    conv_free(&c);
    return answer(root, json);
}

/* ---- import: hostile bytes ----------------------------------------------------------------------------------- */

/* Bytes of a string of hex digits; at most max. */
static int64_t hex_member(json_t *root, const char *name, uint8_t *out, size_t max)
{
    json_t *value = json_object_get(root, name);
    size_t size = json_string_length(value) / 2;
    if (!json_is_string(value) || json_string_length(value) % 2 || size > max ||
        hex_decode(json_string_value(value), out, size) < 0)
        return -TD_ERR_FORMAT;
    return (int64_t)size;
}

static int read_ids(json_t *root, const struct tokenizer *t, struct conversation *c)
{
    json_t *list = json_object_get(root, "tokens"), *value;
    size_t i, count = json_array_size(list);
    c->ids = malloc((count + 1) * sizeof *c->ids);
    if (!c->ids)
        return -TD_ERR_NOMEM;
    json_array_foreach(list, i, value)
    {
        json_int_t id = json_integer_value(value);
        if (!json_is_integer(value) || id < 0 || id >= (json_int_t)tokenizer_vocab_count(t))
            return -TD_ERR_FORMAT;
        c->ids[c->ids_count++] = (int32_t)id;
    }
    return c->ids_count > 0 ? 0 : -TD_ERR_FORMAT;
}

static int read_turns(json_t *root, struct conversation *c)
{
    json_t *list = json_object_get(root, "turns"), *value;
    size_t i, count = json_array_size(list);
    uint32_t before = 0;
    if (count == 0 || count > CONV_MESSAGES_MAX)
        return -TD_ERR_FORMAT;
    c->boundaries = calloc(count, sizeof *c->boundaries);
    if (!c->boundaries)
        return -TD_ERR_NOMEM;
    json_array_foreach(list, i, value)
    {
        json_int_t end = json_integer_value(json_object_get(value, "end"));
        struct conv_boundary *b = &c->boundaries[c->boundary_count++];
        if (end < (json_int_t)before || end > (json_int_t)c->ids_count)
            return -TD_ERR_FORMAT;
        before = b->ids_count = (uint32_t)end;
        b->reply_open = json_is_true(json_object_get(value, "open"));
        if (crypto_random(b->history, sizeof b->history) < 0) /* no history leads here */
            return -TD_ERR_CRYPTO;
    }
    return before == c->ids_count ? 0 : -TD_ERR_FORMAT;
}

static int read_vault(json_t *root, bool take, struct conversation *c)
{
    json_t *value = json_object_get(root, "vault");
    size_t size = json_string_length(value) / 2;
    if (!value || !take)
        return 0;
    c->vault = size <= STORE_CONV_SIZE_MAX ? malloc(size + 1) : NULL;
    if (!c->vault)
        return -TD_ERR_NOMEM;
    c->vault_size = (uint32_t)size;
    return hex_member(root, "vault", c->vault, size) < 0 ? -TD_ERR_FORMAT : 0;
}

static int read_head(json_t *root, const struct tokenizer *t, struct conversation *c, struct td_error *err)
{
    uint8_t mine[TD_HASH_SIZE];
    const char *format = json_string_value(json_object_get(root, "format"));
    if (!format || strcmp(format, MOVE_FORMAT) != 0)
        return td_fail(err, -TD_ERR_FORMAT, "this is no exported conversation");
    if (json_integer_value(json_object_get(root, "version")) != MOVE_VERSION)
        return td_fail(err, -TD_ERR_FORMAT,
                       "the conversation was exported by a newer version: upgrade this one");
    int64_t title = hex_member(root, "title", (uint8_t *)c->title, CONV_TITLE_MAX);
    if (title < 0 || memchr(c->title, 0, (size_t)title) ||
        hex_member(root, "tokenizer", c->tokenizer_id, TD_HASH_SIZE) != TD_HASH_SIZE ||
        hex_member(root, "fingerprint", c->fingerprint, TD_HASH_SIZE) != TD_HASH_SIZE)
        return td_fail(err, -TD_ERR_FORMAT, "the exported conversation is damaged");
    c->title[title] = '\0';
    c->created_us = (uint64_t)json_integer_value(json_object_get(root, "created_us"));
    c->updated_us = (uint64_t)json_integer_value(json_object_get(root, "updated_us"));
    tokenizer_id(t, mine);
    return memcmp(mine, c->tokenizer_id, sizeof mine) == 0
               ? 0
               : td_fail(err, -TD_ERR_MISMATCH,
                         "the conversation belongs to a model with another tokenizer; its tokens mean "
                         "nothing here");
}

static int read_conversation(json_t *root, const struct tokenizer *t, bool take_vault, struct conversation *c,
                             struct td_error *err)
{
    int rc = read_head(root, t, c, err);
    if (rc < 0)
        return rc;
    rc = read_ids(root, t, c);
    rc = rc < 0 ? rc : read_turns(root, c);
    rc = rc < 0 ? rc : read_vault(root, take_vault, c);
    if (rc == -TD_ERR_FORMAT)
        td_fail(err, rc, "the exported conversation is damaged");
    return rc;
}

/* Under its own id where that is free here, else under a new one. */
static int save_new(struct conv_index *x, const char *tenant, const char *principal, json_t *root,
                    struct conversation *c)
{
    const char *id = json_string_value(json_object_get(root, "id"));
    int rc = -TD_ERR_CONFLICT;
    if (id && conversation_id_valid(id)) {
        strcpy(c->id, id);
        rc = conv_save(x, tenant, principal, 0, c);
    }
    if (rc != -TD_ERR_CONFLICT)
        return rc;
    rc = random_id(c->id);
    return rc < 0 ? rc : conv_save(x, tenant, principal, 0, c);
}

bool conversation_id_valid(const char *id)
{
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t size = strlen(id);
    return size > 0 && size <= STORE_CONV_ID_MAX && strspn(id, allowed) == size;
}

int conversation_import_json(struct conv_index *x, const struct tokenizer *t, const char *tenant,
                             const char *principal, const char *body, size_t size, bool take_vault,
                             char **json, struct td_error *err)
{
    struct conversation c = {0};
    json_t *root = json_loadb(body, size, JSON_REJECT_DUPLICATES, NULL);
    int rc = json_is_object(root) ? read_conversation(root, t, take_vault, &c, err)
                                  : td_fail(err, -TD_ERR_FORMAT, "this is no exported conversation");
    rc = rc < 0 ? rc : save_new(x, tenant, principal, root, &c);
    rc = rc < 0 ? rc : answer(json_pack("{s:o}", "conversation", brief(&c)), json);
    conv_free(&c);
    json_decref(root);
    return rc;
}
