/* agent_internal: what agent.c (parts and life), flight.c (a request's way), flight_plan.c (its plan), flight_wire.c (its frames), flight_local.c (tokens
 * that the device makes) and flight_logprobs.c (what who comes back is told of its tokens) share, and nobody else sees.
 *
 *   KEY --first WELCOME--> PREPARING --worker--> WAITING --link, OPEN sent--> OPEN --DONE--> ENDING --worker--> done
 *                              ^                   |  ^                        |                |
 *                   BEHIND ----+  same key ending  +--|-- link lost, need_ids -+                +--> TRAILING --DONE, link lost--> GONE
 *                                                                                               any --failure, cancel--> GONE
 *      the end of one that the cloud may still have, without anybody to tell it--> LEAVING --link: OPEN and CANCEL, 5 minutes--> GONE
 *
 * TRAILING, and ENDING with a stream: the device was first with the whole reply and its client has it; the cloud still comes behind, so that what it keeps of
 * the conversation is the same. GONE: its owner has heard the last of it; it stays in the list only while a job of the worker still uses it. */
#ifndef TANDEM_EDGE_AGENT_INTERNAL_H
#define TANDEM_EDGE_AGENT_INTERNAL_H
#include "edge/agent.h"
#include "edge/estimates.h"
#include "edge/fetcher.h"
#include "edge/identity.h"
#include "edge/pipeline.h"
#include "edge/planner.h"
#include "edge/uplink.h"
#include "kernels/model.h"
#include "protocol/generation.h"
#include "protocol/io_worker.h"
#include "shared/metrics.h"
#include <pthread.h>
#include <stdatomic.h>

/* a request whose cloud is lost so often, each time before the next token, may be what it is lost by */
#define FLIGHT_VAIN_MAX   16u
#define AGENT_RESULTS_MAX 4096u /* of the pipeline, on their way to the loop; then it waits */

enum flight_state {
    FLIGHT_KEY,
    FLIGHT_PREPARING,
    FLIGHT_BEHIND,
    FLIGHT_WAITING,
    FLIGHT_OPEN,
    FLIGHT_ENDING,
    FLIGHT_TRAILING,
    FLIGHT_LEAVING,
    FLIGHT_GONE
};

struct edge_metrics {
    struct metric *requests, *failures, *running, *prefill_tokens, *uplink_bytes, *uplink_raw_bytes, *resumed,
        *first_token, *generated_tokens, *local_tokens, *offline_tokens;
};

struct flight_local {       /* tokens that the device makes (flight_local.c) */
    uint32_t run, run_last; /* of the prefill thread, at hand; 0: none. The last number used */
    uint32_t made;          /* tokens that the client got from it */
    uint32_t held;          /* prompt tokens whose KV it had, when it began */
    double expects_us;      /* what it was thought to take until its first token */
    bool offline;     /* the cloud is away, or has not said anything since: the device does not wait for it */
    bool leads;       /* it was ahead when the link was lost: without a bound until it is overtaken */
    bool was_offline; /* at some time: the next three are set */
    /* the first token, and how many, that the device made without the cloud */
    uint32_t offline_from, offline_made;
    double offline_us; /* what was thought to pass until the first of them */
};

struct agent {
    struct agent_config config;
    struct net_loop *loop;
    struct gguf *file;
    struct model *model;
    struct tokenizer *tokenizer;
    struct filter *filter;
    struct store *store;
    struct conv_index *conversations;
    struct edge_turn_env env;
    char model_name[128];
    uint32_t layers; /* that the pipeline can run: k, or with the planner's choice all held; 0: no pipeline */
    uint32_t layers_wanted; /* k, or PLANNER_AUTO */
    uint32_t kv_tokens;     /* that the device's memory holds */
    uint32_t fill_layers;   /* that replies are run through in idle time: the last k that was planned */
    struct estimates estimates;
    struct kv_disk *disk;    /* NULL: none */
    struct fetcher *fetcher; /* NULL: nothing is fetched */
    struct local_kv *kv;
    struct pipeline *pipeline;
    struct inbox *inbox; /* results of the pipeline, finished jobs of the worker */
    atomic_uint results_waiting;
    struct io_worker *worker;
    struct uplink *uplink;
    uint64_t attempt;       /* the highest of any request */
    struct net_timer *tick; /* deadlines */
    char unhealthy[UPLINK_WHY_SIZE + 256];

