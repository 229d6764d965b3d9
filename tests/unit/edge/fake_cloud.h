/* fake_cloud: a cloud node that computes nothing: it greets, acknowledges, counts what comes, and sends a reply that everybody knows in advance
 * (token i is fake_token(i)). Knobs say how it behaves, records say what it saw; both belong to the loop's thread: look at them through
 * on_loop(). The loop has a thread of its own here, so that a test can wait. */
#ifndef TANDEM_TESTS_FAKE_CLOUD_H
#define TANDEM_TESTS_FAKE_CLOUD_H
#include "protocol/generation.h"
#include "protocol/link.h"
#include "protocol/net.h"
#include "shared/kv_seal.h"
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <time.h>

#define FAKE_OPENS    16
#define FAKE_PLANS    16
#define FAKE_CONNS    16
#define FAKE_REPLY    8 /* tokens, unless a test wants more */
#define FAKE_TICK_US  500
#define FAKE_RETRY_MS 700

/* How it answers a FETCH. */
enum fake_fetch {
    FETCH_HONEST,
    FETCH_BUSY,       /* once */
    FETCH_HOLDS,      /* it does not, until this changes */
    FETCH_LEAVES_OUT, /* the first block */
    FETCH_REFUSES,
    FETCH_OTHER_BLOCK, /* the rest breaks the rules */
    FETCH_TWICE,
    FETCH_WRONG_ORDER,
    FETCH_PLAIN,
    FETCH_MISLABELLED,
    FETCH_DAMAGED,
    FETCH_OTHER_SHAPE,
    FETCH_HALF_A_BLOCK,
    FETCH_OTHER_FRAME,
    FETCH_KINDS
};

struct fake_open {
    uint8_t request_id[16];
    uint64_t attempt;
    uint32_t prompt_count, held_count, conversation_length, accept;
    bool no_cache, is_private;
    uint8_t payload[1024]; /* as it came */
    size_t payload_size;
    char conversation[LIMIT_NAME_SIZE + 1];
    int32_t ids[1024];
    uint32_t ids_count;
};
struct fake_plan {
    uint32_t epoch, range_count, rows_patience_ms;
    bool resumes;
    struct {
        uint32_t first_token, count, layers, codec, hidden_dtype;
    } ranges[4];
};
struct fake_conn {
    struct fake_cloud *cloud;
    struct ws_conn *ws;
    struct link *link;
    uint32_t stream; /* the last one opened, 0: none */
    uint64_t attempt;
    uint32_t next, rows_until; /* next reply token; HIDDEN rows below this have come */
    bool generating, finished, owes_welcome;
    uint32_t keep_count;
    uint32_t fetch_stream; /* 0: none; else it ends when all has left */
    Tandem__Fetch fetch;
    bool fetch_answered;
};
struct fake_cloud {
    struct net_loop *loop;
    pthread_t thread;
    struct net_timer *timer;
    struct ws_handler handler;
    uint16_t port;
    struct fake_conn *conns[FAKE_CONNS];

