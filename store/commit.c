/* commit: the writer thread. Takes batches of operations, appends their records, syncs once, makes them visible, calls back.
 *
 * The order inside a commit
 *   1. append every operation's record            (append.c; a full segment is synced and the next one begun; blocks in groups: group.h)
 *   2. fsync the segment, and the directory if the file is new
 *   3. tables point to the new records             (from now on readers see them)
 *   4. call back
 *   5. void what was replaced or deleted, and hand the changes to the index
 * A failure in 1 or 2 abandons the segment and repeats both with a new one, a bounded number of times; operations that stay
 * unwritten end with an error, and their entries go back to what is on disk. */
#include "shared/log.h"
#include "store/store_internal.h"
#include <stdlib.h>

#define BUFFER_KEEP_SIZE (64u << 20) /* a larger record buffer is given back after the commit */
#define IDLE_WAIT_US     3600000000u

/* ---- entries ---------------------------------------------------------------------------------------------- */

void entry_count(struct store *s, const struct entry *e, bool counts)
{
    if (!e->segment_id || e->conversation || e->layer_end == 0) /* nothing on disk, a conversation or a pin */
        return;
    struct tenant_count *t = &s->tenants[e->tenant];
    const uint64_t one = counts ? 1 : UINT64_MAX; /* which takes one away */
    atomic_fetch_add_explicit(&t->blocks, one, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->size, one * e->stored_size, memory_order_relaxed);
    atomic_fetch_add_explicit(&s->block_size, one * e->stored_size, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->by_level[TD_MIN(e->quality.fidelity, KV_L4)], one, memory_order_relaxed);
    if (e->quality.provenance == KV_FROM_DEVICE)
        atomic_fetch_add_explicit(&t->from_device, one, memory_order_relaxed);
}

bool entry_clear_place(struct store *s, struct entry *e)
{
    if (e->segment_id) {
        entry_count(s, e, false);
        segment_account(&s->segments, e->segment_id, e->stored_size, false);
        evict_note(s, e, false);
    }
    e->segment_id = 0;
    if (e->conversation)
        e->conversation->durable = 0; /* `written` belongs to what waits */
    return e->pending == NULL;
}

void entry_set_place(struct store *s, struct entry *e, uint64_t segment_id, uint64_t offset, uint64_t lsn,
                     uint32_t stored_size)
{
    if (e->segment_id)
        segment_account(&s->segments, e->segment_id, e->stored_size, false);
    e->segment_id = segment_id;
    e->offset = offset;
    e->lsn = lsn;
    e->stored_size = stored_size;
    segment_account(&s->segments, segment_id, stored_size, true);
    evict_note(s, e, true);
}

/* NULL without memory: then the space is lost until the segment goes. */
static struct record_void *add_void(struct store *s, uint8_t type, const struct entry *e)
{
    if (s->void_count == s->void_capacity) {
        size_t capacity = s->void_capacity ? 2 * s->void_capacity : 64;
        struct record_void *voids = realloc(s->voids, capacity * sizeof *voids);
        if (!voids)
            return NULL;
        s->voids = voids;
        s->void_capacity = capacity;
    }
    struct record_void *v = &s->voids[s->void_count++];
    *v = (struct record_void){.claim = audit_claim(type, e)};
    return v;
}

void store_void_later(struct store *s, uint8_t type, const struct entry *e)
{
    if (e->segment_id && !s->read_only)
        add_void(s, type, e);
}

void store_void_alone(struct store *s, uint8_t type, const struct entry *e)
{
    struct record_void *v = e->segment_id ? add_void(s, type, e) : NULL;
    if (v)
        v->alone = true;
    else if (e->segment_id)
        store_index_incomplete(s);
}

/* Write the head that says "was a record" over the old one, which also takes its key material away. Not synced unless it is `alone`: what is
 * lost here is found superseded again by the next recovery. */
static int write_void(struct store *s, struct segment *g, const struct record_claim *c)
{
    uint8_t page[RECORD_PAGE];
    struct record_head h = {
        .type = RECORD_VOID,
        .segment_id = g->id,
        .segment_nonce = g->nonce,
        .offset = c->place.offset,
        .lsn = c->lsn,
        .body_size = c->place.stored_size - RECORD_PAGE,
    };
    record_head_write(&h, page);
    record_head_finish(page, 0);
    return io_write_all(s->io, g->fd, page, sizeof page, c->place.offset);
}

