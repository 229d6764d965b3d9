/* ingest: see ingest.h. `inside` counts pieces between push and pop, so that the queue of results can always take one more. */
#include "cloud/ingest.h"
#include "shared/queue.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define INGEST_WAIT_US 1000000u

struct ingest {
    struct kv_shape shape;
    bool for_device, seals;
    struct kv_seal seal;
    struct kv_codec_scratch *scratch; /* the thread's */
    struct queue *in, *out;
    atomic_uint inside;
    size_t gathered;      /* results that pops may still take; the taker's */
    atomic_bool stopping; /* set before the queues are closed */
    void (*wake)(void *ctx);
    void *wake_ctx;
    pthread_t thread;
};

struct ingest_piece *ingest_piece_create(uint64_t sequence, uint32_t epoch, uint32_t block_index,
                                         uint8_t *wire, size_t size)
{
    struct ingest_piece *piece = size <= UINT32_MAX ? calloc(1, sizeof *piece) : NULL;
    if (!piece) {
        free(wire);
        return NULL;
    }
    piece->sequence = sequence;
    piece->epoch = epoch;
    piece->block_index = block_index;
    piece->wire = wire;
    piece->wire_size = (uint32_t)size;
    return piece;
}

void ingest_piece_free(struct ingest_piece *piece)
{
    if (!piece)
        return;
    free(piece->wire);
    free(piece->values);
    free(piece);
}

/* What was sealed takes the place of the seal. wire_size stays: so much came. */
static int unseal(struct ingest_piece *piece, const struct kv_seal *seal)
{
    struct span sealed = {piece->wire, piece->wire_size};
    uint8_t *opened = seal && sealed.size > KV_SEAL_OVERHEAD ? malloc(sealed.size - KV_SEAL_OVERHEAD) : NULL;
    int64_t size = opened ? kv_seal_open(seal, sealed, &piece->name, opened) : -TD_ERR_CRYPTO;
    if (size < 0) {
        free(opened);
        return -TD_ERR_CHECKSUM;
    }
    free(piece->wire);
    piece->wire = opened;
    piece->sealed = true;
    int rc = kv_piece_parse(opened, (size_t)size, &piece->head, &piece->payload);
    return rc < 0 || piece->head.codec == KV_SEALED || piece->head.block_index != piece->block_index
               ? -TD_ERR_CHECKSUM
               : 0;
}

static int decode(struct ingest_piece *piece, const struct kv_shape *shape, bool for_device,
                  const struct kv_seal *seal, struct kv_codec_scratch *scratch)
{
    struct kv_piece_head *head = &piece->head;
    if (kv_piece_parse(piece->wire, piece->wire_size, head, &piece->payload) < 0 ||
        head->block_index != piece->block_index || (head->codec == KV_SEALED && unseal(piece, seal) < 0))
        return -TD_ERR_CHECKSUM;
    if (head->kv_head_count != shape->kv_head_count || head->head_dim != shape->head_dim ||
        head->layer >= shape->layer_count)
        return -TD_ERR_SHAPE;
    if (for_device && head->codec != KV_L0)
        return 0;
    size_t count = kv_piece_values(shape, head->token_count);
    piece->values = malloc(count * sizeof *piece->values);
    if (!piece->values)
        return -TD_ERR_CHECKSUM; /* no memory: as good as lost on the way, the engine computes it itself */
    piece->values_size = count * sizeof *piece->values;
    int rc = kv_piece_decode(scratch, head, piece->payload, piece->values, count);
    if (rc == 0 && !kv_f16_all_finite(piece->values, count))
        rc = -TD_ERR_FORMAT;
    return rc;
}

void ingest_decode(struct ingest_piece *piece, const struct kv_shape *shape, bool for_device,
                   const struct kv_seal *seal, struct kv_codec_scratch *scratch)
{
    piece->status = decode(piece, shape, for_device, seal, scratch);
    if (piece->status == 0 && !piece->values)
        return;
    free(piece->wire);
    piece->wire = NULL;
    piece->payload = (struct span){0};
}

static void *ingest_main(void *arg)
{
    struct ingest *g = arg;
    while (!atomic_load(&g->stopping)) {
        struct ingest_piece *piece = queue_pop(g->in, INGEST_WAIT_US);
        if (!piece)
            continue;
        ingest_decode(piece, &g->shape, g->for_device, g->seals ? &g->seal : NULL, g->scratch);
        if (queue_push(g->out, piece) < 0) /* closed: nobody will take it */
            ingest_piece_free(piece);
        else
            g->wake(g->wake_ctx);
    }
    return NULL;
}

static void ingest_free(struct ingest *g)
{
    queue_destroy(g->in);
    queue_destroy(g->out);
    kv_codec_scratch_destroy(g->scratch);
    crypto_wipe(&g->seal, sizeof g->seal);
    free(g);
}

struct ingest *ingest_create(const struct kv_shape *shape, bool for_device, const struct kv_seal *seal,
                             void (*wake)(void *ctx), void *ctx)
{
    struct ingest *g = calloc(1, sizeof *g);
    if (!g)
        return NULL;
    g->shape = *shape;
    g->for_device = for_device;
    g->seals = seal != NULL;
    if (seal)
        g->seal = *seal;
    g->wake = wake;
    g->wake_ctx = ctx;
    g->scratch = kv_codec_scratch_create(shape);
    g->in = queue_create(INGEST_PIECES_MAX);
    g->out = queue_create(INGEST_PIECES_MAX);
    if (!g->scratch || !g->in || !g->out || pthread_create(&g->thread, NULL, ingest_main, g) != 0) {
        ingest_free(g);
        return NULL;
    }
    return g;
}

static void drain(struct queue *q)
{
    for (struct ingest_piece *piece; (piece = queue_pop(q, 0));)
        ingest_piece_free(piece);
}

void ingest_destroy(struct ingest *g)
{
    if (!g)
        return;
    atomic_store(&g->stopping, true);
    queue_close(g->in);
    queue_close(g->out);
    pthread_join(g->thread, NULL);
    drain(g->in);
    drain(g->out);
    ingest_free(g);
}

int ingest_push(struct ingest *g, struct ingest_piece *piece)
{
    if (atomic_fetch_add(&g->inside, 1) >= INGEST_PIECES_MAX) {
        atomic_fetch_sub(&g->inside, 1);
        return -TD_ERR_FULL;
    }
    int rc = queue_push(g->in, piece);
    if (rc < 0)
        atomic_fetch_sub(&g->inside, 1);
    return rc;
}

void ingest_gather(struct ingest *g)
{
    g->gathered = queue_count(g->out);
}

bool ingest_is_busy(struct ingest *g)
{
    return atomic_load(&g->inside) > queue_count(g->out);
}

bool ingest_has_more(struct ingest *g)
{
    return queue_count(g->out) > 0;
}

struct ingest_piece *ingest_pop(struct ingest *g)
{
    struct ingest_piece *piece = g->gathered ? queue_pop(g->out, 0) : NULL;
    if (piece) {
        g->gathered--;
        atomic_fetch_sub(&g->inside, 1);
    }
    return piece;
}
