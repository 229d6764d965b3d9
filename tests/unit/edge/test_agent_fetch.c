/* agent: a device with a part of the model, and the blocks that the cloud seals for it to keep: asked for in idle time, given back when the cloud has
 * lost the conversation. And a cloud that answers with what was not asked for. */
#include "agent_rig.h"
#include "edge/agent_internal.h"
#include "shared/metrics.h"

#define BLOCKS  3u        /* whole ones of long_text with its reply */
#define SLOW_NS 20000000u /* a token and layer, of a cloud that is later than any link */

/* The device has one layer of two. */
static void rig_sliced(struct rig *r)
{
    struct gguf *file;
    struct model *model;
    char slice[160];
    rig_make(r, 0);
    snprintf(slice, sizeof slice, "%s.slice", r->model);
    assert_int_equal(gguf_open(r->model, &file, NULL), 0);
    assert_int_equal(gguf_slice(file, 1, slice, NULL, NULL, NULL), 0);
    assert_int_equal(model_load(file, &model, NULL), 0);
    r->cloud.shape = model_kv_shape(model);
    model_free(model);
    gguf_close(file);
    assert_int_equal(rename(slice, r->model), 0);
    r->config.kv_whole = true;
    r->config.kv_disk = 64u << 20;
    r->cloud.seals = true;
    r->cloud.layer_ns = SLOW_NS;
}

/* Another cloud of the same kind, and the device started again. */
static void rig_again(struct rig *r)
{
    struct kv_shape shape = r->cloud.shape;
    uint8_t master = r->cloud.seal_master;
    rig_make_again(r);
    r->cloud.shape = shape;
    r->cloud.seal_master = master;
    r->cloud.seals = true;
    r->cloud.layer_ns = SLOW_NS;
}

static bool has_kept(void *arg)
{
    static const char name[] = "tandem_edge_kv_fetched_total";
    return metric_value(metric_counter(name, NULL, "")) >= *(double *)arg;
}

static double kept(void)
{
    return metric_value(metric_counter("tandem_edge_kv_fetched_total", NULL, ""));
}

static bool all_is_written(void *arg)
{
    const struct rig *r = arg;
    struct store_stats stats;
    store_flush(agent_store(r->agent));
    store_stats(agent_store(r->agent), &stats);
    return stats.queue_bytes == 0;
}

static void wait_for_blocks(struct rig *r, double before, uint32_t blocks)
{
    double enough = before + blocks;
    assert_true(comes_true(r->cloud.loop, has_kept, &enough));
    assert_true(comes_true(r->cloud.loop, all_is_written, r));
}

static bool nothing_flies(void *arg)
{
    return !((struct rig *)arg)->agent->flights;
}

static bool has_settled(void *arg)
{
    return !fetcher_is_busy(((struct rig *)arg)->agent->fetcher);
}

static void be_idle(void *arg)
{
    struct agent *a = ((struct rig *)arg)->agent;
    struct plan_model believed;
    plan_fill_model(a, &believed);
    fetcher_run(a->fetcher, &believed, clock_mono_us() + 60000000);
}

/* Whatever it has to ask for it has had the time to, and the cloud has heard it: what comes behind has been answered. */
static void have_idle_time(struct rig *r)
{
    assert_true(comes_true(r->cloud.loop, nothing_flies, r));
    assert_true(comes_true(r->cloud.loop, has_settled, r));
    on_loop(r->cloud.loop, be_idle, r);
    client_run(r, client_asks(r, "hello"));
}

/* A device with a slice, a conversation of BLOCKS whole blocks, and a cloud that answers FETCH so. Returns what was kept before. */
static double first_turn(struct rig *r, enum fake_fetch how)
{
    double before = kept();
    rig_sliced(r);
    r->cloud.fetch_answer = how;
    rig_run(r);
    client_run(r, client_asks(r, long_text));
    return before;
}

/* In idle time, with one request, and once. */
static void a_conversation_is_asked_for(void **state)
{
    (void)state;
    struct rig r;
    double before = kept();
    rig_sliced(&r);
    rig_run(&r);
    struct client *c = client_asks(&r, long_text);
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    wait_for_blocks(&r, before, BLOCKS);
    assert_int_equal(r.cloud.fetch_count, 1);
    assert_int_equal(r.cloud.fetch_blocks, BLOCKS);
    assert_int_equal(r.cloud.fetch_first, 0);
    assert_int_equal(r.cloud.fetch_ids, BLOCKS * KV_BLOCK_TOKENS);
    client_run(&r, client_asks(&r, long_text)); /* the same again: it is all there */
    have_idle_time(&r);
    assert_int_equal(r.cloud.fetch_count, 1);
    rig_free(&r);
}

