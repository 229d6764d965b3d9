/* store_fixture: what the store's tests share: a directory of their own, blocks that can be told apart, small helpers. */
#ifndef TANDEM_TESTS_STORE_FIXTURE_H
#define TANDEM_TESTS_STORE_FIXTURE_H
#include "shared/kv_record.h"
#include "store/store_internal.h"
#include "store/tier.h"
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

#define FIXTURE_LAYERS 3
#define FIXTURE_VALUES (2 * 64 * 8) /* 2 heads, 64 tokens, 8 dimensions */
#define FIXTURE_PIECE  (KV_PIECE_HEAD_SIZE + 2 * FIXTURE_VALUES)

struct fixture_block { /* a block whose content follows from `seed` */
    struct kv_block_id id;
    struct store_block block;
    struct span pieces[2 * FIXTURE_LAYERS];
    uint8_t bytes[2 * FIXTURE_LAYERS][FIXTURE_PIECE];
};

static inline void fixture_id(uint64_t seed, struct kv_block_id *id)
{
    uint8_t bytes[8];
    store_le64(bytes, seed);
    sha256_once(bytes, sizeof bytes, id->bytes);
}

static inline void fixture_block_of(struct fixture_block *f, uint64_t seed, struct kv_quality quality,
                                    uint16_t layer_begin, uint16_t layer_end)
{
    static struct kv_codec_scratch *scratch;
    if (!scratch)
        scratch = kv_codec_scratch_create(&(struct kv_shape){FIXTURE_LAYERS, 2, 8});
    fixture_id(seed, &f->id);
    f->block = (struct store_block){.id = f->id,
                                    .quality = quality,
                                    .block_index = (uint32_t)seed,
                                    .layer_begin = layer_begin,
                                    .layer_end = layer_end,
                                    .pieces = f->pieces};
    for (int i = 0; i < 2 * (layer_end - layer_begin); i++) {
        uint16_t values[FIXTURE_VALUES];
        uint64_t x = seed * 1000003 + (uint64_t)i + quality.fidelity * 77u + 1;
        for (int j = 0; j < FIXTURE_VALUES; j++) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            values[j] = (uint16_t)((x >> 40) & 0xbbff); /* any finite f16 */
        }
        struct kv_piece_head h = {.codec = KV_RAW,
                                  .is_value = (uint8_t)(i % 2),
                                  .quality = quality,
                                  .block_index = (uint32_t)seed,
                                  .token_count = 64,
                                  .layer = (uint16_t)(layer_begin + i / 2),
                                  .kv_head_count = 2,
                                  .head_dim = 8};
        int64_t size = kv_piece_encode(scratch, &h, values, f->bytes[i], FIXTURE_PIECE);
        assert_int_equal(size, FIXTURE_PIECE);
        f->pieces[i] = (struct span){f->bytes[i], (size_t)size};
    }
}

static const struct kv_quality quality_exact = {KV_L0, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0};
static const struct kv_quality quality_lossy = {KV_L1, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0};

static inline void fixture_block_make(struct fixture_block *f, uint64_t seed)
{
    fixture_block_of(f, seed, quality_exact, 0, FIXTURE_LAYERS);
}

/* What demotion at a level makes of it, by the codec. */
static inline void fixture_block_demoted(const struct fixture_block *f, const char *level_name,
                                         struct fixture_block *out)
{
    const struct kv_level *level = kv_level_find(level_name);
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&(struct kv_shape){FIXTURE_LAYERS, 2, 8});
    *out = *f;
    out->block.quality.fidelity = level->codec;
    out->block.pieces = out->pieces;
    for (int i = 0; i < 2 * (f->block.layer_end - f->block.layer_begin); i++) {
        uint16_t values[FIXTURE_VALUES];
        struct kv_piece_head h;
        struct span payload;
        assert_int_equal(kv_piece_parse(f->pieces[i].data, f->pieces[i].size, &h, &payload), 0);
        assert_int_equal(kv_piece_decode(scratch, &h, payload, values, FIXTURE_VALUES), 0);
        h.codec = h.quality.fidelity = level->codec;
        h.table = kv_level_table(level, h.is_value, h.block_index);
        int64_t size = kv_piece_encode(scratch, &h, values, out->bytes[i], FIXTURE_PIECE);
        assert_true(size > 0);
        out->pieces[i] = (struct span){out->bytes[i], (size_t)size};
    }
    kv_codec_scratch_destroy(scratch);
}

/* This tenant allows it, at L1; until the next call. */
static inline struct store_demotion *fixture_demotion(const char *tenant)
{
    static struct store_demotion_tenant tenants[1];
    static struct store_demotion demotion;
    tenants[0].level = kv_level_find("l1");
    snprintf(tenants[0].name, sizeof tenants[0].name, "%s", tenant);
    demotion = (struct store_demotion){.shape = {FIXTURE_LAYERS, 2, 8}, .tenants = tenants, .count = 1};
    return &demotion;
}

/* In memory where that is possible: these tests are about what is written, not about waiting for a disk. */
static inline char *fixture_directory(void)
{
    char *path =
        strdup(access("/dev/shm", W_OK) == 0 ? "/dev/shm/tandem-store-XXXXXX" : "/tmp/tandem-store-XXXXXX");
    assert_non_null(mkdtemp(path));
    return path;
}

static inline void fixture_remove(char *path)
{
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));) {
        char name[512];
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        unlink(name);
    }
    if (d)
        closedir(d);
    rmdir(path);
    free(path);
}

