/* engine: life, the thread, and the commands of other threads. engine_internal.h lists the other files.
 *
 * Commands go through one bounded queue; KV pieces take the way through ingest, which decodes them on its own thread. Whoever has news for the
 * engine thread (ingest, loader, persist) wakes it by a token in the same queue; if the queue is full the engine is awake anyway. */
#include "cloud/engine_internal.h"
#include "kernels/kv_layout.h"
#include "shared/paced.h"
#include <stdlib.h>
#include <time.h>

#define TOKEN_BUDGET_DEFAULT 512u
#define SEQUENCES_DEFAULT    64u
#define WAITING_DEFAULT      256u
#define KV_STALL_MS_DEFAULT  2000u

/* --- life ----------------------------------------------------------------------------------------- */

static void wake(void *ctx)
{
    struct engine *e = ctx;
    if (atomic_exchange(&e->wake_pending, true))
        return;
    if (queue_push(e->commands, &e->wake_pending) < 0)
        atomic_store(&e->wake_pending, false);
}

static int check_config(const struct engine_config *c, struct td_error *err)
{
    if (!c->model || !c->backend || c->backend->layers_paged != c->model->params.layer_count)
        return td_fail(
            err, -TD_ERR_ARG, "cannot start the engine: it needs the whole model, %u of %u layers are here",
            c->backend ? c->backend->layers_paged : 0, c->model ? c->model->params.layer_count : 0);
    if (c->token_budget > BATCH_ROWS_MAX || c->sequences_max > BATCH_SEQS_MAX)
        return td_fail(err, -TD_ERR_ARG,
                       "cannot start the engine: a step takes at most %u rows of %u sequences",
                       BATCH_ROWS_MAX, BATCH_SEQS_MAX);
    return 0;
}

static void set_limits(struct engine *e)
{
    struct engine_config *c = &e->config;
    const struct model_params *p = &c->model->params;
    c->token_budget = c->token_budget ? c->token_budget : TOKEN_BUDGET_DEFAULT;
    c->sequences_max = TD_MIN(c->sequences_max ? c->sequences_max : SEQUENCES_DEFAULT, c->token_budget);
    c->waiting_max = c->waiting_max ? c->waiting_max : WAITING_DEFAULT;
    c->kv_stall_ms = c->kv_stall_ms ? c->kv_stall_ms : KV_STALL_MS_DEFAULT;
    uint32_t context = TD_MIN(p->context_max, LIMIT_PROMPT_TOKENS);
    c->context_max = c->context_max ? TD_MIN(c->context_max, context) : context;
    uint64_t page_tokens = (uint64_t)e->backend->page_count * KV_BLOCK_TOKENS;
    e->page_context = (uint32_t)TD_MIN(page_tokens, (uint64_t)UINT32_MAX);
    e->model = (struct seq_model){.shape = model_kv_shape(c->model),
                                  .embd_size = p->embd_size,
                                  .vocab_count = p->vocab_count,
                                  .context_max = TD_MIN(c->context_max, e->page_context),
                                  .numerics = e->backend->ops->numerics};
    memcpy(e->model.fingerprint, c->model->fingerprint, TD_HASH_SIZE);
    model_layout_hash(c->model, e->model.layout_hash);
}

/* Everything that a step needs is taken here. */
static bool take_memory(struct engine *e)
{
    const struct engine_config *c = &e->config;
    size_t sequences = c->sequences_max, layer_values = kv_piece_values(&e->model.shape, KV_BLOCK_TOKENS);
    e->live_capacity = c->sequences_max + c->waiting_max + 1;
    e->live = calloc(e->live_capacity, sizeof *e->live);
    e->shares = calloc(e->live_capacity, sizeof *e->shares);
    e->logits = calloc(sequences * e->model.vocab_count, sizeof *e->logits);
    e->hidden = calloc((size_t)c->token_budget * e->model.embd_size, sizeof *e->hidden);
    e->piece_k = calloc(layer_values, sizeof *e->piece_k);
    e->piece_v = calloc(layer_values, sizeof *e->piece_v);
    if (e->backend->ops->pieces_write) {
        e->writes = calloc(1, sizeof *e->writes);
        if (!e->writes)
            return false;
    }
    if (e->backend->ops->samples) {
        e->requests = calloc(sequences, sizeof *e->requests);
        e->adjust = calloc(sequences * SAMPLE_ADJUST_MAX, sizeof *e->adjust);
        e->sampled = calloc(sequences, sizeof *e->sampled);
        if (!e->requests || !e->adjust || !e->sampled)
            return false;
    }
    e->batch = calloc(sequences, sizeof *e->batch);
    e->items = calloc(sequences, sizeof *e->items);
    e->jobs = calloc(sequences, sizeof *e->jobs);
    e->picked = calloc(sequences, sizeof *e->picked);
    e->pending = calloc(e->backend->page_count, sizeof *e->pending);
    e->sampler = sampler_scratch_create(e->model.vocab_count);
    e->gens = gen_table_create(ENGINE_GENERATIONS);
    e->pool = page_pool_create(e->backend->page_count);
    e->cache = e->pool ? prefix_cache_create(e->pool) : NULL;
    e->commands = queue_create(ENGINE_COMMANDS_MAX);
    return e->live && e->shares && e->logits && e->hidden && e->piece_k && e->piece_v && e->batch &&
           e->items && e->jobs && e->picked && e->pending && e->sampler && e->gens && e->cache && e->commands;
}

