/* agent: the parts of the device's side and their life; flights are in flight.c and flight_wire.c. See agent.h. */
#include "edge/agent_internal.h"
#include "kernels/kv_layout.h"
#include "shared/crypto.h"
#include "shared/log.h"
#include "shared/paced.h"
#include "shared/paths.h"
#include "store/conversation_json.h"
#include <stdio.h>
#include <stdlib.h>

#define MODULE           "edge"
#define TICK_US          250000u
#define TICK_UPLOAD_US   50000u   /* while the planner may have to act */
#define SILENCE_US       3000000u /* of a cloud, after which this device goes on by itself where it may */
#define CONV_ENTRIES_MAX 100000u
#define KEY_FILE         "master.key"
#define IDENTITY_FILE    "identity"

/* ---- flights ---- */

struct flight *agent_find_request(struct agent *a, const struct flight *except,
                                  const uint8_t request_id[GEN_REQUEST_ID_SIZE])
{
    for (struct flight *f = a->flights; f; f = f->next) {
        bool there = f->state == FLIGHT_WAITING || f->state == FLIGHT_OPEN || f->state == FLIGHT_ENDING;
        if (f != except && there && memcmp(f->receiver.request_id, request_id, GEN_REQUEST_ID_SIZE) == 0)
            return f;
    }
    return NULL;
}

void agent_count_running(struct agent *a)
{
    uint32_t count = 0;
    for (const struct flight *f = a->flights; f; f = f->next)
        count += f->state != FLIGHT_LEAVING;
    metric_set(a->metrics.running, count);
}

void agent_remove(struct agent *a, struct flight *f)
{
    struct flight **at = &a->flights;
    while (*at != f)
        at = &(*at)->next;
    *at = f->next;
    a->flight_count--;
    agent_count_running(a);
    net_timer_start(a->tick,
                    1); /* one that waited for room or behind this one may go on; the agent may be empty */
}

/* fn may free its flight, no other. */
static void each_flight(struct agent *a, void (*fn)(struct flight *f))
{
    for (struct flight *f = a->flights, *next; f; f = next) {
        next = f->next;
        fn(f);
    }
}

static void check_deadline(struct flight *f)
{
    flight_check_deadline(f, clock_mono_us());
}

void agent_look_at_link(struct agent *a)
{
    struct link_stats stats;
    if (uplink_stats(a->uplink, &stats))
        estimates_link(&a->estimates, &stats, clock_mono_us());
}

/* A link that has gone quiet says nothing by itself. True: some prompt is still on its way. */
static bool reconsider_plans(struct agent *a)
{
    bool any = false;
    uint64_t now_us = clock_mono_us();
    agent_look_at_link(a);
    for (struct flight *f = a->flights, *next; f; f = next) {
        next = f->next;
        any |= plan_reconsider(f, now_us);
    }
    return any;
}

/* Nobody waits for the link: no request is still on its way up. */
static bool link_is_idle(const struct agent *a)
{
    if (uplink_state(a->uplink) != UPLINK_READY || fetcher_is_busy(a->fetcher))
        return false;
    for (const struct flight *f = a->flights; f; f = f->next)
        if (f->state < FLIGHT_OPEN || (f->state == FLIGHT_OPEN && !f->acked))
            return false;
    return true;
}

static bool somebody_waits(const struct agent *a)
{
    for (const struct flight *f = a->flights; f; f = f->next)
        if (f->state == FLIGHT_OPEN && !f->finished)
            return true;
    return false;
}

/* For a prompt whose rest was left to the cloud it may be worth knowing that the link is better than it seemed. */
static bool somebody_computes(const struct agent *a)
{
    bool left = false;
    for (const struct flight *f = a->flights; f; f = f->next)
        left |= f->given_up.now;
    return a->flight_count > 0 && !left;
}

static bool wants_probes(const struct agent *a)
{
    return a->layers_wanted == PLANNER_AUTO && a->pipeline && uplink_state(a->uplink) == UPLINK_READY;
}

static void probe_link(struct agent *a)
{
    bool busy = somebody_computes(a);
    if (wants_probes(a) && link_is_idle(a) && estimates_wants_probe(&a->estimates, busy, clock_mono_us()))
        uplink_probe(a->uplink, estimates_probe_size(&a->estimates));
}

