/* wire: sizes, lists, texts and numbers of frames at the edge of what is allowed; hidden rows. */
#include "frames.h"
#include "protocol/wire_schema.h"
#include <math.h>

static struct arena arena = {.limit_size = WIRE_ARENA_SIZE};
static struct wire_frame frame;

static int decode(size_t size)
{
    arena_reset(&arena);
    return wire_decode(frame_bytes, size, LIMIT_HEADER_SIZE, &arena, &frame);
}

/* A frame must be judged the same by both sides: the one that would send it and the one that gets it. */
static int judge(unsigned type, uint32_t stream, const ProtobufCMessage *header, size_t payload_size)
{
    static uint8_t bytes[2 * LIMIT_FRAME_SIZE];
    int received = decode(frame_raw(type, 0, stream, header, many_bytes, payload_size));
    int64_t sent = wire_encode(type, 0, stream, header, many_bytes, payload_size, bytes, sizeof bytes);
    assert_int_equal(sent < 0 ? sent : 0, received);
    if (sent > 0)
        assert_memory_equal(bytes, frame_bytes, (size_t)sent);
    return received;
}

static char *text_of(size_t size)
{
    static char text[4096];
    memset(text, 'x', sizeof text);
    text[size] = '\0';
    return text;
}

/* ---- the head ---- */

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(frame_type_name(FRAME_HELLO), "HELLO");
    assert_string_equal(frame_type_name(FRAME_GOAWAY), "GOAWAY");
    assert_string_equal(frame_type_name(0), "?");
    assert_string_equal(frame_type_name(FRAME_TYPE_END), "?");
    for (unsigned type = 0; type < 300; type++)
        assert_int_equal(frame_is_bulk(type), type == FRAME_HIDDEN || type == FRAME_KV_BLOCK);
}

static void test_sizes_must_add_up(void **state)
{
    (void)state;
    size_t size = frame_valid(FRAME_TOKEN, 1);
    assert_int_equal(decode(size), 0);
    assert_int_equal(decode(size + 1), -TD_ERR_PROTOCOL);
    assert_int_equal(decode(size - 1), -TD_ERR_PROTOCOL);
    store_le32(frame_bytes + 8, UINT32_MAX); /* a payload that would overflow a sum */
    assert_int_equal(decode(size), -TD_ERR_PROTOCOL);
    size = frame_valid(FRAME_TOKEN, 1);
    store_le32(frame_bytes + 12, 0xdeadbeef); /* reserved: ignored */
    assert_int_equal(decode(size), 0);
    frame_bytes[1] = 0xfe; /* flags without a meaning yet: ignored */
    assert_int_equal(decode(size), 0);
    size = frame_valid(FRAME_TOKEN, 1);
    frame_bytes[0] = 0; /* no such type */
    assert_int_equal(decode(size), -TD_ERR_PROTOCOL);
}

/* Pad a header with an unknown field to exactly `size` bytes. */
static void pad_header(ProtobufCMessage *header, size_t size)
{
    static ProtobufCMessageUnknownField field;
    header->n_unknown_fields = 0;
    size_t now = protobuf_c_message_get_packed_size(header);
    size_t len = size - now - 2; /* the tag of field 1000 takes two bytes */
    static uint8_t data[LIMIT_HEADER_SIZE + 100];
    size_t digits = len - 1 < 128 ? 1 : len - 2 < 16384 ? 2 : 3;
    size_t body = len - digits, at = 0;
    for (size_t rest = body, i = 0; i < digits; i++, rest >>= 7)
        data[at++] = (uint8_t)((rest & 0x7f) | (i + 1 < digits ? 0x80 : 0));
    field = (ProtobufCMessageUnknownField){1000, PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED, digits + body, data};
    header->n_unknown_fields = 1;
    header->unknown_fields = &field;
    assert_int_equal(protobuf_c_message_get_packed_size(header), size);
}

static void test_header_limit(void **state)
{
    (void)state;
    for (size_t beyond = 0; beyond < 2; beyond++) {
        Tandem__Open open = open_valid(1);
        pad_header(&open.base, LIMIT_HEADER_SIZE + beyond);
        assert_int_equal(judge(FRAME_OPEN, 1, &open.base, 4), beyond ? -TD_ERR_LIMIT : 0);
        Tandem__Hello hello = hello_valid();
        pad_header(&hello.base, LIMIT_HEADER_SIZE_BEFORE_WELCOME + beyond);
        size_t size = frame_raw(FRAME_HELLO, 0, 0, &hello.base, NULL, 0);
        arena_reset(&arena);
        assert_int_equal(wire_decode(frame_bytes, size, LIMIT_HEADER_SIZE_BEFORE_WELCOME, &arena, &frame),
                         beyond ? -TD_ERR_LIMIT : 0);
        static uint8_t bytes[8192];
        int64_t sent = wire_encode(FRAME_HELLO, 0, 0, &hello.base, NULL, 0, bytes, sizeof bytes);
        assert_int_equal(sent, beyond ? -TD_ERR_LIMIT : (int64_t)size);
    }
}

