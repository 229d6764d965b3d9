/* sequence: one prompt and its reply: token ids, the two chains of block ids, which layers of which positions have KV, the edge's plan and what
 * has arrived of it, and from all this the next piece of work. It knows no backend, no pool, no thread and no clock: the engine does the work.
 *
 * Positions. `high`: the forward pass has run on [0, high) for the layers that the cloud does there ([k, L) in an edge range of k layers, else
 * all). `complete` <= high: [0, complete) has KV of all layers. What lies between lacks [0, k): pieces have not come yet, or never will.
 *
 *        0 ........ complete ........ high ........ ids_count
 *        all layers | [k, L) only    | nothing yet
 *
 * Work, in the order of preference
 *   JOB_HIDDEN  rows of an edge range through [k, L): as soon as they are there, and every earlier position has [k, L)
 *   JOB_LAST    k = L: the prompt's last row, to logits
 *   JOB_IDS     from token ids through all layers: prompt, reply, and whatever the edge was to do and did not; needs complete == high
 *   JOB_REFILL  [0, k) of positions whose pieces are lost or stalled, from token ids; only when something waits for them
 * Decode is JOB_IDS of one row: the last token sampled has no KV until it is fed.
 *
 * A block whose rows were computed here, or whose pieces will not be waited for, is `closed`: late pieces for it are dropped. */
#ifndef TANDEM_CLOUD_SEQUENCE_H
#define TANDEM_CLOUD_SEQUENCE_H
#include "cloud/engine.h"
#include "cloud/ingest.h"

struct seq_model { /* what a sequence needs to know of the model; constant */
    struct kv_shape shape;
    uint32_t embd_size, vocab_count, context_max;
    enum kv_numerics numerics;
    uint8_t fingerprint[TD_HASH_SIZE], layout_hash[TD_HASH_SIZE];
};

enum seq_state {
    SEQ_WAITING, /* for a place among those that run, and pages */
    SEQ_LOADING, /* cached blocks are being read from disk */
    SEQ_RUNNING,
    SEQ_CLOSING, /* the reply is whole; the store has not acknowledged all its blocks yet */
    SEQ_PARKED,  /* detached for too long: no pages; goes on when it is opened again */
    SEQ_ENDED,   /* kept so that its reply can be fetched again */
};

struct seq_block {
    struct kv_block_id shared, own, sealed; /* the last: below sealed_count */
    uint16_t edge_layers;                   /* k of the edge range with rows in this block; 0: none */
    uint8_t edge_first, edge_count;         /* these rows, within the block */
    uint8_t fidelity;                       /* worst level of what a device sent into it */
    uint8_t numerics;                       /* of what a device sent into it; 0: nothing yet */
    bool from_device, closed;
    bool on_disk, swapped;     /* to be read; on its way from host memory */
    bool read;                 /* it came from a tier, for this admission */
    bool loaded;               /* read while blocks before it were computed: engine_meet.c */
    struct kv_quality quality; /* of a cached block */
    uint16_t missing;          /* pieces of [0, edge_layers) that have not come */
};
/* Something of these numerics went into the block. Of two kinds together the weakest may be claimed. */
static inline void sequence_mix_numerics(struct seq_block *b, uint8_t numerics)
{
    b->numerics = b->numerics == 0 ? numerics : (uint8_t)kv_numerics_mixed(b->numerics, numerics);
}

struct seq_hidden { /* one HIDDEN message, as it came */
    struct seq_hidden *next;
    uint32_t first_token, count;
    uint8_t dtype;
    uint8_t *payload;
    size_t size;
};

struct seq_kin {                  /* of all of a principal that live: engine_places.c */
    struct sequence *next;        /* the youngest of another principal */
    const struct sequence *waits; /* the oldest that is WAITING */
    struct sequence *idle;        /* the youngest that is idle and has a place */
    uint32_t idle_count, placed_count, idle_pages;
    struct sequence *crowd;      /* the youngest of its tenant, with which the tenant's are kept: */
    struct sequence *next_crowd; /* that of another tenant */
    uint32_t crowd_placed, crowd_pages;
};

