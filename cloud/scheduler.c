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
    return !item->decode && item->rows > item->granted && budget->rows > 0 && budget->prefill_rows > 0 &&
           (item->granted > 0 || budget->sequences > 0);
}

static struct scheduler_item *oldest(struct scheduler_item *items, size_t count, uint64_t turn,
                                     const struct scheduler_budget *budget)
{
    struct scheduler_item *best = NULL;
    for (size_t i = 0; i < count; i++)
        if (items[i].turn == turn && wants(&items[i], budget) && (!best || items[i].round < best->round))
            best = &items[i];
    return best;
}

static struct scheduler_item *least_left(struct scheduler_item *items, size_t count, uint64_t turn,
                                         const struct scheduler_budget *budget)
{
    struct scheduler_item *best = NULL;
    for (size_t i = 0; i < count; i++) {
        struct scheduler_item *item = &items[i];
        if (item->turn == turn && wants(item, budget) &&
            (!best || item->round < best->round || (item->round == best->round && item->left < best->left)))
            best = item;
    }
    return best;
}

static void grant_tenant(struct scheduler_item *items, size_t count, uint64_t turn, uint32_t share,
                         struct scheduler_budget *budget)
{
    uint32_t others = budget->prefill_rows - TD_MIN(share, budget->prefill_rows);
    budget->prefill_rows -= others;
    uint32_t of_oldest = TD_MAX(budget->prefill_rows / SCHEDULER_OLDEST_SHARE, SCHEDULER_TURN_ROWS);
    struct scheduler_item *next = oldest(items, count, turn, budget);
    for (; next; next = least_left(items, count, turn, budget)) {
        grant_prefill(next, of_oldest, budget);
        of_oldest = UINT32_MAX;
    }
    budget->prefill_rows += others;
}

/* One of the tenant whose turn it is. */
static const struct scheduler_item *next_in_turn(const struct scheduler_item *items, size_t count,
                                                 const struct scheduler_budget *budget)
{
    const struct scheduler_item *next = NULL;
    for (size_t i = 0; i < count; i++)
        if (wants(&items[i], budget) && (!next || items[i].turn < next->turn))
            next = &items[i];
    return next;
}

static uint32_t count_tenants(const struct scheduler_item *items, size_t count,
                              const struct scheduler_budget *budget)
{
    uint32_t tenants = 0;
    for (size_t i = 0; i < count; i++) {
        bool is_first = wants(&items[i], budget);
        for (size_t j = 0; j < i && is_first; j++)
            is_first = items[j].turn != items[i].turn || !wants(&items[j], budget);
        tenants += is_first;
    }
    return tenants;
}

static void end_turn(struct scheduler_item *items, size_t count, uint64_t turn,
                     struct scheduler_budget *budget)
{
    for (size_t i = 0; i < count; i++)
        if (items[i].turn == turn)
            items[i].turn = budget->turn;
    budget->turn++;
}

uint64_t scheduler_pick(struct scheduler_item *items, size_t count, struct scheduler_budget budget)
{
    grant_decode(items, count, &budget);
    for (uint32_t tenants; (tenants = count_tenants(items, count, &budget)) > 0;) {
        uint32_t rows = TD_MIN(budget.rows, budget.prefill_rows);
        uint32_t share = TD_MAX((rows + tenants - 1) / tenants, SCHEDULER_TURN_ROWS);
        const struct scheduler_item *next;
        for (; tenants > 0 && (next = next_in_turn(items, count, &budget)); tenants--) {
            uint64_t turn = next->turn;
            grant_tenant(items, count, turn, share, &budget);
            end_turn(items, count, turn, &budget);
        }
    }
    return budget.turn;
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
