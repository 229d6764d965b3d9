/* audit: is what the index told of a segment true? Asked before the segment is given up, because then it is the last to know.
 *
 * An index can be a sound database and false all the same: somebody has written into it, or SQLite has lost a page. Where it names records that are not
 * there, reading finds out (audit_doubts). Where it leaves records out, nothing would: they look dead, and would go with their segment. So the heads of
 * the part that came from the index are read, and each good one must be
 *     a void, a seal or a tombstone (those are copied by what stands in the log, not in the index),
 *     of a tenant that was erased,
 *     exactly where an entry of the tables has it, with its lsn and size,
 *     older than an entry of its id whose own head is there,
 *     of a record whose body is damaged, or
 *     covered by a tombstone of this or a later segment: a power loss may take voids back, after the index has heard of them.
 * Anything else is a record that the index has lost. Then the index is set aside and the segment stays; the next start reads all segments. One alone is never
 * read again: what replaced or deleted its records lies in others.
 *
 * What makes this hold without false alarms: whenever the index is told that a record is gone, the log says so, too, or the segment goes; a void that
 * stands alone is synced before the index hears of it. Where that cannot be done, the index names no segment (store_index_incomplete).
 *
 * Costs a page of reading for each record of the segment, once; tombstones are looked for from the newest segment back, as far as is needed. */
#include "shared/log.h"
#include "store/store_internal.h"
#include <stdlib.h>

/* ---- claims ------------------------------------------------------------------------------------------------- */

struct record_claim audit_claim(uint8_t type, const struct entry *e)
{
    struct record_claim c = {.place = {e->segment_id, e->offset, e->stored_size},
                             .lsn = e->lsn,
                             .tenant = e->tenant,
                             .type = type};
    memcpy(c.id, e->id, sizeof c.id);
    return c;
}

/* Of an erased tenant nobody knows the key id any more. */
static bool is_of_tenant(struct store *s, const struct record_head *h, uint32_t tenant)
{
    uint32_t owner = keys_find_id(s->keys, h->key_id);
    return owner == tenant || owner == 0;
}

int audit_claim_holds(struct store *s, const struct record_claim *c)
{
    uint8_t page[RECORD_PAGE];
    struct record_head h;
    int rc;
    struct segment *g = segment_acquire(&s->segments, c->place.segment_id, &rc);
    if (!g)
        return rc == -TD_ERR_NOTFOUND ? 0 : rc;
    rc = io_read_all(s->io, g->fd, page, sizeof page, c->place.offset);
    bool holds = rc == 0 && record_head_parse(page, &h) == 0 && h.segment_id == g->id &&
                 h.segment_nonce == g->nonce && h.offset == c->place.offset && h.lsn == c->lsn &&
                 record_size(h.body_size) == c->place.stored_size && h.type == c->type &&
                 memcmp(h.id, c->id, sizeof h.id) == 0 && is_of_tenant(s, &h, c->tenant);
    segment_release(&s->segments, g);
    return rc == -TD_ERR_TRUNCATED ? 0 : rc < 0 ? rc : holds;
}

bool audit_is_told(struct store *s, const struct entry *e)
{
    const struct segment *g = segment_find(&s->segments, e->segment_id);
    return g && e->offset < g->told_end;
}

/* ---- heads -------------------------------------------------------------------------------------------------- */

struct unknown { /* a good record that the tables do not know */
    uint8_t type;
    uint8_t key_id[RECORD_KEY_ID], id[32];
    uint64_t lsn;
    bool deleted; /* a tombstone was found */
};
struct audit {
    struct store *s;
    struct segment *v;    /* pinned */
    struct unknown *list; /* by id once all are in */
    size_t count, capacity, left;
    uint32_t tombstone_count;
};

static int add_unknown(struct audit *a, const struct record_head *h)
{
    if (a->count == a->capacity) {
        size_t capacity = a->capacity ? 2 * a->capacity : 64;
        struct unknown *list = realloc(a->list, capacity * sizeof *list);
        if (!list)
            return -TD_ERR_NOMEM;
        a->list = list;
        a->capacity = capacity;
    }
    struct unknown *u = &a->list[a->count++];
    *u = (struct unknown){.type = h->type, .lsn = h->lsn};
    memcpy(u->key_id, h->key_id, sizeof u->key_id);
    memcpy(u->id, h->id, sizeof u->id);
    return 0;
}

/* Does the entry of its id account for a record? 1, 0, or why that cannot be told now. */
static int entry_accounts(struct audit *a, const struct record_head *h, uint32_t tenant)
{
    struct table *t = store_table(a->s, h->type);
    struct entry e = {0};
    struct table_shard *shard = table_lock(t, h->id);
    const struct entry *found = table_find(t, shard, tenant, h->id);
    if (found)
        e = *found;
    table_unlock(shard);
    if (e.segment_id == a->v->id && e.offset == h->offset)
        return e.lsn == h->lsn && e.stored_size == record_size(h->body_size);
    if (!e.segment_id || e.lsn <= h->lsn)
        return 0;
    struct record_claim newer = audit_claim(h->type, &e);
    return audit_is_told(a->s, &e) ? audit_claim_holds(a->s, &newer) : 1;
}

