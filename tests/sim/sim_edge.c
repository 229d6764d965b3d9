/* sim_edge: one agent with many requests over one connection. A request opens its stream in one flight (OPEN, PLAN, GENERATE), then its toy
 * prefill makes a chunk every now and then: HIDDEN of the chunk, then the KV pieces of its block. Whatever happens to the
 * connection, the receiver's tokens stay; only a crash loses them, and then the client asks again with the same key. Some devices make tokens
 * themselves, at most SIM_LEAD before the cloud, until it overtakes them; without a bound while it is away, until it has said something again. Some of these
 * draw now and then another one than the cloud would: then the device's text is the one that counts. A reply that is whole on the device is its client's at
 * once; the cloud comes behind, or is told when the link is back that nobody waits. */
#include "sim.h"
#include <stdlib.h>

static const uint8_t principal_key[32] = {42};

static void request_reset(struct sim *s, struct request *r)
{
    bool makes = rng_chance(&s->rng, s->config.makes_percent);
    r->make_us = makes ? s->now_us + rng_between(&s->rng, 1, 100) * s->config.make_step_us : NEVER;
    memset(&r->receiver, 0, sizeof r->receiver);
    r->receiver.ids = r->held;
    r->receiver.capacity = r->token_count_max;
    uint64_t seed;
    gen_id_from_key(principal_key, r->key, r->receiver.request_id, &seed);
    r->seed = seed;
    r->stream = 0;
    r->made = 0;
    r->offline = r->opened = false;
}

static struct link *edge_link(const struct sim *s)
{
    return s->edge.connection ? s->edge.connection->edge : NULL;
}

void edge_connect(struct sim *s)
{
    static uint8_t layout[TD_HASH_SIZE];
    static char token[] = "token";
    struct connection *c = sim_connect(s);
    s->edge.connection = c;
    s->edge.connect_us = NEVER;
    Tandem__Version version = TANDEM__VERSION__INIT, *versions = &version;
    version.layout = (ProtobufCBinaryData){sizeof layout, layout};
    Tandem__Hello hello = TANDEM__HELLO__INIT;
    hello.n_versions = 1;
    hello.versions = &versions;
    hello.fingerprint = version.layout;
    hello.token = token;
    SIM_CHECK(s, link_send(c->edge, FRAME_HELLO, 0, &hello.base, NULL, 0) == 0, "HELLO refused");
}

void edge_lost(struct sim *s, uint64_t back_us)
{
    struct connection *c = s->edge.connection;
    if (!c)
        return;
    link_destroy(c->edge);
    c->edge = NULL;
    s->edge.connection = NULL;
    s->edge.connect_us = back_us;
    s->edge.away_us = TD_MIN(s->edge.away_us, s->now_us);
    for (uint32_t i = 0; i < s->edge.request_count; i++) {
        struct request *r = &s->edge.requests[i];
        r->leaves |= r->trails;
        r->trails = false;
        r->stream = 0;
    }
}

void edge_crash(struct sim *s, uint64_t back_us)
{
    edge_lost(s, back_us);
    s->edge.connect_us = back_us;
    for (uint32_t i = 0; i < s->edge.request_count; i++) {
        struct request *r = &s->edge.requests[i];
        if (!r->done && r->receiver.ids)
            request_reset(s, r);
        r->leaves = false;
        r->retry_us = 0;
    }
}

/* ---- opening ---- */

/* [0, edge_tokens) by the edge, the rest by the cloud. */
static int send_plan(struct sim *s, struct request *r, uint32_t edge_tokens)
{
    Tandem__Range edge = TANDEM__RANGE__INIT, cloud = TANDEM__RANGE__INIT, *list[2];
    Tandem__Plan plan = TANDEM__PLAN__INIT;
    plan.epoch = ++r->epoch;
    plan.ranges = list;
    edge.count = edge_tokens;
    edge.layers = s->config.layers;
    cloud.first_token = edge_tokens;
    cloud.count = r->prompt_count - edge_tokens;
    if (edge.count > 0)
        list[plan.n_ranges++] = &edge;
    if (cloud.count > 0)
        list[plan.n_ranges++] = &cloud;
    r->edge_planned = edge_tokens;
    return link_send(edge_link(s), FRAME_PLAN, r->stream, &plan.base, NULL, 0);
}