/* A prompt that is no turn of a conversation may come again, too. */
static void a_completion_is_asked_for(void **state)
{
    (void)state;
    struct rig r;
    double before = kept();
    rig_sliced(&r);
    rig_run(&r);
    struct client *c = client_make(&r);
    c->request.chat = false;
    c->request.prompt = (char *)long_text;
    c->request.prompt_size = strlen(long_text);
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    uint32_t blocks = (c->usage.prompt_tokens + FAKE_REPLY) / KV_BLOCK_TOKENS;
    assert_true(blocks > 0);
    wait_for_blocks(&r, before, blocks);
    assert_int_equal(r.cloud.fetch_ids, blocks * KV_BLOCK_TOKENS);
    rig_free(&r);
}

static bool gave_back(void *arg)
{
    const struct rig *r = arg;
    return r->cloud.sealed_pieces == BLOCKS * 2 * r->cloud.shape.layer_count;
}

static const struct fake_plan *last_plan(const struct rig *r)
{
    return &r->cloud.plans[(r->cloud.plan_count + FAKE_PLANS - 1) % FAKE_PLANS];
}

static bool sealed_is_planned(void *arg)
{
    const struct fake_plan *p = last_plan(arg);
    for (uint32_t i = 0; i < p->range_count; i++)
        if (p->ranges[i].codec == KV_SEALED && p->ranges[i].layers == 2)
            return true;
    return false;
}

static void speak(void *arg)
{
    ((struct rig *)arg)->cloud.silent = false;
}

static struct client *ask_for_lost(struct rig *r)
{
    rig_run(r);
    client_run(r, client_asks(r, "hello")); /* tells what cloud and link do */
    r->cloud.silent = true;
    struct client *c = client_asks(r, long_text);
    on_loop(r->cloud.loop, client_begin, c);
    return c;
}

static void finish(struct rig *r, struct client *c)
{
    on_loop(r->cloud.loop, speak, r);
    assert_true(comes_true(r->cloud.loop, client_ended, c));
    client_check_reply(c, FAKE_REPLY);
}

/* Bit for bit, after a restart of both, in one range that nobody computes. */
static void what_is_lost_is_given_back(void **state)
{
    (void)state;
    struct rig r;
    double before = first_turn(&r, FETCH_HONEST);
    wait_for_blocks(&r, before, BLOCKS);
    rig_again(&r);
    struct client *c = ask_for_lost(&r);
    assert_true(comes_true(r.cloud.loop, gave_back, &r));
    assert_true(sealed_is_planned(&r));
    const struct fake_plan *p = last_plan(&r);
    assert_int_equal(p->ranges[0].first_token, 0);
    assert_int_equal(p->ranges[0].count, BLOCKS * KV_BLOCK_TOKENS);
    assert_int_equal(p->ranges[p->range_count - 1].layers, 0);
    finish(&r, c);
    assert_int_equal(c->timings.plan.restored_tokens, BLOCKS * KV_BLOCK_TOKENS);
    rig_free(&r);
}

/* Made by pages that this cloud does not have any more: it would only compute it again. */
static void what_would_not_be_taken_is_not_sent(void **state)
{
    (void)state;
    for (int same = 0; same < 2; same++) {
        struct rig r;
        double before = kept();
        rig_sliced(&r);
        r.cloud.numerics = r.cloud.sealed_numerics = KV_NUMERICS_CUDA_FAST_FP8;
        rig_run(&r);
        client_run(&r, client_asks(&r, long_text));
        wait_for_blocks(&r, before, BLOCKS);
        rig_again(&r);
        r.cloud.sealed_numerics = KV_NUMERICS_CUDA_FAST_FP8;
        r.cloud.numerics = same ? KV_NUMERICS_CUDA_FAST_FP8 : KV_NUMERICS_CUDA_FAST;
        struct client *c = ask_for_lost(&r);
        assert_true(!same || comes_true(r.cloud.loop, gave_back, &r));
        finish(&r, c);
        assert_int_equal(sealed_is_planned(&r), same);
        rig_free(&r);
    }
}