static int look_at_record(struct audit *a, const struct record_head *h)
{
    uint32_t tenant = keys_find_id(a->s->keys, h->key_id);
    if (!tenant)
        return 0;
    int rc = entry_accounts(a, h, tenant);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    rc = segment_check_body(a->s->io, a->v->fd, h);
    if (rc == -TD_ERR_CHECKSUM || rc == -TD_ERR_TRUNCATED)
        return 0;
    return rc < 0 ? rc : add_unknown(a, h);
}

static int look_at(void *ctx, const struct record_head *h, const uint8_t *page)
{
    struct audit *a = ctx;
    (void)page;
    patience_call(a->s, 0);
    a->tombstone_count += h->type == RECORD_TOMBSTONE;
    bool is_record = h->type == RECORD_BLOCK || h->type == RECORD_CONVERSATION || h->type == RECORD_PIN;
    return is_record ? look_at_record(a, h) : 0;
}

/* ---- tombstones --------------------------------------------------------------------------------------------- */

static int by_id(const void *a, const void *b)
{
    return memcmp(((const struct unknown *)a)->id, ((const struct unknown *)b)->id, 32);
}

static size_t first_of_id(const struct audit *a, const uint8_t id[32])
{
    size_t low = 0, high = a->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (memcmp(a->list[middle].id, id, 32) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int take_tombstone(void *ctx, const struct record_head *h, const uint8_t *page)
{
    struct audit *a = ctx;
    (void)page;
    if (h->type != RECORD_TOMBSTONE)
        return 0;
    bool of_all = h->target == RECORD_ANY_TENANT;
    for (size_t i = of_all ? 0 : first_of_id(a, h->id); i < a->count; i++) {
        struct unknown *u = &a->list[i];
        if (!of_all && memcmp(u->id, h->id, sizeof u->id) != 0)
            break;
        if (!u->deleted && (of_all || u->type == h->target) && u->lsn < h->version &&
            memcmp(u->key_id, h->key_id, sizeof u->key_id) == 0) {
            u->deleted = true;
            a->left--;
        }
    }
    return 0;
}

static int find_tombstones(struct audit *a)
{
    struct store *s = a->s;
    int rc = 0;
    a->left = a->count;
    if (a->count > 1)
        qsort(a->list, a->count, sizeof *a->list, by_id);
    for (size_t i = s->segments.count; i > 0 && a->left > 0 && rc == 0; i--) {
        const struct segment *g = s->segments.list[i - 1];
        struct segment_scan scan;
        if (g->id < a->v->id)
            break;
        if (g->tombstone_count == 0)
            continue;
        struct segment *pinned = segment_acquire(&s->segments, g->id, &rc);
        if (!pinned)
            return rc;
        rc = segment_scan(s->io, pinned->fd, pinned, RECORD_PAGE, pinned->end, take_tombstone, a, &scan);
        segment_release(&s->segments, pinned);
        rc = rc == 0 && scan.unreadable ? -TD_ERR_BUSY : rc;
    }
    return rc;
}

/* ---- the whole ---------------------------------------------------------------------------------------------- */

static int scan_heads(struct audit *a)
{
    struct segment_scan scan;
    int rc = segment_scan(a->s->io, a->v->fd, a->v, RECORD_PAGE, a->v->told_end, look_at, a, &scan);
    if (rc < 0 || scan.unreadable)
        return rc < 0 ? rc : -TD_ERR_BUSY;
    a->v->tombstone_count = TD_MAX(a->v->tombstone_count, a->tombstone_count);
    return find_tombstones(a);
}

static void give_up_index(struct store *s, size_t lost)
{
    if (!s->index_false)
        log_error(
            "store",
            "the index is false: it has lost %zu records of a segment that was to be removed. The segment "
            "stays, the index is set aside as " INDEX_FILE ".damaged; they are found again by the next "
            "start, which reads all segments",
            lost);
    store_index_distrust(s);
}

void audit_doubts(struct store *s)
{
    if (!s->index_doubted || s->index_false)
        return;
    log_error(
        "store",
        "the index is false: where it says that a record is, another one is. It is set aside as " INDEX_FILE
        ".damaged; what it hides is found again by the next start, which reads all segments");
    store_index_distrust(s);
}

int audit_segment(struct store *s, struct segment *v)
{
    int rc;
    if (v->told_end == 0)
        return 0;
    store_void_now(s); /* what was replaced or deleted in the batch at hand */
    struct audit a = {.s = s, .v = segment_acquire(&s->segments, v->id, &rc)};
    if (!a.v)
        return rc == -TD_ERR_NOTFOUND
                   ? 0
                   : -TD_ERR_BUSY; /* somebody has removed the file: nothing is left to lose */
    rc = scan_heads(&a);
    segment_release(&s->segments, a.v);
    free(a.list);
    if (rc < 0)
        return rc == -TD_ERR_NOMEM ? rc : -TD_ERR_BUSY;
    if (a.left > 0) {
        give_up_index(s, a.left);
        return -TD_ERR_BUSY;
    }
    v->told_end = 0; /* from now on the tables know it as the log does */
    return 0;
}
