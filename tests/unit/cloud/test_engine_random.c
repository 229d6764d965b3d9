/* engine: many clients at once that do everything at random: plans of any shape and re-plans, rows and pieces early, late, lost and damaged, links
 * that break, clients that leave, too few pages, a device of its own or not. Whatever happens, a reply that ends is the reference's, and in the end nothing is left over.
 * The seed of a failing round is printed; TANDEM_TEST_SEED runs that one alone. */
#include "engine_rig.h"

#define VOCAB    256
#define PROMPTS  4
#define USERS    6
#define REQUESTS 5 /* of each user */
#define REPLY    40
#define PENDING  64

static uint64_t random_state;

static uint32_t pick(uint32_t count) /* 0 .. count - 1 */
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % count;
}

struct prompt {
    int32_t ids[256], reply[REPLY];
    uint32_t count;
    struct rig_edge edges[3]; /* of 1 and 2 layers */
};

struct message { /* still to be sent */
    bool is_kv;
    uint32_t first, count, layers; /* HIDDEN: rows; KV: one block of [first, first + count) */
    uint32_t block, piece;
};

struct user {
    struct client client;
    const struct prompt *prompt;
    uint8_t request_id[GEN_REQUEST_ID_SIZE];
    uint64_t attempt;
    uint32_t principal, requests_left, epoch, held;
    int32_t got[REPLY]; /* over all attempts */
    bool busy, gone, planning;
    uint32_t keep; /* of a reply that the client ended; UINT32_MAX: it did not */
    struct message messages[PENDING];
    uint32_t message_count;
};

struct world {
    struct rig *rig;
    struct prompt prompts[PROMPTS];
    struct user users[USERS];
    uint64_t next_request;
    char directory[64]; /* of the store that some rounds have */
};

/* --- plans ---------------------------------------------------------------------------------------- */

static void add_message(struct user *u, struct message m)
{
    if (u->message_count < PENDING)
        u->messages[u->message_count++] = m;
}

static void add_range(struct user *u, uint32_t first, uint32_t end, uint32_t layers)
{
    if (layers == 0)
        return;
    if (layers == 2) {
        if (end == u->prompt->count)
            add_message(u, (struct message){.first = end - 1, .count = 1, .layers = 2});
    } else {
        for (uint32_t at = first; at < end;) {
            uint32_t rows = 1 + pick(90);
            rows = TD_MIN(rows, end - at);
            add_message(u, (struct message){.first = at, .count = rows, .layers = layers});
            at += rows;
        }
    }
    for (uint32_t block = first / KV_BLOCK_TOKENS; block < sequence_blocks(end); block++)
        for (uint32_t piece = 0; piece < layers * 2; piece++)
            add_message(u, (struct message){true, first, end - first, layers, block, piece});
}

/* Pieces are sent in any order, rows in theirs. */
static void shuffle(struct user *u)
{
    for (uint32_t i = 0; i + 1 < u->message_count; i++) {
        uint32_t j = i + pick(u->message_count - i);
        struct message *a = &u->messages[i], *b = &u->messages[j], swap = *a;
        if (!a->is_kv || !b->is_kv)
            continue;
        *a = *b;
        *b = swap;
    }
    if (pick(3) == 0) /* all pieces first */
        for (uint32_t i = 0, kv = 0; i < u->message_count; i++)
            if (u->messages[i].is_kv) {
                struct message m = u->messages[i];
                memmove(u->messages + kv + 1, u->messages + kv, (i - kv) * sizeof m);
                u->messages[kv++] = m;
            }
}

static void send_plan(struct world *w, struct user *u)
{
    struct plan_range ranges[8];
    uint32_t count = 0, total = u->prompt->count, first = pick(3) ? 0 : pick(total);
    u->message_count = 0;
    while (first < total && count < 8) {
        uint32_t layers = pick(3), end = count == 7 || pick(3) == 0 ? total : first + 1 + pick(total - first);
        if (layers > 0 && end < total)
            end = TD_MIN(align_up(end, KV_BLOCK_TOKENS), total);
        ranges[count++] = (struct plan_range){first, end - first, layers, KV_L0, HIDDEN_F32};
        add_range(u, first, end, layers);
        first = end;
    }
    shuffle(u);
    assert_int_equal(engine_plan(w->rig->engine, u->client.sequence, ++u->epoch, ranges, count, false), 0);
}

/* --- one user ------------------------------------------------------------------------------------- */