/* If the record is the one that is meant, for the place may come from a false index: over it, and give the body's space back. */
static int void_record(struct store *s, const struct record_void *v)
{
    const struct record_place *p = &v->claim.place;
    uint64_t body = p->stored_size - RECORD_PAGE;
    patience_call(s, 0);
    int rc = audit_claim_holds(s, &v->claim);
    if (rc <= 0)
        return rc;
    struct segment *g = segment_acquire(&s->segments, p->segment_id, &rc);
    if (!g)
        return rc;
    rc = write_void(s, g, &v->claim);
    if (rc == 0 && body > 0 && s->io->punch(s->io, g->fd, p->offset + RECORD_PAGE, body) == 0)
        g->hole_size += body;
    g->sync_due |= rc == 0 && v->alone;
    segment_release(&s->segments, g);
    return rc;
}

void store_void_now(struct store *s)
{
    for (size_t i = 0; i < s->void_count; i++)
        if (void_record(s, &s->voids[i]) < 0 && s->voids[i].alone)
            store_index_incomplete(s);
    s->void_count = 0;
}

/* ---- index ------------------------------------------------------------------------------------------------ */

static void index_give_up(struct store *s, const char *why)
{
    log_warn("store", "the index is given up (%s): another one is made", why);
    index_close(s->index);
    s->index = NULL;
    s->row_count = 0;
    s->index_behind = false;
    index_want(s);
}

void store_index_incomplete(struct store *s)
{
    s->index_complete = false;
    s->index_partial = true;
}

void store_index_distrust(struct store *s)
{
    index_close(s->index);
    s->index = NULL;
    s->row_count = 0;
    s->index_behind = false;
    s->index_false = true;
    store_index_incomplete(s);
    index_set_aside(s->index_directory, true);
    metric_set(s->metrics.index_behind, 1);
}

static void note_index(struct store *s, int rc)
{
    bool behind = rc == -TD_ERR_BUSY || rc == -TD_ERR_DISKFULL;
    if (behind && !s->index_behind)
        log_warn("store",
                 "the index cannot be written now (%s): it is tried again, and nothing else waits for it",
                 rc == -TD_ERR_BUSY ? "another program has locked it" : td_status_text(rc));
    if (rc == 0 && s->index_behind)
        log_info("store", "the index is written again");
    s->index_behind = behind;
    metric_set(s->metrics.index_behind, behind);
}

struct index_row *store_row_add(struct store *s)
{
    if (s->row_count == s->row_capacity) {
        size_t capacity = s->row_capacity ? 2 * s->row_capacity : 256;
        struct index_row *rows =
            capacity > STORE_INDEX_ROWS_MAX ? NULL : realloc(s->rows, capacity * sizeof *rows);
        if (!rows)
            return NULL;
        s->rows = rows;
        s->row_capacity = capacity;
    }
    if (s->row_count == 0)
        s->rows_since_us = clock_mono_us();
    return &s->rows[s->row_count++];
}

/* There is an index. NULL: it is given up. */
static struct index_row *add_row(struct store *s)
{
    struct index_row *r = store_row_add(s);
    if (!r)
        index_give_up(s, "too many changes wait for it");
    return r;
}

/* All rows of an erased tenant: should an old key file come back, they would name what is gone. */
static void note_erase(struct store *s, const struct store_op *op)
{
    struct index_row *r = s->index ? add_row(s) : NULL;
    if (!r)
        return;
    *r = (struct index_row){.type = RECORD_TOMBSTONE};
    memcpy(r->key_id, op->key_id, sizeof r->key_id);
}

