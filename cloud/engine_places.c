/* engine_places: whose turn it is to come in, and to have rows of its prompt run; and what one that is idle, as it waits for its edge, gives to others:
 * its place among those that run, and its pages.
 *
 * Places are for work. An idle one keeps its place until somebody else wants it; then it is placeless: it keeps its pages and all that has come, and with
 * the next data it takes a place again, before all who came later. So a device that opens many prompts and sends nothing holds nobody up. Whose
 * principal has most idle ones with a place gives one first. Rejected: a place only with the first rows, as blocks are read from the disk, and held,
 * while an edge still computes them.
 *
 * Who comes in, and who is next, is a matter of tenants and of principals, not of who asks most: engine_come_in; and of those who wait the next is one
 * whose tenant has fewest places, and of these whose principal has; among these, in order of arrival. Where no place is free one whose tenant has fewer by
 * two or more has that of the other's youngest prompt, which goes on later, with its pages: a reply is not stopped. Rejected: order of arrival alone, as
 * one client with a few connections, or one tenant with many devices, then shuts out, or holds up for minutes, everybody else.
 *
 * Pages stay promised to idle ones, or their rows would come to no pages and be lost. But while others wait for pages the idle ones of a principal may
 * have half of them, and while another tenant waits all of a tenant may, and one more: beyond, the youngest are as if they had not been admitted, and come behind those who
 * have less. Of these nothing is lost, unless rows or pieces are in their pages already; then idle ones have STALLED_US first, and others end. One alone is
 * left in peace; and who would have too much itself takes nothing from another tenant, which would take it back. */
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

static bool is_admitted(const struct sequence *s)
{
    return s->state == SEQ_RUNNING || s->state == SEQ_LOADING;
}

static bool has_place(const struct sequence *s)
{
    return is_admitted(s) && !s->placeless;
}

/* More is to be run than the row that extends a reply. */
static bool is_prompt(const struct sequence *s)
{
    return s->state == SEQ_RUNNING && s->ids_count - s->high > 1;
}

static uint32_t pages_of(const struct engine *e, const struct sequence *s)
{
    return TD_MIN(sequence_blocks(s->ids_count + 1), e->backend->page_count);
}

static struct sequence *find_crowd(struct sequence *crowds[UINT8_MAX + 1], struct sequence *s)
{
    struct sequence **first = &crowds[s->turn & UINT8_MAX];
    while (*first && (*first)->turn != s->turn)
        first = &(*first)->kin.next_crowd;
    return *first ? *first : (*first = s);
}

/* What the live of each principal, and tenant, have together. It is kept with the youngest of them, which is found by a byte of its key, or turn, as there
 * may be hundreds of each. */
