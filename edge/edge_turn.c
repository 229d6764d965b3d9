/* edge_turn: see edge_turn.h. */
#include "edge/edge_turn.h"
#include "edge/local_kv.h"
#include "protocol/api_text.h"
#include "shared/crypto.h"
#include <stdio.h>
#include <stdlib.h>

static void wipe_free(void *data, size_t size)
{
    if (data)
        crypto_wipe(data, size);
    free(data);
}

/* ---- the copy of the request ---- */

/* All messages in one piece of memory, so that it is wiped in one go. */
static int copy_messages(struct edge_turn *t, const struct api_request *r)
{
    size_t size = 1;
    for (size_t i = 0; i < r->message_count; i++)
        size += strlen(r->messages[i].role) + 1 + r->messages[i].content_size;
    t->messages = calloc(r->message_count + 1, sizeof *t->messages);
    t->text = malloc(size);
    if (!t->messages || !t->text)
        return -TD_ERR_NOMEM;
    char *at = t->text;
    for (size_t i = 0; i < r->message_count; i++) {
        const struct chat_message *m = &r->messages[i];
        size_t role_size = strlen(m->role) + 1;
        memcpy(at, m->role, role_size);
        t->messages[i] = (struct chat_message){at, at + role_size, m->content_size};
        at += role_size;
        if (m->content_size)
            memcpy(at, m->content, m->content_size);
        at += m->content_size;
    }
    t->message_count = r->message_count;
    t->text_size = size;
    return 0;
}

static int copy_prompt(struct edge_turn *t, const struct api_request *r)
{
    t->text_size = r->prompt ? r->prompt_size : 0;
    t->prompt_id_count = r->prompt_id_count;
    t->text = malloc(t->text_size + 1);
    t->prompt_ids = malloc((r->prompt_id_count + 1) * sizeof *t->prompt_ids);
    if (!t->text || !t->prompt_ids)
        return -TD_ERR_NOMEM;
    if (t->text_size)
        memcpy(t->text, r->prompt, t->text_size);
    if (r->prompt_id_count)
        memcpy(t->prompt_ids, r->prompt_ids, r->prompt_id_count * sizeof *t->prompt_ids);
    return 0;
}

int edge_turn_init(struct edge_turn *t, const struct edge_turn_env *env, const struct api_request *request,
                   const char *principal)
{
    memset(t, 0, sizeof *t);
    t->env = env;
    t->chat = request->chat;
    snprintf(t->principal, sizeof t->principal, "%s", principal);
    t->has_conversation = request->chat && request->conversation;
    if (t->has_conversation)
        snprintf(t->conversation, sizeof t->conversation, "%s", request->conversation);
    for (size_t i = 0; i < request->stop_count; i++, t->stop_count++)
        if (!(t->stops[i] = strdup(request->stops[i])))
            return -TD_ERR_NOMEM;
    return t->chat ? copy_messages(t, request) : copy_prompt(t, request);
}

static void free_model_messages(struct edge_turn *t)
{
    for (size_t i = 0; t->model_messages && i < t->message_count; i++)
        wipe_free((char *)(uintptr_t)t->model_messages[i].content, t->model_messages[i].content_size);
    free(t->model_messages);
    t->model_messages = NULL;
}

static void free_results(struct edge_turn *t)
{
    free_model_messages(t);
    restorer_destroy(t->restorer);
    t->restorer = NULL;
    vault_destroy(t->vault);
    t->vault = NULL;
    if (t->has_turn)
        turn_free(&t->turn);
    else
        wipe_free(t->ids, t->ids_count * sizeof *t->ids);
    t->has_turn = false;
    t->ids = NULL;
    t->ids_count = t->known_count = 0;
    free(t->chain);
    t->chain = NULL;
}

void edge_turn_free(struct edge_turn *t)
{
    free_results(t);
    wipe_free(t->text, t->text_size);
    free(t->messages);
    wipe_free(t->prompt_ids, t->prompt_id_count * sizeof *t->prompt_ids);
    for (size_t i = 0; i < t->stop_count; i++)
        free(t->stops[i]);
    crypto_wipe(t->principal_key, sizeof t->principal_key);
    memset(t, 0, sizeof *t);
}

