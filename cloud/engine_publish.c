/* engine_publish: blocks whose KV is whole go to the prefix cache and, through persist, to the store.
 *
 * A block becomes public once all its layers are there and GENERATE has said that blocks may be kept. Its namespace: shared as long as nothing of
 * the sequence up to it came from a device; from the first such block on, own. Its quality: the worst of all blocks up to it. */
#include "cloud/engine_internal.h"

static bool in_shared(const struct sequence *s, uint32_t block)
{
    return block < s->own_from;
}

static const struct kv_block_id *id_of(const struct sequence *s, uint32_t block)
{
    return in_shared(s, block) ? &s->blocks[block].shared : &s->blocks[block].own;
}

static bool store_has(struct engine *e, const struct sequence *s, const struct kv_block_id *id,
                      struct kv_quality quality)
{
    struct store_block_info info;
    return store_find(tiers_store(e->config.tiers), s->tenant, id, &info) == 0 && info.layer_begin == 0 &&
           info.layer_end == e->model.shape.layer_count && !kv_quality_better(quality, info.quality);
}

/* A block that was read is in a tier already. */
static void offer_block(struct engine *e, struct sequence *s, uint32_t block)
{
    bool loaded = s->blocks[block].loaded;
    struct prefix_entry entry = {.id = *id_of(s, block),
                                 .page = s->pages[block],
                                 .quality = loaded ? s->blocks[block].quality : s->quality,
                                 .layers = e->model.shape.layer_count};
    struct kv_block_id parent = {{0}};
    if (block > 0)
        parent = *id_of(s, block - 1);
    prefix_cache_put(e->cache, &entry, &parent);
    if (loaded || !e->persist || store_has(e, s, &entry.id, entry.quality))
        return;
    if (e->pending_count == e->backend->page_count) { /* a page can be in two sequences' pending blocks */
        metric_add(e->metrics.persist_dropped, 1);
        return;
    }
    struct pending_block *p = &e->pending[(e->pending_first + e->pending_count++) % e->backend->page_count];
    p->block = (struct persist_block){
        .id = entry.id, .parent = parent, .quality = entry.quality, .block_index = block, .owner = s->key};
    memcpy(p->block.tenant, s->tenant, sizeof p->block.tenant);
    p->page = entry.page;
    page_pool_share(e->pool, entry.page);
    s->unpersisted++;
}

void engine_publish(struct engine *e, struct sequence *s)
{
    if (!s->started)
        return;
    uint32_t end = TD_MIN(s->complete / KV_BLOCK_TOKENS, s->chain_count);
    for (; s->published < end; s->published++) {
        const struct seq_block *b = &s->blocks[s->published];
        if (b->from_device)
            s->own_from = TD_MIN(s->own_from, s->published);
        struct kv_quality quality = {.fidelity = b->fidelity,
                                     .numerics = b->numerics ? b->numerics : (uint8_t)e->model.numerics,
                                     .provenance = b->from_device ? KV_FROM_DEVICE : KV_FROM_CLOUD};
        s->quality = kv_quality_worst(s->quality, b->loaded ? b->quality : quality);
        if (!s->generate.no_persist)
            offer_block(e, s, s->published);
    }
}

/* --- to the store --------------------------------------------------------------------------------- */

static struct pending_block *pop_pending(struct engine *e)
{
    struct pending_block *p = &e->pending[e->pending_first];
    e->pending_first = (e->pending_first + 1) % e->backend->page_count;
    e->pending_count--;
    return p;
}

static void acknowledge(struct engine *e, uint64_t owner, int status)
{
    if (status < 0)
        metric_add(e->metrics.persist_dropped, 1);
    struct sequence *s = engine_find_key(e, owner);
    if (s && s->unpersisted > 0)
        s->unpersisted--;
}

void engine_flush_pending(struct engine *e)
{
    while (e->pending_count > 0 && !e->forgetting) {
        struct persist_block *block = persist_take(e->persist);
        if (!block)
            return;
        struct pending_block *p = pop_pending(e);
        uint16_t *values = block->values;
        *block = p->block;
        block->values = values;
        int rc = engine_page_out(e, p->page, values);
        page_pool_release(e->pool, p->page);
        if (rc == 0) {
            persist_submit(e->persist, block);
        } else {
            persist_untake(e->persist, block);
            acknowledge(e, p->block.owner, rc);
        }
    }
}

bool engine_drop_pending(struct engine *e)
{
    if (e->pending_count == 0)
        return false;
    struct pending_block *p = pop_pending(e);
    page_pool_release(e->pool, p->page);
    acknowledge(e, p->block.owner, -TD_ERR_FULL);
    return true;
}

/* Held by the list and, most of the time, the cache; with a sequence in addition dropping would free nothing. */
uint32_t engine_pending_pages(const struct engine *e)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < e->pending_count; i++) {
        const struct pending_block *p = &e->pending[(e->pending_first + i) % e->backend->page_count];
        count += page_pool_references(e->pool, p->page) <= 2;
    }
    return count;
}

void engine_take_acknowledgements(struct engine *e)
{
    uint64_t owner;
    int status;
    while (e->persist && persist_pop(e->persist, &owner, &status))
        acknowledge(e, owner, status);
}
