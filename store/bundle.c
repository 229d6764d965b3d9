/* bundle: see bundle.h. */
#include "store/bundle.h"
#include "store/conversation.h"
#include "store/record.h"
#include "store/tier.h"
#include <jansson.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define BUNDLE_FORMAT  "tandem-store"
#define BUNDLE_VERSION 1

enum { SHARED, OWN, NAMESPACES };
enum { BLOCK_HEAD = 16 };

struct chains { /* names of the blocks of one sequence */
    uint8_t keys[NAMESPACES][CRYPTO_KEY_SIZE];
    uint8_t fingerprint[TD_HASH_SIZE], layout[TD_HASH_SIZE];
    struct kv_block_id *ids[NAMESPACES];
    uint32_t count;
};

static int chains_open(struct chains *c, struct store *s, const char *tenant, const char *principal,
                       struct td_error *err)
{
    int rc = store_chain_key(s, tenant, c->keys[SHARED], err);
    if (rc == 0)
        kv_principal_key(c->keys[SHARED], principal, c->keys[OWN]);
    return rc;
}

static void chains_close(struct chains *c)
{
    for (int n = 0; n < NAMESPACES; n++)
        free(c->ids[n]);
    crypto_wipe(c, sizeof *c);
}

static int chains_of(struct chains *c, const struct conversation *conv)
{
    c->count = conv->ids_count / KV_BLOCK_TOKENS;
    for (int n = 0; n < NAMESPACES; n++) {
        struct kv_block_id parent = {{0}}, *ids = realloc(c->ids[n], (c->count + 1) * sizeof *ids);
        if (!ids)
            return -TD_ERR_NOMEM;
        c->ids[n] = ids;
        for (uint32_t i = 0; i < c->count; i++) {
            kv_block_id_next(c->keys[n], &parent, c->fingerprint, c->layout,
                             conv->ids + (size_t)i * KV_BLOCK_TOKENS, &ids[i]);
            parent = ids[i];
        }
    }
    return 0;
}

/* ---- what has been written: forks share their blocks -------------------------------------------------------- */

struct seen {
    struct kv_block_id *ids; /* open addressing; zeros: free */
    size_t capacity, count;  /* a power of two */
};

static struct kv_block_id *seen_slot(const struct seen *s, const struct kv_block_id *id)
{
    static const struct kv_block_id none;
    size_t i = load_le64(id->bytes) & (s->capacity - 1);
    while (memcmp(&s->ids[i], &none, sizeof none) != 0 && memcmp(&s->ids[i], id, sizeof *id) != 0)
        i = (i + 1) & (s->capacity - 1);
    return &s->ids[i];
}

/* 1: it is new; 0: it was there; or negative. */
static int seen_add(struct seen *s, const struct kv_block_id *id)
{
    if (2 * s->count >= s->capacity) {
        struct seen grown = {.capacity = s->capacity ? 2 * s->capacity : 256, .count = s->count};
        grown.ids = calloc(grown.capacity, sizeof *grown.ids);
        if (!grown.ids)
            return -TD_ERR_NOMEM;
        static const struct kv_block_id none;
        for (size_t i = 0; i < s->capacity; i++)
            if (memcmp(&s->ids[i], &none, sizeof none) != 0)
                *seen_slot(&grown, &s->ids[i]) = s->ids[i];
        free(s->ids);
        *s = grown;
    }
    struct kv_block_id *slot = seen_slot(s, id);
    if (memcmp(slot, id, sizeof *id) == 0)
        return 0;
    *slot = *id;
    s->count++;
    return 1;
}

/* ---- export ------------------------------------------------------------------------------------------------- */

struct exporter {
    struct store *store;
    const char *tenant;
    const struct bundle_progress *progress;
    uint64_t done, total; /* blocks of all conversations, held or not */
    struct portable *file;
    struct chains chains;
    struct seen seen;
    struct bundle_counts *counts;
    struct td_error *err;
};

static int write_head(struct portable *file, const char *tenant, const char *principal,
                      const struct chains *c, struct td_error *err)
{
    char fingerprint[2 * TD_HASH_SIZE + 1], layout[2 * TD_HASH_SIZE + 1];
    hex_encode(c->fingerprint, TD_HASH_SIZE, fingerprint);
    hex_encode(c->layout, TD_HASH_SIZE, layout);
    json_t *root =
        json_pack("{s:s,s:i,s:s,s:s,s:s,s:s}", "format", BUNDLE_FORMAT, "version", BUNDLE_VERSION, "tenant",
                  tenant, "principal", principal, "fingerprint", fingerprint, "layout", layout);
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    int rc =
        text ? portable_write(file, text, strlen(text), err) : td_fail(err, -TD_ERR_NOMEM, "out of memory");
    free(text);
    return rc;
}

