/* sim_planner: many prompts on their way from an edge to a cloud, on a virtual clock, with the planner's real decisions (edge/planner.c, edge/estimates.c) and the
 * cloud's real view of plans, rows and pieces (cloud/sequence*.c). The link has a rate and a delay that change, stalls as lost packets make them, and
 * breaks; the device slows down and speeds up; the cloud is sometimes killed.
 *
 * Some devices make tokens too, ahead of the cloud by the planner's choice, or while it is away, and some of these draw others than it would
 * (sim_planner_reply.c); what a cloud has that differs gives way.
 *
 * Checked: no plan is refused; nothing runs before what it reads is there; rows and KV of every token are what the record says they are made from, and
 * after the second reply token they stay that, whatever breaks, unless the device has made tokens; each reply token comes once, in its order; every reply
 * ends, also that of a cloud that comes behind.
 *
 *     sim_planner [--runs N] [--seed S]      TANDEM_SIM_RUNS=N sets the default number of runs */
#include "sim_planner.h"
#include "shared/crypto.h"
#include <stdio.h>
#include <stdlib.h>

#define RUNS_DEFAULT 500

static const struct seq_model model = {.shape = {LAYERS, 1, 1},
                                       .embd_size = 1,
                                       .vocab_count = 100,
                                       .context_max = TOKENS_MAX + REPLY + 1,
                                       .numerics = KV_NUMERICS_CPU_V1};

void fail(const struct sim *s, const char *what)
{
    fprintf(stderr, "sim_planner: seed %llu, %.3f s: %s\nrepeat with: sim_planner --seed %llu --runs 1\n",
            (unsigned long long)s->seed, (double)s->now_us * 1e-6, what, (unsigned long long)s->seed);
    exit(1);
}

uint64_t pick(struct sim *s, uint64_t count)
{
    s->random = s->random * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (s->random >> 33) % count;
}

/* ---- queues ---- */

static void push(struct sim *s, struct queue_of *q, const struct message *m)
{
    struct message *copy = malloc(sizeof *copy);
    if (!copy || q->count == QUEUE_MAX)
        fail(s, "a queue is full");
    *copy = *m;
    q->items[(q->head + q->count++) % QUEUE_MAX] = copy;
}

static struct message *pop(struct queue_of *q)
{
    struct message *m = q->items[q->head];
    q->head = (q->head + 1) % QUEUE_MAX;
    q->count--;
    return m;
}

static void clear(struct queue_of *q)
{
    while (q->count)
        free(pop(q));
}

/* ---- cloud ---- */

static void answer(struct sim *s, bool opened)
{
    struct answer a = {.arrives_us = s->now_us + s->delay_us, .stream = s->stream, .opened = opened};
    struct sequence *q = s->sequence;
    if (!s->up)
        return;
    a.epoch = q->epoch;
    a.hidden = q->planned ? sequence_hidden_tokens(q, &model) : 0;
    a.kv = q->planned ? sequence_kv_tokens(q) : 0;
    a.run = TD_MIN(q->high, q->plan_end);
    a.plan_begin = q->plan_begin;
    a.refill_begin = q->refill_begin;
    a.refill_end = q->refill_end;
    a.left_begin = TD_MIN(q->left_from, q->plan_end);
    a.left_end = q->plan_end;
    if (opened) {
        a.plan_wanted = q->record_count > 0 && sequence_wants_data(q, &model);
        a.range_count = sequence_record(q, a.ranges);
    }
    struct answer *copy = malloc(sizeof *copy);
    if (!copy || s->answer_count == QUEUE_MAX)
        fail(s, "too many answers");
    *copy = a;
    s->answers[(s->answer_head + s->answer_count++) % QUEUE_MAX] = copy;
}

