/* demote: cold blocks of tenants that allow it are re-encoded at a lossy level, before any is evicted: what a block is worth stays, at 1.7 (L1) to 3.4
 * (L2) times fewer bytes.
 *
 *     writer: three quarters full ── policy_demote ──▶ queue ──▶ thread: read, check, decode, encode ── put ──▶ writer: append … fsync … void the old
 *
 * To the writer the new record is a put like any other, so a crash finds nothing that it does not know: the old record counts until the new one is synced,
 * then the new one, which is the later; only then the old one is voided. Compaction rewrites records too, but it runs on the writer's thread, where tens of
 * milliseconds of codec a block would hold up what waits to be acknowledged, and its segments are not the cold ones.
 *
 * Rules
 *   1. Only what is lossless, whole and of the shape that the levels were measured for: a piece is checked before it is believed, and lossy is never
 *      re-encoded. What may not be re-encoded stays as it is until it is evicted.
 *   2. The copy that is written says what it is (fidelity of block and pieces). It replaces only the record that it was made of: a put, a delete or an
 *      eviction that came meanwhile wins.
 *   3. Nothing is let go to make room for it, and nobody waits for it: at most DEMOTE_BLOCKS_MAX are under way, on one thread of low priority. It begins
 *      when the disk is three quarters full, or seven eighths of a quota are used; eviction at seven eighths and at the quota, whatever is under way:
 *      where blocks come faster than they are re-encoded, they go as without it. */
#include "shared/kv_record.h"
#include "shared/stop.h"
#include "store/store_internal.h"
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DEMOTE_BLOCKS_MAX 16 /* under way … */
/* … and no more once they take such a part of the limit: each is on disk twice for a moment */
#define DEMOTE_PART     16
#define DEMOTE_SAVES    3      /* at least one of so many bytes is taken to be saved while it is not known */
#define DEMOTE_RETRY_US 200000 /* after one could not be given to the writer, or written */
#define DEMOTE_NICE     5

struct candidate {
    uint32_t tenant, size;
    struct kv_block_id id;
};
struct job { /* one that waits for the writer */
    struct demoter *demoter;
    struct candidate block;
};

struct demoter {
    struct store *store;
    struct store_demotion allowed; /* its tenants are the next */
    struct store_demotion_tenant *tenants;
    struct kv_codec_scratch *scratch;
    uint16_t *values; /* of a piece */
    uint8_t *wire;    /* all pieces of a block */
    size_t *sizes;
    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* guards the rest; under nothing but a table's shard */
    pthread_cond_t changed;
    bool stopping, working;
    struct candidate queue[DEMOTE_BLOCKS_MAX];
    unsigned first, count;
    unsigned out; /* that the policy named and that have not ended: also those the thread or the writer has */
    uint64_t out_size; /* their bytes as they are now */
    uint64_t handled;  /* by the thread, in all */
    uint64_t retry_us;
};

/* ---- who may ------------------------------------------------------------------------------------------------ */

static const struct kv_level *level_of(const struct demoter *d, const char *tenant)
{
    for (size_t i = 0; i < d->allowed.count; i++)
        if (strcmp(d->allowed.tenants[i].name, tenant) == 0)
            return d->allowed.tenants[i].level;
    return d->allowed.others;
}

bool demote_allows(struct store *s, uint32_t tenant)
{
    struct tenant_keys keys;
    if (!s->demoter || keys_get(s->keys, tenant, &keys) < 0)
        return false;
    bool allowed = level_of(s->demoter, keys.name) != NULL;
    crypto_wipe(&keys, sizeof keys);
    return allowed;
}

/* ---- re-encoding, on the thread ----------------------------------------------------------------------------- */

static int encode_piece(struct demoter *d, const struct kv_level *level, uint32_t i, uint32_t block_index,
                        struct span piece, uint8_t *dst)
{
    const struct kv_shape *shape = &d->allowed.shape;
    struct kv_piece_head h;
    struct span payload;
    int rc = kv_piece_parse(piece.data, piece.size, &h, &payload);
    if (rc < 0)
        return rc;
    if (h.quality.fidelity != KV_L0 || (h.codec != KV_L0 && h.codec != KV_RAW))
        return -TD_ERR_BLOCKED;
    if (h.layer != i / 2 || h.is_value != i % 2 || h.block_index != block_index || h.first_token != 0 ||
        h.token_count != KV_BLOCK_TOKENS || h.kv_head_count != shape->kv_head_count ||
        h.head_dim != shape->head_dim)
        return -TD_ERR_SHAPE;
    rc = kv_piece_decode(d->scratch, &h, payload, d->values, kv_piece_values(shape, KV_BLOCK_TOKENS));
    if (rc < 0)
        return rc;
    h.codec = h.quality.fidelity = level->codec;
    h.table = kv_level_table(level, h.is_value, block_index);
    int64_t size = kv_piece_encode(d->scratch, &h, d->values, dst, kv_piece_bound(shape, KV_BLOCK_TOKENS));
    d->sizes[i] = size < 0 ? 0 : (size_t)size;
    return size < 0 ? (int)size : 0;
}

