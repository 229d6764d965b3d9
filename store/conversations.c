/* conversations: conversation records by (tenant, principal, id). On disk both names are HMACs under a key of the tenant's; in
 * the sealed body they are plain, so that a listing can give them back. */
#include "store/store_internal.h"
#include <stdlib.h>

#define NAMES_SIZE_MAX (4 + STORE_TENANT_MAX + STORE_CONV_ID_MAX)

/* ---- names ------------------------------------------------------------------------------------------------ */

static bool conversation_id_is_valid(const char *id)
{
    size_t size = strnlen(id, STORE_CONV_ID_MAX + 1);
    return size > 0 && size <= STORE_CONV_ID_MAX;
}

/* HMAC over label ‖ u16 size ‖ principal [‖ conversation id]: the size keeps the two names apart. */
static void name_hmac(const struct tenant_keys *keys, const char *principal, const char *conv_id,
                      uint8_t out[32])
{
    uint8_t size[2];
    store_le16(size, (uint16_t)strlen(principal));
    const struct span parts[] = {
        {(const uint8_t *)(conv_id ? "conversation" : "principal"), conv_id ? 12 : 9},
        {size, sizeof size},
        {(const uint8_t *)principal, strlen(principal)},
        {(const uint8_t *)conv_id, conv_id ? strlen(conv_id) : 0},
    };
    hmac_sha256(keys->conversation_key, parts, conv_id ? 4 : 3, out);
}

/* Body of a conversation record: u16 id size ‖ id ‖ u16 principal size ‖ principal ‖ body. */
static int body_parse(struct span plain, struct span *id, struct span *principal, struct span *body)
{
    struct reader r = reader_over(plain.data, plain.size);
    id->size = reader_u16(&r);
    id->data = reader_take(&r, id->size);
    principal->size = reader_u16(&r);
    principal->data = reader_take(&r, principal->size);
    *body = (struct span){r.next, (size_t)(r.end - r.next)};
    return r.bad || id->size == 0 || id->size > STORE_CONV_ID_MAX || principal->size > STORE_TENANT_MAX
               ? -TD_ERR_FORMAT
               : 0;
}

static size_t names_write(uint8_t *out, const char *principal, const char *conv_id)
{
    size_t id_size = strlen(conv_id), principal_size = strlen(principal);
    store_le16(out, (uint16_t)id_size);
    memcpy(out + 2, conv_id, id_size);
    store_le16(out + 2 + id_size, (uint16_t)principal_size);
    memcpy(out + 4 + id_size, principal, principal_size);
    return 4 + id_size + principal_size;
}

/* A conversation that somebody names: its tenant's keys and number, and its HMAC. */
struct target {
    uint32_t tenant;
    struct tenant_keys keys; /* wipe */
    uint8_t id[32], principal[32];
};

static int target_find(struct store *s, const char *tenant, const char *principal, const char *conv_id,
                       bool create, struct target *t)
{
    if (!keys_name_is_valid(principal) || (conv_id && !conversation_id_is_valid(conv_id)))
        return -TD_ERR_ARG;
    t->tenant = keys_find(s->keys, tenant);
    int rc = !t->tenant && create ? patience_tenant(s, tenant, &t->tenant, NULL) : 0;
    rc = rc < 0 ? rc : keys_get(s->keys, t->tenant, &t->keys);
    if (rc < 0)
        return rc;
    name_hmac(&t->keys, principal, NULL, t->principal);
    if (conv_id)
        name_hmac(&t->keys, principal, conv_id, t->id);
    return 0;
}

int conversation_id(struct store *s, const char *tenant, const char *principal, const char *conv_id,
                    uint32_t *number, uint8_t id[32])
{
    struct target t;
    int rc = target_find(s, tenant, principal, conv_id, false, &t);
    if (rc == 0) {
        *number = t.tenant;
        memcpy(id, t.id, sizeof t.id);
        crypto_wipe(&t, sizeof t);
    }
    return rc;
}

/* ---- put and delete --------------------------------------------------------------------------------------- */