static void new_sequence(struct sim *s, uint32_t held)
{
    struct engine_open open = {.prompt_count = s->prompt, .held_count = held, .accept = KV_ACCEPT_ANY};
    struct engine_generate generate = {.token_count_max = REPLY};
    sequence_free(s->sequence);
    open.ids = calloc(s->prompt + held + 1, sizeof *open.ids);
    if (open.ids)
        memcpy(open.ids + s->prompt, s->reply, held * sizeof *s->reply);
    s->sequence = open.ids ? sequence_create(&model, &open, 1) : NULL;
    if (!s->sequence || sequence_set_generate(s->sequence, &model, &generate) < 0)
        fail(s, "no memory");
    s->sequence->state = SEQ_RUNNING;
    s->sequence->upload_us = s->now_us;
    memset(s->has, 0, sizeof s->has);
    memset(s->forms, 0, sizeof s->forms);
    s->job.kind = JOB_NONE;
    s->job_us = NEVER;
    s->dead = false;
}

static void hear_tokens(struct sim *s);

static void take(struct sim *s, struct message *m)
{
    struct td_error err = {0};
    struct sequence *q = s->sequence;
    if (m->kind != PIECE)
        q->upload_us = s->now_us;
    if (m->kind == OPEN_FRAME) {
        uint32_t held = m->count, known = sequence_reply_count(q);
        bool ours = held <= known && memcmp(q->ids + q->prompt_count, s->reply, held * sizeof *s->reply) == 0;
        s->replaced += !s->dead && !ours;
        if (s->dead || !ours)
            new_sequence(s, held);
        else
            q->away = false, q->kv_us = s->now_us;
        s->listens = m->first == s->stream;
        answer(s, true);
        hear_tokens(s);
    } else if (m->kind == PLAN_FRAME) {
        if (sequence_plan(q, &model, m->epoch, m->ranges, m->count, m->resumes, &err) < 0)
            fail(s, err.text);
        s->refused += m->resumes && q->ids_until == UINT32_MAX;
        q->rows_patience_us = m->rows_patience_us;
        q->kv_patience_us = m->kv_patience_us;
        answer(s, false);
    } else if (m->kind == ROWS) {
        struct seq_hidden *h = calloc(1, sizeof *h);
        h->first_token = m->first, h->count = m->count, h->dtype = HIDDEN_F32, h->size = 4u * m->count;
        h->payload = calloc(m->count, 4);
        if (sequence_hidden(q, &model, m->epoch, m->layer, h, &err) < 0)
            fail(s, err.text);
        answer(s, false);
    } else {
        struct ingest_piece p = {.epoch = m->epoch, .block_index = m->block};
        p.head = (struct kv_piece_head){.codec = m->codec,
                                        .block_index = m->block,
                                        .layer = (uint16_t)m->layer,
                                        .first_token = (uint8_t)(m->first % KV_BLOCK_TOKENS),
                                        .token_count = (uint16_t)m->count,
                                        .is_value = m->is_value};
        enum piece_verdict verdict = sequence_check_piece(q, &p, &err);
        if (verdict == PIECE_REFUSE)
            fail(s, err.text);
        if (verdict == PIECE_TAKE) {
            sequence_take_piece(q, &p);
            q->kv_us = s->now_us;
            for (uint32_t t = m->first; t < m->first + m->count; t++) {
                s->has[t][m->layer] = true;
                s->forms[t].codec = m->codec;
            }
        }
        if (m->is_value && verdict == PIECE_TAKE)
            answer(s, false);
    }
}

/* Everything that the job reads must be there; then what it makes is. */
static void check_job(struct sim *s, const struct seq_job *j)
{
    if (j->kind == JOB_LAST)
        return;
    for (uint32_t t = 0; t < j->position; t++)
        for (uint32_t l = j->layer_begin; l < j->layer_end; l++)
            if (!s->has[t][l])
                fail(s, "a layer is computed of which an earlier token has no KV");
    for (uint32_t t = j->position; t < j->position + j->rows; t++) {
        for (uint32_t l = j->layer_begin; l < j->layer_end; l++)
            s->has[t][l] = true;
        if (t >= s->prompt)
            continue;
        if (j->kind == JOB_REFILL)
            s->forms[t].codec = PLAN_CODEC_NONE;
        else
            s->forms[t].layers = (uint8_t)(j->kind == JOB_HIDDEN ? j->layer_begin : 0);
    }
}

