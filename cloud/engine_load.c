/* engine_load: blocks of a prompt that are in the store's tiers: read them, or compute them again? Whichever is sooner, by what both were measured to
 * take, and never slower than computing by more than LOAD_LOSS_PERCENT, whatever the disk then does.
 *
 * Decided when a sequence is admitted: all are read here, or some while others are computed (engine_meet.c), or none. Here they are read from the
 * first on, because what was read is only of use as a prefix, and one invariant is kept:
 *
 *     time spent reading  <=  time to compute what is here so far  +  slack
 *
 * A sequence that would break it goes on with what it has and computes the rest, reading from the other end where that helps. So the loss is at most the
 * slack, which is LOAD_LOSS_PERCENT of computing all that was to be read (and at least LOAD_SLACK_US, or LOAD_GRACE_BLOCKS times what a block takes where
 * reading is known to be worth it: measured here, or told at the start by node_speed.c).
 *
 * Where reading is not worth it, one block is read all the same, for nobody: so a tier that has become fast again is noticed. */
#include "cloud/engine_internal.h"

/* ---- estimates ---------------------------------------------------------------------------------------------- */

uint64_t engine_compute_us(const struct engine *e, uint32_t first, uint32_t count)
{
    double tokens = (double)count * KV_BLOCK_TOKENS, middle = ((double)first + count / 2.0) * KV_BLOCK_TOKENS;
    double slope, base = engine_prefill_ns(e, &slope);
    return (uint64_t)(tokens * e->model.shape.layer_count * (base + slope * middle) / 1e3);
}

uint64_t engine_load_us(const struct engine *e, const uint32_t counts[TIER_COUNT])
{
    uint64_t us = 0;
    for (int kind = 0; kind < TIER_COUNT; kind++)
        us += counts[kind] * engine_tier_us(e, (enum tier_kind)kind);
    return us;
}

/* From asking to its arrival, which may be long before the engine comes to take it. Several are read at once, and what they share they share: each one's part of the time is what another block would add. */
static void measure(struct engine *e, const struct loader_block *b)
{
    uint64_t *us = &e->load_us[b->tier], took_us = (b->done_us - b->asked_us) / b->depth;
    if (b->status == 0) /* for nobody: the last word on a tier that was too slow */
        *us = *us && b->owner != 0 ? (*us * 3 + took_us) / 4 : took_us;
}

/* ---- beginning ---------------------------------------------------------------------------------------------- */

bool engine_load_ask(struct engine *e, const struct sequence *s, const struct kv_block_id *id, uint32_t block,
                     uint64_t owner)
{
    struct loader_block *b = e->forgetting ? NULL : loader_take(e->loader);
    if (!b)
        return false;
    memcpy(b->tenant, s->tenant, sizeof b->tenant);
    b->id = *id;
    b->block_index = block;
    b->accept = s->accept;
    b->numerics = e->model.numerics;
    b->owner = owner;
    b->asked_us = e->clock();
    b->clock = e->clock;
    b->depth = ++e->loads_in_flight;
    loader_submit(e->loader, b);
    return true;
}

bool engine_load_pays(const struct engine *e, uint32_t first, uint32_t blocks,
                      const uint32_t counts[TIER_COUNT])
{
    uint64_t load_us = engine_load_us(e, counts), all_us = engine_compute_us(e, first, blocks - first);
    return load_us == 0 || all_us == 0 || load_us <= all_us;
}

void engine_load_try(struct engine *e, const struct sequence *s, const struct kv_block_id *id, uint32_t block)
{
    engine_load_ask(e, s, id, block, 0);
}

/* When the invariant will be broken if nothing more comes. */
static uint64_t deadline(const struct engine *e, const struct sequence *s)
{
    uint32_t first = s->load_first, here = first;
    while (here < s->load_cut && !s->blocks[here].on_disk)
        here++;
    uint64_t all_us = engine_compute_us(e, first, s->load_end - first);
    if (all_us == 0 || s->is_private)
        return s->admitted_us + ENGINE_LOAD_FLOOR_US;
    uint64_t slack_us = TD_MAX(all_us * LOAD_LOSS_PERCENT / 100, LOAD_SLACK_US);
    return s->admitted_us + engine_compute_us(e, first, here - first) + TD_MAX(slack_us, s->load_grace_us);
}

void engine_load_begin(struct engine *e, struct sequence *s, uint32_t first, uint32_t blocks,
                       const uint32_t counts[TIER_COUNT])
{
    s->state = SEQ_LOADING;
    s->load_id = e->next_load_id++;
    s->load_end = s->load_cut = blocks;
    s->load_next = s->load_first = first;
    s->load_grace_us = s->load_each_us = 0;
    for (int kind = 0; kind < TIER_COUNT; kind++)
        if (counts[kind] > 0)
            s->load_grace_us =
                TD_MAX(s->load_grace_us, LOAD_GRACE_BLOCKS * engine_tier_us(e, (enum tier_kind)kind));
    s->deadline_us = deadline(e, s);
}

