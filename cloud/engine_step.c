/* engine_step: one step. Every running sequence says what it could do (sequence.h), the scheduler says how many rows of it run, one forward() runs
 * them all, and what comes out goes back: frontiers move, logits become tokens, whole blocks become public.
 *
 * A backend that draws (backend_ops.samples) is asked for the token instead of the logits: 32 rows of 128,256 logits are 16 MB a step. Requests whose
 * bias and penalties name more than SAMPLE_ADJUST_MAX ids get logits, and their token is drawn here. Which it is depends on the request alone. */
#include "cloud/engine_internal.h"
#include "shared/paced.h"
#include <stdio.h>

#define RATE_ROWS_MIN 32u /* a step of fewer prefill rows says little about the rate */

/* --- choosing ------------------------------------------------------------------------------------- */

/* Without GENERATE the last row waits: its token is drawn in the same step. False: it waited too long and is gone. */
static bool wait_for_generate(struct engine *e, struct sequence *s, uint64_t now_us, struct seq_job *job)
{
    uint64_t deadline = s->upload_us + LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000);
    if (s->started || !job->logits)
        return true;
    job->logits = false;
    if (--job->rows > 0)
        return true;
    job->kind = JOB_NONE;
    if (now_us >= deadline) {
        engine_fail(e, s, -TD_ERR_TIMEOUT, "the prompt is ready, but GENERATE did not come");
        return false;
    }
    s->deadline_us = deadline;
    return true;
}

/* A private prompt cannot go on without its device: it is asked for another plan. One that is away finds it parked; of one that is silent, or sends what is of
 * no use again and again, the request ends. False: s has left `live`. */
static bool ask_device(struct engine *e, struct sequence *s, uint64_t now_us)
{
    if (s->handle == 0) {
        engine_park(e, s);
        return false;
    }
    uint64_t heard_us = TD_MAX(s->upload_us, s->kv_us);
    if (now_us >= heard_us + LIMIT_UPLOAD_IDLE_MS * UINT64_C(1000) || s->asked == ENGINE_ASKS_MAX) {
        engine_fail(e, s, -TD_ERR_TIMEOUT,
                    "the device's part of a private prompt did not come, and nothing here can compute it");
        return false;
    }
    sequence_ask_again(s);
    s->upload_us = now_us;
    engine_emit_need(s);
    return true;
}

/* The job of one running sequence, if it has any now. False: s has left `live`. */
static bool find_job(struct engine *e, struct sequence *s, uint64_t now_us, struct seq_job *job)
{
    job->kind = JOB_NONE;
    if (!s->finishing && !gen_may_decode(s->gen)) {
        engine_park(e, s);
        return false;
    }
    *job = sequence_next(s, &e->model, now_us, e->config.kv_stall_ms * UINT64_C(1000));
    if (s->complete / KV_BLOCK_TOKENS > s->published)
        engine_publish(e, s);
    if (s->may_resume)
        engine_emit_ingested(e,
                             s); /* not behind a step: the sooner its edge knows, the more it can still do */
    if (s->device_wanted)
        return ask_device(e, s, now_us);
    engine_meet_limit(e, s, job);
    return wait_for_generate(e, s, now_us, job);
}

static uint32_t collect_jobs(struct engine *e)
{
    uint32_t count = 0;
    uint64_t now = e->clock();
    for (uint32_t i = 0; i < e->live_count;) {
        struct sequence *s = e->live[i];
        struct seq_job job = {.kind = JOB_NONE};
        if (s->state == SEQ_RUNNING && !find_job(e, s, now, &job))
            continue;
        i++;
        s->idle = job.kind == JOB_NONE;
        if (s->idle || (s->placeless && !engine_take_place(e, NULL)))
            continue;
        s->placeless = false;
        e->picked[count] = s;
        e->jobs[count] = job;
        e->items[count++] = (struct scheduler_item){.rows = job.rows,
                                                    .left = s->ids_count - s->high,
                                                    .decode = job.decode,
                                                    .turn = s->turn,
                                                    .round = s->round};
    }
    return count;
}

/* An edge is sending: what it may send on, and what it hears of its prompt's progress, waits for a step's end. */
static bool somebody_sends(const struct engine *e)
{
    for (uint32_t i = 0; i < e->live_count; i++)
        if (e->live[i]->state == SEQ_RUNNING && e->live[i]->planned &&
            (sequence_wants_data(e->live[i], &e->model) ||
             (e->live[i]->may_resume && e->live[i]->high < e->live[i]->plan_end)))
            return true;
    return false;
}

static void schedule(struct engine *e, uint32_t count)
{
    uint32_t decode = 0;
    for (uint32_t i = 0; i < count; i++)
        decode += e->items[i].decode;
    uint64_t step_us = decode > 0 || somebody_sends(e) ? ENGINE_STEP_TARGET_US : 0;
    uint32_t prefill = scheduler_prefill_rows(e->config.token_budget, decode, e->prefill_rows_per_s, step_us);
    struct scheduler_budget budget = {.rows = e->config.token_budget,
                                      .prefill_rows = prefill,
                                      .sequences = e->config.sequences_max,
                                      .turn = e->next_turn};
    e->next_turn = scheduler_pick(e->items, count, budget);
    for (uint32_t i = 0; i < count; i++)
        if (e->items[i].granted > 0 && !e->items[i].decode)
            engine_take_turn(e, e->picked[i], e->items[i].turn);
}

