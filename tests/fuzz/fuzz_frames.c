/* fuzz_frames: what a peer may send. The first byte chooses:
 *     even  the rest is one frame for wire_decode; if it decodes, it encodes again to a frame that decodes to the same
 *     odd   the rest is a conversation with a link, frame after frame (bit 1: an edge's, else a cloud's; bit 2: from the greeting on):
 *           u8 time step (x 4 ms) | u8 type | u8 flags | u8 stream | u8 header size | u16le payload size | header | payload
 * Whatever comes, both windows stay in balance, memory stays within them, what the owner is given holds what wire.h promises, and
 * every frame that the link says in answer is a valid one. */
#include "protocol/link_internal.h"
#include <stdlib.h>

#define MUST(condition)                                                                                      \
    do {                                                                                                     \
        if (!(condition))                                                                                    \
            abort();                                                                                         \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t bytes[LIMIT_FRAME_SIZE], answer[LIMIT_FRAME_SIZE];

struct owner {
    struct link *link;
    uint64_t unconsumed;
    unsigned seen;
};

static void greet(struct owner *o, const struct wire_frame *f)
{
    static uint8_t zeros[TD_HASH_SIZE];
    Tandem__Version version = TANDEM__VERSION__INIT;
    version.layout = (ProtobufCBinaryData){sizeof zeros, zeros};
    Tandem__Welcome welcome = TANDEM__WELCOME__INIT;
    welcome.version = &version;
    welcome.principal_key = version.layout;
    MUST(f->hello->n_versions >= 1 && f->hello->n_versions <= LIMIT_VERSIONS &&
         f->hello->fingerprint.len == TD_HASH_SIZE);
    MUST(link_send(o->link, FRAME_WELCOME, 0, &welcome.base, NULL, 0) == 0);
}

/* An owner that does a little of everything, by what it sees. */
static int on_frame(void *ctx, const struct wire_frame *f)
{
    struct owner *o = ctx;
    volatile uint8_t sum = 0;
    for (size_t i = 0; i < f->payload.size; i++)
        sum = (uint8_t)(sum + f->payload.data[i]);
    o->seen++;
    if (f->type == FRAME_HELLO) {
        greet(o, f);
    } else if (f->type == FRAME_OPEN) {
        MUST(f->open->request_id.len == 16);
        link_send(o->link, FRAME_OPEN_ACK, f->stream, NULL, NULL, 0);
        link_send(o->link, FRAME_TOKEN, f->stream, NULL, bytes, 4);
    } else if (frame_is_bulk(f->type)) {
        MUST(f->payload.size == (f->type == FRAME_HIDDEN ? f->hidden->total : f->kv_block->total));
        o->unconsumed += f->payload.size;
        if (o->seen % 3 == 0)
            link_consumed(o->link, f->stream, f->payload.size);
        Tandem__Ingested ingested = TANDEM__INGESTED__INIT;
        link_send(o->link, FRAME_INGESTED, f->stream, &ingested.base, NULL, 0);
    } else if (f->type == FRAME_FETCH) {
        Tandem__KvBlock kv = TANDEM__KV_BLOCK__INIT;
        uint8_t *piece = calloc(1, 5000);
        if (link_send_bulk(o->link, FRAME_KV_BLOCK, f->stream, &kv.base, f->fetch->block_index, piece, 5000) <
            0)
            free(piece);
    } else if (f->type == FRAME_PLAN) {
        link_void(o->link, f->stream, f->plan->epoch);
    } else if (f->type == FRAME_NEED || f->type == FRAME_GENERATE) {
        if (o->seen % 4 == 0)
            link_close_stream(o->link, f->stream);
        else
            link_send(o->link, FRAME_DONE, f->stream, NULL, NULL, 0);
    }
    return 0;
}

static void check_balanced(const struct link *l)
{
    uint64_t held = 0, memory = 0;
    if (l->state != LINK_READY)
        return;
    for (uint32_t i = 0; i < l->slot_count; i++)
        for (int class = 0; l->streams[i].id && class < BULK_CLASSES; class ++) {
            const struct partial *p = &l->streams[i].partials[class];
            held += p->skip ? 0 : p->have;
            memory += p->capacity;
        }
    MUST(l->in.open + held + l->in.unconsumed + l->in.ungranted == l->in.window);
    MUST(memory <= 2 * held && held <= l->in.window);
    MUST(l->stream_open_count <= LIMIT_STREAMS && l->slot_count <= LINK_SLOTS);
}

/* Everything that the link wants to say is right. */
static void hear_answers(struct link *l, uint64_t now_us)
{
    static struct arena arena = {.limit_size = WIRE_ARENA_SIZE};
    for (int i = 0; i < 1000; i++) {
        int64_t size = link_next(l, answer, sizeof answer, now_us);
        if (size <= 0) {
            MUST(size == 0 || (size == -TD_ERR_CLOSED && link_state(l) == LINK_CLOSED));
            return;
        }
        struct wire_frame f;
        arena_reset(&arena);
        MUST(wire_decode(answer, (size_t)size, LIMIT_HEADER_SIZE, &arena, &f) == 0);
    }
    abort(); /* it never stops */
}

static size_t frame_from(struct reader *r, uint64_t *now_us)
{
    *now_us += reader_u8(r) * UINT64_C(4000);
    memset(bytes, 0, WIRE_HEAD_SIZE);
    bytes[0] = reader_u8(r);
    bytes[1] = reader_u8(r);
    store_le32(bytes + 4, reader_u8(r));
    size_t header_size = reader_u8(r), payload_size = reader_u16(r);
    const uint8_t *header = reader_take(r, header_size);
    /* Payloads need not be in the input: long ones are zeros. */
    size_t given = TD_MIN(payload_size, (size_t)(r->end - r->next));
    const uint8_t *payload = reader_take(r, given > 64 ? 0 : given);
    store_le16(bytes + 2, (uint16_t)header_size);
    store_le32(bytes + 8, (uint32_t)payload_size);
    if (header_size > 0 && header)
        memcpy(bytes + WIRE_HEAD_SIZE, header, header_size);
    memset(bytes + WIRE_HEAD_SIZE + header_size, 0, payload_size);
    if (payload && given <= 64)
        memcpy(bytes + WIRE_HEAD_SIZE + header_size, payload, given);
    return WIRE_HEAD_SIZE + header_size + payload_size;
}

/* Bring the link to READY, an edge's also with two streams and something to upload. */
static void make_ready(struct owner *o, bool edge)
{
    static uint8_t zeros[TD_HASH_SIZE];
    Tandem__Version version = TANDEM__VERSION__INIT, *versions = &version;
    version.layout = (ProtobufCBinaryData){sizeof zeros, zeros};
    Tandem__Hello hello = TANDEM__HELLO__INIT;
    hello.n_versions = 1;
    hello.versions = &versions;
    hello.fingerprint = version.layout;
    Tandem__Welcome welcome = TANDEM__WELCOME__INIT;
    welcome.version = &version;
    welcome.principal_key = version.layout;
    if (!edge) {
        int64_t size = wire_encode(FRAME_HELLO, 0, 0, &hello.base, NULL, 0, bytes, sizeof bytes);
        MUST(link_receive(o->link, bytes, (size_t)size, 1) == 0);
        return;
    }
    MUST(link_send(o->link, FRAME_HELLO, 0, &hello.base, NULL, 0) == 0);
    int64_t size = wire_encode(FRAME_WELCOME, 0, 0, &welcome.base, NULL, 0, bytes, sizeof bytes);
    MUST(link_receive(o->link, bytes, (size_t)size, 1) == 0);
    for (uint32_t stream = 1; stream <= 3; stream += 2) {
        Tandem__Open open = TANDEM__OPEN__INIT;
        open.request_id = (ProtobufCBinaryData){16, zeros};
        open.prompt_count = 1;
        MUST(link_send(o->link, FRAME_OPEN, stream, &open.base, zeros, 4) == 0);
        Tandem__Hidden hidden = TANDEM__HIDDEN__INIT;
        hidden.count = 1;
        MUST(link_send_bulk(o->link, FRAME_HIDDEN, stream, &hidden.base, 1, calloc(1, 100000), 100000) == 0);
    }
}

static void converse(const uint8_t *data, size_t size, unsigned how)
{
    struct owner o = {0};
    struct link_config config = {.role = how & 2 ? LINK_EDGE : LINK_CLOUD,
                                 .on_frame = on_frame,
                                 .ctx = &o,
                                 .connection_window = 200000,
                                 .stream_window = 100000};
    uint64_t now_us = 1000000;
    o.link = link_create(&config, now_us);
    if (!(how & 4))
        make_ready(&o, how & 2);
    struct reader r = reader_over(data, size);
    while (r.next < r.end && !r.bad) {
        size_t frame_size = frame_from(&r, &now_us);
        int rc = link_receive(o.link, bytes, frame_size, now_us);
        MUST(rc <= 0 && (rc == 0 || link_state(o.link) == LINK_CLOSED));
        check_balanced(o.link);
        hear_answers(o.link, now_us);
        link_tick(o.link, now_us);
        link_wait_us(o.link, now_us);
        check_balanced(o.link);
    }
    hear_answers(o.link, now_us);
    link_destroy(o.link);
}

/* Unknown fields are kept by protobuf-c as bytes, wherever they stand; nobody sends them on, so they need not survive. */
static void strip_unknown(ProtobufCMessage *m)
{
    m->n_unknown_fields = 0;
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &m->descriptor->fields[i];
        if (field->type != PROTOBUF_C_TYPE_MESSAGE)
            continue;
        uint8_t *at = (uint8_t *)m + field->offset;
        bool repeated = field->label == PROTOBUF_C_LABEL_REPEATED;
        ProtobufCMessage **list = repeated ? *(ProtobufCMessage ***)at : (ProtobufCMessage **)at;
        size_t count = repeated ? *(size_t *)((uint8_t *)m + field->quantifier_offset) : *list != NULL;
        for (size_t k = 0; k < count; k++)
            strip_unknown(list[k]);
    }
}

