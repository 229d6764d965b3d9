/* flight_wire: a flight's frames: OPEN, PLAN, GENERATE, HIDDEN and KV_BLOCK out; OPEN_ACK, TOKEN, DONE, ERROR and the others in.
 *
 * The first opening is one flight of frames: OPEN + PLAN + GENERATE, with a plan made on a guess of what the cloud has cached, and the first rows behind
 * them. OPEN_ACK tells what it really has; if the guess was wrong the plan is made again with the next epoch. A stream that goes on with an earlier
 * generation waits for OPEN_ACK before it plans: the cloud may still have everything.
 *
 * Epochs only grow over a flight's life, also over its streams: what the prefill thread made for an earlier one is told apart by that number. */
#include "edge/agent_internal.h"
#include "shared/crypto.h"
#include "shared/log.h"
#include <stdio.h>
#include <stdlib.h>

#define MODULE "edge"

/* ---- the prefill job ---- */

/* The prefill thread is gone at shutdown. */
static void taken(struct agent *a, size_t size)
{
    if (a->pipeline)
        pipeline_taken(a->pipeline, size);
}

static void drop_pending(struct flight *f)
{
    while (f->pending) {
        struct pipeline_message *next = f->pending->next;
        taken(f->agent, f->pending->size);
        pipeline_message_free(f->pending);
        f->pending = next;
    }
}

static void open_work(struct flight *f)
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
    f->work = pipeline_open(a->pipeline, &work);
    f->work_count = f->turn.ids_count;
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
    pipeline_append(f->agent->pipeline, f->work, f->receiver.ids + known, count - known);
    f->work_count = total;
}

void wire_close_work(struct flight *f, bool keep)
{
    drop_pending(f);
    if (f->work)
        pipeline_close(f->agent->pipeline, f->work, keep);
    f->work = NULL;
}

/* ---- the record ---- */

/* What INGESTED has told goes into the record: where the last plan began, and whose KV the cloud made itself. */
static void settle_record(struct flight *f)
{
    const Tandem__Ingested *m = &f->ingested;
    struct plan_range merged[LIMIT_RANGES];
    if (!f->merged && f->before_count > 0 && m->epoch == f->epoch) {
        uint32_t begin = m->plan_begin - m->plan_begin % KV_BLOCK_TOKENS;
        uint32_t count =
            plan_merge(f->before, f->before_count, f->plan.ranges, f->plan.range_count, begin, merged);
        if (count > 0)
            memcpy(f->record, merged, count * sizeof *merged), f->record_count = count;
        f->merged = true;
    }
    f->record_count = plan_without_kv(f->record, f->record_count, m->refill_begin, m->refill_end);
}

static void set_record(struct flight *f, const struct plan_range *ranges, uint32_t count)
{
    f->record_count = count;
    memcpy(f->record, ranges, count * sizeof *ranges);
}

/* The rows and pieces that are still wanted end here; what was computed stays with the job. */
static void stop_sending(struct flight *f)
{
    f->valid_since = ++f->epoch;
    drop_pending(f);
    uplink_void(f->agent->uplink, f->stream, UINT32_MAX);
    if (f->work)
        pipeline_fill(f->agent->pipeline, f->work, f->agent->layers);
}

/* The cloud has ended the stream. */
static void stream_ended(struct flight *f)
{
    stop_sending(f);
    f->stream = 0;
    f->planned = f->acked = false;
    settle_record(f);
}

void wire_leave_stream(struct flight *f)
{
    uint32_t stream = f->stream;
    if (!stream)
        return;
    stream_ended(f);
    uplink_close(f->agent->uplink, stream);
}

/* ---- plans ---- */

/* Only the prompt is planned. Reply tokens that a new stream begins with are the cloud's, from their ids, as they were when it decoded them first:
 * with lossy forms that alone gives the same KV, and so the same text, again. */
