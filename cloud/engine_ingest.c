/* engine_ingest: what edges send, on the engine thread: rows are staged until they run, pieces are written to pages. Every message that leaves the
 * staging area, used or not, gives its bytes back through ENGINE_INGESTED; a message whose sequence has gone gives them back silently (the owner of
 * the stream knows that it ended).
 *
 * Where a device decodes (backend_ops.pieces_write), pieces of one turn go to it together, behind the last look at them and in front of the step. They
 * count as taken before that: what is wrong in one ends its sequence, so nothing is computed from it. */
#include "cloud/engine_internal.h"
#include <stdlib.h>

void engine_do_plan(struct engine *e, struct sequence *s, uint32_t epoch, const struct plan_range *ranges,
                    uint32_t count, bool resumes)
{
    struct td_error err;
    s->upload_us = e->clock();
    s->idle = false;
    int rc = sequence_plan(s, &e->model, epoch, ranges, count, resumes, &err);
    if (rc < 0) {
        metric_add(e->metrics.rejected, 1);
        engine_fail(e, s, rc, err.text);
    } else if (s->state == SEQ_RUNNING && s->load_id && !sequence_is_own_work(s, s->load_end)) {
        engine_meet_stop(s);
    }
}

/* For so many bytes more of its principal? What came is under the node's limit since it was taken; what it was unpacked to comes on top of it. */
static bool has_room(const struct engine *e, const struct sequence *s, size_t size)
{
    size_t staged = size, all = atomic_load(&e->staged_size);
    for (uint32_t i = 0; i < e->live_count; i++) {
        const struct sequence *o = e->live[i];
        all += o->unpacked_size;
        if (strcmp(o->principal, s->principal) == 0 && strcmp(o->tenant, s->tenant) == 0)
            staged += o->staged_size + o->unpacked_size;
    }
    return staged <= LIMIT_STAGED_SIZE_PER_PRINCIPAL && all <= LIMIT_STAGED_SIZE;
}

/* Consume a message that was not even staged. */
static void consume_at_once(struct sequence *s, size_t size)
{
    s->staged_size += size;
    sequence_consume(s, size);
}

/* --- HIDDEN --------------------------------------------------------------------------------------- */

/* Rows are decoded where they run; here only to see that they can be. A wrong size is the sequence's to refuse. */
static int check_rows(struct engine *e, const struct seq_hidden *h)
{
    size_t row_size = hidden_wire_size(h->dtype, 1, e->model.embd_size);
    if (row_size == 0 || h->size / row_size != h->count || h->size % row_size != 0)
        return 0;
    for (uint32_t at = 0; at < h->count;) {
        uint32_t rows = TD_MIN(h->count - at, e->config.token_budget);
        struct span src = {h->payload + at * row_size, rows * row_size};
        int rc = hidden_decode(h->dtype, src, rows, e->model.embd_size, e->hidden);
        if (rc < 0)
            return rc;
        at += rows;
    }
    return 0;
}

static void free_message(struct seq_hidden *h)
{
    free(h->payload);
    free(h);
}

void engine_do_hidden(struct engine *e, uint64_t handle, uint32_t epoch, uint32_t layer, struct seq_hidden *h)
{
    struct sequence *s = engine_find(e, handle);
    size_t size = h->size;
    uint32_t count = h->count;
    if (!s) {
        atomic_fetch_sub(&e->staged_size, size);
        free_message(h);
        return;
    }
    s->uplink_size += size;
    s->uplink_raw_size += (uint64_t)count * e->model.embd_size * sizeof(float);
    if (!has_room(e, s, size)) { /* lost: the rows behind it show the gap, and these are computed from ids */
        metric_add(e->metrics.rejected, 1);
        consume_at_once(s, size);
        free_message(h);
        return;
    }
    struct td_error err;
    uint32_t had = s->hidden_next;
    int rc = check_rows(e, h);
    if (rc < 0) {
        consume_at_once(s, size);
        free_message(h);
        rc = td_fail(&err, -TD_ERR_PROTOCOL, "hidden states hold a value that is not finite");
    } else {
        rc = sequence_hidden(s, &e->model, epoch, layer, h, &err);
    }
    if (rc < 0) {
        metric_add(e->metrics.rejected, 1);
        engine_fail(e, s, rc, err.text);
        return;
    }
    if (s->hidden_next == had)
        return; /* sent again, or of an older plan: no progress, whatever comes of it keeps no upload alive */
    s->upload_us = e->clock();
    s->idle = false;
    metric_add(e->metrics.edge_prefill, count);
}

