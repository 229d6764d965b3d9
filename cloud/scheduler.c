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

static size_t first_after(const struct scheduler_item *items, size_t count, uint64_t arrival)
{
    for (size_t i = 0; i < count; i++)
        if (items[i].arrival > arrival)
            return i;
    return 0;
}

/* One turn for one item: how many rows it got. */
static uint32_t grant_turn(struct scheduler_item *item, struct scheduler_budget *budget)
{
    uint32_t left = item->rows - item->granted;
    if (item->decode || left == 0 || (item->granted == 0 && budget->sequences == 0))
        return 0;
    uint32_t rows = TD_MIN(TD_MIN(left, SCHEDULER_TURN_ROWS), TD_MIN(budget->rows, budget->prefill_rows));
    budget->sequences -= item->granted == 0 && rows > 0;
    budget->rows -= rows;
    budget->prefill_rows -= rows;
    item->granted += rows;
    return rows;
}

uint64_t scheduler_pick(struct scheduler_item *items, size_t count, struct scheduler_budget budget,
                        uint64_t last_served)
{
    grant_decode(items, count, &budget);
    size_t start = first_after(items, count, last_served);
    for (uint32_t round = 1; round > 0;) { /* until a whole round grants nothing */
        round = 0;
        for (size_t i = 0; i < count; i++) {
            struct scheduler_item *item = &items[(start + i) % count];
            uint32_t rows = grant_turn(item, &budget);
            if (rows > 0)
                last_served = item->arrival;
            round += rows;
        }
    }
    return last_served;
}

uint32_t scheduler_prefill_rows(uint32_t budget_rows, uint32_t decode_rows, uint64_t prefill_rows_per_s,
                                uint64_t step_us)
{
    uint32_t left = budget_rows - TD_MIN(decode_rows, budget_rows);
    if (decode_rows == 0 || prefill_rows_per_s == 0)
        return left;
    uint64_t rows = TD_MIN(prefill_rows_per_s, UINT32_MAX) * step_us / 1000000;
    return (uint32_t)TD_MIN((uint64_t)left, TD_MAX(rows, (uint64_t)SCHEDULER_TURN_ROWS));
}
