/* engine_rig: what the engine's tests share: a tiny model with an engine on it that is turned by hand under a clock of its own, clients that
 * write down what they are told, a reference that knows nothing of engines (one sequence, one backend), and an edge in miniature that computes
 * [0, k) with a backend of its own and cuts the result into messages. */
#ifndef TANDEM_TESTS_CLOUD_ENGINE_RIG_H
#define TANDEM_TESTS_CLOUD_ENGINE_RIG_H
#include "cloud/engine_internal.h"
#include "device_twin.h"
#include "kernels/cuda/cuda.h"
#include "kernels/kv_layout.h"
#include "shared/tokenizer_internal.h"
#include "store/store_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#define RIG_TOKENS_MAX 1024
#define RIG_TURNS_MAX  60000 /* of one rig_until: then the test has failed */

static _Atomic uint64_t rig_now = 1000000; /* loading threads look at it too */
static inline uint64_t rig_clock(void)
{
    return rig_now;
}

/* --- the engine ----------------------------------------------------------------------------------- */

struct rig_options {
    const char *model; /* NULL: llama-gqa-untied */
    uint32_t pages, token_budget, sequences_max, waiting_max, context_max;
    const char *store; /* a directory; NULL: memory only */
    uint64_t store_ram;
    struct io *io;    /* NULL: io_posix */
    const char *keys; /* a directory that rigs share; NULL: the store's */
    const struct tier_redis_config *remote;
    bool device;            /* the backend is one: device_twin.h */
    bool gpu;               /* the backend is a real one, deterministic, ... */
    enum kv_dtype kv_dtype; /* ... with these pages */
    uint32_t swap_pages; /* of its pages that host memory has room for; it is there from the beginning, ... */
    bool swap_late;      /* ... or is taken when it is needed */
    bool end_tokens;     /* let end tokens end a reply; random models draw them at random */
};

struct rig {
    struct rig_options options;
    struct gguf *file;
    struct model *model;
    struct tokenizer *tokenizer;
    struct store *store;
    struct tiers *tiers;
    struct engine *engine;
};

/* Of every rig. */
static inline const struct kv_seal *rig_seal(void)
{
    static struct kv_seal seal;
    static const uint8_t master[CRYPTO_KEY_SIZE] = {7, 7, 7};
    kv_seal_derive(master, &seal);
    return &seal;
}

static inline struct backend *rig_backend(const struct rig *r, uint32_t pages, uint32_t rows)
{
    struct td_error err = {0};
    struct backend *backend = NULL;
    struct backend_config config = {
        .page_count = pages, .layers_paged = r->model->params.layer_count, .threads = 1, .rows_max = rows};
    config.deterministic = r->options.gpu, config.kv_dtype = r->options.kv_dtype;
    int rc = r->options.gpu ? cuda_backend_create(r->model, &config, "cuda:0", &backend, &err)
                            : cpu_backend_create(r->model, &config, &backend, &err);
    if (rc < 0)
        fail_msg("%s", err.text);
    return backend;
}

static inline void rig_load(struct rig *r, const char *name)
{
    struct td_error err = {0};
    char path[512];
    snprintf(path, sizeof path, "%s/tiny/%s.gguf", TEST_DATA, name ? name : "llama-gqa-untied");
    if (gguf_open(path, &r->file, &err) || model_load(r->file, &r->model, &err) ||
        tokenizer_create(r->file, NULL, &r->tokenizer, &err))
        fail_msg("%s", err.text);
    memset(r->model->fingerprint, 0x5a, sizeof r->model->fingerprint); /* any will do */
}

