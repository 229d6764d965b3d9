/* sequence_plan: what an edge announces and sends, held against the rules: ranges, rows of HIDDEN, KV pieces. */
#include "cloud/sequence.h"
#include <stdlib.h>

/* --- plans ---------------------------------------------------------------------------------------- */

static int check_range(const struct sequence *s, const struct seq_model *m, const struct plan_range *r,
                       bool last, struct td_error *err)
{
    if (r->count == 0 || r->first_token > s->plan_end || r->count > s->plan_end - r->first_token)
        return td_fail(err, -TD_ERR_PROTOCOL, "the plan leaves the prompt: a range ends behind token %u",
                       s->plan_end);
    if (r->layers > m->shape.layer_count)
        return td_fail(err, -TD_ERR_PROTOCOL, "the plan has a range of %u layers, the model has %u",
                       r->layers, m->shape.layer_count);
    if (s->is_private && r->first_token < s->prompt_count && (r->layers == 0 || r->codec == PLAN_CODEC_NONE))
        return td_fail(err, -TD_ERR_PROTOCOL,
                       "the plan leaves a part of a private prompt to be computed from token ids, which are "
                       "not known here");
    if (r->layers == 0)
        return 0;
    if (!last && plan_range_end(r) % KV_BLOCK_TOKENS != 0)
        return td_fail(err, -TD_ERR_PROTOCOL,
                       "the plan has an edge range that ends at token %u, within a block", plan_range_end(r));
    bool sealed = r->codec == KV_SEALED && !s->is_private && r->layers == m->shape.layer_count &&
                  r->first_token % KV_BLOCK_TOKENS == 0 && plan_range_end(r) % KV_BLOCK_TOKENS == 0;
    bool known = r->codec <= KV_L2 || r->codec == KV_RAW || r->codec == PLAN_CODEC_NONE || sealed;
    if (!known || r->hidden_dtype > HIDDEN_INT8)
        return td_fail(err, -TD_ERR_PROTOCOL,
                       "the plan has a range of codec %u and hidden type %u, which are not known here",
                       r->codec, r->hidden_dtype);
    return 0;
}

static int check_plan(const struct sequence *s, const struct seq_model *m, const struct plan_range *ranges,
                      uint32_t count, struct td_error *err)
{
    if (count == 0 || count > LIMIT_RANGES)
        return td_fail(err, -TD_ERR_PROTOCOL, "the plan has %u ranges; 1 to %u are allowed", count,
                       LIMIT_RANGES);
    for (uint32_t i = 0; i < count; i++) {
        if (i > 0 && ranges[i].first_token != plan_range_end(&ranges[i - 1]))
            return td_fail(err, -TD_ERR_PROTOCOL, "the plan's ranges are not adjacent at token %u",
                           ranges[i].first_token);
        int rc = check_range(s, m, &ranges[i], i + 1 == count, err);
        if (rc < 0)
            return rc;
    }
    uint32_t end = plan_range_end(&ranges[count - 1]);
    if (end != s->plan_end && end != s->prompt_count)
        return td_fail(err, -TD_ERR_PROTOCOL, "the plan ends at token %u, the prompt at %u", end,
                       s->plan_end);
    return 0;
}

/* The rows of a range that lie in a block; false: none. */
static bool rows_in_block(const struct plan_range *r, uint32_t block, uint32_t *first, uint32_t *count)
{
    uint32_t start = block * KV_BLOCK_TOKENS;
    uint32_t begin = TD_MAX(r->first_token, start), end = TD_MIN(plan_range_end(r), start + KV_BLOCK_TOKENS);
    if (begin >= end)
        return false;
    *first = begin - start;
    *count = end - begin;
    return true;
}

/* The edge range with rows in a block: there is at most one, as edge ranges end where blocks do. */
static const struct plan_range *edge_range_of(const struct sequence *s, uint32_t block, uint32_t *first,
                                              uint32_t *count)
{
    for (uint32_t i = 0; i < s->range_count; i++)
        if (s->ranges[i].layers > 0 && rows_in_block(&s->ranges[i], block, first, count))
            return &s->ranges[i];
    return NULL;
}

static uint16_t count_missing(const struct sequence *s, uint32_t block, uint32_t layers)
{
    const uint64_t *have = s->have + (size_t)block * s->have_words;
    uint32_t missing = 0;
    for (uint32_t bit = 0; bit < layers * 2; bit++)
        missing += !(have[bit / 64] >> (bit % 64) & 1);
    return (uint16_t)missing;
}