/* The second token has read everything: from here on the text depends on these forms. */
static void settle(struct sim *s)
{
    struct plan_range record[LIMIT_RANGES];
    uint32_t count = sequence_record(s->sequence, record);
    if (s->held == 0 || s->made > 0) /* nobody has seen a word of it, or it is the device's text */
        return;
    for (uint32_t t = 0; t < s->prompt && !s->disturbed; t++) {
        const struct plan_range *r = plan_at(record, count, t);
        struct form *f = &s->forms[t];
        if (f->layers == 0 && f->codec == PLAN_CODEC_NONE)
            f->codec = 0; /* all from token ids; with k = L no rows are run here, and the codec alone tells */
        if (!r || (r->layers == LAYERS ? 0 : r->layers) != f->layers)
            fail(s, "the record names other layers than were run");
        if (s->is_settled && (f->layers != s->settled[t].layers || f->codec != s->settled[t].codec))
            fail(s, "the values behind a reply that had begun have changed");
    }
    memcpy(s->settled, s->forms, sizeof s->settled);
    s->is_settled = true;
}

static void next_job(struct sim *s)
{
    struct sequence *q = s->sequence;
    if (s->dead || s->job.kind != JOB_NONE || sequence_reply_count(q) >= REPLY)
        return;
    bool waited = q->ids_until != UINT32_MAX;
    s->job = sequence_next(q, &model, s->now_us, STALL_US);
    bool gave_up = waited && q->ids_until == UINT32_MAX;
    s->disturbed |= gave_up && q->left_from == UINT32_MAX;
    s->impatient += gave_up && q->left_from != UINT32_MAX;
    if (s->job.kind == JOB_NONE) {
        s->job_us = q->deadline_us;
        return;
    }
    if (s->job.rows > 100) {
        s->job.rows = 100;
        s->job.logits = false;
    }
    s->job_us =
        s->now_us + 1 +
        (uint64_t)((double)s->job.rows * (s->job.layer_end - s->job.layer_begin) * s->cloud_ns * 1e-3);
}

static void finish_job(struct sim *s)
{
    struct sequence *q = s->sequence;
    struct seq_job job = s->job;
    s->job.kind = JOB_NONE;
    s->job_us = NEVER;
    if (job.kind == JOB_NONE)
        return;
    check_job(s, &job);
    sequence_advance(q, &model, &job);
    if (job.logits) {
        sequence_append(q, &model, reply_token(q->ids + q->prompt_count, sequence_reply_count(q)));
        if (sequence_reply_count(q) == 3)
            settle(s);
    }
    answer(s, false);
    hear_tokens(s); /* the way back is short */
}

/* ---- edge ---- */

static void fill_state(struct sim *s, struct planner_state *state)
{
    *state = (struct planner_state){.layer_count = LAYERS,
                                    .layers_wanted = s->made ? 0 : PLANNER_AUTO,
                                    .layers_held = LAYERS,
                                    .cached_known = true,
                                    .prompt_count = s->prompt,
                                    .accept = KV_ACCEPT_ANY,
                                    .codec = KV_L1,
                                    .hidden_dtype = HIDDEN_F32,
                                    .codec_mask = 7,
                                    .hidden_mask = 7,
                                    .local = s->held ? LOCAL_OFF : s->local,
                                    .local_share = 1};
    state->model = (struct plan_model){.layer_count = LAYERS,
                                       .row_size = {s->row_size, s->row_size, s->row_size},
                                       .kv_size = s->kv_size,
                                       .chunk_tokens = CHUNK};
    estimates_fill(&s->estimates, s->now_us, &state->model);
}

