/* sim_cloud: one node. Sequences wait for their GENERATE and for the rows that the plan promises, then decode a token a step, whether or not anybody
 * listens, as far as the generation's state allows. Whole messages stay a while in the staging area before they are consumed. */
#include "sim.h"
#include <stdlib.h>

static const char tenant[] = "tenant", principal[] = "principal";

/* ---- sequences ---- */

static void sequence_free(struct sim *s, struct sequence *q)
{
    struct sequence **at = &s->cloud.sequences;
    while (*at != q)
        at = &(*at)->next;
    *at = q->next;
    free(q->prompt);
    free(q);
}

static struct sequence *sequence_of(struct sim *s, const struct connection *c, uint32_t stream)
{
    for (struct sequence *q = s->cloud.sequences; q; q = q->next)
        if (q->connection == c && q->stream == stream)
            return q;
    return NULL;
}

/* Asked with an attempt that changes nothing. */
bool cloud_knows(struct sim *s, const struct request *r)
{
    struct generation *g;
    uint8_t hash[TD_HASH_SIZE] = {0};
    if (gen_open(s->cloud.table, tenant, principal, r->receiver.request_id, 1, hash, NULL, 0, 1, &g) !=
        GEN_NEW)
        return true;
    gen_forget(s->cloud.table, g);
    return false;
}

bool cloud_works_for(const struct sim *s, const struct request *r)
{
    for (const struct sequence *q = s->cloud.sequences; q; q = q->next)
        if (memcmp(q->generation->request_id, r->receiver.request_id, GEN_REQUEST_ID_SIZE) == 0)
            return true;
    return false;
}

uint32_t cloud_sequence_count(const struct sim *s)
{
    uint32_t count = 0;
    for (const struct sequence *q = s->cloud.sequences; q; q = q->next)
        count++;
    return count;
}

/* The cloud forgets a generation, or takes an attempt of it: never one below another that it has taken. */
static void note_attempt(struct sim *s, const uint8_t *request_id, uint64_t attempt)
{
    for (uint32_t i = 0; i < s->edge.request_count; i++) {
        struct request *r = &s->edge.requests[i];
        if (!r->receiver.ids || memcmp(r->receiver.request_id, request_id, GEN_REQUEST_ID_SIZE) != 0)
            continue;
        SIM_CHECK(s, attempt == 0 || attempt > r->attempt_accepted, "a fenced attempt was taken");
        r->attempt_accepted = attempt;
    }
}

void cloud_start(struct sim *s)
{
    s->cloud.table = gen_table_create(256);
    s->cloud.sequences = NULL;
    s->cloud.staged_count = 0;
}

void cloud_crash(struct sim *s)
{
    while (s->cloud.sequences)
        sequence_free(s, s->cloud.sequences);
    for (struct connection *c = s->connections; c; c = c->next) {
        link_destroy(c->cloud);
        c->cloud = NULL;
    }
    gen_table_destroy(s->cloud.table);
    for (uint32_t i = 0; i < s->edge.request_count; i++)
        s->edge.requests[i].attempt_accepted = 0;
    cloud_start(s);
}

static void sequence_detach(struct sim *s, struct sequence *q)
{
    q->connection = NULL;
    q->stream = 0;
    q->abandoned_data = true;
    gen_detach(q->generation, s->now_us);
}

void cloud_lost(struct sim *s, struct connection *c)
{
    for (struct sequence *q = s->cloud.sequences; q; q = q->next)
        if (q->connection == c)
            sequence_detach(s, q);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->cloud.staged_count; i++)
        if (s->cloud.staged[i].connection != c)
            s->cloud.staged[kept++] = s->cloud.staged[i];
    s->cloud.staged_count = kept;
    link_destroy(c->cloud);
    c->cloud = NULL;
}

static void on_gone(void *ctx, struct generation *g)
{
    struct sim *s = ctx;
    s->count.expired++;
    note_attempt(s, g->request_id, 0);
    if (g->owner) {
        struct sequence *q = g->owner;
        SIM_CHECK(s, !q->connection, "a generation that somebody listens to was forgotten");
        sequence_free(s, q);
    }
}

/* ---- what it says ---- */

