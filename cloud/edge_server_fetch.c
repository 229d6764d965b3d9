/* edge_server_fetch: FETCH: blocks of a conversation, as they lie in the store, sealed for the device to keep (shared/kv_seal.h). See edge_server.h.
 *
 *     begin: the names of the wanted blocks, from the ids --> [ a thread: read a block from the tiers, seal it --> the link: KV_BLOCKs --> all have left ] for
 *     each --> DONE.    CANCEL, or the end of the connection: what is being read is dropped when it comes
 *
 * The link sends KV behind everything else, and DONE would overtake it: so it follows when nothing is left to be sent. What is not there is left out. */
#include "cloud/edge_server_internal.h"
#include "store/tiers.h"
#include <stdlib.h>

struct edge_fetch {
    struct io_job job; /* first */
    struct service *service;
    struct edge_connection *connection; /* the loop's thread alone; NULL: it does not want it any more */
    bool reading;                       /* the job is the thread's */
    struct edge_server *server;
    uint64_t begun_us;          /* with the block at hand */
    uint32_t stream, next, end; /* blocks */
    uint16_t layer_begin, layer_end;
    char tenant[STORE_TENANT_MAX + 1];
    uint8_t shared_key[CRYPTO_KEY_SIZE], own_key[CRYPTO_KEY_SIZE], seal_key[CRYPTO_KEY_SIZE];
    int32_t *ids; /* until the blocks have their names */
    struct fetch_name {
        struct kv_block_id shared, own, seal;
    } * names; /* [end], of which those before the first are not used */
    /* of the block that was read: */
    int status;
    struct fetch_piece {
        uint8_t *bytes; /* malloc'ed */
        size_t size;
    } pieces[]; /* [2 * (layer_end - layer_begin)] */
};

static uint32_t piece_count(const struct edge_fetch *f)
{
    return 2u * (f->layer_end - f->layer_begin);
}

static void drop_pieces(struct edge_fetch *f)
{
    for (uint32_t i = 0; i < piece_count(f); i++) {
        free(f->pieces[i].bytes);
        f->pieces[i].bytes = NULL;
    }
}

static void drop_ids(struct edge_fetch *f)
{
    if (f->ids)
        crypto_wipe(f->ids, (size_t)f->end * KV_BLOCK_TOKENS * sizeof *f->ids);
    free(f->ids);
    f->ids = NULL;
}

static void fetch_free(struct edge_fetch *f)
{
    f->server->fetch_count--;
    drop_pieces(f);
    drop_ids(f);
    free(f->names);
    crypto_wipe(f, sizeof *f);
    free(f);
}

/* ---- on the thread ---- */

static void name_blocks(struct edge_fetch *f)
{
    static const struct kv_block_id root;
    const uint8_t *fingerprint = f->service->fingerprint, *layout = f->service->layout;
    for (uint32_t i = 0; f->ids && i < f->end; i++) {
        struct fetch_name *n = &f->names[i];
        const int32_t *ids = f->ids + (size_t)i * KV_BLOCK_TOKENS;
        kv_block_id_next(f->shared_key, i ? &n[-1].shared : &root, fingerprint, layout, ids, &n->shared);
        kv_block_id_next(f->own_key, i ? &n[-1].own : &root, fingerprint, layout, ids, &n->own);
        kv_block_id_next(f->seal_key, i ? &n[-1].seal : &root, fingerprint, layout, ids, &n->seal);
    }
    drop_ids(f);
}

/* The cloud's own copy, or the principal's. */
static int read_block(const struct edge_fetch *f, struct tier_block **out)
{
    const struct fetch_name *n = &f->names[f->next];
    struct tiers_want want = {KV_ACCEPT_VISIBLE_LOSSLESS, (enum kv_numerics)f->service->numerics,
                              f->layer_begin, f->layer_end};
    int rc = tiers_get(f->service->tiers, f->tenant, &n->shared, &want, out, NULL);
    return rc == 0 ? 0 : tiers_get(f->service->tiers, f->tenant, &n->own, &want, out, NULL);
}

