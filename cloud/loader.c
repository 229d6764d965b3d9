/* loader: see loader.h. A buffer goes round: free -> taken by the engine -> wanted -> (thread) -> ready -> the engine -> free. */
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

struct loader {
    struct store *store;
    struct kv_shape shape;
    void (*wake)(void *ctx);
    void *wake_ctx;
    struct kv_codec_scratch *scratch; /* the thread's */
    uint8_t *wire;                    /* the thread's: the two pieces of a layer, sealed or not */
    size_t wire_size;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stopping; /* under lock, as are the lists */
    struct list free, wanted, ready;
    struct job jobs[LOADER_BUFFERS];
};

#define SEAL_OVERHEAD 256u /* more than what the store needs beside the two pieces of a layer */

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

static int decode_piece(struct loader *l, struct loader_block *b, uint32_t layer, bool is_value,
                        struct span piece, uint16_t *dst)
{
    struct kv_piece_head head;
    struct span payload;
    int rc = kv_piece_parse(piece.data, piece.size, &head, &payload);
    if (rc < 0)
        return rc;
    if (head.layer != layer || head.is_value != is_value || head.block_index != b->block_index ||
        head.first_token != 0 || head.token_count != KV_BLOCK_TOKENS ||
        head.kv_head_count != l->shape.kv_head_count || head.head_dim != l->shape.head_dim)
        return -TD_ERR_SHAPE;
    b->quality = layer == 0 && !is_value ? head.quality : kv_quality_worst(b->quality, head.quality);
    return kv_piece_decode(l->scratch, &head, payload, dst, kv_piece_values(&l->shape, KV_BLOCK_TOKENS));
}

static int load_block(struct loader *l, struct loader_block *b)
{
    size_t values = kv_piece_values(&l->shape, KV_BLOCK_TOKENS);
    for (uint32_t layer = 0; layer < l->shape.layer_count; layer++) {
        struct span k, v;
        uint16_t *dst = b->values + 2 * layer * values;
        int rc = store_read_layer(l->store, b->tenant, &b->id, layer, l->wire, l->wire_size, &k, &v);
        if (rc == 0)
            rc = decode_piece(l, b, layer, false, k, dst);
        if (rc == 0)
            rc = decode_piece(l, b, layer, true, v, dst + values);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static void *loader_main(void *arg)
{
    struct loader *l = arg;
    pthread_mutex_lock(&l->lock);
    while (!l->stopping) {
        struct job *job = list_pop(&l->wanted);
        if (!job) {
            pthread_cond_wait(&l->changed, &l->lock);
            continue;
        }
        pthread_mutex_unlock(&l->lock);
        uint64_t start = clock_mono_us();
        job->block.status = load_block(l, &job->block);
        job->block.load_us = clock_mono_us() - start;
        pthread_mutex_lock(&l->lock);
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

struct loader_block *loader_pop(struct loader *l)
{
    return (struct loader_block *)locked_pop(l, &l->ready);
}

void loader_release(struct loader *l, struct loader_block *block)
{
    locked_push(l, &l->free, block);
}

/* --- life ----------------------------------------------------------------------------------------- */

static void loader_free(struct loader *l)
{
    for (size_t i = 0; i < LOADER_BUFFERS; i++)
        free(l->jobs[i].block.values);
    kv_codec_scratch_destroy(l->scratch);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
    free(l->wire);
    free(l);
}

static bool take_memory(struct loader *l)
{
    size_t values = (size_t)l->shape.layer_count * 2 * kv_piece_values(&l->shape, KV_BLOCK_TOKENS);
    l->wire_size = 2 * kv_piece_bound(&l->shape, KV_BLOCK_TOKENS) + SEAL_OVERHEAD;
    l->scratch = kv_codec_scratch_create(&l->shape);
    l->wire = malloc(l->wire_size);
    bool whole = l->scratch && l->wire;
    for (size_t i = 0; i < LOADER_BUFFERS; i++) {
        struct job *job = &l->jobs[i];
        job->block.values = malloc(values * sizeof *job->block.values);
        whole = whole && job->block.values;
        list_push(&l->free, job);
    }
    return whole;
}

struct loader *loader_create(struct store *store, const struct kv_shape *shape, void (*wake)(void *ctx),
                             void *ctx)
{
    struct loader *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->store = store;
    l->shape = *shape;
    l->wake = wake;
    l->wake_ctx = ctx;
    struct list *lists[] = {&l->free, &l->wanted, &l->ready};
    for (size_t i = 0; i < TD_COUNT(lists); i++)
        lists[i]->last = &lists[i]->first;
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->changed, NULL);
    if (!take_memory(l) || pthread_create(&l->thread, NULL, loader_main, l) != 0) {
        loader_free(l);
        return NULL;
    }
    return l;
}

void loader_destroy(struct loader *l)
{
    if (!l)
        return;
    pthread_mutex_lock(&l->lock);
    l->stopping = true;
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
    loader_free(l);
}