/* --- filling the batch ---------------------------------------------------------------------------- */

/* Pages for the job's rows; fewer rows when there are fewer pages. */
static void take_pages(struct engine *e, struct sequence *s, struct seq_job *job)
{
    uint32_t end = job->position + job->rows;
    for (uint32_t i = job->position / KV_BLOCK_TOKENS; i < sequence_blocks(end); i++) {
        if (s->pages[i] != PAGE_NONE)
            continue;
        uint32_t page = engine_take_page(e, s);
        if (page == PAGE_NONE) {
            uint32_t limit = TD_MAX(i * KV_BLOCK_TOKENS, job->position);
            job->rows = limit - job->position;
            return;
        }
        s->pages[i] = page;
        s->page_count++;
    }
}

/* What penalties see: prompt and reply; of a private prompt the reply alone, as nothing else is known. */
struct seen {
    const int32_t *ids;
    uint32_t count, prompt_count;
};

static struct seen seen_ids(const struct sequence *s)
{
    if (s->is_private)
        return (struct seen){s->ids + s->prompt_count, s->ids_count - s->prompt_count, 0};
    return (struct seen){s->ids, s->ids_count, s->prompt_count};
}

/* The token behind the last row, or what it is drawn from. `at`: place in the batch. */
static void want_token(struct engine *e, const struct sequence *s, uint32_t at, struct batch_seq *b)
{
    struct sample_adjust *adjust = e->adjust + (size_t)at * SAMPLE_ADJUST_MAX;
    struct seen seen = seen_ids(s);
    int count = e->requests ? sampler_adjust(&s->generate.sampling, seen.ids, seen.count, seen.prompt_count,
                                             e->sampler, adjust)
                            : -TD_ERR_UNSUPPORTED;
    b->logit_count = 1;
    if (count < 0) {
        b->logits = e->logits + (size_t)at * e->model.vocab_count;
        return;
    }
    e->requests[at] = (struct sample_request){.params = &s->generate.sampling,
                                              .index = sequence_reply_count(s),
                                              .adjust = adjust,
                                              .adjust_count = (uint32_t)count,
                                              .out = &e->sampled[at]};
    b->sample = &e->requests[at];
}

static struct batch_seq batch_seq_of(struct engine *e, struct sequence *s, const struct seq_job *job,
                                     uint32_t at, float *hidden)
{
    struct batch_seq b = {.layer_begin = job->layer_begin,
                          .layer_end = job->layer_end,
                          .position = job->position,
                          .row_count = job->rows,
                          .pages = s->pages};
    if (job->kind == JOB_HIDDEN || job->kind == JOB_LAST)
        b.hidden_in = hidden;
    else
        b.ids = s->ids + job->position;
    if (job->logits)
        want_token(e, s, at, &b);
    return b;
}

/* The granted rows of all jobs, oldest sequence first, so that whoever must give way for a page is not in the batch yet. */
static uint32_t fill_batch(struct engine *e, uint32_t count)
{
    uint32_t filled = 0, hidden_rows = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct sequence *s = e->picked[i];
        struct seq_job job = e->jobs[i];
        if (e->items[i].granted == 0 || s->state != SEQ_RUNNING)
            continue;
        uint32_t wanted = job.rows;
        job.rows = e->items[i].granted;
        if (job.kind != JOB_LAST)
            take_pages(e, s, &job);
        job.logits = job.logits && job.rows == wanted;
        float *hidden = e->hidden + (size_t)hidden_rows * e->model.embd_size;
        bool is_hidden = job.kind == JOB_HIDDEN || job.kind == JOB_LAST;
        if (job.rows == 0 || (is_hidden && sequence_hidden_rows(s, &e->model, &job, hidden) < 0))
            continue;
        hidden_rows += is_hidden ? job.rows : 0;
        e->picked[filled] = s;
        e->jobs[filled] = job;
        e->batch[filled] = batch_seq_of(e, s, &job, filled, hidden);
        filled++;
    }
    return filled;
}

/* --- running -------------------------------------------------------------------------------------- */

static int forward(struct engine *e, uint32_t first, uint32_t count)
{
    return e->backend->ops->forward(e->backend, &(struct batch){e->batch + first, count});
}

/* A batch that is refused is refused whole: find out whose fault it is, and let only that one fail. */
static uint32_t run_one_by_one(struct engine *e, uint32_t count)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct sequence *s = e->picked[i];
        int rc = forward(e, i, 1);
        if (rc < 0) {
            char text[128];
            snprintf(text, sizeof text, "the model could not be run over %u tokens: %s", e->jobs[i].rows,
                     td_status_text(rc));
            engine_fail(e, s, rc, text);
            continue;
        }
        e->picked[kept] = s;
        e->jobs[kept] = e->jobs[i];
        e->batch[kept++] = e->batch[i];
    }
    return kept;
}