static void open_request(struct world *w, struct user *u)
{
    int32_t ids[256 + REPLY];
    u->held = TD_MIN(u->held, u->keep); /* what it has given up it does not hold */
    memcpy(ids, u->prompt->ids, u->prompt->count * sizeof *ids);
    memcpy(ids + u->prompt->count, u->got, u->held * sizeof *ids);
    struct engine_open open = client_open_of(&u->client, ids, u->prompt->count, u->held);
    snprintf(open.principal, sizeof open.principal, "principal-%u", u->principal);
    memcpy(open.request_id, u->request_id, sizeof open.request_id);
    kv_principal_key(open.shared_key, open.principal, open.own_key);
    open.attempt = ++u->attempt;
    open.direct = u->attempt == 1 && pick(4) == 0;
    open.generate = rig_sampling(REPLY, 17);
    bool direct = open.direct;
    open.resumes = u->attempt > 1 && pick(2); /* and then plans anew all the same, with a higher epoch */
    client_send(w->rig, &u->client, open);
    u->message_count = 0;
    u->planning = !direct;
    if (direct)
        return;
    if (pick(20))
        send_plan(w, u);
    struct engine_generate generate = rig_sampling(REPLY, 17);
    assert_int_equal(engine_start(w->rig->engine, u->client.sequence, &generate), 0);
}

static void new_request(struct world *w, struct user *u)
{
    u->prompt = &w->prompts[pick(PROMPTS)];
    u->principal = pick(3); /* users may share one */
    store_le64(u->request_id, w->next_request++);
    u->attempt = 0;
    u->epoch = 0;
    u->held = 0;
    u->keep = UINT32_MAX;
    u->busy = true;
    u->gone = false;
    u->requests_left--;
    open_request(w, u);
}

static void send_message(struct world *w, struct user *u)
{
    if (u->message_count == 0)
        return;
    struct message m = u->messages[0];
    memmove(u->messages, u->messages + 1, --u->message_count * sizeof m);
    if (pick(40) == 0)
        return; /* lost */
    struct rig_edge edge = u->prompt->edges[m.layers];
    edge.rig = w->rig;
    if (!m.is_kv) {
        rig_send_hidden(&edge, &u->client, u->epoch, m.first, m.count, HIDDEN_F32);
        return;
    }
    size_t size;
    uint8_t *piece =
        rig_piece(&edge, m.block, m.piece / 2, m.piece % 2, KV_L0, m.first, m.first + m.count, &size);
    if (pick(40) == 0)
        piece[pick((uint32_t)size)] ^= 1;
    assert_int_equal(engine_kv(w->rig->engine, u->client.sequence, u->epoch, m.block, piece, size), 0);
}

/* What the client has got by now is part of the reference, and in its place. */
static void collect(struct user *u)
{
    struct client *c = &u->client;
    for (uint32_t i = 0; i < c->count; i++) {
        assert_true(c->first_index + i < REPLY);
        assert_int_equal(c->ids[i], u->prompt->reply[c->first_index + i]);
        u->got[c->first_index + i] = c->ids[i];
    }
    if (c->count > 0) {
        assert_true(c->first_index <= u->held);
        u->held = TD_MAX(u->held, c->first_index + c->count);
    }
}

static void check_end(struct user *u)
{
    struct client *c = &u->client;
    if (c->failed)
        fail_msg("failed: %s", c->fail_text);
    if (!c->done)
        return;
    uint32_t count = TD_MIN(u->keep, REPLY);
    assert_true(c->done_event.done.completion_tokens <= REPLY);
    if (u->keep == UINT32_MAX)
        assert_int_equal(u->held, REPLY);
    else
        assert_true(c->done_event.done.completion_tokens == count ||
                    c->done_event.done.completion_tokens == REPLY);
    assert_memory_equal(c->done_ids, u->prompt->ids, u->prompt->count * sizeof *c->done_ids);
    assert_memory_equal(c->done_ids + u->prompt->count, u->prompt->reply,
                        c->done_event.done.completion_tokens * sizeof *c->done_ids);
    u->busy = false;
}

static void act(struct world *w, struct user *u)
{
    struct engine *e = w->rig->engine;
    if (!u->busy) {
        if (u->requests_left > 0 && pick(4) == 0)
            new_request(w, u);
        return;
    }
    if (u->gone) { /* its link broke */
        if (pick(10) == 0) {
            u->gone = false;
            open_request(w, u);
        }
        return;
    }
    collect(u);
    check_end(u);
    if (!u->busy)
        return;
    for (uint32_t i = pick(4); i > 0; i--)
        send_message(w, u);
    uint32_t dice = pick(400);
    if (dice < 6 && u->planning) {
        send_plan(w, u);
    } else if (dice < 10) {
        engine_detach(e, u->client.sequence);
        rig_turn(w->rig); /* from here on nothing more comes */
        collect(u);
        check_end(u);
        u->gone = u->busy;
    } else if (dice < 12) {
        engine_cancel(e, u->client.sequence, false, 0);
        rig_turn(w->rig);
        u->busy = false;
    } else if (dice < 14 && u->held > 2 && u->keep == UINT32_MAX) {
        u->keep = u->held - 2;
        engine_cancel(e, u->client.sequence, true, u->keep);
    }
}