static size_t put_ids(uint8_t *bytes, const int32_t *ids, uint32_t first, uint32_t count)
{
    for (uint32_t i = first; i < count; i++)
        store_le32(bytes + 4 * (size_t)(i - first), (uint32_t)ids[i]);
    return 4 * (size_t)(count - first);
}

static int send_open(struct sim *s, struct request *r, uint32_t stream)
{
    uint8_t hash[TD_HASH_SIZE], known_hash[TD_HASH_SIZE];
    struct gen_receiver *g = &r->receiver;
    static char name[] = "a conversation that the cloud has never heard of";
    Tandem__Open open = TANDEM__OPEN__INIT;
    open.request_id = (ProtobufCBinaryData){GEN_REQUEST_ID_SIZE, g->request_id};
    open.attempt = g->attempt;
    open.prompt_count = r->prompt_count;
    open.held_count = g->count;
    if (g->count > 0) {
        ids_hash(g->ids, g->count, hash);
        open.held_hash = (ProtobufCBinaryData){TD_HASH_SIZE, hash};
    }
    if (r->name_conversation) {
        open.conversation = name;
        open.conversation_length = r->prompt_count / 2;
        ids_hash(r->prompt, open.conversation_length, known_hash);
        open.conversation_hash = (ProtobufCBinaryData){TD_HASH_SIZE, known_hash};
    }
    uint8_t *ids = malloc(4 * ((size_t)r->prompt_count + g->count) + 1);
    size_t size = put_ids(ids, r->prompt, open.conversation_length, r->prompt_count);
    size += put_ids(ids + size, g->ids, 0, g->count);
    int rc = link_send(edge_link(s), FRAME_OPEN, stream, &open.base, ids, size);
    free(ids);
    if (rc == 0)
        g->confirmed = g->count;
    return rc;
}

static void request_open(struct sim *s, struct request *r)
{
    struct connection *c = s->edge.connection;
    gen_reopen(&r->receiver, s->now_us);
    int rc = send_open(s, r, c->stream_next);
    if (rc == -TD_ERR_FULL) { /* as many streams as the cloud takes */
        r->retry_us = s->now_us + 20 * MS;
        return;
    }
    SIM_CHECK(s, rc == 0, "OPEN refused: %d", rc);
    r->stream = c->stream_next;
    r->opened = true;
    c->stream_next += 2 * (uint32_t)rng_between(&s->rng, 1, 3);
    r->epoch = r->hidden_next = r->piece_next = 0;
    r->sends_data = true;
    r->produce_us = s->now_us + s->config.chunk_us;
    Tandem__Generate generate = TANDEM__GENERATE__INIT;
    generate.token_count_max = r->token_count_max;
    generate.seed = r->seed;
    bool local = r->make_us != NEVER || r->made > 0;
    SIM_CHECK(s, send_plan(s, r, local ? 0 : r->edge_tokens) == 0, "PLAN refused");
    SIM_CHECK(s, link_send(edge_link(s), FRAME_GENERATE, r->stream, &generate.base, NULL, 0) == 0,
              "GENERATE refused");
    Tandem__Fetch fetch = TANDEM__FETCH__INIT;
    fetch.layer_end = s->config.layers;
    if (r->wants_block)
        SIM_CHECK(s, link_send(edge_link(s), FRAME_FETCH, r->stream, &fetch.base, NULL, 0) == 0,
                  "FETCH refused");
}

/* ---- the toy prefill ---- */

static uint32_t chunk_tokens(const struct sim *s)
{
    size_t fitting = link_message_max(edge_link(s)) / s->config.row_size;
    return (uint32_t)TD_MIN(fitting, (size_t)SIM_BLOCK);
}

