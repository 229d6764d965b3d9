/* node: see node.h. Here: the order in which things start and stop. */
#include "cloud/node_internal.h"
#include "shared/metrics.h"
#include "shared/stop.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define TICK_US   1000000u
#define SETTLE_US 20000u /* between looks while the last answers leave */

/* ---- stopping ---- */

static void on_drained(void *arg)
{
    struct node *n = arg;
    n->drained = true;
    n->drained_us = clock_mono_us();
    net_timer_start(n->timer, 1);
}

static void *drain(void *arg)
{
    struct node *n = arg;
    engine_drain(n->engine, NODE_DRAIN_MS);
    net_loop_post_wait(n->service.loop, on_drained, n);
    return NULL;
}

void node_begin_drain(void *arg)
{
    struct node *n = arg;
    if (n->service.draining)
        return;
    n->service.draining = true;
    stop_begins("cloud", STOP_MAX_S, STOP_SILENT_S, false); /* where no signal was the reason */
    admin_set_health(n->admin, ADMIN_DRAINING);
    edge_server_goaway(n->edges, "", "this node is shutting down");
    n->drain_started = pthread_create(&n->drain_thread, NULL, drain, n) == 0;
    if (!n->drain_started)
        net_loop_stop(n->service.loop);
}

/* The engine has come to rest: let what it said last reach clients and store, then close. Called again and again. */
static void settle(struct node *n)
{
    uint64_t waited_us = clock_mono_us() - n->drained_us;
    bool idle = io_worker_pending(n->service.io) == 0 && direct_calls(n->direct) == 0;
    if (idle && edge_server_connections(n->edges) > 0)
        edge_server_close(n->edges, "this node is shutting down");
    if ((idle && edge_server_connections(n->edges) == 0 && waited_us > 5 * SETTLE_US) ||
        waited_us > NODE_SETTLE_MS * UINT64_C(1000))
        net_loop_stop(n->service.loop);
    else
        net_timer_start(n->timer, SETTLE_US);
}

/* ---- once a second ---- */

/* A device that failed does not come back within this process: let everybody know, and end. What is persisted stays. */
static void look_at_device(struct node *n)
{
    int rc = n->backend->ops->state ? n->backend->ops->state(n->backend) : 0;
    if (rc == 0 || n->lost != 0)
        return;
    n->lost = rc;
    log_error("cloud", "the device that computes has failed (%s; its own message is above): stopping",
              td_status_text(rc));
    node_begin_drain(n);
}

static void on_tick(void *ctx)
{
    struct node *n = ctx;
    inbox_drain(n->service.inbox);
    engine_port_tick(n->service.engine);
    edge_server_tick(n->edges);
    direct_tick(n->direct);
    node_gauges_update(n);
    look_at_device(n);
    if (n->drained)
        settle(n);
    else
        net_timer_start(n->timer, TICK_US);
}

/* ---- starting ---- */

static int no_memory(struct td_error *err)
{
    return td_fail(err, -TD_ERR_NOMEM, "cannot start: out of memory");
}

static int start_loop(struct node *n, struct td_error *err)
{
    struct service *v = &n->service;
    v->loop = net_loop_create(err);
    if (!v->loop)
        return -TD_ERR_INTERNAL;
    v->inbox = inbox_create(v->loop);
    v->io = v->inbox ? io_worker_create(v->inbox) : NULL;
    v->fetcher = v->io ? io_worker_create(v->inbox) : NULL;
    v->engine = v->fetcher ? engine_port_create(n->engine, v->inbox) : NULL;
    n->edges = v->engine ? edge_server_create(v) : NULL;
    n->direct = n->edges ? direct_create(v) : NULL;
    n->timer = n->direct ? net_timer_create(v->loop, on_tick, n) : NULL;
    return n->timer ? 0 : no_memory(err);
}

static int listen_on(struct node *n, struct td_error *err)
{
    const struct settings *s = n->settings;
    struct net_listen listen = {.bind_address = s->listen,
                                .port = (uint16_t)s->listen_port,
                                .cert_path = s->plain ? NULL : s->cert,
                                .key_path = s->plain ? NULL : s->key,
                                .client_ca_path = s->client_ca[0] ? s->client_ca : NULL,
                                .http = direct_http_handler(n->direct),
                                .ws = edge_server_ws_handler(n->edges)};
    return net_listen(n->service.loop, &listen, &n->port, err);
}

/* Who this node is, to edges. */
static int name_node(struct node *n, struct td_error *err)
{
    if (gethostname(n->host_name, sizeof n->host_name) < 0)
        strcpy(n->host_name, "tandem");
    n->host_name[sizeof n->host_name - 1] = '\0';
    n->service.node = n->host_name;
    if (crypto_random(&n->service.node_epoch, sizeof n->service.node_epoch) < 0)
        return td_fail(err, -TD_ERR_CRYPTO, "cannot start: no random numbers");
    return 0;
}

