/* direct_conversations: what a node's API does with a conversation beyond its turns: fork, pins of it and of the blocks that are held of it, export and
 * import; each for its principal alone. Lists and deletion: test_direct.c. */
#include "service_fixture.h"
#include "../protocol/http_json_client.h"

static json_t *ask(const char *who, const char *method, const char *path, const char *body, int status)
{
    char headers[128];
    snprintf(headers, sizeof headers, "Authorization: Bearer %s\r\n", who);
    return client_json(fx.port, method, path, headers, body, status);
}

enum { IDS = 3 * KV_BLOCK_TOKENS + 5 };

/* A conversation of alice's with three whole blocks, of which the second lies in the store under her own key. */
static void make_conversation(struct kv_block_id *held)
{
    struct conversation c = {.created_us = 1, .updated_us = 1};
    struct conv_boundary boundary = {.ids_count = IDS};
    int32_t ids[IDS];
    uint8_t chain[CRYPTO_KEY_SIZE], own[CRYPTO_KEY_SIZE];
    for (int i = 0; i < IDS; i++)
        ids[i] = 'a' + i % 20;
    snprintf(c.id, sizeof c.id, "long");
    snprintf(c.title, sizeof c.title, "a long one");
    tokenizer_id(fx.tokenizer, c.tokenizer_id);
    memcpy(c.fingerprint, fx.service.fingerprint, TD_HASH_SIZE);
    c.ids = ids, c.ids_count = IDS;
    c.boundaries = &boundary, c.boundary_count = 1;
    assert_int_equal(conv_save(fx.service.conversations, "acme", "alice", 0, &c), 0);
    assert_int_equal(store_chain_key(fx.service.store, "acme", chain, NULL), 0);
    kv_principal_key(chain, "alice", own);
    struct kv_block_id parent = {{0}};
    for (int i = 0; i < 2; i++) {
        kv_block_id_next(own, &parent, fx.service.fingerprint, fx.service.layout, ids + i * KV_BLOCK_TOKENS,
                         held);
        parent = *held;
    }
}

static void hold_block(const struct kv_block_id *id)
{
    static const struct kv_shape shape = {1, 1, 8};
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&shape);
    uint16_t values[64 * 8] = {0};
    uint8_t bytes[2][KV_PIECE_HEAD_SIZE + sizeof values];
    struct span pieces[2];
    struct kv_quality quality = {KV_L0, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0};
    for (int i = 0; i < 2; i++) {
        struct kv_piece_head h = {.codec = KV_RAW,
                                  .is_value = (uint8_t)i,
                                  .quality = quality,
                                  .token_count = 64,
                                  .kv_head_count = 1,
                                  .head_dim = 8};
        int64_t size = kv_piece_encode(scratch, &h, values, bytes[i], sizeof bytes[i]);
        assert_true(size > 0);
        pieces[i] = (struct span){bytes[i], (size_t)size};
    }
    kv_codec_scratch_destroy(scratch);
    struct store_block block = {.id = *id, .quality = quality, .layer_end = 1, .pieces = pieces};
    assert_int_equal(store_put(fx.service.store, "acme", &block, NULL, NULL), 0);
    store_flush(fx.service.store);
}

static void pins_are_of_it_and_of_what_is_held(void **state)
{
    (void)state;
    struct kv_block_id held;
    make_conversation(&held);
    hold_block(&held);
    json_decref(ask("bob", "POST", "/v1/conversations/long/pin", "{}", 404)); /* not his */
    json_decref(ask("alice", "POST", "/v1/conversations/none/pin", "{}", 404));
    json_t *root = ask("alice", "POST", "/v1/conversations/long/pin", "{}", 200);
    json_decref(root);
    assert_true(store_is_pinned(fx.service.store, "acme", &held));
    assert_true(store_conv_is_pinned(fx.service.store, "acme", "alice", "long"));
    assert_int_equal(store_pin_count(fx.service.store), 2); /* blocks that are not here are not pinned */
    json_decref(ask("alice", "POST", "/v1/conversations/long/unpin", "{}", 200));
    assert_int_equal(store_pin_count(fx.service.store), 0);
}

static void forks_and_copies_are_conversations_of_their_own(void **state)
{
    (void)state;
    struct kv_block_id held;
    uint64_t version;
    make_conversation(&held);
    json_decref(ask("bob", "POST", "/v1/conversations/long/fork", "{}", 404));
    json_t *root = ask("alice", "POST", "/v1/conversations/long/fork", "{}", 200);
    const char *id = json_string_value(json_object_get(json_object_get(root, "conversation"), "id"));
    struct conversation c = fixture_conversation("alice", id, &version);
    assert_int_equal(c.ids_count, IDS);
    conv_free(&c);
    json_decref(root);
    json_decref(ask("bob", "GET", "/v1/conversations/long/export", NULL, 404));
    root = ask("alice", "GET", "/v1/conversations/long/export", NULL, 200);
    char *text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    json_decref(ask("bob", "POST", "/v1/conversations", "{\"no\":1}", 400));
    root = ask("bob", "POST", "/v1/conversations", text, 200);
    free(text);
    json_decref(root);
    root = ask("bob", "GET", "/v1/conversations", NULL, 200);
    json_t *list = json_object_get(root, "data");
    assert_int_equal(json_array_size(list), 1);
    assert_string_equal(json_string_value(json_object_get(json_array_get(list, 0), "title")), "a long one");
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(pins_are_of_it_and_of_what_is_held),
        TEST(forks_and_copies_are_conversations_of_their_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
