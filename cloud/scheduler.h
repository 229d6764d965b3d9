/* scheduler: which sequences get how many rows of the next step. A pure function: no clock, no pages, no state but the argument.
 *
 * Decode rows come first: a reply that streams must not wait behind somebody's prompt. What is left of the budget goes to prefill, in equal shares of the
 * tenants that have prompts, however many each has; where a share would be less than SCHEDULER_TURN_ROWS they take turns. Of a tenant's rows first a
 * share is the oldest prompt's, so that none waits for ever, then the rest is of the prompts that have least left, which gives the least mean time to
 * the first token; equal prompts are served in order of arrival. But of each principal one prompt is begun before anybody's second: rounds. Where a
 * chunk ends does not matter to the result (kernels/backend.h, invariance). */
#ifndef TANDEM_CLOUD_SCHEDULER_H
#define TANDEM_CLOUD_SCHEDULER_H
#include "shared/base.h"

#define SCHEDULER_TURN_ROWS    64u /* one block: chunks then mostly end where blocks do */
#define SCHEDULER_OLDEST_SHARE 4u  /* one in so many prefill rows of a tenant is the oldest prompt's */

struct scheduler_item {
    uint32_t rows;    /* that could run now; 0: nothing */
    uint32_t left;    /* of its prompt, these included */
    bool decode;      /* its one row extends a reply */
    uint32_t granted; /* out */
    uint64_t turn;  /* of its tenant, which no other has; whose is least comes first. In, and out: the next */
    uint64_t round; /* of its principal's prompts; within a tenant */
};
struct scheduler_budget {
    uint32_t rows;         /* of the whole step */
    uint32_t prefill_rows; /* of these, at most so many for prefill */
    uint32_t sequences;    /* in one step */
    uint64_t turn;         /* later than anybody's */
};
/* scheduler_pick: fills granted. The items are in order of arrival. Returns a turn later than anybody's. */
uint64_t scheduler_pick(struct scheduler_item *items, size_t count, struct scheduler_budget budget);
/* How many prefill rows fit beside decode rows so that a step takes about step_us, at a measured rate; at least one turn. step_us 0: nobody waits for
 * its end, it may take as long as it likes. */
uint32_t scheduler_prefill_rows(uint32_t budget_rows, uint32_t decode_rows, uint64_t prefill_rows_per_s,
                                uint64_t step_us);

#endif
