/* sequence: life, tokens and what is staged. Plans are in sequence_plan.c, the choice of work in sequence_work.c. */
#include "cloud/sequence.h"
#include "kernels/page_pool.h"
#include "shared/crypto.h"
#include <stdlib.h>

static int take_memory(struct sequence *s, const struct seq_model *m, uint32_t tokens_max)
{
    s->block_capacity = sequence_blocks(tokens_max) + 1;
    s->have_words = (m->shape.layer_count * 2 + 63) / 64;
    s->blocks = calloc(s->block_capacity, sizeof *s->blocks);
    s->pages = malloc(s->block_capacity * sizeof *s->pages);
    s->have = calloc((size_t)s->block_capacity * s->have_words, sizeof *s->have);
    return s->blocks && s->pages && s->have ? 0 : -TD_ERR_NOMEM;
}

/* Ids of blocks that have become full: both chains, from the root on. */
static void extend_chains(struct sequence *s, const struct seq_model *m)
{
    static const struct kv_block_id root;
    if (s->is_private)
        return;
    for (; s->chain_count < s->ids_count / KV_BLOCK_TOKENS; s->chain_count++) {
        struct seq_block *b = &s->blocks[s->chain_count];
        const int32_t *ids = s->ids + (size_t)s->chain_count * KV_BLOCK_TOKENS;
        kv_block_id_next(s->shared_key, s->chain_count ? &b[-1].shared : &root, m->fingerprint,
                         m->layout_hash, ids, &b->shared);
        kv_block_id_next(s->own_key, s->chain_count ? &b[-1].own : &root, m->fingerprint, m->layout_hash, ids,
                         &b->own);
    }
}

bool sequence_takes_sealed(struct sequence *s, const struct seq_model *m, const struct ingest_piece *piece)
{
    static const struct kv_block_id root;
    uint32_t block = piece->head.block_index;
    if (s->is_private || block >= s->ids_count / KV_BLOCK_TOKENS)
        return false;
    for (; s->sealed_count <= block; s->sealed_count++) {
        struct seq_block *b = &s->blocks[s->sealed_count];
        kv_block_id_next(s->seal_key, s->sealed_count ? &b[-1].sealed : &root, m->fingerprint, m->layout_hash,
                         s->ids + (size_t)s->sealed_count * KV_BLOCK_TOKENS, &b->sealed);
    }
    return memcmp(&s->blocks[block].sealed, &piece->name, sizeof piece->name) == 0 &&
           kv_quality_accepts(piece->head.quality, s->accept, m->numerics);
}

/* Blocks of a private prompt have one name each, which is the principal's own in any case: the only place to look for it, and to put it. */
static void take_names(struct sequence *s, struct engine_open *open)
{
    s->is_private = open->is_private;
    if (!s->is_private)
        return;
    s->chain_count = s->prompt_count / KV_BLOCK_TOKENS;
    for (uint32_t i = 0; i < s->chain_count; i++)
        s->blocks[i].shared = s->blocks[i].own = open->names[i];
    free(open->names);
    open->names = NULL;
}

static struct kv_quality fresh_quality(const struct seq_model *m)
{
    return (struct kv_quality){
        .fidelity = KV_L0, .numerics = (uint8_t)m->numerics, .provenance = KV_FROM_CLOUD};
}

struct sequence *sequence_create(const struct seq_model *m, struct engine_open *open, uint64_t key)
{
    struct sequence *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->hidden_last = &s->hidden_first;
    s->pieces_last = &s->pieces_first;
    uint32_t count = open->prompt_count + open->held_count;
    s->ids_capacity = TD_MAX(count, m->context_max) + 1;
    s->ids = malloc(s->ids_capacity * sizeof *s->ids);
    if (!s->ids || take_memory(s, m, s->ids_capacity) < 0) {
        sequence_free(s);
        return NULL;
    }
    memcpy(s->ids, open->ids, count * sizeof *s->ids);
    crypto_wipe(open->ids, count * sizeof *open->ids);
    free(open->ids);
    open->ids = NULL;
    s->ids_count = s->plan_end = count;
    s->prompt_count = open->prompt_count;
    s->key = s->arrival = key;
    s->sink = open->sink;
    s->sink_ctx = open->sink_ctx;
    memcpy(s->tenant, open->tenant, sizeof s->tenant);
    memcpy(s->principal, open->principal, sizeof s->principal);
    memcpy(s->shared_key, open->shared_key, sizeof s->shared_key);
    memcpy(s->own_key, open->own_key, sizeof s->own_key);
    memcpy(s->seal_key, open->seal_key, sizeof s->seal_key);
    s->accept = open->accept;
    s->no_cache = open->no_cache;
    s->direct = open->direct;
    s->own_from = s->left_from = UINT32_MAX;
    s->quality = fresh_quality(m);
    s->edge_numerics = open->edge_numerics ? open->edge_numerics : (uint8_t)m->numerics;
    for (uint32_t i = 0; i < s->block_capacity; i++)
        s->pages[i] = PAGE_NONE;
    if (s->direct) { /* one range, from ids */
        s->planned = true;
        s->ids_until = UINT32_MAX;
    }
    take_names(s, open);
    extend_chains(s, m);
    return s;
}

