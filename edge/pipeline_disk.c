/* pipeline_disk: the device's own KV on its way to the disk and back. Runs on the prefill thread only, as pages are its own.
 *
 * Saving waits until nothing is to be sent: what has been published is noted, and one block after the other is encoded and given to the disk then. A block
 * that has given way in memory meanwhile is not saved: PIPELINE_SAVES_MAX of them are noted, later ones are not.
 *
 * Fetching brings the next block of a prompt into memory's cache, where it is taken like any other. It has a budget: all waiting for one prompt is at most
 * what computing the blocks that it got would have taken, and one block, or the disk's patience, more. So it is never slower than computing by more than that.
 *
 * Sealed blocks (fetcher.h) are only read, and sent. */
#include "edge/estimates.h"
#include "edge/fetcher.h"
#include "edge/pipeline_internal.h"
#include <stdlib.h>

#define SMOOTH             0.25
#define SEALED_PATIENCE_US 500000u /* for one block: the link needs longer for most */

/* ---- saving ---- */

void disk_note(struct pipeline *p, const struct pipeline_job *job, uint32_t index)
{
    struct pipeline_saves *q = &p->saves;
    if (!local_kv_disk(p->config.kv) || q->count == PIPELINE_SAVES_MAX)
        return;
    struct pipeline_save *save = &q->list[(q->first + q->count++) % PIPELINE_SAVES_MAX];
    *save = (struct pipeline_save){.id = job->chain[index], .index = index, .layers = job->depth};
    if (index > 0)
        save->parent = job->chain[index - 1];
}

static int save_page(struct pipeline *p, const struct pipeline_save *save, uint32_t page)
{
    struct pipeline_message *list = NULL;
    struct span *pieces = malloc(2 * (size_t)save->layers * sizeof *pieces);
    int rc = pieces ? emit_block(p, page, save->index, KV_BLOCK_TOKENS, save->layers, KV_L0, &list)
                    : -TD_ERR_NOMEM;
    struct store_block block = {
        .id = save->id,
        .parent = save->parent,
        .quality = {.fidelity = KV_L0,
                    .numerics = (uint8_t)p->config.backend->ops->numerics,
                    .provenance = KV_FROM_DEVICE},
        .block_index = save->index,
        .layer_end = (uint16_t)save->layers,
        .pieces = pieces,
    };
    struct span *at = pieces;
    for (const struct pipeline_message *m = rc == 0 ? list : NULL; m; m = m->next)
        *at++ = (struct span){m->payload, m->size};
    if (rc == 0)
        rc = kv_disk_put(local_kv_disk(p->config.kv), &block);
    message_list_free(list);
    free(pieces);
    return rc;
}

bool disk_has_saves(const struct pipeline *p)
{
    return p->saves.count > 0;
}

void disk_save_next(struct pipeline *p)
{
    uint32_t page;
    struct pipeline_saves *q = &p->saves;
    struct pipeline_save save = q->list[q->first];
    q->first = (q->first + 1) % PIPELINE_SAVES_MAX;
    q->count--;
    if (!kv_disk_lacks(local_kv_disk(p->config.kv), &save.id, save.layers) ||
        local_kv_take(p->config.kv, &save.id, 1, save.layers, &page) == 0)
        return;
    save_page(p, &save, page); /* counted when it fails; it can be computed again */
    local_kv_release(p->config.kv, page);
}

/* ---- fetching ---- */

void disk_computed(struct pipeline *p, const struct pipeline_cost *cost)
{
    double ns = (double)cost->compute_us * 1e3 / ((double)cost->tokens * cost->layers);
    p->layer_ns = p->layer_ns > 0 ? p->layer_ns + SMOOTH * (ns - p->layer_ns) : ns;
}

static int decode_piece(struct pipeline *p, const struct store_block *b, uint32_t layer, uint8_t is_value)
{
    uint16_t *values = is_value ? p->value : p->key;
    struct span piece = b->pieces[2 * layer + is_value], payload;
    struct kv_piece_head head;
    int rc = kv_piece_parse(piece.data, piece.size, &head, &payload);
    if (rc < 0)
        return rc;
    bool same = head.layer == layer && head.is_value == is_value && head.block_index == b->block_index &&
                head.codec == KV_L0 && head.first_token == 0 && head.token_count == KV_BLOCK_TOKENS &&
                head.kv_head_count == p->shape.kv_head_count && head.head_dim == p->shape.head_dim;
    return same ? kv_piece_decode(p->codec, &head, payload, values,
                                  kv_piece_values(&p->shape, KV_BLOCK_TOKENS))
                : -TD_ERR_SHAPE;
}

