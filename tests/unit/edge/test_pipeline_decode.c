/* pipeline_decode: what the device draws itself: the tokens of a naive loop, in turn with the other work, and who gives way to whom. */
#include "fake_backend.h"
#include "edge/pipeline.h"
#include "kernels/kv_layout.h"
#include "shared/crypto.h"
#include "shared/queue.h"
#include "shared/tokenizer_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

#define WAIT_US  60000000 /* long: the machine may be busy */
#define LAYERS   3
#define CAPACITY 400
#define PROMPT   150

struct rig {
    struct fake_backend *fake;
    struct gguf *file; /* a real model instead */
    struct model *model;
    struct local_kv *kv;
    struct pipeline *pipeline;
    struct queue *events;
};
static int32_t ids[CAPACITY];
static struct kv_block_id chain[CAPACITY / KV_BLOCK_TOKENS];
static const uint8_t key[32] = {9};

static int sink(void *ctx, struct pipeline_event *e)
{
    return queue_push(((struct rig *)ctx)->events, e);
}

static void rig_start(struct rig *rig, struct backend *backend, const struct tokenizer *tokenizer)
{
    rig->kv = local_kv_create(backend->page_count);
    rig->events = queue_create(4096);
    struct pipeline_config config = {.backend = backend,
                                     .kv = rig->kv,
                                     .chunk_tokens = 64,
                                     .tokenizer = tokenizer,
                                     .sink = sink,
                                     .ctx = rig};
    assert_int_equal(pipeline_create(&config, &rig->pipeline, NULL), 0);
}

static void rig_fake(struct rig *rig, uint32_t pages, uint32_t held)
{
    *rig = (struct rig){.fake = fake_backend_create(pages, held, LAYERS)};
    rig_start(rig, &rig->fake->base, NULL);
}

static void rig_free(struct rig *rig)
{
    struct pipeline_event *e;
    pipeline_destroy(rig->pipeline);
    while ((e = queue_pop(rig->events, 0)))
        pipeline_event_free(e);
    queue_destroy(rig->events);
    local_kv_destroy(rig->kv);
    if (rig->model)
        model_free(rig->model);
    if (rig->file)
        gguf_close(rig->file);
}

static struct pipeline_job *open_job(struct rig *rig, uint64_t id, uint32_t count)
{
    struct pipeline_work work = {.id = id, .ids = ids, .count = count, .capacity = CAPACITY, .chain = chain};
    memcpy(work.principal_key, key, sizeof key);
    struct pipeline_job *job = pipeline_open(rig->pipeline, &work);
    assert_non_null(job);
    return job;
}

static int decode(struct rig *rig, struct pipeline_job *job, uint32_t run, uint32_t until)
{
    struct pipeline_decode d = {.run = run, .prompt_count = PROMPT, .until = until};
    sampler_defaults(&d.sampling);
    d.sampling.temperature = 0;
    return pipeline_decode(rig->pipeline, job, &d);
}

/* The next event that carries a token, of this job. */
static struct sampled next_token(struct rig *rig, uint64_t job, uint32_t run, uint32_t index)
{
    for (;;) {
        struct pipeline_event *e = queue_pop(rig->events, WAIT_US);
        assert_non_null(e);
        assert_int_not_equal(e->type, PIPELINE_DECODE_FAILED);
        bool is_token = e->type == PIPELINE_TOKEN && e->job == job;
        struct sampled token = e->token;
        if (is_token) {
            assert_int_equal(e->run, run);
            assert_int_equal(e->index, index);
            assert_true(e->token_us > 0 || e->cost.tokens > 1);
        }
        pipeline_event_free(e);
        if (is_token)
            return token;
    }
}

static void no_token(struct rig *rig)
{
    assert_true(pipeline_wait_idle(rig->pipeline, WAIT_US / 1000));
    assert_null(queue_pop(rig->events, 0));
}

/* ---- the fake one: its tokens can be foretold ---- */

