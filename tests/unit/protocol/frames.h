/* frames: headers that every rule accepts, frames made without any rule, and a link whose owner writes down what it sees.
 * Shared by the tests of wire and link; each test changes one thing and looks what happens. */
#ifndef TANDEM_TESTS_FRAMES_H
#define TANDEM_TESTS_FRAMES_H
#include "protocol/link.h"
#include "shared/kv_block.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static uint8_t thirty_two[32] = {1, 2, 3};
static uint8_t frame_bytes[2 * LIMIT_FRAME_SIZE]; /* the last frame made */
static uint8_t many_bytes[4 * LIMIT_PIECE_SIZE];  /* payload of any size */

static char text_secret[] = "secret", text_test[] = "test", text_node[] = "node:1";

#define BYTES(size) ((ProtobufCBinaryData){(size), thirty_two})

static inline Tandem__Version *version_valid(void)
{
    static Tandem__Version v;
    tandem__version__init(&v);
    v.protocol = WIRE_PROTOCOL;
    v.layout = BYTES(32);
    v.numerics = 1;
    return &v;
}

static inline Tandem__Hello hello_valid(void)
{
    static Tandem__Version *versions[LIMIT_VERSIONS + 1];
    for (size_t i = 0; i < TD_COUNT(versions); i++)
        versions[i] = version_valid();
    Tandem__Hello m = TANDEM__HELLO__INIT;
    m.n_versions = 1;
    m.versions = versions;
    m.fingerprint = BYTES(32);
    m.token = text_secret;
    m.agent = text_test;
    return m;
}

static inline Tandem__Welcome welcome_valid(void)
{
    Tandem__Welcome m = TANDEM__WELCOME__INIT;
    m.version = version_valid();
    m.tenant = text_test;
    m.principal = text_test;
    m.principal_key = BYTES(32);
    m.node = text_node;
    return m;
}

static inline Tandem__Open open_valid(uint32_t prompt_count)
{
    Tandem__Open m = TANDEM__OPEN__INIT;
    m.request_id = BYTES(16);
    m.attempt = 1;
    m.prompt_count = prompt_count;
    return m;
}

static inline Tandem__Hidden hidden_valid(uint32_t offset, uint32_t total)
{
    Tandem__Hidden m = TANDEM__HIDDEN__INIT;
    m.epoch = 1;
    m.count = 1;
    m.offset = offset;
    m.total = total;
    return m;
}

static inline Tandem__KvBlock kv_valid(uint32_t offset, uint32_t total)
{
    Tandem__KvBlock m = TANDEM__KV_BLOCK__INIT;
    m.epoch = 1;
    m.offset = offset;
    m.total = total;
    return m;
}

/* A frame as bytes in frame_bytes, past every check. Returns its size. */
static inline size_t frame_raw(unsigned type, unsigned flags, uint32_t stream, const ProtobufCMessage *header,
                               const void *payload, size_t payload_size)
{
    size_t header_size = header ? protobuf_c_message_get_packed_size(header) : 0;
    frame_bytes[0] = (uint8_t)type;
    frame_bytes[1] = (uint8_t)flags;
    store_le16(frame_bytes + 2, (uint16_t)header_size);
    store_le32(frame_bytes + 4, stream);
    store_le32(frame_bytes + 8, (uint32_t)payload_size);
    store_le32(frame_bytes + 12, 0);
    if (header)
        protobuf_c_message_pack(header, frame_bytes + WIRE_HEAD_SIZE);
    if (payload_size > 0)
        memcpy(frame_bytes + WIRE_HEAD_SIZE + header_size, payload, payload_size);
    return WIRE_HEAD_SIZE + header_size + payload_size;
}

/* A frame of any type that is right in itself, in frame_bytes. Returns its size. */
static inline size_t frame_valid(unsigned type, uint32_t stream)
{
    Tandem__Range range = TANDEM__RANGE__INIT, *ranges = &range;
    range.count = 1;
    Tandem__Plan plan = TANDEM__PLAN__INIT;
    plan.n_ranges = 1;
    plan.ranges = &ranges;
    Tandem__Hello hello = hello_valid();
    Tandem__Welcome welcome = welcome_valid();
    Tandem__Open open = open_valid(1);
    Tandem__Hidden hidden = hidden_valid(0, 4);
    Tandem__KvBlock kv = kv_valid(0, 4);
    Tandem__Credit credit = TANDEM__CREDIT__INIT;
    credit.size = 1;
    const ProtobufCMessage *headers[FRAME_TYPE_END] = {
        [FRAME_HELLO] = &hello.base,  [FRAME_WELCOME] = &welcome.base, [FRAME_OPEN] = &open.base,
        [FRAME_PLAN] = &plan.base,    [FRAME_HIDDEN] = &hidden.base,   [FRAME_KV_BLOCK] = &kv.base,
        [FRAME_CREDIT] = &credit.base};
    bool has_payload = type == FRAME_OPEN || type == FRAME_TOKEN || frame_is_bulk(type);
    return frame_raw(type, 0, stream, type < FRAME_TYPE_END ? headers[type] : NULL, many_bytes,
                     has_payload ? 4 : 0);
}

/* ---- a link and its owner ---- */

