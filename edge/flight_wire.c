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

/* ---- the stream's end ---- */

/* The cloud has ended the stream. */
void wire_stream_ended(struct flight *f)
{
    plan_stop(f);
    f->stream = 0;
    f->planned = f->acked = f->cancel_sent = false;
}

void wire_leave_stream(struct flight *f)
{
    uint32_t stream = f->stream;
    if (!stream)
        return;
    wire_stream_ended(f);
    uplink_close(f->agent->uplink, stream);
}

/* ---- opening ---- */

/* Instead of ids: the device's own names for the whole blocks, under a key that it alone has, and the reply tokens, which came from the cloud. */
static int send_private_open(struct flight *f, Tandem__Open *open)
{
    static const char label[] = "tandem-private-prompt"; /* with its NUL */
    uint32_t blocks = f->turn.ids_count / KV_BLOCK_TOKENS, held = f->receiver.count;
    uint8_t hash[TD_HASH_SIZE], tag[TD_HASH_SIZE];
    size_t names_size = (size_t)blocks * sizeof *f->turn.chain, size = names_size + held * sizeof(uint32_t);
    uint8_t *payload = malloc(size + 1);
    if (!payload)
        return -TD_ERR_NOMEM;
    ids_hash(f->turn.ids, f->turn.ids_count, hash);
    struct span parts[] = {{(const uint8_t *)label, sizeof label}, {hash, sizeof hash}};
    hmac_sha256(f->turn.principal_key, parts, TD_COUNT(parts), tag);
    open->private_prompt = true;
    open->prompt_tag = (ProtobufCBinaryData){sizeof tag, tag};
    if (blocks > 0)
        memcpy(payload, f->turn.chain, names_size);
    for (uint32_t i = 0; i < held; i++)
        store_le32(payload + names_size + (size_t)i * 4, (uint32_t)f->receiver.ids[i]);
    int rc = uplink_open(f->agent->uplink, f, open, payload, size, &f->stream);
    free(payload);
    if (rc == 0)
        f->receiver.confirmed = held;
    return rc;
}

int wire_send_open(struct flight *f)
{
    struct gen_receiver *r = &f->receiver;
    uint32_t known = 0, held = r->count, prompt = f->turn.ids_count;
    uint8_t known_hash[TD_HASH_SIZE], held_hash[TD_HASH_SIZE];
    Tandem__Open open = TANDEM__OPEN__INIT;
    if (f->turn.has_turn && f->turn.turn.version > 0 && !f->whole_ids && held == 0 && !f->is_private)
        known = f->turn.known_count;
    open.request_id = (ProtobufCBinaryData){GEN_REQUEST_ID_SIZE, r->request_id};
    open.attempt = r->attempt;
    if (!f->is_private)
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
    f->open_count = prompt + held;
    f->open_times++;
    f->sent_epoch = 0;
    f->left = f->given_up.now = false;
    f->given_up.resumed_epoch = 0;
    f->ingested = (Tandem__Ingested)TANDEM__INGESTED__INIT;
    if (f->is_private)
        return send_private_open(f, &open);
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
    if (rc == 0)
        r->confirmed = held;
    return rc;
}

static int send_generate(struct flight *f)
{
    const struct sampler_params *s = &f->sampling;
    uint8_t bias[8 * SAMPLER_BIAS_MAX];
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
    g.logprobs = s->want_logprobs;
    g.top_logprobs = s->logprob_count;
    g.ignore_end = f->ignore_end;
    for (uint32_t i = 0; i < s->bias_count; i++) {
        uint32_t bits;
        memcpy(&bits, &s->bias[i].bias, sizeof bits);
        store_le32(bias + 8 * i, (uint32_t)s->bias[i].id);
        store_le32(bias + 8 * i + 4, bits);
    }
    return uplink_send(f->agent->uplink, f->stream, FRAME_GENERATE, &g.base, bias, 8 * (size_t)s->bias_count);
}