/* --- KV pieces ------------------------------------------------------------------------------------ */

static void consume_piece(struct sequence *s, struct ingest_piece *p)
{
    sequence_consume(s, p->wire_size);
    ingest_piece_free(p);
}

/* Later in this turn, with others. False: no more of them. */
static bool queue_piece(struct engine *e, const struct sequence *s, uint32_t page, struct ingest_piece *p)
{
    struct engine_writes *w = e->writes;
    if (w->count == ENGINE_WRITES_MAX)
        return false;
    struct page_piece *to = &w->pieces[w->count];
    *to = (struct page_piece){.page = page, .head = p->head, .payload = p->payload};
    if (p->values) {
        to->head.codec = KV_RAW;
        to->head.table = 0;
        to->payload =
            (struct span){(const uint8_t *)p->values,
                          kv_piece_values(&e->model.shape, p->head.token_count) * sizeof *p->values};
    }
    w->keys[w->count] = s->key;
    w->owners[w->count++] = p;
    return true;
}

/* Those of sequences that have gone meanwhile: their pages may be somebody else's already. */
static void forget_gone(struct engine *e)
{
    struct engine_writes *w = e->writes;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < w->count; i++) {
        if (!engine_find_key(e, w->keys[i])) {
            ingest_piece_free(w->owners[i]);
            continue;
        }
        w->keys[kept] = w->keys[i];
        w->owners[kept] = w->owners[i];
        w->pieces[kept++] = w->pieces[i];
    }
    w->count = kept;
}

static void write_queued(struct engine *e)
{
    struct engine_writes *w = e->writes;
    forget_gone(e);
    int rc = w->count > 0 ? e->backend->ops->pieces_write(e->backend, w->pieces, w->count) : 0;
    metric_add(e->metrics.device_pieces, w->count);
    for (uint32_t i = 0; i < w->count; i++) {
        int status = rc < 0 ? rc : w->pieces[i].status;
        struct sequence *s = status < 0 ? engine_find_key(e, w->keys[i]) : NULL;
        if (s && rc < 0) {
            engine_fail(e, s, rc, "KV of the edge could not be written to a page");
        } else if (s) {
            metric_add(e->metrics.rejected, 1);
            engine_fail(e, s, -TD_ERR_PROTOCOL,
                        "a KV piece holds what no piece may, or a value that is not finite");
        }
        ingest_piece_free(w->owners[i]);
    }
    w->count = 0;
}

/* A piece is K or V of a layer; of a block's later tokens: read, put in, write. */
static int write_piece(struct engine *e, uint32_t page, const struct ingest_piece *p)
{
    const struct kv_piece_head *h = &p->head;
    uint32_t tokens = h->first_token + (uint32_t)h->token_count, dim = h->head_dim;
    if (h->first_token == 0)
        return e->backend->ops->page_write(e->backend, page, h->layer, tokens, h->is_value ? NULL : p->values,
                                           h->is_value ? p->values : NULL);
    int rc = e->backend->ops->page_read(e->backend, page, h->layer, tokens, e->piece_k, e->piece_v);
    if (rc < 0)
        return rc;
    uint16_t *to = h->is_value ? e->piece_v : e->piece_k;
    for (uint32_t head = 0; head < h->kv_head_count; head++)
        memcpy(to + ((size_t)head * tokens + h->first_token) * dim,
               p->values + (size_t)head * h->token_count * dim, (size_t)h->token_count * dim * sizeof *to);
    return e->backend->ops->page_write(e->backend, page, h->layer, tokens, e->piece_k, e->piece_v);
}

static void took_piece(struct engine *e, struct sequence *s, const struct ingest_piece *p)
{
    sequence_take_piece(s, p);
    s->kv_us = e->clock();
    s->idle = false;
}