/* ---- prepare: the vault ---- */

/* The conversation that the request will turn out to go on with, as turn_prepare finds it: its vault is wanted before, for the filter. */
static int find_conversation(const struct edge_turn *t, char id[STORE_CONV_ID_MAX + 1])
{
    if (t->has_conversation) {
        memcpy(id, t->conversation, strlen(t->conversation) + 1);
        return 0;
    }
    if (t->message_count < 2)
        return -TD_ERR_NOTFOUND;
    uint8_t(*hashes)[TD_HASH_SIZE] = malloc(t->message_count * sizeof *hashes), previous[TD_HASH_SIZE];
    if (!hashes)
        return -TD_ERR_NOMEM;
    conv_history_start(t->principal_key, (uint8_t)t->env->template_kind, previous);
    for (size_t i = 0; i < t->message_count; i++) {
        const struct chat_message *m = &t->messages[i];
        conv_history_next(t->principal_key, previous, m->role, m->content, m->content_size, hashes[i]);
        memcpy(previous, hashes[i], TD_HASH_SIZE);
    }
    uint32_t boundary;
    int rc = conv_index_match(t->env->conversations, EDGE_TENANT, t->principal,
                              (const uint8_t(*)[TD_HASH_SIZE])hashes, t->message_count - 1, id, &boundary);
    free(hashes);
    return rc;
}

/* For want of memory, or of a disk that reads, it is not taken for one without a vault: that would lose what is in it. */
static int load_vault(struct edge_turn *t)
{
    char id[STORE_CONV_ID_MAX + 1];
    struct conversation c = {0};
    uint64_t version;
    int rc = t->chat ? find_conversation(t, id) : -TD_ERR_NOTFOUND;
    if (rc == 0)
        rc = conv_load(t->env->conversations, EDGE_TENANT, t->principal, id, &version, &c);
    if (rc == 0) {
        rc = c.vault ? vault_parse(c.vault, c.vault_size, &t->vault) : 0;
        if (rc < 0)
            t->vault = NULL; /* a damaged one is lost, not trusted: its placeholders stay as they are */
        conv_free(&c);
    }
    if (rc == -TD_ERR_NOMEM || rc == -TD_ERR_IO || rc == -TD_ERR_TIMEOUT)
        return rc;
    if (!t->vault)
        t->vault = vault_create();
    return t->vault ? 0 : -TD_ERR_NOMEM;
}

/* ---- prepare: chat ---- */

static int filter_messages(struct edge_turn *t)
{
    t->model_messages = calloc(t->message_count, sizeof *t->model_messages);
    if (!t->model_messages)
        return -TD_ERR_NOMEM;
    for (size_t i = 0; i < t->message_count; i++) {
        const struct chat_message *m = &t->messages[i];
        char *text = NULL;
        size_t size = 0;
        int rc = filter_apply(t->env->filter, t->vault, m->content, m->content_size, &text, &size, &t->err);
        if (rc < 0)
            return rc;
        t->model_messages[i] = (struct chat_message){m->role, text, size};
    }
    return 0;
}

static struct turn_input input_of(const struct edge_turn *t)
{
    return (struct turn_input){
        .tenant = EDGE_TENANT,
        .principal = t->principal,
        .principal_key = t->principal_key,
        .messages = t->messages,
        .model_messages = t->model_messages,
        .count = t->message_count,
        .conversation = t->has_conversation ? t->conversation : NULL,
        .request_key = t->request_key,
    };
}

static struct turn_config config_of(const struct edge_turn *t)
{
    struct turn_config config = {.tokenizer = t->env->tokenizer,
                                 .template_kind = t->env->template_kind,
                                 .conversations = t->env->conversations,
                                 .context_max = t->context_max};
    memcpy(config.fingerprint, t->env->fingerprint, TD_HASH_SIZE);
    return config;
}

