/* space: the size limit, eviction, and what happens when the disk is full.
 *
 * From seven eighths of the limit on, blocks go one by one, the least valuable first (evict.c, store/policy.h): between two commits, and within one
 * that is more than the room that is left. Where that is not enough, as on a disk without room for tombstones,
 * whole segments are dropped, oldest first: their blocks are forgotten unless they are pinned; pinned blocks, pins and live conversations
 * are copied forward. Compaction is the same with all blocks kept. The order is
 * safe at every step: copies are synced before the tables point to them, the index is told and synced before the file goes, and a file
 * that may not have gone for good (a failed unlink or directory sync) ends all dropping in this process, because records deleted long ago might
 * come back with it once their tombstones are gone.
 *
 * A tombstone is needed as long as an older segment exists, also one that could not be opened, since only that can hold what it deletes. Segments are
 * dropped oldest first, so usually none is; otherwise they are copied forward with the lsn that they cover.
 *
 * A full disk must not stop eviction itself, which has to write: the ballast file is room kept back for that, and where it has gone, segments go
 * first that need no copies. A conversation is refused last: it takes the reserve, and blocks are voided for it where they lie. */
#include "shared/log.h"
#include "store/store_internal.h"
#include <fcntl.h>
#include <stdlib.h>

#define BALLAST_FILE         "ballast"
#define BALLAST_RETRY_US     10000000
#define BALLAST_SEGMENTS     16 /* dropped at a time to make room for it */
#define REWRITE_DEAD_PERCENT 25 /* of a segment, from which on it is rewritten to make room */
/* quotas and times to live are looked after so often, while blocks are written */
#define LIMITS_INTERVAL_US 1000000
#define FRUITLESS_MAX      8 /* segments dropped in a row without gaining space: they hold conversations */
/* batches of blocks evicted to make room at once; and as many segments rewritten as there are */
#define EVICT_ROUNDS_MAX 16

/* ---- forward ---------------------------------------------------------------------------------------------- */

struct forwarded {
    uint8_t type;
    uint32_t tenant;
    uint8_t id[32];
    struct record_place from, to;
    uint64_t lsn; /* of the old record, then of the copy */
};
struct forward_list {
    struct forwarded *items;
    size_t count, capacity;
};

static bool list_add(struct forward_list *l, uint8_t type, const struct entry *e)
{
    if (l->count == l->capacity) {
        size_t capacity = l->capacity ? 2 * l->capacity : 64;
        struct forwarded *items = realloc(l->items, capacity * sizeof *items);
        if (!items)
            return false;
        l->items = items;
        l->capacity = capacity;
    }
    struct forwarded *f = &l->items[l->count++];
    *f = (struct forwarded){
        .type = type, .tenant = e->tenant, .from = {e->segment_id, e->offset, e->stored_size}, .lsn = e->lsn};
    memcpy(f->id, e->id, sizeof f->id);
    return true;
}

static bool is_pinned(struct store *s, const struct entry *e)
{
    struct table_shard *shard = table_lock(&s->pins, e->id);
    const struct entry *pin = table_find(&s->pins, shard, e->tenant, e->id);
    bool pinned = pin && pin->segment_id;
    table_unlock(shard);
    return pinned;
}

/* What of a segment must live on: everything, or all but the blocks that are not pinned. */
static int list_entries(struct store *s, uint8_t type, uint64_t segment_id, bool keep_all,
                        struct forward_list *l)
{
    struct table *t = store_table(s, type);
    bool good = true;
    for (size_t i = 0; i < TABLE_SHARD_COUNT; i++) {
        struct table_shard *shard = &t->shards[i];
        pthread_mutex_lock(&shard->lock);
        for (size_t j = 0; j < shard->slot_count && good; j++) {
            const struct entry *e = &shard->slots[j];
            if (e->tenant && e->segment_id == segment_id &&
                (keep_all || type != RECORD_BLOCK || is_pinned(s, e)))
                good = list_add(l, type, e);
        }
        pthread_mutex_unlock(&shard->lock);
    }
    return good ? 0 : -TD_ERR_NOMEM;
}