static void take_welcome(struct agent *a);

static void on_tick(void *ctx)
{
    struct agent *a = ctx;
    bool can_do_without = a->config.offline == OFFLINE_CONTINUE; /* a link may break without a word */
    inbox_drain(a->inbox); /* there may have been no memory to post for it */
    uplink_set_patience(a->uplink, can_do_without && somebody_waits(a) ? SILENCE_US : 0);
    if (a->key_due)
        take_welcome(a);
    each_flight(a, check_deadline);
    each_flight(a, flight_kick);
    bool uploading = reconsider_plans(a);
    if (!uploading)
        probe_link(a);
    bool idle = a->flight_count == 0 && !a->drained && uplink_state(a->uplink) == UPLINK_READY;
    struct plan_model model;
    plan_fill_model(a, &model);
    uint64_t fetch_us = fetcher_run(a->fetcher, idle && !a->draining ? &model : NULL, clock_mono_us());
    if (a->flight_count > 0) {
        net_timer_start(a->tick, uploading ? TICK_UPLOAD_US : TICK_US);
    } else if (!a->drained) {
        uint64_t wait_us = wants_probes(a) ? estimates_probe_wait_us(&a->estimates, clock_mono_us()) : 0;
        if (fetch_us > 0 && (wait_us == 0 || fetch_us < wait_us))
            wait_us = fetch_us;
        if (wait_us > 0)
            net_timer_start(a->tick, wait_us);
    } else if (!a->ending && io_worker_pending(a->worker) > 0) {
        net_timer_start(a->tick, TICK_UPLOAD_US);
    } else {
        void (*fn)(void *) = a->drained;
        a->drained = NULL;
        fn(a->drained_ctx);
    }
}

static void stop_leaving(struct flight *f)
{
    if (f->state == FLIGHT_LEAVING)
        flight_end_trail(f);
}

void agent_drain(struct agent *a, void (*fn)(void *ctx), void *ctx)
{
    a->draining = true;
    each_flight(a, stop_leaving);
    a->drained = fn;
    a->drained_ctx = ctx;
    net_timer_start(a->tick, 1);
}

static void end_flight(struct flight *f)
{
    f->left_there = false; /* there is no time left to tell anybody */
    if (f->state == FLIGHT_TRAILING || f->state == FLIGHT_LEAVING)
        flight_end_trail(f);
    else if (f->state != FLIGHT_ENDING && f->state != FLIGHT_GONE)
        flight_fail(f, -TD_ERR_CLOSED, "this agent is shutting down", 1000);
}

void agent_end_flights(struct agent *a)
{
    a->ending = true;
    each_flight(a, end_flight);
}

uint32_t agent_flight_count(const struct agent *a)
{
    return a->flight_count;
}

/* ---- the uplink's events ---- */

/* Each principal of each tenant has names of its own on this device, too. */
static int make_device_key(struct agent *a, const struct edge_identity *i)
{
    uint8_t chain_key[CRYPTO_KEY_SIZE], tenant_key[CRYPTO_KEY_SIZE];
    struct td_error err;
    int rc = store_chain_key(a->store, EDGE_TENANT, chain_key, &err);
    if (rc < 0)
        return rc;
    kv_principal_key(chain_key, i->tenant, tenant_key);
    pthread_mutex_lock(&a->key_lock);
    kv_principal_key(tenant_key, i->principal, a->device_key);
    a->has_key = true;
    pthread_mutex_unlock(&a->key_lock);
    crypto_wipe(chain_key, sizeof chain_key);
    crypto_wipe(tenant_key, sizeof tenant_key);
    return 0;
}

static int take_identity(struct agent *a, const struct edge_identity *i)
{
    int rc = make_device_key(a, i);
    if (rc < 0) {
        if (!a->key_due) /* once, not at each try */
            log_error(MODULE, "the store of this device does not give its keys (%s): requests wait for them",
                      td_status_text(rc));
        return rc;
    }
    a->identity = *i;
    memcpy(a->principal_key, i->principal_key, sizeof a->principal_key);
    a->context_max = a->model->params.context_max;
    if (i->context_max)
        a->context_max = TD_MIN(a->context_max, i->context_max);
    a->codec_mask = i->codec_mask;
    a->hidden_mask = i->hidden_mask;
    return 0;
}