static int prepare_chat(struct edge_turn *t)
{
    int rc = filter_messages(t);
    if (rc < 0)
        return rc;
    struct turn_input in = input_of(t);
    struct turn_config config = config_of(t);
    rc = turn_prepare(&config, &in, &t->turn, &t->err);
    if (rc < 0 && rc != -TD_ERR_CONTEXT)
        return rc;
    t->has_turn = true;
    t->ids = t->turn.ids;
    t->ids_count = t->turn.ids_count;
    t->known_count = t->turn.known_count;
    snprintf(t->conversation, sizeof t->conversation, "%s", t->turn.conversation.id);
    return rc;
}

/* ---- prepare: completions ---- */

static int tokenise(struct edge_turn *t, const char *text, size_t size)
{
    bool add_bos = tokenizer_add_bos(t->env->tokenizer);
    int64_t count = tokenizer_encode_new(t->env->tokenizer, text, size, NULL, 0, add_bos, 0, &t->ids);
    if (count < 0)
        return td_fail(&t->err, (int)count, "cannot tokenise the prompt: %s", td_status_text((int)count));
    t->ids_count = (uint32_t)count;
    return 0;
}

/* The text that prompt ids stand for; what the filter has to see. */
static int decode_prompt_ids(struct edge_turn *t)
{
    int64_t size = tokenizer_decode(t->env->tokenizer, t->prompt_ids, t->prompt_id_count, false, NULL, 0);
    if (size < 0)
        return (int)size;
    char *text = malloc((size_t)size + 1);
    if (!text)
        return -TD_ERR_NOMEM;
    tokenizer_decode(t->env->tokenizer, t->prompt_ids, t->prompt_id_count, false, text, (size_t)size);
    free(t->text);
    t->text = text;
    t->text_size = (size_t)size;
    return 0;
}

/* The client's own ids, exactly. A copy: who is behind another request is prepared once more. */
static int take_prompt_ids(struct edge_turn *t)
{
    t->ids = malloc(t->prompt_id_count * sizeof *t->ids);
    if (!t->ids)
        return -TD_ERR_NOMEM;
    memcpy(t->ids, t->prompt_ids, t->prompt_id_count * sizeof *t->ids);
    t->ids_count = (uint32_t)t->prompt_id_count;
    return 0;
}

static int prepare_completion(struct edge_turn *t)
{
    char *text = NULL;
    size_t size = 0;
    bool by_ids = t->prompt_id_count > 0;
    int rc = by_ids ? decode_prompt_ids(t) : 0;
    if (rc == 0)
        rc = filter_apply(t->env->filter, t->vault, t->text, t->text_size, &text, &size, &t->err);
    if (rc < 0)
        return rc;
    bool unchanged = size == t->text_size && memcmp(text, t->text, size) == 0;
    if (by_ids && unchanged)
        rc = take_prompt_ids(t);
    else
        rc = tokenise(t, text, size);
    wipe_free(text, size);
    if (rc == 0 && t->ids_count == 0)
        return td_fail(&t->err, -TD_ERR_ARG, "the prompt is empty");
    if (rc == 0 && t->ids_count >= t->context_max)
        return td_fail(&t->err, -TD_ERR_CONTEXT, "the prompt has %u tokens, the context %u", t->ids_count,
                       t->context_max);
    return rc;
}

/* ---- prepare ---- */

static int name_blocks(struct edge_turn *t)
{
    t->chain = malloc((t->ids_count / KV_BLOCK_TOKENS + 1) * sizeof *t->chain);
    if (!t->chain)
        return -TD_ERR_NOMEM;
    local_kv_chain(t->principal_key, t->env->fingerprint, t->env->layout_hash, NULL, t->ids, t->ids_count,
                   t->chain);
    return 0;
}

