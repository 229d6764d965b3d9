/* recover: from the files of a directory to the tables in RAM.
 *
 *   1. Every segment file is opened and its head checked. A file without one good head was never acknowledged: it is removed, if all of it
 *      could be read. One of another version ends the opening before anything is changed.
 *   2. If the index is sound, its rows fill the tables; it knows each segment up to an applied length. If it is not, it is set
 *      aside and all lengths are zero.
 *   3. Segments are replayed beyond those lengths in order of their ids, which is the order of lsns: the last record of an id wins,
 *      tombstones take away what lies below the lsn that they cover.
 *   4. The records behind the last known sync may be torn. Their bodies are checked against the CRC in the head, all others are
 *      checked when they are read. What lies behind the last good record is cut off.
 *   5. What was found beyond the index is synced before anybody sees it: a reader must not see today what a power loss could
 *      take back tomorrow.
 * Appending always begins a new segment. */
#include "shared/log.h"
#include "store/store_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

#define UNREAD_LSNS  (UINT64_C(1) << 32)
#define SEGMENT_IDS  (UINT64_C(1) << 62) /* no store gets there: an index that names a higher one is false */
#define ROWS_AT_ONCE 65536               /* rows that a rebuild collects before it hands them to the index */

/* ---- files ------------------------------------------------------------------------------------------------ */

struct id_list {
    uint64_t *ids;
    size_t count, capacity;
    bool failed;
};

static void collect_name(void *ctx, const char *name)
{
    struct id_list *l = ctx;
    uint64_t id;
    if (!segment_name_parse(name, &id))
        return;
    if (l->count == l->capacity) {
        size_t capacity = l->capacity ? 2 * l->capacity : 64;
        uint64_t *ids = realloc(l->ids, capacity * sizeof *ids);
        if (!ids) {
            l->failed = true;
            return;
        }
        l->ids = ids;
        l->capacity = capacity;
    }
    l->ids[l->count++] = id;
}