static void forget_pieces(struct sequence *s, uint32_t block)
{
    memset(s->have + (size_t)block * s->have_words, 0, s->have_words * sizeof *s->have);
}

static void plan_block(struct sequence *s, uint32_t block)
{
    struct seq_block *b = &s->blocks[block];
    uint32_t first = 0, count = 0, start = block * KV_BLOCK_TOKENS;
    const struct plan_range *r = edge_range_of(s, block, &first, &count);
    if (start < s->high) { /* some of its rows ran under the plan before: what they lack is still lacking */
        if (!r) {          /* what its rows lack does not come any more */
            b->closed |= b->missing > 0;
            return;
        }
        bool same = b->edge_layers > 0 && first == b->edge_first && count == b->edge_count;
        uint32_t end = first + count;
        if (b->edge_layers > 0) {
            end = TD_MAX(end, (uint32_t)b->edge_first + b->edge_count);
            first = TD_MIN(first, (uint32_t)b->edge_first);
        }
        b->edge_layers = (uint16_t)TD_MAX((uint32_t)b->edge_layers, r->layers);
        b->edge_first = (uint8_t)first;
        b->edge_count = (uint8_t)(end - first);
        if (!same) { /* pieces of two shapes do not fit together: neither those that came nor those to come */
            forget_pieces(s, block);
            b->closed = true;
        }
    } else {
        if (!r || first != b->edge_first || count != b->edge_count)
            forget_pieces(s, block);
        b->edge_layers = (uint16_t)(r ? r->layers : 0);
        b->edge_first = (uint8_t)first;
        b->edge_count = (uint8_t)count;
        b->closed = false;
    }
    if (r && r->codec == PLAN_CODEC_NONE)
        b->closed = true;
    b->missing = count_missing(s, block, b->edge_layers);
}

/* What has run of a message goes: the new plan may want it otherwise, should it have to run again. */
static void cut_rows_that_ran(const struct sequence *s, const struct seq_model *m, struct seq_hidden *h)
{
    if (h->first_token >= s->high || h->first_token + h->count <= s->high)
        return;
    size_t row_size = hidden_wire_size(h->dtype, 1, m->embd_size);
    uint32_t ran = s->high - h->first_token;
    h->first_token += ran;
    h->count -= ran;
    memmove(h->payload, h->payload + ran * row_size, h->count * row_size);
}

/* Up to where the new plan wants the rows of a message as the old one had them; 0: none. */
static uint32_t wanted_until(const struct sequence *s, const struct seq_hidden *h,
                             const struct plan_range *ranges, uint32_t count)
{
    const struct plan_range *old = plan_at(s->ranges, s->range_count, h->first_token);
    const struct plan_range *r = plan_at(ranges, count, h->first_token);
    if (!old || !r || r->layers != old->layers || r->hidden_dtype != old->hidden_dtype)
        return 0;
    return TD_MIN(h->first_token + h->count, plan_range_end(r));
}

/* Rows that have not run are void from the first on that the new plan wants otherwise. Pieces fit it or not, whatever plan they were made under. */
static void drop_hidden(struct sequence *s, const struct seq_model *m, const struct plan_range *ranges,
                        uint32_t count)
{
    struct seq_hidden **at = &s->hidden_first;
    bool whole = true;
    s->hidden_next = s->high;
    for (struct seq_hidden *h; whole && (h = *at); at = &h->next) {
        cut_rows_that_ran(s, m, h);
        uint32_t end = wanted_until(s, h, ranges, count);
        if (end == 0)
            break;
        whole = end == h->first_token + h->count;
        h->count = end - h->first_token;
        s->hidden_next = TD_MAX(s->hidden_next, end);
    }
    for (struct seq_hidden *h; (h = *at);) {
        *at = h->next;
        sequence_consume(s, h->size);
        free(h->payload);
        free(h);
    }
    s->hidden_last = at;
}

/* Where a plan begins to hold: behind what has run. In the middle of a block that the new plan leaves to the cloud the rows of the old one are used up to the
 * block's end, if they are here: a record can only name whole blocks. */