struct sequence {
    /* who */
    uint64_t handle;  /* 0: nobody listens */
    uint64_t key;     /* unique for ever */
    uint64_t arrival; /* order of service; a parked sequence that comes back gets a new one */
    engine_sink sink;
    void *sink_ctx;
    struct generation *gen;
    char tenant[LIMIT_NAME_SIZE + 1], principal[LIMIT_NAME_SIZE + 1];
    uint8_t shared_key[CRYPTO_KEY_SIZE], own_key[CRYPTO_KEY_SIZE], seal_key[CRYPTO_KEY_SIZE];
    enum kv_accept accept;
    uint8_t edge_numerics; /* of the edge that is attached, or was last; enum kv_numerics */
    bool no_cache, direct;
    /* the prompt's ids are not known: they stand as -1, and its blocks have the edge's names */
    bool is_private;
    bool device_wanted; /* what comes next could only be computed from those ids */
    uint32_t asked;     /* how often the device was asked for it */
    enum seq_state state;

    /* tokens: prompt, then reply */
    int32_t *ids;    /* NULL while sealed */
    uint8_t *sealed; /* ids_count ids and a tag, while PARKED or ENDED */
    uint32_t ids_count, ids_capacity, prompt_count;
    uint32_t plan_end; /* prompt and held reply tokens at OPEN: what a plan may cover */

    /* reply */
    bool started; /* GENERATE is here */
    struct engine_generate generate;
    uint32_t reply_max;
    struct sampled *sampled; /* [reply_max] when logprobs are wanted, else NULL */
    bool finishing; /* the reply is whole; its last row is still to be fed, because it fills a block */
    uint32_t finish;

    /* KV */
    struct seq_block *blocks; /* [block_capacity] */
    uint32_t *pages;          /* [block_capacity]; PAGE_NONE: not taken yet */
    uint32_t page_count;      /* pages held */
    uint64_t *have;           /* [block_capacity][have_words]: bit layer * 2 + is_value */
    uint32_t block_capacity, have_words, chain_count, sealed_count;
    uint32_t high, complete;
    uint32_t cached_count;     /* tokens, whole blocks */
    uint32_t published;        /* blocks that the cache and the store have been told of */
    uint32_t own_from;         /* first block outside of the shared namespace; UINT32_MAX: none so far */
    struct kv_quality quality; /* worst of all blocks published or cached */
    uint32_t unpersisted;      /* blocks that the store has not acknowledged */

    /* loading */
    uint64_t load_id;                       /* of the reads in flight that still count */
    uint32_t load_next, load_end, load_cut; /* blocks: to ask for next, behind the last, first that failed */
    uint32_t load_first;                    /* the first that is to be read */
    int64_t swap_ticket;                    /* of pages on their way from host memory; 0: none */
    uint64_t load_grace_us; /* may be lost on reading where it has been measured to be worth it */
    /* from both ends: what a block took to read (LOADING: both ends are wanted); when the last one came */
    uint64_t load_each_us, load_seen_us;

    /* plan and what came of it */
    bool planned;
    uint32_t epoch, range_count;
    struct plan_range ranges[LIMIT_RANGES]; /* as the edge sent them last */
    struct plan_range record[LIMIT_RANGES]; /* below what has run: as they were then */
    uint32_t record_count;
    uint32_t ids_until; /* positions below are computed from ids, whatever the plan says */
    /* rows stayed away: from here on, in the record too, all is computed from ids; UINT32_MAX: not so */
    uint32_t left_from;
    bool may_resume; /* left, and nothing else has ended the plan: the edge may take it up again */
    bool rows_came;  /* under this plan */
    uint64_t rows_patience_us, kv_patience_us; /* as the edge wishes; 0: none, stall_us */
    uint32_t rows_patience_token_us;           /* more for each token that has not run */
    bool pieces_lost;                          /* no more pieces will come */
    uint32_t hidden_next;                      /* rows below have come, or will not */
    uint32_t plan_begin;                       /* rows below had run when the latest plan came */
    /* where [0, k) was computed here although pieces were planned; equal: nowhere */
    uint32_t refill_begin, refill_end;
    bool away; /* the socket is lost, but the edge may go on with its plan: it is waited for */
    struct seq_hidden *hidden_first, **hidden_last;
    struct ingest_piece *pieces_first, **pieces_last; /* waiting for a page */
    size_t staged_size;                               /* of all these, as they came */
    size_t unpacked_size;   /* of the pieces, as they wait: a page of zeros is a hundred bytes on the wire */
    uint32_t consumed_size; /* staged bytes that have gone since the last INGESTED */
    bool ingested_dirty;

