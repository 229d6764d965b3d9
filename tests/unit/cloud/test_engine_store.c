/* engine: with a store. What a finished reply leaves on disk is found after a restart and after a crash, changes no reply, and is computed again when
 * it is damaged, late or not good enough. */
#include "engine_rig.h"
#include "../store/redis_fixture.h"
#include <fcntl.h>
#include <sys/stat.h>

#define VOCAB  256
#define PROMPT 400 /* six blocks and 16 tokens */
#define REPLY  60

struct scene {
    struct rig *rig;
    char directory[64];
    int32_t prompt[PROMPT], reply[REPLY];
};

static void remove_directory(const char *path)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf %s", path);
    assert_int_equal(system(command), 0);
}

static void copy_directory(const char *from, const char *to)
{
    char command[256];
    snprintf(command, sizeof command, "cp -r %s %s", from, to);
    assert_int_equal(system(command), 0);
}

static struct scene *scene_open(void)
{
    struct scene *s = calloc(1, sizeof *s);
    rig_directory(s->directory);
    s->rig = rig_open((struct rig_options){.store = s->directory});
    rig_ids(s->prompt, PROMPT, VOCAB, 31);
    rig_reference(s->rig, s->prompt, PROMPT, rig_sampling(REPLY, 5), s->reply);
    return s;
}

static void restart(struct scene *s)
{
    rig_stop_engine(s->rig);
    rig_start_engine(s->rig);
}

static void scene_close(struct scene *s)
{
    rig_close(s->rig);
    remove_directory(s->directory);
    free(s);
}

/* The reply is right; returns the tokens that came from disk. */
static uint32_t ask(struct scene *s, struct engine_open open, struct client *c)
{
    open.direct = true;
    open.generate = rig_sampling(REPLY, 5);
    client_send(s->rig, c, open);
    rig_until(s->rig, c->done || c->failed);
    assert_reply(c, s->reply, REPLY);
    assert_int_equal(c->done_event.done.prefill_tokens, PROMPT - c->done_event.done.cached_tokens);
    return c->open_event.opened.cached_disk;
}

static uint32_t ask_again(struct scene *s, struct client *c)
{
    return ask(s, client_open_of(c, s->prompt, PROMPT, 0), c);
}

static void blocks_survive_a_restart(void **state)
{
    (void)state;
    struct scene *s = scene_open();
    struct client c;
    assert_int_equal(ask_again(s, &c), 0);
    struct store_stats stats;
    store_stats(s->rig->store, &stats);
    assert_int_equal(stats.blocks, 7); /* 460 tokens, the reply's included */
    restart(s);
    assert_int_equal(ask_again(s, &c), 384);
    assert_int_equal(c.done_event.done.cached_tokens, 384);
    assert_int_equal(c.done_event.done.read_tokens, 384);
    assert_true(c.done_event.done.load_us > 0);
    assert_int_equal(ask_again(s, &c), 0); /* in memory by now */
    assert_int_equal(c.done_event.done.cached_tokens, 384);
    assert_int_equal(c.done_event.done.read_tokens, 0);
    store_stats(s->rig->store, &stats);
    assert_int_equal(stats.puts, 0); /* nothing was written twice */
    scene_close(s);
}

/* ENGINE_DONE comes after the store's acknowledgements: a copy of the directory at that moment is what a crash leaves. */
static void done_means_persisted(void **state)
{
    (void)state;
    struct scene *s = scene_open();
    struct client c;
    ask_again(s, &c);
    char copy[80];
    snprintf(copy, sizeof copy, "%s-copy", s->directory);
    copy_directory(s->directory, copy);
    rig_stop_engine(s->rig);
    s->rig->options.store = copy;
    rig_start_engine(s->rig);
    assert_int_equal(ask_again(s, &c), 384);
    int32_t longer[PROMPT + REPLY + 10]; /* the conversation goes on */
    memcpy(longer, c.done_ids, (PROMPT + REPLY) * sizeof *longer);
    rig_ids(longer + PROMPT + REPLY, 10, VOCAB, 6);
    restart(s);
    client_direct(s->rig, &c, longer, PROMPT + REPLY + 10, rig_greedy(1));
    rig_until(s->rig, c.done);
    assert_int_equal(c.done_event.done.cached_tokens, 448);
    rig_stop_engine(s->rig);
    s->rig->options.store = s->directory;
    rig_start_engine(s->rig);
    remove_directory(copy);
    scene_close(s);
}