static void tokens_follow_each_other_to_the_bound(void **state)
{
    (void)state;
    struct rig rig;
    rig_fake(&rig, 16, LAYERS);
    assert_true(pipeline_decodes(rig.pipeline));
    struct pipeline_job *job = open_job(&rig, 1, PROMPT);
    assert_int_equal(decode(&rig, job, 1, PROMPT + 3), 0);
    int32_t last = ids[PROMPT - 1];
    for (uint32_t i = 0; i < 3; i++) {
        int32_t id = next_token(&rig, 1, 1, i).id;
        assert_int_equal(id, fake_next(last, PROMPT - 1 + i));
        last = id;
    }
    no_token(&rig);
    assert_int_equal(rig.fake->rows, PROMPT + 2); /* the last one drawn is not run before it is needed */
    pipeline_decode_until(rig.pipeline, job, CAPACITY + 100); /* more than there is room for */
    for (uint32_t i = 3; i < CAPACITY - PROMPT; i++) {
        int32_t id = next_token(&rig, 1, 1, i).id;
        assert_int_equal(id, fake_next(last, PROMPT - 1 + i));
        last = id;
    }
    no_token(&rig);
    assert_int_equal(rig.fake->rows, CAPACITY - 1);
    assert_int_equal(rig.fake->pages_bad, 0);
    assert_int_equal(local_kv_held(rig.kv, chain, 2, LAYERS), 2); /* what was run is kept, all layers of it */
    pipeline_close(rig.pipeline, job, 0);
    rig_free(&rig);
}

static void what_is_held_is_not_run_again(void **state)
{
    (void)state;
    struct rig rig;
    rig_fake(&rig, 16, LAYERS);
    struct pipeline_job *job = open_job(&rig, 1, PROMPT);
    assert_int_equal(decode(&rig, job, 1, PROMPT + 1), 0);
    int32_t id = next_token(&rig, 1, 1, 0).id;
    pipeline_close(rig.pipeline, job, 0);
    struct pipeline_job *again = open_job(&rig, 2, PROMPT);
    assert_int_equal(decode(&rig, again, 1, PROMPT + 1), 0);
    assert_int_equal(next_token(&rig, 2, 1, 0).id, id);
    assert_int_equal(rig.fake->rows, PROMPT + PROMPT % KV_BLOCK_TOKENS);
    pipeline_close(rig.pipeline, again, 0);

    job = open_job(&rig, 3, 2 * KV_BLOCK_TOKENS); /* all of it is held, but its last row is wanted */
    struct pipeline_decode d = {.run = 1, .prompt_count = 2 * KV_BLOCK_TOKENS, .until = CAPACITY};
    sampler_defaults(&d.sampling);
    d.sampling.temperature = 0;
    d.until = 2 * KV_BLOCK_TOKENS + 1;
    uint32_t before = rig.fake->rows;
    assert_int_equal(pipeline_decode(rig.pipeline, job, &d), 0);
    assert_int_equal(next_token(&rig, 3, 1, 0).id,
                     fake_next(ids[2 * KV_BLOCK_TOKENS - 1], 2 * KV_BLOCK_TOKENS - 1));
    assert_int_equal(rig.fake->rows, before + KV_BLOCK_TOKENS);
    pipeline_close(rig.pipeline, job, 0);
    rig_free(&rig);
}

static void fewer_layers_than_all_are_run_anew(void **state)
{
    (void)state;
    struct rig rig;
    rig_fake(&rig, 16, LAYERS);
    struct pipeline_job *job = open_job(&rig, 1, PROMPT);
    struct pipeline_send send = {
        .epoch = 1, .ranges = {{0, PROMPT, 1, KV_RAW, HIDDEN_F32}}, .range_count = 1};
    pipeline_send(rig.pipeline, job, &send);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    assert_int_equal(rig.fake->rows, PROMPT);
    assert_int_equal(decode(&rig, job, 1, PROMPT + 2), 0);
    next_token(&rig, 1, 1, 0);
    next_token(&rig, 1, 1, 1);
    assert_int_equal(rig.fake->rows, 2 * PROMPT + 1);
    assert_int_equal(rig.fake->pages_bad, 0);
    send.epoch = 2; /* a send ends it */
    pipeline_decode_until(rig.pipeline, job, PROMPT + 3);
    next_token(&rig, 1, 1, 2);
    pipeline_send(rig.pipeline, job, &send);
    pipeline_decode_until(rig.pipeline, job, CAPACITY);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    struct pipeline_event *e;
    while ((e = queue_pop(rig.events, 0))) {
        assert_int_not_equal(e->type, PIPELINE_TOKEN);
        pipeline_event_free(e);
    }
    pipeline_close(rig.pipeline, job, 0);
    rig_free(&rig);
}

