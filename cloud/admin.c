/* admin: see admin.h. */
#include "cloud/admin.h"
#include "cloud/admin_store.h"
#include "protocol/net.h"
#include "shared/metrics.h"
#include "store/operator.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

struct admin {
    struct net_loop *loop;
    struct http_handler handler;
    pthread_t thread;
    uint16_t port;
    atomic_int health;                   /* enum admin_health */
    _Atomic(struct admin_store *) store; /* NULL until the store is open */
};

static void respond(struct http_exchange *x, int status, const char *type, const char *text)
{
    http_respond(x, status, type, NULL, 0, text, strlen(text));
}

static void serve_metrics(struct http_exchange *x)
{
    size_t size;
    char *text = metrics_render(&size);
    if (!text) {
        respond(x, 503, "text/plain", "not enough memory\n");
        return;
    }
    http_respond(x, 200, "text/plain; version=0.0.4; charset=utf-8", NULL, 0, text, size);
    free(text);
}

static void serve_health(const struct admin *a, struct http_exchange *x)
{
    static const char *const texts[] = {[ADMIN_STARTING] = "{\"status\":\"starting\"}",
                                        [ADMIN_READY] = "{\"status\":\"ok\"}",
                                        [ADMIN_DRAINING] = "{\"status\":\"draining\"}"};
    int health = atomic_load(&a->health);
    respond(x, health == ADMIN_READY ? 200 : 503, "application/json", texts[health]);
}

static void on_request(void *ctx, struct http_exchange *x, const struct http_request *r)
{
    struct admin *a = ctx;
    struct admin_store *store = atomic_load(&a->store);
    if (strncmp(r->path, "/store/", 7) == 0 && store)
        admin_store_request(store, x, r);
    else if (strncmp(r->path, "/store/", 7) == 0)
        respond(x, 503, "text/plain", "the node is starting\n");
    else if (strcmp(r->path, "/store") == 0)
        respond(x, 404, "text/plain",
                "the store's upkeep is below /store/, for the node's operator: ask with `tandem store stat "
                "--admin http://127.0.0.1:PORT --store-key-file FILE`\n");
    else if (strncmp(r->path, "/v1", 3) == 0)
        respond(x, 404, "text/plain", "this is the admin port; the API is at the node's --listen-port\n");
    else if (strcmp(r->method, "GET") != 0)
        respond(x, 405, "text/plain", "only GET is known here\n");
    else if (strcmp(r->path, "/metrics") == 0)
        serve_metrics(x);
    else if (strcmp(r->path, "/health") == 0)
        serve_health(a, x);
    else
        respond(x, 404, "text/plain", "there are /metrics, /health and /store/stat here\n");
}

static void on_client_gone(void *ctx, struct http_exchange *x)
{
    struct admin *a = ctx;
    struct admin_store *store = atomic_load(&a->store);
    if (store) /* all other answers are given at once */
        admin_store_client_gone(store, x);
}

static void *serve(void *arg)
{
    struct admin *a = arg;
    net_loop_run(a->loop);
    return NULL;
}

int admin_start(uint16_t port, struct admin **out, struct td_error *err)
{
    struct admin *a = calloc(1, sizeof *a);
    if (!a)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start: out of memory");
    a->handler = (struct http_handler){on_request, on_client_gone, a};
    struct net_listen listen = {.bind_address = "127.0.0.1",
                                .port = port,
                                .http = &a->handler,
                                .loopback_hosts_only = true,
                                .takes_all_files = true};
    struct td_error why = {0};
    a->loop = net_loop_create(err);
    int rc = a->loop ? net_listen(a->loop, &listen, &a->port, &why) : -TD_ERR_INTERNAL;
    if (rc == -TD_ERR_EXISTS)
        td_fail(err, rc,
                "cannot listen on 127.0.0.1 port %u for /metrics: another program uses it; stop that one or "
                "choose another "
                "--admin-port",
                port);
    else if (rc < 0 && a->loop)
        td_fail(err, rc, "%s (for /metrics; see --admin-port)", why.text);
    if (rc == 0 && pthread_create(&a->thread, NULL, serve, a) != 0)
        rc = td_fail(err, -TD_ERR_NOMEM, "cannot start the thread of the admin listener");
    if (rc < 0) {
        net_loop_destroy(a->loop);
        free(a);
        return rc;
    }
    pthread_setname_np(a->thread, "td-admin");
    *out = a;
    return 0;
}

uint16_t admin_port(const struct admin *a)
{
    return a->port;
}

int admin_set_store(struct admin *a, struct store *store, const uint8_t master[CRYPTO_KEY_SIZE])
{
    char token[OPERATOR_TOKEN_SIZE + 1];
    uint8_t hash[TD_HASH_SIZE];
    operator_token(master, token);
    sha256_once(token, OPERATOR_TOKEN_SIZE, hash);
    crypto_wipe(token, sizeof token);
    struct admin_store *made = admin_store_create(a->loop, store, hash);
    atomic_store(&a->store, made);
    return made ? 0 : -TD_ERR_NOMEM;
}

void admin_set_erase(struct admin *a, admin_erase_fn erase, void *ctx)
{
    admin_store_set_erase(atomic_load(&a->store), erase, ctx);
}

void admin_set_health(struct admin *a, enum admin_health health)
{
    atomic_store(&a->health, (int)health);
}

void admin_stop(struct admin *a)
{
    if (!a)
        return;
    net_loop_stop(a->loop);
    pthread_join(a->thread, NULL);
    struct admin_store *store = atomic_load(&a->store);
    admin_store_stop(store);
    net_loop_destroy(a->loop);
    admin_store_destroy(store);
    free(a);
}
