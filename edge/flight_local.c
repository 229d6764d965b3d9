/* flight_local: tokens that the device makes itself, where it holds the whole model. While the cloud does the request as ever (k = 0), the prefill thread runs
 * the prompt through all layers and draws tokens; each index is whoever's is first, and the receiver's list is what the client has.
 *
 *     start --> the device ahead, at most LOCAL_LEAD tokens --cloud overtakes--> stopped: the rest is the cloud's
 *                 |                          \--cloud says another token--> stopped; opened again with what is held (higher attempt)
 *                 +--the reply is whole--> `done`; the stream trails until the cloud has said the same, and both keep the same conversation
 *
 * Without the cloud (--offline continue) the device does the same, from any token on and without a bound: it runs what it has of the prompt and the reply
 * through the layers that it has not run them through, and goes on. When the cloud is back the flight is opened again with all tokens held, and its first
 * token stops the device. One that was ahead when the link was lost goes on at once, and until it is overtaken.
 *
 * Sampling is a pure function (kernels/sampler.h), so with equal arithmetic and nothing lossy both say the same, and the cloud's tokens only confirm
 * what is held. Where they differ the client's text counts: the cloud goes on from that, as after a lost link. */
#include "edge/agent_internal.h"
#include "shared/log.h"

#define MODULE     "edge"
#define LOCAL_LEAD 64u     /* tokens that the device is ahead of the cloud at most */
#define AWAY_US    500000u /* a link that was lost is waited for so long, before the device goes on by itself */

/* ---- planning ---- */

void local_fill_state(const struct flight *f, struct planner_state *s)
{
    const struct agent *a = f->agent;
    bool can = a->pipeline && pipeline_decodes(a->pipeline) && !f->no_edge && f->receiver.count == 0 &&
               f->turn.ids_count + LOCAL_LEAD <= a->kv_tokens;
    s->local = can ? a->config.local : LOCAL_OFF;
    s->local_share = 1;
    for (const struct flight *o = a->flights; o; o = o->next) {
        if (o == f)
            continue;
        if (o->local.run && o->local.made)
            s->local_share++;
        else if (o->local.run)
            s->local_queue_us += o->local.expects_us;
        else if (o->state == FLIGHT_OPEN && o->plan.layers > 0 && o->rows_until < o->turn.ids_count)
            s->local_queue_us += o->plan.times.edge_us;
    }
}

/* ---- the run ---- */

/* Ids that the prefill thread may get to. */
static uint32_t until(const struct flight *f)
{
    if (f->local.leads || (f->local.offline && f->state == FLIGHT_WAITING))
        return f->turn.ids_count + f->token_count_max;
    return f->turn.ids_count + TD_MIN(f->token_count_max, f->receiver.confirmed + LOCAL_LEAD);
}

void local_start(struct flight *f)
{
    struct agent *a = f->agent;
    struct td_error err;
    if (f->local.run || !f->work || f->finished || f->receiver.count >= f->token_count_max)
        return;
    struct pipeline_decode decode = {.run = f->local.run_last + 1,
                                     .prompt_count = f->turn.ids_count,
                                     .until = until(f),
                                     .ignore_end = f->ignore_end,
                                     .reply_only = f->is_private,
                                     .sampling = f->sampling};
    if (sampler_check(&decode.sampling, &err) < 0 || pipeline_decode(a->pipeline, f->work, &decode) < 0)
        return; /* the cloud says what is wrong, or does it alone */
    f->local.run = f->local.run_last = decode.run;
    f->local.expects_us = f->plan.device_alone.edge_us;
    f->local.held = KV_BLOCK_TOKENS *
                    local_kv_held(a->kv, f->turn.chain, (f->turn.ids_count - 1) / KV_BLOCK_TOKENS, a->layers);
}

void local_stop(struct flight *f)
{
    if (f->local.run && f->work && f->agent->pipeline)
        pipeline_decode_stop(f->agent->pipeline, f->work);
    f->local.run = 0;
    f->local.offline = f->local.leads = false;
}

void local_follow(struct flight *f, bool overtaken)
{
    if (!f->local.run)
        return;
    if (overtaken || (f->local.offline && !f->local.leads)) {
        local_stop(f);
        return;
    }
    f->local.offline = false;
    pipeline_decode_until(f->agent->pipeline, f->work, until(f));
}

/* ---- without the cloud ---- */

/* All layers of the context that the device lacks, then a token. */
static double context_us(const struct flight *f)
{
    const struct agent *a = f->agent;
    struct plan_model m = {.layer_count = a->layers};
    uint32_t blocks = f->turn.ids_count / KV_BLOCK_TOKENS;
    estimates_fill(&a->estimates, clock_mono_us(), &m);
    uint32_t held = KV_BLOCK_TOKENS * local_kv_held(a->kv, f->turn.chain, blocks, a->layers);
    return plan_model_edge_us(&m, held, f->turn.ids_count + f->receiver.count, a->layers) + m.edge_decode_us;
}

/* The list of tokens is a whole reply, whoever made them: nothing follows an end token. */
static bool finish_if_whole(struct flight *f)
{
    const struct gen_receiver *r = &f->receiver;
    bool ends = r->count > 0 && !f->ignore_end && tokenizer_is_end(f->agent->tokenizer, r->ids[r->count - 1]);
    if (!ends && r->count < f->token_count_max)
        return false;
    flight_finish(f, ends ? FINISH_STOP : FINISH_LENGTH);
    return true;
}

