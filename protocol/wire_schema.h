/* wire_schema: what is fixed for each frame type, in one table: its name, its header's message, who may send it, on
 * which streams, and what its payload is. wire.c and the link read it; nothing else decides these. */
#ifndef TANDEM_PROTOCOL_WIRE_SCHEMA_H
#define TANDEM_PROTOCOL_WIRE_SCHEMA_H
#include "protocol/wire.h"

enum { FROM_EDGE = 1, FROM_CLOUD = 2 };
enum stream_rule { STREAM_ZERO, STREAM_SOME, STREAM_ANY };
enum payload_rule { PAYLOAD_NONE, PAYLOAD_IDS, PAYLOAD_BIAS, PAYLOAD_BULK };

struct frame_schema {
    const char *name;
    const ProtobufCMessageDescriptor *descriptor;
    uint8_t from; /* FROM_* */
    uint8_t stream, payload;
};

/* frame_schema: NULL for a type that this version does not know. */
const struct frame_schema *frame_schema(unsigned type);

#endif
