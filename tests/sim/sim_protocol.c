/* sim_protocol: many short lives of an edge, a link and a cloud, with cuts, crashes, blackholes and impatient clients at random points; and
 * one life in ten once undisturbed and then again and again, cut before each of its frames in each way.
 *
 * Checked while it runs: no frame breaks a rule of either link (credit included); every row and piece that arrives is the one that
 * was sent; what is staged stays within the windows; a CANCEL arrives within a bulk frame and the path's delay; nothing waits for
 * ever. At the end: every reply is, token for token, the one that an uninterrupted run gives; no stream is left open;
 * everything parked is forgotten in time.
 *
 *     sim_protocol [--runs N] [--seed S] [--verbose]      TANDEM_SIM_RUNS=N sets the default number of runs */
#include "sim.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define RUNS_DEFAULT 500
#define STEPS_MAX    3000000u

static bool verbose;

void sim_fail(struct sim *s, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "sim_protocol: seed %llu, %.6f s: ", (unsigned long long)s->seed,
            (double)s->now_us / 1e6);
    vfprintf(stderr, format, args);
    if (s->cut_before > 0)
        fprintf(stderr, ", when cut before frame %llu in way %u", (unsigned long long)s->cut_before,
                s->cut_way);
    fprintf(stderr, "\nrepeat with: sim_protocol --seed %llu --runs 1\n", (unsigned long long)s->seed);
    va_end(args);
    exit(1);
}

/* ---- a run's world ---- */

static void choose_config(struct sim *s)
{
    static const uint64_t mbits[] = {1, 2, 5, 20, 100, 1000};
    struct sim_config *c = &s->config;
    c->rate = mbits[rng_below(&s->rng, TD_COUNT(mbits))] * 125000;
    c->delay_us = rng_between(&s->rng, 0, 3) * rng_between(&s->rng, 0, 40) * MS;
    c->socket_size = rng_chance(&s->rng, 80) ? SIM_LOWAT_SIZE : 4 * SIM_LOWAT_SIZE;
    bool narrow = rng_chance(&s->rng, 30); /* windows that are always nearly full */
    c->stream_window = narrow ? (uint32_t)rng_between(&s->rng, 9000, 50000) : LIMIT_STREAM_WINDOW;
    c->connection_window =
        narrow ? c->stream_window + (uint32_t)rng_below(&s->rng, 60000) : LIMIT_CONNECTION_WINDOW;
    c->row_size = (uint32_t)rng_between(&s->rng, 50, 1500);
    c->piece_row_size = (uint32_t)rng_between(&s->rng, 20, narrow ? 120 : 400);
    c->layers = (uint32_t)rng_between(&s->rng, 1, 4);
    c->chunk_us = rng_between(&s->rng, 1, 60) * MS;
    c->step_us = rng_between(&s->rng, 5, 40) * MS;
    c->stage_us = rng_chance(&s->rng, 50) ? 0 : rng_between(&s->rng, 1, 300) * MS;
    c->damage_percent = rng_chance(&s->rng, 30) ? 10 : 0;
    c->replan_percent = rng_chance(&s->rng, 50) ? 40 : 0;
    c->makes_percent = rng_chance(&s->rng, 50) ? 60 : 0;
    c->others_percent = rng_chance(&s->rng, 30) ? 3 : 0;
    c->make_step_us = rng_between(&s->rng, 1, 40) * MS;
    c->continues = rng_chance(&s->rng, 40);
    c->busy_percent = rng_chance(&s->rng, 20) ? 20 : 0;
}

