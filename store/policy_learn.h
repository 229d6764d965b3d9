/* policy_learn: how likely a block is to be used again, learned while running.
 *
 * Kinds and stages. A block is of one of 16 kinds: used before or not, how many turns deep in its conversation, last of its request or not.
 * Time since its last use runs through stages, each half an octave long: people take a minute to answer, so the chance of reuse rises
 * before it falls, and a rule that only sees the age (LRU) or the count (LFU) misses that. For each (kind, stage) the table counts blocks that
 * entered and blocks that were used in it. Blocks that are no longer held count too, for as long as they are remembered (ghosts): without
 * them a small cache would never learn that somebody comes back after the time for which it can hold a block.
 *
 * The value of a block in a stage is the best that holding it can yield from now on: over all later moments to give up, the greatest (chance of being
 * used until then) / (expected time held). This is the index of optimal stopping (Gittins 1979) on the statistic that LHD (Beckmann et al., NSDI 2018) keeps.
 * Only +, -, *, / on doubles, so that a second program gets the same numbers (tests/bench/replay_naive.py). */
#ifndef TANDEM_STORE_POLICY_LEARN_H
#define TANDEM_STORE_POLICY_LEARN_H
#include <stdbool.h>
#include <stdint.h>

#define LEARN_KINDS  16
#define LEARN_STAGES 32
/* turns of a conversation that are told apart; the last stands for all deeper ones */
#define LEARN_GENERATIONS 4

/* Measured defaults; what other values gained and lost: tests/bench/RESULTS.md, "Cache policy on traces". */
#define LEARN_FIRST_STAGE_MS  4000
#define LEARN_PRIOR_BLOCKS    50 /* a kind against all kinds together: how much is counted in before its own */
#define LEARN_POOL_BLOCKS     10     /* all kinds together, against the stage before */
#define LEARN_FIRST_CHANCE    0.001  /* of a stage when nothing is known */
#define LEARN_REFRESH_TOUCHES 16     /* requests between two computations of the values */
#define LEARN_HALVE_BLOCKS    131072 /* blocks used until all counts are halved: old habits are forgotten */

struct learn_cell {
    double entered, used;
};
struct learn {
    uint64_t end_ms[LEARN_STAGES]; /* age at which a stage ends; the last one does not */
    struct learn_cell pool[LEARN_STAGES];
    struct learn_cell cells[LEARN_KINDS][LEARN_STAGES];
    double value[LEARN_KINDS][LEARN_STAGES]; /* chance of use a second */
    uint32_t touches_left, blocks_left;
};

void learn_init(struct learn *l);
/* A request begins; computes the values anew when it is time. */
void learn_touch(struct learn *l);
/* a block has come so far without being used */
void learn_enter(struct learn *l, uint8_t kind, uint8_t stage);
void learn_use(struct learn *l, uint8_t kind, uint8_t stage); /* a block was used in that stage */

static inline uint8_t learn_kind(bool used_before, uint8_t generation, bool last)
{
    uint8_t g = generation < LEARN_GENERATIONS ? generation : LEARN_GENERATIONS - 1;
    return (uint8_t)((used_before ? 1 : 0) | g << 1 | (last ? 8 : 0));
}

#endif