/* All parts of a record, one after the other; malloc'ed, to be wiped and freed. NULL with *rc. */
static uint8_t *read_parts(struct store *s, const struct read_head *r, size_t *size, int *rc)
{
    *size = 0;
    for (uint32_t i = 0; i < r->head.part_count; i++)
        *size += (size_t)r->head.parts[i].first_size + r->head.parts[i].second_size;
    uint8_t *plain = malloc(*size + 1), *at = plain;
    *rc = plain ? 0 : -TD_ERR_NOMEM;
    for (uint32_t i = 0; i < r->head.part_count && *rc == 0; i++) {
        *rc = read_part(s, r, i, at);
        at += (size_t)r->head.parts[i].first_size + r->head.parts[i].second_size;
    }
    if (*rc < 0) {
        free(plain);
        return NULL;
    }
    return plain;
}

static int copy_record(struct store *s, const struct tenant_keys *keys, struct forwarded *f,
                       const struct record_head *from, const uint8_t *plain)
{
    struct record_head h = *from;
    int rc = append_record(s, &h, keys, plain);
    if (rc < 0)
        return rc;
    f->to = (struct record_place){h.segment_id, h.offset, (uint32_t)record_size(h.body_size)};
    f->lsn = h.lsn;
    return 0;
}

/* Copy one record to the active segment. A damaged one is dropped, which is no failure; one that cannot be read now keeps its segment
 * (-TD_ERR_BUSY). */
static int forward_record(struct store *s, struct forwarded *f)
{
    struct tenant_keys keys;
    struct read_head r;
    if (keys_get(s->keys, f->tenant, &keys) < 0)
        return 0;
    patience_call(s, f->from.stored_size);
    int rc = read_open(s, &keys, &f->from, f->type, f->id, f->lsn, &r);
    if (rc == 0) {
        size_t size;
        uint8_t *plain = read_parts(s, &r, &size, &rc);
        read_close(s, &r);
        if (plain) {
            rc = copy_record(s, &keys, f, &r.head, plain);
            crypto_wipe(plain, size);
            free(plain);
            crypto_wipe(&keys, sizeof keys);
            return rc;
        }
    }
    crypto_wipe(&keys, sizeof keys);
    if (rc == -TD_ERR_NOMEM || rc == -TD_ERR_IO)
        return -TD_ERR_BUSY;
    read_drop_damaged(s, f->type, f->tenant, f->id, &f->from);
    return 0;
}

static int forward_tombstone(void *ctx, const struct record_head *head, const uint8_t *page)
{
    (void)page;
    patience_call(ctx, 0);
    struct record_head h = *head; /* keeps `version`, the lsn below which it deletes */
    return h.type == RECORD_TOMBSTONE ? append_record(ctx, &h, NULL, NULL) : 0;
}

/* Nothing is left that a tombstone in it could cover. */
static bool is_oldest(const struct store *s, const struct segment *v)
{
    return s->segments.list[0] == v && !s->segment_unread;
}

static int forward_tombstones(struct store *s, struct segment *v)
{
    struct segment_scan scan;
    if (v->tombstone_count == 0 || is_oldest(s, v))
        return 0;
    struct segment *pinned = segment_acquire(&s->segments, v->id, NULL);
    if (!pinned)
        return -TD_ERR_BUSY;
    int rc = segment_scan(s->io, pinned->fd, pinned, RECORD_PAGE, pinned->end, forward_tombstone, s, &scan);
    segment_release(&s->segments, pinned);
    return rc == 0 && scan.unreadable ? -TD_ERR_BUSY : rc;
}

static bool is_durable(struct store *s, const struct record_place *p)
{
    const struct segment *g = p->segment_id ? segment_find(&s->segments, p->segment_id) : NULL;
    return g && p->offset + p->stored_size <= g->durable_end;
}

/* stays: the segment that it was copied from does. */
static void publish_forwarded(struct store *s, const struct forwarded *f, bool stays)
{
    struct table *t = store_table(s, f->type);
    struct table_shard *shard = table_lock(t, f->id);
    struct entry *e = table_find(t, shard, f->tenant, f->id);
    if (e && e->segment_id == f->from.segment_id && e->offset == f->from.offset) {
        if (stays)
            store_void_later(s, f->type, e);
        entry_set_place(s, e, f->to.segment_id, f->to.offset, f->lsn, f->to.stored_size);
        store_note_change(s, f->type, e, false);
    } else { /* replaced or deleted meanwhile: the copy is of no use */
        struct entry copy = {.tenant = f->tenant,
                             .segment_id = f->to.segment_id,
                             .offset = f->to.offset,
                             .lsn = f->lsn,
                             .stored_size = f->to.stored_size};
        memcpy(copy.id, f->id, sizeof copy.id);
        store_void_alone(s, f->type, &copy);
    }
    table_unlock(shard);
}

