/* conversation_move: copies of conversations: forks, and the portable form that export gives and import takes. Token ids are what is carried; KV is not:
 * blocks are named by the ids, so a copy finds those of the original where they are reachable, and the others are computed again.
 *
 * What does not travel: the key of its last request, and hashes of histories, which are keyed with the principal's key. Import makes new ones from
 * the text that the tokens stand for, so a client that re-sends what was said goes on with the imported ids. What its template does
 * not give back as it was sent (a text that was trimmed, a stop string) is not recognised and costs a new prefill, as anything that is not known. */
#include "shared/conversation_id.h"
#include "shared/crypto.h"
#include "store/conversation_json.h"
#include <stdlib.h>

_Static_assert(CONVERSATION_ID_MAX == STORE_CONV_ID_MAX, "what is imported can be stored");

#define MOVE_FORMAT  "tandem-conversation"
#define MOVE_VERSION 1

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
    rc = conv_make_id(c.id);
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

/* NULL, and nothing left, if it is not whole. */
static json_t *whole(json_t *value, int rc)
{
    if (rc == 0)
        return value;
    json_decref(value);
    return NULL;
}

static json_t *ids_json(const struct conversation *c)
{
    json_t *ids = json_array();
    int rc = 0;
    for (uint32_t i = 0; i < c->ids_count && rc == 0; i++)
        rc = json_array_append_new(ids, json_integer(c->ids[i]));
    return whole(ids, rc);
}

static json_t *turns_json(const struct conversation *c)
{
    json_t *turns = json_array();
    int rc = 0;
    for (uint32_t i = 0; i < c->boundary_count && rc == 0; i++)
        rc =
            json_array_append_new(turns, json_pack("{s:I,s:b}", "end", (json_int_t)c->boundaries[i].ids_count,
                                                   "open", c->boundaries[i].reply_open));
    return whole(turns, rc);
}

int conversation_export_json(struct conv_index *x, const struct tokenizer *t, const char *tenant,
                             const char *principal, const char *id, conversation_text_fn text, char **json)
{
    struct conversation c;
    uint64_t version;
    int rc = conv_load(x, tenant, principal, id, &version, &c);
    if (rc < 0)
        return rc;
    json_t *root =
        json_pack("{s:s,s:i,s:s,s:o,s:I,s:I,s:o,s:o,s:o,s:o,s:o}", "format", MOVE_FORMAT, "version",
                  MOVE_VERSION, "id", c.id, "title", hex_json((const uint8_t *)c.title, strlen(c.title)),
                  "created_us", (json_int_t)c.created_us, "updated_us", (json_int_t)c.updated_us, "tokenizer",
                  hex_json(c.tokenizer_id, TD_HASH_SIZE), "fingerprint",
                  hex_json(c.fingerprint, TD_HASH_SIZE), "tokens", ids_json(&c), "turns", turns_json(&c),
                  "messages", conversation_messages_json(&c, t, text, NULL));
    if (root && c.vault_size)
        root = whole(root, json_object_set_new(root, "vault", hex_json(c.vault, c.vault_size)));
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
        if (crypto_random(b->history, sizeof b->history) <
            0) /* no history leads here, unless one is made below */
            return -TD_ERR_CRYPTO;
    }
    return before == c->ids_count ? 0 : -TD_ERR_FORMAT;
}

/* ---- histories ----------------------------------------------------------------------------------------------- */

static struct chat_message message_of(json_t *messages, size_t index)
{
    json_t *m = json_array_get(messages, index), *content = json_object_get(m, "content");
    return (struct chat_message){json_string_value(json_object_get(m, "role")), json_string_value(content),
                                 json_string_length(content)};
}

/* Would the template have put the first message there by itself? Then the client has sent none, most likely. */
static bool is_default_system(enum chat_template_kind kind, json_t *messages)
{
    const struct chat_message first[] = {message_of(messages, 0), message_of(messages, 1)};
    struct chat_text with = {0}, without = {0};
    struct td_error err;
    bool same = json_array_size(messages) > 1 && strcmp(first[0].role, "system") == 0 &&
                chat_template_render(kind, first, 2, 0, false, false, &with, &err) == 0 &&
                chat_template_render(kind, first + 1, 1, 0, false, false, &without, &err) == 0 &&
                with.size == without.size && memcmp(with.text, without.text, with.size) == 0;
    chat_text_free(&with);
    chat_text_free(&without);
    return same;
}

/* Of each boundary whose messages are a history that ends with a reply; the others keep theirs. */
static void hash_messages(const struct conversation_home *home, json_t *messages, const uint32_t *counts,
                          struct conversation *c)
{
    size_t hashed = is_default_system(home->template_kind, messages);
    uint8_t h[TD_HASH_SIZE];
    conv_history_start(home->principal_key, (uint8_t)home->template_kind, h);
    for (uint32_t i = 0; i < c->boundary_count; i++) {
        for (; hashed < counts[i]; hashed++) {
            const struct chat_message m = message_of(messages, hashed);
            conv_history_next(home->principal_key, h, m.role, m.content, m.content_size, h);
        }
        if (counts[i] > 0 && strcmp(message_of(messages, counts[i] - 1).role, "assistant") == 0)
            memcpy(c->boundaries[i].history, h, TD_HASH_SIZE);
    }
}

static int make_histories(struct conversation *c, const struct conversation_home *home)
{
    uint32_t *counts = calloc(c->boundary_count, sizeof *counts);
    json_t *messages = counts ? conversation_messages_json(c, home->tokenizer, home->text, counts) : NULL;
    int rc = messages ? 0 : -TD_ERR_NOMEM;
    if (rc == 0)
        hash_messages(home, messages, counts, c);
    free(counts);
    json_decref(messages);
    return rc;
}

/* ---- import: the rest ---------------------------------------------------------------------------------------- */

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

static int read_conversation(json_t *root, const struct conversation_home *home, bool take_vault,
                             struct conversation *c, struct td_error *err)
{
    int rc = read_head(root, home->tokenizer, c, err);
    if (rc < 0)
        return rc;
    rc = read_ids(root, home->tokenizer, c);
    rc = rc < 0 ? rc : read_turns(root, c);
    rc = rc < 0 ? rc : read_vault(root, take_vault, c);
    rc = rc < 0 ? rc : make_histories(c, home);
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
    rc = conv_make_id(c->id);
    return rc < 0 ? rc : conv_save(x, tenant, principal, 0, c);
}

int conversation_import_json(struct conv_index *x, const struct conversation_home *home, const char *tenant,
                             const char *principal, const char *body, size_t size, bool take_vault,
                             char **json, struct td_error *err)
{
    struct conversation c = {0};
    json_t *root = json_loadb(body, size, JSON_REJECT_DUPLICATES, NULL);
    int rc = json_is_object(root) ? read_conversation(root, home, take_vault, &c, err)
                                  : td_fail(err, -TD_ERR_FORMAT, "this is no exported conversation");
    rc = rc < 0 ? rc : save_new(x, tenant, principal, root, &c);
    rc = rc < 0 ? rc : answer(json_pack("{s:o}", "conversation", brief(&c)), json);
    conv_free(&c);
    json_decref(root);
    return rc;
}
