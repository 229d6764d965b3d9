/* kv_disk: what the prefill thread computed is on the disk, comes back bit for bit after a restart, and is nobody else's; what is damaged, late or not
 * the device's own arithmetic is computed again. */
#include "fake_backend.h"
#include "edge/fetcher.h"
#include "edge/pipeline.h"
#include "shared/crypto.h"
#include "shared/queue.h"
#include <dirent.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#define WAIT_US  60000000 /* long: the machine may be busy */
#define LAYERS   2
#define ID_COUNT 320
#define BLOCKS   (ID_COUNT / KV_BLOCK_TOKENS)
#define TENANT   "local"
#define LIMIT    (64u << 20)

struct device { /* from one start to the next */
    struct store *store;
    struct kv_disk *disk;
    struct local_kv *kv;
    struct fake_backend *fake;
    struct pipeline *pipeline;
    struct queue *events;
};
static char directory[64];
static int32_t ids[ID_COUNT];
static struct kv_block_id chain[BLOCKS];
static const uint8_t key[32] = {9}, other_key[32] = {10}, fingerprint[TD_HASH_SIZE] = {1},
                     other_fingerprint[TD_HASH_SIZE] = {2}, layout[TD_HASH_SIZE] = {3};

static int sink(void *ctx, struct pipeline_event *e)
{
    return queue_push(ctx, e);
}