void store_note_change(struct store *s, uint8_t type, const struct entry *e, bool deleted)
{
    struct tenant_keys keys;
    if (!s->index || keys_get(s->keys, e->tenant, &keys) < 0)
        return; /* of a tenant that was erased: here, see note_erase; by another node with the same keys, the next start removes the rows */
    struct index_row *r = add_row(s);
    if (r) {
        *r = (struct index_row){.type = type,
                                .segment_id = deleted ? 0 : e->segment_id,
                                .offset = e->offset,
                                .lsn = e->lsn,
                                .stored_size = e->stored_size,
                                .quality = e->quality,
                                .block_index = e->block_index,
                                .layer_begin = e->layer_begin,
                                .layer_end = e->layer_end};
        memcpy(r->key_id, keys.key_id, sizeof r->key_id);
        memcpy(r->id, e->id, sizeof r->id);
    }
    if (r && !e->conversation)
        memcpy(r->principal, e->parent, sizeof r->principal);
    if (r && e->conversation) {
        memcpy(r->principal, e->conversation->principal, sizeof r->principal);
        r->version = e->conversation->durable;
        r->updated_us = e->conversation->updated_us;
    }
    crypto_wipe(&keys, sizeof keys);
}

/* Before the index leaves records out whose voids are all that says so: without those the next life would find them, and doubt the index. */
static void sync_voids(struct store *s)
{
    for (size_t i = 0; i < s->segments.count; i++) {
        if (!s->segments.list[i]->sync_due)
            continue;
        struct segment *g = segment_acquire(&s->segments, s->segments.list[i]->id, NULL);
        counter_add(&s->counters.fsyncs, s->metrics.fsyncs, g != NULL);
        patience_call(s, 0);
        if (!g || s->io->fsync(s->io, g->fd) < 0)
            store_index_incomplete(s);
        if (g)
            segment_release(&s->segments, g);
        s->segments.list[i]->sync_due = false;
    }
}

void store_index_flush(struct store *s, bool checkpoint)
{
    if (!s->index)
        return;
    sync_voids(s);
    patience_call(s, s->row_count * sizeof *s->rows);
    struct index_segment *segments = malloc((s->segments.count + 1) * sizeof *segments);
    if (!segments)
        return; /* later */
    size_t count = 0;
    for (size_t i = 0; i < s->segments.count && s->index_complete; i++) {
        const struct segment *g = s->segments.list[i];
        segments[count++] = (struct index_segment){g->id, g->nonce, g->durable_end, g->tombstone_count};
    }
    int rc = index_apply(s->index, s->rows, s->row_count, segments, count, s->next_lsn);
    free(segments);
    if (rc == 0) {
        s->row_count = 0;
        patience_call(s, 0);
        rc = checkpoint ? index_checkpoint(s->index) : 0;
    }
    s->rows_since_us = clock_mono_us(); /* a locked index or a full disk: try again an interval later */
    note_index(s, rc);
    if (rc < 0 && rc != -TD_ERR_BUSY && rc != -TD_ERR_DISKFULL)
        index_give_up(s, td_status_text(rc));
}

/* ---- publish ---------------------------------------------------------------------------------------------- */

/* With the block's shard locked. */
static bool is_pinned(struct store *s, uint32_t tenant, const uint8_t id[32])
{
    struct table_shard *shard = table_lock(&s->pins, id);
    bool pinned = table_find(&s->pins, shard, tenant, id) != NULL;
    table_unlock(shard);
    return pinned;
}

static void publish_put(struct store *s, struct entry *e, const struct store_op *op)
{
    if (op->demotes) {
        counter_add(&s->counters.demotions, s->metrics.demotions, 1);
        if (e->stored_size > op->stored_size)
            counter_add(&s->counters.demoted_bytes, s->metrics.demoted_bytes,
                        e->stored_size - op->stored_size);
    }
    store_void_later(s, op->type, e);
    entry_count(s, e, false);
    e->quality = op->quality;
    e->block_index = op->block_index;
    e->layer_begin = op->layer_begin;
    e->layer_end = op->layer_end;
    memcpy(e->parent, op->parent, sizeof e->parent);
    entry_set_place(s, e, op->segment_id, op->offset, op->lsn, op->stored_size);
    entry_count(s, e, true);
    if (op->type == RECORD_PIN)
        evict_pin(s, op->tenant, op->id, true);
    else if (op->type == RECORD_BLOCK && is_pinned(s, op->tenant, op->id))
        evict_pin(s, op->tenant, op->id, true);
    if (e->conversation) {
        e->conversation->durable = op->version;
        e->conversation->updated_us = op->time_us;
    }
    store_note_change(s, op->type, e, false);
}

