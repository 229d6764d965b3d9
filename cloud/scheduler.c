/* scheduler: see scheduler.h. */
#include "cloud/scheduler.h"

static void grant_decode(struct scheduler_item *items, size_t count, struct scheduler_budget *budget)
{
    for (size_t i = 0; i < count; i++) {
        items[i].granted = 0;
        if (!items[i].decode || items[i].rows == 0 || budget->rows == 0 || budget->sequences == 0)
            continue;
        items[i].granted = 1;
        budget->rows--;
        budget->sequences--;
    }
}

static void grant_prefill(struct scheduler_item *item, uint32_t rows_max, struct scheduler_budget *budget)
{
    uint32_t rows =
        TD_MIN(TD_MIN(item->rows - item->granted, rows_max), TD_MIN(budget->rows, budget->prefill_rows));
    budget->sequences -= item->granted == 0 && rows > 0;
    budget->rows -= rows;
    budget->prefill_rows -= rows;
    item->granted += rows;
}

static bool wants(const struct scheduler_item *item, const struct scheduler_budget *budget)
{
    return !item->decode && item->rows > item->granted && (item->granted > 0 || budget->sequences > 0);
}

static struct scheduler_item *least_left(struct scheduler_item *items, size_t count,
                                         const struct scheduler_budget *budget)
{
    struct scheduler_item *best = NULL;
    for (size_t i = 0; i < count; i++)
        if (wants(&items[i], budget) && (!best || items[i].left < best->left))
            best = &items[i];
    return best;
}

void scheduler_pick(struct scheduler_item *items, size_t count, struct scheduler_budget budget)
{
    grant_decode(items, count, &budget);
    struct scheduler_item *next = NULL;
    for (size_t i = 0; i < count && !next; i++)
        next = wants(&items[i], &budget) ? &items[i] : NULL;
    if (next)
        grant_prefill(next, TD_MAX(budget.prefill_rows / SCHEDULER_OLDEST_SHARE, SCHEDULER_TURN_ROWS),
                      &budget);
    while (budget.rows > 0 && budget.prefill_rows > 0 && (next = least_left(items, count, &budget)))
        grant_prefill(next, UINT32_MAX, &budget);
}

uint32_t scheduler_prefill_rows(uint32_t budget_rows, uint32_t decode_rows, uint64_t prefill_rows_per_s,
                                uint64_t step_us)
{
    uint32_t left = budget_rows - TD_MIN(decode_rows, budget_rows);
    if (step_us == 0 || prefill_rows_per_s == 0)
        return left;
    uint64_t rows = TD_MIN(prefill_rows_per_s, UINT32_MAX) * step_us / 1000000;
    return (uint32_t)TD_MIN((uint64_t)left, TD_MAX(rows, (uint64_t)SCHEDULER_TURN_ROWS));
}
