/* flight: a request's way from the client to its last token, apart from the frames (flight_wire.c). States: agent_internal.h.
 *
 * Two requests with one Idempotency-Key are one generation: the later takes over the stream and the tokens of the earlier, whose client is told so,
 * and hears the reply from its first token. If the earlier one is just being stored, the later waits behind it and is prepared again, so that it
 * finds the turn as already made. */
#include "edge/agent_internal.h"
#include "shared/crypto.h"
#include "shared/log.h"
#include <stdio.h>
#include <stdlib.h>

#define MODULE            "edge"
#define COMPLETION_TOKENS 16u /* max_tokens of a completion that names none, as the OpenAI API has it */

/* ---- life ---- */

void flight_free(struct flight *f)
{
    wire_leave_stream(f);
    wire_close_work(f, false);
    edge_turn_free(&f->turn);
    if (f->receiver.ids)
        crypto_wipe(f->receiver.ids, f->receiver.capacity * sizeof *f->receiver.ids);
    free(f->receiver.ids);
    logprobs_free(&f->kept);
    crypto_wipe(f->key, sizeof f->key);
    free(f);
}

/* Nobody waits for it any more; freed now, or when the last user of its memory returns. */
static void retire(struct flight *f)
{
    if (f->state != FLIGHT_GONE) {
        wire_leave_stream(f);
        wire_close_work(f, false);
        f->state = FLIGHT_GONE;
        f->sink = NULL;
    }
    if (!f->job_running && f->depth == 0) {
        agent_remove(f->agent, f);
        flight_free(f);
    }
}

/* It ends here. What the cloud keeps of it would be kept for minutes: it is told when the link is back. */
static void let_go(struct flight *f)
{
    uint32_t count = 0;
    for (const struct flight *o = f->agent->flights; o; o = o->next)
        count += o->state == FLIGHT_LEAVING;
    if (!f->left_there || f->agent->draining || count >= AGENT_LEAVING_MAX) {
        retire(f);
        return;
    }
    wire_close_work(f, false);
    f->state = FLIGHT_LEAVING;
    f->sink = NULL;
    f->deadline_us = clock_mono_us() + LIMIT_PARK_MS * UINT64_C(1000);
    agent_count_running(f->agent);
}

/* The cloud may have forgotten it, or not have got to it: then it begins and ends it now. */
static void tell_it_is_over(struct flight *f)
{
    if (wire_send_open(f) == 0)
        retire(f); /* with CANCEL */
}

void flight_fail(struct flight *f, int code, const char *text, uint32_t retry_after_ms)
{
    const struct agent_sink *sink = f->sink;
    f->sink = NULL;
    metric_add(f->agent->metrics.failures, 1);
    if (sink)
        sink->failed(f->ctx, code, text, retry_after_ms);
    if (f->key[0]) /* its client may come back for it */
        retire(f);
    else
        let_go(f);
}

static void fail_context(struct flight *f, uint32_t asked_tokens)
{
    const struct agent_sink *sink = f->sink;
    f->sink = NULL;
    metric_add(f->agent->metrics.failures, 1);
    if (sink)
        sink->failed_context(f->ctx, f->turn.context_max, asked_tokens, f->turn.ids_count);
    retire(f);
}

/* ---- prepare ---- */

static void work_prepare(struct io_job *job)
{
    struct flight *f = (struct flight *)((char *)job - offsetof(struct flight, job));
    edge_turn_prepare(&f->turn);
}

/* By the clock, so that it rises over restarts; and whatever that does, a key that comes again is a later attempt. */
static uint64_t next_attempt(struct agent *a)
{
    a->attempt = TD_MAX(a->attempt + 1, clock_wall_us());
    return a->attempt;
}

static int make_receiver(struct flight *f)
{
    struct gen_receiver *r = &f->receiver;
    free(r->ids);
    r->capacity = f->token_count_max;
    r->count = r->confirmed = 0;
    r->attempt = next_attempt(f->agent);
    r->ids = malloc(r->capacity * sizeof *r->ids);
    return r->ids ? 0 : -TD_ERR_NOMEM;
}