/* Flip a byte every so often in all segments. */
static void damage_segments(const char *directory, off_t step)
{
    char command[256], path[256];
    snprintf(command, sizeof command,
             "find %s -type f -size +16k ! -name '*sql*' ! -name '*db*' ! -name 'ballast*'", directory);
    FILE *files = popen(command, "r");
    assert_non_null(files);
    uint32_t count = 0;
    while (fgets(path, sizeof path, files)) {
        path[strcspn(path, "\n")] = 0;
        int fd = open(path, O_RDWR);
        assert_true(fd >= 0);
        off_t end = lseek(fd, 0, SEEK_END);
        for (off_t at = step; at < end; at += step, count++) {
            uint8_t byte;
            assert_int_equal(pread(fd, &byte, 1, at), 1);
            byte ^= 0x10;
            assert_int_equal(pwrite(fd, &byte, 1, at), 1);
        }
        close(fd);
    }
    pclose(files);
    assert_true(count > 0);
}

static void damaged_blocks_are_computed_again(void **state)
{
    (void)state;
    static const off_t steps[] = {5000, 40000, 100000};
    for (size_t i = 0; i < TD_COUNT(steps); i++) {
        struct scene *s = scene_open();
        struct client c;
        ask_again(s, &c);
        rig_stop_engine(s->rig);
        damage_segments(s->directory, steps[i]);
        rig_start_engine(s->rig);
        ask_again(s, &c);
        assert_true(c.done_event.done.cached_tokens < 384);
        scene_close(s);
    }
}

static void late_blocks_are_computed_again(void **state)
{
    (void)state;
    struct scene *s = scene_open();
    struct client c;
    ask_again(s, &c);
    restart(s);
    struct engine_open open = client_open_of(&c, s->prompt, PROMPT, 0);
    open.direct = true;
    open.generate = rig_sampling(REPLY, 5);
    client_send(s->rig, &c, open);
    rig_turn(s->rig); /* admitted; as many blocks as there are buffers have been asked for */
    assert_int_equal(c.open_event.opened.cached_disk, 384);
    rig_now += 60000000;
    rig_until(s->rig, c.done);
    assert_reply(&c, s->reply, REPLY);
    assert_true(c.done_event.done.cached_tokens <= LOADER_BUFFERS * KV_BLOCK_TOKENS);
    scene_close(s);
}

/* A client that leaves while its blocks are being read. */
static void reading_can_be_cancelled(void **state)
{
    (void)state;
    struct scene *s = scene_open();
    struct client c;
    ask_again(s, &c);
    restart(s);
    for (int turns = 1; turns < 6; turns++) {
        client_direct(s->rig, &c, s->prompt, PROMPT, rig_greedy(10));
        for (int i = 0; i < turns; i++)
            rig_turn(s->rig);
        engine_cancel(s->rig->engine, c.sequence, false, 0);
        rig_turn(s->rig);
        assert_int_equal(rig_stats(s->rig).running, 0);
        assert_int_equal(rig_stats(s->rig).pages_used, rig_stats(s->rig).pages_cached);
    }
    ask_again(s, &c);
    scene_close(s);
}

/* Blocks that a device had a hand in come back for its principal only, and not for exact requests when they are lossy. */
static void own_blocks_keep_owner_and_quality(void **state)
{
    (void)state;
    for (int lossy = 0; lossy < 2; lossy++) {
        struct scene *s = scene_open();
        struct client c;
        uint8_t codec = lossy ? KV_L1 : KV_L0;
        struct rig_edge edge = rig_edge_compute(s->rig, s->prompt, PROMPT, 1);
        struct plan_range range = {0, PROMPT, 1, codec, HIDDEN_F32};
        struct engine_generate generate = rig_sampling(REPLY, 5);
        client_send(s->rig, &c, client_open_of(&c, s->prompt, PROMPT, 0));
        engine_plan(s->rig->engine, c.sequence, 1, &range, 1, false);
        engine_start(s->rig->engine, c.sequence, &generate);
        rig_send_hidden(&edge, &c, 1, 0, PROMPT, HIDDEN_F32);
        rig_send_kv(&edge, &c, 1, 0, PROMPT, codec);
        rig_until(s->rig, c.done || c.failed);
        assert_true(c.done);
        restart(s);
        struct engine_open open = client_open_of(&c, s->prompt, PROMPT, 0);
        assert_int_equal(ask(s, open, &c), lossy ? 0 : 384);
        restart(s);
        open = client_open_of(&c, s->prompt, PROMPT, 0);
        strcpy(open.principal, "bob");
        kv_principal_key(open.shared_key, open.principal, open.own_key);
        assert_int_equal(ask(s, open, &c),
                         lossy ? 384 : 0); /* lossy: Ann's exact request has made shared ones since */
        rig_edge_free(&edge);
        scene_close(s);
    }
}