static void what_the_cloud_says_comes_first(void **state)
{
    (void)state;
    struct rig rig;
    rig_fake(&rig, 16, LAYERS);
    struct pipeline_job *job = open_job(&rig, 1, PROMPT);
    assert_int_equal(decode(&rig, job, 1, PROMPT + 2), 0);
    int32_t drawn[3] = {next_token(&rig, 1, 1, 0).id, next_token(&rig, 1, 1, 1).id, 77};
    int32_t other[2] = {drawn[0] + 1, 5};
    assert_int_equal(pipeline_append(rig.pipeline, job, PROMPT, other, 2), -TD_ERR_CONFLICT);
    assert_int_equal(pipeline_append(rig.pipeline, job, PROMPT, drawn, 1), 0); /* behind what was drawn */
    assert_int_equal(pipeline_append(rig.pipeline, job, PROMPT + 1, drawn + 1, 2), 0);
    pipeline_decode_until(rig.pipeline, job, PROMPT + 4);
    assert_int_equal(next_token(&rig, 1, 1, 3).id, fake_next(77, PROMPT + 2));
    no_token(&rig);
    assert_int_equal(rig.fake->rows, PROMPT + 3);
    pipeline_decode_stop(rig.pipeline, job);
    pipeline_decode_until(rig.pipeline, job, PROMPT + 9);
    no_token(&rig);
    assert_int_equal(decode(&rig, job, 2, PROMPT + 5), 0); /* and once more */
    next_token(&rig, 1, 2, 4);
    pipeline_close(rig.pipeline, job, 0);
    no_token(&rig);
    rig_free(&rig);
}

/* Two jobs that draw and one that sends: none waits for the end of another. */
static void work_takes_turns(void **state)
{
    (void)state;
    struct rig rig;
    sem_t gate;
    sem_init(&gate, 0, 0);
    rig_fake(&rig, 32, LAYERS);
    struct pipeline_job *first = open_job(&rig, 1, PROMPT), *second = open_job(&rig, 2, PROMPT);
    assert_int_equal(decode(&rig, first, 1, PROMPT + 1), 0);
    next_token(&rig, 1, 1, 0);
    assert_int_equal(decode(&rig, second, 1, PROMPT + 1), 0);
    next_token(&rig, 2, 1, 0);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    rig.fake->gate = &gate; /* all three are there before more than one pass has been run */
    pipeline_decode_until(rig.pipeline, first, CAPACITY);
    pipeline_decode_until(rig.pipeline, second, CAPACITY);
    struct pipeline_job *third = open_job(&rig, 3, CAPACITY);
    struct pipeline_send send = {
        .epoch = 1, .ranges = {{0, CAPACITY, 2, PLAN_CODEC_NONE, HIDDEN_F32}}, .range_count = 1};
    pipeline_send(rig.pipeline, third, &send);
    for (int i = 0; i < 2 * CAPACITY; i++)
        sem_post(&gate);
    uint32_t tokens[2] = {0}, chunks = 0;
    for (bool sent = false; !sent;) {
        struct pipeline_event *e = queue_pop(rig.events, WAIT_US);
        assert_non_null(e);
        if (e->type == PIPELINE_TOKEN)
            tokens[e->job - 1]++;
        chunks += e->type == PIPELINE_MESSAGES;
        sent = e->type == PIPELINE_SENT;
        pipeline_event_free(e);
    }
    assert_true(chunks >= CAPACITY / 64);
    assert_true(tokens[0] >= 2 && tokens[1] >= 2); /* seven chunks, seven tokens between them */
    assert_true(tokens[0] + tokens[1] < CAPACITY - PROMPT);
    pipeline_close(rig.pipeline, first, 0);
    pipeline_close(rig.pipeline, second, 0);
    pipeline_close(rig.pipeline, third, 0);
    rig_free(&rig);
    sem_destroy(&gate);
}

