/* pass: from a batch to passes. A pass is the sequences of a batch with one layer range: its rows lie one after the other in all
 * buffers, and every layer runs all of them, but the last, where only rows that somebody wants to see go on behind K and V.
 * The batch has been checked (kernels/batch.h). */
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/det_kernels.h"
#include "kernels/cuda/kv_8bit.h"
#include "kernels/sampler.h"
#include <stdlib.h>

#define DET_SPLIT_PAGES (CUDA_DET_SPLIT_TOKENS / KV_BLOCK_TOKENS)

/* --- the lists -------------------------------------------------------------------------------- */

static uint32_t rows_kept(const struct batch_seq *s)
{
    return s->hidden_out ? s->row_count : s->logit_count;
}

static uint32_t seq_pages(const struct cuda_pass *p, const struct batch_seq *s)
{
    if (p->layer_begin == p->layer_end)
        return 0;
    return (s->position + s->row_count - 1) / KV_BLOCK_TOKENS + 1;
}

uint32_t cuda_splits_max(const struct cuda_backend *b)
{
    return TD_MIN(b->rows_max, (uint32_t)BATCH_SEQS_MAX) + (uint32_t)b->sm_count * SPLITS_PER_SM;
}

static uint32_t next_power(uint32_t x)
{
    uint32_t y = 1;
    while (y < x)
        y *= 2;
    return y;
}

/* Splits of at most `pages` pages of one row. */
static uint32_t add_splits(struct cuda_split *out, uint32_t at, uint32_t row, uint32_t table,
                           uint32_t position, uint32_t pages)
{
    uint32_t page_count = position / KV_BLOCK_TOKENS + 1, count = (page_count + pages - 1) / pages;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t begin = page_count * i / count, end = page_count * (i + 1) / count;
        out[at + i] = (struct cuda_split){.row = row,
                                          .table = table,
                                          .page_begin = begin,
                                          .page_count = end - begin,
                                          .token_count = position + 1 - begin * KV_BLOCK_TOKENS,
                                          .first_split = at,
                                          .split_count = count};
    }
    return at + count;
}

struct lists {
    struct cuda_backend *b;
    struct cuda_pass *p;
    bool kept_only; /* the last layer's */
};

static uint32_t rows_of(const struct lists *l, const struct batch_seq *s)
{
    return l->kept_only ? rows_kept(s) : s->row_count;
}

/* Splits of all sequences with one row, at so many pages each. */
static uint64_t count_splits(const struct lists *l, uint64_t pages)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < l->p->seq_count; i++)
        if (rows_of(l, l->p->seqs[i]) == 1)
            count += (seq_pages(l->p, l->p->seqs[i]) + pages - 1) / pages;
    return count;
}

/* Where blocks take splits in turns: as many turns as make the last block finish first. */
static uint32_t pages_of_turns(const struct lists *l, uint64_t total, uint64_t blocks)
{
    enum { TURNS = 4, TURN_COST = 3 }; /* a split's beginning and end, in pages */
    uint64_t heads = l->b->base.model->params.kv_head_count, best = 1, least = UINT64_MAX, longest = 1,
             most = (uint64_t)l->b->sm_count * SPLITS_PER_SM; /* that there is room for */
    for (uint32_t i = 0; i < l->p->seq_count; i++)
        longest = TD_MAX(longest, (uint64_t)seq_pages(l->p, l->p->seqs[i]));
    for (uint64_t turns = 1; turns <= TURNS; turns++) {
        uint64_t pages = TD_MAX((uint64_t)1, total * heads / (blocks * turns));
        while (pages < longest &&
               (count_splits(l, pages) * heads > blocks * turns || count_splits(l, pages) > most))
            pages += pages / 16 + 1;
        uint64_t taken = TD_MAX(turns, (count_splits(l, pages) * heads + blocks - 1) / blocks),
                 cost = taken * (TD_MIN(pages, longest) + TURN_COST);
        if (cost < least)
            least = cost, best = pages;
    }
    return (uint32_t)best;
}

/* Pages of all sequences with one row. */
static uint64_t count_pages(const struct lists *l)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < l->p->seq_count; i++)
        if (rows_of(l, l->p->seqs[i]) == 1)
            count += seq_pages(l->p, l->p->seqs[i]);
    return count;
}