static void void_queues(struct sim *s)
{
    clear(&s->rows);
    clear(&s->pieces);
}

static void carry_out(struct sim *s, uint32_t rows_begin, uint32_t kv_begin)
{
    s->epoch++;
    struct message m = {.kind = PLAN_FRAME, .epoch = s->epoch, .count = s->plan.range_count, .size = 100};
    m.resumes = s->resumed_epoch == s->epoch;
    if (pick(s, 3)) { /* any patience is right, if not wise */
        m.rows_patience_us = (uint32_t)(1 + pick(s, 200) * MS);
        m.kv_patience_us = (uint32_t)(1 + pick(s, 200) * MS);
    }
    memcpy(m.ranges, s->plan.ranges, sizeof m.ranges);
    memcpy(s->before, s->record, sizeof s->before);
    s->before_count = s->record_count;
    s->merged = s->before_count == 0;
    memcpy(s->record, s->plan.ranges, sizeof s->record);
    s->record_count = s->plan.range_count;
    void_queues(s);
    push(s, &s->control, &m);
    s->rows_begin = rows_begin;
    s->position = TD_MIN(s->position, rows_begin / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS);
    s->kv_next = kv_begin / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    s->chunk_us = NEVER;
    s->sending = true;
    s->planned = true;
    if (planner_sends(&s->plan)) /* the device has one thread */
        run_stop(s);
    else if (s->plan.local && !s->runs)
        run_begin(s);
}

static const struct plan_range *edge_range(const struct sim *s, uint32_t token)
{
    for (uint32_t i = 0; i < s->plan.range_count; i++)
        if (s->plan.ranges[i].layers > 0 && plan_range_end(&s->plan.ranges[i]) > token)
            return &s->plan.ranges[i];
    return NULL;
}

static void hand_on_kv(struct sim *s)
{
    const struct plan_range *r;
    while ((r = edge_range(s, s->kv_next)) && s->kv_next < s->position) {
        uint32_t begin = TD_MAX(s->kv_next, r->first_token), block = begin / KV_BLOCK_TOKENS;
        uint32_t end = TD_MIN((block + 1) * KV_BLOCK_TOKENS, plan_range_end(r));
        if (end > s->position)
            return;
        s->kv_next = end;
        for (uint32_t i = 0; r->codec != PLAN_CODEC_NONE && i < 2 * r->layers; i++)
            push(s, &s->pieces,
                 &(struct message){.kind = PIECE,
                                   .epoch = s->epoch,
                                   .first = block * KV_BLOCK_TOKENS,
                                   .count = end - block * KV_BLOCK_TOKENS,
                                   .layer = i / 2,
                                   .is_value = i % 2,
                                   .block = block,
                                   .codec = r->codec,
                                   .size = s->kv_size / 2 * (end - block * KV_BLOCK_TOKENS)});
    }
}

/* The chunk that was begun is done, if any; begin the next. */
static void edge_works(struct sim *s)
{
    if (s->chunk_us <= s->now_us) {
        const struct plan_range *r = edge_range(s, s->position);
        uint32_t begin = s->position, from = TD_MAX(begin, s->rows_begin);
        s->chunk_us = NEVER;
        s->position = s->chunk_end;
        estimates_edge(&s->estimates, (uint64_t)((s->position - begin) * r->layers * s->edge_ns * 1e-3),
                       s->position - begin, r->layers, begin, false);
        bool whole = r->layers == LAYERS;
        if (whole)
            from = plan_range_end(r) == s->position ? s->position - 1 : s->position;
        if (from < s->position && begin >= r->first_token && s->position > s->rows_begin)
            push(s, &s->rows,
                 &(struct message){.kind = ROWS,
                                   .epoch = s->epoch,
                                   .first = from,
                                   .count = s->position - from,
                                   .layer = r->layers,
                                   .size = s->row_size * (s->position - from)});
    }
    hand_on_kv(s);
    const struct plan_range *r = s->sending ? edge_range(s, s->position) : NULL;
    if (!r || s->chunk_us != NEVER)
        return;
    uint32_t limit = s->position < r->first_token ? r->first_token : plan_range_end(r);
    s->chunk_end = TD_MIN(limit, (s->position / CHUNK + 1) * CHUNK);
    s->chunk_us = s->now_us + 1 + (uint64_t)((s->chunk_end - s->position) * r->layers * s->edge_ns * 1e-3);
}

