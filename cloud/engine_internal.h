/* engine_internal: what the files of the engine share. Nobody else includes it, except tests that drive an engine step by step under their own
 * clock.
 *
 *   engine.c          life, the thread, commands from other threads
 *   engine_open.c     open, re-open, generate, cancel, detach, finish: a sequence's life
 *   engine_admit.c    prefix look-up, who runs, pages, preemption
 *   engine_places.c   whose turn it is; what idle ones give to others
 *   engine_load.c     blocks from the store's tiers: whether to read them, and reading
 *   engine_meet.c     reading a prompt's blocks from the end while computing them from the front
 *   engine_swap.c     pages to and from host memory; blocks that a device has no page for
 *   engine_ingest.c   HIDDEN and KV pieces
 *   engine_step.c     one forward() and what comes of it
 *   engine_publish.c  finished blocks to cache and store
 *   engine_forget.c   a tenant that is erased
 *   engine_event.c    events and metrics
 *
 * Threads: everything runs on the engine thread except the functions of engine.h, which only touch what is marked `any thread`. */
#ifndef TANDEM_CLOUD_ENGINE_INTERNAL_H
#define TANDEM_CLOUD_ENGINE_INTERNAL_H
#include "cloud/loader.h"
#include "cloud/persist.h"
#include "cloud/scheduler.h"
#include "cloud/sequence.h"
#include "kernels/prefix_cache.h"
#include "shared/line.h"
#include "shared/metrics.h"
#include "shared/queue.h"
#include "shared/tokenizer.h"
#include <pthread.h>
#include <stdatomic.h>

#define ENGINE_COMMANDS_MAX  8192
#define ENGINE_GENERATIONS   8192    /* known at once: live, parked, finished */
#define ENGINE_CLOSE_WAIT_US 2000000 /* DONE waits so long for the store's acknowledgements */
/* blocks are read for so long while it is not known what computing takes */
#define ENGINE_LOAD_FLOOR_US 1000000
#define LOAD_LOSS_PERCENT    4    /* of what computing takes, is the most that reading in vain may cost … */
#define LOAD_SLACK_US        3000 /* … but so much at least */
#define LOAD_AHEAD           4 /* blocks under way for a sequence that waits for them: more might be read in vain */
#define LOAD_GRACE_BLOCKS    8 /* where reading was measured to be worth it: what so many take */
/* a step's length that prefill aims at beside decode, or while an edge sends */
#define ENGINE_STEP_TARGET_US 150000
#define ENGINE_IDLE_US        1000000
#define ENGINE_SWAP_US        200 /* pages are on their way */
#define ENGINE_ASKS_MAX       8u  /* that a device is asked for what a private prompt's plan did not bring */
/* Of all that run or wait a tenant has at most so many times, and a principal so many times, what is still free: 7/8 and 3/4 of the places for one
 * alone, and however many there are, somebody else comes in. */
#define ENGINE_TENANT_SHARE    7u
#define ENGINE_PRINCIPAL_SHARE 3u
#define ENGINE_RETRY_US        2000 /* nothing could run for want of pages that somebody is about to let go of */

struct engine_share {
    char tenant[LIMIT_NAME_SIZE + 1], principal[LIMIT_NAME_SIZE + 1];
    uint32_t count; /* never 0 */
};

enum command_type {
    COMMAND_OPEN,
    COMMAND_PATIENCE,
    COMMAND_PLAN,
    COMMAND_HIDDEN,
    COMMAND_START,
    COMMAND_CANCEL,
    COMMAND_DETACH,
    COMMAND_FORGET,
    COMMAND_DRAIN
};
struct engine_forgetting { /* its caller's, who waits */
    const char *tenant;
    struct engine_forgetting *next;
    bool done; /* under the engine's lock */
};
struct engine_command {
    enum command_type type;
    uint64_t sequence;
    union {
        struct engine_open open;
        struct {
            uint32_t rows_ms, rows_token_us, kv_ms;
        } patience;
        struct {
            uint32_t epoch, count;
            bool resumes;
            struct plan_range ranges[LIMIT_RANGES];
        } plan;
        struct {
            uint32_t epoch, layer;
            struct seq_hidden *message;
        } hidden;
        struct engine_generate generate;
        struct {
            bool finished;
            uint32_t keep_count;
        } cancel;
        struct engine_forgetting *forget;
        uint64_t drain_deadline_us;
    };
};

struct pending_block { /* finished, not yet in a persist buffer; holds a reference to its page */
    struct persist_block block;
    uint32_t page;
};

/* host memory is taken in such parts: to pin one takes 45 ms and more */
#define SWAP_SLAB_SIZE ((uint64_t)128 << 20)
#define SWAP_PAGES_MAX 64u /* kept free ahead of need, at most; on their way out at once */

