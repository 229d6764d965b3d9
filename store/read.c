/* read: look-ups and verified reads, on the caller's thread; of conversations, which callers wait for that serve others as well, by a deadline.
 *
 * A reader copies the place of a record out of its table, pins the segment and reads without locks. Meanwhile the record may be
 * replaced and voided, or its segment dropped; what was read then fails verification. So a failure counts as damage only if the entry still
 * points to the same place; otherwise the reader looks again. A disk that refuses to read is no proof of damage: the block is a
 * miss, the conversation an error, and the segment is kept. */
#include "shared/log.h"
#include "store/lane.h"
#include "store/store_internal.h"
#include "store/tier.h"
#include <stdlib.h>

#define DAMAGE_LOG_US 60000000
#define READ_ATTEMPTS 3 /* times that a record may be replaced under a reader */

/* ---- records ---------------------------------------------------------------------------------------------- */

int read_open(struct store *s, const struct tenant_keys *keys, const struct record_place *place, uint8_t type,
              const uint8_t id[32], uint64_t lsn, struct read_head *out)
{
    int rc;
    struct segment *g = segment_acquire(&s->segments, place->segment_id, &rc);
    if (!g)
        return rc;
    struct record_head *h = &out->head;
    rc = io_read_all(s->io, g->fd, out->page, sizeof out->page, place->offset);
    rc = rc < 0 ? rc : record_head_parse(out->page, h);
    bool belongs =
        rc == 0 && h->segment_id == g->id && h->segment_nonce == g->nonce && h->offset == place->offset;
    if (rc == 0 && (!belongs || h->type != type || h->lsn != lsn ||
                    memcmp(h->key_id, keys->key_id, sizeof h->key_id) != 0 || memcmp(h->id, id, 32) != 0))
        rc = -TD_ERR_MISMATCH;
    /* A void is no proof: the index may just be old. */
    if (rc == -TD_ERR_MISMATCH && belongs && h->type != RECORD_VOID && place->offset < g->told_end)
        s->index_doubted = true;
    rc = rc < 0 ? rc : record_open_key(keys->data_key, h, out->key);
    if (rc < 0) {
        segment_release(&s->segments, g);
        return rc;
    }
    out->segment = g;
    return 0;
}

void read_close(struct store *s, struct read_head *r)
{
    crypto_wipe(r->key, sizeof r->key);
    segment_release(&s->segments, r->segment);
}

int read_part(struct store *s, const struct read_head *r, uint32_t part, uint8_t *plain)
{
    const struct record_head *h = &r->head;
    uint8_t tag[CRYPTO_TAG_SIZE];
    uint64_t at = h->offset + RECORD_PAGE + record_part_offset(h, part);
    size_t size = (size_t)h->parts[part].first_size + h->parts[part].second_size;
    int rc = io_read_all(s->io, r->segment->fd, plain, size, at);
    rc = rc < 0 ? rc : io_read_all(s->io, r->segment->fd, tag, sizeof tag, at + size);
    rc = rc < 0 ? rc : record_open_part(r->key, h, r->page, part, plain, tag);
    if (rc == 0)
        counter_add(&s->counters.bytes_read, NULL, size);
    return rc;
}

static bool same_place(const struct entry *e, const struct record_place *p)
{
    return e->segment_id == p->segment_id && e->offset == p->offset;
}

bool read_place_is_current(struct store *s, uint8_t type, uint32_t tenant, const uint8_t id[32],
                           const struct record_place *place)
{
    struct table *t = store_table(s, type);
    struct table_shard *shard = table_lock(t, id);
    struct entry *e = table_find(t, shard, tenant, id);
    bool current = e && same_place(e, place);
    table_unlock(shard);
    return current;
}

/* One line a minute, however much there is: the metric counts. */
static void tell_damage(struct store *s, uint8_t type)
{
    uint64_t now = clock_mono_us(), due = atomic_load(&s->damage_due_us);
    if (now >= due && atomic_compare_exchange_strong(&s->damage_due_us, &due, now + DAMAGE_LOG_US))
        log_warn("store",
                 "a %s record is damaged or cannot be read and was dropped; others are counted for the next "
                 "minute, "
                 "in tandem_kv_tier_damaged_total",
                 type == RECORD_BLOCK ? "block" : "conversation");
}

