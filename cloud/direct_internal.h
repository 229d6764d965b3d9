/* direct_internal: what direct.c (calls), direct_prepare.c (what is done on the worker) and direct_conversations.c share. */
#ifndef TANDEM_CLOUD_DIRECT_INTERNAL_H
#define TANDEM_CLOUD_DIRECT_INTERNAL_H
#include "cloud/direct.h"
#include "cloud/log_limit.h"
#include "shared/metrics.h"
#include "store/turn.h"

#define DIRECT_RETRY_MS 1000u

struct direct {
    struct service *service;
    struct api_server *api;
    struct turn_config turns;
    struct direct_call *calls;
    uint32_t call_count;
    uint64_t attempt; /* the highest of any call */
    struct metric *saved, *save_failures;
    struct log_limit log_failures;
};

enum direct_state { DIRECT_PREPARING, DIRECT_RUNNING, DIRECT_COMMITTING };
struct direct_call {
    struct engine_listener listener; /* first: events find the call through it */
    struct io_job job;               /* of PREPARING and COMMITTING */
    struct direct *direct;
    struct direct_call *previous, *next;
    struct api_call *api; /* NULL: the client has gone, or was answered */
    enum direct_state state;
    bool *freed; /* set if the call ends inside a callback of the API */
    uint64_t started_us;

    /* what was asked; owned copies, because the request goes away with the client */
    bool chat, conversation_named, no_cache, keyed;
    char tenant[LIMIT_NAME_SIZE + 1], principal[LIMIT_NAME_SIZE + 1];
    uint8_t shared_key[CRYPTO_KEY_SIZE], own_key[CRYPTO_KEY_SIZE];
    uint8_t request_id[GEN_REQUEST_ID_SIZE];
    char request_key[2 * GEN_REQUEST_ID_SIZE + 1]; /* "": no Idempotency-Key */
    char conversation[LIMIT_NAME_SIZE + 1];
    struct chat_message *messages;
    size_t message_count;
    char *prompt;
    size_t prompt_size;
    enum kv_accept accept;
    struct engine_generate generate;

    /* what the worker made of it */
    int status;
    struct td_error error;
    int32_t *ids; /* the prompt */
    uint32_t ids_count;
    bool has_turn;
    struct turn_input input;
    struct turn turn;

    /* the reply */
    bool finishing; /* ended by a stop string */
    uint32_t keep_count;
    int32_t *reply;
    uint32_t reply_count, finish;
    char *text; /* as the client sees it */
    size_t text_size, text_capacity;
    struct api_usage usage;
    struct api_timings timings;
};

/* ---- on the worker's thread ---- */
void direct_prepare(struct io_job *job); /* ids, or status and error */
void direct_commit(struct io_job *job);
void direct_commit_wait(struct io_job *job); /* status */
/* Deep copies of the request's texts. 0 or -TD_ERR_NOMEM. */
int direct_copy_texts(struct direct_call *c, const struct api_request *r);
void direct_free_texts(struct direct_call *c);

/* ---- conversations: the operations of struct api_ops ---- */
int direct_conversation_list(void *ctx, const struct api_identity *who, char **json);
int direct_conversation_show(void *ctx, const struct api_identity *who, const char *id, char **json);
int direct_conversation_delete(void *ctx, const struct api_identity *who, const char *id);
int direct_conversation_fork(void *ctx, const struct api_identity *who, const char *id, char **json);
int direct_conversation_pin(void *ctx, const struct api_identity *who, const char *id, bool pinned,
                            char **json);
int direct_conversation_export(void *ctx, const struct api_identity *who, const char *id, char **json);
int direct_conversation_import(void *ctx, const struct api_identity *who, const char *body, size_t size,
                               char **json, struct td_error *err);

#endif