static void request_create(struct sim *s, struct request *r, uint32_t index, bool small)
{
    memset(r, 0, sizeof *r);
    snprintf(r->key, sizeof r->key, "%llu-%u", (unsigned long long)s->seed, index);
    r->start_us = s->now_us + rng_below(&s->rng, small ? 20 * MS : 2 * SECOND);
    r->cancel_us = rng_chance(&s->rng, 15) ? r->start_us + rng_below(&s->rng, 4 * SECOND) : NEVER;
    uint32_t prompt_max = s->is_short ? 150 : 500, reply_max = s->is_short ? 30 : 300;
    r->prompt_count = (uint32_t)rng_between(&s->rng, 4, small ? 20 : prompt_max);
    r->prompt = malloc(4 * (size_t)r->prompt_count);
    for (uint32_t i = 0; i < r->prompt_count; i++)
        r->prompt[i] = (int32_t)rng_below(&s->rng, 50000);
    r->token_count_max = (uint32_t)rng_between(&s->rng, 1, small ? 5 : reply_max);
    r->name_conversation = rng_chance(&s->rng, 20);
    r->wants_block = !small && rng_chance(&s->rng, 20);
    switch (rng_below(&s->rng, 3)) { /* all at the edge, all in the cloud, or divided at a block's border */
    case 0:
        r->edge_tokens = r->prompt_count;
        break;
    case 1:
        r->edge_tokens = r->prompt_count / SIM_BLOCK / 2 * SIM_BLOCK;
        break;
    }
}

/* What an uninterrupted run says. */
static void request_expect(struct request *r)
{
    static const uint8_t principal_key[32] = {42};
    uint8_t id[GEN_REQUEST_ID_SIZE];
    gen_id_from_key(principal_key, r->key, id, &r->seed);
    r->expected = malloc(4 * (size_t)r->token_count_max);
    uint64_t state = text_begin(r->seed, r->prompt, r->prompt_count);
    while (r->expected_count < r->token_count_max) {
        int32_t next = text_next(state);
        state = text_fold(state, next);
        r->expected[r->expected_count++] = next;
        if (text_ends(next))
            break;
    }
}

static uint64_t choose_requests(struct sim *s)
{
    bool crowd = rng_chance(&s->rng, 5) && !s->is_short; /* more than the streams of a connection */
    s->edge.request_count = crowd ? SIM_REQUESTS : (uint32_t)rng_between(&s->rng, 1, s->is_short ? 2 : 6);
    uint64_t bulk_size = 0, longest_us = 0;
    for (uint32_t i = 0; i < s->edge.request_count; i++) {
        struct request *r = &s->edge.requests[i];
        request_create(s, r, i, crowd);
        request_expect(r);
        bulk_size += (uint64_t)r->prompt_count *
                     (s->config.row_size + 2 * s->config.layers * s->config.piece_row_size);
        longest_us = TD_MAX(longest_us, r->expected_count * s->config.step_us);
    }
    s->count.requests += s->edge.request_count;
    return 2 * SECOND + bulk_size * SECOND / s->config.rate + longest_us + 20 * s->config.delay_us;
}

/* ---- faults ---- */

static uint64_t edge_away_us(struct sim *s)
{
    if (rng_chance(&s->rng, 4)) /* longer than anything is kept */
        return LIMIT_PARK_MS * MS + rng_between(&s->rng, 1, 60) * SECOND;
    return rng_between(&s->rng, 20, 2000) * MS;
}

#define CUT_WAYS 4

static void fault_cut(struct sim *s, struct connection *c, unsigned way)
{
    s->count.cuts++;
    for (uint32_t i = 0; i < s->edge.request_count; i++) /* a promise for paths that work */
        if (s->edge.requests[i].cancel_connection == c)
            s->edge.requests[i].cancel_due_us = NEVER;
    switch (way) {
    case 0: /* reset: both see it soon */
        c->edge_notices_us = s->now_us + rng_below(&s->rng, 50 * MS);
        c->cloud_notices_us = s->now_us + rng_below(&s->rng, 50 * MS);
        pipe_drop(&c->up), pipe_drop(&c->down);
        break;
    case 1: /* blackhole: the edge changes networks, the cloud hears nothing any more */
        c->edge_notices_us = s->now_us + rng_between(&s->rng, 10, 3000) * MS;
        break;
    case 2: /* blackhole: nobody sees anything but silence */
        break;
    case 3: /* the edge lets go; what it had sent still arrives, later than its next connection */
        c->edge_notices_us = s->now_us;
        c->cloud_notices_us = s->now_us + rng_between(&s->rng, 3500, 6000) * MS;
        pipe_delay(&c->up, rng_below(&s->rng, 3000) * MS);
        c->down.cut = true;
        return;
    }
    c->up.cut = c->down.cut = true;
}

