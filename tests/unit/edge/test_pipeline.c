/* pipeline: what it hands on, in which order, and what it keeps; with a backend whose numbers are known, then with a real model. */
#include "fake_backend.h"
#include "edge/pipeline.h"
#include "kernels/kv_layout.h"
#include "shared/crypto.h"
#include "shared/queue.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

#define WAIT_US  60000000 /* long: the machine may be busy */
#define LAYERS   2
#define ID_COUNT 1000
#define JOB      7

struct rig {
    struct fake_backend *fake;
    struct local_kv *kv;
    struct pipeline *pipeline;
    struct queue *events;
    bool full_once;
};
static int32_t ids[ID_COUNT];
static struct kv_block_id chain[ID_COUNT / KV_BLOCK_TOKENS];
static const uint8_t key[32] = {9}, fingerprint[TD_HASH_SIZE], layout[TD_HASH_SIZE];

static int sink(void *ctx, struct pipeline_event *e)
{
    struct rig *rig = ctx;
    if (rig->full_once) {
        rig->full_once = false;
        return -TD_ERR_FULL;
    }
    return queue_push(rig->events, e);
}

static void rig_make_with(struct rig *rig, uint32_t pages, uint32_t layers, uint32_t layer_count,
                          uint32_t chunk, bool whole)
{
    *rig = (struct rig){.fake = fake_backend_create(pages, layers, layer_count),
                        .kv = local_kv_create(pages),
                        .events = queue_create(4096)};
    struct pipeline_config config = {.backend = &rig->fake->base,
                                     .kv = rig->kv,
                                     .chunk_tokens = chunk,
                                     .whole = whole,
                                     .sink = sink,
                                     .ctx = rig};
    assert_int_equal(pipeline_create(&config, &rig->pipeline, NULL), 0);
}

static void rig_make(struct rig *rig, uint32_t pages, uint32_t layers, uint32_t layer_count, uint32_t chunk)
{
    rig_make_with(rig, pages, layers, layer_count, chunk, false);
}

static void rig_free(struct rig *rig)
{
    struct pipeline_event *e;
    pipeline_destroy(rig->pipeline);
    while ((e = queue_pop(rig->events, 0)))
        pipeline_event_free(e);
    queue_destroy(rig->events);
    local_kv_destroy(rig->kv);
}

static struct pipeline_job *open_job(struct rig *rig, uint32_t count)
{
    struct pipeline_work work = {.id = JOB, .ids = ids, .count = count, .capacity = ID_COUNT, .chain = chain};
    memcpy(work.principal_key, key, sizeof key);
    struct pipeline_job *job = pipeline_open(rig->pipeline, &work);
    assert_non_null(job);
    return job;
}

/* One range, all of it to be handed on. */
static void send_range(struct pipeline *p, struct pipeline_job *job, uint32_t epoch, uint32_t begin,
                       struct plan_range range)
{
    struct pipeline_send send = {
        .epoch = epoch, .rows_begin = begin, .kv_begin = begin, .ranges = {range}, .range_count = 1};
    pipeline_send(p, job, &send);
}

static void start(struct rig *rig, struct pipeline_job *job, uint32_t epoch, uint32_t begin, uint32_t end)
{
    send_range(rig->pipeline, job, epoch, begin,
               (struct plan_range){begin, end - begin, LAYERS, KV_RAW, HIDDEN_F32});
}

/* ---- what was received ---- */

struct received {
    uint32_t epoch, rows, row_begin, pieces;
    uint32_t kv_tokens[LAYERS][2]; /* tokens by pieces */
    bool kv_before_rows;
    uint32_t computed_tokens;
    int code;
    bool rows_do_not_fit;
};

static float row_value(uint32_t position, uint32_t column)
{
    return (float)(ids[position] + (int32_t)(1000 * position + column));
}

static void check_rows(struct received *got, const struct pipeline_message *m)
{
    float rows[PIPELINE_HIDDEN_ROWS_MAX * FAKE_EMBD];
    assert_int_equal(
        hidden_decode(m->hidden_dtype, (struct span){m->payload, m->size}, m->count, FAKE_EMBD, rows), 0);
    for (uint32_t r = 0; r < m->count; r++)
        for (uint32_t c = 0; c < FAKE_EMBD; c++)
            assert_true(rows[r * FAKE_EMBD + c] == row_value(m->first_token + r, c));
    if (got->rows == 0)
        got->row_begin = m->first_token;
    assert_int_equal(m->first_token, got->row_begin + got->rows);
    assert_int_equal(m->raw_size, m->count * FAKE_EMBD * 4);
    got->rows += m->count;
}

