/* wire_check: what a frame of each type must look like, whoever sent it and whenever. The order of frames is the link's
 * matter; whether a plan or a piece fits the model is the owner's. */
#include "protocol/wire_schema.h"
#include "shared/kv_seal.h"
#include <math.h>

_Static_assert(LIMIT_PROMPT_TOKENS * sizeof(uint32_t) + LIMIT_HEADER_SIZE + WIRE_HEAD_SIZE <=
                   LIMIT_FRAME_SIZE,
               "an OPEN with the longest prompt fits one frame");

static bool bytes_are(ProtobufCBinaryData field, size_t size)
{
    return field.len == size && (size == 0 || field.data);
}

static bool text_fits(const char *text, size_t limit)
{
    return strnlen(text, limit + 1) <= limit;
}

/* [first, first + count) lies within the longest prompt. */
static bool tokens_fit(uint32_t first, uint32_t count)
{
    return first <= LIMIT_PROMPT_TOKENS && count <= LIMIT_PROMPT_TOKENS - first;
}

static int check_version(const Tandem__Version *version)
{
    return version && bytes_are(version->layout, TD_HASH_SIZE) ? 0 : -TD_ERR_PROTOCOL;
}

static int check_hello(const Tandem__Hello *m)
{
    if (m->n_versions > LIMIT_VERSIONS || !text_fits(m->token, LIMIT_TOKEN_SIZE) ||
        !text_fits(m->agent, LIMIT_NAME_SIZE) || m->connection_window > LIMIT_CREDIT_SIZE ||
        m->stream_window > LIMIT_CREDIT_SIZE)
        return -TD_ERR_LIMIT;
    if (m->n_versions == 0 || !bytes_are(m->fingerprint, TD_HASH_SIZE))
        return -TD_ERR_PROTOCOL;
    for (size_t i = 0; i < m->n_versions; i++)
        if (check_version(m->versions[i]) < 0)
            return -TD_ERR_PROTOCOL;
    return 0;
}

static int check_welcome(const Tandem__Welcome *m)
{
    if (!text_fits(m->tenant, LIMIT_NAME_SIZE) || !text_fits(m->principal, LIMIT_NAME_SIZE) ||
        !text_fits(m->node, LIMIT_NAME_SIZE) || m->connection_window > LIMIT_CREDIT_SIZE ||
        m->stream_window > LIMIT_CREDIT_SIZE)
        return -TD_ERR_LIMIT;
    if (!bytes_are(m->principal_key, 32) || (m->seal.len != 0 && !bytes_are(m->seal, KV_SEAL_TAG_SIZE)))
        return -TD_ERR_PROTOCOL;
    return check_version(m->version);
}

/* Names of the prompt's whole blocks instead of its ids; and nothing that would lead to them. */
static int check_private_open(const Tandem__Open *m, size_t payload_size)
{
    size_t names = m->prompt_count / KV_BLOCK_TOKENS;
    if (m->conversation[0] || m->conversation_length != 0 || !bytes_are(m->prompt_tag, TD_HASH_SIZE))
        return -TD_ERR_PROTOCOL;
    return payload_size == names * TD_HASH_SIZE + m->held_count * sizeof(uint32_t) ? 0 : -TD_ERR_PROTOCOL;
}

/* The payload holds the ids of prompt and held tokens, less those of the conversation's known beginning. */
static int check_open(const Tandem__Open *m, size_t payload_size)
{
    if (!text_fits(m->conversation, LIMIT_NAME_SIZE) || !tokens_fit(m->prompt_count, m->held_count))
        return -TD_ERR_LIMIT;
    if (!bytes_are(m->request_id, 16) || m->prompt_count == 0 || m->conversation_length > m->prompt_count ||
        !bytes_are(m->held_hash, m->held_count ? TD_HASH_SIZE : 0) ||
        !bytes_are(m->conversation_hash, m->conversation_length ? TD_HASH_SIZE : 0))
        return -TD_ERR_PROTOCOL;
    if (m->private_prompt)
        return check_private_open(m, payload_size);
    if (m->prompt_tag.len != 0)
        return -TD_ERR_PROTOCOL;
    uint32_t sent = m->prompt_count - m->conversation_length + m->held_count;
    return payload_size == sent * sizeof(uint32_t) ? 0 : -TD_ERR_PROTOCOL;
}

static int check_ranges(Tandem__Range *const *ranges, size_t count)
{
    if (count > LIMIT_RANGES)
        return -TD_ERR_LIMIT;
    for (size_t i = 0; i < count; i++) {
        const Tandem__Range *r = ranges[i];
        if (!tokens_fit(r->first_token, r->count))
            return -TD_ERR_LIMIT;
        if (r->count == 0 || (i > 0 && r->first_token != ranges[i - 1]->first_token + ranges[i - 1]->count))
            return -TD_ERR_PROTOCOL;
    }
    return 0;
}

static int check_plan(const Tandem__Plan *m)
{
    return m->n_ranges == 0 ? -TD_ERR_PROTOCOL : check_ranges(m->ranges, m->n_ranges);
}

