/* planner: see planner.h. */
#include "edge/planner.h"

static uint32_t floor_to_block(uint32_t tokens)
{
    return tokens - tokens % KV_BLOCK_TOKENS;
}

bool planner_catch_up_pays(uint32_t held, uint32_t begin, uint32_t end)
{
    if (held >= begin)
        return true;
    return (uint64_t)(begin - held) <= (uint64_t)(end - begin) * PLANNER_CATCH_UP_COST;
}

uint32_t planner_guess_cached(uint32_t known_count, uint32_t prompt_count)
{
    return floor_to_block(TD_MIN(known_count, prompt_count - 1));
}

static bool in_mask(uint32_t mask, uint8_t bit)
{
    return bit < 32 && (mask >> bit & 1);
}

/* The wished codec and row type, or the nearest that the request's fidelity and the cloud allow. False: there is none. */
static bool choose_forms(const struct planner_state *s, uint8_t *codec, uint8_t *hidden_dtype)
{
    static const uint8_t lossless[] = {KV_L0, KV_RAW};
    bool exact = s->accept == KV_ACCEPT_EXACT;
    *codec = s->codec;
    bool lossy_codec = s->codec != KV_RAW && s->codec != KV_L0;
    for (size_t i = 0; i < TD_COUNT(lossless) && ((exact && lossy_codec) || !in_mask(s->codec_mask, *codec));
         i++) {
        *codec = lossless[i];
        lossy_codec = false;
    }
    *hidden_dtype = exact || s->rows_need_f32 ? HIDDEN_F32 : s->hidden_dtype;
    if (!in_mask(s->hidden_mask, *hidden_dtype))
        *hidden_dtype = HIDDEN_F32;
    return in_mask(s->codec_mask, *codec) && in_mask(s->hidden_mask, *hidden_dtype);
}

static void add_range(struct plan *p, uint32_t begin, uint32_t end, uint32_t layers)
{
    if (begin == end)
        return;
    p->ranges[p->range_count++] = (struct plan_range){.first_token = begin,
                                                      .count = end - begin,
                                                      .layers = layers,
                                                      .codec = p->codec,
                                                      .hidden_dtype = p->hidden_dtype};
}

void planner_plan(const struct planner_state *s, struct plan *out)
{
    memset(out, 0, sizeof *out);
    uint32_t begin = s->cached_tokens, end = s->prompt_count;
    bool possible = s->layers_wanted > 0 && choose_forms(s, &out->codec, &out->hidden_dtype);
    if (possible && planner_catch_up_pays(s->held_tokens, begin, end)) {
        out->layers = s->layers_wanted;
        out->send_begin = begin;
        out->compute_begin = TD_MIN(s->held_tokens, begin);
    } else {
        out->codec = out->hidden_dtype = 0;
    }
    /* A guess may be too high: then the cloud computes what it lacks of the guessed prefix from token ids. */
    if (!s->cached_known && out->layers > 0)
        add_range(out, 0, begin, 0);
    add_range(out, s->cached_known || out->layers > 0 ? begin : 0, end, out->layers);
}