/* Pages a split: as few as give every SM its blocks. */
static uint32_t pages_per_split(const struct lists *l)
{
    const struct model_params *m = &l->b->base.model->params;
    uint64_t total = count_pages(l), blocks = (uint64_t)l->b->sm_count * SPLITS_PER_SM;
    uint32_t group = m->head_count / m->kv_head_count,
             ring = cuda_is_8bit(l->b) ? cuda_attention_8bit_blocks(m->head_dim, group)
                                       : cuda_attention_ring_blocks(m->head_dim, group);
    if (l->b->step_layers && l->p->row_count <= l->b->step_rows)
        return pages_of_turns(l, total, (uint64_t)l->b->sm_count);
    if (ring > 0)
        return pages_of_turns(l, total, ring);
    return (uint32_t)TD_MAX((uint64_t)1, (total * m->kv_head_count + blocks - 1) / blocks);
}

/* For cuda-det-v2: rows with more pages go apart into the rule's splits, as a block has less to do then; a quarter above an SM's share is
 * cheaper than to put splits and join them. */
static uint32_t pages_of_whole_rows(const struct lists *l)
{
    uint64_t share = count_pages(l) * l->b->base.model->params.kv_head_count / (uint64_t)l->b->sm_count;
    return (uint32_t)TD_MIN(TD_MAX(share * 5 / 4, (uint64_t)DET_SPLIT_PAGES), (uint64_t)UINT32_MAX);
}

/* One of all pages, or, while there is room for what they find, those of the rule; *apart: of those so far. */
static uint32_t add_det_splits(struct cuda_split *out, uint32_t at, const struct cuda_split *row,
                               uint32_t most_pages, uint32_t *apart, uint32_t room)
{
    uint32_t count = (row->page_count + DET_SPLIT_PAGES - 1) / DET_SPLIT_PAGES;
    out[at] = *row;
    if (row->page_count <= most_pages || *apart + count > room)
        return at + 1;
    for (uint32_t i = 0; i < count; i++) {
        struct cuda_split *s = &out[at + i];
        *s = *row;
        s->page_begin = i * DET_SPLIT_PAGES;
        s->page_count = TD_MIN((uint32_t)DET_SPLIT_PAGES, row->page_count - s->page_begin);
        s->token_count = row->token_count - i * CUDA_DET_SPLIT_TOKENS;
        s->first_split = *apart, s->split_count = count;
    }
    *apart += count;
    return at + count;
}

/* Tiles with the most positions first, so that no block ends with a long one. */
static int by_position(const void *x, const void *y)
{
    const struct cuda_tile *a = x, *b = y;
    return a->position < b->position ? 1 : a->position > b->position ? -1 : 0;
}

static int by_pages(const void *x, const void *y)
{
    const struct cuda_split *a = x, *b = y;
    return a->page_count < b->page_count ? 1 : a->page_count > b->page_count ? -1 : 0;
}

/* Are rows that are alone in their sequence split, and not tiles? */
static bool splits_rows(const struct cuda_backend *b)
{
    const struct model_params *m = &b->base.model->params;
    return !b->deterministic ||
           (!cuda_is_8bit(b) && cuda_det_attention_has(m->head_dim, m->head_count / m->kv_head_count));
}

/* Pages of a sequence's tiles: where they are while they are opened, from w->opened[at] on. */
static void add_opened(const struct lists *l, struct cuda_work *w, const struct batch_seq *s, uint32_t at)
{
    struct cuda_turn *t = w->turn_count ? &w->turns[w->turn_count - 1] : NULL;
    uint32_t count = seq_pages(l->p, s);
    if (!t || t->page_count + count > l->b->opened_max) {
        t = &w->turns[w->turn_count++];
        *t = (struct cuda_turn){.first_tile = w->tile_count, .first_page = at};
    }
    for (uint32_t i = 0; i < count; i++) {
        w->closed[at + i] = s->pages[i];
        w->opened[at + i] = t->page_count++;
    }
}

/* Pages of all sequences that become tiles. */
static uint32_t count_opened(const struct lists *l)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < l->p->seq_count && cuda_is_8bit(l->b); i++)
        if (rows_of(l, l->p->seqs[i]) > 1 || (rows_of(l, l->p->seqs[i]) == 1 && !splits_rows(l->b)))
            count += seq_pages(l->p, l->p->seqs[i]);
    return count;
}

