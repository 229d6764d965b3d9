/* The policy against a naive twin (plain arrays, every rule of policy.h looked for by going through all blocks), and each promise alone. The
 * twin shares the table of chances with the policy: tests/bench/replay_naive.py is what checks that. */
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdarg.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include "shared/status.h"
#include "store/policy_internal.h"

static struct kv_block_id id_of(uint32_t number) /* 0: the zero id */
{
    struct kv_block_id id = {{0}};
    store_le32(id.bytes, number);
    return id;
}

static struct policy_block block_of(uint32_t tenant, uint32_t number, uint32_t parent, uint32_t size)
{
    return (struct policy_block){
        .id = id_of(number), .parent = id_of(parent), .tenant = tenant, .size = size, .cost_s = 1};
}

/* ---- the twin --------------------------------------------------------------------------------------------- */

enum { TWIN_BLOCKS = 512, TWIN_TENANTS = 3 };
struct twin_block {
    bool known, held, pinned, lossless, named;
    uint32_t parent, size, uses, request;
    float cost_s;
    uint64_t used_ms, order;
    uint8_t kind, stage, generation;
};
struct twin {
    struct learn learn;
    struct twin_block blocks[TWIN_TENANTS + 1][TWIN_BLOCKS];
    uint64_t now_ms, order, limit, quota[TWIN_TENANTS + 1], ttl[TWIN_TENANTS + 1];
    bool demotes[TWIN_TENANTS + 1];
    uint32_t request, turn;
};
struct place {
    uint32_t tenant, number;
};

#define EACH_BLOCK(t, b)                                                                                     \
    for (uint32_t t = 1; t <= TWIN_TENANTS; t++)                                                             \
        for (uint32_t b = 1; b < TWIN_BLOCKS; b++)

static void twin_advance(struct twin *w, uint64_t now_ms)
{
    w->now_ms = TD_MAX(w->now_ms, now_ms);
    EACH_BLOCK(t, b)
    {
        struct twin_block *x = &w->blocks[t][b];
        while (x->known && x->stage + 1 < LEARN_STAGES && w->now_ms - x->used_ms >= w->learn.end_ms[x->stage])
            learn_enter(&w->learn, x->kind, ++x->stage);
    }
}

static uint8_t twin_generation(const struct twin *w, uint32_t t, uint32_t parent)
{
    const struct twin_block *x = &w->blocks[t][parent];
    if (!parent || !x->known)
        return 0;
    return (uint8_t)TD_MIN(x->generation + (x->request != w->request), LEARN_GENERATIONS - 1);
}

static size_t twin_touch(struct twin *w, uint32_t t, const uint32_t *chain, size_t count, uint64_t now_ms)
{
    size_t run = 0;
    twin_advance(w, now_ms);
    learn_touch(&w->learn);
    w->request++;
    while (run < count && w->blocks[t][chain[run]].held)
        run++;
    for (size_t i = 0; i < count; i++) {
        struct twin_block *x = &w->blocks[t][chain[i]];
        if (x->known)
            learn_use(&w->learn, x->kind, x->stage);
        else
            *x = (struct twin_block){.known = true,
                                     .request = w->request,
                                     .generation = twin_generation(w, t, i ? chain[i - 1] : 0)};
        x->uses++;
        x->used_ms = w->now_ms;
        x->order = w->order + count - i;
        x->stage = 0;
        x->kind = learn_kind(x->uses > 1, x->generation, i + 1 == count);
        learn_enter(&w->learn, x->kind, 0);
    }
    w->order += count;
    return run;
}

static bool twin_may_go(const struct twin *w, uint32_t t, uint32_t b)
{
    if (!w->blocks[t][b].held || w->blocks[t][b].pinned || w->blocks[t][b].named)
        return false;
    for (uint32_t c = 1; c < TWIN_BLOCKS; c++)
        if (w->blocks[t][c].held && w->blocks[t][c].parent == b)
            return false;
    return true;
}

static double twin_value(const struct twin *w, const struct twin_block *x)
{
    return w->learn.value[x->kind][x->stage] * x->cost_s / x->size;
}

static uint64_t twin_size(const struct twin *w, uint32_t tenant) /* 0: of all */
{
    uint64_t size = 0;
    EACH_BLOCK(t, b)
    if (w->blocks[t][b].held && (!tenant || t == tenant))
        size += w->blocks[t][b].size;
    return size;
}

