/* node_load: the model file, the store and the engine of a node, each with the line that tells an operator what to do. */
#include "cloud/node_internal.h"
#include "kernels/cuda/cuda.h"
#include "kernels/kv_layout.h"
#include "shared/kv_record.h"
#include "shared/memory.h"
#include "shared/metrics.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PAGES_MIN         2u
#define PAGES_MAX         (1u << 24)
#define KV_TOKENS_MIN     1024u /* where nothing was asked for: room for one request of some length */
#define PROGRESS_CELLS    30
#define INDEX_ENTRIES_MAX (1u << 17) /* turns of all conversations that are found by their history */

/* ---- progress on a terminal ---- */

struct progress {
    const char *what;
    unsigned shown; /* percent */
};

static void show_progress(void *ctx, uint64_t done, uint64_t total)
{
    struct progress *p = ctx;
    unsigned percent = total ? (unsigned)(done * 100 / total) : 100;
    if (percent == p->shown)
        return;
    p->shown = percent;
    int cells = (int)(percent * PROGRESS_CELLS / 100);
    fprintf(stderr, "\r%s  [%.*s%*s] %3u %%", p->what, cells, "##############################",
            PROGRESS_CELLS - cells, "", percent);
    if (percent == 100)
        fprintf(stderr, "\r%*s\r", PROGRESS_CELLS + 30, "");
}

/* ---- model ---- */

static int load_fingerprint(struct node *n, struct td_error *err)
{
    struct progress progress = {"checking the model", UINT32_MAX};
    int rc = gguf_fingerprint(n->file, n->model->fingerprint, isatty(STDERR_FILENO) ? show_progress : NULL,
                              &progress, err);
    memcpy(n->service.fingerprint, n->model->fingerprint, TD_HASH_SIZE);
    return rc;
}

int node_load_model(struct node *n, struct td_error *err)
{
    const struct settings *s = n->settings;
    struct service *v = &n->service;
    int rc = gguf_open(s->model, &n->file, err);
    if (rc == 0)
        rc = model_load(n->file, &n->model, err);
    if (rc < 0)
        return rc;
    const struct model_params *p = &n->model->params;
    if (n->model->layers_held < p->layer_count)
        return td_fail(err, -TD_ERR_ARG,
                       "cannot serve %s: it is a slice with %u of %u layers; the cloud needs the whole model",
                       s->model, n->model->layers_held, p->layer_count);
    rc = tokenizer_create(n->file, NULL, &n->tokenizer, err);
    if (rc == 0)
        rc = chat_template_detect(n->file, s->chat_template[0] ? s->chat_template : NULL, &v->template_kind,
                                  err);
    if (rc == 0)
        rc = load_fingerprint(n, err);
    if (rc < 0)
        return rc;
    model_layout_hash(n->model, v->layout);
    v->tokenizer = n->tokenizer;
    v->model_name = s->model_name;
    v->layer_count = p->layer_count;
    v->vocab_count = p->vocab_count;
    v->context_max = TD_MIN(p->context_max, (uint32_t)LIMIT_PROMPT_TOKENS);
    if (s->context > p->context_max)
        return td_fail(err, -TD_ERR_ARG, "--context %d is more than the model was made for (%u)",
                       (int)s->context, p->context_max);
    if (s->context > 0)
        v->context_max = (uint32_t)s->context;
    char digits[9];
    hex_encode(v->fingerprint, 4, digits);
    log_info("cloud", "model %s: %u layers, context %u, template %s, fingerprint %s", v->model_name,
             v->layer_count, v->context_max, chat_template_name(v->template_kind), digits);
    return 0;
}

/* ---- memory ---- */

static uint64_t page_size_of(const struct node *n, enum kv_dtype dtype)
{
    struct kv_shape shape = model_kv_shape(n->model);
    return kv_dtype_layer_size(dtype, shape.kv_head_count, shape.head_dim) * shape.layer_count;
}

/* Bytes of the pages that were asked for, 0: none were. */
static int wanted_pages(const struct node *n, uint64_t *out, struct td_error *err)
{
    const struct settings *s = n->settings;
    uint64_t page_size = page_size_of(n, s->kv_dtype);
    uint64_t pages = s->pages > 0 ? (uint64_t)s->pages : s->kv_memory / page_size;
    *out = pages * page_size;
    if ((s->kv_memory || s->pages > 0) && pages < PAGES_MIN)
        return td_fail(err, -TD_ERR_ARG,
                       "no room for KV: a page of 64 tokens takes %" PRIu64
                       " KiB with this model, and it takes two; raise --kv-memory or --pages",
                       page_size >> 10);
    return 0;
}

