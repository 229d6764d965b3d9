/* sequence_work: what can run next, and what has run. See sequence.h for the picture. */
#include "cloud/sequence.h"
#include <stdlib.h>

#define UPLOAD_IDLE_US (LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000))

/* The plan's range at a position, whether or not it still holds; NULL: the cloud's. */
static const struct plan_range *planned_range(const struct sequence *s, uint32_t position)
{
    for (uint32_t i = 0; i < s->range_count; i++) {
        const struct plan_range *r = &s->ranges[i];
        if (r->layers > 0 && position >= r->first_token && position - r->first_token < r->count)
            return r;
    }
    return NULL;
}

static const struct plan_range *edge_range_at(const struct sequence *s, uint32_t position)
{
    return position < s->ids_until ? NULL : planned_range(s, position);
}

/* --- frontiers ------------------------------------------------------------------------------------ */

static void advance_complete(struct sequence *s)
{
    while (s->complete < s->high) {
        uint32_t block = s->complete / KV_BLOCK_TOKENS, start = block * KV_BLOCK_TOKENS;
        uint32_t end = TD_MIN(s->high, start + KV_BLOCK_TOKENS);
        const struct seq_block *b = &s->blocks[block];
        if (b->edge_layers > 0 && b->missing > 0) {
            uint32_t edge_begin = start + b->edge_first, edge_end = edge_begin + b->edge_count;
            if (s->complete >= edge_begin && s->complete < edge_end)
                return;
            if (s->complete < edge_begin)
                end = TD_MIN(end, edge_begin);
        }
        s->complete = end;
    }
}

static void drop_old_hidden(struct sequence *s)
{
    for (struct seq_hidden *h; (h = s->hidden_first);) {
        uint32_t end = h->first_token + h->count;
        if (end > s->high && end > s->ids_until)
            return;
        s->hidden_first = h->next;
        if (!s->hidden_first)
            s->hidden_last = &s->hidden_first;
        sequence_consume(s, h->size);
        free(h->payload);
        free(h);
    }
}

/* Where the edge does all layers, nothing runs here but the last row's logits: step over the rest. */
static void step_over(struct sequence *s, const struct seq_model *m)
{
    for (;;) {
        const struct plan_range *r = s->high < s->ids_count ? edge_range_at(s, s->high) : NULL;
        if (!r || r->layers < m->shape.layer_count)
            return;
        uint32_t end = r->first_token + r->count;
        uint32_t until = end == s->ids_count ? end - 1 : end;
        if (s->high >= until)
            return;
        s->high = until;
    }
}

static void settle(struct sequence *s, const struct seq_model *m)
{
    step_over(s, m);
    advance_complete(s);
    drop_old_hidden(s);
}

/* --- the next job --------------------------------------------------------------------------------- */

static struct seq_job wait_for_edge(struct sequence *s, uint64_t now_us, uint64_t deadline_us)
{
    if (s->idle_since_us == 0)
        s->idle_since_us = now_us;
    s->deadline_us = deadline_us;
    return (struct seq_job){.kind = JOB_NONE};
}

/* Rows that lack [0, k) from s->complete on, as far as k is the same. */
static struct seq_job refill_job(const struct sequence *s)
{
    uint32_t block = s->complete / KV_BLOCK_TOKENS, layers = s->blocks[block].edge_layers, end = s->complete;
    for (; end < s->high; block++) {
        const struct seq_block *b = &s->blocks[block];
        uint32_t begin = block * KV_BLOCK_TOKENS + b->edge_first;
        if (b->missing == 0 || b->edge_layers != layers || begin > end)
            break;
        end = begin + b->edge_count;
        if (end % KV_BLOCK_TOKENS != 0)
            break;
    }
    return (struct seq_job){.kind = JOB_REFILL,
                            .position = s->complete,
                            .rows = TD_MIN(end, s->high) - s->complete,
                            .layer_end = layers};
}

/* Something needs layers of earlier positions that the edge was to send: wait for them, or stop waiting. */
static struct seq_job refill_or_wait(struct sequence *s, uint64_t now_us, uint64_t stall_us)
{
    if (s->blocked_us == 0)
        s->blocked_us = now_us;
    uint64_t patience = s->away || s->is_private ? TD_MAX(stall_us, UPLOAD_IDLE_US) : stall_us;
    uint64_t deadline = TD_MAX(s->blocked_us, s->kv_us) + patience;
    if (s->kv_patience_us && !s->away && !s->is_private)
        deadline = TD_MIN(deadline, s->blocked_us + s->kv_patience_us);
    if (s->pieces_lost || s->blocks[s->complete / KV_BLOCK_TOKENS].closed || now_us >= deadline)
        return refill_job(s);
    return wait_for_edge(s, now_us, deadline);
}

