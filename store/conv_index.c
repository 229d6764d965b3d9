/* conv_index: from the hash of a message history to the conversation that has it.
 *
 * One entry a boundary, chained in hash buckets; several conversations may share a history (the same first question): one that
 * ends there wins, then the one that had a turn last. Entries are bounded: the least recently used go first. A principal that has lost all of its entries is forgotten as a whole
 * and read from the store again when it comes back; one that has lost some only loses matches, which cost a re-tokenisation and
 * never correctness. The store is read without the lock: a version decides between what was read and what was saved meanwhile. */
#include "store/conv_lost.h"
#include "store/conversation.h"
#include "store/store_internal.h"
#include <pthread.h>
#include <stdlib.h>

#define CONV_INDEX_OWNERS_MAX 4096 /* principals known at a time */

struct link { /* of a ring; the head is a link, too */
    struct link *before, *after;
};

struct owner {        /* (tenant, principal) */
    struct link used; /* in conv_index.owners */
    char tenant[STORE_TENANT_MAX + 1], principal[STORE_TENANT_MAX + 1];
    bool filled;
    size_t conversation_count;
    struct link conversations;
};
struct indexed {          /* a conversation */
    struct link link;     /* in owner.conversations */
    struct indexed *next; /* in the bucket */
    struct owner *owner;
    char id[STORE_CONV_ID_MAX + 1];
    uint64_t version, changed_us;
    uint32_t boundary_count;
    struct boundary_entry *entries;
};
struct boundary_entry {
    struct link used;               /* in conv_index.entries */
    struct boundary_entry *next;    /* in the bucket */
    struct boundary_entry *sibling; /* of the same conversation */
    struct indexed *conversation;
    uint32_t boundary;
    uint8_t history[TD_HASH_SIZE];
};

struct conv_index {
    struct store *store;
    pthread_mutex_t lock; /* guards all below */
    size_t entries_max, entry_count, owner_count, bucket_count;
    struct link owners, entries; /* most recently used first */
    struct boundary_entry **buckets;
    struct indexed **by_id; /* as many buckets */
    struct conv_lost *lost;
};

/* ---- rings ------------------------------------------------------------------------------------------------ */

static void ring_init(struct link *head)
{
    head->before = head->after = head;
}
static void ring_remove(struct link *l)
{
    l->before->after = l->after;
    l->after->before = l->before;
}
static void ring_push(struct link *head, struct link *l)
{
    l->before = head;
    l->after = head->after;
    head->after->before = l;
    head->after = l;
}
static void ring_touch(struct link *head, struct link *l)
{
    ring_remove(l);
    ring_push(head, l);
}
#define OF(link_pointer, type, member) ((type *)((char *)(link_pointer)-offsetof(type, member)))

/* ---- entries; the lock is held ---------------------------------------------------------------------------- */

static struct boundary_entry **bucket_of(struct conv_index *x, const uint8_t history[TD_HASH_SIZE])
{
    return &x->buckets[load_le64(history) & (x->bucket_count - 1)];
}

static void entry_free(struct conv_index *x, struct boundary_entry *e)
{
    struct boundary_entry **at = bucket_of(x, e->history);
    while (*at != e)
        at = &(*at)->next;
    *at = e->next;
    for (at = &e->conversation->entries; *at != e; at = &(*at)->sibling)
        ;
    *at = e->sibling;
    ring_remove(&e->used);
    x->entry_count--;
    free(e);
}

static struct indexed **id_bucket_of(struct conv_index *x, const char *id)
{
    uint64_t hash = 14695981039346656037u;
    for (; *id; id++)
        hash = (hash ^ (uint8_t)*id) * 1099511628211u;
    return &x->by_id[hash & (x->bucket_count - 1)];
}