struct engine_swap {
    /* Memory of the backend's host_take, [slab_pages][page] each. A thread takes it from the first shortage on, as it may take a second. */
    uint8_t **slabs;
    uint32_t slab_count, slab_pages;
    atomic_uint slabs_taken; /* the first so many are there */
    atomic_bool slabs_ended, stopping;
    pthread_t taker;
    bool has_taker;
    struct page_pool *places;    /* which pages of the slabs are free */
    struct prefix_cache *blocks; /* which block is where; NULL: there is no such memory */
    uint32_t reserve;
    int64_t ticket; /* of the pages on their way out; 0: none */
    uint32_t pages[SWAP_PAGES_MAX], count;
    void **hosts; /* [page_count], as the next: of one swap_start */
    uint32_t *list;
};

#define ENGINE_WRITES_MAX 1024u /* pieces of one pieces_write */

struct engine_writes { /* pieces for a device to decode, taken in this turn */
    struct page_piece pieces[ENGINE_WRITES_MAX];
    struct ingest_piece *owners[ENGINE_WRITES_MAX];
    uint64_t keys[ENGINE_WRITES_MAX]; /* of their sequences */
    uint32_t count;
};

struct engine_metrics {
    struct metric *running, *waiting, *parked, *pages_used, *pages_free, *pages_cached;
    struct metric *prefix_queries, *prefix_hits, *memory_hits, *memory_misses;
    struct metric *prefill, *edge_prefill, *generated, *drawn_by_device, *recomputed, *load_declined,
        *preemptions, *rejected, *persist_dropped;
    struct metric *device_pieces, *swapped_out, *swapped_in, *swap_memory;
    struct metric *first_token, *inter_token;
};

struct engine {
    struct engine_config config;
    struct seq_model model;
    uint8_t seal_key[CRYPTO_KEY_SIZE]; /* random; of ids that are only kept */
    uint32_t page_context;             /* tokens that all pages together hold */
    struct backend *backend;
    struct page_pool *pool;
    struct prefix_cache *cache;
    struct engine_swap swap;
    struct gen_table *gens;
    struct sampler_scratch *sampler;
    struct engine_metrics metrics;
    uint64_t (*clock)(void);
    pthread_t thread;
    bool threaded;

    /* any thread */
    struct queue *commands;
    struct ingest *ingest;
    atomic_bool wake_pending, stopping, draining;
    atomic_uint_fast64_t next_handle;
    atomic_uint open_count; /* sequences opened and not yet gone: running and waiting; changes under lock */
    /* of HIDDEN and pieces, everywhere between engine_hidden/engine_kv and their consumption */
    atomic_size_t staged_size;
    pthread_mutex_t lock;
    pthread_cond_t drained;    /* or a tenant forgotten */
    struct engine_stats stats; /* under lock, as are the next */
    bool is_drained;
    struct engine_share *shares; /* whose open_count is: [live_capacity], share_count of them */
    uint32_t share_count;

    /* engine thread */
    struct loader *loader; /* NULL without a store, as persist */
    struct persist *persist;
    uint16_t *block_memory; /* the buffers of these two */
    struct sequence **live; /* WAITING, LOADING, RUNNING, CLOSING; by arrival */
    uint32_t live_count, live_capacity;
    uint32_t running_count;          /* places taken: LOADING, and RUNNING that are not placeless */
    float *logits;                   /* [sequences_max][vocab], by place in the batch */
    float *hidden;                   /* [token_budget][embd] */
    uint16_t *piece_k, *piece_v;     /* one layer of one page */
    struct engine_writes *writes;    /* NULL: the CPU decodes pieces, as they come */
    struct sample_request *requests; /* [sequences_max], as the next two; NULL: the backend does not draw */
    struct sample_adjust *adjust;    /* [sequences_max][SAMPLE_ADJUST_MAX] */
    struct sampled *sampled;
    struct batch_seq *batch; /* [sequences_max], as the next three */
    struct scheduler_item *items;
    struct seq_job *jobs;
    struct sequence **picked;
    struct pending_block *pending; /* ring [page_count] */
    uint32_t pending_first, pending_count;
    uint64_t next_key, next_load_id;
    uint64_t next_turn;          /* of a tenant's prompts */
    struct line prefill_cost;    /* nanoseconds a token and layer over the position */
    double prefill_rise;         /* of it, until that is measured: model_rise */
    uint64_t prefill_rows_per_s; /* measured, smoothed; 0: not yet */
    uint32_t loads_in_flight;
    struct engine_forgetting *forgetting; /* not NULL: blocks neither come nor go */
    uint64_t load_us[TIER_COUNT];         /* a block from each tier; likewise */
    _Atomic uint64_t load_known_us
        [TIER_COUNT]; /* as told by engine_know_load, until one was measured; 0: not known either */
    uint64_t expired_us, drain_deadline_us, steps, rows;
    uint32_t parked_count;
    bool answer_due;      /* a sequence waits for what the remote tier says */
    bool short_of_pages;  /* a job could not run for want of pages in this turn */
    bool short_of_places; /* somebody was not let run in this turn, as all places are taken */
};

