/* wire: frames of tandem.v1 as bytes. A frame is one binary WebSocket message:
 *     0 u8 type | 1 u8 flags | 2 u16le header size | 4 u32le stream | 8 u32le payload size | 12 u32le reserved (written 0, ignored)
 *     16 protobuf header | payload
 * Stream 0 is the connection; streams opened by an edge are odd and ascend. No sockets, no clock, no threads. */
#ifndef TANDEM_PROTOCOL_WIRE_H
#define TANDEM_PROTOCOL_WIRE_H
#include "shared/arena.h"
#include "shared/base.h"
#include "shared/status.h"
#include "protocol/limits.h"
#include "tandem.pb-c.h"

#define WIRE_PROTOCOL      1
#define WIRE_HEAD_SIZE     16
#define WIRE_FLAG_OPTIONAL 1u /* a receiver that does not know the type skips the frame */
/* limit for the arena of wire_decode: what the worst header of LIMIT_HEADER_SIZE unpacks to */
#define WIRE_ARENA_SIZE (4u << 20)

enum frame_type {
    FRAME_HELLO = 1,
    FRAME_WELCOME,
    FRAME_OPEN,
    FRAME_OPEN_ACK,
    FRAME_PLAN,
    FRAME_HIDDEN,
    FRAME_KV_BLOCK,
    FRAME_INGESTED,
    FRAME_NEED,
    FRAME_FETCH,
    FRAME_GENERATE,
    FRAME_TOKEN,
    FRAME_DONE,
    FRAME_CANCEL,
    FRAME_CREDIT,
    FRAME_PING,
    FRAME_ERROR,
    FRAME_GOAWAY,
    FRAME_TYPE_END
};
#define WIRE_FEATURE_PRIVATE 1u /* of Welcome.features: OPEN may be private */

enum hidden_dtype { HIDDEN_F32 = 0, HIDDEN_F16 = 1, HIDDEN_INT8 = 2 /* f32 scale a row, then int8 values */ };
enum finish_reason { FINISH_STOP = 0, FINISH_LENGTH = 1, FINISH_CANCELLED = 2, FINISH_ERROR = 3 };

struct wire_frame {
    uint8_t type, flags;
    uint32_t stream;
    union { /* by type; owned by the arena given to wire_decode */
        ProtobufCMessage *header;
        Tandem__Hello *hello;
        Tandem__Welcome *welcome;
        Tandem__Open *open;
        Tandem__OpenAck *open_ack;
        Tandem__Plan *plan;
        Tandem__Hidden *hidden;
        Tandem__KvBlock *kv_block;
        Tandem__Ingested *ingested;
        Tandem__Need *need;
        Tandem__Fetch *fetch;
        Tandem__Generate *generate;
        Tandem__Token *token;
        Tandem__Done *done;
        Tandem__Cancel *cancel;
        Tandem__Credit *credit;
        Tandem__Ping *ping;
        Tandem__Error *error;
        Tandem__Goaway *goaway;
    };
    struct span payload; /* borrowed from the message */
};

const char *frame_type_name(unsigned type); /* "HELLO" … or "?" */
bool frame_is_bulk(unsigned type);          /* HIDDEN, KV_BLOCK */
/* wire_check: the rules that a frame must keep by its type alone: which stream, widths of bytes fields, lengths of lists and
 * texts, what the payload may be. 0, -TD_ERR_PROTOCOL or -TD_ERR_LIMIT. wire_encode and wire_decode call it. */
int wire_check(const struct wire_frame *frame);
/* wire_encode: into dst; returns the frame's size or -TD_ERR_NOSPACE, -TD_ERR_LIMIT, or what wire_check says: a frame that a
 * peer would refuse is not made. header NULL: all fields at their defaults. */
int64_t wire_encode(unsigned type, unsigned flags, uint32_t stream, const ProtobufCMessage *header,
                    const void *payload, size_t payload_size, uint8_t *dst, size_t capacity);
/* wire_decode: hostile bytes. header_limit: LIMIT_HEADER_SIZE…. Returns 0; 1 for an unknown optional frame (skip it); or
 * -TD_ERR_PROTOCOL, -TD_ERR_LIMIT, -TD_ERR_NOMEM. Everything that it allocates comes from `arena` (WIRE_ARENA_SIZE); how much
 * is bounded by the header's size. */
int wire_decode(const void *data, size_t size, size_t header_limit, struct arena *arena,
                struct wire_frame *out);

/* Hidden rows <-> wire bytes. Both return 0; -TD_ERR_SHAPE when the bytes are not exactly (decode) or do not hold (encode)
 * hidden_wire_size; -TD_ERR_UNSUPPORTED for an unknown dtype; -TD_ERR_FORMAT for a value that is not finite, or that f16 cannot
 * hold. The size of an unknown dtype is 0. */
size_t hidden_wire_size(enum hidden_dtype dtype, uint32_t rows, uint32_t width);
int hidden_encode(enum hidden_dtype dtype, const float *rows, uint32_t row_count, uint32_t width,
                  uint8_t *dst, size_t capacity);
int hidden_decode(enum hidden_dtype dtype, struct span src, uint32_t row_count, uint32_t width, float *rows);

#endif