static bool identity_path(const struct agent *a, char path[PATH_SIZE_MAX])
{
    int n = snprintf(path, PATH_SIZE_MAX, "%s/" IDENTITY_FILE, a->config.data_dir);
    return n > 0 && n < PATH_SIZE_MAX;
}

/* So that requests need not wait for the first WELCOME. */
static int load_identity(struct agent *a, struct td_error *err)
{
    char path[PATH_SIZE_MAX];
    struct edge_identity identity = {0};
    if (a->config.offline != OFFLINE_CONTINUE)
        return 0;
    if (!a->pipeline || !pipeline_decodes(a->pipeline))
        return td_fail(err, -TD_ERR_ARG,
                       "--offline continue needs the whole model on this device, and --edge-layers auto");
    if (identity_path(a, path) && identity_load(a->store, path, a->env.fingerprint, &identity) == 0)
        take_identity(a, &identity);
    else
        log_warn(
            MODULE,
            "--offline continue begins with the first connection: who this device is with this model has "
            "not been kept in %s yet",
            a->config.data_dir);
    crypto_wipe(&identity, sizeof identity);
    return 0;
}

/* Who this device is, as the cloud has just said: again at each tick where the store does not give its keys. */
static void take_welcome(struct agent *a)
{
    char path[PATH_SIZE_MAX];
    bool is_new = memcmp(&a->welcomed, &a->identity, sizeof a->identity) != 0;
    a->key_due = take_identity(a, &a->welcomed) < 0;
    if (a->key_due)
        return;
    if (a->config.offline == OFFLINE_CONTINUE && is_new && identity_path(a, path) &&
        identity_save(a->store, path, a->env.fingerprint, &a->welcomed) < 0)
        log_warn(MODULE, "cannot write %s: a start without the cloud will have to wait for it", path);
    crypto_wipe(&a->welcomed, sizeof a->welcomed);
}

/* It may be another node, with room. */
static void another_try(struct flight *f)
{
    f->retry_us = 0;
    flight_kick(f);
}

static void on_ready(void *ctx, const Tandem__Welcome *w)
{
    struct agent *a = ctx;
    struct edge_identity *i = &a->welcomed;
    *i = (struct edge_identity){
        .context_max = w->context_max, .codec_mask = w->codec_mask, .hidden_mask = w->hidden_mask};
    snprintf(i->tenant, sizeof i->tenant, "%s", w->tenant);
    snprintf(i->principal, sizeof i->principal, "%s", w->principal);
    memcpy(i->principal_key, w->principal_key.data, sizeof i->principal_key);
    a->away_since_us = 0;
    a->features = w->features;
    take_welcome(a);
    fetcher_ready(a->fetcher, w);
    probe_link(a);
    if (a->flight_count == 0)
        net_timer_start(a->tick, ESTIMATES_SOON_US);
    each_flight(a, another_try);
}

static void on_lost(void *ctx)
{
    struct agent *a = ctx;
    estimates_link_lost(&a->estimates);
    a->away_since_us = clock_mono_us();
    fetcher_lost(a->fetcher);
    each_flight(a, flight_lost);
}

static int on_frame(void *ctx, void *owner, const struct wire_frame *frame)
{
    struct agent *a = ctx;
    if (owner != a->fetcher)
        return wire_frame(owner, frame);
    int rc = fetcher_frame(a->fetcher, frame);
    if (!fetcher_is_busy(a->fetcher))
        net_timer_start(a->tick, 1); /* for what follows */
    return rc;
}

static void on_room(void *ctx)
{
    each_flight(ctx, wire_flush);
}

static const struct uplink_events uplink_events = {on_ready, on_lost, on_frame, on_room};

/* ---- the prefill thread's events ---- */