static void conversation_free(struct conv_index *x, struct indexed *c)
{
    while (c->entries)
        entry_free(x, c->entries);
    struct indexed **at = id_bucket_of(x, c->id);
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    ring_remove(&c->link);
    c->owner->conversation_count--;
    free(c);
}

static void owner_free(struct conv_index *x, struct owner *o)
{
    while (o->conversations.after != &o->conversations)
        conversation_free(x, OF(o->conversations.after, struct indexed, link));
    ring_remove(&o->used);
    x->owner_count--;
    free(o);
}

static struct owner *owner_find(struct conv_index *x, const char *tenant, const char *principal)
{
    for (struct link *l = x->owners.after; l != &x->owners; l = l->after) {
        struct owner *o = OF(l, struct owner, used);
        if (strcmp(o->principal, principal) == 0 && strcmp(o->tenant, tenant) == 0)
            return o;
    }
    return NULL;
}

static struct owner *owner_ensure(struct conv_index *x, const char *tenant, const char *principal)
{
    struct owner *o = owner_find(x, tenant, principal);
    if (o) {
        ring_touch(&x->owners, &o->used);
        return o;
    }
    o = keys_name_is_valid(tenant) && keys_name_is_valid(principal) ? calloc(1, sizeof *o) : NULL;
    if (!o)
        return NULL;
    if (x->owner_count >= CONV_INDEX_OWNERS_MAX)
        owner_free(x, OF(x->owners.before, struct owner, used));
    strcpy(o->tenant, tenant);
    strcpy(o->principal, principal);
    ring_init(&o->conversations);
    ring_push(&x->owners, &o->used);
    x->owner_count++;
    return o;
}

static struct indexed *conversation_find(struct conv_index *x, const struct owner *o, const char *id)
{
    struct indexed *c = *id_bucket_of(x, id);
    while (c && (c->owner != o || strcmp(c->id, id) != 0))
        c = c->next;
    return c;
}

/* Drop the entry that was unused longest, and what is empty without it. `keep` is being filled. */
static void evict_one(struct conv_index *x, const struct indexed *keep)
{
    struct boundary_entry *e = OF(x->entries.before, struct boundary_entry, used);
    struct indexed *c = e->conversation;
    struct owner *o = c->owner;
    entry_free(x, e);
    if (c->entries || c == keep)
        return;
    conversation_free(x, c);
    if (o->conversation_count == 0)
        owner_free(x, o);
}

static int entry_add(struct conv_index *x, struct indexed *c, uint32_t boundary,
                     const uint8_t history[TD_HASH_SIZE])
{
    while (x->entry_count >= x->entries_max)
        evict_one(x, c);
    struct boundary_entry *e = calloc(1, sizeof *e);
    if (!e)
        return -TD_ERR_NOMEM;
    struct boundary_entry **bucket = bucket_of(x, history);
    e->conversation = c;
    e->boundary = boundary;
    memcpy(e->history, history, TD_HASH_SIZE);
    e->next = *bucket;
    *bucket = e;
    e->sibling = c->entries;
    c->entries = e;
    ring_push(&x->entries, &e->used);
    x->entry_count++;
    return 0;
}

/* Take in the boundaries of a conversation at a version, unless a newer one is known. */
static void take_in(struct conv_index *x, struct owner *o, uint64_t version, const struct conversation *conv)
{
    struct indexed *c = conversation_find(x, o, conv->id);
    if (c && c->version >= version)
        return;
    if (c)
        conversation_free(x, c);
    c = calloc(1, sizeof *c);
    if (!c)
        return;
    c->owner = o;
    strcpy(c->id, conv->id);
    c->version = version;
    c->changed_us = conv->updated_us;
    c->boundary_count = conv->boundary_count;
    c->next = *id_bucket_of(x, c->id);
    *id_bucket_of(x, c->id) = c;
    ring_push(&o->conversations, &c->link);
    o->conversation_count++;
    /* The longest histories are the likely ones: they go in last, so they are evicted last. */
    uint32_t first =
        conv->boundary_count > x->entries_max ? conv->boundary_count - (uint32_t)x->entries_max : 0;
    for (uint32_t i = first; i < conv->boundary_count; i++)
        if (entry_add(x, c, i, conv->boundaries[i].history) < 0)
            break;
}