static void sort_tiles(struct cuda_work *w)
{
    for (uint32_t i = 0; i < w->turn_count; i++) {
        struct cuda_turn *t = &w->turns[i];
        t->tile_count = (i + 1 < w->turn_count ? t[1].first_tile : w->tile_count) - t->first_tile;
        qsort(w->tiles + t->first_tile, t->tile_count, sizeof *w->tiles, by_position);
    }
    if (w->turn_count == 0)
        qsort(w->tiles, w->tile_count, sizeof *w->tiles, by_position);
}

static void fill_work(const struct lists *l, struct cuda_work *w, struct cuda_carver *c)
{
    const struct model_params *m = &l->b->base.model->params;
    bool det = l->b->deterministic;
    uint32_t tile_rows = cuda_tile_rows(m->head_count, m->kv_head_count),
             pages = det ? pages_of_whole_rows(l) : pages_per_split(l), row = 0, table = 0, splits = 0,
             apart = 0, pages_opened = count_opened(l), opened = 0;
    bool splits_one = splits_rows(l->b);
    w->split_grid = w->tile_count = w->turn_count = 0;
    w->tiles = cuda_carve(c, sizeof *w->tiles * (l->p->row_count / tile_rows + l->p->seq_count));
    w->closed = cuda_carve(c, sizeof *w->closed * pages_opened);
    w->opened = cuda_carve(c, sizeof *w->opened * pages_opened);
    w->splits = cuda_carve(c, 0);
    for (uint32_t i = 0; i < l->p->seq_count; i++) {
        const struct batch_seq *s = l->p->seqs[i];
        uint32_t count = rows_of(l, s), position = s->position + s->row_count - count;
        bool split = count == 1 && splits_one;
        if (split && det) {
            struct cuda_split whole = {.row = row,
                                       .table = table,
                                       .page_count = position / KV_BLOCK_TOKENS + 1,
                                       .token_count = position + 1,
                                       .split_count = 1};
            splits = add_det_splits(w->splits, splits, &whole, pages, &apart,
                                    (uint32_t)l->b->sm_count * SPLITS_PER_SM);
        } else if (split) {
            splits = add_splits(w->splits, splits, row, table, position, pages);
        }
        bool opens = !split && count > 0 && cuda_is_8bit(l->b);
        if (opens)
            add_opened(l, w, s, opened);
        for (uint32_t at = 0; !split && at < count; at += tile_rows)
            w->tiles[w->tile_count++] = (struct cuda_tile){row + at, TD_MIN(tile_rows, count - at),
                                                           position + at, opens ? opened : table};
        opened += opens ? seq_pages(l->p, s) : 0;
        row += count;
        table += seq_pages(l->p, s);
    }
    sort_tiles(w);
    if (det) /* the longest first */
        qsort(w->splits, splits, sizeof *w->splits, by_pages);
    w->split_grid = splits ? next_power(splits) : 0;
    memset(w->splits + splits, 0, sizeof *w->splits * (w->split_grid - splits));
    cuda_carve(c, sizeof *w->splits * w->split_grid);
}

static void fill_rows(struct cuda_pass *p)
{
    uint32_t row = 0, kept = 0, logit = 0, table = 0;
    for (uint32_t i = 0; i < p->seq_count; i++) {
        const struct batch_seq *s = p->seqs[i];
        uint32_t keep = p->keeps_all ? s->row_count : rows_kept(s);
        for (uint32_t r = 0; r < s->row_count; r++, row++) {
            p->ids[row] = s->ids ? s->ids[r] : 0;
            p->positions[row] = s->position + r;
            p->row_table[row] = table;
            if (r + s->logit_count >= s->row_count)
                p->logit_rows[logit++] = kept;
            if (r + keep >= s->row_count)
                p->kept[kept++] = row;
        }
        if (seq_pages(p, s) > 0)
            memcpy(p->tables + table, s->pages, sizeof *p->tables * seq_pages(p, s));
        table += seq_pages(p, s);
    }
}

_Static_assert(SAMPLE_TOP_MAX == SAMPLER_LOGPROBS_MAX, "logprobs of one size");