static void wipe_ids(struct sequence *s)
{
    if (s->ids)
        crypto_wipe(s->ids, s->ids_capacity * sizeof *s->ids);
    free(s->ids);
    s->ids = NULL;
}

static void drop_staged(struct sequence *s)
{
    for (struct seq_hidden *next, *h = s->hidden_first; h; h = next) {
        next = h->next;
        sequence_consume(s, h->size);
        free(h->payload);
        free(h);
    }
    for (struct ingest_piece *next, *p = s->pieces_first; p; p = next) {
        next = p->next;
        sequence_consume(s, p->wire_size);
        ingest_piece_free(p);
    }
    s->hidden_first = NULL;
    s->hidden_last = &s->hidden_first;
    s->pieces_first = NULL;
    s->pieces_last = &s->pieces_first;
    s->unpacked_size = 0;
}

void sequence_free(struct sequence *s)
{
    if (!s)
        return;
    drop_staged(s);
    wipe_ids(s);
    free(s->sealed);
    crypto_wipe(s->shared_key, sizeof s->shared_key);
    crypto_wipe(s->own_key, sizeof s->own_key);
    crypto_wipe(s->seal_key, sizeof s->seal_key);
    free(s->blocks);
    free(s->pages);
    free(s->have);
    free(s->sampled);
    free(s);
}

/* One key a sequence: ids only grow between two sealings, but the same nonce must not see two texts. */
static void seal_key(const struct sequence *s, const uint8_t key[CRYPTO_KEY_SIZE],
                     uint8_t out[CRYPTO_KEY_SIZE])
{
    uint8_t info[12];
    store_le64(info, s->key);
    store_le32(info + 8, s->ids_count);
    hkdf_sha256(key, NULL, 0, info, sizeof info, out);
}

void sequence_seal(struct sequence *s, const uint8_t key[CRYPTO_KEY_SIZE])
{
    uint8_t own[CRYPTO_KEY_SIZE];
    size_t size = s->ids_count * sizeof *s->ids;
    free(s->sealed);
    s->sealed = malloc(size + CRYPTO_TAG_SIZE);
    if (!s->sealed)
        return;
    seal_key(s, key, own);
    if (gcm_seal(own, 0, NULL, 0, s->ids, size, s->sealed, s->sealed + size) == 0) {
        wipe_ids(s);
    } else {
        free(s->sealed);
        s->sealed = NULL;
    }
    crypto_wipe(own, sizeof own);
}

int sequence_unseal(struct sequence *s, const uint8_t key[CRYPTO_KEY_SIZE])
{
    if (s->ids)
        return 0;
    uint8_t own[CRYPTO_KEY_SIZE];
    size_t size = s->ids_count * sizeof *s->ids;
    s->ids = malloc(s->ids_capacity * sizeof *s->ids);
    if (!s->ids)
        return -TD_ERR_NOMEM;
    seal_key(s, key, own);
    int rc = gcm_open(own, 0, NULL, 0, s->sealed, size, s->ids, s->sealed + size);
    crypto_wipe(own, sizeof own);
    if (rc < 0)
        wipe_ids(s);
    return rc;
}

void sequence_append(struct sequence *s, const struct seq_model *m, int32_t id)
{
    s->ids[s->ids_count++] = id;
    extend_chains(s, m);
}

uint32_t sequence_reply_count(const struct sequence *s)
{
    return s->ids_count - s->prompt_count;
}

int sequence_set_generate(struct sequence *s, const struct seq_model *m, const struct engine_generate *g)
{
    uint32_t room = m->context_max - TD_MIN(s->prompt_count, m->context_max);
    uint32_t reply_max = g->token_count_max && g->token_count_max < room ? g->token_count_max : room;
    if (g->sampling.want_logprobs) {
        s->sampled = calloc(TD_MAX(reply_max, sequence_reply_count(s)) + 1, sizeof *s->sampled);
        if (!s->sampled)
            return -TD_ERR_NOMEM;
    }
    s->generate = *g;
    s->reply_max = reply_max;
    s->started = true;
    return 0;
}