/* The end of a put or delete of one id: move its entry to the new truth, or back. */
static void publish_entry(struct store *s, const struct store_op *op)
{
    struct table *t = store_table(s, op->type);
    struct table_shard *shard = table_lock(t, op->id);
    struct entry *e = table_find(t, shard, op->tenant, op->id);
    if (e) {
        if (e->pending == op)
            e->pending = NULL;
        if (op->status < 0) {
            evict_take_back(s, e); /* nothing new: the entry stays as it is on disk */
        } else if (op->kind == OP_DELETE) {
            store_void_later(s, op->type, e);
            store_note_change(s, op->type, e, true);
            entry_clear_place(s, e);
            if (op->type == RECORD_PIN)
                evict_pin(s, op->tenant, op->id, false);
        } else {
            publish_put(s, e, op);
        }
        if (e->segment_id == 0 && !e->pending)
            table_remove(t, shard, e);
    }
    table_unlock(shard);
}

/* All entries of an erased tenant. Those with a pending operation go when it ends: without keys it fails. */
static void publish_erase(struct store *s, uint8_t type, uint32_t tenant)
{
    struct table *t = store_table(s, type);
    for (size_t i = 0; i < TABLE_SHARD_COUNT; i++) {
        struct table_shard *shard = &t->shards[i];
        pthread_mutex_lock(&shard->lock);
        for (size_t j = 0; j < shard->slot_count;) {
            struct entry *e = &shard->slots[j];
            bool gone = false;
            if (e->tenant == tenant) {
                store_void_later(s, type, e);
                gone = entry_clear_place(s, e);
            }
            if (gone)
                table_remove(t, shard, e); /* another entry may move into this slot: look at it again */
            else
                j++;
        }
        pthread_mutex_unlock(&shard->lock);
    }
}

static void publish(struct store *s, struct store_op *op)
{
    op->published = true;
    switch (op->kind) {
    case OP_BLOCK:
    case OP_CONVERSATION:
    case OP_DELETE:
    case OP_PIN:
        publish_entry(s, op);
        break;
    case OP_ERASE:
        if (op->keys_erased) {
            publish_erase(s, RECORD_BLOCK, op->tenant);
            publish_erase(s, RECORD_CONVERSATION, op->tenant);
            publish_erase(s, RECORD_PIN, op->tenant);
            note_erase(s, op);
        }
        break;
    case OP_FOLLOW:
        op->status = op->follows ? op->follows->status : 0;
        break;
    case OP_BARRIER:
        break;
    }
    if ((op->kind == OP_BLOCK && !op->demotes) || op->kind == OP_CONVERSATION)
        counter_add(op->status < 0 ? &s->counters.put_failures : &s->counters.puts, NULL, 1);
    op_queue_done(&s->queue, op->charge); /* before the caller hears of it: its next put must find the room */
    if (op->done && op->kind != OP_BARRIER) /* that one ends when it is released */
        op->done(op->ctx, op->status);
}

void commit_publish_synced(struct store *s)
{
    for (struct store_op *op = s->batch; op && op->synced; op = op->next)
        if (!op->published)
            publish(s, op);
}

/* ---- append one operation --------------------------------------------------------------------------------- */

/* Move the version that the next put of a conversation must build on. `from` not what it is: the put that this one builds on
 * has failed since it was queued. */
static int conversation_move(struct store *s, const struct store_op *op, bool check, uint64_t from,
                             uint64_t to)
{
    struct table_shard *shard = table_lock(&s->conversations, op->id);
    struct entry *e = table_find(&s->conversations, shard, op->tenant, op->id);
    int rc = e && (!check || e->conversation->written == from) ? 0 : -TD_ERR_CONFLICT;
    if (rc == 0)
        e->conversation->written = to;
    table_unlock(shard);
    return rc;
}

static int conversation_claim(struct store *s, const struct store_op *op)
{
    if (op->kind == OP_DELETE) /* the next put must expect that there is none */
        return conversation_move(s, op, false, 0, 0);
    return conversation_move(s, op, true, op->expected, op->version);
}