int wire_try_open(struct flight *f)
{
    bool first = !f->opened; /* else the cloud may still have it: OPEN_ACK tells */
    if (uplink_state(f->agent->uplink) != UPLINK_READY)
        return -TD_ERR_CLOSED;
    if (f->is_private &&
        f->local.made > 0) /* begun without the cloud: it has no KV of the prompt, and may not compute it */
        return -TD_ERR_CLOSED;
    if (f->is_private && !(f->agent->features & WIRE_FEATURE_PRIVATE)) {
        flight_fail(f, -TD_ERR_UNSUPPORTED, "this cloud node does not take private prompts; it is too old",
                    0);
        return -TD_ERR_UNSUPPORTED;
    }
    int rc = wire_send_open(f);
    if (rc == -TD_ERR_FULL && flight_make_room(f->agent)) /* a request that somebody waits for goes first */
        rc = wire_send_open(f);
    if (rc < 0) {
        f->stream = 0;
        return rc;
    }
    f->state = FLIGHT_OPEN;
    f->opened = true;
    f->left_there = false;
    local_back(f);
    if (first && !f->is_private) /* where nothing can be mended from ids, what is cached is heard first */
        rc = plan_again(f);
    if (rc == 0)
        rc = send_generate(f);
    if (rc < 0) /* the connection is overfull or ending: once more when there is room */
        flight_wait_again(f);
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
    int rc = f->stream ? plan_again(f) : 0;
    if (rc < 0)
        plan_failed(f, rc);
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
        plan_taken(f->agent, m->size);
        pipeline_message_free(m);
    }
}

void wire_pipeline_event(struct flight *f, struct pipeline_event *e)
{
    if (e->run) {
        local_event(f, e);
        return;
    }
    if (e->cost.tokens > 0) {
        f->edge_us += e->cost.compute_us;
        f->edge_tokens += e->cost.tokens;
        if (e->cost.layers >= f->plan.layers)
            f->computed = TD_MAX(f->computed, e->cost.position + e->cost.tokens);
        metric_add(f->agent->metrics.prefill_tokens, e->cost.tokens);
    }
    if (f->state != FLIGHT_OPEN || !f->stream || e->epoch < f->epoch)
        return;
    struct pipeline_message **last = &f->pending;
    switch (e->type) {
    case PIPELINE_MESSAGES:
        f->rows_until = TD_MAX(f->rows_until, e->rows_until);
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
            int rc = plan_again(f);
            if (rc < 0)
                plan_failed(f, rc);
        } else {
            log_warn(MODULE, "the device cannot prefill this prompt (%s): the cloud computes it",
                     td_status_text(e->code));
            give_prompt_up(f);
        }
        break;
    case PIPELINE_RAN: /* local_event's */
    case PIPELINE_TOKEN:
    case PIPELINE_DECODE_FAILED:
        break;
    }
}

/* ---- frames of the cloud ---- */

static void break_off(struct flight *f, const char *what)
{
    char text[160];
    snprintf(text, sizeof text, "the cloud sent %s", what);
    log_warn(MODULE, "%s; the request ends", text);
    flight_fail(f, -TD_ERR_PROTOCOL, text, 0);
}