int edge_turn_prepare(struct edge_turn *t)
{
    bool asked = t->has_conversation;
    free_results(t);
    t->err = (struct td_error){0};
    if (!asked)
        t->conversation[0] = '\0';
    int rc = load_vault(t);
    if (rc == 0)
        rc = t->chat ? prepare_chat(t) : prepare_completion(t);
    if (rc == 0 && t->ids_count > LIMIT_PROMPT_TOKENS)
        rc = td_fail(&t->err, -TD_ERR_CONTEXT, "the prompt has %u tokens; at most %u are taken", t->ids_count,
                     LIMIT_PROMPT_TOKENS);
    if (rc == 0)
        rc = name_blocks(t);
    if (rc == 0 && !(t->restorer = restorer_create(t->vault)))
        rc = -TD_ERR_NOMEM;
    if (rc < 0 && !t->err.text[0])
        td_fail(&t->err, rc, "cannot prepare the prompt: %s", td_status_text(rc));
    t->err.code = rc;
    return rc;
}

/* ---- the reply ---- */

int edge_turn_restore(struct edge_turn *t, const char *text, size_t size, bool flush, char **out,
                      size_t *out_size)
{
    return restorer_push(t->restorer, text, size, flush, out, out_size);
}

/* The API's own rules for text, stop strings and damaged characters: what is hashed must be what the client was shown. */
static int shown_text(const struct edge_turn *t, const int32_t *ids, uint32_t count, struct api_text *out)
{
    const struct tokenizer *tokenizer = t->env->tokenizer;
    struct api_text_stream stream;
    api_text_stream_init(&stream, t->stops, t->stop_count,
                         t->chat && tokenizer_strips_leading_space(tokenizer));
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < count && !stream.stopped; i++) {
        struct span piece = tokenizer_piece(tokenizer, ids[i], false);
        if (!tokenizer_is_end(tokenizer, ids[i]))
            rc = api_text_stream_feed(&stream, piece.data, piece.size, false, out);
    }
    if (rc == 0)
        rc = api_text_stream_feed(&stream, NULL, 0, true, out);
    api_text_stream_deinit(&stream);
    return rc;
}

int edge_turn_reply_text(struct edge_turn *t, const int32_t *ids, uint32_t count, char **out, size_t *size)
{
    struct api_text text = {0};
    int rc = shown_text(t, ids, count, &text);
    struct restorer *restorer = rc == 0 ? restorer_create(t->vault) : NULL;
    if (rc == 0)
        rc = restorer ? restorer_push(restorer, text.data ? text.data : "", text.size, true, out, size)
                      : -TD_ERR_NOMEM;
    restorer_destroy(restorer);
    wipe_free(text.data, text.size);
    return rc;
}

/* ---- commit ---- */

/* Somebody else went on from the same history: both keep their turn, ours in a conversation of its own. */
static int commit_fork(struct edge_turn *t)
{
    struct conversation *c = &t->turn.conversation;
    int rc = conv_make_id(c->id);
    if (rc < 0)
        return rc;
    snprintf(t->conversation, sizeof t->conversation, "%s", c->id);
    t->forked = true;
    return conv_save(t->env->conversations, EDGE_TENANT, t->principal, 0, c);
}

void edge_turn_lost(struct edge_turn *t)
{
    struct turn_input in = input_of(t);
    struct turn_config config = config_of(t);
    if (t->has_turn)
        turn_lost(&config, &in, &t->turn);
}

int edge_turn_commit(struct edge_turn *t)
{
    if (!t->has_turn)
        return 0;
    char *text = NULL;
    size_t text_size = 0, vault_size = 0;
    uint8_t *vault = NULL;
    int rc = edge_turn_reply_text(t, t->reply, t->reply_count, &text, &text_size);
    if (rc == 0 && vault_count(t->vault) > 0)
        rc = vault_serialise(t->vault, &vault, &vault_size);
    if (rc == 0) {
        struct turn_input in = input_of(t);
        struct turn_config config = config_of(t);
        rc = turn_commit(&config, &in, &t->turn, t->reply, t->reply_count, text, text_size, vault,
                         (uint32_t)vault_size);
        if (rc == -TD_ERR_CONFLICT && !t->has_conversation)
            rc = commit_fork(t);
        else if (rc < 0 && rc != -TD_ERR_CONFLICT)
            edge_turn_lost(t);
    } else {
        edge_turn_lost(t);
    }
    wipe_free(vault, vault_size);
    wipe_free(text, text_size);
    return rc;
}