void sequence_truncate(struct sequence *s, uint32_t keep_count)
{
    s->ids_count = TD_MIN(s->ids_count, s->prompt_count + keep_count);
    s->chain_count = TD_MIN(s->chain_count, s->ids_count / KV_BLOCK_TOKENS);
    s->high = TD_MIN(s->high, s->ids_count);
    s->complete = TD_MIN(s->complete, s->high);
    s->published = TD_MIN(s->published, s->chain_count);
}

/* --- staging -------------------------------------------------------------------------------------- */

void sequence_consume(struct sequence *s, size_t size)
{
    s->staged_size -= TD_MIN(size, s->staged_size);
    s->consumed_size += (uint32_t)size;
    s->ingested_dirty = true;
}

void sequence_stage_piece(struct sequence *s, struct ingest_piece *piece)
{
    *s->pieces_last = piece; /* a fresh one: no next */
    s->pieces_last = &piece->next;
    s->unpacked_size += piece->values_size;
}

void sequence_void_plan(struct sequence *s)
{
    drop_staged(s);
    s->planned = true;
    s->away = false;
    s->ids_until = UINT32_MAX;
    s->pieces_lost = true;
    s->may_resume = false;
}

void sequence_ask_again(struct sequence *s)
{
    uint32_t first = s->complete / KV_BLOCK_TOKENS;
    drop_staged(s);
    for (uint32_t i = first; i < s->block_capacity; i++) {
        struct seq_block *b = &s->blocks[i];
        b->edge_layers = b->missing = 0;
        b->closed = false;
        memset(s->have + (size_t)i * s->have_words, 0, s->have_words * sizeof *s->have);
    }
    s->high = s->complete = s->hidden_next = first * KV_BLOCK_TOKENS;
    s->planned = s->pieces_lost = s->device_wanted = false;
    s->ids_until = s->range_count = 0;
    s->blocked_us = s->idle_since_us = 0;
    s->asked++;
}

void sequence_restart(struct sequence *s, const struct seq_model *m)
{
    sequence_void_plan(s);
    for (uint32_t i = 0; i < s->block_capacity; i++) {
        struct seq_block *b = &s->blocks[i];
        b->edge_layers = b->missing = 0;
        b->fidelity = b->numerics = 0;
        b->from_device = b->closed = b->on_disk = b->swapped = b->loaded = false;
    }
    memset(s->have, 0, (size_t)s->block_capacity * s->have_words * sizeof *s->have);
    s->high = s->complete = s->cached_count = s->published = s->hidden_next = 0;
    s->refill_begin = s->refill_end = 0;
    s->own_from = UINT32_MAX;
    s->quality = fresh_quality(m);
    s->load_id = 0;
    s->blocked_us = s->idle_since_us = 0;
    s->device_wanted = false;
}

void sequence_set_back(struct sequence *s, const struct seq_model *m)
{
    for (uint32_t i = 0; i < s->block_capacity; i++)
        s->blocks[i].on_disk = s->blocks[i].swapped = s->blocks[i].loaded = false;
    s->high = s->complete = s->cached_count = s->published = 0;
    s->own_from = UINT32_MAX;
    s->quality = fresh_quality(m);
    s->blocked_us = s->idle_since_us = 0;
    sequence_plan_blocks(s);
}

void sequence_set_cached(struct sequence *s, uint32_t count)
{
    s->high = s->complete = s->cached_count = count * KV_BLOCK_TOKENS;
    s->published = count;
    for (uint32_t i = 0; i < count; i++) {
        s->blocks[i].closed = true;
        s->blocks[i].edge_layers = s->blocks[i].missing = 0;
    }
}

void sequence_skip(struct sequence *s, uint32_t count)
{
    for (uint32_t i = s->high / KV_BLOCK_TOKENS; i < count; i++)
        s->blocks[i].closed = s->blocks[i].loaded = true;
    s->high = s->complete = count * KV_BLOCK_TOKENS;
}

bool sequence_is_own_work(const struct sequence *s, uint32_t count)
{
    for (uint32_t i = 0; i < s->range_count; i++)
        if (s->ranges[i].layers > 0 && s->ranges[i].first_token < count * KV_BLOCK_TOKENS)
            return false;
    return s->planned;
}
