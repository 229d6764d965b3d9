/* edge_turn: one request on its way through the device before and after the cloud has a part in it:
 *
 *     prepare   copy of the request -> filter (with the conversation's vault) -> history matched to stored ids -> prompt ids, block names
 *     restore   the reply's text as it streams: placeholders become values again
 *     commit    prompt + reply ids and the vault go into the conversation, under the hash of what the client saw
 *
 * prepare and commit run on the worker's thread, everything else on the loop's, never two at once. What the client sent is hashed; what the
 * model sees is filtered; both live here only, and are wiped with it. */
#ifndef TANDEM_EDGE_TURN_H
#define TANDEM_EDGE_TURN_H
#include "edge/filter.h"
#include "protocol/openai.h"
#include "store/turn.h"

#define EDGE_TENANT "local" /* of the device's own store */

struct edge_turn_env { /* what all turns share; constant */
    const struct tokenizer *tokenizer;
    enum chat_template_kind template_kind;
    struct conv_index *conversations;
    const struct filter *filter;
    uint8_t fingerprint[TD_HASH_SIZE], layout_hash[TD_HASH_SIZE];
};

struct edge_turn {
    const struct edge_turn_env *env;
    /* the request, copied */
    bool chat;
    struct chat_message *messages; /* as the client sent them */
    size_t message_count;
    char *text; /* what the messages point into; or the prompt */
    size_t text_size;
    int32_t *prompt_ids;
    size_t prompt_id_count;
    char *stops[LIMIT_API_STOPS];
    size_t stop_count;
    bool has_conversation;
    char conversation[LIMIT_NAME_SIZE + 1]; /* asked for; after prepare: what it is */
    char principal[LIMIT_NAME_SIZE + 1];
    char request_key[2 * TD_HASH_SIZE + 1]; /* "" without Idempotency-Key */
    uint8_t principal_key[32];
    uint32_t context_max;

    /* prepare's results */
    struct td_error err;
    struct chat_message *model_messages; /* filtered; owns its contents */
    struct turn turn;                    /* chat only */
    bool has_turn;
    int32_t *ids; /* the prompt; borrowed from turn or owned (completions) */
    uint32_t ids_count, known_count;
    struct kv_block_id *chain; /* [ids_count / KV_BLOCK_TOKENS], names under the principal's key */
    struct vault *vault;
    struct restorer *restorer;

    /* commit's input, the caller's until it has run */
    const int32_t *reply;
    uint32_t reply_count;

    bool forked; /* commit's result: the turn is kept, in another conversation than prepare found */
};

/* Copy what is needed of a request. 0, -TD_ERR_NOMEM. Free with edge_turn_free also after a failure. */
int edge_turn_init(struct edge_turn *t, const struct edge_turn_env *env, const struct api_request *request,
                   const char *principal);
void edge_turn_free(struct edge_turn *t);

/* principal_key, request_key and context_max are set. 0 or negative with t->err; -TD_ERR_CONTEXT: ids_count is set. */
int edge_turn_prepare(struct edge_turn *t);
/* Text of the reply as it comes, out as the client may see it (malloc'ed). flush: nothing follows. */
int edge_turn_restore(struct edge_turn *t, const char *text, size_t size, bool flush, char **out,
                      size_t *out_size);
/* The whole reply as the client saw it: stop strings cut, damaged characters replaced, placeholders restored. malloc'ed. */
int edge_turn_reply_text(struct edge_turn *t, const int32_t *ids, uint32_t count, char **out, size_t *size);
/* Store the turn. Durable on return. -TD_ERR_CONFLICT: the conversation that was asked for by name has moved on; one that was found by history is
 * forked instead. */
int edge_turn_commit(struct edge_turn *t);
/* It will not be stored, and nobody tried. */
void edge_turn_lost(struct edge_turn *t);

#endif