static void on_result(struct inbox_item *item)
{
    struct pipeline_event *e = (struct pipeline_event *)item;
    struct agent *a = e->owner;
    atomic_fetch_sub(&a->results_waiting, 1);
    if (e->cost.tokens > 0)
        estimates_edge(&a->estimates, e->cost.compute_us, e->cost.tokens, e->cost.layers, e->cost.position,
                       e->run > 0 || e->job == 0);
    if (e->token_us > 0)
        estimates_edge_token(&a->estimates, e->token_us);
    for (struct flight *f = a->flights; f; f = f->next)
        if (f->serial == e->job) {
            wire_pipeline_event(f, e);
            break;
        }
    size_t dropped = 0;
    for (const struct pipeline_message *m = e->messages; m; m = m->next)
        dropped += m->size;
    if (dropped && a->pipeline)
        pipeline_taken(a->pipeline, dropped);
    pipeline_event_free(e);
}

/* On the prefill thread. */
static int sink_event(void *ctx, struct pipeline_event *e)
{
    struct agent *a = ctx;
    if (atomic_load(&a->results_waiting) >= AGENT_RESULTS_MAX)
        return -TD_ERR_FULL;
    atomic_fetch_add(&a->results_waiting, 1);
    e->item.run = on_result;
    e->owner = a;
    inbox_push(a->inbox, &e->item);
    return 0;
}

/* ---- creation: model ---- */

/* What was asked for, if the model's quality record lets it; or what that does let. */
static int choose_codec(struct agent *a, struct td_error *err)
{
    struct td_error why = {0};
    bool is_asked = a->config.codec != NULL;
    if (is_asked && a->config.codec_unchecked)
        return 0;
    int rc = is_asked ? kv_level_allowed(a->config.codec, a->config.model_path, a->model->fingerprint, &why)
                      : kv_level_choose(a->config.model_path, a->model->fingerprint, &a->config.codec, &why);
    return rc < 0
               ? td_fail(err, rc, "%s, or add %s--codec-unchecked", why.text, is_asked ? "" : "--codec l1 ")
               : 0;
}

/* Wishes that no request could be given. The default for private prompts is none: a small slice has no private ones then. */
static int check_wishes(const struct agent *a, uint32_t layers, struct td_error *err)
{
    const struct agent_config *c = &a->config;
    uint32_t all = a->model->params.layer_count;
    bool is_asked = c->private_min_layers != AGENT_PRIVATE_LAYERS || c->prefer_private;
    if (is_asked && layers < c->private_min_layers)
        return td_fail(
            err, -TD_ERR_ARG,
            "no prompt could be private: --private-min-layers is %u and this device computes %u of "
            "%u layers; give fewer, a higher --edge-layers, or a model file with more of them",
            c->private_min_layers, layers, all);
    if (c->local == LOCAL_ALWAYS && (layers < all || c->edge_layers != PLANNER_AUTO))
        return td_fail(err, -TD_ERR_ARG,
                       "--local always needs the whole model on this device, and --edge-layers auto");
    return 0;
}

static int open_model(struct agent *a, struct td_error *err)
{
    int rc;
    if ((rc = gguf_open(a->config.model_path, &a->file, err)) < 0 ||
        (rc = model_load(a->file, &a->model, err)) < 0 ||
        (rc = tokenizer_create(a->file, NULL, &a->tokenizer, err)) < 0 ||
        (rc = chat_template_detect(a->file, a->config.chat_template, &a->env.template_kind, err)) < 0 ||
        (rc = gguf_fingerprint(a->file, a->model->fingerprint, a->config.progress, a->config.progress_ctx,
                               err)) < 0)
        return rc;
    if ((rc = choose_codec(a, err)) < 0)
        return rc;
    if (a->config.model_name)
        snprintf(a->model_name, sizeof a->model_name, "%s", a->config.model_name);
    else
        path_model_name(a->config.model_path, a->model_name, sizeof a->model_name);
    memcpy(a->env.fingerprint, a->model->fingerprint, TD_HASH_SIZE);
    model_layout_hash(a->model, a->env.layout_hash);
    a->env.tokenizer = a->tokenizer;
    a->context_max = a->model->params.context_max;
    a->estimates.edge_rise = paced_is_on() ? 0 : model_rise(&a->model->params);
    uint32_t held = a->model->layers_held, wanted = a->config.edge_layers;
    a->layers_wanted = wanted;
    if (wanted == PLANNER_AUTO)
        wanted = held;
    if (wanted > held)
        return td_fail(err, -TD_ERR_ARG,
                       "cannot run %u layers here: %s holds %u of %u; use --edge-layers %u or fewer", wanted,
                       a->config.model_path, held, a->model->params.layer_count, held);
    if ((rc = check_wishes(a, wanted, err)) < 0)
        return rc;
    a->layers = a->config.kv_whole ? held : wanted;
    a->fill_layers = a->layers_wanted == PLANNER_AUTO ? 0 : wanted;
    return 0;
}