static void send_tokens(struct sim *s, struct connection *c, uint32_t stream, const struct generation *g,
                        uint32_t first)
{
    static uint8_t bytes[4 * SIM_REPLY];
    for (uint32_t at = first; at < g->reply_count;) {
        uint32_t count = (uint32_t)rng_between(&s->rng, 1, 40);
        count = TD_MIN(count, g->reply_count - at);
        for (uint32_t i = 0; i < count; i++)
            store_le32(bytes + 4 * i, (uint32_t)g->reply[at + i]);
        Tandem__Token token = TANDEM__TOKEN__INIT;
        token.attempt = g->attempt;
        token.index = at;
        SIM_CHECK(s, link_send(c->cloud, FRAME_TOKEN, stream, &token.base, bytes, 4 * (size_t)count) == 0,
                  "TOKEN refused");
        at += count;
    }
}

static void send_done(struct sim *s, struct connection *c, uint32_t stream, const struct generation *g)
{
    Tandem__Done done = TANDEM__DONE__INIT;
    done.attempt = g->attempt;
    done.finish = g->finish;
    done.completion_tokens = g->reply_count;
    SIM_CHECK(s, link_send(c->cloud, FRAME_DONE, stream, &done.base, NULL, 0) == 0, "DONE refused");
}

static void send_error(struct sim *s, struct connection *c, uint32_t stream, int code,
                       uint32_t retry_after_ms)
{
    Tandem__Error error = TANDEM__ERROR__INIT;
    error.code = (uint32_t)-code;
    error.retry = retry_after_ms > 0;
    error.retry_after_ms = retry_after_ms;
    SIM_CHECK(s, link_send(c->cloud, FRAME_ERROR, stream, &error.base, NULL, 0) == 0, "ERROR refused");
}

/* ---- OPEN ---- */

static void sequence_begin(struct sim *s, struct sequence *q, struct generation *g, const int32_t *prompt,
                           uint32_t prompt_count)
{
    q->generation = g;
    g->owner = q;
    q->prompt_count = prompt_count;
    q->prompt = malloc(4 * (size_t)prompt_count);
    memcpy(q->prompt, prompt, 4 * (size_t)prompt_count);
    q->edge_tokens = UINT32_MAX; /* no plan yet */
    q->next = s->cloud.sequences;
    s->cloud.sequences = q;
}

static void open_known(struct sim *s, struct connection *c, uint32_t stream, struct generation *g,
                       uint32_t held_count)
{
    struct sequence *q = g->owner;
    if (q && q->connection) { /* the old socket is dead and nobody has noticed: it is fenced */
        struct connection *old = q->connection;
        uint32_t old_stream = q->stream;
        q->connection = NULL;
        link_close_stream(old->cloud, old_stream);
    }
    Tandem__OpenAck ack = TANDEM__OPEN_ACK__INIT;
    ack.attempt = g->attempt;
    ack.resumed = true;
    ack.reply_count = g->reply_count;
    SIM_CHECK(s, link_send(c->cloud, FRAME_OPEN_ACK, stream, &ack.base, NULL, 0) == 0, "OPEN_ACK refused");
    send_tokens(s, c, stream, g, held_count);
    if (g->state == GEN_FINISHED) {
        send_done(s, c, stream, g);
        return;
    }
    q->connection = c;
    q->stream = stream;
    q->abandoned_data = true; /* whatever rows are missing are recomputed from ids */
    q->step_us = s->now_us + s->config.step_us;
}

/* The edge has made tokens that are not ours: ours go. */
static void give_way(struct sim *s, struct generation *g)
{
    struct sequence *q = g->owner;
    if (q && q->connection)
        link_close_stream(q->connection->cloud, q->stream);
    gen_forget(s->cloud.table, g);
    if (q)
        sequence_free(s, q);
}

/* As a cloud with a full queue does; where it has the generation there is a place for it. */
static bool is_busy(struct sim *s, struct connection *c, const struct wire_frame *f)
{
    for (uint32_t i = 0; i < s->edge.request_count; i++) {
        struct request *r = &s->edge.requests[i];
        if (memcmp(r->receiver.request_id, f->open->request_id.data, GEN_REQUEST_ID_SIZE) != 0)
            continue;
        SIM_CHECK(s, s->now_us >= r->not_before_us || c != r->busy_there, "asked again before it was time");
        if (r->attempt_accepted > 0 || r->done || !rng_chance(&s->rng, s->config.busy_percent))
            return false;
        uint32_t after_ms = (uint32_t)rng_between(&s->rng, 1, 3000);
        r->not_before_us = s->now_us + after_ms * MS;
        r->busy_there = c;
        s->count.busy++;
        send_error(s, c, f->stream, -TD_ERR_FULL, after_ms);
        return true;
    }
    return false;
}