static void check_piece(struct received *got, const struct pipeline_message *m)
{
    static const struct kv_shape shape = {LAYERS, FAKE_HEADS, FAKE_DIM};
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&shape);
    struct kv_piece_head head;
    struct span payload;
    uint16_t values[KV_BLOCK_TOKENS * FAKE_HEADS * FAKE_DIM];
    assert_int_equal(kv_piece_parse(m->payload, m->size, &head, &payload), 0);
    assert_int_equal(kv_piece_decode(scratch, &head, payload, values, TD_COUNT(values)), 0);
    kv_codec_scratch_destroy(scratch);
    assert_int_equal(head.block_index, m->block_index);
    assert_int_equal(head.layer, m->layer);
    assert_int_equal(head.is_value, m->is_value);
    assert_int_equal(head.first_token, 0);
    assert_int_equal(head.quality.provenance, KV_FROM_DEVICE);
    assert_int_equal(head.quality.numerics, KV_NUMERICS_CPU_V1);
    for (uint32_t h = 0; h < FAKE_HEADS; h++)
        for (uint32_t t = 0; t < head.token_count; t++)
            for (uint32_t d = 0; d < FAKE_DIM; d++)
                assert_int_equal(
                    values[(h * head.token_count + t) * FAKE_DIM + d],
                    fake_key(ids[m->block_index * KV_BLOCK_TOKENS + t], t, m->layer, h, d, m->is_value));
    assert_int_equal(m->raw_size, 2u * head.token_count * FAKE_HEADS * FAKE_DIM);
    if (m->block_index * KV_BLOCK_TOKENS + head.token_count > got->row_begin + got->rows)
        got->kv_before_rows = true;
    got->kv_tokens[m->layer][m->is_value] += head.token_count;
    got->pieces++;
}

/* Everything of one epoch, until it is SENT or FAILED. */
static struct received collect(struct rig *rig, uint32_t epoch)
{
    struct received got = {.epoch = epoch};
    for (;;) {
        struct pipeline_event *e = queue_pop(rig->events, WAIT_US);
        assert_non_null(e);
        assert_int_equal(e->job, JOB);
        size_t size = 0;
        for (struct pipeline_message *m = e->messages; m; m = m->next) {
            size += m->size;
            if (e->epoch != epoch)
                continue;
            if (m->type == FRAME_HIDDEN)
                check_rows(&got, m);
            else
                check_piece(&got, m);
        }
        enum pipeline_event_type type = e->epoch == epoch ? e->type : PIPELINE_MESSAGES;
        got.computed_tokens += e->epoch == epoch ? e->cost.tokens : 0;
        got.code = e->code;
        got.rows_do_not_fit = e->rows_do_not_fit;
        pipeline_event_free(e);
        pipeline_taken(rig->pipeline, size);
        if (type != PIPELINE_MESSAGES)
            return got;
    }
}

/* ---- tests ---- */

static void rows_go_ahead_of_kv_and_both_are_whole(void **state)
{
    (void)state;
    for (uint32_t chunk = 64; chunk <= 256; chunk *= 2) {
        struct rig rig;
        rig_make(&rig, 32, LAYERS, 4, chunk);
        rig.full_once = true; /* a full loop costs nothing but time */
        struct pipeline_job *job = open_job(&rig, 300);
        start(&rig, job, 1, 0, 300);
        struct received got = collect(&rig, 1);
        assert_int_equal(got.rows, 300);
        assert_int_equal(got.row_begin, 0);
        assert_false(got.kv_before_rows);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (int v = 0; v < 2; v++)
                assert_int_equal(got.kv_tokens[layer][v], 300);
        assert_int_equal(got.pieces, 5 * LAYERS * 2);
        assert_int_equal(got.computed_tokens, 300);
        assert_int_equal(rig.fake->forwards, (300 + chunk - 1) / chunk);
        assert_int_equal(local_kv_held(rig.kv, chain, 4, LAYERS), 4);
        assert_int_equal(rig.fake->pages_bad, 0);
        pipeline_close(rig.pipeline, job, 0);
        rig_free(&rig);
    }
}