static int produce_hidden(struct sim *s, struct request *r)
{
    uint32_t count = TD_MIN(chunk_tokens(s), r->edge_planned - r->hidden_next);
    size_t size = (size_t)count * s->config.row_size;
    uint8_t *bytes = malloc(size);
    content_fill(bytes, size, content_hidden(r->prompt, r->hidden_next));
    Tandem__Hidden hidden = TANDEM__HIDDEN__INIT;
    hidden.epoch = r->epoch;
    hidden.first_token = r->hidden_next;
    hidden.count = count;
    hidden.layer = s->config.layers;
    int rc = link_send_bulk(edge_link(s), FRAME_HIDDEN, r->stream, &hidden.base, r->epoch, bytes, size);
    if (rc < 0)
        free(bytes);
    else
        r->hidden_next += count;
    return rc;
}

/* Pieces of all blocks whose rows have been made, in order: block, layer, K then V. */
static int produce_piece(struct sim *s, struct request *r)
{
    uint32_t per_block = 2 * s->config.layers, block = r->piece_next / per_block,
             rest = r->piece_next % per_block;
    uint32_t tokens = TD_MIN(SIM_BLOCK, r->edge_planned - block * SIM_BLOCK);
    size_t size = (size_t)tokens * s->config.piece_row_size;
    uint8_t *bytes = malloc(size);
    content_fill(bytes, size, content_piece(r->prompt, block, rest / 2, rest % 2));
    Tandem__KvBlock kv = TANDEM__KV_BLOCK__INIT;
    kv.epoch = r->epoch;
    kv.block_index = block;
    kv.layer = rest / 2;
    kv.is_value = rest % 2;
    int rc = link_send_bulk(edge_link(s), FRAME_KV_BLOCK, r->stream, &kv.base, r->epoch, bytes, size);
    if (rc < 0)
        free(bytes);
    else
        r->piece_next++;
    return rc;
}

static bool request_produces(const struct request *r)
{
    return r->stream && r->sends_data && !r->done && !r->cancelled && r->hidden_next < r->edge_planned;
}

static void request_produce(struct sim *s, struct request *r)
{
    uint32_t per_block = 2 * s->config.layers;
    int rc = produce_hidden(s, r);
    uint32_t blocks =
        r->hidden_next / SIM_BLOCK + (r->hidden_next == r->edge_planned && r->hidden_next % SIM_BLOCK);
    while (rc == 0 && r->piece_next < blocks * per_block)
        rc = produce_piece(s, r);
    SIM_CHECK(s, rc == 0 || rc == -TD_ERR_FULL, "bulk refused: %d", rc);
    r->produce_us = s->now_us + s->config.chunk_us;
}

/* ---- tokens that the device makes ---- */

static bool reply_is_whole(const struct request *r)
{
    const struct gen_receiver *g = &r->receiver;
    return g->count > 0 && (g->count == r->token_count_max || text_ends(g->ids[g->count - 1]));
}

static bool is_ready(const struct sim *s)
{
    return edge_link(s) && link_state(edge_link(s)) == LINK_READY;
}

static bool request_makes(const struct request *r)
{
    bool ahead = r->receiver.count - r->receiver.confirmed >= SIM_LEAD;
    return r->make_us != NEVER && !r->done && (!ahead || (r->offline && !r->stream));
}

/* The cloud is away for too long: the device goes on, once it has computed the context. */
static bool request_may_go_on(const struct sim *s, const struct request *r)
{
    return s->config.continues && s->edge.away_us != NEVER && !is_ready(s) && !r->offline && !r->done &&
           r->receiver.ids;
}

static bool reply_is_right(const struct sim *s, const struct request *r);

/* Nobody waits for it here any more. */
static void request_whole(struct sim *s, struct request *r)
{
    SIM_CHECK(s, reply_is_right(s, r), "the device's reply differs, of %u tokens", r->receiver.count);
    s->count.whole_here++;
    r->done = true;
    r->trails = r->stream != 0;
    r->leaves = r->opened && !r->trails;
}

