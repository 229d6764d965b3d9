/* tiers: what each tier promises, and what holds for all of them together: order, quality, bounds, deadlines, health. */
#include "store/lane.h"
#include "store/tiers.h"
#include "store_fixture.h"
#include <pthread.h>
#include <time.h>

static const struct tiers_want want_exact = {KV_ACCEPT_EXACT, KV_NUMERICS_CPU_V1, 0, FIXTURE_LAYERS};
static const struct tiers_want want_any = {KV_ACCEPT_ANY, KV_NUMERICS_CPU_V1, 0, FIXTURE_LAYERS};

/* The block as a tier takes it; one reference. */
static struct tier_block *block_of(const struct fixture_block *f)
{
    uint32_t layers = f->block.layer_end - f->block.layer_begin;
    struct tier_block *b = tier_block_create(layers, 2u * layers * FIXTURE_PIECE);
    assert_non_null(b);
    b->block = f->block;
    b->block.pieces = b->pieces;
    for (uint32_t i = 0; i < 2 * layers; i++) {
        memcpy(b->data + i * FIXTURE_PIECE, f->pieces[i].data, f->pieces[i].size);
        b->pieces[i] = (struct span){b->data + i * FIXTURE_PIECE, f->pieces[i].size};
    }
    return b;
}

static struct tier_block *block_make(uint64_t seed, struct kv_quality quality, struct fixture_block *f)
{
    fixture_block_of(f, seed, quality, 0, FIXTURE_LAYERS);
    return block_of(f);
}

static void assert_same(const struct tier_block *b, const struct fixture_block *f)
{
    assert_memory_equal(&b->block.id, &f->id, sizeof f->id);
    assert_int_equal(b->block.block_index, f->block.block_index);
    assert_int_equal(b->block.layer_begin, f->block.layer_begin);
    assert_int_equal(b->block.layer_end, f->block.layer_end);
    assert_memory_equal(&b->block.quality, &f->block.quality, sizeof f->block.quality);
    for (int i = 0; i < 2 * (f->block.layer_end - f->block.layer_begin); i++) {
        assert_int_equal(b->block.pieces[i].size, f->pieces[i].size);
        assert_memory_equal(b->block.pieces[i].data, f->pieces[i].data, f->pieces[i].size);
    }
}

static int put(struct tier *t, const char *tenant, uint64_t seed, struct kv_quality quality)
{
    struct fixture_block f;
    struct tier_block *b = block_make(seed, quality, &f);
    int rc = t->ops->put(t, tenant, b, NULL, NULL);
    tier_block_release(b);
    return rc;
}

/* ---- host memory -------------------------------------------------------------------------------------------- */

static void ram_keeps_and_gives(void **state)
{
    (void)state;
    assert_int_equal(crypto_init(), 0);
    struct tier *t = tier_ram_create(1 << 20, 0);
    struct fixture_block f;
    struct tier_block *b = block_make(1, quality_exact, &f), *again;
    struct store_block_info info;
    struct tier_stats stats;
    assert_int_equal(t->ops->find(t, "acme", &f.id, &info), -TD_ERR_NOTFOUND);
    assert_int_equal(t->ops->put(t, "acme", b, NULL, NULL), 0);
    assert_int_equal(t->ops->find(t, "acme", &f.id, &info), 0);
    assert_int_equal(info.layer_end, FIXTURE_LAYERS);
    assert_int_equal(t->ops->get(t, "acme", &f.id, &again), 0);
    assert_ptr_equal(again, b); /* nothing is copied */
    assert_same(again, &f);
    tier_block_release(again);
    assert_int_equal(t->ops->find(t, "other", &f.id, &info), -TD_ERR_NOTFOUND);
    assert_int_equal(t->ops->get(t, "other", &f.id, &again), -TD_ERR_NOTFOUND);
    t->ops->drop_tenant(t, "other");
    assert_int_equal(t->ops->find(t, "acme", &f.id, &info), 0);
    t->ops->drop_tenant(t, "acme");
    assert_int_equal(t->ops->find(t, "acme", &f.id, &info), -TD_ERR_NOTFOUND);
    t->ops->stats(t, &stats);
    assert_int_equal(stats.blocks, 0);
    assert_int_equal(stats.bytes, 0);
    assert_int_equal(stats.hits, 2);
    assert_int_equal(stats.misses, 3);
    tier_block_release(b);
    t->ops->destroy(t);
}