bool local_offline(struct flight *f, uint64_t now_us)
{
    struct agent *a = f->agent;
    bool away = a->away_since_us && now_us >= a->away_since_us + AWAY_US;
    if (a->config.offline != OFFLINE_CONTINUE || f->state != FLIGHT_WAITING || f->finished)
        return false;
    if (f->local.offline || !away || uplink_refused(a->uplink))
        return f->local.offline && f->local.run;
    if (finish_if_whole(f)) /* only the word that it ends was lost with the link */
        return true;
    if (f->local.run_last && !f->local.run) /* it may have drawn tokens that came too late to count */
        wire_close_work(f, false);
    plan_open_work(f);
    wire_feed_pipeline(f, true);
    f->local.offline = true;
    f->local.leads = f->local.run != 0;
    if (f->local.run)
        pipeline_decode_until(a->pipeline, f->work, until(f));
    else
        local_start(f);
    if (!f->local.was_offline) {
        f->local.offline_from = f->receiver.count;
        f->local.offline_us = context_us(f);
    }
    f->local.was_offline = true;
    log_info(MODULE, "the cloud is away: the device goes on, in about %.0f ms", f->local.offline_us * 1e-3);
    return f->local.run;
}

/* A device that is ahead goes on at once, from what it has; only to begin is worth waiting for a link that may be back in a moment. */
void local_lost(struct flight *f)
{
    const struct agent *a = f->agent;
    if (!f->local.run || !a->away_since_us || a->config.offline != OFFLINE_CONTINUE)
        return;
    f->local.leads |= !f->local.offline;
    pipeline_decode_until(a->pipeline, f->work, until(f));
}

void local_back(struct flight *f)
{
    if (f->local.run)
        pipeline_decode_until(f->agent->pipeline, f->work, until(f));
    else
        f->local.offline = false;
}

void local_diverged(struct flight *f)
{
    log_info(MODULE, "the cloud draws other tokens than this device did: it goes on from the device's");
    local_stop(f);
    wire_leave_stream(f);
    flight_wait_again(f);
    flight_kick(f);
}

/* ---- its tokens ---- */

static bool deliver(struct flight *f, const struct sampled *token)
{
    int32_t ids[SAMPLER_LOGPROBS_MAX];
    float values[SAMPLER_LOGPROBS_MAX];
    for (uint32_t i = 0; i < token->top_count; i++) {
        ids[i] = token->top[i].id;
        values[i] = token->top[i].logprob;
    }
    struct api_logprob_in logprob = {
        .logprob = token->logprob, .top_count = token->top_count, .top_ids = ids, .top_logprobs = values};
    return flight_deliver(f, f->receiver.ids + f->receiver.count - 1, 1,
                          f->sampling.want_logprobs ? &logprob : NULL);
}

static void take_token(struct flight *f, const struct pipeline_event *e)
{
    uint32_t run = f->local.run;
    int fresh = gen_make_token(&f->receiver, e->index, e->token.id);
    if (fresh < 0) /* the cloud's was first, and is another */
        local_stop(f);
    if (fresh <= 0)
        return;
    f->local.made++;
    if (f->local.offline) {
        f->local.offline_made++;
        metric_add(f->agent->metrics.offline_tokens, 1);
    }
    f->work_count = f->turn.ids_count + f->receiver.count;
    metric_add(f->agent->metrics.local_tokens, 1);
    if (!flight_start_sink(f) || !deliver(f, &e->token) || f->local.run != run)
        return;
    finish_if_whole(f);
}

void local_event(struct flight *f, const struct pipeline_event *e)
{
    bool listens = f->state == FLIGHT_OPEN || f->state == FLIGHT_WAITING;
    f->edge_us += e->cost.compute_us;
    if (!listens || f->finished || e->run != f->local.run)
        return;
    if (e->type == PIPELINE_TOKEN) {
        take_token(f, e);
    } else if (e->type == PIPELINE_DECODE_FAILED) {
        log_info(MODULE, "the device makes no tokens of this reply (%s): the cloud makes them",
                 td_status_text(e->code));
        f->local.run = 0;
    }
}

/* ---- the cloud behind a reply that is whole ---- */

static void cancel_there(struct flight *f)
{
    Tandem__Cancel cancel = TANDEM__CANCEL__INIT;
    cancel.finished = true;
    cancel.keep_count = f->turn.reply_count;
    f->cancel_sent = uplink_send(f->agent->uplink, f->stream, FRAME_CANCEL, &cancel.base, NULL, 0) == 0;
}

int local_trailing_frame(struct flight *f, const struct wire_frame *frame)
{
    bool over = false;
    switch (frame->type) {
    case FRAME_TOKEN: /* another text than the client has: what the cloud keeps would be wrong */
        over =
            gen_receive_tokens(&f->receiver, frame->token->attempt, frame->token->index, frame->payload) < 0;
        if (!over && f->finished && !f->cancel_sent && !flight_trails(f))
            cancel_there(f); /* it would go on behind the stop string */
        break;
    case FRAME_OPEN_ACK: /* it has not the prompt, and would have to be told anew */
        if (frame->open_ack->need_ids)
            wire_stream_ended(f);
        over = frame->open_ack->need_ids || !f->planned;
        break;
    case FRAME_DONE:
    case FRAME_ERROR:
    case FRAME_CANCEL:
        wire_stream_ended(f);
        over = true;
        break;
    default:
        break;
    }
    if (over)
        flight_end_trail(f);
    return 0;
}