static void plan_fresh(struct sim *s)
{
    struct planner_state state;
    fill_state(s, &state);
    if (s->held > 0 && s->record_count > 0 && !s->made) {
        s->plan = (struct plan){.range_count = s->record_count};
        memcpy(s->plan.ranges, s->record, sizeof s->record);
    } else {
        planner_plan(&state, &s->plan);
    }
    s->plan.layers = edge_range(s, 0) ? edge_range(s, 0)->layers : 0;
    carry_out(s, 0, 0);
}

/* The rest was left to the cloud: help again, now and then also where that is of no use. */
static void resume(struct sim *s)
{
    struct planner_state state;
    struct plan fresh;
    bool known = s->left || s->last.epoch == s->epoch;
    if (!s->given_up || !known || !s->up || !s->acked || s->held > 0 || s->made > 0 ||
        s->last.run >= s->prompt)
        return;
    fill_state(s, &state);
    struct plan_progress at = {.computed = s->position, .run = s->last.run};
    if (pick(s, 4) == 0)
        state.model.edge.base_ns *= 0.01, state.model.rate_bytes_per_us *= 100;
    if (!planner_resume(&state, &s->left_plan, s->record, s->record_count, &at, &fresh))
        return;
    s->plan = fresh;
    s->given_up = s->left = false;
    s->resumed_epoch = s->epoch + 1;
    s->resumed++;
    carry_out(s, fresh.send_begin, fresh.send_begin);
}

static void reconsider(struct sim *s)
{
    struct planner_state state;
    struct plan left;
    resume(s);
    if (!s->up || !s->acked || s->last.epoch != s->epoch || TD_MIN(s->last.hidden, s->last.kv) >= s->prompt)
        return;
    fill_state(s, &state);
    struct plan_progress at = {.computed = TD_MAX(s->position, s->rows_begin),
                               .catch_up = s->rows_begin - TD_MIN(s->position, s->rows_begin),
                               .rows = s->last.hidden,
                               .run = s->last.run,
                               .kv = s->last.kv};
    if (!planner_reconsider(&state, &s->plan, &at, &left))
        return;
    s->given_up = true;
    s->left_plan = s->plan;
    s->plan = left;
    s->leaves++;
    carry_out(s, at.rows, at.kv);
}

/* The cloud waits for rows no longer. */
static void hear_left(struct sim *s, const struct answer *a)
{
    struct plan_range merged[LIMIT_RANGES];
    if (a->left_begin >= a->left_end || s->left || a->epoch < s->resumed_epoch)
        return;
    s->given_up = true;
    s->left_plan = s->plan;
    bool unheard = !s->merged && s->before_count > 0;
    uint32_t base_count = unheard ? s->before_count : s->record_count, from = a->left_begin;
    const struct plan_range *base = unheard ? s->before : s->record;
    struct plan_range rest = {.first_token = from, .count = s->prompt - TD_MIN(from, s->prompt)};
    uint32_t count = rest.count ? plan_merge(base, base_count, &rest, 1, from, merged) : 0;
    if (count > 0) {
        memcpy(s->record, merged, count * sizeof *merged);
        s->record_count = plan_without_kv(s->record, count, a->refill_begin, a->refill_end);
    }
    s->merged = s->left = true;
    s->epoch++;
    s->sending = false;
    s->chunk_us = NEVER;
    void_queues(s);
}

