/* wire, golden: the bytes of every frame type, made by tests/golden/make_wire.py, which shares no code with Tandem. The same
 * message encodes to just these bytes, and these bytes decode to the message. */
#include "frames.h"

static uint8_t golden[4096], hashes[0x70 + TD_HASH_SIZE];

static size_t golden_load(const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/wire/%s.bin", TEST_DATA, name);
    FILE *file = fopen(path, "rb");
    if (!file)
        fail_msg("cannot open %s", path);
    size_t size = fread(golden, 1, sizeof golden, file);
    fclose(file);
    return size;
}

static ProtobufCBinaryData hash_of(uint8_t first)
{
    return (ProtobufCBinaryData){TD_HASH_SIZE, hashes + first - 0x10};
}

static int fill_hashes(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof hashes; i++)
        hashes[i] = (uint8_t)(0x10 + i);
    return 0;
}

/* `header` encodes to the golden bytes; they decode, and what they decode to encodes to them again. */
static void check_frame(const char *name, unsigned type, uint32_t stream, const ProtobufCMessage *header,
                        const void *payload, size_t payload_size)
{
    static uint8_t bytes[4096];
    size_t size = golden_load(name);
    int64_t made = wire_encode(type, 0, stream, header, payload, payload_size, bytes, sizeof bytes);
    assert_int_equal(made, size);
    assert_memory_equal(bytes, golden, size);

    struct arena arena;
    struct wire_frame f;
    arena_init(&arena, WIRE_ARENA_SIZE);
    assert_int_equal(wire_decode(golden, size, LIMIT_HEADER_SIZE, &arena, &f), 0);
    assert_int_equal(f.type, type);
    assert_int_equal(f.flags, 0);
    assert_int_equal(f.stream, stream);
    assert_int_equal(f.payload.size, payload_size);
    memset(bytes, 0, sizeof bytes);
    assert_int_equal(
        wire_encode(type, 0, stream, f.header, f.payload.data, f.payload.size, bytes, sizeof bytes), size);
    assert_memory_equal(bytes, golden, size);
    arena_deinit(&arena);
}

static char name_acme[] = "acme", name_ann[] = "ann", name_node[] = "node-1:7000",
            name_other[] = "node-2:7000", name_conv[] = "conv", name_edge[] = "edge/1", text_busy[] = "busy",
            text_drain[] = "drain";

static void make_hello(Tandem__Hello *m)
{
    static Tandem__Version a, b, *versions[] = {&a, &b};
    tandem__version__init(&a), tandem__version__init(&b);
    a.protocol = 1, a.layout = hash_of(0x10), a.numerics = 1;
    b.protocol = 1, b.layout = hash_of(0x11), b.numerics = 2;
    tandem__hello__init(m);
    m->n_versions = 2, m->versions = versions;
    m->fingerprint = hash_of(0x20);
    m->layer_count = 30, m->layers_held = 8, m->codec_mask = 0x8003, m->hidden_mask = 7;
    m->token = text_secret, m->agent = name_edge;
    m->connection_window = 8 << 20, m->stream_window = 2 << 20;
}

static void test_greetings(void **state)
{
    (void)state;
    Tandem__Hello hello;
    make_hello(&hello);
    check_frame("hello", FRAME_HELLO, 0, &hello.base, NULL, 0);
    Tandem__Version version = TANDEM__VERSION__INIT;
    version.protocol = 1, version.layout = hash_of(0x10), version.numerics = 1;
    Tandem__Welcome m = TANDEM__WELCOME__INIT;
    m.version = &version;
    m.tenant = name_acme, m.principal = name_ann, m.principal_key = hash_of(0x30);
    m.node_epoch = UINT64_C(1) << 40;
    m.connection_window = 8 << 20, m.stream_window = 2 << 20, m.stream_count_max = 64, m.context_max = 8192;
    m.codec_mask = 3, m.hidden_mask = 7, m.node = name_node;
    check_frame("welcome", FRAME_WELCOME, 0, &m.base, NULL, 0);
    tandem__welcome__init(&m);
    m.version = &version;
    m.tenant = name_acme, m.principal = name_ann, m.principal_key = hash_of(0x30);
    m.features = WIRE_FEATURE_PRIVATE, m.seal = hash_of(0x40), m.seal.len = 16;
    check_frame("welcome_seal", FRAME_WELCOME, 0, &m.base, NULL, 0);
}