static int write_block(struct exporter *x, uint8_t name_space, const struct tier_block *t)
{
    const struct store_block *b = &t->block;
    uint32_t pieces = 2u * (b->layer_end - b->layer_begin);
    size_t size = BLOCK_HEAD;
    for (uint32_t i = 0; i < pieces; i++)
        size += 4 + b->pieces[i].size;
    uint8_t *frame = calloc(1, size);
    if (!frame)
        return td_fail(x->err, -TD_ERR_NOMEM, "out of memory");
    uint8_t *at = frame + BLOCK_HEAD;
    frame[0] = 'B';
    frame[1] = name_space;
    store_le32(frame + 4, b->block_index);
    frame[8] = b->quality.fidelity, frame[9] = b->quality.numerics, frame[10] = b->quality.provenance;
    store_le16(frame + 12, b->layer_begin);
    store_le16(frame + 14, b->layer_end);
    for (uint32_t i = 0; i < pieces; i++) {
        store_le32(at, (uint32_t)b->pieces[i].size);
        memcpy(at + 4, b->pieces[i].data, b->pieces[i].size);
        at += 4 + b->pieces[i].size;
    }
    int rc = portable_write(x->file, frame, size, x->err);
    crypto_wipe(frame, size);
    free(frame);
    x->counts->blocks += rc == 0;
    x->counts->bytes += size;
    return rc;
}

/* A block that is not there, or damaged, is left out: it will be computed again. */
static int export_block(struct exporter *x, uint8_t name_space, const struct kv_block_id *id)
{
    struct store_block_info info;
    struct tier_block *t;
    if (store_find(x->store, x->tenant, id, &info) < 0)
        return 0;
    int rc = seen_add(&x->seen, id);
    if (rc <= 0)
        return rc < 0 ? td_fail(x->err, rc, "out of memory") : 0;
    if (store_read_block(x->store, x->tenant, id, &t) < 0)
        return 0;
    rc = write_block(x, name_space, t);
    tier_block_release(t);
    return rc;
}

static void report(const struct bundle_progress *progress, uint64_t done, uint64_t total)
{
    if (progress)
        progress->fn(progress->ctx, done, total);
}

static int count_one(void *ctx, const char *conv_id, uint64_t version, uint64_t updated_us, const void *body,
                     size_t size)
{
    struct exporter *x = ctx;
    struct conversation c;
    (void)conv_id, (void)version, (void)updated_us;
    if (conv_parse(body, size, &c) < 0)
        return 0;
    x->total += c.ids_count / KV_BLOCK_TOKENS;
    conv_free(&c);
    return 0;
}

static int export_one(void *ctx, const char *conv_id, uint64_t version, uint64_t updated_us, const void *body,
                      size_t size)
{
    struct exporter *x = ctx;
    struct conversation c;
    (void)conv_id, (void)version, (void)updated_us;
    if (conv_parse(body, size, &c) < 0)
        return 0;
    int rc = chains_of(&x->chains, &c);
    conv_free(&c);
    uint8_t *frame = rc == 0 ? malloc(size + 1) : NULL;
    if (!frame)
        return td_fail(x->err, -TD_ERR_NOMEM, "out of memory");
    frame[0] = 'C';
    memcpy(frame + 1, body, size);
    rc = portable_write(x->file, frame, size + 1, x->err);
    crypto_wipe(frame, size + 1);
    free(frame);
    x->counts->conversations += rc == 0;
    for (uint32_t i = 0; i < x->chains.count && rc == 0; i++) {
        for (uint8_t n = 0; n < NAMESPACES && rc == 0; n++)
            rc = export_block(x, n, &x->chains.ids[n][i]);
        x->done++;
        report(x->progress, x->done, TD_MAX(x->done, x->total));
    }
    return rc;
}

