/* pipeline_internal: what pipeline.c (jobs, thread), pipeline_emit.c (messages), pipeline_decode.c (tokens) and pipeline_disk.c (blocks to and from the
 * disk) share, and nobody else sees. */
#ifndef TANDEM_EDGE_PIPELINE_INTERNAL_H
#define TANDEM_EDGE_PIPELINE_INTERNAL_H
#include "edge/pipeline.h"
#include <pthread.h>

struct pipeline_job {
    struct pipeline_job *next; /* under lock: all jobs, oldest first */
    uint64_t id;
    uint8_t principal_key[32];
    uint32_t capacity;
    int32_t *ids;       /* [capacity]; the thread reads below a count that it has seen under the lock */
    uint32_t ids_count; /* under lock */
    struct pipeline_send send;      /* under lock; epoch 0: none yet */
    bool sending, filling;          /* under lock */
    uint32_t fill_layers;           /* under lock */
    bool closed, keep;              /* under lock */
    bool stuck;                     /* under lock: no pages, or the backend failed: not filled any more */
    uint32_t run, until;            /* under lock: of the decode; run 0: none, or it has ended */
    struct pipeline_decode *decode; /* constant once there is a run */

    /* The prefill thread's own. */
    struct kv_block_id *chain; /* [capacity / KV_BLOCK_TOKENS] */
    uint32_t chain_count;
    uint32_t *pages; /* [blocks of capacity] */
    uint32_t page_count;
    uint32_t position;         /* tokens [0, position) have been run, their KV is in pages */
    uint32_t depth;            /* in layers [0, depth) at least; UINT32_MAX while position is 0 */
    uint32_t sealed_next;      /* the same of sealed pieces */
    uint32_t kv_next;          /* KV of tokens below has been handed on, or is not wanted */
    uint32_t published;        /* blocks */
    uint32_t epoch;            /* that the position belongs to */
    struct pipeline_cost cost; /* of the step */
    bool no_disk;              /* the disk has been late, or wrong: the rest is computed */
    uint64_t fetch_us;         /* spent on fetching */
    uint64_t spared_us;        /* that computing what was fetched would have taken */
    uint64_t served;           /* when it was decoded last, in turns */
};

/* Replies that get a token each from one pass: the weights are read once for all. Memory for their logits is the bound. */
#define DECODES_MAX 8u
struct decode_turn { /* as it was under the lock */
    struct pipeline_job *job;
    uint32_t run, ids_count;
};

struct pipeline_run { /* tokens up to `end` through layers [0, layers) */
    uint32_t end, layers;
    float *hidden, *logits; /* of all of them, of the last one; or NULL */
    bool may_reclaim;       /* pages of jobs that only fill */
};

#define PIPELINE_SAVES_MAX 512u
struct pipeline_save { /* a block that is in the cache and not on the disk yet */
    struct kv_block_id id, parent;
    uint32_t index, layers;
};
struct pipeline_saves {
    struct pipeline_save list[PIPELINE_SAVES_MAX]; /* a ring */
    uint32_t first, count;
};

struct pipeline {
    struct pipeline_config config;
    uint32_t layers, layer_count, embd_size;
    struct kv_shape shape;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* work came, room came, or stop */
    pthread_cond_t idle;
    struct pipeline_job *jobs; /* under lock */
    size_t out_size;           /* under lock: handed on, not taken yet */
    bool stop, is_idle;        /* under lock */
    bool decodes;              /* constant: the whole model is here */

    /* The prefill thread's own. */
    float *hidden;         /* [chunk_tokens][embd_size] */
    uint16_t *key, *value; /* one piece each */
    uint8_t *piece;        /* an encoded piece */
    size_t piece_capacity;
    struct kv_codec_scratch *codec;
    float *logits; /* [DECODES_MAX][vocab], with `decodes` only, as the next */
    struct sampler_scratch *sampler;
    bool decoded_last; /* the last turn was a decode's */
    uint64_t turns;
    struct pipeline_saves saves;
    double layer_ns; /* of computing, a token and layer; 0: not measured */
};

/* ---- pipeline.c ---- */
int pipeline_compute(struct pipeline *p, struct pipeline_job *job, const struct pipeline_run *run);
/* Pages for tokens below `end`. may_reclaim: those of jobs that only fill. 0 or -TD_ERR_NOSPACE. */
int pipeline_need_pages(struct pipeline *p, struct pipeline_job *job, uint32_t end, bool may_reclaim);
/* Tokens below `end` have been run through layers [0, layers). */
void pipeline_has_run(struct pipeline *p, struct pipeline_job *job, uint32_t end, uint32_t layers);
void pipeline_drop_pages(struct pipeline *p, struct pipeline_job *job, uint32_t keep_count);
/* Take what the cache has, deep enough, of the blocks below limit_tokens; only on a block border. */
void pipeline_take_cached(struct pipeline *p, struct pipeline_job *job, uint32_t limit_tokens,
                          uint32_t layers);
uint32_t pipeline_chunk_end(const struct pipeline *p, uint32_t position, uint32_t limit);

/* ---- pipeline_decode.c ---- */
bool decode_has_work(const struct pipeline_job *job); /* under the lock, as the next */
/* Whose turn it is: the one that has waited longest, and where only a token is to be run for it, others of which that holds. */
uint32_t decode_pick(struct pipeline *p, struct decode_turn turns[DECODES_MAX]);
/* The next chunk of a job, or the next token of each. */
void decode_step(struct pipeline *p, const struct decode_turn *turns, uint32_t count);
void decode_measure(struct pipeline *p, uint32_t page);

/* ---- pipeline_emit.c ---- */
/* Rows [first_token, first_token + count) of the chunk at p->hidden (its first row is first_token) as HIDDEN messages; appended to *list. 0, -TD_ERR_FORMAT when a value
 * does not fit the type, -TD_ERR_NOMEM. */
int emit_rows(struct pipeline *p, const float *rows, uint32_t first_token, uint32_t count, uint32_t layers,
              uint8_t dtype, struct pipeline_message **list);
/* The pieces of a sealed block as they are, appended to *list. */
int emit_sealed(const struct pipeline *p, const struct store_block *block, struct pipeline_message **list);
/* Pieces of layers [0, layers) of the first token_count tokens of a block, appended to *list. */
int emit_block(struct pipeline *p, uint32_t page, uint32_t block_index, uint32_t token_count, uint32_t layers,
               uint8_t codec, struct pipeline_message **list);
void message_list_free(struct pipeline_message *list);
size_t message_list_size(const struct pipeline_message *list);

/* ---- pipeline_disk.c ---- */
/* Block `index` of the chain is in the cache now, with the job's depth: to be saved when there is time. */
void disk_note(struct pipeline *p, const struct pipeline_job *job, uint32_t index);
bool disk_has_saves(const struct pipeline *p);
void disk_save_next(struct pipeline *p);
void disk_computed(struct pipeline *p, const struct pipeline_cost *cost); /* what a step took */
/* The pieces of a sealed block, one of those up to `end` that will all be taken, appended to *list. 0, or they are not there, or not in time. */
int disk_sealed(struct pipeline *p, const struct pipeline_job *job, const uint8_t *tag, uint32_t block,
                uint32_t end, struct pipeline_message **list);
/* Bring the job's next block, below limit_tokens and this deep, from the disk into the cache. False: it is not to be had in time. */
bool disk_fetch(struct pipeline *p, struct pipeline_job *job, uint32_t limit_tokens, uint32_t layers);

#endif