static inline struct store_config fixture_config(const char *directory)
{
    struct store_config c = {
        .directory = directory, .ballast_size = 1 << 16, .commit_interval_ms = 1, .limit_size = 1ull << 30};
    memset(c.master_key, 7, sizeof c.master_key);
    return c;
}

/* What is counted as it changes is what a walk over the table finds. */
static inline int fixture_count(struct store *s, struct store_task *task)
{
    struct tenant_count *found = calloc(KEYS_TENANTS_MAX + 1, sizeof *found);
    uint64_t size = 0;
    (void)task;
    for (size_t i = 0; i < TABLE_SHARD_COUNT; i++) {
        struct table_shard *shard = &s->blocks.shards[i];
        pthread_mutex_lock(&shard->lock);
        for (size_t j = 0; j < shard->slot_count; j++) {
            const struct entry *e = &shard->slots[j];
            struct tenant_count *t = &found[e->tenant];
            if (!e->segment_id || e->layer_end == 0) /* the latter by a false index */
                continue;
            t->blocks++;
            t->size += e->stored_size;
            t->from_device += e->quality.provenance == KV_FROM_DEVICE;
            t->by_level[TD_MIN(e->quality.fidelity, KV_L4)]++;
            size += e->stored_size;
        }
        pthread_mutex_unlock(&shard->lock);
    }
    bool same = size == s->block_size && memcmp(found, s->tenants, sizeof s->tenants) == 0;
    free(found);
    return same ? 0 : -TD_ERR_MISMATCH;
}

/* On the writer: nothing changes meanwhile. */
static inline void fixture_counts_are_true(struct store *s)
{
    struct store_task task = {.run = fixture_count};
    assert_int_equal(store_run_task(s, &task), 0);
}

static inline struct store *fixture_open(const struct store_config *c)
{
    struct store *s = NULL;
    struct td_error err = {0};
    struct store_env env = {.io = &io_posix, .answer_us = UINT64_C(3600000000)}; /* however loaded */
    int rc = store_open_with(c, &env, &s, &err);
    if (rc < 0)
        print_error("%s\n", err.text);
    assert_int_equal(rc, 0);
    assert_int_equal(fixture_count(s, NULL), 0); /* nothing is written yet */
    return s;
}

/* All layers of the block are there, bit for bit. */
static inline bool fixture_block_reads(struct store *s, const char *tenant, const struct fixture_block *f)
{
    struct tier_block *b;
    if (store_read_block(s, tenant, &f->id, &b) < 0)
        return false;
    assert_int_equal(b->block.layer_begin, f->block.layer_begin);
    assert_int_equal(b->block.layer_end, f->block.layer_end);
    for (uint32_t i = 0; i < 2u * (f->block.layer_end - f->block.layer_begin); i++) {
        assert_int_equal(b->pieces[i].size, f->pieces[i].size);
        assert_memory_equal(b->pieces[i].data, f->pieces[i].data, f->pieces[i].size);
    }
    tier_block_release(b);
    return true;
}

struct fixture_done { /* for store_done callbacks, read after store_flush */
    int calls, status;
};
static inline void fixture_on_done(void *ctx, int status)
{
    struct fixture_done *d = ctx;
    d->calls++;
    d->status = status;
}

/* Put and wait; returns the acknowledged status, or why it was refused. */
static inline int fixture_put(struct store *s, const char *tenant, const struct fixture_block *f)
{
    struct fixture_done d = {0, 1};
    int rc = store_put(s, tenant, &f->block, fixture_on_done, &d);
    store_flush(s);
    if (rc == 0)
        assert_int_equal(d.calls, 1);
    return rc < 0 ? rc : d.status;
}

/* As demotion does, with what it has made of an exact block. */
static inline int fixture_put_demoted(struct store *s, const char *tenant, const struct fixture_block *small,
                                      struct fixture_done *done)
{
    struct tier_block *b = tier_block_create(FIXTURE_LAYERS, sizeof small->bytes);
    size_t at = 0;
    b->block = small->block;
    b->block.pieces = b->pieces;
    for (int i = 0; i < 2 * FIXTURE_LAYERS; i++) {
        memcpy(b->data + at, small->pieces[i].data, small->pieces[i].size);
        b->pieces[i] = (struct span){b->data + at, small->pieces[i].size};
        at += small->pieces[i].size;
    }
    int rc = store_put_demoted(s, keys_find(s->keys, tenant), b, quality_exact, fixture_on_done, done);
    tier_block_release(b);
    return rc;
}

static inline int fixture_conv_put(struct store *s, const char *tenant, const char *principal, const char *id,
                                   uint64_t expected, const char *text)
{
    struct fixture_done d = {0, 1};
    int rc = store_conv_put(s, tenant, principal, id, expected, text, strlen(text), fixture_on_done, &d);
    store_flush(s);
    return rc < 0 ? rc : d.status;
}

/* The text of a conversation, or NULL; free it. */
static inline char *fixture_conv_get(struct store *s, const char *tenant, const char *principal,
                                     const char *id, uint64_t *version)
{
    uint8_t *body;
    size_t size;
    if (store_conv_get(s, tenant, principal, id, version, &body, &size) < 0)
        return NULL;
    char *text = malloc(size + 1);
    memcpy(text, body, size);
    text[size] = '\0';
    free(body);
    return text;
}

#endif