static void say_two(void *arg)
{
    struct rig *r = arg;
    r->cloud.hold_at = 2;
    r->cloud.silent = false;
}

static bool has_two(void *arg)
{
    return ((struct client *)arg)->count == 2;
}

static void cut(void *arg)
{
    struct rig *r = arg;
    r->cloud.fetch_answer = FETCH_HONEST;
    for (size_t i = 0; i < FAKE_CONNS; i++)
        if (r->cloud.conns[i])
            fake_cut(r->cloud.conns[i]);
}

static bool has_planned_again(void *arg)
{
    const struct rig *r = arg;
    return r->cloud.open_count == 3 && gave_back(arg);
}

/* A cloud that has lost all once more, in mid-reply, is given it once more: from other values the rest might be another text. */
static void the_rest_of_a_reply_is_made_from_the_same(void **state)
{
    (void)state;
    struct rig r;
    double before = first_turn(&r, FETCH_HONEST);
    wait_for_blocks(&r, before, BLOCKS);
    rig_again(&r);
    struct client *c = ask_for_lost(&r);
    assert_true(comes_true(r.cloud.loop, gave_back, &r));
    on_loop(r.cloud.loop, say_two, &r);
    assert_true(comes_true(r.cloud.loop, has_two, c));
    on_loop(r.cloud.loop, cut, &r);
    assert_true(comes_true(r.cloud.loop, has_planned_again, &r));
    on_loop(r.cloud.loop, let_tokens, &r);
    assert_true(comes_true(r.cloud.loop, client_ended, c));
    client_check_reply(c, FAKE_REPLY);
    rig_free(&r);
}

/* A cloud with another key would open none of it: it is not sent, and asked for anew. */
static void another_key_is_another_cloud(void **state)
{
    (void)state;
    struct rig r;
    double before = first_turn(&r, FETCH_HONEST);
    wait_for_blocks(&r, before, BLOCKS);
    r.cloud.seal_master = 1;
    rig_again(&r);
    finish(&r, ask_for_lost(&r));
    assert_false(sealed_is_planned(&r));
    wait_for_blocks(&r, before, 2 * BLOCKS);
    assert_int_equal(r.cloud.fetch_blocks, BLOCKS);
    rig_free(&r);
}

/* A cloud that does not know FETCH is not sent any. */
static void a_cloud_without_seals_is_not_asked(void **state)
{
    (void)state;
    struct rig r;
    rig_sliced(&r);
    r.cloud.seals = false;
    rig_run(&r);
    client_run(&r, client_asks(&r, long_text));
    have_idle_time(&r);
    assert_int_equal(r.cloud.fetch_count, 0);
    rig_free(&r);
}

/* Nor is one asked for what it was not told the ids of, or by a device that has the whole model. */
static void who_need_not_does_not_ask(void **state)
{
    (void)state;
    for (int whole = 0; whole < 2; whole++) {
        struct rig r;
        if (whole) {
            rig_make(&r, 0);
            r.config.kv_whole = true;
            r.config.kv_disk = 64u << 20;
            r.cloud.seals = true;
        } else {
            rig_sliced(&r);
            r.config.private_min_layers = 1;
            r.config.edge_layers = 1;
        }
        rig_run(&r);
        struct client *c = client_asks(&r, long_text);
        c->request.prefer = whole ? API_PREFER_NONE : API_PREFER_PRIVATE;
        client_run(&r, c);
        client_check_reply(c, FAKE_REPLY);
        have_idle_time(&r);
        assert_int_equal(r.cloud.fetch_count, 0);
        rig_free(&r);
    }
}

static bool has_asked(void *arg)
{
    const struct rig *r = arg;
    return r->cloud.fetch_count > 0;
}

static void answer(void *arg)
{
    ((struct rig *)arg)->cloud.fetch_answer = FETCH_HONEST;
}

static void be_slow(void *arg)
{
    ((struct rig *)arg)->cloud.layer_ns = SLOW_NS;
}