static void cut_notice(struct connection *c, uint64_t at_us)
{
    c->edge_notices_us = TD_MIN(c->edge_notices_us, at_us);
}

static void fault(struct sim *s)
{
    struct connection *c = s->edge.connection;
    uint64_t kind = rng_below(&s->rng, 10);
    if (kind == 0) {
        s->count.cloud_crashes++;
        cloud_crash(s);
        for (struct connection *all = s->connections; all; all = all->next)
            cut_notice(all, s->now_us + rng_between(&s->rng, 1, 1000) * MS);
    } else if (kind == 1) {
        s->count.edge_crashes++;
        if (c)
            c->cloud_notices_us = s->now_us + rng_between(&s->rng, 1, 1000) * MS;
        edge_crash(s, s->now_us + 1 * SECOND + edge_away_us(s));
    } else if (kind == 2 && c && c->cloud && link_state(c->cloud) == LINK_READY) {
        s->count.goaways++;
        SIM_CHECK(s, link_send(c->cloud, FRAME_GOAWAY, 0, NULL, NULL, 0) == 0, "GOAWAY refused");
    } else if (c) {
        fault_cut(s, c, (unsigned)rng_below(&s->rng, CUT_WAYS));
    }
}

/* Some faults come at any time, some amid the first flight of the next connection. */
struct fault_plan {
    uint64_t left, at_us, about_us;
    const struct connection *last; /* an early fault waits for another connection than this */
    bool early;
};

static void fault_next(struct sim *s, struct fault_plan *p)
{
    p->early = rng_chance(&s->rng, 50);
    p->last = s->edge.connection;
    p->at_us = p->left == 0 || p->early ? NEVER : s->now_us + rng_below(&s->rng, p->about_us / 3 + 1);
}

/* When the next one is due, once there is something to harm. */
static uint64_t fault_due_us(struct sim *s, struct fault_plan *p)
{
    struct connection *c = s->edge.connection;
    if (p->left > 0 && p->at_us == NEVER && c && c != p->last && link_state(c->edge) == LINK_READY)
        p->at_us = s->now_us + rng_below(&s->rng, 2 * s->config.delay_us + 50 * MS);
    return c ? p->at_us : NEVER;
}

/* ---- a step ---- */

static void check_balanced(struct sim *s, const struct link *l)
{
    if (!l || l->state != LINK_READY)
        return;
    uint64_t held = 0;
    for (uint32_t i = 0; i < l->slot_count; i++)
        for (int class = 0; l->streams[i].id && class < BULK_CLASSES; class ++)
            held += l->streams[i].partials[class].skip ? 0 : l->streams[i].partials[class].have;
    SIM_CHECK(s, l->in.open + held + l->in.unconsumed + l->in.ungranted == l->in.window,
              "the window is out of balance");
    SIM_CHECK(s, l->bulk_queued_size <= LIMIT_SEND_QUEUE_SIZE, "too much is queued");
}

/* A side closes its socket: the other sees it after what is on the way, if anything gets through. */
static void close_edge(struct sim *s, struct connection *c)
{
    if (!c->up.cut)
        c->cloud_notices_us =
            TD_MIN(c->cloud_notices_us, TD_MAX(c->up.free_us, s->now_us) + c->up.delay_us + 1);
    if (c == s->edge.connection) {
        edge_lost(s, s->now_us + edge_away_us(s));
    } else {
        link_destroy(c->edge);
        c->edge = NULL;
    }
}

static void close_cloud(struct sim *s, struct connection *c)
{
    if (!c->down.cut)
        c->edge_notices_us =
            TD_MIN(c->edge_notices_us, TD_MAX(c->down.free_us, s->now_us) + c->down.delay_us + 1);
    cloud_lost(s, c);
}

static void deliver(struct sim *s, struct connection *c)
{
    struct flight *f;
    while ((f = pipe_take(&c->up, s->now_us))) {
        if (c->cloud && link_receive(c->cloud, f->bytes, f->size, s->now_us) < 0)
            sim_fail(s, "the cloud's link failed: %s", link_error_text(c->cloud));
        free(f);
    }
    while ((f = pipe_take(&c->down, s->now_us))) {
        if (c->edge && link_receive(c->edge, f->bytes, f->size, s->now_us) < 0)
            sim_fail(s, "the edge's link failed: %s", link_error_text(c->edge));
        free(f);
    }
}

