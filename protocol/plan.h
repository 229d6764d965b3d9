/* plan: ranges of a prompt, and who computes how much of each; what PLAN carries, in the form that both sides work with.
 *
 * The ranges of a plan are ascending and adjacent. A later plan replaces an earlier one only where nothing has been computed yet: what a
 * generation's KV was really made from is the old plan below some token and the new one from there on (plan_merge). That record is what an
 * edge sends again after a lost link, so that a reply goes on from the same values. */
#ifndef TANDEM_PROTOCOL_PLAN_H
#define TANDEM_PROTOCOL_PLAN_H
#include "protocol/limits.h"
#include <stdbool.h>
#include <stdint.h>

/* the KV of this edge range does not come: the cloud makes it from the token ids when it is needed */
#define PLAN_CODEC_NONE 255

struct plan_range {
    uint32_t first_token, count, layers;
    uint8_t codec, hidden_dtype;
};

static inline uint32_t plan_range_end(const struct plan_range *r)
{
    return r->first_token + r->count;
}

/* Do rows and KV of the two have the same values? */
static inline bool plan_range_alike(const struct plan_range *a, const struct plan_range *b)
{
    return a->layers == b->layers &&
           (a->layers == 0 || (a->codec == b->codec && a->hidden_dtype == b->hidden_dtype));
}

/* From which token on a record takes over a plan that came when rows below `run` had run: block borders only, and the prompt's end. */
static inline uint32_t plan_border(uint32_t run, uint32_t end, uint32_t block)
{
    return run >= end ? end : run - run % block;
}

/* The range with this token; NULL: none. Borrowed from ranges. */
const struct plan_range *plan_at(const struct plan_range *ranges, uint32_t count, uint32_t token);
/* before below `token`, after from there on; like neighbours become one. out: LIMIT_RANGES entries, neither input. Returns their count; 0: they
 * would be too many. */
uint32_t plan_merge(const struct plan_range *before, uint32_t before_count, const struct plan_range *after,
                    uint32_t after_count, uint32_t token, struct plan_range *out);
/* The KV of edge ranges within [begin, end) did not come: those parts have PLAN_CODEC_NONE. In place, room for LIMIT_RANGES. Returns the new count;
 * as it was when they would be too many. */
uint32_t plan_without_kv(struct plan_range *ranges, uint32_t count, uint32_t begin, uint32_t end);

#endif
