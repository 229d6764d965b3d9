/* policy_demote: which block is stored at a lossy level, before any is evicted. See policy.h.
 *
 * Not only leaves: a block that is demoted stays, so what is behind it does not matter. Were it only the least valuable leaf, that would be the
 * least valuable one again soon after and go, and of a cold chain one block at a time would be small: up to 2.6 % fewer hits on traces (tests/bench/RESULTS.md). */
#include "shared/status.h"
#include "store/policy_internal.h"

/* What has expired goes as it is. */
static void leave_out_expired(const struct policy *p, const struct policy_tenant *t,
                              struct policy_heads *heads)
{
    for (int k = 0; t->ttl_ms && k < LEARN_KINDS; k++)
        if (heads->root[k] && p->now_ms - entry_at(p, heads->root[k])->used_ms >= t->ttl_ms)
            heads->root[k] = 0;
}

static uint32_t candidate_of(const struct policy *p, const struct policy_tenant *t)
{
    struct policy_heads leaves = t->sets[SET_LEAVES_LOSSLESS], inner = t->sets[SET_INNER];
    leave_out_expired(p, t, &leaves);
    leave_out_expired(p, t, &inner);
    return policy_least_valuable(p, &leaves, &inner);
}

int policy_demote(struct policy *p, uint32_t tenant, uint64_t now_ms, struct policy_victim *out)
{
    uint32_t least = 0;
    policy_advance(p, now_ms);
    for (uint32_t i = 1; i < p->tenants_top && p->demoting_tenants; i++) {
        const struct policy_tenant *t = p->tenants[i];
        if (!t || !t->demotes || (tenant && tenant != i))
            continue;
        uint32_t index = candidate_of(p, t);
        if (index && (!least || policy_value(p, index) < policy_value(p, least)))
            least = index;
    }
    if (!least)
        return 0;
    struct policy_entry *e = entry_at(p, least);
    *out = (struct policy_victim){.id = e->id, .tenant = e->tenant, .size = e->size};
    policy_unqueue(p, least);
    e->lossless = false;
    e->named = true;
    return 1;
}

uint64_t policy_near_quota(const struct policy *p, uint32_t *tenant)
{
    for (uint32_t i = *tenant + 1; i < p->tenants_top && p->demoting_tenants; i++) {
        const struct policy_tenant *t = p->tenants[i];
        uint64_t near = t ? t->quota_size - t->quota_size / POLICY_QUOTA_SPARE : 0;
        if (!t || !t->demotes || !t->quota_size || t->size <= near)
            continue;
        *tenant = i;
        return t->size - near;
    }
    return 0;
}

/* What the tenant's setting decides about its entries: in which heaps they are. */
static void requeue(struct policy *p, uint32_t tenant, void (*move)(struct policy *p, uint32_t index))
{
    for (uint32_t i = 1; i < p->entries_made; i++)
        if (entry_at(p, i)->held && entry_at(p, i)->tenant == tenant)
            move(p, i);
}

int policy_set_demotion(struct policy *p, uint32_t tenant, bool allowed)
{
    if (tenant == 0 || tenant >= POLICY_TENANTS_MAX)
        return -TD_ERR_LIMIT;
    struct policy_tenant *t = policy_tenant_make(p, tenant);
    if (!t)
        return -TD_ERR_NOMEM;
    if (t->demotes == allowed)
        return 0;
    if (t->size) /* it may be one of very many that are met for the first time */
        requeue(p, tenant, policy_unqueue);
    t->demotes = allowed;
    p->demoting_tenants += allowed ? 1 : UINT32_MAX;
    if (t->size)
        requeue(p, tenant, policy_queue);
    return 0;
}