/* Tokens of jobs 1 to `jobs`, `count` of each, from index `first` on; whose come first is up to the thread. */
static void collect_from(struct rig *rig, uint32_t jobs, uint32_t first, uint32_t count,
                         struct sampled (*out)[CAPACITY])
{
    uint32_t had[16] = {0};
    for (uint32_t left = jobs * count; left > 0;) {
        struct pipeline_event *e = queue_pop(rig->events, WAIT_US);
        assert_non_null(e);
        assert_int_not_equal(e->type, PIPELINE_DECODE_FAILED);
        if (e->type == PIPELINE_TOKEN) {
            assert_int_equal(e->index, first + had[e->job - 1]);
            out[e->job - 1][had[e->job - 1]++] = e->token;
            left--;
        }
        pipeline_event_free(e);
    }
}

/* Replies that are at a token share a pass, as many as there is room for logits; each has its own tokens, and none is left behind. */
static void replies_share_a_pass(void **state)
{
    (void)state;
    enum { COUNT = 20 };
    static struct sampled tokens[10][CAPACITY];
    static const struct {
        uint32_t jobs, passes;
    } cases[] = {{4, COUNT + 1}, {8, COUNT + 1}, {10, 10 * COUNT / 8 + 4}};
    for (size_t k = 0; k < TD_COUNT(cases); k++) {
        struct rig rig;
        struct pipeline_job *jobs[10];
        sem_t gate;
        sem_init(&gate, 0, 1000);
        rig_fake(&rig, 64, LAYERS);
        for (uint32_t i = 0; i < cases[k].jobs; i++) {
            jobs[i] = open_job(&rig, i + 1, PROMPT);
            assert_int_equal(decode(&rig, jobs[i], 1, PROMPT + 1), 0);
            int32_t other = next_token(&rig, i + 1, 1, 0).id, id = (int32_t)(100 + i);
            pipeline_close(rig.pipeline, jobs[i], 0);
            jobs[i] = open_job(&rig, i + 1, PROMPT); /* with a last id of its own */
            assert_int_equal(pipeline_append(rig.pipeline, jobs[i], PROMPT, &id, 1), 0);
            assert_int_equal(decode(&rig, jobs[i], 1, PROMPT + 2), 0);
            assert_int_equal(next_token(&rig, i + 1, 1, 1).id, fake_next(id, PROMPT));
            assert_int_not_equal(other, id);
        }
        assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
        while (sem_trywait(&gate) == 0)
            ;
        rig.fake->gate = &gate;
        uint32_t passes = rig.fake->forwards;
        for (uint32_t i = 0; i < cases[k].jobs; i++)
            pipeline_decode_until(rig.pipeline, jobs[i], PROMPT + 2 + COUNT);
        for (int i = 0; i < 1000; i++)
            sem_post(&gate);
        collect_from(&rig, cases[k].jobs, 2, COUNT, tokens);
        for (uint32_t i = 0; i < cases[k].jobs; i++) {
            int32_t last = fake_next((int32_t)(100 + i), PROMPT);
            for (uint32_t at = 0; at < COUNT; at++) {
                assert_int_equal(tokens[i][at].id, fake_next(last, PROMPT + 1 + at));
                last = tokens[i][at].id;
            }
            pipeline_close(rig.pipeline, jobs[i], 0);
        }
        assert_in_range(rig.fake->forwards - passes, cases[k].passes - 4, cases[k].passes);
        assert_int_equal(rig.fake->pages_bad, 0);
        rig_free(&rig);
        sem_destroy(&gate);
    }
}