/* A new folder, as mkdtemp makes it; in memory if possible: syncs of a busy disk take longer than the tests. */
static inline void rig_directory(char path[64])
{
    snprintf(path, 64, "%s/tandem-engine-XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    assert_non_null(mkdtemp(path));
}

static inline void rig_start_engine(struct rig *r)
{
    struct td_error err = {0};
    const struct rig_options *o = &r->options;
    uint32_t budget = o->token_budget ? o->token_budget : 256;
    if (o->store) {
        struct store_config config = {
            .directory = o->store, .segment_size = 4u << 20, .ballast_size = 4096, .keys_directory = o->keys};
        memset(config.master_key, 7, sizeof config.master_key);
        struct tiers_config tiers = {.ram_size = o->store_ram, .threads = 2, .remote = o->remote};
        struct store_env env = {.io = o->io ? o->io : &io_posix};
        if (store_open_with(&config, &env, &r->store, &err) < 0)
            fail_msg("%s", err.text);
        tiers.store = r->store;
        if (tiers_create(&tiers, &r->tiers, &err) < 0)
            fail_msg("%s", err.text);
    }
    struct kv_shape shape = model_kv_shape(r->model);
    struct backend *backend = rig_backend(r, o->pages ? o->pages : 64, budget);
    struct engine_config config = {.model = r->model,
                                   .backend = o->device ? twin_create(backend) : backend,
                                   .swap_size =
                                       kv_dtype_layer_size(o->kv_dtype, shape.kv_head_count, shape.head_dim) *
                                       shape.layer_count * o->swap_pages,
                                   .tiers = r->tiers,
                                   .seal = rig_seal(),
                                   .tokenizer = o->end_tokens ? r->tokenizer : NULL,
                                   .token_budget = budget,
                                   .sequences_max = o->sequences_max ? o->sequences_max : 20,
                                   .waiting_max = o->waiting_max,
                                   .context_max = o->context_max,
                                   .kv_stall_ms = 2000};
    if (engine_build(&config, &r->engine, &err) < 0)
        fail_msg("%s", err.text);
    r->engine->clock = rig_clock;
    if (r->engine->swap.blocks && !o->swap_late) {
        engine_swap_take_memory(r->engine);
        while (!atomic_load(&r->engine->swap.slabs_ended))
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
}

static inline void rig_stop_engine(struct rig *r)
{
    engine_destroy(r->engine);
    tiers_destroy(r->tiers);
    if (r->store)
        store_close(r->store);
    r->engine = NULL;
    r->tiers = NULL;
    r->store = NULL;
}

static inline struct rig *rig_open(struct rig_options options)
{
    struct rig *r = calloc(1, sizeof *r);
    r->options = options;
    assert_int_equal(crypto_init(), 0);
    rig_load(r, options.model);
    rig_start_engine(r);
    return r;
}

static inline void rig_close(struct rig *r)
{
    rig_stop_engine(r);
    tokenizer_destroy(r->tokenizer);
    model_free(r->model);
    gguf_close(r->file);
    free(r);
}

/* Until pieces have been decoded. */
static inline void rig_let_decode(const struct rig *r)
{
    for (int i = 0; ingest_is_busy(r->engine->ingest) && i < 1000000; i++)
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

/* Do threads read or write for the engine? A server that hangs is waited for by its deadline. */
static inline bool rig_is_helped(const struct rig *r)
{
    const struct engine *e = r->engine;
    return (e->loader && !r->options.remote && loader_busy(e->loader) > 0) ||
           (e->persist && !persist_is_idle(e->persist));
}

/* One turn; when there was nothing to do, a moment for the helper threads, and the clock moves on. Pieces are decoded first, and the clock hardly moves
 * while blocks are read or written: how fast that is must not decide what the engine sees. */
static inline void rig_turn(struct rig *r)
{
    rig_let_decode(r);
    bool ran = engine_turn(r->engine), helped = !ran && rig_is_helped(r);
    rig_now += helped ? 1 : 100;
    if (!ran)
        nanosleep(&(struct timespec){.tv_nsec = helped ? 500000 : 50000}, NULL);
}

#define rig_until(rig, condition)                                                                            \
    do {                                                                                                     \
        uint32_t turns_ = 0;                                                                                 \
        while (!(condition)) {                                                                               \
            if (++turns_ > RIG_TURNS_MAX)                                                                    \
                fail_msg("%s:%d: %s never came true", __FILE__, __LINE__, #condition);                       \
            rig_turn(rig);                                                                                   \
        }                                                                                                    \
    } while (0)

static inline struct engine_stats rig_stats(const struct rig *r)
{
    struct engine_stats stats;
    engine_stats(r->engine, &stats);
    return stats;
}

/* --- clients -------------------------------------------------------------------------------------- */

struct client {
    uint64_t sequence;
    bool opened, done, failed;
    struct engine_event open_event, done_event;
    struct engine_event ingested; /* the last */
    struct engine_event need;     /* the last */
    uint32_t need_count;
    uint64_t consumed_size, ingested_count;
    int fail_code;
    char fail_text[256];
    int32_t ids[RIG_TOKENS_MAX];
    struct sampled sampled[RIG_TOKENS_MAX];
    uint32_t count, first_index, sampled_count;
    int32_t done_ids[RIG_TOKENS_MAX];
    uint32_t events_after_end;
};

static inline void client_sink(void *ctx, const struct engine_event *event)
{
    struct client *c = ctx;
    assert_int_equal(event->sequence, c->sequence);
    c->events_after_end += c->done || c->failed;
    switch (event->type) {
    case ENGINE_OPENED:
        c->opened = true;
        c->open_event = *event;
        break;
    case ENGINE_INGESTED:
        c->ingested = *event;
        c->ingested_count++;
        c->consumed_size += event->ingested.consumed_size;
        break;
    case ENGINE_NEED:
        c->need = *event;
        c->need_count++;
        break;
    case ENGINE_TOKENS:
        if (c->count == 0)
            c->first_index = event->tokens.index;
        assert_int_equal(event->tokens.index, c->first_index + c->count); /* no gap, nothing twice */
        memcpy(c->ids + c->count, event->tokens.ids, event->tokens.count * sizeof *c->ids);
        if (event->tokens.sampled) {
            memcpy(c->sampled + c->count, event->tokens.sampled, event->tokens.count * sizeof *c->sampled);
            c->sampled_count += event->tokens.count;
        }
        c->count += event->tokens.count;
        break;
    case ENGINE_DONE:
        c->done = true;
        c->done_event = *event;
        memcpy(c->done_ids, event->done.ids, event->done.ids_count * sizeof *c->done_ids);
        break;
    case ENGINE_FAILED:
        c->failed = true;
        c->fail_code = event->failed.code;
        snprintf(c->fail_text, sizeof c->fail_text, "%s", event->failed.text);
        break;
    }
}

static inline void rig_ids(int32_t *ids, uint32_t count, uint32_t vocab_count, uint32_t seed)
{
    for (uint32_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (int32_t)((seed >> 8) % vocab_count);
    }
}

static inline struct engine_generate rig_greedy(uint32_t count)
{
    struct engine_generate g = {.token_count_max = count};
    sampler_defaults(&g.sampling);
    g.sampling.temperature = 0;
    return g;
}

static inline struct engine_generate rig_sampling(uint32_t count, uint64_t seed)
{
    struct engine_generate g = {.token_count_max = count};
    sampler_defaults(&g.sampling);
    g.sampling.seed = seed;
    return g;
}

/* An OPEN of `prompt_count` prompt and `held_count` reply tokens, by principal "ann" of tenant "acme". Each has a request id of its own. */
static inline struct engine_open client_open_of(struct client *c, const int32_t *ids, uint32_t prompt_count,
                                                uint32_t held_count)
{
    static uint64_t next_request = 1;
    struct engine_open open = {.tenant = "acme",
                               .principal = "ann",
                               .attempt = 1,
                               .prompt_count = prompt_count,
                               .held_count = held_count,
                               .accept = KV_ACCEPT_EXACT,
                               .sink = client_sink,
                               .sink_ctx = c};
    memset(open.shared_key, 1, sizeof open.shared_key);
    kv_principal_key(open.shared_key, open.principal, open.own_key);
    kv_seal_name_key(rig_seal(), open.tenant, open.principal, open.seal_key);
    store_le64(open.request_id, next_request++);
    open.ids = malloc((prompt_count + held_count + 1) * sizeof *open.ids);
    memcpy(open.ids, ids, (prompt_count + held_count) * sizeof *ids);
    return open;
}

static inline void client_send(struct rig *r, struct client *c, struct engine_open open)
{
    *c = (struct client){0};
    assert_int_equal(engine_open(r->engine, &open, &c->sequence), 0);
}

static inline void client_direct(struct rig *r, struct client *c, const int32_t *ids, uint32_t count,
                                 struct engine_generate generate)
{
    struct engine_open open = client_open_of(c, ids, count, 0);
    open.direct = true;
    open.generate = generate;
    client_send(r, c, open);
}

/* --- the reference -------------------------------------------------------------------------------- */

/* The reply that the model gives when nothing else is going on: one chunk, then token by token. unseen: ids that penalties do not know of. */
static inline void rig_reference_seen(const struct rig *r, const int32_t *prompt, uint32_t prompt_count,
                                      struct engine_generate generate, int32_t *reply, uint32_t unseen)
{
    const struct model_params *p = &r->model->params;
    uint32_t total = prompt_count + generate.token_count_max, page_count = sequence_blocks(total);
    struct backend *b = rig_backend(r, page_count, prompt_count);
    struct sampler_scratch *scratch = sampler_scratch_create(p->vocab_count);
    int32_t *ids = malloc(total * sizeof *ids);
    uint32_t *pages = malloc(page_count * sizeof *pages);
    float *logits = malloc(p->vocab_count * sizeof *logits);
    memcpy(ids, prompt, prompt_count * sizeof *ids);
    for (uint32_t i = 0; i < page_count; i++)
        pages[i] = page_count - 1 - i;
    for (uint32_t at = 0, count = prompt_count; count < total; at = count++) {
        struct batch_seq seq = {.layer_end = p->layer_count,
                                .position = at,
                                .row_count = count - at,
                                .ids = ids + at,
                                .logits = logits,
                                .logit_count = 1,
                                .pages = pages};
        struct sampled sampled;
        assert_int_equal(b->ops->forward(b, &(struct batch){&seq, 1}), 0);
        assert_int_equal(sampler_draw(&generate.sampling, logits, p->vocab_count, ids + unseen,
                                      count - unseen, prompt_count - unseen, scratch, &sampled),
                         0);
        ids[count] = reply[count - prompt_count] = sampled.id;
    }
    free(logits);
    free(pages);
    free(ids);
    sampler_scratch_destroy(scratch);
    b->ops->destroy(b);
}

static inline void rig_reference(const struct rig *r, const int32_t *prompt, uint32_t prompt_count,
                                 struct engine_generate generate, int32_t *reply)
{
    rig_reference_seen(r, prompt, prompt_count, generate, reply, 0);
}

static inline void assert_reply(const struct client *c, const int32_t *reply, uint32_t count)
{
    if (c->failed)
        fail_msg("failed: %s", c->fail_text);
    assert_true(c->done);
    assert_int_equal(c->count, count);
    for (uint32_t i = 0; i < count; i++)
        if (c->ids[i] != reply[i])
            fail_msg("token %u of the reply is %d, not %d", i, c->ids[i], reply[i]);
    assert_int_equal(c->done_event.done.completion_tokens, count);
    assert_int_equal(c->events_after_end, 0);
}

/* --- an edge -------------------------------------------------------------------------------------- */

struct rig_edge { /* [0, k) of a prompt, computed */
    const struct rig *rig;
    struct backend *backend;
    struct kv_codec_scratch *scratch;
    uint32_t count, layers, page_count;
    float *hidden;    /* [count][embd], behind layer k - 1 */
    uint32_t *pages;  /* identity */
    uint8_t numerics; /* that its pieces claim; 0: the cloud's */
};

static inline struct rig_edge rig_edge_compute(const struct rig *r, const int32_t *ids, uint32_t count,
                                               uint32_t layers)
{
    struct rig_edge edge = {.rig = r, .count = count, .layers = layers, .page_count = sequence_blocks(count)};
    struct kv_shape shape = model_kv_shape(r->model);
    edge.backend = rig_backend(r, edge.page_count, count);
    edge.scratch = kv_codec_scratch_create(&shape);
    edge.hidden = malloc((size_t)count * r->model->params.embd_size * sizeof(float));
    edge.pages = malloc(edge.page_count * sizeof *edge.pages);
    for (uint32_t i = 0; i < edge.page_count; i++)
        edge.pages[i] = i;
    struct batch_seq seq = {
        .layer_end = layers, .row_count = count, .ids = ids, .hidden_out = edge.hidden, .pages = edge.pages};
    assert_int_equal(edge.backend->ops->forward(edge.backend, &(struct batch){&seq, 1}), 0);
    return edge;
}

static inline void rig_edge_free(struct rig_edge *edge)
{
    edge->backend->ops->destroy(edge->backend);
    kv_codec_scratch_destroy(edge->scratch);
    free(edge->hidden);
    free(edge->pages);
}

/* Returns the wire size. */
static inline size_t rig_send_hidden(struct rig_edge *edge, struct client *c, uint32_t epoch, uint32_t first,
                                     uint32_t count, uint8_t dtype)
{
    uint32_t embd = edge->rig->model->params.embd_size;
    size_t size = hidden_wire_size(dtype, count, embd);
    uint8_t *payload = malloc(size);
    assert_int_equal(hidden_encode(dtype, edge->hidden + (size_t)first * embd, count, embd, payload, size),
                     0);
    assert_int_equal(engine_hidden(edge->rig->engine, c->sequence, epoch, first, count, edge->layers, dtype,
                                   payload, size),
                     0);
    return size;
}

/* One piece of block `block`: the tokens of [range_first, range_end) in it. malloc'ed. */
static inline uint8_t *rig_piece(struct rig_edge *edge, uint32_t block, uint32_t layer, bool is_value,
                                 uint8_t codec, uint32_t range_first, uint32_t range_end, size_t *size)
{
    struct kv_shape shape = model_kv_shape(edge->rig->model);
    uint32_t start = block * KV_BLOCK_TOKENS, first = TD_MAX(range_first, start) - start;
    uint32_t end = TD_MIN(range_end, start + KV_BLOCK_TOKENS) - start, count = end - first;
    uint16_t *kv[2], *cut = malloc(kv_piece_values(&shape, count) * sizeof *cut);
    for (int i = 0; i < 2; i++)
        kv[i] = malloc(kv_piece_values(&shape, end) * sizeof *kv[i]);
    assert_int_equal(edge->backend->ops->page_read(edge->backend, block, layer, end, kv[0], kv[1]), 0);
    for (uint32_t h = 0; h < shape.kv_head_count; h++)
        memcpy(cut + (size_t)h * count * shape.head_dim,
               kv[is_value] + ((size_t)h * end + first) * shape.head_dim,
               (size_t)count * shape.head_dim * sizeof *cut);
    struct kv_piece_head head = {.version = 1,
                                 .codec = codec,
                                 .is_value = is_value,
                                 .quality = {codec == KV_RAW ? KV_L0 : codec,
                                             edge->numerics ? edge->numerics : KV_NUMERICS_CPU_V1,
                                             KV_FROM_DEVICE, 0},
                                 .block_index = block,
                                 .first_token = (uint16_t)first,
                                 .token_count = (uint16_t)count,
                                 .layer = (uint16_t)layer,
                                 .kv_head_count = (uint16_t)shape.kv_head_count,
                                 .head_dim = (uint16_t)shape.head_dim};
    size_t capacity = kv_piece_bound(&shape, count);
    uint8_t *piece = malloc(capacity);
    int64_t rc = kv_piece_encode(edge->scratch, &head, cut, piece, capacity);
    assert_true(rc > 0);
    *size = (size_t)rc;
    free(kv[0]);
    free(kv[1]);
    free(cut);
    return piece;
}

/* All pieces of the blocks of [first, end). Returns the wire size. */
static inline size_t rig_send_kv(struct rig_edge *edge, struct client *c, uint32_t epoch, uint32_t first,
                                 uint32_t end, uint8_t codec)
{
    size_t total = 0;
    for (uint32_t block = first / KV_BLOCK_TOKENS; block < sequence_blocks(end); block++)
        for (uint32_t i = 0; i < edge->layers * 2; i++) {
            size_t size;
            uint8_t *piece = rig_piece(edge, block, i / 2, i % 2, codec, first, end, &size);
            assert_int_equal(engine_kv(edge->rig->engine, c->sequence, epoch, block, piece, size), 0);
            total += size;
        }
    return total;
}

#endif
