/* plan: see plan.h. */
#include "protocol/plan.h"
#include "shared/base.h"
#include <string.h>

const struct plan_range *plan_at(const struct plan_range *ranges, uint32_t count, uint32_t token)
{
    for (uint32_t i = 0; i < count; i++)
        if (token >= ranges[i].first_token && token < plan_range_end(&ranges[i]))
            return &ranges[i];
    return NULL;
}

struct list {
    struct plan_range *ranges;
    uint32_t count;
    bool overflow;
};

/* The part of r within [begin, end), joined to what is there if it goes on from it. */
static void append(struct list *l, const struct plan_range *r, uint32_t begin, uint32_t end)
{
    begin = TD_MAX(begin, r->first_token);
    end = TD_MIN(end, plan_range_end(r));
    if (begin >= end)
        return;
    struct plan_range *last = l->count ? &l->ranges[l->count - 1] : NULL;
    if (last && plan_range_end(last) == begin && plan_range_alike(last, r)) {
        last->count += end - begin;
        return;
    }
    if (l->count == LIMIT_RANGES) {
        l->overflow = true;
        return;
    }
    l->ranges[l->count] = *r;
    l->ranges[l->count].first_token = begin;
    l->ranges[l->count++].count = end - begin;
}

uint32_t plan_merge(const struct plan_range *before, uint32_t before_count, const struct plan_range *after,
                    uint32_t after_count, uint32_t token, struct plan_range *out)
{
    struct list l = {.ranges = out};
    for (uint32_t i = 0; i < before_count; i++)
        append(&l, &before[i], 0, token);
    for (uint32_t i = 0; i < after_count; i++)
        append(&l, &after[i], l.count ? plan_range_end(&out[l.count - 1]) : 0, UINT32_MAX);
    return l.overflow ? 0 : l.count;
}

uint32_t plan_without_kv(struct plan_range *ranges, uint32_t count, uint32_t begin, uint32_t end)
{
    struct plan_range out[LIMIT_RANGES] = {0};
    struct list l = {.ranges = out};
    for (uint32_t i = 0; i < count; i++) {
        struct plan_range bare = ranges[i];
        bare.codec = PLAN_CODEC_NONE;
        append(&l, &ranges[i], 0, begin);
        append(&l, bare.layers ? &bare : &ranges[i], TD_MIN(begin, end), end);
        append(&l, &ranges[i], TD_MAX(begin, end), UINT32_MAX);
    }
    if (l.overflow)
        return count;
    memcpy(ranges, out, l.count * sizeof *out);
    return l.count;
}
