/* persist and loader: a block's values through encoder, store and decoder and back, bit for bit; acknowledgements; bounds. */
#include "cloud/loader.h"
#include "cloud/persist.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#define LAYERS 3
#define VALUES (2 * 64 * 16) /* of one piece */

static const struct kv_shape shape = {LAYERS, 2, 16};

struct fixture {
    char directory[64];
    struct store *store;
    struct tiers *tiers;
};

static uint16_t persist_values[PERSIST_BUFFERS * LAYERS * 2 * VALUES],
    loader_values[LOADER_BUFFERS * LAYERS * 2 * VALUES];

static void no_wake(void *ctx)
{
    (void)ctx;
}

static void pause_a_moment(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

static void open_store(struct fixture *f)
{
    struct td_error err;
    struct store_config config = {.directory = f->directory, .segment_size = 1u << 20, .ballast_size = 4096};
    if (store_open(&config, &f->store, &err) < 0)
        fail_msg("%s", err.text);
    if (tiers_create(&(struct tiers_config){.store = f->store, .threads = 2}, &f->tiers, &err) < 0)
        fail_msg("%s", err.text);
}

static void close_store(struct fixture *f)
{
    tiers_destroy(f->tiers);
    store_close(f->store);
}

static struct fixture set_up(void)
{
    struct fixture f = {.directory = "/tmp/tandem-persist-XXXXXX"};
    assert_int_equal(crypto_init(), 0);
    assert_non_null(mkdtemp(f.directory));
    open_store(&f);
    return f;
}

static void tear_down(struct fixture *f)
{
    char command[128];
    close_store(f);
    snprintf(command, sizeof command, "rm -rf %s", f->directory);
    assert_int_equal(system(command), 0);
}

static uint16_t value_of(uint32_t seed, size_t i)
{
    return f32_to_f16((float)((i * 131 + seed * 17) % 3000) / 16.0f - 90.0f);
}

static void fill(struct persist_block *b, uint32_t seed)
{
    uint16_t *values = b->values;
    *b = (struct persist_block){.tenant = "acme",
                                .quality = {KV_L0, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0},
                                .block_index = seed,
                                .owner = seed + 1000,
                                .values = values};
    store_le32(b->id.bytes, seed + 1);
    store_le32(b->parent.bytes, seed);
    for (size_t i = 0; i < LAYERS * 2 * VALUES; i++)
        values[i] = value_of(seed, i);
}

static struct persist_block *take(struct persist *p)
{
    struct persist_block *b = NULL;
    for (int i = 0; i < 100000 && !(b = persist_take(p)); i++)
        pause_a_moment();
    assert_non_null(b);
    return b;
}

static void blocks_make_the_round_trip(void **state)
{
    (void)state;
    enum { COUNT = 20 };
    struct fixture f = set_up();
    struct persist *p = persist_create(f.tiers, &shape, persist_values, no_wake, NULL);
    for (uint32_t seed = 0; seed < COUNT; seed++) {
        struct persist_block *b = take(p);
        fill(b, seed);
        persist_submit(p, b);
    }
    uint64_t owner;
    int status;
    for (uint32_t seed = 0; seed < COUNT; seed++) { /* the store has one writer: they come in order */
        for (int i = 0; i < 100000 && !persist_pop(p, &owner, &status); i++)
            pause_a_moment();
        assert_int_equal(owner, seed + 1000);
        assert_int_equal(status, 0);
    }
    assert_false(persist_pop(p, &owner, &status));
    persist_destroy(p);
    close_store(&f);
    open_store(&f);

    struct loader *l = loader_create(f.tiers, &shape, loader_values, no_wake, NULL);
    for (uint32_t seed = 0; seed < COUNT; seed++) {
        struct loader_block *b = loader_take(l);
        strcpy(b->tenant, "acme");
        memset(&b->id, 0, sizeof b->id);
        store_le32(b->id.bytes, seed + 1);
        b->block_index = seed;
        b->accept = KV_ACCEPT_EXACT;
        b->numerics = KV_NUMERICS_CPU_V1;
        b->owner = seed;
        loader_submit(l, b);
        for (int i = 0; i < 100000 && !(b = loader_pop(l)); i++)
            pause_a_moment();
        assert_non_null(b);
        assert_int_equal(b->status, 0);
        assert_int_equal(b->owner, seed);
        assert_int_equal(b->quality.fidelity, KV_L0);
        assert_int_equal(b->quality.numerics, KV_NUMERICS_CPU_V1);
        for (size_t i = 0; i < LAYERS * 2 * VALUES; i++)
            assert_int_equal(b->values[i], value_of(seed, i));
        loader_release(l, b);
    }
    loader_destroy(l);
    tear_down(&f);
}

static void what_is_not_there_is_a_miss(void **state)
{
    (void)state;
    struct fixture f = set_up();
    struct persist *p = persist_create(f.tiers, &shape, persist_values, no_wake, NULL);
    struct persist_block *block = take(p);
    fill(block, 4);
    persist_submit(p, block);
    persist_destroy(p); /* waits for the acknowledgement */
    struct loader *l = loader_create(f.tiers, &shape, loader_values, no_wake, NULL);
    static const struct {
        const char *tenant;
        uint32_t id, index;
        bool found;
    } cases[] = {{"acme", 5, 4, true}, {"acme", 6, 4, false}, {"other", 5, 4, false}, {"acme", 5, 3, false}};
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct loader_block *b = loader_take(l);
        strcpy(b->tenant, cases[i].tenant);
        memset(&b->id, 0, sizeof b->id);
        store_le32(b->id.bytes, cases[i].id);
        b->block_index = cases[i].index;
        b->accept = KV_ACCEPT_EXACT;
        b->numerics = KV_NUMERICS_CPU_V1;
        loader_submit(l, b);
        for (int wait = 0; wait < 100000 && !(b = loader_pop(l)); wait++)
            pause_a_moment();
        assert_non_null(b);
        assert_int_equal(b->status == 0, cases[i].found);
        loader_release(l, b);
    }
    loader_destroy(l);
    tear_down(&f);
}