static void notice(struct sim *s, struct connection *c)
{
    if (c->edge && link_tick(c->edge, s->now_us) < 0) {
        SIM_CHECK(s, c->down.cut || !c->cloud, "the edge gives up a path that works: %s",
                  link_error_text(c->edge));
        c->edge_notices_us = s->now_us;
    }
    if (c->cloud && link_tick(c->cloud, s->now_us) < 0) {
        SIM_CHECK(s, c->up.cut || !c->edge, "the cloud gives up a path that works: %s",
                  link_error_text(c->cloud));
        c->cloud_notices_us = s->now_us;
    }
    if (c->edge && c->edge_notices_us <= s->now_us)
        close_edge(s, c);
    if (c->cloud && c->cloud_notices_us <= s->now_us)
        close_cloud(s, c);
}

static void send_side(struct sim *s, struct connection *c, bool is_up)
{
    static uint8_t bytes[LIMIT_FRAME_SIZE];
    struct link *l = is_up ? c->edge : c->cloud;
    struct pipe *p = is_up ? &c->up : &c->down;
    while (l && pipe_writable(p, s->now_us)) {
        int64_t size = link_next(l, bytes, sizeof bytes, s->now_us);
        SIM_CHECK(s, size >= 0, "link_next says %lld", (long long)size);
        if (size == 0)
            return;
        s->count.frames++;
        if (frame_is_bulk(bytes[0])) {
            s->count.bulk_size += (uint64_t)size;
            SIM_CHECK(s, (uint64_t)size <= rate_frame_size(&l->rate), "a bulk frame of %lld bytes",
                      (long long)size);
        }
        if (++s->life_frames == s->cut_before)
            fault_cut(s, c, s->cut_way);
        pipe_put(p, bytes, (size_t)size, s->now_us);
    }
}

static uint64_t side_next_us(const struct sim *s, const struct link *l, const struct pipe *p)
{
    if (!l)
        return NEVER;
    uint64_t wait_us = link_wait_us(l, s->now_us);
    uint64_t due_us = wait_us == UINT64_MAX ? NEVER : s->now_us + wait_us;
    return wait_us == 0 ? TD_MAX(pipe_writable_us(p), s->now_us + 1) : due_us;
}

static uint64_t next_us(const struct sim *s)
{
    uint64_t at_us = TD_MIN(edge_next_us(s), cloud_next_us(s));
    for (const struct connection *c = s->connections; c; c = c->next) {
        at_us = TD_MIN(at_us, c->edge ? c->edge_notices_us : NEVER);
        at_us = TD_MIN(at_us, c->cloud ? c->cloud_notices_us : NEVER);
        at_us = TD_MIN(at_us, c->up.first ? c->up.first->arrives_us : NEVER);
        at_us = TD_MIN(at_us, c->down.first ? c->down.first->arrives_us : NEVER);
        at_us = TD_MIN(at_us, TD_MIN(side_next_us(s, c->edge, &c->up), side_next_us(s, c->cloud, &c->down)));
    }
    return at_us;
}

static void connection_free(struct connection *c)
{
    link_destroy(c->edge);
    link_destroy(c->cloud);
    pipe_drop(&c->up), pipe_drop(&c->down);
    free(c);
}

static void forget_connections(struct sim *s)
{
    for (struct connection **at = &s->connections; *at;) {
        struct connection *c = *at;
        if (c->edge || c->cloud) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        for (uint32_t i = 0; i < s->edge.request_count; i++) {
            struct request *r = &s->edge.requests[i];
            r->cancel_connection = r->cancel_connection == c ? NULL : r->cancel_connection;
            r->told = r->told == c ? NULL : r->told;
            r->busy_there = r->busy_there == c ? NULL : r->busy_there;
        }
        connection_free(c);
    }
}

