/* api_conversations: what is asked about stored conversations. The owner reads them from a disk, or waits for one that writes, so that is done by the
 * worker: the loop goes on, and with it everybody's replies. One after the other with the turns that are read and saved there. */
#include "protocol/api_server.h"
#include "protocol/io_worker.h"
#include "shared/crypto.h"
#include <stdlib.h>

struct api_asked {
    struct io_job job;
    struct api_asked *previous, *next; /* the loop's, as the next two */
    struct api_server *server;         /* NULL: it has gone */
    struct http_exchange *exchange;    /* NULL: the client has gone */
    const struct api_ops *ops;
    void *ctx;
    struct api_identity who;
    enum api_verb verb;
    char id[LIMIT_NAME_SIZE + 1];
    char *body;
    size_t body_size;
    int code;
    struct td_error err;
    char *json; /* the answer */
};

static struct api_asked *asked_of(struct io_job *job)
{
    return (struct api_asked *)((char *)job - offsetof(struct api_asked, job));
}

static void asked_free(struct api_asked *a)
{
    if (a->body)
        crypto_wipe(a->body, a->body_size);
    free(a->body);
    free(a->json);
    free(a);
}

/* ---- on the worker's thread ---------------------------------------------------------------------------------- */

static char *deleted_json(const char *id)
{
    json_t *root = json_pack("{s:s,s:s,s:b}", "id", id, "object", "conversation.deleted", "deleted", 1);
    char *json = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    return json;
}

static int delete_one(struct api_asked *a)
{
    int code = a->ops->conversation_delete(a->ctx, &a->who, a->id);
    if (code == 0)
        a->json = deleted_json(a->id);
    return code;
}

static int run(struct api_asked *a)
{
    const struct api_ops *o = a->ops;
    switch (a->verb) {
    case API_LIST:
        return o->conversations ? o->conversations(a->ctx, &a->who, &a->json) : -TD_ERR_NOTFOUND;
    case API_SHOW:
        return o->conversation_show ? o->conversation_show(a->ctx, &a->who, a->id, &a->json)
                                    : -TD_ERR_NOTFOUND;
    case API_DELETE:
        return o->conversation_delete ? delete_one(a) : -TD_ERR_NOTFOUND;
    case API_FORK:
        return o->conversation_fork ? o->conversation_fork(a->ctx, &a->who, a->id, &a->json)
                                    : -TD_ERR_NOTFOUND;
    case API_PIN:
    case API_UNPIN:
        return o->conversation_pin ? o->conversation_pin(a->ctx, &a->who, a->id, a->verb == API_PIN, &a->json)
                                   : -TD_ERR_NOTFOUND;
    case API_EXPORT:
        return o->conversation_export ? o->conversation_export(a->ctx, &a->who, a->id, &a->json)
                                      : -TD_ERR_NOTFOUND;
    case API_IMPORT:
        return o->conversation_import
                   ? o->conversation_import(a->ctx, &a->who, a->body, a->body_size, &a->json, &a->err)
                   : -TD_ERR_NOTFOUND;
    }
    return -TD_ERR_INTERNAL;
}

static void work(struct io_job *job)
{
    struct api_asked *a = asked_of(job);
    a->code = run(a);
}

/* ---- on the loop's ------------------------------------------------------------------------------------------- */

static void respond_code(struct api_server *s, struct http_exchange *x, int code)
{
    int status = api_http_status(code);
    api_respond_error(s, x, status, status == 404 ? "there is no such conversation" : td_status_text(code),
                      NULL, api_error_code(code));
}

static void answer(struct api_asked *a)
{
    char *json = a->json;
    a->json = NULL;
    if (a->code == 0)
        api_respond_json(a->server, a->exchange, 200, json, 0, NULL);
    else if (a->err.text[0])
        api_respond_error(a->server, a->exchange, api_http_status(a->code) < 500 ? 400 : 503, a->err.text,
                          NULL, api_error_code(a->code));
    else
        respond_code(a->server, a->exchange, a->code);
}

static void leave(struct api_asked *a)
{
    *(a->previous ? &a->previous->next : &a->server->asked) = a->next;
    if (a->next)
        a->next->previous = a->previous;
    a->server->asked_count--;
    a->server->asked_size -= a->body_size;
}

static void done(struct io_job *job)
{
    struct api_asked *a = asked_of(job);
    if (a->server)
        leave(a);
    if (a->exchange)
        answer(a);
    asked_free(a);
}

static struct api_asked *asked_create(struct api_server *s, const struct api_question *q)
{
    struct api_asked *a = calloc(1, sizeof *a);
    if (!a || (q->body_size && !(a->body = malloc(q->body_size)))) {
        free(a);
        return NULL;
    }
    a->job =
        (struct io_job){.work = work, .done = done, .owner = io_owner(q->who->tenant, q->who->principal)};
    a->ops = s->config.ops;
    a->ctx = s->config.ctx;
    a->who = *q->who;
    a->verb = q->verb;
    a->body_size = q->body_size;
    if (q->body_size)
        memcpy(a->body, q->body, q->body_size);
    memcpy(a->id, q->id, strnlen(q->id, LIMIT_NAME_SIZE));
    return a;
}

static bool has_room(const struct api_server *s, const struct api_question *q)
{
    uint32_t own = 0;
    for (const struct api_asked *a = s->asked; a; a = a->next)
        own += strcmp(a->who.principal, q->who->principal) == 0 && strcmp(a->who.tenant, q->who->tenant) == 0;
    return s->asked_count < API_ASKED_MAX && own < API_ASKED_EACH &&
           q->body_size <= API_ASKED_SIZE - s->asked_size;
}

void api_ask(struct api_server *s, struct http_exchange *x, const struct api_question *q)
{
    bool room = has_room(s, q);
    struct api_asked *a = room ? asked_create(s, q) : NULL;
    int rc = a ? 0 : room ? -TD_ERR_NOMEM : -TD_ERR_FULL;
    if (rc == 0 && s->config.worker)
        rc = io_worker_submit(s->config.worker, &a->job);
    if (rc < 0) {
        if (a)
            asked_free(a);
        respond_code(s, x, rc);
        return;
    }
    a->server = s;
    a->exchange = x;
    a->next = s->asked;
    if (a->next)
        a->next->previous = a;
    s->asked = a;
    s->asked_count++;
    s->asked_size += a->body_size;
    if (!s->config.worker) {
        work(&a->job);
        done(&a->job);
    }
}

void api_asked_lost(struct api_server *s, const struct http_exchange *x)
{
    for (struct api_asked *a = s->asked; a; a = a->next)
        if (a->exchange == x)
            a->exchange = NULL;
}

void api_asked_forget(struct api_server *s)
{
    while (s->asked) {
        struct api_asked *a = s->asked;
        if (a->exchange)
            http_abort(a->exchange);
        a->exchange = NULL;
        leave(a);
        a->server = NULL;
    }
}
