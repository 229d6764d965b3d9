/* engine: the decode service's compute thread. It owns the backend, the page pool, the prefix cache, the generation table and every
 * sequence; other threads talk to it through one bounded command queue and get events back through a sink.
 *
 * One step: take commands; admit waiting sequences; pick decode rows and prefill chunks under the token budget (scheduler.h, pure); one forward();
 * sample; emit events; hand finished blocks to the store.
 *
 * A sequence's life:
 *   OPENED (prefix looked up, pages of cached blocks loaded) -> PREFILL (ranges as planned: from ids, or from the edge's HIDDEN rows + KV pieces)
 *   -> DECODE -> FINISHED;  any state -> CANCELLED within one step;  DECODE -> DETACHED -> PARKED (protocol/generation.h)
 *
 * Rules that the tests hold
 *   - Block ids are computed here from token ids, two chains side by side from the root (zeros): `shared` with the tenant's chain key, `own` with the principal's key.
 *     A block goes to `shared` only if all KV of its sequence up to it was computed here from token ids or read from `shared`; else to `own`. Look-up of block i tries
 *     shared (while every earlier block came from shared), then own.
 *   - A prefix hit is capped at prompt_count - 1; whole blocks only. Quality must satisfy the request's `accept`; the quality of what is computed on top is no better than what it was computed from.
 *   - Edge range with k layers: layers [k, L) run as soon as HIDDEN rows are there in order; decode needs KV of [0, k) of all earlier positions: what has not come when it is needed (stall limit) or
 *     came damaged is recomputed from the token ids; pieces outside the plan, of a wrong shape or non-finite are refused (protocol error of that stream).
 *   - KV that this node sealed and a device gives back (KV_SEALED) is taken where its name is the one that the tokens give, and its quality will do. Anything
 *     else is a miss. It goes to `own` all the same: what its values were made from need not have been the cloud's alone.
 *   - A private prompt's ids are not known here. Its device names the blocks; what would have to be computed from ids is asked of the device (ENGINE_NEED),
 *     or the request fails. Penalties see the reply alone. The blocks that the reply fills have no names, and are not kept.
 *   - No text, ids or block ids are logged. */
#ifndef TANDEM_CLOUD_ENGINE_H
#define TANDEM_CLOUD_ENGINE_H
#include "kernels/backend.h"
#include "kernels/sampler.h"
#include "protocol/generation.h"
#include "protocol/plan.h"
#include "shared/kv_seal.h"
#include "store/tier.h"

struct engine;
struct tiers; /* store/tiers.h */
struct engine_config {
    const struct model *model; /* all layers */
    struct backend *backend;   /* taken over by engine_create when it succeeds; destroyed with the engine */
    struct tiers *tiers;       /* NULL: device memory only */
    const struct tokenizer *tokenizer; /* which ids end a reply */
    uint32_t token_budget;             /* rows a step, 0: 512 */
    uint32_t sequences_max;            /* running at once, 0: 64; more wait */
    uint32_t waiting_max;              /* 0: 256; beyond: -TD_ERR_FULL (429) */
    uint32_t context_max;              /* 0: the model's */
    const struct kv_seal *seal;        /* NULL: none; pieces sealed by it are taken back */
    uint64_t swap_size; /* bytes of host memory for KV that a device has no room for; 0: none */
    /* KV pieces that make no progress for so long when they are needed are recomputed; 0: 2000 */
    uint32_t kv_stall_ms;
};

enum engine_event_type {
    ENGINE_OPENED,
    ENGINE_INGESTED,
    ENGINE_NEED,
    ENGINE_TOKENS,
    ENGINE_DONE,
    ENGINE_FAILED
};
struct engine_event { /* borrowed for the call */
    enum engine_event_type type;
    uint64_t sequence; /* handle given by engine_open */
    union {
        struct {
            bool resumed;
            uint32_t cached_tokens, cached_memory, cached_disk, reply_count, prefill_tokens_per_s,
                queue_tokens;
            uint64_t load_us;
            /* prefill: a token and layer at position 0; and more for each 1,024 positions */
            uint32_t layer_ns, layer_slope_ns;
            bool plan_wanted; /* resumed, and data of the edge is still wanted: the rest of this is set */
            uint32_t epoch, hidden_tokens, kv_tokens;
            const struct plan_range *ranges; /* what was and is to be computed from what */
            uint32_t range_count;
        } opened;
        struct {
            uint32_t epoch, hidden_tokens, kv_tokens;
            /* Ingested in tandem.proto */
            uint32_t run_tokens, plan_begin, refill_begin, refill_end, left_begin, left_end;
            uint32_t queue_tokens, layer_ns, layer_slope_ns;
            uint32_t consumed_size; /* bulk payload bytes that left the staging area since the last event */
        } ingested;
        /* a private prompt lacks what only its device can make, from this token on: another plan is waited for */
        struct {
            uint32_t epoch, first_token;
        } need;
        struct {
            uint32_t index, count;
            const int32_t *ids;
            const struct sampled *sampled; /* [count] when logprobs were asked for, else NULL */
        } tokens;
        struct {
            uint32_t finish; /* enum finish_reason */
            uint32_t prompt_tokens, completion_tokens, cached_tokens, prefill_tokens, recomputed_tokens;
            uint32_t read_tokens; /* of the cached ones, not from memory */
            uint64_t queue_us, load_us, ingest_wait_us, prefill_us, first_token_us, decode_us, uplink_size,
                uplink_raw_size;
            const int32_t *ids; /* prompt + reply: what the conversation holds now */
            uint32_t ids_count;
        } done;
        struct {
            int code;
            const char *text;
            uint32_t retry_after_ms;
        } failed;
    };
};
/* Called on the engine thread; must not block: post to the loop. */
typedef void (*engine_sink)(void *ctx, const struct engine_event *event);