static void hear(struct sim *s, struct answer *a)
{
    struct plan_range merged[LIMIT_RANGES];
    s->last = *a;
    if (a->opened) {
        s->acked = true;
        s->epoch = TD_MAX(s->epoch, a->epoch);
        if (a->plan_wanted) {
            s->plan = (struct plan){.range_count = a->range_count};
            memcpy(s->plan.ranges, a->ranges, sizeof a->ranges);
            for (uint32_t i = 0; i < a->range_count && s->made; i++)
                s->plan.ranges[i].layers = s->plan.ranges[i].codec = s->plan.ranges[i].hidden_dtype = 0;
            memcpy(s->record, a->ranges, sizeof a->ranges);
            s->record_count = a->range_count;
            s->plan.layers = edge_range(s, 0) ? edge_range(s, 0)->layers : 0;
            carry_out(s, a->hidden, TD_MIN(a->kv, a->hidden));
        } else if (!s->planned || s->sequence->record_count == 0) {
            plan_fresh(s);
        }
        return;
    }
    if (!s->merged && a->epoch == s->epoch) {
        uint32_t begin = plan_border(a->plan_begin, s->prompt, KV_BLOCK_TOKENS);
        uint32_t count =
            plan_merge(s->before, s->before_count, s->plan.ranges, s->plan.range_count, begin, merged);
        if (count > 0)
            memcpy(s->record, merged, count * sizeof *merged), s->record_count = count;
        s->merged = true;
    }
    s->record_count = plan_without_kv(s->record, s->record_count, a->refill_begin, a->refill_end);
    hear_left(s, a);
    estimates_cloud(&s->estimates, (uint32_t)s->cloud_ns, 0);
    reconsider(s);
}

/* ---- the link ---- */

static void look_at_link(struct sim *s)
{
    struct link_stats stats = {.rate_bytes_per_s = (uint64_t)(s->rate * 1e6),
                               .min_rtt_us = 2 * s->delay_us,
                               .bulk_sent_size = s->sent_size,
                               .bulk_acked_size = s->acked_size};
    estimates_link(&s->estimates, &stats, s->now_us);
}

static void link_works(struct sim *s)
{
    while (s->path.count && s->path.items[s->path.head]->arrives_us <= s->now_us) {
        struct message *m = pop(&s->path);
        if (m->kind == ROWS || m->kind == PIECE)
            s->arrived_size += (uint64_t)m->size;
        push(s, &s->inbox, m);
        free(m);
    }
    s->acked_size = s->arrived_size; /* the link acknowledges by itself */
    while (s->inbox.count && s->job.kind == JOB_NONE) {
        struct message *m = pop(&s->inbox);
        if (!s->dead || m->kind == OPEN_FRAME)
            take(s, m);
        free(m);
    }
    double window = TD_MAX(s->rate * ((double)(2 * s->delay_us) + 40e3), 4000);
    while (s->up && s->link_free_us <= s->now_us) {
        bool full = (double)(s->sent_size - s->acked_size) > window;
        struct queue_of *q = s->control.count ? &s->control
                             : full           ? NULL
                             : s->rows.count  ? &s->rows
                                              : &s->pieces;
        if (!q || !q->count)
            return;
        struct message *m = pop(q);
        s->link_free_us = s->now_us + 1 + (uint64_t)(m->size / s->rate);
        m->arrives_us = s->link_free_us + s->delay_us;
        if (m->kind == ROWS || m->kind == PIECE)
            s->sent_size += (uint64_t)m->size;
        push(s, &s->path, m);
        free(m);
    }
}

/* A new stream, with what the client has; the cloud's earlier one is fenced. */
static void open_stream(struct sim *s)
{
    s->left = s->given_up = s->acked = s->listens = false;
    s->resumed_epoch = 0;
    s->confirmed = s->held;
    push(
        s, &s->control,
        &(struct message){
            .kind = OPEN_FRAME, .first = ++s->stream, .count = s->held, .size = 4.0 * (s->prompt + s->held)});
}