static bool start_helpers(struct engine *e)
{
    e->ingest = ingest_create(&e->model.shape, e->writes != NULL, e->config.seal, wake, e);
    if (!e->ingest || !e->config.tiers)
        return e->ingest != NULL;
    size_t block = kv_piece_values(&e->model.shape, KV_BLOCK_TOKENS) * 2 * e->model.shape.layer_count;
    e->block_memory =
        engine_take_host(e, (LOADER_BUFFERS + PERSIST_BUFFERS) * block * sizeof *e->block_memory);
    if (!e->block_memory)
        return false;
    e->loader = loader_create(e->config.tiers, &e->model.shape, e->block_memory, wake, e);
    e->persist =
        persist_create(e->config.tiers, &e->model.shape, e->block_memory + LOADER_BUFFERS * block, wake, e);
    if (e->loader)
        tiers_set_wake(e->config.tiers, wake, e);
    return e->loader && e->persist;
}

static void free_command(struct engine_command *c)
{
    if (c->type == COMMAND_OPEN) {
        if (c->open.ids)
            crypto_wipe(c->open.ids,
                        ((size_t)c->open.prompt_count + c->open.held_count) * sizeof *c->open.ids);
        free(c->open.ids);
        free(c->open.names);
        crypto_wipe(&c->open, sizeof c->open); /* keys */
    }
    if (c->type == COMMAND_HIDDEN && c->hidden.message) {
        free(c->hidden.message->payload);
        free(c->hidden.message);
    }
    free(c);
}

static void drop_commands(struct engine *e)
{
    for (void *item; e->commands && (item = queue_pop(e->commands, 0));)
        if (item != &e->wake_pending)
            free_command(item);
}

static void forget_generation(void *ctx, struct generation *g)
{
    (void)ctx;
    sequence_free(g->owner);
}

/* The backend is the caller's again. */
static void free_all_but_backend(struct engine *e)
{
    if (e->loader)
        tiers_set_wake(e->config.tiers, NULL, NULL);
    loader_destroy(e->loader);
    ingest_destroy(e->ingest);
    while (e->persist && e->pending_count > 0) { /* let the encoder finish: there is always a next buffer */
        engine_flush_pending(e);
        engine_take_acknowledgements(e);
        if (e->pending_count > 0)
            queue_pop(e->commands, ENGINE_RETRY_US);
        atomic_store(&e->wake_pending, false);
    }
    persist_destroy(e->persist);
    while (e->live_count > 0)
        engine_drop(e, e->live[0]);
    if (e->gens)
        gen_table_expire(e->gens, UINT64_MAX, forget_generation, e);
    gen_table_destroy(e->gens);
    drop_commands(e);
    engine_swap_deinit(e);
    engine_give_host(e, e->block_memory);
    prefix_cache_destroy(e->cache);
    page_pool_destroy(e->pool);
    sampler_scratch_destroy(e->sampler);
    queue_destroy(e->commands);
    void *memory[] = {e->live,    e->shares, e->logits,   e->hidden, e->piece_k,
                      e->piece_v, e->writes, e->requests, e->adjust, e->sampled,
                      e->batch,   e->items,  e->jobs,     e->picked, e->pending};
    for (size_t i = 0; i < TD_COUNT(memory); i++)
        free(memory[i]);
    pthread_cond_destroy(&e->drained);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

int engine_build(const struct engine_config *config, struct engine **out, struct td_error *err)
{
    *out = NULL;
    int rc = check_config(config, err);
    if (rc < 0)
        return rc;
    struct engine *e = calloc(1, sizeof *e);
    if (!e)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the engine: out of memory");
    e->config = *config;
    e->backend = config->backend;
    e->clock = clock_mono_us;
    e->prefill_rise = paced_is_on() ? 0 : model_rise(&config->model->params);
    atomic_store(&e->next_handle, 1);
    e->next_key = e->next_load_id = 1;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->drained, NULL);
    set_limits(e);
    engine_metrics_init(&e->metrics);
    if (crypto_random(e->seal_key, sizeof e->seal_key) < 0 || !take_memory(e) || engine_swap_init(e) < 0 ||
        !start_helpers(e)) {
        free_all_but_backend(e);
        return td_fail(err, -TD_ERR_NOMEM,
                       "cannot start the engine: no memory for steps of %u rows and %u sequences; lower them",
                       config->token_budget, config->sequences_max);
    }
    engine_update_stats(e);
    *out = e;
    return 0;
}