    /* knobs */
    uint8_t layout[32], principal_key[32];
    uint32_t context_max, codec_mask, hidden_mask;
    int refuse_code;
    uint32_t cached_tokens, token_count, layer_ns;
    uint32_t done_cached, done_read; /* of DONE; 0, 0: it has no timings */
    bool need_ids, resumed, silent;  /* silent: no tokens */
    int32_t same_token;              /* every token is this one; 0: fake_token */
    /* with resumed: the edge is to go on behind the first block of its plan, which has one range of `wanted_layers` */
    bool plan_wanted;
    uint32_t wanted_layers, wanted_epoch;
    uint32_t wanted_beyond; /* … which reaches so many tokens beyond the prompt */
    bool wanted_deeper;     /* … which has two ranges, the second of one layer more */
    bool hold_done;         /* no DONE for a reply that ended at the edge */
    uint32_t features;      /* of WELCOME */
    uint32_t need_from;     /* NEED from this token on, once, before the first token; 0: none */
    bool need_late;         /* … and before it one of the epoch before: a plan was on its way then */
    bool wait_for_rows;     /* no token before the rows of the whole prompt are here */
    bool wait_for_plan;     /* … before each OPEN has been followed by a plan */
    uint32_t hold_at;       /* reply tokens after which it is silent; 0: it goes on */
    uint32_t cut_after;     /* reply tokens after which the connection is cut, once */
    unsigned cut_at;        /* a frame type with which the connection is cut, once */
    bool away, away_then;   /* nobody is welcomed until it ends; from that cut on */
    int error_code;         /* an ERROR instead of OPEN_ACK, once */
    uint32_t error_behind;  /* … not before so many OPENs have come */
    uint32_t left_from;     /* with the first rows: from here on it waits for no more; then tokens come */
    bool error_retry;       /* … after FAKE_RETRY_MS */
    uint32_t
        leaves; /* plans of which it waits for no more rows when the first come, and goes on from there by itself */
    bool seals; /* it answers FETCH, of a model of this shape, in this way */
    struct kv_shape shape;
    enum fake_fetch fetch_answer;
    uint8_t seal_master;     /* whose key it has */
    uint8_t numerics;        /* of WELCOME; 0: a CPU's */
    uint8_t sealed_numerics; /* that the pieces claim; 0: its own */
    bool says_again; /* … and it says so once more when it has been helped again: on its way when it was */

    /* records */
    uint64_t error_us, opened_us; /* of the last ERROR, of the last OPEN */
    uint32_t connections, open_count, plan_count, generate_count, cancel_count;
    struct fake_open opens[FAKE_OPENS];
    struct fake_plan plans[FAKE_PLANS];
    uint32_t rows, rows_begin, row_layer, row_dtype, pieces, piece_tokens; /* of the latest plan's epoch */
    uint32_t fetch_count, fetch_blocks,
        fetch_cancels;               /* FETCHes, blocks that they named, and how often one was given up */
    uint32_t fetch_first, fetch_ids; /* of the last one */
    uint32_t sealed_pieces;          /* that came back just as they were given, of the latest plan */
    uint32_t token_count_max, done_count;
    float temperature;
    bool logprobs; /* wanted */
    uint64_t seed;
    bool cancel_finished;
    uint32_t cancel_keep;
    char token[LIMIT_TOKEN_SIZE + 1];
    uint32_t layers_held;
};

static inline int32_t fake_token(uint32_t index)
{
    return (int32_t)(10 + index * 7 % 60);
}

#define FAKE_TOPS 3u

static inline float fake_logprob(uint32_t index, uint32_t rank)
{
    return -(float)(index + 1) / 64 - (float)rank;
}

static inline void fake_flush(struct fake_conn *c)
{
    ws_want_write(c->ws);
}

static inline void fake_send(struct fake_conn *c, unsigned type, uint32_t stream, const ProtobufCMessage *m,
                             const void *data, size_t size)
{
    link_send(c->link, type, stream, m, data, size);
    fake_flush(c);
}

static inline void fake_welcome(struct fake_conn *c);

static inline struct kv_seal fake_seal(const struct fake_cloud *f)
{
    uint8_t master[CRYPTO_KEY_SIZE] = {f->seal_master};
    struct kv_seal seal;
    kv_seal_derive(master, &seal);
    return seal;
}