/* ---- creation: store ---- */

static int open_store(struct agent *a, struct td_error *err)
{
    char path[PATH_SIZE_MAX], key_path[PATH_SIZE_MAX + 16];
    int n = snprintf(path, sizeof path, "%s/store", a->config.data_dir);
    if (n < 0 || (size_t)n >= sizeof path)
        return td_fail(err, -TD_ERR_ARG, "the path of --data is too long");
    int rc = path_make_parents(path, err);
    if (rc < 0)
        return rc;
    snprintf(key_path, sizeof key_path, "%s/" KEY_FILE, a->config.data_dir);
    struct store_config config = {.directory = path};
    rc = store_master_key_load(key_path, true, config.master_key, err);
    if (rc == 0)
        rc = store_open(&config, &a->store, err);
    crypto_wipe(config.master_key, sizeof config.master_key);
    if (rc < 0)
        return rc;
    a->conversations = conv_index_create(a->store, CONV_ENTRIES_MAX);
    a->env.conversations = a->conversations;
    return a->conversations ? 0
                            : td_fail(err, -TD_ERR_NOMEM, "not enough memory for the index of conversations");
}

/* ---- creation: prefill ---- */

/* Pages by the memory given. A prompt that wants more than there are is the cloud's. */
static uint32_t page_count(const struct agent *a)
{
    const struct model_params *p = &a->model->params;
    uint64_t page_size =
        (uint64_t)a->layers * 2 * KV_BLOCK_TOKENS * p->kv_head_count * p->head_dim * sizeof(uint16_t);
    uint64_t count = a->config.kv_memory / page_size;
    return (uint32_t)TD_MIN(TD_MAX(count, UINT64_C(2)), (uint64_t)UINT32_MAX / 2);
}

static int open_disk(struct agent *a, struct td_error *err)
{
    if (a->config.kv_disk > 0)
        return kv_disk_create(a->store, EDGE_TENANT, a->config.kv_disk, &a->disk, err);
    kv_disk_clear(a->store, EDGE_TENANT);
    return 0;
}

static int start_prefill(struct agent *a, struct td_error *err)
{
    if (a->layers == 0)
        return 0;
    struct backend *backend;
    struct backend_config config = {.page_count = page_count(a),
                                    .layers_paged = a->layers,
                                    .threads = a->config.threads,
                                    .rows_max = a->config.chunk_tokens};
    int rc = cpu_backend_create(a->model, &config, &backend, err);
    if (rc < 0)
        return rc;
    a->kv_tokens = config.page_count * KV_BLOCK_TOKENS;
    a->kv = local_kv_create(config.page_count);
    if (!a->kv) {
        backend->ops->destroy(backend);
        return td_fail(err, -TD_ERR_NOMEM,
                       "not enough memory for the device's own KV; give a smaller --kv-memory");
    }
    local_kv_set_disk(a->kv, a->disk);
    struct pipeline_config pipeline = {.backend = backend,
                                       .kv = a->kv,
                                       .chunk_tokens = a->config.chunk_tokens,
                                       .codec_tables = {a->config.codec->table[0], a->config.codec->table[1]},
                                       .whole = a->config.kv_whole,
                                       .measure = a->layers_wanted == PLANNER_AUTO,
                                       .tokenizer = a->tokenizer,
                                       .sink = sink_event,
                                       .ctx = a};
    memcpy(pipeline.fingerprint, a->env.fingerprint, TD_HASH_SIZE);
    memcpy(pipeline.layout_hash, a->env.layout_hash, TD_HASH_SIZE);
    return pipeline_create(&pipeline, &a->pipeline, err);
}

/* ---- creation: the rest ---- */