/* The cloud's tokens reach the client, or differ from what it has. */
static void hear_tokens(struct sim *s)
{
    const struct sequence *q = s->sequence;
    if (!s->up || !s->listens || reply_receive(s, q->ids + q->prompt_count, sequence_reply_count(q)))
        return;
    s->conflicts++;
    run_stop(s);
    s->epoch++;
    s->sending = s->listens = false;
    s->chunk_us = NEVER;
    void_queues(s);
    if (s->held == REPLY)
        s->over = true; /* the client has all of it */
    else
        open_stream(s);
}

static void break_link(struct sim *s)
{
    s->breaks++;
    s->up = s->acked = s->listens = false;
    s->away_us = s->now_us;
    clear(&s->path);
    clear(&s->inbox);
    clear(&s->control);
    void_queues(s);
    while (s->answer_count) {
        free(s->answers[s->answer_head]);
        s->answer_head = (s->answer_head + 1) % QUEUE_MAX;
        s->answer_count--;
    }
    s->sending = false;
    s->chunk_us = NEVER;
    s->sent_size = s->acked_size = s->arrived_size = 0;
    estimates_link_lost(&s->estimates);
    s->link_back_us = s->now_us + 50 * MS + pick(s, 20) * 100 * MS;
    if (pick(s, 3) == 0) {
        s->dead = true;
        s->disturbed |= !s->is_settled && s->held > 0; /* one token alone: its KV was still open */
        new_sequence(s, s->held);                      /* when it is opened again */
        s->dead = true;
    } else if (sequence_wants_data(s->sequence, &model)) {
        s->sequence->away = true;
        s->sequence->upload_us = s->now_us;
    }
}

static void link_returns(struct sim *s)
{
    s->up = true;
    s->link_back_us = s->away_us = NEVER;
    s->link_free_us = s->now_us;
    open_stream(s);
}

/* ---- a run ---- */

static void change_world(struct sim *s)
{
    static const double mbits[] = {0.3, 1, 3, 10, 30, 100, 1000};
    uint64_t dice = pick(s, 10);
    s->change_us = s->now_us + pick(s, 1000) * MS;
    if (dice < 4)
        s->rate = mbits[pick(s, TD_COUNT(mbits))] / 8;
    else if (dice < 6)
        s->link_free_us = TD_MAX(s->link_free_us, s->now_us) + pick(s, 400) * MS; /* lost packets */
    else if (dice < 8)
        s->edge_ns = (double)(1 + pick(s, 100)) * 10000;
    else
        s->cloud_ns = (double)(1 + pick(s, 100)) * 10000;
}

static void begin(struct sim *s, uint64_t seed)
{
    *s = (struct sim){.seed = seed, .random = seed * 77 + 1};
    s->prompt = 1 + (uint32_t)pick(s, pick(s, 3) ? TOKENS_MAX : 100);
    s->row_size = 100.0 + (double)pick(s, 3000);
    s->kv_size = 50.0 + (double)pick(s, 1000);
    s->delay_us = pick(s, 50) * MS;
    s->rate = 1 + (double)pick(s, 20);
    s->edge_ns = (double)(1 + pick(s, 100)) * 10000;
    s->cloud_ns = (double)(1 + pick(s, 100)) * 10000;
    s->change_us = pick(s, 4) ? pick(s, 1000) * MS : NEVER;
    s->break_us = pick(s, 2) ? pick(s, 2000) * MS : NEVER;
    s->chunk_us = s->link_back_us = s->run_us = s->away_us = NEVER;
    s->local = pick(s, 2) ? LOCAL_OFF : (enum planner_local)pick(s, 3);
    s->continues = pick(s, 2);
    s->others = pick(s, 4) == 0;
    s->dead = true;
    s->epoch = 1;
    new_sequence(s, 0);
    s->dead = true;
    link_returns(s);
}