/* ---- retire ----------------------------------------------------------------------------------------------- */

static void forget_blocks(struct store *s, uint64_t segment_id)
{
    for (size_t i = 0; i < TABLE_SHARD_COUNT; i++) {
        struct table_shard *shard = &s->blocks.shards[i];
        pthread_mutex_lock(&shard->lock);
        for (size_t j = 0; j < shard->slot_count;) {
            struct entry *e = &shard->slots[j];
            bool gone = false;
            if (e->tenant && e->segment_id == segment_id) {
                store_note_change(s, RECORD_BLOCK, e, true);
                gone = entry_clear_place(s, e);
            }
            if (gone)
                table_remove(&s->blocks, shard,
                             e); /* another entry may move into this slot: look at it again */
            else
                j++;
        }
        pthread_mutex_unlock(&shard->lock);
    }
}

/* Until file and name are gone for good, the segment stays in the list: tombstones of what is in it are kept. */
static int remove_segment(struct store *s, struct segment *v)
{
    patience_call(s, 0);
    int rc = segment_unlink(&s->segments, v->id);
    rc = rc < 0 ? rc : s->io->sync_directory(s->io, s->directory);
    if (rc < 0) {
        s->retire_off = true;
        store_index_incomplete(s); /* its blocks are forgotten, and it may be there again */
        log_error("store",
                  "a segment could not be removed for good (%s): no more space is freed until a restart",
                  td_status_text(io_status(rc)));
        return -TD_ERR_DISKFULL;
    }
    segment_drop(&s->segments, v);
    return 0;
}

/* Drop a sealed segment: copy what must live, forget the rest, remove the file. -TD_ERR_BUSY: it cannot be read now and stays;
 * -TD_ERR_DISKFULL: no room for the copies, or the file will not go; -TD_ERR_IO: the active segment must be abandoned. */
static int retire_keeping(struct store *s, struct segment *v, bool keep_all)
{
    static const uint8_t types[] = {RECORD_CONVERSATION, RECORD_PIN, RECORD_BLOCK};
    struct forward_list list = {0};
    patience_call(s, 0);
    int rc = audit_segment(s, v);
    for (size_t i = 0; i < TD_COUNT(types) && rc == 0; i++)
        rc = list_entries(s, types[i], v->id, keep_all, &list);
    for (size_t i = 0; i < list.count && rc == 0; i++)
        rc = forward_record(s, &list.items[i]);
    rc = rc < 0 ? rc : forward_tombstones(s, v);
    if (rc != -TD_ERR_IO && append_sync(s) < 0)
        rc = -TD_ERR_IO;
    /* Also those that were copied before something failed: the log has them. */
    for (size_t i = 0; i < list.count; i++)
        if (is_durable(s, &list.items[i].to))
            publish_forwarded(s, &list.items[i], rc < 0);
    store_void_now(s); /* copies of no use: before the index hears of them */
    if (rc == 0) {
        store_index_flush(s, true);
        /* The index hears of these later: whoever finds the file again after a crash is to find them, too. */
        forget_blocks(s, v->id);
        rc = remove_segment(s, v);
    }
    free(list.items);
    if (rc == -TD_ERR_BUSY || rc == -TD_ERR_NOMEM) {
        v->suspect = true;
        return -TD_ERR_BUSY;
    }
    return rc;
}

static int retire(struct store *s, struct segment *v)
{
    return retire_keeping(s, v, false);
}

int space_rewrite(struct store *s, struct segment *v)
{
    if (s->making_room || s->retire_off)
        return -TD_ERR_DISKFULL;
    s->making_room = true; /* the copies may take the reserve: the old segment goes for it */
    int rc = retire_keeping(s, v, true);
    s->making_room = false;
    store_void_now(s);
    return rc;
}

/* … of those behind the one with id `after`. */
static struct segment *oldest_sealed(struct store *s, uint64_t after)
{
    for (size_t i = 0; i < s->segments.count; i++)
        if (s->segments.list[i]->sealed && !s->segments.list[i]->suspect && s->segments.list[i]->id > after)
            return s->segments.list[i];
    return NULL;
}