/* The oldest of each kind, of these the one of least value. */
static bool twin_least(const struct twin *w, uint32_t tenant, struct place *out)
{
    struct place oldest[LEARN_KINDS] = {{0, 0}};
    EACH_BLOCK(t, b)
    {
        struct place *o = &oldest[w->blocks[t][b].kind];
        if ((!tenant || t == tenant) && twin_may_go(w, t, b) &&
            (!o->tenant || w->blocks[t][b].order < w->blocks[o->tenant][o->number].order))
            *o = (struct place){t, b};
    }
    const struct twin_block *least = NULL;
    for (int k = 0; k < LEARN_KINDS; k++) {
        if (!oldest[k].tenant)
            continue;
        const struct twin_block *x = &w->blocks[oldest[k].tenant][oldest[k].number];
        if (!least || twin_value(w, x) < twin_value(w, least) ||
            (twin_value(w, x) == twin_value(w, least) && x->order < least->order)) {
            least = x;
            *out = oldest[k];
        }
    }
    return least != NULL;
}

static void twin_forget(struct twin *w, uint32_t t, uint32_t b)
{
    w->blocks[t][b].held = w->blocks[t][b].pinned = w->blocks[t][b].named = false;
}

static bool twin_is_expired(const struct twin *w, uint32_t t, uint32_t b)
{
    return w->ttl[t] && twin_may_go(w, t, b) && w->now_ms - w->blocks[t][b].used_ms >= w->ttl[t];
}

/* What policy_room must answer to a block that is not held, given which expired block it chose, if any. */
static int twin_room(struct twin *w, uint32_t t, uint32_t b, uint32_t parent, uint32_t size,
                     struct place *victim)
{
    struct twin_block fresh = {.known = true, .size = size, .cost_s = 1};
    const struct twin_block *known = &w->blocks[t][b];
    if (size > w->limit || (parent && !w->blocks[t][parent].held))
        return -TD_ERR_NOSPACE;
    bool over = w->quota[t] && twin_size(w, t) + size > w->quota[t];
    if (!over && twin_size(w, 0) + size <= w->limit)
        return 0;
    fresh.kind = known->known ? known->kind : learn_kind(false, twin_generation(w, t, parent), false);
    fresh.stage = known->known ? known->stage : 0;
    if (!twin_least(w, over ? t : 0, victim) || (victim->tenant == t && victim->number == parent) ||
        !(twin_value(w, &w->blocks[victim->tenant][victim->number]) < twin_value(w, &fresh)))
        return -TD_ERR_NOSPACE;
    return 1;
}

/* Of each tenant that allows it the oldest lossless block of each kind, leaf or not, of these the one of least value; then of the tenants. A kind of
 * which the oldest has expired is left out here, so the test looks only at tenants whose blocks do not expire. */
static bool twin_demote(struct twin *w, uint32_t tenant, struct place *out)
{
    struct place oldest[TWIN_TENANTS + 1][LEARN_KINDS] = {{{0, 0}}};
    EACH_BLOCK(t, b)
    {
        const struct twin_block *x = &w->blocks[t][b];
        struct place *o = &oldest[t][x->kind];
        if (w->demotes[t] && (!tenant || t == tenant) && x->held && x->lossless && !x->pinned && !x->named &&
            (!o->tenant || x->order < w->blocks[t][o->number].order))
            *o = (struct place){t, b};
    }
    struct twin_block *least = NULL;
    for (uint32_t t = 1; t <= TWIN_TENANTS; t++) {
        struct twin_block *own = NULL;
        for (int k = 0; k < LEARN_KINDS; k++) {
            struct twin_block *x = oldest[t][k].tenant ? &w->blocks[t][oldest[t][k].number] : NULL;
            if (x && (!own || twin_value(w, x) < twin_value(w, own) ||
                      (twin_value(w, x) == twin_value(w, own) && x->order < own->order)))
                own = x;
        }
        if (own && (!least || twin_value(w, own) < twin_value(w, least))) {
            least = own;
            *out = (struct place){t, (uint32_t)(own - w->blocks[t])};
        }
    }
    return least != NULL;
}