#define SEEN_MAX 4096
struct seen { /* a frame that the owner was given */
    unsigned type;
    uint32_t stream;
    size_t payload_size;
    uint8_t first, last; /* payload bytes */
};
struct owner {
    struct link *link;
    struct seen seen[SEEN_MAX];
    size_t seen_count;
    int answer;                                                     /* what on_frame returns */
    void (*react)(struct owner *o, const struct wire_frame *frame); /* or NULL */
    uint64_t now_us;
};

static inline int owner_on_frame(void *ctx, const struct wire_frame *f)
{
    struct owner *o = ctx;
    if (o->seen_count < SEEN_MAX)
        o->seen[o->seen_count++] =
            (struct seen){f->type, f->stream, f->payload.size, f->payload.size ? f->payload.data[0] : 0,
                          f->payload.size ? f->payload.data[f->payload.size - 1] : 0};
    if (o->react)
        o->react(o, f);
    return o->answer;
}

static inline void owner_start(struct owner *o, enum link_role role, uint32_t connection_window,
                               uint32_t stream_window)
{
    *o = (struct owner){.now_us = 1000000};
    struct link_config config = {.role = role,
                                 .on_frame = owner_on_frame,
                                 .ctx = o,
                                 .connection_window = connection_window,
                                 .stream_window = stream_window};
    o->link = link_create(&config, o->now_us);
    assert_non_null(o->link);
}

static inline int give(struct owner *o, unsigned type, uint32_t stream, const ProtobufCMessage *header,
                       const void *payload, size_t payload_size)
{
    size_t size = frame_raw(type, 0, stream, header, payload, payload_size);
    return link_receive(o->link, frame_bytes, size, o->now_us);
}

static inline int give_valid(struct owner *o, unsigned type, uint32_t stream)
{
    return link_receive(o->link, frame_bytes, frame_valid(type, stream), o->now_us);
}

/* The next frame that the link wants to send, decoded; type 0: none. Valid until the next call. */
static inline struct wire_frame take(struct owner *o)
{
    static struct arena arena = {.limit_size = WIRE_ARENA_SIZE};
    static uint8_t bytes[LIMIT_FRAME_SIZE];
    arena_reset(&arena);
    struct wire_frame f = {0};
    int64_t size = link_next(o->link, bytes, sizeof bytes, o->now_us);
    if (size > 0)
        assert_int_equal(wire_decode(bytes, (size_t)size, LIMIT_HEADER_SIZE, &arena, &f), 0);
    return f;
}

/* Skip what the link says for itself. */
static inline struct wire_frame take_owned(struct owner *o)
{
    for (;;) {
        struct wire_frame f = take(o);
        if (f.type != FRAME_PING && f.type != FRAME_CREDIT && !(f.type == FRAME_INGESTED && f.stream == 0))
            return f;
    }
}

/* A cloud's link that has welcomed its edge. */
static inline void cloud_ready(struct owner *o, uint32_t connection_window, uint32_t stream_window)
{
    owner_start(o, LINK_CLOUD, connection_window, stream_window);
    Tandem__Hello hello = hello_valid();
    assert_int_equal(give(o, FRAME_HELLO, 0, &hello.base, NULL, 0), 0);
    Tandem__Welcome welcome = welcome_valid();
    assert_int_equal(link_send(o->link, FRAME_WELCOME, 0, &welcome.base, NULL, 0), 0);
    assert_int_equal(take(o).type, FRAME_WELCOME);
    while (take(o).type)
        ;
    o->seen_count = 0;
}

/* An edge's link that was welcomed with these windows (0: the usual ones). */
static inline void edge_ready(struct owner *o, uint32_t connection_window, uint32_t stream_window)
{
    owner_start(o, LINK_EDGE, 0, 0);
    Tandem__Hello hello = hello_valid();
    assert_int_equal(link_send(o->link, FRAME_HELLO, 0, &hello.base, NULL, 0), 0);
    assert_int_equal(take(o).type, FRAME_HELLO);
    Tandem__Welcome welcome = welcome_valid();
    welcome.connection_window = connection_window;
    welcome.stream_window = stream_window;
    assert_int_equal(give(o, FRAME_WELCOME, 0, &welcome.base, NULL, 0), 0);
    while (take(o).type)
        ;
    o->seen_count = 0;
}

static inline int cloud_open(struct owner *o, uint32_t stream)
{
    Tandem__Open open = open_valid(1);
    return give(o, FRAME_OPEN, stream, &open.base, many_bytes, 4);
}

static inline int edge_open(struct owner *o, uint32_t stream)
{
    Tandem__Open open = open_valid(1);
    return link_send(o->link, FRAME_OPEN, stream, &open.base, many_bytes, 4);
}

static inline void owner_stop(struct owner *o)
{
    link_destroy(o->link);
    o->link = NULL;
}

/* The link has failed with `code` and says so on stream 0 as its last frame. */
static inline void assert_failed(struct owner *o, int code)
{
    assert_int_equal(link_state(o->link), LINK_CLOSED);
    assert_true(link_error_text(o->link)[0] != '\0');
    struct wire_frame f = take(o);
    assert_int_equal(f.type, FRAME_ERROR);
    assert_int_equal(f.stream, 0);
    assert_int_equal(f.error->code, -code);
    uint8_t none[64];
    assert_int_equal(link_next(o->link, none, sizeof none, o->now_us), -TD_ERR_CLOSED);
    assert_int_equal(link_receive(o->link, none, sizeof none, o->now_us), -TD_ERR_CLOSED);
}

#endif
