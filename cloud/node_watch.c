/* node_watch: one thread that waits for signals and, each second, looks whether the tokens file has changed. */
#include "cloud/node_internal.h"
#include "shared/heap.h"
#include "shared/stop.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static void fill_signals(sigset_t *set)
{
    sigemptyset(set);
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGINT);
    sigaddset(set, SIGHUP);
}

void node_block_signals(void)
{
    sigset_t set;
    fill_signals(&set);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* beyond `ulimit -f` a write fails, like on a full disk, and does not end us */
}

struct warming {
    struct tenant_keys *keys;
    int status;
    struct td_error *err;
};

static void warm_key(void *ctx, const char *tenant)
{
    struct warming *w = ctx;
    uint8_t key[CRYPTO_KEY_SIZE];
    struct td_error err;
    int rc = tenant_keys_get(w->keys, tenant, key, &err);
    crypto_wipe(key, sizeof key);
    if (rc < 0 && w->status == 0)
        w->status = td_fail(w->err, rc, "no keys for tenant %s: %s", tenant, err.text);
}

int node_warm_keys(struct node *n, struct td_error *err)
{
    struct warming w = {n->service.keys, 0, err};
    auth_each_tenant(n->service.auth, warm_key, &w);
    return w.status;
}

/* The doors look at their connections in their own tick. */
static void reload_tokens(struct node *n, bool force)
{
    struct td_error err = {0};
    int rc = auth_reload(n->service.auth, force, &err);
    if (rc < 0 && strcmp(err.text, n->watch.told) != 0)
        log_error("cloud", "%s; the tokens read before stay in force", err.text);
    snprintf(n->watch.told, sizeof n->watch.told, "%s", err.text);
    if (rc <= 0)
        return;
    if (node_warm_keys(n, &err) < 0)
        log_error("cloud", "%s", err.text);
    size_t count = auth_count(n->service.auth);
    log_info("cloud", "tokens file read: %zu token%s", count, TD_S(count));
}

/* Before it serves there is nothing to save; after the first signal the second one means now. */
static void stop_signal(struct node *n)
{
    if (!atomic_load(&n->watch.serving))
        _exit(0);
    stop_begins("cloud", STOP_MAX_S, STOP_SILENT_S, true);
    log_info("cloud", "stopping: running replies have %u s to finish", NODE_DRAIN_MS / 1000);
    net_loop_post_wait(n->service.loop, node_begin_drain, n);
}

static void *watch(void *arg)
{
    struct node *n = arg;
    unsigned quiet_s = 0;
    sigset_t set;
    fill_signals(&set);
    while (!atomic_load(&n->watch.stop)) {
        int got = sigtimedwait(&set, NULL, &(struct timespec){.tv_sec = 1});
        if (got == SIGTERM || got == SIGINT)
            stop_signal(n);
        else if (atomic_load(&n->watch.serving) && !atomic_load(&n->watch.stop))
            reload_tokens(n, got == SIGHUP);
        if (got < 0 && ++quiet_s % HEAP_TRIM_S == 0)
            heap_trim();
    }
    return NULL;
}

int node_watch_start(struct node *n, struct td_error *err)
{
    if (pthread_create(&n->watch.thread, NULL, watch, n) != 0)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start: no thread can be made");
    pthread_setname_np(n->watch.thread, "td-watch");
    n->watch.started = true;
    return 0;
}

void node_watch_stop(struct node *n)
{
    if (!n->watch.started)
        return;
    atomic_store(&n->watch.stop, true);
    pthread_kill(n->watch.thread, SIGHUP); /* blocked there, so it only ends the wait */
    pthread_join(n->watch.thread, NULL);
    n->watch.started = false;
}