static uint64_t newest_version(const struct entry *e)
{
    if (e->pending)
        return e->pending->kind == OP_DELETE ? 0 : e->pending->version;
    return e->conversation ? e->conversation->durable : 0;
}

static struct entry *insert_conversation(struct store *s, struct table_shard *shard,
                                         const struct store_op *op)
{
    struct entry *e = table_insert(&s->conversations, shard, op->tenant, op->id);
    if (e && !e->conversation) {
        e->conversation = calloc(1, sizeof *e->conversation);
        if (!e->conversation) {
            table_remove(&s->conversations, shard, e);
            return NULL;
        }
        memcpy(e->conversation->principal, op->parent, sizeof op->parent);
    }
    return e;
}

static int push_put(struct store *s, struct store_op *op)
{
    struct table_shard *shard = table_lock(&s->conversations, op->id);
    struct entry *e = table_find(&s->conversations, shard, op->tenant, op->id);
    int rc = (e ? newest_version(e) : 0) == op->expected ? 0 : -TD_ERR_CONFLICT;
    if (rc == 0) {
        e = insert_conversation(s, shard, op);
        rc = e ? 0 : -TD_ERR_NOMEM;
    }
    if (rc == 0)
        rc = store_push_entry(s, shard, e, op);
    else
        op_release(op);
    table_unlock(shard);
    return rc;
}

int store_conv_put(struct store *s, const char *tenant, const char *principal, const char *conv_id,
                   uint64_t expected_version, const void *body, size_t size, store_done done, void *ctx)
{
    struct target t;
    if (s->read_only)
        return -TD_ERR_UNSUPPORTED;
    if (size > STORE_CONV_SIZE_MAX)
        return -TD_ERR_LIMIT;
    if (!store_answers(s)) {
        counter_add(&s->counters.put_failures, NULL, 1);
        return -TD_ERR_TIMEOUT;
    }
    int rc = target_find(s, tenant, principal, conv_id, true, &t);
    if (rc < 0)
        return rc;
    struct store_op *op = op_create(OP_CONVERSATION, 1, NAMES_SIZE_MAX + size);
    if (op) {
        size_t names = names_write(op->data, principal, conv_id);
        if (size)
            memcpy(op->data + names, body, size);
        op->size = names + size;
        op->parts[0] = (struct record_part){(uint32_t)op->size, 0};
        op->type = RECORD_CONVERSATION;
        op->tenant = t.tenant;
        memcpy(op->id, t.id, sizeof op->id);
        memcpy(op->parent, t.principal, sizeof op->parent);
        op->expected = expected_version;
        op->version = expected_version + 1;
        op->time_us = clock_wall_us();
        op->done = done;
        op->ctx = ctx;
    }
    crypto_wipe(&t, sizeof t);
    return op ? push_put(s, op) : -TD_ERR_NOMEM;
}

int store_conv_delete(struct store *s, const char *tenant, const char *principal, const char *conv_id,
                      store_done done, void *ctx)
{
    struct target t;
    int rc = target_find(s, tenant, principal, conv_id, false, &t);
    if (rc < 0)
        return rc;
    rc = store_delete_id(s, RECORD_CONVERSATION, t.tenant, t.id, done, ctx);
    crypto_wipe(&t, sizeof t);
    return rc;
}

/* ---- read ------------------------------------------------------------------------------------------------- */

uint64_t store_conv_durable(struct store *s, const char *tenant, const char *principal, const char *conv_id)
{
    struct target t;
    if (target_find(s, tenant, principal, conv_id, false, &t) < 0)
        return 0;
    struct table_shard *shard = table_lock(&s->conversations, t.id);
    const struct entry *e = table_find(&s->conversations, shard, t.tenant, t.id);
    uint64_t version = e ? e->conversation->durable : 0;
    table_unlock(shard);
    crypto_wipe(&t, sizeof t);
    return version;
}