static void make_plan(struct flight *f)
{
    struct agent *a = f->agent;
    if (f->acked && f->ack_cached >= f->turn.ids_count) {
        f->plan =
            (struct plan){.range_count = 1,
                          .ranges = {{.first_token = f->ack_cached, .count = f->open_count - f->ack_cached}}};
        return;
    }
    uint32_t cached = f->acked      ? f->ack_cached
                      : f->no_cache ? 0
                                    : planner_guess_cached(f->turn.known_count, f->turn.ids_count);
    uint32_t chain_count = f->turn.ids_count / KV_BLOCK_TOKENS;
    struct planner_state state = {
        .layer_count = a->model->params.layer_count,
        .layers_wanted = f->no_edge || !a->pipeline ? 0 : a->layers,
        .held_tokens =
            a->kv ? KV_BLOCK_TOKENS * local_kv_held(a->kv, f->turn.chain, chain_count, a->layers) : 0,
        .cached_tokens = cached,
        .cached_known = f->acked,
        .prompt_count = f->turn.ids_count,
        .accept = f->accept,
        .codec = a->config.codec,
        .hidden_dtype = a->config.hidden_dtype,
        .codec_mask = a->codec_mask,
        .hidden_mask = a->hidden_mask,
        .rows_need_f32 = f->rows_need_f32,
    };
    planner_plan(&state, &f->plan);
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
    if (f->plan.range_count > 0 && f->plan.ranges[0].first_token < begin) {
        f->plan.ranges[0].count = plan_range_end(&f->plan.ranges[0]) - begin;
        f->plan.ranges[0].first_token = begin;
    }
}

static uint32_t most_layers(const struct plan *p)
{
    uint32_t layers = 0;
    for (uint32_t i = 0; i < p->range_count; i++)
        layers = TD_MAX(layers, p->ranges[i].layers);
    return layers;
}

/* Ranges of more layers than this device holds (another one began the generation, or no memory is left) become the cloud's. */
static void cap_plan(struct flight *f)
{
    uint32_t held = f->work && !f->no_edge ? f->agent->layers : 0;
    for (uint32_t i = 0; i < f->plan.range_count; i++)
        if (f->plan.ranges[i].layers > held)
            f->plan.ranges[i].layers = f->plan.ranges[i].codec = f->plan.ranges[i].hidden_dtype = 0;
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
    plan.epoch = f->epoch;
    plan.n_ranges = f->plan.range_count;
    plan.ranges = pointers;
    return uplink_send(f->agent->uplink, f->stream, FRAME_PLAN, &plan.base, NULL, 0);
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
    wire_feed_pipeline(f, true);
    if (f->plan.layers > 0) {
        uint32_t committed;
        struct pipeline_send send = {.epoch = f->epoch,
                                     .valid_since = f->valid_since,
                                     .rows_begin = rows_begin,
                                     .kv_begin = kv_begin - kv_begin % KV_BLOCK_TOKENS,
                                     .range_count = f->plan.range_count};
        memcpy(send.ranges, f->plan.ranges, f->plan.range_count * sizeof *send.ranges);
        f->edge_layers = TD_MAX(f->edge_layers, f->plan.layers);
        pipeline_send(a->pipeline, f->work, &send, 0, &committed);
    } else if (f->work) {
        pipeline_fill(a->pipeline, f->work, a->layers);
    }
    return 0;
}

/* Plan anew with what is known now. */
static int plan_again(struct flight *f)
{
    stop_sending(f);
    open_work(f);
    if (f->receiver.count > 0 && f->record_count > 0 && f->ack_cached < f->turn.ids_count) {
        plan_as_recorded(f);
        cap_plan(f);
    } else {
        f->no_edge |= !f->work; /* no memory for the job: the cloud does it */
        make_plan(f);
    }
    return carry_plan_out(f, f->plan.send_begin, f->plan.send_begin);
}

/* The cloud has the generation and waits for the rest of its prompt: the plan that it has at hand goes on. */
static int go_on_with_plan(struct flight *f, const Tandem__OpenAck *m)
{
    f->epoch = TD_MAX(f->epoch, m->epoch);
    stop_sending(f);
    open_work(f);
    if (m->n_ranges == 0)
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
    return carry_plan_out(f, m->hidden_tokens, TD_MIN(m->kv_tokens, m->hidden_tokens));
}

/* ---- opening ---- */

