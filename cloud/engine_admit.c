/* engine_admit: who runs and gets pages, and what of a prompt is already there.
 *
 * A prefix is looked up block by block, each in memory and then on disk, as long as every one is found; whole blocks, and never the last token. While
 * all blocks so far came from the shared namespace the next is sought there first, then in the principal's own; after one of those, only there.
 *
 * Admission is in order of arrival, among tenants, and principals, that have as many places (engine_places.c): a sequence runs when the pages that its prompt needs can
 * be had beside what the running ones still need for theirs. Replies are not reserved for: when pages run out the youngest, of the same principal if there
 * is one, gives up its own (preemption) and is computed again later, from ids. */
#include "cloud/engine_internal.h"

#define TOUCH_BLOCKS_MAX   4096u /* the longest context */
#define LOOK_UP_BLOCKS_MAX 512   /* of a prompt, asked of the remote tier at once */

struct found {
    uint32_t page; /* PAGE_NONE: in none; then in host memory, or in a tier of the store */
    bool swapped;
    enum tier_kind tier; /* which */
    struct kv_quality quality;
    bool shared;
};

static bool serves(const struct engine *e, const struct sequence *s, const struct prefix_entry *entry)
{
    return entry && entry->layers == e->model.shape.layer_count &&
           kv_quality_accepts(entry->quality, s->accept, e->model.numerics);
}

static bool find_id(struct engine *e, const struct sequence *s, const struct kv_block_id *id,
                    struct found *found)
{
    const struct prefix_entry *entry = prefix_cache_find(e->cache, id), *swapped = engine_swapped(e, id);
    *found = (struct found){.page = PAGE_NONE};
    if (serves(e, s, entry)) {
        found->page = entry->page;
        found->quality = entry->quality;
        return true;
    }
    if (serves(e, s, swapped)) {
        found->swapped = true;
        found->quality = swapped->quality;
        return true;
    }
    struct tiers_want want = {s->accept, e->model.numerics, 0, (uint16_t)e->model.shape.layer_count};
    struct tiers_found tier;
    int rc = e->loader ? tiers_find(e->config.tiers, s->tenant, id, &want, &tier) : -TD_ERR_NOTFOUND;
    e->answer_due |= rc == -TD_ERR_AGAIN;
    if (rc < 0)
        return false;
    found->quality = tier.info.quality;
    found->tier = tier.tier;
    return true;
}

static bool find_block(struct engine *e, const struct sequence *s, uint32_t block, bool in_shared,
                       struct found *found)
{
    bool shared = in_shared && find_id(e, s, &s->blocks[block].shared, found);
    bool there = shared || find_id(e, s, &s->blocks[block].own, found);
    found->shared = shared;
    return there;
}

const struct kv_block_id *engine_cached_id(const struct sequence *s, uint32_t block)
{
    return block < s->own_from ? &s->blocks[block].shared : &s->blocks[block].own;
}

/* Whole blocks that a prefix hit may cover: the last token is always computed. */
static uint32_t hit_blocks_max(const struct sequence *s)
{
    return s->no_cache ? 0 : TD_MIN((s->ids_count - 1) / KV_BLOCK_TOKENS, s->chain_count);
}

/* Blocks from `first` on are not here: perhaps another node has put them where all can read them. */
static void ask_afar(struct engine *e, const struct sequence *s, uint32_t first, bool in_shared)
{
    struct kv_block_id ids[2 * LOOK_UP_BLOCKS_MAX];
    size_t count = 0;
    uint32_t end = TD_MIN(hit_blocks_max(s), first + LOOK_UP_BLOCKS_MAX);
    if (!e->loader || !tiers_has_remote(e->config.tiers))
        return;
    for (uint32_t block = first; block < end; block++) {
        if (in_shared)
            ids[count++] = s->blocks[block].shared;
        ids[count++] = s->blocks[block].own;
    }
    tiers_look_up(e->config.tiers, s->tenant, ids, count);
}