static void count_kin(const struct engine *e)
{
    struct sequence *first[UINT8_MAX + 1] = {NULL}, *crowds[UINT8_MAX + 1] = {NULL};
    for (uint32_t i = e->live_count; i-- > 0;) {
        struct sequence *s = e->live[i], **at = &first[s->own_key[0]];
        while (*at && !engine_same_principal(*at, s))
            at = &(*at)->kin.next;
        if (!*at) {
            *at = s;
            s->kin = (struct seq_kin){0};
            s->kin.crowd = find_crowd(crowds, s);
        }
        s->youngest = *at;
        struct seq_kin *kin = &s->youngest->kin;
        if (s->state == SEQ_WAITING)
            kin->waits = s;
        if (is_idle(s) && has_place(s) && kin->idle_count++ == 0)
            kin->idle = s;
        kin->placed_count += has_place(s);
        kin->crowd->kin.crowd_placed += has_place(s);
        kin->crowd->kin.crowd_pages += is_admitted(s) ? pages_of(e, s) : 0;
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

/* --- turns ---------------------------------------------------------------------------------------- */

/* A tenant's first one comes behind all who are here. A principal's is of the round of its tenant's oldest prompt, or behind what it has begun. Rejected: of
 * the least round of any, as a second prompt would then wait for as long as others come. */
void engine_join_turns(struct engine *e, struct sequence *s)
{
    uint64_t begun = 0, now = UINT64_MAX;
    bool is_first = true;
    for (uint32_t i = 0; i < e->live_count; i++) {
        const struct sequence *other = e->live[i];
        if (strcmp(other->tenant, s->tenant) != 0)
            continue;
        is_first = false;
        s->turn = other->turn;
        bool has_prompt = other->state == SEQ_WAITING || other->state == SEQ_LOADING || is_prompt(other);
        if (has_prompt && now == UINT64_MAX)
            now = other->round;
        if (strcmp(other->principal, s->principal) == 0)
            begun = TD_MAX(begun, other->round + other->begun);
    }
    if (is_first)
        s->turn = e->next_turn++;
    s->round = now == UINT64_MAX ? begun : TD_MAX(begun, now);
    s->begun = false;
}

void engine_take_turn(struct engine *e, struct sequence *s, uint64_t turn)
{
    uint64_t last = s->turn;
    bool begins = !s->begun;
    s->begun = true;
    for (uint32_t i = 0; i < e->live_count; i++) {
        struct sequence *other = e->live[i];
        if (other->turn == last)
            other->turn = turn;
        if (begins && !other->begun && engine_same_principal(other, s))
            other->round = TD_MAX(other->round, s->round + 1);
    }
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

/* The youngest prompt of the tenant that has most places, if that is two more than the tenant of s has; by what count_kin found. */
static struct sequence *find_crowded(const struct engine *e, const struct sequence *s)
{
    struct sequence *best = NULL;
    uint32_t most = 1;
    for (uint32_t i = 0; i < e->live_count; i++)
        most += e->live[i]->turn == s->turn && has_place(e->live[i]);
    for (uint32_t i = e->live_count; i-- > 0;) {
        uint32_t placed = e->live[i]->youngest->kin.crowd->kin.crowd_placed;
        if (placed > most && is_prompt(e->live[i]) && has_place(e->live[i])) {
            best = e->live[i];
            most = placed;
        }
    }
    return best;
}

/* Who gives its place to s. */
static struct sequence *find_giver(const struct engine *e, const struct sequence *s)
{
    struct sequence *idle = find_idle(e);
    return idle || !s ? idle : find_crowded(e, s);
}

bool engine_is_no_better_off(const struct sequence *s, const struct sequence *placeless)
{
    return s->youngest->kin.crowd->kin.crowd_placed >= placeless->youngest->kin.crowd->kin.crowd_placed;
}

bool engine_place_is_free(const struct engine *e, const struct sequence *s)
{
    return e->running_count < e->config.sequences_max || find_giver(e, s);
}

bool engine_take_place(struct engine *e, const struct sequence *s)
{
    if (e->running_count < e->config.sequences_max) {
        e->running_count++;
        return true;
    }
    struct sequence *giver = find_giver(e, s);
    if (giver)
        giver->placeless = true;
    else
        e->short_of_places = true;
    return giver != NULL;
}

/* --- pages ---------------------------------------------------------------------------------------- */

/* Its principal has, with it; by what count_kin found, as the next. */
static bool has_more_than_its_share(const struct engine *e, const struct sequence *s)
{
    uint32_t others = s->youngest->kin.idle_pages - (is_idle(s) ? pages_of(e, s) : 0);
    return others > 0 && others + pages_of(e, s) > e->backend->page_count / 2;
}

/* Its tenant has, without it: a prompt that alone needs half of the pages is not behind all small ones for ever. */
static bool is_crowded(const struct engine *e, const struct sequence *s)
{
    uint32_t others = s->youngest->kin.crowd->kin.crowd_pages - (is_admitted(s) ? pages_of(e, s) : 0);
    return others > e->backend->page_count / 2;
}

/* Who has too much is behind all who have not; else the fewest places. It is an order, so somebody is first: no two hold each other up. */
static uint64_t turn_of(const struct engine *e, const struct sequence *s)
{
    const struct seq_kin *kin = &s->youngest->kin;
    return (uint64_t)is_crowded(e, s) << 63 | (uint64_t)has_more_than_its_share(e, s) << 62 |
           (uint64_t)kin->crowd->kin.crowd_placed << 32 | kin->placed_count;
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
        bool is_others = s->youngest->kin.crowd != waiting->youngest->kin.crowd && is_crowded(e, s) &&
                         !is_crowded(e, waiting);
        if (s->state != SEQ_RUNNING || s->youngest == waiting->youngest)
            continue;
        if (only_cached ? !has_only_cached(s)
                        : !is_idle(s) || now < TD_MAX(s->upload_us, s->kv_us) + STALLED_US)
            continue;
        if (is_others || (is_idle(s) && has_more_than_its_share(e, s)))
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