/* Piece i of a block, sealed, the same each time. malloc'ed. */
static inline struct span fake_sealed(const struct fake_cloud *f, uint32_t block, uint32_t i, uint8_t codec)
{
    static const uint8_t salt[KV_SEAL_SALT_SIZE] = {5};
    struct kv_block_id name = {{(uint8_t)block}};
    struct kv_seal seal = fake_seal(f);
    size_t count = kv_piece_values(&f->shape, KV_BLOCK_TOKENS),
           bound = kv_piece_bound(&f->shape, KV_BLOCK_TOKENS);
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&f->shape);
    uint16_t *values = malloc(count * sizeof *values);
    uint8_t *piece = malloc(bound), *sealed = malloc(bound + KV_SEAL_OVERHEAD);
    for (size_t j = 0; j < count; j++)
        values[j] = (uint16_t)(block * 300 + i * 30 + j % 29);
    struct kv_piece_head head = {
        .codec = KV_L0,
        .is_value = i % 2,
        .quality = {KV_L0, f->sealed_numerics ? f->sealed_numerics : KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0},
        .block_index = block,
        .token_count = KV_BLOCK_TOKENS,
        .layer = (uint16_t)(i / 2),
        .kv_head_count = (uint16_t)f->shape.kv_head_count,
        .head_dim = (uint16_t)f->shape.head_dim};
    int64_t size = kv_piece_encode(scratch, &head, values, piece, bound);
    if (size > 0 && codec == KV_SEALED)
        size = kv_seal_piece(&seal, salt, &name, (struct span){piece, (size_t)size}, sealed,
                             bound + KV_SEAL_OVERHEAD);
    else
        memcpy(sealed, piece, bound);
    if (size <= 0)
        abort();
    free(values);
    free(piece);
    kv_codec_scratch_destroy(scratch);
    return (struct span){sealed, (size_t)size};
}

static inline void fake_give(struct fake_conn *c, uint32_t as_block, uint32_t as_i, struct span piece)
{
    Tandem__KvBlock m = TANDEM__KV_BLOCK__INIT;
    m.block_index = as_block;
    m.layer = as_i / 2;
    m.is_value = as_i % 2;
    if (link_send_bulk(c->link, FRAME_KV_BLOCK, c->fetch_stream, &m.base, 0, (uint8_t *)(uintptr_t)piece.data,
                       piece.size) < 0)
        free((void *)(uintptr_t)piece.data);
}

static inline void fake_give_block(struct fake_conn *c, uint32_t block)
{
    struct fake_cloud *f = c->cloud;
    enum fake_fetch how = f->fetch_answer;
    uint32_t pieces = 2 * f->shape.layer_count;
    bool half = how == FETCH_HALF_A_BLOCK && block + 1 == c->fetch.block_index + c->fetch.block_count;
    for (uint32_t i = 0; i < pieces - half; i++) {
        uint32_t of = how == FETCH_MISLABELLED ? block + 1 : block,
                 which = how == FETCH_WRONG_ORDER ? i ^ 1 : i;
        struct fake_cloud other = *f;
        other.shape.head_dim += how == FETCH_OTHER_SHAPE ? 8 : 0;
        struct span piece = fake_sealed(&other, of, which, how == FETCH_PLAIN ? KV_L0 : KV_SEALED);
        if (how == FETCH_DAMAGED)
            ((uint8_t *)(uintptr_t)piece.data)[piece.size - 1] ^= 1;
        fake_give(c, block, which, piece);
    }
}

static inline void fake_error(struct fake_conn *c, uint32_t stream, uint32_t code, bool retry)
{
    Tandem__Error e = TANDEM__ERROR__INIT;
    e.code = code;
    e.retry = retry;
    e.retry_after_ms = retry ? 1 : 0;
    link_send(c->link, FRAME_ERROR, stream, &e.base, NULL, 0);
    ws_want_write(c->ws);
}

static inline void fake_answer_fetch(struct fake_conn *c)
{
    struct fake_cloud *f = c->cloud;
    uint32_t first = c->fetch.block_index, end = first + c->fetch.block_count;
    c->fetch_answered = true;
    if (f->fetch_answer == FETCH_BUSY || f->fetch_answer == FETCH_REFUSES) {
        bool retry = f->fetch_answer == FETCH_BUSY;
        f->fetch_answer = FETCH_HONEST;
        fake_error(c, c->fetch_stream, retry ? TD_ERR_BUSY : TD_ERR_UNSUPPORTED, retry);
        c->fetch_stream = 0;
        return;
    }
    if (f->fetch_answer == FETCH_OTHER_FRAME) {
        uint8_t id[4] = {1};
        link_send(c->link, FRAME_TOKEN, c->fetch_stream, NULL, id, sizeof id);
    }
    if (f->fetch_answer == FETCH_OTHER_BLOCK)
        fake_give_block(c, end);
    for (uint32_t block = first + (f->fetch_answer == FETCH_LEAVES_OUT); block < end; block++)
        fake_give_block(c, block);
    if (f->fetch_answer == FETCH_TWICE)
        fake_give_block(c, end - 1);
    ws_want_write(c->ws);
}

