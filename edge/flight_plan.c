/* flight_plan: a flight's plan: made, carried out by the prefill thread, recorded as it was executed, and thought over while it is under way.
 *
 * The record is what the cloud's KV was made from. Values in lossy forms depend on it, so once reply tokens are held nothing else gives the same text: a
 * cloud that has lost the generation is sent the record again. Before the first token any plan will do. */
#include "edge/agent_internal.h"
#include "shared/crypto.h"
#include "shared/log.h"
#include <stdlib.h>

#define MODULE "edge"
/* computing so many takes as long as reading a block, until that has been measured */
#define READ_TOKENS_UNKNOWN 1.5
#define RECONSIDER_US       20000u /* between two looks at a plan under way */
#define RESUMES_MAX         4u     /* of one prompt: where help does not last it is worth little */
/* what is under way takes longer than this: a new connection gets a plan there sooner */
#define BACKLOG_US 400000u

/* ---- the prefill job ---- */

/* The prefill thread is gone at shutdown. */
void plan_taken(struct agent *a, size_t size)
{
    if (a->pipeline)
        pipeline_taken(a->pipeline, size);
}

static void drop_pending(struct flight *f)
{
    while (f->pending) {
        struct pipeline_message *next = f->pending->next;
        plan_taken(f->agent, f->pending->size);
        pipeline_message_free(f->pending);
        f->pending = next;
    }
}

void plan_open_work(struct flight *f)
{
    struct agent *a = f->agent;
    if (f->work || !a->pipeline)
        return;
    struct pipeline_work work = {.id = f->serial,
                                 .ids = f->turn.ids,
                                 .count = f->turn.ids_count,
                                 .capacity = f->turn.ids_count + f->receiver.capacity,
                                 .chain = f->turn.chain};
    memcpy(work.principal_key, f->turn.principal_key, sizeof work.principal_key);
    f->local.run = 0;
    f->work = pipeline_open(a->pipeline, &work);
    f->work_count = f->turn.ids_count;
    f->computed = 0;
    crypto_wipe(work.principal_key, sizeof work.principal_key);
}

void wire_feed_pipeline(struct flight *f, bool all)
{
    if (!f->work)
        return;
    uint32_t known = f->work_count - f->turn.ids_count; /* reply tokens */
    uint32_t count = f->finished ? TD_MIN(f->keep_count, f->receiver.count) : f->receiver.count;
    uint32_t total = f->turn.ids_count + count;
    if (count <= known || (!all && total / KV_BLOCK_TOKENS == f->work_count / KV_BLOCK_TOKENS))
        return;
    if (pipeline_append(f->agent->pipeline, f->work, f->work_count, f->receiver.ids + known, count - known) <
        0)
        wire_close_work(f, false); /* it has drawn others since */
    else
        f->work_count = total;
}

void wire_close_work(struct flight *f, bool keep)
{
    drop_pending(f);
    if (f->work)
        pipeline_close(f->agent->pipeline, f->work, keep ? f->work_count : 0);
    f->work = NULL;
    f->local.run = 0;
}

/* ---- the record ---- */

/* What INGESTED has told goes into the record: where the last plan began, and whose KV the cloud made itself. */
void plan_settle(struct flight *f)
{
    const Tandem__Ingested *m = &f->ingested;
    struct plan_range merged[LIMIT_RANGES];
    if (!f->merged && f->before_count > 0 && m->epoch == f->epoch) {
        uint32_t begin = plan_border(m->plan_begin, f->turn.ids_count, KV_BLOCK_TOKENS);
        uint32_t count =
            plan_merge(f->before, f->before_count, f->plan.ranges, f->plan.range_count, begin, merged);
        if (count > 0)
            memcpy(f->record, merged, count * sizeof *merged), f->record_count = count;
        f->merged = true;
    }
    f->record_count = plan_without_kv(f->record, f->record_count, m->refill_begin, m->refill_end);
}

