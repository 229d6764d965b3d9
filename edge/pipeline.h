/* pipeline: the prefill thread. It owns the device's backend and runs layers [0, k) over prompts, chunk by chunk, and hands the results on as
 * messages ready for the wire: HIDDEN rows first, then the KV pieces of the blocks that the chunk has filled.
 *
 * A job is one sequence of token ids: a prompt, and behind it the reply as it streams in. Work comes in three kinds:
 *     send    run the prompt through the layers of its plan's edge ranges and hand on rows and KV from the given tokens on; oldest job first
 *     decode  where the whole model is here: run what the job has through all layers and draw the tokens behind it (pipeline_decode.c); jobs in turn
 *     fill    when neither is to be done: run whole blocks that are not in the local KV yet (replies, missing depth), so that a later turn finds them; if that
 *             is wished, through all layers once the job is closed, from the first token on: rows between layers are not kept
 * Sending and decoding take turns, a chunk or a token each.
 * Ranges of sealed pieces are read from the device's disk and handed on as they lie there, before anything else of the job: nothing is computed of them.
 * What is whole goes to the device's disk before that, and a prompt's blocks come back from there before they are computed (pipeline_disk.c).
 * A job's send can be replaced at any time with a higher epoch. Either what was handed on so far is void (the link was lost) and only what was
 * computed is kept; or the plan changed further on only, and what was handed on under the epochs since then stays good.
 *
 * Depth: to run [0, k) on a token the job needs [0, k) of all before it. So k may fall from range to range for nothing; where it rises, the job starts
 * again from its first token.
 *
 * Bounds: PIPELINE_OUT_SIZE bytes handed on and not yet taken by the link, then sending pauses; PIPELINE_FILLS_MAX closed jobs that are still filled.
 * When pages run out, fills give theirs up first; a send that still gets none fails (-TD_ERR_NOSPACE) and the cloud does that prompt.
 *
 * Threads: all functions may be called from any thread, for one job from one thread at a time; the sink is called on the prefill thread. */
#ifndef TANDEM_EDGE_PIPELINE_H
#define TANDEM_EDGE_PIPELINE_H
#include "edge/local_kv.h"
#include "kernels/backend.h"
#include "kernels/sampler.h"
#include "protocol/inbox.h"
#include "protocol/plan.h"
#include "protocol/wire.h"
#include "shared/kv_seal.h"
#include "shared/tokenizer.h"

#define PIPELINE_OUT_SIZE  (32u << 20)
#define PIPELINE_FILLS_MAX 64u
/* bytes of one HIDDEN message, about: more rows become more messages */
#define PIPELINE_HIDDEN_SIZE     (256u << 10)
#define PIPELINE_HIDDEN_ROWS_MAX 256u

struct pipeline_message { /* one HIDDEN or KV_BLOCK message */
    struct pipeline_message *next;
    unsigned type;               /* FRAME_HIDDEN, FRAME_KV_BLOCK */
    uint32_t first_token, count; /* HIDDEN */
    uint32_t layer;              /* HIDDEN: k; KV_BLOCK: the piece's */
    uint32_t block_index;        /* KV_BLOCK */
    uint8_t hidden_dtype;
    bool is_value;
    uint8_t *payload; /* malloc'ed */
    size_t size;
    size_t raw_size; /* of the same values as f32 rows or f16 KV */
};
void pipeline_message_free(struct pipeline_message *m); /* one, with its payload */

enum pipeline_event_type {
    PIPELINE_MESSAGES,
    PIPELINE_SENT,
    PIPELINE_FAILED,
    PIPELINE_RAN, /* of a decode: tokens were run, none was drawn yet; its cost */
    PIPELINE_TOKEN,
    PIPELINE_DECODE_FAILED /* no more tokens come of this run: code */
};
struct pipeline_event {     /* malloc'ed; the sink's once it returned 0 */
    struct inbox_item item; /* the sink's, as `owner` */
    void *owner;
    enum pipeline_event_type type;
    uint64_t job;
    uint32_t epoch;
    struct pipeline_message *messages; /* PIPELINE_MESSAGES: a list in the order to send, the sink's too */
    struct pipeline_cost {             /* of the step that this comes from */
        uint64_t compute_us;           /* in forward() */
        uint32_t tokens, layers, position; /* 0 tokens: nothing was run */
    } cost;
    uint32_t rows_until; /* rows below have been handed on */
    uint32_t run;        /* of a decode, as the next three */
    uint32_t index;      /* of the token in the reply */
    struct sampled token;
    uint64_t token_us; /* that running the token before and drawing this one took; 0: it was not run alone */
    int code;          /* PIPELINE_FAILED: nothing more comes for this epoch */
    bool rows_do_not_fit; /* PIPELINE_FAILED: the row type cannot hold a value; f32 can */
};
void pipeline_event_free(struct pipeline_event *e);