int bundle_export(struct store *s, const char *tenant, const char *principal,
                  const uint8_t fingerprint[TD_HASH_SIZE], const uint8_t layout[TD_HASH_SIZE],
                  struct portable *file, const struct bundle_progress *progress, struct bundle_counts *counts,
                  struct td_error *err)
{
    struct exporter x = {
        .store = s, .tenant = tenant, .progress = progress, .file = file, .counts = counts, .err = err};
    *counts = (struct bundle_counts){0};
    memcpy(x.chains.fingerprint, fingerprint, TD_HASH_SIZE);
    memcpy(x.chains.layout, layout, TD_HASH_SIZE);
    int rc = chains_open(&x.chains, s, tenant, principal, err);
    rc = rc < 0 ? rc : write_head(file, tenant, principal, &x.chains, err);
    if (rc == 0 && progress)
        store_conv_each(s, tenant, principal, count_one, &x); /* trouble with it shows below */
    if (rc == 0) {
        rc = store_conv_each(s, tenant, principal, export_one, &x);
        if (rc < 0 && !err->text[0])
            td_fail(err, rc, "cannot read the conversations: %s", td_status_text(rc));
    }
    if (rc == 0 && counts->conversations == 0)
        rc = td_fail(err, -TD_ERR_NOTFOUND, "tenant %s has no conversations of principal %s here", tenant,
                     principal);
    free(x.seen.ids);
    chains_close(&x.chains);
    return rc;
}

/* ---- import ------------------------------------------------------------------------------------------------- */

struct importer {
    struct store *store;
    char tenant[STORE_TENANT_MAX + 1], principal[STORE_TENANT_MAX + 1];
    bool trusted;
    struct chains chains;
    const struct bundle_progress *progress;
    struct bundle_counts *counts;
    atomic_int failed; /* the first error of a write, on the writer's thread */
};

static void written(void *ctx, int status)
{
    struct importer *m = ctx;
    int none = 0;
    if (status < 0)
        atomic_compare_exchange_strong(&m->failed, &none, status);
}

static int take_name(json_t *root, const char *member, const char *wanted, char out[STORE_TENANT_MAX + 1],
                     struct td_error *err)
{
    const char *name = json_string_value(json_object_get(root, member));
    if (!name || strlen(name) > STORE_TENANT_MAX)
        return td_fail(err, -TD_ERR_FORMAT, "the export names no %s", member);
    if (wanted[0] && strcmp(name, wanted) != 0)
        return td_fail(err, -TD_ERR_MISMATCH, "the export is of another %s than %s: it goes to nobody else",
                       member, wanted);
    strcpy(out, name);
    return 0;
}

static int take_hash(json_t *root, const char *member, uint8_t out[TD_HASH_SIZE])
{
    const char *text = json_string_value(json_object_get(root, member));
    return text && strlen(text) == 2 * TD_HASH_SIZE && hex_decode(text, out, TD_HASH_SIZE) >= 0
               ? 0
               : -TD_ERR_FORMAT;
}

static int read_head(struct importer *m, const char *tenant, const char *principal, struct portable *file,
                     struct td_error *err)
{
    uint8_t *text;
    size_t size;
    int rc = portable_read(file, &text, &size, err);
    if (rc < 0)
        return rc;
    json_t *root = rc ? json_loadb((char *)text, size, 0, NULL) : NULL;
    const char *format = json_string_value(json_object_get(root, "format"));
    if (!format || strcmp(format, BUNDLE_FORMAT) != 0 ||
        json_integer_value(json_object_get(root, "version")) != BUNDLE_VERSION)
        rc = td_fail(err, -TD_ERR_FORMAT, "the file is no exported store of this version");
    else
        rc = take_name(root, "tenant", tenant, m->tenant, err);
    rc = rc < 0 ? rc : take_name(root, "principal", principal, m->principal, err);
    if (rc == 0 && (take_hash(root, "fingerprint", m->chains.fingerprint) < 0 ||
                    take_hash(root, "layout", m->chains.layout) < 0))
        rc = td_fail(err, -TD_ERR_FORMAT, "the export names no model");
    json_decref(root);
    if (text)
        free(text);
    return rc;
}

static int import_conversation(struct importer *m, const uint8_t *body, size_t size)
{
    struct conversation c;
    int rc = conv_parse(body, size, &c);
    if (rc < 0)
        return rc;
    rc = chains_of(&m->chains, &c);
    rc = rc < 0 ? rc : store_conv_put(m->store, m->tenant, m->principal, c.id, 0, body, size, written, m);
    conv_free(&c);
    m->counts->kept += rc == -TD_ERR_CONFLICT;
    m->counts->conversations += rc == 0;
    return rc == -TD_ERR_CONFLICT ? 0 : rc;
}