/* To be called before what is under way is void. */
static void give_up(struct flight *f)
{
    const struct estimates *e = &f->agent->estimates;
    f->given_up.now = true;
    f->given_up.plan = f->plan;
    f->given_up.sent_size = e->acked_size + e->unacked_size;
    f->reconsidered_us =
        clock_mono_us(); /* what the cloud has done since comes in one go where the link stood still */
}

/* Below `from` the record is what it was before the last plan, if the cloud had not heard of that one in time. */
void plan_left(struct flight *f)
{
    const Tandem__Ingested *m = &f->ingested;
    struct plan_range merged[LIMIT_RANGES];
    if (m->left_begin >= m->left_end || f->left || f->record_count == 0 ||
        m->epoch < f->given_up.resumed_epoch)
        return;
    bool unheard = !f->merged && f->before_count > 0;
    const struct plan_range *base = unheard ? f->before : f->record;
    uint32_t base_count = unheard ? f->before_count : f->record_count;
    uint32_t from = m->left_begin, end = plan_range_end(&base[base_count - 1]);
    struct plan_range rest = {.first_token = from, .count = end - TD_MIN(from, end)};
    uint32_t count = rest.count ? plan_merge(base, base_count, &rest, 1, from, merged) : 0;
    if (count > 0) {
        memcpy(f->record, merged, count * sizeof *merged);
        f->record_count = plan_without_kv(f->record, count, m->refill_begin, m->refill_end);
    }
    f->merged = f->left = true;
    f->leaving = false;
    f->shown.left_tokens = rest.count;
    give_up(f);
    plan_stop(f);
}

static void set_record(struct flight *f, const struct plan_range *ranges, uint32_t count)
{
    f->record_count = count;
    memcpy(f->record, ranges, count * sizeof *ranges);
}

/* The rows and pieces that are still wanted end here; what was computed stays with the job. */
void plan_stop(struct flight *f)
{
    f->epoch++;
    drop_pending(f);
    uplink_void(f->agent->uplink, f->stream, UINT32_MAX);
    if (f->work)
        pipeline_fill(f->agent->pipeline, f->work, f->agent->fill_layers);
}

/* ---- from what is known to a plan ---- */

/* Bytes of KV a token and layer, in K and V together, with a piece's head. */
static double kv_size(const struct agent *a, uint8_t codec)
{
    const uint8_t *table = a->config.codec->table;
    const double bits[] = {[KV_L0] = 13.7, [KV_L1] = 8.07, [KV_L2] = 4.21 + 0.5 * (table[0] + table[1])};
    double values = 2.0 * a->model->params.kv_head_count * a->model->params.head_dim;
    return values * (codec < TD_COUNT(bits) ? bits[codec] : 16) / 8 +
           2.0 * KV_PIECE_HEAD_SIZE / KV_BLOCK_TOKENS;
}

/* The agent's codec, or L1 where the request does not take lossier ones. */
static uint8_t codec_for(const struct agent *a, enum kv_accept accept)
{
    uint8_t codec = a->config.codec->codec;
    return codec > KV_L1 && codec != KV_RAW && accept != KV_ACCEPT_ANY ? KV_L1 : codec;
}

void plan_fill_model(const struct agent *a, struct plan_model *m)
{
    *m = (struct plan_model){0};
    m->layer_count = a->model->params.layer_count;
    m->chunk_tokens = a->config.chunk_tokens;
    for (uint8_t type = 0; type < TD_COUNT(m->row_size); type++)
        m->row_size[type] = (double)hidden_wire_size(type, 1, a->model->params.embd_size);
    m->sealed_size = kv_size(a, KV_L0); /* as the cloud keeps it, mostly */
    estimates_fill(&a->estimates, clock_mono_us(), m);
}

static void fill_model(const struct flight *f, struct planner_state *s)
{
    const struct agent *a = f->agent;
    struct plan_model *m = &s->model;
    plan_fill_model(a, m);
    m->kv_size = kv_size(a, s->accept == KV_ACCEPT_EXACT && s->codec != KV_RAW ? KV_L0 : s->codec);
    m->queue_us = (double)f->queue_tokens * s->layer_count * m->cloud.base_ns * 1e-3 + (double)f->load_us;
}

