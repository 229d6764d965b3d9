/* engine on a backend that behaves like a GPU's (device_twin.h): it draws tokens, takes pieces still encoded, and swaps pages. Replies are the
 * reference's, which is computed and drawn on the CPU alone. Linked so that sampler_adjust comes here first (tests/CMakeLists.txt). */
#include "engine_rig.h"

#define VOCAB 256

static struct twin *twin_of(const struct rig *r)
{
    return (struct twin *)r->engine->backend;
}

static void tokens_are_drawn_by_the_device(void **state)
{
    (void)state;
    enum { PROMPT = 70, REPLY = 24, REQUESTS = 5 };
    struct rig *r = rig_open((struct rig_options){.device = true});
    static struct client clients[REQUESTS], plain[REQUESTS];
    struct engine_generate generate[REQUESTS];
    int32_t ids[PROMPT], reply[REPLY];
    rig_ids(ids, PROMPT, VOCAB, 3);
    for (uint32_t i = 0; i < REQUESTS; i++)
        generate[i] = rig_sampling(REPLY, 40 + i);
    generate[0].sampling.temperature = 0;
    generate[1].sampling.repetition_penalty = 1.4f, generate[1].sampling.repetition_window = -1;
    generate[2].sampling.presence_penalty = 0.7f, generate[2].sampling.frequency_penalty = 0.4f;
    generate[3].sampling.bias_count = 1, generate[3].sampling.bias[0] = (struct sampler_bias){9, 4.0f};
    generate[4].sampling.want_logprobs = true, generate[4].sampling.logprob_count = 3;
    for (uint32_t i = 0; i < REQUESTS; i++)
        client_direct(r, &clients[i], ids, PROMPT, generate[i]);
    for (uint32_t i = 0; i < REQUESTS; i++)
        rig_until(r, clients[i].done || clients[i].failed);
    assert_int_equal(twin_of(r)->drawn, REQUESTS * REPLY);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        rig_reference(r, ids, PROMPT, generate[i], reply);
        assert_reply(&clients[i], reply, REPLY);
    }
    struct rig *cpu = rig_open((struct rig_options){0});
    client_direct(cpu, &plain[4], ids, PROMPT, generate[4]);
    rig_until(cpu, plain[4].done || plain[4].failed);
    assert_int_equal(clients[4].sampled_count, REPLY);
    assert_memory_equal(clients[4].sampled, plain[4].sampled, REPLY * sizeof(struct sampled));
    rig_close(cpu);
    rig_close(r);
}

static uint64_t
    too_long_for; /* seed of the request whose bias and penalties name more ids than a device takes; the tiny models have no such vocabulary */

int __real_sampler_adjust(const struct sampler_params *p, const int32_t *ids, size_t count,
                          size_t prompt_count, struct sampler_scratch *scratch, struct sample_adjust *out);
int __wrap_sampler_adjust(const struct sampler_params *p, const int32_t *ids, size_t count,
                          size_t prompt_count, struct sampler_scratch *scratch, struct sample_adjust *out);

int __wrap_sampler_adjust(const struct sampler_params *p, const int32_t *ids, size_t count,
                          size_t prompt_count, struct sampler_scratch *scratch, struct sample_adjust *out)
{
    return p->seed == too_long_for ? -TD_ERR_LIMIT
                                   : __real_sampler_adjust(p, ids, count, prompt_count, scratch, out);
}

/* Beside others in the same steps; what is drawn on either side is the same. */
static void the_host_draws_what_the_device_cannot(void **state)
{
    (void)state;
    enum { PROMPT = 70, REPLY = 12, REQUESTS = 3 };
    struct rig *r = rig_open((struct rig_options){.device = true});
    static struct client clients[REQUESTS];
    struct engine_generate generate[REQUESTS];
    int32_t ids[PROMPT], reply[REPLY];
    rig_ids(ids, PROMPT, VOCAB, 3);
    double before = metric_value(r->engine->metrics.drawn_by_device);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        generate[i] = rig_sampling(REPLY, 40 + i);
        generate[i].sampling.repetition_penalty = 1.4f, generate[i].sampling.repetition_window = -1;
        generate[i].sampling.frequency_penalty = 0.4f;
        generate[i].sampling.want_logprobs = true, generate[i].sampling.logprob_count = 3;
    }
    too_long_for = 41;
    for (uint32_t i = 0; i < REQUESTS; i++)
        client_direct(r, &clients[i], ids, PROMPT, generate[i]);
    for (uint32_t i = 0; i < REQUESTS; i++)
        rig_until(r, clients[i].done || clients[i].failed);
    too_long_for = 0;
    for (uint32_t i = 0; i < REQUESTS; i++) {
        rig_reference(r, ids, PROMPT, generate[i], reply);
        assert_reply(&clients[i], reply, REPLY);
        assert_int_equal(clients[i].sampled_count, REPLY);
    }
    assert_int_equal(twin_of(r)->drawn, (REQUESTS - 1) * REPLY);
    assert_true(metric_value(r->engine->metrics.drawn_by_device) - before == (REQUESTS - 1) * REPLY);
    rig_close(r);
}

