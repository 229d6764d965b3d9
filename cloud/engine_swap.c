/* engine_swap: pages to and from host memory, where the backend's pages are not host memory themselves.
 *
 * Two uses. Blocks on their way to and from the store cross the bus whole, in one copy from or to the buffer in which they are encoded or were
 * decoded (engine_page_out, engine_page_in). And cached blocks have a second place: when pages run short, those that the cache would let go are
 * copied to pinned memory (config.swap_size) and found there again, by whoever was preempted, parked or asks the same once more.
 *
 *      cache (device) --send_out--> swap.blocks (pinned) --engine_swap_in--> pages of a LOADING sequence --> cache
 *
 * Rules
 *   1. A few pages are kept free ahead of need, so that no step waits for a copy: `reserve`. Only if they are used up is a copy waited for.
 *   2. A page on its way out is held by engine_swap alone until its ticket is done; one on its way in is its sequence's, and engine_release waits.
 *   3. Swaps happen in the order in which they were begun, so a place in pinned memory may be given to another block at once.
 *   4. Places are let go the least recently used first. The ends of a chain go out first and come first; whoever brings a chain in touches it from its end.
 *   5. The memory is taken by a thread of its own once pages have run short. Until it is there, and where there is no more of it, what goes is gone.
 *
 * On a backend without swaps there is none of this: a page that is let go is gone. */
#include "cloud/engine_internal.h"
#include "shared/log.h"
#include <stdlib.h>

/* --- life ----------------------------------------------------------------------------------------- */

static size_t page_size(const struct engine *e) /* as it is kept in its second place */
{
    const struct kv_shape *shape = &e->model.shape;
    return kv_dtype_layer_size(e->backend->kv_dtype, shape->kv_head_count, shape->head_dim) *
           shape->layer_count;
}

void *engine_take_host(struct engine *e, size_t size)
{
    const struct backend_ops *ops = e->backend->ops;
    return ops->host_take ? ops->host_take(e->backend, size) : malloc(size);
}

void engine_give_host(struct engine *e, void *memory)
{
    if (!memory || !e->backend->ops->host_give)
        free(memory);
    else
        e->backend->ops->host_give(e->backend, memory);
}

int engine_swap_init(struct engine *e)
{
    struct engine_swap *w = &e->swap;
    uint64_t places = e->config.swap_size / page_size(e);
    if (!e->backend->ops->swap_start || places < 2)
        return 0;
    w->slab_pages = (uint32_t)TD_MIN(places, TD_MAX(SWAP_SLAB_SIZE / page_size(e), UINT64_C(1)));
    w->slab_count = (uint32_t)TD_MIN(places / w->slab_pages, (uint64_t)PAGE_NONE / w->slab_pages - 1);
    w->reserve = TD_MAX(1u, TD_MIN(SWAP_PAGES_MAX, e->backend->page_count / 8));
    w->reserve = TD_MIN(w->reserve, (uint32_t)places / 2);
    w->slabs = calloc(w->slab_count, sizeof *w->slabs);
    w->hosts = calloc(TD_MAX(e->backend->page_count, SWAP_PAGES_MAX), sizeof *w->hosts);
    w->list = calloc(e->backend->page_count, sizeof *w->list);
    w->places = page_pool_create(w->slab_count * w->slab_pages);
    if (w->places)
        w->blocks = prefix_cache_create(w->places);
    return w->slabs && w->hosts && w->list && w->blocks ? 0 : -TD_ERR_NOMEM;
}

static void *take_slabs(void *arg)
{
    struct engine *e = arg;
    struct engine_swap *w = &e->swap;
    for (uint32_t i = 0; i < w->slab_count && !atomic_load(&w->stopping); i++) {
        w->slabs[i] = engine_take_host(e, w->slab_pages * page_size(e));
        if (!w->slabs[i]) {
            log_warn("cloud",
                     "the GPU cannot reach more of this machine's memory: %u pages of --swap-memory are used",
                     i * w->slab_pages);
            break;
        }
        atomic_store(&w->slabs_taken, i + 1);
        metric_set(e->metrics.swap_memory, (double)((i + 1) * w->slab_pages * page_size(e)));
    }
    atomic_store(&w->slabs_ended, true);
    return NULL;
}

