/* batch: which rows of a checked batch (kernels/batch.h) take part in which layer. */
#include "kernels/cpu/cpu_backend.h"

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

static void add_chunks(struct cpu_backend *b, uint32_t seq, uint32_t kept_begin, uint32_t count)
{
    const struct model_params *p = &b->base.model->params;
    uint32_t step = TD_MAX(1u, ATTENTION_VECTORS / head_group(p));
    for (uint32_t at = 0; at < count; at += step)
        b->chunks[b->chunk_count++] =
            (struct attention_chunk){seq, kept_begin + at, TD_MIN(step, count - at), 1, 0};
}

/* Later rows see more positions and cost more: they come first in each worker's run of chunks, so that what is left for
 * the others at the end is short. */
static void turn_runs(struct cpu_backend *b)
{
    const uint32_t workers = workers_count(b->workers);
    for (uint32_t i = 0; i < workers; i++) {
        uint32_t begin = (uint32_t)((uint64_t)b->chunk_count * i / workers),
                 end = (uint32_t)((uint64_t)b->chunk_count * (i + 1) / workers);
        for (; begin + 1 < end; begin++, end--) {
            struct attention_chunk c = b->chunks[begin];
            b->chunks[begin] = b->chunks[end - 1];
            b->chunks[end - 1] = c;
        }
    }
}

/* With few chunks, which is decode of few sequences, heads alone are too few tasks: those of one row are cut by ranges of
 * pages, as far as there is room for their splits. */
static void cut_chunks(struct cpu_backend *b)
{
    const uint32_t heads = b->base.model->params.kv_head_count;
    const bool are_few = (uint64_t)b->chunk_count * heads < (uint64_t)workers_count(b->workers) * CUT_BELOW;
    b->attention_tasks = b->cut_splits = 0;
    for (uint32_t i = 0; i < b->chunk_count; i++) {
        struct attention_chunk *c = &b->chunks[i];
        const uint32_t splits = b->kept_position[c->kept_begin] / KV_BLOCK_TOKENS + 1;
        if (are_few && c->row_count == 1 && splits > SPLITS_PER_RANGE &&
            splits <= b->splits_max - b->cut_splits) {
            c->ranges = (splits + SPLITS_PER_RANGE - 1) / SPLITS_PER_RANGE;
            c->first_split = b->cut_splits;
            b->cut_splits += splits;
            for (uint32_t h = 0; h < heads; h++)
                atomic_store_explicit(&b->ranges_left[i * heads + h], c->ranges, memory_order_relaxed);
        }
        b->attention_tasks += c->ranges * heads;
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
    turn_runs(b);
    cut_chunks(b);
}
