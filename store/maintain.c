/* maintain: what an operator asks of an open store: compaction, pins, another master key. */
#include "store/store_internal.h"
#include <stdlib.h>

void store_end_jobs(struct store *s)
{
    atomic_store(&s->jobs_end, true);
}

/* ---- compaction --------------------------------------------------------------------------------------------- */

struct compact_task {       /* one segment */
    struct store_task task; /* first */
    unsigned dead_percent;
    uint64_t after_id, last_id; /* segments in (after_id, last_id] */
    uint64_t done_id;           /* out: what was looked at; 0: nothing was left */
};

static int compact_next(struct store *s, struct store_task *t)
{
    struct compact_task *c = (struct compact_task *)t;
    c->done_id = 0;
    for (size_t i = 0; i < s->segments.count; i++) {
        struct segment *g = s->segments.list[i];
        if (g->id <= c->after_id || g->id > c->last_id || !space_is_dead(g, c->dead_percent))
            continue;
        c->done_id = g->id;
        int rc = space_rewrite(s, g);
        if (rc == -TD_ERR_IO)
            append_abandon(s);
        return rc == -TD_ERR_BUSY ? 0 : rc; /* unreadable now: it stays as it is */
    }
    return 0;
}

static uint64_t newest_segment(struct store *s)
{
    pthread_mutex_lock(&s->segments.lock);
    uint64_t id = s->segments.count ? s->segments.list[s->segments.count - 1]->id : 0;
    pthread_mutex_unlock(&s->segments.lock);
    return id;
}

int store_compact(struct store *s, unsigned dead_percent,
                  void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx, uint64_t *freed,
                  struct td_error *err)
{
    struct compact_task c = {
        .task.run = compact_next, .dead_percent = dead_percent, .last_id = newest_segment(s)};
    uint64_t before = segments_size(&s->segments), first = 0;
    int rc;
    do {
        rc = atomic_load(&s->jobs_end) ? -TD_ERR_CANCELLED : store_run_task(s, &c.task);
        if (rc < 0)
            break;
        first = first ? first : c.done_id;
        c.after_id = c.done_id;
        if (progress && c.done_id)
            progress(ctx, c.done_id - first + 1, c.last_id - first + 1);
    } while (c.done_id);
    if (progress && rc == 0)
        progress(ctx, 1, 1); /* the last segment need not have been one of those */
    uint64_t after = segments_size(&s->segments);
    *freed = before > after ? before - after : 0;
    return rc < 0 ? td_fail(err, rc, "cannot compact store %s: %s", s->directory, td_status_text(rc)) : 0;
}

/* ---- pins --------------------------------------------------------------------------------------------------- */

static int push_pin(struct store *s, uint32_t tenant, uint8_t target, const uint8_t id[32], store_done done,
                    void *ctx)
{
    if (!store_answers(s))
        return -TD_ERR_TIMEOUT;
    struct store_op *op = op_create(OP_PIN, 0, 0);
    if (!op)
        return -TD_ERR_NOMEM;
    op->type = RECORD_PIN;
    op->tenant = tenant;
    op->block_index = target;
    memcpy(op->id, id, sizeof op->id);
    op->time_us = clock_wall_us();
    op->done = done;
    op->ctx = ctx;
    struct table_shard *shard = table_lock(&s->pins, id);
    struct entry *e = table_insert(&s->pins, shard, tenant, id);
    int rc = e ? store_push_entry(s, shard, e, op) : -TD_ERR_NOMEM;
    if (!e)
        op_release(op);
    table_unlock(shard);
    return rc;
}

static bool has_pin(struct store *s, uint32_t tenant, const uint8_t id[32])
{
    struct table_shard *shard = table_lock(&s->pins, id);
    const struct entry *e = table_find(&s->pins, shard, tenant, id);
    bool pinned = e && e->segment_id;
    table_unlock(shard);
    return pinned;
}

static int set_pin(struct store *s, uint32_t tenant, uint8_t target, const uint8_t id[32], bool pinned,
                   struct td_error *err)
{
    int rc = s->read_only ? -TD_ERR_UNSUPPORTED : 0;
    if (rc == 0 && has_pin(s, tenant, id) == pinned)
        return 0;
    struct store_waiter *w = rc == 0 ? patience_waiter(s) : NULL;
    if (!w) {
        rc = rc < 0 ? rc : -TD_ERR_NOMEM;
    } else {
        rc = pinned ? push_pin(s, tenant, target, id, patience_done, w)
                    : store_delete_id(s, RECORD_PIN, tenant, id, patience_done, w);
        store_hurry(s);
        rc = patience_wait(w, rc);
    }
    return rc < 0 ? td_fail(err, rc, "cannot %s: %s", pinned ? "pin" : "unpin", td_status_text(rc)) : 0;
}

