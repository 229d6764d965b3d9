/* edge_server_conversation: the cloud's copy of an edge's conversations: their ids, so that an edge that comes back sends only what is new.
 * See edge_server.h.
 *
 * The edge owns the conversation; the cloud's copy is a convenience, found again by (id, length, hash) or not at all (need_ids). So the latest
 * turn simply replaces it. Boundaries carry a hash that no message history ever has: the cloud never saw the messages' text. */
#include "cloud/edge_server_internal.h"
#include "shared/log.h"
#include <stdio.h>
#include <stdlib.h>

/* ---- read ---- */

struct conversation_read {
    struct io_job job; /* first */
    struct service *service;
    struct edge_stream *stream; /* the loop's thread alone; NULL: it has gone */
    struct engine_open open;    /* ids: what was sent */
    char conversation[LIMIT_NAME_SIZE + 1];
    uint32_t length;
    uint8_t hash[TD_HASH_SIZE];
    int status; /* 0: open.ids is complete; -TD_ERR_NOTFOUND: not known in that state */
};

static void wipe_ids(int32_t *ids, size_t count)
{
    if (ids)
        crypto_wipe(ids, count * sizeof *ids);
    free(ids);
}

static size_t sent_count(const struct conversation_read *r)
{
    return r->open.prompt_count - r->length + r->open.held_count;
}

/* Known ids in front of those that were sent. */
static int join(struct conversation_read *r, const struct conversation *c)
{
    uint8_t hash[TD_HASH_SIZE];
    if (c->ids_count < r->length)
        return -TD_ERR_NOTFOUND;
    ids_hash(c->ids, r->length, hash);
    if (memcmp(hash, r->hash, TD_HASH_SIZE) != 0)
        return -TD_ERR_NOTFOUND;
    size_t sent = sent_count(r);
    int32_t *ids = malloc((r->length + sent + 1) * sizeof *ids);
    if (!ids)
        return -TD_ERR_NOMEM;
    memcpy(ids, c->ids, r->length * sizeof *ids);
    if (sent)
        memcpy(ids + r->length, r->open.ids, sent * sizeof *ids);
    wipe_ids(r->open.ids, sent);
    r->open.ids = ids;
    return 0;
}

static void read_work(struct io_job *job)
{
    struct conversation_read *r = (struct conversation_read *)job;
    struct conversation c;
    uint64_t version;
    r->status = conv_load(r->service->conversations, r->open.tenant, r->open.principal, r->conversation,
                          &version, &c);
    if (r->status < 0)
        return;
    r->status = join(r, &c);
    conv_free(&c);
}

static void read_free(struct conversation_read *r)
{
    wipe_ids(r->open.ids, r->status == 0 ? r->open.prompt_count + r->open.held_count : sent_count(r));
    crypto_wipe(r, sizeof *r);
    free(r);
}

/* The last frame of its stream in the link. */
static void need_ids(struct edge_stream *s)
{
    struct edge_connection *c = s->connection;
    Tandem__OpenAck m = TANDEM__OPEN_ACK__INIT;
    m.attempt = s->attempt;
    m.need_ids = true;
    uint32_t id = s->id;
    edge_stream_free(s);
    int rc = link_send(c->link, FRAME_OPEN_ACK, id, &m.base, NULL, 0);
    if (rc < 0 && rc != -TD_ERR_CLOSED)
        link_fail(c->link, rc, "the peer does not read");
    edge_connection_flush(c);
}

static void read_done(struct io_job *job)
{
    struct conversation_read *r = (struct conversation_read *)job;
    struct edge_stream *s = r->stream;
    if (s) {
        struct edge_connection *c = s->connection;
        s->reading = NULL;
        if (r->status == 0) {
            int32_t *ids = r->open.ids;
            struct engine_open open = r->open;
            r->open.ids = NULL;
            open.ids = ids;
            edge_stream_begin(s, &open);
            edge_connection_flush(c);
        } else { /* also when the store cannot be read: the edge has the ids */
            need_ids(s);
        }
    }
    read_free(r);
}

int edge_conversation_read(struct edge_stream *s, struct engine_open *open, uint32_t length,
                           const uint8_t hash[TD_HASH_SIZE])
{
    struct service *service = s->connection->server->service;
    struct conversation_read *r = calloc(1, sizeof *r);
    if (!r) {
        wipe_ids(open->ids, open->prompt_count - length + open->held_count);
        return -TD_ERR_NOMEM;
    }
    r->job.work = read_work;
    r->job.done = read_done;
    r->job.owner = io_owner(s->connection->who.tenant, s->connection->who.principal);
    r->service = service;
    r->stream = s;
    r->open = *open;
    r->length = length;
    r->status = -TD_ERR_NOTFOUND;
    memcpy(r->hash, hash, TD_HASH_SIZE);
    memcpy(r->conversation, s->conversation, sizeof r->conversation);
    int rc = io_worker_submit(service->io, &r->job);
    if (rc < 0)
        read_free(r);
    else
        s->reading = r;
    return rc;
}

void edge_conversation_forget(struct edge_stream *s)
{
    s->reading->stream = NULL;
    s->reading = NULL;
}

/* ---- save ---- */

struct conversation_save {
    struct io_job job; /* first */
    struct edge_server *server;
    char tenant[LIMIT_NAME_SIZE + 1], principal[LIMIT_NAME_SIZE + 1], conversation[LIMIT_NAME_SIZE + 1];
    char request_key[2 * GEN_REQUEST_ID_SIZE + 1];
    uint8_t own_key[CRYPTO_KEY_SIZE];
    int32_t *ids;
    uint32_t ids_count;
    int status;
    struct conversation state; /* while it is being saved, as the next two */
    uint64_t version;
    struct store_waiter *waiter; /* NULL: it is not */
};