/* The block at the level; the caller's reference. NULL with *rc. */
static struct tier_block *encode_block(struct demoter *d, const struct kv_level *level,
                                       const struct store_block *b, int *rc)
{
    uint32_t layers = d->allowed.shape.layer_count;
    size_t size = 0;
    *rc = b->layer_begin != 0 || b->layer_end != layers ? -TD_ERR_SHAPE
          : b->quality.fidelity != KV_L0                ? -TD_ERR_BLOCKED
                                                        : 0;
    for (uint32_t i = 0; i < 2 * layers && *rc == 0; i++) {
        *rc = encode_piece(d, level, i, b->block_index, b->pieces[i], d->wire + size);
        size += d->sizes[i];
    }
    struct tier_block *out = *rc < 0 ? NULL : tier_block_create(layers, size);
    if (!out) {
        *rc = *rc < 0 ? *rc : -TD_ERR_NOMEM;
        return NULL;
    }
    out->block.id = b->id;
    out->block.parent = b->parent;
    out->block.quality = b->quality;
    out->block.quality.fidelity = level->codec;
    out->block.block_index = b->block_index;
    out->block.layer_end = (uint16_t)layers;
    memcpy(out->data, d->wire, size);
    const uint8_t *at = out->data;
    for (uint32_t i = 0; i < 2 * layers; i++) {
        out->pieces[i] = (struct span){at, d->sizes[i]};
        at += d->sizes[i];
    }
    return out;
}

/* One of those under way has ended. */
static void end(struct demoter *d, const struct candidate *c, bool retry_later)
{
    pthread_mutex_lock(&d->lock);
    d->out--;
    d->out_size -= c->size;
    if (retry_later)
        d->retry_us = clock_mono_us() + DEMOTE_RETRY_US;
    pthread_mutex_unlock(&d->lock);
}

/* Not written, for want of room or because writing fails: the policy has the block back as it was and would name it again at once. */
static void on_written(void *ctx, int status)
{
    struct job *job = ctx;
    end(job->demoter, &job->block, status < 0);
    free(job);
}

static int put(struct demoter *d, const struct candidate *c, struct tier_block *small,
               struct kv_quality before)
{
    struct job *job = malloc(sizeof *job);
    if (!job)
        return -TD_ERR_NOMEM;
    *job = (struct job){d, *c};
    int rc = store_put_demoted(d->store, c->tenant, small, before, on_written, job);
    if (rc < 0)
        free(job);
    return rc;
}

/* *hopeless: of this block, as it is, no copy at the level can be made. */
static int demote(struct demoter *d, const struct candidate *c, bool *hopeless)
{
    struct store *s = d->store;
    struct tenant_keys keys;
    struct tier_block *block, *small;
    int rc = keys_get(s->keys, c->tenant, &keys);
    const struct kv_level *level = rc < 0 ? NULL : level_of(d, keys.name);
    *hopeless = rc == 0 && !level;
    rc = rc < 0 ? rc : !level ? -TD_ERR_BLOCKED : store_read_block(s, keys.name, &c->id, &block);
    crypto_wipe(&keys, sizeof keys);
    if (rc < 0)
        return rc;
    small = encode_block(d, level, &block->block, &rc);
    *hopeless = !small && rc != -TD_ERR_NOMEM;
    rc = small ? put(d, c, small, block->block.quality) : rc;
    tier_block_release(small);
    tier_block_release(block);
    return rc;
}

