/* persist: see persist.h.
 *
 * A job is a buffer and the ticket that outlives it: FREE -> (take) FILLING -> (submit) ENCODING -> (the tiers took it) FREE, while its ticket
 * waits for store_done, is popped by the engine, and is free again. All lists are under one lock; none is ever long. */
#include "cloud/persist.h"
#include <pthread.h>
#include <stdlib.h>

struct ticket {
    struct persist *persist;
    struct ticket *next;
    uint64_t owner;
    int status;
};

struct job {
    struct persist_block block; /* first: what the engine holds points here */
    struct ticket *ticket;
    struct job *next;
};

struct persist {
    struct tiers *tiers;
    struct kv_shape shape;
    void (*wake)(void *ctx);
    void *wake_ctx;
    struct kv_codec_scratch *scratch; /* the thread's, as are the next two */
    uint8_t *wire;                    /* all pieces of a block */
    size_t *sizes;                    /* of the pieces */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stopping;                         /* under lock, as everything below */
    struct job *free_jobs, *first, **last; /* first..last: submitted, in order */
    struct ticket *free_tickets, *done, **done_last;
    uint32_t waiting; /* tickets given to the store */
    struct job jobs[PERSIST_BUFFERS];
    struct ticket tickets[PERSIST_UNACKNOWLEDGED];
};

/* --- acknowledgements ----------------------------------------------------------------------------- */

