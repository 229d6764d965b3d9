/* append: records into the active segment, and its syncs.
 *
 * The rules of a disk that fails. A write that did not complete and a sync that failed leave the file in an unknown state, and a second sync
 * may report success for pages that were lost: so neither is tried again. The segment is given up (append_abandon): cut back to what
 * earlier syncs covered, its records checked on the medium, and whatever was not acknowledged is written anew, into another
 * segment, from memory. A full disk is no such failure: the same segment goes on once there is room. */
#include "shared/log.h"
#include "store/store_internal.h"
#include <assert.h>
#include <stdlib.h>

void counter_add(_Atomic uint64_t *counter, struct metric *m, uint64_t amount)
{
    atomic_fetch_add_explicit(counter, amount, memory_order_relaxed);
    if (m)
        metric_add(m, (double)amount);
}

/* ---- sync ------------------------------------------------------------------------------------------------- */

static void mark_batch_synced(struct store *s)
{
    for (struct store_op *op = s->batch; op; op = op->next)
        op->synced |= op->appended;
}

int append_sync(struct store *s)
{
    struct segment *a = s->active;
    assert(s->group.count == 0 && "what waits is written before it is synced");
    if (a && a->durable_end < a->end) {
        counter_add(&s->counters.fsyncs, s->metrics.fsyncs, 1);
        patience_call(s, a->end - a->durable_end);
        int rc = s->io->fsync(s->io, a->fd);
        if (rc == 0 && !a->name_durable) {
            patience_call(s, 0);
            rc = s->io->sync_directory(s->io, s->directory);
            a->name_durable = rc == 0;
        }
        if (rc < 0)
            return -TD_ERR_IO; /* whatever the reason, ENOSPC included: this file is in doubt */
        a->durable_end = a->end;
        patience_call(s, 0);
    }
    mark_batch_synced(s);
    return 0;
}

/* The record at the active segment's end is written, or on its way. */
static void advance(struct segment *a, const struct record_head *h)
{
    a->end += record_size(h->body_size);
    a->next_sequence++;
    a->tombstone_count += h->type == RECORD_TOMBSTONE;
}

/* Seal the parts and write the record where the active segment ends; the buffer holds `size` bytes. */
static int write_record(struct store *s, struct record_head *h, const struct tenant_keys *keys,
                        const uint8_t *plain, uint64_t size)
{
    const uint8_t *parts[RECORD_PARTS_MAX];
    uint8_t key[CRYPTO_KEY_SIZE];
    for (uint32_t i = 0; i < h->part_count; i++) {
        parts[i] = plain;
        plain += (size_t)h->parts[i].first_size + h->parts[i].second_size;
    }
    int rc = h->part_count ? record_open_key(keys->data_key, h, key) : 0;
    rc = rc < 0 ? rc : record_seal(key, h, parts, s->buffer);
    crypto_wipe(key, sizeof key);
    patience_call(s, size);
    rc = rc < 0 ? rc : io_write_all(s->io, s->active->fd, s->buffer, (size_t)size, s->active->end);
    if (rc < 0)
        return rc;
    counter_add(&s->counters.bytes_written, s->metrics.write_bytes, size);
    advance(s->active, h);
    return 0;
}

/* ---- segments --------------------------------------------------------------------------------------------- */

static bool buffer_reserve(struct store *s, uint64_t size)
{
    if (size <= s->buffer_size)
        return true;
    free(s->buffer);
    s->buffer = malloc((size_t)size);
    s->buffer_size = s->buffer ? (size_t)size : 0;
    return s->buffer != NULL;
}

static void place_record(struct store *s, struct record_head *h)
{
    struct segment *a = s->active;
    h->segment_id = a->id;
    h->segment_nonce = a->nonce;
    h->sequence = a->next_sequence;
    h->offset = a->end;
    h->durable_end = a->durable_end;
    h->lsn = s->next_lsn++;
}

void append_seal(struct store *s)
{
    struct segment *a = s->active;
    s->active = NULL;
    if (!a)
        return;
    group_leave_segment(s);
    struct record_head h = {.type = RECORD_SEAL, .time_us = clock_wall_us()};
    if (buffer_reserve(s, RECORD_PAGE)) {
        s->active = a;
        place_record(s, &h);
        /* Only spares recovery some checking, so it is neither waited for nor missed. */
        if (write_record(s, &h, NULL, NULL, RECORD_PAGE) == 0)
            a->durable_end = a->end;
        s->active = NULL;
    }
    a->sealed = true;
}

static int roll(struct store *s)
{
    int rc = append_sync(s);
    if (rc < 0)
        return rc;
    append_seal(s);
    rc = segment_create(&s->segments, s->next_segment_id, s->next_lsn, clock_wall_us(), &s->active);
    if (rc == -TD_ERR_EXISTS) /* left over from something that went wrong: never written over */
        s->next_segment_id++;
    if (rc == 0)
        s->next_segment_id++;
    return rc;
}

/* Is something else where the entry's head should be? A head that cannot be read proves nothing; bodies are verified when they are
 * read. */
static bool head_is_gone(struct store *s, const struct segment *a, const struct entry *e)
{
    struct record_head h;
    uint8_t page[RECORD_PAGE];
    patience_call(s, 0);
    return io_read_all(s->io, a->fd, page, sizeof page, e->offset) == 0 &&
           (record_head_parse(page, &h) < 0 || h.lsn != e->lsn);
}

static void forget_gone(struct store *s, uint8_t type, const struct entry *gone)
{
    struct table *t = store_table(s, type);
    struct table_shard *shard = table_lock(t, gone->id);
    struct entry *e = table_find(t, shard, gone->tenant, gone->id);
    if (e && e->segment_id == gone->segment_id && e->offset == gone->offset) {
        counter_add(&s->counters.damaged, s->metrics.damaged, 1);
        store_note_change(s, type, e, true);
        if (entry_clear_place(s, e))
            table_remove(t, shard, e);
    }
    table_unlock(shard);
}

