/* tier_block: see tier.h. */
#include "store/policy.h"
#include "store/tier.h"
#include <stdlib.h>

#define DATA_ALIGNMENT 4096u /* so that a disk may write into it directly */

struct tier_block *tier_block_create(uint32_t layers, size_t data_size)
{
    size_t head =
        align_up(sizeof(struct tier_block) + 2 * (size_t)layers * sizeof(struct span), DATA_ALIGNMENT);
    struct tier_block *b = aligned_alloc(DATA_ALIGNMENT, head + align_up(data_size, DATA_ALIGNMENT));
    if (!b)
        return NULL;
    memset(b, 0, sizeof *b + 2 * (size_t)layers * sizeof(struct span));
    atomic_init(&b->references, 1);
    b->block.pieces = b->pieces;
    b->data = (uint8_t *)b + head;
    b->data_size = data_size;
    return b;
}

void tier_block_release(struct tier_block *b)
{
    if (b && atomic_fetch_sub_explicit(&b->references, 1, memory_order_acq_rel) == 1)
        free(b);
}

/* A token's weights, and its attention over what is before it: at 8,192 tokens the second is as much as the first. Measured on a CPU; on a GPU it
 * is later. */
#define LINEAR_S    1e-3
#define ATTENTION_S (LINEAR_S / 8192)

float tier_block_cost_s(uint32_t block_index)
{
    return policy_recompute_s(block_index * KV_BLOCK_TOKENS, KV_BLOCK_TOKENS, LINEAR_S, ATTENTION_S);
}

enum tier_choice tier_choose(struct kv_quality there, uint16_t there_begin, uint16_t there_end,
                             struct kv_quality new_quality, uint16_t new_begin, uint16_t new_end)
{
    bool there_covers = there_begin <= new_begin && new_end <= there_end;
    bool new_covers = new_begin <= there_begin && there_end <= new_end;
    if (there_covers && !kv_quality_better(new_quality, there))
        return TIER_KEEP;
    if (new_covers && !kv_quality_better(there, new_quality))
        return TIER_REPLACE;
    return TIER_REFUSE;
}