static void no_persist_writes_nothing(void **state)
{
    (void)state;
    struct scene *s = scene_open();
    struct client c;
    struct engine_generate generate = rig_sampling(REPLY, 5);
    generate.no_persist = true;
    client_direct(s->rig, &c, s->prompt, PROMPT, generate);
    rig_until(s->rig, c.done);
    struct store_stats stats;
    store_flush(s->rig->store);
    store_stats(s->rig->store, &stats);
    assert_int_equal(stats.blocks, 0);
    scene_close(s);
}

/* Finished, running and on its way to the disk: nothing of an erased tenant is left, and nothing comes after. Another tenant's is not touched. */
static void an_erased_tenant_is_forgotten(void **state)
{
    (void)state;
    struct scene *s = scene_open();
    struct client mine, running, other;
    struct store_stats stats;
    ask_again(s, &mine);
    struct engine_open open = client_open_of(&other, s->prompt, PROMPT, 0);
    strcpy(open.tenant, "other");
    memset(open.shared_key, 2, sizeof open.shared_key);
    kv_principal_key(open.shared_key, open.principal, open.own_key);
    ask(s, open, &other);
    int32_t prompt[PROMPT];
    rig_ids(prompt, PROMPT, VOCAB, 77);
    client_direct(s->rig, &running, prompt, PROMPT, rig_greedy(200));
    rig_until(s->rig, running.count > 3);
    assert_true(store_has_tenant(s->rig->store, "acme"));

    struct engine_forgetting f = {.tenant = "acme"};
    engine_do_forget(s->rig->engine, &f);
    assert_int_equal(running.fail_code, -TD_ERR_CLOSED);
    rig_until(s->rig, f.done);
    assert_int_equal(rig_stats(s->rig).pages_used, 0);
    assert_int_equal(tiers_erase_tenant(s->rig->tiers, "acme", NULL), 0);
    for (int i = 0; i < 20; i++)
        rig_turn(s->rig);
    assert_false(store_has_tenant(s->rig->store, "acme"));
    store_stats(s->rig->store, &stats);
    assert_int_equal(stats.blocks, 7);

    open = client_open_of(&other, s->prompt, PROMPT, 0);
    strcpy(open.tenant, "other");
    memset(open.shared_key, 2, sizeof open.shared_key);
    kv_principal_key(open.shared_key, open.principal, open.own_key);
    ask(s, open, &other);
    assert_int_equal(other.done_event.done.cached_tokens, 384);
    ask_again(s, &mine); /* even under the old names */
    assert_int_equal(mine.done_event.done.cached_tokens, 0);
    scene_close(s);
}

/* While what is under way for an erased tenant ends, others get no blocks to the store, whatever of theirs ends: or it might never be the end. */
static void nothing_goes_to_the_store_while_a_tenant_is_forgotten(void **state)
{
    (void)state;
    struct scene *s = scene_open();
    struct client other;
    struct engine *e = s->rig->engine;
    struct engine_open open = client_open_of(&other, s->prompt, PROMPT, 0);
    strcpy(open.tenant, "other");
    open.direct = true;
    open.generate = rig_greedy(REPLY);
    client_send(s->rig, &other, open);
    struct persist_block *taken = persist_take(e->persist); /* one under way */
    persist_submit(e->persist, taken);
    struct engine_forgetting f = {.tenant = "acme"};
    e->loads_in_flight++; /* and another, which does not end yet */
    engine_do_forget(e, &f);
    uint64_t begun = rig_now;
    for (int i = 0; i < 60000 && !persist_is_idle(e->persist); i++) {
        fixture_pause(1000);
        rig_turn(s->rig);
        rig_now = begun; /* who closes would not wait for its blocks for ever */
    }
    rig_now += 1;
    rig_until(s->rig, e->live_count == 1 && e->live[0]->state == SEQ_CLOSING);
    assert_int_equal(e->pending_count, 7);
    assert_true(persist_is_idle(e->persist));
    e->loads_in_flight--;
    rig_until(s->rig, f.done && other.done);
    assert_int_equal(e->pending_count, 0);
    scene_close(s);
}