static void forget(struct conv_index *x, const char *tenant, const char *principal, const char *conv_id)
{
    pthread_mutex_lock(&x->lock);
    struct owner *o = owner_find(x, tenant, principal);
    struct indexed *c = o ? conversation_find(x, o, conv_id) : NULL;
    if (c)
        conversation_free(x, c);
    pthread_mutex_unlock(&x->lock);
}

/* ---- filling ---------------------------------------------------------------------------------------------- */

struct filling { /* conversations of one principal, newest first, their ids (tokens) freed already */
    size_t count, capacity;
    size_t room; /* boundaries that may still be read */
    struct filled {
        struct conversation conv;
        uint64_t version;
    } * items;
};

static int fill_one(void *ctx, const char *conv_id, uint64_t version, uint64_t updated_us, const void *body,
                    size_t size)
{
    struct filling *f = ctx;
    struct conversation conv;
    (void)updated_us; /* of the record; the conversation's own is that of its last turn */
    if (f->count == f->capacity) {
        size_t capacity = f->capacity ? 2 * f->capacity : 16;
        struct filled *items = realloc(f->items, capacity * sizeof *items);
        if (!items)
            return -TD_ERR_NOMEM;
        f->items = items;
        f->capacity = capacity;
    }
    if (conv_parse(body, size, &conv) < 0)
        return 0; /* of another version, perhaps: still there by its id */
    if (strcmp(conv.id, conv_id) != 0) {
        conv_free(&conv);
        return 0;
    }
    crypto_wipe(conv.ids, conv.ids_count * sizeof *conv.ids);
    conv.ids_count = 0;
    if (conv.boundary_count > f->room) {
        conv_free(&conv);
        return 1;
    }
    f->room -= conv.boundary_count;
    f->items[f->count++] = (struct filled){conv, version};
    return 0;
}

/* Oldest first, so that the newest are the last to be evicted. */
static void take_in_all(struct conv_index *x, const char *tenant, const char *principal, struct filling *f)
{
    pthread_mutex_lock(&x->lock);
    for (size_t i = f->count; i > 0; i--) {
        struct owner *o = owner_ensure(x, tenant, principal);
        if (o)
            take_in(x, o, f->items[i - 1].version, &f->items[i - 1].conv);
    }
    struct owner *o = owner_ensure(x, tenant, principal);
    if (o)
        o->filled = true;
    pthread_mutex_unlock(&x->lock);
}

static int ensure_filled(struct conv_index *x, const char *tenant, const char *principal)
{
    pthread_mutex_lock(&x->lock);
    struct owner *o = owner_ensure(x, tenant, principal);
    bool filled = o && o->filled;
    pthread_mutex_unlock(&x->lock);
    if (!o)
        return keys_name_is_valid(tenant) && keys_name_is_valid(principal) ? -TD_ERR_NOMEM : -TD_ERR_ARG;
    if (filled)
        return 0;
    /* One principal takes at most half of the index, newest conversations first. */
    struct filling f = {.room = x->entries_max / 2};
    int rc = store_conv_each(x->store, tenant, principal, fill_one, &f);
    if (rc == 0)
        take_in_all(x, tenant, principal, &f);
    for (size_t i = 0; i < f.count; i++)
        conv_free(&f.items[i].conv);
    free(f.items);
    return rc;
}

/* ---- interface -------------------------------------------------------------------------------------------- */