enum placing { PLACED, NO_PAGE, REFUSED };

/* Takes the piece unless there is no page. REFUSED: s has failed and is gone. */
static enum placing place_piece(struct engine *e, struct sequence *s, struct ingest_piece *p)
{
    struct td_error err;
    enum piece_verdict verdict = sequence_check_piece(s, p, &err);
    uint32_t block = p->head.block_index;
    if (verdict == PIECE_TAKE && s->state != SEQ_RUNNING)
        return NO_PAGE;
    if (verdict == PIECE_TAKE && s->pages[block] == PAGE_NONE) {
        s->pages[block] = engine_alloc_page(e);
        if (s->pages[block] == PAGE_NONE) {
            e->short_of_pages = true;
            return NO_PAGE;
        }
        s->page_count++;
    }
    if (verdict == PIECE_TAKE && e->writes) {
        if (!queue_piece(e, s, s->pages[block], p)) {
            e->short_of_pages = true; /* the next turn is soon */
            return NO_PAGE;
        }
        took_piece(e, s, p);
        sequence_consume(s, p->wire_size);
        return PLACED;
    }
    if (verdict == PIECE_TAKE && write_piece(e, s->pages[block], p) == 0)
        took_piece(e, s, p);
    consume_piece(s, p);
    if (verdict != PIECE_REFUSE)
        return PLACED;
    metric_add(e->metrics.rejected, 1);
    engine_fail(e, s, -TD_ERR_PROTOCOL, err.text);
    return REFUSED;
}

static void take_piece(struct engine *e, struct sequence *s, struct ingest_piece *p)
{
    s->staged_size += p->wire_size;
    s->uplink_size += p->wire_size;
    if (p->status == 0)
        s->uplink_raw_size += kv_piece_values(&e->model.shape, p->head.token_count) * sizeof(uint16_t);
    bool lost = p->status == -TD_ERR_CHECKSUM ||
                (p->status == 0 && p->sealed && !sequence_takes_sealed(s, &e->model, p));
    if (lost || !has_room(e, s, 0)) {
        metric_add(e->metrics.rejected,
                   1); /* a miss: the block will not become whole, so do not wait for it */
        if (p->block_index < sequence_blocks(s->plan_end))
            s->blocks[p->block_index].closed = true;
        consume_piece(s, p);
    } else if (p->status < 0) {
        metric_add(e->metrics.rejected, 1);
        consume_piece(s, p);
        engine_fail(e, s, -TD_ERR_PROTOCOL,
                    "a KV piece has a shape that is not the model's, or a value that is not finite");
    } else if (place_piece(e, s, p) == NO_PAGE) {
        sequence_stage_piece(s, p);
    }
}

/* Pieces that waited for a page. False: s is gone. */
static bool place_staged(struct engine *e, struct sequence *s)
{
    while (s->pieces_first) {
        struct ingest_piece *p = s->pieces_first, *rest = p->next;
        size_t unpacked = p->values_size;
        s->unpacked_size -= unpacked;
        s->pieces_first = rest; /* off the list before anything can fail and free it */
        if (!rest)
            s->pieces_last = &s->pieces_first;
        enum placing placing = place_piece(e, s, p);
        if (placing == REFUSED)
            return false;
        if (placing == NO_PAGE) {
            p->next = rest;
            s->unpacked_size += unpacked;
            s->pieces_first = p;
            if (!rest)
                s->pieces_last = &p->next;
            return true;
        }
    }
    return true;
}

void engine_take_pieces(struct engine *e)
{
    for (uint32_t i = 0; i < e->live_count;) {
        struct sequence *s = e->live[i];
        if (s->state != SEQ_RUNNING || place_staged(e, s))
            i++;
    }
    for (struct ingest_piece *p; (p = ingest_pop(e->ingest));) {
        struct sequence *s = engine_find(e, p->sequence);
        if (s) {
            take_piece(e, s, p);
        } else {
            atomic_fetch_sub(&e->staged_size, p->wire_size);
            ingest_piece_free(p);
        }
    }
    if (e->writes)
        write_queued(e);
}