static void twin_insert(struct twin *w, uint32_t t, uint32_t b, uint32_t parent, uint32_t size)
{
    struct twin_block *x = &w->blocks[t][b];
    if (!x->known) {
        *x = (struct twin_block){.known = true,
                                 .uses = 1,
                                 .request = w->request,
                                 .generation = twin_generation(w, t, parent),
                                 .used_ms = w->now_ms,
                                 .order = ++w->order};
        x->kind = learn_kind(false, x->generation, false);
        learn_enter(&w->learn, x->kind, 0);
    }
    x->held = true;
    x->named = false;
    x->lossless = size > 1;
    x->parent = parent;
    x->size = size;
    x->cost_s = 1;
}

/* ---- random operations ------------------------------------------------------------------------------------ */

static uint64_t random_state;
static uint32_t random_below(uint32_t n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % n;
}

/* A tree of 511 blocks: the parent of b is b / 3. */
static size_t chain_to(uint32_t b, uint32_t chain[16], struct kv_block_id ids[16])
{
    size_t count = 0;
    for (uint32_t at = b; at; at /= 3)
        count++;
    for (size_t i = count; i-- > 0; b /= 3) {
        chain[i] = b;
        ids[i] = id_of(b);
    }
    return count;
}

static uint64_t tenant_size(const struct policy *p, uint32_t tenant)
{
    const struct policy_tenant *t = p->tenants ? p->tenants[tenant < POLICY_TENANTS_MAX ? tenant : 0] : NULL;
    return t ? t->size : 0;
}

static void compare(const struct policy *p, const struct twin *w)
{
    struct policy_stats stats;
    uint64_t blocks = 0, pinned = 0;
    EACH_BLOCK(t, b)
    {
        struct kv_block_id id = id_of(b);
        assert_int_equal(policy_holds(p, t, &id), w->blocks[t][b].held);
        blocks += w->blocks[t][b].held;
        pinned += w->blocks[t][b].held && w->blocks[t][b].pinned;
    }
    policy_stats(p, &stats);
    assert_int_equal(stats.blocks, blocks);
    assert_int_equal(stats.pinned, pinned);
    assert_int_equal(stats.size, twin_size(w, 0));
    for (uint32_t t = 1; t <= TWIN_TENANTS; t++)
        assert_int_equal(tenant_size(p, t), twin_size(w, t));
    for (uint32_t i = 1; i < p->entries_made; i++) {
        const struct policy_entry *e = entry_at(p, i);
        assert_true(!e->held || e->uses == w->blocks[e->tenant][load_le32(e->id.bytes)].uses);
    }
}

static void take_in(struct policy *p, struct twin *w, uint32_t t, uint32_t b, uint32_t size)
{
    struct policy_block block = block_of(t, b, b / 3, size);
    struct policy_victim victim;
    struct policy_stats before, after;
    struct place expected = {0, 0};
    int rc, wanted;
    block.lossless = size > 1;
    if (w->blocks[t][b].held)
        return;
    do {
        policy_stats(p, &before);
        rc = policy_room(p, &block, w->now_ms, &victim);
        policy_stats(p, &after);
        if (rc == 1 && after.expired > before.expired) { /* which of them is free */
            uint32_t gone = load_le32(victim.id.bytes);
            assert_true(twin_is_expired(w, victim.tenant, gone));
            twin_forget(w, victim.tenant, gone);
            continue;
        }
        wanted = twin_room(w, t, b, b / 3, size, &expected);
        assert_int_equal(rc, wanted);
        if (rc == 1) {
            assert_int_equal(victim.tenant, expected.tenant);
            assert_int_equal(load_le32(victim.id.bytes), expected.number);
            assert_int_equal(victim.size, w->blocks[expected.tenant][expected.number].size);
            twin_forget(w, expected.tenant, expected.number);
        }
    } while (rc == 1);
    if (rc == 0) {
        assert_int_equal(policy_insert(p, &block, w->now_ms), 0);
        twin_insert(w, t, b, b / 3, size);
    }
}

/* How it ended for the one that was named last: it is small, or stays as it was, as when its re-encoding fails. */
static void end_demotion(struct policy *p, struct twin *w, struct place *named)
{
    struct twin_block *x = &w->blocks[named->tenant][named->number];
    if (named->tenant && x->named) {
        struct policy_block b =
            block_of(named->tenant, named->number, x->parent, random_below(4) ? 1 : x->size);
        assert_int_equal(policy_insert(p, &b, w->now_ms), 0);
        x->size = b.size;
        x->named = false;
    }
    named->tenant = 0;
}