static inline void fake_on_fetch(struct fake_conn *c, const struct wire_frame *frame)
{
    struct fake_cloud *f = c->cloud;
    f->fetch_count++;
    f->fetch_blocks += frame->fetch->block_count;
    f->fetch_first = frame->fetch->block_index;
    f->fetch_ids = (uint32_t)(frame->payload.size / 4);
    c->fetch_stream = frame->stream;
    c->fetch = *frame->fetch;
    c->fetch_answered = false;
    if (f->fetch_answer != FETCH_HOLDS)
        fake_answer_fetch(c);
}

/* DONE would overtake what is to be sent before it. */
static inline void fake_end_fetch(struct fake_conn *c)
{
    struct link_stats stats;
    link_stats(c->link, &stats);
    if (!c->fetch_stream || stats.bulk_queued_size > 0 || !c->fetch_answered)
        return;
    uint32_t stream = c->fetch_stream;
    c->fetch_stream = 0;
    link_send(c->link, FRAME_DONE, stream, NULL, NULL, 0);
}

static inline void fake_hello(struct fake_conn *c, const Tandem__Hello *m)
{
    struct fake_cloud *f = c->cloud;
    snprintf(f->token, sizeof f->token, "%s", m->token);
    f->layers_held = m->layers_held;
    if (f->refuse_code) {
        static char text[] = "token not known";
        Tandem__Error e = TANDEM__ERROR__INIT;
        e.code = (uint32_t)f->refuse_code;
        e.text = text;
        fake_send(c, FRAME_ERROR, 0, &e.base, NULL, 0);
        return;
    }
    c->owes_welcome = f->away;
    if (!f->away)
        fake_welcome(c);
}

static inline void fake_welcome(struct fake_conn *c)
{
    static char name[] = "fake";
    struct fake_cloud *f = c->cloud;
    c->owes_welcome = false;
    Tandem__Version v = TANDEM__VERSION__INIT;
    v.protocol = WIRE_PROTOCOL;
    v.layout = (ProtobufCBinaryData){32, f->layout};
    v.numerics = f->numerics ? f->numerics : KV_NUMERICS_CPU_V1;
    Tandem__Welcome w = TANDEM__WELCOME__INIT;
    w.version = &v;
    w.tenant = w.principal = w.node = name;
    w.principal_key = (ProtobufCBinaryData){32, f->principal_key};
    w.context_max = f->context_max;
    w.codec_mask = f->codec_mask;
    w.hidden_mask = f->hidden_mask;
    w.features = f->features;
    struct kv_seal seal = fake_seal(f);
    if (f->seals)
        w.seal = (ProtobufCBinaryData){sizeof seal.tag, seal.tag};
    fake_send(c, FRAME_WELCOME, 0, &w.base, NULL, 0);
}