static int compare_ids(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* The head page is damaged: any record of the file states the segment's nonce. -TD_ERR_NOTFOUND: it has none; another code: some of it cannot be
 * read, so nobody can say. */
static int find_nonce(struct store *s, struct segment *g, uint64_t size)
{
    int unread = 0;
    for (uint64_t at = RECORD_PAGE; at + RECORD_PAGE <= size; at += RECORD_PAGE) {
        uint8_t page[RECORD_PAGE];
        struct record_head h;
        int rc = io_read_all(s->io, g->fd, page, sizeof page, at);
        if (rc < 0) {
            unread = rc;
            continue;
        }
        rc = record_head_parse(page, &h);
        if (rc == -TD_ERR_VERSION)
            return rc;
        if (rc == 0 && h.segment_id == g->id && h.offset == at) {
            g->nonce = h.segment_nonce;
            g->first_lsn = 0; /* not known: assume the oldest, so that tombstones are kept */
            return 0;
        }
    }
    return unread ? unread : -TD_ERR_NOTFOUND;
}

/* -TD_ERR_VERSION: another version of this program wrote it, so nothing here may touch it. -TD_ERR_NOTFOUND: all of it was read, and nothing is in it. */
static int identify(struct store *s, struct segment *g, uint64_t size)
{
    uint8_t page[RECORD_PAGE];
    struct segment_head head;
    int rc = size >= RECORD_PAGE ? io_read_all(s->io, g->fd, page, sizeof page, 0) : -TD_ERR_TRUNCATED;
    rc = rc < 0 ? rc : segment_head_parse(page, &head);
    if (rc == -TD_ERR_VERSION)
        return rc;
    if (rc == 0 && head.id == g->id) {
        g->nonce = head.nonce;
        g->first_lsn = head.first_lsn;
        return 0;
    }
    int found = find_nonce(s, g, size);
    if (found == 0)
        log_warn("store", "a segment's head is damaged; its records are read");
    bool unread = rc == -TD_ERR_IO || rc == -TD_ERR_NOMEM;
    return found == -TD_ERR_NOTFOUND && unread ? rc : found;
}

/* An error of the moment, perhaps: the file stays, and the next start looks at it again. */
static int pass_over(struct store *s, struct segment *g, int rc)
{
    if (g->fd >= 0)
        s->io->close(s->io, g->fd);
    free(g);
    log_error("store", "a segment cannot be read (%s): its records are misses", td_status_text(rc));
    s->index_partial = s->segment_unread = true;
    return 0;
}

/* Open a segment file. *out = NULL when it cannot be read, or, -TD_ERR_NOTFOUND, when there is nothing in it. */
static int open_segment(struct store *s, uint64_t id, struct segment **out)
{
    char name[SEGMENT_NAME_SIZE], path[IO_PATH_MAX];
    *out = NULL;
    segment_name(id, name);
    if (!io_path(path, s->directory, name))
        return -TD_ERR_ARG;
    struct segment *g = calloc(1, sizeof *g);
    if (!g)
        return -TD_ERR_NOMEM;
    g->id = id;
    g->sealed = g->name_durable = true;
    g->fd = s->io->open(s->io, path, s->read_only ? O_RDONLY : O_RDWR);
    int64_t size = g->fd < 0 ? g->fd : s->io->size(s->io, g->fd);
    if (size < 0)
        return pass_over(s, g, io_status(size));
    int64_t allocated = s->io->allocated(s->io, g->fd);
    g->end = (uint64_t)size / RECORD_PAGE * RECORD_PAGE;
    g->hole_size = allocated >= 0 && allocated < size ? (uint64_t)(size - allocated) : 0;
    int rc = identify(s, g, (uint64_t)size);
    if (rc < 0 && rc != -TD_ERR_VERSION && rc != -TD_ERR_NOTFOUND)
        return pass_over(s, g, rc);
    rc = rc < 0 ? rc : segments_add(&s->segments, g);
    if (rc == 0) {
        *out = g;
        return 0;
    }
    s->io->close(s->io, g->fd);
    free(g);
    return rc;
}

/* The last life may have ended before it synced the names of its newest segments. Nothing is removed, nor counted on, before they are. */
static void keep_names(struct store *s)
{
    if (s->read_only || s->io->sync_directory(s->io, s->directory) == 0)
        return;
    log_error("store", "the directory could not be synced after a restart");
    s->index_partial = true;
}

static int open_segments(struct store *s)
{
    struct id_list list = {0};
    int rc = s->io->list(s->io, s->directory, collect_name, &list);
    rc = rc < 0 ? io_status(rc) : list.failed ? -TD_ERR_NOMEM : 0;
    if (list.count)
        qsort(list.ids, list.count, sizeof *list.ids, compare_ids);
    s->next_segment_id = 1;
    if (rc == 0 && list.count > 0)
        keep_names(s);
    size_t empty = 0;
    for (size_t i = 0; i < list.count && rc == 0; i++) {
        struct segment *g;
        rc = open_segment(s, list.ids[i], &g);
        s->next_segment_id = list.ids[i] + 1;
        if (rc == -TD_ERR_NOTFOUND) {
            list.ids[empty++] = list.ids[i];
            rc = 0;
        }
        if (rc == 0 && g) {
            s->next_lsn = TD_MAX(s->next_lsn, g->first_lsn);
            segments_trim(&s->segments);
        }
    }
    /* Only now: a directory with one segment of another version is left as it is. */
    for (size_t i = 0; i < empty && rc == 0 && !s->read_only; i++) {
        log_warn("store", "a segment without records is removed");
        segment_unlink(&s->segments, list.ids[i]);
    }
    free(list.ids);
    return rc;
}

/* ---- index ------------------------------------------------------------------------------------------------ */

static int take_segment(void *ctx, const struct index_segment *row)
{
    struct store *s = ctx;
    struct segment *g = segment_find(&s->segments, row->id);
    if (row->id > SEGMENT_IDS || row->applied_end % RECORD_PAGE)
        return -TD_ERR_FORMAT;
    s->next_segment_id = TD_MAX(s->next_segment_id, row->id + 1);
    if (g && g->nonce == row->nonce) {
        g->durable_end = TD_MIN(row->applied_end, (uint64_t)g->end);
        g->told_end = g->durable_end;
        g->tombstone_count = row->tombstone_count;
    }
    return 0;
}

/* A segment that the index does not know is new, so it must be newer than all that it knows: replaying an older one behind their backs
 * could bring back what their tombstones took away. */
static int check_unknown_are_newer(struct store *s)
{
    bool known_follows = false;
    for (size_t i = s->segments.count; i > 0; i--) {
        bool known = s->segments.list[i - 1]->durable_end > 0;
        if (!known && known_follows)
            return -TD_ERR_MISMATCH;
        known_follows |= known;
    }
    return 0;
}

/* The last record that begins before `at`. -TD_ERR_NOTFOUND: there is none; another code: it cannot be read. */
static int last_head(struct store *s, const struct segment *g, uint64_t at, struct record_head *h)
{
    int rc = -TD_ERR_NOTFOUND;
    while (rc == -TD_ERR_NOTFOUND && at > RECORD_PAGE) {
        uint8_t page[RECORD_PAGE];
        at -= RECORD_PAGE;
        int read = io_read_all(s->io, g->fd, page, sizeof page, at);
        if (read < 0)
            rc = read;
        else if (record_head_parse(page, h) == 0 && h->segment_id == g->id && h->segment_nonce == g->nonce &&
                 h->offset == at)
            rc = 0;
    }
    return rc;
}

/* Where the replay begins, a record must: what it finds no head for is cut off. And new records must get higher lsns than all that are there. */
static int check_end(struct store *s, const struct segment *g)
{
    struct record_head h;
    bool is_newest = g == s->segments.list[s->segments.count - 1];
    int rc = 0;
    if (g->told_end == 0 || (g->told_end == g->end && !is_newest))
        return 0;
    struct segment *pinned = segment_acquire(&s->segments, g->id, &rc);
    if (!pinned)
        return rc;
    rc = last_head(s, pinned, g->told_end, &h);
    segment_release(&s->segments, pinned);
    if (rc < 0)
        return rc == -TD_ERR_NOTFOUND ? 0 : rc;
    bool cuts = g->told_end < g->end && h.offset + record_size(h.body_size) > g->told_end;
    return cuts || h.lsn >= s->next_lsn ? -TD_ERR_MISMATCH : 0;
}

static int check_ends(struct store *s)
{
    int rc = 0;
    for (size_t i = 0; i < s->segments.count && rc == 0; i++)
        rc = check_end(s, s->segments.list[i]);
    return rc;
}

static int take_row(void *ctx, const struct index_row *row)
{
    struct store *s = ctx;
    if (row->lsn >= s->next_lsn || row->offset % RECORD_PAGE || row->offset > INT64_MAX)
        return -TD_ERR_FORMAT;
    uint32_t tenant = keys_find_id(s->keys, row->key_id);
    const struct segment *g = segment_find(&s->segments, row->segment_id);
    if (!tenant || !g || row->stored_size < RECORD_PAGE || row->offset + row->stored_size > g->durable_end) {
        /* Erased tenant, dropped segment, or bytes that the replay decides about: what it finds is noted after this. */
        struct index_row *gone = store_row_add(s);
        if (!gone)
            return -TD_ERR_LIMIT;
        *gone = *row;
        gone->segment_id = 0;
        return 0;
    }
    struct table *t = store_table(s, row->type);
    struct table_shard *shard = table_lock(t, row->id);
    struct entry *e = table_insert(t, shard, tenant, row->id);
    int rc = e ? 0 : -TD_ERR_NOMEM;
    if (e && row->type == RECORD_CONVERSATION && !e->conversation) {
        e->conversation = calloc(1, sizeof *e->conversation);
        if (!e->conversation) {
            table_remove(t, shard, e);
            rc = -TD_ERR_NOMEM;
        }
    }
    if (rc == 0) {
        entry_set_place(s, e, row->segment_id, row->offset, row->lsn, row->stored_size);
        memcpy(e->parent, row->principal, sizeof e->parent);
        e->quality = row->quality;
        e->block_index = row->block_index;
        e->layer_begin = row->layer_begin;
        e->layer_end = row->type == RECORD_BLOCK ? row->layer_end : 0;
        entry_count(s, e, true);
        if (e->conversation) {
            memcpy(e->conversation->principal, row->principal, sizeof row->principal);
            e->conversation->durable = e->conversation->written = row->version;
            e->conversation->updated_us = row->updated_us;
        }
    }
    table_unlock(shard);
    return rc;
}

static void forget_rows(struct store *s)
{
    table_deinit(&s->blocks);
    table_deinit(&s->conversations);
    table_deinit(&s->pins);
    table_init(&s->blocks);
    table_init(&s->conversations);
    table_init(&s->pins);
    s->block_size = 0;
    memset(s->tenants, 0, sizeof s->tenants);
    for (size_t i = 0; i < s->segments.count; i++) {
        struct segment *g = s->segments.list[i];
        g->durable_end = g->tombstone_count = 0;
        g->told_end = 0;
        g->live_count = g->live_size = 0;
    }
}

/* It cannot be used, for that reason: do without what it has told. */
static void drop_index(struct store *s, int why)
{
    log_warn("store", "the index cannot be used (%s): reading all segments instead",
             why == -TD_ERR_BUSY ? "another program has locked it" : td_status_text(why));
    index_close(s->index);
    s->index = NULL;
    s->row_count = s->void_count = 0;
    forget_rows(s);
    if (why !=
        -TD_ERR_BUSY) /* busy: somebody else's tool has it open: leave it alone and do without for now */
        index_set_aside(s->index_directory, true);
    if (why == -TD_ERR_BUSY || index_open(s->index_directory, &s->index) < 0) {
        s->index = NULL;
        index_want(s);
    }
}

/* Fill the tables from the index, or find out that it is of no use. */
static int load_index(struct store *s)
{
    int rc = index_open(s->index_directory, &s->index);
    if (rc == 0) {
        s->next_lsn = TD_MAX(s->next_lsn, index_next_lsn(s->index));
        rc = index_each_segment(s->index, take_segment, s);
        rc = rc < 0 ? rc : check_unknown_are_newer(s);
        rc = rc < 0 ? rc : check_ends(s);
        rc = rc < 0 ? rc : index_each_row(s->index, take_row, s);
    }
    if (rc < 0 && rc != -TD_ERR_NOMEM)
        drop_index(s, rc);
    return rc == -TD_ERR_NOMEM ? rc : 0;
}

/* ---- replay ----------------------------------------------------------------------------------------------- */

struct replay_item { /* a record head without its table of parts */
    uint8_t type, target;
    struct kv_quality quality;
    uint32_t block_index, body_crc;
    uint16_t layer_begin, layer_end;
    uint64_t lsn, offset, body_size, version, time_us;
    uint8_t key_id[RECORD_KEY_ID];
    uint8_t id[32], parent[32];
};
struct replay {
    struct replay_item *items;
    size_t count, capacity;
};

static int collect_record(void *ctx, const struct record_head *h, const uint8_t *page)
{
    (void)page;
    struct replay *r = ctx;
    if (r->count == r->capacity) {
        size_t capacity = r->capacity ? 2 * r->capacity : 256;
        struct replay_item *items = realloc(r->items, capacity * sizeof *items);
        if (!items)
            return -TD_ERR_NOMEM;
        r->items = items;
        r->capacity = capacity;
    }
    struct replay_item *i = &r->items[r->count++];
    *i = (struct replay_item){.type = h->type,
                              .target = h->target,
                              .quality = h->quality,
                              .block_index = h->block_index,
                              .body_crc = h->body_crc,
                              .layer_begin = h->layer_begin,
                              .layer_end = h->layer_end,
                              .lsn = h->lsn,
                              .offset = h->offset,
                              .body_size = h->body_size,
                              .version = h->version,
                              .time_us = h->time_us};
    memcpy(i->key_id, h->key_id, sizeof i->key_id);
    memcpy(i->id, h->id, sizeof i->id);
    memcpy(i->parent, h->parent, sizeof i->parent);
    return 0;
}

/* Does a record count for nothing, because what the entry has is newer? 1, 0, or -TD_ERR_MISMATCH: the index says so and it is not there. */
static int is_old(struct store *s, uint8_t type, const struct entry *e, uint64_t lsn)
{
    if (!e->segment_id || e->lsn < lsn)
        return 0;
    struct record_claim newer = audit_claim(type, e);
    int holds = audit_is_told(s, e) ? audit_claim_holds(s, &newer) : 1;
    s->index_partial |= holds < 0; /* the next start asks again */
    return holds == 0 ? -TD_ERR_MISMATCH : 1;
}

static int replay_put(struct store *s, const struct segment *g, uint32_t tenant, const struct replay_item *i)
{
    struct table *t = store_table(s, i->type);
    struct table_shard *shard = table_lock(t, i->id);
    struct entry *e = table_insert(t, shard, tenant, i->id);
    int rc = e ? is_old(s, i->type, e, i->lsn) : -TD_ERR_NOMEM;
    if (rc == 1 || rc == -TD_ERR_MISMATCH) {
        table_unlock(shard);
        return TD_MIN(rc, 0);
    }
    if (e && i->type == RECORD_CONVERSATION && !e->conversation) {
        e->conversation = calloc(1, sizeof *e->conversation);
        if (!e->conversation) {
            table_remove(t, shard, e);
            rc = -TD_ERR_NOMEM;
        }
    }
    if (rc == 0) {
        store_void_later(s, i->type, e);
        entry_count(s, e, false);
        entry_set_place(s, e, g->id, i->offset, i->lsn, (uint32_t)record_size(i->body_size));
        memcpy(e->parent, i->parent, sizeof e->parent);
        e->quality = i->quality;
        e->block_index = i->type == RECORD_PIN ? i->target : i->block_index;
        e->layer_begin = i->layer_begin;
        e->layer_end = i->layer_end;
        entry_count(s, e, true);
        if (e->conversation) {
            memcpy(e->conversation->principal, i->parent, sizeof i->parent);
            e->conversation->durable = e->conversation->written = i->version;
            e->conversation->updated_us = i->time_us;
        }
        store_note_change(s, i->type, e, false);
    }
    table_unlock(shard);
    return rc;
}

static void replay_tombstone(struct store *s, uint32_t tenant, const struct replay_item *i)
{
    struct table *t = store_table(s, i->target);
    struct table_shard *shard = table_lock(t, i->id);
    struct entry *e = table_find(t, shard, tenant, i->id);
    if (e && e->lsn < i->version) {
        store_void_later(s, i->target, e);
        store_note_change(s, i->target, e, true);
        entry_clear_place(s, e);
        table_remove(t, shard, e);
    }
    table_unlock(shard);
}

/* The key file still knows a tenant that was erased: an old copy came back. */
static void replay_erase(struct store *s, uint8_t type, uint32_t tenant, uint64_t below_lsn)
{
    struct table *t = store_table(s, type);
    for (size_t n = 0; n < TABLE_SHARD_COUNT; n++) {
        struct table_shard *shard = &t->shards[n];
        pthread_mutex_lock(&shard->lock);
        for (size_t j = 0; j < shard->slot_count;) {
            struct entry *e = &shard->slots[j];
            if (e->tenant == tenant && e->lsn < below_lsn) {
                store_void_later(s, type, e);
                store_note_change(s, type, e, true);
                entry_clear_place(s, e);
                table_remove(t, shard, e); /* another entry may move into this slot: look at it again */
            } else {
                j++;
            }
        }
        pthread_mutex_unlock(&shard->lock);
    }
}

static int replay_item(struct store *s, struct segment *g, const struct replay_item *i)
{
    uint32_t tenant = keys_find_id(s->keys, i->key_id);
    s->next_lsn = TD_MAX(s->next_lsn, i->lsn + 1);
    if (i->type == RECORD_TOMBSTONE)
        g->tombstone_count++;
    if (!tenant)
        return 0; /* erased, or a record of no tenant */
    if (i->type == RECORD_BLOCK || i->type == RECORD_CONVERSATION || i->type == RECORD_PIN)
        return replay_put(s, g, tenant, i);
    if (i->type == RECORD_TOMBSTONE && i->target == RECORD_ANY_TENANT) {
        replay_erase(s, RECORD_BLOCK, tenant, i->version);
        replay_erase(s, RECORD_CONVERSATION, tenant, i->version);
        replay_erase(s, RECORD_PIN, tenant, i->version);
    } else if (i->type == RECORD_TOMBSTONE) {
        replay_tombstone(s, tenant, i);
    }
    return 0;
}

static bool item_is_whole(struct store *s, int fd, const struct replay_item *i, bool *unreadable)
{
    if (i->type != RECORD_BLOCK && i->type != RECORD_CONVERSATION)
        return true;
    struct record_head h = {.offset = i->offset, .body_size = i->body_size, .body_crc = i->body_crc};
    int rc = segment_check_body(s->io, fd, &h);
    *unreadable |= rc < 0 && rc != -TD_ERR_CHECKSUM && rc != -TD_ERR_TRUNCATED;
    return rc == 0;
}

/* Cut off what follows the last record, and sync what the replay has found. Without the sync the index must not get ahead of it. */
static void settle_tail(struct store *s, struct segment *g, const struct segment_scan *scan, uint64_t end,
                        bool found)
{
    bool torn = end < g->end && !scan->unreadable;
    if (torn)
        g->end = end;
    if (s->read_only)
        return;
    if (torn)
        s->io->truncate(s->io, g->fd, end);
    if ((torn || found) && s->io->fsync(s->io, g->fd) < 0) {
        log_error("store", "a segment could not be synced after a restart: what it gained last may be lost");
        s->index_partial = true;
    }
}

static int replay_segment(struct store *s, struct segment *g, struct replay *r)
{
    uint64_t from = TD_MAX(g->durable_end, (uint64_t)RECORD_PAGE), end = from;
    struct segment_scan scan = {0};
    struct segment *pinned = from < g->end ? segment_acquire(&s->segments, g->id, NULL) : NULL;
    if (!pinned) {
        g->suspect = from < g->end;
        s->index_partial |= g->suspect;
        g->durable_end = g->end;
        return 0;
    }
    r->count = 0;
    int rc = segment_scan(s->io, g->fd, g, from, g->end, collect_record, r, &scan);
    uint64_t synced = TD_MAX(scan.durable_end, from);
    size_t torn = 0;
    for (size_t i = 0; i < r->count && rc == 0; i++) {
        const struct replay_item *item = &r->items[i];
        if (item->offset >= synced && !item_is_whole(s, g->fd, item, &scan.unreadable)) {
            torn++;
            continue;
        }
        end = item->offset + record_size(item->body_size);
        rc = replay_item(s, g, item); /* -TD_ERR_MISMATCH: of the index */
        if (s->row_count >= ROWS_AT_ONCE)
            store_index_flush(s, false);
    }
    if (scan.unreadable) { /* an error of the moment: the next start must look at everything again */
        log_error("store", "parts of a segment cannot be read: what is in them is missing");
        g->suspect = s->index_partial = true;
    }
    if (rc == 0) {
        settle_tail(s, g, &scan, end, r->count > 0);
        g->durable_end = g->end;
    }
    segment_release(&s->segments, pinned);
    if (scan.skipped_pages)
        log_warn("store", "a segment has %u damaged page%s", scan.skipped_pages, TD_S(scan.skipped_pages));
    if (torn)
        log_info("store", "%zu record%s dropped that had not been acknowledged", torn, TD_S(torn));
    return rc;
}

static int replay_all(struct store *s, const struct store_env *env)
{
    struct replay r = {0};
    int rc = 0;
    for (size_t i = 0; i < s->segments.count && rc == 0; i++) {
        rc = replay_segment(s, s->segments.list[i], &r);
        if (env->progress)
            env->progress(env->progress_ctx, i + 1, s->segments.count);
    }
    free(r.items);
    return rc;
}

int recover(struct store *s, const struct store_env *env, bool keys_found, struct td_error *err)
{
    s->next_lsn = 1;
    snprintf(s->index_directory, sizeof s->index_directory, "%s",
             env->index_directory ? env->index_directory : s->directory);
    int rc = open_segments(s);
    if (rc == 0 && s->segments.count > 0 && !keys_found)
        return td_fail(err, -TD_ERR_NOTFOUND,
                       "cannot open store %s: its key file " KEYS_FILE
                       " is missing; restore it, or remove the directory",
                       s->directory);
    if (rc == -TD_ERR_VERSION)
        return td_fail(
            err, rc,
            "cannot open store %s: its segments were written by another version of this program; start "
            "that version, or remove the directory",
            s->directory);
    if (rc == 0 && !s->read_only)
        rc = load_index(s);
    rc = rc < 0 ? rc : replay_all(s, env);
    if (rc == -TD_ERR_MISMATCH) { /* a row that the log belies: none of them counts */
        drop_index(s, rc);
        rc = replay_all(s, env);
    }
    if (rc < 0)
        return td_fail(err, rc, "cannot read store %s: %s", s->directory, td_status_text(rc));
    if (s->index_partial) /* what could not be read may have higher ones than all that was: new records must win against it */
        s->next_lsn += UNREAD_LSNS;
    s->index_complete = !s->index_partial;
    store_void_now(s);
    return 0;
}
