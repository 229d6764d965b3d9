/* wire: frames of tandem.v1 <-> bytes. protocol/WIRE.md has the byte tables.
 *
 * Decoding takes hostile bytes. Sizes are checked before anything is read; protobuf-c allocates from the caller's arena
 * alone, so the most that one header can make us hold is bounded by the arena's limit, whatever numbers it contains.
 * A frame that is decoded has passed wire_check: widths, list lengths and payload shape are right for its type. */
#include "protocol/wire_schema.h"

static const struct frame_schema schema[FRAME_TYPE_END] = {
    [FRAME_HELLO] = {"HELLO", &tandem__hello__descriptor, FROM_EDGE, STREAM_ZERO, PAYLOAD_NONE},
    [FRAME_WELCOME] = {"WELCOME", &tandem__welcome__descriptor, FROM_CLOUD, STREAM_ZERO, PAYLOAD_NONE},
    [FRAME_OPEN] = {"OPEN", &tandem__open__descriptor, FROM_EDGE, STREAM_SOME, PAYLOAD_IDS},
    [FRAME_OPEN_ACK] = {"OPEN_ACK", &tandem__open_ack__descriptor, FROM_CLOUD, STREAM_SOME, PAYLOAD_NONE},
    [FRAME_PLAN] = {"PLAN", &tandem__plan__descriptor, FROM_EDGE, STREAM_SOME, PAYLOAD_NONE},
    [FRAME_HIDDEN] = {"HIDDEN", &tandem__hidden__descriptor, FROM_EDGE, STREAM_SOME, PAYLOAD_BULK},
    [FRAME_KV_BLOCK] = {"KV_BLOCK", &tandem__kv_block__descriptor, FROM_EDGE | FROM_CLOUD, STREAM_SOME,
                        PAYLOAD_BULK},
    [FRAME_INGESTED] = {"INGESTED", &tandem__ingested__descriptor, FROM_EDGE | FROM_CLOUD, STREAM_ANY,
                        PAYLOAD_NONE},
    [FRAME_NEED] = {"NEED", &tandem__need__descriptor, FROM_CLOUD, STREAM_SOME, PAYLOAD_NONE},
    [FRAME_FETCH] = {"FETCH", &tandem__fetch__descriptor, FROM_EDGE, STREAM_SOME, PAYLOAD_IDS},
    [FRAME_GENERATE] = {"GENERATE", &tandem__generate__descriptor, FROM_EDGE, STREAM_SOME, PAYLOAD_BIAS},
    [FRAME_TOKEN] = {"TOKEN", &tandem__token__descriptor, FROM_CLOUD, STREAM_SOME, PAYLOAD_IDS},
    [FRAME_DONE] = {"DONE", &tandem__done__descriptor, FROM_CLOUD, STREAM_SOME, PAYLOAD_NONE},
    [FRAME_CANCEL] = {"CANCEL", &tandem__cancel__descriptor, FROM_EDGE | FROM_CLOUD, STREAM_SOME,
                      PAYLOAD_NONE},
    [FRAME_CREDIT] = {"CREDIT", &tandem__credit__descriptor, FROM_EDGE | FROM_CLOUD, STREAM_ANY,
                      PAYLOAD_NONE},
    [FRAME_PING] = {"PING", &tandem__ping__descriptor, FROM_EDGE | FROM_CLOUD, STREAM_ZERO, PAYLOAD_NONE},
    [FRAME_ERROR] = {"ERROR", &tandem__error__descriptor, FROM_EDGE | FROM_CLOUD, STREAM_ANY, PAYLOAD_NONE},
    [FRAME_GOAWAY] = {"GOAWAY", &tandem__goaway__descriptor, FROM_EDGE | FROM_CLOUD, STREAM_ZERO,
                      PAYLOAD_NONE},
};

const struct frame_schema *frame_schema(unsigned type)
{
    return type > 0 && type < FRAME_TYPE_END ? &schema[type] : NULL;
}

const char *frame_type_name(unsigned type)
{
    const struct frame_schema *known = frame_schema(type);
    return known ? known->name : "?";
}

bool frame_is_bulk(unsigned type)
{
    return type == FRAME_HIDDEN || type == FRAME_KV_BLOCK;
}

/* ---- encode ---- */

/* The greetings are read by a peer that does not trust us yet. */
static size_t header_limit_of(unsigned type)
{
    return type == FRAME_HELLO || type == FRAME_WELCOME ? LIMIT_HEADER_SIZE_BEFORE_WELCOME
                                                        : LIMIT_HEADER_SIZE;
}

