/* prefix_cache: what is found, what is replaced, what goes first when pages run out, and that every reference is accounted for. A
 * naive twin (a flat array with time stamps, searched from end to end) says what each of many random calls must do. */
#include "kernels/prefix_cache.h"
#include <stdarg.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdlib.h>

static const struct kv_block_id root;

static struct kv_block_id id_of(uint32_t n)
{
    struct kv_block_id id = {{0}};
    store_le32(id.bytes, n * 2654435761u | 1u);
    store_le32(id.bytes + 8, n + 1);
    return id;
}

static struct prefix_entry entry_of(uint32_t n, uint32_t page, uint8_t fidelity, uint32_t layers)
{
    return (struct prefix_entry){id_of(n), page, {fidelity, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0}, layers};
}

struct fixture {
    struct page_pool *pool;
    struct prefix_cache *cache;
};

static struct fixture set_up(uint32_t pages)
{
    struct fixture f = {.pool = page_pool_create(pages)};
    f.cache = prefix_cache_create(f.pool);
    assert_non_null(f.cache);
    return f;
}

static void tear_down(struct fixture f)
{
    prefix_cache_destroy(f.cache);
    assert_int_equal(page_pool_free_count(f.pool), page_pool_count(f.pool));
    page_pool_destroy(f.pool);
}

/* A page whose only holder is the cache, under id n behind id parent (or the root). */
static uint32_t put_alone(struct fixture f, uint32_t n, const struct kv_block_id *parent)
{
    uint32_t page = prefix_cache_alloc(f.cache);
    assert_int_not_equal(page, PAGE_NONE);
    struct prefix_entry e = entry_of(n, page, KV_L0, 4);
    assert_int_equal(prefix_cache_put(f.cache, &e, parent), 0);
    page_pool_release(f.pool, page);
    return page;
}

static void finds_what_was_put(void **state)
{
    (void)state;
    struct fixture f = set_up(4);
    struct kv_block_id one = id_of(1), two = id_of(2);
    assert_null(prefix_cache_find(f.cache, &one));
    uint32_t page = put_alone(f, 1, &root);
    const struct prefix_entry *e = prefix_cache_find(f.cache, &one);
    assert_non_null(e);
    assert_int_equal(e->page, page);
    assert_int_equal(e->layers, 4);
    assert_null(prefix_cache_find(f.cache, &two));
    assert_int_equal(page_pool_references(f.pool, page), 1);
    assert_int_equal(prefix_cache_count(f.cache), 1);
    prefix_cache_clear(f.cache);
    assert_null(prefix_cache_find(f.cache, &one));
    assert_int_equal(prefix_cache_count(f.cache), 0);
    tear_down(f);
}

static void clearing_leaves_what_others_hold(void **state)
{
    (void)state;
    struct fixture f = set_up(4);
    struct kv_block_id one = id_of(1), two = id_of(2);
    put_alone(f, 1, &root);
    uint32_t page = put_alone(f, 2, &one);
    put_alone(f, 3, &two);
    page_pool_share(f.pool, page); /* a sequence runs on it */
    prefix_cache_clear(f.cache);
    assert_int_equal(prefix_cache_count(f.cache), 0);
    assert_int_equal(page_pool_free_count(f.pool), 3);
    assert_null(prefix_cache_find(f.cache, &two));
    put_alone(f, 3, &two);
    put_alone(f, 1, &root);
    assert_int_equal(prefix_cache_count(f.cache), 2);
    prefix_cache_clear(f.cache);
    page_pool_release(f.pool, page);
    assert_int_equal(page_pool_free_count(f.pool), 4);
    tear_down(f);
}

static void better_replaces_worse(void **state)
{
    (void)state;
    static const struct {
        uint8_t old_fidelity, new_fidelity;
        uint32_t old_layers, new_layers;
        bool replaced;
    } cases[] = {
        {KV_L1, KV_L0, 4, 4, true},  {KV_L0, KV_L1, 4, 4, false}, {KV_L0, KV_L0, 4, 4, false},
        {KV_L0, KV_L0, 2, 4, true},  {KV_L0, KV_L0, 4, 2, false}, {KV_L1, KV_L0, 4, 2, false},
        {KV_L0, KV_L1, 2, 4, false},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct fixture f = set_up(2);
        uint32_t a = page_pool_alloc(f.pool), b = page_pool_alloc(f.pool);
        struct prefix_entry old = entry_of(7, a, cases[i].old_fidelity, cases[i].old_layers);
        struct prefix_entry new = entry_of(7, b, cases[i].new_fidelity, cases[i].new_layers);
        assert_int_equal(prefix_cache_put(f.cache, &old, &root), 0);
        assert_int_equal(prefix_cache_put(f.cache, &new, &root), 0);
        assert_int_equal(prefix_cache_find(f.cache, &old.id)->page, cases[i].replaced ? b : a);
        assert_int_equal(page_pool_references(f.pool, a), cases[i].replaced ? 1 : 2);
        assert_int_equal(page_pool_references(f.pool, b), cases[i].replaced ? 2 : 1);
        page_pool_release(f.pool, a);
        page_pool_release(f.pool, b);
        tear_down(f);
    }
}