/* Forget records of a segment that are no longer there: after a failed sync, memory and medium may differ. The disk is read without locks; without
 * memory for that the readers find out. */
static void recheck_segment(struct store *s, struct segment *a, uint8_t type)
{
    for (size_t i = 0; i < TABLE_SHARD_COUNT; i++) {
        struct table_shard *shard = &store_table(s, type)->shards[i];
        size_t count = 0;
        pthread_mutex_lock(&shard->lock);
        struct entry *in = malloc((shard->used_count + 1) * sizeof *in);
        for (size_t j = 0; j < shard->slot_count && in; j++)
            if (shard->slots[j].tenant && shard->slots[j].segment_id == a->id)
                in[count++] = shard->slots[j];
        pthread_mutex_unlock(&shard->lock);
        for (size_t j = 0; j < count; j++)
            if (head_is_gone(s, a, &in[j]))
                forget_gone(s, type, &in[j]);
        free(in);
    }
}

void append_abandon(struct store *s)
{
    struct segment *a = s->active;
    for (struct store_op *op = s->batch; op; op = op->next)
        op->appended = op->synced;
    if (!a)
        return;
    group_leave_segment(s);
    s->active = NULL;
    /* It is open, and stays so: once it is sealed whoever wants a descriptor may take its. */
    a = segment_acquire(&s->segments, a->id, NULL);
    a->sealed = true;
    log_error("store",
              "a write or sync of a segment failed: it is closed, unacknowledged records go to another one");
    if (a->durable_end <= RECORD_PAGE) { /* nothing in it was ever promised */
        int rc = segment_unlink(&s->segments, a->id);
        rc = rc < 0 ? rc : s->io->sync_directory(s->io, s->directory);
        s->retire_off |= rc < 0; /* it may come back: tombstones of what is in it must stay */
        segment_drop(&s->segments, a);
        segment_release(&s->segments, a);
        return;
    }
    a->end = a->durable_end;
    s->io->truncate(s->io, a->fd, a->durable_end);
    s->io->advise(s->io, a->fd, 0, a->durable_end, IO_FORGET);
    recheck_segment(s, a, RECORD_BLOCK);
    recheck_segment(s, a, RECORD_CONVERSATION);
    recheck_segment(s, a, RECORD_PIN);
    segment_release(&s->segments, a);
}

/* ---- append ----------------------------------------------------------------------------------------------- */

static int prepare_keys(struct record_head *h, const struct tenant_keys *keys)
{
    if (keys)
        memcpy(h->key_id, keys->key_id, sizeof h->key_id);
    int rc = h->part_count ? crypto_random(h->salt, sizeof h->salt) : 0;
    if (rc == 0 && h->type == RECORD_CONVERSATION) {
        uint8_t body_key[CRYPTO_KEY_SIZE];
        rc = crypto_random(body_key, sizeof body_key);
        rc = rc < 0 ? rc : record_wrap_key(keys->data_key, h, body_key);
        crypto_wipe(body_key, sizeof body_key);
    }
    return rc;
}

/* op: of a block, whose record may wait for others; then plain is not used. */
static int try_append(struct store *s, struct record_head *h, const struct tenant_keys *keys,
                      struct store_op *op, const uint8_t *plain, uint64_t size)
{
    if (!space_fits(s, size))
        return -TD_ERR_DISKFULL;
    int rc = 0;
    if (!s->active || (s->active->end > RECORD_PAGE && s->active->end + size > s->segment_size))
        rc = roll(s);
    if (rc < 0)
        return rc;
    if (!op && !buffer_reserve(s, size))
        return -TD_ERR_NOMEM;
    place_record(s, h);
    if (h->type == RECORD_TOMBSTONE && h->version == 0)
        h->version = h->lsn;
    rc = prepare_keys(h, keys);
    if (rc < 0 || !op)
        return rc < 0 ? rc : write_record(s, h, keys, plain, size);
    rc = group_add(s, op, h, keys);
    if (rc == 0)
        advance(s->active, h);
    return rc == 0 && s->group.one_by_one ? group_flush(s) : rc;
}

static int append(struct store *s, struct record_head *h, const struct tenant_keys *keys, struct store_op *op,
                  const uint8_t *plain)
{
    h->body_size = record_part_offset(h, h->part_count);
    if (h->body_size > RECORD_BODY_MAX)
        return -TD_ERR_LIMIT;
    uint64_t size = record_size(h->body_size);
    int rc = try_append(s, h, keys, op, plain, size);
    if (rc == -TD_ERR_DISKFULL) {
        rc = group_flush(s);
        rc = rc < 0 ? rc : space_make_room(s, size, op != NULL);
        s->last_resort = rc == -TD_ERR_DISKFULL && h->type == RECORD_CONVERSATION;
        if (s->last_resort && !space_fits(s, size))
            evict_unburied(s, size);
        if (rc == 0 && op && !evict_reachable(s, op)) /* its parent was worth less than all else */
            rc = -TD_ERR_NOSPACE;
        rc = rc < 0 && !s->last_resort ? rc : try_append(s, h, keys, op, plain, size);
        s->last_resort = false;
    }
    return rc;
}

int append_record(struct store *s, struct record_head *h, const struct tenant_keys *keys,
                  const uint8_t *plain)
{
    return append(s, h, keys, NULL, plain);
}

int append_block(struct store *s, struct record_head *h, const struct tenant_keys *keys, struct store_op *op)
{
    return append(s, h, keys, op, NULL);
}