/* engine.c */
/* everything but the thread */
int engine_build(const struct engine_config *config, struct engine **out, struct td_error *err);
/* Commands, results, one step, events. True: call again at once; false: nothing to do for now. */
bool engine_turn(struct engine *e);

/* engine_open.c */
void engine_do_open(struct engine *e, uint64_t handle, struct engine_open *open);
void engine_do_start(struct engine *e, struct sequence *s, const struct engine_generate *g);
void engine_do_cancel(struct engine *e, struct sequence *s, bool finished, uint32_t keep_count);
void engine_do_detach(struct engine *e, struct sequence *s);
void engine_expire(struct engine *e, uint64_t now_us);
void engine_park(struct engine *e, struct sequence *s);
void engine_finish(struct engine *e, struct sequence *s, uint32_t finish);
/* the reply is whole: publish, let go of everything, DONE when persisted */
void engine_close(struct engine *e, struct sequence *s);
/* a CLOSING one: DONE if nothing is outstanding any more */
void engine_try_end(struct engine *e, struct sequence *s);
void engine_fail(struct engine *e, struct sequence *s, int code, const char *text); /* frees s */
void engine_drop(struct engine *e, struct sequence *s); /* without an event; frees s */
struct sequence *engine_find(struct engine *e, uint64_t handle);
struct sequence *engine_find_key(struct engine *e, uint64_t key);

/* engine_admit.c */
/* what OPENED says of the cache */
void engine_probe(struct engine *e, struct sequence *s, struct engine_event *opened);
void engine_admit(struct engine *e);
const struct kv_block_id *engine_cached_id(const struct sequence *s, uint32_t block);
/* the first are in their pages */
void engine_run_from(struct engine *e, struct sequence *s, uint32_t blocks);
uint32_t engine_take_page(struct engine *e, struct sequence *s);
void engine_release(struct engine *e, struct sequence *s); /* pages, and its place among those that run */
void engine_preempt(struct engine *e, struct sequence *s); /* WAITING again, to be computed from ids */

/* engine_places.c */
bool engine_same_principal(const struct sequence *a, const struct sequence *b);
void engine_join_turns(struct engine *e, struct sequence *s); /* before it is live */
/* The scheduler has granted s rows of its prompt, and its tenant another turn. */
void engine_take_turn(struct engine *e, struct sequence *s, uint64_t turn);
/* Or an idle one has it, or for s, if that is not NULL, a prompt of a tenant that has more places than its own. */
bool engine_place_is_free(const struct engine *e, const struct sequence *s);
bool engine_take_place(struct engine *e, const struct sequence *s); /* false: there is none */
/* None was free for placeless in this turn: nor is one for s, whose tenant has as many. */
bool engine_is_no_better_off(const struct sequence *s, const struct sequence *placeless);
/* Of those that wait another principal's is to come in first: it runs less, or its idle ones leave more of the pages. */
bool engine_comes_behind(const struct engine *e, const struct sequence *s);
/* Any thread: one more of this principal is to run or wait: 0, or -TD_ERR_FULL: there is no room, or what is left is for others. */
int engine_come_in(struct engine *e, const char *tenant, const char *principal);
void engine_leave(struct engine *e, const char *tenant, const char *principal);
/* One that is WAITING finds no pages: take those of an idle one whose principal has too many. False: there is none. */
bool engine_reclaim(struct engine *e, const struct sequence *waiting);

/* engine_load.c */
/* What reading so many blocks of each tier takes, several at once; 0: not known. */
uint64_t engine_load_us(const struct engine *e, const uint32_t counts[TIER_COUNT]);
static inline uint64_t engine_tier_us(const struct engine *e, enum tier_kind kind) /* a block; 0: not known */
{
    return e->load_us[kind] ? e->load_us[kind]
                            : atomic_load_explicit(&e->load_known_us[kind], memory_order_relaxed);
}
/* Is reading blocks [first, blocks) no slower than computing them? True while either is not known. */
bool engine_load_pays(const struct engine *e, uint32_t first, uint32_t blocks,
                      const uint32_t counts[TIER_COUNT]);
/* Read a block for nobody, to know what it takes now. */
void engine_load_try(struct engine *e, const struct sequence *s, const struct kv_block_id *id,
                     uint32_t block);
void engine_load_begin(struct engine *e, struct sequence *s, uint32_t first, uint32_t blocks,
                       const uint32_t counts[TIER_COUNT]);