static void fill_head(const struct store_op *op, struct record_head *h)
{
    *h = (struct record_head){
        .type = op->kind == OP_DELETE || op->kind == OP_ERASE ? RECORD_TOMBSTONE : op->type,
        .target = op->kind == OP_ERASE    ? RECORD_ANY_TENANT
                  : op->kind == OP_DELETE ? op->type
                  : op->kind == OP_PIN    ? (uint8_t)op->block_index
                                          : 0,
        .codec = op->codec,
        .quality = op->quality,
        .block_index = op->kind == OP_PIN ? 0 : op->block_index,
        .layer_begin = op->layer_begin,
        .layer_end = op->layer_end,
        .version = op->version,
        .time_us = op->time_us,
        .part_count = op->part_count,
    };
    memcpy(h->id, op->id, sizeof h->id);
    memcpy(h->parent, op->parent, sizeof h->parent);
    memcpy(h->key_id, op->key_id, sizeof h->key_id);
    memcpy(h->parts, op->parts, op->part_count * sizeof *op->parts);
}

/* The keys go first, from the file and from memory; the tombstone only serves against an old key file that comes back. */
static int erase_keys(struct store *s, struct store_op *op)
{
    struct tenant_keys keys;
    if (op->keys_erased) /* by an earlier attempt, whose record failed */
        return 0;
    int rc = keys_get(s->keys, op->tenant, &keys);
    if (rc < 0)
        return rc;
    memcpy(op->key_id, keys.key_id, sizeof op->key_id);
    crypto_wipe(&keys, sizeof keys);
    rc = keys_erase(s->keys, op->tenant, NULL);
    if (rc ==
        -TD_ERR_NOTFOUND) /* of those that share the file another was sooner; the records here are still to go */
        rc = 0;
    op->keys_erased = rc == 0;
    return rc;
}

/* Nothing goes to make room for what only saves room; and what has gone since, with its segment, does not come back as less than it was. */
static bool may_demote(struct store *s, const struct store_op *op)
{
    if (!op->demotes)
        return true;
    struct table_shard *shard = table_lock(&s->blocks, op->id);
    const struct entry *e = table_find(&s->blocks, shard, op->tenant, op->id);
    bool is_held = e && e->segment_id;
    table_unlock(shard);
    return is_held && space_fits(s, record_size(op->size + op->part_count * (uint64_t)CRYPTO_TAG_SIZE));
}

/* Append an operation's record. A code other than IO trouble is final for this operation alone and is left in its status. -TD_ERR_AGAIN:
 * group_flush has taken back what came before it. */
static int append_op(struct store *s, struct store_op *op)
{
    struct record_head h;
    struct tenant_keys keys, *seal = &keys;
    int rc = 0;
    if (op->kind == OP_FOLLOW || op->kind == OP_BARRIER) {
        op->appended = true;
        return 0;
    }
    patience_call(s, 0);
    if (op->kind == OP_ERASE) {
        rc = erase_keys(s, op);
        seal = NULL;
    } else {
        rc = keys_get(s->keys, op->tenant, &keys);
    }
    if (rc == 0 && op->kind == OP_BLOCK && (!evict_admits(s, op) || !may_demote(s, op)))
        rc = -TD_ERR_NOSPACE;
    bool claimed = rc == 0 && op->type == RECORD_CONVERSATION;
    if (claimed)
        rc = conversation_claim(s, op);
    if (rc == 0) {
        fill_head(op, &h);
        rc = op->kind == OP_BLOCK ? append_block(s, &h, seal, op) : append_record(s, &h, seal, op->data);
        if (rc < 0 && claimed)
            conversation_move(s, op, false, 0, op->expected);
    }
    crypto_wipe(&keys, sizeof keys);
    if (rc == -TD_ERR_IO || rc == -TD_ERR_EXISTS || rc == -TD_ERR_AGAIN)
        return rc;
    op->appended = true;
    op->status = rc;
    if (rc == 0) {
        op->segment_id = h.segment_id;
        op->offset = h.offset;
        op->lsn = h.lsn;
        op->stored_size = (uint32_t)record_size(h.body_size);
    }
    return 0;
}

/* ---- commit ----------------------------------------------------------------------------------------------- */