    /* RUNNING (cloud/engine_places.c) */
    bool idle;      /* nothing could run in the last turn, and nothing of its edge has come since */
    bool placeless; /* its place among those that run went to another */

    /* any (cloud/engine_places.c) */
    uint64_t turn;             /* of its tenant's prompts: scheduler.h, as the next */
    uint64_t round;            /* of its principal's; the same of all that have not begun */
    bool begun;                /* rows of its prompt have run */
    struct sequence *youngest; /* of its principal */
    struct seq_kin kin;        /* if it is that */

    /* time, microseconds */
    uint64_t opened_us, admitted_us, first_token_us, last_token_us;
    uint64_t waiting_us;    /* since when it is WAITING */
    uint64_t upload_us;     /* last progress of PLAN, HIDDEN or GENERATE */
    uint64_t kv_us;         /* last progress of pieces */
    uint64_t blocked_us;    /* since when pieces are waited for; 0: they are not */
    uint64_t idle_since_us; /* since when data of the edge is waited for; 0: it is not */
    uint64_t deadline_us;   /* when sequence_next may answer otherwise without new data */
    uint64_t queue_us, load_us, ingest_wait_us, prefill_us;

    /* figures of DONE */
    uint32_t prefill_tokens, recomputed_tokens, cached_tokens;
    uint32_t read_tokens; /* of cached_tokens, not from memory */
    uint64_t uplink_size, uplink_raw_size;
};

enum seq_job_kind { JOB_NONE, JOB_IDS, JOB_HIDDEN, JOB_LAST, JOB_REFILL };
struct seq_job {
    enum seq_job_kind kind;
    uint32_t position, rows;
    uint32_t layer_begin, layer_end;
    bool decode; /* one row that extends a reply */
    bool logits; /* of the last row, when all `rows` are run */
};

/* Takes open->ids over on success. NULL without memory. plan_end = prompt + held tokens. */
struct sequence *sequence_create(const struct seq_model *m, struct engine_open *open, uint64_t key);
void sequence_free(struct sequence *s); /* NULL is allowed; pages must have been released */
/* Append a sampled id; extends the chains when it fills a block. */
void sequence_append(struct sequence *s, const struct seq_model *m, int32_t id);
uint32_t sequence_reply_count(const struct sequence *s);
/* Set GENERATE: reply_max and the room for logprobs. 0 or -TD_ERR_NOMEM. */
int sequence_set_generate(struct sequence *s, const struct seq_model *m, const struct engine_generate *g);
/* Ids are text. While a sequence only waits to be asked for again they are kept sealed under a key of this process, so that no scan of its memory
 * finds them. Without memory: sealing leaves them as they are, unsealing is -TD_ERR_NOMEM. */
void sequence_seal(struct sequence *s, const uint8_t key[CRYPTO_KEY_SIZE]);
int sequence_unseal(struct sequence *s, const uint8_t key[CRYPTO_KEY_SIZE]);
/* Keep the first keep_count reply tokens. */
void sequence_truncate(struct sequence *s, uint32_t keep_count);

/* ---- data of the edge: 0; -TD_ERR_PROTOCOL with the reason in err: the peer broke the rules. */
/* resumes: of an edge that knows that the rest of its prompt was left to the cloud, or left it itself, and helps again from a token on that has not run.
 * Where the cloud has got beyond that token it goes on alone (sequence_leave, under the new epoch). */