static void fill_state(const struct flight *f, struct planner_state *s)
{
    const struct agent *a = f->agent;
    *s = (struct planner_state){
        .layer_count = a->model->params.layer_count,
        .layers_wanted = f->no_edge || f->local.made || !a->pipeline ? 0 : a->layers_wanted,
        .layers_held = f->no_edge || !a->pipeline ? 0 : a->layers,
        .cached_tokens = f->acked ? f->ack_cached
                         : f->no_cache || f->whole_ids
                             ? 0
                             : planner_guess_cached(f->turn.known_count, f->turn.ids_count),
        .cached_known = f->acked || f->whole_ids, /* what has lost the conversation has lost its KV */
        .prompt_count = f->turn.ids_count,
        .accept = f->accept,
        .codec = codec_for(a, f->accept),
        .hidden_dtype = a->config.hidden_dtype,
        .codec_mask = a->codec_mask,
        .hidden_mask = a->hidden_mask,
        .rows_need_f32 = f->rows_need_f32,
        .prefer = f->prefer,
        .private_layers = f->is_private ? a->config.private_min_layers : 0,
        .cloud_price = a->config.cloud_price,
    };
    fill_model(f, s);
    local_fill_state(f, s);
}

/* ---- plans ---- */

/* Reading blocks from the disk, in tokens that would be computed meanwhile. */
static uint32_t unread_tokens(const struct agent *a, uint32_t blocks, const struct plan_cost *compute)
{
    double layer_us = kv_disk_layer_us(local_kv_disk(a->kv));
    double tokens = layer_us > 0 ? layer_us * 1e3 / TD_MAX(compute->base_ns, 1.0) : READ_TOKENS_UNKNOWN;
    return (uint32_t)(blocks * TD_MIN(tokens, (double)KV_BLOCK_TOKENS));
}

/* Only the prompt is planned. Reply tokens that a new stream begins with are the cloud's, from their ids, as they were when it decoded them first:
 * with lossy forms that alone gives the same KV, and so the same text, again. */
static void make_plan(struct flight *f, struct plan *out)
{
    struct agent *a = f->agent;
    if (f->acked && f->ack_cached >= f->turn.ids_count) {
        *out =
            (struct plan){.range_count = 1,
                          .ranges = {{.first_token = f->ack_cached, .count = f->open_count - f->ack_cached}}};
        return;
    }
    struct planner_state state;
    fill_state(f, &state);
    uint32_t blocks = f->turn.ids_count / KV_BLOCK_TOKENS;
    /* what it has made tokens from is not sent: that would end the run that may go on */
    uint16_t *depths = a->kv && !f->local.made ? malloc((blocks + 1) * sizeof *depths) : NULL;
    if (depths) {
        uint32_t unread;
        state.depth_count = local_kv_depths(a->kv, f->turn.chain, blocks, depths, &unread);
        state.depths = depths;
        state.unread_tokens = unread > 0 ? unread_tokens(a, unread, &state.model.edge) : 0;
    }
    bool may_give_back = state.cached_known && !f->no_edge && !f->local.made && !f->is_private;
    if (may_give_back && a->fetcher && a->pipeline) {
        uint32_t begin = state.cached_tokens / KV_BLOCK_TOKENS;
        uint32_t count =
            begin < blocks ? fetcher_held(a->fetcher, f->turn.chain, begin, blocks, f->accept) : 0;
        state.sealed_until = count ? (begin + count) * KV_BLOCK_TOKENS : 0;
    }
    planner_plan(&state, out);
    out->model = state.model;
    free(depths);
}