static inline void fake_on_open(struct fake_conn *c, const struct wire_frame *frame)
{
    struct fake_cloud *f = c->cloud;
    const Tandem__Open *m = frame->open;
    struct fake_open *o = &f->opens[f->open_count++ % FAKE_OPENS];
    f->opened_us = clock_mono_us();
    memcpy(o->request_id, m->request_id.data, 16);
    o->attempt = m->attempt;
    o->prompt_count = m->prompt_count;
    o->held_count = m->held_count;
    o->conversation_length = m->conversation_length;
    o->accept = m->accept;
    o->no_cache = m->no_cache;
    o->is_private = m->private_prompt;
    o->payload_size = frame->payload.size;
    memcpy(o->payload, frame->payload.data, TD_MIN(frame->payload.size, sizeof o->payload));
    snprintf(o->conversation, sizeof o->conversation, "%s", m->conversation);
    o->ids_count = (uint32_t)(frame->payload.size / 4);
    for (uint32_t i = 0; i < o->ids_count && i < TD_COUNT(o->ids); i++)
        o->ids[i] = (int32_t)load_le32(frame->payload.data + 4 * i);
    c->stream = frame->stream;
    c->attempt = m->attempt;
    c->next = m->held_count;
    c->generating = c->finished = false;
    c->rows_until = 0;
    f->rows = f->pieces = f->piece_tokens = 0;
    if (f->error_code && f->open_count > f->error_behind) {
        Tandem__Error e = TANDEM__ERROR__INIT;
        e.code = (uint32_t)f->error_code;
        e.retry = f->error_retry;
        e.retry_after_ms = f->error_retry ? FAKE_RETRY_MS : 0;
        f->error_code = 0;
        f->error_us = clock_mono_us();
        fake_send(c, FRAME_ERROR, frame->stream, &e.base, NULL, 0);
        c->stream = 0;
        return;
    }
    Tandem__OpenAck ack = TANDEM__OPEN_ACK__INIT;
    ack.attempt = m->attempt;
    ack.need_ids = f->need_ids && m->conversation_length > 0;
    ack.resumed = f->resumed;
    ack.layer_ns = f->layer_ns;
    Tandem__Range range = TANDEM__RANGE__INIT, deeper, *ranges[] = {&range, &deeper};
    if (f->resumed && f->plan_wanted && f->open_count > 1) {
        range.count = m->prompt_count + f->wanted_beyond;
        range.layers = f->wanted_layers;
        range.codec = KV_L1;
        range.hidden_dtype = HIDDEN_INT8;
        ack.plan_wanted = true;
        ack.epoch = f->wanted_epoch;
        ack.hidden_tokens = ack.kv_tokens = KV_BLOCK_TOKENS;
        deeper = range;
        if (f->wanted_deeper) {
            range.count = 2 * KV_BLOCK_TOKENS;
            deeper.first_token = range.count;
            deeper.count -= range.count;
            deeper.layers++;
        }
        ack.n_ranges = 1 + f->wanted_deeper;
        ack.ranges = ranges;
    }
    ack.cached_tokens = ack.cached_memory = m->no_cache ? 0 : f->cached_tokens;
    fake_send(c, FRAME_OPEN_ACK, frame->stream, &ack.base, NULL, 0);
    if (ack.need_ids)
        c->stream = 0;
}

static inline void fake_plan(struct fake_cloud *f, const Tandem__Plan *m)
{
    struct fake_plan *p = &f->plans[f->plan_count++ % FAKE_PLANS];
    p->epoch = m->epoch;
    p->range_count = (uint32_t)m->n_ranges;
    p->rows_patience_ms = m->rows_patience_ms;
    p->resumes = m->resumes;
    for (size_t i = 0; i < m->n_ranges && i < TD_COUNT(p->ranges); i++) {
        p->ranges[i].first_token = m->ranges[i]->first_token;
        p->ranges[i].count = m->ranges[i]->count;
        p->ranges[i].layers = m->ranges[i]->layers;
        p->ranges[i].codec = m->ranges[i]->codec;
        p->ranges[i].hidden_dtype = m->ranges[i]->hidden_dtype;
    }
    f->rows = f->pieces = f->piece_tokens = f->sealed_pieces = 0;
}

static inline uint32_t fake_epoch(const struct fake_cloud *f)
{
    return f->plan_count ? f->plans[(f->plan_count - 1) % FAKE_PLANS].epoch : 0;
}

static inline void fake_cut(struct fake_conn *c)
{
    c->cloud->away |= c->cloud->away_then;
    ws_close(c->ws, "cut");
}

