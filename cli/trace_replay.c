/* trace_replay: what each policy would have held. The rivals are written for blocks that are numbered from 0, in arrays; ours is the one that
 * the store runs (store/policy.h). */
#include "cli/trace.h"
#include "store/policy.h"
#include <stdlib.h>

#define NONE UINT32_MAX

static size_t run_of(const struct trace *t, const struct trace_request *r, const uint8_t *held)
{
    size_t run = 0;
    while (run < r->count && held[t->blocks[r->first + run]])
        run++;
    return run;
}

/* ---- ours ------------------------------------------------------------------------------------------------- */

static void number_id(uint32_t number, struct kv_block_id *id)
{
    memset(id, 0, sizeof *id);
    store_le32(id->bytes, number);
    id->bytes[4] = 1; /* no block's id is zero */
}

/* All blocks cost the same: what counts here is hits. They weigh the same too, until they are demoted. */
struct ours {
    struct policy *policy;
    uint64_t limit_size;
    bool demotes;
    uint8_t *demoted; /* by number */
    struct trace_result *out;
};

static bool has_room(const struct ours *o, uint64_t size)
{
    struct policy_stats stats;
    policy_stats(o->policy, &stats);
    return stats.size + size <= o->limit_size;
}

static int hold(struct ours *o, struct policy_block *b, bool demoted, uint64_t now_ms)
{
    b->size = demoted ? TRACE_SIZE_DEMOTED : TRACE_SIZE;
    b->lossless = !demoted;
    o->demoted[load_le32(b->id.bytes)] = demoted;
    o->out->demoted += demoted;
    return policy_insert(o->policy, b, now_ms);
}

/* 1: it is held; 0: it is not worth it. Where demotion is allowed all that is lossless is demoted before anything goes, the newcomer last. */
static int take_block(struct ours *o, struct policy_block *b, uint64_t now_ms)
{
    struct policy_victim victim;
    int rc = 0;
    while (rc == 0 && o->demotes && !has_room(o, TRACE_SIZE) &&
           policy_demote(o->policy, 0, now_ms, &victim) == 1) {
        struct policy_block small = {.id = victim.id, .tenant = 1, .cost_s = 1};
        rc = hold(o, &small, true, now_ms);
    }
    if (rc < 0)
        return rc;
    b->size = o->demotes ? TRACE_SIZE_DEMOTED : TRACE_SIZE; /* what it can come to is what counts */
    while ((rc = policy_room(o->policy, b, now_ms, &victim)) == 1)
        ;
    if (rc < 0)
        return 0;
    rc = hold(o, b, !has_room(o, TRACE_SIZE), now_ms);
    o->out->inserted += rc == 0;
    return rc < 0 ? rc : 1;
}

static int take_in(struct ours *o, const struct kv_block_id *chain, size_t count, uint64_t now_ms)
{
    int rc = 1;
    for (size_t i = 0; i < count && rc == 1; i++) {
        struct policy_block b = {.id = chain[i], .tenant = 1, .cost_s = 1};
        if (policy_holds(o->policy, 1, &b.id))
            continue;
        if (i)
            b.parent = chain[i - 1];
        rc = take_block(o, &b, now_ms);
    }
    return TD_MIN(rc, 0);
}

static int replay_ours(const struct trace *t, uint32_t capacity, bool demotes, struct trace_result *out)
{
    struct ours o = {.demotes = demotes, .out = out, .limit_size = (uint64_t)capacity * TRACE_SIZE};
    o.demoted = calloc(t->unique + 1u, 1);
    struct kv_block_id *chain = malloc(TRACE_CHAIN_MAX * sizeof *chain);
    struct policy_config config = {.limit_size = o.limit_size,
                                   .blocks_max = demotes ? 2 * capacity : capacity};
    int rc = chain && o.demoted ? policy_create(&config, &o.policy) : -TD_ERR_NOMEM;
    *out = (struct trace_result){0};
    if (rc == 0 && demotes)
        rc = policy_set_demotion(o.policy, 1, true);
    for (size_t i = 0; i < t->request_count && rc == 0; i++) {
        const struct trace_request *r = &t->requests[i];
        for (uint32_t k = 0; k < r->count; k++)
            number_id(t->blocks[r->first + k], &chain[k]);
        size_t run = policy_touch(o.policy, 1, chain, r->count, r->time_ms);
        out->hits += run;
        for (size_t k = 0; k < run; k++)
            out->lossy_hits += o.demoted[t->blocks[r->first + k]];
        rc = take_in(&o, chain, r->count, r->time_ms);
    }
    policy_destroy(o.policy);
    free(o.demoted);
    free(chain);
    return rc;
}

