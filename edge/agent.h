/* agent: the device's side of every request, behind the local API and behind libtandem alike. It owns the model (whole or a slice), the tokenizer, the
 * filter, the store of conversations, the prefill thread and the uplink, and leads each request through them:
 *
 *     request -> filter, history, tokens (worker) -> OPEN + PLAN + GENERATE (uplink), rows and KV (prefill thread) -> tokens to the sink -> commit (worker)
 *
 * A flight is one request under way. Its owner hears from it through its sink, on the loop's thread: started, tokens ..., then exactly one of done and
 * failed; or nothing more after agent_cancel. A lost link is a pause for it: the flight is opened again with the tokens that it holds. With
 * OFFLINE_CONTINUE it is none: the device goes on by itself until the cloud is back.
 *
 * Threads: everything here runs on the net loop's thread, except agent_create and agent_destroy, which run while the loop does not. */
#ifndef TANDEM_EDGE_AGENT_H
#define TANDEM_EDGE_AGENT_H
#include "edge/edge_turn.h"
#include "edge/planner.h"
#include "protocol/api.h"
#include "protocol/link.h"
#include "shared/kv_record.h"

#define AGENT_FLIGHTS_MAX    256u /* that somebody waits for */
#define AGENT_LEAVING_MAX    64u  /* of which the cloud is still to be told that nobody does */
#define AGENT_PRIVATE_LAYERS 8    /* private_min_layers, where nobody says otherwise */

enum agent_offline { OFFLINE_WAIT, OFFLINE_CONTINUE };

struct agent_config { /* strings are borrowed for the agent's life */
    const char *model_path;
    const char *model_name, *chat_template; /* NULL: the file's */
    const char *cloud_host;
    uint16_t cloud_port;
    const char *ca_path, *cert_path, *key_path; /* NULL: the system's authorities; no client certificate */
    bool tls;
    const char *token;
    uint32_t edge_layers; /* k, or PLANNER_AUTO */
    enum planner_local local;
    enum planner_prefer prefer;
    bool prefer_private;          /* for requests that name no preference */
    uint32_t private_min_layers;  /* of private prompts, computed here */
    double cloud_price;           /* planner.h */
    const struct kv_level *codec; /* NULL: the smallest that the model's quality record allows */
    bool codec_unchecked;         /* whatever the model's quality record says */
    uint8_t hidden_dtype;
    enum kv_accept accept; /* for requests that name none */
    uint32_t chunk_tokens; /* a multiple of KV_BLOCK_TOKENS */
    unsigned threads;      /* of the prefill backend; 0: all cores */
    uint64_t kv_memory;    /* bytes for the device's own KV */
    uint64_t kv_disk;      /* bytes of it on the disk, in data_dir; 0: none */
    bool kv_whole;         /* of all layers: computed in idle time, or with a slice fetched (fetcher.h) */
    const char *words_path;
    bool filter_pii;
    const char *data_dir; /* conversations, keys */
    uint32_t cloud_timeout_ms;
    enum agent_offline offline;
    progress_fn progress; /* of the fingerprint; NULL: none */
    void *progress_ctx;
};

struct agent;
int agent_create(const struct agent_config *config, struct net_loop *loop, struct agent **out,
                 struct td_error *err);
/* The loop does not run any more but is still there: flights end, threads are joined, what is on its way is written. */
void agent_shutdown(struct agent *a);
/* After net_loop_destroy. */
void agent_destroy(struct agent *a);

void agent_connect(struct agent *a);
/* Refuse new flights and call fn once there are none left, and the worker has done what was asked of it. */
void agent_drain(struct agent *a, void (*fn)(void *ctx), void *ctx);
/* Fail what is under way; turns that are being stored go on, and nothing else is waited for. */
void agent_end_flights(struct agent *a);
uint32_t agent_flight_count(const struct agent *a);

/* NULL while the cloud link is ready; else one line (borrowed until the next call). */
const char *agent_unhealthy(struct agent *a);
const struct tokenizer *agent_tokenizer(const struct agent *a);
const char *agent_model_name(const struct agent *a);
uint32_t agent_layers(const struct agent *a); /* k */
struct conv_index *agent_conversations(struct agent *a);
/* What histories of its user are hashed with: the key, which the caller has and wipes, and all but `text`. Any thread. -TD_ERR_AGAIN: the first WELCOME has
 * not said yet who the user is. */
struct conversation_home;
int agent_history_home(struct agent *a, struct conversation_home *home, uint8_t key[32]);
/* For what is asked of conversations: they lie on a disk. */
struct io_worker *agent_worker(struct agent *a);
struct store *agent_store(struct agent *a);

struct agent_sink {
    /* Prompt tokenised and taken by the cloud. conversation: "" for none. */
    void (*started)(void *ctx, const char *conversation, const struct api_usage *usage);
    /* New reply tokens, in order, each once. May call agent_cancel. logprobs: NULL or [count]. */
    void (*tokens)(void *ctx, const int32_t *ids, size_t count, const struct api_logprob_in *logprobs);
    void (*done)(void *ctx, unsigned finish, const struct api_usage *usage,
                 const struct api_timings *timings);
    void (*failed)(void *ctx, int code, const char *text, uint32_t retry_after_ms);
    void (*failed_context)(void *ctx, uint32_t context_max, uint32_t asked_tokens, uint32_t prompt_tokens);
    /* Before `done`: the conversation that was started with does not hold this turn: it could not be stored, or had to be kept in another. */
    void (*not_kept)(void *ctx);
};

struct flight;
/* Begin. The request is copied. idempotency_key: "" or NULL for none. Nothing is called back before this returns. */
int agent_begin(struct agent *a, const struct api_request *request, const char *principal,
                const char *idempotency_key, const struct agent_sink *sink, void *ctx, struct flight **out,
                struct td_error *err);
/* finished: the reply ended here after keep_count tokens: it is kept, and `done` follows. Else the client is gone: the cloud is told to stop, nothing is
 * kept and nothing follows; the flight is invalid afterwards. */
void agent_cancel(struct flight *f, bool finished, uint32_t keep_count);
/* The reply's text, placeholders restored; out malloc'ed. */
int agent_restore(struct flight *f, const char *text, size_t size, bool flush, char **out, size_t *out_size);

#endif