static void buffers_are_bounded(void **state)
{
    (void)state;
    struct fixture f = set_up();
    struct persist *p = persist_create(f.tiers, &shape, persist_values, no_wake, NULL);
    struct persist_block *taken[PERSIST_BUFFERS];
    for (int i = 0; i < PERSIST_BUFFERS; i++)
        assert_non_null(taken[i] = persist_take(p));
    assert_null(persist_take(p));
    persist_untake(p, taken[0]);
    assert_non_null(taken[0] = persist_take(p));
    assert_null(persist_take(p));
    for (int i = 0; i < PERSIST_BUFFERS; i++)
        persist_untake(p, taken[i]);
    uint32_t submitted = 0; /* acknowledgements that nobody takes are bounded too */
    for (int idle = 0; idle < 2000 && submitted <= PERSIST_UNACKNOWLEDGED;) {
        struct persist_block *b = persist_take(p);
        if (!b) {
            pause_a_moment();
            idle += submitted == PERSIST_UNACKNOWLEDGED;
            continue;
        }
        fill(b, submitted++);
        persist_submit(p, b);
    }
    assert_int_equal(submitted, PERSIST_UNACKNOWLEDGED);
    persist_destroy(p);
    struct loader *l = loader_create(f.tiers, &shape, loader_values, no_wake, NULL);
    struct loader_block *loading[LOADER_BUFFERS];
    for (int i = 0; i < LOADER_BUFFERS; i++)
        assert_non_null(loading[i] = loader_take(l));
    assert_null(loader_take(l));
    loader_release(l, loading[0]);
    assert_non_null(loader_take(l));
    loader_destroy(l);
    tear_down(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_make_the_round_trip),
        cmocka_unit_test(what_is_not_there_is_a_miss),
        cmocka_unit_test(buffers_are_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