/* --- the loop ------------------------------------------------------------------------------------- */

static void run_command(struct engine *e, struct engine_command *c)
{
    struct sequence *s = c->sequence ? engine_find(e, c->sequence) : NULL;
    switch (c->type) {
    case COMMAND_OPEN:
        engine_do_open(e, c->sequence, &c->open);
        break;
    case COMMAND_HIDDEN:
        engine_do_hidden(e, c->sequence, c->hidden.epoch, c->hidden.layer, c->hidden.message);
        c->hidden.message = NULL;
        break;
    case COMMAND_PATIENCE:
        if (s) {
            s->rows_patience_us = c->patience.rows_ms * UINT64_C(1000);
            s->rows_patience_token_us = c->patience.rows_token_us;
            s->kv_patience_us = c->patience.kv_ms * UINT64_C(1000);
        }
        break;
    case COMMAND_PLAN:
        if (s)
            engine_do_plan(e, s, c->plan.epoch, c->plan.ranges, c->plan.count, c->plan.resumes);
        break;
    case COMMAND_START:
        if (s)
            engine_do_start(e, s, &c->generate);
        break;
    case COMMAND_CANCEL:
        if (s)
            engine_do_cancel(e, s, c->cancel.finished, c->cancel.keep_count);
        break;
    case COMMAND_DETACH:
        if (s)
            engine_do_detach(e, s);
        break;
    case COMMAND_FORGET:
        engine_do_forget(e, c->forget);
        break;
    case COMMAND_DRAIN:
        e->drain_deadline_us = c->drain_deadline_us;
        break;
    }
    free_command(c);
}

static void take_item(struct engine *e, void *item)
{
    if (item == &e->wake_pending)
        atomic_store(&e->wake_pending, false);
    else if (item)
        run_command(e, item);
}

/* Whoever would come back for them is refused; what they wait for of their edge, a plan or rows, does not come any more. */
static void drop_detached(struct engine *e)
{
    for (uint32_t i = e->live_count; i-- > 0;) {
        struct sequence *s = e->live[i];
        if (s->handle == 0 && s->state != SEQ_CLOSING && !s->finishing)
            engine_drop(e, s);
    }
}

/* Draining: what still runs at the deadline fails with a reason that says "elsewhere"; then whoever waits is told. */
static void check_drain(struct engine *e)
{
    if (e->drain_deadline_us == 0)
        return;
    drop_detached(e);
    if (e->clock() >= e->drain_deadline_us)
        while (e->live_count > 0) {
            struct sequence *s = e->live[0];
            if (s->state == SEQ_CLOSING) {
                s->unpersisted = 0;
                engine_try_end(e, s);
            } else {
                engine_fail(e, s, -TD_ERR_CLOSED, "the node is shutting down; try again elsewhere or later");
            }
        }
    if (e->live_count > 0 || e->pending_count > 0)
        return;
    pthread_mutex_lock(&e->lock);
    e->is_drained = true;
    pthread_cond_broadcast(&e->drained);
    pthread_mutex_unlock(&e->lock);
}

static void finish_turn(struct engine *e)
{
    engine_check_forget(e);
    engine_flush_pending(e);
    for (uint32_t i = e->live_count; i-- > 0;) {
        struct sequence *s = e->live[i];
        engine_emit_ingested(e, s);
        if (s->state == SEQ_CLOSING)
            engine_try_end(e, s);
    }
    check_drain(e);
    engine_update_stats(e);
}