/* Headers without a value stand for one with all fields at their defaults, which packs to nothing; the checks want to
 * read it all the same. */
union any_header {
    Tandem__Hello hello;
    Tandem__Welcome welcome;
    Tandem__Open open;
    Tandem__OpenAck open_ack;
    Tandem__Generate generate;
    Tandem__Done done;
    Tandem__Token token;
    Tandem__Hidden hidden;
    Tandem__KvBlock kv_block;
    Tandem__Error error;
    ProtobufCMessage base;
};

int64_t wire_encode(unsigned type, unsigned flags, uint32_t stream, const ProtobufCMessage *header,
                    const void *payload, size_t payload_size, uint8_t *dst, size_t capacity)
{
    const struct frame_schema *known = frame_schema(type);
    union any_header empty;
    if (!known || (header && header->descriptor != known->descriptor))
        return -TD_ERR_ARG;
    if (!header) {
        if (known->descriptor->sizeof_message > sizeof empty)
            return -TD_ERR_ARG;
        protobuf_c_message_init(known->descriptor, &empty);
        header = &empty.base;
    }
    struct wire_frame frame = {
        .type = (uint8_t)type, .flags = (uint8_t)flags, .stream = stream, .payload = {payload, payload_size}};
    memcpy(&frame.header, &header, sizeof header); /* the checks only read it */
    int rc = wire_check(&frame);
    if (rc < 0)
        return rc;
    size_t header_size = protobuf_c_message_get_packed_size(header);
    if (header_size > header_limit_of(type) || payload_size > LIMIT_FRAME_SIZE ||
        WIRE_HEAD_SIZE + header_size + payload_size > LIMIT_FRAME_SIZE)
        return -TD_ERR_LIMIT;
    if (WIRE_HEAD_SIZE + header_size + payload_size > capacity)
        return -TD_ERR_NOSPACE;
    dst[0] = (uint8_t)type;
    dst[1] = (uint8_t)flags;
    store_le16(dst + 2, (uint16_t)header_size);
    store_le32(dst + 4, stream);
    store_le32(dst + 8, (uint32_t)payload_size);
    store_le32(dst + 12, 0);
    protobuf_c_message_pack(header, dst + WIRE_HEAD_SIZE);
    if (payload_size > 0)
        memcpy(dst + WIRE_HEAD_SIZE + header_size, payload, payload_size);
    return (int64_t)(WIRE_HEAD_SIZE + header_size + payload_size);
}

/* ---- decode ---- */

struct unpack_memory { /* what protobuf-c allocates from */
    struct arena *arena;
    bool exhausted;
};

static void *unpack_alloc(void *ctx, size_t size)
{
    struct unpack_memory *memory = ctx;
    void *p = arena_alloc(memory->arena, size);
    memory->exhausted |= !p;
    return p;
}

static void unpack_free(void *ctx, void *pointer)
{
    (void)ctx, (void)pointer; /* the arena is reset as a whole */
}

int wire_decode(const void *data, size_t size, size_t header_limit, struct arena *arena,
                struct wire_frame *out)
{
    const uint8_t *bytes = data;
    *out = (struct wire_frame){0};
    if (size > LIMIT_FRAME_SIZE)
        return -TD_ERR_LIMIT;
    if (size < WIRE_HEAD_SIZE)
        return -TD_ERR_PROTOCOL;
    size_t header_size = load_le16(bytes + 2), payload_size = load_le32(bytes + 8);
    if (header_size > header_limit)
        return -TD_ERR_LIMIT;
    if (payload_size > LIMIT_FRAME_SIZE || WIRE_HEAD_SIZE + header_size + payload_size != size)
        return -TD_ERR_PROTOCOL;
    out->type = bytes[0];
    out->flags = bytes[1];
    out->stream = load_le32(bytes + 4);
    out->payload = (struct span){bytes + WIRE_HEAD_SIZE + header_size, payload_size};
    const struct frame_schema *known = frame_schema(out->type);
    if (!known)
        return out->flags & WIRE_FLAG_OPTIONAL ? 1 : -TD_ERR_PROTOCOL;

    struct unpack_memory memory = {.arena = arena};
    ProtobufCAllocator allocator = {.alloc = unpack_alloc, .free = unpack_free, .allocator_data = &memory};
    out->header =
        protobuf_c_message_unpack(known->descriptor, &allocator, header_size, bytes + WIRE_HEAD_SIZE);
    if (!out->header)
        return memory.exhausted ? -TD_ERR_NOMEM : -TD_ERR_PROTOCOL;
    return wire_check(out);
}