void engine_swap_take_memory(struct engine *e)
{
    struct engine_swap *w = &e->swap;
    if (w->has_taker || atomic_load(&w->slabs_ended))
        return;
    w->has_taker = pthread_create(&w->taker, NULL, take_slabs, e) == 0;
    if (!w->has_taker)
        atomic_store(&w->slabs_ended, true);
}

/* The pages that have gone out are free. True: none is on its way. */
static bool end_send(struct engine *e, bool wait)
{
    struct engine_swap *w = &e->swap;
    if (w->ticket && e->backend->ops->swap_done(e->backend, w->ticket, wait) == 0)
        return false;
    for (; w->count > 0; w->count--)
        page_pool_release(e->pool, w->pages[w->count - 1]);
    w->ticket = 0;
    return true;
}

void engine_swap_deinit(struct engine *e)
{
    struct engine_swap *w = &e->swap;
    atomic_store(&w->stopping, true);
    if (w->has_taker)
        pthread_join(w->taker, NULL);
    end_send(e, true);
    prefix_cache_destroy(w->blocks);
    page_pool_destroy(w->places);
    for (uint32_t i = 0; i < w->slab_count && w->slabs; i++)
        engine_give_host(e, w->slabs[i]);
    free(w->slabs);
    free(w->hosts);
    free(w->list);
}

/* --- to and from the store ------------------------------------------------------------------------ */

static int swap_one(struct engine *e, uint32_t page, void *host, bool to_host)
{
    struct page_swap swap = {.pages = &page,
                             .hosts = &host,
                             .count = 1,
                             .layer_end = e->model.shape.layer_count,
                             .to_host = to_host};
    int64_t ticket = e->backend->ops->swap_start(e->backend, &swap);
    int rc = ticket < 0 ? (int)ticket : e->backend->ops->swap_done(e->backend, ticket, true);
    return rc < 0 ? rc : 0;
}

int engine_page_out(struct engine *e, uint32_t page, uint16_t *values)
{
    const struct backend_ops *ops = e->backend->ops;
    size_t half = kv_piece_values(&e->model.shape, KV_BLOCK_TOKENS);
    int rc = 0;
    if (ops->swap_start)
        return swap_one(e, page, values, true);
    for (uint32_t layer = 0; layer < e->model.shape.layer_count && rc == 0; layer++, values += 2 * half)
        rc = ops->page_read(e->backend, page, layer, KV_BLOCK_TOKENS, values, values + half);
    return rc;
}

int engine_page_in(struct engine *e, uint32_t page, uint16_t *values)
{
    const struct backend_ops *ops = e->backend->ops;
    size_t half = kv_piece_values(&e->model.shape, KV_BLOCK_TOKENS);
    int rc = 0;
    if (ops->swap_start)
        return swap_one(e, page, values, false);
    for (uint32_t layer = 0; layer < e->model.shape.layer_count && rc == 0; layer++, values += 2 * half)
        rc = ops->page_write(e->backend, page, layer, KV_BLOCK_TOKENS, values, values + half);
    return rc;
}

/* --- out ------------------------------------------------------------------------------------------ */

static uint8_t *place_at(const struct engine *e, uint32_t place)
{
    const struct engine_swap *w = &e->swap;
    return w->slabs[place / w->slab_pages] + (size_t)(place % w->slab_pages) * page_size(e);
}

static uint32_t places_there(const struct engine *e)
{
    return atomic_load(&e->swap.slabs_taken) * e->swap.slab_pages;
}

/* A free place, the least recently used block's if need be; PAGE_NONE: its memory is not there yet, or there is none at all. */
static uint32_t take_place(struct engine *e)
{
    struct engine_swap *w = &e->swap;
    bool ended = atomic_load(&w->slabs_ended);
    uint32_t place = prefix_cache_alloc(w->blocks);
    while (place != PAGE_NONE && place >= places_there(e)) {
        if (!ended) {
            page_pool_release(w->places, place);
            return PAGE_NONE;
        }
        place = prefix_cache_alloc(w->blocks); /* memory for the one before will not come: it stays taken */
    }
    return place;
}