/* ---- limits ----------------------------------------------------------------------------------------------- */

static bool within_limit(struct store *s, uint64_t size)
{
    return segments_size(&s->segments) + size <= s->limit_size;
}

static bool disk_has(struct store *s, uint64_t size)
{
    uint64_t total, free_size;
    return s->io->space(s->io, s->directory, &total, &free_size) < 0 || free_size >= size + s->group.size;
}

bool space_fits(struct store *s, uint64_t size)
{
    /* The reserve does not bind while room is being made: that is what it is for. */
    bool takes_reserve = s->making_room || s->last_resort;
    return (s->making_room || within_limit(s, size)) &&
           disk_has(s, size + (takes_reserve ? 0 : STORE_SPACE_RESERVE));
}

static void ballast_release(struct store *s)
{
    char path[IO_PATH_MAX];
    if (s->ballast_there && io_path(path, s->directory, BALLAST_FILE))
        s->io->unlink(s->io, path);
    s->ballast_there = false;
    s->ballast_retry_us = clock_mono_us() + BALLAST_RETRY_US;
}

/* Is the ballast of an earlier life there? Then it counts whether or not there is room for another. */
static bool ballast_exists(struct store *s, const char *path)
{
    int fd = s->io->open(s->io, path, O_RDONLY);
    if (fd < 0)
        return false;
    int64_t size = s->io->size(s->io, fd);
    s->io->close(s->io, fd);
    return size == (int64_t)s->ballast_size;
}

void space_open_ballast(struct store *s)
{
    char path[IO_PATH_MAX];
    if (s->ballast_there || !s->ballast_size || !io_path(path, s->directory, BALLAST_FILE))
        return;
    s->ballast_retry_us = clock_mono_us() + BALLAST_RETRY_US;
    s->ballast_there = ballast_exists(s, path);
    if (s->ballast_there || !disk_has(s, 2 * s->ballast_size + STORE_SPACE_RESERVE))
        return;
    int fd = s->io->open(s->io, path, O_RDWR | O_CREAT);
    if (fd < 0)
        return;
    int rc = s->io->truncate(s->io, fd, 0);
    rc = rc < 0 ? rc : s->io->allocate(s->io, fd, 0, s->ballast_size);
    s->ballast_there = rc == 0;
    s->io->close(s->io, fd);
    if (!s->ballast_there)
        s->io->unlink(s->io, path);
}

static bool has_room(struct store *s, uint64_t size)
{
    return within_limit(s, size) && disk_has(s, size + STORE_SPACE_RESERVE);
}

/* One whose copies find no room is passed over: a younger one may have nothing to copy, and its room is theirs. */
static int drop_until_fits(struct store *s, uint64_t size)
{
    size_t rounds =
        2 * s->segments.count; /* every segment of now, once more if passed over; copies make new ones */
    uint64_t passed = 0;
    for (int fruitless = 0; rounds > 0 && fruitless < FRUITLESS_MAX; rounds--) {
        struct segment *v = oldest_sealed(s, passed);
        if (!v && s->active && s->active->end > RECORD_PAGE) { /* all there is lies in the active one */
            v = s->active;
            append_seal(s);
        }
        if (!v)
            break;
        uint64_t before = segments_size(&s->segments);
        int rc = retire(s, v);
        bool no_room = rc == -TD_ERR_DISKFULL && !s->retire_off;
        passed = no_room ? v->id : rc == 0 ? 0 : passed;
        if (no_room)
            continue;
        if (rc < 0 && rc != -TD_ERR_BUSY) /* busy: the next one, then */
            return rc;
        fruitless += segments_size(&s->segments) + RECORD_PAGE >= before;
        if (rc == 0 && has_room(s, size))
            return 0;
    }
    return -TD_ERR_DISKFULL;
}

bool space_is_dead(const struct segment *g, unsigned percent)
{
    uint64_t used = g->end - g->hole_size, live = g->live_size + RECORD_PAGE;
    uint64_t dead = used > live ? used - live : 0;
    return g->sealed && !g->suspect && dead * 100 >= used * percent;
}

static uint64_t watermark(const struct store *s)
{
    return s->limit_size / 8 * 7;
}

