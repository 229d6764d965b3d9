/* engine without memory: each allocation of its thread, and of who calls it, fails once. While it is made it is refused, and of what was made nothing is
 * left; while it serves, the request ends with an error or as ever, and the next one as ever. With a store and without, for a device and for none. */
#include "../no_memory.h"
#include "edge_scene.h"

/* Everything but the engine. */
static struct rig *open_parts(struct rig_options options)
{
    struct rig *r = rig_open(options);
    engine_destroy(r->engine);
    r->engine = NULL;
    return r;
}

static int build_without(struct rig *r)
{
    bool came = true;
    int n = 1;
    for (; came; n++) {
        struct backend *backend = rig_backend(r, 8, 64);
        struct engine_config config = {.model = r->model,
                                       .backend = r->options.device ? twin_create(backend) : backend,
                                       .tiers = r->tiers,
                                       .token_budget = 64,
                                       .sequences_max = 4,
                                       .swap_size = r->options.device ? 1u << 20 : 0};
        struct engine *e = NULL;
        struct td_error err = {0};
        no_memory_at(n);
        int rc = engine_build(&config, &e, &err);
        came = no_memory_came();
        assert_true(rc == 0 ||
                    (came && rc == -TD_ERR_NOMEM && err.text[0] && !e)); /* a metric may be missed */
        if (rc == 0)
            engine_destroy(e);
        else
            config.backend->ops->destroy(config.backend); /* its caller's again */
    }
    return n - 2;
}

static void an_engine_without_memory(void **state)
{
    (void)state;
    char directory[] = "/tmp/tandem-memory-XXXXXX", command[64];
    assert_non_null(mkdtemp(directory));
    for (int device = 0; device < 2; device++) {
        struct rig *r = open_parts((struct rig_options){.device = device});
        int alone = build_without(r);
        rig_close(r);
        r = open_parts((struct rig_options){.device = device, .store = directory, .store_ram = 1 << 16});
        int with_store = build_without(r);
        rig_close(r);
        assert_true(alone > 15 && with_store > alone);
    }
    snprintf(command, sizeof command, "rm -rf %s", directory);
    assert_int_equal(system(command), 0);
}

/* --- requests ------------------------------------------------------------------------------------- */

struct message { /* made before memory is short, as these are the test's own */
    uint8_t *data;
    size_t size;
};

struct upload {
    struct message rows, pieces[2 * (PROMPT / KV_BLOCK_TOKENS + 1)];
    uint32_t piece_count;
};

static struct upload make_upload(struct scene *s)
{
    struct upload u = {.piece_count = 0};
    uint32_t embd = s->rig->model->params.embd_size;
    u.rows.size = hidden_wire_size(HIDDEN_F32, PROMPT, embd);
    u.rows.data = malloc(u.rows.size);
    assert_int_equal(hidden_encode(HIDDEN_F32, s->edge.hidden, PROMPT, embd, u.rows.data, u.rows.size), 0);
    for (uint32_t block = 0; block < sequence_blocks(PROMPT); block++)
        for (int is_value = 0; is_value < 2; is_value++) {
            struct message *m = &u.pieces[u.piece_count++];
            m->data = rig_piece(&s->edge, block, 0, is_value, KV_L0, 0, PROMPT, &m->size);
        }
    return u;
}

static bool is_out_of_memory(int rc)
{
    return rc == -TD_ERR_NOMEM || rc == -TD_ERR_FULL || rc == -TD_ERR_BUSY;
}

/* PLAN, GENERATE, rows and pieces, as long as nothing is refused; then, as its door does, the end. */
static void upload(struct scene *s, struct client *c, struct upload *u)
{
    struct engine *e = s->rig->engine;
    struct plan_range range = {0, PROMPT, 1, KV_L0, HIDDEN_F32};
    struct engine_generate greedy = rig_greedy(REPLY);
    int rc = engine_plan(e, c->sequence, 1, &range, 1, false);
    rc = rc < 0 ? rc : engine_start(e, c->sequence, &greedy);
    if (rc == 0)
        rc = engine_hidden(e, c->sequence, 1, 0, PROMPT, 1, HIDDEN_F32, u->rows.data, u->rows.size);
    else
        free(u->rows.data);
    for (uint32_t i = 0; i < u->piece_count; i++)
        if (rc == 0)
            rc = engine_kv(e, c->sequence, 1, i / 2, u->pieces[i].data, u->pieces[i].size);
        else
            free(u->pieces[i].data);
    if (rc == 0)
        return;
    assert_true(is_out_of_memory(rc));
    c->failed = true;
    c->fail_code = rc;
    engine_cancel(e, c->sequence, false, 0);
}