/* A bulk frame carries a part [offset, offset + size) of a message of `total` bytes, and never nothing. */
static int check_part(uint32_t offset, uint32_t total, size_t size)
{
    if (total > LIMIT_PIECE_SIZE)
        return -TD_ERR_LIMIT;
    return size > 0 && offset < total && size <= total - offset ? 0 : -TD_ERR_PROTOCOL;
}

static int check_hidden(const Tandem__Hidden *m, size_t payload_size)
{
    if (!tokens_fit(m->first_token, m->count))
        return -TD_ERR_LIMIT;
    return m->count > 0 ? check_part(m->offset, m->total, payload_size) : -TD_ERR_PROTOCOL;
}

/* The ids of all that lies before the last wanted block's end. Without any (version 0.1) it names no block. */
static int check_fetch(const Tandem__Fetch *m, size_t payload_size)
{
    if (payload_size == 0)
        return 0;
    if (m->block_count > LIMIT_FETCH_BLOCKS || m->layer_end > KV_LAYERS_MAX ||
        m->block_index > LIMIT_PROMPT_TOKENS / KV_BLOCK_TOKENS - LIMIT_FETCH_BLOCKS)
        return -TD_ERR_LIMIT;
    size_t tokens = ((size_t)m->block_index + m->block_count) * KV_BLOCK_TOKENS;
    return m->block_count > 0 && m->layer_begin < m->layer_end && payload_size == tokens * sizeof(uint32_t)
               ? 0
               : -TD_ERR_PROTOCOL;
}

static int check_generate(const Tandem__Generate *m, struct span payload)
{
    const float values[] = {
        m->temperature, m->top_p, m->min_p, m->repetition_penalty, m->presence_penalty, m->frequency_penalty};
    for (size_t i = 0; i < TD_COUNT(values); i++)
        if (!isfinite(values[i]))
            return -TD_ERR_PROTOCOL;
    if (payload.size % 8 != 0)
        return -TD_ERR_PROTOCOL;
    for (size_t i = 0; i < payload.size; i += 8)
        if ((load_le32(payload.data + i + 4) & 0x7f800000u) == 0x7f800000u) /* infinite or not a number */
            return -TD_ERR_PROTOCOL;
    return 0;
}

static int check_token(const Tandem__Token *m, size_t payload_size)
{
    size_t count = payload_size / sizeof(uint32_t);
    if (count == 0 || payload_size % sizeof(uint32_t) != 0 || (m->n_logprobs != 0 && m->n_logprobs != count))
        return -TD_ERR_PROTOCOL;
    for (size_t i = 0; i < m->n_logprobs; i++)
        if (m->logprobs[i]->n_top_ids != m->logprobs[i]->n_top_logprobs)
            return -TD_ERR_PROTOCOL;
    return 0;
}

static int check_by_type(const struct wire_frame *f)
{
    switch (f->type) {
    case FRAME_HELLO:
        return check_hello(f->hello);
    case FRAME_WELCOME:
        return check_welcome(f->welcome);
    case FRAME_OPEN:
        return check_open(f->open, f->payload.size);
    case FRAME_OPEN_ACK:
        return check_ranges(f->open_ack->ranges, f->open_ack->n_ranges);
    case FRAME_PLAN:
        return check_plan(f->plan);
    case FRAME_HIDDEN:
        return check_hidden(f->hidden, f->payload.size);
    case FRAME_KV_BLOCK:
        return check_part(f->kv_block->offset, f->kv_block->total, f->payload.size);
    case FRAME_NEED:
        return tokens_fit(f->need->first_token, f->need->count) ? 0 : -TD_ERR_LIMIT;
    case FRAME_FETCH:
        return check_fetch(f->fetch, f->payload.size);
    case FRAME_GENERATE:
        return check_generate(f->generate, f->payload);
    case FRAME_TOKEN:
        return check_token(f->token, f->payload.size);
    case FRAME_CREDIT:
        if (f->credit->size > LIMIT_CREDIT_SIZE)
            return -TD_ERR_LIMIT;
        return f->credit->size > 0 ? 0 : -TD_ERR_PROTOCOL;
    case FRAME_ERROR:
        return text_fits(f->error->text, LIMIT_TEXT_SIZE) ? 0 : -TD_ERR_LIMIT;
    case FRAME_GOAWAY:
        return text_fits(f->goaway->node, LIMIT_NAME_SIZE) && text_fits(f->goaway->reason, LIMIT_TEXT_SIZE)
                   ? 0
                   : -TD_ERR_LIMIT;
    default:
        return 0;
    }
}

int wire_check(const struct wire_frame *frame)
{
    const struct frame_schema *known = frame_schema(frame->type);
    if (!known)
        return -TD_ERR_PROTOCOL;
    if ((known->stream == STREAM_ZERO && frame->stream != 0) ||
        (known->stream == STREAM_SOME && frame->stream == 0))
        return -TD_ERR_PROTOCOL;
    if (known->payload == PAYLOAD_NONE && frame->payload.size != 0)
        return -TD_ERR_PROTOCOL;
    return check_by_type(frame);
}