/* The reply's limit: what was asked for, if it fits, else an error with the counts. False: failed. */
static bool limit_reply(struct flight *f, uint32_t asked)
{
    uint32_t room = f->turn.context_max - f->turn.ids_count;
    if (asked > room) {
        fail_context(f, f->turn.ids_count + asked);
        return false;
    }
    uint32_t fallback = f->turn.chat ? room : TD_MIN(COMPLETION_TOKENS, room);
    f->token_count_max = asked ? asked : fallback;
    return true;
}

static void take_over(struct flight *f, struct flight *old);

static void on_prepared(struct io_job *job)
{
    struct flight *f = (struct flight *)((char *)job - offsetof(struct flight, job));
    f->job_running = false;
    if (f->state == FLIGHT_GONE) {
        retire(f);
        return;
    }
    if (f->turn.err.code == -TD_ERR_CONTEXT) {
        fail_context(f, f->turn.ids_count + TD_MAX(f->token_count_max, 1u));
        return;
    }
    if (f->turn.err.code < 0) {
        flight_fail(f, f->turn.err.code, f->turn.err.text, 0);
        return;
    }
    struct flight *old = f->key[0] ? agent_find_request(f->agent, f, f->receiver.request_id) : NULL;
    if (old && (old->state == FLIGHT_ENDING || old->finished)) {
        f->state = FLIGHT_BEHIND;
        return;
    }
    if (!limit_reply(f, f->token_count_max))
        return;
    if (make_receiver(f) < 0) {
        flight_fail(f, -TD_ERR_NOMEM, "not enough memory for the reply", 0);
        return;
    }
    f->state = FLIGHT_WAITING;
    if (old)
        take_over(f, old);
    else
        flight_kick(f);
}

static int name_request(struct flight *f)
{
    struct agent *a = f->agent;
    uint64_t seed;
    memcpy(f->turn.principal_key, a->device_key, sizeof f->turn.principal_key);
    f->turn.context_max = a->context_max;
    if (f->key[0]) {
        gen_id_from_key(a->principal_key, f->key, f->receiver.request_id, &seed);
        hex_encode(f->receiver.request_id, GEN_REQUEST_ID_SIZE, f->turn.request_key);
    } else {
        int rc = crypto_random(f->receiver.request_id, GEN_REQUEST_ID_SIZE);
        if (rc == 0)
            rc = crypto_random(&seed, sizeof seed);
        if (rc < 0)
            return rc;
    }
    if (!f->has_seed)
        f->sampling.seed = seed;
    f->has_seed = true;
    return 0;
}

static void prepare(struct flight *f)
{
    int rc = name_request(f);
    f->job = (struct io_job){.work = work_prepare, .done = on_prepared};
    if (rc == 0)
        rc = io_worker_submit(f->agent->worker, &f->job);
    if (rc < 0) {
        flight_fail(f, rc, "too many requests at once; try again", 1000);
        return;
    }
    f->state = FLIGHT_PREPARING;
    f->job_running = true;
}

/* ---- the same key twice ---- */

static bool same_prompt(const struct flight *a, const struct flight *b)
{
    return a->turn.ids_count == b->turn.ids_count &&
           memcmp(a->turn.ids, b->turn.ids, a->turn.ids_count * sizeof *a->turn.ids) == 0;
}

/* What makes up the generation moves; what belongs to the client (turn, sink, key, sampling) stays. */
static void move_generation(struct flight *f, struct flight *old)
{
    uint64_t serial = f->serial;
    free(f->receiver.ids);
    f->receiver = old->receiver;
    old->receiver.ids = NULL;
    f->kept = old->kept;
    old->kept = (struct kept_logprobs){0};
    f->state = old->state;
    f->serial = old->serial;
    old->serial = serial;
    f->deadline_us = old->deadline_us;
    f->token_count_max = old->token_count_max;
    f->stream = old->stream;
    f->open_count = old->open_count;
    f->opened = old->opened;
    f->open_times = old->open_times;
    f->vain_acks = old->vain_acks;
    f->left_there = old->left_there;
    f->retry_us = old->retry_us;
    f->whole_ids = old->whole_ids;
    f->planned = old->planned;
    f->acked = old->acked;
    f->ack_cached = old->ack_cached;
    f->epoch = old->epoch;
    f->sent_epoch = old->sent_epoch;
    f->plan = old->plan;
    memcpy(f->record, old->record, sizeof f->record);
    f->record_count = old->record_count;
    memcpy(f->before, old->before, sizeof f->before);
    f->before_count = old->before_count;
    f->merged = old->merged;
    f->patient = old->patient;
    f->left = old->left;
    f->leaving = old->leaving;
    f->given_up = old->given_up;
    f->ingested = old->ingested;
    f->rows_until = old->rows_until;
    f->computed = old->computed;
    f->queue_tokens = old->queue_tokens;
    f->load_us = old->load_us;
    f->shown = old->shown;
    f->rows_need_f32 = old->rows_need_f32;
    f->no_edge = old->no_edge;
    f->work = old->work;
    f->work_count = old->work_count;
    f->local = old->local;
    f->pending = old->pending;
    f->cached_told = old->cached_told;
    f->cached_tokens = old->cached_tokens;
    f->cached_memory = old->cached_memory;
    f->cached_disk = old->cached_disk;
    old->stream = 0;
    old->left_there = false;
    old->work = NULL;
    old->pending = NULL;
    uplink_set_owner(f->agent->uplink, f->stream, f);
}