static uint32_t takes_effect(const struct sequence *s, const struct seq_model *m,
                             const struct plan_range *ranges, uint32_t count)
{
    const struct plan_range *old = plan_at(s->ranges, s->range_count, s->high),
                            *r = plan_at(ranges, count, s->high);
    if (s->high % KV_BLOCK_TOKENS == 0 || !old || !r || r->layers > 0 || old->layers == 0 ||
        old->layers == m->shape.layer_count)
        return s->high;
    uint32_t border = TD_MIN(sequence_blocks(s->high) * KV_BLOCK_TOKENS, plan_range_end(old));
    return s->hidden_next >= border && border <= plan_range_end(r) ? border : s->high;
}

/* The new plan, and from the block's start up to plan_begin the old one. Not below: what the edge sends of blocks before this one is as the new plan
 * says. Returns the number of ranges; 0: too many. */
static uint32_t keep_rows(const struct sequence *s, const struct plan_range *ranges, uint32_t count,
                          struct plan_range out[LIMIT_RANGES])
{
    struct plan_range below[LIMIT_RANGES], kept = *plan_at(s->ranges, s->range_count, s->high);
    uint32_t begin = TD_MAX(kept.first_token, s->high - s->high % KV_BLOCK_TOKENS);
    kept.first_token = begin;
    kept.count = s->plan_begin - begin;
    uint32_t below_count = plan_merge(ranges, count, &kept, 1, begin, below);
    return below_count ? plan_merge(below, below_count, ranges, count, s->plan_begin, out) : 0;
}

/* What has run stays in the record as it was planned then. */
static void set_ranges(struct sequence *s, const struct plan_range *ranges, uint32_t count)
{
    struct plan_range merged[LIMIT_RANGES];
    uint32_t begin = plan_border(s->plan_begin, plan_range_end(&ranges[count - 1]), KV_BLOCK_TOKENS);
    uint32_t merged_count = plan_merge(s->record, s->record_count, ranges, count, begin, merged);
    s->record_count = merged_count ? merged_count : count;
    memcpy(s->record, merged_count ? merged : ranges, s->record_count * sizeof *ranges);
    s->range_count = count;
    memcpy(s->ranges, ranges, count * sizeof *ranges);
}

void sequence_plan_blocks(struct sequence *s)
{
    for (uint32_t b = s->complete / KV_BLOCK_TOKENS; b < sequence_blocks(s->plan_end); b++)
        plan_block(s, b);
}

/* Rows are to come again. What ran meanwhile ran from ids: the plan must say so of all of it, as a record can only name whole blocks. Where the cloud had left
 * by itself, KV that had not come does not come any more. */
static bool resume(struct sequence *s, const struct plan_range *ranges, uint32_t count)
{
    const struct plan_range *old = plan_at(s->ranges, s->range_count, s->high),
                            *r = plan_at(ranges, count, s->high);
    bool left = s->ids_until == UINT32_MAX, from_ids = left || !old || old->layers == 0;
    bool late = from_ids && (!r || (r->layers > 0 && r->first_token < s->high));
    if (late || s->is_private || (left && !s->may_resume)) {
        if (!left)
            sequence_leave(s);
        return false;
    }
    if (!left)
        return true;
    s->pieces_lost = s->may_resume = false;
    s->left_from = UINT32_MAX;
    s->hidden_next = s->high;
    s->ids_until = 0;
    for (uint32_t i = s->complete / KV_BLOCK_TOKENS; i < sequence_blocks(s->high); i++)
        s->blocks[i].closed |= s->blocks[i].missing > 0;
    return true;
}

int sequence_plan(struct sequence *s, const struct seq_model *m, uint32_t epoch,
                  const struct plan_range *ranges, uint32_t count, bool resumes, struct td_error *err)
{
    if (s->ids_until == UINT32_MAX && s->is_private)
        s->epoch = TD_MAX(s->epoch, epoch); /* it came too late: the device will be asked for another */
    if ((s->ids_until == UINT32_MAX && !resumes) || (s->planned && epoch <= s->epoch))
        return 0; /* resumed, or an older plan than the one at hand */
    int rc = check_plan(s, m, ranges, count, err);
    if (rc < 0)
        return rc;
    if (resumes && !resume(s, ranges, count)) {
        s->epoch = epoch; /* heard, and of no use */
        s->ingested_dirty = true;
        return 0;
    }
    struct plan_range kept[LIMIT_RANGES];
    s->plan_begin = takes_effect(s, m, ranges, count);
    uint32_t kept_count = s->plan_begin > s->high ? keep_rows(s, ranges, count, kept) : 0;
    if (kept_count > 0) {
        ranges = kept;
        count = kept_count;
    } else {
        s->plan_begin = s->high;
    }
    drop_hidden(s, m, ranges, count);
    set_ranges(s, ranges, count);
    s->epoch = epoch;
    s->planned = true;
    s->rows_came = resumes; /* they are not waited for as long as at the beginning */
    s->ids_until = 0;
    s->ingested_dirty = true;
    sequence_plan_blocks(s);
    if (kept_count > 0) /* its rows come from the edge; its KV will not */
        s->blocks[s->high / KV_BLOCK_TOKENS].closed = true;
    return 0;
}