/* The layers of the record again, from what the cloud has cached on: for a cloud that has lost the generation, when tokens of it are held already. */
static void plan_as_recorded(struct flight *f)
{
    uint32_t begin = f->ack_cached;
    struct plan_range none[1];
    f->plan = (struct plan){.send_begin = begin};
    f->plan.range_count = plan_merge(none, 0, f->record, f->record_count, 0, f->plan.ranges);
    while (f->plan.range_count > 0 && plan_range_end(&f->plan.ranges[0]) <= begin)
        memmove(f->plan.ranges, f->plan.ranges + 1, --f->plan.range_count * sizeof *f->plan.ranges);
    bool lost = f->is_private && f->plan.range_count > 0 && f->plan.ranges[0].first_token > begin;
    if (lost || (f->plan.range_count > 0 &&
                 f->plan.ranges[0].first_token < begin)) { /* lost: what the cloud had cached then */
        f->plan.ranges[0].count = plan_range_end(&f->plan.ranges[0]) - begin;
        f->plan.ranges[0].first_token = begin;
    }
}

/* A private prompt's plan leaves nothing of it to be computed from token ids, and sends no rows of fewer layers than was promised, whoever made it. */
static bool covers_private(const struct flight *f)
{
    const struct plan *p = &f->plan;
    if (p->range_count == 0 || p->ranges[0].first_token > f->ack_cached)
        return false;
    for (uint32_t i = 0; i < p->range_count; i++)
        if (p->ranges[i].first_token < f->turn.ids_count &&
            (p->ranges[i].layers < f->agent->config.private_min_layers ||
             p->ranges[i].codec == PLAN_CODEC_NONE))
            return false;
    return plan_range_end(&p->ranges[p->range_count - 1]) >= f->turn.ids_count;
}

void plan_failed(struct flight *f, int code)
{
    bool fits_alone = f->no_edge && f->turn.ids_count + KV_BLOCK_TOKENS <= f->agent->kv_tokens;
    if (code == -TD_ERR_UNSUPPORTED && fits_alone)
        flight_fail(
            f, -TD_ERR_FULL,
            "a private prompt needs memory of this device (--kv-memory) that others have taken; try again",
            1000);
    else if (code == -TD_ERR_UNSUPPORTED)
        flight_fail(
            f, code,
            "a private prompt needs its first layers computed on this device, which cannot do it now: "
            "too little memory (--kv-memory), or no form of KV and rows that the cloud takes",
            0);
    else
        flight_wait_again(f);
}

static uint32_t most_layers(const struct plan *p)
{
    uint32_t layers = 0;
    for (uint32_t i = 0; i < p->range_count; i++)
        if (p->ranges[i].codec != KV_SEALED)
            layers = TD_MAX(layers, p->ranges[i].layers);
    return layers;
}

static bool gives_back(const struct plan *p)
{
    bool any = false;
    for (uint32_t i = 0; i < p->range_count; i++)
        any |= p->ranges[i].layers > 0 && p->ranges[i].codec == KV_SEALED;
    return any;
}

/* Ranges of more layers than this device holds (another one began the generation, or no memory is left) become the cloud's; so do those that are
 * deeper than one before them, since a device that has run a token through fewer layers cannot go on behind it through more. */
static void cap_plan(struct flight *f)
{
    uint32_t held = f->work && !f->no_edge && !f->local.made ? f->agent->layers : 0;
    for (uint32_t i = 0; i < f->plan.range_count; i++) {
        struct plan_range *r = &f->plan.ranges[i];
        bool sealed = r->codec == KV_SEALED && f->work && !f->no_edge && fetcher_tag(f->agent->fetcher);
        if (sealed && r->layers > 0)
            continue;
        if (r->layers > held || r->codec == KV_SEALED)
            r->layers = r->codec = r->hidden_dtype = 0;
        else if (r->layers > 0)
            held = r->layers;
    }
    f->plan.layers = most_layers(&f->plan);
}