static void on_open(struct sim *s, struct connection *c, const struct wire_frame *f)
{
    const Tandem__Open *m = f->open;
    if (is_busy(s, c, f))
        return;
    if (m->conversation_length > 0) {
        Tandem__OpenAck ack = TANDEM__OPEN_ACK__INIT;
        ack.need_ids = true;
        SIM_CHECK(s, link_send(c->cloud, FRAME_OPEN_ACK, f->stream, &ack.base, NULL, 0) == 0,
                  "OPEN_ACK refused");
        return;
    }
    int32_t *ids = malloc(f->payload.size);
    for (size_t i = 0; i < f->payload.size / 4; i++)
        ids[i] = (int32_t)load_le32(f->payload.data + 4 * i);
    uint8_t hash[TD_HASH_SIZE];
    ids_hash(ids, m->prompt_count, hash);
    struct generation *g;
    enum gen_verdict verdict = gen_open(s->cloud.table, tenant, principal, m->request_id.data, m->attempt,
                                        hash, ids + m->prompt_count, m->held_count, SIM_REPLY, &g);
    s->count.verdicts[verdict]++;
    if (verdict == GEN_REPLACE) {
        give_way(s, g);
        verdict = gen_open(s->cloud.table, tenant, principal, m->request_id.data, m->attempt, hash,
                           ids + m->prompt_count, m->held_count, SIM_REPLY, &g);
        SIM_CHECK(s, verdict == GEN_ADOPT, "a generation that has given way is still there");
    }
    SIM_CHECK(s, verdict != GEN_MISMATCH && verdict != GEN_FULL, "a re-opened generation does not match");
    if (verdict != GEN_STALE)
        note_attempt(s, m->request_id.data, m->attempt);
    if (verdict == GEN_STALE) {
        send_error(s, c, f->stream, -TD_ERR_CONFLICT, 0);
    } else if (verdict == GEN_CONTINUE) {
        open_known(s, c, f->stream, g, m->held_count);
    } else {
        struct sequence *q = calloc(1, sizeof *q);
        sequence_begin(s, q, g, ids, m->prompt_count);
        q->connection = c;
        q->stream = f->stream;
        Tandem__OpenAck ack = TANDEM__OPEN_ACK__INIT;
        ack.attempt = m->attempt;
        ack.reply_count = g->reply_count;
        SIM_CHECK(s, link_send(c->cloud, FRAME_OPEN_ACK, f->stream, &ack.base, NULL, 0) == 0,
                  "OPEN_ACK refused");
    }
    free(ids);
}

/* ---- plan, data ---- */

static void on_plan(struct sequence *q, const Tandem__Plan *plan)
{
    q->epoch = plan->epoch;
    q->edge_tokens = plan->ranges[0]->layers > 0 ? plan->ranges[0]->count : 0;
    q->hidden_tokens = TD_MIN(q->hidden_tokens, q->edge_tokens);
    q->kv_piece = 0;
    q->needs = false;
}

static void on_generate(struct sim *s, struct sequence *q, const Tandem__Generate *generate)
{
    q->generates = true;
    q->token_count_max = generate->token_count_max;
    q->seed = generate->seed;
    q->step_us = s->now_us + s->config.step_us;
}

static void send_ingested(struct sim *s, const struct sequence *q)
{
    Tandem__Ingested m = TANDEM__INGESTED__INIT;
    m.epoch = q->epoch;
    m.hidden_tokens = q->hidden_tokens;
    m.kv_tokens = q->kv_piece / (2 * s->config.layers) * SIM_BLOCK;
    SIM_CHECK(s, link_send(q->connection->cloud, FRAME_INGESTED, q->stream, &m.base, NULL, 0) == 0,
              "INGESTED refused");
}

static void on_hidden(struct sim *s, struct sequence *q, const struct wire_frame *f)
{
    const Tandem__Hidden *m = f->hidden;
    SIM_CHECK(s, f->payload.size == (size_t)m->count * s->config.row_size, "rows of another size");
    SIM_CHECK(s, content_is(f->payload.data, f->payload.size, content_hidden(q->prompt, m->first_token)),
              "rows that differ");
    if (m->epoch != q->epoch || m->first_token + m->count <= q->hidden_tokens)
        return; /* of an older plan, or known already */
    if (m->first_token > q->hidden_tokens) {
        SIM_CHECK(s, q->needs, "rows from %u on, but those from %u on never came", m->first_token,
                  q->hidden_tokens);
        return;
    }
    if (!q->needs && rng_chance(&s->rng, s->config.damage_percent)) { /* as if it had been damaged */
        Tandem__Need need = TANDEM__NEED__INIT;
        need.first_token = m->first_token;
        need.count = m->count;
        need.hidden = true;
        q->needs = true;
        s->count.needs++;
        SIM_CHECK(s, link_send(q->connection->cloud, FRAME_NEED, q->stream, &need.base, NULL, 0) == 0,
                  "NEED refused");
        return;
    }
    q->needs = false;
    q->hidden_tokens = m->first_token + m->count;
    q->step_us = TD_MAX(q->step_us, s->now_us + s->config.step_us);
    send_ingested(s, q);
}