static int on_open_ack(struct flight *f, const Tandem__OpenAck *m)
{
    int rc = 0;
    if (m->attempt != f->receiver.attempt)
        return 0;
    if (m->need_ids && f->is_private) {
        break_off(f, "a wish for the ids of a private prompt");
        return 0;
    }
    if (m->need_ids) {
        wire_stream_ended(f);
        f->whole_ids = true;
        f->opened = false;
        f->open_times = 0;
        flight_wait_again(f);
        flight_kick(f);
        return 0;
    }
    if (f->acked || m->cached_tokens >= f->open_count || m->cached_tokens % KV_BLOCK_TOKENS != 0)
        return -TD_ERR_PROTOCOL;
    f->acked = true;
    f->deadline_us = 0;
    f->vain_acks++;
    f->ack_cached = m->cached_tokens;
    f->queue_tokens = m->queue_tokens;
    f->load_us = m->load_us;
    estimates_cloud(&f->agent->estimates, m->layer_ns, m->layer_slope_ns);
    if (!f->cached_told) {
        f->cached_told = true;
        f->cached_tokens = m->cached_tokens;
        f->cached_memory = m->cached_memory;
        f->cached_disk = m->cached_disk;
    }
    if (m->resumed) {
        metric_add(f->agent->metrics.resumed, 1);
        if (!m->plan_wanted) {
            plan_stop(f);
        } else {
            rc = plan_go_on(f, m);
        }
    } else if (!plan_fits_ack(f)) {
        rc = plan_again(f);
    }
    if (rc < 0) {
        plan_failed(f, rc);
        return 0;
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

static int on_token(struct flight *f, const Tandem__Token *m, struct span payload)
{
    if (f->finished)
        return 0;
    uint32_t before = f->receiver.count;
    int fresh = gen_receive_tokens(&f->receiver, m->attempt, m->index, payload);
    if (fresh == -TD_ERR_CONFLICT) {
        local_diverged(f);
        return 0;
    }
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
    uint64_t now_us = clock_mono_us();
    estimates_token(&f->agent->estimates, f->cloud_token_us == 0, now_us);
    f->cloud_token_us = now_us;
    local_follow(f, fresh > 0);
    if (fresh == 0)
        return 0;
    f->vain_acks = 0;
    wire_feed_pipeline(f, false);
    if (flight_start_sink(f))
        deliver_with_logprobs(f, m, f->receiver.ids + before, (uint32_t)fresh);
    return 0;
}

/* OPEN_ACK tells what was found, DONE what was used of it, and where it came from. One that was opened again has more cached than the prompt had. */
static void take_cached(struct flight *f, const Tandem__Done *m)
{
    if (f->open_times != 1)
        return;
    f->cached_tokens = m->cached_tokens;
    f->cached_disk = TD_MIN(m->timings->read_tokens, m->cached_tokens);
    f->cached_memory = m->cached_tokens - f->cached_disk;
}

static int on_done(struct flight *f, const Tandem__Done *m)
{
    if (m->attempt != f->receiver.attempt)
        return 0;
    wire_stream_ended(f);
    if (!f->finished && m->completion_tokens < f->receiver.count &&
        m->completion_tokens >= f->receiver.confirmed) { /* the device has made more than there is */
        local_diverged(f);
        return 0;
    }
    if (!f->finished && m->completion_tokens != f->receiver.count) {
        break_off(f, "the end of a reply before all of its tokens");
        return 0;
    }
    f->receiver.done = true;
    if (m->timings) {
        struct api_timings *t = &f->timings;
        t->cloud_told = true;
        t->queue_ms = (double)m->timings->queue_us * 1e-3;
        t->load_ms = (double)m->timings->load_us * 1e-3;
        t->cloud_prefill_ms = (double)m->timings->prefill_us * 1e-3;
        t->cloud_prefill_tokens = m->timings->prefill_tokens;
        t->recomputed_tokens = m->timings->recomputed_tokens;
        take_cached(f, m);
    }
    flight_finish(f, f->finished ? FINISH_STOP : m->finish);
    return 0;
}

static int on_error(struct flight *f, const Tandem__Error *m)
{
    int code = m->code > 0 && m->code <= INT16_MAX ? -(int)m->code : -TD_ERR_INTERNAL;
    char text[256];
    wire_stream_ended(f);
    /* A node that is leaving: the next one goes on. A full one may be so with this very request, which it has not seen to be without its connection. */
    bool later = code == -TD_ERR_CLOSED || (code == -TD_ERR_FULL && f->open_times > 1) || f->local.made > 0;
    if (m->retry && later && !f->finished) {
        f->retry_us = clock_mono_us() + m->retry_after_ms * UINT64_C(1000);
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

/* A private prompt: something has not arrived, or what the cloud had of it has gone. A plan that is on its way already may be what is wanted. */
static int on_need(struct flight *f, const Tandem__Need *m)
{
    if (!f->is_private) { /* the cloud has the ids, it is the sooner one */
        give_prompt_up(f);
        return 0;
    }
    if (!f->acked || m->first_token % KV_BLOCK_TOKENS != 0 || m->first_token > f->turn.ids_count)
        return -TD_ERR_PROTOCOL;
    if (f->sent_epoch > m->epoch)
        return 0;
    f->ack_cached = m->first_token;
    int rc = plan_again(f);
    if (rc < 0)
        plan_failed(f, rc);
    return 0;
}

int wire_frame(struct flight *f, const struct wire_frame *frame)
{
    if (f->state != FLIGHT_OPEN)
        return f->stream ? local_trailing_frame(f, frame) : 0;
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
        wire_stream_ended(f);
        flight_fail(f, -TD_ERR_CANCELLED, "the cloud cancelled the request", 0);
        return 0;
    case FRAME_NEED:
        return on_need(f, frame->need);
    case FRAME_INGESTED:
        f->ingested = *frame->ingested; /* numbers only */
        f->queue_tokens = f->ingested.queue_tokens;
        f->load_us = 0;
        estimates_cloud(&f->agent->estimates, f->ingested.layer_ns, f->ingested.layer_slope_ns);
        plan_settle(f);
        plan_left(f);
        agent_look_at_link(f->agent);
        plan_reconsider(f, clock_mono_us());
        return 0;
    default: /* KV_BLOCK that nobody fetched */
        return -TD_ERR_PROTOCOL;
    }
}
