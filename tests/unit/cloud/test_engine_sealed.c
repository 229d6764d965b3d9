/* engine: KV that this node sealed for a device, and gets back (FETCH). What it was sealed as it is used as; whatever is not just that is a miss, and
 * computed: never wrong KV. */
#include "edge_scene.h"

#define HELD 192 /* tokens of PROMPT in whole blocks */

/* A piece of the scene's device, which holds all layers, as this node would have sealed it. malloc'ed. */
struct sealing {
    struct kv_seal seal;
    uint8_t key[CRYPTO_KEY_SIZE], fingerprint[TD_HASH_SIZE], layout[TD_HASH_SIZE];
    int32_t ids[PROMPT];
    uint8_t codec;
    uint32_t named_as; /* blocks further on */
};

static struct sealing sealing_of(const struct scene *s)
{
    struct sealing how = {.seal = *rig_seal(), .codec = KV_L0};
    const struct seq_model *m = &s->rig->engine->model;
    kv_seal_name_key(&how.seal, "acme", "ann", how.key);
    memcpy(how.fingerprint, m->fingerprint, TD_HASH_SIZE);
    memcpy(how.layout, m->layout_hash, TD_HASH_SIZE);
    memcpy(how.ids, s->prompt, sizeof how.ids);
    return how;
}

static struct kv_block_id name_of(const struct sealing *how, uint32_t block)
{
    struct kv_block_id id = {{0}};
    for (uint32_t i = 0; i <= block; i++) {
        struct kv_block_id parent = id;
        kv_block_id_next(how->key, &parent, how->fingerprint, how->layout, how->ids + i * KV_BLOCK_TOKENS,
                         &id);
    }
    return id;
}

static uint8_t *sealed_piece(struct scene *s, const struct sealing *how, uint32_t block, uint32_t i,
                             size_t *size)
{
    static const uint8_t salt[KV_SEAL_SALT_SIZE] = {1};
    uint32_t named = (block + how->named_as) % (HELD / KV_BLOCK_TOKENS);
    struct kv_block_id name = name_of(how, named);
    size_t plain_size;
    uint8_t *plain = rig_piece(&s->edge, block, i / 2, i % 2, how->codec, 0, PROMPT, &plain_size);
    uint8_t *out = malloc(plain_size + KV_SEAL_OVERHEAD);
    int64_t rc = kv_seal_piece(&how->seal, salt, &name, (struct span){plain, plain_size}, out,
                               plain_size + KV_SEAL_OVERHEAD);
    assert_true(rc > 0);
    *size = (size_t)rc;
    free(plain);
    return out;
}

static void plan_sealed(struct scene *s, struct engine_open open)
{
    static const struct plan_range ranges[] = {{0, HELD, 2, KV_SEALED, 0}, {HELD, PROMPT - HELD, 0, 0, 0}};
    client_send(s->rig, &s->client, open);
    plan(s, 1, ranges, 2);
    start(s, rig_greedy(REPLY));
}

static void open_and_plan(struct scene *s, enum kv_accept accept)
{
    struct engine_open open = client_open_of(&s->client, s->prompt, PROMPT, 0);
    open.accept = accept;
    plan_sealed(s, open);
}

static size_t give_back(struct scene *s, const struct sealing *how)
{
    size_t total = 0;
    for (uint32_t block = 0; block < HELD / KV_BLOCK_TOKENS; block++)
        for (uint32_t i = 0; i < 2 * s->edge.layers; i++) {
            size_t size;
            uint8_t *piece = sealed_piece(s, how, block, i, &size);
            assert_int_equal(engine_kv(s->rig->engine, s->client.sequence, 1, block, piece, size), 0);
            total += size;
        }
    return total;
}

static struct scene *scene_all_layers(struct rig_options options)
{
    struct scene *s = scene_open(2, options);
    assert_int_equal(s->rig->model->params.layer_count, 2);
    return s;
}

static void what_was_sealed_is_used(void **state)
{
    (void)state;
    for (int device = 0; device < 2; device++) {
        struct scene *s = scene_all_layers((struct rig_options){.device = device == 1});
        struct sealing how = sealing_of(s);
        open_and_plan(s, KV_ACCEPT_EXACT);
        size_t size = give_back(s, &how);
        finish(s);
        assert_int_equal(s->client.done_event.done.recomputed_tokens, 0);
        assert_int_equal(s->client.done_event.done.prefill_tokens, PROMPT - HELD);
        assert_int_equal(s->client.done_event.done.uplink_size, size);
        assert_int_equal(s->client.consumed_size, size);
        scene_close(s);
    }
}

/* It is the principal's own from then on, and nobody else's. */
static void what_comes_back_stays_in_its_namespace(void **state)
{
    (void)state;
    struct scene *s = scene_all_layers((struct rig_options){0});
    struct sealing how = sealing_of(s);
    open_and_plan(s, KV_ACCEPT_EXACT);
    give_back(s, &how);
    finish(s);
    struct client again;
    for (int other = 0; other < 2; other++) {
        struct engine_open open = client_open_of(&again, s->prompt, PROMPT, 0);
        if (other) {
            strcpy(open.principal, "bob");
            kv_principal_key(open.shared_key, open.principal, open.own_key);
        }
        client_send(s->rig, &again, open);
        rig_until(s->rig, again.opened);
        assert_int_equal(again.open_event.opened.cached_tokens, other ? 0 : HELD);
        engine_cancel(s->rig->engine, again.sequence, false, 0);
    }
    scene_close(s);
}

