/* engine_open: a sequence's life, from OPEN to the moment when nothing of it is left.
 *
 *   (open) -> WAITING -> [LOADING] -> RUNNING -> CLOSING -> ENDED -> (5 minutes) gone
 *               ^                       |  \__ preempted: WAITING        ENDED and PARKED are not in `live`: only the
 *               |_______ re-open _______|_____ PARKED                    generation table knows them
 *
 * Invariant: s->gen->owner == s for every sequence, and freeing one removes the other. */
#include "cloud/engine_internal.h"
#include <stdio.h>
#include <stdlib.h>

struct sequence *engine_find(struct engine *e, uint64_t handle)
{
    for (uint32_t i = 0; i < e->live_count; i++)
        if (e->live[i]->handle == handle && handle != 0)
            return e->live[i];
    return NULL;
}

struct sequence *engine_find_key(struct engine *e, uint64_t key)
{
    for (uint32_t i = 0; i < e->live_count; i++)
        if (e->live[i]->key == key)
            return e->live[i];
    return NULL;
}

/* --- leaving -------------------------------------------------------------------------------------- */

static void live_remove(struct engine *e, struct sequence *s)
{
    for (uint32_t i = 0; i < e->live_count; i++)
        if (e->live[i] == s) {
            memmove(e->live + i, e->live + i + 1, (e->live_count - i - 1) * sizeof *e->live);
            e->live_count--;
            engine_leave(e, s->tenant, s->principal);
            return;
        }
}

/* Staged data of a sequence that wants none any more goes; whoever listens gets the credit back. */
static void let_staged_go(struct engine *e, struct sequence *s)
{
    sequence_void_plan(s);
    engine_emit_ingested(e, s);
}

static void remove_whole(struct engine *e, struct sequence *s)
{
    engine_release(e, s);
    let_staged_go(e, s);
    live_remove(e, s);
    if (s->gen) {
        s->gen->owner = NULL;
        gen_forget(e->gens, s->gen);
    }
    sequence_free(s);
}

void engine_drop(struct engine *e, struct sequence *s)
{
    s->handle = 0;
    remove_whole(e, s);
}

void engine_fail(struct engine *e, struct sequence *s, int code, const char *text)
{
    let_staged_go(e, s);
    engine_emit_failed(s, code, text, code == -TD_ERR_PROTOCOL ? 0 : engine_retry_after_ms(e));
    engine_drop(e, s);
}

static void end(struct engine *e, struct sequence *s)
{
    engine_emit_done(s);
    s->handle = 0;
    s->state = SEQ_ENDED;
    live_remove(e, s);
    void *memory[] = {s->blocks, s->pages, s->have};
    for (size_t i = 0; i < TD_COUNT(memory); i++)
        free(memory[i]);
    s->blocks = NULL;
    s->pages = NULL;
    s->have = NULL;
    sequence_seal(s, e->seal_key);
}

void engine_try_end(struct engine *e, struct sequence *s)
{
    if (s->unpersisted == 0 || e->clock() >= s->deadline_us)
        end(e, s);
}

void engine_close(struct engine *e, struct sequence *s)
{
    engine_publish(e, s);
    engine_release(e, s);
    let_staged_go(e, s);
    s->state = SEQ_CLOSING;
    s->finishing = false;
    s->deadline_us = e->clock() + ENGINE_CLOSE_WAIT_US;
    engine_flush_pending(e);
    engine_try_end(e, s);
}

/* Does the last token fill a block whose other rows are all there? Then one more row makes the block whole, and the next turn finds it. */
static bool last_row_fills_block(const struct sequence *s)
{
    return s->state == SEQ_RUNNING && !s->generate.no_persist && !s->is_private &&
           s->ids_count % KV_BLOCK_TOKENS == 0 && s->high + 1 == s->ids_count && s->complete == s->high;
}

void engine_finish(struct engine *e, struct sequence *s, uint32_t finish)
{
    s->finish = finish;
    gen_finish(s->gen, finish, e->clock());
    if (last_row_fills_block(s))
        s->finishing = true;
    else
        engine_close(e, s);
}