    struct edge_identity identity; /* as the cloud said last; kept where it may be needed without the cloud */
    struct edge_identity welcomed; /* what it says of this one, while key_due */
    bool key_due;                  /* the store has not given the device's keys yet */
    uint64_t away_since_us;        /* the link is not there; 0: it is */
    bool has_key; /* a WELCOME came: the rest of this paragraph is known. As device_key under the lock */
    uint8_t principal_key[32]; /* the cloud's: names requests, the same on every device */
    /* Of this device and principal: names its own KV and hashes histories. It never leaves, and outlives the cloud's keys. The loop writes it, under the
     * lock, which others take to read it. */
    uint8_t device_key[32];
    pthread_mutex_t key_lock;
    uint32_t context_max, codec_mask, hidden_mask, features;

    struct flight *flights;
    uint32_t flight_count;
    uint64_t serial;
    bool draining, ending; /* ending: of what the worker has only turns are waited for */
    void (*drained)(void *ctx);
    void *drained_ctx;
    struct edge_metrics metrics;
};

struct kept_logprob {
    float logprob;
    uint32_t top_count;
    struct sampler_logprob top[];
};
struct kept_logprobs { /* of the reply's first tokens (flight_logprobs.c) */
    uint8_t *entries;  /* count of a kept_logprob with room for top_max; owned */
    uint32_t count, capacity, top_max;
};

struct flight {
    struct flight *next;
    struct agent *agent;
    struct io_job job; /* prepare, then commit */
    uint64_t serial;
    enum flight_state state;
    bool job_running;              /* the worker has it */
    unsigned depth;                /* calls of the sink on the stack: freed when they have returned */
    const struct agent_sink *sink; /* NULL: the owner is gone */
    void *ctx;
    uint64_t begun_us, deadline_us; /* deadline: while it waits for the cloud */

    /* the request */
    struct edge_turn turn;
    char key[LIMIT_IDEMPOTENCY_SIZE + 1];
    struct sampler_params sampling;
    bool has_seed;
    uint32_t token_count_max; /* asked for; after prepare: what fits */
    bool ignore_end, no_cache;
    bool is_private; /* the cloud is not told the prompt's ids, and so computes nothing of it from them */
    enum planner_prefer prefer;
    enum kv_accept accept;

    /* the generation */
    struct gen_receiver receiver; /* its ids: owned */
    struct kept_logprobs kept;    /* of a request with a key that asked for them */
    struct flight_local local;
    bool started;  /* the sink knows */
    bool finished; /* it ended here, after keep_count tokens */
    uint32_t keep_count;
    unsigned finish;