static uint64_t next_us(const struct sim *s)
{
    uint64_t next = TD_MIN(TD_MIN(s->change_us, s->break_us), TD_MIN(s->chunk_us, s->link_back_us));
    next = TD_MIN(TD_MIN(next, s->tick_us), s->run_us);
    if (s->continues && !s->offline && s->away_us != NEVER)
        next = TD_MIN(next, s->away_us + AWAY_US);
    if (!s->dead)
        next = TD_MIN(next, s->job_us);
    if (s->path.count)
        next = TD_MIN(next, s->path.items[s->path.head]->arrives_us);
    if (s->up && s->link_free_us > s->now_us)
        next = TD_MIN(next, s->link_free_us);
    if (s->answer_count)
        next = TD_MIN(next, s->answers[s->answer_head]->arrives_us);
    return TD_MAX(next, s->now_us + 1);
}

static void act(struct sim *s)
{
    if (s->now_us >= s->change_us)
        change_world(s);
    if (s->now_us >= s->break_us) {
        s->break_us = pick(s, 4) && s->breaks < 5 ? s->now_us + pick(s, 2000) * MS : NEVER;
        if (s->up)
            break_link(s);
    }
    if (s->now_us >= s->link_back_us)
        link_returns(s);
    if (!s->dead && s->now_us >= s->job_us)
        finish_job(s);
    link_works(s);
    while (s->answer_count && s->answers[s->answer_head]->arrives_us <= s->now_us) {
        struct answer *a = s->answers[s->answer_head];
        s->answer_head = (s->answer_head + 1) % QUEUE_MAX;
        s->answer_count--;
        look_at_link(s);
        if (a->stream == s->stream)
            hear(s, a);
        free(a);
    }
    edge_works(s);
    run_step(s);
    if (s->now_us >= s->tick_us) {
        s->tick_us = s->now_us + 50 * MS;
        look_at_link(s);
        reconsider(s);
    }
    link_works(s);
    next_job(s);
}

/* Somebody still waits: a client for its reply, or a device for a cloud that comes behind. */
static bool goes_on(const struct sim *s)
{
    bool behind = s->up && !s->over && (s->dead || sequence_reply_count(s->sequence) < REPLY);
    return s->held < REPLY || behind;
}

struct totals {
    uint32_t leaves, breaks, impatient, resumed, refused, made, made_offline, handed_back, replaced,
        conflicts;
};

static void run(uint64_t seed, struct totals *t)
{
    static struct sim s;
    begin(&s, seed);
    while (goes_on(&s)) {
        act(&s);
        s.now_us = next_us(&s);
        if (s.now_us > END_US)
            fail(&s, "no end");
    }
    reply_check(&s);
    t->leaves += s.leaves, t->breaks += s.breaks, t->impatient += s.impatient;
    t->resumed += s.resumed, t->refused += s.refused;
    t->made += s.made, t->made_offline += s.made_offline, t->handed_back += s.handed_back;
    t->replaced += s.replaced, t->conflicts += s.conflicts;
    s.up = true;
    break_link(&s);
    sequence_free(s.sequence);
}

int main(int argc, char **argv)
{
    const char *wanted = getenv("TANDEM_SIM_RUNS");
    uint64_t runs = wanted ? strtoull(wanted, NULL, 10) : RUNS_DEFAULT, seed = 1;
    struct totals t = {0};
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--runs") == 0)
            runs = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            seed = strtoull(argv[i + 1], NULL, 10);
    }
    if (crypto_init() < 0)
        return 1;
    for (uint64_t i = 0; i < runs; i++)
        run(seed + i, &t);
    printf(
        "%llu runs: %u breaks, %u plans left to the cloud, %u taken by it, %u taken up again (%u too late)\n",
        (unsigned long long)runs, t.breaks, t.leaves, t.impatient, t.resumed, t.refused);
    printf("devices made %u tokens, %u of them without the cloud, and handed back %u times; %u generations "
           "gave way, %u "
           "conflicts\n",
           t.made, t.made_offline, t.handed_back, t.replaced, t.conflicts);
    return 0;
}