/* ---- reading ------------------------------------------------------------------------------------------------ */

static void put_block(struct engine *e, const struct sequence *s, uint32_t block)
{
    struct prefix_entry entry = {.id = *engine_cached_id(s, block),
                                 .page = s->pages[block],
                                 .quality = s->blocks[block].quality,
                                 .layers = e->model.shape.layer_count};
    struct kv_block_id parent = {{0}};
    if (block > 0)
        parent = *engine_cached_id(s, block - 1);
    prefix_cache_put(e->cache, &entry, &parent);
}

static void put_swapped(struct engine *e, struct sequence *s, uint32_t blocks)
{
    for (uint32_t i = 0; i < blocks; i++)
        if (s->blocks[i].swapped) {
            s->blocks[i].swapped = false;
            put_block(e, s, i);
        }
}

/* Blocks that were read make a prefix up to the first that was not. */
static void finish_load(struct engine *e, struct sequence *s)
{
    uint32_t blocks = TD_MIN(s->load_cut, s->load_end);
    for (uint32_t i = 0; i < blocks; i++)
        if (s->blocks[i].on_disk)
            blocks = i; /* asked for, and not here in time */
    put_swapped(e, s, blocks);
    metric_add(e->metrics.prefix_hits, (blocks - TD_MIN(blocks, s->load_first)) * KV_BLOCK_TOKENS);
    if (engine_meet_goes_on(e, s, blocks))
        return;
    for (uint32_t i = blocks; i < s->load_end; i++) {
        s->blocks[i].on_disk = s->blocks[i].swapped = false;
        page_pool_release(e->pool, s->pages[i]);
        s->pages[i] = PAGE_NONE;
        s->page_count--;
    }
    if (s->own_from >= blocks)
        s->own_from = UINT32_MAX;
    s->load_id = 0;
    engine_run_from(e, s, blocks);
}

static void take_load(struct engine *e, struct sequence *s, const struct loader_block *b)
{
    uint32_t i = b->block_index;
    if (b->status < 0 || !kv_quality_accepts(b->quality, s->accept, e->model.numerics) ||
        engine_page_in(e, s->pages[i], b->values) < 0) {
        s->load_cut = TD_MIN(s->load_cut, i);
        return;
    }
    s->blocks[i].on_disk = false;
    s->blocks[i].read = true;
    s->blocks[i].quality = b->quality;
    if (i < s->load_cut)
        put_block(e, s, i);
}

static struct sequence *find_load(struct engine *e, uint64_t load_id)
{
    for (uint32_t i = 0; i < e->live_count; i++)
        if (load_id && e->live[i]->load_id == load_id)
            return e->live[i];
    return NULL;
}

static void ask_for_blocks(struct engine *e, struct sequence *s)
{
    uint32_t under_way = 0;
    for (uint32_t i = s->load_first; i < s->load_next; i++)
        under_way += s->blocks[i].on_disk;
    for (; s->load_next < s->load_cut && under_way < LOAD_AHEAD; s->load_next++) {
        if (!s->blocks[s->load_next].on_disk)
            continue;
        if (!engine_load_ask(e, s, engine_cached_id(s, s->load_next), s->load_next, s->load_id))
            return;
        under_way++;
    }
}

static bool all_loaded(const struct sequence *s)
{
    for (uint32_t i = 0; i < s->load_cut; i++)
        if (s->blocks[i].on_disk)
            return false;
    return true;
}

void engine_take_loads(struct engine *e)
{
    uint64_t now = e->clock();
    for (struct loader_block *b; e->loader && (b = loader_pop(e->loader));) {
        struct sequence *s = find_load(e, b->owner);
        measure(e, b);
        e->loads_in_flight--;
        if (s && s->state == SEQ_LOADING)
            take_load(e, s, b);
        else if (s)
            engine_meet_take(e, s, b);
        loader_release(e->loader, b);
    }
    for (uint32_t i = 0; i < e->live_count; i++) {
        struct sequence *s = e->live[i];
        if (s->state == SEQ_RUNNING && s->load_id)
            engine_meet_turn(e, s);
        if (s->state != SEQ_LOADING)
            continue;
        s->deadline_us = deadline(e, s);
        bool is_over = s->load_each_us || all_loaded(s) || now >= s->deadline_us;
        if (is_over && engine_swap_arrived(e, s, false))
            finish_load(e, s);
        else if (!s->load_each_us)
            ask_for_blocks(e, s);
    }
}