/* The pieces of a block, each whole and what it claims to be. */
static int read_pieces(struct reader *r, const struct store_block *b, struct span *pieces)
{
    for (uint32_t i = 0; i < 2u * (b->layer_end - b->layer_begin); i++) {
        struct kv_piece_head h;
        struct span payload;
        uint32_t size = reader_u32(r);
        const uint8_t *data = reader_take(r, size);
        if (!data || kv_piece_parse(data, size, &h, &payload) < 0 || h.block_index != b->block_index ||
            h.layer != b->layer_begin + i / 2 || h.is_value != i % 2 || h.token_count != KV_BLOCK_TOKENS)
            return -TD_ERR_FORMAT;
        pieces[i] = (struct span){data, size};
    }
    return r->bad || r->next != r->end ? -TD_ERR_FORMAT : 0;
}

static int put(struct importer *m, const struct store_block *b)
{
    int rc = store_put(m->store, m->tenant, b, written, m);
    if (rc == -TD_ERR_FULL && store_flush(m->store) == 0) /* the writer's queue: wait for it */
        rc = store_put(m->store, m->tenant, b, written, m);
    return rc;
}

static int import_block(struct importer *m, const uint8_t *frame, size_t size)
{
    struct span pieces[2 * RECORD_PARTS_MAX];
    if (size < BLOCK_HEAD || frame[1] >= NAMESPACES)
        return -TD_ERR_FORMAT;
    const struct kv_block_id *ids = m->chains.ids[m->trusted ? frame[1] : OWN];
    struct store_block b = {.quality = {frame[8], frame[9], m->trusted ? frame[10] : KV_FROM_DEVICE, 0},
                            .block_index = load_le32(frame + 4),
                            .layer_begin = load_le16(frame + 12),
                            .layer_end = load_le16(frame + 14),
                            .pieces = pieces};
    struct reader r = reader_over(frame + BLOCK_HEAD, size - BLOCK_HEAD);
    if (b.block_index >= m->chains.count || b.layer_begin >= b.layer_end ||
        b.layer_end - b.layer_begin > RECORD_PARTS_MAX)
        return -TD_ERR_FORMAT;
    b.id = ids[b.block_index];
    if (b.block_index > 0)
        b.parent = ids[b.block_index - 1];
    int rc = read_pieces(&r, &b, pieces);
    rc = rc < 0 ? rc : put(m, &b);
    m->counts->blocks += rc == 0;
    m->counts->bytes += size;
    return rc;
}

static int import_frames(struct importer *m, struct portable *file, struct td_error *err)
{
    uint8_t *frame;
    size_t size;
    int rc;
    while ((rc = portable_read(file, &frame, &size, err)) > 0) {
        if (size > 0 && frame[0] == 'C')
            rc = import_conversation(m, frame + 1, size - 1);
        else
            rc = size > 0 && frame[0] == 'B' ? import_block(m, frame, size) : -TD_ERR_FORMAT;
        crypto_wipe(frame, size);
        free(frame);
        uint64_t done, total;
        portable_progress(file, &done, &total);
        report(m->progress, done, total);
        if (rc < 0)
            return td_fail(err, rc, "cannot take over the export: %s", td_status_text(rc));
    }
    return rc;
}

int bundle_import(struct store *s, const char *tenant, const char *principal, bool trusted,
                  struct portable *file, const struct bundle_progress *progress, struct bundle_counts *counts,
                  struct td_error *err)
{
    struct importer m = {.store = s, .trusted = trusted, .progress = progress, .counts = counts};
    *counts = (struct bundle_counts){0};
    int rc = read_head(&m, tenant, principal, file, err);
    rc = rc < 0 ? rc : chains_open(&m.chains, s, m.tenant, m.principal, err);
    rc = rc < 0 ? rc : import_frames(&m, file, err);
    if (rc == 0)
        report(progress, 1, 1);   /* the last frame holds nothing to take over */
    int flushed = store_flush(s); /* also after an error: `written` must not be called any more */
    int failed = atomic_load(&m.failed);
    chains_close(&m.chains);
    if (rc == 0 && (failed < 0 || flushed < 0))
        rc = td_fail(err, failed ? failed : flushed, "cannot write what was imported: %s",
                     td_status_text(failed ? failed : flushed));
    return rc;
}
