/* pipeline_emit: from computed rows and pages to messages ready for the wire. Runs on the prefill thread only. */
#include "edge/pipeline_internal.h"
#include "shared/kv_record.h"
#include <stdlib.h>

void pipeline_message_free(struct pipeline_message *m)
{
    if (!m)
        return;
    free(m->payload);
    free(m);
}

void message_list_free(struct pipeline_message *list)
{
    while (list) {
        struct pipeline_message *next = list->next;
        pipeline_message_free(list);
        list = next;
    }
}

size_t message_list_size(const struct pipeline_message *list)
{
    size_t size = 0;
    for (; list; list = list->next)
        size += list->size;
    return size;
}

void pipeline_event_free(struct pipeline_event *e)
{
    if (!e)
        return;
    message_list_free(e->messages);
    free(e);
}

/* A new message at the list's end, with room for size bytes; NULL without memory. */
static struct pipeline_message *append(struct pipeline_message **list, unsigned type, size_t size)
{
    struct pipeline_message *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->payload = malloc(size);
    if (!m->payload) {
        free(m);
        return NULL;
    }
    m->type = type;
    m->size = size;
    while (*list)
        list = &(*list)->next;
    *list = m;
    return m;
}

int emit_rows(struct pipeline *p, const float *rows, uint32_t first_token, uint32_t count, uint32_t layers,
              uint8_t dtype, struct pipeline_message **list)
{
    size_t row_size = hidden_wire_size(dtype, 1, p->embd_size);
    if (row_size == 0)
        return -TD_ERR_UNSUPPORTED;
    uint32_t step = (uint32_t)TD_MIN(TD_MAX(PIPELINE_HIDDEN_SIZE / row_size, (size_t)1),
                                     (size_t)PIPELINE_HIDDEN_ROWS_MAX);
    for (uint32_t at = 0; at < count; at += step) {
        uint32_t part = TD_MIN(step, count - at);
        struct pipeline_message *m = append(list, FRAME_HIDDEN, hidden_wire_size(dtype, part, p->embd_size));
        if (!m)
            return -TD_ERR_NOMEM;
        m->first_token = first_token + at;
        m->count = part;
        m->layer = layers;
        m->hidden_dtype = dtype;
        m->raw_size = (size_t)part * p->embd_size * sizeof(float);
        int rc =
            hidden_encode(dtype, rows + (size_t)at * p->embd_size, part, p->embd_size, m->payload, m->size);
        if (rc < 0)
            return rc;
    }
    return 0;
}

int emit_sealed(const struct pipeline *p, const struct store_block *block, struct pipeline_message **list)
{
    if (block->layer_begin != 0 || block->layer_end != p->layer_count)
        return -TD_ERR_SHAPE;
    for (uint32_t i = 0; i < 2 * p->layer_count; i++) {
        const struct span *piece = &block->pieces[i];
        struct pipeline_message *m = append(list, FRAME_KV_BLOCK, piece->size);
        if (!m)
            return -TD_ERR_NOMEM;
        memcpy(m->payload, piece->data, piece->size);
        m->block_index = block->block_index;
        m->layer = i / 2;
        m->is_value = i % 2;
        m->raw_size = sizeof(uint16_t) * kv_piece_values(&p->shape, KV_BLOCK_TOKENS);
    }
    return 0;
}

static int emit_piece(struct pipeline *p, const uint16_t *values, struct kv_piece_head *head,
                      struct pipeline_message **list)
{
    int64_t size = kv_piece_encode(p->codec, head, values, p->piece, p->piece_capacity);
    if (size < 0)
        return (int)size;
    struct pipeline_message *m = append(list, FRAME_KV_BLOCK, (size_t)size);
    if (!m)
        return -TD_ERR_NOMEM;
    memcpy(m->payload, p->piece, (size_t)size);
    m->block_index = head->block_index;
    m->layer = head->layer;
    m->is_value = head->is_value;
    m->raw_size = sizeof *values * kv_piece_values(&p->shape, head->token_count);
    return 0;
}

/* L1 stands in for lossier levels where a request wants better, so its table does not come from the settings. */
static uint8_t kv_table(const struct pipeline *p, uint8_t codec, uint8_t is_value, uint32_t block_index)
{
    if (codec == KV_L1)
        return kv_level_table(kv_level_find("l1"), is_value, block_index);
    return codec == KV_L2 ? p->config.codec_tables[is_value] : 0;
}

int emit_block(struct pipeline *p, uint32_t page, uint32_t block_index, uint32_t token_count, uint32_t layers,
               uint8_t codec, struct pipeline_message **list)
{
    struct backend *b = p->config.backend;
    for (uint32_t layer = 0; layer < layers; layer++) {
        int rc = b->ops->page_read(b, page, layer, token_count, p->key, p->value);
        for (uint8_t is_value = 0; rc == 0 && is_value < 2; is_value++) {
            struct kv_piece_head head = {
                .codec = codec,
                .is_value = is_value,
                .table = kv_table(p, codec, is_value, block_index),
                .quality = {.numerics = (uint8_t)b->ops->numerics, .provenance = KV_FROM_DEVICE},
                .block_index = block_index,
                .token_count = (uint16_t)token_count,
                .layer = (uint16_t)layer,
                .kv_head_count = (uint16_t)p->shape.kv_head_count,
                .head_dim = (uint16_t)p->shape.head_dim,
            };
            rc = emit_piece(p, is_value ? p->value : p->key, &head, list);
        }
        if (rc < 0)
            return rc;
    }
    return 0;
}