static int start_steps(struct node *n, struct td_error *err)
{
    const struct settings *s = n->settings;
    int rc = node_watch_start(n, err);
    if (rc == 0)
        rc = name_node(n, err);
    if (rc == 0)
        rc = auth_open(s->tokens_path, &n->service.auth, err);
    if (rc == 0)
        rc = admin_start((uint16_t)s->admin_port, &n->admin, err);
    if (rc == 0)
        rc = node_load_model(n, err);
    if (rc == 0)
        rc = node_plan_memory(n, err);
    if (rc == 0)
        rc = node_open_store(n, err);
    if (rc == 0) /* a tenant whose keys cannot be kept, as on a full disk, would be refused at the door */
        rc = node_warm_keys(n, err);
    if (rc == 0)
        rc = node_start_engine(n, err);
    if (rc == 0)
        rc = start_loop(n, err);
    if (rc == 0)
        rc = listen_on(n, err);
    if (rc == 0)
        admin_set_erase(n->admin, node_erase_tenant, n);
    return rc;
}

/* To stdout, for scripts and people alike; everything else goes to the log on stderr. */
static void say_ready(const struct node *n)
{
    const struct settings *s = n->settings;
    bool v6 = strchr(s->listen, ':') != NULL;
    printf("listening on %s://%s%s%s:%u (OpenAI API and edges); metrics on http://127.0.0.1:%u/metrics\n",
           s->plain ? "http" : "https", v6 ? "[" : "", s->listen, v6 ? "]" : "", n->port,
           admin_port(n->admin));
    fflush(stdout);
    if (auth_count(n->service.auth) == 0)
        log_warn("cloud",
                 "nobody can come in: %s holds no token; make one with: tandem-cloud token new --tenant NAME "
                 "--principal NAME --tokens-file %s",
                 s->tokens_path, s->tokens_path);
}

int node_start(const struct settings *settings, struct node **out, struct td_error *err)
{
    struct node *n = calloc(1, sizeof *n);
    if (!n)
        return no_memory(err);
    n->settings = settings;
    node_erase_init(n);
    int rc = start_steps(n, err);
    if (rc < 0) {
        node_destroy(n);
        return rc;
    }
    node_gauges_update(n);
    char version[64];
    if (metric_label(version, sizeof version, "version", TANDEM_VERSION) == 0)
        metric_set(metric_gauge("tandem_build_info", version, "Version of this program"), 1);
    net_timer_start(n->timer, TICK_US);
    direct_set_ready(n->direct, true);
    admin_set_health(n->admin, ADMIN_READY);
    atomic_store(&n->watch.serving, true);
    say_ready(n);
    *out = n;
    return 0;
}

int node_run(struct node *n)
{
    int rc = net_loop_run(n->service.loop);
    return rc < 0 ? rc : n->lost;
}

/* Numbered, because the order matters:
 * 1. the watcher: no more signals are acted on; the admin listener, whose jobs use all that follows;
 * 2. the engine: no more events (its drain thread first, which waits inside it);
 * 3. the worker: its last jobs answer into streams and calls that are still there;
 * 4. the loop: connections close, their streams and calls go; the engine's port takes commands for nobody;
 * 5. what those stood on, in reverse order of its making. */
void node_destroy(struct node *n)
{
    if (!n)
        return;
    struct service *v = &n->service;
    node_watch_stop(n);
    if (n->drain_started)
        pthread_join(n->drain_thread, NULL);
    node_erase_stop(n);
    admin_stop(n->admin);
    node_speed_stop(n);
    engine_destroy(n->engine);
    if (v->engine)
        engine_port_stop(v->engine);
    io_worker_destroy(v->fetcher);
    io_worker_destroy(v->io);
    net_loop_destroy(v->loop);
    direct_destroy(n->direct);
    edge_server_destroy(n->edges);
    net_timer_destroy(n->timer);
    engine_port_destroy(v->engine);
    inbox_destroy(v->inbox);
    conv_index_destroy(v->conversations);
    tenant_keys_destroy(v->keys);
    crypto_wipe(&v->seal, sizeof v->seal);
    tiers_destroy(n->tiers);
    if (v->store)
        store_close(v->store);
    auth_close(v->auth);
    tokenizer_destroy(n->tokenizer);
    model_free(n->model);
    gguf_close(n->file);
    free(n->gauges);
    node_erase_deinit(n);
    free(n);
    stop_done();
}