void read_drop_damaged(struct store *s, uint8_t type, uint32_t tenant, const uint8_t id[32],
                       const struct record_place *place)
{
    struct table *t = store_table(s, type);
    struct table_shard *shard = table_lock(t, id);
    struct entry *e = table_find(t, shard, tenant, id);
    bool dropped = e && same_place(e, place);
    if (dropped && entry_clear_place(s, e))
        table_remove(t, shard, e);
    table_unlock(shard);
    if (dropped) {
        counter_add(&s->counters.damaged, s->metrics.damaged, 1);
        tell_damage(s, type);
    }
}

/* ---- look-up ---------------------------------------------------------------------------------------------- */

struct found {
    struct store_op *op; /* waits for the writer: a reference; else on disk: */
    struct record_place place;
    uint64_t lsn;
    uint64_t version, updated_us;
};

/* What readers see of an id: the newest operation that waits, else the record on disk. */
static int look_up(struct store *s, uint8_t type, uint32_t tenant, const uint8_t id[32], struct found *f)
{
    struct table *t = store_table(s, type);
    struct table_shard *shard = table_lock(t, id);
    struct entry *e = table_find(t, shard, tenant, id);
    int rc = -TD_ERR_NOTFOUND;
    *f = (struct found){0};
    if (e && e->pending) {
        if (e->pending->kind != OP_DELETE) {
            f->op = e->pending;
            op_hold(f->op);
            rc = 0;
        }
    } else if (e && e->segment_id) {
        f->place = (struct record_place){e->segment_id, e->offset, e->stored_size};
        f->lsn = e->lsn;
        if (e->conversation) {
            f->version = e->conversation->durable;
            f->updated_us = e->conversation->updated_us;
        }
        rc = 0;
    }
    table_unlock(shard);
    return rc;
}

static void fill_info(struct store_block_info *info, struct kv_quality quality, uint32_t block_index,
                      uint16_t layer_begin, uint16_t layer_end, uint64_t stored_size)
{
    *info = (struct store_block_info){quality, block_index, layer_begin, layer_end, (uint32_t)stored_size};
}

int store_find(struct store *s, const char *tenant, const struct kv_block_id *id,
               struct store_block_info *info)
{
    uint32_t number = keys_find(s->keys, tenant);
    int rc = -TD_ERR_NOTFOUND;
    if (number) {
        struct table_shard *shard = table_lock(&s->blocks, id->bytes);
        const struct entry *e = table_find(&s->blocks, shard, number, id->bytes);
        const struct store_op *op = e ? e->pending : NULL;
        if (op && op->kind != OP_DELETE) {
            fill_info(info, op->quality, op->block_index, op->layer_begin, op->layer_end, op->size);
            rc = 0;
        } else if (e && !op && e->segment_id) {
            fill_info(info, e->quality, e->block_index, e->layer_begin, e->layer_end, e->stored_size);
            rc = 0;
        }
        table_unlock(shard);
    }
    if (rc == 0)
        counter_add(&s->counters.hits, s->metrics.hits, 1);
    else
        counter_add(&s->counters.misses, s->metrics.misses, 1);
    return rc;
}

/* ---- blocks ----------------------------------------------------------------------------------------------- */

/* What a failed read of a block's record means. -TD_ERR_AGAIN: the record was replaced meanwhile. */
static int judge_failure(struct store *s, uint32_t tenant, const struct kv_block_id *id,
                         const struct found *f, int rc)
{
    if (rc != -TD_ERR_NOMEM && !read_place_is_current(s, RECORD_BLOCK, tenant, id->bytes, &f->place))
        return -TD_ERR_AGAIN;
    counter_add(&s->counters.read_failures, NULL, 1);
    if (rc == -TD_ERR_NOMEM)
        return rc;
    if (rc == -TD_ERR_IO) /* forgotten, so that it can be put again; but its segment may have it still */
        segment_suspect(&s->segments, f->place.segment_id);
    read_drop_damaged(s, RECORD_BLOCK, tenant, id->bytes, &f->place);
    return -TD_ERR_NOTFOUND;
}

