/* batch: is a batch well formed, and which rows take part in which layer. A bad batch is refused whole,
 * before a page is touched: what a peer or a scheduler got wrong is a code, never a crash. */
#include "kernels/cpu/cpu_backend.h"

static bool all_finite(const float *x, size_t count)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = float_bits(x[i]) & 0x7f800000u;
        bad |= bits == 0x7f800000u;
    }
    return bad == 0;
}

static int check_input(const struct cpu_backend *b, const struct batch_seq *s)
{
    const struct model_params *p = &b->base.model->params;
    if (s->layer_begin > 0) {
        if (!s->hidden_in || s->ids)
            return -TD_ERR_ARG;
        return all_finite(s->hidden_in, (size_t)s->row_count * p->embd_size) ? 0 : -TD_ERR_FORMAT;
    }
    if (!s->ids || s->hidden_in)
        return -TD_ERR_ARG;
    for (uint32_t i = 0; i < s->row_count; i++)
        if (s->ids[i] < 0 || (uint32_t)s->ids[i] >= p->vocab_count)
            return -TD_ERR_ARG;
    return 0;
}

static int check_seq(const struct cpu_backend *b, const struct batch_seq *s)
{
    const struct model_params *p = &b->base.model->params;
    bool logits_only = s->layer_begin == p->layer_count && s->layer_end == p->layer_count;
    if (s->row_count == 0 || (!logits_only && s->layer_begin >= s->layer_end))
        return -TD_ERR_ARG;
    if (!logits_only && s->layer_end > b->base.layers_paged)
        return -TD_ERR_UNSUPPORTED; /* layers that are not held here */
    if (s->logits ? s->logit_count == 0 || s->logit_count > s->row_count || s->layer_end != p->layer_count
                  : s->logit_count != 0)
        return -TD_ERR_ARG;
    if (s->logits && !b->has_head)
        return -TD_ERR_UNSUPPORTED;
    if (logits_only)
        return check_input(b, s);
    if (s->position > p->context_max || s->row_count > p->context_max - s->position)
        return -TD_ERR_CONTEXT;
    if (!s->pages)
        return -TD_ERR_ARG;
    uint32_t page_count = (s->position + s->row_count - 1) / KV_BLOCK_TOKENS + 1;
    for (uint32_t i = 0; i < page_count; i++)
        if (s->pages[i] >= b->base.page_count)
            return -TD_ERR_ARG;
    return check_input(b, s);
}

int batch_check(const struct cpu_backend *b, const struct batch *batch)
{
    if (batch->count > BATCH_SEQS_MAX || (batch->count > 0 && !batch->seqs))
        return batch->seqs ? -TD_ERR_LIMIT : -TD_ERR_ARG;
    uint64_t rows = 0;
    for (uint32_t i = 0; i < batch->count; i++)
        rows += batch->seqs[i].row_count;
    if (rows > b->rows_max)
        return -TD_ERR_LIMIT;
    for (uint32_t i = 0; i < batch->count; i++) {
        int rc = check_seq(b, &batch->seqs[i]);
        if (rc)
            return rc;
    }
    return 0;
}

void batch_map_rows(struct cpu_backend *b, const struct batch *batch)
{
    b->batch = batch;
    b->row_count = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        b->seq_row[i] = b->row_count;
        for (uint32_t r = 0; r < batch->seqs[i].row_count; r++) {
            b->row_seq[b->row_count] = i;
            b->row_position[b->row_count++] = batch->seqs[i].position + r;
        }
    }
}

/* In a sequence's last layer only the rows that somebody wants to see go on behind K and V. */
static uint32_t rows_kept(const struct batch_seq *s, uint32_t layer)
{
    return layer + 1 < s->layer_end || s->hidden_out ? s->row_count : s->logit_count;
}

/* Later rows see more positions and cost more: their chunks come first, so that no thread ends with a long
 * one. */
static void add_chunks(struct cpu_backend *b, uint32_t seq, uint32_t kept_begin, uint32_t count)
{
    const struct model_params *p = &b->base.model->params;
    uint32_t step = TD_MAX(1u, ATTENTION_VECTORS / (p->head_count / p->kv_head_count));
    for (uint32_t left = count; left > 0;) {
        uint32_t size = TD_MIN(left, step);
        left -= size;
        b->chunks[b->chunk_count++] = (struct attention_chunk){seq, kept_begin + left, size};
    }
}

void batch_map_layer(struct cpu_backend *b, uint32_t layer)
{
    b->all_count = b->kept_count = b->chunk_count = 0;
    for (uint32_t i = 0; i < b->batch->count; i++) {
        const struct batch_seq *s = &b->batch->seqs[i];
        if (layer < s->layer_begin || layer >= s->layer_end)
            continue;
        uint32_t kept = rows_kept(s, layer), kept_begin = b->kept_count;
        for (uint32_t r = 0; r < s->row_count; r++) {
            if (r >= s->row_count - kept) {
                b->kept[b->kept_count] = b->seq_row[i] + r;
                b->kept_from[b->kept_count] = b->all_count;
                b->kept_position[b->kept_count++] = s->position + r;
            }
            b->all[b->all_count++] = b->seq_row[i] + r;
        }
        add_chunks(b, i, kept_begin, kept);
    }
}