static void demote(struct policy *p, struct twin *w, uint32_t tenant, struct place *named)
{
    struct policy_victim victim;
    struct place expected = {0, 0};
    end_demotion(p, w, named);
    bool wanted = twin_demote(w, tenant, &expected);
    assert_int_equal(policy_demote(p, tenant, w->now_ms, &victim), wanted);
    if (!wanted)
        return;
    assert_int_equal(victim.tenant, expected.tenant);
    assert_int_equal(load_le32(victim.id.bytes), expected.number);
    w->blocks[expected.tenant][expected.number].lossless = false;
    w->blocks[expected.tenant][expected.number].named = true;
    *named = expected;
}

static void test_like_the_twin(void **state)
{
    (void)state;
    static struct twin w;
    struct policy *p;
    uint32_t chain[16];
    struct kv_block_id ids[16];
    struct place named = {0, 0};
    random_state = 7;
    w = (struct twin){.limit = 300, .quota = {0, 0, 90, 0}, .ttl = {0, 0, 0, 400000}};
    learn_init(&w.learn);
    assert_int_equal(policy_create(&(struct policy_config){.limit_size = 300}, &p), 0);
    assert_int_equal(policy_set_tenant(p, 2, 90, 0), 0);
    assert_int_equal(policy_set_tenant(p, 3, 0, 400000), 0);
    assert_int_equal(policy_set_demotion(p, 1, true), 0);
    w.demotes[1] = true;
    for (int step = 0; step < 3000; step++) {
        uint32_t t = 1 + random_below(TWIN_TENANTS), b = 1 + random_below(TWIN_BLOCKS - 1);
        b = random_below(3) ? 1 + b % 60 : b; /* some are used often */
        size_t count = chain_to(b, chain, ids);
        uint64_t now = w.now_ms + (random_below(20) ? random_below(3000) : random_below(200000));
        if (random_below(10) == 0) {
            bool pinned = random_below(2);
            assert_int_equal(policy_pin(p, t, &ids[count - 1], pinned),
                             w.blocks[t][b].held ? 0 : -TD_ERR_NOTFOUND);
            w.blocks[t][b].pinned = w.blocks[t][b].held && pinned;
        }
        if (step % 500 == 250) { /* the setting may change while blocks are held */
            w.demotes[2] = !w.demotes[2];
            assert_int_equal(policy_set_demotion(p, 2, w.demotes[2]), 0);
        }
        if (random_below(3) == 0)
            demote(p, &w, random_below(3), &named);
        if (random_below(12) == 0) {
            policy_forget(p, t, &ids[count - 1]);
            twin_forget(&w, t, b);
        }
        assert_int_equal(policy_touch(p, t, ids, count, now), twin_touch(&w, t, chain, count, now));
        for (size_t i = 0; i < count; i++)
            take_in(p, &w, t, chain[i], 1 + chain[i] % 3);
        if (step % 50 == 0)
            compare(p, &w);
    }
    compare(p, &w);
    policy_destroy(p);
}

/* ---- promises --------------------------------------------------------------------------------------------- */

struct rig {
    struct policy *p;
    uint64_t now_ms;
};

static void rig_init(struct rig *r, uint64_t limit, uint32_t blocks_max)
{
    *r = (struct rig){.now_ms = 1000};
    assert_int_equal(policy_create(&(struct policy_config){limit, blocks_max}, &r->p), 0);
}

/* A request for blocks first .. first + count - 1, each the parent of the next, and all of them taken in as far as that goes. Returns hits. */
static size_t request(struct rig *r, uint32_t tenant, uint32_t first, uint32_t count)
{
    struct kv_block_id ids[64] = {{{0}}};
    struct policy_victim victim;
    for (uint32_t i = 0; i < count; i++)
        ids[i] = id_of(first + i);
    size_t hits = policy_touch(r->p, tenant, ids, count, r->now_ms);
    for (uint32_t i = 0; i < count; i++) {
        struct policy_block b = block_of(tenant, first + i, i ? first + i - 1 : 0, 1);
        int rc;
        while ((rc = policy_room(r->p, &b, r->now_ms, &victim)) == 1)
            ;
        if (rc < 0)
            break;
        assert_int_equal(policy_insert(r->p, &b, r->now_ms), 0);
    }
    return hits;
}