enum change {
    OTHER_PRINCIPAL,
    OTHER_TENANT,
    OTHER_MODEL,
    OTHER_LAYOUT,
    OTHER_TOKENS,
    OTHER_BLOCK,
    OTHER_KEY,
    TOO_POOR,
    CHANGES
};

static void change(struct sealing *how, enum change what)
{
    static const uint8_t other_master[CRYPTO_KEY_SIZE] = {8};
    switch (what) {
    case OTHER_PRINCIPAL:
        kv_seal_name_key(&how->seal, "acme", "bob", how->key);
        break;
    case OTHER_TENANT:
        kv_seal_name_key(&how->seal, "globex", "ann", how->key);
        break;
    case OTHER_MODEL:
        how->fingerprint[31] ^= 1;
        break;
    case OTHER_LAYOUT:
        how->layout[0] ^= 1;
        break;
    case OTHER_TOKENS:
        how->ids[0] ^= 1;
        break;
    case OTHER_BLOCK:
        how->named_as = 1;
        break;
    case OTHER_KEY:
        kv_seal_derive(other_master, &how->seal);
        break;
    case TOO_POOR:
        how->codec = KV_L1;
        break;
    case CHANGES:
        break;
    }
}

static void whatever_else_is_computed(void **state)
{
    (void)state;
    struct scene *s = scene_all_layers((struct rig_options){0});
    for (int what = 0; what < CHANGES; what++) {
        struct sealing how = sealing_of(s);
        change(&how, (enum change)what);
        struct engine_open open = client_open_of(&s->client, s->prompt, PROMPT, 0);
        open.no_cache = true;
        plan_sealed(s, open);
        size_t size = give_back(s, &how);
        finish(s);
        if (s->client.done_event.done.recomputed_tokens != HELD)
            fail_msg("change %d: %u tokens were computed", what, s->client.done_event.done.recomputed_tokens);
        assert_int_equal(s->client.consumed_size, size);
    }
    scene_close(s);
}

/* One bit of one piece; a piece in the place of another. Only their blocks are computed, or what hangs behind them. */
static void one_bad_piece_costs_its_block(void **state)
{
    (void)state;
    struct scene *s = scene_all_layers((struct rig_options){0});
    for (int moved = 0; moved < 2; moved++) {
        struct sealing how = sealing_of(s);
        struct engine_open open = client_open_of(&s->client, s->prompt, PROMPT, 0);
        open.no_cache = true;
        plan_sealed(s, open);
        for (uint32_t block = 0; block < HELD / KV_BLOCK_TOKENS; block++)
            for (uint32_t i = 0; i < 4; i++) {
                size_t size;
                bool bad = block == 1 && i == 2;
                uint8_t *piece = sealed_piece(s, &how, bad && moved ? 2 : block, i, &size);
                if (bad && !moved) { /* as somebody would who can make checksums */
                    piece[size - 20] ^= 1;
                    store_le32(piece + 32, 0);
                    store_le32(piece + 32, crc32c(0, piece, size));
                }
                assert_int_equal(engine_kv(s->rig->engine, s->client.sequence, 1, block, piece, size), 0);
            }
        finish(s);
        assert_int_equal(s->client.done_event.done.recomputed_tokens, KV_BLOCK_TOKENS);
    }
    scene_close(s);
}

static void expect_refusal(struct scene *s)
{
    rig_until(s->rig, s->client.failed || s->client.done);
    assert_true(s->client.failed);
    assert_int_equal(s->client.fail_code, -TD_ERR_PROTOCOL);
}

static void bad_sealed_plans_are_refused(void **state)
{
    (void)state;
    struct scene *s = scene_all_layers((struct rig_options){0});
    static const struct plan_range plans[][2] = {
        {{0, HELD, 1, KV_SEALED, 0}, {HELD, PROMPT - HELD, 0, 0, 0}}, /* not all layers */
        {{0, HELD, 0, 0, 0}, {HELD, PROMPT - HELD, 2, KV_SEALED, 0}}, /* a block that is not whole */
        {{0, HELD + 1, 0, 0, 0}, {HELD + 1, PROMPT - HELD - 1, 2, KV_SEALED, 0}}, /* from within a block */
    };
    for (size_t i = 0; i < TD_COUNT(plans); i++) {
        open_edge(s);
        plan(s, 1, plans[i], 2);
        expect_refusal(s);
    }
    scene_close(s);
}

/* A piece of the device's own is none of the cloud's, and the other way round. */
static void seals_are_where_they_are_planned(void **state)
{
    (void)state;
    struct scene *s = scene_all_layers((struct rig_options){0});
    struct sealing how = sealing_of(s);
    size_t size;
    open_and_plan(s, KV_ACCEPT_EXACT);
    uint8_t *piece = rig_piece(&s->edge, 0, 0, false, KV_L0, 0, PROMPT, &size);
    assert_int_equal(engine_kv(s->rig->engine, s->client.sequence, 1, 0, piece, size), 0);
    expect_refusal(s);
    open_plan_start(s, KV_L0, HIDDEN_F32);
    piece = sealed_piece(s, &how, 0, 0, &size);
    assert_int_equal(engine_kv(s->rig->engine, s->client.sequence, 1, 0, piece, size), 0);
    expect_refusal(s);
    scene_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_sealed_is_used),
        cmocka_unit_test(what_comes_back_stays_in_its_namespace),
        cmocka_unit_test(whatever_else_is_computed),
        cmocka_unit_test(one_bad_piece_costs_its_block),
        cmocka_unit_test(bad_sealed_plans_are_refused),
        cmocka_unit_test(seals_are_where_they_are_planned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