/* Never more bytes than the limit; who reads a block that goes keeps it. */
static void ram_is_bounded(void **state)
{
    (void)state;
    struct fixture_block f;
    struct tier_block *first = block_make(1, quality_exact, &f);
    uint64_t size = tier_block_size(first), limit = 4 * size + size / 2;
    struct tier *t = tier_ram_create(limit, 0);
    struct tier_stats stats;
    assert_int_equal(t->ops->put(t, "acme", first, NULL, NULL), 0);
    for (uint64_t seed = 2; seed < 50; seed++) {
        put(t, "acme", seed, quality_exact);
        t->ops->stats(t, &stats);
        assert_true(stats.bytes <= limit);
        assert_int_equal(stats.bytes, stats.blocks * size);
    }
    assert_int_equal(stats.blocks, 4);
    assert_same(first, &f);
    tier_block_release(first);
    t->ops->destroy(t);
    t = tier_ram_create(size - 1, 0); /* a block that can never fit */
    assert_int_equal(put(t, "acme", 1, quality_exact), -TD_ERR_NOSPACE);
    t->ops->destroy(t);
}

/* A tenant pays for its quota with its own blocks. */
static void ram_keeps_quotas(void **state)
{
    (void)state;
    struct fixture_block f;
    struct tier_block *b = block_make(1, quality_exact, &f);
    uint64_t size = tier_block_size(b);
    struct tier *t = tier_ram_create(1 << 20, 3 * size);
    struct tier_stats stats;
    assert_int_equal(t->ops->put(t, "other", b, NULL, NULL), 0);
    for (uint64_t seed = 2; seed < 20; seed++)
        put(t, "acme", seed, quality_exact);
    t->ops->stats(t, &stats);
    assert_int_equal(stats.blocks, 4);
    struct store_block_info info;
    assert_int_equal(t->ops->find(t, "other", &f.id, &info), 0);
    t->ops->destroy(t);
    t = tier_ram_create(1 << 20, 2 * size); /* of whoever comes */
    for (uint64_t seed = 2; seed < 20; seed++) {
        put(t, "acme", seed, quality_exact);
        put(t, "other", seed, quality_exact);
    }
    t->ops->stats(t, &stats);
    assert_int_equal(stats.blocks, 4);
    tier_block_release(b);
    t->ops->destroy(t);
}

static void ram_replaces_by_quality(void **state)
{
    (void)state;
    struct tier *t = tier_ram_create(1 << 20, 0);
    struct kv_block_id id;
    struct store_block_info info;
    struct tier_stats stats;
    fixture_id(1, &id);
    assert_int_equal(put(t, "acme", 1, quality_lossy), 0);
    assert_int_equal(put(t, "acme", 1, quality_exact), 0);
    t->ops->find(t, "acme", &id, &info);
    assert_int_equal(info.quality.fidelity, KV_L0);
    assert_int_equal(put(t, "acme", 1, quality_lossy), 0); /* there is a better one: as good as done */
    t->ops->find(t, "acme", &id, &info);
    assert_int_equal(info.quality.fidelity, KV_L0);
    t->ops->stats(t, &stats);
    assert_int_equal(stats.blocks, 1);
    t->ops->destroy(t);
}

/* ---- the lane ----------------------------------------------------------------------------------------------- */

struct gate { /* a tier whose reads wait until they are let go */
    struct tier tier;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool open;
    int inside, ended;
};