/* Before WELCOME a link reads small headers only. */
static void test_header_limit_of_a_link(void **state)
{
    (void)state;
    for (size_t beyond = 0; beyond < 2; beyond++) {
        struct owner o;
        owner_start(&o, LINK_CLOUD, 0, 0);
        Tandem__Hello hello = hello_valid();
        pad_header(&hello.base, LIMIT_HEADER_SIZE_BEFORE_WELCOME + beyond);
        assert_int_equal(give(&o, FRAME_HELLO, 0, &hello.base, NULL, 0), beyond ? -TD_ERR_LIMIT : 0);
        owner_stop(&o);
        cloud_ready(&o, 0, 0);
        Tandem__Open open = open_valid(1);
        pad_header(&open.base, LIMIT_HEADER_SIZE + beyond);
        assert_int_equal(give(&o, FRAME_OPEN, 1, &open.base, many_bytes, 4), beyond ? -TD_ERR_LIMIT : 0);
        owner_stop(&o);
    }
}

static void test_frame_limit(void **state)
{
    (void)state;
    Tandem__Token token = TANDEM__TOKEN__INIT;
    assert_int_equal(judge(FRAME_TOKEN, 1, &token.base, LIMIT_FRAME_SIZE - WIRE_HEAD_SIZE), 0);
    assert_int_equal(judge(FRAME_TOKEN, 1, &token.base, LIMIT_FRAME_SIZE - WIRE_HEAD_SIZE + 4),
                     -TD_ERR_LIMIT);
    token.index = 1;
    assert_int_equal(judge(FRAME_TOKEN, 1, &token.base, LIMIT_FRAME_SIZE - WIRE_HEAD_SIZE), -TD_ERR_LIMIT);
}

static void test_encode_arguments(void **state)
{
    (void)state;
    uint8_t bytes[64];
    Tandem__Credit credit = TANDEM__CREDIT__INIT;
    credit.size = 5;
    int64_t size = wire_encode(FRAME_CREDIT, 0, 1, &credit.base, NULL, 0, bytes, sizeof bytes);
    assert_int_equal(size, WIRE_HEAD_SIZE + 2);
    assert_int_equal(wire_encode(FRAME_CREDIT, 0, 1, &credit.base, NULL, 0, bytes, (size_t)size - 1),
                     -TD_ERR_NOSPACE);
    assert_int_equal(wire_encode(FRAME_CREDIT, 0, 1, &credit.base, NULL, 0, bytes, (size_t)size), size);
    assert_int_equal(wire_encode(FRAME_PING, 0, 0, &credit.base, NULL, 0, bytes, sizeof bytes), -TD_ERR_ARG);
    assert_int_equal(wire_encode(0, 0, 0, NULL, NULL, 0, bytes, sizeof bytes), -TD_ERR_ARG);
    assert_int_equal(wire_encode(FRAME_TYPE_END, 0, 0, NULL, NULL, 0, bytes, sizeof bytes), -TD_ERR_ARG);
    assert_int_equal(wire_encode(FRAME_PING, 0, 0, NULL, NULL, 0, bytes, sizeof bytes), WIRE_HEAD_SIZE);
    for (unsigned type = 1; type < FRAME_TYPE_END;
         type++) /* every type may come without a header, if its rules allow */
        assert_int_not_equal(wire_encode(type, 0, 1, NULL, NULL, 0, bytes, sizeof bytes), -TD_ERR_ARG);
}

static void test_broken_headers(void **state)
{
    (void)state;
    static const struct {
        uint8_t bytes[6];
        size_t size;
    } broken[] = {
        {{0x08}, 1},                               /* a tag and no value */
        {{0x08, 0x80}, 2},                         /* a varint that does not end */
        {{0x12, 0x05, 1}, 3},                      /* a length beyond the end */
        {{0x0b, 0x0c}, 2},                         /* groups */
        {{0x12, 0xff, 0xff, 0xff, 0xff, 0x0f}, 6}, /* a length of 4 GiB */
        {{0x00, 0x00}, 2},                         /* field 0 */
    };
    for (size_t i = 0; i < TD_COUNT(broken); i++) {
        size_t size = frame_raw(FRAME_GOAWAY, 0, 0, NULL, broken[i].bytes, broken[i].size);
        store_le16(frame_bytes + 2, (uint16_t)broken[i].size);
        store_le32(frame_bytes + 8, 0);
        assert_int_equal(decode(size), -TD_ERR_PROTOCOL);
    }
}

/* Too little memory is not the peer's fault, and says so. */
static void test_small_arena(void **state)
{
    (void)state;
    struct arena small;
    arena_init(&small, 0);
    size_t size = frame_valid(FRAME_HELLO, 0);
    assert_int_equal(wire_decode(frame_bytes, size, LIMIT_HEADER_SIZE, &small, &frame), -TD_ERR_NOMEM);
    arena_deinit(&small);
}

