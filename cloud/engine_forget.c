/* engine_forget: a tenant is being erased: nothing of it stays in the engine, and nothing of it is on its way to or from the store when engine_forget
 * returns.
 *
 *   1. its generations end: those that run or wait fail, parked and ended ones are forgotten with their ids
 *   2. its finished blocks that wait for the store go
 *   3. the prefix cache lets go of all its pages, and of those in host memory: entries know ids, not tenants, and erasing is rare enough for
 *      others to read theirs again
 *   4. nobody's blocks are given to the store or asked of it until what is under way has ended; then the caller goes on
 *
 * Step 4 is why the store can be erased behind this: a block that arrives there later would bring keys for the tenant with it. */
#include "cloud/engine_internal.h"
#include <stdlib.h>

static bool is_of(const struct sequence *s, const char *tenant)
{
    return strcmp(s->tenant, tenant) == 0;
}

static void end_live(struct engine *e, const char *tenant)
{
    for (uint32_t i = e->live_count; i-- > 0;) {
        struct sequence *s = e->live[i];
        if (!is_of(s, tenant))
            continue;
        if (s->state ==
            SEQ_CLOSING) { /* its reply is whole; that its blocks will not be kept is what is asked for */
            s->unpersisted = 0;
            engine_try_end(e, s);
        } else {
            engine_fail(e, s, -TD_ERR_CLOSED, "the data of this tenant has been erased");
        }
    }
}

static void drop_pending(struct engine *e, const char *tenant)
{
    uint32_t size = e->backend->page_count, kept = 0;
    for (uint32_t i = 0; i < e->pending_count; i++) {
        const struct pending_block p = e->pending[(e->pending_first + i) % size];
        if (strcmp(p.block.tenant, tenant) == 0)
            page_pool_release(e->pool, p.page);
        else
            e->pending[(e->pending_first + kept++) % size] = p;
    }
    e->pending_count = kept;
}

void engine_do_forget(struct engine *e, struct engine_forgetting *f)
{
    end_live(e, f->tenant);
    gen_table_drop_tenant(e->gens, f->tenant);
    engine_expire(e, e->clock());
    drop_pending(e, f->tenant);
    prefix_cache_clear(e->cache);
    if (e->swap.blocks)
        prefix_cache_clear(e->swap.blocks);
    f->next = e->forgetting;
    e->forgetting = f;
}

void engine_check_forget(struct engine *e)
{
    if (!e->forgetting || e->loads_in_flight > 0 || (e->persist && !persist_is_idle(e->persist)))
        return;
    pthread_mutex_lock(&e->lock);
    for (struct engine_forgetting *f = e->forgetting, *next; f; f = next) {
        next = f->next; /* its caller's again once it is done */
        f->done = true;
    }
    e->forgetting = NULL;
    pthread_cond_broadcast(&e->drained);
    pthread_mutex_unlock(&e->lock);
}

int engine_forget(struct engine *e, const char *tenant)
{
    struct engine_forgetting f = {.tenant = tenant};
    struct engine_command *c = calloc(1, sizeof *c);
    if (!c)
        return -TD_ERR_NOMEM;
    c->type = COMMAND_FORGET;
    c->forget = &f;
    int rc = queue_push(e->commands, c);
    if (rc < 0) {
        free(c);
        return rc;
    }
    pthread_mutex_lock(&e->lock);
    while (!f.done)
        pthread_cond_wait(&e->drained, &e->lock);
    pthread_mutex_unlock(&e->lock);
    return 0;
}
