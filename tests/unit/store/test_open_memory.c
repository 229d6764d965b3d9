/* A store that is opened without memory: each allocation of the opening thread fails once. It is refused with a line, or opens all the same; whatever it
 * did, nothing that was in it is lost. */
#include "../no_memory.h"
#include "shared/log.h"
#include "store/conversation.h"
#include "store/tiers.h"
#include "store_fixture.h"

enum { BLOCKS = 4 };

static struct fixture_block blocks[BLOCKS];

static void assert_whole(struct store *s)
{
    for (int i = 0; i < BLOCKS; i++)
        assert_int_equal(fixture_block_reads(s, "acme", &blocks[i]), i != 1);
    uint64_t version;
    char *text = fixture_conv_get(s, "acme", "ann", "c", &version);
    assert_non_null(text);
    assert_string_equal(text, "text");
    assert_int_equal(version, 1);
    free(text);
    assert_true(store_is_pinned(s, "acme", &blocks[2].id));
}

static void fill(const struct store_config *c)
{
    struct store *s = fixture_open(c);
    for (int i = 0; i < BLOCKS; i++) {
        fixture_block_make(&blocks[i], 10 + (uint64_t)i);
        assert_int_equal(fixture_put(s, "acme", &blocks[i]), 0);
    }
    assert_int_equal(store_pin(s, "acme", &blocks[2].id, true, NULL), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "text"), 0);
    assert_int_equal(store_delete(s, "acme", &blocks[1].id, NULL, NULL), 0);
    store_flush(s);
    store_close(s);
}

/* Returns how many allocations there are. */
static int open_without(const struct store_config *c, bool index_gone)
{
    bool came = true;
    int n = 1;
    for (; came; n++) {
        struct store *s = NULL;
        struct td_error err = {0};
        if (index_gone)
            index_set_aside(c->directory, false);
        no_memory_at(n);
        int rc = store_open(c, &s, &err);
        came = no_memory_came();
        if (rc < 0) {
            assert_true(came);
            if (rc != -TD_ERR_NOMEM || !err.text[0])
                fail_msg("allocation %d: %s: %s", n, td_status_text(rc), err.text);
            s = fixture_open(c);
        }
        assert_whole(s);
        store_close(s);
    }
    return n - 2;
}

static void opening_without_memory_loses_nothing(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    c.demotion = fixture_demotion("acme");
    c.segment_size = STORE_SEGMENT_SIZE_MIN; /* several */
    fill(&c);
    int with_index = open_without(&c, false), without = open_without(&c, true);
    assert_true(with_index > 10 && without > 10);
    fixture_remove(dir);
}

/* What a node makes beside it: there, or not there and nothing left of it. */
static void parts_without_memory(void **state)
{
    (void)state;
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    int made = 0;
    bool came = true;
    for (int n = 1; came; n++) {
        no_memory_at(n);
        struct conv_index *x = conv_index_create(s, 100);
        came = no_memory_came();
        assert_int_equal(x != NULL, !came);
        made += x != NULL;
        conv_index_destroy(x);
    }
    came = true;
    for (int n = 1; came; n++) {
        struct tiers_config config = {.store = s, .ram_size = 1 << 20, .threads = 2};
        struct tiers *t = NULL;
        struct td_error err = {0};
        no_memory_at(n);
        int rc = tiers_create(&config, &t, &err);
        came = no_memory_came();
        assert_true(rc == 0 || (came && rc == -TD_ERR_NOMEM)); /* a metric may be missed */
        made += rc == 0 && !came;
        tiers_destroy(t);
    }
    assert_int_equal(made, 2);
    store_close(s);
    fixture_remove(dir);
}

/* A block is in memory or it is not. */
static void a_tier_without_memory(void **state)
{
    (void)state;
    struct tier *t;
    bool came = true;
    int n = 1;
    for (; came; n++) {
        no_memory_at(n);
        t = tier_ram_create(1 << 20, 0);
        came = no_memory_came();
        assert_true(t || came); /* a metric may be missed */
        if (t)
            t->ops->destroy(t);
    }
    assert_true(n > 3);
    came = true;
    for (n = 1; came; n++) {
        struct tier_block *b = tier_block_create(FIXTURE_LAYERS, 2u * FIXTURE_LAYERS * FIXTURE_PIECE), *got;
        struct tier_stats stats;
        b->block = blocks[0].block;
        b->block.pieces = b->pieces;
        for (uint32_t i = 0; i < 2 * FIXTURE_LAYERS; i++) {
            memcpy(b->data + i * FIXTURE_PIECE, blocks[0].pieces[i].data, FIXTURE_PIECE);
            b->pieces[i] = (struct span){b->data + i * FIXTURE_PIECE, FIXTURE_PIECE};
        }
        t = tier_ram_create(1 << 20, 0);
        no_memory_at(n);
        int rc = t->ops->put(t, "acme", b, NULL, NULL);
        came = no_memory_came();
        assert_int_equal(rc, came ? -TD_ERR_NOMEM : 0);
        t->ops->stats(t, &stats);
        assert_int_equal(stats.blocks, !came);
        assert_int_equal(t->ops->get(t, "acme", &blocks[0].id, &got), came ? -TD_ERR_NOTFOUND : 0);
        if (!came)
            tier_block_release(got);
        tier_block_release(b);
        t->ops->destroy(t);
    }
    assert_true(n > 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(opening_without_memory_loses_nothing),
        cmocka_unit_test(parts_without_memory),
        cmocka_unit_test(a_tier_without_memory),
    };
    log_set_level((enum log_level)(LOG_ERROR + 1)); /* trouble is the point here */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
