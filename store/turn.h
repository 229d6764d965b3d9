/* turn: from a chat request to the ids of its prompt, and from a finished reply to the conversation's new state. Shared by edge and cloud.
 *
 * The longest known history of the request (store/conversation.h) keeps its stored ids; only the messages after it are templated and
 * tokenised. With a conversation id and no matching history, the messages are appended to that conversation as they are (resume with only the new message).
 * Never truncates. */
#ifndef TANDEM_STORE_TURN_H
#define TANDEM_STORE_TURN_H
#include "store/conversation.h"
#include "shared/chat_template.h"

struct turn_config {
    const struct tokenizer *tokenizer;
    enum chat_template_kind template_kind;
    struct conv_index *conversations;
    uint8_t fingerprint[TD_HASH_SIZE];
    uint32_t context_max;
};
struct turn_input {
    const char *tenant, *principal;
    const uint8_t *principal_key;        /* keys the history hashes */
    const struct chat_message *messages; /* as the client saw them: what is hashed */
    /* what the model shall see (filtered, placeholders); same count; may equal messages */
    const struct chat_message *model_messages;
    size_t count;
    const char *conversation; /* asked-for id, or NULL: matched by history, else a new id */
    const char *request_key;  /* hex of the hashed Idempotency-Key, or "" */
};
struct turn {                         /* owns its memory */
    struct conversation conversation; /* the state that the prompt builds on (empty for a new one), id set */
    uint64_t version;                 /* for the compare-and-swap */
    /* this very request (request_key) is already the conversation's last turn: commit changes nothing */
    bool is_repeat;
    int32_t *ids; /* the whole prompt */
    uint32_t ids_count;
    uint32_t known_count;            /* leading ids taken from the conversation */
    uint8_t (*hashes)[TD_HASH_SIZE]; /* history after each message of the request */
    size_t message_count, first_new; /* messages[first_new..) were rendered */
    struct store_waiter *waiter;     /* between turn_commit_begin and turn_commit_end */
};
/* 0; -TD_ERR_NOTFOUND (an unknown id of the form that conv_make_id gives), -TD_ERR_CONFLICT (its last turn was lost; another request's key), -TD_ERR_CONTEXT (ids_count is set), -TD_ERR_ARG (roles), … */
int turn_prepare(const struct turn_config *config, const struct turn_input *in, struct turn *out,
                 struct td_error *err);
/* Append: prompt + reply ids; reply_text is the reply as the client saw it (hashed, so that a re-sent history is recognised). vault: the edge's placeholder map,
 * may be NULL. -TD_ERR_CONFLICT: someone else appended first (the loser's turn is not stored). Durable on return. */
int turn_commit(const struct turn_config *config, const struct turn_input *in, struct turn *t,
                const int32_t *reply, uint32_t reply_count, const char *reply_text, size_t reply_text_size,
                const uint8_t *vault, uint32_t vault_size);
/* Its two halves: only the second waits for the disk. It must come where the first returned 0. */
int turn_commit_begin(const struct turn_config *config, const struct turn_input *in, struct turn *t,
                      const int32_t *reply, uint32_t reply_count, const char *reply_text,
                      size_t reply_text_size, const uint8_t *vault, uint32_t vault_size);
int turn_commit_end(const struct turn_config *config, const struct turn_input *in, struct turn *t);
/* The turn is not stored, and will not be: who goes on by the conversation's name alone is told (-TD_ERR_CONFLICT of turn_prepare), until a turn of it is
 * stored again. This request under its key, or one that brings the history, is taken. Not for turn_commit's own -TD_ERR_CONFLICT. */
void turn_lost(const struct turn_config *config, const struct turn_input *in, const struct turn *t);
void turn_free(struct turn *t);

#endif