/* Ids that both have from the start. */
static uint32_t common_count(const struct conversation *c, const struct conversation_save *s)
{
    uint32_t count = 0, most = TD_MIN(c->ids_count, s->ids_count);
    while (count < most && c->ids[count] == s->ids[count])
        count++;
    return count;
}

/* No history of messages hashes to this: another label, and ids instead of text. */
static void turn_mark(const struct conversation_save *s, uint8_t out[TD_HASH_SIZE])
{
    static const char label[] = "tandem-edge-turn";
    uint8_t hash[TD_HASH_SIZE];
    ids_hash(s->ids, s->ids_count, hash);
    struct span parts[] = {{(const uint8_t *)label, sizeof label}, {hash, sizeof hash}};
    hmac_sha256(s->own_key, parts, TD_COUNT(parts), out);
}

/* c becomes the state after this turn. Takes s->ids. */
static int update(struct conversation_save *s, const struct service *service, struct conversation *c)
{
    uint32_t common = common_count(c, s), kept = 0;
    while (kept < c->boundary_count && c->boundaries[kept].ids_count <= common &&
           kept + 1 < CONV_MESSAGES_MAX)
        kept++;
    struct conv_boundary *boundaries = realloc(c->boundaries, (kept + 1) * sizeof *boundaries);
    if (!boundaries)
        return -TD_ERR_NOMEM;
    c->boundaries = boundaries;
    c->boundary_count = kept + 1;
    boundaries[kept] = (struct conv_boundary){.ids_count = s->ids_count};
    boundaries[kept].reply_open =
        s->ids_count == 0 || !tokenizer_is_end(service->tokenizer, s->ids[s->ids_count - 1]);
    turn_mark(s, boundaries[kept].history);
    wipe_ids(c->ids, c->ids_count);
    c->ids = s->ids;
    c->ids_count = s->ids_count;
    s->ids = NULL;
    memcpy(c->id, s->conversation, strlen(s->conversation) + 1);
    tokenizer_id(service->tokenizer, c->tokenizer_id);
    memcpy(c->fingerprint, service->fingerprint, TD_HASH_SIZE);
    c->updated_us = clock_wall_us();
    if (!c->created_us)
        c->created_us = c->updated_us;
    memcpy(c->last_request_key, s->request_key, sizeof s->request_key);
    return 0;
}

/* A repeated request has been saved already: nothing is written again. */
static void save_work(struct io_job *job)
{
    struct conversation_save *s = (struct conversation_save *)job;
    struct service *service = s->server->service;
    struct conversation *c = &s->state;
    s->status = conv_load(service->conversations, s->tenant, s->principal, s->conversation, &s->version, c);
    if (s->status < 0 && s->status != -TD_ERR_NOTFOUND)
        return;
    if (s->status < 0) {
        memset(c, 0, sizeof *c);
        s->version = 0;
    }
    s->status = 0;
    if (strcmp(c->last_request_key, s->request_key) != 0) {
        s->status = update(s, service, c);
        if (s->status == 0)
            s->status =
                conv_save_begin(service->conversations, s->tenant, s->principal, s->version, c, &s->waiter);
    }
    if (!s->waiter)
        conv_free(c);
}

static void save_wait(struct io_job *job)
{
    struct conversation_save *s = (struct conversation_save *)job;
    if (!s->waiter)
        return;
    s->status = conv_save_end(s->server->service->conversations, s->tenant, s->principal, s->version,
                              &s->state, s->waiter);
    conv_free(&s->state);
}

static void save_free(struct conversation_save *s)
{
    wipe_ids(s->ids, s->ids_count);
    crypto_wipe(s, sizeof *s);
    free(s);
}

static void save_done(struct io_job *job)
{
    struct conversation_save *s = (struct conversation_save *)job;
    metric_add(s->status == 0 ? s->server->saved : s->server->save_failures, 1);
    if (s->status < 0 && log_limit_allows(&s->server->log_failures, clock_mono_us()))
        log_warn("cloud", "a conversation of %s/%s was not saved: %s", s->tenant, s->principal,
                 td_status_text(s->status));
    save_free(s);
}

static bool fill_save(struct conversation_save *save, const struct edge_stream *s, const int32_t *ids,
                      uint32_t count)
{
    const struct edge_connection *c = s->connection;
    save->job.work = save_work;
    save->job.wait = save_wait;
    save->job.done = save_done;
    save->job.owner = io_owner(c->who.tenant, c->who.principal);
    save->server = c->server;
    memcpy(save->tenant, c->who.tenant, sizeof save->tenant);
    memcpy(save->principal, c->who.principal, sizeof save->principal);
    memcpy(save->conversation, s->conversation, sizeof save->conversation);
    memcpy(save->own_key, c->own_key, CRYPTO_KEY_SIZE);
    hex_encode(s->request_id, GEN_REQUEST_ID_SIZE, save->request_key);
    save->ids = malloc((count + 1u) * sizeof *save->ids);
    if (!save->ids)
        return false;
    memcpy(save->ids, ids, count * sizeof *ids);
    save->ids_count = count;
    return true;
}

void edge_conversation_save(struct edge_stream *s, const int32_t *ids, uint32_t count)
{
    struct edge_server *server = s->connection->server;
    struct conversation_save *save = calloc(1, sizeof *save);
    if (save && fill_save(save, s, ids, count) && io_worker_submit(server->service->io, &save->job) == 0)
        return;
    metric_add(server->save_failures, 1);
    if (log_limit_allows(&server->log_failures, clock_mono_us()))
        log_warn("cloud", "a conversation of %s/%s was not saved: too much is waiting for the store",
                 s->connection->who.tenant, s->connection->who.principal);
    if (save)
        save_free(save);
}
