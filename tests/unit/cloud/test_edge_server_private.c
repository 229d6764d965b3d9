/* edge_server, private prompts: names become the engine's own, what is needed is asked of the edge, and what mixes both forms is refused. */
#include "service_fixture.h"
#include "edge_client.h"

#define PRIVATE_PROMPT 130u /* two whole blocks */

/* Names are words here, as ids would be. */
static void send_private(struct edge_client *c, uint32_t stream, Tandem__Open *m, uint32_t held)
{
    static uint8_t tag[TD_HASH_SIZE] = {0xa, 0xb}, hash[TD_HASH_SIZE];
    int32_t words[2 * 8 + 4];
    for (int32_t i = 0; i < 16; i++)
        words[i] = 1000 + i;
    memcpy(words + 16, reply, held * sizeof *reply);
    *m = edge_open(PRIVATE_PROMPT);
    m->private_prompt = true;
    m->prompt_tag = (ProtobufCBinaryData){TD_HASH_SIZE, tag};
    m->held_count = held;
    ids_hash(reply, held, hash);
    if (held)
        m->held_hash = (ProtobufCBinaryData){TD_HASH_SIZE, hash};
    edge_send_open(c, stream, m, words, 16 + held);
}

static void test_private_open(void **state)
{
    (void)state;
    static const char *const who[] = {"alice", "bob"};
    struct kv_block_id names[2][2];
    for (int i = 0; i < 2; i++) {
        struct edge_client *c = edge_client_open(edge_hello(who[i]));
        struct wire_frame f = edge_client_next_frame(c, FRAME_WELCOME);
        uint8_t own[CRYPTO_KEY_SIZE], sent[2][TD_HASH_SIZE];
        assert_int_equal(f.welcome->features & WIRE_FEATURE_PRIVATE, WIRE_FEATURE_PRIVATE);
        memcpy(own, f.welcome->principal_key.data, sizeof own);
        Tandem__Open m;
        send_private(c, 1, &m, 3);
        const struct fake_command *open = fake_next("open");
        assert_true(open->open.is_private);
        assert_int_equal(open->open.prompt_count, PRIVATE_PROMPT);
        assert_int_equal(open->open.held_count, 3);
        assert_memory_equal(open->open.prompt_tag, m.prompt_tag.data, TD_HASH_SIZE);
        for (uint32_t j = 0; j < PRIVATE_PROMPT; j++)
            assert_int_equal(open->open.ids[j], -1);
        assert_memory_equal(open->open.ids + PRIVATE_PROMPT, reply, sizeof reply);
        for (uint32_t j = 0; j < 16; j++)
            store_le32(sent[j / 8] + j % 8 * 4, 1000 + j);
        uint8_t want[TD_HASH_SIZE] = {0};
        for (int j = 0; j < 2; j++) { /* as WIRE.md has it */
            struct span parts[] = {
                {(const uint8_t *)"tandem-private-block", 21}, {want, sizeof want}, {sent[j], TD_HASH_SIZE}};
            uint8_t next[TD_HASH_SIZE];
            hmac_sha256(own, parts, 3, next);
            memcpy(want, next, sizeof want);
            assert_memory_equal(open->open.names[j].bytes, want, sizeof want);
            names[i][j] = open->open.names[j];
        }
        edge_client_close(c);
        fake_next("detach");
    }
    assert_memory_not_equal(names[0], names[1], sizeof names[0]); /* the same names, by somebody else */
}

static void test_private_refusals(void **state)
{
    (void)state;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m;
    int32_t words[17] = {0};
    uint8_t hash[TD_HASH_SIZE];
    send_private(c, 1, &m, 0);
    fake_next("open");
    words[16] = INT32_MAX; /* no token of the model */
    m.held_count = 1;
    ids_hash(words + 16, 1, hash);
    m.held_hash = (ProtobufCBinaryData){TD_HASH_SIZE, hash};
    edge_send_open(c, 3, &m, words, 17);
    assert_int_equal(edge_client_next_frame(c, FRAME_ERROR).error->code, TD_ERR_FORMAT);
    words[16] = 5; /* not what the hash is of */
    edge_send_open(c, 5, &m, words, 17);
    assert_int_equal(edge_client_next_frame(c, FRAME_ERROR).error->code, TD_ERR_CHECKSUM);
    assert_true(fake_is_quiet());
    edge_client_close(c);
}

/* What the engine lacks is asked of the edge; what the conversation holds in the end is nobody's business here. */
static void test_private_need_and_end(void **state)
{
    (void)state;
    struct store_stats stats;
    struct edge_client *c = edge_client_ready("alice");
    Tandem__Open m;
    send_private(c, 1, &m, 0);
    const struct fake_command *open = fake_next("open");
    edge_send_generate(c, 1, false);
    fake_next("start");
    fake_emit(open, (struct engine_event){.type = ENGINE_NEED, .need = {.epoch = 7, .first_token = 64}});
    struct wire_frame f = edge_client_next_frame(c, FRAME_NEED);
    assert_int_equal(f.need->epoch, 7);
    assert_int_equal(f.need->first_token, 64);
    fake_done(open, FINISH_STOP, reply, 3);
    edge_client_next_frame(c, FRAME_DONE);
    fixture_settle();
    store_stats(fx.service.store, &stats);
    assert_int_equal(stats.conversations, 0);
    edge_client_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_private_open),
        TEST(test_private_refusals),
        TEST(test_private_need_and_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