static int send_plan(struct flight *f)
{
    Tandem__Range ranges[LIMIT_RANGES], *pointers[LIMIT_RANGES];
    Tandem__Plan plan = TANDEM__PLAN__INIT;
    for (uint32_t i = 0; i < f->plan.range_count; i++) {
        const struct plan_range *r = &f->plan.ranges[i];
        ranges[i] = (Tandem__Range)TANDEM__RANGE__INIT;
        ranges[i].first_token = r->first_token;
        ranges[i].count = r->count;
        ranges[i].layers = r->layers;
        ranges[i].codec = r->codec;
        ranges[i].hidden_dtype = r->hidden_dtype;
        pointers[i] = &ranges[i];
    }
    struct planner_state state;
    fill_state(f, &state);
    struct planner_patience patience = planner_patience(&state, &f->plan, f->agent->flight_count);
    plan.rows_patience_ms = (uint32_t)(patience.rows_us * 1e-3);
    plan.rows_patience_token_us = (uint32_t)patience.rows_token_us;
    plan.kv_patience_ms = (uint32_t)(patience.kv_us * 1e-3);
    f->patient = plan.rows_patience_ms > 0;
    plan.resumes = f->given_up.resumed_epoch == f->epoch;
    if (plan.resumes && f->patient) /* what the device has to catch up on first */
        plan.rows_patience_ms += (uint32_t)(1e-3 * plan_model_edge_us(&state.model, f->plan.compute_begin,
                                                                      f->plan.send_begin, f->plan.layers));
    plan.epoch = f->epoch;
    plan.n_ranges = f->plan.range_count;
    plan.ranges = pointers;
    return uplink_send(f->agent->uplink, f->stream, FRAME_PLAN, &plan.base, NULL, 0);
}

/* Rows of ranges that the device runs through no layers, or through all, are not sent, but for the prompt's last: what it holds of them is not run again. */
static uint32_t first_row(const struct flight *f, uint32_t begin)
{
    const struct plan *p = &f->plan;
    for (uint32_t i = 0; i < p->range_count; i++) {
        const struct plan_range *r = &p->ranges[i];
        bool last = i + 1 == p->range_count, whole = r->layers == f->agent->model->params.layer_count;
        uint32_t end = plan_range_end(r);
        if (begin < r->first_token || begin >= end || (!whole && (last || r->layers > 0)))
            continue;
        begin = last ? TD_MAX(begin, (end - 1) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS) : end;
    }
    return begin;
}

/* Tell the cloud the plan, and set the prefill thread to work on it: rows and KV from these tokens on. */
static int carry_plan_out(struct flight *f, uint32_t rows_begin, uint32_t kv_begin)
{
    struct agent *a = f->agent;
    memcpy(f->before, f->record, f->record_count * sizeof *f->record);
    f->before_count = f->record_count;
    f->merged = f->before_count == 0;
    set_record(f, f->plan.ranges, f->plan.range_count);
    int rc = send_plan(f);
    if (rc < 0)
        return rc;
    f->planned = true;
    f->sent_epoch = f->epoch;
    f->leaving = false;
    f->shown.plan_count++;
    rows_begin = first_row(f, rows_begin);
    f->rows_until = rows_begin;
    wire_feed_pipeline(f, true);
    uint32_t deepest = most_layers(&f->plan);
    if ((deepest > 0 || gives_back(&f->plan)) && f->work) {
        struct pipeline_send send = {.epoch = f->epoch,
                                     .rows_begin = rows_begin,
                                     .kv_begin = kv_begin - kv_begin % KV_BLOCK_TOKENS,
                                     .range_count = f->plan.range_count};
        memcpy(send.ranges, f->plan.ranges, f->plan.range_count * sizeof *send.ranges);
        if (fetcher_tag(a->fetcher))
            memcpy(send.seal, fetcher_tag(a->fetcher), sizeof send.seal);
        f->edge_layers = TD_MAX(f->edge_layers, deepest);
        a->fill_layers = f->plan.layers ? f->plan.layers : a->fill_layers;
        f->local.run = 0; /* a send ends it */
        pipeline_send(a->pipeline, f->work, &send);
    } else if (f->plan.local && f->work) {
        a->fill_layers = a->layers;
        pipeline_fill(a->pipeline, f->work, a->layers);
        local_start(f);
    } else if (
        f->work) { /* where computing here does not pay it is not done on the quiet either, not while the cloud works */
        pipeline_fill(a->pipeline, f->work, f->plan.chosen ? 0 : a->fill_layers);
    }
    return 0;
}