/* Blocks gather in groups. Anything else is appended after all that came before it is: a tombstone must lie behind what it deletes. */
static int append_batch(struct store *s)
{
    int rc = 0;
    for (struct store_op *op = s->batch; op && rc == 0; op = op->next) {
        if (op->appended)
            continue;
        rc = group_takes(s, op) ? 0 : group_flush(s);
        rc = rc < 0 ? rc : append_op(s, op);
    }
    return rc < 0 ? rc : group_flush(s);
}

static int append_and_sync(struct store *s)
{
    int rc;
    while ((rc = append_batch(s)) == -TD_ERR_AGAIN)
        ; /* at most once: from then on they go one by one */
    return rc < 0 ? rc : append_sync(s);
}

/* What was appended and not synced is to be appended again, or never: back to what is on disk. */
static void withdraw_claims(struct store *s)
{
    for (struct store_op *op = s->batch; op; op = op->next) {
        if (op->type != RECORD_CONVERSATION || op->synced)
            continue;
        struct table_shard *shard = table_lock(&s->conversations, op->id);
        struct entry *e = table_find(&s->conversations, shard, op->tenant, op->id);
        if (e)
            e->conversation->written = e->conversation->durable;
        table_unlock(shard);
    }
}

/* rc: how the batch's records fared. */
static void note_health(struct store *s, int rc)
{
    bool was_off = s->write_error < 0;
    s->write_retry_us = clock_mono_us() + STORE_WRITE_RETRY_US;
    s->write_error = rc;
    if (rc < 0 && !was_off)
        log_error("store", "writes are off: %s; reading goes on", td_status_text(rc));
    if (rc == 0 && was_off)
        log_info("store", "writes are on again");
    metric_set(s->metrics.writes_off, rc < 0 || s->silent);
}

/* Operations that no attempt could make durable end with rc. Returns how the disk takes writing: 0, what is wrong with it, or 1 when
 * nothing was to be written, which says nothing. */
static int settle(struct store_op *batch, int rc)
{
    int health = rc < 0 ? rc : 1;
    for (struct store_op *op = batch; op; op = op->next) {
        if (!op->synced) {
            op->status = op->status < 0 ? op->status : rc;
            op->synced = true;
        }
        if (op->status == -TD_ERR_DISKFULL)
            health = op->status;
        else if (op->status == 0 && op->stored_size > 0 && health > 0)
            health = 0;
    }
    return health;
}

static void commit(struct store *s, struct store_op *batch)
{
    s->batch = batch;
    int rc = append_and_sync(s);
    for (int i = 1; rc < 0 && i <= STORE_COMMIT_ATTEMPTS; i++) {
        commit_publish_synced(s);
        append_abandon(s);
        withdraw_claims(s);
        if (i < STORE_COMMIT_ATTEMPTS)
            rc = append_and_sync(s);
    }
    int health = settle(batch, rc);
    if (health <= 0)
        note_health(s, health);
    commit_publish_synced(s);
    s->batch = NULL;
    for (struct store_op *next; batch; batch = next) {
        next = batch->next;
        op_release(batch);
    }
    store_void_now(s);
    group_shrink(s);
    if (s->buffer_size > BUFFER_KEEP_SIZE) {
        free(s->buffer);
        s->buffer = NULL;
        s->buffer_size = 0;
    }
}

void *writer_main(void *arg)
{
    struct store *s = arg;
    space_publish(s); /* what was found: nothing may come for long */
    for (bool closing = false; !closing;) {
        uint64_t wait_us = s->row_count        ? STORE_INDEX_INTERVAL_US
                           : s->index_retry_us ? s->index_wait_us
                                               : IDLE_WAIT_US;
        patience_rest(s);
        struct store_op *batch = op_queue_take(&s->queue, wait_us, s->commit_interval_us, &closing);
        patience_call(s, 0);
        if (batch) {
            commit(s, batch);
            closing = false; /* until the queue is empty */
        }
        if (s->row_count >= STORE_INDEX_ROWS ||
            (s->row_count && clock_mono_us() - s->rows_since_us >= STORE_INDEX_INTERVAL_US))
            store_index_flush(s, false);
        index_regain(s);
        space_housekeeping(s);
        store_do_tasks(s, false);
    }
    store_do_tasks(s, true);
    if (append_sync(s) == 0)
        append_seal(s);
    store_index_flush(s, true);
    patience_rest(s);
    return NULL;
}