static uint64_t over(struct store *s, uint64_t mark)
{
    uint64_t size = segments_size(&s->segments);
    return size > mark ? size - mark : 0;
}

/* Would the store be smaller by enough without its dead records? Tombstones are copied like what lives, unless there is nothing older. */
static uint64_t kept_size(const struct store *s, const struct segment *v)
{
    return v->live_size + RECORD_PAGE + (is_oldest(s, v) ? 0 : (uint64_t)v->tombstone_count * RECORD_PAGE);
}

static bool is_worth_rewriting(const struct store *s, const struct segment *v)
{
    uint64_t used = v->end - v->hole_size, kept = kept_size(s, v);
    return v->sealed && !v->suspect && used > kept && (used - kept) * 100 >= used * REWRITE_DEAD_PERCENT;
}

/* The oldest segment that is worth it. *gained: by how much the store is smaller now. */
static int rewrite_one(struct store *s, uint64_t *gained)
{
    uint64_t before = segments_size(&s->segments), after = before;
    int rc = 0;
    for (size_t i = 0; i < s->segments.count; i++) {
        struct segment *v = s->segments.list[i];
        if (!is_worth_rewriting(s, v) || !disk_has(s, kept_size(s, v) + STORE_SPACE_RESERVE))
            continue;
        rc = retire_keeping(s, v, true);
        store_void_now(s);
        after = segments_size(&s->segments);
        break;
    }
    *gained = before > after ? before - after : 0;
    return rc == -TD_ERR_BUSY ? 0 : rc;
}

/* Is most of what the store takes blocks of which none may go? */
static bool is_held_fast(struct store *s)
{
    struct policy_stats stats;
    pthread_mutex_lock(&s->policy_lock);
    policy_stats(s->policy, &stats);
    pthread_mutex_unlock(&s->policy_lock);
    return stats.size >= segments_size(&s->segments) / 2;
}

/* What is done between two commits, in the midst of one: with more to come than there is room for, the ends of chains go, and not what their beginnings
 * lie in; until the store may take `size` more and the disk has disk_size. refused: the disk says that it has, and then did not take what was written.
 * -TD_ERR_DISKFULL: that is not enough; -TD_ERR_NOSPACE: what is there may not go now. */
static int evict_until_fits(struct store *s, uint64_t size, uint64_t disk_size, bool refused)
{
    bool rewrites = true;
    size_t left = s->policy ? s->segments.count + EVICT_ROUNDS_MAX : 0;
    for (; left > 0 && (refused || !within_limit(s, size) || !disk_has(s, disk_size)) && !s->retire_off;
         left--) {
        uint64_t gained = 0;
        size_t count = 0;
        int rc = rewrites ? rewrite_one(s, &gained) : 0;
        if (rc == -TD_ERR_DISKFULL) { /* no room for copies */
            rewrites = false;
            rc = 0;
        }
        if (rc == 0 && !gained)
            rc = evict_blocks(s, TD_MAX(over(s, watermark(s)), disk_size - STORE_SPACE_RESERVE), &count);
        if (rc < 0)
            return rc == -TD_ERR_IO ? rc : -TD_ERR_DISKFULL;
        if (!gained && !count)
            return is_held_fast(s) ? -TD_ERR_NOSPACE : -TD_ERR_DISKFULL;
        refused = false;
    }
    return !refused && within_limit(s, size) && disk_has(s, disk_size) ? 0 : -TD_ERR_DISKFULL;
}

int space_make_room(struct store *s, uint64_t size, bool is_block)
{
    if (s->making_room || s->retire_off)
        return -TD_ERR_DISKFULL;
    uint64_t disk_size = size + STORE_SPACE_RESERVE;
    bool refused = space_fits(s, size);
    s->making_room = true;
    int rc = append_sync(s); /* tables must know the batch's records before older ones are copied past them */
    if (rc == 0) {
        commit_publish_synced(s);
        store_void_now(s); /* what they replaced */
        rc = evict_until_fits(s, size, disk_size, refused);
        if (rc == -TD_ERR_DISKFULL && within_limit(s, size)) {
            refused &= !s->ballast_there;
            ballast_release(s);
            rc = evict_until_fits(s, size, disk_size, refused);
        }
        if (!s->retire_off && (rc == -TD_ERR_DISKFULL || (rc == -TD_ERR_NOSPACE && !is_block)))
            rc = drop_until_fits(s, size);
    }
    s->making_room = false;
    return rc;
}

