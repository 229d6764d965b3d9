/* pipeline_decode: replies that the device makes itself: a job's tokens through all layers, then one token behind the other, drawn as the cloud draws them
 * (kernels/sampler.h: a pure function of logits, parameters, seed, index and the ids so far). With the same arithmetic on both sides they are the cloud's.
 *
 * The job's ids have two writers: the thread appends what it draws, the caller what has come from the cloud. Whoever is first is right: a token drawn
 * when another one has taken its place is dropped (here), and one that differs from what was drawn is refused (pipeline_append).
 *
 * Replies that are at a token each get it from one pass; a prompt that is still run takes turns with them.
 *
 *     run 0 --pipeline_decode--> run N --end token, stop, send, close, failure--> run 0        at `until` it waits, and goes on when that is raised
 */
#include "edge/pipeline_internal.h"
#include "shared/paced.h"
#include <stdlib.h>
#include <time.h>

#define SINK_RETRY_NS 1000000L

/* ---- callers ---- */

bool pipeline_decodes(const struct pipeline *p)
{
    return p->decodes;
}

int pipeline_decode(struct pipeline *p, struct pipeline_job *job, const struct pipeline_decode *decode)
{
    if (!p->decodes)
        return -TD_ERR_UNSUPPORTED;
    struct pipeline_decode *first = job->decode ? NULL : malloc(sizeof *first);
    if (!job->decode && !first)
        return -TD_ERR_NOMEM;
    pthread_mutex_lock(&p->lock);
    if (first) {
        *first = *decode;
        job->decode = first;
    }
    job->run = decode->run;
    job->until = TD_MIN(decode->until, job->capacity);
    job->sending = job->stuck = false;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    return 0;
}

void pipeline_decode_until(struct pipeline *p, struct pipeline_job *job, uint32_t until)
{
    pthread_mutex_lock(&p->lock);
    job->until = TD_MIN(until, job->capacity);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

void pipeline_decode_stop(struct pipeline *p, struct pipeline_job *job)
{
    pthread_mutex_lock(&p->lock);
    job->run = 0;
    pthread_cond_broadcast(&p->changed); /* it may be filled now */
    pthread_mutex_unlock(&p->lock);
}

bool decode_has_work(const struct pipeline_job *job)
{
    return job->run != 0 && !job->closed && job->ids_count < job->until;
}

/* ---- handing on ---- */

static bool wants(struct pipeline *p, const struct pipeline_job *job, uint32_t run)
{
    pthread_mutex_lock(&p->lock);
    bool yes = !p->stop && !job->closed && (job->run == run || job->run == 0);
    pthread_mutex_unlock(&p->lock);
    return yes;
}

static void hand_on(struct pipeline *p, struct pipeline_job *job, const struct pipeline_event *event)
{
    int rc = -TD_ERR_CANCELLED;
    struct pipeline_event *e = malloc(sizeof *e);
    if (!e)
        return; /* the reply goes on without it: the cloud has it, or the run ends in a gap */
    *e = *event;
    e->job = job->id;
    while (wants(p, job, e->run) && (rc = p->config.sink(p->config.ctx, e)) == -TD_ERR_FULL)
        nanosleep(&(struct timespec){.tv_nsec = SINK_RETRY_NS}, NULL);
    if (rc != 0)
        pipeline_event_free(e);
}

static void fail(struct pipeline *p, struct pipeline_job *job, uint32_t run, int code)
{
    pthread_mutex_lock(&p->lock);
    if (job->run == run)
        job->run = 0;
    pthread_mutex_unlock(&p->lock);
    hand_on(p, job, &(struct pipeline_event){.type = PIPELINE_DECODE_FAILED, .run = run, .code = code});
}

/* ---- steps ---- */

/* False: the token's place has been taken, or nobody wants it. */
static bool append(struct pipeline *p, struct pipeline_job *job, uint32_t run, uint32_t at, int32_t id)
{
    const struct tokenizer *tokenizer = p->config.tokenizer;
    bool ends = tokenizer && !job->decode->ignore_end && tokenizer_is_end(tokenizer, id);
    pthread_mutex_lock(&p->lock);
    bool fits = job->run == run && job->ids_count == at && at < job->until;
    if (fits)
        job->ids[job->ids_count++] = id;
    if (fits && ends)
        job->run = 0;
    pthread_mutex_unlock(&p->lock);
    return fits;
}

/* start_us: when the pass began, which was for this token alone; 0: it was not. */
static int draw(struct pipeline *p, const struct decode_turn *turn, float *logits, uint64_t start_us)
{
    struct pipeline_job *job = turn->job;
    const struct pipeline_decode *d = job->decode;
    uint32_t at = turn->ids_count, unseen = d->reply_only ? d->prompt_count : 0;
    struct pipeline_event e = {.type = PIPELINE_TOKEN, .run = turn->run, .index = at - d->prompt_count};
    int rc = sampler_draw(&d->sampling, logits, p->config.backend->model->params.vocab_count,
                          job->ids + unseen, at - unseen, d->prompt_count - unseen, p->sampler, &e.token);
    if (rc < 0)
        return rc;
    if (job->cost.tokens > 1)
        e.cost = job->cost;
    else if (start_us)
        e.token_us = TD_MAX(clock_mono_us() - start_us, UINT64_C(1));
    if (append(p, job, turn->run, at, e.token.id))
        hand_on(p, job, &e);
    return 0;
}

/* What the job has, chunk by chunk, up to the token behind it. */
static void chunk_step(struct pipeline *p, const struct decode_turn *turn)
{
    struct pipeline_job *job = turn->job;
    uint32_t layers = p->layer_count, last = turn->ids_count - 1;
    uint64_t start_us = clock_mono_us();
    if (job->depth < layers)
        pipeline_drop_pages(p, job, 0);
    else if (job->position > last) /* its row is needed, and its block may be shared by now */
        pipeline_drop_pages(p, job, last / KV_BLOCK_TOKENS);
    pipeline_take_cached(p, job, last, layers);
    if (disk_fetch(p, job, last, layers))
        return;
    struct pipeline_run chunk = {
        .end = pipeline_chunk_end(p, job->position, turn->ids_count), .layers = layers, .may_reclaim = true};
    chunk.logits = chunk.end == turn->ids_count ? p->logits : NULL;
    int rc = pipeline_compute(p, job, &chunk);
    if (rc == 0 && chunk.logits)
        rc = draw(p, turn, p->logits, start_us);
    else if (rc == 0)
        hand_on(p, job, &(struct pipeline_event){.type = PIPELINE_RAN, .run = turn->run, .cost = job->cost});
    job->cost = (struct pipeline_cost){0};
    if (rc < 0)
        fail(p, job, turn->run, rc);
}

/* All but one token of it has been run. */
static bool is_at_token(const struct pipeline *p, const struct pipeline_job *job, uint32_t ids_count)
{
    return job->depth >= p->layer_count && job->position + 1 == ids_count;
}

/* A row of each, in one pass. Pages are found before anything is looked at: to find one, those of jobs that only fill are taken, and one of these turns
 * may be such a job since its run was stopped. Who finds none waits for those that go on; only the first is told. */
static void tokens_step(struct pipeline *p, const struct decode_turn *turns, uint32_t count)
{
    struct decode_turn taken[DECODES_MAX];
    struct batch_seq seqs[DECODES_MAX];
    size_t vocab_count = p->config.backend->model->params.vocab_count;
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++) {
        int rc = pipeline_need_pages(p, turns[i].job, turns[i].ids_count, true);
        if (rc < 0 && i == 0)
            fail(p, turns[i].job, turns[i].run, rc);
    }
    for (uint32_t i = 0; i < count; i++) {
        struct pipeline_job *job = turns[i].job;
        if (!is_at_token(p, job, turns[i].ids_count) ||
            job->page_count * KV_BLOCK_TOKENS < turns[i].ids_count)
            continue;
        seqs[n] = (struct batch_seq){.layer_end = p->layer_count,
                                     .position = job->position,
                                     .row_count = 1,
                                     .ids = job->ids + job->position,
                                     .logits = p->logits + n * vocab_count,
                                     .logit_count = 1,
                                     .pages = job->pages};
        taken[n++] = turns[i];
    }
    if (n == 0)
        return;
    uint64_t start_us = clock_mono_us();
    int rc = p->config.backend->ops->forward(p->config.backend, &(struct batch){seqs, n});
    paced_wait(start_us, (double)n * p->layer_count);
    for (uint32_t i = 0; i < n; i++) {
        int drawn = rc;
        if (rc == 0) {
            pipeline_has_run(p, taken[i].job, taken[i].ids_count, p->layer_count);
            drawn = draw(p, &taken[i], p->logits + i * vocab_count, 0);
        }
        if (drawn < 0)
            fail(p, taken[i].job, taken[i].run, drawn);
    }
}