static void register_metrics(struct edge_metrics *m)
{
    m->requests = metric_counter("tandem_edge_requests_total", NULL, "Requests taken.");
    m->failures =
        metric_counter("tandem_edge_requests_failed_total", NULL, "Requests that ended with an error.");
    m->running = metric_gauge("tandem_edge_requests_running", NULL, "Requests under way.");
    m->prefill_tokens =
        metric_counter("tandem_edge_prefill_tokens_total", NULL,
                       "Prompt tokens that this device ran through its layers for the cloud.");
    m->uplink_bytes =
        metric_counter("tandem_edge_uplink_bytes_total", NULL, "Bytes of rows and KV pieces sent.");
    m->uplink_raw_bytes =
        metric_counter("tandem_edge_uplink_raw_bytes_total", NULL, "The same rows as f32 and KV as f16.");
    m->resumed = metric_counter("tandem_edge_resumed_total", NULL,
                                "Generations that the cloud went on with after a lost link.");
    m->generated_tokens =
        metric_counter("tandem_edge_generated_tokens_total", NULL, "Reply tokens handed on.");
    m->local_tokens = metric_counter("tandem_edge_local_tokens_total", NULL,
                                     "Of these, that this device made before the cloud's were here.");
    m->offline_tokens =
        metric_counter("tandem_edge_offline_tokens_total", NULL, "Of these, while the cloud was away.");
    m->first_token = metric_histogram("tandem_edge_time_to_first_token_seconds", NULL,
                                      "From a request's arrival to its first token.", METRIC_SECONDS_BOUNDS,
                                      METRIC_SECONDS_BOUNDS_COUNT);
}

static int make_uplink(struct agent *a, struct td_error *err)
{
    const struct agent_config *c = &a->config;
    struct uplink_config config = {
        .loop = a->loop,
        .host = c->cloud_host,
        .port = c->cloud_port,
        .ca_path = c->ca_path,
        .cert_path = c->cert_path,
        .key_path = c->key_path,
        .tls = c->tls,
        .token = c->token,
        .numerics = KV_NUMERICS_CPU_V1,
        .layer_count = a->model->params.layer_count,
        .layers_held = a->model->layers_held,
        .codec_mask = KV_CODEC_MASK,
        .hidden_mask = 1u << HIDDEN_F32 | 1u << HIDDEN_F16 | 1u << HIDDEN_INT8,
        .events = &uplink_events,
        .ctx = a,
    };
    memcpy(config.fingerprint, a->env.fingerprint, TD_HASH_SIZE);
    memcpy(config.layout_hash, a->env.layout_hash, TD_HASH_SIZE);
    a->uplink = uplink_create(&config);
    if (a->uplink && a->config.kv_whole && a->disk && config.layers_held < config.layer_count) {
        struct kv_shape shape = model_kv_shape(a->model);
        a->fetcher = fetcher_create(a->uplink, a->disk, &shape);
    }
    a->tick = net_timer_create(a->loop, on_tick, a);
    a->worker = io_worker_create(a->inbox);
    return a->uplink && a->tick && a->worker ? 0 : td_fail(err, -TD_ERR_NOMEM, "not enough memory to start");
}

int agent_create(const struct agent_config *config, struct net_loop *loop, struct agent **out,
                 struct td_error *err)
{
    int rc = crypto_init();
    if (rc < 0)
        return td_fail(err, rc, "the cryptographic library does not work on this machine");
    struct agent *a = calloc(1, sizeof *a);
    if (!a)
        return td_fail(err, -TD_ERR_NOMEM, "not enough memory to start");
    a->config = *config;
    a->loop = loop;
    a->away_since_us = clock_mono_us();
    pthread_mutex_init(&a->key_lock, NULL);
    a->inbox = inbox_create(loop);
    if (!a->inbox) {
        free(a);
        return td_fail(err, -TD_ERR_NOMEM, "not enough memory to start");
    }
    register_metrics(&a->metrics);
    struct filter_config filter = {.words_path = config->words_path, .pii = config->filter_pii};
    /* The link would find out about its files too, but only say so again and again. */
    rc = net_check_files(config->ca_path, config->cert_path, config->key_path, err);
    if (rc < 0 || (rc = open_model(a, err)) < 0 || (rc = filter_create(&filter, &a->filter, err)) < 0 ||
        (rc = open_store(a, err)) < 0 || (rc = open_disk(a, err)) < 0 || (rc = start_prefill(a, err)) < 0 ||
        (rc = load_identity(a, err)) < 0 || (rc = make_uplink(a, err)) < 0) {
        agent_shutdown(a);
        agent_destroy(a);
        return rc;
    }
    a->env.filter = a->filter;
    *out = a;
    return 0;
}