/* Of a principal that ends many at once the table keeps the youngest. Who still waits for the store hears that its reply is whole all the same. */
static void a_reply_that_is_forgotten_while_it_is_stored_is_done(void **state)
{
    (void)state;
    struct scene *s = scene_open();
    struct engine *e = s->rig->engine;
    struct client c;
    client_direct(s->rig, &c, s->prompt, PROMPT, rig_sampling(REPLY, 5));
    rig_until(s->rig, c.count == REPLY - 1);
    e->live[0]->unpersisted++; /* a block that the store does not acknowledge */
    rig_until(s->rig, e->live[0]->state == SEQ_CLOSING);
    for (uint64_t i = 0; i < LIMIT_PARKED_PER_PRINCIPAL; i++) {
        struct generation *g;
        uint8_t id[GEN_REQUEST_ID_SIZE] = {0xff}, hash[TD_HASH_SIZE] = {0};
        store_le64(id + 8, i);
        assert_int_equal(gen_open(e->gens, "acme", "ann", id, 1, hash, NULL, 0, 1, &g), GEN_NEW);
        gen_finish(g, FINISH_STOP, rig_now + 1);
    }
    assert_false(c.done);
    engine_expire(e, rig_now);
    assert_int_equal(e->live_count, 0);
    assert_reply(&c, s->reply, REPLY);
    scene_close(s);
}

static struct tier_stats remote_stats(const struct rig *r)
{
    struct tier_stats stats;
    tiers_stats(r->tiers, TIER_REMOTE, &stats);
    return stats;
}

static void wait_for_remote(const struct rig *r, bool sick, uint64_t puts)
{
    struct tier_stats now = remote_stats(r);
    for (int i = 0; i < 60000 && (now.sick != sick || now.puts < puts); i++) {
        fixture_pause(1000);
        now = remote_stats(r);
    }
    assert_int_equal(now.sick, sick);
    assert_true(now.puts >= puts);
}

static void restart_empty(struct scene *s, const char *directory)
{
    rig_stop_engine(s->rig);
    remove_directory(directory);
    assert_int_equal(mkdir(directory, 0700), 0);
    rig_start_engine(s->rig);
    wait_for_remote(s->rig, false, 0);
}

/* What one node has computed another finds on the server that they share; the reply is the same, also when the server hangs. */
static void blocks_come_from_another_node(void **state)
{
    (void)state;
    if (!redis_is_installed())
        skip();
    struct real_redis redis = {.port = 0};
    redis_start(&redis);
    struct tier_redis_config remote = {
        .host = "127.0.0.1", .port = redis.port, .command_ms = 20000, .knock_ms = 20};
    struct scene *s = scene_open();
    struct client c;
    char other[64];
    rig_directory(other);
    s->rig->options.keys = s->directory;
    s->rig->options.remote = &remote;
    restart(s);
    wait_for_remote(s->rig, false, 0);
    ask_again(s, &c);
    wait_for_remote(s->rig, false, 7);

    s->rig->options.store = other;
    int times = 0;
    do { /* a server that takes longer than KNOWN_ASKED_US to answer is not waited for */
        restart_empty(s, other);
        ask_again(s, &c);
    } while (c.done_event.done.cached_tokens != 384 && ++times < 100);
    assert_int_equal(c.done_event.done.cached_tokens, 384);
    ask_again(s, &c);

    remote.command_ms = 200;
    restart_empty(s, other);
    kill(redis.pid, SIGSTOP);
    ask_again(s, &c); /* nothing comes: computed */
    assert_int_equal(c.done_event.done.cached_tokens, 0);
    wait_for_remote(s->rig, true, 0);
    rig_stop_engine(s->rig);
    s->rig->options.store = s->directory;
    s->rig->options.remote = NULL;
    rig_start_engine(s->rig);
    remove_directory(other);
    redis_stop(&redis);
    scene_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_survive_a_restart),
        cmocka_unit_test(done_means_persisted),
        cmocka_unit_test(damaged_blocks_are_computed_again),
        cmocka_unit_test(late_blocks_are_computed_again),
        cmocka_unit_test(reading_can_be_cancelled),
        cmocka_unit_test(own_blocks_keep_owner_and_quality),
        cmocka_unit_test(no_persist_writes_nothing),
        cmocka_unit_test(an_erased_tenant_is_forgotten),
        cmocka_unit_test(nothing_goes_to_the_store_while_a_tenant_is_forgotten),
        cmocka_unit_test(a_reply_that_is_forgotten_while_it_is_stored_is_done),
        cmocka_unit_test(blocks_come_from_another_node),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