/* Everything from this token on is its own, under this plan. */
static inline void fake_leave(struct fake_conn *c, uint32_t epoch, uint32_t from)
{
    Tandem__Ingested m = TANDEM__INGESTED__INIT;
    m.epoch = epoch;
    m.left_end = m.hidden_tokens = m.kv_tokens = c->cloud->opens[0].prompt_count;
    m.left_begin = m.run_tokens = from;
    fake_send(c, FRAME_INGESTED, c->stream, &m.base, NULL, 0);
}

static inline int fake_on_frame(void *ctx, const struct wire_frame *frame)
{
    struct fake_conn *c = ctx;
    struct fake_cloud *f = c->cloud;
    if (f->cut_at && frame->type == f->cut_at) {
        f->cut_at = 0;
        fake_cut(c);
        return 0;
    }
    switch (frame->type) {
    case FRAME_HELLO:
        fake_hello(c, frame->hello);
        break;
    case FRAME_OPEN:
        fake_on_open(c, frame);
        break;
    case FRAME_PLAN:
        fake_plan(f, frame->plan);
        if (f->says_again && frame->plan->resumes)
            fake_leave(c, frame->plan->epoch - 1, 0);
        break;
    case FRAME_GENERATE:
        f->generate_count++;
        f->token_count_max = frame->generate->token_count_max;
        f->temperature = frame->generate->temperature;
        f->seed = frame->generate->seed;
        f->logprobs = frame->generate->logprobs;
        c->generating = true;
        break;
    case FRAME_FETCH:
        fake_on_fetch(c, frame);
        break;
    case FRAME_CANCEL:
        if (c->fetch_stream && frame->stream == c->fetch_stream) {
            c->fetch_stream = 0;
            f->fetch_cancels++;
            break;
        }
        f->cancel_count++;
        f->cancel_finished = frame->cancel->finished;
        f->cancel_keep = frame->cancel->keep_count;
        if (frame->stream != c->stream) /* of one that another has followed */
            break;
        c->finished = frame->cancel->finished;
        c->keep_count = frame->cancel->keep_count;
        if (!c->finished)
            c->stream = 0;
        break;
    case FRAME_HIDDEN:
        if (f->left_from && f->silent) {
            Tandem__Ingested m = TANDEM__INGESTED__INIT;
            m.epoch = frame->hidden->epoch;
            m.hidden_tokens = m.kv_tokens = m.left_end = f->opens[0].prompt_count;
            m.left_begin = f->left_from;
            fake_send(c, FRAME_INGESTED, frame->stream, &m.base, NULL, 0);
            f->silent = false;
        }
        if (f->leaves > 0 && f->rows == 0 && frame->hidden->epoch == fake_epoch(f)) {
            f->leaves--;
            fake_leave(c, frame->hidden->epoch, frame->hidden->first_token);
        }
        if (frame->hidden->epoch == fake_epoch(f)) {
            f->rows_begin = f->rows ? f->rows_begin : frame->hidden->first_token;
            f->rows += frame->hidden->count;
            f->row_layer = frame->hidden->layer;
            f->row_dtype = frame->hidden->dtype;
            c->rows_until = frame->hidden->first_token + frame->hidden->count;
        }
        link_consumed(c->link, frame->stream, frame->payload.size);
        break;
    case FRAME_KV_BLOCK:
        if (frame->kv_block->epoch == fake_epoch(f))
            f->pieces++;
        if (f->seals && frame->kv_block->epoch == fake_epoch(f)) {
            const Tandem__KvBlock *m = frame->kv_block;
            struct span given = fake_sealed(f, m->block_index, m->layer * 2 + m->is_value, KV_SEALED);
            f->sealed_pieces +=
                given.size == frame->payload.size && memcmp(given.data, frame->payload.data, given.size) == 0;
            free((void *)(uintptr_t)given.data);
        }
        link_consumed(c->link, frame->stream, frame->payload.size);
        break;
    default:
        break;
    }
    return 0;
}