/* ---- the end ---- */

void agent_shutdown(struct agent *a)
{
    for (struct flight *f = a->flights; f; f = f->next)
        wire_close_work(f, false);
    struct pipeline *pipeline = a->pipeline;
    a->pipeline = NULL;
    pipeline_destroy(pipeline);
    if (a->inbox)
        inbox_drain(a->inbox);
    io_worker_stop(a->worker);
    if (a->uplink)
        uplink_stop(a->uplink);
}

void agent_destroy(struct agent *a)
{
    if (!a)
        return;
    io_worker_destroy(a->worker);
    while (a->flights) {
        struct flight *next = a->flights->next;
        flight_free(a->flights);
        a->flights = next;
    }
    inbox_destroy(a->inbox);
    fetcher_destroy(a->fetcher);
    uplink_destroy(a->uplink);
    if (a->tick)
        net_timer_destroy(a->tick);
    local_kv_destroy(a->kv);
    kv_disk_destroy(a->disk);
    if (a->conversations)
        conv_index_destroy(a->conversations);
    if (a->store)
        store_close(a->store);
    filter_destroy(a->filter);
    tokenizer_destroy(a->tokenizer);
    model_free(a->model);
    if (a->file)
        gguf_close(a->file);
    crypto_wipe(a->principal_key, sizeof a->principal_key);
    crypto_wipe(&a->identity, sizeof a->identity);
    crypto_wipe(&a->welcomed, sizeof a->welcomed);
    crypto_wipe(a->device_key, sizeof a->device_key);
    pthread_mutex_destroy(&a->key_lock);
    free(a);
}

/* ---- small answers ---- */

void agent_connect(struct agent *a)
{
    uplink_start(a->uplink);
}

const char *agent_lacks(const struct agent *a)
{
    if (a->config.offline != OFFLINE_CONTINUE || a->has_key)
        return "";
    return "; --offline continue cannot help: this device's identity is not in its data folder yet; connect "
           "it once "
           "with this option";
}

const char *agent_unhealthy(struct agent *a)
{
    bool alone = a->config.offline == OFFLINE_CONTINUE && a->has_key && !uplink_refused(a->uplink);
    if (uplink_state(a->uplink) == UPLINK_READY || alone)
        return NULL;
    const char *why = uplink_why(a->uplink)[0] ? uplink_why(a->uplink) : "connecting";
    if (uplink_refused(a->uplink))
        snprintf(a->unhealthy, sizeof a->unhealthy, "no link to the cloud: %s", why);
    else
        snprintf(a->unhealthy, sizeof a->unhealthy,
                 "no link to the cloud (a request waits for it up to %u s): %s%s",
                 a->config.cloud_timeout_ms / 1000, why, agent_lacks(a));
    return a->unhealthy;
}

const struct tokenizer *agent_tokenizer(const struct agent *a)
{
    return a->tokenizer;
}

const char *agent_model_name(const struct agent *a)
{
    return a->model_name;
}

uint32_t agent_layers(const struct agent *a)
{
    return a->layers;
}

int agent_history_home(struct agent *a, struct conversation_home *home, uint8_t key[32])
{
    home->tokenizer = a->tokenizer;
    home->template_kind = a->env.template_kind;
    home->principal_key = key;
    pthread_mutex_lock(&a->key_lock);
    bool known = a->has_key;
    memcpy(key, a->device_key, sizeof a->device_key);
    pthread_mutex_unlock(&a->key_lock);
    return known ? 0 : -TD_ERR_AGAIN;
}

struct io_worker *agent_worker(struct agent *a)
{
    return a->worker;
}

struct conv_index *agent_conversations(struct agent *a)
{
    return a->conversations;
}

struct store *agent_store(struct agent *a)
{
    return a->store;
}
