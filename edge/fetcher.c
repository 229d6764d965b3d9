/* fetcher: see fetcher.h. */
#include "edge/fetcher.h"
#include "shared/log.h"
#include "shared/metrics.h"
#include <stdlib.h>

#define MODULE   "edge"
#define PAUSE_US 5000000u /* after a refusal, unless the cloud names another time */

struct wanted { /* a conversation, or another prompt with its reply */
    struct wanted *next;
    int32_t *ids;              /* [count * KV_BLOCK_TOKENS] */
    struct kv_block_id *chain; /* sealed_block_id of each */
    uint32_t count, at, tries; /* blocks; below `at` there is nothing to be asked for */
};

struct fetcher {
    struct uplink *uplink;
    struct kv_disk *disk;
    struct kv_shape shape;
    bool has_tag, distrusted;
    enum kv_numerics numerics; /* the cloud's */
    uint8_t tag[KV_SEAL_TAG_SIZE];
    struct wanted *wanted; /* the latest first */
    uint64_t pause_until_us;
    uint32_t stream; /* 0: none; else of wanted->at … end */
    uint32_t end;
    uint32_t block, piece_count; /* that is being put together, and what is there of it */
    struct span *pieces;         /* [2 * layers] in `bytes` */
    uint8_t *bytes;
    size_t size, capacity;
    struct kv_quality quality; /* the worst of these */
    struct metric *fetched;
};

void sealed_block_id(const uint8_t tag[KV_SEAL_TAG_SIZE], const struct kv_block_id *id,
                     struct kv_block_id *out)
{
    static const char label[] = "tandem-sealed-block"; /* with its NUL */
    struct sha256 h;
    sha256_init(&h);
    sha256_update(&h, label, sizeof label);
    sha256_update(&h, tag, KV_SEAL_TAG_SIZE);
    sha256_update(&h, id->bytes, sizeof id->bytes);
    sha256_final(&h, out->bytes);
}

/* ---- what is wanted ---- */

static void wanted_free(struct wanted *w)
{
    if (!w)
        return;
    if (w->ids)
        crypto_wipe(w->ids, (size_t)w->count * KV_BLOCK_TOKENS * sizeof *w->ids);
    free(w->ids);
    free(w->chain);
    free(w);
}

static void drop_wanted(struct fetcher *f)
{
    while (f->wanted) {
        struct wanted *next = f->wanted->next;
        wanted_free(f->wanted);
        f->wanted = next;
    }
}

/* Those that it goes on with, and those beyond the bound. */
static void drop_older(struct fetcher *f, const struct wanted *latest)
{
    uint32_t count = 1;
    for (struct wanted **at = &f->wanted; *at;) {
        struct wanted *w = *at;
        bool part = w->count <= latest->count &&
                    memcmp(&w->chain[w->count - 1], &latest->chain[w->count - 1], sizeof *w->chain) == 0;
        if (!part && count++ < FETCHER_WANTED) {
            at = &w->next;
            continue;
        }
        *at = w->next;
        wanted_free(w);
    }
}

static void give_up(struct fetcher *f)
{
    uint32_t stream = f->stream;
    f->stream = f->piece_count = 0;
    f->size = 0;
    uplink_close(f->uplink, stream);
}

void fetcher_want(struct fetcher *f, const int32_t *ids, const struct kv_block_id *chain, uint32_t count)
{
    if (!f || !f->has_tag || f->distrusted || count == 0 || count > LIMIT_PROMPT_TOKENS / KV_BLOCK_TOKENS)
        return;
    struct wanted *w = calloc(1, sizeof *w);
    size_t ids_size = (size_t)count * KV_BLOCK_TOKENS * sizeof *ids;
    if (!w)
        return;
    w->count = count;
    w->ids = malloc(ids_size);
    w->chain = malloc(count * sizeof *chain);
    if (!w->ids || !w->chain) {
        free(w->ids);
        w->ids = NULL;
        wanted_free(w);
        return;
    }
    memcpy(w->ids, ids, ids_size);
    for (uint32_t i = 0; i < count; i++)
        sealed_block_id(f->tag, &chain[i], &w->chain[i]);
    kv_disk_touch(f->disk, w->chain, count);
    give_up(f); /* it is of another conversation, or of this one as it was */
    drop_older(f, w);
    w->next = f->wanted;
    f->wanted = w;
}

/* ---- what is there ---- */

const uint8_t *fetcher_tag(const struct fetcher *f)
{
    return f && f->has_tag ? f->tag : NULL;
}