/* One page is left, and two want it: who has waited longer gets it, the other one is told. */
static void one_of_two_gets_the_last_page(void **state)
{
    (void)state;
    struct rig rig;
    rig_fake(&rig, 2 + 2 * 1 + 1, LAYERS); /* two blocks that they share, a third of each, and one */
    struct pipeline_job *jobs[2] = {open_job(&rig, 1, PROMPT), NULL};
    assert_int_equal(decode(&rig, jobs[0], 1, PROMPT + 1), 0);
    next_token(&rig, 1, 1, 0);
    jobs[1] = open_job(&rig, 2, PROMPT);
    assert_int_equal(decode(&rig, jobs[1], 1, PROMPT + 1), 0);
    next_token(&rig, 2, 1, 0);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    for (uint32_t i = 0; i < 2; i++)
        pipeline_decode_until(rig.pipeline, jobs[i], 4 * KV_BLOCK_TOKENS);
    uint32_t counts[2] = {1, 1}, failed = 0;
    while (!failed ||
           counts[0] + counts[1] < 4 * KV_BLOCK_TOKENS - PROMPT + 3 * KV_BLOCK_TOKENS + 1 - PROMPT) {
        struct pipeline_event *e = queue_pop(rig.events, WAIT_US);
        assert_non_null(e);
        if (e->type == PIPELINE_TOKEN)
            counts[e->job - 1]++;
        failed += e->type == PIPELINE_DECODE_FAILED;
        assert_true(e->type != PIPELINE_DECODE_FAILED || e->code == -TD_ERR_NOSPACE);
        pipeline_event_free(e);
    }
    no_token(&rig);
    assert_int_equal(failed, 1);
    assert_int_equal(rig.fake->pages_bad, 0);
    for (uint32_t i = 0; i < 2; i++)
        pipeline_close(rig.pipeline, jobs[i], 0);
    rig_free(&rig);
}

/* Pages of a job that decodes no more are there for any of those that share a pass, not only for the one whose turn is first. */
static void pages_are_found_for_each_of_a_pass(void **state)
{
    (void)state;
    enum { AHEAD = 200, END = 250 };
    struct rig rig;
    struct pipeline_job *jobs[3];
    sem_t gate;
    sem_init(&gate, 0, 0);
    rig_fake(&rig, 2 + 1 + 2 + 1, LAYERS); /* what they share; the third, the first's two, the second's */
    for (uint32_t k = 0; k < 3; k++) {     /* so that the second's turn is behind the first's */
        uint32_t i = (k + 2) % 3;
        int32_t id = (int32_t)(100 + i);
        jobs[i] = open_job(&rig, i + 1, PROMPT);
        assert_int_equal(pipeline_append(rig.pipeline, jobs[i], PROMPT, &id, 1), 0);
        assert_int_equal(decode(&rig, jobs[i], 1, i == 0 ? AHEAD : PROMPT + 2), 0);
        for (uint32_t at = 1; at < (i == 0 ? AHEAD - PROMPT : 2); at++)
            next_token(&rig, i + 1, 1, at);
    }
    pipeline_decode_stop(rig.pipeline, jobs[2]);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    rig.fake->gate = &gate; /* both are there before more than one token is drawn */
    for (uint32_t i = 2; i-- > 0;)
        pipeline_decode_until(rig.pipeline, jobs[i], END);
    for (int i = 0; i < 1000; i++)
        sem_post(&gate);
    uint32_t last[2] = {0, 1};
    while (last[0] != END - 1 - PROMPT) {
        struct pipeline_event *e = queue_pop(rig.events, WAIT_US);
        assert_non_null(e);
        assert_int_not_equal(e->type, PIPELINE_DECODE_FAILED);
        if (e->type == PIPELINE_TOKEN)
            last[e->job - 1] = e->index;
        pipeline_event_free(e);
    }
    assert_true(last[1] + 3 >= 1 + END - AHEAD); /* in step, over the end of its page */
    assert_true(PROMPT + last[1] > 3 * KV_BLOCK_TOKENS);
    assert_int_equal(rig.fake->pages_bad, 0);
    for (uint32_t i = 0; i < 3; i++)
        pipeline_close(rig.pipeline, jobs[i], 0);
    rig_free(&rig);
    sem_destroy(&gate);
}