static void with_all_layers_only_the_last_row_goes(void **state)
{
    (void)state;
    struct rig rig;
    rig_make(&rig, 32, LAYERS, LAYERS, 64);
    struct pipeline_job *job = open_job(&rig, 200);
    start(&rig, job, 1, 0, 200);
    struct received got = collect(&rig, 1);
    assert_int_equal(got.rows, 1);
    assert_int_equal(got.row_begin, 199);
    assert_int_equal(got.kv_tokens[1][1], 200);
    pipeline_close(rig.pipeline, job, ID_COUNT);
    rig_free(&rig);
}

static void what_the_cloud_has_is_caught_up_but_not_sent(void **state)
{
    (void)state;
    struct rig rig;
    rig_make(&rig, 32, LAYERS, 4, 64);
    struct pipeline_job *job = open_job(&rig, 300);
    start(&rig, job, 1, 128, 300);
    struct received got = collect(&rig, 1);
    assert_int_equal(got.row_begin, 128);
    assert_int_equal(got.rows, 172);
    assert_int_equal(got.kv_tokens[0][0], 172);
    assert_int_equal(got.computed_tokens, 300);
    assert_int_equal(rig.fake->pages_bad, 0);
    pipeline_close(rig.pipeline, job, 0);

    /* Now the device holds 256 of them: nothing to catch up. */
    job = open_job(&rig, 300);
    start(&rig, job, 2, 192, 300);
    got = collect(&rig, 2);
    assert_int_equal(got.row_begin, 192);
    assert_int_equal(got.computed_tokens, 108);
    assert_int_equal(rig.fake->pages_bad, 0);
    pipeline_close(rig.pipeline, job, 0);
    rig_free(&rig);
}

static void a_new_epoch_starts_over_where_it_says(void **state)
{
    (void)state;
    struct rig rig;
    rig_make(&rig, 32, LAYERS, 4, 64);
    rig.fake->delay_us = 500;
    struct pipeline_job *job = open_job(&rig, 300);
    start(&rig, job, 1, 0, 300);
    start(&rig, job, 2, 64, 300); /* perhaps in the middle of the first */
    struct received got = collect(&rig, 2);
    assert_int_equal(got.row_begin, 64);
    assert_int_equal(got.rows, 236);
    assert_int_equal(got.kv_tokens[1][0], 236);
    start(&rig, job, 3, 256, 300); /* and after the end */
    got = collect(&rig, 3);
    assert_int_equal(got.row_begin, 256);
    assert_int_equal(got.rows, 44);
    assert_int_equal(got.computed_tokens, 44);
    assert_int_equal(rig.fake->pages_bad, 0);
    pipeline_close(rig.pipeline, job, 0);
    rig_free(&rig);
}

static void replies_are_filled_in_idle_time(void **state)
{
    (void)state;
    struct rig rig;
    rig_make(&rig, 32, LAYERS, 4, 64);
    struct pipeline_job *job = open_job(&rig, 100);
    start(&rig, job, 1, 0, 100);
    collect(&rig, 1);
    pipeline_append(rig.pipeline, job, 100, ids + 100, 27);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    assert_int_equal(local_kv_held(rig.kv, chain, 4, LAYERS),
                     1);                   /* 127 tokens: the second block is not whole */
    assert_int_equal(rig.fake->rows, 100); /* and nothing was run for it yet */
    pipeline_append(rig.pipeline, job, 127, ids + 127, 2);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    assert_int_equal(local_kv_held(rig.kv, chain, 4, LAYERS), 2);
    pipeline_append(rig.pipeline, job, 129, ids + 129, 70);
    pipeline_close(rig.pipeline, job, ID_COUNT);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    assert_int_equal(local_kv_held(rig.kv, chain, 4, LAYERS), 3);
    assert_int_equal(rig.fake->rows, 192);
    assert_int_equal(rig.fake->pages_bad, 0);
    rig_free(&rig);
}

static void memory_is_taken_ahead_between_requests(void **state)
{
    (void)state;
    struct rig rig;
    rig_make(&rig, 32, LAYERS, 4, 64);
    struct pipeline_job *job = open_job(&rig, 200);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    start(&rig, job, 1, 0, 200);
    collect(&rig, 1);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    assert_int_equal(rig.fake->ahead, 0);
    pipeline_close(rig.pipeline, job, 0);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    assert_int_equal(rig.fake->ahead, 4); /* as many as 200 tokens took */
    rig_free(&rig);
}