static int send_open(struct flight *f)
{
    struct gen_receiver *r = &f->receiver;
    uint32_t known = 0, held = r->count, prompt = f->turn.ids_count;
    uint8_t known_hash[TD_HASH_SIZE], held_hash[TD_HASH_SIZE];
    Tandem__Open open = TANDEM__OPEN__INIT;
    if (f->turn.has_turn && f->turn.turn.version > 0 && !f->whole_ids && held == 0)
        known = f->turn.known_count;
    open.request_id = (ProtobufCBinaryData){GEN_REQUEST_ID_SIZE, r->request_id};
    open.attempt = r->attempt;
    open.conversation = f->turn.conversation;
    open.prompt_count = prompt;
    open.held_count = held;
    open.accept = (uint32_t)f->accept;
    open.no_cache = f->no_cache;
    open.resumes = true;
    if (known > 0) {
        ids_hash(f->turn.ids, known, known_hash);
        open.conversation_length = known;
        open.conversation_hash = (ProtobufCBinaryData){TD_HASH_SIZE, known_hash};
    }
    if (held > 0) {
        ids_hash(r->ids, held, held_hash);
        open.held_hash = (ProtobufCBinaryData){TD_HASH_SIZE, held_hash};
    }
    size_t size = ((size_t)prompt - known + held) * 4;
    uint8_t *ids = malloc(size + 1);
    if (!ids)
        return -TD_ERR_NOMEM;
    for (uint32_t i = known; i < prompt; i++)
        store_le32(ids + (size_t)(i - known) * 4, (uint32_t)f->turn.ids[i]);
    for (uint32_t i = 0; i < held; i++)
        store_le32(ids + (size_t)(prompt - known + i) * 4, (uint32_t)r->ids[i]);
    int rc = uplink_open(f->agent->uplink, f, &open, ids, size, &f->stream);
    crypto_wipe(ids, size);
    free(ids);
    f->open_count = prompt + held;
    f->ingested = (Tandem__Ingested)TANDEM__INGESTED__INIT;
    return rc;
}

static int send_generate(struct flight *f)
{
    const struct api_sampling *s = &f->sampling;
    uint8_t bias[8 * TD_COUNT(s->bias_ids)];
    Tandem__Generate g = TANDEM__GENERATE__INIT;
    g.token_count_max = f->token_count_max;
    g.temperature = s->temperature;
    g.top_k = s->top_k;
    g.top_p = s->top_p;
    g.min_p = s->min_p;
    g.repetition_penalty = s->repetition_penalty;
    g.repetition_window = s->repetition_window;
    g.presence_penalty = s->presence_penalty;
    g.frequency_penalty = s->frequency_penalty;
    g.seed = s->seed;
    g.logprobs = s->logprobs;
    g.top_logprobs = s->top_logprobs;
    g.ignore_end = f->ignore_end;
    for (uint32_t i = 0; i < s->bias_count; i++) {
        uint32_t bits;
        memcpy(&bits, &s->bias_values[i], sizeof bits);
        store_le32(bias + 8 * i, (uint32_t)s->bias_ids[i]);
        store_le32(bias + 8 * i + 4, bits);
    }
    return uplink_send(f->agent->uplink, f->stream, FRAME_GENERATE, &g.base, bias, 8 * (size_t)s->bias_count);
}

int wire_try_open(struct flight *f)
{
    bool first = !f->opened; /* else the cloud may still have it: OPEN_ACK tells */
    if (uplink_state(f->agent->uplink) != UPLINK_READY)
        return -TD_ERR_CLOSED;
    int rc = send_open(f);
    if (rc < 0) {
        f->stream = 0;
        return rc;
    }
    f->state = FLIGHT_OPEN;
    f->opened = true;
    if (first)
        rc = plan_again(f);
    if (rc == 0)
        rc = send_generate(f);
    if (rc < 0) { /* the connection is overfull or ending: once more when there is room */
        gen_reopen(&f->receiver, clock_wall_us());
        flight_wait_again(f);
    }
    return rc;
}

/* ---- bulk ---- */

static int send_message(struct flight *f, struct pipeline_message *m)
{
    struct uplink *u = f->agent->uplink;
    if (m->type == FRAME_HIDDEN) {
        Tandem__Hidden h = TANDEM__HIDDEN__INIT;
        h.epoch = f->epoch;
        h.first_token = m->first_token;
        h.count = m->count;
        h.layer = m->layer;
        h.dtype = m->hidden_dtype;
        return uplink_send_bulk(u, f->stream, FRAME_HIDDEN, &h.base, f->epoch, m->payload, m->size);
    }
    Tandem__KvBlock k = TANDEM__KV_BLOCK__INIT;
    k.epoch = f->epoch;
    k.block_index = m->block_index;
    k.layer = m->layer;
    k.is_value = m->is_value;
    return uplink_send_bulk(u, f->stream, FRAME_KV_BLOCK, &k.base, f->epoch, m->payload, m->size);
}