static struct seq_job ids_job(struct sequence *s, const struct seq_model *m, uint64_t now_us,
                              uint64_t stall_us)
{
    if (s->complete < s->high)
        return refill_or_wait(s, now_us, stall_us);
    uint32_t end = s->ids_count;
    for (uint32_t i = 0; i < s->range_count; i++) {
        const struct plan_range *r = &s->ranges[i];
        uint32_t begin = TD_MAX(r->first_token, s->ids_until);
        if (r->layers > 0 && begin > s->high && begin < r->first_token + r->count)
            end = TD_MIN(end, begin);
    }
    struct seq_job job = {.kind = JOB_IDS,
                          .position = s->high,
                          .rows = end - s->high,
                          .layer_end = m->shape.layer_count,
                          .logits = end == s->ids_count && !s->finishing};
    job.decode = job.rows == 1 && s->ids_count > s->plan_end;
    return job;
}

/* Does an earlier position lack a layer that rows from `layer` on read? */
static bool lacks_layers(const struct sequence *s, uint32_t layer)
{
    for (uint32_t i = s->complete / KV_BLOCK_TOKENS; i * KV_BLOCK_TOKENS < s->high; i++)
        if (s->blocks[i].missing > 0 && s->blocks[i].edge_layers > layer)
            return true;
    return false;
}

/* Rows that are there without a gap from s->high on. */
static uint32_t hidden_rows_ready(const struct sequence *s, const struct plan_range *r)
{
    uint32_t end = s->high;
    for (const struct seq_hidden *h = s->hidden_first; h && h->first_token <= end; h = h->next)
        end = TD_MAX(end, h->first_token + h->count);
    return TD_MIN(end, r->first_token + r->count) - s->high;
}

static struct seq_job edge_job(struct sequence *s, const struct seq_model *m, const struct plan_range *r,
                               uint64_t now_us, uint64_t stall_us)
{
    uint32_t rows = hidden_rows_ready(s, r);
    if (rows == 0 && s->hidden_first) { /* later rows are there: these will not come any more */
        s->ids_until = TD_MIN(s->hidden_first->first_token, r->first_token + r->count);
        return ids_job(s, m, now_us, stall_us);
    }
    uint64_t deadline = TD_MAX(s->upload_us, s->kv_us) + UPLOAD_IDLE_US;
    bool impatient = s->rows_came && s->rows_patience_us && !s->away && !s->is_private;
    if (impatient)
        deadline = TD_MIN(deadline, s->upload_us + s->rows_patience_us +
                                        (uint64_t)(s->plan_end - s->high) * s->rows_patience_token_us);
    if (rows == 0 && now_us < deadline)
        return wait_for_edge(s, now_us, deadline);
    if (rows == 0) {
        s->is_private ? sequence_void_plan(s) : sequence_leave(s);
        return ids_job(s, m, now_us, stall_us);
    }
    struct seq_job job = {.kind = JOB_HIDDEN,
                          .position = s->high,
                          .rows = rows,
                          .layer_begin = r->layers,
                          .layer_end = m->shape.layer_count,
                          .logits = s->high + rows == s->ids_count};
    if (r->layers == m->shape.layer_count)
        job.kind = JOB_LAST;
    else if (s->complete < s->high && lacks_layers(s, r->layers))
        return refill_or_wait(s, now_us, stall_us);
    return job;
}

/* Not without the ids of a private prompt. */
static bool only_device_can(const struct sequence *s, const struct seq_job *job)
{
    return s->is_private &&
           (job->kind == JOB_REFILL || (job->kind == JOB_IDS && job->position < s->prompt_count));
}