static void take_over(struct flight *f, struct flight *old)
{
    if (f->is_private != old->is_private || !same_prompt(f, old)) {
        flight_fail(f, -TD_ERR_CONFLICT, "this Idempotency-Key belongs to a request with another prompt", 0);
        return;
    }
    bool started = old->started;
    move_generation(f, old);
    flight_fail(old, -TD_ERR_CONFLICT, "a later request with the same Idempotency-Key took this reply over",
                0);
    if (started && !flight_start_sink(f))
        return;
    if (f->receiver.count == 0 || logprobs_deliver_held(f))
        flight_kick(f);
}

/* ---- the sink ---- */

/* A call of the sink has returned: did the flight outlive it? */
static bool outlived(struct flight *f)
{
    f->depth--;
    if (f->state != FLIGHT_GONE)
        return true;
    retire(f);
    return false;
}

bool flight_start_sink(struct flight *f)
{
    if (f->started || !f->sink)
        return true;
    f->started = true;
    struct api_usage usage = {.prompt_tokens = f->turn.ids_count, .cached_tokens = f->cached_tokens};
    f->depth++;
    f->sink->started(f->ctx, f->turn.conversation, &usage);
    return outlived(f);
}

bool flight_deliver(struct flight *f, const int32_t *ids, uint32_t count,
                    const struct api_logprob_in *logprobs)
{
    uint64_t now_us = clock_mono_us();
    if (f->first_token_us == 0) {
        f->first_token_us = now_us;
        metric_observe(f->agent->metrics.first_token, (double)(now_us - f->begun_us) * 1e-6);
    }
    f->last_token_us = now_us;
    if (f->t16_us == 0 && f->receiver.count >= 16)
        f->t16_us = now_us;
    metric_add(f->agent->metrics.generated_tokens, count);
    logprobs_keep(f, ids, count, logprobs);
    if (f->finished || !f->sink)
        return true;
    f->depth++;
    f->sink->tokens(f->ctx, ids, count, logprobs);
    return outlived(f);
}

/* ---- the end ---- */

static double ms(uint64_t us)
{
    return (double)us * 1e-3;
}

static void fill_timings(struct flight *f, uint32_t count)
{
    struct api_timings *t = &f->timings;
    uint64_t now_us = clock_mono_us();
    t->edge_prefill_ms = ms(f->edge_us);
    t->edge_layers = f->edge_layers;
    t->edge_prefill_tokens = f->edge_tokens;
    t->plan = f->shown;
    t->local_tokens = f->local.made;
    t->confirmed_tokens = TD_MIN(f->receiver.confirmed, count);
    t->was_offline = f->local.was_offline;
    t->offline_from = f->local.offline_from;
    t->offline_tokens = f->local.offline_made;
    t->offline_estimate_ms = f->local.offline_us * 1e-3;
    t->uplink_bytes = f->uplink_size;
    t->uplink_raw_bytes = f->uplink_raw_size;
    t->cached_memory_tokens = f->cached_memory;
    t->cached_disk_tokens = f->cached_disk;
    t->total_ms = ms(now_us - f->begun_us);
    if (f->first_token_us) {
        t->first_token_ms = ms(f->first_token_us - f->begun_us);
        t->t16_ms = f->t16_us ? ms(f->t16_us - f->begun_us) : 0;
        t->decode_ms = ms(f->last_token_us - f->first_token_us);
        t->tokens_per_s = count > 1 && t->decode_ms > 0 ? (count - 1) * 1e3 / t->decode_ms : 0;
    }
}