static void step(struct sim *s)
{
    for (struct connection *c = s->connections; c; c = c->next) {
        deliver(s, c);
        notice(s, c);
    }
    edge_act(s);
    cloud_act(s);
    for (struct connection *c = s->connections; c; c = c->next) {
        send_side(s, c, true);
        send_side(s, c, false);
    }
    forget_connections(s);
}

static void run_until(struct sim *s, uint64_t end_us)
{
    step(s);
    for (uint64_t at_us = next_us(s); at_us < end_us; at_us = next_us(s)) {
        s->now_us = TD_MAX(at_us, s->now_us);
        step(s);
    }
    s->now_us = end_us;
}

/* ---- a run ---- */

static bool all_done(const struct sim *s)
{
    for (uint32_t i = 0; i < s->edge.request_count; i++)
        if (!s->edge.requests[i].done || s->edge.requests[i].trails || s->edge.requests[i].leaves)
            return false;
    return true;
}

static void check_quiet(struct sim *s)
{
    struct connection *c = s->edge.connection;
    if (!c || !c->cloud || c->up.cut || c->down.cut || link_state(c->edge) != LINK_READY)
        return;
    SIM_CHECK(s, c->edge->stream_open_count == 0, "%u streams left open at the edge",
              c->edge->stream_open_count);
    SIM_CHECK(s, c->cloud->stream_open_count == 0, "%u streams left open in the cloud",
              c->cloud->stream_open_count);
    SIM_CHECK(s, c->edge->bulk_queued_size == 0 && c->edge->out.reserved == 0, "bulk is left over");
    SIM_CHECK(s, c->cloud->in.unconsumed == 0, "bytes are left unconsumed");
    for (uint32_t i = 0; i < s->edge.request_count;
         i++) { /* but an older OPEN may have come after it, from a connection that is gone */
        const struct request *r = &s->edge.requests[i];
        bool kept = cloud_works_for(s, r) && r->attempt_accepted >= r->receiver.attempt;
        SIM_CHECK(s, r->told != c || !kept, "the cloud works on, and was told that nobody waits");
    }
}

/* Everybody goes; five minutes later nobody remembers anything. */
static void check_forgotten(struct sim *s)
{
    for (struct connection *c = s->connections; c; c = c->next)
        c->edge_notices_us = c->cloud_notices_us = s->now_us;
    s->edge.connect_us = NEVER;
    step(s);
    s->edge.connect_us = NEVER;
    run_until(s, s->now_us + LIMIT_PARK_MS * MS + 10 * SECOND);
    step(s);
    SIM_CHECK(s, cloud_sequence_count(s) == 0, "%u sequences are never freed", cloud_sequence_count(s));
    for (uint32_t i = 0; i < s->edge.request_count; i++) {
        struct request *r = &s->edge.requests[i];
        SIM_CHECK(s, !cloud_knows(s, r), "a generation is remembered for too long");
    }
}

static void run(struct sim *s, uint64_t seed)
{
    s->seed = seed;
    s->rng.state = seed * 77777 + 1;
    s->now_us = 1000 * SECOND;
    s->life_frames = 0;
    choose_config(s);
    uint64_t about_us = choose_requests(s);
    cloud_start(s);
    s->edge.away_us = s->now_us;
    edge_connect(s);

    bool is_calm = s->is_short || rng_chance(&s->rng, 20);
    struct fault_plan faults = {.left = is_calm ? 0 : rng_between(&s->rng, 1, 6), .about_us = about_us};
    uint64_t steps = 0;
    fault_next(s, &faults);
    faults.last = NULL;
    uint64_t deadline_us =
        s->now_us + 20 * about_us + (faults.left + 2) * (LIMIT_PARK_MS * MS + 200 * SECOND);

    step(s);
    while (!all_done(s)) {
        uint64_t at_us = next_us(s);
        uint64_t fault_us = fault_due_us(s, &faults);
        at_us = TD_MIN(at_us, fault_us);
        SIM_CHECK(s, at_us != NEVER, "everybody waits for ever");
        s->now_us = TD_MAX(at_us, s->now_us);
        SIM_CHECK(s, s->now_us < deadline_us, "it takes too long");
        SIM_CHECK(s, ++steps < STEPS_MAX, "it takes too many steps");
        if (fault_us <= s->now_us) {
            fault(s);
            faults.left--;
            fault_next(s, &faults);
        }
        step(s);
        if (steps % 64 == 0)
            for (struct connection *c = s->connections; c; c = c->next)
                check_balanced(s, c->edge), check_balanced(s, c->cloud);
    }
    run_until(s, s->now_us + 2 * SECOND + 4 * s->config.delay_us + s->config.stage_us);
    check_quiet(s);
    check_forgotten(s);
    if (verbose)
        printf("seed %llu: %llu steps\n", (unsigned long long)seed, (unsigned long long)steps);

    for (uint32_t i = 0; i < s->edge.request_count; i++) {
        free(s->edge.requests[i].prompt);
        free(s->edge.requests[i].expected);
    }
    while (s->connections) {
        struct connection *c = s->connections;
        s->connections = c->next;
        connection_free(c);
    }
    gen_table_destroy(s->cloud.table);
    s->edge.request_count = 0;
    s->edge.connection = NULL;
    s->count.runs++;
}

