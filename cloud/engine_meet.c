/* engine_meet: a prompt from both ends. Its stored blocks are read from the last one backwards while the engine computes them from the first one
 * onwards; where the two meet, the pass goes on behind the last block. With a block computed in C and read in L that takes L / (C + L) of computing
 * all, or C / (C + L) of reading all: half of either where they are equal, and never longer than computing, because nothing ever waits for a
 * read.
 *
 * Why this way round: a row's attention needs the KV of all rows before it, so of what is still to be read nothing behind it can be computed. But what
 * lies behind can be read at any time.
 *
 * Invariants of a RUNNING sequence with a load_id
 *   1. Blocks [load_first, load_end) are `on_disk` until they are read. Their pages are the sequence's alone, so either side may fill them.
 *   2. A block counts as computed once it is begun: what is read of it later is dropped. So a page is never written under a pass.
 *   3. Nothing of an edge is expected in these blocks; if a plan says otherwise, the rest is computed.
 *   4. What is in front of them is here: pages on their way from host memory are waited for first, LOADING, with `load_each_us` for a sign that no
 *      block is.
 *
 * Where reading is much faster than computing, steps that are short enough not to overrun the reads would cost more than they bring: then all is
 * read (engine_load.c). Where it is much slower there is little to win. */
#include "cloud/engine_internal.h"

#define MEET_SHARE  4 /* neither side may be more than so many times slower */
#define MEET_BLOCKS 4 /* not for fewer; and steps are at least so long where there is as much to compute */

/* Neither the plan nor a page stands against it. */
static bool may_meet(const struct sequence *s, uint32_t first, uint32_t end)
{
    if (end - first < MEET_BLOCKS || !sequence_is_own_work(s, end))
        return false;
    for (uint32_t i = first; i < end; i++)
        if (!s->blocks[i].on_disk) /* in memory already: its page is not the sequence's alone */
            return false;
    return true;
}

/* So many blocks are computed before a read is of any use; all that are read sooner than these are read. */
static uint32_t first_step(const struct engine *e)
{
    return TD_MIN((uint32_t)MEET_BLOCKS, e->config.token_budget / KV_BLOCK_TOKENS);
}

bool engine_meet_pays(const struct engine *e, const struct sequence *s, uint32_t first, uint32_t end,
                      uint64_t load_us)
{
    uint64_t compute_us = engine_compute_us(e, first, end - first);
    return load_us && compute_us && load_us <= compute_us * MEET_SHARE &&
           compute_us <= load_us * MEET_SHARE && load_us > engine_compute_us(e, first, first_step(e)) &&
           may_meet(s, first, end);
}

void engine_meet_begin(struct engine *e, struct sequence *s, uint32_t first, uint32_t end, uint64_t load_us)
{
    engine_run_from(e, s, first);
    s->load_id = e->next_load_id++;
    s->load_first = s->load_cut = first;
    s->load_end = s->load_next = end;
    s->load_each_us = load_us / (end - first);
    s->load_seen_us = e->clock();
}

/* What a block takes is what it was measured to, or at least what the first ones are late by now. */
bool engine_meet_goes_on(struct engine *e, struct sequence *s, uint32_t blocks)
{
    uint32_t count = s->load_end - blocks;
    uint64_t compute_us = engine_compute_us(e, blocks, count);
    uint64_t late_us = (e->clock() - s->admitted_us) / (blocks - s->load_first + 1);
    uint64_t each_us = s->load_each_us ? s->load_each_us : late_us;
    if (s->load_cut < s->load_end || !compute_us || each_us * count > compute_us * MEET_SHARE ||
        !may_meet(s, blocks, s->load_end))
        return false;
    engine_meet_begin(e, s, blocks, s->load_end, each_us * count);
    return true;
}

void engine_meet_stop(struct sequence *s)
{
    for (uint32_t i = s->load_first; s->load_id && i < s->load_end; i++)
        s->blocks[i].on_disk = false;
    s->load_id = 0;
}

/* ---- where they are ------------------------------------------------------------------------------------------- */

static uint32_t begun(const struct sequence *s)
{
    return TD_MIN(sequence_blocks(s->high), s->load_end);
}