/* Prompt and reply: their KV is asked for when there is time. What the cloud is not told the ids of it cannot name. */
static void want_sealed(struct flight *f)
{
    const struct edge_turn *t = &f->turn;
    struct agent *a = f->agent;
    uint32_t blocks = (t->ids_count + t->reply_count) / KV_BLOCK_TOKENS;
    if (!a->fetcher || f->is_private || blocks == 0)
        return;
    int32_t *ids = malloc(((size_t)t->ids_count + t->reply_count) * sizeof *ids);
    struct kv_block_id *chain = malloc(blocks * sizeof *chain);
    if (ids && chain) {
        memcpy(ids, t->ids, t->ids_count * sizeof *ids);
        memcpy(ids + t->ids_count, t->reply, t->reply_count * sizeof *ids);
        local_kv_chain(t->principal_key, a->env.fingerprint, a->env.layout_hash, NULL, ids,
                       blocks * KV_BLOCK_TOKENS, chain);
        fetcher_want(a->fetcher, ids, chain, blocks);
    }
    if (ids)
        crypto_wipe(ids, ((size_t)t->ids_count + t->reply_count) * sizeof *ids);
    free(ids);
    free(chain);
}

/* not_kept: there was a turn to be stored, and the conversation that the client was told of does not hold it. */
static void complete(struct flight *f, bool not_kept)
{
    const struct agent_sink *sink = f->sink;
    struct api_usage usage = {.prompt_tokens = f->turn.ids_count,
                              .completion_tokens = f->turn.reply_count,
                              .cached_tokens = f->cached_told ? f->cached_tokens : f->local.held};
    f->sink = NULL;
    if (!not_kept)
        want_sealed(f);
    fill_timings(f, f->turn.reply_count);
    if (sink && not_kept)
        sink->not_kept(f->ctx);
    if (sink)
        sink->done(f->ctx, f->finish, &usage, &f->timings);
    if (f->stream)
        f->state = FLIGHT_TRAILING;
    else
        let_go(f);
}

bool flight_trails(const struct flight *f)
{
    return f->stream && f->receiver.confirmed < f->turn.reply_count;
}

void flight_end_trail(struct flight *f)
{
    wire_leave_stream(f);
    if (f->state == FLIGHT_TRAILING)
        let_go(f);
    else if (f->state == FLIGHT_LEAVING)
        retire(f);
}

/* It stays in the list, which somebody may be walking, until the next tick. */
bool flight_make_room(struct agent *a)
{
    struct flight *oldest = NULL;
    for (struct flight *f = a->flights; f; f = f->next)
        oldest = f->state == FLIGHT_TRAILING && f->stream ? f : oldest;
    if (oldest)
        wire_leave_stream(oldest);
    return oldest != NULL;
}

static void work_commit(struct io_job *job)
{
    struct flight *f = (struct flight *)((char *)job - offsetof(struct flight, job));
    f->turn.err.code = edge_turn_commit(&f->turn);
}

static void on_committed(struct io_job *job)
{
    struct flight *f = (struct flight *)((char *)job - offsetof(struct flight, job));
    int rc = f->turn.err.code;
    f->job_running = false;
    if (f->state == FLIGHT_GONE) {
        retire(f);
    } else if (rc == -TD_ERR_CONFLICT) {
        flight_fail(f, rc,
                    "the conversation was continued by another request meanwhile; this turn was not kept", 0);
    } else {
        if (rc < 0) /* the reply is good; only its memory is lost */
            log_warn(MODULE, "cannot store a turn of a conversation: %s", td_status_text(rc));
        complete(f, rc < 0 || f->turn.forked);
    }
}