static void test_opening(void **state)
{
    (void)state;
    uint8_t id[16], payload[16];
    for (int i = 0; i < 16; i++)
        id[i] = (uint8_t)i;
    const uint32_t ids[] = {300, 4, 5, 70000};
    for (int i = 0; i < 4; i++)
        store_le32(payload + 4 * i, ids[i]);
    Tandem__Open open = TANDEM__OPEN__INIT;
    open.request_id = (ProtobufCBinaryData){16, id};
    open.attempt = UINT64_C(1700000000000);
    open.conversation = name_conv, open.conversation_length = 2, open.conversation_hash = hash_of(0x40);
    open.prompt_count = 4, open.held_count = 2, open.held_hash = hash_of(0x50);
    open.accept = 1, open.no_cache = true;
    check_frame("open", FRAME_OPEN, 1, &open.base, payload, sizeof payload);
    uint8_t private_payload[72];
    memcpy(private_payload, hash_of(0x70).data, 32);
    memcpy(private_payload + 32, hash_of(0x80).data, 32);
    store_le32(private_payload + 64, 300);
    store_le32(private_payload + 68, 70000);
    tandem__open__init(&open);
    open.request_id = (ProtobufCBinaryData){16, id};
    open.attempt = UINT64_C(1700000000000);
    open.prompt_count = 130, open.held_count = 2, open.held_hash = hash_of(0x50);
    open.accept = 1, open.private_prompt = true, open.prompt_tag = hash_of(0x60);
    check_frame("open_private", FRAME_OPEN, 1, &open.base, private_payload, sizeof private_payload);
    Tandem__OpenAck ack = TANDEM__OPEN_ACK__INIT;
    ack.attempt = UINT64_C(1700000000000);
    ack.cached_tokens = 128, ack.cached_memory = 64, ack.cached_disk = 64, ack.reply_count = 2,
    ack.resumed = true;
    ack.load_us = 1500, ack.prefill_tokens_per_s = 900, ack.queue_tokens = 4096;
    check_frame("open_ack", FRAME_OPEN_ACK, 1, &ack.base, NULL, 0);
}

static void test_planning(void **state)
{
    (void)state;
    Tandem__Range a = TANDEM__RANGE__INIT, b = TANDEM__RANGE__INIT, *ranges[] = {&a, &b};
    a.count = 128, a.layers = 8, a.codec = 1, a.hidden_dtype = 1;
    b.first_token = 128, b.count = 37;
    Tandem__Plan plan = TANDEM__PLAN__INIT;
    plan.epoch = 2, plan.n_ranges = 2, plan.ranges = ranges;
    check_frame("plan", FRAME_PLAN, 1, &plan.base, NULL, 0);
    Tandem__Ingested ingested = TANDEM__INGESTED__INIT;
    ingested.epoch = 2, ingested.hidden_tokens = 192, ingested.kv_tokens = 128,
    ingested.bulk_size = UINT64_C(5000000000);
    check_frame("ingested", FRAME_INGESTED, 1, &ingested.base, NULL, 0);
    Tandem__Need need = TANDEM__NEED__INIT;
    need.epoch = 2, need.first_token = 64, need.count = 64, need.layer_begin = 3, need.layer_end = 8,
    need.hidden = true;
    check_frame("need", FRAME_NEED, 1, &need.base, NULL, 0);
    Tandem__Fetch fetch = TANDEM__FETCH__INIT;
    fetch.block_index = 5, fetch.layer_begin = 2, fetch.layer_end = 8;
    check_frame("fetch", FRAME_FETCH, 1, &fetch.base, NULL, 0);
    uint8_t wanted[4 * KV_BLOCK_TOKENS];
    for (uint32_t i = 0; i < KV_BLOCK_TOKENS; i++)
        store_le32(wanted + 4 * i, 1000 + i);
    fetch.block_index = 0, fetch.block_count = 1;
    check_frame("fetch_ids", FRAME_FETCH, 3, &fetch.base, wanted, sizeof wanted);
}

static void test_bulk(void **state)
{
    (void)state;
    uint8_t payload[100];
    for (int i = 0; i < 100; i++)
        payload[i] = (uint8_t)i;
    Tandem__Hidden hidden = TANDEM__HIDDEN__INIT;
    hidden.epoch = 2, hidden.first_token = 64, hidden.count = 3, hidden.layer = 8, hidden.dtype = HIDDEN_F16;
    hidden.offset = 100, hidden.total = 200;
    check_frame("hidden", FRAME_HIDDEN, 1, &hidden.base, payload, 100);
    Tandem__KvBlock kv = TANDEM__KV_BLOCK__INIT;
    kv.epoch = 2, kv.block_index = 1, kv.layer = 7, kv.is_value = true, kv.total = 10;
    check_frame("kv_block", FRAME_KV_BLOCK, 1, &kv.base, payload, 10);
}