static void least_recently_used_goes_first(void **state)
{
    (void)state;
    struct fixture f = set_up(3);
    struct kv_block_id ids[4] = {id_of(0), id_of(1), id_of(2), id_of(3)};
    for (uint32_t n = 0; n < 3; n++)
        put_alone(f, n, &root);
    prefix_cache_find(f.cache, &ids[0]);
    put_alone(f, 3, &root);
    assert_null(prefix_cache_find(f.cache, &ids[1]));
    assert_non_null(prefix_cache_find(f.cache, &ids[0]));
    assert_non_null(prefix_cache_find(f.cache, &ids[2]));
    tear_down(f);
}

static void children_go_before_their_parents(void **state)
{
    (void)state;
    struct fixture f = set_up(3);
    struct kv_block_id ids[3] = {id_of(0), id_of(1), id_of(2)};
    put_alone(f, 0, &root);
    put_alone(f, 1, &ids[0]);
    put_alone(f, 2, &ids[1]);
    for (uint32_t n = 3;
         n-- > 0;) { /* the last of the chain is the most recently used, and goes all the same */
        for (uint32_t i = 0; i <= n; i++)
            assert_non_null(prefix_cache_find(f.cache, &ids[i]));
        assert_int_not_equal(prefix_cache_alloc(f.cache), PAGE_NONE);
        assert_null(prefix_cache_find(f.cache, &ids[n]));
    }
    assert_int_equal(prefix_cache_alloc(f.cache), PAGE_NONE);
    for (uint32_t page = 0; page < 3; page++)
        page_pool_release(f.pool, page);
    tear_down(f);
}

/* Who takes an entry out has its page; looking without a mark keeps nothing from going. */
static void what_goes_next_can_be_taken_out(void **state)
{
    (void)state;
    struct fixture f = set_up(3);
    uint32_t pages[3];
    for (uint32_t n = 0; n < 3; n++)
        pages[n] = put_alone(f, n, &root);
    struct kv_block_id zero = id_of(0), one = id_of(1), none = id_of(9);
    struct prefix_entry out;
    assert_int_equal(prefix_cache_peek(f.cache, &zero)->page, pages[0]);
    assert_null(prefix_cache_peek(f.cache, &none));
    prefix_cache_find(f.cache, &one); /* marked: goes last */
    static const uint32_t order[] = {0, 2, 1};
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(prefix_cache_evict(f.cache, &out));
        struct kv_block_id id = id_of(order[i]);
        assert_memory_equal(&out.id, &id, sizeof id);
        assert_int_equal(out.page, pages[order[i]]);
        assert_int_equal(page_pool_references(f.pool, out.page), 1);
        assert_null(prefix_cache_peek(f.cache, &id));
    }
    assert_int_equal(page_pool_free_count(f.pool), 0);
    assert_false(prefix_cache_evict(f.cache, &out));
    for (uint32_t n = 0; n < 3; n++)
        page_pool_release(f.pool, pages[n]);
    tear_down(f);
}

static void held_pages_stay_and_keep_their_ancestors(void **state)
{
    (void)state;
    struct fixture f = set_up(4);
    struct kv_block_id ids[3] = {id_of(0), id_of(1), id_of(2)};
    put_alone(f, 0, &root);
    uint32_t held = put_alone(f, 1, &ids[0]);
    put_alone(f, 2, &ids[1]);
    page_pool_share(f.pool, held);
    assert_int_equal(prefix_cache_available(f.cache), 2); /* one free, and the child of what is held */
    uint32_t pages[2] = {prefix_cache_alloc(f.cache), prefix_cache_alloc(f.cache)};
    assert_int_not_equal(pages[1], PAGE_NONE);
    assert_int_equal(prefix_cache_alloc(f.cache), PAGE_NONE);
    assert_non_null(prefix_cache_find(f.cache, &ids[0]));
    assert_non_null(prefix_cache_find(f.cache, &ids[1]));
    assert_null(prefix_cache_find(f.cache, &ids[2]));
    page_pool_release(f.pool, held);
    assert_int_equal(prefix_cache_available(f.cache), 2);
    page_pool_release(f.pool, pages[0]);
    page_pool_release(f.pool, pages[1]);
    tear_down(f);
}

/* --- against a naive twin ------------------------------------------------------------------------- */

#define TWIN_PAGES 24
#define TWIN_IDS   40