bool engine_turn(struct engine *e)
{
    ingest_gather(e->ingest); /* before the commands: see ingest.h */
    for (void *item; (item = queue_pop(e->commands, 0));)
        take_item(e, item);
    engine_take_acknowledgements(e);
    uint64_t now = e->clock();
    if (now - e->expired_us >= ENGINE_IDLE_US) {
        engine_expire(e, now);
        e->expired_us = now;
    }
    e->short_of_pages = false;
    engine_swap_turn(e);
    engine_admit(e);
    engine_take_loads(e); /* behind admission: blocks are asked for at once */
    uint32_t running = e->running_count;
    engine_take_pieces(e);
    bool ran = engine_step(e);
    finish_turn(e);
    return ran || ingest_has_more(e->ingest) || (e->short_of_places && engine_place_is_free(e, NULL)) ||
           e->running_count < running; /* somebody left: who waits may have its place */
}

/* How long the thread may sleep when there is nothing to do. */
static uint64_t wait_us(const struct engine *e)
{
    bool soon = e->short_of_pages || e->answer_due || e->swap.ticket;
    uint64_t now = e->clock(), wait = soon ? ENGINE_RETRY_US : ENGINE_IDLE_US;
    for (uint32_t i = 0; i < e->live_count; i++) {
        const struct sequence *s = e->live[i];
        uint64_t at = s->state == SEQ_WAITING ? UINT64_MAX : s->deadline_us;
        wait = TD_MIN(wait, at > now ? at - now : 0);
        if (s->swap_ticket)
            wait = TD_MIN(wait, (uint64_t)ENGINE_SWAP_US);
    }
    if (e->drain_deadline_us)
        wait = TD_MIN(wait, e->drain_deadline_us > now ? e->drain_deadline_us - now : 0);
    return TD_MAX(wait, (uint64_t)100); /* a deadline that has just passed is no reason to spin */
}

/* Memory that the next requests will need, while there are none. False: there is enough. */
static bool take_ahead(struct engine *e)
{
    const struct backend_ops *ops = e->backend->ops;
    return e->live_count == 0 && ops->pages_ahead &&
           ops->pages_ahead(e->backend, page_pool_used_until(e->pool));
}

static void *engine_main(void *arg)
{
    struct engine *e = arg;
    while (!atomic_load(&e->stopping))
        if (!engine_turn(e) && !take_ahead(e))
            take_item(e, queue_pop(e->commands, wait_us(e)));
    return NULL;
}

int engine_create(const struct engine_config *config, struct engine **out, struct td_error *err)
{
    int rc = engine_build(config, out, err);
    if (rc < 0)
        return rc;
    struct engine *e = *out;
    if (pthread_create(&e->thread, NULL, engine_main, e) != 0) {
        free_all_but_backend(e);
        *out = NULL;
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the engine: no thread can be made");
    }
    e->threaded = true;
    return 0;
}

void engine_drain(struct engine *e, uint32_t deadline_ms)
{
    atomic_store(&e->draining, true);
    struct engine_command *c = calloc(1, sizeof *c);
    if (!c)
        return;
    c->type = COMMAND_DRAIN;
    c->drain_deadline_us = TD_MAX(e->clock() + deadline_ms * UINT64_C(1000), UINT64_C(1));
    while (queue_push(e->commands, c) == -TD_ERR_FULL) /* full of commands that the engine is taking out */
        nanosleep(&(struct timespec){.tv_nsec = ENGINE_RETRY_US * 1000}, NULL);
    pthread_mutex_lock(&e->lock);
    while (!e->is_drained)
        pthread_cond_wait(&e->drained, &e->lock);
    pthread_mutex_unlock(&e->lock);
}

void engine_destroy(struct engine *e)
{
    if (!e)
        return;
    atomic_store(&e->stopping, true);
    atomic_store(&e->draining, true);
    wake(e);
    if (e->threaded)
        pthread_join(e->thread, NULL);
    struct backend *backend = e->backend;
    free_all_but_backend(e);
    backend->ops->destroy(backend);
}

/* --- commands, any thread ------------------------------------------------------------------------- */

static int push(struct engine *e, struct engine_command *c)
{
    int rc = queue_push(e->commands, c);
    if (rc < 0)
        free_command(c);
    return rc;
}

static struct engine_command *new_command(enum command_type type, uint64_t sequence)
{
    struct engine_command *c = calloc(1, sizeof *c);
    if (c) {
        c->type = type;
        c->sequence = sequence;
    }
    return c;
}