void decode_step(struct pipeline *p, const struct decode_turn *turns, uint32_t count)
{
    if (count > 1)
        tokens_step(p, turns, count);
    else
        chunk_step(p, turns);
}

/* ---- turns ---- */

/* The one that was served longest ago, and not since `begun`. */
static struct pipeline_job *longest_waiting(struct pipeline *p, uint64_t begun, bool at_token)
{
    struct pipeline_job *found = NULL;
    for (struct pipeline_job *job = p->jobs; job; job = job->next)
        if (decode_has_work(job) && job->served <= begun && (!found || job->served < found->served) &&
            (!at_token || is_at_token(p, job, job->ids_count)))
            found = job;
    return found;
}

uint32_t decode_pick(struct pipeline *p, struct decode_turn turns[DECODES_MAX])
{
    uint64_t begun = p->turns;
    uint32_t count = 0;
    struct pipeline_job *job = longest_waiting(p, begun, false);
    bool more = job && is_at_token(p, job, job->ids_count);
    while (job) {
        job->served = ++p->turns;
        turns[count++] = (struct decode_turn){job, job->run, job->ids_count};
        job = more && count < DECODES_MAX ? longest_waiting(p, begun, true) : NULL;
    }
    return count;
}

/* ---- what a token takes ---- */

void decode_measure(struct pipeline *p, uint32_t page)
{
    int32_t id = 0;
    struct batch_seq seq = {.layer_end = p->layer_count,
                            .row_count = 1,
                            .ids = &id,
                            .logits = p->logits,
                            .logit_count = 1,
                            .pages = &page};
    struct pipeline_event *e = calloc(1, sizeof *e);
    int rc = -TD_ERR_NOMEM;
    for (int i = 0; i < 2 && e; i++) {
        uint64_t start_us = clock_mono_us();
        rc = p->config.backend->ops->forward(p->config.backend, &(struct batch){&seq, 1});
        paced_wait(start_us, (double)p->layer_count);
        e->token_us = clock_mono_us() - start_us;
    }
    if (!e)
        return;
    e->type = PIPELINE_TOKEN;
    if (rc < 0 || p->config.sink(p->config.ctx, e) != 0)
        pipeline_event_free(e);
}