int sequence_plan(struct sequence *s, const struct seq_model *m, uint32_t epoch,
                  const struct plan_range *ranges, uint32_t count, bool resumes, struct td_error *err);
void sequence_plan_blocks(struct sequence *s); /* what the plan at hand says of blocks that are not whole */
/* Takes the payload over. Old, repeated and unwanted rows are dropped (consumed). */
int sequence_hidden(struct sequence *s, const struct seq_model *m, uint32_t epoch, uint32_t layer,
                    struct seq_hidden *message, struct td_error *err);
enum piece_verdict { PIECE_TAKE, PIECE_DROP, PIECE_REFUSE };
enum piece_verdict sequence_check_piece(const struct sequence *s, const struct ingest_piece *piece,
                                        struct td_error *err);
/* May a piece that was sealed here be used where it came: is it of these tokens, of this principal, and good enough? */
bool sequence_takes_sealed(struct sequence *s, const struct seq_model *m, const struct ingest_piece *piece);
/* The piece is in its page now. */
void sequence_take_piece(struct sequence *s, const struct ingest_piece *piece);
void sequence_stage_piece(struct sequence *s, struct ingest_piece *piece); /* no page yet: keep it */
void sequence_consume(struct sequence *s, size_t size);                    /* staged bytes have gone */
/* What the KV was and is to be made from: a plan that gives the same values again. Returns the number of ranges. */
uint32_t sequence_record(const struct sequence *s, struct plan_range out[LIMIT_RANGES]);
/* Is data of the edge still to come, rows or pieces? */
bool sequence_wants_data(const struct sequence *s, const struct seq_model *m);
/* It was started again while nobody listened; the edge will send its plan once more. */
void sequence_want_plan(struct sequence *s);
/* A private prompt: back to the last block that is whole, to wait for another plan of the edge. */
void sequence_ask_again(struct sequence *s);
/* Nothing more will come from the edge (socket lost, upload idle, preempted): the rest is computed from ids; staged data is dropped. */
void sequence_void_plan(struct sequence *s);
/* Rows have stayed away for too long: as sequence_void_plan, and in the record. */
void sequence_leave(struct sequence *s);
/* Rows of HIDDEN, and pieces, below these positions have arrived or are not wanted. */
uint32_t sequence_hidden_tokens(const struct sequence *s, const struct seq_model *m);
uint32_t sequence_kv_tokens(const struct sequence *s);

/* ---- work */
/* What can run now; rows may be cut by the caller. Sets deadline_us when it waits for the edge; device_wanted when nothing here can go on. */
struct seq_job sequence_next(struct sequence *s, const struct seq_model *m, uint64_t now_us,
                             uint64_t stall_us);
/* Decode the rows of a JOB_HIDDEN or JOB_LAST into rows[job->rows][embd]. They were checked when they came. */
int sequence_hidden_rows(const struct sequence *s, const struct seq_model *m, const struct seq_job *job,
                         float *rows);
/* job->rows rows have run. */
void sequence_advance(struct sequence *s, const struct seq_model *m, const struct seq_job *job);
/* All pages have been let go of: start again from ids (preempted, parked). */
void sequence_restart(struct sequence *s, const struct seq_model *m);
/* All pages have been let go of, and nothing was in them but what was cached: as before it was admitted. What has come is kept. */
void sequence_set_back(struct sequence *s, const struct seq_model *m);
/* The first count blocks are in their pages, read from cache or disk. */
void sequence_set_cached(struct sequence *s, uint32_t count);
/* The pass, which ends with a block, goes on behind the first count blocks: those in between were read. */
void sequence_skip(struct sequence *s, uint32_t count);
/* Does the plan leave the first count blocks to the cloud? */
bool sequence_is_own_work(const struct sequence *s, uint32_t count);

static inline uint32_t sequence_blocks(uint32_t tokens)
{
    return (tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
}

#endif
