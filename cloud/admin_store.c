/* admin_store: see admin_store.h. */
#include "cloud/admin_store.h"
#include "protocol/openai.h"
#include "shared/stop.h"
#include "store/operator.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

struct admin_store {
    struct net_loop *loop;
    struct store *store;
    _Atomic(admin_erase_fn) erase; /* NULL until the node can */
    void *erase_ctx;               /* set before `erase` */
    uint8_t token_hash[TD_HASH_SIZE];

    bool running; /* the loop's; while it is set the thread alone has the fields below, but for `exchange` */
    struct http_exchange *exchange; /* the loop's; NULL: the client has gone */
    pthread_t thread;
    bool joinable;    /* the loop's */
    const char *name; /* the loop's: what runs, or ran last */
    _Atomic uint64_t done, total;
    json_t *(*work)(struct admin_store *a, struct td_error *err);
    json_t *request, *result;
    struct td_error err;
};

static void respond_error(struct http_exchange *x, int status, const char *message)
{
    char *json = api_json_error(status, message, NULL, NULL);
    http_respond(x, status, "application/json", NULL, 0, json ? json : "", json ? strlen(json) : 0);
    free(json);
}

/* ---- work, on the thread ------------------------------------------------------------------------------------ */

static void note_progress(void *ctx, uint64_t done, uint64_t total)
{
    struct admin_store *a = ctx;
    atomic_store_explicit(&a->done, done, memory_order_relaxed);
    atomic_store_explicit(&a->total, total, memory_order_relaxed);
}

static json_t *do_compact(struct admin_store *a, struct td_error *err)
{
    json_t *percent = json_object_get(a->request, "dead_percent");
    json_int_t value = percent ? json_integer_value(percent) : OPERATOR_DEAD_PERCENT;
    uint64_t freed = 0;
    if (value < 0 || value > 100 || (percent && !json_is_integer(percent))) {
        td_fail(err, -TD_ERR_ARG, "cannot compact: 'dead_percent' is a number from 0 to 100");
        return NULL;
    }
    if (store_compact(a->store, (unsigned)value, note_progress, a, &freed, err) < 0)
        return NULL;
    return json_pack("{s:I}", "freed_bytes", (json_int_t)freed);
}

static json_t *do_gc(struct admin_store *a, struct td_error *err)
{
    uint64_t blocks = 0, freed = 0;
    if (store_gc(a->store, note_progress, a, &blocks, &freed, err) < 0)
        return NULL;
    return json_pack("{s:I,s:I}", "blocks", (json_int_t)blocks, "freed_bytes", (json_int_t)freed);
}

static json_t *do_verify(struct admin_store *a, struct td_error *err)
{
    uint64_t records = 0, bad = 0;
    if (store_verify(a->store, note_progress, a, &records, &bad, err) < 0)
        return NULL;
    return json_pack("{s:I,s:I}", "records", (json_int_t)records, "bad", (json_int_t)bad);
}

static json_t *do_pin(struct admin_store *a, struct td_error *err)
{
    if (operator_pin(a->store, a->request, err) < 0)
        return NULL;
    return json_pack("{s:b}", "pinned", json_is_true(json_object_get(a->request, "pinned")));
}

static json_t *do_erase(struct admin_store *a, struct td_error *err)
{
    const char *tenant = json_string_value(json_object_get(a->request, "tenant"));
    admin_erase_fn erase = atomic_load(&a->erase);
    if (!tenant || !erase) {
        td_fail(err, tenant ? -TD_ERR_AGAIN : -TD_ERR_ARG, "%s",
                tenant ? "the node is starting" : "cannot erase: 'tenant' is needed");
        return NULL;
    }
    return erase(a->erase_ctx, tenant, err) < 0 ? NULL : json_pack("{s:s}", "erased", tenant);
}

static int status_of(const struct td_error *err)
{
    if (err->code == -TD_ERR_ARG)
        return 400;
    return err->code == -TD_ERR_NOTFOUND ? 404 : 503;
}

static void join(struct admin_store *a)
{
    if (a->joinable)
        pthread_join(a->thread, NULL);
    a->joinable = false;
}

void admin_store_stop(struct admin_store *a)
{
    if (!a)
        return;
    store_end_jobs(a->store);
    stop_note_late(1); /* if not with that, with a read that does not come back */
    join(a);
    stop_note_late(-1);
}

static void answer(void *arg)
{
    struct admin_store *a = arg;
    join(a);
    char *json = a->result ? json_dumps(a->result, JSON_COMPACT) : NULL;
    if (a->exchange && json)
        http_respond(a->exchange, 200, "application/json", NULL, 0, json, strlen(json));
    else if (a->exchange)
        respond_error(a->exchange, status_of(&a->err), a->err.text[0] ? a->err.text : "out of memory");
    free(json);
    json_decref(a->result);
    json_decref(a->request);
    a->result = a->request = NULL;
    a->exchange = NULL;
    a->running = false;
}

static void *work(void *arg)
{
    struct admin_store *a = arg;
    a->result = a->work(a, &a->err);
    net_loop_post_wait(a->loop, answer, a);
    return NULL;
}

