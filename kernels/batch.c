/* batch: see batch.h. */
#include "kernels/batch.h"

static bool all_finite(const float *x, size_t count)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return bad == 0;
}

static int check_input(const struct model_params *p, const struct batch_seq *s)
{
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

static int check_seq(const struct backend *b, bool has_head, const struct batch_seq *s)
{
    const struct model_params *p = &b->model->params;
    bool logits_only = s->layer_begin == p->layer_count && s->layer_end == p->layer_count;
    if (s->row_count == 0 || (!logits_only && s->layer_begin >= s->layer_end))
        return -TD_ERR_ARG;
    if (!logits_only && s->layer_end > b->layers_paged)
        return -TD_ERR_UNSUPPORTED; /* layers that are not held here */
    bool ends = s->logits || s->sample;
    if (ends ? s->logit_count == 0 || s->logit_count > s->row_count || s->layer_end != p->layer_count
             : s->logit_count != 0)
        return -TD_ERR_ARG;
    if (ends && !has_head)
        return -TD_ERR_UNSUPPORTED;
    if (s->sample && !b->ops->samples)
        return -TD_ERR_UNSUPPORTED;
    if (s->sample && (s->logits || s->logit_count != 1 || s->sample->adjust_count > SAMPLE_ADJUST_MAX))
        return -TD_ERR_ARG;
    if (logits_only)
        return check_input(p, s);
    if (s->position > p->context_max || s->row_count > p->context_max - s->position)
        return -TD_ERR_CONTEXT;
    if (!s->pages)
        return -TD_ERR_ARG;
    uint32_t page_count = (s->position + s->row_count - 1) / KV_BLOCK_TOKENS + 1;
    for (uint32_t i = 0; i < page_count; i++)
        if (s->pages[i] >= b->page_count)
            return -TD_ERR_ARG;
    return check_input(p, s);
}

int batch_check(const struct backend *b, uint32_t rows_max, bool has_head, const struct batch *batch)
{
    if (batch->count > 0 && !batch->seqs)
        return -TD_ERR_ARG;
    if (batch->count > BATCH_SEQS_MAX)
        return -TD_ERR_LIMIT;
    uint64_t rows = 0;
    for (uint32_t i = 0; i < batch->count; i++)
        rows += batch->seqs[i].row_count;
    if (rows > rows_max)
        return -TD_ERR_LIMIT;
    for (uint32_t i = 0; i < batch->count; i++) {
        int rc = check_seq(b, has_head, &batch->seqs[i]);
        if (rc)
            return rc;
    }
    return 0;
}