static bool holds(const struct rig *r, uint32_t tenant, uint32_t number)
{
    struct kv_block_id id = id_of(number);
    return policy_holds(r->p, tenant, &id);
}

static void test_hits_are_the_leading_run(void **state)
{
    (void)state;
    struct rig r;
    struct kv_block_id second = id_of(2);
    struct policy_stats stats;
    rig_init(&r, 100, 0);
    assert_int_equal(request(&r, 1, 1, 5), 0);
    assert_int_equal(request(&r, 1, 1, 5), 5);
    assert_int_equal(request(&r, 2, 1, 5), 0); /* another tenant's ids are other blocks */
    policy_forget(r.p, 1, &second);
    struct kv_block_id ids[5] = {id_of(1), id_of(2), id_of(3), id_of(4), id_of(5)};
    assert_int_equal(policy_touch(r.p, 1, ids, 5, r.now_ms),
                     1); /* 3, 4, 5 are held and count for nothing … */
    struct policy_block back = block_of(1, 2, 1, 1);
    assert_int_equal(policy_insert(r.p, &back, r.now_ms), 0);
    assert_int_equal(policy_touch(r.p, 1, ids, 5, r.now_ms), 5); /* … until 2 is back */
    policy_stats(r.p, &stats);
    assert_int_equal(stats.touched, 25);
    assert_int_equal(stats.hits, 11);
    policy_destroy(r.p);
}

static void test_leaves_go_first_and_runs_stay_whole(void **state)
{
    (void)state;
    struct rig r;
    struct policy_victim victim;
    rig_init(&r, 100, 0);
    request(&r, 1, 1, 6);
    policy_set_limit(r.p, 2);
    for (uint32_t deepest = 6; deepest > 2; deepest--) {
        assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), 1);
        assert_int_equal(load_le32(victim.id.bytes), deepest);
    }
    assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), 0);
    policy_destroy(r.p);
}

static void test_what_is_not_worth_more_moves_nothing(void **state)
{
    (void)state;
    struct rig r;
    struct policy_stats stats;
    struct policy_victim victim;
    rig_init(&r, 4, 0);
    request(&r, 1, 1, 4);
    request(&r, 1, 11, 1); /* same kind, same age */
    policy_stats(r.p, &stats);
    assert_int_equal(stats.evicted, 0);
    assert_int_equal(stats.refused, 1);
    struct policy_block dear = block_of(1, 12, 0, 1), orphan = block_of(1, 22, 21, 1),
                        large = block_of(1, 13, 0, 5);
    dear.cost_s = 1000; /* worth more because it is dear to compute … */
    assert_int_equal(policy_room(r.p, &dear, r.now_ms, &victim), 1);
    assert_int_equal(load_le32(victim.id.bytes), 4);
    assert_int_equal(policy_room(r.p, &dear, r.now_ms, &victim), 0);
    large.cost_s = 1000; /* … but not when it is larger than all that there is */
    assert_int_equal(policy_room(r.p, &large, r.now_ms, &victim), -TD_ERR_NOSPACE);
    orphan.cost_s = 1000; /* … or when its parent is not held */
    assert_int_equal(policy_room(r.p, &orphan, r.now_ms, &victim), -TD_ERR_NOSPACE);
    policy_destroy(r.p);
}

static void test_room_is_not_made_by_the_parent(void **state)
{
    (void)state;
    struct rig r;
    struct policy_victim victim;
    rig_init(&r, 1, 0);
    request(&r, 1, 1, 1);
    struct policy_block child = block_of(1, 2, 1, 1);
    child.cost_s = 1000;
    assert_int_equal(policy_room(r.p, &child, r.now_ms, &victim), -TD_ERR_NOSPACE);
    assert_true(holds(&r, 1, 1));
    policy_destroy(r.p);
}

static void test_pins(void **state)
{
    (void)state;
    struct rig r;
    struct policy_victim victim;
    struct kv_block_id second = id_of(2), unknown = id_of(9);
    rig_init(&r, 100, 0);
    policy_set_tenant(r.p, 1, 0, 1000);
    request(&r, 1, 1, 3);
    assert_int_equal(policy_pin(r.p, 1, &second, true), 0);
    assert_int_equal(policy_pin(r.p, 1, &unknown, true), -TD_ERR_NOTFOUND);
    policy_set_limit(r.p, 0);
    r.now_ms += 5000; /* past the TTL, too */
    assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), 1);
    assert_int_equal(load_le32(victim.id.bytes), 3);
    assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), -TD_ERR_NOSPACE); /* 1 is 2's parent */
    assert_int_equal(policy_pin(r.p, 1, &second, false), 0);
    assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), 1);
    assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), 1);
    assert_int_equal(load_le32(victim.id.bytes), 1);
    policy_destroy(r.p);
}