static void account(struct flight *f, const struct pipeline_message *m)
{
    struct edge_metrics *metrics = &f->agent->metrics;
    f->uplink_size += m->size;
    f->uplink_raw_size += m->raw_size;
    metric_add(metrics->uplink_bytes, (double)m->size);
    metric_add(metrics->uplink_raw_bytes, (double)m->raw_size);
}

static void give_prompt_up(struct flight *f)
{
    f->no_edge = true;
    if (f->stream && plan_again(f) < 0)
        flight_wait_again(f);
}

void wire_flush(struct flight *f)
{
    while (f->pending && f->stream) {
        struct pipeline_message *m = f->pending;
        int rc = send_message(f, m);
        if (rc == -TD_ERR_FULL)
            return;
        if (rc == -TD_ERR_LIMIT) {
            log_warn(MODULE,
                     "the cloud's window is too small for this model's rows: it computes the prompt alone");
            give_prompt_up(f);
            return;
        }
        f->pending = m->next;
        if (rc == 0) {
            account(f, m);
            m->payload = NULL;
        }
        taken(f->agent, m->size);
        pipeline_message_free(m);
    }
}

void wire_pipeline_event(struct flight *f, struct pipeline_event *e)
{
    if (e->cost.tokens > 0) {
        f->edge_us += e->cost.compute_us;
        f->edge_tokens += e->cost.tokens;
        metric_add(f->agent->metrics.prefill_tokens, e->cost.tokens);
    }
    if (f->state != FLIGHT_OPEN || !f->stream || e->epoch < f->valid_since)
        return;
    struct pipeline_message **last = &f->pending;
    switch (e->type) {
    case PIPELINE_MESSAGES:
        while (*last)
            last = &(*last)->next;
        *last = e->messages;
        e->messages = NULL;
        wire_flush(f);
        break;
    case PIPELINE_SENT:
        break;
    case PIPELINE_FAILED:
        if (e->rows_do_not_fit) {
            f->rows_need_f32 = true;
            if (plan_again(f) < 0)
                flight_wait_again(f);
        } else {
            log_warn(MODULE, "the device cannot prefill this prompt (%s): the cloud computes it",
                     td_status_text(e->code));
            give_prompt_up(f);
        }
        break;
    }
}

/* ---- frames of the cloud ---- */

static int on_open_ack(struct flight *f, const Tandem__OpenAck *m)
{
    if (m->attempt != f->receiver.attempt)
        return 0;
    if (m->need_ids) {
        stream_ended(f);
        f->whole_ids = true;
        f->opened = false;
        gen_reopen(&f->receiver, clock_wall_us());
        flight_wait_again(f);
        flight_kick(f);
        return 0;
    }
    if (f->acked || m->cached_tokens >= f->open_count || m->cached_tokens % KV_BLOCK_TOKENS != 0)
        return -TD_ERR_PROTOCOL;
    f->acked = true;
    f->deadline_us = 0;
    f->ack_cached = m->cached_tokens;
    if (!f->started) {
        f->cached_tokens = m->cached_tokens;
        f->cached_memory = m->cached_memory;
        f->cached_disk = m->cached_disk;
    }
    if (m->resumed) {
        metric_add(f->agent->metrics.resumed, 1);
        if (!m->plan_wanted) {
            stop_sending(f);
        } else if (go_on_with_plan(f, m) < 0) {
            flight_wait_again(f);
            return 0;
        }
    } else if (!f->planned || (f->plan.layers > 0 && f->plan.send_begin != m->cached_tokens) ||
               (f->plan.layers == 0 && f->agent->pipeline && !f->no_edge)) {
        /* The last: k was 0 on a guess; what is really cached may make the device worth its while. */
        if (plan_again(f) < 0) {
            flight_wait_again(f);
            return 0;
        }
    }
    flight_start_sink(f);
    return 0;
}

#define LOGPROBS_A_FRAME 512u

/* Logprobs of the last `count` tokens of the frame. */
static bool deliver_with_logprobs(struct flight *f, const Tandem__Token *m, const int32_t *ids,
                                  uint32_t count)
{
    struct api_logprob_in in[LOGPROBS_A_FRAME];
    if (m->n_logprobs < count || count > LOGPROBS_A_FRAME)
        return flight_deliver(f, ids, count, NULL);
    for (uint32_t i = 0; i < count; i++) {
        const Tandem__TokenLogprobs *l = m->logprobs[m->n_logprobs - count + i];
        in[i] = (struct api_logprob_in){
            .logprob = l->logprob,
            .top_count = (uint32_t)TD_MIN(l->n_top_ids, l->n_top_logprobs),
            .top_ids = l->top_ids,
            .top_logprobs = l->top_logprobs,
        };
    }
    return flight_deliver(f, ids, count, in);
}