/* ---- streams and payloads by type ---- */

static void test_streams_by_type(void **state)
{
    (void)state;
    static const char *const connection_only = "HELLO WELCOME PING GOAWAY", *const either =
                                                                                "INGESTED CREDIT ERROR";
    for (unsigned type = 1; type < FRAME_TYPE_END; type++) {
        bool zero = strstr(connection_only, frame_type_name(type)) != NULL;
        bool any = strstr(either, frame_type_name(type)) != NULL;
        assert_int_equal(decode(frame_valid(type, 0)), zero || any ? 0 : -TD_ERR_PROTOCOL);
        assert_int_equal(decode(frame_valid(type, 1)), zero ? -TD_ERR_PROTOCOL : 0);
    }
}

static void test_frames_without_payload(void **state)
{
    (void)state;
    for (unsigned type = 1; type < FRAME_TYPE_END; type++) {
        if (type == FRAME_OPEN || type == FRAME_FETCH || type == FRAME_TOKEN || type == FRAME_GENERATE ||
            frame_is_bulk(type))
            continue;
        bool zero =
            type == FRAME_HELLO || type == FRAME_WELCOME || type == FRAME_PING || type == FRAME_GOAWAY;
        size_t size = frame_valid(type, zero ? 0 : 1);
        assert_int_equal(decode(size), 0);
        store_le32(frame_bytes + 8, 1);
        assert_int_equal(decode(size + 1), -TD_ERR_PROTOCOL);
    }
}

/* ---- messages ---- */

static void test_hello(void **state)
{
    (void)state;
    Tandem__Hello m = hello_valid();
    m.n_versions = LIMIT_VERSIONS;
    assert_int_equal(judge(FRAME_HELLO, 0, &m.base, 0), 0);
    m.n_versions = LIMIT_VERSIONS + 1;
    assert_int_equal(judge(FRAME_HELLO, 0, &m.base, 0), -TD_ERR_LIMIT);
    m.n_versions = 0;
    assert_int_equal(judge(FRAME_HELLO, 0, &m.base, 0), -TD_ERR_PROTOCOL);
    m = hello_valid();
    m.versions[0]->layout.len = 31;
    assert_int_equal(judge(FRAME_HELLO, 0, &m.base, 0), -TD_ERR_PROTOCOL);
    for (size_t size = 0; size <= 33; size++) {
        uint8_t bytes[33] = {0};
        m = hello_valid();
        m.fingerprint = (ProtobufCBinaryData){size, bytes};
        assert_int_equal(judge(FRAME_HELLO, 0, &m.base, 0), size == 32 ? 0 : -TD_ERR_PROTOCOL);
    }
    m = hello_valid();
    m.token = text_of(LIMIT_TOKEN_SIZE);
    assert_int_equal(judge(FRAME_HELLO, 0, &m.base, 0), 0);
    m.token = text_of(LIMIT_TOKEN_SIZE + 1);
    assert_int_equal(judge(FRAME_HELLO, 0, &m.base, 0), -TD_ERR_LIMIT);
    m = hello_valid();
    m.agent = text_of(LIMIT_NAME_SIZE);
    assert_int_equal(judge(FRAME_HELLO, 0, &m.base, 0), 0);
    m.agent = text_of(LIMIT_NAME_SIZE + 1);
    assert_int_equal(judge(FRAME_HELLO, 0, &m.base, 0), -TD_ERR_LIMIT);
    for (int which = 0; which < 2; which++) {
        m = hello_valid();
        uint32_t *window = which ? &m.connection_window : &m.stream_window;
        *window = LIMIT_CREDIT_SIZE;
        assert_int_equal(judge(FRAME_HELLO, 0, &m.base, 0), 0);
        *window = LIMIT_CREDIT_SIZE + 1;
        assert_int_equal(judge(FRAME_HELLO, 0, &m.base, 0), -TD_ERR_LIMIT);
    }
}

static void test_welcome(void **state)
{
    (void)state;
    Tandem__Welcome m = welcome_valid();
    assert_int_equal(judge(FRAME_WELCOME, 0, &m.base, 0), 0);
    m.version = NULL;
    assert_int_equal(judge(FRAME_WELCOME, 0, &m.base, 0), -TD_ERR_PROTOCOL);
    m = welcome_valid();
    m.principal_key.len = 16;
    assert_int_equal(judge(FRAME_WELCOME, 0, &m.base, 0), -TD_ERR_PROTOCOL);
    for (int which = 0; which < 3; which++) {
        m = welcome_valid();
        char **name = which == 0 ? &m.tenant : which == 1 ? &m.principal : &m.node;
        *name = text_of(LIMIT_NAME_SIZE);
        assert_int_equal(judge(FRAME_WELCOME, 0, &m.base, 0), 0);
        *name = text_of(LIMIT_NAME_SIZE + 1);
        assert_int_equal(judge(FRAME_WELCOME, 0, &m.base, 0), -TD_ERR_LIMIT);
    }
    for (int which = 0; which < 2; which++) {
        m = welcome_valid();
        uint32_t *window = which ? &m.connection_window : &m.stream_window;
        *window = LIMIT_CREDIT_SIZE;
        assert_int_equal(judge(FRAME_WELCOME, 0, &m.base, 0), 0);
        *window = LIMIT_CREDIT_SIZE + 1;
        assert_int_equal(judge(FRAME_WELCOME, 0, &m.base, 0), -TD_ERR_LIMIT);
    }
}