    /* the stream that it has now */
    uint32_t stream;     /* 0: none */
    uint32_t open_count; /* ids that OPEN gave: prompt and held reply tokens */
    /* a link was lost with its stream: the cloud keeps the generation, and has not been asked for it since */
    bool left_there;
    uint64_t retry_us;   /* the cloud wants no OPEN before */
    uint32_t open_times; /* OPENs that the cloud could take up */
    uint32_t vain_acks;  /* how often it has taken this one up since its last token */
    bool opened; /* an OPEN went out, on this stream or an earlier one: the cloud may know the generation */
    bool whole_ids;      /* the cloud does not know the conversation: send all ids */
    bool planned, acked; /* on this stream: a PLAN went out, OPEN_ACK came */
    bool cancel_sent;    /* of a reply that ended here */
    uint32_t ack_cached; /* what OPEN_ACK said */
    /* of the last plan; never reused. Rows and pieces made under an earlier one are not wanted any more */
    uint32_t epoch;
    uint32_t sent_epoch; /* of the last PLAN on this stream; 0: none */
    struct plan plan;
    /* what the cloud's KV is made from, as far as it has said; below what has run the plans of then */
    struct plan_range record[LIMIT_RANGES];
    uint32_t record_count;
    /* the record when the last plan was sent; merged when INGESTED tells where that one began */
    struct plan_range before[LIMIT_RANGES];
    uint32_t before_count;
    bool merged;
    uint32_t rows_until; /* the prefill thread has handed on rows below, or none are wanted */
    uint32_t computed;   /* it has run tokens below, or more; may be less than where wanted rows begin */
    uint64_t reconsidered_us;
    uint32_t queue_tokens; /* ahead of this one in the cloud, as it said last */
    uint64_t load_us;      /* until it has loaded what is cached, as OPEN_ACK said */
    bool patient;          /* the cloud was told how long to wait for rows */
    bool left;             /* the cloud has stopped waiting for rows, and does the rest from ids */
    bool leaving;          /* the last plan leaves the rest to the cloud, which may not have heard of it */
    struct given_up {      /* the rest of the prompt is the cloud's, but may be taken up again */
        bool now;
        struct plan plan;   /* that was left */
        uint64_t sent_size; /* bulk on the link when it was; acknowledged: the link has recovered */
        uint32_t resumes;
        uint32_t resumed_epoch; /* what the cloud says of earlier plans is of no account; 0: none */
    } given_up;
    struct api_plan shown;            /* for timings */
    Tandem__Ingested ingested;        /* the last of this stream */
    bool rows_need_f32, no_edge;      /* what went wrong before on this flight */
    struct pipeline_job *work;        /* NULL: none */
    uint32_t work_count;              /* ids that the job knows */
    struct pipeline_message *pending; /* messages that the link had no room for, in order */

    /* for usage and timings */
    bool cached_told; /* the cloud has said the next */
    uint32_t cached_tokens, cached_memory, cached_disk;
    uint32_t edge_layers, edge_tokens; /* edge_tokens: rows that were run for the cloud */
    uint64_t edge_us, first_token_us, t16_us, last_token_us, uplink_size, uplink_raw_size;
    uint64_t cloud_token_us; /* the cloud's last; 0: none yet */
    struct api_timings timings;
};

/* ---- flight.c ---- */
void flight_kick(struct flight *f); /* do what its state waits for, if that is there now; may free it */
/* Why --offline continue is of no help now, for the end of a line; "" if that is not so. */
const char *agent_lacks(const struct agent *a);
/* The sink's last call. The flight is gone afterwards. */
void flight_fail(struct flight *f, int code, const char *text, uint32_t retry_after_ms);
/* The reply is whole: commit, then `done`. */
void flight_finish(struct flight *f, unsigned finish);
/* `started`, once; new reply tokens. False: the sink gave the flight up, it is gone. */
bool flight_start_sink(struct flight *f);
bool flight_deliver(struct flight *f, const int32_t *ids, uint32_t count,
                    const struct api_logprob_in *logprobs);
/* The reply is whole here, and the cloud is behind: it may come after. */
bool flight_trails(const struct flight *f);
void flight_end_trail(struct flight *f); /* it need not, or cannot, any more; may free it */
bool flight_make_room(struct agent *a);  /* the oldest trailing one gives its stream up; false: none does */
void flight_check_deadline(struct flight *f, uint64_t now_us);
/* Its stream is gone, or to go: wait for the link, open it again as a higher attempt. */
void flight_wait_again(struct flight *f);
void flight_lost(struct flight *f); /* the link was lost */
void flight_free(struct flight *f); /* whatever its state; shutdown only */