static void decode_one(const uint8_t *data, size_t size)
{
    static struct arena arena = {.limit_size = WIRE_ARENA_SIZE}, again = {.limit_size = WIRE_ARENA_SIZE};
    struct wire_frame f, g;
    arena_reset(&arena), arena_reset(&again);
    if (wire_decode(data, size, LIMIT_HEADER_SIZE, &arena, &f) != 0)
        return;
    strip_unknown(f.header);
    /* Packed anew it may be longer (a number in more bytes than it needs is not kept, but fields that came twice are), or too
     * long; if it is a frame, it is the same frame. */
    int64_t made =
        wire_encode(f.type, f.flags, f.stream, f.header, f.payload.data, f.payload.size, bytes, sizeof bytes);
    if (made < 0) {
        MUST(made == -TD_ERR_LIMIT);
        return;
    }
    MUST(wire_decode(bytes, (size_t)made, LIMIT_HEADER_SIZE, &again, &g) == 0);
    MUST(g.type == f.type && g.stream == f.stream && g.payload.size == f.payload.size);
    MUST(wire_encode(g.type, g.flags, g.stream, g.header, g.payload.data, g.payload.size, answer,
                     sizeof answer) == made);
    MUST(memcmp(bytes, answer, (size_t)made) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    if (data[0] & 1)
        converse(data + 1, size - 1, data[0]);
    else
        decode_one(data + 1, size - 1);
    return 0;
}