static void test_generating(void **state)
{
    (void)state;
    uint8_t bias[16], id[4];
    store_le32(bias, 7), store_le32(bias + 4, 0xc2c80000);          /* -100.0 */
    store_le32(bias + 8, 50256), store_le32(bias + 12, 0x3fc00000); /* 1.5 */
    Tandem__Generate g = TANDEM__GENERATE__INIT;
    g.token_count_max = 100, g.temperature = 0.75f, g.top_k = 40, g.top_p = 0.95f, g.min_p = 0.05f;
    g.repetition_penalty = 1.125f, g.repetition_window = -1, g.presence_penalty = 0.5f,
    g.frequency_penalty = 0.25f;
    g.seed = UINT64_C(0x0123456789abcdef), g.logprobs = true, g.top_logprobs = 5, g.ignore_end = true;
    g.no_persist = true;
    check_frame("generate", FRAME_GENERATE, 1, &g.base, bias, sizeof bias);

    int32_t top_ids[] = {7, 300};
    float top_logprobs[] = {-0.5f, -2.0f};
    Tandem__TokenLogprobs logprobs = TANDEM__TOKEN_LOGPROBS__INIT, *list = &logprobs;
    logprobs.logprob = -0.5f;
    logprobs.n_top_ids = logprobs.n_top_logprobs = 2;
    logprobs.top_ids = top_ids, logprobs.top_logprobs = top_logprobs;
    Tandem__Token token = TANDEM__TOKEN__INIT;
    token.attempt = UINT64_C(1700000000000), token.index = 9, token.n_logprobs = 1, token.logprobs = &list;
    store_le32(id, 70000);
    check_frame("token", FRAME_TOKEN, 1, &token.base, id, sizeof id);

    Tandem__Timings timings = {
        PROTOBUF_C_MESSAGE_INIT(&tandem__timings__descriptor), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0};
    Tandem__Done done = TANDEM__DONE__INIT;
    done.attempt = UINT64_C(1700000000000), done.finish = FINISH_LENGTH, done.prompt_tokens = 165;
    done.completion_tokens = 10, done.cached_tokens = 128, done.timings = &timings;
    check_frame("done", FRAME_DONE, 1, &done.base, NULL, 0);
}

static void test_small_frames(void **state)
{
    (void)state;
    Tandem__Cancel cancel = TANDEM__CANCEL__INIT;
    cancel.finished = true, cancel.keep_count = 12;
    check_frame("cancel", FRAME_CANCEL, 1, &cancel.base, NULL, 0);
    Tandem__Credit credit = TANDEM__CREDIT__INIT;
    credit.size = 524288;
    check_frame("credit", FRAME_CREDIT, 1, &credit.base, NULL, 0);
    Tandem__Ping ping = TANDEM__PING__INIT;
    ping.id = 77, ping.reply = true;
    check_frame("ping", FRAME_PING, 0, &ping.base, NULL, 0);
    Tandem__Error error = TANDEM__ERROR__INIT;
    error.code = TD_ERR_BUSY, error.text = text_busy, error.retry = true, error.retry_after_ms = 2500;
    check_frame("error", FRAME_ERROR, 1, &error.base, NULL, 0);
    Tandem__Goaway goaway = TANDEM__GOAWAY__INIT;
    goaway.node = name_other, goaway.reason = text_drain;
    check_frame("goaway", FRAME_GOAWAY, 0, &goaway.base, NULL, 0);
}

/* What a later version adds is skipped, and what we know is read all the same. */
static void test_frames_from_the_future(void **state)
{
    (void)state;
    struct arena arena;
    struct wire_frame f;
    Tandem__Hello expected;
    make_hello(&expected);
    arena_init(&arena, WIRE_ARENA_SIZE);
    size_t size = golden_load("hello_future");
    assert_int_equal(wire_decode(golden, size, LIMIT_HEADER_SIZE_BEFORE_WELCOME, &arena, &f), 0);
    assert_int_equal(f.hello->base.n_unknown_fields, 3);
    assert_int_equal(f.hello->n_versions, 2);
    assert_memory_equal(f.hello->fingerprint.data, expected.fingerprint.data, TD_HASH_SIZE);
    assert_string_equal(f.hello->agent, "edge/1");
    assert_int_equal(f.hello->stream_window, 2 << 20);
    size = golden_load("unknown_optional");
    assert_int_equal(wire_decode(golden, size, LIMIT_HEADER_SIZE, &arena, &f), 1);
    golden[1] = 0;
    assert_int_equal(wire_decode(golden, size, LIMIT_HEADER_SIZE, &arena, &f), -TD_ERR_PROTOCOL);
    arena_deinit(&arena);
}

/* Every frame cut short anywhere is refused, and read no further than its end (the bytes lie in a block of their own size). */
static void test_every_truncation(void **state)
{
    (void)state;
    static const char *const names[] = {"hello",  "welcome",  "open",  "open_ack", "plan",
                                        "hidden", "kv_block", "need",  "generate", "token",
                                        "done",   "cancel",   "error", "goaway"};
    struct arena arena;
    struct wire_frame f;
    arena_init(&arena, WIRE_ARENA_SIZE);
    for (size_t i = 0; i < TD_COUNT(names); i++) {
        size_t size = golden_load(names[i]);
        for (size_t cut = 0; cut < size; cut++) {
            uint8_t *exact = malloc(cut ? cut : 1);
            memcpy(exact, golden, cut);
            arena_reset(&arena);
            assert_int_equal(wire_decode(exact, cut, LIMIT_HEADER_SIZE, &arena, &f), -TD_ERR_PROTOCOL);
            free(exact);
        }
    }
    arena_deinit(&arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greetings),
        cmocka_unit_test(test_opening),
        cmocka_unit_test(test_planning),
        cmocka_unit_test(test_bulk),
        cmocka_unit_test(test_generating),
        cmocka_unit_test(test_small_frames),
        cmocka_unit_test(test_frames_from_the_future),
        cmocka_unit_test(test_every_truncation),
    };
    return cmocka_run_group_tests(tests, fill_hashes, NULL);
}