/* A turn at k = 1 whose blocks are then filled through both layers. */
static void fill_whole(struct rig *rig, uint32_t count)
{
    struct pipeline_job *job = open_job(rig, count);
    send_range(rig->pipeline, job, 1, 0, (struct plan_range){0, count, 1, KV_RAW, HIDDEN_F32});
    collect(rig, 1);
    pipeline_fill(rig->pipeline, job, 1);
    pipeline_append(rig->pipeline, job, count, ids + count, 2);
    assert_true(pipeline_wait_idle(rig->pipeline, WAIT_US / 1000));
    assert_int_equal(local_kv_held(rig->kv, chain, 8, LAYERS), 0); /* not while it may go on */
    pipeline_close(rig->pipeline, job, UINT32_MAX);
    assert_true(pipeline_wait_idle(rig->pipeline, WAIT_US / 1000));
    assert_int_equal(local_kv_held(rig->kv, chain, 8, LAYERS), (count + 2) / KV_BLOCK_TOKENS);
}

static void closed_jobs_are_filled_through_all_layers_if_wished(void **state)
{
    (void)state;
    struct rig rig;
    rig_make_with(&rig, 32, LAYERS, LAYERS, 64, true);
    fill_whole(&rig, 200);
    assert_int_equal(rig.fake->rows, 200 + 192);
    struct pipeline_job *job = open_job(&rig, 40); /* no whole block: nothing to do */
    start(&rig, job, 2, 0, 40);
    collect(&rig, 2);
    pipeline_close(rig.pipeline, job, UINT32_MAX);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    assert_int_equal(rig.fake->rows, 200 + 192 + 40);
    assert_int_equal(rig.fake->pages_bad, 0);
    rig_free(&rig);
}

static void what_is_held_whole_is_sent_and_not_run(void **state)
{
    (void)state;
    struct rig rig;
    rig_make_with(&rig, 32, LAYERS, LAYERS, 64, true);
    fill_whole(&rig, 200);
    struct pipeline_job *job = open_job(&rig, 300);
    struct pipeline_send send = {.epoch = 2,
                                 .rows_begin = 192,
                                 .kv_begin = 0,
                                 .ranges = {{0, 64, 0, 0, 0},
                                            {64, 128, LAYERS, KV_RAW, HIDDEN_F32},
                                            {192, 108, 1, KV_RAW, HIDDEN_F32}},
                                 .range_count = 3};
    pipeline_send(rig.pipeline, job, &send);
    struct received got = collect(&rig, 2);
    assert_int_equal(got.computed_tokens, 108);
    assert_int_equal(got.row_begin, 192);
    assert_int_equal(got.rows, 108);
    assert_int_equal(got.kv_tokens[0][0], 128 + 108);
    assert_int_equal(got.kv_tokens[1][1], 128);
    assert_int_equal(rig.fake->pages_bad, 0);
    pipeline_close(rig.pipeline, job, 0);
    rig_free(&rig);
}

static void a_prompt_that_the_cloud_did_is_filled_too(void **state)
{
    (void)state;
    struct rig rig;
    rig_make(&rig, 32, LAYERS, 4, 64);
    struct pipeline_job *job = open_job(&rig, 300);
    pipeline_fill(rig.pipeline, job, LAYERS);
    pipeline_close(rig.pipeline, job, ID_COUNT);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    assert_int_equal(local_kv_held(rig.kv, chain, 5, LAYERS), 4);
    assert_null(queue_pop(rig.events, 0));
    rig_free(&rig);
}

static void a_closed_job_is_not_worked_on(void **state)
{
    (void)state;
    struct rig rig;
    sem_t gate;
    sem_init(&gate, 0, 1); /* one chunk may run, the next waits */
    rig_make(&rig, 32, LAYERS, 4, 64);
    rig.fake->gate = &gate;
    struct pipeline_job *job = open_job(&rig, ID_COUNT);
    start(&rig, job, 1, 0, ID_COUNT);
    pipeline_event_free(queue_pop(rig.events, WAIT_US));
    pipeline_close(rig.pipeline, job, 0);
    for (int i = 0; i < 100; i++)
        sem_post(&gate);
    assert_true(pipeline_wait_idle(rig.pipeline, WAIT_US / 1000));
    assert_true(rig.fake->rows <= 2 * 64); /* the step in progress, no more */
    rig_free(&rig);
}

