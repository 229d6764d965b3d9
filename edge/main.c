/* tandem-edge: the agent on a device. Exit codes: 0, 1 for trouble (one line on stderr says what and what to do), 2 for usage.
 *
 *   start   settings -> model, store, prefill thread -> listeners -> "listening on ..." -> connect to the cloud, for ever
 *   stop    first SIGTERM or SIGINT: nothing new is taken, running replies get DRAIN_US, then the cloud is told to stop; exit 0.
 *           Second, or STOP_MAX_S later: at once (the store is safe at any moment).
 *
 * Threads: this one runs the network loop; a watcher waits for signals; prefill thread and worker are the agent's. */
#include "edge/api_edge.h"
#include "edge/settings.h"
#include "shared/forget.h"
#include "shared/heap.h"
#include "shared/paths.h"
#include "shared/crypto.h"
#include "shared/stop.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#define MODULE    "edge"
#define DRAIN_US  10000000u
#define SETTLE_US 100000u /* for the last frames and answers to leave */

struct program {
    struct edge_settings settings;
    struct net_loop *loop;
    struct agent *agent;
    struct api_edge *api;
    struct net_timer *late, *settle;
    pthread_t watcher;
    bool watching;
    atomic_bool started; /* there is a loop that can be asked to stop */
};

/* ---- signals ---- */

static sigset_t watched_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGUSR1); /* ends the watcher */
    return set;
}

static void on_settled(void *ctx)
{
    struct program *p = ctx;
    net_loop_stop(p->loop);
}

static void on_drained(void *ctx)
{
    struct program *p = ctx;
    net_timer_stop(p->late);
    net_timer_start(p->settle, SETTLE_US);
}

static void on_late(void *ctx)
{
    struct program *p = ctx;
    agent_end_flights(p->agent);
}

static void begin_stop(void *arg)
{
    struct program *p = arg;
    uint32_t count = agent_flight_count(p->agent);
    log_info(MODULE, "stopping: %u request%s under way", count, TD_S(count));
    net_timer_start(p->late, DRAIN_US);
    stop_begins(MODULE, STOP_MAX_S, STOP_SILENT_S, true);
    agent_drain(p->agent, on_drained, p);
}

static void *watch_signals(void *arg)
{
    struct program *p = arg;
    sigset_t set = watched_signals();
    for (bool first = true;;) {
        int signal_number = sigtimedwait(&set, NULL, &(struct timespec){.tv_sec = HEAP_TRIM_S});
        if (signal_number == SIGUSR1)
            return NULL;
        if (signal_number < 0) {
            heap_trim();
            continue;
        }
        if (!first)
            log_warn(MODULE, "second signal: stopping at once");
        if (!first || !atomic_load(&p->started) || net_loop_post(p->loop, begin_stop, p) < 0)
            _exit(!first);
        first = false;
    }
}

/* ---- start ---- */

static void show_progress(void *ctx, uint64_t done, uint64_t total)
{
    (void)ctx;
    fprintf(stderr, "\rchecking the model: %3u %%", (unsigned)(total ? done * 100 / total : 100));
    if (done >= total)
        fprintf(stderr, "\r                         \r");
}

static int listen_on(struct program *p, const char *unix_path, struct td_error *err)
{
    const struct edge_settings *s = &p->settings;
    struct net_listen config = {
        .bind_address = unix_path ? NULL : s->listen,
        .port = (uint16_t)s->listen_port,
        .unix_path = unix_path,
        .http = api_edge_http_handler(p->api),
        /* Against pages that rebind a name to this machine; beyond it the key stands, and names are anybody's. */
        .loopback_hosts_only = unix_path || edge_is_loopback(s->listen),
        .origins_allowed = s->origins[0] ? s->origins : NULL,
    };
    bool v6 = strchr(s->listen, ':') != NULL;
    uint16_t port = 0;
    int rc = net_listen(p->loop, &config, &port, err);
    if (rc < 0)
        return rc;
    if (unix_path)
        log_info(MODULE, "listening on unix socket %s", unix_path);
    else
        log_info(MODULE, "listening on http://%s%s%s:%u/v1 (%s, %u layers here)", v6 ? "[" : "", s->listen,
                 v6 ? "]" : "", port, agent_model_name(p->agent), agent_layers(p->agent));
    return 0;
}

static int start(struct program *p, struct td_error *err)
{
    struct agent_config config;
    edge_settings_agent(&p->settings, &config);
    if (isatty(STDERR_FILENO))
        config.progress = show_progress;
    p->watching = pthread_create(&p->watcher, NULL, watch_signals, p) == 0;
    if (!p->watching)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start a thread for signals");
    p->loop = net_loop_create(err);
    if (!p->loop)
        return -TD_ERR_NOMEM;
    int rc = agent_create(&config, p->loop, &p->agent, err);
    if (rc < 0)
        return rc;
    p->api = api_edge_create(p->agent, p->loop, p->settings.api_key);
    p->late = net_timer_create(p->loop, on_late, p);
    p->settle = net_timer_create(p->loop, on_settled, p);
    if (!p->api || !p->late || !p->settle)
        return td_fail(err, -TD_ERR_NOMEM, "not enough memory to start");
    if ((rc = listen_on(p, NULL, err)) < 0 ||
        (p->settings.unix_socket[0] && (rc = listen_on(p, p->settings.unix_socket, err)) < 0))
        return rc;
    atomic_store(&p->started, true);
    agent_connect(p->agent);
    return 0;
}

/* Numbered, because the order matters:
 * 1. the watcher: no more signals are acted on;
 * 2. the agent's threads: nothing more comes to the loop from them;
 * 3. the loop: connections close, and their owners hear of it while they are still there;
 * 4. the API, whose calls give up their flights; 5. the agent. */
static void stop(struct program *p)
{
    if (p->watching) {
        pthread_kill(p->watcher, SIGUSR1);
        pthread_join(p->watcher, NULL);
    }
    if (p->agent)
        agent_shutdown(p->agent);
    net_loop_destroy(p->loop);
    api_edge_destroy(p->api);
    agent_destroy(p->agent);
    if (p->late)
        net_timer_destroy(p->late);
    if (p->settle)
        net_timer_destroy(p->settle);
    stop_done();
}

/* A core dump would hold prompts and keys. Sanitizers need to trace themselves, so not with them. */
static void forbid_core_dumps(void)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    prctl(PR_SET_DUMPABLE, 0);
#endif
}

int main(int argc, char **argv)
{
    heap_settle();
    forget_enable();
    files_settle();
    static struct program p;
    struct config *config;
    struct td_error err = {0};
    sigset_t set = watched_signals();
    forbid_core_dumps();
    pthread_sigmask(SIG_BLOCK, &set, NULL); /* before any thread: all that come after have them blocked too */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* beyond `ulimit -f` a write fails, like on a full disk, and does not end us */
    int rc = edge_settings_load(argc, argv, &p.settings, &config, &err);
    if (rc == 1)
        return 0;
    if (rc < 0) {
        fprintf(stderr, "tandem-edge: %s\n", err.text);
        return 2;
    }
    log_set_level(p.settings.level);
    rc = start(&p, &err);
    if (rc == 0)
        rc = net_loop_run(p.loop);
    else
        fprintf(stderr, "tandem-edge: %s\n", err.text);
    stop(&p);
    if (rc == 0)
        log_info(MODULE, "stopped");
    crypto_wipe(p.settings.token_text, sizeof p.settings.token_text);
    crypto_wipe(p.settings.api_key, sizeof p.settings.api_key);
    config_free(config);
    return rc == 0 ? 0 : 1;
}