/* --- rounds --------------------------------------------------------------------------------------- */

static void make_prompts(struct world *w)
{
    static const uint32_t counts[PROMPTS] = {130, 200, 64, 90};
    for (uint32_t i = 0; i < PROMPTS; i++) {
        struct prompt *p = &w->prompts[i];
        p->count = counts[i];
        rig_ids(p->ids, p->count, VOCAB, i == 1 ? 0 : i); /* the second begins as the first does */
        rig_reference(w->rig, p->ids, p->count, rig_sampling(REPLY, 17), p->reply);
        for (uint32_t k = 1; k <= 2; k++)
            p->edges[k] = rig_edge_compute(w->rig, p->ids, p->count, k);
    }
}

static bool all_done(const struct world *w)
{
    for (uint32_t i = 0; i < USERS; i++)
        if (w->users[i].busy || w->users[i].requests_left > 0)
            return false;
    return true;
}

static void run_round(struct world *w, uint64_t seed)
{
    static const struct rig_options shapes[] = {{.pages = 64},
                                                {.pages = 10, .token_budget = 70},
                                                {.pages = 7, .token_budget = 33},
                                                {.pages = 30, .sequences_max = 2, .token_budget = 16}};
    random_state = seed;
    print_message("seed %llu\n", (unsigned long long)seed);
    w->rig->options = shapes[pick(TD_COUNT(shapes))];
    if (pick(3) == 0)
        w->rig->options.store = w->directory;
    w->rig->options.device = seed % 2 == 0;
    w->rig->options.swap_pages = seed % 2 ? 0 : pick(40);
    rig_start_engine(w->rig);
    struct engine *e = w->rig->engine;
    e->config.kv_stall_ms = 5;
    for (uint32_t i = 0; i < USERS; i++)
        w->users[i] = (struct user){.requests_left = REQUESTS};
    for (uint32_t turn = 0; !all_done(w); turn++) {
        if (turn > 100000)
            fail_msg("no end");
        for (uint32_t i = 0; i < USERS; i++)
            act(w, &w->users[i]);
        uint64_t steps = e->steps;
        rig_turn(w->rig);
        if (e->steps == steps)
            rig_now += 2000 + (pick(20) ? 0 : 3000000); /* nothing runs: let time pass */
    }
    rig_until(w->rig, e->live_count == 0);
    rig_until(w->rig,
              atomic_load(&e->staged_size) == 0); /* pieces of those who left are still being decoded */
    assert_int_equal(atomic_load(&e->open_count), 0);
    rig_until(w->rig, e->pending_count == 0 && e->swap.ticket == 0);
    assert_int_equal(rig_stats(w->rig).pages_used, rig_stats(w->rig).pages_cached);
    assert_int_equal(prefix_cache_available(e->cache), e->backend->page_count);
    rig_stop_engine(w->rig);
}

static void everything_at_random(void **state)
{
    (void)state;
    static struct world w;
    const char *wanted = getenv("TANDEM_TEST_SEED"), *rounds = getenv("TANDEM_TEST_ROUNDS");
    uint64_t first = wanted ? strtoull(wanted, NULL, 10) : 1, count = rounds ? strtoull(rounds, NULL, 10) : 6;
    w.rig = calloc(1, sizeof *w.rig);
    w.next_request = 1;
    strcpy(w.directory, "/tmp/tandem-random-XXXXXX");
    assert_non_null(mkdtemp(w.directory));
    assert_int_equal(crypto_init(), 0);
    rig_load(w.rig, NULL);
    make_prompts(&w);
    for (uint64_t seed = first; seed < first + (wanted ? 1 : count); seed++)
        run_round(&w, seed);
    for (uint32_t i = 0; i < PROMPTS; i++)
        for (uint32_t k = 1; k <= 2; k++)
            rig_edge_free(&w.prompts[i].edges[k]);
    tokenizer_destroy(w.rig->tokenizer);
    model_free(w.rig->model);
    gguf_close(w.rig->file);
    free(w.rig);
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", w.directory);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(everything_at_random)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