uint32_t fetcher_held(const struct fetcher *f, const struct kv_block_id *chain, uint32_t begin, uint32_t end,
                      enum kv_accept accept)
{
    struct kv_block_id id;
    uint32_t at = begin;
    if (!f || !f->has_tag)
        return 0;
    for (; at < end; at++) {
        sealed_block_id(f->tag, &chain[at], &id);
        if (!kv_disk_accepts(f->disk, &id, f->shape.layer_count, accept, f->numerics))
            break;
    }
    return at - begin;
}

static bool lacks(const struct fetcher *f, const struct wanted *w, uint32_t block)
{
    return kv_disk_lacks(f->disk, &w->chain[block], f->shape.layer_count);
}

/* ---- asking ---- */

/* Of this conversation only blocks below it are asked for now. */
static uint32_t may_ask_until(const struct wanted *w, const struct plan_model *believed)
{
    double blocks = FETCHER_IDS_US * believed->rate_bytes_per_us / (KV_BLOCK_TOKENS * sizeof *w->ids);
    bool pays = plan_model_sealed_pays(believed, w->count * KV_BLOCK_TOKENS);
    return pays ? (uint32_t)TD_MIN(blocks, (double)w->count) : 0;
}

/* The next blocks that are not there, and may be asked for: [wanted->at, end) of what is then the first. False: there are none. */
static bool find_next(struct fetcher *f, const struct plan_model *believed)
{
    for (struct wanted **at = &f->wanted; *at;) {
        struct wanted *w = *at;
        uint32_t until = may_ask_until(w, believed);
        while (w->at < w->count && !lacks(f, w, w->at))
            w->at++;
        if (w->at < w->count && w->at >= until) {
            at = &w->next;
            continue;
        }
        *at = w->next;
        if (w->at == w->count) {
            wanted_free(w);
            continue;
        }
        w->next = f->wanted;
        f->wanted = w;
        f->end = w->at + 1;
        while (f->end < until && f->end - w->at < FETCHER_BLOCKS && lacks(f, w, f->end))
            f->end++;
        return true;
    }
    return false;
}

static int ask(struct fetcher *f)
{
    const struct wanted *w = f->wanted;
    size_t count = (size_t)f->end * KV_BLOCK_TOKENS;
    uint8_t *payload = malloc(count * sizeof(uint32_t));
    if (!payload)
        return -TD_ERR_NOMEM;
    for (size_t i = 0; i < count; i++)
        store_le32(payload + i * sizeof(uint32_t), (uint32_t)w->ids[i]);
    Tandem__Fetch m = TANDEM__FETCH__INIT;
    m.block_index = w->at;
    m.block_count = f->end - w->at;
    m.layer_end = f->shape.layer_count;
    int rc = uplink_fetch(f->uplink, f, &m, payload, count * sizeof(uint32_t), &f->stream);
    crypto_wipe(payload, count * sizeof(uint32_t));
    free(payload);
    f->block = w->at;
    f->piece_count = 0;
    f->size = 0;
    return rc;
}

uint64_t fetcher_run(struct fetcher *f, const struct plan_model *believed, uint64_t now_us)
{
    if (!f)
        return 0;
    if (!believed || !f->has_tag) {
        give_up(f);
        return 0;
    }
    if (f->stream || !f->wanted)
        return 0;
    if (now_us < f->pause_until_us)
        return f->pause_until_us - now_us;
    if (!find_next(f, believed))
        return 0;
    if (ask(f) < 0) {
        f->stream = 0;
        f->pause_until_us = now_us + PAUSE_US;
        return PAUSE_US;
    }
    return 0;
}

/* ---- answers ---- */

/* All of a block are there. */
static void keep_block(struct fetcher *f)
{
    const struct wanted *w = f->wanted;
    struct store_block block = {.id = w->chain[f->block],
                                .quality = f->quality,
                                .block_index = f->block,
                                .layer_end = (uint16_t)f->shape.layer_count,
                                .pieces = f->pieces};
    if (f->block > 0)
        block.parent = w->chain[f->block - 1];
    if (kv_disk_put(f->disk, &block) == 0) /* else counted there; it can be asked for again */
        metric_add(f->fetched, 1);
    f->block++;
    f->piece_count = 0;
    f->size = 0;
}

/* Blocks may be left out, whole; within a block all pieces come, in order. */
static bool is_expected(struct fetcher *f, const Tandem__KvBlock *m, const struct kv_piece_head *h)
{
    bool ahead = f->piece_count == 0 && m->block_index > f->block && m->block_index < f->end;
    uint32_t block = ahead ? m->block_index : f->block;
    if (block >= f->end || m->block_index != block || m->layer != f->piece_count / 2 ||
        m->is_value != (f->piece_count % 2 == 1))
        return false;
    f->block = block;
    return h->codec == KV_SEALED && h->block_index == block && h->layer == m->layer &&
           h->is_value == (uint8_t)m->is_value && h->first_token == 0 && h->token_count == KV_BLOCK_TOKENS &&
           h->kv_head_count == f->shape.kv_head_count && h->head_dim == f->shape.head_dim;
}