static inline int fake_ws_open(void *ctx, struct ws_conn *ws, const char *peer, void **user)
{
    struct fake_cloud *f = ctx;
    (void)peer;
    for (size_t i = 0; i < FAKE_CONNS; i++) {
        if (f->conns[i])
            continue;
        struct fake_conn *c = calloc(1, sizeof *c);
        struct link_config config = {.role = LINK_CLOUD, .on_frame = fake_on_frame, .ctx = c};
        c->cloud = f;
        c->ws = ws;
        c->link = link_create(&config, clock_mono_us());
        f->conns[i] = c;
        f->connections++;
        *user = c;
        return 0;
    }
    return -1;
}

static inline void fake_ws_message(void *user, const void *data, size_t size)
{
    struct fake_conn *c = user;
    link_receive(c->link, data, size, clock_mono_us());
    fake_flush(c);
}

static inline int64_t fake_ws_next(void *user, uint8_t *dst, size_t capacity)
{
    struct fake_conn *c = user;
    return link_next(c->link, dst, capacity, clock_mono_us());
}

static inline void fake_ws_closed(void *user, const char *why)
{
    struct fake_conn *c = user;
    (void)why;
    for (size_t i = 0; i < FAKE_CONNS; i++)
        if (c->cloud->conns[i] == c)
            c->cloud->conns[i] = NULL;
    link_destroy(c->link);
    free(c);
}

static inline void fake_done(struct fake_conn *c, uint32_t count)
{
    Tandem__Done d = TANDEM__DONE__INIT;
    d.attempt = c->attempt;
    d.finish = c->finished ? FINISH_CANCELLED : FINISH_STOP;
    d.completion_tokens = count;
    Tandem__Timings timings = TANDEM__TIMINGS__INIT;
    timings.read_tokens = c->cloud->done_read;
    d.cached_tokens = c->cloud->done_cached;
    d.timings = c->cloud->done_cached || c->cloud->done_read ? &timings : NULL;
    uint32_t stream = c->stream;
    c->stream = 0;
    c->cloud->done_count++;
    fake_send(c, FRAME_DONE, stream, &d.base, NULL, 0);
}

/* One token a tick for each connection's stream. */
static inline void fake_step(struct fake_conn *c)
{
    struct fake_cloud *f = c->cloud;
    if (c->owes_welcome && !f->away)
        fake_welcome(c);
    fake_end_fetch(c);
    if (!c->stream || !c->generating)
        return;
    if (c->finished) {
        if (!f->hold_done)
            fake_done(c, c->keep_count);
        return;
    }
    uint32_t prompt = f->opens[(f->open_count - 1) % FAKE_OPENS].prompt_count;
    if (f->need_from && c->rows_until == prompt) {
        Tandem__Need need = TANDEM__NEED__INIT;
        need.epoch = fake_epoch(f) - (uint32_t)f->need_late;
        need.first_token = f->need_from;
        f->need_from = f->need_late ? f->need_from : 0;
        f->need_late = false;
        c->rows_until = f->need_from ? prompt : 0;
        fake_send(c, FRAME_NEED, c->stream, &need.base, NULL, 0);
        return;
    }
    if (f->silent || (f->hold_at && c->next >= f->hold_at) ||
        (f->wait_for_rows && !f->resumed && c->rows_until < prompt) ||
        (f->wait_for_plan && f->plan_count < f->open_count))
        return;
    if (f->cut_after && c->next == f->cut_after) {
        f->cut_after = 0;
        fake_cut(c);
        return;
    }
    if (c->next == f->token_count) {
        fake_done(c, c->next);
        return;
    }
    uint8_t id[4];
    Tandem__Token t = TANDEM__TOKEN__INIT;
    t.attempt = c->attempt;
    t.index = c->next;
    store_le32(id, (uint32_t)(f->same_token ? f->same_token : fake_token(c->next)));
    int32_t top_ids[FAKE_TOPS];
    float top_logprobs[FAKE_TOPS];
    Tandem__TokenLogprobs logprobs = TANDEM__TOKEN_LOGPROBS__INIT, *list = &logprobs;
    logprobs.logprob = fake_logprob(c->next, 0);
    for (uint32_t i = 0; i < FAKE_TOPS; i++) {
        top_ids[i] = fake_token(c->next + i);
        top_logprobs[i] = fake_logprob(c->next, i + 1);
    }
    logprobs.n_top_ids = logprobs.n_top_logprobs = FAKE_TOPS;
    logprobs.top_ids = top_ids, logprobs.top_logprobs = top_logprobs;
    t.n_logprobs = f->logprobs;
    t.logprobs = &list;
    c->next++;
    fake_send(c, FRAME_TOKEN, c->stream, &t.base, id, 4);
}

