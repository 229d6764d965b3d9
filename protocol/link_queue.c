/* link_queue: encoded frames that wait for the socket, in one growing buffer (nothing is allocated once it is warm),
 * and the leaky bucket that counts frames. */
#include "protocol/link_internal.h"
#include <stdlib.h>

#define QUEUE_SIZE_MIN 1024u

/* Make room for `size` more bytes at the tail. */
static int frame_queue_grow(struct frame_queue *q, size_t size)
{
    size_t used = q->tail - q->head;
    if (used + size > LIMIT_CONTROL_QUEUE_SIZE)
        return -TD_ERR_FULL;
    if (q->tail + size <= q->capacity)
        return 0;
    if (used + size <= q->capacity / 2) { /* half is free: closing up is paid for by what was popped */
        memmove(q->data, q->data + q->head, used);
    } else {
        size_t capacity = TD_MAX(q->capacity, (size_t)QUEUE_SIZE_MIN);
        while (capacity < used + size)
            capacity *= 2;
        uint8_t *data = malloc(capacity);
        if (!data)
            return -TD_ERR_NOMEM;
        if (used > 0)
            memcpy(data, q->data + q->head, used);
        free(q->data);
        q->data = data;
        q->capacity = capacity;
    }
    q->head = 0;
    q->tail = used;
    return 0;
}

int frame_queue_push(struct frame_queue *q, unsigned type, uint32_t stream, const ProtobufCMessage *header,
                     const void *payload, size_t payload_size)
{
    size_t header_size = header ? protobuf_c_message_get_packed_size(header) : 0;
    if (header_size > LIMIT_HEADER_SIZE || payload_size > LIMIT_FRAME_SIZE)
        return -TD_ERR_LIMIT;
    size_t room = WIRE_HEAD_SIZE + header_size + payload_size;
    int rc = frame_queue_grow(q, 4 + room);
    if (rc < 0)
        return rc;
    int64_t size = wire_encode(type, 0, stream, header, payload, payload_size, q->data + q->tail + 4, room);
    if (size < 0)
        return (int)size;
    store_le32(q->data + q->tail, (uint32_t)size);
    q->tail += 4 + (size_t)size;
    return 0;
}

size_t frame_queue_first_size(const struct frame_queue *q)
{
    return q->head < q->tail ? load_le32(q->data + q->head) : 0;
}

size_t frame_queue_pop(struct frame_queue *q, uint8_t *dst)
{
    size_t size = frame_queue_first_size(q);
    memcpy(dst, q->data + q->head + 4, size);
    q->head += 4 + size;
    if (q->head == q->tail)
        q->head = q->tail = 0;
    return size;
}

void frame_queue_clear(struct frame_queue *q)
{
    q->head = q->tail = 0;
}

void frame_queue_free(struct frame_queue *q)
{
    free(q->data);
    *q = (struct frame_queue){0};
}

#define BUCKET_SIZE_US 1000000u

static uint64_t bucket_level_us(const struct bucket *b, uint64_t now_us)
{
    uint64_t drained = now_us > b->at_us ? now_us - b->at_us : 0;
    return b->level_us > drained ? b->level_us - drained : 0;
}

bool bucket_take(struct bucket *b, uint32_t per_s, uint64_t now_us)
{
    uint64_t level = bucket_level_us(b, now_us) + BUCKET_SIZE_US / per_s;
    if (level > BUCKET_SIZE_US)
        return false;
    b->level_us = level;
    b->at_us = now_us;
    return true;
}

uint64_t bucket_wait_us(const struct bucket *b, uint32_t per_s, uint64_t now_us)
{
    uint64_t level = bucket_level_us(b, now_us) + BUCKET_SIZE_US / per_s;
    return level > BUCKET_SIZE_US ? level - BUCKET_SIZE_US : 0;
}
