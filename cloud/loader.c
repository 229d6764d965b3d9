/* loader: see loader.h. A buffer goes round: free -> taken by the engine -> wanted -> (a thread) -> ready -> the engine -> free. */
#include "cloud/loader.h"
#include <pthread.h>
#include <stdlib.h>

struct job {
    struct loader_block block; /* first: what the engine holds points here */
    struct job *next;
};
struct list {
    struct job *first, **last;
};

struct loader;
struct load_thread { /* a thread and what is its own */
    struct loader *loader;
    struct kv_codec_scratch *scratch;
    pthread_t thread;
    bool started;
};

struct loader {
    struct tiers *tiers;
    struct kv_shape shape;
    void (*wake)(void *ctx);
    void *wake_ctx;
    unsigned reader_count;
    struct load_thread readers[LOADER_BUFFERS]; /* more would find no buffer */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stopping;    /* under lock, as are the lists and the next */
    unsigned reading; /* threads at work */
    struct list free, wanted, ready;
    struct job jobs[LOADER_BUFFERS];
};

static void list_push(struct list *list, struct job *job)
{
    job->next = NULL;
    *list->last = job;
    list->last = &job->next;
}

static struct job *list_pop(struct list *list)
{
    struct job *job = list->first;
    if (job) {
        list->first = job->next;
        if (!list->first)
            list->last = &list->first;
    }
    return job;
}

/* --- reading -------------------------------------------------------------------------------------- */

static int decode_piece(struct load_thread *r, struct loader_block *b, uint32_t layer, bool is_value,
                        struct span piece, uint16_t *dst)
{
    const struct kv_shape *shape = &r->loader->shape;
    struct kv_piece_head head;
    struct span payload;
    int rc = kv_piece_parse(piece.data, piece.size, &head, &payload);
    if (rc < 0)
        return rc;
    if (head.layer != layer || head.is_value != is_value || head.block_index != b->block_index ||
        head.first_token != 0 || head.token_count != KV_BLOCK_TOKENS ||
        head.kv_head_count != shape->kv_head_count || head.head_dim != shape->head_dim)
        return -TD_ERR_SHAPE;
    b->quality = layer == 0 && !is_value ? head.quality : kv_quality_worst(b->quality, head.quality);
    return kv_piece_decode(r->scratch, &head, payload, dst, kv_piece_values(shape, KV_BLOCK_TOKENS));
}

static int decode_block(struct load_thread *r, struct loader_block *b, const struct store_block *from)
{
    uint32_t layers = r->loader->shape.layer_count;
    size_t values = kv_piece_values(&r->loader->shape, KV_BLOCK_TOKENS);
    int rc = from->layer_begin == 0 && from->layer_end == layers ? 0 : -TD_ERR_SHAPE;
    for (uint32_t i = 0; i < 2 * layers && rc == 0; i++)
        rc = decode_piece(r, b, i / 2, i % 2, from->pieces[i], b->values + i * values);
    return rc;
}

static int load_block(struct load_thread *r, struct loader_block *b)
{
    struct tiers_want want = {b->accept, b->numerics, 0, (uint16_t)r->loader->shape.layer_count};
    struct tier_block *block;
    int rc = tiers_get(r->loader->tiers, b->tenant, &b->id, &want, &block, &b->tier);
    if (rc < 0)
        return rc;
    rc = decode_block(r, b, &block->block);
    if (rc == 0)
        b->quality = kv_quality_worst(b->quality, block->block.quality);
    tier_block_release(block);
    return rc;
}

static void *reader_main(void *arg)
{
    struct load_thread *r = arg;
    struct loader *l = r->loader;
    pthread_mutex_lock(&l->lock);
    while (!l->stopping) {
        struct job *job = list_pop(&l->wanted);
        if (!job) {
            pthread_cond_wait(&l->changed, &l->lock);
            continue;
        }
        l->reading++;
        pthread_mutex_unlock(&l->lock);
        job->block.status = load_block(r, &job->block);
        job->block.done_us = job->block.clock ? job->block.clock() : 0;
        pthread_mutex_lock(&l->lock);
        l->reading--;
        list_push(&l->ready, job);
        pthread_mutex_unlock(&l->lock);
        l->wake(l->wake_ctx);
        pthread_mutex_lock(&l->lock);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

/* --- the engine's side ---------------------------------------------------------------------------- */

static struct job *locked_pop(struct loader *l, struct list *list)
{
    pthread_mutex_lock(&l->lock);
    struct job *job = list_pop(list);
    pthread_mutex_unlock(&l->lock);
    return job;
}

static void locked_push(struct loader *l, struct list *list, struct loader_block *block)
{
    pthread_mutex_lock(&l->lock);
    list_push(list, (struct job *)block);
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

struct loader_block *loader_take(struct loader *l)
{
    return (struct loader_block *)locked_pop(l, &l->free);
}

void loader_submit(struct loader *l, struct loader_block *block)
{
    locked_push(l, &l->wanted, block);
}

unsigned loader_busy(struct loader *l)
{
    pthread_mutex_lock(&l->lock);
    unsigned count = l->reading;
    for (const struct job *job = l->wanted.first; job; job = job->next)
        count++;
    pthread_mutex_unlock(&l->lock);
    return count;
}

struct loader_block *loader_pop(struct loader *l)
{
    return (struct loader_block *)locked_pop(l, &l->ready);
}

void loader_release(struct loader *l, struct loader_block *block)
{
    locked_push(l, &l->free, block);
}

/* --- life ----------------------------------------------------------------------------------------- */

static void stop_readers(struct loader *l)
{
    pthread_mutex_lock(&l->lock);
    l->stopping = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    for (unsigned i = 0; i < l->reader_count; i++) {
        if (l->readers[i].started)
            pthread_join(l->readers[i].thread, NULL);
        kv_codec_scratch_destroy(l->readers[i].scratch);
    }
}

void loader_destroy(struct loader *l)
{
    if (!l)
        return;
    stop_readers(l);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

static void hand_out_buffers(struct loader *l, uint16_t *values)
{
    size_t size = (size_t)l->shape.layer_count * 2 * kv_piece_values(&l->shape, KV_BLOCK_TOKENS);
    for (size_t i = 0; i < LOADER_BUFFERS; i++) {
        l->jobs[i].block.values = values + i * size;
        list_push(&l->free, &l->jobs[i]);
    }
}

static bool start_readers(struct loader *l)
{
    unsigned count = TD_MIN(tiers_threads(l->tiers), (unsigned)LOADER_BUFFERS);
    for (bool good = true; good && l->reader_count < count;) {
        struct load_thread *r = &l->readers[l->reader_count++];
        r->loader = l;
        r->scratch = kv_codec_scratch_create(&l->shape);
        r->started = r->scratch && pthread_create(&r->thread, NULL, reader_main, r) == 0;
        good = r->started;
    }
    return l->readers[l->reader_count - 1].started;
}

struct loader *loader_create(struct tiers *tiers, const struct kv_shape *shape, uint16_t *values,
                             void (*wake)(void *ctx), void *ctx)
{
    struct loader *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->tiers = tiers;
    l->shape = *shape;
    l->wake = wake;
    l->wake_ctx = ctx;
    struct list *lists[] = {&l->free, &l->wanted, &l->ready};
    for (size_t i = 0; i < TD_COUNT(lists); i++)
        lists[i]->last = &lists[i]->first;
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->changed, NULL);
    hand_out_buffers(l, values);
    if (!start_readers(l)) {
        loader_destroy(l);
        return NULL;
    }
    return l;
}