/* ---- requests, on the loop ---------------------------------------------------------------------------------- */

static bool may_ask(const struct admin_store *a, const char *authorization)
{
    static const char scheme[] = "Bearer ";
    uint8_t hash[TD_HASH_SIZE];
    if (strncasecmp(authorization, scheme, sizeof scheme - 1) != 0)
        return false;
    sha256_once(authorization + sizeof scheme - 1, strlen(authorization) - (sizeof scheme - 1), hash);
    return crypto_equal(hash, a->token_hash, sizeof hash);
}

static void tell_stat(const struct admin_store *a, struct http_exchange *x)
{
    json_t *stat = operator_stats(a->store);
    char *json = stat ? json_dumps(stat, JSON_COMPACT) : NULL;
    if (json)
        http_respond(x, 200, "application/json", NULL, 0, json, strlen(json));
    else
        respond_error(x, 503, "out of memory");
    free(json);
    json_decref(stat);
}

static void tell_progress(const struct admin_store *a, struct http_exchange *x)
{
    char text[128];
    int size = snprintf(text, sizeof text, "{\"running\":%s%s%s,\"done\":%llu,\"total\":%llu}",
                        a->running ? "\"" : "", a->running ? a->name : "null", a->running ? "\"" : "",
                        (unsigned long long)atomic_load_explicit(&a->done, memory_order_relaxed),
                        (unsigned long long)atomic_load_explicit(&a->total, memory_order_relaxed));
    http_respond(x, 200, "application/json", NULL, 0, text, (size_t)size);
}

static const struct route {
    const char *path, *method;
    json_t *(*work)(struct admin_store *a, struct td_error *err); /* may wait for the disk: on the thread */
    void (*tell)(const struct admin_store *a,
                 struct http_exchange *x); /* at once, whatever the thread does */
} routes[] = {
    {"/store/stat", "GET", NULL, tell_stat},
    {"/store/compact", "POST", do_compact, NULL},
    {"/store/gc", "POST", do_gc, NULL},
    {"/store/pin", "POST", do_pin, NULL},
    {"/store/erase-tenant", "POST", do_erase, NULL},
    {"/store/verify", "POST", do_verify, NULL},
    {"/store/progress", "GET", NULL, tell_progress},
};

static void start(struct admin_store *a, struct http_exchange *x, const struct http_request *r,
                  const struct route *route)
{
    a->request =
        r->body_size ? json_loadb(r->body, r->body_size, JSON_REJECT_DUPLICATES, NULL) : json_object();
    if (!json_is_object(a->request)) {
        json_decref(a->request);
        a->request = NULL;
        respond_error(x, 400, "the body must be a JSON object");
        return;
    }
    a->work = route->work;
    a->name = route->path + sizeof "/store/" - 1;
    note_progress(a, 0, 0);
    a->err = (struct td_error){0};
    a->exchange = x;
    a->running = a->joinable = pthread_create(&a->thread, NULL, work, a) == 0;
    if (a->running)
        return;
    json_decref(a->request);
    a->request = NULL;
    a->exchange = NULL;
    respond_error(x, 503, "there is no memory for a thread");
}

void admin_store_request(struct admin_store *a, struct http_exchange *x, const struct http_request *r)
{
    const struct route *route = NULL;
    for (size_t i = 0; i < TD_COUNT(routes); i++)
        if (strcmp(routes[i].path, r->path) == 0)
            route = &routes[i];
    if (!route)
        respond_error(x, 404,
                      "there are /store/stat, /store/compact, /store/gc, /store/verify, /store/pin, "
                      "/store/erase-tenant and /store/progress here");
    else if (!may_ask(a, r->authorization))
        respond_error(x, 401,
                      "the admin token is missing or wrong; tandem store makes it from --store-key-file");
    else if (strcmp(route->method, r->method) != 0)
        respond_error(x, 405, "this path does not know that method");
    else if (route->tell)
        route->tell(a, x);
    else if (a->running)
        respond_error(x, 409, "the store is at work for another request of this kind; try again soon");
    else
        start(a, x, r, route);
}

void admin_store_client_gone(struct admin_store *a, const struct http_exchange *x)
{
    if (a->exchange == x)
        a->exchange = NULL;
}

void admin_store_set_erase(struct admin_store *a, admin_erase_fn erase, void *ctx)
{
    a->erase_ctx = ctx;
    atomic_store(&a->erase, erase);
}

/* ---- life --------------------------------------------------------------------------------------------------- */

struct admin_store *admin_store_create(struct net_loop *loop, struct store *store,
                                       const uint8_t token_hash[TD_HASH_SIZE])
{
    struct admin_store *a = calloc(1, sizeof *a);
    if (!a)
        return NULL;
    a->loop = loop;
    a->store = store;
    memcpy(a->token_hash, token_hash, TD_HASH_SIZE);
    return a;
}

void admin_store_destroy(struct admin_store *a)
{
    if (!a)
        return;
    join(a);
    json_decref(a->request);
    json_decref(a->result);
    crypto_wipe(a, sizeof *a);
    free(a);
}