void engine_park(struct engine *e, struct sequence *s)
{
    engine_release(e, s);
    sequence_restart(s, &e->model);
    engine_emit_ingested(e, s);
    live_remove(e, s);
    s->state = SEQ_PARKED;
    sequence_seal(s, e->seal_key);
    s->unpersisted = 0;
    e->parked_count++;
}

static void gone(void *ctx, struct generation *g)
{
    struct engine *e = ctx;
    struct sequence *s = g->owner;
    if (!s)
        return;
    e->parked_count -= s->state == SEQ_PARKED;
    if (g->state == GEN_FINISHED) /* one whose blocks are still on their way has not been told */
        engine_emit_done(s);
    s->gen = NULL; /* the table frees it */
    s->handle = 0;
    if (s->state == SEQ_PARKED || s->state == SEQ_ENDED)
        sequence_free(s);
    else
        remove_whole(e, s);
}

void engine_expire(struct engine *e, uint64_t now_us)
{
    gen_table_expire(e->gens, now_us, gone, e);
}

/* --- coming --------------------------------------------------------------------------------------- */

static void refuse(struct engine *e, uint64_t handle, struct engine_open *open, int code, const char *text)
{
    struct sequence nobody = {.handle = handle, .sink = open->sink, .sink_ctx = open->sink_ctx};
    bool later =
        code == -TD_ERR_FULL || code == -TD_ERR_NOMEM || code == -TD_ERR_BUSY || code == -TD_ERR_CLOSED;
    engine_emit_failed(&nobody, code, text, later ? engine_retry_after_ms(e) : 0);
    engine_leave(e, open->tenant, open->principal);
}

static int check_open(const struct engine *e, const struct engine_open *open, struct td_error *err)
{
    uint64_t count = (uint64_t)open->prompt_count + open->held_count;
    if (open->prompt_count == 0 || !open->ids)
        return td_fail(err, -TD_ERR_ARG, "the prompt is empty");
    if (open->prompt_count >= e->config.context_max || count > e->config.context_max)
        return td_fail(err, -TD_ERR_CONTEXT,
                       "the prompt has %u tokens, the context holds %u, the reply included; shorten it",
                       open->prompt_count, e->config.context_max);
    if (open->prompt_count >= e->model.context_max || count > e->model.context_max)
        return td_fail(
            err, -TD_ERR_LIMIT,
            "the prompt has %u tokens, the node's KV memory holds %u; shorten it or give the node more",
            open->prompt_count, e->page_context);
    for (uint64_t i = open->is_private ? open->prompt_count : 0; i < count; i++)
        if (open->ids[i] < 0 || (uint32_t)open->ids[i] >= e->model.vocab_count)
            return td_fail(err, -TD_ERR_ARG,
                           "the prompt has a token id that the model's vocabulary of %u lacks",
                           e->model.vocab_count);
    return 0;
}

static void emit_opened(struct engine *e, struct sequence *s, bool resumed)
{
    struct plan_range record[LIMIT_RANGES];
    struct engine_event event = {.type = ENGINE_OPENED, .opened = {.resumed = resumed}};
    if (!resumed || s->state == SEQ_WAITING)
        engine_probe(e, s, &event);
    if (resumed && s->state != SEQ_ENDED && s->state != SEQ_CLOSING && sequence_wants_data(s, &e->model)) {
        uint32_t cached = event.opened.cached_tokens;
        event.opened.plan_wanted = true;
        event.opened.epoch = s->epoch;
        event.opened.hidden_tokens =
            s->planned ? TD_MAX(sequence_hidden_tokens(s, &e->model), cached) : cached;
        event.opened.kv_tokens = s->planned ? TD_MAX(sequence_kv_tokens(s), cached) : cached;
        event.opened.ranges = record;
        event.opened.range_count = sequence_record(s, record);
    }
    event.opened.layer_ns = engine_layer_ns(e, &event.opened.layer_slope_ns);
    event.opened.reply_count = sequence_reply_count(s);
    event.opened.prefill_tokens_per_s = (uint32_t)TD_MIN(e->prefill_rows_per_s, (uint64_t)UINT32_MAX);
    event.opened.queue_tokens = engine_queue_tokens(e, s);
    engine_emit(s, &event);
}

