/* pipeline: jobs and the thread that works on them; pipeline_emit.c makes the messages, pipeline_decode.c the tokens. See pipeline.h.
 *
 * The lock guards what callers set (ids given, what to send, closed); a step runs without it on a snapshot. A result is handed on only if the
 * job still wants that epoch. Jobs are freed by the thread alone, so a step never loses its job. */
#include "edge/pipeline_internal.h"
#include "shared/crypto.h"
#include "shared/paced.h"
#include <stdlib.h>
#include <time.h>

#define SINK_RETRY_NS   1000000L
#define MEASURED_LAYERS 8u

enum step_kind { STEP_SEND, STEP_DECODE, STEP_FILL };
struct step { /* what a step may look at */
    enum step_kind kind;
    struct pipeline_send send;
    bool deepen; /* what is shallower than fill_layers is computed again */
    uint32_t ids_count, fill_layers;
    struct decode_turn decodes[DECODES_MAX];
    uint32_t decode_count;
};

static uint32_t blocks_of(uint32_t tokens)
{
    return (tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
}

/* ---- jobs ---- */

static void job_free(struct pipeline *p, struct pipeline_job *job)
{
    for (uint32_t i = 0; i < job->page_count; i++)
        local_kv_release(p->config.kv, job->pages[i]);
    if (job->ids)
        crypto_wipe(job->ids, job->capacity * sizeof *job->ids);
    crypto_wipe(job->principal_key, sizeof job->principal_key);
    free(job->decode);
    free(job->ids);
    free(job->chain);
    free(job->pages);
    free(job);
}

struct pipeline_job *pipeline_open(struct pipeline *p, const struct pipeline_work *work)
{
    struct pipeline_job *job = calloc(1, sizeof *job);
    if (!job)
        return NULL;
    job->id = work->id;
    job->capacity = TD_MAX(work->capacity, work->count);
    job->depth = UINT32_MAX;
    uint32_t blocks = blocks_of(job->capacity);
    job->ids = malloc(job->capacity * sizeof *job->ids);
    job->chain = malloc(blocks * sizeof *job->chain);
    job->pages = malloc(blocks * sizeof *job->pages);
    if (!job->ids || !job->chain || !job->pages) {
        job_free(p, job);
        return NULL;
    }
    memcpy(job->principal_key, work->principal_key, sizeof job->principal_key);
    memcpy(job->ids, work->ids, work->count * sizeof *job->ids);
    job->ids_count = work->count;
    job->chain_count = work->count / KV_BLOCK_TOKENS;
    memcpy(job->chain, work->chain, job->chain_count * sizeof *job->chain);
    if (local_kv_disk(p->config.kv))
        kv_disk_touch(local_kv_disk(p->config.kv), job->chain, job->chain_count);
    pthread_mutex_lock(&p->lock);
    struct pipeline_job **at = &p->jobs;
    while (*at)
        at = &(*at)->next;
    *at = job;
    pthread_mutex_unlock(&p->lock);
    return job;
}

void pipeline_send(struct pipeline *p, struct pipeline_job *job, const struct pipeline_send *send)
{
    pthread_mutex_lock(&p->lock);
    job->send = *send;
    job->sending = job->filling = true;
    job->run = 0;
    job->stuck = false;
    job->fill_layers = 0; /* as deep as the prompt's first range, which is its deepest */
    for (uint32_t i = 0; i < send->range_count; i++)
        if (send->ranges[i].codec != KV_SEALED)
            job->fill_layers = TD_MAX(job->fill_layers, send->ranges[i].layers);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

void pipeline_fill(struct pipeline *p, struct pipeline_job *job, uint32_t layers)
{
    pthread_mutex_lock(&p->lock);
    job->sending = false;
    job->filling = layers > 0;
    job->fill_layers = TD_MIN(layers, p->layers);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

int pipeline_append(struct pipeline *p, struct pipeline_job *job, uint32_t at, const int32_t *ids,
                    uint32_t count)
{
    pthread_mutex_lock(&p->lock);
    uint32_t known = TD_MIN(count, job->ids_count - at);
    count = TD_MIN(count, job->capacity - at);
    int rc = memcmp(job->ids + at, ids, known * sizeof *ids) == 0 ? 0 : -TD_ERR_CONFLICT;
    if (rc == 0 && count > known) {
        memcpy(job->ids + job->ids_count, ids + known, (count - known) * sizeof *ids);
        job->ids_count = at + count;
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->lock);
    return rc;
}

/* Under the lock: the oldest fills make room for younger ones. */
static void bound_fills(struct pipeline *p)
{
    uint32_t count = 0;
    for (struct pipeline_job *job = p->jobs; job; job = job->next)
        count += job->closed && job->keep;
    for (struct pipeline_job *job = p->jobs; job && count > PIPELINE_FILLS_MAX; job = job->next)
        if (job->closed && job->keep)
            job->keep = false, count--;
}

void pipeline_close(struct pipeline *p, struct pipeline_job *job, uint32_t keep_count)
{
    pthread_mutex_lock(&p->lock);
    job->closed = true;
    job->keep = keep_count > 0;
    job->ids_count = TD_MIN(job->ids_count, TD_MAX(keep_count, 1u));
    job->sending = false;
    job->run = 0;
    bound_fills(p);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

void pipeline_taken(struct pipeline *p, size_t size)
{
    pthread_mutex_lock(&p->lock);
    p->out_size -= size;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

/* ---- handing on ---- */

static bool wants(struct pipeline *p, const struct pipeline_job *job, uint32_t epoch)
{
    pthread_mutex_lock(&p->lock);
    bool yes = !p->stop && job->sending && job->send.epoch == epoch;
    pthread_mutex_unlock(&p->lock);
    return yes;
}

/* Takes the messages. What nobody wants any more is dropped. */
static void hand_on(struct pipeline *p, struct pipeline_job *job, struct pipeline_event event)
{
    size_t size = message_list_size(event.messages);
    struct pipeline_event *e = malloc(sizeof *e);
    if (!e) { /* the cloud will notice that pieces are missing and compute them */
        message_list_free(event.messages);
        return;
    }
    *e = event;
    e->job = job->id;
    e->epoch = job->epoch;
    e->cost = job->cost;
    job->cost = (struct pipeline_cost){0};
    pthread_mutex_lock(&p->lock);
    p->out_size += size;
    pthread_mutex_unlock(&p->lock);
    int rc = -TD_ERR_CANCELLED;
    while (wants(p, job, e->epoch) && (rc = p->config.sink(p->config.ctx, e)) == -TD_ERR_FULL)
        nanosleep(&(struct timespec){.tv_nsec = SINK_RETRY_NS}, NULL);
    if (rc != 0) {
        pipeline_event_free(e);
        pipeline_taken(p, size);
    }
}

static void send_ends(struct pipeline *p, struct pipeline_job *job)
{
    pthread_mutex_lock(&p->lock);
    if (job->send.epoch == job->epoch)
        job->sending = false;
    pthread_mutex_unlock(&p->lock);
}

static void send_failed(struct pipeline *p, struct pipeline_job *job, int code, bool rows_do_not_fit)
{
    hand_on(
        p, job,
        (struct pipeline_event){.type = PIPELINE_FAILED, .code = code, .rows_do_not_fit = rows_do_not_fit});
    send_ends(p, job);
}

/* ---- pages ---- */

void pipeline_drop_pages(struct pipeline *p, struct pipeline_job *job, uint32_t keep_count)
{
    while (job->page_count > keep_count)
        local_kv_release(p->config.kv, job->pages[--job->page_count]);
    job->published = TD_MIN(job->published, keep_count);
    job->position = TD_MIN(job->position, keep_count * KV_BLOCK_TOKENS);
    job->kv_next = TD_MIN(job->kv_next, job->position);
    if (job->position == 0)
        job->depth = UINT32_MAX;
}

void pipeline_take_cached(struct pipeline *p, struct pipeline_job *job, uint32_t limit_tokens,
                          uint32_t layers)
{
    uint32_t limit = TD_MIN(limit_tokens / KV_BLOCK_TOKENS, job->chain_count);
    if (job->position != job->page_count * KV_BLOCK_TOKENS || job->page_count >= limit)
        return;
    uint32_t taken = local_kv_take(p->config.kv, job->chain + job->page_count, limit - job->page_count,
                                   layers, job->pages + job->page_count);
    if (taken > 0)
        job->depth = TD_MIN(job->depth, layers);
    job->page_count += taken;
    job->published = job->page_count;
    job->position = job->page_count * KV_BLOCK_TOKENS;
}

/* Jobs that send nothing give their pages up; what they have published stays in the cache until it is evicted. */
static void reclaim_pages(struct pipeline *p, const struct pipeline_job *needy)
{
    pthread_mutex_lock(&p->lock);
    for (struct pipeline_job *job = p->jobs; job; job = job->next)
        if (job != needy && !job->sending && job->run == 0 && job->page_count > 0) {
            pipeline_drop_pages(p, job, 0);
            job->stuck = true;
        }
    pthread_mutex_unlock(&p->lock);
}

int pipeline_need_pages(struct pipeline *p, struct pipeline_job *job, uint32_t end, bool may_reclaim)
{
    while (job->page_count < blocks_of(end)) {
        uint32_t page = local_kv_alloc(p->config.kv);
        if (page == PAGE_NONE && may_reclaim) {
            may_reclaim = false;
            reclaim_pages(p, job);
            page = local_kv_alloc(p->config.kv);
        }
        if (page == PAGE_NONE)
            return -TD_ERR_NOSPACE;
        job->pages[job->page_count++] = page;
    }
    return 0;
}

/* ---- computing ---- */

static void publish_blocks(struct pipeline *p, struct pipeline_job *job)
{
    uint32_t whole = job->position / KV_BLOCK_TOKENS;
    if (whole > job->chain_count) {
        local_kv_chain(job->principal_key, p->config.fingerprint, p->config.layout_hash,
                       job->chain_count ? &job->chain[job->chain_count - 1] : NULL,
                       job->ids + (size_t)job->chain_count * KV_BLOCK_TOKENS,
                       (whole - job->chain_count) * KV_BLOCK_TOKENS, job->chain + job->chain_count);
        job->chain_count = whole;
    }
    for (; job->published < whole; job->published++) {
        if (local_kv_publish(p->config.kv, job->chain, job->published, job->pages[job->published], job->depth,
                             p->config.backend->ops->numerics) < 0)
            return;
        disk_note(p, job, job->published);
    }
}

void pipeline_has_run(struct pipeline *p, struct pipeline_job *job, uint32_t end, uint32_t layers)
{
    job->position = end;
    job->depth = TD_MIN(job->depth, layers);
    publish_blocks(p, job);
}

int pipeline_compute(struct pipeline *p, struct pipeline_job *job, const struct pipeline_run *run)
{
    int rc = pipeline_need_pages(p, job, run->end, run->may_reclaim);
    if (rc < 0)
        return rc;
    struct batch_seq seq = {.layer_begin = 0,
                            .layer_end = run->layers,
                            .position = job->position,
                            .row_count = run->end - job->position,
                            .ids = job->ids + job->position,
                            .hidden_out = run->hidden,
                            .logits = run->logits,
                            .logit_count = run->logits != NULL,
                            .pages = job->pages};
    uint64_t start_us = clock_mono_us();
    rc = p->config.backend->ops->forward(p->config.backend, &(struct batch){&seq, 1});
    if (rc < 0)
        return rc;
    paced_wait(start_us, (double)seq.row_count * run->layers);
    job->cost = (struct pipeline_cost){clock_mono_us() - start_us, seq.row_count, run->layers, seq.position};
    if (seq.row_count > 1)
        disk_computed(p, &job->cost);
    pipeline_has_run(p, job, run->end, run->layers);
    return 0;
}

uint32_t pipeline_chunk_end(const struct pipeline *p, uint32_t position, uint32_t limit)
{
    return TD_MIN(limit, (position / p->config.chunk_tokens + 1) * p->config.chunk_tokens);
}

/* ---- steps ---- */

static const struct plan_range *find_range(const struct pipeline_send *send, uint32_t token, bool sealed)
{
    for (uint32_t i = 0; i < send->range_count; i++)
        if (send->ranges[i].layers > 0 && (send->ranges[i].codec == KV_SEALED) == sealed &&
            plan_range_end(&send->ranges[i]) > token)
            return &send->ranges[i];
    return NULL;
}

/* The first edge range that ends behind a token; NULL: none. Not those of sealed pieces, which are only read. */
static const struct plan_range *edge_range(const struct pipeline_send *send, uint32_t token)
{
    return find_range(send, token, false);
}

/* HIDDEN of rows [begin, end) at p->hidden: those that are wanted, or at k = L the range's last one. */
static int hand_on_rows(struct pipeline *p, struct pipeline_job *job, const struct pipeline_send *send,
                        const struct plan_range *r, uint32_t begin, uint32_t end)
{
    uint32_t from = TD_MAX(begin, send->rows_begin);
    if (r->layers == p->layer_count) {
        if (end < plan_range_end(r))
            return 0;
        from = end - 1;
    }
    if (from >= end)
        return 0;
    struct pipeline_event e = {.type = PIPELINE_MESSAGES, .rows_until = end};
    int rc = emit_rows(p, p->hidden + (size_t)(from - begin) * p->embd_size, from, end - from, r->layers,
                       r->hidden_dtype, &e.messages);
    if (rc < 0)
        message_list_free(e.messages);
    else
        hand_on(p, job, e);
    return rc;
}

static bool has_room(struct pipeline *p)
{
    pthread_mutex_lock(&p->lock);
    bool room = p->out_size < PIPELINE_OUT_SIZE;
    pthread_mutex_unlock(&p->lock);
    return room;
}

/* KV of whole blocks from kv_next on, as far as it is there, and of the prompt's last, partial one. */
static int hand_on_blocks(struct pipeline *p, struct pipeline_job *job, const struct pipeline_send *send)
{
    const struct plan_range *r;
    while ((r = edge_range(send, job->kv_next)) && job->kv_next < job->position && has_room(p)) {
        uint32_t block = TD_MAX(job->kv_next, r->first_token) / KV_BLOCK_TOKENS,
                 start = block * KV_BLOCK_TOKENS;
        uint32_t end = TD_MIN(start + KV_BLOCK_TOKENS, plan_range_end(r));
        if (end > job->position)
            return 0;
        job->kv_next = end;
        if (r->codec == PLAN_CODEC_NONE)
            continue;
        struct pipeline_event e = {.type = PIPELINE_MESSAGES};
        int rc = emit_block(p, job->pages[block], block, end - start, r->layers, r->codec, &e.messages);
        if (rc < 0) {
            message_list_free(e.messages);
            return rc;
        }
        hand_on(p, job, e);
    }
    return 0;
}

/* What was handed on is void: begin at rows_begin and kv_begin again, with what was computed before as far as it goes. */
static void begin_again(struct pipeline *p, struct pipeline_job *job, const struct pipeline_send *send)
{
    const struct plan_range *r = edge_range(send, send->kv_begin);
    if (r && job->depth < r->layers)
        pipeline_drop_pages(p, job, 0);
    else if (edge_range(send, send->rows_begin) && job->position > send->rows_begin)
        pipeline_drop_pages(p, job, send->rows_begin / KV_BLOCK_TOKENS);
    job->kv_next = job->sealed_next = send->kv_begin;
    job->epoch = send->epoch;
}

/* The next block of a sealed range. False: there is none. Where it cannot be read the cloud has to compute it. */
static bool hand_on_sealed(struct pipeline *p, struct pipeline_job *job, const struct pipeline_send *send)
{
    const struct plan_range *r = find_range(send, job->sealed_next, true);
    if (!r)
        return false;
    uint32_t block = TD_MAX(job->sealed_next, r->first_token) / KV_BLOCK_TOKENS;
    struct pipeline_event e = {.type = PIPELINE_MESSAGES};
    int rc = disk_sealed(p, job, send->seal, block, plan_range_end(r) / KV_BLOCK_TOKENS, &e.messages);
    if (rc == 0) {
        job->sealed_next = (block + 1) * KV_BLOCK_TOKENS;
        hand_on(p, job, e);
    } else {
        message_list_free(e.messages);
        send_failed(p, job, rc, false);
    }
    return true;
}

/* One chunk, with the layers of the range at its first token; below the edge ranges with those of the first. */
static int run_chunk(struct pipeline *p, struct pipeline_job *job, const struct pipeline_send *send,
                     const struct plan_range *r, bool *rows_failed)
{
    uint32_t begin = job->position, layers = r->layers;
    bool ahead = begin < r->first_token;
    uint32_t end = pipeline_chunk_end(p, begin, ahead ? r->first_token : plan_range_end(r));
    bool want_rows = !ahead && end > send->rows_begin;
    int rc = pipeline_compute(
        p, job,
        &(struct pipeline_run){
            .end = end, .layers = layers, .hidden = want_rows ? p->hidden : NULL, .may_reclaim = true});
    if (rc < 0 || !want_rows)
        return rc;
    rc = hand_on_rows(p, job, send, r, begin, end);
    *rows_failed = rc == -TD_ERR_FORMAT;
    return rc;
}

static bool all_handed_on(const struct pipeline_job *job, const struct pipeline_send *send)
{
    return job->kv_next >= job->position || !edge_range(send, job->kv_next);
}

static void send_step(struct pipeline *p, struct pipeline_job *job, const struct step *step)
{
    const struct pipeline_send *send = &step->send;
    if (job->epoch != send->epoch)
        begin_again(p, job, send);
    if (hand_on_sealed(p, job, send))
        return;
    const struct plan_range *r = edge_range(send, job->position), *first = edge_range(send, 0);
    bool rows_failed = false;
    int rc = 0;
    if (first && job->position < send->rows_begin)
        pipeline_take_cached(p, job, send->rows_begin, first->layers);
    if (r && job->depth < r->layers) { /* more layers than before: from the start */
        pipeline_drop_pages(p, job, 0);
        return;
    }
    if (job->position < send->rows_begin) /* what is restored goes out while the next is read */
        rc = hand_on_blocks(p, job, send);
    if (rc == 0 && first && job->position < send->rows_begin &&
        disk_fetch(p, job, send->rows_begin, first->layers))
        return;
    r = edge_range(send, job->position);
    if (rc == 0 && r && !wants(p, job, send->epoch)) /* replaced just now */
        return;
    if (rc == 0 && r)
        rc = run_chunk(p, job, send, r, &rows_failed);
    if (rc == 0)
        rc = hand_on_blocks(p, job, send);
    if (rc == 0 && job->cost.tokens > 0) /* nothing was to be handed on, but what it took is */
        hand_on(p, job, (struct pipeline_event){.type = PIPELINE_MESSAGES});
    if (rc < 0) {
        send_failed(p, job, rc, rows_failed && r->hidden_dtype != HIDDEN_F32);
    } else if (!edge_range(send, job->position) && all_handed_on(job, send)) {
        hand_on(p, job, (struct pipeline_event){.type = PIPELINE_SENT});
        send_ends(p, job);
    }
}

static uint32_t fill_limit(uint32_t ids_count)
{
    return ids_count - ids_count % KV_BLOCK_TOKENS;
}

static void fill_step(struct pipeline *p, struct pipeline_job *job, const struct step *step)
{
    uint32_t limit = fill_limit(step->ids_count);
    if (step->deepen && job->depth < step->fill_layers)
        pipeline_drop_pages(p, job, 0);
    pipeline_take_cached(p, job, limit, TD_MIN(job->depth, step->fill_layers));
    if (job->position >= limit || disk_fetch(p, job, limit, TD_MIN(job->depth, step->fill_layers)))
        return;
    struct pipeline_run run = {.end = pipeline_chunk_end(p, job->position, limit),
                               .layers = TD_MIN(job->depth, step->fill_layers)};
    if (pipeline_compute(p, job, &run) < 0) {
        pthread_mutex_lock(&p->lock);
        pipeline_drop_pages(p, job, 0);
        job->stuck = true;
        pthread_mutex_unlock(&p->lock);
    }
    job->cost = (struct pipeline_cost){0};
}

/* ---- the thread ---- */

static bool deepens(const struct pipeline *p, const struct pipeline_job *job)
{
    return p->config.whole && job->closed && job->keep;
}

static uint32_t layers_to_fill(const struct pipeline *p, const struct pipeline_job *job)
{
    if (deepens(p, job))
        return p->layers;
    return job->filling && (!job->closed || job->keep) ? job->fill_layers : 0;
}

static bool has_fill(const struct pipeline *p, const struct pipeline_job *job)
{
    uint32_t layers = layers_to_fill(p, job);
    return layers > 0 && !job->stuck && !job->sending && job->run == 0 &&
           (job->position < fill_limit(job->ids_count) || (deepens(p, job) && job->depth < layers));
}

/* Under the lock. */
static void reap(struct pipeline *p)
{
    for (struct pipeline_job **at = &p->jobs; *at;) {
        struct pipeline_job *job = *at;
        if (job->closed && !has_fill(p, job)) {
            *at = job->next;
            job_free(p, job);
        } else {
            at = &job->next;
        }
    }
}

/* Under the lock: the next step, NULL for none now. */
static struct pipeline_job *pick(struct pipeline *p, struct step *step)
{
    struct pipeline_job *send = NULL, *decode = NULL, *fill = NULL;
    *step = (struct step){.kind = STEP_FILL};
    for (struct pipeline_job *job = p->jobs; job; job = job->next) {
        if (!send && job->sending && p->out_size < PIPELINE_OUT_SIZE)
            send = job;
        if (decode_has_work(job))
            decode = job;
        if (!fill && has_fill(p, job))
            fill = job;
    }
    bool decodes = decode && !(send && p->decoded_last);
    struct pipeline_job *found = decodes ? decode : send ? send : fill;
    p->decoded_last = decodes;
    if (decodes) {
        step->kind = STEP_DECODE;
        step->decode_count = decode_pick(p, step->decodes);
    } else if (found) {
        step->kind = send ? STEP_SEND : STEP_FILL;
        step->send = found->send;
        step->ids_count = found->ids_count;
        step->deepen = deepens(p, found);
        step->fill_layers = layers_to_fill(p, found);
    }
    return found;
}

static bool nothing_to_do(const struct pipeline *p)
{
    for (const struct pipeline_job *job = p->jobs; job; job = job->next)
        if (job->sending || decode_has_work(job))
            return false;
    return true;
}

/* So that the first prompt's plan does not rest on a guess of what this device can do. */
static void measure(struct pipeline *p)
{
    int32_t ids[KV_BLOCK_TOKENS] = {0};
    uint32_t page = local_kv_alloc(p->config.kv), layers = TD_MIN(p->layers, MEASURED_LAYERS);
    struct batch_seq seq = {.layer_end = layers, .row_count = KV_BLOCK_TOKENS, .ids = ids, .pages = &page};
    struct pipeline_event *e = calloc(1, sizeof *e);
    int rc = -TD_ERR_NOMEM;
    for (int i = 0; i < 2 && e && page != PAGE_NONE;
         i++) { /* the second counts: the first reads the weights from disk */
        uint64_t start_us = clock_mono_us();
        rc = p->config.backend->ops->forward(p->config.backend, &(struct batch){&seq, 1});
        paced_wait(start_us, (double)seq.row_count * layers);
        e->cost = (struct pipeline_cost){clock_mono_us() - start_us, seq.row_count, layers, 0};
    }
    if (rc == 0)
        disk_computed(p, &e->cost);
    if (rc == 0 && p->decodes)
        decode_measure(p, page);
    if (page != PAGE_NONE)
        local_kv_release(p->config.kv, page);
    if (rc < 0 || p->config.sink(p->config.ctx, e) != 0)
        pipeline_event_free(e);
}

static void run_step(struct pipeline *p, struct pipeline_job *job, const struct step *step)
{
    if (step->kind == STEP_SEND)
        send_step(p, job, step);
    else if (step->kind == STEP_DECODE)
        decode_step(p, step->decodes, step->decode_count);
    else
        fill_step(p, job, step);
}

/* Memory that the next prompts will need. False: there is enough. */
static bool take_ahead(struct pipeline *p)
{
    struct backend *b = p->config.backend;
    return b->ops->pages_ahead && b->ops->pages_ahead(b, local_kv_used_until(p->config.kv));
}

static void *run(void *arg)
{
    struct pipeline *p = arg;
    bool may_take_ahead = true;
    if (p->config.measure)
        measure(p);
    pthread_mutex_lock(&p->lock);
    while (!p->stop) {
        struct step step;
        reap(p);
        struct pipeline_job *job = pick(p, &step);
        bool save = disk_has_saves(p) && !(job && step.kind != STEP_FILL);
        if (!job && !save && (p->jobs || !may_take_ahead)) {
            p->is_idle = nothing_to_do(p);
            pthread_cond_broadcast(&p->idle);
            pthread_cond_wait(&p->changed, &p->lock);
            p->is_idle = false;
            may_take_ahead = true;
            continue;
        }
        pthread_mutex_unlock(&p->lock);
        may_take_ahead = job || save || take_ahead(p);
        if (save)
            disk_save_next(p);
        else if (job)
            run_step(p, job, &step);
        pthread_mutex_lock(&p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

bool pipeline_wait_idle(struct pipeline *p, uint32_t timeout_ms)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(&p->lock);
    int rc = 0;
    p->is_idle = false; /* what the thread found before this call does not count */
    pthread_cond_broadcast(&p->changed);
    while (!p->is_idle && rc == 0)
        rc = pthread_cond_timedwait(&p->idle, &p->lock, &until);
    bool idle = p->is_idle;
    pthread_mutex_unlock(&p->lock);
    return idle;
}

/* ---- life ---- */

static int allocate(struct pipeline *p)
{
    size_t values = kv_piece_values(&p->shape, KV_BLOCK_TOKENS);
    p->hidden = malloc((size_t)p->config.chunk_tokens * p->embd_size * sizeof *p->hidden);
    p->key = malloc(values * sizeof *p->key);
    p->value = malloc(values * sizeof *p->value);
    p->piece_capacity = kv_piece_bound(&p->shape, KV_BLOCK_TOKENS);
    p->piece = malloc(p->piece_capacity);
    p->codec = kv_codec_scratch_create(&p->shape);
    if (p->decodes) {
        uint32_t vocab_count = p->config.backend->model->params.vocab_count;
        p->logits = malloc((size_t)DECODES_MAX * vocab_count * sizeof *p->logits);
        p->sampler = sampler_scratch_create(vocab_count);
        if (!p->logits || !p->sampler)
            return -TD_ERR_NOMEM;
    }
    return p->hidden && p->key && p->value && p->piece && p->codec ? 0 : -TD_ERR_NOMEM;
}

static void release(struct pipeline *p)
{
    while (p->jobs) {
        struct pipeline_job *next = p->jobs->next;
        job_free(p, p->jobs);
        p->jobs = next;
    }
    sampler_scratch_destroy(p->sampler);
    free(p->logits);
    kv_codec_scratch_destroy(p->codec);
    free(p->piece);
    free(p->value);
    free(p->key);
    free(p->hidden);
    p->config.backend->ops->destroy(p->config.backend);
    pthread_cond_destroy(&p->idle);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

int pipeline_create(const struct pipeline_config *config, struct pipeline **out, struct td_error *err)
{
    const struct model_params *params = &config->backend->model->params;
    struct pipeline *p = calloc(1, sizeof *p);
    if (!p) {
        config->backend->ops->destroy(config->backend);
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the prefill thread: out of memory");
    }
    p->config = *config;
    p->layers = config->backend->layers_paged;
    p->layer_count = params->layer_count;
    p->decodes = p->layers == p->layer_count && config->backend->model->output.data;
    p->embd_size = params->embd_size;
    p->shape = (struct kv_shape){params->layer_count, params->kv_head_count, params->head_dim};
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    pthread_cond_init(&p->idle, NULL);
    int rc = allocate(p);
    if (rc == 0 && pthread_create(&p->thread, NULL, run, p) != 0)
        rc = -TD_ERR_NOMEM;
    if (rc < 0) {
        release(p);
        return td_fail(err, rc, "cannot start the prefill thread: %s", td_status_text(rc));
    }
    *out = p;
    return 0;
}

void pipeline_destroy(struct pipeline *p)
{
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    release(p);
}