static void a_slow_link_stops_the_work(void **state)
{
    (void)state;
    struct rig rig;
    rig_make(&rig, 32, LAYERS, 4, 64);
    struct pipeline_job *job = open_job(&rig, ID_COUNT);
    size_t size = 0;
    start(&rig, job, 1, 0, ID_COUNT);
    struct pipeline_event *first = queue_pop(rig.events, WAIT_US);
    assert_non_null(first);
    for (struct pipeline_message *m = first->messages; m; m = m->next)
        size += m->size;
    pipeline_event_free(first);
    pipeline_taken(rig.pipeline, size);
    collect(&rig, 1);
    /* As if PIPELINE_OUT_SIZE bytes were on their way and nothing taken. */
    pipeline_taken(rig.pipeline, -(size_t)PIPELINE_OUT_SIZE);
    start(&rig, job, 2, 0, ID_COUNT);
    assert_null(queue_pop(rig.events, 50000));
    pipeline_taken(rig.pipeline, PIPELINE_OUT_SIZE);
    struct received got = collect(&rig, 2);
    assert_int_equal(got.rows, ID_COUNT);
    pipeline_close(rig.pipeline, job, 0);
    rig_free(&rig);
}

static void without_pages_the_cloud_is_asked(void **state)
{
    (void)state;
    struct rig rig;
    rig_make(&rig, 4, LAYERS, 4, 64);
    struct pipeline_job *job = open_job(&rig, 300); /* wants 5 pages */
    start(&rig, job, 1, 0, 300);
    struct received got = collect(&rig, 1);
    assert_int_equal(got.code, -TD_ERR_NOSPACE);
    assert_false(got.rows_do_not_fit);
    pipeline_close(rig.pipeline, job, 0);

    /* A job that only waits for its reply gives its pages to one that has to send. */
    job = open_job(&rig, 250);
    start(&rig, job, 2, 0, 250);
    assert_int_equal(collect(&rig, 2).rows, 250);
    struct pipeline_job *other = open_job(&rig, 100);
    start(&rig, other, 3, 0, 100);
    got = collect(&rig, 3);
    assert_int_equal(got.code, 0);
    assert_int_equal(got.rows, 100);
    start(&rig, job, 4, 192, 250); /* the first one can still be sent again */
    pipeline_close(rig.pipeline, other, 0);
    got = collect(&rig, 4);
    assert_int_equal(got.rows, 58);
    assert_int_equal(rig.fake->pages_bad, 0);
    pipeline_close(rig.pipeline, job, 0);
    rig_free(&rig);
}

static void rows_that_f16_cannot_hold_are_reported(void **state)
{
    (void)state;
    struct rig rig;
    rig_make(&rig, 32, LAYERS, 4, 64);
    rig.fake->scale = 1e6f;
    struct pipeline_job *job = open_job(&rig, 100);
    send_range(rig.pipeline, job, 1, 0, (struct plan_range){0, 100, LAYERS, KV_RAW, HIDDEN_F16});
    struct received got = collect(&rig, 1);
    assert_int_equal(got.code, -TD_ERR_FORMAT);
    assert_true(got.rows_do_not_fit);
    pipeline_close(rig.pipeline, job, 0);
    rig_free(&rig);
}

static void long_rows_are_cut_into_messages(void **state)
{
    (void)state;
    struct rig rig;
    rig_make(&rig, 32, LAYERS, 4, 512);
    struct pipeline_job *job = open_job(&rig, 512);
    start(&rig, job, 1, 0, 512);
    struct pipeline_event *e = queue_pop(rig.events, WAIT_US);
    uint32_t messages = 0;
    for (struct pipeline_message *m = e->messages; m; m = m->next, messages++)
        assert_true(m->type == FRAME_HIDDEN && m->count <= PIPELINE_HIDDEN_ROWS_MAX);
    assert_int_equal(messages, 512 / PIPELINE_HIDDEN_ROWS_MAX);
    pipeline_event_free(e);
    pipeline_close(rig.pipeline, job, 0);
    rig_free(&rig);
}