static int gate_get(struct tier *t, const char *tenant, const struct kv_block_id *id, struct tier_block **out)
{
    struct gate *g = (struct gate *)t;
    (void)tenant;
    pthread_mutex_lock(&g->lock);
    g->inside++;
    pthread_cond_broadcast(&g->changed);
    while (!g->open)
        pthread_cond_wait(&g->changed, &g->lock);
    g->inside--;
    g->ended++;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
    *out = tier_block_create(0, 1);
    (*out)->block.id = *id;
    return 0;
}

static const struct tier_ops gate_ops = {.get = gate_get};

static void set_open(struct gate *g, bool open)
{
    pthread_mutex_lock(&g->lock);
    g->open = open;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static int inside(struct gate *g)
{
    pthread_mutex_lock(&g->lock);
    int count = g->inside;
    pthread_mutex_unlock(&g->lock);
    return count;
}

static void hung_tier_is_a_miss_and_heals(void **state)
{
    (void)state;
    struct gate g = {
        .tier = {&gate_ops}, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    struct lane *l = lane_create(&g.tier, "test", "tier=\"test\"", 2);
    struct kv_block_id id;
    struct tier_block *b = NULL;
    struct metric *sick = metric_gauge("tandem_kv_tier_sick", "tier=\"test\"", "");
    fixture_id(1, &id);
    assert_non_null(l);
    set_open(&g, true);
    assert_int_equal(lane_get(l, "acme", &id, 10000000, &b), 0);
    assert_memory_equal(&b->block.id, &id, sizeof id);
    tier_block_release(b);
    assert_false(lane_is_sick(l));

    set_open(&g, false);
    uint64_t tries = 0;
    for (; tries < 100 && !lane_is_sick(l); tries++) /* its thread may be too late to begin */
        assert_int_equal(lane_get(l, "acme", &id, 300000, &b), -TD_ERR_TIMEOUT);
    assert_true(lane_is_sick(l));
    assert_true(metric_value(sick) == 1);
    assert_int_equal(lane_timeouts(l), tries);
    assert_int_equal(lane_get(l, "acme", &id, 60000000, &b),
                     -TD_ERR_BUSY); /* at once: nobody else is left there */
    assert_int_equal(inside(&g), 1);

    set_open(&g, true);
    for (int i = 0; i < 100000 && lane_is_sick(l); i++)
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    assert_false(lane_is_sick(l));
    assert_true(metric_value(sick) == 0);
    assert_int_equal(lane_get(l, "acme", &id, 10000000, &b), 0);
    tier_block_release(b);
    lane_destroy(l);
}

struct asker {
    struct lane *lane;
    int status;
};
static void *ask(void *arg)
{
    struct asker *a = arg;
    struct kv_block_id id;
    struct tier_block *b = NULL;
    fixture_id(2, &id);
    a->status = lane_get(a->lane, "acme", &id, 30000000, &b);
    if (a->status == 0)
        tier_block_release(b);
    return NULL;
}

/* A request that never got a thread is no sign of sickness: only its caller goes without. */
static void waiting_in_line_is_not_sickness(void **state)
{
    (void)state;
    struct gate g = {
        .tier = {&gate_ops}, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    struct lane *l = lane_create(&g.tier, "test", "tier=\"test\"", 1);
    struct asker first = {l, 1};
    struct kv_block_id id;
    struct tier_block *b = NULL;
    pthread_t thread;
    fixture_id(3, &id);
    pthread_create(&thread, NULL, ask, &first);
    pthread_mutex_lock(&g.lock);
    while (g.inside == 0)
        pthread_cond_wait(&g.changed, &g.lock);
    pthread_mutex_unlock(&g.lock);
    assert_int_equal(lane_get(l, "acme", &id, 1000, &b), -TD_ERR_TIMEOUT);
    assert_false(lane_is_sick(l));
    set_open(&g, true);
    pthread_join(thread, NULL);
    assert_int_equal(first.status, 0);
    lane_destroy(l);
    assert_int_equal(g.ended, 1); /* what nobody waits for any more is not read */
}

/* ---- all together ------------------------------------------------------------------------------------------- */

struct house {
    char *directory;
    struct store_config config;
    struct store *store;
    struct tiers *tiers;
};

static void house_open(struct house *h, uint64_t ram_size)
{
    h->directory = fixture_directory();
    h->config = fixture_config(h->directory);
    h->store = fixture_open(&h->config);
    struct tiers_config config = {.store = h->store, .ram_size = ram_size, .threads = 2};
    assert_int_equal(tiers_create(&config, &h->tiers, NULL), 0);
}

static void house_close(struct house *h)
{
    tiers_destroy(h->tiers);
    store_close(h->store);
    fixture_remove(h->directory);
}

static int house_put(struct house *h, const char *tenant, uint64_t seed, struct kv_quality quality,
                     struct fixture_block *f)
{
    struct fixture_done done = {0, 1};
    struct tier_block *b = block_make(seed, quality, f);
    int rc = tiers_put(h->tiers, tenant, b, fixture_on_done, &done);
    tier_block_release(b);
    store_flush(h->store);
    if (rc == 0)
        assert_int_equal(done.calls, 1);
    return rc < 0 ? rc : done.status;
}

/* The tier that had it, -1 for a miss. */
static int house_get(struct house *h, const char *tenant, const struct fixture_block *f,
                     const struct tiers_want *want)
{
    struct tier_block *b;
    enum tier_kind from;
    struct tiers_found found;
    int rc = tiers_get(h->tiers, tenant, &f->id, want, &b, &from);
    if (rc < 0) {
        assert_int_equal(rc, -TD_ERR_NOTFOUND);
        return -1;
    }
    assert_same(b, f);
    tier_block_release(b);
    assert_int_equal(tiers_find(h->tiers, tenant, &f->id, want, &found), 0);
    return (int)from;
}

static void blocks_are_promoted(void **state)
{
    (void)state;
    struct house h;
    struct fixture_block f;
    struct tiers_found found;
    house_open(&h, 1 << 20);
    assert_int_equal(house_put(&h, "acme", 1, quality_exact, &f), 0);
    assert_int_equal(tiers_find(h.tiers, "acme", &f.id, &want_exact, &found), 0);
    assert_int_equal(found.tier, TIER_RAM);
    assert_int_equal(house_get(&h, "acme", &f, &want_exact), TIER_RAM);
    assert_int_equal(house_get(&h, "other", &f, &want_any), -1);

    tiers_destroy(h.tiers); /* an empty memory in front of the same disk */
    struct tiers_config config = {.store = h.store, .ram_size = 1 << 20};
    assert_int_equal(tiers_create(&config, &h.tiers, NULL), 0);
    assert_int_equal(tiers_find(h.tiers, "acme", &f.id, &want_exact, &found), 0);
    assert_int_equal(found.tier, TIER_DISK);
    assert_int_equal(house_get(&h, "acme", &f, &want_exact), TIER_DISK);
    assert_int_equal(house_get(&h, "acme", &f, &want_exact), TIER_RAM);
    house_close(&h);
}

/* A copy that is too poor is as good as none, also when a slower tier has a better one. */
static void poor_copies_are_passed_over(void **state)
{
    (void)state;
    struct house h;
    struct fixture_block lossy, exact;
    house_open(&h, 1 << 20);
    struct tier_block *b = block_make(1, quality_exact, &exact);
    assert_int_equal(store_put(h.store, "acme", &b->block, NULL, NULL), 0);
    tier_block_release(b);
    store_flush(h.store);
    assert_int_equal(house_put(&h, "acme", 1, quality_lossy, &lossy),
                     0); /* memory only: the disk keeps the better one */
    assert_int_equal(house_get(&h, "acme", &lossy, &want_any), TIER_RAM);
    assert_int_equal(house_get(&h, "acme", &exact, &want_exact), TIER_DISK);
    assert_int_equal(house_get(&h, "acme", &exact, &want_any),
                     TIER_RAM); /* the better one has taken its place */
    struct tiers_want more = want_any;
    more.layer_end++;
    assert_int_equal(house_get(&h, "acme", &exact, &more), -1);
    house_close(&h);
}

static void without_memory_there_is_the_disk(void **state)
{
    (void)state;
    struct house h;
    struct fixture_block f;
    struct tier_stats stats;
    house_open(&h, 0);
    assert_int_equal(house_put(&h, "acme", 1, quality_exact, &f), 0);
    assert_int_equal(house_get(&h, "acme", &f, &want_exact), TIER_DISK);
    assert_int_equal(house_get(&h, "acme", &f, &want_exact), TIER_DISK);
    tiers_stats(h.tiers, TIER_RAM, &stats);
    assert_int_equal(stats.blocks, 0);
    tiers_stats(h.tiers, TIER_DISK, &stats);
    assert_int_equal(stats.blocks, 1);
    assert_int_equal(stats.limit_bytes, h.config.limit_size);
    house_close(&h);
}

/* Erased is erased, in memory too, and for its tenant only. */
static void an_erased_tenant_is_nowhere(void **state)
{
    (void)state;
    struct house h;
    struct fixture_block f, other;
    struct tier_stats stats;
    uint8_t key[32];
    house_open(&h, 1 << 20);
    assert_int_equal(house_put(&h, "acme", 1, quality_exact, &f), 0);
    assert_int_equal(house_put(&h, "other", 2, quality_exact, &other), 0);
    assert_int_equal(tiers_erase_tenant(h.tiers, "nobody", NULL), -TD_ERR_NOTFOUND);
    assert_int_equal(tiers_erase_tenant(h.tiers, "acme", NULL), 0);
    store_chain_key(h.store, "acme", key, NULL); /* the name is used again */
    assert_int_equal(house_get(&h, "acme", &f, &want_any), -1);
    assert_int_equal(house_get(&h, "other", &other, &want_any), TIER_RAM);
    tiers_stats(h.tiers, TIER_RAM, &stats);
    assert_int_equal(stats.blocks, 1);
    house_close(&h);
}

/* Damage on the disk is found before a block gets into memory. */
static void damage_is_not_promoted(void **state)
{
    (void)state;
    struct house h;
    struct fixture_block f;
    struct tier_stats stats;
    char path[512], name[SEGMENT_NAME_SIZE];
    house_open(&h, 1 << 20);
    fixture_block_make(&f, 1);
    assert_int_equal(fixture_put(h.store, "acme", &f), 0);
    segment_name(1, name);
    snprintf(path, sizeof path, "%s/%s", h.directory, name);
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    fseek(file, 3 * RECORD_PAGE + 77, SEEK_SET);
    int byte = fgetc(file);
    fseek(file, 3 * RECORD_PAGE + 77, SEEK_SET);
    fputc(byte ^ 1, file);
    fclose(file);
    assert_int_equal(house_get(&h, "acme", &f, &want_any), -1);
    tiers_stats(h.tiers, TIER_RAM, &stats);
    assert_int_equal(stats.blocks, 0);
    tiers_stats(h.tiers, TIER_DISK, &stats);
    assert_int_equal(stats.damaged, 1);
    house_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ram_keeps_and_gives),
        cmocka_unit_test(ram_is_bounded),
        cmocka_unit_test(ram_keeps_quotas),
        cmocka_unit_test(ram_replaces_by_quality),
        cmocka_unit_test(hung_tier_is_a_miss_and_heals),
        cmocka_unit_test(waiting_in_line_is_not_sickness),
        cmocka_unit_test(blocks_are_promoted),
        cmocka_unit_test(poor_copies_are_passed_over),
        cmocka_unit_test(without_memory_there_is_the_disk),
        cmocka_unit_test(an_erased_tenant_is_nowhere),
        cmocka_unit_test(damage_is_not_promoted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