/* Of a range's KV: the agent's level, or one that a request's fidelity or the cloud asked for instead. */
static const char *codec_name(const struct agent *a, uint8_t codec)
{
    static const char *const others[] = {
        [KV_RAW] = "raw", [KV_L0] = "l0", [KV_L1] = "l1", [KV_SEALED] = "sealed"};
    return codec == a->config.codec->codec ? a->config.codec->name
           : codec < TD_COUNT(others)      ? others[codec]
                                           : NULL;
}

static const char *why_not_chosen(const struct flight *f)
{
    bool given = f->agent->layers_wanted == 0 || (f->agent->layers_wanted != PLANNER_AUTO && !f->no_edge);
    return f->plan.chosen ? NULL : f->receiver.count > 0 ? "continued" : given ? "given" : "unable";
}

/* What the client is told of a plan, should it ask. */
static void show_plan(struct flight *f)
{
    static const char *const dtype_names[] = {
        [HIDDEN_F32] = "f32", [HIDDEN_F16] = "f16", [HIDDEN_INT8] = "int8"};
    const struct plan *p = &f->plan;
    struct api_plan *shown = &f->shown;
    *shown = (struct api_plan){.chosen = p->chosen,
                               .why = why_not_chosen(f),
                               .local = p->local,
                               .layers = p->layers,
                               .first_token = p->range_count ? p->ranges[0].first_token : 0,
                               .restored_tokens = p->restore_end - p->restore_begin,
                               .plan_count = shown->plan_count,
                               .left_tokens = shown->left_tokens};
    for (uint32_t i = 0; i < p->range_count; i++) {
        const struct plan_range *r = &p->ranges[i];
        if (r->first_token < f->turn.ids_count) /* else tokens of the reply so far */
            shown->token_count += r->count;
        if (r->layers == 0)
            continue;
        if (r->layers < f->agent->model->params.layer_count)
            shown->hidden_dtype = dtype_names[r->hidden_dtype];
        if (r->codec != PLAN_CODEC_NONE) {
            shown->kv_tokens += r->count;
            shown->codec = codec_name(f->agent, r->codec);
        }
    }
    if (!p->chosen)
        return;
    shown->first_token_ms = p->times.first_us * 1e-3;
    shown->t16_ms = p->times.t16_us * 1e-3;
    shown->cloud_first_token_ms = p->cloud_alone.first_us * 1e-3;
    shown->cloud_t16_ms = p->cloud_alone.t16_us * 1e-3;
    shown->edge_first_token_ms = p->device_alone.first_us * 1e-3;
    shown->edge_t16_ms = p->device_alone.t16_us * 1e-3;
    shown->edge_layer_us = p->model.edge.base_ns * 1e-3;
    shown->cloud_layer_us = p->model.cloud.base_ns * 1e-3;
    shown->uplink_mbit = p->model.rate_bytes_per_us * 8;
    shown->delay_ms = p->model.delay_us * 1e-3;
    shown->queue_ms = p->model.queue_us * 1e-3;
}

/* Plan anew with what is known now. */
int plan_again(struct flight *f)
{
    plan_stop(f);
    plan_open_work(f);
    agent_look_at_link(f->agent);
    if (f->receiver.count > 0 && f->record_count > 0 && f->ack_cached < f->turn.ids_count && !f->local.made) {
        plan_as_recorded(f);
        cap_plan(f);
    } else {
        f->no_edge |= !f->work; /* no memory for the job: the cloud does it */
        make_plan(f, &f->plan);
    }
    if (f->is_private && !covers_private(f))
        return -TD_ERR_UNSUPPORTED;
    show_plan(f);
    f->computed = TD_MAX(f->plan.compute_begin, f->plan.restore_end); /* at least */
    return carry_plan_out(f, f->plan.send_begin, f->plan.send_begin);
}

/* Tokens that the device was to see to, and now is not. */
static void count_left(struct flight *f, const struct plan_progress *at)
{
    f->shown.left_tokens = f->turn.ids_count - TD_MIN(at->kv, f->turn.ids_count);
}

