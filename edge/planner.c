/* planner: see planner.h. */
#include "edge/planner.h"

#define PLANNER_CANDIDATES 64 /* k: with more layers than this, every second or third is tried */

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

uint32_t planner_held(const struct planner_state *s, uint32_t layers)
{
    uint32_t blocks = 0;
    while (blocks < s->depth_count && s->depths[blocks] >= layers)
        blocks++;
    return blocks * KV_BLOCK_TOKENS;
}

/* ---- forms ---- */

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

/* ---- building plans ---- */

static void add_range(struct plan *p, uint32_t begin, uint32_t end, uint32_t layers, uint8_t codec)
{
    if (begin >= end)
        return;
    p->ranges[p->range_count++] = (struct plan_range){.first_token = begin,
                                                      .count = end - begin,
                                                      .layers = layers,
                                                      .codec = codec,
                                                      .hidden_dtype = layers ? p->hidden_dtype : 0};
}

struct candidate {
    uint32_t layers, kv_end;
    uint32_t restore_begin, restore_end; /* equal: nothing is restored */
    bool local;                          /* the device makes tokens too */
    struct plan_times times;
};

/* All of [cached, prompt) with k layers, apart from what is restored; KV of the tokens below kv_end is sent. A guess of what is cached may be too high:
 * then the cloud computes what it lacks of the guessed prefix from token ids. */
static void build(const struct planner_state *s, const struct candidate *c, struct plan *p)
{
    uint32_t begin = s->cached_tokens, end = s->prompt_count;
    p->range_count = 0;
    p->layers = c->layers;
    p->send_begin = begin;
    p->restore_begin = c->restore_begin;
    p->restore_end = c->restore_end;
    if (c->restore_end > c->restore_begin) {
        bool all =
            c->layers == s->layer_count; /* then it is one range, which ends with the prompt's last row */
        add_range(p, begin, c->restore_begin, 0, 0);
        uint8_t codec = c->restore_end <= s->sealed_until ? (uint8_t)KV_SEALED : p->codec;
        add_range(p, c->restore_begin, all ? end : c->restore_end, s->layer_count, codec);
        begin = all ? end : c->restore_end;
    } else if (c->layers == 0) {
        begin = s->cached_known ? begin : 0;
    }
    if (c->layers == 0) {
        add_range(p, begin, end, 0, 0);
        return;
    }
    p->compute_begin = TD_MIN(planner_held(s, c->layers), p->send_begin);
    if (!s->cached_known)
        add_range(p, 0, begin, 0, 0);
    add_range(p, begin, c->kv_end, c->layers, p->codec);
    add_range(p, TD_MAX(begin, c->kv_end), end, c->layers, PLAN_CODEC_NONE);
}

/* ---- choosing ---- */

static struct plan_times foretell(const struct planner_state *s, struct plan *scratch,
                                  const struct candidate *c)
{
    build(s, c, scratch);
    struct plan_progress at = {.rows = s->cached_tokens, .run = s->cached_tokens, .kv = s->cached_tokens};
    uint32_t held = TD_MIN(planner_held(s, c->layers), s->cached_tokens);
    at.catch_up = s->cached_tokens - held + TD_MIN(s->unread_tokens, held);
    if (c->restore_end > c->restore_begin) {
        held = planner_held(s, c->layers);
        at.computed = c->restore_end;
        at.catch_up = c->restore_end - TD_MIN(held, c->restore_end); /* the rest is read */
        at.read_us = s->unread_tokens * s->layer_count * s->model.edge.base_ns * 1e-3;
    }
    return plan_model_run(&s->model, scratch->ranges, scratch->range_count, &at);
}

/* Lower is better. */
static double score(const struct planner_state *s, const struct plan_times *t)
{
    return t->t16_us + PLANNER_FIRST * t->first_us + s->cloud_price * t->cloud_us;
}

static struct candidate candidate(const struct planner_state *s, struct plan *scratch, uint32_t layers,
                                  uint32_t kv_end)
{
    struct candidate c = {.layers = layers, .kv_end = kv_end};
    c.times = foretell(s, scratch, &c);
    return c;
}

/* KV that is not sent is computed in the cloud: at a cost, and from token ids. */
static bool sends_all(const struct planner_state *s)
{
    return s->prefer == PREFER_CLOUD_COST || s->private_layers > 0;
}

/* How much KV to send: what takes longer than computing it in the cloud behind the first token is not sent. T16 falls and then rises with it, so
 * halving finds the least. Counted in blocks, behind what is cached. */
