/* cloud_engine: tokens a second of the cloud's engine (scheduler, step, sampler, store) with many streams at once, on a model of a known shape with
 * random weights or on a file. No network: streams are opened as the direct API opens them.
 *
 * usage: cloud_engine [shape=llama-8b] [dtype=bf16] [model=FILE] [device=cuda:0] [streams=32] [prompt=512] [gen=128] [budget=512]
 *                     [temperature=0] [deterministic=1] [store=DIR] [pages=N] [swap=MIB] [rounds=1] [prompts=1] [pause=0] [host=1]
 *   host=1    the backend's drawing, pieces and swaps are not used: the engine as it is on a CPU
 *   rounds=2  every prompt once more: from the cache, from host memory, from the store or computed, whichever the engine chooses
 *   prompts=2 of so many lots, which take turns; pause=MS between rounds, in which what was made is stored
 * Prints one line a round: seconds until all first tokens were there, and tokens a second and milliseconds a step while all streams decode. */
#include "cloud/engine.h"
#include "kernels/bench_model.h"
#include "kernels/cuda/cuda.h"
#include "kernels/kv_layout.h"
#include "shared/crypto.h"
#include "store/tiers.h"
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define STREAMS_MAX 512

struct options {
    const char *shape, *dtype, *model, *device, *store;
    uint32_t streams, prompt, gen, budget, pages, swap_mib, rounds, prompts, pause_ms;
    double temperature;
    bool deterministic, host;
};

struct run {
    struct engine *engine;
    uint32_t streams, gen;
    atomic_uint first, done, failed; /* streams */
    atomic_uint tokens, cached;
    _Atomic uint64_t all_first_us, first_done_us, tokens_at_first, tokens_at_done;
    _Atomic uint64_t steps_at_first, steps_at_done;
};

static uint64_t steps_of(struct run *r)
{
    struct engine_stats stats;
    engine_stats(r->engine, &stats);
    return stats.steps;
}

static void on_event(void *ctx, const struct engine_event *event)
{
    struct run *r = ctx;
    if (event->type == ENGINE_TOKENS) {
        atomic_fetch_add(&r->tokens, event->tokens.count);
        if (event->tokens.index == 0 && atomic_fetch_add(&r->first, 1) + 1 == r->streams) {
            r->all_first_us = clock_mono_us();
            r->tokens_at_first = r->tokens;
            r->steps_at_first = steps_of(r);
        }
    } else if (event->type == ENGINE_DONE) {
        atomic_fetch_add(&r->cached, event->done.cached_tokens);
        if (r->done == 0) {
            r->first_done_us = clock_mono_us();
            r->tokens_at_done = r->tokens;
            r->steps_at_done = steps_of(r);
        }
        atomic_fetch_add(&r->done, 1); /* last: the other thread reads the rest then */
    } else if (event->type == ENGINE_FAILED) {
        fprintf(stderr, "a stream failed: %s\n", event->failed.text);
        atomic_fetch_add(&r->failed, 1);
    }
}

static void die(const char *what, const struct td_error *err)
{
    fprintf(stderr, "cloud_engine: %s: %s\n", what, err->text);
    exit(1);
}

static void open_stream(const struct options *o, struct run *r, const struct model *m, uint32_t round,
                        uint32_t i)
{
    struct engine_open open = {.tenant = "bench",
                               .principal = "bench",
                               .attempt = 1,
                               .prompt_count = o->prompt,
                               .accept = KV_ACCEPT_VISIBLE_LOSSLESS,
                               .direct = true,
                               .sink = on_event,
                               .sink_ctx = r};
    uint32_t state = 77 + i + STREAMS_MAX * (round % o->prompts);
    uint64_t sequence;
    store_le32(open.request_id, i + 1);
    store_le32(open.request_id + 4, round + 1);
    open.ids = malloc(o->prompt * sizeof *open.ids);
    for (uint32_t t = 0; t < o->prompt; t++) {
        state = state * 1664525u + 1013904223u;
        open.ids[t] = (int32_t)((state >> 8) % m->params.vocab_count);
    }
    open.generate.token_count_max = o->gen;
    open.generate.ignore_end = true;
    sampler_defaults(&open.generate.sampling);
    open.generate.sampling.temperature = (float)o->temperature;
    open.generate.sampling.seed = i;
    if (engine_open(r->engine, &open, &sequence) < 0)
        exit(1);
}

static void run_round(const struct options *o, struct engine *engine, const struct model *m, uint32_t round)
{
    struct run r = {.engine = engine, .streams = o->streams, .gen = o->gen};
    uint64_t begun = clock_mono_us();
    for (uint32_t i = 0; i < o->streams; i++)
        open_stream(o, &r, m, round, i);
    while (r.done + r.failed < o->streams)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    double all = (double)(clock_mono_us() - begun) * 1e-6, first = (double)(r.all_first_us - begun) * 1e-6,
           decode = r.first_done_us > r.all_first_us ? (double)(r.first_done_us - r.all_first_us) * 1e-6 : 0;
    uint64_t steps = decode > 0 ? r.steps_at_done - r.steps_at_first : 0;
    printf("round %u: %u streams, all first tokens after %.3f s, %.0f tokens/s of prompts, %u tokens cached; "
           "decode "
           "%.0f tokens/s, %.3f ms a step (%llu steps); all done after %.3f s\n",
           round + 1, o->streams, first, o->streams * o->prompt / first, r.cached,
           decode > 0 ? (double)(r.tokens_at_done - r.tokens_at_first) / decode : 0,
           steps ? decode * 1e3 / (double)steps : 0, (unsigned long long)steps, all);
    fflush(stdout);
}