struct pipeline;
#define DISK_PATIENCE_US UINT64_C(30000)

struct pipeline_config {
    struct backend *backend; /* taken over, also when creation fails */
    struct local_kv *kv;     /* borrowed, as long as the pipeline */
    uint32_t chunk_tokens;   /* a multiple of KV_BLOCK_TOKENS, at most the backend's rows */
    uint8_t codec_tables[2]; /* of K and V at L2 */
    /* 0: DISK_PATIENCE_US; a disk that has rested may need so long for its first answer */
    uint64_t disk_patience_us;
    bool whole;   /* blocks of closed jobs are filled through all layers, not only those of their plans */
    bool measure; /* run a block and a token of nothing first: events of job 0 tell what they cost */
    const struct tokenizer *tokenizer; /* which ids end a reply; borrowed; NULL: none does */
    uint8_t fingerprint[TD_HASH_SIZE], layout_hash[TD_HASH_SIZE];
    /* 0: taken; -TD_ERR_FULL: tried again soon; anything else: the event is dropped. */
    int (*sink)(void *ctx, struct pipeline_event *event);
    void *ctx;
};
int pipeline_create(const struct pipeline_config *config, struct pipeline **out, struct td_error *err);
void pipeline_destroy(struct pipeline *p); /* after the step in progress; open jobs become invalid */

struct pipeline_job;
struct pipeline_work {
    uint64_t id; /* comes back in events */
    uint8_t principal_key[32];
    const int32_t *ids; /* [count], copied */
    uint32_t count;
    uint32_t capacity;               /* ids with the longest reply */
    const struct kv_block_id *chain; /* [count / KV_BLOCK_TOKENS], copied */
};
/* NULL without memory. Nothing is done until pipeline_send, pipeline_fill or pipeline_append. */
struct pipeline_job *pipeline_open(struct pipeline *p, const struct pipeline_work *work);
struct pipeline_send {
    uint32_t epoch;      /* higher than any before */
    uint32_t rows_begin; /* first row to hand on */
    uint32_t kv_begin;   /* first KV to hand on, on a block border */
    /* borders of edge ranges lie on block borders, except the prompt's end */
    struct plan_range ranges[LIMIT_RANGES];
    uint32_t range_count;
    uint8_t seal[KV_SEAL_TAG_SIZE]; /* with ranges of KV_SEALED: whose */
};
/* What was handed on before is void. */
void pipeline_send(struct pipeline *p, struct pipeline_job *job, const struct pipeline_send *send);
/* Hand nothing on any more. Whole blocks are filled in idle time from now on, through so many layers. */
void pipeline_fill(struct pipeline *p, struct pipeline_job *job, uint32_t layers);
/* The job's ids from `at` on, at most as many as it has: reply tokens; beyond the capacity they are ignored. 0, or -TD_ERR_CONFLICT: it has drawn another one
 * itself, and nothing was appended. */
int pipeline_append(struct pipeline *p, struct pipeline_job *job, uint32_t at, const int32_t *ids,
                    uint32_t count);

struct pipeline_decode {
    uint32_t run;          /* comes back in events; > 0, higher than any before on this job */
    uint32_t prompt_count; /* of the job's ids; the others are reply */
    uint32_t until;        /* the job's ids are no more than this */
    bool ignore_end;
    bool reply_only; /* penalties count the reply alone, as the cloud's do that does not know the prompt */
    struct sampler_params sampling; /* the same for all runs of a job */
};
/* Draw tokens behind what the job has, each with an event, until `until`, an end token, or pipeline_decode_stop. Ends a send, and a send ends it. 0;
 * -TD_ERR_UNSUPPORTED: the whole model is not here; -TD_ERR_NOMEM. */
int pipeline_decode(struct pipeline *p, struct pipeline_job *job, const struct pipeline_decode *decode);
void pipeline_decode_until(struct pipeline *p, struct pipeline_job *job, uint32_t until);
/* events may still be on their way */
void pipeline_decode_stop(struct pipeline *p, struct pipeline_job *job);
bool pipeline_decodes(const struct pipeline *p); /* the whole model is here */

/* keep_count: the whole blocks of so many ids are still filled in idle time; 0: it ends after the step in progress. The handle is invalid afterwards. */
void pipeline_close(struct pipeline *p, struct pipeline_job *job, uint32_t keep_count);
/* Bytes of messages that the link has taken, or that were dropped: room for more. */
void pipeline_taken(struct pipeline *p, size_t size);
/* Wait until there is nothing to do; false after timeout_ms (tests). */
bool pipeline_wait_idle(struct pipeline *p, uint32_t timeout_ms);

#endif