void sequence_leave(struct sequence *s)
{
    struct plan_range merged[LIMIT_RANGES];
    uint32_t end = s->record_count ? plan_range_end(&s->record[s->record_count - 1]) : 0;
    uint32_t from = plan_border(s->high, end, KV_BLOCK_TOKENS);
    struct plan_range rest = {.first_token = from, .count = end - TD_MIN(from, end)};
    uint32_t count = rest.count ? plan_merge(s->record, s->record_count, &rest, 1, from, merged) : 0;
    if (count > 0) {
        memcpy(s->record, merged, count * sizeof *merged);
        s->record_count = count;
        s->left_from = from;
    }
    sequence_void_plan(s);
    s->may_resume = !s->is_private;
    s->ingested_dirty = true;
}

/* Sent before the device heard that it is to plan anew (sequence_ask_again): of no use, and no fault. */
static bool is_late(const struct sequence *s, uint32_t epoch)
{
    return !s->planned && s->asked > 0 && epoch <= s->epoch;
}

/* --- HIDDEN --------------------------------------------------------------------------------------- */

static int check_hidden(const struct sequence *s, const struct seq_model *m, uint32_t layer,
                        const struct seq_hidden *h, struct td_error *err)
{
    const struct plan_range *r = plan_at(s->ranges, s->range_count, h->first_token);
    if (!r || h->count == 0 || h->count > plan_range_end(r) - h->first_token)
        return td_fail(err, -TD_ERR_PROTOCOL,
                       "hidden states of tokens %u to %u lie outside of the planned range", h->first_token,
                       h->first_token + h->count);
    if (layer != r->layers || h->dtype != r->hidden_dtype || r->layers == 0)
        return td_fail(err, -TD_ERR_PROTOCOL,
                       "hidden states of layer %u, type %u came where layer %u, type %u are planned", layer,
                       h->dtype, r->layers, r->hidden_dtype);
    if (layer == m->shape.layer_count && (h->count != 1 || h->first_token + 1 != plan_range_end(r)))
        return td_fail(err, -TD_ERR_PROTOCOL,
                       "hidden states behind all layers are wanted of the last token only");
    if (h->size != hidden_wire_size(h->dtype, h->count, m->embd_size))
        return td_fail(err, -TD_ERR_PROTOCOL, "hidden states of %u tokens take %zu bytes, %zu came", h->count,
                       hidden_wire_size(h->dtype, h->count, m->embd_size), h->size);
    return 0;
}

int sequence_hidden(struct sequence *s, const struct seq_model *m, uint32_t epoch, uint32_t layer,
                    struct seq_hidden *h, struct td_error *err)
{
    bool old = s->ids_until == UINT32_MAX || is_late(s, epoch);
    int rc = 0;
    if (!old && (!s->planned || epoch > s->epoch))
        rc = td_fail(err, -TD_ERR_PROTOCOL, "hidden states came before their plan");
    else if (!old)
        rc = check_hidden(s, m, layer, h, err);
    if (rc < 0 && s->planned && epoch < s->epoch) { /* the later plan has no use for them */
        old = true;
        rc = 0;
    }
    uint32_t end = h->first_token + h->count;
    s->staged_size += h->size;
    if (old || rc < 0 || end <= s->high || end <= s->hidden_next) {
        sequence_consume(s, h->size);
        free(h->payload);
        free(h);
        return rc;
    }
    s->hidden_next = end;
    s->rows_came = s->ingested_dirty = true;
    h->next = NULL;
    *s->hidden_last = h;
    s->hidden_last = &h->next;
    return 0;
}

/* --- pieces --------------------------------------------------------------------------------------- */

static bool have_bit(const struct sequence *s, uint32_t block, uint32_t bit)
{
    return s->have[(size_t)block * s->have_words + bit / 64] >> (bit % 64) & 1;
}

