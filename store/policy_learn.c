/* policy_learn: see policy_learn.h. */
#include "store/policy_learn.h"
#include "shared/base.h"

static double width_ms(const struct learn *l, int stage)
{
    return (double)(stage ? l->end_ms[stage] - l->end_ms[stage - 1] : l->end_ms[0]);
}

static void compute_values(struct learn *l)
{
    double pooled[LEARN_STAGES], chance[LEARN_STAGES], before = LEARN_FIRST_CHANCE;
    for (int s = 0; s < LEARN_STAGES; s++) {
        before = (l->pool[s].used + LEARN_POOL_BLOCKS * before) / (l->pool[s].entered + LEARN_POOL_BLOCKS);
        pooled[s] = before;
    }
    for (int k = 0; k < LEARN_KINDS; k++) {
        const struct learn_cell *c = l->cells[k];
        for (int s = 0; s < LEARN_STAGES; s++)
            chance[s] = (c[s].used + LEARN_PRIOR_BLOCKS * pooled[s]) / (c[s].entered + LEARN_PRIOR_BLOCKS);
        for (int from = 0; from < LEARN_STAGES; from++) {
            double unused = 1, used = 0, held_ms = 0, best = 0;
            for (int s = from; s < LEARN_STAGES; s++) { /* give up at the end of stage s */
                used += unused * chance[s];
                held_ms += unused * width_ms(l, s) * (1 - chance[s] / 2);
                unused *= 1 - chance[s];
                best = TD_MAX(best, used / held_ms);
            }
            l->value[k][from] = best * 1000;
        }
    }
}

static void halve(struct learn *l)
{
    for (int s = 0; s < LEARN_STAGES; s++) {
        l->pool[s].entered /= 2;
        l->pool[s].used /= 2;
        for (int k = 0; k < LEARN_KINDS; k++) {
            l->cells[k][s].entered /= 2;
            l->cells[k][s].used /= 2;
        }
    }
}

void learn_init(struct learn *l)
{
    memset(l, 0, sizeof *l);
    for (int s = 0; s < LEARN_STAGES;
         s++) { /* x 2 every second stage, x 181/128 (near the root of 2) between */
        uint64_t octave = (uint64_t)LEARN_FIRST_STAGE_MS << (s / 2);
        l->end_ms[s] = s % 2 ? octave * 181 / 128 : octave;
    }
    l->blocks_left = LEARN_HALVE_BLOCKS;
    l->touches_left = LEARN_REFRESH_TOUCHES;
    compute_values(l);
}

void learn_touch(struct learn *l)
{
    if (--l->touches_left > 0)
        return;
    l->touches_left = LEARN_REFRESH_TOUCHES;
    compute_values(l);
}

void learn_enter(struct learn *l, uint8_t kind, uint8_t stage)
{
    l->pool[stage].entered += 1;
    l->cells[kind][stage].entered += 1;
    if (stage == 0 && --l->blocks_left == 0) {
        l->blocks_left = LEARN_HALVE_BLOCKS;
        halve(l);
    }
}

void learn_use(struct learn *l, uint8_t kind, uint8_t stage)
{
    l->pool[stage].used += 1;
    l->cells[kind][stage].used += 1;
}