/* The client's mistake, and told before anything is computed for it, whoever draws. */
static void a_bias_outside_the_vocabulary_is_refused(void **state)
{
    (void)state;
    static struct client c;
    int32_t ids[10];
    for (int device = 0; device < 2; device++) {
        struct rig *r = rig_open((struct rig_options){.device = device});
        struct engine_generate generate = rig_sampling(4, 1);
        generate.sampling.bias_count = 1;
        generate.sampling.bias[0] = (struct sampler_bias){(int32_t)r->model->params.vocab_count, 1.0f};
        rig_ids(ids, 10, VOCAB, 3);
        client_direct(r, &c, ids, 10, generate);
        rig_until(r, c.done || c.failed);
        assert_int_equal(c.fail_code, -TD_ERR_ARG);
        generate.sampling.bias[0].id--;
        client_direct(r, &c, ids, 10, generate);
        rig_until(r, c.done || c.failed);
        assert_true(c.done);
        rig_close(r);
    }
}

/* An edge's prompt, k = 1, with pieces of `codec`; one of them broken beyond what its sender's CRC knows. */
static void run_edge(struct rig *r, struct client *c, const int32_t *ids, uint32_t count, uint8_t codec,
                     bool broken)
{
    struct rig_edge edge = rig_edge_compute(r, ids, count, 1);
    struct plan_range range = {0, count, 1, codec, HIDDEN_F32};
    struct engine_generate generate = rig_sampling(12, 5);
    struct engine_open open = client_open_of(c, ids, count, 0);
    open.accept = KV_ACCEPT_ANY;
    if (broken) {
        size_t values = kv_piece_values(
            &(struct kv_shape){1, r->model->params.kv_head_count, r->model->params.head_dim}, 64);
        uint16_t *k = calloc(2 * values, sizeof *k);
        k[values / 2] = 0x7c00; /* infinity */
        edge.backend->ops->page_write(edge.backend, 0, 0, 64, k, k + values);
        free(k);
    }
    client_send(r, c, open);
    assert_int_equal(engine_plan(r->engine, c->sequence, 1, &range, 1, false), 0);
    assert_int_equal(engine_start(r->engine, c->sequence, &generate), 0);
    rig_send_kv(&edge, c, 1, 0, count, codec);
    rig_send_hidden(&edge, c, 1, 0, count, HIDDEN_F32);
    rig_until(r, c->done || c->failed);
    rig_edge_free(&edge);
}

static void pieces_go_to_the_device(void **state)
{
    (void)state;
    enum { PROMPT = 100 };
    static const uint8_t codecs[] = {KV_RAW, KV_L0, KV_L1, KV_L2};
    static struct client on_device, on_cpu;
    struct rig *r = rig_open((struct rig_options){.device = true}), *cpu = rig_open((struct rig_options){0});
    int32_t ids[PROMPT];
    for (uint32_t i = 0; i < TD_COUNT(codecs); i++) {
        rig_ids(ids, PROMPT, VOCAB, 50 + i);
        run_edge(r, &on_device, ids, PROMPT, codecs[i], false);
        run_edge(cpu, &on_cpu, ids, PROMPT, codecs[i], false);
        assert_int_equal(twin_of(r)->pieces, (i + 1) * 2 * 2); /* K and V of two blocks */
        assert_int_equal(on_device.done_event.done.recomputed_tokens, 0);
        assert_reply(&on_device, on_cpu.ids, 12);
        assert_reply(&on_cpu, on_cpu.ids, 12);
    }
    rig_ids(ids, PROMPT, VOCAB, 60);
    run_edge(r, &on_device, ids, PROMPT, KV_RAW, true);
    assert_int_equal(on_device.fail_code, -TD_ERR_PROTOCOL);
    assert_int_equal(rig_stats(r).running, 0);
    assert_int_equal(atomic_load(&r->engine->staged_size), 0);
    rig_close(cpu);
    rig_close(r);
}

static void ask(struct rig *r, struct client *c, uint32_t seed, uint32_t count, uint32_t reply_count)
{
    static int32_t ids[RIG_TOKENS_MAX], reply[RIG_TOKENS_MAX];
    rig_ids(ids, count, VOCAB, seed);
    client_direct(r, c, ids, count, rig_sampling(reply_count, seed));
    rig_until(r, c->done || c->failed);
    rig_reference(r, ids, count, rig_sampling(reply_count, seed), reply);
    assert_reply(c, reply, reply_count);
}