struct conv_index *conv_index_create(struct store *s, size_t entries_max)
{
    struct conv_index *x = calloc(1, sizeof *x);
    if (!x)
        return NULL;
    x->store = s;
    x->entries_max = entries_max ? entries_max : 1;
    x->bucket_count = 64;
    while (x->bucket_count < x->entries_max && x->bucket_count < (1u << 20))
        x->bucket_count *= 2;
    x->buckets = calloc(x->bucket_count, sizeof(*x->buckets));
    x->by_id = calloc(x->bucket_count, sizeof(*x->by_id));
    x->lost = conv_lost_create();
    if (!x->buckets || !x->by_id || !x->lost) {
        conv_lost_destroy(x->lost);
        free(x->buckets);
        free(x->by_id);
        free(x);
        return NULL;
    }
    pthread_mutex_init(&x->lock, NULL);
    ring_init(&x->owners);
    ring_init(&x->entries);
    return x;
}

void conv_index_destroy(struct conv_index *x)
{
    if (!x)
        return;
    while (x->owners.after != &x->owners)
        owner_free(x, OF(x->owners.after, struct owner, used));
    pthread_mutex_destroy(&x->lock);
    conv_lost_destroy(x->lost);
    free(x->buckets);
    free(x->by_id);
    free(x);
}

/* Which of two with the same history goes on: one that ends there, as a fork's original does; then the one that had a turn last. */
static bool goes_before(const struct boundary_entry *a, const struct boundary_entry *b)
{
    bool a_ends = a->boundary + 1 == a->conversation->boundary_count,
         b_ends = b->boundary + 1 == b->conversation->boundary_count;
    return a_ends != b_ends ? a_ends : a->conversation->changed_us > b->conversation->changed_us;
}

/* The lock is held. */
static struct boundary_entry *best_entry(struct conv_index *x, const struct owner *o,
                                         const uint8_t history[TD_HASH_SIZE])
{
    struct boundary_entry *best = NULL;
    for (struct boundary_entry *e = *bucket_of(x, history); e; e = e->next)
        if (e->conversation->owner == o && memcmp(e->history, history, TD_HASH_SIZE) == 0 &&
            (!best || goes_before(e, best)))
            best = e;
    return best;
}

int conv_index_match(struct conv_index *x, const char *tenant, const char *principal,
                     const uint8_t (*hashes)[TD_HASH_SIZE], size_t count, char conv_id[STORE_CONV_ID_MAX + 1],
                     uint32_t *boundary)
{
    int rc = count > 0 ? ensure_filled(x, tenant, principal) : 0;
    if (rc < 0)
        return rc;
    rc = -TD_ERR_NOTFOUND;
    pthread_mutex_lock(&x->lock);
    const struct owner *o = owner_find(x, tenant, principal);
    for (size_t i = o ? count : 0; i > 0 && rc < 0; i--) {
        struct boundary_entry *e = best_entry(x, o, hashes[i - 1]);
        if (!e)
            continue;
        ring_touch(&x->entries, &e->used);
        strcpy(conv_id, e->conversation->id);
        *boundary = e->boundary;
        rc = 0;
    }
    pthread_mutex_unlock(&x->lock);
    return rc;
}

int conv_load(struct conv_index *x, const char *tenant, const char *principal, const char *conv_id,
              uint64_t *version, struct conversation *out)
{
    uint8_t *body;
    size_t size;
    int rc = store_conv_get(x->store, tenant, principal, conv_id, version, &body, &size);
    if (rc < 0) {
        if (rc == -TD_ERR_NOTFOUND)
            forget(x, tenant, principal, conv_id);
        return rc;
    }
    rc = conv_parse(body, size, out);
    crypto_wipe(body, size);
    free(body);
    return rc;
}