static void test_quota(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r, 100, 0);
    assert_int_equal(policy_set_tenant(r.p, 1, 4, 0), 0);
    assert_int_equal(policy_set_tenant(r.p, 0, 4, 0), -TD_ERR_LIMIT);
    assert_int_equal(policy_set_tenant(r.p, POLICY_TENANTS_MAX, 4, 0), -TD_ERR_LIMIT);
    request(&r, 2, 1, 10);
    request(&r, 1, 1, 4);
    r.now_ms += 10000; /* now the newer ones are worth more than those four */
    request(&r, 1, 11, 4);
    assert_int_equal(tenant_size(r.p, 1), 4);
    assert_int_equal(tenant_size(r.p, 2), 10);
    assert_true(holds(&r, 1, 14));
    assert_false(holds(&r, 1, 1));
    request(&r, POLICY_TENANTS_MAX + 5, 1, 6); /* no account of its own, and no harm */
    assert_int_equal(tenant_size(r.p, POLICY_TENANTS_MAX + 9), 6);
    policy_destroy(r.p);
}

static void test_lower_quota_takes_from_its_tenant_only(void **state)
{
    (void)state;
    struct rig r;
    struct policy_victim victim;
    rig_init(&r, 100, 0);
    request(&r, 2, 1, 3);
    request(&r, 1, 1, 3);
    policy_set_tenant(r.p, 1, 1, 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), 1);
        assert_int_equal(victim.tenant, 1);
    }
    assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), 0);
    policy_destroy(r.p);
}

static void test_ttl(void **state)
{
    (void)state;
    struct rig r;
    struct policy_victim victim;
    struct policy_stats stats;
    rig_init(&r, 100, 0);
    policy_set_tenant(r.p, 1, 0, 60000);
    request(&r, 1, 1, 2);
    request(&r, 2, 1, 2);
    r.now_ms += 59999;
    assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), 0);
    r.now_ms++;
    for (uint32_t deepest = 2; deepest > 0; deepest--) {
        assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), 1);
        assert_int_equal(victim.tenant, 1);
        assert_int_equal(load_le32(victim.id.bytes), deepest);
    }
    assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), 0);
    policy_stats(r.p, &stats);
    assert_int_equal(stats.expired, 2);
    policy_destroy(r.p);
}

/* Of tenant 1's block 1, which is held. */
static uint32_t uses_of_first(const struct policy *p)
{
    for (uint32_t i = 1; i < p->entries_made; i++) {
        const struct policy_entry *e = entry_at(p, i);
        if (e->held && e->tenant == 1 && load_le32(e->id.bytes) == 1)
            return e->uses;
    }
    return 0;
}

static void test_ghosts_remember_uses_and_are_bounded(void **state)
{
    (void)state;
    struct rig r;
    struct policy_victim victim;
    struct policy_stats stats;
    rig_init(&r, 2, 2);
    request(&r, 1, 1, 1);
    request(&r, 1, 1, 1);
    policy_stats(r.p, &stats);
    assert_true(stats.memory_size <
                (4096 + 100) * (uint64_t)POLICY_ENTRY_SIZE_MAX + 100000); /* grows with what it knows */
    assert_int_equal(uses_of_first(r.p), 2);
    policy_set_limit(r.p, 0);
    assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), 1);
    policy_set_limit(r.p, 2);
    request(&r, 1, 1, 1);
    assert_int_equal(uses_of_first(r.p), 3);
    policy_set_limit(r.p, 0);
    assert_int_equal(policy_room(r.p, NULL, r.now_ms, &victim), 1);
    for (uint32_t i = 0; i < POLICY_GHOSTS_MIN + 5000; i++) {
        r.now_ms += 10;
        request(&r, 1, 1000 + i, 1);
    }
    policy_stats(r.p, &stats);
    assert_int_equal(stats.ghosts, POLICY_GHOSTS_MIN);
    assert_true(stats.memory_size <= (2 * 2 + POLICY_GHOSTS_MIN + 4096) * (uint64_t)POLICY_ENTRY_SIZE_MAX);
    policy_set_limit(r.p, 2);
    request(&r, 1, 1, 1); /* forgotten meanwhile */
    assert_int_equal(uses_of_first(r.p), 1);
    policy_destroy(r.p);
}