int store_pin(struct store *s, const char *tenant, const struct kv_block_id *id, bool pinned,
              struct td_error *err)
{
    uint32_t number = keys_find(s->keys, tenant);
    if (!number)
        return td_fail(err, -TD_ERR_NOTFOUND, "cannot pin: the store has no such tenant");
    return set_pin(s, number, RECORD_BLOCK, id->bytes, pinned, err);
}

/* Several operations that end as one: theirs, and its maker's until all are queued. */
struct several {
    atomic_uint left;
    atomic_int failed;
    struct store_waiter *waiter;
};

static void one_of_several(void *ctx, int status)
{
    struct several *m = ctx;
    if (status < 0)
        atomic_store(&m->failed, status);
    if (atomic_fetch_sub(&m->left, 1) > 1)
        return;
    patience_done(m->waiter, m->failed);
    free(m);
}

static bool has_block(struct store *s, uint32_t tenant, const uint8_t id[32])
{
    struct table_shard *shard = table_lock(&s->blocks, id);
    bool there = table_find(&s->blocks, shard, tenant, id) != NULL;
    table_unlock(shard);
    return there;
}

int store_pin_held(struct store *s, const char *tenant, const struct kv_block_id *ids, size_t count,
                   bool pinned, struct td_error *err)
{
    uint32_t number = keys_find(s->keys, tenant);
    struct store_waiter *w = patience_waiter(s);
    struct several *m = w ? calloc(1, sizeof *m) : NULL;
    bool begun = m != NULL;
    int rc = s->read_only ? -TD_ERR_UNSUPPORTED : begun ? 0 : -TD_ERR_NOMEM;
    if (begun)
        *m = (struct several){.left = 1, .waiter = w};
    for (size_t i = 0; i < count && rc == 0; i++) {
        const uint8_t *id = ids[i].bytes;
        if (has_pin(s, number, id) == pinned || (pinned && !has_block(s, number, id)))
            continue;
        atomic_fetch_add(&m->left, 1);
        rc = pinned ? push_pin(s, number, RECORD_BLOCK, id, one_of_several, m)
                    : store_delete_id(s, RECORD_PIN, number, id, one_of_several, m);
        if (rc < 0)
            atomic_fetch_sub(&m->left, 1);
    }
    if (begun)
        one_of_several(m, rc);
    store_hurry(s);
    rc = w ? patience_wait(w, begun ? 0 : rc) : rc;
    return rc < 0 ? td_fail(err, rc, "cannot %s: %s", pinned ? "pin" : "unpin", td_status_text(rc)) : 0;
}

bool store_is_pinned(struct store *s, const char *tenant, const struct kv_block_id *id)
{
    uint32_t number = keys_find(s->keys, tenant);
    return number && has_pin(s, number, id->bytes);
}

int store_conv_pin(struct store *s, const char *tenant, const char *principal, const char *conv_id,
                   bool pinned, struct td_error *err)
{
    uint8_t id[32];
    uint32_t number;
    int rc = conversation_id(s, tenant, principal, conv_id, &number, id);
    return rc < 0 ? td_fail(err, rc, "cannot pin a conversation: the store has none of that name")
                  : set_pin(s, number, RECORD_CONVERSATION, id, pinned, err);
}

bool store_conv_is_pinned(struct store *s, const char *tenant, const char *principal, const char *conv_id)
{
    uint8_t id[32];
    uint32_t number;
    return conversation_id(s, tenant, principal, conv_id, &number, id) == 0 && has_pin(s, number, id);
}

uint64_t store_pin_count(struct store *s)
{
    return table_count(&s->pins);
}

/* ---- master key --------------------------------------------------------------------------------------------- */

int store_rotate_master(struct store *s, const uint8_t new_master[CRYPTO_KEY_SIZE], struct td_error *err)
{
    if (s->read_only)
        return td_fail(err, -TD_ERR_UNSUPPORTED,
                       "cannot rotate the master key of %s: the store is open for reading only",
                       s->directory);
    return keys_rotate(s->keys, new_master, err);
}