/* Prompts of 4 blocks, of which the device has room for two. */
static void what_the_device_has_no_room_for_comes_back(void **state)
{
    (void)state;
    enum { PROMPT = 4 * 64 + 8, REPLY = 4 };
    static struct client c;
    struct rig *r = rig_open((struct rig_options){.device = true, .pages = 10, .swap_pages = 30});
    for (uint32_t seed = 1; seed <= 5; seed++)
        ask(r, &c, seed, PROMPT, REPLY);
    assert_true(twin_of(r)->swapped_out >= 5 * 4 - 10);
    assert_int_equal(twin_of(r)->swapped_in, 0);
    for (uint32_t round = 0; round < 2; round++)
        for (uint32_t seed = 1; seed <= 5; seed++) {
            ask(r, &c, seed, PROMPT, REPLY);
            assert_int_equal(c.open_event.opened.cached_memory, 4 * 64);
            assert_int_equal(c.done_event.done.cached_tokens, 4 * 64);
            assert_int_equal(c.done_event.done.prefill_tokens, 8);
        }
    assert_true(twin_of(r)->swapped_in >= 2 * 3 * 4);
    rig_until(r, r->engine->swap.ticket == 0);
    assert_true(page_pool_free_count(r->engine->pool) >= r->engine->swap.reserve);
    rig_close(r);
    /* The oldest go from host memory first, the beginnings of chains last. */
    r = rig_open((struct rig_options){.device = true, .pages = 10, .swap_pages = 6});
    for (uint32_t seed = 1; seed <= 5; seed++)
        ask(r, &c, seed, PROMPT, REPLY);
    ask(r, &c, 1, PROMPT, REPLY);
    assert_int_equal(c.done_event.done.cached_tokens, 0);
    ask(r, &c, 4, PROMPT, REPLY);
    assert_int_equal(c.done_event.done.cached_tokens, 4 * 64);
    rig_close(r);
}

/* Two replies grow until the pages do not hold both: the younger gives way, and its blocks come back instead of being computed again. */
static void preempted_ones_come_back(void **state)
{
    (void)state;
    enum { PROMPT = 200, REPLY = 240 };
    static struct client old, young;
    static int32_t ids[2][PROMPT], reply[2][REPLY];
    struct rig *r = rig_open((struct rig_options){.device = true, .pages = 9, .swap_pages = 20});
    struct engine_generate generate = rig_sampling(REPLY, 8);
    for (uint32_t i = 0; i < 2; i++) {
        rig_ids(ids[i], PROMPT, VOCAB, 70 + i);
        rig_reference(r, ids[i], PROMPT, generate, reply[i]);
    }
    double before = metric_value(r->engine->metrics.preemptions);
    client_direct(r, &old, ids[0], PROMPT, generate);
    client_direct(r, &young, ids[1], PROMPT, generate);
    rig_until(r, (old.done || old.failed) && (young.done || young.failed));
    assert_reply(&old, reply[0], REPLY);
    assert_reply(&young, reply[1], REPLY);
    assert_true(metric_value(r->engine->metrics.preemptions) > before);
    assert_true(twin_of(r)->swapped_in >= 3);
    assert_true(young.done_event.done.prefill_tokens < PROMPT + 2 * 64);
    rig_close(r);
}

/* A client that leaves while its pages are on their way does not leave them to somebody else too early. */
static void leaving_on_the_way(void **state)
{
    (void)state;
    enum { PROMPT = 4 * 64 + 8 };
    static struct client c, other;
    struct rig *r = rig_open((struct rig_options){.device = true, .pages = 10, .swap_pages = 30});
    for (uint32_t seed = 1; seed <= 4; seed++)
        ask(r, &c, seed, PROMPT, 2);
    int32_t ids[PROMPT];
    rig_ids(ids, PROMPT, VOCAB, 1);
    client_direct(r, &other, ids, PROMPT, rig_sampling(2, 1));
    rig_turn(r);
    assert_int_equal(r->engine->live[0]->state, SEQ_LOADING);
    assert_true(r->engine->live[0]->swap_ticket > twin_of(r)->done);
    int64_t ticket = r->engine->live[0]->swap_ticket;
    assert_int_equal(engine_cancel(r->engine, other.sequence, false, 0), 0);
    rig_turn(r);
    assert_int_equal(r->engine->live_count, 0);
    assert_true(twin_of(r)->done >= ticket);
    ask(r, &c, 9, PROMPT, 2);
    rig_close(r);
}