static void read_options(int argc, char **argv, struct options *o)
{
    for (int i = 1; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (!value)
            exit(2);
        *value++ = 0;
        const struct {
            const char *name;
            const char **text;
            uint32_t *number;
        } known[] = {
            {"shape", &o->shape, NULL},     {"dtype", &o->dtype, NULL},   {"model", &o->model, NULL},
            {"device", &o->device, NULL},   {"store", &o->store, NULL},   {"streams", NULL, &o->streams},
            {"prompt", NULL, &o->prompt},   {"gen", NULL, &o->gen},       {"budget", NULL, &o->budget},
            {"pages", NULL, &o->pages},     {"swap", NULL, &o->swap_mib}, {"rounds", NULL, &o->rounds},
            {"prompts", NULL, &o->prompts}, {"pause", NULL, &o->pause_ms}};
        bool found = false;
        for (size_t k = 0; k < TD_COUNT(known) && !found; k++)
            if ((found = strcmp(argv[i], known[k].name) == 0)) {
                if (known[k].text)
                    *known[k].text = value;
                else
                    *known[k].number = (uint32_t)strtoul(value, NULL, 10);
            }
        if (strcmp(argv[i], "temperature") == 0)
            o->temperature = strtod(value, NULL);
        else if (strcmp(argv[i], "deterministic") == 0)
            o->deterministic = *value == '1';
        else if (strcmp(argv[i], "host") == 0)
            o->host = *value == '1';
        else if (!found) {
            fprintf(stderr, "cloud_engine: there is no %s\n", argv[i]);
            exit(2);
        }
    }
}

/* The backend as if it could only compute. */
static void hide_abilities(struct backend *b)
{
    static struct backend_ops plain;
    plain = *b->ops;
    plain.samples = false;
    plain.pieces_write = NULL;
    plain.swap_start = NULL;
    plain.swap_done = NULL;
    b->ops = &plain;
}

static struct backend *make_backend(const struct options *o, const struct model *m)
{
    struct td_error err;
    struct backend *b;
    uint32_t page_count =
        o->pages ? o->pages : o->streams * ((o->prompt + o->gen) / KV_BLOCK_TOKENS + 2) + 64;
    struct backend_config config = {.page_count = page_count,
                                    .layers_paged = m->params.layer_count,
                                    .rows_max = o->budget + o->streams,
                                    .deterministic = o->deterministic,
                                    .warm = true};
    int rc = strcmp(o->device, "cpu") == 0 ? cpu_backend_create(m, &config, &b, &err)
                                           : cuda_backend_create(m, &config, o->device, &b, &err);
    if (rc < 0)
        die("backend", &err);
    if (o->host)
        hide_abilities(b);
    return b;
}

static struct tiers *open_store(const char *directory, struct store **store)
{
    struct td_error err;
    struct tiers *tiers;
    struct store_config config = {.directory = directory};
    struct tiers_config tiers_config = {.ram_size = 256u << 20};
    if (store_open(&config, store, &err) < 0)
        die("store", &err);
    tiers_config.store = *store;
    if (tiers_create(&tiers_config, &tiers, &err) < 0)
        die("tiers", &err);
    return tiers;
}

int main(int argc, char **argv)
{
    struct options o = {.shape = "llama-8b",
                        .dtype = "bf16",
                        .device = "cuda:0",
                        .streams = 32,
                        .prompt = 512,
                        .gen = 128,
                        .budget = 512,
                        .rounds = 1,
                        .prompts = 1};
    struct td_error err;
    struct bench_model *random = NULL;
    struct gguf *file = NULL;
    struct model *model;
    struct store *store = NULL;
    struct engine *engine;
    read_options(argc, argv, &o);
    if (crypto_init() < 0 || o.streams > STREAMS_MAX || o.prompts == 0)
        return 2;
    if (o.model ? gguf_open(o.model, &file, &err) < 0 || model_load(file, &model, &err) < 0
                : bench_model_create(o.shape, o.dtype, &random, &err) < 0)
        die("model", &err);
    if (!o.model)
        model = bench_model_get(random);
    struct engine_config config = {.model = model,
                                   .backend = make_backend(&o, model),
                                   .tiers = o.store ? open_store(o.store, &store) : NULL,
                                   .token_budget = o.budget,
                                   .sequences_max = o.streams,
                                   .swap_size = (uint64_t)o.swap_mib << 20};
    if (engine_create(&config, &engine, &err) < 0)
        die("engine", &err);
    for (uint32_t round = 0; round < o.rounds; round++) {
        run_round(&o, engine, model, round);
        nanosleep(&(struct timespec){.tv_sec = o.pause_ms / 1000, .tv_nsec = o.pause_ms % 1000 * 1000000L},
                  NULL);
    }
    engine_destroy(engine);
    tiers_destroy(config.tiers);
    if (store)
        store_close(store);
    if (file) {
        model_free(model);
        gguf_close(file);
    }
    bench_model_destroy(random);
    return 0;
}