static double job_work(const struct seq_job *job)
{
    return (double)job->rows * (job->layer_end - job->layer_begin);
}

/* Tokens times layers. */
static double work_of(const struct engine *e, uint32_t count)
{
    double work = 0;
    for (uint32_t i = 0; i < count; i++)
        work += job_work(&e->jobs[i]);
    return work;
}

/* Cost of a token and layer, at the mean position of what ran. */
static void learn_cost(struct engine *e, uint32_t count, uint64_t took_us)
{
    double work = work_of(e, count), position = 0;
    for (uint32_t i = 0; i < count; i++)
        position += job_work(&e->jobs[i]) * (e->jobs[i].position + e->jobs[i].rows / 2.0);
    if (work > 0)
        line_add(&e->prefill_cost, position / work, (double)took_us * 1e3 / work);
}

static void measure(struct engine *e, uint32_t count, uint64_t took_us)
{
    uint32_t rows = 0, prefill = 0;
    for (uint32_t i = 0; i < count; i++) {
        rows += e->jobs[i].rows;
        if (e->jobs[i].decode)
            continue;
        prefill += e->jobs[i].rows;
        e->picked[i]->prefill_us += took_us;
    }
    e->steps++;
    e->rows += rows;
    metric_add(e->metrics.prefill, prefill);
    if (prefill < RATE_ROWS_MIN || took_us == 0)
        return;
    learn_cost(e, count, took_us);
    uint64_t rate = rows * UINT64_C(1000000) / took_us;
    e->prefill_rows_per_s = e->prefill_rows_per_s ? (e->prefill_rows_per_s * 3 + rate) / 4 : rate;
}

/* --- what comes of it ----------------------------------------------------------------------------- */

static void take_token(struct engine *e, struct sequence *s, const struct sampled *sampled)
{
    uint64_t now = e->clock();
    uint32_t index = sequence_reply_count(s);
    if (s->first_token_us == 0) {
        s->first_token_us = now;
        metric_observe(e->metrics.first_token, (double)(now - s->opened_us) * 1e-6);
    } else {
        metric_observe(e->metrics.inter_token, (double)(now - s->last_token_us) * 1e-6);
    }
    s->last_token_us = now;
    if (s->sampled)
        s->sampled[index] = *sampled;
    sequence_append(s, &e->model, sampled->id);
    metric_add(e->metrics.generated, 1);
    engine_emit_tokens(s, index, 1);
}

static int draw(struct engine *e, const struct sequence *s, const struct batch_seq *b, struct sampled *out)
{
    struct seen seen = seen_ids(s);
    if (!b->sample)
        return sampler_draw(&s->generate.sampling, b->logits, e->model.vocab_count, seen.ids, seen.count,
                            seen.prompt_count, e->sampler, out);
    metric_add(e->metrics.drawn_by_device, 1);
    *out = *b->sample->out;
    return b->sample->status;
}

static void extend_reply(struct engine *e, struct sequence *s, const struct batch_seq *b)
{
    struct sampled sampled;
    if (draw(e, s, b, &sampled) < 0) {
        engine_fail(e, s, -TD_ERR_INTERNAL, "no token could be drawn: the logits are not finite");
        return;
    }
    int rc = gen_append(s->gen,
                        sampled.id); /* before it is sent: an edge never holds a token that the table lacks */
    if (rc < 0) {
        engine_fail(e, s, rc, "the reply has no room for another token");
        return;
    }
    take_token(e, s, &sampled);
    if (!s->generate.ignore_end && e->config.tokenizer && tokenizer_is_end(e->config.tokenizer, sampled.id))
        engine_finish(e, s, FINISH_STOP);
    else if (sequence_reply_count(s) >= s->reply_max)
        engine_finish(e, s, FINISH_LENGTH);
}

static void take_result(struct engine *e, struct sequence *s, const struct seq_job *job,
                        const struct batch_seq *b)
{
    uint32_t recomputed = s->recomputed_tokens;
    sequence_advance(s, &e->model, job);
    metric_add(e->metrics.recomputed, s->recomputed_tokens - recomputed);
    engine_publish(e, s);
    if (s->finishing && s->high == s->ids_count)
        engine_close(e, s);
    else if (job->logits)
        extend_reply(e, s, b);
}

bool engine_step(struct engine *e)
{
    uint32_t count = collect_jobs(e);
    if (count == 0)
        return false;
    schedule(e, count);
    count = fill_batch(e, count);
    if (count == 0)
        return false;
    uint64_t start = e->clock();
    if (forward(e, 0, count) < 0)
        count = run_one_by_one(e, count);
    paced_wait(start, work_of(e, count));
    measure(e, count, e->clock() - start);
    for (uint32_t i = 0; i < count; i++)
        take_result(e, e->picked[i], &e->jobs[i], &e->batch[i]);
    return true;
}