static void on_piece(struct sim *s, struct sequence *q, const struct wire_frame *f)
{
    const Tandem__KvBlock *m = f->kv_block;
    SIM_CHECK(s,
              content_is(f->payload.data, f->payload.size,
                         content_piece(q->prompt, m->block_index, m->layer, m->is_value)),
              "a piece that differs");
    uint32_t index = m->block_index * 2 * s->config.layers + m->layer * 2 + (m->is_value ? 1 : 0);
    if (m->epoch != q->epoch)
        return;
    SIM_CHECK(s, index == q->kv_piece, "piece %u instead of %u", index, q->kv_piece);
    q->kv_piece++;
    send_ingested(s, q);
}

static void stage(struct sim *s, struct connection *c, uint32_t stream, size_t size)
{
    SIM_CHECK(s, s->cloud.staged_count < SIM_STAGED_COUNT, "too many staged messages");
    s->cloud.staged[s->cloud.staged_count++] =
        (struct staged){c, stream, size, s->now_us + rng_below(&s->rng, s->config.stage_us + 1)};
    uint64_t of_stream = 0, of_connection = 0;
    for (uint32_t i = 0; i < s->cloud.staged_count; i++)
        if (s->cloud.staged[i].connection == c) {
            of_connection += s->cloud.staged[i].size;
            of_stream += s->cloud.staged[i].stream == stream ? s->cloud.staged[i].size : 0;
        }
    SIM_CHECK(s, of_stream <= s->config.stream_window, "a stream has staged %llu bytes",
              (unsigned long long)of_stream);
    SIM_CHECK(s, of_connection <= s->config.connection_window, "a connection has staged %llu bytes",
              (unsigned long long)of_connection);
}

/* The edge's own bytes would come back here; the toy makes them from their name. */
static void on_fetch(struct sim *s, struct connection *c, const struct sequence *q,
                     const struct wire_frame *f)
{
    for (uint32_t i = 0; i < 2 * f->fetch->layer_end; i++) {
        size_t size = (size_t)TD_MIN(SIM_BLOCK, q->prompt_count) * s->config.piece_row_size;
        Tandem__KvBlock kv = TANDEM__KV_BLOCK__INIT;
        kv.layer = i / 2;
        kv.is_value = i % 2;
        uint8_t *bytes = malloc(size);
        content_fill(bytes, size, content_piece(q->prompt, 0, kv.layer, kv.is_value));
        int rc = link_send_bulk(c->cloud, FRAME_KV_BLOCK, f->stream, &kv.base, 0, bytes, size);
        SIM_CHECK(s, rc == 0, "a fetched piece was refused: %d", rc);
    }
}

/* ---- CANCEL ---- */

static void on_cancel(struct sim *s, struct connection *c, uint32_t stream, struct sequence *q)
{
    for (uint32_t i = 0; i < s->edge.request_count; i++) {
        struct request *r = &s->edge.requests[i];
        if (r->cancel_connection != c || r->cancel_stream != stream)
            continue;
        SIM_CHECK(s, s->now_us <= r->cancel_due_us, "CANCEL took %llu us",
                  (unsigned long long)(s->now_us - r->cancel_sent_us));
        r->cancel_connection = NULL;
        s->count.cancels_delivered++;
    }
    if (q) {
        note_attempt(s, q->generation->request_id, 0);
        gen_forget(s->cloud.table, q->generation);
        sequence_free(s, q);
    }
    link_close_stream(c->cloud, stream);
}

static void welcome(struct sim *s, struct connection *c)
{
    static uint8_t zeros[TD_HASH_SIZE];
    Tandem__Version version = TANDEM__VERSION__INIT;
    version.layout = (ProtobufCBinaryData){sizeof zeros, zeros};
    Tandem__Welcome m = TANDEM__WELCOME__INIT;
    m.version = &version;
    m.principal_key = version.layout;
    SIM_CHECK(s, link_send(c->cloud, FRAME_WELCOME, 0, &m.base, NULL, 0) == 0, "WELCOME refused");
}