struct engine_generate {
    struct sampler_params sampling;
    uint32_t token_count_max; /* 0: until the context is full */
    bool ignore_end, no_persist;
};
struct engine_open {
    char tenant[LIMIT_NAME_SIZE + 1], principal[LIMIT_NAME_SIZE + 1];
    uint8_t shared_key[CRYPTO_KEY_SIZE], own_key[CRYPTO_KEY_SIZE];
    uint8_t seal_key[CRYPTO_KEY_SIZE]; /* kv_seal_name_key; zeros: nothing is sealed */
    uint8_t request_id[GEN_REQUEST_ID_SIZE];
    uint64_t attempt;
    int32_t *ids; /* malloc'ed, taken over: prompt, then held reply tokens */
    uint32_t prompt_count, held_count;
    bool is_private; /* the prompt's ids are not known here, and stand as -1; the next two then do for them */
    /* malloc'ed, taken over: of the prompt's whole blocks, in the principal's namespace */
    struct kv_block_id *names;
    uint8_t prompt_tag[TD_HASH_SIZE];
    enum kv_accept accept;
    uint8_t edge_numerics; /* enum kv_numerics of the edge's rows and KV; 0: no edge */
    bool no_cache;
    bool resumes; /* the edge goes on with the plan of a generation that is known here */
    bool direct;  /* an app without an edge: `generate` is here and the whole prompt is one cloud range */
    struct engine_generate generate;
    engine_sink sink;
    void *sink_ctx;
};

/* starts the thread */
int engine_create(const struct engine_config *config, struct engine **out, struct td_error *err);
/* Stop taking work; running generations get until deadline_ms, then fail, those that nobody listens to go at once; blocks are handed to the store. */
void engine_drain(struct engine *e, uint32_t deadline_ms);
void engine_destroy(struct engine *e);

/* Commands, any thread. 0 or -TD_ERR_FULL / -TD_ERR_CLOSED (then taken-over memory is freed). Events for a sequence come only after its engine_open returned. */
int engine_open(struct engine *e, struct engine_open *open, uint64_t *sequence);
int engine_plan(struct engine *e, uint64_t sequence, uint32_t epoch, const struct plan_range *ranges,
                uint32_t count, bool resumes);
/* How long the plan that follows waits for rows and pieces: PLAN in tandem.proto. */
int engine_patience(struct engine *e, uint64_t sequence, uint32_t rows_ms, uint32_t rows_token_us,
                    uint32_t kv_ms);
/* payload: malloc'ed wire bytes, taken over. */
int engine_hidden(struct engine *e, uint64_t sequence, uint32_t epoch, uint32_t first_token, uint32_t count,
                  uint32_t layer, uint8_t dtype, uint8_t *payload, size_t size);
int engine_kv(struct engine *e, uint64_t sequence, uint32_t epoch, uint32_t block_index, uint8_t *piece,
              size_t size);
int engine_start(struct engine *e, uint64_t sequence, const struct engine_generate *generate); /* GENERATE */
/* finished: keep and persist the first keep_count reply tokens, then ENGINE_DONE; else drop it, no more events. */
int engine_cancel(struct engine *e, uint64_t sequence, bool finished, uint32_t keep_count);
/* its socket is gone: no more events until it is opened again */
int engine_detach(struct engine *e, uint64_t sequence);

/* A tenant is being erased: what it has here ends and is dropped. Waits, for what is under way between engine and store, too; not on the engine's
 * thread, and not while the engine is being destroyed. */
int engine_forget(struct engine *e, const char *tenant);

struct engine_stats { /* for /metrics and tests; any thread */
    uint32_t running, waiting, parked, pages_used, pages_free, pages_cached;
    uint64_t steps, rows;
    uint64_t load_us[TIER_COUNT]; /* what reading a block of each tier takes, as measured; 0: none was read */
};
void engine_stats(struct engine *e, struct engine_stats *out);
/* What reading a block of a tier takes, as far as anybody knows before the engine has read one. Any thread, at any time. */
void engine_know_load(struct engine *e, enum tier_kind kind, uint64_t us);

#endif