static void request_goes_on(struct sim *s, struct request *r)
{
    if (reply_is_whole(r)) { /* only the word that it ends was lost with the link */
        request_whole(s, r);
        return;
    }
    r->offline = true;
    if (r->make_us == NEVER)
        r->make_us = s->now_us + rng_between(&s->rng, 1, 100) * s->config.make_step_us;
}

static void request_make(struct sim *s, struct request *r)
{
    struct gen_receiver *g = &r->receiver;
    uint64_t state = text_begin(r->seed, r->prompt, r->prompt_count);
    for (uint32_t i = 0; i < g->count; i++)
        state = text_fold(state, g->ids[i]);
    int32_t id = text_next(state);
    if (rng_chance(&s->rng, s->config.others_percent))
        id = text_other(id);
    SIM_CHECK(s, gen_make_token(g, g->count, id) == 1, "a token of the device's own is refused");
    r->made++;
    s->count.made++;
    s->count.made_offline += r->offline;
    r->make_us = s->now_us + s->config.make_step_us;
    if (reply_is_whole(r))
        request_whole(s, r);
}

/* Every token is the one that follows from those before it, or one that a device may have drawn instead. */
static bool reply_is_right(const struct sim *s, const struct request *r)
{
    const struct gen_receiver *g = &r->receiver;
    if (s->config.others_percent == 0)
        return g->count == r->expected_count && memcmp(g->ids, r->expected, 4 * (size_t)g->count) == 0;
    uint64_t state = text_begin(r->seed, r->prompt, r->prompt_count);
    for (uint32_t i = 0; i < g->count; i++) {
        int32_t next = text_next(state);
        if ((g->ids[i] != next && g->ids[i] != text_other(next)) ||
            (i + 1 < g->count && text_ends(g->ids[i])))
            return false;
        state = text_fold(state, g->ids[i]);
    }
    return reply_is_whole(r);
}

/* ---- frames from the cloud ---- */

static struct request *request_of(struct sim *s, uint32_t stream)
{
    for (uint32_t i = 0; i < s->edge.request_count; i++)
        if (s->edge.requests[i].stream == stream)
            return &s->edge.requests[i];
    return NULL;
}

static void request_again(struct sim *s, struct request *r)
{
    r->stream = 0;
    r->trails = false;
    r->retry_us = s->now_us + rng_between(&s->rng, 1, 50) * MS;
}

static void on_open_ack(struct sim *s, struct request *r, const Tandem__OpenAck *ack)
{
    if (ack->need_ids) {
        r->name_conversation = false;
        request_again(s, r);
    } else if (ack->resumed) {
        r->sends_data = false;
        link_void(edge_link(s), r->stream, UINT32_MAX);
    } else if (r->make_us == NEVER && r->made == 0 &&
               rng_chance(
                   &s->rng,
                   s->config.replan_percent)) { /* another split: nothing of the old plan is sent any more */
        uint32_t blocks = r->prompt_count / SIM_BLOCK;
        uint32_t edge_tokens = SIM_BLOCK * (uint32_t)rng_between(&s->rng, 0, blocks);
        s->count.voids++;
        SIM_CHECK(s, send_plan(s, r, edge_tokens) == 0, "PLAN refused");
        link_void(edge_link(s), r->stream, r->epoch);
        r->hidden_next = r->piece_next = 0;
        r->produce_us = s->now_us;
    }
}

static void on_tokens(struct sim *s, struct request *r, const struct wire_frame *f)
{
    uint32_t before = r->receiver.count;
    int rc = gen_receive_tokens(&r->receiver, f->token->attempt, f->token->index, f->payload);
    if (rc == -TD_ERR_CONFLICT) {
        SIM_CHECK(s, s->config.others_percent > 0, "another token than the device's");
        s->count.conflicts++;
        r->make_us = NEVER;
        SIM_CHECK(s, link_send(edge_link(s), FRAME_CANCEL, r->stream, NULL, NULL, 0) == 0, "CANCEL refused");
        link_close_stream(edge_link(s), r->stream);
        request_again(s, r);
        return;
    }
    SIM_CHECK(s, rc >= 0, "tokens at %u refused with %u held", f->token->index, before);
    SIM_CHECK(s, rc == 0 || !r->trails, "a reply that was whole goes on");
    if (rc > 0 || r->offline) { /* overtaken, or handed back */
        s->count.handed_back += r->offline;
        r->make_us = NEVER;
        r->offline = false;
    }
    s->count.tokens += (uint64_t)rc;
    s->count.tokens_ignored += f->payload.size / 4 - (uint64_t)rc;
}