static int on_piece(struct fetcher *f, const Tandem__KvBlock *m, struct span piece)
{
    struct kv_piece_head head;
    struct span payload;
    if (kv_piece_parse(piece.data, piece.size, &head, &payload) < 0 || !is_expected(f, m, &head) ||
        piece.size > f->capacity - f->size)
        return -TD_ERR_PROTOCOL;
    uint8_t *at = f->bytes + f->size;
    memcpy(at, piece.data, piece.size);
    f->size += piece.size;
    f->quality = f->piece_count == 0 ? head.quality : kv_quality_worst(f->quality, head.quality);
    f->pieces[f->piece_count++] = (struct span){at, piece.size};
    if (f->piece_count == 2 * f->shape.layer_count)
        keep_block(f);
    return 0;
}

/* The stream is over: on with what follows, later if the cloud says so. */
static void on_end(struct fetcher *f, const Tandem__Error *error)
{
    struct wanted *w = f->wanted;
    bool again = error && error->retry && ++w->tries < FETCHER_TRIES;
    if (!error)
        w->at = f->end;
    else if (!again)
        w->at = w->count;
    if (error)
        f->pause_until_us =
            clock_mono_us() +
            (again && error->retry_after_ms ? error->retry_after_ms * UINT64_C(1000) : PAUSE_US);
    f->stream = f->piece_count = 0;
    f->size = 0;
}

static int answer(struct fetcher *f, const struct wire_frame *frame)
{
    switch (frame->type) {
    case FRAME_KV_BLOCK:
        return on_piece(f, frame->kv_block, frame->payload);
    case FRAME_DONE:
        if (f->piece_count > 0)
            return -TD_ERR_PROTOCOL;
        on_end(f, NULL);
        return 0;
    case FRAME_ERROR:
        on_end(f, frame->error);
        return 0;
    default:
        return -TD_ERR_PROTOCOL;
    }
}

bool fetcher_is_busy(const struct fetcher *f)
{
    return f && f->stream != 0;
}

int fetcher_frame(struct fetcher *f, const struct wire_frame *frame)
{
    if (!f->stream || frame->stream != f->stream)
        return 0;
    int rc = answer(f, frame);
    if (rc < 0) {
        log_warn(MODULE, "the cloud answered a FETCH with what was not asked for: it is not asked again");
        f->distrusted = true;
        f->stream = 0;
        drop_wanted(f);
    }
    return rc;
}

/* ---- life ---- */

void fetcher_ready(struct fetcher *f, const Tandem__Welcome *welcome)
{
    if (!f)
        return;
    bool same = f->has_tag && welcome->seal.len == sizeof f->tag &&
                memcmp(f->tag, welcome->seal.data, sizeof f->tag) == 0;
    f->numerics = (enum kv_numerics)welcome->version->numerics;
    if (!same)
        drop_wanted(f);
    f->has_tag = welcome->seal.len == sizeof f->tag;
    if (f->has_tag)
        memcpy(f->tag, welcome->seal.data, sizeof f->tag);
}

void fetcher_lost(struct fetcher *f)
{
    if (!f)
        return;
    f->stream = f->piece_count = 0;
    f->size = 0;
}

struct fetcher *fetcher_create(struct uplink *uplink, struct kv_disk *disk, const struct kv_shape *shape)
{
    struct fetcher *f = calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->uplink = uplink;
    f->disk = disk;
    f->shape = *shape;
    f->capacity =
        2 * (size_t)shape->layer_count * (kv_piece_bound(shape, KV_BLOCK_TOKENS) + KV_SEAL_OVERHEAD);
    f->bytes = malloc(f->capacity); /* touched where it is used */
    f->pieces = malloc(2 * (size_t)shape->layer_count * sizeof *f->pieces);
    if (!f->bytes || !f->pieces) {
        fetcher_destroy(f);
        return NULL;
    }
    f->fetched = metric_counter("tandem_edge_kv_fetched_total", NULL,
                                "Blocks that the cloud has sealed for this device to keep.");
    return f;
}

void fetcher_destroy(struct fetcher *f)
{
    if (!f)
        return;
    drop_wanted(f);
    free(f->pieces);
    free(f->bytes);
    free(f);
}