/* A place for the block; NULL: there is none, or it is there already, as good as this. */
static void *place_for(struct engine *e, struct prefix_entry entry)
{
    static const struct kv_block_id none;
    struct engine_swap *w = &e->swap;
    const struct prefix_entry *known = prefix_cache_find(w->blocks, &entry.id);
    if (known && known->layers >= entry.layers && !kv_quality_better(entry.quality, known->quality))
        return NULL;
    uint32_t place = take_place(e);
    if (place == PAGE_NONE)
        return NULL;
    entry.page = place;
    prefix_cache_put(w->blocks, &entry, &none);
    page_pool_release(w->places, place); /* the table has its own reference */
    return place_at(e, place);
}

/* What the cache would let go next leaves it, until `reserve` pages are free or on their way to be. */
static void send_out(struct engine *e)
{
    struct engine_swap *w = &e->swap;
    if (page_pool_free_count(e->pool) >= w->reserve)
        return;
    engine_swap_take_memory(e);
    struct prefix_entry entry;
    /* In one batch no block takes another's place. */
    uint32_t copies = 0, most = TD_MAX(places_there(e) / 2, 1u);
    while (copies < most && copies + page_pool_free_count(e->pool) < w->reserve &&
           prefix_cache_evict(e->cache, &entry)) {
        void *host = place_for(e, entry);
        if (!host) {
            page_pool_release(e->pool, entry.page);
            continue;
        }
        w->pages[copies] = entry.page;
        w->hosts[copies++] = host;
    }
    w->count = copies;
    if (copies == 0)
        return;
    struct page_swap swap = {.pages = w->pages,
                             .hosts = w->hosts,
                             .count = copies,
                             .layer_end = e->model.shape.layer_count,
                             .to_host = true,
                             .as_kept = true};
    int64_t ticket = e->backend->ops->swap_start(e->backend, &swap);
    w->ticket = TD_MAX(ticket, INT64_C(0)); /* a code: the device is lost, nothing will be read */
    metric_add(e->metrics.swapped_out, copies);
}

void engine_swap_turn(struct engine *e)
{
    if (e->swap.blocks && end_send(e, false))
        send_out(e);
}

uint32_t engine_alloc_page(struct engine *e)
{
    if (e->swap.blocks && page_pool_free_count(e->pool) == 0) {
        end_send(e, true);
        send_out(e);
        if (page_pool_free_count(e->pool) == 0)
            end_send(e, true);
    }
    return prefix_cache_alloc(e->cache);
}

/* --- in ------------------------------------------------------------------------------------------- */

const struct prefix_entry *engine_swapped(const struct engine *e, const struct kv_block_id *id)
{
    return e->swap.blocks ? prefix_cache_peek(e->swap.blocks, id) : NULL;
}

void engine_swap_touch(struct engine *e, const struct sequence *s, uint32_t blocks)
{
    while (blocks-- > 0)
        if (s->blocks[blocks].swapped)
            prefix_cache_find(e->swap.blocks, engine_cached_id(s, blocks));
}

uint32_t engine_swap_in(struct engine *e, struct sequence *s, uint32_t blocks)
{
    struct engine_swap *w = &e->swap;
    uint32_t count = 0, first = blocks;
    for (uint32_t i = 0; i < blocks; i++) {
        const struct prefix_entry *entry =
            s->blocks[i].swapped ? engine_swapped(e, engine_cached_id(s, i)) : NULL;
        if (s->blocks[i].swapped && !entry) { /* its place was needed for pages of this prompt */
            blocks = i;
            break;
        }
        if (!entry)
            continue;
        first = TD_MIN(first, i);
        w->list[count] = s->pages[i];
        w->hosts[count++] = place_at(e, entry->page);
    }
    if (count == 0)
        return blocks;
    struct page_swap swap = {.pages = w->list,
                             .hosts = w->hosts,
                             .count = count,
                             .layer_end = e->model.shape.layer_count,
                             .as_kept = true};
    int64_t ticket = e->backend->ops->swap_start(e->backend, &swap);
    if (ticket < 0)
        return first;
    s->swap_ticket = ticket;
    metric_add(e->metrics.swapped_in, count);
    return blocks;
}

bool engine_swap_arrived(struct engine *e, struct sequence *s, bool wait)
{
    if (s->swap_ticket && e->backend->ops->swap_done(e->backend, s->swap_ticket, wait) == 0)
        return false;
    s->swap_ticket = 0;
    return true;
}