static struct candidate best_of_layers(const struct planner_state *s, struct plan *scratch, uint32_t layers)
{
    uint32_t begin = s->cached_tokens / KV_BLOCK_TOKENS;
    uint32_t low = begin, high = (s->prompt_count + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    struct candidate best = candidate(s, scratch, layers, s->prompt_count);
    if (sends_all(s) || layers == 0)
        return best;
    while (high - low > 1) {
        uint32_t mid = (low + high) / 2;
        struct candidate a = candidate(s, scratch, layers, mid * KV_BLOCK_TOKENS);
        struct candidate b =
            candidate(s, scratch, layers, TD_MIN((mid + 1) * KV_BLOCK_TOKENS, s->prompt_count));
        if (score(s, &a.times) < score(s, &best.times))
            best = a;
        if (score(s, &b.times) < score(s, &a.times))
            low = mid;
        else
            high = mid;
    }
    return best;
}

/* ---- restoring ---- */

/* Where what the device holds in all layers, or the cloud has sealed for it, ends, if the cloud has less; whole blocks, and never the prompt's last token. 0: there is nothing to restore. */
static uint32_t restorable_until(const struct planner_state *s)
{
    uint32_t held = s->layers_held >= s->layer_count ? planner_held(s, s->layer_count) : s->sealed_until;
    uint32_t end = floor_to_block(s->prompt_count - 1);
    bool may = s->cached_known && s->model.rate_bytes_per_us > 0;
    return may && TD_MIN(held, end) > s->cached_tokens ? TD_MIN(held, end) : 0;
}

static struct candidate restoring(const struct planner_state *s, struct plan *scratch, uint32_t layers,
                                  uint32_t first_block, uint32_t end)
{
    struct candidate c = {.layers = layers,
                          .kv_end = s->prompt_count,
                          .restore_begin = first_block * KV_BLOCK_TOKENS,
                          .restore_end = end};
    c.times = foretell(s, scratch, &c);
    return c;
}

/* From where on to restore: the cloud computes what lies before while the rest is on its way, so both are busy, and the best border is found by halving. */
static struct candidate best_restoring(const struct planner_state *s, struct plan *scratch, uint32_t layers,
                                       uint32_t end)
{
    uint32_t low = s->cached_tokens / KV_BLOCK_TOKENS, high = end / KV_BLOCK_TOKENS;
    struct candidate best = restoring(s, scratch, layers, low, end);
    while (!sends_all(s) && high - low > 1) {
        uint32_t mid = (low + high) / 2;
        struct candidate a = restoring(s, scratch, layers, mid, end),
                         b = restoring(s, scratch, layers, mid + 1, end);
        if (score(s, &a.times) < score(s, &best.times))
            best = a;
        if (score(s, &b.times) < score(s, &a.times))
            low = mid;
        else
            high = mid;
    }
    return best;
}

/* What a plan may not be later than. */
struct limits {
    double first_us, t16_us;
};

static bool within(const struct plan_times *t, const struct limits *l)
{
    return t->first_us <= l->first_us && t->t16_us <= l->t16_us;
}

/* The least computing in the cloud: anything that is not much later than the soonest is good enough. */
static struct candidate cheapest(const struct candidate *all, size_t count)
{
    struct limits patience = {all[0].times.first_us, all[0].times.t16_us};
    for (size_t i = 1; i < count; i++) {
        patience.first_us = TD_MIN(patience.first_us, all[i].times.first_us);
        patience.t16_us = TD_MIN(patience.t16_us, all[i].times.t16_us);
    }
    patience.first_us *= PLANNER_COST_PATIENCE;
    patience.t16_us *= PLANNER_COST_PATIENCE;
    struct candidate best = all[0];
    for (size_t i = 1; i < count; i++)
        if (within(&all[i].times, &patience) && all[i].times.cloud_us < best.times.cloud_us)
            best = all[i];
    return best;
}

/* The first is k = 0. With a price on the cloud it may be later than that. */
static struct candidate soonest(const struct planner_state *s, const struct candidate *all, size_t count)
{
    struct limits alone = {all[0].times.first_us, all[0].times.t16_us};
    struct candidate best = all[0];
    for (size_t i = 1; i < count; i++)
        if ((s->cloud_price > 0 || within(&all[i].times, &alone)) &&
            score(s, &all[i].times) < score(s, &best.times))
            best = all[i];
    bool try = all[0].local && !s->model.edge_tried && s->prompt_count <= PLANNER_TRY_TOKENS;
    double gain = try ? PLANNER_GAIN_UNTRIED : PLANNER_GAIN;
    return score(s, &best.times) < gain * score(s, &all[0].times) ? best : all[0];
}

/* All layers of what the device does not hold, then token by token: nothing of it waits for the link. The last token is always run. */
static struct plan_times device_alone(const struct planner_state *s)
{
    uint32_t layers = s->layer_count, held = planner_held(s, layers);
    held = TD_MIN(held, floor_to_block(s->prompt_count - 1));
    uint32_t begin = held - TD_MIN(s->unread_tokens, held);
    double sending_us = (double)(s->prompt_count - begin) * layers * s->model.edge_sending_ns * 1e-3;
    struct plan_times t = {.edge_us =
                               plan_model_edge_us(&s->model, begin, s->prompt_count, layers) - sending_us};
    t.first_us = s->local_queue_us + t.edge_us;
    double others = s->local_share > 1 ? s->local_share - 1 : 0;
    t.t16_us = t.first_us + 15 * s->model.edge_decode_us * (1 + PLANNER_SHARED_PASS * others);
    return t;
}

/* Both sides do everything; whoever is first counts. */
static struct plan_times race(const struct plan_times *device, const struct plan_times *cloud)
{
    return (struct plan_times){.first_us = TD_MIN(device->first_us, cloud->first_us),
                               .t16_us = TD_MIN(device->t16_us, cloud->t16_us),
                               .cloud_us = cloud->cloud_us,
                               .edge_us = device->edge_us};
}

static bool wants_race(const struct planner_state *s, const struct plan_times *cloud,
                       const struct plan_times *device)
{
    bool may = s->local != LOCAL_OFF && s->layers_held == s->layer_count && s->prefer == PREFER_LATENCY &&
               s->private_layers == 0; /* the cloud cannot do everything of a private prompt */
    return may && (s->local == LOCAL_ALWAYS || device->first_us < PLANNER_RACE * cloud->first_us ||
                   device->t16_us < PLANNER_RACE * cloud->t16_us);
}

/* Among the plans that leave nothing to be computed from token ids. */
static struct candidate soonest_private(const struct planner_state *s, const struct candidate *all,
                                        size_t count)
{
    struct candidate best = all[0];
    for (size_t i = 1; i < count; i++)
        if (all[i].layers >= s->private_layers &&
            (best.layers < s->private_layers || score(s, &all[i].times) < score(s, &best.times)))
            best = all[i];
    return best;
}

static struct candidate pick(const struct planner_state *s, const struct candidate *all, size_t count)
{
    if (s->private_layers > 0)
        return soonest_private(s, all, count);
    return s->prefer == PREFER_CLOUD_COST ? cheapest(all, count) : soonest(s, all, count);
}

static void choose(const struct planner_state *s, struct plan *out)
{
    struct candidate all[2 * (PLANNER_CANDIDATES + 2)] = {best_of_layers(s, out, 0)};
    uint32_t most = TD_MIN(s->layers_held, s->layer_count), step = most / PLANNER_CANDIDATES + 1;
    uint32_t restorable = restorable_until(s);
    size_t count = 1;
    if (restorable)
        all[count++] = best_restoring(s, out, 0, restorable);
    for (uint32_t layers = most; layers > 0; layers -= TD_MIN(step, layers)) {
        all[count++] = best_of_layers(s, out, layers);
        if (restorable)
            all[count++] = best_restoring(s, out, layers, restorable);
    }
    struct plan_times alone = all[0].times, device = device_alone(s), both = race(&device, &alone);
    if (wants_race(s, &alone, &device)) { /* then that is what working together has to beat */
        all[0].times = both;
        all[0].local = true;
        count = s->local == LOCAL_ALWAYS ? 1 : count;
    }
    struct candidate best = pick(s, all, count);
    out->local = best.local;
    build(s, &best, out);
    out->chosen = true;
    out->times = best.times;
    out->cloud_alone = alone;
    if (s->local != LOCAL_OFF)
        out->device_alone = device;
}

/* A fixed k leaves one question open. What is not restored is split at k, and so is no part of what could be: but for k = 0, it is all or nothing. */
static void build_fixed(const struct planner_state *s, uint32_t layers, struct plan *out)
{
    struct candidate plain = {.layers = layers, .kv_end = s->prompt_count};
    uint32_t restorable = restorable_until(s);
    if (restorable) {
        struct candidate c = layers
                                 ? restoring(s, out, layers, s->cached_tokens / KV_BLOCK_TOKENS, restorable)
                                 : best_restoring(s, out, layers, restorable);
        plain.times = foretell(s, out, &plain);
        if (score(s, &c.times) < PLANNER_GAIN * score(s, &plain.times))
            plain = c;
    }
    build(s, &plain, out);
}

void planner_plan(const struct planner_state *s, struct plan *out)
{
    memset(out, 0, sizeof *out);
    struct planner_state possible = *s;
    uint32_t k = s->layers_wanted;
    if (s->layers_held == 0 || !choose_forms(s, &out->codec, &out->hidden_dtype)) {
        possible.layers_held = 0; /* nothing can be sent */
        k = 0;
    }
    if (k != PLANNER_AUTO && k > 0 && s->private_layers == 0 &&
        !planner_catch_up_pays(planner_held(s, k), s->cached_tokens, s->prompt_count))
        k = 0;
    if (k == PLANNER_AUTO)
        choose(&possible, out);
    else
        build_fixed(&possible, k, out);
    if (!planner_sends(out))
        out->codec = out->hidden_dtype = 0;
}

/* ---- under way ---- */

struct planner_patience planner_patience(const struct planner_state *s, const struct plan *plan,
                                         uint32_t sharing)
{
    const struct plan_model *m = &s->model;
    if (!plan->chosen || plan->layers == 0 || plan->layers == s->layer_count || s->private_layers > 0)
        return (struct planner_patience){0, 0, 0};
    uint32_t end = s->prompt_count, begin = end - TD_MIN(m->chunk_tokens, end);
    double compute_us = plan_model_edge_us(m, begin, end, plan->layers) * TD_MAX(sharing, 1u);
    compute_us *= 1 + PLANNER_PATIENCE_OFF * m->edge_off;
    double send_us = m->chunk_tokens * m->row_size[plan->hidden_dtype] / m->rate_bytes_per_us;
    double chunk_us = TD_MAX(compute_us, send_us + PLAN_MODEL_FRONT_US);
    double gap_us = TD_MAX(plan->times.t16_us - plan->times.first_us - 15 * m->decode_us, 0);
    double much = s->prefer == PREFER_CLOUD_COST ? 4 : 1; /* computing there is what is to be saved */
    double sure = PLANNER_PATIENCE * end / (end + PLANNER_PATIENCE_TOKENS);
    struct planner_patience p = {
        much * (TD_MAX(PLANNER_PATIENCE_CHUNKS * chunk_us, 2 * m->delay_us) +
                TD_MAX(m->delay_us, PLANNER_PATIENCE_US)),
        much * sure * plan->layers * m->cloud.base_ns * 1e-3,
        much * (PLANNER_PATIENCE_KV * gap_us + 2 * m->delay_us + PLANNER_PATIENCE_KV_US)};
    if (plan->restore_end > plan->restore_begin)
        p.kv_us = 0; /* what is restored is waited for: it is worth more than computing it */
    return p;
}

bool planner_switch(const struct planner_state *s, const struct plan *plan, const struct plan_progress *at,
                    const struct plan *fresh)
{
    struct plan_times on = plan_model_run(&s->model, plan->ranges, plan->range_count, at);
    if (s->prefer == PREFER_CLOUD_COST)
        return fresh->layers > plan->layers || score(s, &fresh->times) < PLANNER_SWITCH * score(s, &on);
    return score(s, &fresh->times) < PLANNER_SWITCH * score(s, &on);
}

/* What is here stays; the rest of the KV does not come, the rest of the prompt is the cloud's. */
static void build_leave(const struct plan *plan, const struct plan_progress *at, struct plan *out)
{
    uint32_t end = plan_range_end(&plan->ranges[plan->range_count - 1]);
    uint32_t from = at->rows >= end ? end : floor_to_block(TD_MAX(at->rows, at->run));
    struct plan_range rest = {.first_token = from, .count = end - from};
    *out = *plan;
    out->range_count =
        plan_merge(plan->ranges, plan->range_count, &rest, end > from ? 1 : 0, from, out->ranges);
    out->range_count = plan_without_kv(out->ranges, out->range_count, floor_to_block(at->kv), end);
}

/* From where on KV may be left once the rows are there: what a range of fewer layers reads has been waited for by then. */
static uint32_t behind_the_rows(const struct plan *plan, const struct plan_progress *at)
{
    uint32_t begin = floor_to_block(at->kv), deepest = 0;
    for (uint32_t i = 0; i < plan->range_count; i++) {
        const struct plan_range *r = &plan->ranges[i];
        if (r->layers < deepest)
            begin = TD_MAX(begin, r->first_token);
        deepest = TD_MAX(deepest, r->layers);
    }
    return begin;
}

/* Going on: with all KV, or with what of it has come when the rows are there. That can still be decided then, as rows go first. */
static double going_on(const struct planner_state *s, const struct plan *plan, const struct plan_progress *at)
{
    struct plan_times all = plan_model_run(&s->model, plan->ranges, plan->range_count, at);
    struct plan rows = *plan;
    uint32_t end = plan_range_end(&plan->ranges[plan->range_count - 1]);
    if (at->rows >= end)
        return score(s, &all);
    rows.range_count = plan_without_kv(rows.ranges, rows.range_count, behind_the_rows(plan, at), end);
    struct plan_times without = plan_model_run(&s->model, rows.ranges, rows.range_count, at);
    return TD_MIN(score(s, &all), score(s, &without));
}

bool planner_reconsider(const struct planner_state *s, const struct plan *plan,
                        const struct plan_progress *at, struct plan *out)
{
    if (!planner_sends(plan) || plan->range_count == 0)
        return false;
    build_leave(plan, at, out);
    if (out->range_count == 0 || out->range_count > LIMIT_RANGES)
        return false;
    struct plan_times leave = plan_model_run(&s->model, out->ranges, out->range_count, at);
    out->times = leave;
    out->chosen = true;
    return score(s, &leave) < PLANNER_SWITCH * going_on(s, plan, at);
}

/* ---- taken up again ---- */

static struct plan_times foretell_rest(const struct planner_state *s, const struct plan_range *rest,
                                       uint32_t count, const struct plan_progress *at, uint32_t from)
{
    struct plan_progress then = {.computed = from,
                                 .rows = at->run,
                                 .run = at->run,
                                 .kv = from,
                                 .catch_up = from - TD_MIN(at->computed, from)};
    return plan_model_run(&s->model, rest, count, &then);
}

/* What the cloud has begun when it hears of a plan that is made now. How much of it fits a step it knows from the rows that it was sent, of fewer layers. */
static uint32_t begun_until(const struct planner_state *s, uint32_t layers, uint32_t run)
{
    double layer_us = TD_MAX(s->model.cloud.base_ns + s->model.cloud.slope_ns * run, 1.0) * 1e-3;
    double tokens = PLANNER_STEP_US / ((s->layer_count - layers) * layer_us) +
                    2 * s->model.delay_us / (s->layer_count * layer_us);
    uint32_t blocks = (run + (uint32_t)TD_MIN(tokens, 1e9) + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    return blocks * KV_BLOCK_TOKENS;
}

bool planner_resume(const struct planner_state *s, const struct plan *left, const struct plan_range *record,
                    uint32_t record_count, const struct plan_progress *at, struct plan *out)
{
    uint32_t end = s->prompt_count, run = at->run, best = 0;
    if (left->layers == 0 || left->layers >= s->layer_count || s->private_layers > 0 || record_count == 0)
        return false;
    uint32_t first = begun_until(s, left->layers, run);
    if (first >= end || plan_range_end(&record[record_count - 1]) != end)
        return false;
    struct plan_range rest[2] = {{.first_token = run, .count = end - run}};
    *out = *left;
    out->times = foretell_rest(s, rest, 1, at, run);
    double limit = PLANNER_RESUME * score(s, &out->times);
    uint32_t step = ((end - first) / (KV_BLOCK_TOKENS * PLANNER_CANDIDATES) + 1) * KV_BLOCK_TOKENS;
    for (uint32_t from = first; from < end; from += step) {
        rest[0].count = from - run;
        rest[1] = (struct plan_range){from, end - from, left->layers, left->codec, left->hidden_dtype};
        struct plan_times times = foretell_rest(s, rest, 2, at, from);
        if (score(s, &times) >= limit)
            continue;
        limit = score(s, &times);
        best = from;
        out->times = times;
    }
    rest[1] = (struct plan_range){best, end - best, left->layers, left->codec, left->hidden_dtype};
    out->range_count = best ? plan_merge(record, record_count, &rest[1], 1, best, out->ranges) : 0;
    out->compute_begin = TD_MIN(at->computed, best);
    out->send_begin = best;
    out->chosen = true;
    return out->range_count > 0;
}