static void test_seal_of_welcome(void **state)
{
    (void)state;
    for (size_t size = 0; size <= 32; size++) {
        Tandem__Welcome m = welcome_valid();
        m.seal = BYTES(size);
        assert_int_equal(judge(FRAME_WELCOME, 0, &m.base, 0), size == 0 || size == 16 ? 0 : -TD_ERR_PROTOCOL);
    }
}

static void test_fetch(void **state)
{
    (void)state;
    Tandem__Fetch m = TANDEM__FETCH__INIT;
    assert_int_equal(judge(FRAME_FETCH, 1, &m.base, 0), 0); /* of nothing */
    m.block_index = 2, m.block_count = 3, m.layer_begin = 1, m.layer_end = 2;
    size_t size = 5 * KV_BLOCK_TOKENS * 4;
    assert_int_equal(judge(FRAME_FETCH, 1, &m.base, size), 0);
    assert_int_equal(judge(FRAME_FETCH, 1, &m.base, size - 4), -TD_ERR_PROTOCOL);
    assert_int_equal(judge(FRAME_FETCH, 1, &m.base, size + 4), -TD_ERR_PROTOCOL);
    m.layer_begin = 2;
    assert_int_equal(judge(FRAME_FETCH, 1, &m.base, size), -TD_ERR_PROTOCOL);
    m.layer_end = KV_LAYERS_MAX;
    assert_int_equal(judge(FRAME_FETCH, 1, &m.base, size), 0);
    m.layer_end = KV_LAYERS_MAX + 1;
    assert_int_equal(judge(FRAME_FETCH, 1, &m.base, size), -TD_ERR_LIMIT);
    m.layer_begin = 0, m.layer_end = 1, m.block_index = 5, m.block_count = 0;
    assert_int_equal(judge(FRAME_FETCH, 1, &m.base, size), -TD_ERR_PROTOCOL);
    m.block_index = 0, m.block_count = LIMIT_FETCH_BLOCKS;
    assert_int_equal(judge(FRAME_FETCH, 1, &m.base, LIMIT_FETCH_BLOCKS * KV_BLOCK_TOKENS * 4), 0);
    m.block_count++;
    assert_int_equal(judge(FRAME_FETCH, 1, &m.base, (LIMIT_FETCH_BLOCKS + 1) * KV_BLOCK_TOKENS * 4),
                     -TD_ERR_LIMIT);
    m.block_index = LIMIT_PROMPT_TOKENS / KV_BLOCK_TOKENS - LIMIT_FETCH_BLOCKS;
    m.block_count = LIMIT_FETCH_BLOCKS; /* up to the longest prompt's end */
    assert_int_equal(judge(FRAME_FETCH, 1, &m.base, LIMIT_PROMPT_TOKENS * 4), 0);
    m.block_index++, m.block_count--;
    assert_int_equal(judge(FRAME_FETCH, 1, &m.base, LIMIT_PROMPT_TOKENS * 4), -TD_ERR_LIMIT);
}

static void test_open(void **state)
{
    (void)state;
    Tandem__Open m = open_valid(3);
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 12), 0);
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 8), -TD_ERR_PROTOCOL);
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 13), -TD_ERR_PROTOCOL);
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 16), -TD_ERR_PROTOCOL);
    m.held_count = 2; /* needs its hash, and its ids */
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 20), -TD_ERR_PROTOCOL);
    m.held_hash = BYTES(32);
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 20), 0);
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 12), -TD_ERR_PROTOCOL);
    m.held_count = 0; /* and none without any */
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 12), -TD_ERR_PROTOCOL);
    m = open_valid(3);
    m.conversation_length = 2;
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 4), -TD_ERR_PROTOCOL);
    m.conversation_hash = BYTES(32);
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 4), 0);
    m.conversation_length = 3;
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 0), 0);
    m.conversation_length = 4;
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 0), -TD_ERR_PROTOCOL);
    m = open_valid(0);
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 0), -TD_ERR_PROTOCOL);
    m = open_valid(1);
    m.request_id.len = 15;
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 4), -TD_ERR_PROTOCOL);
    m = open_valid(1);
    m.conversation = text_of(LIMIT_NAME_SIZE);
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 4), 0);
    m.conversation = text_of(LIMIT_NAME_SIZE + 1);
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 4), -TD_ERR_LIMIT);
}

