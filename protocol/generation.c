/* generation: see generation.h. The table is an array of entries, searched by a hash of (tenant, principal, request id);
 * a lookup is one pass over 8-byte keys, and happens once a request.
 *
 * Invariants: ids are appended to the reply before they are sent, so an edge never holds one from here that the table lacks; the attempt
 * of a generation only grows; a generation is owned by at most one stream, the one of its attempt. */
#include "protocol/generation.h"
#include "shared/crypto.h"
#include <stdlib.h>

void ids_hash(const int32_t *ids, size_t count, uint8_t out[TD_HASH_SIZE])
{
    uint8_t bytes[1024];
    struct sha256 hash;
    sha256_init(&hash);
    for (size_t i = 0; i < count;) {
        size_t size = 0;
        for (; size < sizeof bytes && i < count; i++, size += 4)
            store_le32(bytes + size, (uint32_t)ids[i]);
        sha256_update(&hash, bytes, size);
    }
    sha256_final(&hash, out);
    crypto_wipe(bytes, sizeof bytes); /* token ids are text */
}

void gen_id_from_key(const uint8_t principal_key[32], const char *idempotency_key,
                     uint8_t request_id[GEN_REQUEST_ID_SIZE], uint64_t *seed)
{
    static const char label[] =
        "tandem-idempotency"; /* its NUL is part of it: no key can imitate the border */
    uint8_t mac[TD_HASH_SIZE];
    struct span parts[] = {{(const uint8_t *)label, sizeof label},
                           {(const uint8_t *)idempotency_key, strlen(idempotency_key)}};
    hmac_sha256(principal_key, parts, TD_COUNT(parts), mac);
    memcpy(request_id, mac, GEN_REQUEST_ID_SIZE);
    *seed = load_le64(mac + GEN_REQUEST_ID_SIZE);
}

/* ---- edge ---- */

int gen_receive_tokens(struct gen_receiver *g, uint64_t attempt, uint32_t index, struct span ids_le)
{
    if (attempt != g->attempt)
        return 0;
    size_t count = ids_le.size / 4;
    if (ids_le.size % 4 != 0 || index > g->count || count > g->capacity || index > g->capacity - count)
        return -TD_ERR_PROTOCOL;
    size_t known = TD_MIN(count, (size_t)(g->count - index));
    for (size_t i = 0; i < known; i++)
        if ((int32_t)load_le32(ids_le.data + 4 * i) != g->ids[index + i])
            return index + i < g->confirmed ? -TD_ERR_PROTOCOL : -TD_ERR_CONFLICT;
    if (g->done && known < count)
        return -TD_ERR_PROTOCOL;
    for (size_t i = known; i < count; i++)
        g->ids[g->count++] = (int32_t)load_le32(ids_le.data + 4 * i);
    g->confirmed = TD_MAX(g->confirmed, index + (uint32_t)count);
    return (int)(count - known);
}

int gen_make_token(struct gen_receiver *g, uint32_t index, int32_t id)
{
    if (index < g->count)
        return g->ids[index] == id ? 0 : -TD_ERR_CONFLICT;
    if (index > g->count || index >= g->capacity)
        return -TD_ERR_LIMIT;
    g->ids[g->count++] = id;
    return 1;
}

void gen_reopen(struct gen_receiver *g, uint64_t wall_us)
{
    g->attempt = TD_MAX(g->attempt + 1, wall_us);
}

/* ---- cloud ---- */

struct entry {
    struct generation generation; /* first: what callers hold points here */
    struct gen_table *table;
    uint64_t principal; /* hash of tenant and principal */
    bool dropped;       /* gave way to younger ones: the next expire takes it */
};

struct gen_table {
    size_t capacity, count;
    uint64_t *keys; /* [capacity], of entries[i] */
    struct entry **entries;
};

struct gen_table *gen_table_create(size_t capacity)
{
    struct gen_table *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->capacity = capacity;
    t->keys = calloc(TD_MAX(capacity, (size_t)1), sizeof *t->keys);
    t->entries = calloc(TD_MAX(capacity, (size_t)1), sizeof *t->entries);
    if (!t->keys || !t->entries) {
        gen_table_destroy(t);
        return NULL;
    }
    return t;
}