static void ticket_done(struct ticket *t, int status)
{
    struct persist *p = t->persist;
    pthread_mutex_lock(&p->lock);
    t->status = status;
    t->next = NULL;
    *p->done_last = t;
    p->done_last = &t->next;
    p->waiting--;
    /* Inside the lock: persist_destroy frees p as soon as it sees that nothing waits. */
    p->wake(p->wake_ctx);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static void on_store_done(void *ctx, int status)
{
    ticket_done(ctx, status);
}

bool persist_pop(struct persist *p, uint64_t *owner, int *status)
{
    pthread_mutex_lock(&p->lock);
    struct ticket *t = p->done;
    if (t) {
        p->done = t->next;
        if (!p->done)
            p->done_last = &p->done;
        *owner = t->owner;
        *status = t->status;
        t->next = p->free_tickets;
        p->free_tickets = t;
    }
    pthread_mutex_unlock(&p->lock);
    return t != NULL;
}

/* --- encoding ------------------------------------------------------------------------------------- */

/* Encode all pieces of a block side by side into p->wire. */
static int64_t encode_pieces(struct persist *p, const struct persist_block *b)
{
    size_t values = kv_piece_values(&p->shape, KV_BLOCK_TOKENS);
    size_t bound = kv_piece_bound(&p->shape, KV_BLOCK_TOKENS), used = 0;
    for (uint32_t i = 0; i < p->shape.layer_count * 2; i++) {
        struct kv_piece_head head = {.version = 1,
                                     .codec = KV_L0,
                                     .is_value = (uint8_t)(i % 2),
                                     .quality = b->quality,
                                     .block_index = b->block_index,
                                     .token_count = KV_BLOCK_TOKENS,
                                     .layer = (uint16_t)(i / 2),
                                     .kv_head_count = (uint16_t)p->shape.kv_head_count,
                                     .head_dim = (uint16_t)p->shape.head_dim};
        int64_t size = kv_piece_encode(p->scratch, &head, b->values + i * values, p->wire + used, bound);
        if (size < 0)
            return size;
        p->sizes[i] = (size_t)size;
        used += (size_t)size;
    }
    return (int64_t)used;
}

/* What is kept in memory is as large as what came out, not as what might have. */
static struct tier_block *encode_block(struct persist *p, const struct persist_block *b, int *rc)
{
    int64_t size = encode_pieces(p, b);
    struct tier_block *out = size < 0 ? NULL : tier_block_create(p->shape.layer_count, (size_t)size);
    *rc = size < 0 ? (int)size : out ? 0 : -TD_ERR_NOMEM;
    if (!out)
        return NULL;
    out->block.id = b->id;
    out->block.parent = b->parent;
    out->block.quality = b->quality;
    out->block.block_index = b->block_index;
    out->block.layer_end = (uint16_t)p->shape.layer_count;
    memcpy(out->data, p->wire, (size_t)size);
    const uint8_t *at = out->data;
    for (uint32_t i = 0; i < p->shape.layer_count * 2; i++) {
        out->pieces[i] = (struct span){at, p->sizes[i]};
        at += p->sizes[i];
    }
    return out;
}

static void run_job(struct persist *p, struct job *job)
{
    int rc;
    struct tier_block *block = encode_block(p, &job->block, &rc);
    if (block)
        rc = tiers_put(p->tiers, job->block.tenant, block, on_store_done, job->ticket);
    tier_block_release(block);
    if (rc < 0)
        ticket_done(job->ticket, rc);
}

static struct job *next_job(struct persist *p)
{
    struct job *job = p->first;
    if (job) {
        p->first = job->next;
        if (!p->first)
            p->last = &p->first;
    }
    return job;
}

static void *persist_main(void *arg)
{
    struct persist *p = arg;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        struct job *job = next_job(p);
        if (!job && p->stopping)
            break;
        if (!job) {
            pthread_cond_wait(&p->changed, &p->lock);
            continue;
        }
        pthread_mutex_unlock(&p->lock);
        run_job(p, job);
        pthread_mutex_lock(&p->lock);
        job->next = p->free_jobs;
        p->free_jobs = job;
        pthread_mutex_unlock(&p->lock);
        p->wake(p->wake_ctx);
        pthread_mutex_lock(&p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* --- the engine's side ---------------------------------------------------------------------------- */

struct persist_block *persist_take(struct persist *p)
{
    struct job *job = NULL;
    pthread_mutex_lock(&p->lock);
    if (p->free_jobs && p->free_tickets) {
        job = p->free_jobs;
        p->free_jobs = job->next;
        job->ticket = p->free_tickets;
        p->free_tickets = job->ticket->next;
    }
    pthread_mutex_unlock(&p->lock);
    return job ? &job->block : NULL;
}

void persist_submit(struct persist *p, struct persist_block *block)
{
    struct job *job = (struct job *)block;
    job->next = NULL;
    job->ticket->owner = block->owner;
    pthread_mutex_lock(&p->lock);
    *p->last = job;
    p->last = &job->next;
    p->waiting++;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

void persist_untake(struct persist *p, struct persist_block *block)
{
    struct job *job = (struct job *)block;
    pthread_mutex_lock(&p->lock);
    job->ticket->next = p->free_tickets;
    p->free_tickets = job->ticket;
    job->next = p->free_jobs;
    p->free_jobs = job;
    pthread_mutex_unlock(&p->lock);
}

bool persist_is_idle(struct persist *p)
{
    pthread_mutex_lock(&p->lock);
    bool idle = p->waiting == 0;
    pthread_mutex_unlock(&p->lock);
    return idle;
}

/* --- life ----------------------------------------------------------------------------------------- */

static void persist_free(struct persist *p)
{
    kv_codec_scratch_destroy(p->scratch);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    free(p->wire);
    free(p->sizes);
    free(p);
}

static bool take_memory(struct persist *p, uint16_t *buffers)
{
    size_t pieces = (size_t)p->shape.layer_count * 2;
    size_t values = pieces * kv_piece_values(&p->shape, KV_BLOCK_TOKENS);
    p->scratch = kv_codec_scratch_create(&p->shape);
    p->wire = malloc(pieces * kv_piece_bound(&p->shape, KV_BLOCK_TOKENS));
    p->sizes = calloc(pieces, sizeof *p->sizes);
    bool whole = p->scratch && p->wire && p->sizes;
    for (size_t i = 0; i < PERSIST_BUFFERS; i++) {
        struct job *job = &p->jobs[i];
        job->block.values = buffers + i * values;
        job->next = p->free_jobs;
        p->free_jobs = job;
    }
    for (size_t i = 0; i < PERSIST_UNACKNOWLEDGED; i++) {
        p->tickets[i].persist = p;
        p->tickets[i].next = p->free_tickets;
        p->free_tickets = &p->tickets[i];
    }
    return whole;
}

struct persist *persist_create(struct tiers *tiers, const struct kv_shape *shape, uint16_t *values,
                               void (*wake)(void *ctx), void *ctx)
{
    struct persist *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->tiers = tiers;
    p->shape = *shape;
    p->wake = wake;
    p->wake_ctx = ctx;
    p->last = &p->first;
    p->done_last = &p->done;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    if (!take_memory(p, values) || pthread_create(&p->thread, NULL, persist_main, p) != 0) {
        persist_free(p);
        return NULL;
    }
    return p;
}

void persist_destroy(struct persist *p)
{
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    p->stopping = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    store_flush(tiers_store(p->tiers));
    pthread_mutex_lock(&p->lock);
    while (p->waiting > 0)
        pthread_cond_wait(&p->changed, &p->lock);
    pthread_mutex_unlock(&p->lock);
    persist_free(p);
}