static void add_live(struct engine *e, struct sequence *s, uint64_t now_us)
{
    s->state = SEQ_WAITING;
    s->arrival = e->next_key++;
    s->upload_us = s->waiting_us = now_us;
    engine_join_turns(e, s);
    e->live[e->live_count++] = s;
}

/* The edge goes on where its link broke, or it does not, and what has not come is computed here. */
static void take_up_plan(struct sequence *s, const struct seq_model *m, bool was_parked, bool resumes,
                         uint64_t now_us)
{
    if (s->state == SEQ_ENDED || s->state == SEQ_CLOSING)
        return;
    s->away = false;
    s->kv_us = now_us;
    if (resumes && was_parked)
        sequence_want_plan(s);
    else if (!resumes && sequence_wants_data(s, m))
        sequence_void_plan(s);
}

/* A generation that is known: its new client takes it over, gets what it lacks, and then what is still to come. */
static void reattach(struct engine *e, struct sequence *s, uint64_t handle, struct engine_open *open)
{
    uint64_t now = e->clock();
    if (sequence_unseal(s, e->seal_key) < 0) {
        gen_detach(s->gen, now); /* it still waits for somebody */
        refuse(e, handle, open, -TD_ERR_NOMEM, "the node is out of memory");
        return;
    }
    if (s->handle != 0) {
        if (!open->resumes && s->state != SEQ_ENDED && sequence_wants_data(s, &e->model))
            let_staged_go(e, s);
        engine_emit_failed(s, -TD_ERR_CANCELLED, "a later attempt of the same request has taken over", 0);
    }
    s->handle = handle;
    s->sink = open->sink;
    s->sink_ctx = open->sink_ctx;
    if (open->edge_numerics)
        s->edge_numerics = open->edge_numerics;
    s->upload_us = now;
    bool was_parked = s->state == SEQ_PARKED;
    if (was_parked) {
        e->parked_count--;
        add_live(e, s, now);
    } else {
        engine_leave(e, open->tenant, open->principal); /* it is counted already, or needs no place */
    }
    take_up_plan(s, &e->model, was_parked, open->resumes, now);
    emit_opened(e, s, true);
    uint32_t held = open->held_count, count = sequence_reply_count(s);
    if (count > held)
        engine_emit_tokens(s, held, count - held);
    if (s->state == SEQ_ENDED) {
        engine_emit_done(s);
        s->handle = 0;
        sequence_seal(s, e->seal_key);
    }
}

/* The edge's list of tokens is the authority: what was made here is not its text, or behind it. */
static void give_way(struct engine *e, struct sequence *s)
{
    static const char text[] = "a later attempt of the same request has taken over";
    if (s->state != SEQ_PARKED && s->state != SEQ_ENDED) {
        engine_fail(e, s, -TD_ERR_CANCELLED, text);
        return;
    }
    engine_emit_failed(s, -TD_ERR_CANCELLED, text, 0);
    e->parked_count -= s->state == SEQ_PARKED;
    gen_forget(e->gens, s->gen);
    sequence_free(s);
}

static void open_new(struct engine *e, uint64_t handle, struct engine_open *open, struct generation *g)
{
    uint64_t now = e->clock();
    struct sequence *s = sequence_create(&e->model, open, e->next_key++);
    if (!s) {
        gen_forget(e->gens, g);
        refuse(e, handle, open, -TD_ERR_NOMEM, "the node is out of memory");
        return;
    }
    s->handle = handle;
    s->gen = g;
    s->opened_us = now;
    g->owner = s;
    add_live(e, s, now);
    emit_opened(e, s, false);
    if (open->direct)
        engine_do_start(e, s, &open->generate);
}

static enum gen_verdict open_generation(struct engine *e, const struct engine_open *open,
                                        const uint8_t hash[TD_HASH_SIZE], struct generation **out)
{
    return gen_open(e->gens, open->tenant, open->principal, open->request_id, open->attempt, hash,
                    open->ids + open->prompt_count, open->held_count,
                    e->model.context_max - open->prompt_count, out);
}