/* ---- a real model ---- */

/* Rows of all tokens, by whatever chunk. */
static float *real_rows(uint32_t chunk, uint32_t layers, uint32_t count, uint32_t *width)
{
    struct gguf *file;
    struct model *model;
    struct backend *backend;
    struct pipeline *pipeline;
    assert_int_equal(gguf_open(TEST_DATA "/tiny/llama-gqa-untied.gguf", &file, NULL), 0);
    assert_int_equal(model_load(file, &model, NULL), 0);
    struct backend_config config = {.page_count = 8, .layers_paged = layers, .threads = 1, .rows_max = chunk};
    assert_int_equal(cpu_backend_create(model, &config, &backend, NULL), 0);
    struct rig rig = {.kv = local_kv_create(8), .events = queue_create(4096)};
    struct pipeline_config pc = {
        .backend = backend, .kv = rig.kv, .chunk_tokens = chunk, .sink = sink, .ctx = &rig};
    assert_int_equal(pipeline_create(&pc, &pipeline, NULL), 0);
    rig.pipeline = pipeline;
    *width = model->params.embd_size;
    float *rows = calloc((size_t)count * *width, sizeof *rows);
    int32_t small[ID_COUNT];
    for (uint32_t i = 0; i < count; i++)
        small[i] = (int32_t)(i * 31 % model->params.vocab_count);
    struct pipeline_work work = {.id = JOB, .ids = small, .count = count, .capacity = count, .chain = chain};
    struct pipeline_job *job = pipeline_open(pipeline, &work);
    send_range(pipeline, job, 1, 0, (struct plan_range){0, count, layers, KV_L0, HIDDEN_F32});
    for (bool more = true; more;) {
        struct pipeline_event *e = queue_pop(rig.events, WAIT_US);
        assert_non_null(e);
        assert_int_not_equal(e->type, PIPELINE_FAILED);
        for (struct pipeline_message *m = e->messages; m; m = m->next)
            if (m->type == FRAME_HIDDEN)
                assert_int_equal(hidden_decode(HIDDEN_F32, (struct span){m->payload, m->size}, m->count,
                                               *width, rows + (size_t)m->first_token * *width),
                                 0);
        more = e->type != PIPELINE_SENT;
        pipeline_event_free(e);
    }
    pipeline_close(pipeline, job, 0);
    rig_free(&rig);
    model_free(model);
    gguf_close(file);
    return rows;
}

static void chunks_do_not_change_a_bit(void **state)
{
    (void)state;
    uint32_t width;
    float *small = real_rows(64, 1, 150, &width), *large = real_rows(256, 1, 150, &width);
    assert_memory_equal(small, large, (size_t)150 * width * sizeof *small);
    bool any = false;
    for (size_t i = 0; i < (size_t)150 * width; i++)
        any |= small[i] != 0;
    assert_true(any);
    free(small);
    free(large);
}

static int set_up(void **state)
{
    (void)state;
    for (size_t i = 0; i < ID_COUNT; i++)
        ids[i] = (int32_t)(i * 37 % 499);
    if (crypto_init())
        return -1;
    local_kv_chain(key, fingerprint, layout, NULL, ids, ID_COUNT, chain);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_go_ahead_of_kv_and_both_are_whole),
        cmocka_unit_test(with_all_layers_only_the_last_row_goes),
        cmocka_unit_test(what_the_cloud_has_is_caught_up_but_not_sent),
        cmocka_unit_test(a_new_epoch_starts_over_where_it_says),
        cmocka_unit_test(replies_are_filled_in_idle_time),
        cmocka_unit_test(memory_is_taken_ahead_between_requests),
        cmocka_unit_test(a_prompt_that_the_cloud_did_is_filled_too),
        cmocka_unit_test(closed_jobs_are_filled_through_all_layers_if_wished),
        cmocka_unit_test(what_is_held_whole_is_sent_and_not_run),
        cmocka_unit_test(a_closed_job_is_not_worked_on),
        cmocka_unit_test(a_slow_link_stops_the_work),
        cmocka_unit_test(without_pages_the_cloud_is_asked),
        cmocka_unit_test(rows_that_f16_cannot_hold_are_reported),
        cmocka_unit_test(long_rows_are_cut_into_messages),
        cmocka_unit_test(chunks_do_not_change_a_bit),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