/* The same short life, cut before each frame that either side sends in it, the last one's end included. */
static void run_each_cut(struct sim *s, uint64_t seed)
{
    s->is_short = true;
    s->cut_before = 0;
    run(s, seed);
    uint64_t frames = s->life_frames;
    for (s->cut_before = 1; s->cut_before <= frames; s->cut_before++)
        for (s->cut_way = 0; s->cut_way < CUT_WAYS; s->cut_way++) {
            uint64_t cuts = s->count.cuts;
            run(s, seed);
            SIM_CHECK(s, s->count.cuts == cuts + 1, "frame %llu never came",
                      (unsigned long long)s->cut_before);
        }
    s->is_short = false;
    s->cut_before = 0;
    s->count.each_frame += frames;
}

static void print_count(const struct sim *s)
{
#define N(x) ((unsigned long long)s->count.x)
    printf("%llu runs, %llu requests (%llu cancelled, %llu by CANCEL, of which %llu arrived), %llu tokens "
           "(%llu known already), "
           "%llu "
           "frames, %llu MiB of bulk\n",
           N(runs), N(requests), N(cancelled), N(cancels_sent), N(cancels_delivered), N(tokens),
           N(tokens_ignored), N(frames), N(bulk_size) >> 20);
    printf("%llu connections: %llu cut (%llu frames, before each of them), %llu told to go; %llu crashes of "
           "a cloud, %llu of an edge\n",
           N(connections), N(cuts), N(each_frame), N(goaways), N(cloud_crashes), N(edge_crashes));
    printf("devices made %llu tokens themselves, and were ahead with others or more at %llu openings; %llu "
           "conflicts\n",
           N(made), N(verdicts[GEN_REPLACE]), N(conflicts));
    printf("%llu of them without the cloud, handed back %llu times; %llu replies whole on the device; %llu "
           "times told "
           "that nobody waits; %llu times busy\n",
           N(made_offline), N(handed_back), N(whole_here), N(told), N(busy));
    printf("opened: %llu new, %llu adopted, %llu continued, %llu stale; %llu parked, %llu forgotten; %llu "
           "needed again, %llu plans "
           "voided, %llu pieces fetched\n",
           N(verdicts[GEN_NEW]), N(verdicts[GEN_ADOPT]), N(verdicts[GEN_CONTINUE]), N(verdicts[GEN_STALE]),
           N(parked), N(expired), N(needs), N(voids), N(fetched));
#undef N
}

int main(int argc, char **argv)
{
    static struct sim sim;
    const char *env = getenv("TANDEM_SIM_RUNS");
    uint64_t runs = env ? strtoull(env, NULL, 10) : RUNS_DEFAULT, seed = 1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--runs") == 0 && i + 1 < argc)
            runs = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            seed = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--verbose") == 0)
            verbose = true;
        else {
            fprintf(stderr, "usage: sim_protocol [--runs N] [--seed S] [--verbose]\n");
            return 2;
        }
    }
    for (uint64_t i = 0; i < runs; i++) {
        run(&sim, seed + i);
        if (i % 10 == 0)
            run_each_cut(&sim, seed + i);
    }
    print_count(&sim);
    return 0;
}