/* To compute `count` blocks from `first` on; 0: nothing has been measured yet. */
uint64_t engine_compute_us(const struct engine *e, uint32_t first, uint32_t count);
/* Ask the loader for a block. owner: a load_id, or 0. False: no buffer is free. */
bool engine_load_ask(struct engine *e, const struct sequence *s, const struct kv_block_id *id, uint32_t block,
                     uint64_t owner);
void engine_take_loads(struct engine *e); /* what the loader has finished; deadlines; the next reads */

/* engine_meet.c */
/* Is it sooner to read blocks [first, end) from the end while computing them from the front? load_us: reading all. */
bool engine_meet_pays(const struct engine *e, const struct sequence *s, uint32_t first, uint32_t end,
                      uint64_t load_us);
void engine_meet_begin(struct engine *e, struct sequence *s, uint32_t first, uint32_t end, uint64_t load_us);
/* Reading has taken too long, with the first `blocks` here. True: it goes on from the end while the rest is computed. */
bool engine_meet_goes_on(struct engine *e, struct sequence *s, uint32_t blocks);
void engine_meet_take(struct engine *e, struct sequence *s, const struct loader_block *b);
void engine_meet_turn(struct engine *e, struct sequence *s);
void engine_meet_stop(struct sequence *s); /* what is not computed yet will be */
void engine_meet_limit(struct engine *e, struct sequence *s, struct seq_job *job);

/* engine_swap.c */
int engine_swap_init(struct engine *e); /* 0 or -TD_ERR_NOMEM */
void engine_swap_deinit(struct engine *e);
void engine_swap_take_memory(struct engine *e); /* begin to, if it has not begun */
/* Memory that whole pages are copied to and from fastest; NULL without. */
void *engine_take_host(struct engine *e, size_t size);
void engine_give_host(struct engine *e, void *memory);
/* All of a page, [layer][K|V][kv_head][token][head_dim], to or from memory of engine_take_host. 0 or a code of the backend. */
int engine_page_out(struct engine *e, uint32_t page, uint16_t *values);
int engine_page_in(struct engine *e, uint32_t page, uint16_t *values);
/* prefix_cache_alloc, but what must go for it is kept in host memory */
uint32_t engine_alloc_page(struct engine *e);
void engine_swap_turn(struct engine *e); /* keep some pages free */
/* Where host memory has the block; NULL: nowhere. Borrowed until pages are taken. */
const struct prefix_entry *engine_swapped(const struct engine *e, const struct kv_block_id *id);
/* The first `blocks`, where swapped, are wanted soon. */
void engine_swap_touch(struct engine *e, const struct sequence *s, uint32_t blocks);
/* Begin to fetch those of the first `blocks` that are swapped into their pages. Returns how many of the first blocks there will be. */
uint32_t engine_swap_in(struct engine *e, struct sequence *s, uint32_t blocks);
bool engine_swap_arrived(struct engine *e, struct sequence *s, bool wait);

/* engine_ingest.c */
void engine_do_plan(struct engine *e, struct sequence *s, uint32_t epoch, const struct plan_range *ranges,
                    uint32_t count, bool resumes);
void engine_do_hidden(struct engine *e, uint64_t handle, uint32_t epoch, uint32_t layer,
                      struct seq_hidden *message);
void engine_take_pieces(struct engine *e); /* what ingest has decoded, and pieces that wait for a page */

/* engine_step.c */
bool engine_step(struct engine *e); /* true: rows were run */

/* engine_forget.c */
void engine_do_forget(struct engine *e, struct engine_forgetting *f);
void engine_check_forget(struct engine *e); /* has what was under way ended? */

/* engine_publish.c */
void engine_publish(struct engine *e, struct sequence *s);
void engine_flush_pending(struct engine *e);
bool engine_drop_pending(struct engine *e);            /* the oldest, to free its page; false: none */
uint32_t engine_pending_pages(const struct engine *e); /* pages that dropping all of them would free */
void engine_take_acknowledgements(struct engine *e);

/* engine_event.c */
void engine_metrics_init(struct engine_metrics *m);
void engine_update_stats(struct engine *e);
void engine_emit(struct sequence *s, struct engine_event *event);
void engine_emit_tokens(struct sequence *s, uint32_t index, uint32_t count);
void engine_emit_done(struct sequence *s);
void engine_emit_need(struct sequence *s);
void engine_emit_failed(struct sequence *s, int code, const char *text, uint32_t retry_after_ms);
void engine_emit_ingested(struct engine *e, struct sequence *s); /* when there is news */
uint32_t engine_queue_tokens(const struct engine *e, const struct sequence *before);
uint32_t engine_retry_after_ms(const struct engine *e);
double engine_prefill_ns(const struct engine *e, double *slope);
uint32_t engine_layer_ns(const struct engine *e, uint32_t *slope_ns);

#endif