/* Names of whole blocks and held ids, and not one byte more: a prompt's ids have no place in it. */
static void test_private_open(void **state)
{
    (void)state;
    static uint8_t tag[TD_HASH_SIZE + 1];
    static char conversation[] = "conv-1";
    for (uint32_t prompt = 1; prompt <= 200; prompt += 21) {
        Tandem__Open m = open_valid(prompt);
        m.private_prompt = true;
        m.prompt_tag = (ProtobufCBinaryData){TD_HASH_SIZE, tag};
        m.held_count = 3;
        m.held_hash = (ProtobufCBinaryData){TD_HASH_SIZE, tag};
        size_t size = prompt / 64 * 32 + 12;
        assert_int_equal(judge(FRAME_OPEN, 1, &m.base, size), 0);
        assert_int_equal(judge(FRAME_OPEN, 1, &m.base, size + 4), -TD_ERR_PROTOCOL);
        assert_int_equal(judge(FRAME_OPEN, 1, &m.base, size - 4), -TD_ERR_PROTOCOL);
        assert_int_equal(judge(FRAME_OPEN, 1, &m.base, size + 4 * prompt), -TD_ERR_PROTOCOL);
        m.private_prompt = false; /* the tag is nothing without it */
        assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 4 * prompt + 12), -TD_ERR_PROTOCOL);
    }
    for (int what = 0; what < 4; what++) {
        Tandem__Open m = open_valid(64);
        m.private_prompt = true;
        m.prompt_tag = (ProtobufCBinaryData){TD_HASH_SIZE, tag};
        assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 32), 0);
        if (what == 0)
            m.conversation = conversation;
        else if (what == 1)
            m.prompt_tag.len = 0;
        else if (what == 2)
            m.prompt_tag.len = TD_HASH_SIZE + 1;
        else
            m.conversation_length = 64, m.conversation_hash = (ProtobufCBinaryData){TD_HASH_SIZE, tag};
        assert_int_equal(judge(FRAME_OPEN, 1, &m.base, what == 3 ? 0 : 32), -TD_ERR_PROTOCOL);
    }
    Tandem__Open m = open_valid(LIMIT_PROMPT_TOKENS);
    m.private_prompt = true;
    m.prompt_tag = (ProtobufCBinaryData){TD_HASH_SIZE, tag};
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, LIMIT_PROMPT_TOKENS / 64 * 32), 0);
    m.prompt_count++;
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, LIMIT_PROMPT_TOKENS / 64 * 32), -TD_ERR_LIMIT);
}

static void test_longest_prompt(void **state)
{
    (void)state;
    Tandem__Open m = open_valid(LIMIT_PROMPT_TOKENS);
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 4 * LIMIT_PROMPT_TOKENS), 0);
    m.prompt_count++;
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 4 * LIMIT_PROMPT_TOKENS + 4), -TD_ERR_LIMIT);
    m.prompt_count = LIMIT_PROMPT_TOKENS - 1;
    m.held_hash = BYTES(32);
    m.held_count = 1; /* held tokens are part of it */
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 4 * LIMIT_PROMPT_TOKENS), 0);
    m.held_count = 2;
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 4 * LIMIT_PROMPT_TOKENS + 4), -TD_ERR_LIMIT);
    m.held_count = UINT32_MAX; /* a sum that would wrap around */
    assert_int_equal(judge(FRAME_OPEN, 1, &m.base, 4 * LIMIT_PROMPT_TOKENS), -TD_ERR_LIMIT);
}

static void test_plan(void **state)
{
    (void)state;
    Tandem__Range ranges[LIMIT_RANGES + 1], *list[LIMIT_RANGES + 1];
    for (uint32_t i = 0; i <= LIMIT_RANGES; i++) {
        tandem__range__init(&ranges[i]);
        ranges[i].first_token = 64 + 10 * i;
        ranges[i].count = 10;
        list[i] = &ranges[i];
    }
    Tandem__Plan m = TANDEM__PLAN__INIT;
    m.ranges = list;
    assert_int_equal(judge(FRAME_PLAN, 1, &m.base, 0), -TD_ERR_PROTOCOL); /* none */
    m.n_ranges = LIMIT_RANGES;
    assert_int_equal(judge(FRAME_PLAN, 1, &m.base, 0), 0);
    m.n_ranges = LIMIT_RANGES + 1;
    assert_int_equal(judge(FRAME_PLAN, 1, &m.base, 0), -TD_ERR_LIMIT);
    m.n_ranges = 3;
    ranges[1].count = 9; /* a hole */
    assert_int_equal(judge(FRAME_PLAN, 1, &m.base, 0), -TD_ERR_PROTOCOL);
    ranges[1].count = 11; /* an overlap */
    assert_int_equal(judge(FRAME_PLAN, 1, &m.base, 0), -TD_ERR_PROTOCOL);
    ranges[1].count = 10;
    ranges[2].count = 0;
    assert_int_equal(judge(FRAME_PLAN, 1, &m.base, 0), -TD_ERR_PROTOCOL);
    ranges[2].count = LIMIT_PROMPT_TOKENS - ranges[2].first_token;
    assert_int_equal(judge(FRAME_PLAN, 1, &m.base, 0), 0);
    ranges[2].count++;
    assert_int_equal(judge(FRAME_PLAN, 1, &m.base, 0), -TD_ERR_LIMIT);
}