/* ---- flight_plan.c ---- */
/* bytes of the pipeline's that the link has, or nobody wants */
void plan_taken(struct agent *a, size_t size);
/* What is believed now, of no request in particular. */
void plan_fill_model(const struct agent *a, struct plan_model *m);
void plan_open_work(struct flight *f); /* a job of the prefill thread, if there is none and there can be */
/* The rows and pieces that are still wanted end here; what was computed stays with the job. */
void plan_stop(struct flight *f);
/* Plan with what is known now, tell the cloud, set the prefill thread to work. */
int plan_again(struct flight *f);
/* The cloud has the generation and waits for the rest of its prompt: the plan that it names goes on. */
int plan_go_on(struct flight *f, const Tandem__OpenAck *m);
/* plan_again or plan_go_on did not succeed: wait for the link, or end a private prompt that this device cannot do its part of. It may be gone then. */
void plan_failed(struct flight *f, int code);
/* Does the plan that went out with OPEN still do, now that the answer is here? */
bool plan_fits_ack(struct flight *f);
void plan_settle(struct flight *f); /* INGESTED has come */
/* And says that the cloud waits for rows no longer: what is still to be sent is not wanted. */
void plan_left(struct flight *f);
/* Go on, or leave the rest to the cloud? False: there is nothing to be thought over any more. */
bool plan_reconsider(struct flight *f, uint64_t now_us);

/* ---- flight_wire.c ---- */
int wire_send_open(struct flight *f); /* OPEN alone; 0: f->stream is there */
int wire_try_open(struct flight *f);  /* 0: opened; -TD_ERR_FULL, -TD_ERR_CLOSED: not now */
int wire_frame(struct flight *f, const struct wire_frame *frame);
void wire_pipeline_event(struct flight *f, struct pipeline_event *e); /* takes its messages, not e */
void wire_flush(struct flight *f);        /* pending messages, as far as there is room */
void wire_stream_ended(struct flight *f); /* the cloud has ended it */
void wire_leave_stream(struct flight *f); /* give it up (the cloud is told, if it does not know) */
/* Reply tokens for the local KV; unless `all`, only when they complete a block. */
void wire_feed_pipeline(struct flight *f, bool all);
void wire_close_work(struct flight *f, bool keep);

/* ---- flight_local.c ---- */
/* May the device make tokens of this reply? And what of its time is others'. */
void local_fill_state(const struct flight *f, struct planner_state *s);
void local_start(struct flight *f);
void local_stop(struct flight *f);
/* The cloud has confirmed tokens, or, with `overtaken`, is ahead. */
void local_follow(struct flight *f, bool overtaken);
void local_event(struct flight *f, const struct pipeline_event *e); /* may end the flight */
/* The cloud is away, and the device may go on by itself. True: it does, or the reply is whole, and f may be gone. */
bool local_offline(struct flight *f, uint64_t now_us);
void local_lost(struct flight *f); /* the stream has ended, perhaps with the link */
void local_back(struct flight *f); /* a stream is open again */
/* The cloud says another token than the device did: open again behind those that the client has. */
void local_diverged(struct flight *f);
int local_trailing_frame(struct flight *f, const struct wire_frame *frame); /* of a flight that trails */

/* ---- flight_logprobs.c ---- */
/* ids, which lie in the receiver, are handed on with these; those that are new are kept. NULL: nothing is known of them. */
void logprobs_keep(struct flight *f, const int32_t *ids, uint32_t count,
                   const struct api_logprob_in *logprobs);
/* All tokens that are held, with what is kept of them. False: as flight_deliver. */
bool logprobs_deliver_held(struct flight *f);
void logprobs_free(struct kept_logprobs *k);

/* ---- agent.c ---- */
void agent_look_at_link(struct agent *a); /* take its figures into the estimates */
/* A flight with this request id that has got beyond its preparation. */
struct flight *agent_find_request(struct agent *a, const struct flight *except,
                                  const uint8_t request_id[GEN_REQUEST_ID_SIZE]);
void agent_remove(struct agent *a, struct flight *f); /* out of the list */
void agent_count_running(struct agent *a); /* for the metric, when the list or a state has changed */

#endif