int conv_save_begin(struct conv_index *x, const char *tenant, const char *principal,
                    uint64_t expected_version, const struct conversation *c, struct store_waiter **waiter)
{
    uint8_t *body;
    size_t size;
    int rc = conv_serialise(c, &body, &size);
    if (rc < 0)
        return rc;
    struct store_waiter *w = patience_waiter(x->store);
    rc =
        w ? store_conv_put(x->store, tenant, principal, c->id, expected_version, body, size, patience_done, w)
          : -TD_ERR_NOMEM;
    crypto_wipe(body, size);
    free(body);
    *waiter = rc < 0 ? NULL : w;
    return w && rc < 0 ? patience_wait(w, rc) : rc;
}

int conv_save_end(struct conv_index *x, const char *tenant, const char *principal, uint64_t expected_version,
                  const struct conversation *c, struct store_waiter *waiter)
{
    int rc = patience_wait(waiter, 0);
    if (rc < 0)
        return rc;
    pthread_mutex_lock(&x->lock);
    struct owner *o = owner_ensure(x, tenant, principal);
    if (o)
        take_in(x, o, expected_version + 1, c);
    conv_lost_forget(x->lost, tenant, principal, c->id);
    pthread_mutex_unlock(&x->lock);
    if (!conv_is_durable(x, tenant, principal, c->id, expected_version + 1)) /* deleted since */
        forget(x, tenant, principal, c->id);
    return 0;
}

int conv_save(struct conv_index *x, const char *tenant, const char *principal, uint64_t expected_version,
              const struct conversation *c)
{
    struct store_waiter *waiter;
    int rc = conv_save_begin(x, tenant, principal, expected_version, c, &waiter);
    return rc < 0 ? rc : conv_save_end(x, tenant, principal, expected_version, c, waiter);
}

int conv_delete(struct conv_index *x, const char *tenant, const char *principal, const char *conv_id)
{
    struct store_waiter *w = patience_waiter(x->store);
    if (!w)
        return -TD_ERR_NOMEM;
    int queued = store_conv_delete(x->store, tenant, principal, conv_id, patience_done, w);
    int rc = patience_wait(w, queued);
    if (rc == 0 || rc == -TD_ERR_NOTFOUND)
        forget(x, tenant, principal, conv_id);
    pthread_mutex_lock(&x->lock);
    if (rc == 0 || rc == -TD_ERR_NOTFOUND)
        conv_lost_forget(x->lost, tenant, principal, conv_id);
    else if (queued == 0)
        conv_lost_note_deleted(x->lost, tenant, principal, conv_id);
    pthread_mutex_unlock(&x->lock);
    return rc;
}

void conv_note_lost(struct conv_index *x, const char *tenant, const char *principal, const char *conv_id,
                    uint64_t version, const char *request_key)
{
    pthread_mutex_lock(&x->lock);
    conv_lost_note(x->lost, tenant, principal, conv_id, version, request_key);
    pthread_mutex_unlock(&x->lock);
}

bool conv_has_lost(struct conv_index *x, const char *tenant, const char *principal, const char *conv_id,
                   const char *request_key)
{
    bool deleted;
    pthread_mutex_lock(&x->lock);
    uint64_t version = conv_lost_version(x->lost, tenant, principal, conv_id, request_key, &deleted);
    pthread_mutex_unlock(&x->lock);
    uint64_t durable = version > 0 ? store_conv_durable(x->store, tenant, principal, conv_id) : 0;
    return durable < version && !(deleted && durable == 0);
}

bool conv_is_durable(struct conv_index *x, const char *tenant, const char *principal, const char *conv_id,
                     uint64_t version)
{
    return store_conv_durable(x->store, tenant, principal, conv_id) >= version;
}

void conv_index_forget_tenant(struct conv_index *x, const char *tenant)
{
    pthread_mutex_lock(&x->lock);
    for (struct link *l = x->owners.after, *next; l != &x->owners; l = next) {
        struct owner *o = OF(l, struct owner, used);
        next = l->after;
        if (strcmp(o->tenant, tenant) == 0)
            owner_free(x, o);
    }
    conv_lost_forget_tenant(x->lost, tenant);
    pthread_mutex_unlock(&x->lock);
}