/* One request as the device takes it; its list goes to the end of the stage. */
static struct cuda_sample make_sample(struct cuda_backend *b, const struct sample_request *r,
                                      struct cuda_carver *c)
{
    const struct sampler_params *p = r->params;
    size_t size = sizeof *r->adjust * r->adjust_count;
    struct sample_adjust *list = cuda_carve(c, size);
    if (size)
        memcpy(list, r->adjust, size);
    return (struct cuda_sample){.wanted = true,
                                .wants_logprob = p->want_logprobs,
                                .inverse =
                                    p->temperature == 0.0f ? 0.0f : TD_MIN(1.0f / p->temperature, 1e30f),
                                .top_k = (uint32_t)TD_MAX(p->top_k, 0),
                                .top_count = p->want_logprobs ? p->logprob_count : 0,
                                .top_p = p->top_p,
                                .min_p = p->min_p,
                                .repetition_penalty = p->repetition_penalty,
                                .uniform = sampler_uniform(p->seed, r->index),
                                .adjust_at = (uint64_t)((uint8_t *)list - b->stage),
                                .adjust_count = r->adjust_count};
}

static void fill_samples(struct cuda_backend *b, struct cuda_pass *p, struct cuda_carver *c)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < p->seq_count; i++)
        for (uint32_t r = 0; r < p->seqs[i]->logit_count; r++)
            p->samples[at++] =
                p->seqs[i]->sample ? make_sample(b, p->seqs[i]->sample, c) : (struct cuda_sample){0};
}

/* Where everything lies depends on row_count and the grids alone, up to the tables, which come last: recorded steps of
 * the same numbers find their lists at the same place. */
static void lay_out(struct cuda_backend *b, struct cuda_pass *p)
{
    struct cuda_carver c = {b->stage, 0};
    size_t list = sizeof(uint32_t) * p->row_count;
    p->ids = cuda_carve(&c, list);
    p->positions = cuda_carve(&c, list);
    p->row_table = cuda_carve(&c, list);
    p->kept = cuda_carve(&c, list);
    p->logit_rows = cuda_carve(&c, list);
    p->samples = cuda_carve(&c, sizeof *p->samples * p->logit_count);
    p->all = p->last = (struct cuda_work){0};
    if (p->layer_begin < p->layer_end) {
        fill_work(&(struct lists){b, p, false}, &p->all, &c);
        p->last = p->all;
        if (!p->keeps_all)
            fill_work(&(struct lists){b, p, true}, &p->last, &c);
    }
    uint64_t pages = 0;
    for (uint32_t i = 0; i < p->seq_count; i++)
        pages += seq_pages(p, p->seqs[i]);
    p->tables = cuda_carve(&c, sizeof(uint32_t) * pages);
    fill_samples(b, p, &c);
    p->stage_size = c.used;
}

size_t cuda_stage_size(const struct cuda_backend *b)
{
    const struct model_params *m = &b->base.model->params;
    uint64_t rows = b->rows_max, seqs = TD_MIN(rows, (uint64_t)BATCH_SEQS_MAX),
             pages = m->context_max / KV_BLOCK_TOKENS + 1, splits = next_power(cuda_splits_max(b)),
             tiles = rows / cuda_tile_rows(m->head_count, m->kv_head_count) + seqs;
    return 5 * (4 * rows + 256) + sizeof(struct cuda_sample) * rows + 256 +
           seqs * (sizeof(struct sample_adjust) * SAMPLE_ADJUST_MAX + 256) +
           2 * (sizeof(struct cuda_split) * splits + sizeof(struct cuda_tile) * tiles + 512) +
           (cuda_is_8bit(b) ? 5 : 1) * (4 * seqs * pages + 256);
}

static void add_seq(struct cuda_pass *p, const struct batch_seq *s)
{
    p->seqs[p->seq_count++] = s;
    p->row_count += s->row_count;
    p->kept_count += rows_kept(s);
    p->logit_count += s->logit_count;
    p->sample_count += s->sample != NULL;
    p->has_hidden_out = p->has_hidden_out || s->hidden_out;
}

bool cuda_pass_next(struct cuda_backend *b, const struct batch *batch, bool *done)
{
    struct cuda_pass *p = &b->pass;
    p->seq_count = p->row_count = p->kept_count = p->logit_count = p->sample_count = 0;
    p->has_hidden_out = false;
    for (uint32_t i = 0; i < batch->count; i++) {
        const struct batch_seq *s = &batch->seqs[i];
        if (done[i])
            continue;
        if (p->seq_count == 0)
            p->layer_begin = s->layer_begin, p->layer_end = s->layer_end;
        if (s->layer_begin == p->layer_begin && s->layer_end == p->layer_end) {
            add_seq(p, s);
            done[i] = true;
        }
    }
    if (p->seq_count == 0)
        return false;
    p->keeps_all = p->kept_count == p->row_count || p->layer_begin == p->layer_end;
    lay_out(b, p);
    fill_rows(p);
    return true;
}