static inline void fake_tick(void *ctx)
{
    struct fake_cloud *f = ctx;
    for (size_t i = 0; i < FAKE_CONNS; i++)
        if (f->conns[i]) {
            fake_step(f->conns[i]);
            if (f->conns[i])
                fake_flush(f->conns[i]);
        }
    net_timer_start(f->timer, FAKE_TICK_US);
}

/* ---- the loop's thread ---- */

struct fake_order {
    void (*fn)(void *arg);
    void *arg;
    sem_t done;
};

static inline void fake_run_order(void *arg)
{
    struct fake_order *o = arg;
    o->fn(o->arg);
    sem_post(&o->done);
}

/* Run fn(arg) on the loop's thread and wait for it. */
static inline void on_loop(struct net_loop *loop, void (*fn)(void *arg), void *arg)
{
    struct fake_order o = {fn, arg, {{0}}};
    sem_init(&o.done, 0, 0);
    if (net_loop_post(loop, fake_run_order, &o) == 0)
        sem_wait(&o.done);
    sem_destroy(&o.done);
}

struct fake_question {
    bool (*fn)(void *arg);
    void *arg;
    bool answer;
};

static inline void fake_ask(void *arg)
{
    struct fake_question *q = arg;
    q->answer = q->fn(q->arg);
}

/* Does fn(arg), on the loop's thread, become true within a minute? Long, as it costs nothing when it does: the machine may be slow or busy. */
static inline bool comes_true(struct net_loop *loop, bool (*fn)(void *arg), void *arg)
{
    for (int i = 0; i < 30000; i++) {
        struct fake_question q = {fn, arg, false};
        on_loop(loop, fake_ask, &q);
        if (q.answer)
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    return false;
}

static inline void *fake_run(void *arg)
{
    net_loop_run(arg);
    return NULL;
}

/* Listens on a free port; the loop runs after fake_cloud_run. */
static inline int fake_cloud_make(struct fake_cloud *f, const uint8_t layout[32])
{
    *f = (struct fake_cloud){.features = WIRE_FEATURE_PRIVATE,
                             .context_max = 512,
                             .codec_mask = 0x8003,
                             .hidden_mask = 7,
                             .token_count = FAKE_REPLY};
    memcpy(f->layout, layout, 32);
    memset(f->principal_key, 7, sizeof f->principal_key);
    f->handler = (struct ws_handler){.on_open = fake_ws_open,
                                     .on_message = fake_ws_message,
                                     .next = fake_ws_next,
                                     .on_closed = fake_ws_closed,
                                     .ctx = f};
    struct net_listen listen = {.bind_address = "127.0.0.1", .ws = &f->handler};
    f->loop = net_loop_create(NULL);
    f->timer = f->loop ? net_timer_create(f->loop, fake_tick, f) : NULL;
    return f->timer ? net_listen(f->loop, &listen, &f->port, NULL) : -1;
}

static inline void fake_cloud_run(struct fake_cloud *f)
{
    net_timer_start(f->timer, FAKE_TICK_US);
    pthread_create(&f->thread, NULL, fake_run, f->loop);
}

/* The loop's end: what lives on it ends in between. */
static inline void fake_cloud_stop(struct fake_cloud *f)
{
    net_loop_stop(f->loop);
    pthread_join(f->thread, NULL);
}

static inline void fake_cloud_free(struct fake_cloud *f)
{
    net_loop_destroy(f->loop);
    net_timer_destroy(f->timer);
}

#endif