static void test_parts(void **state)
{
    (void)state;
    static const struct {
        uint32_t offset, total;
        size_t size;
        int result;
    } cases[] = {
        {0, 10, 10, 0},
        {0, 10, 11, -TD_ERR_PROTOCOL},
        {9, 10, 1, 0},
        {9, 10, 2, -TD_ERR_PROTOCOL},
        {10, 10, 1, -TD_ERR_PROTOCOL},
        {0, 10, 0, -TD_ERR_PROTOCOL}, /* a frame with nothing in it */
        {0, 0, 1, -TD_ERR_PROTOCOL},
        {UINT32_MAX, 10, 11, -TD_ERR_PROTOCOL}, /* offset + size would wrap around */
        {LIMIT_PIECE_SIZE - 1, LIMIT_PIECE_SIZE, 1, 0},
        {0, LIMIT_PIECE_SIZE + 1, 10, -TD_ERR_LIMIT},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        Tandem__Hidden h = hidden_valid(cases[i].offset, cases[i].total);
        Tandem__KvBlock k = kv_valid(cases[i].offset, cases[i].total);
        assert_int_equal(judge(FRAME_HIDDEN, 1, &h.base, cases[i].size), cases[i].result);
        assert_int_equal(judge(FRAME_KV_BLOCK, 1, &k.base, cases[i].size), cases[i].result);
    }
    Tandem__Hidden h = hidden_valid(0, 10);
    h.count = 0;
    assert_int_equal(judge(FRAME_HIDDEN, 1, &h.base, 10), -TD_ERR_PROTOCOL);
    h.first_token = LIMIT_PROMPT_TOKENS - 5;
    h.count = 5;
    assert_int_equal(judge(FRAME_HIDDEN, 1, &h.base, 10), 0);
    h.count = 6;
    assert_int_equal(judge(FRAME_HIDDEN, 1, &h.base, 10), -TD_ERR_LIMIT);
    Tandem__Need n = TANDEM__NEED__INIT;
    n.first_token = LIMIT_PROMPT_TOKENS - 5;
    n.count = 5;
    assert_int_equal(judge(FRAME_NEED, 1, &n.base, 0), 0);
    n.count = 6;
    assert_int_equal(judge(FRAME_NEED, 1, &n.base, 0), -TD_ERR_LIMIT);
}

static void test_generate(void **state)
{
    (void)state;
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    for (size_t i = 0; i < TD_COUNT(bad); i++)
        for (int which = 0; which < 6; which++) {
            Tandem__Generate m = TANDEM__GENERATE__INIT;
            float *values[] = {
                &m.temperature,      &m.top_p, &m.min_p, &m.repetition_penalty, &m.presence_penalty,
                &m.frequency_penalty};
            assert_int_equal(judge(FRAME_GENERATE, 1, &m.base, 0), 0);
            *values[which] = bad[i];
            assert_int_equal(judge(FRAME_GENERATE, 1, &m.base, 0), -TD_ERR_PROTOCOL);
        }
    Tandem__Generate m = TANDEM__GENERATE__INIT;
    for (size_t size = 0; size <= 24; size++)
        assert_int_equal(judge(FRAME_GENERATE, 1, &m.base, size), size % 8 == 0 ? 0 : -TD_ERR_PROTOCOL);
    static const uint32_t bits[] = {0x7f800000, 0xff800000, 0x7fc00001, 0x7f7fffff};
    for (size_t i = 0; i < TD_COUNT(bits); i++) {
        store_le32(many_bytes + 12, bits[i]); /* the second bias */
        assert_int_equal(judge(FRAME_GENERATE, 1, &m.base, 16), bits[i] == 0x7f7fffff ? 0 : -TD_ERR_PROTOCOL);
    }
    memset(many_bytes, 0, 16);
}

static void test_token(void **state)
{
    (void)state;
    Tandem__TokenLogprobs one = TANDEM__TOKEN_LOGPROBS__INIT, *list[] = {&one, &one, &one};
    int32_t ids[2] = {1, 2};
    float values[2] = {-1, -2};
    Tandem__Token m = TANDEM__TOKEN__INIT;
    m.logprobs = list;
    for (size_t size = 0; size <= 8; size++)
        assert_int_equal(judge(FRAME_TOKEN, 1, &m.base, size), size == 4 || size == 8 ? 0 : -TD_ERR_PROTOCOL);
    for (m.n_logprobs = 0; m.n_logprobs <= 3; m.n_logprobs++)
        assert_int_equal(judge(FRAME_TOKEN, 1, &m.base, 8),
                         m.n_logprobs == 0 || m.n_logprobs == 2 ? 0 : -TD_ERR_PROTOCOL);
    m.n_logprobs = 1;
    one.top_ids = ids, one.top_logprobs = values;
    one.n_top_ids = 2, one.n_top_logprobs = 2;
    assert_int_equal(judge(FRAME_TOKEN, 1, &m.base, 4), 0);
    one.n_top_logprobs = 1;
    assert_int_equal(judge(FRAME_TOKEN, 1, &m.base, 4), -TD_ERR_PROTOCOL);
}

