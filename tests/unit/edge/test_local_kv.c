/* local_kv: what was published is found under the same chain and no other, is shared, and gives way when room is needed. */
#include "edge/local_kv.h"
#include "shared/crypto.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static const uint8_t fingerprint[TD_HASH_SIZE] = {1}, layout[TD_HASH_SIZE] = {2};
static const uint8_t key_a[32] = {3}, key_b[32] = {4};
static int32_t ids[4 * KV_BLOCK_TOKENS];

static int set_up(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_COUNT(ids); i++)
        ids[i] = (int32_t)(i * 7 % 1000);
    return crypto_init();
}

static void chain_goes_on_from_any_block(void **state)
{
    (void)state;
    struct kv_block_id whole[4], parts[4], id, root = {{0}};
    local_kv_chain(key_a, fingerprint, layout, NULL, ids, TD_COUNT(ids), whole);
    local_kv_chain(key_a, fingerprint, layout, NULL, ids, 2 * KV_BLOCK_TOKENS + 63,
                   parts); /* two whole blocks */
    local_kv_chain(key_a, fingerprint, layout, &parts[1], ids + 2 * KV_BLOCK_TOKENS, 2 * KV_BLOCK_TOKENS,
                   parts + 2);
    assert_memory_equal(whole, parts, sizeof whole);
    kv_block_id_next(key_a, &root, fingerprint, layout, ids, &id);
    assert_memory_equal(&id, &whole[0], sizeof id);
}

static void published_blocks_are_held_in_order(void **state)
{
    (void)state;
    struct local_kv *kv = local_kv_create(8);
    struct kv_block_id chain[4], other[4];
    local_kv_chain(key_a, fingerprint, layout, NULL, ids, TD_COUNT(ids), chain);
    local_kv_chain(key_b, fingerprint, layout, NULL, ids, TD_COUNT(ids), other);
    uint32_t pages[4], taken[4];
    for (uint32_t i = 0; i < 4; i++)
        pages[i] = local_kv_alloc(kv);
    assert_int_equal(local_kv_publish(kv, chain, 0, pages[0], 3, KV_NUMERICS_CPU_V1), 0);
    assert_int_equal(local_kv_publish(kv, chain, 2, pages[2], 3, KV_NUMERICS_CPU_V1), 0);
    assert_int_equal(local_kv_held(kv, chain, 4, 3), 1); /* block 1 is missing */
    assert_int_equal(local_kv_publish(kv, chain, 1, pages[1], 3, KV_NUMERICS_CPU_V1), 0);
    assert_int_equal(local_kv_held(kv, chain, 4, 3), 3);
    assert_int_equal(local_kv_held(kv, chain, 2, 3), 2);
    assert_int_equal(local_kv_held(kv, other, 4, 3), 0); /* another principal's key: nothing */
    assert_int_equal(local_kv_take(kv, chain, 4, 3, taken), 3);
    assert_memory_equal(taken, pages, 3 * sizeof *taken);
    for (uint32_t i = 0; i < 4; i++)
        local_kv_release(kv, pages[i]);
    for (uint32_t i = 0; i < 3; i++)
        local_kv_release(kv, taken[i]);
    assert_int_equal(local_kv_held(kv, chain, 4, 3), 3); /* the cache itself holds them */
    local_kv_destroy(kv);
}

static void taken_pages_are_never_given_away(void **state)
{
    (void)state;
    struct local_kv *kv = local_kv_create(2);
    struct kv_block_id chain[4];
    local_kv_chain(key_a, fingerprint, layout, NULL, ids, TD_COUNT(ids), chain);
    uint32_t page = local_kv_alloc(kv), taken, second;
    assert_int_equal(local_kv_publish(kv, chain, 0, page, 3, KV_NUMERICS_CPU_V1), 0);
    local_kv_release(kv, page);
    assert_int_equal(local_kv_take(kv, chain, 1, 3, &taken), 1);
    assert_int_not_equal(second = local_kv_alloc(kv), PAGE_NONE);
    assert_int_equal(local_kv_alloc(kv), PAGE_NONE);
    local_kv_release(kv, taken);
    assert_int_equal(local_kv_alloc(kv), page); /* now it may go */
    assert_int_equal(local_kv_held(kv, chain, 1, 3), 0);
    local_kv_release(kv, second);
    local_kv_release(kv, page);
    local_kv_destroy(kv);
}

static void depth_falls_along_the_chain(void **state)
{
    (void)state;
    struct kv_block_id chain[4];
    uint16_t depths[4];
    uint32_t unread;
    struct local_kv *kv = local_kv_create(8);
    local_kv_chain(key_a, fingerprint, layout, NULL, ids, TD_COUNT(ids), chain);
    static const uint32_t layers[] = {9, 4, 6};
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(local_kv_publish(kv, chain, i, local_kv_alloc(kv), layers[i], KV_NUMERICS_CPU_V1),
                         0);
    assert_int_equal(local_kv_depths(kv, chain, 4, depths, &unread), 3);
    assert_int_equal(unread, 0);
    assert_int_equal(depths[0], 9);
    assert_int_equal(depths[1], 4);
    assert_int_equal(depths[2], 4); /* its own 6 are of no use beyond those of the block before */
    assert_int_equal(depths[3], 0);
    assert_int_equal(local_kv_held(kv, chain, 4, 5), 1);
    assert_int_equal(local_kv_held(kv, chain, 4, 4), 3);
    uint32_t deeper = local_kv_alloc(kv), taken;
    assert_int_equal(local_kv_publish(kv, chain, 1, deeper, 8, KV_NUMERICS_CPU_V1), 0); /* replaces */
    assert_int_equal(local_kv_publish(kv, chain, 1, local_kv_alloc(kv), 2, KV_NUMERICS_CPU_V1),
                     0); /* does not */
    assert_int_equal(local_kv_depths(kv, chain, 4, depths, &unread), 3);
    assert_int_equal(depths[2], 6);
    assert_int_equal(local_kv_take(kv, &chain[1], 1, 5, &taken), 1);
    assert_int_equal(taken, deeper);
    local_kv_destroy(kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chain_goes_on_from_any_block),
        cmocka_unit_test(published_blocks_are_held_in_order),
        cmocka_unit_test(taken_pages_are_never_given_away),
        cmocka_unit_test(depth_falls_along_the_chain),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