static void on_done(struct sim *s, struct request *r, const Tandem__Done *done)
{
    struct gen_receiver *g = &r->receiver;
    if (done->attempt != g->attempt)
        return;
    if (g->confirmed < g->count) { /* the cloud's ended before the device's did */
        SIM_CHECK(s, s->config.others_percent > 0, "DONE before all tokens were confirmed");
        r->make_us = NEVER;
        request_again(s, r);
        return;
    }
    r->trails = false;
    SIM_CHECK(s, reply_is_right(s, r), "a reply that differs, of %u tokens", g->count);
    SIM_CHECK(s, done->completion_tokens == g->count, "DONE counts %u tokens of %u", done->completion_tokens,
              g->count);
    SIM_CHECK(s, done->finish == (text_ends(g->ids[g->count - 1]) ? FINISH_STOP : FINISH_LENGTH),
              "wrong finish");
    g->done = r->done = true;
    r->stream = 0;
}

static void on_piece(struct sim *s, struct request *r, const struct wire_frame *f)
{
    uint32_t tokens = TD_MIN(SIM_BLOCK, r->prompt_count);
    SIM_CHECK(s, f->payload.size == (size_t)tokens * s->config.piece_row_size,
              "a fetched piece of another size");
    SIM_CHECK(s,
              content_is(f->payload.data, f->payload.size,
                         content_piece(r->prompt, 0, f->kv_block->layer, f->kv_block->is_value)),
              "a fetched piece that differs");
    s->count.fetched++;
}

int edge_on_frame(void *ctx, const struct wire_frame *f)
{
    struct connection *c = ctx;
    struct sim *s = c->sim;
    SIM_CHECK(s, f->type != FRAME_ERROR || f->stream, "the cloud refuses the edge: %s", f->error->text);
    if (f->type == FRAME_GOAWAY)
        c->edge_notices_us = s->now_us; /* closes from outside */
    struct request *r = request_of(s, f->stream);
    if (!f->stream || !r)
        return 0;
    switch (f->type) {
    case FRAME_OPEN_ACK:
        on_open_ack(s, r, f->open_ack);
        break;
    case FRAME_TOKEN:
        on_tokens(s, r, f);
        break;
    case FRAME_DONE:
        on_done(s, r, f->done);
        break;
    case FRAME_ERROR: /* a fenced attempt, a busy table, a busy cloud */
        request_again(s, r);
        r->retry_us = TD_MAX(r->retry_us, s->now_us + f->error->retry_after_ms * MS);
        break;
    case FRAME_NEED:
        r->hidden_next = TD_MIN(r->hidden_next, f->need->first_token);
        r->produce_us = s->now_us;
        break;
    case FRAME_KV_BLOCK:
        on_piece(s, r, f);
        break;
    default:
        break;
    }
    return 0;
}

/* ---- the client leaves ---- */

/* A CANCEL is at the cloud after what is in the socket, one bulk frame, and the delay; and control that was queued before. */
static uint64_t cancel_bound_us(const struct connection *c)
{
    const struct link *l = c->edge;
    size_t before =
        SIM_LOWAT_SIZE + 2 * rate_frame_size(&l->rate) + (l->control.tail - l->control.head) + 4096;
    return c->up.delay_us + (c->up.socket_size + before) * SECOND / c->up.rate + 1000;
}