/* What the cloud computes sooner than this device can send it would never be given back. The cloud may be slower later. */
static void what_would_not_be_sooner_is_not_asked_for(void **state)
{
    (void)state;
    struct rig r;
    double before = kept();
    rig_sliced(&r);
    r.cloud.layer_ns = 1;
    rig_run(&r);
    client_run(&r, client_asks(&r, long_text));
    have_idle_time(&r);
    assert_int_equal(r.cloud.fetch_count, 0);
    on_loop(r.cloud.loop, be_slow, &r);
    client_run(&r, client_asks(&r, "hello"));
    wait_for_blocks(&r, before, BLOCKS);
    assert_int_equal(r.cloud.fetch_count, 1);
    rig_free(&r);
}

#define MANY (2 * LIMIT_FETCH_BLOCKS)

static void want_many(void *arg)
{
    struct rig *r = arg;
    static const int32_t ids[MANY * KV_BLOCK_TOKENS];
    struct kv_block_id chain[MANY];
    for (uint32_t i = 0; i < MANY; i++)
        chain[i] = (struct kv_block_id){{1, (uint8_t)i}};
    fetcher_want(r->agent->fetcher, ids, chain, MANY);
}

/* On a link that carries the ids of so many blocks in the time that there is for them. */
struct link_for {
    struct rig *rig;
    double blocks;
};

static void be_idle_on(void *arg)
{
    const struct link_for *l = arg;
    struct agent *a = l->rig->agent;
    struct plan_model believed;
    plan_fill_model(a, &believed);
    believed.cloud.base_ns = 1e12;
    believed.rate_bytes_per_us = (l->blocks + 0.5) * KV_BLOCK_TOKENS * sizeof(int32_t) / FETCHER_IDS_US;
    fetcher_run(a->fetcher, &believed, clock_mono_us() + 60000000);
}

/* A request that comes just then waits for the ids, and they come with every FETCH from the first on: so there are few, and none with too many. */
static void ids_hold_nobody_up(void **state)
{
    (void)state;
    struct rig r;
    double before = kept();
    rig_sliced(&r);
    r.cloud.layer_ns = 1; /* so the agent itself does not ask */
    rig_run(&r);
    client_run(&r, client_asks(&r, "hello"));
    assert_true(comes_true(r.cloud.loop, nothing_flies, &r));
    on_loop(r.cloud.loop, want_many, &r);
    static const struct {
        double link;
        uint32_t first, end, count;
    } turns[] = {{0, 0, 0, 0},
                 {3, 0, 3, 1},
                 {3, 0, 3, 1},
                 {1000, 3, 3 + LIMIT_FETCH_BLOCKS, 2},
                 {MANY - 1, 3 + LIMIT_FETCH_BLOCKS, MANY - 1, 3},
                 {MANY, MANY - 1, MANY, 4}};
    for (size_t i = 0; i < TD_COUNT(turns); i++) {
        struct link_for link = {&r, turns[i].link};
        on_loop(r.cloud.loop, be_idle_on, &link);
        wait_for_blocks(&r, before, turns[i].end);
        assert_true(comes_true(r.cloud.loop, has_settled, &r));
        assert_int_equal(r.cloud.fetch_count, turns[i].count);
        assert_int_equal(r.cloud.fetch_ids, turns[i].end * KV_BLOCK_TOKENS);
        assert_int_equal(r.cloud.fetch_first, turns[i].first);
    }
    rig_free(&r);
}

/* Whoever comes meanwhile goes first; what had not come is asked for again. */
static void a_request_goes_first(void **state)
{
    (void)state;
    struct rig r;
    double before = first_turn(&r, FETCH_HOLDS);
    assert_true(comes_true(r.cloud.loop, has_asked, &r));
    struct client *c = client_asks(&r, "hello");
    client_run(&r, c);
    client_check_reply(c, FAKE_REPLY);
    assert_int_equal(r.cloud.fetch_cancels, 1);
    on_loop(r.cloud.loop, answer, &r);
    client_run(&r, client_asks(&r, "hello again"));
    wait_for_blocks(&r, before, BLOCKS);
    rig_free(&r);
}

static void a_lost_link_is_asked_again(void **state)
{
    (void)state;
    struct rig r;
    double before = first_turn(&r, FETCH_HOLDS);
    assert_true(comes_true(r.cloud.loop, has_asked, &r));
    on_loop(r.cloud.loop, cut, &r);
    wait_for_blocks(&r, before, BLOCKS);
    rig_free(&r);
}

static void cut_for_another(void *arg)
{
    ((struct rig *)arg)->cloud.seal_master = 1;
    cut(arg);
}