void flight_finish(struct flight *f, unsigned finish)
{
    f->finish = finish;
    f->turn.reply = f->receiver.ids;
    f->turn.reply_count = f->finished ? TD_MIN(f->keep_count, f->receiver.count) : f->receiver.count;
    wire_feed_pipeline(f, true);
    if (!flight_trails(f))
        wire_leave_stream(f);
    wire_close_work(f, true);
    f->state = FLIGHT_ENDING;
    bool whole = f->finished || finish == FINISH_STOP || finish == FINISH_LENGTH;
    f->job = (struct io_job){.work = work_commit, .done = on_committed};
    int rc = whole && f->turn.has_turn ? io_worker_submit(f->agent->worker, &f->job) : 0;
    f->job_running = whole && f->turn.has_turn && rc == 0;
    if (f->job_running)
        return;
    if (rc < 0) {
        log_warn(MODULE, "cannot store a turn of a conversation: too much is waiting for the store");
        edge_turn_lost(&f->turn);
    }
    complete(f, rc < 0);
}

/* ---- waiting for the cloud ---- */

void flight_wait_again(struct flight *f)
{
    wire_leave_stream(f);
    if (f->finished) {
        flight_finish(f, FINISH_STOP);
        return;
    }
    gen_reopen(&f->receiver, next_attempt(f->agent));
    f->state = FLIGHT_WAITING;
    if (f->deadline_us == 0)
        f->deadline_us = clock_mono_us() + f->agent->config.cloud_timeout_ms * UINT64_C(1000);
    local_lost(f);
}

void flight_lost(struct flight *f)
{
    f->left_there |= f->stream != 0;
    if (f->state == FLIGHT_OPEN)
        flight_wait_again(f);
    else if (f->stream)
        flight_end_trail(f);
}

static void fail_vain(struct flight *f)
{
    const char *why = uplink_why(f->agent->uplink);
    char text[UPLINK_WHY_SIZE + 128];
    snprintf(text, sizeof text, "the cloud has taken this request up %u times and never got to a token%s%s",
             f->vain_acks, why[0] ? "; " : "", why);
    flight_fail(f, -TD_ERR_CLOSED, text, 0);
}

void flight_check_deadline(struct flight *f, uint64_t now_us)
{
    struct agent *a = f->agent;
    bool waits = f->state == FLIGHT_KEY || f->state == FLIGHT_WAITING;
    bool over =
        f->state == FLIGHT_LEAVING ? now_us >= f->deadline_us : f->state == FLIGHT_TRAILING && !f->stream;
    if (over) {
        retire(f);
        return;
    }
    if (local_offline(f, now_us) || !waits || f->deadline_us == 0)
        return;
    if (f->vain_acks >= FLIGHT_VAIN_MAX) {
        fail_vain(f);
        return;
    }
    bool ready = uplink_state(a->uplink) == UPLINK_READY;
    if (!ready && uplink_refused(a->uplink)) {
        flight_fail(f, -TD_ERR_CLOSED, uplink_why(a->uplink), 0);
    } else if (now_us >= f->deadline_us && ready && !a->has_key) {
        flight_fail(f, -TD_ERR_CLOSED,
                    "the store of this device does not give its keys: its disk is full, damaged or does not "
                    "answer; its log says which",
                    1000);
    } else if (now_us >= f->deadline_us && ready) {
        flight_fail(f, -TD_ERR_FULL, "the cloud takes no further request now; try again", 1000);
    } else if (now_us >= f->deadline_us) {
        char text[UPLINK_WHY_SIZE + 256];
        snprintf(text, sizeof text, "the cloud could not be reached for %u s: %s%s",
                 a->config.cloud_timeout_ms / 1000,
                 uplink_why(a->uplink)[0] ? uplink_why(a->uplink) : "no answer", agent_lacks(a));
        flight_fail(f, -TD_ERR_CLOSED, text, 1000);
    }
}

void flight_kick(struct flight *f)
{
    if ((f->state == FLIGHT_KEY || f->state == FLIGHT_BEHIND) && f->agent->has_key)
        prepare(f);
    else if (f->state == FLIGHT_LEAVING && uplink_state(f->agent->uplink) == UPLINK_READY)
        tell_it_is_over(f);
    else if (f->state == FLIGHT_WAITING && clock_mono_us() < f->retry_us)
        return;
    else if (f->state == FLIGHT_WAITING && uplink_state(f->agent->uplink) == UPLINK_READY)
        wire_try_open(f);
    else if (f->state == FLIGHT_WAITING)
        local_offline(f, clock_mono_us());
}

/* ---- the owner's calls ---- */