static void device_start(struct device *d)
{
    struct store_config config = {.directory = directory, .commit_interval_ms = 1};
    struct td_error err = {0};
    *d = (struct device){
        .kv = local_kv_create(16), .fake = fake_backend_create(16, LAYERS, 4), .events = queue_create(1024)};
    d->fake->delay_us = 20000;
    if (store_open(&config, &d->store, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(kv_disk_create(d->store, TENANT, LIMIT, &d->disk, &err), 0);
    local_kv_set_disk(d->kv, d->disk);
    struct pipeline_config pipeline = {.backend = &d->fake->base,
                                       .disk_patience_us = 10000000, /* a busy machine is no late disk */
                                       .kv = d->kv,
                                       .chunk_tokens = KV_BLOCK_TOKENS,
                                       .sink = sink,
                                       .ctx = d->events};
    memcpy(pipeline.fingerprint, fingerprint, sizeof fingerprint);
    memcpy(pipeline.layout_hash, layout, sizeof layout);
    assert_int_equal(pipeline_create(&pipeline, &d->pipeline, &err), 0);
}

static void device_stop(struct device *d)
{
    struct pipeline_event *e;
    pipeline_destroy(d->pipeline);
    while ((e = queue_pop(d->events, 0)))
        pipeline_event_free(e);
    queue_destroy(d->events);
    local_kv_destroy(d->kv);
    kv_disk_destroy(d->disk);
    store_close(d->store);
}

/* Rows [begin, ID_COUNT) are wanted. Returns how many tokens were run for them. */
static uint32_t run_prompt(struct device *d, uint32_t begin)
{
    uint32_t before = d->fake->rows;
    struct pipeline_work work = {
        .id = 1, .ids = ids, .count = ID_COUNT, .capacity = ID_COUNT, .chain = chain};
    struct pipeline_send send = {.epoch = 1,
                                 .rows_begin = begin,
                                 .kv_begin = begin,
                                 .ranges = {{begin, ID_COUNT - begin, LAYERS, KV_RAW, HIDDEN_F32}},
                                 .range_count = 1};
    memcpy(work.principal_key, key, sizeof key);
    struct pipeline_job *job = pipeline_open(d->pipeline, &work);
    pipeline_send(d->pipeline, job, &send);
    for (bool sent = false; !sent;) {
        struct pipeline_event *e = queue_pop(d->events, WAIT_US);
        assert_non_null(e);
        assert_int_not_equal(e->type, PIPELINE_FAILED);
        sent = e->type == PIPELINE_SENT;
        pipeline_event_free(e);
    }
    pipeline_close(d->pipeline, job, UINT32_MAX);
    assert_true(pipeline_wait_idle(d->pipeline, WAIT_US / 1000));
    assert_int_equal(store_flush(d->store), 0);
    assert_int_equal(d->fake->pages_bad, 0);
    return d->fake->rows - before;
}

static void first_life(void)
{
    struct device d;
    device_start(&d);
    assert_int_equal(run_prompt(&d, 0), ID_COUNT);
    device_stop(&d);
}

static int remove_entry(const char *path, const struct stat *s, int type, struct FTW *f)
{
    (void)s, (void)type, (void)f;
    return remove(path);
}

static int make_directory(void **state)
{
    (void)state;
    snprintf(directory, sizeof directory, "/tmp/td-kv-disk-XXXXXX");
    for (size_t i = 0; i < ID_COUNT; i++)
        ids[i] = (int32_t)(i * 7 % 97);
    local_kv_chain(key, fingerprint, layout, NULL, ids, ID_COUNT, chain);
    return mkdtemp(directory) ? 0 : -1;
}

static int remove_directory(void **state)
{
    (void)state;
    return nftw(directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static int set_up(void **state)
{
    (void)state;
    return crypto_init();
}

/* ---- tests ---- */

static void after_a_restart_only_new_tokens_are_run(void **state)
{
    (void)state;
    uint16_t depths[BLOCKS];
    uint32_t unread;
    first_life();
    struct device d;
    device_start(&d);
    assert_int_equal(local_kv_held(d.kv, chain, BLOCKS, 1), 0);
    assert_int_equal(local_kv_depths(d.kv, chain, BLOCKS, depths, &unread), BLOCKS);
    assert_int_equal(unread, BLOCKS);
    assert_int_equal(depths[BLOCKS - 1], LAYERS);
    assert_int_equal(run_prompt(&d, 256), ID_COUNT - 256);
    assert_int_equal(local_kv_held(d.kv, chain, BLOCKS, LAYERS), BLOCKS);
    assert_int_equal(local_kv_depths(d.kv, chain, BLOCKS, depths, &unread), BLOCKS);
    assert_int_equal(unread, 0);
    device_stop(&d);
}

static void blocks_that_memory_has_lost_come_back(void **state)
{
    (void)state;
    struct device d;
    device_start(&d);
    assert_int_equal(run_prompt(&d, 0), ID_COUNT);
    uint32_t pages[16], count = 0;
    while (count < 16 && (pages[count] = local_kv_alloc(d.kv)) != PAGE_NONE)
        count++;
    assert_int_equal(local_kv_held(d.kv, chain, BLOCKS, 1), 0); /* everything had to give way */
    while (count > 0)
        local_kv_release(d.kv, pages[--count]);
    assert_int_equal(run_prompt(&d, 256), ID_COUNT - 256);
    device_stop(&d);
}

static void nobody_else_finds_them(void **state)
{
    (void)state;
    struct kv_block_id others[BLOCKS];
    uint16_t depths[BLOCKS];
    uint32_t unread;
    first_life();
    struct device d;
    device_start(&d);
    local_kv_chain(other_key, fingerprint, layout, NULL, ids, ID_COUNT, others);
    assert_int_equal(local_kv_depths(d.kv, others, BLOCKS, depths, &unread), 0);
    local_kv_chain(key, other_fingerprint, layout, NULL, ids, ID_COUNT, others);
    assert_int_equal(local_kv_depths(d.kv, others, BLOCKS, depths, &unread), 0);
    local_kv_chain(key, fingerprint, other_key, NULL, ids, ID_COUNT, others); /* another layout */
    assert_int_equal(local_kv_depths(d.kv, others, BLOCKS, depths, &unread), 0);
    assert_int_equal(unread, 0);
    device_stop(&d);
}

/* Bytes all over the segments are changed; the index still names the blocks. */
static void damage_segments(void)
{
    DIR *list = opendir(directory);
    struct dirent *entry;
    unsigned damaged = 0;
    assert_non_null(list);
    while ((entry = readdir(list))) {
        char path[512];
        if (strncmp(entry->d_name, "seg-", 4) != 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        FILE *file = fopen(path, "r+b");
        assert_non_null(file);
        int c;
        for (long at = 2 * 4096; at < 1 << 20 && fseek(file, at, SEEK_SET) == 0 && (c = fgetc(file)) != EOF;
             at += 256) {
            fseek(file, at, SEEK_SET);
            fputc(c ^ 0x20, file);
            damaged++;
        }
        fclose(file);
    }
    closedir(list);
    assert_true(damaged > 0);
}

static void damaged_blocks_are_computed_again(void **state)
{
    (void)state;
    struct device d;
    device_start(&d);
    assert_int_equal(run_prompt(&d, 0), ID_COUNT);
    uint32_t pages[16], count = 0;
    while (count < 16 && (pages[count] = local_kv_alloc(d.kv)) != PAGE_NONE)
        count++;
    while (count > 0)
        local_kv_release(d.kv, pages[--count]);
    damage_segments();
    assert_true(kv_disk_layers(d.disk, &chain[0]) == LAYERS); /* it does not know yet */
    assert_int_equal(run_prompt(&d, 256), ID_COUNT);
    assert_true(kv_disk_layers(d.disk, &chain[0]) == LAYERS); /* written again */
    device_stop(&d);
}

/* The right block, but of another kind of arithmetic. */
static void put_block(struct device *d, uint8_t numerics)
{
    static const struct kv_shape shape = {4, FAKE_HEADS, FAKE_DIM};
    static uint8_t bytes[2 * LAYERS][8192];
    uint16_t values[KV_BLOCK_TOKENS * FAKE_HEADS * FAKE_DIM] = {0};
    struct span pieces[2 * LAYERS];
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&shape);
    struct kv_quality quality = {KV_L0, numerics, KV_FROM_DEVICE, 0};
    for (size_t i = 0; i < TD_COUNT(pieces); i++) {
        struct kv_piece_head head = {.codec = KV_L0,
                                     .is_value = i % 2,
                                     .quality = quality,
                                     .token_count = KV_BLOCK_TOKENS,
                                     .layer = (uint16_t)(i / 2),
                                     .kv_head_count = FAKE_HEADS,
                                     .head_dim = FAKE_DIM};
        int64_t size = kv_piece_encode(scratch, &head, values, bytes[i], sizeof bytes[i]);
        assert_true(size > 0);
        pieces[i] = (struct span){bytes[i], (size_t)size};
    }
    kv_codec_scratch_destroy(scratch);
    struct store_block block = {.id = chain[0], .quality = quality, .layer_end = LAYERS, .pieces = pieces};
    assert_int_equal(kv_disk_put(d->disk, &block), 0);
    assert_int_equal(store_flush(d->store), 0);
}

static void what_this_device_would_not_have_computed_is_not_used(void **state)
{
    (void)state;
    struct device d;
    device_start(&d);
    put_block(&d, KV_NUMERICS_CUDA_FAST);
    assert_int_equal(kv_disk_layers(d.disk, &chain[0]), LAYERS);
    assert_int_equal(run_prompt(&d, 256), ID_COUNT);
    device_stop(&d);
}

static void late_blocks_are_computed_and_the_disk_rests(void **state)
{
    (void)state;
    struct tier_block *block;
    first_life();
    struct device d;
    device_start(&d);
    assert_int_equal(kv_disk_layers(d.disk, &chain[0]), LAYERS);
    assert_int_equal(kv_disk_take(d.disk, chain, BLOCKS, 0, &block), -TD_ERR_AGAIN);
    assert_null(block);
    assert_int_equal(kv_disk_layers(d.disk, &chain[0]), 0);
    assert_false(kv_disk_lacks(d.disk, &chain[0], LAYERS)); /* not written again for that */
    assert_int_equal(run_prompt(&d, 256), ID_COUNT);
    device_stop(&d);
}

static void taken_in_any_order(void **state)
{
    (void)state;
    struct tier_block *block;
    static const uint32_t order[] = {0, 1, 2, 0, 1, 4, 3, 4, 2};
    first_life();
    struct device d;
    device_start(&d);
    for (size_t i = 0; i < TD_COUNT(order); i++) {
        uint32_t at = order[i];
        assert_int_equal(kv_disk_take(d.disk, chain + at, BLOCKS - at, WAIT_US, &block), 0);
        assert_memory_equal(&block->block.id, &chain[at], sizeof chain[at]);
        assert_int_equal(block->block.block_index, at);
        assert_int_equal(block->block.layer_end, LAYERS);
        tier_block_release(block);
    }
    struct kv_block_id absent = {{77}};
    assert_int_equal(kv_disk_take(d.disk, &absent, 1, WAIT_US, &block), -TD_ERR_NOTFOUND);
    device_stop(&d);
}

static void the_limit_is_kept_and_none_clears(void **state)
{
    (void)state;
    struct store_stats stats;
    struct td_error err = {0};
    uint64_t blocks, freed, size;
    first_life();
    struct device d;
    device_start(&d);
    store_stats(d.store, &stats);
    assert_int_equal(stats.blocks, BLOCKS);
    size = stats.block_bytes / 2;
    kv_disk_destroy(d.disk);
    assert_int_equal(kv_disk_create(d.store, TENANT, size, &d.disk, &err), 0);
    local_kv_set_disk(d.kv, d.disk);
    assert_int_equal(store_gc(d.store, NULL, NULL, &blocks, &freed, &err), 0);
    store_stats(d.store, &stats);
    assert_true(stats.blocks > 0 && stats.block_bytes <= size);
    kv_disk_clear(d.store, TENANT);
    store_stats(d.store, &stats);
    assert_int_equal(stats.blocks, 0);
    device_stop(&d);
}

/* ---- what the cloud has sealed ---- */

#define ALL_LAYERS 4u /* of the model; the device has LAYERS of them */
#define SEALED     3u /* blocks */
static const uint8_t tag[KV_SEAL_TAG_SIZE] = {6};

/* Piece i of a block, sealed by whomever. malloc'ed. */
static struct span sealed_piece(uint32_t block, uint32_t i, uint8_t fidelity)
{
    static const uint8_t master[CRYPTO_KEY_SIZE] = {4}, salt[KV_SEAL_SALT_SIZE] = {8};
    struct kv_shape shape = {ALL_LAYERS, FAKE_HEADS, FAKE_DIM};
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&shape);
    size_t bound = kv_piece_bound(&shape, KV_BLOCK_TOKENS);
    uint16_t *values = calloc(kv_piece_values(&shape, KV_BLOCK_TOKENS), sizeof *values);
    uint8_t *piece = malloc(bound), *out = malloc(bound + KV_SEAL_OVERHEAD);
    struct kv_seal seal;
    struct kv_block_id name = {{(uint8_t)block}};
    struct kv_piece_head head = {.codec = KV_L0,
                                 .is_value = i % 2,
                                 .quality = {fidelity, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0},
                                 .block_index = block,
                                 .token_count = KV_BLOCK_TOKENS,
                                 .layer = (uint16_t)(i / 2),
                                 .kv_head_count = FAKE_HEADS,
                                 .head_dim = FAKE_DIM};
    values[0] = (uint16_t)(100 * block + i);
    kv_seal_derive(master, &seal);
    int64_t size = kv_piece_encode(scratch, &head, values, piece, bound);
    assert_true(size > 0);
    size =
        kv_seal_piece(&seal, salt, &name, (struct span){piece, (size_t)size}, out, bound + KV_SEAL_OVERHEAD);
    assert_true(size > 0);
    kv_codec_scratch_destroy(scratch);
    free(values);
    free(piece);
    return (struct span){out, (size_t)size};
}

static void keep_sealed(struct device *d, uint32_t block, uint8_t fidelity)
{
    struct span pieces[2 * ALL_LAYERS];
    struct store_block b = {.quality = {fidelity, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0},
                            .block_index = block,
                            .layer_end = ALL_LAYERS,
                            .pieces = pieces};
    sealed_block_id(tag, &chain[block], &b.id);
    for (uint32_t i = 0; i < 2 * ALL_LAYERS; i++)
        pieces[i] = sealed_piece(block, i, fidelity);
    assert_int_equal(kv_disk_put(d->disk, &b), 0);
    assert_int_equal(store_flush(d->store), 0);
    for (uint32_t i = 0; i < 2 * ALL_LAYERS; i++)
        free((void *)(uintptr_t)pieces[i].data);
}

/* The first blocks as they are, the rest split at LAYERS; or the cloud's. */
static struct pipeline_job *give_back(struct device *d, bool splits)
{
    const uint32_t border = SEALED * KV_BLOCK_TOKENS;
    struct pipeline_work work = {
        .id = 1, .ids = ids, .count = ID_COUNT, .capacity = ID_COUNT, .chain = chain};
    struct pipeline_send send = {
        .epoch = 1,
        .rows_begin = border,
        .ranges = {{0, border, ALL_LAYERS, KV_SEALED, HIDDEN_F32},
                   {border, ID_COUNT - border, splits ? LAYERS : 0, KV_RAW, HIDDEN_F32}},
        .range_count = 2};
    memcpy(send.seal, tag, sizeof tag);
    memcpy(work.principal_key, key, sizeof key);
    struct pipeline_job *job = pipeline_open(d->pipeline, &work);
    pipeline_send(d->pipeline, job, &send);
    return job;
}

struct given {
    uint32_t sealed, plain, rows;
    bool failed;
};

static void look_at(struct given *g, const struct pipeline_message *m)
{
    if (m->type == FRAME_HIDDEN) {
        assert_true(m->first_token >= SEALED * KV_BLOCK_TOKENS);
        g->rows += m->count;
    } else if (m->block_index >= SEALED) {
        g->plain++;
    } else {
        struct span expected = sealed_piece(m->block_index, m->layer * 2 + m->is_value, KV_L0);
        assert_int_equal(m->size, expected.size);
        assert_memory_equal(m->payload, expected.data, expected.size);
        free((void *)(uintptr_t)expected.data);
        assert_int_equal(m->block_index * 2 * ALL_LAYERS + m->layer * 2 + m->is_value, g->sealed++);
    }
}

static struct given take_given(struct device *d, struct pipeline_job *job)
{
    struct given g = {0};
    for (bool ended = false; !ended;) {
        struct pipeline_event *e = queue_pop(d->events, WAIT_US);
        assert_non_null(e);
        g.failed |= e->type == PIPELINE_FAILED;
        ended = e->type == PIPELINE_SENT || g.failed;
        for (const struct pipeline_message *m = e->messages; m; m = m->next)
            look_at(&g, m);
        pipeline_event_free(e);
    }
    pipeline_close(d->pipeline, job, 0);
    assert_true(pipeline_wait_idle(d->pipeline, WAIT_US / 1000));
    assert_int_equal(d->fake->pages_bad, 0);
    return g;
}

/* Bit for bit and in order, after a restart; nothing is computed of it, but what a split behind it needs. */
static void sealed_blocks_are_handed_on_as_they_are(void **state)
{
    (void)state;
    struct device d;
    device_start(&d);
    for (uint32_t i = 0; i < SEALED; i++)
        keep_sealed(&d, i, KV_L0);
    device_stop(&d);
    for (int splits = 0; splits < 2; splits++) {
        device_start(&d);
        struct given g = take_given(&d, give_back(&d, splits));
        assert_false(g.failed);
        assert_int_equal(g.sealed, SEALED * 2 * ALL_LAYERS);
        assert_int_equal(d.fake->rows, splits ? ID_COUNT : 0);
        assert_int_equal(g.rows, splits ? ID_COUNT - SEALED * KV_BLOCK_TOKENS : 0);
        assert_int_equal(g.plain, splits ? (BLOCKS - SEALED) * 2 * LAYERS : 0);
        device_stop(&d);
    }
}

static void a_sealed_block_that_is_gone_is_said_so(void **state)
{
    (void)state;
    struct device d;
    device_start(&d);
    keep_sealed(&d, 0, KV_L0);
    keep_sealed(&d, 2, KV_L0);
    struct given g = take_given(&d, give_back(&d, false));
    assert_true(g.failed);
    assert_int_equal(g.sealed, 2 * ALL_LAYERS);
    device_stop(&d);
}

static void what_a_request_would_not_take_is_not_held_for_it(void **state)
{
    (void)state;
    struct device d;
    struct kv_block_id id;
    device_start(&d);
    keep_sealed(&d, 0, KV_L1);
    sealed_block_id(tag, &chain[0], &id);
    assert_true(kv_disk_accepts(d.disk, &id, ALL_LAYERS, KV_ACCEPT_VISIBLE_LOSSLESS, KV_NUMERICS_CPU_V1));
    assert_false(
        kv_disk_accepts(d.disk, &id, ALL_LAYERS + 1, KV_ACCEPT_VISIBLE_LOSSLESS, KV_NUMERICS_CPU_V1));
    assert_false(kv_disk_accepts(d.disk, &id, ALL_LAYERS, KV_ACCEPT_EXACT, KV_NUMERICS_CPU_V1));
    assert_false(kv_disk_accepts(d.disk, &chain[0], ALL_LAYERS, KV_ACCEPT_ANY, KV_NUMERICS_CPU_V1));
    device_stop(&d);
}

#define DISK_TEST(test) cmocka_unit_test_setup_teardown(test, make_directory, remove_directory)

int main(void)
{
    const struct CMUnitTest tests[] = {
        DISK_TEST(after_a_restart_only_new_tokens_are_run),
        DISK_TEST(blocks_that_memory_has_lost_come_back),
        DISK_TEST(nobody_else_finds_them),
        DISK_TEST(damaged_blocks_are_computed_again),
        DISK_TEST(what_this_device_would_not_have_computed_is_not_used),
        DISK_TEST(late_blocks_are_computed_and_the_disk_rests),
        DISK_TEST(taken_in_any_order),
        DISK_TEST(the_limit_is_kept_and_none_clears),
        DISK_TEST(sealed_blocks_are_handed_on_as_they_are),
        DISK_TEST(a_sealed_block_that_is_gone_is_said_so),
        DISK_TEST(what_a_request_would_not_take_is_not_held_for_it),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