/* The link came back, but perhaps not as it was. */
static void leave_if_better(struct flight *f, const struct plan_progress *at)
{
    struct planner_state state;
    struct plan left;
    if (f->agent->layers_wanted != PLANNER_AUTO || f->is_private)
        return;
    fill_state(f, &state);
    if (!planner_reconsider(&state, &f->plan, at, &left))
        return;
    count_left(f, at);
    f->plan = left;
}

/* The cloud has the generation and waits for the rest of its prompt: the plan that it has at hand goes on. */
int plan_go_on(struct flight *f, const Tandem__OpenAck *m)
{
    f->epoch = TD_MAX(f->epoch, m->epoch);
    plan_stop(f);
    plan_open_work(f);
    if (m->n_ranges == 0)
        return plan_again(f);
    for (size_t i = 0; i < m->n_ranges; i++) /* a peer's numbers: the job knows no more ids than these */
        if (m->ranges[i]->layers > 0 && m->ranges[i]->first_token + m->ranges[i]->count > f->work_count)
            return plan_again(f);
    f->plan = (struct plan){.range_count = (uint32_t)m->n_ranges};
    for (uint32_t i = 0; i < f->plan.range_count; i++)
        f->plan.ranges[i] = (struct plan_range){.first_token = m->ranges[i]->first_token,
                                                .count = m->ranges[i]->count,
                                                .layers = m->ranges[i]->layers,
                                                .codec = (uint8_t)m->ranges[i]->codec,
                                                .hidden_dtype = (uint8_t)m->ranges[i]->hidden_dtype};
    set_record(f, f->plan.ranges, f->plan.range_count);
    cap_plan(f);
    if (f->is_private && !covers_private(f))
        return plan_again(f);
    struct plan_progress at = {
        .computed = m->hidden_tokens, .rows = m->hidden_tokens, .kv = TD_MIN(m->kv_tokens, m->hidden_tokens)};
    leave_if_better(f, &at);
    return carry_plan_out(f, at.rows, at.kv);
}

/* ---- under way ---- */

static void progress_of(const struct flight *f, struct plan_progress *at)
{
    uint32_t begin = f->plan.ranges[0].first_token;
    *at = (struct plan_progress){.computed = TD_MAX(f->rows_until, begin),
                                 .catch_up = f->rows_until - TD_MIN(f->computed, f->rows_until),
                                 .rows = TD_MAX(f->ingested.hidden_tokens, begin),
                                 .run = TD_MAX(f->ingested.run_tokens, begin),
                                 .kv = TD_MAX(f->ingested.kv_tokens, begin)};
}

/* With a fixed k: k may have been 0 on a guess, and what is cached make the device worth its while; and what is known to be lost may be restored. */
static bool fixed_plan_fits(struct flight *f)
{
    struct plan fresh;
    if (!f->agent->pipeline || f->no_edge)
        return true;
    if (!planner_sends(&f->plan) || f->plan.send_begin != f->ack_cached)
        return false;
    make_plan(f, &fresh);
    return (fresh.restore_end > fresh.restore_begin) == (f->plan.restore_end > f->plan.restore_begin);
}

bool plan_fits_ack(struct flight *f)
{
    if (!f->planned)
        return false;
    if (f->plan.local) /* whatever the cloud has: it does all that it lacks, and whoever is first counts */
        return true;
    if (f->agent->layers_wanted != PLANNER_AUTO)
        return fixed_plan_fits(f);
    if (planner_sends(&f->plan) && f->plan.send_begin != f->ack_cached)
        return false;
    struct planner_state state;
    struct plan fresh;
    struct plan_progress at;
    fill_state(f, &state);
    make_plan(f, &fresh);
    progress_of(f, &at);
    at.rows = TD_MAX(at.rows, f->ack_cached);
    at.run = TD_MAX(at.run, f->ack_cached);
    at.kv = TD_MAX(at.kv, f->ack_cached);
    return !planner_switch(&state, &f->plan, &at, &fresh);
}

