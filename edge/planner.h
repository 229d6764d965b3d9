/* planner: who computes which part of a prompt. Pure functions from what is known and measured to a plan; no clock, no threads, no I/O.
 *
 * The device computes layers [0, k) of what the cloud does not have cached. k is fixed, or the planner's choice: it runs each k, and how much of the
 * KV to send, through the model of plan_model.h and takes the plan that is best for the wish:
 *
 *     latency     least time to the 16th token, and a little for the first; neither later than with k = 0. A first token that is early because the KV
 *                 behind it was put off, so that a gap follows, is worth nothing
 *     cloud-cost  least computing in the cloud, both at most PLANNER_COST_PATIENCE times as late as the best
 *
 * A private prompt has no k = 0: the soonest of what is left is taken, whatever the cloud alone would need.
 *
 * A plan must promise PLANNER_GAIN over k = 0, whose estimate has the fewest assumptions.
 *
 * `local`: a device that holds the whole model can make tokens itself. It then runs the prompt through all layers and goes on decoding, while the cloud does
 * everything too (k = 0); each token is whoever's is first. So the times are the better ones of both sides, and no plan is later than the device or the
 * cloud alone. For the wish `latency` it takes the place of k = 0 where the device alone would be as soon, or about so (PLANNER_RACE): which is sooner by a few ms no
 * estimate tells. Working together must then beat both sides alone, and clearly (PLANNER_GAIN_UNTRIED) as long as it is not known what the device alone takes: the
 * race shows it, and is no later than either side.
 *
 * To run [0, k) on a token the device needs the KV of [0, k) of every earlier token. What it holds of the prefix ends at `held`; the
 * cloud's cache ends at `cached_tokens`; so [held, cached) must be caught up locally first, and only [cached, prompt) is sent:
 *
 *      0 ........ held ........ cached ................ prompt
 *      |  have it  | catch up    | compute, send         |
 *
 * A device with the whole model may hold KV of all layers of what the cloud has lost. Part of it, [restore_begin, restore_end), is then sent as it is, a
 * range of k = L that nobody computes, if that is sooner; what lies before it the cloud computes from token ids meanwhile, what lies behind is planned as always:
 *
 *      0 ... cached ......... restore_begin ......... restore_end ......... prompt
 *                 | the cloud, from ids  | sent from what is held | split at k  |
 *
 * A device with a part of the model does the same with blocks that the cloud has sealed for it to keep; they are sent as they are.
 *
 * While the prompt is under way the same questions are asked again (planner_reconsider): go on, or leave what has not arrived to the cloud; and where that has
 * happened (planner_resume): take the rest up again. The device has the KV of what it has run, and ids cost nothing, so it can begin anew at any block:
 *
 *      0 ...... left ............ from ............ prompt
 *        as before | the cloud, from ids | split at k as before  | */
#ifndef TANDEM_EDGE_PLANNER_H
#define TANDEM_EDGE_PLANNER_H
#include "edge/plan_model.h"
#include "protocol/wire.h"
#include "shared/kv_block.h"

/* fixed k: catching up may cost so many times the tokens that are left to do */
#define PLANNER_CATCH_UP_COST 2
#define PLANNER_AUTO          UINT32_MAX
#define PLANNER_GAIN          0.97 /* of the time with k = 0: what a plan must stay below */
#define PLANNER_GAIN_UNTRIED  0.85 /* the same, as long as it is not known what the device alone takes */
#define PLANNER_TRY_TOKENS    512u /* in a longer prompt that costs more than it may teach */
#define PLANNER_SWITCH        0.90 /* of the time of going on: what a change under way must stay below */
#define PLANNER_RESUME        0.9 /* of the cloud's going on alone: what taking a prompt up again must stay below */
#define PLANNER_STEP_US       150000.0 /* that the cloud computes at a time; a plan takes effect behind it */
#define PLANNER_RACE                                                                                         \
    1.08 /* of the time with k = 0: what the device alone must stay below to make tokens, too */
#define PLANNER_SHARED_PASS     0.5 /* of one reply's pass on the device: what each further one adds to it */
#define PLANNER_COST_PATIENCE   1.24
#define PLANNER_PATIENCE_CHUNKS 1.1
#define PLANNER_PATIENCE_OFF                                                                                 \
    3.0 /* times what chunks are off on average: a device that does other work too is no broken link */
#define PLANNER_PATIENCE_US     20000.0
#define PLANNER_PATIENCE        0.1
#define PLANNER_PATIENCE_TOKENS 512.0
#define PLANNER_PATIENCE_KV     1.25
#define PLANNER_PATIENCE_KV_US  50000.0 /* and a round trip: a packet may have to be sent twice */
#define PLANNER_FIRST           0.125 /* a second of waiting for the first token, in seconds of waiting for the 16th */

enum planner_prefer { PREFER_LATENCY, PREFER_CLOUD_COST };
enum planner_local { LOCAL_OFF, LOCAL_AUTO, LOCAL_ALWAYS };