static void entry_free(struct entry *e)
{
    free(e->generation.reply);
    free(e);
}

void gen_table_destroy(struct gen_table *t)
{
    if (!t)
        return;
    for (size_t i = 0; i < t->count; i++)
        entry_free(t->entries[i]);
    free(t->entries);
    free(t->keys);
    free(t);
}

static struct entry *entry_of(struct generation *g)
{
    return (struct entry *)g;
}

/* FNV-1a, 64 bits: only sorts out; equality is decided on the names themselves. */
static uint64_t hash_bytes(uint64_t hash, const void *data, size_t size)
{
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const uint8_t *)data)[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static uint64_t hash_principal(const char *tenant, const char *principal)
{
    uint64_t hash = hash_bytes(UINT64_C(0xcbf29ce484222325), tenant, strlen(tenant) + 1);
    return hash_bytes(hash, principal, strlen(principal) + 1);
}

static struct entry *table_find(const struct gen_table *t, uint64_t key, const char *tenant,
                                const char *principal, const uint8_t request_id[GEN_REQUEST_ID_SIZE])
{
    for (size_t i = 0; i < t->count; i++) {
        const struct generation *g = &t->entries[i]->generation;
        if (t->keys[i] == key && memcmp(g->request_id, request_id, GEN_REQUEST_ID_SIZE) == 0 &&
            strcmp(g->principal, principal) == 0 && strcmp(g->tenant, tenant) == 0)
            return t->entries[i];
    }
    return NULL;
}

static void table_remove(struct gen_table *t, size_t index)
{
    entry_free(t->entries[index]);
    t->count--;
    t->entries[index] = t->entries[t->count];
    t->keys[index] = t->keys[t->count];
}

static bool is_kept(const struct entry *e)
{
    return e->generation.state != GEN_RUNNING && !e->dropped;
}

/* Of those that only wait to be asked for again the one that expires first goes. False: there is none. */
static bool table_make_room(struct gen_table *t)
{
    struct entry *oldest = NULL;
    for (size_t i = 0; i < t->count; i++) {
        struct entry *e = t->entries[i];
        if (e->dropped)
            return true;
        if (is_kept(e) && e->generation.state != GEN_DETACHED &&
            (!oldest || e->generation.expires_us < oldest->generation.expires_us))
            oldest = e;
    }
    if (oldest)
        oldest->dropped = true;
    return oldest != NULL;
}

/* A principal keeps at most LIMIT_PARKED_PER_PRINCIPAL generations for re-attachment: beyond that, those that expire first are
 * marked for the next gen_table_expire. */
static void table_limit_kept(struct gen_table *t, uint64_t principal)
{
    for (;;) {
        size_t kept = 0;
        struct entry *oldest = NULL;
        for (size_t i = 0; i < t->count; i++) {
            struct entry *e = t->entries[i];
            if (e->principal != principal || !is_kept(e))
                continue;
            kept++;
            if (!oldest || e->generation.expires_us < oldest->generation.expires_us)
                oldest = e;
        }
        if (kept <= LIMIT_PARKED_PER_PRINCIPAL)
            return;
        oldest->dropped = true;
    }
}

static enum gen_verdict reopen(struct entry *e, uint64_t attempt, const uint8_t prompt_hash[TD_HASH_SIZE],
                               const int32_t *held, uint32_t held_count, struct generation **out)
{
    struct generation *g = &e->generation;
    if (attempt <= g->attempt)
        return GEN_STALE;
    if (memcmp(g->prompt_hash, prompt_hash, TD_HASH_SIZE) != 0)
        return GEN_MISMATCH;
    *out = g;
    if (held_count > g->reply_count ||
        (held_count > 0 && memcmp(g->reply, held, held_count * sizeof *held) != 0))
        return GEN_REPLACE;
    g->attempt = attempt;
    e->dropped = false;
    if (g->state != GEN_FINISHED) {
        g->state = GEN_RUNNING;
        g->expires_us = 0;
    }
    return GEN_CONTINUE;
}

enum gen_verdict gen_open(struct gen_table *t, const char *tenant, const char *principal,
                          const uint8_t request_id[GEN_REQUEST_ID_SIZE], uint64_t attempt,
                          const uint8_t prompt_hash[TD_HASH_SIZE], const int32_t *held, uint32_t held_count,
                          uint32_t reply_capacity, struct generation **out)
{
    *out = NULL;
    if (strlen(tenant) > LIMIT_NAME_SIZE || strlen(principal) > LIMIT_NAME_SIZE ||
        reply_capacity > LIMIT_PROMPT_TOKENS || held_count > reply_capacity)
        return GEN_STALE;
    uint64_t hash = hash_principal(tenant, principal);
    uint64_t key = hash_bytes(hash, request_id, GEN_REQUEST_ID_SIZE);
    struct entry *e = table_find(t, key, tenant, principal, request_id);
    if (e)
        return reopen(e, attempt, prompt_hash, held, held_count, out);
    if (t->count == t->capacity)
        return table_make_room(t) ? GEN_FULL : GEN_STALE;

    e = calloc(1, sizeof *e);
    int32_t *reply = malloc(TD_MAX(reply_capacity, 1u) * sizeof *reply);
    if (!e || !reply) {
        free(e);
        free(reply);
        return GEN_STALE;
    }
    struct generation *g = &e->generation;
    memcpy(g->tenant, tenant, strlen(tenant));
    memcpy(g->principal, principal, strlen(principal));
    memcpy(g->request_id, request_id, GEN_REQUEST_ID_SIZE);
    memcpy(g->prompt_hash, prompt_hash, TD_HASH_SIZE);
    g->attempt = attempt;
    g->reply = reply;
    g->reply_capacity = reply_capacity;
    g->reply_count = held_count;
    if (held_count > 0)
        memcpy(reply, held, held_count * sizeof *held);
    e->table = t;
    e->principal = hash;
    t->keys[t->count] = key;
    t->entries[t->count++] = e;
    *out = g;
    return held_count > 0 ? GEN_ADOPT : GEN_NEW;
}

int gen_append(struct generation *g, int32_t id)
{
    if (g->state == GEN_FINISHED)
        return -TD_ERR_CLOSED;
    if (g->reply_count == g->reply_capacity)
        return -TD_ERR_LIMIT;
    g->reply[g->reply_count++] = id;
    if (g->state == GEN_DETACHED)
        g->detached_count++;
    return 0;
}

bool gen_may_decode(struct generation *g)
{
    if (g->state == GEN_DETACHED && g->detached_count >= LIMIT_DETACHED_TOKENS)
        g->state = GEN_PARKED;
    return g->state == GEN_RUNNING || g->state == GEN_DETACHED;
}

static uint64_t kept_until_us(uint64_t now_us)
{
    return now_us + LIMIT_PARK_MS * UINT64_C(1000);
}

void gen_detach(struct generation *g, uint64_t now_us)
{
    if (g->state != GEN_RUNNING)
        return;
    g->state = GEN_DETACHED;
    g->detached_count = 0;
    g->expires_us = kept_until_us(now_us);
    table_limit_kept(entry_of(g)->table, entry_of(g)->principal);
}

void gen_finish(struct generation *g, uint32_t finish, uint64_t now_us)
{
    if (g->state == GEN_FINISHED)
        return;
    g->state = GEN_FINISHED;
    g->finish = finish;
    g->expires_us = kept_until_us(now_us);
    table_limit_kept(entry_of(g)->table, entry_of(g)->principal);
}

void gen_forget(struct gen_table *t, struct generation *g)
{
    for (size_t i = 0; i < t->count; i++)
        if (t->entries[i] == entry_of(g)) {
            table_remove(t, i);
            return;
        }
}

void gen_table_drop_tenant(struct gen_table *t, const char *tenant)
{
    for (size_t i = 0; i < t->count; i++)
        if (strcmp(t->entries[i]->generation.tenant, tenant) == 0)
            t->entries[i]->dropped = true;
}

void gen_table_expire(struct gen_table *t, uint64_t now_us, void (*gone)(void *ctx, struct generation *g),
                      void *ctx)
{
    for (size_t i = 0; i < t->count;) {
        struct entry *e = t->entries[i];
        bool expired = e->generation.state != GEN_RUNNING && now_us >= e->generation.expires_us;
        if (!e->dropped && !expired) {
            i++;
            continue;
        }
        if (gone)
            gone(ctx, &e->generation);
        table_remove(t, i);
    }
}