void engine_probe(struct engine *e, struct sequence *s, struct engine_event *event)
{
    struct found found;
    bool in_shared = true;
    uint32_t disk = 0, block = 0, counts[TIER_COUNT] = {0};
    for (; block < hit_blocks_max(s) && find_block(e, s, block, in_shared, &found); block++) {
        in_shared = in_shared && found.shared;
        if (found.page == PAGE_NONE && !found.swapped) { /* else it has no tier */
            disk++;
            counts[found.tier]++;
        }
    }
    ask_afar(e, s, block, in_shared);
    event->opened.cached_tokens =
        TD_MIN(block * KV_BLOCK_TOKENS, (s->prompt_count - 1) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS);
    event->opened.cached_disk = disk * KV_BLOCK_TOKENS;
    event->opened.cached_memory = (block - disk) * KV_BLOCK_TOKENS;
    event->opened.load_us = e->loader ? engine_load_us(e, counts) : 0;
}

/* --- pages ---------------------------------------------------------------------------------------- */

static void release_pages(struct engine *e, struct sequence *s)
{
    for (uint32_t i = 0; i < s->block_capacity && s->page_count > 0; i++) {
        if (s->pages[i] == PAGE_NONE)
            continue;
        page_pool_release(e->pool, s->pages[i]);
        s->pages[i] = PAGE_NONE;
        s->page_count--;
    }
}

void engine_release(struct engine *e, struct sequence *s)
{
    if (s->state != SEQ_LOADING && s->state != SEQ_RUNNING)
        return;
    engine_swap_arrived(e, s, true);
    release_pages(e, s);
    e->running_count -= !s->placeless;
    s->placeless = s->idle = false;
    s->load_id = 0;
}

void engine_preempt(struct engine *e, struct sequence *s)
{
    engine_release(e, s);
    sequence_restart(s, &e->model);
    s->state = SEQ_WAITING;
    s->waiting_us = e->clock();
    metric_add(e->metrics.preemptions, 1);
}

/* The youngest that holds pages and came after s; of the same principal, if there is one. */
static struct sequence *find_victim(struct engine *e, const struct sequence *s)
{
    struct sequence *victim = NULL;
    for (uint32_t i = e->live_count; i-- > 0 && e->live[i]->arrival > s->arrival;) {
        struct sequence *other = e->live[i];
        if ((other->state != SEQ_RUNNING && other->state != SEQ_LOADING) || other->page_count == 0)
            continue;
        if (engine_same_principal(other, s))
            return other;
        victim = victim ? victim : other;
    }
    return victim;
}

uint32_t engine_take_page(struct engine *e, struct sequence *s)
{
    for (;;) {
        uint32_t page = engine_alloc_page(e);
        if (page != PAGE_NONE)
            return page;
        if (engine_drop_pending(e))
            continue;
        struct sequence *victim = find_victim(e, s);
        if (!victim) {
            e->short_of_pages = true;
            return PAGE_NONE;
        }
        engine_preempt(e, victim);
    }
}

/* Pages that running sequences still need for what they are computing. */
static uint32_t pages_promised(const struct engine *e)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < e->live_count; i++) {
        const struct sequence *s = e->live[i];
        uint32_t need = TD_MIN(sequence_blocks(s->ids_count + 1), e->backend->page_count);
        if ((s->state == SEQ_RUNNING || s->state == SEQ_LOADING) && need > s->page_count)
            count += need - s->page_count;
    }
    return count;
}

/* --- admission ------------------------------------------------------------------------------------ */

struct prefix {                  /* what is cached of a prompt */
    uint32_t blocks, first;      /* first: the first one that is not in memory; blocks: none */
    uint32_t counts[TIER_COUNT]; /* of those that are to be read */
    bool both_ends;              /* read some of them while others are computed */
    uint32_t declined;           /* blocks that were found and are computed all the same */
    struct kv_block_id declined_id;
};

/* Hold the pages of all cached blocks; mark those to read. */
static void hold_prefix(struct engine *e, struct sequence *s, struct prefix *p)
{
    struct found found;
    uint32_t block = 0;
    *p = (struct prefix){.first = UINT32_MAX};
    s->own_from = UINT32_MAX;
    for (; block < hit_blocks_max(s) && find_block(e, s, block, s->own_from == UINT32_MAX, &found); block++) {
        if (!found.shared && s->own_from == UINT32_MAX)
            s->own_from = block;
        s->blocks[block].swapped = found.swapped;
        s->blocks[block].on_disk = found.page == PAGE_NONE && !found.swapped;
        s->blocks[block].read = false;
        s->blocks[block].quality = found.quality;
        if (found.swapped)
            continue;
        if (found.page == PAGE_NONE) {
            p->first = TD_MIN(p->first, block);
            p->counts[found.tier]++;
            continue;
        }
        page_pool_share(e->pool, found.page);
        s->pages[block] = found.page;
        s->page_count++;
    }
    p->blocks = block;
    p->first = TD_MIN(p->first, block);
    engine_swap_touch(e, s, block);
}