static void without_room_or_a_head_there_are_none(void **state)
{
    (void)state;
    struct rig rig;
    rig_fake(&rig, 2, LAYERS);
    struct pipeline_job *job = open_job(&rig, 1, PROMPT);
    assert_int_equal(decode(&rig, job, 5, CAPACITY), 0);
    struct pipeline_event *e = queue_pop(rig.events, WAIT_US);
    while (e && e->type == PIPELINE_RAN) {
        pipeline_event_free(e);
        e = queue_pop(rig.events, WAIT_US);
    }
    assert_non_null(e);
    assert_int_equal(e->type, PIPELINE_DECODE_FAILED);
    assert_int_equal(e->run, 5);
    assert_int_equal(e->code, -TD_ERR_NOSPACE);
    pipeline_event_free(e);
    no_token(&rig);
    pipeline_close(rig.pipeline, job, 0);
    rig_free(&rig);

    rig_fake(&rig, 16, LAYERS - 1);
    assert_false(pipeline_decodes(rig.pipeline));
    job = open_job(&rig, 1, PROMPT);
    assert_int_equal(decode(&rig, job, 1, CAPACITY), -TD_ERR_UNSUPPORTED);
    pipeline_close(rig.pipeline, job, 0);
    rig_free(&rig);
}

/* ---- a real model, against a loop that runs everything anew for each token ---- */

#define REPLY 70

static const struct sampler_params *sampling(void)
{
    static struct sampler_params p;
    sampler_defaults(&p);
    p.temperature = 1.3f;
    p.top_p = 0.95f;
    p.repetition_penalty = 1.1f;
    p.repetition_window = -1;
    p.presence_penalty = 0.4f;
    p.frequency_penalty = 0.2f;
    p.seed = 12345;
    p.bias_count = 1;
    p.bias[0] = (struct sampler_bias){5, 2.5f};
    p.want_logprobs = true;
    p.logprob_count = 3;
    return &p;
}

static struct backend *real_backend(struct rig *rig, uint32_t rows)
{
    struct backend *backend;
    *rig = (struct rig){0};
    assert_int_equal(gguf_open(TEST_DATA "/tiny/llama-gqa-untied.gguf", &rig->file, NULL), 0);
    assert_int_equal(model_load(rig->file, &rig->model, NULL), 0);
    struct backend_config config = {
        .page_count = 8, .layers_paged = rig->model->params.layer_count, .threads = 1, .rows_max = rows};
    assert_int_equal(cpu_backend_create(rig->model, &config, &backend, NULL), 0);
    return backend;
}

static void naive(struct sampled out[REPLY], uint32_t unseen)
{
    struct rig rig;
    struct backend *b = real_backend(&rig, CAPACITY);
    uint32_t pages[8] = {0, 1, 2, 3, 4, 5, 6, 7}, vocab = rig.model->params.vocab_count;
    float *logits = malloc(vocab * sizeof *logits);
    struct sampler_scratch *scratch = sampler_scratch_create(vocab);
    int32_t all[CAPACITY];
    memcpy(all, ids, sizeof all);
    for (uint32_t i = 0; i < REPLY; i++) {
        struct batch_seq seq = {.layer_end = rig.model->params.layer_count,
                                .row_count = PROMPT + i,
                                .ids = all,
                                .logits = logits,
                                .logit_count = 1,
                                .pages = pages};
        assert_int_equal(b->ops->forward(b, &(struct batch){&seq, 1}), 0);
        assert_int_equal(sampler_draw(sampling(), logits, vocab, all + unseen, PROMPT + i - unseen,
                                      PROMPT - unseen, scratch, &out[i]),
                         0);
        all[PROMPT + i] = out[i].id;
    }
    sampler_scratch_destroy(scratch);
    free(logits);
    b->ops->destroy(b);
    model_free(rig.model);
    gguf_close(rig.file);
}