/* One request whose n-th allocation fails. False: there is no n-th. */
static bool ask_without(struct scene *s, int n, bool edge)
{
    static struct client c;
    struct engine *e = s->rig->engine;
    struct engine_open open = client_open_of(&c, s->prompt, PROMPT, 0);
    struct upload u = {.piece_count = 0};
    open.direct = !edge;
    open.no_cache = edge;
    open.generate = rig_greedy(REPLY);
    open.generate.sampling.want_logprobs = !edge;
    if (edge)
        u = make_upload(s);
    c = (struct client){0};
    no_memory_at(n);
    int rc = engine_open(e, &open, &c.sequence);
    if (rc < 0)
        c.failed = true, c.fail_code = rc;
    if (edge && rc == 0)
        upload(s, &c, &u);
    for (uint32_t turns = 0; !c.done && !c.failed && turns < RIG_TURNS_MAX; turns++)
        rig_turn(s->rig);
    bool came = no_memory_came();
    if (edge && rc < 0) {
        free(u.rows.data);
        for (uint32_t i = 0; i < u.piece_count; i++)
            free(u.pieces[i].data);
    }
    if (c.failed && !(came && is_out_of_memory(c.fail_code)))
        fail_msg("allocation %d: %s: %s", n, td_status_text(c.fail_code), c.fail_text);
    if (!c.failed)
        assert_reply(&c, s->reply, REPLY);
    rig_until(s->rig,
              e->live_count == 0 && atomic_load(&e->open_count) == 0 && atomic_load(&e->staged_size) == 0);
    return came;
}

static void requests_without_memory(struct rig_options options, bool edge)
{
    struct scene *s = scene_open(1, options);
    int n = 1;
    while (ask_without(s, n, edge))
        n++;
    assert_true(n > 10);
    assert_int_equal(s->rig->engine->running_count, 0);
    assert_int_equal(prefix_cache_available(s->rig->engine->cache), s->rig->engine->backend->page_count);
    scene_close(s);
}

static void a_direct_request_without_memory(void **state)
{
    (void)state;
    requests_without_memory((struct rig_options){0}, false);
    requests_without_memory((struct rig_options){.device = true}, false);
}

static void an_upload_without_memory(void **state)
{
    (void)state;
    requests_without_memory((struct rig_options){0}, true);
}

/* What an OPEN brings is its callee's, also where that refuses it, or ends before it gets to it. */
static void a_private_open_without_memory(void **state)
{
    (void)state;
    struct rig *r = rig_open((struct rig_options){0});
    static struct client c;
    int32_t ids[PROMPT];
    rig_ids(ids, PROMPT, VOCAB, 77);
    struct engine_open open = client_open_of(&c, ids, PROMPT, 0);
    open.is_private = true;
    open.names = calloc(PROMPT / KV_BLOCK_TOKENS, sizeof *open.names);
    no_memory_at(1);
    assert_int_equal(engine_open(r->engine, &open, &c.sequence), -TD_ERR_FULL);
    assert_true(no_memory_came());
    assert_null(open.ids);
    assert_null(open.names);
    assert_int_equal(atomic_load(&r->engine->open_count), 0);
    open = client_open_of(&c, ids, PROMPT, 0);
    open.is_private = true;
    open.names = calloc(PROMPT / KV_BLOCK_TOKENS, sizeof *open.names);
    assert_int_equal(engine_open(r->engine, &open, &c.sequence), 0);
    rig_close(r); /* before its turn came */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_engine_without_memory),
        cmocka_unit_test(a_direct_request_without_memory),
        cmocka_unit_test(an_upload_without_memory),
        cmocka_unit_test(a_private_open_without_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