static void test_credit_and_texts(void **state)
{
    (void)state;
    Tandem__Credit credit = TANDEM__CREDIT__INIT;
    assert_int_equal(judge(FRAME_CREDIT, 1, &credit.base, 0), -TD_ERR_PROTOCOL); /* of nothing */
    credit.size = LIMIT_CREDIT_SIZE;
    assert_int_equal(judge(FRAME_CREDIT, 1, &credit.base, 0), 0);
    credit.size++;
    assert_int_equal(judge(FRAME_CREDIT, 1, &credit.base, 0), -TD_ERR_LIMIT);
    for (size_t beyond = 0; beyond < 2; beyond++) {
        Tandem__Error error = TANDEM__ERROR__INIT;
        error.text = text_of(LIMIT_TEXT_SIZE + beyond);
        assert_int_equal(judge(FRAME_ERROR, 1, &error.base, 0), beyond ? -TD_ERR_LIMIT : 0);
        Tandem__Goaway goaway = TANDEM__GOAWAY__INIT;
        goaway.reason = text_of(LIMIT_TEXT_SIZE + beyond);
        assert_int_equal(judge(FRAME_GOAWAY, 0, &goaway.base, 0), beyond ? -TD_ERR_LIMIT : 0);
        tandem__goaway__init(&goaway);
        goaway.node = text_of(LIMIT_NAME_SIZE + beyond);
        assert_int_equal(judge(FRAME_GOAWAY, 0, &goaway.base, 0), beyond ? -TD_ERR_LIMIT : 0);
    }
}

/* ---- hidden rows ---- */

#define ROWS  3
#define WIDTH 5
static const float rows[ROWS][WIDTH] = {
    {0, 1, -1, 0.5f, 65504}, {1e-8f, -3.25f, 100, 0, -0.0f}, {-127, 64, 1, 0.4f, 0}};

static void test_hidden_sizes(void **state)
{
    (void)state;
    assert_int_equal(hidden_wire_size(HIDDEN_F32, 3, 576), 3 * 576 * 4);
    assert_int_equal(hidden_wire_size(HIDDEN_F16, 3, 576), 3 * 576 * 2);
    assert_int_equal(hidden_wire_size(HIDDEN_INT8, 3, 576), 3 * (576 + 4));
    assert_int_equal(hidden_wire_size((enum hidden_dtype)3, 3, 576), 0);
    assert_true(hidden_wire_size(HIDDEN_F32, UINT32_MAX, 4) == (size_t)UINT32_MAX * 16); /* no overflow */
}

static void test_hidden_f32_keeps_every_bit(void **state)
{
    (void)state;
    uint8_t bytes[ROWS * WIDTH * 4];
    float back[ROWS][WIDTH];
    assert_int_equal(hidden_encode(HIDDEN_F32, rows[0], ROWS, WIDTH, bytes, sizeof bytes), 0);
    static const uint8_t one[] = {0, 0, 0x80, 0x3f}; /* 1.0f, little-endian */
    assert_memory_equal(bytes + 4, one, 4);
    assert_int_equal(hidden_decode(HIDDEN_F32, (struct span){bytes, sizeof bytes}, ROWS, WIDTH, back[0]), 0);
    assert_memory_equal(back, rows, sizeof rows);
}

static void test_hidden_f16(void **state)
{
    (void)state;
    uint8_t bytes[ROWS * WIDTH * 2];
    float back[ROWS][WIDTH];
    assert_int_equal(hidden_encode(HIDDEN_F16, rows[0], ROWS, WIDTH, bytes, sizeof bytes), 0);
    static const uint8_t expected[] = {0,    0, 0,    0x3c, 0,
                                       0xbc, 0, 0x38, 0xff, 0x7b}; /* 0, 1, -1, 0.5, 65504 */
    assert_memory_equal(bytes, expected, sizeof expected);
    assert_int_equal(hidden_decode(HIDDEN_F16, (struct span){bytes, sizeof bytes}, ROWS, WIDTH, back[0]), 0);
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < WIDTH; i++)
            assert_true(fabsf(back[r][i] - rows[r][i]) <= fabsf(rows[r][i]) / 2048 + 1e-7f);
    const float beyond[1] = {65520}; /* the first value that rounds to infinity */
    assert_int_equal(hidden_encode(HIDDEN_F16, beyond, 1, 1, bytes, sizeof bytes), -TD_ERR_FORMAT);
    const float below[1] = {65519};
    assert_int_equal(hidden_encode(HIDDEN_F16, below, 1, 1, bytes, sizeof bytes), 0);
}