/* The name says what the block is; all else must be what this device would have computed itself. */
static int fill_page(struct pipeline *p, const struct store_block *b, uint32_t index, uint32_t layers,
                     uint32_t page)
{
    struct backend *backend = p->config.backend;
    int rc = b->layer_begin == 0 && b->layer_end >= layers && b->block_index == index &&
                     b->quality.fidelity == KV_L0 && b->quality.numerics == backend->ops->numerics
                 ? 0
                 : -TD_ERR_SHAPE;
    for (uint32_t layer = 0; layer < layers && rc == 0; layer++) {
        rc = decode_piece(p, b, layer, 0);
        if (rc == 0)
            rc = decode_piece(p, b, layer, 1);
        if (rc == 0)
            rc = backend->ops->page_write(backend, page, layer, KV_BLOCK_TOKENS, p->key, p->value);
    }
    return rc;
}

/* Of a block that has more layers than are wanted now these alone are decoded: that is what reading takes its time for. */
static bool cache_block(struct pipeline *p, struct pipeline_job *job, const struct store_block *b,
                        uint32_t layers)
{
    uint32_t index = job->page_count;
    uint32_t page = local_kv_alloc(p->config.kv);
    if (page == PAGE_NONE)
        return false;
    bool good = fill_page(p, b, index, layers, page) == 0 &&
                local_kv_publish(p->config.kv, job->chain, index, page, layers,
                                 p->config.backend->ops->numerics) == 0;
    local_kv_release(p->config.kv, page);
    return good && local_kv_held(p->config.kv, job->chain + index, 1, layers) == 1;
}

bool disk_fetch(struct pipeline *p, struct pipeline_job *job, uint32_t limit_tokens, uint32_t layers)
{
    struct kv_disk *disk = local_kv_disk(p->config.kv);
    uint32_t limit = TD_MIN(limit_tokens / KV_BLOCK_TOKENS, job->chain_count);
    if (!disk || layers == 0 || job->no_disk || job->position != job->page_count * KV_BLOCK_TOKENS ||
        job->page_count >= limit || kv_disk_layers(disk, &job->chain[job->page_count]) < layers)
        return false;
    double ns = p->layer_ns > 0 ? p->layer_ns : ESTIMATES_COST_UNKNOWN;
    uint64_t start_us = clock_mono_us(), block_us = (uint64_t)(ns * KV_BLOCK_TOKENS * layers / 1e3);
    uint64_t budget_us =
        job->spared_us +
        TD_MAX(block_us, p->config.disk_patience_us ? p->config.disk_patience_us : DISK_PATIENCE_US);
    struct tier_block *block = NULL;
    bool good = job->fetch_us < budget_us &&
                kv_disk_take(disk, job->chain + job->page_count, limit - job->page_count,
                             budget_us - job->fetch_us, &block) == 0 &&
                cache_block(p, job, &block->block, layers);
    uint64_t took_us = clock_mono_us() - start_us;
    if (good)
        kv_disk_measured(disk, took_us, layers);
    tier_block_release(block);
    job->fetch_us += took_us;
    job->spared_us += good ? block_us : 0;
    job->no_disk = !good;
    return good;
}

/* ---- sealed blocks ---- */

int disk_sealed(struct pipeline *p, const struct pipeline_job *job, const uint8_t *tag, uint32_t block,
                uint32_t end, struct pipeline_message **list)
{
    struct kv_disk *disk = local_kv_disk(p->config.kv);
    struct kv_block_id ids[KV_DISK_AHEAD];
    struct tier_block *found = NULL;
    uint32_t count = block < end && end <= job->chain_count ? TD_MIN(end - block, KV_DISK_AHEAD) : 0;
    if (!disk || count == 0)
        return -TD_ERR_NOTFOUND;
    for (uint32_t i = 0; i < count; i++)
        sealed_block_id(tag, &job->chain[block + i], &ids[i]);
    uint64_t patience_us = TD_MAX(p->config.disk_patience_us, SEALED_PATIENCE_US);
    int rc = kv_disk_take(disk, ids, count, patience_us, &found);
    if (rc == 0)
        rc = found->block.block_index == block ? emit_sealed(p, &found->block, list) : -TD_ERR_MISMATCH;
    tier_block_release(found);
    return rc;
}