static bool wants_private(const struct agent *a, const struct api_request *r)
{
    return r->prefer == API_PREFER_PRIVATE || (r->prefer == API_PREFER_NONE && a->config.prefer_private);
}

static enum planner_prefer wish_of(const struct agent *a, const struct api_request *r)
{
    if (r->prefer == API_PREFER_NONE)
        return a->config.prefer;
    return r->prefer == API_PREFER_CLOUD_COST ? PREFER_CLOUD_COST : PREFER_LATENCY;
}

/* Those that somebody waits for; the others end by themselves. */
static uint32_t count_asked_for(const struct agent *a)
{
    uint32_t count = 0;
    for (const struct flight *f = a->flights; f; f = f->next)
        count += f->sink != NULL;
    return count;
}

int agent_begin(struct agent *a, const struct api_request *request, const char *principal,
                const char *idempotency_key, const struct agent_sink *sink, void *ctx, struct flight **out,
                struct td_error *err)
{
    if (a->draining)
        return td_fail(err, -TD_ERR_CLOSED, "this agent is shutting down");
    if (count_asked_for(a) >= AGENT_FLIGHTS_MAX)
        return td_fail(err, -TD_ERR_FULL, "too many requests at once (%u); try again", AGENT_FLIGHTS_MAX);
    if (uplink_refused(a->uplink) && uplink_state(a->uplink) != UPLINK_READY)
        return td_fail(err, -TD_ERR_CLOSED, "%s", uplink_why(a->uplink));
    uint32_t layers = !a->pipeline ? 0 : a->layers_wanted == PLANNER_AUTO ? a->layers : a->layers_wanted;
    if (wants_private(a, request) && layers < a->config.private_min_layers)
        return td_fail(
            err, -TD_ERR_ARG,
            "a private prompt needs its first %u layers computed on this device, which computes %u; "
            "see --private-min-layers, --edge-layers and the model file",
            a->config.private_min_layers, layers);
    struct flight *f = calloc(1, sizeof *f);
    int rc = f ? edge_turn_init(&f->turn, &a->env, request, principal) : -TD_ERR_NOMEM;
    if (rc < 0) {
        if (f)
            edge_turn_free(&f->turn);
        free(f);
        return td_fail(err, rc, "not enough memory for the request");
    }
    f->agent = a;
    f->serial = ++a->serial;
    f->epoch = (uint32_t)(clock_wall_us() / 1000000); /* above those of an agent that was killed */
    f->sink = sink;
    f->ctx = ctx;
    f->begun_us = clock_mono_us();
    f->deadline_us = f->begun_us + a->config.cloud_timeout_ms * UINT64_C(1000);
    f->sampling = request->sampling;
    f->has_seed = request->has_seed;
    f->token_count_max = request->max_tokens;
    f->ignore_end = request->ignore_end;
    f->no_cache = request->no_cache;
    f->is_private = wants_private(a, request);
    f->prefer = wish_of(a, request);
    f->accept = request->has_accept ? (enum kv_accept)request->accept : a->config.accept;
    snprintf(f->key, sizeof f->key, "%s", idempotency_key ? idempotency_key : "");
    f->next = a->flights;
    a->flights = f;
    a->flight_count++;
    metric_add(a->metrics.requests, 1);
    agent_count_running(a);
    net_timer_start(a->tick, 1); /* the loop's next turn: nothing is called back before this returns */
    *out = f;
    return 0;
}

void agent_cancel(struct flight *f, bool finished, uint32_t keep_count)
{
    if (!finished)
        f->sink = NULL;
    if (f->state == FLIGHT_ENDING) /* it is whole, and being stored: the worker has the turn */
        return;
    if (!finished) {
        let_go(f);
        return;
    }
    f->finished = true;
    f->keep_count = keep_count;
    Tandem__Cancel cancel = TANDEM__CANCEL__INIT;
    cancel.finished = true;
    cancel.keep_count = keep_count;
    if (f->state != FLIGHT_OPEN || f->receiver.confirmed < keep_count ||
        uplink_send(f->agent->uplink, f->stream, FRAME_CANCEL, &cancel.base, NULL, 0) < 0)
        flight_finish(f, FINISH_STOP);
}

int agent_restore(struct flight *f, const char *text, size_t size, bool flush, char **out, size_t *out_size)
{
    return edge_turn_restore(&f->turn, text, size, flush, out, out_size);
}