/* Keep the first `blocks` of what is held. */
static void cut_prefix(struct engine *e, struct sequence *s, uint32_t blocks, uint32_t held)
{
    for (uint32_t i = blocks; i < held; i++) {
        s->blocks[i].on_disk = s->blocks[i].swapped = false;
        if (s->pages[i] == PAGE_NONE)
            continue;
        page_pool_release(e->pool, s->pages[i]);
        s->pages[i] = PAGE_NONE;
        s->page_count--;
    }
    if (s->own_from >= blocks)
        s->own_from = UINT32_MAX;
}

/* Blocks that would be read later than they are computed are as good as not there. */
static void choose_what_to_read(struct engine *e, struct sequence *s, struct prefix *p)
{
    if (p->first == p->blocks || s->is_private) /* of a private prompt nothing can be computed instead */
        return;
    p->both_ends = engine_meet_pays(e, s, p->first, p->blocks, engine_load_us(e, p->counts));
    if (p->both_ends || engine_load_pays(e, p->first, p->blocks, p->counts))
        return;
    p->declined = p->blocks - p->first;
    p->declined_id = *engine_cached_id(s, p->first);
    cut_prefix(e, s, p->first, p->blocks);
    p->blocks = p->first;
}

static void let_prefix_go(struct engine *e, struct sequence *s, uint32_t blocks)
{
    release_pages(e, s);
    for (uint32_t i = 0; i < blocks; i++)
        s->blocks[i].on_disk = s->blocks[i].swapped = false;
    s->own_from = UINT32_MAX;
}

/* Nobody runs, so nobody will free a page: if the store has not taken what waits for it in all this time, it is not waited for. */
static void give_up_on_store(struct engine *e, const struct sequence *s)
{
    if (e->running_count > 0 || e->pending_count == 0)
        return;
    e->short_of_pages = true;
    while (e->clock() - s->waiting_us > ENGINE_CLOSE_WAIT_US && engine_drop_pending(e))
        continue;
}

static void count_look_up(struct engine *e, const struct sequence *s, uint32_t blocks)
{
    uint32_t memory = 0;
    for (uint32_t i = 0; i < blocks; i++)
        memory += !s->blocks[i].on_disk;
    if (s->no_cache)
        return;
    metric_add(e->metrics.prefix_queries, s->ids_count);
    metric_add(e->metrics.prefix_hits, blocks * KV_BLOCK_TOKENS);
    metric_add(e->metrics.memory_hits, memory);
    metric_add(e->metrics.memory_misses,
               s->ids_count / KV_BLOCK_TOKENS - TD_MIN(memory, s->ids_count / KV_BLOCK_TOKENS));
}

/* The whole blocks of the prompt, under the names that they are, or will be, known by. */
static void touch_chain(struct engine *e, const struct sequence *s)
{
    struct kv_block_id chain[TOUCH_BLOCKS_MAX];
    uint32_t count = TD_MIN(hit_blocks_max(s), TOUCH_BLOCKS_MAX);
    if (!e->loader || s->no_cache)
        return;
    for (uint32_t i = 0; i < count; i++)
        chain[i] = *engine_cached_id(s, i);
    tiers_touch(e->config.tiers, s->tenant, chain, count);
}

void engine_run_from(struct engine *e, struct sequence *s, uint32_t blocks)
{
    uint64_t now = e->clock();
    sequence_set_cached(s, blocks);
    uint32_t read = 0;
    for (uint32_t i = 0; i < blocks; i++) {
        s->quality = kv_quality_worst(s->quality, s->blocks[i].quality);
        read += s->blocks[i].read;
    }
    s->cached_tokens = TD_MIN(s->cached_count, s->prompt_count);
    s->read_tokens = TD_MIN(read * KV_BLOCK_TOKENS, s->cached_tokens);
    s->state = SEQ_RUNNING;
    s->idle = false;
    s->upload_us = now;
    s->load_us += now - s->admitted_us;
}