/* Blocks of a kind that is never used again lose to blocks of a kind that is, though they are newer. */
static void test_learns_what_comes_back(void **state)
{
    (void)state;
    struct rig r;
    uint32_t one_shot = 100000;
    rig_init(&r, 40, 0);
    for (int round = 0; round < 400; round++) {
        r.now_ms += 2000;
        request(&r, 1, 1 + 10 * ((uint32_t)round % 3), 10); /* three chains, again and again */
        request(&r, 1, one_shot += 50, 30);                 /* documents that are read once */
    }
    for (uint32_t chain = 0; chain < 3; chain++)
        assert_true(request(&r, 1, 1 + 10 * chain, 10) >= 9);
    policy_destroy(r.p);
}

static void test_recovery_in_any_order(void **state)
{
    (void)state;
    struct rig r;
    struct policy_victim victim;
    rig_init(&r, 100, 3);
    for (uint32_t b = 3; b > 0; b--) { /* children before parents */
        struct policy_block block = block_of(1, b, b - 1, 1);
        assert_int_equal(policy_insert(r.p, &block, 100), 0);
    }
    struct policy_block fourth = block_of(1, 4, 3, 1);
    assert_int_equal(policy_insert(r.p, &fourth, 100), -TD_ERR_FULL);
    struct kv_block_id ids[4] = {id_of(1), id_of(2), id_of(3), id_of(3)};
    assert_int_equal(policy_touch(r.p, 1, ids, 4, 200), 3); /* the fourth is no chain's: passed over */
    policy_set_limit(r.p, 2);
    assert_int_equal(policy_room(r.p, NULL, 200, &victim), 1);
    assert_int_equal(load_le32(victim.id.bytes), 3);
    policy_destroy(r.p);
}

static void test_blocks_are_limited_like_bytes(void **state)
{
    (void)state;
    struct rig r;
    struct policy_victim victim;
    rig_init(&r, 100, 2);
    request(&r, 1, 1, 2);
    struct policy_block dear = block_of(1, 12, 0, 1);
    dear.cost_s = 1000;
    assert_int_equal(policy_room(r.p, &dear, r.now_ms, &victim), 1);
    assert_int_equal(policy_room(r.p, &dear, r.now_ms, &victim), 0);
    assert_int_equal(policy_insert(r.p, &dear, r.now_ms), 0);
    policy_destroy(r.p);
}

static void test_parent_does_not_expire_under_its_child(void **state)
{
    (void)state;
    struct rig r;
    struct policy_victim victim;
    rig_init(&r, 100, 0);
    policy_set_tenant(r.p, 1, 0, 1000);
    request(&r, 1, 1, 1);
    r.now_ms += 5000;
    struct policy_block child = block_of(1, 2, 1, 1);
    for (int turn = 0; turn < 2; turn++) /* one tenant's TTL is looked at in each call */
        assert_int_equal(policy_room(r.p, &child, r.now_ms, &victim), 0);
    assert_true(holds(&r, 1, 1));
    policy_destroy(r.p);
}

static void test_size_of_a_held_block_changes(void **state)
{
    (void)state;
    struct rig r;
    struct policy_stats stats;
    rig_init(&r, 100, 0);
    request(&r, 1, 1, 2);
    struct policy_block better = block_of(1, 1, 0, 7);
    assert_int_equal(policy_insert(r.p, &better, r.now_ms), 0);
    policy_stats(r.p, &stats);
    assert_int_equal(stats.size, 8);
    assert_int_equal(tenant_size(r.p, 1), 8);
    assert_int_equal(stats.blocks, 2);
    policy_destroy(r.p);
}