int engine_open(struct engine *e, struct engine_open *open, uint64_t *sequence)
{
    int rc = atomic_load(&e->draining) ? -TD_ERR_CLOSED : engine_come_in(e, open->tenant, open->principal);
    struct engine_command *c = rc == 0 ? new_command(COMMAND_OPEN, 0) : NULL;
    if (!c) {
        if (rc == 0)
            engine_leave(e, open->tenant, open->principal);
        crypto_wipe(open->ids, ((size_t)open->prompt_count + open->held_count) * sizeof *open->ids);
        free(open->ids);
        free(open->names);
        open->ids = NULL;
        open->names = NULL;
        return rc < 0 ? rc : -TD_ERR_FULL;
    }
    c->open = *open;
    open->ids = NULL;
    open->names = NULL;
    *sequence = c->sequence = atomic_fetch_add(&e->next_handle, 1); /* before the first event can come */
    rc = push(e, c);
    if (rc < 0)
        engine_leave(e, open->tenant, open->principal);
    return rc;
}

int engine_patience(struct engine *e, uint64_t sequence, uint32_t rows_ms, uint32_t rows_token_us,
                    uint32_t kv_ms)
{
    struct engine_command *c = new_command(COMMAND_PATIENCE, sequence);
    if (!c)
        return -TD_ERR_FULL;
    c->patience.rows_ms = rows_ms;
    c->patience.rows_token_us = rows_token_us;
    c->patience.kv_ms = kv_ms;
    return push(e, c);
}

int engine_plan(struct engine *e, uint64_t sequence, uint32_t epoch, const struct plan_range *ranges,
                uint32_t count, bool resumes)
{
    struct engine_command *c = new_command(COMMAND_PLAN, sequence);
    if (!c)
        return -TD_ERR_FULL;
    c->plan.epoch = epoch;
    c->plan.resumes = resumes;
    c->plan.count = count; /* too many are refused by the sequence, with its words */
    memcpy(c->plan.ranges, ranges, TD_MIN(count, LIMIT_RANGES) * sizeof *ranges);
    return push(e, c);
}

/* Room in the node's staging area for so many bytes more? They are given back when the message is consumed. */
static bool stage(struct engine *e, size_t size)
{
    if (atomic_fetch_add(&e->staged_size, size) + size <= LIMIT_STAGED_SIZE)
        return true;
    atomic_fetch_sub(&e->staged_size, size);
    return false;
}

int engine_hidden(struct engine *e, uint64_t sequence, uint32_t epoch, uint32_t first_token, uint32_t count,
                  uint32_t layer, uint8_t dtype, uint8_t *payload, size_t size)
{
    struct engine_command *c = new_command(COMMAND_HIDDEN, sequence);
    struct seq_hidden *message = calloc(1, sizeof *message);
    if (!c || !message || !stage(e, size)) {
        free(c);
        free(message);
        free(payload);
        return -TD_ERR_FULL;
    }
    *message = (struct seq_hidden){
        .first_token = first_token, .count = count, .dtype = dtype, .payload = payload, .size = size};
    c->hidden.epoch = epoch;
    c->hidden.layer = layer;
    c->hidden.message = message;
    int rc = push(e, c);
    if (rc < 0)
        atomic_fetch_sub(&e->staged_size, size);
    return rc;
}

int engine_kv(struct engine *e, uint64_t sequence, uint32_t epoch, uint32_t block_index, uint8_t *piece,
              size_t size)
{
    if (!stage(e, size)) {
        free(piece);
        return -TD_ERR_FULL;
    }
    struct ingest_piece *p = ingest_piece_create(sequence, epoch, block_index, piece, size);
    int rc = p ? ingest_push(e->ingest, p) : -TD_ERR_FULL;
    if (rc < 0) {
        ingest_piece_free(p);
        atomic_fetch_sub(&e->staged_size, size);
    }
    return rc;
}

int engine_start(struct engine *e, uint64_t sequence, const struct engine_generate *generate)
{
    struct engine_command *c = new_command(COMMAND_START, sequence);
    if (!c)
        return -TD_ERR_FULL;
    c->generate = *generate;
    return push(e, c);
}

int engine_cancel(struct engine *e, uint64_t sequence, bool finished, uint32_t keep_count)
{
    struct engine_command *c = new_command(COMMAND_CANCEL, sequence);
    if (!c)
        return -TD_ERR_FULL;
    c->cancel.finished = finished;
    c->cancel.keep_count = keep_count;
    return push(e, c);
}

int engine_detach(struct engine *e, uint64_t sequence)
{
    struct engine_command *c = new_command(COMMAND_DETACH, sequence);
    return c ? push(e, c) : -TD_ERR_FULL;
}

void engine_know_load(struct engine *e, enum tier_kind kind, uint64_t us)
{
    atomic_store_explicit(&e->load_known_us[kind], us, memory_order_relaxed);
}

void engine_stats(struct engine *e, struct engine_stats *out)
{
    pthread_mutex_lock(&e->lock);
    *out = e->stats;
    pthread_mutex_unlock(&e->lock);
}