int trace_replay_tandem(const struct trace *t, uint32_t capacity, struct trace_result *out)
{
    return replay_ours(t, capacity, false, out);
}

int trace_replay_demoting(const struct trace *t, uint32_t capacity, struct trace_result *out)
{
    return replay_ours(t, capacity, true, out);
}

/* ---- LRU -------------------------------------------------------------------------------------------------- */

struct lru {
    uint32_t *newer, *older, newest, oldest, count;
};

static void lru_remove(struct lru *l, uint32_t b)
{
    *(l->newer[b] == NONE ? &l->newest : &l->older[l->newer[b]]) = l->older[b];
    *(l->older[b] == NONE ? &l->oldest : &l->newer[l->older[b]]) = l->newer[b];
    l->count--;
}

static void lru_add(struct lru *l, uint32_t b)
{
    l->newer[b] = NONE;
    l->older[b] = l->newest;
    *(l->newest == NONE ? &l->oldest : &l->newer[l->newest]) = b;
    l->newest = b;
    l->count++;
}

int trace_replay_lru(const struct trace *t, uint32_t capacity, struct trace_result *out)
{
    struct lru l = {.newest = NONE, .oldest = NONE};
    uint8_t *held = calloc(t->unique + 1u, 1);
    l.newer = malloc((t->unique + 1u) * sizeof *l.newer);
    l.older = malloc((t->unique + 1u) * sizeof *l.older);
    bool good = held && l.newer && l.older;
    *out = (struct trace_result){0};
    for (size_t i = 0; good && i < t->request_count; i++) {
        const struct trace_request *r = &t->requests[i];
        out->hits += run_of(t, r, held);
        for (uint32_t k = r->count; k-- > 0;) {
            uint32_t b = t->blocks[r->first + k];
            if (held[b])
                lru_remove(&l, b);
            else
                out->inserted++;
            held[b] = 1;
            lru_add(&l, b);
        }
        while (l.count > capacity) {
            held[l.oldest] = 0;
            lru_remove(&l, l.oldest);
        }
    }
    free(l.older);
    free(l.newer);
    free(held);
    return good ? 0 : -TD_ERR_NOMEM;
}

/* ---- S3-FIFO ---------------------------------------------------------------------------------------------- */

enum s3_where { S3_OUT, S3_SMALL, S3_MAIN };
struct s3_block {
    uint8_t where, frequency; /* uses while held, up to 3 */
    uint64_t left;            /* the block was the left-th to leave the small queue for good; 0: never */
};
struct s3_queue { /* a ring with room for all that is held */
    uint32_t *items, first, count, size;
};
struct s3 {
    struct s3_block *blocks;
    struct s3_queue small, main;
    uint32_t small_max, main_max;
    uint64_t left;
};

static void s3_push(struct s3_queue *q, uint32_t b)
{
    q->items[(q->first + q->count++) % q->size] = b;
}

static uint32_t s3_pop(struct s3_queue *q)
{
    uint32_t b = q->items[q->first];
    q->first = (q->first + 1) % q->size;
    q->count--;
    return b;
}

static void s3_evict_main(struct s3 *s)
{
    for (;;) {
        struct s3_block *b = &s->blocks[s->main.items[s->main.first]];
        uint32_t number = s3_pop(&s->main);
        if (b->frequency == 0) {
            b->where = S3_OUT;
            return;
        }
        b->frequency--;
        s3_push(&s->main, number);
    }
}

/* Until one block has left, what was used twice moves to the main queue. */
static void s3_evict_small(struct s3 *s)
{
    while (s->small.count) {
        uint32_t number = s3_pop(&s->small);
        struct s3_block *b = &s->blocks[number];
        if (b->frequency <= 1) {
            b->where = S3_OUT;
            b->left = ++s->left;
            return;
        }
        b->frequency = 0;
        b->where = S3_MAIN;
        s3_push(&s->main, number);
        while (s->main.count > s->main_max)
            s3_evict_main(s);
    }
}

static void s3_use(struct s3 *s, uint32_t number, struct trace_result *out)
{
    struct s3_block *b = &s->blocks[number];
    if (b->where != S3_OUT) {
        b->frequency = (uint8_t)TD_MIN(b->frequency + 1, 3);
        return;
    }
    while (s->small.count + s->main.count >= s->small_max + s->main_max) {
        if (s->small.count >= s->small_max || s->main.count == 0)
            s3_evict_small(s);
        else
            s3_evict_main(s);
    }
    bool ghost = b->left && s->left - b->left < s->main_max;
    b->frequency = 0;
    b->where = ghost ? S3_MAIN : S3_SMALL;
    s3_push(ghost ? &s->main : &s->small, number);
    out->inserted++;
}