static bool is_back(void *arg)
{
    const struct rig *r = arg;
    return r->cloud.connections == 2 && fetcher_tag(r->agent->fetcher) &&
           memcmp(fetcher_tag(r->agent->fetcher), fake_seal(&r->cloud).tag, KV_SEAL_TAG_SIZE) == 0;
}

/* What one key was to seal is not asked of another: its names on the disk would be those of the first. */
static void another_key_ends_what_was_wanted(void **state)
{
    (void)state;
    struct rig r;
    double before = first_turn(&r, FETCH_HOLDS);
    assert_true(comes_true(r.cloud.loop, has_asked, &r));
    on_loop(r.cloud.loop, cut_for_another, &r);
    assert_true(comes_true(r.cloud.loop, is_back, &r));
    have_idle_time(&r);
    assert_int_equal(r.cloud.fetch_count, 1);
    client_run(&r, client_asks(&r, long_text));
    wait_for_blocks(&r, before, BLOCKS);
    rig_free(&r);
}

/* What the cloud does not have is left out, and not asked for over and over. */
static void what_is_left_out_is_left(void **state)
{
    (void)state;
    struct rig r;
    double before = first_turn(&r, FETCH_LEAVES_OUT);
    wait_for_blocks(&r, before, BLOCKS - 1);
    have_idle_time(&r);
    assert_int_equal(r.cloud.fetch_count, 1);
    rig_free(&r);
}

static void a_refusal_is_heard(void **state)
{
    (void)state;
    struct rig r;
    double before = first_turn(&r, FETCH_REFUSES);
    assert_true(comes_true(r.cloud.loop, has_asked, &r));
    have_idle_time(&r);
    assert_int_equal(r.cloud.fetch_count, 1);
    assert_true(kept() == before);
    rig_free(&r);
}

static void a_busy_cloud_is_asked_later(void **state)
{
    (void)state;
    struct rig r;
    double before = first_turn(&r, FETCH_BUSY);
    wait_for_blocks(&r, before, BLOCKS);
    assert_int_equal(r.cloud.fetch_count, 2);
    rig_free(&r);
}

static bool is_connected_again(void *arg)
{
    const struct rig *r = arg;
    return r->cloud.connections > 1;
}

/* Nothing of it is kept, and it is never asked again; requests are served as before. */
static void a_hostile_cloud_is_not_asked_again(void **state)
{
    (void)state;
    for (int how = FETCH_OTHER_BLOCK; how < FETCH_KINDS; how++) {
        struct rig r;
        double before = first_turn(&r, (enum fake_fetch)how);
        assert_true(comes_true(r.cloud.loop, is_connected_again, &r));
        uint32_t good = how == FETCH_TWICE ? BLOCKS : how == FETCH_HALF_A_BLOCK ? BLOCKS - 1 : 0;
        if (kept() != before + good)
            fail_msg("answer %d: %g blocks were kept", how, kept() - before);
        struct client *c = client_asks(&r, long_text);
        client_run(&r, c);
        client_check_reply(c, FAKE_REPLY);
        have_idle_time(&r);
        assert_int_equal(r.cloud.fetch_count, 1);
        rig_free(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_conversation_is_asked_for),
        cmocka_unit_test(a_completion_is_asked_for),
        cmocka_unit_test(what_is_lost_is_given_back),
        cmocka_unit_test(what_would_not_be_taken_is_not_sent),
        cmocka_unit_test(the_rest_of_a_reply_is_made_from_the_same),
        cmocka_unit_test(another_key_is_another_cloud),
        cmocka_unit_test(a_cloud_without_seals_is_not_asked),
        cmocka_unit_test(who_need_not_does_not_ask),
        cmocka_unit_test(what_would_not_be_sooner_is_not_asked_for),
        cmocka_unit_test(ids_hold_nobody_up),
        cmocka_unit_test(a_request_goes_first),
        cmocka_unit_test(a_lost_link_is_asked_again),
        cmocka_unit_test(another_key_ends_what_was_wanted),
        cmocka_unit_test(what_is_left_out_is_left),
        cmocka_unit_test(a_refusal_is_heard),
        cmocka_unit_test(a_busy_cloud_is_asked_later),
        cmocka_unit_test(a_hostile_cloud_is_not_asked_again),
    };
    return cmocka_run_group_tests(tests, rig_set_up, NULL);
}