/* A piece that does not say that it is what it should be is not sealed as if it were. */
static int seal_piece(struct edge_fetch *f, uint32_t i, struct span piece,
                      const uint8_t salt[KV_SEAL_SALT_SIZE])
{
    struct kv_piece_head head;
    struct span payload;
    int rc = kv_piece_parse(piece.data, piece.size, &head, &payload);
    if (rc < 0)
        return rc;
    if (head.layer != f->layer_begin + i / 2 || head.is_value != i % 2 || head.block_index != f->next ||
        head.first_token != 0 || head.token_count != KV_BLOCK_TOKENS)
        return -TD_ERR_MISMATCH;
    struct fetch_piece *out = &f->pieces[i];
    out->size = piece.size + KV_SEAL_OVERHEAD;
    out->bytes = malloc(out->size);
    if (!out->bytes)
        return -TD_ERR_NOMEM;
    int64_t size =
        kv_seal_piece(&f->service->seal, salt, &f->names[f->next].seal, piece, out->bytes, out->size);
    return size < 0 ? (int)size : 0;
}

static void fetch_work(struct io_job *job)
{
    struct edge_fetch *f = (struct edge_fetch *)job;
    uint8_t salt[KV_SEAL_SALT_SIZE];
    struct tier_block *block = NULL;
    name_blocks(f);
    f->status = read_block(f, &block);
    if (f->status == 0)
        f->status = crypto_random(salt, sizeof salt);
    for (uint32_t i = 0; i < piece_count(f) && f->status == 0; i++)
        f->status =
            seal_piece(f, i, block->block.pieces[2u * (f->layer_begin - block->block.layer_begin) + i], salt);
    tier_block_release(block);
    if (f->status < 0)
        drop_pieces(f);
}

/* ---- on the loop ---- */

/* Its last frame. */
static void end(struct edge_connection *c, int code, const char *text, uint32_t retry_ms)
{
    struct edge_fetch *f = c->fetch;
    uint32_t stream = f->stream;
    edge_fetch_forget(c);
    if (code < 0) {
        edge_stream_send_error(c, stream, code, text, retry_ms);
        return;
    }
    int rc = link_send(c->link, FRAME_DONE, stream, NULL, NULL, 0);
    if (rc < 0 && rc != -TD_ERR_CLOSED)
        link_fail(c->link, rc, "the peer does not read");
}

static int send_pieces(struct edge_connection *c, struct edge_fetch *f)
{
    int rc = 0;
    for (uint32_t i = 0; i < piece_count(f) && rc == 0; i++) {
        Tandem__KvBlock m = TANDEM__KV_BLOCK__INIT;
        m.block_index = f->next;
        m.layer = f->layer_begin + i / 2;
        m.is_value = i % 2;
        rc = link_send_bulk(c->link, FRAME_KV_BLOCK, f->stream, &m.base, 0, f->pieces[i].bytes,
                            f->pieces[i].size);
        if (rc == 0)
            f->pieces[i].bytes = NULL; /* the link's */
    }
    drop_pieces(f);
    return rc;
}

static void fetch_done(struct io_job *job)
{
    struct edge_fetch *f = (struct edge_fetch *)job;
    struct edge_connection *c = f->connection;
    f->reading = false;
    if (!c) {
        fetch_free(f);
        return;
    }
    int rc = f->status == 0 ? send_pieces(c, f) : 0;
    f->next++;
    if (rc < 0)
        end(c, rc, td_status_text(rc), 0);
    else
        edge_fetch_go_on(c);
    edge_connection_flush(c);
}

void edge_fetch_go_on(struct edge_connection *c)
{
    struct edge_fetch *f = c->fetch;
    struct link_stats stats;
    if (!f || f->reading)
        return;
    link_stats(c->link, &stats);
    if (stats.bulk_queued_size > 0)
        return;
    if (f->next == f->end) {
        end(c, 0, NULL, 0);
        return;
    }
    f->job = (struct io_job){.work = fetch_work, .done = fetch_done};
    f->reading = true;
    f->begun_us = clock_mono_us();
    int rc = io_worker_submit(f->service->fetcher, &f->job);
    if (rc < 0) {
        f->reading = false;
        end(c, -TD_ERR_BUSY, td_status_text(rc), EDGE_FETCH_MS);
    }
}