struct twin {
    struct {
        bool used;
        uint32_t page, parent; /* parent: an id that is in the twin, or TWIN_IDS */
        uint64_t time;
    } ids[TWIN_IDS];
    uint64_t clock;
};

static bool twin_has_child(const struct twin *t, uint32_t id)
{
    for (uint32_t i = 0; i < TWIN_IDS; i++)
        if (t->ids[i].used && t->ids[i].parent == id)
            return true;
    return false;
}

/* The id that an alloc must evict: TWIN_IDS if none can go. */
static uint32_t twin_victim(const struct twin *t, const struct page_pool *pool)
{
    uint32_t victim = TWIN_IDS;
    for (uint32_t i = 0; i < TWIN_IDS; i++)
        if (t->ids[i].used && page_pool_references(pool, t->ids[i].page) == 1 && !twin_has_child(t, i) &&
            (victim == TWIN_IDS || t->ids[i].time < t->ids[victim].time))
            victim = i;
    return victim;
}

static void compare(struct fixture f, struct twin *t)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < TWIN_IDS; i++)
        count += t->ids[i].used;
    assert_int_equal(prefix_cache_count(f.cache), count);
    struct twin copy = *t; /* what could an alloc get, one after the other? */
    uint32_t available = page_pool_free_count(f.pool);
    for (uint32_t victim; (victim = twin_victim(&copy, f.pool)) < TWIN_IDS; available++)
        copy.ids[victim].used = false;
    assert_int_equal(prefix_cache_available(f.cache), available);
}

static void twin_alloc(struct fixture f, struct twin *t, uint32_t *held, uint32_t *held_count)
{
    uint32_t victim = page_pool_free_count(f.pool) ? TWIN_IDS : twin_victim(t, f.pool);
    bool possible = page_pool_free_count(f.pool) || victim < TWIN_IDS;
    uint32_t page = prefix_cache_alloc(f.cache);
    assert_int_equal(page != PAGE_NONE, possible);
    if (victim < TWIN_IDS)
        t->ids[victim].used = false;
    if (possible)
        held[(*held_count)++] = page;
}

static void agrees_with_a_naive_twin(void **state)
{
    (void)state;
    struct fixture f = set_up(TWIN_PAGES);
    static struct twin t;
    static uint32_t held[TWIN_PAGES * 4];
    uint32_t held_count = 0;
    srand(11);
    for (uint32_t round = 0; round < 20000; round++) {
        uint32_t id = (uint32_t)rand() % TWIN_IDS, action = (uint32_t)rand() % 8;
        struct kv_block_id name = id_of(id);
        if (action < 3) {
            twin_alloc(f, &t, held, &held_count);
        } else if (action < 5 &&
                   held_count > 0) { /* publish the newest page behind a random parent, and let go of it */
            uint32_t page = held[--held_count], parent = (uint32_t)rand() % (TWIN_IDS + 1);
            struct kv_block_id above = parent < TWIN_IDS && parent != id ? id_of(parent) : root;
            struct prefix_entry e = entry_of(id, page, KV_L0, 4);
            bool in_use = false; /* a page is put under one id only */
            for (uint32_t i = 0; i < TWIN_IDS; i++)
                in_use |= t.ids[i].used && t.ids[i].page == page;
            if (!in_use) {
                if (!t.ids[id].used) {
                    t.ids[id].used = true;
                    t.ids[id].page = page;
                    t.ids[id].parent =
                        parent < TWIN_IDS && parent != id && t.ids[parent].used ? parent : TWIN_IDS;
                }
                t.ids[id].time = ++t.clock;
                assert_int_equal(prefix_cache_put(f.cache, &e, &above), 0);
            }
            page_pool_release(f.pool, page);
        } else if (action == 5) {
            const struct prefix_entry *e = prefix_cache_find(f.cache, &name);
            assert_int_equal(e != NULL, t.ids[id].used);
            if (e) {
                t.ids[id].time = ++t.clock;
                if (held_count < TD_COUNT(held) && rand() % 2) { /* a sequence that hits it */
                    page_pool_share(f.pool, e->page);
                    held[held_count++] = e->page;
                }
            }
        } else if (held_count > 0) {
            uint32_t at = (uint32_t)rand() % held_count;
            page_pool_release(f.pool, held[at]);
            held[at] = held[--held_count];
        }
        compare(f, &t);
    }
    while (held_count > 0)
        page_pool_release(f.pool, held[--held_count]);
    tear_down(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_what_was_put),
        cmocka_unit_test(clearing_leaves_what_others_hold),
        cmocka_unit_test(better_replaces_worse),
        cmocka_unit_test(least_recently_used_goes_first),
        cmocka_unit_test(children_go_before_their_parents),
        cmocka_unit_test(what_goes_next_can_be_taken_out),
        cmocka_unit_test(held_pages_stay_and_keep_their_ancestors),
        cmocka_unit_test(agrees_with_a_naive_twin),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