/* From here on all is read. */
static uint32_t tail(const struct sequence *s)
{
    uint32_t at = s->load_end, floor = TD_MAX(begun(s), s->load_cut);
    while (at > floor && !s->blocks[at - 1].on_disk)
        at--;
    return at;
}

/* A block should come so often; a disk that has got stuck is known by its silence. */
static uint64_t each_us(const struct engine *e, const struct sequence *s)
{
    return TD_MAX(s->load_each_us, e->clock() - s->load_seen_us);
}

/* The first block that need not be computed if both sides go on as they did. */
static uint32_t meeting(const struct engine *e, const struct sequence *s)
{
    uint32_t first = begun(s), last = tail(s), low = 0, high = last - first;
    uint64_t each = each_us(e, s);
    while (low < high) { /* the fewest blocks that take as long to compute as the others to read */
        uint32_t count = (low + high) / 2;
        if (engine_compute_us(e, first, count) >= (last - first - count) * each)
            high = count;
        else
            low = count + 1;
    }
    return TD_MAX(first + low, s->load_cut);
}

/* ---- reading -------------------------------------------------------------------------------------------------- */

void engine_meet_take(struct engine *e, struct sequence *s, const struct loader_block *b)
{
    uint32_t i = b->block_index;
    s->load_seen_us = e->clock();
    s->load_each_us = e->load_us[b->tier];
    if (i < begun(s))
        return;
    if (b->status < 0 || !kv_quality_accepts(b->quality, s->accept, e->model.numerics) ||
        engine_page_in(e, s->pages[i], b->values) < 0) {
        s->load_cut = TD_MAX(s->load_cut, i + 1); /* it is computed, and so is all before it */
        return;
    }
    s->blocks[i].on_disk = false;
    s->blocks[i].quality = b->quality;
}

/* The pass stands in front of blocks that are all here. */
static void join(struct engine *e, struct sequence *s)
{
    uint32_t first = s->high / KV_BLOCK_TOKENS, read = s->load_end - first;
    engine_meet_stop(s);
    sequence_skip(s, s->load_end);
    s->cached_tokens = TD_MIN(s->cached_tokens + read * KV_BLOCK_TOKENS, s->prompt_count);
    s->read_tokens = TD_MIN(s->read_tokens + read * KV_BLOCK_TOKENS, s->cached_tokens);
    metric_add(e->metrics.prefix_hits, read * KV_BLOCK_TOKENS);
    metric_add(e->metrics.load_declined, first - s->load_first);
}

void engine_meet_turn(struct engine *e, struct sequence *s)
{
    uint32_t first = begun(s), at = meeting(e, s);
    if (first == s->load_end) { /* nothing came in time */
        metric_add(e->metrics.load_declined, s->load_end - s->load_first);
        engine_meet_stop(s);
    } else if (tail(s) == first && s->high == first * KV_BLOCK_TOKENS && s->complete == s->high) {
        join(e, s);
    } else {
        while (s->load_next > TD_MAX(at, first) &&
               engine_load_ask(e, s, engine_cached_id(s, s->load_next - 1), s->load_next - 1, s->load_id))
            s->load_next--;
    }
}

/* ---- computing ------------------------------------------------------------------------------------------------ */

/* A step ends where the two are to meet, and before all buffers are full: they are emptied between steps. */
void engine_meet_limit(struct engine *e, struct sequence *s, struct seq_job *job)
{
    if (s->load_id == 0 || job->kind == JOB_NONE)
        return;
    if (job->kind != JOB_IDS) {
        engine_meet_stop(s);
        return;
    }
    uint32_t at = s->high / KV_BLOCK_TOKENS;
    uint64_t block_us = TD_MAX(engine_compute_us(e, at, 1), UINT64_C(1));
    uint64_t step = TD_MAX(LOADER_BUFFERS * s->load_each_us / block_us, (uint64_t)MEET_BLOCKS);
    uint64_t end = TD_MIN((uint64_t)TD_MAX(meeting(e, s), at + MEET_BLOCKS), at + step);
    uint64_t rows = TD_MIN(end, (uint64_t)tail(s)) * KV_BLOCK_TOKENS - s->high;
    if (rows >= job->rows)
        return;
    job->rows = (uint32_t)rows;
    job->logits = job->decode = false;
}