static void follow_a_naive_loop(bool reply_only, struct sampled expected[REPLY])
{
    struct rig rig;
    struct backend *backend = real_backend(&rig, 64);
    for (size_t i = 0; i < CAPACITY; i++)
        ids[i] = (int32_t)(i * 31 % rig.model->params.vocab_count);
    naive(expected, reply_only ? PROMPT : 0);
    rig_start(&rig, backend, NULL);
    static struct sampled tokens[2][CAPACITY];
    struct pipeline_job *jobs[] = {open_job(&rig, 1, PROMPT), open_job(&rig, 2, PROMPT)};
    struct pipeline_decode d = {.run = 3,
                                .prompt_count = PROMPT,
                                .until = PROMPT + REPLY,
                                .reply_only = reply_only,
                                .sampling = *sampling()};
    for (uint32_t j = 0; j < 2; j++) /* two at once, as one alone */
        assert_int_equal(pipeline_decode(rig.pipeline, jobs[j], &d), 0);
    collect_from(&rig, 2, 0, REPLY, tokens);
    bool varied = false;
    for (uint32_t i = 0; i < 2 * REPLY; i++) {
        const struct sampled *token = &tokens[i / REPLY][i % REPLY], *wanted = &expected[i % REPLY];
        assert_int_equal(token->id, wanted->id);
        assert_true(token->logprob == wanted->logprob);
        assert_int_equal(token->top_count, 3);
        assert_memory_equal(token->top, wanted->top, 3 * sizeof *token->top);
        varied |= token->id != expected[0].id;
    }
    assert_true(varied);
    for (uint32_t j = 0; j < 2; j++)
        pipeline_close(rig.pipeline, jobs[j], 0);
    rig_free(&rig);
}

static void tokens_are_those_of_a_naive_loop(void **state)
{
    (void)state;
    struct sampled all[REPLY], reply_only[REPLY];
    follow_a_naive_loop(false, all);
    follow_a_naive_loop(true, reply_only);
    bool differ = false;
    for (uint32_t i = 0; i < REPLY; i++)
        differ |= all[i].id != reply_only[i].id;
    assert_true(differ);
}

static void an_end_token_ends_it(void **state)
{
    (void)state;
    for (int ignored = 0; ignored < 2; ignored++) {
        struct rig rig;
        struct tokenizer *tokenizer;
        struct backend *backend = real_backend(&rig, 64);
        assert_int_equal(tokenizer_create(rig.file, NULL, &tokenizer, NULL), 0);
        rig_start(&rig, backend, tokenizer);
        struct pipeline_job *job = open_job(&rig, 1, PROMPT);
        struct pipeline_decode d = {.run = 1,
                                    .prompt_count = PROMPT,
                                    .until = PROMPT + 3,
                                    .ignore_end = ignored,
                                    .sampling = {.top_p = 1, .repetition_penalty = 1, .bias_count = 1}};
        d.sampling.bias[0] = (struct sampler_bias){tokenizer->eos, 100};
        assert_int_equal(pipeline_decode(rig.pipeline, job, &d), 0);
        for (uint32_t i = 0; i < (ignored ? 3 : 1); i++)
            assert_int_equal(next_token(&rig, 1, 1, i).id, tokenizer->eos);
        no_token(&rig);
        pipeline_close(rig.pipeline, job, 0);
        rig_free(&rig);
        tokenizer_destroy(tokenizer);
    }
}

static int set_up(void **state)
{
    static const uint8_t fingerprint[TD_HASH_SIZE], layout[TD_HASH_SIZE];
    (void)state;
    for (size_t i = 0; i < CAPACITY; i++)
        ids[i] = (int32_t)(i * 37 % 499);
    if (crypto_init())
        return -1;
    local_kv_chain(key, fingerprint, layout, NULL, ids, CAPACITY, chain);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_follow_each_other_to_the_bound),
        cmocka_unit_test(what_is_held_is_not_run_again),
        cmocka_unit_test(fewer_layers_than_all_are_run_anew),
        cmocka_unit_test(what_the_cloud_says_comes_first),
        cmocka_unit_test(work_takes_turns),
        cmocka_unit_test(replies_share_a_pass),
        cmocka_unit_test(one_of_two_gets_the_last_page),
        cmocka_unit_test(pages_are_found_for_each_of_a_pass),
        cmocka_unit_test(without_room_or_a_head_there_are_none),
        cmocka_unit_test(tokens_are_those_of_a_naive_loop),
        cmocka_unit_test(an_end_token_ends_it),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