void engine_do_open(struct engine *e, uint64_t handle, struct engine_open *open)
{
    struct td_error err;
    struct generation *g = NULL;
    uint8_t hash[TD_HASH_SIZE];
    int rc = check_open(e, open, &err);
    if (rc < 0) {
        refuse(e, handle, open, rc, err.text);
        return;
    }
    if (open->is_private)
        memcpy(hash, open->prompt_tag, sizeof hash);
    else
        ids_hash(open->ids, open->prompt_count, hash);
    switch (open_generation(e, open, hash, &g)) {
    case GEN_REPLACE:
        give_way(e, g->owner);
        engine_do_open(e, handle, open);
        break;
    case GEN_FULL:
        engine_expire(e, e->clock());
        engine_do_open(e, handle, open);
        break;
    case GEN_NEW:
    case GEN_ADOPT:
        open_new(e, handle, open, g);
        break;
    case GEN_CONTINUE:
        reattach(e, g->owner, handle, open);
        break;
    case GEN_MISMATCH:
        refuse(e, handle, open, -TD_ERR_MISMATCH,
               "this request, or its Idempotency-Key, was used before with another prompt");
        break;
    case GEN_STALE:
        refuse(e, handle, open, -TD_ERR_BUSY,
               "a later attempt of the same request is here, or too many requests are");
        break;
    }
}

/* What can be known of a request to draw before a token is computed for it: what goes wrong later is the node's fault. */
static int check_sampling(const struct engine *e, const struct sampler_params *p, struct td_error *err)
{
    int rc = sampler_check(p, err);
    for (uint32_t i = 0; i < p->bias_count && rc == 0; i++)
        if ((uint32_t)p->bias[i].id >= e->model.vocab_count)
            rc = td_fail(err, -TD_ERR_ARG, "logit_bias names token id %d; the model has %u", p->bias[i].id,
                         e->model.vocab_count);
    return rc;
}

void engine_do_start(struct engine *e, struct sequence *s, const struct engine_generate *g)
{
    struct td_error err;
    s->upload_us = e->clock();
    s->idle = false;
    if (s->started)
        return;
    int rc = check_sampling(e, &g->sampling, &err);
    if (rc == 0 && (rc = sequence_set_generate(s, &e->model, g)) < 0)
        td_fail(&err, rc, "the node is out of memory");
    if (rc < 0) {
        engine_fail(e, s, rc, err.text);
        return;
    }
    engine_publish(e, s);
    uint32_t reply = sequence_reply_count(s);
    if (reply > 0 && !g->ignore_end && e->config.tokenizer &&
        tokenizer_is_end(e->config.tokenizer, s->ids[s->ids_count - 1]))
        engine_finish(e, s, FINISH_STOP); /* the held tokens are the whole reply */
    else if (reply >= s->reply_max)
        engine_finish(e, s, FINISH_LENGTH);
}

void engine_do_cancel(struct engine *e, struct sequence *s, bool finished, uint32_t keep_count)
{
    if (!finished || !s->started) {
        engine_drop(e, s);
        return;
    }
    sequence_truncate(s, keep_count);
    s->gen->reply_count = TD_MIN(s->gen->reply_count, keep_count);
    s->finishing = false;
    if (s->state == SEQ_CLOSING)
        s->finish = FINISH_STOP;
    else
        engine_finish(e, s, FINISH_STOP);
}

void engine_do_detach(struct engine *e, struct sequence *s)
{
    s->handle = 0;
    if (!s->started) { /* it cannot go on without GENERATE: whoever comes back sends everything again */
        engine_drop(e, s);
        return;
    }
    uint64_t now = e->clock();
    gen_detach(s->gen, now);
    if (s->state == SEQ_CLOSING)
        return;
    s->upload_us = now;
    /* What has come is kept, what has not is waited for: the edge sends it when it is back. */
    s->away = sequence_wants_data(s, &e->model);
}