enum piece_verdict sequence_check_piece(const struct sequence *s, const struct ingest_piece *p,
                                        struct td_error *err)
{
    const struct kv_piece_head *h = &p->head;
    if (s->pieces_lost || s->ids_until == UINT32_MAX || is_late(s, p->epoch))
        return PIECE_DROP;
    if (!s->planned || p->epoch > s->epoch) {
        td_fail(err, -TD_ERR_PROTOCOL, "a KV piece came before its plan");
        return PIECE_REFUSE;
    }
    uint32_t first = 0, count = 0;
    const struct plan_range *r = h->block_index < sequence_blocks(s->plan_end)
                                     ? edge_range_of(s, h->block_index, &first, &count)
                                     : NULL;
    uint8_t codec = p->sealed ? KV_SEALED : h->codec;
    if (!r || h->layer >= r->layers || codec != r->codec || h->first_token != first ||
        h->token_count != count) {
        if (p->epoch < s->epoch)
            return PIECE_DROP;
        td_fail(err, -TD_ERR_PROTOCOL,
                "a KV piece of block %u, layer %u, codec %u, %u tokens is not in the plan", h->block_index,
                h->layer, codec, h->token_count);
        return PIECE_REFUSE;
    }
    const struct seq_block *b = &s->blocks[h->block_index];
    if (b->closed || h->layer >= b->edge_layers || have_bit(s, h->block_index, h->layer * 2u + h->is_value))
        return PIECE_DROP;
    return PIECE_TAKE;
}

void sequence_take_piece(struct sequence *s, const struct ingest_piece *p)
{
    const struct kv_piece_head *h = &p->head;
    struct seq_block *b = &s->blocks[h->block_index];
    uint32_t bit = h->layer * 2u + h->is_value;
    s->have[(size_t)h->block_index * s->have_words + bit / 64] |= UINT64_C(1) << (bit % 64);
    b->missing--;
    b->from_device = true;
    b->fidelity = TD_MAX(b->fidelity, h->quality.fidelity);
    if (h->codec != KV_RAW)
        b->fidelity = TD_MAX(b->fidelity, h->codec);
    sequence_mix_numerics(b, h->quality.numerics);
    s->ingested_dirty = true;
}

/* --- what the edge is told ------------------------------------------------------------------------ */

uint32_t sequence_hidden_tokens(const struct sequence *s, const struct seq_model *m)
{
    if (s->ids_until == UINT32_MAX)
        return s->plan_end;
    for (uint32_t i = 0; i < s->range_count; i++) {
        const struct plan_range *r = &s->ranges[i];
        uint32_t done = TD_MAX(TD_MAX(s->hidden_next, s->high), TD_MAX(s->ids_until, r->first_token));
        bool all_layers = r->layers == m->shape.layer_count;
        if (r->layers == 0 || done >= plan_range_end(r) || (all_layers && plan_range_end(r) != s->plan_end))
            continue;
        return all_layers ? plan_range_end(r) - 1 : done;
    }
    return s->plan_end;
}

uint32_t sequence_record(const struct sequence *s, struct plan_range out[LIMIT_RANGES])
{
    memcpy(out, s->record, s->record_count * sizeof *out);
    return plan_without_kv(out, s->record_count, s->refill_begin, s->refill_end);
}

bool sequence_wants_data(const struct sequence *s, const struct seq_model *m)
{
    if (!s->planned)
        return !s->direct;
    return s->ids_until != UINT32_MAX &&
           (sequence_hidden_tokens(s, m) < s->plan_end || sequence_kv_tokens(s) < s->plan_end);
}

void sequence_want_plan(struct sequence *s)
{
    bool edge = s->is_private;
    for (uint32_t i = 0; i < s->record_count; i++)
        edge |= s->record[i].layers > 0;
    if (!edge)
        return;
    s->planned = s->pieces_lost = s->device_wanted = false;
    s->ids_until = 0;
    s->left_from = UINT32_MAX;
    s->range_count = 0; /* what the edge sent of them is gone: they say nothing until they come again */
}

uint32_t sequence_kv_tokens(const struct sequence *s)
{
    for (uint32_t i = s->complete / KV_BLOCK_TOKENS; i < sequence_blocks(s->plan_end); i++) {
        const struct seq_block *b = &s->blocks[i];
        if (b->edge_layers > 0 && b->missing > 0 && !b->closed && !s->pieces_lost)
            return i * KV_BLOCK_TOKENS + b->edge_first;
    }
    return s->plan_end;
}