/* A link that takes nothing keeps no place from others. */
void edge_fetch_tick(struct edge_connection *c, uint64_t now_us)
{
    if (!c->fetch || now_us - c->fetch->begun_us < EDGE_FETCH_LATE_US)
        return;
    end(c, -TD_ERR_BUSY, "a block of this FETCH took too long", EDGE_FETCH_MS);
    edge_connection_flush(c);
}

void edge_fetch_forget(struct edge_connection *c)
{
    struct edge_fetch *f = c->fetch;
    c->fetch = NULL;
    if (!f)
        return;
    f->connection = NULL;
    if (!f->reading)
        fetch_free(f);
}

void edge_fetch_cancelled(struct edge_connection *c, uint32_t stream)
{
    if (c->fetch && c->fetch->stream == stream)
        edge_fetch_forget(c);
}

/* ---- the beginning ---- */

/* Whoever reads slowly, on as many connections and under as many names as there are places, leaves some to others: a tenant has no more than are free. */
static bool has_its_share(const struct edge_connection *c)
{
    uint32_t count = 0, of_tenant = 0;
    for (const struct edge_connection *o = c->server->connections; o; o = o->next) {
        bool is_tenants = o->fetch && strcmp(o->who.tenant, c->who.tenant) == 0;
        of_tenant += is_tenants;
        count += is_tenants && strcmp(o->who.principal, c->who.principal) == 0;
    }
    return count >= EDGE_FETCHES_EACH || of_tenant + c->server->fetch_count >= c->server->fetches_max;
}

/* Somebody who waits for a place computes, or decodes, before anybody keeps copies. */
static bool is_busy(const struct edge_connection *c)
{
    const struct service *s = c->server->service;
    struct engine *engine = engine_port_engine(s->engine);
    struct engine_stats stats = {0};
    if (engine)
        engine_stats(engine, &stats);
    return !engine || s->draining || c->fetch || stats.waiting > 0 || has_its_share(c);
}

static struct edge_fetch *fetch_create(struct edge_connection *c, uint32_t stream, const Tandem__Fetch *m)
{
    struct edge_fetch *f = calloc(1, sizeof *f + 2u * (m->layer_end - m->layer_begin) * sizeof *f->pieces);
    if (!f)
        return NULL;
    f->server = c->server;
    f->server->fetch_count++;
    f->service = c->server->service;
    f->connection = c;
    f->stream = stream;
    f->next = m->block_index;
    f->end = m->block_index + m->block_count;
    f->layer_begin = (uint16_t)m->layer_begin;
    f->layer_end = (uint16_t)m->layer_end;
    memcpy(f->tenant, c->who.tenant, sizeof f->tenant);
    memcpy(f->shared_key, c->shared_key, sizeof f->shared_key);
    memcpy(f->own_key, c->own_key, sizeof f->own_key);
    memcpy(f->seal_key, c->seal_key, sizeof f->seal_key);
    f->names = malloc(f->end * sizeof *f->names);
    if (f->names)
        return f;
    fetch_free(f);
    return NULL;
}

static void refuse(struct edge_connection *c, uint32_t stream, int code, const char *text, bool retry)
{
    edge_stream_send_error(c, stream, code, text, retry ? EDGE_FETCH_MS : 0);
}

int edge_fetch_begin(struct edge_connection *c, const struct wire_frame *frame)
{
    const Tandem__Fetch *m = frame->fetch;
    const struct service *s = c->server->service;
    if (!s->fetcher || frame->payload.size == 0 || m->layer_end > s->layer_count) {
        refuse(c, frame->stream, -TD_ERR_UNSUPPORTED, "FETCH of what this node cannot give", false);
        return 0;
    }
    if (is_busy(c)) {
        refuse(c, frame->stream, -TD_ERR_BUSY, "this node has no time for FETCH now", true);
        return 0;
    }
    struct edge_fetch *f = fetch_create(c, frame->stream, m);
    int rc = f ? edge_stream_ids(frame->payload, s->vocab_count, &f->ids) : -TD_ERR_NOMEM;
    if (rc < 0) {
        if (f)
            fetch_free(f);
        refuse(c, frame->stream, rc, td_status_text(rc), rc == -TD_ERR_NOMEM);
        return 0;
    }
    c->fetch = f;
    edge_fetch_go_on(c);
    return 0;
}