static bool under_way(const struct flight *f)
{
    const struct plan *p = &f->plan;
    if (f->state != FLIGHT_OPEN || !f->acked || !f->planned || !planner_sends(p) || f->finished)
        return false;
    return f->ingested.epoch == f->epoch &&
           TD_MIN(f->ingested.hidden_tokens, f->ingested.kv_tokens) < f->turn.ids_count;
}

/* Rows have come, and it was told for how long to wait for more: it goes on by itself sooner than it can be told to. */
static bool cloud_helps_itself(const struct flight *f)
{
    return f->patient && f->ingested.epoch == f->epoch && f->ingested.hidden_tokens > f->plan.send_begin;
}

/* What is under way keeps the link so long that a new connection is sooner there. The plan is then thought over again. */
static bool restart_link(struct agent *a, uint64_t now_us)
{
    if (estimates_backlog_us(&a->estimates, now_us) < BACKLOG_US)
        return false;
    double rate = estimates_rate(&a->estimates, now_us);
    estimates_set_rate(&a->estimates, rate);
    uplink_restart(a->uplink, (uint64_t)(rate * 1e6));
    return true;
}

/* The rest of the prompt was left to the cloud, which knows it, and all that was sent before has arrived since: the link, or whoever stumbled, is up again. */
static bool may_resume(const struct flight *f)
{
    const struct agent *a = f->agent;
    bool known = f->left || f->ingested.epoch == f->epoch;
    if (!f->given_up.now || !known || f->given_up.resumes >= RESUMES_MAX || a->layers_wanted != PLANNER_AUTO)
        return false;
    return f->state == FLIGHT_OPEN && f->acked && f->work && !f->no_edge && !f->is_private && !f->finished &&
           !f->local.made && f->receiver.count == 0 && f->ingested.run_tokens < f->turn.ids_count &&
           a->estimates.acked_size >= f->given_up.sent_size;
}

/* True: it was taken up again, or could not be told. */
static bool resume(struct flight *f)
{
    struct planner_state state;
    struct plan fresh;
    struct plan_progress at = {.computed = f->computed, .run = f->ingested.run_tokens};
    fill_state(f, &state);
    if (!planner_resume(&state, &f->given_up.plan, f->record, f->record_count, &at, &fresh))
        return false;
    plan_stop(f);
    fresh.model = state.model;
    f->plan = fresh;
    f->given_up.now = f->left = false;
    f->given_up.resumes++;
    f->given_up.resumed_epoch = f->epoch;
    f->shown.left_tokens -= TD_MIN(f->turn.ids_count - fresh.send_begin, f->shown.left_tokens);
    if (carry_plan_out(f, fresh.send_begin, fresh.send_begin) < 0)
        flight_wait_again(f);
    return true;
}

bool plan_reconsider(struct flight *f, uint64_t now_us)
{
    struct agent *a = f->agent;
    if (may_resume(f) && now_us - f->reconsidered_us >= RECONSIDER_US) {
        f->reconsidered_us = now_us;
        if (resume(f))
            return f->state == FLIGHT_OPEN;
    }
    if (f->given_up.now && f->left)
        return f->state == FLIGHT_OPEN && f->receiver.count == 0;
    if (f->leaving && f->state == FLIGHT_OPEN && f->ingested.epoch != f->epoch) {
        restart_link(a, now_us); /* the cloud has not heard of it yet */
        return true;
    }
    if (a->layers_wanted != PLANNER_AUTO || f->is_private || !under_way(f))
        return false;
    if (now_us - f->reconsidered_us < RECONSIDER_US)
        return true;
    f->reconsidered_us = now_us;
    struct planner_state state;
    struct plan left;
    struct plan_progress at;
    fill_state(f, &state);
    progress_of(f, &at);
    if (!planner_reconsider(&state, &f->plan, &at, &left))
        return true;
    bool told = cloud_helps_itself(f);
    if (!told && restart_link(a, now_us))
        return true;
    count_left(f, &at);
    give_up(f);
    plan_stop(f);
    left.model = state.model;
    f->plan = left;
    if (carry_plan_out(f, at.rows, at.kv) < 0)
        flight_wait_again(f);
    else
        f->leaving = !told;
    return f->state == FLIGHT_OPEN;
}