static void a_lost_device_fails_what_runs(void **state)
{
    (void)state;
    enum { PROMPT = 4 * 64 + 8 };
    static struct client c, other;
    struct rig *r = rig_open((struct rig_options){.device = true, .pages = 10, .swap_pages = 30});
    for (uint32_t seed = 1; seed <= 4; seed++)
        ask(r, &c, seed, PROMPT, 2);
    int32_t ids[PROMPT];
    rig_ids(ids, PROMPT, VOCAB, 1);
    client_direct(r, &other, ids, PROMPT, rig_sampling(2, 1));
    rig_turn(r);
    twin_of(r)->failed = -TD_ERR_INTERNAL;
    rig_until(r, other.done || other.failed);
    assert_int_equal(other.fail_code, -TD_ERR_INTERNAL);
    client_direct(r, &other, ids, PROMPT, rig_sampling(2, 1));
    rig_until(r, other.done || other.failed);
    assert_int_equal(other.fail_code, -TD_ERR_INTERNAL);
    rig_until(r, r->engine->live_count == 0);
    rig_close(r);
}

/* Host memory is taken when pages run short, and where there is none what was to go there is dropped. */
static void memory_is_taken_late_and_may_be_refused(void **state)
{
    (void)state;
    enum { PROMPT = 4 * 64 + 8 };
    static struct client c;
    for (int refuses = 0; refuses < 2; refuses++) {
        struct rig *r =
            rig_open((struct rig_options){.device = true, .pages = 10, .swap_pages = 30, .swap_late = true});
        ask(r, &c, 1, PROMPT, 2);
        assert_false(r->engine->swap.has_taker);
        twin_of(r)->refuses = refuses;
        for (uint32_t seed = 2; seed <= 4; seed++)
            ask(r, &c, seed, PROMPT, 2);
        assert_true(r->engine->swap.has_taker);
        rig_until(r, atomic_load(&r->engine->swap.slabs_ended));
        assert_int_equal(twin_of(r)->taken, !refuses);
        assert_int_equal(twin_of(r)->refused, refuses);
        for (uint32_t seed = 5; seed <= 9; seed++)
            ask(r, &c, seed, PROMPT, 2);
        ask(r, &c, 6, PROMPT, 2);
        assert_int_equal(c.done_event.done.cached_tokens, refuses ? 0 : 4 * 64);
        assert_int_equal(twin_of(r)->swapped_out > 0, !refuses);
        rig_close(r);
    }
}

/* The first blocks of a prompt are in host memory, the others on a disk that is as fast as computing: none is computed before those in front of it are here. */
static void from_host_memory_and_disk(void **state)
{
    (void)state;
    enum { PROMPT = 7 * 64 + 8, REPLY = 4 };
    static struct client c;
    char directory[] = "/tmp/tandem-device-XXXXXX", command[64];
    assert_non_null(mkdtemp(directory));
    struct rig *r =
        rig_open((struct rig_options){.device = true, .pages = 10, .swap_pages = 30, .store = directory});
    for (uint32_t seed = 1; seed <= 2; seed++)
        ask(r, &c, seed, PROMPT, REPLY);
    struct store_stats stats;
    do {
        rig_turn(r);
        store_flush(r->store);
        store_stats(r->store, &stats);
    } while (stats.blocks < 2 * 7 || stats.queue_bytes > 0);
    struct prefix_entry gone; /* four from host memory, the end of the first prompt */
    for (int i = 0; i < 4 && prefix_cache_evict(r->engine->swap.blocks, &gone); i++)
        page_pool_release(r->engine->swap.places, gone.page);
    r->engine->load_us[TIER_DISK] = 1000;
    line_add(&r->engine->prefill_cost, 300, 1000 * 1e3 / KV_BLOCK_TOKENS / r->model->params.layer_count);
    uint64_t in = twin_of(r)->swapped_in;
    ask(r, &c, 1, PROMPT, REPLY);
    assert_true(twin_of(r)->swapped_in > in);
    assert_true(c.open_event.opened.cached_memory >= 64 && c.open_event.opened.cached_disk >= 4 * 64);
    rig_close(r);
    snprintf(command, sizeof command, "rm -rf %s", directory);
    assert_int_equal(system(command), 0);
}

static void no_swaps_no_memory(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){.pages = 10, .swap_pages = 30});
    assert_null(r->engine->swap.blocks);
    assert_null(r->engine->writes);
    assert_null(r->engine->requests);
    rig_close(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_are_drawn_by_the_device),
        cmocka_unit_test(the_host_draws_what_the_device_cannot),
        cmocka_unit_test(a_bias_outside_the_vocabulary_is_refused),
        cmocka_unit_test(pieces_go_to_the_device),
        cmocka_unit_test(what_the_device_has_no_room_for_comes_back),
        cmocka_unit_test(preempted_ones_come_back),
        cmocka_unit_test(leaving_on_the_way),
        cmocka_unit_test(a_lost_device_fails_what_runs),
        cmocka_unit_test(memory_is_taken_late_and_may_be_refused),
        cmocka_unit_test(from_host_memory_and_disk),
        cmocka_unit_test(no_swaps_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
