/* engine_places: what one that is idle, as it waits for its edge, gives to others: its place among those that run, and its pages.
 *
 * Places are for work. An idle one keeps its place until somebody else wants it; then it is placeless: it keeps its pages and all that has come, and with
 * the next data it takes a place again, before all who came later. So a device that opens many prompts and sends nothing holds nobody up. Whose
 * principal has most idle ones with a place gives one first. Rejected: a place only with the first rows, as blocks are read from the disk, and held,
 * while an edge still computes them.
 *
 * Who comes in, and who is next, is a matter of principals, not of who asks most: engine_come_in; and of those who wait the next is one whose
 * principal has fewest places; among these, in order of arrival. Rejected: order of arrival alone, as one client with a few connections then
 * shuts out, or holds up for minutes, everybody else.
 *
 * Pages stay promised to idle ones, or their rows would come to no pages and be lost. But while others wait for pages the idle ones of a principal may
 * have half of them: beyond, its youngest are as if they had not been admitted, and it comes behind those who have less. Of these nothing is lost, unless rows
 * or pieces are in their pages already; then they have STALLED_US first. One alone is left in peace. */
#include "cloud/engine_internal.h"
#include <stdio.h>

#define STALLED_US 10000000 /* without any progress: what has come is given up for those who wait */

bool engine_same_principal(const struct sequence *a, const struct sequence *b)
{
    return strcmp(a->principal, b->principal) == 0 && strcmp(a->tenant, b->tenant) == 0;
}

static bool is_idle(const struct sequence *s)
{
    return s->state == SEQ_RUNNING && s->idle;
}

static bool has_place(const struct sequence *s)
{
    return (s->state == SEQ_RUNNING || s->state == SEQ_LOADING) && !s->placeless;
}

static uint32_t pages_of(const struct engine *e, const struct sequence *s)
{
    return TD_MIN(sequence_blocks(s->ids_count + 1), e->backend->page_count);
}

/* What the live of each principal have together. It is kept with the youngest of them, and that one is found by a byte of the principal's key, as
 * there may be hundreds of each. */
static void count_kin(const struct engine *e)
{
    struct sequence *first[UINT8_MAX + 1] = {NULL};
    for (uint32_t i = e->live_count; i-- > 0;) {
        struct sequence *s = e->live[i], **at = &first[s->own_key[0]];
        while (*at && !engine_same_principal(*at, s))
            at = &(*at)->kin.next;
        if (!*at) {
            *at = s;
            s->kin = (struct seq_kin){0};
        }
        s->youngest = *at;
        struct seq_kin *kin = &s->youngest->kin;
        if (s->state == SEQ_WAITING)
            kin->waits = s;
        if (is_idle(s) && has_place(s) && kin->idle_count++ == 0)
            kin->idle = s;
        kin->placed_count += has_place(s);
        kin->idle_pages += is_idle(s) ? pages_of(e, s) : 0;
    }
}

/* --- who comes in ---------------------------------------------------------------------------------- */

static struct engine_share *find_share(struct engine *e, const char *tenant, const char *principal)
{
    for (uint32_t i = 0; i < e->share_count; i++)
        if (strcmp(e->shares[i].principal, principal) == 0 && strcmp(e->shares[i].tenant, tenant) == 0)
            return &e->shares[i];
    return NULL;
}

/* Would one more leave too little to others? */
static bool is_crowded_by(struct engine *e, const char *tenant, const struct engine_share *own,
                          uint32_t free_count)
{
    uint32_t of_tenant = 0;
    for (uint32_t i = 0; i < e->share_count; i++)
        of_tenant += strcmp(e->shares[i].tenant, tenant) == 0 ? e->shares[i].count : 0;
    return of_tenant >= ENGINE_TENANT_SHARE * free_count ||
           (own && own->count >= ENGINE_PRINCIPAL_SHARE * free_count);
}