struct planner_state {
    uint32_t layer_count;   /* L of the model */
    uint32_t layers_wanted; /* k of a fixed split, 0..layers_held; PLANNER_AUTO: choose */
    uint32_t layers_held;   /* on the device */
    /* [depth_count] of the prompt's leading blocks: layers of KV on the device, never rising */
    const uint16_t *depths;
    uint32_t depth_count;
    /* all layers of [cached_tokens, this) lie here as the cloud has sealed them (fetcher.h); 0: nothing does */
    uint32_t sealed_until;
    uint32_t unread_tokens; /* as long as computing so many takes reading what of this is on the disk only */
    uint32_t cached_tokens; /* leading tokens that the cloud will not compute; whole blocks, < prompt_count */
    bool cached_known; /* the cloud said so; else it is a guess, and the plan stays right if it is wrong */
    uint32_t prompt_count; /* >= 1 */
    enum kv_accept accept;
    uint8_t codec, hidden_dtype;      /* wished for: enum kv_codec, enum hidden_dtype */
    uint32_t codec_mask, hidden_mask; /* what the cloud takes: bit n is codec or type n */
    bool rows_need_f32;               /* a row did not fit the wished type */

    /* for a choice */
    enum planner_prefer prefer;
    /* k is at least this, and all KV is sent: the cloud cannot compute what it does not get; 0: it can */
    uint32_t private_layers;
    double cloud_price;       /* seconds of waiting that a second of the cloud is worth */
    enum planner_local local; /* off: the device cannot make tokens, or may not */
    double local_queue_us;    /* of other requests, before the device can begin */
    uint32_t local_share;     /* requests that it makes tokens for at a time then, this one too */
    struct plan_model model;  /* kv_size: of `codec` at this model */
};

struct plan {
    struct plan_range ranges[LIMIT_RANGES]; /* ascending, adjacent, to the prompt's end */
    uint32_t range_count;
    uint32_t layers;        /* k of what is computed; 0: the device computes nothing for this prompt */
    uint32_t compute_begin; /* with k > 0: first token that the device computes; <= send_begin */
    uint32_t send_begin;    /* with k > 0: first token whose rows and KV are sent */
    uint32_t restore_begin, restore_end; /* sent as the device holds it, all layers; equal: nothing */
    uint8_t codec, hidden_dtype;
    bool local;                           /* k = 0, and the device makes tokens too */
    bool chosen;                          /* by the model: the next are set */
    struct plan_times times, cloud_alone; /* foretold, from the plan's making on */
    struct plan_times device_alone;       /* zeros where it cannot */
    struct plan_model model;              /* what it was chosen by; the caller sets it */
};

/* Does the device send anything but token ids? */
static inline bool planner_sends(const struct plan *p)
{
    return p->layers > 0 || p->restore_end > p->restore_begin;
}
/* Leading tokens whose KV of [0, layers) is on the device; whole blocks. */
uint32_t planner_held(const struct planner_state *s, uint32_t layers);
/* Is catching up on [held, begin) worth it, when [begin, end) is what is left to do? */
bool planner_catch_up_pays(uint32_t held, uint32_t begin, uint32_t end);
void planner_plan(const struct planner_state *s, struct plan *out);
/* Before the cloud has answered: what it probably has of a prompt whose first known_count tokens it has seen. */
uint32_t planner_guess_cached(uint32_t known_count, uint32_t prompt_count);

/* Is `fresh`, chosen just now, so much better than going on with `plan` that what was done for it is thrown away? */
bool planner_switch(const struct planner_state *s, const struct plan *plan, const struct plan_progress *at,
                    const struct plan *fresh);
/* How long the cloud should wait for the next rows, and for pieces once it needs them, before it goes on from token ids; 0: as it is set up.
 * Rows: what PLANNER_PATIENCE_CHUNKS chunks take (a round trip at least, as they come in bursts of one while TCP begins), longer by PLANNER_PATIENCE_OFF times what chunks are off on average, a way (PLANNER_PATIENCE_US at least), and for each
 * token that is still to come up to PLANNER_PATIENCE of what its row saves the cloud (half of that in a prompt of PLANNER_PATIENCE_TOKENS): the more there is
 * to lose, the surer it should be. A link that breaks down costs that much, and a longer stumble of a sound one the rest of the device's help.
 * Pieces: PLANNER_PATIENCE_KV times what the plan foretells, a round trip and PLANNER_PATIENCE_KV_US. sharing: prompts that the device works at. */
struct planner_patience {
    double rows_us, rows_token_us, kv_us;
};
struct planner_patience planner_patience(const struct planner_state *s, const struct plan *plan,
                                         uint32_t sharing);
/* A plan under way. True: *out is better by PLANNER_SWITCH than going on, with all KV or with what of it has come when the rows are there. Where rows below `from` are the plan's as before; from there on the cloud goes on from token
 * ids, and KV that had not arrived (from at->kv on) is not sent any more. Everything that waits to be sent is void then. */
bool planner_reconsider(const struct planner_state *s, const struct plan *plan,
                        const struct plan_progress *at, struct plan *out);
/* A plan whose rest was left to the cloud, by either side, on a link that is sound again. True: *out is better by PLANNER_RESUME than the cloud's going on
 * alone: as `record` below out->send_begin, which the cloud will not have reached when it hears of it, and from there on as the plan before, rows and KV.
 * left: the plan that was given up; record: what the cloud has and does instead, to the prompt's end; at: computed and run count. */
bool planner_resume(const struct planner_state *s, const struct plan *left, const struct plan_range *record,
                    uint32_t record_count, const struct plan_progress *at, struct plan *out);

#endif