static void test_demotion_is_the_tenants_choice(void **state)
{
    (void)state;
    struct rig r;
    struct policy_victim victim;
    struct kv_block_id second = id_of(2);
    rig_init(&r, 100, 0);
    policy_set_tenant(r.p, 1, 0, 60000);
    for (uint32_t i = 1; i <= 3; i++) {
        struct policy_block b = block_of(1, i, i - 1, 4);
        b.lossless = i != 3;
        assert_int_equal(policy_insert(r.p, &b, r.now_ms), 0);
    }
    assert_int_equal(policy_demote(r.p, 0, r.now_ms, &victim), 0); /* nobody has said so */
    assert_int_equal(policy_set_demotion(r.p, 0, true), -TD_ERR_LIMIT);
    assert_int_equal(policy_set_demotion(r.p, POLICY_TENANTS_MAX, true), -TD_ERR_LIMIT);
    assert_int_equal(policy_set_demotion(r.p, 1, true), 0);
    assert_int_equal(policy_pin(r.p, 1, &second, true), 0);
    assert_int_equal(policy_demote(r.p, 2, r.now_ms, &victim), 0);         /* another tenant's */
    assert_int_equal(policy_demote(r.p, 0, r.now_ms + 60000, &victim), 0); /* expired: it goes as it is */
    assert_int_equal(policy_set_tenant(r.p, 1, 0, 0), 0);
    assert_int_equal(policy_demote(r.p, 0, r.now_ms, &victim), 1);
    assert_int_equal(load_le32(victim.id.bytes), 1); /* not 2, which is pinned, nor 3, which is lossy */
    assert_int_equal(policy_demote(r.p, 0, r.now_ms, &victim), 0); /* once */
    assert_true(holds(&r, 1, 1));
    assert_int_equal(policy_pin(r.p, 1, &second, false), 0);
    assert_int_equal(policy_demote(r.p, 1, r.now_ms, &victim), 1);
    assert_int_equal(load_le32(victim.id.bytes), 2);
    struct policy_block again = block_of(1, 1, 0, 4);
    again.lossless = true; /* a better copy has come */
    assert_int_equal(policy_insert(r.p, &again, r.now_ms), 0);
    assert_int_equal(policy_demote(r.p, 1, r.now_ms, &victim), 1);
    assert_int_equal(load_le32(victim.id.bytes), 1);
    policy_destroy(r.p);
}

/* All counts, of the kinds and of all together, weigh half as much after so many blocks. */
static void test_old_habits_are_forgotten(void **state)
{
    (void)state;
    static struct learn l;
    learn_init(&l);
    for (uint32_t i = 0; i < LEARN_HALVE_BLOCKS; i++) {
        assert_true(l.cells[3][0].entered == i);
        learn_enter(&l, 3, 0);
        if (i % 2)
            learn_use(&l, 3, 0);
        if (i % 4 == 0 && i + 4 < LEARN_HALVE_BLOCKS)
            learn_enter(&l, 5, 7); /* an older stage is not a block more */
    }
    assert_true(l.cells[3][0].entered == LEARN_HALVE_BLOCKS / 2.0);
    assert_true(l.pool[0].entered == LEARN_HALVE_BLOCKS / 2.0);
    assert_true(l.cells[3][0].used == (LEARN_HALVE_BLOCKS / 2.0 - 1) / 2 + 1);
    assert_true(l.cells[5][7].entered == (LEARN_HALVE_BLOCKS / 4.0 - 1) / 2);
    assert_true(l.pool[7].entered == l.cells[5][7].entered);
    learn_enter(&l, 3, 0);
    assert_true(l.cells[3][0].entered == LEARN_HALVE_BLOCKS / 2.0 + 1); /* not again at once */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_like_the_twin),
        cmocka_unit_test(test_hits_are_the_leading_run),
        cmocka_unit_test(test_leaves_go_first_and_runs_stay_whole),
        cmocka_unit_test(test_what_is_not_worth_more_moves_nothing),
        cmocka_unit_test(test_room_is_not_made_by_the_parent),
        cmocka_unit_test(test_pins),
        cmocka_unit_test(test_quota),
        cmocka_unit_test(test_lower_quota_takes_from_its_tenant_only),
        cmocka_unit_test(test_ttl),
        cmocka_unit_test(test_ghosts_remember_uses_and_are_bounded),
        cmocka_unit_test(test_learns_what_comes_back),
        cmocka_unit_test(test_old_habits_are_forgotten),
        cmocka_unit_test(test_recovery_in_any_order),
        cmocka_unit_test(test_blocks_are_limited_like_bytes),
        cmocka_unit_test(test_parent_does_not_expire_under_its_child),
        cmocka_unit_test(test_size_of_a_held_block_changes),
        cmocka_unit_test(test_demotion_is_the_tenants_choice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