/* Pieces follow each other in b->data, `gap` bytes between layers. */
static void set_pieces(struct tier_block *b, const struct record_part *parts, uint32_t count, size_t gap)
{
    uint8_t *at = b->data;
    for (uint32_t i = 0; i < count; i++) {
        b->pieces[2 * i] = (struct span){at, parts[i].first_size};
        at += parts[i].first_size;
        b->pieces[2 * i + 1] = (struct span){at, parts[i].second_size};
        at += parts[i].second_size + gap;
    }
}

static struct tier_block *block_from_op(const struct store_op *op)
{
    if (op->held)
        return tier_block_hold(op->held);
    struct tier_block *b = tier_block_create(op->part_count, op->size);
    if (!b)
        return NULL;
    b->block.quality = op->quality;
    b->block.block_index = op->block_index;
    b->block.layer_begin = op->layer_begin;
    b->block.layer_end = op->layer_end;
    memcpy(b->block.id.bytes, op->id, sizeof op->id);
    memcpy(b->block.parent.bytes, op->parent, sizeof op->parent);
    memcpy(b->data, op->data, op->size);
    set_pieces(b, op->parts, op->part_count, 0);
    return b;
}

struct tier_block *read_block_for(const struct record_head *h)
{
    struct tier_block *b = tier_block_create(h->part_count, (size_t)h->body_size);
    if (!b)
        return NULL;
    b->block.quality = h->quality;
    b->block.block_index = h->block_index;
    b->block.layer_begin = h->layer_begin;
    b->block.layer_end = h->layer_end;
    memcpy(b->block.id.bytes, h->id, sizeof h->id);
    memcpy(b->block.parent.bytes, h->parent, sizeof h->parent);
    set_pieces(b, h->parts, h->part_count, CRYPTO_TAG_SIZE);
    return b;
}

int read_open_body(const uint8_t key[CRYPTO_KEY_SIZE], const struct record_head *h, const uint8_t *page,
                   struct tier_block *b)
{
    uint8_t *at = b->data;
    int rc = 0;
    for (uint32_t i = 0; i < h->part_count && rc == 0; i++) {
        size_t size = (size_t)h->parts[i].first_size + h->parts[i].second_size;
        rc = record_open_part(key, h, page, i, at, at + size);
        at += size + CRYPTO_TAG_SIZE;
    }
    return rc;
}

static int block_from_disk(struct store *s, const struct tenant_keys *keys, const struct found *f,
                           const struct kv_block_id *id, struct tier_block **out)
{
    struct read_head r;
    int rc = read_open(s, keys, &f->place, RECORD_BLOCK, id->bytes, f->lsn, &r);
    if (rc < 0)
        return rc;
    struct tier_block *b = read_block_for(&r.head);
    rc = b ? io_read_all(s->io, r.segment->fd, b->data, b->data_size, r.head.offset + RECORD_PAGE)
           : -TD_ERR_NOMEM;
    rc = rc < 0 ? rc : read_open_body(r.key, &r.head, r.page, b);
    read_close(s, &r);
    if (rc < 0) {
        tier_block_release(b);
        return rc;
    }
    counter_add(&s->counters.bytes_read, NULL, b->data_size);
    *out = b;
    return 0;
}

/* One attempt. */
static int read_block_once(struct store *s, const struct tenant_keys *keys, uint32_t tenant,
                           const struct kv_block_id *id, struct tier_block **out)
{
    struct found f;
    int rc = look_up(s, RECORD_BLOCK, tenant, id->bytes, &f);
    if (rc < 0)
        return rc;
    if (f.op) {
        *out = block_from_op(f.op);
        op_release(f.op);
        return *out ? 0 : -TD_ERR_NOMEM;
    }
    rc = block_from_disk(s, keys, &f, id, out);
    return rc == 0 ? 0 : judge_failure(s, tenant, id, &f, rc);
}

int store_read_block(struct store *s, const char *tenant, const struct kv_block_id *id,
                     struct tier_block **out)
{
    struct tenant_keys keys;
    uint32_t number = keys_find(s->keys, tenant);
    int rc = keys_get(s->keys, number, &keys);
    if (rc == 0) {
        rc = -TD_ERR_AGAIN;
        for (int i = 0; i < READ_ATTEMPTS && rc == -TD_ERR_AGAIN; i++)
            rc = read_block_once(s, &keys, number, id, out);
        crypto_wipe(&keys, sizeof keys);
    }
    if (rc == 0)
        counter_add(&s->counters.reads, NULL, 1);
    return rc == 0 ? 0 : -TD_ERR_NOTFOUND;
}