int store_conv_get(struct store *s, const char *tenant, const char *principal, const char *conv_id,
                   uint64_t *version, uint8_t **body, size_t *size)
{
    struct target t;
    uint64_t updated_us;
    int rc = target_find(s, tenant, principal, conv_id, false, &t);
    if (rc < 0)
        return rc;
    rc = read_conversation(s, &t.keys, t.tenant, t.id, version, &updated_us, body, size);
    crypto_wipe(&t, sizeof t);
    if (rc < 0)
        return rc;
    struct span id, name, inner;
    rc = body_parse((struct span){*body, *size}, &id, &name, &inner);
    if (rc < 0) {
        free(*body);
        return -TD_ERR_NOTFOUND;
    }
    memmove(*body, inner.data, inner.size);
    crypto_wipe(*body + inner.size, *size - inner.size);
    *size = inner.size;
    return 0;
}

struct listed {
    uint8_t id[32];
    uint64_t updated_us;
};
struct listing {
    struct listed *items;
    size_t count, capacity;
};

static int listing_add(struct listing *l, const struct entry *e)
{
    if (l->count == l->capacity) {
        size_t capacity = l->capacity ? 2 * l->capacity : 64;
        struct listed *items = realloc(l->items, capacity * sizeof *items);
        if (!items)
            return -TD_ERR_NOMEM;
        l->items = items;
        l->capacity = capacity;
    }
    struct listed *item = &l->items[l->count++];
    memcpy(item->id, e->id, sizeof item->id);
    item->updated_us = e->pending ? e->pending->time_us : e->conversation->updated_us;
    return 0;
}

static int newest_first(const void *a, const void *b)
{
    uint64_t x = ((const struct listed *)a)->updated_us, y = ((const struct listed *)b)->updated_us;
    return (x < y) - (x > y);
}

static int list_principal(struct store *s, const struct target *t, struct listing *l)
{
    int rc = 0;
    for (size_t i = 0; i < TABLE_SHARD_COUNT && rc == 0; i++) {
        struct table_shard *shard = &s->conversations.shards[i];
        pthread_mutex_lock(&shard->lock);
        for (size_t j = 0; j < shard->slot_count && rc == 0; j++) {
            const struct entry *e = &shard->slots[j];
            if (e->tenant == t->tenant &&
                memcmp(e->conversation->principal, t->principal, sizeof t->principal) == 0)
                rc = listing_add(l, e);
        }
        pthread_mutex_unlock(&shard->lock);
    }
    if (l->count)
        qsort(l->items, l->count, sizeof *l->items, newest_first);
    return rc;
}

/* Hand one conversation to fn; one that has gone meanwhile is passed over. A disk that does not answer says nothing about any. */
static int visit(struct store *s, const struct target *t, const uint8_t hmac[32], store_conv_fn fn, void *ctx)
{
    uint64_t version, updated_us;
    uint8_t *plain;
    size_t size;
    struct span id, principal, body;
    int rc = read_conversation(s, &t->keys, t->tenant, hmac, &version, &updated_us, &plain, &size);
    if (rc < 0)
        return rc == -TD_ERR_TIMEOUT ? rc : 0;
    if (body_parse((struct span){plain, size}, &id, &principal, &body) == 0) {
        char conv_id[STORE_CONV_ID_MAX + 1];
        memcpy(conv_id, id.data, id.size);
        conv_id[id.size] = '\0';
        rc = fn(ctx, conv_id, version, updated_us, body.data, body.size);
    }
    crypto_wipe(plain, size);
    free(plain);
    return rc;
}

int store_conv_each(struct store *s, const char *tenant, const char *principal, store_conv_fn fn, void *ctx)
{
    struct target t;
    struct listing l = {0};
    int rc = target_find(s, tenant, principal, NULL, false, &t);
    if (rc < 0)
        return rc == -TD_ERR_NOTFOUND ? 0 : rc; /* an unknown tenant has none */
    rc = list_principal(s, &t, &l);
    for (size_t i = 0; i < l.count && rc == 0; i++)
        rc = visit(s, &t, l.items[i].id, fn, ctx);
    free(l.items);
    crypto_wipe(&t, sizeof t);
    return rc < 0 ? rc : 0;
}
