/* planner_states: what the planner's tests begin with. */
#ifndef TANDEM_TESTS_PLANNER_STATES_H
#define TANDEM_TESTS_PLANNER_STATES_H
#include "edge/planner.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define BLOCKS 64
static uint16_t depths[BLOCKS];

/* The device holds all its layers of the first tokens. */
static inline void hold(struct planner_state *s, uint32_t tokens)
{
    for (uint32_t i = 0; i < BLOCKS; i++)
        depths[i] = i < tokens / KV_BLOCK_TOKENS ? 30 : 0;
    s->depths = depths;
    s->depth_count = BLOCKS;
}

static inline struct planner_state base(void)
{
    return (struct planner_state){.layer_count = 30,
                                  .layers_wanted = 8,
                                  .layers_held = 30,
                                  .prompt_count = 1000,
                                  .accept = KV_ACCEPT_VISIBLE_LOSSLESS,
                                  .codec = KV_L1,
                                  .hidden_dtype = HIDDEN_F16,
                                  .codec_mask = 1u << KV_L0 | 1u << KV_L1 | 1u << KV_RAW,
                                  .hidden_mask = 7};
}

/* SmolLM2 on equal machines: 31.7 us a token and layer, KV in 8 bits, rows in f16. */
static inline struct planner_state choosing(double mbit, double delay_ms, uint32_t prompt, double edge_ns,
                                            double cloud_ns)
{
    struct planner_state s = base();
    s.layers_wanted = PLANNER_AUTO;
    s.prompt_count = prompt;
    s.cached_known = true;
    s.model = (struct plan_model){.layer_count = 30,
                                  .edge = {edge_ns, edge_ns / 4000},
                                  .cloud = {cloud_ns, cloud_ns / 4000},
                                  .rate_bytes_per_us = mbit / 8,
                                  .delay_us = delay_ms * 1e3,
                                  .decode_us = 7400,
                                  .row_size = {2304, 1152, 580},
                                  .kv_size = 392,
                                  .chunk_tokens = 64};
    return s;
}

/* 2,000 tokens that the cloud has lost and the device holds in all 30 layers, 40 new ones. KV in 8 bits: 23.5 MB, against 1.9 s of computing. */
static inline struct planner_state lost(double mbit)
{
    struct planner_state s = choosing(mbit, 5, 2040, 31700, 31700);
    hold(&s, 1984);
    return s;
}

#endif