static void tell_pages(const struct node *n, uint64_t pages)
{
    if (pages * KV_BLOCK_TOKENS < n->service.context_max)
        log_warn("cloud",
                 "KV memory holds %" PRIu64
                 " tokens, less than one full context of %u: longer requests will be refused",
                 pages * KV_BLOCK_TOKENS, n->service.context_max);
    log_info("cloud", "%" PRIu64 " KV pages of 64 tokens, %" PRIu64 " MiB", pages,
             pages * page_size_of(n, n->settings->kv_dtype) >> 20);
}

/* Who asks for a GPU by name gets it or an error; `auto` says why there is none. */
static bool wants_gpu(const struct settings *s)
{
    char why[200];
    if (strcmp(s->device, "auto") != 0)
        return strcmp(s->device, "cpu") != 0;
    bool found = cuda_available(why, sizeof why);
    if (!found)
        log_info("cloud", "%s: computing on the CPU", why);
    return found;
}

/* Before anything large is taken. */
int node_plan_memory(struct node *n, struct td_error *err)
{
    struct node_memory *m = &n->memory;
    uint64_t wanted = n->settings->store_ram, page_size = page_size_of(n, n->settings->kv_dtype), kv;
    uint32_t tokens = TD_MIN(n->service.context_max, (uint32_t)KV_TOKENS_MIN);
    n->gpu = wants_gpu(n->settings);
    if (!n->gpu && n->settings->kv_dtype != KV_DTYPE_F16)
        return td_fail(err, -TD_ERR_ARG,
                       "--kv-dtype %s needs a GPU, and this node computes on the CPU: leave it out",
                       n->settings->kv_dtype_name);
    int rc = wanted_pages(n, &kv, err);
    if (rc < 0)
        return rc;
    uint64_t available = memory_available();
    if (available == 0 && kv == 0 && !n->gpu)
        return td_fail(
            err, -TD_ERR_NOTFOUND,
            "cannot tell how much memory is free: /proc/meminfo cannot be read; mount /proc, or say how "
            "much KV may take, such as --kv-memory 1G");
    *m = (struct node_memory){
        .available = available ? available : UINT64_MAX, .swap = memory_swap(), .store_ram = wanted};
    if (!n->gpu) {
        m->weights = cpu_backend_weights_size(n->model);
        m->kv_least =
            page_size * TD_MAX((tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS, (uint32_t)PAGES_MIN);
        m->kv = kv;
    }
    rc = node_memory_fit(m, err);
    n->page_count = (uint32_t)TD_MIN((n->gpu ? kv : m->kv) / page_size, (uint64_t)PAGES_MAX);
    if (rc == 0 && m->store_ram < wanted)
        log_info("cloud",
                 "--store-ram is %" PRIu64 " MiB here: weights and KV pages leave no room for %" PRIu64,
                 m->store_ram >> 20, wanted >> 20);
    return rc;
}

/* ---- store ---- */

/* What the tenants' settings ask for, if the model's quality record lets it. */
static int choose_demotion(const struct node *n, struct store_demotion *out, struct td_error *err)
{
    const struct settings *s = n->settings;
    *out = (struct store_demotion){.shape = model_kv_shape(n->model),
                                   .others = s->demote_others,
                                   .tenants = s->demote,
                                   .count = s->demote_count};
    for (size_t i = 0; i <= s->demote_count; i++) {
        const struct kv_level *level = i < s->demote_count ? s->demote[i].level : s->demote_others;
        struct td_error why = {0};
        int rc = level ? kv_level_allowed(level, s->model, n->service.fingerprint, &why) : 0;
        if (rc < 0)
            return td_fail(err, rc, "--store-demote: %s", why.text);
    }
    return 0;
}

int node_open_store(struct node *n, struct td_error *err)
{
    const struct settings *s = n->settings;
    struct store_config config = {.directory = s->store_path,
                                  .limit_size = s->store_size,
                                  .tenant_quota_size = s->store_tenant,
                                  .ttl_s = (uint32_t)TD_MIN(s->store_ttl_hours * 3600, (int64_t)UINT32_MAX),
                                  .keys_directory = s->store_keys[0] ? s->store_keys : NULL,
                                  .master_key_path = s->store_key_path,
                                  .queue_size = n->memory.store_queue};
    struct store_demotion demotion;
    int rc = choose_demotion(n, &demotion, err);
    config.demotion = s->store_demote[0] ? &demotion : NULL;
    if (rc == 0)
        rc = path_make_parents(s->store_key_path, err);
    if (rc == 0)
        rc = path_make_parents(s->store_path, err);
    if (rc == 0)
        rc = store_master_key_load(s->store_key_path, true, config.master_key, err);
    if (rc == 0)
        rc = store_open(&config, &n->service.store, err);
    if (rc == 0)
        rc = admin_set_store(n->admin, n->service.store, config.master_key);
    kv_seal_derive(config.master_key, &n->service.seal);
    crypto_wipe(config.master_key, sizeof config.master_key);
    struct tier_redis_config remote = {.host = s->redis_host,
                                       .port = s->redis_port,
                                       .password = getenv("TANDEM_REDIS_PASSWORD"),
                                       .node_epoch = n->service.node_epoch};
    struct tiers_config tiers = {.store = n->service.store,
                                 .ram_size = n->memory.store_ram,
                                 .ram_tenant_size = s->store_ram_tenant,
                                 .remote = s->redis_host[0] ? &remote : NULL};
    if (rc == 0)
        rc = tiers_create(&tiers, &n->tiers, err);
    if (rc < 0)
        return rc;
    n->service.tiers = n->tiers;
    n->service.conversations = conv_index_create(n->service.store, INDEX_ENTRIES_MAX);
    n->service.keys = tenant_keys_create(n->service.store);
    if (!n->service.conversations || !n->service.keys)
        return td_fail(err, -TD_ERR_NOMEM, "cannot open the store %s: out of memory", s->store_path);
    return 0;
}

/* ---- engine ---- */

static int create_backend(const struct node *n, struct backend **out, struct td_error *err)
{
    const struct settings *s = n->settings;
    struct progress progress = {"loading the model ", UINT32_MAX};
    uint64_t rows = (uint64_t)(s->token_budget + s->sequences);
    struct backend_config config = {.layers_paged = n->service.layer_count,
                                    .threads = (unsigned)s->threads,
                                    .rows_max = (uint32_t)TD_MIN(rows, (uint64_t)BATCH_ROWS_MAX),
                                    .memory_share = s->gpu_memory,
                                    .deterministic = s->deterministic,
                                    .kv_dtype = s->kv_dtype,
                                    .warm = true,
                                    .progress = isatty(STDERR_FILENO) ? show_progress : NULL,
                                    .progress_ctx = &progress};
    bool gpu = n->gpu;
    int rc;
    config.page_count = n->page_count;
    if (gpu)
        rc = cuda_backend_create(n->model, &config, strcmp(s->device, "auto") == 0 ? "cuda:0" : s->device,
                                 out, err);
    else
        rc = cpu_backend_create(n->model, &config, out, err);
    if (rc == 0 && !gguf_intact(n->file)) {
        (*out)->ops->destroy(*out);
        rc = td_fail(err, -TD_ERR_IO,
                     "cannot serve %s: it was changed while it was being loaded; start again", s->model);
    }
    if (rc < 0)
        return rc;
    tell_pages(n, (*out)->page_count);
    log_info("cloud", "backend %s (%s)", (*out)->ops->name, gpu ? s->device : cpu_backend_isa());
    return 0;
}

int node_start_engine(struct node *n, struct td_error *err)
{
    const struct settings *s = n->settings;
    struct backend *backend;
    int rc = create_backend(n, &backend, err);
    if (rc < 0)
        return rc;
    struct engine_config config = {.model = n->model,
                                   .backend = backend,
                                   .tiers = n->tiers,
                                   .seal = &n->service.seal,
                                   .tokenizer = n->tokenizer,
                                   .token_budget = (uint32_t)s->token_budget,
                                   .sequences_max = (uint32_t)s->sequences,
                                   .context_max = n->service.context_max,
                                   .swap_size = s->swap_memory,
                                   .kv_stall_ms = (uint32_t)s->kv_stall_ms};
    n->service.numerics = (uint32_t)backend->ops->numerics;
    rc = engine_create(&config, &n->engine, err);
    if (rc < 0)
        backend->ops->destroy(backend);
    else
        n->backend = backend;
    return rc < 0 ? rc : node_speed_start(n, (size_t)page_size_of(n, KV_DTYPE_F16), err);
}

/* ---- gauges ---- */

enum {
    GPU_BUSY,
    GPU_MEMORY_BUSY,
    GPU_MEMORY_USED,
    GPU_MEMORY,
    GPU_POWER,
    GPU_CLOCK,
    GPU_MEMORY_CLOCK,
    GPU_HEAT,
    GPU_GAUGES
};

enum {
    GPU_STEPS,
    GPU_LOOKED_AT,
    GPU_BUSY_SECONDS,
    GPU_IDLE_SECONDS,
    GPU_PARTS,
    GPU_COUNTERS = GPU_PARTS + CUDA_PARTS
};

struct node_gauges {
    struct metric *conversations, *read_failures, *put_failures;
    struct metric *gpu[GPU_GAUGES], *gpu_time[GPU_COUNTERS];
};

/* Where the time of steps goes. */
static void gpu_times_update(const struct node *n)
{
    static const char part[] = "tandem_gpu_step_part_seconds_total",
                      of[] = "Time of a part of the steps looked at";
    static const char *const names[GPU_COUNTERS][3] = {
        [GPU_STEPS] = {"tandem_gpu_steps_total", NULL, "Steps"},
        [GPU_LOOKED_AT] = {"tandem_gpu_steps_looked_at_total", NULL,
                           "Passes of steps whose parts were timed; they are longer than others"},
        [GPU_BUSY_SECONDS] = {"tandem_gpu_busy_seconds_total", NULL, "Time within steps"},
        [GPU_IDLE_SECONDS] = {"tandem_gpu_idle_seconds_total", NULL, "Time between them"},
        [GPU_PARTS + CUDA_PART_LAYERS] = {part, "part=\"layers\"", of},
        [GPU_PARTS + CUDA_PART_PRODUCTS] = {part, "part=\"products\"", of},
        [GPU_PARTS + CUDA_PART_ATTENTION] = {part, "part=\"attention\"", of},
        [GPU_PARTS + CUDA_PART_OTHER] = {part, "part=\"other\"", of},
        [GPU_PARTS + CUDA_PART_SAMPLING] = {part, "part=\"sampling\"", of},
        [GPU_PARTS + CUDA_PART_COPIES] = {part, "part=\"copies\"", of},
    };
    struct cuda_profile p;
    cuda_profile_read(n->backend, &p);
    double values[GPU_COUNTERS] = {(double)p.steps, (double)p.looked_at, p.busy_s, p.idle_s};
    memcpy(values + GPU_PARTS, p.part_s, sizeof p.part_s);
    for (int i = 0; i < GPU_COUNTERS; i++) {
        if (!n->gauges->gpu_time[i])
            n->gauges->gpu_time[i] = metric_counter(names[i][0], names[i][1], names[i][2]);
        metric_set(n->gauges->gpu_time[i], values[i]);
    }
}

static void gpu_gauges_update(const struct node *n)
{
    static const char *const names[GPU_GAUGES][2] = {
        [GPU_BUSY] = {"tandem_gpu_utilization", "Share of the last moments in which the GPU computed"},
        [GPU_MEMORY_BUSY] = {"tandem_gpu_memory_utilization", "Share in which it read or wrote its memory"},
        [GPU_MEMORY_USED] = {"tandem_gpu_memory_used_bytes", "Its memory in use, by all programs"},
        [GPU_MEMORY] = {"tandem_gpu_memory_bytes", "Its memory"},
        [GPU_POWER] = {"tandem_gpu_power_watts", "What it draws"},
        [GPU_CLOCK] = {"tandem_gpu_clock_hertz", "Clock of its multiprocessors"},
        [GPU_MEMORY_CLOCK] = {"tandem_gpu_memory_clock_hertz", "Clock of its memory"},
        [GPU_HEAT] = {"tandem_gpu_temperature_celsius", "Its temperature"},
    };
    struct cuda_gpu g;
    int device = strcmp(n->settings->device, "auto") == 0 ? 0 : cuda_device_number(n->settings->device);
    if (!n->backend || strcmp(n->backend->ops->name, "cuda") != 0)
        return;
    gpu_times_update(n);
    if (!cuda_gpu_read(device, &g))
        return;
    double values[GPU_GAUGES] = {g.busy,        g.memory_busy,  (double)g.memory_used, (double)g.memory_total,
                                 g.power_watts, g.sm_mhz * 1e6, g.memory_mhz * 1e6,    g.celsius};
    for (int i = 0; i < GPU_GAUGES; i++) {
        if (!n->gauges->gpu[i])
            n->gauges->gpu[i] = metric_gauge(names[i][0], NULL, names[i][1]);
        metric_set(n->gauges->gpu[i], values[i]);
    }
}

void node_gauges_update(struct node *n)
{
    tiers_update_metrics(n->tiers);
    if (!n->gauges) {
        struct node_gauges *g = n->gauges = calloc(1, sizeof *g);
        if (!g)
            return;
        g->conversations = metric_gauge("tandem_store_conversations", NULL, "Conversations in the store");
        g->read_failures =
            metric_counter("tandem_store_read_failures_total", NULL, "Reads that failed; each was a miss");
        g->put_failures = metric_counter("tandem_store_put_failures_total", NULL,
                                         "Blocks and conversations that were not written");
    }
    gpu_gauges_update(n);
    struct store_stats s;
    store_stats(n->service.store, &s);
    metric_set(n->gauges->conversations, (double)s.conversations);
    metric_set(n->gauges->read_failures, (double)s.read_failures);
    metric_set(n->gauges->put_failures, (double)s.put_failures);
}