static void test_hidden_int8(void **state)
{
    (void)state;
    uint8_t bytes[ROWS * (WIDTH + 4)];
    float back[ROWS][WIDTH];
    assert_int_equal(hidden_encode(HIDDEN_INT8, rows[0], ROWS, WIDTH, bytes, sizeof bytes), 0);
    static const uint8_t last[] = {0, 0, 0x80, 0x3f, 0x81, 64, 1, 0, 0}; /* scale 1.0, then -127 64 1 0 0 */
    assert_memory_equal(bytes + 2 * (WIDTH + 4), last, sizeof last);
    assert_int_equal(hidden_decode(HIDDEN_INT8, (struct span){bytes, sizeof bytes}, ROWS, WIDTH, back[0]), 0);
    for (int r = 0; r < ROWS; r++) {
        float top = 0;
        for (int i = 0; i < WIDTH; i++)
            top = fmaxf(top, fabsf(rows[r][i]));
        for (int i = 0; i < WIDTH; i++)
            assert_true(fabsf(back[r][i] - rows[r][i]) <= top / 127 / 2 * 1.0001f);
    }
    const float zeros[WIDTH] = {0}, tiny[WIDTH] = {1e-45f, -1e-45f};
    assert_int_equal(hidden_encode(HIDDEN_INT8, zeros, 1, WIDTH, bytes, sizeof bytes), 0);
    assert_int_equal(hidden_decode(HIDDEN_INT8, (struct span){bytes, WIDTH + 4}, 1, WIDTH, back[0]), 0);
    assert_true(back[0][0] == 0);
    assert_int_equal(hidden_encode(HIDDEN_INT8, tiny, 1, WIDTH, bytes, sizeof bytes), 0);
}

static void test_hidden_refuses(void **state)
{
    (void)state;
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    static const enum hidden_dtype dtypes[] = {HIDDEN_F32, HIDDEN_F16, HIDDEN_INT8};
    uint8_t bytes[64];
    float row[4] = {0}, back[4];
    for (size_t d = 0; d < TD_COUNT(dtypes); d++) {
        size_t size = hidden_wire_size(dtypes[d], 1, 4);
        assert_int_equal(hidden_encode(dtypes[d], row, 1, 4, bytes, size - 1), -TD_ERR_SHAPE);
        assert_int_equal(hidden_encode(dtypes[d], row, 1, 4, bytes, size), 0);
        assert_int_equal(hidden_decode(dtypes[d], (struct span){bytes, size - 1}, 1, 4, back), -TD_ERR_SHAPE);
        assert_int_equal(hidden_decode(dtypes[d], (struct span){bytes, size + 1}, 1, 4, back), -TD_ERR_SHAPE);
        for (size_t i = 0; i < TD_COUNT(bad); i++) {
            float wrong[4] = {0, 0, 0, bad[i]};
            assert_int_equal(hidden_encode(dtypes[d], wrong, 1, 4, bytes, size), -TD_ERR_FORMAT);
            assert_int_equal(hidden_encode(dtypes[d], row, 1, 4, bytes, size), 0);
            memcpy(dtypes[d] == HIDDEN_INT8 ? bytes : bytes + 12, &bad[i], 4); /* its scale */
            if (dtypes[d] == HIDDEN_F16)
                store_le16(bytes + 6, f32_to_f16(bad[i]));
            assert_int_equal(hidden_decode(dtypes[d], (struct span){bytes, size}, 1, 4, back),
                             -TD_ERR_FORMAT);
        }
    }
    assert_int_equal(hidden_encode((enum hidden_dtype)3, row, 1, 4, bytes, sizeof bytes),
                     -TD_ERR_UNSUPPORTED);
    assert_int_equal(hidden_decode((enum hidden_dtype)3, (struct span){bytes, 0}, 1, 4, back),
                     -TD_ERR_UNSUPPORTED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_sizes_must_add_up),
        cmocka_unit_test(test_header_limit),
        cmocka_unit_test(test_header_limit_of_a_link),
        cmocka_unit_test(test_frame_limit),
        cmocka_unit_test(test_encode_arguments),
        cmocka_unit_test(test_broken_headers),
        cmocka_unit_test(test_small_arena),
        cmocka_unit_test(test_streams_by_type),
        cmocka_unit_test(test_frames_without_payload),
        cmocka_unit_test(test_hello),
        cmocka_unit_test(test_welcome),
        cmocka_unit_test(test_seal_of_welcome),
        cmocka_unit_test(test_fetch),
        cmocka_unit_test(test_open),
        cmocka_unit_test(test_private_open),
        cmocka_unit_test(test_longest_prompt),
        cmocka_unit_test(test_plan),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_generate),
        cmocka_unit_test(test_token),
        cmocka_unit_test(test_credit_and_texts),
        cmocka_unit_test(test_hidden_sizes),
        cmocka_unit_test(test_hidden_f32_keeps_every_bit),
        cmocka_unit_test(test_hidden_f16),
        cmocka_unit_test(test_hidden_int8),
        cmocka_unit_test(test_hidden_refuses),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    arena_deinit(&arena);
    return failed;
}