static void *demote_main(void *arg)
{
    struct demoter *d = arg;
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), DEMOTE_NICE);
    pthread_mutex_lock(&d->lock);
    while (!d->stopping) {
        if (d->count == 0) {
            pthread_cond_wait(&d->changed, &d->lock);
            continue;
        }
        struct candidate c = d->queue[d->first];
        d->first = (d->first + 1) % DEMOTE_BLOCKS_MAX;
        d->count--;
        d->working = true;
        pthread_mutex_unlock(&d->lock);
        bool hopeless = false;
        if (demote(d, &c, &hopeless) < 0) {
            bool is_held = evict_not_demoted(d->store, c.tenant, &c.id, !hopeless);
            end(d, &c, is_held && !hopeless);
        }
        pthread_mutex_lock(&d->lock);
        d->working = false;
        d->handled++;
        pthread_cond_broadcast(&d->changed);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* ---- asking, on the writer ---------------------------------------------------------------------------------- */

static bool has_room(struct demoter *d, uint64_t wanted)
{
    pthread_mutex_lock(&d->lock);
    bool few =
        d->out == 0 || (d->out < DEMOTE_BLOCKS_MAX && d->out_size < d->store->limit_size / DEMOTE_PART);
    bool room = few && d->out_size / DEMOTE_SAVES < wanted && !d->stopping && clock_mono_us() >= d->retry_us;
    pthread_mutex_unlock(&d->lock);
    return room;
}

static void push(struct demoter *d, const struct policy_victim *v)
{
    pthread_mutex_lock(&d->lock);
    d->queue[(d->first + d->count++) % DEMOTE_BLOCKS_MAX] = (struct candidate){v->tenant, v->size, v->id};
    d->out++;
    d->out_size += v->size;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

/* Blocks of the tenant (0: of all that allow it) until `wanted` bytes will have been saved, as far as can be told. */
static size_t ask(struct store *s, uint32_t tenant, uint64_t wanted)
{
    struct policy_victim v;
    size_t count = 0;
    for (; has_room(s->demoter, wanted); count++) {
        pthread_mutex_lock(&s->policy_lock);
        int found = policy_demote(s->policy, tenant, clock_mono_us() / 1000, &v);
        pthread_mutex_unlock(&s->policy_lock);
        if (!found)
            break;
        push(s->demoter, &v);
    }
    return count;
}

size_t demote_ask(struct store *s, uint64_t size)
{
    size_t count = 0;
    if (!s->demoter || !s->policy || s->write_error < 0)
        return 0;
    if (size)
        count += ask(s, 0, size);
    for (uint32_t tenant = 0;;) {
        pthread_mutex_lock(&s->policy_lock);
        uint64_t over = policy_near_quota(s->policy, &tenant);
        pthread_mutex_unlock(&s->policy_lock);
        if (!over)
            return count;
        count += ask(s, tenant, over);
    }
}

bool demote_is_busy(struct store *s)
{
    if (!s->demoter)
        return false;
    pthread_mutex_lock(&s->demoter->lock);
    bool busy = s->demoter->out > 0;
    pthread_mutex_unlock(&s->demoter->lock);
    return busy;
}

/* ---- on request, on the caller's thread --------------------------------------------------------------------- */

struct ask_task {
    struct store_task task; /* first */
    size_t count;
};

static int ask_now(struct store *s, struct store_task *t)
{
    ((struct ask_task *)t)->count = demote_ask(s, space_over_demotion(s));
    return 0;
}

/* Until the thread has handled what has been named by now. How many that are, of all. */
static uint64_t wait_for_thread(struct demoter *d)
{
    pthread_mutex_lock(&d->lock);
    uint64_t until = d->handled + d->count + d->working;
    while (!d->stopping && d->handled < until)
        pthread_cond_wait(&d->changed, &d->lock);
    pthread_mutex_unlock(&d->lock);
    return until;
}

/* What comes meanwhile does not keep the caller: after as many as there are now the rest is the writer's to name. */
int demote_all(struct store *s)
{
    struct ask_task a = {.task.run = ask_now};
    int rc = 0;
    if (!s->demoter)
        return 0;
    uint64_t handled, last = wait_for_thread(s->demoter) + table_count(&s->blocks);
    do {
        rc = atomic_load(&s->jobs_end) ? -TD_ERR_CANCELLED : store_run_task(s, &a.task);
        handled = wait_for_thread(s->demoter);
        rc = rc < 0 ? rc : store_flush(s);
    } while (rc == 0 && (a.count > 0 || demote_is_busy(s)) && handled < last);
    return rc;
}

/* ---- life --------------------------------------------------------------------------------------------------- */

static bool take_memory(struct demoter *d, const struct store_demotion *allowed)
{
    size_t pieces = 2 * (size_t)allowed->shape.layer_count;
    d->allowed = *allowed;
    d->allowed.tenants = d->tenants = calloc(allowed->count + 1, sizeof *d->tenants);
    d->scratch = kv_codec_scratch_create(&allowed->shape);
    d->values = malloc(kv_piece_values(&allowed->shape, KV_BLOCK_TOKENS) * sizeof *d->values);
    d->wire = malloc(pieces * kv_piece_bound(&allowed->shape, KV_BLOCK_TOKENS));
    d->sizes = calloc(pieces, sizeof *d->sizes);
    if (!d->tenants || !d->scratch || !d->values || !d->wire || !d->sizes)
        return false;
    for (size_t i = 0; i < allowed->count; i++)
        d->tenants[i] = allowed->tenants[i];
    return true;
}

int demote_open(struct store *s, const struct store_demotion *allowed)
{
    struct demoter *d = s->demoter = calloc(1, sizeof *d);
    if (!d)
        return -TD_ERR_NOMEM;
    d->store = s;
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
    if (!take_memory(d, allowed))
        return -TD_ERR_NOMEM;
    d->started = pthread_create(&d->thread, NULL, demote_main, d) == 0;
    return d->started ? 0 : -TD_ERR_NOMEM;
}

void demote_stop(struct store *s)
{
    struct demoter *d = s->demoter;
    if (!d || !d->started)
        return;
    pthread_mutex_lock(&d->lock);
    d->stopping = true;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
    stop_note_late(1); /* with a read perhaps, which nobody would miss */
    pthread_join(d->thread, NULL);
    stop_note_late(-1);
    d->started = false;
}

void demote_close(struct store *s)
{
    struct demoter *d = s->demoter;
    if (!d)
        return;
    demote_stop(s);
    kv_codec_scratch_destroy(d->scratch);
    free(d->tenants);
    free(d->values);
    free(d->wire);
    free(d->sizes);
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->lock);
    free(d);
    s->demoter = NULL;
}
