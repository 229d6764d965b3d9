/* plan_model: what a plan would take, foretold from measured costs: a prompt's chunks on their way through three stages, edge, link and cloud, each
 * busy with a different one. A pure function; the planner asks it of many plans and takes the best.
 *
 *     edge   k layers of a chunk, one chunk behind the other
 *     link   its rows as soon as they are computed; KV in the gaps and behind the last row; what is on its way already is not overtaken
 *     cloud  the other layers, when the rows are there; token ids through all layers, when all earlier positions have theirs
 *
 * The first token needs rows alone. The second needs all KV: what comes is waited for, what does not (PLAN_CODEC_NONE) is computed in the cloud, behind
 * the first token. T16 is the time to the sixteenth token. Times count from now. */
#ifndef TANDEM_EDGE_PLAN_MODEL_H
#define TANDEM_EDGE_PLAN_MODEL_H
#include "protocol/plan.h"
#include "shared/kv_block.h"

#define PLAN_MODEL_CHUNKS 64u /* steps of one evaluation, about: longer prompts are cut into longer chunks */
/* KV that rows do not overtake: what the link lets be on its way (LIMIT_UNACKED_MARGIN_US) */
#define PLAN_MODEL_FRONT_US 40000.0

struct plan_cost { /* nanoseconds a token and layer: at position 0, and more for each position before it */
    double base_ns, slope_ns;
};

struct plan_model {
    uint32_t layer_count;
    struct plan_cost edge, cloud;
    double edge_off;        /* by what share of its cost a chunk on the device is off, on average */
    double edge_sending_ns; /* of edge.base_ns: what the device does not need where it sends nothing */
    bool edge_tried;        /* which is known, as it has run prompts for itself */
    double rate_bytes_per_us, delay_us; /* of the uplink; delay: one way */
    double queue_us;                    /* until the cloud can begin */
    double decode_us;                   /* a reply token of the cloud's */
    double edge_decode_us;              /* one that the device makes itself */
    double row_size[3];                 /* bytes by enum hidden_dtype */
    double kv_size;                     /* bytes a token and layer, in the codec at hand */
    double sealed_size;                 /* the same of sealed pieces */
    uint32_t chunk_tokens;              /* that the edge computes at a time */
};

/* Of a prompt that is under way; zeros at its start, but for run and rows, which begin at what is cached. */
struct plan_progress {
    uint32_t computed;  /* edge: chunks below have been computed */
    uint32_t rows, run; /* rows below have arrived; have run */
    uint32_t kv;        /* KV below has arrived */
    /* tokens that the edge must compute first, just below `computed` or the first range; nobody is sent */
    uint32_t catch_up;
    double read_us; /* that the edge reads from its disk first */
};

struct plan_times {
    double first_us, t16_us;
    double cloud_us; /* of computing there */
    double edge_us;
};

/* Tokens [begin, end) through so many layers on the device. */
double plan_model_edge_us(const struct plan_model *m, uint32_t begin, uint32_t end, uint32_t layers);

/* Would all of [0, tokens), as the cloud has sealed it, be there sooner than the cloud has computed it? */
bool plan_model_sealed_pays(const struct plan_model *m, uint32_t tokens);

/* ranges: the whole plan, from the first token that is not cached. */
struct plan_times plan_model_run(const struct plan_model *m, const struct plan_range *ranges, uint32_t count,
                                 const struct plan_progress *at);

#endif
