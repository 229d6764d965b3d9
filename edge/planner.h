/* planner: who computes which part of a prompt. A pure function from what is known to a plan; no clock, no threads, no I/O.
 *
 * This planner has a fixed split: the device computes layers [0, k) of everything that the cloud does not have cached, with one k for all
 * prompts, unless that is impossible (the cloud takes no codec or row type that the request's fidelity allows) or foolish (the device lacks so
 * much of the prefix that catching up costs more than it brings). Then k is 0 for this prompt: the cloud computes all of it from token ids.
 *
 * To run [0, k) on a token the device needs the KV of [0, k) of every earlier token. What it holds of the prefix ends at `held_tokens`; the
 * cloud's cache ends at `cached_tokens`; so [held, cached) must be caught up locally first, and only [cached, prompt) is sent:
 *
 *      0 ........ held ........ cached ................ prompt
 *      |  have it  | catch up    | compute, send         |                                                                            */
#ifndef TANDEM_EDGE_PLANNER_H
#define TANDEM_EDGE_PLANNER_H
#include "protocol/plan.h"
#include "protocol/wire.h"
#include "shared/kv_block.h"

#define PLANNER_CATCH_UP_COST 2 /* catching up may cost so many times the tokens that are left to do */

struct planner_state {
    uint32_t layer_count;   /* L of the model */
    uint32_t layers_wanted; /* k of the fixed split, 0..L */
    uint32_t held_tokens;   /* leading tokens whose KV of [0, k) is on the device; whole blocks */
    uint32_t cached_tokens; /* leading tokens that the cloud will not compute; whole blocks, < prompt_count */
    bool cached_known; /* the cloud said so; else it is a guess, and the plan stays right if it is wrong */
    uint32_t prompt_count; /* >= 1 */
    enum kv_accept accept;
    uint8_t codec, hidden_dtype;      /* wished for: enum kv_codec, enum hidden_dtype */
    uint32_t codec_mask, hidden_mask; /* what the cloud takes: bit n is codec or type n */
    bool rows_need_f32;               /* a row did not fit the wished type */
};

struct plan {
    struct plan_range ranges[LIMIT_RANGES]; /* ascending, adjacent, to the prompt's end */
    uint32_t range_count;
    uint32_t layers;        /* k; 0: the device computes nothing for this prompt */
    uint32_t compute_begin; /* with k > 0: first token that the device computes; <= send_begin */
    uint32_t send_begin;    /* with k > 0: first token whose rows and KV are sent */
    uint8_t codec, hidden_dtype;
};

/* Is catching up on [held, begin) worth it, when [begin, end) is what is left to do? */
bool planner_catch_up_pays(uint32_t held, uint32_t begin, uint32_t end);
void planner_plan(const struct planner_state *s, struct plan *out);
/* Before the cloud has answered: what it probably has of a prompt whose first known_count tokens it has seen. */
uint32_t planner_guess_cached(uint32_t known_count, uint32_t prompt_count);

#endif