/* Eviction stops as soon as the record at hand fits, so on a full disk the ballast finds no room of its own: blocks and segments go for it, where
 * three quarters of them would do: less than that is of more use than a ballast. Without it, copying conversations forward could one day be what does not fit. */
static void ballast_regain(struct store *s)
{
    uint64_t wanted = 2 * s->ballast_size + STORE_SPACE_RESERVE, most = segments_size(&s->segments) / 4 * 3;
    s->ballast_retry_us = clock_mono_us() + BALLAST_RETRY_US;
    if (s->retire_off || !disk_has(s, wanted > most ? wanted - most : 0))
        return;
    s->making_room = true;
    int rc = disk_has(s, wanted) ? 0 : evict_until_fits(s, 0, wanted, false);
    rc = rc == -TD_ERR_IO ? rc : 0;
    for (int i = 0; i < BALLAST_SEGMENTS && rc == 0 && !disk_has(s, wanted) && !s->retire_off; i++) {
        struct segment *v = oldest_sealed(s, 0);
        if (!v || s->segments.count <= 2)
            break;
        rc = retire(s, v);
    }
    s->making_room = false;
    if (rc == -TD_ERR_IO)
        append_abandon(s);
    space_open_ballast(s);
}

uint64_t space_over_demotion(struct store *s)
{
    return over(s, s->limit_size / 4 * 3);
}

/* Three quarters of what it may take, or of what the disk lets it have. */
bool space_is_short(struct store *s)
{
    return space_over_demotion(s) > 0 || /* below the watermark: eviction falls short of that */
           !disk_has(s, STORE_SPACE_RESERVE + segments_size(&s->segments) / 3);
}

/* Before the limit is reached, what is worth least goes, block by block; what that leaves behind (heads, tombstones) goes when a segment is
 * rewritten, the oldest first: then no older one is there that its tombstones would have to be kept for. */
static void keep_limits(struct store *s)
{
    uint64_t mark = watermark(s), wanted = over(s, mark);
    size_t count = 0;
    bool limits_due = clock_mono_us() >= s->limits_due_us && (s->tenant_quota_size || s->ttl_ms);
    if (s->retire_off || !s->policy)
        return;
    if (limits_due || space_over_demotion(s) > 0) /* earlier than eviction: it takes its time */
        demote_ask(s, space_over_demotion(s));
    if (!wanted && !limits_due)
        return;
    if (limits_due)
        s->limits_due_us = clock_mono_us() + LIMITS_INTERVAL_US;
    s->making_room = true;
    int rc = evict_blocks(s, wanted, &count);
    s->making_room = false;
    for (size_t i = 0; i < s->segments.count && rc == 0 && over(s, mark); i++)
        if (is_worth_rewriting(s, s->segments.list[i])) {
            rc = space_rewrite(s, s->segments.list[i]);
            break; /* one at a time: operations wait meanwhile */
        }
    if (rc == -TD_ERR_IO)
        append_abandon(s);
}

void space_publish(struct store *s)
{
    metric_set(s->metrics.bytes, (double)segments_size(&s->segments));
    metric_set(s->metrics.blocks, (double)table_count(&s->blocks));
    metric_set(s->metrics.queue_bytes, (double)op_queue_size(&s->queue));
    metric_set(s->metrics.policy_bytes, (double)evict_memory_size(s));
}

void space_housekeeping(struct store *s)
{
    audit_doubts(s);
    keep_limits(s);
    if (!s->ballast_there && clock_mono_us() >= s->ballast_retry_us)
        ballast_regain(s);
    for (size_t i = 0; i < s->segments.count && !s->retire_off; i++) {
        struct segment *v = s->segments.list[i];
        if (v->sealed && v->live_count == 0 && !v->suspect && (v->tombstone_count == 0 || is_oldest(s, v))) {
            s->making_room = true; /* tombstones that the index did not tell of may have to be copied */
            int rc = retire(s, v);
            s->making_room = false;
            if (rc == -TD_ERR_IO)
                append_abandon(s);
            break; /* one at a time: operations wait meanwhile */
        }
    }
    space_publish(s);
}