struct seq_job sequence_next(struct sequence *s, const struct seq_model *m, uint64_t now_us,
                             uint64_t stall_us)
{
    s->deadline_us = UINT64_MAX;
    settle(s, m);
    if (s->high == s->ids_count)
        return (struct seq_job){.kind = JOB_NONE};
    if (!s->planned) {
        if (now_us < s->upload_us + UPLOAD_IDLE_US)
            return wait_for_edge(s, now_us, s->upload_us + UPLOAD_IDLE_US);
        sequence_void_plan(s);
    }
    const struct plan_range *r = edge_range_at(s, s->high);
    struct seq_job job = r ? edge_job(s, m, r, now_us, stall_us) : ids_job(s, m, now_us, stall_us);
    if (only_device_can(s, &job)) {
        s->device_wanted = true;
        return (struct seq_job){.kind = JOB_NONE};
    }
    if (job.kind != JOB_NONE && s->idle_since_us != 0) {
        s->ingest_wait_us += now_us - s->idle_since_us;
        s->idle_since_us = 0;
    }
    if (job.kind != JOB_NONE && job.kind != JOB_REFILL)
        s->blocked_us = 0;
    return job;
}

int sequence_hidden_rows(const struct sequence *s, const struct seq_model *m, const struct seq_job *job,
                         float *rows)
{
    uint32_t at = job->position, end = job->position + job->rows;
    for (const struct seq_hidden *h = s->hidden_first; h && at < end; h = h->next) {
        if (at < h->first_token || at >= h->first_token + h->count)
            continue;
        uint32_t count = TD_MIN(end, h->first_token + h->count) - at;
        size_t row_size = hidden_wire_size(h->dtype, 1, m->embd_size);
        struct span src = {h->payload + (at - h->first_token) * row_size, count * row_size};
        int rc = hidden_decode(h->dtype, src, count, m->embd_size,
                               rows + (size_t)(at - job->position) * m->embd_size);
        if (rc < 0)
            return rc;
        at += count;
    }
    return at == end ? 0 : -TD_ERR_INTERNAL;
}

/* --- what has run --------------------------------------------------------------------------------- */

/* Rows [begin, end) have all layers now, computed here: no piece is wanted in their blocks any more. */
static void close_rows(struct sequence *s, uint32_t begin, uint32_t end)
{
    for (uint32_t i = begin / KV_BLOCK_TOKENS; i < sequence_blocks(end); i++) {
        struct seq_block *b = &s->blocks[i];
        if (b->edge_layers > 0 && end <= i * KV_BLOCK_TOKENS + b->edge_first)
            continue; /* its edge rows are still to come */
        b->closed = true;
        if (end >= i * KV_BLOCK_TOKENS + b->edge_first + b->edge_count)
            b->missing = 0;
    }
}

static void mark_device_rows(struct sequence *s, uint32_t begin, uint32_t end, uint8_t dtype)
{
    for (uint32_t i = begin / KV_BLOCK_TOKENS; i < sequence_blocks(end); i++) {
        struct seq_block *b = &s->blocks[i];
        b->from_device = true;
        if (dtype != HIDDEN_F32)
            b->fidelity = TD_MAX(b->fidelity, (uint8_t)KV_L1);
        /* Also where its KV does not come: the layers above were computed from these rows. */
        sequence_mix_numerics(b, s->edge_numerics);
    }
}

static uint32_t count_planned_rows(const struct sequence *s, uint32_t begin, uint32_t end)
{
    uint32_t count = 0;
    for (uint32_t at = begin; at < end; at++)
        count += planned_range(s, at) != NULL;
    return count;
}

void sequence_advance(struct sequence *s, const struct seq_model *m, const struct seq_job *job)
{
    uint32_t end = job->position + job->rows, first;
    switch (job->kind) {
    case JOB_NONE:
        return;
    case JOB_REFILL:
        close_rows(s, job->position, end);
        s->complete = end;
        s->recomputed_tokens += job->rows;
        first = job->position - job->position % KV_BLOCK_TOKENS;
        s->refill_begin = s->refill_end ? s->refill_begin : first; /* they come in order */
        s->refill_end = sequence_blocks(end) * KV_BLOCK_TOKENS;
        s->ingested_dirty = true;
        break;
    case JOB_IDS:
        s->recomputed_tokens += s->range_count ? count_planned_rows(s, job->position, end) : 0;
        close_rows(s, job->position, end);
        s->high = s->complete = end;
        s->ingested_dirty |= s->range_count > 0 && !job->decode; /* an edge that has left may come again */
        break;
    case JOB_HIDDEN:
    case JOB_LAST:
        mark_device_rows(s, job->position, end, planned_range(s, job->position)->hidden_dtype);
        s->high = end;
        break;
    }
    if (job->kind != JOB_REFILL && !job->decode)
        s->prefill_tokens += job->rows;
    settle(s, m);
}