/* ---- conversations ---------------------------------------------------------------------------------------- */

/* A read that may be left behind, with what it reads into. */
struct conversation_read {
    struct lane_job job; /* first */
    struct store *store;
    struct tenant_keys keys;
    struct found found;
    uint8_t id[32];
    uint8_t *plain;
    size_t size;
};

static int run_read(struct lane_job *job)
{
    struct conversation_read *c = (struct conversation_read *)job;
    struct read_head r;
    int rc = read_open(c->store, &c->keys, &c->found.place, RECORD_CONVERSATION, c->id, c->found.lsn, &r);
    if (rc < 0)
        return rc;
    c->size = r.head.parts[0].first_size;
    c->plain = malloc(c->size + 1);
    rc = c->plain ? read_part(c->store, &r, 0, c->plain) : -TD_ERR_NOMEM;
    read_close(c->store, &r);
    return rc;
}

static void free_read(struct lane_job *job)
{
    struct conversation_read *c = (struct conversation_read *)job;
    if (c->plain)
        crypto_wipe(c->plain, c->size);
    free(c->plain);
    crypto_wipe(c, sizeof *c);
    free(c);
}

static int conversation_from_disk(struct store *s, const struct tenant_keys *keys, const struct found *f,
                                  const uint8_t id[32], uint8_t **plain, size_t *size)
{
    struct conversation_read *c = calloc(1, sizeof *c);
    if (!c)
        return -TD_ERR_NOMEM;
    c->job = (struct lane_job){.run = run_read, .free = free_read};
    c->store = s;
    c->keys = *keys;
    c->found = *f;
    memcpy(c->id, id, sizeof c->id);
    int rc = patience_read(s, &c->job, f->place.stored_size);
    if (rc < 0)
        return rc;
    rc = c->job.status;
    if (rc == 0) {
        *plain = c->plain;
        *size = c->size;
        c->plain = NULL;
    }
    free_read(&c->job);
    return rc;
}

static int read_conversation_once(struct store *s, const struct tenant_keys *keys, uint32_t tenant,
                                  const uint8_t id[32], uint64_t *version, uint64_t *updated_us,
                                  uint8_t **plain, size_t *size)
{
    struct found f;
    int rc = look_up(s, RECORD_CONVERSATION, tenant, id, &f);
    if (rc < 0)
        return rc;
    *version = f.op ? f.op->version : f.version;
    *updated_us = f.op ? f.op->time_us : f.updated_us;
    if (f.op) {
        *size = f.op->size;
        *plain = malloc(*size + 1);
        if (*plain)
            memcpy(*plain, f.op->data, *size);
        rc = *plain ? 0 : -TD_ERR_NOMEM;
        op_release(f.op);
        return rc;
    }
    rc = conversation_from_disk(s, keys, &f, id, plain, size);
    if (rc == 0)
        return 0;
    bool is_of_the_moment = rc == -TD_ERR_NOMEM || rc == -TD_ERR_IO || rc == -TD_ERR_TIMEOUT;
    if (!is_of_the_moment && !read_place_is_current(s, RECORD_CONVERSATION, tenant, id, &f.place))
        return -TD_ERR_AGAIN;
    counter_add(&s->counters.read_failures, NULL, 1);
    if (is_of_the_moment)
        return rc; /* and must not make room for a new conversation of that id */
    read_drop_damaged(s, RECORD_CONVERSATION, tenant, id, &f.place);
    return -TD_ERR_NOTFOUND;
}

int read_conversation(struct store *s, const struct tenant_keys *keys, uint32_t tenant, const uint8_t id[32],
                      uint64_t *version, uint64_t *updated_us, uint8_t **plain, size_t *size)
{
    int rc = -TD_ERR_AGAIN;
    for (int i = 0; i < READ_ATTEMPTS && rc == -TD_ERR_AGAIN; i++)
        rc = read_conversation_once(s, keys, tenant, id, version, updated_us, plain, size);
    if (rc == 0)
        counter_add(&s->counters.reads, NULL, 1);
    return rc == -TD_ERR_AGAIN ? -TD_ERR_NOTFOUND : rc;
}