/* What host memory has of the prefix is on its way; the prefix ends in front of the first block that will not come. */
static void fetch_swapped(struct engine *e, struct sequence *s, struct prefix *p)
{
    uint32_t blocks = engine_swap_in(e, s, p->blocks);
    cut_prefix(e, s, blocks, p->blocks);
    p->blocks = blocks;
    p->first = TD_MIN(p->first, blocks);
}

static bool admit_one(struct engine *e, struct sequence *s)
{
    e->answer_due = false;
    struct prefix p;
    uint32_t promised = pages_promised(e);
    hold_prefix(e, s, &p);
    if (e->answer_due) { /* for a tenth of a second at most */
        let_prefix_go(e, s, p.blocks);
        return false;
    }
    choose_what_to_read(e, s, &p);
    /* A reply that ends exactly with the last page needs none behind it. */
    uint32_t need = TD_MIN(sequence_blocks(s->ids_count + 1), e->backend->page_count) - s->page_count;
    /* Blocks that wait for the store do not keep anybody out: it may be done with them in time, else they are dropped. */
    bool room = prefix_cache_available(e->cache) + engine_pending_pages(e) >= need + promised;
    for (uint32_t i = 0; i < p.blocks && room; i++)
        if (s->blocks[i].on_disk || s->blocks[i].swapped) {
            s->pages[i] = engine_take_page(e, s);
            room = s->pages[i] != PAGE_NONE;
            s->page_count += room;
        }
    if (!room) {
        let_prefix_go(e, s, p.blocks);
        give_up_on_store(e, s);
        return false;
    }
    fetch_swapped(e, s, &p);
    count_look_up(e, s, p.first); /* what is read counts when it is here */
    touch_chain(e, s);
    uint64_t now = e->clock();
    engine_take_place(e, s);
    s->admitted_us = now;
    s->queue_us += now - s->waiting_us;
    if (p.declined) {
        metric_add(e->metrics.load_declined, p.declined);
        engine_load_try(e, s, &p.declined_id, p.first);
    }
    if (p.first == p.blocks && s->swap_ticket == 0)
        engine_run_from(e, s, p.blocks);
    else if (p.both_ends && s->swap_ticket == 0)
        engine_meet_begin(e, s, p.first, p.blocks, engine_load_us(e, p.counts));
    else
        engine_load_begin(e, s, p.first, p.blocks, p.counts);
    if (p.both_ends && s->state == SEQ_LOADING) /* what is in front of the first row computed must be here */
        s->load_each_us = engine_load_us(e, p.counts) / TD_MAX(p.blocks - p.first, 1u);
    return true;
}

/* True: others are behind those that came in now, and may come in themselves. */
static bool admit_all(struct engine *e)
{
    bool answer_due = false, any = false;
    const struct sequence *behind = NULL;    /* with all of its principal */
    const struct sequence *placeless = NULL; /* with all whose tenants have as many places */
    e->answer_due = e->short_of_places = false;
    for (uint32_t i = 0; i < e->live_count; i++) {
        struct sequence *s = e->live[i];
        bool wants_back = s->state == SEQ_RUNNING && s->placeless && !s->idle;
        if ((!wants_back && s->state != SEQ_WAITING) || (placeless && engine_is_no_better_off(s, placeless)))
            continue;
        if (!engine_place_is_free(e,
                                  s)) { /* whose turn it is, which takes long to find out, is of no matter */
            e->short_of_places = true;
            placeless = s;
            continue;
        }
        if (wants_back)
            s->placeless = !engine_take_place(e, s);
        if (wants_back || (behind && engine_same_principal(behind, s)))
            continue;
        if (engine_comes_behind(e, s)) {
            behind = s;
            continue;
        }
        bool admitted = admit_one(e, s);
        while (!admitted && !e->answer_due && engine_reclaim(e, s))
            admitted = admit_one(e, s);
        any |= admitted;
        if (admitted)
            continue;
        if (!e->answer_due)
            break;
        answer_due = true; /* others need not wait for it, too */
    }
    e->answer_due = answer_due;
    return any && behind && !e->short_of_places;
}

void engine_admit(struct engine *e)
{
    while (admit_all(e))
        continue;
}