int cloud_on_frame(void *ctx, const struct wire_frame *f)
{
    struct connection *c = ctx;
    struct sim *s = c->sim;
    SIM_CHECK(s, f->type != FRAME_ERROR, "the edge refuses the cloud: %s", f->error->text);
    struct sequence *q = f->stream ? sequence_of(s, c, f->stream) : NULL;
    if (frame_is_bulk(f->type))
        stage(s, c, f->stream, f->payload.size);
    if (f->type == FRAME_HELLO)
        welcome(s, c);
    else if (f->type == FRAME_OPEN)
        on_open(s, c, f);
    else if (f->type == FRAME_CANCEL)
        on_cancel(s, c, f->stream, q);
    else if (f->type == FRAME_GENERATE && q && !q->generates)
        on_generate(s, q, f->generate);
    else if (f->type == FRAME_FETCH && q)
        on_fetch(s, c, q, f);
    else if (q && !q->abandoned_data && f->type == FRAME_PLAN)
        on_plan(q, f->plan);
    else if (q && !q->abandoned_data && f->type == FRAME_HIDDEN)
        on_hidden(s, q, f);
    else if (q && !q->abandoned_data && f->type == FRAME_KV_BLOCK)
        on_piece(s, q, f);
    return 0;
}

/* ---- steps ---- */

/* Everything that the next token needs is there. The KV pieces follow behind; the toy does without those that are late. */
static bool sequence_can_step(const struct sequence *q)
{
    return q->generates &&
           (q->abandoned_data || (q->edge_tokens != UINT32_MAX && q->hidden_tokens >= q->edge_tokens));
}

static void sequence_finish(struct sim *s, struct sequence *q)
{
    struct generation *g = q->generation;
    bool stopped = g->reply_count > 0 && text_ends(g->reply[g->reply_count - 1]);
    gen_finish(g, stopped ? FINISH_STOP : FINISH_LENGTH, s->now_us);
    g->owner = NULL;
    if (q->connection)
        send_done(s, q->connection, q->stream, g);
    sequence_free(s, q);
}

static bool reply_is_whole(const struct sequence *q)
{
    const struct generation *g = q->generation;
    return g->reply_count >= q->token_count_max ||
           (g->reply_count > 0 && text_ends(g->reply[g->reply_count - 1]));
}

static void sequence_step(struct sim *s, struct sequence *q)
{
    struct generation *g = q->generation;
    q->step_us = s->now_us + s->config.step_us;
    if (reply_is_whole(q)) { /* an edge that held all of it and had only missed DONE */
        sequence_finish(s, q);
        return;
    }
    if (!q->decoding) {
        q->state = text_begin(q->seed, q->prompt, q->prompt_count);
        for (uint32_t i = 0; i < g->reply_count; i++)
            q->state = text_fold(q->state, g->reply[i]);
        q->decoding = true;
    }
    if (!gen_may_decode(g)) {
        s->count.parked++;
        SIM_CHECK(s, !q->connection && g->detached_count == LIMIT_DETACHED_TOKENS,
                  "parked too soon or too late");
        return;
    }
    int32_t id = text_next(q->state);
    q->state = text_fold(q->state, id);
    SIM_CHECK(s, gen_append(g, id) == 0, "a token does not fit");
    if (q->connection)
        send_tokens(s, q->connection, q->stream, g, g->reply_count - 1);
    if (reply_is_whole(q))
        sequence_finish(s, q);
}

static void leave_staging(struct sim *s)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->cloud.staged_count; i++) {
        struct staged m = s->cloud.staged[i];
        if (m.leaves_us > s->now_us)
            s->cloud.staged[kept++] = m;
        else
            link_consumed(m.connection->cloud, m.stream, m.size);
    }
    s->cloud.staged_count = kept;
}

void cloud_act(struct sim *s)
{
    leave_staging(s);
    gen_table_expire(s->cloud.table, s->now_us, on_gone, s);
    for (struct sequence *q = s->cloud.sequences, *next; q; q = next) {
        next = q->next;
        if (sequence_can_step(q) && q->generation->state != GEN_PARKED && q->step_us <= s->now_us)
            sequence_step(s, q);
    }
}

uint64_t cloud_next_us(const struct sim *s)
{
    uint64_t next_us = NEVER;
    for (uint32_t i = 0; i < s->cloud.staged_count; i++)
        next_us = TD_MIN(next_us, s->cloud.staged[i].leaves_us);
    for (const struct sequence *q = s->cloud.sequences; q; q = q->next)
        if (sequence_can_step(q) && q->generation->state != GEN_PARKED)
            next_us = TD_MIN(next_us, q->step_us);
        else if (q->generation->state != GEN_RUNNING)
            next_us = TD_MIN(next_us, q->generation->expires_us);
    return next_us;
}