static void break_off(struct flight *f, const char *what)
{
    char text[160];
    snprintf(text, sizeof text, "the cloud sent %s", what);
    log_warn(MODULE, "%s; the request ends", text);
    flight_fail(f, -TD_ERR_PROTOCOL, text, 0);
}

static int on_token(struct flight *f, const Tandem__Token *m, struct span payload)
{
    if (f->finished)
        return 0;
    uint32_t before = f->receiver.count;
    int fresh = gen_receive_tokens(&f->receiver, m->attempt, m->index, payload);
    if (fresh < 0) {
        break_off(f, "reply tokens that do not follow those before");
        return 0;
    }
    uint32_t vocab_count = tokenizer_vocab_count(f->agent->tokenizer);
    for (int i = 0; i < fresh; i++)
        if ((uint32_t)f->receiver.ids[before + (uint32_t)i] >= vocab_count) {
            break_off(f, "a token that the model does not have");
            return 0;
        }
    if (fresh == 0)
        return 0;
    wire_feed_pipeline(f, false);
    if (flight_start_sink(f))
        deliver_with_logprobs(f, m, f->receiver.ids + before, (uint32_t)fresh);
    return 0;
}

static int on_done(struct flight *f, const Tandem__Done *m)
{
    if (m->attempt != f->receiver.attempt)
        return 0;
    stream_ended(f);
    f->receiver.done = true;
    if (!f->finished && m->completion_tokens != f->receiver.count) {
        break_off(f, "the end of a reply before all of its tokens");
        return 0;
    }
    if (m->timings) {
        struct api_timings *t = &f->timings;
        t->queue_ms = (double)m->timings->queue_us * 1e-3;
        t->load_ms = (double)m->timings->load_us * 1e-3;
        t->cloud_prefill_ms = (double)m->timings->prefill_us * 1e-3;
        t->cloud_prefill_tokens = m->timings->prefill_tokens;
        t->recomputed_tokens = m->timings->recomputed_tokens;
    }
    flight_finish(f, f->finished ? FINISH_STOP : m->finish);
    return 0;
}

static int on_error(struct flight *f, const Tandem__Error *m)
{
    int code = m->code > 0 && m->code <= INT16_MAX ? -(int)m->code : -TD_ERR_INTERNAL;
    char text[256];
    stream_ended(f);
    if (m->retry && code == -TD_ERR_CLOSED && !f->finished) { /* that node is leaving: the next one goes on */
        gen_reopen(&f->receiver, clock_wall_us());
        flight_wait_again(f);
        return 0;
    }
    snprintf(text, sizeof text, "%.250s", m->text[0] ? m->text : td_status_text(code));
    for (unsigned char *p = (unsigned char *)text; *p; p++)
        if (*p < 0x20 || *p > 0x7e)
            *p = '?';
    if (f->finished)
        flight_finish(f, FINISH_STOP);
    else
        flight_fail(f, code, text, m->retry ? m->retry_after_ms : 0);
    return 0;
}

int wire_frame(struct flight *f, const struct wire_frame *frame)
{
    if (f->state != FLIGHT_OPEN)
        return 0;
    switch (frame->type) {
    case FRAME_OPEN_ACK:
        return on_open_ack(f, frame->open_ack);
    case FRAME_TOKEN:
        return on_token(f, frame->token, frame->payload);
    case FRAME_DONE:
        return on_done(f, frame->done);
    case FRAME_ERROR:
        return on_error(f, frame->error);
    case FRAME_CANCEL:
        stream_ended(f);
        flight_fail(f, -TD_ERR_CANCELLED, "the cloud cancelled the request", 0);
        return 0;
    case FRAME_NEED: /* something was damaged on its way: the cloud has the ids, it is the sooner one */
        give_prompt_up(f);
        return 0;
    case FRAME_INGESTED:
        f->ingested = *frame->ingested; /* numbers only */
        settle_record(f);
        return 0;
    default: /* KV_BLOCK that nobody fetched */
        return -TD_ERR_PROTOCOL;
    }
}