int trace_replay_s3fifo(const struct trace *t, uint32_t capacity, struct trace_result *out)
{
    struct s3 s = {.small_max = TD_MAX(capacity / 10, 1u)};
    s.main_max = capacity - TD_MIN(s.small_max, capacity);
    s.small.size = s.main.size = capacity + 1;
    s.blocks = calloc(t->unique + 1u, sizeof *s.blocks);
    s.small.items = malloc((capacity + 1u) * sizeof *s.small.items);
    s.main.items = malloc((capacity + 1u) * sizeof *s.main.items);
    bool good = s.blocks && s.small.items && s.main.items;
    *out = (struct trace_result){0};
    for (size_t i = 0; good && i < t->request_count; i++) {
        const struct trace_request *r = &t->requests[i];
        uint32_t run = 0;
        while (run < r->count && s.blocks[t->blocks[r->first + run]].where != S3_OUT)
            run++;
        out->hits += run;
        for (uint32_t k = 0; k < r->count; k++)
            s3_use(&s, t->blocks[r->first + k], out);
    }
    free(s.main.items);
    free(s.small.items);
    free(s.blocks);
    return good ? 0 : -TD_ERR_NOMEM;
}

/* ---- Belady ----------------------------------------------------------------------------------------------- */

struct next_use {
    uint32_t request, depth, block; /* request: NONE when it is not used again */
};
struct next_heap { /* the latest on top; what is not its block's newest next use is passed over */
    struct next_use *items;
    size_t count;
};

static bool is_later(const struct next_use *a, const struct next_use *b)
{
    if (a->request != b->request)
        return a->request > b->request;
    return a->depth != b->depth ? a->depth > b->depth : a->block > b->block;
}

static void heap_push(struct next_heap *h, struct next_use item)
{
    size_t at = h->count++;
    while (at > 0 && is_later(&item, &h->items[(at - 1) / 2])) {
        h->items[at] = h->items[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    h->items[at] = item;
}

static struct next_use heap_pop(struct next_heap *h)
{
    struct next_use top = h->items[0], last = h->items[--h->count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < h->count; at = child) {
        if (child + 1 < h->count && is_later(&h->items[child + 1], &h->items[child]))
            child++;
        if (!is_later(&h->items[child], &last))
            break;
        h->items[at] = h->items[child];
    }
    h->items[at] = last;
    return top;
}

/* For each reference the request in which its block is used next. */
static uint32_t *find_next_uses(const struct trace *t)
{
    uint32_t *next = malloc((t->reference_count + 1) * sizeof *next),
             *soonest = malloc((t->unique + 1u) * sizeof *soonest);
    if (next && soonest) {
        memset(soonest, 0xff, (t->unique + 1u) * sizeof *soonest);
        for (size_t i = t->request_count; i-- > 0;)
            for (uint32_t k = t->requests[i].count; k-- > 0;) {
                size_t reference = t->requests[i].first + k;
                next[reference] = soonest[t->blocks[reference]];
                soonest[t->blocks[reference]] = (uint32_t)i;
            }
    } else {
        free(next);
        next = NULL;
    }
    free(soonest);
    return next;
}

int trace_replay_belady(const struct trace *t, uint32_t capacity, struct trace_result *out)
{
    uint32_t *next = find_next_uses(t), *newest = malloc((t->unique + 1u) * sizeof *newest),
             *came = malloc((t->unique + 1u) * sizeof *came);
    uint8_t *held = calloc(t->unique + 1u, 1);
    struct next_heap heap = {.items = malloc((t->reference_count + 1) * sizeof *heap.items)};
    bool good = next && newest && came && held && heap.items;
    size_t held_count = 0;
    *out = (struct trace_result){0};
    for (size_t i = 0; good && i < t->request_count; i++) {
        const struct trace_request *r = &t->requests[i];
        out->hits += run_of(t, r, held);
        for (uint32_t k = 0; k < r->count; k++) {
            uint32_t b = t->blocks[r->first + k];
            if (!held[b])
                came[b] = (uint32_t)i;
            out->inserted += !held[b];
            held_count += !held[b];
            held[b] = 1;
            newest[b] = next[r->first + k];
            heap_push(&heap, (struct next_use){newest[b], k, b});
        }
        while (held_count > capacity) {
            struct next_use last = heap_pop(&heap);
            if (held[last.block] && newest[last.block] == last.request) {
                held[last.block] = 0;
                held_count--;
                out->inserted -= came[last.block] == i; /* never taken in at all */
            }
        }
    }
    free(heap.items);
    free(held);
    free(came);
    free(newest);
    free(next);
    return good ? 0 : -TD_ERR_NOMEM;
}