static void request_cancel(struct sim *s, struct request *r)
{
    r->cancelled = r->done = true;
    s->count.cancelled++;
    r->leaves = r->opened && !r->stream;
    if (!r->stream)
        return;
    r->cancel_connection = s->edge.connection;
    r->cancel_stream = r->stream;
    r->cancel_sent_us = s->now_us;
    s->count.cancels_sent++;
    SIM_CHECK(s, link_send(edge_link(s), FRAME_CANCEL, r->stream, NULL, NULL, 0) == 0, "CANCEL refused");
    r->cancel_due_us = s->now_us + cancel_bound_us(s->edge.connection);
    link_close_stream(edge_link(s), r->stream);
    r->stream = 0;
}

/* The cloud may have it: OPEN takes it up, CANCEL ends it. */
static void request_leave(struct sim *s, struct request *r)
{
    struct connection *c = s->edge.connection;
    gen_reopen(&r->receiver, s->now_us);
    int rc = send_open(s, r, c->stream_next);
    if (rc == -TD_ERR_FULL) {
        r->retry_us = s->now_us + 20 * MS;
        return;
    }
    SIM_CHECK(s, rc == 0, "OPEN of one that leaves refused: %d", rc);
    SIM_CHECK(s, link_send(edge_link(s), FRAME_CANCEL, c->stream_next, NULL, NULL, 0) == 0, "CANCEL refused");
    link_close_stream(edge_link(s), c->stream_next);
    c->stream_next += 2;
    r->leaves = false;
    r->told = c;
    s->count.told++;
}

/* ---- what is due ---- */

static bool somebody_waits(const struct sim *s)
{
    for (uint32_t i = 0; i < s->edge.request_count; i++)
        if (s->edge.requests[i].stream && !s->edge.requests[i].done)
            return true;
    return false;
}

static uint64_t go_on_us(const struct sim *s)
{
    return s->edge.away_us == NEVER ? NEVER : s->edge.away_us + SIM_AWAY_US;
}

void edge_act(struct sim *s)
{
    if (s->edge.connect_us <= s->now_us)
        edge_connect(s);
    bool ready = is_ready(s);
    if (ready && s->edge.away_us != NEVER)
        s->edge.away_us = NEVER;
    if (ready)
        link_set_patience(edge_link(s), s->config.continues && somebody_waits(s) ? SIM_PATIENCE_US : 0,
                          s->now_us);
    for (uint32_t i = 0; i < s->edge.request_count; i++) {
        struct request *r = &s->edge.requests[i];
        if (r->start_us <= s->now_us && !r->receiver.ids)
            request_reset(s, r);
        if (ready && r->leaves && r->retry_us <= s->now_us)
            request_leave(s, r);
        if (r->done || !r->receiver.ids)
            continue;
        if (request_may_go_on(s, r) && go_on_us(s) <= s->now_us)
            request_goes_on(s, r);
        if (r->cancel_us <= s->now_us)
            request_cancel(s, r);
        else if (ready && !r->stream && r->retry_us <= s->now_us)
            request_open(s, r);
        else if (ready && request_produces(r) && r->produce_us <= s->now_us)
            request_produce(s, r);
        if (request_makes(r) && r->make_us <= s->now_us)
            request_make(s, r);
    }
}

uint64_t edge_next_us(const struct sim *s)
{
    uint64_t next_us = s->edge.connect_us;
    bool ready = is_ready(s);
    for (uint32_t i = 0; i < s->edge.request_count; i++) {
        const struct request *r = &s->edge.requests[i];
        if (ready && r->leaves)
            next_us = TD_MIN(next_us, r->retry_us);
        if (r->done)
            continue;
        uint64_t due_us = r->receiver.ids ? r->cancel_us : r->start_us;
        if (ready && r->receiver.ids && !r->stream)
            due_us = TD_MIN(due_us, r->retry_us);
        if (ready && request_produces(r))
            due_us = TD_MIN(due_us, r->produce_us);
        if (request_may_go_on(s, r))
            due_us = TD_MIN(due_us, go_on_us(s));
        if (r->receiver.ids && request_makes(r))
            due_us = TD_MIN(due_us, r->make_us);
        next_us = TD_MIN(next_us, due_us);
    }
    return next_us;
}