int engine_come_in(struct engine *e, const char *tenant, const char *principal)
{
    pthread_mutex_lock(&e->lock);
    uint32_t limit = e->config.sequences_max + e->config.waiting_max, count = atomic_load(&e->open_count);
    struct engine_share *own = find_share(e, tenant, principal);
    bool full = count >= limit || is_crowded_by(e, tenant, own, limit - count);
    if (!full && !own) {
        own = &e->shares[e->share_count++];
        *own = (struct engine_share){0};
        snprintf(own->tenant, sizeof own->tenant, "%s", tenant);
        snprintf(own->principal, sizeof own->principal, "%s", principal);
    }
    if (!full) {
        own->count++;
        atomic_fetch_add(&e->open_count, 1);
    }
    pthread_mutex_unlock(&e->lock);
    return full ? -TD_ERR_FULL : 0;
}

void engine_leave(struct engine *e, const char *tenant, const char *principal)
{
    pthread_mutex_lock(&e->lock);
    struct engine_share *own = find_share(e, tenant, principal);
    if (own && --own->count == 0)
        *own = e->shares[--e->share_count];
    atomic_fetch_sub(&e->open_count, 1);
    pthread_mutex_unlock(&e->lock);
}

/* --- places --------------------------------------------------------------------------------------- */

/* The youngest of the principal that has most of them; NULL: none has a place. */
static struct sequence *find_idle(const struct engine *e)
{
    struct sequence *best = NULL;
    uint32_t most = 0;
    count_kin(e);
    for (uint32_t i = e->live_count; i-- > 0;) {
        const struct seq_kin *kin = &e->live[i]->youngest->kin;
        if (kin->idle == e->live[i] && kin->idle_count > most) {
            best = kin->idle;
            most = kin->idle_count;
        }
    }
    return best;
}

bool engine_place_is_free(const struct engine *e)
{
    return e->running_count < e->config.sequences_max || find_idle(e);
}

bool engine_take_place(struct engine *e)
{
    if (e->running_count < e->config.sequences_max) {
        e->running_count++;
        return true;
    }
    struct sequence *idle = find_idle(e);
    if (idle)
        idle->placeless = true;
    else
        e->short_of_places = true;
    return idle != NULL;
}

/* --- pages ---------------------------------------------------------------------------------------- */

/* By what count_kin found. */
static bool has_more_than_its_share(const struct engine *e, const struct sequence *s)
{
    uint32_t others = s->youngest->kin.idle_pages - (is_idle(s) ? pages_of(e, s) : 0);
    return others > 0 && others + pages_of(e, s) > e->backend->page_count / 2;
}

/* Who has too much is behind all who have not; else the fewest places. It is an order, so somebody is first: no two hold each other up. */
static uint64_t turn_of(const struct engine *e, const struct sequence *s)
{
    return (uint64_t)has_more_than_its_share(e, s) << 32 | s->youngest->kin.placed_count;
}

bool engine_comes_behind(const struct engine *e, const struct sequence *s)
{
    count_kin(e);
    uint64_t own = turn_of(e, s);
    for (uint32_t i = 0; i < e->live_count; i++) {
        const struct sequence *other = e->live[i];
        bool is_next = other == other->youngest->kin.waits && other->youngest != s->youngest;
        if (is_next && turn_of(e, other) < own)
            return true;
    }
    return false;
}

/* Its pages hold nothing but what was cached, and nothing is on its way to them. */
static bool has_only_cached(const struct sequence *s)
{
    return s->page_count * KV_BLOCK_TOKENS == s->cached_count && s->ids_count == s->plan_end && !s->load_id &&
           !s->swap_ticket;
}

static struct sequence *find_stalled(const struct engine *e, const struct sequence *waiting, bool only_cached)
{
    uint64_t now = e->clock();
    count_kin(e);
    for (uint32_t i = e->live_count; i-- > 0;) {
        struct sequence *s = e->live[i];
        if (!is_idle(s) || s->youngest == waiting->youngest)
            continue;
        if (only_cached ? !has_only_cached(s) : now < TD_MAX(s->upload_us, s->kv_us) + STALLED_US)
            continue;
        if (has_more_than_its_share(e, s))
            return s;
    }
    return NULL;
}

bool engine_reclaim(struct engine *e, const struct sequence *waiting)
{
    struct sequence *s = find_stalled(e, waiting, true);
    if (s) {
        engine_release(e, s);
        sequence_set_back(s, &e->model);
        s->state = SEQ_WAITING;
        s->waiting_us = e->clock();
        return true;
    }
    s = find_stalled(e, waiting, false);
    if (s)
        engine_preempt(e, s);
    return s != NULL;
}
